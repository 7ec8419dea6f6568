"""What the model tests share: attention without an engine, and the default model, fetched when it is not there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from labkit.attention import op
from labkit.models.decoder import Decoder
from labkit.models.fetch import fetch_default_model

Forward = Callable[[Decoder, list[int]], torch.Tensor]


def dense_attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    """Causal attention of one whole prompt, fp32 inside, written out; there is no cache."""
    group = q.shape[1] // k.shape[1]
    k32, v32 = (t.float().repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k32) * q.shape[-1] ** -0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    out.copy_(torch.einsum("hqk,khd->qhd", weights, v32))


@pytest.fixture
def forward(monkeypatch: pytest.MonkeyPatch) -> Forward:
    """Logits of every position of one prompt, `[len(ids), vocab_size]`, fp32."""
    monkeypatch.setattr(op, "attention", dense_attention)

    def run(decoder: Decoder, ids: list[int]) -> torch.Tensor:
        hidden = decoder.forward(torch.tensor(ids, dtype=torch.int64), torch.arange(len(ids)))
        return decoder.compute_logits(hidden).float()

    return run


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return fetch_default_model(lambda line: print(line, file=sys.stderr))


@pytest.fixture(scope="session")
def real(model_dir: Path) -> Any:
    from labkit.models.loader import load_folder

    return load_folder(model_dir, dtype="float32")
