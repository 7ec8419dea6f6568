"""Blocks of a KV cache with who uses them, over the block tables of the requests. Refuses to know a pool.

Owners are letters; a colour, a pattern and the letter itself say the same. Shared blocks have both letters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from labkit.figures import palette
from labkit.figures.packing import fill
from labkit.figures.points import drawn

NULL, BLANK, USED, CACHED = "null", "blank", "in use", "cached"
HEIGHT = 360
#: Owners → colour and pattern; two owners share both their letters.
_STYLES = {"A": ("#2C7FB8", ""), "B": ("#D55E00", "/"), "C": ("#009E73", "."), "": ("#777777", "")}
_SHARED = ("#8A5FA8", "x")
_FAINT = {NULL: 0.35, BLANK: 0.0, CACHED: 0.16, USED: 0.42}


def blocks_figure(number: int | None, data: Mapping[str, Any], title: str = "") -> go.Figure:
    """The cache above, one box a block, and below a row of boxes for each request's block table.

    Args:
        number: of the run, None for empty axes. data: `blocks`, `states`, `owners` and `fills` by block, and `tables`.
    """
    figure = go.Figure(layout=_layout(title))
    if number is None:
        return figure
    states, owners = data["states"], data["owners"]
    figure.add_trace(go.Bar(
        x=list(data["blocks"]), y=[0.9] * len(states), name="blocks", showlegend=False, textposition="inside",
        insidetextanchor="middle", textangle=0, constraintext="none", width=0.9,
        text=[_word(state, owner, fill) for state, owner, fill in zip(states, owners, data["fills"], strict=True)],
        customdata=[f"block {b}: {state}" + (f" by {' and '.join(owner)}" if owner else "")
                    + (f", {fill} tokens" if fill else "")
                    for b, state, owner, fill in zip(data["blocks"], states, owners, data["fills"], strict=True)],
        hovertemplate="%{customdata}<extra></extra>", marker=_marker(states, owners), meta=drawn(number, x="blocks"),
    ))  # fmt: skip
    x, base, text, colours, shapes = [], [], [], [], []
    names = list(data["tables"])
    for row, name in enumerate(names):
        for place, block in enumerate(data["tables"][name]):
            x.append(place)
            base.append(row)
            text.append(str(block))
            colour, shape = _style(owners[block])
            colours.append(colour)
            shapes.append(shape)
    figure.add_trace(go.Bar(
        orientation="v", x=x, y=[0.86] * len(x), base=base, xaxis="x2", yaxis="y2", text=text, width=0.9,
        textposition="inside", insidetextanchor="middle", textangle=0, constraintext="none", showlegend=False,
        hovertemplate="entry %{x}: block %{text}<extra></extra>", name="tables",
        marker=fill(colours, shapes),
    ))  # fmt: skip
    figure.update_layout(yaxis2={"tickvals": [i + 0.43 for i in range(len(names))],
                                 "ticktext": [f"table of {name}" for name in names]})  # fmt: skip
    return figure


def _word(state: str, owner: str, fill: str) -> str:
    if state == NULL:
        return "null"
    if state == BLANK:
        return ""
    return f"<b>{'+'.join(owner)}</b><br>{fill}" if owner else f"cached<br>{fill}"


def _style(owner: str) -> tuple[str, str]:
    return _SHARED if len(owner) > 1 else _STYLES[owner]


def _marker(states: Sequence[str], owners: Sequence[str]) -> dict[str, Any]:
    styles = [_style(owner) for owner in owners]
    shapes = [shape if state == USED else "" for (_, shape), state in zip(styles, states, strict=True)]
    return fill([hue for hue, _ in styles], shapes, [_FAINT[state] for state in states])


def _layout(title: str) -> dict[str, Any]:
    axis = {"zeroline": False, "linecolor": palette.NEUTRAL, "tickfont": {"size": 11}, "automargin": True,
            "fixedrange": True, "showgrid": False}  # fmt: skip
    caption = {"standoff": 4, "font": {"size": 12}}
    return {
        "height": HEIGHT, "autosize": True, "template": "none", "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)", "font": {"size": 12, "color": palette.NEUTRAL}, "hovermode": "closest",
        "barmode": "overlay", "margin": {"l": 90, "r": 20, "t": 48, "b": 52},
        "title": {"text": title, "font": {"size": 14}, "x": 0, "xref": "paper"},
        "xaxis": {**axis, "title": {**caption, "text": "block of the KV cache"}, "dtick": 1, "anchor": "y",
                  "range": [-0.6, 13.6]},
        "yaxis": {**axis, "domain": [0.62, 1], "range": [0, 0.95], "showticklabels": False, "ticks": ""},
        "xaxis2": {**axis, "title": {**caption, "text": "entry of the block table (position ÷ page size)"},
                   "dtick": 1, "anchor": "y2", "range": [-0.6, 13.6]},
        "yaxis2": {**axis, "domain": [0, 0.34], "range": [2, 0], "anchor": "x2"},
    }  # fmt: skip
