"""The libraries that serve FlashAttention's versions: one adapter each, looked for and probed once per process.

Two libraries may share a namespace and one may load without being able to read pages, so nothing is concluded from a
name: each is imported for itself and must get one small paged batch right. Refuses to choose among them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from labkit.attention.interface import AttentionSpec, Provider
from labkit.attention.metadata import AttentionMetadata

if TYPE_CHECKING:
    import torch

#: Splits of the keys that a graph is captured for. How many a batch uses is decided on the device, up to this bound;
#: a number chosen from the lengths at capture would not fit a longer batch. vLLM's value.
MAX_SPLITS_UNDER_GRAPH = 32
PROBE_TOLERANCE = 0.06  # values near 1 in bfloat16; a wrong mask or page is off by about 1

#: What a provider may lack, in words.
FEATURES = {
    "sliding_window": "a sliding window",
    "logits_soft_cap": "logits soft-capping",
    "sinks": "attention sinks",
    "num_splits": "a number of splits",
}


@dataclasses.dataclass(frozen=True)
class FlashAttnProvider(Provider):
    """A provider, the module that its adapter imports, and the features (keys of FEATURES) that it lacks."""

    module: str = ""
    lacks: tuple[str, ...] = ()


@dataclasses.dataclass
class Plan:
    """What `prepare` hands to every layer of one step.

    max_query_len, max_seq_len: host bounds as the library wants them. num_splits: 0 leaves it to the library.
    block_table: int32 `[R, pages]`. cu_seqlens_k: int32 `[R+1]`. scheduler: FA3's tile schedule for `window` and
    `capped`. one_token: every row of the query is one request. hidden: int64, rows that see no key.
    """

    max_query_len: int
    max_seq_len: int
    num_splits: int
    block_table: torch.Tensor
    cu_seqlens_k: torch.Tensor | None = None
    scheduler: torch.Tensor | None = None
    window: int | None = None
    capped: bool = False
    one_token: bool = False
    hidden: torch.Tensor | None = None


class _Lacking(Exception):
    """The module loads, and what it offers is not enough. Its text is the whole answer."""


class Kernels:
    """One library behind one call. Raises at construction whatever its import raises.

    Args:
        lacks: features that a probe found missing; `num_splits` among them fixes one split.
    """

    version: ClassVar[int]
    module: ClassVar[str]
    package: ClassVar[str | None] = None  # its distribution, where the module's name does not tell
    kernels: ClassVar[tuple[str, str]]  # attention, and the merge of splits
    page_size: ClassVar[int]  # of the probe
    probed: ClassVar[tuple[str, ...]] = ()  # features that a build may have left out

    def __init__(self, lacks: Iterable[str] = ()) -> None:
        self.lacks = frozenset(lacks)

    def prepare(self, spec: AttentionSpec, metadata: AttentionMetadata) -> Plan:
        """What one batch needs beyond its metadata. Outside any graph; under one only persistent buffers change."""
        raise NotImplementedError

    def attend(
        self,
        plan: Plan,
        metadata: AttentionMetadata,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        output: torch.Tensor,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks: torch.Tensor | None,
        want_lse: bool,
    ) -> torch.Tensor | None:
        """Attention into `output`; the LSE as the library lays it out, `[num_heads, num_tokens]`, if wanted."""
        raise NotImplementedError

    def bare(
        self,
        spec: AttentionSpec,
        metadata: AttentionMetadata,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        output: torch.Tensor,
        scale: float,
    ) -> Callable[[], Any]:
        """The library's documented call for this batch, as its own users write it."""
        raise NotImplementedError

    def starts_of_keys(self, buffers: dict[int, torch.Tensor], metadata: AttentionMetadata) -> torch.Tensor:
        """Cumulative KV lengths, int32 `[R+1]`; under a graph always in the same memory of `buffers`."""
        import torch

        reqs = metadata.num_reqs
        starts = buffers.get(reqs) if metadata.for_graph else None
        if starts is None:
            starts = torch.zeros(reqs + 1, dtype=torch.int32, device=metadata.seq_lens.device)
            if metadata.for_graph:
                buffers[reqs] = starts
        torch.cumsum(metadata.seq_lens, 0, dtype=torch.int32, out=starts[1:])
        return starts


