"""Who can be asked for attention on this machine, and one call of each on given tensors. Refuses to time anything.

Two are this chapter's own (all scores stored; tile by tile), some are torch's own call with one inner kernel each. The
others are the engine's backends, called as the engine calls them: over a paged cache, with metadata of one prompt.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from labkit.errors import BackendError
from labkit.lab.ch03 import attention

if TYPE_CHECKING:
    import torch

    from labkit.attention.interface import AttentionSpec, Availability, Platform

NAIVE, TILED = "naive", "tiled"
#: Why three backends are not offered on a CPU.
GPU_ONLY = (
    "FLASH_ATTN and FLASHINFER need a GPU. TRITON_ATTN would run in Triton's interpreter here: its programs one after "
    "another in Python, minutes at these lengths, and wrong in bfloat16. FLEX_ATTENTION would store all scores."
)


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way of computing attention.

    key: of the control. backend: a name of the engine's, "" for the others. kernel: of torch's own call. version: of
    FLASH_ATTN's kernels.
    """

    key: str
    label: str
    backend: str = ""
    kernel: str = ""
    version: int | None = None


OWN = (
    Contender(NAIVE, "naive: all scores stored"),
    Contender(TILED, "tiled: online softmax"),
)
SDPA = tuple(
    Contender(f"SDPA {kernel}", f"torch's SDPA, kernel {kernel}", kernel=kernel)
    for kernel in ("math", "efficient", "flash", "cudnn")
)
ENGINE = (
    Contender("TORCH_SDPA", "TORCH_SDPA (engine)", "TORCH_SDPA"),
    Contender("TRITON_ATTN", "TRITON_ATTN (engine)", "TRITON_ATTN"),
    *(Contender(f"FLASH_ATTN {n}", f"FLASH_ATTN, FA{n} (engine)", "FLASH_ATTN", version=n) for n in (2, 3, 4)),
    Contender("FLASHINFER", "FLASHINFER (engine)", "FLASHINFER"),
    Contender("FLEX_ATTENTION", "FLEX_ATTENTION (engine)", "FLEX_ATTENTION"),
)
ALL = (*OWN, *SDPA, *ENGINE)


def find(key: str) -> Contender:
    return next(one for one in ALL if one.key == key)


def offered(
    dtype: str, platform: Platform, available: Mapping[str, Availability]
) -> tuple[list[Contender], dict[str, str]]:
    """Those that serve heads of 64 in `dtype` here, and for each of the others why not, in a few words."""
    found, refused = list(OWN), {}
    for one in SDPA:
        why = _refusal(one, dtype, "cpu" if platform.device_type == "cpu" else "cuda")
        if why:
            refused[one.label] = why
        else:
            found.append(one)
    for one in ENGINE:
        if platform.device_type == "cpu" and one.backend != "TORCH_SDPA":
            continue
        try:
            page_size(one, spec_of(one, 8, 64, dtype, 256), platform, available)
            found.append(one)
        except BackendError as error:
            refused[one.label] = error.why.partition(";")[0]
    return found, refused


def _refusal(one: Contender, dtype: str, device: str) -> str:
    """Why torch's kernel does not take such tensors; "" when it does. Asked with a few tokens."""
    import torch

    q = torch.zeros(1, 16, 64, dtype=getattr(torch, dtype), device=device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about each kernel that it passes over
            call(one, q, q, q)()
    except RuntimeError as error:
        return str(error).splitlines()[0].rstrip(".")
    return ""


def spec_of(one: Contender, heads: int, head_size: int, dtype: str, length: int) -> AttentionSpec:
    from labkit.attention.interface import AttentionSpec

    return AttentionSpec(
        heads, heads, head_size, dtype, 16, max_model_len=length, max_num_seqs=1, max_num_batched_tokens=length,
        flash_attn_version=one.version,
    )  # fmt: skip


def page_size(one: Contender, spec: AttentionSpec, platform: Platform, available: Mapping[str, Availability]) -> int:
    """The page size that a backend takes for a spec.

    Raises:
        BackendError: it cannot serve; with every reason.
    """
    from labkit.attention.selector import select

    selection = select(spec, platform, one.backend, available, block_size_is_set=False)
    return int(selection.candidate(selection.selected).block_size)


def call(one: Contender, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that computes attention of one prompt anew each time, as `[heads, tokens, head_size]`.

    Raises:
        BackendError: the backend cannot serve these tensors.
    """
    if one.key == NAIVE:
        return lambda: attention.naive(q, k, v)
    if one.key == TILED:
        return lambda: attention.tiled(q, k, v)
    if one.kernel:
        return _sdpa_call(one.kernel, q, k, v)
    return _backend_call(one, q, k, v)


def _sdpa_call(kernel: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
    import torch.nn.functional as functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = {
        "math": SDPBackend.MATH, "efficient": SDPBackend.EFFICIENT_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }  # fmt: skip

    def attend() -> torch.Tensor:
        with sdpa_kernel(kernels[kernel]):
            return functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]

    return attend


def _backend_call(one: Contender, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
    import numpy as np
    import torch

    from labkit.attention import registry
    from labkit.attention.metadata import AttentionMetadata
    from labkit.attention.split_mixed import make_backend
    from labkit.llm import find_backends, find_device

    heads, length, size = q.shape
    device, platform = find_device(q.device.type)
    spec = spec_of(one, heads, size, str(q.dtype).removeprefix("torch."), length)
    page = page_size(one, spec, platform, find_backends(platform, one.backend))
    backend = make_backend(registry.load(one.backend), dataclasses.replace(spec, block_size=page), device)
    backend.warm_up(None)
    pages = -(-length // page)
    cache = torch.zeros(2, pages + 1, page, heads, size, dtype=q.dtype, device=device)  # page 0 belongs to nobody
    for held, given in zip(cache, (k, v), strict=True):
        held[1:].view(-1, heads, size)[:length] = given.transpose(0, 1)
    starts, lens = np.array([0, length], np.int32), np.array([length], np.int32)

    def put(values: Any, dtype: Any = torch.int32) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype, device=device)

    metadata = AttentionMetadata(
        num_reqs=1, num_tokens=length, num_actual_reqs=1, num_actual_tokens=length, max_query_len=length,
        max_seq_len=length, query_start_loc=put(starts), seq_lens=put(lens),
        block_table=put(np.arange(1, pages + 1))[None], slot_mapping=put(np.arange(page, page + length), torch.int64),
        query_start_loc_cpu=starts, seq_lens_cpu=lens,
    )  # fmt: skip
    query = q.transpose(0, 1).contiguous()
    backend.prepare(metadata)

    def attend() -> torch.Tensor:
        out = torch.empty_like(query)
        backend.forward(query, cache[0], cache[1], out, metadata, scale=size**-0.5)
        return out.transpose(0, 1)

    return attend
