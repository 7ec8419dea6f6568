"""One step started kernel by kernel and as a graph, and the steps after which the capture has paid for itself.

And what replays give when their input was copied, or only renamed. Refuses to know where the numbers come from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from labkit.figures import palette
from labkit.figures.points import drawn
from labkit.figures.timeline import LANE, timeline_figure
from labkit.figures.waits import PLAIN_ROLES
from labkit.measure.spans import StepTimeline

#: Host phases of a step in the order they run, several under one word: name → (colour, pattern, words).
PHASES = {
    "before": ("#777777", "\\", "schedule, fill the buffers"),
    "launch": ("#D55E00", "/", "launch the forward pass"),
    "wait": ("#2C7FB8", ".", "wait for the device, choose tokens"),
    "after": ("#8A7000", "x", "commit, text"),
}
#: Pixels: of a bar, between the two plots, of the curve.
BAR, BETWEEN, CURVE = 46, 92, 190
WAYS = ("eager", "graph")
#: The share of the time axis that a letter takes.
ROOM = 0.03


@dataclasses.dataclass(frozen=True)
class Pair:
    """One run: the same step without and with its graph.

    timelines: of both, where they are known; else phases: host µs per PHASES of both, in order.
    wall_us: when each step ends. In the run, "finish_eager" and "finish_graph" hold [wall, wall].
    steps, saved_ms: the curve; capture_ms: what it has to reach, None where nobody measured it.
    break_even: steps after which it does; None where it never comes to that, or is not known.
    plain: timelines of a queue of equal kernels, with roles as in `labkit.figures.waits.PLAIN_ROLES`.
    """

    number: int
    kind: str
    title: str
    wall_us: tuple[float, float]
    steps: Sequence[float]
    saved_ms: Sequence[float]
    capture_ms: float | None = None
    break_even: int | None = None
    timelines: Sequence[StepTimeline] = ()
    phases: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    plain: bool = False


def pair_figure(pair: Pair | None) -> go.Figure:
    """The two steps above, with finish lines; below what replays have saved by then, against what capturing took."""
    if pair is None:
        return _place(go.Figure(layout=_layout()), "", 2 * BAR, 0)
    if pair.timelines:
        figure = timeline_figure(pair.timelines, pair.kind)
        longest = figure.layout.xaxis.range[1]
        for trace in figure.data:
            role = list(trace.meta or [])[1:2]
            if trace.type == "bar" and trace.text is not None:  # beside the curve there is less room than alone
                room = zip(trace.text, trace.x, strict=True)
                trace.text = [text if us >= ROOM * len(text) * longest else "" for text, us in room]
            if pair.plain and role and role[0] in PLAIN_ROLES:
                trace.name = PLAIN_ROLES[role[0]]
            if list(trace.meta or [])[:1] == ["finish"]:
                trace.meta = drawn(pair.number, x=f"finish_{WAYS[int(trace.meta[1])]}")
        above = 2 * LANE * len(pair.timelines)
    else:
        figure = go.Figure(layout=_layout())
        figure.add_traces(_phases(pair))
        above = 2 * BAR
    figure.add_traces(_curve(pair))
    named = sum(trace.showlegend is not False for trace in figure.data)
    return _place(figure, f"{pair.title} · {pair.kind}", above, named, 150 if pair.timelines else 64)


def _phases(pair: Pair) -> list[go.Bar | go.Scatter]:
    """Phases one behind the other, a row for each way, and a line where each step ends."""
    out: list[go.Bar | go.Scatter] = []
    longest, at = max(pair.wall_us) or 1.0, [0.0, 0.0]
    for name, (colour, pattern, words) in PHASES.items():
        us = list(pair.phases.get(name, (0.0, 0.0)))
        out.append(go.Bar(
            orientation="h", name=words, y=[0, 1], x=us, base=list(at), width=0.62,
            meta=drawn(pair.number, x=f"{name}_us"), hovertemplate=f"{words}: %{{x:,.0f}} µs<extra></extra>",
            text=[f"{one:,.0f}" if one >= 0.05 * longest else "" for one in us], textposition="inside",
            insidetextanchor="middle", textangle=0, constraintext="none", textfont={"size": 11, "color": "#FFFFFF"},
            marker={"color": colour, "line": {"width": 0},
                    "pattern": {"shape": pattern, "fgcolor": "#FFFFFF", "size": 7, "solidity": 0.12,
                                "fillmode": "overlay"}},
        ))  # fmt: skip
        at = [a + b for a, b in zip(at, us, strict=True)]
    for row, (way, wall) in enumerate(zip(WAYS, pair.wall_us, strict=True)):
        out.append(go.Scatter(
            x=[wall, wall], y=[row + 0.45, row - 0.45], mode="lines+text", name="end of the step", showlegend=False,
            meta=drawn(pair.number, x=f"finish_{way}"), text=["", f"  {wall:,.0f} µs"], cliponaxis=False,
            textposition="middle right", textfont={"size": 11, "color": palette.NEUTRAL},
            line={"color": palette.NEUTRAL, "width": 2, "dash": "dash"}, hoverinfo="skip",
        ))  # fmt: skip
    return out


def _curve(pair: Pair) -> list[go.Scatter]:
    saved, cost, even = palette.SERIES[2], palette.SERIES[3], palette.NEUTRAL
    out = [go.Scatter(
        x=list(pair.steps), y=list(pair.saved_ms), mode="lines", name="saved by replays so far", xaxis="x2", yaxis="y2",
        line={"color": saved, "width": 2}, meta=drawn(pair.number, x="steps", y="saved_ms"),
        hovertemplate="after %{x:,.0f} steps: %{y:,.2f} ms saved<extra></extra>",
    )]  # fmt: skip
    if pair.capture_ms is not None:
        ends = [pair.steps[0], pair.steps[-1]]
        out.append(go.Scatter(
            x=ends, y=[pair.capture_ms] * 2, mode="lines", name="what capturing took", xaxis="x2", yaxis="y2",
            line={"color": cost, "width": 2, "dash": "dash"}, meta=drawn(pair.number, y="capture_line_ms"),
            hovertemplate="capturing took %{y:,.2f} ms<extra></extra>",
        ))  # fmt: skip
    if pair.break_even is not None and pair.capture_ms is not None:
        out.append(go.Scatter(
            x=[pair.break_even], y=[pair.capture_ms], mode="markers+text", showlegend=False, xaxis="x2", yaxis="y2",
            name="paid for", marker={"symbol": "diamond", "size": 12, "color": even}, cliponaxis=False,
            text=[f"  paid for after {pair.break_even:,} step{'s' * (pair.break_even != 1)}"],
            textposition="bottom right", textfont={"size": 12, "color": palette.NEUTRAL},
            meta=drawn(pair.number, x="break_even_at"), hoverinfo="skip",
        ))  # fmt: skip
    return out


def _place(figure: go.Figure, title: str, above: int, named: int, left: int = 64) -> go.Figure:
    inner, bottom = above + BETWEEN + CURVE, 56 + 20 * -(-named // 3)
    low = CURVE / inner
    axis = {"zeroline": False, "linecolor": palette.NEUTRAL, "tickfont": {"size": 11}, "automargin": True,
            "showline": True}  # fmt: skip
    figure.update_layout(
        height=inner + 44 + bottom, margin={"l": left, "r": 70, "t": 44, "b": bottom}, barmode="overlay",
        title={"text": title, "font": {"size": 14}, "x": 0.01, "xref": "container"},
        xaxis={"anchor": "y"}, yaxis={"domain": [(CURVE + BETWEEN) / inner, 1.0]},
        xaxis2={**axis, "anchor": "y2", "title": {"text": "steps", "standoff": 6}, "gridcolor": palette.GRID,
                "rangemode": "tozero"},
        yaxis2={**axis, "anchor": "x2", "domain": [0.0, low], "title": {"text": "ms", "standoff": 8},
                "gridcolor": palette.GRID, "rangemode": "tozero"},
        legend={"orientation": "h", "x": 0, "y": 0, "yanchor": "bottom", "yref": "container", "font": {"size": 11}},
    )  # fmt: skip
    return figure


def _layout() -> dict[str, Any]:
    axis = {"zeroline": False, "linecolor": palette.NEUTRAL, "tickfont": {"size": 11}, "automargin": True}
    return {
        "autosize": True, "template": "none", "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 12, "color": palette.NEUTRAL}, "hovermode": "closest",
        "xaxis": {**axis, "title": {"text": "µs after the step began", "standoff": 6}, "gridcolor": palette.GRID,
                  "rangemode": "tozero", "showline": True},
        "yaxis": {**axis, "range": [1.6, -0.6], "tickmode": "array", "tickvals": [0, 1], "ticktext": list(WAYS),
                  "showgrid": False, "fixedrange": True},
    }  # fmt: skip


# --- stale inputs -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Replays:
    """One run: for each step its number, what the eager function gives for the step's input, what the replay gave."""

    number: int
    label: str
    kind: str
    steps: Sequence[int]
    expected: Sequence[float]
    got: Sequence[float]


