"""TORCH_SDPA on the GPU, beyond what every backend must do: each of torch's inner kernels by name."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from labkit.attention.sdpa import TorchSDPABackend
from tests.parity import CONTENDERS, EIGHT, LARGE, Case, attend, draw, judge, spec_of

CUDA = torch.device("cuda")
MINE = next(c for c in CONTENDERS if c.label == "TORCH_SDPA")


@pytest.mark.parametrize("kernel", ["math", "efficient", "flash", "cudnn"])
def test_every_inner_kernel(kernel: str) -> None:
    case = Case(EIGHT)
    spec = dataclasses.replace(spec_of(MINE, case, CUDA, LARGE), sdpa_kernel=kernel)
    backend = TorchSDPABackend(spec, CUDA)
    for seed, lens in enumerate((([1, 1, 1], [300, 17, 2]), ([1, 40, 120], [300, 60, 120]))):
        batch = draw(case, spec, *lens, CUDA, seed, finite=False)
        judge(case, batch, *attend(backend, case, batch), kernel)
