"""Measured rows with their origin: schema, checks, files, look-up. Refuses to know how rows are measured.

A file is one JSON object `{"schema", "provenance", "rows"}`, compressed. Raw samples travel with every row, and the
percentiles beside them are recomputed at every load: a file whose numbers disagree is refused.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.errors import did_you_mean
from labkit.measure.provenance import Kind, Provenance, ProvenanceError
from labkit.measure.stats import Measurement
from labkit.measure.storage import (
    AGAIN,
    MIN_SAMPLES,
    RecordingError,
    check_fields,
    check_not_made_up,
    check_samples,
    migrate,
    read_all,
    read_object,
    write_atomically,
    write_object,
)

SCHEMA = 2
#: Samples are stored to 0.1 µs; percentiles of what is stored may differ from what is written by this much, in ms.
RESOLUTION_MS = 1e-4

SHIPPED = Path(__file__).resolve().parents[1] / "data" / "recordings"


@dataclasses.dataclass(frozen=True)
class Row:
    """One configuration measured, in steps of `LLM.step()`.

    requested_mode, mode: the graph mode asked for, and the one the step ran in (NONE, PIECEWISE, FULL).
    size: tokens that ran, padding included. context: tokens of KV before the first step; it grows by one a step.
    query_len: tokens per request and step. compile: the compilation mode. primed: KV was filled, not computed.
    p10_ms, p50_ms, p90_ms: of `samples_ms`, wall time of a step; n of them.
    host_us, device_us: medians of host time over all phases and of the forward on the device (None without a GPU).
    launches, graph_launches: what the host starts per step, from a trace (None where nothing can be traced).
    launch_cost_us: host microseconds per launch by kind, measured in the same run.
    gb_s: bytes a step must read over p50_ms. floor_ms: those bytes at the measured copy bandwidth. tok_s: tokens
    a second. peak_mib: peak of the device allocator. phases_us: medians of host time per phase.
    launches_by_kind: `launches` and copies, split. emulated: the "graph" was the CPU's emulation.
    weights: "real" or "random". chunk: tokens of a prompt that ran beside the `batch` decodes, 0 in a pure decode step.
    rounds: the samples were taken in this many equal rounds, each beside a round of every row that it is compared with;
    1 where the row was measured in one go.
    """

    model: str
    dtype: str
    backend: str
    backend_version: str | None
    requested_mode: str
    mode: str
    size: int
    batch: int
    context: int
    query_len: int
    compile: str
    primed: bool
    p10_ms: float
    p50_ms: float
    p90_ms: float
    n: int
    samples_ms: tuple[float, ...]
    host_us: float
    device_us: float | None
    launches: int | None
    graph_launches: int
    launch_cost_us: dict[str, float]
    gb_s: float | None
    floor_ms: float | None
    tok_s: float
    peak_mib: float
    phases_us: dict[str, float] = dataclasses.field(default_factory=dict)
    launches_by_kind: dict[str, int] = dataclasses.field(default_factory=dict)
    emulated: bool = False
    weights: str = "random"
    chunk: int = 0
    rounds: int = 1

    @property
    def key(self) -> tuple[str, str, str, str, int, int, int]:
        """What tells rows of one recording apart: model, backend, compile, requested mode, batch, context, chunk."""
        return (self.model, self.backend, self.compile, self.requested_mode, self.batch, self.context, self.chunk)

    @property
    def host_outside_us(self) -> float:
        """Host time of all phases but the forward itself."""
        return self.host_us - self.phases_us.get("launch", 0.0)

    def measurement(self, kind: Kind, label: str = "") -> Measurement:
        """The samples as a number of a kind, to take ratios of."""
        return Measurement(
            Kind(kind), self.samples_ms, label or f"{self.requested_mode} batch {self.batch}", self.rounds
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**dataclasses.asdict(self), "samples_ms": list(self.samples_ms)}

    @classmethod
    def from_dict(cls, data: Any, where: str = "a row") -> Row:
        """Read what `as_dict` wrote, and check every value.

        Raises:
            RecordingError: a field is missing, unknown, of the wrong type, or disagrees with the samples.
        """
        check_fields(cls, data, where)
        row = cls(**{**data, "samples_ms": tuple(float(s) for s in data["samples_ms"])})
        row.check(where)
        return row

    def check(self, where: str = "a row") -> None:
        """Raise RecordingError unless the numbers of this row agree with each other."""
        check_samples(self, "ms", RESOLUTION_MS, where)
        if self.rounds < 1 or self.n % self.rounds:
            raise RecordingError(where, f"says {self.rounds} equal rounds of {self.n} samples", AGAIN)
        if not 1 <= self.batch * self.query_len <= self.size - self.chunk:
            beside = f" and a chunk of {self.chunk}" if self.chunk else ""
            ran = f"ran {self.batch} × {self.query_len} tokens{beside} in a size of {self.size}"
            raise RecordingError(where, ran, AGAIN)


def stored_samples(samples_ms: Iterable[float]) -> tuple[float, ...]:
    """Samples at the resolution in which they are kept, 0.1 µs; percentiles are taken of these."""
    return tuple(round(float(s), 4) for s in samples_ms)


@dataclasses.dataclass(frozen=True)
class Padded:
    """What a batch costs under an edited list of capture sizes, answered from recorded rows.

    row: None when the size it would run in was not recorded. size: the captured size, or the batch where it is eager.
    note: one sentence on what was looked up.
    """

    row: Row | None
    size: int
    mode: str
    note: str


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A configuration that was to be measured and could not be, with the engine's own reason.

    requested_mode: the graph mode refused; empty where the backend serves this model not at all.
    batch, context: the one point refused, such as a batch whose KV does not fit; 0 where all of them are.
    """

    model: str
    backend: str
    compile: str
    requested_mode: str
    reason: str
    batch: int = 0
    context: int = 0

    @property
    def key(self) -> tuple[str, str, str, str, int, int]:
        return (self.model, self.backend, self.compile, self.requested_mode, self.batch, self.context)


