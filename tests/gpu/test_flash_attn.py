"""FLASH_ATTN's versions on the GPU, each against dense float64 attention. A version is skipped if no library is there.

Everything that no request may read is NaN, but for one thing: where whole pages are loaded by TMA (FA3: pages that its
key tile divides, never 16 or 32; FA4: pages of just its key tile) the unused rows of a last page are multiplied by 0
and must be finite, as they are in the engine's cache. Such batches have finite pages here, and NaN in the padding.
FA4 compiles for seconds per combination: it runs a fixed list of pairs, the others run all.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from typing import Any

import pytest
import torch

from labkit.attention.flash_attn import FlashAttentionBackend, fa4_key_tile
from labkit.attention.flash_attn_providers import FlashAttnProvider, find_providers
from labkit.attention.interface import AttentionCGSupport, AttentionSpec, Platform
from labkit.attention.metadata import AttentionMetadata
from labkit.errors import BackendError
from tests.gpu.test_attention import CUDA, make, shapes
from tests.reference import PagedBatch, assert_attention_close, dense_attention, random_batch

HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256)
RATIOS = (1, 2, 3, 5, 7, 8, 16, 71)
PAGES = {2: (256, 512), 3: (16, 32, 48, 64, 128, 256, 768), 4: (16, 48, 64, 128, 256)}
PLATFORM = Platform("cuda", torch.cuda.get_device_capability() if torch.cuda.is_available() else None)


@pytest.fixture(params=[3, 4, 2], ids=["FA3", "FA4", "FA2"])
def version(request: pytest.FixtureRequest) -> int:
    """A version that a library here serves. One that is installed and fails its probe is a failure, not a skip."""
    provider(request.param)
    return request.param


def provider(version: int) -> FlashAttnProvider:
    mine = [p for p in find_providers() if p.version == version]
    usable = [p for p in mine if p.usable]
    if usable:
        return usable[0]
    why = "; ".join(f"{p.provider}: {p.reason}" for p in mine)
    missing = ("No module named 'flash_attn", "reads no pages", "has no kernels for")
    if all(any(words in p.reason for words in missing) for p in mine):
        pytest.skip(f"FA{version} is not installed for this GPU: {why}")
    pytest.fail(f"FA{version} is installed and not usable: {why}")


def batch_for(
    version: int, query_lens: list[int], kv_lens: list[int], heads: tuple[int, int] = (8, 2), head_size: int = 64,
    page: int | None = None, window: int | None = None, dtype: torch.dtype = torch.bfloat16, seed: int = 0,
    **more: Any,
) -> PagedBatch:  # fmt: skip
    """A batch with NaN wherever the version allows it, see the first paragraph."""
    page = page or PAGES[version][0]
    batch = random_batch(
        query_lens, kv_lens, num_heads=heads[0], num_kv_heads=heads[1], head_size=head_size, block_size=page,
        dtype=dtype, device=CUDA, seed=seed, **more,
    )  # fmt: skip
    by_tma = {3: page >= 64, 4: page == fa4_key_tile(PLATFORM, head_size, window is not None)}.get(version, False)
    if by_tma:
        batch.key_cache.nan_to_num_(0.5), batch.value_cache.nan_to_num_(0.25)
    return batch


def attend(
    version: int, batch: PagedBatch, pad: int = 0, spec: dict[str, Any] | None = None, **features: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of the real tokens, with `pad` NaN rows behind them; twice, since a layer follows a layer."""
    backend = make("FLASH_ATTN", batch, flash_attn_version=version, **(spec or {}))
    metadata = batch.metadata(pad_reqs=pad, pad_tokens=pad)
    query = torch.cat([batch.query, torch.full_like(batch.query[:1], math.nan).expand(pad, -1, -1)])
    output, lse = torch.full_like(query, math.nan), torch.full(query.shape[:2], math.nan, device=CUDA)
    backend.prepare(metadata)
    for place in (None, lse):
        output.fill_(math.nan)
        backend.forward(
            query, batch.key_cache, batch.value_cache, output, metadata, scale=batch.scale, lse=place, **features
        )
    return output[: batch.num_tokens], lse[: batch.num_tokens]


def check(version: int, batch: PagedBatch, what: str = "", pad: int = 0, **attended: Any) -> None:
    out, lse = attend(version, batch, pad, **attended)
    assert_attention_close(batch, out, what=f"FA{version} {what} {batch.query_lens} {batch.kv_lens}")
    exact = dense_attention(batch)[1]
    assert torch.equal(torch.isneginf(lse), torch.isneginf(exact))
    seen = torch.isfinite(exact)
    assert torch.allclose(lse.double()[seen], exact[seen], atol=5e-2, rtol=1e-3), what


