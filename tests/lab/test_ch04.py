"""Chapter 04: exercises that check, a panel that plans, looks up and proves, splits in the engine's own plan."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from labkit.attention.kernels.tiles import MAX_SPLITS
from labkit.bench.attention import AttentionShape
from labkit.figures.points import runs_drawn
from labkit.figures.splits import SplitRun, splits_figure
from labkit.lab import ch04, progress
from labkit.lab.ch04 import exercises, live
from labkit.lab.ch04.panel import GATE, figure, splits_panel
from labkit.lab.ch04.recorded import ABSENT, chip_of, recorded_sources
from labkit.lab.ch04.simulated import RulesSource
from labkit.lab.hook_points import HOOKS
from labkit.lab.panel import figure_equals_data
from labkit.lab.prove import prove
from labkit.lab.runs import Context
from labkit.lab.worker import Worker
from labkit.measure.attention import AttentionRecording, AttentionRow
from labkit.measure.library import SHIPPED, Entry
from labkit.measure.stats import summary
from tests.lab.fakes import recording as made_elsewhere


@pytest.mark.parametrize("exercise", ch04.chapter.exercises, ids=lambda e: e.id)
def test_its_checker_checks(exercise):
    prove(exercise)


def test_the_choice_that_passes_is_the_engines_own():
    own, rng = HOOKS["choose_num_splits"].own(), random.Random(0)
    assert MAX_SPLITS == 64
    for _ in range(500):
        args = (rng.randint(0, 400), rng.randint(0, 150), rng.randint(1, 40_000), rng.choice((16, 32, 64)),
                rng.choice((0, 0, rng.randint(1, 99))), rng.randint(0, 99))  # fmt: skip
        assert exercises.choose_num_splits(*args) == own(*args), args


def test_kinds_and_operations_are_the_benchs():
    for query_lens, kv_lens in exercises.BATCHES.values():
        shape = AttentionShape(tuple(query_lens), tuple(kv_lens))
        kind, _ = exercises.regime(query_lens, kv_lens, 32, 8, 128, exercises.RIDGE)
        flops, moved = exercises.work(query_lens, kv_lens, 32, 8, 128)
        assert kind == shape.kind and flops == shape.flops
        assert moved == shape.kv_bytes + 2 * 2 * sum(query_lens) * 32 * 128
    found = {exercises.regime(*lens, 32, 8, 128, exercises.RIDGE) for lens in exercises.BATCHES.values()}
    assert len(found) == 5, "the six batches are of many kinds"


@pytest.mark.parametrize("quiz", ch04.chapter.quizzes, ids=lambda q: q.id)
def test_its_questions_have_one_right_answer(quiz):
    with progress.paused():
        assert "right" in repr(quiz.answer(quiz.right)) and "not this one" in repr(quiz.answer((quiz.right + 1) % 3))


# --- sources ---------------------------------------------------------------------------------------------------------


def test_every_control_of_the_rules_changes_its_result():
    source = RulesSource()
    base = {c.name: c.value for c in source.controls({})}
    first = source.run(base, Context())
    others = {"gpu": "A100", "kv_len": 2048, "q_len": 64, "batch": 4, "heads": (32, 32), "num_splits": 0}
    assert set(others) == set(base)
    for name, value in others.items():
        found = source.run({**base, name: value}, Context())
        assert (found.data, found.values) != (first.data, first.values) and found.summary != first.summary, name


def test_more_splits_than_tiles_are_said_to_be_refused():
    source = RulesSource()
    base = {c.name: c.value for c in source.controls({})}
    out = source.run({**base, "kv_len": 128, "num_splits": 9}, Context())
    assert out.values["splits"] == 2 and "9 splits were asked for" in " ".join(out.notes)


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 64])
def test_split_attention_is_attention(splits):
    q, k, v = live._tensors(2, 2, 512)
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(live.split_attention(q, k, v, splits).double(), expected, atol=1e-6, rtol=1e-5)


def test_a_cpu_proves_that_the_result_stays():
    out = live.SplitProof().run({"kv_len": 512, "batch": 2, "kv_heads": 4, "num_splits": 8}, Context())
    assert out.values["programs"] == 2 * 4 * 8 and 0 <= max(out.data["differences"]) < 1e-6
    assert out.data["curve_splits"] == list(live.SPLITS) and out.values["share_pct"] is None


def test_a_gpus_rows_become_a_run():
    """The bench with another backend, on a CPU: what is timed is another matter, the way is the same."""
    asked = {"q_len": 1, "kv_len": 32, "batch": 2, "heads": (4, 2)}
    row = live.timed(asked, 0, "cpu", backend="TORCH_SDPA")
    rows = [dataclasses.replace(row, num_splits=n, num_splits_asked=n) for n in (4, 1)] + [row]
    out = live.bench_outcome(rows, 132, "cpu")
    assert out.data["curve_splits"] == [1, 4] and out.values["splits"] == 4
    assert out.values["programs"] == 2 * 2 * 4 and sum(out.data["sm_programs"]) == 16
    assert "by itself TORCH_SDPA takes 1" in out.summary


def row(asked, ran, us, context=2048, **changes):
    samples = tuple(round(us + (i % 7) * 0.113, 3) for i in range(50))
    found = summary(samples)
    base = dict(
        kind="decode", backend="TRITON_ATTN", backend_version=None, dtype="bfloat16", batch=1, context=context,
        query_lens=(1,), kv_lens=(context,), num_heads=32, num_kv_heads=8, head_size=128, block_size=16, kv="rotated",
        sets=4, launch="graph", p10_us=round(found.p10, 3), p50_us=round(found.p50, 3), p90_us=round(found.p90, 3),
        n=50, samples_us=samples, gb_s=1.0, tflop_s=2.0, prepare_us=3.0, num_splits_asked=asked, num_splits=ran,
    )  # fmt: skip
    return AttentionRow(**{**base, **changes})


def test_recorded_splits_appear_by_themselves_and_are_looked_up():
    rows = [
        row(0, 32, 21.7), row(1, 1, 97.3), row(16, 16, 30.1), row(64, 32, 21.9), row(16, 16, 44.0, launch="eager"),
        row(0, 1, 11.0, context=512), row(1, 1, 99.9, kv="warm", sets=1),
    ]  # fmt: skip
    made = dataclasses.replace(made_elsewhere([]).provenance, primed=True)
    entry = Entry("a.json.gz", SHIPPED, "attention", AttentionRecording(made, tuple(rows)))
    (source,), absent = recorded_sources([entry])
    controls = {c.name: c for c in source.controls({})}
    assert absent == [] and list(controls["kv_len"].points) == [2048], "512 has no numbers of splits"
    assert list(controls["num_splits"].points) == [0, 1, 16, 64]
    asked = {"backend": "TRITON_ATTN", "batch": 1, "kv_len": 2048}
    out = source.run({**asked, "num_splits": 1}, Context())
    assert out.data["curve_splits"] == [1, 16, 32]
    assert out.data["curve_us"] == [rows[1].p50_us, rows[2].p50_us, rows[0].p50_us]
    assert (out.values["programs"], out.values["sms"], out.values["best"]) == (8, 132, 32)
    assert "by itself TRITON_ATTN takes 32" in out.summary and str(out.provenance.kind) == "RECORDED"
    assert source.run({**asked, "num_splits": 16}, Context()).values["us"] == rows[2].p50_us


def test_without_a_recording_one_sentence_says_so():
    assert recorded_sources([]) == ([], [ABSENT])
    assert chip_of("NVIDIA H200").sms == 132 and chip_of("NVIDIA H2000 X") is None and chip_of(None) is None


# --- the panel -------------------------------------------------------------------------------------------------------


@pytest.fixture
def panel():
    worker = Worker()
    yield splits_panel(worker=worker, redraw=True, refresh_s=0)
    worker.close()


def test_the_panel_plans_and_proves_and_draws_what_it_holds(panel):
    assert panel.current.kind == "SIMULATED"
    panel.predict(5.5)
    panel.run(wait=True, timeout=60)
    assert panel.rows[0]["programs"] == 8 and "✓ That is what came out" in panel.gate.said.value
    panel.set(num_splits=0)
    panel.run(wait=True, timeout=60)
    assert "6 % of the multiprocessors had something to do, and 100 % have now" in panel.changed
    panel.set(num_splits=1, kv_len=65_536)
    panel.run(wait=True, timeout=60)
    panel.set(kv_len=131_072)
    panel.run(wait=True, timeout=60)
    assert "the length alone starts no program" in panel.changed and figure_equals_data(panel)
    panel.set(source="LIVE", kv_len=512)
    panel.run(wait=True, timeout=60)
    assert figure_equals_data(panel) and "rounding of" in panel.summary


def test_the_gate_waits_for_the_call_that_it_names(panel):
    panel.set(batch=3)
    panel.run(wait=True, timeout=60)
    assert GATE.right_answer(panel.runs) is None
    panel.set(batch=1)
    panel.run(wait=True, timeout=60)
    assert GATE.right_answer(panel.runs) == pytest.approx(100 * 8 / 132)


def test_a_chunk_is_not_longer_than_its_kv(panel):
    panel.set(q_len=2048)
    panel.set(kv_len=128)
    assert panel.settings["q_len"] == 128


def test_squares_are_numbered_and_runs_are_told_apart_without_colour():
    assert list(figure([], []).data) == []
    runs = [
        SplitRun(i, kind, "c", [0, 1], [0, 0], programs, [1, 2], [9.0, 5.0], 2, 5.0)
        for i, (kind, programs) in enumerate([("SIMULATED", [1, 0]), ("LIVE", []), ("RECORDED", [2, 2])], 1)
    ]
    shown = splits_figure(runs)
    assert runs_drawn(shown.data) == {1, 2, 3}
    assert list(shown.data[0].text) == ["2", "2"] and list(splits_figure(runs[:1]).data[0].text) == ["1", ""]
    looks = {(t.line.dash, t.marker.symbol) for t in shown.data if t.mode == "lines+markers"}
    assert len(looks) == 3
    assert "a CPU has no multiprocessors" in [a.text for a in splits_figure(runs[1:2]).layout.annotations]


# --- cards -----------------------------------------------------------------------------------------------------------


def test_six_batches_by_the_learners_own_function():
    html = ch04.regimes(exercises.regime).html
    assert html.count("<td>compute</td>") == 2 and html.count("<td>memory</td>") == 4
    assert "write regime first" in repr(ch04.regimes(...))


def test_one_kernel_serves_three_batches():
    html = ch04.one_kernel().html
    assert html.count("paged_attention_kernel") == 3 and html.count("merge_splits_kernel") == 1


def test_the_scoreboard_has_both_ways(panel):
    for splits in (1, 0):
        panel.set(num_splits=splits)
        panel.run(wait=True, timeout=60)
    html = ch04.note_score(panel.runs).html
    assert "unsplit" in html and ch04.chapter.score in html and repr(ch04.myths()) == "myth check: 3 claims"


def test_a_choice_in_the_engine_keeps_the_plan_and_a_wrong_one_does_not(monkeypatch):
    from labkit.lab import plugged_run
    from labkit.lab.engine_room import EngineRoom

    room = EngineRoom()
    monkeypatch.setattr(plugged_run, "shared_room", lambda: room)
    right = ch04.plug_in(exercises.choose_num_splits)
    assert right.ran.same_text and right.ran.plugged.ok and right.ours.keys() == right.alone.keys() == {1, 2}
    wrong = ch04.plug_in_wrong()
    assert wrong.ran.same_text and wrong.alone.keys() == {1, 2} and wrong.ours.keys() == {1}
    assert wrong.ran.plugged.sockets["choose_num_splits"].different > 0
    room.close()
