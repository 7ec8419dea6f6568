"""Chapter 04, prefill kernels, decode kernels: what the notebook imports. Refuses to say how batches are made."""

from __future__ import annotations

import ipywidgets as widgets

from labkit.lab.cards import Card
from labkit.lab.ch04.cards import SCORE, myths, note_score, one_kernel, plug_in, plug_in_wrong, regimes
from labkit.lab.ch04.exercises import CHOOSE, COMBINE, EXERCISES, REGIME
from labkit.lab.ch04.panel import GATE, splits_panel
from labkit.lab.ch04.quizzes import QUIZZES, RECAP, SELF_CHECK, TRANSFER
from labkit.lab.chapter import Chapter
from labkit.lab.exercises import CheckCard, check
from labkit.lab.quiz import QuizCard
from labkit.lab.task import TaskCard

__all__ = [
    "card", "chapter", "check_choose_num_splits", "check_combine", "check_regime", "myths", "note_score", "one_kernel",
    "plug_in", "plug_in_wrong", "questions", "recap", "regimes", "splits_panel", "task_choose_num_splits",
    "task_combine", "task_regime",
]  # fmt: skip

chapter = Chapter(
    number=4,
    slug="prefill_decode",
    title="Prefill kernels, decode kernels",
    goals=(
        "count the programs of an attention call, and say how much of a GPU they use",
        "say why one query over a long past needs its keys cut into parts, and a prompt does not",
        "choose a number of splits, and merge what they give",
        "tell by operations per byte what a batch waits for",
    ),
    minutes=40,
    modes={
        "LIVE GPU": "the engine's Triton kernel with every number of splits, on your GPU",
        "LIVE CPU": "the same sums cut and merged in torch: the result stays; a CPU has no multiprocessors to fill",
        "RECORDED": "decodes of an NVIDIA GPU over numbers of splits, where a recording of them is there",
        "SIMULATED": "the engine's own rules for tiles and splits, and a model for the time",
    },
    needs=(1, 3),
    exercises=EXERCISES,
    quizzes=QUIZZES,
    predictions=(GATE.id,),
    score=SCORE,
)


def card() -> Card:
    """The goal card."""
    return chapter.card()


def recap() -> QuizCard:
    """The question about chapter 03."""
    return RECAP.show()


def task_combine() -> TaskCard:
    """The task of exercise 04.1, with its hints."""
    return TaskCard(COMBINE)


def check_combine(answer: object) -> CheckCard:
    """Check exercise 04.1."""
    return check(COMBINE, answer)


def task_choose_num_splits() -> TaskCard:
    """The task of exercise 04.2, with its hints."""
    return TaskCard(CHOOSE)


def check_choose_num_splits(answer: object) -> CheckCard:
    """Check exercise 04.2."""
    return check(CHOOSE, answer)


def task_regime() -> TaskCard:
    """The task of exercise 04.3, with its hints."""
    return TaskCard(REGIME)


def check_regime(answer: object) -> CheckCard:
    """Check exercise 04.3."""
    return check(REGIME, answer)


def questions() -> widgets.VBox:
    """The question that asks for the same in another place, and the self-check."""
    return widgets.VBox([TRANSFER.show(), SELF_CHECK.show()])
