"""From a configuration to what follows from it: dtype, lengths, backend, mode, sizes. Pure; refuses to touch a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from labkit.attention import registry
from labkit.attention.groups import LayerGroup, group_layers, lowest_tier
from labkit.attention.interface import AttentionCGSupport, AttentionSpec, Availability, Platform
from labkit.attention.registry import platform_notes
from labkit.attention.selector import Selection, select
from labkit.config import SPLITTING_OPS, CUDAGraphMode, EngineConfig, ModelConfig
from labkit.errors import CaptureError, ConfigError
from labkit.graphs.dispatcher import decode_sizes
from labkit.graphs.modes import requested_compilation, requested_mode, resolve
from labkit.graphs.sizes import DEFAULT_CAP, SM10X_CAP, check_capture_sizes, default_capture_sizes
from labkit.model_config import SLIDING

#: Longest context when none is asked for. A lab rarely needs a model's full length, and every buffer scales with it.
DEFAULT_BLOCK_SIZE = 16
#: Largest size by default where every size is a torch.compile of the whole model.
MAX_WHOLE_SIZE = 8
DEFAULT_MAX_MODEL_LEN = {"cuda": 8192, "rocm": 8192, "cpu": 2048}


@dataclasses.dataclass(frozen=True)
class EnginePlan:
    """What will be built. `config` has every "auto" replaced; `notes` are sentences a reader should see once."""

    config: EngineConfig
    platform: Platform
    spec: AttentionSpec
    selection: Selection
    tier: AttentionCGSupport
    mode: CUDAGraphMode
    mode_trail: tuple[str, ...]
    capture_sizes: tuple[int, ...]
    max_model_len: int
    dtype: str
    notes: tuple[str, ...]
    groups: tuple[LayerGroup, ...]

    @property
    def backend(self) -> str:
        return self.selection.selected

    @property
    def backend_key(self) -> tuple[object, ...]:
        """Everything about attention that a graph bakes in."""
        config = self.config
        return (
            self.backend,
            config.sdpa_kernel,
            config.num_splits,
            config.flash_attn_version,
            config.split_mixed_batches,
            config.batch_invariant,
        )

    @property
    def compile_key(self) -> tuple[object, ...]:
        """Everything that fixes the compiled code; None where nothing is compiled."""
        config = self.config
        if config.compilation_mode != "VLLM_COMPILE":
            return (config.compilation_mode,)
        return (config.compilation_mode, config.splitting_ops, config.compile_sizes)

    @property
    def graph_key(self) -> tuple[object, ...]:
        """Everything but mode and size that a graph bakes in."""
        return (*self.backend_key, *self.compile_key)

    @property
    def layout_key(self) -> tuple[object, ...]:
        """Everything that fixes the KV cache's and the buffers' shapes: a change moves every address."""
        config = self.config
        return (
            config.block_size,
            config.kv_cache_layout,
            self.max_model_len,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.num_gpu_blocks_override,
            config.gpu_memory_utilization,
        )

    @property
    def max_num_rows(self) -> int:
        """Requests that the buffers hold: a decode graph may be wider than `max_num_seqs`."""
        return max([self.config.max_num_seqs, *decode_sizes(self.capture_sizes, self.config.max_num_seqs)])


def resolve_dtype(asked: str, platform: Platform) -> tuple[str, list[str]]:
    """The dtype for "auto", and a note where it is not the usual one.

    float32 on a CPU, bfloat16 from sm_80 on, float16 on older GPUs, which have no bfloat16 arithmetic.
    """
    old = platform.capability is not None and platform.capability < (8, 0)
    if asked == "bfloat16" and old:
        raise ConfigError(
            "dtype='bfloat16'",
            f"{platform.sm} has no bfloat16 arithmetic (it starts at sm_80)",
            "Set dtype to float16.",
        )
    if asked != "auto":
        return asked, []
    if platform.device_type == "cpu":
        return "float32", []
    if old:
        return "float16", [f"{platform.sm} has no bfloat16 arithmetic, so dtype='auto' means float16 here."]
    return "bfloat16", []


def attention_spec(config: EngineConfig, model: ModelConfig, platform: Platform) -> AttentionSpec:
    """What `config` asks of an attention backend, which must serve every layer: where some layers have a window, that
    is asked. A page size that is not set is 16 here and the backend's later.

    Raises:
        ConfigError: the machine has no such dtype, or the model no such length.
    """
    max_model_len = config.max_model_len or min(
        model.max_position_embeddings, DEFAULT_MAX_MODEL_LEN[platform.device_type]
    )
    if max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={max_model_len}",
            f"model {model.name!r} was made for {model.max_position_embeddings} positions",
            f"Take {model.max_position_embeddings} or less.",
        )
    assert not isinstance(config.flash_attn_version, str)  # EngineConfig has turned "auto" into None
    latent = model.uses_mla  # absorbed: every query head reads the one latent of a token
    return AttentionSpec(
        num_heads=model.num_heads,
        num_kv_heads=1 if latent else model.num_kv_heads,
        head_size=model.kv_lora_rank + model.qk_rope_head_dim if latent else model.head_size,
        family="MLA" if latent else "MHA",
        head_size_v=model.kv_lora_rank,
        dtype=resolve_dtype(config.dtype, platform)[0],
        block_size=config.block_size or DEFAULT_BLOCK_SIZE,
        kv_cache_layout=config.kv_cache_layout,
        sliding_window=model.sliding_window if SLIDING in model.layer_types else None,
        logits_soft_cap=model.attn_logit_softcapping,
        has_sinks=model.has_sinks,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        sdpa_kernel=config.sdpa_kernel,
        num_splits=config.num_splits,
        flash_attn_version=config.flash_attn_version,
        split_mixed_batches=config.split_mixed_batches,
        batch_invariant=config.batch_invariant,
    )


def page_size_notes(
    spec: AttentionSpec,
    platform: Platform,
    selection: Selection,
    available: Mapping[str, Availability] | None,
    is_set: bool,
) -> list[str]:
    """What a reader should know about the page size: the backend brought its own, or the user's cost a backend."""
    mine = selection.candidate(selection.selected)
    if not is_set:
        usual = mine.block_size == DEFAULT_BLOCK_SIZE
        return [] if usual else [f"block_size was not set, and {mine.name} prefers pages of {mine.block_size} tokens."]
    if selection.requested is not None:
        return []
    free = select(spec, platform, None, available, block_size_is_set=False)
    if free.selected == mine.name:
        return []
    return [
        f"block_size={spec.block_size} excludes {free.selected}, which would be picked before {mine.name}: leave "
        f"block_size unset, or set it to {free.candidate(free.selected).block_size}."
    ]


