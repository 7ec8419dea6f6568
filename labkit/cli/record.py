"""`labkit record`: have a suite measured into a file, go on where it stopped, say what is left. Measures nothing."""

from __future__ import annotations

import argparse
import importlib
import inspect
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.cli.answer import Answer, Console
from labkit.cli.measure import attention_table, writable
from labkit.cli.options import Parser, UsageError, one_of, whole, words
from labkit.cli.step_tables import capture_table, step_table
from labkit.errors import LabkitError

#: Suites that are tables of their own kind → module and function that record them. It is called as `function(out)` with
#: those of device, progress and should_stop that it takes; it goes on with a file that is there, and returns something
#: with `as_dict()` and `rows`.
TABLES: dict[str, tuple[str, str]] = {
    "attention": ("labkit.bench.recorder", "record_attention"),
    "timelines": ("labkit.bench.timeline", "record_timelines"),
    "requests": ("labkit.bench.requests", "record_requests"),
    "beside": ("labkit.bench.beside", "record_beside"),
}
#: All suites of the course, one after another, one file each.
COURSE = "course"


def record_options(parser: Parser) -> None:
    from labkit.bench.suites import SUITES

    names = (*SUITES, *TABLES, COURSE)
    parser.add_argument("--suite", type=one_of(names), default="slice", metavar="NAME", help=f"one of "
                        f"{', '.join(names)}; {COURSE} is all that the course shows (default slice)")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to (default SUITE.json.gz); resumed if it "
                        f"exists. A folder for {COURSE}")  # fmt: skip
    parser.add_argument("--minutes", type=whole(1), metavar="N", help="stop after the row under way when so many "
                        "minutes are over; the same command goes on")  # fmt: skip
    parser.add_argument("--models", type=words, metavar="NAME,…", help="of the suite's models, only these")
    parser.add_argument("--backends", type=words, metavar="NAME,…", help="of the suite's backends, only these; for a "
                        "suite that has several")  # fmt: skip
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu or cuda")


