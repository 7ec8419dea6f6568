"""Every kernel compiled ahead of time for cards that are not here: tensor cores, registers, spills, shared memory.

Field cases C16 (page and token numbers times strides pass 2^31) and C24 (a tile that does not fit a T4).
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from labkit.attention.kernels.tiles import shared_memory_limit
from tests.kernels.aot import ARCHS, capability

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def compiled() -> Results:
    """One process for all, without the interpreter: Triton cannot do both."""
    import os

    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.aot", *map(str, ARCHS)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_compiles_within_the_card(compiled: Results, arch: int) -> None:
    """C24: what the compiler asks for is within the estimate that chose the tile, and that within the card's limit."""
    here = [r for r in compiled if r["arch"] == arch]
    assert {r["kernel"] for r in here} == {
        "paged_attention_kernel", "merge_splits_kernel", "write_kv_kernel", "rms_norm_kernel", "rotary_kernel",
        "silu_and_mul_kernel",
    }  # fmt: skip
    for r in here:
        limit = shared_memory_limit(capability(arch))
        assert r["shared"] <= r.get("estimate", limit) <= limit, r
        assert r["stack"] <= 32, f"spills: {r}"
        assert r["registers"] <= (64 if "tile" not in r else 255), r


def test_tensor_cores_from_sm_80_and_none_on_sm_75(compiled: Results) -> None:
    for r in compiled:
        if r["kernel"] == "paged_attention_kernel":
            wanted = r["arch"] >= 80 and r["case"] != "fp32"  # fp32 products are IEEE: tf32 would miss the error rule
            assert bool(r["mma"]) == wanted, r


def test_loads_of_keys_and_values_are_pipelined_and_wide(compiled: Results) -> None:
    """From sm_80 on K and V arrive by 16-byte asynchronous copies, more than one tile ahead."""
    for r in compiled:
        if r["kernel"] == "paged_attention_kernel" and r["arch"] >= 80:
            assert r["async"] and r["wide_loads"] >= 12, r


def test_c16_no_page_or_token_number_is_multiplied_in_32_bits(compiled: Results) -> None:
    assert [r for r in compiled if r["narrow"]] == []
    assert sum(r["wide_products"] for r in compiled) > 50, "the check must find the products it is about"
