"""Decode steps of several engines side by side: what a step is, schema, checks, files. Refuses to know any engine.

A **step** here is the same thing for every engine: the time from one token of a batch being on the host to the next,
while every request of the batch is decoding. Prefill and the start of the batch are not in it. Every row names the
engine, its version and the way in which it was used; a row whose tokens do not agree with labkit's is in no ratio.

A file is one JSON object `{"schema", "table": "beside", "provenance", "rows", "refused"}`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.errors import LabkitError
from labkit.measure.provenance import Kind, Provenance
from labkit.measure.recordings import SHIPPED
from labkit.measure.stats import Measurement, Ratio, compared
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
TABLE = "beside"
#: Samples are stored to 0.1 µs, as those of `LLM.step()`.
RESOLUTION_MS = 1e-4

SHIPPED_BESIDE = SHIPPED / TABLE
#: labkit's own name among the engines.
OURS = "labkit"


def decode_steps(stamps: Sequence[Sequence[float]], warmup: int, steps: int) -> tuple[float, ...]:
    """Milliseconds of `steps` steps in which the whole batch decoded, after `warmup` of them.

    Args:
        stamps: for each request the seconds at which each of its tokens was on the host, ascending.

    The window opens when the last request has its first token and closes when the first one has its last; in it one
    request is followed from token to token.

    Raises:
        LabkitError: the whole batch was not decoding for long enough.
    """
    if not stamps or not all(stamps):
        raise LabkitError("decode steps", "a request has no token", "Let every request generate.")
    last_to_start = max(stamps, key=lambda one: one[0])
    closes = min(one[-1] for one in stamps)
    inside = [t for t in last_to_start if t <= max(closes, last_to_start[0])]
    found = [(b - a) * 1e3 for a, b in zip(inside, inside[1:], strict=False)][warmup : warmup + steps]
    if len(found) < steps:
        raise LabkitError(
            f"{steps} decode steps after {warmup}",
            f"only {len(found)} steps had all {len(stamps)} requests decoding",
            "Let requests generate more tokens, or give the engine room for all of them at once.",
        )
    return tuple(round(ms, 4) for ms in found)


@dataclasses.dataclass(frozen=True)
class BesideRow:
    """One way of using one engine, at one batch.

    engine, version, way: as in "transformers", "5.24.0", "static cache, compiled". settings: what decided how it ran.
    weights: "real" or "random". context: tokens of each prompt. p10_ms, p50_ms, p90_ms: of `samples_ms`, n of them,
    taken in `rounds` equal rounds that took turns. tok_s: tokens a second of the whole batch.
    agreement: how the tokens compare with those of labkit's eager step, in words; agrees: equal, or first different
    where the two best logits are closer than rounding tells apart. emulated: the "graphs" were a CPU's emulation.
    """

    engine: str
    version: str
    way: str
    settings: dict[str, str]
    model: str
    weights: str
    dtype: str
    batch: int
    context: int
    p10_ms: float
    p50_ms: float
    p90_ms: float
    n: int
    samples_ms: tuple[float, ...]
    rounds: int
    tok_s: float
    agreement: str
    agrees: bool
    emulated: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells rows of one recording apart."""
        return self.engine, self.way, self.model, self.dtype, self.batch, self.context

    @property
    def name(self) -> str:
        """`transformers 5.24.0, continuous batching`: no figure of an engine goes without."""
        return f"{self.engine} {self.version}, {self.way}"

    def measurement(self, kind: Kind) -> Measurement:
        """The samples as a number of a kind, to take ratios of."""
        return Measurement(Kind(kind), self.samples_ms, f"{self.name} batch {self.batch}", self.rounds)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**dataclasses.asdict(self), "samples_ms": list(self.samples_ms)}

    @classmethod
    def from_dict(cls, data: Any, where: str = "a row") -> BesideRow:
        """Read what `as_dict` wrote, and check every value.

        Raises:
            RecordingError: a field is missing, unknown, of the wrong type, or disagrees with the samples.
        """
        check_fields(cls, data, where)
        row = cls(**{**data, "settings": dict(data["settings"]), "samples_ms": tuple(map(float, data["samples_ms"]))})
        row.check(where)
        return row

    def check(self, where: str = "a row") -> None:
        """Raise RecordingError unless the numbers of this row agree with each other and its engine is named in full."""
        check_samples(self, "ms", RESOLUTION_MS, where)
        if not (self.engine and self.version and self.way):
            raise RecordingError(where, "does not name engine, version and way", AGAIN)
        if self.rounds < 1 or self.n % self.rounds:
            raise RecordingError(where, f"says {self.rounds} equal rounds of {self.n} samples", AGAIN)
        if abs(self.tok_s - self.batch / self.p50_ms * 1e3) > 1e-3 * self.tok_s:
            raise RecordingError(where, f"says {self.tok_s} tokens/s, and its median gives another number", AGAIN)


