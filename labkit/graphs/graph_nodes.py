"""What the CUDA driver knows of a stream that records: the kernels so far, and whether it broke. Refuses to know torch.

A recording stream knows the graph that it is filling, so nothing has to be kept or instantiated twice to be counted.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

# CU_STREAM_CAPTURE_STATUS_ACTIVE, CU_GRAPH_NODE_TYPE_KERNEL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_CAPTURING, _KERNEL, _THREAD_LOCAL = 1, 0, 1


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
    if graph is None:
        return None
    count = ctypes.c_size_t()
    if driver.cuGraphGetNodes(graph, None, ctypes.byref(count)):
        return None
    if count.value == 0:
        return 0
    nodes, kind, kernels = (ctypes.c_void_p * count.value)(), ctypes.c_int(), 0
    if driver.cuGraphGetNodes(graph, nodes, ctypes.byref(count)):
        return None
    for node in nodes:
        if driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)):
            return None
        kernels += kind.value == _KERNEL
    return kernels


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
