"""Panels, questions and tasks as HTML that needs no kernel, for the static site. Refuses to run or render a notebook.

`begin()` in a notebook's kernel puts a mark wherever a widget would stand; `end()` fills the marks with how the widgets
are by then, so that a panel shows every run that a later cell made with it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go

from labkit.lab import machine, ui
from labkit.lab.cards import Card, code, paragraph
from labkit.lab.exercises import CheckCard, source_of
from labkit.lab.frame import Frame
from labkit.lab.gate import GateBox
from labkit.lab.panel import Panel
from labkit.lab.quiz import LETTERS, QuizCard
from labkit.lab.task import TaskCard
from labkit.lab.words import pins

NO_ENGINE = "this page was made without an engine."
#: Seconds that a panel may take which no cell of its notebook has run.
LIMIT_S = 120.0

_shown: list[tuple[Any, Any]] = []
_numbers = itertools.count(1)


def begin(engine: bool) -> None:
    """In a kernel, before the first cell: show marks instead of widgets.

    engine: whether cells may run one. Panels take no LIVE source either way: a time of the machine that made a page
    says nothing about the reader's, and stands under "measured here, just now".
    """
    from IPython import get_ipython

    if not engine:
        machine.engine_missing = lambda: NO_ENGINE
    _drop_live_sources()
    shell = get_ipython()
    for kind in (widgets.Widget, Frame):
        shell.display_formatter.ipython_display_formatter.for_type(kind, _mark)
    shell.display_formatter.formatters["text/html"].for_type(CheckCard, _folded)


def end() -> None:
    """After the last cell: put HTML where the marks are."""
    from IPython.display import HTML

    for thing, mark in _shown:
        mark.update(HTML(still(thing)))


def still(thing: Any) -> str:
    """A panel or a widget as HTML without a kernel."""
    inner = panel_html(thing) if isinstance(thing, Frame) else widget_html(thing)
    return f'<div class="labkit labkit-still">{ui.CSS}{inner}</div>'


def panel_html(panel: Frame[Any]) -> str:
    """What a panel holds: question, chart, sentence with origin, pins, table; and what would stand there in a notebook.

    A panel that no cell has run is run once with the settings that it opens with.
    """
    if not panel.runs and panel.current is not None:
        panel.run(wait=True, timeout=LIMIT_S)
    parts = [f"<h3>{ui.escape(panel.title)}</h3>", live_note(panel)]
    if panel.gate is not None:
        parts.append(gate_html(panel.gate, panel.runs))
    if panel.runs:
        parts.append(figure_html(panel.figure, panel.summary))
        said = f"Compared with run {panel.runs[-2].number}: {panel.changed}" if panel.changed else ""
        parts.append(panel.words.said(panel.runs[-1], said))
        parts += [pins(panel.words, panel.pinned), panel.words.table(panel.runs)]
    else:
        parts.append(paragraph("Nothing of this panel can be shown without an engine."))
    return f'<div class="lk">{"".join(parts)}</div>'


def live_note(panel: Frame[Any]) -> str:
    """Where the controls would be: what they are, and how to get them."""
    names = [str(one.description) for one in _controls(panel.form.widgets) if one.description]
    sources = ", ".join(f"{one.kind} · {one.label}" for one in getattr(panel, "sources", ()))
    said = f"In the notebook this is a panel that you can run: {', '.join(dict.fromkeys(names)) or 'Run'}."
    return f'<p class="lk-quiet lk-still-note">▶ {ui.escape(said)} Sources on this page: {ui.escape(sources)}.</p>'


def gate_html(gate: GateBox, runs: Sequence[Any]) -> str:
    """The question with its answers; what came out is folded, so that a reader can guess first."""
    options = "".join(f"<li>{ui.escape(label)}</li>" for label, _ in gate.gate.options)
    parts = [f"<p><b>Predict first.</b> {ui.escape(gate.gate.question)}</p>", f"<ul>{options}</ul>" if options else ""]
    answer = gate.gate.right_answer(runs) if runs else None
    if answer is not None:
        why = gate.gate.explain(runs) if callable(gate.gate.explain) else gate.gate.explain
        result = f"<p>Result: <b>{ui.escape(gate.gate.name_of(answer))}</b>.</p><p>{ui.escape(why)}</p>"
        parts.append(ui.details("What came out", result))
    return f'<div class="lk-gate">{"".join(parts)}</div>'


def figure_html(figure: go.Figure, alt: str) -> str:
    """A chart that the page's own plotly.js draws."""
    still_figure = go.Figure(figure.to_dict())
    still_figure.update_layout(autosize=True, width=None)
    drawn = still_figure.to_html(
        full_html=False, include_plotlyjs=False, div_id=f"chart-{os.getpid()}-{next(_numbers)}",
        config={"responsive": True, "displaylogo": False},
    )  # fmt: skip
    return f'<div class="lk-figure" role="img" aria-label="{ui.escape(alt)}">{drawn}</div>'


