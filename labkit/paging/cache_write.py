"""Writing a step's K and V into the paged cache at its slots. Refuses to know requests and attention.

Slot −1 is padding and is written by nobody, on every path: −1 is a valid index in Python and would hit a live page.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from labkit.launch import kernel, next_power_of_2

if TYPE_CHECKING:
    import torch

tl: Any = None  # `triton.language` once a kernel has been launched


@kernel(tensors="key_ptr value_ptr key_cache_ptr value_cache_ptr slots_ptr")
def write_kv_kernel(
    key_ptr, value_ptr, key_cache_ptr, value_cache_ptr, slots_ptr,
    K_STRIDE_TOKEN: tl.constexpr, K_STRIDE_HEAD: tl.constexpr,
    V_STRIDE_TOKEN: tl.constexpr, V_STRIDE_HEAD: tl.constexpr,
    KC_STRIDE_PAGE: tl.constexpr, KC_STRIDE_TOKEN: tl.constexpr, KC_STRIDE_HEAD: tl.constexpr,
    VC_STRIDE_PAGE: tl.constexpr, VC_STRIDE_TOKEN: tl.constexpr, VC_STRIDE_HEAD: tl.constexpr,
    PAGE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    HEADS_PADDED: tl.constexpr, HEAD_PADDED: tl.constexpr,
):  # fmt: skip
    """One token: all its KV heads, K and V. Grid: num_tokens."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    page = slot // PAGE
    offset = slot % PAGE
    h = tl.arange(0, HEADS_PADDED)[:, None]
    d = tl.arange(0, HEAD_PADDED)[None, :]
    mask = (h < NUM_KV_HEADS) & (d < HEAD_SIZE)
    k = tl.load(key_ptr + token * K_STRIDE_TOKEN + h * K_STRIDE_HEAD + d, mask=mask)
    v = tl.load(value_ptr + token * V_STRIDE_TOKEN + h * V_STRIDE_HEAD + d, mask=mask)
    k_at = page * KC_STRIDE_PAGE + offset * KC_STRIDE_TOKEN
    v_at = page * VC_STRIDE_PAGE + offset * VC_STRIDE_TOKEN
    tl.store(key_cache_ptr + k_at + h * KC_STRIDE_HEAD + d, k, mask=mask)
    tl.store(value_cache_ptr + v_at + h * VC_STRIDE_HEAD + d, v, mask=mask)


_variants: dict[tuple[Any, ...], Any] = {}
_HAVE_TRITON = importlib.util.find_spec("triton") is not None


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write `key` and `value` at `slot_mapping`; on a GPU one launch, no synchronisation, capturable.

    Args:
        key, value: `[num_tokens, num_kv_heads, head_size]`; may be views of a fused projection.
        key_cache, value_cache: `[num_blocks, block_size, num_kv_heads, head_size]`; may be views of one tensor.
        slot_mapping: int64 `[num_tokens]`, block · block_size + offset, or −1 for "do not write".
    """
    if key.is_cuda and _HAVE_TRITON:
        write_kv_triton(key, value, key_cache, value_cache, slot_mapping)
    else:
        write_kv_torch(key, value, key_cache, value_cache, slot_mapping)


def write_kv_triton(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`write_kv` by the Triton kernel, wherever Triton runs."""
    num_tokens = slot_mapping.shape[0]
    if num_tokens == 0:
        return
    form = (
        key.dtype, key_cache.dtype, key.shape[1:], key.stride(), value.stride(), key_cache.stride(),
        value_cache.stride(), key_cache.shape[1],
    )  # fmt: skip
    variant = _variants.get(form)
    if variant is None:
        for name, x in (("key", key), ("value", value), ("key_cache", key_cache), ("value_cache", value_cache)):
            if x.stride(-1) != 1:
                raise ValueError(f"the last dimension of {name} is not contiguous (stride {x.stride(-1)})")
        heads, size = key.shape[1:]
        padded = next_power_of_2(heads) * next_power_of_2(size)
        variant = _variants[form] = write_kv_kernel.variant(
            (key.dtype, key_cache.dtype),
            (
                *key.stride()[:2], *value.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3],
                key_cache.shape[1], heads, size, next_power_of_2(heads), next_power_of_2(size),
            ),
            min(8, max(1, padded // 256)), 1,
        )  # fmt: skip
    variant((num_tokens, 1, 1), (key, value, key_cache, value_cache, slot_mapping))


def write_kv_torch(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`write_kv` in plain torch.

    On a GPU without Triton a boolean mask would synchronise, so padding rewrites slot 0 with what is there: it belongs
    to the null block, which nothing else writes.
    """
    block_size = key_cache.shape[1]
    if not key.is_cuda:
        real = slot_mapping >= 0
        if not bool(real.all()):
            key, value, slot_mapping = key[real], value[real], slot_mapping[real]
        page, offset = slot_mapping // block_size, slot_mapping % block_size
        key_cache[page, offset] = key.to(key_cache.dtype)
        value_cache[page, offset] = value.to(value_cache.dtype)
        return
    real = (slot_mapping >= 0)[:, None, None]
    slots = slot_mapping.clamp(min=0)
    page, offset = slots // block_size, slots % block_size
    key_cache[page, offset] = key.to(key_cache.dtype).where(real, key_cache[page, offset])
    value_cache[page, offset] = value.to(value_cache.dtype).where(real, value_cache[page, offset])
