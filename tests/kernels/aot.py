"""Compiles kernels for GPUs that are not there, in a process of its own, and prints figures as JSON. Not a test itself.

Triton compiles for any target without a driver, but not in a process whose Triton interprets. Run as
`python -m tests.kernels.aot ARCH...` without TRITON_INTERPRET.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

from labkit.attention.kernels import paged
from labkit.attention.kernels.tiles import Tile, choose_tile, has_interior_loop, shared_memory_limit
from labkit.launch import Kernel, next_power_of_2
from labkit.models import kernels as model_kernels
from labkit.paging import cache_write

ARCHS = (75, 80, 89, 90, 100, 120)


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel with its constants, for one dtype: what a launch would compile."""

    kernel: Kernel
    types: dict[str, str]  # tensor or number → Triton's type name
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    tile: Tile | None = None


def capability(arch: int) -> tuple[int, int]:
    return arch // 10, arch % 10


def strides(name: str, row: int, head: int, extra: int, page: int = 0) -> dict[str, int]:
    """Strides of a view whose rows are `extra` wider than they need: no two strides of a kernel are the same number."""
    out = {f"{name}_STRIDE_PAGE": page * (row + extra) + extra} if page else {}
    return out | {f"{name}_STRIDE_TOKEN": row + extra, f"{name}_STRIDE_HEAD": head}


def attention(
    arch: int, dtype: str, heads: tuple[int, int, int], *, rows: int, split: bool = False, one_token: bool = False,
    window: int = 0, soft_cap: bool = False, sinks: bool = False, lse: bool = False, page: int = 16,
    invariant: bool = False,
) -> Case:  # fmt: skip
    num_heads, num_kv_heads, size = heads
    itemsize = 4 if dtype == "fp32" else 2
    tile = choose_tile(size, itemsize, rows, shared_memory_limit(capability(arch)), capability(arch))
    assert tile is not None
    constants = dict(
        **strides("Q", num_heads * size, size, 8),
        **strides("K", num_kv_heads * size, size, 24, page), **strides("V", num_kv_heads * size, size, 40, page),
        **strides("OUT", num_heads * size, size, 56),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_SIZE=size, HEAD_PADDED=next_power_of_2(size),
        PAGE=page, WINDOW=window, SOFT_CAP=soft_cap, SINKS=sinks, WRITE_LSE=lse, ONE_TOKEN=one_token, MAX_REQS=256,
        SPLIT=split, FIXED_RANGES=split and invariant, INTERIOR=has_interior_loop(tile, one_token, window, invariant),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, PRECISION="ieee" if dtype == "fp32" else "tf32",
    )  # fmt: skip
    types = dict(
        q_ptr=f"*{dtype}", k_ptr=f"*{dtype}", v_ptr=f"*{dtype}", out_ptr="*fp32" if split else f"*{dtype}",
        lse_ptr="*fp32", sinks_ptr=f"*{dtype}", block_table_ptr="*i32", seq_lens_ptr="*i32", query_start_ptr="*i32",
        scale_log2="fp32", soft_cap="fp32", num_reqs="i32", block_table_stride="i32", tiles_per_split="i32",
    )  # fmt: skip
    return Case(paged.paged_attention_kernel, types, constants, tile.num_warps, tile.num_stages, tile)


def merge(dtype: str, heads: tuple[int, int, int]) -> Case:
    types = dict(part_ptr="*fp32", part_lse_ptr="*fp32", out_ptr=f"*{dtype}", lse_ptr="*fp32", sinks_ptr=f"*{dtype}",
                 query_start_ptr="*i32", num_reqs="i32", splits="i32")  # fmt: skip
    num_heads, _, size = heads
    constants = dict(OUT_STRIDE_TOKEN=num_heads * size + 16, OUT_STRIDE_HEAD=size, NUM_HEADS=num_heads, HEAD_SIZE=size,
                     HEAD_PADDED=next_power_of_2(size), SINKS=True, WRITE_LSE=True, BLOCK_S=16)  # fmt: skip
    return Case(paged.merge_splits_kernel, types, constants, 4, 1)


