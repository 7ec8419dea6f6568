"""The command line: objects, exit codes, sentences, and a stdout that holds one object whatever happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.attention.interface import Availability
from labkit.cli import entry, main, options
from labkit.cli.machine import driver_advice, system_advice
from labkit.config import ATTENTION_BACKENDS, EngineConfig, SamplingParams
from labkit.measure.recordings import Recording, load

ROOT = Path(__file__).resolve().parents[1]
TINY = ["--model", "tiny-llama", "--max-model-len", "128", "--max-num-seqs", "4", "--cudagraph-capture-sizes", "1,4"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict, str]:
    """Exit code, the one object on stdout, and stderr."""
    code = main([*words, "--json"])
    out, err = capsys.readouterr()
    assert out.endswith("\n") and out.count("\n") == 1, f"more than one line: {out!r}"
    return code, json.loads(out), err


def say(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr as people see them."""
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def test_numbers_that_are_named_twice_count_once() -> None:
    """Two rows of one configuration cannot be kept in a recording, and the error would come after measuring."""
    assert options.whole_list(1)("8,1, 8") == [8, 1] and options.whole_list()("[]") == []


# --- rules ---------------------------------------------------------------------------------------------------------


def test_sizes(capsys) -> None:
    code, data, _ = run(capsys, "sizes", "--max-num-seqs", "13")
    assert code == 0
    assert data["sizes"] == [1, 2, 4, 8, 13, 16, 24]
    expected = {str(n): min(s for s in data["sizes"] if s >= n) for n in range(1, 25)}
    assert data["padding"] == expected


@pytest.mark.parametrize(
    ("words", "first", "last", "count"),
    [
        ([], 1, 512, 51),
        (["--gpu", "H200", "--max-num-seqs", "1024"], 1, 512, 51),
        (["--gpu", "b200", "--max-num-seqs", "1024"], 1, 1024, 83),
        (["--max-num-batched-tokens", "100"], 1, 100, 16),
        (["--max-cudagraph-capture-size", "8"], 1, 8, 4),
        (["--cudagraph-capture-sizes", "[16, 4,4]"], 4, 16, 2),
        (["--query-len", "3", "--max-num-seqs", "2"], 1, 8, 6),
        (["--query-len", "2", "--max-num-seqs", "1024", "--gpu", "B200"], 1, 1024, 83),
    ],
)
def test_sizes_follow_the_limits(capsys, words, first, last, count) -> None:
    code, data, _ = run(capsys, "sizes", *words)
    assert code == 0
    assert (data["sizes"][0], data["sizes"][-1], len(data["sizes"])) == (first, last, count)


def test_sizes_in_words(capsys) -> None:
    code, out, _ = say(capsys, "sizes")
    assert code == 0
    assert out.startswith("51 sizes: 1, 2, 4, 8 … 256 by 8, 272 … 512 by 16\n")
    assert out.endswith("Above 512 tokens a step runs eagerly, unpadded.\n")


def test_modes(capsys) -> None:
    code, data, _ = run(capsys, "modes", "--requested", "full", "--tier", "UNIFORM_BATCH", "--compiled")
    assert code == 0
    assert {k: data[k] for k in ("requested", "tier", "compiled", "query_len", "resolved")} == {
        "requested": "FULL",
        "tier": "UNIFORM_BATCH",
        "compiled": True,
        "query_len": 1,
        "resolved": "FULL_AND_PIECEWISE",
    }
    assert data["trail"][-1] == "resolved: FULL_AND_PIECEWISE"
    code, out, _ = say(capsys, "modes", "--requested", "FULL", "--tier", "UNIFORM_BATCH", "--no-compiled")
    assert code == 0 and "decode steps run FULL, mixed steps run NONE" in out


def test_a_mode_that_cannot_be_is_a_bad_argument(capsys) -> None:
    code, data, _ = run(capsys, "modes", "--requested", "FULL", "--tier", "NEVER")
    assert code == 2 and "cannot be captured" in data["error"]["why"]


# --- machine -------------------------------------------------------------------------------------------------------

MHA = set(ATTENTION_BACKENDS)


def check_backends(data: dict) -> None:
    assert {b["name"] for b in data["backends"]} == MHA
    for b in data["backends"]:
        for answer in [b, *b.get("versions", [])]:
            assert answer["usable"] is (not answer["reasons"])
            assert len(answer["conditions"]) == len(answer["reasons"])
        for version in b.get("versions", []):
            assert set(version) == {"version", "provider", "usable", "reasons", "conditions"}
        assert b["tier"] in ("NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS")
    orders = [b["order"] for b in data["backends"] if b["order"] is not None]
    assert orders == list(range(1, len(orders) + 1))


