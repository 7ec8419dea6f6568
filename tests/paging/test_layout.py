"""The two layouts of the KV cache: the same logical axes over other memory, and the same answers from the engine."""

from __future__ import annotations

import math

import pytest
import torch

from labkit import LLM, SamplingParams
from labkit.models import kernels
from labkit.models.layers import rotary_table
from labkit.models.shapes import SHAPES
from labkit.paging import cache_write
from labkit.paging.kv_cache import KVCache
from tests.reference import assert_attention_close, random_batch
from tests.teacher import assert_same_logits, teach

SMALL = {
    "max_model_len": 128,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "num_gpu_blocks_override": 60,
    "block_size": 4,
    "attention_backend": "TORCH_SDPA",
}
PREFIX = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
PROMPTS = [[*PREFIX, 7, 8, 9], [11] * 21, [*PREFIX, 5], [13, 2], [*PREFIX, 7, 8, 9, 2, 4]]
HEADS = [(9, 3, 64), (8, 1, 80), (4, 4, 32)]


def strided(cache: torch.Tensor) -> torch.Tensor:
    """The same values with a page's tokens of one head together in memory."""
    return cache.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_axes_stay_and_the_memory_changes(layout: str) -> None:
    config = SHAPES["tiny-llama"]
    kv = KVCache.allocate(config, 5, 8, torch.float32, torch.device("cpu"), layout)
    heads, size = config.num_kv_heads, config.head_size
    for caches in (kv.key_caches, kv.value_caches):
        assert len(caches) == config.num_layers
        for cache in caches:
            assert cache.shape == (5, 8, heads, size)
            inner = (heads * size, size) if layout == "NHD" else (size, 8 * size)
            assert cache.stride() == (8 * heads * size, *inner, 1)
            memory = cache if layout == "NHD" else cache.transpose(1, 2)
            assert memory.is_contiguous()
    assert kv.num_blocks == 5 and kv.nbytes == config.num_layers * 2 * 5 * 8 * heads * size * 4
    assert len({t.data_ptr() for t in (*kv.key_caches, *kv.value_caches)}) == 2 * config.num_layers


def test_random_values_do_not_depend_on_the_layout() -> None:
    config, device = SHAPES["tiny-llama"], torch.device("cpu")
    plain, turned = (KVCache.allocate(config, 6, 4, torch.float32, device, layout) for layout in ("NHD", "HND"))
    for kv in (plain, turned):
        kv.fill_random([4, 1], seed=5)
    assert torch.equal(plain.data, turned.data)
    assert (plain.data[:, :, [1, 4]] != 0).all() and (plain.data[:, :, [0, 2, 3, 5]] == 0).all()


@pytest.mark.parametrize("path", [cache_write.write_kv_torch, cache_write.write_kv_triton], ids=["torch", "triton"])
@pytest.mark.parametrize("heads", HEADS, ids=lambda h: "x".join(map(str, h)))
def test_a_write_lands_at_the_same_slot(path, heads: tuple[int, int, int]) -> None:  # type: ignore[no-untyped-def]
    _, kv, size = heads
    fused, slots = torch.randn(5, 2 * kv, size), torch.tensor([9, -1, 23, 4, -1])
    key, value = fused.split(kv, dim=1)
    caches = [torch.full((4, 8, kv, size), math.nan) for _ in range(2)]
    turned = [strided(cache) for cache in caches]
    path(key, value, *caches, slots)
    path(key, value, *turned, slots)
    for plain, other, rows in zip(caches, turned, (key, value), strict=True):
        assert other.is_contiguous() == (kv == 1) and torch.equal(plain.nan_to_num(9.0), other.nan_to_num(9.0))
        assert torch.equal(other[1, 1], rows[0]) and int(other.isnan().sum()) == (32 - 3) * kv * size


