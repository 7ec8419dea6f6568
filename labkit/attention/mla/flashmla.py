"""FLASHMLA: DeepSeek's dense decode kernel for Hopper, in the build of `sgl-flash-mla`. Refuses to know the model.

The kernel takes a rectangle of queries: equal numbers for every request. Any other batch in the absorbed form is given
to it token by token, each as a request of its own with the context that it sees. Its schedule follows from the lengths;
it is made once before each step, outside any graph, and shared by the layers of that step. (Left to itself the library
makes one inside the first call and keeps it, and a captured second call would go on with a stale one.)
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
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
from labkit.errors import BackendError

if TYPE_CHECKING:
    import torch

    from labkit.attention.metadata import AttentionMetadata

RANK, ROPE, PAGE = 512, 64, 64
INSTALL = "`make flashmla` installs it, without the newer torch that its metadata asks for and that it runs without"


@dataclasses.dataclass
class _Plan:
    """One step as the kernel takes it.

    rows: requests of the rectangle, `queries` each. lens: int32 `[rows]`, ≥ 1. schedule: the library's two tensors.
    hidden: rows of tokens that see nothing, which the library does not know; None where there are none.
    """

    rows: int
    queries: int
    lens: torch.Tensor
    table: torch.Tensor
    schedule: Any
    hidden: torch.Tensor | None = None


class FlashMLABackend(AttentionBackend):
    """Absorbed MLA of DeepSeek's sizes, 512 + 64, on sm_90."""

    capabilities = BackendCapabilities(
        name="FLASHMLA",
        family="MLA",
        dtypes=("float16", "bfloat16"),
        head_sizes=(RANK + ROPE, RANK + ROPE, 1),
        block_sizes=(PAGE, PAGE, PAGE),
        min_capability=(9, 0),
        preferred_block_size=PAGE,
    )

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        import torch

        on_gpu = device.type == "cuda"
        reasons = self.why_not(
            spec, Platform(device.type, torch.cuda.get_device_capability(device) if on_gpu else None)
        )
        available = self.availability()
        if not available.usable:
            reasons.insert(0, Reason(available.reason))
        if reasons:
            raise BackendError("attention_backend='FLASHMLA'", "; ".join(map(str, reasons)))
        import flash_mla

        self._library = flash_mla
        # Under a graph lengths and schedule stay where they were captured, one set for each shape.
        self._graphs: dict[tuple[int, int], _Plan] = {}

    @classmethod
    def availability(cls) -> Availability:
        """Whether the library loads with its kernels for sm_90. Without a GPU it is found but not imported."""
        return _availability()

    @classmethod
    def extra_reasons(
        cls, spec: AttentionSpec, platform: Platform, available: Availability | None = None
    ) -> list[Reason]:
        out: list[Reason] = []
        if platform.capability is not None and platform.capability[0] > 9:
            out.append(Reason(f"its dense decode kernel is for sm_90 only, this GPU is {platform.sm}"))
        if spec.family == "MLA" and spec.head_size == RANK + ROPE and spec.head_size_v != RANK:
            out.append(Reason(f"a latent of {spec.head_size_v} is not supported", f"it takes {RANK} + {ROPE}"))
        return out

    @classmethod
    def graph_support(
        cls, spec: AttentionSpec, platform: Platform, available: Availability | None = None
    ) -> tuple[AttentionCGSupport, str]:
        return AttentionCGSupport.UNIFORM_BATCH, (
            "a graph holds a rectangle of queries, equal numbers for every request; its schedule is made anew before "
            "each replay, in the place where the graph reads it"
        )

    # --- planning --------------------------------------------------------------------------------------------------

    def prepare(self, metadata: AttentionMetadata) -> None:
        metadata.scratch["flashmla"] = self._plan(metadata)

    def _plan(self, metadata: AttentionMetadata) -> _Plan | None:
        import torch

        if metadata.num_tokens == 0 or metadata.num_reqs == 0:
            return None
        # Buffers that outlive a step may be written inside inference mode and outside it only if made outside.
        with torch.inference_mode(False), torch.no_grad():
            if metadata.for_graph:
                return self._plan_for_graph(metadata)
            rows, queries = metadata.num_reqs, metadata.max_query_len
            lens, table, hidden = metadata.seq_lens[:rows], metadata.block_table[:rows], self._hidden(metadata)
            if not is_rectangle(metadata):
                lens, table = one_by_one(metadata)
                rows, queries = int(lens.shape[0]), 1
            lens = lens.clamp(min=1)
            return _Plan(rows, queries, lens, table, self._schedule(lens, queries), hidden)

    def _plan_for_graph(self, metadata: AttentionMetadata) -> _Plan:
        rows, queries = metadata.num_reqs, metadata.num_tokens // metadata.num_reqs
        lens = metadata.seq_lens[:rows].clamp(min=1)
        schedule = self._schedule(lens, queries)
        kept = self._graphs.get((rows, queries))
        if kept is None:
            kept = self._graphs[rows, queries] = _Plan(rows, queries, lens, metadata.block_table[:rows], schedule)
        else:
            kept.lens.copy_(lens)
            for old, new in zip(kept.schedule, schedule, strict=True):
                old.copy_(new)
        return kept

    def _schedule(self, lens: torch.Tensor, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._library.get_mla_decoding_metadata(
            lens, queries * self.spec.num_heads, 1, self.spec.num_heads, use_legacy=True
        )

    def _hidden(self, metadata: AttentionMetadata) -> torch.Tensor | None:
        """Rows of tokens that see no key; no engine makes such a step."""
        import numpy as np
        import torch

        starts, reqs = metadata.query_start_loc_cpu, metadata.num_reqs
        beyond = starts[1 : reqs + 1] - starts[:reqs] - metadata.seq_lens_cpu[:reqs]
        if beyond.max() <= 0:
            return None
        ends = np.minimum(starts[:reqs] + np.maximum(beyond, 0), starts[1 : reqs + 1])
        rows = [np.arange(start, end) for start, end in zip(starts[:reqs], ends, strict=True)]
        return torch.from_numpy(np.concatenate(rows).astype(np.int64)).to(self.device)

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
        if "flashmla" not in metadata.scratch:
            self.prepare(metadata)
        plan: _Plan | None = metadata.scratch["flashmla"]
        if plan is None:
            return
        if sliding_window is not None or logits_soft_cap is not None or sinks is not None:
            raise BackendError("FLASHMLA", "it has no window, soft-cap or sinks; the selector refuses them")
        found, found_lse = self._call(plan, query, key_cache, scale)
        tokens = plan.rows * plan.queries
        output[:tokens].copy_(found.flatten(0, 1))
        if lse is not None:
            lse[:tokens].copy_(found_lse.transpose(1, 2).flatten(0, 1))
        if plan.hidden is not None:
            output.index_fill_(0, plan.hidden, 0)
            if lse is not None:
                lse.index_fill_(0, plan.hidden, float("-inf"))

    def _call(self, plan: _Plan, query: torch.Tensor, cache: torch.Tensor, scale: float) -> tuple[Any, Any]:
        held = self._library.get_mla_metadata()[0]
        held.tile_scheduler_metadata, held.num_splits = plan.schedule
        tokens = plan.rows * plan.queries
        return self._library.flash_mla_with_kvcache(
            query[:tokens].view(plan.rows, plan.queries, *query.shape[1:]), cache, plan.table, plan.lens, RANK, held,
            softmax_scale=scale, causal=plan.queries > 1, use_legacy=True,
        )  # fmt: skip

    def bare_call(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        output: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> Callable[[], Any] | None:
        plan = self._plan(dataclasses.replace(metadata, for_graph=False))
        return None if plan is None else functools.partial(self._call, plan, query, key_cache, scale)

    def describe(self, metadata: AttentionMetadata) -> Sequence[KernelPlan]:
        plan: _Plan | None = metadata.scratch.get("flashmla")
        shape = "" if plan is None else f"{plan.rows} requests of {plan.queries} queries; "
        kernel = KernelPlan("flash_fwd_splitkv_mla_kernel", note=f"{shape}scheduled before the step")
        return [kernel, KernelPlan("flash_fwd_mla_combine_kernel", note="merges the splits by their log-sum-exp")]


def is_rectangle(metadata: AttentionMetadata) -> bool:
    """Whether every request brings the same number of tokens."""
    starts, queries = metadata.query_start_loc_cpu[: metadata.num_reqs + 1], metadata.max_query_len
    return metadata.num_tokens == metadata.num_reqs * queries and bool((starts[1:] - starts[:-1] == queries).all())


def one_by_one(metadata: AttentionMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    """Every token as a request: int32 lengths `[tokens]` of what each sees, which may be ≤ 0, and block table rows."""
    import numpy as np
    import torch

    reqs, starts = metadata.num_reqs, metadata.query_start_loc_cpu[: metadata.num_reqs + 1]
    queries = starts[1:] - starts[:-1]
    request = np.repeat(np.arange(reqs), queries)
    # Bottom-right: the last token of a request sees all of its keys, the one before one less.
    behind = starts[1:][request] - 1 - np.arange(len(request))
    seen = (metadata.seq_lens_cpu[:reqs][request] - behind).astype(np.int32)
    device = metadata.block_table.device
    rows = torch.from_numpy(request.astype(np.int64)).to(device)
    return torch.from_numpy(seen).to(device), metadata.block_table.index_select(0, rows)


@functools.cache
def _availability() -> Availability:
    if importlib.util.find_spec("flash_mla") is None:
        return Availability(False, f"ModuleNotFoundError: No module named 'flash_mla'; {INSTALL}")
    try:
        import torch

        if not torch.cuda.is_available():
            return Availability(True, "", _installed_version())
        import flash_mla

        if not callable(getattr(flash_mla, "get_mla_decoding_metadata", None)):
            why = "its flash_mla has no get_mla_decoding_metadata, which sgl-flash-mla 1.0.0 has"
            return Availability(False, f"{why}; {INSTALL}", _installed_version())
        if not flash_mla.has_legacy():
            return Availability(False, "this build of flash_mla has no kernels for sm_90", _installed_version())
        return Availability(True, "", _installed_version())
    except Exception as error:  # whatever a broken install raises is the answer to the question
        return Availability(False, f"{type(error).__name__}: {error}", _installed_version())


def _installed_version() -> str | None:
    try:
        return importlib.metadata.version("sgl-flash-mla")
    except importlib.metadata.PackageNotFoundError:
        return None
