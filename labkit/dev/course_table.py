"""The table of chapters in README.md, from the course's own list. Refuses to know what a chapter teaches.

python labkit/dev/course_table.py     writes it between its two marks (`make badges` does)
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- chapters: `make badges` writes them -->", "<!-- end of chapters -->"


def table() -> str:
    """Markdown: each chapter with its notebook, minutes, exercises, and in which modes it shows something."""
    if str(ROOT) not in sys.path:  # as a script, before labkit is installed
        sys.path.insert(0, str(ROOT))
    from labkit.lab.chapter import MODES, chapters

    lines = [_row(["", "chapter", "minutes", "exercises", *MODES]), _row(["---"] * (4 + len(MODES)))]
    for one in chapters():
        marks = ["✓" if mode in one.modes else "–" for mode in MODES]
        title = f"[{one.title}](notebooks/{one.notebook})"
        lines.append(_row([one.key, title, str(one.minutes), str(len(one.exercises)), *marks]))
    return "\n".join(lines)


def filled(readme: str) -> str:
    """The text with the table between its marks.

    Raises:
        SystemExit: the marks are not there.
    """
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(readme):
        raise SystemExit(f"labkit: README.md has no {BEGIN} … {END}")
    return pattern.sub(lambda _: f"{BEGIN}\n{table()}\n{END}", readme)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    path = ROOT / "README.md"
    before = path.read_text(encoding="utf-8")
    after = filled(before)
    if after != before:
        path.write_text(after, encoding="utf-8")
        print("badges: README.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
