"""The question of chapter 00. Refuses to ask for numbers."""

from __future__ import annotations

from labkit.lab.quiz import Quiz

RECAP = Quiz(
    id="00.recap",
    question="A chart shows a step marked RECORDED. What do you know about it?",
    options=(
        (
            "It was measured on the machine that is named, before today.",
            True,
            "It is looked up from a file that also names the driver, the versions and the date.",
        ),
        (
            "It was measured on this computer when Run was pressed.",
            False,
            "That would be LIVE. A recorded step comes from another machine, which the badge names.",
        ),
        (
            "It was computed from a model of the GPU.",
            False,
            "That would be SIMULATED. Between two recorded points nothing is computed: the nearest one is shown.",
        ),
    ),
)