@pytest.mark.parametrize("heads", HEADS, ids=lambda h: "x".join(map(str, h)))
def test_the_fused_rotation_writes_where_the_layout_says(heads: tuple[int, int, int]) -> None:
    num_heads, kv, size = heads
    fused, slots = torch.randn(4, num_heads + 2 * kv, size), torch.tensor([17, -1, 3, 20])
    caches = [torch.full((4, 8, kv, size), math.nan) for _ in range(2)]
    turned = [strided(cache) for cache in caches]
    for pair in (caches, turned):
        query, key, value = fused.clone().split([num_heads, kv, kv], dim=1)
        table = rotary_table(32, torch.linspace(1, 0.1, size // 2))
        kernels.rotary_and_write_kv(query, key, value, torch.tensor([1, 9, 0, 30]), table, *pair, slots, eps=1e-6)
    for plain, other in zip(caches, turned, strict=True):
        assert (
            torch.equal(plain.nan_to_num(9.0), other.nan_to_num(9.0)) and int((~other.isnan()).sum()) == 3 * kv * size
        )


@pytest.mark.parametrize("lens", [([1, 1, 1], [30, 5, 16]), ([4, 1, 9], [30, 7, 9])], ids=["decode", "mixed"])
@pytest.mark.parametrize("kernel", ["auto", "flash"])
def test_torch_sdpa_reads_both(lens: tuple[list[int], list[int]], kernel: str) -> None:
    from tests.attention.test_sdpa import attend

    batch = random_batch(*lens, num_heads=6, num_kv_heads=2, head_size=32, block_size=8)
    plain = attend(batch, pad=2, sdpa_kernel=kernel)
    batch.key_cache, batch.value_cache = strided(batch.key_cache), strided(batch.value_cache)
    turned = attend(batch, pad=2, sdpa_kernel=kernel, kv_cache_layout="HND")
    assert_attention_close(batch, turned)
    torch.testing.assert_close(turned, plain, atol=1e-6, rtol=1e-6)


def logits(layout: str, **changes: object) -> tuple[dict, list, LLM]:
    with LLM("tiny-llama", **{**SMALL, **changes}, kv_cache_layout=layout) as llm:
        assert llm.engine.kv.key_caches[0].is_contiguous() == (layout == "NHD")
        seen, reports = teach(llm, PROMPTS, [6, 9, 3, 12, 8], stagger=2)
        return seen, reports, llm


@pytest.mark.parametrize(
    "changes",
    [
        {"enforce_eager": True},
        {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [2, 4, 6]},
        {"enforce_eager": True, "num_gpu_blocks_override": 14},
        {"enforce_eager": True, "enable_prefix_caching": False, "max_num_batched_tokens": 3},
    ],
    ids=["prefix-caching", "graphs", "preemption", "small-chunks"],
)
def test_the_engine_answers_the_same(changes: dict) -> None:
    plain, reports, _ = logits("NHD", **changes)
    turned, same, _ = logits("HND", **changes)
    assert_same_logits(turned, plain, tolerance=1e-5)
    assert [r.scheduled for r in same] == [r.scheduled for r in reports]
    if changes.get("enable_prefix_caching", True):
        assert sum(r.num_cached_tokens for r in same) > 0
    if "num_gpu_blocks_override" in changes:
        assert sum(len(r.preempted) for r in same) > 0, "13 blocks of 4 tokens cannot hold five requests"


def test_tokens_of_a_primed_context_are_the_same() -> None:
    tokens = []
    for layout in ("NHD", "HND"):
        with LLM("tiny-llama", **SMALL, enforce_eager=True, kv_cache_layout=layout) as llm:
            llm.prime(3, 17, max_tokens=8)
            while llm.has_unfinished:
                out = llm.step().outputs
                tokens += [(layout, o.request_id, o.token_ids) for o in out if o.finish_reason]
            answer = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True))
            tokens += [(layout, "generate", tuple(answer[0].token_ids))]
    plain = [t[2] for t in tokens if t[0] == "NHD"]
    assert len(plain) == 4 and plain == [t[2] for t in tokens if t[0] == "HND"]
