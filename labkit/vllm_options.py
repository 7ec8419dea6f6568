"""From an EngineConfig to the arguments of vLLM, and what gets lost on the way. Refuses to know torch and vLLM itself.

What was set is written; what was left at its default is left to vLLM, and where the two defaults differ the difference
is named with the option that keeps labkit's value. Names and values come from `data/vllm_options.json`, which
`labkit/dev/read_vllm.py` reads out of the sources in a vLLM wheel.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from labkit.config import CUDAGraphMode, EngineConfig

TABLE = Path(__file__).resolve().parent / "data" / "vllm_options.json"

#: labkit's names for models, as the hub knows them.
HUB_NAMES = {
    "smollm2-135m-instruct": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B",
    "gemma-2-2b": "google/gemma-2-2b",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "deepseek-v2-lite": "deepseek-ai/DeepSeek-V2-Lite",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
}
#: The one of them that has real weights in labkit.
_REAL = "smollm2-135m-instruct"
#: How the names of shapes begin that exist for labkit's own tests.
_ONLY_HERE = "tiny-"


@dataclasses.dataclass(frozen=True)
class Note:
    """A sentence about a setting. option: what to add to the command to keep labkit's value; "" where nothing is."""

    setting: str
    text: str
    option: str = ""

    def __str__(self) -> str:
        return f"{self.setting}: {self.text}" + (f" Add {self.option} to keep labkit's." if self.option else "")


@dataclasses.dataclass(frozen=True)
class Export:
    """The same settings for vLLM, and what differs.

    command: for a shell, ready to be copied. words: the same without the shell's quotes, `vllm serve` first.
    python: the same with vLLM's `LLM`. environment: variables that both of them set.
    missing: settings with no counterpart. different: what vLLM does otherwise. version: of the vLLM it is written for.
    """

    command: str
    python: str
    missing: tuple[Note, ...]
    different: tuple[Note, ...]
    version: str
    words: tuple[str, ...] = ()
    environment: dict[str, str] = dataclasses.field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)


@functools.cache
def table() -> dict[str, Any]:
    """Options, fields and values of the vLLM that the export is written for; see `labkit/dev/read_vllm.py`."""
    found: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def to_vllm(
    config: EngineConfig,
    *,
    tensor_parallel_size: int | None = None,
    pipeline_parallel_size: int = 1,
    data_parallel_size: int = 1,
    keep_defaults: bool = False,
) -> Export:
    """`config` as the arguments of vLLM.

    Args:
        tensor_parallel_size: GPUs that share every layer; None takes the config's.
        pipeline_parallel_size, data_parallel_size: GPUs that each hold some layers, and copies of the whole.
        keep_defaults: also write labkit's defaults where vLLM's differ, so that a comparison has equal settings.
    """
    made = _Arguments()
    _model(config, made)
    _parallel(tensor_parallel_size or config.tensor_parallel_size, pipeline_parallel_size, data_parallel_size, made)
    for translate in (_numbers, _attention, _cache, _scheduler, _graphs):
        translate(config, made, keep_defaults)
    made.differs("overlap", "vLLM schedules a step while the GPU runs the one before; labkit does one after the other.",
                 "--no-async-scheduling")  # fmt: skip
    made.differs("sampling", "requests to vLLM start from the model's generation_config.json; labkit's default is "
                 "greedy. Send temperature 0 with each request.", "--generation-config vllm")  # fmt: skip
    return made.export()


