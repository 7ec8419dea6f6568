"""The small operations between matrix products as Triton kernels, one launch each. Refuses to know layers and weights.

A decode step of a small model is bound by launches, not by arithmetic: residual add and norm, rotation of q and k,
gate and product are one kernel each. Statistics and rotation are computed in fp32; what transformers rounds to the
model's dtype on the way is rounded here too.
"""

from __future__ import annotations

from typing import Any

import torch

from labkit.launch import kernel, next_power_of_2

tl: Any = None  # `triton.language` once a kernel has been launched

_variants: dict[tuple[Any, ...], Any] = {}


@kernel(tensors="x_ptr residual_ptr weight_ptr out_ptr", numbers="num_rows eps")
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, num_rows, eps,
    X_STRIDE_TOKEN: tl.constexpr, X_STRIDE_HEAD: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr,
    HEADS: tl.constexpr, SIZE: tl.constexpr, ADD: tl.constexpr, PLUS_ONE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows of length SIZE. With ADD the residual stream becomes x + residual, rounded, and that is normed.

    With PLUS_ONE it is multiplied by 1 + weight and rounded once, as Gemma does.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (col < SIZE)[None, :]
    x_rows = row // HEADS * X_STRIDE_TOKEN + row % HEADS * X_STRIDE_HEAD
    weight = tl.load(weight_ptr + col, mask=col < SIZE, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + x_rows[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
    if ADD:
        at = row[:, None] * RESIDUAL_STRIDE + col[None, :]
        total = (x + tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + at, total, mask=mask)
        x = total.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / SIZE + eps)
    if PLUS_ONE:
        y = (x * scale[:, None] * (weight + 1.0)[None, :]).to(out_ptr.dtype.element_ty)
    else:
        normed = (x * scale[:, None]).to(x_ptr.dtype.element_ty).to(tl.float32)
        y = (normed * weight[None, :]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * SIZE + col[None, :], y, mask=mask)


@kernel(
    tensors="q_ptr k_ptr v_ptr positions_ptr cos_sin_ptr key_cache_ptr value_cache_ptr slots_ptr "
    "q_weight_ptr k_weight_ptr",
    numbers="eps",
)
def rotary_kernel(
    q_ptr, k_ptr, v_ptr, positions_ptr, cos_sin_ptr, key_cache_ptr, value_cache_ptr, slots_ptr,
    q_weight_ptr, k_weight_ptr, eps,
    Q_STRIDE_TOKEN: tl.constexpr, Q_STRIDE_HEAD: tl.constexpr,
    K_STRIDE_TOKEN: tl.constexpr, K_STRIDE_HEAD: tl.constexpr,
    V_STRIDE_TOKEN: tl.constexpr, V_STRIDE_HEAD: tl.constexpr,
    KC_STRIDE_PAGE: tl.constexpr, KC_STRIDE_TOKEN: tl.constexpr, KC_STRIDE_HEAD: tl.constexpr,
    VC_STRIDE_PAGE: tl.constexpr, VC_STRIDE_TOKEN: tl.constexpr, VC_STRIDE_HEAD: tl.constexpr,
    PAGE: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    NORM: tl.constexpr, WRITE: tl.constexpr, BLOCK_H: tl.constexpr, HALF_PADDED: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
):  # fmt: skip
    """One token and BLOCK_H heads of q, k or v. Grid: (num_tokens, blocks of q heads + of k heads [+ of v heads]).

    q and k are rotated in place by pairs (i, i + HEAD_SIZE / 2). With NORM each head is RMS-normed first (Qwen3). With
    WRITE the rotated k and v also go to the cache at the token's slot, unless that is −1.
    """
    HALF: tl.constexpr = HEAD_SIZE // 2
    Q_BLOCKS: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    K_BLOCKS: tl.constexpr = (NUM_KV_HEADS + BLOCK_H - 1) // BLOCK_H
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    h = tl.arange(0, BLOCK_H)[:, None]

    if block < Q_BLOCKS + K_BLOCKS:
        is_q = block < Q_BLOCKS
        h = h + tl.where(is_q, block, block - Q_BLOCKS) * BLOCK_H
        d = tl.arange(0, HALF_PADDED)[None, :]
        mask = (h < tl.where(is_q, NUM_HEADS, NUM_KV_HEADS)) & (d < HALF)
        position = tl.load(positions_ptr + token)
        cos = tl.load(cos_sin_ptr + position * HEAD_SIZE + d, mask=d < HALF, other=0.0).to(tl.float32)
        sin = tl.load(cos_sin_ptr + position * HEAD_SIZE + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)
        if is_q:
            at = q_ptr + token * Q_STRIDE_TOKEN + h * Q_STRIDE_HEAD + d
        else:
            at = k_ptr + token * K_STRIDE_TOKEN + h * K_STRIDE_HEAD + d
        x1 = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
        if NORM:
            if is_q:  # noqa: SIM108 (a choice of pointers is a branch for the compiler)
                w_at = q_weight_ptr + d
            else:
                w_at = k_weight_ptr + d
            w1 = tl.load(w_at, mask=d < HALF, other=0.0).to(tl.float32)
            w2 = tl.load(w_at + HALF, mask=d < HALF, other=0.0).to(tl.float32)
            scale = 1.0 / tl.sqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / HEAD_SIZE + eps)[:, None]
            x1 = ((x1 * scale).to(q_ptr.dtype.element_ty).to(tl.float32) * w1).to(q_ptr.dtype.element_ty).to(tl.float32)
            x2 = ((x2 * scale).to(q_ptr.dtype.element_ty).to(tl.float32) * w2).to(q_ptr.dtype.element_ty).to(tl.float32)
        y1 = (x1 * cos - x2 * sin).to(q_ptr.dtype.element_ty)
        y2 = (x2 * cos + x1 * sin).to(q_ptr.dtype.element_ty)
        tl.store(at, y1, mask=mask)
        tl.store(at + HALF, y2, mask=mask)
        if WRITE:
            slot = tl.load(slots_ptr + token)
            to_cache = mask & (slot >= 0) & (block >= Q_BLOCKS)
            at_cache = slot // PAGE * KC_STRIDE_PAGE + slot % PAGE * KC_STRIDE_TOKEN + h * KC_STRIDE_HEAD + d
            tl.store(key_cache_ptr + at_cache, y1, mask=to_cache)
            tl.store(key_cache_ptr + at_cache + HALF, y2, mask=to_cache)
    elif WRITE:
        # Names of their own: Triton merges what both branches assign, and the shapes differ.
        vh = h + (block - Q_BLOCKS - K_BLOCKS) * BLOCK_H
        vd = tl.arange(0, HEAD_PADDED)[None, :]
        v_slot = tl.load(slots_ptr + token)
        v_mask = (vh < NUM_KV_HEADS) & (vd < HEAD_SIZE) & (v_slot >= 0)
        v = tl.load(v_ptr + token * V_STRIDE_TOKEN + vh * V_STRIDE_HEAD + vd, mask=v_mask)
        v_at = v_slot // PAGE * VC_STRIDE_PAGE + v_slot % PAGE * VC_STRIDE_TOKEN + vh * VC_STRIDE_HEAD + vd
        tl.store(value_cache_ptr + v_at, v, mask=v_mask)


