"""Compiles every module that test_flashinfer.py needs, side by side: `python -m tests.gpu.compile_flashinfer`.

One ninja per module, all at once, as FlashInfer would run it at the first use; nothing is launched on a GPU. Modules
end up under FLASHINFER_WORKSPACE_BASE (default: the home directory). Without a GPU, FLASHINFER_CUDA_ARCH_LIST says for
which one ("9.0a"). MAX_JOBS limits the compilers of each ninja.
"""

from __future__ import annotations

import concurrent.futures
import os
import time

from labkit.attention.flashinfer import FlashInferBackend
from tests.gpu.test_flashinfer import COMPILED, HEADS, spec_of


def main() -> None:
    cores = os.cpu_count() or 1
    os.environ.setdefault("MAX_JOBS", str(max(1, 2 * cores // len(COMPILED))))
    builds = {c: FlashInferBackend.jit_spec(spec_of(c, HEADS[c[0]][0])) for c in COMPILED}
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
