"""What the CUDA driver knows of a stream that records: the kernels so far, and whether it broke. Refuses to know torch.

A recording stream knows the graph that it is filling, so nothing has to be kept or instantiated twice to be counted.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import Any

# CU_STREAM_CAPTURE_STATUS_ACTIVE, CU_GRAPH_NODE_TYPE_KERNEL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_CAPTURING, _KERNEL, _THREAD_LOCAL = 1, 0, 1

#: CUgraphNodeType → what a node does.
_KINDS = {0: "kernel", 1: "copy", 2: "fill", 3: "host", 4: "graph", 5: "empty", 6: "event", 7: "event",
          10: "memory", 11: "memory", 13: "condition"}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Node:
    """One node of a recorded graph. kind: "kernel", "copy", "fill", … name: of a kernel, None where nobody tells."""

    kind: str
    name: str | None = None


class _KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2 (CUDA 12)."""

    _fields_ = [  # noqa: RUF012 - ctypes wants a list
        ("func", ctypes.c_void_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("params", ctypes.c_void_p), ("extra", ctypes.c_void_p), ("kern", ctypes.c_void_p), ("ctx", ctypes.c_void_p),
    ]  # fmt: skip


@functools.cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def kernel_nodes(stream: int, driver: Any = None) -> int | None:
    """Kernels recorded so far on a capturing stream; None where the driver is not there or does not say.

    Args:
        stream: the handle, `torch.cuda.Stream.cuda_stream`.
        driver: the driver's library; None loads it.
    """
    driver = driver or _driver()
    graph = None if driver is None else _recording(driver, stream)
    typed = None if graph is None else _typed_nodes(driver, graph)
    return None if typed is None else sum(kind == _KERNEL for _, kind in typed)


def read_nodes(stream: int, driver: Any = None) -> tuple[Node, ...] | None:
    """The nodes recorded so far on a capturing stream, kernels with their names; None where the driver does not say.

    Names need a driver of CUDA 12.3 or newer, else they are None. Never run on a GPU yet; it is tested with a stand-in.
    Arguments as in `kernel_nodes`.
    """
    driver = driver or _driver()
    graph = None if driver is None else _recording(driver, stream)
    typed = None if graph is None else _typed_nodes(driver, graph)
    if typed is None:
        return None
    return tuple(
        Node(_KINDS.get(kind, "other"), _kernel_name(driver, node) if kind == _KERNEL else None) for node, kind in typed
    )


def _typed_nodes(driver: Any, graph: ctypes.c_void_p) -> list[tuple[int, int]] | None:
    """Every node of a graph with its CUgraphNodeType."""
    count = ctypes.c_size_t()
    if driver.cuGraphGetNodes(graph, None, ctypes.byref(count)):
        return None
    if count.value == 0:
        return []
    nodes, kind = (ctypes.c_void_p * count.value)(), ctypes.c_int()
    out: list[tuple[int, int]] = []
    if driver.cuGraphGetNodes(graph, nodes, ctypes.byref(count)):
        return None
    for node in nodes:
        if driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)):
            return None
        out.append((int(node or 0), kind.value))
    return out


def _kernel_name(driver: Any, node: int) -> str | None:
    params, name = _KernelParams(), ctypes.c_char_p()
    try:
        if driver.cuGraphKernelNodeGetParams_v2(ctypes.c_void_p(node), ctypes.byref(params)):
            return None
        if params.func:
            rc = driver.cuFuncGetName(ctypes.byref(name), ctypes.c_void_p(params.func))
        elif params.kern:
            rc = driver.cuKernelGetName(ctypes.byref(name), ctypes.c_void_p(params.kern))
        else:
            return None
    except AttributeError:  # a driver without the calls
        return None
    return None if rc or not name.value else demangle(name.value.decode(errors="replace"))


@functools.lru_cache(maxsize=4096)
def demangle(name: str) -> str:
    """A C++ symbol as it is written in C++, by the system's own library; other names, and without it, as they are."""
    if not name.startswith("_Z"):
        return name
    library = _cxx()
    if library is None:
        return name
    status = ctypes.c_int()
    made = library.__cxa_demangle(name.encode(), None, None, ctypes.byref(status))
    if not made:
        return name
    text = ctypes.string_at(made).decode(errors="replace")
    ctypes.CDLL(None).free(ctypes.c_void_p(made))
    return text


@functools.cache
def _cxx() -> Any:
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        library.__cxa_demangle.restype = ctypes.c_void_p
        return library
    except (OSError, AttributeError):
        return None


def is_recording(stream: int, driver: Any = None) -> bool | None:
    """Whether a stream records a graph that can be ended; False also where the recording broke, None: nobody says."""
    driver = driver or _driver()
    status = ctypes.c_int()
    try:
        if driver.cuStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status)):
            return None
    except AttributeError:  # no driver, or one without the call
        return None
    return status.value == _CAPTURING


def record_anew(stream: int, driver: Any = None) -> None:
    """End what a stream records, broken or not, throw it away, and let the stream record from here.

    Raises:
        RuntimeError: the driver refuses, or there is none; the stream may or may not record.
    """
    driver = driver or _driver()
    graph, handle = ctypes.c_void_p(), ctypes.c_void_p(stream)
    try:
        driver.cuStreamEndCapture(handle, ctypes.byref(graph))  # of a broken one it says again that it broke
        if graph.value:
            driver.cuGraphDestroy(graph)
        rc = driver.cuStreamBeginCapture_v2(handle, ctypes.c_int(_THREAD_LOCAL))
    except AttributeError as error:
        raise RuntimeError("the CUDA driver's library is not there, or lacks the calls") from error
    if rc:
        raise RuntimeError(f"the CUDA driver refuses to record: error {rc}")


def _recording(driver: Any, stream: int) -> ctypes.c_void_p | None:
    """The graph that a stream is recording into, or None."""
    status, unique = ctypes.c_int(), ctypes.c_uint64()
    graph, depends, edges, count = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
    out = [ctypes.byref(x) for x in (status, unique, graph, depends, edges, count)]
    try:
        rc = driver.cuStreamGetCaptureInfo_v3(ctypes.c_void_p(stream), *out)  # CUDA 12.3
    except AttributeError:
        try:
            del out[4]  # it has no edges
            rc = driver.cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), *out)
        except AttributeError:
            return None
    return graph if rc == 0 and status.value == _CAPTURING and graph.value else None
