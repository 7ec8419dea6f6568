"""The panel of a chapter, over sources without a clock: what its buttons and its methods do, headless."""

from __future__ import annotations

import dataclasses
import json
import re
import threading

import plotly.graph_objects as go
import pytest

from labkit.errors import ConfigError, LabkitError
from labkit.figures.points import drawn
from labkit.lab import keeping, progress
from labkit.lab.fields import Choice, Number, Text, Toggle
from labkit.lab.gate import Gate
from labkit.lab.panel import Panel, figure_equals_data
from labkit.lab.runs import Outcome, Stopped, simulated
from labkit.lab.settings import parse_sizes
from labkit.lab.worker import Worker
from labkit.measure.provenance import Kind
from labkit.measure.stats import Measurement
from tests.conftest import ROOT
from tests.lab.fakes import recording


@pytest.fixture(autouse=True)
def cards(monkeypatch, tmp_path):
    """As a learner would run it: errors are cards, and runs are kept; in a folder of the test's own."""
    monkeypatch.delenv("LABKIT_STRICT", raising=False)
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def worker():
    made = Worker()
    yield made
    made.close()


def made_of(kind, gpu="NVIDIA H200"):
    return dataclasses.replace(recording([], gpu=gpu).provenance, kind=Kind(kind))


class Fake:
    """A step that takes `ms` per request; a LIVE one has noise, a mode that goes away, and sizes to type."""

    def __init__(self, kind="LIVE", label="fake", ms=1.0, gpu="NVIDIA H200"):
        self.kind, self.label, self.ms, self.gpu = kind, label, ms, gpu
        self.gate = lambda step: None
        self.asked = []

    def controls(self, values):
        found = [
            Choice("mode", "Mode", [("no graph", "NONE"), ("graph", "FULL")], help="How a step is launched."),
            Number("batch", "Batch", 1, 64, 4, points=(1, 4, 16, 64) if self.kind == "RECORDED" else None),
        ]
        if values.get("mode") == "FULL":
            found.append(Text("sizes", "Sizes", "1, 2", parse=lambda typed: parse_sizes(typed, 64)))
        if self.kind == "LIVE":
            found.append(Toggle("sync", "wait for the device", True))
        return found

    def cost(self, values):
        return f"about {values['batch']} s"

    def explain(self, values):
        return [f"<{values['mode']}> with {values['batch']}"]

    def run(self, values, context):
        self.asked.append((dict(values), threading.current_thread().name))
        samples = []
        for step in range(5):
            self.gate(step)
            if context.should_stop():
                break
            samples.append(self.ms * values["batch"] * (1 + step / 100))
            context.stage("measuring", step + 1, 5)
            context.partial({"samples": list(samples)})
        if not samples:
            raise Stopped
        made = simulated("fake", ms=self.ms) if self.kind == "SIMULATED" else made_of(self.kind, self.gpu)
        median = sorted(samples)[len(samples) // 2]
        return Outcome(
            {"samples": samples}, {"ms": median, "batch": values["batch"]}, f"A step takes {median:.2f} ms <here>.",
            made, Measurement(made.kind, tuple(samples)), ("a note",), stopped=len(samples) < 5,
        )  # fmt: skip


def figure(runs, pinned):
    shown = go.Figure()
    for run in runs:
        shown.add_scatter(y=run.data["samples"], meta=drawn(run.number, y="samples"), name=f"run {run.number}")
    done = [run.number for run in runs if run.finished]
    shown.add_bar(x=done, y=[run.values["ms"] for run in runs if run.finished], meta=drawn(done, x="run", y="ms"))
    return shown


COLUMNS = [("batch", "batch"), ("ms", "median ms")]


def panel_of(worker, *sources, **more):
    more = {"redraw": True, "refresh_s": 0, **more}
    return Panel("t", "A panel", sources or (Fake(),), figure, COLUMNS, worker=worker, **more)


@pytest.fixture
def panel(worker):
    return panel_of(worker, Fake(), Fake("RECORDED", "H200"), Fake("SIMULATED", "model", ms=2.0))


def press(panel):
    panel.run_button.click()
    panel.wait(20)


# --- runs ------------------------------------------------------------------------------------------------------------


def test_a_run_is_drawn_put_into_a_sentence_and_into_the_table(panel):
    press(panel)
    panel.set(batch=8, mode="FULL")
    press(panel)
    assert panel.error.value == "" and panel.status.value.count("Run 2 is done.") == 1
    assert [(r["run"], r["kind"], r["batch"], r["ms"]) for r in panel.rows] == [
        (1, "LIVE", 4, 4.08),
        (2, "LIVE", 8, 8.16),
    ]
    assert 'data-value="8.16"' in panel.table_area.value and "● LIVE" in panel.table_area.value
    assert panel.summary == "A step takes 8.16 ms <here>."
    assert "A step takes 8.16 ms &lt;here&gt;." in panel.said.value and "a note" in panel.said.value
    assert "LIVE · NVIDIA H200" in panel.said.value
    assert {name for _, name in panel.sources[0].asked} == {"labkit-worker"}
    assert panel.sources[0].asked[1][0] == {"mode": "FULL", "batch": 8, "sizes": (1, 2), "sync": True}
    assert repr(panel) == "Panel('t')"


def test_the_figure_equals_the_data_or_says_where_it_does_not(panel):
    assert figure_equals_data(panel)
    press(panel)
    press(panel)
    assert figure_equals_data(panel)
    panel.view.show(go.Figure(go.Scatter(y=[4.0, 4.04, 4.09], meta=drawn(1, y="samples"))))
    with pytest.raises(AssertionError, match=r"y\[2\] shows 4.09, 'samples' holds 4.08"):
        figure_equals_data(panel)
    panel.view.show(go.Figure(go.Scatter(y=[4.0] * 6, meta=drawn(1, y="samples"))))
    with pytest.raises(AssertionError):
        figure_equals_data(panel)
    panel.view.show(figure(panel.runs[:1], []))
    with pytest.raises(AssertionError, match="shows nothing of run 2"):
        figure_equals_data(panel)
    panel.view.show(go.Figure(go.Bar(y=[1.0], meta=drawn([7], y="ms"))))
    with pytest.raises(AssertionError, match="run 7"):
        figure_equals_data(panel)


def test_what_comes_in_is_drawn_before_it_is_finished(panel):
    seen = []
    panel.sources[0].gate = lambda step: seen.append([len(t.y) for t in panel.figure.data if t.type == "scatter"])
    press(panel)
    assert seen == [[], [1], [2], [3], [4]]


@pytest.mark.parametrize("k", [0, 1, 3, 4])
def test_stop_ends_after_the_step_under_way_and_keeps_what_ran(panel, k):
    panel.sources[0].gate = lambda step: panel.stop_button.click() if step == k else None
    press(panel)
    assert not panel.busy and not panel.run_button.disabled and panel.stop_button.disabled
    if k == 0:
        assert panel.runs == [] and "nothing was added" in panel.status.value
    else:
        assert panel.runs[0].stopped and len(panel.runs[0].data["samples"]) == k
        assert "stopped early" in panel.status.value and "(stopped)" in panel.table_area.value


def test_while_it_is_busy_only_stop_can_be_pressed(panel):
    reached, release = threading.Event(), threading.Event()
    panel.sources[0].gate = lambda step: (reached.set(), release.wait(20))
    panel.run_button.click()
    assert reached.wait(20)
    assert panel.run_button.disabled and panel.reset_button.disabled and not panel.stop_button.disabled
    assert all(control.disabled for control in panel.form.all())
    panel.run()
    assert "still busy" in panel.error.value
    with pytest.raises(LabkitError, match="still busy"):
        panel.set(batch=2)
    release.set()
    panel.wait(20)
    assert not any(control.disabled for control in panel.form.all()) and len(panel.runs) == 1


def test_stop_during_a_compilation_says_that_it_ends_first(panel):
    said = []
    panel.status.observe(lambda change: said.append(change["new"]), names="value")

    def run(values, context):
        context.stage("compiling", 1, 3)
        panel.stop_button.click()
        context.stage("compiling", 2, 3)
        context.check()

    panel.sources[0].run = run
    press(panel)
    assert any("Busy: compiling, 1 of 3" in line for line in said)
    assert any("compiling cannot be broken off" in line for line in said)
    assert "nothing was added" in panel.status.value and panel.error.value == ""


def test_an_error_is_a_card_and_the_next_run_works(panel):
    def broken(step):
        raise LabkitError("batch 4", "no memory for <it>", "Lower batch.")

    panel.sources[0].gate = broken
    press(panel)
    assert "no memory for &lt;it&gt;" in panel.error.value and "Lower batch." in panel.error.value
    assert panel.runs == [] and "The run failed; nothing was added." in panel.status.value
    panel.sources[0].gate = lambda step: None
    press(panel)
    assert panel.error.value == "" and len(panel.runs) == 1


def test_under_strict_an_error_rises(panel, monkeypatch):
    monkeypatch.setenv("LABKIT_STRICT", "1")
    panel.sources[0].gate = lambda step: (_ for _ in ()).throw(ConfigError("x", "no", ""))
    with pytest.raises(ConfigError):
        panel.run(wait=True, timeout=20)
    assert panel.error.value == "" and not panel.run_button.disabled


def test_numbers_without_an_origin_or_with_a_wrong_one_are_not_taken(panel):
    for made in (None, made_of("RECORDED")):
        panel.sources[0].run = lambda values, context, made=made: Outcome({}, {}, "", made)
        press(panel)
        assert panel.runs == [] and "the source is LIVE and gave" in panel.error.value


# --- controls --------------------------------------------------------------------------------------------------------


def test_a_control_that_does_nothing_is_not_there_and_comes_back_with_its_value(panel):
    names = lambda: list(panel.settings)  # noqa: E731
    assert names() == ["mode", "batch", "sync"]
    panel.set(mode="graph", sizes=[4, 8])
    assert names() == ["mode", "batch", "sizes", "sync"] and panel.settings["sizes"] == (4, 8)
    panel.set(mode="NONE")
    assert names() == ["mode", "batch", "sync"]
    panel.set(source="SIMULATED", mode="FULL")
    assert names() == ["mode", "batch", "sizes"] and panel.settings["sizes"] == (4, 8)
    assert [w.description for w in panel.form.box.children if hasattr(w, "description")] == ["Mode", "Sizes"]


def test_cost_and_meaning_follow_the_controls(panel):
    panel.set(batch=9)
    assert "about 9 s" in panel.cost.value and "&lt;NONE&gt; with 9" in panel.hint.value
    assert "How a step is launched." in panel.hint.value


def test_a_value_that_is_not_recorded_moves_and_says_so(panel):
    panel.set(source="RECORDED", batch=13)
    assert panel.settings["batch"] == 16
    assert "Batch 13 is not possible here (1, 4, 16, 64); moved to 16." in panel.hint.value
    field = panel.form.field("batch").number
    field.box.value = 3
    assert panel.settings["batch"] == 4 == field.slider.value and "moved to 4" in panel.hint.value
    field.slider.value = 5  # an arrow key
    assert panel.settings["batch"] == 16
    panel.set(source=0, batch=9)
    panel.set(source="RECORDED")
    assert panel.settings["batch"] == 4 and "Batch 9 is not possible here" in panel.hint.value


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"bach": 3}, "Did you mean 'batch'"),
        ({"mode": "FULLL"}, "Did you mean 'FULL'"),
        ({"source": "H100"}, "there is none of that name"),
        ({"batch": "many"}, "is not a number"),
        ({"sync": 1}, "neither on nor off"),
    ],
)
def test_set_refuses_what_is_not_there(panel, values, words):
    with pytest.raises(ConfigError, match=words):
        panel.set(**values)


