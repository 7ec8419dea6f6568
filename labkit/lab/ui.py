"""The widgets and HTML that panels are made of: only what ipywidgets 7.7 and 8 share. Refuses to know engines.

Colours come from JupyterLab's theme variables with a fallback, so light and dark need no switch. Everything reaches
the page through `HTML.value`, widget traits or figure traces: all may be set from the worker thread, printing may not.
"""

from __future__ import annotations

import copy
import functools
import html
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go

from labkit.errors import LabkitError

CSS = """<style>
.labkit { color: var(--jp-ui-font-color1, #222); max-width: 1180px; }
.labkit .lk { color: var(--jp-ui-font-color1, #222); font-size: 13px; line-height: 1.45; overflow-wrap: break-word; }
.labkit .lk h3 { font-size: 16px; font-weight: 600; margin: 0; color: inherit; }
.labkit .lk p { margin: 2px 0; }
.labkit .lk-quiet { color: var(--jp-ui-font-color2, #5a5a5a); }
.labkit .lk-small { font-size: 12px; }
.labkit .lk-head { display: flex; flex-wrap: wrap; gap: 4px 12px; align-items: baseline; }
.labkit .lk-badge { display: inline-block; padding: 1px 7px; border-radius: 3px; font-size: 11px; font-weight: 600;
  letter-spacing: .02em; color: #fff; white-space: nowrap; }
.labkit .lk-live { background: #1b6e3c; } .labkit .lk-recorded { background: #1f5fa8; }
.labkit .lk-simulated { background: #7a3e9d; } .labkit .lk-none { background: #5f6368; }
.labkit .lk-sentence { font-size: 14px; padding: 8px 12px; border-left: 4px solid var(--jp-brand-color1, #1f5fa8);
  background: var(--jp-rendermime-table-row-background, #f5f5f5); margin: 8px 0; }
.labkit .lk-card { padding: 10px 14px; margin: 8px 0; border-left: 4px solid var(--jp-border-color1, #bdbdbd);
  background: var(--jp-rendermime-table-row-background, #f5f5f5); }
.labkit .lk-error { border-left-color: #c9302c; } .labkit .lk-pass { border-left-color: #1b6e3c; }
.labkit .lk-card b { font-weight: 600; }
.labkit .lk-scroll { overflow-x: auto; }
.labkit .lk table { border-collapse: collapse; font-size: 12px; margin: 0; color: inherit; }
.labkit .lk th, .labkit .lk td { padding: 4px 8px; text-align: left; white-space: nowrap; color: inherit;
  border-bottom: 1px solid var(--jp-border-color2, #ddd); background: transparent; vertical-align: top; }
.labkit .lk td.lk-wrap { white-space: normal; min-width: 260px; }
.labkit .lk th { font-weight: 600; } .labkit .lk td.lk-num, .labkit .lk th.lk-num { text-align: right;
  font-variant-numeric: tabular-nums; }
.labkit .lk caption { text-align: left; caption-side: top; padding: 10px 0 4px; font-weight: 600; color: inherit; }
.labkit .lk-pins { display: flex; flex-wrap: wrap; gap: 10px; margin: 8px 0; }
.labkit .lk-pin { flex: 1 1 220px; padding: 10px 14px; border: 1px solid var(--jp-border-color2, #ddd);
  border-radius: 4px; }
.labkit .lk-pin .lk-big { font-size: 22px; font-weight: 600; font-variant-numeric: tabular-nums; }
.labkit .lk-text { white-space: pre-wrap; padding: 8px 12px; border: 1px solid var(--jp-border-color2, #ddd);
  border-radius: 4px; max-height: 170px; overflow-y: auto;
  font-family: var(--jp-code-font-family, monospace); font-size: 12.5px; }
.labkit .lk-prompt { color: var(--jp-ui-font-color2, #5a5a5a); }
.labkit .lk-ok { color: var(--jp-success-color0, #1b6e3c); } .labkit .lk-no { color: var(--jp-error-color1, #b3261e); }
.labkit .js-plotly-plot .main-svg text { fill: var(--jp-ui-font-color1, #222) !important; }
.labkit .js-plotly-plot .hoverlayer text { fill: #fff !important; }
.labkit .lk-figure { overflow-x: auto; } .labkit .lk-figure .js-plotly-plot { min-width: 420px; }
.labkit .lk-stale { opacity: .6; }
.labkit .lk-stale-mark { padding: 5px 12px; margin: 0 0 4px; border: 1px dashed var(--jp-warn-color1, #b26a00);
  border-radius: 3px; font-weight: 600; }
.labkit .lk-gate { padding: 8px 14px; margin: 6px 0; border-left: 4px solid var(--jp-warn-color1, #b26a00);
  background: var(--jp-rendermime-table-row-background, #f5f5f5); }
.labkit .widget-radio-box label, .labkit .widget-checkbox label { color: var(--jp-ui-font-color1, #222); }
.labkit .lk a { color: var(--jp-content-link-color, #1f5fa8); text-decoration: underline; }
.labkit .widget-label { color: var(--jp-ui-font-color1, #222); }
.labkit .widget-toggle-buttons .widget-toggle-button { width: auto; min-width: 150px; }
</style>"""

