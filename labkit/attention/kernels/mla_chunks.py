"""Attention of chunks over keys and values that were expanded from latents, piece by piece. Refuses to know pages.

The expanded form of multi-head latent attention: each head has keys and values of its own for a while, `[keys, heads,
NOPE + V]` as the up-projection leaves them, and all heads share the rotated part of the key. A *piece* holds the keys
of some requests, of a long one a range; what earlier pieces gave a row is merged by its log-sum-exp.
"""

from __future__ import annotations

from typing import Any

from labkit.launch import kernel

tl: Any = None  # `triton.language` once a kernel has been launched


@kernel(tensors="q_ptr kv_ptr latent_ptr out_ptr lse_ptr piece_ptr", numbers="scale_log2")
def mla_chunks_kernel(
    q_ptr, kv_ptr, latent_ptr, out_ptr, lse_ptr, piece_ptr, scale_log2,
    Q_STRIDE_TOKEN: tl.constexpr, Q_STRIDE_HEAD: tl.constexpr,
    KV_STRIDE_TOKEN: tl.constexpr, KV_STRIDE_HEAD: tl.constexpr, LATENT_STRIDE_TOKEN: tl.constexpr,
    OUT_STRIDE_TOKEN: tl.constexpr, OUT_STRIDE_HEAD: tl.constexpr,
    NUM_HEADS: tl.constexpr, RANK: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, V: tl.constexpr,
    NOPE_PADDED: tl.constexpr, ROPE_PADDED: tl.constexpr, V_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_M query tokens of one request and one head, over the keys that the piece has of the request.

    Grid: (tiles of the longest request, heads, requests of the piece). `piece_ptr` is int32 `[requests, 6]`: first
    query row, queries, the position of the first query, first key row in the piece, position of that key, keys.
    A request whose first key is at position 0 starts anew, any other goes on with what `out` and `lse` hold.
    `lse`: fp32 `[num_tokens, NUM_HEADS]`, base 2.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row_ptr = piece_ptr + tl.program_id(2) * 6
    query_start = tl.load(row_ptr)
    query_len = tl.load(row_ptr + 1)
    first_pos = tl.load(row_ptr + 2)
    key_row = tl.load(row_ptr + 3)
    key_pos = tl.load(row_ptr + 4)
    num_keys = tl.load(row_ptr + 5)
    first = tile * BLOCK_M
    if first >= query_len:
        return
    offs_m = first + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, NOPE_PADDED)
    offs_r = tl.arange(0, ROPE_PADDED)
    offs_v = tl.arange(0, V_PADDED)
    row_ok = offs_m < query_len
    token = (query_start + offs_m).to(tl.int64)
    # Keys of the piece that a row sees: those of positions ≤ its own.
    row_end = first_pos + offs_m - key_pos + 1
    end = tl.minimum(num_keys, first_pos + tl.minimum(first + BLOCK_M, query_len) - key_pos)

    q_rows = q_ptr + token * Q_STRIDE_TOKEN + head * Q_STRIDE_HEAD
    q_n = tl.load(q_rows[:, None] + offs_d[None, :], mask=row_ok[:, None] & (offs_d < NOPE)[None, :], other=0.0)
    q_r = tl.load(q_rows[:, None] + NOPE + offs_r[None, :], mask=row_ok[:, None] & (offs_r < ROPE)[None, :], other=0.0)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, V_PADDED], tl.float32)
    kv_head_ptr = kv_ptr + head * KV_STRIDE_HEAD
    for start in range(0, end, BLOCK_N):
        keys = start + offs_n
        live = keys < num_keys
        at = (key_row + keys).to(tl.int64)
        kv_rows = kv_head_ptr + at * KV_STRIDE_TOKEN
        k_n = tl.load(kv_rows[:, None] + offs_d[None, :], mask=live[:, None] & (offs_d < NOPE)[None, :], other=0.0)
        k_r = tl.load(
            latent_ptr + (at * LATENT_STRIDE_TOKEN)[:, None] + RANK + offs_r[None, :],
            mask=live[:, None] & (offs_r < ROPE)[None, :], other=0.0,
        )  # fmt: skip
        v = tl.load(kv_rows[:, None] + NOPE + offs_v[None, :], mask=live[:, None] & (offs_v < V)[None, :], other=0.0)
        s = tl.dot(q_r, tl.trans(k_r), input_precision=PRECISION)
        s = tl.dot(q_n, tl.trans(k_n), s, input_precision=PRECISION) * scale_log2
        s = tl.where(live[None, :] & (keys[None, :] < row_end[:, None]), s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - m_safe[:, None])
        alpha = tl.exp2(m - m_safe)
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        m = m_new

    out_mask = row_ok[:, None] & (offs_v < V)[None, :]
    out_at = out_ptr + (token * OUT_STRIDE_TOKEN + head * OUT_STRIDE_HEAD)[:, None] + offs_v[None, :]
    lse_at = lse_ptr + token * NUM_HEADS + head
    if key_pos > 0:
        # Earlier pieces count like one more key, of weight 2^lse and value out.
        before = tl.load(lse_at, mask=row_ok, other=float("-inf"))
        m_new = tl.maximum(m, before)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - m_safe)
        weight = tl.exp2(before - m_safe)
        earlier = tl.load(out_at, mask=out_mask & (before > float("-inf"))[:, None], other=0.0).to(tl.float32)
        acc = acc * alpha[:, None] + earlier * weight[:, None]
        total = total * alpha + weight
        m = m_new
    tl.store(lse_at, tl.where(total > 0, m + tl.log2(total), float("-inf")), mask=row_ok)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=out_mask)
