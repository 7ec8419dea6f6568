"""The cards of chapter 10: the myth check and the row of the scoreboard; settings for the plugged-in dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labkit.lab import scoreboard
from labkit.lab.cards import Card
from labkit.lab.ch10.costs import SimulatedModes
from labkit.lab.ch10.rules import FULL, NONE, PIECEWISE, kinds, launches
from labkit.lab.myths import COMPUTED, DOCUMENTED, Myth, myth_card, recorded_myths
from labkit.lab.runs import Context

SCORE = "decode step, in pieces"
#: The engine of the plug-in: both kinds of graphs, and a gap between sizes so that padding shows.
PLUG_SETTINGS = {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": (1, 2, 4, 16, 64)}


def myths() -> Card:
    """The claims of the source texts that this chapter touches."""
    pieces = len(kinds(32, "compile"))
    three = Myth(
        "Cutting at attention gives three subgraphs.",
        f"Three kinds: a model of 32 layers has {pieces} pieces, and {pieces} graphs for each size. Of layers that "
        "differ there are more kinds. With compiled pieces the write into the KV cache is outside, too: it is in the "
        "opaque operator.",
        "holds for kinds", COMPUTED, "the panel; exercises 10.1 and 10.2; `labkit split`",
    )  # fmt: skip
    portion = Myth(
        "Piecewise capture means: capture only the decode portion of a batch.",
        "PIECEWISE captures all tokens of a batch, prompts too, and leaves out attention. A graph for decodes alone is "
        "another thing, FULL_DECODE_ONLY.",
        "does not hold", DOCUMENTED, "the panel, mode PIECEWISE: steps with a prompt run as PIECES",
    )  # fmt: skip
    itself = Myth(
        "torch.compile finds the parts that can be captured by itself.",
        "Somebody names the operators to cut at (splitting_ops) and hides attention behind an opaque one. labkit can "
        "also break a capture at attention without any compiler.",
        "does not hold", DOCUMENTED, "the walk through the source; the panel, “The pass is”",
    )  # fmt: skip
    tiers = Myth(
        "FA3 and Triton can be captured with any batch, FA2 and FlashMLA with uniform ones, FlashInfer with decodes "
        "of one token.",
        "That is the table of vLLM's documents. It is not fixed: FlashInfer reaches UNIFORM_BATCH where TRT-LLM's "
        "kernels serve it, and labkit computes a tier for each configuration.",
        "holds, with exceptions", DOCUMENTED, "chapter 05; `labkit backends --gpu H200`",
    )  # fmt: skip
    share = recorded_myths({"piecewise-80": "the panel “What each mode costs”"})
    return myth_card([three, *share, portion, itself, tiers])


def launches_line(layers: int = 32) -> str:
    """Launches of a step of 32 layers in the three ways, as one line."""
    found = {way: launches(way, layers) for way in (NONE, PIECEWISE, FULL)}
    return ", ".join(f"{way} {n}" for way, n in found.items())


def note_score(runs: Sequence[Any]) -> Card:
    """Put the newest run of the cost panel that knows PIECEWISE on the board, RECORDED before SIMULATED."""
    known = [run for run in runs if run.values["piecewise_ms"] is not None]
    chosen = [run for run in known if run.kind == "RECORDED"] or known
    if chosen:
        values, made = chosen[-1].values, chosen[-1].provenance
    else:
        found = SimulatedModes().run({"model": "smollm2-135m", "batch": 1}, Context())
        values, made = found.values, found.provenance
    where = made.device if str(made.kind) == "RECORDED" else "decode step of a model"
    scoreboard.note(scoreboard.Score(SCORE, str(made.kind), where, launches=values["piecewise_launches"],
                                     step_ms=values["piecewise_ms"]))  # fmt: skip
    return scoreboard.scoreboard(SCORE)