def test_backends_here(capsys) -> None:
    code, data, _ = run(capsys, "backends", "--model", "tiny-llama", "--device", "cpu")
    assert code == 0
    check_backends(data)
    assert (data["selected"], data["dtype"], data["block_size"], data["gpu"]) == ("TORCH_SDPA", "float32", 16, "cpu")
    assert data["model"] == "tiny-llama"
    assert [b["name"] for b in data["backends"] if b["order"]] == ["TORCH_SDPA"], "the only one tried on a CPU"
    refused = {b["name"]: b["reasons"] for b in data["backends"] if not b["usable"]}
    assert refused["FLASHINFER"] and refused["FLASH_ATTN"]


@pytest.mark.parametrize(
    ("gpu", "first", "installed", "dtype"),
    [
        ("T4", "FLASH_ATTN", "TORCH_SDPA", "float16"),
        ("A100", "FLASH_ATTN", "TRITON_ATTN", "bfloat16"),
        ("l4", "FLASH_ATTN", "TRITON_ATTN", "bfloat16"),
        ("H100", "FLASH_ATTN", "TRITON_ATTN", "bfloat16"),
        ("h200", "FLASH_ATTN", "TRITON_ATTN", "bfloat16"),
        ("B200", "FLASHINFER", "TRITON_ATTN", "bfloat16"),
        ("RTX5090", "FLASH_ATTN", "TRITON_ATTN", "bfloat16"),
        ("MI300X", "TRITON_ATTN", "TRITON_ATTN", "bfloat16"),
        ("cpu", "TORCH_SDPA", "TORCH_SDPA", "float32"),
    ],
)
def test_backends_on_another_gpu(capsys, monkeypatch, gpu, first, installed, dtype) -> None:
    monkeypatch.setenv("LABKIT_ATTENTION_BACKEND", "XFORMERS")
    code, data, _ = run(capsys, "backends", "--gpu", gpu, "--model", "llama-3.1-8b")
    assert code == 0
    check_backends(data)
    assert (data["backends"][0]["name"], data["dtype"]) == (first, dtype)
    assert data["selected"] == next(b["name"] for b in data["backends"] if b["usable"])
    assert data["assumes_installed"] is True
    assert data["requested"] is None, "this process's environment says nothing about another machine"
    assert ("never run" in " ".join(data["notes"])) == (gpu == "MI300X")

    here = {name: Availability(name in ("TRITON_ATTN", "TORCH_SDPA"), "ImportError: that") for name in MHA}
    monkeypatch.setattr("labkit.llm.find_backends", lambda *args: here)
    code, data, _ = run(capsys, "backends", "--gpu", gpu, "--model", "llama-3.1-8b", "--installed")
    assert code == 0 and data["assumes_installed"] is False
    check_backends(data)
    assert data["selected"] == installed
    for b in data["backends"]:
        if b["name"] not in ("TRITON_ATTN", "TORCH_SDPA"):
            assert b["reasons"][0].startswith("ImportError: that; "), "the real error comes first"


@pytest.mark.parametrize("gpu", ["T4", "H200", "B200", "MI300X", "cpu"])
def test_backends_in_words_fit_100_columns(capsys, gpu) -> None:
    _, data, _ = run(capsys, "backends", "--gpu", gpu, "--block-size", "24", "--num-splits", "4")
    code, out, _ = say(capsys, "backends", "--gpu", gpu, "--block-size", "24", "--num-splits", "4")
    assert code == 0 and max(map(len, out.splitlines())) <= 100
    text = " ".join(out.split())
    for row in data["backends"]:
        assert row["name"] in out
        for answer in [row, *row.get("versions", [])]:
            for condition in answer["conditions"]:
                assert f"x {condition['condition']}" in text
                assert f"→ {condition['remedy']}" in text
        for version in row.get("versions", []):
            assert f"FA{version['version']} {'yes' if version['usable'] else 'no'}" in text
    assert out.count("← selected") == (data["selected"] is not None)
    assert f"selected: {data['selected'] or 'none'}" in out


