"""Every setting of the engine and every check on it, with its message. Refuses to know torch or the device."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Sequence
from typing import Any

from labkit.errors import ConfigError, did_you_mean
from labkit.model_config import ModelConfig as ModelConfig  # every setting has one place to be imported from
from labkit.model_config import RopeScaling as RopeScaling

DTYPES = ("auto", "float32", "float16", "bfloat16")
SDPA_KERNELS = ("auto", "math", "efficient", "flash", "cudnn")
ATTENTION_BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "XFORMERS", "TORCH_SDPA")
#: Those of models with multi-head latent attention. No backend serves both kinds.
MLA_ATTENTION_BACKENDS = ("FLASH_ATTN_MLA", "FLASHMLA", "FLASHINFER_MLA", "TRITON_MLA", "TORCH_SDPA_MLA")
KV_CACHE_LAYOUTS = ("NHD", "HND")
FLASH_ATTN_VERSIONS = (2, 3, 4)  # None and "auto": the first usable one in the order that suits the GPU
#: Operators that a compiled model can be cut at.
SPLITTING_OPS = ("labkit::unified_attention_with_output", "labkit::unified_mla_attention_with_output")
#: How a step is cut at attention: compiled in pieces, or captured eagerly with a break there.
PIECEWISE_METHODS = ("compile", "break")
COMPILATION_MODES = ("NONE", "STOCK_TORCH_COMPILE", "VLLM_COMPILE")


class CUDAGraphMode(enum.Enum):
    """What runs as a CUDA graph, as (decode batches, mixed batches). Names and meaning are vLLM's.

    A *runtime* mode, the one a single step ran in, is always NONE, PIECEWISE or FULL.
    """

    NONE = ("NONE", "NONE")
    PIECEWISE = ("PIECEWISE", "PIECEWISE")
    FULL = ("FULL", "FULL")
    FULL_DECODE_ONLY = ("FULL", "NONE")
    FULL_AND_PIECEWISE = ("FULL", "PIECEWISE")

    def decode_mode(self) -> CUDAGraphMode:
        """The runtime mode of a uniform decode batch."""
        return CUDAGraphMode[self.value[0]]

    def mixed_mode(self) -> CUDAGraphMode:
        """The runtime mode of every other batch."""
        return CUDAGraphMode[self.value[1]]

    def separate_routine(self) -> bool:
        """Whether decode and mixed batches take different graphs."""
        return self.value[0] != self.value[1]

    def has_full(self) -> bool:
        return "FULL" in self.value

    def has_piecewise(self) -> bool:
        return "PIECEWISE" in self.value

    def without_piecewise(self) -> CUDAGraphMode:
        """The mode left when nothing is compiled piecewise: PIECEWISE → NONE, F&P → FULL_DECODE_ONLY."""
        return {
            CUDAGraphMode.PIECEWISE: CUDAGraphMode.NONE,
            CUDAGraphMode.FULL_AND_PIECEWISE: CUDAGraphMode.FULL_DECODE_ONLY,
        }.get(self, self)

    @classmethod
    def parse(cls, value: CUDAGraphMode | str) -> CUDAGraphMode:
        """A mode from its name in any case; ConfigError with a suggestion otherwise."""
        if isinstance(value, cls):
            return value
        try:
            return cls[str(value).upper()]
        except KeyError:
            raise ConfigError(
                f"cudagraph_mode={value!r}", "there is no mode of that name", did_you_mean(str(value), cls.__members__)
            ) from None


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends. `temperature=0` is greedy.

    `top_k=0` and `top_p=1.0` are off. `logprobs=n` returns the n most likely tokens beside the chosen one.
    Stop strings are looked for in the generated text only and cut from it.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        checks = (
            (_is_int(self.max_tokens) and self.max_tokens >= 0, "max_tokens", "must be a whole number ≥ 0"),
            (_finite(self.temperature) and self.temperature >= 0, "temperature", "must be a finite number ≥ 0"),
            (_is_int(self.top_k) and self.top_k >= 0, "top_k", "must be a whole number ≥ 0 (0 is off)"),
            (_finite(self.top_p) and 0 <= self.top_p <= 1, "top_p", "must lie in 0…1"),
            (_is_int(self.min_tokens) and self.min_tokens >= 0, "min_tokens", "must be a whole number ≥ 0"),
            (
                self.logprobs is None or (_is_int(self.logprobs) and 0 <= self.logprobs <= 100),
                "logprobs",
                "must be None or 0…100",
            ),
            (self.seed is None or _is_int(self.seed), "seed", "must be None or a whole number"),
            (all(isinstance(s, str) and s for s in stop), "stop", "must be non-empty strings"),
        )
        for ok, field, why in checks:
            if not ok:
                raise ConfigError(f"{field}={getattr(self, field)!r}", why, "See SamplingParams.")
        if self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens={self.min_tokens}",
                f"is above max_tokens={self.max_tokens}",
                "Raise max_tokens or lower min_tokens.",
            )


def _finite(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


def _is_int(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Every knob of the engine, flat, under vLLM's names.

    Fields that belong to work not in this version (speculative decoding, tensor parallelism, quantization) are named so
    that asking for them is answered with a sentence instead of a TypeError.

    compilation_mode: VLLM_COMPILE compiles the model in pieces, once for any number of tokens. STOCK_TORCH_COMPILE
    hands each captured size to `torch.compile(mode="reduce-overhead")` as a whole, attention inside: the graphs are
    torch's, every size costs a compile of the whole model (so the default sizes end at 8), every replay the check of
    torch's guards, PIECEWISE is not to be had, and what no graph serves runs uncompiled.
    """

    model: str = "smollm2-135m-instruct"
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    # attention
    attention_backend: str | None = None  # None: LABKIT_ATTENTION_BACKEND, then automatic; "auto": automatic
    flash_attn_version: int | str | None = None  # 2, 3, 4; None and "auto": the backend's order for this GPU
    sdpa_kernel: str = "auto"
    num_splits: int = 0
    split_mixed_batches: bool = False
    batch_invariant: bool = False
    # KV cache
    block_size: int | None = None
    kv_cache_dtype: str = "auto"
    kv_cache_layout: str = "NHD"
    gpu_memory_utilization: float = 0.5
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    # scheduler
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    prefill_first: bool = False  # the older scheduling: a step runs prompts or decodes, prompts first
    # graphs and compilation
    cudagraph_mode: CUDAGraphMode | str | None = None
    cudagraph_capture_sizes: Sequence[int] | None = None
    max_cudagraph_capture_size: int | None = None
    enforce_eager: bool = False
    optimization_level: int | None = None
    compilation_mode: str | None = None
    compile_sizes: Sequence[int] | None = None
    splitting_ops: Sequence[str] | None = None
    piecewise_method: str | None = None
    # with their own chapters
    num_speculative_tokens: int = 0
    tensor_parallel_size: int = 1
    quantization: str | None = None

    def __post_init__(self) -> None:
        if self.cudagraph_mode is not None:
            object.__setattr__(self, "cudagraph_mode", CUDAGraphMode.parse(self.cudagraph_mode))
        for field in ("cudagraph_capture_sizes", "compile_sizes", "splitting_ops"):
            self._check_list(field)
        if self.cudagraph_capture_sizes is not None:
            object.__setattr__(self, "cudagraph_capture_sizes", tuple(self.cudagraph_capture_sizes))
        if self.attention_backend is not None:
            name = str(self.attention_backend).upper()
            if name == "AUTO":
                object.__setattr__(self, "attention_backend", "auto")
            elif name in (*ATTENTION_BACKENDS, *MLA_ATTENTION_BACKENDS):
                object.__setattr__(self, "attention_backend", name)
            else:
                raise ConfigError(
                    f"attention_backend={self.attention_backend!r}",
                    "there is no backend of that name",
                    did_you_mean(name, [*ATTENTION_BACKENDS, *MLA_ATTENTION_BACKENDS]),
                )
        self._check_choice("dtype", DTYPES)
        self._check_choice("sdpa_kernel", SDPA_KERNELS)
        if self.compilation_mode is not None:
            self._check_choice("compilation_mode", COMPILATION_MODES)
        self._check_compilation()
        self._check_choice("kv_cache_layout", KV_CACHE_LAYOUTS)
        if self.piecewise_method is not None:
            self._check_choice("piecewise_method", PIECEWISE_METHODS)
        if isinstance(self.flash_attn_version, str) and self.flash_attn_version.casefold() == "auto":
            object.__setattr__(self, "flash_attn_version", None)
        version = self.flash_attn_version
        if version is not None and not (_is_int(version) and version in FLASH_ATTN_VERSIONS):
            raise ConfigError(f"flash_attn_version={version!r}", "there is no such version", "Take 2, 3, 4 or 'auto'.")
        for field, low in (
            ("max_num_seqs", 1), ("max_num_batched_tokens", 1), ("long_prefill_token_threshold", 0),
            ("num_splits", 0), ("num_speculative_tokens", 0), ("tensor_parallel_size", 1), ("seed", 0),
        ):  # fmt: skip
            self._check_int(field, low)
        for field, low in (
            ("block_size", 1),
            ("max_model_len", 2),
            ("num_gpu_blocks_override", 2),
            ("max_cudagraph_capture_size", 1),
        ):
            if getattr(self, field) is not None:
                self._check_int(field, low)
        if not (_finite(self.gpu_memory_utilization) and 0 < self.gpu_memory_utilization <= 1):
            raise ConfigError(
                f"gpu_memory_utilization={self.gpu_memory_utilization!r}",
                "must lie in (0, 1]",
                "0.5 leaves half to the notebook.",
            )
        self._check_later_chapters()

    def _check_compilation(self) -> None:
        if self.splitting_ops is not None:
            object.__setattr__(self, "splitting_ops", tuple(self.splitting_ops))
            for name in self.splitting_ops:
                if name not in SPLITTING_OPS:
                    raise ConfigError(
                        f"splitting_ops={list(self.splitting_ops)!r}",
                        f"{name!r} is no operator to split at",
                        f"Take {list(SPLITTING_OPS)!r}, or an empty list for one piece.",
                    )
        if self.compile_sizes is not None:
            sizes = tuple(self.compile_sizes)
            object.__setattr__(self, "compile_sizes", sizes)
            for size in sizes:
                if not _is_int(size) or not 1 <= size <= self.max_num_batched_tokens:
                    raise ConfigError(
                        f"compile_sizes={list(sizes)!r}",
                        f"{size!r} does not lie in 1…max_num_batched_tokens={self.max_num_batched_tokens}",
                        "Name sizes that steps really have, such as 1.",
                    )
        if self.piecewise_method == "break" and self.compilation_mode not in (None, "NONE"):
            raise ConfigError(
                f"piecewise_method='break' with compilation_mode={self.compilation_mode!r}",
                "a broken capture records the model's own kernels, and nothing is compiled",
                "Drop one of the two.",
            )

    def _check_choice(self, field: str, options: Sequence[str]) -> None:
        value = getattr(self, field)
        if value not in options:
            raise ConfigError(f"{field}={value!r}", "is not a known value", did_you_mean(str(value), options))

    def _check_list(self, field: str) -> None:
        value = getattr(self, field)
        if value is not None and (isinstance(value, str) or not isinstance(value, Iterable)):
            raise ConfigError(f"{field}={value!r}", "is not a list", f"Write [{value!r}] for one entry.")

    def _check_int(self, field: str, low: int) -> None:
        value = getattr(self, field)
        if not _is_int(value) or value < low:
            raise ConfigError(
                f"{field}={value!r}", f"must be a whole number ≥ {low}", f"The default is {_default(field)!r}."
            )

    def _check_later_chapters(self) -> None:
        for field in ("num_speculative_tokens", "tensor_parallel_size", "quantization", "kv_cache_dtype"):
            value = getattr(self, field)
            if value != _default(field):
                raise ConfigError(
                    f"{field}={value!r}",
                    "this version of labkit does not have that part yet",
                    f"Leave it at {_default(field)!r}.",
                )

    def replace(self, **changes: Any) -> EngineConfig:
        """A copy with changes; an unknown field is answered with the closest name."""
        known = [f.name for f in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise ConfigError(
                    f"{name}={changes[name]!r}", "EngineConfig has no such field", did_you_mean(name, known)
                )
        return dataclasses.replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        out = dataclasses.asdict(self)
        mode = self.cudagraph_mode
        out["cudagraph_mode"] = mode.name if isinstance(mode, CUDAGraphMode) else mode
        return out


def _default(field: str) -> Any:
    return next(f.default for f in dataclasses.fields(EngineConfig) if f.name == field)
