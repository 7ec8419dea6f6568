"""Chapter 11: its panels in every source, its checks, the search, the capstone. Asserts no time that a clock took."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

from labkit.config import CUDAGraphMode
from labkit.errors import ConfigError, LabkitError
from labkit.figures.bill import Bill, bill_figure
from labkit.figures.points import first_difference
from labkit.figures.switchboard import Test as OneTest
from labkit.figures.switchboard import switchboard_figure
from labkit.lab import ch11, progress
from labkit.lab.ch11 import (
    capstone,
    cards,
    exercises,
    panel,
    parts,
    recorded,
    simulated,
    step_model,
    vllm_command,
    ways,
)
from labkit.lab.ch11.outcome import REQUESTS, paid_back
from labkit.lab.engine_room import EngineRoom
from labkit.lab.exercises import check
from labkit.lab.items import ITEMS
from labkit.lab.panel import Panel, figure_equals_data
from labkit.lab.prove import catches, prove
from labkit.lab.runs import Context
from labkit.lab.worker import Worker
from labkit.measure.library import Entry, library
from labkit.measure.recordings import Setup
from labkit.vllm_options import table, to_vllm

TIMEOUT = 120


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
def bill(worker):
    return ch11.bill_panel(worker=worker, redraw=True, refresh_s=0)


@pytest.fixture
def board(worker):
    return ch11.switchboard(worker=worker, redraw=True, refresh_s=0)


def ran(panel_, **values):
    panel_.set(**values)
    panel_.run(wait=True, timeout=TIMEOUT)
    assert figure_equals_data(panel_)
    return panel_.runs[-1]


@pytest.mark.parametrize("exercise", ch11.chapter.exercises, ids=lambda e: e.id)
def test_its_checkers_check(exercise):
    prove(exercise)


@pytest.mark.parametrize("quiz", ch11.chapter.quizzes, ids=lambda q: q.id)
def test_its_questions_have_one_answer(quiz):
    for i, option in enumerate(quiz.options):
        assert ("right" in repr(quiz.answer(i))) == option.right


def test_it_serves_the_items_that_are_its_own():
    assert {item.key for item in ITEMS if 11 in item.chapters} <= set(ch11.chapter.items)


# --- the bill --------------------------------------------------------------------------------------------------------


def test_a_way_asks_for_what_the_engine_s_rules_say():
    asked = {way.key: (way.mode.name, way.compile) for way in ways.WAYS}
    assert asked == {
        "eager": ("NONE", "NONE"), "O0": ("NONE", "NONE"), "O1": ("PIECEWISE", "VLLM_COMPILE"),
        "O2": ("FULL_AND_PIECEWISE", "VLLM_COMPILE"), "O3": ("FULL_AND_PIECEWISE", "VLLM_COMPILE"),
        "graphs": ("FULL_AND_PIECEWISE", "NONE"), "decode": ("FULL_DECODE_ONLY", "NONE"),
        "compile": ("NONE", "VLLM_COMPILE"),
    }  # fmt: skip
    with pytest.raises(KeyError, match="there are eager, O0"):
        ways.find("O4")


@pytest.mark.parametrize(
    ("mode", "graphs"),
    [("NONE", 0), ("FULL", 3), ("FULL_DECODE_ONLY", 3), ("PIECEWISE", 3 * 31), ("FULL_AND_PIECEWISE", 3 + 3 * 31)],
)
def test_graphs_to_capture(mode, graphs):
    assert ways.num_graphs(CUDAGraphMode[mode], (1, 2, 4), 30, 8) == graphs


def test_paid_back_is_where_the_two_curves_cross():
    for extra, slow, fast, batch in itertools.product((0.5, 7.0, 41.3), (5.9, 2.2), (1.3, 2.0), (1, 8)):
        n = paid_back(extra, 200, slow, fast, batch)
        total = {k: extra + k * 200 * fast / 1e3 / batch - k * 200 * slow / 1e3 / batch for k in (n - 1, n)}
        assert total[n] <= 1e-9 < total[n - 1] + 1e-12
        assert exercises.requests_to_pay_back(extra, 200, slow, fast, batch) == n
    assert paid_back(3.0, 200, 2.0, 2.0, 1) is None and paid_back(-1.0, 200, 1.0, 2.0, 1) == 0


def test_the_bill_of_the_model(bill):
    assert bill.settings["way"] == "eager" and "up_to" not in bill.settings
    bill.gate.commit("tens")
    eager = ran(bill)
    assert eager.values["startup_s"] == 5.0 and eager.values["mib"] == 0.0 and eager.values["looks"] > 100
    assert eager.data["total_s"][0] == pytest.approx(5.0 + 0.2 * eager.values["step_ms"])
    assert "Result" not in bill.gate.said.value
    o2 = ran(bill, way="O2")
    sizes = len([n for n in (1, 2, 4, *range(8, 257, 8)) if n <= 256])
    graphs = sizes * (1 + 31)
    assert o2.values["startup_s"] == pytest.approx(5 + 3 * 10 + graphs * 0.01)
    assert o2.values["mib"] == pytest.approx(graphs * 0.5)
    assert o2.values["looks"] == 3 and o2.values["mode"] == "FULL"
    assert "That is what came out" in bill.gate.said.value
    assert "earn back" in panel.changed(o2, eager)
    warm = ran(bill, cache="warm")
    assert warm.values["startup_s"] == pytest.approx(o2.values["startup_s"] - 30) and "compile_s" not in warm.settings
    decode = ran(bill, way="decode")
    assert decode.values["step_ms"] == o2.values["step_ms"] and decode.values["mib"] == pytest.approx(sizes * 0.5)
    above = ran(bill, batch=256, up_to=128)
    assert above.values["mode"] == "NONE" and "above the largest size 128" in above.notes[0]


def test_every_control_of_the_model_does_something(bill):
    base = ran(bill, way="O2", batch=8)
    for change in (
        {"model": "qwen3-0.6b"}, {"batch": 16}, {"tokens": 400}, {"load_s": 20}, {"compile_s": 20}, {"up_to": 64},
        {"capture_ms": 40}, {"graph_mib": 2.0}, {"cache": "warm"}, {"way": "O1"},
    ):  # fmt: skip
        before = {name: bill.settings[name] for name in change}
        run = ran(bill, **change)
        prices = ("startup_s", "mib", "step_ms", "looks")
        other = [run.values[k] for k in prices] != [base.values[k] for k in prices]
        assert other or run.data["total_s"] != base.data["total_s"], change
        bill.set(**before)
    eager = ran(bill, way="eager")
    assert ran(bill, operations=24).values["step_ms"] > eager.values["step_ms"]


def test_wrong_controls_are_refused_or_moved(bill):
    bill.set(batch=9999)
    assert bill.settings["batch"] == 256 and "is not possible here" in bill.hint.value
    for wrong in ({"way": "O9"}, {"speed": 3}, {"compile_s": 3}):
        with pytest.raises(ConfigError):
            bill.set(**wrong)


def slice_entry():
    """The recording that ships without start-up times."""
    (entry,) = [e for e in library().of("steps") if e.name == "h200.json.gz"]
    return entry


def test_a_source_whose_start_captured_the_whole_list_comes_first(bill):
    first = next(s for s in bill.sources if s.kind == "RECORDED")
    assert first.has_startup and first.graphs == max(s.graphs for s in bill.sources if s.kind == "RECORDED") >= 35


def test_what_was_not_recorded_is_not_drawn(bill):
    source = next(s for s in bill.sources if s.kind == "RECORDED" and s.label.endswith("h200"))
    eager = ran(bill, source=source.label, way="NONE/NONE")
    full = ran(bill, way="FULL_DECODE_ONLY/NONE")
    steps = slice_entry().recording
    row = steps.find(model="smollm2-135m", backend="TRITON_ATTN", requested_mode="FULL_DECODE_ONLY", batch=1,
                     context=512)  # fmt: skip
    assert full.values["step_ms"] == row.p50_ms and full.values["looks"] == row.launches == 3
    assert full.values["startup_s"] is None and full.values["mib"] is None and full.data["total_s"] == []
    assert eager.values["looks"] > 100 and "not recorded" in eager.summary
    words = [text for trace in bill.figure.data if trace.name == "not recorded" for text in trace.text]
    assert words and not [t for t in bill.figure.data if t.meta and "total_s" in str(t.meta[0])]
    assert panel.changed(full, eager) == "" and any(
        "no start-up times" in line for line in recorded.recorded_bills([slice_entry()])[1]
    )


def test_a_recording_with_setups_brings_the_start():
    (entry,) = [e for e in library().of("steps") if e.name == "h200.json.gz"]
    setup = Setup("smollm2-135m", "TRITON_ATTN", "NONE", "FULL_DECODE_ONLY", 35, 35, 2500.0, 70.0, 0.0, False)
    mine = Entry("x.json", "yours: x.json", "steps", dataclasses.replace(entry.recording, setups=(setup,)))
    (source, plain), absent = recorded.recorded_bills([entry, mine])
    assert source.has_startup and not plain.has_startup and absent == []
    values = {
        "way": "FULL_DECODE_ONLY/NONE",
        "model": "smollm2-135m",
        "backend": "TRITON_ATTN",
        "batch": 1,
        "tokens": 100,
    }
    run = source.run(values, Context())
    assert run.values["startup_s"] == 2.5 and run.values["mib"] == 70.0 and len(run.data["total_s"]) == len(REQUESTS)
    eager = source.run({**values, "way": "NONE/NONE"}, Context())
    assert eager.values["startup_s"] == 0.0
    with pytest.raises(LabkitError, match="it was not recorded"):
        source.run({**values, "batch": 3}, Context())
    assert recorded.recorded_bills([]) == ([], [recorded.ABSENT])


def test_the_figure_of_the_bill_is_pure():
    bills = [Bill(1, "1: a", 5.0, 0.0, 6.0, 300, [1, 10], [6.0, 20.0]), Bill(2, "2: b", None, None, 1.5, None, [], [])]
    figure = bill_figure(bills, "LIVE")
    known = {1: {**dataclasses.asdict(bills[0])}, 2: {**dataclasses.asdict(bills[1])}}
    assert first_difference(figure.data, known) == ""
    known[1]["mib"] = 3.0
    assert "mib" in first_difference(figure.data, known)
    styles = {
        (t.marker.color, t.marker.pattern.shape) for t in figure.data if t.type == "bar" and t.name != "not recorded"
    }
    assert len(styles) == 2, "a run is told from another by more than its colour"
    assert bill_figure([], "").data == ()


@pytest.fixture(scope="module")
def live_bill():
    pytest.importorskip("torch")
    from labkit.lab.ch11.live import LiveBill

    return LiveBill("")


def test_a_start_on_this_cpu(live_bill, worker):
    made = Panel("11-bill", "The bill", [live_bill], panel.bill, panel.COLUMNS, changed=panel.changed, worker=worker,
                 redraw=True, refresh_s=0)  # fmt: skip
    made.set(model="tiny-llama")
    eager = ran(made, way="eager")
    full = ran(made, way="decode", largest=4)
    pieces = ran(made, way="graphs", largest=2)
    assert eager.values["mode"] == "NONE" and full.values["mode"] == pieces.values["mode"] == "FULL"
    assert eager.values["looks"] > 20 and full.values["looks"] == 1
    assert all(run.values["startup_s"] > 0 and run.values["mib"] == 0.0 for run in made.runs)
    assert full.values["capture_s"] > 0 == eager.values["capture_s"]
    assert str(full.provenance.kind) == "LIVE" and any("emulated" in note for note in full.notes)


def test_a_compile_that_takes_a_minute_is_asked_for_by_name(live_bill, monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    values = {"way": "O2", "model": "tiny-llama", "batch": 1, "tokens": 100, "cache": "warm", "largest": 2}
    with pytest.raises(LabkitError, match="compile anew"):
        live_bill.run(values, Context())
    assert "tens of seconds" in live_bill.cost({**values, "cache": "cold"})


# --- the switchboard -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", range(1, step_model.CASES + 1))
def test_every_bug_shows_and_the_plain_ways_agree(case):
    """Each part, were it the culprit: far from the plain way, and gone with its switch."""
    plain = step_model.log_probabilities(case, "")
    for part in step_model.PARTS:
        got = step_model.log_probabilities(case, part.key)
        assert max(float(np.abs(a - b).max()) for a, b in zip(plain, got, strict=True)) > 1e-2, part.key
    total = [float(np.exp(one).sum()) for one in plain]
    assert total == pytest.approx([1.0] * len(total))


def test_each_case_has_another_culprit():
    assert {parts.culprit(step_model.PARTS, case) for case in range(1, 9)} == {part.key for part in step_model.PARTS}


def test_what_tests_say_of_suspects():
    """Against brute force: a part is left exactly if it explains every outcome."""
    some = [parts.Part(key, key) for key in "abcd"]
    for culprit in "abcd":
        for offs in itertools.product(("", "a", "ab", "bcd", "d"), repeat=2):
            tests = [(off, culprit not in off) for off in offs]
            left = {part.key for part in parts.left_over(some, tests)}
            assert left == {key for key in "abcd" if all((key not in off) == wrong for off, wrong in tests)}
            assert culprit in left


@pytest.mark.parametrize(("n", "tests"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4), (16, 4)])
def test_tests_that_halving_needs(n, tests):
    assert parts.fewest_tests(n) == tests
    names = [str(i) for i in range(n)]
    for name in names:
        assert exercises.find_culprit(names, exercises.Bench(names, name)) == name


def test_the_switchboard_in_numpy(board):
    board.gate.commit("eager")
    first = ran(board, case=1)
    assert first.values["wrong"] and "That is what came out" in board.gate.said.value
    second = ran(board, level="eager")
    assert second.data["off"] == ["norm", "rotation", "activation", "replay"] and second.values["wrong"]
    assert [part.key for part in ch11.suspects_left(board.runs)] == ["merge", "prefix", "kv", "sampler"]
    assert "makes no difference" in panel.why(second, first)
    third = ran(board, level="served", plain_prefix=True)
    assert not third.values["wrong"] and third.values["error"] == 0.0 and "RIGHT" in third.summary
    assert "the culprit is among what was turned" in panel.why(third, second)
    assert [part.key for part in ch11.suspects_left(board.runs)] == ["prefix"]
    assert "1 of 8 parts left" in board.figure.layout.title.text
    ran(board, case=2, plain_prefix=False)
    assert len(ch11.suspects_left(board.runs)) == 8, "another case begins anew"
    with pytest.raises(ConfigError):
        board.set(level="on fire")


def test_every_switch_takes_out_what_it_says(board):
    board.set(source="SIMULATED")
    for name, effects in step_model.EFFECTS.items():
        for value, keys in effects.items():
            before = board.settings[name]
            run = ran(board, **{name: value})
            assert tuple(run.data["off"]) == keys
            board.set(**{name: before})


def test_the_figure_of_the_switchboard_is_pure():
    tests = [OneTest(1, [], True, [0.5, 0.25]), OneTest(2, ["a"], False, [0.0, 0.0])]
    figure = switchboard_figure([("a", "the a"), ("b", "the b")], tests, ["a"], "LIVE", case=3)
    known = {one.number: {"difference": one.difference} for one in tests}
    assert first_difference(figure.data, known) == ""
    off = next(trace for trace in figure.data if trace.name == "off")
    assert len(off.x) == 1 and off.y[0] == "<b>the a ◀</b>" and off.marker.symbol == "circle-open"
    assert switchboard_figure([], [], [], "").layout.title.text == "The switchboard"


@pytest.mark.parametrize("case", range(1, 9))
def test_a_learner_s_search_turns_the_switches(board, case):
    card = ch11.solve(exercises.find_culprit, board, case=case, source="SIMULATED")
    assert repr(card) == f"solve: {parts.culprit(step_model.PARTS, case)} in 3 tests" and figure_equals_data(board)


def test_solve_waits_for_an_answer(board):
    assert repr(ch11.solve(lambda p, is_wrong: ..., board)) == "solve: write find_culprit first"
    assert board.runs == [] and progress.load().exercises == {}


def test_bugs_in_the_running_engine(worker):
    """Each culprit changes what is written; with its own switch turned nothing differs; nothing is left behind."""
    pytest.importorskip("torch")
    from labkit.attention.sdpa import TorchSDPABackend
    from labkit.engine.runner import Runner
    from labkit.lab.ch11 import planted
    from labkit.scheduling import scheduler

    own = Runner._launch, TorchSDPABackend._sdpa, scheduler.cached_prefix
    room = EngineRoom()
    made = Panel("11-switchboard", "The switchboard", [planted.EngineSwitches("", room)], panel.tests,
                 panel.TEST_COLUMNS, worker=worker, redraw=True, refresh_s=0)  # fmt: skip
    made.set(model="tiny-llama")
    plain = {"level": "served", "kernel": "auto", "plain_prefix": False, "whole_prompts": False}
    turned = {"replay": {"level": "eager"}, "kernel": {"kernel": "math"}, "prefix": {"plain_prefix": True},
              "chunk": {"whole_prompts": True}}  # fmt: skip
    for case in range(1, planted.CASES + 1):
        culprit = parts.culprit(planted.PARTS, case)
        assert ran(made, case=case, **plain).values["wrong"], culprit
        right = ran(made, **{**plain, **turned[culprit]})
        assert not right.values["wrong"] and right.values["error"] == 0.0, culprit
        assert [part.key for part in ch11.suspects_left(made.runs)] == [culprit]
    card = ch11.solve(exercises.find_culprit, made, case=2, source="LIVE")
    assert repr(card) == f"solve: {parts.culprit(planted.PARTS, 2)} in 2 tests"
    assert (Runner._launch, TorchSDPABackend._sdpa, scheduler.cached_prefix) == own
    room.prepare("tiny-llama", lambda *args: None, **{**planted.PLAIN, "max_model_len": 192})
    theirs = planted.EngineSwitches("", room)  # an engine that somebody else has set up
    theirs.run({"case": 1, "model": "tiny-llama", **plain}, Context())
    assert room.llm.config.max_model_len == 192 and room.llm.engine.asked.block_size is None
    room.close()


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "asked"),
    [
        ("vllm serve a", {}),
        ("vllm serve a -O2", {"optimization_level": 2}),
        ("vllm serve a -O 3", {"optimization_level": 3}),
        ("vllm serve a --optimization-level=0", {"optimization_level": 0}),
        ("vllm serve a --no-enforce-eager -tp 1", {}),
        ("vllm serve a --enforce-eager --tensor-parallel-size=8", {"enforce_eager": True, "tensor_parallel_size": 8}),
        ("vllm serve a --attention-backend FLASHINFER", {"ac.backend": "FLASHINFER"}),
        ("vllm serve a --attention-config.backend=FLASHINFER", {"ac.backend": "FLASHINFER"}),
        ("vllm serve a -cc.mode=3", {"cc.mode": "VLLM_COMPILE"}),
        ("""vllm serve a -cc '{"cudagraph_mode": "FULL"}'""", {"cc.cudagraph_mode": "FULL"}),
        ("vllm serve a --cudagraph-capture-sizes 1 2 4", {"cc.cudagraph_capture_sizes": [1, 2, 4]}),
        ("vllm serve a \\\n  '-cc.cudagraph_capture_sizes=[1, 2]'", {"cc.cudagraph_capture_sizes": [1, 2]}),
        ("vllm serve --model a # the end", {}),
    ],
)
def test_a_command_that_vllm_takes(command, asked):
    assert vllm_command.read(command) == {"model": "a", **asked}


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("vllm serve a --enforce-eager=false", "takes no value"),
        ("vllm serve a --enforce-eager false", "belongs to no option"),
        ("""vllm serve a --compilation-config '{"level": 3}'""", "has no level"),
        ("vllm serve a \\ # more\n  --enforce-eager", "very last character"),
        ("VLLM_ATTENTION_BACKEND=FLASHINFER vllm serve a", "reads no variable"),
        ("vllm serve a --attention-backend FLASH", "has no value 'FLASH'"),
        ("vllm serve a --cudagraph-mode FULL", "has no option --cudagraph-mode"),
        ("vllm serve a -cc.cudagraph_mode=ON", "has no value 'ON'"),
        ("vllm serve a -O7", "no level 7"),
        ("vllm serve a --attention-backend", "needs a value"),
        ("serve a", "begins with"),
    ],
)
def test_a_command_that_it_does_not_take(command, why):
    with pytest.raises(ValueError, match=why):
        vllm_command.read(command)


def test_the_solution_says_what_labkit_exports():
    """The reader of commands against another writer of them."""
    from labkit.config import EngineConfig

    config = EngineConfig(model="qwen3-0.6b", attention_backend="TRITON_ATTN", cudagraph_mode="FULL_DECODE_ONLY",
                          cudagraph_capture_sizes=[4, 16])  # fmt: skip
    exported = vllm_command.read(to_vllm(config).command)
    need = {"model": "Qwen/Qwen3-0.6B", "backend": "TRITON_ATTN", "mode": "FULL_DECODE_ONLY", "sizes": [4, 16]}
    asked = vllm_command.read(vllm_command.serve_command(need))
    assert {**asked, "load_format": "dummy"} == exported
    assert vllm_command.read(to_vllm(EngineConfig(model="qwen3-0.6b", enforce_eager=True)).command)["enforce_eager"]
    assert table()["version"].startswith("0.33"), "the notebook and the task name this version"


def test_a_card_says_what_is_wrong_with_a_command():
    card = ch11.check_serve_command(lambda need: f"vllm serve {need['model']} --attention-backend=NOPE")
    assert "has no value" in card.html and "NOPE" in card.html and "NOT YET" in repr(card)
    passed = ch11.check_serve_command(lambda need: json.dumps(need) and vllm_command.serve_command(need))
    assert passed.passed and "What is wrong" not in passed.html


# --- the capstone ----------------------------------------------------------------------------------------------------


def test_the_capstone_is_graded_on_recorded_rows_alone():
    (steps,) = [e.recording for e in library().of("steps") if e.name == "h200.json.gz"]
    known = {(row.backend, row.mode, row.size): row.p90_ms for row in steps.rows if row.model == "qwen3-0.6b"}
    found = capstone.the_recorded()
    assert found and all(known[key] == ms for key, ms in found.items())
    assert ("TRITON_ATTN", "NONE", 13) not in found, "nobody recorded it"
    for one in capstone.CHOOSE.all_cases():
        assert one.args[1], "every case has something recorded"


def test_the_best_choice_against_brute_force():
    """Another way to find it: every list of sizes as bits, worst batch first."""
    for one in capstone.CHOOSE.all_cases():
        need, times = one.args
        best: tuple = (math.inf, 0, 0, None)
        for rank, backend in enumerate(need["backends"]):
            for bits in range(1 << len(need["sizes"])):
                sizes = [size for i, size in enumerate(need["sizes"]) if bits >> i & 1]
                if len(sizes) * need["graph_mib"] > need["cap_mib"]:
                    continue
                taken = [capstone.step_p90(backend, batch, sizes, times) for batch in need["batches"]]
                if all(ms is not None and ms <= need["slo_ms"] for ms in taken):
                    key = (round(sum(taken) / len(taken), 9), len(sizes), rank)
                    best = min(best, (*key, (backend, sizes)), key=lambda b: b[:3])
        found = capstone.choose(need, times)
        assert best[3] == (None if found is None else (found["backend"], found["sizes"]))


def test_no_choice_is_made_from_what_was_not_recorded():
    need = capstone.make_need((24,), 50.0, 0, (32,))
    assert capstone.choose(need, capstone.recorded_p90("smollm2-135m", need["backends"], [32], [24])) is None
    assert catches(capstone.CHOOSE, capstone._nearest) == {"not recorded"}


def test_defend_shows_the_promise_the_engine_and_the_command(monkeypatch):
    monkeypatch.setattr(cards, "_plugged", lambda choice: [f"<p>{choice['sizes']}</p>"])
    card = ch11.defend(capstone.choose)
    assert repr(card) == "defend: qwen3-0.6b: TRITON_ATTN, FULL, sizes [4, 16, 32]"
    assert card.html.count("✓ kept") == 5 and "✗ broken" not in card.html and "vllm serve Qwen/Qwen3-0.6B" in card.html
    assert repr(ch11.defend(lambda need, recorded: ...)) == "defend: write choose first"


def test_the_engine_starts_with_the_learner_s_sizes():
    pytest.importorskip("torch")
    html = "".join(cards._plugged({"sizes": [3, 4]}))
    assert "FULL 3" in html and "the same text" in html
    assert cards._plugged({"sizes": []}) == []


# --- the end of the course -------------------------------------------------------------------------------------------


def test_the_thirteen_items_with_the_learner_s_status():
    card = ch11.self_check()
    assert repr(card) == "self-check: 13 items" and "0 of 13 items" in card.html
    assert card.html.count("<b>A") + card.html.count("<b>B") == 13
    assert 'href="11_bill_switchboard_capstone.ipynb"' in card.html
    for exercise in ch11.chapter.exercises:
        check(exercise, exercise.solution)
    assert "11.4 ✓" in ch11.self_check().html


def test_all_claims_with_their_verdicts():
    from labkit.simulate.claims import CLAIMS

    card = ch11.claims()
    assert repr(card) == f"claims: {len(CLAIMS)}" and all(
        word in card.html for word in ("holds", "does not hold", "folklore")
    )
    assert card.html.count("<tr>") >= len(CLAIMS)


def test_the_last_row_of_the_scoreboard(bill):
    assert "No row yet" in ch11.note_score([]).html
    ran(bill, way="O2")
    assert "No row yet" in ch11.note_score(bill.runs).html, "what is computed is not put on the board"
    source = next(s for s in bill.sources if s.kind == "RECORDED")
    full = ran(bill, source=source.label, way="FULL_DECODE_ONLY/NONE")
    card = ch11.note_score(bill.runs)
    row = progress.load().scores[cards.SCORE]
    assert row["step_ms"] == full.values["step_ms"] and row["kind"] == "RECORDED"
    assert row["startup_s"] == full.values["startup_s"]
    assert "this chapter" in card.html


def test_a_learner_s_function_on_the_runs(bill):
    assert "first" in repr(ch11.paid_back(lambda *args: ..., bill.runs))
    for way in ("eager", "O2"):
        ran(bill, way=way)
    card = ch11.paid_back(exercises.requests_to_pay_back, bill.runs)
    ((_, _, requests),) = panel.pairs(bill.runs)
    assert repr(card) == "paid back: 1 pairs" and f">{requests}<" in card.html


def test_the_model_s_prices_are_in_its_origin():
    source = simulated.SimulatedBill()
    values = {one.name: one.value for one in source.controls({"way": "O2"})}
    made = source.run({**values, "way": "O2"}, Context()).provenance
    assert all(f"{name}=" in made.cpu for name in ("compile_s", "capture_ms", "graph_mib", "load_s", "up_to"))
