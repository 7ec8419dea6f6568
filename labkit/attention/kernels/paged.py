"""Attention of a mixed batch over a paged KV cache: one kernel for every kind of request, and the merge of KV splits.

The kernels know rows of queries, pages and masks; they refuse to know prefill from decode, and layers from each other.

A *tile* is BLOCK_M query rows of one request and one KV head. With grouped-query attention the rows are (query token,
query head of the group) pairs, flattened, so that all heads of a group share one read of K and V; a group that is no
power of two leaves the last rows of the tile unused. Requests own consecutive tiles: request i begins at tile
`query_start[i] // BLOCK_Q + i`, which leaves room for every partly filled last tile, needs nothing but
`query_start_loc` on the device, and is why the grid has `num_tokens // BLOCK_Q + num_reqs` tiles at most. Tiles that
no request needs exit at once: a CUDA graph launches the worst case of its size.

Scores are kept in base 2 (`exp2` is what the hardware has); log2(e) is folded into the scale.
"""

from __future__ import annotations

from typing import Any

from labkit.launch import DeviceFunction, kernel

tl: Any = None  # `triton.language` once a kernel has been launched


@DeviceFunction
def attend_keys(
    acc, m, total, page, q, row_pos, block_row_ptr, k_head_ptr, v_head_ptr, first_key, end_key, lo, hi,
    scale_log2, soft_cap,
    K_STRIDE_PAGE: tl.constexpr, K_STRIDE_TOKEN: tl.constexpr,
    V_STRIDE_PAGE: tl.constexpr, V_STRIDE_TOKEN: tl.constexpr,
    PAGE: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Go on with the online softmax of a tile's rows over keys [lo, hi); `page` holds the page numbers of the first.

    Only keys in [first_key, end_key) are loaded: what lies outside (tails of pages, the null block) may hold NaN, and
    0 × NaN would still poison the product with V. Without MASKED every row sees every key of [lo, hi), whole tiles.
    """
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_PADDED)
    for start in range(lo, hi, BLOCK_N):
        keys = start + offs_n
        live = (keys >= first_key) & (keys < end_key)
        if MASKED:
            kv_mask = live[:, None] if HEAD_SIZE == HEAD_PADDED else live[:, None] & (offs_d < HEAD_SIZE)[None, :]
        elif HEAD_SIZE == HEAD_PADDED:
            kv_mask = tl.full([BLOCK_N, HEAD_PADDED], 1, tl.int1)  # the compiler drops a mask that is constant
        else:
            kv_mask = (offs_d < HEAD_SIZE)[None, :]
        slot = (keys % PAGE).to(tl.int64)
        k_rows = page.to(tl.int64) * K_STRIDE_PAGE + slot * K_STRIDE_TOKEN
        v_rows = page.to(tl.int64) * V_STRIDE_PAGE + slot * V_STRIDE_TOKEN
        k = tl.load(k_head_ptr + k_rows[:, None] + offs_d[None, :], mask=kv_mask, other=0.0)
        v = tl.load(v_head_ptr + v_rows[:, None] + offs_d[None, :], mask=kv_mask, other=0.0)
        page = tl.load(block_row_ptr + (keys + BLOCK_N) // PAGE, mask=keys + BLOCK_N < end_key, other=0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        if SOFT_CAP:
            # cap · tanh(s / cap). The scale already holds log2(e), so 2s/cap is s·2/cap in base 2 as well.
            e = tl.exp2(-2.0 * tl.abs(s) / soft_cap)
            t = (1.0 - e) / (1.0 + e)
            s = tl.where(s < 0, -t, t) * (soft_cap * 1.4426950408889634)
        if MASKED:
            # Bottom-right causal: a row at absolute position p sees keys ≤ p.
            seen = live[None, :] & (keys[None, :] <= row_pos[:, None])
            if WINDOW > 0:
                seen = seen & (keys[None, :] > row_pos[:, None] - WINDOW)
            s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        # A row that has seen nothing yet keeps −inf; subtracting it from itself would be NaN.
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
        p = tl.exp2(s - m_safe[:, None])
        alpha = tl.exp2(m - m_safe)
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        m = m_new
    return acc, m, total, page


@DeviceFunction
def attend_tile(
    q, row_pos, first_pos, block_row_ptr, k_head_ptr, v_head_ptr, first_key, end_key, lo, hi, scale_log2, soft_cap,
    K_STRIDE_PAGE: tl.constexpr, K_STRIDE_TOKEN: tl.constexpr,
    V_STRIDE_PAGE: tl.constexpr, V_STRIDE_TOKEN: tl.constexpr,
    PAGE: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    INTERIOR: tl.constexpr,
):  # fmt: skip
    """Softmax of a tile's rows over keys [lo, hi); returns unnormalised output, running maximum and sum.

    `first_pos` is the position of the first row. With INTERIOR the tiles of keys that every row sees, most of a long
    prefill, run in a loop of their own without masks.
    """
    offs_n = tl.arange(0, BLOCK_N)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_PADDED], tl.float32)
    # Page numbers are fetched one tile ahead: a load whose address comes from another load of the same iteration would
    # cost the software pipeline a stage. One number per key; neighbours read the same word, which spares a reshape.
    page = tl.load(block_row_ptr + (lo + offs_n) // PAGE, mask=lo + offs_n < end_key, other=0)
    if INTERIOR:
        edge = tl.maximum(lo, tl.minimum(hi, tl.maximum(first_pos + 1, 0) // BLOCK_N * BLOCK_N))
        acc, m, total, page = attend_keys(
            acc, m, total, page, q, row_pos, block_row_ptr, k_head_ptr, v_head_ptr, first_key, end_key, lo, edge,
            scale_log2, soft_cap, K_STRIDE_PAGE, K_STRIDE_TOKEN, V_STRIDE_PAGE, V_STRIDE_TOKEN,
            PAGE, HEAD_SIZE, HEAD_PADDED, WINDOW, SOFT_CAP, BLOCK_N, PRECISION, False,
        )  # fmt: skip
        lo = edge
    acc, m, total, page = attend_keys(
        acc, m, total, page, q, row_pos, block_row_ptr, k_head_ptr, v_head_ptr, first_key, end_key, lo, hi,
        scale_log2, soft_cap, K_STRIDE_PAGE, K_STRIDE_TOKEN, V_STRIDE_PAGE, V_STRIDE_TOKEN,
        PAGE, HEAD_SIZE, HEAD_PADDED, WINDOW, SOFT_CAP, BLOCK_N, PRECISION, True,
    )  # fmt: skip
    return acc, m, total


@kernel(
    tensors="q_ptr k_ptr v_ptr out_ptr lse_ptr sinks_ptr block_table_ptr seq_lens_ptr query_start_ptr",
    numbers="scale_log2 soft_cap num_reqs block_table_stride tiles_per_split",
)
def paged_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sinks_ptr, block_table_ptr, seq_lens_ptr, query_start_ptr,
    scale_log2, soft_cap, num_reqs, block_table_stride, tiles_per_split,
    Q_STRIDE_TOKEN: tl.constexpr, Q_STRIDE_HEAD: tl.constexpr,
    K_STRIDE_PAGE: tl.constexpr, K_STRIDE_TOKEN: tl.constexpr, K_STRIDE_HEAD: tl.constexpr,
    V_STRIDE_PAGE: tl.constexpr, V_STRIDE_TOKEN: tl.constexpr, V_STRIDE_HEAD: tl.constexpr,
    OUT_STRIDE_TOKEN: tl.constexpr, OUT_STRIDE_HEAD: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, SINKS: tl.constexpr, WRITE_LSE: tl.constexpr,
    ONE_TOKEN: tl.constexpr, MAX_REQS: tl.constexpr, SPLIT: tl.constexpr, FIXED_RANGES: tl.constexpr,
    INTERIOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of query rows; with SPLIT one slice of its keys, as a partial result for `merge_splits_kernel`.

    Grid: (tiles × KV heads × head tiles, splits). KV heads vary fastest, so that neighbours in time read neighbours in
    memory. With ONE_TOKEN no request brings more than one token and tile i is request i. MAX_REQS is a power of two
    ≥ num_reqs. With SPLIT, out is fp32 `[num_tokens, NUM_HEADS, splits, HEAD_SIZE]` and lse, in base 2, always written,
    `[num_tokens, NUM_HEADS, splits]`; a split with nothing to see writes only its LSE, −inf. The splits share the keys
    that the tile sees; with FIXED_RANGES each has its own `tiles_per_split` tiles, counted from key 0, whatever the
    tile sees. INTERIOR: see `attend_tile`.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    ROW_HEADS: tl.constexpr = GROUP if GROUP < BLOCK_M else BLOCK_M
    BLOCK_Q: tl.constexpr = BLOCK_M // ROW_HEADS
    HEAD_TILES: tl.constexpr = (GROUP + ROW_HEADS - 1) // ROW_HEADS

    pid = tl.program_id(0)
    # From the last tile down: with causal attention a request's last tiles take longest, and what starts late should
    # be short.
    tile = tl.num_programs(0) // (NUM_KV_HEADS * HEAD_TILES) - 1 - pid // (NUM_KV_HEADS * HEAD_TILES)
    kv_head = pid % (NUM_KV_HEADS * HEAD_TILES) // HEAD_TILES
    head_tile = pid % HEAD_TILES

    if ONE_TOKEN:
        req = tile
        query_start = tl.load(query_start_ptr + req)
        first_query = 0
    else:
        # The requests that begin at or before this tile, counted: begins are strictly increasing, so the last of them
        # is the one. One vector load instead of a chain of dependent ones.
        i = tl.arange(0, MAX_REQS)
        begins = tl.load(query_start_ptr + i, mask=i < num_reqs, other=0) // BLOCK_Q + i
        req = tl.sum(((begins <= tile) & (i < num_reqs)).to(tl.int32), 0) - 1
        query_start = tl.load(query_start_ptr + req)
        first_query = (tile - (query_start // BLOCK_Q + req)) * BLOCK_Q
    query_len = tl.load(query_start_ptr + req + 1) - query_start
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + req)

    rows = tl.arange(0, BLOCK_M)
    row_query = first_query + rows // ROW_HEADS
    row_group_head = head_tile * ROW_HEADS + rows % ROW_HEADS
    row_ok = (rows < BLOCK_Q * ROW_HEADS) & (row_query < query_len) & (row_group_head < GROUP)
    row_token = (query_start + row_query).to(tl.int64)
    row_head = kv_head * GROUP + row_group_head
    row_pos = seq_len - query_len + row_query

    # Keys that some row of the tile sees.
    last_query = tl.minimum(first_query + BLOCK_Q, query_len) - 1
    end_key = tl.minimum(seq_len, seq_len - query_len + last_query + 1)
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(0, seq_len - query_len + first_query - WINDOW + 1)
    lo = first_key // BLOCK_N * BLOCK_N
    hi = end_key
    if SPLIT:
        split = tl.program_id(1)
        splits = tl.num_programs(1)
        if FIXED_RANGES:
            begin = split * tiles_per_split * BLOCK_N
            hi = tl.minimum(begin + tiles_per_split * BLOCK_N, end_key)
            lo = tl.maximum(lo, begin)
        else:
            per_split = tl.cdiv(tl.cdiv(tl.maximum(end_key - lo, 0), BLOCK_N), splits) * BLOCK_N
            lo += split * per_split
            hi = tl.minimum(lo + per_split, end_key)
        part = (row_token * NUM_HEADS + row_head) * splits + split
        if lo >= hi:
            tl.store(lse_ptr + part, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=row_ok)
            return

    offs_d = tl.arange(0, HEAD_PADDED)
    row_mask = row_ok[:, None] if HEAD_SIZE == HEAD_PADDED else row_ok[:, None] & (offs_d < HEAD_SIZE)[None, :]
    q_rows = row_token * Q_STRIDE_TOKEN + row_head * Q_STRIDE_HEAD
    q = tl.load(q_ptr + q_rows[:, None] + offs_d[None, :], mask=row_mask, other=0.0)
    acc, m, total = attend_tile(
        q, row_pos, seq_len - query_len + first_query, block_table_ptr + req.to(tl.int64) * block_table_stride,
        k_ptr + kv_head.to(tl.int64) * K_STRIDE_HEAD, v_ptr + kv_head.to(tl.int64) * V_STRIDE_HEAD,
        first_key, end_key, lo, hi, scale_log2, soft_cap,
        K_STRIDE_PAGE, K_STRIDE_TOKEN, V_STRIDE_PAGE, V_STRIDE_TOKEN,
        PAGE, HEAD_SIZE, HEAD_PADDED, WINDOW, SOFT_CAP, BLOCK_M, BLOCK_N, PRECISION, INTERIOR,
    )  # fmt: skip

    if SPLIT:
        lse = tl.where(total > 0, m + tl.log2(total), float("-inf"))
        tl.store(lse_ptr + part, lse, mask=row_ok)
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out_ptr + part[:, None] * HEAD_SIZE + offs_d[None, :], acc, mask=row_mask)
    else:
        if SINKS:
            # A sink is one more logit in the denominator, with no value; it does not make an empty row see something.
            sink = tl.load(sinks_ptr + row_head, mask=row_ok, other=0.0).to(tl.float32) * 1.4426950408889634
            m_new = tl.where(total > 0, tl.maximum(m, sink), m)
            alpha = tl.where(total > 0, tl.exp2(m - m_new), 0.0)
            total = tl.where(total > 0, total * alpha + tl.exp2(sink - m_new), 0.0)
            acc = acc * alpha[:, None]
            m = m_new
        if WRITE_LSE:
            lse = tl.where(total > 0, (m + tl.log2(total)) * 0.6931471805599453, float("-inf"))
            tl.store(lse_ptr + row_token * NUM_HEADS + row_head, lse, mask=row_ok)
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        out_rows = row_token * OUT_STRIDE_TOKEN + row_head * OUT_STRIDE_HEAD
        tl.store(
            out_ptr + out_rows[:, None] + offs_d[None, :], acc.to(out_ptr.dtype.element_ty), mask=row_mask
        )  # fmt: skip


@kernel(tensors="part_ptr part_lse_ptr out_ptr lse_ptr sinks_ptr query_start_ptr", numbers="num_reqs splits")
def merge_splits_kernel(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, sinks_ptr, query_start_ptr, num_reqs, splits,
    OUT_STRIDE_TOKEN: tl.constexpr, OUT_STRIDE_HEAD: tl.constexpr,
    NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr,
    SINKS: tl.constexpr, WRITE_LSE: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of one (token, head) by their LSEs; the neutral element is (0, −inf).

    Grid: num_tokens × NUM_HEADS. A partial output whose LSE is −inf is not read: nobody wrote it.
    """
    pid = tl.program_id(0).to(tl.int64)
    token = pid // NUM_HEADS
    head = pid % NUM_HEADS
    if token >= tl.load(query_start_ptr + num_reqs):
        return
    offs_s = tl.arange(0, BLOCK_S)
    offs_d = tl.arange(0, HEAD_PADDED)
    m = float("-inf")
    total = 0.0
    acc = tl.zeros([HEAD_PADDED], tl.float32)
    for start in range(0, splits, BLOCK_S):
        part = pid * splits + start + offs_s
        lse = tl.load(part_lse_ptr + part, mask=start + offs_s < splits, other=float("-inf"))
        live = lse > float("-inf")
        mask = live[:, None] & (offs_d < HEAD_SIZE)[None, :]
        x = tl.load(part_ptr + part[:, None] * HEAD_SIZE + offs_d[None, :], mask=mask, other=0.0)
        m_new = tl.maximum(m, tl.max(lse, 0))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        w = tl.exp2(lse - m_safe)
        alpha = tl.exp2(m - m_safe)
        total = total * alpha + tl.sum(w, 0)
        acc = acc * alpha + tl.sum(x * w[:, None], 0)
        m = m_new
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        m_new = tl.where(total > 0, tl.maximum(m, sink), m)
        alpha = tl.where(total > 0, tl.exp2(m - m_new), 0.0)
        total = tl.where(total > 0, total * alpha + tl.exp2(sink - m_new), 0.0)
        acc = acc * alpha
        m = m_new
    if WRITE_LSE:
        lse_out = tl.where(total > 0, (m + tl.log2(total)) * 0.6931471805599453, float("-inf"))
        tl.store(lse_ptr + pid, lse_out)
    acc = acc / tl.where(total > 0, total, 1.0)
    tl.store(
        out_ptr + token * OUT_STRIDE_TOKEN + head * OUT_STRIDE_HEAD + offs_d,
        acc.to(out_ptr.dtype.element_ty), mask=offs_d < HEAD_SIZE,
    )  # fmt: skip
