"""The latency panel: turn a knob, press Run, and see what one decode step costs. Refuses to touch an engine itself.

Callbacks validate and enqueue; `live.py` measures on the worker thread, `recorded.py` looks up, `figures` draws.
Whatever a button does is a method, so that a cell or a test can press it: `panel.run(wait=True)`.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go

from labkit.engine.report import StepReport
from labkit.errors import LabkitError
from labkit.figures.latency import RunPoints, latency_figure
from labkit.lab import run_html, sentences, ui
from labkit.lab.controls import Controls, Source
from labkit.lab.live import Events, LiveSource, Stopped
from labkit.lab.machine import engine_missing
from labkit.lab.recorded import RecordedSource, recorded_sources
from labkit.lab.settings import AUTO, Run, Settings
from labkit.lab.worker import Job, Worker, shared_worker, strict
from labkit.measure.recordings import Row, shipped

MAX_PINS = 2
#: Seconds between two redraws while steps come in.
REFRESH_S = 0.2


def latency_panel(*, redraw: bool | None = None) -> LatencyPanel:
    """The panel with everything this machine offers: LIVE where an engine runs, RECORDED where recordings are.

    Args:
        redraw: True draws the chart anew each time instead of updating a FigureWidget (for front ends that do not show
            one); None decides by what is installed.
    """
    missing, recordings = engine_missing(), shipped()
    live = None if missing else LiveSource(recordings=recordings)
    return LatencyPanel(live, recorded_sources(recordings), redraw=redraw, no_live=missing)


class LatencyPanel:
    """Controls, chart, table and text around runs of one decode step.

    Args:
        live: the engine behind the controls, None where none runs.
        recorded: recordings, one source per machine.
        worker: the thread that runs jobs; None takes the one all panels share.
        no_live: why there is no engine, as a sentence.
    """

    def __init__(
        self,
        live: LiveSource | None,
        recorded: Sequence[RecordedSource] = (),
        *,
        worker: Worker | None = None,
        redraw: bool | None = None,
        no_live: str = "",
        refresh_s: float = REFRESH_S,
    ) -> None:
        self.sources: list[Source] = [*([live] if live else []), *recorded]
        self.worker = worker or shared_worker()
        self.runs: list[Run] = []
        self.pinned: list[Run] = []
        self._no_live, self._refresh_s = no_live, refresh_s
        self._job: Job | None = None
        self._quiet = False
        self._stage = ""
        self._drawn_at = 0.0
        self._snapped: list[str] = []
        self._build(redraw)
        self.controls.refill()

    # --- what the panel holds --------------------------------------------------------------------------------------

    @property
    def figure(self) -> go.Figure:
        """The chart as it is drawn now."""
        return self.view.figure

    @property
    def rows(self) -> list[Row]:
        """The rows drawn, in order of their runs."""
        return [run.row for run in self.runs]

    @property
    def table(self) -> list[dict[str, Any]]:
        """The table under the chart as plain values."""
        return [sentences.table_row(run) for run in self.runs]

    @property
    def summary(self) -> str:
        """The sentence about the newest run; empty before the first."""
        return sentences.summary(self.runs[-1]) if self.runs else ""

    @property
    def busy(self) -> bool:
        return self._job is not None and not self._job.done

    @property
    def current(self) -> Source | None:
        """The source that Run will ask."""
        return self.controls.current

    def __repr__(self) -> str:
        return "LatencyPanel()"

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.widget)

    # --- what the buttons do ---------------------------------------------------------------------------------------

    def run(self, wait: bool = False, timeout: float | None = None) -> None:
        """Measure, or look up, what the controls say, and append it to the chart.

        Args:
            wait: return only when it is done (a button never waits).
            timeout: seconds to wait at most.
        """
        with self._guarded("Run"):
            if self.busy:
                raise LabkitError("Run", "the panel is still busy", "Press Stop, or wait for the run to end.")
            source = self.current
            if source is None:
                raise LabkitError(
                    "Run", self._nothing_here(), "Install torch for LIVE, or a labkit that ships recordings."
                )
            settings = self.controls.settings()
            self.error.value = ""
            self._set_busy(True, "waiting for the device")
            self._job = self.worker.submit(
                functools.partial(self._work, source=source, settings=settings),
                "a run of the latency panel",
                self._failed,
                self._dropped,
            )
        if wait:
            self.wait(timeout)

    def stop(self) -> None:
        """End the run after the step that is under way; what was measured is kept."""
        if self._job is not None and self.busy:
            self._job.cancel()
            self._say(f"{_stopping(self._stage)}.")

    def pin(self, number: int | None = None) -> None:
        """Keep a run for comparison beside another; a third pin replaces the older one.

        Args:
            number: of the run; None takes the newest.
        """
        with self._guarded("Pin"):
            chosen = [run for run in self.runs if run.number == number] if number is not None else self.runs[-1:]
            if not chosen:
                have = ", ".join(str(r.number) for r in self.runs) or "none yet"
                raise LabkitError(
                    "Pin" if number is None else f"pin({number})",
                    "there is no such run",
                    f"Runs: {have}. Press Run first.",
                )
            if chosen[0] not in self.pinned:
                self.pinned = [*self.pinned, chosen[0]][-MAX_PINS:]
            self._redraw()

    def reset(self) -> None:
        """Forget all runs and pins and put the controls back; the engine keeps its weights."""
        with self._guarded("Reset"):
            if self.busy:
                raise LabkitError("Reset", "the panel is still busy", "Press Stop, or wait for the run to end.")
            self.runs, self.pinned = [], []
            self.error.value = self.text_area.value = ""
            self._quiet, self.log.value = True, False
            self._quiet = False
            self.controls.refill(defaults=True)
            self._redraw()

    def wait(self, timeout: float | None = None) -> None:
        """Block until the run has ended; under LABKIT_STRICT=1 its error is raised here."""
        if self._job is not None:
            self._job.wait(timeout)

    # --- on the worker thread --------------------------------------------------------------------------------------

    def _work(self, job: Job, source: Source, settings: Settings) -> None:
        try:
            number = self.runs[-1].number + 1 if self.runs else 1
            if isinstance(source, RecordedSource):
                run = source.answer(settings, number)
            else:
                events = Events(
                    stage=self._on_stage,
                    step=functools.partial(self._on_step, settings=settings, number=number),
                    text=functools.partial(self._on_text, settings=settings),
                )
                run = source.run(settings, number, job.should_stop, events)
            self.runs.append(run)
            self._show_text(run)
        except Stopped:
            done = "Stopped before the first measured step; nothing was added. What was made ready is kept."
        except BaseException:
            done = "The run failed; nothing was added."
            raise
        else:
            done = f"Run {number} stopped after {run.row.n} steps." if run.stopped else _done(run)
        finally:
            self._ended(done)

    def _ended(self, said: str) -> None:
        """Show what there is before the buttons come back: whoever sees them sees the run."""
        self._stage = ""
        try:
            self._redraw()
        finally:
            self._set_busy(False, said)

    def _dropped(self) -> None:
        self._ended("Stopped before it began; nothing was added.")

    def _on_stage(self, text: str, done: int, total: int) -> None:
        """Progress in words and as a bar; a new stage shows at once, its ticks only a few times a second."""
        name = text.split(" ")[0].rstrip(":")
        if name == self._stage and done < total and not self._due():
            return
        self._stage = name
        self.progress.max, self.progress.value = max(total, 1), done
        self.progress.bar_style = "info" if total else ""
        if self._job is not None and self._job.should_stop():
            self._say(f"{_stopping(name)}. Now: {text}.")
        elif name != "measuring" or done < 2:  # then each step says itself where the run is
            self._say(f"Busy: {text}" + (f", {done} of {total}" if total > 1 and " of " not in text else ""))

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
        self._draw([coming])
        self._drawn_at = time.monotonic()
        if self._job is None or not self._job.should_stop():
            most = f" of {self.progress.max}"
            self._say(f"Busy: measuring, {len(reports)}{most}. {ui.escape(sentences.progress_text(reports))}", "LIVE")

    def _on_text(self, so_far: str, settings: Settings) -> None:
        if self._due():
            self._drawn_at = time.monotonic()
            self.text_area.value = run_html.text_html(settings.prompt, so_far, "writing …")

    def _due(self) -> bool:
        pause = self._refresh_s * (5 if self.view.redraws else 1)
        return time.monotonic() - self._drawn_at >= pause

    def _failed(self, error: BaseException) -> None:
        self.error.value = ui.error_card(error, "a run of the latency panel")

    # --- controls --------------------------------------------------------------------------------------------------

    def _source_changed(self) -> None:
        if self.current is None:
            for control in (*self.controls.all(), *self._buttons()):
                control.disabled = True
            self.status.value = ui.block(ui.escape(self._nothing_here()))
            self._redraw()
            return
        self._changed()

    def _changed(self, notes: Sequence[str] = ()) -> None:
        """After any control: check the size list, and say what Run will do and whether the chart is older than that."""
        self._snapped = [n for n in notes if n]
        understood = False
        with self._guarded("capture sizes"):
            settings = self.controls.settings()
            self.error.value = ""
            self._explain(settings)
            understood = True
        if not understood:  # what stood there was about other settings
            self.hint.value = self.cost.value = ""
        if not self.busy:
            self._say(self._idle_text() if understood else "Run waits until the capture sizes can be read.")

    def _explain(self, settings: Settings) -> None:
        if self.current is None:
            return
        lines = [*(f"<b>{ui.escape(n)}</b>" for n in self._snapped), *self.controls.explain(settings)]
        self.hint.value = ui.block("".join(f"<div>{line}</div>" for line in lines), "lk-small lk-quiet")
        self.cost.value = ui.block(f"<p>{ui.escape(self.current.cost(settings))}</p>", "lk-small")

    def _idle_text(self) -> str:
        if not self.runs:
            return "Ready."
        last = self.runs[-1]
        try:
            same = (
                self.controls.settings() == last.settings
                and self.current is not None
                and self.current.kind == last.kind
            )
        except LabkitError:
            same = False
        return "Ready." if same else f"Settings changed since run {last.number}. Press Run."

    def _nothing_here(self) -> str:
        why = self._no_live or "No engine runs here."
        return f"{why} This labkit ships no recordings either, so there is nothing to show"

    def _buttons(self) -> list[widgets.Button]:
        return [self.run_button, self.stop_button, self.pin_button, self.reset_button]

    def _set_busy(self, busy: bool, text: str) -> None:
        for control in self.controls.all():
            control.disabled = busy
        self.run_button.disabled = self.reset_button.disabled = busy
        self.stop_button.disabled = not busy
        self.pin_button.disabled = busy or not self.runs
        self.progress.layout.visibility = "visible" if busy else "hidden"
        self.progress.value = 0
        self._say(f"Busy: {text}." if busy else text)

    def _say(self, text: str, kind: str = "") -> None:
        self.status.value = ui.block(f'<span role="status">{ui.badge(kind) + " " if kind else ""}{text}</span>')

    # --- drawing ---------------------------------------------------------------------------------------------------

    def _redraw(self) -> None:
        self._draw()
        first = run_html.first_words() if self.current is not None else ""
        self.table_area.value = run_html.table_html(self.runs)
        self.pins.value = run_html.pins_html(self.pinned)
        self.said.value = run_html.summary_html(self.runs[-1]) if self.runs else first
        if self.current is not None:
            self.pin_button.disabled = not self.runs or self.run_button.disabled
            with contextlib.suppress(LabkitError):  # a list that does not parse has its card already
                self._explain(self.controls.settings())

    def _draw(self, coming: Sequence[RunPoints] = ()) -> None:
        runs = [*(sentences.points_of(run) for run in self.runs), *coming]
        self.view.show(
            latency_figure(runs, [sentences.points_of(run) for run in self.pinned], log=bool(self.log.value))
        )

    def _show_text(self, run: Run) -> None:
        self.text_area.value = run_html.text_html(run.settings.prompt if run.text else "", run.text, run.text_note)

    # --- building --------------------------------------------------------------------------------------------------

    def _build(self, redraw: bool | None) -> None:
        self.controls = Controls(self.sources, self._changed, self._source_changed)
        self.source, self.model, self.backend = self.controls.source, self.controls.model, self.controls.backend
        self.compile, self.mode, self.eager = self.controls.compile, self.controls.mode, self.controls.eager
        self.sizes, self.batch, self.context = self.controls.sizes, self.controls.batch, self.controls.context
        self.prompt = self.controls.prompt
        self.run_button = ui.button("Run", "Measure one decode step with these settings, or look it up", "primary")
        self.stop_button = ui.button(
            "Stop", "End the run after the step under way; loading, compiling and capturing end first"
        )
        self.pin_button = ui.button("Pin", "Keep the newest run for comparison (two at most)")
        self.reset_button = ui.button("Reset", "Forget all runs and put the controls back")
        self.log = widgets.Checkbox(
            value=False, description="logarithmic scale", indent=False, layout=widgets.Layout(width="160px")
        )
        self.progress = widgets.IntProgress(
            value=0, min=0, max=1, layout=widgets.Layout(width="auto", height="10px", visibility="hidden")
        )
        self.status, self.hint, self.cost, self.error = (ui.area() for _ in range(4))
        self.said, self.pins, self.table_area, self.text_area = (ui.area() for _ in range(4))
        self.view = ui.FigureView(latency_figure([]), redraw=redraw)
        self.stop_button.disabled = self.pin_button.disabled = True

        head = "<h3>Latency of one decode step</h3>"
        if self._no_live and self.sources:
            head += f'<span class="lk-quiet lk-small">No LIVE source: {ui.escape(self._no_live)}</span>'
        if not any(s.kind == "RECORDED" for s in self.sources):
            head += '<span class="lk-quiet lk-small">No RECORDED source: this labkit ships no recordings.</span>'
        left = ui.stack(
            [
                self.model, self.backend, self.compile, self.mode, self.eager, self.sizes, self.batch.widget,
                self.context.widget,
                self.hint, self.cost, ui.row(self._buttons(), width="auto"), self.progress, self.status, self.error,
                self.prompt, self.text_area,
            ],
            flex="1 1 310px", max_width="100%", min_width="0", width="auto",
        )  # fmt: skip
        right = ui.stack(
            [self.view.widget, self.log, self.said],
            flex="2.2 1 500px",
            max_width="100%",
            min_width="0",
            width="auto",
        )
        self.widget = ui.root(
            [
                ui.area(ui.block(f'<div class="lk-head">{head}</div>')),
                ui.row([widgets.Label("Source"), self.source], align_items="center"),
                ui.row([left, right], width="100%", align_items="flex-start", grid_gap="8px 18px"),
                self.pins,
                self.table_area,
            ]
        )
        self._wire()

    def _wire(self) -> None:
        self.run_button.on_click(lambda _: self.run())
        self.stop_button.on_click(lambda _: self.stop())
        self.pin_button.on_click(lambda _: self.pin())
        self.reset_button.on_click(lambda _: self.reset())
        self.log.observe(lambda change: None if self._quiet else self._draw(), names="value")

    @contextlib.contextmanager
    def _guarded(self, doing: str) -> Iterator[None]:
        """An error of a callback becomes a card, or rises under LABKIT_STRICT=1. Nothing that is shown is lost."""
        try:
            yield
        except Exception as error:
            if strict():
                raise
            self.error.value = ui.error_card(error, doing)


def _stopping(stage: str) -> str:
    """What Stop does now: a step is short, and getting ready cannot be broken off."""
    if stage in ("loading", "reconfiguring", "profiling", "compiling", "capturing"):
        return f"Stopping once the engine is ready: {stage} cannot be broken off, and what it makes is kept"
    return "Stopping after this step" if stage else "Stopping before it begins"


def _done(run: Run) -> str:
    kept = [line for line in run.ready if line.startswith("Kept:")]
    return " ".join([f"Run {run.number} is done.", *map(ui.escape, kept)])


__all__ = ["AUTO", "LatencyPanel", "latency_panel"]
