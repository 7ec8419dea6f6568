"""The library: shipped and own recordings in one list, a damaged file never in the way, older files made new."""

from __future__ import annotations

import copy
import dataclasses
import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from labkit import home
from labkit.measure import library, recordings
from labkit.measure.provenance import Kind
from labkit.measure.recordings import SCHEMA, Recording, RecordingError, load
from labkit.measure.storage import check_not_made_up, migrate
from tests.measure.test_recordings import PROVENANCE, recording, row


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(home.VARIABLE, str(tmp_path / "home"))
    return tmp_path / "home" / "recordings"


def test_shipped_and_own_recordings_are_one_list_with_their_origin(tmp_path: Path, own_folder: Path) -> None:
    before = library.library()
    assert before.entries and {one.origin for one in before.entries} == {"ships with labkit"}
    assert before.recordings == recordings.shipped() and not own_folder.exists(), "looking makes no folder"
    added = library.add(recording().save(tmp_path / "mine.json.gz"))
    assert (added.origin, added.table, added.recording) == ("yours: mine.json.gz", "steps", recording())
    after = library.library()
    assert after.entries == (*before.entries, added) and after.problems == ()
    assert after.recordings[-1] == recording()
    assert after.find("mine").recording == recording() == after.find("mine.json.gz").recording
    assert "NVIDIA H200" in added.label and "mine.json.gz (yours)" in added.label
    with pytest.raises(RecordingError, match=r"there is none of that name. There are: h200.*, mine"):
        after.find("other")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is damaged"),
        (b"not json", "is damaged"),
        (b"[]", "holds list, not an object"),
        (b'{"schema": 99}', "has schema 99, which is newer than this version of labkit knows"),
        (b'{"schema": 1, "table": "weather"}', "is a table of 'weather', which this version does not know"),
        (gzip.compress(b'{"schema": 1}', mtime=0)[:-5], "is damaged"),
        (b'{"schema": 1, "table": ["weather"]}', "which this version does not know"),
        (b"[" * 200_000, "is damaged"),
        (b'{"schema": ' + b"1" * 400 + b"}", "is damaged (ValueError: a number of 400 digits)"),
    ],
)
def test_a_damaged_file_of_the_users_is_named_and_passed_over(own_folder: Path, content: bytes, says: str) -> None:
    own_folder.mkdir(parents=True)
    (own_folder / "broken.json.gz").write_bytes(content)
    recording().save(own_folder / "whole.json.gz")
    (own_folder / "notes.txt").write_text("not a recording")
    found = library.library()
    assert [one.name for one in found.entries if not one.is_shipped] == ["whole.json.gz"]
    (problem,) = found.problems
    assert problem.startswith("broken.json.gz was passed over: broken.json.gz") and says in problem
    with pytest.raises(RecordingError, match="broken"):
        library.add(own_folder / "broken.json.gz")


@pytest.mark.parametrize("kind", [Kind.LIVE, Kind.SIMULATED])
def test_only_what_is_recorded_is_among_the_recordings(tmp_path: Path, own_folder: Path, kind: Kind) -> None:
    """Panels and ratios take every number of the library for RECORDED."""
    other = dataclasses.replace(recording(), provenance=PROVENANCE.replace(kind=kind))
    (tmp_path / "x.json").write_text(json.dumps(other.as_dict()))
    with pytest.raises(RecordingError, match=f"are {kind}, not RECORDED"):
        library.add(tmp_path / "x.json")
    own_folder.mkdir(parents=True)
    (tmp_path / "x.json").rename(own_folder / "x.json")
    found = library.library()
    assert all(one.is_shipped for one in found.entries) and "not RECORDED" in found.problems[0]


def test_a_file_is_read_again_when_it_changes(own_folder: Path) -> None:
    own_folder.mkdir(parents=True)
    recording(row(1)).save(own_folder / "a.json.gz")
    assert library.library().recordings[-1].rows == (row(1),)
    recording(row(1), row(2)).save(own_folder / "a.json.gz")
    assert library.library().recordings[-1].rows == (row(1), row(2))
    library.remove("a")
    assert all(one.is_shipped for one in library.library().entries)
    with pytest.raises(RecordingError, match="none of yours has that name"):
        library.remove("h200")


def test_adding_twice_is_one_file_and_another_of_that_name_is_refused(tmp_path: Path, own_folder: Path) -> None:
    path = recording().save(tmp_path / "mine.json.gz")
    library.add(path)
    library.add(path)
    assert [p.name for p in own_folder.iterdir()] == ["mine.json.gz"]
    recording(row(1)).save(path)
    with pytest.raises(RecordingError, match="another recording of that name is yours already"):
        library.add(path)
    with pytest.raises(RecordingError, match="there is no such file"):
        library.add(tmp_path / "gone.json.gz")
    with pytest.raises(RecordingError, match="begins with a dot is never listed"):
        library.add(recording().save(tmp_path / ".mine.json.gz"))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(RecordingError, match="has schema None"):
        library.add(tmp_path / "bad.json")
    assert [p.name for p in own_folder.iterdir()] == ["mine.json.gz"]


def test_a_file_of_another_table_is_read_by_its_own_class(tmp_path: Path) -> None:
    from labkit.measure.attention import AttentionRecording

    path = AttentionRecording(PROVENANCE.replace(n=0), ()).save(tmp_path / "calls.json.gz")
    assert isinstance(library.load_any(path), AttentionRecording)
    assert library.add(path).table == "attention"
    assert library.library().recordings == recordings.shipped(), "a table of calls holds no steps"
    with pytest.raises(RecordingError, match="is a table of 'attention', not of steps"):
        load(path)


# --- schema --------------------------------------------------------------------------------------------------------


