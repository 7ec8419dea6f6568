"""Timelines of the engine, with a stand-in for the GPU's part of a step, and their recording."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from labkit import LLM
from labkit.bench import timeline as bench
from labkit.bench.timeline import PLAIN, record_timelines, take, take_modes, take_timeline, timeline_config
from labkit.cli import entry
from labkit.config import EngineConfig
from labkit.engine.report import CaptureRecord
from labkit.errors import LabkitError
from labkit.figures.timeline import timeline_figure
from labkit.measure.library import load_any
from labkit.measure.provenance import Kind, ProvenanceError
from labkit.measure.recordings import RecordingError
from labkit.measure.spans import TimelineError
from labkit.measure.timeline_recording import TimelineRecording, load_timelines, shipped_timelines
from tests.traces import LAYER, eager, full, piecewise

SETTINGS: dict[str, Any] = {
    "attention_backend": "TORCH_SDPA", "device": "cpu", "max_model_len": 256, "max_num_seqs": 4,
    "max_num_batched_tokens": 64, "num_gpu_blocks_override": 80, "cudagraph_capture_sizes": (1, 2),
    "cudagraph_mode": "FULL_AND_PIECEWISE",
}  # fmt: skip
MAKERS = {"NONE": eager, "PIECEWISE": piecewise, "FULL": full}
GRAPHS = {"NONE": 0, "PIECEWISE": 4, "FULL": 1}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Steps are the CPU's own; their traces, event times and numbers of graphs are those of tests.traces."""
    order: list[str] = []

    def as_on_a_gpu(report: Any) -> Any:
        phases = {"schedule": 4.0, "launch": 90.0, "sample": 6.0}
        return dataclasses.replace(
            report, graph_launches=GRAPHS[report.mode], emulated=False, phases_us=phases, wall_ms=0.1, device_us=60.0
        )

    def timed(llm: LLM) -> tuple[Any, float]:
        order.append("plain")
        return as_on_a_gpu(llm.step()), 120.0

    def traced(llm: LLM) -> tuple[Any, list[Any]]:
        order.append("traced")
        report = as_on_a_gpu(llm.step())
        return report, MAKERS[report.mode]().done()

    def records(llm: LLM) -> list[CaptureRecord]:
        nodes = {"FULL": 3 * len(LAYER), "PIECEWISE": 3 * len(LAYER) - 3}
        return [dataclasses.replace(r, kernel_nodes=nodes[r.mode]) for r in llm.engine.capture_records]

    monkeypatch.setattr(bench, "why_not", lambda: "")
    monkeypatch.setattr(bench, "_timed_step", timed)
    monkeypatch.setattr(bench, "_traced_step", traced)
    monkeypatch.setattr(LLM, "capture_records", property(records))
    return order


def test_on_a_cpu_it_says_why_not() -> None:
    with LLM("tiny-llama", **SETTINGS) as llm, pytest.raises(TimelineError, match="no device lane"):
        take_timeline(llm, 1, 32)


def test_all_modes_are_taken_with_their_controls_and_compared(gpu: list[str]) -> None:
    with LLM("tiny-llama", **SETTINGS) as llm:
        taken, refused = take_modes(llm, 2, 40, ("FULL", "NONE", "PIECEWISE"), warmup=2, rounds=2)
        assert [one.timeline.mode for one in taken] == ["NONE", "PIECEWISE", "FULL"] and not refused
        assert gpu[: 2 * PLAIN + 2] == ["plain"] * PLAIN + ["traced", "traced"] + ["plain"] * PLAIN, "in turns"
        for one in taken:
            assert one.timeline.problems == () and one.timeline.event_us == 120.0
            assert len(one.row.control.plain_us) == 2 * PLAIN and len(one.row.control.profiled_us) == 2
            assert one.timeline.host[0].begin_us == pytest.approx(10.0)
            assert one.origin_us == pytest.approx(4298563214.125)
            assert any("times as long" in note for note in one.timeline.notes), "the profiler's own cost"
        assert "eager step" in taken[2].timeline.notes[-1] and "15 kernels" in taken[2].timeline.notes[-1]
        assert taken[1].row.control.graph_nodes == 12 and taken[0].row.control.graph_nodes is None
        assert not llm.has_unfinished
        with pytest.raises(LabkitError, match="max_num_seqs=4"):
            take(llm, 5, 40)
        with pytest.raises(LabkitError, match="max_model_len=256"):
            take(llm, 1, 250)


