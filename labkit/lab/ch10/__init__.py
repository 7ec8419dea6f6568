"""Chapter 10, cut at attention, pick per batch: what the notebook imports. Refuses to say what all of it costs."""

from __future__ import annotations

from labkit.lab.cards import Card
from labkit.lab.ch10.cards import PLUG_SETTINGS, SCORE, launches_line, myths, note_score
from labkit.lab.ch10.exercises import DISPATCH, EXERCISES, KINDS, LAUNCHES, PIECES, exact_only
from labkit.lab.ch10.panel import GATE, cost_panel, tape_panel
from labkit.lab.ch10.quizzes import QUIZZES, RECAP, SELF_CHECK, TRANSFER
from labkit.lab.ch10.walk import walk
from labkit.lab.chapter import Chapter
from labkit.lab.exercises import CheckCard, check
from labkit.lab.quiz import QuizCard
from labkit.lab.task import TaskCard

__all__ = [
    "PLUG_SETTINGS", "card", "chapter", "check_dispatch", "check_kinds", "check_launches_per_step", "check_pieces",
    "cost_panel", "exact_only", "launches_line", "myths", "note_score", "recap", "self_check", "tape_panel",
    "task_dispatch", "task_kinds", "task_launches_per_step", "task_pieces", "transfer", "walk",
]  # fmt: skip

chapter = Chapter(
    number=10,
    slug="cut_at_attention",
    title="Cut at attention, pick per batch",
    goals=(
        "say why a forward pass is cut at attention, into how many pieces and of how many kinds",
        "say which graph a batch gets under each mode and tier, and why",
        "write the function that picks it, and run an engine with it",
        "find the lines of the engine in which each of this happens",
    ),
    minutes=45,
    modes={
        "LIVE GPU": "a stream of batches through the engine, step by step, beside the rules",
        "LIVE CPU": "the same with emulated graphs: the same choices, nothing saved",
        "RECORDED": "what a decode step takes under each mode, where it was recorded",
        "SIMULATED": "the rules for any model and backend; a decode step in each mode",
    },
    needs=(5, 6, 8, 9),
    exercises=EXERCISES,
    quizzes=QUIZZES,
    predictions=(GATE.id,),
    score=SCORE,
)


def card() -> Card:
    """The goal card."""
    return chapter.card()


def recap() -> QuizCard:
    """The question about chapter 09."""
    return RECAP.show()


def task_pieces() -> TaskCard:
    """The task of exercise 10.1, with its hints."""
    return TaskCard(PIECES)


def check_pieces(answer: object) -> CheckCard:
    """Check exercise 10.1."""
    return check(PIECES, answer)


def task_kinds() -> TaskCard:
    """The task of exercise 10.2, with its hints."""
    return TaskCard(KINDS)


def check_kinds(answer: object) -> CheckCard:
    """Check exercise 10.2."""
    return check(KINDS, answer)


def task_dispatch() -> TaskCard:
    """The task of exercise 10.3, with its hints."""
    return TaskCard(DISPATCH)


def check_dispatch(answer: object) -> CheckCard:
    """Check exercise 10.3."""
    return check(DISPATCH, answer)


def task_launches_per_step() -> TaskCard:
    """The task of exercise 10.4, with its hints."""
    return TaskCard(LAUNCHES)


def check_launches_per_step(answer: object) -> CheckCard:
    """Check exercise 10.4."""
    return check(LAUNCHES, answer)


def transfer() -> QuizCard:
    """The question that asks for the same in another place."""
    return TRANSFER.show()


def self_check() -> QuizCard:
    """The self-check at the end."""
    return SELF_CHECK.show()
