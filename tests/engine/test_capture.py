"""Capture on a CPU: what it answers to a failure, what it refuses afterwards, and what is left of a closed engine."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit import LLM, EngineConfig
from labkit.attention.interface import Platform
from labkit.config import CUDAGraphMode as Mode
from labkit.engine.build import LEAST_MIB_PER_GRAPH, Builder, extrapolate, kinds_of
from labkit.engine.plan import lower, make_plan
from labkit.errors import CaptureError, CompileError, ConfigError
from labkit.graphs import capture, compile_cache
from labkit.graphs.capture import GraphCapturer, explained, once_more
from labkit.graphs.dispatcher import GraphDispatcher
from labkit.graphs.graph_nodes import is_recording, kernel_nodes, record_anew
from labkit.models.shapes import SHAPES
from tests.engine.test_engine import EAGER, SMALL, prompts
from tests.teacher import assert_same_logits, teach

CPU = torch.device("cpu")
SIZES = [1, 2, 4, 8]
GRAPHS = {**SMALL, "cudagraph_capture_sizes": SIZES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(autouse=True)
def own_cache(folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_cache, "default_folder", lambda: folder)
        yield


# --- after a failed capture -------------------------------------------------------------------------------------------


def failed(mode: str, out_of_memory: bool) -> CaptureError:
    return CaptureError(f"capture of mode {mode}, size 8", "it failed", "Do less.", mode, out_of_memory)


@pytest.mark.parametrize(
    ("mode", "failing", "memory", "piecewise", "expected"),
    [
        ("FULL_AND_PIECEWISE", "FULL", False, True, ("PIECEWISE", SIZES)),
        ("FULL_AND_PIECEWISE", "FULL", True, True, ("PIECEWISE", SIZES)),
        ("FULL_AND_PIECEWISE", "PIECEWISE", True, True, ("FULL_AND_PIECEWISE", [1, 2])),
        ("FULL_AND_PIECEWISE", "PIECEWISE", False, True, ("FULL_DECODE_ONLY", SIZES)),
        ("FULL", "FULL", False, True, ("PIECEWISE", SIZES)),
        ("FULL", "FULL", False, False, ("NONE", [])),
        ("FULL", "FULL", True, False, ("FULL", [1, 2])),
        ("FULL_DECODE_ONLY", "FULL", True, True, ("FULL_DECODE_ONLY", [1, 2])),
        ("FULL_DECODE_ONLY", "FULL", False, True, ("NONE", [])),
        ("PIECEWISE", "PIECEWISE", False, True, ("NONE", [])),
        ("PIECEWISE", "PIECEWISE", True, True, ("PIECEWISE", [1, 2])),
    ],
)
def test_what_is_tried_next(mode: str, failing: str, memory: bool, piecewise: bool, expected: tuple) -> None:
    found, sizes = lower(Mode[mode], SIZES, failed(failing, memory), piecewise)
    assert (found.name, list(sizes)) == expected


@given(st.sampled_from([m for m in Mode if m is not Mode.NONE]), st.integers(1, 60), st.booleans(), st.data())
def test_going_lower_ends_at_none(mode: Mode, count: int, piecewise: bool, data: st.DataObject) -> None:
    sizes, tries = tuple(range(1, count + 1)), 0
    while mode is not Mode.NONE:
        kinds = [k for k in ("FULL", "PIECEWISE") if k in mode.value]
        error = failed(data.draw(st.sampled_from(kinds)), data.draw(st.booleans()))
        mode, sizes = lower(mode, sizes, error, piecewise)
        tries += 1
        assert tries <= 16
    assert sizes == ()


def failing_capture(
    monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...], above: int = 0, memory: bool = False
) -> None:
    """Captures of these kinds above a size fail."""
    whole, segments = GraphCapturer.capture, GraphCapturer.capture_segments

    def capture(self, mode, size, *args):  # type: ignore[no-untyped-def]
        if mode in kinds and size > above:
            raise failed(mode, memory)
        return whole(self, mode, size, *args)

    def capture_segments(self, size, *args):  # type: ignore[no-untyped-def]
        if "PIECEWISE" in kinds and size > above:
            raise failed("PIECEWISE", memory)
        return segments(self, size, *args)

    monkeypatch.setattr(GraphCapturer, "capture", capture)
    monkeypatch.setattr(GraphCapturer, "capture_segments", capture_segments)


@pytest.mark.parametrize(
    ("kinds", "above", "memory", "mode", "sizes", "ran"),
    [
        (("FULL",), 0, False, "PIECEWISE", SIZES, {"PIECEWISE"}),
        (("PIECEWISE",), 0, False, "FULL_DECODE_ONLY", SIZES, {"FULL", "NONE"}),
        (("PIECEWISE",), 2, True, "FULL_AND_PIECEWISE", [1, 2], {"FULL", "NONE"}),
        (("FULL", "PIECEWISE"), 0, False, "NONE", [], {"NONE"}),
    ],
)
def test_the_engine_runs_with_what_could_be_captured(
    kinds: tuple, above: int, memory: bool, mode: str, sizes: list, ran: set, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = [p[:3] for p in prompts(2, seed=1)]
    with LLM("tiny-llama", **EAGER) as eager:
        reference, _ = teach(eager, batch, 4)
    failing_capture(monkeypatch, kinds, above, memory)
    with pytest.warns(UserWarning, match="it failed"):
        llm = LLM("tiny-llama", **GRAPHS)
    with llm:
        assert (llm.cudagraph_mode.name, llm.capture_sizes) == (mode, sizes)
        assert "it failed" in llm.mode_trail[-1] and mode in llm.mode_trail[-1]
        assert ("without graphs" if mode == "NONE" else f"mode {mode}") in llm.notes[-1]
        ours, reports = teach(llm, batch, 4)
        assert_same_logits(ours, reference)
        assert {r.mode for r in reports} == ran
        assert {(r.mode) for r in llm.capture_records} == ran - {"NONE"} | ({"PIECEWISE"} if sizes == [1, 2] else set())
        monkeypatch.undo()
        llm.reset()
        llm.reconfigure(cudagraph_mode="FULL_AND_PIECEWISE")  # the remedy was applied
        assert (llm.cudagraph_mode.name, llm.capture_sizes) == ("FULL_AND_PIECEWISE", SIZES)
        assert_same_logits(teach(llm, batch, 4)[0], reference)


def test_a_kind_that_is_complete_is_not_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_capture(monkeypatch, ("FULL",))
    segments, made = GraphCapturer.capture_segments, []

    def count(self, size, *args):  # type: ignore[no-untyped-def]
        made.append(size)
        return segments(self, size, *args)

    monkeypatch.setattr(GraphCapturer, "capture_segments", count)
    with pytest.warns(UserWarning, match="mode PIECEWISE"), LLM("tiny-llama", **GRAPHS):
        assert made == [8, 4, 2, 1]


def test_an_error_names_the_line_that_a_graph_cannot_hold() -> None:
    """Ending a broken capture raises again; the first error is the one with the operation."""

    def forbidden() -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\n" + "ab")  # the operation

    with pytest.raises(CaptureError) as caught, explained("FULL", 8):
        try:
            forbidden()
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
    words = str(caught.value)
    assert "not allowed in a graph (CUDA error: operation not permitted" in words and "# the operation" in words
    assert (
        "ab)" not in words
        and "test_capture.py:" in words
        and caught.value.mode == "FULL"
        and not caught.value.out_of_memory
    )


def test_running_out_of_memory_is_seen_behind_what_it_broke() -> None:
    with pytest.raises(CaptureError, match="max_cudagraph_capture_size") as caught, explained("PIECEWISE", 8):
        try:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
    assert caught.value.out_of_memory and "2.00 GiB" in str(caught.value)


@pytest.mark.parametrize(
    ("message", "calls"),
    [
        ("CUDA error: operation failed due to a previous error during capture", 2),
        ("CUDA error: operation not permitted when stream is capturing", 1),
        ("CUDA out of memory", 1),
    ],
)
def test_a_capture_broken_by_another_thread_is_tried_once_more(message: str, calls: int) -> None:
    made: list[int] = []

    def fails(times: int) -> str:
        made.append(0)
        if len(made) <= times:
            raise RuntimeError(message)
        return "recorded"

    with pytest.raises(RuntimeError):
        once_more(lambda: fails(9))
    assert len(made) == calls
    if calls == 2:
        made.clear()
        assert once_more(lambda: fails(1)) == "recorded"


class Recorder:
    """One stream, and torch's two allocators, as a capture that breaks leaves them: what CUDAGraph.cpp does.

    state: "idle", "recording" or "broken". filling: pools that the allocators fill; a pool takes one capture at a time.
    """

    def __init__(self, driver: bool) -> None:
        self.state, self.driver, self.filling, self.waiting = "idle", driver, set(), False
        self.pools, self.cuda_stream = 0, 7

    def new_pool(self) -> int:
        self.pools += 1
        return self.pools

    def synchronize(self) -> None:
        assert self.state == "idle"

    def graph(self) -> FakeGraph:
        return FakeGraph(self)

    def is_recording(self, stream: int) -> bool | None:
        return self.state == "recording" if self.driver else None

    def record_anew(self, stream: int) -> None:
        self.state = "recording"


class FakeGraph:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.mempool, self.ended = recorder, 0, False

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local" and self.recorder.state == "idle"
        self.mempool = pool
        if pool in self.recorder.filling:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.recorder.filling.add(pool)
        self.recorder.state, self.recorder.waiting = "recording", True

    def capture_end(self) -> None:
        state, self.recorder.state = self.recorder.state, "idle"
        if state != "recording":
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.recorder.filling.remove(self.mempool)
        self.recorder.waiting, self.ended = False, True

    def pool(self) -> int:
        if not self.ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self.mempool

    def replay(self) -> None:
        assert self.ended


@pytest.fixture(params=[True, False], ids=["driver", "no driver"])
def recorder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    fake = Recorder(request.param)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", fake.graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", fake.new_pool)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: fake)
    monkeypatch.setattr(torch.cuda, "stream", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1, 2))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *_: None, raising=False)  # half of what is open
    for name in ("is_recording", "record_anew"):
        monkeypatch.setattr(capture, name, getattr(fake, name))
    monkeypatch.setattr(capture, "kernel_nodes", lambda *_: 1)
    return fake


def recording(recorder: Recorder) -> GraphCapturer:
    made = GraphCapturer(CPU)
    made.emulated, made._pool, made._word = False, recorder.new_pool(), torch.zeros(1)
    made._stream = SimpleNamespace(cuda_stream=7, wait_stream=lambda _: None, synchronize=recorder.synchronize)
    return made


def test_a_driver_out_of_memory_is_that_and_costs_no_pool(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has ended the recording by the time that the driver finds no room for the graph."""
    made, end, x = recording(recorder), FakeGraph.capture_end, torch.ones(8)

    def no_room(self: FakeGraph) -> None:
        end(self)
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later.")

    with made.session():
        made.capture("FULL", 8, lambda: x, torch.zeros(8))
        monkeypatch.setattr(FakeGraph, "capture_end", no_room)
        with pytest.raises(CaptureError, match="the GPU ran out of memory") as caught:
            made.capture("FULL", 8, lambda: x, torch.zeros(8))
        monkeypatch.setattr(FakeGraph, "capture_end", end)
        made.capture("FULL", 8, lambda: x, torch.zeros(8))
    assert caught.value.out_of_memory and not recorder.filling and recorder.pools == 1


