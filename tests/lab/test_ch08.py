"""Chapter 08: its checks, its panel in every source, its cards. Times are never asserted."""

from __future__ import annotations

import dataclasses
import random

import pytest

from labkit.errors import ConfigError
from labkit.graphs import sizes as rules
from labkit.graphs.advisor import TRAFFIC, advise, fit
from labkit.lab import ch08
from labkit.lab.ch08 import exercises, lists, panel, recorded
from labkit.lab.panel import figure_equals_data
from labkit.lab.prove import prove
from labkit.lab.runs import Context
from labkit.lab.worker import Worker
from labkit.measure.library import library
from labkit.measure.recordings import Captured

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
def sizes(worker):
    return ch08.sizes_panel(worker=worker, redraw=True, refresh_s=0)


def ran(panel_, **values):
    panel_.set(**values)
    panel_.run(wait=True, timeout=TIMEOUT)
    assert figure_equals_data(panel_)
    return panel_.runs[-1]


@pytest.mark.parametrize("exercise", ch08.chapter.exercises, ids=lambda e: e.id)
def test_its_checkers_check(exercise):
    prove(exercise)


@pytest.mark.parametrize("quiz", ch08.chapter.quizzes, ids=lambda q: q.id)
def test_its_questions_have_one_answer(quiz):
    for i, option in enumerate(quiz.options):
        assert ("right" in repr(quiz.answer(i))) == option.right


def test_the_solutions_are_the_engine_s_own_rules():
    rng = random.Random(3)
    for _ in range(300):
        seqs, budget, cap = rng.randint(1, 600), rng.randint(1, 9000), rng.choice((256, 512, 1024))
        ours = rules.default_capture_sizes(seqs, budget, cap=cap)
        assert exercises.default_capture_sizes(seqs, budget, cap) == ours
        n = rng.randint(1, 1100)
        assert exercises.pad_to(n, ours) == rules.pad_to(n, ours)


def test_the_best_list_pads_as_little_as_the_advisor_s():
    rng = random.Random(4)
    for _ in range(60):
        traffic = {n: rng.randint(1, 30) for n in rng.sample(range(1, 70), rng.randint(1, 8))}
        k = rng.randint(1, 6)
        mine = exercises.best_sizes(traffic, k)
        assert exercises.padded_tokens(traffic, mine) == advise(traffic, k).padded_tokens
        assert len(mine) == min(k, len(traffic))


def test_a_pool_is_as_large_as_the_largest_graph_only_from_the_top_down():
    some = rules.default_capture_sizes(64, 8192)
    assert exercises.pool_mib([[s] for s in reversed(some)]) == max(some)
    assert exercises.pool_mib([[s] for s in some]) == sum(some)


# --- the panel -------------------------------------------------------------------------------------------------------


def test_it_opens_on_the_question_and_the_gate_knows_its_answer(sizes):
    assert sizes.gate.state == "asking" and sizes.settings["max_num_seqs"] == 256
    sizes.gate.commit("16 eager")
    few = ran(sizes, max_num_seqs=13)
    assert few.values["runs_13"] == "13" and "Result" not in sizes.gate.said.value
    run = ran(sizes, max_num_seqs=256)
    assert "That is what came out" in sizes.gate.said.value
    assert run.values["sizes"] == 51 and (run.values["runs_13"], run.values["runs_520"]) == ("16", "eager")
    found = fit(TRAFFIC["chat"], rules.default_capture_sizes(256, 8192))
    assert run.values["waste_pct"] == pytest.approx(100 * found.waste) and run.values["misses"] == 0
    assert run.data["runs_as"][12] == 16 and run.values["capture_s"] is None


def test_every_list_and_every_control_does_something(sizes):
    default = ran(sizes)
    powers = ran(sizes, list="powers of two")
    assert "max_num_seqs" not in powers.settings and powers.values["padded"] > default.values["padded"]
    assert "less close" in panel.changed(powers, default)
    small = ran(sizes, max_size=64, traffic="bursty")
    assert small.values["misses"] > 0 and "Other traffic" in panel.changed(small, powers)
    large = ran(sizes, max_size=256)
    assert large.values["misses"] == 0 and "compare padding with care" in panel.changed(large, small)
    best = ran(sizes, list="advice", k=4)
    assert best.values["sizes"] == 4
    more = ran(sizes, k=8)
    assert more.values["padded"] < best.values["padded"]
    assert more.values["waste_pct"] == pytest.approx(more.data["advice_waste_pct"][more.data["advice_sizes"].index(8)])
    typed = ran(sizes, list="custom", sizes="8, 256")
    assert typed.data["size_list"] == [8, 256]
    own = ran(sizes, traffic="typed", steps="13, 100:20, 520")
    assert own.data["step_tokens"] == [13, 100, 520] and own.data["step_counts"] == [1, 20, 1]
    assert own.values["misses"] == 1 and own.data["eager_tokens"] == [520]
    above = ran(sizes, sizes="1, 2", steps="4, 5")
    assert above.values["misses"] == 2 and above.data["advice_sizes"] == [] and "No step" in above.summary


def test_what_cannot_be_read_is_named(sizes):
    for text, named in (("13, x", "'x'"), ("0", "'0'"), ("", "nothing"), ("4:0", "'4:0'")):
        with pytest.raises(ConfigError, match=named):
            lists.parse_traffic(text)
    with pytest.raises(ConfigError, match="empty"):
        lists.some_sizes("", 512)
    with pytest.raises(ConfigError):
        sizes.set(list="all of them")
    sizes.set(max_num_seqs=5000)
    assert sizes.settings["max_num_seqs"] == 1024


