"""One step as attention sees it: offsets, lengths, pages, slots. Refuses to know prefill from decode."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclasses.dataclass
class AttentionMetadata:
    """Device views into the persistent buffers of `StepInputs`, padded to the dispatched size, and their host copies.

    Shapes (R = `num_reqs`, T = `num_tokens`, both padded):
        query_start_loc: int32 `[R+1]`, non-decreasing, padded rows hold the number of real tokens.
        seq_lens: int32 `[R]`, KV length after this step's write; 0 on padded rows.
        block_table: int32 `[R, max_blocks]`; unused entries are 0, the null block.
        slot_mapping: int64 `[T]`, `block * block_size + offset`; −1 on padding, written by nobody.
        query_start_loc_cpu, seq_lens_cpu: numpy int32 copies of the same values.

    `max_query_len` and `max_seq_len` are host ints. When `for_graph` is true they are the worst case that the graph
    must serve (they are baked into it), not this batch's. `is_uniform_decode` is true when every real request brings
    one token and is decoding.
    """

    num_reqs: int
    num_tokens: int
    num_actual_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc_cpu: np.ndarray
    seq_lens_cpu: np.ndarray
    for_graph: bool = False
    is_uniform_decode: bool = False
    scratch: dict[str, Any] = dataclasses.field(default_factory=dict)
