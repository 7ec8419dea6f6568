"""TRITON_ATTN: labkit's own Triton kernels behind the backend interface. Refuses to know the model and the graphs.

One unified kernel serves any mixed batch in one launch; a batch with too few programs to fill the GPU gets its keys
split over more of them and a second kernel that merges. Triton is imported when an instance is made, not before.

With `batch_invariant` a request's attention has the same bits whatever else is in the batch and however its prompt was
chunked: sums are always taken in the same order. One tile serves every batch, decodes and chunks run the same code, and
splits, where asked for, are ranges of positions that no batch moves. (This is about attention; what the matrix products
around it do is not decided here.)
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from labkit.attention.interface import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionSpec,
    Availability,
    BackendCapabilities,
    KernelPlan,
    Platform,
    Reason,
)
from labkit.attention.kernels import paged
from labkit.attention.kernels.tiles import (
    Tile,
    choose_num_splits,
    choose_tile,
    fixed_ranges,
    has_interior_loop,
    query_tiles,
    refine_tile,
    scratch_rows,
    shared_memory_limit,
)
from labkit.errors import BackendError
from labkit.launch import interpreting, next_power_of_2

if TYPE_CHECKING:
    import torch

    from labkit.attention.metadata import AttentionMetadata

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
LOG2E = 1.4426950408889634
MERGE_BLOCK = 16
#: More query rows than any tile has.
MANY_ROWS = 1 << 20


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one batch launches per layer. Hashable, a function of host integers only."""

    tile: Tile
    one_token: bool
    max_reqs: int
    programs: int
    splits: int
    fixed_range: int = 0  # tiles of keys in each split where the batch has no say, else 0


