"""Four forms of a step as a 2×2 map, and kernels before and after fusion. Refuses to know where numbers come from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from labkit.figures import palette
from labkit.figures.points import drawn

#: From faint to strong, with either theme's text readable on it; the number itself stands in every cell.
_SCALE = [[0.0, palette.translucent("#2C7FB8", 0.1)], [1.0, palette.translucent("#2C7FB8", 0.6)]]
_COLUMNS, _ROWS = ["no graph", "graph"], ["not compiled", "compiled"]
#: Axes of the launches, behind those of every map: a page that updates a chart piece by piece would otherwise draw a
#: map on what was a logarithmic axis a moment ago.
LAUNCHES_AXIS = 20
#: Before and after: colour, pattern, word.
BARS = {"before": ("#D55E00", "/", "operator by operator"), "after": ("#2C7FB8", "", "after fusion")}


@dataclasses.dataclass(frozen=True)
class Map:
    """Milliseconds of four forms. cells: rows not compiled, compiled; columns no graph, graph; None is not known."""

    number: int
    title: str
    kind: str
    cells: Sequence[Sequence[float | None]]


@dataclasses.dataclass(frozen=True)
class FormBars:
    """Launches per step of the forms of a run."""

    number: int
    label: str
    forms: Sequence[str]
    counts: Sequence[int]


def matrix_figure(maps: Sequence[Map], text: Map | None = None, bars: Sequence[FormBars] = ()) -> go.Figure:
    """Maps beside each other, the text's last; under them the launches of each run's forms, on a log axis."""
    shown = [*maps, *([text] if text is not None else [])]
    figure = go.Figure()
    share = 1 / max(1, len(shown))
    top = 0.46 if bars else 0.0
    for i, one in enumerate(shown):
        axis = "" if i == 0 else str(i + 1)
        known = [ms for row in one.cells for ms in row if ms is not None]
        meta = drawn(one.number, z="cells") if one.number else None
        figure.add_trace(go.Heatmap(
            z=[list(row) for row in one.cells], x=_COLUMNS, y=_ROWS, xaxis=f"x{axis}", yaxis=f"y{axis}", meta=meta,
            name=one.title, showscale=False, colorscale=_SCALE, xgap=3, ygap=3, zmin=0.6 * min(known, default=0.0),
            zmax=max(known, default=1.0), hovertemplate="%{y}, %{x}: %{z:.2f} ms<extra></extra>",
        ))  # fmt: skip
        _numbers(figure, one, axis)
        left = i * share + (0.1 * share if i else 0.02)
        figure.update_layout({
            f"xaxis{axis}": {"domain": [left, (i + 1) * share - 0.02], "anchor": f"y{axis}", "showgrid": False,
                             "showline": False, "side": "bottom", "type": "category"},
            f"yaxis{axis}": {"domain": [top + 0.06, 0.9], "anchor": f"x{axis}", "autorange": "reversed",
                             "showgrid": False, "showline": False, "showticklabels": i == 0, "type": "category"},
        })  # fmt: skip
        figure.add_annotation(text=f"<b>{one.title}</b><br>ms per step · {one.kind}", x=left, y=0.915, xref="paper",
                              yref="paper", xanchor="left", yanchor="bottom", showarrow=False, align="left",
                              font={"size": 12})  # fmt: skip
    if bars:
        _launches(figure, bars, top)
    figure.update_layout(height=500 if bars else 320, margin={"t": 40, "b": 46}, legend={"y": -0.16, "yanchor": "top"})
    return figure


def _numbers(figure: go.Figure, one: Map, axis: str) -> None:
    for y, row in zip(_ROWS, one.cells, strict=True):
        for x, ms in zip(_COLUMNS, row, strict=True):
            figure.add_annotation(
                text="not measured" if ms is None else f"{ms:.2f}", x=x, y=y, xref=f"x{axis}", yref=f"y{axis}",
                showarrow=False, font={"size": 12 if ms is None else 17},
            )  # fmt: skip


def _marker(colour: str, pattern: str) -> dict[str, Any]:
    shape = {"shape": pattern, "fgcolor": "#FFFFFF", "size": 7, "solidity": 0.15, "fillmode": "overlay"}
    return {"color": colour, "pattern": shape}


def _launches(figure: go.Figure, bars: Sequence[FormBars], top: float) -> None:
    axis = LAUNCHES_AXIS
    patterns = ("", "/", "x", ".")
    for i, one in enumerate(bars):
        figure.add_trace(go.Bar(
            orientation="h", y=list(one.forms), x=list(one.counts), name=one.label, xaxis=f"x{axis}", yaxis=f"y{axis}",
            meta=drawn(one.number, x="counts", y="forms"), text=[f"{n:,}" for n in one.counts], textposition="auto",
            textangle=0, constraintext="none", hovertemplate="%{y}: %{x:,} launches<extra></extra>",
            marker=_marker(palette.SERIES[i % 4], patterns[i % 4]),
        ))  # fmt: skip
    figure.update_layout({
        f"xaxis{axis}": {"domain": [0.02, 0.98], "anchor": f"y{axis}", "type": "log", "rangemode": "tozero",
                         "title": {"text": "launches per step by the host (log axis)"}},
        f"yaxis{axis}": {"domain": [0.0, top - 0.08], "anchor": f"x{axis}", "autorange": "reversed"},
        "barmode": "group", "showlegend": len(bars) > 1,
    })  # fmt: skip


@dataclasses.dataclass(frozen=True)
class KindBars:
    """Kernels of one piece of each kind. labels: kinds in words; before, after: counts."""

    number: int
    labels: Sequence[str]
    before: Sequence[int]
    after: Sequence[int]


def fusion_bars(one: KindBars | None, title: str, kind: str) -> go.Figure:
    """Bars in pairs: kernels of a piece operator by operator, and after fusion."""
    figure = go.Figure()
    if one is not None:
        for key, counts in (("before", one.before), ("after", one.after)):
            colour, pattern, word = BARS[key]
            figure.add_trace(go.Bar(
                orientation="h", y=list(one.labels), x=list(counts), name=word,
                meta=drawn(one.number, x=key, y="labels"),
                text=[str(n) for n in counts], textposition="outside", cliponaxis=False, textangle=0,
                hovertemplate=f"%{{y}}<br>{word}: %{{x}} kernels<extra></extra>",
                marker=_marker(colour, pattern),
            ))  # fmt: skip
    said = f"{title} · {kind}" if kind else title
    figure.update_layout(
        title={"text": said, "font": {"size": 14}, "x": 0, "xref": "paper"},
        height=300,
        barmode="group",
        xaxis={"title": {"text": "kernels of one piece"}, "rangemode": "tozero"},
        yaxis={"autorange": "reversed"},
        margin={"t": 70},
        legend={"y": 1.02, "yanchor": "bottom"},
    )
    return figure
