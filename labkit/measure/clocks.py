"""Time work on the host, on the device, or as what issuing it costs the host. Refuses to know what the work is.

A GPU runs behind the host: a host clock around an unsynchronized call times the *issuing*, device events time the
*running*, and only a host clock that ends after a synchronization times both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

Work = Callable[[], Any]


def synchronize(device: torch.device | str | None = None) -> None:
    """Wait for the device's queued work; nothing to wait for on a CPU or without torch."""
    if device is None or str(device).startswith("cpu"):
        return
    import torch

    torch.cuda.synchronize(device)


def host_us(work: Work, *, calls: int = 200, rounds: int = 7, device: torch.device | str | None = None) -> float:
    """Host microseconds that one call of `work` takes to *issue*: median over rounds of `calls` calls in a row.

    The device is idle at the start of every round and is not waited for inside it, so keep `calls` below the depth of
    the launch queue (about a thousand) or the host starts to wait for the device.
    """
    for _ in range(3):
        work()
    out = []
    for _ in range(rounds):
        synchronize(device)
        begin = time.perf_counter_ns()
        for _ in range(calls):
            work()
        out.append((time.perf_counter_ns() - begin) / calls / 1e3)
    synchronize(device)
    return float(np.median(out))


def sample_us(
    work: Work, *, samples: int = 50, warmup: int = 3, calls: int = 1, device: torch.device | str | None = None
) -> list[float]:
    """Microseconds that one call takes to *run*, one figure per sample: device events on CUDA, the host clock on a CPU.

    Args:
        calls: `work` is called this often per sample and the time divided; a short kernel needs more than one.
    """
    for _ in range(warmup):
        work()
    if device is None or str(device).startswith("cpu"):
        out = []
        for _ in range(samples):
            begin = time.perf_counter_ns()
            for _ in range(calls):
                work()
            out.append((time.perf_counter_ns() - begin) / calls / 1e3)
        return out
    import torch

    torch.cuda.synchronize(device)
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(samples)]
    for begin_event, end_event in pairs:
        begin_event.record()
        for _ in range(calls):
            work()
        end_event.record()
    torch.cuda.synchronize(device)
    return [begin_event.elapsed_time(end_event) * 1e3 / calls for begin_event, end_event in pairs]
