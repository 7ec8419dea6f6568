"""A request's side of prefix caching: which of its blocks are cached already, and which it adds.

Refuses to know when a request runs, and how the pool keeps and evicts what it is told.
"""

from __future__ import annotations

from labkit.paging import block_hash as hashing
from labkit.paging.block_pool import BlockPool, CachedBlock
from labkit.scheduling.request import Request


def cached_prefix(request: Request, pool: BlockPool) -> list[CachedBlock]:
    """The longest cached prefix of the known tokens, in whole blocks; nothing is pinned yet.

    At least the last token is left out, as a step has to compute its logits. A block counts only when all blocks before
    it do: the search ends at the first miss.
    """
    hits: list[CachedBlock] = []
    if pool.enable_prefix_caching:
        for i in range((request.num_tokens - 1) // pool.block_size):
            entry = pool.lookup(*_content(request, i, pool.block_size), hits[-1] if hits else None)
            if entry is None:
                break
            hits.append(entry)
    return hits


def register_full_blocks(request: Request, pool: BlockPool) -> None:
    """Let a request's full blocks be found by others. Call it when their K/V is written, never before."""
    full = request.num_computed_tokens // pool.block_size
    if full == request.num_registered_blocks or request.primed or not pool.enable_prefix_caching:
        return
    for i in range(request.num_registered_blocks, full):
        hash, tokens = _content(request, i, pool.block_size)
        request.last_registered = pool.register(request.block_ids[i], hash, tokens, request.last_registered)
    request.num_registered_blocks = full


def _content(request: Request, i: int, block_size: int) -> tuple[bytes, list[int]]:
    """Hash and tokens of block i; a block is hashed once in a request's life, as tokens never change."""
    hashes = request.block_hashes
    while len(hashes) <= i:
        tokens = request.tokens(len(hashes) * block_size, block_size)
        hashes.append(hashing.block_hash(hashes[-1] if hashes else None, tokens))
    return hashes[i], request.tokens(i * block_size, block_size)