def test_the_environment_asks_for_a_backend_and_the_option_goes_before_it(capsys, monkeypatch) -> None:
    monkeypatch.setenv("LABKIT_ATTENTION_BACKEND", "triton_attn")
    words = ["backends", "--device", "cpu", "--model", "tiny-llama"]
    _, data, _ = run(capsys, *words)
    assert (data["requested"], data["requested_by"]) == ("TRITON_ATTN", "LABKIT_ATTENTION_BACKEND")
    assert "LABKIT_ATTENTION_BACKEND asks for" in say(capsys, *words)[1]
    _, data, _ = run(capsys, *words, "--attention-backend", "torch_sdpa")
    assert (data["selected"], data["requested_by"]) == ("TORCH_SDPA", "--attention-backend")
    _, data, _ = run(capsys, *words, "--attention-backend", "auto")
    assert (data["selected"], data["requested"], data["requested_by"]) == ("TORCH_SDPA", None, None)
    monkeypatch.setenv("LABKIT_ATTENTION_BACKEND", "TRITON_ATN")
    code, data, _ = run(capsys, *words)
    assert code == 2 and "LABKIT_ATTENTION_BACKEND='TRITON_ATN'" in data["error"]["what"]
    assert "Did you mean 'TRITON_ATTN'" in data["error"]["try"]
    assert run(capsys, "generate", *TINY, "--prompt", "x")[0] == 2
    assert run(capsys, *words, "--attention-backend", "auto")[0] == 0, "nobody asks the environment then"


def test_backends_help_says_who_decides(capsys) -> None:
    text = " ".join(say(capsys, "backends", "--help")[1].split())
    assert "LABKIT_ATTENTION_BACKEND" in text
    for gpu in ("T4", "A100", "L4", "H100", "H200", "B200", "RTX5090", "MI300X", "cpu"):
        assert gpu in text


def test_backends_take_every_setting_without_insisting_on_one_backend(capsys) -> None:
    words = ["--kv-cache-layout", "HND", "--flash-attn-version", "auto", "--split-mixed-batches", "--batch-invariant"]
    words += ["--sdpa-kernel", "math", "--num-splits", "2", "--cudagraph-mode", "FULL"]
    code, data, _ = run(capsys, "backends", "--gpu", "H200", *words)
    assert code == 0
    check_backends(data)
    assert any("batch_invariant" in r for b in data["backends"] for r in b["reasons"])


def test_backends_with_an_explicit_choice_that_cannot_serve_select_nothing(capsys) -> None:
    code, data, _ = run(capsys, "backends", "--attention-backend", "flashinfer", "--device", "cpu")
    assert code == 0 and data["selected"] is None and data["requested"] == "FLASHINFER"
    out = say(capsys, "backends", "--attention-backend", "flashinfer", "--device", "cpu")[1]
    assert "selected: none; --attention-backend asks for FLASHINFER, which cannot serve (usable: TORCH_SDPA)" in out
    check_backends(data)


def test_backends_take_the_page_size_into_account(capsys) -> None:
    code, data, _ = run(capsys, "backends", "--gpu", "H200", "--block-size", "32", "--dtype", "float32")
    assert code == 0 and (data["block_size"], data["dtype"]) == (32, "float32")
    code, data, _ = run(capsys, "backends", "--gpu", "H200", "--block-size", "20")
    assert data["selected"] == next(b["name"] for b in data["backends"] if b["usable"])
    assert "block_size=20 excludes" in " ".join(data["notes"])


