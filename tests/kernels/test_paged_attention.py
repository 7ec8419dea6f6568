"""The paged attention kernels in the interpreter against dense float64 attention: mixed batches, features, poison."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
import torch

from labkit.attention import triton_attn
from labkit.errors import BackendError
from tests.kernels.harness import check, make, run
from tests.reference import assert_attention_close, dense_attention, random_batch

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    # log2 of an empty row's sum, which the kernel then replaces by −inf.
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
]

F32, F16 = torch.float32, torch.float16


@pytest.mark.parametrize("dtype", [F32, F16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(
    "heads", [(28, 4), (24, 4), (40, 8), (71, 1), (9, 3), (32, 1), (4, 4)], ids=lambda h: f"{h[0]}over{h[1]}"
)
def test_c12_any_ratio_of_query_to_kv_heads(heads: tuple[int, int], dtype: torch.dtype) -> None:
    """Groups that are no power of two or larger than a tile equal repeat_interleave; neighbours are left alone."""
    check(random_batch([1, 3], [18, 5], num_heads=heads[0], num_kv_heads=heads[1], head_size=32, dtype=dtype))


def test_c12_heads_that_do_not_divide_are_refused() -> None:
    batch = random_batch([1], [5], num_heads=6, num_kv_heads=4, head_size=32)
    with pytest.raises(BackendError, match="no multiple of 4 KV heads"):
        make(batch)


@pytest.mark.parametrize("head_size", [32, 40, 64, 80, 96, 112, 128, 192, 256])
def test_c13_every_head_size_to_its_last_dimension(head_size: int) -> None:
    dtype = F16 if head_size in (64, 112, 192) else F32
    check(random_batch([2, 1], [20, 33], num_heads=2, num_kv_heads=1, head_size=head_size, dtype=dtype))


@pytest.mark.parametrize("splits", [0, 3], ids=["unified", "split"])
@pytest.mark.parametrize("seed", range(4))
def test_random_mixed_batches(seed: int, splits: int) -> None:
    """Decodes, chunks and prefills together, lengths around tile and page edges, all features at random."""
    rng = random.Random(seed * 10 + splits)
    group, kv_heads = rng.choice([(1, 2), (3, 1), (5, 1), (4, 2)])
    query = [1 if splits else rng.choice([1, 1, 2, 5, 17, 40]) for _ in range(3)]
    kv = [n + rng.choice([0, 1, 15, 16, 31, 63, 64, 100]) for n in query]
    options: dict[str, object] = {}
    if rng.random() < 0.6:
        options["window"] = rng.choice([1, 5, 16, 33])
    if rng.random() < 0.5:
        options["soft_cap"] = rng.choice([2.0, 30.0])
    if rng.random() < 0.5:
        options["sinks"] = torch.randn(group * kv_heads, generator=torch.Generator().manual_seed(seed))
    batch = random_batch(
        query, kv, num_heads=group * kv_heads, num_kv_heads=kv_heads, head_size=rng.choice([32, 48, 64]),
        block_size=rng.choice([16, 32, 48]), dtype=rng.choice([F32, F16]), seed=seed,
    )  # fmt: skip
    check(batch, splits=splits, **options)


@pytest.mark.parametrize(("query", "kv"), [(2, 5), (5, 2), (3, 0), (1, 1)])
def test_c08_causal_is_bottom_right(query: int, kv: int) -> None:
    """The last row sees every key; rows that see nothing are exactly 0 with LSE −inf."""
    batch = random_batch([query], [kv], num_heads=4, num_kv_heads=2, head_size=32)
    output, lse = run(batch)
    check(batch)
    empty = max(0, query - kv)
    assert (output[:empty] == 0).all() and torch.isneginf(lse[:empty]).all()
    assert torch.isfinite(lse[empty:]).all()


@pytest.mark.parametrize("splits", [0, 2], ids=["unified", "split"])
def test_c09_requests_without_tokens_or_without_keys(splits: int) -> None:
    """cu_q = [0, 0, 1, 1, 2]: an empty request beside others; a token whose request has no key; nothing at all."""
    check(random_batch([0, 1, 0, 1], [0, 3, 0, 5], num_heads=9, num_kv_heads=3, head_size=64), splits=splits)
    batch = random_batch([1, 1], [0, 4], num_heads=3, num_kv_heads=1, head_size=32)
    output, lse = run(batch, splits=splits)
    assert (output[0] == 0).all() and torch.isneginf(lse[0]).all() and torch.isfinite(lse[1]).all()
    nothing = random_batch([0], [0], num_heads=9, num_kv_heads=3, head_size=64)
    assert run(nothing, pad=0)[0].shape == (0, 9, 64)


@pytest.mark.parametrize(("query", "kv", "window"), [(4, 12, 8), (1, 100, 5), (4, 100, 5), (20, 100, 33), (40, 40, 16)])
def test_c10_window_across_tiles(query: int, kv: int, window: int) -> None:
    """Tiles that some rows see and others do not; keys before the window are NaN, as in pages given back."""
    batch = random_batch([query], [kv], num_heads=2, num_kv_heads=1, head_size=32, dtype=F16)
    first = max(0, kv - query - window + 1)
    whole_pages = batch.tables[0][: first // 16]
    check(batch, window=window)
    exact = run(batch, window=window)[0]
    for cache in (batch.key_cache, batch.value_cache):
        cache[whole_pages] = math.nan
        for p in range(first // 16 * 16, first):
            cache[batch.tables[0][p // 16], p % 16] = math.nan
    assert torch.equal(run(batch, window=window)[0], exact)


def test_c11_no_feature_is_ignored() -> None:
    """With large scores each feature moves the output far; the result must lie with the right reference."""
    batch = random_batch([1, 4], [40, 30], num_heads=4, num_kv_heads=2, head_size=32)
    batch.query *= 12
    batch.key_cache *= 12
    plain = dense_attention(batch)[0]
    for feature in ({"soft_cap": 30.0}, {"window": 7}, {"sinks": torch.full((4,), 500.0)}):
        exact = dense_attention(batch, **feature)[0]
        output = run(batch, **feature)[0].double()
        assert (exact - plain).abs().max() > 0.1, "the case does not tell"
        assert (output - exact).abs().max() < 0.01 * (output - plain).abs().max(), feature
    batch.scale *= 0.5
    assert_attention_close(batch, run(batch)[0], what="scale")


@pytest.mark.parametrize("splits", [0, 2], ids=["unified", "split"])
def test_c14_views_of_a_fused_projection_and_of_one_cache(splits: int) -> None:
    batch = random_batch([1, 1, 1], [20, 5, 33], num_heads=6, num_kv_heads=2, head_size=32)
    expected = run(batch, splits=splits)[0]
    fused = torch.randn(batch.num_tokens, 6 + 2 * 2, 32)
    fused[:, :6] = batch.query
    both = torch.stack([batch.key_cache, batch.value_cache], dim=1)
    keys, values = both.unbind(1)
    view = dataclasses.replace(batch, query=fused[:, :6], key_cache=keys, value_cache=values)
    assert not view.query.is_contiguous() and not keys.is_contiguous()
    backend, metadata = make(view, num_splits=splits), view.metadata()
    wide = torch.full((batch.num_tokens, 6, 40), math.nan)
    backend.prepare(metadata)
    backend.forward(view.query, keys, values, wide[..., :32], metadata, scale=batch.scale)
    assert torch.equal(wide[..., :32], expected) and wide[..., 32:].isnan().all()


def test_c15_half_precision_scores_do_not_overflow() -> None:
    """q·k passes 65504, the largest fp16, before the scale; scores are fp32."""
    batch = random_batch([2], [20], num_heads=2, num_kv_heads=1, head_size=128, dtype=F16)
    for value in (64.0, 256.0):
        batch.query.fill_(value)
        batch.key_cache[batch.key_cache.isfinite()] = value
        output, _ = run(batch)
        assert torch.isfinite(output).all()
        assert (output.double() - dense_attention(batch)[0]).abs().max() < 1e-2


@pytest.mark.parametrize("block_size", [16, 64])
def test_c17_last_pages_full_and_nearly_full(block_size: int) -> None:
    """Lengths 15, 16, 17, 32: a full last page is not an empty one, and padding rows change nothing."""
    lengths = [15, 16, 17, 32]
    batch = random_batch([1] * 4, lengths, num_heads=2, num_kv_heads=1, head_size=32, block_size=block_size)
    check(batch, pad=4)
    assert torch.equal(run(batch, pad=4)[0], run(batch, pad=0)[0])


def test_c18_order_of_requests_does_not_matter() -> None:
    """A prefill, two decodes and a one-token chunk in all 24 orders."""
    requests = [(5, 5), (1, 20), (1, 9), (1, 33)]
    base = random_batch([q for q, _ in requests], [k for _, k in requests], num_heads=2, num_kv_heads=1, head_size=32)
    pieces, first = [], 0
    for query, kv in requests:
        pieces.append((query, kv, base.query[first : first + query], base.tables[len(pieces)]))
        first += query
    expected = dict(enumerate(run(base)[0].split([q for q, _ in requests])))
    backend = make(base)
    for order in itertools.permutations(range(4)):
        mixed = dataclasses.replace(
            base,
            query=torch.cat([pieces[i][2] for i in order]),
            query_lens=[pieces[i][0] for i in order],
            kv_lens=[pieces[i][1] for i in order],
            tables=[pieces[i][3] for i in order],
        )
        outputs = run(mixed, backend=backend, pad=0)[0].split(mixed.query_lens)
        for i, output in zip(order, outputs, strict=True):
            torch.testing.assert_close(output, expected[i], atol=1e-5, rtol=0)


@pytest.mark.parametrize("splits", [0, 4], ids=["unified", "split"])
def test_c28_a_grid_made_for_the_worst_case_serves_every_length(splits: int) -> None:
    """One plan, made once for the longest context and all tokens, as a CUDA graph bakes it in."""
    backend = None
    for query, kv in (([1, 1], [8, 8]), ([1, 1], [1, 200]), ([1, 1], [200, 130])):
        batch = random_batch(query, kv, num_heads=3, num_kv_heads=1, head_size=32)
        backend = backend or make(batch, num_splits=splits)
        metadata = batch.metadata(pad_reqs=2, pad_tokens=2, max_blocks=32)
        metadata.for_graph, metadata.max_seq_len = True, 512
        assert backend.plan(metadata).splits == max(1, splits)
        check(batch, backend=backend, metadata=metadata)
    if not splits:  # a mixed graph of 8 tokens: worst case one request of 8 tokens, or 8 requests
        for query, kv in (([8], [50]), ([1] * 8, [3] * 8), ([3, 1], [30, 2])):
            batch = random_batch(query, kv, num_heads=3, num_kv_heads=1, head_size=32)
            metadata = batch.metadata(pad_reqs=8 - len(query), pad_tokens=8 - sum(query), max_blocks=32)
            metadata.for_graph, metadata.max_seq_len, metadata.max_query_len = True, 512, 8
            check(batch, backend=backend, metadata=metadata)


def test_one_launch_for_a_mixed_batch_and_two_for_a_split_one(launches: list[str]) -> None:
    run(random_batch([1, 7, 1, 3], [30, 20, 1, 3], num_heads=4, num_kv_heads=2, head_size=32))
    assert launches == ["paged_attention_kernel"]
    launches.clear()
    run(random_batch([1, 1], [70, 20], num_heads=4, num_kv_heads=2, head_size=32), splits=2)
    assert launches == ["paged_attention_kernel", "merge_splits_kernel"]


def test_plans_say_what_is_launched(launches: list[str]) -> None:
    batch = random_batch([1, 1], [70, 20], num_heads=4, num_kv_heads=2, head_size=32)
    for splits in (1, 2):
        launches.clear()
        backend = make(batch, num_splits=splits)
        run(batch, backend=backend)
        plans = backend.describe(batch.metadata())
        assert [p.kernel for p in plans] == launches and {p.num_splits for p in plans} == {splits}
        assert "interpreter" in plans[0].note


def test_short_sequences_leave_late_splits_empty() -> None:
    """Each split finds its range from the true length: 8 splits of a 3-key request write nothing but LSE −inf."""
    batch = random_batch([1, 1], [3, 300], num_heads=2, num_kv_heads=1, head_size=32)
    backend = make(batch, num_splits=8)
    check(batch, backend=backend, pad=0)
    written = torch.isfinite(backend._part_lse[: 2 * 2 * 8].view(2, 2, 8))
    assert (written | torch.isneginf(backend._part_lse[: 2 * 2 * 8].view(2, 2, 8))).all()
    # 300 keys are ten tiles of 32: two each for five splits.
    assert written.int().sum(-1).tolist() == [[1, 1], [5, 5]]


def test_forward_keeps_its_scratch_and_compiles_once() -> None:
    """Under a graph the addresses are frozen, and a compile in the middle of a run would be measured."""
    batch = random_batch([1, 1], [70, 20], num_heads=4, num_kv_heads=2, head_size=32)
    backend = make(batch, num_splits=2)
    address = backend._part.data_ptr()
    run(batch, backend=backend)
    variants = dict(backend._variants)
    longer = random_batch([1, 1, 1], [200, 20, 90], num_heads=4, num_kv_heads=2, head_size=32)
    run(longer, backend=backend)
    assert backend._part.data_ptr() == address and backend._variants == variants


def test_wrong_views_are_refused_with_a_sentence() -> None:
    batch = random_batch([1], [5], num_heads=2, num_kv_heads=2, head_size=32)
    backend, metadata = make(batch), batch.metadata()
    backwards = batch.key_cache.transpose(2, 3).contiguous().transpose(2, 3)
    out = torch.empty_like(batch.query)
    with pytest.raises(BackendError, match="last dimension of key_cache"):
        backend.forward(batch.query, backwards, batch.value_cache, out, metadata, scale=1.0)
    with pytest.raises(BackendError, match="keeps no key"):
        backend.forward(batch.query, batch.key_cache, batch.value_cache, out, metadata, scale=1.0, sliding_window=0)


def test_bfloat16_is_refused_where_it_would_be_wrong() -> None:
    batch = random_batch([1], [5], num_heads=2, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    with pytest.raises(BackendError, match="bfloat16 arithmetic is wrong"):
        make(batch)
    assert triton_attn.TritonAttentionBackend.availability().usable
