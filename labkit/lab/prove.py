"""Whether a checker checks: what every chapter's tests ask of each exercise. Refuses to know what it is about.

@pytest.mark.parametrize("exercise", ch08.chapter.exercises, ids=lambda e: e.id)
def test_its_checker_checks(exercise):
    prove(exercise)
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from labkit.lab import progress
from labkit.lab.exercises import NOT_ATTEMPTED, NOT_YET, PASS, Exercise, check, hints_up_to

MIN_CASES, MIN_WRONG = 8, 2


def prove(exercise: Exercise) -> None:
    """Show that the stub and every known wrong answer are rejected, the solution passes, and no group of cases is idle.

    * Each wrong answer is told by its own misconception.
    * For every group of cases there is a wrong answer that only this group catches, unless `redundant` says why not:
      so leaving out a group, or the check of changed inputs, lets some wrong answer pass.
    * Nonsense is rejected: a constant, the inputs given back.

    Raises:
        AssertionError: a sentence on what is missing.
    """
    about = f"exercise {exercise.label}"
    with _real_answers():
        _texts(exercise, about)
        _cases(exercise, about)
        _solution(exercise, about)
        _nothing_passes_by_chance(exercise, about)
        _wrong_answers(exercise, about)
        _groups(exercise, about)


def catches(exercise: Exercise, fn: Callable[..., Any]) -> set[str]:
    """The groups of cases in which `fn` gives something else than the solution."""
    from labkit.lab import trial

    cases = exercise.all_cases()
    expected = exercise.expected(cases)
    got = trial.run(fn, [c.args for c in cases], exercise.limit_s, exercise.parameters())
    ended = list(zip(cases, expected, got.outcomes, strict=False))
    unanswered = {c.group for c in cases[len(ended) :][:1]}
    return unanswered | {c.group for c, want, have in ended if not exercise.agrees(want, have)}


def _texts(exercise: Exercise, about: str) -> None:
    assert re.fullmatch(r"\d\d\.\d+", exercise.id), f"{about}: the id is not like 08.2"
    assert exercise.minutes > 0, f"{about}: it takes no time"
    for name in ("title", "ask", "explanation"):
        assert getattr(exercise, name).strip(), f"{about}: {name} is empty"
    assert len({h.strip() for h in exercise.hints} - {""}) == 3, f"{about}: three different hints are needed"
    assert exercise.name in exercise.ask, f"{about}: the task does not name the function"
    assert len(exercise.wrong) >= MIN_WRONG, f"{about}: {len(exercise.wrong)} known wrong answers, at least {MIN_WRONG}"
    said = [w.misconception.strip() for w in exercise.wrong]
    assert all(said) and len(set(said)) == len(said), f"{about}: each wrong answer needs a misconception of its own"
    assert len({w.name for w in exercise.wrong}) == len(said), f"{about}: two wrong answers have one name"
    for level in (1, 2, 3):
        hints_up_to(exercise, level)._repr_html_()


def _cases(exercise: Exercise, about: str) -> None:
    first, second = exercise.all_cases(), exercise.all_cases()
    assert len(first) >= MIN_CASES, f"{about}: {len(first)} cases, at least {MIN_CASES}"
    a, b = [exercise.call(c.args) for c in first], [exercise.call(c.args) for c in second]
    assert a == b, f"{about}: the cases differ between two runs; take randomness only from the generator given"
    assert not any("0x" in text for text in a), f"{about}: a case prints a memory address; give it a `show`"


def _solution(exercise: Exercise, about: str) -> None:
    card = check(exercise, exercise.solution)
    assert card.verdict.status == PASS, f"{about}: the solution does not pass: {card!r}"
    again = check(exercise, exercise.solution)
    assert repr(card) == repr(again) == f"{exercise.label}: PASS ({card.verdict.cases} cases)"
    assert card.html == again.html, f"{about}: the card differs between two runs"


def _nothing_passes_by_chance(exercise: Exercise, about: str) -> None:
    def stub(*args: Any) -> Any:
        return ...

    def not_yet(*args: Any) -> Any:
        raise NotImplementedError

    for answer in (stub, not_yet, ..., None):
        assert check(exercise, answer).verdict.status == NOT_ATTEMPTED, f"{about}: a stub counts as an answer"
    expected = exercise.expected(exercise.all_cases())
    constants = [copy.deepcopy(outcome.value) for outcome in expected if outcome.error is None]
    nonsense: list[tuple[str, Callable[..., Any]]] = [
        ("nothing at all", lambda *args: None if args else 0),
        ("its first input", lambda *args: args[0] if args else None),
        ("an error", lambda *args: 1 / 0),
        *[(f"always {value!r}"[:80], lambda *args, value=value: value) for value in constants[:3]],
    ]
    for what, fn in nonsense:
        assert not check(exercise, fn).passed, f"{about}: a function that gives {what} passes"


def _wrong_answers(exercise: Exercise, about: str) -> None:
    for wrong in exercise.wrong:
        card = check(exercise, wrong.fn)
        assert card.verdict.status == NOT_YET, f"{about}: the wrong answer {wrong.name!r} gets {card.verdict.status}"
        assert re.fullmatch(rf"{re.escape(exercise.label)}: NOT YET, case \d+", repr(card)), repr(card)
        assert card.misconception == wrong.misconception, (
            f"{about}: the wrong answer {wrong.name!r} is told as {card.misconception!r}, not as its own misconception"
        )


def _groups(exercise: Exercise, about: str) -> None:
    groups = list(dict.fromkeys(c.group for c in exercise.all_cases()))
    unknown = set(exercise.redundant) - set(groups)
    assert not unknown, f"{about}: redundant names groups that are not there: {sorted(unknown)}"
    assert all(reason.strip() for reason in exercise.redundant.values()), f"{about}: a redundant group needs its reason"
    caught = {wrong.name: catches(exercise, wrong.fn) for wrong in exercise.wrong}
    for group in groups:
        if group in exercise.redundant or len(groups) == 1:
            continue
        assert any(found == {group} for found in caught.values()), (
            f"{about}: without the cases {group!r} every known wrong answer would still be caught. Add a wrong answer "
            f"that only they catch, or say in `redundant` why they are there. Caught: {caught}"
        )


@contextmanager
def _real_answers() -> Iterator[None]:
    """LABKIT_SOLUTIONS would put the solution in every answer's place, and nothing here is the learner's work."""
    before = os.environ.pop(progress.SOLUTIONS, None)
    try:
        with progress.paused():
            yield
    finally:
        if before is not None:
            os.environ[progress.SOLUTIONS] = before