class FlashAttn3(Kernels):
    """FA3: whatever package brings the module `flash_attn_interface`, with or without the operator behind it.

    Its Python functions check, copy and allocate at every call; where the operator has the arguments it is called
    directly, once per layer, with the place for the result.
    """

    version = 3
    module = "flash_attn_interface"
    kernels = ("FlashAttnFwdSm90", "FlashAttnFwdCombine")
    page_size = 16
    probed = ("num_splits", "sliding_window", "logits_soft_cap", "sinks")
    _ARGUMENTS = {
        "out", "cu_seqlens_q", "seqused_k", "max_seqlen_q", "page_table", "softmax_scale", "is_causal",
        "window_size_left", "window_size_right", "softcap", "scheduler_metadata", "num_splits",
    }  # fmt: skip

    def __init__(self, lacks: Iterable[str] = ()) -> None:
        import torch

        self._library = importlib.import_module(self.module)
        operator = getattr(getattr(torch.ops.flash_attn_3, "fwd", None), "default", None)
        takes = {a.name for a in operator._schema.arguments} if operator is not None else set()
        self._operator = operator if takes >= self._ARGUMENTS else None
        if self._operator is None:
            function = getattr(self._library, "flash_attn_with_kvcache", None)
            takes = set(inspect.signature(function).parameters) if function is not None else set()
            if "page_table" not in takes:
                raise _Lacking(f"{self.module} has no flash_attn_with_kvcache that takes a page_table")
        super().__init__({*lacks, *(() if "sinks" in takes else ("sinks",))})
        self._schedule = getattr(self._library, "get_scheduler_metadata", None)
        # One per captured shape; a uniform and a mixed graph of one size differ in max_query_len.
        self._schedulers: dict[tuple[int, int, int], torch.Tensor] = {}

    def prepare(self, spec: AttentionSpec, metadata: AttentionMetadata) -> Plan:
        import torch

        table, splits = metadata.block_table, spec.num_splits
        if metadata.for_graph:
            splits = splits or MAX_SPLITS_UNDER_GRAPH
        else:
            # The library takes the table's width for the longest context when it chooses a number of splits.
            table = table[:, : max(1, math.ceil(metadata.max_seq_len / spec.block_size))]
        if "num_splits" in self.lacks:
            splits = 1
        window, capped = spec.sliding_window, spec.logits_soft_cap is not None
        longest = max(1, metadata.max_query_len)
        plan = Plan(longest, table.shape[1] * spec.block_size, splits, table, window=window, capped=capped)
        if self._schedule is None or metadata.num_reqs == 0:
            return plan
        # Its arguments must be those of the call: a schedule for other splits than the kernel's writes out of bounds.
        scheduler = self._schedule(
            metadata.num_reqs, longest, plan.max_seq_len, spec.num_heads, spec.num_kv_heads, spec.head_size,
            metadata.seq_lens, qkv_dtype=getattr(torch, spec.dtype), cu_seqlens_q=metadata.query_start_loc,
            page_size=spec.block_size, causal=True, window_size=_pair(window), has_softcap=capped, num_splits=splits,
        )  # fmt: skip
        if metadata.for_graph:
            key = (metadata.num_reqs, metadata.num_tokens, metadata.max_query_len)
            kept = self._schedulers.setdefault(key, scheduler)
            if kept is not scheduler:
                kept.copy_(scheduler)  # all of it: the buffer has exactly this shape's size, so no tail is left stale
            scheduler = kept
        plan.scheduler = scheduler
        return plan

    def attend(
        self, plan: Plan, metadata: AttentionMetadata, query: torch.Tensor, key_cache: torch.Tensor,
        value_cache: torch.Tensor, output: torch.Tensor, scale: float, window: int | None, soft_cap: float | None,
        sinks: torch.Tensor | None, want_lse: bool,
    ) -> torch.Tensor | None:  # fmt: skip
        left, right = _pair(window)
        # A layer with another window than the schedule's lets the kernel make its own.
        fits = window == plan.window and (soft_cap is not None) == plan.capped
        extra = {} if sinks is None else {"sinks": _bfloat16(sinks)}
        if self._operator is not None:
            return self._operator(
                query, key_cache, value_cache, out=output, cu_seqlens_q=metadata.query_start_loc,
                seqused_k=metadata.seq_lens, max_seqlen_q=plan.max_query_len, page_table=plan.block_table,
                softmax_scale=scale, is_causal=True, window_size_left=left, window_size_right=right,
                softcap=soft_cap or 0.0, scheduler_metadata=plan.scheduler if fits else None,
                num_splits=plan.num_splits, **extra,
            )[1]  # fmt: skip
        result = self._library.flash_attn_with_kvcache(
            query, key_cache, value_cache, cache_seqlens=metadata.seq_lens, page_table=plan.block_table,
            cu_seqlens_q=metadata.query_start_loc, max_seqlen_q=plan.max_query_len, softmax_scale=scale, causal=True,
            window_size=(left, right), softcap=soft_cap or 0.0, scheduler_metadata=plan.scheduler if fits else None,
            num_splits=plan.num_splits, return_softmax_lse=want_lse, **extra,
        )  # fmt: skip
        output.copy_(result[0] if want_lse else result)
        return result[1] if want_lse else None

    def bare(
        self, spec: AttentionSpec, metadata: AttentionMetadata, query: torch.Tensor, key_cache: torch.Tensor,
        value_cache: torch.Tensor, output: torch.Tensor, scale: float,
    ) -> Callable[[], Any]:  # fmt: skip
        return functools.partial(
            self._library.flash_attn_with_kvcache, query, key_cache, value_cache, cache_seqlens=metadata.seq_lens,
            page_table=metadata.block_table, cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_q=max(1, metadata.max_query_len), softmax_scale=scale, causal=True,
            window_size=_pair(spec.sliding_window), softcap=spec.logits_soft_cap or 0.0,
            num_splits=1 if "num_splits" in self.lacks else spec.num_splits,
        )  # fmt: skip


