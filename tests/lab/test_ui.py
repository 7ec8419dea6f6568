"""Widgets and HTML of the lab: nothing is clamped silently, errors are sentences, the page shows the newest figure."""

from __future__ import annotations

import importlib.util
import random
import threading

import ipywidgets as widgets
import plotly.graph_objects as go
import pytest

from labkit.errors import ConfigError
from labkit.figures import RunPoints, latency_figure
from labkit.lab import ui

needs_figure_widget = pytest.mark.skipif(
    not importlib.util.find_spec("anywidget"), reason="FigureWidget needs anywidget"
)


def points(number: int) -> RunPoints:
    rand = random.Random(number)
    samples = tuple(rand.uniform(1, 3) for _ in range(6))
    return RunPoints(number, "TORCH_SDPA", rand.choice(["NONE", "FULL"]), 4, 3, "LIVE", samples, 1.0, 2.0, 3.0)


def plain(figure: go.Figure) -> tuple[list[dict], dict]:
    """What is drawn, without what only the widget adds: identities, what is empty, the mark that it was drawn."""
    traces = [{k: v for k, v in t.to_plotly_json().items() if k != "uid"} for t in figure.data]
    layout = {k: v for k, v in figure.layout.to_plotly_json().items() if v not in (None, [], {}) and k != "meta"}
    return traces, layout


def a_page(view: ui.FigureView, answers: bool = True) -> None:
    """What a page says that has drawn the figure, and then carried out the first update."""
    view._live.set_state({"_view_count": 1})
    if answers:
        view._live.set_state({"_js2py_layoutDelta": {"layout_delta": {}, "layout_edit_id": 0}})  # of the drawing itself
        assert not view._answers
        edit = view._live._last_layout_edit_id
        view._live.set_state({"_js2py_layoutDelta": {"layout_delta": {}, "layout_edit_id": edit}})


@needs_figure_widget
def test_after_any_sequence_of_updates_the_page_shows_the_newest_figure():
    """Only differences travel, so their sum is checked: runs come, grow, get pinned, unpinned, forgotten."""
    view = ui.FigureView(latency_figure([]), redraw=False)
    a_page(view)
    rand = random.Random(0)
    for _ in range(20):
        runs = [points(i) for i in range(1, rand.randrange(1, 6))]
        coming = RunPoints(
            len(runs) + 1, "TORCH_SDPA", "NONE", 1, 1, "LIVE", (1.0,) * rand.randrange(3), finished=False
        )
        pinned = rand.sample(runs, min(len(runs), rand.randrange(3)))
        figure = latency_figure([*runs, *([coming] if rand.random() < 0.5 else [])], pinned, log=rand.random() < 0.3)
        view.show(figure)
        assert plain(view._live) == plain(figure)
        assert view.figure is figure


@needs_figure_widget
def test_notes_and_shapes_that_are_no_longer_mentioned_go_and_another_kind_of_trace_replaces_the_old():
    view = ui.FigureView(go.Figure(go.Bar(y=[1])), redraw=False)
    a_page(view)
    marked = go.Figure(go.Bar(y=[1]))
    marked.add_hline(y=1, annotation_text="here")
    for figure in (marked, go.Figure(go.Scatter(y=[2])), marked):
        view.show(figure)
        shown = view._live
        assert [t.type for t in shown.data] == [t.type for t in figure.data]
        assert len(shown.layout.shapes) == len(shown.layout.annotations) == len(figure.layout.shapes)


@needs_figure_widget
def test_a_figure_of_another_shape_leaves_nothing_of_the_last_one():
    """The second source of a panel may draw another kind of figure."""
    two = go.Figure([go.Bar(y=[1], xaxis="x", yaxis="y"), go.Bar(y=[2], xaxis="x2", yaxis="y2")])
    two.update_layout(xaxis={"domain": [0, 0.4]}, xaxis2={"domain": [0.6, 1]}, yaxis2={"anchor": "x2"},
                      barmode="stack", title="two", legend={"orientation": "h"})  # fmt: skip
    one = go.Figure(go.Scatter(y=[3])).update_layout(xaxis={"title": "x"})
    view = ui.FigureView(two, redraw=False)
    a_page(view)
    for _ in range(2):
        view.show(one)
        layout = view._live.layout
        assert (layout.barmode, layout.title.text, layout.legend.orientation) == (None, None, None)
        assert layout.xaxis2.visible is False and layout.yaxis2.visible is False and len(view._live.data) == 1
        view.show(two)
        assert plain(view._live) == plain(two)


@needs_figure_widget
def test_nothing_is_sent_to_a_page_that_has_not_drawn_yet():
    """What arrives before the page has loaded its plotting code is lost; the newest figure goes out after it."""
    view = ui.FigureView(latency_figure([]), redraw=False)
    first = plain(view._live)
    view.show(latency_figure([points(1)]))
    view.show(latency_figure([points(1), points(2)]))
    assert plain(view._live) == first and len(view.figure.data) > 0
    a_page(view)
    assert plain(view._live) == plain(view.figure) and not view.redraws


@needs_figure_widget
def test_a_page_that_loads_again_gets_the_newest_figure():
    """It asks every widget for its state, and draws that."""
    view = ui.FigureView(latency_figure([]), redraw=False)
    a_page(view)
    view.show(latency_figure([points(1), points(2)]))
    state = view._live.get_state()
    prefix = "_widget" if "_widget_data" in state else ""  # as plotly 5 has it
    held = go.Figure({"data": state[f"{prefix}_data"], "layout": state[f"{prefix}_layout"]}, skip_invalid=True)
    assert plain(held) == plain(view.figure)


