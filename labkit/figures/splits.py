"""Charts of one attention call: its programs on a GPU's multiprocessors, and its time over splits. Refuses to compute.

Each square is a multiprocessor, with the number of programs that it begins with written into it; an empty one is idle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import plotly.graph_objects as go

from labkit.figures import palette
from labkit.figures.points import drawn

HEIGHT = 400
#: Programs at once → square, from idle to two or more; text in either theme is read on all of them.
_FILLS = ["rgba(128,128,128,0.06)", "#6D8BB0", "#2C7FB8"]
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "pentagon", "hexagram")
_HUES = ("#2C7FB8", "#D55E00", "#009E73", "#B35FA0", "#8A7000", "#777777")


@dataclasses.dataclass(frozen=True)
class SplitRun:
    """One run. x, y, programs: of each multiprocessor, empty where there are none. splits, us: the curve.

    chosen, chosen_us: the number of splits that the run is about.
    """

    number: int
    kind: str
    call: str
    x: Sequence[int]
    y: Sequence[int]
    programs: Sequence[int]
    splits: Sequence[int]
    us: Sequence[float]
    chosen: int
    chosen_us: float


def splits_figure(runs: Sequence[SplitRun], grid: SplitRun | None = None) -> go.Figure:
    """Multiprocessors of the newest run that has them at the left, time over splits at the right; at first without any.

    Traces that show numbers of a run are named by `drawn`, with the keys "sm_x", "sm_y", "sm_programs", "curve_splits",
    "curve_us", "splits" and "us".

    Args:
        grid: a run whose multiprocessors are shown where none of `runs` has any.
    """
    figure = go.Figure()
    new = runs[-1] if runs else None
    with_sms = next((run for run in reversed(runs) if len(run.programs)), grid)
    if with_sms is not None:
        figure.add_trace(_grid(with_sms))
    for i, run in enumerate(runs):
        figure.add_traces(_curve(run, i, run is new))
    _layout(figure, new, with_sms, len(runs))
    return figure


def _grid(run: SplitRun) -> go.Scatter:
    fills = [_FILLS[min(n, 2)] for n in run.programs]
    return go.Scatter(
        x=list(run.x), y=list(run.y), mode="markers+text", showlegend=False, xaxis="x", yaxis="y",
        text=[str(n) if n else "" for n in run.programs], customdata=list(run.programs),
        textfont={"size": 11, "color": "#111111"}, name=f"run {run.number}: multiprocessors",
        marker={"symbol": "square", "size": 19, "color": fills, "line": {"color": palette.NEUTRAL, "width": 1}},
        meta=drawn(run.number, x="sm_x", y="sm_y", customdata="sm_programs"),
        hovertemplate="programs to begin with: %{customdata}<extra></extra>",
    )  # fmt: skip


def _curve(run: SplitRun, place: int, newest: bool) -> list[go.Scatter]:
    look = place % len(_HUES)
    hue, symbol = _HUES[look], _SYMBOLS[look] if run.kind == "LIVE" else f"{_SYMBOLS[look]}-open"
    name = f"run {run.number}: {run.call} · {run.kind}"
    line = go.Scatter(
        x=list(run.splits), y=list(run.us), mode="lines+markers", name=name, legendgroup=str(run.number), xaxis="x2",
        yaxis="y2", line={"color": hue, "dash": _DASHES[look], "width": 2}, marker={"symbol": symbol, "size": 7},
        opacity=1.0 if newest else 0.55, meta=drawn(run.number, x="curve_splits", y="curve_us"),
        hovertemplate=f"{name}<br>%{{x}} splits: %{{y:,.1f}} µs<extra></extra>",
    )  # fmt: skip
    chosen = go.Scatter(
        x=[run.chosen], y=[run.chosen_us], mode="markers+text", text=[f" run {run.number}"], xaxis="x2", yaxis="y2",
        textposition="middle right", marker={"symbol": "star", "size": 14, "color": hue}, showlegend=False,
        legendgroup=str(run.number), cliponaxis=False, name=f"{name}, chosen",
        meta=drawn([run.number], x="splits", y="us"),
        hovertemplate=f"{name}<br>this run: %{{x}} splits, %{{y:,.1f}} µs<extra></extra>",
    )  # fmt: skip
    return [line, chosen]


def _layout(figure: go.Figure, new: SplitRun | None, with_sms: SplitRun | None, count: int) -> None:
    ticks = [1, 2, 4, 8, 16, 32, 64]
    rows = max(with_sms.y) + 1 if with_sms is not None else 11
    notes = []
    if new is not None and with_sms is None:
        notes.append(
            _note("a CPU has no multiprocessors" if new.kind == "LIVE" else "multiprocessors not known", 0.2, 0.5)
        )
    if with_sms is not None:
        said = f"run {with_sms.number}, {with_sms.kind}: a square is an SM, with its programs; empty: idle"
        notes.append(_note(said, 0.0, 1.02, "left", "bottom", 11))
    bare = {"showgrid": False, "zeroline": False, "showticklabels": False, "visible": False}
    axis = {
        "gridcolor": palette.GRID, "zeroline": False, "showline": True, "linecolor": palette.NEUTRAL,
        "automargin": True,         "tickfont": {"size": 11}, "type": "log",
    }  # fmt: skip
    figure.update_layout(
        height=HEIGHT + 20 * count, margin={"l": 14, "r": 44, "t": 40, "b": 70 + 20 * count}, template="none",
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", font={"size": 12, "color": palette.NEUTRAL},
        legend={"orientation": "h", "x": 0, "y": -0.17, "yanchor": "top", "font": {"size": 11}}, hovermode="closest",
        annotations=notes,
        xaxis=bare | {"domain": [0, 0.42], "range": [-0.7, 11.7]},
        yaxis=bare | {"range": [rows - 0.3, -0.7], "scaleanchor": "x", "constrain": "domain"},
        xaxis2=axis | {"domain": [0.52, 1], "anchor": "y2", "tickmode": "array", "tickvals": ticks,
                       "ticktext": [str(n) for n in ticks], "title": {"text": "splits", "standoff": 6}},
        yaxis2=axis | {"anchor": "x2", "title": {"text": "time of a call, µs", "standoff": 6}, "nticks": 8},
    )  # fmt: skip


def _note(
    text: str, x: float, y: float, across: str = "center", upright: str = "middle", size: int = 13
) -> dict[str, object]:
    return {
        "text": text, "x": x, "y": y, "xref": "paper", "yref": "paper", "xanchor": across, "yanchor": upright,
        "showarrow": False, "font": {"size": size},
    }  # fmt: skip
