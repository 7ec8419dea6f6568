"""The cards of chapter 06: plugged runs, the myth check, the row of the scoreboard."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from labkit.lab import scoreboard
from labkit.lab.cards import Card
from labkit.lab.ch06.waits import MODEL
from labkit.lab.myths import COMPUTED, DOCUMENTED, MEASURED, UNTESTED, Myth, myth_card
from labkit.lab.plugged_run import PluggedRun, run_plugged
from labkit.lab.runs import Run, machine

SCORE = "attention of a mixed step, one call"
OTHER_SCORE = "attention of a mixed step, rectangle"
#: The second begins like the first, so that the prefix cache has something to find; the first comes again at the end.
BEGINNING = "One step of the engine takes some tokens of some requests through the model, all of them in one row."
PROMPTS = (f"{BEGINNING} The capital of France is", f"{BEGINNING} One, two, three,")


def plug_in_slots(answer: Any) -> PluggedRun:
    """Text by the engine with a learner's `slot_mapping` in it."""
    return run_plugged(prompts=PROMPTS, max_tokens=3, slot_mapping=answer)


def plug_in_wrong_slots() -> PluggedRun:
    """The same with positions in place of slots, and believed."""
    return run_plugged(prompts=PROMPTS, max_tokens=3, trust=True, slot_mapping=positions_as_slots)


def positions_as_slots(block_ids: Sequence[int], start: int, n: int, block_size: int) -> list[int]:
    """A known wrong answer of exercise 06.2."""
    return list(range(start, start + n))


def plug_in_hash(answer: Any) -> PluggedRun:
    """The smallest model with a learner's `block_hash` in it: what counts is what the cache finds."""
    return run_plugged(prompts=PROMPTS, max_tokens=2, model=MODEL, block_hash=answer)


def plug_in_wrong_hash() -> PluggedRun:
    """The same with a name that is new each time, and believed."""
    count = itertools.count()

    def always_new(parent: bytes | None, token_ids: Sequence[int]) -> bytes:
        return next(count).to_bytes(32, "little")

    return run_plugged(prompts=PROMPTS, max_tokens=2, model=MODEL, trust=True, block_hash=always_new)


def myths(runs: Sequence[Run]) -> Card:
    """The claims of the source texts that this chapter touches; your own runs count where they tell."""
    timed = [run for run in runs if run.values["verdict"] is not None]
    found, tag, verdict = "Run the panel with times: LIVE, or RECORDED where it is there.", UNTESTED, "open"
    if timed:
        run = next((one for one in reversed(timed) if one.kind == "LIVE"), timed[-1])
        found, tag = f"{run.kind}, {machine(run.provenance)}: {run.summary}", MEASURED
        verdict = {"one": "one call was faster", "two": "two calls were faster", "same": "no difference shown"}[
            run.values["verdict"]
        ]
    waste = next((run.values["waste"] for run in runs if run.values["decodes"] and run.values["chunks"]), None)
    said = f"{waste:.0f} % of the scores of your mixed step would be waste. " if waste is not None else ""
    return myth_card([
        Myth("The engine takes FlashAttention 2 for the prompt's chunk and FlashDecoding for the decodes.",
             "Some engines make two calls: so does vLLM 0.33 with FLASHINFER, decodes first. With FLASH_ATTN it makes "
             "one, and so does labkit with each of its backends; split_mixed_batches makes it two, to compare. "
             "FlashDecoding is no other backend, but a way to split keys, inside of FlashAttention too.",
             "holds for some", DOCUMENTED, "the panel, bars"),
        Myth("FlashInfer handles mixed batches by itself, others must split the batch.",
             "A call for variable lengths, with offsets and lengths, is what FlashAttention and Triton's kernels have "
             "as well. Of labkit's backends only TORCH_SDPA has none: it goes from request to request.",
             "does not hold", DOCUMENTED, "the panel, exercise 06.1"),
        Myth("One call for a mixed batch is faster than two.", found, verdict, tag, "the panel, source LIVE"),
        Myth("Unified scheduling and kernels for mixed batches are a pair: one is of no use without the other.",
             f"{said}With kernels that take rectangles only, a mixed step would cost more than two separate ones.",
             "holds", COMPUTED, "exercise 06.4"),
    ])  # fmt: skip


def claims_and_score(runs: Sequence[Run]) -> Card:
    """Both on one card."""
    claims, board = myths(runs), note_score(runs)
    return Card(f"{claims!r}; {board!r}", claims.html + board.html)


def note_score(runs: Sequence[Run]) -> Card:
    """Put the newest timed step of the panel on the board, in one call and as a rectangle, and show the board."""
    timed = [run for run in runs if run.values["unified_us"] is not None]
    if timed:
        run = timed[-1]
        for name, key in ((OTHER_SCORE, "padded_us"), (SCORE, "unified_us")):
            if run.values[key] is not None:
                us = run.values[key]
                scoreboard.note(scoreboard.Score(name, run.kind, machine(run.provenance), step_ms=us / 1e3))
    return scoreboard.scoreboard(SCORE)
