"""An exercise's check: every answer becomes a card, with the first difference and the thought behind it."""

from __future__ import annotations

import dataclasses
import random
import sys
import threading

import numpy as np
import pytest

from labkit.lab import progress
from labkit.lab.exercises import Exercise, Wrong, case, check, hint, solution
from labkit.lab.prove import catches, prove


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    monkeypatch.delenv("LABKIT_SOLUTIONS", raising=False)


def clamp(value: int, low: int, high: int) -> int:
    """`value`, moved into low…high."""
    return max(low, min(value, high))


def _cases(rng: random.Random):
    for _ in range(6):
        low = rng.randint(0, 10)
        yield case("inside", rng.randint(low + 1, low + 8), low, low + 9)
    for _ in range(3):
        yield case("below", rng.randint(-9, -1), 0, 5)
    for _ in range(3):
        yield case("above", rng.randint(6, 20), 0, 5)


def constant(value, low, high):
    return low if value < low else high if value > high else low + 1


LOW = Wrong("no low", lambda value, low, high: min(value, high), "You forget the lower end.")
HIGH = Wrong("no high", lambda value, low, high: max(value, low), "You forget the upper end.")
MIDDLE = Wrong("constant", constant, "You do not give the value itself back.")

CLAMP = Exercise(
    id="99.1", title="Into a range", minutes=2, items=("A1",), ask="Write <code>clamp(value, low, high)</code>.",
    solution=clamp, cases=_cases, wrong=(LOW, HIGH, MIDDLE), hints=("one", "two", "three"), explanation="Both ends.",
)  # fmt: skip


def with_(**changes) -> Exercise:
    return dataclasses.replace(CLAMP, **changes)


# --- check -----------------------------------------------------------------------------------------------------------


def test_a_right_answer_passes_in_one_line_that_never_varies():
    for _ in range(2):
        card = check(CLAMP, lambda value, low, high: sorted((low, value, high))[1])
        assert repr(card) == "99.1 clamp: PASS (12 cases)" and card.passed
    assert "Both ends." in card._repr_html_()


def stub(value, low, high):
    """Docstring."""
    return ...


def empty(value, low, high): ...


def told(value, low, high):
    raise NotImplementedError


@pytest.mark.parametrize("answer", [stub, empty, told, ..., None], ids=["ellipsis", "empty", "raises", "...", "None"])
def test_a_stub_is_not_attempted_and_not_noted(answer):
    assert repr(check(CLAMP, answer)) == "99.1 clamp: NOT ATTEMPTED"
    assert progress.load().exercises == {}


def half(value, low, high):
    return value if low <= value <= high else ...


def changes_its_input(values):
    values.sort()
    return values[0]


def exits(value, low, high):
    sys.exit(3)


@pytest.mark.parametrize(
    ("answer", "line", "said"),
    [
        (lambda value, low, high: value, "NOT YET, case 7", "expected"),
        (lambda value, low, high: float(max(low, min(value, high))), "NOT YET, case 1", "expected is a whole number"),
        (lambda value, low, high: None if value else 0, "NOT YET, case 1", "nothing"),
        (lambda value, low, high: 1 / 0, "NOT YET, case 1", "ZeroDivisionError"),
        (lambda value: value, "NOT YET, case 1", "It is called as clamp(value, low, high)."),
        (exits, "NOT YET, case 1", "SystemExit"),
        (half, "NOT YET, case 7", "a branch is left to write"),
        (3, "NOT YET, not a function", "A function was expected"),
    ],
)
def test_whatever_an_answer_does_becomes_a_card(answer, line, said):
    card = check(CLAMP, answer)
    assert repr(card) == f"99.1 clamp: {line}"
    assert said in card.html and "clamp" in card.html and "0x" not in card._repr_html_()
    assert progress.load().exercise("99.1").attempts == 1


def test_the_card_shows_the_call_yours_and_expected():
    card = check(CLAMP, LOW.fn)
    value = CLAMP.all_cases()[6].args[0]
    assert f"clamp({value}, 0, 5)" in card.html and "Case 7 of 12 (below)" in card.html
    assert f"<code>{value}</code>" in card.html and "<code>0</code>" in card.html


@pytest.mark.parametrize("wrong", [LOW, HIGH, MIDDLE], ids=lambda w: w.name)
def test_a_misconception_is_told_by_its_results(wrong):
    assert check(CLAMP, wrong.fn).misconception == wrong.misconception
    assert wrong.misconception in check(CLAMP, wrong.fn).html


def test_other_results_are_nobodys_misconception():
    assert check(CLAMP, lambda value, low, high: 1000).misconception == ""


def test_inputs_are_copies_and_a_changed_one_is_named():
    lists = [[3, 1, 2], [9, 8], [1]]
    smallest = Exercise(
        id="99.2", title="t", minutes=1, items=(), ask="smallest", solution=lambda values: min(values), name="smallest",
        cases=lambda rng: [(values,) for values in lists], wrong=(), hints=("a", "b", "c"), explanation="e",
    )  # fmt: skip
    card = check(smallest, changes_its_input)
    assert repr(card) == "99.2 smallest: NOT YET, case 1" and "changed its input &#x27;values&#x27;" in card.html
    assert lists == [[3, 1, 2], [9, 8], [1]]
    assert check(smallest, min).passed


def test_an_exercise_may_be_about_the_change():
    def fill(buffer, value):
        buffer[:] = [value] * len(buffer)

    made = Exercise(
        id="99.3", title="t", minutes=1, items=(), ask="fill", solution=fill, mutates=True,
        cases=lambda rng: [([0] * n, n) for n in range(1, 9)], wrong=(), hints=("a", "b", "c"), explanation="e",
    )  # fmt: skip

    def rebinds(buffer, value):
        buffer = [value] * len(buffer)

    assert check(made, fill).passed and repr(check(made, rebinds)) == "99.3 fill: NOT YET, case 1"
    assert "inputs then" in check(made, rebinds).html