#: Provenance → (class, sign). The sign and the word carry the meaning, colour only repeats it.
_BADGES = {"LIVE": ("lk-live", "●"), "RECORDED": ("lk-recorded", "■"), "SIMULATED": ("lk-simulated", "◆")}


def escape(text: object) -> str:
    return html.escape(str(text), quote=True)


def badge(kind: str, detail: str = "") -> str:
    """LIVE, RECORDED or SIMULATED as sign, word and colour; `detail` names the machine."""
    css, sign = _BADGES.get(kind, ("lk-none", "○"))
    return f'<span class="lk-badge {css}">{sign} {escape(kind)}{" · " + escape(detail) if detail else ""}</span>'


def block(content: str, css: str = "") -> str:
    """Wrap HTML for one panel area; empty stays empty, so that an unused area takes no room."""
    return f'<div class="lk {css}">{content}</div>' if content else ""


def error_card(error: BaseException, doing: str) -> str:
    """An error as what was asked, why it failed, and what to try."""
    if isinstance(error, LabkitError):
        what, why, try_ = error.what, error.why, error.try_
    elif type(error).__name__ == "OutOfMemoryError":
        what, why = doing, "the GPU has no memory left for it"
        try_ = "Lower batch or context, take a smaller model, or shut down another notebook's kernel."
    else:
        what, why = doing, f"{type(error).__name__}: {error}"
        try_ = (
            "This is a fault in labkit, not in your input. Press Reset; set LABKIT_STRICT=1 to see the whole traceback."
        )
    parts = [f"<p><b>{escape(what)}</b></p>", f"<p>{escape(why)}.</p>".replace("..</p>", ".</p>")]
    if try_:
        parts.append(f"<p><b>Try:</b> {escape(try_)}</p>")
    return f'<div class="lk lk-card lk-error" role="alert">{"".join(parts)}</div>'


def table(caption: str, columns: Sequence[tuple[str, str]], rows: Sequence[Mapping[str, Any]]) -> str:
    """An HTML table. columns: (key, heading); a heading that ends in '#' is a number column. Cells are HTML already."""
    if not rows:
        return ""
    head = "".join(f'<th scope="col"{_num(title)}>{escape(title.rstrip("#"))}</th>' for _, title in columns)
    body = "".join(
        "<tr>" + "".join(f"<td{_num(title)}>{row[key]}</td>" for key, title in columns) + "</tr>" for row in rows
    )
    above = f"<caption>{escape(caption)}</caption>" if caption else ""
    return block(
        f"<table>{above}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>",
        "lk-scroll",
    )


def details(title: str, content: str) -> str:
    """HTML behind a line that opens it."""
    return f'<details class="lk-small"><summary>{escape(title)}</summary>{content}</details>'


