"""FLEX_ATTENTION on the GPU, beyond what every backend must do: when it compiles, and what its last pages may hold.

tests/gpu/test_parity.py compares its fixed list of compiled combinations with float64 and proves the tier.
"""

from __future__ import annotations

import torch
from torch._dynamo.utils import counters

from labkit.attention.flex import FlexAttentionBackend
from tests.parity import CONTENDERS, FLEX_BASE, LARGE, attend, draw, judge, spec_of

CUDA = torch.device("cuda")
MINE = next(c for c in CONTENDERS if c.label == "FLEX_ATTENTION")
#: Decodes first and longer queries second, so that both tiles are compiled by the second.
STEPS = [
    ([1] * 5, [1, 64, 65, 700, 30]),
    ([1, 1, 1, 300, 37, 1, 5], [700, 33, 1, 300, 500, 1029, 5]),
    ([1], [900]),
    ([1] * 33, [17 * (i + 1) for i in range(33)]),
    ([0, 5, 0, 1, 70], [0, 2, 9, 1, 150]),
    ([128], [128]),
]


def check(backend: FlexAttentionBackend, query_lens: list[int], kv_lens: list[int], seed: int) -> None:
    """A batch in a cache of its own: its size, too, differs from batch to batch. Values nobody may read are 100."""
    batch = draw(FLEX_BASE, backend.spec, query_lens, kv_lens, CUDA, seed, finite=True)
    judge(FLEX_BASE, batch, *attend(backend, FLEX_BASE, batch, 3 * (seed % 2)), "FLEX_ATTENTION")


def test_nothing_is_compiled_again_after_both_tiles_have_run() -> None:
    spec = spec_of(MINE, FLEX_BASE, CUDA, LARGE)
    backend = FlexAttentionBackend(spec, CUDA)
    for seed, lens in enumerate(STEPS[:2]):
        check(backend, *lens, seed)
    before = counters["stats"]["unique_graphs"]
    for seed, lens in enumerate(STEPS):
        check(backend, *lens, seed)
    again = FlexAttentionBackend(spec, CUDA)
    for seed, lens in enumerate(STEPS):
        check(again, *lens, 9 + seed)
    assert counters["stats"]["unique_graphs"] == before
