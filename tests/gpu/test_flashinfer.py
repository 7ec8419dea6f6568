"""FLASHINFER on the GPU against dense float64 attention: every compiled variant, eager and captured.

Each entry of COMPILED is a module that FlashInfer compiles once, about 40 s; `python -m tests.gpu.compile_flashinfer`
compiles all of them side by side beforehand.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from labkit import LLM
from labkit.attention.flashinfer import FlashInferBackend
from labkit.attention.interface import AttentionSpec
from tests.reference import PagedBatch, assert_attention_close, dense_attention, random_batch
from tests.teacher import assert_same_logits, teach

CUDA = torch.device("cuda")
#: (head size, dtype, window?, soft-cap?): what FlashInfer's modules differ in. The tests need no other.
COMPILED = (
    (64, "bfloat16", False, False), (64, "bfloat16", True, False), (64, "bfloat16", False, True),
    (64, "bfloat16", True, True), (128, "bfloat16", False, False), (128, "bfloat16", True, False),
    (128, "bfloat16", False, True), (128, "bfloat16", True, True), (128, "float16", False, False),
    (256, "bfloat16", False, False),
)  # fmt: skip
HEADS = {64: [(9, 3), (8, 8), (32, 8), (71, 1)], 128: [(32, 8), (28, 4), (16, 16), (8, 1)], 256: [(8, 1), (16, 8)]}


@pytest.fixture(scope="module", autouse=True)
def _loads() -> None:
    found = FlashInferBackend.availability()
    if not found.usable:
        pytest.skip(f"FlashInfer cannot run here: {found.reason}")


def spec_of(compiled: tuple[int, str, bool, bool], heads: tuple[int, int], **changes: Any) -> AttentionSpec:
    size, dtype, window, cap = compiled
    values = {
        "block_size": 16,
        "sliding_window": 100 if window else None,
        "logits_soft_cap": 30.0 if cap else None,
        "max_model_len": 4096,
        "max_num_seqs": 64,
        **changes,
    }
    return AttentionSpec(*heads, size, dtype, **values)


def batch_of(
    spec: AttentionSpec, query_lens: list[int], kv_lens: list[int], seed: int = 0, **options: Any
) -> PagedBatch:
    batch = random_batch(
        query_lens, kv_lens, num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads, head_size=spec.head_size,
        block_size=spec.block_size, dtype=getattr(torch, spec.dtype), device=CUDA, seed=seed, **options,
    )  # fmt: skip
    if spec.logits_soft_cap:
        batch.query *= 12  # scores that reach the cap
    return batch


def caches_of(spec: AttentionSpec, batch: PagedBatch) -> list[torch.Tensor]:
    """The batch's caches in the layout of `spec`, logical axes as ever."""
    both = [batch.key_cache, batch.value_cache]
    if spec.kv_cache_layout == "HND":
        both = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in both]
    return both


def features(spec: AttentionSpec) -> dict[str, Any]:
    return {"sliding_window": spec.sliding_window, "logits_soft_cap": spec.logits_soft_cap}


def expected(spec: AttentionSpec) -> dict[str, Any]:
    return {"window": spec.sliding_window, "soft_cap": spec.logits_soft_cap}


def attend(backend: FlashInferBackend, batch: PagedBatch, pad: int = 0, with_lse: bool = False) -> tuple[Any, Any]:
    """Output and LSE of the real rows; padding behind them, and all that nobody may read, is NaN."""
    spec, metadata = backend.spec, batch.metadata(pad_reqs=pad, pad_tokens=pad)
    rest = torch.full((pad, *batch.query.shape[1:]), float("nan"), dtype=batch.query.dtype, device=CUDA)
    query = torch.cat([batch.query, rest])
    output = torch.full_like(query, float("nan"))
    lse = torch.full(query.shape[:2], float("nan"), device=CUDA) if with_lse else None
    backend.prepare(metadata)
    backend.forward(query, *caches_of(spec, batch), output, metadata, scale=batch.scale, lse=lse, **features(spec))
    n = batch.num_tokens
    return output[:n], lse[:n] if lse is not None else None


