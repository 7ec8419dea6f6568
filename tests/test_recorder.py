"""Recording a suite: a run may end anywhere and goes on, points that do not fit are said, nothing is done twice."""

from __future__ import annotations

import dataclasses
import itertools
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from labkit import bench
from labkit.attention.interface import AttentionCGSupport as Tier
from labkit.bench import recorder, suites
from labkit.bench.journal import Journal
from labkit.bench.recorder import counted_before, missing, record
from labkit.bench.steps import DoesNotFit
from labkit.bench.suites import COURSE_SUITES, FIVE_WAYS, FormSuite, Suite
from labkit.cli.entry import main
from labkit.cli.record import _TEXTS, TABLES, Deadline
from labkit.config import EngineConfig
from labkit.errors import LabkitError
from labkit.measure.provenance import ProvenanceError
from labkit.measure.recordings import load
from labkit.models.shapes import SHAPES
from tests.test_bench import MODEL, SMALL, fake  # noqa: F401

FORMS = FormSuite("forms", ("tiny-llama", "tiny-qwen3"), FIVE_WAYS, (1, 8), (16,), steps=52, warmup=1,
                  settings={"max_model_len": 128, "max_num_seqs": 8})  # fmt: skip


# --- a run may end anywhere ----------------------------------------------------------------------------------------


def killed(monkeypatch: pytest.MonkeyPatch, suite, out: Path, after: int) -> None:
    """A run that is killed while it measures row `after`: nothing is saved at the end."""
    count = itertools.count()

    def stop() -> bool:
        if next(count) > after:
            raise KeyboardInterrupt
        return False

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "save", lambda self: None)
        with pytest.raises(KeyboardInterrupt):
            record(suite, out, device="cpu", should_stop=stop)


@pytest.mark.parametrize("after", [2, 3, 7, 12])
def test_a_killed_run_loses_nothing_that_was_measured(fake, tmp_path, monkeypatch, after: int) -> None:  # noqa: F811
    out = tmp_path / "x.json.gz"
    killed(monkeypatch, SMALL, out, after)
    assert not out.exists() and (tmp_path / "x.json.gz.journal").exists()
    before = sum(llm.steps for llm in fake.made)
    whole = record(SMALL, out, device="cpu")
    assert len(whole.rows) == SMALL.num_rows() == 12 and load(out) == whole
    assert [p.name for p in tmp_path.iterdir()] == ["x.json.gz"], "the journal goes when the file is whole"
    rows_before = before // 52  # one warm-up step, fifty and one that is counted
    assert sum(llm.steps for llm in fake.made) - before == (12 - rows_before) * 52


def test_a_journal_that_broke_anywhere_is_believed_up_to_there(fake, tmp_path, monkeypatch) -> None:  # noqa: F811
    out = tmp_path / "x.json.gz"
    killed(monkeypatch, SMALL, out, 7)
    journal = tmp_path / "x.json.gz.journal"
    whole = journal.read_bytes()
    complete = {len(b"\n".join(whole.split(b"\n")[: i + 1])) for i in range(whole.count(b"\n"))}
    provenance = Journal(
        tmp_path / "none", recorder.collect("RECORDED", "x", n=50, primed=True, device="cpu")
    )._provenance
    counts = []
    for cut in sorted({0, 5, *complete, *(c + 20 for c in complete), len(whole)}):
        journal.write_bytes(whole[:cut])
        counts.append(len(Journal(out, provenance).rows))
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] >= 4
    journal.write_bytes(whole.replace(b'"n": 50', b'"n": 51', 2))  # of the head, then of the first row
    broken = Journal(out, provenance)
    assert len(broken.rows) < counts[-1], "a line that disagrees with itself ends it"


def test_a_journal_of_another_machine_is_not_mixed_in(fake, tmp_path, monkeypatch) -> None:  # noqa: F811
    out = tmp_path / "x.json.gz"
    killed(monkeypatch, SMALL, out, 5)
    journal = tmp_path / "x.json.gz.journal"
    head, rest = journal.read_text().split("\n", 1)
    journal.write_text(json.dumps({**json.loads(head), "gpu": "NVIDIA T4"}) + "\n" + rest)
    with pytest.raises(ProvenanceError, match="gpu None ≠ NVIDIA T4"):
        record(SMALL, out, device="cpu")