@kernel(tensors="gate_up_ptr out_ptr", numbers="num_rows")
def silu_and_mul_kernel(
    gate_up_ptr, out_ptr, num_rows,
    STRIDE: tl.constexpr, SIZE: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """silu(gate) · up, or with GELU the tanh form of gelu, for BLOCK columns of one row. Grid: (rows, blocks)."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < SIZE
    gate = tl.load(gate_up_ptr + row * STRIDE + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * STRIDE + SIZE + col, mask=mask, other=0.0).to(tl.float32)
    # gelu's 0.5 (1 + tanh z) is the sigmoid of 2z; 1.5957691… is 2 √(2/π).
    inner = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate) if GELU else gate
    act = (gate / (1.0 + tl.exp(-inner))).to(gate_up_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * SIZE + col, (act * up).to(out_ptr.dtype.element_ty), mask=mask)


def _warps(elements: int) -> int:
    return min(8, max(1, elements // 256))


def _norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, plus_one: bool, out: torch.Tensor
) -> None:
    num_rows = out.numel() // x.shape[-1]
    if num_rows == 0:
        return
    form = (
        x.dtype, weight.dtype, x.stride(), x.shape[1:], residual is not None and (residual.dtype, residual.stride(0)),
        plus_one,
    )  # fmt: skip
    found = _variants.get(form)
    if found is None:
        _check_rows("x", x)
        if residual is not None:
            _check_rows("residual", residual)
        size = x.shape[-1]
        heads = x.shape[1] if x.dim() == 3 else 1
        block = next_power_of_2(size)
        rows = 4 if block <= 256 else 1
        residual_stride = 0 if residual is None else residual.stride(0)
        constants = (
            x.stride(0), x.stride(1) if x.dim() == 3 else 0, residual_stride, heads, size,
            residual is not None, plus_one, rows, block,
        )  # fmt: skip
        variant = rms_norm_kernel.variant(
            (x.dtype, weight.dtype, residual is not None and residual.dtype), constants, _warps(rows * block), 1
        )
        found = _variants[form] = (variant, rows)
    variant, rows = found
    tensors = (x, x if residual is None else residual, weight, out)
    variant((-(-num_rows // rows), 1, 1), tensors, (num_rows, float(eps)))


def _check_rows(name: str, x: torch.Tensor) -> None:
    if x.stride(-1) != 1 or x.dim() not in (2, 3):
        raise ValueError(f"{name} must be [rows, size] or [tokens, heads, size] with a contiguous last dimension")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool = False) -> torch.Tensor:
    """x / √(mean(x²) + eps) · weight over the last dimension; a new contiguous tensor of the same shape and dtype.

    `x`: `[num_tokens, size]` or `[num_tokens, num_heads, size]`; may be a view of a fused projection. `plus_one`
    multiplies by 1 + weight.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _norm(x, None, weight, eps, plus_one, out)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual) for contiguous `[num_tokens, size]`, written into `x` and `residual`.

    In place, because an allocation costs a third of a launch; a program reads its rows whole before it writes them.
    """
    if not x.is_contiguous():
        raise ValueError("x must be contiguous to be overwritten")
    _norm(x, residual, weight, eps, plus_one, x)
    return x, residual


def rotary_(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Rotate the pairs (i, i + head_size/2) of every head of q and k by its token's position, in place.

    Args:
        query, key: `[num_tokens, num_heads or num_kv_heads, head_size]`; may be views of a fused projection.
        positions: int64 `[num_tokens]`.
        cos_sin: fp32 `[max_positions, head_size]`, cosines then sines, contiguous.
    """
    _rotary(query, key, None, positions, cos_sin)


