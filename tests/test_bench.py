"""Benchmarks against an engine whose every step is known, then on the real one with a tiny shape."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest

from labkit import bench
from labkit.attention.interface import AttentionCGSupport as Tier
from labkit.attention.interface import VersionAnswer
from labkit.attention.registry import platform_for_gpu
from labkit.bench import recorder, suites
from labkit.bench.attention import MIXED, AttentionShape, _Case, bench_attention
from labkit.config import CUDAGraphMode, EngineConfig, ModelConfig
from labkit.engine.plan import make_plan
from labkit.engine.report import CaptureRecord, StepReport
from labkit.errors import BackendError, ConfigError, LabkitError
from labkit.graphs.sizes import default_capture_sizes, pad_to
from labkit.measure.launches import LaunchCount
from labkit.measure.provenance import Kind, ProvenanceError
from labkit.measure.recordings import load
from labkit.models.shapes import SHAPES

MODEL = ModelConfig("fake", 100, 8, 16, 2, 2, 1, 4, 1024)
LAUNCHES = {
    "NONE": {"torch": 300, "gemm": 90, "triton": 22, "copy": 5},
    "FULL": {"torch": 2, "gemm": 1, "graph": 1, "copy": 5},
    "PIECEWISE": {"torch": 12, "gemm": 1, "graph": 3, "copy": 5},
}


class FakeLLM:
    """Steps in no time: eager ones claim 8 ms, graph ones 1.5 ms, each with some noise that is always the same."""

    made: list[FakeLLM] = []
    tier = Tier.ALWAYS
    cannot: tuple[str, ...] = ()
    versions: tuple[VersionAnswer, ...] = ()

    def __init__(self, model=None, config=None, progress=None, **changes) -> None:
        self.config = (config or EngineConfig()).replace(**changes)
        if self.config.attention_backend in self.cannot:
            raise BackendError("attention_backend", "there is no such kernel here")
        if self.config.max_model_len is None:
            self.config = self.config.replace(max_model_len=1024)
        self.config = self.config.replace(dtype="float32")
        self.model_config, self.weights, self.notes, self.memory = MODEL, "random", [], {"peak": 3 << 20}
        self.device = SimpleNamespace(type="cpu")
        self.emulated_graphs = False
        self.calls: list[tuple] = []
        self.live, self.kv, self.steps, self.chunk, self.closed = 0, 0, 0, 0, False
        FakeLLM.made.append(self)

    @property
    def speed(self) -> float:
        """Compiled code is twice as fast here."""
        return 1.0 if self.config.compilation_mode in (None, "NONE") else 2.0

    @property
    def cudagraph_mode(self) -> CUDAGraphMode:
        asked = self.config.cudagraph_mode or CUDAGraphMode.NONE
        return asked if self.tier is not Tier.NEVER else CUDAGraphMode.NONE

    @property
    def capture_sizes(self) -> list[int]:
        if self.cudagraph_mode is CUDAGraphMode.NONE:
            return []
        if self.config.cudagraph_capture_sizes:
            return list(self.config.cudagraph_capture_sizes)
        top = self.config.max_cudagraph_capture_size
        return default_capture_sizes(self.config.max_num_seqs, self.config.max_num_batched_tokens, max_size=top)

    @property
    def selection(self):
        name = self.config.attention_backend or "TORCH_SDPA"
        return SimpleNamespace(selected=name, candidate=lambda name: SimpleNamespace(versions=self.versions))

    @property
    def capture_records(self) -> list[CaptureRecord]:
        return [CaptureRecord(self.cudagraph_mode.name, size, 5.0, 0.5, 3) for size in self.capture_sizes]

    @property
    def compile_report(self):
        compiled = self.config.compilation_mode == "VLLM_COMPILE"
        return SimpleNamespace(total_ms=1234.56, from_cache=False) if compiled else None

    @property
    def mode_trail(self) -> list[str]:
        return [f"requested: {self.config.cudagraph_mode.name}", "it cannot be captured"]

    def reconfigure(self, **changes):
        if {changes.get("attention_backend"), changes.get("compilation_mode")} & set(self.cannot):
            raise BackendError("attention_backend", "there is no such kernel here")
        self.calls.append(("reconfigure", {k: getattr(v, "name", v) for k, v in changes.items()}))
        self.config = self.config.replace(**changes)
        return SimpleNamespace(rebuilt_ms={})

    def reset(self) -> None:
        self.calls.append(("reset",))
        self.live = 0

    def fill_kv(self) -> None:
        self.calls.append(("fill_kv",))

    def drop_graphs(self) -> None:
        self.calls.append(("drop_graphs",))

    def prime(self, batch: int, context: int, max_tokens: int, fill: bool = True) -> None:
        assert fill or ("fill_kv",) in self.calls, "nobody filled what is not filled now"
        self.calls.append(("prime", batch, context, max_tokens))
        self.live, self.kv, self.left = batch, context, max_tokens

    def add_request(self, prompt: list[int], params) -> None:
        assert params.max_tokens == 1, "a chunk is gone after its step"
        self.calls.append(("chunk", tuple(prompt)))
        self.chunk = len(prompt)

    def step(self) -> StepReport:
        assert self.live and self.left > 0, "a step without requests"
        self.kv, self.left, self.steps = self.kv + 1, self.left - 1, self.steps + 1
        tokens, reqs, mode = self.live + self.chunk, self.live + bool(self.chunk), self.cudagraph_mode
        runs = mode.mixed_mode() if self.chunk else mode.decode_mode()
        size = None if runs is CUDAGraphMode.NONE else pad_to(tokens, self.capture_sizes)
        mode, self.chunk = "NONE" if size is None else runs.name, 0
        noise = random.Random(f"{len(FakeLLM.made)} {self.steps}").random() * 0.1
        ms = ({"NONE": 8.0, "PIECEWISE": 3.0, "FULL": 1.5}[mode] + noise) / self.speed
        self.calls.append(("step", mode, self.kv))
        return StepReport(
            self.steps, mode, size or tokens, tokens, reqs, (size or tokens) - tokens, 1, self.kv,
            self.selection.selected, ms, {"schedule": 100.0, "launch": ms * 500, "sample": 200.0}, device_us=700.0,
            graph_launches=int(mode != "NONE"),
        )  # fmt: skip

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *exc) -> None:
        self.close()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    """The engine, the launch counter and the yardsticks replaced by known ones."""

    def count(step) -> LaunchCount:
        kinds = LAUNCHES[step().mode]
        launches = sum(n for kind, n in kinds.items() if kind != "copy")
        return LaunchCount(launches, kinds.get("graph", 0), kinds["copy"], 999, kinds)

    FakeLLM.made, FakeLLM.tier, FakeLLM.cannot = [], Tier.ALWAYS, ()
    monkeypatch.setattr("labkit.llm.LLM", FakeLLM)
    monkeypatch.setattr("labkit.measure.launches.count", count)
    cost = {"torch": 11.0, "gemm": 20.0, "triton": 5.0, "graph": 9.0}
    yard = bench.Yardsticks(cost, 4000.0)
    monkeypatch.setattr("labkit.bench.steps.measure_yardsticks", lambda llm, progress=None: yard)
    monkeypatch.setattr("labkit.bench.recorder.measure_yardsticks", lambda llm, progress=None: yard)
    monkeypatch.setattr("labkit.bench.forms.measure_yardsticks", lambda llm, progress=None: yard)
    return FakeLLM


# --- one row -------------------------------------------------------------------------------------------------------


def test_the_first_measured_step_has_exactly_the_asked_context(fake) -> None:
    llm = fake()
    reports, counted = bench.measure_steps(llm, 3, 512, steps=7, warmup=4)
    assert llm.calls[:2] == [("reset",), ("prime", 3, 508, 13)]
    assert [call[2] for call in llm.calls if call[0] == "step"] == list(range(509, 509 + 4 + 7 + 1))
    assert [r.max_seq_len for r in reports] == list(range(513, 520))
    assert llm.calls[-1] == ("reset",)
    assert counted.launches == 412


def test_a_context_shorter_than_the_warm_up_is_primed_with_one_token(fake) -> None:
    llm = fake()
    reports, _ = bench.measure_steps(llm, 1, 3, steps=2, warmup=10)
    assert llm.calls[1] == ("prime", 1, 1, 14)
    assert len(reports) == 2


def test_a_row_is_what_the_reports_say(fake) -> None:
    llm = fake(max_num_seqs=8, cudagraph_mode="FULL", cudagraph_capture_sizes=[4, 8])
    yard = bench.Yardsticks({"torch": 11.0}, 4000.0)
    reports, counted = bench.measure_steps(llm, 3, 100, steps=9, warmup=2)
    row = bench.make_row(llm, reports, batch=3, context=100, counted=counted, yardsticks=yard)
    walls = [r.wall_ms for r in reports]
    assert row.samples_ms == pytest.approx(walls, abs=5e-5)
    assert (row.p50_ms, row.n) == (pytest.approx(statistics.median(walls), abs=1e-4), 9)
    assert (row.requested_mode, row.mode, row.size, row.batch, row.query_len) == ("FULL", "FULL", 4, 3, 1)
    assert (row.launches, row.graph_launches, row.launches_by_kind["gemm"]) == (4, 1, 1)
    assert row.device_us == 700.0 and row.peak_mib == 3.0 and row.primed and not row.emulated
    assert row.host_us == pytest.approx(300 + 500 * row.p50_ms, abs=0.1)
    assert row.host_outside_us == pytest.approx(300, abs=0.1)
    assert row.tok_s == pytest.approx(3 / row.p50_ms * 1e3, rel=1e-3)
    kv = 3 * statistics.fmean(r.max_seq_len for r in reports) * 2 * 2 * 1 * 4 * 4
    num_bytes = MODEL.num_parameters() * 4 + kv
    assert row.gb_s == pytest.approx(num_bytes / row.p50_ms / 1e6, abs=0.006)
    assert row.floor_ms == pytest.approx(num_bytes / 4000e9 * 1e3, abs=1e-5)
    row.check()


def test_a_folder_is_named_without_its_place(fake) -> None:
    llm = fake(config=EngineConfig(model="/home/someone/models/mine"))
    assert bench.bench_step(llm, 1, 8, steps=1, warmup=0).model == "mine"


def test_without_yardsticks_and_counts_a_row_says_so(fake) -> None:
    llm = fake()
    reports, _ = bench.measure_steps(llm, 1, 8, steps=2, warmup=0)
    row = bench.make_row(llm, reports, batch=1, context=8)
    assert (row.launches, row.floor_ms, row.launch_cost_us) == (None, None, {})


def test_steps_of_two_configurations_are_no_row(fake) -> None:
    llm = fake(max_num_seqs=4, cudagraph_mode="FULL")
    a, _ = bench.measure_steps(llm, 1, 8, steps=1, warmup=0)
    b, _ = bench.measure_steps(llm, 2, 8, steps=1, warmup=0)
    with pytest.raises(LabkitError, match="2 configurations .FULL 1, FULL 2."):
        bench.make_row(llm, a + b, batch=1, context=8)
    with pytest.raises(LabkitError, match="no step was measured"):
        bench.make_row(llm, [], batch=1, context=8)


@pytest.mark.parametrize("k", [0, 1, 5])
def test_stop_lets_no_further_step_run_and_leaves_the_engine_empty(fake, k: int) -> None:
    llm = fake()
    reports, counted = bench.measure_steps(llm, 1, 100, steps=10, warmup=2, should_stop=lambda: llm.steps >= k)
    assert llm.steps == k
    assert len(reports) == max(0, k - 2)
    assert counted.launches is None and llm.live == 0


@pytest.mark.parametrize(
    ("batch", "context", "says"),
    [
        (1, 1020, "must be at least 1 and end below max_model_len=1024"),
        (1, 0, "context=0"),
        (0, 8, "batch=0: must lie in 1…max_num_seqs=256"),
        (257, 8, "batch=257"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_step(fake, batch: int, context: int, says: str) -> None:
    llm = fake()
    with pytest.raises(ConfigError, match=says):
        bench.measure_steps(llm, batch, context)
    assert llm.steps == 0


def test_a_step_that_ran_only_part_of_the_batch_is_not_measured(fake, monkeypatch) -> None:
    llm = fake()
    real = llm.step
    monkeypatch.setattr(llm, "step", lambda: dataclasses.replace(real(), num_reqs=2))
    with pytest.raises(LabkitError, match="only 2 of them ran"):
        bench.measure_steps(llm, 3, 8)
    assert llm.live == 0


# --- eager beside graphs -------------------------------------------------------------------------------------------


def test_modes_take_turns_and_both_sides_are_compared(fake) -> None:
    recording, _ = bench.bench(EngineConfig(max_num_seqs=64), [5], [32], steps=10, warmup=1)
    (llm,) = fake.made
    ran = [mode for mode, _ in itertools.groupby(c[1] for c in llm.calls if c[0] == "step")]
    assert ran == ["FULL", "NONE", "FULL"]
    turns = [c[1]["cudagraph_mode"] for c in llm.calls if c[0] == "reconfigure"][:4]
    assert turns == ["FULL_DECODE_ONLY", "NONE", "NONE", "FULL_DECODE_ONLY"]
    assert recording.provenance.order == "for each batch and context: FULL_DECODE_ONLY NONE NONE FULL_DECODE_ONLY"
    assert (recording.provenance.kind, recording.provenance.n, recording.provenance.primed) == (Kind.LIVE, 10, True)
    assert llm.config.enable_prefix_caching is False and llm.closed
    assert llm.config.cudagraph_capture_sizes == (8,)
    graph, eager = recording.rows
    assert (graph.mode, graph.size, eager.mode, eager.size, eager.n) == ("FULL", 8, "NONE", 5, 10)
    (pair,) = bench.comparisons(recording)
    assert (eager.rounds, graph.rounds, pair.ratio.paired) == (2, 2, True)
    pairs = [a / b for a, b in zip(eager.samples_ms, graph.samples_ms, strict=True)]
    assert pair.ratio.value == pytest.approx(statistics.median(pairs))
    assert (pair.eager, pair.graph) == (eager, graph)
    assert pair.as_dict()["launches"] == [412, 4]


@pytest.mark.parametrize(("p50_ms", "fair"), [(7.4, True), (7.473, True), (7.474, False), (7.5, False)])
def test_the_straw_man_check_is_launches_times_cost_plus_host_work(fake, p50_ms: float, fair: bool) -> None:
    recording, _ = bench.bench(EngineConfig(), [1], [32], steps=4, warmup=0)
    graph, eager = recording.rows
    eager = dataclasses.replace(eager, p50_ms=p50_ms, host_us=4000.0, phases_us={"launch": 3300.0, "sample": 700.0})
    pair = bench.compare(eager, graph)
    assert pair.explained_us == 300 * 11.0 + 90 * 20.0 + 22 * 5.0, "copies are not launches"
    assert pair.limit_us == pytest.approx(1.3 * 5210 + 700)
    assert pair.fair is fair


def test_the_bare_cost_of_a_triton_launch_gives_a_limit_of_its_own(fake) -> None:
    recording, _ = bench.bench(EngineConfig(), [1], [32], steps=4, warmup=0)
    graph, eager = recording.rows
    assert bench.compare(eager, graph).bare_limit_us is None, "where it was not measured"
    kinds, cost = {"gemm": 10, "triton": 100}, {"torch": 8.0, "gemm": 15.0, "triton": 11.0, "triton_bare": 4.0}
    eager = dataclasses.replace(
        eager,
        launches_by_kind=kinds,
        launch_cost_us=cost,
        host_us=4000.0,
        phases_us={"launch": 3300.0, "sample": 700.0},
    )
    pair = bench.compare(eager, graph)
    assert pair.limit_us == pytest.approx(1.3 * (150 + 1100) + 700)
    assert pair.bare_limit_us == pytest.approx(1.3 * (150 + 400) + 700)


def test_without_counted_launches_nothing_is_said_about_fairness(fake) -> None:
    recording, _ = bench.bench(EngineConfig(), [1], [32], steps=4, warmup=0)
    graph, eager = (dataclasses.replace(row, launches=None, launches_by_kind={}) for row in recording.rows)
    pair = bench.compare(eager, graph)
    assert (pair.explained_us, pair.limit_us, pair.fair) == (None, None, None)


@pytest.mark.parametrize(
    ("changes", "modes"),
    [
        ({}, ["FULL_DECODE_ONLY", "NONE"]),
        ({"cudagraph_mode": "FULL"}, ["FULL", "NONE"]),
        ({"cudagraph_mode": "NONE"}, ["NONE"]),
        ({"enforce_eager": True}, ["NONE"]),
        ({"enforce_eager": True, "cudagraph_mode": "FULL"}, ["NONE"]),
        ({"optimization_level": 0}, ["NONE"]),
    ],
)
def test_which_modes_are_measured(fake, changes: dict, modes: list[str]) -> None:
    recording, _ = bench.bench(EngineConfig(**changes), [1], [32], steps=4, warmup=0)
    assert [row.requested_mode for row in recording.rows] == modes


@pytest.mark.parametrize(
    ("changes", "size", "expected"),
    [({}, None, (1, 8, 40)), ({}, 64, (64,)), ({"cudagraph_capture_sizes": [2, 64]}, None, (2, 64))],
)
def test_only_the_needed_sizes_are_captured(fake, changes: dict, size: int | None, expected: tuple) -> None:
    bench.bench(EngineConfig(**changes), [1, 8, 7, 33], [32], size=size, steps=2, warmup=0)
    assert fake.made[0].config.cudagraph_capture_sizes == expected


def test_who_observes_sees_the_engine_in_the_graph_mode(fake) -> None:
    seen = []
    bench.bench(EngineConfig(), [1], [32], steps=2, warmup=0, observe=lambda llm: seen.append(llm.cudagraph_mode.name))
    bench.bench(EngineConfig(enforce_eager=True), [1], [32], steps=2, warmup=0, observe=lambda llm: seen.append(1))
    assert seen == ["FULL_DECODE_ONLY", 1] and fake.made[0].closed


# --- suites --------------------------------------------------------------------------------------------------------

SMALL = suites.Suite("small", ("tiny-llama",), ("TRITON_ATTN", "TORCH_SDPA"), (16,), (1, 2), 8, steps=50, warmup=1,
                     settings={"max_model_len": 128, "max_num_seqs": 8})  # fmt: skip


def test_a_suite_records_graphs_at_every_size_and_eager_batches(fake, tmp_path: Path) -> None:
    seen: list[tuple] = []
    out = tmp_path / "small.json.gz"
    recording = bench.record(SMALL, out, command="labkit record", progress=lambda *a: seen.append(a), device="cpu")
    sizes = [1, 2, 4, 8]
    expected = [
        (backend, mode, batch)
        for backend in SMALL.backends
        for mode, batches in (("FULL_DECODE_ONLY", sizes), ("NONE", (1, 2)))
        for batch in batches
    ]
    assert [(r.backend, r.requested_mode, r.batch) for r in recording.rows] == expected
    assert all(r.n == 50 and r.size == r.batch and r.context == 16 for r in recording.rows)
    assert load(out) == recording
    assert len(fake.made) == 1, "weights are loaded once for all backends"
    assert SMALL.num_rows() == len(expected)
    assert [a for a in seen if a[0] == "recording"][-1][1:3] == (11, 12)


def test_a_backend_that_cannot_be_captured_has_eager_rows_only(fake, tmp_path: Path) -> None:
    fake.tier = Tier.NEVER
    recording = bench.record(SMALL, tmp_path / "x.json.gz", device="cpu")
    assert {r.mode for r in recording.rows} == {"NONE"} and len(recording.rows) == 4
    assert [(one.backend, one.requested_mode) for one in recording.refused] == [
        ("TRITON_ATTN", "FULL_DECODE_ONLY"), ("TORCH_SDPA", "FULL_DECODE_ONLY"),
    ]  # fmt: skip
    assert "it cannot be captured" in recording.refused[0].reason


@pytest.mark.parametrize("backend", ["TRITON_ATTN", "TORCH_SDPA"])
def test_a_backend_that_cannot_serve_is_noted_and_passed_over(fake, tmp_path: Path, backend: str) -> None:
    fake.cannot, out = (backend,), tmp_path / "x.json.gz"
    recording = bench.record(SMALL, out, device="cpu")
    (one,) = recording.refused
    assert (one.model, one.backend, one.compile, one.requested_mode) == ("tiny-llama", backend, "NONE", "")
    assert "no such kernel" in one.reason
    assert {row.backend for row in recording.rows} == set(SMALL.backends) - {backend} and len(recording.rows) == 6
    assert load(out) == recording
    made = len(fake.made)
    again = bench.record(SMALL, out, device="cpu")
    assert (again.rows, again.refused) == (recording.rows, recording.refused), "what was refused is not tried again"
    assert len(fake.made) == made, "with every row there or refused no engine is made"


def test_what_fails_unexpectedly_is_passed_over_and_tried_again_by_a_later_run(fake, tmp_path, monkeypatch) -> None:
    out, real = tmp_path / "x.json.gz", recorder.bench_step

    def step(llm, batch, context, *, requested_mode, **kwargs):
        if (llm.selection.selected, requested_mode) == ("TRITON_ATTN", "NONE"):
            raise RuntimeError("ninja: build stopped")
        return real(llm, batch, context, requested_mode=requested_mode, **kwargs)

    monkeypatch.setattr(recorder, "bench_step", step)
    recording = bench.record(SMALL, out, device="cpu")
    (one,) = recording.refused
    assert (one.backend, one.requested_mode, one.reason) == (
        "TRITON_ATTN",
        "NONE",
        "RuntimeError: ninja: build stopped",
    )
    assert len(recording.rows) == 10 and load(out).refused == ()
    monkeypatch.setattr(recorder, "bench_step", real)
    assert len(bench.record(SMALL, out, device="cpu").rows) == 12


def test_compile_and_modes_are_dimensions_of_a_suite(fake, tmp_path: Path) -> None:
    suite = dataclasses.replace(SMALL, backends=("TRITON_ATTN",), modes=("FULL", "PIECEWISE"), graph_sizes=(1, 8),
                                compile=("NONE", "VLLM_COMPILE"))  # fmt: skip
    recording = bench.record(suite, tmp_path / "x.json.gz", device="cpu")
    assert [(r.compile, r.requested_mode, r.mode, r.batch) for r in recording.rows] == [
        (compile, mode, mode, batch)
        for compile in ("NONE", "VLLM_COMPILE")
        for mode, batches in (("FULL", (1, 8)), ("PIECEWISE", (1, 8)), ("NONE", (1, 2)))
        for batch in batches
    ]
    assert len(recording.rows) == suite.num_rows() and not recording.refused
    assert [(s.compile, s.requested_mode, s.sizes, s.graphs, s.capture_ms, s.graph_mib) for s in recording.setups] == [
        (compile, mode, 2, 6, 10.0, 1.0) for compile in ("NONE", "VLLM_COMPILE") for mode in ("FULL", "PIECEWISE")
    ]
    assert [s.compile_ms for s in recording.setups] == [0.0, 0.0, 1234.6, 1234.6]
    assert load(tmp_path / "x.json.gz") == recording
    assert recording.find(
        model="tiny-llama", backend="TRITON_ATTN", requested_mode="FULL", batch=8, context=16, compile="VLLM_COMPILE"
    ) == recording.rows[7]  # fmt: skip


def test_an_interrupted_recording_is_resumed_without_measuring_again(fake, tmp_path: Path) -> None:
    out, per_row = tmp_path / "x.json.gz", 50 + 1 + 1
    first = bench.record(
        SMALL, out, device="cpu", should_stop=lambda: bool(fake.made) and fake.made[0].steps >= 3 * per_row
    )
    assert len(first.rows) == 3
    whole = bench.record(SMALL, out, device="cpu")
    assert fake.made[1].steps == 9 * per_row
    assert whole.rows[:3] == first.rows and len(whole.rows) == 12
    again = bench.record(SMALL, out, device="cpu")
    assert len(fake.made) == 2 and again.rows == whole.rows


def test_rows_of_another_machine_are_not_mixed_in(fake, tmp_path: Path) -> None:
    out = tmp_path / "x.json.gz"
    recording = bench.record(SMALL, out, device="cpu")
    dataclasses.replace(recording, provenance=recording.provenance.replace(gpu="NVIDIA T4", driver="1.2")).save(out)
    before = out.read_bytes()
    with pytest.raises(ProvenanceError, match=r"resuming x\.json\.gz: it was recorded elsewhere: gpu None ≠ NVIDIA T4"):
        bench.record(SMALL, out, device="cpu")
    assert out.read_bytes() == before


def test_what_the_package_ships_is_the_promised_grid() -> None:
    suite = suites.SUITES["slice"]
    assert suite.models == ("smollm2-135m", "qwen3-0.6b")
    assert set(suite.backends) == {"TRITON_ATTN", "TORCH_SDPA"} and suite.contexts == (512,)
    assert suite.eager_batches == (1, 2, 4, 8, 16, 32, 64, 128)
    assert suite.steps >= 50
    assert suite.num_rows() == 2 * 2 * (35 + 8)
    platform = platform_for_gpu("H200")
    for model, backend in itertools.product(suite.models, suite.backends):
        plan = make_plan(suite.config(model, backend), SHAPES[model], platform)
        assert plan.mode is CUDAGraphMode.FULL_DECODE_ONLY, plan.mode_trail
        assert plan.capture_sizes == (1, 2, 4, *range(8, 257, 8))
        assert plan.config.enable_prefix_caching is False
        assert plan.max_model_len >= 512 + suite.warmup + suite.steps + 2


@pytest.mark.parametrize(("name", "rows"), [("backends", 2 * 5 * (9 + 4)), ("modes", 2 * 2 * (2 * 4 + 4))])
def test_every_mode_of_a_suite_can_run_on_the_gpu_it_is_for(name: str, rows: int) -> None:
    suite, platform = suites.SUITES[name], platform_for_gpu("H200")
    assert suite.num_rows() == rows
    for model, backend, compile, mode in itertools.product(suite.models, suite.backends, suite.compile, suite.modes):
        config = suite.config(model, backend, compile).replace(cudagraph_mode=mode)
        plan = make_plan(config, SHAPES[model], platform)
        assert (plan.mode.name, plan.config.compilation_mode) == (mode, compile), plan.mode_trail
        assert plan.capture_sizes == suite.graph_sizes
        assert plan.max_model_len >= 512 + suite.warmup + suite.steps + 2


def test_an_unknown_suite_is_answered_with_the_closest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'smoke'"):
        bench.record("smoek", tmp_path / "x.json.gz")


# --- the real engine -----------------------------------------------------------------------------------------------


def test_the_smoke_suite_runs_on_the_real_engine(tmp_path: Path) -> None:
    out = tmp_path / "smoke.json.gz"
    recording = bench.record("smoke", out, device="cpu")
    assert [(r.mode, r.size) for r in recording.rows] == [
        ("FULL", 1),
        ("FULL", 2),
        ("FULL", 4),
        ("NONE", 1),
        ("NONE", 2),
    ]
    assert [r.emulated for r in recording.rows] == [True, True, True, False, False]
    stored = load(out)
    assert stored.rows == recording.rows and stored.provenance.kind is Kind.RECORDED
    assert stored.provenance.gpu is None and stored.provenance.device == "cpu"
    assert all(r.device_us is None and r.launches is None and r.launch_cost_us == {} for r in stored.rows)


def test_a_row_of_the_real_engine_equals_its_reports() -> None:
    from labkit.llm import LLM

    config = EngineConfig(model="tiny-qwen3", max_model_len=96, max_num_seqs=4, cudagraph_mode="FULL_DECODE_ONLY",
                          cudagraph_capture_sizes=[4], enable_prefix_caching=False)  # fmt: skip
    with LLM(config=config) as llm:
        reports, counted = bench.measure_steps(llm, 3, 20, steps=6, warmup=2)
        row = bench.make_row(llm, reports, batch=3, context=20, counted=counted)
        assert not llm.has_unfinished
    assert [r.max_seq_len for r in reports] == [21, 22, 23, 24, 25, 26]
    assert row.samples_ms == tuple(round(r.wall_ms, 4) for r in reports)
    assert {(r.mode, r.size, r.num_padded) for r in reports} == {("FULL", 4, 1)}
    assert set(row.phases_us) >= {"schedule", "inputs", "launch", "sample"}
    assert counted.launches is None and "no CUDA device" in counted.reason


# --- importing -----------------------------------------------------------------------------------------------------


def test_an_import_is_timed_in_fresh_processes_and_tells_what_it_loads(tmp_path, monkeypatch) -> None:
    (tmp_path / "light.py").write_text("import json.tool")
    (tmp_path / "heavy.py").write_text("import numpy.linalg")
    (tmp_path / "broken.py").write_text("import nowhere_to_be_found")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    light = bench.bench_import("light", samples=3)
    assert (light.n, light.heavy, len(light.samples_ms)) == (3, (), 3)
    assert light.p50_ms == pytest.approx(statistics.median(light.samples_ms), abs=1e-4)
    assert bench.bench_import("heavy", samples=1).heavy == ("numpy",)
    with pytest.raises(LabkitError, match="No module named 'nowhere_to_be_found'"):
        bench.bench_import("broken", samples=1)


# --- attention kernels ---------------------------------------------------------------------------------------------

SHAPE = AttentionShape(
    (1, 6, 1, 3), (9, 6, 33, 20), num_heads=6, num_kv_heads=2, head_size=16, block_size=4, dtype="float32"
)


def dense(case: _Case, index: int):
    """fp64 attention of one KV set, request by request, from pages read one token at a time."""
    import torch

    shape, meta = case.shape, case.metadata
    keys, values = (t.double() for t in case.caches[index])
    out, cursor = [], 0
    group = shape.num_heads // shape.num_kv_heads
    for i, (q, kv) in enumerate(zip(shape.query_lens, shape.kv_lens, strict=True)):
        at = [(int(meta.block_table[i, p // shape.block_size]), p % shape.block_size) for p in range(kv)]
        k = torch.stack([keys[b, o] for b, o in at]).repeat_interleave(group, 1)
        v = torch.stack([values[b, o] for b, o in at]).repeat_interleave(group, 1)
        query = case.query[cursor : cursor + q].double()
        scores = torch.einsum("qhd,khd->hqk", query, k) * shape.head_size**-0.5
        hidden = torch.arange(kv)[None] > torch.arange(kv - q, kv)[:, None]
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v))
        slots = [b * shape.block_size + o for b, o in at[kv - q :]]
        assert meta.slot_mapping[cursor : cursor + q].tolist() == slots
        cursor += q
    return torch.cat(out)


def test_a_timed_case_is_the_attention_it_claims_to_be() -> None:
    import torch

    from labkit.attention.interface import AttentionSpec
    from labkit.attention.sdpa import TorchSDPABackend

    spec = AttentionSpec(6, 2, 16, "float32", 4, max_model_len=33, max_num_seqs=4, max_num_batched_tokens=11)
    device = torch.device("cpu")
    case = _Case(TorchSDPABackend(spec, device), SHAPE, device, sets=4, seed=3)
    pages = case.metadata.block_table[case.metadata.block_table > 0].tolist()
    assert sorted(pages) == list(range(1, SHAPE.num_blocks + 1)) and pages != sorted(pages)
    case.prepare()
    results = []
    for index in range(4):
        case.call(index)
        assert torch.allclose(case.output.double(), dense(case, index), atol=1e-5)
        results.append(case.output.clone())
    assert not torch.allclose(results[0], results[1]), "sets must differ"


def test_rows_are_warm_and_rotated_over_at_least_four_sets() -> None:
    rows = bench_attention("torch_sdpa", SHAPE, device="cpu", samples=5)
    assert [(r.kind, r.kv, r.sets, r.launch, r.n) for r in rows] == [
        ("mixed", "warm", 1, "eager", 5),
        ("mixed", "rotated", 4, "eager", 5),
    ]
    for row in rows:
        assert row.backend == "TORCH_SDPA" and row.batch == 4 and row.context == 33
        assert row.p50_us == pytest.approx(statistics.median(row.samples_us))
        kv_bytes = 2 * (9 + 6 + 33 + 20) * 2 * 16 * 4
        assert row.gb_s == pytest.approx(kv_bytes / row.p50_us / 1e3, abs=0.006)
    with pytest.raises(ConfigError, match="fewer than 4 sets"):
        bench_attention("TORCH_SDPA", SHAPE, device="cpu", sets=3)


def test_a_kernel_that_leaves_output_unwritten_is_not_timed(monkeypatch) -> None:
    from labkit.attention.sdpa import TorchSDPABackend

    real = TorchSDPABackend.forward

    def forward(self, query, keys, values, output, metadata, **kwargs):
        real(self, query, keys, values, output, metadata, **kwargs)
        output[-1] = float("nan")

    monkeypatch.setattr(TorchSDPABackend, "forward", forward)
    with pytest.raises(LabkitError, match="not written"):
        bench_attention("TORCH_SDPA", SHAPE, device="cpu", samples=1)


def test_shapes_and_backends_that_make_no_sense_are_refused() -> None:
    assert AttentionShape.decode(2, 5).kind == "decode" and AttentionShape.decode(1, 1024).kv_bytes == 4 << 20
    assert AttentionShape(*zip(*MIXED, strict=True)).kind == "mixed"
    for bad in (((), ()), ((1,), (1, 2)), ((3,), (2,)), ((0,), (2,))):
        with pytest.raises(ConfigError):
            AttentionShape(*bad)
    with pytest.raises(ConfigError, match="multiple of KV heads"):
        AttentionShape((1,), (1,), num_heads=6, num_kv_heads=4)
    with pytest.raises(ConfigError, match="Did you mean 'TORCH_SDPA'"):
        bench_attention("TORCH_SDP", SHAPE, device="cpu")
    with pytest.raises(BackendError, match="FLASHINFER"):
        bench_attention("FLASHINFER", SHAPE, device="cpu")
