"""The export to vLLM against the table of vLLM's own sources: every option, field and value is one that vLLM has.

The command is read back as a shell and vLLM's parser would, over a parser that is built from the table alone.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.cli import main
from labkit.config import ATTENTION_BACKENDS, COMPILATION_MODES, SPLITTING_OPS, CUDAGraphMode, EngineConfig
from labkit.dev import read_vllm
from labkit.models.shapes import SHAPES, model_names
from labkit.vllm_options import _ONLY_HERE, HUB_NAMES, TABLE, Export, to_vllm

OPTIONS: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
FLAGS, CLASSES, ENUMS = OPTIONS["flags"], OPTIONS["classes"], OPTIONS["enums"]
CONFIGS = {"compilation_config": "CompilationConfig", "attention_config": "AttentionConfig"}


class Refused(Exception):
    pass


@functools.cache
def vllm_parser() -> argparse.ArgumentParser:
    class Strict(argparse.ArgumentParser):
        def error(self, message: str) -> Any:
            raise Refused(message)

    parser = Strict(prog="vllm serve", allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("model_tag")
    types = {"int": int, "float": float, "str": str, "json": json.loads}
    for flag in FLAGS.values():
        if flag["names"][0] == "--model":
            continue
        dest = flag["names"][0][2:].replace("-", "_")
        if flag["kind"] == "switch":
            parser.add_argument(*flag["names"], dest=dest, action=argparse.BooleanOptionalAction)
        else:
            nargs = "+" if flag["kind"] == "list" else None
            parser.add_argument(
                *flag["names"], dest=dest, type=types[flag["type"]], nargs=nargs, choices=flag.get("choices")
            )
    return parser


def read_as_vllm(words: list[str]) -> dict[str, Any]:
    """Arguments by name. Dotted options are gathered into one JSON object, and -O2 becomes an option, as there."""
    objects: dict[str, dict[str, Any]] = {}
    plain: list[str] = []
    for word in words:
        key, eq, text = word.partition("=")
        if word.startswith("-") and "." in key:
            assert eq, f"{word} needs its value in the same word here"
            group, field = key.split(".")
            try:
                value = json.loads(text)
            except json.JSONDecodeError:
                value = text
            objects.setdefault(group, {})[field] = value
        elif word[:2] in OPTIONS["shorthands"] and not word.startswith("--"):
            plain += [OPTIONS["shorthands"][word[:2]], word[2:]]
        else:
            plain.append(word)
    for group, value in objects.items():
        plain += [group, json.dumps(value)]
    return vars(vllm_parser().parse_args(plain))


def check(found: Export) -> dict[str, Any]:
    """Everything that holds for any export; returns the arguments as vLLM reads them."""
    names, words = split_environment(shlex.split(found.command.replace("\\\n", "")))
    assert words[:2] == ["vllm", "serve"] and tuple(words) == found.words and names == found.environment
    for name, value in names.items():
        choices = OPTIONS["environment"][name]
        assert value in (choices or ["0", "1"])
    args = read_as_vllm(words[2:])
    for group, cls in CONFIGS.items():
        for field, value in args.get(group, {}).items():
            check_field(cls, field, value)
    if "attention_backend" in args:
        assert ENUMS["AttentionBackendEnum"][args["attention_backend"]], "a name without a class is no backend"
    if "optimization_level" in args:
        assert "O" + args["optimization_level"] in ENUMS["OptimizationLevel"]
    for name, flag in FLAGS.items():
        if "known" in flag and (dest := name[2:].replace("-", "_")) in args:
            assert args[dest] in flag["known"]
    model, keywords = read_python(found.python)
    assert model == args.pop("model_tag")
    if "optimization_level" in args:
        args["optimization_level"] = int(args["optimization_level"])
    assert keywords == args, "the command and the Python code say different things"
    assert not re.search(r"\\ *#|\\[ \t]+\n|=(true|false)\b|\blevel\b", found.command, re.IGNORECASE)
    return args


def split_environment(words: list[str]) -> tuple[dict[str, str], list[str]]:
    at = next(i for i, word in enumerate(words) if "=" not in word)
    return dict(word.split("=", 1) for word in words[:at]), words[at:]


def check_field(cls: str, field: str, value: Any) -> None:
    assert field in CLASSES[cls], f"{cls} has no {field}"
    if field == "cudagraph_mode":
        assert value in ENUMS["CUDAGraphMode"]
    elif field == "mode":
        assert value in ENUMS["CompilationMode"]
    elif field == "splitting_ops":
        assert set(value) <= set(OPTIONS["splitting_ops"])
    elif CLASSES[cls][field].startswith("Literal"):
        assert value in ast.literal_eval(CLASSES[cls][field].split("]")[0].removeprefix("Literal") + "]")
    elif CLASSES[cls][field].startswith("list[int"):
        assert value and all(type(size) is int for size in value)
    else:
        assert type(value).__name__ == CLASSES[cls][field].split(" | ")[0]


def read_python(text: str) -> tuple[str, dict[str, Any]]:
    """The call's model and its other keywords, each one that `LLM` names or hands to EngineArgs."""
    calls = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "LLM"]
    (call,) = calls
    keywords = {k.arg or "": ast.literal_eval(k.value) for k in call.keywords}
    for name in keywords:
        assert name in OPTIONS["llm_arguments"] or name in CLASSES["EngineArgs"], f"LLM takes no {name}"
    return keywords.pop("model"), keywords


