"""Runs TRITON_ATTN on a random paged batch with everything poisoned that nobody may read or leave unwritten."""

from __future__ import annotations

import math
from typing import Any

import torch

from labkit.attention.interface import AttentionSpec
from labkit.attention.metadata import AttentionMetadata
from labkit.attention.triton_attn import TritonAttentionBackend
from tests.reference import PagedBatch, assert_attention_close, dense_attention

FEATURES = {"window": "sliding_window", "soft_cap": "logits_soft_cap", "sinks": "sinks"}


def make(batch: PagedBatch, **changes: Any) -> TritonAttentionBackend:
    """A backend for the batch; `changes` are fields of AttentionSpec."""
    spec = AttentionSpec(
        num_heads=batch.query.shape[1],
        num_kv_heads=batch.key_cache.shape[2],
        head_size=batch.query.shape[2],
        dtype=str(batch.query.dtype).removeprefix("torch."),
        block_size=batch.key_cache.shape[1],
        **{"max_model_len": 512, "max_num_seqs": 8, **changes},
    )
    return TritonAttentionBackend(spec, torch.device("cpu"))


def run(
    batch: PagedBatch,
    *,
    backend: TritonAttentionBackend | None = None,
    metadata: AttentionMetadata | None = None,
    splits: int = 0,
    pad: int = 2,
    **features: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of the real rows; padding rows of q, the outputs before, and the scratch hold NaN."""
    backend = backend or make(batch, num_splits=splits)
    metadata = metadata or batch.metadata(pad_reqs=min(pad, 1), pad_tokens=pad)
    rest = metadata.num_tokens - batch.num_tokens
    query = torch.cat([batch.query, torch.full((rest, *batch.query.shape[1:]), math.nan, dtype=batch.query.dtype)])
    output = torch.full_like(query, math.nan)
    lse = torch.full(query.shape[:2], math.nan)
    backend._part.fill_(math.nan)
    backend._part_lse.fill_(math.nan)
    backend.prepare(metadata)
    named = {FEATURES[name]: value for name, value in features.items()}
    backend.forward(query, batch.key_cache, batch.value_cache, output, metadata, scale=batch.scale, lse=lse, **named)
    return output[: batch.num_tokens], lse[: batch.num_tokens]


def check(batch: PagedBatch, **options: Any) -> None:
    """Output by the project's numerics rule, LSE by float64's; see `run` for the options."""
    output, lse = run(batch, **options)
    features = {name: options[name] for name in FEATURES if name in options}
    assert_attention_close(batch, output, what=f"q={batch.query_lens} kv={batch.kv_lens} {options}", **features)
    _, exact = dense_attention(batch, **features)
    tolerance = 1e-5 if batch.query.dtype == torch.float32 else 5e-3
    torch.testing.assert_close(lse.double(), exact, atol=tolerance, rtol=tolerance)
