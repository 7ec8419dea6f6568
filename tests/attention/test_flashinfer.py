"""FLASHINFER without a GPU: its rules, and what it hands to FlashInfer, which a page of dense torch stands in for."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import random
import sys

import numpy as np
import pytest
import torch

from labkit.attention import flashinfer as ours
from labkit.attention.flashinfer import FlashInferBackend, page_layout
from labkit.attention.interface import AttentionCGSupport, AttentionSpec, Platform
from labkit.attention.kernels import pages
from labkit.attention.registry import platform_for_gpu
from labkit.errors import BackendError
from tests.attention import fake_flashinfer as fake
from tests.parity import SMALL as PARITY
from tests.parity import Case, Contender, check_case, prove_tier
from tests.reference import PagedBatch, assert_attention_close, dense_attention, random_batch

CPU = torch.device("cpu")
H200 = platform_for_gpu("H200")
SPEC = AttentionSpec(32, 8, 128, "bfloat16", 16)


class OnCPU(FlashInferBackend):
    """The backend with a gate that lets the stand-in run."""

    capabilities = dataclasses.replace(
        FlashInferBackend.capabilities, device_types=("cuda", "cpu"), dtypes=("float32", "float16", "bfloat16")
    )


def install(monkeypatch: pytest.MonkeyPatch, modules: dict) -> None:
    for name, found in modules.items():
        monkeypatch.setitem(sys.modules, name, found)
    fake.Wrapper.made.clear()
    ours._import_flashinfer.cache_clear()


@pytest.fixture(autouse=True)
def _forget() -> object:
    ours._import_flashinfer.cache_clear()
    yield
    ours._import_flashinfer.cache_clear()


@pytest.fixture(params=["0.6.12", "0.7.2", "bare"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> str:
    """A FlashInfer whose kernels are prebuilt, in three versions of `plan`."""
    (tmp_path / "aot").mkdir()
    wrapper = {"0.6.12": fake.Wrapper, "0.7.2": fake.LaterWrapper, "bare": fake.BareWrapper}[request.param]
    version = "0.6.3" if request.param == "bare" else request.param
    install(monkeypatch, fake.module(tmp_path, version, wrapper))
    return request.param


def make(batch: PagedBatch, **changes: object) -> OnCPU:
    values: dict[str, object] = {
        "num_heads": batch.query.shape[1],
        "num_kv_heads": batch.key_cache.shape[2],
        "head_size": batch.query.shape[2],
        "dtype": str(batch.query.dtype).removeprefix("torch."),
        "block_size": batch.key_cache.shape[1],
        "max_model_len": 512,
        "max_num_seqs": 16,
        **changes,
    }
    return OnCPU(AttentionSpec(**values), CPU)  # type: ignore[arg-type]


def attend(backend: OnCPU, batch: PagedBatch, *, pad: int = 0, lse: bool = False, scale: float = 0.0) -> torch.Tensor:
    metadata = batch.metadata(pad_reqs=pad, pad_tokens=pad)
    query = torch.cat([batch.query, torch.full((pad, *batch.query.shape[1:]), float("nan"), dtype=batch.query.dtype)])
    output, where = torch.full_like(query, float("nan")), torch.full(query.shape[:2], float("nan"))
    caches = [batch.key_cache, batch.value_cache]
    if backend.spec.kv_cache_layout == "HND":
        caches = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in caches]
    backend.prepare(metadata)
    backend.forward(
        query, *caches, output, metadata, scale=scale or batch.scale, lse=where if lse else None,
        sliding_window=backend.spec.sliding_window, logits_soft_cap=backend.spec.logits_soft_cap,
    )  # fmt: skip
    return (where if lse else output)[: batch.num_tokens]


def lengths(rng: random.Random, n: int) -> tuple[list[int], list[int]]:
    query = [rng.choice([1, 1, rng.randint(2, 20)]) for _ in range(n)]
    return query, [q + rng.choice([0, rng.randint(0, 90)]) for q in query]


# --- rules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "changes", "said"),
    [
        ("H200", {}, None),
        ("A100", {"dtype": "float16", "kv_cache_layout": "HND"}, None),
        ("B200", {"sliding_window": 1, "logits_soft_cap": 30.0, "head_size": 256}, None),
        ("RTX 5090", {"head_size": 64, "block_size": 8}, None),
        ("T4", {"dtype": "float16"}, "sm_80"),
        ("cpu", {}, "NVIDIA"),
        ("H200", {"dtype": "float32"}, "float32"),
        ("H200", {"head_size": 80}, "head size 80"),
        ("H200", {"head_size": 192}, "merge"),
        ("H200", {"num_heads": 9, "num_kv_heads": 2}, "multiple"),
        ("H200", {"has_sinks": True}, "sinks"),
        ("H200", {"num_splits": 4}, "number of splits"),
        ("H200", {"batch_invariant": True}, "invariant"),
        ("H200", {"split_mixed_batches": True}, None),
        ("H200", {"block_size": 4}, "pages of 4"),
        ("H200", {"family": "MLA"}, "MLA"),
        ("H200", {"kv_cache_dtype": "fp8"}, "fp8"),
    ],
)
def test_who_can_be_served_and_who_is_told_why_not(gpu: str, changes: dict, said: str | None) -> None:
    reasons = FlashInferBackend.why_not(dataclasses.replace(SPEC, **changes), platform_for_gpu(gpu))
    if said is None:
        assert reasons == []
    else:
        assert len(reasons) == 1 and said in str(reasons[0]), reasons


def test_the_tier_says_why() -> None:
    tier, why = FlashInferBackend.graph_support(SPEC, H200)
    assert tier is AttentionCGSupport.ALWAYS and "UNIFORM_SINGLE_TOKEN_DECODE" in why and "plan" in why


# --- availability ----------------------------------------------------------------------------------------------------


def tool(folder: pathlib.Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def toolchain(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """A machine with everything to compile with, in folders of its own."""
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX", "FLASHINFER_NVCC", "FLASHINFER_DISABLE_JIT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("nvcc", "ninja", "c++"):
        tool(tmp_path / "bin", name)
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    install(monkeypatch, fake.module(tmp_path / "work"))
    return tmp_path


def test_all_tools_are_there(toolchain: pathlib.Path) -> None:
    found = FlashInferBackend.availability()
    assert found.usable and found.version == "0.6.12" and not found.reason


@pytest.mark.parametrize(
    ("missing", "named"), [("nvcc", "no nvcc at /usr/local/cuda"), ("ninja", "pip install ninja"), ("c++", "g++")]
)
def test_a_missing_tool_is_named_with_its_remedy(toolchain: pathlib.Path, missing: str, named: str) -> None:
    (toolchain / "bin" / missing).unlink()
    found = FlashInferBackend.availability()
    if missing == "nvcc" and os.path.exists("/usr/local/cuda/bin/nvcc"):
        assert found.usable
        return
    assert not found.usable and named in found.reason and "compiles" in found.reason
    assert found.reason.count("; ") == 0, "only what is missing is named"


def test_every_missing_tool_is_named_at_once(toolchain: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(toolchain / "cuda"))
    reason = FlashInferBackend.availability().reason
    assert f"no nvcc at {toolchain}/cuda/bin/nvcc" in reason and "ninja" in reason and "c++" in reason


def test_ninja_beside_an_unactivated_python_is_pointed_at(toolchain: pathlib.Path) -> None:
    (toolchain / "bin" / "ninja").unlink()
    tool(toolchain / "venv", "ninja")
    assert f"add {toolchain}/venv to PATH" in FlashInferBackend.availability().reason


def test_cuda_home_is_where_nvcc_is_looked_for(toolchain: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolchain))
    assert FlashInferBackend.availability().usable


def test_a_workspace_that_cannot_be_written(toolchain: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    assert "FLASHINFER_WORKSPACE_BASE" in FlashInferBackend.availability().reason


def test_prebuilt_kernels_need_no_compiler(toolchain: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert "FLASHINFER_DISABLE_JIT" in FlashInferBackend.availability().reason
    monkeypatch.setenv("PATH", "")
    (toolchain / "work" / "aot").mkdir()
    assert FlashInferBackend.availability().usable


def test_the_import_error_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    folder = tmp_path / "flashinfer"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(ours, "_cuda_is_there", lambda: True)
    found = FlashInferBackend.availability()
    assert not found.usable and found.reason == "ImportError: libcudart.so.12: cannot open shared object file"


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.setattr(ours.importlib.util, "find_spec", lambda name: None)
    assert FlashInferBackend.availability().reason == "ModuleNotFoundError: No module named 'flashinfer'"


def test_an_instance_where_nothing_compiles_is_refused(toolchain: pathlib.Path) -> None:
    (toolchain / "bin" / "ninja").unlink()
    with pytest.raises(BackendError, match="ninja"):
        OnCPU(dataclasses.replace(SPEC, dtype="float32"), CPU)
    with pytest.raises(BackendError, match="NVIDIA"):
        FlashInferBackend(SPEC, CPU)


# --- compiling -------------------------------------------------------------------------------------------------------


def test_compiling_is_announced_until_it_is_done(toolchain: pathlib.Path) -> None:
    spec = dataclasses.replace(SPEC, head_size=64, sliding_window=9, dtype="float16", max_num_seqs=2, max_model_len=64)
    note = FlashInferBackend.compile_note(spec)
    assert note and "head size 64 in float16 with a sliding window" in note and str(toolchain / "work") in note
    backend, said = OnCPU(spec, CPU), []
    backend.warm_up(lambda *call: said.append(call))
    assert said == [("compiling", 0, 1, note), ("compiling", 1, 1, "done")]
    assert backend._eager.wrapper.plans == 1
    path = FlashInferBackend.jit_spec(spec).get_library_path()
    path.parent.mkdir(parents=True)
    path.touch()
    said.clear()
    backend.warm_up(lambda *call: said.append(call))
    assert FlashInferBackend.compile_note(spec) is None and said == []
    backend.warm_up(None)
    for other in ({"sliding_window": None}, {"logits_soft_cap": 20.0}, {"head_size": 128}, {"dtype": "bfloat16"}):
        assert FlashInferBackend.compile_note(dataclasses.replace(spec, **other)), "every one is a module of its own"
    assert FlashInferBackend.compile_note(dataclasses.replace(spec, num_heads=64, block_size=64)) is None


# --- what FlashInfer is handed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_mixed_batches_equal_dense_attention(library: str, seed: int) -> None:
    rng = random.Random(seed)
    heads, kv_heads = rng.choice([(9, 3), (4, 4), (8, 2), (28, 4), (5, 1)])
    layout = rng.choice(["NHD", "HND"])
    for pad in (0, 3):
        batch = random_batch(
            *lengths(rng, rng.randint(1, 6)), num_heads=heads, num_kv_heads=kv_heads, head_size=rng.choice([64, 128]),
            block_size=rng.choice([8, 16, 24]), seed=seed,
        )  # fmt: skip
        backend = make(batch, kv_cache_layout=layout)
        assert_attention_close(batch, attend(backend, batch, pad=pad), what=f"{library} {layout}")
        _, lse = dense_attention(batch)
        torch.testing.assert_close(attend(backend, batch, pad=pad, lse=True).double(), lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("window", "cap"), [(1, None), (17, None), (None, 5.0), (40, 2.0)])
def test_windows_and_soft_caps(library: str, layout: str, window: int | None, cap: float | None) -> None:
    batch = random_batch([1, 30, 4, 1], [90, 61, 4, 17], num_heads=6, num_kv_heads=2, head_size=64, block_size=8)
    batch.query *= 4
    backend = make(batch, sliding_window=window, logits_soft_cap=cap, kv_cache_layout=layout)
    out = attend(backend, batch)
    assert_attention_close(batch, out, window=window, soft_cap=cap)
    assert (out.double() - dense_attention(batch)[0]).abs().max() > 1e-2, "the feature must matter here"


def test_half_precision_and_a_scale_of_the_models_own(library: str) -> None:
    batch = random_batch([1, 9], [40, 33], num_heads=4, num_kv_heads=2, head_size=64, dtype=torch.float16)
    batch.scale = 0.3
    assert_attention_close(batch, attend(make(batch), batch))


def test_a_call_that_is_not_what_was_planned_is_refused(library: str) -> None:
    batch = random_batch([2], [5], num_heads=2, num_kv_heads=2, head_size=64)
    metadata, backend = batch.metadata(), make(batch, sliding_window=3)
    call = (batch.query, batch.key_cache, batch.value_cache, torch.empty_like(batch.query), metadata)
    with pytest.raises(BackendError, match="planned for window 3"):
        backend.forward(*call, scale=1.0)
    with pytest.raises(BackendError, match="sinks"):
        backend.forward(*call, scale=1.0, sliding_window=3, sinks=torch.zeros(2))
    narrow = torch.empty(2, 2, 128)[..., :64]
    with pytest.raises(BackendError, match="contiguous"):
        backend.forward(*call[:3], narrow, metadata, scale=1.0, sliding_window=3)
    small = make(batch, max_num_seqs=1, max_model_len=16)
    wide = random_batch([1, 1], [16, 20], num_heads=2, num_kv_heads=2, head_size=64)
    with pytest.raises(BackendError, match="a batch of 3 pages"):
        small.prepare(wide.metadata())


def test_a_view_of_a_fused_projection(library: str) -> None:
    batch = random_batch([3, 1], [8, 30], num_heads=4, num_kv_heads=2, head_size=64)
    fused = torch.full((4, 8, 64), float("nan"))
    fused[:, :4] = batch.query
    batch.query = fused[:, :4]
    assert not batch.query.is_contiguous()
    backend, metadata, output = make(batch), batch.metadata(), torch.empty(4, 4, 64)
    backend.prepare(metadata)
    backend.forward(batch.query, batch.key_cache, batch.value_cache, output, metadata, scale=batch.scale)
    assert_attention_close(batch, output)


def test_c17_the_last_page_and_rows_behind_the_batch() -> None:
    """C17: a full last page is full and not empty; rows behind the offsets are nobody's."""
    lens = np.array([15, 16, 17, 32, 1, 0], dtype=np.int32)
    starts = np.array([0, 1, 2, 3, 4, 5, 5], dtype=np.int32)
    layout = page_layout(starts, lens, 16)
    assert layout.last_page_len.tolist() == [15, 16, 1, 16, 1, 0]
    assert layout.page_start.tolist() == [0, 1, 2, 4, 6, 7, 7]
    assert (layout.num_rows, layout.num_pages, layout.max_query_len) == (5, 7, 1)
    assert all(a.dtype == np.int32 for a in (layout.query_start, layout.page_start, layout.last_page_len))
    starts[:], lens[:] = 99, 99
    assert layout.query_start.tolist() == [0, 1, 2, 3, 4, 5, 5], "the step's buffers are copied"
    for bad in ([1, 2, 3], [0, 3, 2]):
        with pytest.raises(BackendError, match="never decrease"):
            page_layout(np.array(bad, dtype=np.int32), np.array([4, 4], dtype=np.int32), 16)


