"""Chapter 10: the tape beside the engine's own rules, the walk, its checks and cards. No time is asserted."""

from __future__ import annotations

import dataclasses

import pytest

from labkit.attention.interface import AttentionCGSupport as Tier
from labkit.config import CUDAGraphMode as Mode
from labkit.errors import ConfigError, LabkitError
from labkit.figures.replay import tape_figure
from labkit.lab import ch10, run_plugged
from labkit.lab.ch10 import costs, panel, rules, tape
from labkit.lab.ch10.exercises import dispatch, kinds, launches_per_step, pieces
from labkit.lab.ch10.stream import Batch, parse
from labkit.lab.ch10.walk import STOPS, Stop, excerpt
from labkit.lab.hook_points import HOOKS
from labkit.lab.panel import figure_equals_data
from labkit.lab.prove import prove
from labkit.lab.worker import Worker
from labkit.measure.library import library

TIMEOUT = 120


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
def shown(worker):
    return ch10.tape_panel(worker=worker, redraw=True, refresh_s=0)


def ran(panel_, **values):
    panel_.set(**values)
    panel_.run(wait=True, timeout=TIMEOUT)
    assert figure_equals_data(panel_)
    return panel_.runs[-1]


@pytest.mark.parametrize("exercise", ch10.chapter.exercises, ids=lambda e: e.id)
def test_its_checkers_check(exercise):
    prove(exercise)


@pytest.mark.parametrize("quiz", ch10.chapter.quizzes, ids=lambda q: q.id)
def test_its_questions_have_one_answer(quiz):
    for i, option in enumerate(quiz.options):
        assert ("right" in repr(quiz.answer(i))) == option.right


def test_the_solutions_are_the_engine_s_own_rules():
    """`pieces` and `dispatch` against the hook points' answers, which were written by somebody else."""
    for exercise, name in ((ch10.chapter.exercise("10.1"), "pieces"), (ch10.chapter.exercise("10.3"), "dispatch")):
        own = HOOKS[name].own()
        for one in exercise.all_cases():
            assert exercise.solution(*one.args) == own(*one.args)
    assert pieces(["a", "attention", "b"], ["attention"]) == [["a"], ["attention"], ["b"]]
    assert kinds([["a"], ["b"], ["b"], ["c"], ["b"]]) == [0, 1, 1, 2, 1]
    assert [launches_per_step(way, 32, 8, 2) for way in rules.WAYS] == [328, 97, 1]


# --- the stream ------------------------------------------------------------------------------------------------------


def test_batches_are_read_as_they_are_written():
    found = parse("4d, 3d + 20p,600p, 1d+2d+5p+6p", 256, 8192)
    assert found == (Batch(4), Batch(3, (20,)), Batch(0, (600,)), Batch(3, (5, 6)))
    assert [str(b) for b in found] == ["4d", "3d+20p", "600p", "3d+5p+6p"]
    assert found[3].num_tokens == 14 and found[3].num_reqs == 5 and not found[3].is_uniform_decode


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4d, x, 3q", "'x' is no batch; '3q' is no batch"),
        ("", "has no batch"),
        ("0d", "'0d' is no batch"),
        ("9d", "9d has 9 requests, at most 8"),
        ("70p", "70p has 70 tokens, at most 64"),
        (", ".join(["1d"] * 30), "these are 30 steps, at most 24"),
    ],
)
def test_what_is_no_stream_is_refused(text, said):
    with pytest.raises(ConfigError, match=said.replace("+", r"\+")):
        parse(text, 8, 64)


# --- the rules -------------------------------------------------------------------------------------------------------


def answer(batches, mode, tier, cut, **more):
    given = {"layers": 32, "max_num_seqs": 256, "max_tokens": 8192, "largest": 512, **more}
    return rules.answer(parse(batches, 256, 8192), mode, tier, cut, **given)


