"""A scheduler driven by a model made of checksums, with a real paged KV cache underneath.

Each position's K/V is a checksum over its token and the K/V of all positions before it, *read from the cache through
the block table*. The next token is a checksum of the whole context's K/V. So a block that is shared wrongly, was
recycled, or was never written changes the output, exactly as it would in a transformer.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from labkit.config import SamplingParams
from labkit.paging.block_pool import BlockPool
from labkit.paging.slot_mapping import slot_mapping
from labkit.scheduling.request import Request, RequestStatus
from labkit.scheduling.scheduler import ScheduledStep, Scheduler, SchedulerLimits

VOCAB = 50


def digest(values: Iterable[int]) -> int:
    return zlib.crc32(",".join(map(str, values)).encode())


def next_token(context: Sequence[int], seed: int | None, drawn: int) -> int:
    """Greedy without a seed; with one, draw number `drawn` of that seed over the same context."""
    return digest([*context, seed or 0, drawn if seed is not None else 0]) % VOCAB


def reference(
    prompt: Sequence[int], params: SamplingParams, eos: Sequence[int], longest: int
) -> tuple[list[int], str | None]:
    """What the request gives when it is alone in the world, and why it ends."""
    context: list[int] = []
    output: list[int] = []
    for token in prompt:
        context.append(digest([*context, token]))
    while len(output) < params.max_tokens:
        token = next_token(context, params.seed, len(output))
        output.append(token)
        context.append(digest([*context, token]))
        if token in params.stop_token_ids or (token in eos and not params.ignore_eos):
            return output, "stop"
        if len(prompt) + len(output) >= longest:
            break
    return output, "length"


def is_decoding(request: Request) -> bool:
    """The prompt has K/V, and so has all that was sampled but the newest token."""
    sampled = len(request.output_token_ids)
    return sampled > 0 and request.num_computed_tokens == len(request.prompt_token_ids) + sampled - 1


class FakeEngine:
    """Runs steps and checks every promise of the scheduler while it does.

    `between`, when given to `step`, is called between `schedule` and `commit`, after the forward.
    """

    def __init__(
        self,
        *,
        usable: int = 64,
        block_size: int = 4,
        budget: int = 64,
        max_num_seqs: int = 16,
        max_model_len: int = 64,
        threshold: int = 0,
        chunked: bool = True,
        caching: bool = True,
        prefill_first: bool = False,
    ) -> None:
        self.pool = BlockPool(usable + 1, block_size, caching)
        limits = SchedulerLimits(
            max_num_seqs, budget, max_model_len, block_size, threshold, chunked, caching, prefill_first=prefill_first
        )
        self.scheduler = Scheduler(limits, self.pool)
        self.kv: list[int | None] = [None] * ((usable + 1) * block_size)
        self.done: list[Request] = []
        self.draws: dict[Request, int] = {}
        self.steps: list[ScheduledStep] = []
        self._names = 0

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        name: str | None = None,
        eos: tuple[int, ...] = (),
        **params: Any,
    ) -> Request:
        self._names += 1
        request = Request(name or f"r{self._names}", list(prompt), SamplingParams(max_tokens=max_tokens, **params), eos)
        self.scheduler.add(request)
        return request

    def prime(self, prompt: Sequence[int], context: int, max_tokens: int = 4) -> Request:
        """A request whose first `context` tokens have made-up K/V."""
        self._names += 1
        request = Request(f"p{self._names}", list(prompt), SamplingParams(max_tokens=max_tokens))
        self.scheduler.prime(request, context)
        for slot in slot_mapping(request.block_ids, 0, context, self.pool.block_size):
            self.kv[slot] = 7
        self.draws[request] = len(request.output_token_ids)  # the stand-in
        return request

    def set_budget(self, budget: int) -> None:
        """What reconfiguring `max_num_batched_tokens` does to a running scheduler."""
        self.scheduler.limits = dataclasses.replace(self.scheduler.limits, max_num_batched_tokens=budget)

    def set_prefill_first(self, value: bool) -> None:
        """What reconfiguring `prefill_first` does."""
        self.scheduler.limits = dataclasses.replace(self.scheduler.limits, prefill_first=value)

    def longest(self) -> int:
        limits = self.scheduler.limits
        return min(limits.max_model_len, self.pool.usable * limits.block_size + 1)

    # --- steps -----------------------------------------------------------------------------------------------------

    def step(self, between: Callable[[ScheduledStep], None] | None = None, fail: bool = False) -> ScheduledStep | None:
        ran_before = set(self.scheduler.running)
        decoding = {request for request in ran_before if is_decoding(request)}
        could_start = self.could_start()
        step = self.scheduler.schedule()
        self.check(step, ran_before)
        if step is None:
            return None
        if self.scheduler.limits.prefill_first:
            self.check_prefill_first(step, ran_before, decoding, could_start)
        self.steps.append(step)
        sampled = self.forward(step)
        if between:
            between(step)
        if fail:
            self.scheduler.rollback(step)
        else:
            alive = [item.request for item in step.requests if item.request.status is RequestStatus.RUNNING]
            for item in step.requests:
                if item.samples and item.request in alive:
                    self.draws[item.request] = self.draws.get(item.request, 0) + 1
            finished = self.scheduler.commit(step, sampled)
            assert [request for request in alive if request.finished] == finished
            self.done += finished
        self.check_between_steps()
        return step

    def run(self, limit: int | None = None) -> list[ScheduledStep]:
        """Steps until nothing is left to do. Fails when the oldest request does not get on."""
        taken = []
        limit = limit if limit is not None else self.most_steps()
        while self.scheduler.has_unfinished:
            assert len(taken) < limit, f"no end after {limit} steps"
            step = self.step()
            assert step is not None, "requests are unfinished and no step was scheduled"
            taken.append(step)
        assert self.scheduler.schedule() is None
        self.check_all_free()
        return taken

    def most_steps(self) -> int:
        """Every step serves somebody; the oldest is served once per round at least, and never loses what it has."""
        live = [*self.scheduler.running, *self.scheduler.waiting]
        return 2 + (len(live) + 1) * sum(r.num_prompt_tokens + r.params.max_tokens + 1 for r in live)

    def forward(self, step: ScheduledStep) -> list[int | None]:
        sampled: list[int | None] = []
        size = self.pool.block_size
        for request, start, n, samples, _ in step.requests:
            slots = slot_mapping(request.block_ids, 0, start + n, size)
            for position in range(start, start + n):
                before = [self.kv[slot] for slot in slots[:position]]
                assert None not in before, "reads K/V that was never written"
                self.kv[slots[position]] = digest([*before, request.token_at(position)])  # type: ignore[list-item]
            context = [self.kv[slot] or 0 for slot in slots]
            params = request.params
            sampled.append(next_token(context, params.seed, len(request.output_token_ids)) if samples else None)
        return sampled

    # --- promises --------------------------------------------------------------------------------------------------

    def check(self, step: ScheduledStep | None, ran_before: set[Request]) -> None:
        scheduler, limits, size = self.scheduler, self.scheduler.limits, self.pool.block_size
        assert (step is None) == (not scheduler.has_unfinished), "a step exactly when something is unfinished"
        self.check_books()
        if step is None:
            return
        items = step.requests
        assert step.num_reqs == len(items) == len({item.request for item in items}) <= limits.max_num_seqs
        assert step.num_tokens == sum(item.num_tokens for item in items) <= limits.max_num_batched_tokens
        assert step.max_query_len == max(item.num_tokens for item in items)
        assert step.max_seq_len == max(item.start + item.num_tokens for item in items) <= self.longest() - 1
        assert step.is_uniform_decode == all(item.is_decode for item in items)
        started = [item.request for item in items if item.request not in ran_before]
        assert not (started and step.preempted), "somebody started in a step that preempted"
        if not limits.prefill_first:
            assert not started or len(items) == len(scheduler.running), "somebody started before one who was running"
        assert step.num_cached_tokens == sum(item.start for item in items if item.request not in ran_before)
        for request, start, n, samples, is_decode in items:
            assert request.status is RequestStatus.RUNNING and request in scheduler.running
            assert start == request.num_computed_tokens and n >= 1
            assert samples == (start + n == request.num_tokens)
            assert is_decode == (samples and n == 1 and start >= len(request.prompt_token_ids))
            assert len(request.block_ids) == -(-(start + n) // size), "blocks = ceil(tokens with K/V / size)"
            writes = set(request.block_ids[start // size :])
            assert all(self.pool.ref_counts[block] == 1 for block in writes), "writes into a shared block"
            if limits.enable_chunked_prefill and limits.long_prefill_token_threshold:
                assert n <= limits.long_prefill_token_threshold
            if not limits.enable_chunked_prefill and request.num_preemptions == 0:
                assert samples, "a prompt was split with chunked prefill off"

    def could_start(self) -> bool:
        """Whether the first waiting request has a place and blocks, without help from the prefix cache."""
        scheduler = self.scheduler
        if not scheduler.waiting or len(scheduler.running) >= scheduler.limits.max_num_seqs:
            return False
        return -(-scheduler.waiting[0].num_tokens // self.pool.block_size) <= self.pool.num_free

    def check_prefill_first(
        self, step: ScheduledStep, ran_before: set[Request], decoding: set[Request], could_start: bool
    ) -> None:
        """Prompts or decodes, and decodes only where no prompt can run."""
        chosen = {item.request for item in step.requests}
        prompts = {request for request in self.scheduler.running if request not in decoding}
        if chosen & decoding:
            assert chosen <= decoding, "a decode ran beside a prompt"
            assert not prompts, "decodes ran before a prompt under way"
            assert not could_start or ran_before - decoding, "decodes ran before a prompt that could start"
        elif chosen - ran_before:
            assert prompts <= chosen, "a prompt started before one who was under way"

    def check_between_steps(self) -> None:
        self.check_books()
        for request in self.scheduler.running:
            assert len(request.block_ids) == -(-request.num_computed_tokens // self.pool.block_size)
            assert request.num_computed_tokens < request.num_tokens < self.longest()
        for request, drawn in self.draws.items():
            assert drawn == len(request.output_token_ids), "every draw gives one token, and every token is one draw"

    def check_books(self) -> None:
        scheduler, size = self.scheduler, self.pool.block_size
        running, waiting = scheduler.running, list(scheduler.waiting)
        self.pool.invariants(request.block_ids for request in running)
        assert all(not request.block_ids for request in waiting)
        assert len(set(running)) == len(running) <= scheduler.limits.max_num_seqs
        order = [request.arrival_index for request in waiting]
        assert order == sorted(order), "first come, first served"
        assert not waiting or all(r.arrival_index < order[0] for r in running if not r.primed), "someone was overtaken"
        owners: dict[int, tuple[int, list[int]]] = {}
        for request in running:
            for i, block in enumerate(request.block_ids):
                if self.pool.ref_counts[block] > 1:
                    end = (i + 1) * size
                    assert end <= request.num_computed_tokens, "a shared block is full"
                    content = (i, request.tokens(0, end))
                    assert owners.setdefault(block, content) == content, "a shared block, and not the same tokens"

    def check_all_free(self) -> None:
        self.pool.invariants([])
        assert self.pool.num_free == self.pool.usable

    def check_output(self, request: Request) -> None:
        output, reason = reference(request.prompt_token_ids, request.params, request.eos_token_ids, self.longest())
        if request.finish_reason in ("stop", "length"):
            assert (request.output_token_ids, request.finish_reason) == (output, reason)
        else:
            assert request.output_token_ids == output[: len(request.output_token_ids)]
