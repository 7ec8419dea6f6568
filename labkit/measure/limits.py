"""What a device cannot beat: its copy bandwidth, and the floor that puts under a step. Refuses to know kernels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from labkit.measure import clocks

if TYPE_CHECKING:
    import torch

    from labkit.config import ModelConfig

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


def copy_bandwidth_gb_s(device: torch.device | str = "cuda", *, mib: int | None = None, samples: int = 10) -> float:
    """GB/s (1e9) of a large copy within the device's memory, bytes read plus bytes written.

    Args:
        mib: size of the buffer; None takes 1,024 on a GPU (a tenth of what is free if that is less), 64 on a CPU.
    """
    import torch

    on_gpu = str(device).startswith("cuda")
    if mib is None:
        mib = 64
        if on_gpu:
            mib = int(max(16, min(1024, torch.cuda.mem_get_info()[0] // 10 // 2**20)))
    # Not zeros: some memories and links move zeros faster.
    source = torch.arange(mib * 2**20 // 4, device=device, dtype=torch.int32)
    target = torch.empty_like(source)
    calls = 5 if on_gpu else 1
    times = clocks.sample_us(lambda: target.copy_(source), samples=samples, warmup=2, calls=calls, device=device)
    return 2 * source.numel() * 4 / float(np.median(times)) / 1e3


def weight_bytes(model: ModelConfig, dtype: str) -> int:
    """Bytes of the weights that steps read: all, once, but for an untied input embedding (it reads a few rows)."""
    skipped = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    return (model.num_parameters() - skipped) * ITEMSIZE[dtype]


def expected_experts(model: ModelConfig, batch: int) -> float:
    """Experts of a layer that at least one of `batch` tokens is sent to, where all are equally likely."""
    share = model.num_experts_per_tok / model.num_experts
    return model.num_experts * (1 - (1 - share) ** batch)


def step_bytes(model: ModelConfig, dtype: str, batch: int, kv_tokens: float) -> float:
    """Bytes a decode step must read: the weights once, and `kv_tokens` tokens of K and V per request.

    Of experts those that the batch is expected to need (exact for one token), of K and V in a layer with a window no
    more than the window holds.
    """
    weights, size = float(weight_bytes(model, dtype)), ITEMSIZE[dtype]
    if model.num_experts:
        per_expert = (model.num_parameters() - model.num_active_parameters()) / (
            model.num_experts - model.num_experts_per_tok or 1
        )
        weights -= per_expert * (model.num_experts - expected_experts(model, batch)) * size
    layer = model.kv_bytes_per_token(size) / model.num_layers
    windows = [model.layer_window(index) or math.inf for index in range(model.num_layers)]
    return weights + batch * layer * sum(min(kv_tokens, window) for window in windows)


def floor_ms(num_bytes: float, bandwidth_gb_s: float) -> float:
    """Milliseconds below which no step can go that moves `num_bytes` at the measured bandwidth."""
    return num_bytes / bandwidth_gb_s / 1e6
