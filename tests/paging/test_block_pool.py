"""The block pool: who may have which block, and what is still found. A state machine compares it with plain dicts."""

from __future__ import annotations

import math
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from labkit.errors import ConfigError, LabkitError
from labkit.paging.block_hash import block_hash
from labkit.paging.block_pool import NULL_BLOCK, BlockPool, CachedBlock, blocks_for

BLOCK_SIZE = 4
Hash = Callable[[bytes | None, list[int]], bytes]


def chain(pool: BlockPool, blocks: list[int], tokens: list[int], hash: Hash = block_hash) -> list[CachedBlock]:
    """Register full blocks one after the other."""
    entries: list[CachedBlock] = []
    parent = None
    for i, block in enumerate(blocks):
        part = tokens[i * pool.block_size : (i + 1) * pool.block_size]
        digest = hash(parent.hash if parent else None, part)
        parent = pool.register(block, digest, part, parent)
        assert parent is not None
        entries.append(parent)
    return entries


def find(pool: BlockPool, tokens: list[int], hash: Hash = block_hash) -> list[int]:
    """The blocks of the longest cached prefix."""
    found: list[int] = []
    parent, digest = None, None
    for i in range(len(tokens) // pool.block_size):
        part = tokens[i * pool.block_size : (i + 1) * pool.block_size]
        digest = hash(digest, part)
        parent = pool.lookup(digest, part, parent)
        if parent is None:
            break
        found.append(parent.block_id)
    return found


@pytest.mark.parametrize("tokens, blocks", [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, BLOCK_SIZE) == blocks


def test_every_block_but_the_null_block_is_handed_out_once() -> None:
    pool = BlockPool(6, BLOCK_SIZE)
    assert (pool.usable, pool.num_free) == (5, 5)
    blocks = pool.allocate(5)
    assert blocks == [1, 2, 3, 4, 5] and NULL_BLOCK not in blocks
    assert pool.allocate(1) is None and pool.num_free == 0
    pool.free(blocks)
    pool.invariants([])


def test_a_refused_allocation_changes_nothing() -> None:
    pool = BlockPool(5, BLOCK_SIZE)
    held = pool.allocate(3)
    before = list(pool.ref_counts), pool.state
    assert pool.allocate(2) is None
    assert (pool.ref_counts, pool.state) == before
    assert held is not None
    pool.invariants([held])


@pytest.mark.parametrize("blocks", [[2], [NULL_BLOCK], [1, 1]], ids=["never handed out", "null block", "twice"])
def test_freeing_what_nobody_uses_is_an_error(blocks: list[int]) -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    assert pool.allocate(1) == [1]
    with pytest.raises(LabkitError, match="nobody uses it"):
        pool.free(blocks)


@pytest.mark.parametrize("num_blocks, block_size", [(1, 4), (0, 4), (2, 0)])
def test_a_pool_without_blocks_or_tokens_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ConfigError):
        BlockPool(num_blocks, block_size)


def test_a_freed_prefix_is_found_until_its_blocks_are_needed() -> None:
    pool, tokens = BlockPool(4, BLOCK_SIZE), list(range(8))
    blocks = pool.allocate(2) or []
    chain(pool, blocks, tokens)
    pool.free(blocks)
    assert find(pool, [*tokens, 8]) == blocks and pool.num_free == 3
    assert pool.allocate(1) == [3], "a blank block goes before a cached one"
    assert find(pool, tokens) == blocks
    assert pool.allocate(1) == [blocks[1]], "the end of a prefix goes before its beginning"
    assert find(pool, tokens) == blocks[:1]


def test_the_least_recently_freed_prefix_goes_first() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    texts = {block: [block] * 4 for block in pool.allocate(3) or []}
    for block, tokens in texts.items():
        chain(pool, [block], tokens)
    for block in (2, 1, 3):
        pool.free([block])
    pool.touch([2])
    pool.free([2])  # used again, so the most recent
    assert [pool.allocate(1) for _ in range(3)] == [[1], [3], [2]]


def test_two_requests_that_wrote_the_same_share_one_entry() -> None:
    pool, tokens = BlockPool(6, BLOCK_SIZE), list(range(8))
    a, b = pool.allocate(2) or [], pool.allocate(2) or []
    assert [e.block_id for e in chain(pool, a, tokens)] == a
    assert [e.block_id for e in chain(pool, b, tokens)] == a, "the older block stays the one that is found"
    pool.free(b)
    assert find(pool, tokens) == a and pool.state == (3, 0, 2)


def test_reset_forgets_prefixes_and_keeps_users() -> None:
    pool = BlockPool(5, BLOCK_SIZE)
    used, idle = pool.allocate(1) or [], pool.allocate(2) or []
    chain(pool, used, [1] * 4)
    chain(pool, idle, [2] * 8)
    pool.free(idle)
    pool.reset_prefix_cache()
    assert find(pool, [1] * 4) == find(pool, [2] * 8) == [] and pool.state == (3, 0, 1)
    pool.invariants([used])


def test_with_prefix_caching_off_nothing_is_kept() -> None:
    pool = BlockPool(3, BLOCK_SIZE, enable_prefix_caching=False)
    blocks = pool.allocate(1) or []
    assert pool.register(blocks[0], b"x", [1] * 4, None) is None
    pool.free(blocks)
    assert pool.lookup(b"x", [1] * 4, None) is None and pool.state == (2, 0, 0)


def test_c01_recycled_block_loses_its_entry() -> None:
    """C01: a block that got new content must not be found under its old hash."""
    pool, old, new = BlockPool(3, BLOCK_SIZE), [1] * 8, [2] * 8
    for tokens in (old, new):
        blocks = pool.allocate(2) or []
        chain(pool, blocks, tokens)
        pool.free(blocks)
    assert find(pool, old) == [] and len(find(pool, new)) == 2
    pool.invariants([])


def test_c05_lookup_stops_at_the_first_miss() -> None:
    """C05 (1): of three cached blocks the first is gone; the two behind it are worth nothing."""
    pool, tokens = BlockPool(4, BLOCK_SIZE), list(range(12))
    blocks = pool.allocate(3) or []
    chain(pool, blocks, tokens)
    pool.free(blocks)
    pool.touch(blocks[1:])  # in use, so the first one is what can be evicted
    assert pool.allocate(1) == blocks[:1]
    assert find(pool, tokens) == []


@pytest.mark.parametrize("new, fits", [(2, True), (3, False)])
def test_c05_hits_are_pinned_before_new_blocks_are_taken(new: int, fits: bool) -> None:
    """C05 (2): four usable blocks, two of them hits that nobody uses: two new ones fit, three do not."""
    pool, tokens = BlockPool(5, BLOCK_SIZE), list(range(8))
    hits = pool.allocate(2) or []
    chain(pool, hits, tokens)
    pool.free(hits)
    before = list(pool.ref_counts), pool.state
    blocks = pool.allocate(new, hits)
    assert pool.can_allocate(0, hits)
    if fits:
        assert blocks is not None and blocks[:2] == hits and len(set(blocks)) == 4
        pool.invariants([blocks])
    else:
        assert blocks is None and (pool.ref_counts, pool.state) == before
    assert find(pool, tokens) == hits


def test_c06_an_equal_hash_is_not_taken_for_equal_content() -> None:
    """C06: with a hash that is always the same, tokens and parent decide."""
    pool = BlockPool(8, BLOCK_SIZE)

    def constant(parent: bytes | None, tokens: list[int]) -> bytes:
        return b"same"

    a = pool.allocate(1) or []
    chain(pool, a, [1, 2, 3, 4], constant)
    assert find(pool, [5, 6, 7, 8], constant) == []
    assert find(pool, [1, 2, 3, 4], constant) == a
    b = pool.allocate(2) or []
    chain(pool, b, [5, 6, 7, 8, 1, 2, 3, 4], constant)
    assert find(pool, [1, 2, 3, 4], constant) == [], "the same tokens behind a prefix are not the same content"
    pool.invariants([a, b])


def test_c06_the_content_of_every_block_before_counts() -> None:
    """C06: a hash that only adds tokens up, and a first block replaced by another of the same sum."""
    pool = BlockPool(8, BLOCK_SIZE)

    def weak(parent: bytes | None, tokens: list[int]) -> bytes:
        return bytes([(sum(parent or b"") + sum(tokens)) % 256])

    blocks = pool.allocate(2) or []
    chain(pool, blocks, [1, 2, 3, 4, 9, 9, 9, 9], weak)
    other = pool.allocate(1) or []
    chain(pool, other, [4, 3, 2, 1], weak)
    assert find(pool, [4, 3, 2, 1, 9, 9, 9, 9], weak) == other
    pool.invariants([blocks, other])


def weak_hash(parent: bytes | None, tokens: list[int]) -> bytes:
    return bytes([(sum(parent or b"") * 3 + sum(tokens)) % 5])


class PoolMachine(RuleBasedStateMachine):
    """Users come and go. The reference knows each block's users, the text it holds and when it was last freed."""

    @initialize(usable=st.integers(1, 8), size=st.integers(1, 3), weak=st.booleans(), caching=st.booleans())
    def start(self, usable: int, size: int, weak: bool, caching: bool) -> None:
        self.pool = BlockPool(usable + 1, size, caching)
        self.hash: Hash = weak_hash if weak else block_hash
        self.weak = weak
        self.users: list[tuple[list[int], list[int]]] = []  # block table, tokens with K/V
        self.text: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end
        self.freed_at: dict[int, int] = {}
        self.clock = 0

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12), commit=st.booleans())
    def arrive(self, tokens: list[int], commit: bool) -> None:
        """Take a cached prefix and new blocks; commit writes and registers, otherwise nothing was written."""
        pool, size = self.pool, self.pool.block_size
        hits = find(pool, tokens, self.hash)
        for i, block in enumerate(hits):
            assert self.text[block] == tuple(tokens[: (i + 1) * size]), "found a block that holds something else"
        need = math.ceil(len(tokens) / size) - len(hits)
        free = pool.num_free - sum(not self.count(block) for block in hits)
        cached_before = self.cached() - set(hits)
        blank_before = {b for b in range(1, pool.num_blocks) if not self.count(b)} - self.cached()
        blocks = pool.allocate(need, hits)
        assert (blocks is None) == (need > free)
        if blocks is None:
            return
        assert blocks[: len(hits)] == hits
        new = blocks[len(hits) :]
        evicted = set(new) - blank_before
        if evicted:
            assert blank_before <= set(new), "a cached block went while a blank one was there"
            lru = sorted(cached_before, key=lambda block: self.freed_at[block])
            assert evicted == set(lru[: len(evicted)]), "not the least recently freed"
        for block in new:
            self.text.pop(block, None)
        self.users.append((blocks, tokens))
        if commit:
            full = len(tokens) // size
            for i in range(len(hits), full):
                self.text[blocks[i]] = tuple(tokens[: (i + 1) * size])
            if pool.enable_prefix_caching:
                chain(pool, blocks[:full], tokens, self.hash)
                if not self.weak:
                    assert len(find(pool, tokens, self.hash)) == full, "a prefix just registered is not found"

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        blocks, _ = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))
        self.pool.free(blocks)
        for block in reversed(blocks):
            self.clock += 1
            self.freed_at[block] = self.clock

    @rule()
    def reset(self) -> None:
        self.pool.reset_prefix_cache()
        assert not self.cached()

    def count(self, block: int) -> int:
        return sum(table.count(block) for table, _ in self.users)

    def cached(self) -> set[int]:
        return set(self.pool._cached)

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "pool"):
            self.pool.invariants(table for table, _ in self.users)
            assert self.pool.num_free == sum(not self.count(b) for b in range(1, self.pool.num_blocks))

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for blocks, _ in self.users:
                self.pool.free(blocks)
            self.pool.invariants([])
            assert self.pool.num_free == self.pool.usable


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
