"""The chart of step latency: every run in its own slot, with median and p10–p90. Refuses to know where runs come from.

One slot per run keeps runs of different length comparable; inside a slot the steps go from left to right in the order
in which they ran, so a slow start or a drift stays visible.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import plotly.graph_objects as go

from labkit.figures import palette

#: Half the width of a slot; slots are one apart.
HALF_SLOT = 0.4
#: The newest runs that are in view; older ones are reached by panning.
SLOTS_IN_VIEW = 8
#: Runs older than this many are drawn faint.
BRIGHT_RUNS = 4
HEIGHT = 420


@dataclasses.dataclass(frozen=True)
class RunPoints:
    """What is drawn of one run. Times in milliseconds; `samples_ms` in the order in which the steps ran.

    mode, size: the runtime mode and the number of tokens that ran. kind: LIVE, RECORDED or SIMULATED.
    compiled: whether the model's code was compiled.
    finished: False while steps are still coming in; then there is no median yet.
    """

    number: int
    backend: str
    mode: str
    size: int
    batch: int
    kind: str
    samples_ms: tuple[float, ...]
    p10_ms: float | None = None
    p50_ms: float | None = None
    p90_ms: float | None = None
    finished: bool = True
    compiled: bool = False

    @property
    def series(self) -> str:
        """The legend entry: everything that its colour, dash and marker stand for."""
        return f"{self.backend} · {self.mode}{', compiled' if self.compiled else ''} · {self.kind}"

    @property
    def tick(self) -> str:
        ran = f"{self.mode} {self.size}" if self.mode != "NONE" else "NONE"
        compiled = "<br>compiled" if self.compiled else ""
        return f"run {self.number}<br>{ran}{compiled}<br>batch {self.batch}"


def latency_figure(runs: Sequence[RunPoints], pinned: Sequence[RunPoints] = (), *, log: bool = False) -> go.Figure:
    """Runs side by side; with pinned runs a second plot at the right compares just these.

    Traces are named in `meta`: ("samples" | "band" | "median", run number, "main" | "pinned"), so that whoever checks
    the figure finds the numbers of a run without counting traces.
    """
    figure = go.Figure(layout=_layout(runs, pinned, log))
    # The newest run of each kind carries the legend entry: it is never faint.
    named = {run.series: run.number for run in (*_in_view(runs), *pinned) if run.finished}
    for run in runs:
        faint = bool(runs) and run.number <= runs[-1].number - BRIGHT_RUNS
        figure.add_traces(list(_traces(run, float(run.number), "main", faint, named)))
    for slot, run in enumerate(pinned):
        figure.add_traces(list(_traces(run, float(slot), "pinned", False, {})))
    _label_medians(figure, [(float(r.number), r) for r in runs], "main", log)
    _label_medians(figure, [(float(i), r) for i, r in enumerate(pinned)], "pinned", log)
    return figure


def trace_of(figure: go.Figure, what: str, number: int, plot: str = "main") -> go.Scatter:
    """The trace that shows `what` ("samples", "band", "median") of run `number`."""
    for trace in figure.data:
        if tuple(trace.meta or ()) == (what, number, plot):
            return trace
    raise KeyError((what, number, plot))


def slot_positions(n: int, centre: float) -> list[float]:
    """x of n steps, evenly over the slot around `centre`; a single step sits in the middle."""
    if n == 1:
        return [centre]
    width = 2 * HALF_SLOT * 0.9
    return [centre - width / 2 + width * i / (n - 1) for i in range(n)]


def short_ms(ms: float) -> str:
    """Milliseconds with three significant digits: 0.123, 1.23, 12.3, 123."""
    if ms <= 0 or not math.isfinite(ms):
        return f"{ms:.3g}"
    return f"{ms:.{max(0, min(3, 2 - math.floor(math.log10(ms))))}f}"


def _traces(run: RunPoints, x: float, plot: str, faint: bool, named: dict[str, int]) -> Iterable[go.Scatter]:
    hue = palette.colour(run.backend)
    axes = {} if plot == "main" else {"xaxis": "x2", "yaxis": "y2"}
    common = {"legendgroup": run.series, "opacity": 0.6 if faint else 1.0, **axes}
    left, right = x - HALF_SLOT, x + HALF_SLOT
    if run.finished:
        yield go.Scatter(
            x=[left, right, right, left, left],
            y=[run.p10_ms, run.p10_ms, run.p90_ms, run.p90_ms, run.p10_ms],
            mode="lines", line={"width": 0, "color": hue}, fill="toself", fillcolor=palette.translucent(hue, 0.18),
            hoverinfo="skip", showlegend=False, meta=["band", run.number, plot],
            name=f"run {run.number}: p10–p90", **common,
        )  # fmt: skip
    yield go.Scatter(
        x=slot_positions(len(run.samples_ms), x) if run.samples_ms else [],
        y=list(run.samples_ms),
        mode="markers",
        marker={"color": hue, "size": 4, "symbol": palette.marker(run.mode, run.kind), "opacity": 0.7},
        customdata=list(range(1, len(run.samples_ms) + 1)),
        hovertemplate=f"run {run.number}, step %{{customdata}}: %{{y:.3f}} ms<extra></extra>",
        showlegend=False, meta=["samples", run.number, plot], name=f"run {run.number}: steps", **common,
    )  # fmt: skip
    if run.finished:
        n = len(run.samples_ms)
        low, mid, high = (short_ms(v) for v in (run.p10_ms or 0, run.p50_ms or 0, run.p90_ms or 0))
        yield go.Scatter(
            x=[left, right],
            y=[run.p50_ms, run.p50_ms],
            mode="lines+markers",
            line={"color": hue, "width": 3, "dash": palette.dash(run.mode)},
            marker={"color": hue, "size": 8, "symbol": palette.marker(run.mode, run.kind)},
            hovertemplate=f"run {run.number}: median {mid} ms, p10–p90 {low}–{high}, n={n}<extra></extra>",
            showlegend=named.get(run.series) == run.number, meta=["median", run.number, plot],
            name=run.series, **common,
        )  # fmt: skip


def _label_medians(figure: go.Figure, placed: Sequence[tuple[float, RunPoints]], plot: str, log: bool) -> None:
    """The median in figures above each run: a chart should be readable without hovering."""
    done = [(x, run) for x, run in placed if run.finished and run.p50_ms is not None]
    if done:
        tops = [max(run.p90_ms or 0, *run.samples_ms) for _, run in done]
        gap = 0.025 * max(v for run in _in_view([run for _, run in placed]) for v in run.samples_ms)
        axes = {} if plot == "main" else {"xaxis": "x2", "yaxis": "y2"}
        figure.add_trace(
            go.Scatter(
                x=[x for x, _ in done],
                y=[top * 1.04 if log else top + gap for top in tops],
                text=[f"<b>{short_ms(run.p50_ms or 0)} ms</b><br>n={len(run.samples_ms)}" for _, run in done],
                mode="text",
                textposition="top center",
                textfont={"size": 11, "color": palette.NEUTRAL},
                cliponaxis=False,
                hoverinfo="skip",
                showlegend=False,
                meta=["labels", 0, plot],
                name="medians",
                **axes,
            )  # fmt: skip
        )


def _in_view(runs: Sequence[RunPoints]) -> list[RunPoints]:
    """The newest runs, by which scale and legend go: older ones may be of another size altogether."""
    return [run for run in runs if run.number > runs[-1].number - SLOTS_IN_VIEW]


def _layout(runs: Sequence[RunPoints], pinned: Sequence[RunPoints], log: bool) -> dict[str, Any]:
    last = runs[-1].number if runs else 1
    first = max(runs[0].number if runs else 1, last - SLOTS_IN_VIEW + 1)
    # At least three slots wide: a first run alone should not be blown up to the whole width.
    span = [first - 0.6, max(last, first + 2) + 0.6]
    split = 0.75 if len(pinned) < 3 else 0.6  # four pins need the room of four slots
    layout: dict[str, Any] = {
        "height": HEIGHT,
        "autosize": True,
        "margin": {"l": 58, "r": 12, "t": 62, "b": 62},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 12, "color": palette.NEUTRAL},
        "template": "none",
        "hovermode": "closest",
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 11}},
        "xaxis": _x_axis([r.number for r in runs], runs, span, [0, split - 0.09 if pinned else 1]),
        "yaxis": _y_axis(_in_view(runs), log, "x") | {"title": {"text": "step time, ms", "standoff": 8}},
        # Hidden instead of left out: a page keeps a note that is merely no longer mentioned.
        "annotations": [_note("No run yet. Press Run.", visible=not runs)],
    }
    # The second plot's axes are always there: a page does not take well to axes that go away.
    layout["xaxis2"] = layout["yaxis2"] = {"visible": False}
    if pinned:
        span = [-0.6, max(1, len(pinned) - 1) + 0.6]
        layout["xaxis2"] = _x_axis(range(len(pinned)), pinned, span, [split, 1]) | {"anchor": "y2", "visible": True}
        layout["xaxis2"]["ticktext"] = [f"pin {'ABCD'[i : i + 1]}:<br>{run.tick}" for i, run in enumerate(pinned)]
        layout["yaxis2"] = _y_axis(pinned, log, "x2") | {"visible": True}
    return layout


def _x_axis(at: Sequence[int], runs: Sequence[RunPoints], span: list[float], domain: list[float]) -> dict[str, Any]:
    return {
        "tickmode": "array", "tickvals": list(at), "ticktext": [r.tick for r in runs], "range": span, "domain": domain,
        "showgrid": False, "zeroline": False, "fixedrange": False, "tickfont": {"size": 11}, "automargin": True,
        "showline": True, "linecolor": palette.NEUTRAL,
    }  # fmt: skip


def _y_axis(runs: Sequence[RunPoints], log: bool, anchor: str) -> dict[str, Any]:
    axis: dict[str, Any] = {
        "gridcolor": palette.GRID, "zeroline": False, "anchor": anchor, "tickfont": {"size": 11},
        "showline": True, "linecolor": palette.NEUTRAL,
    }  # fmt: skip
    values = [v for r in runs for v in (*r.samples_ms, r.p90_ms or 0) if v > 0]
    if not values:
        return axis | {"range": [0, 1], "showticklabels": False}
    if log:
        return axis | {"type": "log", "range": [math.log10(min(values) * 0.8), math.log10(max(values) * 1.8)]}
    # From zero, always: cutting the axis would make any difference look large. Room above for the labels.
    return axis | {"type": "linear", "range": [0, max(values) * 1.25]}


def _note(text: str, visible: bool) -> dict[str, Any]:
    return {
        "text": text, "x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper", "xanchor": "center", "yanchor": "middle",
        "showarrow": False, "visible": visible, "font": {"size": 14, "color": palette.NEUTRAL},
    }  # fmt: skip
