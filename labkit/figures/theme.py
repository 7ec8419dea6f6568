"""The look of figures in a panel where they do not set one themselves, and marks on them. Refuses to know data.

Backgrounds are transparent and text is grey, so that light and dark pages need no second figure.
"""

from __future__ import annotations

import plotly.graph_objects as go

from labkit.figures import palette

HEIGHT = 420
_AXIS = {
    "gridcolor": palette.GRID, "zeroline": False, "showline": True, "linecolor": palette.NEUTRAL, "automargin": True,
    "tickfont": {"size": 11},
}  # fmt: skip
TEMPLATE = go.layout.Template(
    layout={
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "colorway": palette.SERIES,
        "font": {"size": 12, "color": palette.NEUTRAL}, "margin": {"l": 58, "r": 16, "t": 48, "b": 48},
        "hovermode": "closest", "xaxis": _AXIS, "yaxis": _AXIS, "height": HEIGHT,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 11}},
    }
)  # fmt: skip


def themed(figure: go.Figure, note: str = "") -> go.Figure:
    """The figure itself, with this look where plotly's own would be, and with `note` in its middle.

    A figure with a look of its own (`template="none"` and what follows) is left alone, apart from the note. The note is
    hidden and not left out while it is empty: a page keeps what is merely no longer mentioned.
    """
    layout = figure.layout
    if layout.template.layout.colorway != TEMPLATE.layout.colorway and layout.paper_bgcolor is None:
        layout.template = TEMPLATE
    if layout.height is None:
        layout.height = HEIGHT
    if layout.width is None:
        layout.autosize = True  # else a page that drew it before it was shown keeps plotly's own width
    layout.annotations = (
        {
            "text": note, "x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper", "xanchor": "center",
            "yanchor": "middle", "showarrow": False, "visible": bool(note),
            "font": {"size": 14, "color": palette.NEUTRAL},
        },
        *layout.annotations,
    )  # fmt: skip
    return figure


def mark_line(figure: go.Figure, axis: str, value: float, text: str) -> None:
    """A dashed line across the figure at `value` of "x" or "y", with its meaning in words."""
    along = {"x": "y", "y": "x"}[axis]
    line = {f"{axis}0": value, f"{axis}1": value, f"{axis}ref": axis, f"{along}0": 0, f"{along}1": 1}
    place = {"x": value if axis == "x" else 1, "y": value if axis == "y" else 1, f"{axis}ref": axis}
    place |= {"xanchor": "left" if axis == "x" else "right", "yanchor": "top" if axis == "x" else "bottom"}
    paper = {f"{along}ref": "paper"}
    figure.add_shape(type="line", line={"dash": "dash", "width": 2, "color": palette.NEUTRAL}, **line, **paper)
    figure.add_annotation(text=text, showarrow=False, font={"size": 11}, **place, **paper)