@pytest.mark.parametrize("pieces", [False, True], ids=["whole", "pieces"])
@pytest.mark.parametrize("times", [0, 1, 2, 3])
@pytest.mark.parametrize("at_end", [False, True], ids=["at a launch", "at the end"])
def test_after_a_broken_capture_torch_is_as_before(recorder: Recorder, times: int, pieces: bool, at_end: bool) -> None:
    """Broken at a launch or unseen until the end, as often as it goes: the next capture works, nothing is left open."""
    made, left, x, output = recording(recorder), [times], torch.ones(8), torch.zeros(8)

    def forward(break_at=None) -> torch.Tensor:  # type: ignore[no-untyped-def]
        if recorder.state == "recording" and left[0]:
            left[0] -= 1
            recorder.state = "broken"
            if not at_end:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        if break_at is not None:
            break_at(0, x, x)
        return x + 1

    def record() -> capture.CapturedGraph:
        if pieces:
            return made.capture_segments(8, forward, forward, lambda *_: None, output)
        return made.capture("FULL", 8, forward, output)

    with made.session():
        if times > 1:
            with pytest.raises(CaptureError, match=r"broke it twice \(CUDA error: operation failed"):
                record()
            assert recorder.state == "idle" and not recorder.waiting
        graph = record()
    graph.replay()
    assert recorder.state == "idle" and not recorder.waiting
    if recorder.driver:
        assert not recorder.filling and recorder.pools == 1
    else:
        assert made._pool not in recorder.filling, "what is left open is left behind"


