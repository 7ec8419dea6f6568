"""The course's running table: what each configuration costs, row by row as chapters fill it. Refuses to measure.

A row holds numbers of one origin (LIVE, RECORDED or SIMULATED, and where); a later note with another origin replaces
the row, so that no row mixes two.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from labkit.lab import progress
from labkit.lab.cards import Card, paragraph
from labkit.lab.ui import badge, escape, table
from labkit.measure.provenance import Kind, ProvenanceError

#: Field → (heading, how it is printed). Units are in the headings.
COLUMNS = {
    "launches": ("launches/step", "{:,.0f}"),
    "busy_pct": ("GPU busy, %", "{:.0f}"),
    "step_ms": ("ms/step", "{:.3g}"),
    "mib": ("MiB", "{:,.1f}"),
    "startup_s": ("start-up, s", "{:.3g}"),
}


@dataclasses.dataclass(frozen=True)
class Score:
    """One row. kind: LIVE, RECORDED or SIMULATED; where: the machine or the model that it was computed with.

    launches: started by the host in a step. busy_pct: share of the step in which the device computes, 0…100.
    step_ms: median. mib: device memory that it takes on top. startup_s: until the first step may run. None: not known.
    """

    name: str
    kind: str
    where: str
    launches: float | None = None
    busy_pct: float | None = None
    step_ms: float | None = None
    mib: float | None = None
    startup_s: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in [str(kind) for kind in Kind]:
            raise ProvenanceError(
                f"a row {self.name!r} of the scoreboard",
                f"it says {self.kind!r} about where its numbers come from",
                "Say LIVE, RECORDED or SIMULATED.",
            )
        if not self.where:
            raise ProvenanceError(f"a row {self.name!r} of the scoreboard", "it does not say where it was measured", "")
        for field in COLUMNS:
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"scoreboard row {self.name!r}: {field}={value!r} is no amount")


def note(score: Score) -> None:
    """Put a row on the board. Where it has the same origin as before, what it does not know is kept."""
    row = dataclasses.asdict(score)
    before = progress.load().scores.get(score.name)
    if before and (before.get("kind"), before.get("where")) == (score.kind, score.where):
        row = {key: before.get(key) if value is None else value for key, value in row.items()}
    progress.note_score(score.name, row)


def note_run(name: str, run: Any, **more: float) -> None:
    """Put a run of a panel (`labkit.lab.settings.Run`) on the board: its launches and its median step.

    Args:
        more: what the run does not know, measured with it: busy_pct, mib, startup_s.
    """
    row, origin = run.row, run.provenance
    note(Score(name, str(origin.kind), origin.device, launches=row.launches, step_ms=row.p50_ms, **more))


def scores() -> tuple[Score, ...]:
    """All rows in the order in which they came onto the board; a row that no longer reads is left out."""
    found = []
    for name, row in progress.load().scores.items():
        try:
            known = {field: row.get(field) for field in COLUMNS}
            found.append(Score(name, str(row.get("kind")), str(row.get("where") or ""), **known))
        except (ValueError, TypeError):
            continue
    return tuple(found)


def scoreboard(mark: str = "") -> Card:
    """The table as a card; the row named `mark` is this chapter's."""
    rows = scores()
    line = f"scoreboard: {len(rows)} {'row' if len(rows) == 1 else 'rows'}"
    if not rows:
        begin = "No row yet. Run this chapter's panel and put the run on the board."
        return Card(line, paragraph(begin))
    shown = []
    for score in rows:
        name = escape(score.name)
        cells = {"name": f"<b>▸ {name}</b> (this chapter)" if score.name == mark else name}
        for field, (_, form) in COLUMNS.items():
            value = getattr(score, field)
            cells[field] = "—" if value is None else form.format(value)
        shown.append({**cells, "origin": badge(score.kind, score.where)})
    columns = [("name", "configuration"), *((f, f"{head}#") for f, (head, _) in COLUMNS.items()), ("origin", "from")]
    note_ = "Rows of different origin stand under each other; no ratio is taken between them."
    return Card(line, table("Scoreboard", columns, shown) + paragraph(note_, quiet=True))
