"""A search for one wrong part: parts by tests, what was off, what is cleared; below how wrong the last answers were.

Refuses to know what a test is, and to decide who is left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import plotly.graph_objects as go

from labkit.figures import palette
from labkit.figures.points import drawn

ON, OFF = "#2C7FB8", "#D55E00"
#: Pixels for a row of the grid, and for the curve under it.
ROW, CURVE, BETWEEN = 26, 130, 90


@dataclasses.dataclass(frozen=True)
class Test:
    """One run. off: keys of the parts that were out of play. difference: how far each answer was off."""

    number: int
    off: Sequence[str]
    wrong: bool
    difference: Sequence[float]


def switchboard_figure(
    parts: Sequence[tuple[str, str]],
    tests: Sequence[Test],
    left: Sequence[str],
    kind: str,
    *,
    case: int = 0,
    unit: str = "difference",
) -> go.Figure:
    """Parts as rows, tests as columns: ● in play, ○ off. A part that is cleared is grey, one that is left is bold.

    Args:
        parts: (key, label). left: keys that no test has cleared. unit: of the differences.
    """
    figure = go.Figure()
    rows = max(1, len(parts))
    inner = ROW * rows + BETWEEN + CURVE
    low = (CURVE + BETWEEN) / inner
    labels = {key: f"<b>{label} ◀</b>" if key in left else label for key, label in parts}
    columns = [f"run {test.number}<br>{'✗ wrong' if test.wrong else '✓ right'}" for test in tests]
    for name, off, symbol, colour in (("in play", False, "circle", ON), ("off", True, "circle-open", OFF)):
        points = [(columns[i], labels[key]) for i, test in enumerate(tests) for key, _ in parts
                  if (key in test.off) == off]  # fmt: skip
        figure.add_trace(go.Scatter(
            x=[x for x, _ in points], y=[y for _, y in points], mode="markers", name=name, meta=["grid", 0, name],
            marker={"symbol": symbol, "size": 12, "color": colour, "line": {"width": 2, "color": colour}},
            hovertemplate="%{y}<br>%{x}: " + name + "<extra></extra>",
        ))  # fmt: skip
    for place, test in enumerate(tests[-3:]):
        colour = palette.SERIES[place % len(palette.SERIES)]
        figure.add_trace(go.Scatter(
            x=list(range(1, len(test.difference) + 1)), y=list(test.difference), xaxis="x2", yaxis="y2",
            mode="lines+markers", name=f"run {test.number}", meta=drawn(test.number, y="difference"),
            line={"color": colour, "dash": ("dot", "dash", "solid")[place], "width": 2},
            marker={"symbol": ("circle", "square", "diamond")[place], "color": colour, "size": 7},
        ))  # fmt: skip
    words = f"{len(left)} of {len(parts)} parts left" if parts else "The switchboard"
    said = f"Case {case} · {kind} · {words}" if tests else words
    figure.update_layout(
        height=inner + 150, margin={"l": 60, "r": 20, "t": 90, "b": 50},
        title={"text": said, "font": {"size": 14}, "x": 0, "xref": "paper", "y": 0.98, "yref": "container",
               "yanchor": "top"},
        xaxis={"anchor": "y", "type": "category", "categoryorder": "array", "categoryarray": columns, "side": "bottom"},
        yaxis={"anchor": "x", "domain": [low, 1], "type": "category", "categoryorder": "array", "showgrid": True,
               "categoryarray": [labels[key] for key, _ in parts], "autorange": "reversed"},
        xaxis2={"anchor": "y2", "title": {"text": "token"}, "visible": bool(tests), "dtick": 1},
        yaxis2={"anchor": "x2", "domain": [0, CURVE / inner], "title": {"text": unit.replace(" of a ", "<br>of a ")},
                "visible": bool(tests), "rangemode": "tozero"},
    )  # fmt: skip
    return figure