def _num(title: str) -> str:
    return ' class="lk-num"' if title.endswith("#") else ""


def area(value: str = "") -> widgets.HTML:
    """A place for HTML that takes the full width."""
    return widgets.HTML(value=value, layout=widgets.Layout(width="100%", margin="0"))


def root(children: Sequence[widgets.Widget]) -> widgets.VBox:
    """A panel's outermost box, with the style sheet."""
    box = widgets.VBox([widgets.HTML(value=CSS, layout=widgets.Layout(display="none")), *children])
    box.layout = widgets.Layout(width="100%", overflow="hidden")
    box.add_class("labkit")
    return box


def stack(children: Sequence[widgets.Widget], **layout: str) -> widgets.VBox:
    return widgets.VBox(list(children), layout=widgets.Layout(**layout))


def row(children: Sequence[widgets.Widget], **layout: str) -> widgets.HBox:
    """Children beside each other; they wrap on a narrow page."""
    return widgets.HBox(list(children), layout=widgets.Layout(flex_flow="row wrap", **layout))


LABEL = {"description_width": "116px"}


def hint(widget: widgets.Widget, text: str) -> None:
    """What a mouse that rests on it shows, and a screen reader says; ipywidgets 7 and 8 name it differently."""
    name = "tooltip" if widget.has_trait("tooltip") else "description_tooltip"
    if widget.has_trait(name):
        setattr(widget, name, text)


def dropdown(label: str, options: Sequence[tuple[str, Any]], value: Any = None) -> widgets.Dropdown:
    made = widgets.Dropdown(
        options=list(options), description=label, style=dict(LABEL), layout=widgets.Layout(width="auto")
    )
    if value is not None:
        made.value = value
    return made


def text(label: str, value: str = "", placeholder: str = "") -> widgets.Text:
    return widgets.Text(
        value=value, description=label, placeholder=placeholder, continuous_update=False, style=dict(LABEL),
        layout=widgets.Layout(width="auto"),
    )  # fmt: skip


def button(label: str, hint: str, style: str = "", width: str = "72px") -> widgets.Button:
    return widgets.Button(description=label, tooltip=hint, button_style=style, layout=widgets.Layout(width=width))


