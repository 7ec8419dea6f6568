"""Slots, token by token; the variant for whole steps agrees with the one for a request."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.paging.slot_mapping import PAD_SLOT, fill_slots, slot_mapping


@pytest.mark.parametrize(
    ("block_ids", "start", "n", "block_size", "expected"),
    [
        pytest.param([5, 2], 0, 10, 16, list(range(80, 90)), id="a chunk that ends inside a block"),
        pytest.param([5, 2], 10, 11, 16, [*range(90, 96), *range(32, 37)], id="the next chunk fills it up"),
        pytest.param([3], 0, 4, 4, [12, 13, 14, 15], id="exactly one block"),
        pytest.param([3, 1], 4, 1, 4, [4], id="first token of a block"),
        pytest.param([3, 1], 3, 1, 4, [15], id="last token of a block"),
        pytest.param([9, 4, 7], 0, 3, 1, [9, 4, 7], id="one token per block"),
        pytest.param([6], 2, 0, 4, [], id="nothing"),
    ],
)
def test_slot_mapping(block_ids: list[int], start: int, n: int, block_size: int, expected: list[int]) -> None:
    assert slot_mapping(block_ids, start, n, block_size) == expected


def test_c02_slots_go_token_by_token_and_leave_no_hole_after_a_partial_block() -> None:
    """C02: block size 16, blocks [5, 2]: a first chunk of 10 tokens, a second of 11."""
    first, second = slot_mapping([5, 2], 0, 10, 16), slot_mapping([5, 2], 10, 11, 16)
    assert second == [90, 91, 92, 93, 94, 95, 32, 33, 34, 35, 36]
    assert first + second == slot_mapping([5, 2], 0, 21, 16)


def test_blocks_that_do_not_reach_are_an_error() -> None:
    with pytest.raises(IndexError):
        slot_mapping([5, 2], 30, 3, 16)


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, list[list[int]], list[int], list[int]]:
    block_size = draw(st.integers(1, 20))
    shares = st.tuples(st.integers(0, 60), st.just(1) if draw(st.booleans()) else st.integers(0, 40))
    pairs = draw(st.lists(shares, max_size=8))
    width = 1 + max((start + n for start, n in pairs), default=1) // block_size
    ids = draw(st.permutations(range(1, 1 + width * len(pairs))))
    tables = [list(ids[i * width : (i + 1) * width]) for i in range(len(pairs))]
    return block_size, tables, [start for start, _ in pairs], [n for _, n in pairs]


@given(steps(), st.integers(0, 5), st.sampled_from([np.int32, np.int64]))
def test_fill_slots_is_slot_mapping_of_every_request_and_padding(
    step: tuple[int, list[list[int]], list[int], list[int]], padding: int, dtype: type
) -> None:
    block_size, tables, starts, lens = step
    shares = list(zip(tables, starts, lens, strict=True))
    expected = [slot for table, start, n in shares for slot in slot_mapping(table, start, n, block_size)]
    slots = np.full(len(expected) + padding, 99, np.int64)
    positions = np.full(len(expected) + padding, 99, np.int32)
    table = np.array(tables, dtype).reshape(len(tables), len(tables[0]) if tables else 0)
    total = fill_slots(slots, table, np.array(starts, dtype), np.array(lens, dtype), block_size, positions)
    assert total == len(expected)
    assert slots.tolist() == expected + [PAD_SLOT] * padding
    assert positions.tolist() == [p for _, s, n in shares for p in range(s, s + n)] + [0] * padding


@pytest.mark.parametrize("lens", [[1, 1], [1, 3]], ids=["decodes", "mixed"])
def test_slots_of_a_large_cache_do_not_wrap(lens: list[int]) -> None:
    """An int32 block id times the block size passes 2**31 from block 134,217,728 on at 16 tokens each."""
    table = np.array([[2**31 - 2], [2**27]], np.int32)
    slots = np.zeros(sum(lens), np.int64)
    fill_slots(slots, table, np.zeros(2, np.int32), np.array(lens, np.int32), 16)
    assert slots.tolist() == [(2**31 - 2) * 16, *(2**27 * 16 + i for i in range(lens[1]))]


def test_slots_for_more_tokens_than_there_is_room_are_an_error() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        fill_slots(np.zeros(3, np.int64), np.array([[1]]), np.array([0]), np.array([4]), 4)
