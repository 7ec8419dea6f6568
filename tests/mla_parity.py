"""Parity of the MLA backends: the absorbed form against dense float64, both forms against each other, and what replays.

Knows no test runner and no particular machine. Batches, judgement and compositions are those of `tests.parity`; what is
different is the cache, one latent per token that is key and value at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
from typing import Any

import numpy as np
import torch

from labkit.attention.interface import AttentionBackend, AttentionCGSupport, AttentionSpec, Platform
from labkit.attention.metadata import AttentionMetadata
from tests.parity import Extent, mixed_compositions, rows_that_see, uniform_compositions
from tests.reference import PagedBatch, assert_attention_close, random_batch

Tier = AttentionCGSupport


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is fixed for a backend instance. scale: of the model, from the sizes of its heads and not of the latent."""

    heads: int = 16
    rank: int = 512
    rope: int = 64
    dtype: str = "bfloat16"
    page: int = 64
    scale: float = 0.1352

    def spec(self, extent: Extent, **options: Any) -> AttentionSpec:
        return AttentionSpec(
            self.heads, 1, self.rank + self.rope, self.dtype, self.page, family="MLA", head_size_v=self.rank,
            **{"max_model_len": extent.longest, "max_num_seqs": 64, "max_num_batched_tokens": 8192, **options},
        )  # fmt: skip

    def batch(
        self, query_lens: list[int], kv_lens: list[int], seed: int, device: torch.device, finite: bool = False
    ) -> PagedBatch:
        """Scattered pages; what no request may read is NaN, or large where `finite`."""
        made = random_batch(
            query_lens, kv_lens, num_heads=self.heads, num_kv_heads=1, head_size=self.rank + self.rope,
            block_size=self.page, dtype=getattr(torch, self.dtype), device=device, seed=seed,
        )  # fmt: skip
        if finite:
            made.key_cache.masked_fill_(made.key_cache.isnan(), 100.0)
        return dataclasses.replace(made, value_cache=made.key_cache[..., : self.rank], scale=self.scale)


def batches(extent: Extent, page: int, seed: int = 0) -> list[tuple[str, list[int], list[int]]]:
    """What an engine makes, and rows that see nothing."""
    rng = random.Random(seed)
    query = [1, extent.chunk, *(rng.choice([1, 1, 0, rng.randint(2, extent.chunk)]) for _ in range(extent.requests))]
    rng.shuffle(query)
    around = [n for n in (page - 1, page, page + 1, 2 * page) if 0 < n <= extent.longest]
    return [
        ("mixed", query, [q + rng.choice([0, 1, rng.randint(0, extent.past)]) for q in query]),
        ("decodes", [1] * (extent.requests + 2),
         [1, extent.longest, *(rng.randint(1, extent.longest) for _ in range(extent.requests))]),
        ("ends of pages", [1] * len(around), around),
        ("uniform", [3] * 4, [3, 9, min(extent.longest, 70), 20]),
        ("blind", [5, 2, 0, 1, 3], [2, 5, 0, 3, 0]),
        ("one token", [1], [1]),
    ]  # fmt: skip


