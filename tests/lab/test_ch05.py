"""Chapter 05: its checkers check, its panel says what the selector says, every reason has a column."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from labkit.attention import registry
from labkit.attention.interface import AttentionCGSupport, Availability, check_capabilities
from labkit.attention.selector import candidates, select
from labkit.config import CUDAGraphMode
from labkit.errors import BackendError, ConfigError
from labkit.figures.selection import FAILS, NOT_ASKED, PASSES, selection_figure
from labkit.graphs.modes import resolve
from labkit.lab import ch05, progress
from labkit.lab.ch05 import cards, exercises, question, sources
from labkit.lab.panel import figure_equals_data
from labkit.lab.prove import prove
from labkit.lab.runs import simulated

OPEN = {
    "gpu": "H200", "dtype": "bfloat16", "head": 128, "family": "MHA", "kv": "auto", "page": 0, "window": False,
    "cap": False, "sinks": False, "option": "none", "limits": "large", "requested": "automatic",
    "mode": "FULL_AND_PIECEWISE", "compiled": False, "installed": "everything",
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    monkeypatch.delenv("LABKIT_SOLUTIONS", raising=False)


@pytest.mark.parametrize("exercise", ch05.chapter.exercises, ids=lambda exercise: exercise.id)
def test_its_checkers_check(exercise):
    prove(exercise)


def questions() -> list[dict]:
    """A few hundred positions of the panel, those of every single control among them."""
    rng = random.Random(5)
    offered = {control.name: control for control in sources.RulesSource().controls(OPEN)}
    values = {name: [v for _, v in getattr(c, "options", [("", False), ("", True)])] for name, c in offered.items()}
    assert set(values) == set(OPEN)
    single = [OPEN | {name: value} for name, found in values.items() for value in found]
    pairs = [
        OPEN | {"gpu": gpu, "option": option} for gpu, option in itertools.product(values["gpu"], values["option"])
    ]
    mixed = [{name: rng.choice(found) for name, found in values.items()} for _ in range(80)]
    return single + pairs + mixed


def test_the_panel_says_what_the_selector_says_and_every_reason_has_a_column():
    by_words = {"GPU", "family", "head size", "window", "soft cap", "sinks"}
    seen, made_by = set(), simulated("rules")
    for values in questions():
        platform = question.platform_of(values["gpu"])
        gone = sources.INSTALLED[values["installed"]]
        available = {name: Availability(False, sources._NOT_THERE) for name in gone} or None
        answer = question.ask(values, platform, available)
        by_name = None if values["requested"] == "automatic" else values["requested"]
        try:
            spec, own = question.spec_of(values), values["page"] != 0
            expected = select(spec, platform, by_name, available, block_size_is_set=own).selected
        except BackendError:
            expected = None
        assert (answer.taken.name if answer.taken else None) == expected, values
        data = question.matrix(values, answer, available)
        for candidate, line in zip(answer.found, data["cells"], strict=True):
            failed = {c for c, cell in zip(data["columns"], line, strict=True) if cell == FAILS}
            columns = {question.column_of(r, (available or {}).get(candidate.name)) for r in candidate.reasons}
            assert failed == columns and bool(failed) != candidate.usable
            if candidate.name not in gone:  # nothing else is a matter of what loads
                assert "loads" not in columns, (values, candidate)
            seen |= columns & by_words
            asked = dict(zip(data["columns"], line, strict=True))
            assert (asked["window"] == NOT_ASKED) == (not values["window"])
            assert asked["dtype"] in (PASSES, FAILS)
        made = sources.outcome(values, platform, available, made_by)
        assert made.summary and json.dumps({**made.values, **made.data})
        assert len(made.notes) >= len(registry.names(spec.family))
    assert seen == by_words


def test_the_panel_runs_in_every_source():
    panel = ch05.selection_panel(redraw=True)
    panel.run(wait=True, timeout=60)
    assert panel.runs[-1].values["backend"] == "FLASH_ATTN" and figure_equals_data(panel)
    assert panel.gate.gate.right_answer(panel.runs) is None  # another machine tells nothing
    panel.set(gpu="T4")
    panel.run(wait=True, timeout=60)
    assert panel.gate.gate.right_answer(panel.runs) == "TORCH_SDPA" and figure_equals_data(panel)
    assert "refuse now" in panel.changed and "sm_80" in panel.summary
    panel.set(gpu="RTX 5090", requested="XFORMERS", sinks=True)
    panel.run(wait=True, timeout=60)
    assert panel.runs[-1].values["backend"] == "refused" and "Nothing takes its place" in panel.summary
    assert figure_equals_data(panel)
    live = [source for source in panel.sources if source.kind == "LIVE"]
    assert len(live) == 1
    panel.set(source=live[0].label, requested="automatic", sinks=False, dtype="float32", limits="small")
    panel.run(wait=True, timeout=60)
    run = panel.runs[-1]
    assert run.values["backend"] == "TORCH_SDPA" and run.provenance.kind == "LIVE" and figure_equals_data(panel)
    assert any("ModuleNotFoundError" in note for note in run.notes)
    assert panel.changed


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({}, {"gpu": "B200"}, "the order of this machine is another one"),
        (
            {"gpu": "T4", "dtype": "float16"},
            {"gpu": "T4", "dtype": "float16", "limits": "small"},
            "same backend has tier",
        ),
        ({"gpu": "A100"}, {"gpu": "A100", "mode": "FULL"}, "same tier leaves"),
        ({}, {"page": 64}, "The result stays FLASH_ATTN"),
        ({}, {"requested": "TRITON_ATTN"}, "asked for otherwise"),
    ],
)
def test_why_it_changed(before, after, said):
    panel = ch05.selection_panel(redraw=True)
    for values in (before, after):
        panel.set(**values)
        panel.run(wait=True, timeout=60)
    assert said in panel.changed


def test_wrong_values_of_controls():
    panel = ch05.selection_panel(redraw=True)
    for values in ({"gpu": "H900"}, {"head": 100}, {"requested": "FLASHATTN"}, {"window": 3}, {"nothing": 1}):
        with pytest.raises(ConfigError):
            panel.set(**values)


def test_the_figure():
    assert not selection_figure(None).data
    panel = ch05.selection_panel(redraw=True)
    panel.set(gpu="T4")
    panel.run(wait=True, timeout=60)
    heat, tiers = panel.figure.data[0], panel.figure.data[-1]
    assert list(heat.y)[2] == "<b>▶ TORCH_SDPA</b>" and list(tiers.marker.symbol).count("star") == 1
    assert {sign for row in heat.text for sign in row} >= {"✓", "✗", "·"}
    assert list(tiers.marker.symbol)[0] == "circle-open" and list(tiers.x)[2] == 0
    assert all("→" in text for row, cells in zip(heat.customdata, heat.z, strict=True)
               for text, cell in zip(row, cells, strict=True) if cell == FAILS)  # fmt: skip


# --- the exercises' solutions are the engine's own rules -------------------------------------------------------------


def test_why_not_agrees_with_the_engine_wherever_it_looks():
    """What the exercise leaves out is not asked for here: then there is a reason exactly where the engine has one."""
    for values in questions():
        spec = question.spec_of(
            {**values, "family": "MHA", "kv": "auto", "cap": False, "sinks": False, "option": "none"}
        )
        platform = question.platform_of(values["gpu"])
        for name in registry.BACKENDS:
            cap = registry.load(name).capabilities
            mine, own = exercises.why_not(cap, spec, platform), check_capabilities(cap, spec, platform)
            assert len(mine) == len(own), (name, mine, own)


def test_pick_agrees_with_the_selector():
    for gpu, dtype in itertools.product((*registry.GPUS, "cpu"), ("bfloat16", "float32")):
        values = OPEN | {"gpu": gpu, "dtype": dtype}
        platform, spec = question.platform_of(gpu), question.spec_of(values)
        reasons = {c.name: list(map(str, c.reasons)) for c in candidates(spec, platform, None, False)}
        for by_name in (None, *registry.BACKENDS):
            try:
                expected = select(spec, platform, by_name, None, block_size_is_set=False).selected
            except BackendError:
                with pytest.raises(ValueError):
                    exercises.pick(registry.priority(platform), reasons, by_name)
            else:
                assert exercises.pick(registry.priority(platform), reasons, by_name) == expected


def test_mode_for_agrees_with_the_engine():
    for mode, tiers, compiled in itertools.product(
        CUDAGraphMode, itertools.product(AttentionCGSupport, repeat=2), (True, False)
    ):
        names = [tier.name for tier in tiers]
        try:
            expected = resolve(mode, min(tiers), compiled, breakable=not compiled)[0].name
        except ConfigError:
            with pytest.raises(ValueError):
                exercises.mode_for(mode.name, names, compiled)
        else:
            assert exercises.mode_for(mode.name, names, compiled) == expected


# --- cards -----------------------------------------------------------------------------------------------------------


def test_six_choices_by_name():
    right = [cards.override(i)[0] for i in range(6)]
    assert right == ["works", "raises", "works", "raises", "works", "raises"]
    assert repr(ch05.overrides(["?"] * 6)) == repr(ch05.overrides(["works"] * 5)) == "overrides: NOT ATTEMPTED"
    assert repr(ch05.overrides(right)) == "overrides: 6 of 6"
    assert repr(ch05.overrides(["works"] * 6)) == "overrides: 3 of 6" and "sm_80" in ch05.overrides(right).html


def test_claims_and_scoreboard():
    html = ch05.myths().html
    assert "RTX 5090: FLASH_ATTN (FA2)" in html and "B200: FLASHINFER" in html and "10 of 13" in html
    assert repr(ch05.note_score()) == "scoreboard: 2 rows"


def test_plugged_into_the_engine(monkeypatch):
    from labkit.lab.plugged_run import run_plugged

    def tiny(**more):
        return run_plugged(**{**more, "model": "tiny-llama", "max_tokens": 2})

    monkeypatch.setattr(cards, "run_plugged", tiny)
    good = ch05.plug_in(exercises.why_not)
    assert good.plugged.ok and good.same_text and "all as the engine's own" in repr(good)
    bad = ch05.plug_in_wrong()
    assert bad.ours is None and "the engine refused" in repr(bad) and "head_size" in bad.html
    assert ch05.plug_in(exercises.why_not).same_text  # the engine goes on as before
    assert "NOT ATTEMPTED" in repr(ch05.plug_in(...))


def test_its_questions_and_card():
    for card, quiz in ((ch05.recap(), "recap"), (ch05.transfer(), "transfer"), (ch05.self_check(), "self")):
        card.answer(card.quiz.right)
        assert card.text.endswith("right") and progress.load().quizzes[f"05.{quiz}"]["right"]
    assert repr(ch05.card()) == "chapter 05 Who gets picked, and why not the others: 40 minutes"
    assert set(ch05.chapter.items) == {"A2", "B5"}
    names = ["why_not", "pick", "mode_for"]
    tasks = [ch05.task_why_not(), ch05.task_pick(), ch05.task_mode_for()]
    checks = [ch05.check_why_not(...), ch05.check_pick(...), ch05.check_mode_for(...)]
    assert [repr(t) for t in tasks] == [f"05.{i} {n}: task" for i, n in enumerate(names, 1)]
    assert [repr(c) for c in checks] == [f"05.{i} {n}: NOT ATTEMPTED" for i, n in enumerate(names, 1)]
