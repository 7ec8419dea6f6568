"""Every backend and version here against dense float64 attention; see tests/parity.py for the cases and the judgement.

With several processes (`-n 8`) under two and a half minutes on an H200 where FlashInfer's modules are built already:
`python -m tests.gpu.compile_flashinfer`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from labkit.errors import BackendError
from labkit.paging.cache_write import write_kv
from tests.parity import (
    BASE,
    CONTENDERS,
    FLEX_BASE,
    GRID,
    LARGE,
    PAGES,
    WIDE,
    Case,
    Contender,
    ask,
    attend,
    check_bare_call,
    check_case,
    check_large_scores,
    check_orders,
    draw,
    left_out,
    make_backend,
    prove_tier,
)

CUDA = torch.device("cuda")
Tell = Callable[..., None]


def every(cases: str) -> pytest.MarkDecorator:
    pairs = [(contender, case) for contender in CONTENDERS for case in getattr(contender, cases)]
    return pytest.mark.parametrize(("contender", "case"), pairs, ids=str)


def kinds_of(case: Case) -> tuple[str, ...]:
    """Which batches: every point of a grid is a kernel of its own, or several, so it gets fewer than a feature."""
    if case in GRID:
        return ("mixed", "rows that see nothing", *(["decodes"] if case.lse else []))
    return ("mixed", "decodes", "ends of pages") if case in PAGES else ()


def plain(contender: Contender) -> Case:
    """A case that the contender has compiled already."""
    return FLEX_BASE if contender.name == "FLEX_ATTENTION" else BASE


@every("cases")
def test_equals_dense_attention(contender: Contender, case: Case, tell: Tell) -> None:
    tell(contender, check_case(contender, case, CUDA, LARGE, kinds_of(case)))


@every("proofs")
def test_the_declared_tier_is_what_replays(contender: Contender, case: Case, tell: Tell) -> None:
    tell(contender, prove_tier(contender, case, CUDA, LARGE))


@pytest.mark.parametrize("contender", CONTENDERS, ids=str)
def test_c18_in_any_order(contender: Contender, tell: Tell) -> None:
    tell(contender, check_orders(contender, plain(contender), CUDA, LARGE))


@pytest.mark.parametrize("contender", CONTENDERS, ids=str)
def test_c15_large_scores(contender: Contender, tell: Tell) -> None:
    if contender.name == "FLEX_ATTENTION":
        case = Case((28, 4, 128), "float16", 48, layout="HND", fused=True)
    else:
        case = Case(WIDE, "float16", 256 if dict(contender.options).get("flash_attn_version") == 2 else 16)
    tell(contender, check_large_scores(contender, case, CUDA, LARGE))


@pytest.mark.parametrize("contender", CONTENDERS, ids=str)
def test_the_librarys_own_call(contender: Contender, tell: Tell) -> None:
    tell(contender, check_bare_call(contender, plain(contender), CUDA, LARGE))


@pytest.mark.parametrize("contender", CONTENDERS, ids=str)
def test_what_is_not_compiled_is_told(contender: Contender, tell: Tell) -> None:
    tell(contender, *left_out(contender, CUDA, LARGE))


# --- last in the file: an address computed in 32 bits would end the process's use of the GPU --------------------------


def beyond(low: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A cache of more than 2^31 elements with the pages of `low` at its end, and how far they moved."""
    blocks = (1 << 31) // low[0].numel() + 64
    high = torch.zeros((blocks, *low.shape[1:]), dtype=low.dtype, device=CUDA)
    shift = blocks - low.shape[0]
    high[shift:] = low
    return high, shift


@pytest.mark.parametrize("contender", CONTENDERS, ids=str)
def test_c16_pages_beyond_two_to_the_31_elements(contender: Contender, tell: Tell) -> None:
    case = dataclasses.replace(plain(contender), heads=WIDE, fused=False, lse=False)
    spec, outcome = ask(contender, case, CUDA, LARGE)
    if outcome is not None:
        tell(contender, outcome)
        return
    backend = make_backend(contender.cls, spec, CUDA)
    low = draw(case, spec, [1, 5], [40, 20], CUDA, 0, finite=True)
    (keys, shift), (values, _) = beyond(low.key_cache), beyond(low.value_cache)
    tables = [[block + shift for block in table] for table in low.tables]
    high = dataclasses.replace(low, key_cache=keys, value_cache=values, tables=tables)
    if contender.name == "FLEX_ATTENTION":  # its kernel's offsets have 32 bits, and it says so
        with pytest.raises(BackendError, match="offsets have 32 bits"):
            attend(backend, case, high)
        return
    assert torch.equal(attend(backend, case, high)[0], attend(backend, case, low)[0])


def test_c16_the_cache_write_reaches_them() -> None:
    page, heads, size = 16, 8, 128
    keys, shift = beyond(torch.zeros((64, page, heads, size), dtype=torch.bfloat16, device=CUDA))
    values = torch.zeros_like(keys)
    key: Any = torch.randn((2, heads, size), dtype=torch.bfloat16, device=CUDA)
    write_kv(key, -key, keys, values, torch.tensor([(shift + 63) * page + 3, -1], device=CUDA))
    assert torch.equal(keys[-1, 3], key[0]) and torch.equal(values[-1, 3], -key[0])
    assert int(keys.count_nonzero()) == int(key[0].count_nonzero()), "the padding was written, too"