class _Arguments:
    """What has been translated so far, in the order of the command."""

    def __init__(self) -> None:
        self.model = ""
        self.environment: dict[str, str] = {}
        self.words: list[tuple[str, ...]] = []  # each an option with its value
        self.keywords: dict[str, Any] = {}
        self.missing: list[Note] = []
        self.different: list[Note] = []

    def option(self, flag: str, value: Any) -> None:
        """`--flag value`, and the keyword of the same name."""
        self.words.append((flag, str(value)))
        self.keywords[flag[2:].replace("-", "_")] = value

    def switch(self, flag: str, on: bool) -> None:
        """`--flag` or `--no-flag`: vLLM takes no value after a switch."""
        self.words.append((flag if on else f"--no-{flag[2:]}",))
        self.keywords[flag[2:].replace("-", "_")] = on

    def inside(self, group: str, keyword: str, key: str, value: Any) -> None:
        """`-cc.key=value`: one field of a configuration object."""
        text = value if isinstance(value, str) else json.dumps(value)
        self.words.append((f"{group}.{key}={text}",))
        self.keywords.setdefault(keyword, {})[key] = value

    def compilation(self, key: str, value: Any) -> None:
        self.inside("-cc", "compilation_config", key, value)

    def variable(self, name: str, value: str) -> None:
        self.environment[name] = value

    def lacks(self, setting: str, text: str) -> None:
        self.missing.append(Note(setting, text))

    def differs(self, setting: str, text: str, option: str = "") -> None:
        self.different.append(Note(setting, text, option))

    def default(self, keep: bool, setting: str, text: str, option: str, write: Callable[[], None]) -> None:
        """A default that vLLM has otherwise: written when it is to be kept, else named."""
        if keep:
            write()
        else:
            self.differs(setting, text, option)

    def export(self) -> Export:
        words = ("vllm", "serve", self.model, *(word for group in self.words for word in group))
        prefix = "".join(f"{name}={shlex.quote(value)} " for name, value in self.environment.items())
        lines = [f"{prefix}vllm serve {shlex.quote(self.model)}", *(shlex.join(group) for group in self.words)]
        return Export(
            " \\\n  ".join(lines), self._python(), tuple(self.missing), tuple(self.different), table()["version"],
            words, dict(self.environment),
        )  # fmt: skip

    def _python(self) -> str:
        lines = ["import os", ""] if self.environment else []
        lines += [f"os.environ[{name!r}] = {value!r}" for name, value in self.environment.items()]
        lines += ["from vllm import LLM", "", "llm = LLM(", f"    model={self.model!r},"]
        for name, value in self.keywords.items():
            if isinstance(value, dict):
                inner = "".join(f"        {key!r}: {item!r},\n" for key, item in value.items())
                lines.append(f"    {name}={{\n{inner}    }},")
            else:
                lines.append(f"    {name}={value!r},")
        return "\n".join([*lines, ")"])


# --- the settings, in EngineConfig's order -------------------------------------------------------------------------


def _model(config: EngineConfig, made: _Arguments) -> None:
    name = config.model
    known = HUB_NAMES.get(name.casefold())
    made.model = known or name
    if name.casefold().startswith(_ONLY_HERE):
        made.lacks("model", f"{name} is a shape for labkit's tests; write a model of the hub or a folder in its place.")
    elif known and name.casefold() == _REAL:
        made.differs("model", "vLLM loads the hub's weights; labkit's copy comes from a file of 4 bits a weight, so "
                     "the text differs.")  # fmt: skip
    elif known:
        made.option("--load-format", "dummy")
        made.differs("model", f"labkit fills {name} with random weights, so the command asks for vLLM's random ones, "
                     "which are others. Without --load-format dummy vLLM loads the real ones.")  # fmt: skip
    if config.device not in ("auto", "cuda"):
        made.lacks("device", f"vLLM has no option for it: the package that is installed decides, and labkit's graphs "
                   f"on a {config.device} are emulated, so there is nothing to carry over.")  # fmt: skip


def _parallel(tensor: int, pipeline: int, data: int, made: _Arguments) -> None:
    for flag, size in (("tensor", tensor), ("pipeline", pipeline), ("data", data)):
        if size != 1:
            made.option(f"--{flag}-parallel-size", size)


