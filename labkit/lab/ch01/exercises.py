"""The exercises of chapter 01: the time of an asynchronous queue, the size that hides a launch, the weights' floor.

Refuses to measure: every number is given.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

from labkit.lab.exercises import Case, Exercise, Wrong, case

# --- 01.1 ------------------------------------------------------------------------------------------------------------


def step_time(kernels: Sequence[float], launch: float) -> float:
    """When the GPU has finished: the host launches the next kernel without waiting for the one before."""
    host = device = 0.0
    for kernel in kernels:
        host += launch
        device = max(device, host) + kernel
    return device


def _step_cases(rng: random.Random) -> Iterator[Case]:
    short, long, mixed = "kernels shorter than a launch", "kernels longer than a launch", "long ones among short ones"
    yield case(short, [3.0] * 8, 6.0)
    yield case(long, [20.0] * 4, 6.0)
    yield case(mixed, [30.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0], 6.0)
    yield case("nothing to launch", [], 6.0)
    for _ in range(5):
        launch = float(rng.randint(5, 9))
        yield case(short, [rng.randint(2, 8) / 2 for _ in range(rng.randint(3, 9))], launch)
        yield case(long, [float(rng.randint(10, 60)) for _ in range(rng.randint(3, 6))], launch)
        head = [float(rng.randint(30, 60))] + [1.0] * rng.randint(2, 3)
        yield case(mixed, head + [1.0] * rng.randint(9, 14) + [float(rng.randint(30, 40)), 1.0], launch)


def _sum_of_both(kernels: Sequence[float], launch: float) -> float:
    return launch * len(kernels) + sum(kernels)


def _larger_total(kernels: Sequence[float], launch: float) -> float:
    return max(launch * len(kernels), sum(kernels))


def _one_or_the_other(kernels: Sequence[float], launch: float) -> float:
    if not kernels:
        return 0.0
    return max(launch * len(kernels) + kernels[-1], launch + sum(kernels))


def _launch_of_nothing(kernels: Sequence[float], launch: float) -> float:
    host, device = launch, launch
    for kernel in kernels:
        device = max(device, host) + kernel
        host += launch
    return device


_IN_MIXED = "It stands here to be read: what fails on it fails on long kernels among short ones, too."

STEP_TIME = Exercise(
    id="01.1",
    title="A step is not a sum",
    minutes=6,
    items=("A1", "B1"),
    ask="Write <code>step_time(kernels, launch)</code>: the time, in µs after the step began, at which the GPU has "
    "finished. <code>kernels</code> is a list of GPU times in µs, in order; <code>launch</code> is what the host "
    "needs to start one of them. The host starts the next kernel without waiting. A kernel begins when it was launched "
    "<i>and</i> the one before it has ended. No kernels take 0.",
    solution=step_time,
    cases=_step_cases,
    wrong=(
        Wrong("sum", _sum_of_both, "You add launching and running. They overlap: the host starts the next kernel while "
              "the GPU runs this one."),
        Wrong("larger total", _larger_total, "You take the larger of the two totals. Even then somebody waits: the GPU "
              "for the first launch, or the step for the last kernel."),
        Wrong("all or nothing", _one_or_the_other, "You decide once for the whole step who is slower. It can change on "
              "the way: behind a long kernel launches pile up, behind short ones the GPU waits again."),
        Wrong("launch of nothing", _launch_of_nothing, "You count a launch although there is nothing to launch."),
    ),
    hints=(
        "Keep two clocks: when the host has started the next kernel, and when the GPU is done with the last one.",
        "Every kernel moves the host's clock by one launch. The GPU can begin at the later of the two clocks.",
        "<code>host += launch</code>, then <code>device = max(device, host) + kernel</code>, for each kernel.",
    ),
    explanation="The GPU waits only when its clock is behind the host's. With short kernels that is so each time, and "
    "the step is as long as its launches; with long ones it is so once, and the launches vanish behind the work.",
    redundant={"kernels shorter than a launch": _IN_MIXED, "kernels longer than a launch": _IN_MIXED},
)  # fmt: skip

# --- 01.2 ------------------------------------------------------------------------------------------------------------


def hiding_size(launch_us: float, fixed_us: float, bytes_per_element: int, gb_s: float) -> int:
    """The smallest number of elements whose kernel takes at least as long as a launch."""
    bytes_per_us = gb_s * 1e3
    elements = (launch_us - fixed_us) * bytes_per_us / bytes_per_element
    return max(1, math.ceil(elements))


#: µs of a launch beyond the fixed time, for which every order of multiplying and dividing comes out at a whole size.
_EXACT_US = (1, 2, 3, 4, 6, 7, 8, 11, 12)


def _size_cases(rng: random.Random) -> Iterator[Case]:
    yield case("between two sizes", 6.0, 2.5, 12, 4000.0)
    yield case("exactly a size", 6.0, 2.0, 8, 4000.0)
    yield case("hidden already", 3.0, 3.5, 8, 4000.0)
    for _ in range(6):
        fixed, per = rng.randint(2, 6) / 2, rng.choice([6, 12, 14])
        yield case(
            "between two sizes", fixed + 1.25 + rng.randint(0, 9), fixed, per, float(rng.choice([1000, 2000, 4000]))
        )
        yield case(
            "exactly a size", fixed + rng.choice(_EXACT_US), fixed, rng.choice([4, 8]), float(rng.choice([1000, 4000]))
        )
    for _ in range(3):
        fixed = rng.randint(4, 9) / 2
        yield case("hidden already", fixed - rng.randint(1, 3) / 2, fixed, 8, 2000.0)


def _no_fixed_time(launch_us: float, fixed_us: float, bytes_per_element: int, gb_s: float) -> int:
    return max(1, math.ceil(launch_us * gb_s * 1e3 / bytes_per_element))


def _rounded_down(launch_us: float, fixed_us: float, bytes_per_element: int, gb_s: float) -> int:
    return max(1, math.floor((launch_us - fixed_us) * gb_s * 1e3 / bytes_per_element))


def _one_too_many(launch_us: float, fixed_us: float, bytes_per_element: int, gb_s: float) -> int:
    return max(1, math.floor((launch_us - fixed_us) * gb_s * 1e3 / bytes_per_element) + 1)


def _below_one(launch_us: float, fixed_us: float, bytes_per_element: int, gb_s: float) -> int:
    return math.ceil((launch_us - fixed_us) * gb_s * 1e3 / bytes_per_element)


def _wrong_unit(launch_us: float, fixed_us: float, bytes_per_element: int, gb_s: float) -> int:
    return max(1, math.ceil((launch_us - fixed_us) * gb_s * 1e9 / bytes_per_element))


HIDING_SIZE = Exercise(
    id="01.2",
    title="Large enough to hide a launch",
    minutes=7,
    items=("A1",),
    ask="A kernel takes <code>fixed_us</code> whatever it does, and the time to move its bytes on top: "
    "<code>bytes_per_element</code> for each element, at <code>gb_s</code> gigabytes (10<sup>9</sup> bytes) a second. "
    "Write <code>hiding_size(launch_us, fixed_us, bytes_per_element, gb_s)</code>: the smallest number of elements, a "
    "whole number from 1 on, at which the kernel takes at least as long as a launch.",
    solution=hiding_size,
    cases=_size_cases,
    wrong=(
        Wrong("no fixed time", _no_fixed_time, "You leave out the fixed time: part of the launch is hidden without any "
              "byte."),
        Wrong("rounded down", _rounded_down, "You round down, and that kernel is still a little shorter than the "
                                             "launch."),
        Wrong("one too many", _one_too_many, "You always go one further, even where a size fits exactly."),
        Wrong("below one", _below_one, "You return fewer than one element where the fixed time hides the launch "
                                       "already."),
        Wrong("unit", _wrong_unit, "Check the units: a gigabyte a second is 1000 bytes in a microsecond, not 10⁹."),
    ),
    hints=(
        "How many microseconds of the launch are left when the fixed time is over?",
        "At <code>gb_s</code> GB/s, how many bytes move in one microsecond? 1 GB/s is 10⁹ bytes in 10⁶ µs.",
        "<code>elements = (launch_us - fixed_us) * gb_s * 1e3 / bytes_per_element</code>; then round up, and at least "
        "1.",
    ),
    explanation="Below this size the host is the slower side and the GPU idles between kernels; above it launching "
    "costs nothing that anybody sees. A faster memory moves the size up: the faster the GPU, the more work it takes "
    "to hide a launch.",
)  # fmt: skip

# --- 01.3 ------------------------------------------------------------------------------------------------------------


def floor_ms(parameters: float, bits: float, gb_s: float, tp: int) -> float:
    """Milliseconds to read a model's weights once, shared evenly by `tp` GPUs."""
    num_bytes = parameters * bits / 8 / tp
    return num_bytes / (gb_s * 1e9) * 1e3


