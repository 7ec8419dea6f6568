"""Tiles of the absorbed MLA kernel: pure functions of host integers. Refuses to know torch and Triton."""

from __future__ import annotations

import dataclasses

from labkit.launch import next_power_of_2


@dataclasses.dataclass(frozen=True)
class LatentTile:
    """(query token, head) rows × keys of one program, warps and software-pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, rank: int, rope: int, itemsize: int) -> int:
        """An upper estimate of what the compiler asks for: buffered latents, the query tile, the P tile, reductions."""
        width = max(16, next_power_of_2(rank)) + max(16, next_power_of_2(rope))
        latents = self.num_stages * self.block_n * width * itemsize
        return latents + self.block_m * width * itemsize + self.block_m * self.block_n * itemsize + 8192


def choose_latent_tile(
    rank: int, rope: int, itemsize: int, rows: int, smem_limit: int, capability: tuple[int, int] | None = None
) -> LatentTile | None:
    """The tile for tokens that bring `rows` rows (query tokens of a request × heads); None where none fits.

    A program keeps a whole latent per row as its result, 512 numbers, so rows are few: 16, the least that a tensor core
    takes, and 64 on Hopper and data-centre Blackwell where there are as many, whose instructions read operands from
    shared memory.
    """
    turing = capability is not None and capability < (8, 0)
    if turing or itemsize == 4:
        shapes = [(16, 16, 4, 1)]
    else:
        wide = capability is not None and capability[0] in (9, 10) and rows >= 64
        shapes = [(64, 64, 8, 2), (64, 32, 8, 2)] if wide else []
        shapes += [(16, 32, 4, 3), (16, 32, 4, 2), (16, 16, 4, 2)]
    for shape in shapes:
        tile = LatentTile(*shape)
        if tile.shared_bytes(rank, rope, itemsize) <= smem_limit:
            return tile
    return None
