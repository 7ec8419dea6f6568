"""A matrix product timed here, on this machine: warm-up, samples, and a profiler that may look on.

On a CPU a call returns when it has finished, so that there is nothing to synchronize; the choice of the timer comes
with a GPU, and that path was never run on one. Refuses to know widgets, and imports torch only when it runs.
"""

from __future__ import annotations

import contextlib
import cProfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from labkit.errors import LabkitError
from labkit.lab.ch02.simulated import EVENTS, NO_SYNC, SYNC, TIMERS
from labkit.lab.fields import Choice, Control, Number, Toggle
from labkit.lab.runs import Context, Outcome
from labkit.measure import clocks, stats
from labkit.measure.provenance import Kind, collect
from labkit.measure.stats import Measurement

SIDES_CPU, SIDES_GPU = (16, 32, 64, 128, 256, 512), (64, 256, 1024, 2048, 4096, 8192)
BUDGET_S = 4.0
#: Bytes that are written before a run, so that its first sample does not find its matrices in the cache.
EVICT = 64 << 20


class ProductSource:
    """A product of two square matrices.

    Args:
        gpu: the GPU's name, "" for the CPU.
    """

    kind = "LIVE"

    def __init__(self, gpu: str = "") -> None:
        self.gpu = gpu
        self.label = f"matrix product on {gpu or 'this CPU'}"

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        sides = SIDES_GPU if self.gpu else SIDES_CPU
        found: list[Control] = [
            Number("side", "Matrix side", sides[0], sides[-1], sides[2], points=sides,
                   help="The product has side³ multiplications."),
            Number("warmup", "Warm-up runs", 0, 10, 0, help="Runs before the first one that is timed."),
            Number("n", "Samples", 5, 200, 50, help="How many runs are timed."),
            Toggle("profiler", "profiler on", False, help=f"{'torch' if self.gpu else 'Python'}'s profiler takes "
                                                          "notes of every call meanwhile."),
        ]  # fmt: skip
        if self.gpu:
            found.insert(0, Choice("timer", "Timer", [(name, name) for name in TIMERS], help="How a time is taken."))
        return found

    def cost(self, values: Mapping[str, Any]) -> str:
        return f"Run takes {BUDGET_S:g} s at most."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        if self.gpu:
            return ["The host runs ahead of the GPU, so that it matters where the clock is read."]
        return [
            "On a CPU a call returns when its work is done: there is nothing to synchronize, and so no such control "
            "here. Warm-up, spread and the profiler's price are real. New matrices are made for every run, on one core."
        ]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        import torch

        threads = torch.get_num_threads()
        if not self.gpu:
            torch.set_num_threads(1)
        try:
            return self._run(values, context)
        finally:
            torch.set_num_threads(threads)

    def _run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        side, warmup, n = int(values["side"]), int(values["warmup"]), int(values["n"])
        timer = str(values.get("timer", SYNC))
        device = "cuda" if self.gpu else "cpu"
        work = _product(side, device)
        context.stage("measuring", 0, n)
        with _profiler(bool(values["profiler"]), device):
            samples = take(work, timer, warmup, n, device, context)
        if not samples:
            context.check()
        found = stats.summary(samples)
        more = ", profiler" if values["profiler"] else ""
        what = f"{side} × {side}{', ' + timer if self.gpu else ''}{more}, {warmup} warm-up"
        data = {"samples_us": samples, "place": list(range(1, len(samples) + 1))}
        numbers = {
            "what": what, "n": len(samples), "warmup": warmup, "median_us": found.p50, "p10_us": found.p10,
            "p90_us": found.p90, "first_us": samples[0],
        }  # fmt: skip
        made = collect("LIVE", "panel 02", order="as run", n=len(samples), device="auto" if self.gpu else "cpu")
        return Outcome(data, numbers, _summary(what, samples, timer if self.gpu else "", warmup), made,
                       Measurement(Kind.LIVE, tuple(us / 1e3 for us in samples)), stopped=len(samples) < n
                       and context.should_stop())  # fmt: skip


def take(work: Callable[[], Any], timer: str, warmup: int, n: int, device: str, context: Context) -> list[float]:
    """`n` samples in µs after `warmup` runs, or as many as fit into the budget; five at least unless stopped."""
    for _ in range(warmup):
        work()
    clocks.synchronize(device)
    out: list[float] = []
    begin = time.perf_counter()
    while len(out) < n and (len(out) < 5 or time.perf_counter() - begin < BUDGET_S):
        if context.should_stop():
            break
        if timer == EVENTS and device != "cpu":
            out += clocks.sample_us(work, samples=1, warmup=0, device=device)
            continue
        start = time.perf_counter_ns()
        work()
        if timer != NO_SYNC:
            clocks.synchronize(device)
        out.append((time.perf_counter_ns() - start) / 1e3)
    clocks.synchronize(device)
    return out


def _product(side: int, device: str) -> Callable[[], Any]:
    """A product on new memory, with the caches full of something else."""
    import torch

    a, b = torch.ones((side, side), device=device), torch.full((side, side), 0.5, device=device)
    out = torch.empty((side, side), device=device)
    torch.zeros(EVICT // 4, device=device).add_(1.0)

    def work() -> None:
        torch.mm(a, b, out=out)

    return work


@contextlib.contextmanager
def _profiler(on: bool, device: str) -> Iterator[None]:
    """Python's own profiler on a CPU, torch's on a GPU."""
    if not on:
        yield
        return
    if device == "cpu":
        notes = cProfile.Profile()
        try:
            notes.enable()
        except ValueError as error:
            why = f"another one is running ({error})"
            raise LabkitError("profiler on", why, "End it, or leave this off.") from None
        try:
            yield
        finally:
            notes.disable()
        return
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):
        yield


def _summary(what: str, samples: Sequence[float], timer: str, warmup: int) -> str:
    found = stats.summary(samples)
    said = f"{what}: median {found.p50:,.1f} µs of {len(samples)} samples (p10–p90 {found.p10:,.1f}–{found.p90:,.1f})"
    first = samples[0] / found.p50
    if timer == NO_SYNC:
        return f"{said}. Nobody waited for the device, so this is the time of launching only."
    if first >= 1.2 and warmup:
        return (
            f"{said}. The first sample took {first:.1f} times the median all the same, because one sample is only one."
        )
    if first >= 1.2:
        return f"{said}. The first sample took {first:.1f} times the median, because nothing was warm yet."
    return f"{said}. The first sample is no slower than the others, because warm-up or earlier runs had prepared it."
