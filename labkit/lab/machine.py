"""What this machine can do: whether an engine runs, on what, with which backends. Refuses to build one."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.attention.selector import Candidate
    from labkit.config import ModelConfig


def engine_missing() -> str:
    """Why no engine can run here, as one sentence; empty when one can."""
    for name in ("torch", "safetensors", "tokenizers"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed, so no engine runs here (pip install 'labkit[engine]')."
    return ""


def gpu_name() -> str:
    """The GPU that an engine would use, or "" for the CPU."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def cpu_memory() -> tuple[int | None, int | None]:
    """Bytes available and in all, None where the system does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024, int(lines["MemTotal"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None, None


def has_default_model() -> bool:
    """Whether the default model's weights are in the cache already."""
    from labkit.models.fetch import default_model_dir

    return default_model_dir() is not None


def shape_of(model: str | None) -> ModelConfig:
    """The shape of a model by name; the default model's for a name that has none, such as a folder."""
    from labkit.models.shapes import DEFAULT_MODEL, SHAPES

    name = model or DEFAULT_MODEL
    return SHAPES.get(name) or SHAPES[DEFAULT_MODEL.removesuffix("-instruct")]


def backend_answers(
    shape: ModelConfig,
    max_num_seqs: int = 256,
    max_model_len: int | None = None,
    flash_attn_version: int | None = None,
) -> tuple[Candidate, ...]:
    """Every backend's answer for a model on this machine, with the real reason of what does not load.

    The two limits decide graph tiers; None is the engine's own default length. Each backend is asked for the page size
    that it prefers.
    """
    from labkit.attention.interface import AttentionSpec, Platform
    from labkit.attention.selector import candidates
    from labkit.engine.plan import DEFAULT_MAX_MODEL_LEN, resolve_dtype
    from labkit.llm import find_backends, find_device

    platform = Platform("cpu") if engine_missing() else find_device()[1]
    spec = AttentionSpec(
        shape.num_heads, shape.num_kv_heads, shape.head_size, resolve_dtype("auto", platform)[0], 16,
        max_model_len=max_model_len or min(shape.max_position_embeddings, DEFAULT_MAX_MODEL_LEN[platform.device_type]),
        max_num_seqs=max_num_seqs, flash_attn_version=flash_attn_version,
    )  # fmt: skip
    found = candidates(spec, platform, find_backends(platform), block_size_is_set=False)
    return tuple(sorted(found, key=lambda c: (c.order is None, c.order or 0)))