class FlashAttn4(Kernels):
    """FA4: `flash_attn.cute` of the package flash-attn-4, kernels written in CuTe's Python and compiled at first use.

    Its features are taken on its word: a probe of each would be a compilation of seconds each.
    """

    version = 4
    module = "flash_attn.cute"
    package = "flash-attn-4"
    kernels = ("FlashAttentionForward", "FlashAttentionForwardCombine")
    page_size = 16
    _ARGUMENTS = {
        "cu_seqlens_q", "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table", "softmax_scale", "causal", "softcap",
        "window_size_left", "window_size_right", "learnable_sink", "num_splits", "return_lse", "out",
    }  # fmt: skip

    def __init__(self, lacks: Iterable[str] = ()) -> None:
        super().__init__(lacks)
        library = importlib.import_module(self.module)
        self._public = library.flash_attn_varlen_func
        # The public function has no argument for the result's place. The one below it has; it is not promised to stay.
        inner = getattr(importlib.import_module(f"{self.module}.interface"), "_flash_attn_fwd", None)
        known = inner is not None and set(inspect.signature(inner).parameters) >= self._ARGUMENTS
        self._inner = inner if known else None

    def prepare(self, spec: AttentionSpec, metadata: AttentionMetadata) -> Plan:
        longest, keys = max(1, metadata.max_query_len), max(1, metadata.max_seq_len)
        return Plan(longest, keys, spec.num_splits or 1, metadata.block_table)

    def attend(
        self, plan: Plan, metadata: AttentionMetadata, query: torch.Tensor, key_cache: torch.Tensor,
        value_cache: torch.Tensor, output: torch.Tensor, scale: float, window: int | None, soft_cap: float | None,
        sinks: torch.Tensor | None, want_lse: bool,
    ) -> torch.Tensor | None:  # fmt: skip
        left, right = (None, None) if window is None else (window - 1, 0)
        common: dict[str, Any] = {
            "cu_seqlens_q": metadata.query_start_loc, "seqused_k": metadata.seq_lens,
            "max_seqlen_q": plan.max_query_len, "max_seqlen_k": plan.max_seq_len, "page_table": plan.block_table,
            "softmax_scale": scale, "causal": True, "softcap": soft_cap or 0.0, "learnable_sink": sinks,
            "num_splits": plan.num_splits, "return_lse": want_lse,
        }  # fmt: skip
        if self._inner is not None:
            return self._inner(
                query, key_cache, value_cache, window_size_left=left, window_size_right=right, out=output, **common
            )[1]
        result = self._public(query, key_cache, value_cache, window_size=(left, right), **common)
        result = result if isinstance(result, tuple) else (result, None)
        output.copy_(result[0])
        return result[1] if want_lse else None

    def bare(
        self, spec: AttentionSpec, metadata: AttentionMetadata, query: torch.Tensor, key_cache: torch.Tensor,
        value_cache: torch.Tensor, output: torch.Tensor, scale: float,
    ) -> Callable[[], Any]:  # fmt: skip
        window = spec.sliding_window
        return functools.partial(
            self._public, query, key_cache, value_cache, cu_seqlens_q=metadata.query_start_loc,
            seqused_k=metadata.seq_lens, max_seqlen_q=max(1, metadata.max_query_len),
            max_seqlen_k=max(1, metadata.max_seq_len), page_table=metadata.block_table, softmax_scale=scale,
            causal=True, window_size=(None, None) if window is None else (window - 1, 0),
            softcap=spec.logits_soft_cap or 0.0, num_splits=spec.num_splits or 1,
        )  # fmt: skip


