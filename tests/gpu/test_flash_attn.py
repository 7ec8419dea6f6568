"""FLASH_ATTN's versions on the GPU, beyond what every backend must do: who provides them, and what is compiled when.

tests/gpu/test_parity.py compares each with float64 and proves its tier. A version is skipped if no library is there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from labkit.attention.flash_attn import FlashAttentionBackend
from labkit.attention.flash_attn_providers import FlashAttnProvider, find_providers
from labkit.attention.interface import AttentionSpec, Platform
from labkit.errors import BackendError
from tests.parity import CONTENDERS, EIGHT, LARGE, Case, attend, draw, judge, needs_finite_tails, spec_of

CUDA = torch.device("cuda")
PLATFORM = Platform("cuda", torch.cuda.get_device_capability() if torch.cuda.is_available() else None)


@pytest.fixture(params=[3, 4, 2], ids=["FA3", "FA4", "FA2"])
def version(request: pytest.FixtureRequest) -> int:
    """A version that a library here serves. One that is installed and fails its probe is a failure, not a skip."""
    provider(request.param)
    return request.param


def provider(version: int) -> FlashAttnProvider:
    mine = [p for p in find_providers() if p.version == version]
    usable = [p for p in mine if p.usable]
    if usable:
        return usable[0]
    why = "; ".join(f"{p.provider}: {p.reason}" for p in mine)
    missing = ("No module named 'flash_attn", "reads no pages", "has no kernels for")
    if all(any(words in p.reason for words in missing) for p in mine):
        pytest.skip(f"FA{version} is not installed for this GPU: {why}")
    pytest.fail(f"FA{version} is installed and not usable: {why}")


@pytest.mark.parametrize(
    ("asked", "changes", "words"),
    [
        (2, {"block_size": 16}, "FA2; set block_size to 256"),
        (3, {"block_size": 24}, "pages of 24"),
        (3, {"num_splits": 300}, "256 splits"),
        (4, {"num_splits": 2}, "splits"),
        (4, {"head_size": 72, "block_size": 16}, "set block_size to 128"),
        (3, {"dtype": "float32"}, "float32"),
        (None, {"head_size": 264}, "head size 264"),
        (None, {"num_heads": 6, "num_kv_heads": 4}, "no multiple"),
        (None, {"kv_cache_dtype": "fp8_e4m3"}, "fp8"),
        (None, {"family": "MLA"}, "MLA"),
    ],
    ids=str,
)
def test_each_refusal_is_one(asked: int | None, changes: dict[str, Any], words: str) -> None:
    if asked is not None:
        provider(asked)
    values = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16", "block_size": 16, **changes}
    with pytest.raises(BackendError, match=words):
        FlashAttentionBackend(AttentionSpec(**values, flash_attn_version=asked), CUDA)


def test_every_provider_is_usable_or_says_why_and_auto_takes_the_first() -> None:
    found = find_providers()
    assert {p.version for p in found} == {2, 3, 4} and all(p.usable != bool(p.reason) for p in found)
    assert find_providers() is found, "probed once"
    available = FlashAttentionBackend.availability()
    if not available.usable:
        pytest.skip(available.reason)
    values = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16", "block_size": 256}
    backend = FlashAttentionBackend(AttentionSpec(**values), CUDA)
    order = {9: (3, 4, 2), 10: (4, 2)}.get(PLATFORM.capability[0] if PLATFORM.capability else 0, (2,))
    usable = {p.version for p in found if p.usable}
    assert backend.version == next(v for v in order if v in usable)


def test_warm_up_leaves_nothing_to_compile(version: int) -> None:
    contender, case = next(c for c in CONTENDERS if c.options == (("flash_attn_version", version),)), Case(EIGHT)
    backend, said = FlashAttentionBackend(spec_of(contender, case, CUDA, LARGE), CUDA), []
    backend.warm_up(lambda *what: said.append(what))
    assert bool(said) == (version == 4)
    finite = needs_finite_tails(contender, backend.spec, CUDA)
    batch = draw(case, backend.spec, [1, 1], [40, 20], CUDA, 0, finite)
    judge(case, batch, *attend(backend, case, batch), f"FA{version}")
