"""Times of attention calls with their origin: schema, checks, files. Refuses to know how they were measured.

A file is one JSON object `{"schema", "table": "attention", "provenance", "rows", "refused"}`, compressed or as
`labkit bench attention --json` prints it. Samples travel with every row, as in `recordings`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit.measure.provenance import Kind, Provenance
from labkit.measure.recordings import SHIPPED
from labkit.measure.stats import Measurement
from labkit.measure.storage import (
    AGAIN,
    MIN_SAMPLES,
    RecordingError,
    check_fields,
    check_not_made_up,
    check_samples,
    migrate,
    read_object,
    write_object,
)

SCHEMA = 1
TABLE = "attention"
KINDS = ("decode", "mixed", "prefill")
#: Samples are stored to a nanosecond; percentiles are rounded in the same place. In µs.
RESOLUTION_US = 2e-3

SHIPPED_ATTENTION = SHIPPED / TABLE


@dataclasses.dataclass(frozen=True)
class AttentionRow:
    """One way of calling one backend on one batch. Times in microseconds of one call.

    kind: "decode" (one token each), "prefill" (whole prompts without a past) or "mixed". context: the longest KV.
    kv: "warm" or "rotated" over `sets` sets of KV. launch: "graph" (many calls in one graph, time divided) or "eager".
    call: "labkit" (through the backend's `forward`) or "bare" (the library's own call, planned once).
    num_splits_asked: the setting, 0 for the backend's choice. num_splits: what ran, 1 where nothing says otherwise.
    p10_us, p50_us, p90_us: of `samples_us`. gb_s: bytes of K and V read once over p50_us. tflop_s: 4 · head_size ·
    num_heads floating-point operations (two products, a multiplication and an addition each) for every pair of a new
    token and a key that it sees, over p50_us; a request of q new tokens over kv of KV has q(kv − q) + q(q + 1)/2 pairs.
    prepare_us: host time of `prepare`, once per step; 0 for a bare call. plan: what `describe` says.
    """

    kind: str
    backend: str
    backend_version: str | None
    dtype: str
    batch: int
    context: int
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    kv: str
    sets: int
    launch: str
    p10_us: float
    p50_us: float
    p90_us: float
    n: int
    samples_us: tuple[float, ...]
    gb_s: float
    tflop_s: float
    prepare_us: float
    call: str = "labkit"
    num_splits_asked: int = 0
    num_splits: int = 1
    split_mixed_batches: bool = False
    batch_invariant: bool = False
    flash_attn_version: int | None = None
    kv_cache_layout: str = "NHD"
    plan: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells rows of one recording apart."""
        return (
            self.backend, self.flash_attn_version, self.call, self.kv, self.launch, self.query_lens, self.kv_lens,
            self.num_heads, self.num_kv_heads, self.head_size, self.block_size, self.dtype, self.num_splits_asked,
            self.split_mixed_batches, self.batch_invariant, self.kv_cache_layout,
        )  # fmt: skip

    @property
    def name(self) -> str:
        """The backend with everything that was asked of it: `TRITON_ATTN, 4 splits`."""
        out = self.backend if self.flash_attn_version is None else f"{self.backend} {self.flash_attn_version}"
        parts = (
            (self.call == "bare", "bare"),
            (self.num_splits_asked > 0, f"{self.num_splits_asked} split{'s' * (self.num_splits_asked > 1)}"),
            (self.split_mixed_batches, "two calls"),
            (self.batch_invariant, "batch-invariant"),
            (self.kv_cache_layout != "NHD", self.kv_cache_layout),
        )
        return ", ".join([out, *(words for on, words in parts if on)])

    def measurement(self, kind: Kind) -> Measurement:
        """The samples as a number of a kind, to take ratios of."""
        return Measurement(Kind(kind), self.samples_us, f"{self.name} {self.kind} batch {self.batch}")

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        out = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in out.items()}

    @classmethod
    def from_dict(cls, data: Any, where: str = "a row") -> AttentionRow:
        """Read what `as_dict` wrote, and check every value.

        Raises:
            RecordingError: a field is missing, unknown, of the wrong type, or disagrees with others.
        """
        check_fields(cls, data, where)
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        row = cls(**values)
        row.check(where)
        return row

    def check(self, where: str = "a row") -> None:
        """Raise RecordingError unless the numbers of this row agree with each other."""
        check_samples(self, "us", RESOLUTION_US, where)
        for name, options in (
            ("kind", KINDS), ("kv", ("warm", "rotated")), ("launch", ("graph", "eager")), ("call", ("labkit", "bare")),
        ):  # fmt: skip
            if getattr(self, name) not in options:
                raise RecordingError(where, f"{name}={getattr(self, name)!r} is none of {', '.join(options)}", AGAIN)
        lens = len(self.query_lens), len(self.kv_lens)
        if lens != (self.batch, self.batch) or self.context != max(self.kv_lens, default=0):
            raise RecordingError(where, f"has lengths of {lens[0]} and {lens[1]} requests, batch={self.batch}", AGAIN)