def assert_lse_close(spec: AttentionSpec, batch: PagedBatch, lse: torch.Tensor, what: str) -> None:
    _, exact = dense_attention(batch, **expected(spec))
    tolerance = 5e-2 if spec.logits_soft_cap else 5e-3  # its tanh is the hardware's approximation
    torch.testing.assert_close(lse.double(), exact, atol=tolerance, rtol=tolerance, msg=lambda m: f"{what}: {m}")


def shapes(rng: random.Random, n: int, longest: int = 1500) -> tuple[list[int], list[int]]:
    query = [rng.choice([1, 1, rng.randint(2, 70), rng.randint(100, 300)]) for _ in range(n)]
    return query, [q + rng.choice([0, rng.randint(0, longest)]) for q in query]


@pytest.mark.parametrize("compiled", COMPILED, ids=str)
def test_mixed_batches_of_every_module(compiled: tuple[int, str, bool, bool]) -> None:
    rng = random.Random(repr(compiled))
    for turn in range(4):
        spec = spec_of(
            compiled, rng.choice(HEADS[compiled[0]]), block_size=rng.choice([8, 16, 32, 64, 128]),
            kv_cache_layout=("NHD", "HND")[turn % 2],
        )  # fmt: skip
        backend = FlashInferBackend(spec, CUDA)
        for seed in range(3):
            query_lens, kv_lens = shapes(rng, rng.randint(1, 12))
            batch, what = batch_of(spec, query_lens, kv_lens, seed), f"{spec} {query_lens} {kv_lens}"
            output, lse = attend(backend, batch, pad=3, with_lse=True)
            assert_attention_close(batch, output, what=what, **expected(spec))
            assert_attention_close(batch, attend(backend, batch)[0], what=what, **expected(spec))
            assert_lse_close(spec, batch, lse, what)


@pytest.mark.parametrize("batch_size", [1, 2, 7, 32, 64])
@pytest.mark.parametrize("context", [1, 17, 512, 4000])
def test_decodes_of_any_length(batch_size: int, context: int) -> None:
    rng = random.Random(batch_size * 10_000 + context)
    kv_lens = [rng.randint(1, context) for _ in range(batch_size)]
    for compiled, heads in ((COMPILED[0], (9, 3)), (COMPILED[4], (32, 8))):
        spec = spec_of(compiled, heads)
        batch = batch_of(spec, [1] * batch_size, kv_lens, seed=context)
        assert_attention_close(batch, attend(FlashInferBackend(spec, CUDA), batch, pad=3)[0], what=str(kv_lens))


@pytest.mark.parametrize("window", [1, 16, 100, 3000])
def test_windows(window: int) -> None:
    spec = spec_of(COMPILED[1], (8, 2), sliding_window=window)
    backend = FlashInferBackend(spec, CUDA)
    for lens in (([1, 1, 1], [3000, 17, 2]), ([1, 40, 120, 300], [300, 60, 120, 4000])):
        batch = batch_of(spec, *lens)
        assert_attention_close(batch, attend(backend, batch)[0], window=window, what=str(lens))


def test_a_soft_cap_is_not_ignored() -> None:
    spec = spec_of(COMPILED[2], (8, 2))
    batch = batch_of(spec, [1, 40, 120], [300, 60, 120])
    capped, _ = attend(FlashInferBackend(spec, CUDA), batch)
    exact, uncapped = dense_attention(batch, soft_cap=30.0)[0], dense_attention(batch)[0]
    assert (capped.double() - exact).abs().max() < (capped.double() - uncapped).abs().max()


def test_a_scale_of_the_models_own() -> None:
    spec = spec_of(COMPILED[0], (9, 3))
    batch = batch_of(spec, [1, 40], [300, 60])
    batch.scale = 0.07
    assert_attention_close(batch, attend(FlashInferBackend(spec, CUDA), batch)[0])


