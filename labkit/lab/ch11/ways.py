"""The configurations that chapter 11 compares, and what each prepares. Pure; refuses to measure and to compute times.

What a level means is asked of the engine's own rules (`labkit.graphs.modes`), so that no table here can be wrong alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.config import CUDAGraphMode
from labkit.graphs.dispatcher import GraphDispatcher
from labkit.graphs.modes import requested_compilation, requested_mode

NO_COMPILE, COMPILE = "NONE", "VLLM_COMPILE"


@dataclasses.dataclass(frozen=True)
class Way:
    """One row of switches. key: for code; label: for readers. settings: fields of EngineConfig that ask for it."""

    key: str
    label: str
    settings: Mapping[str, Any]

    @property
    def mode(self) -> CUDAGraphMode:
        """The graph mode that is asked for."""
        asked = self.settings.get("cudagraph_mode")
        return requested_mode(
            CUDAGraphMode.parse(asked) if asked else None,
            enforce_eager=bool(self.settings.get("enforce_eager")),
            optimization_level=self.settings.get("optimization_level"),
        )[0]

    @property
    def compile(self) -> str:
        """The compilation mode that is asked for."""
        return requested_compilation(
            self.settings.get("compilation_mode"), enforce_eager=bool(self.settings.get("enforce_eager")),
            optimization_level=self.settings.get("optimization_level"),
        )[0]  # fmt: skip

    @property
    def compiled(self) -> bool:
        return self.compile == COMPILE

    @property
    def said(self) -> str:
        """What it comes to, in the words of the switches."""
        return f"{self.mode.name}, {'compiled in pieces' if self.compiled else 'not compiled'}"


WAYS: tuple[Way, ...] = (
    Way("eager", "--enforce-eager", {"enforce_eager": True}),
    Way("O0", "-O0", {"optimization_level": 0}),
    Way("O1", "-O1", {"optimization_level": 1}),
    Way("O2", "-O2", {"optimization_level": 2}),
    Way("O3", "-O3", {"optimization_level": 3}),
    Way("graphs", "graphs alone", {"cudagraph_mode": "FULL_AND_PIECEWISE", "compilation_mode": NO_COMPILE}),
    Way("decode", "graphs of decodes alone", {"cudagraph_mode": "FULL_DECODE_ONLY", "compilation_mode": NO_COMPILE}),
    Way("compile", "compiler alone", {"cudagraph_mode": "NONE", "compilation_mode": COMPILE}),
)
OPTIONS = tuple((f"{way.label} ({way.said})", way.key) for way in WAYS)


def find(key: str) -> Way:
    """A way by its key.

    Raises:
        KeyError: there is none of that key.
    """
    return next((way for way in WAYS if way.key == key), None) or _unknown(key)


def picked(values: Mapping[str, Any]) -> Way:
    """The way that a form's values name; the first one where they name none, as after a change of source."""
    return next((way for way in WAYS if way.key == values.get("way")), WAYS[0])


def num_graphs(mode: CUDAGraphMode, sizes: Sequence[int], num_layers: int, max_num_seqs: int = 256) -> int:
    """CUDA graphs that are captured at start-up: one for a FULL size, one per piece for a PIECEWISE one."""
    keys = GraphDispatcher(mode, tuple(sizes), max_num_seqs).capture_order()
    return sum(num_layers + 1 if key.mode == "PIECEWISE" else 1 for key in keys)


def looks_inside(mode: str, num_layers: int, calls: int | None = None) -> int | None:
    """Places in one decode step where the host has its turn, and so where a value can be looked at.

    Args:
        mode: that the step ran in: NONE, PIECEWISE or FULL. calls: what an eager step starts, where that is known.
    """
    if mode == "FULL":
        return 1
    return 2 * num_layers + 1 if mode == "PIECEWISE" else calls


def _unknown(key: str) -> Way:
    raise KeyError(f"there is no way {key!r}; there are {', '.join(way.key for way in WAYS)}")
