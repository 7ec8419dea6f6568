"""Model folders made by hand for the loader's tests: a small Llama whose files a test then spoils."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, HEADS, KV_HEADS, HEAD, FFN, VOCAB, LAYERS = 32, 4, 2, 16, 48, 300, 2

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor of the model that CONFIG describes, by its Hugging Face name."""
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": (HIDDEN,),
            layer + "self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
            layer + "self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            layer + "self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            layer + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
            layer + "post_attention_layernorm.weight": (HIDDEN,),
            layer + "mlp.gate_proj.weight": (FFN, HIDDEN),
            layer + "mlp.up_proj.weight": (FFN, HIDDEN),
            layer + "mlp.down_proj.weight": (HIDDEN, FFN),
        }
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}


def write_folder(
    folder: Path, config: dict[str, Any] | None = None, state: dict[str, torch.Tensor] | None = None, **changes: Any
) -> Path:
    """A complete folder, with `changes` to config.json; a change to None takes the key away."""
    folder.mkdir(parents=True, exist_ok=True)
    merged = {k: v for k, v in {**(config or CONFIG), **changes}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(merged))
    save_file(weights() if state is None else state, str(folder / "model.safetensors"))
    return folder
