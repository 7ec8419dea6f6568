"""Runs that were measured before and are looked up now. Never invents a point; refuses to know widgets and engines.

A graph of size s always runs s tokens, so a batch of n ≤ s takes the recorded step of size s. An eager step is only
answered where exactly that batch was recorded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from labkit.errors import LabkitError
from labkit.lab.settings import MODES, Range, Run, Settings, show_sizes
from labkit.measure.recordings import Recording, Row


class NotRecorded(LabkitError):
    """There is no recorded step for these settings."""


class RecordedSource:
    """All recordings of one machine behind the panel's controls."""

    kind = "RECORDED"

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self.machine = recordings[0].provenance.device
        self._recordings = [
            dataclasses.replace(rec, rows=tuple(row for row in rec.rows if _is_plain_decode(row))) for rec in recordings
        ]

    @property
    def label(self) -> str:
        return self.machine

    @property
    def empty(self) -> bool:
        return not any(rec.rows for rec in self._recordings)

    def models(self) -> list[str]:
        return list(dict.fromkeys(row.model for rec in self._recordings for row in rec.rows))

    def backends(self, model: str) -> list[str]:
        return list(dict.fromkeys(row.backend for rec in self._recordings for row in rec.rows if row.model == model))

    def modes(self, model: str, backend: str) -> list[str]:
        """The recorded modes. A decode step under FULL is one under FULL_DECODE_ONLY, so either answers for both."""
        rec = self._of(model, backend)
        found = set(rec.values("requested_mode", model=model, backend=backend))
        if rec.values("size", model=model, backend=backend, mode="FULL"):
            found |= {"FULL", "FULL_DECODE_ONLY"}
        return [m for m in MODES if m in found]

    def contexts(self, model: str, backend: str, mode: str) -> Range:
        return _points(
            self._of(model, backend).values("context", model=model, backend=backend, mode=_decode_mode(mode))
        )

    def batches(self, model: str, backend: str, mode: str) -> Range:
        """Eager: the recorded batches only. Under graphs: any batch up to the largest step, a graph is padded to."""
        eager = self._of(model, backend).values("batch", model=model, backend=backend, mode="NONE")
        if _decode_mode(mode) == "NONE":
            return _points(eager)
        return Range(1, max([*self.default_sizes(model, backend, mode), *eager], default=1))

    def default_sizes(self, model: str, backend: str, mode: str) -> list[int]:
        """Every size of which a graph was recorded, ascending."""
        return [int(s) for s in self._of(model, backend).values("size", model=model, backend=backend, mode="FULL")]

    def snap(self, settings: Settings) -> tuple[Settings, list[str]]:
        """Settings with batch and context on recorded points, and a sentence for each that moved."""
        notes: list[str] = []
        moved: dict[str, Any] = {}
        where = settings.model, settings.backend, settings.mode
        for name, allowed in (("batch", self.batches(*where)), ("context", self.contexts(*where))):
            value = getattr(settings, name)
            near = allowed.nearest(value)
            if near != value:
                known = (
                    f"recorded: {show_sizes(allowed.points)}" if allowed.points else f"recorded up to {allowed.high}"
                )
                notes.append(f"{name} {value} was not recorded; moved to the nearest recorded point, {near} ({known}).")
                moved[name] = near
        return dataclasses.replace(settings, **moved), notes

    def resolved(self, settings: Settings) -> tuple[str, list[str]]:
        """The runtime mode of a decode step as recorded."""
        return _decode_mode(settings.mode), []

    def cost(self, settings: Settings) -> str:
        return f"Run looks up one recorded step of the {self.machine}. Nothing is loaded or captured."

    def answer(self, settings: Settings, number: int) -> Run:
        """The recorded step that these settings would have run.

        Raises:
            NotRecorded: that very step is not in the recordings.
        """
        rec = self._of(settings.model, settings.backend)
        common: dict[str, Any] = {"model": settings.model, "backend": settings.backend, "context": settings.context}
        here = f"{settings.model}, {settings.backend}, context {settings.context}"
        eager = rec.values("batch", **common, mode="NONE")
        recorded = rec.values("size", **common, mode="FULL")
        notes: list[str] = []
        if _decode_mode(settings.mode) == "NONE":
            row = rec.find(**common, requested_mode="NONE", batch=settings.batch)
            if row is None:
                raise NotRecorded(
                    f"an eager step of batch {settings.batch} ({here})",
                    "it is not recorded, and no value is made up between recorded ones",
                    f"Recorded batches: {show_sizes(eager) or 'none'}.",
                )
        else:
            sizes = list(settings.sizes) if settings.sizes is not None else recorded
            found = rec.padded(**common, batch=settings.batch, sizes=sizes, requested_mode=settings.mode)
            row = found.row
            if row is None:
                have = (
                    f"Recorded eager batches: {show_sizes(eager) or 'none'}."
                    if found.mode == "NONE"
                    else f"Recorded sizes: {show_sizes(recorded) or 'none'}."
                )
                what = f"batch {settings.batch} with capture sizes {show_sizes(sizes) or 'none'} ({here})"
                raise NotRecorded(what, f"not recorded: {found.note}", have)
            if row.size != settings.batch or row.mode == "NONE":
                notes.append(f"{found.note}. Shown is the recorded step of {row.batch} requests.")
        return Run(
            number=number, settings=settings, row=row, provenance=rec.provenance, notes=tuple(notes),
            eager_launches=_eager_launches(rec, common, row.size),
            text_note="No engine ran: this step was recorded earlier. Switch to LIVE to read generated text.",
        )  # fmt: skip

    def _of(self, model: str, backend: str) -> Recording:
        """The recording that holds this model with this backend."""
        for rec in self._recordings:
            if any(row.model == model and row.backend == backend for row in rec.rows):
                return rec
        raise NotRecorded(
            f"{model} with {backend} on the {self.machine}",
            "nothing of it is recorded",
            f"Recorded models: {', '.join(self.models())}.",
        )


