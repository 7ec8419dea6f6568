"""Requests as a learner types them, and the step that labkit's own scheduler makes of them. Refuses to time anything.

Scheduler, block pool and slot mapping are the engine's; all of them are pure, so no torch is needed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from labkit.config import SamplingParams
from labkit.errors import ConfigError
from labkit.paging.block_pool import BlockPool, blocks_for
from labkit.paging.slot_mapping import slot_mapping
from labkit.scheduling.request import Request
from labkit.scheduling.scheduler import Scheduler, SchedulerLimits

NAMES = "ABCDEFGHIJKL"
MAX_TOKENS, MAX_CONTEXT = 2048, 4096
#: What the panel opens with: three decodes, and a prompt of 512 tokens.
EXAMPLE = "1@40, 1@100, 1@17, 512@0"


def read_requests(typed: str) -> tuple[tuple[int, int], ...]:
    """Pairs of (new tokens, tokens in the cache) from "1@40, 512@0"; "512" is "512@0".

    Raises:
        ConfigError: a part that does not read, a number out of range, none or too many requests.
    """
    found = []
    for part in filter(None, (piece.strip() for piece in re.split(r"[,;\n]", typed))):
        match = re.fullmatch(r"(\d+)\s*(?:@\s*(\d+))?", part)
        if not match:
            raise ConfigError(
                f"request {part!r}", "is not new tokens @ context", f"Write requests like {EXAMPLE.split(', ')[0]}."
            )
        new, context = int(match[1]), int(match[2] or 0)
        if not 1 <= new <= MAX_TOKENS or context > MAX_CONTEXT:
            limits = f"1 to {MAX_TOKENS} new tokens, 0 to {MAX_CONTEXT} of context"
            raise ConfigError(f"request {part!r}", "is outside of what the panel holds", f"Take {limits}.")
        found.append((new, context))
    if not 1 <= len(found) <= len(NAMES):
        what = f"{len(found)} requests"
        raise ConfigError(what, f"the panel packs 1 to {len(NAMES)}", f"Write some like {EXAMPLE}.")
    return tuple(found)


def write_requests(requests: Sequence[tuple[int, int]]) -> str:
    """Requests as they are typed."""
    return ", ".join(f"{new}@{context}" for new, context in requests)


@dataclasses.dataclass(frozen=True)
class Share:
    """One request's part of the step. start: its first position. blocks: all of its blocks. slots: of its new tokens.

    waits: tokens that found no room in the budget.
    """

    name: str
    start: int
    tokens: int
    blocks: tuple[int, ...]
    slots: tuple[int, ...]
    waits: int

    @property
    def end(self) -> int:
        """Tokens of KV after the step."""
        return self.start + self.tokens

    @property
    def is_decode(self) -> bool:
        return self.tokens == 1 and self.start > 0


def schedule(requests: Sequence[tuple[int, int]], budget: int, block_size: int) -> tuple[list[Share], list[str]]:
    """The next step of these requests: shares in the order of their rows, and the names that do not run in it.

    A request with a context is running already, its KV as if computed; one without is waiting.
    """
    blocks = sum(blocks_for(new + context + 1, block_size) for new, context in requests) + 2
    longest = max(new + context for new, context in requests) + 4
    pool = BlockPool(blocks, block_size, enable_prefix_caching=False)
    limits = SchedulerLimits(len(requests), budget, longest, block_size, enable_prefix_caching=False)
    scheduler = Scheduler(limits, pool)
    wanted = {}
    for name, (new, context) in zip(NAMES, requests, strict=False):
        length = context if (decode := new == 1 and context > 0) else context + new
        request = Request(name, [1] * length, SamplingParams(max_tokens=2, ignore_eos=True))
        wanted[name] = new
        if context:
            scheduler.prime(request, context)
            assert decode == request.decodes
        else:
            scheduler.add(request)
    step = scheduler.schedule()
    assert step is not None  # there is a request, and the budget is one token at least
    shares = [
        Share(
            item.request.request_id, item.start, item.num_tokens, tuple(item.request.block_ids),
            tuple(slot_mapping(item.request.block_ids, item.start, item.num_tokens, block_size)),
            wanted[item.request.request_id] - item.num_tokens,
        )
        for item in step.requests
    ]  # fmt: skip
    ran = {share.name for share in shares}
    return shares, [name for name in wanted if name not in ran]


def query_start_loc(shares: Sequence[Share]) -> list[int]:
    """Where each request's tokens begin in the packed batch, and at the end how many there are."""
    out = [0]
    for share in shares:
        out.append(out[-1] + share.tokens)
    return out


def scores(shares: Sequence[Share]) -> dict[str, int]:
    """Products of a query and a key that each way computes, for one head.

    useful: those that a causal mask keeps. padded: a rectangle of the longest queries and keys for every request.
    """
    useful = sum(s.tokens * s.start + s.tokens * (s.tokens + 1) // 2 for s in shares)
    padded = len(shares) * max(s.tokens for s in shares) * max(s.end for s in shares)
    return {"useful": useful, "padded": padded}


def packed(shares: Sequence[Share], left: Sequence[str]) -> dict[str, Any]:
    """A step as plain lists for figure and table."""
    return {
        "names": [s.name for s in shares], "tokens": [s.tokens for s in shares], "starts": [s.start for s in shares],
        "ends": [s.end for s in shares], "waits": [s.waits for s in shares], "left": list(left),
        "decode": [s.is_decode for s in shares], "blocks": [list(s.blocks) for s in shares],
        "slots": [list(s.slots) for s in shares], "query_start_loc": query_start_loc(shares),
        "positions": [p for s in shares for p in range(s.start, s.end)],
    }  # fmt: skip
