"""Capture sizes for some traffic: counted token by token, advised as brute force would, better than the usual lists."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.engine.report import StepReport
from labkit.errors import ConfigError
from labkit.graphs.advisor import TRAFFIC, Fit, advise, fit, powers_of_two, read_traffic, traffic_of
from labkit.graphs.sizes import default_capture_sizes, pad_to

HISTOGRAMS = st.dictionaries(st.integers(1, 40), st.integers(0, 9), min_size=1, max_size=12).filter(
    lambda traffic: any(traffic.values())
)


@given(HISTOGRAMS, st.sets(st.integers(1, 45), min_size=1, max_size=6))
def test_padding_is_counted_step_by_step(traffic: dict[int, int], sizes: set[int]) -> None:
    steps = [n for n, count in traffic.items() for _ in range(count)]
    ran = [next((s for s in sorted(sizes) if s >= n), None) for n in steps]
    found = fit(traffic, sorted(sizes))
    assert found.steps == len(steps) and found.real_tokens == sum(steps)
    assert found.covered == sum(size is not None for size in ran)
    assert found.padded_tokens == sum(size - n for n, size in zip(steps, ran, strict=True) if size)
    assert found.coverage == found.covered / len(steps)
    assert found.waste == pytest.approx(
        found.padded_tokens / sum(size or n for n, size in zip(steps, ran, strict=True))
    )


def by_trying_everything(traffic: dict[int, int], k: int, max_size: int) -> int:
    """The least padding of any k sizes, observed or not, that cover what can be covered."""
    allowed = [n for n, count in traffic.items() if count and n <= max_size]
    top = max(allowed)
    rest = range(min(allowed), top)
    lists = (sorted([*chosen, top]) for j in range(k) for chosen in itertools.combinations(rest, j))
    return min(
        sum(count * ((pad_to(n, sizes) or n) - n) for n, count in traffic.items() if n <= max_size) for sizes in lists
    )


@given(
    st.dictionaries(st.integers(1, 18), st.integers(0, 9), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(6, 18),
)
def test_the_advice_is_what_brute_force_finds(traffic: dict[int, int], k: int, max_size: int) -> None:
    allowed = {n for n, count in traffic.items() if count and n <= max_size}
    if not allowed:
        with pytest.raises(ConfigError):
            advise(traffic, k, max_size)
        return
    found = advise(traffic, k, max_size)
    assert found.padded_tokens == by_trying_everything(traffic, k, max_size)
    assert found.sizes[-1] == max(allowed), "whatever may be captured is covered"
    assert found.covered == sum(traffic[n] for n in allowed)
    assert len(found.sizes) == min(k, len(allowed)) and list(found.sizes) == sorted(set(found.sizes))


def test_advice_of_many_sizes_over_a_wide_histogram() -> None:
    """The halving of the search loses nothing: the plain recurrence gives the same for each number of sizes."""
    traffic = {n: (n * 7919) % 23 + 1 for n in range(3, 300, 3)}
    tokens = sorted(traffic)

    def lost(a: int, b: int) -> int:
        return sum((tokens[b - 1] - n) * traffic[n] for n in tokens[a:b])

    table = [[lost(a, b) for b in range(len(tokens) + 1)] for a in range(len(tokens) + 1)]
    least: list[float] = [0, *[float("inf")] * len(tokens)]
    for k in range(1, 20):
        least = [float("inf"), *(min(least[a] + table[a][b] for a in range(b)) for b in range(1, len(tokens) + 1))]
        assert advise(traffic, k).padded_tokens == least[-1]


def is_better(a: Fit, b: Fit) -> bool:
    """More steps covered, or as many with less padding."""
    return (a.coverage, -a.waste) > (b.coverage, -b.waste)


@pytest.mark.parametrize("name", TRAFFIC)
def test_the_advice_beats_the_usual_lists(name: str) -> None:
    traffic = TRAFFIC[name]
    default = default_capture_sizes(256, 8192)
    used = [s for s in default if s <= (pad_to(max(traffic), default) or 0)]
    for k in (1, 2, 4, 8, 16, len(used)):
        assert is_better(advise(traffic, k), fit(traffic, default[:k])), k
    powers = powers_of_two(max(traffic))
    for usual in (used, powers):
        mine, theirs = advise(traffic, len(usual)), fit(traffic, usual)
        assert mine.coverage == theirs.coverage == 1
        assert mine.waste < theirs.waste / 2, "not by a hair"
    assert advise(traffic, len(powers)).waste < advise(traffic, len(powers) - 1).waste


def test_what_is_too_large_stays_eager_and_is_reported() -> None:
    found = advise({10: 3, 20: 1, 600: 4, 900: 2}, 8)
    assert found.sizes == (10, 20) and found.padded_tokens == 0
    assert (found.steps, found.covered, found.coverage) == (10, 4, 0.4)
    assert advise({10: 3, 600: 4}, 2, max_size=1024).sizes == (10, 600)
    with pytest.raises(ConfigError, match="more than 512 tokens"):
        advise({600: 1}, 2)
    with pytest.raises(ConfigError, match="at least one size"):
        advise({6: 1}, 0)


def test_powers_of_two_cover() -> None:
    assert [powers_of_two(n)[-1] for n in (1, 2, 3, 4, 5, 256, 257)] == [1, 2, 4, 4, 8, 256, 512]
    assert powers_of_two(9) == [1, 2, 4, 8, 16]


def test_a_file_is_an_object_or_numbers() -> None:
    assert read_traffic('{"8": 2, "1": 40, "3": 0}') == {1: 40, 8: 2}
    assert read_traffic("8\n1\n\n1\n") == {1: 2, 8: 1}
    counts = TRAFFIC["mixed"]
    assert read_traffic(json.dumps(counts)) == counts


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no step"), ("{}", "no step"), ('{"4": 0}', "no step"), ("4\nx", "'x'"), ("2.5", "'2.5'"), ("-3", "'-3'"),
        ("0", "0 tokens"), ('{"0": 2}', "0 tokens"), ('{"a": 2}', "'a'"), ('{"4": -1}', "-1 steps"),
        ('{"4": 1.5}', "1.5 steps"), ('{"4": true}', "True steps"), ('{"4": ', "no JSON"), ("[1, 2]", "'\\[1, 2\\]'"),
    ],
)  # fmt: skip
def test_what_is_no_traffic_is_refused(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_traffic(text)


def test_built_in_histograms_are_counts_with_their_shapes() -> None:
    assert set(TRAFFIC) == {"chat", "bursty", "mixed"}
    for traffic in TRAFFIC.values():
        assert list(traffic) == sorted(traffic) and all(isinstance(c, int) and c > 0 for c in traffic.values())
        assert 9500 < sum(traffic.values()) <= 10_050
    means = {name: sum(n * c for n, c in t.items()) / sum(t.values()) for name, t in TRAFFIC.items()}
    assert means["chat"] == pytest.approx(24, abs=0.1)
    quiet = sum(c for n, c in TRAFFIC["bursty"].items() if n < 20)
    assert 0.6 < quiet / 10_000 < 0.7 and not any(30 <= n < 50 for n, c in TRAFFIC["bursty"].items() if c > 5)
    assert max(TRAFFIC["mixed"]) == 256 and TRAFFIC["mixed"][256] > 1000


def test_the_traffic_of_steps_that_ran() -> None:
    def step(num_tokens: int) -> StepReport:
        return StepReport(1, "NONE", num_tokens, num_tokens, num_tokens, 0, 1, 1, "TORCH_SDPA", 1.0, {})

    assert traffic_of([step(n) for n in (3, 1, 0, 3)]) == {1: 1, 3: 2}
