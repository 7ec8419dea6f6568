"""Chapter 09: its panels in every source, its checks, its cards. No time is asserted, only what follows from it."""

from __future__ import annotations

import dataclasses

import pytest

from labkit.errors import ConfigError, LabkitError
from labkit.figures.fused import Map, matrix_figure
from labkit.lab import ch09
from labkit.lab.ch09 import fusion, live, matrix, panel, recorded
from labkit.lab.ch09.exercises import attribute, count_launches, recompiles, steps_to_pay
from labkit.lab.engine_room import EngineRoom
from labkit.lab.panel import figure_equals_data
from labkit.lab.prove import prove
from labkit.lab.worker import Worker
from labkit.measure.library import library
from labkit.measure.recordings import Setup

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
    return ch09.matrix_panel(worker=worker, redraw=True, refresh_s=0)


def ran(panel_, **values):
    panel_.set(**values)
    panel_.run(wait=True, timeout=TIMEOUT)
    assert figure_equals_data(panel_)
    return panel_.runs[-1]


@pytest.mark.parametrize("exercise", ch09.chapter.exercises, ids=lambda e: e.id)
def test_its_checkers_check(exercise):
    prove(exercise)


@pytest.mark.parametrize("quiz", ch09.chapter.quizzes, ids=lambda q: q.id)
def test_its_questions_have_one_answer(quiz):
    for i, option in enumerate(quiz.options):
        assert ("right" in repr(quiz.answer(i))) == option.right


def test_the_solutions_on_examples_done_by_hand():
    norm = ["pointwise", "reduction", "pointwise", "pointwise"]
    assert count_launches([*norm, "view", "matmul", "view", "pointwise", "pointwise", "matmul"]) == (8, 4)
    assert attribute(5.5, 5.1, 5.2, 5.0) == pytest.approx((0.4, 0.3, -0.2))
    assert steps_to_pay(30, 5.5, 5.0, 0.25) == 240_000 and steps_to_pay(30, 5.0, 5.0, 1) is None
    assert recompiles([[34, 64], [8, 64], [1, 64], [1, 64], [8, 128]], [0]) == [0, 2, 4]


# --- the four forms --------------------------------------------------------------------------------------------------


def test_the_gate_waits_for_both_batches(shown):
    assert shown.gate.state == "asking" and shown.settings["model"] == "llama-3.2-1b"
    shown.gate.commit(("graph", "compile"))
    one = ran(shown, batch=1)
    assert one.values["winner"] == "graph" and "Another run tells" in shown.gate.said.value
    many = ran(shown, batch=256)
    assert many.values["winner"] == "compile" and "That is what came out" in shown.gate.said.value
    assert "Of the two alone the graph won before, and the compiler wins now." in panel.changed(many, one)


def test_the_gate_is_not_answered_by_two_different_questions(shown):
    shown.gate.commit(("graph", "graph"))
    ran(shown, batch=1, model="smollm2-135m")
    ran(shown, batch=256, model="llama-3.2-1b")
    assert "Result" not in shown.gate.said.value
    ran(shown, batch=1)
    assert "It came out otherwise" in shown.gate.said.value


def test_every_control_of_the_simulated_step_does_something(shown):
    base = ran(shown)
    assert base.kind == "SIMULATED"
    for name, value in (("model", "qwen3-0.6b"), ("batch", 64), ("before", 20), ("after", 12)):
        other = ran(shown, **{name: value})
        assert other.data["cells"] != base.data["cells"], name
        shown.set(**{name: base.settings[name]})
    same = ran(shown, before=10, after=10)
    assert same.values["eager_ms"] == same.values["compile_ms"] and same.values["compile_gain"] == 0
    shown.set(before=10, after=20)
    assert "a compiler that makes things worse" in shown.hint.value


def test_the_map_beside_the_texts_table(shown):
    run = ran(shown)
    maps = [trace for trace in shown.figure.data if trace.type == "heatmap"]
    assert [list(map(float, row)) for row in maps[-1].z] == [[5.5, 5.1], [5.2, 5.0]]
    said = [note.text for note in shown.figure.layout.annotations]
    assert "5.50" in said and f"{run.values['eager_ms']:.2f}" in said
    assert any("folklore" in text for text in said) and any("SIMULATED" in text for text in said)


