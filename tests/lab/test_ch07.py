"""Chapter 07: its checks, its panels in every source, its replay in the engine. Times are never asserted."""

from __future__ import annotations

import numpy as np
import pytest

from labkit.errors import ConfigError
from labkit.figures import break_even as figures
from labkit.lab import ch07
from labkit.lab.ch07 import panel, recorded
from labkit.lab.ch07.exercises import rebind
from labkit.lab.ch07.lines import LINES
from labkit.lab.ch07.pair import Step, outcome
from labkit.lab.ch07.stale import COPIED, OWN, REBOUND, SHARED, NumpyReplays
from labkit.lab.panel import figure_equals_data
from labkit.lab.prove import prove
from labkit.lab.runs import Context, simulated
from labkit.lab.static_graph import StaticGraph, replay
from labkit.lab.worker import Worker
from labkit.measure.library import library
from tests.lab.fakes import newest

TIMEOUT = 60


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("LABKIT_SOLUTIONS", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def worker():
    made = Worker()
    yield made
    made.close()


@pytest.fixture
def pairs(worker):
    return ch07.replay_panel(worker=worker, redraw=True, refresh_s=0)


@pytest.fixture
def stale(worker):
    return ch07.stale_panel(worker=worker, redraw=True, refresh_s=0)


def ran(panel_, **values):
    panel_.set(**values)
    panel_.run(wait=True, timeout=TIMEOUT)
    assert figure_equals_data(panel_)
    return panel_.runs[-1]


@pytest.mark.parametrize("exercise", ch07.chapter.exercises, ids=lambda e: e.id)
def test_its_checkers_check(exercise):
    prove(exercise)


@pytest.mark.parametrize("quiz", ch07.chapter.quizzes, ids=lambda q: q.id)
def test_its_questions_have_one_answer(quiz):
    for i, option in enumerate(quiz.options):
        assert ("right" in repr(quiz.answer(i))) == option.right


def test_a_static_graph_reads_what_it_was_recorded_with():
    reads = np.zeros(2)
    graph = StaticGraph(reads, np.zeros(2), lambda a, b: np.copyto(b, a + 1))
    graph.input = np.full(2, 9.0)
    graph.launch()
    assert graph.output.tolist() == [1, 1] and graph.rebound
    reads[:] = 5
    graph.launch()
    assert graph.output.tolist() == [6, 6] and graph.launches == 2


def test_torch_refuses_what_the_lines_say():
    """The chapter's table against torch's own rule: these ask for data, which a tensor without data cannot give."""
    torch = pytest.importorskip("torch")
    names = {"hidden": torch.empty(3, 3, device="meta"), "logits": torch.empty(3, 3, device="meta"),
             "weight": torch.empty(3, 3, device="meta"), "n": 3, "limit": 4, "torch": torch}  # fmt: skip
    for text, reason in LINES:
        if "synchronize" in text or text.startswith("print(") or ".cpu()" in text:
            continue  # of the machine, not of data; printing an empty tensor is allowed
        code = f"{text}\n    pass" if text.endswith(":") else text
        if reason:
            with pytest.raises((RuntimeError, NotImplementedError)):
                exec(code, dict(names))
        elif text != "out = torch.zeros(n)":
            exec(code, dict(names))


# --- the panel of pairs ----------------------------------------------------------------------------------------------


def test_it_opens_on_the_queue_and_the_gate_knows_its_answer(pairs):
    assert pairs.gate.state == "asking" and pairs.settings["kernels"] == 8
    pairs.gate.commit("one")
    run = ran(pairs)
    assert run.values["eager_ms"] == pytest.approx(0.051) and run.values["launches"] == 1
    assert "That is what came out" in pairs.gate.said.value
    saved_us = 1e3 * (run.values["eager_ms"] - run.values["graph_ms"])
    assert run.values["break_even"] == pytest.approx(100e3 / saved_us, rel=0.01)
    assert run.data["saved_ms"][-1] == pytest.approx(run.data["steps"][-1] * saved_us / 1e3)


def test_long_kernels_hide_their_launches(pairs):
    short = ran(pairs)
    long = ran(pairs, kernel_us=50.0)
    assert long.values["break_even"] is None and "saves nothing" in long.summary
    assert "weigh less against the kernels now" in panel.changed(long, short)
    dear = ran(pairs, kernel_us=3.0, capture_ms=200)
    assert dear.values["break_even"] == pytest.approx(2 * short.values["break_even"], abs=1)
    other = ran(pairs, launch_us=20.0, kernels=50)
    assert other.values["break_even"] < dear.values["break_even"]


def test_wrong_values_are_moved_or_refused(pairs):
    pairs.set(kernels=9999)
    assert pairs.settings["kernels"] == 400 and "is not possible here" in pairs.hint.value
    with pytest.raises(ConfigError):
        pairs.set(model="gpt-9")


def test_a_model_s_step(pairs):
    one = ran(pairs, source="decode step of a model", model="smollm2-135m")
    assert one.values["launches"] < 10 < one.values["eager_launches"]
    large = ran(pairs, model="llama-3.1-8b", batch=8)
    assert 1 - large.values["graph_ms"] / large.values["eager_ms"] < 1 - one.values["graph_ms"] / one.values["eager_ms"]
    half = ran(pairs, host=0.5)
    assert half.values["eager_ms"] > large.values["eager_ms"]


def test_a_recorded_pair_is_the_recording_s(pairs):
    source = next(s for s in pairs.sources if s.kind == "RECORDED")
    run = ran(pairs, source=source.label, model="smollm2-135m", backend="TRITON_ATTN", batch=1)
    where = {"model": "smollm2-135m", "backend": "TRITON_ATTN", "batch": 1, "context": 512}
    eager, full, _ = newest("NONE", "FULL", **where)
    assert (run.values["eager_ms"], run.values["graph_ms"]) == (eager.p50_ms, full.p50_ms)
    assert (run.values["eager_launches"], run.values["launches"]) == (eager.launches, full.launches)
    assert run.data["launch_us"] == [eager.phases_us["launch"], full.phases_us["launch"]]
    assert str(run.provenance.kind) == "RECORDED" and run.outcome.measurement.samples == full.samples_ms
    pairs.set(batch=33)
    assert pairs.settings["batch"] == 32
    other = ran(pairs, model="qwen3-0.6b", backend="TORCH_SDPA")
    assert other.values["eager_launches"] != run.values["eager_launches"]


def test_captures_and_timelines_are_used_once_they_are_recorded():
    """Synthetic: the shipped rows with a made-up capture and made-up timelines of the very step."""
    import dataclasses
    from types import SimpleNamespace

    from labkit.measure.recordings import Captured
    from labkit.simulate.queue import Work, run_queue

    (steps,) = [e.recording for e in library().of("steps") if e.name == "h200.json.gz"]
    asked = {"model": "smollm2-135m", "backend": "TRITON_ATTN", "batch": 1}
    plain = recorded.RecordedPairs("H200", [steps]).run(asked, Context())
    assert plain.values["capture_ms"] is None and "was not recorded" in plain.summary
    took = Captured("smollm2-135m", "TRITON_ATTN", "NONE", "FULL", "FULL", 1, 1, 45.0, 2.0)
    work = [Work("k", "gemm", 3.0, 6.0)] * 3
    rows = [
        SimpleNamespace(model="smollm2-135m", backend="TRITON_ATTN", compile="NONE", batch=1, context=512,
                        timeline=dataclasses.replace(run_queue(work, graph=graph), title=title))
        for graph, title in ((False, "eager"), (True, "graph"))
    ]  # fmt: skip
    entry = SimpleNamespace(provenance=steps.provenance, recording=SimpleNamespace(rows=rows))
    full = recorded.RecordedPairs("H200", [dataclasses.replace(steps, captures=(took,))], [entry]).run(asked, Context())
    assert full.values["capture_ms"] == 45.0 and full.values["break_even"] == 10
    assert len(full.data["timelines"]) == 2 and any("with the profiler" in note for note in full.notes)


def test_live_on_a_cpu(pairs):
    pytest.importorskip("torch")
    source = pairs.sources[0]
    assert source.kind == "LIVE"
    source.room = type(source.room)()
    try:
        run = ran(pairs, source=source.label, model="tiny-llama", batch=2)
        assert run.values["captured"] == 1 and run.values["launches"] is None and run.values["capture_ms"] is None
        assert "emulated" in run.summary and "nothing to pay for" in run.summary and run.data["launch_us"][0] > 0
        more = ran(pairs, captured="every size of a short list")
        assert more.values["captured"] == 4 and "neither saves" in panel.changed(more, run)
    finally:
        source.room.close()


def test_the_first_look_is_empty_and_a_saving_of_nothing_is_drawn(pairs):
    assert not figures.pair_figure(None).data
    made = outcome("x", Step(2.0, (2.0,), 3), Step(2.5, (2.5,), 1), 4.0, simulated("x"), "Why.")
    assert made.values["break_even"] is None and made.data["saved_ms"][-1] < 0
    assert "nothing is saved" in made.summary


# --- replays ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["LIVE", "SIMULATED"])
def test_a_rebound_input_is_stale_and_a_shared_output_is_overwritten(stale, kind):
    if kind == "LIVE":
        pytest.importorskip("torch")
    source = next(s for s in stale.sources if s.kind == kind)
    stale.gate.commit("stale")
    run = ran(stale, source=source.label, way=REBOUND, kept=OWN, steps=4)
    assert run.data["got"] == [3, 3, 3, 3] and run.data["expected"] == [3, 5, 7, 9]
    assert run.values["output"] == "stale" and run.values["moved"] == "another one"
    assert "That is what came out" in stale.gate.said.value
    right = ran(stale, way=COPIED)
    assert right.data["got"] == right.data["expected"] and right.values["wrong"] == 0
    assert "written to the address" in panel.stale_changed(right, run)
    shared = ran(stale, kept=SHARED)
    assert shared.data["got"] == [9, 9, 9, 9] and shared.values["output"] == "overwritten"
    assert "share the graph's output buffer" in panel.stale_changed(shared, right)
    assert len([t for t in stale.figure.data if t.name.startswith("run ")]) == 3


def test_numpy_is_said_to_be_numpy(stale):
    source = NumpyReplays()
    assert source.kind == "SIMULATED" and any("no CUDA" in note for note in source.run(
        {"way": COPIED, "kept": OWN, "steps": 2}, Context()).notes)  # fmt: skip


# --- in the engine, and the cards ------------------------------------------------------------------------------------


def test_a_replay_drives_the_engine_and_a_rebound_one_changes_its_text():
    pytest.importorskip("torch")
    from labkit.lab.engine_room import EngineRoom
    from labkit.lab.plugged_run import run_plugged

    room = EngineRoom()
    asked = {"prompts": ch07.cards.PROMPTS, "max_tokens": 5, "model": "tiny-llama", "room": room}
    try:
        right = run_plugged(replay=replay, **asked)
        assert right.same_text and right.plugged.ok and right.plugged.calls["replay"] > 4
        wrong = run_plugged(replay=rebind, trust=True, **asked)
        assert wrong.same_text is False and wrong.alone.ways == wrong.ours.ways
        undone = run_plugged(replay=rebind, **asked)
        assert undone.same_text and undone.plugged.sockets["replay"].undone
        short = run_plugged(replay=lambda graph, inputs: [], trust=True, **asked)
        assert short.same_text and short.plugged.sockets["replay"].unusable == short.plugged.calls["replay"]
    finally:
        room.close()


def test_its_cards(pairs):
    run = ran(pairs)
    assert repr(ch07.card()) == "chapter 07 Record once, press play: 45 minutes"
    assert "write illegal_lines first" in repr(ch07.reasons(rebind))
    assert (
        repr(ch07.reasons(ch07.ILLEGAL_LINES.solution))
        == f"reasons: {sum(bool(r) for _, r in LINES)} of {len(LINES)} lines are refused"
    )
    paid = ch07.paid_back(ch07.BREAK_EVEN.solution, [run])
    assert f"{run.values['break_even']:,}" in paid.html
    assert "305 launches of smollm2-135m become 3" in ch07.myths().html
    assert repr(ch07.note_score([])) == "scoreboard: 1 row"
    assert len(ch07.questions().children) == 2
