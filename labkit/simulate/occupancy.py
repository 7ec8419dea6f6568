"""Which programs one attention call starts, which multiprocessors they keep busy, and how long that would take.
Refuses to know torch and recordings; tile and splits come from the very rules that the engine's Triton kernel asks.

The time is a model that was never compared with a measurement. A multiprocessor holds two programs at once, as the rule
for splits aims at; a program starts when a place is free, in order. Alone it reads K and V at 1 / (2 · SMs) of the
chip's bandwidth and computes at as much of its arithmetic, so that only 2 · SMs programs use all of either; it takes
whichever is longer. A launch takes `kernel_us`; splits add a second one, and their partial results to be written and
read. Left out: the L2 cache, clocks, programs that slow each other down, the host.
"""

from __future__ import annotations

import dataclasses
import heapq

from labkit.attention.kernels.tiles import (
    MAX_SPLITS,
    Tile,
    choose_num_splits,
    choose_tile,
    query_tiles,
    refine_tile,
    scratch_rows,
    shared_memory_limit,
)
from labkit.errors import ConfigError
from labkit.simulate.step import H200

#: Programs that a multiprocessor holds at once in this model.
RESIDENT = 2
#: Numbers of splits that a curve has.
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 33, 40, 48, 64)


@dataclasses.dataclass(frozen=True)
class Chip:
    """A GPU. gb_s: 1e9 bytes a second. tflops: dense 16-bit matrix rate. kernel_us: what a launch takes by itself."""

    name: str
    sms: int
    gb_s: float
    tflops: float
    capability: tuple[int, int]
    kernel_us: float = H200.kernel_us

    @property
    def slots(self) -> int:
        return RESIDENT * self.sms


#: Data sheets, except for the H200's bandwidth, which is a recorded copy's.
CHIPS = (
    Chip("T4", 40, 320.0, 65.0, (7, 5)),
    Chip("A100", 108, 2039.0, 312.0, (8, 0)),
    Chip("H200", H200.sms, H200.copy_gb_s, H200.tflops, (9, 0)),
    Chip("B200", 148, 8000.0, 2250.0, (10, 0)),
)


