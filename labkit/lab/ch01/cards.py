"""The cards of chapter 01: a learner's floor for known models, the myth check, the row of the scoreboard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from labkit.lab import scoreboard, trial, ui
from labkit.lab.cards import Card, paragraph
from labkit.lab.ch01.exercises import FLOOR_MS
from labkit.lab.ch01.recorded import recorded_sources
from labkit.lab.exercises import check
from labkit.lab.myths import COMPUTED, Myth, myth_card, recorded_myths
from labkit.lab.progress import solutions_wanted
from labkit.lab.runs import Context
from labkit.simulate.claims import TEXT_GB_S
from labkit.simulate.queue import Work, run_queue

SCORE = "decode step, eager"
#: (what, parameters, bits, GPUs); the bandwidth is the one that the source text calculates with.
ASKED = (
    ("8 B parameters, one GPU", 8e9, 16, 1), ("70 B parameters, eight GPUs", 70e9, 16, 8),
    ("1 B parameters in 4 bits, one GPU", 1e9, 4, 1), ("0.135 B parameters, one GPU", 0.135e9, 16, 1),
)  # fmt: skip


def floors(answer: Callable[..., Any]) -> Card:
    """What a learner's `floor_ms` says of four models; nothing while it does not pass its check."""
    fn = FLOOR_MS.solution if solutions_wanted() else answer
    if not check(FLOOR_MS, fn).passed:
        return Card("floors: write floor_ms first", paragraph("Write `floor_ms` first; then this table is yours."))
    rows = [
        {"what": what, "ms": f"{float(trial.call(fn, (n, bits, TEXT_GB_S, tp)).value):.2f}"}
        for what, n, bits, tp in ASKED
    ]
    head = [("what", f"weights at {TEXT_GB_S:,.0f} GB/s"), ("ms", "floor, ms#")]
    said = "SIMULATED: computed by your function. None of it is the time of a step; it is what no step can beat."
    return Card(f"floors: {len(rows)} models", ui.table("Your floors", head, rows) + paragraph(said, quiet=True))


def sum_or_queue() -> tuple[float, float]:
    """An 8B-like step by the text's numbers, in ms: (as a sum, as a queue). 50 kernels of 100 µs, 10 µs a launch."""
    kernels = [Work(f"k{i}", "other", 100.0, 10.0) for i in range(50)]
    return 50 * (100.0 + 10.0) / 1e3, run_queue(kernels).wall_us / 1e3


def myths() -> Card:
    """The claims of the source texts that this chapter touches."""
    added, queued = sum_or_queue()
    own = Myth(
        f"5 ms of GPU work and 0.5 ms of launches make a step of {added:.1f} ms.",
        f"SIMULATED: 50 kernels of 100 µs with 10 µs a launch take {queued:.2f} ms. The launches overlap with the "
        "work, so that they do not add up. A step is nearer to the larger of the two.",
        "does not hold", COMPUTED, "the cell “As a sum, and as a queue”, exercise 01.1",
    )  # fmt: skip
    panel = "the panel, source RECORDED"
    return myth_card([
        *recorded_myths({"launch-cost": panel, "kernels-50": panel, "kernels-hundreds": panel}), own,
        *recorded_myths({"8b-data": "exercise 01.3", "70b-tp8-data": "exercise 01.3", "overhead-dominates": panel}),
    ])  # fmt: skip


def note_score(runs: Sequence[Any]) -> Card:
    """Put the smallest recorded eager step on the board, whatever else the panel ran, and show the board.

    runs: of the panel; of several machines, the one that was looked at last counts.
    """
    sources, _ = recorded_sources()
    if not sources:
        return scoreboard.scoreboard(SCORE)
    seen = [run.source for run in runs if run.kind == "RECORDED"]
    source = next((one for one in sources if one.label in seen[-1:]), sources[0])
    model, backend, context, batch = source.keys[0]
    asked = {"model": model, "backend": backend, "context": context, "batch": batch, "mode": "NONE"}
    found = source.run(asked, Context())
    values, made = found.values, found.provenance
    if made is not None:
        scoreboard.note(scoreboard.Score(SCORE, str(made.kind), made.device, launches=values["launches"],
                                         step_ms=values["step_us"] / 1e3))  # fmt: skip
    return scoreboard.scoreboard(SCORE)
