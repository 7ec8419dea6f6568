"""Mixed batches in two calls: the rules, each part against float64, who is called with what, and whole generations."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

from labkit import LLM, SamplingParams
from labkit.attention.interface import AttentionBackend, AttentionCGSupport, AttentionSpec, Platform
from labkit.attention.sdpa import TorchSDPABackend
from labkit.attention.selector import select
from labkit.attention.split_mixed import SplitMixedBatches, lowered_tier
from labkit.attention.triton_attn import TritonAttentionBackend
from labkit.config import EngineConfig
from labkit.engine.plan import make_plan
from labkit.models.shapes import SHAPES
from labkit.scheduling.request import Request
from labkit.scheduling.step import ScheduledStep
from tests.kernels.conftest import interpreter, launches  # noqa: F401
from tests.reference import PagedBatch, assert_attention_close, dense_attention, random_batch
from tests.teacher import assert_same_logits, teach

CPU = torch.device("cpu")
Tier = AttentionCGSupport


def wrap(batch: PagedBatch, cls: type[AttentionBackend] = TorchSDPABackend) -> SplitMixedBatches:
    spec = AttentionSpec(
        batch.query.shape[1], batch.key_cache.shape[2], batch.query.shape[2], "float32", batch.key_cache.shape[1],
        max_model_len=512, max_num_seqs=16,
    )  # fmt: skip
    return SplitMixedBatches(cls(spec, CPU), cls(spec, CPU))


def run(backend: AttentionBackend, batch: PagedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    metadata, output = batch.metadata(), torch.full_like(batch.query, math.nan)
    lse = torch.full(output.shape[:2], math.nan)
    backend.prepare(metadata)
    backend.forward(batch.query, batch.key_cache, batch.value_cache, output, metadata, scale=batch.scale, lse=lse)
    return output, lse


# --- the rules -------------------------------------------------------------------------------------------------------


def test_the_tier_is_lowered_to_uniform_batches_and_never_raised() -> None:
    for tier in Tier:
        lowered, why = lowered_tier(tier, "as it is")
        assert lowered == min(tier, Tier.UNIFORM_BATCH)
        assert (why == "as it is") == (lowered is tier)
    assert "split_mixed_batches" in lowered_tier(Tier.ALWAYS, "")[1]


def test_the_selection_knows_it_and_mixed_graphs_go() -> None:
    spec = AttentionSpec(32, 8, 128, "bfloat16", 16, split_mixed_batches=True)
    found = select(spec, Platform("cuda", (9, 0)), "TRITON_ATTN").candidate("TRITON_ATTN")
    assert found.tier is Tier.UNIFORM_BATCH and "split_mixed_batches" in found.tier_reason
    for split, mode in ((False, "FULL"), (True, "FULL_DECODE_ONLY")):
        config = EngineConfig(attention_backend="TRITON_ATTN", cudagraph_mode="FULL", split_mixed_batches=split)
        assert make_plan(config, SHAPES["qwen3-0.6b"], Platform("cuda", (9, 0))).mode.name == mode


def test_a_step_has_its_decodes_first_in_order_of_turn() -> None:
    """By the state of the request: the last token of a chunked prompt comes alone and is no decode."""

    def request(name: str, prompt: int, outputs: int, computed: int) -> Request:
        made = Request(name, list(range(prompt)), SamplingParams(max_tokens=50), ())
        for token in range(outputs):
            made.append_token(token)
        made.num_computed_tokens = computed
        return made

    chosen = {
        request("chunk", 30, 0, 10): 8, request("decode a", 5, 3, 7): 1, request("last token", 9, 0, 8): 1,
        request("decode b", 4, 1, 4): 1, request("prefill", 6, 0, 0): 6,
    }  # fmt: skip
    turn = [r.request_id for r in chosen]
    plain = ScheduledStep.of(0, chosen, (), 0)
    assert [item.request.request_id for item in plain.requests] == turn
    ordered = ScheduledStep.of(0, chosen, (), 0, decodes_first=True)
    names = [item.request.request_id for item in ordered.requests]
    assert names == ["decode a", "decode b", "chunk", "last token", "prefill"]
    assert {item.request: item for item in ordered.requests} == {item.request: item for item in plain.requests}
    assert dataclasses.replace(ordered, requests=plain.requests) == plain


# --- the two calls ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_decodes_first_batches_equal_dense_attention(seed: int) -> None:
    """Any number of decodes, one-token chunks among the others, requests without keys, every offset in 16 bytes."""
    rng = random.Random(seed)
    query = [1] * rng.randint(0, 9) + [rng.choice([2, 5, 17, 1]) for _ in range(rng.randint(0, 4))] or [1]
    kv = [n + rng.choice([0, 3, 40, 200]) for n in query]
    if rng.random() < 0.3:
        kv[0] = 0
    batch = random_batch(query, kv, num_heads=6, num_kv_heads=2, head_size=32, seed=seed)
    output, lse = run(wrap(batch), batch)
    assert_attention_close(batch, output, what=f"{query} {kv}")
    torch.testing.assert_close(lse.double(), dense_attention(batch)[1], atol=1e-5, rtol=1e-5)


class Watched(TorchSDPABackend):
    """Writes down what it was asked for."""

    def prepare(self, metadata: object) -> None:
        self.seen.append(metadata)
        super().prepare(metadata)  # type: ignore[arg-type]

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.seen: list = []


def test_each_part_is_a_batch_of_its_own() -> None:
    query, kv = [1, 1, 1, 7, 1, 3], [9, 1, 40, 20, 33, 3]
    batch = random_batch(query, kv, num_heads=2, num_kv_heads=1, head_size=32)
    backend = wrap(batch, Watched)
    assert_attention_close(batch, run(backend, batch)[0])
    (decodes,), (chunks,) = backend.decodes.seen, backend.chunks.seen  # type: ignore[attr-defined]
    for part, q, k in ((decodes, query[:3], kv[:3]), (chunks, query[3:], kv[3:])):
        assert (part.num_reqs, part.num_tokens) == (part.num_actual_reqs, part.num_actual_tokens) == (3, sum(q))
        assert (part.max_query_len, part.max_seq_len) == (max(q), max(k))
        starts = [sum(q[:i]) for i in range(4)]
        assert part.query_start_loc.tolist() == part.query_start_loc_cpu.tolist() == starts
        assert part.seq_lens.tolist() == part.seq_lens_cpu.tolist() == k
        assert len(part.slot_mapping) == sum(q) and part.block_table.shape[0] == 3
        assert part.query_start_loc.dtype == part.seq_lens.dtype == torch.int32
        assert all(t.data_ptr() % 16 == 0 for t in (part.query_start_loc, part.seq_lens, part.block_table))
    assert decodes.is_uniform_decode and not chunks.is_uniform_decode
    assert decodes.scratch is not chunks.scratch


@pytest.mark.parametrize(
    ("query", "graph", "calls"),
    [([1, 1], False, (1, 0)), ([4, 2], False, (0, 1)), ([1, 4], False, (1, 1)), ([4, 1], False, (0, 1)),
     ([1, 1], True, (1, 0)), ([2, 2], True, (1, 0))],
)  # fmt: skip
def test_whatever_is_not_mixed_goes_straight_through(query: list[int], graph: bool, calls: tuple[int, int]) -> None:
    """Under a graph always: its shape is uniform, and one instance must know it from capture to the last replay."""
    batch = random_batch(query, [9, 20], num_heads=2, num_kv_heads=1, head_size=32)
    backend, metadata = wrap(batch, Watched), batch.metadata()
    metadata.for_graph = graph
    backend.prepare(metadata)
    seen = backend.decodes.seen, backend.chunks.seen  # type: ignore[attr-defined]
    assert tuple(map(len, seen)) == calls
    if calls != (1, 1):
        assert (seen[0] or seen[1])[0] is metadata


def test_a_graph_goes_on_with_its_own_copy_of_the_metadata() -> None:
    batch = random_batch([1, 1], [9, 20], num_heads=2, num_kv_heads=1, head_size=32)
    backend, metadata = wrap(batch), batch.metadata()
    metadata.for_graph, metadata.max_seq_len = True, 32
    backend.prepare(metadata)
    kept = dataclasses.replace(metadata)
    metadata.num_tokens = metadata.num_reqs = 0  # as the next step would
    output = torch.full_like(batch.query, math.nan)
    backend.forward(batch.query, batch.key_cache, batch.value_cache, output, kept, scale=batch.scale)
    assert_attention_close(batch, output)


def test_warm_up_reaches_both_instances() -> None:
    batch = random_batch([1], [9], num_heads=2, num_kv_heads=1, head_size=32)
    backend, calls = wrap(batch), []
    for part in (backend.decodes, backend.chunks):
        part.warm_up = lambda progress, part=part: calls.append((part, progress))  # type: ignore[method-assign]
    backend.warm_up(None)
    assert calls == [(backend.decodes, None), (backend.chunks, None)]


@pytest.mark.usefixtures("interpreter")
def test_two_launches_and_a_description_that_says_so(launches: list[str]) -> None:  # noqa: F811
    batch = random_batch([1, 1, 5, 3], [20, 33, 9, 3], num_heads=4, num_kv_heads=2, head_size=32)
    backend = wrap(batch, TritonAttentionBackend)
    assert_attention_close(batch, run(backend, batch)[0])
    assert launches == ["paged_attention_kernel"] * 2
    plans = backend.describe(batch.metadata())
    assert [p.kernel for p in plans] == launches
    assert [p.note.split(";")[0] for p in plans] == ["decodes", "chunks"]
    launches.clear()
    run(backend.decodes, batch)
    assert launches == ["paged_attention_kernel"], "unified, it is one"


# --- the engine ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("interpreter")
def test_generations_are_the_same_with_and_without() -> None:
    """Arrivals one by one and chunks of prompts beside decodes; the engine switches over while requests are live."""
    settings = {
        "attention_backend": "TRITON_ATTN", "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 12,
        "num_gpu_blocks_override": 40, "enforce_eager": True,
    }  # fmt: skip
    prompts, counts = [[7, 3, 9], list(range(20, 35)), [4] * 9], [5, 3, 2]
    with LLM("tiny-llama", **settings) as llm:
        unified, reports = teach(llm, prompts, counts, stagger=1)
        assert any(r.max_query_len > 1 and len(r.scheduled) > 1 for r in reports)
        llm.reset()
        llm.reconfigure(split_mixed_batches=True)
        backend = llm.engine.runner.backend
        assert isinstance(backend, SplitMixedBatches)
        cuts, parts = [], backend.parts
        backend.parts = lambda m: cuts.append(parts(m)) or cuts[-1]  # type: ignore[method-assign,func-returns-value]
        split, reports = teach(llm, prompts, counts, stagger=1)
        assert any(len(cut) == 2 for cut in cuts)
        assert_same_logits(split, unified)
        llm.reset()
        for prompt in prompts:
            llm.add_request(prompt, SamplingParams(max_tokens=3, ignore_eos=True))
        llm.step()
        llm.step()
        llm.reconfigure(split_mixed_batches=False)
        assert not isinstance(llm.engine.runner.backend, SplitMixedBatches)
        assert not llm.engine.scheduler.limits.decodes_first
        while llm.has_unfinished:
            llm.step()
