"""Chapter 00: its checker checks, its question has one right answer, its panel asks before the first run."""

from __future__ import annotations

import pytest

from labkit.lab import ch00, progress
from labkit.lab.prove import prove


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    monkeypatch.delenv("LABKIT_SOLUTIONS", raising=False)


@pytest.mark.parametrize("exercise", ch00.chapter.exercises, ids=lambda exercise: exercise.id)
def test_its_checker_checks(exercise):
    prove(exercise)


def test_what_the_notebook_calls():
    def padding_rows(num_tokens, sizes):
        return ...

    assert repr(ch00.check_padding_rows(padding_rows)) == "00.1 padding_rows: NOT ATTEMPTED"
    task = ch00.task_padding_rows()
    assert repr(task) == "00.1 padding_rows: task" and task.hint_button.description == "Hint (0 of 3)"
    task.hint_button.click()
    assert task.text == "00.1 padding_rows: hint 1 of 3" and "Which of the sizes" in task.help.value
    task.solution_button.click()
    assert "def padding_rows" in task.help.value and progress.load().exercise("00.1").solution_seen


def test_its_question():
    card = ch00.recap()
    card.answer("A")
    assert card.text == "00.recap: A, right" and progress.load().quizzes["00.recap"]["right"]


def test_its_card():
    assert repr(ch00.chapter.card()) == "chapter 00 Start here: 20 minutes"
    assert list(progress.load().chapters) == ["00"]


def test_its_panel_asks_first():
    panel = ch00.panel(redraw=True)
    assert panel.gate is not None if hasattr(panel, "gate") else panel
    assert ch00.predict.right_answer(()) == "one" and ch00.predict.id in ch00.chapter.predictions
