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
        # The tile in use is in registers and needs no buffer of its own.
        latents = max(1, self.num_stages - 1) * self.block_n * width * itemsize
        return latents + self.block_m * width * itemsize + self.block_m * self.block_n * itemsize + 2048


def choose_latent_tile(rank: int, rope: int, itemsize: int, rows: int, smem_limit: int) -> LatentTile | None:
    """The tile for requests that bring `rows` rows (query tokens × heads); None where none fits.

    A program keeps a whole latent per row as its result, 512 numbers, so rows are few: 16, the least that a tensor core
    takes, and 32 where there are as many. 64, which Hopper's own instructions want, left the registers in every form
    that was compiled. float32 multiplies on ordinary cores, unrolled, so its tile is the smallest.
    """
    if itemsize == 4:
        shapes = [(16, 16, 4, 1)]
    elif rows >= 32:
        shapes = [(32, 32, 8, 3), (32, 32, 8, 2), (32, 16, 8, 2)]
    else:
        shapes = [(16, 32, 4, 3), (16, 32, 4, 2), (16, 16, 4, 2)]
    for shape in shapes:
        tile = LatentTile(*shape)
        if tile.shared_bytes(rank, rope, itemsize) <= smem_limit:
            return tile
    return None
