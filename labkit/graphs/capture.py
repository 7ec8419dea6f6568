"""Capturing and replaying forward passes, whole or in segments: CUDA graphs, and their emulation without CUDA.

Refuses to know the model: a graph is a callable over static buffers. The rules are the same on both: replay takes no
tensor, so whoever rebinds an input instead of copying into it gets stale output on a CPU too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from labkit import nvtx
from labkit.engine.report import CaptureRecord
from labkit.errors import CaptureError, CompileError, LabkitError
from labkit.graphs.graph_nodes import Node, is_recording, kernel_nodes, read_nodes, record_anew
from labkit.graphs.trace import first_line, user_line

#: (layer, *tensors), of plain attention query and output: called in place of attention, or to run it.
BreakAt = Callable[..., None]
#: What CUDA says of a capture that was broken before (cudaErrorStreamCaptureInvalidated).
BROKEN = "CUDA error: operation failed due to a previous error during capture"
#: Graphs whose capture torch could not be made to end. Its allocator of pinned memory asks them as long as it lives.
_never_ended: list[torch.cuda.CUDAGraph] = []


@dataclasses.dataclass
class CapturedGraph:
    """A forward pass that one call replays. `output` is its static result; the next replay overwrites it.

    addresses: where what the graph reads lay when it was captured, by name; filled by who captures, and for checks.
    nodes: of each graph, where `GraphCapturer.keep_nodes` asked for them and the driver told.
    """

    replay: Callable[[], None]
    output: torch.Tensor
    record: CaptureRecord
    emulated: bool
    addresses: dict[str, int] = dataclasses.field(default_factory=dict)
    nodes: tuple[tuple[Node, ...], ...] = ()

    @property
    def num_graphs(self) -> int:
        """Graphs that one replay launches; 0 where they are emulated."""
        return 0 if self.emulated else self.record.graphs


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream that graphs of a device are captured on, by every engine of the process.

    Torch keeps a cuBLAS workspace of 32 MiB per stream; a new stream per engine leaks what its warm-up took.
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
        #: Read the nodes of what is recorded, for an X-ray; off, since nothing else needs them.
        self.keep_nodes = False
        self._nodes: list[tuple[Node, ...]] = []
        self._pool: Any = None if self.emulated else torch.cuda.graph_pool_handle()
        self._stream = None if self.emulated else capture_stream(device)
        self._anchor: torch.cuda.CUDAGraph | None = None
        with torch.inference_mode(False):  # one that is made in it could be written nowhere else
            self._word = None if self.emulated else torch.zeros(1, device=device)

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
            return self._emulated(mode, size, begin, forward, static)
        with explained(mode, size):
            self._warm(forward, static)
            torch.cuda.empty_cache()  # the pool takes memory from the driver only
            before = self._used()
            graph, kernels = once_more(lambda: self._record(forward, static))
            mib = (self._used() - before) / 2**20
        record = CaptureRecord(mode, size, (time.perf_counter() - begin) * 1e3, mib, 1, kernels)
        return CapturedGraph(graph.replay, static, record, self.emulated, nodes=tuple(self._nodes))

    def capture_compiled(
        self, mode: str, size: int, forward: Callable[[], torch.Tensor], output: torch.Tensor
    ) -> CapturedGraph:
        """Keep a pass that torch.compile turns into a graph by itself: its first call compiles, its second records.

        Raises:
            CaptureError: called outside a session, or the compiler made no graph of it.
            CompileError: it could not be compiled.
        """
        from torch._dynamo.exc import TorchDynamoException
        from torch._dynamo.utils import counters

        self._check_open(mode, size)
        begin = time.perf_counter()
        static, skipped = output[:size], counters["inductor"]["cudagraph_skips"]
        before = 0 if self.emulated else self._used()

        def replay() -> None:
            torch.compiler.cudagraph_mark_step_begin()
            static.copy_(forward())

        try:
            with explained(mode, size):
                for _ in range(1 if self.emulated else 3):
                    replay()
                if not self.emulated:
                    torch.cuda.current_stream(self.device).synchronize()
        except CaptureError as error:
            if not isinstance(error.__cause__, TorchDynamoException):
                raise
            raise CompileError(
                f"the whole forward pass at size {size}",
                f"torch.compile failed: {first_line(error.__cause__)}{user_line(error.__cause__)}",
                "Set compilation_mode to NONE to run without it.",
            ) from error.__cause__
        if counters["inductor"]["cudagraph_skips"] > skipped:
            raise CaptureError(
                f"capture of mode {mode}, size {size}",
                "torch.compile made no graph of the pass",
                "TORCH_LOGS=perf_hints says why. Set compilation_mode to VLLM_COMPILE or NONE.",
                mode,
            )
        mib = 0.0 if self.emulated else (self._used() - before) / 2**20
        record = CaptureRecord(mode, size, (time.perf_counter() - begin) * 1e3, mib)
        return CapturedGraph(replay, static, record, self.emulated)

    def capture_segments(
        self,
        size: int,
        warm_up: Callable[[], torch.Tensor],
        forward: Callable[[BreakAt | None], torch.Tensor],
        attend: BreakAt,
        output: torch.Tensor,
    ) -> CapturedGraph:
        """Record a forward pass as one graph for each stretch between attention calls, its result in `output[:size]`.

        The replay launches the graphs in turn and calls `attend(layer, *tensors)` between them, eagerly, so that
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

            def count(layer: int, *tensors: torch.Tensor) -> None:
                counted.append(layer)

            forward(count)
            return self._emulated("PIECEWISE", size, begin, lambda: forward(None), static, len(counted) + 1)
        with explained("PIECEWISE", size):
            self._warm(warm_up, static)
            before = self._used()
            segments, calls, kernels = once_more(lambda: self._record_segments(forward, attend, static))
            mib = (self._used() - before) / 2**20
        ms = (time.perf_counter() - begin) * 1e3
        record = CaptureRecord("PIECEWISE", size, ms, mib, len(segments), kernels)
        return CapturedGraph(_in_turn(segments, calls), static, record, self.emulated, nodes=tuple(self._nodes))

    def _record_segments(
        self, forward: Callable[[BreakAt | None], torch.Tensor], attend: BreakAt, static: torch.Tensor
    ) -> tuple[list[torch.cuda.CUDAGraph], list[Callable[[], None]], int | None]:
        assert self._stream is not None
        graphs: list[torch.cuda.CUDAGraph] = []
        breaks: list[tuple[int, tuple[torch.Tensor, ...]]] = []
        kernels: list[int | None] = []
        self._nodes = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            self._begin(graphs[-1])

        def break_at(layer: int, *tensors: torch.Tensor) -> None:
            kernels.append(self._end(graphs[-1]))
            breaks.append((layer, tensors))
            begin()

        forget_workspaces()
        with torch.cuda.stream(self._stream):
            try:
                begin()
                static.copy_(forward(break_at))
                kernels.append(self._end(graphs[-1]))
            except BaseException:
                self._abandon(graphs[-1])
                raise
        forget_workspaces()
        # Held by address only: the pool may then give their memory to the next size, which never runs at the same time.
        calls: list[Callable[[], None]] = [
            functools.partial(attend, layer, *map(borrow, tensors)) for layer, tensors in breaks
        ]
        return graphs, calls, _sum(kernels)

    def _emulated(
        self,
        mode: str,
        size: int,
        begin: float,
        forward: Callable[[], torch.Tensor],
        static: torch.Tensor,
        graphs: int = 1,
    ) -> CapturedGraph:
        def replay() -> None:
            static.copy_(forward())

        record = CaptureRecord(mode, size, (time.perf_counter() - begin) * 1e3, 0.0, graphs)
        return CapturedGraph(replay, static, record, emulated=True)

    def _record(
        self, forward: Callable[[], torch.Tensor], static: torch.Tensor
    ) -> tuple[torch.cuda.CUDAGraph, int | None]:
        assert self._stream is not None
        graph = torch.cuda.CUDAGraph()
        self._nodes = []
        torch.cuda.synchronize(self.device)
        forget_workspaces()
        with torch.cuda.stream(self._stream):
            try:
                self._begin(graph)
                static.copy_(forward())
                kernels = self._end(graph)
            except BaseException:
                self._abandon(graph)
                raise
        forget_workspaces()
        return graph, kernels

    def _warm(self, forward: Callable[[], torch.Tensor], static: torch.Tensor) -> None:
        """Run once on the capture stream: kernels are compiled and loaded at first launch, illegal inside a capture."""
        assert self._stream is not None
        if self._anchor is None:
            self._anchor = once_more(self._record_anchor)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            static.copy_(forward())
        self._stream.synchronize()

    def _record_anchor(self) -> torch.cuda.CUDAGraph:
        """A graph of one fill, never replayed: a pool whose graphs are all gone (after a failure) takes no more."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            torch.cuda.current_stream(self.device).synchronize()
            try:
                self._begin(graph)
                self._fill()
                self._end(graph)
            except BaseException:
                self._abandon(graph)
                raise
        return graph

    def _fill(self) -> None:
        assert self._word is not None
        self._word.zero_()

    def _begin(self, graph: torch.cuda.CUDAGraph) -> None:
        """Record into `graph` what the current stream is given."""
        # thread_local: another thread of the notebook may launch or allocate meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _end(self, graph: torch.cuda.CUDAGraph) -> int | None:
        """End the recording and return its kernels, where the driver says. A broken one raises before torch tries."""
        stream = torch.cuda.current_stream(self.device).cuda_stream
        kernels = kernel_nodes(stream)
        nodes = read_nodes(stream) if self.keep_nodes else None
        if nodes is not None:
            self._nodes.append(nodes)
        if is_recording(stream) is False:
            raise RuntimeError(BROKEN)
        graph.capture_end()
        return kernels

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a recording that failed, so that nothing of it is left but `graph`, which is of no use.

        Torch's own end gives up where the stream cannot end what it records, and leaves both its allocators filling
        the pool (the next capture into it is refused) and its random numbers waiting. So it gets something to end: the
        stream records a fill in place of what broke.
        """
        stream = torch.cuda.current_stream(self.device).cuda_stream
        with contextlib.suppress(RuntimeError):
            graph.pool()  # known once the recording has ended: only making it a graph that can be launched failed
            return
        try:
            if is_recording(stream) is False:
                record_anew(stream)
            self._fill()
            graph.capture_end()
        except RuntimeError:
            self._leave_pool(graph)

    def _leave_pool(self, graph: torch.cuda.CUDAGraph) -> None:
        """Nothing could end this recording: the pool is lost to later ones, which get another."""
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self.device.index or 0, self._pool)
        _never_ended.append(graph)
        self._pool, self._anchor = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        with contextlib.suppress(RuntimeError):
            self._begin(self._anchor)  # torch's generator takes the end of any capture for the end it waits for
            self._fill()
            self._anchor.capture_end()

    def _used(self) -> int:
        """Bytes of the device in use, by the driver's own count: a graph takes memory that no allocator sees."""
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def _check_open(self, mode: str, size: int) -> None:
        if not self._open:
            raise CaptureError(
                f"capture of mode {mode}, size {size}",
                "capturing is closed after start-up, since it would stall a running engine",
                "Use LLM.reconfigure(cudagraph_capture_sizes=…), which opens it.",
                mode,
            )