class TorchVarlen(Kernels):
    """FA2 inside torch 2.13 and newer: `torch.nn.attention.varlen`. Nothing to install."""

    version = 2
    module = "torch.nn.attention.varlen"
    package = "torch"
    kernels = ("flash_fwd_splitkv_kernel", "flash_fwd_splitkv_combine_kernel")
    page_size = 256
    probed = ("sliding_window",)

    def __init__(self, lacks: Iterable[str] = ()) -> None:
        super().__init__({*lacks, "logits_soft_cap", "sinks"})
        import torch

        missing = {"block_table", "seqused_k", "num_splits"} - _arguments_of_torch_flash()
        if missing:
            names = ", ".join(sorted(missing))
            raise _Lacking(f"torch {torch.__version__} reads no pages: its kernels take no {names}, torch 2.13's do")
        self._functions: tuple[Any, Any, Any] | None = None
        self._starts: dict[int, torch.Tensor] = {}

    def _load(self) -> tuple[Any, Any, Any]:
        """The module brings in all of torch.compile, seconds of it, so it is loaded for the first call only."""
        library = importlib.import_module(self.module)
        self._functions = library.varlen_attn, library.varlen_attn_out, library.AuxRequest(lse=True)
        return self._functions

    def prepare(self, spec: AttentionSpec, metadata: AttentionMetadata) -> Plan:
        return Plan(
            max(1, metadata.max_query_len), max(1, metadata.max_seq_len),
            1 if "num_splits" in self.lacks else spec.num_splits, metadata.block_table,
            cu_seqlens_k=self.starts_of_keys(self._starts, metadata),
            one_token=metadata.max_query_len <= 1 and metadata.num_tokens == metadata.num_reqs,
        )  # fmt: skip

    def attend(
        self, plan: Plan, metadata: AttentionMetadata, query: torch.Tensor, key_cache: torch.Tensor,
        value_cache: torch.Tensor, output: torch.Tensor, scale: float, window: int | None, soft_cap: float | None,
        sinks: torch.Tensor | None, want_lse: bool,
    ) -> torch.Tensor | None:  # fmt: skip
        attend, attend_into, with_lse = self._functions or self._load()
        places = (
            query, key_cache, value_cache, metadata.query_start_loc, plan.cu_seqlens_k, plan.max_query_len,
            plan.max_seq_len,
        )  # fmt: skip
        options: dict[str, Any] = {
            "scale": scale, "enable_gqa": True, "seqused_k": metadata.seq_lens, "block_table": plan.block_table,
            "num_splits": plan.num_splits or None, "return_aux": with_lse if want_lse else None,
        }  # fmt: skip
        if plan.one_token and window is None and query.shape[1] > key_cache.shape[2]:
            # With one row there is nothing to mask, and without a mask the kernel packs a group's heads into one tile.
            # On that path it writes a copy of a result that it was given, so it must make its own.
            result = attend(*places, window_size=(-1, -1), **options)
            output.copy_(result[0] if want_lse else result)
        else:
            left = -1 if window is None else window - 1
            result = attend_into(output, *places, window_size=(left, 0), **options)
        return result[1] if want_lse else None

    def bare(
        self, spec: AttentionSpec, metadata: AttentionMetadata, query: torch.Tensor, key_cache: torch.Tensor,
        value_cache: torch.Tensor, output: torch.Tensor, scale: float,
    ) -> Callable[[], Any]:  # fmt: skip
        plan, window = self.prepare(spec, metadata), spec.sliding_window
        packs = plan.one_token and window is None
        attend, _, _ = self._functions or self._load()
        return functools.partial(
            attend, query, key_cache, value_cache, metadata.query_start_loc, plan.cu_seqlens_k,
            plan.max_query_len, plan.max_seq_len, scale=scale, enable_gqa=True, seqused_k=metadata.seq_lens,
            block_table=metadata.block_table, num_splits=plan.num_splits or None,
            window_size=(-1, -1) if packs else (-1 if window is None else window - 1, 0),
        )  # fmt: skip