def test_what_does_not_parse_is_a_card_and_nothing_runs_with_it(panel):
    panel.set(mode="FULL")
    press(panel)
    panel.form.field("sizes").widget.value = "4, x"
    assert "is not a whole number" in panel.error.value and panel.cost.value == ""
    assert "Run waits until the controls can be read." in panel.status.value and panel.stale
    press(panel)
    assert len(panel.runs) == 1
    panel.form.field("sizes").widget.value = "4"
    assert panel.error.value == "" and panel.settings["sizes"] == (4,)


def test_a_number_may_have_a_fraction():
    share = Number("share", "Share", 0.0, 1.0, 0.5, step=0.05)
    assert share.take(0.25) == (0.25, "") and share.take(7)[0] == 1.0
    whole = Number("n", "N", 1, 9, 3)
    assert whole.take(2.6)[0] == 3 and whole.take("4") == (4, "")
    with pytest.raises(ConfigError, match="is not a number"):
        whole.take(float("nan"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Choice("a", "A", []), lambda: Choice("a", "A", [("x", 1)], 2), lambda: Number("a", "A", 3, 1, 2),
        lambda: Number("a", "A", 1, 3, 2, points=()), lambda: Toggle("not a name", "A"), lambda: Text("a", ""),
    ],
)  # fmt: skip
def test_a_control_that_cannot_work_is_refused_when_it_is_made(make):
    with pytest.raises(LabkitError):
        make()


