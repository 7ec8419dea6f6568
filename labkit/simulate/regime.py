"""What a decode step waits for, over model size and batch: the regime map and its crossing line. SIMULATED throughout.
Refuses to know how it is drawn, and to touch recorded rows beyond putting them in their place on the map.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from labkit.config import ModelConfig
from labkit.measure.provenance import Kind
from labkit.measure.recordings import Recording, Row
from labkit.simulate.step import H200, DecodeModel, Machine, SimulatedStep, simulate_step

#: Batches of the map: powers of two, as far as the default graph sizes go.
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
#: The regimes a step can be in. "Short kernels" and "host" are what is left once launches are hidden.
REGIMES = ("instructions", "kernels", "host", "data", "arithmetic")


@dataclasses.dataclass(frozen=True)
class Point:
    """A recorded step on the map. text: what was measured, in words."""

    model: str
    batch: int
    mode: str
    ms: float
    kind: Kind
    text: str


@dataclasses.dataclass(frozen=True)
class RegimeMap:
    """`steps[i][j]`: model i (ascending in size) at batch j. around: whether the engine's own host work counts."""

    models: tuple[ModelConfig, ...]
    batches: tuple[int, ...]
    steps: tuple[tuple[SimulatedStep, ...], ...]
    mode: str
    around: bool
    points: tuple[Point, ...] = ()

    kind = Kind.SIMULATED

    def regime(self, model: int, batch: int) -> str:
        """What the step waits for most, one of REGIMES; without the engine's host work unless `around`."""
        waits = self.steps[model][batch].waiting_us
        return max((name for name in REGIMES if self.around or name != "host"), key=lambda name: waits[name])

    def share(self, model: int, batch: int) -> float:
        """The share of that wait in all waits that count."""
        waits = self.steps[model][batch].waiting_us
        counted = sum(us for name, us in waits.items() if self.around or name != "host")
        return waits[self.regime(model, batch)] / counted

    def crossing(self) -> list[int | None]:
        """Per model the smallest batch whose step no longer waits for instructions most; None where all do."""
        return [
            next((b for j, b in enumerate(self.batches) if self.regime(i, j) != "instructions"), None)
            for i in range(len(self.models))
        ]

    @property
    def summary(self) -> str:
        """One sentence, also the figure's alternative text."""
        parts = []
        for model, batch in zip(self.models, self.crossing(), strict=True):
            if batch is None:
                parts.append(f"{model.name} at every batch up to {self.batches[-1]}")
            elif batch > self.batches[0]:
                parts.append(f"{model.name} below batch {batch}")
        what = "waits for instructions most with " + ", ".join(parts) if parts else "never waits for instructions most"
        context = self.steps[0][0].model.context
        return f"SIMULATED: at context {context} in mode {self.mode} a decode step {what}."

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with all parameters."""
        return {
            "kind": str(self.kind), "mode": self.mode, "around": self.around, "summary": self.summary,
            "models": [m.name for m in self.models], "batches": list(self.batches), "crossing": self.crossing(),
            "regimes": [[self.regime(i, j) for j in range(len(self.batches))] for i in range(len(self.models))],
            "step_ms": [[round(step.wall_ms, 4) for step in row] for row in self.steps],
            "parameters": self.steps[0][0].as_dict()["parameters"],
            "points": [{**dataclasses.asdict(p), "kind": str(p.kind)} for p in self.points],
        }  # fmt: skip


def regime_map(
    models: Iterable[ModelConfig],
    *,
    batches: Sequence[int] = BATCHES,
    context: int = 512,
    mode: str = "NONE",
    machine: Machine = H200,
    cpu_factor: float = 1.0,
    around: bool = False,
    points: Iterable[Point] = (),
    **question: Any,
) -> RegimeMap:
    """Simulate a step of every model at every batch.

    Args:
        around: count the engine's host work around the forward as a regime of its own ("host").
        points: recorded steps, shown on top; those of other models and of no column are dropped.
        question: further fields of `DecodeModel`, such as `weight_bits`.
    """
    ordered = sorted(models, key=lambda shape: shape.num_parameters())
    steps = tuple(
        tuple(
            simulate_step(
                DecodeModel(shape, batch, context, **question), machine, mode=mode, cpu_factor=cpu_factor
            ) for batch in batches
        ) for shape in ordered
    )  # fmt: skip
    names = {shape.name for shape in ordered}
    shown = tuple(p for p in points if p.model in names and p.mode == mode and p.batch in batches)
    return RegimeMap(tuple(ordered), tuple(batches), steps, mode, around, shown)


def points_of(
    recordings: Iterable[Recording], *, context: int = 512, backend: str = "TRITON_ATTN", mode: str = "NONE"
) -> list[Point]:
    """Recorded decode steps for the map, each with what it waited for. Of several recordings the first answers.

    Time waiting for instructions can be read off rows only in pairs: what the same step took less of the device under
    FULL. Both rows are from one recording.
    """
    out: dict[tuple[str, int], Point] = {}
    for recording in recordings:
        rows: Mapping[tuple[str, str, int], Row] = {
            (row.model, row.mode, row.batch): row for row in recording.rows
            if row.backend == backend and row.context == context and row.compile == "NONE" and not row.chunk
            and row.size == row.batch and not row.emulated
        }  # fmt: skip
        for (name, ran, batch), row in rows.items():
            if ran != mode or (name, batch) in out:
                continue
            text = f"{recording.provenance.kind}: {row.p50_ms:.2f} ms (n={row.n})"
            full = rows.get((name, "FULL", batch))
            if mode == "NONE" and full is not None and row.device_us is not None and full.device_us is not None:
                saved = row.device_us - full.device_us
                text += f", {max(0.0, saved) / 1e3:.2f} ms of it gone under FULL"
            if row.floor_ms is not None:
                text += f", {row.floor_ms:.2f} ms for data at the copy bandwidth"
            out[name, batch] = Point(name, batch, mode, row.p50_ms, recording.provenance.kind, text)
    return list(out.values())
