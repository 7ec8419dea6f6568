"""How long one attention call takes, alone, for a backend and a shape. Refuses to know models and schedulers.

Two traps are kept apart. *Warm*: the same KV again and again, which a large cache may hold; *rotated*: several sets of
KV in turn, together far larger than the cache, as the layers of a model would be. *eager* includes what the launch
costs the host where that is longer than the kernel; *graph* does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.errors import ConfigError, LabkitError
from labkit.measure import clocks
from labkit.measure.limits import ITEMSIZE
from labkit.measure.stats import summary

if TYPE_CHECKING:
    import torch

    from labkit.attention.interface import AttentionBackend
    from labkit.attention.metadata import AttentionMetadata

MIN_SETS, MAX_SETS = 4, 256
#: The rotated sets together are this many times the size of the device's L2 cache.
TIMES_CACHE = 4
#: A mixed batch of decodes and chunks in all sizes: (new tokens, tokens of KV with them).
MIXED = ((1, 700), (1, 33), (1, 1), (300, 300), (37, 500), (1, 1029), (5, 5))


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """One call: `query_lens[i]` new tokens of request i over `kv_lens[i]` tokens of KV, the new ones included."""

    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if not self.query_lens or len(self.query_lens) != len(self.kv_lens):
            raise ConfigError(
                "an attention shape", "needs as many query lengths as KV lengths, at least one", "See MIXED."
            )
        for q, kv in zip(self.query_lens, self.kv_lens, strict=True):
            if not 1 <= q <= kv:
                raise ConfigError(
                    f"{q} new tokens over {kv} of KV", "a request attends to its own tokens too", "Take 1 ≤ q ≤ kv."
                )
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} with num_kv_heads={self.num_kv_heads}",
                "query heads must be a multiple of KV heads",
                "Take 32 and 8, say.",
            )

    @classmethod
    def decode(cls, batch: int, context: int, **heads: Any) -> AttentionShape:
        """`batch` requests that each add one token to `context` − 1 others."""
        return cls((1,) * batch, (context,) * batch, **heads)

    @property
    def kind(self) -> str:
        """ "decode" when every request brings one token, else "mixed"."""
        return "decode" if set(self.query_lens) == {1} else "mixed"

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that a call must read, every token once."""
        return 2 * sum(self.kv_lens) * self.num_kv_heads * self.head_size * ITEMSIZE[self.dtype]

    @property
    def num_blocks(self) -> int:
        """Pages that the requests fill."""
        return sum(-(-kv // self.block_size) for kv in self.kv_lens)


@dataclasses.dataclass(frozen=True)
class AttentionRow:
    """One way of calling one backend. kind: "decode" or "mixed". kv: "warm" or "rotated" over `sets` sets of KV.

    launch: "graph" (many calls in one graph, time divided) or "eager". p10_us, p50_us, p90_us: of `samples_us`, each
    the time of one call. gb_s: bytes of K and V read once over p50_us. context: the longest KV. prepare_us: host time
    of `prepare`.
    """

    kind: str
    backend: str
    backend_version: str | None
    dtype: str
    batch: int
    context: int
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    kv: str
    sets: int
    launch: str
    p10_us: float
    p50_us: float
    p90_us: float
    n: int
    samples_us: tuple[float, ...]
    gb_s: float
    prepare_us: float
    plan: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)


def bench_attention(
    backend: str,
    shape: AttentionShape,
    *,
    device: str = "auto",
    samples: int = 50,
    sets: int | None = None,
    seed: int = 0,
    progress: Callable[[str, int, int, str], None] = lambda stage, done, total, detail: None,
) -> list[AttentionRow]:
    """Time a backend's forward on `shape`: warm and rotated, eager and (where its tier allows, on CUDA) in a graph.

    Args:
        sets: KV sets to rotate over; None takes at least four, and as many as exceed the L2 cache four times.

    Raises:
        ConfigError: no such backend, or fewer than four sets. BackendError: it cannot serve the shape here.
        LabkitError: it left part of its output unwritten, or wrote something that is not a number.
    """
    from labkit.llm import find_device

    where, platform = find_device(device)
    impl, tier = _backend(backend, shape, where, platform)
    if sets is not None and sets < MIN_SETS:
        raise ConfigError(
            f"sets={sets}", f"fewer than {MIN_SETS} sets would rotate inside a cache", f"Take {MIN_SETS} or more."
        )
    count = sets if sets is not None else _sets_beyond_cache(shape, where)
    case = _Case(impl, shape, where, count, seed)
    on_gpu = where.type == "cuda"
    launches = ["graph", "eager"] if on_gpu and _may_capture(tier, shape) else ["eager"]
    rows, todo = [], [(kv, launch) for launch in launches for kv in ("warm", "rotated")]
    prepare_us = clocks.host_us(lambda: case.prepare(), calls=20, rounds=3, device=where)
    version = type(impl).availability().version
    plan = tuple(
        f"{p.kernel} grid {p.grid} splits {p.num_splits} tile {p.tile} {p.note}".strip()
        for p in impl.describe(case.metadata)
    )
    for done, (kv, launch) in enumerate(todo):
        progress("attention", done, len(todo), f"{backend.upper()} {kv} {launch}")
        times = case.sample_us(rotated=kv == "rotated", graph=launch == "graph", samples=samples)
        times = [round(t, 3) for t in times]
        found = summary(times)
        rows.append(
            AttentionRow(
                shape.kind,
                backend.upper(),
                version,
                shape.dtype,
                len(shape.query_lens),
                max(shape.kv_lens),
                shape.query_lens,
                shape.kv_lens,
                shape.num_heads,
                shape.num_kv_heads,
                shape.head_size,
                shape.block_size,
                kv,
                count if kv == "rotated" else 1,
                launch,
                round(found.p10, 3),
                round(found.p50, 3),
                round(found.p90, 3),
                found.n,
                tuple(times),
                round(shape.kv_bytes / found.p50 / 1e3, 2),
                round(prepare_us, 2),
                plan,
            )  # fmt: skip
        )
    progress("attention", len(todo), len(todo), "done")
    return rows


def _backend(name: str, shape: AttentionShape, device: torch.device, platform: Any) -> tuple[AttentionBackend, Any]:
    from labkit.attention import registry
    from labkit.attention.interface import AttentionSpec
    from labkit.attention.selector import select
    from labkit.llm import find_backends

    spec = AttentionSpec(
        shape.num_heads, shape.num_kv_heads, shape.head_size, shape.dtype, shape.block_size,
        max_model_len=max(shape.kv_lens), max_num_seqs=len(shape.query_lens),
        max_num_batched_tokens=sum(shape.query_lens),
    )  # fmt: skip
    selection = select(spec, platform, name, find_backends(platform, name.upper()))
    found = selection.candidate(selection.selected or "")
    return registry.load(found.name)(spec, device), found.tier


def _may_capture(tier: Any, shape: AttentionShape) -> bool:
    from labkit.attention.interface import AttentionCGSupport as Tier

    return tier is Tier.ALWAYS or (
        shape.kind == "decode" and tier in (Tier.UNIFORM_BATCH, Tier.UNIFORM_SINGLE_TOKEN_DECODE)
    )


def _sets_beyond_cache(shape: AttentionShape, device: torch.device) -> int:
    if device.type != "cuda":
        return MIN_SETS
    import torch

    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)
    free, _ = torch.cuda.mem_get_info(device)
    wanted = max(MIN_SETS, -(-TIMES_CACHE * cache // shape.kv_bytes))
    fits = int(free * 0.8) // (shape.kv_bytes + 1)
    if fits < MIN_SETS:
        raise ConfigError(
            f"{MIN_SETS} sets of {shape.kv_bytes / 2**30:.1f} GiB of KV",
            f"only {free / 2**30:.1f} GiB of memory are free",
            "Lower batch or context.",
        )
    return int(min(wanted, fits, MAX_SETS))


class _Case:
    """The tensors of one shape: one query, one output, `sets` caches of random K and V, pages in random order."""

    def __init__(
        self, impl: AttentionBackend, shape: AttentionShape, device: torch.device, sets: int, seed: int
    ) -> None:
        import torch

        self.impl, self.shape, self.device, self.sets = impl, shape, device, sets
        dtype = getattr(torch, shape.dtype)
        random = torch.Generator(device=device).manual_seed(seed)

        def randn(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=random, device=device, dtype=dtype)

        tokens = sum(shape.query_lens)
        cache = (shape.num_blocks + 1, shape.block_size, shape.num_kv_heads, shape.head_size)
        self.query = randn(tokens, shape.num_heads, shape.head_size)
        self.output = torch.full_like(self.query, float("nan"))
        self.caches = [(randn(*cache), randn(*cache)) for _ in range(sets)]
        self.scale = shape.head_size**-0.5
        self.metadata = self._metadata(np.random.default_rng(seed))

    def _metadata(self, random: np.random.Generator) -> AttentionMetadata:
        import torch

        from labkit.attention.metadata import AttentionMetadata

        shape = self.shape
        starts = np.concatenate([[0], np.cumsum(shape.query_lens)]).astype(np.int32)
        lens = np.asarray(shape.kv_lens, dtype=np.int32)
        widths = [-(-kv // shape.block_size) for kv in shape.kv_lens]
        table = np.zeros((len(lens), max(widths)), dtype=np.int32)
        pages = random.permutation(shape.num_blocks).astype(np.int32) + 1
        cursor = 0
        for row, width in enumerate(widths):
            table[row, :width] = pages[cursor : cursor + width]
            cursor += width
        slots = np.concatenate(
            [
                table[row, np.arange(kv - q, kv) // shape.block_size].astype(np.int64) * shape.block_size
                + np.arange(kv - q, kv) % shape.block_size
                for row, (q, kv) in enumerate(zip(shape.query_lens, shape.kv_lens, strict=True))
            ]
        )

        def put(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values).to(self.device)

        return AttentionMetadata(
            num_reqs=len(lens), num_tokens=len(slots), num_actual_reqs=len(lens), num_actual_tokens=len(slots),
            max_query_len=max(shape.query_lens), max_seq_len=max(shape.kv_lens), query_start_loc=put(starts),
            seq_lens=put(lens), block_table=put(table), slot_mapping=put(slots), query_start_loc_cpu=starts,
            seq_lens_cpu=lens, is_uniform_decode=shape.kind == "decode",
        )  # fmt: skip

    def prepare(self, for_graph: bool = False) -> None:
        self.metadata.for_graph = for_graph
        self.impl.prepare(self.metadata)

    def call(self, index: int) -> None:
        """One forward on the KV set of this index."""
        keys, values = self.caches[index]
        self.impl.forward(self.query, keys, values, self.output, self.metadata, scale=self.scale)

    def sample_us(self, *, rotated: bool, graph: bool, samples: int) -> Sequence[float]:
        """Microseconds of one call, once per sample."""
        import torch

        on_gpu = self.device.type == "cuda"
        sets = self.sets if rotated else 1
        calls = sets * max(1, -(-32 // sets)) if on_gpu else sets

        def work() -> None:
            for i in range(calls):
                self.call(i % sets)

        with torch.inference_mode():
            self.prepare(for_graph=graph)
            self.output.fill_(float("nan"))
            work()
            replay = self._capture(work) if graph else work
            times = clocks.sample_us(replay, samples=samples, warmup=2, device=self.device)
            if not bool(torch.isfinite(self.output).all()):
                raise LabkitError(
                    f"attention by {self.impl.capabilities.name}",
                    "part of the output was not written, or is not a number",
                    "The kernel is wrong for this shape; do not trust its time.",
                )
        return [t / calls for t in times]

    def _capture(self, work: Callable[[], None]) -> Callable[[], Any]:
        import torch

        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
        self.output.fill_(float("nan"))
        return graph.replay