# --- comparing -------------------------------------------------------------------------------------------------------


def test_four_pins_each_compared_with_the_first(panel):
    for batch in (4, 8, 16, 32, 1):
        panel.set(batch=batch)
        press(panel)
        panel.pin_button.click()
    assert [run.number for run in panel.pinned] == [2, 3, 4, 5]
    assert "B takes 2.00 times as long as A" in panel.pins.value and "C takes 4.00 times" in panel.pins.value
    assert "A takes 8.00 times as long as D" in panel.pins.value
    panel.unpin()
    assert panel.pinned == [] and panel.pins.value == ""


def test_kinds_machines_and_noise_give_no_ratio(worker):
    panel = panel_of(
        worker, Fake(), Fake("RECORDED", "H200", ms=9.0), Fake("LIVE", "L4", ms=9.0, gpu="L4"), Fake("SIMULATED", "m")
    )
    for source in range(4):
        panel.set(source=source)
        press(panel)
        panel.pin()
    said = re.findall(r"<p>(?:<span.*?</span> )?(No .*?)</p>", panel.pins.value)
    assert ["mixes the two" in said[0], "compare machines" in said[1], "mixes the two" in said[2]] == [True] * 3
    panel.unpin()
    panel.set(source=0)
    for _ in range(2):
        press(panel)
        panel.pin()
    assert "noise, or less than 5 %" in panel.pins.value


