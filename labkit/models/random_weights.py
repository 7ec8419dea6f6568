"""Random weights of a shape, the same to the bit on every device. Refuses to know files.

One block of normal numbers is drawn from the seed with numpy; a weight takes as many consecutive numbers as it needs
from a place in the block given by its name, starting over at the block's end. A GPU gets the block once and copies in
its own memory: eight billion weights take seconds and equal those of a CPU.
"""

from __future__ import annotations

import functools
import zlib

import numpy as np
import torch

from labkit.models.decoder import Decoder

#: Numbers in the block. A prime: no width divides it, so that rows of a matrix do not repeat where the block does.
BLOCK = 4_194_301


def fill_random(decoder: Decoder, seed: int) -> None:
    """Fill every weight of `decoder` as a function of (seed, weight's name, dtype).

    A matrix has the standard deviation 1/√columns, which keeps activations and attention scores of size 1, so
    that what attention reads matters to the logits; what a norm multiplies by is 1 ± 0.1, biases and sinks are 0 ± 0.1.
    """
    block = torch.from_numpy(_numbers(seed, BLOCK)).to(decoder.device)
    scaled: dict[float, torch.Tensor] = {}
    for name, weight in decoder.checkpoint_views().items():
        scale = weight.shape[1] ** -0.5 if weight.dim() >= 2 else 0.1
        if scale not in scaled:
            scaled[scale] = (block * scale).to(decoder.dtype)
        flat = (weight if weight.is_contiguous() else weight.transpose(-1, -2)).view(-1)
        _copy_wrapped(flat, scaled[scale], zlib.crc32(name.encode()) % BLOCK)
        if name.endswith("norm.weight") and not decoder.config.norm_plus_one:
            weight.add_(1.0)


@functools.lru_cache(maxsize=2)
def _numbers(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count, dtype=np.float32)


def _copy_wrapped(target: torch.Tensor, block: torch.Tensor, start: int) -> None:
    done = 0
    while done < target.numel():
        count = min(target.numel() - done, len(block) - start)
        target[done : done + count].copy_(block[start : start + count])
        done, start = done + count, 0
