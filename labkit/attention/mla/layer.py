"""The part of a layer's weights that attention applies itself: keys and values up from the latent. Knows no batch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class LatentShape:
    """Sizes of one layer. A query head is `nope` numbers without position, then `rope` rotated ones.

    rank: of the latent (kv_lora_rank). value: of a value head (v_head_dim).
    """

    num_heads: int
    rank: int
    nope: int
    rope: int
    value: int

    @property
    def width(self) -> int:
        """Numbers that the cache holds of a token: the latent, then the rotated key."""
        return self.rank + self.rope


class LatentLayer:
    """The up-projection `kv_b`, `[num_heads * (nope + value), rank]`, and what the two forms make of it.

    Both forms use views into it and no copies: what is loaded into it later is seen at once.
    """

    def __init__(self, shape: LatentShape, kv_b: torch.Tensor) -> None:
        self.shape, self.kv_b = shape, kv_b
        up = kv_b.view(shape.num_heads, shape.nope + shape.value, shape.rank)
        self.up_keys = up[:, : shape.nope]  # [heads, nope, rank]
        self.up_values = up[:, shape.nope :].transpose(1, 2)  # [heads, rank, value]

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, heads, nope + rope]` → `[num_tokens, heads, rank + rope]`: queries that latents answer."""
        import torch

        shape = self.shape
        out = query.new_empty((query.shape[0], shape.num_heads, shape.width))
        torch.bmm(query[..., : shape.nope].transpose(0, 1), self.up_keys, out=out[..., : shape.rank].transpose(0, 1))
        out[..., shape.rank :] = query[..., shape.nope :]
        return out

    def values(self, attended: torch.Tensor, output: torch.Tensor) -> None:
        """`[num_tokens, heads, rank]` of latents averaged by attention → values, into `output`."""
        import torch

        torch.bmm(attended.transpose(0, 1), self.up_values, out=output.transpose(0, 1))

    def expand(self, latent: torch.Tensor) -> torch.Tensor:
        """`[num_keys, rank + rope]` → `[num_keys, heads, nope + value]`: every head's keys and values."""
        import torch

        shape = self.shape
        made = torch.mm(latent[:, : shape.rank], self.kv_b.t())
        return made.view(latent.shape[0], shape.num_heads, shape.nope + shape.value)
