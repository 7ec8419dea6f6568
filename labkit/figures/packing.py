"""A step's tokens in one row, the pages behind them, and what it costs to run them one way or another.

Requests have a letter, a colour and a pattern each. Refuses to know who scheduled or timed them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from labkit.figures import palette
from labkit.figures.points import drawn

HEIGHT = 470
PATTERNS = ("", "/", ".", "x", "\\", "-", "+", "|")
#: Way → its words, colour and pattern.
WAYS = {
    "unified": ("one call", "#2C7FB8", ""), "split": ("two calls", "#009E73", "/"),
    "padded": ("padded to a rectangle", "#D55E00", "x"),
}  # fmt: skip
#: A share is drawn at least this wide, as a part of the whole: a decode beside a long chunk would not be seen.
THINNEST = 0.06
#: Boxes of blocks that fit into one row of a request; the others are named by their number.
MAX_BLOCKS = 12


@dataclasses.dataclass(frozen=True)
class Packed:
    """One step. names, tokens, starts: of each request's share. blocks: its pages in order. query_start_loc: bounds."""

    number: int
    names: Sequence[str]
    tokens: Sequence[int]
    starts: Sequence[int]
    blocks: Sequence[Sequence[int]]
    query_start_loc: Sequence[int]
    block_size: int


@dataclasses.dataclass(frozen=True)
class Costs:
    """What the step costs by way: amounts by key of WAYS, low and high of each where it was measured.

    The run's data must hold `costs`, the amounts in the order of `ways`. unit: of the axis.
    """

    number: int
    ways: Sequence[str]
    amounts: Sequence[float]
    spread: Sequence[tuple[float, float]] | None
    unit: str
    texts: Sequence[str]


def packing_figure(packed: Packed | None, costs: Costs | None, title: str = "") -> go.Figure:
    """The packed row above, pages of each request in the middle, bars of the ways below; empty axes for None."""
    figure = go.Figure(layout=_layout(title))
    if packed is not None:
        _strip(figure, packed)
        _pages(figure, packed)
    if costs is not None:
        figure.add_trace(_bars(costs))
        highest = max([*costs.amounts, *(high for _, high in costs.spread or ())])
        figure.add_trace(go.Scatter(
            x=[1.62 * highest] * len(costs.ways), y=[WAYS[way][0] for way in costs.ways], xaxis="x3", yaxis="y3",
            mode="text", text=list(costs.texts), textposition="middle left", hoverinfo="skip", showlegend=False,
            name="amounts", meta=drawn(costs.number, text="texts"),
        ))  # fmt: skip
        figure.update_layout(xaxis3={"title": {"text": costs.unit}, "range": [0, 1.65 * highest]})
    return figure


def style(i: int) -> tuple[str, str]:
    """Colour and pattern of request number i."""
    return palette.SERIES[i % len(palette.SERIES)], PATTERNS[i % len(PATTERNS)]


def fill(hues: Sequence[str], shapes: Sequence[str], strength: Sequence[float] | float = 0.42) -> dict[str, Any]:
    """A marker of bars: thin colours under thin patterns, so that the page's own text colour is read on them."""
    depth = [strength] * len(hues) if isinstance(strength, float) else strength
    return {
        "color": [palette.translucent(hue, one) for hue, one in zip(hues, depth, strict=True)],
        "line": {"color": palette.NEUTRAL, "width": 1},
        "pattern": {"shape": list(shapes), "fgcolor": [palette.translucent(hue, 0.75) for hue in hues], "size": 8,
                    "solidity": 0.2, "fillmode": "overlay"},
    }  # fmt: skip


def _strip(figure: go.Figure, packed: Packed) -> None:
    total = sum(packed.tokens)
    widths = [max(n / total, THINNEST) for n in packed.tokens]
    bounds = [0.0]
    for width in widths:
        bounds.append(bounds[-1] + width / sum(widths))
    styles = [style(ord(name) - ord("A")) for name in packed.names]
    figure.add_trace(go.Bar(
        orientation="h", y=["tokens"] * len(widths), base=bounds[:-1],
        x=[b - a for a, b in zip(bounds, bounds[1:], strict=False)],
        text=[f"<b>{name}</b> {n}" for name, n in zip(packed.names, packed.tokens, strict=True)],
        customdata=[[n, start, start + n - 1] for n, start in zip(packed.tokens, packed.starts, strict=True)],
        hovertemplate="%{text} tokens at positions %{customdata[1]}–%{customdata[2]}<extra></extra>",
        textposition="inside", insidetextanchor="middle", textangle=0, constraintext="none", showlegend=False,
        marker=fill([hue for hue, _ in styles], [shape for _, shape in styles]), name="packed batch",
    ))  # fmt: skip
    figure.add_trace(go.Scatter(
        x=bounds, y=["query_start_loc"] * len(bounds), mode="text", text=[str(n) for n in packed.query_start_loc],
        hoverinfo="skip", showlegend=False, name="query_start_loc", meta=drawn(packed.number, text="bounds"),
    ))  # fmt: skip


