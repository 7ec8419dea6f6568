"""Chapter 06, one batch, two shapes: what the notebook imports. Refuses to schedule by rules of its own."""

from __future__ import annotations

import ipywidgets as widgets

from labkit.lab.cards import Card
from labkit.lab.ch06.cards import (
    SCORE,
    claims_and_score,
    myths,
    note_score,
    plug_in_hash,
    plug_in_slots,
    plug_in_wrong_hash,
    plug_in_wrong_slots,
)
from labkit.lab.ch06.exercises import BLOCK_HASH, EXERCISES, PACK, PADDED_WASTE, SLOT_MAPPING
from labkit.lab.ch06.panel import GATE, WAIT_GATE, blocks_panel, packing_panel, waits_panel
from labkit.lab.ch06.quizzes import QUIZZES, RECAP, SELF_CHECK, TRANSFER
from labkit.lab.chapter import Chapter
from labkit.lab.exercises import CheckCard, check
from labkit.lab.quiz import QuizCard
from labkit.lab.task import TaskCard

__all__ = [
    "blocks_panel", "card", "chapter", "check_block_hash", "check_pack", "check_padded_waste", "check_slot_mapping",
    "claims_and_score", "myths", "note_score", "packing_panel", "plug_in_hash", "plug_in_slots", "plug_in_wrong_hash",
    "plug_in_wrong_slots", "questions", "recap", "self_check", "task_block_hash", "task_pack", "task_padded_waste",
    "task_slot_mapping", "transfer", "waits_panel",
]  # fmt: skip

chapter = Chapter(
    number=6,
    slug="one_batch_two_shapes",
    title="One batch, two shapes",
    goals=(
        "pack chunks of prompts and decodes into one batch, with offsets, positions and slots",
        "follow a token into its page of the KV cache, and say when two requests may share one",
        "say what one call, two calls and a padded rectangle cost, and who waits for whom in a mixed step",
    ),
    minutes=45,
    modes={
        "LIVE GPU": "attention of a mixed step in one call, two calls and padded; waits of a real engine",
        "LIVE CPU": "the same with torch's own call, which has no kernel for a mixed batch, and a tiny model",
        "RECORDED": "mixed calls and waits of an NVIDIA GPU, where a recording of them is there",
        "SIMULATED": "scheduler, block pool and slot mapping of labkit, exact, without times or with made-up ones",
    },
    needs=(4, 5),
    exercises=EXERCISES,
    quizzes=QUIZZES,
    predictions=(GATE.id, WAIT_GATE.id),
    score=SCORE,
)


def card() -> Card:
    """The goal card."""
    return chapter.card()


def recap() -> QuizCard:
    """The question about chapter 05."""
    return RECAP.show()


def task_pack() -> TaskCard:
    """The task of exercise 06.1, with its hints."""
    return TaskCard(PACK)


def check_pack(answer: object) -> CheckCard:
    """Check exercise 06.1."""
    return check(PACK, answer)


def task_slot_mapping() -> TaskCard:
    """The task of exercise 06.2, with its hints."""
    return TaskCard(SLOT_MAPPING)


def check_slot_mapping(answer: object) -> CheckCard:
    """Check exercise 06.2."""
    return check(SLOT_MAPPING, answer)


def task_block_hash() -> TaskCard:
    """The task of exercise 06.3, with its hints."""
    return TaskCard(BLOCK_HASH)


def check_block_hash(answer: object) -> CheckCard:
    """Check exercise 06.3."""
    return check(BLOCK_HASH, answer)


def task_padded_waste() -> TaskCard:
    """The task of exercise 06.4, with its hints."""
    return TaskCard(PADDED_WASTE)


def check_padded_waste(answer: object) -> CheckCard:
    """Check exercise 06.4."""
    return check(PADDED_WASTE, answer)


def transfer() -> QuizCard:
    """The question that asks for the same in another place."""
    return TRANSFER.show()


def self_check() -> QuizCard:
    """The self-check at the end."""
    return SELF_CHECK.show()


def questions() -> widgets.VBox:
    """Both of them, one below the other."""
    return widgets.VBox([transfer(), self_check()])