def make_plan(
    config: EngineConfig,
    model: ModelConfig,
    platform: Platform,
    available: Mapping[str, Availability] | None = None,
) -> EnginePlan:
    """Resolve `config` for a model and a machine.

    Raises:
        ConfigError, BackendError: a sentence on what cannot work.
    """
    dtype, notes = resolve_dtype(config.dtype, platform)
    spec = attention_spec(config, model, platform)
    max_model_len, is_set = spec.max_model_len, config.block_size is not None
    requested = None if config.attention_backend == "auto" else config.attention_backend
    selection = select(spec, platform, requested, available, is_set)
    candidate = selection.candidate(selection.selected)
    notes += platform_notes(platform) + page_size_notes(spec, platform, selection, available, is_set)
    spec = dataclasses.replace(spec, block_size=candidate.block_size)
    asked = config.cudagraph_mode if isinstance(config.cudagraph_mode, CUDAGraphMode) else None
    wanted, why = requested_mode(
        asked, enforce_eager=config.enforce_eager, optimization_level=config.optimization_level
    )
    groups = group_layers(model)
    status = available.get(candidate.name) if available is not None else None
    tier, tier_reason, lowest = lowest_tier(registry.load(candidate.name), spec, groups, platform, status)
    backend = candidate.name if lowest is None else f"{candidate.name} in {lowest}"
    if tier is AttentionCGSupport.NEVER:
        backend += f": {tier_reason}"
    compilation, why_compiled = requested_compilation(
        config.compilation_mode, enforce_eager=config.enforce_eager, optimization_level=config.optimization_level
    )
    compiled, whole = compilation == "VLLM_COMPILE", compilation == "STOCK_TORCH_COMPILE"
    method = config.piecewise_method or ("compile" if compiled or whole else "break")
    splitting_ops = SPLITTING_OPS if config.splitting_ops is None else tuple(config.splitting_ops)
    mode, trail = resolve(
        wanted, tier, compiled, backend=backend, split=bool(splitting_ops), breakable=method == "break"
    )
    sizes = capture_sizes(config, platform) if mode is not CUDAGraphMode.NONE else []
    if whole and mode is CUDAGraphMode.NONE:
        notes.append(
            "STOCK_TORCH_COMPILE compiles what a FULL graph would hold, and the mode is NONE: nothing is compiled."
        )
    if whole and config.cudagraph_capture_sizes is None and config.max_cudagraph_capture_size is None:
        sizes = [size for size in sizes if size <= MAX_WHOLE_SIZE]
    resolved = config.replace(
        dtype=dtype, max_model_len=max_model_len, cudagraph_mode=mode, block_size=candidate.block_size,
        compilation_mode=compilation, piecewise_method=method, splitting_ops=splitting_ops,
        compile_sizes=tuple(config.compile_sizes or ()),
    )  # fmt: skip
    return EnginePlan(
        resolved,
        platform,
        spec,
        selection,
        tier,
        mode,
        (why_compiled, *why, *trail[1:]),
        tuple(sizes),
        max_model_len,
        dtype,
        tuple(notes),
        groups,
    )


