"""The timeline chart: every span where it belongs, roles told apart without colour, nothing doubtful drawn."""

from __future__ import annotations

import dataclasses
import itertools

import plotly.graph_objects as go
import pytest

from labkit.figures import palette
from labkit.figures.timeline import LABELLED, summary_sentence, timeline_figure
from labkit.measure.spans import ROLES, Span, StepTimeline
from labkit.measure.timeline import from_trace
from tests.traces import eager, full, piecewise

PHASES = {"schedule": 6.0, "launch": 60.0, "sample": 4.0}


def three() -> list[StepTimeline]:
    return [
        from_trace(make().done(), title=title, phases_us=PHASES)
        for make, title in ((eager, "eager"), (piecewise, "PIECEWISE"), (full, "FULL"))
    ]


def traces(figure: go.Figure) -> dict[tuple[object, ...], go.Bar]:
    return {tuple(trace.meta): trace for trace in figure.data}


def test_every_span_is_a_bar_in_its_lane_at_its_time() -> None:
    timelines = three()
    figure = timeline_figure(timelines, "RECORDED")
    drawn = set()
    for key, trace in traces(figure).items():
        if key[0] == "role":
            drawn |= {(key[1], y, base, x) for y, base, x in zip(trace.y, trace.base, trace.x, strict=True)}
    expected = {
        (s.role, 3 * number + {"host": 1, "device": 2}[s.lane], s.begin_us, s.duration_us)
        for number, t in enumerate(timelines)
        for s in (*t.host, *t.device)
    }
    assert drawn == expected
    phases = traces(figure)["phase",]
    assert list(phases.base) == [0.0, 6.0, 66.0] * 3 and list(phases.x) == [6.0, 60.0, 4.0] * 3


def test_idle_is_shaded_exactly_where_the_device_does_nothing() -> None:
    timelines = three()
    idle = traces(timeline_figure(timelines, "LIVE"))["idle",]
    gaps = [(3 * n + 2, begin, end - begin) for n, t in enumerate(timelines) for begin, end in t.device_idle()]
    assert list(zip(idle.y, idle.base, idle.x, strict=True)) == gaps and gaps
    assert ("idle",) not in traces(timeline_figure(timelines, "LIVE", highlight_idle=False))


def test_launches_and_ends_are_said_in_words() -> None:
    timelines = three()
    figure = timeline_figure(timelines, "RECORDED")
    assert figure.layout.title.text == "Host and device during one step (RECORDED): 17 → 9 → 3 launches"
    ticks = list(figure.layout.yaxis.ticktext)
    assert ticks[1] == "host: 17 launches" and ticks[7] == "host: 3 launches, 1 of them a graph"
    assert "% busy" in ticks[2] and figure.layout.xaxis.title.text.startswith("µs")
    for number, t in enumerate(timelines):
        line = traces(figure)["finish", number]
        assert set(line.x) == {t.wall_us} and line.text[1].strip() == f"{t.wall_us:,.0f} µs" and line.line.dash
    words = summary_sentence(timelines, "RECORDED")
    assert words.startswith("RECORDED. eager: 17 launches, device busy") and "step 70 µs" in words


def test_roles_differ_without_colour() -> None:
    assert set(palette.ROLE_STYLES) == set(ROLES)
    styles = list(palette.ROLE_STYLES.values())
    for a, b in itertools.combinations(styles, 2):
        assert a[2] != b[2] and a[:2] != b[:2]
    for colour, _, _ in styles:
        assert palette.contrast(colour, "#FFFFFF") >= 3 and palette.contrast(colour, "#111111") >= 3
    figure = timeline_figure(three(), "LIVE")
    for key, trace in traces(figure).items():
        if key[0] == "role":
            colour, pattern, label = palette.ROLE_STYLES[key[1]]
            assert trace.marker.pattern.shape == pattern and label in trace.name
            end = figure.layout.xaxis.range[1]
            wide = [text for text, x in zip(trace.text, trace.x, strict=True) if x >= LABELLED * end]
            assert all(text == label for text in wide), "colour is never alone"


def test_hover_gives_name_role_and_time() -> None:
    gemm = traces(timeline_figure(three(), "LIVE"))["role", "gemm"]
    assert "nvjet" in gemm.customdata[-1][1] and "FULL, device" in gemm.customdata[-1][0]
    assert "µs" in gemm.hovertemplate and "gemm" in gemm.hovertemplate


def test_a_doubtful_trace_is_not_drawn() -> None:
    good, _, other = three()
    bad = dataclasses.replace(good, problems=("The trace lost the kernels of 1 launch (x).",))
    figure = timeline_figure([bad, other], "RECORDED")
    assert figure.layout.annotations[0].text.endswith("lost the kernels of 1 launch (x).")
    ys = {y for key, t in traces(figure).items() if key[0] in ("role", "idle", "phase") for y in t.y}
    assert ys == {2, 3, 4} and ("finish", 0) not in traces(figure)
    assert "17" not in figure.layout.title.text and "not drawn" in summary_sentence([bad, other], "RECORDED")
    alone = timeline_figure([bad], "RECORDED")
    assert not alone.data and len(alone.layout.annotations) == 1


@pytest.mark.parametrize("count", [1, 400])
def test_many_kernels_stay_few_traces(count: int) -> None:
    spans = [Span("host", "cudaGraphLaunch", "graph", 0.0, 9.0)]
    spans += [Span("device", f"k{i}", ROLES[i % 8], 10.0 + 2 * i, 11.5 + 2 * i, 0) for i in range(count)]
    figure = timeline_figure([StepTimeline("t", "FULL", tuple(spans), 900.0, 1, 1)] * 3, "SIMULATED")
    assert len(figure.data) <= len(ROLES) + 4
    assert len(figure.to_json()) < 1_000_000


def test_nothing_to_draw_is_an_empty_figure() -> None:
    assert not timeline_figure([], "LIVE").data
