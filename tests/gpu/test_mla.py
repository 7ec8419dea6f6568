"""Latent attention on the GPU: every MLA backend against float64 and in replay, both forms, the engine in every mode.

FLASHMLA needs `make flashmla`, FLASHINFER_MLA compiles for about 20 s the first time. What may read pages whole (TMA)
gets finite values where no request may read.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from labkit import LLM, SamplingParams
from labkit.attention import registry
from labkit.attention.interface import AttentionBackend, AttentionCGSupport, Platform
from labkit.attention.kernels.mla_latent import rotate_and_write, write_latent_torch
from labkit.attention.mla.chunks import attend_chunks, attend_piece_torch, plan_pieces, to_device
from labkit.attention.mla.layer import LatentLayer, LatentShape
from labkit.models import mla as mla_model
from labkit.models import shapes
from labkit.models.layers import normalize
from tests.mla_parity import Captured, Sizes, attend, check, judge, prove_tier
from tests.parity import Extent
from tests.teacher import assert_same_logits, one_by_one, teach

CUDA = torch.device("cuda")
LARGE = Extent(requests=10, chunk=70, past=900, longest=3000)
DEEPSEEK, V3 = Sizes(), Sizes(heads=128)
CASES: dict[str, tuple[Sizes, ...]] = {
    "TRITON_MLA": (
        DEEPSEEK, dataclasses.replace(V3, page=16), Sizes(heads=20, dtype="float16", page=16),
        Sizes(heads=4, rank=64, rope=16, page=16), Sizes(heads=16, rank=96, rope=32, dtype="float32", page=16),
    ),
    "FLASHMLA": (DEEPSEEK, Sizes(heads=64, dtype="float16"), V3),
    "FLASHINFER_MLA": (DEEPSEEK, Sizes(heads=64), V3, dataclasses.replace(DEEPSEEK, page=16)),
    "FLASH_ATTN_MLA": (DEEPSEEK, V3),
    "TORCH_SDPA_MLA": (DEEPSEEK, Sizes(heads=4, rank=64, rope=16, dtype="float32", page=16)),
}  # fmt: skip
#: Whole pages may be loaded, and what nobody may read multiplied by 0.
FINITE = ("FLASHMLA", "FLASHINFER_MLA", "FLASH_ATTN_MLA")


def made(name: str, sizes: Sizes, **options: Any) -> AttentionBackend:
    """An instance, or a skip with the reason why there is none."""
    cls = registry.load(name)
    available, spec = cls.availability(), sizes.spec(LARGE, **options)
    if not available.usable:
        pytest.skip(f"{name}: {available.reason}")
    reasons = cls.why_not(spec, Platform("cuda", torch.cuda.get_device_capability()), available)
    if reasons:
        pytest.skip(f"{name}: {reasons[0]}")
    return cls(spec, CUDA)


def every() -> pytest.MarkDecorator:
    pairs = [(name, sizes) for name, all_sizes in CASES.items() for sizes in all_sizes]
    return pytest.mark.parametrize(("name", "sizes"), pairs, ids=str)


@every()
def test_equals_dense_attention(name: str, sizes: Sizes) -> None:
    backend = made(name, sizes)
    check(backend, sizes, LARGE, CUDA, finite=name in FINITE, skip=("blind",))


@pytest.mark.parametrize("splits", [1, 3, 16])
def test_triton_mla_with_a_number_of_splits(splits: int) -> None:
    backend = made("TRITON_MLA", DEEPSEEK, num_splits=splits, max_num_seqs=16)
    batch = DEEPSEEK.batch([1] * 4, [3000, 1, 700, 64], 0, CUDA)
    judge(batch, *attend(backend, batch), f"{splits} splits")


@pytest.mark.parametrize("name", CASES)
def test_the_declared_tier_is_what_replays(name: str) -> None:
    backend = made(name, DEEPSEEK)
    tier = prove_tier(backend, DEEPSEEK, LARGE, CUDA)
    assert tier > AttentionCGSupport.NEVER


@pytest.mark.parametrize("name", ["FLASHMLA", "FLASHINFER_MLA"])
def test_many_heads_replay_half_empty(name: str) -> None:
    """With 128 heads FlashInfer lets two blocks share a tile; a graph that runs half empty must plan for the same."""
    backend = made(name, V3)
    cache = torch.randn((60, V3.page, 1, 576), device=CUDA).bfloat16()
    cache[0] = 0
    graph = Captured(backend, V3, cache, 8, 8, 1, LARGE)
    for seed, kv_lens in enumerate(([900], [5, 1200], [64] * 8, [2000, 1, 1])):
        graph.replay([1] * len(kv_lens), list(kv_lens), seed, f"{len(kv_lens)} of 8 requests")


def test_flashmlas_schedule_is_the_one_that_the_library_makes_by_itself() -> None:
    backend: Any = made("FLASHMLA", DEEPSEEK)
    batch = DEEPSEEK.batch([1] * 5, [3000, 1, 700, 64, 65], 0, CUDA, finite=True)
    metadata = batch.metadata()
    backend.prepare(metadata)
    plan = metadata.scratch["flashmla"]
    held = backend._library.get_mla_metadata()[0]
    backend._library.flash_mla_with_kvcache(
        batch.query.view(5, 1, 16, 576), batch.key_cache, plan.table, plan.lens, 512, held, softmax_scale=0.1,
        causal=False, use_legacy=True,
    )  # fmt: skip
    assert torch.equal(held.num_splits, plan.schedule[1])
    assert torch.equal(held.tile_scheduler_metadata, plan.schedule[0])


@pytest.mark.parametrize("name", CASES)
def test_preparing_and_attending_read_nothing_back(name: str) -> None:
    backend = made(name, DEEPSEEK)
    if name == "TORCH_SDPA_MLA":
        pytest.skip("its chunks read lengths on the host, and its tier says so")
    batch = DEEPSEEK.batch([1] * 6, [300, 20, 5, 700, 64, 1], 1, CUDA, finite=True)
    attend(backend, batch)
    metadata, output = batch.metadata(), batch.query.new_empty((6, 16, 512))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():
            backend.prepare(metadata)
            backend.forward(batch.query, batch.key_cache, batch.value_cache, output, metadata, scale=batch.scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")


SHAPE = LatentShape(num_heads=16, rank=512, nope=128, rope=64, value=128)


@pytest.mark.parametrize("limit", [100_000, 700])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_chunks_expanded_equal_plain_torch(dtype: torch.dtype, limit: int) -> None:
    rng = random.Random(0)
    queries, past = [200, 1, 130, 33, 64], [0, 900, 1500, 64, 2000]
    lens = [q + p for q, p in zip(queries, past, strict=True)]
    generator = torch.Generator(CUDA).manual_seed(0)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=CUDA)

    cache = randn(300, 64, 1, SHAPE.width).to(dtype)
    table = torch.tensor([rng.sample(range(1, 300), 40) for _ in lens], dtype=torch.int32, device=CUDA)
    kv_b = (randn(16 * 256, 512) * 512**-0.5).to(dtype)
    query = randn(sum(queries), 16, 192).to(dtype)
    plan = to_device(plan_pieces(np.cumsum([0, *queries]), np.array(lens), limit), table, 64)
    assert plan.merges == (limit == 700)
    output = torch.full((sum(queries), 16, 128), float("nan"), dtype=dtype, device=CUDA)
    attend_chunks(LatentLayer(SHAPE, kv_b), plan, query, cache, output, 0.1)
    (whole,) = to_device(plan_pieces(np.cumsum([0, *queries]), np.array(lens), 100_000), table, 64).pieces
    latent = cache.flatten(0, 2)[whole.slots]
    expanded = LatentLayer(SHAPE, kv_b).expand(latent)
    exact, lse = torch.empty(output.shape, device=CUDA), torch.empty(output.shape[:2], device=CUDA)
    attend_piece_torch(SHAPE, whole, query, latent, expanded, exact, lse, 0.1)
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}[dtype]
    torch.testing.assert_close(output.float(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm_rotation_and_write_equal_plain_torch(dtype: torch.dtype) -> None:
    generator = torch.Generator(CUDA).manual_seed(0)
    fused = torch.randn((37, 576 + 3072), generator=generator, device=CUDA).to(dtype)
    q, latent = fused.split((3072, 576), 1)
    q = q.reshape(37, 16, 192).clone()
    weight = torch.randn(512, generator=generator, device=CUDA).to(dtype)
    angles = torch.rand((100, 32), generator=generator, device=CUDA)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.randint(0, 100, (37,), generator=generator, device=CUDA, dtype=torch.int32)
    slots = torch.randperm(200, generator=generator, device=CUDA)[:37]
    slots[::5] = -1
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, -1)
    ready = torch.cat((
        normalize(latent[:, :512].float(), weight, 1e-6, dtype),
        mla_model.rotated_pairs(latent[:, None, 512:], cos, sin)[:, 0],
    ), -1)  # fmt: skip
    expected = torch.zeros((4, 64, 1, 576), dtype=dtype, device=CUDA)
    cache, rotated = torch.zeros_like(expected), mla_model.rotated_pairs(q[..., 128:], cos, sin)
    write_latent_torch(ready, expected, slots)
    rotate_and_write(q[..., 128:], latent, weight, positions, cos_sin, cache, slots, 1e-6)
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(cache, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(q[..., 128:], rotated, atol=tolerance, rtol=tolerance)


# --- through the engine ----------------------------------------------------------------------------------------------

TINY = {
    "max_model_len": 256, "max_num_seqs": 6, "max_num_batched_tokens": 64, "gpu_memory_utilization": 0.1,
    "cudagraph_capture_sizes": [1, 2, 4, 6, 16, 64],
}  # fmt: skip


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(500) for _ in range(rng.randint(1, 120))] for _ in range(count)]


@pytest.mark.parametrize("model", ["tiny-deepseek-v2", "tiny-deepseek-v3"])
def test_every_mode_equals_each_prompt_alone(model: str) -> None:
    asked = prompts(6, 3)
    with LLM(model, **TINY, dtype="float32", attention_backend="TORCH_SDPA_MLA", enforce_eager=True) as llm:
        reference = one_by_one(llm, asked, 8)
    for mode in ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"):
        with LLM(model, **TINY, dtype="float32", attention_backend="TRITON_MLA", cudagraph_mode=mode) as llm:
            assert llm.cudagraph_mode.name == mode, llm.mode_trail
            ours, reports = teach(llm, asked, 8, stagger=2)
        assert (mode != "NONE") == any(r.mode != "NONE" for r in reports)
        assert_same_logits(ours, reference, what=f"{model} {mode}")


@pytest.fixture
def real_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Two layers with the heads and the latent of DeepSeek-V2-Lite, so that every backend can serve."""
    shape = dataclasses.replace(
        shapes.SHAPES["deepseek-v2-lite"], name="two-layers", vocab_size=512, hidden_size=256, intermediate_size=256,
        num_layers=2, max_position_embeddings=4096, num_experts=8, moe_intermediate_size=64,
    )  # fmt: skip
    monkeypatch.setitem(shapes.SHAPES, "two-layers", shape)
    yield "two-layers"


