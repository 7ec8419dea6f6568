"""Attention as the model calls it: write K and V into the paged cache, then run the backend. Refuses to know the model.

The model passes tensors and a layer number; everything else (cache, metadata, backend) comes from the forward context,
so that the call looks the same eagerly, under capture and as an opaque operator of torch.compile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from labkit.attention.kernels.mla_latent import write_latent
from labkit.errors import LabkitError
from labkit.paging.cache_write import write_kv

if TYPE_CHECKING:
    import torch

    from labkit.attention.groups import LayerAttention
    from labkit.attention.interface import AttentionBackend
    from labkit.attention.metadata import AttentionMetadata


@dataclasses.dataclass(frozen=True)
class ForwardContext:
    """What attention needs during one forward pass. Caches are per layer, see `AttentionBackend.forward` for shapes.

    `break_at(layer, *tensors)`, where given, is called in place of attention, with the arguments that `resume` wants
    later: whoever records the pass as segments ends one there and begins the next. `layers`, where given, has what each
    layer asks beyond a plain call, and the backend of its group.
    """

    backend: AttentionBackend
    metadata: AttentionMetadata
    key_caches: Sequence[torch.Tensor]
    value_caches: Sequence[torch.Tensor]
    scale: float
    break_at: Callable[..., None] | None = None
    layers: Sequence[LayerAttention] = ()


class _Current(threading.local):
    """One context for each thread: engines in two threads must not write into each other's caches."""

    context: ForwardContext | None = None


_current = _Current()


@contextlib.contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Make `context` the one that `attention` uses; the previous one comes back afterwards."""
    previous, _current.context = _current.context, context
    try:
        yield
    finally:
        _current.context = previous


def layer_cache(layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Key cache, value cache and slots of one layer, for a kernel that rotates and writes in one launch."""
    context = _context()
    return context.key_caches[layer], context.value_caches[layer], context.metadata.slot_mapping


def slots() -> torch.Tensor | None:
    """Slots of this step's tokens, −1 on padding; None outside a forward context, where every token is a real one."""
    context = _current.context
    return None if context is None else context.metadata.slot_mapping


def attend(layer: int, query: torch.Tensor, output: torch.Tensor) -> None:
    """Attention of one layer whose K and V of this step are in the cache already; see `attention`.

    `query` may have more rows than the step has tokens (padding, between the segments of a piecewise step): attention
    runs eagerly there and is spared them.
    """
    context = _context()
    if context.break_at is not None:
        context.break_at(layer, query, output)
        return
    metadata = context.metadata
    tokens = metadata.num_tokens
    if query.shape[0] != tokens:
        query, output = query[:tokens], output[:tokens]
    keys, values = context.key_caches[layer], context.value_caches[layer]
    if context.layers:
        context.layers[layer].forward(query, keys, values, output, metadata, context.scale)
    else:
        context.backend.forward(query, keys, values, output, metadata, scale=context.scale)


def resume(layer: int, *tensors: torch.Tensor) -> None:
    """Run the attention that a segment was ended for, in the context of the moment."""
    if len(tensors) == 3:
        attend_latent(layer, *tensors)
    else:
        attend(layer, *tensors)


def attention(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor) -> None:
    """Cache write and attention of one layer, into `output`.

    Args:
        layer: index of the layer, which picks the cache.
        query, output: `[num_tokens, num_heads, head_size]`; rotary embedding is already applied.
        key, value: `[num_tokens, num_kv_heads, head_size]` of this step; may be views of a fused projection.
    """
    write_kv(key, value, *layer_cache(layer))
    attend(layer, query, output)


def attend_latent(layer: int, query: torch.Tensor, kv_b: torch.Tensor, output: torch.Tensor) -> None:
    """Multi-head latent attention of a layer whose latents of this step are in the cache; see `latent_attention`."""
    context = _context()
    if context.break_at is not None:
        context.break_at(layer, query, kv_b, output)
        return
    metadata = context.metadata
    tokens = metadata.num_tokens
    if query.shape[0] != tokens:
        query, output = query[:tokens], output[:tokens]
    backend: Any = context.backend  # a LatentAttention around the backend, see `labkit.attention.split_mixed`
    backend.attend(layer, kv_b, query, context.key_caches[layer], output, metadata, context.scale)


def latent_attention(
    layer: int, query: torch.Tensor, latent: torch.Tensor, kv_b: torch.Tensor, output: torch.Tensor
) -> None:
    """Cache write and multi-head latent attention of one layer, into `output`.

    Args:
        query: `[num_tokens, num_heads, nope + rope]`, its rotary part rotated.
        latent: `[num_tokens, rank + rope]` of this step, normalised and rotated.
        kv_b: the layer's up-projection of keys and values, `[num_heads * (nope + value), rank]`.
        output: `[num_tokens, num_heads, value]`.
    """
    cache, _, slot_mapping = layer_cache(layer)
    write_latent(latent, cache, slot_mapping)
    attend_latent(layer, query, kv_b, output)


def _context() -> ForwardContext:
    context = _current.context
    if context is None:
        raise LabkitError(
            "attention",
            "there is no forward context",
            "Call the model through the runner or inside forward_context(…).",
        )
    return context
