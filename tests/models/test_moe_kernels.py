"""The kernels of the experts in Triton's interpreter: against float64, with all poisoned that nobody may read."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from labkit.launch import interpreting
from labkit.models import moe, moe_launch
from labkit.models.moe_launch import COUNT_INSIDE, Experts, Routing, Tile, max_blocks

pytest.importorskip("triton")

pytestmark = [  # numpy's, of numbers that are meant to be none
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def interpreter() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: tests/gpu runs the kernels there")
    assert interpreting(), "Triton was imported before TRITON_INTERPRET=1 was set: start pytest with it exported"


ROUTINGS = [
    Routing(20, 3, "softmax", True),
    Routing(20, 5, "softmax"),
    Routing(8, 2, "topk_softmax"),
    Routing(20, 3, "topk_softmax", bias="logits"),
    Routing(20, 4, "softmax", n_group=4, topk_group=2, routed_scaling_factor=16.0),
    Routing(24, 6, "sigmoid", True, n_group=3, topk_group=2, routed_scaling_factor=2.5, bias="choice"),
    Routing(1, 1, "softmax"),
]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda r: f"{r.scoring_func}-{r.num_experts}-{r.top_k}-{r.bias}")
def test_route_equals_torch(routing: Routing, padded: bool) -> None:
    torch.manual_seed(0)
    logits, bias = torch.randn(7, routing.num_experts), torch.randn(routing.num_experts) if routing.bias else None
    slots = torch.tensor([4, -1, 0, 2, -1, 3, -1]) if padded else None
    ids, weights = moe.route(logits, routing, bias, slots)
    if padded:
        logits[[1, 4, 6]] = math.nan
    got_ids, got_weights = moe_launch.route(logits, routing, bias, slots)
    expected, order = ids.sort(-1)
    got, got_order = got_ids.long().sort(-1)
    assert torch.equal(got, expected)
    torch.testing.assert_close(got_weights.gather(1, got_order), weights.gather(1, order))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("tokens,experts,hidden", [(1, 7, 40), (3, 130, 72), (5, 4, 1100), (0, 4, 16)])
def test_logits_of_few_tokens(tokens: int, experts: int, hidden: int, dtype: torch.dtype) -> None:
    """In fp32, whatever the dtype; a row of NaN is nobody else's; tokens may be rows of something wider."""
    x, gate = torch.randn(tokens, 2 * hidden).to(dtype)[:, :hidden], torch.randn(experts, hidden).to(dtype)
    x[1:2] = math.nan
    got = moe_launch.router_logits(x, gate)
    assert got.dtype == torch.float32 and got.shape == (tokens, experts)
    torch.testing.assert_close(got.double(), x.double() @ gate.double().t(), rtol=1e-5, atol=1e-4, equal_nan=True)


