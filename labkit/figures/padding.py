"""Where padding goes: real and padded tokens of each graph, eager steps by reason. Refuses to know how steps ran."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from labkit.figures import palette
from labkit.graphs.padding import PaddingLine, PaddingReport

HEIGHT = 420
#: With more bars than this the figures above them would overlap; hovering shows them.
LABELLED_BARS = 10
#: Real tokens by runtime mode, told apart by pattern: a backend has one colour in every figure.
PATTERNS = {"FULL": "", "PIECEWISE": ".", "NONE": "x"}
PADDING_PATTERN = "/"


def padding_figure(report: PaddingReport, origin: str) -> go.Figure:
    """One bar per graph, real tokens below and padding on top; at the right one bar per reason for an eager step.

    Args:
        origin: where the steps are from, such as `Provenance.label`; its first word is the kind of number.

    Traces are named in `meta`: ("real", mode) or ("padding",).
    """
    figure = go.Figure(layout=_layout(report, origin))
    hue = palette.colour(report.backends[0]) if len(report.backends) == 1 else palette.OTHER_COLOUR
    by_mode: dict[str, list[PaddingLine]] = {}
    for line in report.lines:
        by_mode.setdefault(line.mode, []).append(line)
    for mode, lines in by_mode.items():
        pattern = {"shape": PATTERNS[mode], "fgcolor": "#FFFFFF", "size": 6, "fillmode": "overlay"}
        name = f"real tokens, {'eager' if mode == 'NONE' else mode}"
        real = [line.real_tokens for line in lines]
        figure.add_trace(_bars(lines, real, name, ["real", mode], {"color": hue, "pattern": pattern}))
    graphs = [line for line in report.lines if line.size is not None]
    if graphs:
        marker = {
            "color": palette.translucent(hue, 0.15), "line": {"color": hue, "width": 1},
            "pattern": {"shape": PADDING_PATTERN, "fgcolor": hue, "size": 6},
        }  # fmt: skip
        figure.add_trace(_bars(graphs, [line.padded_tokens for line in graphs], "padding", ["padding"], marker))
    if 0 < len(report.lines) <= LABELLED_BARS:
        figure.add_trace(_labels(report))
    return figure


def _bars(lines: list[PaddingLine], tokens: list[int], name: str, meta: list[str], marker: dict[str, Any]) -> go.Bar:
    return go.Bar(
        x=[_tick(line) for line in lines], y=tokens, name=name, meta=meta, marker=marker,
        customdata=[[one.name, one.ran, one.steps, one.real_tokens, one.padded_tokens, one.share] for one in lines],
        hovertemplate="%{customdata[0]}, ran %{customdata[1]} tokens: %{customdata[2]:,} steps<br>"
        "%{customdata[3]:,} real tokens, %{customdata[4]:,} padded (%{customdata[5]:.1%})<extra></extra>",
    )  # fmt: skip


def _labels(report: PaddingReport) -> go.Scatter:
    """Steps and share above each bar: a chart should be readable without hovering."""
    return go.Scatter(
        x=[_tick(line) for line in report.lines],
        y=[line.real_tokens + line.padded_tokens for line in report.lines],
        text=[
            f"<b>{line.steps:,}</b> step{'s' if line.steps > 1 else ''}"
            + (f"<br>{line.share:.0%} padding" if line.size is not None else "")
            for line in report.lines
        ],
        mode="text", textposition="top center", textfont={"size": 11, "color": palette.NEUTRAL}, cliponaxis=False,
        hoverinfo="skip", showlegend=False, meta=["labels"], name="steps",
    )  # fmt: skip


#: Reasons for the axis, shorter than in words.
_SHORT = {
    "ABOVE_LARGEST": "above the<br>largest size",
    "NO_GRAPH": "no graph for<br>such a batch",
    "NOT_CAPTURED": "not captured",
}


def _tick(line: PaddingLine) -> str:
    if line.size is not None:
        return f"{line.mode}<br>{line.size}"
    return f"eager<br>{_SHORT[line.miss.name] if line.miss else line.ran}"


def _layout(report: PaddingReport, origin: str) -> dict[str, Any]:
    top = max([line.real_tokens + line.padded_tokens for line in report.lines], default=1)
    note = {
        "xref": "paper", "yref": "paper", "showarrow": False, "font": {"size": 11, "color": palette.NEUTRAL},
    }  # fmt: skip
    axis = {
        "zeroline": False, "showline": True, "linecolor": palette.NEUTRAL, "tickfont": {"size": 11}, "automargin": True,
    }  # fmt: skip
    return {
        "height": HEIGHT, "autosize": True, "margin": {"l": 62, "r": 14, "t": 60, "b": 116}, "template": "none",
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 12, "color": palette.NEUTRAL}, "hovermode": "closest", "barmode": "stack", "bargap": 0.25,
        "legend": {
            "orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 11}, "traceorder": "normal",
        },
        "xaxis": {
            **axis, "type": "category", "categoryorder": "array", "showgrid": False,
            "categoryarray": [_tick(line) for line in report.lines],
        },
        # From zero, with room above for the labels.
        "yaxis": {
            **axis, "gridcolor": palette.GRID, "range": [0, top * 1.2],
            "title": {"text": "tokens that ran, all steps", "standoff": 8},
        },
        "annotations": [
            {**note, "text": origin, "x": 1, "y": -0.36, "xanchor": "right"},
            {**note, "text": report.summary, "x": 0, "y": -0.27, "xanchor": "left"},
        ],
    }  # fmt: skip