COMBINATIONS = list(itertools.product(HEAD_SIZES, RATIOS))
FA4_PAIRS = [(64, 3), (64, 8), (80, 5), (96, 1), (112, 2), (128, 7), (128, 16), (192, 8), (256, 71)]


@pytest.mark.parametrize(("head_size", "ratio"), COMBINATIONS, ids=lambda n: str(n))
def test_mixed_batches(version: int, head_size: int, ratio: int) -> None:
    if version == 4 and (head_size, ratio) not in FA4_PAIRS:
        pytest.skip("not compiled: FA4 runs a fixed list of pairs")
    rng = random.Random(repr((version, head_size, ratio)))
    kv_heads = 1 if ratio >= 16 else 2
    dtype = torch.float16 if ratio % 2 == 0 else torch.bfloat16
    for _ in range(2):
        query_lens, kv_lens = shapes(rng, rng.randint(1, 12))
        batch = batch_for(
            version, query_lens, kv_lens, (ratio * kv_heads, kv_heads), head_size, rng.choice(PAGES[version][:2]),
            dtype=dtype, seed=rng.randint(0, 1 << 30),
        )  # fmt: skip
        check(version, batch, f"{head_size} {ratio}", pad=rng.choice([0, 3]))


def test_every_page_size(version: int) -> None:
    rng = random.Random(version)
    for page in PAGES[version]:
        for query_lens, kv_lens in (shapes(rng, 6), ([1] * 5, [1, 15, 16, 17, 700])):
            check(version, batch_for(version, query_lens, kv_lens, page=page, seed=page), f"pages of {page}", pad=2)


@pytest.mark.parametrize("batch_size", [1, 2, 7, 64])
@pytest.mark.parametrize("context", [1, 17, 512, 4000])
def test_decodes_of_any_length(version: int, batch_size: int, context: int) -> None:
    rng = random.Random(batch_size * 10_000 + context)
    kv_lens = [rng.randint(1, context) for _ in range(batch_size)]
    for heads in ((8, 2), (4, 4)) if version != 4 else ((8, 2),):
        check(version, batch_for(version, [1] * batch_size, kv_lens, heads, seed=context), f"{heads}", pad=3)


@pytest.mark.parametrize("window", [1, 16, 100, 5000])
def test_windows(version: int, window: int) -> None:
    for lens in (([1, 1, 1], [300, 17, 2]), ([1, 40, 120], [300, 60, 120])):
        batch = batch_for(version, *lens, window=window)
        out = attend(version, batch, 2, {"sliding_window": window}, sliding_window=window)[0]
        assert_attention_close(batch, out, what=f"FA{version}", window=window)


@pytest.mark.parametrize("lens", [([1, 1, 1], [900, 17, 2]), ([1, 40, 120], [300, 60, 120])], ids=["decode", "mixed"])
@pytest.mark.parametrize("feature", ["logits_soft_cap", "sinks"])
def test_c11_soft_cap_and_sinks_are_applied_or_refused(
    version: int, feature: str, lens: tuple[list[int], list[int]]
) -> None:
    batch = batch_for(version, *lens)
    batch.query *= 12
    # Whatever bfloat16 holds: FA3's builds take sinks of no other type.
    value: Any = 30.0 if feature == "logits_soft_cap" else torch.linspace(0, 40, 8, device=CUDA).bfloat16()
    spec = {"logits_soft_cap": 30.0} if feature == "logits_soft_cap" else {"has_sinks": True}
    if all(feature in p.lacks for p in find_providers() if p.version == version and p.usable):
        with pytest.raises(BackendError, match="does not implement"):
            make("FLASH_ATTN", batch, flash_attn_version=version, **spec)
        return
    out = attend(version, batch, 0, spec, **{feature: value})[0]
    named = {"soft_cap" if feature == "logits_soft_cap" else "sinks": value}
    assert_attention_close(batch, out, what=f"FA{version} {feature}", **named)
    with_it, without = dense_attention(batch, **named)[0], dense_attention(batch)[0]
    assert (out.double() - with_it).abs().max() < (out.double() - without).abs().max(), f"{feature} was ignored"


