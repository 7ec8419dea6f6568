"""Replays whose input was copied into the graph's buffer, or whose name was given another one: what comes out.

The function is 2 × input + 1, captured with the input 1. LIVE it goes through the engine's capturer: a real graph on
a GPU (never run on one), labkit's emulation on a CPU. SIMULATED it is the same in numpy arrays. Refuses to know
widgets.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labkit.lab.fields import Choice, Control, Number
from labkit.lab.runs import Context, Outcome, simulated
from labkit.measure.provenance import Provenance, collect

COPIED, REBOUND = "copied into the buffer", "bound to the name"
OWN, SHARED = "a copy of it", "the output buffer itself"
SIZE = 4


@dataclasses.dataclass
class Tape:
    """A captured function with its two buffers; arrays of any library.

    new: `new(value)`, a fresh array of that value. copy: `copy(into, array)`. clone: a copy. replay: runs what was
    captured. one: the first number of an array. where: its address.
    """

    input: Any
    output: Any
    new: Callable[[float], Any]
    copy: Callable[[Any, Any], None]
    clone: Callable[[Any], Any]
    replay: Callable[[], None]
    one: Callable[[Any], float]
    where: Callable[[Any], int]


def numpy_tape() -> Tape:
    import numpy as np

    reads, writes = np.ones(SIZE), np.zeros(SIZE)

    def replay() -> None:
        writes[:] = 2 * reads + 1

    return Tape(
        reads, writes, lambda value: np.full(SIZE, float(value)), lambda into, array: np.copyto(into, array),
        lambda array: array.copy(), replay, lambda array: float(array[0]), lambda array: int(array.ctypes.data),
    )  # fmt: skip


def torch_tape(device: str) -> tuple[Tape, bool]:
    """Captured by the engine's capturer on `device`; and whether the graph is the emulation."""
    import torch

    from labkit.graphs.capture import GraphCapturer

    where = torch.device(device)
    reads, writes = torch.ones(SIZE, device=where), torch.zeros(SIZE, device=where)
    capturer = GraphCapturer(where)
    with capturer.session():
        graph = capturer.capture("FULL", SIZE, functools.partial(_twice_plus_one, reads), writes)
    tape = Tape(
        reads, writes, lambda value: torch.full((SIZE,), float(value), device=where),
        lambda into, array: into.copy_(array), lambda array: array.clone(), graph.replay,
        lambda array: float(array[0]), lambda array: int(array.data_ptr()),
    )  # fmt: skip
    return tape, graph.emulated


def _twice_plus_one(values: Any) -> Any:
    return 2 * values + 1


class _Replays:
    """What both sources share: the controls, and the little program around the tape."""

    kind, label = "", ""

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        return [
            Choice("way", "New input", [(COPIED, COPIED), (REBOUND, REBOUND)], REBOUND,
                   help="buffer.copy_(new), or buffer = new."),
            Choice("kept", "Kept", [(OWN, OWN), (SHARED, SHARED)], help="Of the output: output.clone(), or output."),
            Number("steps", "Steps", 2, 8, 5, help="Step i gets the input i; the capture was done with 1."),
        ]  # fmt: skip

    def cost(self, values: Mapping[str, Any]) -> str:
        return "Run captures 2 × input + 1 over four numbers and replays it; it takes no time."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        line = "buffer.copy_(new)" if values["way"] == COPIED else "buffer = new"
        keep = "output.clone()" if values["kept"] == OWN else "output"
        return [f"In every step: new = full(step); {line}; graph.replay(); results.append({keep})."]

    def _tape(self) -> tuple[Tape, str]:
        raise NotImplementedError

    def _made(self, values: Mapping[str, Any]) -> Provenance:
        raise NotImplementedError

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        tape, said = self._tape()
        steps = list(range(1, int(values["steps"]) + 1))
        name, results = tape.input, []
        for step in steps:
            new = tape.new(step)
            if values["way"] == COPIED:
                tape.copy(name, new)
            else:
                name = new
            tape.replay()
            results.append(tape.clone(tape.output) if values["kept"] == OWN else tape.output)
        got, expected = [tape.one(one) for one in results], [2.0 * step + 1.0 for step in steps]
        wrong = [step for step, a, b in zip(steps, got, expected, strict=True) if a != b]
        moved = tape.where(name) != tape.where(tape.input)
        numbers = {
            "way": values["way"], "kept": values["kept"], "replays": len(steps), "wrong": len(wrong),
            "output": "stale" if values["way"] == REBOUND and wrong else "overwritten" if wrong else "right",
            "moved": "another one" if moved else "the same",
        }  # fmt: skip
        data = {"steps": steps, "expected": expected, "got": got}
        return Outcome(data, numbers, _sentence(values, got, expected, wrong), self._made(values), notes=(said,))


class NumpyReplays(_Replays):
    """Plain numpy arrays: what a rebound name does, without any GPU or torch."""

    kind, label = "SIMULATED", "numpy arrays"

    def _tape(self) -> tuple[Tape, str]:
        return (
            numpy_tape(),
            "The “graph” is a Python function over two numpy arrays: the rules of buffers, and no CUDA.",
        )

    def _made(self, values: Mapping[str, Any]) -> Provenance:
        return simulated("numpy arrays", size=SIZE, steps=values["steps"])


class TorchReplays(_Replays):
    """torch tensors, captured by the engine's own capturer."""

    kind = "LIVE"

    def __init__(self, gpu: str) -> None:
        self.device = "cuda" if gpu else "cpu"
        self.label = gpu or "this CPU"

    def _tape(self) -> tuple[Tape, str]:
        tape, emulated = torch_tape(self.device)
        return tape, "The graph is labkit's emulation on a CPU." if emulated else "The graph is a real CUDA graph."

    def _made(self, values: Mapping[str, Any]) -> Provenance:
        return collect("LIVE", "panel 07, replays", order="as run", n=int(values["steps"]), device=self.device)


def _sentence(values: Mapping[str, Any], got: list[float], expected: list[float], wrong: list[int]) -> str:
    gave = ", ".join(f"{one:g}" for one in got)
    wanted = ", ".join(f"{one:g}" for one in expected)
    said = f"The replays give {gave}; without a graph it is {wanted}."
    if not wrong:
        return f"{said} Copying writes to the address that the graph reads, and what was kept is a copy of its own."
    if values["way"] == REBOUND:
        return (
            f"{said} The graph reads the tensor that it was captured with, and nobody wrote into that one: the input "
            "is stale, and no error says so. Step 1 is right only because its input is the one of the capture."
        )
    return f"{said} Every entry of the list is the same buffer, so all of them show what the last replay wrote."