@pytest.mark.parametrize(
    ("mode", "tier", "cut", "decode", "mixed"),
    [
        ("FULL_AND_PIECEWISE", Tier.UNIFORM_BATCH, "compile", "FULL", "PIECEWISE"),
        ("FULL_AND_PIECEWISE", Tier.UNIFORM_BATCH, "none", "FULL", "NONE"),
        ("FULL_AND_PIECEWISE", Tier.NEVER, "compile", "PIECEWISE", "PIECEWISE"),
        ("FULL_AND_PIECEWISE", Tier.ALWAYS, "whole", "FULL", "FULL"),
        ("FULL", Tier.ALWAYS, "compile", "FULL", "FULL"),
        ("FULL", Tier.UNIFORM_BATCH, "compile", "FULL", "PIECEWISE"),
        ("FULL_DECODE_ONLY", Tier.UNIFORM_SINGLE_TOKEN_DECODE, "break", "FULL", "NONE"),
        ("PIECEWISE", Tier.ALWAYS, "break", "PIECEWISE", "PIECEWISE"),
        ("PIECEWISE", Tier.ALWAYS, "none", "NONE", "NONE"),
        ("NONE", Tier.ALWAYS, "compile", "NONE", "NONE"),
    ],
)  # fmt: skip
def test_which_graph_a_batch_gets(mode, tier, cut, decode, mixed):
    found = answer("13d, 13d+20p, 600p", mode, tier, cut)
    assert [(step.way, step.size) for step in found.steps] == [
        (decode, 13 if decode == "NONE" else 16), (mixed, 33 if mixed == "NONE" else 40), ("NONE", 600),
    ]  # fmt: skip
    leaves = {"decode graph": decode == "FULL" and found.mode.separate_routine()}
    assert (found.steps[0].leaf == "decode graph") == leaves["decode graph"]
    assert "run eagerly" in found.steps[2].why


def test_full_with_a_backend_that_is_never_captured_is_refused():
    with pytest.raises(ConfigError, match="cannot be captured"):
        answer("1d", "FULL", Tier.NEVER, "compile")


def test_launches_are_those_that_were_counted():
    """The recorded steps of SmolLM2: 30 layers, Triton's attention in two kernels at batch 1."""
    (steps,) = [e.recording for e in library().of("steps") if e.name == "h200.json.gz"]
    for asked, way in (("NONE", "NONE"), ("FULL", "FULL")):
        row = steps.find(model="smollm2-135m", backend="TRITON_ATTN", batch=1, context=512, requested_mode=asked)
        assert rules.launches(way, 30) == row.launches
    assert rules.launches("PIECEWISE", 30) == 31 + 60 + 2
    from labkit.lab.ch09.fusion import recorded

    compiled = recorded()["smollm2-135m"].after  # without attention and the cache write
    assert rules.launches("NONE", 30, "compile") == compiled + 30 * (1 + rules.ATTENTION) + rules.AFTER
    assert rules.launches("PIECEWISE", 30, "compile") - rules.launches("PIECEWISE", 30) == 30  # the cache writes


def test_pieces_and_kinds():
    assert rules.kinds(1, "compile") == [1, 3] and rules.kinds(4, "break") == [1, 2, 2, 2, 3]
    assert rules.kinds(32, "whole") == [0] == rules.kinds(32, "none")


# --- the panel -------------------------------------------------------------------------------------------------------


def test_it_opens_on_the_question_of_the_gate(shown):
    assert shown.gate.state == "asking" and shown.settings["tier"] is Tier.UNIFORM_BATCH
    shown.gate.commit((33, 3, "PIECEWISE"))
    run = ran(shown)
    assert "That is what came out" in shown.gate.said.value and run.kind == "SIMULATED"
    assert run.values["tape"].split()[4] == "PIECES·120" and run.values["pieces"] == 33
    assert "2 are above the largest size, 512" in run.summary


def test_other_settings_do_not_answer_the_gate(shown):
    shown.gate.commit((32, 32, "PIECEWISE"))
    for values in ({"layers": 31}, {"layers": 32, "tier": Tier.ALWAYS}, {"tier": Tier.UNIFORM_BATCH, "cut": "none"}):
        ran(shown, **values)
        assert "Result" not in shown.gate.said.value
    ran(shown, cut="compile", stream="decodes only, more and more")
    assert "Result" not in shown.gate.said.value
    ran(shown, stream="one long prompt in chunks")
    assert "It came out otherwise" in shown.gate.said.value


