"""What a config.json says about latent attention, under `ModelConfig`'s names. Refuses to know weights, and torch.

Keys and defaults are transformers'; what no code here computes is refused with a sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit.errors import LoadError

#: Families whose attention keeps latents, by `ModelConfig.architecture`.
MLA_ARCHITECTURES = ("deepseek_v2", "deepseek_v3")
_SIZES = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def mla_fields(architecture: str, data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Fields of `ModelConfig` about latent attention, `head_size` among them; none for a family that has none.

    Raises:
        LoadError: a size is no whole number, or the rotary part cannot be paired.
    """
    if architecture not in MLA_ARCHITECTURES:
        return {}
    sizes = {key: data.get(key, default) for key, default in _SIZES.items()}
    sizes["q_lora_rank"] = data.get("q_lora_rank", 1536)  # null: queries come straight from the hidden state
    for key, value in sizes.items():
        if key == "q_lora_rank" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise LoadError(str(folder / "config.json"), f"{key}={value!r} is no whole number ≥ 1", "Fix the file.")
    if sizes["qk_rope_head_dim"] % 2:
        raise LoadError(
            str(folder / "config.json"), "qk_rope_head_dim is odd, and rotation takes pairs", "Fix the file."
        )
    return {**sizes, "head_size": sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]}


def refuse_mla(architecture: str, data: Mapping[str, Any], folder: Path) -> None:
    """LoadError for latent attention that is not computed here."""
    if architecture not in MLA_ARCHITECTURES:
        return
    for found, why, hint in (
        (
            data.get("attention_bias"),
            "its latent attention has biases (attention_bias), which are not computed",
            "Use one without, as the published ones are.",
        ),
        (
            data.get("rope_interleave", True) is False,
            "it rotates halves of a head and not neighbours (rope_interleave is false)",
            "Use a model whose weights are as DeepSeek published them.",
        ),
    ):
        if found:
            raise LoadError(f"model folder {folder}", why, hint)


def is_mtp(name: str, architecture: str, num_layers: int) -> bool:
    """Whether a tensor belongs to the layer behind the last, which DeepSeek-V3 has for predicting a second token."""
    return architecture == "deepseek_v3" and name.startswith(f"model.layers.{num_layers}.")
