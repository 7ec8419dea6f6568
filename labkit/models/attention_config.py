"""What a config.json says about norms, attention and positions, under `ModelConfig`'s names. Refuses to know weights.

Keys and defaults are transformers'; what no code here computes is refused with a sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit.errors import LoadError
from labkit.model_config import FULL, SLIDING, RopeScaling

#: transformers' defaults for keys that a config.json may leave out, where a family's differ from Llama's.
DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {"max_position_embeddings": 32768, "head_dim": 128},
    "qwen3_moe": {"max_position_embeddings": 32768},
    "gemma2": {
        "max_position_embeddings": 8192, "head_dim": 256, "tie_word_embeddings": True, "sliding_window": 4096,
        "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gpt_oss": {
        "max_position_embeddings": 131072, "head_dim": 64, "attention_bias": True, "sliding_window": 128,
        "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
                         "truncate": False},
    },
}  # fmt: skip
#: Families whose layers alternate between a window and everything.
ALTERNATING = ("gemma2", "gpt_oss")


def with_defaults(architecture: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """`data` with its family's defaults where a key is absent."""
    defaults = dict(DEFAULTS.get(architecture, {}))
    if data.get("rope_parameters") is not None:
        defaults.pop("rope_scaling", None)
    return {**defaults, **data}


def attention_fields(architecture: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `ModelConfig` about layers of different kinds, from what `with_defaults` gives."""
    if architecture not in ALTERNATING:
        return {}
    layers = int(data["num_hidden_layers"])
    kinds = data.get("layer_types") or [FULL if layer % 2 else SLIDING for layer in range(layers)]
    fields: dict[str, Any] = {"layer_types": tuple(kinds), "sliding_window": data.get("sliding_window")}
    if architecture == "gpt_oss":
        return fields | {"has_sinks": True}
    return fields | {
        "attn_logit_softcapping": _number(data.get("attn_logit_softcapping")),
        "final_logit_softcapping": _number(data.get("final_logit_softcapping")),
        "query_pre_attn_scalar": _number(data.get("query_pre_attn_scalar")),
        "hidden_act": "gelu_pytorch_tanh",
        "embedding_multiplier": float(data["hidden_size"]) ** 0.5,
        "norm_plus_one": True,
        "sandwich_norms": True,
    }


def refuse_attention(architecture: str, data: Mapping[str, Any], folder: Path) -> None:
    """LoadError for activations and kinds of attention that are not computed here."""
    gemma2 = architecture == "gemma2"
    wanted = "gelu_pytorch_tanh" if gemma2 else "silu"
    activation = data.get("hidden_activation" if gemma2 else "hidden_act") or wanted
    sliding = data.get("use_sliding_window") or SLIDING in (data.get("layer_types") or ())
    kinds = sorted(set(data.get("layer_types") or ()) - {FULL, SLIDING})
    for found, why, hint in (
        (
            activation != wanted,
            f"its activation is {activation!r} and only {wanted!r} is computed for this family",
            "Use a model of the family as it was published.",
        ),
        (data.get("mlp_bias"), "its MLP has biases (mlp_bias), which are not computed", "Use one without."),
        (
            sliding and architecture not in ALTERNATING,
            "its attention slides over a window, which is computed for Gemma-2 and gpt-oss only",
            "Use a model whose layers all see everything.",
        ),
        (kinds, f"it has layers of kind {', '.join(kinds)}", f"Known are {FULL} and {SLIDING}."),
        (
            data.get("use_bidirectional_attention"),
            "its tokens see those after them (use_bidirectional_attention)",
            "Use a model for generation, whose attention is causal.",
        ),
    ):
        if found:
            raise LoadError(f"model folder {folder}", why, hint)


def rope(data: Mapping[str, Any], folder: Path, max_positions: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary embedding, from `rope_parameters` or from the older pair of keys."""
    parameters = {**(data.get("rope_scaling") or {}), **(data.get("rope_parameters") or {})}
    theta = float(parameters.get("rope_theta") or data.get("rope_theta") or 10_000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    whole = (parameters.get("partial_rotary_factor") or data.get("partial_rotary_factor") or 1.0) == 1.0
    if kind == "default" and whole:
        return theta, None
    if kind not in ("llama3", "yarn") or not whole:
        raise LoadError(
            f"model folder {folder}",
            f"its rotary embedding is of type {kind!r} or covers a part of each head",
            "Supported: 'default', 'llama3' and 'yarn', over whole heads.",
        )
    original = int(parameters.get("original_max_position_embeddings") or max_positions)
    needed = ("factor",) if kind == "yarn" else ("factor", "low_freq_factor", "high_freq_factor")
    absent = [key for key in needed if parameters.get(key) is None]
    if absent and not (kind == "yarn" and original != max_positions):
        why = f"the {kind} rotary scaling lacks {absent[0]!r}"
        raise LoadError(str(folder / "config.json"), why, "Copy the file again.")
    if kind == "llama3":
        low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
        return theta, RopeScaling(float(parameters["factor"]), low, high, original)
    return theta, RopeScaling(
        kind="yarn",
        factor=float(parameters.get("factor") or max_positions / original),
        original_max_position_embeddings=original,
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        mscale=_number(parameters.get("mscale")),
        mscale_all_dim=_number(parameters.get("mscale_all_dim")),
        attention_factor=_number(parameters.get("attention_factor")),
        truncate=bool(parameters.get("truncate", True)),
    )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
