"""TORCH_SDPA: torch's own scaled_dot_product_attention over gathered pages. Works anywhere; refuses to be fast.

Two paths. *Gathered*: every request brings one token, so all pages are gathered into one dense `[requests, keys]`
batch and masked; shapes depend on host ints only, so it can be captured. *Per request*: a loop with one call for each
request, for chunks and prefills; it reads lengths on the host and can never be captured.
"""

from __future__ import annotations

import contextlib
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
_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


def gather_bytes(spec: AttentionSpec) -> int:
    """Bytes that the gathered K and V of one layer take for the widest batch at the longest context."""
    blocks = math.ceil(spec.max_model_len / spec.block_size)
    return 2 * spec.max_num_seqs * blocks * spec.block_size * spec.num_kv_heads * spec.head_size * _ITEMSIZE[spec.dtype]


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
        if logits_soft_cap is not None or sinks is not None:
            raise NotImplementedError("TORCH_SDPA declares neither soft-cap nor sinks; the selector refuses them")
        window = sliding_window or 0
        if self._gathers(metadata):
            self._gathered(query, key_cache, value_cache, output, metadata, scale, window, lse)
        else:
            self._per_request(query, key_cache, value_cache, output, metadata, scale, window, lse)

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
        scale: float,
        window: int,
        lse: torch.Tensor | None,
    ) -> None:
        import torch

        rows, (block_size, kv_heads) = metadata.num_reqs, key_cache.shape[1:3]
        blocks = max(1, math.ceil(metadata.max_seq_len / block_size))
        table = metadata.block_table[:rows, :blocks]
        lens = metadata.seq_lens[:rows]
        position = torch.arange(blocks * block_size, device=query.device, dtype=lens.dtype)
        visible = position < lens[:, None]
        if window:
            visible &= position >= lens[:, None] - window
        # What lies beyond a request's length is whatever the page held before, NaN included, and 0 · NaN is NaN.
        hidden = ~visible[:, :, None, None]
        # Pages of HND leave the gather as they lie in memory; flattening copies them once more.
        keys = key_cache[table].flatten(1, 2).masked_fill_(hidden, 0)
        values = value_cache[table].flatten(1, 2).masked_fill_(hidden, 0)
        # The query heads of a group become rows of one query, so no key is copied per head.
        grouped = query[:rows].unflatten(1, (kv_heads, -1))
        attended = self._sdpa(grouped, keys.transpose(1, 2), values.transpose(1, 2), visible[:, None, None, :], scale)
        empty = lens <= 0
        output[:rows].copy_(attended.flatten(1, 2).masked_fill(empty[:, None, None], 0))
        if lse is not None:
            scores = torch.einsum("rhgd,rkhd->rhgk", grouped.float(), keys.float()) * scale
            lse[:rows].copy_(scores.masked_fill(~visible[:, None, None, :], -math.inf).logsumexp(-1).flatten(1))

    def _per_request(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        output: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int,
        lse: torch.Tensor | None,
    ) -> None:
        import torch

        block_size, kv_heads, head_size = key_cache.shape[1:]
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
            if self.spec.sdpa_kernel == "flash":
                attended = self._flash(q, keys, values, scale)
            else:
                # Bottom-right: query i of n sees the first length - n + i + 1 keys.
                last_seen = torch.arange(length - queries, length, device=query.device)[:, None]
                position = torch.arange(length, device=query.device)
                mask = position <= last_seen
                if window:
                    mask &= position > last_seen - window
                group = q.shape[1] // kv_heads
                grouped = q.unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, head_size)
                tiled = mask.repeat(group, 1)
                flat = self._sdpa(grouped, keys, values, tiled, scale)
                attended = flat.view(kv_heads, group, queries, head_size).permute(2, 0, 1, 3).flatten(1, 2)
            blind = max(0, queries - length)  # leading rows that see no key at all
            output[first:last].copy_(attended)
            output[first : first + blind].zero_()
            if lse is not None:
                self._lse(q, keys, length, window, scale, lse[first:last])

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

    @staticmethod
    def _lse(q: torch.Tensor, keys: torch.Tensor, length: int, window: int, scale: float, out: torch.Tensor) -> None:
        import torch

        n, heads = q.shape[:2]
        grouped = q.float().unflatten(1, (keys.shape[1], -1))
        scores = torch.einsum("qhgd,hkd->qhgk", grouped, keys[0].float()) * scale
        last_seen = torch.arange(length - n, length, device=q.device)[:, None]
        position = torch.arange(length, device=q.device)
        seen = position <= last_seen
        if window:
            seen &= position > last_seen - window
        out.copy_(scores.masked_fill(~seen[:, None, None, :], -math.inf).logsumexp(-1).reshape(n, heads))

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