def test_the_difference_of_a_model_counts_however_small(panel):
    panel.set(source="SIMULATED", batch=50)
    press(panel)
    panel.pin()
    press(panel)
    panel.pin()
    assert "each spreads over more than that" in panel.pins.value
    panel.unpin()
    for ms in (1.0, 1.01, 1.0):
        panel.sources[2].run = lambda values, context, ms=ms: Outcome(
            {"samples": [ms]}, {"ms": ms}, "", simulated("m"), Measurement(Kind.SIMULATED, (ms,))
        )
        press(panel)
        panel.pin()
    assert "B takes 1.01 times as long as A." in panel.pins.value
    assert "C; the model gives the same for both" in panel.pins.value


def test_another_quantity_is_named(panel):
    for mib in (10.0, 30.0):
        panel.sources[0].run = lambda values, context, mib=mib: Outcome(
            {"samples": [mib]}, {"ms": mib}, "", made_of("LIVE"), Measurement(Kind.LIVE, (mib,)), quantity="memory"
        )
        press(panel)
        panel.pin()
    assert "B has 3.00 times the memory of A" in panel.pins.value


def test_what_was_set_otherwise_and_why_it_changed_are_said(worker):
    panel = panel_of(worker, changed=lambda new, old: "More requests share one read of the weights.")
    press(panel)
    assert panel.changed == ""
    panel.set(batch=8)
    press(panel)
    expected = "Batch 4 → 8: run 2 takes 2.00 times as long as run 1"
    assert panel.changed.startswith(expected) and panel.changed.endswith("one read of the weights.")
    assert f"Compared with run 1: {expected}" in panel.said.value
    press(panel)
    assert panel.changed.startswith("Nothing was set otherwise. No difference shown")