class FlashAttn2(Kernels):
    """FA2 of the package flash-attn. Its KV lengths are the differences of `cu_seqlens_k`; it has no place to write to.

    The package flash-attn-4 brings a `flash_attn` without this module in it.
    """

    version = 2
    module = "flash_attn.flash_attn_interface"
    package = "flash-attn"
    kernels = TorchVarlen.kernels
    page_size = 256
    probed = ("sliding_window", "logits_soft_cap")

    def __init__(self, lacks: Iterable[str] = ()) -> None:
        super().__init__({*lacks, "num_splits", "sinks"})
        self._attend = importlib.import_module(self.module).flash_attn_varlen_func
        if "block_table" not in inspect.signature(self._attend).parameters:
            raise _Lacking(f"{self.module} reads no pages: its flash_attn_varlen_func has no block_table")
        self._starts: dict[int, torch.Tensor] = {}

    def prepare(self, spec: AttentionSpec, metadata: AttentionMetadata) -> Plan:
        one_token = metadata.max_query_len <= 1 and metadata.num_tokens == metadata.num_reqs
        # At 1 the library takes row i for request i, which is wrong when some request brings none.
        longest = 1 if one_token else max(2, metadata.max_query_len)
        starts = self.starts_of_keys(self._starts, metadata)
        return Plan(longest, max(1, metadata.max_seq_len), 0, metadata.block_table, starts, one_token=one_token)

    def attend(
        self, plan: Plan, metadata: AttentionMetadata, query: torch.Tensor, key_cache: torch.Tensor,
        value_cache: torch.Tensor, output: torch.Tensor, scale: float, window: int | None, soft_cap: float | None,
        sinks: torch.Tensor | None, want_lse: bool,
    ) -> torch.Tensor | None:  # fmt: skip
        result = self._attend(
            query, key_cache, value_cache, metadata.query_start_loc, plan.cu_seqlens_k, plan.max_query_len,
            plan.max_seq_len, softmax_scale=scale, causal=True, window_size=_pair(window), softcap=soft_cap or 0.0,
            return_attn_probs=want_lse, block_table=plan.block_table,
        )  # fmt: skip
        output.copy_(result[0] if want_lse else result)
        return result[1] if want_lse else None

    def bare(
        self, spec: AttentionSpec, metadata: AttentionMetadata, query: torch.Tensor, key_cache: torch.Tensor,
        value_cache: torch.Tensor, output: torch.Tensor, scale: float,
    ) -> Callable[[], Any]:  # fmt: skip
        plan = self.prepare(spec, metadata)
        return functools.partial(
            self._attend, query, key_cache, value_cache, metadata.query_start_loc, plan.cu_seqlens_k,
            plan.max_query_len, plan.max_seq_len, softmax_scale=scale, causal=True,
            window_size=_pair(spec.sliding_window), softcap=spec.logits_soft_cap or 0.0, block_table=plan.block_table,
        )  # fmt: skip


