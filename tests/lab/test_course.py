"""Questions, chapters, the glossary and the thirteen items: complete, in agreement, and usable without widgets."""

from __future__ import annotations

import importlib
import re

import pytest

from labkit.errors import ConfigError
from labkit.lab import progress
from labkit.lab.chapter import MODES, Chapter, chapters, exercise
from labkit.lab.compare import close, difference, shown
from labkit.lab.glossary import TERMS, find, glossary, term
from labkit.lab.items import ITEMS, exercises_for, item
from labkit.lab.quiz import Quiz

EVERY = [e for chapter in chapters() for e in chapter.exercises]
QUIZZES = [quiz for chapter in chapters() for quiz in chapter.quizzes]


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    monkeypatch.delenv("LABKIT_SOLUTIONS", raising=False)


# --- the course ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chapter", chapters(), ids=lambda chapter: chapter.key)
def test_a_chapter_is_whole(chapter):
    module = importlib.import_module(f"labkit.lab.ch{chapter.key}")
    assert module.chapter is chapter
    panels = [name for name in dir(module) if name == "panel" or name.endswith("_panel")]
    assert any(callable(getattr(module, name)) for name in panels), f"{module.__name__} has no panel to call"
    assert chapter.goals and 5 <= chapter.minutes <= 60 and chapter.modes
    assert all(before < chapter.number for before in chapter.needs)
    for made in chapter.exercises:
        assert made.id.startswith(f"{chapter.key}.") and callable(getattr(module, f"check_{made.name}"))
        assert set(made.items) <= {i.key for i in ITEMS}
    for quiz in chapter.quizzes:
        assert quiz.id.startswith(f"{chapter.key}.") and set(quiz.items) <= {i.key for i in ITEMS}
    assert all(id.startswith(f"{chapter.key}.") for id in chapter.predictions)
    line = repr(chapter.card())
    assert line == f"chapter {chapter.key} {chapter.title}: {chapter.minutes} minutes"
    assert all(goal.split()[0] in chapter.card().html for goal in chapter.goals)
    assert repr(chapter.scoreboard()).startswith("scoreboard: ")


def test_ids_are_unique():
    ids = [e.id for e in EVERY] + [quiz.id for quiz in QUIZZES]
    assert len(ids) == len(set(ids))


def test_chapters_are_numbered_without_doubles():
    numbers = [chapter.number for chapter in chapters()]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("one", ITEMS, ids=lambda one: one.key)
def test_an_item_is_checked_by_every_chapter_that_teaches_it(one):
    """Asked of the chapters that are there: when all of them are, every item has its exercise."""
    there = {chapter.number for chapter in chapters()}
    for number in one.chapters:
        if number in there:
            mine = [e for e in EVERY if int(e.id[:2]) == number]
            assert exercises_for(one.key, mine), f"chapter {number:02d} has no exercise for {one.key}: {one.text}"


def test_the_thirteen_items():
    assert [i.key for i in ITEMS] == [*(f"A{n}" for n in range(1, 9)), *(f"B{n}" for n in range(1, 6))]
    assert all(1 <= number <= 11 for i in ITEMS for number in i.chapters)
    assert item("A7").chapters == (8, 10)
    with pytest.raises(KeyError, match="no self-check item 'C1'"):
        item("C1")


def test_exercises_are_found_by_id():
    assert exercise("00.1") is chapters()[0].exercise("1")
    with pytest.raises(ConfigError, match="no chapter has it"):
        exercise("77.1")
    with pytest.raises(ConfigError, match="has none of that name"):
        chapters()[0].exercise("9")


def test_a_mode_is_one_of_four():
    with pytest.raises(ValueError, match="no mode"):
        Chapter(99, "x", "X", ("do",), 10, ("LIFE",))
    assert list(MODES) == ["LIVE GPU", "LIVE CPU", "RECORDED", "SIMULATED"]


# --- questions -------------------------------------------------------------------------------------------------------

QUIZ = Quiz(
    "99.q", "How many?", [("one", False, "Two are there."), ("two", True, "Count them."), ("three", False, "No.")]
)


def test_every_option_explains_itself():
    said = [QUIZ.answer(i) for i in range(3)]
    assert [repr(card) for card in said] == ["99.q: A, not this one", "99.q: B, right", "99.q: C, not this one"]
    assert all(option.why in card.html for option, card in zip(QUIZ.options, said, strict=True))
    assert QUIZ.right == 1 and repr(QUIZ.answer("b")) == "99.q: B, right"


def test_answers_are_noted_and_the_first_one_stays():
    QUIZ.answer(2)
    QUIZ.answer(1)
    noted = progress.load().quizzes["99.q"]
    assert noted["attempts"] == 2 and noted["right"] and noted["first"] == {"choice": 2, "right": False}


