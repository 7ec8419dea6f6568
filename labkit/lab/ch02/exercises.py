"""The exercises of chapter 02: a timer that waits, a verdict that knows noise, an order that cancels drift.

Refuses to read a real clock: the device is simulated, and its true time is known.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from labkit.lab.ch02.device import FakeDevice
from labkit.lab.exercises import Case, Exercise, Wrong, case

# --- 02.1 ------------------------------------------------------------------------------------------------------------


def time_us(device: FakeDevice, warmup: int, n: int) -> list[float]:
    """µs of each of n runs, from an idle device to an idle device, after `warmup` runs that do not count."""
    for _ in range(warmup):
        device.issue()
    samples = []
    for _ in range(n):
        device.synchronize()
        begin = device.clock()
        device.issue()
        device.synchronize()
        samples.append(device.clock() - begin)
    return samples


def _timer_cases(rng: random.Random) -> Iterator[Case]:
    plain, cold, busy = "work runs behind the host", "the first runs are cold", "others' work still runs"
    yield case(plain, FakeDevice(5000, 6), 0, 3)
    yield case(cold, FakeDevice(50, 6, (300, 40)), 2, 3)
    yield case(busy, FakeDevice(50, 6, (), 400), 0, 3)
    for _ in range(4):
        kernel, launch = float(rng.randint(20, 900)), float(rng.randint(3, 12))
        yield case(plain, FakeDevice(kernel, launch), 0, rng.randint(2, 6))
        extra = tuple(float(rng.randint(50, 900)) for _ in range(rng.randint(1, 3)))
        yield case(cold, FakeDevice(kernel, launch, extra), len(extra), rng.randint(2, 5))
        yield case(busy, FakeDevice(kernel, launch, (), float(rng.randint(200, 900))), 0, rng.randint(2, 5))


def _never_waits(device: FakeDevice, warmup: int, n: int) -> list[float]:
    for _ in range(warmup):
        device.issue()
    samples = []
    for _ in range(n):
        begin = device.clock()
        device.issue()
        samples.append(device.clock() - begin)
    return samples


def _waits_after_only(device: FakeDevice, warmup: int, n: int) -> list[float]:
    for _ in range(warmup):
        device.issue()
        device.synchronize()
    samples = []
    for _ in range(n):
        begin = device.clock()
        device.issue()
        device.synchronize()
        samples.append(device.clock() - begin)
    return samples


def _no_warmup(device: FakeDevice, warmup: int, n: int) -> list[float]:
    samples = []
    for _ in range(n):
        device.synchronize()
        begin = device.clock()
        device.issue()
        device.synchronize()
        samples.append(device.clock() - begin)
    return samples


def _one_clock_around_all(device: FakeDevice, warmup: int, n: int) -> list[float]:
    for _ in range(warmup):
        device.issue()
    device.synchronize()
    begin = device.clock()
    for _ in range(n):
        device.issue()
    device.synchronize()
    return [(device.clock() - begin) / n] * n


TIME_US = Exercise(
    id="02.1",
    title="Mend the timer",
    minutes=7,
    items=(),
    ask="This timer is broken: <pre>samples = []\nfor _ in range(n):\n    begin = device.clock()\n    device.issue()\n"
    "    samples.append(device.clock() - begin)\nreturn samples</pre> Write <code>time_us(device, warmup, n)</code>, "
    "which returns a list of the <code>n</code> times in µs, each from an idle device until the work is done, after "
    "<code>warmup</code> runs that do not count. <code>device.issue()</code> starts the work and returns at once, "
    "<code>device.synchronize()</code> waits until the device has nothing left to do, <code>device.clock()</code> is "
    "the host's clock in µs. Somebody else's work may still be running when you are called.",
    solution=time_us,
    cases=_timer_cases,
    wrong=(
        Wrong("never waits", _never_waits, "You stop the clock when the work is launched. It has hardly begun."),
        Wrong("waits after only", _waits_after_only, "You start the clock while earlier work still runs, so that the "
                                                     "first "
              "sample has that in it."),
        Wrong("no warm-up", _no_warmup, "You count the cold runs. They are slow once, and not what you want to know."),
        Wrong("one clock around all", _one_clock_around_all, "You time all runs together and divide. Then launches "
                                                             "overlap "
              "with work, and every sample is the same: the spread is gone."),
    ),
    hints=(
        "When may the clock be started, and when may it be stopped?",
        "Both times the device has to be idle. Only <code>synchronize()</code> makes sure of that.",
        "For each sample: synchronize, read the clock, issue, synchronize, read the clock.",
    ),
    explanation="Without waiting at the end you time the launch. Without waiting at the start the first sample holds "
    "what was still running. The true time here is launch plus kernel, in every sample.",
    redundant={"work runs behind the host": "The plain case: a timer that fails there fails in all groups."},
)  # fmt: skip

# --- 02.2 ------------------------------------------------------------------------------------------------------------


def verdict(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, bool]:
    """Both medians, and whether a difference is shown: 5 % of b's median or more, and bands that do not overlap."""
    low_a, median_a, high_a = np.percentile(a, (10, 50, 90))
    low_b, median_b, high_b = np.percentile(b, (10, 50, 90))
    apart = high_a < low_b or high_b < low_a
    large = abs(median_a / median_b - 1) >= 0.05
    return float(median_a), float(median_b), bool(apart and large)


