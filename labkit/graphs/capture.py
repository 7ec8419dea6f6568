"""Capturing and replaying forward passes, whole or in segments: CUDA graphs, and their emulation without CUDA.

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

#: (layer, query, output): called in place of attention, or to run it.
BreakAt = Callable[[int, torch.Tensor, torch.Tensor], None]


@dataclasses.dataclass
class CapturedGraph:
    """A forward pass that one call replays. `output` is its static result; the next replay overwrites it."""

    replay: Callable[[], None]
    output: torch.Tensor
    record: CaptureRecord
    emulated: bool

    @property
    def num_graphs(self) -> int:
        """Graphs that one replay launches; 0 where they are emulated."""
        return 0 if self.emulated else self.record.graphs


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
        self._check_open(mode, size)
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

    def capture_segments(
        self,
        size: int,
        warm_up: Callable[[], torch.Tensor],
        forward: Callable[[BreakAt | None], torch.Tensor],
        attend: BreakAt,
        output: torch.Tensor,
    ) -> CapturedGraph:
        """Record a forward pass as one graph for each stretch between attention calls, its result in `output[:size]`.

        The replay launches the graphs in turn and calls `attend(layer, query, output)` between them, eagerly, so that
        attention sees the step's own lengths. That is a breakable graph: it needs no torch.compile.

        Args:
            size: tokens of the padded step.
            warm_up: runs the whole pass once, eagerly, attention included.
            forward: runs the pass and calls its argument in place of every attention; without one, it runs attention
                in the context of the moment (the emulation's way).
            attend: runs the attention of a layer in the context of the moment.

        Raises:
            CaptureError: as `capture`.
        """
        self._check_open("PIECEWISE", size)
        begin = time.perf_counter()
        static = output[:size]
        if self.emulated:
            counted: list[int] = []

            def count(layer: int, query: torch.Tensor, out: torch.Tensor) -> None:
                counted.append(layer)

            forward(count)
            replay, mib, graphs = self._emulate(lambda: forward(None), static), 0.0, len(counted) + 1
        else:
            before = torch.cuda.memory_reserved(self.device)
            with self._explained("PIECEWISE", size):
                self._warm(warm_up, static)
                segments, calls = self._record_segments(forward, attend, static)
            mib, graphs = (torch.cuda.memory_reserved(self.device) - before) / 2**20, len(segments)
            replay = _in_turn(segments, calls)
        record = CaptureRecord("PIECEWISE", size, (time.perf_counter() - begin) * 1e3, mib, graphs)
        return CapturedGraph(replay, static, record, self.emulated)

    def _record_segments(
        self, forward: Callable[[BreakAt | None], torch.Tensor], attend: BreakAt, static: torch.Tensor
    ) -> tuple[list[torch.cuda.CUDAGraph], list[Callable[[], None]]]:
        assert self._stream is not None
        graphs: list[torch.cuda.CUDAGraph] = []
        breaks: list[tuple[int, torch.Tensor, torch.Tensor]] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def break_at(layer: int, query: torch.Tensor, out: torch.Tensor) -> None:
            graphs[-1].capture_end()
            breaks.append((layer, query, out))
            begin()

        with torch.cuda.stream(self._stream):
            begin()
            try:
                static.copy_(forward(break_at))
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the capture is broken already; the first error counts
                    graphs[-1].capture_end()
                raise
            graphs[-1].capture_end()
        # Held by address only: the pool may then give their memory to the next size, which never runs at the same time.
        calls: list[Callable[[], None]] = [
            functools.partial(attend, layer, borrow(query), borrow(out)) for layer, query, out in breaks
        ]
        return graphs, calls

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
        with self._explained(mode, size):
            self._warm(forward, static)
            # thread_local: another thread of the notebook may launch or allocate meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                static.copy_(forward())
        return graph.replay

    def _warm(self, forward: Callable[[], torch.Tensor], static: torch.Tensor) -> None:
        """Run once on the capture stream: kernels are compiled and loaded at first launch, illegal inside a capture."""
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            static.copy_(forward())
        self._stream.synchronize()

    def _check_open(self, mode: str, size: int) -> None:
        if not self._open:
            raise CaptureError(
                f"capture of mode {mode}, size {size}",
                "capturing is closed after start-up, since it would stall a running engine",
                "Use LLM.reconfigure(cudagraph_capture_sizes=…), which opens it.",
            )

    @staticmethod
    @contextlib.contextmanager
    def _explained(mode: str, size: int) -> Iterator[None]:
        """Turn what CUDA says into a sentence that names the knob."""
        try:
            yield
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


def borrow(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same device memory that does not keep it allocated. Same shape, strides and dtype."""
    if not tensor.is_cuda:
        return tensor
    words = {1: "|u1", 2: "<u2", 4: "<u4", 8: "<u8"}
    size = tensor.element_size()
    # The interface knows no bfloat16, so the bits travel as integers; a dense run of them, to be viewed with strides.
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    interface = {"shape": (span,), "typestr": words[size], "data": (tensor.data_ptr(), False), "version": 3}
    holder = type("Borrowed", (), {"__cuda_array_interface__": interface})()
    flat = torch.as_tensor(holder, device=tensor.device).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())


def _in_turn(graphs: list[torch.cuda.CUDAGraph], calls: list[Callable[[], None]]) -> Callable[[], None]:
    *first, last = [graph.replay for graph in graphs]
    pairs = list(zip(first, calls, strict=True))

    def replay() -> None:
        for segment, call in pairs:
            segment()
            call()
        last()

    return replay


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
