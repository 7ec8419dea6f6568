"""TORCH_SDPA against dense float64 attention: decodes gathered, chunks one by one, odd shapes."""

from __future__ import annotations

import random

import pytest
import torch

from labkit.attention.interface import AttentionCGSupport, AttentionSpec, Platform
from labkit.attention.sdpa import TorchSDPABackend, gather_bytes
from tests.reference import PagedBatch, assert_attention_close, dense_attention, random_batch


def spec(batch: PagedBatch, **changes: object) -> AttentionSpec:
    dtype = str(batch.query.dtype).removeprefix("torch.")
    values = {
        "num_heads": batch.query.shape[1],
        "num_kv_heads": batch.key_cache.shape[2],
        "head_size": batch.query.shape[2],
        "dtype": dtype,
        "block_size": batch.key_cache.shape[1],
        **changes,
    }
    return AttentionSpec(**values)  # type: ignore[arg-type]


def attend(
    batch: PagedBatch, *, pad: int = 0, window: int | None = None, soft_cap: float | None = None,
    sinks: torch.Tensor | None = None, lse: bool = False, **changes: object,
) -> torch.Tensor:  # fmt: skip
    backend = TorchSDPABackend(spec(batch, **changes), torch.device("cpu"))
    metadata = batch.metadata(pad_reqs=pad, pad_tokens=pad)
    query = torch.cat([batch.query, torch.full((pad, *batch.query.shape[1:]), float("nan"), dtype=batch.query.dtype)])
    output = torch.full_like(query, float("nan"))
    where = torch.full(query.shape[:2], float("nan")) if lse else None
    backend.prepare(metadata)
    backend.forward(
        query, batch.key_cache, batch.value_cache, output, metadata, scale=batch.scale, sliding_window=window,
        logits_soft_cap=soft_cap, sinks=sinks, lse=where,
    )  # fmt: skip
    return where[: batch.num_tokens] if where is not None else output[: batch.num_tokens]


def random_lengths(rng: random.Random, n: int) -> tuple[list[int], list[int]]:
    query = [rng.choice([1, 1, rng.randint(2, 20)]) for _ in range(n)]
    return query, [q + rng.choice([0, rng.randint(0, 50)]) for q in query]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kernel", ["auto", "math", "flash"])
def test_mixed_batches_equal_dense_attention(seed: int, kernel: str) -> None:
    rng = random.Random(seed)
    heads, kv_heads = rng.choice([(9, 3), (4, 4), (8, 2), (28, 4), (5, 1)])
    query_lens, kv_lens = random_lengths(rng, rng.randint(1, 5))
    batch = random_batch(
        query_lens, kv_lens, num_heads=heads, num_kv_heads=kv_heads, head_size=rng.choice([32, 64, 80]),
        block_size=rng.choice([4, 8, 16]), seed=seed,
    )  # fmt: skip
    assert_attention_close(batch, attend(batch, sdpa_kernel=kernel))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pad", [0, 3])
def test_decode_batches_with_padding_and_poison(dtype: torch.dtype, pad: int) -> None:
    batch = random_batch([1] * 5, [1, 16, 17, 40, 3], num_heads=9, num_kv_heads=3, head_size=64, dtype=dtype, seed=1)
    assert_attention_close(batch, attend(batch, pad=pad))


def test_padding_rows_of_a_decode_are_zero() -> None:
    batch = random_batch([1, 1], [7, 2], num_heads=4, num_kv_heads=2, head_size=32)
    backend = TorchSDPABackend(spec(batch), torch.device("cpu"))
    metadata = batch.metadata(pad_reqs=2, pad_tokens=2)
    query = torch.cat([batch.query, torch.full((2, 4, 32), float("nan"))])
    output = torch.full_like(query, float("nan"))
    backend.forward(query, batch.key_cache, batch.value_cache, output, metadata, scale=batch.scale)
    assert (output[2:] == 0).all()


@pytest.mark.parametrize("window", [1, 5, 16, 100])
def test_a_window_keeps_that_many_keys(window: int) -> None:
    decode = random_batch([1, 1, 1], [1, 9, 40], num_heads=4, num_kv_heads=2, head_size=32)
    mixed = random_batch([1, 7, 12], [30, 7, 25], num_heads=4, num_kv_heads=2, head_size=32)
    for batch in (decode, mixed):
        assert_attention_close(batch, attend(batch, window=window), window=window)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("limit", [1 << 28, 1 << 12])
