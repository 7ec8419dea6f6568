"""What a chapter is: its goals, minutes, exercises and questions, and the list of chapters that are there.

A chapter is a package `labkit.lab.chNN` with a `chapter` in it. Refuses to know what any of them teaches.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
import re
from collections.abc import Mapping, Sequence

from labkit.errors import ConfigError
from labkit.lab import progress
from labkit.lab.cards import Card, escape, paragraph
from labkit.lab.exercises import Exercise
from labkit.lab.quiz import Quiz

#: Mode → what it needs.
MODES = {
    "LIVE GPU": "an NVIDIA GPU and torch",
    "LIVE CPU": "torch; graphs are emulated there, and save nothing",
    "RECORDED": "nothing but labkit: measured on the machine that is named",
    "SIMULATED": "nothing but labkit: computed by a model whose parameters are shown",
}


@dataclasses.dataclass(frozen=True)
class Chapter:
    """One chapter of the course.

    goals: each completes "After this chapter you can …". modes: of `MODES`, those that work here; or, as a mapping,
    each with what it shows here. needs: numbers of the chapters that it builds on. items: self-check items it serves.
    score: the row of the scoreboard that this chapter fills or changes, "" for none.
    predictions: ids of its gates, so that the status page can count them.
    """

    number: int
    slug: str
    title: str
    goals: Sequence[str]
    minutes: int
    modes: Sequence[str] | Mapping[str, str]
    needs: Sequence[int] = ()
    exercises: Sequence[Exercise] = ()
    quizzes: Sequence[Quiz] = ()
    predictions: Sequence[str] = ()
    score: str = ""

    def __post_init__(self) -> None:
        unknown = [mode for mode in self.modes if mode not in MODES]
        if unknown:
            raise ValueError(f"chapter {self.number}: no mode {unknown[0]!r}; there are {', '.join(MODES)}")

    @property
    def key(self) -> str:
        """The number with two digits, as ids begin."""
        return f"{self.number:02d}"

    @property
    def notebook(self) -> str:
        """The name of its notebook's file."""
        return f"{self.key}_{self.slug}.ipynb"

    @property
    def items(self) -> tuple[str, ...]:
        """Self-check items that its exercises serve."""
        return tuple(sorted({key for exercise in self.exercises for key in exercise.items}))

    def card(self) -> Card:
        """The first thing in a notebook: what you will be able to do, how long it takes, what works here."""
        progress.note_chapter(self.number)
        goals = "".join(f"<li>{escape(goal)}</li>" for goal in self.goals)
        modes = self.modes if isinstance(self.modes, Mapping) else {mode: MODES[mode] for mode in self.modes}
        shown = "".join(f"<li><b>{escape(mode)}</b>: {escape(what)}</li>" for mode, what in modes.items())
        parts = [
            f"<h3>{self.key} {escape(self.title)}</h3>",
            paragraph("After this chapter you can"), f"<ul>{goals}</ul>",
            paragraph(f"It takes about {self.minutes} minutes, with {_count(len(self.exercises), 'exercise')}."),
            paragraph("What works here, and what it needs:"), f"<ul>{shown}</ul>",
        ]  # fmt: skip
        if self.needs:
            before = ", ".join(f"{n:02d}" for n in self.needs)
            parts.append(paragraph(f"It builds on chapter{'s' if len(self.needs) > 1 else ''} {before}."))
        return Card(f"chapter {self.key} {self.title}: {self.minutes} minutes", "".join(parts))

    def scoreboard(self) -> Card:
        """The course's running table, with this chapter's row marked."""
        from labkit.lab.scoreboard import scoreboard

        return scoreboard(self.score)

    def exercise(self, id: str) -> Exercise:
        """One of its exercises by id ("08.2") or number ("2").

        Raises:
            ConfigError: there is no such exercise.
        """
        for exercise in self.exercises:
            if id in (exercise.id, exercise.id.partition(".")[2]):
                return exercise
        raise ConfigError(
            f"exercise {id!r}", f"chapter {self.key} has none of that name",
            "There are: " + ", ".join(e.id for e in self.exercises) + ".",
        )  # fmt: skip


@functools.cache
def chapters() -> tuple[Chapter, ...]:
    """All chapters that are there, by number. Imports each; none of them imports torch."""
    import labkit.lab as lab

    names = sorted(info.name for info in pkgutil.iter_modules(lab.__path__) if re.fullmatch(r"ch\d\d", info.name))
    modules = [importlib.import_module(f"labkit.lab.{name}") for name in names]
    return tuple(module.chapter for module in modules if hasattr(module, "chapter"))


def exercise(id: str) -> Exercise:
    """An exercise of any chapter by its id, "08.2".

    Raises:
        ConfigError: there is no such exercise.
    """
    every = [e for c in chapters() for e in c.exercises]
    found = next((e for e in every if e.id == id), None)
    if found is None:
        raise ConfigError(f"exercise {id!r}", "no chapter has it", "There are: " + ", ".join(e.id for e in every) + ".")
    return found


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
