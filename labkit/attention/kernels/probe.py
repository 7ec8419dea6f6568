"""The smallest Triton kernel worth launching, to time what a launch costs the host. Refuses to compute anything of use.

Triton is imported by the launcher at the first launch, not here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from labkit.launch import kernel

if TYPE_CHECKING:
    import torch
    import triton.language as tl


@kernel("x y", "n step")
def add_step(x, y, n, step, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """y[i] = x[i] + step for i < n; one program."""
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n, other=0.0) + step, mask=i < n)


def launch_once(x: torch.Tensor) -> Callable[[], Any]:
    """A call that launches `add_step` once on `x`, float32 `[8]`, through the engine's launcher; compiled here."""
    import torch

    y = torch.empty_like(x)
    variant = add_step.variant((x.dtype, y.dtype), (8,), num_warps=1, num_stages=1)
    tensors, numbers = (x, y), (x.numel(), 1)
    variant((1, 1, 1), tensors, numbers)
    return lambda: variant((1, 1, 1), tensors, numbers)
