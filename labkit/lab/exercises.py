"""An exercise: what to write, how an answer is checked, what helps. Refuses to know which chapter asks for it.

`check` never raises. It gives a card: one line that is the same in every run, and a page that shows the first case in
which the answer differs, beside the misconception whose results look like it.
"""

from __future__ import annotations

import dataclasses
import inspect
import random
import textwrap
import types
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from labkit.lab import progress, trial
from labkit.lab.cards import Card, code, paragraph, rows, verdict
from labkit.lab.compare import difference, shown
from labkit.lab.trial import Outcome

PASS, NOT_YET, NOT_ATTEMPTED = "PASS", "NOT YET", "NOT ATTEMPTED"
NUM_HINTS = 3
_PLAIN = (int, float, str, bytes, type(None))


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: its arguments, and the name of the group that it belongs to."""

    group: str
    args: tuple[Any, ...]


def case(group: str, *args: Any) -> Case:
    """`case("above the largest", 520, [1, 2, 4])`; every group must catch a wrong answer that no other one catches."""
    return Case(group, args)


@dataclasses.dataclass(frozen=True)
class Wrong:
    """An answer that people give, and the thought behind it in a sentence for its author ("You …")."""

    name: str
    fn: Callable[..., Any]
    misconception: str


@dataclasses.dataclass(frozen=True)
class Exercise:
    """One function for the learner to write.

    id: "08.2", the chapter and a number. title: a few words. minutes: for somebody who knows the chapter.
    items: self-check items that it is about. ask: the task in HTML or plain text: what to write, shapes, edges.
    solution: a correct function; its name and its source are shown.
    cases: makes the cases from a seeded generator, simple ones first; each a `case(group, *args)` or a tuple of
    arguments, which goes to the group "cases". Inputs are copied for each call.
    wrong: known wrong answers. hints: three, from a nudge to nearly the answer. explanation: why the solution is right.
    same: whether a result counts as the expected one; None takes `labkit.lab.compare.same`.
    show: how a case is printed, given the arguments; None prints the call.
    mutates: the answer is what the call does to its inputs (a static buffer, say); they are compared with the result.
    redundant: groups that need no wrong answer of their own, each with the reason.
    """

    id: str
    title: str
    minutes: int
    items: tuple[str, ...]
    ask: str
    solution: Callable[..., Any]
    cases: Callable[[random.Random], Iterable[Case | tuple[Any, ...]]]
    wrong: Sequence[Wrong]
    hints: Sequence[str]
    explanation: str
    same: Callable[[Any, Any], bool] | None = None
    show: Callable[[tuple[Any, ...]], str] | None = None
    mutates: bool = False
    redundant: Mapping[str, str] = dataclasses.field(default_factory=dict)
    limit_s: float = trial.LIMIT_S
    name: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.solution.__name__.lstrip("_"))
        if len(self.hints) != NUM_HINTS:
            raise ValueError(f"exercise {self.id}: there are {len(self.hints)} hints, and it takes {NUM_HINTS}")

    @property
    def label(self) -> str:
        """What every line about it begins with: `08.2 pad_to`."""
        return f"{self.id} {self.name}"

    def all_cases(self) -> list[Case]:
        """The cases, the same in every run and fresh in every call."""
        rng = random.Random(zlib.crc32(self.id.encode()))
        return [c if isinstance(c, Case) else Case("cases", tuple(c)) for c in self.cases(rng)]

    def agrees(self, expected: Outcome, got: Outcome) -> bool:
        """Whether a call came out as it should: the same result, or an error of the expected kind."""
        if expected.error is not None or got.error is not None:
            return isinstance(got.error, type(expected.error)) if expected.error is not None else False
        if got.mutated and not self.mutates:
            return False
        try:
            if not (self.same(expected.value, got.value) if self.same else _same(expected.value, got.value)):
                return False
        except Exception:  # the rule met something that it was not made for, so it is not the same
            return False
        return not self.mutates or difference(expected.args, got.args) is None

    def call(self, args: tuple[Any, ...]) -> str:
        """A case in one line of text."""
        try:
            return self.show(args) if self.show else f"{self.name}({', '.join(map(shown, args))})"
        except Exception:
            return f"{self.name}({', '.join(map(shown, args))})"

    def parameters(self) -> list[str]:
        return list(inspect.signature(self.solution).parameters)

    def expected(self, cases: Sequence[Case]) -> tuple[Outcome, ...]:
        """What the solution gives. It is trusted, and runs where it is called."""
        return tuple(trial.call(self.solution, c.args, self.parameters()) for c in cases)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a check found. case: number of the first case that differs, from 1; 0 where there is none."""

    status: str
    cases: int
    case: int = 0
    group: str = ""
    wrong: Wrong | None = None
    slow: bool = False


