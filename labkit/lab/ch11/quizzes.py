"""The questions of chapter 11. Refuses to ask for a number that no cell shows."""

from __future__ import annotations

from labkit.lab.quiz import Quiz

RECAP = Quiz(
    id="11.recap",
    question="Before we begin: an engine runs FULL_AND_PIECEWISE, compiled in pieces, with a backend of tier "
    "UNIFORM_BATCH. A step has three decodes and a chunk of 200 prompt tokens. What runs?",
    options=(
        ("One FULL graph, as in every step of this mode.", False,
         "FULL serves the decode batches of this mode alone; the tier could not capture a mixed batch either."),
        ("PIECEWISE: a graph for each piece, and attention between them by itself.", True,
         "The batch is mixed, so the mode's second half decides. Attention stays outside of the graphs."),
        ("Nothing is replayed: a mixed batch is always eager.", False,
         "That is FULL_DECODE_ONLY. Here pieces are captured for mixed batches, up to the largest size."),
    ),
)  # fmt: skip

TRANSFER = Quiz(
    id="11.transfer",
    kind="transfer",
    items=("A8",),
    question="A service starts a fresh container for each burst of traffic. A burst is about thirty requests of 100 "
    "tokens, one at a time, and the container is thrown away after it. Starting takes a second eagerly, and a minute "
    "with the compiler and all graphs; a step takes 6 ms and 1.5 ms. What do you try first?",
    options=(
        ("Take out the compiler and the graphs for good: the minute is never earned back.", False,
         "Right about the minute: 30 requests save 30 × 100 × 4.5 ms, 13.5 s. But it is thrown away only as long as "
         "each container starts from nothing."),
        ("Ship the compile cache with the container, and capture only the few sizes that occur.", True,
         "Most of the minute is made anew each time although nothing changed. A warm cache and a short list of sizes "
         "leave a few seconds, and these the burst pays back."),
        ("Keep everything on: graphs must stay on in production.", False,
         "A rule for servers that run for days. Here a request waits for the start, and 13.5 s of savings never pay a "
         "minute."),
        ("Another attention backend.", False, "Perhaps later. Neither the minute nor the host's launches are its "
              "fault."),
    ),
)  # fmt: skip

QUIZZES = (RECAP, TRANSFER)
