"""What a run of the chapter's panel holds, and the sentence about it. Refuses to know where the numbers come from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from labkit.lab.ch03 import memory
from labkit.lab.runs import Outcome
from labkit.measure.provenance import Kind, Provenance
from labkit.measure.stats import Measurement

MIB = 2**20
COLUMNS = [
    ("backend", "attention"), ("dtype", "format"), ("heads", "heads"), ("longest", "tokens"), ("ms", "time, ms"),
    ("mib", "memory, MiB"), ("growth", "memory grows as L^"), ("error", "largest error"), ("same_pct", "same bits, %"),
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Curve:
    """One way of computing attention over several lengths. What was not measured is None.

    us, p10_us, p90_us: of a call. held: bytes at the highest point, inputs not counted. errors: the largest
    |result − exact| of each head, at `error_at` tokens (None: the longest). naive_error: of naive attention in the same
    format. same_bits: share of the results that are, bit for bit, those of naive attention; None for naive itself.
    shape: what else was the same for all lengths, in words.
    """

    backend: str
    dtype: str
    heads: int
    lengths: list[int]
    us: list[float] | None = None
    p10_us: list[float] | None = None
    p90_us: list[float] | None = None
    held: Sequence[int | None] | None = None
    errors: list[float] | None = None
    naive_error: float | None = None
    same_bits: float | None = None
    error_at: int | None = None
    shape: str = ""

    @property
    def mib(self) -> list[float] | None:
        return None if self.held is None else [(b or 0) / MIB for b in self.held]

    @property
    def growth(self) -> float | None:
        """The exponent between the two longest lengths."""
        found = math.nan if self.mib is None else memory.growth(self.lengths, self.mib)
        return None if math.isnan(found) else found

    @property
    def error(self) -> float | None:
        return max(self.errors) if self.errors else None

    @property
    def tolerance(self) -> float | None:
        """The rule of this project: twice the error of naive attention in the same format, and a little."""
        return None if self.naive_error is None else 2 * self.naive_error + 1e-5


def outcome(
    curve: Curve, made: Provenance, samples: Sequence[float] = (), *, stopped: bool = False, notes: Sequence[str] = ()
) -> Outcome:
    """A run of it. samples: µs at the longest length; without them two pins are compared by their memory."""
    ms = curve.us[-1] / 1e3 if curve.us else None
    mib = curve.mib[-1] if curve.mib else None
    data: dict[str, Any] = {
        "lengths": list(curve.lengths), "time_us": curve.us, "p10_us": curve.p10_us, "p90_us": curve.p90_us,
        "memory_mib": curve.mib, "errors": curve.errors, "tolerance": curve.tolerance,
    }  # fmt: skip
    values = {
        "backend": curve.backend, "dtype": curve.dtype, "heads": curve.heads, "longest": curve.lengths[-1], "ms": ms,
        "mib": mib, "growth": curve.growth, "error": curve.error,
        "same_pct": None if curve.same_bits is None else 100 * curve.same_bits,
        "tolerance": curve.tolerance, "naive_error": curve.naive_error,
    }  # fmt: skip
    measured = quantity = None
    if samples:
        measured = Measurement(Kind(made.kind), tuple(us / 1e3 for us in samples), curve.backend)
    elif mib is not None:
        measured, quantity = Measurement(Kind(made.kind), (mib,), curve.backend), "memory"
    return Outcome(data, values, sentence(curve), made, measured, tuple(notes), quantity or "", stopped)


def sentence(curve: Curve) -> str:
    """What came out, and why."""
    at = f"{curve.backend} in {curve.dtype}, {curve.lengths[-1]:,} tokens{curve.shape}"
    parts = []
    if curve.us:
        parts.append(f"{curve.us[-1] / 1e3:.3g} ms a call")
    if curve.mib:
        parts.append(f"{_mib(curve.mib[-1])} MiB beyond the inputs{_grows(curve)}")
    said = f"{at}: {', '.join(parts)}." if parts else f"{at}."
    return " ".join([said, *_about_error(curve)])


def _mib(amount: float) -> str:
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}"


def _grows(curve: Curve) -> str:
    """Why memory grows the way it does."""
    p = curve.growth
    if p is None:
        return ""
    if p > 1.6:
        return f", growing as L^{p:.1f}: something as large as the matrix of scores is stored"
    if p > 1.2:
        return f", growing as L^{p:.1f}: part of it is as large as the matrix of scores, a mask for example"
    return f", growing as L^{p:.1f}: the output, a few numbers per query, and a tile"


def _about_error(curve: Curve) -> list[str]:
    if curve.error is None or curve.naive_error is None:
        return []
    where = f" at {curve.error_at:,} tokens" if curve.error_at else ""
    said = [f"Largest error against float64{where}: {curve.error:.2g}"]
    if curve.same_bits is not None:
        said[0] += f", {curve.error / curve.naive_error:.2g} times that of naive attention"
        if curve.same_bits < 1:
            said.append(
                f"only {curve.same_bits:.0%} of the numbers have the same bits, since sums were taken in another order"
            )
        else:
            said.append("every number has the same bits")
    return ["; ".join(said) + "."]
