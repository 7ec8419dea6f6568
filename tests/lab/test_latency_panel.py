"""The latency panel without a browser: buttons are pressed in process, behind it stands an engine without a clock."""

from __future__ import annotations

import dataclasses
import re
import sys
import threading

import ipywidgets as widgets
import pytest

from labkit.attention.interface import AttentionCGSupport as Tier
from labkit.attention.interface import VersionAnswer
from labkit.errors import BackendError, ConfigError, LabkitError
from labkit.figures import trace_of
from labkit.lab import run_html
from labkit.lab.latency import LatencyPanel
from labkit.lab.live import LiveSource
from labkit.lab.loading import uploaded
from labkit.lab.panel import figure_equals_data
from labkit.lab.recorded import recorded_sources
from labkit.lab.worker import Worker
from labkit.measure import launches
from labkit.measure.launches import LaunchCount
from labkit.measure.recordings import Refusal
from tests.lab.fakes import CANDIDATES, h200, live_source, recording, row


@pytest.fixture(autouse=True)
def cards(monkeypatch, tmp_path):
    """Most of these tests look at cards, so they run as a learner would; the strict ones ask for it."""
    monkeypatch.delenv("LABKIT_STRICT", raising=False)
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))  # a learner's runs outlive the kernel


@pytest.fixture
def worker():
    made = Worker()
    yield made
    made.close()


@pytest.fixture
def live(worker):
    """A panel over a fake engine, and the engines it made."""
    source, made = live_source()
    panel = LatencyPanel(source, recorded_sources([h200()]), worker=worker, redraw=True, refresh_s=0)
    return panel, made


@pytest.fixture
def recorded(worker):
    return LatencyPanel(None, recorded_sources([h200()]), worker=worker, redraw=True, no_live="torch is not installed.")


def press(panel: LatencyPanel) -> None:
    panel.run_button.click()
    panel.wait(20)


# --- LIVE ------------------------------------------------------------------------------------------------------------


def test_run_draws_exactly_what_the_step_reports_say(live):
    panel, made = live
    press(panel)
    panel.mode.value = "FULL"
    panel.batch.value = 3
    press(panel)
    assert panel.error.value == ""
    for run, shown in zip(panel.runs, panel.rows, strict=True):
        walls = [report.wall_ms for report in run.reports]
        assert len(walls) == 6
        assert list(trace_of(panel.figure, "samples", run.number).y) == walls == list(shown.samples_ms)
        assert set(trace_of(panel.figure, "median", run.number).y) == {shown.p50_ms}
        assert set(trace_of(panel.figure, "band", run.number).y) == {shown.p10_ms, shown.p90_ms}
        assert f'data-ms="{shown.p50_ms!r}"' in panel.table_area.value
    assert [r.mode for r in panel.rows] == ["NONE", "FULL"]
    assert [r.size for r in panel.rows] == [1, 4]
    assert panel.table[1]["batch"] == 3 and panel.table[1]["kind"] == "LIVE"
    assert len(made) == 1, "the second run must reconfigure the engine, not build another"


def test_warm_up_is_not_measured_and_the_context_is_reached_by_the_first_measured_step(live):
    panel, made = live
    panel.batch.value, panel.context.value = 2, 100
    press(panel)
    assert made[0].primed == [(2, 98)]
    assert [report.step_id for report in panel.runs[0].reports] == [3, 4, 5, 6, 7, 8]


def test_all_engine_work_happens_on_the_worker_thread(live):
    panel, made = live
    press(panel)
    panel.mode.value = "FULL"
    press(panel)
    assert made[0].threads == {"labkit-worker"}


@pytest.mark.parametrize("k", [0, 1, 2, 5, 7])
def test_stop_at_step_k_lets_at_most_one_more_step_run(live, k):
    """Stop is pressed while step k is under way; that step ends, and no other begins."""
    panel, made = live
    press(panel)
    (llm,) = made
    before = llm.steps

    def gate(engine):
        if engine.steps - before == k:
            panel.stop_button.click()

    llm.gate = gate
    press(panel)
    assert llm.steps - before == k + 1
    assert not panel.busy and not panel.run_button.disabled
    measured = max(0, k + 1 - 2)  # two steps warm up
    if measured:
        assert panel.runs[-1].stopped and panel.rows[-1].n == measured
        assert "stopped" in panel.table_area.value and "stopped" in panel.status.value
    else:
        assert len(panel.runs) == 1 and "nothing was added" in panel.status.value


def test_stop_while_another_panel_has_the_device_gives_the_buttons_back(live, worker):
    panel, made = live
    reached, release = threading.Event(), threading.Event()
    ahead = worker.submit(lambda job: (reached.set(), release.wait(20)), "another panel")
    assert reached.wait(20)
    panel.run_button.click()
    panel.stop_button.click()
    assert "Stopping before it begins" in panel.status.value
    release.set()
    ahead.wait(20)
    panel.wait(20)
    assert "Stopped before it began; nothing was added" in panel.status.value
    assert not panel.run_button.disabled and not panel.model.disabled and panel.stop_button.disabled
    press(panel)
    assert len(panel.runs) == 1


