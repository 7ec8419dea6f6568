"""The decoder's forward in plain torch operators, for a compiler to read. Refuses to launch a kernel of its own.

What the fused kernels of `labkit.models.kernels` do by hand is written out as arithmetic here and in each block's
`traced_forward`, so that Inductor can fuse it its own way. It computes what `Decoder.forward` computes on a CPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from labkit.models.decoder import Decoder
from labkit.models.layers import normalize


def forward(decoder: Decoder, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Hidden states after the final norm, `[num_tokens, hidden_size]`; see `Decoder.forward`."""
    eps, plus_one = decoder.config.rms_norm_eps, decoder.config.norm_plus_one
    x = F.embedding(token_ids, decoder.embed_tokens)
    if decoder.embedding_multiplier != 1.0:
        x = x * decoder.embedding_multiplier
    cos, sin = decoder.cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    dtype, residual = x.dtype, x.float()
    x = normalize(residual, decoder.layers[0].input_norm, eps, dtype, plus_one)
    for layer, norm_after in zip(decoder.layers, decoder.norm_after, strict=True):
        x = layer.attention.traced_forward(x, cos, sin)
        if layer.attention_out_norm is not None:
            x = normalize(x.float(), layer.attention_out_norm, eps, dtype, plus_one)
        residual = residual + x
        x = normalize(residual, layer.mlp_norm, eps, dtype, plus_one)
        x = layer.mlp.traced_forward(x)
        if layer.mlp_out_norm is not None:
            x = normalize(x.float(), layer.mlp_out_norm, eps, dtype, plus_one)
        residual = residual + x
        x = normalize(residual, norm_after, eps, dtype, plus_one)
    return x
