"""batch_invariant: the bits of a request do not depend on its neighbours, on padding, nor on how its prompt was cut."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from labkit.attention.kernels.tiles import fixed_ranges
from labkit.attention.triton_attn import TritonAttentionBackend
from labkit.errors import BackendError
from tests.kernels.harness import check, make, run
from tests.reference import PagedBatch, random_batch

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning"),
]

F32, F16 = torch.float32, torch.float16
LENGTHS = (100, 33, 1, 40)
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 40},
    "everything": {"window": 70, "soft_cap": 3.0, "sinks": torch.tensor([-1.0, 2.0])},
}


def prompts(dtype: torch.dtype, lengths: tuple[int, ...] = LENGTHS) -> PagedBatch:
    """Requests whose every token is still to be run, over one cache that holds all their keys."""
    batch = random_batch(
        list(lengths), list(lengths), num_heads=2, num_kv_heads=1, head_size=32, dtype=dtype, seed=len(lengths)
    )
    batch.query *= 4
    return batch


def share(batch: PagedBatch, shares: list[tuple[int, int, int]]) -> PagedBatch:
    """One step: of each (request, start, n) the tokens start … start + n − 1."""
    starts = [sum(batch.query_lens[:i]) for i in range(len(batch.query_lens))]
    return dataclasses.replace(
        batch,
        query=torch.cat([batch.query[starts[r] + start : starts[r] + start + n] for r, start, n in shares]),
        query_lens=[n for _, _, n in shares],
        kv_lens=[start + n for _, start, n in shares],
        tables=[batch.tables[r] for r, _, _ in shares],
    )


def invariant(batch: PagedBatch, splits: int = 0, max_model_len: int = 128) -> TritonAttentionBackend:
    limits = {"max_num_batched_tokens": 512, "max_num_seqs": 8, "max_model_len": max_model_len}
    return make(batch, batch_invariant=True, num_splits=splits, **limits)


def alone(backend: TritonAttentionBackend, batch: PagedBatch, **features: Any) -> list[tuple[torch.Tensor, ...]]:
    """Output and LSE of every request's tokens, from a prefill of the whole prompt with nobody beside it."""
    whole = [(r, 0, n) for r, n in enumerate(batch.query_lens)]
    return [run(share(batch, [one]), backend=backend, pad=0, **features) for one in whole]


def same_bits(step: PagedBatch, shares: list[tuple[int, int, int]], got: Any, expected: Any) -> bool:
    output, lse = got
    pieces = zip(output.split(step.query_lens), lse.split(step.query_lens), shares, strict=True)
    return all(
        torch.equal(o, expected[r][0][start : start + n]) and torch.equal(e, expected[r][1][start : start + n])
        for o, e, (r, start, n) in pieces
    )


@pytest.mark.parametrize(
    ("dtype", "features", "splits"),
    [(F32, "plain", 0), (F32, "everything", 3), (F16, "plain", 3), (F16, "window", 0), (F16, "everything", 3)],
    ids=str,
)
def test_neighbours_chunks_and_padding_change_no_bit(dtype: torch.dtype, features: str, splits: int) -> None:
    """Decodes, one-token chunks and chunks of any length, among random others and padding."""
    rng = random.Random(repr((str(dtype), features, splits)))
    batch, extra = prompts(dtype), FEATURES[features]
    backend = invariant(batch, splits)
    expected = alone(backend, batch, **extra)
    for _ in range(3):
        shares = []
        for r in rng.sample(range(len(LENGTHS)), rng.randint(1, len(LENGTHS))):
            n = min(rng.choice([1, 1, 2, 17, 40]), LENGTHS[r])
            shares.append((r, rng.randint(0, LENGTHS[r] - n), n))
        step = share(batch, shares)
        got = run(step, backend=backend, pad=rng.choice([0, 3]), **extra)
        assert same_bits(step, shares, got, expected), shares
    assert len(backend._variants) == 1, "more than one compiled form"


