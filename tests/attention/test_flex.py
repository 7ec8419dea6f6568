"""FLEX_ATTENTION on a CPU against dense float64 attention. The page lists are the compiled kernel's, expanded.

The eager flex_attention that runs here multiplies every value of the cache by a weight, 0 where masked, so values that
nobody may read are large but finite (see the module's last paragraph); keys are NaN.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.attention import flex, registry
from labkit.attention.flex import FlexAttentionBackend, edge_pages, flat_cache, flex_tile, num_tiles
from labkit.attention.interface import AttentionCGSupport, AttentionSpec, Platform
from labkit.errors import BackendError
from labkit.paging.kv_cache import KVCache
from tests.reference import PagedBatch, assert_attention_close, dense_attention, random_batch

CPU = torch.device("cpu")
CUDA = Platform("cuda", (9, 0))


def make(batch: PagedBatch, **changes: Any) -> FlexAttentionBackend:
    values: dict[str, Any] = {
        "num_heads": batch.query.shape[1],
        "num_kv_heads": batch.key_cache.shape[2],
        "head_size": batch.query.shape[2],
        "dtype": str(batch.query.dtype).removeprefix("torch."),
        "block_size": batch.key_cache.shape[1],
        "max_model_len": 256,
        **changes,
    }
    return FlexAttentionBackend(AttentionSpec(**values), CPU)


def poisoned(*args: Any, **kwargs: Any) -> PagedBatch:
    batch = random_batch(*args, **kwargs)
    batch.value_cache.nan_to_num_(nan=1000.0)
    return batch


def attend(
    batch: PagedBatch, *, pad: int = 0, backend: FlexAttentionBackend | None = None, **features: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of the real tokens; padding is NaN on the way in."""
    backend = backend or make(batch)
    metadata = batch.metadata(pad_reqs=pad, pad_tokens=pad)
    query = torch.cat([batch.query, torch.full((pad, *batch.query.shape[1:]), float("nan"), dtype=batch.query.dtype)])
    output, lse = torch.full_like(query, float("nan")), torch.full(query.shape[:2], float("nan"))
    backend.prepare(metadata)
    backend.forward(query, batch.key_cache, batch.value_cache, output, metadata, scale=batch.scale, lse=lse, **features)
    return output[: batch.num_tokens], lse[: batch.num_tokens]


def check(batch: PagedBatch, *, pad: int = 0, backend: FlexAttentionBackend | None = None, **features: Any) -> None:
    names = {"sliding_window": "window", "logits_soft_cap": "soft_cap"}
    expected = {names.get(key, key): value for key, value in features.items()}
    output, lse = attend(batch, pad=pad, backend=backend, **features)
    what = f"{batch.query_lens} {batch.kv_lens} {features}"
    assert_attention_close(batch, output, what=what, **expected)
    exact = dense_attention(batch, **expected)[1]
    tolerance = 1e-4 if batch.query.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(lse.double(), exact, atol=tolerance, rtol=0, msg=what)


