"""The step latency chart: it holds the numbers it was given, tells runs apart without colour, never cuts the axis."""

from __future__ import annotations

import dataclasses
import json
import math
import random

import plotly.graph_objects as go
import pytest

from labkit.config import ATTENTION_BACKENDS
from labkit.figures import RunPoints, latency_figure, palette, trace_of
from labkit.figures.latency import BRIGHT_RUNS, HALF_SLOT, SLOTS_IN_VIEW, short_ms, slot_positions


def points(
    number: int, n: int = 12, *, mode: str = "NONE", kind: str = "LIVE", backend: str = "TORCH_SDPA"
) -> RunPoints:
    rand = random.Random(number)
    samples = tuple(rand.uniform(1, 3) for _ in range(n))
    ordered = sorted(samples)
    return RunPoints(
        number, backend, mode, 4, 3, kind, samples, ordered[n // 10], ordered[n // 2], ordered[(9 * n) // 10]
    )


def test_every_number_of_a_run_is_in_the_figure_as_it_was_given():
    runs = [points(i, n=5 + i) for i in range(1, 6)]
    figure = latency_figure(runs, runs[1:3])
    for run in runs:
        samples = trace_of(figure, "samples", run.number)
        assert tuple(samples.y) == run.samples_ms
        assert list(samples.x) == sorted(samples.x)
        assert all(abs(x - run.number) <= HALF_SLOT for x in samples.x)
        assert set(trace_of(figure, "median", run.number).y) == {run.p50_ms}
        assert set(trace_of(figure, "band", run.number).y) == {run.p10_ms, run.p90_ms}
    for run in runs[1:3]:
        assert tuple(trace_of(figure, "samples", run.number, "pinned").y) == run.samples_ms
    (labels,) = [t for t in figure.data if t.meta[0] == "labels" and t.meta[2] == "main"]
    assert [f"n={len(r.samples_ms)}" in text for r, text in zip(runs, labels.text, strict=True)] == [True] * 5
    with pytest.raises(KeyError):
        trace_of(figure, "samples", 9)


def test_a_run_under_way_has_samples_and_no_median_yet():
    run = RunPoints(1, "TORCH_SDPA", "NONE", 1, 1, "LIVE", (2.0, 2.5), finished=False)
    figure = latency_figure([run])
    assert tuple(trace_of(figure, "samples", 1).y) == (2.0, 2.5)
    assert {t.meta[0] for t in figure.data} == {"samples"}
    latency_figure([RunPoints(1, "TORCH_SDPA", "NONE", 1, 1, "LIVE", (), finished=False)])


@pytest.mark.parametrize("log", [False, True])
def test_an_empty_chart_says_what_to_do(log):
    figure = latency_figure([], log=log)
    assert "Press Run" in figure.layout.annotations[0].text and figure.layout.annotations[0].visible
    assert not latency_figure([points(1)], log=log).layout.annotations[0].visible
    assert figure.layout.yaxis.showticklabels is False


def test_the_axis_begins_at_zero_and_everything_is_inside_it():
    runs = [points(i) for i in (1, 2)]
    low, high = latency_figure(runs).layout.yaxis.range
    assert low == 0 and high > max(s for r in runs for s in r.samples_ms)
    low, high = latency_figure(runs, log=True).layout.yaxis.range
    assert all(low < math.log10(s) < high for r in runs for s in r.samples_ms)


def test_modes_and_kinds_differ_by_dash_and_marker_and_backends_by_colour():
    runs = [
        points(1, mode="NONE"),
        points(2, mode="FULL"),
        points(3, mode="FULL", kind="RECORDED"),
        points(4, mode="FULL", backend="TRITON_ATTN"),
    ]
    figure = latency_figure(runs)
    medians = [trace_of(figure, "median", r.number) for r in runs]
    assert medians[0].line.dash != medians[1].line.dash
    assert len({m.marker.symbol for m in medians[:3]}) == 3
    assert medians[3].line.color != medians[1].line.color
    assert [m.name for m in medians] == [
        "TORCH_SDPA · NONE · LIVE",
        "TORCH_SDPA · FULL · LIVE",
        "TORCH_SDPA · FULL · RECORDED",
        "TRITON_ATTN · FULL · LIVE",
    ]


def test_each_kind_of_run_is_in_the_legend_once_and_old_runs_are_faint():
    runs = [points(i, mode="NONE" if i % 2 else "FULL") for i in range(1, 9)]
    figure = latency_figure(runs, runs[:2])
    assert sorted(t.name for t in figure.data if t.showlegend) == [
        "TORCH_SDPA · FULL · LIVE",
        "TORCH_SDPA · NONE · LIVE",
    ]
    shown = {r.number: trace_of(figure, "samples", r.number).opacity for r in runs}
    assert [n for n, opacity in shown.items() if opacity == 1] == [5, 6, 7, 8][-BRIGHT_RUNS:]
    assert trace_of(figure, "samples", 1, "pinned").opacity == 1


def test_the_newest_runs_are_in_view():
    low, high = latency_figure([points(i) for i in range(1, 21)]).layout.xaxis.range
    assert high > 20 and 20 - SLOTS_IN_VIEW < low < 20 - SLOTS_IN_VIEW + 1
    slow = dataclasses.replace(points(1, backend="FLEX_ATTENTION"), samples_ms=(9000.0,) * 12)
    for log in (False, True):
        figure = latency_figure([slow, *(points(i) for i in range(2, 10))], log=log)
        assert figure.layout.yaxis.range[1] < 5, "a slow run that is out of view leaves the scale alone"
        assert [t.name for t in figure.data if t.showlegend] == ["TORCH_SDPA · NONE · LIVE"]
    low, high = latency_figure([points(1)]).layout.xaxis.range
    assert high - low > 3, "one run alone is not blown up to the whole width"


def test_two_pinned_runs_get_a_plot_beside_the_chart():
    figure = latency_figure([points(1), points(2)], [points(1), points(2)])
    assert figure.layout.xaxis.domain[1] < figure.layout.xaxis2.domain[0]
    assert [text.split(":")[0] for text in figure.layout.xaxis2.ticktext] == ["pin A", "pin B"]
    assert figure.layout.yaxis2.range[0] == 0
    assert figure.layout.xaxis2.visible and not latency_figure([points(1)]).layout.xaxis2.visible


def test_the_figure_is_plain_data():
    """Nothing but what JSON knows: a figure travels to the page and into a file."""
    figure = latency_figure([points(1)], [points(1)])
    again = go.Figure(figure.to_plotly_json())
    assert again == figure
    assert go.Figure(json.loads(figure.to_json())) == figure


def test_colours_can_be_seen_on_light_and_on_dark():
    assert set(palette.BACKEND_COLOURS) == set(ATTENTION_BACKENDS)
    colours = [*palette.BACKEND_COLOURS.values(), palette.NEUTRAL]
    for background in ("#FFFFFF", "#111111"):
        assert min(palette.contrast(c, background) for c in colours) >= 3
    assert palette.contrast("#000000", "#FFFFFF") == pytest.approx(21)


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0.0123456, "0.012"),
        (0.123456, "0.123"),
        (1.23456, "1.23"),
        (12.3456, "12.3"),
        (123.456, "123"),
        (1234.5, "1234"),
    ],
)
def test_three_digits_are_enough(ms, text):
    assert short_ms(ms) == text


@pytest.mark.parametrize("n", [1, 2, 3, 50])
def test_steps_are_spread_evenly_over_the_slot(n):
    xs = slot_positions(n, 4.0)
    assert len(xs) == n and sum(xs) / n == pytest.approx(4.0)
    gaps = {round(b - a, 9) for a, b in zip(xs, xs[1:], strict=False)}
    assert len(gaps) <= 1
