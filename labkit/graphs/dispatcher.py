"""The switch that decides, per batch, which graph runs. Pure; refuses to know what a graph is."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Sequence

from labkit.config import CUDAGraphMode as Mode
from labkit.graphs.sizes import padding_table


@dataclasses.dataclass(frozen=True, order=True)
class GraphKey:
    """What one captured graph serves: `size` tokens of at most `num_reqs` requests.

    `uniform`: captured for exactly `query_len` tokens per request; such a graph cannot serve a mixed batch.
    """

    mode: str
    size: int
    num_reqs: int
    uniform: bool


@dataclasses.dataclass(frozen=True)
class BatchDescriptor:
    """How one step runs. `mode` is NONE, PIECEWISE or FULL; `size` is the number of tokens after padding.

    `num_reqs` is padded under a FULL graph only: between the pieces of a PIECEWISE step attention runs eagerly.
    """

    mode: Mode
    size: int
    num_reqs: int
    key: GraphKey | None = None


class Miss(enum.Enum):
    """Why a step runs eagerly although its mode has graphs. Under NONE every step is eager, and none of them a miss."""

    ABOVE_LARGEST = "above the largest size"
    NO_GRAPH = "the mode has no graph for such a batch"
    NOT_CAPTURED = "its graph was not captured"


def decode_sizes(sizes: Sequence[int], max_num_seqs: int, query_len: int = 1) -> list[int]:
    """The sizes a decode batch can hit: multiples of `query_len` up to the widest batch, or the first one above it."""
    widest = max_num_seqs * query_len
    usable = [s for s in sizes if s % query_len == 0]
    return [s for i, s in enumerate(usable) if s <= widest or (i == 0 or usable[i - 1] < widest)]


class GraphDispatcher:
    """Exact FULL key, else PIECEWISE key, else eager.

    A batch is a *uniform decode* when every request is decoding, judged by request state and not by token counts: a
    one-token prompt, or the last token of a chunked prompt, looks the same but belongs to the mixed batches. A graph
    for decodes would give the right answer there too; keeping them apart makes hit counts mean what they say, and it
    is what makes the choice safe for kernels that take a different path at one token per request.

    Args:
        mode: the resolved mode.
        sizes: capture sizes in tokens, ascending.
        max_num_seqs: requests per step, the width of the buffers.
        query_len: tokens per request in a decode step.

    Attributes:
        hits: steps per (runtime mode, tokens that run); eager ones under ("NONE", their own number).
        misses: steps per reason for running eagerly; nothing under the mode NONE.
    """

    def __init__(self, mode: Mode, sizes: Sequence[int], max_num_seqs: int, query_len: int = 1) -> None:
        self.mode, self.max_num_seqs, self.query_len = mode, max_num_seqs, query_len
        self.sizes = list(sizes) if mode is not Mode.NONE else []
        self.hits: collections.Counter[tuple[str, int]] = collections.Counter()
        self.misses: collections.Counter[Miss] = collections.Counter()
        decode, mixed = mode.decode_mode(), mode.mixed_mode()
        self.mixed_keys: dict[int, GraphKey] = {}
        self.decode_keys: dict[int, GraphKey] = {}
        if mixed is not Mode.NONE:
            self.mixed_keys = {s: GraphKey(mixed.name, s, min(s, max_num_seqs), uniform=False) for s in self.sizes}
        if mode.separate_routine() and decode is Mode.FULL:
            self.decode_keys = {
                s: GraphKey("FULL", s, s // query_len, uniform=True)
                for s in decode_sizes(self.sizes, max_num_seqs, query_len)
            }
        self._mixed_table = padding_table(list(self.mixed_keys))
        self._decode_table = padding_table(list(self.decode_keys))

    def capture_order(self) -> list[GraphKey]:
        """Every graph to capture, in capture order: PIECEWISE before FULL, largest first (the pool is then reused)."""
        keys = [*self.mixed_keys.values(), *self.decode_keys.values()]
        return sorted(keys, key=lambda k: (k.mode != "PIECEWISE", -k.size, k.uniform))

    def dispatch(self, num_tokens: int, num_reqs: int, is_uniform_decode: bool) -> BatchDescriptor:
        """The descriptor of this batch; counted in `hits` under (mode, size), and in `misses` where it is one."""
        key = None
        if is_uniform_decode and num_tokens < len(self._decode_table):
            key = self.decode_keys[self._decode_table[num_tokens]]
        elif num_tokens < len(self._mixed_table):
            key = self.mixed_keys[self._mixed_table[num_tokens]]
        if key is None:
            out = BatchDescriptor(Mode.NONE, num_tokens, num_reqs)
            missed = self.miss(num_tokens, is_uniform_decode)
            if missed is not None:
                self.misses[missed] += 1
        else:
            rows = key.num_reqs if key.mode == "FULL" else num_reqs
            out = BatchDescriptor(Mode[key.mode], key.size, rows, key)
        self.hits[out.mode.name, out.size] += 1
        return out

    def miss(self, num_tokens: int, is_uniform_decode: bool) -> Miss | None:
        """Why this batch has no graph: NO_GRAPH, ABOVE_LARGEST, or None where it has one or the mode is NONE."""
        held = max(len(self._mixed_table), len(self._decode_table) if is_uniform_decode else 0)
        if self.mode is Mode.NONE or num_tokens < held:
            return None
        return Miss.ABOVE_LARGEST if held else Miss.NO_GRAPH
