"""FLASHINFER_MLA: FlashInfer's paged MLA kernel behind the backend interface. Refuses to know the model and the graphs.

A schedule is planned on the host before each step and copied to the device; the kernel reads it there, so a captured
graph follows a new plan. What the plan leaves on the host is whether two blocks work together, which follows from the
mean number of query rows; under a graph padding is planned like requests, so that the mean never changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from labkit.attention.flashinfer import FlashInferBackend
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
from labkit.errors import BackendError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from labkit.attention.metadata import AttentionMetadata

RANK, ROPE = 512, 64
#: Query heads up to which one block works on a tile, and every answer was right.
MOST_HEADS = 64
WORKSPACE = 128 << 20  # bytes, what FlashInfer recommends
COMPILE_SECONDS = 20


class FlashInferMLABackend(AttentionBackend):
    """Absorbed MLA of DeepSeek's sizes, 512 + 64, by `BatchMLAPagedAttentionWrapper`: fa3 on sm_90, fa2 elsewhere."""

    capabilities = BackendCapabilities(
        name="FLASHINFER_MLA",
        family="MLA",
        dtypes=("float16", "bfloat16"),
        head_sizes=(RANK + ROPE, RANK + ROPE, 1),
        block_sizes=(16, 1024, 16),
        min_capability=(9, 0),
        preferred_block_size=64,
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
            raise BackendError("attention_backend='FLASHINFER_MLA'", "; ".join(map(str, reasons)))
        import flashinfer.mla

        self._wrapper_class = flashinfer.mla.BatchMLAPagedAttentionWrapper
        self.kernels = "fa3" if capability is not None and capability[0] == 9 else "fa2"
        self._dtype = getattr(torch, spec.dtype)
        pages = spec.max_num_seqs * -(-spec.max_model_len // spec.block_size)
        # Written by every `prepare` and read by the step behind it, so all shapes share pages, workspace and schedule.
        self._indices = torch.zeros(pages + 1, dtype=torch.int32, device=device)
        self._workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        self._eager = self._wrapper_class(self._workspace, backend=self.kernels)
        self._graphs: dict[tuple[int, int], Any] = {}
        self._copied: Any = None  # a CUDA event behind the copies of the last plan

    @classmethod
    def availability(cls) -> Availability:
        return FlashInferBackend.availability()

    @classmethod
    def extra_reasons(
        cls, spec: AttentionSpec, platform: Platform, available: Availability | None = None
    ) -> list[Reason]:
        out: list[Reason] = []
        if platform.capability is not None and platform.capability[0] > 10:
            out.append(Reason(f"FlashInfer's MLA kernels are for sm_9x and sm_10x, this GPU is {platform.sm}"))
        if spec.family == "MLA" and spec.head_size == RANK + ROPE and spec.head_size_v != RANK:
            out.append(Reason(f"a latent of {spec.head_size_v} is not supported", f"it takes {RANK} + {ROPE}"))
        if spec.family == "MLA" and spec.num_heads > MOST_HEADS:
            # Seen on an H200, 0.6.12: with 128 heads, where two blocks share a tile, one request of one token is wrong.
            out.append(
                Reason(
                    f"{spec.num_heads} query heads are not trusted: there FlashInfer gets a lone first token wrong",
                    f"it takes up to {MOST_HEADS}",
                )
            )
        return out

    @classmethod
    def graph_support(
        cls, spec: AttentionSpec, platform: Platform, available: Availability | None = None
    ) -> tuple[AttentionCGSupport, str]:
        return AttentionCGSupport.UNIFORM_BATCH, (
            "a plan before each replay rewrites the schedule that its kernel reads on the device; whether two blocks "
            "share a tile is baked in and follows from the mean number of queries, which is constant for equal queries "
            "only (vLLM lists ALWAYS, of another kernel of FlashInfer's)"
        )

    def warm_up(self, progress: Callable[[str, int, int, str], None] | None) -> None:
        """FlashInfer compiles its module at the first plan."""
        import numpy as np
        import torch

        if progress:
            note = f"the first use compiles FlashInfer's MLA kernels ({self.kernels}): about {COMPILE_SECONDS} s"
            progress("compiling", 0, 1, note)
        self._plan(self._eager, np.array([0, 1], dtype=np.int32), np.ones(1, dtype=np.int32))
        query = torch.zeros((1, self.spec.num_heads, RANK + ROPE), dtype=self._dtype, device=self.device)
        cache = torch.zeros((1, self.spec.block_size, 1, RANK + ROPE), dtype=self._dtype, device=self.device)
        self._run(self._eager, query, cache, query.new_empty((1, self.spec.num_heads, RANK)), 1.0, None)
        if progress:
            progress("compiling", 1, 1, "done")

    # --- planning --------------------------------------------------------------------------------------------------

    def prepare(self, metadata: AttentionMetadata) -> None:
        reqs = metadata.num_reqs
        starts, lens = metadata.query_start_loc_cpu[: reqs + 1], metadata.seq_lens_cpu[:reqs]
        rows = int(starts[-1])
        if metadata.for_graph:
            import numpy as np

            rows = metadata.num_tokens
            starts = np.arange(reqs + 1, dtype=np.int32) * (rows // reqs)
        if rows == 0:
            metadata.scratch["flashinfer_mla"] = (None, 0)
            return
        self._gather_pages(metadata, lens)
        wrapper = self._for_graph(reqs, rows) if metadata.for_graph else self._eager
        self._plan(wrapper, starts, lens)
        metadata.scratch["flashinfer_mla"] = (wrapper, rows)

    def _gather_pages(self, metadata: AttentionMetadata, lens: np.ndarray) -> None:
        size = self.spec.block_size
        pages = -(-lens // size)
        if int(pages.sum()) == 0:
            return
        gather_pages(
            metadata.block_table[: metadata.num_reqs], metadata.seq_lens[: metadata.num_reqs], self._indices, size,
            int(pages.sum()), int(pages.max()), self.spec.max_num_seqs,
        )  # fmt: skip

    def _plan(self, wrapper: Any, starts: np.ndarray, lens: np.ndarray) -> None:
        """Fresh host arrays in, a schedule on the device out; never waits for more than the copies of the last plan."""
        import numpy as np
        import torch

        if self._copied is not None:
            # `plan` writes into one pinned buffer and copies it without waiting, and does not guard it.
            self._copied.synchronize()
        size = self.spec.block_size
        pages = np.zeros(len(lens) + 1, dtype=np.int32)
        np.cumsum((lens + size - 1) // size, out=pages[1:])
        host = [torch.from_numpy(np.array(a, dtype=np.int32)) for a in (starts, pages, lens)]
        wrapper.plan(
            host[0], host[1], self._indices[: max(1, int(pages[-1]))], host[2], self.spec.num_heads, RANK, ROPE, size,
            True, 1.0, self._dtype, self._dtype,
        )  # fmt: skip
        if self.device.type == "cuda":
            self._copied = self._copied or torch.cuda.Event()
            self._copied.record()

    def _for_graph(self, reqs: int, tokens: int) -> Any:
        """The wrapper of a captured shape; its schedule lies where the eager one's does."""
        import torch

        found = self._graphs.get((reqs, tokens))
        if found is None:
            buffer = functools.partial(torch.zeros, dtype=torch.int32, device=self.device)
            with torch.inference_mode(False), torch.no_grad():
                found = self._wrapper_class(
                    self._workspace, use_cuda_graph=True, qo_indptr=buffer(reqs + 1), kv_indptr=buffer(reqs + 1),
                    kv_indices=self._indices, kv_len_arr=buffer(reqs), backend=self.kernels,
                )  # fmt: skip
            # 8 MiB on the device and 8 pinned otherwise, for each of dozens of graphs. Every step plans before it runs.
            for name in ("_int_workspace_buffer", "_pin_memory_int_workspace_buffer"):
                if hasattr(found, name):
                    setattr(found, name, getattr(self._eager, name))
            self._graphs[reqs, tokens] = found
        return found

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
        if "flashinfer_mla" not in metadata.scratch:
            self.prepare(metadata)
        wrapper, rows = metadata.scratch["flashinfer_mla"]
        if wrapper is None:
            return
        if sliding_window is not None or logits_soft_cap is not None or sinks is not None:
            raise BackendError("FLASHINFER_MLA", "it has no window, soft-cap or sinks; the selector refuses them")
        self._run(wrapper, query[:rows], key_cache, output[:rows], scale, None if lse is None else lse[:rows])

    def _run(
        self, wrapper: Any, query: torch.Tensor, cache: torch.Tensor, output: torch.Tensor, scale: float,
        lse: torch.Tensor | None,
    ) -> None:  # fmt: skip
        wrapper._sm_scale = scale  # fixed when planned, and only handed on at the run
        latents = cache.squeeze(2)
        options: dict[str, Any] = {} if lse is None else {"lse": lse, "return_lse": True, "return_lse_base_on_e": True}
        wrapper.run(
            query[..., :RANK], query[..., RANK:], latents[..., :RANK], latents[..., RANK:], out=output, **options
        )

    def bare_call(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        output: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> Callable[[], Any] | None:
        if metadata.query_start_loc_cpu[metadata.num_reqs] == 0:
            return None
        rows = int(metadata.query_start_loc_cpu[metadata.num_reqs])
        self.prepare(metadata)
        wrapper = metadata.scratch["flashinfer_mla"][0]
        wrapper._sm_scale = scale
        latents = key_cache.squeeze(2)
        return functools.partial(
            wrapper.run, query[:rows, :, :RANK], query[:rows, :, RANK:], latents[..., :RANK], latents[..., RANK:],
            out=output[:rows],
        )  # fmt: skip

    def describe(self, metadata: AttentionMetadata) -> Sequence[KernelPlan]:
        note = f"{self.kernels}, pages of {self.spec.block_size}, planned on the host each step"
        wrapper, _ = metadata.scratch.get("flashinfer_mla", (None, 0))
        plan = list(getattr(wrapper, "_plan_info", None) or ())
        grid = (int(plan[0]), int(plan[1])) if len(plan) == 18 else None
        return [KernelPlan("BatchMLAPagedAttentionKernel", grid, note=note)]
