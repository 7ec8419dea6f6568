"""Splitting the keys over more programs changes who computes, not what: split against unsplit, tile by tile."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.harness import run
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
