"""How the runs of a panel are put into words, numbers and tables. Refuses to know widgets, and how a run came about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from labkit.lab import keeping, panel_html, ui
from labkit.lab.panel_html import LETTERS
from labkit.lab.pins import Side, compare, since
from labkit.lab.runs import Run


class Words(Protocol):
    """What a panel says of its runs."""

    def sentence(self, run: Any) -> str:
        """The sentence about a run, as text."""

    def said(self, run: Any, before: str) -> str:
        """The same as HTML, with notes and origin; `before` says what became of the run before it, or ""."""

    def changed(self, new: Any, old: Any) -> str:
        """Why a run differs from the one before, or ""."""

    def row(self, run: Any) -> dict[str, Any]:
        """A line of the table as plain values."""

    def drawn(self, run: Any) -> Mapping[str, Any]:
        """What the chart may show of a run beside its row, by key."""

    def table(self, runs: Sequence[Any]) -> str:
        """The table as HTML."""

    def card(self, letter: str, run: Any) -> str:
        """A pinned run as HTML."""

    def compare(self, first: Any, other: Any, letters: str) -> str:
        """How two pinned runs differ, or why no ratio is taken."""


def pins(words: Words, pinned: Sequence[Any]) -> str:
    """Pinned runs side by side, each but the first compared with it, as HTML."""
    cards = [words.card(LETTERS[i], run) for i, run in enumerate(pinned)]
    said = [("", "Pin another run to compare the two.")]
    if len(pinned) > 1:
        first = pinned[0]
        said = [
            (ui.badge(first.kind) if other.kind == first.kind else "",
             words.compare(first, other, LETTERS[0] + LETTERS[i]))
            for i, other in enumerate(pinned) if i
        ]  # fmt: skip
    return panel_html.pins_html(cards, said)


class PanelWords:
    """The words of a chapter's panel.

    Args:
        columns: (key of `Outcome.values`, heading).
        why: the chapter's own sentence on two runs, or None.
        label, wording: what a reader sees for the name of a control, and for one of its values.
    """

    def __init__(
        self,
        columns: Sequence[tuple[str, str]],
        why: Callable[[Run, Run], str] | None,
        label: Callable[[str], str],
        wording: Callable[[str, Any], str],
    ) -> None:
        self._columns, self._why, self._label, self._wording = list(columns), why, label, wording

    def sentence(self, run: Run) -> str:
        return run.summary

    def said(self, run: Run, before: str) -> str:
        early = "Stopped early: the numbers are of what ran." if run.stopped else ""
        made = "computed" if run.kind == "SIMULATED" else "measured"
        earlier = f"Brought back: this was {made} before." if run.earlier else ""
        return panel_html.said_html(run.kind, run.provenance, run.summary, [before, *run.notes, early, earlier])

    def changed(self, new: Run, old: Run) -> str:
        moved = [
            f"{self._label(name)} {self._wording(name, old.settings[name])} → {self._wording(name, value)}"
            for name, value in new.settings.items()
            if name in old.settings and keeping.plain(old.settings[name]) != keeping.plain(value)
        ]
        said = since(", ".join(moved), *(_side(run, f"run {run.number}") for run in (old, new)))
        why = self._why(new, old) if self._why is not None else ""
        return " ".join(filter(None, (said, why)))

    def row(self, run: Run) -> dict[str, Any]:
        return {"run": run.number, "kind": run.kind, "source": run.source, **run.values}

    def drawn(self, run: Run) -> Mapping[str, Any]:
        return run.data if isinstance(run.data, Mapping) else {}

    def table(self, runs: Sequence[Run]) -> str:
        return panel_html.table_html(runs, self._columns)

    def card(self, letter: str, run: Run) -> str:
        return panel_html.pin_card(letter, run, self._columns)

    def compare(self, first: Run, other: Run, letters: str) -> str:
        return compare(*(_side(run, letter) for run, letter in zip((first, other), letters, strict=True)))


def _side(run: Run, letter: str) -> Side:
    return Side(letter, run.number, run.provenance, run.outcome.measurement, run.outcome.quantity)
