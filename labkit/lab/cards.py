"""What a notebook cell ends in: one line of text that never varies, and a page of HTML. Refuses to know its subject."""

from __future__ import annotations

import html as html_module
import re
from collections.abc import Mapping, Sequence

import ipywidgets as widgets

from labkit.lab.ui import CSS, root

#: Status → (sign, class of the sign's colour). Sign and word carry the meaning, colour only repeats it.
_SIGNS = {"PASS": ("✓", "lk-ok"), "NOT YET": ("✗", "lk-no"), "NOT ATTEMPTED": ("○", "lk-quiet")}

QUIET = ' class="lk-quiet"'


class Card:
    """Prints as `line`; a notebook shows `html` in the style of the panels.

    css: one class more, "lk-pass" or "lk-error".
    """

    def __init__(self, line: str, html: str, css: str = "") -> None:
        self.line, self.html, self.css = line, html, css

    def __repr__(self) -> str:
        return self.line

    def _repr_html_(self) -> str:
        return f'<div class="labkit">{CSS}<div class="lk lk-card {self.css}" role="status">{self.html}</div></div>'


def escape(text: object) -> str:
    return html_module.escape(str(text), quote=True)


def paragraph(text: str, *, html: bool = False, quiet: bool = False) -> str:
    """One paragraph; `html` says that `text` is HTML already. Words between backquotes are shown as code."""
    inner = text if html else escape(text)
    inner = re.sub(r"`([^`]+)`", r"<code>\1</code>", inner)
    return f"<p{QUIET if quiet else ''}>{inner}</p>"


def code(text: str) -> str:
    return f'<pre class="lk-scroll" style="margin:4px 0"><code>{escape(text)}</code></pre>'


def rows(values: Mapping[str, str]) -> str:
    """Names beside values, one a line, values as code."""
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td class="lk-wrap"><code>{escape(value)}</code></td></tr>'
        for name, value in values.items()
    )
    return f"<table>{body}</table>"


def verdict(status: str, label: str) -> str:
    """The head of a check's card."""
    sign, css = _SIGNS.get(status, ("○", "lk-quiet"))
    return f'<p><b>{escape(label)}</b> <span class="{css}"><b>{sign} {escape(status)}</b></span></p>'


def fill_root(box: widgets.VBox, children: Sequence[widgets.Widget]) -> None:
    """Make `box` a root like a panel's: the style sheet first, then what it shows."""
    box.children = root(children).children
    box.layout = widgets.Layout(width="100%", overflow="hidden")
    box.add_class("labkit")
