"""Rules that follow from the limits alone, as pure functions: how long a chunk, how long a request, what is refused.

Refuses to know which requests run and what is in the pool right now.
"""

from __future__ import annotations

from labkit.errors import RequestError
from labkit.scheduling.request import Request
from labkit.scheduling.step import SchedulerLimits


def chunk_size(owed: int, budget: int, limits: SchedulerLimits) -> int:
    """How many of one request's `owed` tokens fit into what is left of a step's budget; 0 means "not in this step".

    With chunked prefill off all of them go in one step, whatever `long_prefill_token_threshold` says. One thing is
    split nevertheless: a recompute after preemption that has outgrown a whole step, as it could never run otherwise.
    """
    if limits.enable_chunked_prefill:
        threshold = limits.long_prefill_token_threshold
        if 0 < threshold < owed:
            owed = threshold
    elif budget < owed <= limits.max_num_batched_tokens:
        return 0
    return owed if owed < budget else budget  # `min` would be a third of a decode's turn


def longest_request(limits: SchedulerLimits, usable_blocks: int) -> int:
    """Tokens, prompt and output together, at which a request ends with "length".

    The newest token needs no slot until the step after, so a pool carries one token more than it has slots. Ending
    there keeps a request that outgrows the whole pool from waiting for blocks that cannot exist; and as the bound does
    not depend on who else runs, neither does anybody's output.
    """
    return min(limits.max_model_len, usable_blocks * limits.block_size + 1)


def refuse_hopeless(request: Request, limits: SchedulerLimits, usable_blocks: int) -> None:
    """Raise for a request that could never run, however long it waits.

    Raises:
        RequestError: empty prompt; no room to generate; more tokens than the pool has slots; chunked prefill off and a
            prompt above the budget; already finished.
    """
    known, slots = request.num_tokens, usable_blocks * limits.block_size
    what = f"request {request.request_id!r} with {known} tokens"
    if request.finished:
        raise RequestError(what, f"it is finished ({request.finish_reason})", "Make a new Request.")
    if not request.num_prompt_tokens:
        raise RequestError(what, "the prompt is empty", "Give it at least one token.")
    if known >= limits.max_model_len:
        raise RequestError(
            what,
            f"max_model_len={limits.max_model_len} leaves no room to generate",
            f"Send at most {limits.max_model_len - 1} tokens, or raise max_model_len.",
        )
    if known > slots:
        raise RequestError(
            what,
            f"the KV cache holds {slots} tokens ({usable_blocks} blocks of {limits.block_size})",
            f"Send at most {slots} tokens, or give the engine more KV blocks.",
        )
    if not limits.enable_chunked_prefill and request.num_prompt_tokens > limits.max_num_batched_tokens:
        raise RequestError(
            what,
            f"chunked prefill is off and a step takes max_num_batched_tokens={limits.max_num_batched_tokens}",
            "Turn enable_chunked_prefill on, or raise max_num_batched_tokens.",
        )
