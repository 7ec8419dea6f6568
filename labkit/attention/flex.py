"""FLEX_ATTENTION: torch's flex_attention over the paged cache, through its block mask. Refuses to copy K or V.

flex_attention compiles one Triton kernel from a mask written in Python. Its keys are one long axis; here that axis is
the whole physical cache of a layer, `[kv_heads, slots, head_size]`, and one block of keys is one page. What it calls a
block mask is then a block table: for every tile of query rows, the pages to visit.

*Rows.* The query is laid out in rows (one token and one head of a group each), and every request begins a new tile. So
a tile belongs to one request and one KV head: a page is read once for all heads of its group, and never on behalf of
another request. A page that several requests share simply stands in the lists of several tiles, at whatever place each
of them has it.

*Pages.* For a tile, the pages from its first to its last visible key fall into two lists. Full pages are seen by every
row; the kernel asks no mask there. Edge pages (the diagonal, the end of a request, the beginning of a window) are few,
at most `edge_pages`. `sees` is asked about those only, and finds the place of a page in the request by looking for it
among the tile's edge pages. Nothing is sized by the number of pages in the cache.

`prepare` builds all of this on the device, without reading a length back. Under a graph it writes into buffers that
stay, so a replay sees the new batch.

On a CPU torch's eager flex_attention runs. It knows no page lists and computes every score of every row against the
whole cache, some rows at a time: for study, and for tests, since the lists are expanded into the mask that it is given.

What is not protected: values beyond the end of a request in its last page are multiplied by 0, so they must be finite
(on a CPU: all of the value cache). labkit's caches start at zero and hold what models wrote.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from labkit.attention.interface import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionSpec,
    Availability,
    BackendCapabilities,
    KernelPlan,
    Platform,
    Reason,
)
from labkit.attention.kernels.tiles import choose_tile, shared_memory_limit
from labkit.errors import BackendError

if TYPE_CHECKING:
    import torch

    from labkit.attention.metadata import AttentionMetadata

#: Scores that the eager path on a CPU holds at once, in bytes; a call with more rows is cut into several.
CPU_SCORE_BYTES = 1 << 28
#: torch compiles a call of fewer rows separately (its kernel for short queries, even where that is not taken).
LEAST_ROWS = 128
#: A key position that no row reaches.
NOWHERE = 1 << 30
_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclasses.dataclass(frozen=True)
class FlexTile:
    """Rows × keys of one program, as flex_attention's kernel options name them."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def flex_tile(spec: AttentionSpec, capability: tuple[int, int] | None, max_query_len: int) -> FlexTile | None:
    """The tile for requests of at most `max_query_len` tokens; None if none fits in shared memory.

    A page is the most that one iteration reads, and the kernel's tile of keys is a power of two that divides it.
    """
    rows = max(1, max_query_len) * max(1, spec.num_heads // spec.num_kv_heads)
    limit = shared_memory_limit(capability)
    tile = choose_tile(spec.head_size, _ITEMSIZE.get(spec.dtype, 4), rows, limit, capability)
    if tile is None:
        return None
    keys = tile.block_n
    while spec.block_size % keys:
        keys //= 2
    return FlexTile(tile.block_m, keys, tile.num_warps, tile.num_stages)


def edge_pages(block_m: int, group: int, block_size: int, window: int | None) -> int:
    """How many pages of a tile can need the mask: those under its last tokens and, with a window, under its first.

    A multiple of 4, so that what lies behind it in memory stays aligned to 16 bytes.
    """
    tokens = min(block_m, block_m // group + 2)
    one_edge = tokens // block_size + 3
    return -(-one_edge * (1 if window is None else 2) // 4) * 4


def num_tiles(num_tokens: int, num_reqs: int, group: int, block_m: int) -> int:
    """Tiles that any batch of this padded shape fits in; at least `LEAST_ROWS` rows of them, and never 1."""
    return max(num_tokens * group // block_m + min(num_reqs, num_tokens) + 1, -(-LEAST_ROWS // block_m))


class FlexAttentionBackend(AttentionBackend):
    """flex_attention for MHA, GQA and MQA, one call for the mixed batch."""

    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        name="FLEX_ATTENTION",
        dtypes=("float32", "float16", "bfloat16"),
        head_sizes=(16, 256, 8),
        block_sizes=(16, 4096, 16),
        device_types=("cuda", "cpu"),
        min_capability=(7, 5),
        sliding_window=True,
        logits_soft_cap=True,
        sinks=True,
        kv_layouts=("NHD", "HND"),
        # The kernel reads at most one page per iteration, so larger pages are faster.
        preferred_block_size=64,
    )

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        import torch

        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        reasons = self.why_not(spec, Platform(device.type, capability))
        available = self.availability()
        if not available.usable:
            reasons.insert(0, Reason(f"it does not load ({available.reason})", "install triton"))
        if reasons:
            raise BackendError("attention_backend='FLEX_ATTENTION'", "; ".join(map(str, reasons)))
        self.capability = capability
        self.group = spec.num_heads // spec.num_kv_heads
        self._graphs: dict[tuple[int, ...], _Tables] = {}
        self._pool: dict[tuple[int, ...], _Shared] = {}
        # What earlier calls of forward asked for; prepare builds it ahead.
        self._windows = {spec.sliding_window}
        self._page_step = 1

    @classmethod
    def availability(cls) -> Availability:
        """Whether flex_attention imports and, where there is a GPU, Triton, which it compiles to."""
        try:
            import torch
            import torch.nn.attention.flex_attention

            if torch.cuda.is_available():
                import triton  # noqa: F401
        except Exception as error:  # an import may fail in any way; the reader gets the real one
            return Availability(False, f"{type(error).__name__}: {error}")
        return Availability(True, version=torch.__version__)

    @classmethod
    def extra_reasons(
        cls, spec: AttentionSpec, platform: Platform, available: Availability | None = None
    ) -> list[Reason]:
        out: list[Reason] = []
        if platform.device_type != "cuda":
            return out
        if platform.capability and platform.capability < (8, 0) and spec.dtype == "bfloat16":
            out.append(Reason(f"{platform.sm} has no bfloat16 arithmetic", "set dtype to float16", "dtype", "float16"))
        low, high, _ = cls.capabilities.head_sizes
        if low <= spec.head_size <= high and any(
            flex_tile(spec, platform.capability, length) is None for length in (1, 1 << 20)
        ):
            limit = shared_memory_limit(platform.capability)
            out.append(
                Reason(
                    f"no tile of head size {spec.head_size} in {spec.dtype} fits {limit} bytes of shared memory",
                    "take TORCH_SDPA",
                )
            )
        return out

    @classmethod
    def graph_support(
        cls, spec: AttentionSpec, platform: Platform, available: Availability | None = None
    ) -> tuple[AttentionCGSupport, str]:
        return (
            AttentionCGSupport.ALWAYS,
            "one kernel serves any batch, and the page lists that it reads are rebuilt in place before every replay",
        )

    # --- before the graph ------------------------------------------------------------------------------------------

    def prepare(self, metadata: AttentionMetadata) -> None:
        if metadata.num_tokens == 0:
            return
        tables = self._tables(metadata)
        tables.fill_rows(metadata)
        if not tables.lists:
            for window in self._windows:
                self._list_pages(tables, metadata, window)
        else:
            for lists in tables.lists.values():
                lists.fill(tables, metadata, self._page_step)
        metadata.scratch["flex"] = tables

    def _tables(self, metadata: AttentionMetadata) -> _Tables:
        """Buffers for this batch: a graph's own, which stay, or new ones."""
        tile = self._tile(metadata)
        key = (metadata.num_reqs, metadata.num_tokens, tile.block_m, metadata.block_table.shape[1])
        if not metadata.for_graph:
            return _Tables(self.spec, tile, metadata, self.device)
        found = self._graphs.get(key)
        if found is None:
            found = self._graphs[key] = _Tables(self.spec, tile, metadata, self.device)
        return found

    def _tile(self, metadata: AttentionMetadata) -> FlexTile:
        tile = flex_tile(self.spec, self.capability, metadata.max_query_len)
        assert tile is not None  # refused at construction
        return tile

    def _list_pages(self, tables: _Tables, metadata: AttentionMetadata, window: int | None) -> _PageLists:
        """The tile's page lists for one window, in memory that all batches share: only one is in use at a time."""
        edges = edge_pages(tables.tile.block_m, self.group, self.spec.block_size, window)
        width = edges + tables.columns
        key = (window or 0, edges, width)
        shared = self._pool.get(key)
        if shared is None or shared.pages.shape[0] < tables.num_tiles:
            shared = self._pool[key] = _Shared(_empty((tables.num_tiles, width), self.device))
        lists = tables.lists[window] = _PageLists(tables, shared, edges, window, self.device)
        lists.fill(tables, metadata, self._page_step)
        return lists

    # --- what a graph records --------------------------------------------------------------------------------------

    def forward(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        output: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> None:
        import torch

        if metadata.num_tokens == 0:
            return
        if sliding_window is not None and sliding_window < 1:
            raise BackendError("FLEX_ATTENTION", f"sliding_window={sliding_window} keeps no key", "Make it 1 or more.")
        keys, step = flat_cache(key_cache)
        values, value_step = flat_cache(value_cache)
        if step != value_step:
            raise BackendError("FLEX_ATTENTION", f"key pages lie {step} apart and value pages {value_step}")
        tables = metadata.scratch.get("flex")
        if tables is None:
            self.prepare(metadata)
            tables = metadata.scratch["flex"]
        self._page_step = step
        self._windows.add(sliding_window)
        lists = tables.lists.get(sliding_window) or self._list_pages(tables, metadata, sliding_window)
        if lists.page_step != step or lists.shared.holds is not lists:
            lists.fill(tables, metadata, step)
        rows = metadata.num_tokens
        with torch.no_grad():
            if query.is_cuda:
                call = _compiled(
                    tables.tile, self.group, self.spec.block_size, lists.edges, sliding_window, float(scale),
                    logits_soft_cap, sinks is not None, lse is not None, self.spec.dtype, self.spec.head_size,
                )  # fmt: skip
                if rows == 1:  # torch.compile would make a form of its own for one row
                    query = _two_rows(query)
                for tensor, axis in ((query, 0), (keys, 1), (values, 1)):
                    _mark_dynamic(tensor, axis)
                attended, logsumexp = call(query, keys, values, *tables.arguments(), *lists.arguments(), sinks)
            else:
                attended, logsumexp = attend_eagerly(
                    query, keys, values, tables, lists, self.group, self.spec.block_size, sliding_window, scale,
                    logits_soft_cap, sinks,
                )  # fmt: skip
            output[:rows].copy_(attended[:rows])
            if lse is not None and logsumexp is not None:
                lse[:rows].copy_(logsumexp[:rows])

    def describe(self, metadata: AttentionMetadata) -> Sequence[KernelPlan]:
        tile = self._tile(metadata)
        tiles = num_tiles(metadata.num_tokens, metadata.num_reqs, self.group, tile.block_m)
        if self.device.type == "cpu":
            note = "torch's eager form: every score of every row against the whole cache, for study"
        else:
            note = f"compiled at first use; {self.group} heads × tokens of one request per tile, pages from its lists"
        grid = (tiles, 1, self.spec.num_kv_heads)
        return (KernelPlan("flex_attention", grid, 1, (tile.block_m, tile.block_n), note),)


# --- tables --------------------------------------------------------------------------------------------------------


def _empty(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int32 memory that may be written in and outside of inference mode."""
    import torch

    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=torch.int32, device=device)


class _Tables:
    """Which row is which: per tile its request and first and last position, per row its token, per token its row.

    All int32 on the device. `num_tiles` is what the padded shape may need; tiles beyond the batch see nothing.
    """

    def __init__(self, spec: AttentionSpec, tile: FlexTile, metadata: AttentionMetadata, device: torch.device) -> None:
        import torch

        self.tile, self.block_size = tile, spec.block_size
        self.group = spec.num_heads // spec.num_kv_heads
        self.num_tiles = num_tiles(metadata.num_tokens, metadata.num_reqs, self.group, tile.block_m)
        self.columns = max(metadata.block_table.shape[1], -(-spec.max_model_len // spec.block_size))
        rows = self.num_tiles * tile.block_m
        self.token, self.head, self.position = (_empty((rows,), device) for _ in range(3))
        self.row_of_token = _empty((max(2, metadata.num_tokens),), device)
        self.lists: dict[int | None, _PageLists] = {}
        self.owner = self.first = self.last = self.row_of_token  # set by fill_rows
        longest = max(self.num_tiles, tile.block_m, metadata.num_tokens)
        self._count = torch.arange(longest, dtype=torch.int32, device=device)
        for table in self.arguments():
            _mark_dynamic(table, 0)

    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.token, self.head, self.position, self.row_of_token

    def fill_rows(self, metadata: AttentionMetadata) -> None:
        """Lay the batch out in rows. Reads device tensors only, and waits for none."""
        import torch

        group, block_m, last_req = self.group, self.tile.block_m, metadata.num_reqs - 1
        starts, ends = metadata.query_start_loc[:-1], metadata.query_start_loc[1:]
        lengths = ends - starts
        tiles = (lengths * group + (block_m - 1)) // block_m
        tile_ends = torch.cumsum(tiles, 0, dtype=torch.int32)
        tile_starts = tile_ends - tiles
        ids = self._count[: self.num_tiles]
        owner = torch.searchsorted(tile_ends, ids, right=True, out_int32=True)
        used = owner <= last_req
        self.owner = owner.clamp_max(last_req)
        per_request = torch.stack((starts, lengths, metadata.seq_lens - lengths, tile_starts))
        # A request's first token, its tokens, the position before its first token plus one, its first tile.
        start, length, offset, first_tile = per_request[:, self.owner]
        length = length * used
        first_row = (ids - first_tile) * block_m
        row = first_row[:, None] + self._count[:block_m]
        token = row // group
        live = token < length[:, None]
        shape = (self.num_tiles, block_m)
        torch.mul(start[:, None] + token, live, out=self.token.view(shape))
        self.position.view(shape).copy_(torch.where(live, offset[:, None] + token, -1))
        torch.remainder(row, group, out=self.head.view(shape))
        first = first_row // group
        last = torch.minimum((first_row + (block_m - 1)) // group, length - 1)
        self.first = torch.where(used, offset + first, -1)
        self.last = torch.where(used, offset + last, -1)
        tokens = self._count[: metadata.num_tokens]
        request = torch.searchsorted(ends, tokens, right=True, out_int32=True).clamp_max(last_req)
        begin, _, _, first_tile = per_request[:, request]
        where = first_tile * block_m + (tokens - begin) * group
        # A padded token belongs to no request; it reads some row, and nobody reads what it gets.
        torch.clamp(where, 0, self.num_tiles * block_m - group, out=self.row_of_token[: metadata.num_tokens])


@dataclasses.dataclass
class _Shared:
    """Memory for page lists, and whose are in it."""

    pages: torch.Tensor
    holds: _PageLists | None = None


class _PageLists:
    """For one window: the pages that each tile visits, edge pages first, and where the edge pages are in the request.

    Both lists lie in one buffer, side by side: torch 2.11's kernel walks the full list with the row stride of the
    other one.
    """

    def __init__(self, tables: _Tables, shared: _Shared, edges: int, window: int | None, device: torch.device) -> None:
        tiles = tables.num_tiles
        self.shared, self.edges, self.window, self.page_step = shared, edges, window, 0
        self.num_edge, self.num_full = _empty((tiles,), device), _empty((tiles,), device)
        self.edge_page, self.edge_start = _empty((tiles * edges,), device), _empty((tiles * edges,), device)
        self.edge, self.full = shared.pages[:tiles, :edges], shared.pages[:tiles, edges:]
        for table in self.arguments():
            _mark_dynamic(table, 0)

    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.num_edge, self.edge, self.num_full, self.full, self.edge_page, self.edge_start

    def fill(self, tables: _Tables, metadata: AttentionMetadata, page_step: int) -> None:
        """List the pages of the batch that `tables` was filled with.

        Args:
            page_step: pages of the flat cache from one page of ours to the next; see `flat_cache`.
        """
        import torch

        size, window, edges = tables.block_size, self.window, self.edges
        first, last = tables.first, tables.last
        end = ((last + size) // size).clamp_min(0)
        full_end = ((first + 1) // size).clamp_min(0)
        if window is None:
            begin = full_begin = torch.zeros_like(end)
        else:
            begin = (first - (window - 1)).clamp_min(0) // size
            full_begin = (last - window + size).clamp_min(0) // size
        torch.clamp(full_end - full_begin, min=0, out=self.num_full)
        torch.sub(end - begin, self.num_full, out=self.num_edge)
        count = torch.arange(edges + tables.columns, dtype=torch.int32, device=end.device)
        edge = begin[:, None] + count[:edges]
        edge = edge + torch.where(edge >= full_begin[:, None], self.num_full[:, None], 0)
        full = full_begin[:, None] + count[: tables.columns]
        block_table = metadata.block_table
        index = torch.cat((edge, full), 1).clamp_max(block_table.shape[1] - 1)
        pages = self.shared.pages[: tables.num_tiles]
        torch.mul(block_table[tables.owner[:, None], index], page_step, out=pages)
        shape = (tables.num_tiles, edges)
        self.edge_page.view(shape).copy_(pages[:, :edges])
        live = count[:edges] < self.num_edge[:, None]
        self.edge_start.view(shape).copy_(torch.where(live, edge * size, NOWHERE))
        self.page_step, self.shared.holds = page_step, self


def flat_cache(cache: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A layer's cache as one axis of slots, `[kv_heads, slots, head_size]`, and the step from page to page.

    Never a copy. Pages may lie apart, with the other cache or other heads between them, as long as the distance is a
    whole number of pages: page p is then block p · step of the flat axis.

    Raises:
        BackendError: the strides do not allow it, or the kernel's 32-bit offsets do not reach the end.
    """
    blocks, block_size, kv_heads, head_size = cache.shape
    page, slot, head, last = cache.stride()
    step, rest = divmod(page, block_size * slot) if blocks > 1 else (1, 0)
    if rest or step < 1 or last != 1:
        raise BackendError(
            "FLEX_ATTENTION",
            f"a cache with strides {tuple(cache.stride())} is not one axis of slots",
            "Keep the tokens of a page at equal distances, and a whole number of pages from page to page.",
        )
    slots = ((blocks - 1) * step + 1) * block_size
    if slots * slot >= 1 << 31:
        raise BackendError(
            "FLEX_ATTENTION",
            f"a layer's cache reaches over {slots * slot} elements, and the kernel's offsets have 32 bits",
            "Lower num_gpu_blocks_override or gpu_memory_utilization.",
        )
    return cache.as_strided((kv_heads, slots, head_size), (head, slot, last)), step


# --- the call ------------------------------------------------------------------------------------------------------


def sees(
    row: torch.Tensor,
    slot: torch.Tensor,
    position: torch.Tensor,
    edge_page: torch.Tensor,
    edge_start: torch.Tensor,
    block_m: int,
    block_size: int,
    edges: int,
    window: int | None,
) -> torch.Tensor:
    """Whether a row sees the key in a slot of one of its tile's edge pages. False for any other page."""
    import torch

    page = slot // block_size
    entry = row // block_m * edges
    start = torch.where(edge_page[entry] == page, edge_start[entry], NOWHERE)
    for _ in range(edges - 1):
        entry = entry + 1
        start = torch.minimum(start, torch.where(edge_page[entry] == page, edge_start[entry], NOWHERE))
    key, own = start + (slot - page * block_size), position[row]
    visible = key <= own
    if window is not None:
        visible = visible & (key > own - window)
    return visible


def _gather_rows(query: torch.Tensor, group: int, token: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """`[num_tokens, heads, head_size]` → `[kv_heads, rows, head_size]`."""
    return query.unflatten(1, (-1, group))[token, :, head].transpose(0, 1)


def _finish(
    out: torch.Tensor, lse: torch.Tensor | None, row_of_token: torch.Tensor, group: int, sinks: torch.Tensor | None,
    count: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Rows back to `[num_tokens, heads, head_size]`; the sinks, which are one more score without a value.

    With `out` normalised by exp(lse), adding exp(sink) to the denominator scales it by sigmoid(lse − sink). A row that
    sees nothing stays 0 and −inf.
    """
    import torch

    rows = row_of_token[:, None] + count
    out = out[:, rows].transpose(0, 1).flatten(1, 2)
    if lse is None:
        return out, None
    lse = lse[:, rows].transpose(0, 1).flatten(1, 2)
    if sinks is None:
        return out, lse
    sink = sinks.float()
    out = (out.float() * torch.sigmoid(lse - sink)[..., None]).to(out.dtype)
    return out, torch.where(lse == -math.inf, lse, torch.logaddexp(lse, sink))


def _soft_cap(cap: float | None) -> Callable[..., torch.Tensor] | None:
    if cap is None:
        return None
    import torch

    def capped(score: torch.Tensor, b: Any, h: Any, row: Any, slot: Any) -> torch.Tensor:
        return cap * torch.tanh(score / cap)

    return capped


def region(
    tile: FlexTile,
    group: int,
    block_size: int,
    edges: int,
    window: int | None,
    scale: float,
    soft_cap: float | None,
    has_sinks: bool,
    wants_lse: bool,
    dtype: str,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """The function that is compiled: gather rows, one flex_attention, rows back to tokens.

    Every setting is a constant of it; tensors come as arguments, so that a new batch is never a new function.
    """
    import torch
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    options: Any = {
        "BACKEND": "TRITON",
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    if dtype == "float32":
        options["FLOAT32_PRECISION"] = "'ieee'"
    score_mod = _soft_cap(soft_cap)
    request = AuxRequest(lse=wants_lse or has_sinks)

    def attend(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, token: torch.Tensor, head: torch.Tensor,
        position: torch.Tensor, row_of_token: torch.Tensor, num_edge: torch.Tensor, edge: torch.Tensor,
        num_full: torch.Tensor, full: torch.Tensor, edge_page: torch.Tensor, edge_start: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        def mask_mod(b: Any, h: Any, row: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
            return sees(row, slot, position, edge_page, edge_start, tile.block_m, block_size, edges, window)

        rows = _gather_rows(query, group, token, head)
        mask = BlockMask.from_kv_blocks(
            num_edge[None, None],
            edge[None, None],
            num_full[None, None],
            full[None, None],
            BLOCK_SIZE=(tile.block_m, block_size),
            mask_mod=mask_mod,
            seq_lengths=(rows.shape[1], keys.shape[1]),
            compute_q_blocks=False,
        )
        out, aux = flex_attention(
            rows[None], keys[None], values[None], score_mod, mask, scale, kernel_options=options, return_aux=request
        )
        lse = None if aux.lse is None else aux.lse[0]
        return _finish(out[0], lse, row_of_token, group, sinks, torch.arange(group, device=query.device))

    return attend


@functools.cache
def _compiled(
    tile: FlexTile, group: int, block_size: int, edges: int, window: int | None, scale: float, soft_cap: float | None,
    has_sinks: bool, wants_lse: bool, dtype: str, head_size: int, backend: str = "inductor",
) -> Callable[..., Any]:  # fmt: skip
    """One compiled form per set of constants, for the life of the process: an engine that comes back finds it.

    torch.compile counts recompilations, and remembers which sizes varied, per code object. Every form gets its own, so
    that forms do not count as variations of each other.
    """
    import torch

    function = region(tile, group, block_size, edges, window, scale, soft_cap, has_sinks, wants_lse, dtype)
    name = f"paged_flex_{_compiled.cache_info().misses}"
    code = function.__code__.replace(co_name=name)  # type: ignore[attr-defined]
    own = types.FunctionType(code, function.__globals__, name, None, function.__closure__)  # type: ignore[attr-defined]
    return torch.compile(own, fullgraph=True, backend=backend)


def _mark_dynamic(tensor: torch.Tensor, axis: int) -> None:
    """One compiled form for all sizes of this axis, from the first call on."""
    import torch._dynamo

    torch._dynamo.maybe_mark_dynamic(tensor, axis)


def _two_rows(query: torch.Tensor) -> torch.Tensor:
    """One token as the first of two, at the same strides; nothing reads the second."""
    import torch

    padded = torch.empty_strided((2, *query.shape[1:]), query.stride(), dtype=query.dtype, device=query.device)
    padded[:1].copy_(query)
    return padded


# --- without a compiler --------------------------------------------------------------------------------------------


def attend_eagerly(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: _Tables, lists: _PageLists, group: int,
    block_size: int, window: int | None, scale: float, soft_cap: float | None, sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """The same by torch's eager flex_attention, for as many tiles at a time as `CPU_SCORE_BYTES` allows."""
    import torch
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    block_m, slots = tables.tile.block_m, keys.shape[1]
    rows = _gather_rows(query, group, tables.token, tables.head)
    at_once = max(1, CPU_SCORE_BYTES // (keys.shape[0] * block_m * slots * 4))
    outs, lses = [], []
    for first in range(0, tables.num_tiles, at_once):
        some = slice(first, min(first + at_once, tables.num_tiles))
        visible = expand_lists(tables, lists, some, slots)
        part = rows[:, some.start * block_m : some.stop * block_m]
        mask = BlockMask.from_kv_blocks(
            lists.num_edge[some][None, None],
            lists.edge[some][None, None],
            BLOCK_SIZE=(block_m, block_size),
            mask_mod=_look_up(visible),
            seq_lengths=(part.shape[1], slots),
            compute_q_blocks=False,
        )
        with _uncompiled():
            out, aux = flex_attention(
                part[None], keys[None], values[None], _soft_cap(soft_cap), mask, scale, return_aux=AuxRequest(lse=True)
            )
        assert aux.lse is not None
        outs.append(out[0])
        lses.append(aux.lse[0])
    count = torch.arange(group, device=query.device)
    return _finish(torch.cat(outs, 1), torch.cat(lses, 1), tables.row_of_token, group, sinks, count)


def expand_lists(tables: _Tables, lists: _PageLists, some: slice, slots: int) -> torch.Tensor:
    """What the compiled kernel would see through the lists, as one mask `[rows, slots]` of the tiles `some`."""
    import torch

    block_m, size = tables.tile.block_m, tables.block_size
    tiles = some.stop - some.start

    def listed(counts: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        live = torch.arange(pages.shape[1], dtype=torch.int32, device=pages.device) < counts[:, None]
        there = torch.zeros((tiles, slots // size + 1), dtype=torch.bool, device=pages.device)
        there.scatter_(1, torch.where(live, pages, slots // size).long(), True)
        return there[:, :-1].repeat_interleave(block_m, 0).repeat_interleave(size, 1)

    row = torch.arange(some.start * block_m, some.stop * block_m, device=lists.num_edge.device)[:, None]
    slot = torch.arange(slots, device=row.device)[None]
    at_edge = sees(
        row, slot, tables.position, lists.edge_page, lists.edge_start, block_m, size, lists.edges, lists.window
    )
    return listed(lists.num_full[some], lists.full[some]) | (listed(lists.num_edge[some], lists.edge[some]) & at_edge)


def _look_up(visible: torch.Tensor) -> Callable[..., torch.Tensor]:
    return lambda b, h, row, slot: visible[row, slot]


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """flex_attention as plain tensor operations: without this switch of torch's, every new shape is traced first."""
    import torch.nn.attention.flex_attention as module

    before = module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        yield
    finally:
        module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before