def write_kv(dtype: str, heads: tuple[int, int, int]) -> Case:
    _, kv, size = heads
    row = kv * size
    types = dict(key_ptr=f"*{dtype}", value_ptr=f"*{dtype}", key_cache_ptr=f"*{dtype}", value_cache_ptr=f"*{dtype}",
                 slots_ptr="*i64")  # fmt: skip
    constants = dict(
        **strides("K", row, size, 24), **strides("V", row, size, 40),
        **strides("KC", row, size, 56, 16), **strides("VC", row, size, 72, 16),
        PAGE=16, NUM_KV_HEADS=kv, HEAD_SIZE=size,
        HEADS_PADDED=next_power_of_2(kv), HEAD_PADDED=next_power_of_2(size),
    )  # fmt: skip
    return Case(cache_write.write_kv_kernel, types, constants, 4, 1)


def norm(dtype: str, size: int, *, add: bool, heads: int = 1, plus_one: bool = False) -> Case:
    types = dict(x_ptr=f"*{dtype}", residual_ptr=f"*{dtype}", weight_ptr=f"*{dtype}", out_ptr=f"*{dtype}",
                 num_rows="i32", eps="fp32")  # fmt: skip
    block = next_power_of_2(size)
    constants = dict(X_STRIDE_TOKEN=size * heads + 16, X_STRIDE_HEAD=size, RESIDUAL_STRIDE=size, HEADS=heads, SIZE=size,
                     ADD=add, PLUS_ONE=plus_one, ROWS=4 if block <= 256 else 1, BLOCK=block)  # fmt: skip
    return Case(model_kernels.rms_norm_kernel, types, constants, 4, 1)


