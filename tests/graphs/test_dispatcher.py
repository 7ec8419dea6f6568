"""Which graph a batch runs in, as a table over modes and batches."""

from __future__ import annotations

import pytest

from labkit.config import CUDAGraphMode as Mode
from labkit.graphs.dispatcher import GraphDispatcher, decode_sizes
from labkit.graphs.sizes import default_capture_sizes

SIZES = [1, 2, 4, 8, 12, 16, 24]


def run(mode: str, n: int, uniform: bool) -> tuple[str, int]:
    out = GraphDispatcher(Mode[mode], SIZES, max_num_seqs=12).dispatch(n, n if uniform else 1, uniform)
    return out.mode.name, out.size


@pytest.mark.parametrize(
    ("mode", "decode", "mixed"),
    [
        ("NONE", "NONE", "NONE"),
        ("PIECEWISE", "PIECEWISE", "PIECEWISE"),
        ("FULL", "FULL", "FULL"),
        ("FULL_DECODE_ONLY", "FULL", "NONE"),
        ("FULL_AND_PIECEWISE", "FULL", "PIECEWISE"),
    ],
)
def test_every_mode_times_every_batch(mode: str, decode: str, mixed: str) -> None:
    padded = {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 8: 8, 9: 12, 12: 12}
    for n in range(1, 13):
        size = next(padded[k] for k in sorted(padded) if k >= n)
        assert run(mode, n, True) == (decode, size if decode != "NONE" else n)
        assert run(mode, n, False) == (mixed, size if mixed != "NONE" else n)
    assert run(mode, 13, False) == (mixed, 16 if mixed != "NONE" else 13)
    assert run(mode, 25, False) == ("NONE", 25), "above the largest size a step runs eagerly and unpadded"


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 12, 13, 50, 256])
def test_c27_every_decode_batch_has_a_graph(max_num_seqs: int) -> None:
    dispatcher = GraphDispatcher(Mode.FULL_DECODE_ONLY, default_capture_sizes(max_num_seqs, 8192), max_num_seqs)
    for n in range(1, max_num_seqs + 1):
        out = dispatcher.dispatch(n, n, True)
        assert out.mode is Mode.FULL and n <= out.size == out.num_reqs
    assert sum(dispatcher.hits.values()) == max_num_seqs


def test_c27_a_list_without_the_limit_uses_the_next_size() -> None:
    assert decode_sizes([1, 2, 4, 8], 12) == [1, 2, 4, 8]
    assert decode_sizes([1, 8, 16, 32], 12) == [1, 8, 16]
    assert decode_sizes([16, 32], 12) == [16]
    assert decode_sizes([1, 3, 6, 8], 3, query_len=3) == [3, 6]


def test_a_mixed_batch_never_takes_a_decode_graph() -> None:
    dispatcher = GraphDispatcher(Mode.FULL_DECODE_ONLY, SIZES, 12)
    assert dispatcher.dispatch(4, 4, is_uniform_decode=False).mode is Mode.NONE
    assert dispatcher.dispatch(4, 4, is_uniform_decode=True).mode is Mode.FULL
    assert dispatcher.hits == {("NONE", 4): 1, ("FULL", 4): 1}


def test_capture_order_is_piecewise_first_and_largest_first() -> None:
    keys = GraphDispatcher(Mode.FULL_AND_PIECEWISE, SIZES, 12).capture_order()
    assert [k.mode for k in keys] == ["PIECEWISE"] * 7 + ["FULL"] * 5
    for mode in ("PIECEWISE", "FULL"):
        sizes = [k.size for k in keys if k.mode == mode]
        assert sizes == sorted(sizes, reverse=True)


def test_a_mixed_graph_holds_no_more_requests_than_the_buffers() -> None:
    keys = {k.size: k for k in GraphDispatcher(Mode.FULL, SIZES, 12).capture_order()}
    assert (keys[8].num_reqs, keys[24].num_reqs, keys[24].uniform) == (8, 12, False)
