"""Timelines of steps with their origin: schema, checks, files. Refuses to know how they were taken.

A file is one JSON object `{"schema", "table": "timelines", "provenance", "rows", "refused"}`, compressed. The times of
the same step without the profiler travel with every timeline.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit.measure.provenance import Kind, Provenance
from labkit.measure.recordings import SHIPPED, Refusal
from labkit.measure.spans import StepTimeline
from labkit.measure.storage import (
    AGAIN,
    MIN_SAMPLES,
    RecordingError,
    check_fields,
    migrate,
    read_all,
    read_object,
    write_object,
)

SCHEMA = 1
TABLE = "timelines"
SHIPPED_TIMELINES = SHIPPED / TABLE


@dataclasses.dataclass(frozen=True)
class Control:
    """The same step's times in the same run. Samples in microseconds, in the order taken.

    plain_us: wall time of the step without the profiler. profiled_us: with it, a few among the others in turns.
    events_us: of the plain steps, device time of the whole step between two events; forward_us: of the forward alone.
    graph_nodes: kernels recorded in the step's graphs at capture; None without graphs, or where the driver did not say.
    """

    plain_us: tuple[float, ...]
    profiled_us: tuple[float, ...]
    events_us: tuple[float, ...]
    forward_us: tuple[float, ...]
    graph_nodes: int | None = None


@dataclasses.dataclass(frozen=True)
class TimelineRow:
    """One step's timeline and its control. Names are those of `recordings.Row`.

    requested_mode: the graph mode asked for; the one that ran is `timeline.mode`. size: tokens that ran.
    context: tokens of KV of each request before the traced step.
    """

    model: str
    dtype: str
    backend: str
    compile: str
    requested_mode: str
    batch: int
    context: int
    size: int
    weights: str
    control: Control
    timeline: StepTimeline

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """What tells rows of one recording apart: model, backend, compile, requested mode, batch."""
        return (self.model, self.backend, self.compile, self.requested_mode, self.batch)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        out = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        control = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self.control).items()}
        return {**out, "control": control, "timeline": self.timeline.as_dict()}

    @classmethod
    def from_dict(cls, data: Any, where: str = "a row") -> TimelineRow:
        """Read what `as_dict` wrote, and check every value.

        Raises:
            RecordingError, TimelineError: a field is missing, unknown, of the wrong type, or disagrees with others.
        """
        if not isinstance(data, Mapping) or "control" not in data or "timeline" not in data:
            raise RecordingError(where, "is no object with a timeline and its control", AGAIN)
        flat = {name: value for name, value in data.items() if name not in ("control", "timeline")}
        check_fields(_Flat, flat, where)
        check_fields(Control, data["control"], f"{where}, control")
        times: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data["control"].items()}
        control = Control(**times)
        row = cls(**flat, control=control, timeline=StepTimeline.from_dict(data["timeline"], f"{where}, timeline"))
        row.check(where)
        return row

    def check(self, where: str = "a row") -> None:
        """Raise RecordingError unless the numbers of this row agree with each other."""
        if not 1 <= self.batch <= self.size:
            raise RecordingError(where, f"ran a batch of {self.batch} in a size of {self.size}", AGAIN)
        for name in ("plain_us", "profiled_us", "events_us", "forward_us"):
            if not all(sample > 0 for sample in getattr(self.control, name)):
                raise RecordingError(where, f"{name} holds a sample that is not a time above zero", AGAIN)
        if not self.control.plain_us or not self.control.profiled_us:
            raise RecordingError(where, "has no times with and without the profiler", AGAIN)
        self.timeline.check(f"{where}, timeline")


@dataclasses.dataclass(frozen=True)
class _Flat:
    """The plain fields of a TimelineRow, for the check of a file."""

    model: str
    dtype: str
    backend: str
    compile: str
    requested_mode: str
    batch: int
    context: int
    size: int
    weights: str


@dataclasses.dataclass(frozen=True)
class TimelineRecording:
    """Timelines of one run, where they come from, and what could not take part."""

    provenance: Provenance
    rows: tuple[TimelineRow, ...]
    refused: tuple[Refusal, ...] = ()

    def timelines(self, *, model: str | None = None, batch: int | None = None) -> tuple[StepTimeline, ...]:
        """The timelines of a model and batch, in the order recorded; None takes all."""
        rows = (r for r in self.rows if model in (None, r.model) and batch in (None, r.batch))
        return tuple(row.timeline for row in rows)

    def as_dict(self) -> dict[str, Any]:
        """The object that `labkit timeline --json` prints and that a file holds."""
        return {
            "schema": SCHEMA,
            "table": TABLE,
            "provenance": self.provenance.as_dict(),
            "rows": [row.as_dict() for row in self.rows],
            "refused": [dataclasses.asdict(one) for one in self.refused],
        }

    @classmethod
    def from_dict(cls, data: Any, where: str = "a recording") -> TimelineRecording:
        """Read what `as_dict` wrote, and check everything.

        Raises:
            RecordingError, ProvenanceError, TimelineError: with what is wrong and in which row.
        """
        if not isinstance(data, Mapping) or data.get("table") != TABLE:
            raise RecordingError(where, "is no recording of timelines", "Name a file of `record --suite timelines`.")
        data = migrate(data, SCHEMA, {}, where)
        if "provenance" not in data or not isinstance(data.get("rows"), list):
            raise RecordingError(where, "has no provenance or no list of rows", "Record again with this version.")
        rows = tuple(TimelineRow.from_dict(row, f"{where}, row {i}") for i, row in enumerate(data["rows"]))
        refused = tuple(read_all(Refusal, data, "refused", where))
        out = cls(Provenance.from_dict(data["provenance"]), rows, refused)
        out.check(where)
        return out

    def check(self, where: str = "a recording") -> None:
        """Raise RecordingError unless rows are distinct and, where stored, have enough samples without the profiler."""
        seen: set[tuple[Any, ...]] = set()
        for i, row in enumerate(self.rows):
            row.check(f"{where}, row {i}")
            if row.key in seen:
                raise RecordingError(f"{where}, row {i}", f"repeats {row.key}", "Keep one row of each configuration.")
            seen.add(row.key)
            n = len(row.control.plain_us)
            if self.provenance.kind is Kind.RECORDED and n < MIN_SAMPLES:
                raise RecordingError(
                    f"{where}, row {i}", f"has {n} plain steps, a recording needs {MIN_SAMPLES}", "Take more rounds."
                )
            if self.provenance.n > n:
                raise RecordingError(f"{where}, row {i}", f"has {n} plain steps, fewer than n says", AGAIN)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a compressed file, whole or not at all. What is stored is a recording: LIVE becomes RECORDED."""
        kind = Kind.RECORDED if self.provenance.kind is Kind.LIVE else self.provenance.kind
        out = dataclasses.replace(self, provenance=self.provenance.replace(kind=kind))
        out.check(Path(path).name)
        return write_object(Path(path), out.as_dict())


def load_timelines(path: str | os.PathLike[str]) -> TimelineRecording:
    """Read and check a recording of timelines, compressed or not.

    Raises:
        RecordingError, ProvenanceError, TimelineError: the file is missing, damaged, of another schema, or disagrees
            with itself.
    """
    path = Path(path)
    return TimelineRecording.from_dict(read_object(path), path.name)


@functools.cache
def shipped_timelines() -> tuple[TimelineRecording, ...]:
    """The recordings of timelines that come with the package, by file name; read once. Empty before there are any."""
    if not SHIPPED_TIMELINES.is_dir():
        return ()
    return tuple(load_timelines(path) for path in sorted(SHIPPED_TIMELINES.glob("*.json.gz")))
