"""How many kernels and graphs the host starts, and what starting one costs. Refuses to know what is computed.

A *launch* is a kernel or a graph that the host starts. Copies and fills are host calls too, counted apart.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from labkit.measure import clocks

if TYPE_CHECKING:
    import torch

#: Kinds of launch, as in `LaunchCount.by_kind` and in the cost table.
KINDS = ("torch", "gemm", "triton", "graph", "copy")

_KERNEL = re.compile(r"^(cudaLaunch(Cooperative)?Kernel|cuLaunch(Cooperative)?Kernel)")
_GRAPH = re.compile(r"^(cudaGraphLaunch|cuGraphLaunch)")
_COPY = re.compile(r"^(cudaMemcpy|cudaMemset|cuMemcpy|cuMemset)")
_GEMM_NAME = re.compile(r"gemm|gemv|nvjet|splitk|cutlass(?!.*(fmha|flash))|cublas|xmma|dot_kernel", re.IGNORECASE)
_TRITON_NAME = re.compile(r"^[A-Za-z_]\w*$")
_ATTENTION_NAME = re.compile(r"fmha|flash|sdpa", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class LaunchCount:
    """What one call started.

    launches: kernels and graphs the host started; None when nothing could be traced, `reason` then says why.
    graph_launches: graphs among them. copies: copies and fills the host asked for. kernels: kernels that ran on the
    device, those inside graphs included. by_kind: launches and copies by kind of KINDS. names: kernels that the host
    started one by one, by name. complete: false when the trace lost the kernel of a launch.
    """

    launches: int | None
    graph_launches: int = 0
    copies: int = 0
    kernels: int = 0
    by_kind: dict[str, int] = dataclasses.field(default_factory=dict)
    names: dict[str, int] = dataclasses.field(default_factory=dict)
    complete: bool = True
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)


def call_kind(name: str) -> str:
    """What a call of the runtime or the driver starts: "kernel", "graph", "copy" (fills too), or "" for nothing."""
    for kind, pattern in (("kernel", _KERNEL), ("graph", _GRAPH), ("copy", _COPY)):
        if pattern.match(name):
            return kind
    return ""


def kernel_kind(name: str, *, driver_api: bool) -> str:
    """One of "gemm", "triton", "torch" for a kernel, from its name and the API that started it.

    Triton starts kernels through the driver's API and names them like Python functions; torch's own are C++ templates.
    """
    if _GEMM_NAME.search(name) and not _ATTENTION_NAME.search(name) and not (driver_api and name.startswith("_")):
        return "gemm"
    if driver_api and _TRITON_NAME.match(name):
        return "triton"
    return "torch"


def from_trace(events: Iterable[Mapping[str, Any]]) -> LaunchCount:
    """Count the launches in the `traceEvents` of a profiler's Chrome trace.

    A host call and the kernels it started share a correlation id; a graph's kernels all carry the id of its launch.
    """
    calls: dict[Any, tuple[str, bool]] = {}
    kernels: dict[Any, list[str]] = collections.defaultdict(list)
    anonymous = 0
    for event in events:
        category, name = event.get("cat"), str(event.get("name", ""))
        correlation = (event.get("args") or {}).get("correlation")
        if category in ("cuda_runtime", "cuda_driver"):
            if not (_KERNEL.match(name) or _GRAPH.match(name) or _COPY.match(name)):
                continue
            driver = category == "cuda_driver"
            if correlation is None:
                anonymous += 1
                correlation = f"anonymous {anonymous}"
            # The runtime's call may be seen a second time as the driver's call it makes: one launch, the runtime's.
            if correlation not in calls or not driver:
                calls[correlation] = (name, driver)
        elif category == "kernel":
            kernels[correlation].append(name)
    by_kind: collections.Counter[str] = collections.Counter()
    names: collections.Counter[str] = collections.Counter()
    complete = True
    for correlation, (call, driver) in calls.items():
        if _COPY.match(call):
            by_kind["copy"] += 1
        elif _GRAPH.match(call):
            by_kind["graph"] += 1
        else:
            started = kernels.get(correlation, [])
            complete = complete and bool(started)
            name = started[0] if started else "?"
            names[name] += 1
            by_kind[kernel_kind(name, driver_api=driver)] += 1
    return LaunchCount(
        launches=sum(n for kind, n in by_kind.items() if kind != "copy"),
        graph_launches=by_kind["graph"],
        copies=by_kind["copy"],
        kernels=sum(map(len, kernels.values())),
        by_kind={kind: by_kind[kind] for kind in KINDS if by_kind[kind]},
        names=dict(names.most_common()),
        complete=complete,
    )


def why_not() -> str:
    """Why launches cannot be counted here; empty when they can."""
    try:
        import torch
    except Exception as error:
        return f"torch does not load ({type(error).__name__}: {error})"
    if not torch.cuda.is_available():
        return "there is no CUDA device, and a CPU launches nothing"
    return ""


def count(work: Callable[[], Any]) -> LaunchCount:
    """Trace one call of `work` and count what the host started in it; let `work` run once before.

    On a machine without CUDA `launches` is None and `reason` says so; `work` is not called then.
    """
    reason = why_not()
    if reason:
        return LaunchCount(None, reason=reason)
    return from_trace(trace(work))


#: The engine's name for it.
count_launches = count


def trace(work: Callable[[], Any]) -> list[dict[str, Any]]:
    """The Chrome-trace events of one call of `work` on CUDA, device synchronized before and after."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    _warm_profiler()
    collecting = gc.isenabled()
    gc.disable()
    try:
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            work()
            torch.cuda.synchronize()
    finally:
        if collecting:
            gc.enable()
    handle, path = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    try:
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8", errors="replace") as file:
            return json.load(file)["traceEvents"]
    finally:
        os.unlink(path)


