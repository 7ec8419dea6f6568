"""Which backend serves, condition by condition, beside how far each may be captured. Refuses to know any rule.

Signs say what colours repeat: ✓ passes, ✗ fails, · was not asked. The backend that is taken has an arrow and a star.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from labkit.figures import palette
from labkit.figures.points import drawn

NOT_ASKED, PASSES, FAILS = 0, 1, 2
SIGNS = {NOT_ASKED: "·", PASSES: "✓", FAILS: "✗"}
#: A colour-blind-safe pair, thin enough for the page's own text colour, light or dark, to be read on it.
_SCALE = [[0.0, "rgba(128,128,128,0.10)"], [0.5, "rgba(44,127,184,0.30)"], [1.0, "rgba(213,94,0,0.50)"]]
#: A tier's place on the ladder → its name there.
LADDER = ("NEVER", "one token", "UNIFORM", "ALWAYS")
ROW, AROUND = 40, 176


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One selection.

    rows: a name for each backend in the order in which they are tried. columns: the conditions.
    cells: for each row and column one of NOT_ASKED, PASSES, FAILS. texts: what stands in them; hovers: what is said of
    them. tiers: place on the ladder of each row, 0…3. usable: whether a row has no ✗. taken: its place, None for none.
    """

    number: int
    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[Sequence[int]]
    texts: Sequence[Sequence[str]]
    hovers: Sequence[Sequence[str]]
    tiers: Sequence[int]
    usable: Sequence[bool]
    taken: int | None


def selection_figure(matrix: Matrix | None, kind: str = "") -> go.Figure:
    """The matrix of conditions at the left, the ladder of tiers at the right; empty axes for None.

    The run's data must hold `cells`, `texts`, `labels` (the rows' labels, see `row_labels`) and `tiers`.

    Args:
        kind: LIVE or SIMULATED, for the title.
    """
    figure = go.Figure(layout=_layout(6 if matrix is None else len(matrix.rows)))
    if matrix is None:
        return figure
    labels = row_labels(matrix.rows, matrix.taken)
    figure.add_trace(go.Heatmap(
        z=[list(row) for row in matrix.cells], x=list(matrix.columns), y=labels,
        text=[list(row) for row in matrix.texts], texttemplate="%{text}", textfont={"size": 13}, xgap=3, ygap=3,
        zmin=NOT_ASKED, zmax=FAILS, colorscale=_SCALE, showscale=False, customdata=[list(r) for r in matrix.hovers],
        hovertemplate="%{customdata}<extra></extra>", name="conditions",
        meta=drawn(matrix.number, z="cells", text="texts", y="labels"),
    ))  # fmt: skip
    for i, label in enumerate(labels):  # a guide from the foot of the ladder to the rung
        figure.add_trace(go.Scatter(
            x=[0, matrix.tiers[i]], y=[label, label], xaxis="x2", yaxis="y", mode="lines", hoverinfo="skip",
            line={"color": palette.NEUTRAL, "width": 4 if matrix.usable[i] else 1,
                  "dash": "solid" if matrix.usable[i] else "dot"}, showlegend=False,
        ))  # fmt: skip
    figure.add_trace(go.Scatter(
        x=list(matrix.tiers), y=labels, xaxis="x2", yaxis="y", mode="markers", name="tier", showlegend=False,
        marker={
            "size": [18 if i == matrix.taken else 12 for i in range(len(labels))],
            "symbol": ["star" if i == matrix.taken else "circle" if ok else "circle-open"
                       for i, ok in enumerate(matrix.usable)],
            "color": [palette.colour(row) for row in matrix.rows], "line": {"width": 2, "color": palette.NEUTRAL},
        },
        customdata=[[row, LADDER[tier]] for row, tier in zip(matrix.rows, matrix.tiers, strict=True)],
        hovertemplate="%{customdata[0]}: %{customdata[1]}<extra></extra>",
        meta=drawn(matrix.number, x="tiers", y="labels"),
    ))  # fmt: skip
    figure.update_layout(
        title={"text": f"{matrix.title} · {kind}", "font": {"size": 14}, "x": 0, "xref": "paper", "y": 0.98,
               "yanchor": "top"},
    )  # fmt: skip
    return figure


def row_labels(rows: Sequence[str], taken: int | None) -> list[str]:
    """What stands beside the rows: the one that is taken has an arrow."""
    return [f"<b>▶ {name}</b>" if i == taken else name for i, name in enumerate(rows)]


def _layout(rows: int) -> dict[str, Any]:
    axis = {"zeroline": False, "linecolor": palette.NEUTRAL, "tickfont": {"size": 11}, "automargin": True}
    note = {"showarrow": False, "font": {"size": 11, "color": palette.NEUTRAL}, "xref": "paper", "yref": "paper"}
    return {
        "height": ROW * rows + AROUND, "autosize": True, "template": "none", "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)", "font": {"size": 12, "color": palette.NEUTRAL}, "hovermode": "closest",
        "margin": {"l": 130, "r": 46, "t": 104, "b": 52},
        "xaxis": {**axis, "domain": [0, 0.72], "side": "top", "showgrid": False, "fixedrange": True, "type": "category",
                  "tickangle": -40, "showline": False},
        "xaxis2": {
            **axis, "domain": [0.77, 1], "anchor": "y", "side": "top", "range": [-0.35, 3.35], "fixedrange": True,
            "tickvals": [0, 1, 2, 3], "ticktext": list(LADDER), "tickangle": -40, "gridcolor": palette.GRID,
            "showline": False,
        },
        "yaxis": {**axis, "autorange": "reversed", "showgrid": False, "fixedrange": True, "type": "category",
                  "tickfont": {"size": 12}},
        "annotations": [
            {**note, "x": 0, "y": 0, "yshift": -14, "yanchor": "top", "xanchor": "left",
             "text": "✓ or a page size: passes  ✗ fails  · not asked"},
            {**note, "x": 1, "y": 0, "yshift": -14, "yanchor": "top", "xanchor": "right",
             "text": "tier: ★ taken  ● could serve  ○ refuses"},
        ],
    }  # fmt: skip
