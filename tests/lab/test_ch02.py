"""Chapter 02: its panel in every source, its checks, its cards. No time is asserted that a real clock took."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace

import pytest

from labkit.errors import ConfigError, LabkitError
from labkit.lab import ch02
from labkit.lab.ch02 import live, panel, recorded, simulated
from labkit.lab.ch02.device import FakeDevice, Queue
from labkit.lab.ch02.exercises import rotation, time_us, verdict
from labkit.lab.panel import figure_equals_data
from labkit.lab.prove import prove
from labkit.lab.runs import Context
from labkit.lab.worker import Worker
from labkit.measure.library import library
from labkit.simulate.queue import Work, run_queue
from tests.lab.fakes import newest

TIMEOUT = 60
KNOWN, DRIFTING = "device with a known time", "two equal things, machine drifting"


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
def timers(worker):
    return ch02.timer_panel(worker=worker, redraw=True, refresh_s=0)


def ran(panel_, **values):
    panel_.set(**values)
    panel_.run(wait=True, timeout=TIMEOUT)
    assert figure_equals_data(panel_)
    assert " because " in panel_.runs[-1].summary and panel_.runs[-1].summary.endswith(".")
    return panel_.runs[-1]


@pytest.mark.parametrize("exercise", ch02.chapter.exercises, ids=lambda e: e.id)
def test_its_checkers_check(exercise):
    prove(exercise)


@pytest.mark.parametrize("quiz", ch02.chapter.quizzes, ids=lambda q: q.id)
def test_its_questions_have_one_answer(quiz):
    for i, option in enumerate(quiz.options):
        assert ("right" in repr(quiz.answer(i))) == option.right


# --- devices that only exist in the books ----------------------------------------------------------------------------


def test_the_fake_device_runs_behind_the_host():
    device = FakeDevice(50, 6, (300,), 100)
    device.issue()
    assert device.clock() == 6
    device.synchronize()
    assert device.clock() == 100 + 50 + 300  # behind the others' work, and cold
    device.issue()
    device.synchronize()
    assert device.clock() == 450 + 6 + 50
    assert device == FakeDevice(50, 6, (300,), 100) == copy.deepcopy(device) and device != FakeDevice(51, 6)
    assert repr(device) == "device(kernel_us=50, launch_us=6, cold=(300,), busy_us=100)"
    assert time_us(FakeDevice(50, 6, (300,), 100), 1, 3) == [56.0, 56.0, 56.0]


@pytest.mark.parametrize("depth", [1, 3, 1024])
@pytest.mark.parametrize(("kernels", "kernel_us", "launch_us"), [(8, 3.0, 6.0), (8, 20.0, 6.0), (1, 5000.0, 6.0)])
def test_the_queue_agrees_with_the_launch_queue_of_chapter_01(kernels, kernel_us, launch_us, depth):
    queue = Queue(depth)
    device_us = queue.run(kernels, kernel_us, launch_us)
    queue.synchronize()
    other = run_queue([Work("k", "gemm", kernel_us, launch_us)] * kernels, depth=depth)
    assert queue.now == pytest.approx(other.wall_us)
    assert device_us == pytest.approx(other.device[-1].end_us - other.device[0].begin_us)


def test_a_full_queue_lets_the_host_wait():
    many = simulated.timed(simulated.NO_SYNC, 1000.0, 400, 1.0, 3, 60, random.Random(0))
    few = simulated.timed(simulated.NO_SYNC, 1000.0, 1, 1.0, 3, 60, random.Random(0))
    assert max(few) < 20 and max(many) > 900


# --- the panel -------------------------------------------------------------------------------------------------------


def test_three_timers_on_one_workload(timers):
    assert timers.settings["timer"] == ch02.NO_SYNC and timers.gate.state == "asking"
    timers.gate.commit("launch")
    blind = ran(timers)
    assert "That is what came out" in timers.gate.said.value
    assert blind.values["truth_us"] == 5006.0 and blind.values["median_us"] < 10
    good = ran(timers, timer=ch02.SYNC)
    events = ran(timers, timer=ch02.EVENTS)
    assert abs(good.values["median_us"] / 5006 - 1) < 0.02 and abs(events.values["median_us"] / 5000 - 1) < 0.02
    assert panel.changed(good, blind) == "The work is the same; only where the clock is read is another."
    names = next(trace for trace in timers.figure.data if trace.name == "median, with p10 to p90").y
    assert len(names) == 3


def test_warm_up_and_profiler(timers):
    cold = ran(timers, timer=ch02.SYNC, work_us=1000)
    warm = ran(timers, warmup=3)
    assert cold.values["first_us"] > 5 * warm.values["first_us"] and "not warm yet" in cold.summary
    assert "shorter" in panel.changed(warm, cold)
    many = ran(timers, kernels=400)
    watched = ran(timers, profiler=True)
    assert watched.values["median_us"] > 1.5 * many.values["median_us"] and "the profiler adds 5 µs" in watched.summary
    assert "profiler_us" in timers.settings and "profiler's notes" in panel.changed(watched, many)
    assert ran(timers, profiler=False, n=20).data["place"] == list(range(1, 21))
    same = ran(timers)
    assert same.data == timers.runs[-2].data  # seeded: the same settings say the same


def test_equal_things_in_three_orders(timers):
    blocks = ran(timers, source=DRIFTING, order="A A … B B")
    same = ran(timers, order="A B A B")
    turned = ran(timers, order="A B B A")
    assert blocks.values["ratio"] > same.values["ratio"] > 1.05 > turned.values["ratio"]
    assert "That is wrong" in blocks.summary and "That is wrong" in same.summary and "That is right" in turned.summary
    assert "only the order" in panel.changed(turned, same)
    still = ran(timers, order="A A … B B", drift=0)
    assert "no difference shown" in still.summary


@pytest.mark.parametrize("rounds", [2, 4, 6])
def test_the_turned_order_is_the_exercise_s(rounds):
    assert simulated.turns_of("A B B A", rounds) == rotation(["A", "B"], rounds)


def test_recorded_samples_are_the_recording_s(timers):
    source = next(s for s in timers.sources if s.kind == "RECORDED")
    run = ran(timers, source=source.label, model="smollm2-135m", backend="TRITON_ATTN", mode="FULL", batch=1, n=20,
              context=512)  # fmt: skip
    row, _ = newest("FULL", model="smollm2-135m", backend="TRITON_ATTN", batch=1, context=512)
    assert run.data["samples_us"] == [1e3 * ms for ms in row.samples_ms[:20]]
    assert run.values["events_us"] == row.device_us and run.values["launching_us"] == row.phases_us["launch"]
    assert "the host is done long before the device is" in run.summary and "profiler" not in timers.settings
    eager = ran(timers, mode="NONE")
    assert "the device waits for the host" in eager.summary


def test_a_recorded_profiler_can_be_switched_once_there_is_one():
    """A synthetic entry beside the shipped rows."""
    (steps,) = [e.recording for e in library().of("steps") if e.name == "h200.json.gz"]
    control = SimpleNamespace(plain_us=(10.0,) * 6, profiled_us=(15.0,) * 6)
    row = SimpleNamespace(model="smollm2-135m", backend="TRITON_ATTN", compile="NONE", batch=1, context=512,
                          timeline=SimpleNamespace(mode="NONE"), control=control)  # fmt: skip
    entry = SimpleNamespace(provenance=steps.provenance, recording=SimpleNamespace(rows=[row]))
    source = recorded.RecordedSamples("H200", [steps], [entry])
    asked = {"model": "smollm2-135m", "backend": "TRITON_ATTN", "mode": "NONE", "batch": 1, "n": 50}
    assert [one.name for one in source.controls(asked)][-1] == "profiler"
    assert source.controls({**asked, "batch": 2})[-1].name == "n"
    assert source.run({**asked, "profiler": True}, Context()).values["median_us"] == 15.0
    assert source.run({**asked, "profiler": False}, Context()).values["median_us"] == 10.0
    with pytest.raises(LabkitError):
        source.run({**asked, "batch": 3}, Context())


def test_live_on_a_cpu(timers):
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    source = timers.sources[0]
    assert source.kind == "LIVE"
    run = ran(timers, source=source.label, side=16, warmup=1, n=7)
    assert len(run.data["samples_us"]) == 7 and min(run.data["samples_us"]) > 0 and "timer" not in timers.settings
    watched = ran(timers, profiler=True, warmup=0)
    assert "profiler" in watched.values["what"] and "because" in watched.summary
    assert torch.get_num_threads() == threads


def test_stop_keeps_what_was_taken():
    pressed = []
    stop = Context(should_stop=lambda: len(pressed) >= 3)
    assert len(live.take(lambda: pressed.append(1), ch02.SYNC, 0, 50, "cpu", stop)) == 3
    assert live.take(lambda: None, ch02.SYNC, 0, 50, "cpu", Context(should_stop=lambda: True)) == []


def test_on_a_gpu_there_is_a_timer_to_choose():
    """Only the controls and words: the measurement itself was never run on a GPU."""
    assert [one.name for one in live.ProductSource("NVIDIA H200").controls({})][0] == "timer"
    assert "launching only" in live._summary("x", [6.0] * 5, ch02.NO_SYNC, 0)


def test_wrong_values_are_moved_or_refused(timers):
    timers.set(n=10_000)
    assert timers.settings["n"] == 200
    with pytest.raises(ConfigError):
        timers.set(timer="by ear")
    with pytest.raises(ConfigError):
        timers.set(source="H100")


# --- cards -----------------------------------------------------------------------------------------------------------


def test_the_cards():
    assert "1.5 times the speed" in ch02.myths().html and "does not hold" in ch02.myths().html
    assert repr(ch02.try_rotation(lambda *args: ...)) == "orders: write rotation first"
    assert repr(ch02.try_rotation(rotation)) == "orders: 4 tried"
    assert ch02.is_shown([10.0, 10.1] * 10, [20.0, 20.1] * 10) and not ch02.is_shown([10.0, 10.1], [10.1, 10.0])


def test_verdict_of_what_labkit_says_is_clear():
    a, b = [100.0 + i % 3 for i in range(20)], [150.0 + i % 3 for i in range(20)]
    assert verdict(a, b)[2] and ch02.is_shown(a, b) and not verdict(a, a)[2] and not ch02.is_shown(a, a)


def test_the_real_panel_has_clocks_and_the_drifting_machine(worker):
    shown = ch02.real_panel(worker=worker, redraw=True, refresh_s=0)
    assert [source.kind for source in shown.sources][-2:] == ["RECORDED", "SIMULATED"] and shown.gate is None
