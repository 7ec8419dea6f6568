"""Two machines side by side: only what both have, ratios with their interval, and always said what is compared."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from labkit import home
from labkit.cli.entry import main
from labkit.measure.machines import SAYS, diff
from labkit.measure.provenance import Kind, ProvenanceError
from labkit.measure.recordings import Recording
from tests.measure.test_recordings import PROVENANCE, recording, row


def slower(one, times: float = 2.0, **changes):
    samples = tuple(round(s * times, 4) for s in one.samples_ms)
    return dataclasses.replace(
        one, samples_ms=samples, p10_ms=one.p10_ms * times, p50_ms=one.p50_ms * times, p90_ms=one.p90_ms * times,
        **changes,
    )  # fmt: skip


def other(*rows, **changes) -> Recording:
    packages = {**PROVENANCE.packages, "torch": "2.12.0"}
    return Recording(PROVENANCE.replace(gpu="NVIDIA T4", packages=packages, **changes), rows)


def test_rows_of_one_configuration_stand_side_by_side() -> None:
    mine = recording()
    found = diff(mine, other(slower(mine.rows[3]), slower(mine.rows[0], 1.001), row(64)))
    assert [pair.first for pair in found.pairs] == [mine.rows[0], mine.rows[3]], "in the order of the first"
    assert (found.only_first, found.only_second) == (3, 1)
    same, twice = found.pairs
    assert not same.ratio.shown and twice.ratio.shown and twice.ratio.value == pytest.approx(2.0, rel=1e-3)
    assert twice.ratio.kind is Kind.RECORDED
    assert SAYS in found.sentence and "NVIDIA T4 takes 2.00× as long as on NVIDIA H200" in found.sentence
    assert any("torch" in one and "2.12.0" in one for one in found.differs)
    assert found.as_dict()["compares"] == "machines"


def test_what_differs_besides_the_machine_is_said_at_its_row() -> None:
    mine = recording(row(8, "FULL"))
    found = diff(mine, other(slower(mine.rows[0], backend_version="3.7.0", dtype="float16")))
    assert found.pairs[0].notes == ("backend_version 3.6.0 and 3.7.0", "dtype bfloat16 and float16")


def test_nothing_in_common_is_said_and_kinds_are_not_mixed() -> None:
    assert "no configuration in common" in diff(recording(row(1)), other(row(2))).sentence
    live = Recording(PROVENANCE.replace(kind=Kind.LIVE), (row(1),))
    for a, b in ((live, recording()), (recording(), live)):
        with pytest.raises(ProvenanceError, match="LIVE, not RECORDED"):
            diff(a, b)


def test_one_gpu_twice_is_told_apart_by_the_day_or_as_a_and_b() -> None:
    later = dataclasses.replace(recording(), provenance=PROVENANCE.replace(date="2031-01-02T00:00:00Z"))
    assert diff(recording(), later).names == (f"NVIDIA H200, {PROVENANCE.date[:10]}", "NVIDIA H200, 2031-01-02")
    assert diff(recording(), recording()).names == (
        f"NVIDIA H200, {PROVENANCE.date[:10]} (A)",
        f"NVIDIA H200, {PROVENANCE.date[:10]} (B)",
    )


# --- the commands --------------------------------------------------------------------------------------------------


def test_the_commands_list_add_and_compare(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(home.VARIABLE, str(tmp_path / "home"))
    mine = recording()
    a, b = mine.save(tmp_path / "a.json.gz"), other(slower(mine.rows[0])).save(tmp_path / "b.json.gz")
    assert main(["recordings", "add", str(a), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "file": "a.json.gz", "origin": "yours: a.json.gz", "table": "steps", "rows": 5
    }  # fmt: skip
    (tmp_path / "home" / "recordings" / "bad.json").write_text("{")
    assert main(["recordings"]) == 0
    out = capsys.readouterr().out
    assert "a.json.gz" in out and "h200.json.gz" in out and "bad.json was passed over" in out
    assert main(["recordings", "diff", "a", str(b), "--html", str(tmp_path / "x.html"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["compares"] == "machines" and len(data["pairs"]) == 1
    page = (tmp_path / "x.html").read_text()
    assert SAYS in page and "NVIDIA T4" in page and "https://cdn" not in page.split("<script")[0]
    assert main(["recordings", "diff", "a", str(b)]) == 0
    assert "Not on both: 4 rows of A, 0 of B." in capsys.readouterr().out
    assert main(["recordings", "diff", "a", "nowhere"]) == 1
    err = capsys.readouterr().err
    assert "there is none of that name" in err and ", h200, " in err and ", a." in err
    assert main(["recordings", "add", str(tmp_path / "home" / "recordings" / "bad.json")]) == 1
    assert main(["recordings", "add"]) == 2
    assert "file" in capsys.readouterr().err.lower()
