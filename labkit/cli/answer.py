"""What a command answers with, and the console it may talk to meanwhile. Refuses to know any command."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

#: Seconds between two lines of progress about the same thing in a log file.
QUIET_S = 2.0


@dataclasses.dataclass(frozen=True)
class Answer:
    """The object that `--json` prints, the text that is printed otherwise, and whether the command succeeded."""

    data: dict[str, Any]
    text: str = ""
    ok: bool = True


class Console:
    """Where a command reports while it works: progress to stderr, and text to stdout unless an object is asked for."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._shown, self._last = "", 0.0
        self._is_terminal = sys.stderr.isatty()

    def write(self, text: str) -> None:
        """Text for the reader right now; swallowed when stdout belongs to one JSON object."""
        if not self.as_json and text:
            self.clear()
            sys.stdout.write(text)
            sys.stdout.flush()

    def note(self, text: str) -> None:
        """One line to stderr."""
        self.clear()
        print(text, file=sys.stderr, flush=True)

    def progress(self, stage: str, done: int, total: int, detail: str) -> None:
        """The engine's progress callback: a rewritten line on a terminal, elsewhere one now and then."""
        counter = f" {done}/{total}" if total > 1 else ""
        if self._is_terminal:
            line = f"{stage}{counter} {detail}".rstrip()[:100]
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
            self._shown = line
        elif stage != self._shown or time.monotonic() - self._last >= QUIET_S:
            self._shown, self._last = stage, time.monotonic()
            print(f"{stage}{counter} {detail}".rstrip(), file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the progress line from a terminal."""
        if self._is_terminal and self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = ""


def table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,), indent: str = "") -> str:
    """Aligned columns, the first row being the head; columns in `left` are set to the left, others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def number(value: float | int | None, digits: int = 0) -> str:
    """A number with separated thousands, or a dash; a small one that is not whole keeps two digits."""
    if value is None:
        return "-"
    if 0 < abs(value) < 10 and value != int(value):
        digits = max(digits, 2)
    return f"{value:,.{digits}f}"


def milliseconds(value: float | None) -> str:
    """Milliseconds to about three significant digits, or a dash."""
    if value is None:
        return "-"
    digits = 3 if value < 1 else 2 if value < 100 else 1
    return f"{value:,.{digits}f}"