def test_old_numbers_under_new_settings_are_marked(panel):
    press(panel)
    assert not panel.stale and panel.stale_mark.value == ""
    panel.set(batch=5)
    assert panel.stale and "this is still run 1. Press Run." in panel.stale_mark.value
    assert "lk-stale" in panel.said._dom_classes and "Settings changed since run 1" in panel.status.value
    panel.set(batch=4, source=1)
    assert panel.stale, "another source is another setting"
    panel.set(source=0)
    assert not panel.stale and "lk-stale" not in panel.said._dom_classes


def test_reset_puts_everything_back(panel):
    panel.set(batch=8, mode="FULL", sizes="9")
    press(panel)
    panel.pin()
    panel.reset_button.click()
    assert (panel.runs, panel.pinned, panel.rows, panel.summary) == ([], [], [], "")
    assert panel.settings == {"mode": "NONE", "batch": 4, "sync": True}
    press(panel)
    assert panel.runs[0].number == 1


# --- files -----------------------------------------------------------------------------------------------------------


def test_save_writes_what_the_ending_says_with_its_origin(panel, tmp_path):
    press(panel)
    panel.set(source="SIMULATED")
    press(panel)
    lines = panel.save(tmp_path / "a.csv").read_text().splitlines()
    assert lines[0] == "run,kind,source,ms,batch,provenance" and lines[1].startswith("1,LIVE,fake,4.08,4,LIVE · NVIDIA")
    assert "SIMULATED · model: fake (ms=2)" in lines[2]
    data = json.loads(panel.save(tmp_path / "a.json").read_text())
    assert [run["provenance"]["kind"] for run in data["runs"]] == ["LIVE", "SIMULATED"]
    assert data["runs"][0]["data"]["samples"] == panel.runs[0].data["samples"]
    page = panel.save(tmp_path / "a.html").read_text()
    assert "A step takes 8.16 ms &lt;here&gt;" in page and "Plotly.newPlot" in page and "cdn" not in page[:3000]
    with pytest.raises(ConfigError, match="no kind of file"):
        panel.save(tmp_path / "a.xlsx")
    with pytest.raises(LabkitError, match="cannot be written|No such file"):
        panel.save(tmp_path / "nowhere" / "a.csv")


def test_a_picture_needs_kaleido_and_says_so(panel, tmp_path, monkeypatch):
    def to_image(self, **options):
        raise ValueError("Image export requires the kaleido package,\nwhich can be installed using pip")

    monkeypatch.setattr(go.Figure, "to_image", to_image)
    press(panel)
    with pytest.raises(LabkitError, match="kaleido is not installed.*camera"):
        panel.save(tmp_path / "a.png")
    panel.face.saves[3].click()
    assert "camera" in panel.error.value
    monkeypatch.setattr(go.Figure, "to_image", lambda self, **options: b"png")
    assert panel.save(tmp_path / "a.png").read_bytes() == b"png"