def forget_workspaces() -> None:
    """Let cuBLAS take new workspaces: before a recording, so that they are of the graph's own pool, and after it.

    Torch keeps one for each stream and gives all of them back whenever it likes: when another graph of the stream goes
    (pytorch#193402), and when torch.compile records graphs of its own. A graph that has the address baked in would then
    write into memory that is somebody else's, or nobody's. In its pool the memory stays as long as the graph.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # a build without CUDA has none
    if clear is not None:
        clear()


_Made = TypeVar("_Made")


def once_more(record: Callable[[], _Made]) -> _Made:
    """`record()`, and again when somebody else broke the capture: a synchronization in another thread does that."""
    try:
        return record()
    except RuntimeError as error:
        if not _broken_from_outside(error):
            raise
    return record()


@contextlib.contextmanager
def explained(mode: str, size: int) -> Iterator[None]:
    """Turn what CUDA says into a sentence that names the operation, where one is known, and the knob."""
    what = f"capture of mode {mode}, size {size}"
    try:
        yield
    except LabkitError:
        raise
    except RuntimeError as error:
        first, out_of_memory = _first_cause(error), False
        # Torch's allocator has an error of its own; the driver, whose memory a graph takes too, says it in words.
        if isinstance(first, torch.cuda.OutOfMemoryError) or "out of memory" in first_line(first).lower():
            out_of_memory, why = True, "the GPU ran out of memory"
            try_ = "Lower gpu_memory_utilization or max_cudagraph_capture_size, or set cudagraph_mode to NONE."
        elif _broken_from_outside(error):
            why, try_ = "something outside broke it twice", "Let no other cell or thread use the GPU meanwhile."
        else:
            why, try_ = "an operation is not allowed in a graph", "Set cudagraph_mode to NONE to run without graphs."
        place = "" if out_of_memory else _place(first)
        raise CaptureError(what, f"{why} ({first_line(first)}{place})", try_, mode, out_of_memory) from error


def _broken_from_outside(error: BaseException) -> bool:
    """Whether the first thing this thread saw was cudaErrorStreamCaptureInvalidated, a capture that was broken already.

    An operation of its own that a capture forbids gives another error, at that operation.
    """
    words = str(_first_cause(error)).lower()
    return "previous error during capture" in words or "captureinvalidated" in words


def _first_cause(error: BaseException) -> BaseException:
    """What went wrong first: ending a broken capture raises again, and hides it."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return error


def _place(error: BaseException) -> str:
    """The line of Python that an error came from, as ", at file.py:12: code"; neither torch's own nor one of here."""
    inside = (os.path.dirname(torch.__file__), __file__)
    lines = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(inside) and f.line]
    return f", at {os.path.basename(lines[-1].filename)}:{lines[-1].lineno}: {lines[-1].line}" if lines else ""


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [n for n in counts if n is not None]
    return sum(known) if len(known) == len(counts) else None


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
    *first, last = [nvtx.named(f"piece {i}", graph.replay) for i, graph in enumerate(graphs)]
    pairs = list(zip(first, calls, strict=True))

    def replay() -> None:
        for segment, call in pairs:
            segment()
            call()
        last()

    return replay