def _numbers(config: EngineConfig, made: _Arguments, keep: bool) -> None:
    if config.dtype != "auto":
        made.option("--dtype", config.dtype)
    else:
        made.differs("dtype", "auto is the checkpoint's own dtype in vLLM, 16 bits for a float32 one; in labkit it is "
                     "bfloat16 on a GPU that computes in it. --dtype fixes it.")  # fmt: skip
    if config.seed:
        made.option("--seed", config.seed)
    if config.quantization is not None:
        made.option("--quantization", config.quantization)
    if config.batch_invariant:
        made.variable("VLLM_BATCH_INVARIANT", "1")


def _attention(config: EngineConfig, made: _Arguments, keep: bool) -> None:
    name = config.attention_backend
    if name not in (None, "auto"):
        if table()["enums"]["AttentionBackendEnum"].get(name):
            made.option("--attention-backend", name)
        elif name == "TORCH_SDPA":
            made.lacks("attention_backend", "TORCH_SDPA is a name in vLLM, for vision encoders only; without the "
                       "option vLLM picks a backend.")  # fmt: skip
        else:
            made.lacks(
                "attention_backend", f"vLLM {table()['version']} has no {name}; without the option it picks one."
            )
    version = config.flash_attn_version
    if version is not None:
        made.inside("--attention-config", "attention_config", "flash_attn_version", version)
    if config.sdpa_kernel != "auto":
        made.lacks("sdpa_kernel", "chooses the kernel inside TORCH_SDPA, which vLLM does not run decoders on.")
    if config.num_splits:
        made.lacks("num_splits", "vLLM fixes no number of KV splits; attention_config's "
                   "flash_attn_max_num_splits_for_cuda_graph is an upper bound for FLASH_ATTN in graphs.")  # fmt: skip
    if config.split_mixed_batches:
        if name == "FLASHINFER":
            made.differs("split_mixed_batches", "vLLM's FLASHINFER always runs the decodes of a batch apart.")
        else:
            made.lacks("split_mixed_batches", "vLLM has no switch for it: each backend runs a mixed batch its own way.")


def _cache(config: EngineConfig, made: _Arguments, keep: bool) -> None:
    if config.block_size is not None:
        made.option("--block-size", config.block_size)
        if config.block_size % 16:
            made.differs("block_size", f"vLLM's attention backends take multiples of 16, so {config.block_size} is "
                         "refused there.")  # fmt: skip
    else:
        made.differs("block_size", "the backend decides in both; vLLM starts from 16 tokens a page. "
                     "--block-size fixes it.")  # fmt: skip
    if config.kv_cache_dtype != "auto":
        if config.kv_cache_dtype in table()["flags"]["--kv-cache-dtype"]["known"]:
            made.option("--kv-cache-dtype", config.kv_cache_dtype)
        else:
            made.lacks("kv_cache_dtype", f"vLLM has no {config.kv_cache_dtype}.")
    if config.kv_cache_layout != "NHD":
        made.variable("VLLM_KV_CACHE_LAYOUT", config.kv_cache_layout)
    share, theirs = config.gpu_memory_utilization, table()["flags"]["--gpu-memory-utilization"]["default"]
    if share != _default("gpu_memory_utilization"):
        made.option("--gpu-memory-utilization", share)
    else:
        made.default(
            keep, "gpu_memory_utilization", f"vLLM takes {theirs:g} of the GPU, labkit {share:g}, since a notebook "
            "shares it.", f"--gpu-memory-utilization {share:g}",
            lambda: made.option("--gpu-memory-utilization", share),
        )  # fmt: skip
    if config.num_gpu_blocks_override is not None:
        made.option("--num-gpu-blocks-override", config.num_gpu_blocks_override)
    if not config.enable_prefix_caching:
        made.switch("--enable-prefix-caching", False)