class Number:
    """A slider with a text box beside it: every value can be typed. `on_change(value)` is called once per change.

    A value outside the range is moved to the nearest end, and `notice` says so; nothing is clamped silently.
    points: where only some values are allowed, the slider goes from one to the next; what is typed is not touched here.
    """

    def __init__(
        self,
        label: str,
        low: float,
        high: float,
        value: float,
        step: float = 1,
        *,
        whole: bool = True,
        unit: str = "",
        points: Sequence[float] | None = None,
    ) -> None:
        self.notice, self.points = "", points
        self.on_change: Callable[[Any], None] = lambda value: None
        self._cast: Callable[[Any], Any] = int if whole else float
        slider, box = (widgets.IntSlider, widgets.IntText) if whole else (widgets.FloatSlider, widgets.FloatText)
        self.slider = slider(
            value=value, min=low, max=high, step=step, description=label, readout=False, continuous_update=False,
            style=dict(LABEL), layout=widgets.Layout(flex="1 1 auto", width="auto", min_width="120px"),
        )  # fmt: skip
        self.box = box(value=value, continuous_update=False, layout=widgets.Layout(width="74px"))
        hint(self.box, f"{label}: type a value")
        behind = [widgets.Label(unit)] if unit else []
        self.widget = widgets.HBox([self.slider, self.box, *behind], layout=widgets.Layout(width="auto"))
        self._quiet = False
        self.slider.observe(lambda change: self._slid(change["old"], change["new"]), names="value")
        self.box.observe(lambda change: self._changed(change["new"]), names="value")

    @property
    def name(self) -> str:
        return str(self.slider.description).lower()

    @property
    def value(self) -> Any:
        return self._cast(self.box.value)

    @value.setter
    def value(self, value: float) -> None:
        self._changed(value)

    def set_quietly(self, value: float) -> None:
        """Show a value without reporting a change."""
        self._quiet = True
        try:
            self.slider.value = min(max(value, self.slider.min), self.slider.max)
            self.box.value = value
        finally:
            self._quiet = False

    def set_range(self, low: float, high: float, step: float = 1) -> None:
        """New ends, both inclusive; the value moves only as far as it must."""
        value = min(max(self.value, low), high)
        self._quiet = True
        try:
            # A slider refuses min > max, so widen before narrowing.
            self.slider.min, self.slider.max = min(low, self.slider.min), max(high, self.slider.max)
            self.slider.value = value
            self.slider.min, self.slider.max, self.slider.step = low, high, step
            self.box.value = value
        finally:
            self._quiet = False

    @property
    def disabled(self) -> bool:
        return bool(self.box.disabled)

    @disabled.setter
    def disabled(self, off: bool) -> None:
        self.slider.disabled = self.box.disabled = off

    def _slid(self, old: float, new: float) -> None:
        """An arrow key moves by one step, which would fall back to the point it came from."""
        if self.points and not self._quiet:
            near = min(self.points, key=lambda p: (abs(p - new), -p))
            beyond = [p for p in self.points if (p > old if new > old else p < old)]
            if near == old and beyond:
                near = min(beyond, key=lambda p: abs(p - old))
            new = near
        self._changed(new)

    def _changed(self, value: float) -> None:
        if self._quiet:
            return
        low, high = self.slider.min, self.slider.max
        kept = min(max(self._cast(value), low), high)
        self.notice = (
            "" if kept == value else f"{self.name} {value} is outside {low}…{high} here, so it was set to {kept}."
        )
        self.set_quietly(kept)
        self.on_change(kept)


def may_use_figure_widget() -> bool:
    """Whether a FigureWidget is worth trying here.

    plotly 6 and newer needs ipywidgets 8 for it; Colab does not load third-party widgets by itself. Whether it can be
    built (plotly 6 and newer needs anywidget) shows when it is built: one for trying out would cost the page megabytes.
    """
    if "COLAB_RELEASE_TAG" in os.environ or "COLAB_NOTEBOOK_ID" in os.environ:
        return False
    import plotly

    return int(plotly.__version__.split(".")[0]) < 6 or int(widgets.__version__.split(".")[0]) >= 8


#: Seconds that a page has to answer the first update, and to say anything at all, before the chart is redrawn instead.
ANSWER_S, SILENCE_S = 5.0, 60.0


@functools.cache
def _speaking_figure_widget() -> Any:
    """A FigureWidget that hands on whatever the page says about it, and gives a reloaded page what is drawn now."""

    class SpeakingFigureWidget(go.FigureWidget):
        _heard: Callable[[Mapping[str, Any]], None] = staticmethod(lambda said: None)

        def set_state(self, sync_data: Any) -> None:
            super().set_state(sync_data)
            self._heard(sync_data)

        def get_state(self, key: Any = None, drop_defaults: bool = False) -> Any:
            # Plotly 6 fills these once; a page that loads again would start from the chart as it was then.
            if key is None and self.has_trait("_widget_data") and hasattr(self, "_layout_obj"):
                self._trait_values["_widget_data"] = copy.deepcopy(self._data)
                self._trait_values["_widget_layout"] = copy.deepcopy(self._layout_obj._props)
            return super().get_state(key, drop_defaults)

    return SpeakingFigureWidget


