"""Chapter 01: its panels in every source, its checks, its cards. No time is asserted that a clock took."""

from __future__ import annotations

import math

import pytest

from labkit.errors import ConfigError
from labkit.figures.points import first_difference
from labkit.lab import ch01
from labkit.lab.ch01 import chain, panel, recorded, regimes, simulated
from labkit.lab.exercises import check
from labkit.lab.panel import figure_equals_data
from labkit.lab.prove import prove
from labkit.lab.worker import Worker
from labkit.measure.library import library
from tests.lab.fakes import newest

TIMEOUT = 60


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def worker():
    made = Worker()
    yield made
    made.close()


@pytest.fixture
def waits(worker):
    return ch01.waits_panel(worker=worker, redraw=True, refresh_s=0)


def ran(panel_, **values):
    panel_.set(**values)
    panel_.run(wait=True, timeout=TIMEOUT)
    assert figure_equals_data(panel_)
    return panel_.runs[-1]


@pytest.mark.parametrize("exercise", ch01.chapter.exercises, ids=lambda e: e.id)
def test_its_checkers_check(exercise):
    prove(exercise)


def test_step_time_is_what_the_launch_queue_says():
    """The solution against the simulator, which was written by somebody else."""
    from labkit.lab.ch01.exercises import STEP_TIME, step_time
    from labkit.simulate.queue import Work, run_queue

    for one in STEP_TIME.all_cases():
        kernels, launch = one.args
        queue = run_queue([Work(f"k{i}", "gemm", us, launch) for i, us in enumerate(kernels)])
        assert step_time(kernels, launch) == pytest.approx(queue.wall_us)


@pytest.mark.parametrize(
    "elements",
    [
        lambda us, num_bytes, gb_s: us * 1e-6 * gb_s * 1e9 / num_bytes,
        lambda us, num_bytes, gb_s: us / (num_bytes / (gb_s * 1e9) * 1e6),
        lambda us, num_bytes, gb_s: us / 1e6 / (num_bytes / gb_s / 1e9),
    ],
)
def test_hiding_size_takes_the_units_in_any_order(elements):
    def hiding_size(launch_us, fixed_us, bytes_per_element, gb_s):
        return max(1, math.ceil(elements(launch_us - fixed_us, bytes_per_element, gb_s)))

    assert check(ch01.chapter.exercise("01.2"), hiding_size).passed


@pytest.mark.parametrize("quiz", ch01.chapter.quizzes, ids=lambda q: q.id)
def test_its_questions_have_one_answer(quiz):
    for i, option in enumerate(quiz.options):
        assert ("right" in repr(quiz.answer(i))) == option.right


# --- the panel -------------------------------------------------------------------------------------------------------


def test_it_opens_on_the_queue_and_the_gate_knows_its_answer(waits):
    assert waits.gate.state == "asking" and waits.settings == {
        "kernels": 8, "kernel_us": 3.0, "launch_us": 6.0, "way": "one by one",
    }  # fmt: skip
    waits.gate.commit("half")
    run = ran(waits)
    assert run.kind == "SIMULATED" and run.values["step_us"] == 51.0 and run.values["instructions_us"] == 27.0
    assert "That is what came out" in waits.gate.said.value
    assert run.values["slower"] == "host" and "the host is the slower side" in run.summary


def test_the_gate_waits_for_the_run_that_it_asks_about(waits):
    waits.gate.commit("third")
    ran(waits, kernel_us=20.0)
    assert "You predict" in waits.gate.said.value and "Result" not in waits.gate.said.value
    ran(waits, kernel_us=3.0)
    assert "It came out otherwise" in waits.gate.said.value


def test_the_slower_side_changes_and_the_panel_says_so(waits):
    first = ran(waits)
    second = ran(waits, kernel_us=20.0)
    assert second.values["slower"] == "device" and second.values["instructions_us"] == pytest.approx(6.0)
    assert "The slower side was the host and is the GPU now." in panel.changed(second, first)
    third = ran(waits, way="as one graph")
    assert "launch_us" not in third.settings and third.values["launches"] == 1
    assert "8 launches before, 1 now" in panel.changed(third, second)
    one = ran(waits, way="one by one", kernels=1)
    assert "waits for the one launch" in one.summary


