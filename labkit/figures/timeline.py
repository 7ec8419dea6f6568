"""Host and device during one step, as bars on a common time axis. Refuses to know traces and to draw a doubtful one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import plotly.graph_objects as go

from labkit.figures import palette
from labkit.measure.roles import short_name
from labkit.measure.spans import ROLES, Span, StepTimeline

#: Pixels for a lane, and around all of them.
LANE, AROUND = 44, 180
#: A bar at least this share of the time axis wide carries its role as text.
LABELLED = 0.03
#: Height of the bars of each lane, in lanes.
HEIGHTS = {"phase": 0.34, "host": 0.62, "device": 0.62}
LANE_NAMES = {"phase": "phases", "host": "host", "device": "device"}


def timeline_figure(timelines: Sequence[StepTimeline], kind: str, *, highlight_idle: bool = True) -> go.Figure:
    """A host and a device lane per timeline on one time axis in µs, time in which the device idles shaded.

    Roles differ by colour, pattern and, where there is room, by a label; hovering gives name, role and µs. A line marks
    when each step ends. A timeline with problems is not drawn: its lane says why.

    Args:
        kind: LIVE, RECORDED or SIMULATED, of all of them.

    Traces are named in `meta`: ("role", role), ("phase",), ("idle",), ("finish", number of the timeline).
    """
    rows = list(_rows(timelines))
    place = {(number, lane): y for y, (number, lane) in enumerate(rows)}
    longest = max((_end(t) for t in timelines if not t.problems), default=1.0) or 1.0
    figure = go.Figure(layout=_layout(timelines, kind, rows, longest))
    good = [(number, t) for number, t in enumerate(timelines) if not t.problems]
    if highlight_idle:
        _add_idle(figure, good, place)
    for role in ROLES:
        found = [
            (place[number, span.lane], span, f"{t.title}, {LANE_NAMES[span.lane]}")
            for number, t in good
            for span in (*t.host, *t.device)
            if span.role == role
        ]
        if found:
            figure.add_trace(_bars(role, found, longest))
    phases = [(place[n, "phase"], span, f"{t.title}, phase") for n, t in good for span in t.phases]
    if phases:
        figure.add_trace(_phase_bars(phases, longest))
    for number, timeline in good:
        figure.add_trace(_finish(number, timeline, place))
    return figure


def summary_sentence(timelines: Sequence[StepTimeline], kind: str) -> str:
    """The figure in words, for who does not see it: launches, busy time and end of each step."""
    parts = []
    for t in timelines:
        if t.problems:
            parts.append(f"{t.title}: not drawn, {t.problems[0]}")
            continue
        total = t.busy_us + t.idle_us
        share = t.idle_us / total if total else 0.0
        parts.append(
            f"{t.title}: {_launches(t)}, device busy {t.busy_us:,.0f} µs and idle {t.idle_us:,.0f} µs ({share:.0%}), "
            f"step {t.wall_us:,.0f} µs."
        )
    return " ".join([f"{kind}.", *parts])


def _rows(timelines: Sequence[StepTimeline]) -> Iterator[tuple[int, str]]:
    for number, timeline in enumerate(timelines):
        if timeline.phases and not timeline.problems:
            yield number, "phase"
        yield number, "host"
        yield number, "device"


def _bars(role: str, found: Sequence[tuple[int, Span, str]], longest: float) -> go.Bar:
    colour, pattern, label = palette.ROLE_STYLES[role]
    spans = [span for _, span, _ in found]
    return go.Bar(
        orientation="h", name=f"{role.replace('_', ' + ')} ({label})", meta=["role", role], legendgroup=role,
        y=[y for y, _, _ in found], base=[span.begin_us for span in spans], x=[span.duration_us for span in spans],
        width=[HEIGHTS[span.lane] for span in spans],
        text=[label if span.duration_us >= LABELLED * longest else "" for span in spans],
        textposition="inside", insidetextanchor="middle", textangle=0, constraintext="none",
        textfont={"size": 10, "color": "#FFFFFF"},
        customdata=[[where, short_name(s.name)[:80], s.duration_us, s.begin_us] for _, s, where in found],
        hovertemplate="%{customdata[1]}<br>%{customdata[0]}<br>" + role
        + ": %{customdata[2]:,.1f} µs from %{customdata[3]:,.1f} µs<extra></extra>",
        marker={
            "color": colour, "line": {"width": 0},
            "pattern": {"shape": pattern, "fgcolor": "#FFFFFF", "size": 5, "solidity": 0.25, "fillmode": "overlay"},
        },
    )  # fmt: skip


def _phase_bars(found: Sequence[tuple[int, Span, str]], longest: float) -> go.Bar:
    return go.Bar(
        orientation="h", name="phases of the step", meta=["phase"],
        y=[y for y, _, _ in found], base=[s.begin_us for _, s, _ in found], x=[s.duration_us for _, s, _ in found],
        width=[HEIGHTS["phase"]] * len(found),
        text=[s.name if s.duration_us >= 2 * LABELLED * longest else "" for _, s, _ in found],
        textposition="inside", insidetextanchor="middle", textangle=0, constraintext="none",
        textfont={"size": 10, "color": palette.NEUTRAL},
        customdata=[[where, s.name, s.duration_us] for _, s, where in found],
        hovertemplate="%{customdata[1]}<br>%{customdata[0]}: %{customdata[2]:,.1f} µs<extra></extra>",
        marker={
            "color": palette.translucent(palette.NEUTRAL, 0.15), "line": {"color": palette.NEUTRAL, "width": 1},
        },
    )  # fmt: skip


def _add_idle(figure: go.Figure, good: Sequence[tuple[int, StepTimeline]], place: dict[tuple[int, str], int]) -> None:
    gaps = [(place[number, "device"], begin, end) for number, t in good for begin, end in t.device_idle()]
    if not gaps:
        return
    figure.add_trace(
        go.Bar(
            orientation="h", name="device idle", meta=["idle"], y=[y for y, _, _ in gaps],
            base=[begin for _, begin, _ in gaps], x=[end - begin for _, begin, end in gaps], width=0.86,
            customdata=[[end - begin] for _, begin, end in gaps],
            hovertemplate="device idle: %{customdata[0]:,.1f} µs<extra></extra>",
            marker={
                "color": palette.translucent(palette.NEUTRAL, 0.18), "line": {"width": 0},
                "pattern": {"shape": "/", "fgcolor": palette.NEUTRAL, "size": 9, "solidity": 0.08,
                            "fillmode": "overlay"},
            },
        )
    )  # fmt: skip


def _finish(number: int, timeline: StepTimeline, place: dict[tuple[int, str], int]) -> go.Scatter:
    """A line across the lanes of a timeline where its step ends, the time beside it."""
    top = place.get((number, "phase"), place[number, "host"]) - 0.45
    bottom = place[number, "device"] + 0.45
    return go.Scatter(
        x=[timeline.wall_us] * 2, y=[bottom, top], mode="lines+text", name="end of the step", showlegend=False,
        meta=["finish", number], text=["", f"  {timeline.wall_us:,.0f} µs"], textposition="middle right",
        textfont={"size": 11, "color": palette.NEUTRAL}, cliponaxis=False,
        line={"color": palette.NEUTRAL, "width": 2, "dash": "dash"},
        hovertemplate=f"{timeline.title}: the step ends at %{{x:,.1f}} µs<extra></extra>",
    )  # fmt: skip


def _end(timeline: StepTimeline) -> float:
    return max([timeline.wall_us, *(span.end_us for span in timeline.spans)])


def _launches(timeline: StepTimeline) -> str:
    words = f"{timeline.launches} launch{'es' * (timeline.launches != 1)}"
    if timeline.graph_launches:
        words += f", {timeline.graph_launches} of them {'a graph' if timeline.graph_launches == 1 else 'graphs'}"
    return words


def _tick(timeline: StepTimeline, lane: str) -> str:
    if lane == "phase":
        return f"{timeline.title}<br>phases"
    if timeline.problems:
        return f"{timeline.title}<br>not drawn" if lane == "host" else ""
    if lane == "host":
        return f"{'' if timeline.phases else timeline.title + '<br>'}host: {_launches(timeline)}"
    total = timeline.busy_us + timeline.idle_us
    return f"device: {len(timeline.device)} kernels and copies, {timeline.busy_us / total if total else 0:.0%} busy"


def _wrap(text: str, width: int = 100) -> str:
    lines, line = [], ""
    for word in text.split():
        if len(line) + len(word) > width:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return "<br>".join([*lines, line])


def _layout(
    timelines: Sequence[StepTimeline], kind: str, rows: Sequence[tuple[int, str]], longest: float
) -> dict[str, Any]:
    axis = {"zeroline": False, "linecolor": palette.NEUTRAL, "tickfont": {"size": 11}, "automargin": True}
    drawn = [t for t in timelines if not t.problems]
    title = f"Host and device during one step ({kind})"
    if drawn:
        title += f": {' → '.join(str(t.launches) for t in drawn)} launches"
    notes = [
        {
            "x": longest / 2, "y": rows.index((number, "host")) + 0.5, "showarrow": False, "align": "left",
            "text": _wrap(f"This trace is not drawn. {' '.join(t.problems)}"),
            "font": {"size": 11, "color": palette.NEUTRAL},
        }
        for number, t in enumerate(timelines)
        if t.problems
    ]  # fmt: skip
    return {
        "height": AROUND + LANE * max(2, len(rows)), "autosize": True, "template": "none",
        "margin": {"l": 150, "r": 60, "t": 60, "b": 100}, "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)", "font": {"size": 12, "color": palette.NEUTRAL},
        "title": {"text": title, "font": {"size": 14}, "x": 0, "xanchor": "left"},
        "barmode": "overlay", "hovermode": "closest", "annotations": notes,
        "legend": {"orientation": "h", "x": 0, "y": -0.12, "yanchor": "top", "yref": "paper", "font": {"size": 11}},
        "xaxis": {
            **axis, "title": {"text": "µs after the step began", "standoff": 8}, "range": [0, longest * 1.06],
            "gridcolor": palette.GRID, "showline": True,
        },
        "yaxis": {
            **axis, "range": [len(rows) - 0.4, -0.6], "tickmode": "array", "tickvals": list(range(len(rows))),
            "ticktext": [_tick(timelines[number], lane) for number, lane in rows], "showgrid": False,
            "fixedrange": True,
        },
    }  # fmt: skip
