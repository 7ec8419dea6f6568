"""Runs of any panel as HTML: the sentence about one, pinned ones beside each other, all in a table. No widgets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.lab import ui
from labkit.lab.runs import Run, machine, origin
from labkit.measure.provenance import Provenance

LETTERS = "ABCD"


def short(value: Any) -> str:
    """A value of the table for reading: three significant digits below 1000, thousands with a comma."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return ", ".join(map(short, value)) if isinstance(value, (list, tuple)) else str(value)
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}" if digits <= 5 else f"{value:.3g}"


def said_html(kind: str, made: Provenance, summary: str, below: Sequence[str], extra: str = "") -> str:
    """The sentence about a run, what a reader must know beside it, and its origin."""
    notes = "".join(f'<p class="lk-small">{ui.escape(note)}</p>' for note in below if note)
    return ui.block(
        f"{ui.badge(kind, machine(made))} {ui.escape(summary)}{notes}{extra}"
        f'<p class="lk-small lk-quiet">{ui.escape(origin(made))}</p>',
        "lk-sentence",
    )


def pins_html(cards: Sequence[str], said: Sequence[tuple[str, str]]) -> str:
    """Pinned runs side by side, and how each stands to the first.

    Args:
        cards: HTML of each. said: a badge or "", and a sentence.
    """
    if not cards:
        return ""
    shown = "".join(f'<div class="lk-pin">{card}</div>' for card in cards)
    lines = "".join(f"<p>{badge + ' ' if badge else ''}{ui.escape(text)}</p>" for badge, text in said)
    return ui.block(f'<div class="lk-pins">{shown}</div><div class="lk-sentence">{lines}</div>')


def pin_head(letter: str, number: int, kind: str, made: Provenance, earlier: bool = False) -> str:
    """The first line of a pinned run's card."""
    before = ' <span class="lk-quiet">earlier</span>' if earlier else ""
    return f"<div><b>{letter} · run {number}</b> {ui.badge(kind, machine(made))}{before}</div>"


def pin_card(letter: str, run: Run, columns: Sequence[tuple[str, str]]) -> str:
    """A pinned run: its sentence, and its numbers by the headings of the table."""
    values = "".join(
        f"<div>{ui.escape(title.rstrip('#'))}: <b>{ui.escape(short(run.values[key]))}</b></div>"
        for key, title in columns
        if run.values.get(key) is not None
    )
    said = f'<div class="lk-small">{ui.escape(run.summary)}</div>'
    return pin_head(letter, run.number, run.kind, run.provenance, run.earlier) + values + said


def table_html(runs: Sequence[Run], columns: Sequence[tuple[str, str]]) -> str:
    """All runs, one line each. A column of numbers is set to the right."""
    numeric = {
        key for key, _ in columns
        if any(isinstance(run.values.get(key), (int, float)) and not isinstance(run.values.get(key), bool)
               for run in runs)
    }  # fmt: skip
    shown = [(key, title if title.endswith("#") or key not in numeric else f"{title}#") for key, title in columns]
    rows = [{"_run": run_cell(run.number, run.earlier), "_kind": kind_cell(run.kind, run.provenance)}
            | _cells(run.values, columns, run.stopped) for run in runs]  # fmt: skip
    return ui.table("Runs", [("_run", "run#"), ("_kind", "kind"), *shown], rows)


def run_cell(number: int, earlier: bool) -> str:
    return f"{number} <span class='lk-quiet'>earlier</span>" if earlier else str(number)


def kind_cell(kind: str, made: Provenance) -> str:
    return f'<span title="{ui.escape(origin(made))}">{ui.badge(kind)}</span>'


def _cells(values: Mapping[str, Any], columns: Sequence[tuple[str, str]], stopped: bool) -> dict[str, str]:
    cells = {}
    for i, (key, _) in enumerate(columns):
        value = values.get(key)
        text = ui.escape(short(value)) + (" (stopped)" if stopped and i == 0 else "")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        cells[key] = f'<span data-value="{value!r}">{text}</span>' if is_number else text
    return cells