def stale_figure(runs: Sequence[Replays]) -> go.Figure:
    """Results of the newest run over its steps, beside what they should be; earlier ones thin behind it."""
    figure = go.Figure()
    if runs:
        new = runs[-1]
        figure.add_trace(go.Scatter(
            x=list(new.steps), y=list(new.expected), mode="markers", name="without a graph",
            marker={"symbol": "circle-open", "size": 16, "color": palette.NEUTRAL, "line": {"width": 2}},
            meta=drawn(new.number, x="steps", y="expected"),
            hovertemplate="step %{x}: %{y:g} without a graph<extra></extra>",
        ))  # fmt: skip
    for i, run in enumerate(runs):
        last = run is runs[-1]
        figure.add_trace(go.Scatter(
            x=list(run.steps), y=list(run.got), mode="lines+markers", name=f"run {run.number}: {run.label}",
            line={"color": palette.SERIES[i % 5], "width": 3 if last else 1,
                  "dash": ("solid", "dash", "dot", "dashdot", "longdash")[i % 5]},
            marker={"symbol": ("diamond", "square", "triangle-up", "cross", "x")[i % 5], "size": 9 if last else 6},
            opacity=1.0 if last else 0.55, meta=drawn(run.number, x="steps", y="got"),
            hovertemplate=f"run {run.number}, step %{{x}}: the replay gave %{{y:g}}<extra></extra>",
        ))  # fmt: skip
    figure.update_layout(
        height=360, xaxis={"title": {"text": "step (the input is the number of the step)"}, "dtick": 1},
        yaxis={"title": {"text": "result, 2 × input + 1"}, "rangemode": "tozero"},
        title={"text": f"What replays give · {runs[-1].kind}" if runs else "What replays give", "font": {"size": 14},
               "x": 0.01, "xref": "container"},
        margin={"t": 80},
    )  # fmt: skip
    return figure
