"""Timelines and X-rays on a GPU: the engine's own steps pass every rule, and a graph's nodes have names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from labkit import LLM
from labkit.bench.timeline import record_timelines, take_modes
from labkit.cli import entry
from labkit.graphs.xray import xray
from labkit.measure.spans import StepTimeline
from labkit.measure.timeline_recording import load_timelines

SETTINGS = {
    "max_model_len": 1024, "max_num_seqs": 32, "max_num_batched_tokens": 512, "cudagraph_capture_sizes": [1, 32],
    "cudagraph_mode": "FULL_AND_PIECEWISE", "enable_prefix_caching": False,
}  # fmt: skip


@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("backend", ["TRITON_ATTN", "TORCH_SDPA"])
def test_steps_of_the_engine_pass_every_rule(backend: str, batch: int) -> None:
    with LLM("smollm2-135m", **SETTINGS, attention_backend=backend) as llm:
        layers = llm.model_config.num_layers
        taken, refused = take_modes(llm, batch, 512, warmup=5, rounds=4)
    for one in taken:
        timeline: StepTimeline = one.timeline
        print("\n".join([timeline.title, *timeline.problems, *timeline.notes, str(timeline.busy_by_role())]))
        print({s.name: s.role for s in timeline.device if s.role == "other"})
        assert timeline.problems == ()
        assert timeline.busy_us <= 1.05 * (timeline.event_us or 0)
        assert {"gemm", "attention", "norm", "rope_cache", "activation"} <= set(timeline.busy_by_role())
        assert StepTimeline.from_dict(timeline.as_dict()).problems == ()
    found = {one.timeline.mode: one for one in taken}
    assert "NONE" in found and "FULL" in found, refused
    assert found["FULL"].timeline.graph_launches == 1
    assert found["FULL"].row.control.graph_nodes, "the driver counts"
    if "PIECEWISE" in found:
        assert found["PIECEWISE"].timeline.graph_launches == layers + 1
    launches = [one.timeline.launches for one in taken]
    assert launches == sorted(launches, reverse=True), "eager, PIECEWISE, FULL"


def test_timelines_are_drawn() -> None:
    figures = pytest.importorskip("labkit.figures.timeline", reason="needs plotly", exc_type=ImportError)
    with LLM("smollm2-135m", **SETTINGS, attention_backend="TRITON_ATTN") as llm:
        taken, _ = take_modes(llm, 1, 512, warmup=5, rounds=2)
    assert figures.timeline_figure([one.timeline for one in taken], "LIVE").data


def test_a_recording_is_kept_and_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "timelines.json.gz"
    stops = iter([False, True])
    half = record_timelines(out, models=["smollm2-135m"], should_stop=lambda: next(stops))
    done = record_timelines(out, models=["smollm2-135m"])
    assert len(half.rows) == 3 and len(done.rows) == 6 and done.rows[:3] == half.rows
    print(f"{out.stat().st_size} bytes")
    assert load_timelines(out) == done


def test_the_command_exports_a_trace_that_it_reads_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trace.json"
    words = ["timeline", "--model", "smollm2-135m", "--rounds", "2", "--out", str(out), "--json"]
    assert entry.main(words) == 0
    lived = json.loads(capsys.readouterr().out)["summary"]
    assert entry.main(["timeline", "--from", str(out), "--json"]) == 0
    read = json.loads(capsys.readouterr().out)["summary"]
    assert [(s["launches"], s["kernels"]) for s in read] == [(s["launches"], s["kernels"]) for s in lived]


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_an_xray_names_the_kernels_of_a_graph(mode: str) -> None:
    with LLM("smollm2-135m", **SETTINGS, attention_backend="TRITON_ATTN") as llm:
        before = {(r.mode, r.size): r.kernel_nodes for r in llm.capture_records}
        found = xray(llm, 1, mode)
        print(found.by_role(), found.by_name(), sep="\n")
        assert sum(n.kind == "kernel" for n in found.nodes) == found.kernel_nodes == before[mode, 1]
        assert "unnamed" not in found.by_role(), "kernels of Triton, torch and cuBLAS have names"
        assert {"rms_norm_kernel", "rotary_kernel", "silu_and_mul_kernel"} <= set(found.by_name())
        assert ("attention" in found.by_role()) == (mode == "FULL")
        assert len(found.graphs) == (1 if mode == "FULL" else llm.model_config.num_layers + 1)
        llm.generate([[1, 2, 3]])  # the graphs that were captured anew serve