def test_soft_cap_and_sinks_with_windows(seed: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes gathered and padded, mixed batches, scores in one part and in many; LSE counts the sink."""
    monkeypatch.setattr("labkit.attention.sdpa.SCORES_LIMIT", limit)
    rng, dtype = random.Random(seed), (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    heads, kv_heads = rng.choice([(9, 3), (4, 4), (8, 2), (5, 1)])
    for query_lens, kv_lens in (random_lengths(rng, rng.randint(2, 5)), ([1] * 4, [3, 1, 33, 60])):
        batch = random_batch(
            query_lens, kv_lens, num_heads=heads, num_kv_heads=kv_heads, head_size=32, dtype=dtype, seed=seed
        )
        sinks = torch.randn(heads, generator=torch.Generator().manual_seed(seed)).to(dtype) * 2
        for features in ({"soft_cap": 2.0}, {"sinks": sinks}, {"soft_cap": 2.0, "sinks": sinks, "window": 7}):
            pad = 2 if query_lens == [1] * 4 else 0
            exact = assert_attention_close(batch, attend(batch, pad=pad, **features), **features)
            lse = attend(batch, pad=pad, lse=True, **features)
            torch.testing.assert_close(lse.double(), exact, atol=1e-4, rtol=1e-4)


def test_a_sink_makes_no_row_see_something() -> None:
    batch = random_batch([5, 1], [2, 4], num_heads=4, num_kv_heads=2, head_size=32)
    sinks = torch.full((4,), 3.0)
    assert (attend(batch, sinks=sinks)[:3] == 0).all()
    assert torch.isneginf(attend(batch, sinks=sinks, lse=True)[:3]).all()


def test_torchs_own_kernels_are_refused_where_scores_are_written_out() -> None:
    asked = AttentionSpec(8, 4, 64, "float32", 16, logits_soft_cap=50.0, sdpa_kernel="math")
    (reason,) = TorchSDPABackend.why_not(asked, Platform("cpu"))
    assert "soft-capping" in str(reason) and "sdpa_kernel to auto" in str(reason)


@pytest.mark.parametrize("kernel", ["auto", "flash"])
def test_more_queries_than_keys_leave_the_first_rows_empty(kernel: str) -> None:
    """Causal and bottom-right: with 5 queries over 2 keys, rows 0 to 2 see nothing and are exactly 0."""
    batch = random_batch([5, 1], [2, 4], num_heads=4, num_kv_heads=2, head_size=32)
    out = attend(batch, sdpa_kernel=kernel)
    assert (out[:3] == 0).all()
    assert_attention_close(batch, out)
    lse = attend(batch, lse=True)
    exact = dense_attention(batch)[1]
    assert torch.isneginf(lse[:3]).all() and torch.allclose(lse[3:].double(), exact[3:], atol=1e-5)


@pytest.mark.parametrize("lens", [([1, 1], [9, 20]), ([3, 1, 6], [3, 11, 30])])
def test_lse_is_the_natural_logarithm(lens: tuple[list[int], list[int]]) -> None:
    batch = random_batch(*lens, num_heads=6, num_kv_heads=3, head_size=32)
    assert torch.allclose(attend(batch, lse=True).double(), dense_attention(batch)[1], atol=1e-5)


def test_empty_rows_in_the_middle_are_skipped() -> None:
    batch = random_batch([0, 1, 0, 1], [0, 3, 0, 5], num_heads=9, num_kv_heads=3, head_size=64)
    assert_attention_close(batch, attend(batch))


def test_the_tier_follows_the_size_of_the_gather() -> None:
    cuda = Platform("cuda", (9, 0))
    small = AttentionSpec(9, 3, 64, "bfloat16", 16, max_model_len=1024, max_num_seqs=256)
    assert gather_bytes(small) == 2 * 256 * 1024 * 3 * 64 * 2
    assert TorchSDPABackend.graph_support(small, cuda)[0] is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    large = AttentionSpec(9, 3, 64, "bfloat16", 16, max_model_len=8192, max_num_seqs=256)
    tier, why = TorchSDPABackend.graph_support(large, cuda)
    assert tier is AttentionCGSupport.NEVER and "1.5 GiB" in why and "max_num_seqs=256" in why
    flash = AttentionSpec(9, 3, 64, "bfloat16", 16, max_model_len=1024, sdpa_kernel="flash")
    assert TorchSDPABackend.graph_support(flash, cuda)[0] is AttentionCGSupport.NEVER
