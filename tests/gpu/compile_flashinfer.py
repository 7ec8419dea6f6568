"""Compiles every module of FlashInfer that the GPU suite needs, side by side: `python -m tests.gpu.compile_flashinfer`.

One ninja per module, all at once, as FlashInfer would run it at the first use; nothing is launched on a GPU. Modules
end up under FLASHINFER_WORKSPACE_BASE (default: the home directory). Without a GPU, FLASHINFER_CUDA_ARCH_LIST says for
which one ("9.0a"). MAX_JOBS limits the compilers of each ninja.
"""

from __future__ import annotations

import concurrent.futures
import os
import time
from typing import Any

from labkit.attention.flashinfer import FlashInferBackend
from labkit.attention.interface import AttentionSpec
from tests.parity import FLASHINFER_MODULES


def build_of(module: tuple[int, str, bool, bool]) -> Any:
    head_size, dtype, window, cap = module
    spec = AttentionSpec(
        4, 2, head_size, dtype, 16, sliding_window=100 if window else None, logits_soft_cap=30.0 if cap else None
    )
    return FlashInferBackend.jit_spec(spec)


def main() -> None:
    cores = os.cpu_count() or 1
    os.environ.setdefault("MAX_JOBS", str(max(1, 2 * cores // len(FLASHINFER_MODULES))))
    builds = {module: build_of(module) for module in FLASHINFER_MODULES}
    missing = {c: build for c, build in builds.items() if not build.is_compiled}
    print(f"{len(builds) - len(missing)} of {len(builds)} modules are there", flush=True)
    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(max(1, len(missing))) as pool:
        running = {pool.submit(build.build, False): c for c, build in missing.items()}
        for future in concurrent.futures.as_completed(running):
            future.result()
            print(f"{running[future]} after {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
