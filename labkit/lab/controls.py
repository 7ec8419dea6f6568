"""The controls of the latency panel: what may be chosen, what moves with what, what a choice means. Refuses to run.

Model, backend, compile and mode are offered by the source; each narrows the next. Whatever a control cannot hold is
moved to the nearest value that it can, and said.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ipywidgets as widgets

from labkit.graphs.sizes import pad_to
from labkit.lab import ui
from labkit.lab.form import relabel, source_buttons
from labkit.lab.live import LiveSource
from labkit.lab.recorded import RecordedSource
from labkit.lab.settings import AUTO, Settings, parse_sizes, read_choice, show_sizes

PROMPT = "The capital of France is"
MAX_TOKENS = 8192
COMPILE_LABELS = {
    "NONE": "NONE: the model's own kernels",
    "VLLM_COMPILE": "VLLM_COMPILE: torch.compile, in pieces",
    "STOCK_TORCH_COMPILE": "STOCK_TORCH_COMPILE: torch.compile, whole",
}

Source = LiveSource | RecordedSource


class Controls:
    """Widgets for one position of all settings.

    Args:
        sources: what can be asked, LIVE first.
        changed: called as `changed(notes)` after a control has moved; the notes say what moved with it.
        source_changed: called when another source was picked, after the controls were filled from it.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        changed: Callable[[Sequence[str]], None],
        source_changed: Callable[[], None],
    ) -> None:
        self._sources, self._changed, self._source_changed = list(sources), changed, source_changed
        self._quiet = False
        self._moved: list[str] = []
        self._last_source: Source | None = None
        self._before_eager = ("", "")
        self.source = source_buttons(self._sources)
        self.model = ui.dropdown("Model", [("-", "-")])
        self.backend = ui.dropdown("Backend", [("-", "-")])
        self.compile = ui.dropdown("Compile", [("-", "-")])
        self.mode = ui.dropdown("Graph mode", [("-", "-")])
        self.eager = widgets.Checkbox(
            value=False, description="enforce_eager", indent=False,
            layout=widgets.Layout(width="auto", margin="0 0 0 124px"),
        )  # fmt: skip
        self.sizes = ui.text("Capture sizes")
        self.batch = ui.Number("Batch", 1, 256, 1)
        self.context = ui.Number("Context", 16, 4096, 64, 16)
        self.prompt = ui.text("Prompt", PROMPT, "text that the measured engine continues")
        self._observe(self.source, self.refill)
        for dropdown in (self.model, self.backend, self.compile, self.mode):
            self._observe(dropdown, self._choice_changed)
        self._observe(self.eager, self._eager_changed)
        for field in (self.sizes, self.prompt):
            self._observe(field, lambda: self._changed(()))
        self.batch.on_change = lambda value: self._number_changed(self.batch)
        self.context.on_change = lambda value: self._number_changed(self.context)

    @property
    def current(self) -> Source | None:
        """The source that is picked."""
        return self._sources[self.source.value] if self._sources else None

    @property
    def widgets(self) -> list[Any]:
        """What stands above the buttons; the prompt has its place beside the text."""
        return [
            self.model, self.backend, self.compile, self.mode, self.eager, self.sizes, self.batch.widget,
            self.context.widget,
        ]  # fmt: skip

    def add(self, source: Source) -> None:
        """Offer one more source, and pick it."""
        self._sources.append(source)
        with self.quietly():
            relabel(self.source, self._sources)
            self.source.value = len(self._sources) - 1
        self.refill()

    def cost(self, settings: Settings) -> str:
        """What Run will take, as a sentence."""
        return self.current.cost(settings) if self.current is not None else ""

    def all(self) -> list[Any]:
        """Every control, to switch off and on."""
        return [
            self.source, self.model, self.backend, self.compile, self.mode, self.eager, self.sizes, self.batch,
            self.context, self.prompt,
        ]  # fmt: skip

    def settings(self) -> Settings:
        """What the controls say.

        Raises:
            ConfigError: the size list does not parse.
        """
        sizes = parse_sizes(self.sizes.value, self._size_limit())
        return self._where(sizes=sizes, prompt=self.prompt.value.strip())

    def _where(self, **more: Any) -> Settings:
        backend, version = read_choice(self.backend.value)
        given = {"sizes": None, **more}
        return Settings(
            model=self.model.value, backend=backend, mode=self.mode.value, batch=self.batch.value,
            context=self.context.value, compile=self.compile.value, version=version, **given,
        )  # fmt: skip

    def _size_limit(self) -> int:
        source = self.current
        return source.limits.max_num_batched_tokens if isinstance(source, LiveSource) else MAX_TOKENS

    # --- filling ---------------------------------------------------------------------------------------------------

    def refill(self, defaults: bool = False) -> None:
        """Fill every control with what the source offers, and keep what can be kept."""
        source = self.current
        if source is not None:
            self.prompt.layout.display = None if isinstance(source, LiveSource) else "none"
            with self.quietly():
                if defaults:
                    self.sizes.value, self.prompt.value = "", PROMPT
                _fill(self.model, [(m, m) for m in source.models()], defaults)
                self._fill_choices(source, defaults)
                self._fill_ranges(source, defaults)
        self._source_changed()

    def _fill_choices(self, source: Source, defaults: bool = False) -> None:
        _fill(self.backend, source.backends(self.model.value), defaults)
        name, _ = read_choice(self.backend.value)
        compiles = source.compiles(self.model.value, name)
        _fill(self.compile, [(COMPILE_LABELS.get(c, c), c) for c in compiles], defaults)
        modes = source.modes(self.model.value, name, self.compile.value)
        _fill(self.mode, [(m, m) for m in modes], defaults)
        self._show_eager()

    def _show_eager(self) -> None:
        """The box mirrors the two lists, and is there where it can do something."""
        values = [[value for _, value in one.options] for one in (self.compile, self.mode)]
        possible = all("NONE" in known for known in values) and any(len(known) > 1 for known in values)
        self.eager.layout.display = None if possible else "none"
        self.eager.value = self.compile.value == "NONE" and self.mode.value == "NONE"

    def _fill_ranges(self, source: Source, defaults: bool = False) -> None:
        where = self._where()
        wanted = (self.batch.value, self.context.value)
        fresh = defaults or not self._seen_source(source)
        if fresh:
            wanted = (
                (source.limits.default_batch, source.limits.default_context)
                if isinstance(source, LiveSource)
                else (1, 512)
            )
        self._moved = []
        ranges = ((self.batch, source.batches(where)), (self.context, source.contexts(where)))
        for (control, allowed), value in zip(ranges, wanted, strict=True):
            control.points = allowed.points
            control.set_range(allowed.low, allowed.high, allowed.step)
            control.set_quietly(allowed.nearest(value))
            if control.value != value and not fresh:
                cannot = "not recorded" if allowed.points else "not possible"
                self._moved.append(f"{control.name} {value} is {cannot} here; moved to {control.value}.")
        self.sizes.placeholder = f"default: {show_sizes(source.default_sizes(where), 4) or 'none'}"

    def _seen_source(self, source: Source) -> bool:
        """Whether this source was shown just before; another one starts from its own batch and context."""
        seen, self._last_source = self._last_source is source, source
        return seen

    # --- what moves with what --------------------------------------------------------------------------------------

    def _choice_changed(self) -> None:
        source = self.current
        if source is not None:
            with self.quietly():
                before = self.compile.value, self.mode.value
                self._fill_choices(source)
                self._fill_ranges(source)
            if isinstance(source, RecordedSource):
                changed = zip((self.compile, self.mode), before, strict=True)
                self._moved += [
                    f"{one.description} {old} is not recorded here; moved to {one.value}."
                    for one, old in changed if one.value != old
                ]  # fmt: skip
        self._changed(self._moved)

    def _eager_changed(self) -> None:
        """On: both off. Off: back to what was on before, else to the first of the modes that has a graph."""
        with self.quietly():
            if self.eager.value:
                self._before_eager = self.compile.value, self.mode.value
                self.compile.value = self.mode.value = "NONE"
            else:
                for control, old in zip((self.compile, self.mode), self._before_eager, strict=True):
                    if old in [value for _, value in control.options]:
                        control.value = old
                if self._where().is_eager:
                    control = self.mode if len(self.mode.options) > 1 else self.compile
                    control.value = next(value for _, value in control.options if value != "NONE")
        self._choice_changed()

    def _number_changed(self, control: ui.Number) -> None:
        """Snap to what is recorded, and say so; a LIVE source takes every value."""
        if self._quiet:
            return
        source = self.current
        notes = [control.notice] if control.notice else []
        if isinstance(source, RecordedSource):
            snapped, moved = source.snap(self._where())
            notes += moved
            with self.quietly():
                self.batch.set_quietly(snapped.batch)
                self.context.set_quietly(snapped.context)
        self._changed(notes)

    # --- what it means ---------------------------------------------------------------------------------------------

    def explain(self, settings: Settings) -> Iterator[str]:
        """Lines of HTML on what these settings will do here."""
        source = self.current
        if source is None:
            return
        if isinstance(source, LiveSource):
            yield from _explain_backend(source, settings)
        mode, trail = source.resolved(settings)
        yield from map(ui.escape, trail)
        if mode != "NONE":
            sizes = list(settings.sizes or source.default_sizes(settings))
            size = pad_to(settings.batch, sizes)
            if size is None:
                yield f"Sizes {show_sizes(sizes)}: batch {settings.batch} is above the largest, so it runs eagerly."
            else:
                pad = f", {size - settings.batch} padding" if size > settings.batch else ", no padding"
                yield f"Sizes {show_sizes(sizes)}: batch {settings.batch} runs in the graph of {size}{pad}."
        if settings.is_eager:
            yield "Mode NONE and nothing compiled is what <code>enforce_eager=True</code> gives."
        if isinstance(source, LiveSource) and not source.device and mode != "NONE":
            yield "On a CPU the graph is emulated: same discipline, nothing saved, and a little may be lost."
        if isinstance(source, RecordedSource):
            unfit = source.unfit(settings)
            if unfit:
                yield f"<b>This step could not be recorded: {ui.escape(unfit)}</b>"
            yield from source.absent(settings)
        refused = source.refused(settings.model)
        if refused:
            when = "cannot run here" if isinstance(source, LiveSource) else "could not be recorded"
            lines = "".join(f"<p><b>{name}</b>: {ui.escape(why)}.</p>" for name, why in refused.items())
            count = f"{len(refused)} backend{'s' if len(refused) > 1 else ''} {when}"
            yield ui.details(f"{count}: {', '.join(refused)}", lines)

    # --- callbacks -------------------------------------------------------------------------------------------------

    def _observe(self, control: Any, react: Callable[[], None]) -> None:
        control.observe(lambda change: None if self._quiet else react(), names="value")

    @contextlib.contextmanager
    def quietly(self) -> Iterator[None]:
        """While entered, a control that the panel itself sets does not call back."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before


def _explain_backend(source: LiveSource, settings: Settings) -> Iterator[str]:
    reason = source.refused(settings.model).get(settings.backend)
    if reason:
        yield f"{settings.backend} cannot run here: {ui.escape(reason)}."
    elif settings.backend == AUTO:
        found = source.serving(settings)
        if found is not None:
            yield f"AUTO takes {found.name} here."
    if settings.backend == "TRITON_ATTN" and not source.device and not reason:
        yield "On a CPU TRITON_ATTN runs in Triton's interpreter, which takes seconds for a step."
    if settings.backend == "FLEX_ATTENTION" and not source.device and not reason:
        yield "On a CPU FLEX_ATTENTION computes every score, for study: a step takes several times as long, or seconds."


def _fill(control: widgets.Dropdown, options: list[tuple[str, str]], default: bool) -> None:
    """New options; the old value stays where it is still among them."""
    old, values = control.value, [value for _, value in options]
    if list(control.options) != options:
        control.options = options
    control.value = old if old in values and not default else values[0]
