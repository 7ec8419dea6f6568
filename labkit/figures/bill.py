"""What a configuration costs, four prices side by side, over the curve of what it costs in all after some requests.

Refuses to know where the numbers come from, and to draw a price that is not known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from labkit.figures import palette
from labkit.figures.points import drawn

#: Key of a price → its heading.
PRICES = {
    "startup_s": "start-up, s",
    "mib": "graphs, MiB",
    "step_ms": "a step, ms",
    "looks": "places to look",
}
UNKNOWN = "not recorded"
PATTERNS = ("", "/", "x", ".", "\\", "-", "+", "|")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "5px,2px", "2px,6px")
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "pentagon", "hexagram")
#: Pixels for one bar, for what is around the bars, and for the curve below.
BAR, AROUND, CURVE = 24, 70, 230


@dataclasses.dataclass(frozen=True)
class Bill:
    """One run. label: what a reader calls it. Prices are None where nobody knows them; the curve may be empty."""

    number: int
    label: str
    startup_s: float | None
    mib: float | None
    step_ms: float | None
    looks: int | None
    requests: Sequence[int]
    total_s: Sequence[float]


def bill_figure(bills: Sequence[Bill], kind: str, *, title: str = "") -> go.Figure:
    """One bar per run in each of four small charts, and below the seconds after any number of requests.

    Args:
        kind: LIVE, RECORDED or SIMULATED, of all that is drawn.
        title: what the requests are.

    A run has one colour, pattern, dash and marker throughout.
    """
    figure = go.Figure()
    curves = [bill for bill in bills if len(bill.total_s)]
    rows = max(2, len(bills))
    inner = BAR * rows + AROUND + (CURVE if curves else 0)
    low = (CURVE + AROUND) / inner if curves else 0.0
    for column, (key, heading) in enumerate(PRICES.items()):
        figure.add_traces(_bars(bills, key, column))
        _axes(figure, bills, key, heading, column, low)
    for bill in curves:
        figure.add_trace(_curve(bill, bills.index(bill)))
    said = f"The bill · {kind}" if kind else "The bill"
    figure.update_layout(
        height=inner + 160, barmode="overlay", showlegend=True, margin={"l": 60, "r": 24, "t": 60, "b": 100},
        legend={"orientation": "h", "x": 0, "y": -70 / inner, "yanchor": "top", "font": {"size": 11}},
        title={"text": f"{said}{': ' + title if title else ''}", "font": {"size": 14}, "x": 0, "xref": "paper"},
        xaxis5={"type": "log", "anchor": "y5", "domain": [0, 0.97], "visible": bool(curves),
                "title": {"text": "requests served"}, "dtick": 1},
        yaxis5={"type": "log", "anchor": "x5", "domain": [0, max(low - AROUND / inner, 0.01)], "visible": bool(curves),
                "title": {"text": "seconds in all, start-up included"}, "dtick": 1},
    )  # fmt: skip
    return figure


def _axis(column: int) -> str:
    return "" if column == 0 else str(column + 1)


def _style(place: int) -> dict[str, Any]:
    colour = palette.SERIES[place % len(palette.SERIES)]
    return {
        "color": colour, "line": {"color": colour, "width": 1},
        "pattern": {"shape": PATTERNS[place % len(PATTERNS)], "fgcolor": "#FFFFFF", "size": 6, "fillmode": "overlay"},
    }  # fmt: skip


def _bars(bills: Sequence[Bill], key: str, column: int) -> list[go.Bar]:
    """One trace for each run, so that its pattern is its own; words where a price is not known."""
    axis, out = _axis(column), []
    for place, bill in enumerate(bills):
        value = getattr(bill, key)
        if value is None:
            continue
        out.append(go.Bar(
            orientation="h", y=[bill.label], x=[value], xaxis=f"x{axis}", yaxis=f"y{axis}", name=bill.label,
            meta=drawn(bill.number, x=key), showlegend=False, marker=_style(place),
            text=[f"{value:,.3g}"], textposition="outside",
            cliponaxis=False, textfont={"size": 11, "color": palette.NEUTRAL}, width=0.7,
            hovertemplate=f"%{{y}}<br>{PRICES[key]}: %{{x:,.4g}}<extra></extra>",
        ))  # fmt: skip
    missing = [bill.label for bill in bills if getattr(bill, key) is None]
    if missing:
        out.append(go.Bar(
            orientation="h", y=missing, x=[0] * len(missing), xaxis=f"x{axis}", yaxis=f"y{axis}", name=UNKNOWN,
            meta=["unknown", 0, key], showlegend=False, text=[UNKNOWN] * len(missing), textposition="outside",
            hoverinfo="skip",
            cliponaxis=False, textfont={"size": 11, "color": palette.NEUTRAL},
        ))  # fmt: skip
    return out


def _axes(figure: go.Figure, bills: Sequence[Bill], key: str, heading: str, column: int, low: float) -> None:
    axis = _axis(column)
    known = [v for v in (getattr(bill, key) for bill in bills) if v is not None]
    top = max(known, default=1.0) or 1.0
    width = 0.25
    labels = [bill.label for bill in bills]
    figure.update_layout({
        f"xaxis{axis}": {
            "anchor": f"y{axis}", "domain": [column * width, column * width + width - 0.03], "range": [0, top * 1.6],
            "title": {"text": heading, "font": {"size": 12}, "standoff": 6}, "nticks": 4,
        },
        f"yaxis{axis}": {
            "anchor": f"x{axis}", "domain": [low, 1], "type": "category", "categoryorder": "array",
            "categoryarray": labels, "autorange": "reversed", "showticklabels": column == 0, "showgrid": False,
        },
    })  # fmt: skip


def _curve(bill: Bill, place: int) -> go.Scatter:
    colour = palette.SERIES[place % len(palette.SERIES)]
    return go.Scatter(
        x=list(bill.requests), y=list(bill.total_s), xaxis="x5", yaxis="y5", mode="lines+markers",
        name=bill.label, meta=drawn(bill.number, x="requests", y="total_s"), cliponaxis=False,
        line={"color": colour, "dash": DASHES[place % len(DASHES)], "width": 2},
        marker={"symbol": MARKERS[place % len(MARKERS)], "color": colour, "size": 7, "maxdisplayed": 12},
        showlegend=True,
        hovertemplate=f"{bill.label}<br>%{{x:,}} requests: %{{y:,.4g}} s<extra></extra>",
    )  # fmt: skip
