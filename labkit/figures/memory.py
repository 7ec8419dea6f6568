"""Where an engine's memory goes: for each engine a bar of what was predicted and one of what was found.

Refuses to know an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from labkit.figures import palette
from labkit.measure.memory import MIB, PARTS, WORDS, MemoryReport
from labkit.measure.provenance import ProvenanceError

LOOKS = {
    "weights": ("#2C7FB8", ""), "workspace": ("#8A7000", "."), "graphs": ("#B35FA0", "x"), "kv": ("#009E73", "/"),
}  # fmt: skip
ROW = 58


def memory_figure(reports: Sequence[MemoryReport], origin: str = "") -> go.Figure:
    """Horizontal stacked bars in MiB, per engine one "predicted" and, where it was looked at, one "found".

    Traces are named in `meta`: the part's name. What nothing predicts is missing from a predicted bar.

    Raises:
        ProvenanceError: LIVE and RECORDED reports in one chart.
    """
    kinds = {report.kind for report in reports}
    if len(kinds) > 1:
        named = ", ".join(sorted(map(str, kinds)))
        raise ProvenanceError("one chart of memory", f"it is of different kinds: {named}", "Draw one chart each.")
    bars: list[tuple[str, MemoryReport, str]] = []
    for report in reports:
        found = [name for name in ("predicted", "actual") if any(getattr(p, name) is not None for p in report.parts)]
        bars += [(f"{report.title}<br>{'found' if name == 'actual' else name}", report, name) for name in found]
    figure = go.Figure(layout=_layout([label for label, _, _ in bars], origin or "".join(map(str, kinds))))
    for part in PARTS:
        hue, pattern = LOOKS[part]
        values = [getattr(report.part(part), name) for _, report, name in bars]
        figure.add_trace(
            go.Bar(
                y=[label for label, _, _ in bars], x=[None if v is None else v / MIB for v in values],
                orientation="h", name=WORDS[part], meta=[part],
                marker={
                    "color": hue, "line": {"color": "#FFFFFF", "width": 0.5},
                    "pattern": {"shape": pattern, "fgcolor": "#FFFFFF", "size": 6, "fillmode": "overlay"},
                },
                customdata=[[report.part(part).note] for _, report, _ in bars],
                hovertemplate=f"{WORDS[part]}: %{{x:,.1f}} MiB<br>%{{customdata[0]}}<extra></extra>",
            )
        )  # fmt: skip
    return figure


def _layout(labels: list[str], origin: str) -> dict[str, Any]:
    axis = {
        "zeroline": False, "showline": True, "linecolor": palette.NEUTRAL, "tickfont": {"size": 11}, "automargin": True,
    }  # fmt: skip
    return {
        "title": {"text": "Where the memory goes", "font": {"size": 14}},
        "height": 190 + ROW * max(len(labels), 1), "autosize": True, "margin": {"l": 20, "r": 14, "t": 64, "b": 110},
        "template": "none", "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 12, "color": palette.NEUTRAL}, "barmode": "stack", "bargap": 0.25, "hovermode": "closest",
        "legend": {
            "orientation": "h", "x": 0, "y": -0.2, "yanchor": "top", "font": {"size": 11}, "traceorder": "normal",
        },
        "xaxis": {**axis, "gridcolor": palette.GRID, "rangemode": "tozero", "title": {"text": "MiB", "standoff": 8}},
        "yaxis": {
            **axis, "type": "category", "categoryorder": "array", "categoryarray": labels[::-1], "showgrid": False,
        },
        "annotations": [
            {
                "text": origin, "x": 1, "y": 1, "xref": "paper", "yref": "paper", "xanchor": "right",
                "yanchor": "bottom", "showarrow": False, "font": {"size": 11, "color": palette.NEUTRAL},
            },
        ],
    }  # fmt: skip
