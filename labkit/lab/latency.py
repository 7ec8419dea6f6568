"""The latency panel: turn a knob, press Run, and see what one decode step costs. Refuses to touch an engine itself.

Callbacks validate and enqueue; `live.py` measures on the worker thread, `recorded.py` looks up, `figures` draws.
Whatever a button does is a method, so that a cell or a test can press it: `panel.run(wait=True)`.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go

from labkit.engine.report import StepReport
from labkit.errors import LabkitError
from labkit.figures.latency import RunPoints, latency_figure, short_ms
from labkit.graphs.sizes import pad_to
from labkit.lab import sentences, ui
from labkit.lab.live import Events, LiveSource, Stopped
from labkit.lab.machine import engine_missing
from labkit.lab.recorded import RecordedSource, recorded_sources
from labkit.lab.settings import AUTO, Run, Settings, parse_sizes, show_sizes
from labkit.lab.worker import Job, Worker, shared_worker, strict
from labkit.measure.recordings import Row, shipped

PROMPT = "The capital of France is"
MAX_PINS = 2
#: Seconds between two redraws while steps come in.
REFRESH_S = 0.2
MAX_TOKENS = 8192

Source = LiveSource | RecordedSource


def latency_panel(*, redraw: bool | None = None) -> LatencyPanel:
    """The panel with everything this machine offers: LIVE where an engine runs, RECORDED where recordings are.

    Args:
        redraw: True draws the chart anew each time instead of updating a FigureWidget (for front ends that do not show
            one); None decides by what is installed.
    """
    missing = engine_missing()
    live = None if missing else LiveSource()
    return LatencyPanel(live, recorded_sources(shipped()), redraw=redraw, no_live=missing)


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
        self._moved: list[str] = []
        self._last_source: Source | None = None
        self._build(redraw)
        self._source_changed()

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
        return self.sources[self.source.value] if self.sources else None

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
            settings = self._settings()
            self.error.value = ""
            self._set_busy(True, "waiting for the device")
            self._job = self.worker.submit(
                functools.partial(self._work, source=source, settings=settings),
                "a run of the latency panel",
                self._failed,
            )
        if wait:
            self.wait(timeout)

    def stop(self) -> None:
        """End the run after the step that is under way; what was measured is kept."""
        if self._job is not None and self.busy:
            self._job.cancel()
            self._say("Stopping after this step.")

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
            self.sizes.value, self.prompt.value, self.log.value = "", PROMPT, False
            self._source_changed(defaults=True)
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
            self._stage = "Stopped before the first measured step; nothing was added."
        else:
            self._stage = f"Run {number} stopped after {run.row.n} steps." if run.stopped else f"Run {number} is done."
        finally:
            done, self._stage = self._stage, ""
            self._set_busy(False, done)
            self._redraw()

    def _on_stage(self, text: str, done: int, total: int) -> None:
        """Progress in words and as a bar; a new stage shows at once, its ticks only a few times a second."""
        name = text.split(" ")[0]
        if name == self._stage and done < total and not self._due():
            return
        self._stage = name
        self.progress.max, self.progress.value = max(total, 1), done
        self.progress.bar_style = "info" if total else ""
        self._say(f"Busy: {text}" + (f", {done} of {total}" if total else ""))

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
        )
        self._draw([coming])
        self._drawn_at = time.monotonic()
        self._say(f"Busy: measuring. {ui.escape(sentences.progress_text(reports))}", "LIVE")

    def _on_text(self, so_far: str, settings: Settings) -> None:
        if self._due():
            self._drawn_at = time.monotonic()
            self.text_area.value = _text_html(settings.prompt, so_far, "writing …")

    def _due(self) -> bool:
        pause = self._refresh_s * (5 if self.view.redraws else 1)
        return time.monotonic() - self._drawn_at >= pause

    def _failed(self, error: BaseException) -> None:
        self.error.value = ui.error_card(error, "a run of the latency panel")

    # --- controls --------------------------------------------------------------------------------------------------

    def _settings(self) -> Settings:
        return Settings(
            model=self.model.value, backend=self.backend.value, mode=self.mode.value,
            sizes=parse_sizes(self.sizes.value, self._size_limit()), batch=self.batch.value, context=self.context.value,
            prompt=self.prompt.value.strip(),
        )  # fmt: skip

    def _size_limit(self) -> int:
        source = self.current
        return source.limits.max_num_batched_tokens if isinstance(source, LiveSource) else MAX_TOKENS

    def _source_changed(self, defaults: bool = False) -> None:
        """Fill every control with what the source offers, and keep what can be kept."""
        source = self.current
        if source is None:
            for control in (*self._controls(), *self._buttons()):
                control.disabled = True
            self.status.value = ui.block(ui.escape(self._nothing_here()))
            self._redraw()
            return
        self.prompt.layout.display = None if isinstance(source, LiveSource) else "none"
        with self._quietly():
            _fill(self.model, [(m, m) for m in source.models()], defaults)
            self._fill_backends(source, defaults)
            self._fill_modes(source, defaults)
            self._fill_ranges(source, defaults)
        self._changed()

    def _fill_backends(self, source: Source, defaults: bool = False) -> None:
        names = source.backends(self.model.value)
        refused = source.refused(self.model.value) if isinstance(source, LiveSource) else {}
        _fill(self.backend, [(f"{n} (not here)" if n in refused else n, n) for n in names], defaults)

    def _fill_modes(self, source: Source, defaults: bool = False) -> None:
        _fill(self.mode, [(m, m) for m in source.modes(self.model.value, self.backend.value)], defaults)

    def _fill_ranges(self, source: Source, defaults: bool = False) -> None:
        where = self.model.value, self.backend.value, self.mode.value
        batches, contexts = source.batches(*where), source.contexts(*where)
        wanted = (self.batch.value, self.context.value)
        fresh = defaults or not self._seen_source(source)
        if fresh:
            wanted = (
                (source.limits.default_batch, source.limits.default_context)
                if isinstance(source, LiveSource)
                else (1, 512)
            )
        self._moved = []
        for control, allowed, value in ((self.batch, batches, wanted[0]), (self.context, contexts, wanted[1])):
            control.set_range(allowed.low, allowed.high, allowed.step)
            control.set_quietly(allowed.nearest(value))
            if control.value != value and not fresh:
                cannot = "not recorded" if allowed.points else "not possible"
                self._moved.append(f"{control.name} {value} is {cannot} here; moved to {control.value}.")
        self.sizes.placeholder = f"default: {show_sizes(source.default_sizes(*where), 4) or 'none'}"

    def _seen_source(self, source: Source) -> bool:
        """Whether this source was shown just before; another one starts from its own batch and context."""
        seen, self._last_source = self._last_source is source, source
        return seen

    def _model_changed(self) -> None:
        source = self.current
        if source is not None:
            with self._quietly():
                self._fill_backends(source)
                self._fill_modes(source)
                self._fill_ranges(source)
        self._changed(self._moved)

    def _number_changed(self, control: ui.Number, value: int) -> None:
        """Snap to what is recorded, and say so; a LIVE source takes every value."""
        if self._quiet:
            return
        source = self.current
        notes = [control.notice] if control.notice else []
        if isinstance(source, RecordedSource):
            asked = Settings(
                self.model.value, self.backend.value, self.mode.value, None, self.batch.value, self.context.value
            )
            snapped, moved = source.snap(asked)
            notes += moved
            with self._quietly():
                self.batch.set_quietly(snapped.batch)
                self.context.set_quietly(snapped.context)
        self._changed(notes)

    def _changed(self, notes: Sequence[str] = ()) -> None:
        """After any control: check the size list, and say what Run will do and whether the chart is older than that."""
        self._snapped = [n for n in notes if n]
        with self._guarded("capture sizes"):
            settings = self._settings()
            self.error.value = ""
            self._explain(settings)
        if not self.busy:
            self._say(self._idle_text())

    def _explain(self, settings: Settings) -> None:
        source = self.current
        if source is None:
            return
        lines = [f"<b>{ui.escape(n)}</b>" for n in self._snapped]
        mode, trail = source.resolved(settings)
        lines += [ui.escape(line) for line in trail]
        if mode != "NONE":
            sizes = list(settings.sizes or source.default_sizes(settings.model, settings.backend, settings.mode))
            size = pad_to(settings.batch, sizes)
            if size is None:
                lines.append(
                    f"Sizes {show_sizes(sizes)}: batch {settings.batch} is above the largest, so it runs eagerly."
                )
            else:
                pad = f", {size - settings.batch} padding" if size > settings.batch else ", no padding"
                lines.append(f"Sizes {show_sizes(sizes)}: batch {settings.batch} runs in the graph of {size}{pad}.")
        if isinstance(source, LiveSource):
            lines += self._explain_live(source, settings, mode)
        self.hint.value = ui.block("".join(f"<p>{line}</p>" for line in lines), "lk-small lk-quiet")
        self.cost.value = ui.block(f"<p>{ui.escape(source.cost(settings))}</p>", "lk-small")

    def _explain_live(self, source: LiveSource, settings: Settings, mode: str) -> Iterator[str]:
        reason = source.refused(settings.model).get(settings.backend)
        if reason:
            yield f"{settings.backend} cannot run here: {ui.escape(reason)}."
        if not source.device:
            if mode != "NONE":
                yield "On a CPU the graph is emulated: same discipline, nothing saved."
            if settings.backend == "TRITON_ATTN":
                yield "On a CPU TRITON_ATTN runs in Triton's interpreter, which takes seconds for a step."

    def _idle_text(self) -> str:
        if not self.runs:
            return "Ready."
        last = self.runs[-1]
        try:
            same = self._settings() == last.settings and self.current is not None and self.current.kind == last.kind
        except LabkitError:
            same = False
        return "Ready." if same else f"Settings changed since run {last.number}. Press Run."

    def _nothing_here(self) -> str:
        why = self._no_live or "No engine runs here."
        return f"{why} This labkit ships no recordings either, so there is nothing to show"

    def _controls(self) -> list[Any]:
        return [self.source, self.model, self.backend, self.mode, self.sizes, self.batch, self.context, self.prompt]

    def _buttons(self) -> list[widgets.Button]:
        return [self.run_button, self.stop_button, self.pin_button, self.reset_button]

    def _set_busy(self, busy: bool, text: str) -> None:
        for control in self._controls():
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
        self.table_area.value = _table_html(self.runs)
        self.pins.value = _pins_html(self.pinned)
        self.said.value = _summary_html(self.runs[-1]) if self.runs else _first_words(self.current)
        if self.current is not None:
            self.pin_button.disabled = not self.runs or self.run_button.disabled
            with contextlib.suppress(LabkitError):  # a list that does not parse has its card already
                self._explain(self._settings())

    def _draw(self, coming: Sequence[RunPoints] = ()) -> None:
        runs = [*(sentences.points_of(run) for run in self.runs), *coming]
        self.view.show(
            latency_figure(runs, [sentences.points_of(run) for run in self.pinned], log=bool(self.log.value))
        )

    def _show_text(self, run: Run) -> None:
        self.text_area.value = _text_html(run.settings.prompt if run.text else "", run.text, run.text_note)

    # --- building --------------------------------------------------------------------------------------------------

    def _build(self, redraw: bool | None) -> None:
        self.source = widgets.ToggleButtons(
            options=[(f"{s.kind} · {s.label}", i) for i, s in enumerate(self.sources)] or [("nothing to run", 0)],
            value=0, style={"button_width": "auto"},
        )  # fmt: skip
        self.model = ui.dropdown("Model", [("-", "-")])
        self.backend = ui.dropdown("Backend", [("-", "-")])
        self.mode = ui.dropdown("Graph mode", [("-", "-")])
        self.sizes = ui.text("Capture sizes")
        self.batch = ui.Number("Batch", 1, 256, 1)
        self.context = ui.Number("Context", 16, 4096, 64, 16)
        self.prompt = ui.text("Prompt", PROMPT, "text that the measured engine continues")
        self.run_button = ui.button("Run", "Measure one decode step with these settings, or look it up", "primary")
        self.stop_button = ui.button("Stop", "End the run after the step that is under way")
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
                self.model, self.backend, self.mode, self.sizes, self.batch.widget, self.context.widget,
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
        self._observe(self.source, self._source_changed)
        for dropdown in (self.model, self.backend, self.mode):
            self._observe(dropdown, self._model_changed)
        for field in (self.sizes, self.prompt):
            self._observe(field, self._changed)
        self._observe(self.log, self._draw)
        for number in (self.batch, self.context):
            number.on_change = functools.partial(self._number_changed, number)

    def _observe(self, control: widgets.Widget, react: Callable[[], None]) -> None:
        control.observe(lambda change: None if self._quiet else react(), names="value")

    @contextlib.contextmanager
    def _quietly(self) -> Iterator[None]:
        """While entered, a control that the panel itself sets does not call back."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    @contextlib.contextmanager
    def _guarded(self, doing: str) -> Iterator[None]:
        """An error of a callback becomes a card, or rises under LABKIT_STRICT=1. Nothing that is shown is lost."""
        try:
            yield
        except Exception as error:
            if strict():
                raise
            self.error.value = ui.error_card(error, doing)


