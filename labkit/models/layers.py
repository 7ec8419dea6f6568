"""The arithmetic between the matrix products: norms, rotary embedding, gated activation. Refuses to know the model.

Each function has two paths: on CUDA one fused kernel of `labkit.models.kernels`, one launch each; elsewhere a few torch
operators that say what the kernel computes. Numerics follow transformers' Llama and Qwen3: norms in fp32, rotary
tables in fp32.
"""

from __future__ import annotations

import functools
import math
from types import ModuleType

import torch
import torch.nn.functional as F

from labkit.config import RopeScaling


@functools.cache
def _kernels() -> ModuleType:
    from labkit.models import kernels  # imports triton, so only where it is used

    return kernels


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x · weightᵀ (+ bias), for `[rows, in]` and `[out, in]`.

    On CUDA the same kernel as F.linear's, called where it ends up: 18 µs of host time against 23, 121 times a step.
    """
    if not x.is_cuda:
        return F.linear(x, weight, bias)
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / √(mean(x²) + eps) · weight over the last dimension, in fp32; same shape and dtype as `x`.

    `x` may be a view of a fused projection (`[num_tokens, num_heads, head_size]`, last dimension contiguous).
    """
    if x.is_cuda:
        return _kernels().rms_norm(x, weight, eps)
    return _normalize(x.float(), eps).to(x.dtype) * weight


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(residual + x) in the dtype of `x`, residual + x). `residual` is fp32. The kernel writes into both."""
    if x.is_cuda:
        return _kernels().add_rms_norm(x, residual, weight, eps)
    residual = residual + x
    return _normalize(residual, eps).to(x.dtype) * weight, residual


def _normalize(x32: torch.Tensor, eps: float) -> torch.Tensor:
    return x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)


def rotary_(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Rotate the pairs (i, i + head_size/2) of every head by its token's position, in place.

    Args:
        query, key: `[num_tokens, num_heads or num_kv_heads, head_size]`; may be views of a fused projection.
        positions: int64 `[num_tokens]`.
        cos_sin: fp32 `[max_positions, head_size]`, cosines then sines; see `rotary_table`.
    """
    if query.is_cuda:
        _kernels().rotary_(query, key, positions, cos_sin)
        return
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [num_tokens, 1, head_size/2]
    for x in (query, key):
        first, second = x.chunk(2, dim=-1)
        x1, x2 = first.float(), second.float()
        rotated = x1 * cos - x2 * sin, x2 * cos + x1 * sin
        first.copy_(rotated[0])
        second.copy_(rotated[1])


def rotary_and_write_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor | None, torch.Tensor | None],
    eps: float,
) -> None:
    """Norms of q and k where there are weights, `rotary_`, and K and V into their slots: one launch, on CUDA only.

    cache: key cache, value cache, slot mapping, as `labkit.attention.op.layer_cache` gives them.
    norms: weights `[head_size]` of the norms of q and k, None where the family has none.
    """
    _kernels().rotary_and_write_kv(
        query, key, value, positions, cos_sin, *cache, query_weight=norms[0], key_weight=norms[1], eps=eps
    )


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up of a fused `[num_tokens, 2 * intermediate]` projection → `[num_tokens, intermediate]`."""
    if gate_up.is_cuda:
        return _kernels().silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotary_frequencies(head_size: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """Radians per position of each rotary pair, fp32 `[head_size/2]`: theta^(−2i/head_size), scaled as Llama 3.1 does.

    Scaling leaves short wavelengths alone, divides long ones by `factor`, and blends in between, where a wavelength
    fits into the original context between `low_freq_factor` and `high_freq_factor` times.
    """
    frequencies = 1.0 / (theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size))
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position_embeddings / (2 * math.pi / frequencies)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def rotary_table(max_positions: int, frequencies: torch.Tensor) -> torch.Tensor:
    """Cosines, then sines, of every position: fp32 `[max_positions, head_size]` for `[head_size/2]` frequencies."""
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)
