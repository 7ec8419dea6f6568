"""A learner's notes: nothing is lost by a second notebook, a damaged file or a folder that cannot be written to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest

from labkit.cli.entry import main
from labkit.lab import progress
from labkit.lab.chapter import chapters
from labkit.lab.items import ITEMS
from labkit.lab.scoreboard import Score, note, note_run, scoreboard, scores
from labkit.measure.provenance import ProvenanceError
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("LABKIT_SOLUTIONS", raising=False)
    monkeypatch.setattr(progress, "_notices", [])
    monkeypatch.setattr(progress, "_unwritten", {})


def test_nothing_is_written_before_something_is_noted():
    assert progress.load().as_dict() == {
        "exercises": {}, "predictions": {}, "quizzes": {}, "chapters": {}, "scores": {},
    }  # fmt: skip
    assert not progress.path().parent.exists()


def test_notes_come_back():
    progress.note_exercise("08.2", False)
    progress.note_exercise("08.2", True)
    progress.note_exercise("08.2", False)
    progress.note_hint("08.2", 2)
    progress.note_hint("08.2", 1)
    progress.note_prediction("08.pad", 16, None)
    progress.note_prediction("08.pad", 13, False)
    progress.note_quiz("08.recap", 2, False)
    progress.note_quiz("08.recap", 0, True)
    progress.note_chapter(8)
    found = progress.load()
    state = found.exercise("08.2")
    assert (state.passed, state.attempts, state.hints, state.solution_seen, state.word) == (True, 3, 2, False, "passed")
    assert found.exercise("01.1").word == "open"
    guess = progress.prediction("08.pad")
    assert guess["value"] == 13 and guess["right"] is False and guess["first"] == {"value": 16, "right": None}
    quiz = found.quizzes["08.recap"]
    assert quiz["right"] and quiz["attempts"] == 2 and quiz["first"] == {"choice": 2, "right": False}
    assert list(found.chapters) == ["08"]
    assert [p.name for p in progress.path().parent.iterdir() if not p.name.startswith(".")] == ["progress.json"]


def test_two_notebooks_lose_nothing():
    """Threads here, processes beside them, all noting at once."""
    code = "from labkit.lab import progress\nfor i in range(15): progress.note_exercise('02.1', False)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    others = [subprocess.Popen([sys.executable, "-c", code], env=env) for _ in range(2)]
    threads = [
        threading.Thread(target=lambda: [progress.note_exercise("02.1", False) for _ in range(10)]) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [other.wait() for other in others] == [0, 0]
    assert progress.load().exercise("02.1").attempts == 60


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"version": "one"}', '{"version": 1, "exercises": []}', '{"version": 1, "quizzes": {"a": 3}}', "\x00"],
)
def test_a_damaged_file_is_set_aside_with_a_sentence(text):
    progress.path().parent.mkdir(parents=True)
    for n in (1, 2):
        progress.path().write_text(text)
        progress.note_exercise("01.1", True)
        assert progress.load().exercise("01.1").passed
        aside = progress.path().with_name(f"progress.damaged-{n}.json")
        assert aside.read_text() == text and any(aside.name in sentence for sentence in progress.notices())


def test_a_newer_file_is_left_as_it_is():
    progress.path().parent.mkdir(parents=True)
    text = json.dumps({"version": 99, "exercises": {"01.1": {"passed": True}}})
    progress.path().write_text(text)
    progress.note_exercise("02.1", True)
    assert progress.load().exercise("02.1").passed and progress.path().read_text() == text
    assert "newer labkit (version 99" in progress.notices()[0]


def test_a_folder_that_cannot_be_written_to_costs_the_notes_only(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("LABKIT_HOME", str(blocked / "home"))
    progress.note_exercise("01.1", True)
    progress.note_exercise("01.2", True)
    assert progress.load().exercise("01.1").passed and progress.load().exercise("01.2").passed
    assert len(progress.notices()) == 1


def test_values_that_json_does_not_know_are_kept_as_text():
    progress.note_prediction("01.a", {1, 2}.__class__, None)
    assert progress.prediction("01.a")["value"] == "<class 'set'>"
    progress.note_prediction("01.b", float("inf"), None)
    assert progress.load().predictions["01.b"]


def test_a_solved_run_notes_nothing(monkeypatch):
    monkeypatch.setenv("LABKIT_SOLUTIONS", "1")
    progress.note_exercise("01.1", True)
    assert not progress.path().exists()


# --- the scoreboard --------------------------------------------------------------------------------------------------


def test_a_row_of_one_origin_grows_and_another_origin_replaces_it():
    note(Score("eager, batch 1", "LIVE", "a GPU", launches=430, step_ms=5.25))
    note(Score("eager, batch 1", "LIVE", "a GPU", busy_pct=31.4))
    (row,) = scores()
    assert (row.launches, row.step_ms, row.busy_pct, row.mib) == (430, 5.25, 31.4, None)
    note(Score("eager, batch 1", "RECORDED", "NVIDIA H200", step_ms=4.5))
    (row,) = scores()
    assert (row.kind, row.launches, row.step_ms) == ("RECORDED", None, 4.5)
    card = scoreboard("eager, batch 1")
    assert repr(card) == "scoreboard: 1 row" and "RECORDED · NVIDIA H200" in card.html and "this chapter" in card.html
    assert "ms/step" in card.html and ">4.5<" in card.html


def test_a_run_of_a_panel_becomes_a_row():
    from types import SimpleNamespace as Made

    run = Made(row=Made(launches=9, p50_ms=1.5), provenance=Made(kind="SIMULATED", device="a model"))
    note_run("FULL, batch 1", run, startup_s=2.0)
    assert scores() == (Score("FULL, batch 1", "SIMULATED", "a model", 9, None, 1.5, None, 2.0),)


def test_a_row_without_origin_is_refused():
    with pytest.raises(ProvenanceError, match="LIVE, RECORDED or SIMULATED"):
        Score("row", "GUESSED", "here")
    with pytest.raises(ProvenanceError, match="does not say where"):
        Score("row", "LIVE", "")
    with pytest.raises(ValueError, match="no amount"):
        Score("row", "LIVE", "here", step_ms=-1.0)
    progress.note_score("odd", {"kind": "GUESSED"})
    assert scores() == () and repr(scoreboard()) == "scoreboard: 0 rows"


# --- labkit course ---------------------------------------------------------------------------------------------------


def course(capsys, *words: str) -> tuple[int, str]:
    code = main(["course", *words])
    return code, capsys.readouterr().out


def test_the_status_page_has_every_chapter_and_item(capsys):
    code, out = course(capsys)
    assert code == 0
    assert all(f"{chapter.key} {chapter.title}" in out for chapter in chapters())
    assert all(f"{item.key} " in out for item in ITEMS) and "Next" in out


def test_the_status_page_as_json(capsys):
    progress.note_exercise("00.1", True)
    progress.note_hint("00.1", 1)
    code, out = course(capsys, "--json")
    found = json.loads(out)
    assert code == 0 and len(found["items"]) == 13
    (first,) = [c for c in found["chapters"] if c["number"] == 0]
    assert first["exercises"] == [
        {"id": "00.1", "title": "Rows that nobody uses", "status": "passed", "hints": 1, "solution_seen": False}
    ]
    assert first["opened"] is False and found["next"]
    for item in found["items"]:
        assert item["status"] in ("passed", "tried", "open", "no exercise yet")


def test_reset_forgets_everything(capsys):
    progress.note_exercise("00.1", True)
    code, out = course(capsys, "--reset")
    assert code == 0 and "forgotten" in out and not progress.path().exists()


def test_the_page_says_when_notes_are_damaged(capsys):
    progress.path().parent.mkdir(parents=True)
    progress.path().write_text("{")
    assert "set aside" in course(capsys)[1]


def test_the_page_needs_no_torch():
    code = "import tests.lab.without_torch\nfrom labkit.cli.entry import main\nraise SystemExit(main(['course']))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
