"""Both backends on the GPU against dense float64 attention: mixed batches, odd heads, poison, graphs, far pages."""

from __future__ import annotations

import random

import pytest
import torch

from labkit.attention import registry
from labkit.attention.interface import AttentionBackend, AttentionSpec
from tests.reference import PagedBatch, assert_attention_close, dense_attention, random_batch

CUDA = torch.device("cuda")
NAMES = ("TRITON_ATTN", "TORCH_SDPA")
HEADS = [
    (9, 3, 64),
    (32, 8, 128),
    (28, 4, 128),
    (16, 8, 128),
    (4, 4, 96),
    (8, 1, 256),
    (71, 1, 64),
    (40, 8, 80),
    (6, 2, 32),
]


def make(name: str, batch: PagedBatch, **changes: object) -> AttentionBackend:
    values: dict[str, object] = {
        "num_heads": batch.query.shape[1],
        "num_kv_heads": batch.key_cache.shape[2],
        "head_size": batch.query.shape[2],
        "dtype": str(batch.query.dtype).removeprefix("torch."),
        "block_size": batch.key_cache.shape[1],
        "max_model_len": 4096,
        "max_num_seqs": 64,
        **changes,
    }
    return registry.load(name)(AttentionSpec(**values), CUDA)  # type: ignore[arg-type]


def run(backend: AttentionBackend, batch: PagedBatch, pad: int = 0, **features: object) -> torch.Tensor:
    metadata = batch.metadata(pad_reqs=pad, pad_tokens=pad)
    query = batch.query
    if pad:
        query = torch.cat([query, torch.full((pad, *query.shape[1:]), float("nan"), dtype=query.dtype, device=CUDA)])
    output = torch.full_like(query, float("nan"))
    backend.prepare(metadata)
    backend.forward(query, batch.key_cache, batch.value_cache, output, metadata, scale=batch.scale, **features)  # type: ignore[arg-type]
    return output[: batch.num_tokens]