def test_stop_says_that_what_is_being_made_is_finished_first(live):
    panel, made = live
    press(panel)
    panel.compile.value, said = "VLLM_COMPILE", []
    panel.status.observe(lambda change: said.append(change["new"]), names="value")
    make = made[0]._progress

    def progress(*args):
        make(*args)
        panel.stop_button.click()
        make("compiling", 1, 3, "class 2 of 3")

    made[0]._progress = progress
    press(panel)
    assert any("Busy: compiling: class 1 of 3<" in line for line in said)
    stopping = "Stopping once the engine is ready: compiling cannot be broken off, and what it makes is kept."
    assert any(stopping in line for line in said) and any(
        f"{stopping} Now: compiling: class 2" in line for line in said
    )
    assert len(panel.runs) == 1 and "What was made ready is kept" in panel.status.value


def test_stop_while_text_is_written_ends_it_and_keeps_the_run(live):
    panel, made = live
    press(panel)
    (llm,) = made
    before = llm.steps
    llm.gate = lambda engine: panel.stop_button.click() if engine.steps - before == 2 + 6 + 3 else None
    press(panel)
    assert llm.steps - before == 2 + 6 + 4
    assert panel.rows[-1].n == 6


def test_controls_are_off_and_the_label_says_busy_while_a_run_is_under_way(live):
    panel, made = live
    press(panel)
    reached, release, seen = threading.Event(), threading.Event(), {}

    def gate(engine):
        reached.set()
        release.wait(20)

    made[0].gate = gate
    panel.run_button.click()
    assert reached.wait(20)
    for control in (panel.model, panel.backend, panel.mode, panel.sizes, panel.batch, panel.context, panel.source):
        assert control.disabled
    assert panel.run_button.disabled and panel.reset_button.disabled and not panel.stop_button.disabled
    seen["label"] = panel.status.value
    panel.run()  # a second press while busy says so and does nothing
    assert "still busy" in panel.error.value
    release.set()
    panel.wait(20)
    assert "Busy" in seen["label"]
    assert not panel.model.disabled and panel.stop_button.disabled
    assert len(panel.runs) == 2


def test_steps_appear_in_the_chart_while_they_come_in(live):
    panel, made = live
    press(panel)
    (llm,) = made
    before, drawn = llm.steps, []

    def gate(engine):
        if 2 < engine.steps - before < 8:
            trace = trace_of(panel.figure, "samples", 2)
            drawn.append(len(trace.y))

    llm.gate = gate
    press(panel)
    assert drawn == [1, 2, 3, 4, 5]


def test_text_comes_from_the_very_engine_and_says_that_random_weights_write_noise(live):
    panel, made = live
    panel.mode.value = "FULL"
    press(panel)
    assert panel.runs[0].text == " word" * 24
    note = panel.runs[0].text_note
    assert "noise" in note and "emulated FULL graph of size 1" in note and "TORCH_SDPA" in note
    assert "The capital of France is" in panel.text_area.value and "noise" in panel.text_area.value


def test_the_summary_says_that_an_emulated_graph_saves_nothing(live):
    panel, made = live
    panel.mode.value = "FULL"
    press(panel)
    assert panel.summary.startswith("mode FULL, size 1, emulated") and "nothing is saved here" in panel.summary
    assert "a little may be lost" in panel.summary and "a little may be lost" in panel.hint.value


def test_on_a_gpu_the_launches_of_the_step_with_and_without_its_graph_are_counted(live, monkeypatch):
    """The eager count comes from the same engine, which is put back into its mode afterwards."""
    panel, made = live
    source = panel.current
    source.device = source._ledger._device = "NVIDIA H200"

    def count(step):
        report = step()
        graph = report.mode == "FULL"
        return LaunchCount(3 if graph else 412, graph_launches=int(graph), by_kind={"graph": int(graph), "torch": 2})

    monkeypatch.setattr(launches, "why_not", lambda: "")
    monkeypatch.setattr(launches, "count", count)
    panel.mode.value, panel.batch.value = "FULL", 3
    press(panel)
    assert panel.error.value == ""
    assert (panel.rows[0].launches, panel.rows[0].graph_launches, panel.runs[0].eager_launches) == (3, 1, (412, 412))
    assert [c["cudagraph_mode"] for c in made[0].reconfigured] == ["NONE", "FULL"]
    press(panel)
    assert len(made[0].reconfigured) == 3, "what was counted once is remembered"
    panel.mode.value = "NONE"
    press(panel)
    assert panel.summary.startswith("mode NONE, batch 3: 412 launches a step")


def test_the_cost_is_announced_before_the_click(live):
    panel, made = live
    assert "load smollm2" in panel.cost.value or "load tiny" in panel.cost.value
    assert "capture" not in panel.cost.value
    panel.mode.value = "FULL"
    assert "capture 4 emulated graphs (1, 2, 4, 8)" in panel.cost.value
    panel.sizes.value = "2, 16"
    assert "capture 2 emulated graphs (2, 16)" in panel.cost.value
    press(panel)
    assert "load" not in panel.cost.value and "capture" not in panel.cost.value, "both were just done"


