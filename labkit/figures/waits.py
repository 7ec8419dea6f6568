"""What a step waits for: bars of its parts, under a timeline, launch costs or a curve. Refuses to know where they
come from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from labkit.figures import palette
from labkit.figures.points import drawn
from labkit.figures.timeline import LANE, timeline_figure
from labkit.measure.spans import StepTimeline

#: Part of a step → (colour, pattern, word). A part's key in a run is its name with "_us".
PARTS = {
    "instructions": ("#D55E00", "/", "waits for instructions (launches)"),
    "data": ("#2C7FB8", "", "moves data"),
    "arithmetic": ("#009E73", ".", "computes"),
    "kernels": ("#B35FA0", "x", "fixed time of each kernel"),
    "work": ("#2C7FB8", "", "works"),
    "starting": ("#D55E00", "/", "starting the calls (what they take on one element)"),
    "host": ("#777777", "\\", "host, around the forward"),
    "rest": ("#777777", "\\", "everything else"),
}
#: Role of a span in a queue of equal kernels → what it is there.
PLAIN_ROLES = {"gemm": "kernel, on the device", "other": "launch, on the host", "graph": "replay, on the host"}
#: The share of the time axis that a letter takes.
LETTER = 0.012
#: Pixels for one bar, and for what is around the bars.
BAR, BETWEEN = 30, 84
#: Key of a curve → (dash, marker, colour, word).
CURVES = {
    "call_us": ("solid", "circle", "#2C7FB8", "one call, started and finished"),
    "issue_us": ("dot", "diamond", "#D55E00", "the host starts one"),
    "device_us": ("dash", "square", "#009E73", "the device runs one"),
}


@dataclasses.dataclass(frozen=True)
class StepBar:
    """One run's step. label: what a reader calls it. parts: name of PARTS → µs; they add up to the step."""

    number: int
    label: str
    parts: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Curves:
    """µs of one operation over its size, of run `number`. chosen: the size that the run's own step has."""

    number: int
    elements: Sequence[int]
    us: Mapping[str, Sequence[float]]
    chosen: int
    unit: str = "elements of one operation"


@dataclasses.dataclass(frozen=True)
class Launches:
    """Launches of one step by kind, in words: how many, and host µs of one alone. total_us: number × cost."""

    number: int
    kinds: Sequence[str]
    counts: Sequence[int]
    cost_us: Sequence[float]
    total_us: Sequence[float]


def waits_figure(
    bars: Sequence[StepBar],
    kind: str,
    *,
    title: str = "",
    timelines: Sequence[tuple[int, StepTimeline]] = (),
    plain: bool = False,
    launches: Launches | None = None,
    curves: Curves | None = None,
) -> go.Figure:
    """Bars of steps, in µs, one for each run of one source, under one of three: timelines, launches or curves.

    Args:
        kind: LIVE, RECORDED or SIMULATED, of all that is drawn.
        title: what the bars are of.
        timelines: (number of the run, its timeline); in the runs, "finish" holds [wall, wall].
        plain: a queue of equal kernels, with roles as in PLAIN_ROLES: bars carry their names where there is room.
    """
    rows = max(2, len(bars))
    above = 2 * LANE * max(1, len(timelines)) if timelines else 190 if launches or curves else 0
    inner = above + BAR * rows + (BETWEEN if above else 0)
    low = (BAR * rows) / inner if above else 1.0
    if timelines:
        figure = timeline_figure([one for _, one in timelines], kind)
        _own_runs(figure, [number for number, _ in timelines], plain)
    else:
        figure = go.Figure(layout=_layout())
    if launches is not None:
        figure.add_trace(_launch_bars(launches))
    if curves is not None:
        figure.add_traces(_curves(curves))
    figure.add_traces(_bars(bars))
    _place(figure, bars, low, inner, bool(above))
    said = title or "What the step waits for"
    figure.update_layout(title={"text": f"{said} · {kind}" if kind else said, "font": {"size": 14}, "x": 0,
                                "xref": "paper"})  # fmt: skip
    if launches is not None:
        figure.update_layout(
            xaxis={"title": {"text": "number of launches × host time of one alone, µs"}, "rangemode": "tozero"},
            yaxis={"autorange": "reversed", "title": {"text": ""}},
        )
    if curves is not None:
        figure.update_layout(
            xaxis={"title": {"text": curves.unit}, "type": "log"},
            yaxis={"title": {"text": "time of one, µs"}, "type": "log"},
        )
    return figure