def lower(
    mode: CUDAGraphMode, sizes: Sequence[int], error: CaptureError, piecewise: bool
) -> tuple[CUDAGraphMode, tuple[int, ...]]:
    """What is tried after a failed capture: something that asks for less, so that it ends, at NONE if nothing works.

    1. A FULL graph failed: PIECEWISE, where the mode has it already or (from FULL) where it can be captured.
    2. Memory was short: the smaller half of the sizes in the same mode, as long as there are two.
    3. A PIECEWISE graph failed: FULL_DECODE_ONLY from FULL_AND_PIECEWISE.
    4. NONE.

    Args:
        piecewise: whether the model can be captured in pieces: compiled so, or broken at attention.
    """
    full_failed = error.mode != "PIECEWISE"
    if full_failed and (mode is CUDAGraphMode.FULL_AND_PIECEWISE or (mode is CUDAGraphMode.FULL and piecewise)):
        return CUDAGraphMode.PIECEWISE, tuple(sizes)
    if error.out_of_memory and len(sizes) > 1:
        return mode, tuple(sizes[: len(sizes) // 2])
    if not full_failed and mode is CUDAGraphMode.FULL_AND_PIECEWISE:
        return CUDAGraphMode.FULL_DECODE_ONLY, tuple(sizes)
    return CUDAGraphMode.NONE, ()


def capture_sizes(config: EngineConfig, platform: Platform) -> list[int]:
    """The user's list checked, or the default formula."""
    limit, budget = config.max_cudagraph_capture_size, config.max_num_batched_tokens
    if config.cudagraph_capture_sizes is not None:
        return check_capture_sizes(config.cudagraph_capture_sizes, budget, limit)
    if limit is not None and limit > budget:
        raise ConfigError(
            f"max_cudagraph_capture_size={limit}",
            f"is above max_num_batched_tokens={budget}",
            f"Take {budget} or less.",
        )
    cap = SM10X_CAP if platform.capability and platform.capability[0] == 10 else DEFAULT_CAP
    return default_capture_sizes(config.max_num_seqs, budget, cap=cap, max_size=limit)
