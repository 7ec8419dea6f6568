"""Splitting the keys over more programs changes who computes, not what: split against unsplit, tile by tile."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.harness import run
from tests.reference import random_batch

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
]

FEATURES: dict[str, dict[str, object]] = {
    "plain": {},
    "window": {"window": 40},
    "soft-cap": {"soft_cap": 3.0},
    "sinks": {"sinks": torch.tensor([-1.0, 0.0, 2.0, 5.0])},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("splits", [2, 5])
def test_split_equals_unsplit(splits: int, feature: str, dtype: torch.dtype, launches: list[str]) -> None:
    """Output, and LSE in natural logarithms, of a decode, of a request without keys and of a chunk."""
    for query, kv in (([1, 1], [0, 300]), ([3, 1], [90, 17])):
        batch = random_batch(query, kv, num_heads=4, num_kv_heads=2, head_size=32, dtype=dtype, seed=splits)
        launches.clear()
        whole, whole_lse = run(batch, splits=1, **FEATURES[feature])
        assert launches == ["paged_attention_kernel"]
        launches.clear()
        output, lse = run(batch, splits=splits, **FEATURES[feature])
        assert launches == ["paged_attention_kernel", "merge_splits_kernel"], "nothing was split"
        # In half precision each split rounds its weights against a maximum of its own.
        eps = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(output, whole, atol=eps, rtol=eps)
        torch.testing.assert_close(lse, whole_lse, atol=1e-5, rtol=1e-5)
