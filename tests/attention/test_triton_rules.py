"""TRITON_ATTN's rules without a GPU or Triton: which tile, how many splits, what is refused and why."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import sys

import pytest

from labkit.attention import registry
from labkit.attention.interface import AttentionCGSupport, AttentionSpec, Platform
from labkit.attention.kernels.tiles import (
    MAX_SPLITS,
    SHARED_MEMORY,
    Tile,
    choose_num_splits,
    choose_tile,
    query_tiles,
    refine_tile,
    scratch_rows,
    shared_memory_limit,
)
from labkit.attention.triton_attn import TritonAttentionBackend

SPEC = AttentionSpec(num_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16", block_size=16)


def reasons(spec: AttentionSpec, gpu: str) -> str:
    platform = registry.platform_for_gpu(gpu)
    return " | ".join(map(str, TritonAttentionBackend.why_not(spec, platform)))


@pytest.mark.parametrize("itemsize", [2, 4], ids=["fp16", "fp32"])
@pytest.mark.parametrize("head_size", [32, 64, 80, 128, 256, 512])
@pytest.mark.parametrize("capability", [*SHARED_MEMORY, None], ids=str)
def test_c24_a_tile_fits_the_card_or_there_is_none(
    capability: tuple[int, int] | None, head_size: int, itemsize: int
) -> None:
    for limit in (65_536, shared_memory_limit(capability)):
        for rows in (1, 16, 17, 10_000):
            tile = choose_tile(head_size, itemsize, rows, limit, capability)
            if tile is None:
                assert head_size == 512, "every head size that the table of capabilities promises has a tile"
            else:
                assert tile.shared_bytes(head_size, itemsize, capability) <= limit
                assert tile.block_m >= 16 and tile.block_n >= 16, "a tensor core takes no less"


def test_decodes_take_the_smallest_tile_and_prefills_a_larger_one() -> None:
    limit = shared_memory_limit((9, 0))
    assert choose_tile(128, 2, 4, limit, (9, 0)) == Tile(16, 64, 4, 3)
    assert choose_tile(128, 2, 2048, limit, (9, 0)) == Tile(64, 64, 4, 3)
    assert choose_tile(128, 2, 2048, 65_536, (7, 5)) == Tile(16, 16, 4, 1)


def test_the_tile_of_a_batch_is_refined_only_where_it_was_measured() -> None:
    decode, chunk = Tile(16, 64, 4, 3), Tile(64, 64, 4, 3)
    narrow = dataclasses.replace(decode, block_n=32)
    table = [
        (decode, 128, 512, (9, 0), narrow),  # 3.9 programs for each of 132 SMs: two waves of three, one of six
        (decode, 128, 256, (9, 0), decode),
        (decode, 128, 1024, (9, 0), decode),
        (decode, 64, 512, (9, 0), decode),
        (decode, 128, 512, (8, 0), decode),
        (chunk, 128, 512, (9, 0), chunk),
    ]
    for tile, head_size, programs, capability, expected in table:
        assert refine_tile(tile, head_size, programs, 132, capability) == expected


@pytest.mark.parametrize("seed", range(3))
def test_the_grid_has_a_tile_for_every_row_of_any_batch(seed: int) -> None:
    """The begin of request i, start // block_q + i, leaves room before request i + 1, for every split of the tokens."""
    import random

    rng = random.Random(seed)
    for _ in range(300):
        group, lens = rng.choice([1, 3, 4, 7, 16, 71]), [rng.randint(0, 40) for _ in range(rng.randint(1, 9))]
        tile = Tile(rng.choice([16, 64]), 64, 4, 2)
        block_q = tile.block_m // min(group, tile.block_m)
        tiles, head_tiles = query_tiles(tile, group, sum(lens), len(lens), max(lens))
        assert head_tiles * min(group, tile.block_m) >= group
        if max(lens) <= 1:
            assert tiles == len(lens)
            continue
        starts = list(itertools.accumulate(lens, initial=0))
        begins = [start // block_q + i for i, start in enumerate(starts)]
        for i, n in enumerate(lens):
            assert begins[i] + -(-n // block_q) <= begins[i + 1]
        assert begins[-2] + -(-lens[-1] // block_q) <= tiles


@pytest.mark.parametrize(
    ("programs", "max_seq_len", "requested", "splits"),
    [
        (3, 512, 0, 8),  # SmolLM2, batch 1: one tile of 64 keys each
        (3, 8192, 0, 64),  # as many as one merge takes
        (8, 16_384, 0, 33),  # 8 programs on 132 SMs
        (256, 1024, 0, 1),  # batch 32 × 8 KV heads fill the chip
        (1024, 131_072, 0, 1),
        (256, 1024, 4, 4),  # the user's word
        (256, 64, 4, 1),  # but no split without a tile of its own
        (0, 64, 0, 1),
    ],
)
def test_number_of_splits_on_an_h200(programs: int, max_seq_len: int, requested: int, splits: int) -> None:
    assert choose_num_splits(programs, 132, max_seq_len, 64, requested) == splits


def test_splits_never_exceed_the_scratch_nor_two_programs_per_sm() -> None:
    for programs, length, sms in itertools.product((1, 3, 24, 130, 263, 500), (1, 100, 4096, 131_072), (1, 16, 132)):
        splits = choose_num_splits(programs, sms, length, 64)
        assert 1 <= splits <= MAX_SPLITS and (splits == 1 or splits * programs <= 2 * sms)
        assert choose_num_splits(programs, sms, length, 64, 0, 5) <= 5


@pytest.mark.parametrize("heads", [(9, 3), (32, 8), (71, 1), (16, 16)], ids=str)
@pytest.mark.parametrize("requested", [0, 4])
def test_the_scratch_holds_every_decode_batch(heads: tuple[int, int], requested: int) -> None:
    num_heads, kv_heads = heads
    rows = scratch_rows(num_heads, kv_heads, 132, 64, requested)
    for batch in range(1, 65):
        programs = batch * kv_heads * -(-(num_heads // kv_heads) // 16)
        splits = choose_num_splits(programs, 132, 131_072, 64, requested)
        assert batch * num_heads * splits <= rows


@pytest.mark.parametrize(
    ("gpu", "changes", "words"),
    [
        ("T4", {"dtype": "float16"}, ""),
        ("T4", {"dtype": "float32", "head_size": 256}, ""),
        ("T4", {}, "sm_75 has no bfloat16"),
        ("A100", {}, ""),
        ("RTX 5090", {"head_size": 256}, ""),
        ("H200", {"head_size": 192, "sliding_window": 128, "logits_soft_cap": 30.0, "has_sinks": True}, ""),
        ("H200", {"head_size": 512}, "head size 512 is not supported"),
        ("H200", {"head_size": 60}, "head size 60 is not supported"),
        ("H200", {"block_size": 8}, "pages of 8 tokens are not supported"),
        ("H200", {"block_size": 24}, "multiples of 16"),
        ("H200", {"block_size": 768}, ""),
        ("H200", {"num_heads": 6, "num_kv_heads": 4}, "no multiple of 4 KV heads"),
        ("H200", {"family": "MLA"}, "MHA"),
        ("H200", {"kv_cache_dtype": "fp8"}, "fp8"),
        ("cpu", {}, "bfloat16 arithmetic is wrong"),
    ],
    ids=str,
)
def test_what_it_serves_and_why_not(gpu: str, changes: dict[str, object], words: str) -> None:
    found = reasons(dataclasses.replace(SPEC, **changes), gpu)  # type: ignore[arg-type]
    assert words in found if words else found == ""


def test_an_old_card_is_refused_by_its_number() -> None:
    found = TritonAttentionBackend.why_not(SPEC, Platform("cuda", (7, 0)))
    assert any("sm_75 or newer" in str(r) for r in found)


def test_every_batch_may_be_captured() -> None:
    tier, why = TritonAttentionBackend.graph_support(SPEC, Platform("cuda", (9, 0)))
    assert tier is AttentionCGSupport.ALWAYS and why


def test_availability_says_when_triton_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = TritonAttentionBackend.availability()
    assert not found.usable and found.reason == "ModuleNotFoundError: No module named 'triton'"


def test_c26_availability_keeps_the_real_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken install is not a missing one: type and text of what it raised."""
    import builtins

    original = builtins.__import__

    def broken(name: str, *args: object, **kwargs: object) -> object:
        if name == "triton":
            raise OSError("libtriton.so: undefined symbol: cuGetProcAddress")
        return original(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr(builtins, "__import__", broken)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = TritonAttentionBackend.availability()
    assert not found.usable and found.reason == "OSError: libtriton.so: undefined symbol: cuGetProcAddress"


@pytest.mark.parametrize("loaded", [False, True])
def test_the_interpreter_is_asked_for_only_before_triton_is_loaded(loaded: bool, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Afterwards the variable would say yes and the kernels would still be compiled ones."""
    import os

    from labkit.llm import find_backends

    monkeypatch.setenv("TRITON_INTERPRET", "")
    monkeypatch.delenv("TRITON_INTERPRET")
    if loaded:
        monkeypatch.setitem(sys.modules, "triton", sys.modules.get("triton", object()))
    else:
        monkeypatch.delitem(sys.modules, "triton", raising=False)
    find_backends(Platform("cpu"), "TRITON_ATTN")
    assert ("TRITON_INTERPRET" in os.environ) is not loaded
    find_backends(Platform("cpu"), None)