def test_recorded_steps_are_the_recording_s(sizes):
    source = next(s for s in sizes.sources if s.kind == "RECORDED")
    run = ran(sizes, source=source.label, list="custom", recorded_sizes="8, 60", traffic="typed", steps="5:3, 33, 64:2")
    (steps,) = [e.recording for e in library().of("steps") if e.provenance == run.provenance]
    assert len({row.size for row in steps.rows if row.mode == "FULL"}) == 35
    assert any(row.mode == "NONE" for row in steps.rows), "of those with most sizes, one that has eager steps too"
    where = {"model": run.settings["model"], "backend": run.settings["backend"], "context": 512}
    eight, sixty_four = (steps.find(**where, batch=n, requested_mode="FULL").p50_ms for n in (8, 64))
    assert run.data["size_list"] == [8, 64] and any("moved up" in note for note in run.notes)
    assert run.values["step_ms"] == pytest.approx((3 * eight + 3 * sixty_four) / 6)
    assert run.values["capture_s"] > 0 and recorded.NO_CAPTURES not in run.notes, "captures ship too"
    known = ran(sizes, recorded_sizes="8", steps="8, 32")
    eager = steps.find(**where, batch=32, requested_mode="NONE").p50_ms
    assert known.values["step_ms"] == pytest.approx((eight + eager) / 2) and known.values["misses"] == 1
    unknown = ran(sizes, steps="8, 33")
    assert unknown.values["step_ms"] is None and any("No mean time" in note for note in unknown.notes)
    assert ran(sizes, list="powers of two", traffic="chat").values["sizes"] == 9
    assert ran(sizes, list="advice", k=4).values["sizes"] <= 4


def test_captures_are_used_once_they_are_recorded():
    """Synthetic: the shipped steps with made-up captures of two sizes."""
    (steps,) = [e.recording for e in library().of("steps") if e.name == "h200.json.gz"]
    took = [
        Captured("smollm2-135m", "TRITON_ATTN", "NONE", "FULL_DECODE_ONLY", "FULL", s, 1, 40.0 + s, 2.0)
        for s in (8, 64)
    ]
    source = recorded.RecordedSizes("H200", [dataclasses.replace(steps, captures=tuple(took))])
    asked = {"model": "smollm2-135m", "backend": "TRITON_ATTN", "list": "custom", "recorded_sizes": (8, 64),
             "traffic": "typed", "steps": ((5, 1),)}  # fmt: skip
    out = source.run(asked, Context())
    assert out.values["capture_s"] == pytest.approx(0.152) and out.values["mib"] == 4.0
    assert source.run({**asked, "recorded_sizes": (8, 16)}, Context()).values["capture_s"] is None


def test_live_on_a_cpu_counts_what_the_rule_says(sizes):
    pytest.importorskip("torch")
    source = sizes.sources[0]
    assert source.kind == "LIVE"
    source.room = type(source.room)()
    try:
        run = ran(
            sizes, source=source.label, model="tiny-llama", seqs=6, list="custom", live_sizes="2, 4", traffic="chat"
        )
        assert f"counted {run.values['padded']} padded tokens" in run.summary
        assert run.values["capture_s"] is None and any("Emulated" in note for note in run.notes)
        full = ran(sizes, list="default")
        assert 6 in full.data["size_list"] and full.values["misses"] == 0
        assert len(full.outcome.measurement.samples) == sum(full.data["step_counts"])
    finally:
        source.room.close()


# --- the cards -------------------------------------------------------------------------------------------------------


def test_a_pad_to_drives_the_engine_and_a_wasteful_one_shows_in_its_report():
    pytest.importorskip("torch")
    from labkit.lab.ch08.cards import PROMPTS, SETTINGS
    from labkit.lab.engine_room import EngineRoom
    from labkit.lab.plugged_run import run_plugged

    room = EngineRoom()
    asked = {"prompts": PROMPTS, "max_tokens": 4, "model": "tiny-llama", "room": room, "settings": SETTINGS}
    try:
        right = run_plugged(pad_to=exercises.pad_to, **asked)
        assert right.same_text and right.plugged.ok
        wrong = run_plugged(pad_to=exercises.to_the_largest, trust=True, **asked)
        assert wrong.same_text and "FULL 8" in wrong.ours.ways and "FULL 8" not in wrong.alone.ways
        own = run_plugged(default_capture_sizes=exercises.default_capture_sizes, prompts=PROMPTS, max_tokens=3,
                          model="tiny-llama", room=room, settings={"cudagraph_capture_sizes": None})  # fmt: skip
        assert own.plugged.ok and own.same_text
    finally:
        room.close()


def test_its_cards(sizes):
    run = ran(sizes)
    assert repr(ch08.card()) == "chapter 08 Sizes, padding and memory: 45 minutes"
    assert "write best_sizes first" in repr(ch08.against_advisor(exercises.pad_to))
    assert repr(ch08.against_advisor(exercises.best_sizes)) == "against the advisor: 5 lists"
    assert "write pool_mib first" in repr(ch08.orders(exercises.pad_to))
    assert "10,503" in ch08.orders(exercises.pool_mib).html
    html = ch08.myths([run]).html
    assert "51 sizes with max_num_seqs = 256" in html and "count 67" in html and "as 13 with" in html
    assert repr(ch08.note_score([run])) == "scoreboard: 0 rows"
    source = next(s for s in sizes.sources if s.kind == "RECORDED")
    assert repr(ch08.note_score([run, ran(sizes, source=source.label)])) == "scoreboard: 1 row"
    assert len(ch08.questions().children) == 2
