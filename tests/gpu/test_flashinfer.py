"""FLASHINFER on the GPU, beyond what every backend must do: plans that do not overtake, workspaces, announcements.

tests/gpu/test_parity.py compares every compiled module with float64 and proves the tier; the modules that it and this
file need are FLASHINFER_MODULES in tests/parity.py.
"""

from __future__ import annotations

import random

import pytest
import torch

from labkit import LLM
from labkit.attention.flashinfer import FlashInferBackend
from labkit.attention.interface import AttentionSpec
from tests.parity import (
    BASE,
    CONTENDERS,
    LARGE,
    WIDE,
    Captured,
    Case,
    attend,
    draw,
    judge,
    mixed_compositions,
    spec_of,
    storage,
    uniform_compositions,
)
from tests.reference import PagedBatch
from tests.teacher import assert_same_logits, teach

CUDA = torch.device("cuda")
MINE = next(c for c in CONTENDERS if c.label == "FLASHINFER")
SMALL = Case(BASE.heads, lse=False)
LARGER = Case(WIDE, lse=False)


@pytest.fixture(scope="module", autouse=True)
def _loads() -> None:
    found = FlashInferBackend.availability()
    if not found.usable:
        pytest.skip(f"FlashInfer cannot run here: {found.reason}")


def backend_of(case: Case) -> FlashInferBackend:
    return FlashInferBackend(spec_of(MINE, case, CUDA, LARGE), CUDA)


def batch_of(case: Case, query_lens: list[int], kv_lens: list[int], seed: int = 0) -> PagedBatch:
    return draw(case, spec_of(MINE, case, CUDA, LARGE), query_lens, kv_lens, CUDA, seed, finite=False)


def shapes(rng: random.Random, n: int) -> tuple[list[int], list[int]]:
    query = [rng.choice([1, 1, rng.randint(2, 70), rng.randint(100, 300)]) for _ in range(n)]
    return query, [q + rng.choice([0, rng.randint(0, 1500)]) for q in query]


def test_a_plan_does_not_overtake_the_copy_of_the_one_before() -> None:
    """Steps planned in a row while the GPU is far behind; every one must run with its own schedule and pages."""
    rng = random.Random(5)
    backend, done = backend_of(SMALL), []
    batches = [batch_of(SMALL, *shapes(rng, rng.randint(1, 20)), seed=i) for i in range(12)]
    steps = [(batch, batch.metadata(), torch.full_like(batch.query, float("nan"))) for batch in batches]
    attend(backend, SMALL, batches[0])
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # cycles, a tenth of a second
    for batch, metadata, output in steps:
        backend.prepare(metadata)
        backend.forward(batch.query, batch.key_cache, batch.value_cache, output, metadata, scale=batch.scale)
        done.append(output)
    for batch, output in zip(batches, done, strict=True):
        judge(SMALL, batch, output, None, "planned ahead")


def test_preparing_reads_nothing_back_from_the_device() -> None:
    backend, batch = backend_of(SMALL), batch_of(SMALL, [1, 20, 1], [30, 20, 700])
    attend(backend, SMALL, batch)
    metadata = batch.metadata()
    graph = batch.metadata(pad_reqs=5, pad_tokens=10)
    graph.for_graph = True
    backend.prepare(graph)
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.prepare(metadata)
        backend.prepare(graph)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_wide_mixed_shape_finds_its_workspace() -> None:
    """More partial results than the workspace of the first shape holds: it grows, and older graphs keep theirs."""
    spec = spec_of(MINE, LARGER, CUDA, LARGE)
    backend, caches = backend_of(LARGER), storage(LARGER, spec, 600, CUDA, 0)
    for cache in caches:
        cache[0] = 0
    small = Captured(backend, LARGER, caches, 8, 8, 1, LARGE)
    before = backend._workspace.numel()
    large = Captured(backend, LARGER, caches, 200, 512, 512, LARGE)
    assert backend._workspace.numel() > before
    uniform, mixed = uniform_compositions(8, 1, 4096), mixed_compositions(200, 512, 600)
    for turn in range(4):
        small.replay(*uniform[turn], turn, "the small graph")
        large.replay(*mixed[turn], turn, "the large graph")


def test_what_is_compiled_is_announced_and_found_again() -> None:
    backend, said = backend_of(SMALL), []
    backend.warm_up(lambda *call: said.append(call))
    assert FlashInferBackend.compile_note(backend.spec) is None
    assert all(call[0] == "compiling" for call in said)
    absent = AttentionSpec(9, 3, 64, "float16", 16, sliding_window=100, logits_soft_cap=30.0)
    other = FlashInferBackend.compile_note(absent)
    assert other is None or ("head size 64 in float16" in other and "soft-capping" in other)


def test_the_plan_is_described() -> None:
    backend, batch = backend_of(LARGER), batch_of(LARGER, [1], [4000])
    metadata = batch.metadata()
    backend.prepare(metadata)
    plans = backend.describe(metadata)
    assert len(plans) == 2 and plans[0].num_splits > 1 and plans[0].grid is not None, plans


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY"])
def test_the_engine_with_graphs_and_without(mode: str, layout: str) -> None:
    rng = random.Random(4)
    batch = [[rng.randrange(40_000) for _ in range(rng.randint(1, 90))] for _ in range(7)]
    settings = {
        "dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 6, "max_num_batched_tokens": 64,
        "gpu_memory_utilization": 0.1, "attention_backend": "FLASHINFER", "kv_cache_layout": layout,
    }  # fmt: skip
    with (
        LLM("smollm2-135m", **settings, cudagraph_mode=mode, cudagraph_capture_sizes=[1, 2, 4, 6, 16]) as graphed,
        LLM("smollm2-135m", **{**settings, "attention_backend": "TRITON_ATTN"}, enforce_eager=True) as other,
    ):
        assert graphed.cudagraph_mode.name == mode, graphed.mode_trail
        ours, reports = teach(graphed, batch, 9, stagger=2)
        reference, _ = teach(other, batch, 9, stagger=2)
        assert {"FULL"} <= {r.mode for r in reports}
        assert_same_logits(ours, reference, tolerance=5e-2, what=mode)