@pytest.mark.parametrize("lens", [15, 16, 17, 32])
def test_c17_rows_behind_the_batch_stay_as_they_are(library: str, lens: int) -> None:
    batch = random_batch([1, 4], [lens, lens], num_heads=2, num_kv_heads=1, head_size=64)
    backend, metadata = make(batch), batch.metadata(pad_reqs=2, pad_tokens=3)
    query = torch.cat([batch.query, torch.full((3, 2, 64), float("nan"))])
    output = torch.full_like(query, 7.0)
    backend.prepare(metadata)
    backend.forward(query, batch.key_cache, batch.value_cache, output, metadata, scale=batch.scale)
    assert_attention_close(batch, output[:5])
    assert (output[5:] == 7.0).all()


def test_c18_the_order_of_the_requests_is_the_order_of_the_answers(library: str) -> None:
    """C18: chunk, decode, the last token of a chunk, decode, in all 24 orders."""
    batch = random_batch([5, 1, 1, 1], [5, 30, 9, 17], num_heads=4, num_kv_heads=2, head_size=64, block_size=8)
    backend = make(batch)
    exact = dense_attention(batch)[0].split(batch.query_lens)
    queries = batch.query.split(batch.query_lens)
    for order in itertools.permutations(range(4)):
        shuffled = PagedBatch(
            torch.cat([queries[i] for i in order]), batch.key_cache, batch.value_cache,
            *([values[i] for i in order] for values in (batch.query_lens, batch.kv_lens, batch.tables)), batch.scale,
        )  # fmt: skip
        wanted = torch.cat([exact[i] for i in order])
        torch.testing.assert_close(attend(backend, shuffled).double(), wanted, atol=1e-5, rtol=1e-5)


