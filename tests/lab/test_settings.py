"""Reading the size editor, and snapping to what there is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.errors import ConfigError
from labkit.lab.settings import Range, parse_sizes, show_sizes


@pytest.mark.parametrize(
    ("typed", "sizes"),
    [
        ("", None), ("   ", None), ("[]", None), ("1, 2, 4", (1, 2, 4)), ("4 2;1", (1, 2, 4)), ("[8, 8, 16]", (8, 16)),
        ("+3", (3,)), ("007", (7,)), ("1,,2,", (1, 2)),
    ],
)  # fmt: skip
def test_sizes_as_people_write_them(typed, sizes):
    assert parse_sizes(typed, 64) == sizes


def test_every_bad_entry_is_named_with_its_limit():
    with pytest.raises(ConfigError) as caught:
        parse_sizes("4, x, 0, 65, 1e3, -2", 64)
    for words in ("'x'", "0 is below", "65 is above the largest possible step, 64", "'1e3'", "-2 is below"):
        assert words in caught.value.why
    assert "1 to 64" in caught.value.try_


@given(st.lists(st.integers(1, 300), min_size=1, max_size=30))
def test_a_good_list_comes_back_sorted_without_duplicates(sizes):
    assert parse_sizes(", ".join(map(str, sizes)), 300) == tuple(sorted(set(sizes)))


@given(st.text(max_size=20))
def test_whatever_is_typed_is_understood_or_answered_with_a_sentence(typed):
    try:
        found = parse_sizes(typed, 64)
    except ConfigError as error:
        assert error.why and error.try_
    else:
        assert found is None or all(1 <= size <= 64 for size in found)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=12), st.integers(-5, 300))
def test_the_nearest_point_is_a_recorded_one_and_none_is_nearer(values, value):
    points = tuple(sorted(set(values)))
    near = Range(points[0], points[-1], 1, points).nearest(value)
    assert near in points and abs(near - value) == min(abs(p - value) for p in points)


def test_a_long_list_is_shortened_in_the_middle():
    assert show_sizes([1, 2, 4]) == "1, 2, 4"
    assert show_sizes(range(1, 52)) == "1, 2, 3, 4, 5, 6 … 50, 51 (51 sizes)"