# --- what is refused while graphs live --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "move"),
    [
        ("token_ids", lambda llm: _move_inputs(llm)),
        (
            "key cache of layer 1",
            lambda llm: llm.engine.kv.key_caches.__setitem__(1, llm.engine.kv.key_caches[1].clone()),
        ),
        ("weight layers.0.qkv", lambda llm: _replace_weight(llm)),
    ],
    ids=["inputs", "kv", "weights"],
)
@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "PIECEWISE"])
def test_debug_sees_what_moved_before_a_replay(what: str, move, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("LABKIT_DEBUG", "1")
    with LLM("tiny-llama", **GRAPHS, cudagraph_mode=mode) as llm:
        llm.prime(2, 20, max_tokens=9)
        assert llm.step().mode == mode.split("_")[0], "nothing moved, nothing said"
        move(llm)
        with pytest.raises(CaptureError, match=what):
            llm.step()
        with pytest.raises(CaptureError, match=what):
            llm.step()  # the step was undone and the next one says the same


def _move_inputs(llm: LLM) -> None:
    inputs = llm.engine.inputs
    inputs._host = inputs._device = inputs._host.clone()
    inputs._views.clear()


def _replace_weight(llm: LLM, factor: float = 1.0) -> None:
    layer = llm.engine.model.decoder.layers[0]
    layer.attention.qkv = layer.attention.qkv * factor


def test_without_debug_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LABKIT_DEBUG", raising=False)
    with LLM("tiny-llama", **GRAPHS, cudagraph_mode="FULL_DECODE_ONLY") as llm:
        monkeypatch.setattr(llm.engine.runner, "_check_addresses", None)
        llm.prime(2, 20, max_tokens=9)
        assert llm.step().mode == "FULL"


def test_what_graphs_read_cannot_be_replaced() -> None:
    with LLM("tiny-llama", **GRAPHS, cudagraph_mode="FULL_DECODE_ONLY") as llm:
        engine, runner = llm.engine, llm.engine.runner
        with pytest.raises(CaptureError, match="read it at its address"):
            engine.kv.data = torch.zeros_like(engine.kv.data)
        for name in ("kv", "inputs", "decoder"):
            with pytest.raises(CaptureError, match=rf"replacing {name}.*4 captured graphs"):
                setattr(runner, name, getattr(runner, name))
        runner.drop_graphs()
        runner.kv = engine.kv
        engine.kv.data = torch.zeros_like(engine.kv.data)
    with LLM("tiny-llama", **EAGER) as llm:
        llm.engine.kv.data = llm.engine.kv.data.clone()


def test_a_workspace_that_was_given_back_is_noticed() -> None:
    with LLM("tiny-llama", **GRAPHS, cudagraph_mode="FULL_DECODE_ONLY") as llm:
        engine = llm.engine
        engine.runner.drop_graphs()
        engine.runner.backend.workspace = torch.zeros(4)
        engine._use_plan()
        kept = engine.runner.backend.workspace
        engine.runner.backend.workspace = torch.zeros(8)
        engine.runner._check_workspaces()  # the old one is still there, and so is its memory
        del kept
        with pytest.raises(CaptureError, match=r"replacing TorchSDPABackend\.workspace"):
            engine.runner._check_workspaces()
        with pytest.warns(UserWarning, match=r"TorchSDPABackend\.workspace was replaced"):
            assert "graphs" in llm.reconfigure(max_num_seqs=6).rebuilt_ms
        assert not engine.runner.replaced()


# --- weights ----------------------------------------------------------------------------------------------------------


def test_c34_weights_after_capture() -> None:
    weights_after_capture(GRAPHS)


def weights_after_capture(settings: dict) -> None:
    """Written in place: every graph has them. Replaced: the next reconfigure captures again."""
    batch = [p[:5] for p in prompts(2, seed=3)]
    with LLM("tiny-llama", **EAGER) as eager, LLM("tiny-llama", **settings) as llm:
        before, _ = teach(llm, batch, 4)
        for each in (eager, llm):
            each.reset()
            each.engine.model.decoder.layers[0].attention.qkv.mul_(2)
        reference, _ = teach(eager, batch, 4)
        assert any(not torch.allclose(reference[k], before[k], atol=1e-3) for k in before), "the weights matter"
        ours, reports = teach(llm, batch, 4)
        assert "FULL" in {r.mode for r in reports}
        assert_same_logits(ours, reference, what="in place")
        for each in (eager, llm):
            each.reset()
            _replace_weight(each, 0.25)
        reference, _ = teach(eager, batch, 4)
        with pytest.warns(UserWarning, match=r"layers\.0\.qkv was replaced"):
            assert "graphs" in llm.reconfigure(max_num_seqs=6).rebuilt_ms
        assert_same_logits(teach(llm, batch, 4)[0], reference, what="replaced")


# --- the estimate, and the report -------------------------------------------------------------------------------------


def test_the_estimate_goes_by_two_graphs_of_each_kind() -> None:
    keys = GraphDispatcher(Mode.FULL_AND_PIECEWISE, [1, 2, 4, 8, 16], 8).capture_order()
    kinds = kinds_of(keys)
    assert [(k[0].mode, k[0].size, len(k)) for k in kinds] == [("PIECEWISE", 16, 5), ("FULL", 8, 4)]
    assert extrapolate([[40.0, 6.0], [10.0, 2.0]], [5, 4]) == 40 + 4 * 6 + 10 + 3 * 2
    assert extrapolate([[40.0, 0.0]], [5]) == 40 + 4 * LEAST_MIB_PER_GRAPH
    assert extrapolate([[40.0]], [1]) == 40
    assert extrapolate([], []) == 0


def test_the_estimate_captures_two_of_each_kind_and_forgets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with the emulation in place of graphs: it takes no memory, so the least is set aside."""
    for name in ("memory_allocated", "empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    with LLM("tiny-llama", **GRAPHS) as llm:
        engine, said = llm.engine, []
        builder = Builder(
            engine.model, engine.plan, engine.device, engine._backend, None, lambda *words: said.append(words), False
        )
        layout = builder.build()
        assert layout.estimate.estimated_mib is None and layout.runner.kv is layout.kv
        builder._profile_run(layout.runner)
        builder._estimate_graphs(layout.runner)
        assert builder.estimate.estimated_mib == 2 * 3 * LEAST_MIB_PER_GRAPH and builder.estimate.estimate_ms > 0
        assert [words[3] for words in said] == ["graph memory, from 4 captures"]
        assert not layout.runner._graphs and not layout.kv.locked


def test_nothing_is_set_aside_on_a_cpu() -> None:
    with LLM("tiny-llama", **{**GRAPHS, "num_gpu_blocks_override": None}) as llm:
        memory = llm.graph_memory
        assert (memory.estimated_mib, memory.actual_mib, memory.difference_mib) == (None, 0.0, None)
        assert all(r.kernel_nodes is None for r in llm.capture_records)


class FakeDriver:
    """Three kernels, a copy and a memset on a stream that records, as the driver would tell."""

    def __init__(self, status: int = 1, kinds: tuple[int, ...] = (0, 1, 0, 2, 0), old: bool = False) -> None:
        self.status, self.kinds = status, kinds
        name = "cuStreamGetCaptureInfo_v2" if old else "cuStreamGetCaptureInfo_v3"
        setattr(self, name, self.info)

    def info(self, stream, *out) -> int:  # type: ignore[no-untyped-def]
        assert stream.value == 7 and len(out) == (6 if hasattr(self, "cuStreamGetCaptureInfo_v3") else 5)
        out[0]._obj.value, out[2]._obj.value = self.status, 99
        return 0

    def cuGraphGetNodes(self, graph, nodes, count) -> int:  # type: ignore[no-untyped-def]  # noqa: N802
        assert graph.value == 99
        count._obj.value = len(self.kinds)
        for i in range(len(self.kinds) if nodes is not None else 0):
            nodes[i] = 1000 + i
        return 0

    def cuGraphNodeGetType(self, node, kind) -> int:  # type: ignore[no-untyped-def]  # noqa: N802
        assert isinstance(node, ctypes.c_void_p)
        kind._obj.value = self.kinds[node.value - 1000]
        return 0


def test_kernels_are_counted_among_the_nodes() -> None:
    assert kernel_nodes(7, FakeDriver()) == kernel_nodes(7, FakeDriver(old=True)) == 3
    assert kernel_nodes(7, FakeDriver(kinds=())) == 0
    assert kernel_nodes(7, FakeDriver(status=0)) is None, "a stream that does not record"
    assert kernel_nodes(7, SimpleNamespace()) is None, "a driver without the call"


@pytest.mark.parametrize(("status", "recording"), [(0, False), (1, True), (2, False)], ids=["idle", "active", "broken"])
@pytest.mark.parametrize("refused", [0, 900])
def test_a_stream_that_broke_records_anew(status: int, recording: bool, refused: int) -> None:
    said: list[tuple[str, int]] = []

    def is_capturing(stream, out) -> int:  # type: ignore[no-untyped-def]
        out._obj.value = status
        return refused

    def end(stream, graph) -> int:  # type: ignore[no-untyped-def]
        said.append(("end", stream.value))
        graph._obj.value = 99 if recording else None
        return 0 if recording else 901

    driver = SimpleNamespace(
        cuStreamIsCapturing=is_capturing,
        cuStreamEndCapture=end,
        cuGraphDestroy=lambda graph: said.append(("destroy", graph.value)),
        cuStreamBeginCapture_v2=lambda stream, mode: said.append(("begin", mode.value)) or refused,
    )
    assert is_recording(7, driver) is (None if refused else recording)
    with pytest.raises(RuntimeError, match="error 900") if refused else contextlib.nullcontext():
        record_anew(7, driver)
    assert said == [("end", 7), *([("destroy", 99)] if recording else []), ("begin", 1)]
    assert is_recording(7, SimpleNamespace()) is None
    with pytest.raises(RuntimeError, match="lacks the calls"):
        record_anew(7, SimpleNamespace())


# --- torch.compile of the whole pass ----------------------------------------------------------------------------------


def test_the_whole_pass_through_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """One size, several batches in it, other sizes eagerly; debug watches the addresses all the while."""
    monkeypatch.setenv("LABKIT_DEBUG", "1")
    batch = prompts(2, seed=6, longest=9)
    with LLM("tiny-llama", **EAGER) as eager:
        reference, _ = teach(eager, batch, [5, 3])
    settings = {**SMALL, "cudagraph_capture_sizes": [2], "compilation_mode": "STOCK_TORCH_COMPILE"}
    with LLM("tiny-llama", **settings) as llm:
        assert llm.cudagraph_mode is Mode.FULL_DECODE_ONLY and not llm.notes
        assert llm.compile_report is None, "nothing was cut or kept"
        from torch._dynamo.utils import counters

        compiled = counters["stats"]["unique_graphs"]
        ours, reports = teach(llm, batch, [5, 3])
        assert_same_logits(ours, reference)
        assert {(r.mode, r.size) for r in reports if r.max_query_len == 1} == {("FULL", 2)}
        assert any(r.num_padded for r in reports)
        assert counters["stats"]["unique_graphs"] == compiled, "C35: nothing is compiled after start-up"
        off = llm.reconfigure(compilation_mode="NONE")
        assert "graphs" in off.rebuilt_ms and llm.cudagraph_mode is Mode.FULL_AND_PIECEWISE
        on = llm.reconfigure(compilation_mode="STOCK_TORCH_COMPILE")
        assert "graphs" in on.kept and not on.rebuilt_ms
        llm.reset()
        assert_same_logits(teach(llm, batch, [5, 3])[0], reference)


def test_a_whole_pass_that_cannot_be_compiled_leaves_an_engine_with_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise CompileError("the whole forward pass at size 2", "torch.compile failed", "Set compilation_mode to NONE.")

    monkeypatch.setattr(GraphCapturer, "capture_compiled", fail)
    settings = {**SMALL, "cudagraph_capture_sizes": [2], "compilation_mode": "STOCK_TORCH_COMPILE"}
    with pytest.warns(UserWarning, match="runs without compilation"), LLM("tiny-llama", **settings) as llm:
        assert (llm.config.compilation_mode, llm.cudagraph_mode) == ("NONE", Mode.FULL_AND_PIECEWISE)
        assert len(llm.generate([[1, 2, 3]])[0].token_ids) == 16


def test_c39_a_line_that_cannot_be_compiled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from labkit.models import traceable

    forward = traceable.forward

    def prints(*args: object) -> torch.Tensor:
        print("tokens", args[1])
        return forward(*args)

    monkeypatch.setattr(traceable, "forward", prints)
    monkeypatch.setenv("LABKIT_DISABLE_COMPILE_CACHE", "1")
    settings = {**SMALL, "cudagraph_capture_sizes": [2], "compilation_mode": "STOCK_TORCH_COMPILE"}
    for settings["compilation_mode"] in ("STOCK_TORCH_COMPILE", "VLLM_COMPILE"):
        with (
            pytest.warns(UserWarning, match=r'at test_capture\.py:\d+: print\("tokens", args\[1\]\)'),
            LLM("tiny-llama", **settings) as llm,
        ):
            assert len(llm.generate([[1, 2, 3]])[0].token_ids) == 16


def test_settings_of_the_whole_pass() -> None:
    def plan(**changes: object):  # type: ignore[no-untyped-def]
        config = EngineConfig(compilation_mode="STOCK_TORCH_COMPILE", **changes)
        return make_plan(config, SHAPES["smollm2-135m"], Platform("cuda", (9, 0)))

    assert plan().capture_sizes == (1, 2, 4, 8), "every size is a compile of the whole model"
    assert plan(max_cudagraph_capture_size=16).capture_sizes == (1, 2, 4, 8, 16)
    assert plan(cudagraph_capture_sizes=[3, 64]).capture_sizes == (3, 64)
    assert plan(cudagraph_mode="FULL").mode in (Mode.FULL, Mode.FULL_DECODE_ONLY)
    assert plan(cudagraph_mode="PIECEWISE").mode is Mode.NONE
    assert any("nothing is compiled" in note for note in plan(cudagraph_mode="NONE").notes)
    with pytest.raises(ConfigError, match="Drop one of the two"):
        plan(piecewise_method="break")


# --- lifetime ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"cudagraph_mode": "PIECEWISE"},
        {"compilation_mode": "STOCK_TORCH_COMPILE", "cudagraph_capture_sizes": [2]},
    ],
    ids=["full and piecewise", "piecewise", "whole"],
)
def test_c44_nothing_is_left_of_a_closed_engine(settings: dict) -> None:
    nothing_is_left({**GRAPHS, **settings}, 2 if settings else 5)


def nothing_is_left(settings: dict, turns: int) -> None:
    """Engines in a row, every second one after an exception in generate that somebody keeps, frames and all."""
    kept: list[object] = []
    for turn in range(turns):
        llm = LLM("tiny-llama", **settings)
        engine = llm.engine
        graph = next(iter(engine.runner._graphs.values()))
        gone = [weakref.ref(x) for x in (engine.runner, engine.kv, engine.kv.data, engine.inputs, graph.output)]
        if turn % 2:
            engine.sampler.sample = None
            with pytest.raises(TypeError) as caught:
                llm.generate([[1, 2, 3]])
            kept.append(caught)
        else:
            llm.generate([[1, 2, 3]])
            gone.append(weakref.ref(engine))
        llm.close()
        del llm, engine, graph
        gc.collect()
        assert [ref() is None for ref in gone] == [True] * len(gone)
