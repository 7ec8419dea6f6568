"""`with labkit.lab.plug(slot_mapping=fn): …` puts a learner's function where the engine calls its own.

The engine's own function is asked the same each time. An answer that differs, or an error, gives a card with the first
difference, and from there on the engine's own answers count. Refuses to know the engine: `hook_points` has the places.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from labkit.errors import ConfigError, did_you_mean
from labkit.lab.cards import Card, code, escape, paragraph, rows
from labkit.lab.compare import difference, shown
from labkit.lab.exercises import is_empty
from labkit.lab.hook import START_UP, Hook
from labkit.lab.hook_points import HOOKS
from labkit.lab.progress import solutions_wanted


class Socket:
    """One function that is plugged in, and what came of it.

    calls: how often it was asked. different: how many answers differed; unusable: how many of those the engine could
    not go on with, so that its own counted. used: how many answers counted.
    problem: a sentence on the first difference or error, "" so far. undone: the engine's own answers count now.
    attempted: it is more than a stub.
    """

    def __init__(self, hook: Hook, function: Any, trust: bool) -> None:
        self.hook, self.function, self.trust = hook, function, trust
        self.calls = self.different = self.unusable = self.used = self.at = 0
        self.problem, self.undone, self.attempted = "", False, True
        self.call, self.yours, self.engines = "", "", ""
        self._lock = threading.RLock()
        self._params = _num_params(function)
        if function is ... or function is None or is_empty(function):
            self.attempted, self.undone = False, True

    def ask(
        self,
        args: tuple[Any, ...],
        own: Any,
        usable: Callable[[Any], str],
        same: Callable[[Any, Any], bool] | None = None,
    ) -> Any:
        """The answer to use; see `labkit.lab.hook.Ask`. Never raises."""
        with self._lock:
            if self.undone:
                return own
            self.calls += 1
            given = args if self._params is None else args[: self._params]
            try:
                answer = self.function(*_copied(given))
            except NotImplementedError:
                self.attempted, self.undone = False, True
                return own
            except Exception as error:
                said = f"raises {type(error).__name__}: {error}"
                self._first(given, own, said, f"Yours {said}.")
                self.undone = True
                return own
            if answer is ...:
                self.attempted, self.undone = False, True
                return own
            try:
                agrees = same(own, answer) if same else difference(own, answer) is None
            except Exception:
                agrees = False
            if not agrees:
                self.different += 1
                why = difference(own, answer) or "is not the engine's own"
                unusable = _reason(usable, answer) if self.trust else ""
                cannot = f" It cannot be used: {unusable}." if unusable else ""
                self._first(given, own, shown(answer), f"Yours {why}.{cannot}")
                self.undone = not self.trust
                if self.undone:
                    return own
                if unusable:
                    self.unusable += 1
                    return own
            self.used += 1
            return answer

    def _first(self, args: tuple[Any, ...], own: Any, yours: str, problem: str) -> None:
        if not self.problem:
            self.at, self.problem = self.calls, problem
            self.call = f"{self.hook.name}({', '.join(map(shown, args))})"
            self.yours, self.engines = yours, shown(own)

    @property
    def line(self) -> str:
        """One line that is the same in every run of the same steps."""
        name = self.hook.name
        if not self.attempted:
            return f"{name}: NOT ATTEMPTED, the engine's own ran"
        if not self.calls:
            return f"{name}: not called"
        times = f"{self.calls} call{'' if self.calls == 1 else 's'}"
        if self.undone:
            return f"{name}: undone at call {self.calls}, the engine's own ran from there"
        if self.different:
            rest = f", but {self.unusable} that could not be" if self.unusable else ""
            return f"{name}: {times}, {self.different} differ from the engine's own and were used{rest}"
        return f"{name}: {times}, all as the engine's own"

    def html(self) -> str:
        parts = [paragraph(f"<b>{escape(self.line)}</b>", html=True)]
        if self.problem:
            parts += [paragraph(f"The first difference, in call {self.at}:"), code(self.call)]
            parts += [rows({"yours": self.yours, "the engine's": self.engines}), paragraph(self.problem)]
        if self.attempted and not self.calls:
            when = f"It is asked {self.hook.moment}."
            if self.hook.moment == START_UP:
                when += " Make or reconfigure the engine inside the with block, or pass it: plug(…, llm=llm)."
            parts.append(paragraph(when))
        if self.attempted:
            parts.append(paragraph(self.hook.where, quiet=True))
        return "".join(parts)


class Plugged:
    """The context that `plug` gives; afterwards its card. `sockets` has one entry for each function."""

    def __init__(self, sockets: dict[str, Socket], llm: Any) -> None:
        self.sockets, self._llm = sockets, llm
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Plugged:
        with contextlib.ExitStack() as stack:
            for socket in self.sockets.values():
                stack.enter_context(socket.hook.install(socket.ask))
            self._reconfigure()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._reconfigure()

    def _reconfigure(self) -> None:
        if self._llm is not None and any(s.hook.moment == START_UP for s in self.sockets.values()):
            self._llm.reconfigure()

    @property
    def calls(self) -> dict[str, int]:
        return {name: socket.calls for name, socket in self.sockets.items()}

    @property
    def ok(self) -> bool:
        """Whether every function was asked, and every answer was the engine's own."""
        return all(s.attempted and s.calls and not s.problem for s in self.sockets.values())

    def card(self) -> Card:
        return Card(repr(self), "".join(socket.html() for socket in self.sockets.values()))

    def __repr__(self) -> str:
        return "; ".join(socket.line for socket in self.sockets.values())

    def _repr_html_(self) -> str:
        return self.card()._repr_html_()


def plug(*, trust: bool = False, llm: Any = None, **functions: Any) -> Plugged:
    """Put functions where the engine calls its own, for the length of a `with` block.

    Args:
        functions: by the name of the point, see `labkit.lab.hook_points.HOOKS` for signatures. They get copies of the
            arguments. With LABKIT_SOLUTIONS=1 correct ones take their places.
        trust: go on with answers that differ, so that what they change shows in text or report. Answers that the
            engine could not survive (a slot outside the cache, a graph that does not exist) are still not used.
        llm: an engine to reconfigure on the way in and out, for functions that are asked at start-up only.

    Raises:
        ConfigError: there is no such point, or nothing is plugged in.
    """
    if not functions:
        raise ConfigError("plug()", "no function was given", f"Name one of {', '.join(HOOKS)}.")
    sockets = {}
    for name, function in functions.items():
        if name not in HOOKS:
            raise ConfigError(f"plug({name}=…)", "the engine has no such point", did_you_mean(name, HOOKS))
        hook = HOOKS[name]
        if solutions_wanted() and not trust:
            function = hook.own()
        elif not callable(function) and function is not ... and function is not None:
            raise ConfigError(f"plug({name}={shown(function)})", "it is not a function", f"Write {hook.signature}.")
        sockets[name] = Socket(hook, function, trust)
    return Plugged(sockets, llm)


def _copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    try:
        return copy.deepcopy(args)
    except Exception:  # an argument that cannot be copied is a frozen description, not data
        return args


def _num_params(function: Any) -> int | None:
    """How many positional arguments a function takes; None for as many as there are, or where it does not say."""
    try:
        params = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_POSITIONAL for p in params):
        return None
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in params)


def _reason(usable: Callable[[Any], str], answer: Any) -> str:
    try:
        return usable(answer)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