@needs_figure_widget
def test_a_page_that_draws_and_then_does_not_answer_gets_a_redraw(monkeypatch):
    monkeypatch.setattr(ui, "ANSWER_S", 0)
    view = ui.FigureView(latency_figure([]), redraw=False)
    view.show(latency_figure([points(1)]))
    a_page(view, answers=False)
    (timer,) = [t for t in threading.enumerate() if getattr(t, "function", None) == view._give_up] or [None]
    if timer:
        timer.join(10)
    assert view.redraws and view.widget.children == (view._output,)
    assert view._output.outputs


@needs_figure_widget
def test_a_page_that_never_speaks_gets_a_redraw_after_a_while(monkeypatch):
    """Case C40: some front ends show nothing where a FigureWidget should be."""
    view = ui.FigureView(latency_figure([]), redraw=False)
    view.show(latency_figure([points(1)]))
    assert not view.redraws
    monkeypatch.setattr(ui, "SILENCE_S", -1)
    view.show(latency_figure([points(1)]))
    assert view.redraws and view._output.outputs


def test_redrawing_replaces_the_output_by_the_figure_and_words_for_who_cannot_see_it():
    view = ui.FigureView(latency_figure([]), redraw=True)
    assert [type(child) for child in view.widget.children] == [widgets.Output]
    figure = latency_figure([points(1)])
    view.show(figure)
    (output,) = view.widget.children[0].outputs
    assert output["output_type"] == "display_data" and "table" in output["data"]["text/plain"]


def test_without_anywidget_the_panel_redraws(monkeypatch):
    """Case C40: FigureWidget exists and raises ImportError when it is built; go.Figure goes on working."""

    class NoAnywidget:
        def __init__(self, *args, **kwargs):
            raise ImportError("Please install anywidget to use the FigureWidget class")

    monkeypatch.setattr("plotly.graph_objects.FigureWidget", NoAnywidget)
    ui._speaking_figure_widget.cache_clear()
    try:
        assert ui.FigureView(latency_figure([])).redraws
    finally:
        ui._speaking_figure_widget.cache_clear()


@pytest.mark.parametrize("variable", ["COLAB_RELEASE_TAG", "COLAB_NOTEBOOK_ID"])
def test_on_colab_the_panel_redraws(monkeypatch, variable):
    monkeypatch.setenv(variable, "x")
    assert not ui.may_use_figure_widget()
    assert ui.FigureView(latency_figure([])).redraws


def test_new_plotly_on_old_ipywidgets_redraws(monkeypatch):
    monkeypatch.setattr("plotly.__version__", "6.1.0")
    monkeypatch.setattr("ipywidgets.__version__", "7.7.1")
    assert not ui.may_use_figure_widget()
    assert ui.FigureView(latency_figure([])).redraws


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_a_number_can_be_slid_or_typed_and_is_reported_once():
    number, heard = ui.Number("Batch", 1, 16, 4), []
    number.on_change = heard.append
    number.slider.value = 7
    number.box.value = 9
    number.value = 11
    assert heard == [7, 9, 11]
    assert number.slider.value == number.box.value == number.value == 11


@pytest.mark.parametrize(("typed", "kept"), [(99, 16), (0, 1), (-5, 1)])
def test_what_is_out_of_range_is_moved_and_said(typed, kept):
    number = ui.Number("Batch", 1, 16, 4)
    number.box.value = typed
    assert number.value == kept and f"batch {typed} is outside 1…16" in number.notice
    number.box.value = 5
    assert number.notice == ""


@pytest.mark.parametrize("ends", [(1, 8), (100, 200), (512, 512), (1, 1), (3, 4096)])
def test_a_range_can_move_anywhere(ends):
    number, heard = ui.Number("Context", 16, 1024, 64, 16), []
    number.on_change = heard.append
    number.set_range(*ends)
    assert (number.slider.min, number.slider.max) == ends
    assert ends[0] <= number.value <= ends[1] and number.slider.value == number.value
    assert heard == []


# --- words -----------------------------------------------------------------------------------------------------------


def test_an_error_is_a_card_of_what_why_and_try():
    card = ui.error_card(ConfigError("sizes=[0]", "0 is <below> 1", "Write 1."), "Run")
    assert "<b>sizes=[0]</b>" in card and "0 is &lt;below&gt; 1." in card and "Write 1." in card
    assert 'role="alert"' in card


def test_out_of_memory_names_what_to_lower():
    oom = type("OutOfMemoryError", (RuntimeError,), {})
    assert "Lower batch or context" in ui.error_card(oom("CUDA out of memory"), "a run")


@pytest.mark.parametrize("kind", ["LIVE", "RECORDED", "SIMULATED"])
def test_a_badge_says_its_kind_in_a_word_a_sign_and_a_colour(kind):
    badge = ui.badge(kind, "a <machine>")
    assert kind in badge and f"lk-{kind.lower()}" in badge and "a &lt;machine&gt;" in badge
    others = {ui.badge(k).split(">")[1][0] for k in ("LIVE", "RECORDED", "SIMULATED")}
    assert len(others) == 3, "three signs"


def test_badges_and_fallback_text_can_be_read():
    from labkit.figures.palette import contrast

    for colour in ("#1b6e3c", "#1f5fa8", "#7a3e9d", "#5f6368"):
        assert colour in ui.CSS and contrast(colour, "#FFFFFF") >= 4.5
    assert contrast("#222222", "#F5F5F5") >= 4.5 and contrast("#5a5a5a", "#FFFFFF") >= 4.5
