"""Chapter 03: exercises that check, a panel that measures, looks up and computes, and a limit that tells bug from "
"rounding."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from labkit.figures.points import runs_drawn
from labkit.figures.same_math import Ways, look, same_math_figure
from labkit.lab import ch03, progress
from labkit.lab.ch03 import attention, cards, contenders, memory
from labkit.lab.ch03.exercises import MERGE
from labkit.lab.ch03.live import LiveAttention, gpu_us, lengths_up_to
from labkit.lab.ch03.outcome import Curve, outcome, sentence
from labkit.lab.ch03.panel import GATE, attention_panel, figure
from labkit.lab.ch03.recorded import ABSENT, recorded_sources
from labkit.lab.ch03.simulated import FormulaSource
from labkit.lab.hook_points import HOOKS
from labkit.lab.panel import figure_equals_data
from labkit.lab.prove import prove
from labkit.lab.runs import Context, simulated
from labkit.lab.worker import Worker
from labkit.measure.attention import AttentionRecording, AttentionRow
from labkit.measure.library import SHIPPED, Entry
from labkit.measure.peak import highest, peak_bytes
from labkit.measure.stats import summary
from tests.lab.fakes import recording as made_elsewhere


@pytest.mark.parametrize("exercise", ch03.chapter.exercises, ids=lambda e: e.id)
def test_its_checker_checks(exercise):
    prove(exercise)


def test_the_merge_that_passes_is_the_engines_own():
    for args in (c.args for c in MERGE.all_cases()):
        for a, b in zip(MERGE.solution(*args), HOOKS["merge"].own()(*args), strict=True):
            np.testing.assert_allclose(a, b)


@pytest.mark.parametrize("quiz", ch03.chapter.quizzes, ids=lambda q: q.id)
def test_its_questions_have_one_right_answer(quiz):
    with progress.paused():
        assert "right" in repr(quiz.answer(quiz.right)) and "not this one" in repr(quiz.answer((quiz.right + 1) % 3))
    assert {q.kind for q in ch03.chapter.quizzes} == {"recap", "transfer", "self-check"}


# --- the two ways of the chapter -------------------------------------------------------------------------------------


def dense(q, k, v):
    """Independent of both: one query at a time, in float64."""
    out = np.empty_like(q, dtype=np.float64)
    for h in range(q.shape[0]):
        for i in range(q.shape[1]):
            scores = k[h, : i + 1].astype(np.float64) @ q[h, i].astype(np.float64) / math.sqrt(q.shape[2])
            weights = np.exp(scores - scores.max())
            out[h, i] = weights / weights.sum() @ v[h, : i + 1]
    return out


@pytest.mark.parametrize("length", [1, 5, 64, 65, 150])
def test_naive_tiled_and_their_imitations_are_attention(length):
    q, k, v = np.random.default_rng(length).standard_normal((3, 2, length, 8), np.float32)
    expected = dense(q, k, v)
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    for out in (
        attention.naive(*tensors).numpy(), attention.tiled(*tensors).numpy(), attention.exact(*tensors).numpy(),
        attention.emulated("naive", q, k, v, "float32"), attention.emulated("tiled", q, k, v, "float32"),
        attention.exact_numpy(q, k, v),
    ):  # fmt: skip
        np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rounding_is_torchs(dtype):
    x = np.random.default_rng(0).standard_normal(1000, np.float32) * np.float32(10)
    x[:3] = 0.0, 1.00390625, 1.01171875  # zero, and two ties of bfloat16
    expected = torch.from_numpy(x).to(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(attention.rounded(x, dtype), expected)


def test_every_contender_of_a_cpu_computes_the_same():
    q, k, v = (torch.randn(4, 100, 64, generator=torch.Generator().manual_seed(i)) for i in range(3))
    served = LiveAttention("").contenders("float32")
    assert {"naive", "tiled", "SDPA math", "SDPA flash", "TORCH_SDPA"} <= {one.key for one in served}
    for one in served:
        torch.testing.assert_close(contenders.call(one, q, k, v)(), attention.naive(q, k, v), atol=2e-6, rtol=1e-5)


# --- memory ----------------------------------------------------------------------------------------------------------


def test_the_highest_running_sum_is_the_peak():
    assert highest([10, 20, -10, 5, -25]) == 30 and highest([]) == 0 and highest([-5, 3]) == 0


def test_a_cpus_peak_counts_what_was_given_back_again():
    def work():
        a = torch.ones(1000, dtype=torch.float32)
        b = a + a
        del a
        return b * 2

    held = peak_bytes(work)
    assert held is not None and held == pytest.approx(8000, rel=0.1)


def test_scores_grow_with_the_square_and_the_rest_with_the_length():
    lengths = [1024, 2048]
    naive = [memory.naive_bytes(n, 4, 64, 2) for n in lengths]
    tiled = [memory.tiled_bytes(n, 4, 64, 2) for n in lengths]
    assert tiled[1] == 2 * tiled[0] and naive[0] == 4 * 1024 * 1024 * 2 + 4 * 1024 * 64 * 2
    assert memory.growth(lengths, tiled) == pytest.approx(1) and 1.9 < memory.growth(lengths, naive) < 2
    assert math.isnan(memory.growth([1], [2.0]))


# --- sources ---------------------------------------------------------------------------------------------------------


def live_run(**settings):
    asked = {"backend": "naive", "dtype": "bfloat16", "length": 256, "heads": 1, **settings}
    return LiveAttention("").run(asked, Context())


def test_live_compares_memory_and_bits():
    naive, tiled, flash = (live_run(backend=b) for b in ("naive", "tiled", "SDPA flash"))
    assert naive.values["same_pct"] is None and 0 < tiled.values["same_pct"] < 100
    assert tiled.values["error"] <= tiled.values["tolerance"] and flash.values["error"] <= flash.values["tolerance"]
    assert flash.values["mib"] < naive.values["mib"] and naive.values["growth"] > flash.values["growth"]
    assert naive.data["lengths"] == lengths_up_to(256) == [64, 128, 256] and len(naive.data["errors"]) == 1
    assert str(naive.provenance.kind) == "LIVE" and "bits" in tiled.summary


def test_live_stops_between_lengths_and_keeps_what_ran():
    asked = iter([False, True, True])
    context = Context(should_stop=lambda: next(asked))
    out = LiveAttention("").run({"backend": "naive", "dtype": "float32", "length": 256, "heads": 1}, context)
    assert out.stopped and out.data["lengths"] == [64]


def test_the_engines_backends_are_timed_by_the_bench():
    us = gpu_us(contenders.find("TORCH_SDPA"), None, "float32", 2, 16, device="cpu")
    assert len(us) == 15 and min(us) > 0


def row(context, kind="prefill", backend="FLASH_ATTN", **changes):
    lens = (1,) if kind == "decode" else (context,)
    samples = tuple(round(context * 0.731 + (i % 7) * 0.113, 3) for i in range(50))
    found = summary(samples)
    base = dict(
        kind=kind, backend=backend, backend_version=None, dtype="bfloat16", batch=1, context=context, query_lens=lens,
        kv_lens=(context,), num_heads=32, num_kv_heads=8, head_size=128, block_size=16, kv="rotated", sets=4,
        launch="graph", p10_us=round(found.p10, 3), p50_us=round(found.p50, 3), p90_us=round(found.p90, 3), n=50,
        samples_us=samples, gb_s=1.0, tflop_s=2.0, prepare_us=3.0,
    )  # fmt: skip
    return AttentionRow(**{**base, **changes})


def entry(*rows, origin=SHIPPED):
    made = dataclasses.replace(made_elsewhere([]).provenance, primed=True)
    return Entry(
        "attention.json.gz", origin, "attention", AttentionRecording(made, rows, {"XFORMERS": "not installed"})
    )


def test_recorded_calls_appear_by_themselves_and_are_looked_up():
    rows = [
        row(1024), row(8192), row(8192, launch="eager"), row(1024, kv="warm", sets=1), row(1024, call="bare"),
        row(512, kind="decode"), row(512, kind="decode", num_splits_asked=4, num_splits=4),
    ]  # fmt: skip
    (source,), absent = recorded_sources([entry(*rows)])
    assert absent == [] and source.label == "NVIDIA H200" and len(source.rows) == 4
    values = {c.name: c.value for c in source.controls({})}
    assert values == {"kind": "prefill", "backend": "FLASH_ATTN", "batch": 1}
    out = source.run(values, Context())
    assert out.data["lengths"] == [1024, 8192] and out.data["time_us"] == [rows[0].p50_us, rows[1].p50_us]
    assert out.values["mib"] is None and out.values["error"] is None and str(out.provenance.kind) == "RECORDED"
    assert out.measurement.samples == tuple(us / 1e3 for us in rows[1].samples_us)
    assert "XFORMERS (not installed)" in " ".join(source.explain(values))
    (own,), _ = recorded_sources([entry(*rows, origin="yours: a.json")])
    assert own.label == "NVIDIA H200 · yours: a.json"


def test_without_a_recording_one_sentence_says_so():
    assert recorded_sources([]) == ([], [ABSENT])


# --- the panel -------------------------------------------------------------------------------------------------------


@pytest.fixture
def panel():
    worker = Worker()
    yield attention_panel(worker=worker, redraw=True, refresh_s=0)
    worker.close()


def test_the_panel_runs_live_and_by_formula_and_draws_what_it_holds(panel):
    panel.set(source="LIVE", length=256, heads=1)
    for backend in ("naive", "tiled"):
        panel.set(backend=backend)
        panel.run(wait=True, timeout=60)
    assert figure_equals_data(panel) and "computed in another way" in panel.changed
    assert "fewer than 90 of 100" in panel.gate.said.value
    panel.set(source="SIMULATED", backend="naive", length=65_536, heads=32)
    panel.run(wait=True, timeout=60)
    assert panel.rows[-1]["mib"] == pytest.approx(memory.naive_bytes(65_536, 32, 64, 2) / 2**20)
    panel.set(dtype="float32")
    panel.run(wait=True, timeout=60)
    assert "the error follows the number format" in panel.changed
    panel.set(length=131_072)
    panel.run(wait=True, timeout=60)
    assert "2 times the length is 4 times the scores" in panel.changed and figure_equals_data(panel)


def test_a_backend_that_is_not_there_is_refused(panel):
    from labkit.errors import ConfigError

    with pytest.raises(ConfigError, match="offers nothing of that name"):
        panel.set(source="LIVE", backend="FLASH_ATTN 3")


def test_the_gate_waits_for_a_run_that_tells(panel):
    panel.set(source="SIMULATED", backend="naive")
    panel.run(wait=True, timeout=60)
    assert GATE.right_answer(panel.runs) is None
    panel.set(backend="tiled")
    panel.run(wait=True, timeout=60)
    assert GATE.right_answer(panel.runs) == "no"


def test_every_control_of_the_formula_changes_its_result():
    source = FormulaSource()
    base = {c.name: c.value for c in source.controls({})}
    first = source.run(base, Context())
    for name, value in {"backend": "tiled", "dtype": "float32", "length": 1024, "heads": 1}.items():
        assert source.run({**base, name: value}, Context()).data != first.data, name


def test_runs_without_time_errors_or_anything_are_drawn():
    made = figure([], [])
    assert list(made.data) == []
    bare = Ways(1, "naive", "SIMULATED", "float32", [64, 128], None, [1.0, 4.0], None, None)
    timed = Ways(2, "FLASH_ATTN 3", "RECORDED", "bfloat16", [64, 128], [1.0, 2.0], None, None, None)
    shown = same_math_figure([bare, timed])
    assert runs_drawn(shown.data) == {1, 2} and [t.marker.symbol for t in shown.data] == ["circle-open", "diamond-open"]
    assert "errors were not recorded" in [a.text for a in shown.layout.annotations]
    looks = [look(one.key) for one in contenders.ALL if not one.key.startswith("FLASH_ATTN")]
    assert len({(dash, marker) for _, dash, marker in looks}) == len(looks), "told apart without colour"


@pytest.mark.parametrize(("held", "says"), [([1, 4], "L^2.0"), ([1, 2.5], "a mask for example"), ([1, 2], "a tile")])
def test_the_sentence_says_why_memory_grows(held, says):
    curve = Curve("x", "float32", 1, [64, 128], held=[int(h * 2**20) for h in held])
    assert says in sentence(curve)
    out = outcome(curve, simulated("x"))
    assert out.quantity == "memory" and out.measurement.samples == (held[1],)


# --- cards -----------------------------------------------------------------------------------------------------------


def test_a_right_rule_accepts_rounding_and_rejects_a_bug(panel):
    panel.set(source="SIMULATED", backend="tiled")
    panel.run(wait=True, timeout=60)
    card = cards.judged(ch03.chapter.exercise("3").solution, panel.runs)
    assert repr(card) == "judged: 1 runs" and "<td>correct</td><td>wrong</td>" in card.html
    assert "write is_correct first" in repr(cards.judged(..., panel.runs))


def test_the_myths_take_the_readers_own_runs(panel):
    assert "SIMULATED: " in ch03.myths([]).html
    panel.set(source="SIMULATED", backend="tiled")
    panel.run(wait=True, timeout=60)
    html = ch03.myths(panel.runs).html
    assert "grows as L^1.0" in html and html.count("does not hold") == 1
    assert "tiled" in ch03.note_score(panel.runs).html


def test_a_merge_in_the_engine_keeps_the_text_and_a_wrong_one_does_not(monkeypatch):
    from labkit.lab import plugged_run
    from labkit.lab.engine_room import EngineRoom

    room = EngineRoom()
    monkeypatch.setattr(plugged_run, "shared_room", lambda: room)
    for module in (plugged_run, cards):
        monkeypatch.setattr(module, "has_default_model", lambda: False)
    right = ch03.plug_in(MERGE.solution)
    assert right.same_text and right.plugged.calls["merge"] > 0
    found = {name: ch03.plug_in_wrong(name) for name in cards.WRONG}
    assert found["mean"].same_text is False
    assert all(one.plugged.sockets["merge"].used and not one.plugged.ok for one in found.values())
    room.close()
