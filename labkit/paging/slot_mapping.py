"""Where in the KV cache each token's K/V goes: position → block → slot. Refuses to know who the tokens belong to.

A slot is `block_id * block_size + offset`, an index into the cache seen as one long row of tokens. Slot −1 is padding:
it is written by nobody (and must be tested for, as −1 is a valid index in Python).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

PAD_SLOT = -1

IntArray = npt.NDArray[np.integer]


def slot_mapping(block_ids: Sequence[int], start: int, n: int, block_size: int) -> list[int]:
    """Slots of positions `start` … `start + n - 1` of one request, token by token.

    Going token by token (and not block by block) is what makes a chunk that begins inside a block land in the rest of
    that block.

    Args:
        block_ids: the request's blocks in order of position.
        start: first position, counted from the beginning of the request.
        n: number of tokens.

    Raises:
        IndexError: `block_ids` does not reach as far as the last position.
    """
    return [block_ids[p // block_size] * block_size + p % block_size for p in range(start, start + n)]


def fill_slots(
    slots: IntArray,
    block_table: IntArray,
    starts: IntArray,
    num_tokens: IntArray,
    block_size: int,
    positions: IntArray | None = None,
) -> int:
    """`slot_mapping` of a whole step at once, without a Python loop over requests or tokens.

    Args:
        slots: int64 `[≥ T]`, written: the slots of all requests one after the other, then −1 up to its end.
        block_table: `[R, max_blocks]`, row r holds the blocks of request r.
        starts: `[R]`, first position of each request in this step.
        num_tokens: `[R]`, tokens of each request in this step, zero allowed.
        positions: `[≥ T]`, optional, written: each token's position, then 0 up to its end.

    Returns:
        T, the sum of `num_tokens`.

    Raises:
        ValueError: T is more than `slots` holds.
    """
    num_reqs = len(starts)
    ends = np.cumsum(num_tokens, dtype=np.int64)
    total = int(ends[-1]) if num_reqs else 0
    if total == num_reqs and (num_tokens == 1).all():  # a decode batch
        rows, at = np.arange(num_reqs), starts.astype(np.int64)
    else:
        rows = np.repeat(np.arange(num_reqs), num_tokens)
        at = np.arange(total, dtype=np.int64) + (starts - ends + num_tokens)[rows]
    block, offset = np.divmod(at, block_size)
    # Slots are 64 bit before they are multiplied: an int32 block id times a page wraps in a large cache.
    slots[:total] = block_table[rows, block].astype(np.int64) * block_size + offset
    slots[total:] = PAD_SLOT
    if positions is not None:
        positions[:total], positions[total:] = at, 0
    return total
