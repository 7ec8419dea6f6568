"""Mistakes that people make in such kernels, planted one by one: a comparison that misses one proves nothing."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import types

import pytest
import torch

from labkit.attention import triton_attn
from labkit.attention.kernels import paged
from tests.kernels.harness import check
from tests.reference import random_batch

LIVE = "live = (keys >= first_key) & (keys < end_key)"
BUGS = {
    "top-left mask": ("row_pos = seq_len - query_len + row_query", "row_pos = row_query"),
    "tail one key short": (LIVE, LIVE.replace("< end_key", "< end_key - 1")),
    "tail one key long": (LIVE, LIVE.replace("< end_key", "<= end_key")),
    "repeat for repeat_interleave": (
        "row_head = kv_head * GROUP + row_group_head",
        "row_head = row_group_head * NUM_KV_HEADS + kv_head",
    ),
    "V of masked keys": (
        "v = tl.load(v_head_ptr + v_rows[:, None] + offs_d[None, :], mask=kv_mask, other=0.0)",
        "v = tl.load(v_head_ptr + v_rows[:, None] + offs_d[None, :])",
    ),
    "page of the tile before": (
        "page = tl.load(block_row_ptr + (keys + BLOCK_N) // PAGE",
        "page = tl.load(block_row_ptr + keys // PAGE",
    ),
    "no mask on the diagonal": ("// BLOCK_N * BLOCK_N))", "// BLOCK_N * BLOCK_N + BLOCK_N))"),
    "window one key too wide": ("> row_pos[:, None] - WINDOW", ">= row_pos[:, None] - WINDOW"),
    "soft cap dropped": ("if SOFT_CAP:", "if False:"),
    "sum not rescaled": ("total = total * alpha + tl.sum(p, 1)", "total = total + tl.sum(p, 1)"),
    "merge without weights": ("acc = acc * alpha + tl.sum(x * w[:, None], 0)", "acc = acc * alpha + tl.sum(x, 0)"),
    "scratch read where nobody wrote": ("live = lse > float(\"-inf\")", "live = start + offs_s < splits"),
}  # fmt: skip


def mutant(folder: pathlib.Path, old: str, new: str) -> types.ModuleType:
    """The module of the kernels with one line changed; Triton reads sources from files, so it is a file."""
    source = pathlib.Path(paged.__file__).read_text()
    assert source.count(old) == 1, f"{old!r} is in the source {source.count(old)} times"
    path = folder / "paged_mutant.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("paged_mutant", path)
    assert spec and spec.loader
    module = sys.modules["paged_mutant"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare() -> None:
    """A chunk, decodes and features small enough for the interpreter, with poison around every page."""
    for query, splits in (([3, 1], 0), ([1, 1], 3)):
        batch = random_batch(query, [37, 80], num_heads=4, num_kv_heads=2, head_size=32, seed=3)
        batch.query *= 3
        check(batch, splits=splits)
        check(batch, splits=splits, window=20, soft_cap=4.0)
    # A tile with a loop without masks in front of the diagonal: more than 16 rows, in half precision.
    check(random_batch([12], [150], num_heads=2, num_kv_heads=1, head_size=32, dtype=torch.float16, seed=3))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
def test_the_kernels_as_they_are_pass() -> None:
    compare()


@pytest.mark.usefixtures("interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_seen(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attn, "paged", mutant(tmp_path, *BUGS[name]))
    with pytest.raises(AssertionError):
        compare()


def test_the_reference_with_repeat_disagrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same mistake in the reference: tiling the heads instead of repeating each."""
    from tests.reference import dense_attention

    batch = random_batch([3], [20], num_heads=4, num_kv_heads=2, head_size=32)
    right = dense_attention(batch)[0]
    monkeypatch.setattr(torch.Tensor, "repeat_interleave", lambda t, n, dim: t.repeat(1, n, 1))
    assert (dense_attention(batch)[0] - right).abs().max() > 0.1