class CheckCard(Card):
    """A check's card; `verdict` has what it found."""

    def __init__(self, line: str, html: str, verdict: Verdict) -> None:
        super().__init__(line, html, {PASS: "lk-pass", NOT_YET: "lk-error"}.get(verdict.status, ""))
        self.verdict = verdict

    @property
    def passed(self) -> bool:
        return self.verdict.status == PASS

    @property
    def misconception(self) -> str:
        """The sentence of the known wrong answer that gives the same results; "" where none does."""
        return self.verdict.wrong.misconception if self.verdict.wrong else ""


def check(exercise: Exercise, answer: Any) -> CheckCard:
    """Judge an answer. Never raises: whatever the answer does becomes a card. Noted in the learner's progress.

    With LABKIT_SOLUTIONS=1 the solution is judged in its place; one that fails raises, and nothing is noted.
    """
    if progress.solutions_wanted():
        card = _judge(exercise, exercise.solution)
        assert card.passed, f"{card!r}: the solution fails its own check"  # this is a run of the course's own tests
        return card
    return _judge(exercise, answer)


def _judge(exercise: Exercise, answer: Any) -> CheckCard:
    if answer is ... or answer is None or is_empty(answer):
        return _not_attempted(exercise)
    if not callable(answer):
        what = f"A function was expected, and this is {shown(answer)}."
        progress.note_exercise(exercise.id, False)
        return _card(exercise, Verdict(NOT_YET, 0), [paragraph(what)], f"{exercise.label}: {NOT_YET}, not a function")
    cases = exercise.all_cases()
    ran = trial.run(answer, [c.args for c in cases], exercise.limit_s, exercise.parameters())
    if ran.outcomes and all(_is_stub(outcome) for outcome in ran.outcomes):
        return _not_attempted(exercise)
    expected = exercise.expected(cases)
    first = next(
        (i for i, got in enumerate(ran.outcomes) if not exercise.agrees(expected[i], got)),
        len(ran.outcomes) if ran.slow else None,
    )
    if first is None:
        progress.note_exercise(exercise.id, True)
        body = [paragraph(f"All {len(cases)} cases agree."), paragraph(exercise.explanation, html=True)]
        return _card(exercise, Verdict(PASS, len(cases)), body, f"{exercise.label}: {PASS} ({len(cases)} cases)")
    progress.note_exercise(exercise.id, False)
    slow = first == len(ran.outcomes)
    wrong = None if slow else _likely(exercise, cases, expected, ran.outcomes)
    found = Verdict(NOT_YET, len(cases), first + 1, cases[first].group, wrong, slow)
    got = None if slow else ran.outcomes[first]
    body = _first_difference(exercise, cases[first], expected[first], got, found)
    body += _printed(ran.printed if got is None else got.printed)
    return _card(exercise, found, body, f"{exercise.label}: {NOT_YET}, case {first + 1}")


def hint(exercise: Exercise) -> Card:
    """One hint more each time, three in all; how many were seen is noted."""
    level = min(progress.load().exercise(exercise.id).hints + 1, NUM_HINTS)
    progress.note_hint(exercise.id, level)
    return hints_up_to(exercise, level)


def hints_up_to(exercise: Exercise, level: int) -> Card:
    """The first `level` hints on one card; notes nothing."""
    shown_ = [paragraph(f"<b>Hint {i + 1}.</b> {text}", html=True) for i, text in enumerate(exercise.hints[:level])]
    left = NUM_HINTS - level
    end = f"{left} more {'is' if left == 1 else 'are'} left." if left else "That was the last one."
    return Card(f"{exercise.label}: hint {level} of {NUM_HINTS}", "".join([*shown_, paragraph(end, quiet=True)]))


def solution(exercise: Exercise) -> Card:
    """A correct answer with its explanation. That it was seen is noted; it counts against nobody."""
    progress.note_solution(exercise.id)
    body = code(source_of(exercise.solution)) + paragraph(exercise.explanation, html=True)
    return Card(f"{exercise.label}: solution", paragraph("<b>One way to write it.</b>", html=True) + body)


def source_of(fn: Callable[..., Any]) -> str:
    """A function's own source; its name where there is none to read."""
    try:
        return textwrap.dedent(inspect.getsource(fn)).strip()
    except (OSError, TypeError):
        return f"# the source of {getattr(fn, '__name__', 'this function')} is not here"


# --- what a card is made of ------------------------------------------------------------------------------------------