def _around(rng: random.Random, middle: float, spread: float, n: int) -> list[float]:
    return [round(middle * (1 + spread * rng.uniform(-1, 1)), 2) for _ in range(n)]


def _verdict_cases(rng: random.Random) -> Iterator[Case]:
    clear, overlap, small, slow = "a clear difference", "bands overlap", "less than 5 percent", "one slow run"
    for i in range(4):
        n, base = rng.randint(11, 30), float(rng.randint(50, 900))
        pair = (_around(rng, base, 0.02, n), _around(rng, base * rng.uniform(1.2, 2.0), 0.02, n))
        yield case(clear, *(pair if i % 2 == 0 else pair[::-1]))
        yield case(overlap, _around(rng, base, 0.3, n), _around(rng, base * 0.88, 0.3, n))
        yield case(small, _around(rng, base * 1.03, 0.004, n), _around(rng, base, 0.004, n))
        b = _around(rng, base, 0.02, n)
        yield case(slow, _around(rng, base * 1.3, 0.02, n), [*b[:-1], base * 9])


def _mean(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, bool]:
    _, _, shown = verdict(a, b)
    return float(np.mean(a)), float(np.mean(b)), shown


def _no_floor(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, bool]:
    (low_a, high_a), (low_b, high_b) = np.percentile(a, (10, 90)), np.percentile(b, (10, 90))
    return float(np.median(a)), float(np.median(b)), bool(high_a < low_b or high_b < low_a)


def _no_bands(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, bool]:
    return float(np.median(a)), float(np.median(b)), bool(abs(np.median(a) / np.median(b) - 1) >= 0.05)


def _extremes(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, bool]:
    apart = max(a) < min(b) or max(b) < min(a)
    return float(np.median(a)), float(np.median(b)), bool(apart and abs(np.median(a) / np.median(b) - 1) >= 0.05)


def _one_direction(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, bool]:
    low_a, high_b = np.percentile(a, 10), np.percentile(b, 90)
    return float(np.median(a)), float(np.median(b)), bool(low_a > high_b and np.median(a) / np.median(b) - 1 >= 0.05)


VERDICT = Exercise(
    id="02.2",
    title="A difference, or noise?",
    minutes=7,
    items=(),
    ask="Write <code>verdict(a, b)</code> for two lists of times. Return three values: the median of <code>a</code>, "
    "the median of <code>b</code>, and whether a difference is <i>shown</i> (True or False). It is shown when the "
    "median of <code>a</code> is at least 5 % above or below that of <code>b</code>, <i>and</i> the bands from the "
    "10th to the 90th percentile do not overlap. <code>np.percentile(a, 10)</code> is the 10th percentile of "
    "<code>a</code>.",
    solution=verdict,
    cases=_verdict_cases,
    wrong=(
        Wrong("mean", _mean, "You take the mean. A single slow run moves it; the median does not notice."),
        Wrong("no floor", _no_floor, "You call a difference of less than 5 % shown. Clocks and neighbours do that."),
        Wrong("no bands", _no_bands, "You look at the medians only. If the bands overlap, the next run may say the "
                                     "opposite."),
        Wrong("extremes", _extremes, "You compare the fastest with the slowest sample: one slow run hides every "
                                     "difference."),
        Wrong("one direction", _one_direction, "You only see that <code>a</code> is slower, not that it is faster."),
    ),
    hints=(
        "Three numbers of each list are enough: the 10th, 50th and 90th percentile.",
        "Two bands do not overlap when the upper end of one is below the lower end of the other. There are two ways "
        "round.",
        "<code>apart = high_a &lt; low_b or high_b &lt; low_a</code>; "
        "<code>large = abs(median_a / median_b - 1) &gt;= 0.05</code>; return both medians and "
        "<code>bool(apart and large)</code>.",
    ),
    explanation="Both conditions keep you honest: the bands say whether it would come out again, the 5 % whether it "
    "is worth a word. The panel's own rule has the same 5 %, but asks how well the medians themselves are known: with "
    "many samples it may show a difference although the bands overlap.",
    show=lambda args: f"verdict(a, b) with\na = {list(args[0])}\nb = {list(args[1])}",
)  # fmt: skip

