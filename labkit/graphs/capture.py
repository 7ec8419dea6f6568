"""Capturing and replaying whole forward passes: CUDA graphs, and their emulation where there is no CUDA.

Refuses to know the model: a graph is a callable over static buffers. The rules are the same on both: replay takes no
tensor, so whoever rebinds an input instead of copying into it gets stale output on a CPU too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from labkit.engine.report import CaptureRecord
from labkit.errors import CaptureError


@dataclasses.dataclass
class CapturedGraph:
    """A forward pass that one call replays. `output` is its static result; the next replay overwrites it."""

    replay: Callable[[], None]
    output: torch.Tensor
    record: CaptureRecord
    emulated: bool


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream that graphs of a device are captured on, by every engine of the process.

    cuBLAS keeps a workspace of 32 MiB per stream for the life of the process; a new stream per engine leaks it.
    """
    return torch.cuda.Stream(device)


class GraphCapturer:
    """Captures graphs into one pool, largest first, and forbids it afterwards.

    Args:
        device: where the graphs run; anything but CUDA gets the emulation.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.emulated = device.type != "cuda"
        self._open = False
        self._pool: Any = None if self.emulated else torch.cuda.graph_pool_handle()
        self._stream = None if self.emulated else capture_stream(device)

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """The only time in which `capture` is allowed. Garbage collection is frozen, and restored to what it was.

        A finalizer that runs in the middle of a capture may free a graph or unload a kernel, which breaks the capture.
        """
        was_enabled = gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()
        self._open = True
        try:
            yield
        finally:
            self._open = False
            gc.unfreeze()
            if was_enabled:
                gc.enable()

    def capture(self, mode: str, size: int, forward: Callable[[], torch.Tensor], output: torch.Tensor) -> CapturedGraph:
        """Run `forward` once to warm its kernels, then record it with its result copied into `output[:size]`.

        Raises:
            CaptureError: called outside a session, or the capture failed; the cause is named and nothing is kept.
        """
        if not self._open:
            raise CaptureError(
                f"capture of mode {mode}, size {size}",
                "capturing is closed after start-up, since it would stall a running engine",
                "Use LLM.reconfigure(cudagraph_capture_sizes=…), which opens it.",
            )
        begin = time.perf_counter()
        static = output[:size]
        if self.emulated:
            graph = self._emulate(forward, static)
            mib = 0.0
        else:
            before = torch.cuda.memory_reserved(self.device)
            graph = self._record(mode, size, forward, static)
            mib = (torch.cuda.memory_reserved(self.device) - before) / 2**20
        record = CaptureRecord(mode, size, (time.perf_counter() - begin) * 1e3, mib)
        return CapturedGraph(graph, static, record, self.emulated)

    @staticmethod
    def _emulate(forward: Callable[[], torch.Tensor], static: torch.Tensor) -> Callable[[], None]:
        def replay() -> None:
            static.copy_(forward())

        return replay

    def _record(
        self, mode: str, size: int, forward: Callable[[], torch.Tensor], static: torch.Tensor
    ) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        assert self._stream is not None
        try:
            # Kernels are compiled and loaded at their first launch, which is illegal inside a capture.
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                static.copy_(forward())
            self._stream.synchronize()
            # thread_local: another thread of the notebook may launch or allocate meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                static.copy_(forward())
        except torch.cuda.OutOfMemoryError as error:
            raise CaptureError(
                f"capture of mode {mode}, size {size}",
                f"the GPU ran out of memory ({_first_line(error)})",
                "Lower gpu_memory_utilization or max_cudagraph_capture_size, or set cudagraph_mode to NONE.",
            ) from error
        except RuntimeError as error:
            raise CaptureError(
                f"capture of mode {mode}, size {size}",
                f"an operation is not allowed in a graph ({_first_line(error)})",
                "Set cudagraph_mode to NONE to run without graphs.",
            ) from error
        return graph.replay


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
