"""Runs that were measured before and are looked up now. Never invents a point; refuses to know widgets and engines.

A graph of size s always runs s tokens, so a batch of n ≤ s takes the recorded step of size s. An eager step is only
answered where exactly that batch was recorded. Where two recordings hold the same step, the newer one answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from labkit.config import ATTENTION_BACKENDS, CUDAGraphMode
from labkit.errors import LabkitError
from labkit.graphs.sizes import pad_to
from labkit.lab import sentences
from labkit.lab.settings import COMPILES, MODES, Range, Run, Settings, show_sizes
from labkit.measure.library import Entry
from labkit.measure.provenance import Provenance
from labkit.measure.recordings import Recording, Refusal, Row, Setup


class NotRecorded(LabkitError):
    """There is no recorded step for these settings."""


class RecordedSource:
    """Recordings of one machine behind the panel's controls.

    Args:
        label: what the source is called; the machine where none is given.

    Every method that takes settings looks at model, backend, compile and mode, and at batch, context and sizes where
    it says so.
    """

    kind = "RECORDED"

    def __init__(self, recordings: Sequence[Recording], label: str = "") -> None:
        self.machine = recordings[0].provenance.device
        self.label = label or self.machine
        rows: dict[tuple[Any, ...], Row] = {}
        self._made: dict[tuple[Any, ...], Provenance] = {}
        self._setups: dict[tuple[Any, ...], Setup] = {}
        self._refused: dict[tuple[str, str], str] = {}
        self._unfit: list[Refusal] = []
        newest_first = sorted(recordings, key=lambda rec: rec.provenance.date, reverse=True)
        for rec in newest_first:
            for row in filter(_is_decode, rec.rows):
                if rows.setdefault(row.key, row) is row:
                    self._made[row.key] = rec.provenance
            for setup in rec.setups:
                self._setups.setdefault(setup.key, setup)
            self._unfit += [one for one in rec.refused if one.batch]
            for one in rec.refused:
                if not one.requested_mode and not one.batch:
                    self._refused.setdefault((one.model, one.backend), one.reason)
        self._all = Recording(newest_first[0].provenance, tuple(rows.values()))

    @property
    def rows(self) -> tuple[Row, ...]:
        """Every decode step that can be looked up."""
        return self._all.rows

    # --- what the controls offer -----------------------------------------------------------------------------------

    def models(self) -> list[str]:
        return list(dict.fromkeys(row.model for row in self.rows))

    def backends(self, model: str) -> list[tuple[str, str]]:
        """Label and name of each recorded backend; the label has the generation of kernels where there are several."""
        found = {row.backend: sentences.version_of(row.backend_version) for row in self.rows if row.model == model}
        return [(f"{name} · {version}" if version else name, name) for name, version in found.items()]

    def refused(self, model: str) -> dict[str, str]:
        """The backends that could not serve `model` when it was recorded, each with its reasons."""
        served = [name for _, name in self.backends(model)]
        return {name: why for (of, name), why in self._refused.items() if of == model and name not in served}

    def compiles(self, model: str, backend: str) -> list[str]:
        found = self._all.values("compile", model=model, backend=backend)
        return sorted(found, key=lambda one: (COMPILES.index(one) if one in COMPILES else len(COMPILES), one))

    def modes(self, model: str, backend: str, compile: str = "NONE") -> list[str]:
        """The modes whose decode step was recorded, under whatever mode that has the same one."""
        found = set(self._all.values("mode", model=model, backend=backend, compile=compile))
        return [mode for mode in MODES if _decode_mode(mode) in found]

    def absent(self, settings: Settings) -> list[str]:
        """A sentence on what a learner may look for and these lists do not have."""
        served = [name for _, name in self.backends(settings.model)]
        compiles = self.compiles(settings.model, settings.backend)
        found = [name for name in ATTENTION_BACKENDS if name not in served and name not in self.refused(settings.model)]
        found += [f"mode {mode}" for mode in MODES if mode not in self.modes(*_choice(settings))]
        found += [f"compile {one}" for one in COMPILES if one not in compiles]
        return [f"Not recorded with these settings: {', '.join(found)}."] if found else []

    def unfit(self, settings: Settings) -> str:
        """Why the step of these settings could not be recorded, by the engine; "" where it was, or was not tried.

        What was too large for one batch and context is so for every larger one, and under every mode that runs decodes
        in FULL graphs: the KV that is missing is the same.
        """
        sizes = self.default_sizes(settings) if settings.sizes is None else list(settings.sizes)
        eager = _decode_mode(settings.mode) == "NONE"
        size = settings.batch if eager else pad_to(settings.batch, sorted(sizes)) or settings.batch
        common = {**_where(settings), "context": settings.context}
        if self._all.values("size", **common, mode=_decode_mode(settings.mode)).count(size):
            return ""
        for one in self._unfit:
            same = (one.model, one.backend, one.compile) == (settings.model, settings.backend, settings.compile)
            graphs = one.requested_mode.startswith("FULL") and settings.mode.startswith("FULL")
            here = same and (graphs or one.requested_mode in ("", settings.mode))
            if here and size >= one.batch and settings.context >= one.context:
                return f"batch {one.batch} at context {one.context} does not fit ({one.reason})."
        return ""

    def contexts(self, settings: Settings) -> Range:
        return _points(self._values("context", settings, mode=_decode_mode(settings.mode)))

    def batches(self, settings: Settings) -> Range:
        """Eager: the recorded batches only. Under graphs: any batch up to the largest step, a graph is padded to."""
        eager = self._values("batch", settings, mode="NONE")
        if _decode_mode(settings.mode) == "NONE":
            return _points(eager)
        return Range(1, max([*self.default_sizes(settings), *eager], default=1))

    def default_sizes(self, settings: Settings) -> list[int]:
        """Every size of which a graph of the mode was recorded, ascending."""
        mode = _decode_mode(settings.mode)
        return [] if mode == "NONE" else self._values("size", settings, mode=mode)

    def snap(self, settings: Settings) -> tuple[Settings, list[str]]:
        """Settings with batch and context on recorded points, and a sentence for each that moved."""
        notes: list[str] = []
        moved: dict[str, Any] = {}
        for name, allowed in (("batch", self.batches(settings)), ("context", self.contexts(settings))):
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
        if self.unfit(settings):
            return "Run will be refused: this step did not fit on the machine. Lower batch or context."
        return f"Run looks up one recorded step of the {self.machine}. Nothing is loaded, compiled or captured."

    # --- a run -----------------------------------------------------------------------------------------------------

    def answer(self, settings: Settings, number: int) -> Run:
        """The recorded step that these settings would have run.

        Raises:
            NotRecorded: that very step is not in the recordings.
        """
        self._check(settings)
        unfit = self.unfit(settings)
        if unfit:
            asked = f"batch {settings.batch}, context {settings.context} on the {self.machine}"
            raise NotRecorded(asked, f"it could not be recorded: {unfit.rstrip('.')}", "Lower batch or context.")
        common = _where(settings) | {"context": settings.context}
        here = f"{settings.model}, {settings.backend}, compile {settings.compile}, context {settings.context}"
        eager = self._all.values("batch", **common, mode="NONE")
        recorded = self.default_sizes(settings)
        notes: list[str] = []
        if _decode_mode(settings.mode) == "NONE":
            row = self._all.find(**common, requested_mode="NONE", batch=settings.batch)
            if row is None:
                raise NotRecorded(
                    f"an eager step of batch {settings.batch} ({here})",
                    "it is not recorded, and no value is made up between recorded ones",
                    f"Recorded batches: {show_sizes(eager) or 'none'}.",
                )
        else:
            sizes = list(settings.sizes) if settings.sizes is not None else recorded
            found = self._all.padded(**common, batch=settings.batch, sizes=sizes, requested_mode=settings.mode)
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
            notes += _under_another_mode(row, settings.mode)
        setup = self._setups.get((row.model, row.backend, row.compile, row.requested_mode))
        return Run(
            number=number, settings=settings, row=row, provenance=self._made[row.key], notes=tuple(notes),
            eager_launches=self._eager_launches(common, row.size), ready=sentences.recorded_ready(setup),
            text_note="No engine ran: this step was recorded earlier. Switch to LIVE to read generated text.",
        )  # fmt: skip

    def _check(self, settings: Settings) -> None:
        what = f"{settings.model} with {settings.backend} on the {self.machine}"
        if settings.model not in self.models():
            raise NotRecorded(what, "nothing of it is recorded", f"Recorded models: {', '.join(self.models())}.")
        names = [name for _, name in self.backends(settings.model)]
        if settings.backend not in names:
            raise NotRecorded(what, "nothing of it is recorded", f"Recorded backends: {', '.join(names)}.")

    def _eager_launches(self, common: dict[str, Any], batch: int) -> tuple[int, int] | None:
        """Fewest and most launches of an eager step of `batch`, by the recorded batches next to it.

        A recorded batch answers for itself. Launches depend on the batch by little (a kernel more where keys are
        split), so the two neighbours bound what lies between them.
        """
        rows = (row for row in self.rows if row.mode == "NONE" and _matches(row, common))
        known = {row.batch: row.launches for row in rows if row.launches is not None}
        if batch in known:
            return known[batch], known[batch]
        below, above = [b for b in known if b < batch], [b for b in known if b > batch]
        near = [known[b] for b in (*sorted(below)[-1:], *sorted(above)[:1])]
        return (min(near), max(near)) if near else None

    def _values(self, field: str, settings: Settings, **fixed: Any) -> list[int]:
        return [int(v) for v in self._all.values(field, **_where(settings), **fixed)]


def recorded_sources(recordings: Sequence[Recording]) -> list[RecordedSource]:
    """One source per machine, in the order of first appearance; machines without a decode step are left out."""
    machines = dict.fromkeys(r.provenance.device for r in recordings)
    sources = [RecordedSource([r for r in recordings if r.provenance.device == m]) for m in machines]
    return [s for s in sources if s.rows]


def own_sources(entries: Iterable[Entry]) -> list[RecordedSource]:
    """One source per recording of the user's own, named after its file: nothing is merged with what ships."""
    found = [RecordedSource([one.recording], f"{one.provenance.device} · yours: {one.name}") for one in entries]
    return [source for source in found if source.rows]


