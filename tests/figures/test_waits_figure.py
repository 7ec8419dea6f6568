"""Bars of what a step waits for, under timelines, launches or curves: what is drawn is what was handed in."""

from __future__ import annotations

import pytest

from labkit.figures.palette import contrast
from labkit.figures.points import first_difference
from labkit.figures.waits import CURVES, PARTS, Curves, Launches, StepBar, waits_figure
from labkit.simulate.queue import Work, run_queue


def bars(*parts):
    return [StepBar(i + 1, f"run {i + 1}", found) for i, found in enumerate(parts)]


TWO = bars({"instructions": 27.0, "work": 24.0}, {"instructions": 6.0, "work": 160.0})


def names(figure):
    return [trace.name for trace in figure.data]


def test_every_part_is_a_bar_of_its_own_colour_or_pattern():
    figure = waits_figure(TWO, "SIMULATED", title="a queue")
    known = {1: {"instructions_us": 27.0, "work_us": 24.0}, 2: {"instructions_us": 6.0, "work_us": 160.0}}
    assert first_difference(figure.data, known) == ""
    assert [list(trace.x) for trace in figure.data] == [[27.0, 6.0], [24.0, 160.0]]
    assert figure.layout.title.text == "a queue · SIMULATED" and "µs" in figure.layout.xaxis2.title.text
    known[2]["work_us"] = 161.0
    assert "161" in first_difference(figure.data, known)


def test_parts_that_stand_in_one_bar_differ_without_colour():
    for together in (("instructions", "work"), ("instructions", "data", "rest"), ("work", "starting"),
                     ("instructions", "data", "arithmetic", "kernels", "host")):  # fmt: skip
        patterns = [PARTS[part][1] for part in together]
        assert len(set(patterns)) == len(patterns)
    assert all(contrast(colour, paper) >= 3 for colour, _, _ in PARTS.values() for paper in ("#FFFFFF", "#111111"))
    assert all(contrast(look[2], paper) >= 3 for look in CURVES.values() for paper in ("#FFFFFF", "#111111"))
    assert len({look[0] for look in CURVES.values()}) == len({look[1] for look in CURVES.values()}) == len(CURVES)


def test_a_queue_names_its_kernels_where_there_is_room():
    timeline = run_queue([Work(f"k{i}", "gemm", 3.0, 6.0) for i in range(8)], title="run 4")
    figure = waits_figure(bars({"work": 24.0}), "SIMULATED", timelines=[(4, timeline)], plain=True)
    assert "kernel, on the device" in names(figure) and "gemm (GEMM)" not in names(figure)
    finish = next(trace for trace in figure.data if trace.name == "end of the step")
    assert list(finish.x) == [51.0, 51.0]
    assert first_difference([finish], {4: {"finish": [51.0, 51.0]}}) == ""
    assert "52" in first_difference([finish], {4: {"finish": [52.0, 52.0]}})
    kernels = next(trace for trace in figure.data if trace.name == "kernel, on the device")
    assert "k7" in kernels.text and not any("copies" in tick for tick in figure.layout.yaxis.ticktext)
    many = run_queue([Work(f"k{i}", "gemm", 3.0, 6.0) for i in range(300)], title="run 4")
    crowded = waits_figure(bars({"work": 24.0}), "SIMULATED", timelines=[(4, many)], plain=True)
    assert not any(any(trace.text) for trace in crowded.data if list(trace.meta)[:1] == ["role"])


def test_launches_and_curves_carry_their_own_numbers():
    launches = Launches(7, ["a product", "a copy"], [121, 2], [26.5, 10.9], [3206.5, 21.8])
    figure = waits_figure(bars({"data": 66.0}), "RECORDED", launches=launches)
    assert figure.data[0].text[0] == "121 × 26.5 µs" and list(figure.data[0].x) == [3206.5, 21.8]
    curves = Curves(9, [1, 16], {"issue_us": [4.0, 4.1], "device_us": [1.0, 9.0]}, chosen=16)
    figure = waits_figure(bars({"work": 9.0}), "LIVE", curves=curves)
    known = {1: {"work_us": 9.0}, 9: {"elements": [1, 16], "issue_us": [4.0, 4.1], "device_us": [1.0, 9.0]}}
    assert first_difference(figure.data, known) == "" and figure.layout.xaxis.type == "log"
    sizes = figure.data[0].marker.size
    assert sizes[1] > sizes[0]


@pytest.mark.parametrize("count", [0, 1, 8])
def test_it_has_room_for_any_number_of_bars(count):
    figure = waits_figure(bars(*[{"work": 1.0 + i} for i in range(count)]), "LIVE")
    assert figure.layout.height >= 30 * count + 100