@pytest.mark.parametrize("seed", range(10))
def test_mixed_batches_equal_dense_attention(seed: int) -> None:
    rng = random.Random(seed)
    heads, kv_heads = rng.choice([(9, 3), (4, 4), (8, 2), (6, 1)])
    query = [rng.choice([0, 1, 1, rng.randint(2, 60)]) for _ in range(rng.randint(1, 5))]
    kv = [q + rng.choice([0, rng.randint(0, 90)]) for q in query]
    batch = poisoned(
        query, kv, num_heads=heads, num_kv_heads=kv_heads, head_size=rng.choice([16, 32, 80]),
        block_size=rng.choice([16, 32, 48]), seed=seed,
    )  # fmt: skip
    check(batch, pad=rng.choice([0, 3]), sliding_window=rng.choice([None, 1, 5, 40]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    check(poisoned([1, 20, 1], [33, 20, 7], num_heads=4, num_kv_heads=2, head_size=64, dtype=dtype), pad=2)


def test_c08_the_causal_mask_is_aligned_to_the_last_key_and_blind_rows_are_exactly_zero() -> None:
    check(poisoned([2], [5], num_heads=4, num_kv_heads=2, head_size=32))
    batch = poisoned([5, 1], [2, 4], num_heads=4, num_kv_heads=2, head_size=32)
    output, lse = attend(batch)
    assert (output[:3] == 0).all() and torch.isneginf(lse[:3]).all()
    check(batch)
    with_sinks, lse = attend(batch, sinks=torch.full((4,), 2.0))
    assert (with_sinks[:3] == 0).all() and torch.isneginf(lse[:3]).all(), "a sink makes no blind row see"


def test_c09_empty_rows_tiny_batches_and_no_token_at_all() -> None:
    check(poisoned([0, 1, 0, 1], [0, 3, 0, 5], num_heads=9, num_kv_heads=3, head_size=64))
    check(poisoned([1, 0], [3, 9], num_heads=9, num_kv_heads=3, head_size=64), pad=1)
    check(poisoned([1], [1], num_heads=9, num_kv_heads=3, head_size=64))
    nothing = poisoned([0], [0], num_heads=9, num_kv_heads=3, head_size=64)
    assert attend(nothing)[0].shape == (0, 9, 64)


@pytest.mark.parametrize(("query", "kv", "window"), [(4, 12, 8), (100, 100, 5), (1, 100, 5), (70, 130, 16)])
def test_c10_a_window_may_begin_in_any_row_of_a_tile(query: int, kv: int, window: int) -> None:
    check(poisoned([query], [kv], num_heads=2, num_kv_heads=2, head_size=16), sliding_window=window)


def test_c11_no_feature_is_ignored() -> None:
    batch = poisoned([1, 9], [40, 20], num_heads=4, num_kv_heads=2, head_size=32)
    batch.query *= 12
    check(batch, logits_soft_cap=30.0)
    capped, plain = attend(batch, logits_soft_cap=30.0)[0].double(), dense_attention(batch)[0]
    assert (capped - dense_attention(batch, soft_cap=30.0)[0]).abs().max() < (capped - plain).abs().max() / 100
    sinks = torch.tensor([0.0, 3.0, -2.0, 8.0])
    output, lse = attend(batch, sinks=sinks, sliding_window=7, logits_soft_cap=20.0)
    exact, exact_lse = dense_attention(batch, sinks=sinks, window=7, soft_cap=20.0)
    assert (output - exact).abs().max() < 1e-5 and (lse - exact_lse).abs().max() < 1e-4
    loud = dataclasses.replace(batch, scale=0.01)
    check(loud)


@pytest.mark.parametrize("heads", [(28, 4), (24, 4), (40, 8), (71, 1), (32, 1), (16, 16)], ids=str)
def test_c12_any_ratio_of_heads(heads: tuple[int, int]) -> None:
    check(poisoned([1, 5], [20, 9], num_heads=heads[0], num_kv_heads=heads[1], head_size=16), pad=1)


def test_c12_heads_that_do_not_divide_are_refused() -> None:
    spec = AttentionSpec(6, 4, 64, "float32", 16)
    assert any("6 query heads" in str(r) for r in FlexAttentionBackend.why_not(spec, CUDA))
    with pytest.raises(BackendError, match="6 query heads"):
        FlexAttentionBackend(spec, CPU)


@pytest.mark.parametrize("size", [32, 80, 96, 112, 128, 192, 256])
def test_c13_head_sizes(size: int) -> None:
    check(poisoned([1, 4], [18, 4], num_heads=2, num_kv_heads=1, head_size=size))


@pytest.mark.parametrize("layout", ["NHD", "HND", "interleaved", "padded heads"])
def test_c14_strided_queries_and_caches_are_read_where_they_are(layout: str) -> None:
    batch = poisoned([1, 7, 1], [33, 20, 5], num_heads=6, num_kv_heads=2, head_size=16)
    blocks, size, heads, width = batch.key_cache.shape
    # Between two pages of the flat axis lie the other cache's: on a CPU they are values with weight 0.
    both = torch.stack([batch.key_cache.nan_to_num(nan=1000.0), batch.value_cache])
    if layout == "interleaved":
        keys, values = both.transpose(0, 1).contiguous().unbind(1)
    elif layout == "HND":
        keys, values = both.transpose(2, 3).contiguous().transpose(2, 3)
    elif layout == "padded heads":
        keys, values = torch.cat([both, both], 3)[..., :heads, :]
    else:
        keys, values = both
    fused = torch.cat([batch.query, torch.full((batch.num_tokens, 4, width), float("nan"))], 1)
    strided = dataclasses.replace(batch, query=fused[:, :6], key_cache=keys, value_cache=values)
    check(strided, backend=make(batch, kv_cache_layout="HND" if layout == "HND" else "NHD"))
    flat, step = flat_cache(keys)
    assert flat.data_ptr() == keys.data_ptr() and step == {"HND": 2, "interleaved": 2}.get(layout, 1)
    for page in range(blocks):
        assert flat[:, page * step * size :][:, :size].transpose(0, 1).equal(keys[page])


def test_c14_the_caches_of_labkit_are_flat_in_both_layouts() -> None:
    from tests.attention.test_selection_rules import MODEL

    for layout in ("NHD", "HND"):
        kv = KVCache.allocate(MODEL, 5, 16, torch.float32, CPU, layout)
        for cache in (*kv.key_caches, *kv.value_caches):
            assert flat_cache(cache)[0].untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()


def test_c14_c16_a_cache_that_cannot_be_read_in_place_is_refused() -> None:
    cache = torch.zeros(4, 16, 2, 8)
    with pytest.raises(BackendError, match="strides"):
        flat_cache(torch.zeros(4, 20, 2, 8)[:, :16])
    with pytest.raises(BackendError, match="strides"):
        flat_cache(cache.transpose(2, 3))
    huge = torch.empty((1 << 31) // (16 * 8 * 128) + 1, 16, 8, 128, device="meta")
    with pytest.raises(BackendError, match="32 bits"):
        flat_cache(huge)


def test_c18_the_order_of_requests_changes_nothing() -> None:
    lens = [(5, 5), (1, 30), (1, 9), (1, 17)]
    batch = poisoned([q for q, _ in lens], [k for _, k in lens], num_heads=4, num_kv_heads=2, head_size=16)
    backend = make(batch)
    first = [sum(batch.query_lens[:i]) for i in range(4)]
    alone = attend(batch, backend=backend)[0]
    for order in itertools.permutations(range(4)):
        rows = torch.cat([torch.arange(first[i], first[i] + lens[i][0]) for i in order])
        mixed = dataclasses.replace(
            batch, query=batch.query[rows], query_lens=[lens[i][0] for i in order],
            kv_lens=[lens[i][1] for i in order], tables=[batch.tables[i] for i in order],
        )  # fmt: skip
        torch.testing.assert_close(attend(mixed, backend=backend)[0], alone[rows], atol=1e-5, rtol=0)


def test_a_page_may_belong_to_several_requests_at_different_places() -> None:
    """Shared prefixes, one table a part of another, and one page at place 0 of one request and place 2 of another."""
    batch = poisoned([1, 3, 1, 20], [40, 37, 48, 64], num_heads=4, num_kv_heads=2, head_size=16, spare_blocks=8)
    a, b, c, d, e = range(1, 6)
    batch.tables = [[a, b, c], [a, b, d], [c, e, a], [d, c, b, a]]
    batch.key_cache[a : e + 1].nan_to_num_(0.3), batch.value_cache[a : e + 1].copy_(torch.randn(5, 16, 2, 16))
    check(batch, pad=2)
    check(batch, sliding_window=18)


def test_finite_garbage_in_the_tail_of_a_page_changes_nothing() -> None:
    batch = poisoned([1, 3], [5, 20], num_heads=4, num_kv_heads=2, head_size=16)
    clean = dataclasses.replace(batch, value_cache=batch.value_cache.masked_fill(batch.value_cache == 1000.0, 0.0))
    assert attend(batch)[0].equal(attend(clean)[0])


# --- the lists -----------------------------------------------------------------------------------------------------


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], int, int, int, int | None]:
    query = draw(st.lists(st.one_of(st.integers(0, 2), st.integers(0, 150)), min_size=1, max_size=6))
    kv = [max(0, q + draw(st.integers(-3, 200))) for q in query]
    group, block_m = draw(st.sampled_from([1, 2, 3, 7, 16, 71])), draw(st.sampled_from([16, 64]))
    return query, kv, group, block_m, draw(st.sampled_from([16, 48, 64])), draw(st.none() | st.integers(1, 200))


@given(batches(), st.integers(0, 3))
@settings(max_examples=40)
def test_every_row_sees_its_keys_once_and_full_pages_need_no_mask(
    drawn: tuple[list[int], list[int], int, int, int, int | None], pad: int
) -> None:
    query_lens, kv_lens, group, block_m, size, window = drawn
    if not sum(query_lens):
        return
    spec = AttentionSpec(group, 1, 16, "float32", size, max_model_len=512, sliding_window=window)
    pages = [-(-n // size) for n in kv_lens]
    first_page = [1 + sum(pages[:i]) for i in range(len(pages))]
    tables = [list(range(p, p + n)) for p, n in zip(first_page, pages, strict=True)]
    batch = PagedBatch(
        torch.zeros(sum(query_lens), group, 16), torch.zeros(1, size, 1, 16), torch.zeros(1, size, 1, 16),
        query_lens, kv_lens, tables, 1.0,
    )  # fmt: skip
    backend = FlexAttentionBackend(spec, CPU)
    tile = flex.FlexTile(block_m, 16, 4, 2)
    backend._tile = lambda metadata: tile  # type: ignore[method-assign]
    metadata = batch.metadata(pad_reqs=pad, pad_tokens=pad)
    backend.prepare(metadata)
    made = metadata.scratch["flex"]
    lists = made.lists[window]
    assert made.num_tiles == num_tiles(batch.num_tokens + pad, len(query_lens) + pad, group, block_m)
    assert lists.num_edge.max() <= lists.edges == edge_pages(block_m, group, size, window)
    for tile_id in range(made.num_tiles):
        edge, full = lists.edge[tile_id, : lists.num_edge[tile_id]], lists.full[tile_id, : lists.num_full[tile_id]]
        visited = [*edge.tolist(), *full.tolist()]
        assert len(set(visited)) == len(visited), "a page visited twice would count twice"
    slots = (1 + sum(pages)) * size
    visible = flex.expand_lists(made, lists, slice(0, made.num_tiles), slots)
    slot, heads = torch.arange(slots), torch.arange(group)
    used = torch.zeros(made.num_tiles * block_m, dtype=torch.bool)
    token = 0
    for request, (n, length) in enumerate(zip(query_lens, kv_lens, strict=True)):
        key = (slot - first_page[request] * size)[None]
        last = torch.arange(length - n, length)[:, None]
        expected = (key >= 0) & (key <= last) & (key > last - (window or 10_000))
        rows = made.row_of_token[token : token + n, None] + heads
        assert (made.token[rows] == torch.arange(token, token + n)[:, None]).all() and (made.head[rows] == heads).all()
        assert (visible[rows] == expected[:, None]).all(), request
        assert not used[rows].any()
        used[rows] = True
        token += n
    assert (made.position[~used] == -1).all()


# --- graphs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 20])
def test_a_forward_that_was_recorded_serves_later_batches(window: int | None) -> None:
    """What a CUDA graph does: forward runs on the same objects, only prepare sees the new batch."""
    shape = {"num_heads": 6, "num_kv_heads": 2, "head_size": 16}
    page_pool = poisoned([1], [640], **shape, seed=3)
    backend = make(page_pool, sliding_window=window)
    rng = random.Random(1)
    query, output = torch.zeros(40, 6, 16), torch.zeros(40, 6, 16)
    recorded: list[Any] = []
    addresses: list[list[int]] = []
    for query_lens, kv_lens in (
        ([20, 1, 1], [20, 1, 1]), ([1] * 8, [160] * 8), ([1, 1], [1, 160]), ([30, 0, 1, 9], [150, 0, 16, 10]),
    ):  # fmt: skip
        tables = [rng.sample(range(1, 40), -(-n // 16)) for n in kv_lens]
        pages = (page_pool.key_cache.nan_to_num(0.5), page_pool.value_cache)
        batch = PagedBatch(torch.randn(sum(query_lens), 6, 16), *pages, query_lens, kv_lens, tables, 0.25)
        metadata = batch.metadata(pad_reqs=8 - len(query_lens), pad_tokens=40 - batch.num_tokens, max_blocks=16)
        metadata.for_graph, metadata.max_query_len, metadata.max_seq_len = True, 40, 256
        query.fill_(float("nan"))[: batch.num_tokens] = batch.query
        output.fill_(float("nan"))
        backend.prepare(metadata)
        if not recorded:
            recorded.append(dataclasses.replace(metadata))
        backend.forward(query, *pages, output, recorded[0], scale=batch.scale, sliding_window=window)
        assert_attention_close(batch, output[: batch.num_tokens], window=window, what=str(kv_lens))
        made = recorded[0].scratch["flex"]
        addresses.append([t.data_ptr() for t in (*made.arguments(), *made.lists[window].arguments())])
    assert all(a == addresses[0] for a in addresses), "a graph keeps reading the first addresses"


def test_graphs_of_several_sizes_live_at_once() -> None:
    batch = poisoned([1] * 4, [9, 30, 17, 2], num_heads=4, num_kv_heads=2, head_size=16)
    backend = make(batch)
    forwards = []
    for pad in (4, 0, 12):
        metadata = batch.metadata(pad_reqs=pad, pad_tokens=pad)
        metadata.for_graph, metadata.max_seq_len = True, 256
        forwards.append((pad, metadata))
    for pad, metadata in forwards + forwards[::-1]:
        query = torch.cat([batch.query, torch.full((pad, 4, 16), float("nan"))])
        output = torch.empty_like(query)
        backend.prepare(metadata)
        backend.forward(query, batch.key_cache, batch.value_cache, output, metadata, scale=batch.scale)
        assert_attention_close(batch, output[:4], what=f"padded by {pad}")


def test_layers_may_differ_in_their_window() -> None:
    batch = poisoned([1, 30], [90, 30], num_heads=4, num_kv_heads=2, head_size=16)
    backend = make(batch, sliding_window=8)
    for window in (8, None, 8, 33):
        check(batch, backend=backend, **({} if window is None else {"sliding_window": window}))


def test_eager_batches_prepared_out_of_order_do_not_see_each_others_lists() -> None:
    one = poisoned([1, 1], [40, 7], num_heads=4, num_kv_heads=2, head_size=16, seed=1)
    two = poisoned([3], [33], num_heads=4, num_kv_heads=2, head_size=16, seed=2)
    backend = make(one)
    both = [(batch, batch.metadata()) for batch in (one, two)]
    for _, metadata in both:
        backend.prepare(metadata)
    for batch, metadata in both:
        output = torch.empty_like(batch.query)
        backend.forward(batch.query, batch.key_cache, batch.value_cache, output, metadata, scale=batch.scale)
        assert_attention_close(batch, output)


def test_an_engine_whose_every_step_is_a_graph_generates_what_torch_sdpa_does() -> None:
    from labkit import LLM

    small = {"device": "cpu", "max_model_len": 96, "max_num_seqs": 3, "max_num_batched_tokens": 64, "block_size": 16}
    prompts = ["some words to fill", "and more of them, quite a lot of them indeed", "x"]
    texts = []
    for backend, mode in (("TORCH_SDPA", "NONE"), ("FLEX_ATTENTION", "FULL")):
        with LLM("tiny-llama", attention_backend=backend, cudagraph_mode=mode, **small) as llm:  # type: ignore[arg-type]
            assert llm.config.cudagraph_mode.name == mode, "nothing was taken back"
            texts.append([output.token_ids for output in llm.generate(prompts)])
    assert texts[0] == texts[1]


# --- the compiled form ---------------------------------------------------------------------------------------------


def test_c35_one_compiled_form_serves_every_batch_and_every_layer() -> None:
    """Tracing needs no GPU. Requests of one edge page each: so much eager flex, which knows no lists, gets right."""
    from torch._dynamo.utils import counters

    layers = [torch.randn(2, pages, 64, 2, 16) for pages in (12, 12, 40, 13)]  # the size of the cache may change, too
    spec = AttentionSpec(6, 2, 16, "float32", 64, max_model_len=512)
    backend = FlexAttentionBackend(spec, CPU)
    before = counters["stats"]["unique_graphs"]
    for query_lens, kv_lens in (
        ([1, 1, 1], [5, 60, 9]),
        ([1], [5]),
        ([1] * 10, [30] * 10),
        ([2], [7]),
        ([4, 9], [9, 9]),
    ):
        tables = [[1 + i] for i in range(len(query_lens))]
        for keys, values in layers:
            batch = PagedBatch(torch.randn(sum(query_lens), 6, 16), keys, values, query_lens, kv_lens, tables, 0.25)
            metadata = batch.metadata(max_blocks=8)
            backend.prepare(metadata)
            made = metadata.scratch["flex"]
            query = torch.cat([batch.query, torch.zeros(batch.num_tokens, 4, 16)], 1)[:, :6]
            (flat_keys, _), (flat_values, _) = flat_cache(keys), flat_cache(values)
            query = flex._two_rows(query) if batch.num_tokens == 1 else query
            for tensor, axis in ((query, 0), (flat_keys, 1), (flat_values, 1)):
                flex._mark_dynamic(tensor, axis)
            call = flex._compiled(
                made.tile, 3, 64, made.lists[None].edges, None, 0.25, None, False, True, "float32", 16, "eager"
            )
            with torch.no_grad():
                output, lse = call(
                    query, flat_keys, flat_values, *made.arguments(), *made.lists[None].arguments(), None
                )
            assert_attention_close(batch, output[: batch.num_tokens], what=str(kv_lens))
            exact = dense_attention(batch)[1]
            torch.testing.assert_close(lse[: batch.num_tokens].double(), exact, atol=1e-4, rtol=0)
    assert counters["stats"]["unique_graphs"] == before + 1


# --- rules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", ["T4", "A100", "L4", "H200", "B200", "RTX 5090"])
def test_tiles_are_what_the_kernel_takes(gpu: str) -> None:
    capability = registry.platform_for_gpu(gpu).capability
    for head_size, dtype, size, length in itertools.product(
        (16, 64, 80, 128, 256), ("float16", "float32"), (16, 48, 64, 96, 256), (1, 5000)
    ):
        tile = flex_tile(AttentionSpec(8, 2, head_size, dtype, size), capability, length)
        assert tile is not None, (head_size, dtype)
        assert size % tile.block_n == 0 and tile.block_n >= 16 and tile.block_m >= 16
        assert tile.block_n & (tile.block_n - 1) == 0 and tile.block_m & (tile.block_m - 1) == 0


@pytest.mark.parametrize("block_m", [16, 32, 64, 128])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_every_batch_is_on_one_side_of_what_torch_compiles_apart(block_m: int, group: int) -> None:
    """Inductor asks whether a query has fewer than 128 rows, and that becomes a guard: 12 decodes, 13 decodes."""
    for num_reqs, num_tokens in ((1, 1), (1, 128), (5, 5), (33, 33), (7, 346)):
        tiles = num_tiles(num_tokens, num_reqs, group, block_m)
        assert tiles >= 2 and tiles * block_m >= max(128, num_tokens * group)


def test_it_claims_every_graph_and_says_on_a_cpu_what_it_costs() -> None:
    spec = AttentionSpec(9, 3, 64, "bfloat16", 64)
    assert FlexAttentionBackend.graph_support(spec, CUDA)[0] is AttentionCGSupport.ALWAYS
    assert not FlexAttentionBackend.why_not(spec, CUDA)
    (reason,) = FlexAttentionBackend.why_not(spec, registry.platform_for_gpu("T4"))
    assert (reason.field, reason.value) == ("dtype", "float16")
    batch = poisoned([1, 5], [9, 5], num_heads=4, num_kv_heads=2, head_size=16)
    (plan,) = make(batch).describe(batch.metadata())
    assert plan.kernel == "flex_attention" and "every score" in plan.note
    assert FlexAttentionBackend.availability().usable


def test_scores_are_cut_into_parts_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = poisoned([1, 40, 1], [70, 40, 7], num_heads=4, num_kv_heads=2, head_size=16)
    whole = attend(batch)[0]
    monkeypatch.setattr(flex, "CPU_SCORE_BYTES", 1)
    torch.testing.assert_close(attend(batch)[0], whole)