def rotary_and_write_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    query_weight: torch.Tensor | None = None,
    key_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Everything between the QKV projection and attention in one launch.

    RMS norm per head of q and k where weights `[head_size]` are given (Qwen3), `rotary_`, and `write_kv` of the
    rotated k and of v; see those two for shapes. q and k change in place.
    """
    weights = None if query_weight is None or key_weight is None else (query_weight, key_weight)
    _rotary(query, key, (value, key_cache, value_cache, slot_mapping), positions, cos_sin, weights, eps)


def _rotary(
    query: torch.Tensor,
    key: torch.Tensor,
    write: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 1e-6,
) -> None:
    num_tokens, num_heads, size = query.shape
    if num_tokens == 0:
        return
    # A tensor stands in where an optional one is absent; the compiled kernel does not touch it.
    value, key_cache, value_cache, slots = write or (key, key, key, positions)
    q_weight, k_weight = weights or (query, query)
    form = (
        "rotary", write is not None, weights is not None, query.dtype, query.shape[1:], key.shape[1], query.stride(),
        key.stride(), value.stride(), key_cache.stride(), value_cache.stride(), key_cache.shape[1], cos_sin.dtype,
    )  # fmt: skip
    found = _variants.get(form)
    if found is None:
        for name, x in (("query", query), ("key", key), ("value", value), ("key_cache", key_cache)):
            if x.stride(-1) != 1:
                raise ValueError(f"the last dimension of {name} is not contiguous (stride {x.stride(-1)})")
        if size % 2 or not cos_sin.is_contiguous() or cos_sin.shape[-1] != size:
            raise ValueError(f"cos_sin must be contiguous [max_positions, {size}] and the head size even")
        num_kv_heads = key.shape[1]
        padded = next_power_of_2(size)
        block_h = min(next_power_of_2(max(num_heads, num_kv_heads)), max(1, 1024 // padded))
        blocks = -(-num_heads // block_h) + (2 if write else 1) * -(-num_kv_heads // block_h)
        cache_strides = (*key_cache.stride()[:3], *value_cache.stride()[:3]) if write else (0,) * 6
        constants = (
            *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *cache_strides,
            key_cache.shape[1], num_heads, num_kv_heads, size, weights is not None, write is not None,
            block_h, next_power_of_2(size // 2), padded,
        )  # fmt: skip
        variant = rotary_kernel.variant((query.dtype, cos_sin.dtype), constants, _warps(block_h * padded), 1)
        found = _variants[form] = (variant, blocks)
    variant, blocks = found
    tensors = (query, key, value, positions, cos_sin, key_cache, value_cache, slots, q_weight, k_weight)
    variant((num_tokens, blocks, 1), tensors, (float(eps),))


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up of a fused `[num_tokens, 2 · intermediate]` projection → `[num_tokens, intermediate]`."""
    return _act_and_mul(gate_up, False)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) · up, in the tanh form; see `silu_and_mul`."""
    return _act_and_mul(gate_up, True)


def _act_and_mul(gate_up: torch.Tensor, gelu: bool) -> torch.Tensor:
    num_rows, double = gate_up.shape
    size = double // 2
    out = gate_up.new_empty((num_rows, size))
    if num_rows == 0:
        return out
    form = ("silu", gelu, gate_up.dtype, double, gate_up.stride())
    found = _variants.get(form)
    if found is None:
        _check_rows("gate_up", gate_up)
        block = min(1024, next_power_of_2(size))
        constants = (gate_up.stride(0), size, gelu, block)
        variant = silu_and_mul_kernel.variant((gate_up.dtype,), constants, _warps(block), 1)
        found = _variants[form] = (variant, -(-size // block))
    variant, blocks = found
    variant((num_rows, blocks, 1), (gate_up, out), (num_rows,))
    return out