_profiler_is_warm = False


def _warm_profiler() -> None:
    """The first trace of a process may come up empty while the tracing library attaches: throw one away."""
    global _profiler_is_warm
    if _profiler_is_warm:
        return
    import torch
    from torch.profiler import ProfilerActivity, profile

    x = torch.zeros(8, device="cuda")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):
        x.add_(1)
        torch.cuda.synchronize()
    _profiler_is_warm = True


@dataclasses.dataclass(frozen=True)
class LaunchCost:
    """Host microseconds per launch by kind, and how many launches one probe made (a GEMM may start two kernels)."""

    us: dict[str, float]
    launches_per_call: dict[str, int]


def launch_cost(
    device: torch.device | str = "cuda",
    *,
    dtype: str = "bfloat16",
    hidden: int = 576,
    batch: int = 1,
    calls: int = 200,
    triton: Callable[[], Any] | None = None,
) -> LaunchCost:
    """What it costs the host, here and now, to start one of each kind; medians, nothing is waited for.

    torch: `add_` on 8 elements. gemm: `F.linear` of `[batch, hidden]` with a square weight, per kernel it starts.
    triton: the caller's, a small kernel through the engine's own launcher. graph: a replay of one small kernel.
    copy: a pinned 8-element copy to the device. On a CPU there are "torch" and "gemm", arithmetic included.

    Args:
        triton: starts one small Triton kernel per call; None leaves that kind out.
    """
    import torch

    kind = getattr(torch, dtype)
    on_gpu = str(device).startswith("cuda")
    x, a = torch.zeros(8, device=device), torch.randn(batch, hidden, device=device, dtype=kind)
    weight = torch.randn(hidden, hidden, device=device, dtype=kind)
    probes: dict[str, Callable[[], Any]] = {
        "torch": lambda: x.add_(1.0),
        "gemm": lambda: torch.nn.functional.linear(a, weight),
    }
    if on_gpu:
        pinned = torch.zeros(8, pin_memory=True)
        probes["copy"] = lambda: x.copy_(pinned, non_blocking=True)
        probes["graph"] = _graph_probe(x)
        if triton is not None:
            probes["triton"] = triton
    us, per_call = {}, {}
    with torch.inference_mode():
        for name, probe in probes.items():
            probe()
            counted = count(probe).launches if name == "gemm" else 1
            per_call[name] = max(counted or 1, 1)
            us[name] = round(clocks.host_us(probe, calls=calls, device=device) / per_call[name], 3)
    return LaunchCost({name: us[name] for name in KINDS if name in us}, per_call)


def launch_cost_us(device: torch.device | str = "cuda", **kwargs: Any) -> dict[str, float]:
    """`launch_cost`, microseconds by kind alone."""
    return launch_cost(device, **kwargs).us


def _graph_probe(x: torch.Tensor) -> Callable[[], Any]:
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1.0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        x.add_(1.0)
    return graph.replay


def explained_us(by_kind: Mapping[str, int], cost_us: Mapping[str, float]) -> float:
    """Σ (launches of a kind × that kind's cost), in host microseconds; a kind without a cost counts as a torch op."""
    fallback = cost_us.get("torch", 0.0)
    return sum(n * cost_us.get(kind, fallback) for kind, n in by_kind.items())
