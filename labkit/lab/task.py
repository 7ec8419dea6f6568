"""An exercise's and a question's place in the notebook: the task with its hints, the options with a button.

Everything that a button does is a method. Refuses to judge: `labkit.lab.exercises` and `labkit.lab.quiz` do that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ipywidgets as widgets

from labkit.lab import progress, ui
from labkit.lab.cards import Card, paragraph
from labkit.lab.exercises import NUM_HINTS, Exercise, hint, hints_up_to, solution
from labkit.lab.quiz import LETTERS, Quiz


def _fill(box: widgets.VBox, children: Sequence[widgets.Widget]) -> None:
    """Make `box` a root like a panel's: the style sheet first, then what it shows."""
    box.children = ui.root(children).children
    box.layout = widgets.Layout(width="100%", overflow="hidden")
    box.add_class("labkit")


class TaskCard(widgets.VBox):
    """What is to be written, with two buttons: one hint more, and the solution."""

    def __init__(self, exercise: Exercise) -> None:
        self.exercise = exercise
        self.hint_button = widgets.Button(tooltip="One hint more", layout=widgets.Layout(width="130px"))
        self.solution_button = widgets.Button(
            description="Solution",
            tooltip="A correct answer with its explanation",
            layout=widgets.Layout(width="100px"),
        )
        self.help = ui.area()
        self._card: Card | None = None
        self.hint_button.on_click(lambda _: self.next_hint())
        self.solution_button.on_click(lambda _: self.show_solution())
        title = f"<h3>{ui.escape(exercise.id)} {ui.escape(exercise.title)}</h3>"
        aside = f"about {exercise.minutes} minutes"
        if exercise.items:
            aside += " · self-check " + ", ".join(exercise.items)
        head = f'<div class="lk-head">{title}<span class="lk-quiet">{ui.escape(aside)}</span></div>'
        super().__init__()
        _fill(
            self,
            [
                ui.area(ui.block(head + paragraph(exercise.ask, html=True))),
                ui.row([self.hint_button, self.solution_button]),
                self.help,
            ],
        )
        self._count()

    def next_hint(self) -> Card:
        """One hint more; after the last one all three stay."""
        return self._show(hint(self.exercise))

    def show_solution(self) -> Card:
        return self._show(solution(self.exercise))

    def show_hints(self, level: int) -> Card:
        """Hints up to a level that was seen already; notes nothing."""
        return self._show(hints_up_to(self.exercise, level))

    @property
    def text(self) -> str:
        """The line of what is shown under the buttons; "" before the first hint."""
        return repr(self._card) if self._card else ""

    def _show(self, card: Card) -> Card:
        self._card = card
        self.help.value = ui.block(card.html, "lk-card")
        self._count()
        return card

    def _count(self) -> None:
        seen = progress.load().exercise(self.exercise.id).hints
        self.hint_button.description = f"Hint ({seen} of {NUM_HINTS})"

    def __repr__(self) -> str:
        return f"{self.exercise.label}: task"


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
        _fill(
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
        self.said.value = ui.block(card.html, "lk-card")
        return card

    @property
    def text(self) -> str:
        """The line of the verdict; "" before the first one."""
        return repr(self._card) if self._card else ""

    def __repr__(self) -> str:
        return f"{self.quiz.id}: question, {len(self.quiz.options)} options"


def task(exercise: Exercise) -> Any:
    """The task of an exercise as a widget."""
    return TaskCard(exercise)
