"""Suspects, switches and what tests say of them: the logic of a search for one wrong part. Refuses to run anything."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Part:
    """One thing that may be wrong. key: for code. label: for readers. switch: what takes it out, in vLLM's words."""

    key: str
    label: str
    switch: str = ""


def left_over(parts: Sequence[Part], tests: Iterable[tuple[Iterable[str], bool]]) -> list[Part]:
    """The parts that may still be the one that is wrong.

    Args:
        tests: (keys that were off, whether the answer was wrong). Wrong clears what was off, right clears the rest.
    """
    left = list(parts)
    for off, wrong in tests:
        gone = set(off)
        left = [part for part in left if (part.key not in gone) == wrong]
    return left


def fewest_tests(num_parts: int) -> int:
    """Tests that always find one of so many, if each halves them: ⌈log2 n⌉."""
    return math.ceil(math.log2(num_parts)) if num_parts > 1 else 0


def culprit(parts: Sequence[Part], case: int) -> str:
    """The wrong part of a case, spread so that neighbouring numbers tell nothing about each other."""
    places = sorted(range(len(parts)), key=lambda i: (i * 5 + 3) % 8 * 7 % 11)
    return parts[places[(case * 3 + 1) % len(parts)]].key


def switched_off(switches: Mapping[str, Any], effects: Mapping[str, Mapping[Any, Sequence[str]]]) -> list[str]:
    """Keys of the parts that some switches take out. effects: name of a switch → its value → keys."""
    found: dict[str, None] = {}
    for name, value in switches.items():
        for key in effects.get(name, {}).get(value, ()):
            found[key] = None
    return list(found)