def _pages(figure: go.Figure, packed: Packed) -> None:
    rows: list[str] = []
    x, text, hues, shapes, strength, hover = [], [], [], [], [], []
    for name, start, n, blocks in zip(packed.names, packed.starts, packed.tokens, packed.blocks, strict=True):
        shown = list(enumerate(blocks))
        if len(shown) > MAX_BLOCKS:
            shown = [*shown[: MAX_BLOCKS - 3], (-1, -1), *shown[-2:]]
        for place, (i, block) in enumerate(shown):
            rows.append(f"pages of {name}")
            x.append(place)
            text.append("…" if i < 0 else str(block))
            written = i >= 0 and (i + 1) * packed.block_size > start
            colour, shape = style(ord(name) - ord("A"))
            hues.append(colour)
            strength.append(0.42 if written else 0.12)
            shapes.append(shape if written else "")
            last = min((i + 1) * packed.block_size, start + n) - 1
            what = "written in this step" if written else "read only"
            span = f"positions {i * packed.block_size}–{last}"
            hover.append("more pages" if i < 0 else f"block {block}: {span}, {what}")
    figure.add_trace(go.Bar(
        orientation="h", y=rows, x=[0.92] * len(x), base=x, xaxis="x2", yaxis="y2", text=text, textposition="inside",
        insidetextanchor="middle", textangle=0, constraintext="none", customdata=hover, showlegend=False,
        hovertemplate="%{customdata}<extra></extra>", name="pages",
        marker=fill(hues, shapes, strength),
    ))  # fmt: skip


def _bars(costs: Costs) -> go.Bar:
    known = [WAYS[way] for way in costs.ways]
    error = None
    if costs.spread is not None:
        pairs = list(zip(costs.amounts, costs.spread, strict=True))
        error = {
            "type": "data", "symmetric": False, "thickness": 1, "width": 3,
            "array": [high - mid for mid, (_, high) in pairs], "arrayminus": [mid - low for mid, (low, _) in pairs],
        }  # fmt: skip
    return go.Bar(
        orientation="h", y=[words for words, _, _ in known], x=list(costs.amounts), xaxis="x3", yaxis="y3",
        error_x=error, customdata=list(costs.texts), showlegend=False, name="ways",
        meta=drawn(costs.number, x="costs"), hovertemplate="%{y}: %{customdata}<extra></extra>",
        marker=fill([hue for _, hue, _ in known], [shape for _, _, shape in known], 0.6),
    )  # fmt: skip


def _layout(title: str) -> dict[str, Any]:
    axis = {"zeroline": False, "linecolor": palette.NEUTRAL, "tickfont": {"size": 11}, "automargin": True,
            "fixedrange": True}  # fmt: skip
    bare = {**axis, "showticklabels": False, "showgrid": False, "ticks": ""}
    note = {"showarrow": False, "font": {"size": 11, "color": palette.NEUTRAL}, "xref": "paper", "yref": "paper",
            "x": 0, "xanchor": "left", "yanchor": "bottom"}  # fmt: skip
    return {
        "height": HEIGHT, "autosize": True, "template": "none", "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)", "font": {"size": 12, "color": palette.NEUTRAL}, "hovermode": "closest",
        "barmode": "overlay", "bargap": 0.25, "margin": {"l": 120, "r": 24, "t": 62, "b": 52},
        "title": {"text": title, "font": {"size": 14}, "x": 0, "xref": "paper"},
        "xaxis": {**bare, "anchor": "y", "range": [-0.04, 1.04]},
        "yaxis": {**axis, "domain": [0.80, 0.97], "type": "category", "showgrid": False, "categoryorder": "array",
                  "categoryarray": ["query_start_loc", "tokens"]},
        "xaxis2": {**bare, "anchor": "y2", "range": [-0.1, MAX_BLOCKS + 0.1]},
        "yaxis2": {**axis, "domain": [0.36, 0.70], "type": "category", "autorange": "reversed", "showgrid": False,
                   "anchor": "x2"},
        "xaxis3": {**axis, "anchor": "y3", "gridcolor": palette.GRID,
                   "title": {"font": {"size": 12}, "standoff": 6}},
        "yaxis3": {**axis, "domain": [0, 0.26], "type": "category", "autorange": "reversed", "showgrid": False,
                   "anchor": "x3"},
        "annotations": [
            {**note, "y": 0.98, "text": "the packed batch (a narrow share is drawn wider than it is)"},
            {**note, "y": 0.71, "text": "KV pages by number: full colour is written in this step, pale is only read"},
            {**note, "y": 0.27, "text": "what it takes"},
        ],
    }  # fmt: skip
