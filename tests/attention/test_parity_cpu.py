"""The parity suite's own logic, on a CPU: a few small cases of the backends that run here, and planted bugs caught."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from labkit.attention.interface import AttentionBackend, AttentionCGSupport, AttentionSpec, Availability, Platform
from labkit.attention.metadata import AttentionMetadata
from labkit.attention.sdpa import TorchSDPABackend
from tests import parity
from tests.kernels.conftest import interpreter  # noqa: F401
from tests.parity import (
    BASE,
    CASES,
    CONTENDERS,
    FEATURES,
    PAGES,
    SMALL,
    Case,
    Contender,
    check_bare_call,
    check_case,
    check_large_scores,
    check_orders,
    left_out,
    prove_tier,
    summary,
)

CPU = torch.device("cpu")
PLAIN = Case((4, 2, 32), "float32", 16, fused=True)
HERE = {
    "TORCH_SDPA": (
        PLAIN,
        Case((3, 1, 80), "float16", 8, window=7, layout="HND", interleaved=True),
        Case((2, 2, 32), "bfloat16", 48, scale=0.3, lse=False),
    ),
    "FLEX_ATTENTION": (
        PLAIN,
        Case((6, 2, 40), "float16", 16, window=7, sinks=True, layout="HND"),
        Case((3, 1, 32), "float32", 32, soft_cap=30.0, interleaved=True),
    ),
    "TRITON_ATTN": (
        Case((3, 1, 32), "float32", 16, window=7, soft_cap=30.0, sinks=True, layout="HND", interleaved=True),
        Case((4, 2, 80), "float16", 48, num_splits=2, fused=True),
    ),
}
TINY = dataclasses.replace(SMALL, requests=2, longest=64)


def contender(name: str) -> Contender:
    return next(c for c in CONTENDERS if c.label == name)


def fake(cls: type[AttentionBackend]) -> Contender:
    return Contender(cls.__name__, "FAKE", backend=cls)


@pytest.mark.parametrize(("name", "case"), [(n, c) for n, cases in HERE.items() for c in cases], ids=str)
def test_right_on_every_kind_of_batch(name: str, case: Case, request: pytest.FixtureRequest) -> None:
    if name == "TRITON_ATTN":
        request.getfixturevalue("interpreter")
    assert check_case(contender(name), case, CPU, TINY).kind == "ran"


@pytest.mark.parametrize("name", list(HERE))
def test_the_declared_tier_is_proven(name: str, request: pytest.FixtureRequest) -> None:
    if name == "TRITON_ATTN":
        request.getfixturevalue("interpreter")
    case = Case((2, 1, 32), "float32", 16, lse=False)
    assert prove_tier(contender(name), case, CPU, dataclasses.replace(TINY, longest=40)).kind == "ran"


@pytest.mark.parametrize("name", ["TORCH_SDPA", "FLEX_ATTENTION"])
def test_c15_c18_large_scores_and_any_order(name: str) -> None:
    assert check_orders(contender(name), PLAIN, CPU, SMALL).kind == "ran"
    assert check_large_scores(contender(name), Case((2, 1, 128), page=16), CPU, SMALL).kind == "ran"
    assert check_bare_call(contender(name), PLAIN, CPU, SMALL).kind == "ran"


def test_the_cases_cover_what_is_asked_for() -> None:
    """Head sizes × ratios, each feature, and C23's page sizes; each fixed list with all head sizes it can."""
    assert {(c.heads[2], c.heads[0] // c.heads[1]) for c in parity.GRID} == {
        (size, ratio) for size in (32, 64, 80, 96, 112, 128, 192, 256) for ratio in (1, 2, 3, 5, 7, 8, 16, 71)
    }
    assert {c.page for c in PAGES} >= {1, 8, 16, 24, 32, 48, 64, 256, 768}
    for field in ("window", "soft_cap", "sinks", "scale", "num_splits"):
        assert any(getattr(c, field) for c in FEATURES), field
    assert {(c.layout, c.interleaved) for c in CASES} == {(x, y) for x in ("NHD", "HND") for y in (False, True)}
    for label, lacking in (("FLASH_ATTN FA4", set()), ("TRITON_ATTN batch_invariant", set())):
        mine = contender(label)
        assert {c.heads[2] for c in mine.cases} | lacking == set(parity.HEAD_SIZES), label
        assert {c.heads[0] // c.heads[1] for c in mine.cases} >= set(parity.RATIOS), label
    modules = {parity.flashinfer_module(c) for c in contender("FLASHINFER").cases}
    assert modules >= set(parity.FLASHINFER_MODULES), "a module is compiled and not run"


def test_refused_absent_and_left_out_are_told_and_counted() -> None:
    sdpa, triton, fa3 = contender("TORCH_SDPA"), contender("TRITON_ATTN"), contender("FLASH_ATTN FA3")
    refused = check_case(sdpa, Case((4, 2, 32), "float32", 16, num_splits=3), CPU, SMALL)
    assert refused.kind == "refused" and "number of splits" in refused.reasons[0]
    assert check_case(triton, dataclasses.replace(BASE, page=1), CPU, SMALL).kind == "refused"
    assert check_case(fa3, BASE, CPU, SMALL).kind == "absent"
    some = dataclasses.replace(contender("FLEX_ATTENTION"), cases=CASES[:-13])
    outcomes = left_out(some, CPU, SMALL)
    assert len(outcomes) == 13 and {o.kind for o in outcomes} == {"refused", "not compiled"}
    records = [("A", "refused", ("no sinks",)), ("A", "refused", ("no sinks", "no window")), ("A", "ran", ())]
    records += [("B", "absent", ("ModuleNotFoundError: b",)), ("A", "not compiled", ("one",))]
    lines = summary(records)
    assert lines == [
        "not here", "  B", "    ModuleNotFoundError: b", "refused at selection", "  A", "    2 × no sinks",
        "    1 × no window", "not compiled, each being a compilation of its own", f"  A: 1 of {len(CASES)} cases: one",
    ]  # fmt: skip


# --- planted bugs ----------------------------------------------------------------------------------------------------


class Claims(TorchSDPABackend):
    """Takes what TORCH_SDPA takes, on this machine."""

    tier = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    @classmethod
    def graph_support(
        cls, spec: AttentionSpec, platform: Platform, available: Availability | None = None
    ) -> tuple[AttentionCGSupport, str]:
        return cls.tier, "so it says"


class BakesLengths(Claims):
    """Claims ALWAYS; its path for chunks reads lengths on the host while it is captured."""

    tier = AttentionCGSupport.ALWAYS


class Rebinds(Claims):
    """Lengths are on the device, but `prepare` makes a new tensor of them each time; a graph keeps the first."""

    def prepare(self, metadata: AttentionMetadata) -> None:
        metadata.scratch["lengths"] = metadata.seq_lens.clone()

    def forward(self, query: Any, key: Any, value: Any, output: Any, metadata: AttentionMetadata, **more: Any) -> None:
        metadata = dataclasses.replace(metadata, seq_lens=metadata.scratch["lengths"])
        super().forward(query, key, value, output, metadata, **more)


class OnlyInInferenceMode(Claims):
    """Its lengths stay in one buffer, which is made when a graph is captured and cannot be written to elsewhere."""

    def prepare(self, metadata: AttentionMetadata) -> None:
        kept = self.__dict__.setdefault("kept", {})
        if not metadata.for_graph:
            metadata.scratch["lengths"] = metadata.seq_lens
            return
        lengths = kept.setdefault(metadata.num_reqs, torch.zeros_like(metadata.seq_lens))
        lengths.copy_(metadata.seq_lens)
        metadata.scratch["lengths"] = lengths

    forward = Rebinds.forward


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (BakesLengths, "claims ALWAYS (so it says) and replays wrongly"),
        (Rebinds, "claims UNIFORM_SINGLE_TOKEN_DECODE (so it says) and replays wrongly"),
        (OnlyInInferenceMode, "[Ii]nference"),
    ],
)
def test_a_claim_above_what_replays_is_caught(cls: type[AttentionBackend], words: str) -> None:
    with pytest.raises((AssertionError, RuntimeError), match=words.replace("(", r"\(").replace(")", r"\)")):
        prove_tier(fake(cls), PLAIN, CPU, TINY)