@dataclasses.dataclass(frozen=True)
class Setup:
    """What getting ready for one configuration took, before its first step.

    graphs: captured graphs of all sizes, `sizes` of them with a graph; capture_ms and graph_mib: of all together.
    compile_ms: tracing, compiling and reading the cache, 0 where nothing is compiled; from_cache: it was a warm start.
    """

    model: str
    backend: str
    compile: str
    requested_mode: str
    sizes: int
    graphs: int
    capture_ms: float
    graph_mib: float
    compile_ms: float
    from_cache: bool

    @property
    def key(self) -> tuple[str, str, str, str]:
        return (self.model, self.backend, self.compile, self.requested_mode)


@dataclasses.dataclass(frozen=True)
class Captured:
    """What the graphs of one size took when they were captured under `requested_mode`.

    mode: FULL or PIECEWISE, the kind of graph. graphs: one of a FULL step, one per piece of a PIECEWISE one.
    ms, mib: time and device memory. kernel_nodes: kernels in them together, None where nobody counted.
    """

    model: str
    backend: str
    compile: str
    requested_mode: str
    mode: str
    size: int
    graphs: int
    ms: float
    mib: float
    kernel_nodes: int | None = None

    @property
    def key(self) -> tuple[str, str, str, str, str, int]:
        return (self.model, self.backend, self.compile, self.requested_mode, self.mode, self.size)


