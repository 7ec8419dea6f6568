"""Chapter 09, fuse, then replay: what the notebook imports. Refuses to say how a pass is cut into pieces."""

from __future__ import annotations

from labkit.lab.cards import Card
from labkit.lab.ch09.cards import SCORE, against_inductor, myths, note_score
from labkit.lab.ch09.exercises import ATTRIBUTE, COUNT_LAUNCHES, EXERCISES, RECOMPILES, STEPS_TO_PAY
from labkit.lab.ch09.panel import GATE, kernels_panel, matrix_panel
from labkit.lab.ch09.quizzes import QUIZZES, RECAP, SELF_CHECK, TRANSFER
from labkit.lab.chapter import Chapter
from labkit.lab.exercises import CheckCard, check
from labkit.lab.quiz import QuizCard
from labkit.lab.task import TaskCard

__all__ = [
    "against_inductor", "card", "chapter", "check_attribute", "check_count_launches", "check_recompiles",
    "check_steps_to_pay", "kernels_panel", "matrix_panel", "myths", "note_score", "recap", "self_check",
    "task_attribute", "task_count_launches", "task_recompiles", "task_steps_to_pay", "transfer",
]  # fmt: skip

chapter = Chapter(
    number=9,
    slug="fuse_then_replay",
    title="Fuse, then replay",
    goals=(
        "say what a compiler takes away from a step that a graph does not, and the other way round",
        "count the kernels of a piece before and after fusion",
        "split a gain between two switches, and say what they do together",
        "tell when compiling for one size pays, and when the compiler starts again",
    ),
    minutes=40,
    modes={
        "LIVE GPU": "four forms of a decode step, taking turns; kernels of the compiled pieces",
        "LIVE CPU": "the same; graphs are emulated and save nothing, compiled code is real C++",
        "RECORDED": "steps of an NVIDIA H200 in every form that was recorded; kernels counted on a CPU",
        "SIMULATED": "a decode step with many small kernels, and with few larger ones",
    },
    needs=(1, 7, 8),
    exercises=EXERCISES,
    quizzes=QUIZZES,
    predictions=(GATE.id,),
    score=SCORE,
)


def card() -> Card:
    """The goal card."""
    return chapter.card()


def recap() -> QuizCard:
    """The question about chapter 08."""
    return RECAP.show()


def task_count_launches() -> TaskCard:
    """The task of exercise 09.1, with its hints."""
    return TaskCard(COUNT_LAUNCHES)


def check_count_launches(answer: object) -> CheckCard:
    """Check exercise 09.1."""
    return check(COUNT_LAUNCHES, answer)


def task_attribute() -> TaskCard:
    """The task of exercise 09.2, with its hints."""
    return TaskCard(ATTRIBUTE)


def check_attribute(answer: object) -> CheckCard:
    """Check exercise 09.2."""
    return check(ATTRIBUTE, answer)


def task_steps_to_pay() -> TaskCard:
    """The task of exercise 09.3, with its hints."""
    return TaskCard(STEPS_TO_PAY)


def check_steps_to_pay(answer: object) -> CheckCard:
    """Check exercise 09.3."""
    return check(STEPS_TO_PAY, answer)


def task_recompiles() -> TaskCard:
    """The task of exercise 09.4, with its hints."""
    return TaskCard(RECOMPILES)


def check_recompiles(answer: object) -> CheckCard:
    """Check exercise 09.4."""
    return check(RECOMPILES, answer)


def transfer() -> QuizCard:
    """The question that asks for the same in another place."""
    return TRANSFER.show()


def self_check() -> QuizCard:
    """The self-check at the end."""
    return SELF_CHECK.show()
