"""Mixture of experts as Triton kernels: routing, sorting pairs by expert, products. Refuses to know tensors and sizes.

A *pair* is a token and one of its experts, numbered `token · TOP_K + i`. Which expert a program works for, it reads on
the device, so that grids follow from the number of tokens alone. `labkit.models.moe_launch` launches these kernels.
"""

from __future__ import annotations

from typing import Any

from labkit.launch import DeviceFunction, kernel

tl: Any = None  # `triton.language` once a kernel has been launched


# --- routing ---------------------------------------------------------------------------------------------------------


@kernel(tensors="x_ptr gate_ptr logits_ptr")
def moe_logits_kernel(
    x_ptr, gate_ptr, logits_ptr,
    X_STRIDE: tl.constexpr, HIDDEN: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The logits of one token for BLOCK_E experts, by ordinary products. Grid: (tokens, blocks of experts)."""
    token = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_E, BLOCK_K), tl.float32)
    for start in range(0, HIDDEN, BLOCK_K):
        in_k = start + k < HIDDEN
        x = tl.load(x_ptr + token * X_STRIDE + start + k, mask=in_k, other=0.0).to(tl.float32)
        mask = (e < EXPERTS)[:, None] & in_k[None, :]
        gate = tl.load(gate_ptr + e[:, None] * HIDDEN + start + k[None, :], mask=mask, other=0.0)
        total += gate.to(tl.float32) * x[None, :]
    tl.store(logits_ptr + token * EXPERTS + e, tl.sum(total, 1), mask=e < EXPERTS)


@kernel(tensors="logits_ptr bias_ptr slots_ptr ids_ptr weights_ptr", numbers="scale")
def moe_route_kernel(
    logits_ptr, bias_ptr, slots_ptr, ids_ptr, weights_ptr, scale,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    SCORING: tl.constexpr, LOGIT_BIAS: tl.constexpr, CHOICE_BIAS: tl.constexpr, RENORMALIZE: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The TOP_K experts of one token and their weights; see `Routing`. Grid: (tokens,).

    Equal scores go to the lower number. Logits that are NaN give some expert that exists: memory stays safe.
    """
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    valid = e < EXPERTS
    x = tl.load(logits_ptr + token * EXPERTS + e, mask=valid, other=float("-inf")).to(tl.float32)
    if LOGIT_BIAS:
        x += tl.load(bias_ptr + e, mask=valid, other=0.0).to(tl.float32)
    if SCORING == 0:
        x = tl.exp(x - tl.max(x, 0))
        x = x / tl.sum(x, 0)
    elif SCORING == 1:
        x = 1.0 / (1.0 + tl.exp(-x))
    choice = x
    if CHOICE_BIAS:
        choice += tl.load(bias_ptr + e, mask=valid, other=0.0).to(tl.float32)
    choice = tl.where(valid, choice, float("-inf"))

    if GROUPS > 1:
        SIZE: tl.constexpr = EXPERTS // GROUPS
        # Each expert's lane holds the score of its group, so that no reshape needs a power of two.
        of_group = tl.full((BLOCK_E,), float("-inf"), tl.float32)
        for g in tl.static_range(GROUPS):
            mine = e // SIZE == g
            inside = tl.where(mine, choice, float("-inf"))
            best = tl.max(inside, 0)
            if CHOICE_BIAS:  # DeepSeek-V3: the sum of the best two
                first = tl.argmax(inside, 0)
                best += tl.max(tl.where(e == first, float("-inf"), inside), 0)
            of_group = tl.where(mine, best, of_group)
        kept = e < 0
        for _ in tl.static_range(TOP_GROUPS):
            group = tl.argmax(of_group, 0) // SIZE
            kept = kept | (e // SIZE == group)
            of_group = tl.where(e // SIZE == group, float("-inf"), of_group)
        choice = tl.where(kept, choice, float("-inf"))

    k = tl.arange(0, BLOCK_K)
    ids = tl.full((BLOCK_K,), 0, tl.int32)
    weights = tl.full((BLOCK_K,), 0.0, tl.float32)
    for i in tl.static_range(TOP_K):
        score, best = tl.max(choice, 0, return_indices=True)
        best = tl.minimum(best, EXPERTS - 1)
        if CHOICE_BIAS:  # what was compared is not the weight
            score = tl.sum(tl.where(e == best, x, 0.0), 0)
        ids = tl.where(k == i, best, ids)
        weights = tl.where(k == i, score, weights)
        choice = tl.where(e == best, float("-inf"), choice)
    if SCORING == 2:
        weights = tl.where(k < TOP_K, weights, float("-inf"))
        weights = tl.exp(weights - tl.max(weights, 0))
        weights = weights / tl.sum(weights, 0)
    elif RENORMALIZE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    weights = weights * scale
    if SLOTS:
        real = tl.load(slots_ptr + token) >= 0
        ids = tl.where(real, ids, -1)
        weights = tl.where(real, weights, 0.0)
    tl.store(ids_ptr + token * TOP_K + k, ids, mask=k < TOP_K)
    tl.store(weights_ptr + token * TOP_K + k, weights, mask=k < TOP_K)


# --- sorting by expert -----------------------------------------------------------------------------------------------


@kernel(tensors="ids_ptr counts_ptr", numbers="num_pairs")
def moe_count_kernel(ids_ptr, counts_ptr, num_pairs, CHUNK: tl.constexpr):
    """How many pairs chose an expert. Grid: (experts,)."""
    expert = tl.program_id(0)
    found = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, num_pairs, CHUNK):
        at = start + tl.arange(0, CHUNK)
        found += (tl.load(ids_ptr + at, mask=at < num_pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(found, 0))


@kernel(tensors="ids_ptr counts_ptr sorted_ptr experts_ptr total_ptr", numbers="num_pairs")
def moe_align_kernel(
    ids_ptr, counts_ptr, sorted_ptr, experts_ptr, total_ptr, num_pairs,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, COUNTED: tl.constexpr, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Lays the pairs of one expert into blocks of BLOCK_M behind those of lower experts. Grid: (experts,).

    The last block of an expert is filled up with `num_pairs`, a pair that does not exist. No atomics: pairs keep their
    order, so the same routing gives the same layout. Pairs with id −1 are nobody's.
    """
    expert = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    if COUNTED:
        counts = tl.load(counts_ptr + e, mask=e < EXPERTS, other=0)
    else:
        counts = tl.zeros((BLOCK_E,), tl.int32)
        for start in range(0, num_pairs, CHUNK):
            at = start + tl.arange(0, CHUNK)
            ids = tl.load(ids_ptr + at, mask=at < num_pairs, other=-1)
            counts += tl.sum((ids[None, :] == e[:, None]).to(tl.int32), 1)
    blocks = (counts + (BLOCK_M - 1)) // BLOCK_M
    mine = tl.sum(tl.where(e == expert, counts, 0), 0)
    first = tl.sum(tl.where(e < expert, blocks, 0), 0)
    my_blocks = (mine + (BLOCK_M - 1)) // BLOCK_M
    if expert == EXPERTS - 1:
        tl.store(total_ptr, first + my_blocks)
    for block in range(first, first + my_blocks):
        tl.store(experts_ptr + block, expert)
    place = first * BLOCK_M
    if mine > 0:
        for start in range(0, num_pairs, CHUNK):
            pair = start + tl.arange(0, CHUNK)
            hit = (tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1) == expert).to(tl.int32)
            rank = tl.cumsum(hit, 0) - hit
            tl.store(sorted_ptr + place + rank, pair, mask=hit > 0)
            place += tl.sum(hit, 0)
        rest = place + tl.arange(0, BLOCK_M)
        tl.store(sorted_ptr + rest, rest * 0 + num_pairs, mask=rest < (first + my_blocks) * BLOCK_M)


# --- products --------------------------------------------------------------------------------------------------------


@DeviceFunction
def gated(gate, up, limit, CLAMP: tl.constexpr):
    """silu(gate) · up; with CLAMP gpt-oss's (up + 1) · gate · sigmoid(1.702 · gate) of clamped values. All fp32."""
    if CLAMP:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        return up * gate / (1.0 + tl.exp(-1.702 * gate))
    return up * gate / (1.0 + tl.exp(-gate))


@kernel(tensors="x_ptr weight_ptr bias_ptr ids_ptr out_ptr", numbers="limit")
def moe_gate_up_pairs_kernel(
    x_ptr, weight_ptr, bias_ptr, ids_ptr, out_ptr, limit,
    X_STRIDE: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr,
    INTERLEAVED: tl.constexpr, BIAS: tl.constexpr, CLAMP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One pair and BLOCK_N columns of gate and up, by ordinary products, then `gated`. Grid: (pairs, column blocks)."""
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if expert >= 0:
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        in_n = n < WIDTH
        STEP: tl.constexpr = 2 if INTERLEAVED else 1
        APART: tl.constexpr = 1 if INTERLEAVED else WIDTH
        k = tl.arange(0, BLOCK_K)
        row = weight_ptr + expert * (2 * WIDTH * HIDDEN) + (n * STEP)[:, None] * HIDDEN
        gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for start in range(0, HIDDEN, BLOCK_K):
            at = start + k
            mask = in_n[:, None] & (at < HIDDEN)[None, :]
            x = tl.load(x_ptr + pair // TOP_K * X_STRIDE + at, mask=at < HIDDEN, other=0.0).to(tl.float32)[None, :]
            gate += tl.load(row + at[None, :], mask=mask, other=0.0).to(tl.float32) * x
            up += tl.load(row + APART * HIDDEN + at[None, :], mask=mask, other=0.0).to(tl.float32) * x
        g, u = tl.sum(gate, 1), tl.sum(up, 1)
        if BIAS:
            b = bias_ptr + expert * (2 * WIDTH) + n * STEP
            g += tl.load(b, mask=in_n, other=0.0).to(tl.float32)
            u += tl.load(b + APART, mask=in_n, other=0.0).to(tl.float32)
        y = gated(g, u, limit, CLAMP)
        tl.store(out_ptr + pair * WIDTH + n, y.to(out_ptr.dtype.element_ty), mask=in_n)


@kernel(tensors="x_ptr weight_ptr bias_ptr ids_ptr weights_ptr shared_ptr out_ptr")
def moe_down_tokens_kernel(
    x_ptr, weight_ptr, bias_ptr, ids_ptr, weights_ptr, shared_ptr, out_ptr,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, BIAS: tl.constexpr, SHARED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of one token's output: products of its experts, weighted and summed. Grid: (tokens, columns)."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = n < HIDDEN
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    y = tl.zeros((BLOCK_N,), tl.float32)
    real = True
    for i in tl.static_range(TOP_K):
        pair = token * TOP_K + i
        expert = tl.load(ids_ptr + pair).to(tl.int64)
        factor = tl.load(weights_ptr + pair)
        real = expert >= 0
        row = weight_ptr + expert * (HIDDEN * WIDTH) + n[:, None] * WIDTH
        for start in range(0, WIDTH, BLOCK_K):
            at = start + k
            in_k = (at < WIDTH) & real
            x = tl.load(x_ptr + pair * WIDTH + at, mask=in_k, other=0.0).to(tl.float32) * factor
            total += (
                tl.load(row + at[None, :], mask=in_n[:, None] & in_k[None, :], other=0.0).to(tl.float32) * x[None, :]
            )
        if BIAS:
            y += tl.load(bias_ptr + expert * HIDDEN + n, mask=in_n & real, other=0.0).to(tl.float32) * factor
    y += tl.sum(total, 1)
    if SHARED:
        y += tl.load(shared_ptr + token * HIDDEN + n, mask=in_n & real, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * HIDDEN + n, y.to(out_ptr.dtype.element_ty), mask=in_n)


@kernel(tensors="x_ptr weight_ptr bias_ptr weights_ptr sorted_ptr experts_ptr total_ptr out_ptr",
        numbers="num_pairs num_blocks limit")  # fmt: skip
def moe_grouped_kernel(
    x_ptr, weight_ptr, bias_ptr, weights_ptr, sorted_ptr, experts_ptr, total_ptr, out_ptr, num_pairs, num_blocks, limit,
    X_STRIDE: tl.constexpr, INNER: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, BIAS: tl.constexpr, CLAMP: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """BLOCK_M pairs of one expert times BLOCK_N of its rows, by tensor cores. Grid: (blocks of pairs · column blocks,).

    With GATED, rows of gate and up, then `gated`; x has a row for each token. Without, the product times the pair's
    weight; x has a row for each pair. The output has a row for each pair. Programs that run at the same time share
    weights: GROUP_M blocks of pairs go through the columns together.
    """
    COLUMNS: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    group = tl.program_id(0) // (GROUP_M * COLUMNS)
    inside = tl.program_id(0) % (GROUP_M * COLUMNS)
    height = tl.minimum(num_blocks - group * GROUP_M, GROUP_M)
    block = group * GROUP_M + inside % height
    if block < tl.load(total_ptr):
        expert = tl.load(experts_ptr + block).to(tl.int64)
        pair = tl.load(sorted_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        real = pair < num_pairs
        n = inside // height * BLOCK_N + tl.arange(0, BLOCK_N)
        in_n = n < WIDTH
        k = tl.arange(0, BLOCK_K)
        STEP: tl.constexpr = 2 if GATED and INTERLEAVED else 1
        APART: tl.constexpr = 1 if INTERLEAVED else WIDTH
        ROWS: tl.constexpr = 2 * WIDTH if GATED else WIDTH
        EVEN: tl.constexpr = INNER % BLOCK_K == 0
        x_at = x_ptr + (pair // TOP_K if GATED else pair)[:, None] * X_STRIDE + k[None, :]
        w_at = weight_ptr + expert * (ROWS * INNER) + (n * STEP)[None, :] * INNER + k[:, None]
        first = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        second = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, INNER, BLOCK_K):
            x_mask, w_mask = real[:, None], in_n[None, :]
            if not EVEN:
                x_mask = x_mask & (start + k < INNER)[None, :]
                w_mask = w_mask & (start + k < INNER)[:, None]
            x = tl.load(x_at + start, mask=x_mask, other=0.0)
            w = tl.load(w_at + start, mask=w_mask, other=0.0)
            first = tl.dot(x, w, first, input_precision=PRECISION)
            if GATED:
                w2 = tl.load(w_at + APART * INNER + start, mask=w_mask, other=0.0)
                second = tl.dot(x, w2, second, input_precision=PRECISION)
        if BIAS:
            b = bias_ptr + expert * ROWS + n * STEP
            first += tl.load(b, mask=in_n, other=0.0).to(tl.float32)[None, :]
            if GATED:
                second += tl.load(b + APART, mask=in_n, other=0.0).to(tl.float32)[None, :]
        if GATED:
            y = gated(first, second, limit, CLAMP)
        else:
            y = first * tl.load(weights_ptr + pair, mask=real, other=0.0)[:, None]
        out = out_ptr + pair[:, None] * WIDTH + n[None, :]
        tl.store(out, y.to(out_ptr.dtype.element_ty), mask=real[:, None] & in_n[None, :])


@kernel(tensors="parts_ptr ids_ptr shared_ptr out_ptr")
def moe_sum_kernel(
    parts_ptr, ids_ptr, shared_ptr, out_ptr,
    HIDDEN: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum over a token's experts, in their order, and over the shared ones. Grid: (tokens, column blocks)."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = tl.load(ids_ptr + token * TOP_K) >= 0
    mask = (n < HIDDEN) & real
    y = tl.zeros((BLOCK,), tl.float32)
    if SHARED:
        y += tl.load(shared_ptr + token * HIDDEN + n, mask=mask, other=0.0).to(tl.float32)
    for i in tl.static_range(TOP_K):
        y += tl.load(parts_ptr + (token * TOP_K + i) * HIDDEN + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * HIDDEN + n, y.to(out_ptr.dtype.element_ty), mask=n < HIDDEN)