def _card(exercise: Exercise, found: Verdict, body: Sequence[str], line: str) -> CheckCard:
    return CheckCard(line, verdict(found.status, exercise.label) + "".join(body), found)


def _not_attempted(exercise: Exercise) -> CheckCard:
    body = paragraph("Replace the line `return ...` of the function above by your answer, and run both cells again.")
    return _card(exercise, Verdict(NOT_ATTEMPTED, 0), [body], f"{exercise.label}: {NOT_ATTEMPTED}")


def _first_difference(
    exercise: Exercise, at: Case, expected: Outcome, got: Outcome | None, found: Verdict
) -> list[str]:
    head = f"Case {found.case} of {found.cases} ({at.group}):"
    body = [paragraph(head), code(exercise.call(at.args))]
    should = _said(expected, exercise)
    if got is None:
        slow = f"It took longer than {exercise.limit_s:g} s, so the check stopped waiting. "
        slow += "If there is an endless loop in your function, it still runs: restart the kernel to end it."
        return [*body, paragraph(slow), rows({"expected": should})]
    if got.error is not None:
        body.append(rows({"yours": f"raises {type(got.error).__name__}: {got.error}", "expected": should}))
        if isinstance(got.error, TypeError) and "argument" in str(got.error):
            body.append(paragraph(f"It is called as {exercise.name}({', '.join(exercise.parameters())})."))
    elif _is_stub(got):
        body.append(paragraph("Here it still returns `...`: a branch is left to write."))
        body.append(rows({"expected": should}))
    else:
        body.append(rows({"yours": _said(got, exercise), "expected": should}))
        why = difference(expected.value, got.value) if expected.error is None else None
        plain = isinstance(expected.value, _PLAIN) and type(expected.value) is type(got.value)
        if why and not plain:  # two short values beside each other say it themselves
            body.append(paragraph(f"Yours {why}."))
        if got.mutated and not exercise.mutates:
            changed = f"Your function changed its input {got.mutated!r}. Work on a copy: others still use it."
            body.append(paragraph(changed))
    if found.wrong is not None:
        body.append(paragraph(f"<b>Perhaps:</b> {found.wrong.misconception}", html=True))
    return body


def _said(outcome: Outcome, exercise: Exercise) -> str:
    if outcome.error is not None:
        return f"raises {type(outcome.error).__name__}"
    if exercise.mutates:
        return f"{shown(outcome.value)}, inputs then {', '.join(map(shown, outcome.args))}"
    return shown(outcome.value)


def _printed(text: str) -> list[str]:
    return [paragraph("Your function printed:", quiet=True), code(text)] if text.strip() else []


# --- judging ---------------------------------------------------------------------------------------------------------


def _same(expected: Any, got: Any) -> bool:
    return difference(expected, got) is None


def _is_stub(outcome: Outcome) -> bool:
    return outcome.value is ... or isinstance(outcome.error, NotImplementedError)


def is_empty(answer: Any) -> bool:
    """A function with nothing in it: its body is a docstring, `...` or `pass`."""
    if not isinstance(answer, types.FunctionType):
        return False
    import dis

    ops = [op for op in dis.get_instructions(answer) if op.opname not in ("RESUME", "NOP", "COPY_FREE_VARS")]
    names = [op.opname for op in ops]
    return names in (["RETURN_CONST"], ["LOAD_CONST", "RETURN_VALUE"]) and ops[0].argval is None


def _likely(
    exercise: Exercise, cases: Sequence[Case], expected: Sequence[Outcome], got: Sequence[Outcome]
) -> Wrong | None:
    """The known wrong answer that gives what the learner's gives, at the first difference and in most of the rest."""
    differing = [i for i, outcome in enumerate(got) if not exercise.agrees(expected[i], outcome)]
    best: tuple[int, Wrong] | None = None
    for wrong in exercise.wrong:
        theirs = [trial.call(wrong.fn, c.args, exercise.parameters()) for c in cases[: len(got)]]
        if not _alike(exercise, theirs[differing[0]], got[differing[0]]):
            continue
        agreeing = sum(_alike(exercise, a, b) for a, b in zip(theirs, got, strict=True))
        if 2 * sum(_alike(exercise, theirs[i], got[i]) for i in differing) <= len(differing):
            continue
        if best is None or agreeing > best[0]:
            best = agreeing, wrong
    return best[1] if best else None


def _alike(exercise: Exercise, a: Outcome, b: Outcome) -> bool:
    if a.error is not None or b.error is not None:
        return type(a.error) is type(b.error)
    if a.mutated != b.mutated and not exercise.mutates:
        return False
    if difference(a.value, b.value) is not None:
        return False
    return not exercise.mutates or difference(a.args, b.args) is None
