"""What loads, and the sentence for everything that does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from labkit.errors import ConfigError, LoadError
from labkit.models.folder import load_config
from labkit.models.loader import load_folder, load_model, resolve_dtype

from .folders import CONFIG, HEAD, HEADS, KV_HEADS, VOCAB, weights, write_folder


def test_every_tensor_lands_in_its_place(tmp_path: Path) -> None:
    state = weights()
    loaded = load_folder(write_folder(tmp_path, state=state))
    assert (loaded.weights, loaded.dtype, loaded.source) == ("real", "float32", str(tmp_path))
    layer = loaded.decoder.layers[1]
    q, k, v = (state[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv")
    assert torch.equal(layer.attention.qkv, torch.cat((q, k, v)))
    gate, up = (state[f"model.layers.1.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    assert torch.equal(layer.mlp.gate_up, torch.cat((gate, up)))
    views = loaded.decoder.checkpoint_views()
    assert set(views) == set(state)
    assert all(torch.equal(views[name], state[name]) for name in state)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_are_converted_once_from_what_is_stored(tmp_path: Path, stored: torch.dtype, dtype: str) -> None:
    state = {name: tensor.to(stored) for name, tensor in weights().items()}
    loaded = load_folder(write_folder(tmp_path, state=state), dtype=dtype)
    assert loaded.dtype == dtype
    assert torch.equal(loaded.decoder.lm_head, state["lm_head.weight"].to(getattr(torch, dtype)))
    expected = sum(t.numel() for t in state.values()) * loaded.decoder.dtype.itemsize + 128 * HEAD * 4
    assert loaded.decoder.num_bytes() == expected


def test_a_tied_head_is_the_embedding_and_a_stored_one_is_ignored(tmp_path: Path) -> None:
    loaded = load_folder(write_folder(tmp_path, tie_word_embeddings=True))
    assert loaded.decoder.lm_head is loaded.decoder.embed_tokens
    state = {name: t for name, t in weights().items() if name != "lm_head.weight"}
    assert load_folder(write_folder(tmp_path / "without", state=state, tie_word_embeddings=True))


def test_rotary_frequencies_in_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    state = {**weights(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(HEAD // 2)}
    load_folder(write_folder(tmp_path, state=state))


# --- names -------------------------------------------------------------------------------------------------------


def test_an_unknown_name_is_answered_with_the_closest_one() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'qwen3-0.6b'"):
        load_model("qwen3-06b")


def test_names_ignore_case() -> None:
    assert load_model("Tiny-LLAMA").config.name == "tiny-llama"


@pytest.mark.parametrize("name", ["HuggingFaceTB/SmolLM2-135M", "./nothing-here", "~/nothing-here"])
def test_a_path_that_is_not_there_is_not_looked_for_on_a_hub(name: str) -> None:
    with pytest.raises(LoadError, match="no such folder, and nothing is downloaded"):
        load_model(name)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'bfloat16'"):
        load_model("tiny-llama", dtype="bfloat6")
    assert resolve_dtype("auto", "cpu") == "float32"


def test_loading_needs_neither_transformers_nor_triton(tmp_path: Path, user_env: dict[str, str]) -> None:
    write_folder(tmp_path)
    code = (
        f"import sys; from labkit.models.loader import load_model; load_model({str(tmp_path)!r})\n"
        "assert not {'transformers', 'triton', 'gguf', 'jinja2'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=user_env)


# --- config.json -------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architectures": ["FalconForCausalLM"]}, "its architecture is FalconForCausalLM"),
    "no-architecture": ({"architectures": None}, "its architecture is model_type llama"),
    "remote-code": ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "run Python code from the folder"),
    "activation": ({"hidden_act": "gelu"}, "its activation is 'gelu'"),
    "mlp-bias": ({"mlp_bias": True}, "MLP has biases"),
    "window": ({"use_sliding_window": True}, "slides over a window"),
    "layer-types": ({"layer_types": ["full_attention", "sliding_attention"]}, "slides over a window"),
    "quantised": ({"quantization_config": {"quant_method": "awq"}}, "weights are quantised"),
    "dynamic": ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "of type 'dynamic'"),
    "yarn-lacks": ({"rope_scaling": {"rope_type": "yarn"}}, "lacks 'factor'"),
    "both-ways": ({"use_bidirectional_attention": True}, "see those after them"),
    "old-linear": ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "of type 'linear'"),
    "partial": ({"partial_rotary_factor": 0.5}, "covers a part of each head"),
    "llama3-lacks": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks 'low_freq_factor'"),
    "no-size": ({"hidden_size": None}, "hidden_size=None is no whole number"),
    "text-size": ({"vocab_size": "300"}, "vocab_size='300' is no whole number"),
    "zero-size": ({"num_hidden_layers": 0}, "num_hidden_layers=0 is no whole number"),
    "heads": ({"num_key_value_heads": 3}, "must be a multiple of KV heads"),
}


@pytest.mark.parametrize(("changes", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_the_decoder_does_not_compute_is_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises((LoadError, ConfigError), match=sentence):
        load_folder(write_folder(tmp_path, **changes))


@pytest.mark.parametrize(
    ("text", "sentence"), [("{broken", "cannot be read as JSON"), ("[1]", "no JSON object"), (None, "no config.json")]
)
def test_an_unreadable_config_is_named(tmp_path: Path, text: str | None, sentence: str) -> None:
    write_folder(tmp_path)
    if text is None:
        (tmp_path / "config.json").unlink()
    else:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(LoadError, match=sentence):
        load_folder(tmp_path)


def test_both_spellings_of_rotary_settings_mean_the_same(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = write_folder(tmp_path / "old", rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling})
    parameters = {"rope_type": "llama3", "rope_theta": 5e5, **scaling}
    new = write_folder(tmp_path / "new", rope_theta=None, rope_parameters=parameters)
    a, b = load_config(old, "x"), load_config(new, "x")
    assert a == b and a.rope_theta == 5e5 and a.rope_scaling is not None and a.rope_scaling.factor == 8.0


def test_absent_keys_have_transformers_defaults(tmp_path: Path) -> None:
    absent = dict.fromkeys(("num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps", "tie_word_embeddings"))
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k not in absent}))
    config = load_config(tmp_path)
    assert (config.num_kv_heads, config.head_size) == (HEADS, CONFIG["hidden_size"] // HEADS)
    assert (config.rope_theta, config.rms_norm_eps, config.tie_word_embeddings) == (10_000.0, 1e-6, False)


@pytest.mark.parametrize(
    ("model", "generation", "expected"),
    [(2, None, (2,)), ([2, 7], None, (2, 7)), (None, None, ()), (2, [7, 9], (7, 9)), (2, 9, (9,))],
)
def test_c50_every_eos_id_is_kept_and_generation_config_comes_first(
    tmp_path: Path, model: Any, generation: Any, expected: tuple[int, ...]
) -> None:
    """Models list several EOS ids; all of them end a text."""
    write_folder(tmp_path, eos_token_id=model)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    loaded = load_folder(tmp_path)
    assert loaded.config.eos_token_ids == loaded.tokenizer.eos_token_ids == expected


# --- weights -----------------------------------------------------------------------------------------------------


def test_missing_tensors_are_listed(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in weights().items() if "layers.1.mlp" not in name}
    with pytest.raises(LoadError, match=r"3 tensors are missing: model\.layers\.1\.mlp\.gate_proj\.weight, "):
        load_folder(write_folder(tmp_path, state=state))


def test_an_untied_head_that_is_not_there_is_missing(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in weights().items() if name != "lm_head.weight"}
    with pytest.raises(LoadError, match=r"1 tensors are missing: lm_head\.weight"):
        load_folder(write_folder(tmp_path, state=state))


def test_tensors_without_a_place_are_refused(tmp_path: Path) -> None:
    """A bias that config.json does not announce would otherwise be dropped without a word."""
    state = {**weights(), "model.layers.0.self_attn.q_proj.bias": torch.ones(HEADS * HEAD)}
    with pytest.raises(LoadError, match=r"no place in this architecture: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load_folder(write_folder(tmp_path, state=state))


def test_a_wrong_shape_names_both(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=rf"is \[{VOCAB}, 32\] and config.json makes it \[{VOCAB + 1}, 32\]"):
        load_folder(write_folder(tmp_path, vocab_size=VOCAB + 1))


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    state = {**weights(), "model.norm.weight": torch.ones(32, dtype=torch.int8)}
    with pytest.raises(LoadError, match=r"model\.norm\.weight is stored as I8"):
        load_folder(write_folder(tmp_path, state=state))


def test_a_truncated_file_is_damaged(tmp_path: Path) -> None:
    path = write_folder(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(LoadError, match=r"model\.safetensors: the file is damaged"):
        load_folder(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_pickled_weights_are_never_opened(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    with pytest.raises(LoadError, match=rf"pickle files \({name}\)"):
        load_folder(tmp_path)


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(LoadError, match=r"no \*\.safetensors"):
        load_folder(tmp_path)


def shard(folder: Path, files: dict[str, str] | None = None) -> None:
    """Split the folder's weights into two files with an index; `files` changes the index."""
    state = weights()
    names = sorted(state)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: state[name] for name in part}, str(folder / file))
    (folder / "model.safetensors").unlink()
    index = {name: file for file, part in halves.items() for name in part} | (files or {})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def test_shards_are_read_through_the_index(tmp_path: Path) -> None:
    shard(write_folder(tmp_path))
    (tmp_path / "unrelated.safetensors").write_bytes(b"not listed, never opened")
    views = load_folder(tmp_path).decoder.checkpoint_views()
    assert all(torch.equal(views[name], tensor) for name, tensor in weights().items())


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    shard(write_folder(tmp_path))
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(LoadError, match=r"1 of 2 shards are missing: b\.safetensors"):
        load_folder(tmp_path)


def test_an_index_cannot_point_outside_the_folder(tmp_path: Path) -> None:
    shard(write_folder(tmp_path / "model"), {"lm_head.weight": "../secret.safetensors"})
    save_file({"lm_head.weight": torch.zeros(VOCAB, 32)}, str(tmp_path / "secret.safetensors"))
    with pytest.raises(LoadError, match=r"names no file in it: \.\./secret"):
        load_folder(tmp_path / "model")


def test_a_folder_without_a_tokenizer_reads_bytes_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load_folder(write_folder(tmp_path))
    assert loaded.tokenizer.encode("hé") == list("hé".encode())
    assert "has no tokenizer" in capsys.readouterr().err
    assert loaded.decoder.layers[0].attention.qkv.shape[0] == (HEADS + 2 * KV_HEADS) * HEAD
