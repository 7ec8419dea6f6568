"""The paged KV cache: its tensors, of K and V or of latents, and how many blocks fit. Refuses to know who owns them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from labkit.config import ModelConfig
from labkit.errors import CaptureError, ConfigError

#: On a CPU there is no device memory to take a share of: the cache gets this many bytes at most.
CPU_KV_BYTES = 1 << 30


@dataclasses.dataclass
class KVCache:
    """K and V of all layers: per layer `[num_blocks, block_size, num_kv_heads, head_size]`.

    Of a model with multi-head latent attention a layer has one tensor, `[num_blocks, block_size, rank + rope]`. Its key
    cache is that tensor with an axis for its one head, its value cache a view of the first `latent_rank` columns.

    The axes are always in this order. Under the layout HND the memory holds a page's tokens of one head together, so
    the caches are strided views; every kernel goes by strides.

    Block 0 is the null block: padded table entries point to it and nothing is ever written there. The memory starts at
    zero, because kernels may read (and mask) the unused tail of a page.

    While `locked` (a graph reads it) it cannot be made to point elsewhere.
    """

    data: torch.Tensor  # [num_layers, 2, num_blocks, block_size, num_kv_heads, head_size], or without 2 and heads
    locked: bool = False
    latent_rank: int = 0  # 0: K and V

    def __post_init__(self) -> None:
        if self.latent_rank:
            self.key_caches = [layer.unsqueeze(2) for layer in self.data]
            self.value_caches = [keys[..., : self.latent_rank] for keys in self.key_caches]
            return
        self.key_caches = [layer[0] for layer in self.data]
        self.value_caches = [layer[1] for layer in self.data]

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "locked" and self.__dict__.get("locked"):
            raise CaptureError(
                "another KV cache in the place of this one",
                "captured graphs read it at its address",
                "Change its size with LLM.reconfigure, which captures again.",
            )
        super().__setattr__(name, value)

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        layout: str = "NHD",
    ) -> KVCache:
        inner = (block_size, config.num_kv_heads) if layout == "NHD" else (config.num_kv_heads, block_size)
        shape: tuple[int, ...] = (config.num_layers, 2, num_blocks, *inner, config.head_size)
        if config.uses_mla:
            shape = (config.num_layers, num_blocks, block_size, config.kv_lora_rank + config.qk_rope_head_dim)
        try:
            data = torch.zeros(shape, dtype=dtype, device=device)
            if config.uses_mla:
                return cls(data, latent_rank=config.kv_lora_rank)
            return cls(data if layout == "NHD" else data.transpose(3, 4))
        except RuntimeError as error:  # out of memory, on a CPU or a GPU
            needed = math.prod(shape) * dtype.itemsize / 2**30
            raise ConfigError(
                f"a KV cache of {num_blocks} blocks",
                f"it takes {needed:.1f} GiB, which {device.type} does not have free",
                "Lower num_gpu_blocks_override or gpu_memory_utilization.",
            ) from error

    @property
    def num_blocks(self) -> int:
        return self.key_caches[0].shape[0]

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def fill_random(self, block_ids: list[int], seed: int) -> None:
        """Prime blocks with seeded finite values, normally distributed, to measure a context without a prefill."""
        generator = torch.Generator(device=self.data.device).manual_seed(seed)
        index = torch.tensor(block_ids, dtype=torch.int64, device=self.data.device)
        for layer in self.data:
            for cache in layer[None] if self.latent_rank else layer:
                values = torch.randn(
                    (len(block_ids), *cache.shape[1:]), generator=generator, device=cache.device, dtype=torch.float32
                )
                cache.index_copy_(0, index, values.to(cache.dtype))


def num_blocks_that_fit(free_bytes: int, block_bytes: int, max_useful: int, asked: str) -> int:
    """Blocks for `free_bytes`, at least 2 (the null block and one more), at most `max_useful`.

    Raises:
        ConfigError: not even two blocks fit; `asked` names the setting that limits them.
    """
    blocks = free_bytes // block_bytes
    if blocks < 2:
        raise ConfigError(
            asked,
            f"leaves {max(0, free_bytes) / 2**20:.0f} MiB for KV; one block takes {block_bytes / 2**20:.2f} MiB",
            "Raise gpu_memory_utilization, lower max_num_batched_tokens, or take a smaller model.",
        )
    return min(blocks, max_useful)
