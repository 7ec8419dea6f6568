"""The most memory that a piece of work holds at once, beyond what was there before. Refuses to know what the work is.

On CUDA the caching allocator counts. On a CPU torch's allocator reports every block to a profiler, buffers inside of a
fused kernel included; what is not allocated through torch is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def peak_bytes(work: Callable[[], Any], device: torch.device | str = "cpu") -> int | None:
    """Bytes held at the highest point while `work` runs once, its result included; None where nothing counts them."""
    if str(device).startswith("cuda"):
        return _cuda_peak(work, device)
    return _cpu_peak(work)


def highest(changes: Sequence[int]) -> int:
    """The highest running sum of bytes taken (positive) and given back (negative), in order; at least 0."""
    now = top = 0
    for change in changes:
        now += change
        top = max(top, now)
    return top


def _cuda_peak(work: Callable[[], Any], device: torch.device | str) -> int:
    import torch

    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    kept = work()  # the result is held until the peak has been read
    torch.cuda.synchronize(device)
    top = torch.cuda.max_memory_allocated(device) - before
    del kept
    return int(top)


def _cpu_peak(work: Callable[[], Any]) -> int | None:
    """torch.profiler sees the same, but writes to stderr whenever it starts; its older interface does not."""
    try:
        from torch._C._profiler import _ExperimentalConfig
        from torch.autograd import ProfilerConfig, ProfilerState, _disable_profiler_legacy, _enable_profiler_legacy

        config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
        _enable_profiler_legacy(config)
    except (ImportError, TypeError, RuntimeError):  # another version of torch, or somebody is profiling already
        return None
    kept = None
    try:
        kept = work()
    finally:
        records = _disable_profiler_legacy()
    del kept
    events: list[Any] = [event for thread in records for event in thread]  # its type stubs say otherwise
    return highest([event.cpu_memory_usage() for event in events if event.kind() == "memory_alloc"])