def test_the_same_backend_with_an_honest_claim_passes() -> None:
    assert prove_tier(fake(Claims), PLAIN, CPU, TINY).kind == "ran"


class IgnoresSoftCap(TorchSDPABackend):
    """Declares soft-capping and computes without."""

    capabilities = dataclasses.replace(TorchSDPABackend.capabilities, logits_soft_cap=True)

    def forward(self, *args: Any, logits_soft_cap: float | None = None, **more: Any) -> None:
        super().forward(*args, **more)


class WindowOffByOne(TorchSDPABackend):
    def forward(self, *args: Any, sliding_window: int | None = None, **more: Any) -> None:
        super().forward(*args, sliding_window=sliding_window and sliding_window + 1, **more)


class ReadsTheTail(TorchSDPABackend):
    """Treats the last page of a decode as full."""

    def forward(self, query: Any, key: Any, value: Any, output: Any, metadata: AttentionMetadata, **more: Any) -> None:
        page = self.spec.block_size
        lens = -(-metadata.seq_lens // page) * page
        super().forward(query, key, value, output, dataclasses.replace(metadata, seq_lens=lens), **more)


class LeavesBlindRows(TorchSDPABackend):
    """Rows that see nothing keep what was there."""

    def forward(self, query: Any, key: Any, value: Any, output: Any, metadata: AttentionMetadata, **more: Any) -> None:
        super().forward(query, key, value, output, metadata, **more)
        starts, lens = metadata.query_start_loc_cpu, metadata.seq_lens_cpu
        for row in range(metadata.num_reqs):
            blind = max(0, int(starts[row + 1] - starts[row] - lens[row]))
            output[starts[row] : starts[row] + blind] = 1e-6


class Log2(TorchSDPABackend):
    def forward(self, *args: Any, lse: torch.Tensor | None = None, **more: Any) -> None:
        super().forward(*args, lse=lse, **more)
        if lse is not None:
            lse /= math.log(2)


class SortsRequests(TorchSDPABackend):
    """Takes the requests for decodes first, whatever order they come in."""

    def forward(self, query: Any, key: Any, value: Any, output: Any, metadata: AttentionMetadata, **more: Any) -> None:
        counts = metadata.query_start_loc_cpu[1:] - metadata.query_start_loc_cpu[:-1]
        order = counts.argsort(kind="stable").tolist()
        swapped = dataclasses.replace(metadata, block_table=metadata.block_table[order])
        super().forward(query, key, value, output, swapped, **more)


class FailsWhenCalled(TorchSDPABackend):
    """Accepts a layout at selection that it cannot read."""

    def forward(self, *args: Any, **more: Any) -> None:
        raise NotImplementedError("no such kernel")


WRONG = [
    (IgnoresSoftCap, dataclasses.replace(PLAIN, soft_cap=30.0), "above the allowed"),
    (WindowOffByOne, dataclasses.replace(PLAIN, window=7), "above the allowed"),
    (ReadsTheTail, PLAIN, "not finite"),
    (LeavesBlindRows, PLAIN, "is not 0"),
    (Log2, PLAIN, "LSE"),
    (SortsRequests, PLAIN, "above the allowed|not finite"),
    (FailsWhenCalled, PLAIN, "no such kernel"),
]


@pytest.mark.parametrize(("cls", "case", "words"), WRONG, ids=lambda v: getattr(v, "__name__", ""))
def test_a_wrong_answer_is_caught(cls: type[AttentionBackend], case: Case, words: str) -> None:
    with pytest.raises((AssertionError, NotImplementedError), match=words):
        check_case(fake(cls), case, CPU, SMALL)


def test_a_batch_that_cannot_show_a_feature_is_no_test_of_it() -> None:
    with pytest.raises(AssertionError, match="no batch shows {'window'}"):
        check_case(fake(TorchSDPABackend), dataclasses.replace(PLAIN, window=5000), CPU, SMALL)
