"""Kernels in a graph, counted while it is recorded, by asking the CUDA driver. Refuses to know what they compute.

A recording stream knows the graph that it is filling, so nothing has to be kept or instantiated twice to be counted.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

_CAPTURING, _KERNEL = 1, 0  # CU_STREAM_CAPTURE_STATUS_ACTIVE, CU_GRAPH_NODE_TYPE_KERNEL


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
