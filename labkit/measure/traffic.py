"""Waits of requests under one traffic and several schedulings: schema, checks, files. Refuses to know how they ran.

A file is one JSON object `{"schema", "table": "requests", "provenance", "rows"}`, compressed or as
`labkit bench requests --json` prints it. Every wait travels with its row, in the order in which it was measured.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit.measure.provenance import Kind, Provenance
from labkit.measure.recordings import SHIPPED
from labkit.measure.requests import Waits, summarize
from labkit.measure.stats import Measurement, Ratio, paired_ratio
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
TABLE = "requests"
SHIPPED_REQUESTS = SHIPPED / TABLE
#: Waits are stored to 0.1 µs; percentiles of what is stored may differ from what is written by this much, in ms.
RESOLUTION_MS = 1e-4


@dataclasses.dataclass(frozen=True)
class RequestRow:
    """One scheduling of one traffic, run `runs` times. Times in milliseconds.

    The traffic: `decodes` requests with `context` tokens of KV (primed) get one token after another, `tokens` in all;
    after `lead` steps `prompts` prompts of `prompt` tokens arrive, one before each step.
    scheduling: its name. prefill_first, chunk, max_num_batched_tokens: the settings behind it; a chunk of 0 is no cap.
    samples_ttft_ms: time to first token of every prompt, run by run; n = runs × prompts. samples_queue_ms: the part
    of it before the first of its tokens ran. samples_itl_ms: the waits between tokens of a decoding request, run by
    run, `tokens − 1` of them each; in every run all decoding requests got theirs in the same steps.
    during: the waits of a run in which prompts were computed, by index; the same in every run.
    p50_itl_ms, p99_itl_ms, worst_itl_ms: of all waits. requested_mode: the graph mode asked for.
    """

    model: str
    dtype: str
    backend: str
    backend_version: str | None
    requested_mode: str
    compile: str
    weights: str
    scheduling: str
    prefill_first: bool
    chunk: int
    max_num_batched_tokens: int
    decodes: int
    context: int
    prompt: int
    prompts: int
    lead: int
    tokens: int
    runs: int
    n: int
    samples_ttft_ms: tuple[float, ...]
    p10_ttft_ms: float
    p50_ttft_ms: float
    p90_ttft_ms: float
    samples_queue_ms: tuple[float, ...]
    samples_itl_ms: tuple[float, ...]
    during: tuple[int, ...]
    p50_itl_ms: float
    p99_itl_ms: float
    worst_itl_ms: float

    @property
    def traffic(self) -> tuple[Any, ...]:
        """What rows must share to be compared: everything but the scheduling."""
        return (
            self.model, self.dtype, self.backend, self.compile, self.requested_mode, self.max_num_batched_tokens,
            self.decodes, self.context, self.prompt, self.prompts, self.lead, self.tokens,
        )  # fmt: skip

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells rows of one recording apart."""
        return (*self.traffic, self.scheduling)

    @property
    def waits(self) -> tuple[tuple[float, ...], ...]:
        """The waits between tokens, one tuple per run."""
        n = self.tokens - 1
        return tuple(self.samples_itl_ms[i * n : (i + 1) * n] for i in range(self.runs))

    @property
    def spikes(self) -> Waits:
        """The waits in which prompts were computed."""
        return summarize([run[i] for run in self.waits for i in self.during])

    @property
    def others(self) -> Waits:
        """The waits in which no prompt was computed."""
        inside = set(self.during)
        return summarize([ms for run in self.waits for i, ms in enumerate(run) if i not in inside])

    def worst_per_run(self, kind: Kind) -> Measurement:
        """The longest wait between two tokens of each run."""
        return self._measurement(kind, tuple(map(max, self.waits)), "worst wait between tokens")

    def ttft_per_run(self, kind: Kind) -> Measurement:
        """The mean time to first token of each run's prompts."""
        per = self.prompts
        runs = tuple(sum(self.samples_ttft_ms[i * per : (i + 1) * per]) / per for i in range(self.runs))
        return self._measurement(kind, runs, "time to first token")

    def _measurement(self, kind: Kind, samples: tuple[float, ...], what: str) -> Measurement:
        # Schedulings take turns run by run: each pair of runs is a round, and the interval over pairs shows the drift.
        return Measurement(Kind(kind), samples, f"{self.scheduling}: {what}")

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        out = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in out.items()}

    @classmethod
    def from_dict(cls, data: Any, where: str = "a row") -> RequestRow:
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
        check_samples(self, "ttft_ms", RESOLUTION_MS, where)
        if min(self.runs, self.prompts, self.decodes, self.tokens - 1) < 1 or self.n != self.runs * self.prompts:
            raise RecordingError(where, f"says n={self.n} for {self.runs} runs of {self.prompts} prompts", AGAIN)
        gaps = self.tokens - 1
        if len(self.samples_itl_ms) != self.runs * gaps or len(self.samples_queue_ms) != self.n:
            raise RecordingError(where, f"does not hold {gaps} waits for each of {self.runs} runs", AGAIN)
        if not all(math.isfinite(ms) and ms > 0 for ms in self.samples_itl_ms) or min(self.samples_queue_ms) < 0:
            raise RecordingError(where, "holds a wait that is not a time", AGAIN)
        if any(queue > ttft for queue, ttft in zip(self.samples_queue_ms, self.samples_ttft_ms, strict=True)):
            raise RecordingError(where, "a prompt waited longer than until its first token", AGAIN)
        if not self.during or list(self.during) != sorted(set(self.during)) or self.during[-1] >= gaps:
            raise RecordingError(where, f"during={list(self.during)} does not name some of {gaps} waits", AGAIN)
        found = summarize(self.samples_itl_ms)
        for name in ("p50", "p99", "worst"):
            stored, computed = getattr(self, f"{name}_itl_ms"), getattr(found, name)
            if not abs(stored - computed) <= RESOLUTION_MS:
                raise RecordingError(where, f"says {name}_itl_ms={stored} and its waits give {computed:.4f}", AGAIN)


