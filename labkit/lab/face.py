"""The widgets around the runs of a panel, and where they stand. Refuses to decide anything: a panel moves them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import ipywidgets as widgets

from labkit.lab import keeping, ui
from labkit.lab.panel_html import LETTERS

#: From this many seconds on a stage says how long it still takes.
TELL_AFTER_S = 3.0
#: First words of stages that cannot be broken off.
UNSTOPPABLE = ("loading", "reconfiguring", "profiling", "compiling", "capturing")


class AnyForm(Protocol):
    """The controls of a panel. `source` picks what is asked, `widgets` are the others, `all` is what can be off."""

    source: Any

    @property
    def current(self) -> Any: ...
    @property
    def widgets(self) -> Sequence[widgets.Widget]: ...
    def all(self) -> list[Any]: ...
    def settings(self) -> Any: ...
    def refill(self, defaults: bool = False) -> None: ...
    def explain(self, settings: Any) -> Iterator[str]: ...
    def cost(self, settings: Any) -> str: ...


class Face:
    """Every widget of a panel but its controls and its chart.

    Args:
        absent: sentences on sources that are not there.
        gate, left_end, under_chart, at_end: widgets above, under the buttons, under the chart, below everything.
    """

    def __init__(
        self,
        title: str,
        absent: Sequence[str],
        run_hint: str,
        form: AnyForm,
        view: ui.FigureView,
        gate: widgets.Widget | None,
        left_end: Sequence[widgets.Widget],
        under_chart: Sequence[widgets.Widget],
        at_end: Sequence[widgets.Widget],
    ) -> None:
        self.run = ui.button("Run", run_hint, "primary")
        self.stop = ui.button(
            "Stop", "End the run after the step under way; loading, compiling and capturing end first"
        )
        self.pin = ui.button("Pin", f"Keep the newest run for comparison ({len(LETTERS)} at most)")
        self.reset = ui.button("Reset", "Forget all runs and put the controls back")
        self.unpin = ui.button("Unpin all", "Take the pins away; the runs stay", width="auto")
        self.resume = ui.button("Resume", "Bring back the runs from before the kernel started", width="auto")
        self.saves = [
            ui.button(end[1:].upper(), f"Save as a {end[1:].upper()} file in this notebook's folder", width="60px")
            for end in keeping.ENDINGS
        ]
        self.table_shown = widgets.ToggleButton(
            value=True, description="Data table", tooltip="Show or hide the table of all runs",
            layout=widgets.Layout(width="auto"),
        )  # fmt: skip
        self.progress = widgets.IntProgress(
            value=0, min=0, max=1, layout=widgets.Layout(width="auto", height="10px", visibility="hidden")
        )
        self.status, self.hint, self.cost, self.error = (ui.area() for _ in range(4))
        self.said, self.pins, self.table, self.files = (ui.area() for _ in range(4))
        self.stale, self.only_source = ui.area(), widgets.HTML()
        self.save_label = widgets.Label("Save")
        self.table_shown.observe(self._table_toggled, names="value")
        self._view, self._form = view, form

        head = f"<h3>{ui.escape(title)}</h3>" if title else ""
        head += "".join(f'<span class="lk-quiet lk-small">{ui.escape(line)}</span>' for line in absent)
        buttons = ui.row([self.run, self.stop, self.pin, self.reset], width="auto")
        left = ui.stack(
            [
                *form.widgets, self.hint, self.cost, buttons, self.progress, self.status, self.error, *left_end,
            ],
            flex="1 1 310px", max_width="100%", min_width="0", width="auto",
        )  # fmt: skip
        right = ui.stack(
            [self.stale, view.widget, *under_chart, self.said],
            flex="2.2 1 500px", max_width="100%", min_width="0", width="auto",
        )  # fmt: skip
        self.below = ui.row(
            [self.table_shown, self.unpin, self.resume, self.save_label, *self.saves],
            align_items="center", width="100%",
        )  # fmt: skip
        self.widget = ui.root(
            [
                ui.area(ui.block(f'<div class="lk-head">{head}</div>')),
                ui.row([widgets.Label("Source"), form.source, self.only_source], align_items="center"),
                *([gate] if gate is not None else []),
                ui.row([left, right], width="100%", align_items="flex-start", grid_gap="8px 18px"),
                self.pins,
                self.below,
                self.files,
                self.table,
                *at_end,
            ]
        )

    def name_source(self, current: Any) -> None:
        """A single source is no choice: it is named, and there is nothing to press."""
        alone = current is not None and len(self._form.source.options) == 1
        _show(self._form.source, not alone)
        self.only_source.value = ui.block(ui.badge(current.kind, current.label)) if alone else ""

    def say(self, text: str, kind: str = "") -> None:
        """The line of status; `text` is HTML."""
        self.status.value = ui.block(f'<span role="status">{ui.badge(kind) + " " if kind else ""}{text}</span>')

    def set_busy(self, busy: bool, may_run: bool) -> None:
        """Everything off but Stop, or back on."""
        for control in self._form.all():
            control.disabled = busy
        self.run.disabled = busy or not may_run
        self.reset.disabled = self.resume.disabled = busy
        self.stop.disabled = not busy
        self.progress.layout.visibility = "visible" if busy else "hidden"
        self.progress.value = 0

    def enable(self, *, busy: bool, runs: bool, pins: bool, stored: bool) -> None:
        """Buttons that would do nothing are off, or not there at all."""
        self.pin.disabled = busy or not runs
        _show(self.unpin, pins)
        _show(self.resume, stored)
        for widget in (self.table_shown, self.save_label, *self.saves):
            _show(widget, runs)

    def all_off(self) -> None:
        """Nothing can be asked."""
        for widget in (*self._form.all(), self.run, self.stop, self.pin, self.reset):
            widget.disabled = True

    def mark(self, stale: str) -> None:
        """The chart and the sentence are of other settings, said in `stale`; "" takes the mark away."""
        self.stale.value = ui.block(f"<span>▲ {ui.escape(stale)}</span>" if stale else "", "lk-stale-mark")
        for widget in (self._view.widget, self.said):
            (widget.add_class if stale else widget.remove_class)("lk-stale")

    def _table_toggled(self, change: Any) -> None:
        self.table.layout.display = None if change["new"] else "none"


class StageLine:
    """What is under way, in the line of status and as a bar. A new stage shows at once, its ticks when `due`."""

    def __init__(self, face: Face, due: Callable[[], bool], is_stopping: Callable[[], bool]) -> None:
        self._face, self._due, self._is_stopping = face, due, is_stopping
        self.name = ""
        self._began = 0.0

    def show(self, text: str, done: int, total: int, quiet: bool = False) -> None:
        """`quiet` moves the bar alone: something else says where the run is."""
        name = text.split(" ")[0].rstrip(":")
        if name != self.name:
            self._began = time.monotonic()
        elif done < total and not self._due():
            return
        self.name = name
        bar = self._face.progress
        bar.max, bar.value, bar.bar_style = max(total, 1), done, "info" if total else ""
        if self._is_stopping():
            self._face.say(f"{stopping(name)}. Now: {ui.escape(text)}.")
        elif not quiet:
            counted = f", {done} of {total}" if total > 1 and " of " not in text else ""
            self._face.say(f"Busy: {ui.escape(text)}{counted}{self._left(done, total)}")

    def _left(self, done: int, total: int) -> str:
        """How long the stage still takes, by how long it took so far."""
        gone = time.monotonic() - self._began
        return f", about {gone / done * (total - done):.0f} s left" if gone > TELL_AFTER_S and 0 < done < total else ""


def stopping(stage: str) -> str:
    """What Stop does now: a step is short, and getting ready cannot be broken off."""
    if stage in UNSTOPPABLE:
        return f"Stopping once the engine is ready: {stage} cannot be broken off, and what it makes is kept"
    return "Stopping after this step" if stage else "Stopping before it begins"


def _show(widget: widgets.Widget, there: bool) -> None:
    widget.layout.display = None if there else "none"
