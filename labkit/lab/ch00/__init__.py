"""Chapter 00, start here: what the notebook imports. Refuses to teach more than how the lab is used."""

from __future__ import annotations

from labkit.lab.cards import Card
from labkit.lab.ch00.course_map import course_map
from labkit.lab.ch00.exercises import EXERCISES, PADDING_ROWS
from labkit.lab.ch00.panel import panel, predict
from labkit.lab.ch00.quizzes import RECAP
from labkit.lab.chapter import Chapter
from labkit.lab.exercises import CheckCard, check
from labkit.lab.quiz import QuizCard
from labkit.lab.task import TaskCard

__all__ = [
    "card", "chapter", "check_padding_rows", "course_map", "panel", "predict", "recap", "task_padding_rows",
]  # fmt: skip

chapter = Chapter(
    number=0,
    slug="start_here",
    title="Start here",
    goals=(
        "read where a number comes from: LIVE, RECORDED or SIMULATED",
        "guess before you look, run a panel, and compare two runs",
        "write a small function and let the lab check it",
    ),
    minutes=20,
    modes={
        "LIVE GPU": "the panel runs the engine on your GPU",
        "LIVE CPU": "the panel runs the engine on your CPU; graphs are emulated there, and save nothing",
        "RECORDED": "the panel looks up steps that were measured on an NVIDIA H200",
    },
    exercises=EXERCISES,
    quizzes=(RECAP,),
    predictions=(predict.id,),
)


def card() -> Card:
    """The goal card."""
    return chapter.card()


def task_padding_rows() -> TaskCard:
    """The task of exercise 00.1, with its hints."""
    return TaskCard(PADDING_ROWS)


def check_padding_rows(answer: object) -> CheckCard:
    """Check exercise 00.1."""
    return check(PADDING_ROWS, answer)


def recap() -> QuizCard:
    """The question at the end of the chapter."""
    return RECAP.show()