def test_the_buttons_save_next_to_the_notebook_and_overwrite_nothing(panel, tmp_path):
    assert all(button.layout.display == "none" for button in panel.face.saves), "nothing to save yet"
    press(panel)
    for name in ("t.csv", "t-2.csv"):
        panel.face.saves[0].click()
        assert (tmp_path / name).exists() and f"<b>{name}</b>" in panel.face.files.value
        assert f'download="{name}"' in panel.face.files.value and str(tmp_path) not in panel.face.files.value


def test_the_table_can_be_put_away(panel):
    press(panel)
    panel.face.table_shown.value = False
    assert panel.table_area.layout.display == "none"
    panel.face.table_shown.value = True
    assert panel.table_area.layout.display is None


# --- another kernel --------------------------------------------------------------------------------------------------


def test_runs_come_back_as_they_were_measured(worker):
    first = panel_of(worker, Fake(), Fake("SIMULATED", "model"))
    press(first)
    first.set(source="SIMULATED", batch=9)
    press(first)
    second = panel_of(worker, Fake(), Fake("SIMULATED", "model"))
    assert second.face.resume.layout.display is None and second.runs == []
    second.face.resume.click()
    assert second.error.value == "" and "2 earlier runs brought back" in second.status.value
    for old, new in zip(first.runs, second.runs, strict=True):
        assert new.earlier and new.outcome == old.outcome and new.kind == old.kind and new.settings == old.settings
    assert figure_equals_data(second) and second.table_area.value.count("earlier") == 2
    press(second)
    third = panel_of(worker, Fake(), Fake("SIMULATED", "model"))
    third.resume()
    assert [run.number for run in third.runs] == [1, 2, 3], "what was brought back is kept, too, and once"


def test_runs_that_were_not_brought_back_are_still_there_for_the_kernel_after_next(worker):
    press(panel_of(worker))
    press(panel_of(worker))
    third = panel_of(worker)
    third.resume()
    assert len(third.runs) == 2


def test_reset_can_be_undone(panel):
    press(panel)
    panel.reset()
    assert panel.face.resume.layout.display is None
    panel.resume()
    assert len(panel.runs) == 1 and panel.runs[0].earlier


def test_only_so_much_is_kept(worker, monkeypatch):
    monkeypatch.setattr(keeping, "MOST_RUNS", 3)
    panel = panel_of(worker)
    for batch in (1, 2, 3, 4, 5):
        panel.set(batch=batch)
        press(panel)
    assert [run["settings"]["batch"] for run in keeping.kept("t")] == [3, 4, 5]
    monkeypatch.setattr(keeping, "MOST_BYTES", 10)
    press(panel)
    assert len(keeping.kept("t")) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 99, "runs": []}', '{"schema": 1, "runs": [{}, 3]}'])
def test_a_damaged_file_stops_nobody(worker, text):
    path = keeping.kept_file("t")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    panel = panel_of(worker)
    panel.resume()
    assert "no run of this panel is stored that can be read" in panel.error.value
    press(panel)
    assert len(panel.runs) == 1


def test_runs_of_another_version_of_the_panel_do_not_break_the_chart(worker):
    press(panel_of(worker))
    stored = keeping.kept("t")
    stored[0]["data"] = {"other": 1}
    keeping.keep("t", stored)
    panel = panel_of(worker)
    panel.resume()
    assert "of another version" in panel.error.value and panel.runs == []
    press(panel)
    assert len(panel.runs) == 1


def test_what_cannot_be_stored_is_still_shown(panel):
    panel.sources[0].run = lambda values, context: Outcome({"samples": [1.0], "x": object()}, {"ms": 1.0}, "s",
                                                           made_of("LIVE"))  # fmt: skip
    press(panel)
    assert panel.error.value == "" and len(panel.runs) == 1 and keeping.kept("t") == []


