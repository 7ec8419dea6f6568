"""The persistent buffers that one step's numbers are written into. Refuses to know what the numbers are used for.

Everything small (slots, token ids, positions, offsets, lengths, rows to sample) travels to the device as one packed
copy; the block table follows only when a row of it changed. A graph reads its inputs at fixed addresses: for a given
(num_tokens, num_reqs) the packed layout, and so every address, is always the same.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from labkit.attention.metadata import AttentionMetadata
from labkit.paging.slot_mapping import slot_mapping
from labkit.scheduling.scheduler import ScheduledStep

_ALIGN = 32  # int32 words, 128 bytes: every segment starts where vector loads like it
_EMPTY_ROW = (-1, 0, 0)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Where each array of a packed step begins, in int32 words, for one (num_tokens, num_reqs)."""

    slots: int
    tokens: int
    positions: int
    query_start_loc: int
    seq_lens: int
    sample_rows: int
    words: int

    @classmethod
    def of(cls, num_tokens: int, num_reqs: int) -> _Layout:
        at, begin = 0, []
        for words in (2 * num_tokens, num_tokens, num_tokens, num_reqs + 1, num_reqs, num_reqs):
            begin.append(at)
            at += -(-words // _ALIGN) * _ALIGN
        slots, tokens, positions, query_start_loc, seq_lens, sample_rows = begin
        return cls(slots, tokens, positions, query_start_loc, seq_lens, sample_rows, words=at)


@dataclasses.dataclass
class StepView:
    """One padded step on the device: views into the persistent buffers.

    token_ids, positions: int32 `[num_tokens]`.
    sample_rows: int32 `[num_reqs]`, the token row of each request that samples, then 0.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    sample_rows: torch.Tensor
    metadata: AttentionMetadata
    host: dict[str, np.ndarray]
    words: int


class StepInputs:
    """Owner of the buffers, for `max_num_tokens` tokens and `max_num_reqs` requests of `max_blocks` blocks each."""

    def __init__(
        self, max_num_tokens: int, max_num_reqs: int, max_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size, self.device = block_size, device
        self.max_num_reqs, self.max_blocks = max_num_reqs, max_blocks
        words = _Layout.of(max_num_tokens, max_num_reqs).words
        pinned = device.type == "cuda"
        self._host = torch.zeros(words, dtype=torch.int32, pin_memory=pinned)
        self._device = torch.zeros(words, dtype=torch.int32, device=device) if pinned else self._host
        self._host_table = torch.zeros((max_num_reqs, max_blocks), dtype=torch.int32, pin_memory=pinned)
        self._device_table = torch.zeros_like(self._host_table, device=device) if pinned else self._host_table
        self._table = self._host_table.numpy()
        # What each row of the table shows: (request, its preemptions, blocks). A running request only appends.
        self._rows: list[tuple[int, int, int]] = [_EMPTY_ROW] * max_num_reqs
        self._views: dict[tuple[int, int], StepView] = {}

    def view(self, num_tokens: int, num_reqs: int) -> StepView:
        """The views for a padded shape; built once per shape."""
        found = self._views.get((num_tokens, num_reqs))
        if found is None:
            if len(self._views) > 4096:  # eager prefills come in any length
                self._views.clear()
            found = self._views[num_tokens, num_reqs] = self._build_view(num_tokens, num_reqs)
        return found

    def _build_view(self, num_tokens: int, num_reqs: int) -> StepView:
        at, host, device = _Layout.of(num_tokens, num_reqs), self._host.numpy(), self._device
        spans = {
            "slots": (at.slots, 2 * num_tokens),
            "tokens": (at.tokens, num_tokens),
            "positions": (at.positions, num_tokens),
            "query_start_loc": (at.query_start_loc, num_reqs + 1),
            "seq_lens": (at.seq_lens, num_reqs),
            "sample_rows": (at.sample_rows, num_reqs),
        }
        on_host = {name: host[begin : begin + n] for name, (begin, n) in spans.items()}
        on_host["slots"] = on_host["slots"].view(np.int64)
        on_device = {name: device[begin : begin + n] for name, (begin, n) in spans.items()}
        metadata = AttentionMetadata(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            num_actual_reqs=0,
            num_actual_tokens=0,
            max_query_len=1,
            max_seq_len=1,
            query_start_loc=on_device["query_start_loc"],
            seq_lens=on_device["seq_lens"],
            block_table=self._device_table[:num_reqs],
            slot_mapping=on_device["slots"].view(torch.int64),
            query_start_loc_cpu=on_host["query_start_loc"],
            seq_lens_cpu=on_host["seq_lens"],
        )
        return StepView(
            on_device["tokens"], on_device["positions"], on_device["sample_rows"], metadata, on_host, at.words
        )

    def fill(self, step: ScheduledStep, num_tokens: int, num_reqs: int) -> StepView:
        """Write one step, padded to `num_tokens` and `num_reqs`, and start its copy to the device.

        Padding: token 0 at position 0 with slot −1; offsets repeat the number of real tokens; length 0; null blocks.
        """
        view = self.view(num_tokens, num_reqs)
        host, row, cursor, sampled = view.host, 0, 0, 0
        tokens, positions, slots = host["tokens"], host["positions"], host["slots"]
        starts, lens, sample_rows = host["query_start_loc"], host["seq_lens"], host["sample_rows"]
        for row, item in enumerate(step.requests):
            request, begin, n = item.request, item.start, item.num_tokens
            starts[row] = cursor
            lens[row] = begin + n
            if n == 1:
                tokens[cursor] = request.token_at(begin)
                positions[cursor] = begin
                block, offset = divmod(begin, self.block_size)
                slots[cursor] = request.block_ids[block] * self.block_size + offset
            else:
                end = cursor + n
                tokens[cursor:end] = request.tokens(begin, n)
                positions[cursor:end] = np.arange(begin, begin + n, dtype=np.int32)
                slots[cursor:end] = slot_mapping(request.block_ids, begin, n, self.block_size)
            cursor += n
            if item.samples:
                sample_rows[sampled] = cursor - 1
                sampled += 1
        used = step.num_reqs
        tokens[cursor:], positions[cursor:], slots[cursor:] = 0, 0, -1
        starts[used:], lens[used:], sample_rows[sampled:] = cursor, 0, 0
        self._fill_table(step, num_reqs)
        if self._device is not self._host:
            self._device[: view.words].copy_(self._host[: view.words], non_blocking=True)
        metadata = view.metadata
        metadata.num_tokens = num_tokens
        metadata.num_actual_reqs, metadata.num_actual_tokens = used, step.num_tokens
        metadata.max_query_len, metadata.max_seq_len = step.max_query_len, step.max_seq_len
        metadata.is_uniform_decode, metadata.for_graph = step.is_uniform_decode, False
        metadata.scratch = {}
        return view

    def _fill_table(self, step: ScheduledStep, num_reqs: int) -> None:
        changed = 0
        for row in range(num_reqs):
            request = step.requests[row].request if row < step.num_reqs else None
            blocks = request.block_ids if request else []
            shown = (request.arrival_index, request.num_preemptions, len(blocks)) if request else _EMPTY_ROW
            known = self._rows[row]
            if known != shown:
                keep = known[2] if known[:2] == shown[:2] else 0
                self._table[row, keep : len(blocks)] = blocks[keep:]
                self._table[row, len(blocks) : max(known[2], len(blocks))] = 0
                self._rows[row] = shown
                changed = row + 1
        if changed and self._device_table is not self._host_table:
            self._device_table[:changed].copy_(self._host_table[:changed], non_blocking=True)

    def forget_rows(self) -> None:
        """Write every row of the table anew: a step was undone, and requests may come back with other blocks."""
        self._rows = [(-1, 0, self.max_blocks)] * self.max_num_reqs

    def fill_dummy(self, num_tokens: int, num_reqs: int, max_query_len: int, max_seq_len: int) -> StepView:
        """A step in the worst-case shape that writes nothing and reads the null block, for warm-up and capture.

        Args:
            num_tokens, num_reqs: the captured shape; tokens are spread so that the last request takes the remainder.
            max_query_len, max_seq_len: the bounds that are baked into the graph.
        """
        view = self.view(num_tokens, num_reqs)
        host = view.host
        host["tokens"][:], host["positions"][:], host["slots"][:] = 0, 0, -1
        starts = np.arange(num_reqs + 1, dtype=np.int32)
        starts[-1] = num_tokens
        host["query_start_loc"][:], host["sample_rows"][:] = starts, 0
        host["seq_lens"][:] = np.diff(starts)
        host["seq_lens"][-1] = min(int(host["seq_lens"][-1]), self.max_blocks * self.block_size)
        self._table[:num_reqs] = 0
        self._rows[:num_reqs] = [_EMPTY_ROW] * num_reqs
        if self._device is not self._host:
            self._device[: view.words].copy_(self._host[: view.words], non_blocking=True)
            self._device_table[:num_reqs].copy_(self._host_table[:num_reqs], non_blocking=True)
        metadata = view.metadata
        metadata.num_tokens = num_tokens
        metadata.num_actual_reqs, metadata.num_actual_tokens = num_reqs, num_tokens
        metadata.max_query_len, metadata.max_seq_len = max_query_len, max_seq_len
        metadata.is_uniform_decode, metadata.for_graph = max_query_len == 1, True
        metadata.scratch = {}
        return view