#: Every adapter, in the order in which a version's providers are tried: what needs no installation first.
ADAPTERS: tuple[type[Kernels], ...] = (FlashAttn3, FlashAttn4, TorchVarlen, FlashAttn2)

#: What each version is taken to have where nothing was looked at ("what would an A100 pick?").
ASSUMED: tuple[FlashAttnProvider, ...] = (
    FlashAttnProvider(3, "flash_attn_interface", True, "", FlashAttn3.module),
    FlashAttnProvider(4, "flash-attn-4", True, "", FlashAttn4.module),
    FlashAttnProvider(2, "torch 2.13 or newer", True, "", TorchVarlen.module, ("logits_soft_cap", "sinks")),
    FlashAttnProvider(2, "flash-attn", True, "", FlashAttn2.module, ("num_splits", "sinks")),
)


def runs_on(version: int, capability: tuple[int, int]) -> bool:
    """Whether a version has kernels for a compute capability. FA4's paged ones are not those for sm_8x and sm_12x."""
    major = capability[0]
    return {2: major >= 8, 3: major == 9, 4: major in (9, 10, 11)}[version]


def open_provider(provider: FlashAttnProvider) -> Kernels:
    """A fresh adapter, with buffers of its own, for a provider that `find_providers` named."""
    adapter = next(a for a in ADAPTERS if a.module == provider.module)
    return adapter(provider.lacks)


@functools.cache
def find_providers() -> tuple[FlashAttnProvider, ...]:
    """Every library that could serve a version, imported and probed on the current GPU. Never raises."""
    return tuple(map(look_at, ADAPTERS))


def look_at(adapter: type[Kernels]) -> FlashAttnProvider:
    """One library: what its import raised, or what the probe saw."""
    version, module = adapter.version, adapter.module
    try:
        kernels = adapter()
    except _Lacking as error:
        return FlashAttnProvider(version, module, False, str(error), module)
    except Exception as error:  # whatever a broken install raises is the answer to the question
        return FlashAttnProvider(version, module, False, f"{type(error).__name__}: {error}", module)
    name = f"{module} ({_package(adapter)})"
    gpu = _gpu()
    if gpu is None:
        return FlashAttnProvider(version, name, False, "it loads, and there is no GPU to probe it on", module)
    device, capability = gpu
    if not runs_on(version, capability):  # FA3's launcher ends the process where it has no kernel
        why = f"it loads, and was not probed: FA{version} has no kernels for sm_{capability[0]}{capability[1]}"
        return FlashAttnProvider(version, name, False, why, module)
    failed = probe(kernels, device)
    if failed:
        return FlashAttnProvider(version, name, False, f"its first paged call failed: {failed}", module)
    lacks = set(kernels.lacks)
    for feature in kernels.probed:
        if feature not in lacks and probe(adapter(lacks), device, feature):
            lacks.add(feature)
    return FlashAttnProvider(version, name, True, "", module, tuple(sorted(lacks)))