def _scheduler(config: EngineConfig, made: _Arguments, keep: bool) -> None:
    if config.max_model_len is not None:
        made.option("--max-model-len", config.max_model_len)
    else:
        made.differs("max_model_len", "vLLM takes the model's whole length, labkit less where that is long. "
                     "--max-model-len fixes it.")  # fmt: skip
    for field, what in (("max_num_seqs", "requests"), ("max_num_batched_tokens", "tokens")):
        value, flag = getattr(config, field), "--" + field.replace("_", "-")
        if value != _default(field):
            made.option(flag, value)
            continue
        theirs = _or(table()["batch_defaults"][field]["OPENAI_API_SERVER"])
        made.default(
            keep, field, f"vLLM lets `vllm serve` take {theirs} {what} per step, by GPU; labkit takes {value}.",
            f"{flag} {value}", functools.partial(made.option, flag, value),
        )  # fmt: skip
    if config.long_prefill_token_threshold:
        made.option("--long-prefill-token-threshold", config.long_prefill_token_threshold)
        made.differs("long_prefill_token_threshold", "vLLM does not cut the prompt of a request that is alone in its "
                     "step; labkit does.")  # fmt: skip
    if not config.enable_chunked_prefill:
        made.switch("--enable-chunked-prefill", False)
    if config.prefill_first:
        made.lacks("prefill_first", "vLLM has only the one scheduler in which prompts and decodes share each step; "
                   "--prefill-schedule-interval holds prompts back, which is the opposite.")  # fmt: skip
    if config.num_speculative_tokens:
        made.option("--spec-tokens", config.num_speculative_tokens)


def _graphs(config: EngineConfig, made: _Arguments, keep: bool) -> None:
    if config.enforce_eager:
        made.switch("--enforce-eager", True)
        asked = [f for f in ("optimization_level", "compilation_mode", "cudagraph_mode", "cudagraph_capture_sizes",
                             "compile_sizes") if getattr(config, f) is not None]  # fmt: skip
        if asked:
            made.differs(", ".join(asked), "enforce_eager wins over it in both engines, so it is not written.")
        return
    if config.optimization_level is not None:
        made.words.append((f"-O{config.optimization_level}",))
        made.keywords["optimization_level"] = config.optimization_level
    if config.compilation_mode is not None:
        made.compilation("mode", config.compilation_mode)
        if config.compilation_mode == "STOCK_TORCH_COMPILE":
            made.differs("compilation_mode", "vLLM's STOCK_TORCH_COMPILE compiles once and captures its own graphs; "
                         "labkit's lets torch record one graph for each size.")  # fmt: skip
    elif config.piecewise_method != "break" and not config.optimization_level:
        made.default(
            keep, "compilation_mode", "vLLM compiles the model at every start; labkit only when it is asked to.",
            "-cc.mode=NONE", lambda: made.compilation("mode", "NONE"),
        )  # fmt: skip
    if isinstance(config.cudagraph_mode, CUDAGraphMode):
        made.compilation("cudagraph_mode", config.cudagraph_mode.name)
    if config.cudagraph_capture_sizes:
        # With a list vLLM takes its largest entry as the limit, and refuses any other.
        made.compilation("cudagraph_capture_sizes", sorted(set(config.cudagraph_capture_sizes)))
    elif config.max_cudagraph_capture_size is not None:
        made.compilation("max_cudagraph_capture_size", config.max_cudagraph_capture_size)
    if config.compile_sizes is not None:
        made.compilation("compile_sizes", list(config.compile_sizes))
    if config.splitting_ops is not None:
        made.compilation("splitting_ops", [name.replace("labkit::", "vllm::") for name in config.splitting_ops])
    if config.piecewise_method == "break":
        made.variable("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    elif config.piecewise_method == "compile" and config.compilation_mode != "VLLM_COMPILE":
        made.lacks("piecewise_method", "compile is how vLLM makes PIECEWISE graphs by itself, and has no option.")


def _default(field: str) -> Any:
    return next(f.default for f in dataclasses.fields(EngineConfig) if f.name == field)


def _or(values: Sequence[int]) -> str:
    texts = [f"{value:,}" for value in values]
    return " or ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
