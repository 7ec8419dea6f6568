"""The widgets of a panel's controls, made from what the picked source asks for. Refuses to run anything.

The source is asked again after every change, since what it offers may depend on it; a value stays where it still can,
also that of a control that went away and came back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ipywidgets as widgets

from labkit.errors import ConfigError, LabkitError, did_you_mean
from labkit.lab import ui
from labkit.lab.fields import Choice, Control, Number, Text, Toggle
from labkit.lab.panel_html import short
from labkit.lab.runs import Source

#: How often a source may change its mind about one change.
ROUNDS = 5


class Form:
    """Controls for one position of all settings.

    Args:
        sources: what can be asked, in the order in which they are offered.
        changed: called as `changed(notes)` after a control has moved; the notes say what moved with it.
        source_changed: called when another source was picked, after the controls were filled from it.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        changed: Callable[[Sequence[str]], None],
        source_changed: Callable[[], None],
    ) -> None:
        self.sources, self._changed, self._source_changed = list(sources), changed, source_changed
        self._quiet = False
        self._fields: dict[str, Field] = {}
        self._kept: dict[str, Any] = {}
        self.box = widgets.VBox([], layout=widgets.Layout(width="auto"))
        self.source = source_buttons(self.sources)
        self.source.observe(lambda change: None if self._quiet else self.refill(), names="value")

    @property
    def current(self) -> Source | None:
        """The source that is picked."""
        return self.sources[self.source.value] if self.sources else None

    @property
    def widgets(self) -> list[widgets.Widget]:
        return [self.box]

    def all(self) -> list[Any]:
        """Every control, to switch off and on."""
        return [self.source, *self._fields.values()]

    def settings(self) -> dict[str, Any]:
        """What the controls say, by name.

        Raises:
            LabkitError: a text does not parse.
        """
        return {name: field.value() for name, field in self._fields.items()}

    def field(self, name: str) -> Field:
        """The widget behind a control: `.widget`, `.control`.

        Raises:
            ConfigError: the picked source has no such control.
        """
        if name not in self._fields:
            raise ConfigError(f"control {name!r}", "there is none of that name here", did_you_mean(name, self._fields))
        return self._fields[name]

    def label(self, name: str) -> str:
        """What a reader sees for a name."""
        return self._fields[name].control.label if name in self._fields else name

    def wording(self, name: str, value: Any) -> str:
        """What a reader sees for a value: the label of an option, a number with its unit."""
        control = self._fields[name].control if name in self._fields else None
        if isinstance(control, Choice):
            return next((label for label, known in control.options if known == value), str(value))
        if isinstance(control, Toggle):
            return "on" if value else "off"
        if isinstance(control, Text) and control.write is not None:
            return control.write(value)
        unit = f" {control.unit}" if isinstance(control, Number) and control.unit else ""
        return f"{short(value)}{unit}"

    def set(self, values: Mapping[str, Any]) -> None:
        """Move controls one after the other, as hands would. "source" takes a kind, a label or a position.

        Raises:
            ConfigError: no such control, or a value that it cannot hold.
        """
        for name, value in values.items():
            if name == "source" and name not in self._fields:
                self.source.value = self._find_source(value)
                continue
            field = self.field(name)
            taken, note = field.control.take(value)
            with self._quietly():
                field.show(taken)
            self._after(note)

    def _find_source(self, wanted: Any) -> int:
        for i, one in enumerate(self.sources):
            if wanted in (i, one.kind, one.label, f"{one.kind} · {one.label}"):
                return i
        names = [f"{one.kind} · {one.label}" for one in self.sources]
        raise ConfigError(f"source={wanted!r}", "there is none of that name", f"There are: {', '.join(names)}.")

    # --- filling ---------------------------------------------------------------------------------------------------

    def refill(self, defaults: bool = False) -> None:
        """Show every control that the source asks for, and keep what can be kept."""
        if defaults:
            self._kept, self._fields = {}, {}
        notes = self._fill()
        self._source_changed()
        if notes:
            self._changed(notes)

    def add(self, source: Source) -> None:
        """Offer one more source, and pick it."""
        self.sources.append(source)
        with self._quietly():
            relabel(self.source, self.sources)
            self.source.value = len(self.sources) - 1
        self.refill()

    def _fill(self) -> list[str]:
        """Ask the source until it asks for the same twice; sentences on what moved."""
        notes: list[str] = []
        source = self.current
        if source is None:
            return notes
        for _ in range(ROUNDS):
            wanted = list(source.controls(self._now()))
            if [one.name for one in wanted] == list(self._fields) and all(
                self._fields[one.name].control == one for one in wanted
            ):
                for one in wanted:  # they compare equal, but may parse differently
                    self._fields[one.name].control = one
                break
            with self._quietly():
                notes += self._show(wanted)
        return list(dict.fromkeys(notes))

    def _show(self, wanted: Sequence[Control]) -> list[str]:
        notes = []
        for name, field in self._fields.items():
            self._kept[name] = field.raw
        fields: dict[str, Field] = {}
        for control in wanted:
            known = self._fields.get(control.name)
            field = known if known is not None and known.fits(control) else Field(control, self._moved)
            fields[control.name] = field
            value = self._kept.get(control.name, control.value)
            try:
                taken, note = control.take(value)
            except LabkitError:
                taken, _ = control.take(control.value)
                note = f"{control.label} {value} is not possible here; moved to {taken}."
            field.become(control, taken)
            if note and control.name in self._kept:
                notes.append(note)
        shown = [field.widget for field in fields.values()]
        if shown != list(self.box.children):
            self.box.children = shown
        self._fields = fields
        return notes

    def _now(self) -> dict[str, Any]:
        """The values as far as they can be read; a text that does not parse counts as what stood there first."""
        out = {}
        for name, field in self._fields.items():
            try:
                out[name] = field.value()
            except LabkitError:
                if isinstance(field.control, Text):
                    with contextlib.suppress(LabkitError):
                        out[name] = field.control.read(field.control.value)
        return out

    def _moved(self, field: Field) -> None:
        """A hand moved a control."""
        if self._quiet:
            return
        note = ""
        if isinstance(field.control, Number):
            taken, note = field.control.take(field.raw)
            note = note or field.notice
            with self._quietly():
                field.show(taken)
        self._after(note)

    def _after(self, note: str) -> None:
        notes = self._fill()
        self._changed([n for n in (note, *notes) if n])

    # --- what it means ---------------------------------------------------------------------------------------------

    def explain(self, settings: Mapping[str, Any]) -> Iterator[str]:
        """Lines of HTML on what these settings will do here, and what each control means."""
        source = self.current
        if source is None:
            return
        yield from (ui.escape(line) for line in source.explain(settings))
        helps = [(f.control.label, f.control.help) for f in self._fields.values() if f.control.help]
        if helps:
            lines = "".join(f"<p><b>{ui.escape(label)}</b>: {ui.escape(text)}</p>" for label, text in helps)
            yield ui.details("What the controls mean", lines)

    def cost(self, settings: Mapping[str, Any]) -> str:
        """What Run will take, as a sentence."""
        return self.current.cost(settings) if self.current is not None else ""

    @contextlib.contextmanager
    def _quietly(self) -> Iterator[None]:
        """While entered, a control that the form itself sets does not call back."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before


def source_buttons(sources: Sequence[Any]) -> widgets.ToggleButtons:
    """One button a source, named "kind · label"."""
    made = widgets.ToggleButtons(options=[("nothing to run", 0)], value=0, style={"button_width": "auto"})
    relabel(made, sources)
    return made


def relabel(buttons: widgets.ToggleButtons, sources: Sequence[Any]) -> None:
    """Name the sources anew; the picked one stays picked."""
    if sources:
        value = buttons.value
        buttons.options = [(f"{s.kind} · {s.label}", i) for i, s in enumerate(sources)]
        buttons.value = value


class Field:
    """One control and its widget. raw: what the widget holds, before a text is parsed."""

    def __init__(self, control: Control, moved: Callable[[Field], None]) -> None:
        self.control = control
        self.number: ui.Number | None = None
        self._box: Any = None
        if isinstance(control, Number):
            self.number = ui.Number(
                control.label, control.low, control.high, control.value, control.step, whole=control.whole,
                unit=control.unit, points=control.points,
            )  # fmt: skip
            self.number.on_change = lambda value: moved(self)
            self.widget: widgets.Widget = self.number.widget
            ui.hint(self.number.slider, control.help or control.label)
            return
        if isinstance(control, Choice):
            self._box = ui.dropdown(control.label, list(control.options), control.value)
        elif isinstance(control, Toggle):
            self._box = widgets.Checkbox(
                value=control.value, description=control.label, indent=False,
                layout=widgets.Layout(width="auto", margin="0 0 0 124px"),
            )  # fmt: skip
        else:
            self._box = ui.text(control.label, control.value, control.placeholder)
        ui.hint(self._box, control.help or control.label)
        self._box.observe(lambda change: moved(self), names="value")
        self.widget = self._box

    @property
    def raw(self) -> Any:
        return self.number.value if self.number is not None else self._box.value

    @property
    def notice(self) -> str:
        return self.number.notice if self.number is not None else ""

    def value(self) -> Any:
        return self.control.read(self.raw) if isinstance(self.control, Text) else self.raw

    def show(self, raw: Any) -> None:
        if self.number is not None:
            self.number.set_quietly(raw)
        elif self._box.value != raw:
            self._box.value = raw

    def fits(self, control: Control) -> bool:
        """Whether this widget can become that control."""
        mine = self.control
        if type(mine) is not type(control) or mine.label != control.label:
            return False
        if isinstance(mine, Number) and isinstance(control, Number):
            return (mine.whole, mine.unit) == (control.whole, control.unit)
        return True

    def become(self, control: Control, raw: Any) -> None:
        """Show another version of the control, holding `raw`."""
        before, self.control = self.control, control
        if isinstance(control, Number) and self.number is not None:
            self.number.points = control.points
            self.number.set_range(control.low, control.high, control.step)
        elif isinstance(control, Choice) and list(control.options) != list(getattr(before, "options", ())):
            self._box.options = list(control.options)
        elif isinstance(control, Text):
            self._box.placeholder = control.placeholder
        self.show(raw)

    @property
    def disabled(self) -> bool:
        return bool(self.number.disabled if self.number is not None else self._box.disabled)

    @disabled.setter
    def disabled(self, off: bool) -> None:
        target = self.number if self.number is not None else self._box
        target.disabled = off
