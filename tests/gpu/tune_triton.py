"""Times tiles, warps, stages and splits of TRITON_ATTN on the GPU at hand and prints the best of each shape.

Not a test: `python3 tests/gpu/tune_triton.py [--seconds 170] [--shapes decode,prefill,mixed] [--samples 20]` from the
root of the checkout. Every time is that of one call inside a CUDA graph, over sets of KV that exceed the L2 cache.
What a candidate computes is compared with the default's result, so that a fast wrong kernel is not picked. The last
line is one JSON object with all times.

The grid leaves out what was seen to spill on sm_90 for 32/8/128 in bf16: keys in tiles of 128 or rows in tiles of 128
with 4 warps, and 2 warps with tiles of 128 keys.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from labkit.attention import triton_attn  # noqa: E402
from labkit.attention.interface import AttentionSpec  # noqa: E402
from labkit.attention.kernels.tiles import MAX_SPLITS, Tile, has_interior_loop, query_tiles  # noqa: E402
from labkit.attention.triton_attn import Plan, TritonAttentionBackend  # noqa: E402
from labkit.bench.attention import AttentionShape, _Case, _sets_beyond_cache  # noqa: E402

CUDA = torch.device("cuda")
HEADS: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "block_size": 16, "dtype": "bfloat16"}
SHAPES = {
    "decode": [
        AttentionShape.decode(1, 1024, **HEADS),
        AttentionShape.decode(1, 32_768, **HEADS),
        AttentionShape.decode(8, 4096, **HEADS),
        AttentionShape.decode(64, 1024, **HEADS),
    ],
    "prefill": [AttentionShape.prefill(8, 1024, **HEADS), AttentionShape.prefill(1, 8192, **HEADS)],
    "mixed": [AttentionShape.mixed(32, 1024, 512, **HEADS)],
}
SPLITS = (1, 2, 4, 8, 16, 32, 64)
#: Best guesses first: the clock may run out.
DECODE_TILES = [
    Tile(16, n, warps, stages)
    for n, warps, stages in (
        (64, 4, 3), (128, 8, 3), (64, 8, 3), (32, 4, 4), (64, 4, 4), (128, 4, 2), (64, 4, 2), (128, 8, 2), (32, 4, 3),
        (64, 8, 4), (128, 4, 3), (32, 2, 4), (64, 2, 3), (32, 8, 4),
    )
]  # fmt: skip
CHUNK_TILES = [
    Tile(m, n, warps, stages)
    for m, n, warps, stages in (
        (64, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 2), (128, 64, 8, 2), (64, 128, 8, 2), (128, 128, 8, 2),
        (64, 64, 8, 3), (64, 64, 4, 4), (128, 64, 8, 4), (64, 128, 8, 3), (128, 128, 8, 3), (64, 32, 4, 3),
        (128, 32, 8, 4), (32, 64, 4, 3),
    )
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Candidate:
    """What is forced on the backend. interior: the loop without masks, where a tile may have it."""

    tile: Tile
    splits: int
    interior: bool = True

    def __str__(self) -> str:
        t = self.tile
        loop = "" if self.interior else ", one loop"
        return f"{t.block_m:>3}x{t.block_n:<3} warps {t.num_warps} stages {t.num_stages} splits {self.splits:>2}{loop}"


class Tuned(TritonAttentionBackend):
    """Takes the candidate's tile and splits instead of its own."""

    candidate: Candidate | None = None

    def plan(self, metadata: Any) -> Plan:
        own = super().plan(metadata)
        if self.candidate is None:
            return own
        tile, spec = self.candidate.tile, self.spec
        tiles, heads = query_tiles(tile, self.group, metadata.num_tokens, metadata.num_reqs, metadata.max_query_len)
        programs = tiles * heads * spec.num_kv_heads
        return dataclasses.replace(own, tile=tile, programs=programs, splits=self.candidate.splits)


