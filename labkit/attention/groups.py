"""Attention groups: layers that ask the same of a backend share one instance of it. Refuses to know any backend.

A backend plans a step once for all layers that it serves, and what it plans depends on the window. A model whose layers
alternate therefore has one instance for each kind of layer, each with its own view of the step's metadata, so that no
plan overwrites another's. Soft-cap and sinks come with each call. A model of plain layers has one group, and its calls
look nothing up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from labkit.attention.interface import AttentionBackend, AttentionCGSupport, AttentionSpec, Availability, Platform
from labkit.attention.split_mixed import lowered_tier

if TYPE_CHECKING:
    import torch

    from labkit.attention.metadata import AttentionMetadata
    from labkit.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Layers of one kind. window: keys that a token sees at most, itself included; None where it sees all."""

    kind: str
    window: int | None
    layers: tuple[int, ...]

    def spec(self, spec: AttentionSpec) -> AttentionSpec:
        """What these layers ask, of what all layers ask together."""
        return dataclasses.replace(spec, sliding_window=self.window)

    def __str__(self) -> str:
        return f"{self.kind} layers" + (f" (window {self.window})" if self.window else "")


def group_layers(model: ModelConfig) -> tuple[LayerGroup, ...]:
    """The groups of a model, in the order of their first layers. Pure."""
    found: dict[str, list[int]] = {}
    for layer in range(model.num_layers):
        found.setdefault(model.layer_kind(layer), []).append(layer)
    return tuple(LayerGroup(kind, model.layer_window(layers[0]), tuple(layers)) for kind, layers in found.items())


def lowest_tier(
    cls: type[AttentionBackend],
    spec: AttentionSpec,
    groups: Sequence[LayerGroup],
    platform: Platform,
    available: Availability | None = None,
) -> tuple[AttentionCGSupport, str, LayerGroup | None]:
    """The tier of the whole model: the minimum over its groups, with that group's reason. Pure.

    The group is named only where another has a higher tier.
    """
    answers = []
    for group in groups:
        tier, why = cls.graph_support(group.spec(spec), platform, available)
        answers.append((*(lowered_tier(tier, why) if spec.split_mixed_batches else (tier, why)), group))
    tier, why, group = min(answers, key=lambda answer: answer[0])
    return tier, why, group if any(answer[0] > tier for answer in answers) else None


@dataclasses.dataclass(frozen=True)
class LayerAttention:
    """What one layer passes to a backend beside tensors and metadata.

    scratch: where its group's view of the metadata is in the step's; "" for the step's own. weights: holds `sinks`,
    which is looked up at every call, so that replaced weights count.
    """

    backend: AttentionBackend
    scratch: str
    window: int | None
    soft_cap: float | None
    weights: Any

    def forward(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        output: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> None:
        """See `AttentionBackend.forward`."""
        self.backend.forward(
            query, key_cache, value_cache, output, metadata.scratch[self.scratch] if self.scratch else metadata,
            scale=scale, sliding_window=self.window, logits_soft_cap=self.soft_cap, sinks=self.weights.sinks,
        )  # fmt: skip


class AttentionGroups:
    """The instances of one backend that serve one model.

    Args:
        make: gives an instance for a spec.
        spec: what all layers ask together.
        groups: see `group_layers`.
        weights: of each layer the object that holds its `sinks`.

    `backends` has one instance per group. `layers` has one entry per layer, or none where all layers are plain: then
    the first backend is called without any feature.
    """

    def __init__(
        self,
        make: Callable[[AttentionSpec], AttentionBackend],
        spec: AttentionSpec,
        groups: Sequence[LayerGroup],
        weights: Sequence[Any],
    ) -> None:
        self.backends = tuple(make(group.spec(spec)) for group in groups)
        self._names = [f"attention group {number}" for number in range(1, len(groups))]
        plain = len(groups) == 1 and groups[0].window is None and spec.logits_soft_cap is None and not spec.has_sinks
        of_layer = {layer: number for number, group in enumerate(groups) for layer in group.layers}
        self.layers: tuple[LayerAttention, ...] = () if plain else tuple(
            LayerAttention(
                self.backends[number], self._names[number - 1] if number else "", groups[number].window,
                spec.logits_soft_cap, weights[layer],
            )
            for layer, number in sorted(of_layer.items())
        )  # fmt: skip

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Prepare each instance once for a step: the first on `metadata`, others on copies with their own scratch."""
        self.backends[0].prepare(metadata)
        for backend, name in zip(self.backends[1:], self._names, strict=True):
            own = dataclasses.replace(metadata, scratch={})
            backend.prepare(own)
            metadata.scratch[name] = own

    def warm_up(self, progress: Callable[[str, int, int, str], None] | None) -> None:
        """See `AttentionBackend.warm_up`."""
        for backend in self.backends:
            backend.warm_up(progress)
