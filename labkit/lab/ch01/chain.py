"""A chain of small torch operations, measured here: what starting one costs, and what running one takes.

On a CPU a call returns when its work is done, so that starting and working add up. On a CUDA device the host runs
ahead, and the same chain may be replayed as one graph: that path was never run on a GPU. Refuses to know widgets,
and imports torch only when it runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labkit.lab.fields import Choice, Control, Number
from labkit.lab.runs import Context, Outcome
from labkit.measure import clocks, stats
from labkit.measure.provenance import Kind, collect
from labkit.measure.stats import Measurement

ADD, PRODUCT = "addition", "matrix product"
#: Sizes of the sweep; a matrix product has the square root as its side. CPU: a run takes a few seconds at most.
SIZES_CPU = {ADD: tuple(4**k for k in range(11)), PRODUCT: tuple(4**k for k in range(9))}
SIZES_GPU = {ADD: tuple(4**k for k in range(14)), PRODUCT: tuple(4**k for k in range(13))}
EAGER, GRAPH = "one by one", "as one graph"
CURVE_KEYS = ("call_us", "issue_us", "device_us")
SWEEP, SAMPLES, BUDGET_S = 5, 30, 2.0


class ChainSource:
    """Small operations in a row on this machine.

    Args:
        gpu: the GPU's name, "" for the CPU.
    """

    kind = "LIVE"

    def __init__(self, gpu: str = "") -> None:
        self.gpu = gpu
        self.label = f"chain of operations on {gpu or 'this CPU'}"
        self._sizes = SIZES_GPU if gpu else SIZES_CPU

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        sizes = self._sizes.get(str(values.get("op")), self._sizes[ADD])
        found: list[Control] = [
            Choice("op", "Operation", [(ADD, ADD), (PRODUCT, PRODUCT)], help="An addition moves data, a product "
                                                                             "computes."),
            Number("operations", "Operations", 10, 400, 50, help="How many in a row; each needs the one before."),
            Number("elements", "Elements", sizes[0], sizes[-1], 16, points=sizes,
                   help="The size of one operation: numbers added, or entries of a square matrix."),
        ]  # fmt: skip
        if self.gpu:
            found.append(
                Choice("way", "Started", [(EAGER, EAGER), (GRAPH, GRAPH)], help="By a launch each, or by one.")
            )
        return found

    def cost(self, values: Mapping[str, Any]) -> str:
        n = len(self._sizes[values["op"]])
        return f"Run measures the operation at {n} sizes, then the chain at yours: about {5 if self.gpu else 2} s."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        if self.gpu:
            return ["The host starts operations ahead of the GPU; the graph has all of them in one launch."]
        return [
            "A CPU is no GPU: each call returns when its work is done, so nothing runs ahead and there is no graph to "
            "launch. What you can see here, on one core, is the cost of a call: small operations are nearly all of it."
        ]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        import torch

        threads = torch.get_num_threads()
        if not self.gpu:
            # One core: what threads cost each other would be another story.
            torch.set_num_threads(1)
        try:
            return self._run(values, context)
        finally:
            torch.set_num_threads(threads)

    def _run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        op, n, chosen = values["op"], int(values["operations"]), int(values["elements"])
        sizes, device = self._sizes[op], "cuda" if self.gpu else "cpu"
        us: dict[str, list[float]] = {"call_us": []}
        if self.gpu:
            us = {"issue_us": [], "device_us": []}
        for i, size in enumerate(sizes):
            context.stage("measuring sizes", i, len(sizes))
            context.check()
            for key, value in _one_size(op, size, n, device).items():
                us[key].append(value)
        context.stage("measuring the chain", len(sizes), len(sizes))
        one = _operation(op, chosen, device)
        chain = _graph_of(one, n) if self.gpu and values.get("way") == GRAPH else _calls(one, n)
        samples = _chain_us(chain, device, context)
        step = stats.summary(samples).p50
        at = sizes.index(chosen)
        work = n * us["device_us"][at] if self.gpu else max(0.0, step - n * us["call_us"][0])
        # On a CPU nobody waits for a launch; what is there beside work is the price of the calls.
        parts = {"work": min(work, step), ("instructions" if self.gpu else "starting"): max(0.0, step - work)}
        way = values.get("way", EAGER)
        what = f"{n} × {op} of {chosen:,}, {way}"
        data = {"elements": list(sizes), **us, "what": what, "parts": parts, "chosen": chosen}
        numbers = {
            "what": what, "launches": (1 if way == GRAPH else n) if self.gpu else None, "step_us": step,
            "share": 100 * parts["instructions"] / step if self.gpu else None,
            "slower": "host" if step - work > work else "device",
            **{f"{name}_us": value for name, value in parts.items()},
        }  # fmt: skip
        made = collect("LIVE", "panel 01", order="sizes ascending, then the chain", n=len(samples),
                       device="auto" if self.gpu else "cpu")  # fmt: skip
        summary = _gpu_summary(what, n, step, us, at, way) if self.gpu else _cpu_summary(what, n, step, us, sizes, at)
        return Outcome(data, numbers, summary, made, Measurement(Kind.LIVE, tuple(u / 1e3 for u in samples)),
                       stopped=context.should_stop())  # fmt: skip


def crossover(sizes: Sequence[int], us: Mapping[str, Sequence[float]]) -> int | None:
    """The first size whose work takes longer than starting it; None where none does.

    On a CPU starting is what a call on one element takes, and work is the rest of the call.
    """
    if "device_us" in us:
        pairs = zip(sizes, us["issue_us"], us["device_us"], strict=True)
    else:
        pairs = zip(sizes, [us["call_us"][0]] * len(sizes), [u - us["call_us"][0] for u in us["call_us"]], strict=True)
    return next((size for size, start, work in pairs if work >= start), None)


def _one_size(op: str, size: int, n: int, device: str) -> dict[str, float]:
    """µs of one operation: on a CPU a call; on CUDA what starting it costs, and what it takes within a graph."""
    one = _operation(op, size, device)
    if device == "cpu":
        one()
        begin = time.perf_counter()
        one()
        calls = max(1, min(n, int(0.02 / max(1e-7, time.perf_counter() - begin))))
        return {"call_us": stats.summary(clocks.sample_us(one, samples=SWEEP, warmup=2, calls=calls)).p50}
    issue = clocks.host_us(one, calls=n, rounds=SWEEP, device=device)
    replay = _graph_of(one, n)
    return {
        "issue_us": issue,
        "device_us": stats.summary(clocks.sample_us(replay, samples=SWEEP, device=device)).p50 / n,
    }


def _operation(op: str, size: int, device: str) -> Callable[[], Any]:
    """An operation without an allocation: each call reads what the one before has written."""
    import torch

    if op == ADD:
        x = torch.zeros(size, device=device)
        return lambda: x.add_(1.0)
    side = max(1, round(size**0.5))
    a, b = torch.full((side, side), 1.0 / side, device=device), torch.ones((side, side), device=device)
    c = torch.empty_like(b)

    def product() -> None:
        torch.mm(a, b, out=c)

    return product


def _calls(one: Callable[[], Any], n: int) -> Callable[[], Any]:
    def chain() -> None:
        for _ in range(n):
            one()

    return chain


def _graph_of(one: Callable[[], Any], n: int) -> Callable[[], Any]:
    """`n` calls as one CUDA graph. Not run on a GPU when it was written."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            one()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(n):
            one()
    return graph.replay