@dataclasses.dataclass(frozen=True)
class Recording:
    """Rows of one run, where they come from, what could not take part, and what getting ready took."""

    provenance: Provenance
    rows: tuple[Row, ...]
    refused: tuple[Refusal, ...] = ()
    setups: tuple[Setup, ...] = ()
    captures: tuple[Captured, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The object that `labkit bench` and `labkit record` print, and that a file holds."""
        out: dict[str, Any] = {
            "schema": SCHEMA,
            "provenance": self.provenance.as_dict(),
            "rows": [row.as_dict() for row in self.rows],
        }
        for name, kept in (
            ("refused", self.refused), ("setups", self.setups), ("captures", self.captures),
        ):  # fmt: skip
            if kept:
                out[name] = [dataclasses.asdict(one) for one in kept]
        return out

    @classmethod
    def from_dict(cls, data: Any, where: str = "a recording") -> Recording:
        """Read what `as_dict` wrote, and check everything.

        Raises:
            RecordingError, ProvenanceError: with what is wrong and in which row.
        """
        if not isinstance(data, Mapping):
            raise RecordingError(
                where, f"holds {type(data).__name__}, not an object", "Name a file that `labkit record` wrote."
            )
        if data.get("table"):
            raise RecordingError(
                where, f"is a table of {data['table']!r}, not of steps", "`labkit recordings` reads every kind."
            )
        data = migrate(data, SCHEMA, MIGRATIONS, where)
        missing = [name for name in ("provenance", "rows") if name not in data]
        if missing or not isinstance(data["rows"], list):
            raise RecordingError(where, "has no provenance or no list of rows", "Record again with this version.")
        provenance = Provenance.from_dict(data["provenance"])
        rows = tuple(Row.from_dict(row, f"{where}, row {i}") for i, row in enumerate(data["rows"]))
        out = cls(
            provenance, rows, tuple(read_all(Refusal, data, "refused", where)),
            tuple(read_all(Setup, data, "setups", where)), tuple(read_all(Captured, data, "captures", where)),
        )  # fmt: skip
        out.check(where)
        return out

    def check(self, where: str = "a recording") -> None:
        """Raise RecordingError unless rows are distinct, can be measurements, and have enough samples where stored."""
        seen: set[tuple[Any, ...]] = set()
        for i, row in enumerate(self.rows):
            if row.key in seen:
                raise RecordingError(f"{where}, row {i}", f"repeats {row.key}", "Keep one row of each configuration.")
            seen.add(row.key)
            if self.provenance.kind is Kind.RECORDED and row.n < MIN_SAMPLES:
                raise RecordingError(
                    f"{where}, row {i}",
                    f"has {row.n} samples, a recording needs {MIN_SAMPLES}",
                    "Record with more steps.",
                )
        if self.rows and self.provenance.n > min(row.n for row in self.rows):
            raise RecordingError(where, f"says n={self.provenance.n} and has a row with fewer samples", "Record again.")
        if self.provenance.kind is not Kind.SIMULATED:
            check_not_made_up(self.rows, "ms", where)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a compressed file, whole or not at all. What is stored is a recording: LIVE becomes RECORDED."""
        kind = Kind.RECORDED if self.provenance.kind is Kind.LIVE else self.provenance.kind
        out = dataclasses.replace(self, provenance=self.provenance.replace(kind=kind))
        out.check(Path(path).name)
        return write_object(Path(path), out.as_dict())

    # --- look-up ---------------------------------------------------------------------------------------------------

    def values(self, field: str, **fixed: Any) -> list[Any]:
        """The distinct recorded values of a row's field, ascending, among rows that match `fixed`."""
        names = [f.name for f in dataclasses.fields(Row)]
        for name in (field, *fixed):
            if name not in names:
                raise RecordingError(f"values({name!r})", "a row has no such field", did_you_mean(name, names))
        return sorted({getattr(row, field) for row in self._matching(fixed)})

    def find(
        self,
        *,
        model: str,
        backend: str,
        requested_mode: str,
        batch: int,
        context: int,
        compile: str = "NONE",
    ) -> Row | None:
        """The row of exactly this configuration, or None.

        A decode step runs the same way under every mode that gives decodes a FULL graph; where the mode asked for was
        not recorded itself, a row whose step ran in that mode answers (`row.requested_mode` names what was recorded).
        """
        where = {"model": model, "backend": backend, "compile": compile, "batch": batch, "context": context, "chunk": 0}
        decode = "FULL" if requested_mode.startswith("FULL") else requested_mode
        rows = [
            row
            for row in self._matching(where)
            if row.requested_mode == requested_mode or (row.mode == decode and row.size == row.batch)
        ]
        # A graph of decodes alone is one thing under both modes that have it; FULL's serves mixed batches as well.
        alike = {"FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"}
        rows.sort(key=lambda r: (r.requested_mode != requested_mode, not alike >= {r.requested_mode, requested_mode}))
        return rows[0] if rows else None

    def why_not(
        self, *, model: str, backend: str, requested_mode: str, batch: int, context: int, compile: str = "NONE"
    ) -> str | None:
        """Why this configuration has no row, in the engine's words when it was recorded; None where nobody said.

        A point that does not fit is refused at the batch its graph would have run: ask for the padded size. One that
        was refused under a mode with FULL graphs is refused under all of them, for the KV that is missing is the same.
        """
        asked = (model, backend, compile)
        for one in self.refused:
            if (one.model, one.backend, one.compile) != asked:
                continue
            same = one.requested_mode in ("", requested_mode)
            if (one.batch, one.context) == (0, 0):
                if same:
                    return one.reason
            elif (one.batch, one.context) == (batch, context) and (
                same or (one.requested_mode.startswith("FULL") and requested_mode.startswith("FULL"))
            ):
                return one.reason
        return None

    def snap(self, field: str, value: float, **fixed: Any) -> Any:
        """The recorded value of `field` nearest to `value`; the lower one of two that are equally near."""
        points = self.values(field, **fixed)
        if not points:
            raise RecordingError(
                f"{field} near {value}", f"nothing is recorded for {fixed}", "Pick another configuration."
            )
        return min(points, key=lambda p: (abs(p - value), p))

    def padded(
        self, *, model: str, backend: str, batch: int, context: int, sizes: Sequence[int],
        requested_mode: str = "FULL", compile: str = "NONE",
    ) -> Padded:  # fmt: skip
        """What `batch` would cost were these the capture sizes: the recorded step of the size it is padded to.

        A graph does the work of its size whatever part of it is padding, so the recorded step of a full batch of that
        size answers, at the same context. (Padded rows read no KV, so at long contexts the answer is an upper bound.)
        Above the largest size the batch runs eagerly, unpadded.
        """
        ordered = sorted(set(sizes))
        at = bisect.bisect_left(ordered, batch)
        common: dict[str, Any] = {"model": model, "backend": backend, "context": context, "compile": compile}
        if at == len(ordered):
            row = self.find(**common, requested_mode="NONE", batch=batch)
            largest = ordered[-1] if ordered else 0
            note = f"batch {batch} is above the largest size {largest}: it runs eagerly"
            return Padded(row, batch, "NONE", note if row else f"{note}, and NONE was not recorded at this batch")
        size = ordered[at]
        row = self.find(**common, requested_mode=requested_mode, batch=size)
        note = f"batch {batch} runs in the graph of size {size}" + (
            f", {size - batch} of it padding" if size > batch else ""
        )
        mode = "FULL" if requested_mode.startswith("FULL") else requested_mode
        return Padded(row, size, mode, note if row else f"{note}, and that size was not recorded")

    @functools.cached_property
    def _by_place(self) -> dict[tuple[Any, ...], list[Row]]:
        """Rows by (model, backend) and by (model, backend, context): a panel asks for one of thousands, often."""
        found: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.rows:
            found.setdefault((row.model, row.backend), []).append(row)
            found.setdefault((row.model, row.backend, row.context), []).append(row)
        return found

    def _matching(self, fixed: Mapping[str, Any]) -> Iterable[Row]:
        rows: Iterable[Row] = self.rows
        if "model" in fixed and "backend" in fixed:
            rows = self._by_place.get(
                (fixed["model"], fixed["backend"], *([fixed["context"]] if "context" in fixed else [])), ()
            )
            fixed = {name: value for name, value in fixed.items() if name not in ("model", "backend", "context")}
        tests = list(fixed.items())
        return (row for row in rows if all(getattr(row, name) == value for name, value in tests))


def load(path: str | os.PathLike[str]) -> Recording:
    """Read and check a recording, compressed or not.

    Raises:
        RecordingError, ProvenanceError: the file is missing, damaged, of another schema, or disagrees with itself.
    """
    path = Path(path)
    return Recording.from_dict(read_object(path), path.name)


@functools.cache
def shipped() -> tuple[Recording, ...]:
    """The recordings that come with the package, by file name; read once."""
    if not SHIPPED.is_dir():
        return ()
    return tuple(load(path) for path in sorted(SHIPPED.glob("*.json.gz")))


def _with_rounds_and_points(data: dict[str, Any]) -> dict[str, Any]:
    """Schema 1 to 2: rows say how many rounds they were taken in, refusals which point they are about."""
    rows, refused = data.get("rows"), data.get("refused")
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict):
            row.setdefault("chunk", 0)
            row.setdefault("rounds", 1)
    for one in refused if isinstance(refused, list) else ():
        if isinstance(one, dict):
            one.setdefault("batch", 0)
            one.setdefault("context", 0)
    return data


#: From each older schema to the next.
MIGRATIONS = {1: _with_rounds_and_points}

__all__ = [
    "AGAIN", "MIN_SAMPLES", "SCHEMA", "Captured", "Padded", "ProvenanceError", "Recording", "RecordingError", "Refusal",
    "Row", "Setup", "check_fields", "check_samples", "load", "read_object", "shipped", "stored_samples",
    "write_atomically", "write_object",
]  # fmt: skip
