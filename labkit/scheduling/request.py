"""One request: the tokens it knows, how many of them have K/V, and which blocks hold it.

Refuses to know when it runs (the scheduler decides) and how its tokens are chosen (the sampler does).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from labkit.config import SamplingParams
from labkit.paging.block_pool import CachedBlock


class RequestStatus(enum.Enum):
    """WAITING → RUNNING → FINISHED, with RUNNING ⇄ PREEMPTED whenever the pool is out of blocks."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclasses.dataclass(eq=False, slots=True)
class Request:
    """A prompt, what was generated so far, and the bookkeeping of its K/V. Compared by identity.

    Known tokens are the prompt and every sampled token. All of them but the newest usually have K/V; the newest gets
    its K/V in the step that samples the next one.

    Attributes:
        request_id: unique among unfinished requests.
        prompt_token_ids, params, eos_token_ids: what was asked; ids of `eos_token_ids` end it unless `ignore_eos`.
        arrival_index: place in the order of arrival, set by the scheduler once and kept for life; −1 before.
        output_token_ids: what was sampled, oldest first. A preempted request keeps them.
        num_prompt_tokens, num_tokens: length of the prompt; number of known tokens.
        num_computed_tokens: tokens with K/V in `block_ids`, always the first ones.
        num_cached_tokens: prompt tokens that the prefix cache served when the request first started.
        block_ids: block i holds positions `i * block_size` … `(i + 1) * block_size - 1`.
        finish_reason: "stop", "length", "abort", "error", or None while it lives.
        num_preemptions: how often its K/V was given up.
        primed: its K/V is made up (`Scheduler.prime`), so nothing of it may enter the prefix cache.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    eos_token_ids: tuple[int, ...] = ()
    arrival_index: int = -1
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_ids: list[int] = dataclasses.field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: str | None = None
    num_preemptions: int = 0
    primed: bool = False
    num_prompt_tokens: int = dataclasses.field(init=False)
    num_tokens: int = dataclasses.field(init=False)
    _known: list[int] = dataclasses.field(init=False, repr=False)
    # The scheduler's own: hashes of the full blocks known so far, and how far they are in the prefix cache.
    block_hashes: list[bytes] = dataclasses.field(default_factory=list, repr=False)
    num_registered_blocks: int = 0
    last_registered: CachedBlock | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.prompt_token_ids = list(self.prompt_token_ids)
        self.output_token_ids = list(self.output_token_ids)
        self._known = self.prompt_token_ids + self.output_token_ids
        # Kept as plain attributes: the scheduler reads them for every request in every step.
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.num_tokens = len(self._known)

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and output in one; read only."""
        return self._known

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def decodes(self) -> bool:
        """Whether its next share is a decode: everything but the newest token has K/V, the whole prompt among it."""
        return self.num_prompt_tokens <= self.num_computed_tokens == self.num_tokens - 1

    def token_at(self, position: int) -> int:
        """The known token at one position."""
        return self._known[position]

    def tokens(self, start: int, n: int) -> list[int]:
        """The known tokens at positions `start` … `start + n - 1`."""
        return self._known[start : start + n]

    def append_token(self, token_id: int) -> None:
        """Add a sampled token."""
        self.output_token_ids.append(token_id)
        self._known.append(token_id)
        self.num_tokens += 1

    def forget_kv(self) -> None:
        """No token has K/V any more; the caller has given the blocks back. Tokens stay."""
        self.block_ids = []
        self.num_computed_tokens = 0
        self.num_registered_blocks = 0
        self.last_registered = None
        self.primed = False
