"""FLASHINFER: FlashInfer's paged attention behind the backend interface. Refuses to know the model and the graphs.

One kernel serves any mixed batch: `BatchPrefillWithPagedKVCacheWrapper` with its fa2 kernels takes decode rows and
chunks in one call. (FlashInfer's decode wrapper on tensor cores runs the same kernel and would be one more module to
compile; fa3 compiles two to three times as long per head size and decodes no faster.) A schedule is planned on the host
before each step and copied to the device; the kernel reads it there, so a captured graph follows a new plan. FlashInfer
is imported when an instance is made or its availability is asked for, and compiles with nvcc at the first use.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

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
from labkit.attention.kernels.pages import gather_pages
from labkit.errors import BackendError, CaptureError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from labkit.attention.metadata import AttentionMetadata

HEAD_SIZES = (64, 128, 256)
FLOAT_WORKSPACE = 128 << 20  # bytes, what FlashInfer recommends; more where a schedule can need it
SLACK = 4096  # bytes, for the alignment of the arrays in a workspace
LN2 = 0.6931471805599453
#: FlashInfer writes −5·10⁴, less the logarithm of a few masked keys, where a row sees nothing.
SEES_NOTHING = -4.9e4
COMPILE_SECONDS = 40


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """A batch as FlashInfer takes it: offsets of queries and of pages, and the fill of each request's last page.

    int32 on the host: query_start, page_start `[requests + 1]`; last_page_len `[requests]`, in 1…page size, 0 where a
    request has no page.
    """

    query_start: np.ndarray
    page_start: np.ndarray
    last_page_len: np.ndarray
    max_query_len: int

    @property
    def num_rows(self) -> int:
        return int(self.query_start[-1])

    @property
    def num_pages(self) -> int:
        return int(self.page_start[-1])


def page_layout(query_start: np.ndarray, seq_lens: np.ndarray, page_size: int, split_blind: bool = True) -> PageLayout:
    """The layout of a batch, in fresh arrays: the step's own host buffers may be rewritten while a copy is under way.

    Args:
        query_start, seq_lens: int32 `[requests + 1]` and `[requests]`.
        split_blind: give the leading rows of a request that see no key (more queries than keys) a request of their own
            without pages. The kernel's tile bounds are unsigned and assume at least as many keys as queries.

    Raises:
        BackendError: the offsets do not start at 0 or decrease.
    """
    import numpy as np

    query_lens, lens = np.diff(query_start), np.asarray(seq_lens)
    if query_start[0] != 0 or (query_lens.size and query_lens.min() < 0):
        raise BackendError("FLASHINFER", f"query_start_loc must start at 0 and never decrease, got {query_start}")
    blind = np.flatnonzero((query_lens > lens) & (lens > 0)) if split_blind else ()
    if len(blind):
        hidden = query_lens[blind] - lens[blind]
        query_lens = query_lens.copy()
        query_lens[blind] -= hidden
        query_lens, lens = np.insert(query_lens, blind, hidden), np.insert(lens, blind, 0)
    starts, pages = (np.zeros(len(lens) + 1, dtype=np.int32) for _ in range(2))
    np.cumsum(query_lens, out=starts[1:])
    np.cumsum((lens + page_size - 1) // page_size, out=pages[1:])
    last = np.where(lens > 0, (lens - 1) % page_size + 1, 0).astype(np.int32)
    return PageLayout(starts, pages, last, int(query_lens.max(initial=0)))


def query_tile(packed_rows: int, head_size: int) -> int:
    """Rows of a tile that fa2 takes for `packed_rows` = query rows × query heads per KV head, from sm_80 on."""
    if packed_rows > 64 and head_size < 256:
        return 128
    return 64 if packed_rows > 16 else 16


def graph_workspace(spec: AttentionSpec, num_sms: int, num_reqs: int, num_tokens: int) -> tuple[int, int]:
    """Bytes of float and int workspace that any plan for a captured shape takes: all of it follows from the counts."""
    group = spec.num_heads // spec.num_kv_heads
    tile = query_tile((num_tokens - num_reqs + 1) * group, spec.head_size)
    items = max(2 * num_sms // spec.num_kv_heads, -(-num_tokens * group // tile) + num_reqs - 1)
    return _partial_results(spec, items, tile), 13 * items + 4 * (num_reqs + num_tokens) + SLACK


def eager_workspace(spec: AttentionSpec, num_sms: int) -> int:
    """Bytes of float workspace for any eager batch: keys are split only as long as two blocks per SM are not passed."""
    tile = 128 if spec.head_size < 256 else 64
    return _partial_results(spec, 2 * num_sms // spec.num_kv_heads, tile)


def _partial_results(spec: AttentionSpec, items: int, tile: int) -> int:
    """One fp32 row and its LSE per work item, row of its tile and query head."""
    return spec.num_heads * items * tile * (spec.head_size + 1) * 4 + SLACK


@dataclasses.dataclass(eq=False)
class _Planned:
    """One wrapper and what its last plan was made for. A captured step keeps the object and sees the next plan."""

    wrapper: Any
    rows: int = 0
    query_start: Any = None
    copied: Any = None  # a CUDA event behind the copies of the last plan


class FlashInferBackend(AttentionBackend):
    """Paged attention by FlashInfer for MHA, GQA and MQA; see the module's docstring.

    Head sizes are those for which FlashInfer can merge split keys. Number of splits: FlashInfer fixes the length of a
    split, not their number, and not under a graph, so `num_splits` is refused. Sinks need another module of FlashInfer.
    """

    # FlashInfer names sm_75 as its oldest; the gate at sm_80 is vLLM's: on sm_75 the kernels have no bfloat16.
    capabilities = BackendCapabilities(
        name="FLASHINFER",
        dtypes=("float16", "bfloat16"),
        head_sizes=(64, 256, 64),
        block_sizes=(8, 1024, 8),
        min_capability=(8, 0),
        kv_layouts=("NHD", "HND"),
        sliding_window=True,
        logits_soft_cap=True,
        split_mixed_batches=True,
    )

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        import torch

        on_gpu = device.type == "cuda"
        capability = torch.cuda.get_device_capability(device) if on_gpu else None
        reasons = self.why_not(spec, Platform(device.type, capability))
        available = self.availability()
        if not available.usable:
            reasons.insert(0, Reason(available.reason))
        if reasons:
            raise BackendError("attention_backend='FLASHINFER'", "; ".join(map(str, reasons)))
        import flashinfer

        self._library = flashinfer
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 132
        self._window_left = -1 if spec.sliding_window is None else spec.sliding_window - 1
        self._scale = spec.head_size**-0.5
        dtype = getattr(torch, spec.dtype)
        self._options = {
            "num_qo_heads": spec.num_heads,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim_qk": spec.head_size,
            "page_size": spec.block_size,
            "causal": True,
            "sm_scale": self._scale,
            "window_left": self._window_left,
            "logits_soft_cap": spec.logits_soft_cap,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }
        self._parameters = frozenset(inspect.signature(flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan).parameters)
        # In 0.6, fa2 is handed the KV lengths and goes by the page offsets alone.
        self._lengths_are_read = _version(flashinfer) >= (0, 7)
        pages = spec.max_num_seqs * -(-spec.max_model_len // spec.block_size)
        # Written by every `prepare` and read by the step behind it, so all shapes share one list.
        self._indices = torch.zeros(pages + 1, dtype=torch.int32, device=device)
        self._workspace = self._allocate(max(FLOAT_WORKSPACE, eager_workspace(spec, self.num_sms)))
        self._eager = _Planned(self._wrapper(self._workspace))
        self._graphs: dict[tuple[int, int], _Planned] = {}

    @classmethod
    def availability(cls) -> Availability:
        """Whether FlashInfer loads and finds what it compiles with. Without a GPU it is found but not imported."""
        if "flashinfer" not in sys.modules:
            if importlib.util.find_spec("flashinfer") is None:
                return Availability(False, "ModuleNotFoundError: No module named 'flashinfer'")
            if not _cuda_is_there():
                return Availability(True, "", _installed_version())
        library, error = _import_flashinfer()
        if error:
            return Availability(False, error, _installed_version())
        missing = _missing_tools(library)
        if missing:
            reason = f"FlashInfer compiles its kernels at first use, and cannot here: {'; '.join(missing)}"
            return Availability(False, reason, library.__version__)
        return Availability(True, "", library.__version__)

    @classmethod
    def extra_reasons(
        cls, spec: AttentionSpec, platform: Platform, available: Availability | None = None
    ) -> list[Reason]:
        out: list[Reason] = []
        low, high, multiple = cls.capabilities.head_sizes
        in_range = low <= spec.head_size <= high and spec.head_size % multiple == 0
        if in_range and spec.head_size not in HEAD_SIZES:
            out.append(
                Reason(
                    f"head size {spec.head_size} is not supported: FlashInfer cannot merge split keys of that size",
                    f"it takes {', '.join(map(str, HEAD_SIZES))}",
                )
            )
        return out

    @classmethod
    def graph_support(
        cls, spec: AttentionSpec, platform: Platform, available: Availability | None = None
    ) -> tuple[AttentionCGSupport, str]:
        return AttentionCGSupport.ALWAYS, (
            "grid, tile and workspace of fa2's prefill kernel follow from the padded counts, and a plan before each "
            "replay rewrites the schedule that it reads on the device; vLLM lists UNIFORM_SINGLE_TOKEN_DECODE on an "
            "H200 without cubins because it captures FlashInfer's decode wrapper"
        )

    # --- compiling -------------------------------------------------------------------------------------------------

    @classmethod
    def jit_spec(cls, spec: AttentionSpec) -> Any:
        """FlashInfer's build of the one module that `spec` needs, with `is_compiled` and `build(verbose)`.

        The module's key is dtype, head size, window or none, soft-cap or none. FlashInfer must load here.
        """
        import flashinfer.jit
        import torch

        dtype = getattr(torch, spec.dtype)
        window, cap = spec.sliding_window is not None, (spec.logits_soft_cap or 0) > 0
        return flashinfer.jit.gen_batch_prefill_module(
            "fa2", dtype, dtype, dtype, torch.int32, spec.head_size, spec.head_size, 0, window, cap, False
        )

    @classmethod
    def compile_note(cls, spec: AttentionSpec) -> str | None:
        """What the first use of `spec` compiles here, for how long, and where it is kept; None when it is built."""
        try:
            build = cls.jit_spec(spec)
            if build.is_compiled:
                return None
            where = str(build.get_library_path().parents[1])
        except Exception:  # another version's build step; the compiler says what is wrong when it is needed
            where = "FlashInfer's cache"
        features = [
            *(["a sliding window"] if spec.sliding_window is not None else []),
            *(["soft-capping"] if spec.logits_soft_cap else []),
        ]
        what = f"head size {spec.head_size} in {spec.dtype}" + (f" with {' and '.join(features)}" if features else "")
        cost = f"about {COMPILE_SECONDS} s; they are kept in {where}"
        return f"the first use compiles FlashInfer's kernels for {what}: {cost}"

    def warm_up(self, progress: Callable[[str, int, int, str], None] | None) -> None:
        note = self.compile_note(self.spec)
        if progress and note:
            progress("compiling", 0, 1, note)
        self._attend_to_one_token()
        if progress and note:
            progress("compiling", 1, 1, "done")

    def _attend_to_one_token(self) -> None:
        import numpy as np
        import torch

        from labkit.attention.metadata import AttentionMetadata

        spec, device = self.spec, self.device
        zeros = functools.partial(torch.zeros, device=device)
        dtype = self._options["q_data_type"]
        starts, lens = np.array([0, 1], dtype=np.int32), np.ones(1, dtype=np.int32)
        metadata = AttentionMetadata(
            1, 1, 1, 1, 1, 1, torch.from_numpy(starts).to(device), torch.from_numpy(lens).to(device),
            zeros((1, 1), dtype=torch.int32), zeros(1, dtype=torch.int64), starts, lens,
        )  # fmt: skip
        query = zeros((1, spec.num_heads, spec.head_size), dtype=dtype)
        shape = (1, spec.block_size, spec.num_kv_heads, spec.head_size)
        cache = zeros(shape, dtype=dtype)
        self.prepare(metadata)
        self.forward(
            query, cache, cache, torch.empty_like(query), metadata, scale=self._scale,
            sliding_window=spec.sliding_window, logits_soft_cap=spec.logits_soft_cap,
        )  # fmt: skip

    # --- planning --------------------------------------------------------------------------------------------------

    def prepare(self, metadata: AttentionMetadata) -> None:
        shape = (metadata.num_reqs, metadata.num_tokens)
        planned = self._for_graph(*shape) if metadata.for_graph else self._eager
        self._plan(planned, metadata)
        metadata.scratch["flashinfer"] = planned

    def _plan(self, planned: _Planned, metadata: AttentionMetadata) -> None:
        reqs, page_size = metadata.num_reqs, self.spec.block_size
        # A graph's number of requests is fixed. A scheduled batch has no blind rows; only the dummy batch at capture
        # can, when it is longer than the context, and nobody reads what it gives.
        layout = page_layout(
            metadata.query_start_loc_cpu[: reqs + 1], metadata.seq_lens_cpu[:reqs], page_size, not metadata.for_graph
        )
        if layout.num_rows == 0 and not metadata.for_graph:
            planned.rows = 0
            return
        self._gather_pages(metadata, layout)
        self._plan_layout(planned, layout, self._indices)

    def _gather_pages(self, metadata: AttentionMetadata, layout: PageLayout) -> None:
        """The pages of all requests, one after another, from the block table: on the device, without waiting for it."""
        reqs, page_size, pages = metadata.num_reqs, self.spec.block_size, layout.num_pages
        if pages > len(self._indices):
            raise BackendError(
                "FLASHINFER",
                f"a batch of {pages} pages, and max_num_seqs={self.spec.max_num_seqs} requests of "
                f"max_model_len={self.spec.max_model_len} tokens have {len(self._indices) - 1} at most",
            )
        if pages == 0:
            return
        longest = -(-int(metadata.seq_lens_cpu[:reqs].max()) // page_size)
        gather_pages(
            metadata.block_table[:reqs], metadata.seq_lens[:reqs], self._indices, page_size, pages, longest,
            self.spec.max_num_seqs,
        )  # fmt: skip

    def _plan_layout(self, planned: _Planned, layout: PageLayout, indices: torch.Tensor) -> None:
        import numpy as np
        import torch

        if planned.copied is not None:
            # `plan` writes its schedule into one pinned buffer and copies it without waiting; the next plan must not
            # write there before that copy is over. FlashInfer does not guard it.
            planned.copied.synchronize()
        host = [torch.from_numpy(a) for a in (layout.query_start, layout.page_start, layout.last_page_len)]
        options = dict(self._options)
        # Without these two, `plan` walks tensors element by element in Python, microseconds per request.
        if "max_token_per_sequence" in self._parameters:
            options["max_token_per_sequence"] = layout.max_query_len
        if "seq_lens" in self._parameters:
            lens = np.maximum(np.diff(layout.page_start) - 1, 0) * self.spec.block_size + layout.last_page_len
            lens = lens if self._lengths_are_read else lens.max(initial=0, keepdims=True)
            options["seq_lens"] = torch.from_numpy(lens.astype(np.int32))
        planned.wrapper.plan(host[0], host[1], indices[: max(1, layout.num_pages)], host[2], **options)
        planned.query_start, planned.rows = layout.query_start, layout.num_rows
        if self.device.type == "cuda":
            planned.copied = planned.copied or torch.cuda.Event()
            planned.copied.record()

    def _for_graph(self, num_reqs: int, num_tokens: int) -> _Planned:
        """The wrapper of a captured shape, whose buffers a graph keeps reading. Uniform and mixed graphs may share it:
        what a graph bakes in follows from the two counts, and everything else is planned again before each replay."""
        import torch

        found = self._graphs.get((num_reqs, num_tokens))
        if found is None:
            # Buffers that outlive a step may be written inside inference mode and outside it only if made outside.
            with torch.inference_mode(False), torch.no_grad():
                found = self._graphs[num_reqs, num_tokens] = self._new_graph_wrapper(num_reqs, num_tokens)
        return found

    def _new_graph_wrapper(self, num_reqs: int, num_tokens: int) -> _Planned:
        import numpy as np
        import torch

        floats, ints = graph_workspace(self.spec, self.num_sms, num_reqs, num_tokens)
        if floats > self._workspace.numel():
            try:
                self._workspace = self._allocate(floats)  # older graphs keep the one that they were captured with
            except torch.cuda.OutOfMemoryError as error:
                raise CaptureError(
                    f"a graph of {num_tokens} tokens and {num_reqs} requests",
                    f"the GPU has no {floats / 2**20:.0f} MiB for FlashInfer's partial results",
                    "Lower gpu_memory_utilization or max_cudagraph_capture_size.",
                ) from error
        buffer = functools.partial(torch.zeros, dtype=torch.int32, device=self.device)
        wrapper = self._wrapper(
            self._workspace,
            use_cuda_graph=True,
            qo_indptr_buf=buffer(num_reqs + 1),
            paged_kv_indptr_buf=buffer(num_reqs + 1),
            paged_kv_indices_buf=self._indices,
            paged_kv_last_page_len_buf=buffer(num_reqs),
        )
        # The constructor takes 8 MiB on the device and 8 pinned; dozens of graphs live at once.
        wrapper.reset_workspace_buffer(self._workspace, self._allocate(ints))
        planned = _Planned(wrapper)
        # The first plan fixes the most rows that any later one may have.
        starts = np.minimum(np.arange(num_reqs + 1, dtype=np.int32), num_tokens)
        starts[-1] = num_tokens
        layout = page_layout(starts, np.zeros(num_reqs, dtype=np.int32), self.spec.block_size, split_blind=False)
        self._plan_layout(planned, layout, self._indices)
        return planned

    def _wrapper(self, workspace: torch.Tensor, **options: Any) -> Any:
        return self._library.BatchPrefillWithPagedKVCacheWrapper(
            workspace, self.spec.kv_cache_layout, backend="fa2", **options
        )

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    # --- running ---------------------------------------------------------------------------------------------------

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
        planned = metadata.scratch.get("flashinfer")
        if planned is None:
            self.prepare(metadata)
            planned = metadata.scratch["flashinfer"]
        spec, rows = self.spec, planned.rows
        if rows == 0:
            return
        if sliding_window != spec.sliding_window or logits_soft_cap != spec.logits_soft_cap or sinks is not None:
            raise BackendError(
                "FLASHINFER",
                f"planned for window {spec.sliding_window}, soft-cap {spec.logits_soft_cap} and no sinks, called with "
                f"{sliding_window}, {logits_soft_cap} and {'sinks' if sinks is not None else 'none'}",
            )
        if not output.is_contiguous() or query.stride(-1) != 1:
            raise BackendError("FLASHINFER", "output and the last dimension of query must be contiguous")
        if rows != query.shape[0]:
            query, output = query[:rows], output[:rows]
            lse = lse if lse is None else lse[:rows]
        if spec.kv_cache_layout == "HND":
            key_cache, value_cache = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
        scaled = {} if scale == self._scale else {"q_scale": scale / self._scale}
        if lse is None:
            planned.wrapper.run(query, (key_cache, value_cache), out=output, **scaled)
            return
        planned.wrapper.run(query, (key_cache, value_cache), out=output, lse=lse, return_lse=True, **scaled)
        lse.masked_fill_(lse < SEES_NOTHING, float("-inf")).mul_(LN2)  # FlashInfer's is to base 2

    def bare_call(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        output: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> Callable[[], Any] | None:
        reqs = metadata.num_reqs
        starts, lens = metadata.query_start_loc_cpu[: reqs + 1], metadata.seq_lens_cpu[:reqs]
        layout, planned = page_layout(starts, lens, self.spec.block_size), _Planned(self._wrapper(self._workspace))
        if layout.num_rows == 0:
            return None
        self._gather_pages(metadata, layout)
        self._plan_layout(planned, layout, self._indices.clone())
        if self.spec.kv_cache_layout == "HND":
            key_cache, value_cache = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
        scaled = {} if scale == self._scale else {"q_scale": scale / self._scale}
        rows = planned.rows
        return functools.partial(
            planned.wrapper.run, query[:rows], (key_cache, value_cache), out=output[:rows], **scaled
        )

    def describe(self, metadata: AttentionMetadata) -> Sequence[KernelPlan]:
        name = "BatchPrefillWithPagedKVCacheKernel"
        note = f"fa2, pages of {self.spec.block_size} ({self.spec.kv_cache_layout}), planned on the host each step"
        planned = metadata.scratch.get("flashinfer")
        if planned is None or planned.rows == 0:
            return (KernelPlan(name, note=note),)
        plan = list(getattr(planned.wrapper, "_plan_info", None) or ())
        if len(plan) != 15:  # another version's plan
            return (KernelPlan(name, note=note),)
        items, tile, split = int(plan[0]), int(plan[3]), bool(plan[14])
        grid = (items, 1, self.spec.num_kv_heads)
        if metadata.for_graph:
            return (
                KernelPlan(name, grid, 1, None, f"{note}; {tile} query rows a tile, splits as planned for each replay"),
                KernelPlan("PersistentVariableLengthMergeStatesKernel", note="merges the splits by their log-sum-exp"),
            )
        import numpy as np

        group = self.spec.num_heads // self.spec.num_kv_heads
        tiles = int((-(-np.diff(planned.query_start).astype(np.int64) * group // tile)).sum())
        splits = -(-items // max(1, tiles))
        first = KernelPlan(name, grid, splits, None, f"{note}; {tile} query rows a tile")
        if not split:
            return (first,)
        merge = KernelPlan(
            "PersistentVariableLengthMergeStatesKernel", None, splits, None, "merges the splits by their log-sum-exp"
        )
        return (dataclasses.replace(first, note=f"{first.note}, splits are the mean over tiles"), merge)


@functools.cache
def _import_flashinfer() -> tuple[Any, str]:
    """The library and no error, or None and what importing it raised. A failed import is slow: it is tried once."""
    try:
        import flashinfer

        return flashinfer, ""
    except Exception as error:  # whatever a broken install raises is the answer to the question
        return None, f"{type(error).__name__}: {error}"


def _missing_tools(library: Any) -> list[str]:
    """What FlashInfer would miss when it compiles, each with the remedy; empty where kernels are prebuilt or all is
    there. Looks for files where FlashInfer looks for them, and runs nothing."""
    paths = getattr(getattr(library, "jit", None), "env", None)
    prebuilt = getattr(paths, "FLASHINFER_AOT_DIR", None)
    if prebuilt is not None and os.path.isdir(prebuilt):
        return []
    if os.environ.get("FLASHINFER_DISABLE_JIT"):
        return ["FLASHINFER_DISABLE_JIT is set and no kernels are prebuilt (unset it, or install flashinfer-jit-cache)"]
    out = []
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None:
        on_path = shutil.which("nvcc")
        home = os.path.dirname(os.path.dirname(on_path)) if on_path else "/usr/local/cuda"
    nvcc = os.environ.get("FLASHINFER_NVCC") or os.path.join(home, "bin", "nvcc")
    if not os.access(nvcc, os.X_OK):
        out.append(f"no nvcc at {nvcc} (install the CUDA toolkit and set CUDA_HOME to it)")
    if shutil.which("ninja") is None:
        beside = os.path.join(os.path.dirname(sys.executable), "ninja")
        remedy = f"add {os.path.dirname(beside)} to PATH" if os.path.exists(beside) else "pip install ninja"
        out.append(f"no ninja on PATH ({remedy})")
    compiler = os.environ.get("CXX") or "c++"
    if shutil.which(compiler) is None:
        out.append(f"no C++ compiler {compiler} on PATH (install g++, or set CXX)")
    workspace = getattr(paths, "FLASHINFER_WORKSPACE_DIR", None)
    if workspace is not None and not os.access(workspace, os.W_OK):
        out.append(f"{workspace} cannot be written (set FLASHINFER_WORKSPACE_BASE to a folder that can)")
    return out


def _version(library: Any) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", str(library.__version__))[:2]))


def _installed_version() -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda_is_there() -> bool:
    try:
        import torch

        return torch.cuda.is_available()
    except Exception:
        return False