def test_every_control_of_the_rules_does_something(shown):
    base = ran(shown)
    for name, value in (
        ("mode", "NONE"), ("tier", Tier.NEVER), ("cut", "none"), ("layers", 4), ("largest", 1024),
        ("stream", "decodes only, more and more"),
    ):  # fmt: skip
        assert ran(shown, **{name: value}).data != base.data, name
        shown.set(**{name: base.settings[name]})
    own = ran(shown, stream=tape.OWN, typed="2d, 2d+3p")
    assert own.data["labels"] == ["1: 2d", "2: 2d+3p"]


def test_a_change_is_told_by_the_steps_that_run_otherwise(shown):
    first = ran(shown)
    second = ran(shown, tier=Tier.NEVER)
    said = panel.changed(second, first)
    assert "The mode in force was FULL_AND_PIECEWISE and is PIECEWISE." in said and "1: 13d" in said
    assert any(note.startswith("To keep FULL_AND_PIECEWISE: Take an attention_backend") for note in second.notes)
    assert "launches before" in said


def test_the_figure_counts_steps_at_the_leaves(shown):
    run = ran(shown)
    leaves = next(trace for trace in shown.figure.data if trace.name == "leaves")
    assert list(leaves.customdata) == [5, 1, 2] == run.data["leaf_counts"]
    assert any("PIECEWISE: 1 step" in text for text in leaves.text)
    signs = [trace.text for trace in shown.figure.data if trace.type == "bar" and trace.yaxis == "y"]
    assert sum(len(one) for one in signs) == 33 + 32
    assert len(tape_figure(None).data) == 0


def test_a_stream_that_does_not_fit_is_said_in_the_panel(shown):
    with pytest.raises(ConfigError, match="'4x' is no batch"):
        shown.set(stream=tape.OWN, typed="4x")
    shown.set(typed="4d")
    with pytest.raises(ConfigError):
        shown.set(mode="HALF")


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL", "NONE"])
def test_the_engine_runs_what_the_rules_say(shown, mode):
    pytest.importorskip("torch")
    run = ran(shown, source=shown.sources[0].label, mode=mode)
    assert run.kind == "LIVE" and run.values["agree"] == len(run.values["ran_modes"]) == 8
    assert run.values["ran"] == run.values["tape"]
    if mode == "FULL":  # the CPU's backend cannot capture mixed batches
        assert run.values["mode"] == "FULL_DECODE_ONLY"
    own = ran(shown, stream=tape.OWN, typed_here="3d+9p, 64p", top=16)
    assert own.values["ran_sizes"] == ([16, 64] if mode == "FULL_AND_PIECEWISE" else [12, 64])


def test_a_difference_between_rules_and_engine_would_be_seen(shown, monkeypatch):
    pytest.importorskip("torch")
    real = tape.one_step
    monkeypatch.setattr(
        tape, "one_step", lambda llm, batch: dataclasses.replace(real(llm, batch), mode="NONE", size=99)
    )
    run = ran(shown, source=shown.sources[0].label, mode="PIECEWISE", stream="decodes only, more and more")
    assert run.values["agree"] == 0 and "the rules say PIECEWISE 1, the engine ran NONE 99" in run.notes[0]


# --- costs -----------------------------------------------------------------------------------------------------------


