"""Attention calls timed beside each other: what is counted, who is refused, what a row and a recording must hold."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from labkit.attention import registry
from labkit.attention.interface import AttentionSpec, Availability
from labkit.attention.sdpa import TorchSDPABackend
from labkit.bench.attention import (
    MIXED,
    AttentionOptions,
    AttentionShape,
    _Case,
    attention_pairs,
    backends_to_time,
    bench_attention,
    bench_attentions,
)
from labkit.bench.recorder import record_attention
from labkit.bench.suites import attention_points
from labkit.cli.entry import main
from labkit.errors import ConfigError
from labkit.measure.attention import (
    AttentionRecording,
    AttentionRow,
    load_attention,
    shipped_attention,
)
from labkit.measure.provenance import Kind, ProvenanceError
from labkit.measure.recordings import RecordingError

HEADS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "dtype": "float32"}
DECODE = AttentionShape.decode(2, 9, **HEADS)
MIX = AttentionShape.mixed(2, 20, 6, **HEADS)
PLAIN, SPLIT = AttentionOptions(), AttentionOptions(split_mixed_batches=True)


class TwoCalls(TorchSDPABackend):
    """TORCH_SDPA with two options that it does not have, and with a library under it."""

    capabilities = dataclasses.replace(
        TorchSDPABackend.capabilities, split_mixed_batches=True, num_splits=True, preferred_block_size=32
    )
    bare = 0

    def bare_call(self, query, key_cache, value_cache, output, metadata, scale):
        def call() -> None:
            type(self).bare += 1
            self.forward(query, key_cache, value_cache, output, metadata, scale=scale)

        return call


class NotInstalled(TorchSDPABackend):
    @classmethod
    def availability(cls) -> Availability:
        return Availability(False, "ModuleNotFoundError: No module named 'flex'")


@pytest.fixture
def two_calls(monkeypatch: pytest.MonkeyPatch) -> type[TwoCalls]:
    monkeypatch.setattr(registry, "load", lambda name: TwoCalls if name == "TORCH_SDPA" else NotInstalled)
    monkeypatch.setattr(registry, "BACKENDS", {"TORCH_SDPA": "", "FLEX_ATTENTION": ""})
    TwoCalls.bare = 0
    return TwoCalls


# --- what is counted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lens", [((1, 1), (7, 3)), ((5,), (5,)), ((2, 3, 1), (6, 3, 4))])
def test_operations_are_counted_pair_by_pair(lens) -> None:
    shape = AttentionShape(*lens, **HEADS)
    pairs = sum(1 for q, kv in zip(*lens, strict=True) for i in range(kv - q, kv) for key in range(kv) if key <= i)
    assert shape.flops == 4 * 16 * 4 * pairs


def test_kinds_of_batches() -> None:
    assert (DECODE.kind, MIX.kind, AttentionShape.prefill(8, 10).kind) == ("decode", "mixed", "prefill")
    assert AttentionShape.prefill(8, 1024).flops == 4 * 128 * 32 * 8 * 1024 * 1025 // 2
    assert MIX.query_lens == (1, 1, 6) and MIX.kv_lens == (20, 20, 20)
    lens = [q for q, _ in MIXED]
    assert lens == sorted(lens, key=lambda n: n != 1), "decodes first, so that two calls are possible"


def test_pages_follow_the_backend_unless_they_are_set(two_calls) -> None:
    (row, _) = bench_attention("TORCH_SDPA", DECODE, device="cpu", samples=2)
    assert row.block_size == 32
    (row, _) = bench_attention("TORCH_SDPA", dataclasses.replace(DECODE, block_size=8), device="cpu", samples=2)
    assert row.block_size == 8


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_caches_are_views_of_one_tensor_in_either_layout(layout: str) -> None:
    import torch

    spec = AttentionSpec(4, 2, 16, "float32", 16)
    case = _Case(TorchSDPABackend(spec, torch.device("cpu")), MIX, torch.device("cpu"), 4, 0, layout)
    keys, values = case.caches[0]
    assert keys.shape == values.shape == (MIX.num_blocks + 1, 16, 2, 16)
    assert keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
    assert (keys.stride(1) < keys.stride(2)) == (layout == "HND") and keys.stride(-1) == 1


def test_rows_carry_what_was_asked_and_what_ran(two_calls) -> None:
    options = AttentionOptions(num_splits=4)
    rows = bench_attention("TORCH_SDPA", MIX, options, device="cpu", samples=3)
    for row in rows:
        assert (row.num_splits_asked, row.num_splits, row.call) == (4, 1, "labkit"), "it says 4 and does not split"
        assert row.tflop_s == pytest.approx(MIX.flops / statistics.median(row.samples_us) / 1e6, abs=6e-4)
        assert row.name == "TORCH_SDPA, 4 splits" and row.prepare_us > 0
    assert AttentionRow.from_dict(json.loads(json.dumps(rows[0].as_dict()))) == rows[0]


def test_the_librarys_own_call_has_rows_of_its_own(two_calls) -> None:
    rows = bench_attention("TORCH_SDPA", DECODE, device="cpu", samples=3, bare=True)
    assert [(r.call, r.kv) for r in rows] == [
        ("labkit", "warm"), ("labkit", "rotated"), ("bare", "warm"), ("bare", "rotated"),
    ]  # fmt: skip
    # Each of 3 samples, 2 rounds of warm-up and the check calls every set once: 1 warm, 4 rotated.
    assert two_calls.bare == (3 + 2 + 1) * (1 + 4) and rows[2].prepare_us == 0
    assert {r.call for r in bench_attention("TORCH_SDPA", DECODE, device="cpu", samples=2)} == {"labkit"}


# --- several backends ------------------------------------------------------------------------------------------------


def test_who_cannot_serve_is_listed_with_reasons_and_the_others_go_on(two_calls) -> None:
    points = [(DECODE, PLAIN), (MIX, PLAIN), (MIX, SPLIT), (DECODE, AttentionOptions(batch_invariant=True))]
    recording = bench_attentions(["FLEX_ATTENTION", "TORCH_SDPA"], points, device="cpu", samples=2, bare=False)
    assert [(r.kind, r.split_mixed_batches) for r in recording.rows if r.kv == "rotated"] == [
        ("decode", False), ("mixed", False), ("mixed", True),
    ]  # fmt: skip
    assert "No module named" in recording.refused["FLEX_ATTENTION"]
    assert "batch-invariant" in recording.refused["TORCH_SDPA"]
    (pair,) = attention_pairs(recording)
    assert pair.base.key == recording.rows[3].key and pair.other.key == recording.rows[5].key
    assert pair.ratio.value == pytest.approx(recording.rows[5].p50_us / recording.rows[3].p50_us, rel=0.01)
    assert pair.as_dict()["kv"] == "rotated" and "two calls" in pair.sentence
    with pytest.raises(ConfigError, match="Did you mean"):
        bench_attentions(["TORCH_SPDA"], points, device="cpu")


def test_a_backend_that_breaks_while_it_runs_is_listed_too(two_calls, monkeypatch) -> None:
    def broken(self, *args, **kwargs):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(two_calls, "forward", broken)
    recording = bench_attentions(["TORCH_SDPA"], [(DECODE, PLAIN)], device="cpu", samples=2)
    assert recording.rows == () and "illegal memory access" in recording.refused["TORCH_SDPA"]


def test_every_backend_is_asked_but_the_interpreter() -> None:
    names = backends_to_time("cpu")
    assert set(names) == set(registry.BACKENDS) - {"TRITON_ATTN"} and names[0] == "TORCH_SDPA"


# --- recordings ------------------------------------------------------------------------------------------------------


def small(tmp_path: Path, name: str = "a.json.gz", **options: Any) -> AttentionRecording:
    points = [(DECODE, PLAIN), (MIX, PLAIN)]
    return record_attention(
        tmp_path / name, device="cpu", samples=50, command="labkit record", points=points, **options
    )


def test_a_recording_survives_its_file_and_is_not_measured_twice(two_calls, tmp_path: Path) -> None:
    measured = small(tmp_path)
    stored = load_attention(tmp_path / "a.json.gz")
    assert stored.rows == measured.rows and stored.refused == measured.refused
    assert (stored.provenance.kind, stored.provenance.n) == (Kind.RECORDED, 50)
    assert len(stored.rows) == 8 and {r.call for r in stored.rows} == {"labkit", "bare"}
    two_calls.bare = 0
    assert small(tmp_path).rows == measured.rows and two_calls.bare == 0
    elsewhere = dataclasses.replace(stored, provenance=stored.provenance.replace(gpu="NVIDIA T4", driver="1"))
    elsewhere.save(tmp_path / "b.json.gz")
    with pytest.raises(ProvenanceError, match="NVIDIA T4"):
        small(tmp_path, "b.json.gz")


def test_the_suite_is_recorded_by_the_command(two_calls, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("labkit.bench.recorder.attention_points", lambda: [(DECODE, PLAIN), (MIX, SPLIT)])
    out = tmp_path / "attention.json.gz"
    assert main(["record", "--suite", "attention", "--device", "cpu", "--out", str(out)]) == 0
    assert "TORCH_SDPA, two calls" in capsys.readouterr().out
    assert {row.kind for row in load_attention(out).rows} == {"decode", "mixed"}


def test_what_disagrees_with_itself_is_refused(two_calls, tmp_path: Path) -> None:
    small(tmp_path)
    data = load_attention(tmp_path / "a.json.gz").as_dict()

    def broken(change: dict[str, Any], **top: Any) -> dict[str, Any]:
        return {**data, "rows": [{**data["rows"][0], **change}, *data["rows"][1:]], **top}

    assert AttentionRecording.from_dict(broken({})).rows
    for change, words in (
        ({"p50_us": 1e6}, "p50_us"), ({"n": 49}, "49"), ({"kind": "other"}, "none of decode"),
        ({"batch": 3}, "batch=3"),
        ({"kv": "hot"}, "warm"), ({"samples_us": ["x"]}, "not of type"), ({"new": 1}, "unknown field"),
        (dict(data["rows"][1]), "repeats"),
    ):  # fmt: skip
        with pytest.raises(RecordingError, match=words):
            AttentionRecording.from_dict(broken(change))
    for top in ({"schema": 2}, {"table": "steps"}, {"rows": {}}, {"refused": {"a": 1}}):
        with pytest.raises(RecordingError):
            AttentionRecording.from_dict(broken({}, **top))
    few = bench_attentions(["TORCH_SDPA"], [(DECODE, PLAIN)], device="cpu", samples=3, bare=False)
    with pytest.raises(RecordingError, match="needs 50"):
        few.save(tmp_path / "few.json.gz")
    with pytest.raises(RecordingError, match="no recording of attention"):
        AttentionRecording.from_dict({"schema": 1, "provenance": {}, "rows": []})


def test_what_the_package_ships_can_be_read() -> None:
    for recording in shipped_attention():
        assert recording.provenance.kind is Kind.RECORDED and recording.rows


def test_the_suite_has_distinct_points_of_every_kind() -> None:
    points = attention_points()
    assert len(set(points)) == len(points)
    assert {shape.kind for shape, _ in points} == {"decode", "mixed", "prefill"}
    assert {o.num_splits for _, o in points} >= {0, 1, 8, 64}
    for shape, options in points:
        if options.split_mixed_batches or options.batch_invariant:
            assert (shape, PLAIN) in points, "a comparison needs its other side"


# --- the command -----------------------------------------------------------------------------------------------------

WORDS = ["bench", "attention", "--num-heads", "4", "--num-kv-heads", "2", "--head-size", "16", "--device", "cpu"]


def test_the_command_times_all_kinds_and_keeps_a_recording(two_calls, tmp_path: Path, capsys) -> None:
    out = tmp_path / "calls.json.gz"
    words = [*WORDS, "--batch", "2", "--context", "16", "--prefill", "1x6", "--chunk", "4", "--split-mixed-batches",
             "--num-splits", "0,2", "--attention-backend", "all", "--no-bare", "--out", str(out), "--json"]  # fmt: skip
    assert main(words) == 0
    data = json.loads(capsys.readouterr().out)
    kinds = [(r["kind"], r["num_splits_asked"], r["split_mixed_batches"]) for r in data["rows"] if r["kv"] == "warm"]
    assert kinds == [
        ("decode", 0, False), ("decode", 2, False), ("prefill", 0, False), ("prefill", 2, False),
        ("mixed", 0, False), ("mixed", 2, False), ("mixed", 0, True), ("mixed", 2, True),
    ]  # fmt: skip
    assert data["refused"].keys() == {"FLEX_ATTENTION"} and len(data["comparisons"]) == 2
    assert AttentionRecording.from_dict(data).rows == load_attention(out).rows, "what is printed can be loaded as well"


def test_the_table_names_everything(two_calls, capsys) -> None:
    assert main([*WORDS, "--batch", "", "--prefill", "2x8", "--attention-backend", "all", "--samples", "3"]) == 0
    text = capsys.readouterr().out
    for words in ("TORCH_SDPA, bare", "prefill", "TFLOP/s", "FLEX_ATTENTION did not run everything", "adapter"):
        assert words in text, words


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--attention-backend", "TORCH_SDP"], "Did you mean"),
        (["--prefill", "8*9"], "8x1024"),
        (["--batch", ""], "nothing to time"),
        (["--sets", "2"], "fewer than 4 sets"),
        (["--out", "x.json.gz", "--samples", "3"], "50 samples"),
        (["--attention-backend", "TORCH_SDPA", "--batch-invariant", "--num-splits", "3"], "does not have"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_answered_with_a_sentence(words: list[str], says: str, capsys) -> None:
    assert main([*WORDS, *words]) in (1, 2)
    assert says in capsys.readouterr().err