class TritonAttentionBackend(AttentionBackend):
    """Paged attention in Triton for MHA, GQA and MQA; see `labkit.attention.kernels.paged`."""

    capabilities = BackendCapabilities(
        name="TRITON_ATTN",
        dtypes=("float32", "float16", "bfloat16"),
        head_sizes=(32, 256, 8),
        block_sizes=(16, 4096, 16),
        device_types=("cuda", "rocm", "cpu"),
        min_capability=(7, 5),
        sliding_window=True,
        logits_soft_cap=True,
        sinks=True,
        kv_layouts=("NHD", "HND"),
        num_splits=True,
        split_mixed_batches=True,
        batch_invariant=True,
    )

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        import torch

        platform = Platform(device.type, torch.cuda.get_device_capability(device) if device.type == "cuda" else None)
        reasons = self.why_not(spec, platform)
        available = self.availability()
        if not available.usable:
            reasons.insert(0, Reason(f"Triton does not load ({available.reason})", "install triton"))
        if device.type == "cpu" and not interpreting():
            reasons.append(_not_interpreting())
        if reasons:
            raise BackendError("attention_backend='TRITON_ATTN'", "; ".join(map(str, reasons)))
        self.platform = platform
        self.group = spec.num_heads // spec.num_kv_heads
        # The interpreter runs programs one after another: splitting would only cost.
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
        # Partial results live here for the life of the engine: nothing is allocated in forward, and a captured graph
        # keeps pointing at memory that stays.
        if spec.batch_invariant:  # chunks are split like decodes, so every token of a step needs its room
            tokens = max(spec.max_num_seqs, spec.max_num_batched_tokens)
            splits, _ = fixed_ranges(spec.max_model_len, self._tile(1).block_n, spec.num_splits)
            rows = tokens * spec.num_heads * splits if splits > 1 else 0
        else:
            rows = scratch_rows(spec.num_heads, spec.num_kv_heads, self.num_sms, spec.max_num_seqs, spec.num_splits)
        self._scratch_rows = rows
        self._part = torch.empty(max(rows, 1) * spec.head_size, dtype=torch.float32, device=device)
        self._part_lse = torch.empty(max(rows, 1), dtype=torch.float32, device=device)
        self._variants: dict[tuple[Any, ...], Any] = {}
        self._plans: dict[tuple[int, ...], Plan] = {}

    @classmethod
    def availability(cls) -> Availability:
        """Whether Triton loads. Without a GPU it is found but not imported: see `launch`'s first paragraph."""
        if "triton" not in sys.modules:
            if importlib.util.find_spec("triton") is None:
                return Availability(False, "ModuleNotFoundError: No module named 'triton'")
            if not interpreting() and not _cuda_is_there():
                return Availability(True, "", _triton_version())
        try:
            import triton
            import triton.language

            return Availability(True, "", triton.__version__)
        except Exception as error:  # whatever a broken install raises is the answer to the question
            return Availability(False, f"{type(error).__name__}: {error}", _triton_version())

    @classmethod
    def extra_reasons(
        cls, spec: AttentionSpec, platform: Platform, available: Availability | None = None
    ) -> list[Reason]:
        out: list[Reason] = []
        if platform.device_type == "cpu":
            if spec.dtype == "bfloat16":
                out.append(
                    Reason(
                        "on a CPU it runs in Triton's interpreter, whose bfloat16 arithmetic is wrong",
                        "set dtype to float32 or float16",
                        "dtype",
                        "float32",
                    )
                )
            if "triton" in sys.modules and not interpreting():
                out.append(_not_interpreting())
            return out
        if platform.capability and platform.capability < (8, 0) and spec.dtype == "bfloat16":
            out.append(Reason(f"{platform.sm} has no bfloat16 arithmetic", "set dtype to float16", "dtype", "float16"))
        limit, itemsize = shared_memory_limit(platform.capability), ITEMSIZE.get(spec.dtype, 4)
        low, high, _ = cls.capabilities.head_sizes
        # A head size that the table refuses already is not refused twice.
        if low <= spec.head_size <= high and any(
            choose_tile(spec.head_size, itemsize, rows, limit, platform.capability) is None for rows in (1, MANY_ROWS)
        ):
            out.append(
                Reason(
                    f"no tile of head size {spec.head_size} in {spec.dtype} fits {limit} bytes of shared memory",
                    "take TORCH_SDPA",
                )
            )
        return out

    @classmethod
    def graph_support(
        cls, spec: AttentionSpec, platform: Platform, available: Availability | None = None
    ) -> tuple[AttentionCGSupport, str]:
        return (
            AttentionCGSupport.ALWAYS,
            "every kernel finds its request and keys from device tensors, so a captured grid serves any batch",
        )

    def prepare(self, metadata: AttentionMetadata) -> None:
        metadata.scratch["triton_attn"] = self.plan(metadata)

    def plan(self, metadata: AttentionMetadata) -> Plan:
        """Tile and splits for a batch, from padded counts and the two host maxima only."""
        key = (metadata.num_reqs, metadata.num_tokens, metadata.max_query_len, metadata.max_seq_len)
        found = self._plans.get(key)
        if found is None:
            if len(self._plans) > 4096:
                self._plans.clear()
            found = self._plans[key] = self._make_plan(*key)
        return found

    def _make_plan(self, num_reqs: int, num_tokens: int, max_query_len: int, max_seq_len: int) -> Plan:
        spec = self.spec
        tile = self._tile(max_query_len)
        # One compiled form for all batches of an engine; padding may exceed max_num_seqs by a little.
        max_reqs = next_power_of_2(max(spec.max_num_seqs, num_reqs, 1))
        one_token = max_query_len <= 1 and not spec.batch_invariant
        tiles, head_tiles = query_tiles(tile, self.group, num_tokens, num_reqs, 1 if one_token else 2)
        programs = tiles * spec.num_kv_heads * head_tiles
        if not spec.batch_invariant and spec.dtype != "float32":
            tile = refine_tile(tile, spec.head_size, programs, self.num_sms, self.platform.capability)
        room = self._scratch_rows // max(1, num_tokens * spec.num_heads)
        if spec.batch_invariant:
            splits, fixed_range = fixed_ranges(spec.max_model_len, tile.block_n, spec.num_splits)
            if splits > max(1, room):
                raise BackendError(
                    f"a batch of {num_tokens} tokens with batch_invariant=True and num_splits={spec.num_splits}",
                    f"partial results are kept for {spec.max_num_batched_tokens} tokens (max_num_batched_tokens)",
                    "Raise max_num_batched_tokens, or leave num_splits at 0.",
                )
            return Plan(tile, one_token, max_reqs, programs, splits, fixed_range)
        # Splits share what a tile sees: no more than the window and the tile's own tokens.
        seen = max_seq_len if spec.sliding_window is None else min(max_seq_len, spec.sliding_window + max_query_len)
        splits = choose_num_splits(programs, self.num_sms, seen, tile.block_n, spec.num_splits, room)
        return Plan(tile, one_token, max_reqs, programs, splits)

    def _tile(self, max_query_len: int) -> Tile:
        """The tile for a batch; for all batches the one of a large chunk where results must not depend on the batch."""
        spec, capability = self.spec, self.platform.capability
        rows = MANY_ROWS if spec.batch_invariant else max(1, max_query_len) * self.group
        limit = shared_memory_limit(capability)
        tile = choose_tile(spec.head_size, ITEMSIZE[spec.dtype], rows, limit, capability)
        assert tile is not None  # refused at construction
        return tile

    def forward(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        output: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> None:
        plan = metadata.scratch.get("triton_attn") or self.plan(metadata)
        if metadata.num_tokens == 0 or plan.programs == 0:
            return
        key = (
            plan.tile, plan.one_token, plan.max_reqs, plan.splits > 1, plan.fixed_range > 0, sliding_window,
            logits_soft_cap is not None, None if sinks is None else sinks.dtype, lse is not None,
            query.dtype, query.stride(), key_cache.stride(), value_cache.stride(), output.stride(),
        )  # fmt: skip
        variants = self._variants.get(key)
        if variants is None:
            variants = self._variants[key] = self._make_variants(
                plan, query, key_cache, value_cache, output, sliding_window, logits_soft_cap, sinks, lse
            )
        attend, merge = variants
        cap = float(logits_soft_cap) if logits_soft_cap is not None else 0.0
        numbers = (scale * LOG2E, cap, metadata.num_reqs, metadata.block_table.stride(0), plan.fixed_range)
        # A tensor stands in where an optional one is absent; the compiled kernel does not touch it.
        sink_tensor = query if sinks is None else sinks
        lse_tensor = self._part_lse if lse is None else lse
        start = metadata.query_start_loc
        common = (sink_tensor, metadata.block_table, metadata.seq_lens, start)
        if merge is None:
            attend((plan.programs, 1, 1), (query, key_cache, value_cache, output, lse_tensor, *common), numbers)
            return
        partial = (query, key_cache, value_cache, self._part, self._part_lse, *common)
        attend((plan.programs, plan.splits, 1), partial, numbers)
        merge(
            (metadata.num_tokens * self.spec.num_heads, 1, 1),
            (self._part, self._part_lse, output, lse_tensor, sink_tensor, start),
            (metadata.num_reqs, plan.splits),
        )

    def _make_variants(
        self, plan: Plan, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, output: torch.Tensor,
        window: int | None, cap: float | None, sinks: torch.Tensor | None, lse: torch.Tensor | None,
    ) -> tuple[Any, Any]:  # fmt: skip
        """The compiled forms for these shapes and features; checks what the kernels rely on, once per form."""
        spec, tile = self.spec, plan.tile
        d = spec.head_size
        padded = max(16, next_power_of_2(d))
        for name, x in (("query", query), ("key_cache", key_cache), ("value_cache", value_cache), ("output", output)):
            if x.stride(-1) != 1:
                raise BackendError(
                    "TRITON_ATTN", f"the last dimension of {name} is not contiguous (stride {x.stride(-1)})"
                )
        if lse is not None and not lse.is_contiguous():
            raise BackendError("TRITON_ATTN", "lse must be contiguous [num_tokens, num_heads]")
        if window is not None and window < 1:
            raise BackendError("TRITON_ATTN", f"sliding_window={window} keeps no key", "It must be at least 1.")
        split = plan.splits > 1
        interior = has_interior_loop(tile, plan.one_token, window, spec.batch_invariant)
        precision = "ieee" if spec.dtype == "float32" else "tf32"
        sink_dtype = query.dtype if sinks is None else sinks.dtype
        attend = paged.paged_attention_kernel.variant(
            (query.dtype, key_cache.dtype, output.dtype, sink_dtype),
            (
                query.stride(0), query.stride(1),
                key_cache.stride(0), key_cache.stride(1), key_cache.stride(2),
                value_cache.stride(0), value_cache.stride(1), value_cache.stride(2),
                output.stride(0), output.stride(1),
                spec.num_heads, spec.num_kv_heads, d, padded, key_cache.shape[1], window or 0, cap is not None,
                sinks is not None and not split, lse is not None and not split,
                plan.one_token, plan.max_reqs, split, plan.fixed_range > 0, interior,
                tile.block_m, tile.block_n, precision,
            ),
            tile.num_warps, tile.num_stages,
        )  # fmt: skip
        if not split:
            return attend, None
        merge = paged.merge_splits_kernel.variant(
            (output.dtype, sink_dtype),
            (
                output.stride(0), output.stride(1), spec.num_heads, d, padded, sinks is not None, lse is not None,
                MERGE_BLOCK,
            ),
            4 if padded >= 128 else 2, 1,
        )  # fmt: skip
        return attend, merge

    def describe(self, metadata: AttentionMetadata) -> Sequence[KernelPlan]:
        plan = self.plan(metadata)
        notes = []
        if self.platform.device_type == "cpu":
            notes.append("runs in Triton's interpreter: right, and very slow")
        elif self.platform.capability and self.platform.capability < (8, 0):
            notes.append(f"Triton emits no tensor-core instructions for {self.platform.sm}: right, and slow")
        elif self.spec.dtype == "float32":
            notes.append("float32 products are IEEE, on ordinary cores")
        if self.spec.batch_invariant:
            ranges = (
                f", split into ranges of {plan.fixed_range * plan.tile.block_n} positions" if plan.splits > 1 else ""
            )
            notes.append(f"batch-invariant: this tile for every batch{ranges}")
        if plan.splits < self.spec.num_splits:
            notes.append(
                f"{self.spec.num_splits} splits were asked for; each needs a tile of keys and room for its result"
            )
        note, tile = "; ".join(notes), (plan.tile.block_m, plan.tile.block_n)
        if plan.splits == 1:
            return (KernelPlan("paged_attention_kernel", (plan.programs,), 1, tile, note),)
        merged = (metadata.num_tokens * self.spec.num_heads,)
        return (
            KernelPlan("paged_attention_kernel", (plan.programs, plan.splits), plan.splits, tile, note),
            KernelPlan("merge_splits_kernel", merged, plan.splits, None, "merges the splits by their log-sum-exp"),
        )


def _not_interpreting() -> Reason:
    return Reason(
        "on a CPU it runs in Triton's interpreter only, and Triton was loaded without it",
        "set TRITON_INTERPRET=1 before Python starts",
    )


def _triton_version() -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda_is_there() -> bool:
    try:
        import torch

        return torch.cuda.is_available()
    except Exception:
        return False
