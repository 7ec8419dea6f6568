"""A question with options, each with its reason. Refuses to know why it is asked: recap, transfer or self-check.

`Quiz.answer(i)` is what the button does, so a question works without widgets as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import ipywidgets as widgets

from labkit.errors import ConfigError
from labkit.lab import progress, ui
from labkit.lab.cards import Card, fill_root, paragraph, verdict

LETTERS = "ABCDEFGH"


@dataclasses.dataclass(frozen=True)
class Option:
    """One answer: its text, whether it is right, and why or why not, in a sentence or two."""

    text: str
    right: bool
    why: str


@dataclasses.dataclass(frozen=True)
class Quiz:
    """A question with exactly one right option.

    id: "08.recap", unique in the course. question: HTML or plain text. options: `(text, right, why)` each.
    items: self-check items that it is about. kind: "recap", "transfer" or "self-check".
    """

    id: str
    question: str
    options: Sequence[Any]
    items: tuple[str, ...] = ()
    kind: str = "recap"

    def __post_init__(self) -> None:
        options = tuple(o if isinstance(o, Option) else Option(*o) for o in self.options)
        object.__setattr__(self, "options", options)
        if not 2 <= len(options) <= len(LETTERS):
            raise ValueError(f"quiz {self.id}: 2 to {len(LETTERS)} options, and there are {len(options)}")
        if sum(o.right for o in options) != 1:
            raise ValueError(f"quiz {self.id}: exactly one option must be right")
        if not all(o.why.strip() for o in options):
            raise ValueError(f"quiz {self.id}: every option needs its reason")

    @property
    def right(self) -> int:
        """The place of the right option, from 0."""
        return next(i for i, option in enumerate(self.options) if option.right)

    def answer(self, choice: int | str) -> Card:
        """Judge option `choice`, by place from 0 or by letter, and note it.

        Raises:
            ConfigError: there is no such option.
        """
        i = self.place(choice)
        option: Option = self.options[i]
        progress.note_quiz(self.id, i, option.right)
        word = "PASS" if option.right else "NOT YET"
        said = f"<b>{LETTERS[i]}.</b> {option.text}"
        return Card(
            f"{self.id}: {LETTERS[i]}, {'right' if option.right else 'not this one'}",
            verdict(word, "Right" if option.right else "Not this one")
            + paragraph(said, html=True) + paragraph(option.why, html=True),
        )  # fmt: skip

    def show(self) -> QuizCard:
        """The question as a widget with a Check button; in a notebook the last line of a cell."""
        return QuizCard(self)

    def place(self, choice: int | str) -> int:
        """The place of an option that is named by its place or letter."""
        if isinstance(choice, str) and len(choice) == 1 and choice.upper() in LETTERS[: len(self.options)]:
            return LETTERS.index(choice.upper())
        if isinstance(choice, int) and not isinstance(choice, bool) and 0 <= choice < len(self.options):
            return choice
        raise ConfigError(
            f"option {choice!r} of {self.id}",
            f"there are {len(self.options)} options",
            f"Take 0 to {len(self.options) - 1}, or a letter from A to {LETTERS[len(self.options) - 1]}.",
        )


class QuizCard(widgets.VBox):
    """A question: options, Check, and what speaks for or against the option chosen."""

    def __init__(self, quiz: Quiz) -> None:
        self.quiz = quiz
        labels = [f"{LETTERS[i]}. {option.text}" for i, option in enumerate(quiz.options)]
        self.choice = widgets.RadioButtons(
            options=[(label, i) for i, label in enumerate(labels)], index=None, layout=widgets.Layout(width="auto")
        )
        self.check_button = widgets.Button(
            description="Check", tooltip="Judge the option chosen", button_style="primary"
        )
        self.said = ui.area()
        self._card: Card | None = None
        self.check_button.on_click(lambda _: self.check())
        super().__init__()
        fill_root(
            self,
            [
                ui.area(ui.block(paragraph(quiz.question, html=True))),
                self.choice,
                ui.row([self.check_button]),
                self.said,
            ],
        )

    def answer(self, choice: int | str) -> Card:
        """Choose and check in one."""
        card = self.quiz.answer(choice)
        self.choice.index = self.quiz.place(choice)
        return self._show(card)

    def check(self) -> Card:
        """What the button does: judges the option chosen, or asks for one."""
        if self.choice.index is None:
            return self._show(Card(f"{self.quiz.id}: choose an option first", paragraph("Choose an option first.")))
        return self._show(self.quiz.answer(int(self.choice.index)))

    def _show(self, card: Card) -> Card:
        self._card = card
        self.said.value = ui.block(card.html, f"lk-card {card.css}")
        return card

    @property
    def text(self) -> str:
        """The line of the verdict; "" before the first one."""
        return repr(self._card) if self._card else ""

    def __repr__(self) -> str:
        return f"{self.quiz.id}: question, {len(self.quiz.options)} options"