@torch.inference_mode()
def attend(
    backend: AttentionBackend, batch: PagedBatch, padding: int = 0, lse: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and LSE of the real tokens; every row of both is NaN before."""
    tokens, rank = batch.num_tokens, batch.value_cache.shape[-1]
    metadata = batch.metadata(pad_reqs=padding, pad_tokens=padding)
    query = torch.cat([batch.query, batch.query.new_full((padding, *batch.query.shape[1:]), math.nan)])
    output = query.new_full((*query.shape[:2], rank), math.nan)
    found = torch.full(query.shape[:2], math.nan, device=query.device) if lse else None
    backend.prepare(metadata)
    backend.forward(query, batch.key_cache, batch.value_cache, output, metadata, scale=batch.scale, lse=found)
    assert all(plan.kernel for plan in backend.describe(metadata)), "it does not say what it launched"
    return output[:tokens], None if found is None else found[:tokens]


def judge(batch: PagedBatch, output: torch.Tensor, lse: torch.Tensor | None, what: str) -> None:
    """The project's rule of error; rows that see nothing are exactly 0 and −inf; the LSE is natural."""
    what = f"{what}: q={batch.query_lens} kv={batch.kv_lens}"
    exact = assert_attention_close(batch, output, what=what)
    sees = rows_that_see(batch)
    assert (output[~sees] == 0).all(), f"{what}: a row that sees nothing is not 0"
    if lse is not None:
        assert torch.isneginf(lse[~sees]).all(), f"{what}: the LSE of a row that sees nothing is not −inf"
        torch.testing.assert_close(lse.double()[sees], exact[sees], atol=5e-3, rtol=1e-3)


def check(
    backend: AttentionBackend, sizes: Sizes, extent: Extent, device: torch.device, *, finite: bool = False,
    skip: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """Every batch of `batches`, with and without padding behind it."""
    for turn, (kind, query_lens, kv_lens) in enumerate(batches(extent, sizes.page)):
        if kind in skip:
            continue
        batch = sizes.batch(query_lens, kv_lens, turn, device, finite)
        judge(batch, *attend(backend, batch, padding=3 * (turn % 2)), f"{type(backend).__name__}, {kind}")


class Captured:
    """One absorbed call recorded at a padded shape and replayed over the same buffers; emulated on a CPU."""

    def __init__(
        self, backend: AttentionBackend, sizes: Sizes, cache: torch.Tensor, reqs: int, tokens: int, query_len: int,
        extent: Extent,
    ) -> None:  # fmt: skip
        self.backend, self.sizes, self.cache, self.device = backend, sizes, cache, cache.device
        width, dtype = sizes.rank + sizes.rope, getattr(torch, sizes.dtype)
        self.query = torch.zeros((tokens, sizes.heads, width), dtype=dtype, device=self.device)
        self.output = torch.zeros((tokens, sizes.heads, sizes.rank), dtype=dtype, device=self.device)

        def ints(*shape: int, fill: int = 0, kind: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full(shape, fill, dtype=kind, device=self.device)

        self.metadata = AttentionMetadata(
            reqs, tokens, reqs, tokens, query_len, extent.longest, ints(reqs + 1), ints(reqs),
            ints(reqs, -(-extent.longest // sizes.page)), ints(tokens, fill=-1, kind=torch.int64),
            np.zeros(reqs + 1, dtype=np.int32), np.zeros(reqs, dtype=np.int32), for_graph=True,
            is_uniform_decode=query_len == 1,
        )  # fmt: skip
        spread = [query_len] * reqs if query_len * reqs == tokens else [*[1] * (reqs - 1), tokens - reqs + 1]
        self.fill(spread, spread, [[0] * -(-n // sizes.page) for n in spread])
        with torch.inference_mode():
            backend.prepare(self.metadata)
            self.baked = dataclasses.replace(
                self.metadata, query_start_loc_cpu=self.metadata.query_start_loc_cpu.copy(),
                seq_lens_cpu=self.metadata.seq_lens_cpu.copy(),
            )  # fmt: skip
            self.forward()
            self.graph: Any = None
            if self.device.type == "cuda":
                torch.cuda.synchronize()
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                    self.forward()

    def forward(self) -> None:
        values = self.cache[..., : self.sizes.rank]
        self.backend.forward(self.query, self.cache, values, self.output, self.baked, scale=self.sizes.scale)

    def fill(self, query_lens: list[int], kv_lens: list[int], tables: list[list[int]]) -> None:
        meta, total, n = self.metadata, sum(query_lens), len(query_lens)
        meta.query_start_loc_cpu[:] = total
        meta.query_start_loc_cpu[: n + 1] = np.cumsum([0, *query_lens])
        meta.seq_lens_cpu[:] = kv_lens + [0] * (meta.num_reqs - n)
        rows = torch.zeros(meta.block_table.shape, dtype=torch.int32)
        for row, taken in enumerate(tables):
            rows[row, : len(taken)] = torch.tensor(taken, dtype=torch.int32)
        meta.query_start_loc.copy_(torch.from_numpy(meta.query_start_loc_cpu))
        meta.seq_lens.copy_(torch.from_numpy(meta.seq_lens_cpu))
        meta.block_table.copy_(rows)
        meta.num_actual_reqs, meta.num_actual_tokens = n, total

    def replay(self, query_lens: list[int], kv_lens: list[int], seed: int, what: str) -> None:
        rng, total = random.Random(seed), sum(query_lens)
        tables = [rng.sample(range(1, self.cache.shape[0]), -(-n // self.sizes.page)) for n in kv_lens]
        self.fill(query_lens, kv_lens, tables)
        generator = torch.Generator(self.device).manual_seed(seed)
        values = torch.randn(self.query[:total].shape, generator=generator, device=self.device)
        self.query[:total] = values.to(self.query.dtype)
        self.query[total:] = math.nan
        self.output.fill_(math.nan)
        with torch.inference_mode() if seed % 2 else contextlib.nullcontext():
            self.backend.prepare(dataclasses.replace(self.metadata, scratch={}))
            if self.graph is None:
                self.forward()
            else:
                self.graph.replay()
                torch.cuda.synchronize()
        values = self.cache[..., : self.sizes.rank]
        batch = PagedBatch(self.query[:total], self.cache, values, query_lens, kv_lens, tables, self.sizes.scale)
        judge(batch, self.output[:total], None, what)


def prove_tier(backend: AttentionBackend, sizes: Sizes, extent: Extent, device: torch.device) -> Tier:
    """Capture at one composition and replay at others, as far up as the tier claims; returns the tier."""
    platform = Platform("cuda", torch.cuda.get_device_capability()) if device.type == "cuda" else Platform("cpu")
    tier, why = backend.graph_support(backend.spec, platform)
    most = 8 if extent.requests > 4 else 3
    shapes = [
        (Tier.UNIFORM_SINGLE_TOKEN_DECODE, most, most, 1), (Tier.UNIFORM_SINGLE_TOKEN_DECODE, 1, 1, 1),
        (Tier.UNIFORM_BATCH, 2, 6, 3), (Tier.ALWAYS, most, 4 * most, 0),
    ]  # fmt: skip
    pages = 2 * -(-extent.longest // sizes.page) + 8
    generator = torch.Generator(device).manual_seed(0)
    cache = torch.randn((pages, sizes.page, 1, sizes.rank + sizes.rope), generator=generator, device=device)
    cache = cache.to(getattr(torch, sizes.dtype))
    cache[0] = 0  # the null block
    turns = []
    for level, reqs, tokens, query_len in (shape for shape in shapes if shape[0] <= tier):
        graph = Captured(backend, sizes, cache, reqs, tokens, query_len or tokens, extent)
        if level is Tier.ALWAYS:
            compositions = mixed_compositions(reqs, tokens, extent.longest)
        else:
            compositions = uniform_compositions(reqs, query_len, extent.longest)
        turns += [(graph, f"{reqs} requests, {tokens} tokens", *composition) for composition in compositions]
    random.Random(11).shuffle(turns)
    for turn, (graph, shape, query_lens, kv_lens) in enumerate(turns):
        graph.replay(query_lens, kv_lens, turn, f"{type(backend).__name__} claims {tier.name} ({why}), {shape}")
        if turn % 5 == 0:
            eager = sizes.batch([1, 7, 1], [30, 20, 2], turn, device, finite=True)
            judge(eager, *attend(backend, eager), "eager between replays")
    return tier