def test_tests_keep_nothing_unless_they_ask(worker, monkeypatch):
    monkeypatch.setenv("LABKIT_STRICT", "1")
    press(panel_of(worker))
    assert not keeping.kept_file("t").exists()
    press(panel_of(worker, autosave=True))
    assert keeping.kept_file("t").exists()


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".x", "a b"])
def test_a_name_that_is_no_file_name_is_refused(worker, name):
    with pytest.raises(ConfigError):
        Panel(name, "A panel", [Fake()], figure, COLUMNS, worker=worker, redraw=True)


# --- prediction ------------------------------------------------------------------------------------------------------

CHOICE = Gate(
    "01.t", "How <long>?", options=[("4 ms", 4.0), ("4.08 ms", 4.08)], answer=lambda runs: runs[-1].values["ms"],
    explain=lambda runs: f"The median of {len(runs[-1].data['samples'])}.",
)  # fmt: skip
NUMBER = Gate("01.n", "How long?", number=Number("ms", "ms", 0.0, 100.0, 50.0, unit="ms"), answer=4.08, tolerance=0.1)


def test_run_waits_for_a_prediction_and_shows_it_beside_the_result(worker, monkeypatch):
    noted = []
    monkeypatch.setattr(progress, "note_prediction", lambda *args: noted.append(args))
    panel = panel_of(worker, gate=CHOICE)
    assert panel.run_button.disabled and "Answer the question above" in panel.status.value
    assert "How &lt;long&gt;?" in panel.gate.asked.value
    panel.gate.commit_button.click()
    assert "Choose one of" in panel.error.value and panel.run_button.disabled, "nothing was chosen"
    panel.gate.entry.value = 4.0
    panel.gate.commit_button.click()
    assert not panel.run_button.disabled and "You predict: <b>4 ms</b>" in panel.gate.said.value
    press(panel)
    said = panel.gate.said.value
    assert "✗ It came out otherwise" in said and "You: <b>4 ms</b>" in said and "Result: <b>4.08 ms</b>" in said
    assert "The median of 5." in said and noted == [("01.t", 4.0, False)]
    press(panel)
    assert len(noted) == 1 and not panel.run_button.disabled
    panel.reset()
    assert not panel.run_button.disabled and panel.gate.prediction == 4.0, "a prediction is made once"


@pytest.mark.parametrize(("guess", "right"), [(4.08, True), (4.4, True), (4.6, False), (3.0, False)])
def test_a_number_is_right_within_its_tolerance(worker, monkeypatch, guess, right):
    noted = []
    monkeypatch.setattr(progress, "note_prediction", lambda *args: noted.append(args))
    panel = panel_of(worker, gate=NUMBER)
    panel.predict(guess)
    press(panel)
    assert noted == [("01.n", guess, right)] and ("✓" in panel.gate.said.value) == right


def test_a_number_outside_of_what_can_be_is_asked_again(worker):
    panel = panel_of(worker, gate=NUMBER)
    panel.gate.entry.value = 1e6
    panel.predict()
    assert "Give a number from 0 to 100 ms" in panel.error.value and panel.run_button.disabled


def test_skip_opens_the_gate_and_is_kept(worker, monkeypatch):
    noted = []
    monkeypatch.setattr(progress, "note_prediction", lambda *args: noted.append(args))
    panel = panel_of(worker, gate=CHOICE)
    panel.gate.skip_button.click()
    assert not panel.run_button.disabled and noted == [("01.t", None, None)]
    press(panel)
    assert "No prediction was made. Result: <b>4.08 ms</b>" in panel.gate.said.value


def test_a_cell_runs_the_panel_without_a_prediction(worker, monkeypatch):
    noted = []
    monkeypatch.setattr(progress, "note_prediction", lambda *args: noted.append(args))
    panel = panel_of(worker, gate=CHOICE)
    panel.run(wait=True, timeout=20)
    assert len(panel.runs) == 1 and noted == [] and not panel.run_button.disabled
    assert "Result: <b>4.08 ms</b>" in panel.gate.said.value