class Bench:
    """One shape: its tensors, the default's result, and the times so far."""

    def __init__(self, shape: AttentionShape, samples: int, interior: bool) -> None:
        self.shape, self.samples, self.interior = shape, samples, interior
        # As many requests as the largest shape has: one compiled form then serves all shapes.
        spec = AttentionSpec(
            shape.num_heads, shape.num_kv_heads, shape.head_size, shape.dtype, 16, max_model_len=max(shape.kv_lens),
            max_num_seqs=64, max_num_batched_tokens=sum(shape.query_lens),
        )  # fmt: skip
        self.impl = Tuned(spec, CUDA)
        rows = sum(shape.query_lens) * shape.num_heads * (MAX_SPLITS if shape.kind == "decode" else 4)
        self.impl._part = torch.empty(rows * shape.head_size, dtype=torch.float32, device=CUDA)
        self.impl._part_lse = torch.empty(rows, dtype=torch.float32, device=CUDA)
        self.case = _Case(self.impl, shape, CUDA, _sets_beyond_cache(shape, CUDA), 0)
        self.times: dict[Candidate, float] = {}
        self.failed: dict[Candidate, str] = {}
        own = self.impl.plan(self.case.metadata)
        self.default = Candidate(own.tile, own.splits, interior)
        self.reference = self._result(None)

    def _result(self, candidate: Candidate | None) -> torch.Tensor:
        self.impl.candidate = candidate
        self.case.prepare()
        self.case.output.fill_(float("nan"))
        self.case.call(0)
        return self.case.output.float().clone()

    def time(self, candidate: Candidate) -> None:
        if candidate in self.times or candidate in self.failed:
            return
        # Compiled forms are kept per backend under a key without this switch.
        triton_attn.has_interior_loop = has_interior_loop if candidate.interior else lambda *_: False
        self.impl._variants.clear()
        try:
            error = (self._result(candidate) - self.reference).abs().max().item()
            if not error <= 2e-2:
                raise RuntimeError(f"differs from the default by {error:.3g}")
            found = self.case.sample_us(rotated=True, graph=True, samples=self.samples)
            self.times[candidate] = float(np.median(found))
        except Exception as problem:  # too much shared memory, a compiler's refusal: not a candidate then
            self.failed[candidate] = f"{type(problem).__name__}: {problem}".splitlines()[0][:110]

    def best(self, n: int) -> list[Candidate]:
        return sorted(self.times, key=self.times.__getitem__)[:n]

    def report(self) -> None:
        shape = self.shape
        print(f"\n{shape.kind} batch {len(shape.query_lens)}, context {max(shape.kv_lens):,}: {len(self.times)} timed")
        for candidate in dict.fromkeys([*self.best(8), self.default]):
            us = self.times.get(candidate)
            if us is None:
                continue
            mark = "  <- default" if candidate == self.default else ""
            gb_s, tflop_s = shape.kv_bytes / us / 1e3, shape.flops / us / 1e6
            print(f"  {us:9.1f} us  {gb_s:6.0f} GB/s  {tflop_s:6.1f} TFLOP/s  {candidate}{mark}")
        for candidate, why in list(self.failed.items())[:4]:
            print(f"  failed: {candidate}: {why}")

    def as_dict(self) -> dict[str, Any]:
        rows = [[*dataclasses.astuple(c.tile), c.splits, c.interior, round(us, 2)] for c, us in self.times.items()]
        return {
            "kind": self.shape.kind, "batch": len(self.shape.query_lens), "context": max(self.shape.kv_lens),
            "default": [*dataclasses.astuple(self.default.tile), self.default.splits], "rows": rows,
        }  # fmt: skip


def candidates(bench: Bench) -> Iterator[Candidate]:
    """The default; then splits with its tile; then tiles with the splits that were best."""
    default, decode = bench.default, bench.shape.kind == "decode"
    yield default
    if not decode:
        yield dataclasses.replace(default, interior=False)
        for tile in CHUNK_TILES:
            yield Candidate(tile, 1)
        return
    most = -(-max(bench.shape.kv_lens) // 32)
    for splits in SPLITS:
        if splits <= most:
            yield Candidate(default.tile, splits)
    good = sorted({c.splits for c in bench.best(3)})
    for tile in DECODE_TILES:
        for splits in good:
            yield Candidate(tile, splits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=170, help="stop in time, shapes taking turns (default 170)")
    parser.add_argument("--shapes", default="decode,prefill,mixed", help="kinds, separated by commas")
    parser.add_argument("--samples", type=int, default=20)
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, heads 32/8/128, bfloat16, pages of 16")
    shapes = [shape for kind in args.shapes.split(",") for shape in SHAPES[kind]]
    # Who comes first compiles for those that follow.
    shares = [4 if shape in (SHAPES["decode"][0], SHAPES["prefill"][0]) else 1 for shape in shapes]
    done = []
    for turn, shape in enumerate(shapes):
        until = time.monotonic() + (end - time.monotonic()) * shares[turn] / sum(shares[turn:])
        bench = Bench(shape, args.samples, interior=True)
        for candidate in candidates(bench):
            bench.time(candidate)
            if time.monotonic() > until:
                break
        bench.report()
        done.append(bench.as_dict())
        del bench
        torch.cuda.empty_cache()
    print(json.dumps(done))


if __name__ == "__main__":
    main()