def test_a_form_that_nobody_measured_is_not_filled_in():
    figure = matrix_figure([Map(1, "a", "RECORDED", [[5.0, 1.0], [None, None]])])
    assert [note.text for note in figure.layout.annotations].count("not measured") == 2
    cells = {"eager": matrix.Cell(5.0), "graph": matrix.Cell(1.0)}
    assert matrix.winner(cells) is None and matrix.effects(cells)["interaction"] is None
    near = {"graph": matrix.Cell(5.0), "compile": matrix.Cell(5.2)}
    assert matrix.winner(near) == "neither"


def test_what_is_recorded_today(shown):
    source = next(s for s in shown.sources if s.kind == "RECORDED")
    run = ran(shown, source=source.label, model="smollm2-135m", backend="TRITON_ATTN", batch=1)
    (steps,) = [e.recording for e in library().of("steps") if e.provenance == run.provenance]
    where = {"model": "smollm2-135m", "backend": "TRITON_ATTN", "batch": 1, "context": 512, "compile": "NONE"}
    row = steps.find(**where, requested_mode="NONE")
    assert run.values["eager_ms"] == row.p50_ms and run.values["eager_launches"] == row.launches
    assert str(run.provenance.kind) == "RECORDED"
    if run.values["compile_ms"] is None:
        assert "Not recorded on this machine yet" in run.notes[0] and "not measured" in run.summary


def _with_compiled(scale=0.5):
    """The shipped recording with compiled rows made up beside its own: what a recording of `five` has."""
    (steps,) = [e.recording for e in library().of("steps") if e.name == "h200.json.gz"]
    rows = [r for r in steps.rows if r.backend == "TRITON_ATTN" and r.size == r.batch]
    more = [
        dataclasses.replace(
            row, compile="VLLM_COMPILE", samples_ms=tuple(ms * scale for ms in row.samples_ms),
            p10_ms=row.p10_ms * scale, p50_ms=row.p50_ms * scale, p90_ms=row.p90_ms * scale,
        ) for row in rows
    ]  # fmt: skip
    model = rows[0].model
    setups = [Setup(model, "TRITON_ATTN", "VLLM_COMPILE", mode, 1, 1, 1.0, 1.0, ms, cached)
              for mode, ms, cached in (("FULL", 20_000.0, False), ("PIECEWISE", 900.0, True))]  # fmt: skip
    return steps, dataclasses.replace(steps, rows=(*rows, *more), setups=tuple(setups))


def test_compiled_rows_appear_by_themselves():
    plain, both = _with_compiled()
    source = recorded.RecordedForms("H200", [plain, both])
    assert source.has_compiled and not recorded.RecordedForms("H200", [plain]).has_compiled
    key = next(k for k in source.keys if k[1] == "TRITON_ATTN" and k[3] == 1 and k[0] == both.setups[0].model)
    out = source.run({"model": key[0], "backend": key[1], "batch": 1}, None)
    assert out.values["compile_ms"] == out.values["eager_ms"] / 2 and out.values["winner"] is not None
    assert (out.values["cold_s"], out.values["warm_s"]) == (20.0, 0.9)
    assert out.notes == (
        "When it was recorded the model was compiled for the first time in 20.0 s.",
        "When it was recorded the model was read from the cache in 0.9 s.",
    )
    with pytest.raises(LabkitError, match="was not recorded"):
        source.run({"model": key[0], "backend": key[1], "batch": 3}, None)


def test_without_a_recording_it_says_so(monkeypatch):
    monkeypatch.setattr(recorded, "library", lambda: type("L", (), {"of": lambda self, table: ()})())
    assert recorded.recorded_sources() == ([], ["No RECORDED source: no recording has one step in two forms."])
    assert repr(ch09.note_score([])) == "scoreboard: 0 rows"


def test_a_wrong_value_is_moved_or_refused(shown):
    shown.set(batch=100)
    assert shown.settings["batch"] == 128 and "is not possible here" in shown.hint.value
    with pytest.raises(ConfigError):
        shown.set(model="gpt-17")


def test_live_on_a_cpu(shown):
    pytest.importorskip("torch")
    run = ran(shown, source=shown.sources[0].label, model="tiny-llama", batch=2)
    assert run.settings["forms"] == live.TWO and run.values["compile_ms"] is None
    assert run.values["eager_ms"] > 0 and run.values["graph_ms"] > 0 and run.values["eager_launches"] is None
    assert "saves nothing" in run.summary and run.provenance.n == live.ROUNDS * live.CPU["steps"]


