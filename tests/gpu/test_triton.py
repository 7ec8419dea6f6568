"""TRITON_ATTN compiled: batch invariance to the bit, the loop without masks, and mixed batches in two calls."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from labkit import LLM
from labkit.attention.interface import AttentionSpec
from labkit.attention.split_mixed import make_backend
from labkit.attention.triton_attn import TritonAttentionBackend
from tests.reference import PagedBatch, assert_attention_close, random_batch
from tests.teacher import assert_same_logits, teach

CUDA = torch.device("cuda")
LENGTHS = (900, 333, 1, 64, 130)


def make(batch: PagedBatch, **changes: Any) -> Any:
    spec = AttentionSpec(
        batch.query.shape[1], batch.key_cache.shape[2], batch.query.shape[2],
        str(batch.query.dtype).removeprefix("torch."), batch.key_cache.shape[1],
        **{"max_model_len": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 2048, **changes},
    )  # fmt: skip
    return make_backend(TritonAttentionBackend, spec, CUDA)


def run(backend: Any, batch: PagedBatch, pad: int = 0, **features: Any) -> torch.Tensor:
    metadata = batch.metadata(pad_reqs=min(pad, 2), pad_tokens=pad)
    rest = torch.full((pad, *batch.query.shape[1:]), float("nan"), dtype=batch.query.dtype, device=CUDA)
    query = torch.cat([batch.query, rest])
    output = torch.full_like(query, float("nan"))
    backend.prepare(metadata)
    backend.forward(query, batch.key_cache, batch.value_cache, output, metadata, scale=batch.scale, **features)
    return output[: batch.num_tokens]


def share(batch: PagedBatch, shares: list[tuple[int, int, int]]) -> PagedBatch:
    starts = [sum(batch.query_lens[:i]) for i in range(len(batch.query_lens))]
    return dataclasses.replace(
        batch,
        query=torch.cat([batch.query[starts[r] + start : starts[r] + start + n] for r, start, n in shares]),
        query_lens=[n for _, _, n in shares],
        kv_lens=[start + n for _, start, n in shares],
        tables=[batch.tables[r] for r, _, _ in shares],
    )


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("splits", [0, 4])
@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64)], ids=lambda h: "x".join(map(str, h)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_batch_invariant_to_the_bit(
    dtype: torch.dtype, heads: tuple[int, int, int], splits: int, window: int | None
) -> None:
    rng = random.Random(repr((str(dtype), heads, splits)))
    batch = random_batch(
        list(LENGTHS), list(LENGTHS), num_heads=heads[0], num_kv_heads=heads[1], head_size=heads[2], dtype=dtype,
        device=CUDA,
    )  # fmt: skip
    features = {} if window is None else {"sliding_window": window}
    backend = make(batch, batch_invariant=True, num_splits=splits)
    whole = [run(backend, share(batch, [(r, 0, n)]), **features) for r, n in enumerate(LENGTHS)]
    assert_attention_close(share(batch, [(1, 0, LENGTHS[1])]), whole[1], window=window)
    for _ in range(12):
        shares = []
        for r in rng.sample(range(len(LENGTHS)), rng.randint(1, len(LENGTHS))):
            n = min(rng.choice([1, 1, 1, 3, 50, 300]), LENGTHS[r])
            shares.append((r, rng.randint(0, LENGTHS[r] - n), n))
        step = share(batch, shares)
        pieces = run(backend, step, pad=rng.choice([0, 5]), **features).split(step.query_lens)
        for piece, (r, start, n) in zip(pieces, shares, strict=True):
            assert torch.equal(piece, whole[r][start : start + n]), (shares, r, start)


def test_the_ordinary_mode_is_not_invariant() -> None:
    """So that the test above is known to show something: alone a decode is split, among many it is not."""
    batch = random_batch([1] * 64, [900] * 64, num_heads=32, num_kv_heads=8, head_size=128, dtype=torch.bfloat16,
                         device=CUDA)  # fmt: skip
    one = dataclasses.replace(batch, query=batch.query[:1], query_lens=[1], kv_lens=[900], tables=batch.tables[:1])
    backend = make(batch, max_num_seqs=64)
    assert not torch.equal(run(backend, one)[0], run(backend, batch)[0])


@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64), (8, 1, 256), (40, 8, 80)], ids=str)
def test_long_chunks_with_and_without_a_past(heads: tuple[int, int, int]) -> None:
    """Most of their tiles run without masks; what a page or a tile ends with is NaN."""
    batch = random_batch(
        [700, 1, 257, 64], [700, 900, 1000, 65], num_heads=heads[0], num_kv_heads=heads[1], head_size=heads[2],
        dtype=torch.bfloat16, device=CUDA,
    )  # fmt: skip
    assert_attention_close(batch, run(make(batch), batch))


@pytest.mark.parametrize("decodes", [1, 3, 4, 9])
def test_a_mixed_batch_in_two_calls(decodes: int) -> None:
    query, kv = [1] * decodes + [70, 1, 300], [50 + 17 * i for i in range(decodes)] + [90, 33, 300]
    batch = random_batch(query, kv, num_heads=32, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, device=CUDA)
    assert_attention_close(batch, run(make(batch, split_mixed_batches=True), batch))


def test_the_engine_in_two_calls_and_batch_invariant() -> None:
    """Graphs for decodes, two calls beside chunks; then batch-invariant, graphs for everything."""
    settings = {"attention_backend": "TRITON_ATTN", "max_model_len": 256, "max_num_seqs": 8, "dtype": "float32",
                "max_num_batched_tokens": 48, "num_gpu_blocks_override": 120}  # fmt: skip
    rng = random.Random(3)
    prompts = [[rng.randrange(500) for _ in range(rng.randint(3, 90))] for _ in range(6)]
    with LLM("tiny-llama", **settings) as llm:
        plain, _ = teach(llm, prompts, 8, stagger=2)
        for changes in ({"split_mixed_batches": True}, {"split_mixed_batches": False, "batch_invariant": True}):
            llm.reset()
            llm.reconfigure(**changes, cudagraph_mode="FULL")
            assert llm.cudagraph_mode.name == ("FULL" if "batch_invariant" in changes else "FULL_DECODE_ONLY")
            ours, reports = teach(llm, prompts, 8, stagger=2)
            assert {r.mode for r in reports} >= {"FULL"}
            assert_same_logits(ours, plain, tolerance=2e-3)
