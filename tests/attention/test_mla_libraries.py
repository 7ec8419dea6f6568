"""FLASHMLA, FLASHINFER_MLA and FLASH_ATTN_MLA over stand-ins of their libraries: what each is handed, and when.

A stand-in takes the library's arguments, checks what the library requires of them, and attends in float32. What the
real kernels make of the same arguments is for tests/gpu/test_mla.py.
"""

from __future__ import annotations

import math
import sys
import types
from typing import Any

import pytest
import torch

from labkit.attention import registry
from labkit.attention.interface import AttentionBackend, AttentionCGSupport, AttentionSpec, Availability, Platform
from labkit.attention.mla import flash_attn_mla, flashmla
from labkit.attention.mla.flash_attn_mla import FlashAttentionMLABackend
from labkit.attention.mla.flashinfer_mla import FlashInferMLABackend
from labkit.attention.mla.flashmla import FlashMLABackend
from labkit.attention.selector import select
from labkit.errors import BackendError
from tests.mla_parity import Sizes, check, prove_tier
from tests.parity import Extent

CPU = torch.device("cpu")
SMALL = Extent(requests=3, chunk=9, past=90, longest=200)
SIZES = Sizes(heads=2, dtype="bfloat16", page=64)


def dense(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[queries, heads, width]` over `[keys, width]`, bottom-right; natural LSE `[queries, heads]`."""
    scores = torch.einsum("qhd,kd->qhk", q.float(), keys.float()) * scale
    if causal:
        n, length = len(q), len(keys)
        future = torch.arange(length) > torch.arange(length - n, length)[:, None]
        scores = scores.masked_fill(future[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp()
    return torch.einsum("qhk,kd->qhd", weights, values.float()).to(q.dtype), lse


class FakeFlashMLA:
    """`flash_mla` 1.0.0: a rectangle of queries, one schedule for one set of lengths."""

    def get_mla_metadata(self) -> tuple[Any, None]:
        return types.SimpleNamespace(tile_scheduler_metadata=None, num_splits=None), None

    def get_mla_decoding_metadata(
        self, lens: torch.Tensor, rows: int, kv_heads: int, heads: int, use_legacy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert use_legacy and kv_heads == 1 and rows % heads == 0 and lens.dtype == torch.int32 and (lens > 0).all()
        return lens.clone(), torch.zeros(len(lens) + 1, dtype=torch.int32)

    def flash_mla_with_kvcache(
        self, q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lens: torch.Tensor, head_dim_v: int,
        schedule: Any, *, softmax_scale: float, causal: bool, use_legacy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        assert use_legacy and head_dim_v == 512 and cache.shape[1:] == (64, 1, 576) and cache.is_contiguous()
        assert q.dim() == 4 and len(q) == len(lens) == len(table) and lens.is_contiguous()
        assert torch.equal(schedule.tile_scheduler_metadata, lens), "a schedule of other lengths"
        out, lse = q.new_empty((*q.shape[:3], 512)), torch.empty((len(q), q.shape[2], q.shape[1]))
        for row, length in enumerate(lens.tolist()):
            keys = cache[table[row, : -(-length // 64)].long()].flatten(0, 2)[:length]
            out[row], found = dense(q[row], keys, keys[:, :512], softmax_scale, causal)
            lse[row] = found.t()
        return out, lse


class FakeWrapper:
    """FlashInfer's wrapper: what the kernel knows of a batch is what the last plan left."""

    def __init__(self, workspace: torch.Tensor, use_cuda_graph: bool = False, backend: str = "auto", **buffers: Any):
        self.fixed, self.buffers, self._sm_scale = use_cuda_graph, buffers, 0.0
        self.mean: float | None = None

    def plan(
        self, starts: torch.Tensor, pages: torch.Tensor, indices: torch.Tensor, lens: torch.Tensor, heads: int,
        rank: int, rope: int, page: int, causal: bool, scale: float, *dtypes: torch.dtype,
    ) -> None:  # fmt: skip
        assert causal and {t.dtype for t in (starts, pages, indices, lens)} == {torch.int32}
        assert (starts[1:] >= starts[:-1]).all() and (pages[1:] - pages[:-1] == (lens + page - 1) // page).all()
        mean = float(starts[-1]) * heads / len(lens)
        if self.fixed:
            assert len(lens) == len(self.buffers["kv_len_arr"])
            assert self.mean in (None, mean), "a captured grid follows from the mean"
        self.mean, self.batch = mean, (starts.clone(), pages.clone(), lens.clone(), page)
        self.indices = indices

    def run(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor, ckv: torch.Tensor, kpe: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor | None = None, return_lse: bool = False, return_lse_base_on_e: bool = False,
    ) -> None:  # fmt: skip
        starts, pages, lens, page = self.batch
        assert q_nope.shape[2] == ckv.shape[2] == 512 and q_pe.shape[2] == kpe.shape[2] == 64
        assert (lse is not None) == return_lse == return_lse_base_on_e and out.shape == q_nope.shape
        q, cache = torch.cat((q_nope, q_pe), -1), torch.cat((ckv, kpe), -1)
        for row, length in enumerate(lens.tolist()):
            rows = slice(int(starts[row]), int(starts[row + 1]))
            mine = self.indices[int(pages[row]) : int(pages[row + 1])].long()
            keys = cache[mine].flatten(0, 1)[:length]
            out[rows], found = dense(q[rows], keys, keys[:, :512], self._sm_scale, True)
            if lse is not None:
                lse[rows] = found


class FakeFlashAttn3:
    """`flash_attn_interface` with kernels for qv."""

    def get_scheduler_metadata(self, reqs: int, longest: int, keys: int, heads: int, kv_heads: int, size: int,
                               lens: torch.Tensor, **options: Any) -> torch.Tensor:  # fmt: skip
        assert (kv_heads, size, options["headdim_v"]) == (1, 64, 512)
        return lens.clone()

    def flash_attn_with_kvcache(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, qv: torch.Tensor, cache_seqlens: torch.Tensor,
        page_table: torch.Tensor, cu_seqlens_q: torch.Tensor, max_seqlen_q: int, softmax_scale: float, causal: bool,
        scheduler_metadata: torch.Tensor, num_splits: int, return_softmax_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        assert q.shape[2] == k.shape[3] == 64 and qv.shape[2] == v.shape[3] == 512 and causal and return_softmax_lse
        assert torch.equal(scheduler_metadata, cache_seqlens), "a schedule of other lengths"
        out, lse = torch.zeros_like(qv), torch.full(qv.shape[:2], -math.inf)
        for row, length in enumerate(cache_seqlens.tolist()):
            rows = slice(int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1]))
            assert rows.stop - rows.start <= max_seqlen_q
            pages = page_table[row, : -(-length // k.shape[1])].long()
            keys = torch.cat((v, k), -1)[pages].flatten(0, 2)[:length]
            out[rows], lse[rows] = dense(torch.cat((qv, q), -1)[rows], keys, keys[:, :512], softmax_scale, True)
        return out, lse.t()


@pytest.fixture(params=["FLASHMLA", "FLASHINFER_MLA", "FLASH_ATTN_MLA"])
def cls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[AttentionBackend]:
    """A backend whose library is a stand-in, and which does not mind the CPU."""
    flashinfer = types.ModuleType("flashinfer")
    flashinfer.mla = types.ModuleType("flashinfer.mla")  # type: ignore[attr-defined]
    flashinfer.mla.BatchMLAPagedAttentionWrapper = FakeWrapper  # type: ignore[attr-defined]
    for name, module in {
        "flash_mla": FakeFlashMLA(), "flashinfer": flashinfer, "flashinfer.mla": flashinfer.mla,  # type: ignore[attr-defined]
        "flash_attn_interface": FakeFlashAttn3(),
    }.items():  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    found = registry.load(request.param)
    monkeypatch.setattr(found, "availability", classmethod(lambda cls: Availability(True)))
    monkeypatch.setattr(found, "why_not", classmethod(lambda cls, *_: []))
    return found


def test_it_is_handed_what_it_needs(cls: type[AttentionBackend]) -> None:
    backend = cls(SIZES.spec(SMALL), CPU)
    backend.warm_up(None)
    check(backend, SIZES, SMALL, CPU, finite=True)


def test_it_replays_what_it_claims(cls: type[AttentionBackend]) -> None:
    backend = cls(SIZES.spec(SMALL), CPU)
    assert prove_tier(backend, SIZES, SMALL, CPU) is AttentionCGSupport.UNIFORM_BATCH


ORDERS = {
    (7, 5): ["TORCH_SDPA_MLA", "TRITON_MLA"],
    (8, 0): ["FLASH_ATTN_MLA", "FLASHMLA", "FLASHINFER_MLA", "TRITON_MLA", "TORCH_SDPA_MLA"],
    (9, 0): ["FLASH_ATTN_MLA", "FLASHMLA", "FLASHINFER_MLA", "TRITON_MLA", "TORCH_SDPA_MLA"],
    (10, 0): ["FLASHINFER_MLA", "FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA", "TORCH_SDPA_MLA"],
    (12, 0): ["TRITON_MLA", "TORCH_SDPA_MLA"],
}
PICKED = {(7, 5): "TORCH_SDPA_MLA", (8, 0): "TRITON_MLA", (9, 0): "FLASH_ATTN_MLA", (10, 0): "FLASHINFER_MLA"}
SPEC = AttentionSpec(16, 1, 576, "float16", 64, family="MLA", head_size_v=512)


@pytest.mark.parametrize("capability", ORDERS)
def test_the_order_is_the_architectures(capability: tuple[int, int]) -> None:
    platform = Platform("cuda", capability)
    assert registry.priority(platform, "MLA") == ORDERS[capability]
    found = select(SPEC, platform)
    assert found.selected == PICKED.get(capability, "TRITON_MLA")
    assert {c.name for c in found.candidates} == set(registry.MLA_BACKENDS), "the MHA family is not listed"


def test_flashmla_wants_pages_of_64_and_says_so() -> None:
    hopper = Platform("cuda", (9, 0))
    small = AttentionSpec(16, 1, 576, "float16", 16, family="MLA", head_size_v=512)
    with pytest.raises(BackendError, match="pages of 16 tokens are not supported; set block_size to 64"):
        select(small, hopper, "FLASHMLA")
    assert select(small, hopper, "FLASHMLA", block_size_is_set=False).mine.block_size == 64
    other = AttentionSpec(16, 1, 320, "float16", 64, family="MLA", head_size_v=256)
    with pytest.raises(BackendError, match="head size 320 is not supported"):
        select(other, hopper, "FLASHMLA")


def test_a_build_without_kernels_for_qv_is_never_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would run another kernel on the same memory. tokenspeed-fa3 is such a build."""
    config = types.ModuleType("flash_attn_config")
    monkeypatch.setitem(sys.modules, "flash_attn_config", config)
    library = types.ModuleType("flash_attn_interface")
    library.__spec__ = types.SimpleNamespace(name="flash_attn_interface")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", library)
    for flags, words in (
        ({"FLASH_ATTENTION_DISABLE_HDIMDIFF64": True}, "FLASH_ATTENTION_DISABLE_HDIMDIFF64 is set"),
        ({}, "has no kernels for qv"),
    ):
        config.CONFIG = {"build_flags": flags}  # type: ignore[attr-defined]
        flash_attn_mla._availability.cache_clear()
        found = FlashAttentionMLABackend.availability()
        assert not found.usable and words in found.reason
    config.CONFIG = {"build_flags": {"FLASH_ATTENTION_DISABLE_HDIMDIFF64": False}}  # type: ignore[attr-defined]
    flash_attn_mla._availability.cache_clear()
    assert FlashAttentionMLABackend.availability().usable
    flash_attn_mla._availability.cache_clear()


def test_the_reason_names_the_command_that_installs_it() -> None:
    flashmla._availability.cache_clear()
    found = FlashMLABackend.availability()
    assert found.usable or "make flashmla" in found.reason or "Error" in found.reason


def test_flashinfers_mla_is_for_hopper_and_data_centre_blackwell() -> None:
    for capability, served in (((9, 0), True), ((10, 0), True), ((8, 0), False), ((12, 0), False)):
        assert (FlashInferMLABackend.why_not(SPEC, Platform("cuda", capability)) == []) is served
