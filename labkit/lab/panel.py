"""The panel of a chapter: sources to ask, a figure to draw, columns of a table. Refuses to know any chapter.

A chapter writes sources (`Source`), one function from runs to a figure, and the headings of a table; everything else,
from Run to Resume, is here and in `frame.py`. CONTRIBUTING.md, "Adding a chapter", has an example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from labkit.errors import ConfigError, LabkitError
from labkit.figures.points import drawn, first_difference, runs_drawn
from labkit.figures.theme import mark_line, themed
from labkit.lab import keeping
from labkit.lab.fields import Choice, Control, Number, Text, Toggle
from labkit.lab.form import Form
from labkit.lab.frame import Frame
from labkit.lab.gate import Gate
from labkit.lab.runs import Context, Outcome, Run, Source, Stopped, simulated
from labkit.lab.words import PanelWords
from labkit.lab.worker import Job, Worker
from labkit.measure.provenance import Kind, Provenance
from labkit.measure.stats import Measurement

__all__ = [
    "Choice", "Context", "Control", "Gate", "Measurement", "Number", "Outcome", "Panel", "Provenance", "Run", "Source",
    "Stopped", "Text", "Toggle", "drawn", "figure_equals_data", "simulated",
]  # fmt: skip

Draw = Callable[[Sequence[Run], Sequence[Run]], go.Figure]


class Panel(Frame[Run]):
    """Controls, chart, table and text around runs of what a chapter is about.

    Args:
        name: of the panel and of its files: letters, digits, "-", "_", "." ("01-two-waits").
        title: its heading.
        sources: what can be asked, the best one first. At least one.
        figure: `figure(runs, pinned) -> go.Figure`, from nothing at first; the last of `runs` may be one that is not
            `finished`. Traces that show numbers of a run have `meta=drawn(run.number, y="key")`.
        columns: (key of `Outcome.values`, heading). Numbers are set to the right by themselves.
        changed: `changed(new, old) -> str`, why a run differs from the one before, or "". What was set otherwise, and
            the ratio of the two where there is one, is said by the panel.
        gate: a question before the first run.
        absent: sentences on sources that are not there ("No LIVE source: torch is not installed.").
        first_words: what stands where the sentence about a run will be.
    """

    def __init__(
        self,
        name: str,
        title: str,
        sources: Sequence[Source],
        figure: Draw,
        columns: Sequence[tuple[str, str]],
        *,
        changed: Callable[[Run, Run], str] | None = None,
        gate: Gate | None = None,
        absent: Sequence[str] = (),
        first_words: str = "",
        worker: Worker | None = None,
        redraw: bool | None = None,
        refresh_s: float | None = None,
        autosave: bool | None = None,
    ) -> None:
        if not sources:
            raise ConfigError(f"panel {name!r}", "has no source", "Give one; SIMULATED runs everywhere.")
        self._figure = figure
        self.first_words = first_words or Frame.first_words
        form = Form(sources, self._changed, self._source_changed)
        more = {} if refresh_s is None else {"refresh_s": refresh_s}
        super().__init__(
            name,
            title,
            form,
            PanelWords(columns, changed, form.label, form.wording),
            absent=absent,
            worker=worker,
            redraw=redraw,
            gate=gate,
            autosave=autosave,
            **more,
        )
        self._form = form
        form.refill()

    @property
    def sources(self) -> list[Source]:
        return self._form.sources

    @property
    def settings(self) -> dict[str, Any]:
        """What the controls say now."""
        return self._form.settings()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Every number of every run, by key: `table`, and what is in `values` without being a column."""
        return self.table

    def set(self, **values: Any) -> None:
        """Move controls by name, as hands would: `panel.set(source="SIMULATED", batch=8, mode="FULL")`.

        Raises:
            ConfigError: no control of that name, or a choice that is not there. A number out of range moves, and the
                panel says so.
        """
        self._not_busy("set")
        self._form.set(values)

    def add_source(self, source: Source) -> None:
        """Offer one more source, and pick it."""
        self._not_busy("add_source")
        self._form.add(source)

    # --- hooks of the frame ----------------------------------------------------------------------------------------

    def _work_on(self, source: Source, settings: Mapping[str, Any], number: int, job: Job) -> Run:
        def partial(data: Any) -> None:
            if self._due():
                coming = Outcome(data, {}, "", None)
                self._show_coming([Run(number, source.kind, source.label, settings, coming, finished=False)])

        outcome = source.run(settings, Context(job.should_stop, self._line.show, partial))
        made = outcome.provenance
        if made is None or str(made.kind) != source.kind:
            said = "no origin" if made is None else f"an origin that says {made.kind}"
            raise LabkitError(
                f"a run of {source.label}", f"the source is {source.kind} and gave {said}", "Fix Outcome.provenance."
            )
        return Run(number, source.kind, source.label, settings, outcome)

    def _chart(self, coming: Sequence[Run] = ()) -> go.Figure:
        figure = self._figure([*self.runs, *coming], list(self.pinned))
        gate = self.gate
        if gate is not None and gate.gate.axis and gate.state == "predicted":
            mark_line(figure, gate.gate.axis, gate.prediction, "your prediction")
        return themed(figure, "" if self.runs or coming else "No run yet. Press Run.")

    def _settings_of(self, run: Run) -> Any:
        return run.settings

    def _made_by(self, run: Run, source: Source) -> bool:
        return (source.kind, source.label) == (run.kind, run.source)

    def _store(self, run: Run) -> dict[str, Any]:
        out = run.outcome
        measured = out.measurement
        return {
            "source": run.source, "settings": keeping.plain(run.settings), "data": keeping.plain(out.data),
            "values": keeping.plain(out.values), "summary": out.summary, "notes": list(out.notes),
            "quantity": out.quantity, "stopped": out.stopped, "provenance": run.provenance.as_dict(),
            "measurement": None if measured is None else {"samples": list(measured.samples), "label": measured.label},
        }  # fmt: skip

    def _restore(self, data: Mapping[str, Any], number: int) -> Run:
        made = Provenance.from_dict(data["provenance"])
        measured = data["measurement"]
        samples = None if measured is None else Measurement(made.kind, tuple(measured["samples"]), measured["label"])
        by = next((s for s in self.sources if (s.kind, s.label) == (str(made.kind), data["source"])), None)
        read: Callable[[Any], Any] = getattr(by, "restore", lambda data: data)
        outcome = Outcome(
            read(data["data"]), dict(data["values"]), str(data["summary"]), made, samples, tuple(data["notes"]),
            str(data["quantity"]), bool(data["stopped"]),
        )  # fmt: skip
        return Run(number, str(Kind(made.kind)), str(data["source"]), dict(data["settings"]), outcome, earlier=True)


def figure_equals_data(panel: Any) -> bool:
    """Whether the chart shows exactly what the panel's runs hold, and the newest of them; True, so that a cell can end
    with it.

    What a trace shows is named by `meta=drawn(run, y="key")`; the keys are those of `rows` and, where `data` is a
    mapping, of `data`.

    Raises:
        AssertionError: with the first number that differs, or when the newest run is not drawn.
    """
    known = {run.number: {**panel.words.drawn(run), **panel.words.row(run)} for run in panel.runs}
    traces = panel.figure.data
    wrong = first_difference(traces, known)
    if wrong:
        raise AssertionError(f"the chart of {panel!r} does not show its data: {wrong}")
    if panel.runs and panel.runs[-1].number not in runs_drawn(traces):
        raise AssertionError(f"the chart of {panel!r} shows nothing of run {panel.runs[-1].number}")
    return True
