"""A recorded step as numpy sees it: it reads one array and writes another, always the very same two.

Stands in for a captured graph in exercises, in panels without torch, and in front of the engine's own graphs. Refuses
to know what is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

#: Computes into the second array from the first.
Compute = Callable[[np.ndarray, np.ndarray], None]


class StaticGraph:
    """What was recorded, with its two static buffers.

    input, output: names for the arrays that `launch()` reads and writes. Giving the name another array changes the
    name alone: what was recorded keeps its own two.
    launches: how often it was launched.
    """

    def __init__(self, input: np.ndarray, output: np.ndarray, compute: Compute, says: str = "a graph") -> None:
        self.input, self.output = input, output
        self.launches = 0
        self._reads, self._writes, self._compute, self._says = input, output, compute, says

    def launch(self) -> None:
        """Run what was recorded, once: no arguments, the same addresses."""
        self.launches += 1
        self._compute(self._reads, self._writes)

    @property
    def rebound(self) -> bool:
        """Whether a name stands for another array than the one that is read or written."""
        return self.input is not self._reads or self.output is not self._writes

    def __repr__(self) -> str:
        return f"<{self._says}: input {self._reads.tolist()}>" if self._reads.size <= 16 else f"<{self._says}>"

    def __eq__(self, other: Any) -> bool:
        """Both hold the same in their buffers and were launched as often."""
        return isinstance(other, StaticGraph) and self.state() == other.state()

    __hash__ = None  # type: ignore[assignment]

    def state(self) -> tuple[Any, ...]:
        """What a comparison looks at: the buffers, and what the names stand for."""
        arrays = (self._reads, self._writes, self.input, self.output)
        return (*((np.asarray(a).tolist()) for a in arrays), self.launches)


def replay(graph: StaticGraph, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Run every input through the graph: copied into its buffer, zeros behind it, its own rows of the result kept.

    Args:
        inputs: arrays of n values each, n at most the size of the graph.

    Returns:
        A new array of n rows for each.
    """
    found = []
    for values in inputs:
        n = len(values)
        graph.input[:n] = values
        graph.input[n:] = 0
        graph.launch()
        found.append(graph.output[:n].copy())
    return found
