"""The decoder-only transformer around its blocks. Refuses to know requests, pages, batches and graphs.

Tokens lie flat: `[num_tokens]` of any mixture of requests, each with its position; only attention knows which belong
together. Nothing here depends on a tensor's value, so a forward pass can be captured as it stands. What a layer is made
of is in `labkit.models.blocks`, `labkit.models.moe` (experts) and `labkit.models.mla` (latent attention).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from labkit.config import ModelConfig
from labkit.models.blocks import Attention, DenseMLP, Named
from labkit.models.layers import add_rms_norm, linear, rms_norm, rotary_frequencies, rotary_table


class DecoderLayer:
    """Norms, the attention block and the MLP block of one layer.

    input_norm and mlp_norm come before the blocks. attention_out_norm and mlp_out_norm come after them where the family
    has sandwich norms (Gemma-2), and are None elsewhere.
    """

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device) -> None:
        def norm(present: bool = True) -> Any:
            return torch.empty(config.hidden_size, dtype=dtype, device=device) if present else None

        self.input_norm: torch.Tensor = norm()
        self.attention: Any = _attention_block(config, index, dtype, device)
        self.attention_out_norm: torch.Tensor | None = norm(config.sandwich_norms)
        self.mlp_norm: torch.Tensor = norm()
        self.mlp: Any = _mlp_block(config, index, dtype, device)
        self.mlp_out_norm: torch.Tensor | None = norm(config.sandwich_norms)

    def tensors(self) -> Named:
        for name in ("input_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"):
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor
        yield from self.attention.tensors()
        yield from self.mlp.tensors()

    def checkpoint_views(self, prefix: str) -> Named:
        yield prefix + "input_layernorm.weight", self.input_norm
        yield from self.attention.checkpoint_views(prefix)
        if self.attention_out_norm is None or self.mlp_out_norm is None:
            yield prefix + "post_attention_layernorm.weight", self.mlp_norm
        else:
            yield prefix + "post_attention_layernorm.weight", self.attention_out_norm
            yield prefix + "pre_feedforward_layernorm.weight", self.mlp_norm
            yield prefix + "post_feedforward_layernorm.weight", self.mlp_out_norm
        yield from self.mlp.checkpoint_views(prefix)


def _attention_block(config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device) -> Any:
    if config.uses_mla:
        from labkit.models.mla import MLAAttention

        return MLAAttention(config, index, dtype, device)
    return Attention(config, index, dtype, device)


def _mlp_block(config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device) -> Any:
    if config.is_moe_layer(index):
        from labkit.models.moe import MoE

        return MoE(config, dtype, device)
    return DenseMLP(config, dtype, device)


class Decoder:
    """Embedding, layers, final norm and LM head, over uninitialised weights; a loader fills `checkpoint_views()`.

    A plain class: `torch.nn.Module` pays a dictionary search per weight and call, which is host time in
    every eager step.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device(device)

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=self.device)

        self.embed_tokens = empty(config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(config, index, dtype, self.device) for index in range(config.num_layers)]
        self.norm = empty(config.hidden_size)
        self.lm_head = self.embed_tokens if config.tie_word_embeddings else empty(config.vocab_size, config.hidden_size)
        # Made on the CPU everywhere: the same table, to the bit, on every device.
        scaling = config.rope_scaling
        frequencies = rotary_frequencies(config.rotary_size, config.rope_theta, scaling)
        factor = scaling.table_factor if scaling else 1.0
        self.cos_sin = rotary_table(config.max_position_embeddings, frequencies, factor).to(self.device)
        # A layer ends with the norm that the next one begins with, so that it fuses with the residual addition.
        self.norm_after = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        # Rounded to the model's dtype, as the embeddings it multiplies were when the model was trained.
        self.embedding_multiplier = float(torch.tensor(config.embedding_multiplier, dtype=dtype))

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states after the final norm, `[num_tokens, hidden_size]`.

        Args:
            token_ids, positions: int64 `[num_tokens]`, in range; a position is below `max_position_embeddings`.

        Runs inside a forward context of `labkit.attention.op`, which holds the KV cache.
        """
        eps, plus_one, cos_sin = self.config.rms_norm_eps, self.config.norm_plus_one, self.cos_sin
        x = F.embedding(token_ids, self.embed_tokens)
        if self.embedding_multiplier != 1.0:
            x = x * self.embedding_multiplier
        # The residual stream is fp32 in every dtype: rounding it to bf16 after each addition would be the largest part
        # of the model's error, and keeping it costs no launch.
        residual = x.float()
        x = rms_norm(x, self.layers[0].input_norm, eps, plus_one)
        for layer, norm_after in zip(self.layers, self.norm_after, strict=True):
            x = layer.attention.forward(x, positions, cos_sin)
            if layer.attention_out_norm is not None:
                x = rms_norm(x, layer.attention_out_norm, eps, plus_one)
            x, residual = add_rms_norm(x, residual, layer.mlp_norm, eps, plus_one)
            x = layer.mlp.forward(x)
            if layer.mlp_out_norm is not None:
                x = rms_norm(x, layer.mlp_out_norm, eps, plus_one)
            x, residual = add_rms_norm(x, residual, norm_after, eps, plus_one)
        return x

    __call__ = forward

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[rows, hidden_size]` → `[rows, vocab_size]`, in the model's dtype."""
        logits, cap = linear(hidden, self.lm_head), self.config.final_logit_softcapping
        return logits if cap is None else (torch.tanh(logits.float() / cap) * cap).to(logits.dtype)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that a forward pass reads beside its arguments, whole, under a name of its own."""
        found = {"embed_tokens": self.embed_tokens, "norm": self.norm, "cos_sin": self.cos_sin}
        for index, layer in enumerate(self.layers):
            found |= {f"layers.{index}.{name}": tensor for name, tensor in layer.tensors()}
        return found

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        """Every weight under its Hugging Face name, as a view into the fused matrices: writing to it loads."""
        return dict(self._checkpoint_views())

    def _checkpoint_views(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "model.embed_tokens.weight", self.embed_tokens
        for index, layer in enumerate(self.layers):
            yield from layer.checkpoint_views(f"model.layers.{index}.")
        yield "model.norm.weight", self.norm
        if not self.config.tie_word_embeddings:
            yield "lm_head.weight", self.lm_head

    def stacked_views(self) -> dict[str, tuple[torch.Tensor, tuple[str, ...]]]:
        """Other names that a checkpoint may have for experts, with the names of `checkpoint_views` each stands for."""
        found: dict[str, tuple[torch.Tensor, tuple[str, ...]]] = {}
        for index, layer in enumerate(self.layers):
            if self.config.is_moe_layer(index):
                found |= layer.mlp.stacked_views(f"model.layers.{index}.")
        return found

    def num_bytes(self) -> int:
        """Bytes of all weights and of the rotary table."""
        views = self.checkpoint_views().values()
        return sum(view.nbytes for view in views) + self.cos_sin.nbytes
