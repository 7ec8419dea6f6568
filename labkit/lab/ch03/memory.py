"""How much memory attention needs beyond its inputs, by formula. Refuses to measure.

Stored scores grow with the square of the length. Tile by tile only a few numbers for each query remain: the output and
the statistics of its softmax. That is little, and it is not nothing: it grows with the length.
"""

from __future__ import annotations

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
#: Bytes of a running maximum and a running sum, both float32.
STATISTICS = 8


def output_bytes(length: int, heads: int, head_size: int, itemsize: int) -> int:
    """The result, which every way of computing it has to write: `[heads, length, head_size]`."""
    return heads * length * head_size * itemsize


def naive_bytes(length: int, heads: int, head_size: int, itemsize: int) -> int:
    """One matrix of scores and the output. A program that keeps scores and weights at once holds the matrix twice."""
    return heads * length * length * itemsize + output_bytes(length, heads, head_size, itemsize)


def tiled_bytes(length: int, heads: int, head_size: int, itemsize: int) -> int:
    """Statistics of every query and the output. Tiles lie on the chip, and take no memory at all."""
    return heads * length * STATISTICS + output_bytes(length, heads, head_size, itemsize)


def growth(lengths: list[int] | tuple[int, ...], amounts: list[float] | tuple[float, ...]) -> float:
    """The exponent p of amounts ~ length^p, between the two longest lengths: 2 doubles twice, 1 doubles once."""
    import math

    if len(lengths) < 2 or min(amounts[-2:]) <= 0:
        return math.nan
    return math.log(amounts[-1] / amounts[-2]) / math.log(lengths[-1] / lengths[-2])