def test_a_step_that_was_slow_is_expected_to_be_slow_in_every_mode(live):
    panel, made = live
    quick = panel.cost.value
    panel.backend.value = "TORCH_SDPA"
    panel.sources[0]._ledger.note_step(panel.controls.settings(), 2000.0)
    panel.mode.value = "FULL"
    assert quick.endswith("about 6 s.</p></div>") and panel.cost.value.endswith("about 68 s.</p></div>")


def test_panels_that_share_an_engine_know_what_it_holds(live, worker):
    panel, made = live
    source = LiveSource(panel.sources[0].room, panel.sources[0].limits, device="", ask_backends=lambda *a: CANDIDATES)
    other = LatencyPanel(source, worker=worker, redraw=True)
    panel.mode.value = other.mode.value = "FULL"
    press(panel)
    other.mode.value = "FULL_DECODE_ONLY"
    assert "keep all 4 emulated graphs" in other.cost.value


def test_tokens_per_second_below_one_are_not_rounded_away(live):
    panel, made = live
    press(panel)
    made[0].wall_ms = lambda k: 2225.0
    press(panel)
    assert '<td class="lk-num">0.449</td>' in panel.table_area.value


def test_progress_of_captures_is_shown(live):
    panel, made = live
    press(panel)
    panel.mode.value = "FULL"
    said = []
    panel.status.observe(lambda change: said.append(change["new"]), names="value")
    press(panel)
    assert any("capturing FULL size 4, 2 of 4" in line for line in said)


def test_a_batch_above_the_largest_size_runs_eagerly_and_says_so(live):
    panel, made = live
    panel.mode.value, panel.sizes.value, panel.batch.value = "FULL", "1 2", 5
    assert "above the largest" in panel.hint.value
    press(panel)
    assert panel.rows[0].mode == "NONE" and "above the largest size, 2" in panel.said.value


def test_a_mode_that_cannot_be_had_is_explained_before_the_run_and_after_it(live):
    panel, made = live
    panel.mode.value = "FULL"
    why = "FULL → FULL_DECODE_ONLY: TORCH_SDPA (tier UNIFORM_SINGLE_TOKEN_DECODE) cannot capture mixed batches"
    assert f"{why}. To avoid it: " in panel.hint.value and "What it costs: not measured." in panel.hint.value
    press(panel)
    assert f"{why}. To avoid it: No other backend here reaches tier ALWAYS." in panel.said.value
    panel.mode.value = "FULL_DECODE_ONLY"
    assert "→" not in panel.hint.value


def test_a_downgrade_names_the_backend_that_would_avoid_it_and_its_recorded_cost(worker):
    able = dataclasses.replace(CANDIDATES[0], name="TRITON_ATTN", tier=Tier.ALWAYS, order=2)
    cannot = dataclasses.replace(CANDIDATES[0], tier=Tier.NEVER)
    rows = [row(mode, 1, ms, backend="TRITON_ATTN") for mode, ms in (("NONE", 6.0), ("FULL", 1.5))]
    source, made = live_source(recordings=[recording(rows)])
    source._ask_backends = lambda *args: (cannot, able)
    panel = LatencyPanel(source, worker=worker, redraw=True)
    panel.mode.value = "FULL_DECODE_ONLY"
    assert "FULL_DECODE_ONLY → NONE: TORCH_SDPA (tier NEVER) cannot be captured" in panel.hint.value
    assert "Take attention_backend TRITON_ATTN" in panel.hint.value
    assert "decode steps take 4.00×" in panel.hint.value and "NVIDIA H200" in panel.hint.value


@pytest.mark.parametrize(
    ("mode", "compile", "runs", "announced"),
    [
        ("PIECEWISE", "NONE", "PIECEWISE", "capture 4 emulated steps in pieces (1, 2, 4, 8)"),
        ("FULL_AND_PIECEWISE", "NONE", "FULL", "capture 4 emulated steps in pieces and 4 emulated graphs (1, 2, 4, 8)"),
        ("PIECEWISE", "VLLM_COMPILE", "PIECEWISE", "capture 4 emulated steps in pieces (1, 2, 4, 8)"),
        ("NONE", "VLLM_COMPILE", "NONE", "compile it"),
    ],
)
def test_every_mode_runs_compiled_or_not(live, mode, compile, runs, announced):
    panel, made = live
    panel.mode.value, panel.compile.value = mode, compile
    assert announced in panel.cost.value
    press(panel)
    assert panel.error.value == "" and (panel.rows[0].mode, panel.rows[0].compile) == (runs, compile)
    assert made[0].made_with["compilation_mode"] == compile
    names = [trace.name for trace in panel.figure.data if trace.showlegend]
    assert names == [f"TORCH_SDPA · {runs}{', compiled' if compile != 'NONE' else ''} · LIVE"]
    assert (", compiled" in panel.summary) == (compile != "NONE")
    assert (">compile</th>" in panel.table_area.value) == (compile != "NONE")


