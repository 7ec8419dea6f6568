"""What a learner has done so far: one JSON file in their own folder. Refuses to know what is right or worth doing.

Every note is a change of the file at once, written beside it and moved into its place, so that neither a kernel that
dies nor a second notebook loses one. A file that cannot be read is set aside, never overwritten; a folder that cannot
be written to costs the notes, never the notebook. `notices()` has a sentence on either.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from labkit.home import home

VERSION = 1
NAME = "progress.json"
#: Set to 1, the checks look at the solutions in place of the answers, and nothing is noted.
SOLUTIONS = "LABKIT_SOLUTIONS"
_TABLES = ("exercises", "predictions", "quizzes", "chapters", "scores")

_lock = threading.RLock()
_quiet = threading.local()
_notices: list[str] = []
#: What could not be written, kept for as long as the process runs.
_unwritten: dict[Path, dict[str, Any]] = {}


@dataclasses.dataclass(frozen=True)
class ExerciseState:
    """passed: at least one check passed. attempts: checks of something that was not the stub. hints: levels seen."""

    passed: bool = False
    attempts: int = 0
    hints: int = 0
    solution_seen: bool = False

    @property
    def word(self) -> str:
        """One of passed, tried, open."""
        return "passed" if self.passed else "tried" if self.attempts else "open"


@dataclasses.dataclass(frozen=True)
class Progress:
    """All notes as they are now. Keys are ids: "08.2" for exercises, chapter numbers as "08".

    predictions: {"value", "right" (None: not a matter of right or wrong)}. quizzes: {"choice", "right", "attempts"}.
    scores: rows of the scoreboard, see `labkit.lab.scoreboard`.
    """

    exercises: dict[str, ExerciseState]
    predictions: dict[str, dict[str, Any]]
    quizzes: dict[str, dict[str, Any]]
    chapters: dict[str, dict[str, Any]]
    scores: dict[str, dict[str, Any]]

    def exercise(self, id: str) -> ExerciseState:
        return self.exercises.get(id, ExerciseState())

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def path() -> Path:
    return home() / NAME


def solutions_wanted() -> bool:
    """Whether the course runs solved (LABKIT_SOLUTIONS=1)."""
    return os.environ.get(SOLUTIONS) == "1"


def load() -> Progress:
    """The notes as they are; empty where there are none."""
    with _lock:
        found = _read(path())
    states = {id: _state(entry) for id, entry in found["exercises"].items()}
    return Progress(states, found["predictions"], found["quizzes"], found["chapters"], found["scores"])


def notices() -> tuple[str, ...]:
    """Sentences on what went wrong with the file since the process began."""
    return tuple(_notices)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Inside it this thread notes nothing."""
    before, _quiet.on = getattr(_quiet, "on", False), True
    try:
        yield
    finally:
        _quiet.on = before


def reset() -> None:
    """Forget everything. The file goes; one that was set aside stays."""
    with _lock, _locked(path()):
        _unwritten.pop(path(), None)
        with contextlib.suppress(FileNotFoundError):
            path().unlink()


# --- notes -----------------------------------------------------------------------------------------------------------


def note_exercise(id: str, passed: bool) -> None:
    """A check of an answer that was not the stub."""

    def change(entry: dict[str, Any]) -> None:
        entry["attempts"] = int(entry.get("attempts", 0)) + 1
        if passed and not entry.get("passed"):
            entry["passed"], entry["passed_at"] = True, _now()

    _note("exercises", id, change)


def note_hint(id: str, level: int) -> None:
    """That hints up to `level` (1…3) were shown."""
    _note("exercises", id, lambda entry: entry.update(hints=max(level, int(entry.get("hints", 0)))))


def note_solution(id: str) -> None:
    _note("exercises", id, lambda entry: entry.update(solution_seen=True))


def note_prediction(id: str, value: Any, right: bool | None) -> None:
    """A guess at a gate. `value` must be JSON; right=None where it was not judged. The first guess is kept beside."""

    def change(entry: dict[str, Any]) -> None:
        entry.setdefault("first", {"value": value, "right": right})
        entry.update(value=value, right=right, at=_now())

    _note("predictions", id, change)


