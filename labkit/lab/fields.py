"""The controls that a source of a panel may ask for, as plain data. Refuses to know widgets, and what a value means.

Each checks a value that comes from a cell, a box or a file: what it cannot hold is moved to the nearest that it can and
said (numbers), or refused (everything else).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from labkit.errors import ConfigError, LabkitError, did_you_mean


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of several. options: (label, value) in the order of the list; a label says what its value means."""

    name: str
    label: str
    options: Sequence[tuple[str, Any]]
    value: Any = None
    help: str = ""

    def __post_init__(self) -> None:
        _named(self.name, self.label)
        if not self.options:
            raise ConfigError(
                f"control {self.name!r}",
                "has nothing to choose from",
                "Leave the control out where a source offers nothing for it.",
            )
        values = [value for _, value in self.options]
        if self.value is None and None not in values:
            object.__setattr__(self, "value", values[0])
        if self.value not in values:
            raise ConfigError(f"control {self.name!r}", f"{self.value!r} is none of its options", f"Take {values}.")

    def take(self, value: Any) -> tuple[Any, str]:
        """The option that `value` names, by its value or its label; and "".

        Raises:
            ConfigError: it is none of them.
        """
        for label, known in self.options:
            if known == value or label == value:
                return known, ""
        named = did_you_mean(str(value), [str(known) for _, known in self.options])
        raise ConfigError(f"{self.name}={value!r}", f"{self.label} offers nothing of that name here", named)


@dataclasses.dataclass(frozen=True)
class Number:
    """A number from `low` to `high`, both inclusive, on a slider and in a box.

    It is whole when all of low, high, value and step are. points: the only values allowed, where not all are (recorded
    ones): any other is moved to the nearest, of two equally near ones to the larger. unit: shown behind the box.
    """

    name: str
    label: str
    low: float
    high: float
    value: float
    step: float = 1
    points: Sequence[float] | None = None
    unit: str = ""
    help: str = ""

    def __post_init__(self) -> None:
        _named(self.name, self.label)
        if self.points is not None and not self.points:
            raise ConfigError(f"control {self.name!r}", "has no points", "Give at least one, or points=None.")
        if not self.low <= self.value <= self.high or self.step <= 0:
            ends = f"{self.value} from {self.low} to {self.high} in steps of {self.step}"
            raise ConfigError(f"control {self.name!r}", f"{ends} cannot be", "Take low ≤ value ≤ high and step > 0.")

    @property
    def whole(self) -> bool:
        return all(isinstance(n, int) for n in (self.low, self.high, self.value, self.step, *(self.points or ())))

    def take(self, value: Any) -> tuple[Any, str]:
        """The nearest value that it can hold, and a sentence where that is another one.

        Raises:
            ConfigError: it is not a number.
        """
        try:
            asked = int(value) if self.whole and float(value) == int(float(value)) else float(value)
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(f"{self.name}={value!r}", "is not a number", f"Write {self._allowed()}.") from None
        kept: float = min(max(asked, self.low), self.high)
        if self.points is not None:
            kept = min(self.points, key=lambda p: (abs(p - asked), -p))
        elif self.whole:
            kept = round(kept)
        if kept == asked:
            return kept, ""
        return kept, f"{self.label} {value} is not possible here ({self._allowed()}); moved to {kept}."

    def _allowed(self) -> str:
        if self.points is not None:
            return ", ".join(f"{p:g}" for p in self.points)
        return f"{'a whole number' if self.whole else 'a number'} from {self.low:g} to {self.high:g}"


@dataclasses.dataclass(frozen=True)
class Toggle:
    """On or off."""

    name: str
    label: str
    value: bool = False
    help: str = ""

    def __post_init__(self) -> None:
        _named(self.name, self.label)

    def take(self, value: Any) -> tuple[bool, str]:
        """True or False and "".

        Raises:
            ConfigError: it is neither.
        """
        if not isinstance(value, bool):
            raise ConfigError(f"{self.name}={value!r}", "is neither on nor off", "Give True or False.")
        return value, ""


@dataclasses.dataclass(frozen=True)
class Text:
    """Something typed: a list of sizes, some traffic, requests. The value is what `parse` makes of it.

    parse: what is typed → the value, or a LabkitError that names every wrong part. value: what stands in the box first.
    write: a parsed value → how a sentence says it; None: its numbers with commas.
    """

    name: str
    label: str
    value: str = ""
    parse: Callable[[str], Any] | None = dataclasses.field(default=None, compare=False)
    placeholder: str = ""
    help: str = ""
    write: Callable[[Any], str] | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        _named(self.name, self.label)

    def take(self, value: Any) -> tuple[str, str]:
        """What to put into the box, and ""; a list is written with commas."""
        typed = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        return typed, ""

    def read(self, typed: str) -> Any:
        """What was typed, parsed.

        Raises:
            LabkitError: it does not parse.
        """
        return typed if self.parse is None else self.parse(typed)


Control = Choice | Number | Toggle | Text


def defaults(controls: Sequence[Control]) -> dict[str, Any]:
    """The value of each control as a source gives it, by name."""
    return {one.name: one.read(one.value) if isinstance(one, Text) else one.value for one in controls}


def _named(name: str, label: str) -> None:
    if not name.isidentifier() or not label:
        raise LabkitError(
            f"control {name!r}", "has no usable name", "Give a Python name for cells and a label for readers."
        )
