"""Chapter 06: its checkers check, its steps are the scheduler's, its pages the pool's, its panels run everywhere."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import struct

import numpy as np
import pytest

from labkit.bench.attention import AttentionShape
from labkit.errors import ConfigError
from labkit.lab import ch06, progress
from labkit.lab.ch06 import batch, blocks, calls, cards, exercises, packing, waits
from labkit.lab.panel import figure_equals_data
from labkit.lab.prove import prove
from labkit.lab.runs import Context
from labkit.measure.attention import AttentionRecording, AttentionRow
from labkit.measure.provenance import Kind, collect
from labkit.measure.stats import summary
from labkit.paging.slot_mapping import fill_slots


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    monkeypatch.delenv("LABKIT_SOLUTIONS", raising=False)


@pytest.mark.parametrize("exercise", ch06.chapter.exercises, ids=lambda exercise: exercise.id)
def test_its_checkers_check(exercise):
    prove(exercise)


# --- a step ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("typed", ["", "0@3", "1@", "a", "3@9999", "1;;x", ", ".join(["1@2"] * 13), "1@-2"])
def test_requests_that_do_not_read(typed):
    with pytest.raises(ConfigError):
        batch.read_requests(typed)


def test_requests_that_read():
    assert batch.read_requests("1@40, 512; 3 @ 7,") == ((1, 40), (512, 0), (3, 7))
    assert batch.write_requests(batch.read_requests("1@40, 512; 3 @ 7,")) == "1@40, 512@0, 3@7"


def random_steps(n: int = 40):
    rng = random.Random(6)
    for _ in range(n):
        requests = tuple(
            (1, rng.randint(1, 60)) if rng.random() < 0.5 else (rng.randint(1, 40), rng.choice((0, 0, 7, 33)))
            for _ in range(rng.randint(1, 8))
        )
        yield requests, rng.choice((1, 4, 30, 1000)), rng.choice((4, 8, 16))


def test_a_step_agrees_with_brute_force():
    """Slots by numpy's way of the engine, positions and bounds by counting, scores by a mask."""
    for requests, budget, block_size in random_steps():
        shares, left = batch.schedule(requests, budget, block_size)
        total = sum(share.tokens for share in shares)
        assert total == min(budget, sum(new for new, _ in requests))
        wanted = dict(zip(batch.NAMES, requests, strict=False))
        assert {s.name for s in shares} | set(left) == set(wanted)
        for share in shares:
            assert share.start == wanted[share.name][1] and share.tokens + share.waits == wanted[share.name][0]
        table = np.zeros((len(shares), max(len(s.blocks) for s in shares)), dtype=np.int32)
        for row, share in enumerate(shares):
            table[row, : len(share.blocks)] = share.blocks
        slots, positions = np.zeros(total, dtype=np.int64), np.zeros(total, dtype=np.int64)
        starts, tokens = np.array([s.start for s in shares]), np.array([s.tokens for s in shares])
        fill_slots(slots, table, starts, tokens, block_size, positions)
        data = batch.packed(shares, left)
        assert [slot for share in data["slots"] for slot in share] == slots.tolist()
        assert data["positions"] == positions.tolist() and len(set(slots.tolist())) == total
        packed = exercises.pack([(s.tokens, s.start) for s in shares])
        assert packed == (data["query_start_loc"], data["positions"])
        seen = sum(int(np.tri(s.tokens, s.end, s.start, dtype=bool).sum()) for s in shares)
        found = batch.scores(shares)
        assert found["useful"] == seen
        waste = exercises.padded_waste([(s.tokens, s.start) for s in shares])
        assert waste == pytest.approx(100 * (1 - seen / found["padded"])) and 0 <= waste < 100


def test_scores_are_those_of_the_benchmark():
    shares, _ = batch.schedule(batch.read_requests(batch.EXAMPLE), 1024, 16)
    shape = AttentionShape(tuple(s.tokens for s in shares), tuple(s.end for s in shares))
    assert batch.scores(shares)["useful"] * 4 * shape.head_size * shape.num_heads == shape.flops


