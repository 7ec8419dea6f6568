"""The latency panel: turn a knob, press Run, and see what one decode step costs. Refuses to touch an engine itself.

Callbacks validate and enqueue; `live.py` measures on the worker thread, `recorded.py` looks up, `figures` draws, and
`frame.py` does what every panel does. Whatever a button does is a method: `panel.run(wait=True)`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go

from labkit.engine.report import CaptureRecord, StepReport
from labkit.errors import LabkitError
from labkit.figures.latency import RunPoints, latency_figure
from labkit.lab import run_html, sentences, ui
from labkit.lab.controls import Controls, Source
from labkit.lab.frame import REFRESH_S, Frame
from labkit.lab.gate import Gate
from labkit.lab.live import Events, LiveSource
from labkit.lab.loading import Loader
from labkit.lab.machine import engine_missing
from labkit.lab.recorded import RecordedSource, own_sources, recorded_sources
from labkit.lab.settings import AUTO, Run, Settings
from labkit.lab.worker import Job, Worker
from labkit.measure.library import Entry, library
from labkit.measure.provenance import Provenance
from labkit.measure.recordings import Row


def latency_panel(*, redraw: bool | None = None, gate: Gate | None = None) -> LatencyPanel:
    """The panel with everything this machine offers: LIVE where an engine runs, RECORDED where recordings are.

    Args:
        redraw: True draws the chart anew each time instead of updating a FigureWidget (for front ends that do not show
            one); None decides by what is installed.
        gate: a question before the first run.
    """
    missing, found = engine_missing(), library()
    steps = found.of("steps")
    live = None if missing else LiveSource(recordings=found.recordings)
    shipped = recorded_sources([one.recording for one in steps if one.is_shipped])
    recorded = [*shipped, *own_sources(one for one in steps if not one.is_shipped)]
    return LatencyPanel(live, recorded, redraw=redraw, no_live=missing, gate=gate, problems=found.problems)


class LatencyPanel(Frame[Run]):
    """Controls, chart, table and text around runs of one decode step.

    Args:
        live: the engine behind the controls, None where none runs.
        recorded: recordings, one source per machine and per file of the user's own.
        worker: the thread that runs jobs; None takes the one all panels share.
        no_live: why there is no engine, as a sentence. problems: sentences on recordings that were passed over.
    """

    unread = "the capture sizes"
    run_hint = "Measure one decode step with these settings, or look it up"
    first_words = "Press Run with mode NONE, then with FULL, and compare. Every run stays in the chart."

    def __init__(
        self,
        live: LiveSource | None,
        recorded: Sequence[RecordedSource] = (),
        *,
        worker: Worker | None = None,
        redraw: bool | None = None,
        no_live: str = "",
        problems: Sequence[str] = (),
        refresh_s: float = REFRESH_S,
        gate: Gate | None = None,
        autosave: bool | None = None,
    ) -> None:
        self.sources: list[Source] = [*([live] if live else []), *recorded]
        self._no_live = no_live
        self.controls = Controls(self.sources, self._changed, self._source_changed)
        self.source, self.model, self.backend = self.controls.source, self.controls.model, self.controls.backend
        self.compile, self.mode, self.eager = self.controls.compile, self.controls.mode, self.controls.eager
        self.sizes, self.batch, self.context = self.controls.sizes, self.controls.batch, self.controls.context
        self.prompt = self.controls.prompt
        self.log = widgets.Checkbox(
            value=False, description="logarithmic scale", indent=False, layout=widgets.Layout(width="160px")
        )
        self.text_area = ui.area()
        self.loader = Loader(self._loaded, self._guarded)
        absent = [f"No LIVE source: {no_live}"] if no_live and self.sources else []
        if not any(s.kind == "RECORDED" for s in self.sources):
            absent.append("No RECORDED source: this labkit ships no recordings.")
        super().__init__(
            "latency", "Latency of one decode step", self.controls, StepWords(), absent=[*absent, *problems],
            worker=worker, redraw=redraw, refresh_s=refresh_s, gate=gate, autosave=autosave,
        )  # fmt: skip
        self.log.observe(lambda change: self._show_coming([]), names="value")
        self.controls.refill()

    def __repr__(self) -> str:
        return "LatencyPanel()"

    @property
    def rows(self) -> list[Row]:
        """The rows drawn, in order of their runs."""
        return [run.row for run in self.runs]

    def load_recording(self, path: str | os.PathLike[str]) -> None:
        """Check a recording, keep it with the user's own, and offer it beside the others.

        Raises:
            RecordingError: the file cannot be read or believed (a card, where a button asked for it).
        """
        self._not_busy("Load recording")
        self.loader.load(Path(path).expanduser())

    # --- on the worker thread --------------------------------------------------------------------------------------

    def _work_on(self, source: Source, settings: Settings, number: int, job: Job) -> Run:
        if isinstance(source, RecordedSource):
            run = source.answer(settings, number)
        else:
            events = Events(
                stage=self._on_stage,
                step=functools.partial(self._on_step, settings=settings, number=number),
                text=functools.partial(self._on_text, settings=settings),
            )
            run = source.run(settings, number, job.should_stop, events)
        self._show_text(run)
        return run

    def _done(self, run: Run) -> str:
        kept = [line for line in run.ready if line.startswith("Kept:")]
        said = f"Run {run.number} stopped after {run.row.n} steps." if run.stopped else f"Run {run.number} is done."
        return said if run.stopped else " ".join([said, *map(ui.escape, kept)])

    def _on_stage(self, text: str, done: int, total: int) -> None:
        # While it measures, each step says itself where the run is.
        quiet = text.startswith("measuring") and done >= 2 and not self._stopping_now()
        self._line.show(text, done, total, quiet=quiet)

    def _on_step(self, reports: list[StepReport], settings: Settings, number: int) -> None:
        if not self._due():
            return
        last = reports[-1]
        coming = RunPoints(
            number,
            last.backend,
            last.mode,
            last.size,
            settings.batch,
            "LIVE",
            tuple(r.wall_ms for r in reports),
            finished=False,
            compiled=settings.compile != "NONE",
        )
        self._show_coming([coming])
        if not self._stopping_now():
            most = f" of {self.face.progress.max}"
            self._say(f"Busy: measuring, {len(reports)}{most}. {ui.escape(sentences.progress_text(reports))}", "LIVE")

    def _on_text(self, so_far: str, settings: Settings) -> None:
        if self._due():
            self._drawn_at = time.monotonic()
            self.text_area.value = run_html.text_html(settings.prompt, so_far, "writing …")

    def _show_text(self, run: Run) -> None:
        self.text_area.value = run_html.text_html(run.settings.prompt if run.text else "", run.text, run.text_note)

    # --- hooks of the frame ----------------------------------------------------------------------------------------

    def _chart(self, coming: Sequence[RunPoints] = ()) -> go.Figure:
        runs = [*(sentences.points_of(run) for run in self.runs), *coming]
        return latency_figure(runs, [sentences.points_of(run) for run in self.pinned], log=bool(self.log.value))

    def _settings_of(self, run: Run) -> Settings:
        return run.settings

    def _made_by(self, run: Run, source: Source) -> bool:
        if source.kind != run.kind:
            return False
        return not isinstance(source, RecordedSource) or source.machine == run.provenance.device

    def _store(self, run: Run) -> dict[str, Any]:
        """Everything but the reports, which the row sums up."""
        kept = {f.name: getattr(run, f.name) for f in dataclasses.fields(run)
                if f.name not in ("number", "reports", "earlier")}  # fmt: skip
        return {**kept, "provenance": run.provenance.as_dict()}

    def _restore(self, data: Mapping[str, Any], number: int) -> Run:
        asked = dict(data["settings"])
        row = Row(**{**data["row"], "samples_ms": tuple(data["row"]["samples_ms"])})
        changes = {
            "settings": Settings(**{**asked, "sizes": None if asked["sizes"] is None else tuple(asked["sizes"])}),
            "row": row, "provenance": Provenance.from_dict(data["provenance"]),
            "graphs": tuple(CaptureRecord(**one) for one in data["graphs"]),
            "eager_launches": tuple(data["eager_launches"]) if data["eager_launches"] else None,
            "notes": tuple(data["notes"]), "ready": tuple(data["ready"]),
        }  # fmt: skip
        return Run(**{**data, **changes, "number": number, "earlier": True})

    def _left_end(self) -> list[widgets.Widget]:
        return [self.prompt, self.text_area]

    def _under_chart(self) -> list[widgets.Widget]:
        return [self.log]

    def _at_end(self) -> list[widgets.Widget]:
        return [self.loader.widget]

    def _drop_rest(self) -> None:
        self.text_area.value = ""
        self.log.value = False

    def _nothing_here(self) -> str:
        why = self._no_live or "No engine runs here."
        return f"{why} This labkit ships no recordings either, so there is nothing to show"

    def _loaded(self, entry: Entry) -> str:
        """Offer a recording that was added; a sentence on what it is."""
        found = own_sources([entry]) if entry.table == "steps" else []
        if not found:
            raise LabkitError(
                entry.name, f"holds no decode step that this panel could show (table: {entry.table})",
                "It was kept: the panel of its own chapter lists it.",
            )  # fmt: skip
        known = [source.label for source in self.sources]
        if found[0].label in known:
            self.source.value = known.index(found[0].label)
            return f"{entry.name} is here already."
        self.sources.append(found[0])
        self.controls.add(found[0])
        return f"{entry.label} is offered as a source of its own."


class StepWords:
    """What is said of a decode step."""

    def sentence(self, run: Run) -> str:
        return sentences.summary(run)

    def said(self, run: Run, before: str) -> str:
        return run_html.summary_html(run, before)

    def changed(self, new: Run, old: Run) -> str:
        return sentences.changed(new, old)

    def row(self, run: Run) -> dict[str, Any]:
        return sentences.table_row(run)

    def drawn(self, run: Run) -> dict[str, Any]:
        low, mid, high = run.row.p10_ms, run.row.p50_ms, run.row.p90_ms
        return {"samples": run.row.samples_ms, "median": [mid, mid], "band": [low, low, high, high, low]}

    def table(self, runs: Sequence[Run]) -> str:
        return run_html.table_html(runs)

    def card(self, letter: str, run: Run) -> str:
        return run_html.pin_card(letter, run)

    def compare(self, first: Run, other: Run, letters: str) -> str:
        return sentences.comparison(first, other, letters)


__all__ = ["AUTO", "LatencyPanel", "latency_panel"]