@pytest.mark.parametrize("num_splits", [1, 3, 16])
def test_any_number_of_splits_gives_the_same(version: int, num_splits: int) -> None:
    batch = batch_for(version, [1, 1, 30], [1500, 33, 700])
    refused = (version == 4 and num_splits > 1) or "num_splits" in provider(version).lacks
    if refused:
        with pytest.raises(BackendError, match="splits"):
            make("FLASH_ATTN", batch, flash_attn_version=version, num_splits=num_splits)
        return
    check(version, batch, f"{num_splits} splits", spec={"num_splits": num_splits})


def test_c08_c09_rows_that_see_nothing(version: int) -> None:
    for query_lens, kv_lens in (([5, 2], [2, 5]), ([1, 3, 300, 1], [0, 0, 20, 40]), ([0, 1, 0, 1], [0, 3, 0, 5])):
        batch = batch_for(version, query_lens, kv_lens)
        out, lse = attend(version, batch)
        assert_attention_close(batch, out, what=f"FA{version} {query_lens} {kv_lens}")
        blind = torch.isneginf(dense_attention(batch)[1])
        assert (out[blind] == 0).all() and torch.isneginf(lse[blind]).all() and torch.isfinite(lse[~blind]).all()


def test_caches_and_queries_that_are_views(version: int) -> None:
    """Layout HND, K and V in one tensor, and the query inside a fused projection."""
    for layout in ("NHD", "HND"):
        batch = batch_for(version, [1, 40, 3], [300, 60, 3])
        both = torch.stack([batch.key_cache, batch.value_cache], dim=1)  # [NB, 2, BS, H, D]
        if layout == "HND":
            both = both.transpose(2, 3).contiguous().transpose(2, 3)
        batch.key_cache, batch.value_cache = both[:, 0], both[:, 1]
        fused = torch.randn((batch.num_tokens, 12, 64), device=CUDA).bfloat16()
        batch.query = fused[:, :8]
        check_views = attend(version, batch, 0, {"kv_cache_layout": layout})[0]
        assert_attention_close(batch, check_views, what=f"FA{version} {layout}")


# --- graphs ----------------------------------------------------------------------------------------------------------


