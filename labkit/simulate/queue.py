"""The launch queue: a host that starts kernels one after another and a device that runs them in order.
Refuses to know models, GPUs and how long anything really takes: every time is an argument.

The host does not wait for what it starts. So the cost of a launch hides behind a kernel that is longer than it, and
stays in sight where kernels are shorter; a replay of a graph is one launch, and its nodes follow each other without the
host.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from labkit.errors import ConfigError
from labkit.measure.spans import Span, StepTimeline

#: Launches that CUDA takes before the next one has to wait; known from documentation and forums, not measured here.
DEPTH = 1024
#: Host time of one replay, where nothing better is given: about what the H200's recordings say for a graph of one node.
GRAPH_LAUNCH_US = 8.7


@dataclasses.dataclass(frozen=True)
class Work:
    """One kernel: what it is, how long it runs on the device, what launching it alone costs the host (both in µs).

    piece: kernels in a row with the same number are nodes of one graph and are started by one replay; None is launched
    by the host itself.
    """

    name: str
    role: str
    device_us: float
    launch_us: float
    piece: int | None = None

    def __post_init__(self) -> None:
        for field in ("device_us", "launch_us"):
            _check_time(f"Work {self.name!r} with {field}", getattr(self, field))


def run_queue(
    work: Sequence[Work],
    *,
    graph: bool = False,
    graph_launch_us: float = GRAPH_LAUNCH_US,
    per_node_us: float = 0.0,
    host_per_node_us: float = 0.0,
    depth: int = DEPTH,
    host_before_us: float = 0.0,
    sync_us: float = 0.0,
    title: str = "",
) -> StepTimeline:
    """Let the host launch `work` in order and the device run it, and say when everything happened, in µs.

    A launch begins when the host is free and fewer than `depth` launches are unfinished. A kernel starts when it was
    launched and the one before it has ended. At the end the host waits for the device.

    Args:
        graph: all of `work` is one graph, whatever its pieces say.
        graph_launch_us, host_per_node_us: host time of a replay, and what each of its nodes adds to that.
        per_node_us: device time before each node of a graph.
        host_before_us: host work before the first launch. sync_us: host work after the device has finished.
        title: what the timeline is called; by default its mode.

    Returns:
        A timeline without a kind; whoever shows it says SIMULATED. Its mode is NONE, PIECEWISE (several replays) or
        FULL (one).

    Raises:
        ConfigError: a time that is negative or not a number, or a depth below 1.
    """
    for name, value in (
        ("graph_launch_us", graph_launch_us), ("per_node_us", per_node_us), ("host_per_node_us", host_per_node_us),
        ("host_before_us", host_before_us), ("sync_us", sync_us),
    ):  # fmt: skip
        _check_time(name, value)
    if depth < 1:
        raise ConfigError(f"depth={depth}", "a queue holds at least one launch", "Take 1 or more; CUDA has about 1024.")
    spans: list[Span] = []
    host = device = 0.0
    finished: list[float] = []  # when the device was done with each launch
    calls = graph_launches = copies = 0

    def on_host(name: str, role: str, duration: float) -> int:
        nonlocal host, calls
        spans.append(Span("host", name, role, host, host + duration))
        host, calls = host + duration, calls + 1
        return calls - 1

    if host_before_us:
        on_host("before the first launch", "other", host_before_us)
    for piece, kernels in launches_of(work, graph=graph):
        if len(finished) >= depth:
            host = max(host, finished[len(finished) - depth])
        if piece:
            graph_launches += 1
            cost = graph_launch_us + host_per_node_us * len(kernels)
            launch = on_host(f"replay of {len(kernels)} kernels", "graph", cost)
        else:
            copies += kernels[0].role == "copy"
            launch = on_host(f"launch {kernels[0].name}", kernels[0].role, kernels[0].launch_us)
        device = max(device, host)
        for kernel in kernels:
            begin = device + (per_node_us if piece else 0.0)
            device = begin + kernel.device_us
            spans.append(Span("device", kernel.name, kernel.role, begin, device, launch))
        finished.append(device)
    if finished or sync_us:
        end = max(host, device) + sync_us  # not a sum of durations: the device's end is met exactly
        spans.append(Span("host", "synchronize", "other", host, end))
        host = end
    mode = "NONE" if not graph_launches else "FULL" if graph_launches == 1 else "PIECEWISE"
    return StepTimeline(
        title=title or mode, mode=mode, spans=tuple(spans), wall_us=host, launches=len(finished) - copies,
        graph_launches=graph_launches,
    )  # fmt: skip


def launches_of(work: Sequence[Work], *, graph: bool = False) -> Iterator[tuple[bool, tuple[Work, ...]]]:
    """What the host starts, in order: (whether it is a replay, its kernels)."""
    if graph:
        if work:
            yield True, tuple(work)
        return
    begin = 0
    while begin < len(work):
        piece, end = work[begin].piece, begin + 1
        while piece is not None and end < len(work) and work[end].piece == piece:
            end += 1
        yield piece is not None, tuple(work[begin:end])
        begin = end


def _check_time(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{name}={value}", "a time is a finite number of µs, zero or more", "Give such a number.")
