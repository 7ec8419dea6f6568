"""The shapes of known models as data, and the names a user may ask for. Refuses to know weights, and torch.

Every number is the one in the model's published `config.json`; `num_parameters()` of each equals the published count.
"""

from __future__ import annotations

from labkit.config import ModelConfig, RopeScaling

#: The model with real weights that `labkit.models.fetch` puts into the cache.
DEFAULT_MODEL = "smollm2-135m-instruct"


def _llama3_scaling(factor: float) -> RopeScaling:
    return RopeScaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


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
)  # fmt: skip

#: Shapes by name; asking for one gives random weights.
SHAPES: dict[str, ModelConfig] = {shape.name: shape for shape in _ALL}


def model_names() -> list[str]:
    """Every name that `load_model` takes besides a folder: the default model, then the shapes."""
    return [DEFAULT_MODEL, *SHAPES]
