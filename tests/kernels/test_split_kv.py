"""Splitting the keys over more programs changes who computes, not what: split against unsplit, tile by tile."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.harness import check, make, run
from tests.reference import random_batch

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    # log2 of an empty row's sum and −inf − −inf beside it, both of which the kernels then replace.
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning"),
]

CASES: dict[str, tuple[int, torch.dtype, dict[str, object]]] = {
    "plain": (2, torch.float32, {}),
    "half": (3, torch.float16, {}),
    "window": (2, torch.float16, {"window": 40}),
    "soft-cap": (3, torch.float32, {"soft_cap": 3.0}),
    "sinks": (2, torch.float32, {"sinks": torch.tensor([-1.0, 5.0])}),
}


@pytest.mark.parametrize("name", CASES)
def test_split_equals_unsplit(name: str, launches: list[str]) -> None:
    """Output, and LSE in natural logarithms, of a decode beside a request without keys, and of a chunk."""
    splits, dtype, features = CASES[name]
    for query, kv in (([1, 1], [0, 140]), ([3], [90])):
        batch = random_batch(query, kv, num_heads=2, num_kv_heads=1, head_size=32, dtype=dtype, seed=splits)
        launches.clear()
        whole, whole_lse = run(batch, splits=1, pad=1, **features)
        assert launches == ["paged_attention_kernel"]
        launches.clear()
        output, lse = run(batch, splits=splits, pad=1, **features)
        assert launches == ["paged_attention_kernel", "merge_splits_kernel"], "nothing was split"
        # In half precision each split rounds its weights against a maximum of its own.
        eps = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(output, whole, atol=eps, rtol=eps)
        torch.testing.assert_close(lse, whole_lse, atol=1e-5, rtol=1e-5)


def test_layers_with_a_window_are_split_by_what_the_window_holds() -> None:
    """Also in a graph for the longest context: 40 keys are no more than a few tiles, whatever lies before them."""
    batch = random_batch([1, 1], [500, 23], num_heads=2, num_kv_heads=1, head_size=32, seed=4)
    windowed, full = make(batch, sliding_window=40, num_splits=8), make(batch, num_splits=8)
    metadata = batch.metadata(max_blocks=32)
    metadata.for_graph, metadata.max_seq_len = True, 512
    few, many = windowed.plan(metadata), full.plan(metadata)
    assert few.splits == -(-41 // few.tile.block_n) < many.splits
    check(batch, backend=windowed, metadata=metadata, window=40)