def fields_of(notes: Any) -> set[str]:
    return {note.setting for note in notes}


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    def maybe(strategy: st.SearchStrategy[Any]) -> Any:
        return draw(st.none() | strategy)

    size = st.integers(1, 512)
    return EngineConfig(
        model=draw(st.sampled_from([*model_names(), "/a folder/it's mine", "models/x;y"])),
        dtype=draw(st.sampled_from(["auto", "float32", "float16", "bfloat16"])),
        seed=draw(st.integers(0, 9)),
        attention_backend=maybe(st.sampled_from([*ATTENTION_BACKENDS, "auto"])),
        flash_attn_version=maybe(st.sampled_from([2, 3, 4, "auto"])),
        sdpa_kernel=draw(st.sampled_from(["auto", "math"])),
        num_splits=draw(st.sampled_from([0, 4])),
        split_mixed_batches=draw(st.booleans()),
        batch_invariant=draw(st.booleans()),
        block_size=maybe(st.sampled_from([8, 16, 64])),
        kv_cache_layout=draw(st.sampled_from(["NHD", "HND"])),
        gpu_memory_utilization=draw(st.sampled_from([0.5, 0.9, 0.25])),
        num_gpu_blocks_override=maybe(st.integers(2, 99)),
        enable_prefix_caching=draw(st.booleans()),
        max_model_len=maybe(st.integers(2, 4096)),
        max_num_seqs=draw(st.sampled_from([256, 8])),
        max_num_batched_tokens=draw(st.sampled_from([8192, 2048])),
        long_prefill_token_threshold=draw(st.sampled_from([0, 512])),
        enable_chunked_prefill=draw(st.booleans()),
        cudagraph_mode=maybe(st.sampled_from(CUDAGraphMode)),
        cudagraph_capture_sizes=maybe(st.lists(size, min_size=1, max_size=4)),
        max_cudagraph_capture_size=maybe(size),
        enforce_eager=draw(st.booleans()),
        optimization_level=maybe(st.integers(0, 3)),
        compilation_mode=maybe(st.sampled_from(COMPILATION_MODES)),
        compile_sizes=maybe(st.lists(size, min_size=1, max_size=3)),
        splitting_ops=maybe(st.sampled_from([[], list(SPLITTING_OPS)])),
    )


@settings(max_examples=60, deadline=None)
@given(configs(), st.booleans(), st.sampled_from([(1, 1, 1), (8, 1, 1), (4, 2, 2)]))
def test_vllm_would_take_every_word(config: EngineConfig, keep: bool, parallel: tuple[int, int, int]) -> None:
    tensor, pipeline, data = parallel
    found = to_vllm(
        config, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, data_parallel_size=data,
        keep_defaults=keep,
    )  # fmt: skip
    args = check(found)
    assert args.get("tensor_parallel_size", 1) == tensor and args.get("data_parallel_size", 1) == data
    compilation = args.get("compilation_config", {})
    if config.enforce_eager:
        assert args["enforce_eager"] is True and not compilation
    else:
        asked = config.cudagraph_mode
        assert compilation.get("cudagraph_mode") == (asked.name if isinstance(asked, CUDAGraphMode) else None)
        sizes = config.cudagraph_capture_sizes
        assert compilation.get("cudagraph_capture_sizes") == (sorted(set(sizes)) if sizes else None)
        limit = compilation.get("max_cudagraph_capture_size")
        assert limit == (None if sizes else config.max_cudagraph_capture_size), "vLLM refuses a limit beside a list"
        assert compilation.get("compile_sizes") == (list(config.compile_sizes) if config.compile_sizes else None)
    assert args.get("enable_prefix_caching", True) == config.enable_prefix_caching
    if keep:
        assert args["max_num_seqs"] == config.max_num_seqs
        assert args["gpu_memory_utilization"] == config.gpu_memory_utilization
    for note in (*found.missing, *found.different):
        assert note.text.endswith(".") and note.setting
        if note.option:  # what a note advises is an option of vLLM as well
            read_as_vllm(["a model", *shlex.split(note.option)])


