"""The kernels of the experts compiled for cards that are not here: tensor cores, registers, shared memory.

Run as a module without TRITON_INTERPRET it prints the figures as JSON; the tests start it so, since Triton cannot
interpret and compile in one process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from labkit.attention.kernels.tiles import shared_memory_limit
from labkit.models import moe_kernels, moe_launch
from tests.kernels.aot import Case, capability, compile_case

#: No tensor cores in Triton, operands from shared memory, operands from registers. Others compile as one of these.
ARCHS = (75, 90, 120)
QWEN3 = dict(hidden=2048, width=768, experts=128, top_k=8)


def route(biased: bool) -> Case:
    """DeepSeek-V3's router, 256 experts in 8 groups; or Qwen3-MoE's."""
    types = dict(logits_ptr="*fp32", bias_ptr="*fp32", slots_ptr="*i64", ids_ptr="*i32", weights_ptr="*fp32",
                 scale="fp32")  # fmt: skip
    experts, groups = (256, 8) if biased else (128, 1)
    constants = dict(EXPERTS=experts, TOP_K=8, GROUPS=groups, TOP_GROUPS=4 if biased else 1, SCORING=int(biased),
                     LOGIT_BIAS=False, CHOICE_BIAS=biased, RENORMALIZE=True, SLOTS=True, BLOCK_E=experts,
                     BLOCK_K=8)  # fmt: skip
    return Case(moe_kernels.moe_route_kernel, types, constants, 1, 1)


def logits(dtype: str) -> Case:
    types = dict(x_ptr=f"*{dtype}", gate_ptr=f"*{dtype}", logits_ptr="*fp32")
    constants = dict(X_STRIDE=2048, HIDDEN=2048, EXPERTS=128, BLOCK_E=4, BLOCK_K=1024)
    return Case(moe_kernels.moe_logits_kernel, types, constants, 4, 1)


def align(counted: bool) -> Case:
    types = dict(ids_ptr="*i32", counts_ptr="*i32", sorted_ptr="*i32", experts_ptr="*i32", total_ptr="*i32",
                 num_pairs="i32")  # fmt: skip
    constants = dict(EXPERTS=128, BLOCK_M=16, COUNTED=counted, CHUNK=1024 if counted else 64, BLOCK_E=128)
    return Case(moe_kernels.moe_align_kernel, types, constants, 4, 1)


def count() -> Case:
    types = dict(ids_ptr="*i32", counts_ptr="*i32", num_pairs="i32")
    return Case(moe_kernels.moe_count_kernel, types, dict(CHUNK=1024), 4, 1)


def pairs(dtype: str, up: bool) -> Case:
    p, h, w = f"*{dtype}", QWEN3["hidden"], QWEN3["width"]
    if up:
        types = dict(x_ptr=p, weight_ptr=p, bias_ptr=p, ids_ptr="*i32", out_ptr=p, limit="fp32")
        constants = dict(X_STRIDE=h, HIDDEN=h, WIDTH=w, TOP_K=8, INTERLEAVED=False, BIAS=False, CLAMP=False,
                         BLOCK_N=4, BLOCK_K=512)  # fmt: skip
        return Case(moe_kernels.moe_gate_up_pairs_kernel, types, constants, 4, 1)
    types = dict(x_ptr=p, weight_ptr=p, bias_ptr=p, ids_ptr="*i32", weights_ptr="*fp32", shared_ptr=p, out_ptr=p)
    constants = dict(HIDDEN=h, WIDTH=w, TOP_K=8, BIAS=False, SHARED=True, BLOCK_N=4, BLOCK_K=1024)
    return Case(moe_kernels.moe_down_tokens_kernel, types, constants, 4, 1)


def grouped(arch: int, dtype: str, tokens: int, *, up: bool, gpt_oss: bool = False) -> Case:
    p, h, w = f"*{dtype}", QWEN3["hidden"], QWEN3["width"]
    types = dict(x_ptr=p, weight_ptr=p, bias_ptr=p, weights_ptr="*fp32", sorted_ptr="*i32", experts_ptr="*i32",
                 total_ptr="*i32", out_ptr=p, num_pairs="i32", num_blocks="i32", limit="fp32")  # fmt: skip
    tile = moe_launch.choose_tile(tokens * 8, QWEN3["experts"], 4 if dtype == "fp32" else 2, capability(arch))
    inner, width = (h, w) if up else (w, h)
    constants = dict(X_STRIDE=inner, INNER=inner, WIDTH=width, TOP_K=8, GATED=up, INTERLEAVED=gpt_oss, BIAS=gpt_oss,
                     CLAMP=gpt_oss, PRECISION="ieee" if dtype == "fp32" else "tf32", BLOCK_M=tile.block_m,
                     BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP_M=8)  # fmt: skip
    return Case(moe_kernels.moe_grouped_kernel, types, constants, tile.num_warps, tile.num_stages)


def total(dtype: str) -> Case:
    p = f"*{dtype}"
    types = dict(parts_ptr=p, ids_ptr="*i32", shared_ptr=p, out_ptr=p)
    return Case(moe_kernels.moe_sum_kernel, types, dict(HIDDEN=2048, TOP_K=8, SHARED=True, BLOCK=1024), 4, 1)


def cases(arch: int) -> dict[str, Case]:
    """Every kernel, in fp16 on sm_75 and bf16 elsewhere; the rest of the forms on Hopper only."""
    dtype = "fp16" if arch == 75 else "bf16"
    out = {
        "route-groups": route(True), "align": align(False), "pairs-up": pairs(dtype, True),
        "pairs-down": pairs(dtype, False), "prefill-up": grouped(arch, dtype, 8192, up=True), "sum": total(dtype),
    }  # fmt: skip
    if arch != 75:
        out["decode-up"] = grouped(arch, dtype, 32, up=True)
    if arch == 90:
        out |= {
            "route": route(False), "logits": logits(dtype), "count": count(), "align-counted": align(True),
            "prefill-down": grouped(arch, dtype, 8192, up=False), "decode-down": grouped(arch, dtype, 32, up=False),
            "middle-up": grouped(arch, dtype, 512, up=True), "large-up": grouped(arch, dtype, 1500, up=True),
            "gpt-oss-up": grouped(arch, dtype, 32, up=True, gpt_oss=True), "fp32": grouped(arch, "fp32", 64, up=True),
        }  # fmt: skip
    return out


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    pytest.importorskip("triton")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.models.test_moe_aot", *map(str, ARCHS)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_compiles_within_the_card(compiled: list[dict[str, Any]], arch: int) -> None:
    here = [r for r in compiled if r["arch"] == arch]
    assert {r["case"] for r in here} == set(cases(arch))
    for r in here:
        assert r["shared"] <= shared_memory_limit(capability(arch)), r
        assert r["stack"] <= 32, f"spills: {r}"


def test_tensor_cores_from_sm_80_on(compiled: list[dict[str, Any]]) -> None:
    for r in compiled:
        if r["kernel"] == "moe_grouped_kernel":
            assert bool(r["mma"]) == (r["arch"] >= 80 and r["case"] != "fp32"), r


def test_weights_arrive_by_wide_loads(compiled: list[dict[str, Any]]) -> None:
    """16 bytes at a time: what few tokens take is the time of reading weights."""
    for r in compiled:
        if (
            r["kernel"] in ("moe_grouped_kernel", "moe_gate_up_pairs_kernel", "moe_down_tokens_kernel")
            and r["arch"] >= 80
        ):
            assert r["wide_loads"] >= 2, r


if __name__ == "__main__":
    print(json.dumps([compile_case(case, int(arch))[1] | {"case": name}
                      for arch in sys.argv[1:] for name, case in cases(int(arch)).items()]))  # fmt: skip
