"""Names for full blocks of tokens, chained so that a name stands for the whole prefix up to the block's end.

Refuses to know where blocks lie and whether anybody looks a name up.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence


def block_hash(parent: bytes | None, token_ids: Sequence[int]) -> bytes:
    """SHA-256 over the parent's hash and the block's tokens: 32 bytes.

    K/V of a token depends on every token before it, so equal blocks may share memory only if all blocks before them are
    equal too; that is what the chain says. The bytes hashed are canonical: the parent's 32 bytes (32 zero bytes for the
    first block of a sequence), then every token id as a little-endian signed 64-bit integer. Unlike Python's `hash()`
    the result is the same in every process.

    A hash is only a hint to the prefix cache, which compares tokens and parent as well (`BlockPool.lookup`).

    Raises:
        struct.error: a token id is no integer or does not fit into 64 bits.
    """
    return hashlib.sha256((parent or bytes(32)) + struct.pack(f"<{len(token_ids)}q", *token_ids)).digest()
