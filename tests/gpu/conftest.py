"""The GPU suite: runs on whatever torch ≥ 2.11 is installed; without a GPU it fails instead of passing empty."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if items and not torch.cuda.is_available():
        pytest.exit("tests/gpu needs a CUDA GPU, and torch sees none here.", returncode=1)


@pytest.fixture(autouse=True)
def _give_memory_back() -> object:
    yield
    torch.cuda.empty_cache()
