"""FLASH_ATTN_MLA: FlashAttention 3 with its second query, `qv`, where a build of it has that. Refuses to guess.

FA3 computes softmax(q·k + qv·v)·v: with q and k the rotated parts and v the latents that is the absorbed form. The
kernels are left out of most builds, and such a build does not refuse the call but runs another kernel on it, so a build
that does not say that it has them is not called. Checked against the library's arguments only: no build was found that
has the kernels, so it was never run.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from labkit.attention.flash_attn_providers import MAX_SPLITS_UNDER_GRAPH
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
from labkit.errors import BackendError

if TYPE_CHECKING:
    import torch

    from labkit.attention.metadata import AttentionMetadata

MODULE = "flash_attn_interface"
RANK, ROPE = 512, 64
#: The build flag that leaves out the kernels for values wider than keys, under both its spellings.
FLAGS = ("FLASH_ATTENTION_DISABLE_HDIMDIFF64", "FLASHATTENTION_DISABLE_HDIMDIFF64")


class FlashAttentionMLABackend(AttentionBackend):
    """Absorbed MLA of DeepSeek's sizes, 512 + 64, on sm_90."""

    capabilities = BackendCapabilities(
        name="FLASH_ATTN_MLA",
        family="MLA",
        dtypes=("float16", "bfloat16"),
        head_sizes=(RANK + ROPE, RANK + ROPE, 1),
        block_sizes=(16, 4096, 16),
        min_capability=(9, 0),
        num_splits=True,
        preferred_block_size=64,
    )

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        import torch

        on_gpu = device.type == "cuda"
        reasons = self.why_not(
            spec, Platform(device.type, torch.cuda.get_device_capability(device) if on_gpu else None)
        )
        available = self.availability()
        if not available.usable:
            reasons.insert(0, Reason(available.reason))
        if reasons:
            raise BackendError("attention_backend='FLASH_ATTN_MLA'", "; ".join(map(str, reasons)))
        self._library = importlib.import_module(MODULE)
        self._schedulers: dict[tuple[int, int], torch.Tensor] = {}

    @classmethod
    def availability(cls) -> Availability:
        return _availability()

    @classmethod
    def extra_reasons(
        cls, spec: AttentionSpec, platform: Platform, available: Availability | None = None
    ) -> list[Reason]:
        out: list[Reason] = []
        if platform.capability is not None and platform.capability[0] > 9:
            out.append(Reason(f"FA3 has kernels for sm_9x only, not for {platform.sm}"))
        if spec.family == "MLA" and spec.head_size == RANK + ROPE and spec.head_size_v != RANK:
            out.append(Reason(f"a latent of {spec.head_size_v} is not supported", f"it takes {RANK} + {ROPE}"))
        return out

    @classmethod
    def graph_support(
        cls, spec: AttentionSpec, platform: Platform, available: Availability | None = None
    ) -> tuple[AttentionCGSupport, str]:
        return AttentionCGSupport.UNIFORM_BATCH, (
            f"its schedule is refreshed before each replay and its splits are bounded by {MAX_SPLITS_UNDER_GRAPH}; "
            "vLLM's tier, never replayed here"
        )

    def prepare(self, metadata: AttentionMetadata) -> None:
        import torch

        spec, longest = self.spec, max(1, metadata.max_query_len)
        splits = spec.num_splits or (MAX_SPLITS_UNDER_GRAPH if metadata.for_graph else 0)
        scheduler = None
        if metadata.num_reqs:
            with torch.inference_mode(False), torch.no_grad():
                # Its arguments must be those of the call.
                scheduler = self._library.get_scheduler_metadata(
                    metadata.num_reqs, longest, max(1, metadata.max_seq_len), spec.num_heads, 1, ROPE,
                    metadata.seq_lens, qkv_dtype=getattr(torch, spec.dtype), headdim_v=RANK,
                    cu_seqlens_q=metadata.query_start_loc, page_size=spec.block_size, causal=True, num_splits=splits,
                )  # fmt: skip
                if metadata.for_graph:
                    kept = self._schedulers.setdefault((metadata.num_reqs, metadata.num_tokens), scheduler)
                    if kept is not scheduler:
                        kept.copy_(scheduler)
                    scheduler = kept
        metadata.scratch["flash_attn_mla"] = (longest, splits, scheduler)

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
        if metadata.num_tokens == 0:
            return
        if sliding_window is not None or logits_soft_cap is not None or sinks is not None:
            raise BackendError("FLASH_ATTN_MLA", "it has no window, soft-cap or sinks; the selector refuses them")
        if "flash_attn_mla" not in metadata.scratch:
            self.prepare(metadata)
        found, found_lse = self._call(query, key_cache, metadata, scale)
        output.copy_(found)
        if lse is not None:
            lse.copy_(found_lse.t())

    def _call(
        self, query: torch.Tensor, cache: torch.Tensor, metadata: AttentionMetadata, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        longest, splits, scheduler = metadata.scratch["flash_attn_mla"]
        result = self._library.flash_attn_with_kvcache(
            query[..., RANK:], cache[..., RANK:], cache[..., :RANK], qv=query[..., :RANK],
            cache_seqlens=metadata.seq_lens, page_table=metadata.block_table, cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_q=longest, softmax_scale=scale, causal=True, scheduler_metadata=scheduler, num_splits=splits,
            return_softmax_lse=True,
        )  # fmt: skip
        return result[0], result[1]

    def bare_call(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        output: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> Callable[[], Any] | None:
        self.prepare(metadata)
        return functools.partial(self._call, query, key_cache, metadata, scale)

    def describe(self, metadata: AttentionMetadata) -> Sequence[KernelPlan]:
        splits = metadata.scratch.get("flash_attn_mla", (1, self.spec.num_splits, None))[1]
        note = "FA3 with qv" + ("" if splits else "; the library chooses the splits")
        return [KernelPlan("FlashAttnFwdSm90", num_splits=max(1, splits), note=note)]


@functools.cache
def _availability() -> Availability:
    if importlib.util.find_spec(MODULE) is None:
        return Availability(False, f"ModuleNotFoundError: No module named '{MODULE}'")
    try:
        flags = importlib.import_module("flash_attn_config").CONFIG["build_flags"]
    except Exception as error:
        why = f"{MODULE} does not say whether it was built with kernels for qv ({type(error).__name__}: {error})"
        return Availability(False, why)
    found = [flag for flag in FLAGS if flag in flags]
    if not found or any(flags[flag] for flag in found):
        why = f"this build of {MODULE} has no kernels for qv ({' or '.join(found or FLAGS)} is set)"
        return Availability(False, why)
    try:
        import torch

        if torch.cuda.is_available():
            importlib.import_module(MODULE)
    except Exception as error:  # whatever a broken install raises is the answer to the question
        return Availability(False, f"{type(error).__name__}: {error}")
    return Availability(True, "", MODULE)