def test_the_newest_timelines_are_drawn_and_pinned_ones_stay(waits):
    ran(waits)
    waits.pin()
    ran(waits, kernel_us=20.0)
    ran(waits, kernel_us=10.0)
    ends = [list(trace.x) for trace in waits.figure.data if trace.name == "end of the step"]
    assert ends == [[51.0, 51.0], [86.0, 86.0]]


def test_a_wrong_number_is_moved_and_a_wrong_way_refused(waits):
    waits.set(kernels=9999)
    assert waits.settings["kernels"] == 400 and "is not possible here" in waits.hint.value
    with pytest.raises(ConfigError):
        waits.set(way="by telepathy")
    with pytest.raises(ConfigError):
        waits.set(launches=3)


def test_a_model_s_step(waits):
    eager = ran(waits, source="decode step of a model", model="smollm2-135m")
    assert eager.values["slower"] == "host" and "It waits most for instructions" in eager.summary
    graph = ran(waits, mode="FULL")
    assert graph.values["instructions_us"] < eager.values["instructions_us"] / 5
    assert sum(graph.data["parts"].values()) == pytest.approx(graph.values["step_us"])
    fast = ran(waits, mode="NONE", host=2.0)
    assert fast.values["step_us"] < eager.values["step_us"]
    large = ran(waits, model="llama-3.1-8b", host=1.0)
    assert large.values["data_us"] == max(large.data["parts"].values())
    longer = ran(waits, context=32768, batch=16)
    assert longer.values["data_us"] > large.values["data_us"]


def test_a_recorded_step_is_the_recording_s(waits):
    source = next(s for s in waits.sources if s.kind == "RECORDED")
    eager = ran(waits, source=source.label, model="smollm2-135m", backend="TRITON_ATTN", batch=1, mode="NONE")
    row, full, _ = newest("NONE", "FULL", model="smollm2-135m", backend="TRITON_ATTN", batch=1, context=512)
    assert eager.values["launches"] == row.launches and eager.values["step_us"] == 1e3 * row.p50_ms
    assert eager.values["instructions_us"] == pytest.approx(row.device_us - full.device_us)
    assert sum(eager.data["parts"].values()) == pytest.approx(eager.values["step_us"])
    assert eager.outcome.measurement.samples == row.samples_ms and str(eager.provenance.kind) == "RECORDED"
    graph = ran(waits, mode="FULL")
    assert graph.values["launches"] == full.launches and graph.values["instructions_us"] == 0.0
    assert "The graph is what waiting for instructions is measured against" in graph.notes[0]
    waits.set(batch=33)
    assert waits.settings["batch"] == 32
    other = ran(waits, model="qwen3-0.6b", backend="TORCH_SDPA", mode="NONE")
    assert other.values["launches"] != eager.values["launches"]


def test_a_recorded_timeline_is_drawn_once_there_is_one():
    """A synthetic entry: rows of the shipped recording with a made-up timeline of the very step."""
    from types import SimpleNamespace

    from labkit.simulate.queue import Work, run_queue

    (steps,) = [e.recording for e in library().of("steps") if e.name == "h200.json.gz"]
    timeline = run_queue([Work("k", "gemm", 3.0, 6.0)])
    row = SimpleNamespace(model="smollm2-135m", backend="TRITON_ATTN", compile="NONE", batch=1, context=512,
                          timeline=timeline)  # fmt: skip
    entry = SimpleNamespace(provenance=steps.provenance, recording=SimpleNamespace(rows=[row]))
    source = recorded.RecordedSteps("H200", [steps], [entry])
    asked = {"model": "smollm2-135m", "backend": "TRITON_ATTN", "batch": 1, "mode": "NONE"}
    outcome = source.run(asked, None)
    assert outcome.data["finish"] == [timeline.wall_us] * 2 and not any("No timeline" in n for n in outcome.notes)
    assert "timeline" not in source.run({**asked, "batch": 2}, None).data


