"""What a step is and what bounds it: plain values between the scheduler and the stations behind it.

Refuses to know how a step is chosen, torch and tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from labkit.scheduling.request import Request


@dataclasses.dataclass(frozen=True)
class SchedulerLimits:
    """Bounds of a step and of a request, named as in `EngineConfig`.

    max_num_seqs: requests running at once. max_num_batched_tokens: tokens in one step.
    max_model_len: prompt and output of one request together.
    long_prefill_token_threshold: most tokens of one request's prefill in one step, 0 for no such cap.
    enable_chunked_prefill: when False a prompt runs in one step (see `rules.chunk_size`).
    decodes_first: the rows of a step are its decodes, then the others; each in order of turn.
    prefill_first: a step runs prompts or decodes, and prompts go first.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    decodes_first: bool = False
    prefill_first: bool = False


class ScheduledRequest(NamedTuple):
    """One request's share of a step: positions `start` … `start + num_tokens - 1`.

    start: tokens with K/V before the step. samples: the share ends with the newest known token, so the step yields the
    next one. is_decode: the share is the newest token alone, and the whole prompt has K/V.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    is_decode: bool


@dataclasses.dataclass(frozen=True)
class ScheduledStep:
    """One step: who runs which tokens, and the totals that the stations behind need.

    preempted: ids of the requests that gave up their K/V for it. max_seq_len: longest context after the step's writes.
    is_uniform_decode: every request decodes. num_cached_tokens: tokens newly found in the prefix cache.
    """

    step_id: int
    requests: tuple[ScheduledRequest, ...]
    preempted: tuple[str, ...]
    num_tokens: int
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    is_uniform_decode: bool
    num_cached_tokens: int

    @classmethod
    def of(
        cls,
        step_id: int,
        chosen: Mapping[Request, int],
        preempted: Sequence[str],
        num_cached: int,
        decodes_first: bool = False,
    ) -> ScheduledStep:
        """Build a step from the number of tokens chosen for each request, in order of turn."""
        rows = []
        num_decodes = max_seq_len = 0
        for request, n in chosen.items():
            start = request.num_computed_tokens
            end = start + n
            samples = end == request.num_tokens
            # Told from the state and not from n == 1, which the last token of a chunked prompt has as well.
            is_decode = n == 1 and samples and start >= request.num_prompt_tokens
            rows.append((request, start, n, samples, is_decode))
            num_decodes += is_decode
            if end > max_seq_len:
                max_seq_len = end
        if decodes_first and 0 < num_decodes < len(rows):
            rows.sort(key=lambda row: not row[4])
        return cls(
            step_id=step_id,
            requests=tuple(map(ScheduledRequest._make, rows)),
            preempted=tuple(preempted),
            num_tokens=sum(chosen.values()),
            num_reqs=len(rows),
            max_query_len=max(chosen.values()),
            max_seq_len=max_seq_len,
            is_uniform_decode=num_decodes == len(rows),
            num_cached_tokens=num_cached,
        )
