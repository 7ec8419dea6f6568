"""Chapter 01, two kinds of waiting: what the notebook imports. Refuses to say how to get rid of either."""

from __future__ import annotations

from labkit.lab.cards import Card
from labkit.lab.ch01.cards import SCORE, floors, myths, note_score, sum_or_queue
from labkit.lab.ch01.exercises import EXERCISES, FLOOR_MS, HIDING_SIZE, STEP_TIME
from labkit.lab.ch01.panel import GATE, real_panel, regime_panel, waits_panel
from labkit.lab.ch01.quizzes import QUIZZES, RECAP, SELF_CHECK, TRANSFER
from labkit.lab.chapter import Chapter
from labkit.lab.exercises import CheckCard, check
from labkit.lab.quiz import QuizCard
from labkit.lab.task import TaskCard

__all__ = [
    "card", "chapter", "check_floor_ms", "check_hiding_size", "check_step_time", "floors", "myths", "note_score",
    "real_panel", "recap", "regime_panel", "self_check", "sum_or_queue", "task_floor_ms", "task_hiding_size",
    "task_step_time", "transfer", "waits_panel",
]  # fmt: skip

chapter = Chapter(
    number=1,
    slug="two_kinds_of_waiting",
    title="Two kinds of waiting",
    goals=(
        "say whether a decode step waits for instructions or for data, and what would help",
        "compute the time of a step whose launches and kernels overlap",
        "estimate the floor that a model's weights put under every step",
    ),
    minutes=40,
    modes={
        "LIVE GPU": "a chain of small kernels on your GPU, one by one and as one graph",
        "LIVE CPU": "a chain of small operations on your CPU: what a call costs; a CPU has no queue of launches",
        "RECORDED": "decode steps that were measured on an NVIDIA H200, launch by launch",
        "SIMULATED": "a launch queue, a model's step and a map of models and batches",
    },
    needs=(0,),
    exercises=EXERCISES,
    quizzes=QUIZZES,
    predictions=(GATE.id,),
    score=SCORE,
)


def card() -> Card:
    """The goal card."""
    return chapter.card()


def recap() -> QuizCard:
    """The question about chapter 00."""
    return RECAP.show()


def task_step_time() -> TaskCard:
    """The task of exercise 01.1, with its hints."""
    return TaskCard(STEP_TIME)


def check_step_time(answer: object) -> CheckCard:
    """Check exercise 01.1."""
    return check(STEP_TIME, answer)


def task_hiding_size() -> TaskCard:
    """The task of exercise 01.2, with its hints."""
    return TaskCard(HIDING_SIZE)


def check_hiding_size(answer: object) -> CheckCard:
    """Check exercise 01.2."""
    return check(HIDING_SIZE, answer)


def task_floor_ms() -> TaskCard:
    """The task of exercise 01.3, with its hints."""
    return TaskCard(FLOOR_MS)


def check_floor_ms(answer: object) -> CheckCard:
    """Check exercise 01.3."""
    return check(FLOOR_MS, answer)


def transfer() -> QuizCard:
    """The question that asks for the same in another place."""
    return TRANSFER.show()


def self_check() -> QuizCard:
    """The self-check at the end."""
    return SELF_CHECK.show()