def test_an_answer_may_take_two_runs(worker):
    gate = dataclasses.replace(CHOICE, answer=lambda runs: 4.08 if len(runs) > 1 else None)
    panel = panel_of(worker, gate=gate)
    panel.predict("4.08 ms")
    press(panel)
    assert "Another run tells." in panel.gate.said.value
    press(panel)
    assert "✓ That is what came out" in panel.gate.said.value


def test_later_runs_do_not_turn_the_verdict(worker):
    """They answer another question than the one that was asked."""
    panel = panel_of(worker, gate=CHOICE)
    panel.predict(4.08)
    press(panel)
    panel.set(batch=9)
    press(panel)
    assert "✓" in panel.gate.said.value and "Result: <b>4.08 ms</b>" in panel.gate.said.value


def test_a_predicted_number_is_drawn_where_the_result_will_be(worker):
    panel = panel_of(worker, gate=dataclasses.replace(NUMBER, axis="y"))
    assert not panel.figure.layout.shapes
    panel.predict(7.5)
    (line,) = panel.figure.layout.shapes
    assert (line.y0, line.y1, line.yref, line.xref) == (7.5, 7.5, "y", "paper")
    assert panel.figure.layout.annotations[-1].text == "your prediction"


def test_resume_brings_the_prediction_back_and_run_can_be_pressed(worker):
    first = panel_of(worker, gate=CHOICE)
    first.predict(4.08)
    press(first)
    second = panel_of(worker, gate=CHOICE)
    assert second.run_button.disabled
    second.resume()
    assert "You: <b>4.08 ms</b>" in second.gate.said.value and not second.run_button.disabled
    other = panel_of(worker, gate=dataclasses.replace(CHOICE, id="never"))
    other.resume()
    assert "No prediction was made" in other.gate.said.value and not other.run_button.disabled


@pytest.mark.parametrize("more", [{}, {"options": CHOICE.options, "number": NUMBER.number}, {"options": CHOICE.options,
                                                                                           "axis": "y"}])  # fmt: skip
def test_a_gate_needs_one_way_to_answer(more):
    with pytest.raises(ConfigError):
        Gate("x", "?", **more)


# --- looks -----------------------------------------------------------------------------------------------------------


def test_a_single_source_is_named_and_several_can_be_picked(worker):
    panel = panel_of(worker)
    assert panel.form.source.layout.display == "none" and "LIVE · fake" in panel.face.only_source.value
    panel.add_source(Fake("SIMULATED", "model"))
    assert panel.form.source.layout.display is None and panel.face.only_source.value == ""
    assert panel.current is panel.sources[1]
    press(panel)
    assert panel.runs[0].kind == "SIMULATED"


def test_a_figure_without_a_look_gets_one_and_an_empty_one_says_what_to_do(panel):
    layout = panel.figure.layout
    assert layout.annotations[0].text == "No run yet. Press Run." and layout.annotations[0].visible
    assert layout.template.layout.paper_bgcolor == "rgba(0,0,0,0)"
    assert layout.height == 420 and layout.autosize
    press(panel)
    assert not panel.figure.layout.annotations[0].visible
    assert panel.summary in panel.view._output.outputs[0]["data"]["text/plain"]


def test_at_most_one_figure_widget_is_in_a_panel(worker):
    panel = panel_of(worker, redraw=None)

    def below(widget):
        yield widget
        for child in getattr(widget, "children", ()):
            yield from below(child)

    assert sum(isinstance(one, go.FigureWidget) for one in below(panel.widget)) <= 1


# --- words -----------------------------------------------------------------------------------------------------------


def test_the_example_in_the_guide_works():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(import plotly.*?)```", text, re.DOTALL)
    found: dict[str, object] = {}
    exec(compile(code, "CONTRIBUTING.md", "exec"), found)  # noqa: S102
    panel = found["panel"]
    assert panel.rows[0]["step_us"] == 48.0 and "host is slower" in panel.summary
    assert "half of the time" in panel.gate.said.value
