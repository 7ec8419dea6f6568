"""The decoder's forward in plain torch operators, for a compiler to read. Refuses to launch a kernel of its own.

What the fused kernels of `labkit.models.kernels` do by hand is written out here as arithmetic, so that Inductor can
fuse it its own way. It computes what `Decoder.forward` computes on a CPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from labkit.attention.opaque import unified_attention_with_output
from labkit.models.decoder import Decoder, LayerWeights


def forward(decoder: Decoder, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Hidden states after the final norm, `[num_tokens, hidden_size]`; see `Decoder.forward`."""
    eps = decoder.config.rms_norm_eps
    x = F.embedding(token_ids, decoder.embed_tokens)
    cos, sin = decoder.cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    residual = x.float()
    x = _rms_norm(residual, decoder.layers[0].input_norm, eps, x.dtype)
    for index, layer in enumerate(decoder.layers):
        x = _attention(decoder, index, layer, x, cos, sin)
        residual = residual + x
        x = _rms_norm(residual, layer.post_attention_norm, eps, x.dtype)
        gate, up = F.linear(x, layer.gate_up).chunk(2, dim=-1)
        x = F.linear(F.silu(gate) * up, layer.down)
        residual = residual + x
        x = _rms_norm(residual, decoder.norm_after[index], eps, x.dtype)
    return x


def _attention(
    decoder: Decoder, index: int, layer: LayerWeights, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    config = decoder.config
    tokens, heads, kv_heads = x.shape[0], config.num_heads, config.num_kv_heads
    qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(tokens, heads + 2 * kv_heads, config.head_size)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q = _rms_norm(q.float(), layer.q_norm, config.rms_norm_eps, x.dtype)
        k = _rms_norm(k.float(), layer.k_norm, config.rms_norm_eps, x.dtype)
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    output = torch.empty_like(q)
    unified_attention_with_output(q, k, v, output, index)
    return F.linear(output.view(tokens, heads * config.head_size), layer.o, layer.o_bias)


def _rms_norm(x32: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(dtype) * weight


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