def test_rows_that_see_nothing_give_zero_and_minus_infinity(library: str) -> None:
    """No keys at all, more queries than keys, and both with neighbours."""
    batch = random_batch([1, 3, 7, 2, 1], [20, 0, 4, 40, 0], num_heads=4, num_kv_heads=2, head_size=64)
    backend = make(batch)
    out, lse = attend(backend, batch, pad=2), attend(backend, batch, pad=2, lse=True)
    assert_attention_close(batch, out)
    _, exact = dense_attention(batch)
    blind = torch.isneginf(exact)
    assert blind[:, 0].tolist() == [False] + [True] * 6 + [False] * 6 + [True]
    assert (out[blind] == 0).all() and torch.equal(torch.isneginf(lse), blind)
    torch.testing.assert_close(lse.double(), exact, atol=1e-4, rtol=1e-4)


def test_an_empty_batch_runs_nothing(library: str) -> None:
    batch = random_batch([1], [5], num_heads=2, num_kv_heads=1, head_size=64)
    backend, empty = make(batch), random_batch([], [], num_heads=2, num_kv_heads=1, head_size=64)
    assert attend(backend, empty).shape[0] == 0 and backend._eager.wrapper.plans == 0
    assert_attention_close(batch, attend(backend, batch))


# --- under a graph ---------------------------------------------------------------------------------------------------


