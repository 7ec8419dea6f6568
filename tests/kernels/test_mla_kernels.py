"""The kernels of latent attention: compiled for cards that are not here, and in the interpreter against plain torch."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from labkit.attention.kernels.mla_latent import rotate_and_write, write_latent_torch, write_latent_triton
from labkit.attention.kernels.tiles import shared_memory_limit
from labkit.attention.mla.chunks import attend_piece_torch, attend_piece_triton, plan_pieces, to_device
from labkit.attention.mla.layer import LatentLayer, LatentShape
from labkit.models.layers import normalize
from labkit.models.mla import rotated_pairs
from tests.kernels.aot import capability

ARCHS = (80, 90, 120)


def test_every_kernel_compiles_within_the_card() -> None:
    """No spills, shared memory within the estimate that chose the tile, tensor cores, 64-bit addresses (C16, C24)."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.mla_aot", *map(str, ARCHS)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert len(found) == 4 * len(ARCHS) + 1
    for r in found:
        limit = shared_memory_limit(capability(r["arch"]))
        assert r["shared"] <= r.get("estimate", limit) <= limit, r
        assert r["stack"] <= 32, f"spills: {r}"
        assert r["narrow"] == [], r
        assert bool(r["mma"]) == (r["case"] in ("decode", "128-heads", "chunks")), r
        if r["case"] == "decode":
            assert r["async"] and r["wide_loads"] >= 12, r


SHAPE = LatentShape(num_heads=3, rank=40, nope=24, rope=8, value=20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_chunks_equal_plain_torch_piece_by_piece(interpreter: None, dtype: torch.dtype) -> None:
    rng = random.Random(1)
    queries, past = [5, 1, 0, 20, 3, 2], [30, 12, 5, 0, 17, -1]  # the last has a row that sees nothing
    lens = [q + p for q, p in zip(queries, past, strict=True)]
    starts = np.cumsum([0, *queries])
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn((30, 8, 1, SHAPE.width), generator=generator).to(dtype)
    table = torch.tensor([rng.sample(range(1, 30), 8) for _ in lens], dtype=torch.int32)
    weights = torch.randn((SHAPE.num_heads * (SHAPE.nope + SHAPE.value), SHAPE.rank), generator=generator)
    layer = LatentLayer(SHAPE, (weights * SHAPE.rank**-0.5).to(dtype))
    query = torch.randn((sum(queries), SHAPE.num_heads, SHAPE.nope + SHAPE.rope), generator=generator).to(dtype)
    plan = to_device(plan_pieces(starts, np.array(lens), 24), table, 8)
    assert len(plan.pieces) > 3 and plan.merges
    results = []
    for attend in (attend_piece_torch, attend_piece_triton):
        out = torch.full((sum(queries), SHAPE.num_heads, SHAPE.value), float("nan"))
        lse = torch.full(out.shape[:2], float("nan"))
        for piece in plan.pieces:
            latent = cache.flatten(0, 2)[piece.slots]
            attend(SHAPE, piece, query, latent, layer.expand(latent), out, lse, 0.2)
        results.append(out)
    tolerance = 1e-5 if dtype is torch.float32 else 5e-3
    torch.testing.assert_close(results[1], results[0], atol=tolerance, rtol=tolerance)
    whole = to_device(plan_pieces(starts, np.array(lens), 10_000), table, 8)
    alone, lse = torch.empty_like(results[0]), torch.empty(results[0].shape[:2])
    (piece,) = whole.pieces
    latent = cache.flatten(0, 2)[piece.slots]
    attend_piece_torch(SHAPE, piece, query, latent, layer.expand(latent), alone, lse, 0.2)
    torch.testing.assert_close(results[0], alone, atol=tolerance, rtol=tolerance)
    assert (alone[-2] == 0).all(), "a row that sees nothing is 0"


def test_norm_rotation_and_write_equal_plain_torch(interpreter: None) -> None:
    tokens, heads, rank, rope = 7, 11, 40, 8
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn((tokens, rank + rope + 5), generator=generator)
    latent, weight = fused[:, : rank + rope], torch.randn(rank, generator=generator)
    q = torch.randn((tokens, heads, 24 + rope), generator=generator)
    positions = torch.tensor([0, 5, 2, 9, 1, 3, 3])
    angles = torch.rand((10, rope // 2), generator=generator)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    slots = torch.tensor([17, -1, 4, 33, 0, -1, 12])
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, -1)
    ready = torch.cat(
        (
            normalize(latent[:, :rank], weight, 1e-6, torch.float32),
            rotated_pairs(latent[:, None, rank:], cos, sin)[:, 0],
        ),
        -1,
    )
    expected = torch.zeros((5, 8, 1, rank + rope))
    write_latent_torch(ready, expected, slots)
    rotated, before = rotated_pairs(q[..., 24:], cos, sin), fused.clone()
    cache = torch.zeros_like(expected)
    rotate_and_write(q[..., 24:], latent, weight, positions, cos_sin, cache, slots, 1e-6)
    torch.testing.assert_close(cache, expected)
    torch.testing.assert_close(q[..., 24:], rotated)
    assert torch.equal(fused, before), "the projection keeps its values"
    again = torch.zeros_like(expected)
    write_latent_triton(ready, again, slots)
    assert torch.equal(again, expected)