def recorded_sources(recordings: Sequence[Recording]) -> list[RecordedSource]:
    """One source per machine, in the order of first appearance; machines without a decode step are left out."""
    machines = dict.fromkeys(r.provenance.device for r in recordings)
    sources = [RecordedSource([r for r in recordings if r.provenance.device == m]) for m in machines]
    return [s for s in sources if not s.empty]


def _eager_launches(rec: Recording, common: dict[str, Any], batch: int) -> tuple[int, int] | None:
    """Fewest and most launches of an eager step of `batch`, by the recorded batches next to it.

    A recorded batch answers for itself. Launches depend on the batch by little (a kernel more where keys are split), so
    the two neighbours bound what lies between them.
    """
    counts = {r.batch: r.launches for r in rec.rows if r.mode == "NONE" and _matches(r, common)}
    known = {size: n for size, n in counts.items() if n is not None}
    if batch in known:
        return known[batch], known[batch]
    below, above = [b for b in known if b < batch], [b for b in known if b > batch]
    near = [known[b] for b in (*sorted(below)[-1:], *sorted(above)[:1])]
    return (min(near), max(near)) if near else None


def _matches(row: Row, fixed: dict[str, Any]) -> bool:
    return all(getattr(row, name) == value for name, value in fixed.items())


def _is_plain_decode(row: Row) -> bool:
    return row.query_len == 1 and row.compile == "NONE"


def _decode_mode(mode: str) -> str:
    """The runtime mode of a decode step in a model that is not compiled in pieces."""
    return "FULL" if mode.startswith("FULL") else "NONE"


def _points(values: Sequence[int]) -> Range:
    points = tuple(int(v) for v in values)
    return Range(points[0], points[-1], 1, points) if points else Range(1, 1)