@pytest.mark.parametrize("lens", [15, 16, 17, 32])
def test_c17_the_tail_of_the_last_page_is_read_by_nobody(lens: int) -> None:
    """C17. The rest of every page, every other page and the null block are NaN; rows behind the batch stay NaN."""
    for layout in ("NHD", "HND"):
        spec = spec_of(COMPILED[0], (8, 2), kv_cache_layout=layout)
        batch = batch_of(spec, [1, 9, 1], [lens, lens + 64, 1])
        assert_attention_close(batch, attend(FlashInferBackend(spec, CUDA), batch, pad=5)[0], what=layout)


@pytest.mark.parametrize("compiled", [COMPILED[0], COMPILED[3], COMPILED[9]], ids=str)
def test_rows_that_see_nothing_give_zero_and_minus_infinity(compiled: tuple[int, str, bool, bool]) -> None:
    spec = spec_of(compiled, HEADS[compiled[0]][1])
    batch = batch_of(spec, [1, 3, 200, 2, 90, 1], [20, 0, 70, 40, 1, 0])
    output, lse = attend(FlashInferBackend(spec, CUDA), batch, pad=2, with_lse=True)
    assert_attention_close(batch, output, **expected(spec))
    _, exact = dense_attention(batch, **expected(spec))
    blind = torch.isneginf(exact)
    assert int(blind[:, 0].sum()) == 3 + 130 + 89 + 1
    assert (output[blind] == 0).all() and torch.equal(torch.isneginf(lse), blind)


def test_c18_the_order_of_the_requests_is_the_order_of_the_answers() -> None:
    spec = spec_of(COMPILED[4], (32, 8))
    batch, backend, rng = batch_of(spec, [50, 1, 1, 1, 7], [50, 300, 90, 17, 700]), None, random.Random(2)
    backend = FlashInferBackend(spec, CUDA)
    queries, exact = batch.query.split(batch.query_lens), attend(backend, batch)[0].split(batch.query_lens)
    for _ in range(8):
        order = rng.sample(range(5), 5)
        shuffled = PagedBatch(
            torch.cat([queries[i] for i in order]), batch.key_cache, batch.value_cache,
            *([values[i] for i in order] for values in (batch.query_lens, batch.kv_lens, batch.tables)), batch.scale,
        )  # fmt: skip
        wanted = torch.cat([exact[i] for i in order])
        torch.testing.assert_close(attend(backend, shuffled)[0], wanted, atol=2e-2, rtol=2e-2)


def test_c16_pages_beyond_two_to_the_31_elements() -> None:
    spec = spec_of(COMPILED[4], (32, 8))
    low = batch_of(spec, [1, 5], [40, 20], poison=False)
    blocks = (1 << 31) // (16 * 8 * 128) + 64
    caches = [torch.zeros((blocks, 16, 8, 128), dtype=torch.bfloat16, device=CUDA) for _ in range(2)]
    shift = blocks - low.key_cache.shape[0]
    for big, small in zip(caches, (low.key_cache, low.value_cache), strict=True):
        big[shift:] = small
    tables = [[block + shift for block in table] for table in low.tables]
    high = PagedBatch(low.query, *caches, low.query_lens, low.kv_lens, tables, low.scale)
    backend = FlashInferBackend(spec, CUDA)
    assert torch.equal(attend(backend, high)[0], attend(backend, low)[0])


def test_a_plan_does_not_overtake_the_copy_of_the_one_before() -> None:
    """Steps planned in a row while the GPU is far behind; every one must run with its own schedule and pages."""
    spec, rng = spec_of(COMPILED[0], (9, 3)), random.Random(5)
    backend, done = FlashInferBackend(spec, CUDA), []
    batches = [batch_of(spec, *shapes(rng, rng.randint(1, 20)), seed=i) for i in range(12)]
    steps = [(batch, batch.metadata(), torch.full_like(batch.query, float("nan"))) for batch in batches]
    attend(backend, batches[0])
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # cycles, a tenth of a second
    for batch, metadata, output in steps:
        backend.prepare(metadata)
        backend.forward(batch.query, batch.key_cache, batch.value_cache, output, metadata, scale=batch.scale)
        done.append(output)
    for batch, output in zip(batches, done, strict=True):
        assert_attention_close(batch, output)


