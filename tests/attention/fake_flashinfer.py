"""A FlashInfer of a page: the prefill wrapper with its checks, its fa2 schedule as counts, its answer by dense torch.

It is written from what FlashInfer 0.6.12 checks and computes, and shares no code with labkit. What a CUDA graph would
bake in (`_plan_info`) is compared at every replay, as the real kernel would silently go wrong.
"""

from __future__ import annotations

import math
import types
from typing import Any

import torch

NUM_SMS = 132
NOTHING = -5e4


def ceil(a: int, b: int) -> int:
    return -(-a // b)


class Allocator:
    """Aligned pieces of a workspace, as the planner takes them."""

    def __init__(self, size: int) -> None:
        self.size, self.at = size, 0

    def take(self, num_bytes: int, align: int = 16) -> int:
        begin = ceil(self.at, align) * align
        self.at = begin + num_bytes
        if self.at > self.size:
            raise RuntimeError(f"workspace of {self.size} bytes is too small for {self.at}")
        return begin


def schedule(wrapper: Wrapper, query_lens: list[int], pages: list[int], max_rows: int, args: dict[str, Any]) -> list:
    """The 15 numbers of a plan: what a launch bakes in, all but the schedule itself."""
    heads, kv_heads, size, page = args["heads"], args["kv_heads"], args["size"], args["page"]
    group, window = heads // kv_heads, args["window_left"]
    packed = [n * group for n in query_lens]
    most = (max_rows - len(packed) + 1) * group if wrapper.graph else sum(packed) // len(packed)
    tile = 128 if most > 64 and size < 256 else 64 if most > 16 else 16
    limit = 2 * NUM_SMS // kv_heads
    seen = [min(n, ceil(window + tile, page)) if window >= 0 else n for n in pages]
    chunk, longest = max(128 // page, 1), max([1, *seen])

    def items(chunk: int) -> int:
        return sum(ceil(p, tile) * ceil(max(n, 1), chunk) for p, n in zip(packed, seen, strict=True))

    while chunk < longest and items(chunk) > limit:
        chunk += 1
    split = wrapper.graph or chunk < longest
    tiles = ceil(max_rows * group, tile) + len(packed) - 1 if wrapper.graph else 0
    padded = max(limit, tiles) if wrapper.graph else items(chunk)
    assert items(chunk) <= padded, "new batch size should not exceed padded batch size"
    ints, floats = Allocator(wrapper.int_bytes), Allocator(wrapper.float_bytes)
    offsets = [ints.take(4 * padded) for _ in range(3)] + [ints.take(4 * (len(packed) + 1)), ints.take(4, 1)]
    rows_at = ints.take(4) if wrapper.graph else 0
    v_at = s_at = merge_at = mask_at = 0
    if split:
        v_at, s_at = floats.take(heads * padded * tile * size * 4), floats.take(heads * padded * tile * 4)
        merge_at, mask_at = ints.take(4 * (max_rows + 1)), ints.take(padded)
    return [padded, max_rows, rows_at, tile, *offsets[:3], merge_at, *offsets[3:], v_at, s_at, mask_at, wrapper.graph,
            split]  # fmt: skip


class Wrapper:
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper`, fa2 only."""

    made: list[Wrapper] = []
    reads_lengths = False

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None, paged_kv_indptr_buf: Any = None, paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None, custom_mask_buf: Any = None, mask_indptr_buf: Any = None,
        backend: str = "auto", jit_args: Any = None, jit_kwargs: Any = None,
    ) -> None:  # fmt: skip
        assert kv_layout in ("NHD", "HND") and backend == "fa2"
        self.layout, self.graph, self.device = kv_layout, use_cuda_graph, float_workspace_buffer.device
        self.float_bytes, self.int_bytes = float_workspace_buffer.numel(), 8 << 20
        self.bufs = [qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf]
        if use_cuda_graph:
            assert all(torch.is_tensor(b) and b.dtype == torch.int32 for b in self.bufs)
            self.batch = len(qo_indptr_buf) - 1
            assert len(paged_kv_indptr_buf) == self.batch + 1 and len(paged_kv_last_page_len_buf) == self.batch
        self.max_rows: int | None = None
        self.plans = 0
        self._plan_info: list = []
        self._captured: tuple[Any, ...] = ()
        Wrapper.made.append(self)

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        self.float_bytes, self.int_bytes = float_workspace_buffer.numel(), int_workspace_buffer.numel()

    def plan(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int,
        head_dim_vo: int | None = None, causal: bool = False, sm_scale: float | None = None, window_left: int = -1,
        logits_soft_cap: float | None = None, q_data_type: Any = "float16", kv_data_type: Any = None,
        non_blocking: bool = True, seq_lens: torch.Tensor | None = None, max_token_per_sequence: int | None = None,
        fixed_split_size: int | None = None, disable_split_kv: bool = False,
    ) -> None:  # fmt: skip
        host = (qo_indptr, paged_kv_indptr, paged_kv_last_page_len)
        assert all(t.device.type == "cpu" and t.dtype == torch.int32 for t in host), "a device tensor would wait"
        assert isinstance(q_data_type, torch.dtype) and kv_data_type == q_data_type
        query_lens, pages = qo_indptr.diff().tolist(), paged_kv_indptr.diff().tolist()
        last, batch, rows = paged_kv_last_page_len.tolist(), len(qo_indptr) - 1, int(qo_indptr[-1])
        assert batch > 0 and len(paged_kv_indptr) == batch + 1 and len(last) == batch
        assert int(qo_indptr[0]) == 0 and min(query_lens) >= 0 and min(pages) >= 0
        assert all(1 <= n <= page_size for n, p in zip(last, pages, strict=True) if p), last
        if max_token_per_sequence is not None:
            assert max_token_per_sequence == max(query_lens)
        lens = [max(p - 1, 0) * page_size + n for p, n in zip(pages, last, strict=True)]
        if seq_lens is not None:
            assert seq_lens.device.type == "cpu" and seq_lens.tolist() == (lens if self.reads_lengths else [max(lens)])
        if self.graph:
            self.max_rows = rows if self.max_rows is None else self.max_rows
            if rows > self.max_rows:
                raise ValueError("The total number of rows exceeds the number set during initialization")
            if batch != self.batch:
                raise ValueError("The batch size should be fixed during the lifecycle of the wrapper")
            if len(paged_kv_indices) > len(self.bufs[2]):
                raise ValueError("The length of paged_kv_indices exceeds the allocated buffer size.")
            for buf, new in zip(self.bufs, (*host[:2], paged_kv_indices, host[2]), strict=True):
                buf[: len(new)].copy_(new)
        else:
            blind = [n for n, k in zip(query_lens, lens, strict=True) if n > k > 0]
            assert not blind, "the kernel's tile bounds are unsigned: it needs as many keys as queries, or none"
            self.bufs = [qo_indptr.clone(), paged_kv_indptr.clone(), paged_kv_indices, paged_kv_last_page_len.clone()]
        self.rows, self.causal, self.window_left = rows, causal, window_left
        self.cap, self.scale, self.dtype = logits_soft_cap or 0.0, sm_scale, q_data_type
        self.page, self.heads = page_size, (num_qo_heads, num_kv_heads, head_dim_qk)
        args = {"heads": num_qo_heads, "kv_heads": num_kv_heads, "size": head_dim_qk, "page": page_size,
                "window_left": window_left}  # fmt: skip
        self._plan_info = schedule(self, query_lens, pages, self.max_rows or rows, args)
        self.plans += 1

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *args: Any,
        q_scale: float | None = None, out: torch.Tensor | None = None, lse: torch.Tensor | None = None,
        return_lse: bool = False, enable_pdl: bool | None = None, window_left: int | None = None,
    ) -> Any:  # fmt: skip
        assert isinstance(paged_kv_cache, tuple) and out is not None and not args
        heads, kv_heads, size = self.heads
        page_shape = (self.page, kv_heads, size) if self.layout == "NHD" else (kv_heads, self.page, size)
        for cache in paged_kv_cache:
            assert cache.dtype == self.dtype and cache.shape[1:] == page_shape and cache.is_contiguous()
        assert paged_kv_cache[0].stride() == paged_kv_cache[1].stride()
        if q.shape[0] != self.rows:
            raise ValueError(f"q.shape[0] ({q.shape[0]}) does not match qo_indptr[-1] ({self.rows}).")
        assert q.shape == (self.rows, heads, size) == out.shape and q.dtype == out.dtype == self.dtype
        assert out.is_contiguous() and q.stride(-1) == 1
        if return_lse:
            assert lse is not None and lse.shape == (self.rows, heads) and lse.dtype == torch.float32
        self._captured = (q, paged_kv_cache, q_scale, out, lse if return_lse else None, list(self._plan_info))
        self._compute()
        return (out, lse) if return_lse else out

    def replay(self) -> None:
        """What a graph does that captured the last `run`: the same tensors and launch, the last plan's schedule."""
        assert self.graph and self._captured[-1] == self._plan_info, "the graph has other numbers baked in"
        self._compute()

    def _compute(self) -> None:
        q, caches, q_scale, out, lse, _ = self._captured
        starts, page_starts, indices, last = (b.tolist() for b in self.bufs)
        scale = self.scale * (1.0 if q_scale is None else q_scale)
        group = self.heads[0] // self.heads[1]
        for r in range(len(starts) - 1):
            first, end = starts[r], starts[r + 1]
            pages = indices[page_starts[r] : page_starts[r + 1]]
            length = (len(pages) - 1) * self.page + last[r] if pages else 0
            if length == 0:
                out[first:end] = 0
                if lse is not None:
                    lse[first:end] = NOTHING + 3e-2
                continue
            keys, values = ((c if self.layout == "NHD" else c.transpose(1, 2))[pages].flatten(0, 1)[:length].float()
                            for c in caches)  # fmt: skip
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", q[first:end].float(), keys) * scale
            if self.cap > 0:
                scores = self.cap * torch.tanh(scores / self.cap)
            own = torch.arange(length - (end - first), length)[:, None]
            at = torch.arange(length)
            seen = at <= own if self.causal else torch.ones(end - first, length, dtype=torch.bool)
            if self.window_left >= 0:
                seen = seen & (at >= own - self.window_left)
            scores = scores.masked_fill(~seen, -math.inf)
            out[first:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0.0), values).to(out.dtype)
            if lse is not None:
                lse[first:end] = (scores.logsumexp(-1) / math.log(2)).nan_to_num(neginf=NOTHING).T


class LaterWrapper(Wrapper):
    """A later version, which looks at every length that it is handed."""

    reads_lengths = True


class BareWrapper(Wrapper):
    """A version whose `plan` has neither of the two optional shortcuts."""

    def plan(  # type: ignore[override]
        self, qo_indptr: Any, paged_kv_indptr: Any, paged_kv_indices: Any, paged_kv_last_page_len: Any,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, causal: bool = False,
        sm_scale: float | None = None, window_left: int = -1, logits_soft_cap: float | None = None,
        q_data_type: Any = "float16", kv_data_type: Any = None,
    ) -> None:  # fmt: skip
        super().plan(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
            head_dim_qk, page_size, causal=causal, sm_scale=sm_scale, window_left=window_left,
            logits_soft_cap=logits_soft_cap, q_data_type=q_data_type, kv_data_type=kv_data_type,
        )  # fmt: skip


class JitSpec:
    """What `gen_batch_prefill_module` gives: where the module would be, and whether it is there."""

    def __init__(self, root: Any, name: str) -> None:
        self.root, self.name = root, name

    def get_library_path(self) -> Any:
        return self.root / self.name / f"{self.name}.so"

    @property
    def is_compiled(self) -> bool:
        return self.get_library_path().exists()


def module(workspace: Any, version: str = "0.6.12", wrapper: type[Wrapper] = Wrapper) -> dict[str, types.ModuleType]:
    """`sys.modules` entries of a FlashInfer that keeps what it compiles in `workspace` (a `pathlib.Path`)."""
    library, jit = types.ModuleType("flashinfer"), types.ModuleType("flashinfer.jit")
    library.__version__, library.jit = version, jit  # type: ignore[attr-defined]
    library.BatchPrefillWithPagedKVCacheWrapper = wrapper  # type: ignore[attr-defined]
    jit.env = types.SimpleNamespace(  # type: ignore[attr-defined]
        FLASHINFER_AOT_DIR=workspace / "aot", FLASHINFER_WORKSPACE_DIR=workspace
    )

    def gen_batch_prefill_module(backend: str, *key: Any) -> JitSpec:
        assert backend == "fa2" and len(key) == 10 and key[3] == torch.int32
        return JitSpec(workspace / "cached_ops", "_".join(map(str, key)))

    jit.gen_batch_prefill_module = gen_batch_prefill_module  # type: ignore[attr-defined]
    return {"flashinfer": library, "flashinfer.jit": jit}