class Captured:
    """A graph over static tensors, filled and prepared before each replay as the engine does it."""

    def __init__(
        self, backend: FlashAttentionBackend, caches: PagedBatch, reqs: int, tokens: int, query_len: int, longest: int,
        **features: Any,
    ) -> None:  # fmt: skip
        page = caches.key_cache.shape[1]
        self.backend, self.caches, self.features = backend, caches, features
        self.query = torch.randn((tokens, *caches.query.shape[1:]), device=CUDA).to(caches.query.dtype)
        self.output = torch.empty_like(self.query)
        starts = torch.zeros(reqs + 1, dtype=torch.int32, device=CUDA)
        lens = torch.zeros(reqs, dtype=torch.int32, device=CUDA)
        table = torch.zeros((reqs, -(-longest // page)), dtype=torch.int32, device=CUDA)
        slots = torch.full((tokens,), -1, dtype=torch.int64, device=CUDA)
        self.metadata = AttentionMetadata(
            reqs, tokens, reqs, tokens, query_len, longest, starts, lens, table, slots, starts.cpu().numpy(),
            lens.cpu().numpy(), for_graph=True, is_uniform_decode=query_len == 1,
        )  # fmt: skip
        # The dummy batch that a capture sees: short, and of another shape than what comes later.
        dummy = [1] * reqs if query_len == 1 else [tokens - reqs + 1, *[1] * (reqs - 1)]
        self.fill(dummy, dummy)
        backend.prepare(self.metadata)
        self.baked = dataclasses.replace(self.metadata)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.forward()
        stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.forward()

    def forward(self) -> None:
        c = self.caches
        self.backend.forward(
            self.query, c.key_cache, c.value_cache, self.output, self.baked, scale=c.scale, **self.features
        )

    def fill(self, query_lens: list[int], kv_lens: list[int], seed: int = 0) -> PagedBatch:
        meta, page, blocks = self.metadata, self.caches.key_cache.shape[1], self.caches.key_cache.shape[0]
        rng, total = random.Random(seed), sum(query_lens)
        starts = list(itertools.accumulate(query_lens, initial=0))
        starts += [total] * (meta.num_reqs + 1 - len(starts))
        lens = kv_lens + [0] * (meta.num_reqs - len(kv_lens))
        tables = [[rng.randrange(1, blocks) for _ in range(-(-n // page))] for n in kv_lens]
        rows = torch.zeros_like(meta.block_table, device="cpu")
        for row, taken in enumerate(tables):
            rows[row, : len(taken)] = torch.tensor(taken, dtype=torch.int32)
        meta.query_start_loc.copy_(torch.tensor(starts, dtype=torch.int32))
        meta.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        meta.block_table.copy_(rows)
        meta.query_start_loc_cpu[:], meta.seq_lens_cpu[:] = starts, lens
        meta.num_actual_reqs, meta.num_actual_tokens = len(query_lens), total
        self.query.normal_()
        real = self.query[:total].clone()
        self.query[total:] = math.nan
        c = self.caches
        return PagedBatch(real, c.key_cache, c.value_cache, query_lens, kv_lens, tables, c.scale)

    def replay(self, query_lens: list[int], kv_lens: list[int], seed: int = 0, what: str = "", **dense: Any) -> None:
        batch = self.fill(query_lens, kv_lens, seed)
        self.output.fill_(math.nan)
        self.backend.prepare(dataclasses.replace(self.metadata, scratch={}))
        self.graph.replay()
        torch.cuda.synchronize()
        assert_attention_close(batch, self.output[: batch.num_tokens], what=f"{what} {query_lens} {kv_lens}", **dense)


def cache_for(version: int, heads: tuple[int, int] = (8, 2), page: int | None = None) -> PagedBatch:
    """Finite pages, as the engine's are, enough for scattered tables."""
    batch = batch_for(version, [1], [1], heads, page=page, spare_blocks=600)
    batch.key_cache.nan_to_num_(0.5), batch.value_cache.nan_to_num_(0.25)
    return batch


def uniform_compositions(reqs: int, longest: int) -> list[tuple[list[int], list[int]]]:
    rng = random.Random(3)
    some = [rng.randint(1, longest) for _ in range(reqs)]
    return [
        ([1] * reqs, [longest] * reqs), ([1] * reqs, [1] * reqs), ([1] * reqs, some), ([1], [longest]),
        ([1] * (reqs - 1), some[1:]), ([1, 1], [1, longest]), ([1] * reqs, [longest] + [1] * (reqs - 1)),
    ]  # fmt: skip


def mixed_compositions(reqs: int, tokens: int, longest: int) -> list[tuple[list[int], list[int]]]:
    rng, out = random.Random(5), []
    for _ in range(6):
        n = rng.randint(1, reqs)
        query = [1] * n
        for _ in range(rng.randint(0, tokens - n)):
            query[rng.randrange(n)] += 1
        out.append((query, [rng.randint(q, longest) for q in query]))
    return [
        *out, ([tokens], [tokens]), ([tokens], [longest]), ([1] * reqs, [longest] * reqs), ([1], [1]),
        ([tokens - 1, 1], [tokens - 1, longest]),
    ]  # fmt: skip


@pytest.mark.parametrize("reqs", [1, 8])
def test_a_uniform_graph_serves_every_decode_batch(version: int, reqs: int) -> None:
    caches = cache_for(version)
    backend = make("FLASH_ATTN", caches, flash_attn_version=version)
    graph = Captured(backend, caches, reqs, reqs, 1, 4096)
    for i, (query, kv) in enumerate(
        uniform_compositions(reqs, 4096) if reqs > 1 else [([1], [n]) for n in (4096, 1, 900)]
    ):
        graph.replay(query, kv, i, f"FA{version}")


@pytest.mark.parametrize("page", [0, 1], ids=["first page size", "last page size"])
def test_a_mixed_graph_serves_every_batch_where_the_tier_says_so(version: int, page: int) -> None:
    caches = cache_for(version, page=PAGES[version][-1] if page else None)
    backend = make("FLASH_ATTN", caches, flash_attn_version=version)
    tier, why = FlashAttentionBackend.graph_support(backend.spec, PLATFORM)
    if tier is not AttentionCGSupport.ALWAYS:
        assert version == 2 and tier is AttentionCGSupport.UNIFORM_BATCH and "mixed" in why
        return
    graph = Captured(backend, caches, 8, 64, 64, 4096)
    for i, (query, kv) in enumerate(mixed_compositions(8, 64, 4096)):
        graph.replay(query, kv, i, f"FA{version}")


def test_graphs_of_one_size_live_side_by_side(version: int) -> None:
    """A uniform and a mixed graph with the same padded numbers, and others, replayed in turn."""
    caches = cache_for(version)
    backend = make("FLASH_ATTN", caches, flash_attn_version=version)
    graphs = [Captured(backend, caches, 8, 8, 1, 2048), Captured(backend, caches, 4, 4, 1, 2048)]
    if version != 2:
        graphs += [Captured(backend, caches, 8, 8, 8, 2048), Captured(backend, caches, 8, 32, 32, 2048)]
    rng = random.Random(1)
    for step in range(12):
        graph = graphs[step % len(graphs)]
        n = rng.randint(1, graph.metadata.num_reqs)
        query = [1] * n
        if graph.metadata.max_query_len > 1:
            query[rng.randrange(n)] += graph.metadata.num_tokens - n
        graph.replay(query, [rng.randint(q, 2048) for q in query], step, f"FA{version}")


def test_a_window_under_a_graph(version: int) -> None:
    caches = cache_for(version)
    backend = make("FLASH_ATTN", caches, flash_attn_version=version, sliding_window=100)
    graph = Captured(backend, caches, 8, 8, 1, 4096, sliding_window=100)
    for i, (query, kv) in enumerate(uniform_compositions(8, 4096)):
        graph.replay(query, kv, i, f"FA{version}", window=100)


# --- what is refused, and what is found ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "changes", "words"),
    [
        (2, {"block_size": 16}, "FA2; set block_size to 256"),
        (3, {"block_size": 24}, "pages of 24"),
        (3, {"num_splits": 300}, "256 splits"),
        (4, {"num_splits": 2}, "splits"),
        (4, {"head_size": 72, "block_size": 16}, "set block_size to 128"),
        (3, {"dtype": "float32"}, "float32"),
        (None, {"head_size": 264}, "head size 264"),
        (None, {"num_heads": 6, "num_kv_heads": 4}, "no multiple"),
        (None, {"kv_cache_dtype": "fp8_e4m3"}, "fp8"),
        (None, {"family": "MLA"}, "MLA"),
    ],
    ids=str,
)
def test_each_refusal_is_one(asked: int | None, changes: dict[str, Any], words: str) -> None:
    if asked is not None:
        provider(asked)
    values = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16", "block_size": 16, **changes}
    with pytest.raises(BackendError, match=words):
        FlashAttentionBackend(AttentionSpec(**values, flash_attn_version=asked), CUDA)


def test_every_provider_is_usable_or_says_why_and_auto_takes_the_first() -> None:
    found = find_providers()
    assert {p.version for p in found} == {2, 3, 4} and all(p.usable != bool(p.reason) for p in found)
    assert find_providers() is found, "probed once"
    available = FlashAttentionBackend.availability()
    if not available.usable:
        pytest.skip(available.reason)
    values = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16", "block_size": 256}
    backend = FlashAttentionBackend(AttentionSpec(**values), CUDA)
    order = {9: (3, 4, 2), 10: (4, 2)}.get(PLATFORM.capability[0] if PLATFORM.capability else 0, (2,))
    usable = {p.version for p in found if p.usable}
    assert backend.version == next(v for v in order if v in usable)


def test_the_bare_call_gives_the_same(version: int) -> None:
    for lens in (([1] * 4, [300, 17, 2, 900]), ([1, 40, 120], [300, 60, 120])):
        batch = batch_for(version, *lens)
        backend, output = make("FLASH_ATTN", batch, flash_attn_version=version), torch.empty_like(batch.query)
        call = backend.bare_call(batch.query, batch.key_cache, batch.value_cache, output, batch.metadata(), batch.scale)
        assert call is not None
        result = call()
        assert_attention_close(batch, result[0] if isinstance(result, tuple) else result, what=f"FA{version}")


def test_warm_up_leaves_nothing_to_compile(version: int) -> None:
    batch = batch_for(version, [1, 1], [40, 20])
    backend, said = make("FLASH_ATTN", batch, flash_attn_version=version), []
    backend.warm_up(lambda *what: said.append(what))
    assert bool(said) == (version == 4)
    check(version, batch)


def test_c16_pages_beyond_two_to_the_31_elements(version: int) -> None:
    """Last in the file: an address computed in 32 bits would end the process's use of the GPU."""
    page = PAGES[version][0]
    low = batch_for(version, [1, 5], [40, 20], (32, 8), 128)
    low.key_cache.nan_to_num_(0.5), low.value_cache.nan_to_num_(0.25)
    blocks = (1 << 31) // (page * 8 * 128) + 64
    caches = [torch.zeros((blocks, page, 8, 128), dtype=torch.bfloat16, device=CUDA) for _ in range(2)]
    shift = blocks - low.key_cache.shape[0]
    for big, small in zip(caches, (low.key_cache, low.value_cache), strict=True):
        big[shift:] = small
    tables = [[b + shift for b in t] for t in low.tables]
    high = PagedBatch(low.query, *caches, low.query_lens, low.kv_lens, tables, low.scale)
    assert torch.equal(attend(version, high)[0], attend(version, low)[0])
