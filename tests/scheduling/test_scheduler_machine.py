"""Random traffic: whatever the limits and whatever happens, a request's output is what it would be alone.

`FakeEngine` checks the promises of every step; here are the events, and the end: everybody finished within a bounded
number of steps, every output equal to the reference, every block free.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from labkit.errors import RequestError
from labkit.paging import block_hash as hashing
from labkit.scheduling.request import Request
from tests.scheduling.fake_engine import FakeEngine

# Few different tokens and some fixed beginnings, so that prefixes are shared often.
PROMPTS = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=20),
    st.builds(
        lambda beginning, n, tail: [beginning] * n + tail,
        st.integers(0, 1), st.integers(1, 16), st.lists(st.integers(0, 2), max_size=4),
    ),
)  # fmt: skip
SAMPLING: dict[str, Any] = {
    "seed": st.one_of(st.none(), st.integers(0, 2)),
    "eos": st.sampled_from([(), (3,), (1, 2, 3, 4, 5)]),
}
BUDGETS = st.one_of(st.integers(1, 8), st.integers(1, 64))


def weak_hash(parent: bytes | None, tokens: list[int]) -> bytes:
    return bytes([(sum(parent or b"") * 3 + sum(tokens)) % 7])


busy = precondition(lambda self: self.engine.scheduler.has_unfinished)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        usable=st.integers(1, 24),
        block_size=st.integers(1, 5),
        budget=BUDGETS,
        max_num_seqs=st.integers(1, 10),
        max_model_len=st.integers(2, 40).map(lambda n: 42 - n),
        threshold=st.one_of(st.just(0), st.integers(1, 64)),
        chunked=st.booleans(),
        caching=st.booleans(),
        prefill_first=st.booleans(),
        weak=st.sampled_from([False, False, True]),
    )
    def start(self, weak: bool, **limits: int) -> None:
        self.engine = FakeEngine(**limits)
        self.requests: list[Request] = []
        self.patch = mock.patch.object(hashing, "block_hash", weak_hash) if weak else None
        if self.patch:
            self.patch.start()

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=5), max_tokens=st.integers(0, 16), **SAMPLING)
    def add(self, prompts: list[list[int]], max_tokens: int, seed: int | None, eos: tuple[int, ...]) -> None:
        limits = self.engine.scheduler.limits
        for prompt in prompts:
            hopeless = len(prompt) >= self.engine.longest()
            hopeless |= not limits.enable_chunked_prefill and len(prompt) > limits.max_num_batched_tokens
            try:
                self.requests.append(self.engine.add(prompt, max_tokens, seed=seed, eos=eos))
            except RequestError:
                assert hopeless
            else:
                assert not hopeless

    @busy
    @rule(n=st.integers(1, 4))
    def step(self, n: int) -> None:
        for _ in range(n):
            self.engine.step()

    @busy
    @rule()
    def failing_step(self) -> None:
        self.engine.step(fail=True)

    @busy
    @rule(data=st.data(), fail=st.booleans())
    def step_with_abort_inside(self, data: st.DataObject, fail: bool) -> None:
        self.engine.step(between=lambda step: self.end(data, "abort"), fail=fail)

    @busy
    @rule(fail=st.booleans())
    def step_with_preemption_inside(self, fail: bool) -> None:
        self.engine.step(between=lambda step: self.engine.scheduler.preempt_all(), fail=fail)

    @busy
    @rule(data=st.data(), reason=st.sampled_from(["abort", "error"]))
    def end(self, data: st.DataObject, reason: str) -> None:
        live = [request for request in self.requests if not request.finished]
        request = data.draw(st.sampled_from(live))
        assert self.engine.scheduler.finish(request.request_id, reason) is request

    @busy
    @rule()
    def preempt_all(self) -> None:
        self.engine.scheduler.preempt_all()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.pool.reset_prefix_cache()

    @busy
    @precondition(lambda self: self.engine.scheduler.limits.enable_chunked_prefill)
    @rule(budget=BUDGETS)
    def reconfigure_budget(self, budget: int) -> None:
        self.engine.set_budget(budget)

    @busy
    @rule(value=st.booleans())
    def reconfigure_prefill_first(self, value: bool) -> None:
        self.engine.set_prefill_first(value)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            self.engine.run()
            for request in self.requests:
                assert request.finished
                self.engine.check_output(request)
        finally:
            if self.patch:
                self.patch.stop()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