def test_all_four_forms_take_turns():
    """The order of the switches and what is made of them, on an engine that pretends: compiling takes too long here."""
    from types import SimpleNamespace

    asked = []

    class Engine:
        device = SimpleNamespace(type="cpu")
        config = SimpleNamespace(compilation_mode="NONE", max_model_len=256, max_num_seqs=8, block_size=16)
        memory: dict = {}
        compile_report = None
        notes = ("the compiler is broken",)
        works = True

        def reconfigure(self, compilation_mode, cudagraph_mode="NONE", **more):
            asked.append((compilation_mode, cudagraph_mode))
            compiled = compilation_mode != "NONE" and self.works
            kind = SimpleNamespace(pieces=3, kernels_before=10, kernels_after=4)
            self.compile_report = (
                SimpleNamespace(from_cache=True, total_ms=500.0, pieces=3, classes=[kind]) if compiled else None
            )
            self.config = SimpleNamespace(
                **{**vars(self.config), "compilation_mode": "VLLM_COMPILE" if compiled else "NONE"}
            )

        def reset(self):
            pass

        def prime(self, *args, **more):
            pass

        def step(self):
            return SimpleNamespace(num_reqs=2, num_tokens=2, wall_ms=2.0 if self.compile_report else 4.0)

    engine = Engine()
    source = live.LiveForms("", EngineRoom(make=lambda model, **changes: engine))
    context = type("C", (), {"check": lambda self: None, "stage": lambda *a: None, "should_stop": lambda self: False})()
    out = source.run({"model": "tiny-llama", "batch": 2, "forms": live.FOUR}, context)
    assert out.values["eager_ms"] == 4.0 and out.values["both_ms"] == 2.0 and out.values["winner"] is None
    assert out.values["kernels_before"] == 30 and out.values["kernels_after"] == 12 and out.values["warm_s"] == 0.5
    first, second = asked[:4], asked[4:8]
    assert first == [live._SWITCHES[form] for form in matrix.FORMS] and second == [*first[1:], first[0]]
    assert asked[-1][0] == "NONE"
    engine.works = False
    with pytest.raises(LabkitError, match="the compiler is broken"):
        source.run({"model": "tiny-llama", "batch": 2, "forms": live.FOUR}, context)


# --- kernels ---------------------------------------------------------------------------------------------------------


def test_the_recorded_counts_agree_with_themselves(worker):
    shown = ch09.kernels_panel(worker=worker, redraw=True, refresh_s=0)
    for name, fused in fusion.recorded().items():
        run = ran(shown, source="RECORDED", model=name)
        assert run.values["kernels_before"] == fused.before and run.values["pieces"] == fused.pieces
        assert sum(kind.pieces for kind in fused.kinds) == fused.pieces
        for kind in fused.kinds:
            # A product is a kernel before and after; nothing else is a library's.
            products = sum(k == fusion.MATMUL for _, k in kind.ops)
            assert products == sum(library_ for _, _, library_ in kind.kernels)
            assert kind.after < kind.before
    assert panel.kernels_changed(shown.runs[-1], shown.runs[-2]) and not panel.kernels_changed(run, run)


def test_pieces_are_one_more_than_layers():
    from labkit.models.shapes import SHAPES

    for name, fused in fusion.recorded().items():
        assert fused.pieces == SHAPES[name].num_layers + 1 and len(fused.kinds) == 3


def test_operators_are_listed_as_the_engine_counts_them():
    """On a graph of a few operators: the list without views is `count_eager_kernels`."""
    torch = pytest.importorskip("torch")
    from labkit.graphs.compiler import count_eager_kernels

    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    y = graph.call_method("view", (graph.call_function(torch.mm, (x, w)), -1))
    graph.output(graph.call_function(torch.nn.functional.silu, (graph.call_function(torch.add, (y, 1.0)),)))
    piece = torch.fx.GraphModule(torch.nn.Module(), graph)
    for node, shape in ((x, (4, 8)), (w, (8, 16))):
        node.meta["example_value"] = torch.zeros(shape)
    found = fusion.operators(piece)
    assert [fusion.kind_of(*one) for one in found] == ["matmul", "view", "pointwise", "pointwise"]
    assert sum(not view for _, view in found) == count_eager_kernels(piece)


def test_the_cards():
    assert repr(ch09.against_inductor(lambda ops: ...)) == "against the compiler: write count_launches first"
    card = ch09.against_inductor(count_launches)
    assert repr(card) == "against the compiler: 7 of 9 pieces alike" and "one loop computes both" in card.html
    assert repr(ch09.myths()) == "myth check: 7 claims" and "dated" in ch09.myths().html