def first_compiles(recordings: Iterable[Recording], machine: str) -> dict[str, float]:
    """Seconds that the first compilation of each model took on `machine` ("cpu", or a GPU's name), where recorded."""
    found: dict[str, float] = {}
    for rec in recordings:
        for setup in rec.setups:
            if rec.provenance.device == machine and setup.compile_ms and not setup.from_cache:
                found[setup.model] = setup.compile_ms / 1e3
    return found


def _choice(settings: Settings) -> tuple[str, str, str]:
    return settings.model, settings.backend, settings.compile


def _where(settings: Settings) -> dict[str, Any]:
    return {"model": settings.model, "backend": settings.backend, "compile": settings.compile}


def _under_another_mode(row: Row, asked: str) -> list[str]:
    """A sentence where the graph that answers was captured for other batches than the mode asked for would."""
    if row.mode != "FULL" or (row.requested_mode == "FULL") == (asked == "FULL"):
        return []
    only, both = "for batches of decodes alone", "for mixed batches too"
    mine, other = (only, both) if asked == "FULL" else (both, only)
    return [f"Recorded under {row.requested_mode}, whose graphs are captured {mine}; those of {asked} are {other}."]


def _matches(row: Row, fixed: dict[str, Any]) -> bool:
    return all(getattr(row, name) == value for name, value in fixed.items())


def _is_decode(row: Row) -> bool:
    return row.query_len == 1 and row.chunk == 0


def _decode_mode(mode: str) -> str:
    """The runtime mode of a decode step."""
    return CUDAGraphMode[mode].decode_mode().name


def _points(values: Sequence[int]) -> Range:
    points = tuple(int(v) for v in values)
    return Range(points[0], points[-1], 1, points) if points else Range(1, 1)
