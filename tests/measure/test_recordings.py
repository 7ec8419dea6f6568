"""Recordings: what comes back is what was stored, and nothing that disagrees with itself is believed."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest

from labkit.measure import recordings
from labkit.measure.provenance import Kind, ProvenanceError, collect
from labkit.measure.recordings import Recording, RecordingError, Row, load, shipped, stored_samples
from labkit.measure.stats import ratio

PROVENANCE = collect("RECORDED", "labkit record", order="ascending", n=50, primed=True, device="cpu").replace(
    gpu="NVIDIA H200", commit="0123456789abcdef0123456789abcdef01234567", dirty=False
)


def row(batch: int = 1, mode: str = "NONE", *, size: int | None = None, seed: int = 0, n: int = 50, **changes) -> Row:
    samples = stored_samples(np.random.default_rng([seed, batch, *mode.encode()]).normal(2 + batch / 8, 0.1, n))
    p10, p50, p90 = np.percentile(samples, (10, 50, 90))
    values = dict(
        model="smollm2-135m", dtype="bfloat16", backend="TRITON_ATTN", backend_version="3.6.0",
        requested_mode="FULL_DECODE_ONLY" if mode == "FULL" else mode, mode=mode, size=size or batch, batch=batch,
        context=512, query_len=1, compile="NONE", primed=True, p10_ms=float(p10), p50_ms=float(p50), p90_ms=float(p90),
        n=n, samples_ms=samples, host_us=1500.0, device_us=700.0, launches=412 if mode == "NONE" else 4,
        graph_launches=int(mode == "FULL"), launch_cost_us={"torch": 11.2}, gb_s=900.0, floor_ms=0.07, tok_s=500.0,
        peak_mib=400.0, phases_us={"launch": 1100.0, "sample": 400.0}, launches_by_kind={"torch": 412},
    )  # fmt: skip
    return Row(**{**values, **changes})


def recording(*rows: Row) -> Recording:
    return Recording(PROVENANCE, rows or (row(1), row(8), row(1, "FULL"), row(8, "FULL"), row(16, "FULL")))


def test_a_recording_survives_its_file(tmp_path: Path) -> None:
    stored = recording()
    path = stored.save(tmp_path / "h200.json.gz")
    assert load(path) == stored
    assert path.read_bytes() == stored.save(tmp_path / "again.json.gz").read_bytes()
    plain = tmp_path / "plain.json"
    plain.write_bytes(gzip.decompress(path.read_bytes()))
    assert load(plain) == stored
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again.json.gz", "h200.json.gz", "plain.json"]


def test_the_object_has_the_promised_shape() -> None:
    data = recording().as_dict()
    assert list(data) == ["schema", "provenance", "rows"]
    promised = """model dtype backend backend_version requested_mode mode size batch context query_len compile primed
        p10_ms p50_ms p90_ms n samples_ms host_us device_us launches graph_launches launch_cost_us gb_s floor_ms tok_s
        peak_mib"""
    assert list(data["rows"][0])[: len(promised.split())] == promised.split()
    json.dumps(data, allow_nan=False)


def test_live_rows_become_a_recording_when_stored(tmp_path: Path) -> None:
    live = Recording(PROVENANCE.replace(kind=Kind.LIVE), (row(1),))
    assert load(live.save(tmp_path / "x.json.gz")).provenance.kind is Kind.RECORDED


def edited(change) -> bytes:
    data = recording().as_dict()
    change(data)
    return gzip.compress(json.dumps(data).encode())


def setter(*path, value):
    def change(data):
        for key in path[:-1]:
            data = data[key]
        if value is ...:
            del data[path[-1]]
        else:
            data[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (setter("schema", value=3), "x.json.gz: has schema 3, which is newer than this version of labkit knows (2)"),
        (setter("schema", value=0), "has schema 0"),
        (setter("schema", value=True), "has schema True"),
        (setter("table", value="attention"), "is a table of 'attention', not of steps"),
        (setter("rows", 0, "rounds", value=7), "row 0: says 7 equal rounds of 50 samples"),
        (setter("rows", 0, "rounds", value=0), "row 0: says 0 equal rounds"),
        (setter("captures", value=[{"model": "m"}]), "captures 0: has no 'backend'"),
        (setter("schema", value=...), "has schema None"),
        (setter("rows", value={}), "no list of rows"),
        (setter("provenance", value=...), "has no provenance"),
        (setter("rows", 1, "p50_ms", value=9.0), "row 1: says p50_ms=9.0 and its samples give"),
        (setter("rows", 0, "p10_ms", value=0.001), "row 0: says p10_ms=0.001"),
        (setter("rows", 0, "p90_ms", value=99.0), "row 0: says p90_ms=99.0"),
        (setter("rows", 0, "samples_ms", 3, value=40.0), "row 0: says p"),
        (setter("rows", 0, "samples_ms", 3, value=-1.0), "not a time above zero"),
        (setter("rows", 0, "n", value=51), "says n=51 and holds 50 samples"),
        (setter("rows", 0, "launches", value="412"), "launches='412' is not of type int | None"),
        (setter("rows", 0, "primed", value=1), "primed=1 is not of type bool"),
        (setter("rows", 0, "batch", value=True), "batch=True is not of type int"),
        (setter("rows", 0, "launch_cost_us", value={"torch": "11"}), "launch_cost_us="),
        (setter("rows", 0, "tok_s", value=...), "row 0: has no 'tok_s'"),
        (setter("rows", 0, "tok", value=1.0), "unknown field 'tok'. Did you mean 'tok_s'?"),
        (setter("rows", 4, "size", value=8), "row 4: ran 16 × 1 tokens in a size of 8"),
        (setter("rows", 0, "chunk", value=8), "row 0: ran 1 × 1 tokens and a chunk of 8 in a size of 1"),
        (setter("refused", value={}), "'refused' that is no list"),
        (setter("refused", value=[{"model": "m"}]), "refused 0: has no 'backend'"),
        (setter("setups", value=[{"model": 1}]), "setups 0: model=1 is not of type str"),
        (setter("rows", 0, value=[]), "row 0: is list, not an object"),
        (setter("provenance", "n", value=60), "says n=60 and has a row with fewer samples"),
    ],
)
def test_a_file_that_disagrees_with_itself_is_refused(tmp_path: Path, change, says: str) -> None:
    path = tmp_path / "x.json.gz"
    path.write_bytes(edited(change))
    with pytest.raises((RecordingError, ProvenanceError), match=re.escape(says)):
        load(path)


def test_a_kind_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json.gz"
    path.write_bytes(edited(setter("provenance", "kind", value="GUESSED")))
    with pytest.raises(ProvenanceError, match="GUESSED"):
        load(path)


@pytest.mark.parametrize("cut", [0, 1, 10, 400, -1, -9])
def test_a_damaged_file_is_refused_wherever_it_breaks(tmp_path: Path, cut: int) -> None:
    path = recording().save(tmp_path / "x.json.gz")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(RecordingError, match=r"x\.json\.gz: is damaged"):
        load(path)


def test_flipped_bytes_are_noticed(tmp_path: Path) -> None:
    whole = recording().save(tmp_path / "x.json.gz").read_bytes()
    rng = np.random.default_rng(1)
    for at in rng.integers(10, len(whole), 20):
        path = tmp_path / "flipped.json.gz"
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        with pytest.raises((RecordingError, ProvenanceError)):
            load(path)


def test_other_files_and_missing_ones_are_refused(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(RecordingError, match="holds list, not an object"):
        load(tmp_path / "list.json")
    with pytest.raises(RecordingError, match=r"gone\.json\.gz: there is no such file"):
        load(tmp_path / "gone.json.gz")
    with pytest.raises(RecordingError, match="cannot be"):
        load(tmp_path)
    with pytest.raises(RecordingError, match="cannot be written"):
        recording().save(tmp_path / "no" / "folder.json.gz")


def test_a_recording_needs_fifty_samples_and_distinct_rows(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="has 49 samples, a recording needs 50"):
        recording(row(1, n=49)).save(tmp_path / "x.json.gz")
    with pytest.raises(RecordingError, match="row 1: repeats"):
        recording(row(1), row(1, seed=9)).save(tmp_path / "x.json.gz")
    assert list(tmp_path.iterdir()) == []


def test_rows_are_found_by_exactly_what_was_asked() -> None:
    found = recording()
    ask = dict(model="smollm2-135m", backend="TRITON_ATTN", batch=8, context=512)
    assert found.find(**ask, requested_mode="NONE") is found.rows[1]
    assert found.find(**ask, requested_mode="FULL_DECODE_ONLY") is found.rows[3]
    for wrong in ({"batch": 7}, {"context": 513}, {"model": "other"}, {"backend": "TORCH_SDPA"}):
        assert found.find(**{**ask, **wrong}, requested_mode="NONE") is None
    assert found.find(**ask, requested_mode="PIECEWISE") is None


def test_a_decode_of_another_full_mode_is_answered_by_the_full_graph_that_was_recorded() -> None:
    found = recording()
    ask = dict(model="smollm2-135m", backend="TRITON_ATTN", batch=8, context=512)
    for mode in ("FULL", "FULL_AND_PIECEWISE"):
        assert found.find(**ask, requested_mode=mode) is found.rows[3]
    own = recording(*found.rows, row(8, "FULL", seed=4, requested_mode="FULL"))
    assert own.find(**ask, requested_mode="FULL") is own.rows[-1]
    padded = recording(row(8, "FULL", size=16))
    assert padded.find(**ask, requested_mode="FULL") is None


def test_values_and_snapping() -> None:
    found = recording()
    assert found.values("batch") == [1, 8, 16]
    assert found.values("batch", mode="NONE") == [1, 8]
    assert [found.snap("batch", b) for b in (0, 4, 5, 12, 13, 999)] == [1, 1, 8, 8, 16, 16]
    assert found.snap("batch", 999, requested_mode="NONE") == 8
    with pytest.raises(RecordingError, match="Did you mean 'batch'"):
        found.values("bach")
    with pytest.raises(RecordingError, match="nothing is recorded"):
        found.snap("batch", 1, model="other")


@pytest.mark.parametrize(
    ("batch", "sizes", "size", "mode", "at", "says"),
    [
        (5, [1, 8, 16], 8, "FULL", 3, "runs in the graph of size 8, 3 of it padding"),
        (5, [16, 16, 1], 16, "FULL", 4, "size 16, 11 of it padding"),
        (8, [8], 8, "FULL", 3, "runs in the graph of size 8"),
        (8, [1], 8, "NONE", 1, "above the largest size 1: it runs eagerly"),
        (9, [8], 9, "NONE", None, "NONE was not recorded at this batch"),
        (2, [4], 4, "FULL", None, "size 4, 2 of it padding, and that size was not recorded"),
        (1, [], 1, "NONE", 0, "above the largest size 0"),
    ],
)
def test_an_edited_size_list_is_answered_by_the_padded_size(batch, sizes, size, mode, at, says) -> None:
    stored = recording()
    found = stored.padded(model="smollm2-135m", backend="TRITON_ATTN", batch=batch, context=512, sizes=sizes)
    assert (found.size, found.mode) == (size, mode)
    assert found.row is (None if at is None else stored.rows[at])
    assert says in found.note


def test_recorded_and_live_rows_never_meet_in_a_ratio() -> None:
    a, b = row(1), row(1, "FULL")
    assert ratio(a.measurement(Kind.RECORDED), b.measurement(Kind.RECORDED)).value == pytest.approx(a.p50_ms / b.p50_ms)
    with pytest.raises(ProvenanceError, match="RECORDED .* LIVE"):
        ratio(a.measurement(Kind.RECORDED), b.measurement(Kind.LIVE))


def test_host_time_outside_the_forward_leaves_the_launch_phase_out() -> None:
    assert row(1).host_outside_us == pytest.approx(400.0)


def test_what_is_shipped_loads_and_names_its_machine_and_commit() -> None:
    for stored in shipped():
        assert stored.provenance.kind is Kind.RECORDED
        assert stored.provenance.gpu and stored.provenance.driver
        assert re.fullmatch(r"[0-9a-f]{40}", stored.provenance.commit or "")
        assert all(r.n >= recordings.MIN_SAMPLES for r in stored.rows)


def test_shipped_reads_every_file_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "SHIPPED", tmp_path)
    recording().save(tmp_path / "b.json.gz")
    recording(row(2)).save(tmp_path / "a.json.gz")
    shipped.cache_clear()
    try:
        assert [r.rows[0].batch for r in shipped()] == [2, 1]
        monkeypatch.setattr(recordings, "SHIPPED", tmp_path / "none")
        shipped.cache_clear()
        assert shipped() == ()
    finally:
        shipped.cache_clear()
