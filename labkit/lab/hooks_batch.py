"""Hook points of a batch's way into the model: slots, block hashes, sizes, padding, dispatch. Refuses to judge answers.

`install_x(ask)` binds the name under which the engine finds its own function; `own_x()` is a correct answer in the form
that is plugged in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from labkit.lab.hook import Ask, bound, whole

if TYPE_CHECKING:
    from labkit.graphs.dispatcher import BatchDescriptor, GraphDispatcher


# --- paging ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def install_slot_mapping(ask: Ask) -> Iterator[None]:
    from labkit.engine import inputs

    own = inputs.slot_mapping

    def asked(block_ids: Sequence[int], start: int, n: int, block_size: int) -> Any:
        end = (max(block_ids) + 1) * block_size

        def usable(slots: Any) -> str:
            if not isinstance(slots, list | tuple) or not all(map(whole, slots)):
                return "slots are a list of whole numbers"
            return "" if len(slots) == n else f"{n} tokens need {n} slots, and these are {len(slots)}"

        slots = ask((list(block_ids), start, n, block_size), own(block_ids, start, n, block_size), usable)
        # A slot behind the request's last block may lie outside the cache: it is written by nobody.
        return [slot if 0 <= slot < end else -1 for slot in slots]

    with bound(inputs, "slot_mapping", asked):
        yield


def own_slot_mapping() -> Callable[..., Any]:
    from labkit.paging.slot_mapping import slot_mapping

    return slot_mapping


@contextlib.contextmanager
def install_block_hash(ask: Ask) -> Iterator[None]:
    from labkit.paging import block_hash as hashing

    own = hashing.block_hash

    def asked(parent: bytes | None, token_ids: Sequence[int]) -> Any:
        return ask(
            (parent, list(token_ids)), own(parent, token_ids),
            lambda value: "" if isinstance(value, bytes) else "a hash is a value of type bytes",
        )  # fmt: skip

    with bound(hashing, "block_hash", asked):
        yield


def own_block_hash() -> Callable[..., Any]:
    from labkit.paging.block_hash import block_hash

    return block_hash


# --- sizes and dispatch ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def install_default_capture_sizes(ask: Ask) -> Iterator[None]:
    from labkit.engine import plan
    from labkit.errors import ConfigError
    from labkit.graphs.sizes import check_capture_sizes

    own = plan.default_capture_sizes

    def asked(
        max_num_seqs: int, max_num_batched_tokens: int, query_len: int = 1, cap: int = 512, max_size: int | None = None
    ) -> list[int]:
        expected = own(max_num_seqs, max_num_batched_tokens, query_len, cap, max_size)
        if query_len != 1 or max_size is not None:  # the formula that a learner writes has neither
            return expected

        def usable(sizes: Any) -> str:
            try:
                check_capture_sizes(list(sizes), max_num_batched_tokens)
            except (ConfigError, TypeError) as error:
                return str(error)
            return ""

        return sorted(set(ask((max_num_seqs, max_num_batched_tokens, cap), expected, usable)))

    with bound(plan, "default_capture_sizes", asked):
        yield


def own_default_capture_sizes() -> Callable[..., Any]:
    from labkit.graphs.sizes import default_capture_sizes

    return lambda max_num_seqs, max_num_batched_tokens, cap: default_capture_sizes(
        max_num_seqs, max_num_batched_tokens, cap=cap
    )


class _AskedTable:
    """The dispatcher's padding table, one question for each look."""

    def __init__(self, table: list[int], sizes: list[int], ask: Ask) -> None:
        self.table, self.sizes, self.ask = table, sizes, ask

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, num_tokens: int) -> int:
        def usable(size: Any) -> str:
            if not whole(size) or size not in self.sizes:
                return f"{size!r} is no captured size"
            return f"a graph of {size} does not hold {num_tokens} tokens" if size < num_tokens else ""

        return int(self.ask((num_tokens, list(self.sizes)), self.table[num_tokens], usable))


@contextlib.contextmanager
def install_pad_to(ask: Ask) -> Iterator[None]:
    from labkit.graphs.dispatcher import GraphDispatcher

    own = GraphDispatcher.dispatch

    def asked(self: GraphDispatcher, num_tokens: int, num_reqs: int, is_uniform_decode: bool) -> BatchDescriptor:
        decode, mixed = self._decode_table, self._mixed_table
        held = max(len(mixed), len(decode) if is_uniform_decode else 0)
        if held and num_tokens >= held:
            ask((num_tokens, list(self.sizes)), None, lambda size: f"no graph holds {num_tokens} tokens")
        self._decode_table = _AskedTable(decode, list(self.decode_keys), ask)  # type: ignore[assignment]
        self._mixed_table = _AskedTable(mixed, list(self.mixed_keys), ask)  # type: ignore[assignment]
        try:
            return own(self, num_tokens, num_reqs, is_uniform_decode)
        finally:
            self._decode_table, self._mixed_table = decode, mixed

    with bound(GraphDispatcher, "dispatch", asked):
        yield


def own_pad_to() -> Callable[..., Any]:
    from labkit.graphs.sizes import pad_to

    return pad_to


@contextlib.contextmanager
def install_dispatch(ask: Ask) -> Iterator[None]:
    from labkit.config import CUDAGraphMode
    from labkit.graphs.dispatcher import BatchDescriptor, GraphDispatcher

    own = GraphDispatcher.dispatch

    def asked(self: GraphDispatcher, num_tokens: int, num_reqs: int, is_uniform_decode: bool) -> BatchDescriptor:
        expected = own(self, num_tokens, num_reqs, is_uniform_decode)
        decode = {size: key.mode for size, key in self.decode_keys.items()}
        mixed = {size: key.mode for size, key in self.mixed_keys.items()}

        def key_of(choice: Any) -> Any:
            mode, size = choice
            for keys, fits in ((self.decode_keys, is_uniform_decode), (self.mixed_keys, True)):
                key = keys.get(size)
                if not fits or key is None or key.mode != mode or key.size < num_tokens:
                    continue
                if mode == "PIECEWISE" or key.num_reqs >= num_reqs:
                    return key
            return None

        def usable(choice: Any) -> str:
            if not isinstance(choice, list | tuple) or len(choice) != 2:
                return "an answer is a mode and a size, like ('FULL', 16)"
            if tuple(choice) == ("NONE", num_tokens) or key_of(choice) is not None:
                return ""
            return f"there is no {choice[0]} graph of {choice[1]} that could run this batch"

        args = (num_tokens, is_uniform_decode, decode, mixed)
        mode, size = ask(args, (expected.mode.name, expected.size), usable)
        if (mode, size) == (expected.mode.name, expected.size):
            return expected
        self.hits[expected.mode.name, expected.size] -= 1
        self.hits[mode, size] += 1
        if mode == "NONE":
            return BatchDescriptor(CUDAGraphMode.NONE, num_tokens, num_reqs)
        key = key_of((mode, size))
        return BatchDescriptor(CUDAGraphMode[mode], size, key.num_reqs if mode == "FULL" else num_reqs, key)

    with bound(GraphDispatcher, "dispatch", asked):
        yield


def own_dispatch() -> Callable[..., Any]:
    def dispatch(
        num_tokens: int, is_uniform_decode: bool, decode_graphs: dict[int, str], mixed_graphs: dict[int, str]
    ) -> tuple[str, int]:
        for usable, graphs in ((is_uniform_decode, decode_graphs), (True, mixed_graphs)):
            fitting = [size for size in graphs if size >= num_tokens]
            if usable and fitting:
                return graphs[min(fitting)], min(fitting)
        return "NONE", num_tokens

    return dispatch
