"""What a Hugging Face folder says and holds: its shape, its tensors. Refuses pickles, foreign code, and to guess.

Only safetensors are read: they hold numbers and nothing else. What the decoder does not compute (another activation,
another rotary scaling, quantised weights …) is refused with a sentence, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.config import ModelConfig
from labkit.errors import LoadError
from labkit.models.attention_config import attention_fields, refuse_attention, rope, with_defaults
from labkit.models.experts_config import experts_fields, refuse_experts
from labkit.models.mla_config import MLA_ARCHITECTURES, mla_fields, refuse_mla

if TYPE_CHECKING:
    import torch

#: Architectures whose forward pass the decoder computes, by the name in config.json.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral", "Gemma2ForCausalLM": "gemma2", "GptOssForCausalLM": "gpt_oss",
    "DeepseekV2ForCausalLM": "deepseek_v2", "DeepseekV3ForCausalLM": "deepseek_v3",
}  # fmt: skip
_FLOATS = ("F32", "F16", "BF16")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def load_config(folder: Path, name: str | None = None) -> ModelConfig:
    """The shape in a folder's `config.json`, and the EOS ids of `generation_config.json` where it names any.

    Raises:
        LoadError: no readable config.json, an architecture or a feature that the decoder does not compute, or code.
    """
    data = read_json(folder / "config.json")
    if data is None:
        raise LoadError(f"model folder {folder}", "there is no config.json", "Give a Hugging Face model folder.")
    _refuse_unsupported(data, folder)
    architecture = ARCHITECTURES[data["architectures"][0]]
    data = with_defaults(architecture, data)

    def number(key: str, default: int | None = None) -> int:
        value = data.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise LoadError(str(folder / "config.json"), f"{key}={value!r} is no whole number ≥ 1", "Fix the file.")
        return value

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    max_positions = number("max_position_embeddings", 2048)
    theta, scaling = rope(data, folder, max_positions)
    generation = read_json(folder / "generation_config.json") or {}
    eos = generation.get("eos_token_id")
    eos = data.get("eos_token_id") if eos is None else eos
    latent = mla_fields(architecture, data, folder)
    return ModelConfig(
        name=name or folder.resolve().name,
        vocab_size=number("vocab_size"),
        hidden_size=hidden,
        intermediate_size=number("intermediate_size"),
        num_layers=number("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=number("num_key_value_heads", heads),
        head_size=latent.pop("head_size", 0) or number("head_dim", hidden // heads),
        max_position_embeddings=max_positions,
        rms_norm_eps=float(data.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
        qk_norm=architecture in ("qwen3", "qwen3_moe"),
        attention_bias=bool(data.get("attention_bias", False)),
        architecture=architecture,
        bos_token_id=data.get("bos_token_id"),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        **attention_fields(architecture, data),
        **experts_fields(architecture, data, folder),
        **latent,
    )


def _refuse_unsupported(data: Mapping[str, Any], folder: Path) -> None:
    what = f"model folder {folder}"
    names = data.get("architectures") or [f"model_type {data.get('model_type')}"]
    # DeepSeek's folders bring the code of a class that transformers has by now, under the same name.
    if "auto_map" in data and ARCHITECTURES.get(names[0]) not in MLA_ARCHITECTURES:
        why = "it wants to run Python code from the folder (auto_map), which is never done here"
        raise LoadError(what, why, "Use a model of a supported architecture that brings no code.")
    if names[0] not in ARCHITECTURES:
        raise LoadError(what, f"its architecture is {names[0]}", f"Supported: {', '.join(ARCHITECTURES)}.")
    refuse_experts(ARCHITECTURES[names[0]], data, folder)
    refuse_attention(ARCHITECTURES[names[0]], data, folder)
    refuse_mla(ARCHITECTURES[names[0]], data, folder)
    if data.get("quantization_config"):
        why = "its weights are quantised (quantization_config)"
        raise LoadError(what, why, "Use a model in fp32, fp16 or bf16.")


def read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor, on the CPU and as stored, of everything in the folder's safetensors files."""
    from safetensors import SafetensorError, safe_open

    for path in _weight_files(folder):
        try:
            with safe_open(str(path), framework="pt") as file:
                for name in file.keys():  # noqa: SIM118, not a dict
                    dtype = file.get_slice(name).get_dtype()
                    if dtype not in _FLOATS:
                        why = f"tensor {name} is stored as {dtype}"
                        raise LoadError(str(path), why, "Use weights in fp32, fp16 or bf16.")
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise LoadError(str(path), f"the file is damaged: {error}", "Copy or fetch the folder again.") from error


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: one, or the shards that an index names."""
    what = f"model folder {folder}"
    index = read_json(folder / "model.safetensors.index.json")
    if index is not None:
        names = sorted(set((index.get("weight_map") or {}).values()))
        outside = [name for name in names if Path(name).name != name]
        if outside or not names:
            raise LoadError(what, f"the index names no file in it: {shortened(outside)}", "Copy the folder again.")
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            why = f"{len(absent)} of {len(names)} shards are missing: {shortened(absent)}"
            raise LoadError(what, why, "Copy them too.")
        return [folder / name for name in names]
    found = sorted(folder.glob("*.safetensors"))
    if (folder / "model.safetensors") in found:
        return [folder / "model.safetensors"]
    if found:
        return found
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        raise LoadError(
            what,
            f"its weights are pickle files ({shortened(pickles)}), which can run any code when they are read",
            "Convert them to safetensors where you trust them: AutoModelForCausalLM…save_pretrained(folder).",
        )
    raise LoadError(what, "there is no *.safetensors file", "Give a folder with weights.")


def shortened(names: list[str], limit: int = 4) -> str:
    """The first names of a list and how many more there are."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None when there is no such file. LoadError when it cannot be read."""
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise LoadError(str(path), f"the file cannot be read as JSON: {error}", "Copy the folder again.") from error
    if not isinstance(data, dict):
        raise LoadError(str(path), "the file holds no JSON object", "Copy the folder again.")
    return data