def test_the_widget_asks_before_it_judges():
    card = QUIZ.show()
    card.check_button.click()
    assert card.text == "99.q: choose an option first" and progress.load().quizzes == {}
    card.choice.index = 0
    card.check_button.click()
    assert card.text == "99.q: A, not this one" and "Two are there." in card.said.value
    assert repr(card) == "99.q: question, 3 options"


@pytest.mark.parametrize("choice", [3, -1, "D", "", True, None, 1.0])
def test_an_option_that_is_not_there(choice):
    with pytest.raises(ConfigError, match="there are 3 options"):
        QUIZ.answer(choice)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([("a", True, "w")], "2 to 8 options"),
        ([("a", True, "w"), ("b", True, "w")], "exactly one"),
        ([("a", False, "w"), ("b", False, "w")], "exactly one"),
        ([("a", True, "w"), ("b", False, " ")], "its reason"),
    ],
)
def test_a_question_that_is_not_whole_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        Quiz("99.x", "?", options)


# --- the glossary ----------------------------------------------------------------------------------------------------


def test_terms_are_found_in_any_case_and_number():
    assert find("Tier") is find("tiers") is TERMS["tier"]
    assert find("mixed batches") is TERMS["mixed batch"] and find("warp drive") is None
    assert repr(term("tier")) == "tier: see chapter 05" and "captured" in term("tier").html
    with pytest.raises(ConfigError, match="Did you mean 'padding'"):
        term("pading")


def test_the_glossary_grows_with_the_chapters():
    count = [int(re.search(r"\d+", repr(glossary(n)))[0]) for n in range(12)]
    assert count == sorted(count) and count[-1] == len(TERMS)
    assert "split-KV" not in glossary(3).html and "split-KV" in glossary(4).html


# --- comparing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (16, 16), (16.0, 16), (0.1 + 0.2, 0.3), ([1, 2], (1, 2)), ((1, [2]), [1, (2,)]), (None, None), ("a", "a"),
        (float("nan"), float("nan")), (float("-inf"), float("-inf")), ({1: [2]}, {1: (2,)}), ({1, 2}, {2, 1}), ([], ()),
    ],
)  # fmt: skip
def test_the_same(expected, got):
    assert difference(expected, got) is None


@pytest.mark.parametrize(
    ("expected", "got", "said"),
    [
        (16, 16.0, "is a float, 16.0; expected is a whole number, 16"),
        (1, True, "is a truth value, True; expected is a whole number, 1"),
        (True, 1, "is a whole number, 1; expected is a truth value, True"),
        (None, 0, "is a whole number, 0; expected is nothing, None"),
        (16, None, "is nothing, None; expected is a whole number, 16"),
        ([1, 2, 3], [1, 5, 3], "is 5 at [1], expected is 2"),
        ([1, 2, 3], [1, 2], "has 2 entries, expected are 3"),
        ([1], iter([1]), "expected is a list, [1]"),
        ([[1], [2]], [[1], [3]], "is 3 at [1][0], expected is 2"),
        ({"a": 1}, {}, "has no entry 'a'"),
        ({}, {"a": 1}, "has an entry 'a' too many"),
        ({1}, set(), "lacks 1"),
        ("full", "FULL", "is 'FULL', expected is 'full'"),
        (0.5, 0.6, "is 0.6, expected is 0.5"),
        (float("inf"), float("-inf"), "is -inf, expected is inf"),
    ],
)
def test_not_the_same(expected, got, said):
    assert said in difference(expected, got)


def test_arrays():
    import numpy as np

    a = np.arange(6.0).reshape(2, 3)
    assert difference(a, a + 1e-12) is None and close(0.1)(a, a * 1.05)
    assert difference(a, a.T) == "has the shape [3, 2], expected is [2, 3]"
    b = a.copy()
    b[1, 2] = 7
    assert difference(a, b) == "is 7.0 at [1, 2], expected is 5.0; 1 of 6 entries differ"
    assert "holds float64" in difference(np.arange(3), np.arange(3.0))
    assert "expected is an array" in difference(a, [[0, 1, 2], [3, 4, 5]])


def test_what_is_shown_has_no_addresses_and_an_end():
    assert "0x" not in shown(object()) and len(shown(list(range(10_000)))) <= 300

    class Broken:
        def __repr__(self):
            raise ValueError

    assert "Broken" in shown(Broken())
    assert "could not be compared" in (difference([Hostile()], [Hostile()]) or "")


class Hostile:
    def __eq__(self, other):
        raise RuntimeError("no")
