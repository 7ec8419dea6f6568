"""Attention of one prompt, written down twice: with all scores stored, and tile by tile. Refuses to be fast.

Both take `[heads, tokens, head_size]` and are causal: a query sees its own key and those before it. `rounded` and
`emulated` do the same in numpy, with results rounded as a smaller number format would; they need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

#: Query rows and keys of one tile.
TILE = 64
#: Mantissa bits of float32 that a format does not have.
_DROPPED = {"float32": 0, "bfloat16": 16}


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Every score of every query in one matrix `[heads, tokens, tokens]`, then softmax, then the product with v."""
    import torch

    tokens, size = q.shape[-2:]
    scores = (q @ k.transpose(-1, -2)) * size**-0.5
    hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill_(hidden, -torch.inf).softmax(-1) @ v


def tiled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: int = TILE) -> torch.Tensor:
    """One tile of scores at a time, with a running maximum, sum and output for each query (online softmax).

    The arithmetic is in float32 (float64 for float64); the result has the inputs' type.
    """
    import torch

    tokens, size = q.shape[-2:]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.empty_like(q)
    for first in range(0, tokens, tile):
        rows = q[:, first : first + tile].to(wide) * size**-0.5
        high = rows.new_full((*rows.shape[:2], 1), -torch.inf)
        total, acc = torch.zeros_like(high), torch.zeros_like(rows)
        for begin in range(0, first + tile, tile):
            keys, values = k[:, begin : begin + tile].to(wide), v[:, begin : begin + tile].to(wide)
            scores = rows @ keys.transpose(-1, -2)
            if begin == first:  # only this tile has keys that some of its rows must not see
                scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
            new = torch.maximum(high, scores.amax(-1, keepdim=True))
            weights, shrink = (scores - new).exp(), (high - new).exp()
            total = total * shrink + weights.sum(-1, keepdim=True)
            acc = acc * shrink + weights @ values
            high = new
        out[:, first : first + tile] = (acc / total).to(out.dtype)
    return out


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same numbers in float64, as `tiled` computes them: what every result is compared with."""
    return tiled(q.double(), k.double(), v.double())


def rounded(x: Any, dtype: str) -> Any:
    """A float32 array rounded to the nearest number of a format, still stored as float32. Ties go to even."""
    if dtype == "float16":
        return np.asarray(x, np.float32).astype(np.float16).astype(np.float32)
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    drop = _DROPPED[dtype]
    if drop:
        half = (1 << (drop - 1)) - 1 + ((bits >> drop) & 1)
        bits = (bits + half.astype(np.uint32)) & np.uint32(0xFFFFFFFF << drop & 0xFFFFFFFF)
    return bits.view(np.float32)


def emulated(way: str, q: Any, k: Any, v: Any, dtype: str, tile: int = TILE) -> Any:
    """ "naive" or "tiled" in numpy, every stored intermediate result rounded to `dtype`.

    naive stores scores, weights and output; tiled stores the output alone, since a tile never leaves the chip.
    """
    tokens, size = q.shape[-2:]
    scale = np.float32(size**-0.5)
    if way == "naive":
        scores = rounded(rounded(q @ k.swapaxes(-1, -2), dtype) * scale, dtype)
        scores = np.where(np.triu(np.ones((tokens, tokens), bool), 1), -np.inf, scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = rounded(weights / weights.sum(-1, keepdims=True, dtype=np.float32), dtype)
        return rounded(weights @ v, dtype)
    out = np.empty_like(q)
    for first in range(0, tokens, tile):
        rows = q[:, first : first + tile] * scale
        high = np.full((*rows.shape[:2], 1), -np.inf, np.float32)
        total, acc = np.zeros_like(high), np.zeros_like(rows)
        for begin in range(0, first + tile, tile):
            keys, values = k[:, begin : begin + tile], v[:, begin : begin + tile]
            scores = rows @ keys.swapaxes(-1, -2)
            if begin == first:
                scores = np.where(np.triu(np.ones(scores.shape[-2:], bool), 1), -np.inf, scores)
            new = np.maximum(high, scores.max(-1, keepdims=True))
            weights, shrink = np.exp(scores - new), np.exp(high - new)
            total = total * shrink + weights.sum(-1, keepdims=True)
            acc, high = acc * shrink + weights @ values, new
        out[:, first : first + tile] = acc / total
    return rounded(out, dtype)


def exact_numpy(q: Any, k: Any, v: Any) -> Any:
    """float64, all scores stored."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    tokens, size = q.shape[-2:]
    scores = np.where(np.triu(np.ones((tokens, tokens), bool), 1), -np.inf, q @ k.swapaxes(-1, -2) * size**-0.5)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v
