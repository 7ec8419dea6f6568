"""Multi-head latent attention of DeepSeek-V2 and V3 as a block of a layer. Refuses to know pages, batches, backends.

A token's keys and values are one latent of `kv_lora_rank` numbers for all heads, and one rotated key of
`qk_rope_head_dim`; both are what the cache holds. Queries come straight from the hidden state, or by way of a latent of
their own (`q_lora_rank`). What attention does with the up-projection `kv_b` is in `labkit.attention.mla`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from labkit.attention import op
from labkit.attention.kernels.mla_latent import rotate_and_write
from labkit.attention.opaque import unified_mla_attention_with_output
from labkit.config import ModelConfig
from labkit.errors import ConfigError
from labkit.models.blocks import Named
from labkit.models.layers import linear, normalize, rms_norm

#: Of the norms of latents, whatever the model's own is: DeepSeek's code and transformers leave it at their default.
LATENT_EPS = 1e-6


class MLAAttention:
    """See the module; the methods of every block are described in `labkit.models.blocks`.

    The first projections, of the query (or its latent) and of the latent with the rotated key, are rows of one matrix,
    `qkv_a`. Weights are `[out, in]`, uninitialised. q_a_norm and q_b are None without `q_lora_rank`.
    """

    def __init__(self, config: ModelConfig, layer_index: int, dtype: torch.dtype, device: torch.device) -> None:
        if config.attention_bias:
            why = "its latent attention has biases (attention_bias), which are not computed"
            raise ConfigError(f"model {config.name!r}", why, "Use a model without them.")
        self.layer_index, self.heads = layer_index, config.num_heads
        self.nope, self.rope, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.rank, self.q_rank = config.kv_lora_rank, config.q_lora_rank

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        q_size = self.heads * (self.nope + self.rope)
        self.q_rows = q_size if self.q_rank is None else self.q_rank
        self.qkv_a = empty(self.q_rows + self.rank + self.rope, config.hidden_size)
        self.q_a_norm = None if self.q_rank is None else empty(self.q_rank)
        self.q_b = None if self.q_rank is None else empty(q_size, self.q_rank)
        self.kv_a_norm = empty(self.rank)
        self.kv_b = empty(self.heads * (self.nope + self.value), self.rank)
        self.o = empty(config.hidden_size, self.heads * self.value)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        """Attention of every token at its position; cos_sin: the model's rotary table, fp32 `[positions, rope]`."""
        tokens = x.shape[0]
        q, latent = linear(x, self.qkv_a).split((self.q_rows, self.rank + self.rope), dim=1)
        if self.q_a_norm is not None and self.q_b is not None:
            q = linear(rms_norm(q, self.q_a_norm, LATENT_EPS), self.q_b)
        q = q.view(tokens, self.heads, self.nope + self.rope)
        out = x.new_empty((tokens, self.heads, self.value))
        if x.is_cuda:  # norm, both rotations and cache write in one launch
            cache, _, slots = op.layer_cache(self.layer_index)
            rotate_and_write(q[..., self.nope :], latent, self.kv_a_norm, positions, cos_sin, cache, slots, LATENT_EPS)
            op.attend_latent(self.layer_index, q, self.kv_b, out)
        else:
            cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
            q, latent = self._ready(q, latent, cos, sin)
            op.latent_attention(self.layer_index, q, latent, self.kv_b, out)
        return linear(out.view(tokens, self.heads * self.value), self.o)

    def traced_forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """`forward` for a compiler: attention is an opaque operator. cos, sin: see `rotated_pairs`."""
        tokens = x.shape[0]
        q, latent = F.linear(x, self.qkv_a).split((self.q_rows, self.rank + self.rope), dim=1)
        if self.q_a_norm is not None and self.q_b is not None:
            q = F.linear(normalize(q.float(), self.q_a_norm, LATENT_EPS, x.dtype), self.q_b)
        q, latent = self._ready(q.view(tokens, self.heads, self.nope + self.rope), latent, cos, sin)
        out = x.new_empty((tokens, self.heads, self.value))
        unified_mla_attention_with_output(q, latent, self.kv_b, out, self.layer_index)
        return F.linear(out.view(tokens, self.heads * self.value), self.o)

    def _ready(
        self, q: torch.Tensor, latent: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries rotated, the latent normalised and its key rotated; new tensors, in plain torch operators."""
        q_nope, q_pe = q.split((self.nope, self.rope), dim=-1)
        kv_c, k_pe = latent.split((self.rank, self.rope), dim=-1)
        kv_c = normalize(kv_c.float(), self.kv_a_norm, LATENT_EPS, latent.dtype)
        k_pe = rotated_pairs(k_pe.unsqueeze(1), cos, sin).squeeze(1)
        return torch.cat((q_nope, rotated_pairs(q_pe, cos, sin)), dim=-1), torch.cat((kv_c, k_pe), dim=-1)

    def tensors(self) -> Named:
        for name in ("qkv_a", "q_a_norm", "q_b", "kv_a_norm", "kv_b", "o"):
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor

    def checkpoint_views(self, prefix: str) -> Named:
        prefix += "self_attn."
        q, latent = self.qkv_a.split((self.q_rows, self.rank + self.rope))
        if self.q_a_norm is None or self.q_b is None:
            yield prefix + "q_proj.weight", q
        else:
            yield prefix + "q_a_proj.weight", q
            yield prefix + "q_a_layernorm.weight", self.q_a_norm
            yield prefix + "q_b_proj.weight", self.q_b
        yield prefix + "kv_a_proj_with_mqa.weight", latent
        yield prefix + "kv_a_layernorm.weight", self.kv_a_norm
        yield prefix + "kv_b_proj.weight", self.kv_b
        yield prefix + "o_proj.weight", self.o


def rotated_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Neighbours (2i, 2i + 1) of the last dimension rotated, in place of the halves that other families pair.

    transformers' DeepSeek-V3 moves even and odd numbers apart as it does this; queries and keys alike, so scores are
    the same. x: `[num_tokens, heads, rope]`; cos, sin: fp32 `[num_tokens, 1, rope/2]`.
    """
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2).to(x.dtype)