def test_a_file_of_the_first_schema_is_made_new_and_nothing_of_it_changes(tmp_path: Path) -> None:
    refused = (recordings.Refusal("m", "FLASHINFER", "NONE", "", "no nvcc"),)
    new = dataclasses.replace(recording(), refused=refused)
    old = new.as_dict()
    old["schema"] = 1
    for one in old["rows"]:
        del one["rounds"]
    del old["rows"][0]["chunk"], old["refused"][0]["batch"], old["refused"][0]["context"]
    kept = copy.deepcopy(old)
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert load(tmp_path / "old.json") == new
    assert Recording.from_dict(old) == new and old == kept, "the caller's object is left alone"
    assert load(load(tmp_path / "old.json").save(tmp_path / "new.json.gz")) == new
    assert json.loads(gzip.decompress((tmp_path / "new.json.gz").read_bytes()))["schema"] == SCHEMA


def test_a_chain_of_steps_runs_in_order_and_stops_where_one_is_missing() -> None:
    steps = {1: lambda d: {**d, "trace": [*d["trace"], 1]}, 2: lambda d: {**d, "trace": [*d["trace"], 2]}}
    assert migrate({"schema": 1, "trace": []}, 3, steps, "x") == {"schema": 3, "trace": [1, 2]}
    assert migrate({"schema": 2, "trace": []}, 3, steps, "x")["trace"] == [2]
    assert migrate({"schema": 3, "trace": []}, 3, steps, "x")["trace"] == []
    with pytest.raises(RecordingError, match="has schema 1, and nothing here reads that"):
        migrate({"schema": 1, "trace": []}, 3, {2: steps[2]}, "x")


def test_what_ships_is_of_a_schema_that_still_loads_and_small() -> None:
    files = sorted(recordings.SHIPPED.rglob("*.json.gz"))
    assert files and sum(path.stat().st_size for path in files) <= 3 * 2**20, "shipped recordings: 3 MiB together"
    for path in files:
        library.load_any(path)
        assert json.loads(gzip.decompress(path.read_bytes()))["schema"] <= SCHEMA


# --- measured, or made up ------------------------------------------------------------------------------------------


def made_up(samples: list[float], **changes):
    values = tuple(round(s, 4) for s in samples)
    p10, p50, p90 = (float(p) for p in np.percentile(values, (10, 50, 90)))
    return row(1, samples_ms=values, n=len(values), p10_ms=p10, p50_ms=p50, p90_ms=p90, **changes)


REAL = list(np.random.default_rng(5).normal(2, 0.1, 60))


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ([2.0] * 60, "row 0: holds 60 equal samples"),
        (sorted(REAL), "row 0: holds 60 samples in sorted order"),
        (sorted(REAL, reverse=True), "row 0: holds 60 samples in sorted order"),
    ],
)
def test_samples_that_nobody_measured_are_refused(tmp_path: Path, samples: list[float], says: str) -> None:
    with pytest.raises(RecordingError, match=says):
        recording(made_up(samples)).save(tmp_path / "x.json.gz")
    data = recording(made_up(samples)).as_dict()
    with pytest.raises(RecordingError, match="these are no measurements"):
        Recording.from_dict(data)
    simulated = dataclasses.replace(recording(made_up(samples)), provenance=PROVENANCE.replace(kind=Kind.SIMULATED))
    assert Recording.from_dict(simulated.as_dict()) == simulated, "a model may well give the same number twice"


def test_two_rows_never_share_their_samples(tmp_path: Path) -> None:
    one = row(1)
    with pytest.raises(RecordingError, match="row 1: holds the samples of row 0"):
        recording(one, dataclasses.replace(one, context=1024)).save(tmp_path / "x.json.gz")


def test_a_swap_of_two_samples_or_one_that_repeats_is_no_order() -> None:
    almost = sorted(REAL)
    almost[3], almost[4] = almost[4], almost[3]
    check_not_made_up([made_up(almost)], "ms", "x")
    check_not_made_up([made_up(sorted(REAL)[:49])], "ms", "x")
    twice = sorted(REAL)
    twice[4] = twice[3]
    check_not_made_up([made_up(twice)], "ms", "x")


# --- why there is no row -------------------------------------------------------------------------------------------


def test_a_point_that_does_not_fit_is_told_and_no_other() -> None:
    refusal = recordings.Refusal
    found = dataclasses.replace(
        recording(),
        refused=(
            refusal("smollm2-135m", "TRITON_ATTN", "NONE", "FULL_DECODE_ONLY", "too long", 256, 7680),
            refusal("smollm2-135m", "TRITON_ATTN", "NONE", "PIECEWISE", "no pieces"),
            refusal("smollm2-135m", "FLASHINFER", "NONE", "", "no nvcc"),
        ),
    )
    ask = dict(model="smollm2-135m", backend="TRITON_ATTN", batch=256, context=7680)
    assert found.why_not(**ask, requested_mode="FULL_DECODE_ONLY") == "too long"
    assert found.why_not(**ask, requested_mode="FULL") == "too long", "the KV that is missing is the same"
    assert found.why_not(**ask, requested_mode="NONE") is None
    assert found.why_not(**{**ask, "batch": 248}, requested_mode="FULL") is None
    assert found.why_not(**{**ask, "context": 512}, requested_mode="FULL") is None
    assert found.why_not(**{**ask, "batch": 1}, requested_mode="PIECEWISE") == "no pieces"
    assert found.why_not(**{**ask, "backend": "FLASHINFER"}, requested_mode="NONE") == "no nvcc"
    assert found.why_not(**ask, compile="VLLM_COMPILE", requested_mode="FULL") is None
    assert Recording.from_dict(found.as_dict()) == found