#: field → a value of its own. Each must change the command, be named as missing, or be one of the two below.
SET: dict[str, Any] = {
    "model": "a/folder", "dtype": "float16", "device": "cpu", "seed": 3, "attention_backend": "TRITON_ATTN",
    "flash_attn_version": 3, "sdpa_kernel": "math", "num_splits": 4, "split_mixed_batches": True,
    "batch_invariant": True, "block_size": 32, "kv_cache_layout": "HND", "gpu_memory_utilization": 0.8,
    "num_gpu_blocks_override": 99, "enable_prefix_caching": False, "max_model_len": 512, "max_num_seqs": 8,
    "max_num_batched_tokens": 1024, "long_prefill_token_threshold": 64, "enable_chunked_prefill": False,
    "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2], "max_cudagraph_capture_size": 8,
    "enforce_eager": True, "optimization_level": 1, "compilation_mode": "VLLM_COMPILE", "compile_sizes": [1],
    "splitting_ops": [], "piecewise_method": "break",
}  # fmt: skip
#: Refused by EngineConfig in this version, so that there is nothing to translate yet.
LATER = {"kv_cache_dtype", "prefill_first", "num_speculative_tokens", "tensor_parallel_size", "quantization"}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(EngineConfig)])
def test_no_setting_is_lost_silently(field: str) -> None:
    if field not in SET:
        assert field in LATER, f"{field} is new: translate it, or say that it has no counterpart"
        return
    plain, found = to_vllm(EngineConfig()), to_vllm(EngineConfig(**{field: SET[field]}))
    check(found)
    assert found.command != plain.command or field in fields_of(found.missing) - fields_of(plain.missing)


def test_fields_of_later_versions_are_translated() -> None:
    config = EngineConfig()
    for field, value in {"quantization": "fp8", "num_speculative_tokens": 2, "kv_cache_dtype": "fp8",
                         "prefill_first": True, "tensor_parallel_size": 2}.items():  # fmt: skip
        object.__setattr__(config, field, value)
    found = to_vllm(config)
    args = check(found)
    assert (args["quantization"], args["spec_tokens"], args["kv_cache_dtype"]) == ("fp8", 2, "fp8")
    assert args["tensor_parallel_size"] == 2 and fields_of(found.missing) == {"prefill_first"}


@pytest.mark.parametrize("name", ATTENTION_BACKENDS)
def test_a_backend_is_written_only_where_vllm_runs_decoders_on_it(name: str) -> None:
    found = to_vllm(EngineConfig(attention_backend=name))
    served = name in ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION")
    assert (check(found).get("attention_backend") == name) is served
    assert ("attention_backend" in fields_of(found.missing)) is not served


def test_every_model_name_has_a_translation() -> None:
    assert set(HUB_NAMES) >= {name for name in model_names() if not name.startswith(_ONLY_HERE)}
    for name in SHAPES:
        found = to_vllm(EngineConfig(model=name))
        assert ("model" in fields_of(found.missing)) is name.startswith(_ONLY_HERE)
        assert (check(found).get("load_format") == "dummy") is (not name.startswith(_ONLY_HERE))


@pytest.mark.skipif(not shutil.which("bash"), reason="the command is for a shell")
def test_a_shell_gives_vllm_the_same_words() -> None:
    config = EngineConfig(
        model="/a folder/it's $HOME", compile_sizes=[1, 8], cudagraph_capture_sizes=[1, 2], batch_invariant=True,
        splitting_ops=list(SPLITTING_OPS), flash_attn_version=3, optimization_level=2, enable_prefix_caching=False,
    )  # fmt: skip
    found = to_vllm(config)
    script = "vllm() { env | grep ^VLLM_; printf '%s\\n' vllm \"$@\"; }\n" + found.command + "\n"
    out = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, env={**os.environ})
    assert out.returncode == 0 and not out.stderr
    assert out.stdout.splitlines() == ["VLLM_BATCH_INVARIANT=1", *found.words]


