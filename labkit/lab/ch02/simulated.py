"""The SIMULATED sources of chapter 02: timers on a device whose true time is known, and two equal things in some order.

Refuses to read a real clock. Noise comes from a seeded generator, so that a run says the same again.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.lab.ch02.device import Queue
from labkit.lab.fields import Choice, Control, Number, Toggle
from labkit.lab.runs import Context, Outcome, simulated
from labkit.measure import stats
from labkit.measure.provenance import Kind
from labkit.measure.stats import Measurement

NO_SYNC, SYNC, EVENTS = "host clock, no synchronize", "host clock, synchronized", "device events"
TIMERS = (NO_SYNC, SYNC, EVENTS)
LAUNCH_US = 6.0
#: What the first three runs cost the host beside launching: loading code, choosing kernels. Assumed, not measured.
COLD_US = (8000.0, 900.0, 150.0)
#: Assumed noise: a share of the time for every run, and now and then a slow one.
NOISE, SLOW_CHANCE, SLOW = 0.01, 0.04, 0.25

BLOCKS, SAME, TURNED = "A A … B B", "A B A B", "A B B A"
ORDERS = (BLOCKS, SAME, TURNED)


class TimerSource:
    """One piece of work on a simulated device, timed in three ways."""

    kind, label = "SIMULATED", "device with a known time"

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        found: list[Control] = [
            Choice("timer", "Timer", [(name, name) for name in TIMERS], help="How the time of one run is taken."),
            Number("work_us", "Work takes", 50, 10000, 5000, step=50, unit="µs",
                   help="What one run really takes on the device."),
            Number("kernels", "Kernels", 1, 400, 1, help="How many launches share that time."),
            Number("warmup", "Warm-up runs", 0, 10, 0, help="Runs before the first one that is timed."),
            Number("n", "Samples", 5, 200, 50, help="How many runs are timed."),
            Toggle("profiler", "profiler on", False, help="A profiler takes notes at every launch, and that takes "
                                                          "time."),
        ]  # fmt: skip
        if values.get("profiler"):
            found.append(Number("profiler_us", "Profiler takes", 1, 20, 5, unit="µs",
                                help="What its notes cost at each launch; assumed."))  # fmt: skip
        return found

    def cost(self, values: Mapping[str, Any]) -> str:
        return "Run computes all samples at once; no time is measured."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        said = {
            NO_SYNC: "The clock is read before the call and right after it. The call returns when all is launched.",
            SYNC: "The clock is read when the device is idle, and again when it has finished.",
            EVENTS: "The device itself notes when the first kernel begins and the last one ends.",
        }
        return [said[values["timer"]], f"A launch takes {LAUNCH_US:g} µs. The first three runs cost the host "
                f"{', '.join(f'{us:,.0f}' for us in COLD_US)} µs more. All of this is assumed."]  # fmt: skip

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        timer, work, kernels = values["timer"], float(values["work_us"]), int(values["kernels"])
        n, warmup = int(values["n"]), int(values["warmup"])
        extra = float(values.get("profiler_us", 0.0)) if values["profiler"] else 0.0
        truth = _exact(work, kernels, LAUNCH_US)
        samples = timed(timer, work, kernels, LAUNCH_US + extra, warmup, n, _seeded(values))
        found = stats.summary(samples)
        off = found.p50 / truth - 1
        right = "right within 1 %" if abs(off) < 0.01 else f"off by {off:+.1%}"
        summary = f"{timer}: median {found.p50:,.1f} µs of {n} samples; the true time is {truth:,.1f} µs ({right}), "
        summary += f"because {_why(timer, warmup, extra, off, kernels, n)}"
        data = {"samples_us": samples, "place": list(range(1, n + 1))}
        numbers = {
            "what": f"{timer}{', profiler' * bool(extra)}", "n": n, "warmup": warmup, "median_us": found.p50,
            "p10_us": found.p10, "p90_us": found.p90, "truth_us": truth, "first_us": samples[0],
        }  # fmt: skip
        made = simulated("device with a known time", work_us=work, kernels=kernels, launch_us=LAUNCH_US, noise=NOISE,
                         profiler_us=extra)  # fmt: skip
        return Outcome(data, numbers, summary, made, Measurement(Kind.SIMULATED, tuple(us / 1e3 for us in samples)))


class OrderSource:
    """Two things that take the same time, on a machine that gets slower while they are measured."""

    kind, label = "SIMULATED", "two equal things, machine drifting"

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        return [
            Choice("order", "Order", [(name, name) for name in ORDERS], help="Who is measured when."),
            Number("drift", "Drift", 0, 60, 30, unit="%", help="By how much the machine gets slower from first to "
                                                               "last."),
            Number("rounds", "Rounds", 2, 8, 2, points=(2, 4, 6, 8), help="How often each of the two has its turn."),
            Number("n", "Samples each", 5, 50, 10, help="How many samples are taken each time."),
        ]  # fmt: skip

    def cost(self, values: Mapping[str, Any]) -> str:
        return "Run computes all samples at once; no time is measured."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        return ["A and B take the same 100 µs. Whatever difference comes out is made by the order."]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        rounds, n = int(values["rounds"]), int(values["n"])
        turns = turns_of(values["order"], rounds)
        taken = drifting(turns, n, float(values["drift"]) / 100, _seeded(values))
        went = 1 if values["order"] == BLOCKS else rounds
        a, b = (Measurement(Kind.SIMULATED, tuple(us for us, _ in taken[name]), name, went) for name in "AB")
        ratio = stats.compared(b, a)
        said = f"B takes {ratio.value:.2f} times as long as A" if ratio.shown else "no difference shown"
        why = {
            BLOCKS: "all of B came after all of A, when the machine was slower",
            SAME: "in every round B came after A, a little later each time",
            TURNED: "each came first as often as last, so that a steady drift meets both alike",
        }[values["order"]]
        wrong = " That is wrong: the two are equal." if ratio.shown else " That is right: the two are equal."
        data = {
            "samples_us": [us for us, _ in taken["A"]], "place": [at for _, at in taken["A"]],
            "samples_b_us": [us for us, _ in taken["B"]], "place_b": [at for _, at in taken["B"]],
        }  # fmt: skip
        numbers = {
            "what": values["order"], "n": 2 * n * rounds, "ratio": ratio.value,
            "median_us": a.summary.p50, "p10_us": a.summary.p10, "p90_us": a.summary.p90,
            "median_b_us": b.summary.p50, "p10_b_us": b.summary.p10, "p90_b_us": b.summary.p90,
        }  # fmt: skip
        made = simulated("drifting machine", drift=float(values["drift"]), rounds=rounds, samples=n, noise=NOISE)
        summary = f"{values['order']}: {said} ({ratio.value:.3f}), because {why}.{wrong}"
        return Outcome(data, numbers, summary, made)


def timed(
    timer: str, work_us: float, kernels: int, launch_us: float, warmup: int, n: int, rng: random.Random
) -> list[float]:
    """What a timer reads in `n` runs after `warmup` others, in µs."""
    queue, out = Queue(), []
    for i in range(warmup + n):
        if timer != NO_SYNC:
            queue.synchronize()
        begin = queue.now
        queue.now += COLD_US[i] if i < len(COLD_US) else 0.0
        share = max(0.5, rng.gauss(1.0, NOISE)) * (1 + SLOW * (rng.random() < SLOW_CHANCE))
        device = queue.run(kernels, work_us / kernels * share, launch_us * max(0.5, rng.gauss(1.0, NOISE)))
        if timer == SYNC:
            queue.synchronize()
        if i >= warmup:
            out.append(device if timer == EVENTS else queue.now - begin)
    return out


def turns_of(order: str, rounds: int) -> list[str]:
    """Whose turn it is, one entry a turn."""
    if order == BLOCKS:
        return ["A"] * rounds + ["B"] * rounds
    pairs = [("B", "A") if order == TURNED and i % 2 else ("A", "B") for i in range(rounds)]
    return [name for pair in pairs for name in pair]


def drifting(turns: Sequence[str], n: int, drift: float, rng: random.Random) -> dict[str, list[tuple[float, int]]]:
    """(µs, place) of every sample by name: 100 µs each, later ones longer, up to `drift` at the end."""
    out: dict[str, list[tuple[float, int]]] = {name: [] for name in dict.fromkeys(turns)}
    last = max(1, len(turns) * n - 1)
    for i in range(len(turns) * n):
        out[turns[i // n]].append((100.0 * (1 + drift * i / last) * rng.gauss(1.0, NOISE), i + 1))
    return out


def _exact(work_us: float, kernels: int, launch_us: float) -> float:
    """The step of a synchronized, warm, noiseless run."""
    queue = Queue()
    queue.run(kernels, work_us / kernels, launch_us)
    queue.synchronize()
    return queue.now


def _why(timer: str, warmup: int, extra: float, off: float, kernels: int, n: int) -> str:
    if timer == NO_SYNC:
        if kernels * n > 1024 and off > -0.5:
            return "the queue of launches was full: the host had to wait, and its clock shows that now and then."
        return "the call returns as soon as the work is launched; the device has hardly begun."
    cold = "" if warmup >= len(COLD_US) else " The first samples are not warm yet; the median forgives a few of them."
    if extra and abs(off) >= 0.02:
        return f"the profiler adds {extra:g} µs to each of {kernels} launches, and launches are what takes long here."
    if timer == EVENTS:
        return f"the events bracket the device's own work, without the launch before it.{cold}"
    return f"the clock starts on an idle device and stops when it has finished.{cold}"


def _seeded(values: Mapping[str, Any]) -> random.Random:
    return random.Random(zlib.crc32(json.dumps(dict(values), sort_keys=True, default=str).encode()))