# --- 02.3 ------------------------------------------------------------------------------------------------------------


def rotation(names: Sequence[Any], rounds: int) -> list[Any]:
    """Whose turn it is: forwards in one round, backwards in the next."""
    order: list[Any] = []
    for i in range(rounds):
        order += list(names) if i % 2 == 0 else list(names)[::-1]
    return order


def _rotation_cases(rng: random.Random) -> Iterator[Case]:
    two, three, odd = "two things", "three things or more", "an odd number of rounds"
    yield case(two, ["A", "B"], 2)
    yield case(three, ["A", "B", "C"], 2)
    yield case(odd, ["A", "B"], 3)
    yield case(odd, ["eager", "graph"], 1)
    for _ in range(4):
        yield case(two, rng.sample(["eager", "graph", "compiled", "both"], 2), 2 * rng.randint(1, 4))
        yield case(three, rng.sample("ABCDEFG", rng.randint(3, 5)), 2 * rng.randint(1, 3))
        yield case(odd, rng.sample("ABCDEFG", 2), 2 * rng.randint(1, 3) + 1)


def _same_order(names: Sequence[Any], rounds: int) -> list[Any]:
    return list(names) * rounds


def _in_blocks(names: Sequence[Any], rounds: int) -> list[Any]:
    return [name for name in names for _ in range(rounds)]


def _swap_two(names: Sequence[Any], rounds: int) -> list[Any]:
    swapped = [names[1], names[0], *names[2:]]
    return [name for i in range(rounds) for name in (names if i % 2 == 0 else swapped)]


def _pairs_of_rounds(names: Sequence[Any], rounds: int) -> list[Any]:
    return (list(names) + list(names)[::-1]) * (rounds // 2)


ROTATION = Exercise(
    id="02.3",
    title="Who goes first?",
    minutes=5,
    items=(),
    ask="Write <code>rotation(names, rounds)</code>: the order in which things are measured, as one list of names. In "
    "every round each has its turn once. The first round goes forwards through <code>names</code>, the second "
    "backwards, the third forwards again, and so on: A B, B A, A B, … <code>rounds</code> may be odd.",
    solution=rotation,
    cases=_rotation_cases,
    wrong=(
        Wrong("same order", _same_order, "In each of your rounds the same one goes first, so that a drift always "
                                         "meets the "
              "last one more."),
        Wrong("blocks", _in_blocks, "You measure all of one, then all of the next. Whatever drifts meanwhile looks "
                                    "like a "
              "difference."),
        Wrong("swap two", _swap_two, "You swap the first two only. The others still have the same place in every "
                                     "round."),
        Wrong("pairs of rounds", _pairs_of_rounds, "You build two rounds at a time, and lose the last one when their "
                                                   "number "
              "is odd."),
    ),
    hints=(
        "What must be the same for A and B if the machine gets slower all the time?",
        "Number the rounds from 0: even ones go forwards, odd ones backwards.",
        "<code>order += list(names) if i % 2 == 0 else list(names)[::-1]</code> for every round <code>i</code>.",
    ),
    explanation="With A B B A each thing stands equally early and equally late, so that a steady drift adds the same "
    "to both. What is left of it shows in the spread, where it belongs.",
    redundant={"two things": "The plain case comes first; who fails there fails with three things or odd rounds, too."},
)  # fmt: skip

EXERCISES = (TIME_US, VERDICT, ROTATION)
