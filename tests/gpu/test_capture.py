"""Capture on the GPU: what it takes, what it counts, what breaks it, what is left afterwards."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from pathlib import Path

import pytest
import torch

from labkit import LLM
from labkit.errors import CaptureError
from labkit.graphs import compile_cache
from labkit.graphs.capture import GraphCapturer, _never_ended
from labkit.models.decoder import Decoder
from tests.gpu.test_engine import SMALL, prompts
from tests.teacher import assert_same_logits, teach

SIZES = [1, 2, 4, 6, 16]
GRAPHS = {**SMALL, "cudagraph_capture_sizes": SIZES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(autouse=True)
def own_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cache, "default_folder", lambda: folder)


@pytest.fixture
def capturer() -> GraphCapturer:
    return GraphCapturer(torch.device("cuda", torch.cuda.current_device()))


# --- what it counts ---------------------------------------------------------------------------------------------------


def test_kernels_are_counted(capturer: GraphCapturer) -> None:
    x, output = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
    with capturer.session():
        three = capturer.capture("FULL", 8, lambda: x.add(1).mul(2).sin(), output)  # the copy out is no kernel
        one = capturer.capture("FULL", 4, lambda: x[:4] + 1, output)
    assert (three.record.kernel_nodes, one.record.kernel_nodes) == (3, 1)
    x.fill_(2)
    one.replay()
    assert output[:4].tolist() == [3.0] * 4
    three.replay()
    assert torch.allclose(output, torch.full_like(output, 6.0).sin())


# --- what breaks it ---------------------------------------------------------------------------------------------------


def synchronize_elsewhere() -> None:
    def run() -> None:
        # It fails, and so does the capture.
        with torch.cuda.stream(torch.cuda.Stream()), contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@pytest.mark.parametrize("pieces", [False, True], ids=["whole", "pieces"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_capture_broken_by_another_thread_is_tried_once_more(
    capturer: GraphCapturer, times: int, pieces: bool
) -> None:
    x, output, left = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda"), [times]

    def forward(break_at=None) -> torch.Tensor:  # type: ignore[no-untyped-def]
        y = x + 1
        if torch.cuda.is_current_stream_capturing() and left[0]:
            left[0] -= 1
            synchronize_elsewhere()
        if break_at is not None:
            break_at(0, x, x)
        return y * 2

    def capture() -> object:
        if pieces:
            return capturer.capture_segments(8, forward, forward, lambda *_: None, output)
        return capturer.capture("FULL", 8, forward, output)

    with capturer.session():
        if times == 2:
            with pytest.raises(CaptureError, match="something outside broke it twice") as caught:
                capture()
            print(caught.value)
        graph = capture()
    print(f"pools lost: {len(_never_ended)}")
    assert torch.cuda.current_stream() == torch.cuda.default_stream(), "a broken capture leaves no stream behind"
    torch.randn(4, device="cuda")  # a broken capture must not leave the generator waiting for its end
    x.fill_(5)
    graph.replay()  # type: ignore[attr-defined]
    assert output.tolist() == [12.0] * 8


def test_c32_a_shape_that_depends_on_data_is_named_and_a_second_capture_works(capturer: GraphCapturer) -> None:
    x, output = torch.arange(8.0, device="cuda"), torch.zeros(8, device="cuda")
    with capturer.session():
        with pytest.raises(CaptureError, match=r"test_capture\.py:\d+: .*x\[x > 3\]") as caught:
            capturer.capture("FULL", 4, lambda: x[x > 3], output)
        print(caught.value)
        graph = capturer.capture("FULL", 8, lambda: x + 1, output)
    graph.replay()
    assert output.tolist() == [i + 1 for i in range(8)]


def test_a_capture_that_stays_broken_gives_its_memory_back() -> None:
    def once() -> int:
        capturer = GraphCapturer(torch.device("cuda", torch.cuda.current_device()))
        output = torch.zeros(8, device="cuda")

        def forward() -> torch.Tensor:
            large = torch.ones(16 << 20, device="cuda")
            if torch.cuda.is_current_stream_capturing():
                synchronize_elsewhere()
            return large[:8] + 1

        with capturer.session(), pytest.raises(CaptureError, match="something outside broke it twice"):
            capturer.capture("FULL", 8, forward, output)
        del capturer
        return len(_never_ended)

    seen = []
    for _ in range(4):
        lost = once()
        gc.collect()
        torch.cuda.empty_cache()
        seen.append((torch.cuda.memory_reserved() >> 20, lost))
    print(f"MiB reserved, and pools lost: {seen}")
    assert seen[-1][0] <= seen[0][0], seen
    assert torch.empty(4, pin_memory=True).is_pinned(), "the allocator of pinned memory, too, is as it was"


def test_c32_an_old_engine_in_a_circle_while_the_collector_is_eager() -> None:
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(2):
            llm = LLM("tiny-llama", **GRAPHS)
            circle: list[object] = [llm.engine.runner, llm.engine.kv]
            circle.append(circle)
            llm.close()
            del llm, circle
        with LLM("tiny-llama", **GRAPHS) as llm:
            assert llm.cudagraph_mode.name == "FULL_AND_PIECEWISE" and gc.isenabled()
            assert len(llm.generate([[1, 2, 3]])[0].token_ids) == 16
    finally:
        gc.set_threshold(*threshold)


def test_memory_that_runs_out_in_a_capture_leaves_the_smaller_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """C33: a real failed allocation inside the recording, above a size."""
    forward = Decoder.forward

    def greedy(self: Decoder, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing() and token_ids.shape[0] > 2:
            torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
        return forward(self, token_ids, positions)

    batch = prompts(2, seed=3, longest=9)
    with LLM("tiny-llama", **SMALL, enforce_eager=True) as eager:
        reference, _ = teach(eager, batch, 5)
    monkeypatch.setattr(Decoder, "forward", greedy)
    with pytest.warns(UserWarning, match="ran out of memory"):
        llm = LLM("tiny-llama", **GRAPHS)
    with llm:
        assert (llm.cudagraph_mode.name, llm.capture_sizes) == ("FULL_AND_PIECEWISE", [1, 2]), llm.mode_trail
        ours, reports = teach(llm, batch, 5)
        assert "FULL" in {r.mode for r in reports}
        assert_same_logits(ours, reference)
        monkeypatch.undo()
        llm.reset()
        llm.reconfigure(cudagraph_mode="FULL_AND_PIECEWISE")
        assert llm.capture_sizes == SIZES
        assert_same_logits(teach(llm, batch, 5)[0], reference)


# --- what it takes ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="counts the GPU's memory, which other workers take too")
def test_the_estimate_is_near_what_graphs_take() -> None:
    settings = {**SMALL, "dtype": "bfloat16", "max_num_seqs": 64, "max_num_batched_tokens": 512}
    with LLM("smollm2-135m", **settings) as llm:
        memory, records = llm.graph_memory, llm.capture_records
        print(f"{len(records)} captures: {memory}")
        assert memory.estimated_mib is not None and memory.actual_mib > 0
        assert abs(memory.difference_mib) <= 0.5 * memory.actual_mib + 64, memory
        assert all(r.mib >= -2 for r in records), "recording gives no memory back"
        layers = llm.model_config.num_layers
        full = {r.size: r.kernel_nodes for r in records if r.mode == "FULL"}
        pieces = {r.size: r.kernel_nodes for r in records if r.mode == "PIECEWISE"}
        for size, kernels in full.items():
            assert kernels is not None and pieces[size] is not None, "the driver counts"
            assert kernels - pieces[size] >= layers, "attention is in a FULL graph only, at least a kernel a layer"
    with LLM("smollm2-135m", **settings, cudagraph_mode="NONE") as llm:
        assert llm.graph_memory.estimated_mib is None and llm.graph_memory.actual_mib == 0


# --- what others give back --------------------------------------------------------------------------------------------


def poison(mib: int = 512) -> None:
    """Fill what the allocator has free with NaN."""
    taken = [torch.full((8 << 20,), float("nan"), device="cuda") for _ in range(mib // 32)]
    torch.cuda.synchronize()
    del taken


def test_a_graph_keeps_the_workspace_of_its_matrix_products() -> None:
    """Few rows and many columns: cuBLAS splits the sum, and its parts go through the workspace."""
    batch = prompts(1, seed=21)
    settings = {**SMALL, "dtype": "bfloat16", "cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [1, 4]}
    with LLM("qwen3-0.6b", **{**SMALL, "dtype": "bfloat16"}, enforce_eager=True) as eager:
        reference, _ = teach(eager, batch, 6)
    with LLM("qwen3-0.6b", **settings) as llm:
        for mode in ("FULL_AND_PIECEWISE", "PIECEWISE"):
            llm.reconfigure(cudagraph_mode=mode)
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            poison()
            llm.reset()
            assert_same_logits(teach(llm, batch, 6)[0], reference, tolerance=5e-2, what=mode)


def test_closing_one_engine_leaves_the_graphs_of_another() -> None:
    batch = prompts(1, seed=22)
    settings = {**SMALL, "dtype": "bfloat16", "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 4]}
    with LLM("qwen3-0.6b", **settings) as llm:
        before, _ = teach(llm, batch, 6)
        with LLM("qwen3-0.6b", **settings) as other:
            teach(other, batch, 3)
        torch.cuda.empty_cache()
        poison()
        llm.reset()
        assert_same_logits(teach(llm, batch, 6)[0], before, tolerance=1e-6, what="the other is closed")


@pytest.mark.parametrize("first", ["FULL_DECODE_ONLY", "PIECEWISE"])
def test_graphs_of_torch_compile_leave_those_of_labkit(first: str) -> None:
    batch = prompts(1, seed=23)
    settings = {**SMALL, "dtype": "bfloat16", "cudagraph_mode": first, "cudagraph_capture_sizes": [1]}
    with LLM("qwen3-0.6b", **settings) as llm:
        before, _ = teach(llm, batch, 6)
        llm.reconfigure(compilation_mode="STOCK_TORCH_COMPILE", cudagraph_mode="FULL_DECODE_ONLY")
        llm.reset()
        teach(llm, batch, 3)
        llm.reconfigure(compilation_mode="NONE", cudagraph_mode=first)
        torch.cuda.empty_cache()
        poison()
        llm.reset()
        assert_same_logits(teach(llm, batch, 6)[0], before, tolerance=1e-6, what=first)


# --- what must not move -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "PIECEWISE"])
def test_debug_sees_a_moved_input(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_DEBUG", "1")
    with LLM("tiny-llama", **GRAPHS, cudagraph_mode=mode) as llm:
        llm.prime(2, 20, max_tokens=9)
        assert llm.step().mode == mode.split("_")[0]
        inputs = llm.engine.inputs
        inputs._device = inputs._device.clone()
        inputs._views.clear()
        with pytest.raises(CaptureError, match="token_ids"):
            llm.step()


def test_c34_weights_after_capture() -> None:
    batch = prompts(3, seed=4, longest=9)
    with LLM("tiny-llama", **SMALL, enforce_eager=True) as eager, LLM("tiny-llama", **GRAPHS) as llm:
        for each in (eager, llm):
            each.engine.model.decoder.layers[0].attention.qkv.mul_(2)
        reference, _ = teach(eager, batch, 5)
        ours, reports = teach(llm, batch, 5)
        assert "FULL" in {r.mode for r in reports}
        assert_same_logits(ours, reference, what="in place")
        for each in (eager, llm):
            each.reset()
            layer = each.engine.model.decoder.layers[0]
            layer.attention.qkv = layer.attention.qkv * 0.25
        with pytest.warns(UserWarning, match="was replaced"):
            llm.reconfigure(max_num_seqs=6)
        reference, _ = teach(eager, batch, 5)
        assert_same_logits(teach(llm, batch, 5)[0], reference, what="replaced")


# --- torch.compile of the whole pass ----------------------------------------------------------------------------------


def test_reduce_overhead_equals_eager() -> None:
    from torch._dynamo.utils import counters

    batch = prompts(4, seed=7, longest=20)
    with LLM("tiny-llama", **SMALL, enforce_eager=True) as eager:
        reference, _ = teach(eager, batch, [9, 4, 7, 5])
    settings = {**SMALL, "cudagraph_capture_sizes": [2, 4]}
    with LLM("tiny-llama", **settings, compilation_mode="STOCK_TORCH_COMPILE") as llm:
        assert llm.cudagraph_mode.name == "FULL_DECODE_ONLY" and not llm.notes, llm.notes
        compiled = counters["stats"]["unique_graphs"]
        ours, reports = teach(llm, batch, [9, 4, 7, 5])
        assert_same_logits(ours, reference)
        assert {r.size for r in reports if r.mode == "FULL"} == {2, 4}
        assert all(r.graph_launches == 1 and not r.emulated for r in reports if r.mode == "FULL")
        assert counters["stats"]["unique_graphs"] == compiled, "C35: nothing is compiled after start-up"


# --- what is left -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"cudagraph_mode": "PIECEWISE"},
        {"compilation_mode": "VLLM_COMPILE"},
        {"compilation_mode": "STOCK_TORCH_COMPILE", "cudagraph_capture_sizes": [2]},
    ],
    ids=["full and piecewise", "piecewise", "compiled", "reduce-overhead"],
)
def test_c44_engines_return_to_the_same_memory(settings: dict[str, object]) -> None:
    def once(fail: bool) -> tuple[int, int]:
        with LLM("tiny-llama", **{**GRAPHS, **settings}) as llm:
            if fail:
                llm.engine.sampler.sample = None  # type: ignore[assignment,method-assign]
                with pytest.raises(TypeError):
                    llm.generate([[1, 2, 3]])
            else:
                llm.generate([[1, 2, 3]])
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    once(False)
    seen = [once(turn == 1) for turn in range(3 if "compilation_mode" in settings else 5)]
    for measured in zip(*seen, strict=True):
        assert max(measured) - min(measured) < 4 << 20, seen
