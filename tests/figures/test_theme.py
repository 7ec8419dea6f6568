"""The look that figures of a panel get, and the names by which their traces are checked."""

from __future__ import annotations

import plotly.graph_objects as go
import pytest

from labkit.figures import palette
from labkit.figures.points import drawn, first_difference, runs_drawn
from labkit.figures.theme import TEMPLATE, mark_line, themed


def test_a_figure_with_a_look_of_its_own_keeps_it():
    own = go.Figure(layout={"template": "none", "paper_bgcolor": "white", "height": 99, "width": 300})
    themed(own)
    assert (own.layout.paper_bgcolor, own.layout.height, own.layout.autosize) == ("white", 99, None)
    assert own.layout.template.layout.colorway != TEMPLATE.layout.colorway


def test_the_note_stays_first_and_hidden_beside_those_of_the_figure():
    figure = go.Figure().add_annotation(text="mine", x=0, y=0)
    themed(figure)
    assert [(a.text, a.visible) for a in figure.layout.annotations] == [("", False), ("mine", None)]


@pytest.mark.parametrize("axis", ["x", "y"])
def test_a_line_is_where_it_was_predicted(axis):
    figure = go.Figure()
    mark_line(figure, axis, 2.5, "here")
    (line,), (words,) = figure.layout.shapes, figure.layout.annotations
    assert line[f"{axis}0"] == line[f"{axis}1"] == words[axis] == 2.5 and line.line.dash == "dash"
    along = {"x": "y", "y": "x"}[axis]
    assert (line[f"{along}0"], line[f"{along}1"], line[f"{along}ref"]) == (0, 1, "paper")


def test_every_colour_of_a_series_can_be_seen_on_light_and_dark():
    assert all(palette.contrast(hue, page) >= 3 for hue in palette.SERIES for page in ("#FFFFFF", "#111111"))


RUNS = {1: {"ms": 2.0, "samples": (1.0, float("nan")), "name": "a"}, 2: {"ms": 3.0, "samples": (4.0,), "name": "b"}}


@pytest.mark.parametrize(
    ("trace", "words"),
    [
        (go.Bar(x=["a", "b"], y=[2.0, 3.0], meta=drawn([1, 2], x="name", y="ms")), ""),
        (go.Bar(x=["a", "c"], y=[2.0, 3.0], meta=drawn([1, 2], x="name", y="ms")), "x[1] shows c, 'name' holds b"),
        (go.Bar(y=["a"], x=[2.0], orientation="h", meta=drawn([1], x="ms", y="name")), ""),
        (go.Scatter(y=[1.0, float("nan")], meta=drawn(1, y="samples")), ""),
        (go.Scatter(y=[1.0], meta=drawn(1, y="samples")), "y[1] shows nothing, 'samples' holds nan"),
        (go.Scatter(y=[4.0, 5.0], meta=drawn(2, y="samples")), "y[1] shows 5.0, 'samples' holds nothing"),
        (go.Scatter(y=[2.0], meta=drawn(1, y="ms")), ""),
        (go.Scatter(y=[2.0], meta=drawn(3, y="ms")), "run 3 with 'ms' is drawn, and there is none"),
        (go.Scatter(y=[2.0], meta=drawn(1, y="us")), "run 1 with 'us' is drawn, and there is none"),
        (go.Scatter(y=[9.0], meta=["samples", 2, "main"]), "y[0] shows 9.0, 'samples' holds 4.0"),
        (go.Scatter(y=[9.0], meta=["labels", 0, "main"]), ""),
        (go.Scatter(y=[9.0], meta="a guide"), ""),
        (go.Scatter(y=[9.0]), ""),
    ],
)
def test_what_is_drawn_is_compared_with_what_the_runs_hold(trace, words):
    assert first_difference([trace], RUNS).endswith(words) and bool(first_difference([trace], RUNS)) == bool(words)


def test_a_heat_map_is_compared_row_by_row():
    runs = {1: {"z": [[1, 2], [3, 4]]}}
    assert first_difference([go.Heatmap(z=[[1, 2], [3, 4]], meta=drawn(1, z="z"))], runs) == ""
    assert "z[1]" in first_difference([go.Heatmap(z=[[1, 2], [3, 5]], meta=drawn(1, z="z"))], runs)


def test_the_runs_that_are_drawn_are_known():
    traces = [go.Bar(y=[1, 2], meta=drawn([3, 4], y="ms")), go.Bar(y=[1], meta=["ms", 7, "main"]), go.Bar(y=[1])]
    assert runs_drawn(traces) == {3, 4, 7}
    with pytest.raises(ValueError, match="axis"):
        drawn(1)