def test_live_on_a_cpu(waits):
    pytest.importorskip("torch")
    source = waits.sources[0]
    assert source.kind == "LIVE"
    run = ran(waits, source=source.label, op="addition", operations=10, elements=64)
    assert run.data["elements"] == list(chain.SIZES_CPU["addition"]) and all(us > 0 for us in run.data["call_us"])
    assert run.values["launches"] is None and "instructions_us" not in run.values
    assert "way" not in waits.settings
    assert str(run.provenance.kind) == "LIVE" and "because" in run.summary
    again = ran(waits, op="matrix product")
    assert again.settings["elements"] == 64 and "matrix product" in again.summary


def test_where_work_outweighs_starting():
    assert chain.crossover([1, 4, 16], {"call_us": [4.0, 7.9, 8.0]}) == 16
    assert chain.crossover([1, 4], {"call_us": [4.0, 4.1]}) is None
    assert chain.crossover([1, 4], {"issue_us": [5.0, 5.0], "device_us": [4.9, 5.0]}) == 4


def test_on_a_gpu_the_chain_has_a_way_to_be_started():
    """Only what needs no GPU: the controls and the words. The measurement itself was never run on one."""
    source = chain.ChainSource("NVIDIA H200")
    assert [one.name for one in source.controls({})] == ["op", "operations", "elements", "way"]
    us = {"issue_us": [5.0], "device_us": [2.0]}
    assert "the host is the slower side" in chain._gpu_summary("x", 10, 52.0, us, 0, chain.EAGER)
    assert "one launch starts all 10" in chain._gpu_summary("x", 10, 25.0, us, 0, chain.GRAPH)


# --- the map, the cards ----------------------------------------------------------------------------------------------


def test_the_map_draws_its_cells(worker):
    shown = ch01.regime_panel(worker=worker, redraw=True, refresh_s=0)
    eager = ran(shown)
    assert eager.values["instructions"] + eager.values["data"] + eager.values["others"] == 50
    graph = ran(shown, mode="FULL")
    assert graph.values["instructions"] < eager.values["instructions"]
    assert "cells wait for instructions most" in regimes.why(graph, eager)
    fast = ran(shown, mode="NONE", host=4.0)
    assert fast.values["instructions"] < eager.values["instructions"]
    around = ran(shown, mode="FULL", host=1.0, around=True)
    assert around.data["cells"] != graph.data["cells"]
    cells = shown.figure.data[0]
    assert "holds" in first_difference([cells], {around.number: {"cells": eager.data["cells"]}})


def test_the_real_panel_opens_on_what_was_recorded(worker):
    shown = ch01.real_panel(worker=worker, redraw=True, refresh_s=0)
    run = ran(shown)
    assert run.kind == "RECORDED" and shown.gate is None


def test_without_a_recording_it_says_so(monkeypatch, worker):
    monkeypatch.setattr(recorded, "library", lambda: type("L", (), {"of": lambda self, table: ()})())
    shown = ch01.real_panel(worker=worker, redraw=True, refresh_s=0)
    assert all(source.kind != "RECORDED" for source in shown.sources)
    assert recorded.recorded_sources()[1] == [
        "No RECORDED source: no recording has an eager step with launches and its graph."
    ]
    assert repr(ch01.note_score([])) == "scoreboard: 0 rows"


def test_the_cards(waits):
    added, queued = ch01.sum_or_queue()
    assert (added, queued) == (5.5, pytest.approx(5.01))
    assert "does not hold" in ch01.myths().html and "measured here" in ch01.myths().html
    assert repr(ch01.floors(lambda *args: ...)) == "floors: write floor_ms first"
    solution = ch01.chapter.exercise("01.3").solution
    assert check(ch01.chapter.exercise("01.3"), solution).passed
    assert ">4.78<" in ch01.floors(solution).html and ">5.22<" in ch01.floors(solution).html
    assert repr(ch01.note_score([])) == "scoreboard: 1 row" and "(this chapter)" in ch01.note_score([]).html
    ran(waits, source="NVIDIA H200", model="qwen3-0.6b", batch=1, mode="NONE")
    assert waits.runs[-1].values["launches"] == 313
    html = ch01.note_score(waits.runs).html
    assert "305" in html and "313" not in html, "the smallest step, whatever else the panel looked up"


def test_models_on_offer_fit_one_gpu():
    from labkit.models.shapes import SHAPES

    assert all(2 * SHAPES[name].num_parameters() < 141e9 for name in simulated.MODELS)
