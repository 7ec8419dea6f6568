"""Two machines side by side: rows of the same configuration, each pair with its ratio. Refuses to know how they ran.

A ratio of two machines is not a speed-up of anything: every sentence here says that it compares machines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from labkit.measure.provenance import Kind, Provenance, ProvenanceError
from labkit.measure.recordings import Recording, Row
from labkit.measure.stats import Ratio, ratio

#: What every table and chart of two machines says.
SAYS = "compares machines, not ways of running"


@dataclasses.dataclass(frozen=True)
class Pair:
    """One configuration on both machines. ratio: how many times longer the second takes than the first.

    notes: what differs besides the machine: the backend's version, the size or the mode that ran, weights.
    """

    first: Row
    second: Row
    ratio: Ratio
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        row = self.first
        return {
            "model": row.model, "backend": row.backend, "compile": row.compile, "requested_mode": row.requested_mode,
            "batch": row.batch, "context": row.context, "chunk": row.chunk,
            "p50_ms": [self.first.p50_ms, self.second.p50_ms], "ratio": self.ratio.value, "ratio_low": self.ratio.low,
            "ratio_high": self.ratio.high, "shown": self.ratio.shown, "notes": list(self.notes),
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class MachineDiff:
    """Two recordings: what both have, and how many rows only one has.

    differs: software and settings of the recording that are not the same, in words.
    """

    first: Provenance
    second: Provenance
    pairs: tuple[Pair, ...]
    only_first: int
    only_second: int
    differs: tuple[str, ...]

    @property
    def names(self) -> tuple[str, str]:
        """The two devices; where they are the same one, with the day, or else as A and B."""
        a, b = self.first.device, self.second.device
        if a == b:
            a, b = (f"{a}, {self.first.date[:10]}", f"{b}, {self.second.date[:10]}")
        return (a, b) if a != b else (f"{a} (A)", f"{b} (B)")

    @property
    def sentence(self) -> str:
        """What there is to see, in words."""
        a, b = self.names
        if not self.pairs:
            return f"{a} and {b} have no configuration in common; nothing can be put side by side."
        shown = [pair.ratio.value for pair in self.pairs if pair.ratio.shown]
        out = f"{len(self.pairs)} configurations on both {a} and {b}, RECORDED; this {SAYS}. "
        if not shown:
            return out + "No difference is shown in any of them."
        low, high = min(shown), max(shown)
        span = f"{low:.2f}×" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f}× to {high:.2f}×"
        out += f"Where a difference is shown ({len(shown)} of them), a step on {b} takes {span} as long as on {a}."
        return out

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "compares": "machines", "first": self.first.as_dict(), "second": self.second.as_dict(),
            "pairs": [pair.as_dict() for pair in self.pairs], "only_first": self.only_first,
            "only_second": self.only_second, "differs": list(self.differs),
        }  # fmt: skip


def diff(first: Recording, second: Recording) -> MachineDiff:
    """The rows that both recordings have, in the order of the first.

    Raises:
        ProvenanceError: one of the two is not RECORDED.
    """
    for one in (first, second):
        if one.provenance.kind is not Kind.RECORDED:
            raise ProvenanceError(
                f"comparing {one.provenance.device}", f"its numbers are {one.provenance.kind}, not RECORDED",
                "Save the rows as a recording first.",
            )  # fmt: skip
    theirs = {row.key: row for row in second.rows}
    pairs = []
    for row in first.rows:
        other = theirs.get(row.key)
        if other is not None:
            names = (f"on {first.provenance.device}", f"on {second.provenance.device}")
            times = ratio(other.measurement(Kind.RECORDED, names[1]), row.measurement(Kind.RECORDED, names[0]))
            pairs.append(Pair(row, other, times, _notes(row, other)))
    return MachineDiff(
        first.provenance, second.provenance, tuple(pairs), len(first.rows) - len(pairs), len(second.rows) - len(pairs),
        tuple(_differs(first.provenance, second.provenance)),
    )  # fmt: skip


def _notes(a: Row, b: Row) -> tuple[str, ...]:
    fields = ("backend_version", "dtype", "mode", "size", "weights", "primed", "emulated")
    return tuple(f"{f} {getattr(a, f)} and {getattr(b, f)}" for f in fields if getattr(a, f) != getattr(b, f))


def _differs(a: Provenance, b: Provenance) -> Sequence[str]:
    names = sorted({*a.packages, *b.packages})
    out = [
        f"{name} {a.packages.get(name, 'absent')} and {b.packages.get(name, 'absent')}"
        for name in names
        if a.packages.get(name) != b.packages.get(name)
    ]
    if a.commit != b.commit:
        out.append(f"commit {(a.commit or 'unknown')[:10]} and {(b.commit or 'unknown')[:10]}")
    return out