def _fill(control: widgets.Dropdown, options: list[tuple[str, str]], default: bool) -> None:
    """New options; the old value stays where it is still among them."""
    old, values = control.value, [value for _, value in options]
    if list(control.options) != options:
        control.options = options
    control.value = old if old in values and not default else values[0]


def _first_words(source: Source | None) -> str:
    if source is None:
        return ""
    return ui.block(
        "Press Run with mode NONE, then with FULL, and compare. Every run stays in the chart.", "lk-sentence"
    )


def _summary_html(run: Run) -> str:
    notes = "".join(f'<p class="lk-small">{ui.escape(note)}</p>' for note in run.notes)
    stopped = '<p class="lk-small">Stopped early: the numbers are of the steps that ran.</p>' if run.stopped else ""
    return ui.block(
        f"{ui.badge(run.kind, sentences.machine(run))} {ui.escape(sentences.summary(run))}{notes}{stopped}"
        f'<p class="lk-small lk-quiet">{ui.escape(sentences.origin(run))}</p>',
        "lk-sentence",
    )


def _text_html(prompt: str, text: str, note: str) -> str:
    if not (text or note):
        return ""
    body = (
        f'<div class="lk-text"><span class="lk-prompt">{ui.escape(prompt)}</span>{ui.escape(text)}</div>'
        if text
        else ""
    )
    return ui.block(f'{body}<p class="lk-small lk-quiet">{ui.escape(note)}</p>')


