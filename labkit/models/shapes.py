"""The shapes of known models as data, and the names a user may ask for. Refuses to know weights, and torch.

Every number is the one in the model's published `config.json`; `num_parameters()` of each equals the published count.
"""

from __future__ import annotations

from typing import Any

from labkit.config import ModelConfig, RopeScaling
from labkit.model_config import FULL, SLIDING

#: The model with real weights that `labkit.models.fetch` puts into the cache.
DEFAULT_MODEL = "smollm2-135m-instruct"


def _llama3_scaling(factor: float) -> RopeScaling:
    return RopeScaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


def _alternating(layers: int) -> tuple[str, ...]:
    return tuple(FULL if layer % 2 else SLIDING for layer in range(layers))


def _gemma2(layers: int, hidden: int, window: int, cap: float, final_cap: float, scalar: float) -> dict[str, Any]:
    return dict(
        layer_types=_alternating(layers), sliding_window=window, attn_logit_softcapping=cap,
        final_logit_softcapping=final_cap, query_pre_attn_scalar=scalar, hidden_act="gelu_pytorch_tanh",
        embedding_multiplier=hidden**0.5, norm_plus_one=True, sandwich_norms=True, architecture="gemma2",
    )  # fmt: skip


def _gpt_oss(layers: int, window: int) -> dict[str, Any]:
    return dict(
        layer_types=_alternating(layers), sliding_window=window, has_sinks=True, attention_bias=True,
        scoring_func="topk_softmax", expert_bias=True, swiglu_limit=7.0, architecture="gpt_oss",
    )  # fmt: skip


