"""PIECEWISE and compiled engines on the GPU: every mode equals eager, for decodes, prefills, mixtures and padding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from labkit import LLM, SamplingParams
from labkit.graphs import compile_cache
from labkit.graphs.capture import borrow
from tests.gpu.test_engine import SMALL, prompts
from tests.teacher import assert_same_logits, one_by_one, teach

SIZES = [1, 2, 4, 6, 16, 40]
MODES = ["NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "FULL"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(autouse=True)
def own_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cache, "default_folder", lambda: folder)


@pytest.mark.parametrize("compilation", ["NONE", "VLLM_COMPILE"])
@pytest.mark.parametrize("name", ["TRITON_ATTN", "TORCH_SDPA"])
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3"])
def test_every_mode_equals_eager(model: str, name: str, compilation: str) -> None:
    batch, counts = prompts(7, seed=5), [12, 5, 9, 3, 14, 7, 6]
    settings = {**SMALL, "attention_backend": name}
    with LLM(model, **settings, enforce_eager=True) as eager:
        reference = one_by_one(eager, batch, counts)
    with LLM(model, **settings, cudagraph_capture_sizes=SIZES, compilation_mode=compilation) as llm:
        for mode in MODES:
            llm.reconfigure(cudagraph_mode=mode)
            ours, reports = teach(llm, batch, counts, stagger=2)
            assert_same_logits(ours, reference, what=f"{name} {mode} {compilation}")
            resolved = llm.cudagraph_mode
            mixed = {r.mode for r in reports if r.max_query_len > 1 and r.num_tokens <= SIZES[-1]}
            decodes = {r.mode for r in reports if r.max_query_len == 1 and r.num_cached_tokens == 0}
            assert mixed <= {resolved.mixed_mode().name}, (mode, mixed)
            assert resolved.decode_mode().name in decodes, (mode, decodes)
            pieces = llm.model_config.num_layers + 1
            assert all(r.graph_launches == {"NONE": 0, "FULL": 1, "PIECEWISE": pieces}[r.mode] for r in reports)
            llm.reset()


@pytest.mark.parametrize("compilation", ["NONE", "VLLM_COMPILE"])
def test_poison_changes_nothing_in_pieces(compilation: str) -> None:
    with LLM(
        "tiny-llama", **SMALL, cudagraph_mode="PIECEWISE", cudagraph_capture_sizes=SIZES, compilation_mode=compilation
    ) as llm:
        batch = prompts(5, seed=5)
        clean, _ = teach(llm, batch, 10)
        llm.reset()
        llm.engine.kv.data.fill_(float("nan"))
        poisoned, reports = teach(llm, batch, 10)
        assert any(r.num_padded and r.mode == "PIECEWISE" for r in reports)
        assert_same_logits(poisoned, clean, tolerance=0.0)


def test_bfloat16_compiled_is_as_close_to_float32_as_eager() -> None:
    """Over all positions: the compiled pass may round elsewhere, not more."""
    batch = prompts(4, seed=8)
    changes = {"max_num_batched_tokens": 64, "cudagraph_capture_sizes": SIZES}
    exact, errors = None, {}
    for dtype, compilation in (("float32", "NONE"), ("bfloat16", "NONE"), ("bfloat16", "VLLM_COMPILE")):
        settings = {**SMALL, **changes, "dtype": dtype, "compilation_mode": compilation}
        with LLM("tiny-qwen3", **settings) as llm:
            ours, _ = teach(llm, batch, 8)
        if exact is None:
            exact = ours
            continue
        errors[compilation] = sum((ours[k] - exact[k]).norm().item() ** 2 for k in exact) ** 0.5
    assert errors["VLLM_COMPILE"] <= 1.25 * errors["NONE"], errors


def test_c35_no_number_of_tokens_compiles_anything_after_start_up() -> None:
    from torch._dynamo.utils import counters

    with LLM("tiny-llama", **SMALL, cudagraph_capture_sizes=SIZES, compilation_mode="VLLM_COMPILE") as llm:
        compiled = dict(counters["stats"])
        for tokens in range(1, 65):
            llm.generate([[3] * tokens], SamplingParams(max_tokens=2))
        assert dict(counters["stats"]) == compiled
        records = {(r.mode, r.size): r.kernel_nodes for r in llm.capture_records}
        for size in (1, 2, 4, 6):
            full, pieces = records["FULL", size], records["PIECEWISE", size]
            assert full is not None and pieces is not None and full > pieces, "attention is in a FULL graph only"


def test_memory_grows_far_slower_than_the_number_of_sizes() -> None:
    """C33: one pool, largest first. Every further size may cost its graphs' driver memory, not its activations."""
    many = [*range(1, 9), *range(16, 257, 16)]
    used = {}
    for sizes in ([256], many):
        torch.cuda.synchronize()
        settings = {**SMALL, "max_num_batched_tokens": 512, "max_num_seqs": 64}
        with LLM("smollm2-135m", **settings, cudagraph_mode="NONE") as llm:
            before = torch.cuda.memory_reserved()
            llm.reconfigure(cudagraph_mode="PIECEWISE", cudagraph_capture_sizes=sizes)
            used[len(sizes)] = torch.cuda.memory_reserved() - before
            assert len(llm.capture_records) == len(sizes)
    assert used[len(many)] <= 2.5 * used[1] + (8 << 20), used


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_a_borrowed_tensor_is_the_same_memory_and_owns_none(dtype: torch.dtype) -> None:
    base = torch.arange(240, device="cuda").to(dtype).view(6, 40)
    view = base[:, 8:32].view(6, 3, 8)
    ours = borrow(view)
    assert (ours.data_ptr(), ours.shape, ours.stride(), ours.dtype) == (
        view.data_ptr(), view.shape, view.stride(), dtype,
    )  # fmt: skip
    base.add_(1)
    assert torch.equal(ours, view)
    before = torch.cuda.memory_allocated()
    del base, view
    assert torch.cuda.memory_allocated() < before
