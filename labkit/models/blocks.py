"""The two blocks of a plain layer: attention with grouped queries, and the gated MLP. Refuses to know the layer around.

Every block of a layer, here, in `labkit.models.moe` and in `labkit.models.mla`, has the same four methods:

* `forward(x)` of an MLP, `forward(x, positions, cos_sin)` of attention: `[num_tokens, hidden_size]` in and out, in the
  model's dtype; on CUDA with kernels of our own.
* `traced_forward(x, …)`: the same for torch.compile, in torch operators and opaque ones; attention gets `cos, sin` of
  its tokens in place of positions and table. Tensors of the block reach an opaque operator as arguments, never through
  its layer's number, unless the pass is cut there: equal layers are then equal code.
* `tensors()`: name and tensor of everything that `forward` reads, whole; names are unique within a layer.
* `checkpoint_views(prefix)`: Hugging Face name and view of every weight; `prefix` is the layer's, "model.layers.3.".
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from labkit.attention import op
from labkit.attention.opaque import unified_attention_with_output
from labkit.config import ModelConfig
from labkit.models.layers import ACTIVATIONS, gated, linear, normalize, rms_norm, rotary_, rotary_and_write_kv

Named = Iterator[tuple[str, torch.Tensor]]


class Attention:
    """Multi-head attention with grouped queries; window, soft-cap and scale come from the forward context.

    q, k and v are rows of one matrix: one launch instead of three. Biases, the norms of q and k and the sinks are None
    where the family has none. Weights are `[out, in]`, uninitialised.
    """

    def __init__(self, config: ModelConfig, layer_index: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layer_index, self.eps = layer_index, config.rms_norm_eps
        self.heads, self.kv_heads, self.head_size = config.num_heads, config.num_kv_heads, config.head_size
        self.q_size, self.kv_size = self.heads * self.head_size, self.kv_heads * self.head_size

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        rows, bias, norm = self.q_size + 2 * self.kv_size, config.attention_bias, config.qk_norm
        self.qkv = empty(rows, config.hidden_size)
        self.qkv_bias = empty(rows) if bias else None
        self.q_norm = empty(self.head_size) if norm else None
        self.k_norm = empty(self.head_size) if norm else None
        self.sinks = empty(self.heads) if config.has_sinks else None
        self.o = empty(config.hidden_size, self.q_size)
        self.o_bias = empty(config.hidden_size) if bias else None

    def forward(self, x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        """Attention of every token at its position; see `Decoder.forward`. cos_sin: the model's rotary table."""
        num_tokens, heads, kv_heads = x.shape[0], self.heads, self.kv_heads
        qkv = linear(x, self.qkv, self.qkv_bias).view(num_tokens, heads + 2 * kv_heads, self.head_size)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        out = x.new_empty((num_tokens, heads, self.head_size))
        if x.is_cuda:  # norms of q and k, rotation and cache write in one launch
            cache = op.layer_cache(self.layer_index)
            rotary_and_write_kv(q, k, v, positions, cos_sin, cache, (self.q_norm, self.k_norm), self.eps)
            op.attend(self.layer_index, q, out)
        else:
            if self.q_norm is not None and self.k_norm is not None:
                q, k = rms_norm(q, self.q_norm, self.eps), rms_norm(k, self.k_norm, self.eps)
            rotary_(q, k, positions, cos_sin)
            op.attention(self.layer_index, q, k, v, out)
        return linear(out.view(num_tokens, self.q_size), self.o, self.o_bias)

    def traced_forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """`forward` for a compiler: attention is an opaque operator. cos, sin: see `rotated`."""
        tokens, heads, kv_heads = x.shape[0], self.heads, self.kv_heads
        qkv = F.linear(x, self.qkv, self.qkv_bias).view(tokens, heads + 2 * kv_heads, self.head_size)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q = normalize(q.float(), self.q_norm, self.eps, x.dtype)
            k = normalize(k.float(), self.k_norm, self.eps, x.dtype)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        output = torch.empty_like(q)
        unified_attention_with_output(q, k, v, output, self.layer_index)
        return F.linear(output.view(tokens, self.q_size), self.o, self.o_bias)

    def tensors(self) -> Named:
        for name in ("qkv", "qkv_bias", "q_norm", "k_norm", "sinks", "o", "o_bias"):
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor

    def checkpoint_views(self, prefix: str) -> Named:
        prefix += "self_attn."
        for kind, fused in (("weight", self.qkv), ("bias", self.qkv_bias)):
            if fused is not None:
                for name, rows in zip("qkv", fused.split((self.q_size, self.kv_size, self.kv_size)), strict=True):
                    yield f"{prefix}{name}_proj.{kind}", rows
        for name, tensor in (
            ("q_norm.weight", self.q_norm), ("k_norm.weight", self.k_norm), ("sinks", self.sinks),
            ("o_proj.weight", self.o), ("o_proj.bias", self.o_bias),
        ):  # fmt: skip
            if tensor is not None:
                yield prefix + name, tensor


class DenseMLP:
    """down(act(gate(x)) · up(x)). gate and up are rows of one matrix. Weights are `[out, in]`, uninitialised."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        hidden, width = config.hidden_size, config.intermediate_size
        self.gate_up = torch.empty((2 * width, hidden), dtype=dtype, device=device)
        self.down = torch.empty((hidden, width), dtype=dtype, device=device)
        self.hidden_act, self.act_and_mul = config.hidden_act, ACTIVATIONS[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(self.act_and_mul(linear(x, self.gate_up)), self.down)

    def traced_forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(gated(F.linear(x, self.gate_up), self.hidden_act), self.down)

    def tensors(self) -> Named:
        yield "gate_up", self.gate_up
        yield "down", self.down

    def checkpoint_views(self, prefix: str) -> Named:
        for name, rows in zip(("gate", "up"), self.gate_up.chunk(2), strict=True):
            yield f"{prefix}mlp.{name}_proj.weight", rows
        yield f"{prefix}mlp.down_proj.weight", self.down


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`rotary_` in plain torch operators, into a new tensor; cos and sin are fp32 `[num_tokens, 1, head_size/2]`."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
