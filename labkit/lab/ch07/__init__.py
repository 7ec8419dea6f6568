"""Chapter 07, record once, press play: what the notebook imports. Refuses to say which sizes are worth recording."""

from __future__ import annotations

import ipywidgets as widgets

from labkit.lab import ui
from labkit.lab.cards import Card
from labkit.lab.ch07.cards import SCORE, myths, note_score, paid_back, plug_in, reasons
from labkit.lab.ch07.exercises import BREAK_EVEN, DIFFERING, EXERCISES, ILLEGAL_LINES, REPLAY
from labkit.lab.ch07.panel import LAUNCHES, STALE, replay_panel, stale_panel
from labkit.lab.ch07.quizzes import QUIZZES, RECAP, SELF_CHECK, TRANSFER
from labkit.lab.chapter import Chapter
from labkit.lab.exercises import CheckCard, check
from labkit.lab.quiz import QuizCard
from labkit.lab.task import TaskCard

__all__ = [
    "card", "chapter", "check_break_even", "check_differing", "check_illegal_lines", "check_replay", "myths",
    "note_score", "paid_back", "plug_in", "questions", "reasons", "recap", "replay_panel", "stale_panel",
    "task_break_even", "task_differing", "task_illegal_lines", "task_replay",
]  # fmt: skip

chapter = Chapter(
    number=7,
    slug="record_once",
    title="Record once, press play",
    goals=(
        "say what a CUDA graph records, and what a replay does and does not do again",
        "write a replay that is right: static buffers, copied inputs, results that stay",
        "tell which lines of a step no capture takes, and which ones it freezes",
        "say after how many steps a capture has paid for itself",
    ),
    minutes=45,
    modes={
        "LIVE GPU": "the engine's step on your GPU, without and with a real graph",
        "LIVE CPU": "the same on your CPU, where the graph is emulated: the same rules, nothing saved",
        "RECORDED": "steps of an NVIDIA H200 without and with their graph",
        "SIMULATED": "a launch queue, a model's step, and replays over numpy arrays",
    },
    needs=(1, 2),
    exercises=EXERCISES,
    quizzes=QUIZZES,
    predictions=(LAUNCHES.id, STALE.id),
    score=SCORE,
)


def card() -> Card:
    """The goal card."""
    return chapter.card()


def recap() -> QuizCard:
    """The question about chapter 06."""
    return RECAP.show()


def task_replay() -> TaskCard:
    """The task of exercise 07.1, with its hints."""
    return TaskCard(REPLAY)


def check_replay(answer: object) -> CheckCard:
    """Check exercise 07.1."""
    return check(REPLAY, answer)


def task_illegal_lines() -> TaskCard:
    """The task of exercise 07.2, with its hints."""
    return TaskCard(ILLEGAL_LINES)


def check_illegal_lines(answer: object) -> CheckCard:
    """Check exercise 07.2."""
    return check(ILLEGAL_LINES, answer)


def task_differing() -> TaskCard:
    """The task of exercise 07.3, with its hints."""
    return TaskCard(DIFFERING)


def check_differing(answer: object) -> CheckCard:
    """Check exercise 07.3."""
    return check(DIFFERING, answer)


def task_break_even() -> TaskCard:
    """The task of exercise 07.4, with its hints."""
    return TaskCard(BREAK_EVEN)


def check_break_even(answer: object) -> CheckCard:
    """Check exercise 07.4."""
    return check(BREAK_EVEN, answer)


def questions() -> widgets.VBox:
    """The question that asks for the same in another place, and the self-check."""
    return ui.stack([TRANSFER.show(), SELF_CHECK.show()], width="100%")
