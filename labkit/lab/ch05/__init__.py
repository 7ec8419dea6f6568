"""Chapter 05, who gets picked, and why not the others: what the notebook imports. Refuses to have rules of its own."""

from __future__ import annotations

from labkit.lab.cards import Card
from labkit.lab.ch05.cards import SCORE, myths, note_score, overrides, plug_in, plug_in_wrong
from labkit.lab.ch05.exercises import EXERCISES, MODE_FOR, PICK, WHY_NOT
from labkit.lab.ch05.panel import GATE, selection_panel
from labkit.lab.ch05.quizzes import QUIZZES, RECAP, SELF_CHECK, TRANSFER
from labkit.lab.chapter import Chapter
from labkit.lab.exercises import CheckCard, check
from labkit.lab.quiz import QuizCard
from labkit.lab.task import TaskCard

__all__ = [
    "card", "chapter", "check_mode_for", "check_pick", "check_why_not", "myths", "note_score", "overrides", "plug_in",
    "plug_in_wrong", "recap", "selection_panel", "self_check", "task_mode_for", "task_pick", "task_why_not", "transfer",
]  # fmt: skip

chapter = Chapter(
    number=5,
    slug="who_gets_picked",
    title="Who gets picked, and why not the others",
    goals=(
        "trace a selection: which backend a machine and a model get, and what each of the others lacks",
        "say what becomes of a backend that was asked for by name",
        "read a tier, and say what it leaves of a graph mode",
    ),
    minutes=40,
    modes={
        "LIVE GPU": "this machine's own libraries, imported and probed",
        "LIVE CPU": "the same on a CPU, which few backends are written for",
        "SIMULATED": "the rules of labkit, exact, for GPUs that need not be here",
    },
    needs=(3, 4),
    exercises=EXERCISES,
    quizzes=QUIZZES,
    predictions=(GATE.id,),
    score=SCORE,
)


def card() -> Card:
    """The goal card."""
    return chapter.card()


def recap() -> QuizCard:
    """The question about chapter 04."""
    return RECAP.show()


def task_why_not() -> TaskCard:
    """The task of exercise 05.1, with its hints."""
    return TaskCard(WHY_NOT)


def check_why_not(answer: object) -> CheckCard:
    """Check exercise 05.1."""
    return check(WHY_NOT, answer)


def task_pick() -> TaskCard:
    """The task of exercise 05.2, with its hints."""
    return TaskCard(PICK)


def check_pick(answer: object) -> CheckCard:
    """Check exercise 05.2."""
    return check(PICK, answer)


def task_mode_for() -> TaskCard:
    """The task of exercise 05.3, with its hints."""
    return TaskCard(MODE_FOR)


def check_mode_for(answer: object) -> CheckCard:
    """Check exercise 05.3."""
    return check(MODE_FOR, answer)


def transfer() -> QuizCard:
    """The question that asks for the same in another place."""
    return TRANSFER.show()


def self_check() -> QuizCard:
    """The self-check at the end."""
    return SELF_CHECK.show()
