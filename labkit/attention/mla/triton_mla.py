"""TRITON_MLA: labkit's own kernel for the absorbed form, behind the backend interface. Refuses to know the model.

One kernel serves any batch; one with too few programs to fill the GPU gets its keys split over more of them, and the
merge of `labkit.attention.kernels.paged`. Triton is imported when an instance is made, not before.
"""

from __future__ import annotations

import dataclasses
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
from labkit.attention.kernels import mla, paged
from labkit.attention.kernels.mla_tiles import LatentTile, choose_latent_tile
from labkit.attention.kernels.tiles import MAX_SPLITS, choose_num_splits, shared_memory_limit
from labkit.attention.triton_attn import (
    ITEMSIZE,
    LOG2E,
    MANY_ROWS,
    MERGE_BLOCK,
    TritonAttentionBackend,
    _not_interpreting,
)
from labkit.errors import BackendError
from labkit.launch import interpreting, next_power_of_2

if TYPE_CHECKING:
    import torch

    from labkit.attention.metadata import AttentionMetadata


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one batch launches per layer. Hashable, a function of host integers only."""

    tile: LatentTile
    one_token: bool
    max_reqs: int
    programs: int
    splits: int


class TritonMLABackend(AttentionBackend):
    """Absorbed MLA in Triton for any latent rank up to 512; see `labkit.attention.kernels.mla`."""

    capabilities = BackendCapabilities(
        name="TRITON_MLA",
        family="MLA",
        dtypes=("float32", "float16", "bfloat16"),
        head_sizes=(32, 640, 8),
        block_sizes=(16, 4096, 16),
        device_types=("cuda", "rocm", "cpu"),
        min_capability=(8, 0),  # on sm_75 a latent does not stay in registers, nor the tile in shared memory
        num_splits=True,
    )

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        import torch

        platform = Platform(device.type, torch.cuda.get_device_capability(device) if device.type == "cuda" else None)
        reasons = self.why_not(spec, platform)
        available = self.availability()
        if not available.usable:
            reasons.insert(0, Reason(f"Triton does not load ({available.reason})", "install triton"))
        if device.type == "cpu" and not interpreting() and not reasons:
            reasons.append(_not_interpreting())
        if reasons:
            raise BackendError("attention_backend='TRITON_MLA'", "; ".join(map(str, reasons)))
        self.platform = platform
        self.rank, self.rope = spec.head_size_v, spec.head_size - spec.head_size_v
        # The interpreter runs programs one after another: splitting would only cost.
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
        # A tile has at most 32 rows, and twice as many programs as SMs are the most that splitting makes by itself.
        asked = spec.max_num_seqs * spec.num_heads * min(spec.num_splits, MAX_SPLITS)
        self._scratch_rows = max(2 * self.num_sms * 32, asked)
        self._part = torch.empty(max(self._scratch_rows, 1) * self.rank, dtype=torch.float32, device=device)
        self._part_lse = torch.empty(max(self._scratch_rows, 1), dtype=torch.float32, device=device)
        self._variants: dict[tuple[Any, ...], Any] = {}
        self._plans: dict[tuple[int, ...], Plan] = {}

    @classmethod
    def availability(cls) -> Availability:
        return TritonAttentionBackend.availability()

    @classmethod
    def extra_reasons(
        cls, spec: AttentionSpec, platform: Platform, available: Availability | None = None
    ) -> list[Reason]:
        # What Triton asks of the machine is the same for every kernel; its tiles are not.
        plain = dataclasses.replace(spec, head_size=64)
        out = TritonAttentionBackend.extra_reasons(plain, platform, available)
        rank, rope = spec.head_size_v, spec.head_size - spec.head_size_v
        limit = shared_memory_limit(platform.capability)
        if platform.device_type == "cpu" or spec.family != "MLA":
            return out
        if any(choose_latent_tile(rank, rope, ITEMSIZE[spec.dtype], rows, limit) is None
               for rows in (1, MANY_ROWS)):  # fmt: skip
            why = f"no tile of latents of {rank} + {rope} in {spec.dtype} fits {limit} bytes of shared memory"
            out.append(Reason(why, "take TORCH_SDPA_MLA"))
        return out

    @classmethod
    def graph_support(
        cls, spec: AttentionSpec, platform: Platform, available: Availability | None = None
    ) -> tuple[AttentionCGSupport, str]:
        return (
            AttentionCGSupport.ALWAYS,
            "the kernel finds its request and keys from device tensors, so a captured grid serves any batch; vLLM "
            "lists UNIFORM_BATCH, since its mixed batches take the expanded form, which no FULL graph of labkit's does",
        )

    def prepare(self, metadata: AttentionMetadata) -> None:
        metadata.scratch["triton_mla"] = self.plan(metadata)

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
        spec, capability = self.spec, self.platform.capability
        rows = max(1, max_query_len) * spec.num_heads
        limit = shared_memory_limit(capability)
        tile = choose_latent_tile(self.rank, self.rope, ITEMSIZE[spec.dtype], rows, limit)
        assert tile is not None  # refused at construction
        one_token = max_query_len <= 1
        row_heads = min(spec.num_heads, tile.block_m)
        head_tiles = -(-spec.num_heads // row_heads)
        tiles = num_reqs if one_token else num_tokens // (tile.block_m // row_heads) + num_reqs
        programs = tiles * head_tiles
        room = self._scratch_rows // max(1, num_tokens * spec.num_heads)
        splits = choose_num_splits(programs, self.num_sms, max_seq_len, tile.block_n, spec.num_splits, room)
        return Plan(tile, one_token, next_power_of_2(max(spec.max_num_seqs, num_reqs, 1)), programs, splits)

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
        plan = metadata.scratch.get("triton_mla") or self.plan(metadata)
        if metadata.num_tokens == 0 or plan.programs == 0:
            return
        if sliding_window is not None or logits_soft_cap is not None or sinks is not None:
            raise BackendError("TRITON_MLA", "it has no window, soft-cap or sinks; the selector refuses them")
        key = (
            plan.tile, plan.one_token, plan.max_reqs, plan.splits > 1, lse is not None, query.dtype, query.stride(),
            key_cache.stride(), key_cache.shape[1], output.stride(),
        )  # fmt: skip
        variants = self._variants.get(key)
        if variants is None:
            variants = self._variants[key] = self._make_variants(plan, query, key_cache, output, lse)
        attend, merge = variants
        numbers = (scale * LOG2E, metadata.num_reqs, metadata.block_table.stride(0))
        lse_tensor = self._part_lse if lse is None else lse
        common = (metadata.block_table, metadata.seq_lens, metadata.query_start_loc)
        if merge is None:
            attend((plan.programs, 1, 1), (query, key_cache, output, lse_tensor, *common), numbers)
            return
        attend((plan.programs, plan.splits, 1), (query, key_cache, self._part, self._part_lse, *common), numbers)
        merge(
            (metadata.num_tokens * self.spec.num_heads, 1, 1),
            (self._part, self._part_lse, output, lse_tensor, query, metadata.query_start_loc),
            (metadata.num_reqs, plan.splits),
        )

    def _make_variants(
        self, plan: Plan, query: torch.Tensor, cache: torch.Tensor, output: torch.Tensor, lse: torch.Tensor | None
    ) -> tuple[Any, Any]:
        """The compiled forms for these shapes; checks what the kernel relies on, once per form."""
        spec, tile, split = self.spec, plan.tile, plan.splits > 1
        for name, x in (("query", query), ("key_cache", cache), ("output", output)):
            if x.stride(-1) != 1:
                raise BackendError("TRITON_MLA", f"the last dimension of {name} is not contiguous")
        if lse is not None and not lse.is_contiguous():
            raise BackendError("TRITON_MLA", "lse must be contiguous [num_tokens, num_heads]")
        rank_padded = max(16, next_power_of_2(self.rank))
        attend = mla.mla_attention_kernel.variant(
            (query.dtype, cache.dtype, output.dtype),
            (
                query.stride(0), query.stride(1), cache.stride(0), cache.stride(1), output.stride(0), output.stride(1),
                spec.num_heads, self.rank, self.rope, rank_padded, max(16, next_power_of_2(self.rope)), cache.shape[1],
                lse is not None and not split, plan.one_token, plan.max_reqs, split, tile.block_m, tile.block_n,
                "ieee" if spec.dtype == "float32" else "tf32",
            ),
            tile.num_warps, tile.num_stages,
        )  # fmt: skip
        if not split:
            return attend, None
        merge = paged.merge_splits_kernel.variant(
            (output.dtype, query.dtype),
            (
                output.stride(0), output.stride(1), spec.num_heads, self.rank, rank_padded, False, lse is not None,
                MERGE_BLOCK,
            ),
            4 if rank_padded >= 128 else 2, 1,
        )  # fmt: skip
        return attend, merge

    def describe(self, metadata: AttentionMetadata) -> Sequence[KernelPlan]:
        plan = metadata.scratch.get("triton_mla") or self.plan(metadata)
        tile = (plan.tile.block_m, plan.tile.block_n)
        note = "a kernel for any batch" if not plan.one_token else "one token per request"
        first = KernelPlan("mla_attention_kernel", (plan.programs, plan.splits), plan.splits, tile, note)
        if plan.splits == 1:
            return [first]
        grid = (metadata.num_tokens * self.spec.num_heads,)
        return [first, KernelPlan("merge_splits_kernel", grid, plan.splits, None, "merges the splits by their LSEs")]
