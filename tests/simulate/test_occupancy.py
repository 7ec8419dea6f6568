"""Programs of a call, against the engine's own plan and against counting; and what the model of the time claims."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.attention.interface import AttentionSpec, Platform
from labkit.attention.kernels.tiles import scratch_rows
from labkit.attention.triton_attn import TritonAttentionBackend
from labkit.errors import ConfigError
from labkit.simulate import occupancy
from labkit.simulate.occupancy import CHIPS, Call, curve, plan, simulate

T4, A100, H200, B200 = CHIPS
HEADS = st.sampled_from([(8, 8), (32, 8), (64, 8), (32, 32), (16, 1), (9, 3)])


def engines_plan(call, chip, requested):
    """What TRITON_ATTN itself plans, without a GPU: the object has everything but its tensors."""
    spec = AttentionSpec(
        call.num_heads, call.num_kv_heads, call.head_size, "float16", 16, max_num_seqs=call.batch, num_splits=requested
    )
    backend = SimpleNamespace(
        spec=spec, group=call.group, num_sms=chip.sms, platform=Platform("cuda", chip.capability),
        _scratch_rows=scratch_rows(call.num_heads, call.num_kv_heads, chip.sms, call.batch, requested),
    )  # fmt: skip
    backend._tile = lambda n: TritonAttentionBackend._tile(backend, n)
    return TritonAttentionBackend._make_plan(backend, call.batch, call.num_tokens, call.q_len, call.kv_len)


@given(
    st.integers(1, 600), st.integers(0, 9000), st.integers(1, 70), HEADS, st.sampled_from(CHIPS), st.integers(0, 64),
    st.sampled_from([64, 128]),
)  # fmt: skip
def test_tile_programs_and_splits_are_the_engines(q_len, past, batch, heads, chip, requested, head_size):
    call = Call(q_len, q_len + past, batch, *heads, head_size)
    ours, engines = plan(call, chip, requested), engines_plan(call, chip, requested)
    assert (ours.tile, ours.launched, ours.splits) == (engines.tile, engines.programs, engines.splits)
    assert 0 < ours.working <= ours.launched


@given(st.integers(1, 300), st.integers(0, 500), st.integers(1, 3), HEADS)
def test_working_programs_see_what_their_last_token_sees(q_len, past, batch, heads):
    """Counted token by token: the keys of a program are those of the last token in its tile."""
    call = Call(q_len, q_len + past, batch, *heads)
    made = plan(call, H200, 1)
    block_q = made.tile.block_m // min(call.group, made.tile.block_m)
    tiles = {}
    for token in range(q_len):
        tiles[token // block_q] = past + token + 1
    full = [min(past + (i + 1) * block_q, call.kv_len) for i in tiles]
    assert sorted(set(made.keys)) == sorted(set(full)) and all(
        n <= m for n, m in zip(tiles.values(), full, strict=True)
    )
    head_tiles = -(-call.group // min(call.group, made.tile.block_m))
    assert made.working == len(tiles) * batch * call.num_kv_heads * head_tiles


@given(st.integers(1, 9000), st.integers(1, 64))
def test_the_splits_of_a_program_cover_its_keys_once(kv_len, requested):
    made = plan(Call(1, kv_len, 1, 8, 1), H200, requested)
    assert sum(occupancy._split_keys(made)) == kv_len


def test_a_lone_decode_uses_8_of_132():
    unsplit, split = simulate(Call(1, 32_768), H200, 1), simulate(Call(1, 32_768), H200)
    assert (unsplit.plan.programs, unsplit.busy, unsplit.waves, unsplit.merge_us) == (8, 8, 1, 0.0)
    assert (split.plan.splits, split.plan.programs, split.busy) == (33, 264, 132) and split.merge_us > 0
    assert sum(unsplit.per_sm) == 8 and max(split.per_sm) == 2 and len(split.per_sm) == 132
    # By hand: 32,768 keys of K and V, 256 bytes each, at 1/264 of the bandwidth, and one launch.
    assert unsplit.us == pytest.approx(2 * 32_768 * 256 * 264 / (H200.gb_s * 1e3) + H200.kernel_us)


def test_a_split_beyond_the_places_begins_a_second_wave():
    found = dict(curve(Call(1, 32_768), H200))
    assert found[1] > found[2] > found[8] > found[32] and found[40] > found[33]
    assert simulate(Call(1, 32_768), H200, 40).waves == 2


def test_no_model_beats_the_bandwidth():
    for call in (Call(1, 32_768), Call(1, 2048, 64), Call(1, 512, 8)):
        moved = 2 * call.batch * call.kv_len * call.num_kv_heads * call.head_size * 2
        assert min(us for _, us in curve(call, H200)) >= moved / H200.gb_s / 1e3


def test_unequal_programs_are_given_out_in_order():
    assert occupancy._makespan([3.0, 1.0, 1.0, 1.0], 2) == 3.0
    assert occupancy._makespan([1.0, 1.0, 5.0], 2) == 6.0
    assert occupancy._makespan([2.0] * 5, 2) == 6.0 and occupancy._makespan([], 2) == 0.0


@pytest.mark.parametrize("wrong", [(0, 5), (6, 5), (1, 5, 0), (1, 5, 1, 10, 4)])
def test_what_is_no_call_is_refused(wrong):
    with pytest.raises(ConfigError, match="no attention call"):
        Call(*wrong)