class FigureView:
    """Shows a figure and replaces it in place: in one FigureWidget, or by drawing it anew where that does not work.

    A FigureWidget brings megabytes of code to the page. What arrives before they are loaded is lost, and a page that
    takes longer than two seconds over them never updates at all. So nothing is sent before the page has drawn; then a
    first update is sent, and only a page that answers it is trusted with more. Any other gets the redraw.
    The redraw sets `Output.outputs` instead of printing into it: what another thread prints ends up elsewhere.
    """

    def __init__(self, figure: go.Figure, *, redraw: bool | None = None) -> None:
        self.figure = self._sent = figure
        self.alt = ""
        self.redraws = False
        self._lock = threading.RLock()  # the page speaks on one thread, runs end on another
        self._drawn = self._answers = False
        self._built = time.monotonic()
        self.widget = widgets.VBox([], layout=widgets.Layout(width="100%", min_width="0"))
        self.widget.add_class("lk-figure")
        if not may_use_figure_widget() if redraw is None else redraw:
            self._redraw_from_now_on()
            return
        try:
            self._live = _speaking_figure_widget()(figure)
        except ImportError:  # what FigureWidget raises without anywidget
            self._redraw_from_now_on()
            return
        self._live._config = {"responsive": True, "displaylogo": False}
        self._live._heard = self._hear
        self.widget.children = (self._live,)

    def show(self, figure: go.Figure, alt: str = "") -> None:
        """Draw `figure`, or keep it until the page is ready. Of a FigureWidget only what differs travels.

        alt: what it shows, in a sentence, for who cannot see it.
        """
        with self._lock:
            self.figure, self.alt = figure, alt
            if not self.redraws and not self._drawn and time.monotonic() - self._built > SILENCE_S:
                self._redraw_from_now_on()
            elif self.redraws:
                self._redraw()
            elif self._answers:
                self._send()

    def _hear(self, said: Mapping[str, Any]) -> None:
        with self._lock:
            if not self._drawn:
                self._drawn = True
                # Any change of the layout will do. It has a use as well: the page measured the figure off the page.
                self._live.layout.meta = "drawn"
                waiting = threading.Timer(ANSWER_S, self._give_up)
                waiting.daemon = True
                waiting.start()
            elif not self._answers and any(_edit(value) >= self._live._last_layout_edit_id for value in said.values()):
                self._answers = True
                if not self.redraws:
                    self._send()

    def _give_up(self) -> None:
        with self._lock:
            if not self._answers:
                self._redraw_from_now_on()

    def _redraw_from_now_on(self) -> None:
        self.redraws = True
        self._output = widgets.Output(layout=widgets.Layout(width="100%"))
        self._redraw()
        self.widget.children = (self._output,)

    def _redraw(self) -> None:
        bundle = {k: v for k, v in dict(self.figure._repr_mimebundle_() or {}).items() if v is not None}
        bundle["text/plain"] = f"{self.alt or 'A chart.'} The table below holds its numbers."
        self._output.outputs = ({"output_type": "display_data", "data": bundle, "metadata": {}},)

    def _send(self) -> None:
        before, after, shown = self._sent, self.figure, self._live
        self._sent = after
        with shown.batch_update():
            keep = 0
            for old, new in zip(before.data, after.data, strict=False):
                if old.meta != new.meta or old.type != new.type:
                    break
                keep += 1
            if len(shown.data) > keep:
                shown.data = shown.data[:keep]
            for old, new, drawn in zip(before.data, after.data[:keep], shown.data, strict=False):
                if old != new:
                    drawn.update(new.to_plotly_json(), overwrite=False)
            if before.layout != after.layout:
                layout = after.layout.to_plotly_json()
                shown.layout.update({**_gone(before.layout.to_plotly_json(), layout), **layout}, overwrite=True)
            if len(after.data) > keep:
                shown.add_traces(list(after.data[keep:]))


def _gone(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What takes away that which only the layout before mentions: a page keeps what is merely no longer mentioned.

    Axes are hidden: a page does not take well to axes that go away.
    """
    lists = ("annotations", "shapes", "images")
    return {
        name: [] if name in lists else {"visible": False} if name.startswith(("xaxis", "yaxis")) else None
        for name in before if name not in after
    }  # fmt: skip


def _edit(said: Any) -> int:
    """The number of the layout change that the page has just carried out; -1 when it speaks of something else."""
    return int(said.get("layout_edit_id", -1)) if isinstance(said, Mapping) else -1
