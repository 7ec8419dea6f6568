"""Both forms behind one call: decodes absorbed, by a backend; chunks expanded. Refuses to know the backend's kernels.

Under a FULL graph everything is absorbed, since the expanded form has shapes that follow from lengths. Eager steps, and
those between the segments of a piecewise graph, are cut where their leading decodes end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from labkit.attention.interface import AttentionBackend, KernelPlan
from labkit.attention.mla.chunks import ChunkPlan, attend_chunks, piece_tokens, plan_pieces, to_device
from labkit.attention.mla.layer import LatentLayer, LatentShape

if TYPE_CHECKING:
    import torch

    from labkit.attention.metadata import AttentionMetadata

#: Where a step's `_Parts` lie in `AttentionMetadata.scratch`.
SCRATCH = "mla_forms"


@dataclasses.dataclass
class _Parts:
    """The first `tokens` requests are decodes, in `decodes`; the rest are chunks, whose plan the first layer makes.

    It needs the model's sizes, which only a layer knows.
    """

    tokens: int
    decodes: AttentionMetadata | None
    chunks: ChunkPlan | None = None


def leading_decodes(metadata: AttentionMetadata) -> int:
    """How many requests, from the first on, bring one token each."""
    starts, n = metadata.query_start_loc_cpu, 0
    while n < metadata.num_reqs and starts[n + 1] == n + 1:
        n += 1
    return n


def first_requests(metadata: AttentionMetadata, n: int) -> AttentionMetadata:
    """The first `n` requests of a batch as one of their own; each of them brings one token."""
    lens = metadata.seq_lens_cpu[:n]
    return dataclasses.replace(
        metadata, num_reqs=n, num_tokens=n, num_actual_reqs=n, num_actual_tokens=n,
        max_query_len=1, max_seq_len=int(lens.max()),
        query_start_loc=metadata.query_start_loc[: n + 1], seq_lens=metadata.seq_lens[:n],
        block_table=metadata.block_table[:n], slot_mapping=metadata.slot_mapping[:n],
        query_start_loc_cpu=metadata.query_start_loc_cpu[: n + 1], seq_lens_cpu=lens,
        is_uniform_decode=True, scratch={},
    )  # fmt: skip


class LatentAttention(AttentionBackend):
    """A backend of the MLA family and the expanded form beside it. `forward` is the backend's own, absorbed.

    Args:
        absorbed: the backend.
    """

    def __init__(self, absorbed: AttentionBackend) -> None:
        super().__init__(absorbed.spec, absorbed.device)
        self.absorbed = absorbed
        self._layers: dict[int, LatentLayer] = {}
        self.capabilities = absorbed.capabilities  # type: ignore[misc]

    def warm_up(self, progress: Callable[[str, int, int, str], None] | None) -> None:
        self.absorbed.warm_up(progress)

    def prepare(self, metadata: AttentionMetadata) -> None:
        n = metadata.num_reqs if metadata.for_graph else leading_decodes(metadata)
        if n == metadata.num_reqs:
            self.absorbed.prepare(metadata)
            return
        decodes = first_requests(metadata, n) if n else None
        if decodes is not None:
            self.absorbed.prepare(decodes)
        metadata.scratch[SCRATCH] = _Parts(n, decodes)

    def attend(
        self,
        number: int,
        kv_b: torch.Tensor,
        query: torch.Tensor,
        cache: torch.Tensor,
        output: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> None:
        """Attention of layer `number`, whose latents of this step are in the cache already.

        Args:
            kv_b: `[heads * (nope + value), rank]`, the layer's up-projection.
            query: `[num_tokens, heads, nope + rope]`, rotated. output: `[num_tokens, heads, value]`.
            cache: `[num_blocks, block_size, 1, rank + rope]`.
        """
        layer = self._layer(number, kv_b, query, cache, output)
        parts: _Parts | None = None if metadata.for_graph else metadata.scratch.get(SCRATCH)
        if parts is None:
            self._absorbed(layer, query, cache, output, metadata, scale)
            return
        n = parts.tokens
        if parts.decodes is not None:
            self._absorbed(layer, query[:n], cache, output[:n], parts.decodes, scale)
        if parts.chunks is None:
            parts.chunks = self._plan(layer, metadata, n, query.element_size())
        attend_chunks(layer, parts.chunks, query[n:], cache, output[n:], scale)

    def _layer(
        self, number: int, kv_b: torch.Tensor, query: torch.Tensor, cache: torch.Tensor, output: torch.Tensor
    ) -> LatentLayer:
        """The layer's views into its weights: those of the last call, unless the weights are others now."""
        found = self._layers.get(number)
        if found is None or found.kv_b.data_ptr() != kv_b.data_ptr():
            heads, rank, rope = query.shape[1], kv_b.shape[1], cache.shape[-1] - kv_b.shape[1]
            shape = LatentShape(heads, rank, query.shape[2] - rope, rope, output.shape[2])
            found = self._layers[number] = LatentLayer(shape, kv_b)
        return found

    def _absorbed(
        self, layer: LatentLayer, query: torch.Tensor, cache: torch.Tensor, output: torch.Tensor,
        metadata: AttentionMetadata, scale: float,
    ) -> None:  # fmt: skip
        rank = layer.shape.rank
        attended = query.new_empty((query.shape[0], layer.shape.num_heads, rank))
        self.forward(layer.absorb(query), cache, cache[..., :rank], attended, metadata, scale=scale)
        layer.values(attended, output)

    def _plan(self, layer: LatentLayer, metadata: AttentionMetadata, first: int, itemsize: int) -> ChunkPlan:
        """All requests behind the first `first`, which bring one token each."""
        reqs = metadata.num_reqs
        starts = metadata.query_start_loc_cpu[first : reqs + 1] - first
        pieces = plan_pieces(starts, metadata.seq_lens_cpu[first:reqs], piece_tokens(layer.shape, itemsize))
        return to_device(pieces, metadata.block_table[first:reqs], self.spec.block_size)

    def forward(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        output: torch.Tensor,
        metadata: AttentionMetadata,
        **options: Any,
    ) -> None:
        """The absorbed form for a whole batch, chunks among it; see `AttentionBackend.forward`."""
        self.absorbed.forward(query, key_cache, value_cache, output, metadata, **options)

    def bare_call(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        output: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> Callable[[], Any] | None:
        return self.absorbed.bare_call(query, key_cache, value_cache, output, metadata, scale)

    def describe(self, metadata: AttentionMetadata) -> Sequence[KernelPlan]:
        parts: _Parts | None = None if metadata.for_graph else metadata.scratch.get(SCRATCH)
        if parts is None:
            return self.absorbed.describe(metadata)
        first = [] if parts.decodes is None else list(self.absorbed.describe(parts.decodes))
        first = [dataclasses.replace(p, note=f"decodes, absorbed; {p.note}") for p in first]
        chunks = metadata.num_reqs - parts.tokens
        return [*first, KernelPlan("mla_chunks_kernel", note=f"{chunks} chunks, expanded")]
