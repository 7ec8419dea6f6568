"""An exercise's place in the notebook: the task, and buttons for hints and the solution.

Everything that a button does is a method. Refuses to judge an answer: `labkit.lab.exercises` does that.
"""

from __future__ import annotations

import ipywidgets as widgets

from labkit.lab import progress, ui
from labkit.lab.cards import Card, fill_root, paragraph
from labkit.lab.exercises import NUM_HINTS, Exercise, hint, hints_up_to, solution


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
        fill_root(
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
