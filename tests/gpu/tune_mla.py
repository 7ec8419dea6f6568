"""Times the MLA backends on the GPU at hand, and tiles and splits of TRITON_MLA beside them.

Not a test: `python3 tests/gpu/tune_mla.py [--seconds 120] [--tune]` from the root of the checkout. Every time is that
of one decode call inside a CUDA graph, once over one set of latents (warm) and once in turn over sets that exceed the
L2 cache together. What a candidate computes is compared with TORCH_SDPA_MLA's result, so that a fast wrong kernel is
not picked. The last line is one JSON object with all times.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from labkit.attention import registry  # noqa: E402
from labkit.attention.interface import Platform  # noqa: E402
from labkit.attention.kernels.mla_tiles import LatentTile  # noqa: E402
from labkit.attention.mla.triton_mla import Plan, TritonMLABackend  # noqa: E402
from tests.mla_parity import Sizes  # noqa: E402
from tests.parity import Extent  # noqa: E402
from tests.reference import PagedBatch  # noqa: E402

CUDA = torch.device("cuda")
#: (requests, heads, tokens of context); the points of the facts about this stack, and longer ones.
POINTS = ((1, 16, 1024), (8, 16, 1024), (32, 16, 1024), (8, 128, 1024), (32, 128, 1024), (1, 16, 8192), (8, 16, 8192))
BEYOND_CACHE = 256 << 20  # bytes
TILES = [
    LatentTile(*t)
    for t in (
        (16, 32, 4, 3), (16, 32, 4, 2), (16, 64, 8, 2), (16, 32, 8, 3), (16, 64, 4, 2), (16, 64, 8, 3), (16, 16, 4, 4),
        (32, 32, 8, 3), (32, 32, 8, 2), (32, 64, 8, 2), (32, 16, 8, 3), (64, 32, 8, 2),
    )
]  # fmt: skip
SPLITS = (1, 2, 4, 8, 16, 32, 64)


class Tuned(TritonMLABackend):
    """Takes a tile and splits that were named instead of its own."""

    candidate: tuple[LatentTile, int] | None = None

    def plan(self, metadata: Any) -> Plan:
        own = super().plan(metadata)
        if self.candidate is None:
            return own
        tile, splits = self.candidate
        heads = self.spec.num_heads
        programs = metadata.num_reqs * -(-heads // min(heads, tile.block_m))
        return dataclasses.replace(own, tile=tile, programs=programs, splits=splits)


class Point:
    """One shape: its batches, and the result that others must have."""

    def __init__(self, requests: int, heads: int, context: int) -> None:
        self.extent = Extent(requests, 1, 0, context)
        self.sizes = Sizes(heads=heads, scale=0.1)
        one = requests * context * 576 * 2
        count = max(4, -(-BEYOND_CACHE // one))
        first = self.sizes.batch([1] * requests, [context] * requests, 0, CUDA, finite=True)
        self.batches: list[PagedBatch] = [first]
        for _ in range(count - 1):
            cache = first.key_cache.clone()
            self.batches.append(dataclasses.replace(first, key_cache=cache, value_cache=cache[..., :512]))
        self.metadata = first.metadata()
        self.output = torch.empty((requests, heads, 512), dtype=torch.bfloat16, device=CUDA)
        self.bytes = one
        self.reference = self.run(self.made("TORCH_SDPA_MLA"))

    def made(self, name: str, cls: type[Any] | None = None) -> Any:
        return (cls or registry.load(name))(self.sizes.spec(self.extent), CUDA)

    def call(self, backend: Any, number: int) -> None:
        batch = self.batches[number]
        backend.forward(
            batch.query, batch.key_cache, batch.value_cache, self.output, self.metadata, scale=self.sizes.scale
        )

    def run(self, backend: Any) -> torch.Tensor:
        self.metadata.scratch = {}
        backend.prepare(self.metadata)
        self.output.fill_(float("nan"))
        self.call(backend, 0)
        return self.output.float().clone()

    def times(self, backend: Any, samples: int = 15) -> tuple[float, float, float]:
        """(error, µs warm, µs rotated)."""
        error = (self.run(backend) - self.reference).abs().max().item()
        warm = self._time(lambda n: self.call(backend, 0), samples)
        return error, warm, self._time(lambda n: self.call(backend, n), samples)

    def _time(self, call: Callable[[int], None], samples: int) -> float:
        numbers = range(len(self.batches))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            call(0)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for n in numbers:
                call(n)
        found = []
        for _ in range(samples):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) * 1e3 / len(numbers))
        return statistics.median(found[2:])


def candidates(context: int, heads: int) -> Iterator[tuple[LatentTile, int]]:
    for tile in TILES:
        for splits in SPLITS:
            if splits * tile.block_n <= context and (tile.block_m <= 16 or heads >= tile.block_m):
                yield tile, splits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--tune", action="store_true", help="try tiles and splits of TRITON_MLA, too")
    args = parser.parse_args()
    begin, found = time.monotonic(), []
    platform = Platform("cuda", torch.cuda.get_device_capability())
    with torch.inference_mode():
        for requests, heads, context in POINTS:
            point = Point(requests, heads, context)
            print(f"\n{requests} requests × {heads} heads, {context} tokens ({point.bytes / 1e6:.1f} MB)")
            for name in registry.names("MLA"):
                cls = registry.load(name)
                available, spec = cls.availability(), point.sizes.spec(point.extent)
                if not available.usable or cls.why_not(spec, platform, available):
                    continue
                error, warm, rotated = point.times(point.made(name))
                found.append(dict(point=(requests, heads, context), name=name, warm=warm, rotated=rotated, error=error))
                gb_s = point.bytes / rotated / 1e3
                print(f"  {name:15} {warm:7.1f} warm  {rotated:7.1f} µs rotated  {gb_s:6.0f} GB/s  off {error:.1e}")
            if not args.tune:
                continue
            backend, rows = point.made("TRITON_MLA", Tuned), []
            most = requests * heads * max(SPLITS)
            backend._part = torch.empty(most * 512, dtype=torch.float32, device=CUDA)
            backend._part_lse = torch.empty(most, dtype=torch.float32, device=CUDA)
            for tile, splits in candidates(context, heads):
                if time.monotonic() - begin > args.seconds:
                    break
                backend.candidate = (tile, splits)
                try:
                    error, warm, rotated = point.times(backend, 7)
                except Exception as failure:  # a tile that does not fit
                    print(f"  {tile} × {splits}: {str(failure).splitlines()[0]}")
                    continue
                rows.append((rotated, warm, tile, splits, error))
            for rotated, warm, tile, splits, error in sorted(rows, key=lambda row: row[0])[:5]:
                print(f"  {tile} × {splits}: {warm:.1f} warm, {rotated:.1f} µs rotated, off {error:.1e}")
                found.append(dict(point=(requests, heads, context), name=f"{tile} × {splits}", warm=warm,
                                  rotated=rotated, error=error))  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
