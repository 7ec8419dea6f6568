"""Which tokens run in the next step: one token budget that prefill chunks and decodes share.

Refuses to know torch, tensors, text and how a token is chosen. The rules, in the order they apply:

1. Running requests first, each with the tokens it owes: one for a decode, a chunk for a prefill. Whoever goes away
   empty because the budget is used up is first in line in the next step, so with more decodes than budget all make
   progress in turn.
2. A running request that needs a block when none is free gets those of the request that arrived last. That one is
   preempted: it gives up its K/V, keeps its tokens, and computes them again later. The request in need may turn out to
   be the latest itself, and then it is the one that waits. The oldest running request is never preempted and fits
   alone, so something always finishes.
3. Then waiting requests, first come first served, while there are budget, places, and blocks for all their tokens. None
   starts in a step that preempted somebody or left a running request without tokens.

`prefill_first` is the older way, to compare with: rules 1 and 3 apply to prompts alone, and decodes have no turn as
long as there is a prompt to run. A step is then prompts or decodes, never both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from labkit.errors import ConfigError, LabkitError, RequestError
from labkit.paging.block_pool import BlockPool, blocks_for
from labkit.scheduling.prefix import cached_prefix, register_full_blocks
from labkit.scheduling.request import Request, RequestStatus
from labkit.scheduling.rules import chunk_size, longest_request, refuse_hopeless
from labkit.scheduling.step import ScheduledRequest, ScheduledStep, SchedulerLimits
from labkit.scheduling.stops import finish_reason

__all__ = ["ScheduledRequest", "ScheduledStep", "Scheduler", "SchedulerLimits"]

# Looked up once: reading a member off its enum costs as much as the rest of a request's turn.
WAITING, RUNNING, PREEMPTED, FINISHED = RequestStatus


class Scheduler:
    """Requests from arrival to end, over one block pool. A step goes `schedule()` → forward → `commit()`.

    Requests may be added, aborted and finished at any time, also between `schedule` and `commit`. `waiting` (in order
    of arrival) and `running` (in order of turn) are for reading.
    """

    def __init__(self, limits: SchedulerLimits, pool: BlockPool) -> None:
        for field in ("block_size", "enable_prefix_caching"):
            asked, has = getattr(limits, field), getattr(pool, field)
            if asked != has:
                raise ConfigError(f"{field}={asked}", f"the block pool was made with {has}", "Give both the same.")
        self.limits, self.pool = limits, pool
        self.max_len = longest_request(limits, pool.usable)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._live: dict[str, Request] = {}
        self._open_step: ScheduledStep | None = None
        self._num_arrivals = 0
        self._num_steps = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._live)

    def get(self, request_id: str) -> Request | None:
        """The unfinished request of that id."""
        return self._live.get(request_id)

    # --- requests come and go --------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. One that wants no tokens (`max_tokens=0`) is finished at once, with reason "length".

        Raises:
            RequestError: it could never run, or its id is taken by an unfinished request. All others are as before.
        """
        self._take_in(request)
        if request.params.max_tokens == 0:
            self._end(request, "length")
        else:
            self.waiting.append(request)

    def prime(self, request: Request, context: int) -> None:
        """Let a request run as if its first `context` tokens had K/V; the caller fills `request.block_ids`.

        A request that knows no more tokens than that gets its last one again as its first output (it counts towards
        `max_tokens`), so that its next step is a decode at a length of `context + 1`. Nothing of a primed request
        enters the prefix cache. If it is preempted, its tokens are computed in earnest.

        Raises:
            RequestError: as for `add`; or no place or too few free blocks right now.
        """
        self._check_no_open_step("prime()")
        what = f"priming request {request.request_id!r} with {context} tokens"
        if not 1 <= context <= request.num_tokens:
            raise RequestError(what, f"it knows {request.num_tokens} tokens", f"Give it a prompt of {context} tokens.")
        if context + 1 >= self.max_len:
            raise RequestError(what, f"a request ends at {self.max_len} tokens here", "Leave room for two more.")
        places, need = self.limits.max_num_seqs - len(self.running), blocks_for(context, self.pool.block_size)
        if not places or not self.pool.can_allocate(need):
            raise RequestError(
                what,
                f"it takes {need} blocks and a place; {self.pool.num_free} blocks and {places} places are free",
                "Lower the batch or the context, or give the engine more KV blocks.",
            )
        self._take_in(request)
        if request.num_tokens == context:
            request.append_token(request.token_at(context - 1))
        request.block_ids += self.pool.allocate(need) or ()
        request.num_computed_tokens, request.primed = context, True
        request.status = RUNNING
        self.running.append(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request now, with reason "abort"; None when no unfinished request has that id."""
        return self.finish(request_id, "abort")

    def finish(self, request_id: str, reason: str) -> Request | None:
        """End a request from outside (a stop string was found, its forward failed). Its tokens are kept."""
        request = self._live.get(request_id)
        if request is not None:
            queue = self.running if request.status is RUNNING else self.waiting
            queue.remove(request)
            self._end(request, reason)
        return request

    def _take_in(self, request: Request) -> None:
        if request.request_id in self._live:
            what = f"request {request.request_id!r}"
            raise RequestError(what, "an unfinished request has that id", "Take another id, or abort the other first.")
        refuse_hopeless(request, self.limits, self.pool.usable)
        if request.arrival_index < 0:  # else it comes from another scheduler and keeps its place, and its random draws
            request.arrival_index = self._num_arrivals
        self._num_arrivals = max(self._num_arrivals, request.arrival_index + 1)
        request.block_hashes.clear()
        self._live[request.request_id] = request

    def _end(self, request: Request, reason: str) -> None:
        self._give_back_blocks(request)
        request.status, request.finish_reason = FINISHED, reason
        del self._live[request.request_id]

    def _give_back_blocks(self, request: Request) -> None:
        self.pool.free(request.block_ids)
        request.forget_kv()

    # --- choosing a step -------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep | None:
        """Choose the next step and take its blocks; None when no request is unfinished.

        Raises:
            LabkitError: the step before was neither committed nor rolled back.
        """
        self._check_no_open_step("schedule()")
        limits = self.limits
        chosen: dict[Request, int] = {}
        preempted: list[str] = []
        turns = list(self.running)
        if limits.prefill_first:
            turns = [request for request in turns if not request.decodes]
        budget, all_served = self._serve(turns, chosen, preempted)
        num_cached = 0
        if all_served and not preempted:
            while self.waiting and (n := self._start(self.waiting[0], budget)):
                request = self.waiting.popleft()
                self.running.append(request)
                num_cached += request.num_computed_tokens
                chosen[request] = n
                budget -= n
        if limits.prefill_first and not chosen:
            self._serve(list(self.running), chosen, preempted)
        if not chosen:
            return None
        self._open_step = ScheduledStep.of(self._num_steps, chosen, preempted, num_cached, limits.decodes_first)
        self._num_steps += 1
        return self._open_step

    def _serve(self, turns: Sequence[Request], chosen: dict[Request, int], preempted: list[str]) -> tuple[int, bool]:
        """Choose tokens for running requests, in this order, and note who is preempted for them.

        Returns:
            What is left of the budget, and whether everybody in `turns` who still runs was chosen.
        """
        limits, block_size = self.limits, self.pool.block_size
        budget = limits.max_num_batched_tokens
        for request in turns:
            if request.status is not RUNNING:
                continue  # preempted a moment ago
            n = chunk_size(request.num_tokens - request.num_computed_tokens, budget, limits)
            if not n:
                break
            end = request.num_computed_tokens + n
            while end > len(request.block_ids) * block_size and not self._grow(request, end):
                victim = max(self.running, key=lambda r: r.arrival_index)
                self._preempt(victim)
                preempted.append(victim.request_id)
                budget += chosen.pop(victim, 0)
                if victim is request:
                    break
            else:
                chosen[request] = n
                budget -= n
        if len(chosen) == len(turns):
            return budget, True
        empty = {request: True for request in turns if request not in chosen and request.status is RUNNING}
        self.running = [*empty, *(request for request in self.running if request not in empty)]
        return budget, not empty

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Give a request the blocks it lacks to hold `num_tokens` tokens; False when the pool has too few."""
        blocks = self.pool.allocate(blocks_for(num_tokens, self.pool.block_size) - len(request.block_ids))
        request.block_ids += blocks or ()
        return blocks is not None

    def _start(self, request: Request, budget: int) -> int:
        """Give a waiting request its cached prefix and blocks for a first chunk: the chunk's tokens, 0 if it cannot."""
        if not budget or len(self.running) >= self.limits.max_num_seqs:
            return 0
        hits = cached_prefix(request, self.pool)
        hit_ids, cached = [entry.block_id for entry in hits], len(hits) * self.pool.block_size
        n = chunk_size(request.num_tokens - cached, budget, self.limits)
        # Blocks are taken chunk by chunk, but a request starts only when all its tokens would fit by now: starting
        # sooner mostly ends in a preemption.
        all_new = blocks_for(request.num_tokens, self.pool.block_size) - len(hits)
        if not n or not self.pool.can_allocate(all_new, hit_ids):
            return 0
        request.block_ids += self.pool.allocate(blocks_for(cached + n, self.pool.block_size) - len(hits), hit_ids) or ()
        request.num_computed_tokens, request.num_registered_blocks = cached, len(hits)
        request.last_registered = hits[-1] if hits else None
        if request.status is WAITING:
            request.num_cached_tokens = cached
        request.status = RUNNING
        return n

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks. It waits in front of everyone who arrived later."""
        self._give_back_blocks(request)
        request.status = PREEMPTED
        request.num_preemptions += 1
        self.running.remove(request)
        self.waiting.appendleft(request)

    def preempt_all(self) -> None:
        """Preempt every running request, for a change of the KV cache; tokens are kept."""
        for request in sorted(self.running, key=lambda r: -r.arrival_index):
            self._preempt(request)

    # --- booking a step --------------------------------------------------------------------------------------------

    def commit(self, step: ScheduledStep, sampled: Sequence[int | None]) -> list[Request]:
        """Book a step whose forward has run: K/V, prefix cache, tokens, ends.

        Args:
            step: the one that `schedule` returned last.
            sampled: one entry per entry of `step.requests`: its token, None where `samples` is False. Entries of
                requests that were aborted or preempted meanwhile are not looked at.

        Returns:
            The requests that this step finished, with reason "stop" or "length". Their blocks are free again.

        Raises:
            LabkitError: it is another step, or the tokens do not fit it; nothing is booked.
        """
        self._check_open_step("commit()", step)
        if len(sampled) != step.num_reqs:
            why = f"the step has {step.num_reqs} requests"
            raise LabkitError(f"commit() with {len(sampled)} tokens", why, "Pass one entry per request.")
        for (request, _, _, samples, _), token in zip(step.requests, sampled, strict=True):
            if samples is (token is None) and request.status is RUNNING:
                what = f"commit() with token {token} for request {request.request_id!r}"
                raise LabkitError(what, f"samples={samples} in this step", "Pass a token where it is True only.")
        self._open_step = None
        finished = []
        for (request, _, n, _, _), token in zip(step.requests, sampled, strict=True):
            if request.status is not RUNNING:
                continue
            request.num_computed_tokens += n
            register_full_blocks(request, self.pool)
            if token is not None:
                request.append_token(token)
                reason = finish_reason(request, token, self.max_len)
                if reason:
                    self._end(request, reason)
                    finished.append(request)
        if finished:
            self.running = [request for request in self.running if request.status is RUNNING]
        return finished

    def rollback(self, step: ScheduledStep) -> None:
        """Forget a step whose forward failed: nothing was registered, and `schedule` chooses the same tokens again.

        Blocks taken for the step are given back. Requests that it started stay running, requests that it preempted stay
        preempted. To drop the one that makes it fail, call `finish(request_id, "error")`.
        """
        self._check_open_step("rollback()", step)
        self._open_step = None
        for item in step.requests:
            request = item.request
            if request.status is RUNNING:
                keep = blocks_for(request.num_computed_tokens, self.pool.block_size)
                self.pool.free(request.block_ids[keep:])
                del request.block_ids[keep:]

    def _check_no_open_step(self, what: str) -> None:
        if self._open_step is not None:
            raise LabkitError(what, "the last step is still open", "Call commit() or rollback() with it first.")

    def _check_open_step(self, what: str, step: ScheduledStep) -> None:
        if step is not self._open_step:
            raise LabkitError(what, "this is not the open step", "Pass what schedule() returned last, and only once.")