def test_doctor(capsys) -> None:
    code, data, _ = run(capsys, "doctor")
    assert code == 0
    assert set(data) >= {"python", "platform", "gpus", "driver", "packages", "backends", "advice"}
    assert data["python"] == ".".join(map(str, sys.version_info[:3]))
    import torch

    assert data["packages"]["torch"] == torch.__version__
    assert len(data["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    check_backends(data)
    code, out, _ = say(capsys, "doctor")
    assert code == 0 and "TORCH_SDPA" in out and "selected for smollm2-135m-instruct" in out


def test_doctor_names_what_is_missing(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    monkeypatch.setattr("labkit.cli.machine.gpu_driver", lambda: "580.1")
    monkeypatch.setattr("labkit.cli.machine.find_gpus", lambda: ([], "", None))
    code, data, _ = run(capsys, "doctor")
    assert code == 0
    text = " ".join(data["advice"])
    assert "driver (580.1) but torch" in text and "install a CUDA build" in text
    assert "python -m labkit.models.fetch" in text
    old = [{"name": "T4", "capability": "7.5", "memory_mib": 15000, "multiprocessors": 40}]
    monkeypatch.setattr("labkit.cli.machine.find_gpus", lambda: (old, "", "13.0"))
    assert "no bfloat16" in " ".join(run(capsys, "doctor")[1]["advice"])
    monkeypatch.setattr("labkit.cli.machine.find_gpus", lambda: ([], "", "13.0"))
    assert "CUDA_VISIBLE_DEVICES" in " ".join(run(capsys, "doctor")[1]["advice"])
    monkeypatch.setattr("labkit.cli.machine.gpu_driver", lambda: "570.86.10")
    text = " ".join(run(capsys, "doctor")[1]["advice"])
    assert "CUDA_VISIBLE_DEVICES" not in text, "the driver is the cause"
    assert "570.86.10" in text and "built for CUDA 13.0" in text and "580 or newer" in text


@pytest.mark.parametrize(
    ("driver", "cuda", "words"),
    [
        ("580.159.03", "13.0", ()),
        ("595.10", "13.5", ()),
        ("700.1", "14.0", ()),  # neither is in the table: nothing to say
        ("575.51.03", "13.0", ("came with CUDA 12.9", "sees no GPU", "580 or newer")),
        ("535.54", "13.0", ("came with CUDA 12.2", "sees no GPU", "580 or newer")),
        ("440.33", "12.8", ("before 11.0", "525 or newer")),
        ("535.54", "12.8", ("came with CUDA 12.2", "It runs", "570 or newer")),
        ("580.65.06", "13.5", ("came with CUDA 13.0", "It runs", "590 or newer")),
        ("570.1", "12.8", ()),
        ("570.1", "12.6", ()),
        (None, "13.0", ()),
        ("580.1", None, ()),
        ("strange", "13.0", ()),
    ],
)
def test_a_driver_too_old_for_torch_is_named(driver, cuda, words) -> None:
    text = driver_advice(driver, cuda)
    assert bool(text) == bool(words)
    for word in words:
        assert word in text


def test_other_systems_are_told_what_they_get() -> None:
    assert "TORCH_SDPA" in system_advice("Darwin", "24.1.0")[0] and "Triton" in system_advice("Darwin", "24.1.0")[0]
    assert "WSL 2" in system_advice("Windows", "11")[0]
    assert "driver of Windows" in system_advice("Linux", "6.6.87.2-microsoft-standard-WSL2")[0]
    assert system_advice("Linux", "6.8.0-generic") == []


def test_doctor_lists_the_attention_packages(capsys, monkeypatch, tmp_path) -> None:
    for name, version, module in (
        ("flashinfer_python", "0.6.12", "flashinfer"),
        ("flash_attn_4", "4.0.0b36", "flash_attn"),
        ("tokenspeed_fa3", "3.0.0", "flash_attn_interface"),
    ):
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "top_level.txt").write_text(f"{module}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    packages = run(capsys, "doctor")[1]["packages"]
    assert (packages["flashinfer-python"], packages["flash-attn-4"]) == ("0.6.12", "4.0.0b36")
    assert packages["flash_attn_interface"] == "tokenspeed_fa3 3.0.0" and "flash-attn" not in packages


# --- generate ------------------------------------------------------------------------------------------------------


def test_generate(capsys) -> None:
    code, data, err = run(
        capsys, "generate", *TINY, "--prompt", "hello", "--max-tokens", "6", "--logprobs", "2", "--reports"
    )
    assert code == 0
    (output,) = data["outputs"]
    assert set(output) == {"text", "token_ids", "finish_reason", "usage", "logprobs"}
    assert len(output["token_ids"]) == 6 and output["finish_reason"] == "length"
    assert output["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "cached_tokens": 0}
    assert [p["token_id"] for p in output["logprobs"]] == output["token_ids"]
    assert all(len(p["top"]) == 2 and p["logprob"] <= 0 for p in output["logprobs"])
    assert data["config"]["max_model_len"] == 128 and data["config"]["cudagraph_capture_sizes"] == [1, 4]
    assert [r["mode"] for r in data["reports"]] == ["NONE"] + ["FULL"] * 5
    assert data["reports"][1]["size"] == 1
    assert "loading" in err


def test_what_is_streamed_is_what_the_object_holds(capsys) -> None:
    words = ["generate", *TINY, "--prompt", "one", "--max-tokens", "9", "--temperature", "1.5", "--sampling-seed", "3"]
    _, data, _ = run(capsys, *words)
    code, out, err = say(capsys, *words)
    assert code == 0 and out == data["outputs"][0]["text"] + "\n"
    assert "9 tokens" in err and "random weights" in err
    _, other, _ = run(capsys, *words[:-1], "4")
    assert other["outputs"][0]["token_ids"] != data["outputs"][0]["token_ids"]


def test_several_prompts_and_one_that_cannot_be_served(capsys) -> None:
    code, data, _ = run(
        capsys, "generate", *TINY, "--prompt", "a", "--prompt", "b" * 200, "--prompt", "c", "--max-tokens", "2"
    )
    assert code == 1, "one of three failed"
    reasons = [o["finish_reason"] for o in data["outputs"]]
    assert reasons == ["length", "error", "length"]
    assert "max_model_len" in data["outputs"][1]["error"] or "128" in data["outputs"][1]["error"]
    alone = run(capsys, "generate", *TINY, "--prompt", "c", "--max-tokens", "2")[1]
    assert data["outputs"][2]["token_ids"] == alone["outputs"][0]["token_ids"]


def test_no_tokens_asked_none_given(capsys) -> None:
    code, data, _ = run(capsys, "generate", *TINY, "--prompt", "a", "--max-tokens", "0")
    assert code == 0
    assert data["outputs"][0]["token_ids"] == [] and data["outputs"][0]["finish_reason"] == "length"


# --- bench and record ----------------------------------------------------------------------------------------------


def test_bench(capsys, tmp_path) -> None:
    page = tmp_path / "page.html"
    code, data, err = run(
        capsys, "bench", *TINY[:-2], "--batch", "1,3", "--context", "16", "--steps", "8", "--html", str(page)
    )
    assert code == 0
    assert list(data)[:3] == ["schema", "provenance", "rows"]
    found = Recording.from_dict(data)
    assert [(r.batch, r.requested_mode, r.size) for r in found.rows] == [
        (1, "FULL_DECODE_ONLY", 1), (1, "NONE", 1), (3, "FULL_DECODE_ONLY", 4), (3, "NONE", 3),
    ]  # fmt: skip
    assert found.provenance.kind == "LIVE" and found.provenance.n == 8
    assert [c["batch"] for c in data["comparisons"]] == [1, 3] and all(c["paired"] for c in data["comparisons"])
    assert [d["kind"] for d in data["decompositions"]] == ["LIVE"] * 4
    (memory,) = data["memory"]
    assert {part["name"]: part["difference"] for part in memory["parts"]} == {
        "weights": 0, "workspace": None, "graphs": None, "kv": 0
    }  # fmt: skip
    text = page.read_text()
    assert "Where the time of a step goes" in text and "Where the memory goes" in text
    assert "Plotly.newPlot" in text and "FULL_DECODE_ONLY" in text and found.provenance.label in text
    assert "https://cdn" not in text.split("<body>")[0], "the page needs no network"


def test_bench_in_words(capsys) -> None:
    code, out, _ = say(capsys, "bench", *TINY[:-2], "--context", "16", "--steps", "4", "--size", "4", "--decompose")
    assert "host us by phase" in out and "the largest host part is" in out and "KV cache" in out
    assert code == 0
    head, origin = out.splitlines()[:2]
    assert head.startswith("tiny-llama, random weights, float32, TORCH_SDPA") and "primed KV" in head
    assert origin.startswith("LIVE · ")
    assert "FULL 4 (emulated)" in out and "batch 1, context 16: " in out


def test_bench_keeps_a_recording_only_with_enough_steps(capsys, tmp_path) -> None:
    out = tmp_path / "x.json.gz"
    words = ["bench", *TINY[:-2], "--context", "16", "--enforce-eager", "--out", str(out), "--warmup", "1"]
    code, data, _ = run(capsys, *words, "--steps", "49")
    assert code == 2 and "needs 50 steps" in data["error"]["why"] and not out.exists()
    code, data, _ = run(capsys, *words, "--steps", "50")
    assert code == 0 and load(out).rows == Recording.from_dict(data).rows
    assert load(out).provenance.kind == "RECORDED"


def test_bench_attention(capsys) -> None:
    shape = ["--num-heads", "4", "--num-kv-heads", "2", "--head-size", "16", "--device", "cpu", "--samples", "3"]
    words = ["bench", "attention", "--batch", "2", "--context", "32", *shape]
    code, data, _ = run(capsys, *words, "--mixed")
    assert code == 0
    assert [(r["kind"], r["kv"], r["launch"]) for r in data["rows"]] == [
        ("decode", "warm", "eager"),
        ("decode", "rotated", "eager"),
        ("mixed", "warm", "eager"),
        ("mixed", "rotated", "eager"),
    ]
    assert all(r["p50_us"] > 0 for r in data["rows"]) and data["rows"][1]["sets"] >= 4
    code, out, _ = say(capsys, *words)
    assert code == 0 and out.startswith("TORCH_SDPA") and "GB/s of KV" in out


def test_bench_moe(capsys) -> None:
    code, data, _ = run(capsys, "bench", "moe", "--batch", "1,8", "--samples", "3", "--device", "cpu")
    assert code == 0
    one, eight = data["rows"]
    assert (one["model"], one["launch"], one["tokens"], one["experts_read"]) == ("tiny-qwen3-moe", "eager", 1, 3)
    assert 3 < eight["experts_read"] <= 12 and eight["gb_s"] > 0 and one["n"] == len(one["samples_us"]) == 3
    per_expert, router = 3 * 64 * 40 * 4, 12 * 64 * 4
    assert one["bytes_read"] == 3 * per_expert + router
    code, data, _ = run(capsys, "bench", "moe", "--model", "tiny-llama", "--device", "cpu")
    assert code != 0 and "no known shape with experts" in data["error"]["why"]


def test_bench_import(capsys) -> None:
    code, data, _ = run(capsys, "bench", "import", "--samples", "2")
    assert code == 0
    (row,) = data["rows"]
    assert (row["kind"], row["module"], row["n"], row["heavy"]) == ("import", "labkit", 2, [])
    assert say(capsys, "bench", "import", "--samples", "1")[1].endswith(
        "loads neither torch nor any other heavy package\n"
    )


def test_record(capsys, tmp_path) -> None:
    out = tmp_path / "smoke.json.gz"
    code, data, err = run(capsys, "record", "--suite", "smoke", "--out", str(out), "--device", "cpu")
    assert code == 0
    assert Recording.from_dict(data) == load(out)
    assert data["provenance"]["kind"] == "RECORDED" and "recording" in err
    assert str(tmp_path) not in json.dumps(data)
    code, again, err = run(capsys, "record", "--suite", "smoke", "--out", str(out), "--device", "cpu")
    assert code == 0 and again["rows"] == data["rows"] and "recording tiny" not in err


# --- words that make no sense --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "what", "why", "hint"),
    [
        ([], "labkit", "no command was given", "Commands: generate"),
        (["bnch"], "labkit bnch", "there is no such command", "Did you mean 'bench'?"),
        (["compare"], "labkit compare", "needs a second word", "labkit compare transformers"),
        (["bench", "--batc", "3"], "labkit bench --batc", "there is no such option", "Did you mean '--batch'?"),
        (["bench", "--batch", "x"], "labkit bench --batch", "'x' is not a whole number", "--help"),
        (["bench", "--batch", "1,0"], "labkit bench --batch", "0 is below 1", "--help"),
        (["bench", "--batch", ""], "labkit bench", "at least one batch", "--batch 1,8"),
        (["bench", "--batch"], "labkit bench --batch", "needs a value", "--help"),
        (["bench", "smollm2"], "labkit bench 'smollm2'", "stands alone", "--help"),
        (["bench", "--html", "/nowhere/at/all.html"], "all.html", "folder does not exist", "Make the folder"),
        (["generate"], "labkit generate", "there is no prompt", "--prompt"),
        (
            ["generate", "--prompt", "x", "--model", "smolm2-135m"],
            "model='smolm2-135m'",
            "no model",
            "Did you mean 'smollm2",
        ),
        (
            ["generate", "--prompt", "x", "--attention-backend", "FLASH_ATN"],
            "FLASH_ATN",
            "no backend",
            "Did you mean 'FLASH_ATTN'",
        ),
        (
            ["generate", "--prompt", "x", "--cudagraph-mode", "FUL"],
            "FUL",
            "no mode of that name",
            "Did you mean 'FULL'",
        ),
        (["generate", "--prompt", "x", "--temperature", "hot"], "--temperature", "'hot' is not a number", "--help"),
        (["generate", "--prompt", "x", "--temperature", "-1"], "temperature=-1.0", "must be a finite number", ""),
        (["generate", "--prompt", "x", "--dtype", "bf16"], "dtype='bf16'", "is not a known value", "bfloat16"),
        (["generate", "--prompt", "x", *TINY[:4], "--cudagraph-capture-sizes", "0"], "[0]", "at least 1", ""),
        (["generate", "--prompt", "x", *TINY[:4], "--cudagraph-capture-sizes", ""], "[]", "the list is empty", ""),
        (["generate", "--prompt", "", *TINY], "prompt", "", ""),
        (["modes", "--tier", "SOMETIMES"], "labkit modes --tier", "'SOMETIMES' is not known", ""),
        (["sizes", "--gpu", "H2000"], "gpu='H2000'", "not in the table", "Did you mean 'H200'"),
        (["backends", "--gpu", "RTX 9999"], "gpu='RTX 9999'", "not in the table", "Options"),
        (["record", "--suite", "smok"], "labkit record --suite", "Did you mean 'smoke'", ""),
        (
            ["generate", "--prompt", "x", "--num-speculative-tokens", "2"],
            "num_speculative_tokens=2",
            "does not have",
            "",
        ),
        (["generate", "--prompt", "x", "--device", "tpu"], "device='tpu'", "", "Take 'auto'"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_arguments_are_sentences_with_exit_code_2(capsys, words, what, why, hint) -> None:
    code, data, _ = run(capsys, *words)
    assert code == 2
    assert set(data) == {"error"} and set(data["error"]) == {"what", "why", "try"}
    assert what in data["error"]["what"] and why in data["error"]["why"] and hint in data["error"]["try"]
    code, out, err = say(capsys, *words)
    assert code == 2 and out == ""
    assert err.splitlines()[-2 if data["error"]["try"] else -1].startswith("labkit")
    assert "Traceback" not in err and "labkit: labkit" not in err


def test_a_backend_that_cannot_serve_is_a_failure_with_its_reasons(capsys) -> None:
    code, data, _ = run(capsys, "generate", *TINY, "--prompt", "x", "--attention-backend", "XFORMERS")
    assert code == 1
    assert data["error"]["why"] and "Usable here" in data["error"]["try"]


@pytest.mark.parametrize("error", [RuntimeError("the sky fell"), KeyboardInterrupt(), MemoryError()])
def test_whatever_happens_there_is_one_object(capsys, monkeypatch, error) -> None:
    def broken(*args, **kwargs):
        print("noise on stdout")
        raise error

    monkeypatch.setattr("labkit.cli.rules.modes", broken)
    code, data, err = run(capsys, "modes")
    assert code == 1 and set(data) == {"error"}
    assert "noise on stdout" in err
    assert "interrupted" in data["error"]["why"] or type(error).__name__ in data["error"]["why"]


def test_help_lists_only_what_exists(capsys) -> None:
    code, out, _ = say(capsys, "--help")
    assert code == 0
    for name in ("generate", "doctor", "backends", "modes", "sizes", "split", "bench attention", "record"):
        assert f"  {name} " in out
    for name in ("bisect",):
        assert name not in out
    for command in entry.COMMANDS:
        code, out, _ = say(capsys, *command.split(), "--help")
        assert code == 0 and out.startswith(f"usage: labkit {command} [options]") and "--json" in out
    assert run(capsys, "sizes", "--help")[1]["help"].startswith("usage:")
    assert run(capsys, "--version")[1]["version"]


# --- options are EngineConfig's fields -----------------------------------------------------------------------------


def parse(*words: str) -> EngineConfig:
    parser = options.Parser("labkit test", "x")
    options.add_engine_options(parser)
    return options.engine_config(parser.read(words))


def test_every_field_has_an_option_and_nothing_given_means_the_default() -> None:
    import dataclasses

    parser = options.Parser("labkit test", "x")
    options.add_engine_options(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert {"--" + f.name.replace("_", "-") for f in dataclasses.fields(EngineConfig)} <= flags
    assert parse() == EngineConfig()


def test_values_reach_the_config() -> None:
    words = "--model qwen3-0.6b --attention-backend triton_attn --cudagraph-mode full --max-model-len none --seed 7"
    words += " --cudagraph-capture-sizes 8,1 --no-enable-prefix-caching --enforce-eager --gpu-memory-utilization 0.3"
    found = parse(*words.split(), "--optimization-level=0")
    assert found == EngineConfig(
        model="qwen3-0.6b", attention_backend="TRITON_ATTN", cudagraph_mode="FULL", max_model_len=None,
        cudagraph_capture_sizes=(8, 1), enable_prefix_caching=False, enforce_eager=True, gpu_memory_utilization=0.3,
        optimization_level=0, seed=7,
    )  # fmt: skip
    assert parse("--cudagraph-mode", "NONE").cudagraph_mode.name == "NONE"


def test_sampling_options_reach_the_params() -> None:
    from labkit.cli.generate import generate_options, sampling_params

    parser = options.Parser("labkit generate", "x")
    generate_options(parser)
    words = "--max-tokens 3 --temperature 0.5 --top-k 4 --top-p 0.9 --min-tokens 1 --logprobs 0 --sampling-seed 5"
    found = sampling_params(
        parser.read([*words.split(), "--ignore-eos", "--stop", "a", "--stop", "b c", "--stop-token-ids", "1,2"])
    )
    assert found == SamplingParams(3, 0.5, 4, 0.9, 5, 0, ("a", "b c"), (1, 2), True, 1)
    assert sampling_params(parser.read([])) == SamplingParams()


# --- as a process --------------------------------------------------------------------------------------------------


def process(env: dict[str, str], *words: str, **kwargs) -> subprocess.CompletedProcess:
    env = {**env, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "labkit.cli", *words],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        **kwargs,
    )


def test_a_process_prints_one_object_and_its_exit_code(user_env) -> None:
    done = process(user_env, "generate", *TINY, "--prompt", "hello", "--max-tokens", "3", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["outputs"][0]["token_ids"]) == 3
    done = process(user_env, "generate", "--json", "--promt", "x")
    assert done.returncode == 2 and json.loads(done.stdout)["error"]["try"] == "Did you mean '--prompt'?"


#: As if some packages were not installed.
WITHOUT = """
import importlib.machinery, sys

find = importlib.machinery.PathFinder.find_spec
hidden = {names!r}

def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in hidden else find(name, path, target)

importlib.machinery.PathFinder.find_spec = classmethod(find_spec)
from labkit.cli import main
"""

NOISY = """
import os, subprocess, sys
import labkit.cli.rules as rules
from labkit.cli import main

def noisy(args, console):
    print("from python")
    os.write(1, b"from the descriptor\\n")
    subprocess.run(["echo", "from a child"])
    return rules.Answer({"fine": "ünïcode"})

rules.modes = noisy
code = main(["modes", "--json"])
print("afterwards")
sys.exit(code)
"""


def test_noise_past_python_does_not_reach_stdout(user_env) -> None:
    done = subprocess.run([sys.executable, "-c", NOISY], cwd=ROOT, env=user_env, capture_output=True, timeout=60)
    lines = done.stdout.decode().splitlines()
    assert json.loads(lines[0]) == {"fine": "ünïcode"} and lines[1:] == ["afterwards"]
    for noise in (b"from python", b"from the descriptor", b"from a child"):
        assert noise in done.stderr


def without(names: set[str], code: str, env: dict[str, str]) -> list[dict]:
    """The objects that `code` prints in a process where some packages are missing."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(names=names) + code],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_rules_answer_without_torch_numpy_and_plotly(user_env) -> None:
    code = "sys.exit(main(['modes', '--json']) + main(['sizes', '--json']))"
    modes, sizes = without({"torch", "triton", "numpy", "plotly"}, code, user_env)
    assert modes["resolved"] == "FULL_DECODE_ONLY" and len(sizes["sizes"]) == 51


def test_doctor_answers_without_torch(user_env) -> None:
    code = "sys.exit(main(['doctor', '--json']) + main(['backends', '--gpu', 'H200', '--json']))"
    doctor, backends = without({"torch", "triton"}, code, user_env)
    assert any("pip install 'labkit[engine]'" in line for line in doctor["advice"])
    sdpa = next(b for b in doctor["backends"] if b["name"] == "TORCH_SDPA")
    assert not sdpa["usable"] and "No module named 'torch'" in sdpa["reasons"][0]
    assert doctor["selected"] is None and doctor["gpus"] == []
    assert backends["selected"] == next(b["name"] for b in backends["backends"] if b["usable"])
    assert len(backends["backends"]) == len(MHA)


def test_c26_broken_packages_are_told_apart_and_each_with_its_own_error(user_env, tmp_path) -> None:
    """flash-attn-4 alone: a namespace `flash_attn` without FA2 in it. Beside it a build for another torch."""
    cute = tmp_path / "flash_attn" / "cute"
    cute.mkdir(parents=True)
    (cute / "__init__.py").write_text("import cutlass_that_is_missing\n")
    (tmp_path / "flash_attn_interface.py").write_text("raise ImportError('fa3.so: undefined symbol: _ZN3c10')\n")
    env = {**user_env, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = process(env, "backends", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    check_backends(data)
    text = " | ".join(r for b in data["backends"] if b["name"] == "FLASH_ATTN" for r in b["reasons"])
    assert "ImportError: fa3.so: undefined symbol: _ZN3c10" in text
    assert "ModuleNotFoundError: No module named 'cutlass_that_is_missing'" in text, "FA4's dependency, not FA4"
    assert "No module named 'flash_attn.flash_attn_interface'" in text, "the namespace is there and FA2 is not"


def test_a_closed_pipe_is_no_traceback(user_env) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m labkit.cli sizes --max-num-seqs 1024 --json | head -c 5"],
        cwd=ROOT, env=user_env, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == '{"siz' and "Traceback" not in done.stderr


def test_importing_the_command_line_loads_nothing_heavy(user_env) -> None:
    code = "import labkit.cli, sys; print([m for m in ('torch', 'numpy', 'plotly', 'triton') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=user_env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr
    assert os.path.exists(ROOT / "labkit" / "cli" / "__main__.py")