def _floor_cases(rng: random.Random) -> Iterator[Case]:
    yield case("one GPU, 16 bits", 8e9, 16, 3350.0, 1)
    yield case("several GPUs", 70e9, 16, 3350.0, 8)
    yield case("fewer bits", 1e9, 4, 3350.0, 1)
    for _ in range(4):
        size, speed = rng.randint(1, 80) * 1e9, float(rng.choice([320, 2000, 3350, 4265, 8000]))
        yield case("one GPU, 16 bits", size, 16, speed, 1)
        yield case("several GPUs", size, 16, speed, rng.choice([2, 4, 8]))
        yield case("fewer bits", size, rng.choice([4, 8]), speed, 1)


def _bits_are_bytes(parameters: float, bits: float, gb_s: float, tp: int) -> float:
    return parameters * bits / tp / gb_s / 1e6


def _all_on_each(parameters: float, bits: float, gb_s: float, tp: int) -> float:
    return parameters * bits / 8 / gb_s / 1e6


def _always_two_bytes(parameters: float, bits: float, gb_s: float, tp: int) -> float:
    return parameters * 2 / tp / gb_s / 1e6


def _seconds(parameters: float, bits: float, gb_s: float, tp: int) -> float:
    return parameters * bits / 8 / tp / (gb_s * 1e9)