def test_what_it_prints_is_caught_and_shown_for_the_case(capsys):
    def chatty(value, low, high):
        print("value is", value)
        return value

    card = check(CLAMP, chatty)
    assert capsys.readouterr().out == "" and card.html.count("value is") == 1
    print("and the page gets its own lines")
    assert "own lines" in capsys.readouterr().out


def test_nobody_waits_for_an_endless_loop():
    release = threading.Event()
    calls = []

    def slow(value, low, high):
        calls.append(value)
        if len(calls) == 3:
            release.wait(60)
        return clamp(value, low, high)

    card = check(with_(limit_s=0.2), slow)
    release.set()
    assert repr(card) == "99.1 clamp: NOT YET, case 3" and "took longer than 0.2 s" in card.html


def test_expected_errors_are_answers_too():
    def first(values):
        return values[0]

    made = Exercise(
        id="99.4", title="t", minutes=1, items=(), ask="first", solution=first,
        cases=lambda rng: [case("some", [1, 2]), case("none", [])], wrong=(), hints=("a", "b", "c"), explanation="e",
    )  # fmt: skip
    assert check(made, lambda values: values[0]).passed
    assert repr(check(made, lambda values: values[0] if values else None)) == "99.4 first: NOT YET, case 2"
    assert "raises IndexError" in check(made, lambda values: values[0] if values else None).html


def test_an_unkind_rule_of_sameness_rejects():
    def strict(expected, got):
        return expected == got["no such thing"]

    assert not check(with_(same=strict), clamp).passed


def test_solutions_take_the_places_of_answers(monkeypatch):
    monkeypatch.setenv("LABKIT_SOLUTIONS", "1")
    assert repr(check(CLAMP, stub)) == "99.1 clamp: PASS (12 cases)"
    assert progress.load().exercises == {}
    with pytest.raises(AssertionError, match="99.1"):
        check(with_(same=lambda a, b: False), stub)


def test_torch_and_numpy_results_are_compared():
    torch = pytest.importorskip("torch")
    made = Exercise(
        id="99.5", title="t", minutes=1, items=(), ask="twice", solution=lambda x: x * 2, name="twice",
        cases=lambda rng: [(torch.arange(n, dtype=torch.bfloat16),) for n in range(9)],
        wrong=(), hints=("a", "b", "c"), explanation="e",
    )  # fmt: skip
    assert check(made, lambda x: x + x).passed
    assert "shape" in check(made, lambda x: (x * 2)[1:]).html
    assert "changed its input" in check(made, lambda x: x.mul_(2)).html
    assert not check(made, lambda x: (x * 2).float().numpy()).passed
    assert not check(made, lambda x: np.zeros(3)).passed


# --- help ------------------------------------------------------------------------------------------------------------


def test_hints_come_one_more_at_a_time_and_are_counted():
    lines = [repr(hint(CLAMP)) for _ in range(4)]
    assert lines == [f"99.1 clamp: hint {n} of 3" for n in (1, 2, 3, 3)]
    assert progress.load().exercise("99.1").hints == 3
    assert not progress.load().exercise("99.1").solution_seen
    card = solution(CLAMP)
    assert "return max(low, min(value, high))" in card.html and "Both ends." in card.html
    assert progress.load().exercise("99.1").solution_seen


# --- prove -----------------------------------------------------------------------------------------------------------


def test_prove_accepts_a_checker_that_checks():
    prove(CLAMP)
    assert progress.load().exercises == {}
    assert catches(CLAMP, LOW.fn) == {"below"}


def without(group):
    return lambda rng: [c for c in _cases(rng) if c.group != group] * 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cases": without("below")}, "NOT YET|gets PASS|passes"),
        ({"cases": without("above")}, "gets PASS"),
        ({"cases": without("inside")}, "gets PASS"),
        ({"wrong": (LOW, MIDDLE)}, "without the cases 'above'"),
        ({"wrong": (HIGH, MIDDLE)}, "without the cases 'below'"),
        ({"wrong": (LOW, HIGH)}, "without the cases 'inside'"),
        ({"wrong": (LOW,)}, "at least 2"),
        ({"wrong": (LOW, HIGH, dataclasses.replace(MIDDLE, misconception=LOW.misconception))}, "of its own"),
        ({"wrong": (LOW, HIGH, MIDDLE, Wrong("twin", LOW.fn, "A second name."))}, "not as its own"),
        ({"wrong": (LOW, HIGH, MIDDLE, Wrong("right", clamp, "Not wrong."))}, "gets PASS"),
        ({"same": lambda a, b: True}, "passes|gets"),
        ({"same": lambda a, b: False}, "does not pass"),
        ({"ask": "Write it."}, "does not name the function"),
        ({"explanation": " "}, "explanation is empty"),
        ({"hints": ("one", "one", "two")}, "three different hints"),
        ({"id": "8.2"}, "not like 08.2"),
        ({"cases": lambda rng: list(_cases(rng))[:7]}, "at least 8"),
        ({"cases": lambda rng: list(_cases(random.Random()))}, "differ between two runs"),
        ({"redundant": {"nowhere": "why"}}, "not there"),
        ({"redundant": {"below": " "}}, "needs its reason"),
    ],
)
def test_prove_finds_what_is_missing(changes, said):
    with pytest.raises(AssertionError, match=said):
        prove(with_(**changes))


def test_prove_takes_a_reason_for_a_group_of_its_own():
    prove(with_(wrong=(LOW, MIDDLE), redundant={"above": "The picture shows it."}))
