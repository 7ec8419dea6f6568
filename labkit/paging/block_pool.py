"""Which KV blocks are free, who shares one, and which still hold a prefix somebody may ask for again.

Refuses to know requests, tensors and devices: it hands out numbers. Every operation costs time in proportion to the
blocks it is about, never to the size of the pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from labkit.errors import ConfigError, LabkitError

#: Block 0 is never handed out. Unused entries of every block table point at it.
NULL_BLOCK = 0


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class CachedBlock:
    """What a full block holds: its tokens, after exactly the tokens of `parent`. Compared by identity.

    `parent` is the entry of the block before, None for the first block of a sequence.
    """

    __slots__ = ("block_id", "hash", "parent", "tokens")

    def __init__(self, block_id: int, hash: bytes, tokens: tuple[int, ...], parent: CachedBlock | None) -> None:
        self.block_id, self.hash, self.tokens, self.parent = block_id, hash, tokens, parent

    def holds(self, tokens: Sequence[int], parent: CachedBlock | None) -> bool:
        """Whether this is really the content asked for; an equal hash alone does not say so."""
        return self.parent is parent and self.tokens == tuple(tokens)


class PoolState(NamedTuple):
    """Numbers of blocks. `blank` and `cached` together are free; `cached` ones are still found by their content."""

    blank: int
    cached: int
    in_use: int


class BlockPool:
    """Blocks 1 … `num_blocks - 1`, each in one of three places:

    * in use: `ref_counts[block] > 0`; requests with an equal prefix share a block, so the count may be above one;
    * blank: free, and what it holds is of no use;
    * cached: free, but what it holds can be found by `lookup` until the block is needed for something else. The least
      recently freed one is given up first (LRU), and blank blocks go before cached ones.

    Args:
        num_blocks: blocks in the KV cache, the null block included; at least 2.
        block_size: tokens per block.
        enable_prefix_caching: when False nothing is ever registered or found.

    Raises:
        ConfigError: a size is too small.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 2:
            raise ConfigError(
                f"a KV cache of {num_blocks} blocks", "block 0 is reserved, none is left", "Give it at least 2 blocks."
            )
        if block_size < 1:
            raise ConfigError(f"block_size={block_size}", "a block holds at least one token", "16 is the usual size.")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.ref_counts = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, NULL_BLOCK, -1))  # a stack: low ids go first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently freed first
        self._by_hash: dict[bytes, CachedBlock] = {}
        self._entries: dict[int, CachedBlock] = {}  # by block id

    @property
    def usable(self) -> int:
        """Blocks that can be handed out at all: every one but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, those that still hold a cached prefix included."""
        return len(self._blank) + len(self._cached)

    @property
    def state(self) -> PoolState:
        return PoolState(len(self._blank), len(self._cached), self.usable - self.num_free)

    # --- handing out and taking back -------------------------------------------------------------------------------

    def can_allocate(self, n: int, hits: Sequence[int] = ()) -> bool:
        """Whether `n` new blocks are left once `hits` are pinned; a hit that nobody uses is one of the free blocks."""
        return n <= self.num_free - sum(not self.ref_counts[block] for block in hits)

    def allocate(self, n: int, hits: Sequence[int] = ()) -> list[int] | None:
        """`n` new blocks behind the cached blocks `hits`; None, with nothing changed, when the pool cannot.

        Hits are pinned before a new block is taken. Otherwise a hit that nobody uses right now could be given away as
        one of the new blocks.

        Returns:
            `hits` followed by `n` block ids. Every one counts one more user.
        """
        if not self.can_allocate(n, hits):
            return None
        self.touch(hits)
        blocks = list(hits)
        for _ in range(n):
            block = self._blank.pop() if self._blank else self._evict()
            self.ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def touch(self, block_ids: Iterable[int]) -> None:
        """Count one more user of each block; a cached block is free no longer."""
        for block in block_ids:
            if not self.ref_counts[block]:
                del self._cached[block]
            self.ref_counts[block] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Count one user less of each of a request's blocks (in order of position).

        The last block goes first, so that it is evicted first: a prefix without its end is still useful, an end without
        its beginning is not.

        Raises:
            LabkitError: a block is not in use.
        """
        for block in reversed(block_ids):
            if self.ref_counts[block] < 1:
                raise LabkitError(f"freeing block {block}", "nobody uses it", "Free every block once per user.")
            self.ref_counts[block] -= 1
            if not self.ref_counts[block]:
                if block in self._entries:
                    self._cached[block] = None
                else:
                    self._blank.append(block)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._forget(self._entries[block])
        return block

    # --- finding prefixes again ------------------------------------------------------------------------------------

    def lookup(self, hash: bytes, tokens: Sequence[int], parent: CachedBlock | None) -> CachedBlock | None:
        """The block that holds `tokens` after `parent`'s, or None. Ask in order of position and end at the first miss.

        Tokens and parent are compared, so a bad hash function costs hits and never returns somebody else's K/V.
        """
        entry = self._by_hash.get(hash)
        return entry if entry is not None and entry.holds(tokens, parent) else None

    def register(
        self, block_id: int, hash: bytes, tokens: Sequence[int], parent: CachedBlock | None
    ) -> CachedBlock | None:
        """Let a full block be found by its content. Call it once its K/V is written, not before.

        Returns:
            The entry to pass as `parent` for the block that follows: an older one when that holds the same (its block
            stays the one that is found). None with prefix caching off.
        """
        if not self.enable_prefix_caching:
            return None
        old = self._by_hash.get(hash)
        if old is not None:
            if old.holds(tokens, parent):
                return old
            self._uncache(old)  # an equal hash for something else; the newer content wins
        entry = CachedBlock(block_id, hash, tuple(tokens), parent)
        self._by_hash[hash] = self._entries[block_id] = entry
        return entry

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; blocks in use stay in use."""
        for entry in list(self._entries.values()):
            self._uncache(entry)

    def _forget(self, entry: CachedBlock) -> None:
        del self._by_hash[entry.hash], self._entries[entry.block_id]

    def _uncache(self, entry: CachedBlock) -> None:
        self._forget(entry)
        if entry.block_id in self._cached:
            del self._cached[entry.block_id]
            self._blank.append(entry.block_id)

    # --- for tests -------------------------------------------------------------------------------------------------

    def invariants(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that the books are right, given the block table of every live request. Costs time; for tests."""
        users = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), f"a block twice in one table: {table}"
            for block in table:
                users[block] += 1
        assert users == self.ref_counts, "a reference count is not the number of users"
        assert users[NULL_BLOCK] == 0, "the null block was handed out"
        free = sorted([*self._blank, *self._cached])
        assert free == [block for block in range(1, self.num_blocks) if not users[block]], "free is not 'without users'"
        assert not set(self._blank) & set(self._entries), "a blank block has an entry"
        assert set(self._cached) <= set(self._entries), "a cached block has no entry"
        assert len(self._by_hash) == len(self._entries), "an entry is in one index only"
        for hash, entry in self._by_hash.items():
            assert entry.hash == hash and self._entries[entry.block_id] is entry, "a hash leads to another block"
            assert len(entry.tokens) == self.block_size, "a block that is not full was registered"
