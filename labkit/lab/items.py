"""The thirteen things that a learner can do after the course. Refuses to know how: exercises name the items they serve.

A1–A8 are about how an engine makes a decode step fast, B1–B5 about using it. Where two ask for nearly the same, one
exercise may serve both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.lab.exercises import Exercise


@dataclasses.dataclass(frozen=True)
class Item:
    """key: "A1". text: completes "I can …". chapters: where it is taught, and so has to be checked."""

    key: str
    text: str
    chapters: tuple[int, ...]


ITEMS: tuple[Item, ...] = (
    Item("A1", "say when a decode step waits for the host to launch kernels, and not for data or arithmetic", (1,)),
    Item("A2", "name three attention backends or more, and for each a machine or model that it fits", (5,)),
    Item("A3", "say what may and what may not differ between two backends that compute the same attention", (3,)),
    Item("A4", "say why one budget for prefill chunks and decodes needs kernels that take a mixed batch", (6,)),
    Item("A5", "say how a CUDA graph is captured and replayed, and why shapes and addresses must stay fixed", (7,)),
    Item(
        "A6",
        "say why a forward pass is cut at attention, and which graph FULL_AND_PIECEWISE runs for which batch",
        (10,),
    ),
    Item("A7", "say why the cut gives three kinds of pieces only, and how capture sizes decide the padding", (8, 10)),
    Item("A8", "weigh start-up time, memory and debugging against the time that graphs and compilation save", (11,)),
    Item("B1", "estimate the host's share of a decode step from kernels, launch cost and bytes to read", (1,)),
    Item("B2", "choose between a prefill kernel and one that splits the KV of a decode, and say why", (4,)),
    Item("B3", "write a correct replay: static buffers, copied inputs, one captured size per shape", (7,)),
    Item("B4", "pack prefill chunks and decodes into one batch, and say what it costs to run them apart", (6,)),
    Item("B5", "configure an engine's attention backend, graphs and compilation for a given need", (5, 11)),
)  # fmt: skip


def item(key: str) -> Item:
    """One item by its key.

    Raises:
        KeyError: there is no such item.
    """
    return next((i for i in ITEMS if i.key == key), None) or _unknown(key)


def exercises_for(key: str, exercises: Iterable[Exercise]) -> list[Exercise]:
    """Those of `exercises` that serve an item."""
    return [exercise for exercise in exercises if key in exercise.items]


def _unknown(key: str) -> Item:
    raise KeyError(f"there is no self-check item {key!r}; there are {', '.join(i.key for i in ITEMS)}")