FLOOR_MS = Exercise(
    id="01.3",
    title="The floor that weights put under a step",
    minutes=5,
    items=("B1",),
    ask="In a decode step every weight is read once. Write <code>floor_ms(parameters, bits, gb_s, tp)</code>: how many "
    "milliseconds that takes when each of the <code>parameters</code> has <code>bits</code> bits, memory moves "
    "<code>gb_s</code> gigabytes (10<sup>9</sup> bytes) a second, and <code>tp</code> GPUs share the weights evenly "
    "and read at the same time.",
    solution=floor_ms,
    cases=_floor_cases,
    wrong=(
        Wrong("bits as bytes", _bits_are_bytes, "You take bits for bytes: 16 bits are 2 bytes."),
        Wrong("all on each", _all_on_each, "You let every GPU read all weights. Each has its share only, and all read "
                                           "at "
              "the same time."),
        Wrong("two bytes", _always_two_bytes, "You take 2 bytes for every weight, whatever <code>bits</code> says."),
        Wrong("seconds", _seconds, "Your answer is in seconds."),
    ),
    hints=(
        "First the bytes that one GPU has to read, then the time.",
        "Bytes of one GPU: parameters × bits / 8 / tp. A second is 1000 ms.",
        "<code>parameters * bits / 8 / tp / (gb_s * 1e9) * 1e3</code>",
    ),
    explanation="No step can be faster than its bytes. The batch is not in the formula: weights are read once for all "
    "requests, which is why larger batches are nearly free until something else takes over.",
    redundant={"one GPU, 16 bits": "The plain case comes first; what fails there fails in all groups."},
)  # fmt: skip

EXERCISES = (STEP_TIME, HIDING_SIZE, FLOOR_MS)