def probe(kernels: Kernels, device: torch.device, feature: str = "") -> str:
    """Attend to one small paged mixed batch, with one feature on, and compare with float32. Empty when it is right."""
    import torch

    query_lens, kv_lens, page = [1, 5, 33], [700, 5, 90], kernels.page_size
    spec = AttentionSpec(
        num_heads=4,
        num_kv_heads=2,
        head_size=64,
        dtype="bfloat16",
        block_size=page,
        sliding_window=8 if feature == "sliding_window" else None,
        logits_soft_cap=2.0 if feature == "logits_soft_cap" else None,
        has_sinks=feature == "sinks",
        num_splits=0 if feature in ("num_splits", "sinks") else 1,
    )
    try:
        with torch.inference_mode():
            random = torch.Generator().manual_seed(0)
            pages = [math.ceil(n / page) for n in kv_lens]
            order = (torch.randperm(sum(pages), generator=random) + 1).to(torch.int32)
            table = torch.zeros((3, max(pages)), dtype=torch.int32)
            for row, taken in enumerate(order.split(pages)):
                table[row, : len(taken)] = taken
            shape = (1 + sum(pages), page, 2, 64)
            key, value = (torch.randn(shape, generator=random).bfloat16() for _ in range(2))
            value = value + 1
            query = (3 * torch.randn((sum(query_lens), 4, 64), generator=random)).bfloat16()
            sinks = torch.tensor([0.0, 4.0, 8.0, 12.0]).bfloat16() if feature == "sinks" else None
            wanted = _dense(query, key, value, table, query_lens, kv_lens, spec, sinks)
            starts = torch.tensor([0, 1, 6, 39], dtype=torch.int32)
            lengths = torch.tensor(kv_lens, dtype=torch.int32)
            # Splits and sinks are probed as a graph uses them: together, and with more splits than there are keys for.
            metadata = AttentionMetadata(
                3, 39, 3, 39, 33, 700, starts.to(device), lengths.to(device), table.to(device),
                torch.full((39,), -1, dtype=torch.int64, device=device), starts.numpy(), lengths.numpy(),
                for_graph=spec.num_splits == 0,
            )  # fmt: skip
            query, key, value = (t.to(device) for t in (query, key, value))
            output = torch.full_like(query, math.nan)
            kernels.attend(
                kernels.prepare(spec, metadata), metadata, query, key, value, output, 0.125, spec.sliding_window,
                spec.logits_soft_cap, None if sinks is None else sinks.to(device), False,
            )  # fmt: skip
            error = (output.float().cpu() - wanted).abs().max().item()
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"
    return "" if error <= PROBE_TOLERANCE else f"its result is off by {error:.2g} from attention in float32"


def _dense(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    table: torch.Tensor,
    query_lens: list[int],
    kv_lens: list[int],
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The probe's batch in float32, one request at a time."""
    import torch

    outputs, group = [], spec.num_heads // spec.num_kv_heads
    for row, (q, n) in enumerate(zip(query.float().split(query_lens), kv_lens, strict=True)):
        key, value = (
            cache[table[row].long()].flatten(0, 1)[:n].float().repeat_interleave(group, 1)
            for cache in (key_cache, value_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", q, key) * 0.125
        if spec.logits_soft_cap is not None:
            scores = spec.logits_soft_cap * torch.tanh(scores / spec.logits_soft_cap)
        position, last = torch.arange(n), torch.arange(n - len(q), n)[:, None]
        seen = position <= last
        if spec.sliding_window is not None:
            seen = seen & (position > last - spec.sliding_window)
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, len(q), 1)], -1)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :n], value))
    return torch.cat(outputs)


def _gpu() -> tuple[torch.device, tuple[int, int]] | None:
    """The GPU to probe on and its compute capability; None without an NVIDIA GPU."""
    import torch

    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    return torch.device("cuda", torch.cuda.current_device()), torch.cuda.get_device_capability()


def _arguments_of_torch_flash() -> set[str]:
    import torch

    return {a.name for a in torch.ops.aten._flash_attention_forward.default._schema.arguments}


def _package(adapter: type[Kernels]) -> str:
    """Distribution and version of an adapter's module, for the reader."""
    found = importlib.metadata.packages_distributions().get(adapter.module, []) if adapter.package is None else []
    for name in found or [adapter.package or adapter.module]:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of an unknown package"


def _pair(window: int | None) -> tuple[int, int]:
    """The libraries count the keys to the left of the token, W − 1 for a window of W."""
    return (-1, -1) if window is None else (window - 1, 0)


def _bfloat16(sinks: torch.Tensor) -> torch.Tensor:
    """The only type in which FA3's builds with sinks take them."""
    import torch

    return sinks if sinks.dtype is torch.bfloat16 else sinks.to(torch.bfloat16)
