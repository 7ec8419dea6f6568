"""The pages of a batch as one flat list, made from the block table. Refuses to know who asks for it in this form."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from labkit.launch import kernel, next_power_of_2

if TYPE_CHECKING:
    import torch

tl: Any = None  # `triton.language` once a kernel has been launched

GATHER_BLOCK = 1024
_HAVE_TRITON = importlib.util.find_spec("triton") is not None


@kernel(tensors="table_ptr seq_lens_ptr indices_ptr", numbers="num_reqs table_stride")
def gather_pages_kernel(
    table_ptr, seq_lens_ptr, indices_ptr, num_reqs, table_stride,
    PAGE: tl.constexpr, MAX_REQS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK pages of one request, to their place behind the pages of earlier requests. Grid: (requests, blocks)."""
    row = tl.program_id(0)
    r = tl.arange(0, MAX_REQS)
    pages = (tl.load(seq_lens_ptr + r, mask=r < num_reqs, other=0) + PAGE - 1) // PAGE
    first = tl.sum(tl.where(r < row, pages, 0), 0)
    count = tl.sum(tl.where(r == row, pages, 0), 0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    page = tl.load(table_ptr + row.to(tl.int64) * table_stride + at, mask=mask, other=0)
    tl.store(indices_ptr + first + at, page, mask=mask)


def gather_pages(
    table: torch.Tensor, seq_lens: torch.Tensor, indices: torch.Tensor, page_size: int, num_pages: int, max_pages: int,
    max_reqs: int,
) -> None:  # fmt: skip
    """The used pages of every request, one request after another, into `indices`. Never waits for the device.

    Args:
        table: int32 `[requests, max_blocks]`; rows may be apart in memory.
        seq_lens: int32 `[requests]`, tokens; a request uses ⌈tokens / page_size⌉ pages.
        indices: int32, room for `num_pages`; what lies behind them stays.
        num_pages, max_pages: of all requests and of the longest, from the host.
        max_reqs: the most requests of any batch, so that one compiled form serves all.
    """
    if table.is_cuda and _HAVE_TRITON:
        gather_pages_triton(table, seq_lens, indices, page_size, max_pages, max_reqs)
    else:
        gather_pages_torch(table, seq_lens, indices, page_size, num_pages)


def gather_pages_triton(
    table: torch.Tensor, seq_lens: torch.Tensor, indices: torch.Tensor, page_size: int, max_pages: int, max_reqs: int
) -> None:
    """`gather_pages` by the Triton kernel, wherever Triton runs."""
    num_reqs = seq_lens.shape[0]
    variant = gather_pages_kernel.variant(
        (table.dtype, indices.dtype), (page_size, next_power_of_2(max(num_reqs, max_reqs)), GATHER_BLOCK), 4, 1
    )
    variant((num_reqs, -(-max_pages // GATHER_BLOCK), 1), (table, seq_lens, indices), (num_reqs, table.stride(0)))


def gather_pages_torch(
    table: torch.Tensor, seq_lens: torch.Tensor, indices: torch.Tensor, page_size: int, num_pages: int
) -> None:
    """`gather_pages` in plain torch; does not synchronize either, since the host knows the number of pages."""
    import torch

    counts = ((seq_lens + page_size - 1) // page_size).long()
    rows = torch.repeat_interleave(torch.arange(len(counts), device=table.device), counts, output_size=num_pages)
    within = torch.arange(num_pages, device=table.device) - (counts.cumsum(0) - counts)[rows]
    indices[:num_pages] = table[rows, within]