@dataclasses.dataclass(frozen=True)
class AttentionRecording:
    """Rows of one run, where they come from, and which backends could not take part (name → why)."""

    provenance: Provenance
    rows: tuple[AttentionRow, ...]
    refused: dict[str, str] = dataclasses.field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The object that `labkit bench attention` prints and that a file holds."""
        return {
            "schema": SCHEMA,
            "table": TABLE,
            "provenance": self.provenance.as_dict(),
            "rows": [row.as_dict() for row in self.rows],
            "refused": dict(self.refused),
        }

    @classmethod
    def from_dict(cls, data: Any, where: str = "a recording") -> AttentionRecording:
        """Read what `as_dict` wrote, and check everything.

        Raises:
            RecordingError, ProvenanceError: with what is wrong and in which row.
        """
        if not isinstance(data, Mapping) or data.get("table") != TABLE:
            raise RecordingError(where, "is no recording of attention calls", "Name a file of `bench attention --out`.")
        data = migrate(data, SCHEMA, {}, where)
        if "provenance" not in data or not isinstance(data.get("rows"), list):
            raise RecordingError(where, "has no provenance or no list of rows", "Record again with this version.")
        refused = data.get("refused", {})
        if not isinstance(refused, Mapping) or not all(isinstance(x, str) for pair in refused.items() for x in pair):
            raise RecordingError(where, "says who was refused in another form", "Record again with this version.")
        rows = tuple(AttentionRow.from_dict(row, f"{where}, row {i}") for i, row in enumerate(data["rows"]))
        out = cls(Provenance.from_dict(data["provenance"]), rows, dict(refused))
        out.check(where)
        return out

    def check(self, where: str = "a recording") -> None:
        """Raise RecordingError unless rows are distinct and, where stored, have enough samples."""
        seen: set[tuple[Any, ...]] = set()
        for i, row in enumerate(self.rows):
            if row.key in seen:
                raise RecordingError(f"{where}, row {i}", f"repeats {row.key}", "Keep one row of each configuration.")
            seen.add(row.key)
            if self.provenance.kind is Kind.RECORDED and row.n < MIN_SAMPLES:
                raise RecordingError(
                    f"{where}, row {i}",
                    f"has {row.n} samples, a recording needs {MIN_SAMPLES}",
                    "Record with more samples.",
                )
        if self.rows and self.provenance.n > min(row.n for row in self.rows):
            raise RecordingError(where, f"says n={self.provenance.n} and has a row with fewer samples", "Record again.")
        if self.provenance.kind is not Kind.SIMULATED:
            check_not_made_up(self.rows, "us", where)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a compressed file, whole or not at all. What is stored is a recording: LIVE becomes RECORDED."""
        kind = Kind.RECORDED if self.provenance.kind is Kind.LIVE else self.provenance.kind
        out = dataclasses.replace(self, provenance=self.provenance.replace(kind=kind))
        out.check(Path(path).name)
        return write_object(Path(path), out.as_dict())


def load_attention(path: str | os.PathLike[str]) -> AttentionRecording:
    """Read and check a recording of attention calls, compressed or not.

    Raises:
        RecordingError, ProvenanceError: the file is missing, damaged, of another schema, or disagrees with itself.
    """
    path = Path(path)
    return AttentionRecording.from_dict(read_object(path), path.name)


@functools.cache
def shipped_attention() -> tuple[AttentionRecording, ...]:
    """The recordings of attention calls that come with the package, by file name; read once."""
    if not SHIPPED_ATTENTION.is_dir():
        return ()
    return tuple(load_attention(path) for path in sorted(SHIPPED_ATTENTION.glob("*.json.gz")))
