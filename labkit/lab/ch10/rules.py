"""What becomes of a stream of batches: labkit's own rules, asked and counted. Refuses to run an engine.

The rules are exact: `resolve`, the dispatcher and its padding are the functions that the engine calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.attention.interface import AttentionCGSupport as Tier
from labkit.config import CUDAGraphMode as Mode
from labkit.graphs.dispatcher import GraphDispatcher
from labkit.graphs.modes import resolve
from labkit.graphs.sizes import default_capture_sizes
from labkit.lab.ch10.stream import Batch

NONE, PIECEWISE, FULL = WAYS = ("NONE", "PIECEWISE", "FULL")
#: How a pass is cut → the arguments of `resolve` that say so.
CUTS: dict[str, dict[str, bool]] = {
    "compile": {"compiled": True, "split": True}, "whole": {"compiled": True, "split": False},
    "break": {"compiled": False, "breakable": True}, "none": {"compiled": False, "breakable": False},
}  # fmt: skip
CUT_WORDS = {
    "compile": "compiled, splitting_ops = attention", "whole": "compiled, splitting_ops = [] (one piece)",
    "break": "not compiled; a capture breaks at attention", "none": "not compiled, not cut",
}  # fmt: skip
#: Launches of labkit's pass on a GPU: before the first layer, in a layer without attention, attention, and after the
#: forward pass (LM head, largest logit). Counted on recorded steps: 305 for 30 layers at batch 1.
FIRST, PER_LAYER, ATTENTION, AFTER = 3, 8, 2, 2
#: Leaves of the decision tree.
LEAVES = ("decode graph", "mixed graph", "eager")


@dataclasses.dataclass(frozen=True)
class Step:
    """How one batch runs: NONE, PIECEWISE or FULL at `size` tokens, why, and what the host starts for it."""

    batch: Batch
    way: str
    size: int
    launches: int
    leaf: str
    why: str


@dataclasses.dataclass(frozen=True)
class Answer:
    """The mode in force, the trail to it, and the tape."""

    mode: Mode
    trail: tuple[str, ...]
    sizes: tuple[int, ...]
    steps: tuple[Step, ...]


def answer(
    batches: Sequence[Batch], requested: str, tier: Tier, cut: str, *, layers: int, max_num_seqs: int, max_tokens: int,
    largest: int, attention: int = ATTENTION, backend: str = "the backend",
) -> Answer:  # fmt: skip
    """Resolve the mode, and dispatch every batch.

    Args:
        tier: of the attention backend. cut: a key of CUTS. largest: the largest capture size.
        attention: launches of attention in a layer.

    Raises:
        ConfigError: FULL was asked for and the backend can never be captured.
    """
    mode, trail = resolve(Mode[requested], tier, **CUTS[cut], backend=backend)  # type: ignore[arg-type]
    sizes = default_capture_sizes(max_num_seqs, max_tokens, max_size=largest)
    dispatcher = GraphDispatcher(mode, sizes, max_num_seqs)
    steps = [_step(dispatcher, batch, layers, cut, attention) for batch in batches]
    return Answer(mode, tuple(trail), tuple(sizes), tuple(steps))


def _step(dispatcher: GraphDispatcher, batch: Batch, layers: int, cut: str, attention: int) -> Step:
    missed = dispatcher.miss(batch.num_tokens, batch.is_uniform_decode)
    found = dispatcher.dispatch(batch.num_tokens, batch.num_reqs, batch.is_uniform_decode)
    way, key = found.mode.name, found.key
    leaf = LEAVES[2] if key is None else LEAVES[0] if key.uniform else LEAVES[1]
    kind = "every request decodes" if batch.is_uniform_decode else "a prompt is among them"
    if key is not None:
        padded = found.size - batch.num_tokens
        why = f"{kind}; {batch.num_tokens} tokens → {way} {found.size}" + (f", {padded} padded" if padded else "")
    else:
        because = missed.value if missed else "mode NONE has no graphs"
        why = f"{kind}; {batch.num_tokens} tokens run eagerly: {because}"
    return Step(batch, way, found.size, launches(way, layers, cut, attention), leaf, why)


def launches(way: str, layers: int, cut: str = "break", attention: int = ATTENTION) -> int:
    """What the host starts in a step. Compiled pieces leave the cache write to the operator: one more a layer."""
    compiled = cut in ("compile", "whole")
    outside = attention + compiled
    if way == FULL:
        return 1 + AFTER
    if way == PIECEWISE:
        return (layers + 1) + layers * outside + AFTER
    # The compiler leaves as many kernels in a layer as labkit's own are, the rotation without the write among them.
    return (1 if compiled else FIRST) + layers * (PER_LAYER + outside) + AFTER


def num_pieces(layers: int, cut: str) -> int:
    """Pieces of a pass: one more than attention calls, or one where it is not cut."""
    return layers + 1 if cut in ("compile", "break") else 1


def kinds(layers: int, cut: str) -> list[int]:
    """The kind of every piece: 1 before the first attention, 2 between two, 3 after the last; 0 for a whole pass."""
    n = num_pieces(layers, cut)
    return [0] if n == 1 else [1, *[2] * (n - 2), 3]


def drawn_data(found: Answer, layers: int, cut: str, title: str) -> dict[str, Any]:
    """The answer as plain lists: what the figure draws."""
    order = kinds(layers, cut)
    data: dict[str, Any] = {"title": title, "mode": found.mode.name, "why": [step.why for step in found.steps]}
    for kind in (0, 1, 2, 3):
        data[f"kind{kind}_at"] = [1.5 * i for i, one in enumerate(order) if one == kind]
    data["attention_at"] = [1.5 * i + 1 for i in range(len(order) - 1)]
    labels = step_labels([step.batch for step in found.steps])
    data["labels"] = labels
    for way in WAYS:
        mine = [(label, step) for label, step in zip(labels, found.steps, strict=True) if step.way == way]
        data[f"{way}_x"] = [label for label, _ in mine]
        data[f"{way}_y"] = [step.launches for _, step in mine]
        data[f"{way}_text"] = [f"{WORD[way]}<br>{step.size}" for _, step in mine]
    data["leaf_counts"] = [sum(step.leaf == leaf for step in found.steps) for leaf in LEAVES]
    return data


WORD = {FULL: "FULL", PIECEWISE: "PIECES", NONE: "eager"}


def step_labels(batches: Sequence[Batch]) -> list[str]:
    """A label for each step: its place and its batch."""
    return [f"{i + 1}: {batch}" for i, batch in enumerate(batches)]


def row(found: Answer, layers: int, cut: str) -> Mapping[str, Any]:
    """One row of the panel's table."""
    counts = {way: sum(step.way == way for step in found.steps) for way in WAYS}
    return {
        "mode": found.mode.name, "pieces": num_pieces(layers, cut), "kinds": len(set(kinds(layers, cut))),
        "full": counts[FULL], "piecewise": counts[PIECEWISE], "eager": counts[NONE],
        "launches": sum(step.launches for step in found.steps),
        "tape": " ".join(f"{WORD[step.way]}·{step.size}" for step in found.steps),
        "mixed_ways": sorted({step.way for step in found.steps if not step.batch.is_uniform_decode}),
        "decode_ways": sorted({step.way for step in found.steps if step.batch.is_uniform_decode}),
    }  # fmt: skip
