"""FLEX_ATTENTION compiled, on the GPU: each combination costs a compilation, so the list is fixed and pairwise.

Values beyond the end of a request are large and finite instead of NaN; see the last paragraph of the module.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from labkit.attention.flex import FlexAttentionBackend
from labkit.attention.interface import AttentionSpec
from tests.reference import PagedBatch, assert_attention_close, dense_attention, random_batch

CUDA = torch.device("cuda")
PAGES = 400
NAMES = {"sliding_window": "window", "logits_soft_cap": "soft_cap"}


@dataclasses.dataclass(frozen=True)
class Case:
    heads: tuple[int, int, int]
    dtype: str
    block_size: int
    features: dict[str, Any]
    lse: bool = False
    layout: str = "NHD"

    def __str__(self) -> str:
        what = "-".join([*self.features, *(["lse"] if self.lse else []), self.layout])
        return f"{'x'.join(map(str, self.heads))}-{self.dtype}-{self.block_size}-{what}"


SMOL = Case((9, 3, 64), "bfloat16", 64, {})
CASES = [
    SMOL,
    Case((32, 8, 128), "bfloat16", 16, {"sliding_window": 50}, lse=True),
    Case((28, 4, 128), "float16", 48, {"sinks": True}, lse=True, layout="HND"),
    Case((8, 1, 256), "bfloat16", 64, {"logits_soft_cap": 30.0}),
    Case((6, 2, 80), "float32", 32, {}, lse=True),
    Case((71, 1, 64), "float16", 16, {"sliding_window": 20, "logits_soft_cap": 30.0, "sinks": True}),
]
#: Requests of each step; the first is all decodes, so both tiles are compiled by the second.
STEPS = [
    ([1] * 5, [1, 64, 65, 700, 30]),
    ([1, 1, 1, 300, 37, 1, 5], [700, 33, 1, 300, 500, 1029, 5]),
    ([1], [900]),
    ([1] * 33, [17 * (i + 1) for i in range(33)]),
    ([0, 5, 0, 1, 70], [0, 2, 9, 1, 150]),
    ([128], [128]),
]


def make(case: Case) -> FlexAttentionBackend:
    heads, kv_heads, size = case.heads
    spec = AttentionSpec(
        heads, kv_heads, size, case.dtype, case.block_size, max_model_len=1536, max_num_seqs=64,
        kv_cache_layout=case.layout, sliding_window=case.features.get("sliding_window"),
        logits_soft_cap=case.features.get("logits_soft_cap"), has_sinks="sinks" in case.features,
    )  # fmt: skip
    return FlexAttentionBackend(spec, CUDA)


def caches(case: Case, layers: int = 1) -> list[list[torch.Tensor]]:
    """K and V of some layers as the engine keeps them: all in one tensor."""
    heads = case.heads[1]
    inner = (case.block_size, heads) if case.layout == "NHD" else (heads, case.block_size)
    rng = torch.Generator().manual_seed(1)
    data = torch.randn((layers, 2, PAGES, *inner, case.heads[2]), generator=rng).to(CUDA, getattr(torch, case.dtype))
    data = data if case.layout == "NHD" else data.transpose(3, 4)
    return [[layer[0], layer[1]] for layer in data]


def batch_of(case: Case, kv: list[torch.Tensor], query_lens: list[int], kv_lens: list[int], seed: int) -> PagedBatch:
    """Scattered pages; queries are a view of a wider projection. The first two requests share their first page."""
    heads, kv_heads, size = case.heads
    rng, torch_rng = random.Random(seed), torch.Generator().manual_seed(seed)
    tables = [rng.sample(range(1, PAGES), -(-n // case.block_size)) for n in kv_lens]
    if len(tables) > 1 and tables[0] and tables[1] and tables[0][0] not in tables[1]:
        tables[1][0] = tables[0][0]
    fused = torch.randn((sum(query_lens), heads + 2 * kv_heads, size), generator=torch_rng)
    fused *= 4 if "logits_soft_cap" in case.features else 1
    query = fused.to(CUDA, getattr(torch, case.dtype))[:, :heads]
    return PagedBatch(query, *kv, query_lens, kv_lens, tables, size**-0.5)


def check(case: Case, backend: FlexAttentionBackend, batch: PagedBatch, pad: int = 0) -> None:
    features = dict(case.features)
    if "sinks" in features:
        features["sinks"] = torch.linspace(-2, 3, case.heads[0], device=CUDA)
    metadata = batch.metadata(pad_reqs=pad, pad_tokens=pad, max_blocks=1536 // case.block_size)
    query = batch.query
    if pad:
        query = torch.cat([query, torch.full((pad, *query.shape[1:]), float("nan"), dtype=query.dtype, device=CUDA)])
    output = torch.full(query.shape, float("nan"), dtype=query.dtype, device=CUDA)
    lse = torch.full(query.shape[:2], float("nan"), device=CUDA) if case.lse else None
    backend.prepare(metadata)
    backend.forward(query, batch.key_cache, batch.value_cache, output, metadata, scale=batch.scale, lse=lse, **features)
    expected = {NAMES.get(key, key): value for key, value in features.items()}
    what = f"{case} {batch.query_lens} {batch.kv_lens}"
    assert_attention_close(batch, output[: batch.num_tokens], what=what, **expected)
    first = 0
    for n, length in zip(batch.query_lens, batch.kv_lens, strict=True):
        blind = max(0, n - length)
        assert (output[first : first + blind] == 0).all(), what
        assert lse is None or torch.isneginf(lse[first : first + blind]).all(), what
        first += n
    if lse is not None:
        exact = dense_attention(batch, **expected)[1]
        seen = ~torch.isneginf(exact)
        if "sinks" not in features:
            assert torch.isneginf(lse[: batch.num_tokens][~seen]).all()
        found = lse[: batch.num_tokens].double()
        blind_rows = torch.isneginf(found)
        torch.testing.assert_close(found[~blind_rows], exact[~blind_rows], atol=2e-3, rtol=1e-3, msg=what)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parity(case: Case) -> None:
    backend, kv = make(case), caches(case)[0]
    for seed, (query_lens, kv_lens) in enumerate(STEPS):
        check(case, backend, batch_of(case, kv, query_lens, kv_lens, seed), pad=3 if seed % 2 else 0)


def test_nothing_is_compiled_again_after_both_tiles_have_run() -> None:
    backend, layers = make(SMOL), caches(SMOL, layers=3)
    for query_lens, kv_lens in STEPS[:2]:
        check(SMOL, backend, batch_of(SMOL, layers[0], query_lens, kv_lens, 0))
    before = counters["stats"]["unique_graphs"]
    for seed, (query_lens, kv_lens) in enumerate(STEPS):
        for kv in layers:
            check(SMOL, backend, batch_of(SMOL, kv, query_lens, kv_lens, seed))
    again = make(SMOL)
    for query_lens, kv_lens in STEPS:
        check(SMOL, again, batch_of(SMOL, layers[1], query_lens, kv_lens, 9))
    assert counters["stats"]["unique_graphs"] == before


@pytest.mark.parametrize("size", [1, 8, 48])
@pytest.mark.parametrize("uniform", [True, False], ids=["decode", "mixed"])
def test_a_graph_serves_other_batches(size: int, uniform: bool) -> None:
    """Captured over the null block, as the engine does; replayed at the shortest and the longest, in any mixture."""
    backend, kv, rng = make(SMOL), caches(SMOL)[0], random.Random(size)
    kv[0][0], kv[1][0] = 0, 0
    reqs = size
    longest = 1536
    captured = batch_of(SMOL, kv, [1] * size, [1] * size, 0)
    captured.tables = [[0]] * size
    metadata = captured.metadata(max_blocks=longest // 64)
    metadata.for_graph, metadata.max_query_len, metadata.max_seq_len = True, 1 if uniform else size, longest
    query, output = captured.query, torch.empty(captured.query.shape, dtype=torch.bfloat16, device=CUDA)
    frozen = dataclasses.replace(metadata)

    def forward() -> None:
        backend.forward(query, *kv, output, frozen, scale=captured.scale)

    with torch.inference_mode():
        backend.prepare(metadata)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            forward()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            forward()
    compositions = [([1] * size, [1] * size), ([1] * size, [longest] * size), ([1], [77])]
    compositions.append(([1] * size, [rng.randint(1, longest) for _ in range(size)]))
    if not uniform and size > 2:
        compositions += [([size], [size]), ([size - 2, 1], [longest, 5]), ([1, 0, size - 3, 1], [200, 0, 700, 64])]
    for seed, (query_lens, kv_lens) in enumerate(compositions):
        batch = batch_of(SMOL, kv, query_lens, kv_lens, seed + 1)
        replayed = batch.metadata(
            pad_reqs=reqs - len(query_lens), pad_tokens=size - batch.num_tokens, max_blocks=longest // 64
        )
        replayed.for_graph, replayed.max_query_len = True, metadata.max_query_len
        query.fill_(float("nan"))
        query[: batch.num_tokens] = batch.query
        output.fill_(float("nan"))
        with torch.inference_mode():
            backend.prepare(replayed)
            graph.replay()
        torch.cuda.synchronize()
        assert_attention_close(batch, output[: batch.num_tokens], what=f"{query_lens} {kv_lens}")


def test_finite_garbage_behind_a_request_changes_nothing() -> None:
    batch = random_batch(
        [1, 40], [70, 90], num_heads=9, num_kv_heads=3, head_size=64, block_size=64, dtype=torch.bfloat16, device=CUDA
    )
    batch.value_cache.nan_to_num_(nan=1000.0)
    check(SMOL, make(SMOL), batch)