def test_the_file_is_written_now_and_then_not_after_every_row(fake, tmp_path, monkeypatch) -> None:  # noqa: F811
    saves = []
    real = Journal.save
    monkeypatch.setattr(Journal, "save", lambda self: (saves.append(len(self.rows)), real(self)))
    record(SMALL, tmp_path / "x.json.gz", device="cpu")
    assert saves == [12]
    monkeypatch.setattr("labkit.bench.journal.EVERY_S", -1.0)
    saves.clear()
    record(dataclasses.replace(SMALL, contexts=(17,)), tmp_path / "y.json.gz", device="cpu")
    assert saves[-1] == 12 and len(saves) > 12


KILLED = """
import os, pathlib, signal, sys
sys.modules["torch"] = None  # nothing here needs it, and loading it takes seconds
import labkit.bench.recorder as recorder, labkit.llm
from tests.test_bench import SMALL, FakeLLM, bench
labkit.llm.LLM = FakeLLM
recorder.measure_yardsticks = lambda llm, progress=None: bench.Yardsticks({}, 4000.0)
rows = int(sys.argv[2])
FakeLLM.made += [None] * (rows + 20)  # other noise in each process
def progress(stage, done, total, detail):
    if stage == "recording" and done == rows:
        os.kill(os.getpid(), signal.SIGKILL)
recorder.record(SMALL, pathlib.Path(sys.argv[1]), command="test", device="cpu", progress=progress)
"""


def test_a_process_that_is_killed_goes_on_where_it_was(tmp_path: Path, user_env) -> None:
    """The real signal, twice: no handler runs, nothing is saved at the end."""
    out = tmp_path / "x.json.gz"
    # The checkout may change between the runs while somebody works in it.
    env = {**user_env, "PATH": str(tmp_path), "LABKIT_COMMIT": "0123456789abcdef", "LABKIT_DIRTY": "0"}
    for rows in (3, 8):
        done = subprocess.run([sys.executable, "-c", KILLED, str(out), str(rows)], env=env)
        assert done.returncode == -signal.SIGKILL and out.with_name("x.json.gz.journal").exists()
    subprocess.run([sys.executable, "-c", KILLED, str(out), "-1"], env=env, check=True)
    whole = load(out)
    assert len(whole.rows) == 12 and missing(SMALL, whole) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["x.json.gz"]


# --- time that runs out --------------------------------------------------------------------------------------------


def test_a_deadline_is_asked_between_rows_and_remembers(fake, tmp_path: Path) -> None:  # noqa: F811
    now = 0.0
    deadline = Deadline(1, clock=lambda: now)
    assert not deadline() and not deadline.stopped
    now = 60.0
    assert deadline() and deadline.stopped
    now = 0.0
    assert deadline(), "over is over"
    assert not Deadline(None)()


def test_what_is_left_is_counted_down_to_nothing(fake, tmp_path: Path) -> None:  # noqa: F811
    out, seen = tmp_path / "x.json.gz", []
    while not seen or seen[-1]:
        limit = len(seen) + 3
        count = itertools.count()
        recording = record(SMALL, out, device="cpu", should_stop=lambda c=count, n=limit: next(c) >= n)
        seen.append(missing(SMALL, recording))
    assert seen == sorted(seen, reverse=True) and len(seen) > 2
    assert load(out).rows == recording.rows and len(recording.rows) == 12