def test_a_count_that_disagrees_with_the_capture_is_a_problem(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [CaptureRecord("FULL", 1, 1.0, 1.0, 1, 99)]
    with LLM("tiny-llama", **SETTINGS) as llm:
        monkeypatch.setattr(LLM, "capture_records", property(lambda _: nodes))
        found = take_timeline(llm, 1, 40, warmup=1, rounds=1)
    assert found.problems == (
        "99 kernels were recorded into the step's graphs, and the trace shows 15 in their replays.",
    )


def test_a_mode_that_cannot_run_is_refused_with_the_reason(gpu: list[str]) -> None:
    with LLM("tiny-llama", **{**SETTINGS, "piecewise_method": "compile"}) as llm:
        taken, refused = take_modes(llm, 1, 40, ("NONE", "PIECEWISE"), warmup=1, rounds=1)
    assert [one.timeline.mode for one in taken] == ["NONE"]
    assert refused[0].requested_mode == "PIECEWISE" and "instead of PIECEWISE" in refused[0].reason


def test_settings_have_a_graph_of_each_batch() -> None:
    config = timeline_config(EngineConfig(model="tiny-llama"), [32, 1])
    assert config.cudagraph_capture_sizes == (1, 32) and not config.enable_prefix_caching


# --- recording --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    own = timeline_config
    settings = {k: v for k, v in SETTINGS.items() if not k.startswith("cudagraph")}
    monkeypatch.setattr(bench, "timeline_config", lambda config, batches: own(config.replace(**settings), batches))


def test_a_recording_goes_on_and_round_trips(gpu: list[str], small: None, tmp_path: Path) -> None:
    out = tmp_path / "t.json.gz"
    stops = iter([False, True])
    args: dict[str, Any] = {"models": ("tiny-llama",), "batches": (1, 2), "context": 40, "rounds": 10}
    half = record_timelines(out, **args, should_stop=lambda: next(stops))
    assert [row.batch for row in half.rows] == [1, 1, 1]
    before = len(gpu)
    done = record_timelines(out, **args)
    assert [row.batch for row in done.rows] == [1, 1, 1, 2, 2, 2] and len(gpu) == before + 3 * 60
    assert done.rows[:3] == half.rows
    again = len(gpu)
    assert record_timelines(out, **args) == done and len(gpu) == again, "nothing is left to do"
    lost = dataclasses.replace(done.rows[4].timeline, problems=("The trace lost the kernels of 1 launch.",))
    rows = (*done.rows[:4], dataclasses.replace(done.rows[4], timeline=lost), done.rows[5])
    dataclasses.replace(done, rows=rows).save(out)
    done = record_timelines(out, **args)
    assert len(gpu) == again + 3 * 60, "the batch of a trace that failed is taken again, the other is not"
    assert not any(row.timeline.problems for row in done.rows)
    assert done.provenance.kind is Kind.RECORDED and done.provenance.n == 50
    assert load_any(out) == load_timelines(out) == TimelineRecording.from_dict(done.as_dict()) == done
    assert len(done.timelines(batch=2)) == 3
    assert out.stat().st_size < 20_000
    other = dataclasses.replace(done, provenance=done.provenance.replace(cpu="another"))
    other.save(out)
    with pytest.raises(ProvenanceError, match="recorded elsewhere"):
        record_timelines(out, **args)

    good = done.as_dict()
    for change, says in (
        (lambda d: d.update(table="attention"), "no recording of timelines"),
        (lambda d: d.update(schema=99), "newer"),
        (lambda d: d.pop("rows"), "no list of rows"),
        (lambda d: d["rows"].append(d["rows"][0]), "repeats"),
        (lambda d: d["rows"][0].update(batch=4), "a batch of 4 in a size of 1"),
        (lambda d: d["rows"][0].pop("control"), "its control"),
        (lambda d: d["rows"][0].update(what=1), "unknown field"),
        (lambda d: d["rows"][0]["control"].update(plain_us=[1.0]), "has 1 plain steps"),
        (lambda d: d["rows"][0]["control"].update(plain_us=[-1.0] * 50), "above zero"),
        (lambda d: d["rows"][0]["control"].update(profiled_us=[]), "with and without"),
        (lambda d: d["rows"][0]["timeline"].update(launches="x"), "no count"),
        (lambda d: d["provenance"].update(n=51), "fewer than n says"),
    ):
        damaged = json.loads(json.dumps(good))
        change(damaged)
        with pytest.raises((RecordingError, TimelineError), match=says):
            TimelineRecording.from_dict(damaged)


def test_shipped_recordings_load() -> None:
    assert isinstance(shipped_timelines(), tuple)


# --- command line -----------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = entry.main(["timeline", *words])
    got = capsys.readouterr()
    return code, got.out + got.err


def save_trace(path: Path, events: list[Any]) -> Path:
    path.write_text(json.dumps({"traceEvents": events, "schemaVersion": 1}))
    return path


def test_a_saved_trace_is_read_printed_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out, page = save_trace(tmp_path / "a.json", full().done()), tmp_path / "b.json.gz", tmp_path / "c.html"
    code, text = run(capsys, "--from", str(trace), "--out", str(out), "--html", str(page))
    assert code == 0 and "RECORDED · read from a.json" in text
    assert "attention" in text and "15.0 (3)" in text
    code, again = run(capsys, "--from", str(out), "--json")
    data = json.loads(again[again.index("{") :])
    (one,) = data["summary"]
    assert (one["launches"], one["graph_launches"], one["kernels"], one["problems"]) == (3, 1, 18, [])
    assert one["by_role"]["attention"] == {"us": 15.0, "kernels": 3}
    assert "plotly" in page.read_text()[:100_000].casefold()


def test_a_trace_that_cannot_be_believed_is_told_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = eager()
    made.call("cudaLaunchKernel")
    code, text = run(capsys, "--from", str(save_trace(tmp_path / "a.json", made.done())))
    assert code == 1 and "not drawn: The trace lost the kernels of 1 launch" in text
    code, text = run(capsys, "--from", str(save_trace(tmp_path / "cpu.json", [])))
    assert code == 1 and "no launch of a kernel" in text
    (tmp_path / "x.json").write_text("{}")
    assert "traceEvents" in run(capsys, "--from", str(tmp_path / "x.json"))[1]
    assert run(capsys, "--from", str(trace := tmp_path / "none.json"), "--keep", str(trace))[0] == 2


def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "--model", "tiny-llama", "--device", "cpu")
    assert code == 1 and "no device lane" in text and "--from FILE" in text


