"""Chapter 00: its checker checks, its question has one right answer, its panel asks before the first run."""

from __future__ import annotations

import pytest

from labkit.lab import ch00, progress
from labkit.lab.chapter import chapters
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
    assert panel.gate.gate is ch00.predict and panel.gate.state == "asking"
    assert ch00.panel(redraw=True, ask=False).gate is None and ch00.predict.id in ch00.chapter.predictions


def test_the_question_is_answered_by_a_graph_with_counted_launches():
    panel = ch00.panel(redraw=True)
    panel.predict("all")
    panel.source.value = next(i for i, s in enumerate(panel.sources) if s.kind == "RECORDED")
    panel.mode.value = "NONE"
    panel.run(wait=True, timeout=60)
    assert "Another run tells" in panel.gate.said.value
    panel.mode.value = "FULL"
    panel.run(wait=True, timeout=60)
    eager, full = panel.rows
    said = panel.gate.said.value
    assert "It came out otherwise" in said and f"Run 1 has {eager.launches} launches" in said
    assert f"run 2 has {full.launches}, of which 1 is the graph" in said


def test_the_map_of_the_course():
    card = ch00.course_map()
    assert repr(card) == f"course: {len(chapters())} chapters"
    for chapter in chapters():
        assert f'href="{chapter.notebook}"' in card.html
    assert "not opened yet" in card.html
    ch00.card()
    assert "0 of 1 passed" in ch00.course_map().html
    ch00.check_padding_rows(ch00.chapter.exercises[0].solution)
    assert "1 of 1 passed" in ch00.course_map().html
