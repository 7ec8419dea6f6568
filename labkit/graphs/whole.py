"""The whole forward pass through torch.compile as users of PyTorch know it. Refuses to know labkit's own graphs.

`mode="reduce-overhead"` lets torch record and replay CUDA graphs itself; without CUDA it is plain Inductor. Shapes are
static, so every size is a compile of its own, seconds to minutes for a real model. Before each replay torch checks its
guards (one for every weight) and that the inputs lie where they lay: host time that a graph of labkit's own saves.
Torch keeps its graphs for each thread, so the thread that compiles must be the one that runs.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable

import torch

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def compile_whole(forward: Forward, weights: Iterable[torch.Tensor], device: torch.device) -> Forward:
    """`forward(token_ids, positions)` for one number of tokens, compiled at its first call.

    Args:
        weights: what it reads beside its arguments. They keep their addresses, so that torch does not copy them into
            a graph's own memory before each replay. Mark the arguments with `stays` for the same.
    """
    for tensor in weights:
        stays(tensor)

    def whole(token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return forward(token_ids, positions)

    # A code object of its own each time: Dynamo keeps what it compiled, and a limit of it, per code object.
    fresh = types.FunctionType(whole.__code__.replace(), whole.__globals__, "whole", None, whole.__closure__)
    mode = "reduce-overhead" if device.type == "cuda" else None
    return torch.compile(fresh, fullgraph=True, dynamic=False, mode=mode)


def stays(tensor: torch.Tensor) -> None:
    """Promise torch that this tensor is at the same address in every call."""
    torch._dynamo.mark_static_address(tensor)