@pytest.mark.parametrize("name", [name for name in CASES if name != "TORCH_SDPA_MLA"])
def test_equal_logits_across_backends(name: str, real_sizes: str) -> None:
    available = registry.availability(name)
    if not available.usable:
        pytest.skip(f"{name}: {available.reason}")
    asked = prompts(6, 4)
    settings = {**TINY, "dtype": "bfloat16", "block_size": 64}
    with LLM(real_sizes, **settings, attention_backend="TORCH_SDPA_MLA", enforce_eager=True) as llm:
        reference, _ = teach(llm, asked, 8, stagger=2)
    for mode in ("NONE", "FULL_AND_PIECEWISE"):
        with LLM(real_sizes, **settings, attention_backend=name, cudagraph_mode=mode) as llm:
            assert llm.cudagraph_mode.name == mode, llm.mode_trail
            ours, reports = teach(llm, asked, 8, stagger=2)
            assert mode == "NONE" or {"FULL", "PIECEWISE"} <= {r.mode for r in reports}
        # bf16, and experts: a near-tie of the router changes a row, so most rows are compared and not all.
        close = [(ours[k] - reference[k]).abs().max() <= 5e-2 * reference[k].abs().max() for k in reference]
        assert sum(close) >= 0.9 * len(close), f"{name} {mode}: {sum(close)} of {len(close)} rows agree"


