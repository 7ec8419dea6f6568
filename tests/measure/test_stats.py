"""Percentiles, ratios, and the sentence "no difference shown", against statistics that are computed another way."""

from __future__ import annotations

import math
import random
import statistics

import numpy as np
import pytest

from labkit.errors import LabkitError
from labkit.measure.provenance import Kind, ProvenanceError
from labkit.measure.stats import Measurement, compared, median_interval, no_difference, paired_ratio, ratio, summary


def linear_percentile(samples: list[float], q: float) -> float:
    """The textbook's linear interpolation between order statistics, in plain Python."""
    ordered = sorted(samples)
    at = (len(ordered) - 1) * q
    low, high = math.floor(at), math.ceil(at)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


@pytest.mark.parametrize("n", [1, 2, 3, 10, 51, 200])
def test_percentiles_interpolate_linearly(n: int) -> None:
    rng = random.Random(n)
    samples = [rng.lognormvariate(0, 1) for _ in range(n)]
    found = summary(samples)
    assert found.n == n
    for q, value in ((0.1, found.p10), (0.5, found.p50), (0.9, found.p90)):
        assert value == pytest.approx(linear_percentile(samples, q), rel=1e-12)
    assert found.p50 == pytest.approx(statistics.median(samples))


@pytest.mark.parametrize("samples", [[], [1.0, math.nan], [1.0, math.inf]])
def test_no_samples_and_broken_samples_are_refused(samples: list[float]) -> None:
    with pytest.raises(LabkitError, match=r"summary: .+\."):
        summary(samples)


def test_the_median_interval_covers_the_true_median_about_95_percent_of_the_time() -> None:
    rng = np.random.default_rng(7)
    for n in (20, 50):
        hits = 0
        for _ in range(2000):
            low, high = median_interval(rng.exponential(size=n))
            hits += low <= math.log(2) <= high
        assert 0.94 <= hits / 2000 <= 0.995


def live(samples: list[float], label: str = "") -> Measurement:
    return Measurement(Kind.LIVE, tuple(samples), label)


def test_a_ratio_is_of_medians_and_names_both_sides() -> None:
    slow, fast = live([9.0, 10.0, 11.0] * 20, "NONE"), live([1.9, 2.0, 2.1] * 20, "FULL")
    found = ratio(slow, fast)
    assert found.value == pytest.approx(5.0)
    assert found.low <= 5.0 <= found.high
    assert (found.kind, found.label, found.shown, found.n) == (Kind.LIVE, "NONE / FULL", True, 60)
    assert found.text.startswith("5.00× (")


@pytest.mark.parametrize("other", [Kind.RECORDED, Kind.SIMULATED])
@pytest.mark.parametrize("take", [ratio, paired_ratio, no_difference])
def test_a_ratio_never_mixes_kinds(take, other: Kind) -> None:
    a, b = live([1.0, 1.1], "this run"), Measurement(other, (2.0, 2.1), "that file")
    with pytest.raises(ProvenanceError, match="this run is LIVE and that file is " + other.value):
        take(a, b)
    with pytest.raises(ProvenanceError):
        take(b, a)


def test_noise_is_not_a_difference_and_a_difference_is() -> None:
    rng = np.random.default_rng(3)
    base = live(list(rng.normal(10, 0.5, 60)))
    again = live(list(rng.normal(10, 0.5, 60)))
    assert no_difference(base, again) and not ratio(base, again).shown
    assert "no difference shown" in ratio(base, again).text
    assert not no_difference(base, live(list(rng.normal(12, 0.5, 60))))


def test_a_clear_but_small_difference_stays_below_the_floor() -> None:
    a, b = live([10.0] * 60), live([10.3] * 60)
    assert no_difference(a, b)
    assert not no_difference(a, b, floor=0.01)


def test_wide_samples_that_overlap_show_nothing_whatever_the_medians_say() -> None:
    a, b = live([1.0, 5.0, 9.0]), live([1.0, 8.0, 9.0])
    assert a.summary.p50 / b.summary.p50 < 0.7
    assert no_difference(a, b)


def test_pairs_cancel_a_drift_that_hides_the_difference() -> None:
    drift = np.linspace(1.0, 3.0, 60)
    a, b = live(list(10 * drift)), live(list(9 * drift))
    assert no_difference(a, b)
    found = paired_ratio(a, b)
    assert found.value == pytest.approx(10 / 9) and found.shown


def test_unequal_numbers_of_samples_are_no_pairs() -> None:
    with pytest.raises(LabkitError, match="3 samples cannot be paired with 2"):
        paired_ratio(live([1.0, 1.0, 1.0]), live([1.0, 1.0]))


def test_times_that_are_not_above_zero_have_no_ratio() -> None:
    with pytest.raises(LabkitError, match="above zero"):
        ratio(live([1.0, 1.0]), live([0.0, 0.0]))


def in_rounds(rounds: list[list[float]]) -> Measurement:
    return Measurement(Kind.LIVE, tuple(s for one in rounds for s in one), "", len(rounds))


def test_what_took_turns_is_compared_pair_by_pair_and_anything_else_by_medians() -> None:
    a, b = in_rounds([[10.0] * 15, [20.0] * 15]), in_rounds([[5.0] * 15, [10.0] * 15])
    found = compared(a, b)
    assert (found.value, found.paired, found.shown, found.noise) == (2.0, True, True, 0.0), "a drift meets both"
    for other in (live(list(b.samples)), in_rounds([list(b.samples)[:10]] * 3), in_rounds([[5.0], [10.0]])):
        assert not compared(a, other).paired
        assert compared(a, other).value == ratio(a, other).value
    with pytest.raises(ProvenanceError):
        compared(a, Measurement(Kind.RECORDED, b.samples, "that file", 2))


@pytest.mark.parametrize(
    ("rounds", "noise", "shown"),
    [
        ((1.2, 1.2, 1.2, 1.2), 0.0, True),
        ((1.3, 1.2, 1.2, 1.1), 0.1, True),
        ((1.5, 1.21, 1.21, 1.05), 0.225, False),
        ((1.6, 1.3, 1.2, 0.8), 0.4, False),
        ((1.04, 1.04, 1.04, 1.04), 0.0, False),
    ],
)
def test_a_difference_below_what_the_rounds_disagree_by_is_not_shown(rounds, noise: float, shown: bool) -> None:
    """Ratios of each round in a table; half of their range is the run's own noise."""
    base = in_rounds([[10.0, 11.0, 10.5] * 5] * 4)
    other = in_rounds([[s * r for s in (10.0, 11.0, 10.5) * 5] for r in rounds])
    found = paired_ratio(other, base)
    assert found.noise == pytest.approx(noise) and found.shown is shown
    assert shown or "no difference shown" in found.text
