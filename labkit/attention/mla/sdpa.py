"""TORCH_SDPA_MLA: torch's scaled_dot_product_attention over gathered latents. Works anywhere; refuses to be fast.

All heads are rows of one query over one head of keys, whose first columns are the values. Decodes are gathered into one
dense batch, as `labkit.attention.sdpa` does it, and can be captured; chunks in the absorbed form run one by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

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
from labkit.attention.sdpa import GATHER_LIMIT, TorchSDPABackend

if TYPE_CHECKING:
    import torch

    from labkit.attention.metadata import AttentionMetadata

_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


def gather_bytes(spec: AttentionSpec) -> int:
    """Bytes that the gathered latents of one layer take for the widest batch at the longest context."""
    blocks = math.ceil(spec.max_model_len / spec.block_size)
    return spec.max_num_seqs * blocks * spec.block_size * spec.head_size * _ITEMSIZE[spec.dtype]


class TorchSDPAMLABackend(AttentionBackend):
    """The fallback for MLA models."""

    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        name="TORCH_SDPA_MLA",
        family="MLA",
        dtypes=("float32", "float16", "bfloat16"),
        head_sizes=(1, 1024, 1),
        block_sizes=(1, 4096, 1),
        device_types=("cuda", "rocm", "cpu"),
    )

    @classmethod
    def availability(cls) -> Availability:
        return TorchSDPABackend.availability()

    @classmethod
    def extra_reasons(
        cls, spec: AttentionSpec, platform: Platform, available: Availability | None = None
    ) -> list[Reason]:
        if spec.sdpa_kernel in ("auto", "math"):
            return []
        why = f"sdpa_kernel={spec.sdpa_kernel!r} takes no values that are narrower than keys under a mask"
        return [Reason(why, "set sdpa_kernel to auto", "sdpa_kernel", "auto")]

    @classmethod
    def graph_support(
        cls, spec: AttentionSpec, platform: Platform, available: Availability | None = None
    ) -> tuple[AttentionCGSupport, str]:
        need = gather_bytes(spec)
        if need > GATHER_LIMIT:
            return AttentionCGSupport.NEVER, (
                f"a graph would gather max_num_seqs={spec.max_num_seqs} × max_model_len={spec.max_model_len} latents, "
                f"{need / 2**30:.1f} GiB a layer, above the limit of 1 GiB; lower one of the two"
            )
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, (
            f"decodes are gathered over max_model_len ({need / 2**20:.0f} MiB at most); chunks run one by one"
        )

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
        if sliding_window is not None or logits_soft_cap is not None or sinks is not None:
            raise NotImplementedError("TORCH_SDPA_MLA declares no window, soft-cap or sinks; the selector refuses them")
        rank = value_cache.shape[-1]
        if self._gathers(metadata):
            self._gathered(query, key_cache, rank, output, metadata, scale, lse)
        else:
            self._per_request(query, key_cache, rank, output, metadata, scale, lse)

    def _gathers(self, metadata: AttentionMetadata) -> bool:
        return metadata.max_query_len == 1 and metadata.num_tokens == metadata.num_reqs

    def _gathered(
        self, query: torch.Tensor, cache: torch.Tensor, rank: int, output: torch.Tensor, metadata: AttentionMetadata,
        scale: float, lse: torch.Tensor | None,
    ) -> None:  # fmt: skip
        import torch
        import torch.nn.functional as functional

        rows, block_size = metadata.num_reqs, cache.shape[1]
        blocks = max(1, math.ceil(metadata.max_seq_len / block_size))
        lens = metadata.seq_lens[:rows]
        visible = torch.arange(blocks * block_size, device=query.device, dtype=lens.dtype) < lens[:, None]
        # Beyond a request's length lies whatever the page held before, NaN included, and 0 · NaN is NaN.
        keys = cache[metadata.block_table[:rows, :blocks]].flatten(1, 3).masked_fill_(~visible[:, :, None], 0)
        mask = visible[:, None, None, :]
        q = query[:rows, None]  # [rows, 1 head, heads as rows, width]
        out = functional.scaled_dot_product_attention(
            q, keys[:, None], keys[:, None, :, :rank], attn_mask=mask, scale=scale
        )
        output[:rows].copy_(out.squeeze(1).masked_fill((lens <= 0)[:, None, None], 0))
        if lse is not None:
            scores = torch.einsum("rhd,rkd->rhk", query[:rows].float(), keys.float()) * scale
            lse[:rows].copy_(scores.masked_fill(~visible[:, None, :], -math.inf).logsumexp(-1))

    def _per_request(
        self, query: torch.Tensor, cache: torch.Tensor, rank: int, output: torch.Tensor, metadata: AttentionMetadata,
        scale: float, lse: torch.Tensor | None,
    ) -> None:  # fmt: skip
        import torch
        import torch.nn.functional as functional

        block_size, starts, lens = cache.shape[1], metadata.query_start_loc_cpu, metadata.seq_lens_cpu
        for row in range(metadata.num_reqs):
            first, last, length = int(starts[row]), int(starts[row + 1]), int(lens[row])
            blind = min(last, first + max(0, last - first - length))  # leading rows that see no key at all
            output[first:blind].zero_()
            if lse is not None:
                lse[first:blind].fill_(-math.inf)
            if blind == last:
                continue
            pages = metadata.block_table[row, : math.ceil(length / block_size)]
            keys = cache[pages].flatten(0, 2)[:length]
            # Bottom-right: query i of n sees the first length - n + i + 1 keys.
            position = torch.arange(length, device=query.device)
            seen = position <= torch.arange(length - (last - blind), length, device=query.device)[:, None]
            q = query[blind:last].transpose(0, 1)
            out = functional.scaled_dot_product_attention(
                q[None], keys.expand(1, q.shape[0], -1, -1), keys[:, :rank].expand(1, q.shape[0], -1, -1),
                attn_mask=seen, scale=scale,
            )  # fmt: skip
            output[blind:last].copy_(out[0].transpose(0, 1))
            if lse is not None:
                scores = torch.einsum("qhd,kd->qhk", query[blind:last].float(), keys.float()) * scale
                lse[blind:last].copy_(scores.masked_fill(~seen[:, None, :], -math.inf).logsumexp(-1))

    def describe(self, metadata: AttentionMetadata) -> Sequence[KernelPlan]:
        kernel = f"scaled_dot_product_attention ({self.spec.sdpa_kernel})"
        if self._gathers(metadata):
            note = f"one call over latents gathered to {metadata.max_seq_len} keys"
            return [KernelPlan(kernel, grid=(metadata.num_reqs,), note=note)]
        return [KernelPlan(kernel, grid=(metadata.num_actual_reqs,), note="one call per request")]