def rotary(dtype: str, heads: tuple[int, int, int], *, normed: bool, write: bool) -> Case:
    num_heads, kv, size = heads
    row = kv * size
    p = f"*{dtype}"
    types = dict(q_ptr=p, k_ptr=p, v_ptr=p, positions_ptr="*i64", cos_sin_ptr="*fp32", key_cache_ptr=p,
                 value_cache_ptr=p, slots_ptr="*i64", q_weight_ptr=p, k_weight_ptr=p, eps="fp32")  # fmt: skip
    constants = dict(
        **strides("Q", num_heads * size, size, 8), **strides("K", row, size, 24), **strides("V", row, size, 40),
        **strides("KC", row, size, 56, 16), **strides("VC", row, size, 72, 16), PAGE=16,
        NUM_HEADS=num_heads, NUM_KV_HEADS=kv, HEAD_SIZE=size,
        NORM=normed, WRITE=write, BLOCK_H=8, HALF_PADDED=next_power_of_2(size // 2), HEAD_PADDED=next_power_of_2(size),
    )  # fmt: skip
    return Case(model_kernels.rotary_kernel, types, constants, 4, 1)


def silu(dtype: str, size: int, *, gelu: bool = False) -> Case:
    types = dict(gate_up_ptr=f"*{dtype}", out_ptr=f"*{dtype}", num_rows="i32")
    return Case(model_kernels.silu_and_mul_kernel, types, dict(STRIDE=2 * size, SIZE=size, GELU=gelu, BLOCK=1024), 4, 1)


def compile_case(case: Case, arch: int) -> tuple[Any, dict[str, Any]]:
    """The compiled kernel and its figures: registers, spilled bytes, shared memory, whether tensor cores are used."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = case.kernel
    names = (*kernel.tensors, *kernel.numbers, *kernel.constants)
    assert set(case.types) | set(case.constants) == set(names), set(names) ^ (set(case.types) | set(case.constants))
    signature = {n: case.types.get(n, "constexpr") for n in names}
    # What the launcher guarantees on its direct path: every pointer is a multiple of 16.
    attrs = {(i,): [["tt.divisibility", 16]] for i in range(len(kernel.tensors))}
    source = ASTSource(fn=kernel.jit, signature=signature, constexprs=dict(case.constants), attrs=attrs)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx, products = compiled.asm["ptx"], stride_products(compiled.asm["ttir"], case)
    out = {
        "arch": arch,
        "kernel": kernel.__name__,
        "shared": compiled.metadata.shared,
        "mma": len(re.findall(r"\b(?:mma|wgmma|tcgen05)\b[.\w:]*", ptx)),
        "async": "cp.async" in ptx,
        "narrow": [stride for stride, kind in products if "i64" not in kind],
        "wide_products": sum("i64" in kind for _, kind in products),
        "wide_loads": len(re.findall(r"cp\.async\.cg\.shared\.global|ld\.global\S*\.v4", ptx)),
        **resources(compiled.asm["cubin"]),
    }
    if case.tile:
        size, itemsize = case.constants["HEAD_SIZE"], 4 if case.types["k_ptr"] == "*fp32" else 2
        out["estimate"] = case.tile.shared_bytes(size, itemsize, capability(arch))
        out["tile"] = dataclasses.astuple(case.tile)
    return compiled, out


def stride_products(ttir: str, case: Case) -> list[tuple[str, str]]:
    """(stride, type) of every product with the stride of a page or token, whose number may be large."""
    values = list(case.constants.values())
    strides = {v: n for n, v in case.constants.items() if n.endswith(("STRIDE_PAGE", "STRIDE_TOKEN"))}
    assert all(values.count(v) == 1 for v in strides), "a stride must be told from every other constant"
    names: dict[str, str] = {}  # SSA name of a constant → its stride
    for name, value in re.findall(r"(%\S+) = arith\.constant (?:dense<)?(\d+)>? :", ttir):
        if int(value) in strides:
            names[name] = strides[int(value)]
    products = re.findall(r"arith\.muli (%\S+), (%\S+) : (\S+)", ttir)
    return [(names[x], kind) for a, b, kind in products for x in (a, b) if x in names]


def cases(arch: int) -> dict[str, Case]:
    """Every kernel, in the forms an engine would compile on this architecture: fp16 on sm_75, else bf16, and fp32."""
    dtype = "fp16" if arch == 75 else "bf16"
    llama, smol, many = (32, 8, 128), (9, 3, 64), 1 << 20
    out = {
        "split": attention(arch, dtype, llama, rows=4, one_token=True, split=True),
        "mixed": attention(arch, dtype, llama, rows=many),
        "invariant": attention(arch, dtype, llama, rows=many, split=True, invariant=True),
        "merge": merge(dtype, llama),
        "write_kv": write_kv(dtype, smol),
        "add_rms_norm": norm(dtype, 576, add=True),
        "rotary": rotary(dtype, smol, normed=False, write=False),
        "rotary_and_write_kv": rotary(dtype, llama, normed=True, write=True),
        "silu_and_mul": silu(dtype, 1536),
        "gemma-norm": norm(dtype, 2304, add=True, plus_one=True),
        "gelu_and_mul": silu(dtype, 9216, gelu=True),
    }
    if arch not in (80, 89):  # which compile as sm_120 does
        out["fp32"] = attention(arch, "fp32", llama, rows=many)
    if arch in (75, 90, 120):  # the tightest shared memory, operands from shared memory, operands from registers
        out["decode"] = attention(arch, dtype, smol, rows=3, one_token=True)
        out["head-256"] = attention(arch, dtype, (8, 1, 256), rows=many)
        out["features"] = attention(
            arch, dtype, (8, 1, 80), rows=many, window=100, soft_cap=True, sinks=True, lse=True, page=32
        )
    return out


def resources(cubin: bytes) -> dict[str, int]:
    """Registers per thread and bytes of stack (spills live there) from `cuobjdump`, which comes with Triton."""
    import triton

    tool = next(pathlib.Path(triton.__file__).parent.glob("backends/nvidia/bin/cuobjdump*"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        text = subprocess.run([str(tool), "-res-usage", f.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return {"registers": int(found[1]), "stack": int(found[2])}


if __name__ == "__main__":
    print(json.dumps([compile_case(case, int(arch))[1] | {"case": name}
                      for arch in sys.argv[1:] for name, case in cases(int(arch)).items()]))  # fmt: skip
