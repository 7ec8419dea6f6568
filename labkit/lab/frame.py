"""What every panel does around its runs: run, stop, pin, reset, save, bring back, and say what is going on.

Refuses to know what a run is made of: a panel says how one is measured, drawn and put into words. Callbacks only
validate and enqueue; the work happens on the worker thread. Whatever a button does is a method.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import ipywidgets as widgets
import plotly.graph_objects as go

from labkit.errors import LabkitError
from labkit.lab import keeping, ui
from labkit.lab.face import AnyForm, Face, StageLine, stopping
from labkit.lab.gate import Gate, GateBox
from labkit.lab.panel_html import LETTERS
from labkit.lab.runs import AnyRun, Stopped
from labkit.lab.words import Words, pins
from labkit.lab.worker import Job, Worker, shared_worker, strict

#: Seconds between two redraws while something comes in.
REFRESH_S = 0.2

R = TypeVar("R", bound=AnyRun)


class Frame(Generic[R]):
    """Buttons, chart, sentences and table around runs. A panel is one subclass, with what is listed under "hooks".

    Args:
        name: of the files that it writes. title: its heading. words: how its runs are put into words.
        absent: sentences on sources that are not there.
        worker: the thread that runs jobs; None takes the one all panels share.
        redraw: True draws the chart anew each time instead of updating a FigureWidget; None decides by what is there.
        gate: a question that is asked before the first run.
        autosave: whether runs outlive the kernel; None means yes, except under LABKIT_STRICT=1 (tests).
    """

    #: What the controls hold that may not parse, for "Run waits until …".
    unread = "the controls"
    run_hint = "Measure with these settings, or look it up"
    first_words = "Press Run. Every run stays in the chart."

    def __init__(
        self,
        name: str,
        title: str,
        form: AnyForm,
        words: Words,
        *,
        absent: Sequence[str] = (),
        worker: Worker | None = None,
        redraw: bool | None = None,
        refresh_s: float = REFRESH_S,
        gate: Gate | None = None,
        autosave: bool | None = None,
    ) -> None:
        self.name, self.title, self.form, self.words = name, title, form, words
        self.worker = worker or shared_worker()
        self.runs: list[R] = []
        self.pinned: list[R] = []
        self.kept = keeping.Kept(name, on=not strict() if autosave is None else autosave)
        self._absent, self._refresh_s = tuple(absent), refresh_s
        self._job: Job | None = None
        self._is_busy = False  # as it is shown: the job ends a moment later
        self._drawn_at = 0.0
        self._moved: list[str] = []
        self.gate = GateBox(gate, self._gate_changed) if gate is not None else None
        self._build(redraw)

    # --- hooks: what a panel has to say ----------------------------------------------------------------------------

    def _work_on(self, source: Any, settings: Any, number: int, job: Job) -> R:
        """Measure, on the worker thread. Stopped may be raised."""
        raise NotImplementedError

    def _chart(self, coming: Sequence[Any] = ()) -> go.Figure:
        """Everything that is drawn, `coming` being what is not finished."""
        raise NotImplementedError

    def _settings_of(self, run: R) -> Any:
        """What the controls said when it ran."""
        raise NotImplementedError

    def _made_by(self, run: R, source: Any) -> bool:
        """Whether this source would be asked again."""
        return bool(source.kind == run.kind)

    def _store(self, run: R) -> Mapping[str, Any]:
        """A run as plain values, for JSON."""
        raise NotImplementedError

    def _restore(self, data: Mapping[str, Any], number: int) -> R:
        """A stored run, marked as earlier. Any error means that it is of another version, and is left out."""
        raise NotImplementedError

    def _at_end(self) -> list[widgets.Widget]:
        """Widgets below everything."""
        return []

    def _left_end(self) -> list[widgets.Widget]:
        """Widgets under the buttons."""
        return []

    def _under_chart(self) -> list[widgets.Widget]:
        return []

    def _drop_rest(self) -> None:
        """Reset whatever the panel has beside runs."""

    # --- what the panel holds --------------------------------------------------------------------------------------

    @property
    def figure(self) -> go.Figure:
        """The chart as it is drawn now."""
        return self.view.figure

    @property
    def table(self) -> list[dict[str, Any]]:
        """The table under the chart as plain values."""
        return [self.words.row(run) for run in self.runs]

    @property
    def summary(self) -> str:
        """The sentence about the newest run; empty before the first."""
        return self.words.sentence(self.runs[-1]) if self.runs else ""

    @property
    def changed(self) -> str:
        """Why the newest run differs from the one before it; empty where there is nothing to say."""
        return self.words.changed(self.runs[-1], self.runs[-2]) if len(self.runs) > 1 else ""

    @property
    def busy(self) -> bool:
        return self._job is not None and not self._job.done

    @property
    def stale(self) -> bool:
        """Whether the controls say something else than the newest run did."""
        if not self.runs:
            return False
        try:
            same = keeping.plain(self.form.settings()) == keeping.plain(self._settings_of(self.runs[-1]))
        except LabkitError:
            return True
        return not (same and self.current is not None and self._made_by(self.runs[-1], self.current))

    @property
    def current(self) -> Any:
        """The source that Run will ask."""
        return self.form.current

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

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
            self._not_busy("Run")
            source = self.current
            if source is None:
                try_ = "Install torch for LIVE, or a labkit that ships recordings."
                raise LabkitError("Run", self._nothing_here(), try_)
            settings = self.form.settings()
            self.error.value = self.face.files.value = ""
            self._set_busy(True, "waiting for the device")
            self._job = self.worker.submit(
                functools.partial(self._work, source=source, settings=settings),
                f"a run of the {self.name} panel",
                self._failed,
                self._dropped,
            )
        if wait:
            self.wait(timeout)

    def stop(self) -> None:
        """End the run after the step that is under way; what was measured is kept."""
        if self._job is not None and self.busy:
            self._job.cancel()
            self._say(f"{stopping(self._line.name)}.")

    def pin(self, number: int | None = None) -> None:
        """Keep a run for comparison beside others; one more than four replaces the oldest.

        Args:
            number: of the run; None takes the newest.
        """
        with self._guarded("Pin"):
            chosen = [run for run in self.runs if run.number == number] if number is not None else self.runs[-1:]
            if not chosen:
                have = ", ".join(str(r.number) for r in self.runs) or "none yet"
                asked = "Pin" if number is None else f"pin({number})"
                raise LabkitError(asked, "there is no such run", f"Runs: {have}. Press Run first.")
            if chosen[0] not in self.pinned:
                self.pinned = [*self.pinned, chosen[0]][-len(LETTERS) :]
            self._redraw()

    def unpin(self) -> None:
        """Take all pins away; the runs stay."""
        with self._guarded("Unpin"):
            self.pinned = []
            self._redraw()

    def reset(self) -> None:
        """Forget all runs and pins and put the controls back; Resume brings the runs back."""
        with self._guarded("Reset"):
            self._not_busy("Reset")
            self.kept.remember(self._storable())
            self.runs, self.pinned = [], []
            self.error.value = self.face.files.value = ""
            self._drop_rest()
            self.form.refill(defaults=True)
            self._redraw()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the runs (.csv, .json), or the page with the chart (.html) or the chart alone (.png), by the ending.

        Raises:
            LabkitError: another ending, a folder that cannot be written to, or no kaleido for a picture.
        """
        return keeping.write(path, self._file(keeping.ending(path)))

    def resume(self) -> None:
        """Bring back the runs of an earlier kernel, or from before Reset, as they were measured."""
        with self._guarded("Resume"):
            self._not_busy("Resume")
            before = self.runs
            found, left = self.kept.bring_back(self._restore, self._next_number())
            try:
                self.runs = [*before, *found]
                self._chart()
            except Exception:
                self.runs = before
                raise LabkitError("Resume", "the stored runs are of another version", "Press Run.") from None
            if self.gate is not None:
                self.gate.recall()
            self._redraw()
            also = f" {left} of another version could not be read." if left else ""
            count = f"{len(found)} earlier run{'s' if len(found) > 1 else ''}"
            self._set_busy(False, f"{count} brought back, as they were then.{also}")

    def predict(self, value: Any = None) -> None:
        """Commit a prediction (a value or a label of the question); None takes what the widget holds."""
        with self._guarded("Commit"):
            if self.gate is None:
                raise LabkitError("predict", "this panel asks no question", "Press Run.")
            self.gate.commit(value)

    def skip(self) -> None:
        """Go on without a prediction."""
        if self.gate is not None:
            self.gate.skip()

    def wait(self, timeout: float | None = None) -> None:
        """Block until the run has ended; under LABKIT_STRICT=1 its error is raised here."""
        if self._job is not None:
            self._job.wait(timeout)

    # --- on the worker thread --------------------------------------------------------------------------------------

    def _work(self, job: Job, source: Any, settings: Any) -> None:
        try:
            run = self._work_on(source, settings, self._next_number(), job)
            self.runs.append(run)
        except Stopped:
            done = "Stopped before the first measured step; nothing was added. What was made ready is kept."
        except BaseException:
            done = "The run failed; nothing was added."
            raise
        else:
            done = self._done(run)
            self.kept.store(self._storable())
        finally:
            self._ended(done)

    def _next_number(self) -> int:
        return self.runs[-1].number + 1 if self.runs else 1

    def _done(self, run: R) -> str:
        return f"Run {run.number} was stopped early." if run.stopped else f"Run {run.number} is done."

    def _ended(self, said: str) -> None:
        """Show what there is before the buttons come back: whoever sees them sees the run."""
        self._line.name = ""
        try:
            self._redraw()
        finally:
            self._set_busy(False, said)

    def _dropped(self) -> None:
        self._ended("Stopped before it began; nothing was added.")

    def _stopping_now(self) -> bool:
        return self._job is not None and self._job.should_stop()

    def _due(self) -> bool:
        pause = self._refresh_s * (5 if self.view.redraws else 1)
        return time.monotonic() - self._drawn_at >= pause

    def _show_coming(self, coming: Sequence[Any]) -> None:
        """Draw what there is so far."""
        self.view.show(self._chart(coming))
        self._drawn_at = time.monotonic()

    def _failed(self, error: BaseException) -> None:
        self.error.value = ui.error_card(error, f"a run of the {self.name} panel")

    # --- controls --------------------------------------------------------------------------------------------------

    def _source_changed(self) -> None:
        self.face.name_source(self.current)
        if self.current is None:
            self.face.all_off()
            self.status.value = ui.block(ui.escape(self._nothing_here()))
            self._redraw()
            return
        self._changed()

    def _changed(self, notes: Sequence[str] = ()) -> None:
        """After any control: check what is typed, and say what Run will do and whether the chart is older than that."""
        self._moved = [n for n in notes if n]
        understood = False
        with self._guarded(self.unread):
            settings = self.form.settings()
            self.error.value = ""
            self._explain(settings)
            understood = True
        if not understood:  # what stood there was about other settings
            self.hint.value = self.cost.value = ""
        self._mark_stale()
        if not self.busy:
            self._say(self._idle_text() if understood else f"Run waits until {self.unread} can be read.")

    def _explain(self, settings: Any) -> None:
        if self.current is None:
            return
        lines = [*(f"<b>{ui.escape(n)}</b>" for n in self._moved), *self.form.explain(settings)]
        self.hint.value = ui.block("".join(f"<div>{line}</div>" for line in lines), "lk-small lk-quiet")
        cost = self.form.cost(settings)
        self.cost.value = ui.block(f"<p>{ui.escape(cost)}</p>" if cost else "", "lk-small")

    def _idle_text(self) -> str:
        if self.gate is not None and not self.gate.open:
            return "Answer the question above, or skip it. Then press Run."
        if not self.stale:
            return "Ready."
        return f"Settings changed since run {self.runs[-1].number}. Press Run."

    def _mark_stale(self) -> None:
        """Chart and sentence of other settings say so, in words and by how they look."""
        number = self.runs[-1].number if self.runs else 0
        stale = self.stale and not self._is_busy
        self.face.mark(f"Settings changed: this is still run {number}. Press Run." if stale else "")

    def _gate_changed(self) -> None:
        self.view.show(self._chart(), self.summary)
        self._set_busy(self.busy, self._idle_text())

    def _nothing_here(self) -> str:
        return f"{' '.join(self._absent) or 'Nothing runs here.'} So there is nothing to show"

    def _not_busy(self, doing: str) -> None:
        if self.busy:
            raise LabkitError(doing, "the panel is still busy", "Press Stop, or wait for the run to end.")

    @property
    def _may_run(self) -> bool:
        return self.current is not None and (self.gate is None or self.gate.open)

    def _set_busy(self, busy: bool, text: str) -> None:
        self._is_busy = busy
        self.face.set_busy(busy, self._may_run)
        self._enable()
        self._mark_stale()
        self._say(f"Busy: {text}." if busy else text)

    def _enable(self) -> None:
        stored = bool(self.kept.before) and self.current is not None
        self.face.enable(busy=self._is_busy, runs=bool(self.runs), pins=bool(self.pinned), stored=stored)

    def _say(self, text: str, kind: str = "") -> None:
        self.face.say(text, kind)

    # --- drawing ---------------------------------------------------------------------------------------------------

    def _redraw(self) -> None:
        if self.gate is not None:
            self.gate.show(self.runs)
        self.view.show(self._chart(), self.summary)
        self.table_area.value = self.words.table(self.runs)
        self.pins.value = pins(self.words, self.pinned)
        first = ui.block(ui.escape(self.first_words), "lk-sentence") if self.current is not None else ""
        self.said.value = self.words.said(self.runs[-1], self._since(self.changed)) if self.runs else first
        self._mark_stale()
        if self.current is not None:
            self._enable()
            with contextlib.suppress(LabkitError):  # what does not parse has its card already
                self._explain(self.form.settings())

    def _since(self, changed: str) -> str:
        return f"Compared with run {self.runs[-2].number}: {changed}" if changed and len(self.runs) > 1 else ""

    # --- files -----------------------------------------------------------------------------------------------------

    def _file(self, end: str) -> bytes:
        if not self.runs:
            raise LabkitError(f"save {end}", "there is no run yet", "Press Run first.")
        if end == ".csv":
            return keeping.csv_of(self.table, [run.provenance for run in self.runs])
        if end == ".json":
            return keeping.json_of(self.name, [self._store(run) for run in self.runs])
        if end == ".html":
            body = "".join(f"<section>{self.words.said(run, '')}</section>" for run in self.runs[-1:])
            return keeping.html_of(
                self.title, self.figure, f"{body}{pins(self.words, self.pinned)}{self.words.table(self.runs)}"
            )
        return keeping.png_of(self.figure)

    def _save_pressed(self, end: str) -> None:
        """Write next to the notebook, say where, and offer what is small enough as a download."""
        with self._guarded(f"save {end}"):
            data = self._file(end)
            path = keeping.write(keeping.free_name(self.name, end), data)
            self.error.value = ""
            said = f"Saved as <b>{ui.escape(path.name)}</b> in this notebook's folder. {keeping.link(path.name, data)}"
            self.face.files.value = ui.block(f"<p>{said}</p>", "lk-small")

    def _storable(self) -> list[Mapping[str, Any]]:
        """The runs as plain values; what holds anything else does not outlive the kernel, and is shown all the same."""
        out: list[Mapping[str, Any]] = []
        for run in self.runs:
            with contextlib.suppress(LabkitError):
                out.append(keeping.plain(self._store(run)))
        return out

    # --- building --------------------------------------------------------------------------------------------------

    def _build(self, redraw: bool | None) -> None:
        under = self._under_chart()
        self.view = ui.FigureView(self._chart(), redraw=redraw)
        question = self.gate.widget if self.gate is not None else None
        self.face = face = Face(
            self.title, self._absent, self.run_hint, self.form, self.view, question, self._left_end(), under,
            self._at_end(),
        )  # fmt: skip
        self.widget = face.widget
        self._line = StageLine(face, self._due, self._stopping_now)
        self.run_button, self.stop_button, self.pin_button, self.reset_button = (
            face.run,
            face.stop,
            face.pin,
            face.reset,
        )
        self.status, self.hint, self.cost, self.error = face.status, face.hint, face.cost, face.error
        self.said, self.pins, self.table_area, self.stale_mark = face.said, face.pins, face.table, face.stale
        face.set_busy(False, self._may_run)
        self._enable()
        for button, act in (
            (face.run, self.run), (face.stop, self.stop), (face.pin, self.pin), (face.unpin, self.unpin),
            (face.reset, self.reset), (face.resume, self.resume),
        ):  # fmt: skip
            button.on_click(functools.partial(lambda act, _: act(), act))
        for button, end in zip(face.saves, keeping.ENDINGS, strict=True):
            button.on_click(functools.partial(lambda end, _: self._save_pressed(end), end))
        if self.gate is not None:
            self.gate.commit_button.on_click(lambda _: self.predict())
            self.gate.skip_button.on_click(lambda _: self.skip())

    @contextlib.contextmanager
    def _guarded(self, doing: str) -> Iterator[None]:
        """An error of a callback becomes a card, or rises under LABKIT_STRICT=1. Nothing that is shown is lost."""
        try:
            yield
        except Exception as error:
            if strict():
                raise
            self.error.value = ui.error_card(error, doing)