def test_a_live_run_keeps_exports_and_names_the_tools(
    gpu: list[str], small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, kept = tmp_path / "trace.json", tmp_path / "kept.json.gz"
    words = ["--model", "tiny-llama", "--batch", "1", "--context", "40", "--max-num-seqs", "4"]
    monkeypatch.setattr("sys.argv", ["labkit", "timeline", *words, "--out", str(out), "--rounds", "10"])
    code, text = run(capsys, *words, "--out", str(out), "--keep", str(kept), "--rounds", "10")
    assert code == 0, text
    assert "LABKIT_NVTX=1 nsys profile" in text and "LABKIT_NVTX=1 ncu" in text
    assert f"labkit bench {' '.join(words)} --steps 20" in text
    assert len(load_timelines(kept).rows) == 3
    assert "tiny-llama, batch 1, FULL" in text
    events = json.loads(out.read_text())["traceEvents"]
    for number in range(3):
        lane = [e for e in events if e.get("pid") == f"labkit {number}" and e.get("tid") == 3 and e["ph"] == "X"]
        real = {round(e["ts"], 2) for e in events if e.get("cat") in ("kernel", "gpu_memcpy")}
        assert len(lane) == 18 and {round(e["ts"], 2) for e in lane} <= real, "on the clock of the trace they are in"
    code, text = run(capsys, "--from", str(out), "--json")
    read = json.loads(text[text.index("{") :])["summary"]
    assert [(s["launches"], s["kernels"], s["problems"]) for s in read] == [(17, 18, []), (9, 18, []), (3, 18, [])]
    code, text = run(capsys, *words, "--keep", str(kept), "--rounds", "9")
    assert code == 2 and "10 rounds or more" in text, "said before anything is measured"
    found = load_timelines(kept)
    assert timeline_figure(found.timelines(), str(found.provenance.kind)).data
    code, text = run(capsys, "--from", str(kept))
    assert code == 0 and text.startswith("RECORDED · ")