def _chain_us(chain: Callable[[], Any], device: str, context: Context) -> list[float]:
    """Wall times of the chain, waited for at the end; as many as fit into the budget, three at least."""
    for _ in range(2):
        chain()
    clocks.synchronize(device)
    out: list[float] = []
    begin = time.perf_counter()
    while len(out) < SAMPLES and (len(out) < 3 or time.perf_counter() - begin < BUDGET_S):
        if out and context.should_stop():
            break
        start = time.perf_counter_ns()
        chain()
        clocks.synchronize(device)
        out.append((time.perf_counter_ns() - start) / 1e3)
    return out


def _cpu_summary(
    what: str, n: int, step: float, us: Mapping[str, Sequence[float]], sizes: Sequence[int], at: int
) -> str:
    least = us["call_us"][0]
    mostly = "because nearly all of it is the call itself" if step / n < 2 * least else "because its work takes longer"
    found = crossover(sizes, us)
    end = "at none of the measured sizes" if found is None else f"from {found:,} elements on"
    return (
        f"{what}: {step:,.0f} µs, {step / n:,.2f} µs a call, {mostly}: a call on one element takes {least:.2f} µs. "
        f"Work outweighs that {end}."
    )


def _gpu_summary(what: str, n: int, step: float, us: Mapping[str, Sequence[float]], at: int, way: str) -> str:
    issue, work = us["issue_us"][at], us["device_us"][at]
    side = "the host is the slower side" if issue > work else "the device is the slower side, and starting hides"
    said = f"{what}: {step:,.0f} µs. The host needs {issue:.2f} µs to start one, the device {work:.2f} µs to run one"
    return f"{said}; started one by one, {side}." if way == EAGER else f"{said}; one launch starts all {n}."
