"""Runs somebody's function on many inputs and brings back what came of each call. Refuses to know what is right.

Nothing that the function does gets out: each call has its own copy of the inputs, what it prints is caught, what it
raises is an outcome, and after a time limit nobody waits any longer. A thread cannot be ended from outside; one that is
still in a loop is left alone, and said so.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from labkit.lab.compare import difference

#: Characters that are kept of what a function prints.
MAX_PRINTED = 2000
LIMIT_S = 5.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one call gave.

    value: what it returned. error: what it raised, None where it returned. args: its inputs after the call.
    mutated: the name of the first input that the call changed, "" where it changed none. printed: what it wrote.
    """

    value: Any = None
    error: BaseException | None = None
    args: tuple[Any, ...] = ()
    mutated: str = ""
    printed: str = ""


@dataclasses.dataclass(frozen=True)
class Trial:
    """The calls that ended, in order. slow: the next one did not end in time; printed: what that one wrote."""

    outcomes: tuple[Outcome, ...]
    slow: bool
    printed: str


def run(
    fn: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], limit_s: float = LIMIT_S, names: Sequence[str] = ()
) -> Trial:
    """Call `fn` with a copy of every tuple of `inputs`, in one thread of its own, for at most `limit_s` seconds.

    Args:
        names: of the arguments, for the sentence on a changed one.
    """
    done: list[Outcome] = []
    finished, given_up = threading.Event(), threading.Event()

    def work() -> None:
        try:
            for args in inputs:
                if given_up.is_set():
                    return
                outcome = call(fn, args, names)
                done.append(dataclasses.replace(outcome, printed=ear.take()))
        finally:
            finished.set()

    thread = threading.Thread(target=work, name="labkit-check", daemon=True)
    ear = _Ear(sys.stdout, thread)
    before, sys.stdout = sys.stdout, ear  # type: ignore[assignment]
    try:
        thread.start()
        in_time = finished.wait(limit_s)
        given_up.set()
    finally:
        # A loop that prints would fill the page for ever: its ear stays as long as it runs.
        if finished.is_set() and sys.stdout is ear:
            sys.stdout = before
    outcomes = tuple(done)
    return Trial(outcomes, not in_time and len(outcomes) < len(inputs), ear.take())


def call(fn: Callable[..., Any], args: tuple[Any, ...], names: Sequence[str] = ()) -> Outcome:
    """One call with a copy of `args`, in this thread and without a limit."""
    given = copy.deepcopy(args)
    try:
        value = fn(*given)
    except BaseException as error:  # SystemExit included: `exit()` in an answer must not end the kernel
        return Outcome(error=error.with_traceback(None), args=given)
    mutated = ""
    for i, (was, now) in enumerate(zip(args, given, strict=True)):
        if difference(was, now, 0.0, 0.0) is not None:
            mutated = names[i] if i < len(names) else f"input {i + 1}"
            break
    return Outcome(_kept(value), None, given, mutated)


def _kept(value: Any) -> Any:
    """As it is now: an answer that hands out one list again and again would change what it said before."""
    try:
        return copy.deepcopy(value)
    except Exception:  # a generator, a file, a lock: nothing that a later call changes
        return value


class _Ear:
    """Stands in for stdout: keeps what one thread writes, hands on what the others do."""

    def __init__(self, out: Any, thread: threading.Thread) -> None:
        self._out, self._thread = out, thread
        self._heard: list[str] = []
        self._room = MAX_PRINTED

    def take(self) -> str:
        """What was heard since the last time."""
        heard, self._heard, self._room = self._heard, [], MAX_PRINTED
        return "".join(heard)

    def write(self, text: str) -> int:
        if threading.current_thread() is not self._thread:
            return int(self._out.write(text) or 0)
        if self._room > 0:
            self._heard.append(text[: self._room])
            self._room -= len(text)
        return len(text)

    def flush(self) -> None:
        if threading.current_thread() is not self._thread:
            self._out.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)
