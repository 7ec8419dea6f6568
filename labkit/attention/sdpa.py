"""TORCH_SDPA: torch's own scaled_dot_product_attention over gathered pages. Works anywhere; refuses to be fast.

Two paths. *Gathered*: every request brings one token, so all pages are gathered into one dense `[requests, keys]`
batch and masked; shapes depend on host ints only, so it can be captured. *Per request*: a loop with one call for each
request, for chunks and prefills; it reads lengths on the host and can never be captured. Both write the arithmetic out
where torch's operator lacks a part of it: soft-capping, and sinks.
"""

from __future__ import annotations

import contextlib
import dataclasses
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

if TYPE_CHECKING:
    import torch

    from labkit.attention.metadata import AttentionMetadata

GATHER_LIMIT = 1 << 30  # bytes
SCORES_LIMIT = 1 << 28  # bytes of fp32 scores at a time, where they are written out
_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


def gather_bytes(spec: AttentionSpec) -> int:
    """Bytes that the gathered K and V of one layer take for the widest batch at the longest context."""
    blocks = math.ceil(spec.max_model_len / spec.block_size)
    return 2 * spec.max_num_seqs * blocks * spec.block_size * spec.num_kv_heads * spec.head_size * _ITEMSIZE[spec.dtype]


@dataclasses.dataclass(frozen=True)
class Scores:
    """How q·k becomes a score: times `scale`, soft-capped, kept within `window` keys (0: all); sinks `[num_heads]`."""

    scale: float
    window: int = 0
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None


