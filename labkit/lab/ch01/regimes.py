"""The regime map as a panel's source: what a step waits for, over models and batches. Refuses to measure."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from labkit.figures.points import drawn
from labkit.figures.regime import regime_figure
from labkit.lab.ch01.simulated import EAGER, GRAPH, HOSTS, MODELS
from labkit.lab.fields import Choice, Control, Number, Toggle
from labkit.lab.runs import Context, Outcome, Run, simulated
from labkit.measure.library import library
from labkit.models.shapes import SHAPES
from labkit.simulate.regime import REGIMES, RegimeMap, points_of, regime_map

COLUMNS = [
    ("mode", "started"), ("context", "context"), ("host", "host, times as fast"), ("instructions", "cells: "
                                                                                                   "instructions"),
    ("data", "cells: data"), ("others", "cells: others"),
]  # fmt: skip


class RegimeSource:
    """Every model at every batch, one cell each."""

    kind, label = "SIMULATED", "regime map"

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        return [
            Choice("mode", "Started", [(EAGER, "NONE"), (GRAPH, "FULL")], help="By a launch for each kernel, or by "
                                                                               "one."),
            Number("context", "Context", 128, 32768, 512, points=(128, 512, 2048, 8192, 32768), unit="tokens",
                   help="Tokens of each request that attention reads."),
            Choice("host", "Host", HOSTS, help="How fast the CPU is, against the one of the recording."),
            Toggle("around", "count the host around the forward", False,
                   help="Scheduling, inputs and text are host time too."),
        ]  # fmt: skip

    def cost(self, values: Mapping[str, Any]) -> str:
        return "Run computes 50 steps: less than a second."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        return [
            "Cells are SIMULATED for an H200. Diamonds are RECORDED steps where there are some; no ratio mixes them."
        ]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        found = _map(values["mode"], int(values["context"]), float(values["host"]), bool(values["around"]))
        rows, columns = len(found.models), len(found.batches)
        cells = [[REGIMES.index(found.regime(i, j)) for j in range(columns)] for i in range(rows)]
        flat = [REGIMES[k] for row in cells for k in row]
        count = {name: flat.count(name) for name in ("instructions", "data")}
        numbers = {
            "mode": EAGER if values["mode"] == "NONE" else GRAPH, "context": values["context"], "host": values["host"],
            **count, "others": len(flat) - sum(count.values()),
        }  # fmt: skip
        made = simulated("regime map", machine=found.steps[0][0].machine.name, mode=values["mode"],
                         context=values["context"], host_factor=float(values["host"]))  # fmt: skip
        why = (
            "small models have short kernels, and a launch does not get shorter with them."
            if count["instructions"] else "one launch starts the whole step."
        )  # fmt: skip
        said = found.summary.removeprefix("SIMULATED: ").rstrip(".")
        return Outcome({"cells": cells}, numbers, f"{said[:1].upper()}{said[1:]}, because {why}", made)


def regimes_figure(runs: Sequence[Run], pinned: Sequence[Run]) -> go.Figure:
    """The map of the newest run; before the first one an empty grid."""
    if not runs:
        return go.Figure(layout={"xaxis": {"title": "batch, requests per step"}, "yaxis": {"title": "model"}})
    asked = runs[-1].settings
    found = _map(asked["mode"], int(asked["context"]), float(asked["host"]), bool(asked["around"]))
    figure = regime_figure(found)
    figure.data[0].meta = drawn(runs[-1].number, z="cells")
    return figure


def why(new: Run, old: Run) -> str:
    """How many cells changed sides."""
    now, before = new.values["instructions"], old.values["instructions"]
    if now == before:
        return ""
    return f"{now} of 50 cells wait for instructions most; before it were {before}."


@functools.lru_cache(maxsize=16)
def _map(mode: str, context: int, host: float, around: bool) -> RegimeMap:
    points = points_of(library().recordings, context=context, mode=mode) if host == 1.0 else ()
    return regime_map([SHAPES[name] for name in MODELS], context=context, mode=mode, cpu_factor=host, around=around,
                      points=points)  # fmt: skip
