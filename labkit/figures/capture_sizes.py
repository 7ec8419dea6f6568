"""Which size every number of tokens runs in, and how padding falls as a list of sizes grows. Refuses to know a rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from labkit.figures import palette
from labkit.figures.points import drawn

#: Pixels: of the staircase, between the plots, of the curve.
STAIRS, BETWEEN, CURVE = 250, 92, 190
MARKERS = ("diamond", "square", "triangle-up", "cross", "x", "star")


@dataclasses.dataclass(frozen=True)
class Stairs:
    """One run.

    tokens, runs_as: every number of tokens up to the largest, and the size that it runs in; None where it is eager.
    eager_tokens: the numbers above the largest size. step_tokens, step_counts: the traffic.
    """

    number: int
    kind: str
    title: str
    tokens: Sequence[int]
    runs_as: Sequence[int | None]
    eager_tokens: Sequence[int]
    step_tokens: Sequence[int]
    step_counts: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Spot:
    """One run in the lower plot: how many sizes, padding in %. label: the list's name and what it covers."""

    number: int
    label: str


@dataclasses.dataclass(frozen=True)
class Best:
    """The least padding that any list of so many sizes has for the traffic of run `number`, in %."""

    number: int
    sizes: Sequence[int]
    waste_pct: Sequence[float]


def sizes_figure(
    stairs: Stairs | None, spots: Sequence[Spot], at: Sequence[tuple[float, float]], best: Best | None
) -> go.Figure:
    """Above tokens asked for against tokens that run, over the traffic; below padding against the number of sizes.

    Args:
        spots: runs with the traffic of the newest, which is the last of them. at: (sizes, padding in %) of each.
    """
    figure = go.Figure(layout=_layout(stairs))
    if stairs is None:
        return figure
    figure.add_trace(go.Bar(
        x=list(stairs.step_tokens), y=list(stairs.step_counts), name="steps with so many tokens", yaxis="y3",
        marker={"color": palette.translucent(palette.SERIES[5], 0.45), "line": {"width": 0}},
        meta=drawn(stairs.number, x="step_tokens", y="step_counts"),
        hovertemplate="%{x} tokens: %{y:,} steps<extra></extra>",
    ))  # fmt: skip
    figure.add_trace(go.Scatter(
        x=list(stairs.tokens), y=list(stairs.tokens), mode="lines", name="no padding",
        line={"color": palette.NEUTRAL, "width": 1, "dash": "dot"}, meta=drawn(stairs.number, x="tokens", y="tokens"),
        hoverinfo="skip",
    ))  # fmt: skip
    figure.add_trace(go.Scatter(
        x=list(stairs.tokens), y=list(stairs.runs_as), mode="lines", name="runs as", connectgaps=False,
        line={"color": palette.SERIES[0], "width": 2, "shape": "vh"},
        meta=drawn(stairs.number, x="tokens", y="runs_as"),
        hovertemplate="%{x} tokens run as %{y}<extra></extra>",
    ))  # fmt: skip
    figure.add_trace(go.Scatter(
        x=list(stairs.eager_tokens), y=list(stairs.eager_tokens), mode="markers", name="above the largest: eager",
        marker={"symbol": "x", "size": 6, "color": palette.SERIES[1]},
        meta=drawn(stairs.number, x="eager_tokens", y="eager_tokens"),
        hovertemplate="%{x} tokens run eagerly<extra></extra>",
    ))  # fmt: skip
    if best is not None:
        figure.add_trace(go.Scatter(
            x=list(best.sizes), y=list(best.waste_pct), mode="lines+markers", name="the best list of so many sizes",
            xaxis="x2", yaxis="y2", line={"color": palette.SERIES[2], "dash": "dash"},
            marker={"symbol": "circle", "size": 5}, meta=drawn(best.number, x="advice_sizes", y="advice_waste_pct"),
            hovertemplate="%{x} sizes: %{y:.2f} % padding at best<extra></extra>",
        ))  # fmt: skip
    for i, (spot, (sizes, waste)) in enumerate(zip(spots, at, strict=True)):
        last = spot is spots[-1]
        figure.add_trace(go.Scatter(
            x=[sizes], y=[waste], mode="markers+text", name=spot.label, xaxis="x2", yaxis="y2", showlegend=False,
            marker={"symbol": MARKERS[spot.number % 6], "size": 13 if last else 9, "color": palette.SERIES[3]},
            text=[f"  run {spot.number}: {spot.label}"], textposition="middle right" if i % 2 == 0 else "top right",
            textfont={"size": 11, "color": palette.NEUTRAL}, cliponaxis=False,
            meta=drawn([spot.number], x="sizes", y="waste_pct"),
            hovertemplate=f"run {spot.number}: %{{x}} sizes, %{{y:.2f}} % padding<extra></extra>",
        ))  # fmt: skip
    return figure


def _layout(stairs: Stairs | None) -> dict[str, Any]:
    inner = STAIRS + BETWEEN + CURVE
    # As far as the traffic goes: the rest of a long list would press it into a corner. It is there to be scrolled to.
    last = 1.25 * max(stairs.step_tokens) if stairs else 1.0
    pairs = zip(stairs.tokens, stairs.runs_as, strict=True) if stairs else ()
    highest = max((size or n for n, size in pairs if n <= last), default=1)
    axis = {"zeroline": False, "linecolor": palette.NEUTRAL, "tickfont": {"size": 11}, "automargin": True,
            "showline": True, "gridcolor": palette.GRID, "rangemode": "tozero"}  # fmt: skip
    top = [(CURVE + BETWEEN) / inner, 1.0]
    return {
        "autosize": True, "template": "none", "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 12, "color": palette.NEUTRAL}, "hovermode": "closest", "height": inner + 44 + 96,
        "margin": {"l": 64, "r": 64, "t": 44, "b": 96}, "bargap": 0,
        "title": {"text": f"{stairs.title} · {stairs.kind}" if stairs else "", "font": {"size": 14}, "x": 0.01,
                  "xref": "container"},
        "xaxis": {**axis, "anchor": "y", "title": {"text": "tokens in a step", "standoff": 6}, "range": [0, last]},
        "yaxis": {**axis, "domain": top, "title": {"text": "tokens that run", "standoff": 8},
                  "range": [0, 1.06 * highest]},
        "yaxis3": {**axis, "overlaying": "y", "side": "right", "showgrid": False, "anchor": "x",
                   "title": {"text": "steps", "standoff": 6}},
        "xaxis2": {**axis, "anchor": "y2", "title": {"text": "number of sizes, and so of graphs", "standoff": 6}},
        "yaxis2": {**axis, "anchor": "x2", "domain": [0.0, CURVE / inner],
                   "title": {"text": "padding, % of what runs", "standoff": 8}},
        "legend": {"orientation": "h", "x": 0, "y": 0, "yanchor": "bottom", "yref": "container", "font": {"size": 11}},
    }  # fmt: skip
