"""Two machines over the batch: median step time of each, and how many times longer the second takes.

Refuses to know recordings: it takes the pairs that `measure.machines` has made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from labkit.figures import palette
from labkit.measure.machines import SAYS, MachineDiff, Pair

HEIGHT = 460
#: First machine, second machine: one fills its markers' line, the other is dashed.
STYLES = (("solid", "circle"), ("dash", "diamond-open"))


def machines_figure(found: MachineDiff, *, by: str = "batch") -> go.Figure:
    """Times at the left, ratios at the right, one line per backend, mode, compilation, model and other axis.

    Args:
        by: the x axis, "batch" or "context".

    Traces are named in `meta`: ("time", series, 0 | 1) and ("ratio", series). A ratio that drowns in noise is open.
    """
    figure = go.Figure(layout=_layout(found, by))
    for series, pairs in _series(found.pairs, by).items():
        hue = palette.colour(pairs[0].first.backend)
        xs = [getattr(pair.first, by) for pair in pairs]
        for which, name in enumerate(found.names):
            rows = [(pair.first, pair.second)[which] for pair in pairs]
            dash, symbol = STYLES[which]
            figure.add_trace(
                go.Scatter(
                    x=xs, y=[row.p50_ms for row in rows], mode="lines+markers", name=f"{series} · {name}",
                    meta=["time", series, which], line={"color": hue, "dash": dash}, opacity=0.9,
                    marker={"color": hue, "symbol": symbol, "size": 8},
                    error_y={
                        "type": "data", "symmetric": False, "thickness": 1,
                        "array": [row.p90_ms - row.p50_ms for row in rows],
                        "arrayminus": [row.p50_ms - row.p10_ms for row in rows],
                    },
                    hovertemplate=f"{name}, {series}: %{{y:.3f}} ms<extra></extra>",
                )
            )  # fmt: skip
        figure.add_trace(
            go.Scatter(
                x=xs, y=[pair.ratio.value for pair in pairs], mode="lines+markers", name=series, showlegend=False,
                meta=["ratio", series], line={"color": hue, "dash": "dot"}, xaxis="x2", yaxis="y2",
                marker={
                    "color": hue, "size": 9,
                    "symbol": ["square" if pair.ratio.shown else "square-open" for pair in pairs],
                },
                customdata=[[pair.ratio.text, "; ".join(pair.notes)] for pair in pairs],
                hovertemplate=f"{series}: %{{customdata[0]}}<br>%{{customdata[1]}}<extra></extra>",
            )
        )  # fmt: skip
    return figure


def _series(pairs: Sequence[Pair], by: str) -> dict[str, list[Pair]]:
    other = "context" if by == "batch" else "batch"
    out: dict[str, list[Pair]] = {}
    for pair in pairs:
        row = pair.first
        compiled = "" if row.compile == "NONE" else f" {row.compile}"
        name = f"{row.model} {row.backend} {row.requested_mode}{compiled}, {other} {getattr(row, other)}"
        out.setdefault(name, []).append(pair)
    return {name: sorted(found, key=lambda pair: getattr(pair.first, by)) for name, found in out.items()}


def _layout(found: MachineDiff, by: str) -> dict[str, Any]:
    a, b = found.names
    axis = {
        "zeroline": False, "showline": True, "linecolor": palette.NEUTRAL, "tickfont": {"size": 11}, "automargin": True,
        "gridcolor": palette.GRID,
    }  # fmt: skip
    over = {**axis, "type": "log", "showgrid": False, "dtick": 0.30103, "title": {"text": by, "standoff": 8}}
    note = {
        "x": 1, "xref": "paper", "yref": "paper", "xanchor": "right", "showarrow": False,
        "font": {"size": 11, "color": palette.NEUTRAL},
    }  # fmt: skip
    return {
        "title": {"text": f"{a} and {b}: {SAYS}", "font": {"size": 14}},
        "height": HEIGHT, "autosize": True, "margin": {"l": 62, "r": 14, "t": 60, "b": 120}, "template": "none",
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 12, "color": palette.NEUTRAL}, "hovermode": "closest",
        "legend": {"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top", "font": {"size": 11}},
        "xaxis": {**over, "domain": [0, 0.58]},
        "yaxis": {**axis, "type": "log", "title": {"text": "median step time, ms", "standoff": 8}},
        "xaxis2": {**over, "domain": [0.68, 1], "anchor": "y2"},
        "yaxis2": {
            **axis, "anchor": "x2", "rangemode": "tozero",
            "title": {"text": f"time on {b} over time on {a}", "standoff": 8},
        },
        "annotations": [
            {**note, "text": f"RECORDED · {found.first.label.split(' · ', 1)[1]}", "y": 1.07, "yanchor": "bottom"},
            {**note, "text": f"RECORDED · {found.second.label.split(' · ', 1)[1]}", "y": 1.02, "yanchor": "bottom"},
        ],
    }  # fmt: skip