def test_a_mode_whose_rows_are_all_there_is_not_captured_again(fake, tmp_path: Path) -> None:  # noqa: F811
    out = tmp_path / "x.json.gz"
    suite = dataclasses.replace(SMALL, backends=("TRITON_ATTN",), modes=("FULL_DECODE_ONLY", "PIECEWISE"))
    whole = record(suite, out, device="cpu")
    kept = tuple(row for row in whole.rows if (row.requested_mode, row.batch) != ("NONE", 2))
    dataclasses.replace(whole, rows=kept).save(out)
    fake.made.clear()
    assert len(record(suite, out, device="cpu").rows) == len(whole.rows)
    modes = [c[1]["cudagraph_mode"] for c in fake.made[0].calls if c[0] == "reconfigure"]
    assert modes == ["NONE"]


# --- what does not fit ---------------------------------------------------------------------------------------------


def test_a_point_that_does_not_fit_is_refused_and_the_others_are_measured(fake, tmp_path, monkeypatch) -> None:  # noqa: F811
    pages = 12  # of 16 tokens; the null page is one: 8 requests of two pages do not fit, of one they do
    page_bytes = 16 * MODEL.kv_bytes_per_token(4)
    real = fake.__init__

    def small(self, *args, **kwargs) -> None:
        real(self, *args, **kwargs)
        self.config = self.config.replace(block_size=16)
        self.memory["kv"] = pages * page_bytes

    monkeypatch.setattr(fake, "__init__", small)
    suite = dataclasses.replace(SMALL, backends=("TRITON_ATTN",), contexts=(8, 64), steps=50, graph_sizes=(1, 2, 8))
    recording = record(suite, tmp_path / "x.json.gz", device="cpu")
    fits = {(c, b): b * -(-(c - min(1, c - 1) + 1 + 50 + 2) // 16) <= pages - 1 for c in (8, 64) for b in (1, 2, 8)}
    assert {(r.context, r.batch) for r in recording.rows if r.mode == "FULL"} == {key for key, ok in fits.items() if ok}
    refused = {(one.context, one.batch): one for one in recording.refused if one.requested_mode != "NONE"}
    assert set(refused) == {key for key, ok in fits.items() if not ok} and len(refused) >= 2
    assert "does not fit: it needs" in refused[64, 8].reason
    assert missing(suite, recording) == 0 and load(tmp_path / "x.json.gz").refused == recording.refused
    made = len(fake.made)
    record(suite, tmp_path / "x.json.gz", device="cpu")
    assert len(fake.made) == made, "what did not fit is not tried again"
    ask = dict(model="tiny-llama", backend="TRITON_ATTN", batch=8, context=64)
    assert "does not fit" in recording.why_not(**ask, requested_mode="FULL_AND_PIECEWISE")
    llm = fake(config=EngineConfig(max_model_len=128, max_num_seqs=8))
    with pytest.raises(DoesNotFit):
        bench.measure_steps(llm, 8, 64, steps=50, warmup=1)
    assert llm.calls == [], "known before anything is primed"


# --- nothing twice -------------------------------------------------------------------------------------------------


def test_launches_of_a_full_graph_are_counted_once_for_all_contexts(fake, tmp_path, monkeypatch) -> None:  # noqa: F811
    traced = []
    real = bench.steps.launches.count
    monkeypatch.setattr(bench.steps.launches, "count", lambda step: (traced.append(1), real(step))[1])
    suite = dataclasses.replace(SMALL, backends=("TRITON_ATTN",), contexts=(16, 32, 48),
                                modes=("FULL_DECODE_ONLY", "PIECEWISE"), graph_sizes=(1, 8))  # fmt: skip
    recording = record(suite, tmp_path / "x.json.gz", device="cpu")
    assert len(recording.rows) == 3 * (2 + 2 + 2)
    assert len(traced) == 2 + 3 * 2 + 3 * 2, "each batch of FULL once; PIECEWISE and eager at every context"
    for batch in (1, 8):
        rows = [r for r in recording.rows if (r.mode, r.batch) == ("FULL", batch)]
        assert len({(r.launches, r.graph_launches, tuple(r.launches_by_kind.items())) for r in rows}) == 1


def test_a_count_is_taken_over_only_where_nothing_can_differ(fake, tmp_path: Path) -> None:  # noqa: F811
    recording = record(SMALL, tmp_path / "x.json.gz", device="cpu")
    llm = SimpleNamespace(config=EngineConfig(block_size=16))
    key = ("tiny-llama", "TRITON_ATTN", "NONE", "FULL_DECODE_ONLY", 8, 512, 0)
    assert counted_before(recording.rows, key, llm).launches == 4
    for i, value in ((0, "other"), (1, "FLASHINFER"), (2, "VLLM_COMPILE"), (3, "FULL"), (3, "NONE"), (4, 16), (5, 520)):
        other = tuple(value if at == i else old for at, old in enumerate(key))
        assert counted_before(recording.rows, other, llm) is None, f"{key[i]} is not {value}"


def test_the_cache_is_filled_once_and_again_only_when_it_is_a_new_one(fake, tmp_path, monkeypatch) -> None:  # noqa: F811
    record(SMALL, tmp_path / "x.json.gz", device="cpu")
    assert [c[0] for c in fake.made[0].calls].count("fill_kv") == 1
    real = fake.reconfigure

    def relay(self, **changes):
        real(self, **changes)
        return SimpleNamespace(rebuilt_ms={"kv_cache": 1.0} if "attention_backend" in changes else {})

    monkeypatch.setattr(fake, "reconfigure", relay)
    fake.made.clear()
    record(SMALL, tmp_path / "y.json.gz", device="cpu")
    assert [c[0] for c in fake.made[0].calls].count("fill_kv") == 2


def test_priming_a_filled_cache_leaves_it_and_filling_reaches_every_block() -> None:
    import torch

    from labkit.llm import LLM

    config = EngineConfig(model="tiny-llama", device="cpu", max_model_len=64, max_num_seqs=3, enforce_eager=True)
    with LLM(config=config) as llm:
        kv = llm.engine.kv
        llm.engine.fill_kv(3, blocks_at_a_time=5)
        assert not kv.data[:, :, 0].any() and torch.isfinite(kv.data).all()
        assert (kv.data[:, :, 1:].flatten(3).std(-1) > 0.5).all(), "every block of every layer"
        before = kv.data.clone()
        llm.prime(2, 20, 4, fill=False)
        assert torch.equal(kv.data, before)
        assert llm.step().num_reqs == 2
        llm.reset()
        llm.prime(2, 20, 4)
        assert not torch.equal(kv.data, before)


# --- forms, captures, the course -----------------------------------------------------------------------------------


def test_forms_take_turns_point_by_point_and_a_run_goes_on_with_the_next(fake, tmp_path: Path) -> None:  # noqa: F811
    out = tmp_path / "five.json.gz"
    count = itertools.count()
    first = record(FORMS, out, device="cpu", should_stop=lambda: next(count) >= 2)
    assert len(first.rows) == 6 and missing(FORMS, first) == 18
    assert {(r.rounds, r.n) for r in first.rows} == {(4, 52)}
    whole = record(FORMS, out, device="cpu")
    assert len(whole.rows) == FORMS.num_rows() == 24 and missing(FORMS, whole) == 0
    assert whole.rows[:6] == first.rows and load(out) == whole
    assert len({(r.compile, r.requested_mode) for r in whole.rows}) == 6
    assert {(one.compile, one.requested_mode) for one in whole.setups} == {
        (form.compile, form.mode) for form in FIVE_WAYS if form.mode != "NONE"
    }
    pairs = [p for p in bench.comparisons(whole) if p.graph.compile == "NONE"]
    assert pairs and all(p.ratio.paired for p in pairs)
    made = len(fake.made)
    record(FORMS, out, device="cpu")
    assert len(fake.made) == made, "with every row there no engine is made"


def test_a_form_that_cannot_run_is_refused_for_every_point(fake, tmp_path: Path) -> None:  # noqa: F811
    fake.cannot = ("VLLM_COMPILE",)
    recording = record(FORMS, tmp_path / "x.json.gz", device="cpu")
    assert {one.compile for one in recording.refused} == {"VLLM_COMPILE"} and missing(FORMS, recording) == 0


def test_captures_alone_are_recorded_size_by_size(fake, tmp_path: Path) -> None:  # noqa: F811
    suite = Suite("captures", ("tiny-llama",), ("TRITON_ATTN",), (), (), 8, modes=("FULL", "PIECEWISE"),
                  settings={"max_model_len": 128, "max_num_seqs": 8})  # fmt: skip
    assert suite.num_rows() == 0
    recording = record(suite, tmp_path / "x.json.gz", device="cpu")
    assert not recording.rows and len(recording.setups) == 2 and load(tmp_path / "x.json.gz") == recording
    assert [(c.requested_mode, c.size, c.graphs, c.ms, c.mib) for c in recording.captures] == [
        (mode, size, 3, 5.0, 0.5) for mode in ("FULL", "PIECEWISE") for size in (1, 2, 4, 8)
    ]
    assert missing(suite, recording) == 0 and fake.made[0].steps == 0
    fake.tier, made = Tier.ALWAYS, len(fake.made)
    record(suite, tmp_path / "x.json.gz", device="cpu")
    assert len(fake.made) == made


def test_the_latency_suite_is_the_promised_grid() -> None:
    suite = suites.SUITES["latency"]
    assert suite.models == ("smollm2-135m", "qwen3-0.6b") and suite.contexts == (128, 512, 2048, 7680)
    assert suite.sizes() == (1, 2, 4, *range(8, 257, 8)) and len(suite.sizes()) == 35
    assert set(suite.backends) == {
        "FLASH_ATTN",
        "FLASHINFER",
        "TRITON_ATTN",
        "FLEX_ATTENTION",
        "XFORMERS",
        "TORCH_SDPA",
    }
    assert suite.settings["gpu_memory_utilization"] == 0.9 and suite.steps >= 50
    assert 7680 + suite.warmup + suite.steps + 2 <= suite.settings["max_model_len"]
    assert suite.num_rows() == 2 * 6 * 4 * (3 * 35 + 9)


def test_the_five_ways_are_of_the_promised_models_and_batches() -> None:
    suite = suites.SUITES["five"]
    assert suite.models == ("smollm2-135m", "qwen3-0.6b", "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b")
    assert suite.batches == (1, 8, 32, 128) and all(model in SHAPES for model in suite.models)
    assert {(f.compile, f.mode) for f in suite.forms} >= {
        ("NONE", "NONE"), ("VLLM_COMPILE", "NONE"), ("NONE", "FULL_DECODE_ONLY"), ("VLLM_COMPILE", "FULL_DECODE_ONLY"),
        ("VLLM_COMPILE", "PIECEWISE"),
    }  # fmt: skip


def test_every_suite_of_the_course_can_be_recorded_or_is_a_table_to_come() -> None:
    assert set(COURSE_SUITES) <= {*suites.SUITES, *TABLES, "timelines", "requests"}
    assert len(set(COURSE_SUITES)) == len(COURSE_SUITES)
    import importlib

    for module, function in TABLES.values():
        assert callable(getattr(importlib.import_module(module), function))


def test_the_course_is_one_file_a_suite_and_stops_when_time_is_over(fake, tmp_path, monkeypatch, capsys) -> None:  # noqa: F811
    small = {"one": dataclasses.replace(SMALL, name="one"), "two": dataclasses.replace(SMALL, name="two")}
    monkeypatch.setattr(suites, "SUITES", small)
    monkeypatch.setattr(suites, "COURSE_SUITES", ("one", "timelines", "two", "to come"))
    monkeypatch.setattr("labkit.bench.timeline.why_not", lambda: "there is no CUDA device here")
    assert main(["record", "--suite", "course", "--out", str(tmp_path), "--device", "cpu", "--json"]) == 1
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert data["finished"] and [(s["suite"], s["rows"], s["left"]) for s in data["suites"]] == [
        ("one", 12, 0),
        ("two", 12, 0),
        ("timelines", None, None),
    ]
    assert "no CUDA device" in data["suites"][-1]["error"], "it does not keep the others from being recorded"
    assert "to come: this version cannot record it" in captured.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.json.gz", "two.json.gz"]
    (tmp_path / "two.json.gz").unlink()
    monkeypatch.setattr("labkit.cli.record.Deadline.__call__", lambda self: True)
    assert main(["record", "--suite", "course", "--out", str(tmp_path), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "two.json.gz: not begun" in out and "The same command goes on." in out
    assert main(["record", "--suite", "course", "--out", str(tmp_path / "no")]) == 2


def test_an_error_of_one_point_does_not_close_its_mode(fake, tmp_path, monkeypatch) -> None:  # noqa: F811
    real = recorder.bench_step

    def step(llm, batch, context, **kwargs):
        if batch == 4:
            raise LabkitError("a step of 4 tokens", "the GPU ran out of memory", "Lower it.")
        return real(llm, batch, context, **kwargs)

    monkeypatch.setattr(recorder, "bench_step", step)
    recording = record(SMALL, tmp_path / "x.json.gz", device="cpu")
    assert [(one.batch, one.context) for one in recording.refused] == [(4, 16)] * 2
    assert len(recording.rows) == 10 and missing(SMALL, recording) == 0


# --- what is printed -----------------------------------------------------------------------------------------------


def test_a_suite_of_requests_prints_its_table(tmp_path: Path, monkeypatch, capsys) -> None:
    from labkit.bench import requests as bench

    config = EngineConfig(attention_backend="TORCH_SDPA", max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64,
                          enforce_eager=True)  # fmt: skip
    small = {"models": ("tiny-llama",), "traffics": (bench.Traffic(1, 4, 16, lead=2),), "ways": bench.schedulings(()),
             "config": config}  # fmt: skip
    real = bench.record_requests
    monkeypatch.setattr(bench, "record_requests", lambda out, device: real(out, device=device, **small))
    out = tmp_path / "requests.json.gz"
    assert main(["record", "--suite", "requests", "--device", "cpu", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "RECORDED" in text and "prefill_first against whole: worst wait between tokens" in text


def test_every_table_has_a_text() -> None:
    assert set(_TEXTS) == set(TABLES)


def test_a_table_that_was_stopped_before_its_first_row_says_so(tmp_path: Path, monkeypatch, capsys) -> None:
    empty = SimpleNamespace(rows=(), as_dict=dict)
    monkeypatch.setattr("labkit.bench.beside.record_beside", lambda out: empty)
    assert main(["record", "--suite", "beside", "--out", str(tmp_path / "beside.json.gz")]) == 1
    assert "stopped before anything was measured" in capsys.readouterr().err


def test_a_part_of_a_suite_is_its_rows_and_no_others() -> None:
    whole, part = suites.SUITES["latency"], suites.narrowed(
        suites.SUITES["latency"], {"models": ["qwen3-0.6b"], "backends": ["TORCH_SDPA", "FLASHINFER"]}
    )  # fmt: skip
    assert part.models == ("qwen3-0.6b",) and part.backends == ("TORCH_SDPA", "FLASHINFER")
    assert part.num_rows() * 6 == whole.num_rows() and part.modes == whole.modes and part.contexts == whole.contexts
    with pytest.raises(LabkitError, match="TORCH_SDPA"):
        suites.narrowed(whole, {"backends": ["TORCH_SPDA"]})
    with pytest.raises(LabkitError, match="no such one"):
        suites.narrowed(suites.SUITES["five"], {"backends": ["TORCH_SDPA"]})


def test_the_command_refuses_a_part_of_what_has_no_parts(tmp_path: Path, capsys) -> None:
    for words in (["attention", "--models", "tiny-llama"], ["course", "--backends", "TORCH_SDPA"]):
        assert (
            main(
                [
                    "record",
                    "--suite",
                    *words,
                    "--out",
                    str(tmp_path / "x.json.gz" if "course" not in words else tmp_path),
                ]
            )
            == 2
        )
    assert not list(tmp_path.iterdir())
