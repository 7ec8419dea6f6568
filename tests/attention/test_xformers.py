"""XFORMERS without the library: a stand-in checks what it is called with and computes it, so the adapter is tested."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import itertools
import math
import random
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from labkit.attention import registry
from labkit.attention.interface import AttentionCGSupport, AttentionSpec, Availability, Platform
from labkit.attention.selector import select
from labkit.attention.xformers import XFormersBackend
from labkit.errors import BackendError
from tests.reference import PagedBatch, assert_attention_close, dense_attention, random_batch

CUDA = Platform("cuda", (9, 0))
HALF = AttentionSpec(8, 2, 64, "float16", 256)
BIAS = "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask"
INSTALLED = importlib.util.find_spec("xformers") is not None


@dataclasses.dataclass
class Bias:
    q_seqlen: list[int]
    kv_seqlen: list[int]
    block_tables: torch.Tensor
    page_size: int

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Any, kv_seqlen: Any, block_tables: torch.Tensor, page_size: int, *, device: Any = None
    ) -> Bias:
        assert type(q_seqlen) is list and type(kv_seqlen) is list, "xFormers takes lists of ints, no tensors"
        assert all(type(n) is int for n in (*q_seqlen, *kv_seqlen))
        assert len(q_seqlen) == len(kv_seqlen) == len(block_tables) > 0
        assert max(kv_seqlen) <= block_tables.shape[1] * page_size
        assert block_tables.dtype == torch.int32 and block_tables.is_contiguous() and device == block_tables.device
        return cls(q_seqlen, kv_seqlen, block_tables, page_size)


@dataclasses.dataclass
class Inputs:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_bias: Any = None
    p: float = 0.0
    scale: float | None = None


def operator(name: str, reasons: list[str]) -> type:
    return type("FwOp", (), {"NAME": name, "not_supported_reasons": classmethod(lambda cls, inputs: list(reasons))})


class Library:
    """The parts of xformers 0.0.35 that the adapter touches."""

    def __init__(self) -> None:
        self.flash3_reasons: list[str] = ["operator wasn't built"]
        self.flash_reasons: list[str] = []
        self.load_error: Exception | None = None
        self.ops_used: list[str] = []

    def modules(self) -> dict[str, types.ModuleType]:
        names = ("xformers", "xformers._cpp_lib", "xformers.ops", "xformers.ops.fmha")
        made = {name: types.ModuleType(name) for name in names}
        top, lib, ops, fmha = (vars(made[name]) for name in names)
        top.update(__version__="0.0.35", _cpp_lib=made[names[1]], ops=made[names[2]], __path__=[])
        lib.update(_cpp_library_load_exception=self.load_error)
        ops.update(fmha=made[names[3]], __path__=[])
        fmha.update(
            attn_bias=types.SimpleNamespace(**{BIAS: Bias}),
            Inputs=Inputs,
            flash3=types.SimpleNamespace(FwOp=operator("fa3F@2.8", self.flash3_reasons)),
            flash=types.SimpleNamespace(FwOp=operator("fa2F@2.8.3", self.flash_reasons)),
            memory_efficient_attention_forward=lambda *a, **k: self.attend(*a, **k)[0],
            memory_efficient_attention_forward_requires_grad=self.attend,
        )
        return made

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_bias: Any = None, p: float = 0.0,
        scale: float | None = None, *, op: Any = None, output_dtype: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        one, rows, kv_heads, group, size = query.shape
        assert one == 1 and rows == sum(attn_bias.q_seqlen) and op is not None
        assert key.shape == value.shape == (1, key.shape[1], kv_heads, group, size), "no broadcasting: expand"
        assert group == 1 or key.stride(3) == value.stride(3) == 0, "a head of a group is no copy"
        assert key.shape[1] % attn_bias.page_size == 0 and query.dtype == key.dtype == value.dtype
        self.ops_used.append(op.NAME)
        page = attn_bias.page_size
        pages = [x[0, :, :, 0].unflatten(0, (-1, page)) for x in (key, value)]
        starts = [0, *itertools.accumulate(attn_bias.q_seqlen)]
        tables = [t[: -(-n // page)].tolist() for t, n in zip(attn_bias.block_tables, attn_bias.kv_seqlen, strict=True)]
        batch = PagedBatch(
            query[0].flatten(1, 2), *pages, attn_bias.q_seqlen, attn_bias.kv_seqlen, tables, scale or size**-0.5
        )
        out, lse = dense_attention(batch)
        for n, length, start in zip(attn_bias.q_seqlen, attn_bias.kv_seqlen, starts, strict=False):
            blind = max(0, n - length)
            out[start : start + blind], lse[start : start + blind] = math.nan, math.inf
        return (
            out.unflatten(1, (kv_heads, group))[None].to(query.dtype),
            lse.float().transpose(0, 1).unflatten(0, (kv_heads, group))[None],
        )


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    yield install(monkeypatch, Library())


def install(monkeypatch: pytest.MonkeyPatch, library: Library) -> Library:
    for name in [n for n in sys.modules if n.split(".")[0] == "xformers"]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in library.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return library


def make(batch: PagedBatch, monkeypatch: pytest.MonkeyPatch) -> XFormersBackend:
    """An instance for tensors on a CPU: what refuses a CPU is the table, which is tested by itself."""
    monkeypatch.setattr(XFormersBackend, "why_not", classmethod(lambda cls, *args: []))
    heads, size = batch.query.shape[1:]
    dtype = str(batch.query.dtype).removeprefix("torch.")
    spec = AttentionSpec(heads, batch.key_cache.shape[2], size, dtype, batch.key_cache.shape[1])
    return XFormersBackend(spec, torch.device("cpu"))


def attend(backend: XFormersBackend, batch: PagedBatch, pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    metadata = batch.metadata(pad_reqs=pad, pad_tokens=pad)
    query = torch.cat([batch.query, torch.full((pad, *batch.query.shape[1:]), math.nan, dtype=batch.query.dtype)])
    output, lse = torch.full_like(query, math.nan), torch.full(query.shape[:2], math.nan)
    plain = output.clone()
    backend.prepare(metadata)
    caches = (batch.key_cache, batch.value_cache)
    backend.forward(query, *caches, output, metadata, scale=batch.scale, lse=lse)
    backend.forward(query, *caches, plain, metadata, scale=batch.scale)
    assert plain[: batch.num_tokens].equal(output[: batch.num_tokens])
    return output[: batch.num_tokens], lse[: batch.num_tokens]


@pytest.mark.parametrize("seed", range(8))
def test_mixed_batches(library: Library, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    heads, kv_heads = rng.choice([(9, 3), (4, 4), (28, 4), (5, 1)])
    query = [rng.choice([0, 1, 1, rng.randint(2, 20)]) for _ in range(rng.randint(1, 5))] + [1]
    kv = [q + rng.choice([0, rng.randint(0, 60)]) for q in query]
    batch = random_batch(query, kv, num_heads=heads, num_kv_heads=kv_heads, head_size=32, seed=seed)
    output, lse = attend(make(batch, monkeypatch), batch, pad=rng.choice([0, 3]))
    assert_attention_close(batch, output)
    torch.testing.assert_close(lse.double(), dense_attention(batch)[1], atol=1e-4, rtol=0)
    assert library.ops_used == ["fa2F@2.8.3"] * 2, "the first one that takes it"


def test_c08_c09_blind_rows_are_exactly_zero_whatever_the_library_leaves_there(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = random_batch([5, 1, 0, 3], [2, 4, 0, 0], num_heads=4, num_kv_heads=2, head_size=32)
    output, lse = attend(make(batch, monkeypatch), batch)
    blind = [0, 1, 2, 6, 7, 8]
    assert (output[blind] == 0).all() and torch.isneginf(lse[blind]).all()
    assert_attention_close(batch, output)
    nothing = random_batch([0], [0], num_heads=4, num_kv_heads=2, head_size=32)
    assert attend(make(nothing, monkeypatch), nothing)[0].shape == (0, 4, 32)


def test_c14_a_strided_query_is_taken_and_a_cache_that_needs_a_copy_is_refused(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = random_batch([1, 7], [33, 20], num_heads=6, num_kv_heads=2, head_size=32)
    fused = torch.cat([batch.query, torch.zeros(8, 4, 32)], 1)
    backend = make(batch, monkeypatch)
    assert_attention_close(batch, attend(backend, dataclasses.replace(batch, query=fused[:, :6]))[0])
    both = torch.stack([batch.key_cache, batch.value_cache], 1)
    with pytest.raises(BackendError, match="strides"):
        attend(backend, dataclasses.replace(batch, key_cache=both[:, 0], value_cache=both[:, 1]))


def test_features_without_a_paged_bias_are_refused_twice(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    for change in ({"sliding_window": 8}, {"logits_soft_cap": 30.0}, {"has_sinks": True}):
        assert len(XFormersBackend.why_not(dataclasses.replace(HALF, **change), CUDA)) == 1
    batch = random_batch([1], [9], num_heads=4, num_kv_heads=2, head_size=32)
    backend, metadata = make(batch, monkeypatch), batch.metadata()
    arguments = (batch.query, batch.key_cache, batch.value_cache, torch.empty_like(batch.query), metadata)
    for feature in ({"sliding_window": 8}, {"logits_soft_cap": 30.0}, {"sinks": torch.zeros(4)}):
        with pytest.raises(BackendError, match="no window, soft-cap or sinks"):
            backend.forward(*arguments, scale=1.0, **feature)
    metadata.for_graph = True
    with pytest.raises(BackendError, match="cannot change under a graph"):
        backend.prepare(metadata)


def test_no_operator_takes_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    library = install(monkeypatch, Library())
    batch = random_batch([1], [9], num_heads=4, num_kv_heads=2, head_size=32)
    backend = make(batch, monkeypatch)
    library.flash_reasons[:] = ["query.shape[-1] % 8 != 0"]
    install(monkeypatch, library)
    with pytest.raises(BackendError, match=r"fa3F@2.8: operator wasn't built; fa2F@2.8.3: query.shape\[-1\] % 8 != 0"):
        attend(backend, batch)


# --- rules and reasons ---------------------------------------------------------------------------------------------


def test_never_in_a_graph_and_never_picked_by_itself(library: Library) -> None:
    tier, why = XFormersBackend.graph_support(HALF, CUDA)
    assert tier is AttentionCGSupport.NEVER and "on the host" in why
    assert XFormersBackend.capabilities.explicit_only
    assert XFormersBackend.availability() == Availability(True, "", "0.0.35")
    assert not XFormersBackend.why_not(HALF, CUDA)
    assert select(HALF, CUDA, "xformers").selected == "XFORMERS"
    assert select(HALF, CUDA).selected != "XFORMERS"


@pytest.mark.parametrize(
    ("change", "platform", "word"),
    [
        ({"dtype": "float32"}, CUDA, "float32"),
        ({"block_size": 16}, CUDA, "block_size to 256"),
        ({"head_size": 300}, CUDA, "head size 300"),
        ({"kv_cache_layout": "HND"}, CUDA, "kv_cache_layout to NHD"),
        ({"num_heads": 6, "num_kv_heads": 4}, CUDA, "6 query heads"),
        ({}, Platform("cuda", (7, 5)), "sm_80"),
        ({}, Platform("cpu"), "only a CPU"),
    ],
)
def test_what_the_table_refuses(change: dict[str, Any], platform: Platform, word: str) -> None:
    (reason,) = XFormersBackend.why_not(dataclasses.replace(HALF, **change), platform)
    assert word in str(reason)


def test_operators_that_do_not_load_are_refused_with_the_librarys_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()

    class xFormersInvalidLibException(Exception):
        pass

    library.load_error = xFormersInvalidLibException("xFormers was built for:\n    PyTorch 2.10.0 with CUDA 12.8\n")
    install(monkeypatch, library)
    status = XFormersBackend.availability()
    assert not status.usable and status.version == "0.0.35"
    assert status.reason == "xFormersInvalidLibException: xFormers was built for: PyTorch 2.10.0 with CUDA 12.8"
    with pytest.raises(BackendError, match="PyTorch 2.10.0 with CUDA 12.8"):
        select(HALF, CUDA, "XFORMERS", {name: status for name in registry.BACKENDS})
    library.load_error, library.flash_reasons = None, ["attn_bias type is Paged"]
    install(monkeypatch, library)
    reason = XFormersBackend.availability().reason
    assert reason == "fa3F@2.8: operator wasn't built; fa2F@2.8.3: attn_bias type is Paged"


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'xformers'", name="xformers"),
        ModuleNotFoundError(
            "No module named 'flash_attn.flash_attn_interface'", name="flash_attn.flash_attn_interface"
        ),
        ImportError("xformers/_C.so: undefined symbol: _ZN3c10"),
        OSError("libcudart.so.12: cannot open shared object file"),
        RuntimeError("operator xformers::x does not exist"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_c26_the_real_exception_is_shown(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    class Broken:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name == "xformers":
                raise error

    for name in [n for n in sys.modules if n.split(".")[0] == "xformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    status = XFormersBackend.availability()
    assert not status.usable and status.reason == f"{type(error).__name__}: {error}"
    selection = select(HALF, CUDA, None, {"XFORMERS": status})
    assert str(error) in str(selection.candidate("XFORMERS").reasons[0]) and selection.selected


@pytest.mark.skipif(not INSTALLED, reason="xformers is not installed")
def test_the_librarys_own_bias_has_the_signature_that_is_called() -> None:
    from xformers.ops.fmha import attn_bias

    call = getattr(attn_bias, BIAS).from_seqlens
    assert list(inspect.signature(call).parameters) == list(inspect.signature(Bias.from_seqlens).parameters)
