"""The kernels of latent attention compiled for GPUs that are not here, as `tests.kernels.aot` does it. Not a test.

Run as `python -m tests.kernels.mla_aot ARCH...` without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import sys

from labkit.attention.kernels import mla, mla_chunks, mla_latent
from labkit.attention.kernels.mla_tiles import choose_latent_tile
from labkit.attention.kernels.tiles import shared_memory_limit
from labkit.attention.mla.chunks import chunk_tile
from labkit.launch import next_power_of_2
from tests.kernels.aot import Case, capability, compile_case

RANK, ROPE, NOPE, V = 512, 64, 128, 128


def absorbed(arch: int, dtype: str, heads: int, *, split: bool, one_token: bool) -> tuple[Case, int]:
    """The case, and what the tile was expected to take of shared memory."""
    itemsize = 4 if dtype == "fp32" else 2
    tile = choose_latent_tile(RANK, ROPE, itemsize, heads, shared_memory_limit(capability(arch)))
    assert tile is not None
    width, p = RANK + ROPE, f"*{dtype}"
    constants = dict(
        Q_STRIDE_TOKEN=heads * width + 8, Q_STRIDE_HEAD=width, KV_STRIDE_PAGE=64 * width + 24,
        KV_STRIDE_TOKEN=width + 40, OUT_STRIDE_TOKEN=heads * RANK + 56, OUT_STRIDE_HEAD=RANK, NUM_HEADS=heads,
        RANK=RANK, ROPE=ROPE, RANK_PADDED=next_power_of_2(RANK), ROPE_PADDED=next_power_of_2(ROPE), PAGE=64,
        WRITE_LSE=not split, ONE_TOKEN=one_token, MAX_REQS=256, SPLIT=split, BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n, PRECISION="ieee" if dtype == "fp32" else "tf32",
    )  # fmt: skip
    types = dict(
        q_ptr=p, kv_ptr=p, out_ptr="*fp32" if split else p, lse_ptr="*fp32", block_table_ptr="*i32",
        seq_lens_ptr="*i32", query_start_ptr="*i32", scale_log2="fp32", num_reqs="i32", block_table_stride="i32",
    )  # fmt: skip
    case = Case(mla.mla_attention_kernel, types, constants, tile.num_warps, tile.num_stages)
    return case, tile.shared_bytes(RANK, ROPE, itemsize)


def chunks(arch: int, dtype: str, longest: int, heads: int = 16) -> Case:
    block_m, block_n, warps, stages = chunk_tile(longest, 4 if dtype == "fp32" else 2, capability(arch))
    p = f"*{dtype}"
    constants = dict(
        Q_STRIDE_TOKEN=heads * (NOPE + ROPE) + 8, Q_STRIDE_HEAD=NOPE + ROPE, KV_STRIDE_TOKEN=heads * (NOPE + V) + 24,
        KV_STRIDE_HEAD=NOPE + V, LATENT_STRIDE_TOKEN=RANK + ROPE + 40, OUT_STRIDE_TOKEN=heads * V + 56,
        OUT_STRIDE_HEAD=V, NUM_HEADS=heads, RANK=RANK, NOPE=NOPE, ROPE=ROPE, V=V, NOPE_PADDED=NOPE, ROPE_PADDED=ROPE,
        V_PADDED=V, BLOCK_M=block_m, BLOCK_N=block_n, PRECISION="ieee" if dtype == "fp32" else "tf32",
    )  # fmt: skip
    types = dict(
        q_ptr=p, kv_ptr=p, latent_ptr=p, out_ptr=p, lse_ptr="*fp32", piece_ptr="*i32", scale_log2="fp32"
    )  # fmt: skip
    return Case(mla_chunks.mla_chunks_kernel, types, constants, warps, stages)


def latent(dtype: str, *, ready: bool, heads: int = 16) -> Case:
    p = f"*{dtype}"
    constants = dict(
        Q_STRIDE_TOKEN=heads * (NOPE + ROPE) + 8, Q_STRIDE_HEAD=NOPE + ROPE, LATENT_STRIDE_TOKEN=3672,
        CACHE_STRIDE_PAGE=64 * (RANK + ROPE) + 40, CACHE_STRIDE_TOKEN=RANK + ROPE + 56, PAGE=64, NUM_HEADS=heads,
        RANK=RANK, ROPE=ROPE, READY=ready, RANK_PADDED=RANK, HALF_PADDED=ROPE // 2, BLOCK_H=mla_latent.BLOCK_H,
    )  # fmt: skip
    types = dict(
        q_ptr=p, latent_ptr=p, weight_ptr=p, positions_ptr="*i32", cos_sin_ptr="*fp32", cache_ptr=p, slots_ptr="*i64",
        eps="fp32",
    )  # fmt: skip
    return Case(mla_latent.mla_latent_kernel, types, constants, 4, 1)


def figures(arch: int) -> list[dict[str, object]]:
    """Every kernel in the forms an engine would compile on this architecture."""
    out = []
    absorbing = {
        "decode": absorbed(arch, "bf16", 16, split=True, one_token=True),
        "128-heads": absorbed(arch, "bf16", 128, split=False, one_token=False),
    }
    if arch == 90:
        absorbing["fp32"] = absorbed(arch, "fp32", 16, split=True, one_token=True)
    for name, made in absorbing.items():
        case, estimate = made
        out.append(compile_case(case, arch)[1] | {"case": name, "estimate": estimate})
    others = {"chunks": chunks(arch, "bf16", 4096), "latent": latent("bf16", ready=False)}
    return [*out, *(compile_case(case, arch)[1] | {"case": name} for name, case in others.items())]


if __name__ == "__main__":
    print(json.dumps([figure for arch in sys.argv[1:] for figure in figures(int(arch))]))