def test_logits_without_numbers_choose_experts_that_exist() -> None:
    """A model that overflowed gives NaN, and never an address outside the weights."""
    for routing in ROUTINGS:
        bias = torch.zeros(routing.num_experts) if routing.bias else None
        for value in (math.nan, math.inf, -math.inf):
            ids, _ = moe_launch.route(torch.full((1, routing.num_experts), value), routing, bias, None)
            assert ids.min() >= 0 and ids.max() < routing.num_experts


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("tokens,top_k,experts", [(1, 1, 1), (5, 3, 7), (33, 2, 70), (400, 3, 20)])
def test_align_puts_every_pair_into_a_block_of_its_expert(tokens: int, top_k: int, experts: int, block_m: int) -> None:
    torch.manual_seed(tokens)
    for spread in (experts, 1):  # all over, and everybody at one expert
        ids = torch.randint(spread, (tokens, top_k), dtype=torch.int32)
        ids[torch.rand(tokens) < 0.3] = -1
        order, owners, total = moe_launch.align(ids, experts, block_m)
        assert order.numel() == len(owners) * block_m == max_blocks(ids.numel(), experts, block_m) * block_m
        blocks = order[: total.item() * block_m].view(-1, block_m)
        places = torch.arange(ids.numel(), dtype=torch.int32).view(ids.shape)
        for expert in range(experts):
            mine = blocks[owners[: total.item()] == expert].flatten()
            wanted = places[ids == expert]
            assert torch.equal(mine[mine < ids.numel()], wanted), "in their order, once each"
            assert len(mine) == -(-len(wanted) // block_m) * block_m, "no block more than they need"
    assert (tokens * top_k > COUNT_INSIDE) == (tokens == 400), "one of the cases takes the counted path"


def make(experts: int, hidden: int, width: int, dtype: torch.dtype, *, gpt_oss: bool) -> Experts:
    def randn(*shape: int) -> torch.Tensor:
        return (torch.randn(shape) * shape[-1] ** -0.5).to(dtype)

    return Experts(
        randn(experts, 2 * width, hidden), randn(experts, 2 * width) if gpt_oss else None,
        randn(experts, hidden, width), randn(experts, hidden) if gpt_oss else None, gpt_oss, 0.8 if gpt_oss else None,
    )  # fmt: skip


def exact(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, stack: Experts) -> torch.Tensor:
    """Token by token, expert by expert, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, i in ((ids >= 0).nonzero()).tolist():
        e = ids[token, i]
        rows = stack.gate_up[e].double() @ x[token].double()
        if stack.gate_up_bias is not None:
            rows += stack.gate_up_bias[e].double()
        gate, up = (rows[::2], rows[1::2]) if stack.interleaved else rows.chunk(2)
        if stack.limit is None:
            inner = gate * gate.sigmoid() * up
        else:
            gate, up = gate.clamp(max=stack.limit), up.clamp(-stack.limit, stack.limit)
            inner = (up + 1) * gate * (1.702 * gate).sigmoid()
        part = stack.down[e].double() @ inner
        if stack.down_bias is not None:
            part += stack.down_bias[e].double()
        out[token] += part * weights[token, i].double()
    return out


#: Tokens, top-k, experts, hidden, width: pairs one by one; in blocks; sizes that no tile divides; one expert for all.
CALLS = [(1, 3, 16, 64, 40), (4, 2, 40, 96, 24), (9, 2, 6, 72, 20), (21, 3, 5, 64, 64), (40, 1, 1, 40, 33)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("gpt_oss", [False, True], ids=["silu", "gpt-oss"])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_experts_by_the_numerics_rule(
    call: tuple[int, ...], gpt_oss: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near float64; padded rows and experts that nobody chose are NaN, and so is all memory before it is written."""
    tokens, top_k, experts, hidden, width = call
    torch.manual_seed(tokens)
    stack = make(experts, hidden, width, dtype, gpt_oss=gpt_oss)
    ids = torch.rand(tokens, experts).topk(top_k).indices.int()
    weights, x = torch.rand(tokens, top_k), torch.randn(tokens, hidden).to(dtype)
    shared = None if gpt_oss else torch.randn(tokens, hidden).to(dtype)
    padding = torch.arange(tokens) % 4 == 3
    for tensor in (x, shared):
        if tensor is not None:
            tensor[padding] = math.nan
    ids[padding], weights[padding] = -1, 0.0
    unused = sorted(set(range(experts)) - set(ids.flatten().tolist()))
    for weight in (stack.gate_up, stack.gate_up_bias, stack.down, stack.down_bias):
        if weight is not None:
            weight[unused] = math.nan
    expected = exact(x, ids, weights, stack)
    if shared is not None:
        expected += shared.double().nan_to_num()
    poison(monkeypatch)
    got = moe_launch.run_experts(x, ids, weights, stack, shared)
    assert got.dtype == dtype and torch.equal(got[padding], torch.zeros_like(got[padding]))
    bound = (1e-5 if dtype == torch.float32 else 6e-3) * expected.abs().max()
    assert (got.double() - expected).abs().max() <= bound


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def filled(*args: object, **kwargs: object) -> torch.Tensor:
        made = empty(*args, **kwargs)  # type: ignore[call-overload]
        return made.fill_(math.nan if made.is_floating_point() else 2**30)

    monkeypatch.setattr(torch, "empty", filled)


@pytest.mark.parametrize("tile", [Tile(32, 16, 16, 4, 2), Tile(64, 32, 32, 4, 2)], ids=str)
def test_tiles_of_many_rows(tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of more than 16 rows, more than one block for an expert, several columns, one group after another."""
    torch.manual_seed(0)
    monkeypatch.setattr(moe_launch, "choose_tile", lambda *_: tile)
    stack = make(3, 40, 37, torch.float32, gpt_oss=False)
    ids = torch.rand(150, 3).topk(2).indices.int()
    weights, x = torch.rand(150, 2), torch.randn(150, 40)
    got = moe_launch.run_experts(x, ids, weights, stack)
    expected = exact(x, ids, weights, stack)
    assert (got.double() - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_launches_depend_on_the_number_of_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grids of a call are those of any other call of as many tokens, whatever the routing: it can be captured."""
    from triton.runtime.interpreter import GridExecutor

    grids: list[object] = []
    original = GridExecutor.__call__

    def call(self: GridExecutor, *args: object, **kwargs: object) -> object:
        grids.append((self.fn.__name__, self.grid))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", call)
    stack = make(8, 32, 16, torch.float32, gpt_oss=False)
    for tokens, launches in ((1, 2), (11, 4)):
        seen = []
        for ids in (torch.zeros(tokens, 2), torch.full((tokens, 2), -1.0), torch.rand(tokens, 8).topk(2).indices):
            grids.clear()
            moe_launch.run_experts(torch.randn(tokens, 32), ids.int(), torch.rand(tokens, 2), stack)
            seen.append(list(grids))
        assert len(seen[0]) == launches and seen[0] == seen[1] == seen[2]


def test_a_tile_fits_where_it_runs() -> None:
    """Two tiles of weights and one of tokens per stage, within what a block may use on the card."""
    for capability, limit in (((7, 5), 65_536), ((8, 9), 101_376), ((9, 0), 232_448), ((12, 0), 101_376)):
        for itemsize in (2, 4):
            for pairs in (8, 256, 4096, 12_000, 65_536):
                tile = moe_launch.choose_tile(pairs, 128, itemsize, capability)
                stage = (tile.block_m + 2 * tile.block_n) * tile.block_k * itemsize
                assert stage * tile.num_stages <= limit, (capability, tile)


def test_experts_must_lie_as_they_are_read() -> None:
    stack = make(4, 16, 8, torch.float32, gpt_oss=False)
    wrong = dataclasses.replace(stack, down=stack.down.transpose(1, 2))
    with pytest.raises(ValueError, match="contiguous"):
        moe_launch.run_experts(torch.randn(1, 16), torch.zeros(1, 1).int(), torch.ones(1, 1), wrong)
