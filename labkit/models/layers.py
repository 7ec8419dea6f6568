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


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool = False) -> torch.Tensor:
    """x / √(mean(x²) + eps) · weight over the last dimension, in fp32; same shape and dtype as `x`.

    `x` may be a view of a fused projection (`[num_tokens, num_heads, head_size]`, last dimension contiguous).
    `plus_one` multiplies by 1 + weight, rounded once at the end (Gemma).
    """
    if x.is_cuda:
        return _kernels().rms_norm(x, weight, eps, plus_one)
    return normalize(x.float(), weight, eps, x.dtype, plus_one)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(residual + x) in the dtype of `x`, residual + x). `residual` is fp32. The kernel writes into both."""
    if x.is_cuda:
        return _kernels().add_rms_norm(x, residual, weight, eps, plus_one)
    residual = residual + x
    return normalize(residual, weight, eps, x.dtype, plus_one), residual


def normalize(
    x32: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype, plus_one: bool = False
) -> torch.Tensor:
    """The norm of an fp32 tensor in `dtype`, in plain torch operators."""
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + weight.float())).to(dtype) if plus_one else normed.to(dtype) * weight


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
    return gated(gate_up, "silu")


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) · up, with the tanh form of gelu; see `silu_and_mul`."""
    if gate_up.is_cuda:
        return _kernels().gelu_tanh_and_mul(gate_up)
    return gated(gate_up, "gelu_pytorch_tanh")


def gated(gate_up: torch.Tensor, hidden_act: str) -> torch.Tensor:
    """act(gate) · up in plain torch operators."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) if hidden_act == "silu" else F.gelu(gate, approximate="tanh")) * up


#: The fused form of each activation, by its name in transformers.
ACTIVATIONS = {"silu": silu_and_mul, "gelu_pytorch_tanh": gelu_tanh_and_mul}


def rotary_frequencies(head_size: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """Radians per position of each rotary pair, fp32 `[head_size/2]`: theta^(−2i/head_size), scaled.

    Both ways of scaling leave short wavelengths alone, divide long ones by `factor`, and blend in between. Llama 3.1
    blends by how often a wavelength fits into the original context (`low_freq_factor` to `high_freq_factor` times),
    YaRN linearly over the pairs between those that turn `beta_fast` and `beta_slow` times in it.
    """
    frequencies = 1.0 / (theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size))
    if scaling is None:
        return frequencies
    if scaling.kind == "yarn":
        blend = _yarn_blend(head_size, theta, scaling)
        return (1 - blend) * frequencies / scaling.factor + blend * frequencies
    turns = scaling.original_max_position_embeddings / (2 * math.pi / frequencies)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def _yarn_blend(head_size: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """1 where a pair keeps its frequency, 0 where that is divided by the factor; fp32 `[head_size/2]`."""

    def pair_that_turns(times: float) -> float:
        wavelength = scaling.original_max_position_embeddings / (times * 2 * math.pi)
        return head_size * math.log(wavelength) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    high += 0.001 if low == high else 0.0
    ramp = (torch.arange(head_size // 2, dtype=torch.float32) - low) / (high - low)
    return 1 - ramp.clamp(0, 1)


def rotary_table(max_positions: int, frequencies: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """Cosines, then sines, of every position: fp32 `[max_positions, head_size]` for `[head_size/2]` frequencies.

    factor: multiplies all of them (YaRN).
    """
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)