class Graph:
    """A captured shape: fixed tensors, the dummy batch at capture, then other compositions through the same buffers."""

    def __init__(self, backend: OnCPU, reqs: int, tokens: int, uniform: bool, *, blocks: int = 400) -> None:
        spec = backend.spec
        self.backend, self.reqs, self.tokens, self.uniform = backend, reqs, tokens, uniform
        pool = random_batch(
            [1], [1], num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads, head_size=spec.head_size,
            block_size=spec.block_size, spare_blocks=blocks, poison=False,
        )  # fmt: skip
        self.caches = [pool.key_cache, pool.value_cache]
        self.scale = pool.scale
        self.seen = self.caches
        if spec.kv_cache_layout == "HND":
            self.seen = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in self.caches]
        self.query = torch.zeros(tokens, spec.num_heads, spec.head_size)
        self.output, self.lse = torch.zeros_like(self.query), torch.zeros(tokens, spec.num_heads)
        self.table = torch.zeros(reqs, spec.max_model_len // spec.block_size, dtype=torch.int32)
        spread = [1] * (reqs - 1) + [tokens - reqs + 1]
        metadata = self.metadata(spread, spread)
        backend.prepare(metadata)
        self.wrapper = metadata.scratch["flashinfer"].wrapper
        backend.forward(
            self.query, *self.seen, self.output, dataclasses.replace(metadata), scale=self.scale,
            sliding_window=spec.sliding_window,
        )  # fmt: skip

    def metadata(self, query_lens: list[int], kv_lens: list[int]) -> object:
        pad = self.reqs - len(query_lens)
        batch = PagedBatch(self.query[: sum(query_lens)], *self.caches, query_lens, kv_lens, [[]] * len(kv_lens), 1.0)
        metadata = batch.metadata(pad_reqs=pad, pad_tokens=self.tokens - sum(query_lens))
        metadata.block_table, metadata.for_graph = self.table, True
        metadata.max_query_len = 1 if self.uniform else self.tokens
        metadata.max_seq_len = self.backend.spec.max_model_len
        return metadata

    def replay(self, query_lens: list[int], kv_lens: list[int], rng: random.Random) -> None:
        page, n = self.backend.spec.block_size, sum(query_lens)
        self.query[:n], self.query[n:] = torch.randn_like(self.query[:n]), float("nan")
        self.output.fill_(float("nan"))
        ids = rng.sample(range(1, len(self.caches[0])), sum(-(-k // page) for k in kv_lens))
        tables = [[ids.pop() for _ in range(-(-k // page))] for k in kv_lens]
        self.table.zero_()
        for row, table in enumerate(tables):
            self.table[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
        self.backend.prepare(self.metadata(query_lens, kv_lens))
        self.wrapper.replay()
        batch = PagedBatch(self.query[:n], *self.caches, query_lens, kv_lens, tables, self.scale)
        window = self.backend.spec.sliding_window
        assert_attention_close(batch, self.output[:n], what=f"{query_lens} {kv_lens}", window=window)


def compositions(rng: random.Random, reqs: int, tokens: int, uniform: bool) -> tuple[list[int], list[int]]:
    """A batch that fits a shape, from one request with everything to many with one token each."""
    if uniform:
        lens = [1] * rng.randint(1, reqs)
    else:
        cuts = sorted(rng.sample(range(1, tokens + 1), rng.randint(1, min(reqs, tokens))))
        lens = [b - a for a, b in zip([0, *cuts], cuts, strict=False)]
    return lens, [n + rng.choice([0, rng.randint(0, 200)]) for n in lens]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("reqs", "tokens", "uniform"), [(1, 1, True), (6, 6, True), (6, 6, False), (4, 40, False)])
def test_a_new_plan_reaches_a_captured_step(library: str, reqs: int, tokens: int, uniform: bool, layout: str) -> None:
    spec = AttentionSpec(6, 2, 64, "float32", 8, kv_cache_layout=layout, max_model_len=256, max_num_seqs=8)
    backend, rng = OnCPU(spec, CPU), random.Random(tokens)
    graph = Graph(backend, reqs, tokens, uniform)
    for _ in range(6):
        graph.replay(*compositions(rng, reqs, tokens, uniform), rng)
    graph.replay([tokens] if not uniform else [1], [tokens if not uniform else 200], rng)
    graph.replay([1, 1][:reqs], [0, 5][:reqs], rng)


def test_graphs_of_several_shapes_and_eager_steps_take_turns(library: str) -> None:
    spec = AttentionSpec(8, 2, 64, "float32", 16, sliding_window=30, max_model_len=256, max_num_seqs=8)
    backend, rng = OnCPU(spec, CPU), random.Random(3)
    shapes = [(8, 32, False), (8, 8, True), (4, 4, True), (4, 8, False)]
    graphs = [Graph(backend, *shape) for shape in shapes]
    assert len({id(g.wrapper) for g in graphs}) == 4
    for turn in range(12):
        graph = graphs[turn % 4]
        graph.replay(*compositions(rng, graph.reqs, graph.tokens, graph.uniform), rng)
        batch = random_batch(*lengths(rng, 3), num_heads=8, num_kv_heads=2, head_size=64, seed=turn)
        assert_attention_close(batch, attend(backend, batch), window=30)


def test_a_uniform_and_a_mixed_graph_of_one_shape_share_what_they_bake_in(library: str) -> None:
    backend, rng = (
        OnCPU(AttentionSpec(4, 2, 64, "float32", 16, max_model_len=128, max_num_seqs=4), CPU),
        random.Random(0),
    )
    decode, mixed = Graph(backend, 4, 4, True), Graph(backend, 4, 4, False)
    assert decode.wrapper is mixed.wrapper
    mixed.replay([3, 1], [3, 20], rng)


def test_the_first_plan_has_the_most_rows(library: str) -> None:
    """A capture with a short batch must not narrow what a replay may bring."""
    backend = OnCPU(AttentionSpec(4, 2, 64, "float32", 16, max_model_len=128, max_num_seqs=4), CPU)
    short = random_batch([2], [2], num_heads=4, num_kv_heads=2, head_size=64).metadata(pad_reqs=3, pad_tokens=14)
    short.for_graph = True
    backend.prepare(short)
    assert short.scratch["flashinfer"].wrapper.max_rows == 16


@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64), (71, 1, 64), (8, 1, 256), (64, 64, 128), (16, 2, 256)])
def test_the_workspaces_hold_every_plan_of_a_shape(library: str, heads: tuple[int, int, int]) -> None:
    """The stand-in allocates as FlashInfer's planner does, and refuses what does not fit."""
    spec = AttentionSpec(*heads, "float32", 16, max_model_len=4096, max_num_seqs=64)
    backend, rng = OnCPU(spec, CPU), random.Random(1)
    for reqs, tokens in ((1, 1), (64, 64), (64, 512), (13, 256), (1, 512)):
        planned = backend._for_graph(reqs, tokens)
        before = list(planned.wrapper._plan_info)
        for _ in range(4):
            query_lens, _ = compositions(rng, reqs, tokens, reqs == tokens)
            starts = np.zeros(reqs + 1, dtype=np.int32)
            starts[1:] = np.cumsum([*query_lens, *[0] * (reqs - len(query_lens))])
            lens = np.zeros(reqs, dtype=np.int32)
            lens[: len(query_lens)] = [rng.randint(n, 4096) for n in query_lens]
            backend._plan_layout(planned, page_layout(starts, lens, 16, False), backend._indices)
            assert planned.wrapper._plan_info == before
    for rows, reqs in ((40, 64), (600, 1), (70, 2), (1, 3)):  # eager: many tiles, and few that are split
        starts = np.arange(reqs + 1, dtype=np.int32) * rows
        layout = page_layout(starts, np.full(reqs, 4096, np.int32), 16)
        backend._plan_layout(backend._eager, layout, backend._indices)


# --- the list of pages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_pages_are_gathered_in_order_by_the_kernel_and_by_torch(seed: int) -> None:
    rng = random.Random(seed)
    page, reqs = rng.choice([8, 16, 24]), rng.randint(1, 7)
    lens = torch.tensor([rng.choice([0, 1, page, page + 1, rng.randint(1, 3000)]) for _ in range(reqs)])
    table = torch.randint(1, 1 << 20, (reqs, 500), dtype=torch.int32)[:, :400]  # rows wider than the table
    counts = [-(-n // page) for n in lens.tolist()]
    wanted = [p for row, n in zip(table.tolist(), counts, strict=True) for p in row[:n]]
    for gather in ("triton", "torch"):
        indices = torch.full((sum(counts) + 9,), -7, dtype=torch.int32)
        if gather == "torch":
            pages.gather_pages_torch(table, lens.int(), indices, page, sum(counts))
        else:
            pages.gather_pages_triton(table, lens.int(), indices, page, max(1, *counts, 1), 16)
        assert indices.tolist() == wanted + [-7] * 9, gather


# --- describing ------------------------------------------------------------------------------------------------------


def test_the_plan_is_described(library: str) -> None:
    batch = random_batch([1, 1], [400, 90], num_heads=8, num_kv_heads=2, head_size=64)
    backend, metadata = make(batch), batch.metadata()
    (unplanned,) = backend.describe(metadata)
    assert "planned on the host each step" in unplanned.note and "pages of 16" in unplanned.note
    backend.prepare(metadata)
    first, merge = backend.describe(metadata)
    assert first.grid == (5, 1, 2) and first.num_splits == 3 and "Merge" in merge.kernel
    chunk = random_batch([40], [40], num_heads=8, num_kv_heads=2, head_size=64)
    metadata = chunk.metadata()
    backend.prepare(metadata)
    (only,) = backend.describe(metadata)
    assert only.grid == (2, 1, 2) and only.num_splits == 1 and "128 query rows" in only.note
    metadata.for_graph = True
    backend.prepare(metadata)
    first, _ = backend.describe(metadata)
    assert first.grid == (132, 1, 2) and "replay" in first.note


def test_the_bare_call_is_planned_once_and_survives_other_steps(library: str) -> None:
    batch = random_batch([1, 6], [50, 20], num_heads=4, num_kv_heads=2, head_size=64)
    backend, output = make(batch), torch.empty_like(batch.query)
    call = backend.bare_call(batch.query, batch.key_cache, batch.value_cache, output, batch.metadata(), batch.scale)
    other = random_batch([3], [30], num_heads=4, num_kv_heads=2, head_size=64, seed=1)
    attend(backend, other)
    assert call is not None
    call(), call()
    assert_attention_close(batch, output)


def test_a_platform_is_all_the_rules_need() -> None:
    assert FlashInferBackend.why_not(SPEC, Platform("cuda", (9, 0))) == []


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_suites_cases_and_its_proof_of_the_tier(library: str, layout: str) -> None:
    """Graphs made in inference mode and prepared outside it are among what it tries."""
    contender = Contender("FLASHINFER over a stand-in", "FAKE", backend=OnCPU)
    case = Case((4, 2, 64), "float32", 16, window=7, layout=layout, fused=True, lse=layout == "HND")
    assert check_case(contender, case, CPU, PARITY).kind == "ran"
    assert prove_tier(contender, case, CPU, PARITY).kind == "ran"
