"""Charts of several ways to compute attention: time and memory over length, error per head. Refuses to know who ran.

Both axes above are logarithmic: a straight line is a power of the length, and its slope the exponent; each ends in the
number of its run. The strip below has one column a run, one mark a head, and a bar at the error up to which a result
counts as correct.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import plotly.graph_objects as go

from labkit.figures import palette
from labkit.figures.points import drawn

HEIGHT = 620
#: Way → colour, dash, marker. Backends of the engine have theirs in the palette.
_LOOKS = {
    "naive": ("#C8456B", "solid", "circle"),
    "tiled": ("#7F62C4", "dash", "square"),
    "SDPA math": ("#8C6D5A", "dot", "diamond"),
    "SDPA efficient": ("#4F7CD6", "dashdot", "star-triangle-up"),
    "SDPA flash": ("#8A7000", "longdash", "triangle-up"),
    "SDPA cudnn": ("#B35FA0", "longdashdot", "pentagon"),
}


@dataclasses.dataclass(frozen=True)
class Ways:
    """One run. kind: LIVE, RECORDED or SIMULATED. us, mib: over `lengths`; errors: one a head; None: not known."""

    number: int
    name: str
    kind: str
    dtype: str
    lengths: Sequence[int]
    us: Sequence[float] | None
    mib: Sequence[float] | None
    errors: Sequence[float] | None
    tolerance: float | None


def same_math_figure(runs: Sequence[Ways], title: str = "") -> go.Figure:
    """Time at the left, memory at the right, errors below; at first without any run.

    Traces that show numbers of a run are named by `drawn`: keys "time_us", "memory_mib", "errors", "tolerance".
    """
    figure = go.Figure()
    for run in runs:
        figure.add_traces(_lines(run))
        figure.add_traces(_strip(run))
    lengths = sorted({n for run in runs for n in run.lengths})
    _layout(figure, lengths, runs, title)
    return figure


def look(name: str) -> tuple[str, str, str]:
    """Colour, dash and marker of a way; a backend's by the first word of its name."""
    if name in _LOOKS:
        return _LOOKS[name]
    backend = name.replace(",", " ").split(" ")[0]
    return palette.colour(backend), palette.backend_dash(backend), palette.backend_marker(backend, "LIVE")


def _label(run: Ways) -> str:
    return f"run {run.number}: {run.name}, {run.dtype} · {run.kind}"


def _symbol(run: Ways) -> str:
    """The marker of a way: filled says LIVE, open says RECORDED or SIMULATED."""
    symbol = look(run.name)[2]
    return symbol if run.kind == "LIVE" else f"{symbol.removesuffix('-open')}-open"


def _lines(run: Ways) -> list[go.Scatter]:
    hue, dash, _ = look(run.name)
    marker = {"color": hue, "size": 8, "symbol": _symbol(run)}
    found = []
    for key, values, axis, unit in (("time_us", run.us, "", "µs"), ("memory_mib", run.mib, "2", "MiB")):
        if values is None:
            continue
        found.append(go.Scatter(
            x=list(run.lengths), y=list(values), mode="lines+markers+text",
            text=[""] * (len(values) - 1) + [f" {run.number}"], textposition="middle right", cliponaxis=False,
            name=_label(run), legendgroup=str(run.number),
            showlegend=key == "time_us" or run.us is None, line={"color": hue, "dash": dash, "width": 2}, marker=marker,
            xaxis=f"x{axis}", yaxis=f"y{axis}", meta=drawn(run.number, x="lengths", y=key),
            hovertemplate=f"{_label(run)}<br>%{{x:,}} tokens: %{{y:,.3g}} {unit}<extra></extra>",
        ))  # fmt: skip
    return found


def _strip(run: Ways) -> list[go.Scatter]:
    if run.errors is None:
        return []
    hue = look(run.name)[0]
    column = f"run {run.number}<br>{run.name}<br>{run.dtype}"
    found = [go.Scatter(
        x=[column] * len(run.errors), y=list(run.errors), mode="markers", showlegend=False, xaxis="x3", yaxis="y3",
        marker={"color": hue, "size": 9, "symbol": _symbol(run)},
        name=_label(run), meta=drawn(run.number, y="errors"),
        hovertemplate=f"{_label(run)}<br>one head: %{{y:.2g}}<extra></extra>",
    )]  # fmt: skip
    if run.tolerance is not None:
        found.append(go.Scatter(
            x=[column], y=[run.tolerance], mode="markers", showlegend=False, xaxis="x3", yaxis="y3",
            marker={"color": palette.NEUTRAL, "size": 46, "symbol": "line-ew-open", "line": {"width": 2}},
            name=f"run {run.number}: limit", meta=drawn([run.number], y="tolerance"),
            hovertemplate="correct up to %{y:.2g}<extra></extra>",
        ))  # fmt: skip
    return found


def _layout(figure: go.Figure, lengths: Sequence[int], runs: Sequence[Ways], title: str) -> None:
    kept = lengths if len(lengths) <= 7 else lengths[::2]
    ticks = {"tickmode": "array", "tickvals": list(kept), "ticktext": [_short(n) for n in kept]}
    notes = []
    if runs and all(run.us is None for run in runs):
        notes.append(_note("a formula has no time", 0.22, 0.75))
    if runs and all(run.mib is None for run in runs):
        notes.append(_note("memory was not recorded", 0.79, 0.75))
    if runs and all(run.errors is None for run in runs):
        notes.append(_note("errors were not recorded", 0.5, 0.12))
    figure.update_layout(
        height=HEIGHT, margin={"l": 64, "r": 14, "t": 78, "b": 76}, template="none",
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", font={"size": 12, "color": palette.NEUTRAL},
        title={"text": title, "font": {"size": 13}, "x": 0, "y": 0.995, "yanchor": "top"}, annotations=notes,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 11}}, hovermode="closest",
        xaxis=_axis("tokens", log=True) | ticks | {"domain": [0, 0.44], "anchor": "y"},
        yaxis=_axis("time of a call, µs", log=True) | {"domain": [0.5, 1], "anchor": "x"},
        xaxis2=_axis("tokens", log=True) | ticks | {"domain": [0.57, 1], "anchor": "y2"},
        yaxis2=_axis("memory beyond the inputs, MiB", log=True) | {"domain": [0.5, 1], "anchor": "x2"},
        xaxis3=_axis("") | {"type": "category", "domain": [0, 1], "anchor": "y3"},
        yaxis3=_axis("largest error of a head", log=True)
        | {"domain": [0, 0.33], "anchor": "x3", "exponentformat": "e"},
    )  # fmt: skip


def _axis(title: str, log: bool = False) -> dict[str, object]:
    return {
        "type": "log" if log else "-", "title": {"text": title, "standoff": 6}, "gridcolor": palette.GRID,
        "zeroline": False, "showline": True, "linecolor": palette.NEUTRAL, "automargin": True, "tickfont": {"size": 11},
        **({"dtick": 1} if log and "error" not in title else {}),
    }  # fmt: skip


def _short(n: int) -> str:
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else f"{n:,}"


def _note(text: str, x: float, y: float) -> dict[str, object]:
    return {"text": text, "x": x, "y": y, "xref": "paper", "yref": "paper", "showarrow": False, "font": {"size": 13}}