def test_preparing_reads_nothing_back_from_the_device() -> None:
    spec = spec_of(COMPILED[0], (9, 3))
    backend, batch = FlashInferBackend(spec, CUDA), batch_of(spec, [1, 20, 1], [30, 20, 700])
    attend(backend, batch)
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


class Captured:
    """A CUDA graph of one call at a padded shape, captured with the dummy batch that the engine uses."""

    def __init__(
        self, backend: FlashInferBackend, reqs: int, tokens: int, uniform: bool, with_lse: bool = False
    ) -> None:
        spec = self.spec = backend.spec
        self.backend, self.reqs, self.tokens, self.uniform = backend, reqs, tokens, uniform
        blocks = reqs * 600 // spec.block_size + tokens // spec.block_size + reqs + 8
        self.pool = batch_of(spec, [1], [1], poison=False, spare_blocks=blocks)
        self.caches = caches_of(spec, self.pool)
        self.query = torch.zeros((tokens, spec.num_heads, spec.head_size), dtype=self.pool.query.dtype, device=CUDA)
        self.output = torch.zeros_like(self.query)
        self.lse = torch.zeros((tokens, spec.num_heads), device=CUDA) if with_lse else None
        self.table = torch.zeros((reqs, spec.max_model_len // spec.block_size), dtype=torch.int32, device=CUDA)
        spread = [1] * (reqs - 1) + [tokens - reqs + 1]
        metadata = self.metadata(spread, spread)
        backend.prepare(metadata)

        def forward() -> None:
            backend.forward(
                self.query, *self.caches, self.output, metadata, scale=self.pool.scale, lse=self.lse, **features(spec)
            )

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            forward()
        stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            forward()

    def batch(self, query_lens: list[int], kv_lens: list[int], tables: list[list[int]]) -> PagedBatch:
        query = self.query[: sum(query_lens)]
        return PagedBatch(
            query, self.pool.key_cache, self.pool.value_cache, query_lens, kv_lens, tables, self.pool.scale
        )

    def metadata(self, query_lens: list[int], kv_lens: list[int]) -> Any:
        batch = self.batch(query_lens, kv_lens, [[]] * len(query_lens))
        metadata = batch.metadata(pad_reqs=self.reqs - len(query_lens), pad_tokens=self.tokens - sum(query_lens))
        metadata.block_table, metadata.for_graph = self.table, True
        metadata.max_query_len = 1 if self.uniform else self.tokens
        metadata.max_seq_len = self.spec.max_model_len
        return metadata

    def replay(self, query_lens: list[int], kv_lens: list[int], rng: random.Random) -> None:
        page, n = self.spec.block_size, sum(query_lens)
        self.query[:n] = torch.randn_like(self.query[:n]) * (12 if self.spec.logits_soft_cap else 1)
        self.query[n:] = float("nan")
        self.output.fill_(float("nan"))
        ids = rng.sample(range(1, len(self.pool.key_cache)), sum(-(-k // page) for k in kv_lens))
        tables = [[ids.pop() for _ in range(-(-k // page))] for k in kv_lens]
        self.table.zero_()
        for row, table in enumerate(tables):
            self.table[row, : len(table)] = torch.tensor(table, dtype=torch.int32, device=CUDA)
        self.backend.prepare(self.metadata(query_lens, kv_lens))
        self.graph.replay()
        torch.cuda.synchronize()
        batch, what = self.batch(query_lens, kv_lens, tables), f"{self.reqs, self.tokens} {query_lens} {kv_lens}"
        assert_attention_close(batch, self.output[:n], what=what, **expected(self.spec))
        if self.lse is not None:
            assert_lse_close(self.spec, batch, self.lse[:n], what)


def composition(rng: random.Random, reqs: int, tokens: int, uniform: bool) -> tuple[list[int], list[int]]:
    if uniform:
        lens = [1] * rng.randint(1, reqs)
    else:
        cuts = sorted(rng.sample(range(1, tokens + 1), rng.randint(1, min(reqs, tokens))))
        lens = [b - a for a, b in zip([0, *cuts], cuts, strict=False)]
    return lens, [n + rng.choice([0, rng.randint(0, 500)]) for n in lens]


@pytest.mark.parametrize("compiled", [COMPILED[0], COMPILED[1], COMPILED[4], COMPILED[7], COMPILED[9]], ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_graphs_serve_every_composition_of_their_shape(compiled: tuple[int, str, bool, bool], layout: str) -> None:
    """Tier ALWAYS: uniform and mixed shapes live side by side and take turns with each other and with eager steps."""
    rng = random.Random(repr((compiled, layout)))
    spec = spec_of(compiled, HEADS[compiled[0]][0], kv_cache_layout=layout)
    backend = FlashInferBackend(spec, CUDA)
    shapes_ = [(16, 256, False), (32, 32, False), (32, 32, True), (8, 8, True), (1, 64, False), (1, 1, True)]
    graphs = [Captured(backend, *shape, with_lse=True) for shape in shapes_]
    for turn in range(18):
        graph = graphs[turn % len(graphs)]
        graph.replay(*composition(rng, graph.reqs, graph.tokens, graph.uniform), rng)
        if turn % 5 == 0:
            batch = batch_of(spec, *shapes(rng, 4), seed=turn)
            assert_attention_close(batch, attend(backend, batch)[0], what="eager", **expected(spec))
    graphs[0].replay([256], [256], rng)
    graphs[1].replay([32], [500], rng)
    graphs[2].replay([1] * 32, [1] * 32, rng)
    graphs[3].replay([1] * 8, [500] * 8, rng)
    graphs[3].replay([1, 1], [0, 5], rng)


def test_a_wide_mixed_shape_finds_its_workspace() -> None:
    """More partial results than the workspace of the first shape holds: it grows, and older graphs keep theirs."""
    spec, rng = spec_of(COMPILED[4], (32, 8), max_num_seqs=256), random.Random(0)
    backend = FlashInferBackend(spec, CUDA)
    small = Captured(backend, 8, 8, True)
    before = backend._workspace.numel()
    large = Captured(backend, 200, 512, False)
    assert backend._workspace.numel() > before
    for graph in (small, large, small, large):
        graph.replay(*composition(rng, graph.reqs, graph.tokens, graph.uniform), rng)


def test_what_is_compiled_is_announced_and_found_again() -> None:
    spec = spec_of(COMPILED[0], (9, 3))
    said: list[tuple] = []
    FlashInferBackend(spec, CUDA).warm_up(lambda *call: said.append(call))
    assert FlashInferBackend.compile_note(spec) is None
    assert all(call[0] == "compiling" for call in said)
    other = FlashInferBackend.compile_note(spec_of((64, "float16", True, True), (9, 3)))
    assert other is None or ("head size 64 in float16" in other and "soft-capping" in other)


def test_the_plan_is_described() -> None:
    spec = spec_of(COMPILED[4], (32, 8))
    backend, batch = FlashInferBackend(spec, CUDA), batch_of(spec, [1], [4000])
    metadata = batch.metadata()
    backend.prepare(metadata)
    plans = backend.describe(metadata)
    assert len(plans) == 2 and plans[0].num_splits > 1 and plans[0].grid is not None, plans
    call = backend.bare_call(
        batch.query, batch.key_cache, batch.value_cache, torch.empty_like(batch.query), metadata, batch.scale
    )
    assert call is not None
    assert_attention_close(batch, call())


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
