"""Mixed batches in two calls, decodes in one and chunks in the other, around any backend. Refuses to know its kernels.

Some engines run a mixed batch like this; labkit's backends take it in one call. With `split_mixed_batches` both can be
timed on the same batches. The scheduler puts decodes first (`SchedulerLimits.decodes_first`), so each part is a slice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from labkit.attention.interface import AttentionBackend, AttentionCGSupport, AttentionSpec, KernelPlan

if TYPE_CHECKING:
    import torch

    from labkit.attention.metadata import AttentionMetadata


def lowered_tier(tier: AttentionCGSupport, why: str) -> tuple[AttentionCGSupport, str]:
    """A backend's tier and its reason when mixed batches are split: at most UNIFORM_BATCH. Pure."""
    if tier <= AttentionCGSupport.UNIFORM_BATCH:
        return tier, why
    return (
        AttentionCGSupport.UNIFORM_BATCH,
        "split_mixed_batches cuts a mixed batch where its decodes end, and a graph would bake the cut in",
    )


@dataclasses.dataclass(frozen=True)
class Part:
    """One call: who runs it, and its share of the batch. Rows of tokens `tokens` of what `forward` is given."""

    backend: AttentionBackend
    metadata: AttentionMetadata
    tokens: slice


class SplitMixedBatches(AttentionBackend):
    """Two instances of one backend: a batch may need two plans at a time, and an instance keeps one.

    Args:
        decodes: runs the decodes of mixed batches, uniform decode batches, and everything under a graph.
        chunks: an instance of the same class and spec; runs the chunks of mixed batches, and batches without decodes.
    """

    def __init__(self, decodes: AttentionBackend, chunks: AttentionBackend) -> None:
        super().__init__(decodes.spec, decodes.device)
        self.decodes, self.chunks = decodes, chunks
        self.capabilities = decodes.capabilities  # type: ignore[misc]

    def warm_up(self, progress: Callable[[str, int, int, str], None] | None) -> None:
        self.decodes.warm_up(progress)
        self.chunks.warm_up(progress)

    def prepare(self, metadata: AttentionMetadata) -> None:
        parts = self.parts(metadata)
        for part in parts:
            part.backend.prepare(part.metadata)
        metadata.scratch["split_mixed"] = parts

    def parts(self, metadata: AttentionMetadata) -> list[Part]:
        """The calls for a batch: two when it begins with one-token requests and goes on with longer ones, else one.

        Padding has no place in a batch that is split: it is eager, so it has none.
        """
        everything = slice(0, metadata.num_tokens)
        if metadata.for_graph or metadata.is_uniform_decode:
            return [Part(self.decodes, metadata, everything)]
        starts = metadata.query_start_loc_cpu
        decodes = 0
        while decodes < metadata.num_reqs and starts[decodes + 1] == decodes + 1:
            decodes += 1
        if decodes == metadata.num_reqs:
            return [Part(self.decodes, metadata, everything)]
        if decodes == 0:
            return [Part(self.chunks, metadata, everything)]
        return [
            Part(self.decodes, self._decodes(metadata, decodes), slice(0, decodes)),
            Part(self.chunks, self._chunks(metadata, decodes), slice(decodes, metadata.num_tokens)),
        ]

    def _decodes(self, metadata: AttentionMetadata, n: int) -> AttentionMetadata:
        lens = metadata.seq_lens_cpu[:n]
        return dataclasses.replace(
            metadata, num_reqs=n, num_tokens=n, num_actual_reqs=n, num_actual_tokens=n,
            max_query_len=1, max_seq_len=int(lens.max()),
            query_start_loc=metadata.query_start_loc[: n + 1], seq_lens=metadata.seq_lens[:n],
            block_table=metadata.block_table[:n], slot_mapping=metadata.slot_mapping[:n],
            query_start_loc_cpu=metadata.query_start_loc_cpu[: n + 1], seq_lens_cpu=lens,
            is_uniform_decode=True, scratch={},
        )  # fmt: skip

    def _chunks(self, metadata: AttentionMetadata, n: int) -> AttentionMetadata:
        reqs, tokens = metadata.num_reqs - n, metadata.num_tokens - n
        starts, lens = metadata.query_start_loc_cpu[n:] - n, metadata.seq_lens_cpu[n:]
        return dataclasses.replace(
            metadata, num_reqs=reqs, num_tokens=tokens, num_actual_reqs=reqs, num_actual_tokens=tokens,
            max_query_len=int((starts[1:] - starts[:-1]).max()), max_seq_len=int(lens.max()),
            query_start_loc=metadata.query_start_loc[n:] - n, seq_lens=_aligned(metadata.seq_lens[n:]),
            block_table=_aligned(metadata.block_table[n:]), slot_mapping=metadata.slot_mapping[n:],
            query_start_loc_cpu=starts, seq_lens_cpu=lens, is_uniform_decode=False, scratch={},
        )  # fmt: skip

    def forward(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        output: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        lse: torch.Tensor | None = None,
        **features: Any,
    ) -> None:
        if "split_mixed" not in metadata.scratch:
            self.prepare(metadata)
        parts: list[Part] = metadata.scratch["split_mixed"]
        if len(parts) == 1:  # with the metadata of this call: a graph has its own copy
            parts[0].backend.forward(query, key_cache, value_cache, output, metadata, lse=lse, **features)
            return
        for part in parts:
            rows = part.tokens
            part.backend.forward(
                query[rows], key_cache, value_cache, output[rows], part.metadata,
                lse=None if lse is None else lse[rows], **features,
            )  # fmt: skip

    def describe(self, metadata: AttentionMetadata) -> Sequence[KernelPlan]:
        parts: list[Part] = metadata.scratch.get("split_mixed") or self.parts(metadata)
        if len(parts) == 1:
            return parts[0].backend.describe(metadata)
        out: list[KernelPlan] = []
        for part, name in zip(parts, ("decodes", "chunks"), strict=True):
            for plan in part.backend.describe(part.metadata):
                out.append(dataclasses.replace(plan, note=f"{name}; {plan.note}" if plan.note else name))
        return out


def make_backend(cls: type[AttentionBackend], spec: AttentionSpec, device: torch.device) -> AttentionBackend:
    """An instance of `cls` for `spec`; two under one wrapper where mixed batches are to be split.

    A backend of the MLA family, which computes the absorbed form, gets the expanded form for chunks beside it.
    """
    backend = cls(spec, device)
    if spec.family == "MLA":
        from labkit.attention.mla.forms import LatentAttention

        return LatentAttention(backend)
    return SplitMixedBatches(backend, cls(spec, device)) if spec.split_mixed_batches else backend


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """`rows`, or a copy where they begin in the middle of 16 bytes: kernels are compiled for aligned pointers."""
    return rows if rows.data_ptr() % 16 == 0 else rows.clone()
