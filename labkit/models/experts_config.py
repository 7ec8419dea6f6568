"""What a config.json says about experts, under `ModelConfig`'s names. Refuses to know weights, and torch.

Keys and defaults are transformers'; what no code here computes is refused with a sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit.errors import LoadError

#: Families whose MLPs are experts, by `ModelConfig.architecture`.
MOE_ARCHITECTURES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3")


def experts_fields(architecture: str, data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Fields of `ModelConfig` about experts; none for a family that has none.

    Raises:
        LoadError: a size is missing, or the file asks for something that is not computed.
    """
    if architecture not in MOE_ARCHITECTURES:
        return {}

    def number(*keys: str) -> int:
        value = next((data[key] for key in keys if data.get(key) is not None), None)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise LoadError(str(folder / "config.json"), f"{keys[0]}={value!r} is no whole number ≥ 1", "Fix the file.")
        return value

    fields: dict[str, Any] = {"num_experts_per_tok": number("num_experts_per_tok", "experts_per_token")}
    if architecture in ("mixtral", "gpt_oss"):
        # Both take the softmax over the chosen: for Mixtral the same as softmax over all, then renormalised.
        fields |= {
            "num_experts": number("num_local_experts", "num_experts"),
            "moe_intermediate_size": number("intermediate_size"), "scoring_func": "topk_softmax",
        }  # fmt: skip
        if architecture == "gpt_oss":
            fields |= {"expert_bias": True, "swiglu_limit": float(data.get("swiglu_limit", 7.0))}
        return fields
    fields["moe_intermediate_size"] = number("moe_intermediate_size")
    if architecture == "qwen3_moe":
        experts = number("num_experts", "num_local_experts")
        return fields | {"num_experts": experts, "norm_topk_prob": bool(data.get("norm_topk_prob", False))}
    v3 = architecture == "deepseek_v3"
    return fields | {
        "num_experts": number("n_routed_experts", "num_local_experts", "num_experts"),
        "first_k_dense_replace": int(data.get("first_k_dense_replace") or 0),
        "n_shared_experts": int(data.get("n_shared_experts") or 0),
        "n_group": int(data.get("n_group") or 1),
        "topk_group": int(data.get("topk_group") or 1),
        "topk_method": "noaux_tc" if v3 else str(data.get("topk_method") or "greedy"),
        "scoring_func": "sigmoid" if v3 else "softmax",
        "norm_topk_prob": bool(data.get("norm_topk_prob", v3)),
        "routed_scaling_factor": float(data.get("routed_scaling_factor") or 1.0),
    }


def refuse_experts(architecture: str, data: Mapping[str, Any], folder: Path) -> None:
    """LoadError for experts that are not computed here."""
    if architecture not in MOE_ARCHITECTURES:
        return
    some = data.get("decoder_sparse_step", 1) != 1 or data.get("mlp_only_layers") or data.get("moe_layer_freq", 1) != 1
    quantised = (data.get("quantization_config") or {}).get("quant_method")
    method = data.get("topk_method") or "greedy"
    for found, why, hint in (
        (
            some,
            "only some of its layers have experts (decoder_sparse_step, mlp_only_layers or moe_layer_freq)",
            "Use a model that has experts in every layer from some layer on.",
        ),
        (
            architecture == "mixtral" and data.get("sliding_window"),
            "its attention slides over a window (sliding_window) in every layer",
            "Use a Mixtral whose sliding_window is null, as in the published ones.",
        ),
        (
            data.get("swiglu_alpha", 1.702) != 1.702,
            f"its gate has a slope of {data.get('swiglu_alpha')} (swiglu_alpha)",
            "Only 1.702 is computed.",
        ),
        (
            quantised == "mxfp4",
            "its experts are stored as MXFP4, four bits a weight, which are not computed here",
            "Save it in bf16: from_pretrained(…, quantization_config=Mxfp4Config(dequantize=True)).save_pretrained(…).",
        ),
        (
            method not in ("greedy", "group_limited_greedy", "noaux_tc"),
            f"its router chooses by {method!r} (topk_method)",
            "Known are greedy, group_limited_greedy and noaux_tc.",
        ),
    ):
        if found:
            raise LoadError(f"model folder {folder}", why, hint)
