"""Chapter 08, sizes, padding and memory: what the notebook imports. Refuses to know what a graph is."""

from __future__ import annotations

import ipywidgets as widgets

from labkit.lab import ui
from labkit.lab.cards import Card
from labkit.lab.ch08.cards import SCORE, against_advisor, myths, note_score, orders, plug_in
from labkit.lab.ch08.exercises import BEST_SIZES, DEFAULT_SIZES, EXERCISES, PAD_TO, POOL_MIB
from labkit.lab.ch08.panel import GATE, sizes_panel
from labkit.lab.ch08.quizzes import QUIZZES, RECAP, SELF_CHECK, TRANSFER
from labkit.lab.chapter import Chapter
from labkit.lab.exercises import CheckCard, check
from labkit.lab.quiz import QuizCard
from labkit.lab.task import TaskCard

__all__ = [
    "against_advisor", "card", "chapter", "check_best_sizes", "check_default_capture_sizes", "check_pad_to",
    "check_pool_mib", "myths", "note_score", "orders", "plug_in", "questions", "recap", "sizes_panel",
    "task_best_sizes", "task_default_capture_sizes", "task_pad_to", "task_pool_mib",
]  # fmt: skip

chapter = Chapter(
    number=8,
    slug="sizes_padding_memory",
    title="Sizes, padding and memory",
    goals=(
        "say which size a step of any number of tokens runs in, and when it runs in none",
        "write the default list and the padding rule as the engine has them",
        "choose the sizes that suit some traffic, and say what each one costs",
        "explain why the largest graph is captured first",
    ),
    minutes=45,
    modes={
        "LIVE GPU": "your list captured on your GPU: seconds, MiB, padding of real steps",
        "LIVE CPU": "the same on your CPU with emulated graphs: padding is real, capturing takes nothing",
        "RECORDED": "what decode steps of an NVIDIA H200 cost under other lists",
        "SIMULATED": "the engine's own rule, counted over traffic that you choose",
    },
    needs=(7,),
    exercises=EXERCISES,
    quizzes=QUIZZES,
    predictions=(GATE.id,),
    score=SCORE,
)


def card() -> Card:
    """The goal card."""
    return chapter.card()


def recap() -> QuizCard:
    """The question about chapter 07."""
    return RECAP.show()


def task_default_capture_sizes() -> TaskCard:
    """The task of exercise 08.1, with its hints."""
    return TaskCard(DEFAULT_SIZES)


def check_default_capture_sizes(answer: object) -> CheckCard:
    """Check exercise 08.1."""
    return check(DEFAULT_SIZES, answer)


def task_pad_to() -> TaskCard:
    """The task of exercise 08.2, with its hints."""
    return TaskCard(PAD_TO)


def check_pad_to(answer: object) -> CheckCard:
    """Check exercise 08.2."""
    return check(PAD_TO, answer)


def task_best_sizes() -> TaskCard:
    """The task of exercise 08.3, with its hints."""
    return TaskCard(BEST_SIZES)


def check_best_sizes(answer: object) -> CheckCard:
    """Check exercise 08.3."""
    return check(BEST_SIZES, answer)


def task_pool_mib() -> TaskCard:
    """The task of exercise 08.4, with its hints."""
    return TaskCard(POOL_MIB)


def check_pool_mib(answer: object) -> CheckCard:
    """Check exercise 08.4."""
    return check(POOL_MIB, answer)


def questions() -> widgets.VBox:
    """The question that asks for the same in another place, and the self-check."""
    return ui.stack([TRANSFER.show(), SELF_CHECK.show()], width="100%")
