"""One GGUF file to one Hugging Face folder: safetensors, config, tokenizer. Refuses to know where either comes from.

Weights are dequantised in fp32 and stored as bf16. A bf16 folder is half the size and is read in half the time; every
dtype the engine runs in starts from the same stored values, so parity with another engine that reads the folder
is not touched by the choice. Rounding to bf16 (2⁻⁹ relative) is far below the 4-bit quantisation of the source.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labkit.errors import LoadError

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
#: GGUF's token types that the tokenizer must never split.
_CONTROL, _USER_DEFINED = 3, 4


def hf_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; LoadError for a tensor that Llama lacks."""
    parts = gguf_name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _TOP_NAMES:
        return f"{_TOP_NAMES[parts[0]]}.{parts[1]}"
    raise LoadError(f"GGUF tensor {gguf_name!r}", "a plain Llama model has no such tensor", "Use a Llama-family file.")


def unpermute_rows(weight: Any, num_heads: int) -> Any:
    """Rows of a q or k projection back to halves: GGUF keeps each head's rotary pairs interleaved (x0 y0 x1 y1 …).

    `[num_heads * head_size, hidden]` in and out, numpy or torch.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def gguf_to_folder(source: Path, out: Path, progress: Callable[[str], None]) -> None:
    """Write `config.json`, `generation_config.json`, tokenizer files and `model.safetensors` into the folder `out`.

    Args:
        source: a Llama-architecture GGUF file with a byte-level BPE tokenizer.
        out: an existing, empty folder. The caller makes it visible only when this returns.
        progress: told what is being done.

    Raises:
        LoadError: another architecture or tokenizer.
    """
    from gguf import GGUFReader

    progress(f"reading {source.name}")
    reader = GGUFReader(str(source))

    def field(key: str, default: Any = None) -> Any:
        found = reader.fields.get(key)
        return default if found is None else found.contents()

    architecture, tokenizer_model = field("general.architecture"), field("tokenizer.ggml.model")
    if architecture != "llama" or tokenizer_model != "gpt2":
        raise LoadError(
            f"GGUF file {source.name}",
            f"it holds a {architecture!r} model with a {tokenizer_model!r} tokenizer",
            "Only 'llama' with byte-level BPE ('gpt2') is converted.",
        )
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    _write_json(out / "config.json", _config(field, tied))
    _write_json(out / "generation_config.json", _generation_config(field))
    progress("writing the tokenizer")
    _write_tokenizer(field, out)
    heads, kv_heads = (int(field(f"llama.attention.{key}")) for key in ("head_count", "head_count_kv"))
    _write_weights(reader, heads, kv_heads, out, progress)


def _config(field: Callable[..., Any], tied: bool) -> dict[str, Any]:
    heads, hidden = int(field("llama.attention.head_count")), int(field("llama.embedding_length"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(field("llama.vocab_size")),
        "hidden_size": hidden,
        "intermediate_size": int(field("llama.feed_forward_length")),
        "num_hidden_layers": int(field("llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(field("llama.attention.head_count_kv")),
        "head_dim": int(field("llama.rope.dimension_count", hidden // heads)),
        "max_position_embeddings": int(field("llama.context_length")),
        # GGUF stores fp32; seven digits give back the 1e-05 that the model was trained with.
        "rms_norm_eps": float(f"{field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(field("llama.rope.freq_base", 10_000.0)),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }


def _generation_config(field: Callable[..., Any]) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {key: field(f"tokenizer.ggml.{short}_token_id") for key, short in names.items()}


def _write_tokenizer(field: Callable[..., Any], out: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, types = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    kind = field("tokenizer.ggml.pre")
    if kind != "smollm":
        raise LoadError(f"GGUF pre-tokenizer {kind!r}", "its splitting rule is not known here", "Only 'smollm' is.")
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL]
    user = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in user])
    tokenizer.save(str(out / "tokenizer.json"))
    special = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    named = {key: tokens[field(f"tokenizer.ggml.{short}_token_id")] for key, short in special.items()}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(field("llama.context_length")),
        "clean_up_tokenization_spaces": False,
        "chat_template": field("tokenizer.chat_template"),
        **named,
    }
    _write_json(out / "tokenizer_config.json", settings)


def _write_weights(reader: Any, num_heads: int, num_kv_heads: int, out: Path, progress: Callable[[str], None]) -> None:
    import numpy as np
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    heads = {"attn_q": num_heads, "attn_k": num_kv_heads}
    state: dict[str, torch.Tensor] = {}
    count = len(reader.tensors)
    for index, tensor in enumerate(reader.tensors):
        if index % 68 == 0:
            progress(f"dequantising tensor {index + 1} of {count}")
        weight = dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            weight = unpermute_rows(weight, heads[kind])
        # The file is mapped read-only; torch wants memory that it may write to.
        owned = np.array(weight, dtype=np.float32, order="C")
        state[hf_name(tensor.name)] = torch.from_numpy(owned).to(torch.bfloat16)
    progress("writing model.safetensors")
    save_file(state, str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # save_file keeps it to the owner; a cache may be shared


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