def test_what_vllm_says_by_itself_is_from_the_table() -> None:
    notes = {note.setting: str(note) for note in to_vllm(EngineConfig()).different}
    assert f"{FLAGS['--gpu-memory-utilization']['default']:g}" in notes["gpu_memory_utilization"]
    for limit in ("max_num_seqs", "max_num_batched_tokens"):
        for value in OPTIONS["batch_defaults"][limit]["OPENAI_API_SERVER"]:
            assert f"{value:,}" in notes[limit]
    kept = to_vllm(EngineConfig(), keep_defaults=True)
    assert not {"gpu_memory_utilization", "max_num_seqs", "compilation_mode"} & fields_of(kept.different)
    assert check(kept)["compilation_config"] == {"mode": "NONE"}


def test_the_table_is_of_a_recent_vllm_and_complete() -> None:
    assert tuple(map(int, OPTIONS["version"].split("."))) >= (0, 32, 0) and OPTIONS["version"] in OPTIONS["source"]
    assert set(FLAGS) == set(read_vllm.FLAGS) and set(OPTIONS["environment"]) == set(read_vllm.VARIABLES)
    assert set(CUDAGraphMode.__members__) == set(ENUMS["CUDAGraphMode"])
    assert set(COMPILATION_MODES) <= set(ENUMS["CompilationMode"])
    assert {name.replace("labkit::", "vllm::") for name in SPLITTING_OPS} <= set(OPTIONS["splitting_ops"])
    assert TABLE.stat().st_size < 40_000


def test_labkits_levels_are_vllms() -> None:
    from labkit.graphs.modes import OPTIMIZATION_LEVELS

    assert {str(level): mode.name for level, mode in OPTIMIZATION_LEVELS.items()} == OPTIONS["levels"]


# --- the command and the reader ------------------------------------------------------------------------------------


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["export", "vllm", "--model", "llama-3.1-8b", "--tensor-parallel-size", "8", "--cudagraph-mode", "full",
             "--num-splits", "4", "--enforce-eager"]  # fmt: skip
    assert main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["engine"] == "vllm" and data["version"] == OPTIONS["version"]
    assert "--tensor-parallel-size" in data["words"] and data["missing"][0]["setting"] == "num_splits"
    assert main(words) == 0
    out = capsys.readouterr().out
    assert data["command"] in out and data["python"] in out and "num_splits: " in out
    assert main(["export"]) == 2 and main(["export", "sglang"]) == 2
    assert "labkit export vllm" in capsys.readouterr().err


def test_a_wheel_that_reads_otherwise_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm-9.9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as out:
        out.writestr("vllm/_version.py", "__version__ = version = '9.9.9'\n__commit_id__ = None\n")
        out.writestr("vllm/engine/arg_utils.py", "class EngineArgs:\n    def add_cli_args(parser): pass\n")
        out.writestr("vllm/config/x.py", "")
    with pytest.raises(SystemExit, match="lacks"):
        read_vllm.read(wheel)


READER_CASES = {
    "switch": ("class C:\n    x: bool | None = None\n", {"kind": "switch", "type": "bool", "default": None}),
    "choices": ("A = Literal['a', 'b']\nclass C:\n    x: A = 'a'\n", {"choices": ["a", "b"], "default": "a"}),
    "known": ("A = Literal['a', 'b']\nclass C:\n    x: A | str = 'a'\n", {"known": ["a", "b"]}),
    "list": ("class C:\n    x: list[int] | None = None\n", {"kind": "list", "type": "int", "optional": True}),
    "field": ("class C:\n    x: float = Field(default=0.92, gt=0)\n", {"type": "float", "default": 0.92}),
    "class variable": ("class C:\n    D: ClassVar[int] = 7\n    x: int = Field(default=D)\n", {"default": 7}),
    "object": ("class C:\n    x: OtherConfig = Field(default_factory=OtherConfig)\n", {"kind": "json"}),
}


@pytest.mark.parametrize("case", READER_CASES)
def test_a_field_is_read_by_vllms_rule(case: str, tmp_path: Path) -> None:
    source, expected = READER_CASES[case]
    wheel = tmp_path / "vllm.whl"
    with zipfile.ZipFile(wheel, "w") as out:
        out.writestr("vllm/config/c.py", source)
        out.writestr(read_vllm.LOADERS, "")
    found = read_vllm._kind(read_vllm.Sources(wheel), "C", "x", {})
    assert expected.items() <= found.items()
