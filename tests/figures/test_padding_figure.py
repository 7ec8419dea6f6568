"""The padding chart: the report's own numbers, told apart without colour, with where they are from."""

from __future__ import annotations

import json

import plotly.graph_objects as go
import pytest

from labkit.config import CUDAGraphMode as Mode
from labkit.engine.report import StepReport
from labkit.figures import padding_figure, palette
from labkit.figures.padding import LABELLED_BARS
from labkit.graphs.dispatcher import GraphDispatcher
from labkit.graphs.padding import PaddingReport

ORIGIN = "LIVE · NVIDIA H200 · torch 2.11.0 · 2026-11-30"


def report(mode: str = "FULL_AND_PIECEWISE", up_to: int = 20, sizes: tuple[int, ...] = (1, 2, 4, 8)) -> PaddingReport:
    by, steps = GraphDispatcher(Mode[mode], sizes, max_num_seqs=8), []
    for n in range(1, up_to):
        for reqs in {min(n, 8), 1}:
            found = by.dispatch(n, reqs, n == reqs > 1)
            steps.append(
                StepReport(
                    1, found.mode.name, found.size, n, reqs, found.size - n, -(-n // reqs), 9, "TRITON_ATTN", 1.0, {}
                )
            )  # fmt: skip
    return PaddingReport.of(steps, GraphDispatcher(Mode[mode], sizes, max_num_seqs=8))


def traces(figure: go.Figure) -> dict[tuple[str, ...], go.Bar]:
    return {tuple(trace.meta): trace for trace in figure.data}


@pytest.mark.parametrize("mode", Mode.__members__)
def test_every_number_of_the_report_is_in_the_figure(mode: str) -> None:
    found = report(mode)
    bars = traces(padding_figure(found, ORIGIN))
    for runtime in ("FULL", "PIECEWISE", "NONE"):
        lines = [line for line in found.lines if line.mode == runtime]
        assert (("real", runtime) in bars) == bool(lines)
        if lines:
            assert list(bars["real", runtime].y) == [line.real_tokens for line in lines]
            assert [d[2] for d in bars["real", runtime].customdata] == [line.steps for line in lines]
    graphs = [line for line in found.lines if line.size is not None]
    assert (("padding",) in bars) == bool(graphs)
    if graphs:
        assert list(bars["padding",].y) == [line.padded_tokens for line in graphs]
        assert list(bars["padding",].x) == [f"{line.mode}<br>{line.size}" for line in graphs]


def test_bars_differ_by_pattern_and_keep_the_backends_colour() -> None:
    bars = traces(padding_figure(report(), ORIGIN))
    kinds = [("real", "FULL"), ("real", "PIECEWISE"), ("real", "NONE"), ("padding",)]
    assert len({bars[kind].marker.pattern.shape for kind in kinds}) == 4
    assert {bars[kind].marker.color for kind in kinds[:3]} == {palette.colour("TRITON_ATTN")}
    assert {bars[kind].marker.pattern.fillmode for kind in kinds[1:3]} == {"overlay"}, "else the colour is lost"


def test_the_origin_and_the_misses_are_in_the_figure() -> None:
    found = report()
    figure = padding_figure(found, ORIGIN)
    assert [note.text for note in figure.layout.annotations] == [ORIGIN, found.summary]
    assert "eager<br>above the<br>largest size" in figure.layout.xaxis.categoryarray
    only = padding_figure(report("FULL_DECODE_ONLY"), ORIGIN).layout.xaxis.categoryarray
    assert "eager<br>no graph for<br>such a batch" in only
    assert len(set(only)) == len(only), "two reasons never share a bar"


def test_everything_is_inside_an_axis_that_begins_at_zero() -> None:
    found = report()
    figure = padding_figure(found, ORIGIN)
    low, high = figure.layout.yaxis.range
    assert low == 0 and high > max(line.real_tokens + line.padded_tokens for line in found.lines)


def test_labels_only_where_they_have_room() -> None:
    assert ("labels",) in traces(padding_figure(report(), ORIGIN))
    many = report(sizes=tuple(range(1, 20)))
    assert len(many.lines) > LABELLED_BARS and ("labels",) not in traces(padding_figure(many, ORIGIN))


def test_the_figure_is_plain_data_and_empty_reports_draw() -> None:
    figure = padding_figure(report(), ORIGIN)
    assert go.Figure(json.loads(figure.to_json())) == figure
    empty = padding_figure(PaddingReport.of([]), ORIGIN)
    assert not empty.data and "No step ran." in empty.layout.annotations[1].text