def test_the_first_compile_is_announced_and_then_known(worker):
    source, made = live_source()
    source._ledger._compile_s["tiny-qwen3"] = 17.0
    panel = LatencyPanel(source, worker=worker, redraw=True)
    panel.compile.value = "VLLM_COMPILE"
    first = "compile it (the first compile of this model takes {}, later starts read it from the cache)"
    assert first.format("tens of seconds") in panel.cost.value
    panel.model.value = "tiny-qwen3"
    assert first.format("about 17 s") in panel.cost.value
    press(panel)
    assert "compile" not in panel.cost.value, "the engine holds the code"
    assert "Compiled 31 pieces of 3 kinds in 24.0 s (tracing 1.0 s)." in panel.said.value
    panel.model.value = "tiny-llama"
    assert first.format("tens of seconds") in panel.cost.value
    panel.model.value = "tiny-qwen3"
    panel.compile.value = "NONE"
    press(panel)
    panel.compile.value = "VLLM_COMPILE"
    assert "compile" not in panel.cost.value, "switching it off drops nothing"
    press(panel)
    assert "the compiled code" in panel.runs[-1].ready[-1]


def test_a_toggle_without_new_captures_says_what_was_kept(live):
    panel, made = live
    panel.mode.value = "FULL_DECODE_ONLY"
    press(panel)
    assert panel.runs[0].ready == ("Captured 4 emulated graphs in 20 ms.",)
    assert "keep all 4 emulated graphs" in panel.cost.value
    panel.eager.value = True
    press(panel)
    assert panel.runs[1].ready[0].startswith("Kept: the weights, the KV cache, so that the change took")
    panel.mode.value = "FULL_DECODE_ONLY"
    assert "keep all 4 emulated graphs" in panel.cost.value and "capture" not in panel.cost.value
    press(panel)
    (kept,) = panel.runs[2].ready
    assert kept.startswith("Kept: the weights, the KV cache, 4 emulated graphs, so that the change took")
    assert "Run 3 is done. Kept:" in panel.status.value
    panel.mode.value = "FULL_AND_PIECEWISE"
    assert "capture 4 emulated steps in pieces (1, 2, 4, 8)" in panel.cost.value, "the graphs of decodes are there"
    press(panel)
    captured, kept = panel.runs[3].ready
    assert captured == "Captured 124 emulated graphs for 4 sizes in 20 ms."
    assert kept == "Kept: the weights, the KV cache, 4 emulated graphs."


def test_every_size_is_listed_with_its_memory_on_a_gpu(live):
    panel, made = live
    panel.mode.value = "FULL_AND_PIECEWISE"
    press(panel)
    run = panel.runs[0]
    assert "emulated, so they take no memory" in panel.said.value
    on_gpu = run_html.summary_html(dataclasses.replace(run, emulated=False))
    assert "Graphs by size (8 MiB)" in on_gpu
    cells = "".join(f"<td{c}>{v}</td>" for c, v in zip(["", *[' class="lk-num"'] * 4],
                                                      ("PIECEWISE", 8, 31, "5.0", "1.0"), strict=True))  # fmt: skip
    assert cells in on_gpu


def test_enforce_eager_is_both_off_and_comes_back_with_what_was_on(live):
    panel, made = live
    assert panel.eager.value and "enforce_eager=True" in panel.hint.value
    panel.mode.value, panel.compile.value = "PIECEWISE", "VLLM_COMPILE"
    assert not panel.eager.value and "enforce_eager" not in panel.hint.value
    panel.eager.value = True
    assert (panel.mode.value, panel.compile.value) == ("NONE", "NONE")
    panel.eager.value = False
    assert (panel.mode.value, panel.compile.value) == ("PIECEWISE", "VLLM_COMPILE")
    panel.reset_button.click()
    panel.eager.value = False
    assert panel.mode.value != "NONE", "with nothing to come back to, the first mode with graphs"


def test_versions_of_one_backend_are_choices_of_their_own(worker):
    answers = [
        VersionAnswer(3, "tokenspeed-fa3", True),
        VersionAnswer(2, "torch", False),
        VersionAnswer(4, "fa4", True),
    ]
    serving = dataclasses.replace(CANDIDATES[1], usable=True, reasons=(), tier=CANDIDATES[0].tier, order=2,
                                  versions=tuple(answers))  # fmt: skip
    asked = []
    source, made = live_source()
    source._ask_backends = lambda *args: asked.append(args[3]) or (CANDIDATES[0], serving)
    panel = LatencyPanel(source, worker=worker, redraw=True)
    shown = [option for option in panel.backend.options if "FLASH_ATTN" in option[0]]
    assert shown == [("FLASH_ATTN · FA3", "FLASH_ATTN"), ("FLASH_ATTN · FA4", "FLASH_ATTN:4")]
    panel.backend.value = "FLASH_ATTN:4"
    assert panel.controls.settings().version == 4 and asked[-1] == 4
    press(panel)
    assert "FLASH_ATTN" in panel.error.value and made == [], "the stand-in serves TORCH_SDPA alone"
    panel.backend.value = "AUTO"
    press(panel)
    assert made[0].made_with["flash_attn_version"] is None


def test_another_model_closes_the_engine_of_the_first(live):
    """Case C44: constructing again must not hold memory twice."""
    panel, made = live
    press(panel)
    panel.model.value = "tiny-qwen3"
    press(panel)
    assert [llm.closed for llm in made] == [True, False]
    assert len(panel.runs) == 2


