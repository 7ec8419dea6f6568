"""Launches the kernels of `moe_kernels` on a GPU: who works for a token, and what comes of it. Refuses to know layers.

Every grid follows from the number of tokens alone. So a call can be captured with one routing and replayed with
another, and the host never waits. A token whose slot is negative is padding: it gets no expert, nothing of it is read,
and its output is 0.

Few tokens and many take different kernels, since something else bounds them: see `run_experts`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from labkit.launch import next_power_of_2
from labkit.models.moe_kernels import (
    moe_align_kernel,
    moe_count_kernel,
    moe_down_tokens_kernel,
    moe_gate_up_pairs_kernel,
    moe_grouped_kernel,
    moe_logits_kernel,
    moe_route_kernel,
    moe_sum_kernel,
)

#: How logits become weights, as numbers for `moe_route_kernel`.
SCORING = {"softmax": 0, "sigmoid": 1, "topk_softmax": 2}
#: Pairs of (token, expert) up to which every program of `moe_align_kernel` counts all of them itself: a launch less.
COUNT_INSIDE = 1024
#: Tokens up to which the router is a kernel of our own: cuBLAS takes two launches for so thin a product.
THIN = 16

_variants: dict[tuple[Any, ...], Any] = {}


@dataclasses.dataclass(frozen=True)
class Routing:
    """How tokens choose experts; fields of `ModelConfig`, under its names.

    Logits become scores by `scoring_func`: "softmax", "sigmoid", or for "topk_softmax" not at all. The `top_k` best
    scores are chosen, with `n_group` > 1 within the `topk_group` groups whose best score (with `bias` "choice": best
    two) is highest. Their scores are the weights: with "topk_softmax" through a softmax over them, with
    `norm_topk_prob` divided by their sum; then times `routed_scaling_factor`.

    bias: "logits" is added before everything (gpt-oss), "choice" to the scores while choosing only (DeepSeek-V3); "".
    """

    num_experts: int
    top_k: int
    scoring_func: str = "softmax"
    norm_topk_prob: bool = False
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    bias: str = ""


def router_logits(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x · gateᵀ in fp32, `[num_tokens, num_experts]`, for `[num_tokens, hidden]` and `[num_experts, hidden]`."""
    (tokens, hidden), experts = x.shape, gate.shape[0]
    if tokens > THIN:
        return torch.mm(x, gate.t()) if x.dtype == torch.float32 else torch.mm(x, gate.t(), out_dtype=torch.float32)
    logits = torch.empty((tokens, experts), dtype=torch.float32, device=x.device)
    if tokens:
        form = ("logits", x.dtype, x.stride(0), hidden, experts)
        variant = _variants.get(form)
        if variant is None:
            constants = (x.stride(0), hidden, experts, 4, min(1024, next_power_of_2(hidden)))
            variant = _variants[form] = moe_logits_kernel.variant((x.dtype,), constants, 4, 1)
        variant((tokens, -(-experts // 4), 1), (x, gate, logits))
    return logits


def route(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None, slots: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(int32 ids, fp32 weights), both `[num_tokens, top_k]`; padding has ids −1 and weights 0. One launch.

    Args:
        logits: `[num_tokens, num_experts]`, contiguous. bias: `[num_experts]`. slots: int64 `[≥ num_tokens]` or None.
    """
    tokens = logits.shape[0]
    ids = torch.empty((tokens, routing.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, routing.top_k), dtype=torch.float32, device=logits.device)
    form = (routing, logits.dtype, bias is not None and bias.dtype, slots is not None)
    variant = _variants.get(form)
    if variant is None:
        constants = (
            routing.num_experts, routing.top_k, routing.n_group, routing.topk_group, SCORING[routing.scoring_func],
            routing.bias == "logits", routing.bias == "choice", routing.norm_topk_prob, slots is not None,
            next_power_of_2(routing.num_experts), next_power_of_2(routing.top_k),
        )  # fmt: skip
        variant = _variants[form] = moe_route_kernel.variant(form[1:], constants, 1, 1)
    tensors = (logits, logits if bias is None else bias, ids if slots is None else slots, ids, weights)
    variant((tokens, 1, 1), tensors, (float(routing.routed_scaling_factor),))
    return ids, weights


def max_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Blocks that any routing of `num_pairs` may fill: the size of the grid."""
    return (num_pairs + min(num_pairs, num_experts) * (block_m - 1)) // block_m


def align(ids: torch.Tensor, num_experts: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs (row-major places in `ids`) sorted by expert into blocks of `block_m`.

    Returns:
        int32 `[max_blocks * block_m]` pairs, of which a full block has `ids.numel()` where it holds none; int32
        `[max_blocks]`, the expert of each block; int32 `[1]`, how many blocks there are. What lies behind is undefined.
    """
    pairs = ids.numel()
    limit = max_blocks(pairs, num_experts, block_m)
    counted = pairs > COUNT_INSIDE
    space = torch.empty(limit * block_m, dtype=torch.int32, device=ids.device)
    blocks = torch.empty(limit, dtype=torch.int32, device=ids.device)
    total = torch.empty(1, dtype=torch.int32, device=ids.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=ids.device) if counted else total
    chunk = 1024 if counted else min(64, max(16, next_power_of_2(pairs)))
    if counted:
        moe_count_kernel.variant((), (chunk,), 4, 1)((num_experts, 1, 1), (ids, counts), (pairs,))
    constants = (num_experts, block_m, counted, chunk, next_power_of_2(num_experts))
    variant = moe_align_kernel.variant((), constants, 4, 1)
    variant((num_experts, 1, 1), (ids, counts, space, blocks, total), (pairs,))
    return space, blocks, total


@dataclasses.dataclass(frozen=True)
class Tile:
    """Pairs × columns × depth of one program of `moe_grouped_kernel`, warps and software-pipeline stages."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def choose_tile(num_pairs: int, num_experts: int, itemsize: int, capability: tuple[int, int] | None) -> Tile:
    """A tile for experts that get `num_pairs / num_experts` pairs each, if they are even.

    16 rows are the least a tensor core takes; such a call waits for weights, so its loads are deep. float32 multiplies
    on ordinary cores, and sm_75 does so for every dtype (Triton emits no tensor-core instructions there): such a
    product is unrolled, so the tile is small. Shared memory: two weights tiles and one of pairs for each stage,
    within 64 KiB on sm_75 and 99 KiB elsewhere.
    """
    if itemsize == 4 or (capability is not None and capability < (8, 0)):
        return Tile(16, 32, 32, 4, 2)
    each = -(-num_pairs // num_experts)
    if each <= 16:
        return Tile(16, 32, 128, 4, 4)
    if each <= 48:
        return Tile(32, 64, 64, 4, 4)
    return Tile(64, 64, 64, 4, 4) if each <= 128 else Tile(128, 64, 64, 8, 3)


@dataclasses.dataclass(frozen=True)
class PairsTile:
    """Rows of weights of one program that works for one pair, and how much of a row it multiplies at a time."""

    rows: int
    up_depth: int
    down_depth: int
    num_warps: int


def choose_pairs_tile(hidden: int, width: int) -> PairsTile:
    """Few rows make many programs, each with loads of 16 bytes a thread: so the whole chip reads at once."""
    return PairsTile(4, min(512, next_power_of_2(hidden)), min(1024, next_power_of_2(width)), 4)


def one_by_one(num_pairs: int, num_experts: int, top_k: int) -> bool:
    """Whether each pair reads its expert by itself: so few pairs that hardly two of them share one."""
    return num_pairs <= max(top_k, num_experts // 4)


@dataclasses.dataclass(frozen=True)
class Experts:
    """Weights of all experts of a layer, stacked, `[out, in]` each.

    gate_up: `[experts, 2 · width, hidden]`, gate's rows first, or alternating where `interleaved`.
    down: `[experts, hidden, width]`. Biases `[experts, rows]` or None. limit: of gpt-oss's clamped gate, or None.
    """

    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    interleaved: bool = False
    limit: float | None = None


def run_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, stack: Experts, shared: torch.Tensor | None = None
) -> torch.Tensor:
    """Σ weight · expert(x) over each token's experts, plus `shared`: `[num_tokens, hidden]` in the dtype of `x`.

    Args:
        x: `[num_tokens, hidden]`, contiguous rows. ids, weights: as `route` gives them.
        shared: like the result, or None.

    Two launches for few tokens: a pair streams its expert's weights through ordinary products, many small programs at
    once, which is what a read at full speed takes. Else pairs are sorted by expert, so that a weight is read once for
    all pairs of a block; four launches, five above `COUNT_INSIDE` pairs.
    """
    tokens, hidden = x.shape
    top_k, (experts, double) = ids.shape[1], stack.gate_up.shape[:2]
    if x.stride(1) != 1 or not stack.gate_up.is_contiguous() or not stack.down.is_contiguous():
        raise ValueError("weights must be contiguous, and the last dimension of x")
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    inner = torch.empty((tokens * top_k, double // 2), dtype=x.dtype, device=x.device)
    if one_by_one(tokens * top_k, experts, top_k):
        _run_pairs(x, ids, weights, stack, shared, inner, out)
    else:
        _run_grouped(x, ids, weights, stack, shared, inner, out)
    return out


def _run_pairs(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, stack: Experts, shared: torch.Tensor | None,
    inner: torch.Tensor, out: torch.Tensor,
) -> None:  # fmt: skip
    (pairs, width), (tokens, hidden), top_k = inner.shape, out.shape, ids.shape[1]
    form = ("pairs", x.dtype, x.stride(0), hidden, width, top_k, stack.interleaved, stack.limit is None,
            stack.gate_up_bias is None, shared is None)  # fmt: skip
    found = _variants.get(form)
    if found is None:
        biased, tile = stack.gate_up_bias is not None, choose_pairs_tile(hidden, width)
        rows, flags = tile.rows, (stack.interleaved, biased, stack.limit is not None)
        up = moe_gate_up_pairs_kernel.variant(
            (x.dtype,), (x.stride(0), hidden, width, top_k, *flags, rows, tile.up_depth), tile.num_warps, 1
        )
        down = moe_down_tokens_kernel.variant(
            (x.dtype,), (hidden, width, top_k, biased, shared is not None, rows, tile.down_depth), tile.num_warps, 1
        )
        found = _variants[form] = (up, down, -(-width // rows), -(-hidden // rows))
    up, down, up_columns, down_columns = found
    biases = (x if b is None else b for b in (stack.gate_up_bias, stack.down_bias))
    up((pairs, up_columns, 1), (x, stack.gate_up, next(biases), ids, inner), (float(stack.limit or 0.0),))
    tensors = (inner, stack.down, next(biases), ids, weights, x if shared is None else shared, out)
    down((tokens, down_columns, 1), tensors)


def _run_grouped(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, stack: Experts, shared: torch.Tensor | None,
    inner: torch.Tensor, out: torch.Tensor,
) -> None:  # fmt: skip
    (pairs, width), (tokens, hidden), top_k = inner.shape, out.shape, ids.shape[1]
    experts = stack.gate_up.shape[0]
    tile = choose_tile(pairs, experts, x.element_size(), _capability(x.device))
    form = ("grouped", tile, x.dtype, x.stride(0), hidden, width, top_k, stack.interleaved, stack.limit is None,
            stack.gate_up_bias is None, shared is None)  # fmt: skip
    found = _variants.get(form)
    if found is None:
        flags = (stack.interleaved, stack.gate_up_bias is not None, stack.limit is not None,
                 "ieee" if x.dtype == torch.float32 else "tf32")  # fmt: skip
        block = (tile.block_m, tile.block_n, tile.block_k, 8)
        up, down = (
            moe_grouped_kernel.variant(
                (x.dtype, is_up), (*shape, is_up, *flags, *block), tile.num_warps, tile.num_stages
            )
            for is_up, shape in ((True, (x.stride(0), hidden, width, top_k)), (False, (width, width, hidden, top_k)))
        )
        columns = min(1024, next_power_of_2(hidden))
        add = moe_sum_kernel.variant((x.dtype,), (hidden, top_k, shared is not None, columns), 4, 1)
        found = _variants[form] = (up, down, add, -(-hidden // columns))
    up, down, add, columns = found
    order, owners, total = align(ids, experts, tile.block_m)
    blocks = owners.shape[0]
    numbers = (pairs, blocks, float(stack.limit or 0.0))
    parts = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
    for kernel_, source, weight, bias, result, rows in (
        (up, x, stack.gate_up, stack.gate_up_bias, inner, width),
        (down, inner, stack.down, stack.down_bias, parts, hidden),
    ):
        tensors = (source, weight, x if bias is None else bias, weights, order, owners, total, result)
        kernel_((blocks * -(-rows // tile.block_n), 1, 1), tensors, numbers)
    add((tokens, columns, 1), (parts, ids, x if shared is None else shared, out))


@functools.cache
def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
