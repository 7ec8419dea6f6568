"""The shape of a model, and what follows from the shape alone. Refuses to know torch, weights and files."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from labkit.errors import ConfigError

#: What a layer attends to: everything before a token, or the last `sliding_window` tokens only.
FULL, SLIDING = "full_attention", "sliding_attention"
LAYER_TYPES = (FULL, SLIDING)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched to a longer context than the model was first trained for.

    kind: "llama3" (Llama 3.1) reads the two `freq_factor`s; "yarn" reads the rest, under transformers' names. YaRN also
    multiplies cosines and sines, by `attention_factor` or by what follows from `factor` and the two `mscale`s.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    kind: str = "llama3"
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def table_factor(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    @property
    def mla_score_factor(self) -> float:
        """What DeepSeek's attention multiplies its scores by under YaRN: mscale², where `mscale_all_dim` is set."""
        if self.kind != "yarn" or not self.mscale_all_dim:
            return 1.0
        return self._mscale(self.mscale_all_dim) ** 2

    def _mscale(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    def parameters(self) -> dict[str, Any]:
        """As transformers' `rope_parameters` has it, without `rope_theta`."""
        names = ["factor", "original_max_position_embeddings"]
        if self.kind == "yarn":
            names += ["beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"]
        else:
            names += ["low_freq_factor", "high_freq_factor"]
        values = {name: getattr(self, name) for name in names}
        return {"rope_type": self.kind, **{name: value for name, value in values.items() if value is not None}}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only transformer.

    Sizes are counts of elements; `rope_theta` is the base of the rotary frequencies. Names are transformers' where it
    has one.

    Layers of different kinds: `layer_types` has one of `LAYER_TYPES` per layer, empty means that all are full;
    `sliding_window` keeps that many keys, the token itself included. `has_sinks`: each head has one learned logit that
    takes part in the softmax and has no value. `norm_plus_one`: norms multiply by 1 + weight (Gemma). `sandwich_norms`:
    the output of attention and of the MLP is normed too, before it joins the residual stream.

    Experts (`num_experts` > 0), in layers from `first_k_dense_replace` on: `scoring_func` is "softmax" (then top-k,
    renormalised with `norm_topk_prob`), "sigmoid" (DeepSeek-V3) or "topk_softmax" (top-k of the logits, then softmax).
    `expert_bias`: router and experts have biases (gpt-oss). `topk_method` "noaux_tc" has a bias that only chooses.

    MLA (`kv_lora_rank` > 0): `head_size` is that of q and k, `qk_nope_head_dim + qk_rope_head_dim`.
    """

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = True
    qk_norm: bool = False
    attention_bias: bool = False
    architecture: str = "llama"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    # layers of different kinds
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    query_pre_attn_scalar: float | None = None
    has_sinks: bool = False
    hidden_act: str = "silu"
    embedding_multiplier: float = 1.0
    norm_plus_one: bool = False
    sandwich_norms: bool = False
    # experts
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    scoring_func: str = "softmax"
    first_k_dense_replace: int = 0
    n_shared_experts: int = 0
    n_group: int = 1
    topk_group: int = 1
    topk_method: str = "greedy"
    routed_scaling_factor: float = 1.0
    expert_bias: bool = False
    swiglu_limit: float | None = None
    # multi-head latent attention
    q_lora_rank: int | None = None
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    def __post_init__(self) -> None:
        what = f"model {self.name!r}"
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{what} with {self.num_heads} query heads and {self.num_kv_heads} KV heads",
                "query heads must be a multiple of KV heads",
                "Fix num_attention_heads or num_key_value_heads in config.json.",
            )
        unknown = sorted(set(self.layer_types) - set(LAYER_TYPES))
        for wrong, why, hint in (
            (unknown, f"{unknown} is no kind of layer", f"layer_types may hold {' and '.join(LAYER_TYPES)}."),
            (
                self.layer_types and len(self.layer_types) != self.num_layers,
                f"layer_types names {len(self.layer_types)} layers of {self.num_layers}",
                "Name every layer, or none.",
            ),
            (
                SLIDING in self.layer_types and not self.sliding_window,
                "a layer slides over a window and sliding_window does not say how long that is",
                "Set sliding_window.",
            ),
            (
                self.num_experts and not 0 < self.num_experts_per_tok <= self.num_experts,
                f"{self.num_experts_per_tok} of {self.num_experts} experts work for a token",
                "Set num_experts_per_tok to 1 … num_experts.",
            ),
        ):
            if wrong:
                raise ConfigError(what, why, hint)

    # --- kinds of layers ---------------------------------------------------------------------------------------------

    @property
    def uses_mla(self) -> bool:
        """Whether attention is multi-head latent attention: the cache holds one latent vector a token, not K and V."""
        return self.kv_lora_rank > 0

    def layer_kind(self, layer: int) -> str:
        """ "full_attention" or "sliding_attention"."""
        return self.layer_types[layer] if self.layer_types else FULL

    def layer_window(self, layer: int) -> int | None:
        """Keys that a token of this layer sees at most, itself included; None where it sees all."""
        return self.sliding_window if self.layer_kind(layer) == SLIDING else None

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the MLP of this layer is made of experts."""
        return self.num_experts > 0 and layer >= self.first_k_dense_replace

    @property
    def attention_scale(self) -> float:
        """What q·k is multiplied by."""
        scale = (self.query_pre_attn_scalar or self.head_size) ** -0.5
        return scale * self.rope_scaling.mla_score_factor if self.uses_mla and self.rope_scaling else scale

    @property
    def rotary_size(self) -> int:
        """Elements of a head that the rotary embedding turns."""
        return self.qk_rope_head_dim if self.uses_mla else self.head_size

    # --- sizes -------------------------------------------------------------------------------------------------------

    def num_parameters(self) -> int:
        """Weights counted once: a tied LM head is the embedding."""
        return self._parameters(self.num_experts)

    def num_active_parameters(self) -> int:
        """Weights that one token meets: of the experts of a layer only those that work for it."""
        return self._parameters(self.num_experts_per_tok)

    def _parameters(self, experts: int) -> int:
        h = self.hidden_size
        norms = h * (4 if self.sandwich_norms else 2)
        moe_layers = sum(map(self.is_moe_layer, range(self.num_layers)))
        dense = (self.num_layers - moe_layers) * 3 * h * self.intermediate_size
        layers = self.num_layers * (self._attention_parameters() + norms) + dense
        layers += moe_layers * self._moe_parameters(experts) if moe_layers else 0
        return layers + h + self.vocab_size * h * (1 if self.tie_word_embeddings else 2)

    def _attention_parameters(self) -> int:
        h, d, heads, bias = self.hidden_size, self.head_size, self.num_heads, self.attention_bias
        if not self.uses_mla:
            total = h * d * (2 * heads + 2 * self.num_kv_heads)
            total += d * (heads + 2 * self.num_kv_heads) + h if bias else 0
            return total + (2 * d if self.qk_norm else 0) + (heads if self.has_sinks else 0)
        q_rank, rank, rope = self.q_lora_rank, self.kv_lora_rank, self.qk_rope_head_dim
        total = h * heads * d if q_rank is None else h * q_rank + q_rank + q_rank * heads * d
        total += h * (rank + rope) + rank + rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        total += heads * self.v_head_dim * h
        return total + ((q_rank or 0) + rank + rope + h if bias else 0)

    def _moe_parameters(self, experts: int) -> int:
        h, width = self.hidden_size, self.moe_intermediate_size
        router = self.num_experts * (h + self.expert_bias + (self.topk_method == "noaux_tc"))
        expert = 3 * h * width + (2 * width + h if self.expert_bias else 0)
        return router + experts * expert + self.n_shared_experts * 3 * h * width

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes that one token keeps in the cache over all layers: of K and V, or of MLA's latent vector."""
        if self.uses_mla:
            return self.num_layers * (self.kv_lora_rank + self.qk_rope_head_dim) * itemsize
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * itemsize
