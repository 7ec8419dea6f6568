"""Which batch sizes get a graph, and which one a batch is padded to. Pure functions, the ones the engine calls.

Source of the default: vLLM 0.33, `VllmConfig._set_cudagraph_sizes`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from labkit.errors import ConfigError

logger = logging.getLogger(__name__)

DEFAULT_CAP = 512
SM10X_CAP = 1024


def default_capture_sizes(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    query_len: int = 1,
    cap: int = DEFAULT_CAP,
    max_size: int | None = None,
) -> list[int]:
    """The default list of capture sizes, in tokens, ascending.

    1, 2, 4, then every 8 below 256, then every 16, up to the least of 2 · max_num_seqs · query_len, cap and
    max_num_batched_tokens.
    `max_num_seqs` itself is added where it fits, so 13 sequences are served by a graph of 13 and not of 16; so is
    `max_num_batched_tokens`. With query_len > 1 the multiples of query_len are added, since a uniform batch has n · q
    tokens. `max_size` replaces the ceiling's first two terms.
    """
    ceiling = min(max_size if max_size is not None else min(2 * max_num_seqs * query_len, cap), max_num_batched_tokens)
    sizes = {s for s in (1, 2, 4, *range(8, 256, 8), *range(256, ceiling + 1, 16)) if s <= ceiling}
    extra = [max_num_batched_tokens]
    if query_len == 1:
        extra.append(max_num_seqs)
    else:
        counts = (1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs + 1, 16), max_num_seqs)
        extra += [n * query_len for n in counts if n <= max_num_seqs]
    return sorted(sizes | {s for s in extra if s <= ceiling})


def check_capture_sizes(sizes: Sequence[int], max_num_batched_tokens: int, max_size: int | None = None) -> list[int]:
    """A user's list, sorted and without duplicates (one log line says so).

    Raises:
        ConfigError: the list is empty, or holds something that is not a whole number ≥ 1, or exceeds a limit.
    """
    what = f"cudagraph_capture_sizes={list(sizes)!r}"
    if not sizes:
        raise ConfigError(what, "the list is empty", "Name at least one size, or set cudagraph_mode to NONE.")
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(
                what, f"{size!r} is not a whole number of at least 1", "Sizes are numbers of tokens, like 1, 2, 4, 8."
            )
        if size > max_num_batched_tokens:
            raise ConfigError(
                what,
                f"{size} is above max_num_batched_tokens={max_num_batched_tokens}, so no step can be that large",
                f"Drop {size} or raise max_num_batched_tokens.",
            )
        if max_size is not None and size > max_size:
            raise ConfigError(
                what, f"{size} is above max_cudagraph_capture_size={max_size}", f"Drop {size} or raise that limit."
            )
    clean = sorted(set(sizes))
    if clean != list(sizes):
        logger.info("cudagraph_capture_sizes %s was sorted and de-duplicated to %s", list(sizes), clean)
    return clean


def padding_table(sizes: Sequence[int]) -> list[int]:
    """For every number of tokens 0…max the size it runs in: `table[n]` is the smallest size ≥ n. Sizes ascending."""
    table: list[int] = []
    for size in sizes:
        table.extend([size] * (size + 1 - len(table)))
    return table


def pad_to(num_tokens: int, sizes: Sequence[int]) -> int | None:
    """The smallest captured size that holds `num_tokens`, or None above the largest: such a step runs eagerly."""
    return next((size for size in sizes if size >= num_tokens), None)
