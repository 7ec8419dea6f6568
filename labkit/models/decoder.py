"""The decoder-only transformer of the Llama and Qwen3 families. Refuses to know requests, pages, batches and graphs.

Tokens lie flat: `[num_tokens]` of any mixture of requests, each with its position; only attention knows which belong
together. Nothing here depends on a tensor's value, so a forward pass can be captured as it stands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from labkit.attention import op
from labkit.config import ModelConfig
from labkit.models.layers import (
    add_rms_norm,
    linear,
    rms_norm,
    rotary_,
    rotary_and_write_kv,
    rotary_frequencies,
    rotary_table,
    silu_and_mul,
)


@dataclasses.dataclass(eq=False)
class LayerWeights:
    """The weights of one layer, `[out, in]`. q, k and v are rows of one matrix, gate and up of another: two launches
    instead of five. Biases and the norms of q and k are None where the family has none.
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    post_attention_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Decoder:
    """Embedding, layers, final norm and LM head, over uninitialised weights; a loader fills `checkpoint_views()`.

    A plain class: `torch.nn.Module` pays a dictionary search per weight and call, which is host time in
    every eager step.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        hidden, head_size = config.hidden_size, config.head_size
        q_size, kv_size = config.num_heads * head_size, config.num_kv_heads * head_size

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=self.device)

        self.embed_tokens = empty(config.vocab_size, hidden)
        self.layers = [
            LayerWeights(
                input_norm=empty(hidden),
                qkv=empty(q_size + 2 * kv_size, hidden),
                qkv_bias=empty(q_size + 2 * kv_size) if config.attention_bias else None,
                q_norm=empty(head_size) if config.qk_norm else None,
                k_norm=empty(head_size) if config.qk_norm else None,
                o=empty(hidden, q_size),
                o_bias=empty(hidden) if config.attention_bias else None,
                post_attention_norm=empty(hidden),
                gate_up=empty(2 * config.intermediate_size, hidden),
                down=empty(hidden, config.intermediate_size),
            )
            for _ in range(config.num_layers)
        ]
        self.norm = empty(hidden)
        self.lm_head = self.embed_tokens if config.tie_word_embeddings else empty(config.vocab_size, hidden)
        # Made on the CPU everywhere: the same table, to the bit, on every device.
        frequencies = rotary_frequencies(head_size, config.rope_theta, config.rope_scaling)
        self.cos_sin = rotary_table(config.max_position_embeddings, frequencies).to(self.device)
        # A layer ends with the norm that the next one begins with, so that it fuses with the residual addition.
        self.norm_after = [layer.input_norm for layer in self.layers[1:]] + [self.norm]

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states after the final norm, `[num_tokens, hidden_size]`.

        Args:
            token_ids, positions: int64 `[num_tokens]`, in range; a position is below `max_position_embeddings`.

        Runs inside a forward context of `labkit.attention.op`, which holds the KV cache.
        """
        eps = self.config.rms_norm_eps
        x = F.embedding(token_ids, self.embed_tokens)
        # The residual stream is fp32 in every dtype: rounding it to bf16 after each addition would be the largest part
        # of the model's error, and keeping it costs no launch.
        residual = x.float()
        x = rms_norm(x, self.layers[0].input_norm, eps)
        for index, layer in enumerate(self.layers):
            x = self._attention(index, layer, x, positions)
            x, residual = add_rms_norm(x, residual, layer.post_attention_norm, eps)
            x = linear(silu_and_mul(linear(x, layer.gate_up)), layer.down)
            x, residual = add_rms_norm(x, residual, self.norm_after[index], eps)
        return x

    __call__ = forward

    def _attention(self, index: int, layer: LayerWeights, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        config = self.config
        num_tokens, heads, kv_heads = x.shape[0], config.num_heads, config.num_kv_heads
        qkv = linear(x, layer.qkv, layer.qkv_bias).view(num_tokens, heads + 2 * kv_heads, config.head_size)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        out = x.new_empty((num_tokens, heads, config.head_size))
        if x.is_cuda:  # norms of q and k, rotation and cache write in one launch
            cache = op.layer_cache(index)
            norms = (layer.q_norm, layer.k_norm)
            rotary_and_write_kv(q, k, v, positions, self.cos_sin, cache, norms, config.rms_norm_eps)
            op.attend(index, q, out)
        else:
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = rms_norm(q, layer.q_norm, config.rms_norm_eps), rms_norm(k, layer.k_norm, config.rms_norm_eps)
            rotary_(q, k, positions, self.cos_sin)
            op.attention(index, q, k, v, out)
        return linear(out.view(num_tokens, heads * config.head_size), layer.o, layer.o_bias)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[rows, hidden_size]` → `[rows, vocab_size]`, in the model's dtype."""
        return linear(hidden, self.lm_head)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that a forward pass reads beside its arguments, whole, under a name of its own."""
        found = {"embed_tokens": self.embed_tokens, "norm": self.norm, "cos_sin": self.cos_sin}
        for index, layer in enumerate(self.layers):
            for field in dataclasses.fields(layer):
                tensor = getattr(layer, field.name)
                if tensor is not None:
                    found[f"layers.{index}.{field.name}"] = tensor
        return found

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        """Every weight under its Hugging Face name, as a view into the fused matrices: writing to it loads."""
        return dict(self._checkpoint_views())

    def _checkpoint_views(self) -> Iterator[tuple[str, torch.Tensor]]:
        config = self.config
        q_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        yield "model.embed_tokens.weight", self.embed_tokens
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            yield prefix + "input_layernorm.weight", layer.input_norm
            for kind, fused in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
                if fused is not None:
                    for name, rows in zip("qkv", fused.split((q_size, kv_size, kv_size)), strict=True):
                        yield f"{prefix}self_attn.{name}_proj.{kind}", rows
            if layer.q_norm is not None and layer.k_norm is not None:
                yield prefix + "self_attn.q_norm.weight", layer.q_norm
                yield prefix + "self_attn.k_norm.weight", layer.k_norm
            yield prefix + "self_attn.o_proj.weight", layer.o
            if layer.o_bias is not None:
                yield prefix + "self_attn.o_proj.bias", layer.o_bias
            yield prefix + "post_attention_layernorm.weight", layer.post_attention_norm
            for name, rows in zip(("gate", "up"), layer.gate_up.chunk(2), strict=True):
                yield f"{prefix}mlp.{name}_proj.weight", rows
            yield prefix + "mlp.down_proj.weight", layer.down
        yield "model.norm.weight", self.norm
        if not config.tie_word_embeddings:
            yield "lm_head.weight", self.lm_head

    def num_bytes(self) -> int:
        """Bytes of all weights and of the rotary table."""
        views = self.checkpoint_views().values()
        return sum(view.nbytes for view in views) + self.cos_sin.nbytes
