"""Which graph a batch runs in, as a table over modes and batches."""

from __future__ import annotations

import pytest

from labkit.config import CUDAGraphMode as Mode
from labkit.graphs.dispatcher import GraphDispatcher, Miss, decode_sizes
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


# Sizes 1, 2, 4, 8, 12 for up to 4 requests: the mode and the number of tokens that batches of 1, 2, … 13 tokens run in.
# F is FULL, P is PIECEWISE, - is eager. Decode graphs end at 4, the first size that holds the widest batch.
C29_SIZES = [1, 2, 4, 8, 12]
EAGER = "-1 -2 -3 -4 -5 -6 -7 -8 -9 -10 -11 -12 -13"
FULL = "F1 F2 F4 F4 F8 F8 F8 F8 F12 F12 F12 F12 -13"
CUT = "P1 P2 P4 P4 P8 P8 P8 P8 P12 P12 P12 P12 -13"
C29 = {
    "NONE": (EAGER, EAGER),
    "PIECEWISE": (CUT, CUT),
    "FULL": (FULL, FULL),
    "FULL_DECODE_ONLY": ("F1 F2 F4 F4 -5 -6 -7 -8 -9 -10 -11 -12 -13", EAGER),
    "FULL_AND_PIECEWISE": ("F1 F2 F4 F4 P8 P8 P8 P8 P12 P12 P12 P12 -13", CUT),
}


@pytest.mark.parametrize("uniform", [True, False], ids=["decode", "mixed"])
@pytest.mark.parametrize("mode", C29)
def test_c29_every_batch_runs_where_the_table_says(mode: str, uniform: bool) -> None:
    dispatcher = GraphDispatcher(Mode[mode], C29_SIZES, max_num_seqs=4)
    captured = dispatcher.capture_order()
    expected = C29[mode][0 if uniform else 1].split()
    letters = {"FULL": "F", "PIECEWISE": "P", "NONE": "-"}
    for n, cell in enumerate(expected, 1):
        out = dispatcher.dispatch(n, n if uniform else 1, uniform)
        assert f"{letters[out.mode.name]}{out.size}" == cell
        assert (out.key is None) == (out.mode is Mode.NONE) and (out.key is None or out.key in captured)
        assert out.key is None or (out.key.mode, out.key.size) == (out.mode.name, out.size)
    names = {letter: name for name, letter in letters.items()}
    for cell in set(expected):
        assert dispatcher.hits[names[cell[0]], int(cell[1:])] == expected.count(cell)
    assert sum(dispatcher.hits.values()) == len(expected) == C29_SIZES[-1] + 1


def test_c29_a_decode_batch_without_a_decode_graph_takes_a_mixed_one() -> None:
    """Three tokens per request: of sizes 3, 6 and 16 only two are multiples, and 9 tokens fit neither of them."""
    both = GraphDispatcher(Mode.FULL_AND_PIECEWISE, [3, 6, 16], max_num_seqs=4, query_len=3)
    found = [both.dispatch(3 * n, n, True) for n in (1, 2, 3, 4, 6)]
    assert [(d.mode.name, d.size) for d in found] == [
        ("FULL", 3), ("FULL", 6), ("PIECEWISE", 16), ("PIECEWISE", 16), ("NONE", 18),
    ]  # fmt: skip
    assert both.misses == {Miss.ABOVE_LARGEST: 1}
    only = GraphDispatcher(Mode.FULL_DECODE_ONLY, [3, 6, 16], max_num_seqs=4, query_len=3)
    assert only.dispatch(9, 3, True).mode is Mode.NONE and only.misses == {Miss.ABOVE_LARGEST: 1}


def test_misses_are_told_apart() -> None:
    def misses(mode: str, *batches: tuple[int, bool]) -> dict[Miss, int]:
        dispatcher = GraphDispatcher(Mode[mode], C29_SIZES, max_num_seqs=4)
        for n, uniform in batches:
            dispatcher.dispatch(n, n if uniform else 1, uniform)
        return dict(dispatcher.misses)

    batches = ((1, True), (4, True), (5, True), (1, False), (12, False), (13, False))
    assert misses("FULL_DECODE_ONLY", *batches) == {Miss.ABOVE_LARGEST: 1, Miss.NO_GRAPH: 3}
    for mode in ("FULL", "PIECEWISE", "FULL_AND_PIECEWISE"):
        assert misses(mode, *batches) == {Miss.ABOVE_LARGEST: 1}
    assert misses("NONE", *batches) == {}, "nothing was promised"
    no_multiple = GraphDispatcher(Mode.FULL_DECODE_ONLY, [4, 8], max_num_seqs=4, query_len=3)
    no_multiple.dispatch(3, 1, True)
    assert no_multiple.misses == {Miss.NO_GRAPH: 1}


def test_c29_a_pass_without_a_cut_has_no_pieces() -> None:
    """PIECEWISE over one piece would freeze attention inside: it is refused before a dispatcher is made."""
    from labkit.attention.interface import AttentionCGSupport as Tier
    from labkit.graphs.modes import resolve

    assert resolve(Mode.PIECEWISE, Tier.ALWAYS, compiled=True, split=False)[0] is Mode.NONE
    assert resolve(Mode.FULL_AND_PIECEWISE, Tier.ALWAYS, compiled=True, split=False)[0] is Mode.FULL