_GPT_OSS_ROPE = RopeScaling(kind="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False)


def _deepseek_yarn(mscale: float, original: int = 4096) -> RopeScaling:
    return RopeScaling(
        factor=40.0, kind="yarn", beta_fast=32.0, beta_slow=1.0, mscale=mscale, mscale_all_dim=mscale,
        original_max_position_embeddings=original,
    )  # fmt: skip


_ALL = (
    # 9 query heads on 3 KV heads: a group of 3, which is no power of two.
    ModelConfig(
        name="smollm2-135m", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30,
        num_heads=9, num_kv_heads=3, head_size=64, max_position_embeddings=8192, rms_norm_eps=1e-5,
        rope_theta=100_000.0, tie_word_embeddings=True, bos_token_id=1, eos_token_ids=(2,),
    ),
    # 16 × 128 is twice the hidden size: q and o are not square.
    ModelConfig(
        name="qwen3-0.6b", vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_layers=28,
        num_heads=16, num_kv_heads=8, head_size=128, max_position_embeddings=40960, rms_norm_eps=1e-6,
        rope_theta=1_000_000.0, tie_word_embeddings=True, qk_norm=True, architecture="qwen3",
        bos_token_id=151643, eos_token_ids=(151645, 151643),
    ),
    ModelConfig(
        name="llama-3.2-1b", vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_layers=16,
        num_heads=32, num_kv_heads=8, head_size=64, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_theta=500_000.0, rope_scaling=_llama3_scaling(32.0), tie_word_embeddings=True,
        bos_token_id=128000, eos_token_ids=(128001, 128008, 128009),
    ),
    ModelConfig(
        name="llama-3.2-3b", vocab_size=128256, hidden_size=3072, intermediate_size=8192, num_layers=28,
        num_heads=24, num_kv_heads=8, head_size=128, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_theta=500_000.0, rope_scaling=_llama3_scaling(32.0), tie_word_embeddings=True,
        bos_token_id=128000, eos_token_ids=(128001, 128008, 128009),
    ),
    ModelConfig(
        name="llama-3.1-8b", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32,
        num_heads=32, num_kv_heads=8, head_size=128, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_theta=500_000.0, rope_scaling=_llama3_scaling(8.0), tie_word_embeddings=False,
        bos_token_id=128000, eos_token_ids=(128001, 128008, 128009),
    ),
    # For "what if": it needs several GPUs.
    ModelConfig(
        name="llama-3.1-70b", vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_layers=80,
        num_heads=64, num_kv_heads=8, head_size=128, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_theta=500_000.0, rope_scaling=_llama3_scaling(8.0), tie_word_embeddings=False,
        bos_token_id=128000, eos_token_ids=(128001, 128008, 128009),
    ),
    # 128 experts of which 8 work for a token: 3.3 B of 30.5 B parameters.
    ModelConfig(
        name="qwen3-30b-a3b", vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_layers=48,
        num_heads=32, num_kv_heads=4, head_size=128, max_position_embeddings=40960, rms_norm_eps=1e-6,
        rope_theta=1_000_000.0, tie_word_embeddings=False, qk_norm=True, architecture="qwen3_moe",
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
        bos_token_id=151643, eos_token_ids=(151645, 151643),
    ),
    ModelConfig(
        name="mixtral-8x7b", vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_layers=32,
        num_heads=32, num_kv_heads=8, head_size=128, max_position_embeddings=32768, rms_norm_eps=1e-5,
        rope_theta=1_000_000.0, tie_word_embeddings=False, architecture="mixtral",
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=14336, scoring_func="topk_softmax",
        bos_token_id=1, eos_token_ids=(2,),
    ),
    # Layers alternate: a window of 4096 tokens, then everything. Scores and logits are soft-capped.
    ModelConfig(
        name="gemma-2-2b", vocab_size=256000, hidden_size=2304, intermediate_size=9216, num_layers=26,
        num_heads=8, num_kv_heads=4, head_size=256, max_position_embeddings=8192, rms_norm_eps=1e-6,
        rope_theta=10_000.0, tie_word_embeddings=True, **_gemma2(26, 2304, 4096, 50.0, 30.0, 256),
        bos_token_id=2, eos_token_ids=(1, 107),
    ),
    # A window of 128 tokens in every other layer, sinks in all; a token meets 4 of 32 experts.
    ModelConfig(
        name="gpt-oss-20b", vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_layers=24,
        num_heads=64, num_kv_heads=8, head_size=64, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_theta=150_000.0, rope_scaling=_GPT_OSS_ROPE, tie_word_embeddings=False,
        **_gpt_oss(24, 128), num_experts=32, num_experts_per_tok=4, moe_intermediate_size=2880,
        bos_token_id=199998, eos_token_ids=(200002, 199999, 200012),
    ),
    # Latent attention: 576 numbers a token and layer in the cache, where 16 heads of K and V would be 5,120.
    ModelConfig(
        name="deepseek-v2-lite", vocab_size=102400, hidden_size=2048, intermediate_size=10944, num_layers=27,
        num_heads=16, num_kv_heads=16, head_size=192, max_position_embeddings=163840, rms_norm_eps=1e-6,
        rope_theta=10_000.0, rope_scaling=_deepseek_yarn(0.707), tie_word_embeddings=False,
        architecture="deepseek_v2", num_experts=64, num_experts_per_tok=6, moe_intermediate_size=1408,
        first_k_dense_replace=1, n_shared_experts=2, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, bos_token_id=100000, eos_token_ids=(100001,),
    ),
    # For "what if", as the 70 billion above.
    ModelConfig(
        name="deepseek-v3", vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_layers=61,
        num_heads=128, num_kv_heads=128, head_size=192, max_position_embeddings=163840, rms_norm_eps=1e-6,
        rope_theta=10_000.0, rope_scaling=_deepseek_yarn(1.0), tie_word_embeddings=False, architecture="deepseek_v3",
        num_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048, norm_topk_prob=True,
        scoring_func="sigmoid", first_k_dense_replace=3, n_shared_experts=1, n_group=8, topk_group=4,
        topk_method="noaux_tc", routed_scaling_factor=2.5, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, bos_token_id=0, eos_token_ids=(1,),
    ),
    # Two for tests: a step takes about a millisecond on a CPU. One has SmolLM2's group of 3, the other all of Qwen3's
    # particulars with an untied head.
    ModelConfig(
        name="tiny-llama", vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2,
        num_heads=6, num_kv_heads=2, head_size=32, max_position_embeddings=4096, rms_norm_eps=1e-5,
        rope_theta=10_000.0, tie_word_embeddings=True,
    ),
    ModelConfig(
        name="tiny-qwen3", vocab_size=512, hidden_size=64, intermediate_size=96, num_layers=3,
        num_heads=4, num_kv_heads=1, head_size=32, max_position_embeddings=4096, rms_norm_eps=1e-6,
        rope_theta=1_000_000.0, tie_word_embeddings=False, qk_norm=True, architecture="qwen3",
    ),
    # Two with experts: a batch of one gathers those of a token, larger ones meet all.
    ModelConfig(
        name="tiny-qwen3-moe", vocab_size=512, hidden_size=64, intermediate_size=96, num_layers=3,
        num_heads=4, num_kv_heads=1, head_size=32, max_position_embeddings=4096, rms_norm_eps=1e-6,
        rope_theta=1_000_000.0, tie_word_embeddings=False, qk_norm=True, architecture="qwen3_moe",
        num_experts=12, num_experts_per_tok=3, moe_intermediate_size=40, norm_topk_prob=True,
    ),
    ModelConfig(
        name="tiny-mixtral", vocab_size=512, hidden_size=64, intermediate_size=80, num_layers=2,
        num_heads=6, num_kv_heads=2, head_size=32, max_position_embeddings=4096, rms_norm_eps=1e-5,
        rope_theta=10_000.0, tie_word_embeddings=False, architecture="mixtral",
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=80, scoring_func="topk_softmax",
    ),
    # Two whose layers alternate: windows short enough, caps low enough to matter in a short text.
    ModelConfig(
        name="tiny-gemma2", vocab_size=512, hidden_size=64, intermediate_size=96, num_layers=4,
        num_heads=4, num_kv_heads=2, head_size=32, max_position_embeddings=4096, rms_norm_eps=1e-6,
        rope_theta=10_000.0, tie_word_embeddings=True, **_gemma2(4, 64, 24, 3.0, 5.0, 24),
    ),
    ModelConfig(
        name="tiny-gpt-oss", vocab_size=512, hidden_size=64, intermediate_size=48, num_layers=3,
        num_heads=6, num_kv_heads=2, head_size=32, max_position_embeddings=4096, rms_norm_eps=1e-5,
        rope_theta=150_000.0, tie_word_embeddings=False, **_gpt_oss(3, 20),
        rope_scaling=RopeScaling(kind="yarn", factor=8.0, original_max_position_embeddings=512, truncate=False),
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48,
    ),
    # Two with latent attention and every particular of theirs: queries from the hidden state and by way of a latent,
    # a dense first layer, shared experts, groups of experts. YaRN stretches a context that tests exceed.
    ModelConfig(
        name="tiny-deepseek-v2", vocab_size=512, hidden_size=64, intermediate_size=96, num_layers=3,
        num_heads=4, num_kv_heads=4, head_size=48, max_position_embeddings=4096, rms_norm_eps=1e-6,
        rope_theta=10_000.0, rope_scaling=_deepseek_yarn(0.707, 64),
        tie_word_embeddings=False, architecture="deepseek_v2", num_experts=8, num_experts_per_tok=3,
        moe_intermediate_size=48, first_k_dense_replace=1, n_shared_experts=2, n_group=4, topk_group=2,
        topk_method="group_limited_greedy", routed_scaling_factor=2.0, kv_lora_rank=64, qk_nope_head_dim=32,
        qk_rope_head_dim=16, v_head_dim=24,
    ),
    ModelConfig(
        name="tiny-deepseek-v3", vocab_size=512, hidden_size=64, intermediate_size=96, num_layers=3,
        num_heads=4, num_kv_heads=4, head_size=48, max_position_embeddings=4096, rms_norm_eps=1e-6,
        rope_theta=10_000.0, rope_scaling=_deepseek_yarn(1.0, 64),
        tie_word_embeddings=False, architecture="deepseek_v3", num_experts=8, num_experts_per_tok=3,
        moe_intermediate_size=48, norm_topk_prob=True, scoring_func="sigmoid", first_k_dense_replace=1,
        n_shared_experts=1, n_group=4, topk_group=2, topk_method="noaux_tc", routed_scaling_factor=2.5,
        q_lora_rank=40, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=24,
    ),
)  # fmt: skip

#: Shapes by name; asking for one gives random weights.
SHAPES: dict[str, ModelConfig] = {shape.name: shape for shape in _ALL}


def model_names() -> list[str]:
    """Every name that `load_model` takes besides a folder: the default model, then the shapes."""
    return [DEFAULT_MODEL, *SHAPES]