# --- bad input: a card, and nothing is lost --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ("4, x, 0", ["'x' is not a whole number", "0 is below the smallest size, 1"]),
        ("4, 65", ["65 is above the largest possible step, 64 tokens"]),
        ("2.5", ["'2.5' is not a whole number"]),
        ("-1", ["-1 is below the smallest size, 1"]),
        ("99999999999999999999999", ["99999999999999999999999 is above the largest possible step"]),
    ],
)
def test_a_bad_size_list_is_a_card_that_names_value_and_limit(live, typed, named):
    panel, made = live
    press(panel)
    panel.mode.value = "FULL"
    panel.sizes.value = typed
    for words in named:
        assert words in panel.error.value.replace("&#x27;", "'")
    steps = made[0].steps
    press(panel)
    assert panel.hint.value == panel.cost.value == "", "what stood there is about other sizes"
    assert "Run waits until the capture sizes can be read" in panel.status.value
    assert made[0].steps == steps, "nothing may run with a list that is not understood"
    assert len(panel.runs) == 1 and panel.sizes.value == typed, "nothing is lost"
    panel.sizes.value = "1, 4"
    assert panel.error.value == ""
    press(panel)
    assert len(panel.runs) == 2


def test_a_backend_that_cannot_serve_is_named_beforehand_and_its_error_is_a_card(live):
    panel, made = live
    assert ("FLASH_ATTN (not here)", "FLASH_ATTN") in panel.backend.options
    panel.backend.value = "FLASH_ATTN"
    assert "cannot run here: needs a GPU" in panel.hint.value
    assert "Run will be refused: FLASH_ATTN cannot run here" in panel.cost.value and "about" not in panel.cost.value
    assert "1 backend cannot run here: FLASH_ATTN</summary>" in panel.hint.value
    press(panel)
    assert "needs a GPU" in panel.error.value and "Usable here" in panel.error.value
    assert panel.runs == [] and not panel.busy and not panel.run_button.disabled
    assert "The run failed; nothing was added" in panel.status.value
    panel.backend.value = "AUTO"
    press(panel)
    assert len(panel.runs) == 1 and panel.error.value == ""


def test_a_backend_that_can_no_longer_serve_is_named_once_triton_was_loaded(worker, monkeypatch):
    """On a CPU a compilation loads Triton as a compiler, and TRITON_ATTN would need it as an interpreter."""
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    source, made = live_source()
    able = dataclasses.replace(CANDIDATES[1], name="TRITON_ATTN", usable=True, reasons=(), tier=Tier.ALWAYS)
    cannot = dataclasses.replace(able, usable=False, reasons=CANDIDATES[1].reasons)
    source._ask_backends = lambda *args: (CANDIDATES[0], cannot if "triton" in sys.modules else able)
    panel = LatencyPanel(source, worker=worker, redraw=True)
    panel.backend.value = "TRITON_ATTN"
    assert "takes seconds" in panel.hint.value
    monkeypatch.setitem(sys.modules, "triton", object())
    panel.mode.value = "FULL"
    assert "TRITON_ATTN cannot run here: needs a GPU" in panel.hint.value and "refused" in panel.cost.value


def test_a_failed_capture_is_a_card_and_the_next_run_works(live):
    panel, made = live
    press(panel)
    panel.mode.value, panel.sizes.value = "FULL", "13"
    press(panel)
    assert "Lower gpu_memory_utilization" in panel.error.value
    panel.sizes.value = ""
    press(panel)
    assert [r.mode for r in panel.rows] == ["NONE", "FULL"]


def test_a_number_outside_its_range_is_moved_and_the_move_is_said(live):
    panel, made = live
    panel.batch.box.value = 999
    assert panel.batch.value == 16 and "batch 999 is outside 1…16" in panel.hint.value


def test_an_unexpected_error_is_a_card_too(live):
    panel, made = live
    press(panel)

    def gate(engine):
        raise RuntimeError("device-side <assert>")

    made[0].gate = gate
    press(panel)
    assert "RuntimeError: device-side &lt;assert&gt;" in panel.error.value
    assert not panel.busy and len(panel.runs) == 1


def test_html_in_a_prompt_or_in_generated_text_stays_text(live):
    panel, made = live
    panel.prompt.value = "<script>x</script>"
    press(panel)
    assert "<script>" not in panel.text_area.value


# --- pin and reset ---------------------------------------------------------------------------------------------------


def test_four_pinned_runs_stand_side_by_side_and_a_fifth_replaces_the_oldest(live):
    panel, made = live
    assert panel.pin_button.disabled
    for _ in range(5):
        press(panel)
        panel.pin_button.click()
    assert [run.number for run in panel.pinned] == [2, 3, 4, 5]
    assert list(trace_of(panel.figure, "samples", 3, "pinned").y) == list(panel.rows[2].samples_ms)
    said = re.findall(r"No difference shown: A takes|[AB-D] takes [\d.]+ times as long as [A-D]", panel.pins.value)
    assert len(said) == 3, "each of the others is compared with the first"
    assert list(panel.figure.layout.xaxis2.ticktext)[3].startswith("pin D:<br>run 5")
    panel.pin(1)
    assert [run.number for run in panel.pinned] == [3, 4, 5, 1]
    panel.pin(9)
    assert "there is no such run" in panel.error.value
    panel.unpin()
    assert panel.pinned == [] and panel.pins.value == "" and len(panel.runs) == 5


