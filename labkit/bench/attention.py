"""How long one attention call takes, alone, for backends and shapes. Refuses to know models and schedulers.

Two traps are kept apart. *Warm*: the same KV again and again, which a large cache may hold; *rotated*: several sets of
KV in turn, together far larger than the cache, as the layers of a model would be. *eager* includes what the launch
costs the host where that is longer than the kernel; *graph* does not. Beside labkit's call a *bare* one is the kernel
library's own, without labkit's adapter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.errors import ConfigError, LabkitError, did_you_mean
from labkit.measure import clocks
from labkit.measure.attention import AttentionRecording, AttentionRow
from labkit.measure.limits import ITEMSIZE
from labkit.measure.provenance import Kind, ProvenanceError, collect
from labkit.measure.stats import Ratio, ratio, summary

if TYPE_CHECKING:
    import torch

    from labkit.attention.interface import AttentionBackend, AttentionSpec, Availability, Platform
    from labkit.attention.metadata import AttentionMetadata
    from labkit.attention.selector import Candidate

Progress = Callable[[str, int, int, str], None]

MIN_SETS, MAX_SETS = 4, 256
#: The rotated sets together are this many times the size of the device's L2 cache.
TIMES_CACHE = 4
#: A sample takes about this many microseconds and at most this many calls, but each set of KV once.
SAMPLE_US, MAX_CALLS = 4000, 32
#: The page size a backend is asked about before it says its own.
DEFAULT_BLOCK_SIZE = 16
#: A mixed batch of decodes and chunks in all sizes: (new tokens, tokens of KV with them). Decodes come first, so that
#: it can be run in two calls.
MIXED = ((1, 700), (1, 33), (1, 1), (1, 1029), (300, 300), (37, 500), (5, 5))


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """One call: `query_lens[i]` new tokens of request i over `kv_lens[i]` tokens of KV, the new ones included.

    block_size: tokens per page; None takes what the backend prefers.
    """

    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int | None = None
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

    @classmethod
    def prefill(cls, batch: int, length: int, **heads: Any) -> AttentionShape:
        """`batch` prompts of `length` tokens each, with nothing before them."""
        return cls((length,) * batch, (length,) * batch, **heads)

    @classmethod
    def mixed(cls, batch: int, context: int, chunk: int, **heads: Any) -> AttentionShape:
        """`batch` decodes as in `decode`, and one chunk of `chunk` new tokens at the end of a context as long."""
        return cls((1,) * batch + (chunk,), (context,) * batch + (max(context, chunk),), **heads)

    @property
    def kind(self) -> str:
        """ "decode" when every request brings one token, "prefill" when none has a past, else "mixed"."""
        if set(self.query_lens) == {1}:
            return "decode"
        return "prefill" if self.query_lens == self.kv_lens else "mixed"

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that a call must read, every token once."""
        return 2 * sum(self.kv_lens) * self.num_kv_heads * self.head_size * ITEMSIZE[self.dtype]

    @property
    def flops(self) -> int:
        """Floating-point operations of a causal call; see `AttentionRow` for the formula."""
        pairs = sum(q * (kv - q) + q * (q + 1) // 2 for q, kv in zip(self.query_lens, self.kv_lens, strict=True))
        return 4 * self.head_size * self.num_heads * pairs

    @property
    def pages(self) -> tuple[int, ...]:
        """Pages that each request fills."""
        return tuple(-(-kv // (self.block_size or DEFAULT_BLOCK_SIZE)) for kv in self.kv_lens)

    @property
    def num_blocks(self) -> int:
        """Pages that the requests fill."""
        return sum(self.pages)


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """What is asked of a backend besides the shape; fields are EngineConfig's."""

    num_splits: int = 0
    split_mixed_batches: bool = False
    batch_invariant: bool = False
    flash_attn_version: int | None = None
    kv_cache_layout: str = "NHD"


def bench_attention(
    backend: str,
    shape: AttentionShape,
    options: AttentionOptions = AttentionOptions(),  # noqa: B008 - frozen
    *,
    device: str = "auto",
    samples: int = 50,
    sets: int | None = None,
    seed: int = 0,
    bare: bool = False,
    found: Candidate | None = None,
    progress: Progress = lambda stage, done, total, detail: None,
) -> list[AttentionRow]:
    """Time a backend's forward on `shape`: warm and rotated, eager and (where its tier allows, on CUDA) in a graph.

    Args:
        sets: KV sets to rotate over; None takes at least four, and as many as exceed the L2 cache four times.
        bare: also time the library's own call, where the backend has one.
        found: what `ask_backend` said, where it has been asked.

    Raises:
        ConfigError: no such backend, or fewer than four sets. BackendError: it cannot serve the shape here.
        LabkitError: it left part of its output unwritten, or wrote something that is not a number.
    """
    from labkit.attention import registry
    from labkit.attention.split_mixed import make_backend
    from labkit.llm import find_device

    where, platform = find_device(device)
    found = found or ask_backend(backend, shape, options, platform)
    _check_sets(sets)
    shape = dataclasses.replace(shape, block_size=found.block_size)
    cls = registry.load(found.name)
    impl = make_backend(cls, _spec(shape, options), where)
    impl.warm_up(progress)
    count = sets if sets is not None else _sets_beyond_cache(shape, where)
    case = _Case(impl, shape, where, count, seed, options.kv_cache_layout)
    on_gpu = where.type == "cuda"
    launches = ["graph", "eager"] if on_gpu and _may_capture(found.tier, shape) else ["eager"]
    calls = ["labkit", "bare"] if bare and case.bare_calls(1) is not None else ["labkit"]
    todo = [(call, launch, kv) for call in calls for launch in launches for kv in ("warm", "rotated")]
    prepare_us = clocks.host_us(lambda: case.prepare(), calls=20, rounds=3, device=where)
    plans = impl.describe(case.metadata)
    rows = []
    for done, (call, launch, kv) in enumerate(todo):
        progress("attention", done, len(todo), f"{found.name} {shape.kind} {call} {kv} {launch}")
        times = case.sample_us(rotated=kv == "rotated", graph=launch == "graph", samples=samples, bare=call == "bare")
        times = [round(t, 3) for t in times]
        spread = summary(times)
        row = AttentionRow(
            kind=shape.kind,
            backend=found.name,
            backend_version=cls.availability().version,
            dtype=shape.dtype,
            batch=len(shape.query_lens),
            context=max(shape.kv_lens),
            query_lens=shape.query_lens,
            kv_lens=shape.kv_lens,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_size,
            block_size=found.block_size,
            kv=kv,
            sets=count if kv == "rotated" else 1,
            launch=launch,
            p10_us=round(spread.p10, 3),
            p50_us=round(spread.p50, 3),
            p90_us=round(spread.p90, 3),
            n=spread.n,
            samples_us=tuple(times),
            gb_s=round(shape.kv_bytes / spread.p50 / 1e3, 2),
            tflop_s=round(shape.flops / spread.p50 / 1e6, 3),
            prepare_us=round(prepare_us, 2) if call == "labkit" else 0.0,
            call=call,
            num_splits_asked=options.num_splits,
            num_splits=max((plan.num_splits for plan in plans), default=1),
            split_mixed_batches=options.split_mixed_batches,
            batch_invariant=options.batch_invariant,
            flash_attn_version=options.flash_attn_version,
            kv_cache_layout=options.kv_cache_layout,
            plan=tuple(f"{p.kernel} grid {p.grid} splits {p.num_splits} tile {p.tile} {p.note}".strip() for p in plans),
        )
        row.check()
        rows.append(row)
    progress("attention", len(todo), len(todo), "done")
    return rows


def bench_attentions(
    backends: Sequence[str],
    points: Sequence[tuple[AttentionShape, AttentionOptions]],
    *,
    device: str = "auto",
    samples: int = 50,
    sets: int | None = None,
    bare: bool = True,
    command: str | None = None,
    keep: AttentionRecording | None = None,
    save: Callable[[AttentionRecording], Any] | None = None,
    progress: Progress = lambda stage, done, total, detail: None,
) -> AttentionRecording:
    """Rows of every backend for every (shape, options), those that cannot serve listed in `refused` with their reasons.

    A backend that fails while it runs is listed too, and the others go on.

    Args:
        command: what was typed, for the provenance.
        keep: rows of an earlier, interrupted run; points whose rows it has are not measured again.
        save: called with everything so far after each point.

    Raises:
        ConfigError: there is no backend of a name, or fewer than four sets.
        ProvenanceError: `keep` was measured elsewhere.
    """
    from labkit.attention.registry import BACKENDS
    from labkit.llm import find_backends, find_device

    _check_sets(sets)
    for name in backends:
        if name not in BACKENDS:
            raise ConfigError(
                f"attention_backend={name!r}", "there is no backend of that name", did_you_mean(name, BACKENDS)
            )
    where, platform = find_device(device)
    available = find_backends(platform, "TRITON_ATTN" if "TRITON_ATTN" in backends else None)
    order = "for each shape and setting, backend by backend: in a graph then eager, warm then rotated; bare calls last"
    provenance = collect(Kind.LIVE, command, order=order, n=samples, primed=True, device=where.type)
    if keep is not None:
        differences = provenance.replace(kind=keep.provenance.kind).same_machine(keep.provenance)
        if differences:
            raise ProvenanceError(
                "resuming a recording of attention calls",
                f"it was recorded elsewhere: {'; '.join(differences)}",
                "Name another file, or remove this one.",
            )
    rows = {row.key: row for row in keep.rows} if keep else {}
    has = {_point(row) for row in rows.values()}
    refused: dict[str, list[str]] = {}

    def recording() -> AttentionRecording:
        return AttentionRecording(provenance, tuple(rows.values()), {n: "; ".join(why) for n, why in refused.items()})

    total = len(points) * len(backends)
    for done, (shape, options) in enumerate(points):
        for turn, name in enumerate(backends):
            progress("points", done * len(backends) + turn, total, f"{name} {shape.kind}")
            try:
                found = ask_backend(name, shape, options, platform, available)
                if (name, shape.query_lens, shape.kv_lens, options) in has:
                    continue
                timed = bench_attention(
                    name, shape, options, device=device, samples=samples, sets=sets, bare=bare, found=found,
                    progress=progress,
                )  # fmt: skip
            except Exception as error:  # whatever a kernel library raises is its answer, and the others go on
                why = error.why if isinstance(error, LabkitError) else f"{type(error).__name__}: {error}"
                reasons = refused.setdefault(name, [])
                if why not in reasons:
                    reasons.append(why)
                continue
            rows.update((row.key, row) for row in timed)
            if save is not None:
                save(recording())
    return recording()


def backends_to_time(device: str = "auto") -> list[str]:
    """Every backend, in the order in which they are tried here; without TRITON_ATTN where it would be interpreted."""
    from labkit.attention import registry
    from labkit.llm import find_device

    _, platform = find_device(device)
    order = registry.priority(platform)
    names = [*order, *(name for name in registry.BACKENDS if name not in order)]
    return [name for name in names if platform.device_type == "cuda" or name != "TRITON_ATTN"]


@dataclasses.dataclass(frozen=True)
class AttentionPair:
    """Two rows that differ in one thing, and how long `other` takes in units of `base`."""

    what: str
    base: AttentionRow
    other: AttentionRow
    ratio: Ratio

    @property
    def sentence(self) -> str:
        where = f"{self.base.kind} batch {self.base.batch}, context {self.base.context:,}, {self.base.launch}"
        if not self.ratio.shown:
            return f"{where}: {self.base.name} against {self.other.name}, {self.what}: {self.ratio.text}."
        return f"{where}: {self.other.name} takes {self.ratio.text} as long as {self.base.name} ({self.what})."

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        ratio = {**dataclasses.asdict(self.ratio), "kind": str(self.ratio.kind)}
        return {"what": self.what, "base": self.base.name, "other": self.other.name, "ratio": ratio} | {
            name: getattr(self.base, name) for name in ("kind", "batch", "context", "kv", "launch")
        }


def attention_pairs(recording: AttentionRecording) -> list[AttentionPair]:
    """Rotated rows beside their plain twin: two calls for a mixed batch, batch invariance, the library's bare call."""
    kind, rows = recording.provenance.kind, {row.key: row for row in recording.rows}
    changes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("a mixed batch in two calls", {"split_mixed_batches": False}),
        ("the price of batch invariance", {"batch_invariant": False}),
    )
    out = []
    for row in (row for row in recording.rows if row.kv == "rotated"):
        for what, change in changes:
            base = rows.get(dataclasses.replace(row, **change).key)
            if base is not None and base is not row:
                times = ratio(row.measurement(kind), base.measurement(kind))
                out.append(AttentionPair(what, base, row, times))
        if row.call == "bare":
            mine = rows.get(dataclasses.replace(row, call="labkit").key)
            if mine is not None:
                times = ratio(mine.measurement(kind), row.measurement(kind))
                out.append(AttentionPair("what labkit's adapter adds", row, mine, times))
    return out


def _point(row: AttentionRow) -> tuple[Any, ...]:
    options = AttentionOptions(
        row.num_splits_asked, row.split_mixed_batches, row.batch_invariant, row.flash_attn_version, row.kv_cache_layout
    )
    return row.backend, row.query_lens, row.kv_lens, options


def ask_backend(
    name: str,
    shape: AttentionShape,
    options: AttentionOptions,
    platform: Platform,
    available: Mapping[str, Availability] | None = None,
) -> Candidate:
    """The backend's answer to a shape, with its page size where the shape leaves that open.

    `available` is what loads here; None finds out.

    Raises:
        BackendError: it cannot serve. ConfigError: there is no such backend.
    """
    from labkit.attention.selector import select
    from labkit.llm import find_backends

    spec = _spec(shape, options)
    available = find_backends(platform, name.upper()) if available is None else available
    selection = select(spec, platform, name, available, block_size_is_set=shape.block_size is not None)
    return selection.candidate(selection.selected)


def _check_sets(sets: int | None) -> None:
    if sets is not None and sets < MIN_SETS:
        raise ConfigError(
            f"sets={sets}", f"fewer than {MIN_SETS} sets would rotate inside a cache", f"Take {MIN_SETS} or more."
        )


def _spec(shape: AttentionShape, options: AttentionOptions) -> AttentionSpec:
    from labkit.attention.interface import AttentionSpec

    return AttentionSpec(
        shape.num_heads, shape.num_kv_heads, shape.head_size, shape.dtype, shape.block_size or DEFAULT_BLOCK_SIZE,
        max_model_len=max(shape.kv_lens), max_num_seqs=len(shape.query_lens),
        max_num_batched_tokens=sum(shape.query_lens), **dataclasses.asdict(options),
    )  # fmt: skip


def _may_capture(tier: Any, shape: AttentionShape) -> bool:
    from labkit.attention.interface import AttentionCGSupport as Tier

    return tier is Tier.ALWAYS or (
        shape.kind == "decode" and tier in (Tier.UNIFORM_BATCH, Tier.UNIFORM_SINGLE_TOKEN_DECODE)
    )


def _sets_beyond_cache(shape: AttentionShape, device: torch.device) -> int:
    if device.type != "cuda":
        return MIN_SETS
    import torch

    torch.cuda.empty_cache()  # the sets of the shape before
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
        self,
        impl: AttentionBackend,
        shape: AttentionShape,
        device: torch.device,
        sets: int,
        seed: int,
        layout: str = "NHD",
    ) -> None:
        import torch

        self.impl, self.shape, self.device, self.sets = impl, shape, device, sets
        dtype = getattr(torch, shape.dtype)
        random = torch.Generator(device=device).manual_seed(seed)

        def randn(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=random, device=device, dtype=dtype)

        tokens = sum(shape.query_lens)
        self.block_size = shape.block_size or DEFAULT_BLOCK_SIZE
        inner = (self.block_size, shape.num_kv_heads)
        cache = (2, shape.num_blocks + 1, *(inner if layout == "NHD" else inner[::-1]), shape.head_size)
        self.query = randn(tokens, shape.num_heads, shape.head_size)
        self.output = torch.full_like(self.query, float("nan"))
        # As an engine has them: K and V of a layer are views of one tensor, tokens before heads whatever the layout.
        both = [randn(*cache) if layout == "NHD" else randn(*cache).transpose(2, 3) for _ in range(sets)]
        self.caches = [(kv[0], kv[1]) for kv in both]
        self.scale = shape.head_size**-0.5
        self.metadata = self._metadata(np.random.default_rng(seed))

    def _metadata(self, random: np.random.Generator) -> AttentionMetadata:
        import torch

        from labkit.attention.metadata import AttentionMetadata

        shape = self.shape
        starts = np.concatenate([[0], np.cumsum(shape.query_lens)]).astype(np.int32)
        lens = np.asarray(shape.kv_lens, dtype=np.int32)
        widths, block_size = shape.pages, self.block_size
        table = np.zeros((len(lens), max(widths)), dtype=np.int32)
        pages = random.permutation(shape.num_blocks).astype(np.int32) + 1
        cursor = 0
        for row, width in enumerate(widths):
            table[row, :width] = pages[cursor : cursor + width]
            cursor += width
        slots = np.concatenate(
            [
                table[row, np.arange(kv - q, kv) // block_size].astype(np.int64) * block_size
                + np.arange(kv - q, kv) % block_size
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
        self.metadata.for_graph, self.metadata.scratch = for_graph, {}
        self.impl.prepare(self.metadata)

    def call(self, index: int) -> None:
        """One forward on the KV set of this index."""
        keys, values = self.caches[index]
        self.impl.forward(self.query, keys, values, self.output, self.metadata, scale=self.scale)

    def bare_calls(self, sets: int) -> list[Callable[[], Any]] | None:
        """The library's own call for each of the first KV sets, planned; None when the backend has none."""
        out = []
        for keys, values in self.caches[:sets]:
            call = self.impl.bare_call(self.query, keys, values, self.output, self.metadata, self.scale)
            if call is None:
                return None
            out.append(call)
        return out

    def sample_us(self, *, rotated: bool, graph: bool, samples: int, bare: bool = False) -> Sequence[float]:
        """Microseconds of one call, once per sample."""
        import torch

        on_gpu = self.device.type == "cuda"
        calls = sets = self.sets if rotated else 1
        result: list[Any] = [None]

        def work() -> None:
            for i in range(calls):
                self.call(i % sets)

        def work_bare() -> None:
            for i in range(calls):
                result[0] = bare_calls[i % sets]()

        with torch.inference_mode():
            self.prepare(for_graph=graph)
            bare_calls = (self.bare_calls(sets) or []) if bare else []
            todo = work_bare if bare else work
            self.output.fill_(float("nan"))
            todo()
            if on_gpu:  # a sample is long against the clock's resolution and the launch of its graph
                once = min(clocks.sample_us(todo, samples=3, warmup=1, device=self.device)) / calls
                calls = sets * -(-max(1, min(MAX_CALLS, int(SAMPLE_US / once))) // sets)
            replay = self._capture(todo) if graph else todo
            times = clocks.sample_us(replay, samples=samples, warmup=2, device=self.device)
            returned = result[0][0] if isinstance(result[0], (tuple, list)) else result[0]
            # A library that has no argument for the output returns it.
            if not bool(torch.isfinite(self.output if returned is None else returned).all()):
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