def _pins_html(pinned: Sequence[Run]) -> str:
    if not pinned:
        return ""
    cards = "".join(f'<div class="lk-pin">{"".join(_pin_lines("AB"[i], run))}</div>' for i, run in enumerate(pinned))
    said = "Pin a second run to compare the two."
    if len(pinned) == 2:
        kinds = {run.kind for run in pinned}
        said = f"{ui.badge(*kinds) + ' ' if len(kinds) == 1 else ''}{ui.escape(sentences.comparison(*pinned))}"
    return ui.block(f'<div class="lk-pins">{cards}</div><p class="lk-sentence">{said}</p>')


def _pin_lines(letter: str, run: Run) -> Iterator[str]:
    row = run.row
    ran = (
        "mode NONE"
        if row.mode == "NONE"
        else f"mode {row.mode}, size {row.size}{' (emulated)' if run.emulated else ''}"
    )
    yield f"<div><b>{letter} · run {run.number}</b> {ui.badge(run.kind, sentences.machine(run))}</div>"
    yield f'<div class="lk-big">{short_ms(row.p50_ms)} ms</div>'
    yield f"<div>p10–p90 {short_ms(row.p10_ms)}–{short_ms(row.p90_ms)} ms, n={row.n}</div>"
    which = f"{row.model}, {row.backend}, {ran}, batch {run.settings.batch}, context {row.context}"
    yield f"<div>{ui.escape(which)}</div>"
    if row.launches is not None:
        graphs = ", none of them a graph" if not row.graph_launches else f", {row.graph_launches} of them a graph"
        yield f"<div>{row.launches} launches{graphs}</div>"