def test_compiled_in_pieces_equals_each_prompt_alone() -> None:
    asked = prompts(4, 6)
    with LLM(
        "tiny-deepseek-v2", **TINY, dtype="float32", attention_backend="TORCH_SDPA_MLA", enforce_eager=True
    ) as llm:
        reference = one_by_one(llm, asked, 6)
    with LLM("tiny-deepseek-v2", **TINY, dtype="float32", attention_backend="TRITON_MLA",
             compilation_mode="VLLM_COMPILE", cudagraph_mode="FULL_AND_PIECEWISE") as llm:  # fmt: skip
        report = llm.compile_report
        assert report is not None and report.pieces == 4 and len(report.classes) == 4
        ours, reports = teach(llm, asked, 6, stagger=2)
        assert {"FULL", "PIECEWISE"} <= {r.mode for r in reports}
    assert_same_logits(ours, reference, what="compiled")


def test_a_step_of_the_real_model_is_finite() -> None:
    with LLM("deepseek-v2-lite", max_model_len=512, max_num_seqs=4, max_num_batched_tokens=256,
             cudagraph_capture_sizes=[1, 4], gpu_memory_utilization=0.6) as llm:  # fmt: skip
        outputs = llm.generate(prompts(3, 7), SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1))
        assert all(len(o.token_ids) == 6 and o.finish_reason == "length" for o in outputs), outputs


# --- last in the file: what goes wrong here may end the process's use of the GPU ------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_rows_that_see_nothing(name: str) -> None:
    backend = made(name, DEEPSEEK)
    batch = DEEPSEEK.batch([5, 2, 0, 1, 3], [2, 5, 0, 3, 0], 2, CUDA, finite=name in FINITE)
    judge(batch, *attend(backend, batch), name)


@pytest.mark.parametrize("name", ["TRITON_MLA", "FLASHMLA", "FLASHINFER_MLA"])
def test_c16_pages_beyond_two_to_the_31_elements(name: str) -> None:
    backend = made(name, DEEPSEEK)
    low = DEEPSEEK.batch([1, 1], [300, 20], 0, CUDA, finite=True)
    blocks = (1 << 31) // low.key_cache[0].numel() + 64
    high = torch.zeros((blocks, *low.key_cache.shape[1:]), dtype=torch.bfloat16, device=CUDA)
    shift = blocks - low.key_cache.shape[0]
    high[shift:] = low.key_cache
    tables = [[block + shift for block in table] for table in low.tables]
    moved = dataclasses.replace(low, key_cache=high, value_cache=high[..., :512], tables=tables)
    assert torch.equal(attend(backend, moved)[0], attend(backend, low)[0])
