"""Dense attention in float64 over a paged cache: the answer every backend is judged by. Shares no code with labkit.

Error rule: a backend may be twice as far from this reference as dense torch in the same dtype, plus 1e-5.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch

from labkit.attention.metadata import AttentionMetadata


@dataclasses.dataclass
class PagedBatch:
    """A random mixed batch: request i brings `query_lens[i]` tokens and has `kv_lens[i]` keys, its own included."""

    query: torch.Tensor  # [T, Hq, D]
    key_cache: torch.Tensor  # [NB, BS, Hkv, D]
    value_cache: torch.Tensor
    query_lens: list[int]
    kv_lens: list[int]
    tables: list[list[int]]
    scale: float

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    def keys(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Dense K and V of one request, `[kv_len, Hkv, D]`."""
        n = self.kv_lens[request]
        pages = self.tables[request][: math.ceil(n / self.key_cache.shape[1])]
        return self.key_cache[pages].flatten(0, 1)[:n], self.value_cache[pages].flatten(0, 1)[:n]

    def metadata(self, *, pad_reqs: int = 0, pad_tokens: int = 0, max_blocks: int | None = None) -> AttentionMetadata:
        """This batch as a backend sees it, with padding behind it."""
        device = self.query.device
        reqs, tokens = len(self.query_lens), self.num_tokens
        starts = np.zeros(reqs + pad_reqs + 1, dtype=np.int32)
        starts[1 : reqs + 1] = np.cumsum(self.query_lens)
        starts[reqs + 1 :] = tokens
        lens = np.array(self.kv_lens + [0] * pad_reqs, dtype=np.int32)
        width = max_blocks or max([len(t) for t in self.tables], default=1) or 1
        table = np.zeros((reqs + pad_reqs, width), dtype=np.int32)
        for row, blocks in enumerate(self.tables):
            table[row, : len(blocks)] = blocks
        return AttentionMetadata(
            num_reqs=reqs + pad_reqs,
            num_tokens=tokens + pad_tokens,
            num_actual_reqs=reqs,
            num_actual_tokens=tokens,
            max_query_len=max(self.query_lens, default=1),
            max_seq_len=max(self.kv_lens, default=1),
            query_start_loc=torch.from_numpy(starts).to(device),
            seq_lens=torch.from_numpy(lens).to(device),
            block_table=torch.from_numpy(table).to(device),
            slot_mapping=torch.full((tokens + pad_tokens,), -1, dtype=torch.int64, device=device),
            query_start_loc_cpu=starts,
            seq_lens_cpu=lens,
            is_uniform_decode=all(n == 1 for n in self.query_lens),
        )


def random_batch(
    query_lens: list[int],
    kv_lens: list[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    poison: bool = True,
    spare_blocks: int = 3,
) -> PagedBatch:
    """A batch with scattered pages. With `poison` all that no request may read is NaN, the null block included."""
    rng = torch.Generator().manual_seed(seed)
    needed = [math.ceil(n / block_size) for n in kv_lens]
    order = (torch.randperm(sum(needed) + spare_blocks, generator=rng) + 1).tolist()
    tables, at = [], 0
    for n in needed:
        tables.append(order[at : at + n])
        at += n
    shape = (len(order) + 1, block_size, num_kv_heads, head_size)
    caches = [torch.randn(shape, generator=rng) for _ in range(2)]
    if poison:
        readable = torch.zeros(shape[:2], dtype=torch.bool)
        for table, n in zip(tables, kv_lens, strict=True):
            for first, page in zip(range(0, n, block_size), table, strict=True):
                readable[page, : n - first] = True
        for cache in caches:
            cache[~readable] = math.nan
    query = torch.randn((sum(query_lens), num_heads, head_size), generator=rng)
    key_cache, value_cache, query = (t.to(device=device, dtype=dtype) for t in (*caches, query))
    return PagedBatch(query, key_cache, value_cache, list(query_lens), list(kv_lens), tables, head_size**-0.5)


def dense_attention(
    batch: PagedBatch,
    *,
    dtype: torch.dtype = torch.float64,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[T, Hq, D]` and natural-log LSE `[T, Hq]`, computed request by request with one dense mask each."""
    outputs, lses = [], []
    heads = batch.query.shape[1]
    first = 0
    for i, (n, length) in enumerate(zip(batch.query_lens, batch.kv_lens, strict=True)):
        q = batch.query[first : first + n].to(dtype)
        first += n
        k, v = (t.to(dtype).repeat_interleave(heads // t.shape[1], dim=1) for t in batch.keys(i))
        scores = torch.einsum("qhd,khd->hqk", q, k) * batch.scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        position = torch.arange(length, device=q.device)
        last = torch.arange(length - n, length, device=q.device)[:, None]
        seen = position <= last
        if window is not None:
            seen = seen & (position > last - window)
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            extra = sinks.to(dtype)[:, None, None].expand(heads, n, 1)
            scores = torch.cat([scores, extra], dim=-1)
        lse = scores.logsumexp(-1)
        weights = torch.where(torch.isneginf(lse)[..., None], 0.0, (scores - lse[..., None]).exp())
        weights = weights[..., :length]
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
        lses.append(lse.transpose(0, 1))
    if not outputs:
        return torch.zeros_like(batch.query, dtype=dtype), torch.zeros(batch.query.shape[:2], dtype=dtype)
    return torch.cat(outputs), torch.cat(lses)


def assert_attention_close(
    batch: PagedBatch, output: torch.Tensor, *, what: str = "", **features: object
) -> torch.Tensor:
    """The numerics rule of the project, with the largest error named. Returns the exact LSE `[T, Hq]`."""
    exact, lse = dense_attention(batch, **features)  # type: ignore[arg-type]
    same_dtype, _ = dense_attention(batch, dtype=batch.query.dtype, **features)  # type: ignore[arg-type]
    assert torch.isfinite(output).all(), f"{what}: not finite"
    allowed = 2 * (same_dtype.double() - exact).abs().max().item() + 1e-5 if exact.numel() else 0.0
    error = (output.double() - exact).abs().max().item() if exact.numel() else 0.0
    assert error <= allowed, f"{what}: error {error:.2e} above the allowed {allowed:.2e}"
    return lse
