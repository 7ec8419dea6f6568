"""The expanded form: chunks attend to keys and values made again from latents, in pieces of bounded size.

Which keys go into which piece is decided on the host, once per step; each layer then gathers, expands and attends
piece by piece, and partial results are merged by their log-sum-exp. Refuses to run under a graph: how many pieces there
are follows from the batch's lengths.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from labkit.attention.kernels.mla_chunks import mla_chunks_kernel
from labkit.attention.kernels.mla_latent import HAVE_TRITON
from labkit.launch import next_power_of_2

if TYPE_CHECKING:
    import numpy as np
    import torch

    from labkit.attention.mla.layer import LatentLayer, LatentShape

LOG2E = 1.4426950408889634
#: Bytes that the expanded keys and values of a piece take at most, and the fewest tokens of a piece all the same.
PIECE_BYTES = 128 << 20
LEAST_TOKENS = 1024


def piece_tokens(shape: LatentShape, itemsize: int) -> int:
    """Keys of the largest piece."""
    return max(LEAST_TOKENS, PIECE_BYTES // (shape.num_heads * (shape.nope + shape.value) * itemsize))


@dataclasses.dataclass(frozen=True)
class Piece:
    """Keys of some requests, one after another, as the host plans them.

    rows: int32 `[requests, 6]`: first query row, queries, position of the first query, first key row in the piece,
    position of that key, keys. requests: their rows of the block table. longest: queries of the longest.
    """

    rows: np.ndarray
    requests: np.ndarray
    longest: int

    @property
    def num_keys(self) -> int:
        return int(self.rows[:, 5].sum())


def plan_pieces(query_start: np.ndarray, seq_lens: np.ndarray, limit: int) -> list[Piece]:
    """Every request's keys in order, packed into pieces of at most `limit`; a long request is cut.

    Args:
        query_start, seq_lens: `[requests + 1]` and `[requests]`. Requests without queries need no keys.
    """
    import numpy as np

    pieces: list[list[tuple[int, ...]]] = [[]]
    room = limit
    for request, length in enumerate(int(n) for n in seq_lens):
        first, queries = int(query_start[request]), int(query_start[request + 1] - query_start[request])
        at = 0
        while queries and (at < length or at == 0):
            if room == 0:
                pieces.append([])
                room = limit
            keys = min(length - at, room)
            pieces[-1].append((request, first, queries, length - queries, limit - room, at, keys))
            room -= keys
            at += max(keys, 1)
    made = []
    for piece in pieces:
        if piece:
            table = np.array(piece, dtype=np.int32)
            made.append(Piece(np.ascontiguousarray(table[:, 1:]), table[:, 0], int(table[:, 2].max())))
    return made


@dataclasses.dataclass(frozen=True)
class DevicePiece:
    """A piece with what the device needs: `rows` as in `Piece`, and the cache slot of every key, int64."""

    host: Piece
    rows: torch.Tensor
    slots: torch.Tensor


@dataclasses.dataclass(frozen=True)
class ChunkPlan:
    """All pieces of a step. `merges`: some request's keys are in more than one."""

    pieces: tuple[DevicePiece, ...]
    merges: bool


