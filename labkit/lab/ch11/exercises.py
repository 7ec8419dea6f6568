"""Exercises 11.1 and 11.3: when a start is paid back, and how to find one wrong part. Refuses to know the panels."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator
from typing import Any

from labkit.lab.ch11.parts import fewest_tests
from labkit.lab.exercises import Case, Exercise, Wrong, case

# --- 11.1 ------------------------------------------------------------------------------------------------------------


def requests_to_pay_back(extra_s: float, tokens: int, slow_ms: float, fast_ms: float, batch: int) -> int | None:
    """Requests until a start that takes `extra_s` longer is earned by faster steps; None where it never is."""
    if extra_s <= 0:
        return 0
    if fast_ms >= slow_ms:
        return None
    saved_s = tokens * (slow_ms - fast_ms) / 1e3 / batch
    return math.ceil(extra_s / saved_s)


def _pay_back_cases(rng: random.Random) -> Iterator[Case]:
    yield case("one at a time", 41.0, 200, 5.75, 1.25, 1)
    for batch in (1, 1, 1, 8, 32, 16, 4):
        yield case("one at a time" if batch == 1 else "in batches", *_uneven(rng, batch), batch)
    for slow, fast in ((2.0, 2.0), (1.25, 1.5), (3.0, 3.25)):
        yield case("steps that are no faster", 10.0, 100, slow, fast, 1)
    for extra in (0.0, -3.5, -12.0):
        yield case("nothing more to pay", extra, 100, 4.0, 2.0, 1)


def _uneven(rng: random.Random, batch: int) -> tuple[float, int, float, float]:
    """Numbers whose quotient is no whole number, so that no rounding of floats decides."""
    while True:
        tokens, slow = rng.randrange(50, 400, 10), rng.randrange(8, 40) / 4
        fast = slow * rng.choice((0.2, 0.5, 0.8))
        extra = rng.randrange(20, 400) / 4
        needed = extra / (tokens * (slow - fast) / 1e3 / batch)
        if 0.1 < needed % 1 < 0.9 and needed > 2:
            return extra, tokens, slow, fast


def _without_batch(extra_s: float, tokens: int, slow_ms: float, fast_ms: float, batch: int) -> int | None:
    return requests_to_pay_back(extra_s, tokens, slow_ms, fast_ms, 1)


def _steps(extra_s: float, tokens: int, slow_ms: float, fast_ms: float, batch: int) -> int | None:
    return requests_to_pay_back(extra_s, 1, slow_ms, fast_ms, batch)


def _by_the_fast_one(extra_s: float, tokens: int, slow_ms: float, fast_ms: float, batch: int) -> int | None:
    if extra_s <= 0:
        return 0
    return None if fast_ms >= slow_ms else math.ceil(extra_s / (tokens * fast_ms / 1e3 / batch))


def _below_zero(extra_s: float, tokens: int, slow_ms: float, fast_ms: float, batch: int) -> int | None:
    if extra_s <= 0:
        return 0
    saved_s = tokens * (slow_ms - fast_ms) / 1e3 / batch
    return math.ceil(extra_s / saved_s) if saved_s else 0


def _negative(extra_s: float, tokens: int, slow_ms: float, fast_ms: float, batch: int) -> int | None:
    if fast_ms >= slow_ms:
        return None
    return math.ceil(extra_s / (tokens * (slow_ms - fast_ms) / 1e3 / batch)) - (extra_s == 0)


PAY_BACK = Exercise(
    id="11.1",
    title="When a start is paid back",
    minutes=6,
    items=("A8",),
    ask="Write <code>requests_to_pay_back(extra_s, tokens, slow_ms, fast_ms, batch)</code>. Two configurations serve "
    "the same requests. One starts <code>extra_s</code> seconds later, and its steps take <code>fast_ms</code> in "
    "place of <code>slow_ms</code> milliseconds. A request is <code>tokens</code> steps, and <code>batch</code> "
    "requests share each step. Return after how many requests the later start is earned back: a whole number, rounded "
    "up; 0 where there is nothing more to pay; <code>None</code> where it is never earned back.",
    solution=requests_to_pay_back,
    cases=_pay_back_cases,
    wrong=(
        Wrong("batch", _without_batch, "You let every request run alone. In a batch they share the steps, and what one "
              "request saves is divided."),
        Wrong("steps", _steps, "You count steps. A request is <code>tokens</code> of them."),
        Wrong("fast", _by_the_fast_one, "You divide by what a request takes, not by what it takes less."),
        Wrong("below zero", _below_zero, "You return a number where the steps are no faster. Nothing is saved there, "
              "so that no number of requests is enough."),
        Wrong("negative", _negative, "You return a negative number where the start is no later. Then there is nothing "
              "to pay: 0."),
    ),
    hints=(
        "What does one step save? And one request, which is <code>tokens</code> steps that it shares with others?",
        "Seconds and milliseconds: bring both to seconds. Then it is a quotient, rounded up. Two cases need no "
        "quotient.",
        "<code>saved_s = tokens * (slow_ms - fast_ms) / 1000 / batch</code>, then <code>math.ceil(extra_s / "
        "saved_s)</code>, after <code>if extra_s &lt;= 0: return 0</code> and <code>if fast_ms &gt;= slow_ms: "
        "return None</code>.",
    ),
    explanation="A start is paid once; a faster step pays a little every time. How soon depends on the traffic: the "
    "same start that is nothing for a server is never earned back by a test that sends three requests and ends.",
    redundant={"one at a time": "the plain case; it comes first, so that a card begins with it"},
)  # fmt: skip

# --- 11.3 ------------------------------------------------------------------------------------------------------------


class NoTestsLeft(Exception):
    """More tests were asked for than halving needs."""


class Bench:
    """Answers as many tests as halving needs, and no more. Compared by its culprit: asking does not change it."""

    def __init__(self, parts: Collection[str], culprit: str) -> None:
        self.culprit, self.tests = culprit, fewest_tests(len(parts))
        self.parts, self.asked = list(parts), 0

    def __call__(self, off: Collection[str]) -> bool:
        """Whether the answer is wrong with the parts in `off` out of play."""
        self.asked += 1
        if self.asked > self.tests:
            s = "s" if self.tests != 1 else ""
            raise NoTestsLeft(f"{self.tests} test{s} are enough for {len(self.parts)} parts, and this is one more")
        return self.culprit not in set(off)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bench) and (other.culprit, other.parts) == (self.culprit, self.parts)

    __hash__ = None  # type: ignore[assignment]


def find_culprit(parts: list[str], is_wrong: Callable[[list[str]], bool]) -> str:
    """The one part that makes the answer wrong, in at most ⌈log2 n⌉ tests."""
    suspects = list(parts)
    while len(suspects) > 1:
        half = suspects[: len(suspects) // 2]
        suspects = suspects[len(half) :] if is_wrong(half) else half
    return suspects[0]


_NAMES = (
    "norm", "rotation", "activation", "replay", "merge", "prefix", "kv", "sampler", "embedding", "mask", "pages",
    "splits", "head", "slots", "padding", "scales",
)  # fmt: skip


def _culprit_cases(rng: random.Random) -> Iterator[Case]:
    for n in (2, 4, 8, 8, 16):
        parts = rng.sample(_NAMES, n)
        yield case("a power of two", parts, Bench(parts, rng.choice(parts)))
    for n in (3, 5, 6, 7, 9, 12, 13):
        parts = rng.sample(_NAMES, n)
        yield case("any number", parts, Bench(parts, parts[-1]))
        yield case("any number", parts, Bench(parts, rng.choice(parts)))
    for name in ("norm", "kv"):
        yield case("a single part", [name], Bench([name], name))


def _one_by_one(parts: list[str], is_wrong: Callable[[list[str]], bool]) -> str:
    for part in parts[:-1]:
        if not is_wrong([part]):
            return part
    return parts[-1]


def _the_other_half(parts: list[str], is_wrong: Callable[[list[str]], bool]) -> str:
    suspects = list(parts)
    while len(suspects) > 1:
        half = suspects[: len(suspects) // 2]
        suspects = half if is_wrong(half) else suspects[len(half) :]
    return suspects[0]


def _equal_halves(parts: list[str], is_wrong: Callable[[list[str]], bool]) -> str:
    suspects = list(parts)
    while len(suspects) > 1:
        n = len(suspects) // 2
        suspects = suspects[n : 2 * n] if is_wrong(suspects[:n]) else suspects[:n]
    return suspects[0]


def _look_first(parts: list[str], is_wrong: Callable[[list[str]], bool]) -> str | None:
    return find_culprit(parts, is_wrong) if is_wrong([]) else None


def _nobody(parts: list[str], is_wrong: Callable[[list[str]], bool]) -> str | None:
    return find_culprit(parts, is_wrong) if len(parts) > 1 else None


FIND_CULPRIT = Exercise(
    id="11.3",
    title="Find one wrong part",
    minutes=8,
    items=("A8",),
    ask="Write <code>find_culprit(parts, is_wrong)</code>. Exactly one of <code>parts</code>, a list of names, makes "
    "the answer wrong. <code>is_wrong(off)</code> is one test: it runs the engine with the parts of the list "
    "<code>off</code> out of play, and returns whether the answer is still wrong. Return the culprit's name. You get "
    "⌈log₂ n⌉ tests for n parts, and no test more: three for eight.",
    solution=find_culprit,
    cases=_culprit_cases,
    wrong=(
        Wrong("one by one", _one_by_one, "You take out one part at a time. Each test then clears a single part, unless "
              "you are lucky."),
        Wrong("other half", _the_other_half, "You keep the half that was off although the answer stayed wrong. What "
              "was off cannot have made it wrong."),
        Wrong("equal halves", _equal_halves, "You lose the last part when their number is odd: the second half is all "
              "the rest."),
        Wrong("look first", _look_first, "You spend a test on what is known already: that the answer is wrong with "
              "everything in play."),
        Wrong("nobody", _nobody, "You give up on a single part. One of the parts is at fault, so it is this one, and "
              "no test is needed."),
    ),
    hints=(
        "How many parts can one test clear, at best and at worst? When are the two the same?",
        "Keep a list of suspects. Test with half of them off. Still wrong: the culprit is in the other half. Right: it "
        "is in this one. Until one is left.",
        "<code>half = suspects[:len(suspects) // 2]</code>; then <code>suspects = suspects[len(half):] if "
        "is_wrong(half) else half</code>, while there is more than one.",
    ),
    explanation="A test with half of the suspects off has two outcomes, and each leaves half. That is why the switch "
    "to turn first is the one that takes out about half of what you suspect, and why <code>--enforce-eager</code>, "
    "which takes out everything that graphs and the compiler make, is such a good first question.",
    redundant={"a power of two": "the plain case, with which a card should begin"},
    show=lambda args: _shown(*args),
)  # fmt: skip


def _shown(parts: list[str], bench: Any) -> str:
    return f"find_culprit({parts!r}, is_wrong)  # {bench.tests} tests; it is {bench.culprit!r}"
