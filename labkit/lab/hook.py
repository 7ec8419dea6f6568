"""What a hook point is, and how a name in the engine is bound to something else for a while. Refuses to know any."""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
from collections.abc import Callable, Iterator
from typing import Any, Protocol

EACH_STEP, START_UP = "in each step", "when an engine is made or reconfigured"


class Ask(Protocol):
    """Gives the answer to use: the engine's `own`, or the plugged function's answer to `args`.

    same(own, answer): whether they agree, None for equal values. usable(answer): why the engine cannot go on with a
    different answer, "" where it can.
    """

    def __call__(
        self,
        args: tuple[Any, ...],
        own: Any,
        usable: Callable[[Any], str],
        same: Callable[[Any, Any], bool] | None = None,
    ) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Hook:
    """One point.

    signature: what is plugged in here; a function with fewer parameters gets the first ones. moment: when it is asked.
    where: the place in the engine, with what a reader should know. own: a correct answer with that signature.
    install: binds the name, until left.
    """

    name: str
    signature: str
    moment: str
    where: str
    own: Callable[[], Callable[..., Any]]
    install: Callable[[Ask], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def bound(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Inside it `holder.name` is `value`; a module or a class that has the name itself."""
    before = holder.__dict__[name]
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


def whole(value: Any) -> bool:
    """Whether it is a whole number; True and False are not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