def test_what_became_of_the_run_before_is_said(recorded):
    press(recorded)
    assert recorded.changed == ""
    recorded.mode.value, recorded.batch.value = "FULL", 1
    press(recorded)
    assert recorded.changed.startswith("mode NONE → FULL, 412 launches → 3: run 1 takes 4.39 times as long as run 2")
    assert "Compared with run 1: mode NONE → FULL" in recorded.said.value
    press(recorded)
    assert recorded.changed.startswith("Nothing was set otherwise. No difference shown")


def test_the_chart_shows_what_the_rows_say(live):
    panel, made = live
    press(panel)
    panel.mode.value = "FULL"
    press(panel)
    panel.pin()
    assert figure_equals_data(panel)
    panel.runs[0] = dataclasses.replace(panel.runs[0], row=dataclasses.replace(panel.rows[0], p50_ms=9.0))
    with pytest.raises(AssertionError, match="holds 9.0"):
        figure_equals_data(panel)


def test_old_numbers_under_new_settings_are_marked_where_they_are_seen(live):
    panel, made = live
    press(panel)
    assert panel.stale_mark.value == ""
    panel.batch.value = 2
    assert "this is still run 1" in panel.stale_mark.value
    assert "lk-stale" in panel.view.widget._dom_classes and "lk-stale" in panel.said._dom_classes
    panel.batch.value = 1
    assert panel.stale_mark.value == "" and "lk-stale" not in panel.view.widget._dom_classes


def test_runs_outlive_the_kernel_as_they_were_measured(worker, tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    panels = []
    for _ in range(2):
        source, made = live_source()
        panels.append(LatencyPanel(source, recorded_sources([h200()]), worker=worker, redraw=True, refresh_s=0))
        if len(panels) == 1:
            panels[0].mode.value = "FULL"
            press(panels[0])
            panels[0].source.value = 1
            press(panels[0])
    first, second = panels
    assert second.face.resume.layout.display is None
    second.face.resume.click()
    assert second.error.value == ""
    assert [dataclasses.replace(r, earlier=False) for r in second.runs] == [
        dataclasses.replace(r, reports=()) for r in first.runs
    ]
    assert all(run.earlier for run in second.runs) and "earlier" in second.table_area.value
    assert "was measured before" in second.said.value and figure_equals_data(second)
    assert second.face.resume.layout.display == "none"
    press(second)
    assert [run.number for run in second.runs] == [1, 2, 3]


# --- a recording of the user's own -----------------------------------------------------------------------------------


def test_a_recording_is_loaded_and_stands_beside_the_others(recorded, tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))
    path = recording([row("NONE", 1, 9.0, launches=412)], gpu="NVIDIA L4").save(tmp_path / "mine.json")
    recorded.loader.path.value = str(path)
    assert recorded.error.value == "" and "mine.json" in recorded.loader.said.value
    assert [s.label for s in recorded.sources] == ["NVIDIA H200", "NVIDIA L4 · yours: mine.json"]
    assert recorded.current is recorded.sources[1], "what was loaded is picked"
    press(recorded)
    assert recorded.table[0]["machine"] == "NVIDIA L4" and (tmp_path / "home" / "recordings" / "mine.json").exists()
    recorded.load_recording(path)
    assert len(recorded.sources) == 2 and "here already" in recorded.loader.said.value


@pytest.mark.parametrize("generation", [7, 8])
def test_an_uploaded_recording_is_read_in_both_generations_of_widgets(tmp_path, generation):
    content = recording([row("NONE", 1, 9.0)]).save(tmp_path / "up.json").read_bytes()
    value = {"up.json": {"metadata": {}, "content": content}} if generation == 7 else (
        {"name": "up.json", "content": memoryview(content)},
    )  # fmt: skip
    assert uploaded(value) == [("up.json", content)]
    assert uploaded(widgets.FileUpload().value) == [], "of the generation that is installed"
    wrong = {"../up.json": {"content": b""}} if generation == 7 else ({"name": "../up.json", "content": b""},)
    with pytest.raises(LabkitError, match="no name for a recording"):
        uploaded(wrong)


def test_a_file_that_is_no_recording_is_a_card(recorded, tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))
    (tmp_path / "bad.json").write_text("{}")
    recorded.loader.path.value = str(tmp_path / "bad.json")
    assert "bad.json" in recorded.error.value and len(recorded.sources) == 1
    recorded.loader.path.value = str(tmp_path / "missing.json")
    assert "missing.json" in recorded.error.value


def test_what_did_not_fit_when_it_was_recorded_is_said_before_the_click_and_refused_after_it(worker):
    rows = [row("NONE", batch, 5.0, launches=412, context=c) for batch, c in ((1, 512), (64, 512), (1, 7680))]
    no = Refusal("smollm2-135m", "TRITON_ATTN", "NONE", "", "the KV cache holds 40 requests", 64, 7680)
    rec = dataclasses.replace(recording(rows), refused=(no,))
    panel = LatencyPanel(None, recorded_sources([rec]), worker=worker, redraw=True)
    panel.batch.value = 64
    assert "does not fit" not in panel.hint.value
    panel.context.value = 7680
    assert "batch 64 at context 7680 does not fit (the KV cache holds 40 requests)" in panel.hint.value
    assert "Run will be refused" in panel.cost.value
    press(panel)
    assert panel.runs == [] and "does not fit" in panel.error.value
    panel.batch.value = 1
    assert "does not fit" not in panel.hint.value and panel.error.value == ""


