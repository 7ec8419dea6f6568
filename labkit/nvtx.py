"""Named ranges on a profiler's timeline (`nsys`), when LABKIT_NVTX=1 is set. Refuses to know what is named.

Whoever is timed is wrapped once, when an engine is built. Without the variable, or without CUDA, nothing is wrapped and
nothing imported, so a step is the same code as if this file did not exist.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

VARIABLE = "LABKIT_NVTX"

Call = TypeVar("Call", bound=Callable[..., Any])


def wanted() -> bool:
    """Whether the variable is set to something other than 0 and torch has a CUDA device to profile."""
    if os.environ.get(VARIABLE, "").strip() in ("", "0"):
        return False
    torch = sys.modules.get("torch")  # whoever built an engine has imported it
    return torch is not None and bool(torch.cuda.is_available())


def named(name: str, call: Call) -> Call:
    """`call` inside a range called `name`; `call` itself where no ranges are wanted.

    A range is closed when the call raises, too, so that the ranges around it stay where they belong.
    """
    if not wanted():
        return call
    from torch.cuda import nvtx

    @functools.wraps(call)
    def inside(*args: Any, **kwargs: Any) -> Any:
        nvtx.range_push(name)
        try:
            return call(*args, **kwargs)
        finally:
            nvtx.range_pop()

    inside.is_range = True  # type: ignore[attr-defined]
    return inside  # type: ignore[return-value]


def name_methods(owner: Any, **methods: str) -> None:
    """Let methods of an object run in ranges: `name_methods(sampler, sample="sample")`. Harmless a second time."""
    if not wanted():
        return
    for method, name in methods.items():
        call = getattr(owner, method)
        if not hasattr(call, "is_range"):
            setattr(owner, method, named(name, call))
