"""What happens to a token's latent and rotated queries before attention, in one launch. Refuses to know attention.

The latent is normalised and written into the cache, the key's rotary part is rotated and written behind it, and the
queries' rotary parts are rotated where they lie. Pairs are neighbours, (2i, 2i + 1), as DeepSeek's weights have them.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from labkit.launch import kernel, next_power_of_2

if TYPE_CHECKING:
    import torch

tl: Any = None  # `triton.language` once a kernel has been launched

HAVE_TRITON = importlib.util.find_spec("triton") is not None
BLOCK_H = 8


@kernel(tensors="q_ptr latent_ptr weight_ptr positions_ptr cos_sin_ptr cache_ptr slots_ptr", numbers="eps")
def mla_latent_kernel(
    q_ptr, latent_ptr, weight_ptr, positions_ptr, cos_sin_ptr, cache_ptr, slots_ptr, eps,
    Q_STRIDE_TOKEN: tl.constexpr, Q_STRIDE_HEAD: tl.constexpr, LATENT_STRIDE_TOKEN: tl.constexpr,
    CACHE_STRIDE_PAGE: tl.constexpr, CACHE_STRIDE_TOKEN: tl.constexpr, PAGE: tl.constexpr,
    NUM_HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, READY: tl.constexpr,
    RANK_PADDED: tl.constexpr, HALF_PADDED: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One token's latent (program 0 of the second axis), or the rotary parts of BLOCK_H of its query heads.

    Grid: (num_tokens, 1 + blocks of heads). With READY the latent is normalised and rotated already and only written.
    """
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, HALF_PADDED)
    pair_ok = i < ROPE // 2
    # Names differ between the branches: Triton merges what both assign, and the shapes differ.
    if tl.program_id(1) == 0:
        slot = tl.load(slots_ptr + token)
        row_ptr = latent_ptr + token * LATENT_STRIDE_TOKEN
        to_ptr = cache_ptr + slot // PAGE * CACHE_STRIDE_PAGE + slot % PAGE * CACHE_STRIDE_TOKEN
        d = tl.arange(0, RANK_PADDED)
        x = tl.load(row_ptr + d, mask=d < RANK, other=0.0)
        a = tl.load(row_ptr + RANK + 2 * i, mask=pair_ok, other=0.0)
        b = tl.load(row_ptr + RANK + 2 * i + 1, mask=pair_ok, other=0.0)
        if not READY:
            x32 = x.to(tl.float32)
            x32 = x32 / tl.sqrt(tl.sum(x32 * x32, 0) / RANK + eps)
            weight = tl.load(weight_ptr + d, mask=d < RANK, other=0.0)
            x = (x32.to(x.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)
            key_angles = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * ROPE
            key_cos = tl.load(key_angles + i, mask=pair_ok, other=0.0)
            key_sin = tl.load(key_angles + ROPE // 2 + i, mask=pair_ok, other=0.0)
            a32 = a.to(tl.float32)
            b32 = b.to(tl.float32)
            a = (a32 * key_cos - b32 * key_sin).to(a.dtype)
            b = (b32 * key_cos + a32 * key_sin).to(b.dtype)
        tl.store(to_ptr + d, x, mask=(d < RANK) & (slot >= 0))
        tl.store(to_ptr + RANK + 2 * i, a, mask=pair_ok & (slot >= 0))
        tl.store(to_ptr + RANK + 2 * i + 1, b, mask=pair_ok & (slot >= 0))
    elif not READY:
        head = (tl.program_id(1) - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        mask = (head < NUM_HEADS)[:, None] & pair_ok[None, :]
        at = q_ptr + token * Q_STRIDE_TOKEN + head[:, None] * Q_STRIDE_HEAD + 2 * i[None, :]
        angles = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * ROPE
        cos = tl.load(angles + i, mask=pair_ok, other=0.0)[None, :]
        sin = tl.load(angles + ROPE // 2 + i, mask=pair_ok, other=0.0)[None, :]
        q1 = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        q2 = tl.load(at + 1, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, (q1 * cos - q2 * sin).to(q_ptr.dtype.element_ty), mask=mask)
        tl.store(at + 1, (q2 * cos + q1 * sin).to(q_ptr.dtype.element_ty), mask=mask)


_variants: dict[tuple[Any, ...], Any] = {}


def rotate_and_write(
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    norm_weight: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    eps: float,
) -> None:
    """Rotate `query_rope` in place; norm and rotate `latent` into its slots. One launch, wherever Triton runs.

    Args:
        query_rope: `[num_tokens, num_heads, rope]`, may be a view of the projection.
        latent: `[num_tokens, rank + rope]`, may be a view; it keeps its values.
        norm_weight: `[rank]`. cos_sin: fp32 `[max_positions, rope]`, cosines then sines. positions: `[num_tokens]`.
        cache: `[num_blocks, block_size, 1, rank + rope]`. slot_mapping: int64 `[num_tokens]`, −1 is not written.
    """
    _launch(query_rope, latent, norm_weight, positions, cos_sin, cache, slot_mapping, eps, ready=False)


def write_latent(latent: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write latents that are normalised and rotated already, `[num_tokens, rank + rope]`, into their slots."""
    if latent.is_cuda and HAVE_TRITON:
        write_latent_triton(latent, cache, slot_mapping)
    else:
        write_latent_torch(latent, cache, slot_mapping)


def write_latent_triton(latent: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """`write_latent` by the kernel, wherever Triton runs."""
    # What the write does not read is stood in for.
    _launch(latent.unsqueeze(1), latent, latent, slot_mapping, latent, cache, slot_mapping, 0.0, ready=True)


def write_latent_torch(latent: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """`write_latent` in plain torch; see `labkit.paging.cache_write.write_kv_torch` on padding."""
    block_size, cache = cache.shape[1], cache.squeeze(2)
    real = slot_mapping >= 0
    if not latent.is_cuda:
        if not bool(real.all()):
            latent, slot_mapping = latent[real], slot_mapping[real]
        cache[slot_mapping // block_size, slot_mapping % block_size] = latent.to(cache.dtype)
        return
    slots = slot_mapping.clamp(min=0)
    page, offset = slots // block_size, slots % block_size
    cache[page, offset] = latent.to(cache.dtype).where(real[:, None], cache[page, offset])


def _launch(
    query: torch.Tensor, latent: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor,
    cache: torch.Tensor, slots: torch.Tensor, eps: float, *, ready: bool,
) -> None:  # fmt: skip
    tokens, width = latent.shape
    if tokens == 0:
        return
    # A write alone has no queries; the width of the rotary part does not matter to it as long as it is even.
    rope = 2 if ready else query.shape[2]
    heads = 0 if ready else query.shape[1]
    form = (
        query.dtype, latent.dtype, cache.dtype, positions.dtype, query.stride(), latent.stride(), cache.stride(),
        cache.shape[1], heads, width, rope, ready,
    )  # fmt: skip
    variant = _variants.get(form)
    if variant is None:
        for name, x in (("query", query), ("latent", latent), ("cache", cache)):
            if x.stride(-1) != 1:
                raise ValueError(f"the last dimension of {name} is not contiguous (stride {x.stride(-1)})")
        rank = width - rope
        variant = _variants[form] = mla_latent_kernel.variant(
            (latent.dtype, cache.dtype, positions.dtype),
            (
                *query.stride()[:2], latent.stride(0), cache.stride(0), cache.stride(1), cache.shape[1], max(heads, 1),
                rank, rope, ready, next_power_of_2(rank), next_power_of_2(max(rope // 2, 1)), BLOCK_H,
            ),
            4, 1,
        )  # fmt: skip
    tensors = (query, latent, weight, positions, cos_sin, cache, slots)
    variant((tokens, 1 + -(-heads // BLOCK_H), 1), tensors, (eps,))