class TorchSDPABackend(AttentionBackend):
    """The fallback. `sdpa_kernel` picks torch's inner kernel: auto, math, efficient, flash or cudnn."""

    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        name="TORCH_SDPA",
        dtypes=("float32", "float16", "bfloat16"),
        head_sizes=(1, 1024, 1),
        block_sizes=(1, 4096, 1),
        device_types=("cuda", "rocm", "cpu"),
        kv_layouts=("NHD", "HND"),
        sliding_window=True,
        logits_soft_cap=True,
        sinks=True,
    )

    @classmethod
    def availability(cls) -> Availability:
        try:
            import torch
        except Exception as error:  # an import may fail in any way; the reader gets the real one
            return Availability(False, f"{type(error).__name__}: {error}")
        return Availability(True, version=torch.__version__)

    @classmethod
    def extra_reasons(
        cls, spec: AttentionSpec, platform: Platform, available: Availability | None = None
    ) -> list[Reason]:
        kernel, out = spec.sdpa_kernel, []
        if kernel != "auto" and (spec.logits_soft_cap is not None or spec.has_sinks):
            what = "soft-capping" if spec.logits_soft_cap is not None else "sinks"
            out.append(Reason(f"none of torch's kernels has {what}", "set sdpa_kernel to auto"))
        if kernel in ("efficient", "cudnn") and platform.device_type == "cpu":
            out.append(Reason(f"sdpa_kernel={kernel!r} exists on CUDA only", "set sdpa_kernel to auto, math or flash"))
        if kernel in ("flash", "cudnn") and platform.device_type == "cuda":
            if spec.dtype == "float32":
                out.append(Reason(f"sdpa_kernel={kernel!r} has no float32 kernel", "set dtype to float16 or bfloat16"))
            if platform.capability and platform.capability < (8, 0):
                out.append(
                    Reason(f"sdpa_kernel={kernel!r} needs sm_80 or newer", "set sdpa_kernel to auto, math or efficient")
                )
        if kernel == "flash" and spec.sliding_window is not None:
            out.append(Reason("torch's flash kernel takes no mask, so no window", "set sdpa_kernel to auto"))
        return out

    @classmethod
    def graph_support(
        cls, spec: AttentionSpec, platform: Platform, available: Availability | None = None
    ) -> tuple[AttentionCGSupport, str]:
        if spec.sdpa_kernel == "flash":
            return (
                AttentionCGSupport.NEVER,
                "torch's flash kernel takes no mask, so requests run one by one with lengths from the host",
            )
        need = gather_bytes(spec)
        if need > GATHER_LIMIT:
            return AttentionCGSupport.NEVER, (
                f"a graph would gather max_num_seqs={spec.max_num_seqs} × max_model_len={spec.max_model_len} tokens, "
                f"{need / 2**30:.1f} GiB a layer, above the limit of 1 GiB; lower one of the two"
            )
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, (
            f"decodes are gathered over max_model_len ({need / 2**20:.0f} MiB at most); chunks run one by one"
        )

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
        scores = Scores(scale, sliding_window or 0, logits_soft_cap, sinks)
        run = self._gathered if self._gathers(metadata) else self._per_request
        run(query, key_cache, value_cache, output, metadata, scores, lse)

    def _gathers(self, metadata: AttentionMetadata) -> bool:
        return (
            metadata.max_query_len == 1
            and metadata.num_tokens == metadata.num_reqs
            and self.spec.sdpa_kernel != "flash"
        )

    def _gathered(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        output: torch.Tensor,
        metadata: AttentionMetadata,
        scores: Scores,
        lse: torch.Tensor | None,
    ) -> None:
        import torch

        rows, (block_size, kv_heads) = metadata.num_reqs, key_cache.shape[1:3]
        blocks = max(1, math.ceil(metadata.max_seq_len / block_size))
        table = metadata.block_table[:rows, :blocks]
        lens = metadata.seq_lens[:rows]
        position = torch.arange(blocks * block_size, device=query.device, dtype=lens.dtype)
        visible = position < lens[:, None]
        if scores.window:
            visible &= position >= lens[:, None] - scores.window
        # What lies beyond a request's length is whatever the page held before, NaN included, and 0 · NaN is NaN.
        hidden = ~visible[:, :, None, None]
        # Pages of HND leave the gather as they lie in memory; flattening copies them once more.
        keys = key_cache[table].flatten(1, 2).masked_fill_(hidden, 0)
        values = value_cache[table].flatten(1, 2).masked_fill_(hidden, 0)
        # The query heads of a group become rows of one query, so no key is copied per head.
        grouped = query[:rows].unflatten(1, (kv_heads, -1))
        sinks = None if scores.sinks is None else scores.sinks.view(kv_heads, -1, 1)
        mask, want_lse = visible[:, None, None, :], lse is not None
        attended, exact = self._attend(
            grouped, keys.transpose(1, 2), values.transpose(1, 2), mask, scores, sinks, want_lse
        )
        empty = (lens <= 0)[:, None, None]
        output[:rows].copy_(attended.flatten(1, 2).masked_fill(empty, 0))
        if lse is not None and exact is not None:
            lse[:rows].copy_(exact.masked_fill(empty, -math.inf).flatten(1))

    def _per_request(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        output: torch.Tensor,
        metadata: AttentionMetadata,
        scores: Scores,
        lse: torch.Tensor | None,
    ) -> None:
        block_size = key_cache.shape[1]
        starts, lens = metadata.query_start_loc_cpu, metadata.seq_lens_cpu
        for row in range(metadata.num_reqs):
            first, last, length = int(starts[row]), int(starts[row + 1]), int(lens[row])
            queries = last - first
            if queries == 0:
                continue
            if length == 0:
                output[first:last].zero_()
                if lse is not None:
                    lse[first:last].fill_(-math.inf)
                continue
            pages = metadata.block_table[row, : math.ceil(length / block_size)]
            keys = key_cache[pages].flatten(0, 1)[:length].transpose(0, 1)[None]
            values = value_cache[pages].flatten(0, 1)[:length].transpose(0, 1)[None]
            q = query[first:last]
            blind = max(0, queries - length)  # leading rows that see no key at all
            attended, exact = self._one_request(q, keys, values, scores, lse is not None)
            output[first:last].copy_(attended)
            output[first : first + blind].zero_()
            if lse is not None and exact is not None:
                lse[first:last].copy_(exact)
                lse[first : first + blind].fill_(-math.inf)

    def _one_request(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: Scores, want_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One request: queries `[n, heads, size]` over keys `[1, kv_heads, length, size]`; LSE where it is wanted."""
        import torch

        (queries, heads, head_size), (kv_heads, length) = q.shape, keys.shape[1:3]
        if self.spec.sdpa_kernel == "flash" and not want_lse:
            return self._flash(q, keys, values, scores.scale), None
        # Bottom-right: query i of n sees the first length - n + i + 1 keys.
        last_seen = torch.arange(length - queries, length, device=q.device)[:, None]
        position = torch.arange(length, device=q.device)
        mask = position <= last_seen
        if scores.window:
            mask &= position > last_seen - scores.window
        group = heads // kv_heads
        grouped = q.unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, head_size)
        sinks = scores.sinks
        if sinks is not None:
            sinks = sinks.view(kv_heads, group).repeat_interleave(queries, 1)[..., None]
        flat, lse = self._attend(grouped, keys, values, mask.repeat(group, 1), scores, sinks, want_lse)
        attended = flat.view(kv_heads, group, queries, head_size).permute(2, 0, 1, 3).flatten(1, 2)
        return attended, None if lse is None else lse.view(kv_heads, group, queries).permute(2, 0, 1).flatten(1)

    def _attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        scores: Scores,
        sinks: torch.Tensor | None,
        want_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Masked attention of `[…, kv_heads, rows, size]`, and fp32 LSE `[…, kv_heads, rows]` where it is wanted.

        sinks: `[kv_heads, rows, 1]`, one logit for each row.
        """
        if not want_lse and scores.soft_cap is None and sinks is None:
            return self._sdpa(query, keys, values, mask, scores.scale), None
        parts = [
            _explicit(query[..., part, :], keys, values, mask[..., part, :] if mask.shape[-2] > 1 else mask,
                      scores, None if sinks is None else sinks[..., part, :])
            for part in _slices(query.shape[-2], query.shape[:-2].numel() * keys.shape[-2])
        ]  # fmt: skip
        outputs, lses = zip(*parts, strict=True)
        return (outputs[0], lses[0]) if len(parts) == 1 else (_joined(outputs, -2), _joined(lses, -1))

    def _sdpa(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
    ) -> torch.Tensor:
        import torch.nn.functional as functional

        with self._inner_kernel(query.shape[-1]):
            return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)

    def _flash(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        import torch.nn.functional as functional
        from torch.nn.attention.bias import causal_lower_right

        group = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        q, n, length = query.transpose(0, 1)[None], query.shape[0], keys.shape[2]
        blind = max(0, n - length)  # torch's kernels want no empty rows
        q = q[:, :, blind:]
        bias = causal_lower_right(n - blind, length) if n - blind > 1 else None
        with self._inner_kernel(query.shape[-1]):
            seen = functional.scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=scale)
        out = query.new_zeros(query.shape)
        out[blind:] = seen[0].transpose(0, 1)
        return out

    def _inner_kernel(self, head_size: int) -> contextlib.AbstractContextManager[Any]:
        name = self.spec.sdpa_kernel
        if name == "auto":
            return contextlib.nullcontext()
        from torch.nn.attention import SDPBackend, sdpa_kernel

        kernels = {
            "math": SDPBackend.MATH,
            "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "flash": SDPBackend.FLASH_ATTENTION,
            "cudnn": SDPBackend.CUDNN_ATTENTION,
        }
        return sdpa_kernel(kernels[name])

    def describe(self, metadata: AttentionMetadata) -> Sequence[KernelPlan]:
        kernel = f"scaled_dot_product_attention ({self.spec.sdpa_kernel})"
        if self._gathers(metadata):
            return [
                KernelPlan(
                    kernel,
                    grid=(metadata.num_reqs,),
                    note=f"one call over pages gathered to {metadata.max_seq_len} keys",
                )
            ]
        return [KernelPlan(kernel, grid=(metadata.num_actual_reqs,), note="one call per request")]


def _explicit(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scores: Scores,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention as arithmetic, fp32 inside: what torch's operator computes, and soft-cap, sinks and LSE besides."""
    import torch

    logits = query.float() @ keys.float().transpose(-1, -2) * scores.scale
    if scores.soft_cap is not None:
        logits = scores.soft_cap * torch.tanh(logits / scores.soft_cap)
    logits = logits.masked_fill(~mask, -math.inf)
    top = logits.amax(-1, keepdim=True)
    if sinks is not None:  # one more score, which has no value
        top = torch.maximum(top, sinks.float())
    top = top.clamp_min(torch.finfo(top.dtype).min)  # of a row that sees nothing
    weights = (logits - top).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks.float() - top).exp()
    return (weights / total @ values.float()).to(query.dtype), (top + total.log())[..., 0]


def _slices(rows: int, scores_per_row: int) -> list[slice]:
    """Rows in parts whose scores take at most SCORES_LIMIT bytes, or one row."""
    step = max(1, SCORES_LIMIT // (4 * max(1, scores_per_row)))
    return [slice(begin, min(begin + step, rows)) for begin in range(0, max(rows, 1), step)]


def _joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    import torch

    return torch.cat(list(parts), dim)
