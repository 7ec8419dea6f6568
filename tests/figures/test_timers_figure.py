"""What timers read, drawn: numbers of every run above, samples of the newest below, and nothing else."""

from __future__ import annotations

from labkit.figures.palette import contrast
from labkit.figures.points import first_difference
from labkit.figures.timers import LOOKS, MARKS, Timed, timers_figure


def one(number, middle, samples, **marks):
    values = {"median_us": middle, "p10_us": middle - 1, "p90_us": middle + 2, **marks}
    places = list(range(1, len(samples) + 1))
    return Timed(number, f"timer {number}", values, {"samples_us": samples}, {"samples_us": places}, {})


def known(run):
    extra = {"samples_b_us": run.samples.get("samples_b_us"), "place_b": run.places.get("samples_b_us")}
    return {**run.values, "samples_us": run.samples["samples_us"], "place": run.places["samples_us"], **extra}


def test_every_number_is_the_run_s():
    runs = [one(1, 6.0, [6.0, 7.0], truth_us=5006.0), one(2, 5010.0, [5000.0, 5020.0, 5010.0], truth_us=5006.0)]
    figure = timers_figure(runs, "SIMULATED")
    told = {run.number: known(run) for run in runs}
    assert first_difference(figure.data, told) == ""
    told[2]["samples_us"] = [5000.0, 5020.0, 5011.0]
    assert "5011" in first_difference(figure.data, told)
    assert figure.layout.xaxis.type == "log" and "logarithmic" in figure.layout.xaxis.title.text
    middle = figure.data[0]
    assert list(middle.error_x.array) == [2.0, 2.0] and list(middle.error_x.arrayminus) == [1.0, 1.0]
    assert {trace.type for trace in figure.data} == {"scatter", "histogram"}


def test_two_things_stand_beside_each_other():
    values = {f"{name}{b}_us": us for b in ("", "_b") for name, us in (("median", 10.0), ("p10", 9.0), ("p90", 12.0))}
    run = Timed(3, "A B B A", values, {"samples_us": [10.0, 12.0], "samples_b_us": [9.0, 11.0]},
                {"samples_us": [1, 4], "samples_b_us": [2, 3]}, {"samples_us": "A", "samples_b_us": "B"})  # fmt: skip
    figure = timers_figure([run], "SIMULATED")
    assert first_difference(figure.data, {3: known(run)}) == ""
    assert list(figure.layout.yaxis.categoryarray) == ["run 3: A B B A, A", "run 3: A B B A, B"]
    assert figure.layout.xaxis.type != "log" and figure.layout.height > timers_figure([], "").layout.height - 100


def test_nothing_is_told_by_colour_alone():
    looks = [*LOOKS.values(), *((symbol, colour) for symbol, colour, _ in MARKS.values())]
    assert len({symbol for symbol, _ in looks}) == len(looks)
    assert all(contrast(colour, paper) >= 3 for _, colour in looks for paper in ("#FFFFFF", "#111111"))
