"""TORCH_SDPA_MLA and, in the interpreter, TRITON_MLA against dense float64; tests/gpu/test_mla.py does more."""

from __future__ import annotations

import pytest
import torch

from labkit.attention.interface import AttentionCGSupport, AttentionSpec, Availability, Platform
from labkit.attention.mla.flashmla import one_by_one
from labkit.attention.mla.sdpa import TorchSDPAMLABackend
from labkit.attention.mla.triton_mla import TritonMLABackend
from labkit.launch import interpreting
from tests.mla_parity import Sizes, attend, batches, check, judge, prove_tier
from tests.parity import Extent

CPU = torch.device("cpu")
SMALL = Extent(requests=3, chunk=9, past=40, longest=96)
TINY = Sizes(heads=4, rank=64, rope=16, dtype="float32", page=16)


@pytest.mark.parametrize("sizes", [TINY, Sizes(heads=3, rank=40, rope=8, dtype="float32", page=5),
                                   Sizes(heads=2, rank=64, rope=16, dtype="bfloat16", page=16)], ids=str)  # fmt: skip
def test_torch_sdpa_mla_equals_dense_attention(sizes: Sizes) -> None:
    check(TorchSDPAMLABackend(sizes.spec(SMALL), CPU), sizes, SMALL, CPU)


def test_torch_sdpa_mla_replays_what_it_claims() -> None:
    backend = TorchSDPAMLABackend(TINY.spec(SMALL), CPU)
    assert prove_tier(backend, TINY, SMALL, CPU) is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


@pytest.fixture
def interpreter() -> None:
    if not interpreting():
        pytest.skip("Triton is not interpreted here")


@pytest.mark.parametrize(("sizes", "splits"), [
    (TINY, 0), (TINY, 3),
    (Sizes(heads=20, rank=48, rope=8, dtype="float32", page=32), 0),  # two head tiles; sizes that are padded
    (Sizes(heads=16, rank=64, rope=16, dtype="float16", page=16), 3),
], ids=str)  # fmt: skip
def test_triton_mla_equals_dense_attention(interpreter: None, sizes: Sizes, splits: int) -> None:
    extent = Extent(requests=1, chunk=4, past=30, longest=50)
    backend = TritonMLABackend(sizes.spec(extent, num_splits=splits, max_num_seqs=16), CPU)
    for buffer in (backend._part, backend._part_lse):
        buffer.fill_(float("nan"))
    check(backend, sizes, extent, CPU)


def test_triton_mla_replays_what_it_claims(interpreter: None) -> None:
    extent = Extent(requests=2, chunk=4, past=20, longest=40)
    backend = TritonMLABackend(TINY.spec(extent, num_splits=2, max_num_seqs=16), CPU)
    assert prove_tier(backend, TINY, extent, CPU) is AttentionCGSupport.ALWAYS


def test_a_batch_taken_token_by_token_sees_the_same() -> None:
    """How FLASHMLA takes what is no rectangle: every token a request, with the keys up to its own."""
    _, query_lens, kv_lens = batches(SMALL, TINY.page, seed=3)[0]
    batch = TINY.batch(query_lens, kv_lens, 0, CPU)
    lens, table = one_by_one(batch.metadata())
    whole, _ = attend(TorchSDPAMLABackend(TINY.spec(SMALL), CPU), batch)
    apart = type(batch)(
        batch.query, batch.key_cache, batch.value_cache, [1] * batch.num_tokens, lens.tolist(), table.tolist(),
        batch.scale,
    )  # fmt: skip
    judge(apart, whole, None, "token by token")


def test_a_backend_of_the_other_family_refuses_in_words() -> None:
    mha = AttentionSpec(8, 2, 64, "bfloat16", 16)
    for cls in (TorchSDPAMLABackend, TritonMLABackend):
        (reason,) = cls.why_not(mha, Platform("cuda", (9, 0)), Availability(True))
        assert reason.condition == "is for MLA attention, the model has MHA"