def test_solutions_are_the_engines_own():
    from labkit.paging import block_hash as hashing
    from labkit.paging import slot_mapping as slots

    rng = random.Random(1)
    for _ in range(50):
        size = rng.choice((4, 16))
        ids, start = rng.sample(range(1, 99), 6), rng.randint(0, 3 * size)
        args = (ids, start, rng.randint(0, 2 * size), size)
        assert exercises.slot_mapping(*args) == slots.slot_mapping(*args)
        parent, tokens = rng.choice((None, rng.randbytes(32))), [rng.randint(0, 200_000) for _ in range(size)]
        assert exercises.block_hash(parent, tokens) == hashing.block_hash(parent, tokens)
    plain = hashlib.sha256(bytes(32) + struct.pack("<2q", 5, 70_000)).digest()
    assert exercises.block_hash(None, [5, 70_000]) == plain


# --- panels ----------------------------------------------------------------------------------------------------------


def test_the_packing_panel():
    panel = ch06.packing_panel(redraw=True)
    panel.run(wait=True, timeout=60)
    assert figure_equals_data(panel) and panel.gate.gate.right_answer(panel.runs) is None  # scores tell no time
    assert panel.runs[-1].data["query_start_loc"] == [0, 1, 2, 3, 515] and "87 %" in panel.summary
    panel.set(budget=100)
    panel.run(wait=True, timeout=60)
    assert figure_equals_data(panel) and "415 tokens of D must wait" in panel.summary
    assert "515 tokens before, 100 now" in panel.changed
    panel.set(block_size=4)
    panel.run(wait=True, timeout=60)
    assert figure_equals_data(panel) and "other pages" in panel.changed
    panel.set(requests="2@5, 3@1, 4")
    panel.run(wait=True, timeout=60)
    assert panel.runs[-1].data["ways"] == ["unified", "padded"] and figure_equals_data(panel)
    with pytest.raises(ConfigError):
        panel.set(block_size=5)


def test_attention_is_timed_here():
    panel = ch06.packing_panel(redraw=True)
    panel.set(source="LIVE", requests="1@9, 1@20, 24@0", samples=10)
    panel.run(wait=True, timeout=110)
    run = panel.runs[-1]
    assert (
        figure_equals_data(panel) and run.provenance.kind == "LIVE" and run.values["verdict"] in ("one", "two", "same")
    )
    assert len(run.data["costs"]) == 3 and len(run.outcome.measurement.samples) == 10
    assert "unified, split, padded, padded, split, unified" in run.provenance.order
    assert panel.gate.gate.right_answer(panel.runs) is None  # another step than the question's


def test_what_the_gate_takes_for_an_answer():
    shares, _ = batch.schedule(batch.read_requests(batch.EXAMPLE), 1024, 16)
    made = collect("LIVE", "test", n=20, device="cpu")

    def run_of(two_us: float):
        timed = {"unified": [100.0 + i % 3 for i in range(20)], "split": [two_us + i % 3 for i in range(20)]}
        found = calls.outcome(shares, [], 16, timed, "TRITON_ATTN", made)
        return dataclasses.make_dataclass("R", ["data", "values", "kind", "source", "summary"])(
            found.data, found.values, "LIVE", "this CPU", found.summary
        )

    gate = ch06.panel.GATE
    for two_us, answer in ((160.0, "one"), (60.0, "two"), (101.0, "same")):
        run = run_of(two_us)
        assert gate.right_answer([run]) == answer and gate.explain([run]).startswith("LIVE on this CPU")
    assert "its launch" in run_of(160.0).summary and "best at" in run_of(60.0).summary
    assert "no difference shown" in run_of(101.0).summary


def test_padded_attention_is_attention(monkeypatch):
    """The rectangle that is timed computes what the mask of each request says, row by row."""
    import torch

    shares, _ = batch.schedule(batch.read_requests("1@3, 4@2, 3@0"), 64, 4)
    seen = {}

    def spy(q, k, v, attn_mask):
        seen["mask"] = attn_mask
        return q

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    calls._time_padded(shares, torch.device("cpu"), "float32", 2)
    for mask, share in zip(seen["mask"][:, 0], shares, strict=True):
        expected = np.tri(share.tokens, share.end, share.start, dtype=bool)
        assert mask[: share.tokens, : share.end].numpy().tolist() == expected.tolist()
        assert not mask[:, share.end :].any()