@dataclasses.dataclass(frozen=True)
class SchedulingPair:
    """One scheduling beside another under the same traffic; ratios are first over second, run by run.

    worst: of the longest wait between two tokens. ttft: of the time to first token of the prompts.
    """

    first: RequestRow
    second: RequestRow
    worst: Ratio
    ttft: Ratio

    @property
    def sentence(self) -> str:
        """What was shown, in one sentence."""
        names = f"{self.first.scheduling} against {self.second.scheduling}"
        return f"{names}: worst wait between tokens {self.worst.text}, time to first token {self.ttft.text}."

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, the rows by name."""
        out: dict[str, Any] = {"schedulings": [self.first.scheduling, self.second.scheduling]}
        for name in ("worst", "ttft"):
            one: Ratio = getattr(self, name)
            out[name] = {"ratio": one.value, "low": one.low, "high": one.high, "shown": one.shown, "n": one.n}
        return {**out, "sentence": self.sentence}


@dataclasses.dataclass(frozen=True)
class RequestRecording:
    """Rows of one run and where they come from."""

    provenance: Provenance
    rows: tuple[RequestRow, ...]

    def pairs(self, base: str | None = None) -> list[SchedulingPair]:
        """Every scheduling beside the one called `base` (default: the first) of the same traffic."""
        kind, out = self.provenance.kind, []
        first: dict[tuple[Any, ...], RequestRow] = {}
        for row in self.rows:
            if base in (None, row.scheduling):
                first.setdefault(row.traffic, row)
        for row in self.rows:
            other = first.get(row.traffic)
            if other is not None and other is not row and other.runs == row.runs:
                worst = paired_ratio(row.worst_per_run(kind), other.worst_per_run(kind))
                out.append(
                    SchedulingPair(row, other, worst, paired_ratio(row.ttft_per_run(kind), other.ttft_per_run(kind)))
                )
        return out

    def as_dict(self) -> dict[str, Any]:
        """The object that `labkit bench requests` prints and that a file holds."""
        return {
            "schema": SCHEMA,
            "table": TABLE,
            "provenance": self.provenance.as_dict(),
            "rows": [row.as_dict() for row in self.rows],
        }

    @classmethod
    def from_dict(cls, data: Any, where: str = "a recording") -> RequestRecording:
        """Read what `as_dict` wrote, and check everything.

        Raises:
            RecordingError, ProvenanceError: with what is wrong and in which row.
        """
        if not isinstance(data, Mapping) or data.get("table") != TABLE:
            raise RecordingError(where, "is no recording of requests", "Name a file of `bench requests --out`.")
        data = migrate(data, SCHEMA, {}, where)
        if "provenance" not in data or not isinstance(data.get("rows"), list):
            raise RecordingError(where, "has no provenance or no list of rows", "Record again with this version.")
        rows = tuple(RequestRow.from_dict(row, f"{where}, row {i}") for i, row in enumerate(data["rows"]))
        out = cls(Provenance.from_dict(data["provenance"]), rows)
        out.check(where)
        return out

    def check(self, where: str = "a recording") -> None:
        """Raise RecordingError unless rows are distinct and, where stored, have enough runs and real samples."""
        seen: set[tuple[Any, ...]] = set()
        for i, row in enumerate(self.rows):
            if row.key in seen:
                raise RecordingError(f"{where}, row {i}", f"repeats {row.key}", "Keep one row of each configuration.")
            seen.add(row.key)
            if self.provenance.kind is Kind.RECORDED and row.runs < MIN_SAMPLES:
                why = f"has {row.runs} runs, a recording needs {MIN_SAMPLES}"
                raise RecordingError(f"{where}, row {i}", why, "Record with more runs.")
        for unit in ("ttft_ms", "itl_ms"):
            check_not_made_up(self.rows, unit, where)
        if self.rows and self.provenance.n > min(row.n for row in self.rows):
            raise RecordingError(where, f"says n={self.provenance.n} and has a row with fewer samples", "Record again.")

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a compressed file, whole or not at all. What is stored is a recording: LIVE becomes RECORDED."""
        kind = Kind.RECORDED if self.provenance.kind is Kind.LIVE else self.provenance.kind
        out = dataclasses.replace(self, provenance=self.provenance.replace(kind=kind))
        out.check(Path(path).name)
        return write_object(Path(path), out.as_dict())


def load_requests(path: str | os.PathLike[str]) -> RequestRecording:
    """Read and check a recording of requests, compressed or not.

    Raises:
        RecordingError, ProvenanceError: the file is missing, damaged, of another schema, or disagrees with itself.
    """
    path = Path(path)
    return RequestRecording.from_dict(read_object(path), path.name)


@functools.cache
def shipped_requests() -> tuple[RequestRecording, ...]:
    """The recordings of requests that come with the package, by file name; read once."""
    if not SHIPPED_REQUESTS.is_dir():
        return ()
    return tuple(load_requests(path) for path in sorted(SHIPPED_REQUESTS.glob("*.json.gz")))