def shapes(rng: random.Random, n: int, longest: int = 400) -> tuple[list[int], list[int]]:
    query = [rng.choice([1, 1, rng.randint(2, 70), rng.randint(100, 300)]) for _ in range(n)]
    return query, [q + rng.choice([0, rng.randint(0, longest)]) for q in query]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("heads", HEADS, ids=lambda h: "x".join(map(str, h)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_mixed_batches(name: str, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    rng = random.Random(repr((name, heads, str(dtype))))
    for _ in range(3):
        query_lens, kv_lens = shapes(rng, rng.randint(1, 12))
        batch = random_batch(
            query_lens, kv_lens, num_heads=heads[0], num_kv_heads=heads[1], head_size=heads[2],
            block_size=rng.choice([16, 32, 64]), dtype=dtype, device=CUDA, seed=rng.randint(0, 1 << 30),
        )  # fmt: skip
        assert_attention_close(batch, run(make(name, batch), batch), what=f"{name} {query_lens} {kv_lens}")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch_size", [1, 2, 7, 32, 64])
@pytest.mark.parametrize("context", [1, 17, 512, 4000])
def test_decodes_of_any_length(name: str, batch_size: int, context: int) -> None:
    rng = random.Random(batch_size * 10_000 + context)
    kv_lens = [rng.randint(1, context) for _ in range(batch_size)]
    for heads, kv_heads, head_size in ((9, 3, 64), (32, 8, 128)):
        batch = random_batch(
            [1] * batch_size, kv_lens, num_heads=heads, num_kv_heads=kv_heads, head_size=head_size,
            dtype=torch.bfloat16, device=CUDA, seed=context,
        )  # fmt: skip
        assert_attention_close(batch, run(make(name, batch), batch, pad=3), what=name)


@pytest.mark.parametrize("num_splits", [0, 1, 3, 16])
def test_split_kv_gives_the_same_for_every_number_of_splits(num_splits: int) -> None:
    batch = random_batch(
        [1, 1], [1500, 33], num_heads=9, num_kv_heads=3, head_size=64, dtype=torch.bfloat16, device=CUDA
    )
    assert_attention_close(batch, run(make("TRITON_ATTN", batch, num_splits=num_splits), batch))


@pytest.mark.parametrize("window", [1, 16, 100])
@pytest.mark.parametrize("name", NAMES)
def test_windows(name: str, window: int) -> None:
    for lens in (([1, 1, 1], [300, 17, 2]), ([1, 40, 120], [300, 60, 120])):
        batch = random_batch(*lens, num_heads=8, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, device=CUDA)
        out = run(make(name, batch, sliding_window=window), batch, sliding_window=window)
        assert_attention_close(batch, out, window=window)


@pytest.mark.parametrize("lens", [([1, 1, 1], [300, 17, 2]), ([1, 40, 120], [300, 60, 120])], ids=["decode", "mixed"])
def test_soft_cap_and_sinks(lens: tuple[list[int], list[int]]) -> None:
    batch = random_batch(*lens, num_heads=8, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, device=CUDA)
    batch.query *= 12
    capped = run(make("TRITON_ATTN", batch, logits_soft_cap=30.0), batch, logits_soft_cap=30.0)
    assert_attention_close(batch, capped, soft_cap=30.0)
    exact, uncapped = dense_attention(batch, soft_cap=30.0)[0], dense_attention(batch)[0]
    assert (capped.double() - exact).abs().max() < (capped.double() - uncapped).abs().max(), "the cap was ignored"
    sinks = torch.randn(8, device=CUDA, dtype=torch.float32)
    out = run(make("TRITON_ATTN", batch, has_sinks=True), batch, sinks=sinks)
    assert_attention_close(batch, out, sinks=sinks)


@pytest.mark.parametrize("name", NAMES)
def test_c28_a_graph_captured_at_one_length_serves_the_shortest_and_the_longest(name: str) -> None:
    """Lengths and splits are host values at capture: the worst case is baked in, true lengths are read on device."""
    longest, rows = 4096, 8
    batch = random_batch(
        [1] * rows, [8] * rows, num_heads=9, num_kv_heads=3, head_size=64, dtype=torch.bfloat16, device=CUDA,
        spare_blocks=rows * longest // 16,
    )  # fmt: skip
    batch.key_cache.nan_to_num_(0.5), batch.value_cache.nan_to_num_(0.25)
    backend = make(name, batch)
    metadata = batch.metadata(max_blocks=longest // 16)
    metadata.for_graph, metadata.max_seq_len = True, longest
    output = torch.empty_like(batch.query)

    def forward() -> None:
        backend.forward(batch.query, batch.key_cache, batch.value_cache, output, metadata, scale=batch.scale)

    backend.prepare(metadata)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        forward()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        forward()
    rng = random.Random(7)
    for lens in ([1] * rows, [longest] * rows, [rng.randint(1, longest) for _ in range(rows)], [0, 5] * (rows // 2)):
        batch.kv_lens = lens
        batch.tables = [
            [1 + (r * 37 + i * 11) % (batch.key_cache.shape[0] - 1) for i in range(-(-n // 16))]
            for r, n in enumerate(lens)
        ]
        metadata.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        metadata.seq_lens_cpu[:] = lens
        for row, blocks in enumerate(batch.tables):
            metadata.block_table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32, device=CUDA)
        output.fill_(float("nan"))
        backend.prepare(metadata)
        graph.replay()
        torch.cuda.synchronize()
        assert_attention_close(batch, output, what=f"{name} {lens}")


def test_c16_pages_beyond_two_to_the_31_elements() -> None:
    """A page id times its size passes 2^31 in a cache of more than 4 GiB."""
    heads, size, page = 8, 128, 16
    blocks = (1 << 31) // (page * heads * size) + 64
    caches = [torch.zeros((blocks, page, heads, size), dtype=torch.bfloat16, device=CUDA) for _ in range(2)]
    low = random_batch(
        [1, 5],
        [40, 20],
        num_heads=32,
        num_kv_heads=heads,
        head_size=size,
        dtype=torch.bfloat16,
        device=CUDA,
        poison=False,
    )
    shift = blocks - low.key_cache.shape[0]
    for big, small in zip(caches, (low.key_cache, low.value_cache), strict=True):
        big[shift:] = small
    high = PagedBatch(
        low.query, *caches, low.query_lens, low.kv_lens, [[b + shift for b in t] for t in low.tables], low.scale
    )
    for name in NAMES:
        assert torch.equal(run(make(name, high), high), run(make(name, low), low)), name
    from labkit.paging.cache_write import write_kv

    key = torch.randn((2, heads, size), dtype=torch.bfloat16, device=CUDA)
    slots = torch.tensor([(blocks - 1) * page + 3, -1], device=CUDA)
    write_kv(key, -key, *caches, slots)
    assert torch.equal(caches[0][blocks - 1, 3], key[0]) and torch.equal(caches[1][blocks - 1, 3], -key[0])


@pytest.mark.parametrize("kernel", ["math", "efficient", "flash", "cudnn"])
def test_every_inner_kernel_of_torch_sdpa(kernel: str) -> None:
    for lens in (([1, 1, 1], [300, 17, 2]), ([1, 40, 120], [300, 60, 120])):
        batch = random_batch(*lens, num_heads=8, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, device=CUDA)
        assert_attention_close(batch, run(make("TORCH_SDPA", batch, sdpa_kernel=kernel), batch), what=kernel)