def note_quiz(id: str, choice: int, right: bool) -> None:
    """An answer to a question; `choice` is the option's place, from 0."""

    def change(entry: dict[str, Any]) -> None:
        entry.setdefault("first", {"choice": choice, "right": right})
        entry.update(choice=choice, right=right, attempts=int(entry.get("attempts", 0)) + 1)

    _note("quizzes", id, change)


def note_chapter(number: int) -> None:
    """That a chapter was opened; the first time counts."""
    _note("chapters", f"{number:02d}", lambda entry: entry.setdefault("opened", _now()))


def note_score(id: str, row: dict[str, Any]) -> None:
    """A row of the scoreboard in place of the one that was there."""

    def change(entry: dict[str, Any]) -> None:
        entry.clear()
        entry.update(row)

    _note("scores", id, change)


def prediction(id: str) -> dict[str, Any] | None:
    """The latest guess at a gate: {"value", "right", "first", "at"}; None where there is none."""
    return load().predictions.get(id)


# --- the file --------------------------------------------------------------------------------------------------------


def _note(table: str, id: str, change: Callable[[dict[str, Any]], Any]) -> None:
    if solutions_wanted() or getattr(_quiet, "on", False):
        return
    where = path()
    with _lock, _locked(where):
        found = _read(where)
        change(found[table].setdefault(id, {}))
        try:
            json.dumps(found[table][id])
        except (TypeError, ValueError):
            found[table][id] = json.loads(json.dumps(found[table][id], default=str))
        _write(where, found)


def _read(where: Path) -> dict[str, Any]:
    if where in _unwritten:
        return copy.deepcopy(_unwritten[where])
    empty: dict[str, Any] = {"version": VERSION, **{table: {} for table in _TABLES}}
    try:
        text = where.read_text(encoding="utf-8")
    except FileNotFoundError:
        return empty
    except (OSError, UnicodeDecodeError) as error:
        return _set_aside(where, empty, f"{type(error).__name__}")
    try:
        found = json.loads(text)
        if not isinstance(found, dict) or not isinstance(found.get("version"), int):
            return _set_aside(where, empty, "it is not a progress file")
        if found["version"] > VERSION:
            _say(
                f"{where.name} was written by a newer labkit (version {found['version']}, this one reads {VERSION}). "
                "It is left as it is; what you do now is kept until the kernel ends."
            )
            _unwritten[where] = empty
            return copy.deepcopy(empty)
        for table in _TABLES:
            entries = found.setdefault(table, {})
            if not isinstance(entries, dict) or not all(isinstance(e, dict) for e in entries.values()):
                return _set_aside(where, empty, f"its part {table!r} is not a table")
        return found
    except ValueError:
        return _set_aside(where, empty, "it is not JSON")


def _set_aside(where: Path, empty: dict[str, Any], why: str) -> dict[str, Any]:
    for n in range(1, 1000):
        aside = where.with_name(f"{where.stem}.damaged-{n}{where.suffix}")
        if not aside.exists():
            break
    try:
        os.replace(where, aside)
        _say(f"{where.name} could not be read ({why}). It was set aside as {aside.name}, and a new one begun.")
    except OSError:
        _say(f"{where.name} could not be read ({why}), nor moved. What you do now is kept until the kernel ends.")
        _unwritten[where] = empty
    return copy.deepcopy(empty)


def _write(where: Path, found: dict[str, Any]) -> None:
    if where in _unwritten:
        _unwritten[where] = found
        return
    temporary = None
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{where.stem}-", dir=where.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(found, file, ensure_ascii=False, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, where)
    except OSError as error:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        _say(f"Progress cannot be saved ({type(error).__name__}). What you do now is kept until the kernel ends.")
        _unwritten[where] = found


@contextlib.contextmanager
def _locked(where: Path) -> Iterator[None]:
    """Keeps a second process out between reading and writing, where the system can; else the last one wins."""
    try:
        import fcntl

        where.parent.mkdir(parents=True, exist_ok=True)
        file = open(where.with_name(f".{where.stem}.lock"), "w")  # noqa: SIM115
    except (ImportError, OSError):
        yield
        return
    with file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _state(entry: dict[str, Any]) -> ExerciseState:
    return ExerciseState(
        bool(entry.get("passed")), int(entry.get("attempts", 0)), int(entry.get("hints", 0)),
        bool(entry.get("solution_seen")),
    )  # fmt: skip


def _say(sentence: str) -> None:
    if sentence not in _notices:
        _notices.append(sentence)


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