def test_mixed_calls_that_were_recorded(tmp_path):
    rng = random.Random(3)

    def row(split: bool) -> AttentionRow:
        us = tuple(round(20 + split + rng.random(), 3) for _ in range(50))
        spread = summary(us)
        return AttentionRow(
            "mixed", "TRITON_ATTN", None, "bfloat16", 4, 600,
            (1, 1, 1, 512), (600, 33, 90, 512), 32, 8, 128, 16,
            "rotated", 4, "eager", round(spread.p10, 3), round(spread.p50, 3), round(spread.p90, 3), 50, us,
            1.0, 1.0, 1.0,
            split_mixed_batches=split,
        )  # fmt: skip

    assert "mixed batch in one call and in two" in calls.recorded_calls()[1][0]
    made = collect("RECORDED", "test", n=50, device="cpu").replace(kind=Kind.RECORDED, gpu="Some GPU", driver="1")
    (tmp_path / "recordings").mkdir()
    AttentionRecording(made, (row(False), row(True))).save(tmp_path / "recordings" / "mixed.json.gz")
    panel = ch06.packing_panel(redraw=True)
    panel.set(source="RECORDED")
    panel.run(wait=True, timeout=60)
    run = panel.runs[-1]
    assert figure_equals_data(panel) and run.provenance.gpu == "Some GPU" and run.values["padded_us"] is None
    assert panel.gate.gate.right_answer(panel.runs) in ("one", "same")


def test_pages_by_hand():
    panel = ch06.blocks_panel(redraw=True)
    tables = []
    for moment in range(5):
        panel.set(moment=moment)
        panel.run(wait=True, timeout=60)
        assert figure_equals_data(panel)
        tables.append(panel.runs[-1].data["tables"])
    assert tables == [{"A": [1, 2, 3]}, {"A": [1, 2, 3], "B": [1, 2, 4]}, {"B": [1, 2, 4]}, {}, {"C": [1, 2, 4]}]
    assert [run.values["found"] for run in panel.runs] == [0, 8, 8, 8, 16]
    assert [run.values["cached"] for run in panel.runs] == [0, 0, 0, 2, 0]
    assert panel.runs[1].data["owners"][:5] == ["", "AB", "AB", "A", "B"]
    assert "can still be found" in panel.words.changed(panel.runs[3], panel.runs[2])
    panel.set(caching=False)
    panel.run(wait=True, timeout=60)
    assert panel.runs[-1].values["found"] == 0 and "not looked up" in panel.summary


def test_pages_in_many_positions():
    source = blocks.BlocksSource()
    rng = random.Random(2)
    for _ in range(60):
        values = {"block_size": rng.choice((2, 4, 8)), "a": rng.randint(2, 16), "b": rng.randint(2, 16),
                  "caching": rng.random() < 0.8, "moment": rng.randrange(5)}  # fmt: skip
        values["common"] = rng.randint(0, min(values["a"], values["b"]))
        found = source.run(values, Context())
        states, row = found.data["states"], found.values
        assert states.count("in use") == row["in_use"] and states.count("cached") == row["cached"]
        assert states.count("blank") == row["blank"] and states[0] == "null"
        for block, owner in enumerate(found.data["owners"]):
            assert len(owner) == found.data["ref_counts"][block]