class Deadline:
    """Says when the time is over, and remembers that it said so."""

    def __init__(self, minutes: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._end = clock, None if minutes is None else clock() + minutes * 60
        self.stopped = False

    def __call__(self) -> bool:
        self.stopped = self.stopped or (self._end is not None and self._clock() >= self._end)
        return self.stopped


def record(args: argparse.Namespace, console: Console) -> Answer:
    """Measure a suite into a file, or all suites of the course into a folder."""
    deadline = Deadline(getattr(args, "minutes", None))
    only = {key: getattr(args, key) for key in ("models", "backends") if hasattr(args, key)}
    if args.suite == COURSE:
        if only:
            raise UsageError("labkit record --suite course", "it is every suite whole", "Name one to record a part.")
        return _course(args, console, deadline)
    out = getattr(args, "out", Path(f"{args.suite}.json.gz"))
    if out.is_dir():
        raise UsageError(f"file {str(out)!r}", "it is a folder", f"Name a file in it, such as {args.suite}.json.gz.")
    writable(out)
    recording, left = _record(args.suite, out, args.device, console, deadline, only)
    text = _table(args.suite, recording)
    return Answer({**recording.as_dict(), "left": left}, "\n\n".join(filter(None, [text, _left(args.suite, left)])))


def _course(args: argparse.Namespace, console: Console, deadline: Deadline) -> Answer:
    from labkit.bench.suites import COURSE_SUITES, SUITES

    folder = getattr(args, "out", Path("."))
    if not folder.is_dir():
        raise UsageError(f"folder {str(folder)!r}", "it does not exist", "Make it, or name another.")
    done: list[dict[str, Any]] = []
    for name in COURSE_SUITES:
        if name not in SUITES and name not in TABLES:
            console.note(f"{name}: this version cannot record it.")
            continue
        out = folder / f"{name}.json.gz"
        if deadline():
            done.append({"suite": name, "file": out.name, "rows": None, "left": None, "kib": None})
            continue
        try:
            recording, left = _record(name, out, args.device, console, deadline)
        except LabkitError as error:  # what this machine cannot record must not keep the others from it
            done.append({"suite": name, "file": None, "rows": None, "left": None, "kib": None, "error": str(error)})
            continue
        kib = round(out.stat().st_size / 1024, 1)
        done.append({"suite": name, "file": out.name, "rows": len(recording.rows), "left": left, "kib": kib})
    failed = [one for one in done if "error" in one]
    done = [one for one in done if "error" not in one]
    lines = [
        f"{one['file']}: " + (f"{one['rows']} rows, {one['kib']:.0f} KiB" if one["rows"] is not None else "not begun")
        + (f"; {one['left']} left" if one["left"] else "")
        for one in done
    ]  # fmt: skip
    unfinished = any(one["left"] or one["rows"] is None for one in done)
    lines += [f"{one['suite']} was not recorded: {one['error']}" for one in failed]
    lines += ["The same command goes on."] if unfinished else [_ADD]
    return Answer({"suites": [*done, *failed], "finished": not unfinished}, "\n".join(lines), ok=not failed)


def _record(
    name: str,
    out: Path,
    device: str,
    console: Console,
    deadline: Deadline,
    only: Mapping[str, Sequence[str]] = types.MappingProxyType({}),
) -> tuple[Any, int]:
    """One suite into one file: the recording, and how many rows are left (1 where a table stopped early).

    only: names of "models" or "backends" to leave the others out.
    """
    from labkit.bench import missing
    from labkit.bench import record as run
    from labkit.bench.suites import find_suite, narrowed

    console.note(f"{name}: into {out.name}")
    if name in TABLES:
        module, function = TABLES[name]
        run_table = getattr(importlib.import_module(module), function)
        offered: dict[str, Any] = {"device": device, "progress": console.progress, "should_stop": deadline}
        taken = inspect.signature(run_table).parameters
        offered.update(only)
        for key in only:
            if key not in taken:
                raise UsageError(f"labkit record --{key}", f"the suite {name} has no {key} to choose from", "Drop it.")
        recording = run_table(out, **{key: value for key, value in offered.items() if key in taken})
        left = int(deadline.stopped)
    else:
        suite = narrowed(find_suite(name), only)
        recording = run(suite, out, device=device, progress=console.progress, should_stop=deadline)
        left = missing(suite, recording)
    if not out.exists():  # time was over before the first row
        raise LabkitError(f"recording {name}", "it was stopped before anything was measured", "Let it run longer.")
    console.note(f"{len(recording.rows)} rows in {out.name} ({out.stat().st_size / 1024:.0f} KiB)")
    return recording, left


_ADD = "`labkit recordings add FILE` puts a file among those that the panels show."


def _left(suite: str, left: int) -> str:
    return f"Time is over, {left} rows of {suite} are left: the same command goes on." if left else _ADD


def _table(suite: str, recording: Any) -> str:
    if suite in TABLES:
        return _TEXTS[suite](recording) if recording.rows else "0 rows"
    return "\n\n".join(filter(None, [step_table(recording) if recording.rows else "", capture_table(recording)]))


def _request_text(recording: Any) -> str:
    from labkit.cli.requests import request_table

    return request_table(recording, recording.pairs(base="whole"))


def _beside_text(recording: Any) -> str:
    from labkit.cli.compare import WHAT_A_STEP_IS, beside_table
    from labkit.measure.beside import beside_pairs

    return beside_table(recording, [*(pair.sentence for pair in beside_pairs(recording)), WHAT_A_STEP_IS])


def _timeline_text(recording: Any) -> str:
    from labkit.cli.timeline import recording_text

    return recording_text(recording)


#: The text of every kind of TABLES, as the command prints it that measures without a suite.
_TEXTS: dict[str, Callable[[Any], str]] = {
    "attention": attention_table, "timelines": _timeline_text, "requests": _request_text, "beside": _beside_text,
}  # fmt: skip
