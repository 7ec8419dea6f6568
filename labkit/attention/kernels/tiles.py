"""Which tile and how many KV splits a batch gets: pure functions of host integers. Refuses to know torch and Triton.

Everything here must give the same answer for every replay of one captured graph, so nothing may depend on a batch's
true lengths: only on the padded counts and worst cases that the graph was captured with.
"""

from __future__ import annotations

import dataclasses

from labkit.launch import next_power_of_2

#: Shared memory one block may use, in bytes, by compute capability (CUDA C++ programming guide).
SHARED_MEMORY: dict[tuple[int, int], int] = {
    (7, 5): 65_536, (8, 0): 166_912, (8, 6): 101_376, (8, 7): 166_912, (8, 9): 101_376, (9, 0): 232_448,
    (10, 0): 232_448, (10, 3): 232_448, (11, 0): 232_448, (12, 0): 101_376, (12, 1): 101_376,
}  # fmt: skip

MAX_SPLITS = 64


def shared_memory_limit(capability: tuple[int, int] | None) -> int:
    """Bytes of shared memory a block may use; 64 KiB, what every supported card has, where the card is unknown."""
    return SHARED_MEMORY.get(capability or (0, 0), 65_536)


@dataclasses.dataclass(frozen=True)
class Tile:
    """Query rows × keys of one program, warps and software-pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, head_size: int, itemsize: int, capability: tuple[int, int] | None = None) -> int:
        """An upper estimate of what the compiler asks for: buffered K and V, the query tile, the P tile, reductions."""
        d = next_power_of_2(max(head_size, 16))
        # Ampere's instructions take operands from registers, so the tile in use needs no buffer of its own.
        reads_shared = capability is None or (capability[0] in (9, 10) and self.block_m >= 64)
        buffers = self.num_stages if reads_shared else max(1, self.num_stages - 1)
        kv = buffers * 2 * self.block_n * d * itemsize
        rows = d * max(self.block_m * itemsize, 64) + self.block_m * self.block_n * itemsize
        return kv + rows + 4096


def choose_tile(
    head_size: int, itemsize: int, rows: int, smem_limit: int, capability: tuple[int, int] | None = None
) -> Tile | None:
    """The tile for requests that bring at most `rows` query rows (tokens × heads of a group) each; None if none fits.

    16 rows are the least a tensor core takes: a decode uses as many of them as its group has heads. 64 rows share one
    read of K and V among more tokens; larger accumulators would leave the registers. float32 multiplies on ordinary
    cores (IEEE products), sm_75 does so for every dtype (Triton emits no tensor-core instructions there): such a
    product is unrolled, so the tile is small. The sizes come from compiling for each architecture and reading
    registers and spills.
    """
    d = next_power_of_2(max(head_size, 16))
    turing = capability is not None and capability < (8, 0)
    if turing or itemsize == 4:
        block_m, num_warps, stages = 16, 4, 1 if turing else 2
        block_n = 32 if d <= 64 and not turing else 16
    else:
        # Hopper's and data-centre Blackwell's instructions keep operands in shared memory, others in registers.
        lean = capability is not None and capability[0] in (9, 10) and d <= 128
        block_m = 16 if rows <= 16 else 64
        num_warps = 4 if block_m == 16 or lean else 8
        block_n, stages = 64 if d <= 128 else 32, 3
    while block_n >= 16:
        for num_stages in range(stages, 0, -1):
            tile = Tile(block_m, block_n, num_warps, num_stages)
            if tile.shared_bytes(head_size, itemsize, capability) <= smem_limit:
                return tile
        block_n //= 2
    return None


def refine_tile(tile: Tile, head_size: int, programs: int, num_sms: int, capability: tuple[int, int] | None) -> Tile:
    """A tile for decodes on Hopper that suits the batch better than `choose_tile`'s, where one was measured.

    With half the keys it takes half the registers, so six programs share an SM and not three. That pays where it turns
    two waves of programs into one: 65 µs against 77 for 64 requests of 1,024 tokens on an H200 (32/8 heads of 128,
    bfloat16, rotated KV).

    Args:
        programs: of the unsplit batch; num_sms: 0 where it is unknown.
    """
    if (
        capability is None
        or capability[0] != 9
        or not 64 < head_size <= 128
        or (tile.block_m, tile.block_n) != (16, 64)
    ):
        return tile
    return dataclasses.replace(tile, block_n=32) if 3 * num_sms < programs <= 6 * num_sms else tile


def query_tiles(tile: Tile, group: int, num_tokens: int, num_reqs: int, max_query_len: int) -> tuple[int, int]:
    """(tiles of query tokens at most, head tiles): what the first grid dimension is made of."""
    row_heads = min(group, tile.block_m)
    block_q = tile.block_m // row_heads
    head_tiles = -(-group // row_heads)
    return (num_reqs if max_query_len <= 1 else num_tokens // block_q + num_reqs), head_tiles


def has_interior_loop(tile: Tile, one_token: bool, window: int | None, batch_invariant: bool) -> bool:
    """Whether tiles of keys that every row sees get a loop of their own without masks.

    A decode has one masked tile among few and waits for memory; small tiles are those of unrolled products, which two
    loops would push out of the registers. A tile that one batch masks and another does not would be two programs whose
    rounding may differ, so a batch-invariant kernel has one loop.
    """
    return tile.block_m > 16 and not one_token and not window and not batch_invariant


def choose_num_splits(
    programs: int, num_sms: int, max_seq_len: int, block_n: int, requested: int = 0, limit: int = MAX_SPLITS
) -> int:
    """How many programs share the keys of one query tile (Flash-Decoding).

    One program reads at the speed of a fraction of one SM, so a batch with fewer programs than the chip has room for
    leaves bandwidth unused. Splitting costs a second kernel and a round trip of partial results, so it stops where two
    programs per SM are reached, and where a split would get less than one tile of keys.

    Args:
        programs: query tiles × KV heads × head tiles.
        max_seq_len: the worst case under a graph, else this batch's.
        requested: the user's `num_splits`; 0 leaves the choice here. `limit` is what the scratch can hold.
    """
    if programs <= 0:
        return 1
    tiles = max(1, -(-max_seq_len // block_n))
    splits = requested if requested > 0 else 2 * num_sms // programs
    return max(1, min(splits, tiles, limit, MAX_SPLITS))


def fixed_ranges(max_model_len: int, block_n: int, requested: int) -> tuple[int, int]:
    """(splits, tiles of keys in each) that no batch has a say in: equal ranges of positions up to the longest context.

    A row then finds every key in the same split whatever else is in its tile. The price: a request much shorter than
    `max_model_len` has its keys in the first splits only. One split has no range, (1, 0).
    """
    tiles = max(1, -(-max_model_len // block_n))
    splits = max(1, min(requested, tiles, MAX_SPLITS))
    per_split = -(-tiles // splits)
    return (-(-tiles // per_split), per_split) if splits > 1 else (1, 0)


def scratch_rows(num_heads: int, num_kv_heads: int, num_sms: int, max_num_seqs: int, requested: int = 0) -> int:
    """Rows (token × head × split) of partial results to preallocate; `choose_num_splits` is limited by it.

    By itself the choice never exceeds two programs per SM, each of 16 rows or the heads of one group; an explicit
    number of splits must serve the largest decode batch.
    """
    group = num_heads // num_kv_heads
    rows = 2 * num_sms * max(16, group)
    return max(rows, max_num_seqs * num_heads * min(requested, MAX_SPLITS))