@dataclasses.dataclass(frozen=True)
class Call:
    """`batch` requests that bring `q_len` new tokens each, over `kv_len` tokens of KV with them. 16-bit numbers."""

    q_len: int
    kv_len: int
    batch: int = 1
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    itemsize: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.q_len <= self.kv_len or self.batch < 1 or self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.batch} × {self.q_len} over {self.kv_len}, {self.num_heads}/{self.num_kv_heads} heads",
                "is no attention call", "Take 1 ≤ q_len ≤ kv_len, and query heads that are a multiple of KV heads.",
            )  # fmt: skip

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def num_tokens(self) -> int:
        return self.batch * self.q_len


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is launched. launched: programs of one split; some find no row and end at once, `working` do not.

    keys: of each working program of one split, in the order of the grid. splits: how many share one program's keys.
    """

    tile: Tile
    launched: int
    splits: int
    keys: tuple[int, ...]

    @property
    def working(self) -> int:
        return len(self.keys)

    @property
    def programs(self) -> int:
        """Programs with something to do, splits included."""
        return self.working * self.splits


@dataclasses.dataclass(frozen=True)
class Simulated:
    """plan: what is launched. us: of the call, merge included. waves: rounds of full places that the programs need.

    per_sm: programs on each multiprocessor when the call begins. busy: those with at least one.
    """

    plan: Plan
    us: float
    merge_us: float
    waves: int
    per_sm: tuple[int, ...]

    @property
    def busy(self) -> int:
        return sum(n > 0 for n in self.per_sm)


def plan(call: Call, chip: Chip, requested: int = 0) -> Plan:
    """Tile, programs and splits, as TRITON_ATTN plans this batch on this chip. requested: 0 lets the rule choose."""
    rows = max(1, call.q_len) * call.group
    limit = shared_memory_limit(chip.capability)
    tile = choose_tile(call.head_size, call.itemsize, rows, limit, chip.capability)
    if tile is None:
        raise ConfigError(f"head_size={call.head_size}", "no tile of it fits on this chip", "Take 256 or less.")
    tiles, head_tiles = query_tiles(tile, call.group, call.num_tokens, call.batch, 1 if call.q_len == 1 else 2)
    launched = tiles * call.num_kv_heads * head_tiles
    tile = refine_tile(tile, call.head_size, launched, chip.sms, chip.capability)
    held = scratch_rows(call.num_heads, call.num_kv_heads, chip.sms, call.batch, requested)
    room = held // max(1, call.num_tokens * call.num_heads)
    splits = choose_num_splits(launched, chip.sms, call.kv_len, tile.block_n, requested, room)
    return Plan(tile, launched, splits, _keys(call, tile, head_tiles))


def _keys(call: Call, tile: Tile, head_tiles: int) -> tuple[int, ...]:
    """Keys that each working program sees: a tile of queries sees those up to its last token."""
    block_q = tile.block_m // min(call.group, tile.block_m)
    past = call.kv_len - call.q_len
    seen = [min(past + first + block_q, call.kv_len) for first in range(0, call.q_len, block_q)]
    return tuple(n for _ in range(call.batch) for n in seen for _ in range(call.num_kv_heads * head_tiles))


def simulate(call: Call, chip: Chip, requested: int = 0) -> Simulated:
    """The call on the chip; see the first paragraph for what the model knows."""
    made = plan(call, chip, requested)
    times = [_program_us(call, chip, made.tile, keys) for keys in _split_keys(made)]
    merge_us = 0.0
    if made.splits > 1:
        partial = call.num_tokens * call.num_heads * made.splits * (call.head_size + 1) * 4
        merge_us = chip.kernel_us + 2 * partial / chip.gb_s / 1e3
    running = len(times)
    per_sm = tuple(
        min(RESIDENT, (running - i + chip.sms - 1) // chip.sms) if running > i else 0 for i in range(chip.sms)
    )
    us = chip.kernel_us + _makespan(times, chip.slots) + merge_us
    return Simulated(made, us, merge_us, -(-running // chip.slots), per_sm)


def curve(call: Call, chip: Chip) -> list[tuple[int, float]]:
    """(splits that run, µs) for the numbers of `SPLITS` that this call can have, ascending."""
    found: dict[int, float] = {}
    for asked in SPLITS:
        if asked <= MAX_SPLITS:
            one = simulate(call, chip, asked)
            found.setdefault(one.plan.splits, one.us)
    return sorted(found.items())


def _split_keys(made: Plan) -> list[int]:
    """Keys of every program: whole tiles, the same number for each split but the last ones."""
    if made.splits == 1:
        return list(made.keys)
    out = []
    for split in range(made.splits):
        for keys in made.keys:
            tiles = -(-keys // made.tile.block_n)
            share = -(-tiles // made.splits) * made.tile.block_n
            out.append(max(0, min(keys - split * share, share)))
    return out


def _program_us(call: Call, chip: Chip, tile: Tile, keys: int) -> float:
    moved = 2 * keys * call.head_size * call.itemsize
    computed = 4 * call.head_size * tile.block_m * keys  # rows of the tile that nobody uses are computed, too
    return chip.slots * max(moved / chip.gb_s / 1e3, computed / chip.tflops / 1e6)


def _makespan(times: list[float], slots: int) -> float:
    """When the last of these ends, each begun in order as soon as a place is free."""
    if len(times) <= slots:
        return max(times, default=0.0)
    if max(times) == min(times):
        return -(-len(times) // slots) * times[0]
    free = times[:slots]
    heapq.heapify(free)
    for us in times[slots:]:
        heapq.heapreplace(free, free[0] + us)
    return max(free)
