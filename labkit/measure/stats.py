"""What a handful of samples says: percentiles, ratios, and when nothing was shown. Refuses to know what was measured.

A ratio is only taken within one kind of number: LIVE with LIVE, RECORDED with RECORDED, SIMULATED with SIMULATED.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from labkit.errors import LabkitError
from labkit.measure.provenance import Kind, ProvenanceError

#: A smaller difference of medians is never called a difference: clocks and neighbours move a median by this much.
NOISE_FLOOR = 0.05


@dataclasses.dataclass(frozen=True)
class Summary:
    """Percentiles of `n` samples in the samples' own unit (numpy's linear interpolation)."""

    p10: float
    p50: float
    p90: float
    n: int


def summary(samples: Sequence[float]) -> Summary:
    """p10, p50 and p90 of at least one finite sample."""
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise LabkitError("summary", "there are no samples", "Measure at least one step.")
    if not np.isfinite(values).all():
        raise LabkitError(
            "summary", "a sample is not a finite number", "Measure again; a failed step must not be counted."
        )
    p10, p50, p90 = np.percentile(values, (10, 50, 90))
    return Summary(float(p10), float(p50), float(p90), int(values.size))


def median_interval(samples: Sequence[float], z: float = 1.96) -> tuple[float, float]:
    """Where the median lies, with about 95 % confidence, from order statistics alone (no shape is assumed).

    Ranks n/2 ± z·√n/2; a handful of samples gives the whole range.
    """
    values = np.sort(np.asarray(samples, dtype=np.float64))
    half = z * math.sqrt(values.size) / 2
    low = max(0, math.floor(values.size / 2 - half) - 1)
    high = min(values.size - 1, math.ceil(values.size / 2 + half))
    return float(values[low]), float(values[high])


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Samples of one thing in the order in which they were taken, with the kind of number they are.

    rounds: they were taken in so many equal rounds that took turns with rounds of another thing; 1 for one go.
    """

    kind: Kind
    samples: tuple[float, ...]
    label: str = ""
    rounds: int = 1

    @property
    def summary(self) -> Summary:
        return summary(self.samples)


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How many times longer a takes than b; `low`…`high` its interval. `shown`: false when it drowns in noise.

    value: a / b of medians, or where `paired` the median of a / b over pairs of samples.
    noise: of pairs taken in rounds, by how much the rounds disagree about the value: half of the range of theirs.
    """

    value: float
    low: float
    high: float
    kind: Kind
    shown: bool
    n: int
    label: str = ""
    paired: bool = False
    noise: float = 0.0

    @property
    def text(self) -> str:
        """`2.41× (2.38–2.45)`, or the sentence that nothing was shown."""
        if not self.shown:
            return f"no difference shown ({self.value:.3f}×)"
        return f"{self.value:.2f}× ({self.low:.2f}–{self.high:.2f})"


def same_kind(*measurements: Measurement) -> Kind:
    """The common kind, or ProvenanceError when two kinds meet."""
    kinds = {m.kind for m in measurements}
    if len(kinds) != 1:
        named = " and ".join(f"{m.label or 'a number'} is {m.kind}" for m in measurements)
        raise ProvenanceError(
            "ratio", f"{named}, and a ratio never mixes them", "Measure both here, or take both from one recording."
        )
    return kinds.pop()


def ratio(a: Measurement, b: Measurement, *, floor: float = NOISE_FLOOR) -> Ratio:
    """Median of `a` over median of `b`; how many times longer `a` takes.

    Raises:
        ProvenanceError: the two are numbers of different kinds.
    """
    kind = same_kind(a, b)
    (low_a, high_a), (low_b, high_b) = median_interval(a.samples), median_interval(b.samples)
    if min(low_b, low_a) <= 0:
        raise LabkitError("ratio", "a measured time is not above zero", "Measure again with more work per sample.")
    value = a.summary.p50 / b.summary.p50
    return Ratio(
        value,
        low_a / high_b,
        high_a / low_b,
        kind,
        not no_difference(a, b, floor=floor),
        min(len(a.samples), len(b.samples)),
        f"{a.label} / {b.label}" if a.label and b.label else "",
    )


def compared(a: Measurement, b: Measurement, *, floor: float = NOISE_FLOOR) -> Ratio:
    """`paired_ratio` of two things that took turns in one run, else `ratio`.

    Raises:
        ProvenanceError: the two are numbers of different kinds.
    """
    took_turns = a.rounds == b.rounds > 1 and len(a.samples) == len(b.samples)
    return (paired_ratio if took_turns else ratio)(a, b, floor=floor)


def paired_ratio(a: Measurement, b: Measurement, *, floor: float = NOISE_FLOOR) -> Ratio:
    """Median of the ratios of samples taken in pairs (a then b, again and again): slow drift cancels.

    Where both were taken in equal rounds, the k-th sample of a round is paired with the k-th of the other's round, and
    a difference that is smaller than what the rounds disagree by is not shown.

    Raises:
        ProvenanceError: the two are numbers of different kinds.
        LabkitError: the numbers of samples differ, so they were not taken in pairs.
    """
    kind = same_kind(a, b)
    if len(a.samples) != len(b.samples):
        raise LabkitError(
            "paired_ratio",
            f"{len(a.samples)} samples cannot be paired with {len(b.samples)}",
            "Take ratio(a, b) instead.",
        )
    pairs = [x / y for x, y in zip(a.samples, b.samples, strict=True)]
    value, (low, high) = summary(pairs).p50, median_interval(pairs)
    noise = _disagreement(pairs, a.rounds if a.rounds == b.rounds else 1)
    shown = abs(value - 1) >= max(floor, noise) and not low <= 1 <= high
    label = f"{a.label} / {b.label}" if a.label and b.label else ""
    return Ratio(value, low, high, kind, shown, len(pairs), label, True, noise)


def _disagreement(pairs: Sequence[float], rounds: int) -> float:
    """Half of the range of the medians of `rounds` equal parts; 0 where there is one."""
    size = len(pairs) // rounds
    medians = [summary(pairs[i * size : (i + 1) * size]).p50 for i in range(rounds)] if size else [1.0]
    return (max(medians) - min(medians)) / 2


def no_difference(a: Measurement, b: Measurement, *, floor: float = NOISE_FLOOR) -> bool:
    """True when the medians differ by less than `floor`, or their intervals overlap: say "no difference shown"."""
    same_kind(a, b)
    (low_a, high_a), (low_b, high_b) = median_interval(a.samples), median_interval(b.samples)
    overlap = low_a <= high_b and low_b <= high_a
    medians = a.summary.p50, b.summary.p50
    return overlap or abs(medians[0] / medians[1] - 1) < floor