def quiz_html(card: QuizCard) -> str:
    """A question with its options, and folded behind it what speaks for or against each."""
    quiz = card.quiz
    options = "".join(f"<p><b>{LETTERS[i]}.</b> {o.text}</p>" for i, o in enumerate(quiz.options))
    judged = "".join(
        paragraph(f"<b>{LETTERS[i]}. {'✓ right' if o.right else '✗ not this one'}.</b> {o.why}", html=True)
        for i, o in enumerate(quiz.options)
    )
    return ui.block(paragraph(quiz.question, html=True) + options + ui.details("Answers", judged))


def task_html(card: TaskCard) -> str:
    """A task, with each hint and the solution folded behind it."""
    task = card.exercise
    head = f'<div class="lk-head"><h3>{ui.escape(task.id)} {ui.escape(task.title)}</h3>'
    head += f'<span class="lk-quiet">about {task.minutes} minutes</span></div>'
    hints = "".join(ui.details(f"Hint {i + 1}", paragraph(text, html=True)) for i, text in enumerate(task.hints))
    answer = ui.details("Solution", code(source_of(task.solution)) + paragraph(task.explanation, html=True))
    return ui.block(head + paragraph(task.ask, html=True) + hints + answer)


def widget_html(widget: Any) -> str:
    """The text and charts in a widget; what could be pressed is left out."""
    if isinstance(widget, QuizCard):
        return quiz_html(widget)
    if isinstance(widget, TaskCard):
        return task_html(widget)
    if isinstance(widget, go.FigureWidget):
        return figure_html(widget, "A chart.")
    hidden = getattr(getattr(widget, "layout", None), "display", None) == "none"
    if hidden:
        return ""
    if isinstance(widget, (widgets.HTML, widgets.HTMLMath)):
        return str(widget.value)
    if isinstance(widget, widgets.Label):
        return f'<span class="lk">{ui.escape(widget.value)}</span>'
    return "".join(widget_html(child) for child in getattr(widget, "children", ()))


def _mark(thing: Any) -> None:
    from IPython.display import display

    _shown.append((thing, display({"text/plain": "…"}, raw=True, display_id=True)))


def _folded(card: CheckCard) -> str:
    """What a check says; it has judged the solution, which is on the page already."""
    inner = ui.details(f"{card.line} (the solution above)", Card._repr_html_(card))
    return f'<div class="labkit">{inner}</div>'


def _controls(children: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for child in children:
        below = getattr(child, "children", ())
        found += _controls(below) if below else [child] if child.has_trait("description") else []
    return found


def _drop_live_sources() -> None:
    """Panels of the page ask what was recorded or is computed; one that has nothing else keeps what it has."""
    build: Callable[..., None] = Panel.__init__

    def without_live(self: Panel, name: str, title: str, sources: Sequence[Any], *args: Any, **more: Any) -> None:
        kept = [source for source in sources if source.kind != "LIVE"] or list(sources)
        build(self, name, title, kept, *args, **more)

    Panel.__init__ = without_live  # type: ignore[method-assign]
    from labkit.lab import latency

    first = latency.LatencyPanel.__init__

    def recorded_only(self: Any, live: Any, recorded: Sequence[Any] = (), **more: Any) -> None:
        first(self, None if recorded else live, recorded, **more)

    latency.LatencyPanel.__init__ = recorded_only  # type: ignore[method-assign]
