"""Capture sizes: the default formula against evaluated lists, user lists, padding."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.errors import ConfigError
from labkit.graphs.sizes import check_capture_sizes, default_capture_sizes, pad_to, padding_table


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"),
    [
        (1, [1, 2]),
        (4, [1, 2, 4, 8]),
        (13, [1, 2, 4, 8, 13, 16, 24]),
        (16, [1, 2, 4, 8, 16, 24, 32]),
    ],
)
def test_default_lists_of_small_engines(max_num_seqs: int, expected: list[int]) -> None:
    assert default_capture_sizes(max_num_seqs, 8192) == expected


def test_default_lists_of_large_engines() -> None:
    assert (len(default_capture_sizes(100, 8192)), default_capture_sizes(100, 8192)[-1]) == (29, 200)
    for seqs in (256, 1024):
        sizes = default_capture_sizes(seqs, 8192)
        assert (len(sizes), sizes[-1]) == (51, 512)
    assert default_capture_sizes(1024, 8192, cap=1024)[-1] == 1024
    assert len([s for s in default_capture_sizes(256, 8192) if s <= 256]) == 35


def test_a_token_budget_cuts_the_list_and_is_in_it() -> None:
    assert default_capture_sizes(256, 100)[-2:] == [96, 100]


def test_several_tokens_per_request_add_their_multiples() -> None:
    sizes = default_capture_sizes(5, 8192, query_len=3)
    assert {3, 6, 12, 15} <= set(sizes) and max(sizes) <= 30


@pytest.mark.parametrize(
    ("num_tokens", "size"), [(3, 4), (9, 16), (13, 16), (249, 256), (257, 272), (512, 512), (513, None), (520, None)]
)
def test_padding_of_the_default_list(num_tokens: int, size: int | None) -> None:
    sizes = [s for s in default_capture_sizes(1024, 8192)]
    assert pad_to(num_tokens, sizes) == size


@given(st.sets(st.integers(1, 300), min_size=1, max_size=20), st.integers(0, 320))
def test_the_table_is_the_smallest_size_that_holds(sizes: set[int], n: int) -> None:
    table = padding_table(sorted(sizes))
    fits = [s for s in sizes if s >= n]
    assert pad_to(n, sorted(sizes)) == (min(fits) if fits else None)
    assert (table[n] if n < len(table) else None) == (min(fits) if fits else None)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 12, 50])
def test_c27_the_limit_itself_is_covered_and_nothing_exceeds_the_buffers(max_num_seqs: int) -> None:
    """Lists that stop below max_num_seqs leave the widest batch without a graph, silently."""
    for budget in (max_num_seqs, max_num_seqs + 3, 8192):
        sizes = default_capture_sizes(max_num_seqs, budget)
        assert max_num_seqs in sizes
        assert max(sizes) <= min(budget, 2 * max_num_seqs)
        assert sizes == sorted(set(sizes)) and sizes[0] == 1


def test_c27_user_lists_are_cleaned(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert check_capture_sizes([8, 1, 8, 4], 64) == [1, 4, 8]
    assert len(caplog.records) == 1
    caplog.clear()
    assert check_capture_sizes([1, 4, 8], 64) == [1, 4, 8]
    assert not caplog.records


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ([], "empty"),
        ([4, 0], "0 is not"),
        ([-3], "-3 is not"),
        ([2.5], "2.5 is not"),
        ([True], "True"),
        (["8"], "'8'"),
        ([65], "64"),
    ],
)
def test_c27_bad_user_lists_are_refused(sizes: list[int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_capture_sizes(sizes, 64)


def test_a_list_above_its_own_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_cudagraph_capture_size=16"):
        check_capture_sizes([8, 32], 64, max_size=16)