_COLUMNS = [
    ("run", "run#"), ("badge", "kind"), ("model", "model"), ("backend", "backend"), ("mode", "mode"), ("size", "size#"),
    ("batch", "batch#"), ("context", "context#"), ("p50_ms", "median ms#"), ("band", "p10–p90 ms#"), ("n", "n#"),
    ("launches", "launches#"), ("tok_s", "tokens/s#"),
]  # fmt: skip


def _table_html(runs: Sequence[Run]) -> str:
    return ui.table("Runs", _COLUMNS, [_cells(run) for run in runs])


def _cells(run: Run) -> dict[str, str]:
    values = sentences.table_row(run)
    cells = {key: ui.escape("–" if value is None else value) for key, value in values.items()}
    cells["badge"] = f'<span title="{ui.escape(sentences.origin(run))}">{ui.badge(run.kind)}</span>'
    if run.settings.mode != run.row.mode:
        cells["mode"] = f"{cells['mode']} <span class='lk-quiet'>(asked {ui.escape(run.settings.mode)})</span>"
    if run.emulated:
        cells["mode"] += " <span class='lk-quiet'>emulated</span>"
    cells["p50_ms"] = f'<span data-ms="{run.row.p50_ms!r}">{short_ms(run.row.p50_ms)}</span>'
    cells["band"] = f"{short_ms(run.row.p10_ms)}–{short_ms(run.row.p90_ms)}"
    cells["n"] = f"{run.row.n}{' (stopped)' if run.stopped else ''}"
    cells["tok_s"] = f"{values['tok_s']:.0f}"
    if run.row.graph_launches:
        cells["launches"] += f" ({run.row.graph_launches} graph)"
    return cells


__all__ = ["AUTO", "LatencyPanel", "latency_panel"]