@dataclasses.dataclass(frozen=True)
class BesideRecording:
    """Rows of one process, where they come from, and which ways could not take part (way → why)."""

    provenance: Provenance
    rows: tuple[BesideRow, ...]
    refused: dict[str, str] = dataclasses.field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The object that `labkit compare transformers` prints and that a file holds."""
        return {
            "schema": SCHEMA,
            "table": TABLE,
            "provenance": self.provenance.as_dict(),
            "rows": [row.as_dict() for row in self.rows],
            "refused": dict(self.refused),
        }

    @classmethod
    def from_dict(cls, data: Any, where: str = "a recording") -> BesideRecording:
        """Read what `as_dict` wrote, and check everything.

        Raises:
            RecordingError, ProvenanceError: with what is wrong and in which row.
        """
        if not isinstance(data, Mapping) or data.get("table") != TABLE:
            raise RecordingError(
                where, "is no recording of engines side by side", "Name a file of `compare transformers --out`."
            )
        data = migrate(data, SCHEMA, {}, where)
        if "provenance" not in data or not isinstance(data.get("rows"), list):
            raise RecordingError(where, "has no provenance or no list of rows", "Record again with this version.")
        refused = data.get("refused", {})
        if not isinstance(refused, Mapping) or not all(isinstance(x, str) for pair in refused.items() for x in pair):
            raise RecordingError(where, "says who was refused in another form", "Record again with this version.")
        rows = tuple(BesideRow.from_dict(row, f"{where}, row {i}") for i, row in enumerate(data["rows"]))
        out = cls(Provenance.from_dict(data["provenance"]), rows, dict(refused))
        out.check(where)
        return out

    def check(self, where: str = "a recording") -> None:
        """Raise RecordingError unless rows are distinct and, where stored, have enough samples."""
        seen: set[tuple[Any, ...]] = set()
        for i, row in enumerate(self.rows):
            if row.key in seen:
                raise RecordingError(f"{where}, row {i}", f"repeats {row.key}", "Keep one row of each way.")
            seen.add(row.key)
            if self.provenance.kind is Kind.RECORDED and row.n < MIN_SAMPLES:
                raise RecordingError(
                    f"{where}, row {i}", f"has {row.n} samples, a recording needs {MIN_SAMPLES}", "Take more steps."
                )
        if self.rows and self.provenance.n > min(row.n for row in self.rows):
            raise RecordingError(where, f"says n={self.provenance.n} and has a row with fewer samples", AGAIN)
        if self.provenance.kind is not Kind.SIMULATED:
            check_not_made_up(self.rows, "ms", where)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a compressed file, whole or not at all. What is stored is a recording: LIVE becomes RECORDED."""
        kind = Kind.RECORDED if self.provenance.kind is Kind.LIVE else self.provenance.kind
        out = dataclasses.replace(self, provenance=self.provenance.replace(kind=kind))
        out.check(Path(path).name)
        return write_object(Path(path), out.as_dict())


def load_beside(path: str | os.PathLike[str]) -> BesideRecording:
    """Read and check a recording of engines side by side, compressed or not.

    Raises:
        RecordingError, ProvenanceError: the file is missing, damaged, of another schema, or disagrees with itself.
    """
    path = Path(path)
    return BesideRecording.from_dict(read_object(path), path.name)


@functools.cache
def shipped_beside() -> tuple[BesideRecording, ...]:
    """The recordings of engines side by side that come with the package, by file name; read once."""
    if not SHIPPED_BESIDE.is_dir():
        return ()
    return tuple(load_beside(path) for path in sorted(SHIPPED_BESIDE.glob("*.json.gz")))


@dataclasses.dataclass(frozen=True)
class BesidePair:
    """Another engine's row beside labkit's of the same model, batch and context. ratio: theirs over ours; None where
    the tokens do not agree, since two different computations are not compared."""

    theirs: BesideRow
    ours: BesideRow
    ratio: Ratio | None
    torch: str

    @property
    def sentence(self) -> str:
        """What came out, with everything that such a sentence must name."""
        head = f"Batch {self.theirs.batch}: a step of {self.theirs.name}"
        if self.ratio is None:
            return f"{head}, is not compared with {self.ours.name}: {self.theirs.agreement}."
        where = f"in process, torch {self.torch}, {self.ratio.kind}"
        emulated = "; labkit's graphs are emulated on a CPU" if self.ours.emulated else ""
        if not self.ratio.shown:
            return f"{head}, and one of {self.ours.name}: {self.ratio.text} ({where}{emulated})."
        return f"{head}, takes {self.ratio.text} the time of {self.ours.name} ({where}{emulated})."

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        found = self.ratio
        return {
            "theirs": self.theirs.name, "ours": self.ours.name, "batch": self.theirs.batch,
            "context": self.theirs.context, "ratio": found and found.value, "ratio_low": found and found.low,
            "ratio_high": found and found.high, "shown": bool(found and found.shown), "torch": self.torch,
        }  # fmt: skip


def beside_pairs(recording: BesideRecording) -> list[BesidePair]:
    """Every row of another engine beside labkit's: an eager way beside the eager step, any other beside the graphs."""
    kind, torch = recording.provenance.kind, recording.provenance.packages.get("torch", "unknown")
    out = []
    for row in recording.rows:
        same = [r for r in recording.rows if r.engine == OURS and r.key[2:] == row.key[2:]]
        if row.engine == OURS or not same:
            continue
        eager = "eager" in row.way
        ours = next((r for r in same if ("eager" in r.way) is eager), same[0])
        agree = row.agrees and ours.agrees
        found = compared(row.measurement(kind), ours.measurement(kind)) if agree else None
        out.append(BesidePair(row, ours, found, torch))
    return out