def test_an_arrow_key_goes_from_one_recorded_point_to_the_next(recorded):
    """A step of one would fall back to where it came from."""
    recorded.batch.slider.value = 2
    recorded.batch.slider.value = 3
    assert recorded.batch.value == 4
    recorded.batch.slider.value = 5
    assert recorded.batch.value == 16
    recorded.batch.slider.value = 15
    assert recorded.batch.value == 4


def test_reset_forgets_runs_and_puts_the_controls_back(live):
    panel, made = live
    panel.mode.value, panel.batch.value, panel.sizes.value = "FULL", 4, "4"
    press(panel)
    panel.pin()
    panel.reset_button.click()
    assert panel.runs == [] and panel.pinned == [] and panel.rows == [] and panel.table == []
    assert (panel.mode.value, panel.batch.value, panel.context.value, panel.sizes.value) == ("NONE", 1, 64, "")
    assert panel.table_area.value == "" and panel.pins.value == "" and panel.summary == ""
    press(panel)
    assert panel.runs[0].number == 1 and len(made) == 1


def test_settings_that_changed_since_the_last_run_are_marked(live):
    panel, made = live
    press(panel)
    assert "Run 1 is done" in panel.status.value
    panel.batch.value = 2
    assert "Settings changed since run 1" in panel.status.value
    panel.batch.value = 1
    assert "changed" not in panel.status.value


# --- provenance ------------------------------------------------------------------------------------------------------


def test_every_number_carries_its_kind_and_a_ratio_never_mixes_two(live):
    panel, made = live
    press(panel)
    panel.pin()
    panel.source.value = 1
    press(panel)
    panel.pin()
    assert [entry["kind"] for entry in panel.table] == ["LIVE", "RECORDED"]
    assert "● LIVE" in panel.table_area.value and "■ RECORDED" in panel.table_area.value
    assert "■ RECORDED · NVIDIA H200" in panel.said.value
    assert "No ratio" in panel.pins.value and "times as long" not in panel.pins.value
    names = {trace.name for trace in panel.figure.data if trace.showlegend}
    assert names == {"TORCH_SDPA · NONE · LIVE", "TRITON_ATTN · NONE · RECORDED"}


# --- RECORDED --------------------------------------------------------------------------------------------------------


def test_a_recorded_run_shows_the_recorded_samples(recorded):
    press(recorded)
    assert recorded.error.value == ""
    (shown,) = recorded.rows
    assert (shown.mode, shown.batch, shown.context) == ("NONE", 1, 512)
    assert list(trace_of(recorded.figure, "samples", 1).y) == list(shown.samples_ms)
    assert "412 launches a step" in recorded.summary
    assert "No engine ran" in recorded.text_area.value


def test_full_names_the_launches_it_replaces(recorded):
    recorded.mode.value = "FULL"
    recorded.batch.value = 16
    press(recorded)
    assert recorded.summary.startswith("mode FULL, size 16: 1 graph launch and 2 more instead of 412 launches; 1.57 ms")


def test_eager_batches_snap_to_recorded_ones_and_say_so(recorded):
    recorded.batch.value = 13
    assert recorded.batch.value == 16 == recorded.batch.slider.value
    assert "batch 13 was not recorded; moved to the nearest recorded point, 16" in recorded.hint.value
    recorded.context.box.value = 700
    assert recorded.context.value == 512
    press(recorded)
    assert recorded.rows[0].batch == 16


def test_under_a_graph_a_batch_is_answered_by_the_step_of_its_padded_size(recorded):
    recorded.mode.value = "FULL"
    recorded.batch.value = 13
    assert recorded.batch.value == 13
    assert "batch 13 runs in the graph of 16, 3 padding" in recorded.hint.value
    press(recorded)
    assert (recorded.rows[0].size, recorded.rows[0].p50_ms) == (16, row("FULL", 16, 1.57).p50_ms)
    assert "3 of it padding" in recorded.said.value
    assert recorded.table[0]["batch"] == 13


def test_an_edited_size_list_is_answered_by_the_recorded_step_of_the_padded_size(recorded):
    recorded.mode.value = "FULL"
    recorded.batch.value = 3
    recorded.sizes.value = "2, 24"
    press(recorded)
    assert recorded.rows[0].size == 24


def test_a_size_that_was_not_recorded_is_said_and_never_made_up(recorded):
    recorded.mode.value, recorded.batch.value, recorded.sizes.value = "FULL", 3, "5"
    press(recorded)
    assert recorded.rows == [] and "not recorded" in recorded.error.value and "size 5" in recorded.error.value


