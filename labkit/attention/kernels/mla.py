"""Multi-head latent attention in its absorbed form over a paged cache of latents: one kernel, split over keys or not.

Every query head reads the same row of a token: `RANK` numbers of the latent, which are key and value at once, then
`ROPE` numbers of rotated key. A tile of keys is loaded once and used for both products. The kernel refuses to know
where the latents come from and what becomes of the result; how tiles are laid over requests is that of
`labkit.attention.kernels.paged`, whose merge of splits serves here, too.

Scores are kept in base 2, as there.
"""

from __future__ import annotations

from typing import Any

from labkit.launch import DeviceFunction, kernel

tl: Any = None  # `triton.language` once a kernel has been launched


@DeviceFunction
def attend_latents(
    q_c, q_r, row_pos, block_row_ptr, kv_ptr, end_key, lo, hi, scale_log2,
    KV_STRIDE_PAGE: tl.constexpr, KV_STRIDE_TOKEN: tl.constexpr, PAGE: tl.constexpr,
    RANK: tl.constexpr, ROPE: tl.constexpr, RANK_PADDED: tl.constexpr, ROPE_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Softmax of a tile's rows over keys [lo, hi): unnormalised output `[BLOCK_M, RANK_PADDED]`, maximum and sum.

    Keys at or beyond `end_key` are not loaded: what lies there may hold NaN.
    """
    offs_n = tl.arange(0, BLOCK_N)
    offs_c = tl.arange(0, RANK_PADDED)
    offs_r = tl.arange(0, ROPE_PADDED)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, RANK_PADDED], tl.float32)
    # One tile ahead, as in `paged.attend_tile`: a load behind a load would cost the pipeline a stage.
    page = tl.load(block_row_ptr + (lo + offs_n) // PAGE, mask=lo + offs_n < end_key, other=0)
    for start in range(lo, hi, BLOCK_N):
        keys = start + offs_n
        live = keys < end_key
        rows = page.to(tl.int64) * KV_STRIDE_PAGE + (keys % PAGE).to(tl.int64) * KV_STRIDE_TOKEN
        c_mask = live[:, None] if RANK == RANK_PADDED else live[:, None] & (offs_c < RANK)[None, :]
        r_mask = live[:, None] if ROPE == ROPE_PADDED else live[:, None] & (offs_r < ROPE)[None, :]
        c = tl.load(kv_ptr + rows[:, None] + offs_c[None, :], mask=c_mask, other=0.0)
        r = tl.load(kv_ptr + rows[:, None] + RANK + offs_r[None, :], mask=r_mask, other=0.0)
        page = tl.load(block_row_ptr + (keys + BLOCK_N) // PAGE, mask=keys + BLOCK_N < end_key, other=0)
        s = tl.dot(q_r, tl.trans(r), input_precision=PRECISION)
        s = tl.dot(q_c, tl.trans(c), s, input_precision=PRECISION) * scale_log2
        s = tl.where(live[None, :] & (keys[None, :] <= row_pos[:, None]), s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # −inf less itself would be NaN
        p = tl.exp2(s - m_safe[:, None])
        alpha = tl.exp2(m - m_safe)
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(c.dtype), c, input_precision=PRECISION)
        m = m_new
    return acc, m, total


@kernel(
    tensors="q_ptr kv_ptr out_ptr lse_ptr block_table_ptr seq_lens_ptr query_start_ptr",
    numbers="scale_log2 num_reqs block_table_stride",
)
def mla_attention_kernel(
    q_ptr, kv_ptr, out_ptr, lse_ptr, block_table_ptr, seq_lens_ptr, query_start_ptr,
    scale_log2, num_reqs, block_table_stride,
    Q_STRIDE_TOKEN: tl.constexpr, Q_STRIDE_HEAD: tl.constexpr,
    KV_STRIDE_PAGE: tl.constexpr, KV_STRIDE_TOKEN: tl.constexpr,
    OUT_STRIDE_TOKEN: tl.constexpr, OUT_STRIDE_HEAD: tl.constexpr,
    NUM_HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    RANK_PADDED: tl.constexpr, ROPE_PADDED: tl.constexpr, PAGE: tl.constexpr,
    WRITE_LSE: tl.constexpr, ONE_TOKEN: tl.constexpr, MAX_REQS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of (query token, head) rows; with SPLIT one slice of its keys, a partial result for the merge.

    Grid: (tiles × head tiles, splits). With ONE_TOKEN no request brings more than one token and tile i is request i.
    MAX_REQS is a power of two ≥ num_reqs. With SPLIT, out is fp32 `[num_tokens, NUM_HEADS, splits, RANK]` and lse, in
    base 2, `[num_tokens, NUM_HEADS, splits]`; a split with nothing to see writes only its LSE, −inf.
    """
    ROW_HEADS: tl.constexpr = NUM_HEADS if NUM_HEADS < BLOCK_M else BLOCK_M
    BLOCK_Q: tl.constexpr = BLOCK_M // ROW_HEADS
    HEAD_TILES: tl.constexpr = (NUM_HEADS + ROW_HEADS - 1) // ROW_HEADS

    pid = tl.program_id(0)
    # The longest tiles of a chunk first, the head tiles of one token together: they read the same latents.
    tile = tl.num_programs(0) // HEAD_TILES - 1 - pid // HEAD_TILES
    head_tile = pid % HEAD_TILES
    if ONE_TOKEN:
        req = tile
        query_start = tl.load(query_start_ptr + req)
        first_query = 0
    else:
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
    row_head = head_tile * ROW_HEADS + rows % ROW_HEADS
    row_ok = (rows < BLOCK_Q * ROW_HEADS) & (row_query < query_len) & (row_head < NUM_HEADS)
    row_token = (query_start + row_query).to(tl.int64)
    row_pos = seq_len - query_len + row_query

    last_query = tl.minimum(first_query + BLOCK_Q, query_len) - 1
    end_key = tl.minimum(seq_len, seq_len - query_len + last_query + 1)
    lo = 0
    hi = end_key
    if SPLIT:
        split = tl.program_id(1)
        splits = tl.num_programs(1)
        per_split = tl.cdiv(tl.cdiv(tl.maximum(end_key, 0), BLOCK_N), splits) * BLOCK_N
        lo = split * per_split
        hi = tl.minimum(lo + per_split, end_key)
        part = (row_token * NUM_HEADS + row_head) * splits + split
        if lo >= hi:
            tl.store(lse_ptr + part, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=row_ok)
            return

    offs_c = tl.arange(0, RANK_PADDED)
    offs_r = tl.arange(0, ROPE_PADDED)
    c_mask = row_ok[:, None] if RANK == RANK_PADDED else row_ok[:, None] & (offs_c < RANK)[None, :]
    r_mask = row_ok[:, None] if ROPE == ROPE_PADDED else row_ok[:, None] & (offs_r < ROPE)[None, :]
    q_rows = row_token * Q_STRIDE_TOKEN + row_head * Q_STRIDE_HEAD
    q_c = tl.load(q_ptr + q_rows[:, None] + offs_c[None, :], mask=c_mask, other=0.0)
    q_r = tl.load(q_ptr + q_rows[:, None] + RANK + offs_r[None, :], mask=r_mask, other=0.0)
    acc, m, total = attend_latents(
        q_c, q_r, row_pos, block_table_ptr + req.to(tl.int64) * block_table_stride, kv_ptr, end_key, lo, hi, scale_log2,
        KV_STRIDE_PAGE, KV_STRIDE_TOKEN, PAGE, RANK, ROPE, RANK_PADDED, ROPE_PADDED, BLOCK_M, BLOCK_N, PRECISION,
    )  # fmt: skip

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if SPLIT:
        tl.store(lse_ptr + part, tl.where(total > 0, m + tl.log2(total), float("-inf")), mask=row_ok)
        tl.store(out_ptr + part[:, None] * RANK + offs_c[None, :], acc, mask=c_mask)
    else:
        if WRITE_LSE:
            lse = tl.where(total > 0, (m + tl.log2(total)) * 0.6931471805599453, float("-inf"))
            tl.store(lse_ptr + row_token * NUM_HEADS + row_head, lse, mask=row_ok)
        out_rows = row_token * OUT_STRIDE_TOKEN + row_head * OUT_STRIDE_HEAD
        tl.store(out_ptr + out_rows[:, None] + offs_c[None, :], acc.to(out_ptr.dtype.element_ty), mask=c_mask)