def _bars(bars: Sequence[StepBar]) -> list[go.Bar]:
    names = [bar.label for bar in bars]
    numbers = [bar.number for bar in bars]
    used = [part for part in PARTS if any(part in bar.parts for bar in bars)]
    longest = max((sum(bar.parts.values()) for bar in bars), default=1.0) or 1.0
    out = []
    for part in used:
        colour, pattern, word = PARTS[part]
        values = [bar.parts.get(part, 0.0) for bar in bars]
        out.append(go.Bar(
            orientation="h", name=word, y=names, x=values, xaxis="x2", yaxis="y2", legendgroup=f"part {part}",
            meta=drawn(numbers, x=f"{part}_us"), hovertemplate=f"%{{y}}<br>{word}: %{{x:,.1f}} µs<extra></extra>",
            text=[f"{us:,.0f}" if us >= 0.05 * longest else "" for us in values], textposition="inside",
            insidetextanchor="middle", textangle=0, constraintext="none", textfont={"size": 11, "color": "#FFFFFF"},
            marker={"color": colour, "line": {"width": 0},
                    "pattern": {"shape": pattern, "fgcolor": "#FFFFFF", "size": 7, "solidity": 0.12,
                                "fillmode": "overlay"}},
        ))  # fmt: skip
    return out


def _own_runs(figure: go.Figure, numbers: Sequence[int], plain: bool) -> None:
    """Name the run behind each finish line, so that a check finds it; name equal kernels by what they are."""
    longest = figure.layout.xaxis.range[1]
    for trace in figure.data:
        meta = list(trace.meta or [])
        if meta[:1] == ["finish"]:
            trace.meta = drawn(numbers[int(meta[1])], x="finish")
        elif plain and meta[:1] == ["role"] and meta[1] in PLAIN_ROLES:
            trace.name = PLAIN_ROLES[meta[1]]
            names = [data[1] for data in trace.customdata]
            room = [us / longest / LETTER for us in trace.x]
            trace.text = [name if len(name) <= fits else "" for name, fits in zip(names, room, strict=True)]
    if plain:
        ticks = [text.replace(" kernels and copies", " kernels") for text in figure.layout.yaxis.ticktext]
        figure.update_layout(yaxis={"ticktext": ticks})


def _launch_bars(launches: Launches) -> go.Bar:
    colour, pattern, _ = PARTS["instructions"]
    text = [f"{n:,} × {us:.1f} µs" for n, us in zip(launches.counts, launches.cost_us, strict=True)]
    return go.Bar(
        orientation="h", name="launching, on the host", y=list(launches.kinds), x=list(launches.total_us), text=text,
        textposition="auto", meta=drawn(launches.number, x="launch_total_us", y="launch_kinds"), showlegend=False,
        hovertemplate="%{y}: %{text} = %{x:,.0f} µs<extra></extra>", insidetextfont={"color": "#FFFFFF"},
        marker={"color": colour, "pattern": {"shape": pattern, "fgcolor": "#FFFFFF", "size": 7, "solidity": 0.1,
                                             "fillmode": "overlay"}},
    )  # fmt: skip


def _curves(curves: Curves) -> list[go.Scatter]:
    out = []
    for key, us in curves.us.items():
        dash, marker, colour, word = CURVES[key]
        sizes = [13 if size == curves.chosen else 7 for size in curves.elements]
        out.append(go.Scatter(
            x=list(curves.elements), y=list(us), mode="lines+markers", name=word, line={"color": colour, "dash": dash},
            marker={"symbol": marker, "size": sizes, "color": colour}, meta=drawn(curves.number, x="elements", y=key),
            hovertemplate=f"{word}<br>%{{x:,}} elements: %{{y:,.2f}} µs<extra></extra>",
        ))  # fmt: skip
    return out


def _place(figure: go.Figure, bars: Sequence[StepBar], low: float, inner: int, above: bool) -> None:
    """Put the bars under the rest. inner: pixels of both together, without margins."""
    axis = {"zeroline": False, "linecolor": palette.NEUTRAL, "tickfont": {"size": 11}, "automargin": True}
    named = sum(trace.showlegend is not False for trace in figure.data)
    bottom = 54 + 20 * -(-named // 3)
    figure.update_layout(
        height=inner + 44 + bottom, barmode="relative", margin={"l": 150, "r": 60, "t": 44, "b": bottom},
        xaxis2={**axis, "anchor": "y2", "title": {"text": "time of the step, µs", "standoff": 6},
                "gridcolor": palette.GRID, "rangemode": "tozero", "showline": True},
        yaxis2={**axis, "anchor": "x2", "domain": [0.0, low], "autorange": "reversed", "showgrid": False,
                "fixedrange": True, "type": "category"},
        legend={"orientation": "h", "x": 0, "y": 0, "yanchor": "bottom", "yref": "container", "font": {"size": 11}},
    )  # fmt: skip
    if above:
        figure.update_layout(yaxis={"domain": [min(0.9, low + BETWEEN / inner), 1.0]}, xaxis={"anchor": "y"})
    if not bars:
        figure.update_layout(xaxis2={"range": [0, 100]}, yaxis2={"showticklabels": False})


def _layout() -> dict[str, Any]:
    axis = {"zeroline": False, "linecolor": palette.NEUTRAL, "tickfont": {"size": 11}, "automargin": True,
            "gridcolor": palette.GRID}  # fmt: skip
    return {
        "autosize": True, "template": "none", "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 12, "color": palette.NEUTRAL}, "xaxis": dict(axis), "yaxis": dict(axis),
        "hovermode": "closest",
    }  # fmt: skip
