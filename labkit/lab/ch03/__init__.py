"""Chapter 03, same math, different engineering: what the notebook imports. Refuses to say which backend is best."""

from __future__ import annotations

import ipywidgets as widgets

from labkit.lab.cards import Card
from labkit.lab.ch03.cards import SCORE, judged, more_ways, myths, note_score, plug_in, plug_in_wrong
from labkit.lab.ch03.exercises import CORRECT, EXERCISES, MEMORY, MERGE, ONLINE
from labkit.lab.ch03.panel import GATE, attention_panel
from labkit.lab.ch03.quizzes import NAMES, QUIZZES, RECAP, TRANSFER
from labkit.lab.chapter import Chapter
from labkit.lab.exercises import CheckCard, check
from labkit.lab.quiz import QuizCard
from labkit.lab.task import TaskCard

__all__ = [
    "attention_panel", "card", "chapter", "check_extra_bytes", "check_is_correct", "check_merge",
    "check_online_softmax",
    "judged", "more_ways", "myths", "note_score", "plug_in", "plug_in_wrong", "questions", "recap", "task_extra_bytes",
    "task_is_correct", "task_merge", "task_online_softmax",
]  # fmt: skip

chapter = Chapter(
    number=3,
    slug="same_math",
    title="Same math, different engineering",
    goals=(
        "say what may and what may not differ between two backends that compute the same attention",
        "tell rounding from a bug, with a tolerance that you can defend",
        "merge attention over parts of the keys, and say why kernels do it",
        "name three backends or more, and a machine for each",
    ),
    minutes=45,
    modes={
        "LIVE GPU": "every backend that loads on your GPU: error, time, memory",
        "LIVE CPU": "naive, tiled and torch's own attention on your CPU: the same errors and the same growth, other "
        "times",
        "RECORDED": "attention calls of an NVIDIA GPU, where a recording of them is there",
        "SIMULATED": "memory by formula, and rounding imitated in numpy",
    },
    needs=(0, 2),
    exercises=EXERCISES,
    quizzes=QUIZZES,
    predictions=(GATE.id,),
    score=SCORE,
)


def card() -> Card:
    """The goal card."""
    return chapter.card()


def recap() -> QuizCard:
    """The question about chapter 02."""
    return RECAP.show()


def task_online_softmax() -> TaskCard:
    """The task of exercise 03.1, with its hints."""
    return TaskCard(ONLINE)


def check_online_softmax(answer: object) -> CheckCard:
    """Check exercise 03.1."""
    return check(ONLINE, answer)


def task_merge() -> TaskCard:
    """The task of exercise 03.2, with its hints."""
    return TaskCard(MERGE)


def check_merge(answer: object) -> CheckCard:
    """Check exercise 03.2."""
    return check(MERGE, answer)


def task_is_correct() -> TaskCard:
    """The task of exercise 03.3, with its hints."""
    return TaskCard(CORRECT)


def check_is_correct(answer: object) -> CheckCard:
    """Check exercise 03.3."""
    return check(CORRECT, answer)


def task_extra_bytes() -> TaskCard:
    """The task of exercise 03.4, with its hints."""
    return TaskCard(MEMORY)


def check_extra_bytes(answer: object) -> CheckCard:
    """Check exercise 03.4."""
    return check(MEMORY, answer)


def questions() -> widgets.VBox:
    """The question that asks for the same in another place, and the self-check."""
    return widgets.VBox([TRANSFER.show(), NAMES.show()])