def test_the_share_of_a_full_graph_s_gain(worker):
    assert costs.gain_share({"NONE": (5.0, 1), "PIECEWISE": (2.0, 1), "FULL": (1.0, 1)}) == 75.0
    assert costs.gain_share({"NONE": (5.0, 1), "FULL": (1.0, 1)}) is None
    assert costs.gain_share({"NONE": (1.0, 1), "PIECEWISE": (2.0, 1), "FULL": (1.5, 1)}) is None
    shown = ch10.cost_panel(worker=worker, redraw=True, refresh_s=0)
    recorded = ran(shown, model="smollm2-135m", backend="TRITON_ATTN", batch=1)
    assert recorded.kind == "RECORDED" and recorded.values["full_launches"] == 3
    if recorded.values["piecewise_ms"] is None:
        assert "PIECEWISE was not recorded for this step." in recorded.summary
    one = ran(shown, source="SIMULATED", model="smollm2-135m", batch=1)
    other = ran(shown, model="llama-3.1-8b")
    assert not one.notes and "More than 100 %" in other.notes[0] and other.values["share"] > 100
    assert 0 < one.values["share"] < 100 and one.values["share"] != other.values["share"]
    assert "of FULL's gain" in panel.cost_changed(other, one) and not panel.cost_changed(one, recorded)


def test_piecewise_rows_appear_by_themselves():
    (steps,) = [e.recording for e in library().of("steps") if e.name == "h200.json.gz"]
    full = [r for r in steps.rows if r.mode == "FULL" and r.size == r.batch]
    more = [dataclasses.replace(row, mode="PIECEWISE", requested_mode="PIECEWISE") for row in full]
    both = dataclasses.replace(steps, rows=(*steps.rows, *more))
    source = costs.RecordedModes("H200", [steps, both])
    assert source.has_piecewise and not costs.RecordedModes("H200", [steps]).has_piecewise
    out = source.run({"model": "smollm2-135m", "backend": "TRITON_ATTN", "batch": 1}, None)
    assert out.data["ways"] == ["FULL", "PIECEWISE", "NONE"] and out.values["share"] == 100.0
    with pytest.raises(LabkitError, match="was not recorded"):
        source.run({"model": "smollm2-135m", "backend": "TRITON_ATTN", "batch": 7}, None)


def test_without_a_recording_it_says_so(monkeypatch):
    monkeypatch.setattr(costs, "library", lambda: type("L", (), {"of": lambda self, table: ()})())
    assert costs.recorded_sources() == ([], ["No RECORDED source: no recording has one step in two modes."])


# --- the walk, the plug-in, the cards --------------------------------------------------------------------------------


@pytest.mark.parametrize("part", STOPS)
def test_the_walk_shows_lines_that_are_there(part):
    card = ch10.walk(part)
    assert card.html.count("<pre") == len(STOPS[part])
    for stop in STOPS[part]:
        first, lines = excerpt(stop)
        assert first > 1 and 1 <= len(lines.splitlines()) <= 9, stop.name
        assert stop.begin in lines and stop.end in lines


def test_a_stop_that_is_gone_is_an_error():
    for stop in (Stop("graphs/pieces.py", "nobody", "x"), Stop("graphs/pieces.py", "split", "x", "no such line")):
        with pytest.raises(ConfigError, match="is not there"):
            excerpt(stop)
    with pytest.raises(ConfigError, match="no such part"):
        ch10.walk("whatever")


def test_dispatch_runs_in_the_engine_and_a_wrong_one_shows():
    pytest.importorskip("torch")
    good = run_plugged(dispatch=dispatch, model="tiny-llama", settings=ch10.PLUG_SETTINGS)
    assert good.plugged.ok and good.same_text
    bad = run_plugged(dispatch=ch10.exact_only, trust=True, model="tiny-llama", settings=ch10.PLUG_SETTINGS)
    assert bad.same_text and bad.ours.ways != bad.alone.ways and "differ from the engine's own" in repr(bad)
    assert "NONE" in bad.ours.ways


def test_the_cards():
    assert repr(ch10.myths()) == "myth check: 5 claims" and "33 pieces" in ch10.myths().html
    assert ch10.launches_line() == "NONE 325, PIECEWISE 99, FULL 3"
    assert repr(ch10.note_score([])) == "scoreboard: 1 row" and "SIMULATED" in ch10.note_score([]).html


def test_modes_on_offer_are_all_there_are(shown):
    assert [value for _, value in shown.sources[-1].controls({})[0].options] == [m.name for m in Mode]
