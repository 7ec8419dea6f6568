"""Chapter 11, the bill, the switchboard, the capstone: what the notebook imports. Refuses to decide for anybody."""

from __future__ import annotations

from labkit.lab import trial
from labkit.lab.cards import Card, paragraph
from labkit.lab.ch11.capstone import CHOOSE
from labkit.lab.ch11.cards import SCORE, claims, defend, note_score, paid_back, self_check, solve
from labkit.lab.ch11.exercises import FIND_CULPRIT, PAY_BACK
from labkit.lab.ch11.panel import GATE, MYSTERY_GATE, bill_panel, suspects_left, switchboard
from labkit.lab.ch11.quizzes import QUIZZES, RECAP, TRANSFER
from labkit.lab.ch11.vllm_command import SERVE_COMMAND, read
from labkit.lab.chapter import Chapter
from labkit.lab.exercises import CheckCard, check
from labkit.lab.progress import solutions_wanted
from labkit.lab.quiz import QuizCard
from labkit.lab.task import TaskCard

__all__ = [
    "bill_panel", "card", "chapter", "check_choose", "check_find_culprit", "check_requests_to_pay_back",
    "check_serve_command", "claims", "defend", "note_score", "paid_back", "recap", "self_check", "solve",
    "suspects_left", "switchboard", "task_choose", "task_find_culprit", "task_requests_to_pay_back",
    "task_serve_command", "transfer",
]  # fmt: skip

chapter = Chapter(
    number=11,
    slug="bill_switchboard_capstone",
    title="The bill, the switchboard, the capstone",
    goals=(
        "say what graphs and compilation cost in start-up, memory and debugging, and when that is paid back",
        "find one wrong part of an engine with as few runs as possible",
        "tell an engine what you need, and defend the choice with measurements",
    ),
    minutes=45,
    modes={
        "LIVE GPU": "engines started on your GPU, with their graphs and compiled pieces",
        "LIVE CPU": "engines started on your CPU; graphs are emulated there, and save nothing",
        "RECORDED": "decode steps of an NVIDIA H200, which the capstone is graded on",
        "SIMULATED": "a bill whose prices you set, and a step in numpy with a bug in it",
    },
    needs=(7, 8, 9, 10),
    exercises=(PAY_BACK, SERVE_COMMAND, FIND_CULPRIT, CHOOSE),
    quizzes=QUIZZES,
    predictions=(GATE.id, MYSTERY_GATE.id),
    score=SCORE,
)


def card() -> Card:
    """The goal card."""
    return chapter.card()


def recap() -> QuizCard:
    """The question about chapter 10."""
    return RECAP.show()


def task_requests_to_pay_back() -> TaskCard:
    """The task of exercise 11.1, with its hints."""
    return TaskCard(PAY_BACK)


def check_requests_to_pay_back(answer: object) -> CheckCard:
    """Check exercise 11.1."""
    return check(PAY_BACK, answer)


def task_serve_command() -> TaskCard:
    """The task of exercise 11.2, with its hints."""
    return TaskCard(SERVE_COMMAND)


def check_serve_command(answer: object) -> CheckCard:
    """Check exercise 11.2; where the first command that differs is none, what the shell or vLLM would say to it."""
    made = check(SERVE_COMMAND, answer)
    if made.verdict.case and callable(answer) and not solutions_wanted():
        at = SERVE_COMMAND.all_cases()[made.verdict.case - 1]
        command = trial.call(answer, at.args).value
        try:
            read(command) if isinstance(command, str) else None
        except (ValueError, KeyError, TypeError) as error:
            said = paragraph(f"What is wrong with this command: {error}.")
            return CheckCard(made.line, made.html + said, made.verdict)
    return made


def task_find_culprit() -> TaskCard:
    """The task of exercise 11.3, with its hints."""
    return TaskCard(FIND_CULPRIT)


def check_find_culprit(answer: object) -> CheckCard:
    """Check exercise 11.3."""
    return check(FIND_CULPRIT, answer)


def task_choose() -> TaskCard:
    """The task of exercise 11.4, with its hints."""
    return TaskCard(CHOOSE)


def check_choose(answer: object) -> CheckCard:
    """Check exercise 11.4."""
    return check(CHOOSE, answer)


def transfer() -> QuizCard:
    """The question that asks for the same in another place."""
    return TRANSFER.show()