def test_who_waits_for_whom():
    panel = ch06.waits_panel(redraw=True)
    panel.set(source="SIMULATED", prompt=1000, decodes=4, chunks="100, 250", fixed_ms=5.0, token_us=10.0)
    panel.run(wait=True, timeout=60)
    assert figure_equals_data(panel) and panel.gate.gate.right_answer(panel.runs) == "longer"
    rows = {row.scheduling: row for row in waits.recording_of(panel.runs[-1].data).rows}
    assert list(rows) == ["prefill_first", "whole", "chunk 250", "chunk 100"]
    # By hand: 5 ms and 10 µs a token; the prompt beside 4 decodes, or alone and then they.
    assert rows["whole"].worst_itl_ms == pytest.approx(15.04)
    assert rows["prefill_first"].worst_itl_ms == pytest.approx(15.0 + 5.04)
    assert rows["chunk 100"].worst_itl_ms == pytest.approx(6.04)
    assert rows["chunk 100"].p50_ttft_ms == pytest.approx(10 * 6.04)
    assert len(rows["chunk 100"].during) == 10 and len(rows["prefill_first"].during) == 1
    panel.set(chunks="1000")
    panel.run(wait=True, timeout=60)
    assert "Larger chunks" in panel.changed and panel.gate.gate.right_answer(panel.runs) == "same"
    for typed in ("", "5", "a", "8, 16, 32, 64"):
        with pytest.raises(ConfigError):
            waits.read_chunks(typed)


def test_waits_of_the_engine_and_of_a_recording(tmp_path):
    panel = ch06.waits_panel(redraw=True)
    panel.set(source="LIVE", prompt=96, decodes=2, chunks="32", runs=2)
    panel.run(wait=True, timeout=110)
    run = panel.runs[-1]
    assert figure_equals_data(panel) and run.provenance.kind == "LIVE"
    recording = waits.recording_of(run.data)
    assert [row.scheduling for row in recording.rows] == ["prefill_first", "whole", "chunk 32"]
    assert len(recording.rows[2].during) == 3 and recording.rows[0].model == waits.MODEL
    llm = panel.sources[0].room.llm
    assert llm.config.prefill_first is False and llm.config.long_prefill_token_threshold == 0
    source = waits.RecordedSource("Some GPU", [recording])
    values = {control.name: control.value for control in source.controls({})}
    found = source.run(values, Context())
    assert found.values == run.values and found.summary == run.summary


# --- cards -----------------------------------------------------------------------------------------------------------


def test_plugged_into_the_engine(monkeypatch):
    from labkit.lab.plugged_run import run_plugged

    def tiny(**more):
        return run_plugged(**{**more, "model": "tiny-llama", "max_tokens": 3})

    monkeypatch.setattr(cards, "run_plugged", tiny)
    assert ch06.plug_in_slots(exercises.slot_mapping).plugged.ok
    wrong = ch06.plug_in_wrong_slots()
    assert wrong.same_text is False and "other text" in repr(wrong)
    good, new = ch06.plug_in_hash(exercises.block_hash), ch06.plug_in_wrong_hash()
    assert good.plugged.ok and good.ours.cached_tokens > 0
    assert new.same_text and new.ours.cached_tokens == 0 and new.alone.cached_tokens == good.ours.cached_tokens


def test_claims_scoreboard_questions_and_card():
    panel = ch06.packing_panel(redraw=True)
    panel.run(wait=True, timeout=60)
    card = ch06.claims_and_score(panel.runs)
    assert repr(card) == "myth check: 4 claims; scoreboard: 0 rows" and "87 % of the scores" in card.html
    for one, quiz in ((ch06.recap(), "recap"), (ch06.transfer(), "transfer"), (ch06.self_check(), "self")):
        one.answer(one.quiz.right)
        assert one.text.endswith("right") and progress.load().quizzes[f"06.{quiz}"]["right"]
    assert len(ch06.questions().children) == 2
    assert repr(ch06.card()) == "chapter 06 One batch, two shapes: 45 minutes"
    assert set(ch06.chapter.items) == {"A4", "B4"}
    tasks = [ch06.task_pack(), ch06.task_slot_mapping(), ch06.task_block_hash(), ch06.task_padded_waste()]
    checks = [
        ch06.check_pack(...),
        ch06.check_slot_mapping(...),
        ch06.check_block_hash(...),
        ch06.check_padded_waste(...),
    ]
    names = ["pack", "slot_mapping", "block_hash", "padded_waste"]
    assert [repr(t) for t in tasks] == [f"06.{i} {n}: task" for i, n in enumerate(names, 1)]
    assert [repr(c) for c in checks] == [f"06.{i} {n}: NOT ATTEMPTED" for i, n in enumerate(names, 1)]
    assert packing.is_mixed(batch.schedule(((1, 4), (5, 0)), 9, 4)[0])
