"""What the documents name is there: files, make targets, subcommands."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

from labkit.dev import course_table

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "labkit/README.md")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?\n(.*?)```|`([^`\n]+)`", re.DOTALL)


def text(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def code(document: str) -> list[str]:
    """Every line of a code block and every piece of inline code."""
    return [line.strip() for pair in CODE.findall(text(document)) for line in "\n".join(pair).splitlines()]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.fixture(scope="module")
def subcommands() -> set[str]:
    """What `labkit --help` lists: a name, blanks, a phrase."""
    command = [sys.executable, "-m", "labkit.cli", "--help"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    listed = set(re.findall(r"^  ([a-z]+)\b", answer.stdout, re.MULTILINE))
    assert listed >= {"generate", "bench"}, answer.stdout
    return listed


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_relative_link_resolves(document: str) -> None:
    links = [link for link in LINK.findall(text(document)) if not re.match(r"[a-z]+:|#", link)]
    folder = (ROOT / document).parent
    assert [link for link in links if not (folder / link.split("#")[0]).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_make_target_exists(document: str) -> None:
    named = {word for line in code(document) for word in re.findall(r"\bmake ([a-z][a-z-]*)\b(?!=)", line)}
    assert named <= make_targets()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_subcommand_exists(document: str, subcommands: set[str]) -> None:
    named = {word for line in code(document) for word in re.findall(r"(?:^|/)labkit ([a-z]+)\b", line)}
    assert named <= subcommands


def test_the_readme_names_what_a_newcomer_needs() -> None:
    """The tests above would pass on an empty page."""
    words = " ".join(code("README.md"))
    assert all(f"make {target}" in words for target in ("lab", "test", "test-gpu"))
    assert any(re.search(r"labkit [a-z]", line) for line in code("README.md"))
    assert "notebooks/images/latency_panel.png" in text("README.md")


def test_the_table_of_chapters_is_the_course() -> None:
    assert course_table.filled(text("README.md")) == text("README.md"), "run `make badges`"
    assert course_table.table().count("\n| 0") >= 2 and "00_start_here.ipynb" in text("README.md")


@pytest.mark.parametrize("picture", sorted((ROOT / "notebooks" / "images").glob("*")), ids=lambda path: path.name)
def test_a_picture_is_small_and_shown(picture: pathlib.Path) -> None:
    assert picture.suffix == ".png" and picture.stat().st_size <= 200_000
    assert f"notebooks/images/{picture.name}" in text("README.md")


def test_the_reading_order_names_every_file_of_the_engine() -> None:
    """`labkit/README.md` walks the step line file by file; a new file there needs its line."""
    linked = {(ROOT / "labkit" / link).resolve() for link in LINK.findall(text("labkit/README.md"))}
    rooms = ("attention", "engine", "graphs", "models", "paging", "scheduling")
    files = {path for room in rooms for path in (ROOT / "labkit" / room).glob("*.py") if path.name != "__init__.py"}
    assert {str(path.relative_to(ROOT)) for path in files - linked} == set()