def test_above_the_largest_size_the_eager_row_answers_where_there_is_one(recorded):
    recorded.mode.value, recorded.batch.value = "FULL", 64
    press(recorded)
    assert (recorded.rows[0].mode, recorded.rows[0].batch) == ("NONE", 64)
    assert "runs eagerly" in recorded.said.value
    recorded.batch.value, recorded.sizes.value = 13, "8"
    press(recorded)
    assert len(recorded.rows) == 1 and "NONE was not recorded at this batch" in recorded.error.value


def test_changing_the_mode_moves_a_batch_that_is_not_recorded_eagerly_and_says_so(recorded):
    recorded.mode.value, recorded.batch.value = "FULL", 13
    recorded.mode.value = "NONE"
    assert recorded.batch.value == 16 and "batch 13 is not recorded here" in recorded.hint.value


def test_modes_and_backends_that_were_not_recorded_are_not_offered(recorded):
    modes = [value for _, value in recorded.mode.options]
    assert modes == ["NONE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"], "their decode step is the same"
    assert [value for _, value in recorded.compile.options] == ["NONE"]
    assert [value for _, value in recorded.backend.options] == ["TRITON_ATTN"]
    absent = "FLASH_ATTN, FLASHINFER, FLEX_ATTENTION, XFORMERS, TORCH_SDPA, mode PIECEWISE, compile VLLM_COMPILE"
    assert f"Not recorded with these settings: {absent}." in recorded.hint.value


def test_each_recorded_machine_is_its_own_source_and_machines_are_not_compared(worker):
    other = recording([row("NONE", 1, 9.0, launches=412)], gpu="NVIDIA L4")
    panel = LatencyPanel(None, recorded_sources([h200(), other]), worker=worker, redraw=True)
    press(panel)
    panel.pin()
    panel.source.value = 1
    press(panel)
    panel.pin()
    assert [r["machine"] for r in panel.table] == ["NVIDIA H200", "NVIDIA L4"]
    assert "it would compare machines" in panel.pins.value


def test_with_neither_engine_nor_recordings_the_panel_says_so_and_stays_quiet(worker):
    panel = LatencyPanel(None, [], worker=worker, redraw=True, no_live="torch is not installed.")
    assert "torch is not installed" in panel.status.value and "no recordings" in panel.status.value
    assert panel.run_button.disabled
    panel.run()
    assert "nothing to show" in panel.error.value
    panel.reset()
    panel.stop()


# --- strict ----------------------------------------------------------------------------------------------------------


def test_strict_raises_bad_input_from_the_callback(live, monkeypatch):
    panel, made = live
    monkeypatch.setenv("LABKIT_STRICT", "1")
    panel.mode.value = "FULL"
    with pytest.raises(ConfigError, match="is not a whole number"):
        panel.sizes.value = "4, x, 0"
    with pytest.raises(ConfigError, match="is not a whole number"):
        panel.run()
    assert panel.error.value == ""


def test_strict_raises_what_failed_on_the_worker(live, monkeypatch):
    panel, made = live
    monkeypatch.setenv("LABKIT_STRICT", "1")
    panel.backend.value = "FLASH_ATTN"
    with pytest.raises(BackendError, match="needs a GPU"):
        panel.run(wait=True, timeout=20)
    assert panel.error.value == "" and not panel.run_button.disabled
    with pytest.raises(LabkitError, match="there is no such run"):
        panel.pin()


def test_no_control_is_dead_over_recordings_of_all_kinds(worker, monkeypatch):
    """Every choice of every list leads to a run, and the box for eager moves both lists."""
    monkeypatch.setenv("LABKIT_STRICT", "1")
    rows = [row("NONE", b, 5.0, compile=c, launches=400) for b in (1, 8) for c in ("NONE", "VLLM_COMPILE")]
    rows += [row("PIECEWISE", b, 3.0, compile="VLLM_COMPILE", graph_launches=31) for b in (1, 8)]
    rows += [row("FULL", b, 2.0, backend="FLASHINFER") for b in (1, 8)]
    panel = LatencyPanel(None, recorded_sources([h200(), recording(rows)]), worker=worker, redraw=True)
    ran = set()
    for _, backend in panel.backend.options:
        panel.backend.value = backend
        for _, compile in panel.compile.options:
            panel.compile.value = compile
            for _, mode in panel.mode.options:
                panel.mode.value = mode
                panel.run(wait=True, timeout=20)
                shown = panel.rows[-1]
                ran.add((shown.backend, shown.compile, shown.mode))
                assert (shown.backend, shown.compile) == (backend, compile)
    assert ran == {
        ("TRITON_ATTN", "NONE", "NONE"), ("TRITON_ATTN", "NONE", "FULL"), ("TRITON_ATTN", "VLLM_COMPILE", "NONE"),
        ("TRITON_ATTN", "VLLM_COMPILE", "PIECEWISE"), ("FLASHINFER", "NONE", "FULL"),
    }  # fmt: skip
    assert panel.eager.layout.display == "none", "FLASHINFER was not recorded eagerly, so there is nothing to go to"
    panel.backend.value, panel.compile.value = "TRITON_ATTN", "VLLM_COMPILE"
    assert panel.mode.value == "NONE" and "Graph mode FULL" in panel.hint.value, "the move is said"
    panel.eager.value = True
    assert (panel.compile.value, panel.mode.value) == ("NONE", "NONE") and panel.eager.layout.display is None
