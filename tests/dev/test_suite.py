"""`make test`: every part runs, what failed is counted, and nothing that failed is called passed."""

from __future__ import annotations

import pathlib
import re
import sys

import pytest

from labkit.dev import suite

TESTS = """
import pytest
def test_good(): pass
def test_bad(): assert False
@pytest.mark.skip(reason="on purpose")
def test_left_out(): pass
@pytest.fixture
def broken(): raise RuntimeError
def test_error(broken): pass
"""


@pytest.fixture(autouse=True)
def this_python(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(suite, "BIN", pathlib.Path(sys.executable).parent)
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setattr(suite, "CACHE", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take seconds to load


def tool(name: str, code: str) -> suite.Part:
    return suite.Part(name, ["python", "-c", code])


def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *parts: suite.Part) -> tuple[int, str]:
    """Exit status and closing line."""
    monkeypatch.setattr(suite, "parts", lambda jobs: list(parts))
    monkeypatch.setattr(sys, "argv", ["suite.py"])
    code = suite.main()
    return code, capfd.readouterr().out.rstrip().splitlines()[-1]


def test_the_parts_after_a_failure_run_too(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    bad, good = tool("bad", "raise SystemExit(3)"), tool("good", "open('ran', 'w')")
    assert run(monkeypatch, capfd, bad, good) == (1, "1 passed, 1 failed, 0 skipped")
    assert (tmp_path / "ran").exists()


def test_tests_are_counted_one_by_one(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    (tmp_path / "test_four.py").write_text(TESTS)
    part = suite.pytest_part("tests", 1, "-p", "no:cacheprovider", "test_four.py")
    assert run(monkeypatch, capfd, part) == (1, "1 passed, 2 failed, 1 skipped")


@pytest.mark.parametrize("content", ["", "import nothing_of_that_name", "import os; os._exit(0)"])
def test_a_session_without_results_has_failed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path, content: str
) -> None:
    """No tests at all, tests that cannot be imported, and an interpreter that ends quietly in the middle."""
    (tmp_path / "test_none.py").write_text(content)
    part = suite.pytest_part("tests", 1, "-p", "no:cacheprovider", "test_none.py")
    code, line = run(monkeypatch, capfd, part)
    assert code == 1
    assert re.fullmatch(r"0 passed, 1 failed, 0 skipped", line)