def test_a_prompt_gives_the_same_bits_however_it_is_cut() -> None:
    """One cut lies so that a tile reaches into a third tile of keys: splits of what it sees would end elsewhere."""
    batch = prompts(F16, (150,))
    backend = invariant(batch, 2, max_model_len=256)
    expected = alone(backend, batch)
    for cuts in ((13, 97, 40), (149, 1)):
        start = 0
        for n in cuts:
            step = share(batch, [(0, start, n)])
            assert same_bits(step, [(0, start, n)], run(step, backend=backend, pad=0), expected), (cuts, start)
            start += n


def test_the_results_are_right() -> None:
    for splits in (0, 3):
        batch = share(prompts(F16), [(0, 80, 20), (1, 32, 1), (3, 5, 1), (2, 0, 1)])
        check(batch, backend=invariant(batch, splits))


def test_the_ordinary_mode_takes_another_tile_and_other_splits_for_another_batch() -> None:
    """Otherwise the tests above would show nothing: what is chosen depends on the batch, and the bits follow."""
    batch = prompts(F16)
    decode, chunk = share(batch, [(0, 99, 1)]), share(batch, [(0, 70, 30)])
    ordinary, fixed = make(batch), invariant(batch, 3)
    tiles = [ordinary.plan(step.metadata()).tile for step in (decode, chunk)]
    assert tiles[0] != tiles[1] and ordinary.plan(decode.metadata()).one_token
    plans = [fixed.plan(step.metadata()) for step in (decode, chunk)]
    assert plans[0].tile == plans[1].tile == tiles[1] and plans[0].splits == plans[1].splits == 2
    assert not any(plan.one_token for plan in plans)

    # As on a small GPU, where one decode is split and eight are not.
    ordinary.num_sms = fixed.num_sms = 3
    ordinary._scratch_rows = 8 * 2 * 3
    ordinary._part, ordinary._part_lse = torch.empty(ordinary._scratch_rows * 32), torch.empty(ordinary._scratch_rows)
    ordinary._plans.clear()
    wide = share(batch, [(0, 99, 1)] + [(3, i, 1) for i in range(7)])
    assert ordinary.plan(decode.metadata()).splits > 1 == ordinary.plan(wide.metadata()).splits
    results = [[run(step, backend=b, pad=0)[0][0] for step in (decode, wide)] for b in (ordinary, fixed)]
    assert not torch.equal(*results[0]) and torch.equal(*results[1])


def test_the_loop_without_masks_changes_no_bit() -> None:
    """Ordinary chunks run their interior tiles without masks; the bits are those of the masked loop, tile for tile."""
    batch = share(prompts(F16), [(0, 60, 40), (1, 0, 33)])
    ordinary, masked = make(batch), invariant(batch)
    assert ordinary.plan(batch.metadata()).tile == masked.plan(batch.metadata()).tile
    assert torch.equal(run(batch, backend=ordinary)[0], run(batch, backend=masked)[0])


@pytest.mark.parametrize(
    ("max_model_len", "requested", "expected"),
    [(256, 0, (1, 0)), (256, 1, (1, 0)), (256, 3, (2, 2)), (256, 9, (4, 1)), (64, 5, (1, 0)), (8192, 8, (8, 16))],
)
def test_ranges_cover_the_longest_context(max_model_len: int, requested: int, expected: tuple[int, int]) -> None:
    splits, per_split = fixed_ranges(max_model_len, 64, requested)
    assert (splits, per_split) == expected
    assert splits == 1 or (splits - 1) * per_split * 64 < max_model_len <= splits * per_split * 64


def test_it_says_so_and_refuses_a_batch_that_it_has_no_room_for() -> None:
    batch = prompts(F16)
    (plan,) = invariant(batch).describe(share(batch, [(0, 99, 1)]).metadata())
    assert "batch-invariant: this tile for every batch" in plan.note and plan.num_splits == 1
    first, second = invariant(batch, 3).describe(share(batch, [(0, 99, 1)]).metadata())
    assert "ranges of 64 positions" in first.note and "3 splits were asked for" in first.note
    assert first.num_splits == second.num_splits == 2
    tight = make(batch, batch_invariant=True, num_splits=2, max_num_batched_tokens=40, max_model_len=256)
    with pytest.raises(BackendError, match="max_num_batched_tokens"):
        run(share(batch, [(0, 0, 41)]), backend=tight, pad=0)
