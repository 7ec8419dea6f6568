"""Chapter 02, measuring without fooling yourself: what the notebook imports. Refuses to make anything faster."""

from __future__ import annotations

from labkit.lab.cards import Card
from labkit.lab.ch02.cards import is_shown, myths, try_rotation
from labkit.lab.ch02.exercises import EXERCISES, ROTATION, TIME_US, VERDICT
from labkit.lab.ch02.panel import GATE, real_panel, timer_panel
from labkit.lab.ch02.quizzes import QUIZZES, RECAP, SELF_CHECK, TRANSFER
from labkit.lab.ch02.simulated import EVENTS, NO_SYNC, ORDERS, SYNC, TIMERS
from labkit.lab.chapter import Chapter
from labkit.lab.exercises import CheckCard, check
from labkit.lab.quiz import QuizCard
from labkit.lab.task import TaskCard

__all__ = [
    "EVENTS", "NO_SYNC", "ORDERS", "SYNC", "TIMERS", "card", "chapter", "check_rotation", "check_time_us",
    "check_verdict", "is_shown", "myths", "real_panel", "recap", "self_check", "task_rotation", "task_time_us",
    "task_verdict", "timer_panel", "transfer", "try_rotation",
]  # fmt: skip

chapter = Chapter(
    number=2,
    slug="measuring",
    title="Measuring without fooling yourself",
    goals=(
        "time work that runs behind the host's back, and say what a given timer really reads",
        "tell a difference from noise, with a median, a band and a rule",
        "choose an order of runs in which a drifting machine fools nobody",
    ),
    minutes=40,
    modes={
        "LIVE GPU": "a matrix product on your GPU with three timers",
        "LIVE CPU": "a matrix product on your CPU: warm-up, spread, a profiler's price; nothing runs behind the host "
        "there",
        "RECORDED": "all samples of steps that were measured on an NVIDIA H200, and three clocks on each",
        "SIMULATED": "a device whose true time is known, and a machine that drifts",
    },
    needs=(0, 1),
    exercises=EXERCISES,
    quizzes=QUIZZES,
    predictions=(GATE.id,),
)


def card() -> Card:
    """The goal card."""
    return chapter.card()


def recap() -> QuizCard:
    """The question about chapter 01."""
    return RECAP.show()


def task_time_us() -> TaskCard:
    """The task of exercise 02.1, with its hints."""
    return TaskCard(TIME_US)


def check_time_us(answer: object) -> CheckCard:
    """Check exercise 02.1."""
    return check(TIME_US, answer)


def task_verdict() -> TaskCard:
    """The task of exercise 02.2, with its hints."""
    return TaskCard(VERDICT)


def check_verdict(answer: object) -> CheckCard:
    """Check exercise 02.2."""
    return check(VERDICT, answer)


def task_rotation() -> TaskCard:
    """The task of exercise 02.3, with its hints."""
    return TaskCard(ROTATION)


def check_rotation(answer: object) -> CheckCard:
    """Check exercise 02.3."""
    return check(ROTATION, answer)


def transfer() -> QuizCard:
    """The question that asks for the same in another place."""
    return TRANSFER.show()


def self_check() -> QuizCard:
    """The self-check at the end."""
    return SELF_CHECK.show()