def to_device(pieces: list[Piece], block_table: torch.Tensor, block_size: int) -> ChunkPlan:
    """Upload a plan and look up the slots of its keys; never waits for the device.

    Args:
        block_table: int32, a row for each request of the plan.
    """
    import numpy as np
    import torch

    device, out = block_table.device, []
    for piece in pieces:
        keys = piece.rows[:, 5]
        request = np.repeat(piece.requests, keys)
        position = np.arange(piece.num_keys) - np.repeat(piece.rows[:, 3], keys) + np.repeat(piece.rows[:, 4], keys)
        packed = torch.from_numpy(np.concatenate((piece.rows.ravel(), request, position)).astype(np.int32))
        if device.type == "cuda":
            packed = packed.pin_memory()
        rows, requests, positions = packed.to(device, non_blocking=True).split(
            (piece.rows.size, len(request), len(position))
        )
        blocks = block_table[requests, positions // block_size].long()
        slots = blocks * block_size + positions % block_size
        out.append(DevicePiece(piece, rows.view(-1, 6), slots))
    return ChunkPlan(tuple(out), any((piece.rows[:, 4] > 0).any() for piece in pieces))


def attend_chunks(
    layer: LatentLayer, plan: ChunkPlan, query: torch.Tensor, cache: torch.Tensor, output: torch.Tensor, scale: float
) -> None:
    """Attention of the plan's requests into `output`; a row that sees nothing is 0.

    Args:
        query: `[num_tokens, heads, nope + rope]`, rows as the plan counts them.
        cache: `[num_blocks, block_size, 1, rank + rope]` with this step's latents in it.
        output: `[num_tokens, heads, value]`.
    """
    import torch

    lines = cache.flatten(0, 2)
    # Partial results stay in fp32 until the last is merged.
    into = torch.empty(output.shape, dtype=torch.float32, device=output.device) if plan.merges else output
    lse = torch.empty(output.shape[:2], dtype=torch.float32, device=output.device)
    for piece in plan.pieces:
        latent = lines.index_select(0, piece.slots)
        expanded = layer.expand(latent)
        attend = attend_piece_triton if query.is_cuda and HAVE_TRITON else attend_piece_torch
        attend(layer.shape, piece, query, latent, expanded, into, lse, scale)
    if plan.merges:
        output.copy_(into)


def attend_piece_torch(
    shape: LatentShape, piece: DevicePiece, query: torch.Tensor, latent: torch.Tensor, expanded: torch.Tensor,
    output: torch.Tensor, lse: torch.Tensor, scale: float,
) -> None:  # fmt: skip
    """One piece in plain torch, request by request, in fp32. `lse` is to base e here, and private to the call chain."""
    import torch

    for first, queries, first_pos, key_row, key_pos, keys in piece.host.rows.tolist():
        q = query[first : first + queries].float()
        kv = expanded[key_row : key_row + keys].float()
        rotated = latent[key_row : key_row + keys, shape.rank :].float()
        scores = torch.einsum("qhd,khd->qhk", q[..., : shape.nope], kv[..., : shape.nope])
        scores = (scores + torch.einsum("qhr,kr->qhk", q[..., shape.nope :], rotated)) * scale
        position = torch.arange(key_pos, key_pos + keys, device=q.device)
        last_seen = torch.arange(first_pos, first_pos + queries, device=q.device)
        scores = scores.masked_fill((position > last_seen[:, None])[:, None, :], -math.inf)
        found = scores.logsumexp(-1)
        weights = (scores - found.masked_fill(found == -math.inf, 0.0)[..., None]).exp()
        out = torch.einsum("qhk,khv->qhv", weights, kv[..., shape.nope :])
        rows = slice(first, first + queries)
        if key_pos > 0:
            both = torch.logaddexp(found, lse[rows])
            known = both.masked_fill(both == -math.inf, 0.0)
            out = out * (found - known).exp()[..., None] + output[rows].float() * (lse[rows] - known).exp()[..., None]
            found = both
        output[rows] = out.to(output.dtype)
        lse[rows] = found


def chunk_tile(longest: int, itemsize: int, capability: tuple[int, int] | None) -> tuple[int, int, int, int]:
    """(queries, keys, warps, stages) of one program for DeepSeek's sizes: what compiling for each architecture left
    without spills and within its shared memory.

    Args:
        longest: queries of the longest chunk.
    """
    if itemsize == 4 or (capability is not None and capability < (8, 0)):
        return 16, 16, 4, 1
    if capability is not None and capability[0] in (9, 10):
        return (128, 64, 8, 2) if longest > 64 else (64, 64, 4, 2)
    return 64, 32, 4, 2


def attend_piece_triton(
    shape: LatentShape, piece: DevicePiece, query: torch.Tensor, latent: torch.Tensor, expanded: torch.Tensor,
    output: torch.Tensor, lse: torch.Tensor, scale: float,
) -> None:  # fmt: skip
    """One piece by the Triton kernel, wherever Triton runs."""
    import torch

    capability = torch.cuda.get_device_capability(query.device) if query.is_cuda else None
    block_m, block_n, warps, stages = chunk_tile(piece.host.longest, query.element_size(), capability)
    variant = mla_chunks_kernel.variant(
        (query.dtype, output.dtype),
        (
            query.stride(0), query.stride(1), expanded.stride(0), expanded.stride(1), latent.stride(0),
            output.stride(0), output.stride(1), shape.num_heads, shape.rank, shape.nope, shape.rope, shape.value,
            max(16, next_power_of_2(shape.nope)), max(16, next_power_of_2(shape.rope)),
            max(16, next_power_of_2(shape.value)), block_m, block_n,
            "ieee" if query.dtype == torch.float32 else "tf32",
        ),
        warps, stages,
    )  # fmt: skip
    grid = (-(-piece.host.longest // block_m), shape.num_heads, len(piece.host.rows))
    variant(grid, (query, expanded, latent, output, lse, piece.rows), (scale * LOG2E,))
