"""XFORMERS: xFormers' memory-efficient attention with its paged bias. By explicit choice only; refuses to be captured.

xFormers describes a batch by an attention bias, `PagedBlockDiagonalCausalWithOffsetPaddedKeysMask`, which is made from
lists of lengths on the host and keeps the largest of them there. So it is made anew for each step and can never be in
a graph. Several of the library's operators take it; labkit takes the first of `OPERATORS` that says it can. Both are
FlashAttention, 3 as `flash_attn_3` or 2 as `flash_attn`, which xFormers calls but does not bring; its Triton operator
takes no mixed batch, and no operator of 0.0.35 has a paged bias with a window.

The operators allocate their result; it is copied into `output`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from labkit.errors import BackendError

if TYPE_CHECKING:
    import torch

    from labkit.attention.metadata import AttentionMetadata

#: Modules of xformers.ops.fmha whose `FwOp` is asked, in this order.
OPERATORS = ("flash3", "flash")


class XFormersBackend(AttentionBackend):
    """One call per layer for the mixed batch; the bias is made in `prepare`, from host lengths."""

    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        name="XFORMERS",
        dtypes=("float16", "bfloat16"),
        head_sizes=(32, 256, 8),
        # FlashAttention 2's paged kernel wants this; which operator serves is known only where the library loads.
        block_sizes=(256, 4096, 256),
        min_capability=(8, 0),
        preferred_block_size=256,
        explicit_only=True,
    )

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        import torch

        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        reasons = self.why_not(spec, Platform(device.type, capability))
        available = self.availability()
        if not available.usable:
            reasons.insert(0, Reason(available.reason, "install what it asks for"))
        if reasons:
            raise BackendError("attention_backend='XFORMERS'", "; ".join(map(str, reasons)))
        self.group = spec.num_heads // spec.num_kv_heads
        self.operator: Any = None

    @classmethod
    def availability(cls) -> Availability:
        """Whether it imports and an operator takes the paged bias; the reasons are the library's own."""
        try:
            from xformers import __version__ as version
            from xformers.ops import fmha

            refused = _why_no_operator(fmha)
        except Exception as error:  # an import may fail in any way; the reader gets the real one
            return Availability(False, f"{type(error).__name__}: {error}", _installed_version())
        return Availability(not refused, refused, version)

    @classmethod
    def graph_support(
        cls, spec: AttentionSpec, platform: Platform, available: Availability | None = None
    ) -> tuple[AttentionCGSupport, str]:
        return AttentionCGSupport.NEVER, "its attention bias is made from lengths on the host and keeps them there"

    def prepare(self, metadata: AttentionMetadata) -> None:
        if metadata.for_graph:
            raise BackendError("XFORMERS", "its attention bias cannot change under a graph", "Set cudagraph_mode=NONE.")
        from xformers.ops import fmha

        reqs = metadata.num_actual_reqs
        starts = metadata.query_start_loc_cpu[: reqs + 1].tolist()
        lengths = metadata.seq_lens_cpu[:reqs].tolist()
        # A request without tokens has no row, but the library takes the largest length of all of them.
        bias = None
        if metadata.num_actual_tokens:
            bias = fmha.attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
                q_seqlen=[end - begin for begin, end in zip(starts, starts[1:], strict=False)],
                kv_seqlen=lengths,
                block_tables=metadata.block_table[:reqs].contiguous(),
                page_size=self.spec.block_size,
                device=metadata.block_table.device,
            )
        metadata.scratch["xformers"] = bias, _blind_rows(starts, lengths)

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
        if sliding_window is not None or logits_soft_cap is not None or sinks is not None:
            raise BackendError(
                "XFORMERS", "has no window, soft-cap or sinks over pages", "The selector refuses such a model."
            )
        if "xformers" not in metadata.scratch:
            self.prepare(metadata)
        bias, blind = metadata.scratch["xformers"]
        if bias is None:
            return
        from xformers.ops import fmha

        rows = metadata.num_actual_tokens
        spec = self.spec
        q = query[None, :rows].unflatten(2, (spec.num_kv_heads, self.group))
        keys, values = (self._grouped(name, cache) for name, cache in (("key", key_cache), ("value", value_cache)))
        if self.operator is None:
            self.operator = _operator_for(
                fmha, fmha.Inputs(query=q, key=keys, value=values, attn_bias=bias, scale=scale)
            )
        if lse is None:
            attended = fmha.memory_efficient_attention_forward(q, keys, values, bias, scale=scale, op=self.operator)
        else:
            attended, logsumexp = fmha.memory_efficient_attention_forward_requires_grad(
                q, keys, values, bias, scale=scale, op=self.operator
            )
            # [1, kv_heads, group, tokens], natural logarithm.
            lse[:rows].copy_(logsumexp[0].flatten(0, 1).transpose(0, 1)[:rows])
        output[:rows].copy_(attended[0].flatten(1, 2))
        for first, last in blind:
            output[first:last].zero_()
            if lse is not None:
                lse[first:last].fill_(-math.inf)

    def _grouped(self, name: str, cache: torch.Tensor) -> torch.Tensor:
        """A cache as `[1, slots, kv_heads, group, head_size]`, without a copy; a group's heads have stride 0."""
        try:
            flat = cache.view(1, -1, *cache.shape[2:])
        except RuntimeError as error:
            raise BackendError(
                "XFORMERS", f"a {name} cache with strides {tuple(cache.stride())} is not one axis of slots"
            ) from error
        return flat.unsqueeze(3).expand(-1, -1, -1, self.group, -1)

    def describe(self, metadata: AttentionMetadata) -> Sequence[KernelPlan]:
        name = self.operator.NAME if self.operator is not None else "memory_efficient_attention_forward"
        return (KernelPlan(name, note="result copied into output; bias made on the host for every step"),)


def _blind_rows(starts: list[int], lengths: list[int]) -> list[tuple[int, int]]:
    """Token ranges that see no key: a request with more tokens than keys. The library leaves their LSE open."""
    found = []
    for begin, end, length in zip(starts, starts[1:], lengths, strict=False):
        if end - begin > length:
            found.append((begin, end - length))
    return found


def _operator_for(fmha: Any, inputs: Any) -> Any:
    """The first operator that takes these inputs.

    Raises:
        BackendError: none does; the reasons are the operators' own.
    """
    refused = []
    for module in OPERATORS:
        operator = getattr(fmha, module).FwOp
        reasons = operator.not_supported_reasons(inputs)
        if not reasons:
            return operator
        refused.append(f"{operator.NAME}: {', '.join(reasons)}")
    raise BackendError("attention_backend='XFORMERS'", "; ".join(refused))


def _why_no_operator(fmha: Any) -> str:
    """Empty where an operator takes a paged batch of one token here; else what the library says."""
    import torch
    from xformers import _cpp_lib

    failed = _cpp_lib._cpp_library_load_exception
    if failed is not None:
        return f"{type(failed).__name__}: {' '.join(str(failed).split())}"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bias = fmha.attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        q_seqlen=[1],
        kv_seqlen=[1],
        block_tables=torch.zeros((1, 1), dtype=torch.int32, device=device),
        page_size=256,
        device=device,
    )
    query = torch.zeros((1, 1, 1, 1, 64), dtype=torch.float16, device=device)
    cache = torch.zeros((1, 256, 1, 1, 64), dtype=torch.float16, device=device)
    try:
        _operator_for(fmha, fmha.Inputs(query=query, key=cache, value=cache, attn_bias=bias))
    except BackendError as error:
        return error.why
    return ""


def _installed_version() -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version("xformers")
    except importlib.metadata.PackageNotFoundError:
        return None
