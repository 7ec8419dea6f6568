"""The scheduler, rule by rule and case by case, on a model whose output shows every wrong block."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest

from labkit.config import SamplingParams
from labkit.errors import ConfigError, LabkitError, RequestError
from labkit.paging import block_hash as hashing
from labkit.paging.block_pool import BlockPool
from labkit.scheduling.request import Request, RequestStatus
from labkit.scheduling.scheduler import ScheduledStep, Scheduler, SchedulerLimits
from tests.scheduling.fake_engine import FakeEngine, next_token, reference


def shares(step: ScheduledStep | None) -> dict[str, tuple[int, int]]:
    """request id → (start, tokens), in the order of the rows."""
    assert step is not None
    return {item.request.request_id: (item.start, item.num_tokens) for item in step.requests}


def text(n: int, seed: int = 0) -> list[int]:
    return [(seed * 17 + i * i + 3 * i) % 40 for i in range(n)]


# --- one budget ------------------------------------------------------------------------------------------------------


def test_decodes_and_a_prefill_chunk_share_one_step() -> None:
    engine = FakeEngine(budget=8)
    engine.add(text(3), name="a", max_tokens=9)
    engine.step()
    engine.add(text(20, 1), name="b")
    assert shares(engine.step()) == {"a": (3, 1), "b": (0, 7)}
    assert shares(engine.step()) == {"a": (4, 1), "b": (7, 7)}
    assert shares(engine.step()) == {"a": (5, 1), "b": (14, 6)}
    assert shares(engine.step()) == {"a": (6, 1), "b": (20, 1)}
    assert [step.is_uniform_decode for step in engine.steps] == [False, False, False, False, True]
    engine.run()


def test_waiting_requests_start_first_come_first_served_while_there_is_budget_and_place() -> None:
    engine = FakeEngine(budget=10, max_num_seqs=3)
    for i, n in enumerate((4, 5, 6, 1)):
        engine.add(text(n, i), name="abcd"[i], max_tokens=2)
    assert shares(engine.step()) == {"a": (0, 4), "b": (0, 5), "c": (0, 1)}
    assert shares(engine.step()) == {"a": (4, 1), "b": (5, 1), "c": (1, 5)}, "three places; d waits"
    assert shares(engine.step()) == {"c": (6, 1), "d": (0, 1)}
    engine.run()


def test_a_request_that_does_not_fit_is_not_overtaken() -> None:
    engine = FakeEngine(usable=6, budget=64)
    engine.add(text(12), name="a", max_tokens=3)
    engine.add(text(16, 1), name="large", max_tokens=1)
    engine.add(text(2, 2), name="small", max_tokens=1)
    assert shares(engine.step()) == {"a": (0, 12)}
    assert shares(engine.step()) == {"a": (12, 1)}
    assert shares(engine.step()) == {"a": (13, 1)}
    assert shares(engine.step()) == {"large": (0, 16), "small": (0, 2)}
    engine.run()


@pytest.mark.parametrize("threshold", [1, 3, 64])
def test_the_threshold_caps_every_prefill_and_leaves_budget_to_others(threshold: int) -> None:
    engine = FakeEngine(budget=16, threshold=threshold)
    requests = [engine.add(text(10, i), name=str(i)) for i in range(3)]
    expected = {1: {"0": (0, 1), "1": (0, 1), "2": (0, 1)}, 3: {"0": (0, 3), "1": (0, 3), "2": (0, 3)}}
    assert shares(engine.step()) == expected.get(threshold, {"0": (0, 10), "1": (0, 6)})
    engine.run()
    for request in requests:
        engine.check_output(request)


def test_with_chunking_off_a_prompt_waits_for_a_step_with_room() -> None:
    engine = FakeEngine(budget=8, chunked=False)
    engine.add(text(3), name="a", max_tokens=3)
    engine.add(text(6, 1), name="b", max_tokens=1)
    assert shares(engine.step()) == {"a": (0, 3)}
    assert shares(engine.step()) == {"a": (3, 1), "b": (0, 6)}
    engine.run()


def test_with_chunking_off_a_recompute_that_outgrew_a_step_is_split() -> None:
    engine = FakeEngine(budget=8, chunked=False, caching=False)
    request = engine.add(text(8), name="a", max_tokens=8)
    for _ in range(5):
        engine.step()
    engine.scheduler.preempt_all()
    assert shares(engine.step()) == {"a": (0, 8)}
    assert shares(engine.step()) == {"a": (8, 5)}
    engine.run()
    engine.check_output(request)


def test_a_one_token_prefill_is_not_a_decode() -> None:
    engine = FakeEngine(budget=4)
    engine.add(text(5), name="a", max_tokens=2)
    steps = engine.run()
    assert [(i.num_tokens, i.samples, i.is_decode) for step in steps for i in step.requests] == [
        (4, False, False),
        (1, True, False),
        (1, True, True),
    ]
    single = FakeEngine()
    single.add([7], max_tokens=2)
    assert [step.is_uniform_decode for step in single.run()] == [False, True]


# --- prompts first, the older way -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunked", "threshold", "steps"),
    [
        pytest.param(True, 0, [{"b": (0, 8)}, {"b": (8, 4)}, {"a": (3, 1), "b": (12, 1)}], id="chunks of the budget"),
        pytest.param(True, 6, [{"b": (0, 6)}, {"b": (6, 6)}, {"a": (3, 1), "b": (12, 1)}], id="chunks below it"),
    ],
)
def test_prefill_first_lets_decodes_wait_until_no_prompt_can_run(
    chunked: bool, threshold: int, steps: list[dict[str, tuple[int, int]]]
) -> None:
    engine = FakeEngine(budget=8, threshold=threshold, chunked=chunked, prefill_first=True)
    a = engine.add(text(3), name="a", max_tokens=4)
    engine.step()
    b = engine.add(text(12, 1), name="b", max_tokens=2)
    assert [shares(engine.step()) for _ in steps] == steps
    engine.run()
    engine.check_output(a)
    engine.check_output(b)


def test_prefill_first_runs_whole_prompts_up_to_the_budget_and_decodes_after_the_last() -> None:
    engine = FakeEngine(budget=8, chunked=False, prefill_first=True)
    engine.add(text(3), name="a", max_tokens=4)
    engine.step()
    for i, name in enumerate("bcd"):
        engine.add(text(4, i + 1), name=name, max_tokens=2)
    assert shares(engine.step()) == {"b": (0, 4), "c": (0, 4)}
    assert shares(engine.step()) == {"d": (0, 4)}, "room for a's decode is left, and it waits"
    assert set(shares(engine.step())) == set("abcd")
    engine.run()


def test_prefill_first_decodes_when_the_prompt_that_waits_has_no_blocks() -> None:
    engine = FakeEngine(usable=6, prefill_first=True)
    engine.add(text(12), name="a", max_tokens=3)
    engine.add(text(16, 1), name="large", max_tokens=1)
    assert [list(shares(engine.step())) for _ in range(4)] == [["a"], ["a"], ["a"], ["large"]]


def test_prefill_first_keeps_turns_among_prompts_and_among_decodes() -> None:
    """Two prompts in chunks take turns; so do three decodes under a budget of two, as if no prompt had come between."""
    engine = FakeEngine(budget=8, prefill_first=True)
    for i, name in enumerate("abc"):
        engine.add([i + 1], name=name, max_tokens=9)
    engine.step()
    engine.set_budget(2)
    assert list(shares(engine.step())) == ["a", "b"]
    for i, name in enumerate("de"):
        engine.add(text(4, i), name=name, max_tokens=1)
    assert [list(shares(engine.step())) for _ in range(4)] == [["d"], ["d"], ["e"], ["e"]]
    assert [list(shares(engine.step())) for _ in range(2)] == [["c", "a"], ["b", "c"]]
    engine.run()


def test_both_ways_of_scheduling_give_the_same_text_in_another_order() -> None:
    def serve(prefill_first: bool) -> tuple[list[list[int]], list[dict[str, tuple[int, int]]], int]:
        engine = FakeEngine(usable=14, budget=8, prefill_first=prefill_first)
        requests = []
        for i in range(5):
            requests.append(engine.add([*text(6), *text(3 + 2 * i, i)], max_tokens=10, seed=i))
            engine.step()
        engine.run()
        for request in requests:
            engine.check_output(request)
        out = [request.output_token_ids for request in requests]
        return out, [shares(step) for step in engine.steps], sum(r.num_preemptions for r in requests)

    (unified, steps, preempted), (older, other_steps, older_preempted) = serve(False), serve(True)
    assert unified == older and steps != other_steps and preempted and older_preempted


# --- preemption ------------------------------------------------------------------------------------------------------


def test_the_latest_arrival_is_preempted_and_goes_on_where_it_was() -> None:
    engine = FakeEngine(usable=3, caching=False)
    requests = [engine.add(text(4, i), name="abc"[i], max_tokens=8) for i in range(3)]
    engine.step()
    assert [len(r.block_ids) for r in requests] == [1, 1, 1]
    step = engine.step()
    assert step is not None and step.preempted == ("c", "b"), "b needed c's block, then found itself the latest"
    assert shares(step) == {"a": (4, 1)}
    assert [r.request_id for r in engine.scheduler.waiting] == ["b", "c"]
    assert requests[1].status is RequestStatus.PREEMPTED and len(requests[1].output_token_ids) == 1
    engine.run()
    for request in requests:
        engine.check_output(request)
    assert requests[0].num_preemptions == 0 and requests[2].num_preemptions >= 1


def test_the_latest_arrival_preempts_itself_rather_than_an_older_one() -> None:
    engine = FakeEngine(usable=3, caching=False)
    a = engine.add(text(3), name="a", max_tokens=6)
    b = engine.add(text(4, 1), name="b", max_tokens=6)
    engine.step()
    engine.step()  # b takes the last free block
    engine.step()  # a needs one
    assert (a.num_preemptions, b.num_preemptions) == (0, 1)
    c = FakeEngine(usable=3, caching=False)
    a = c.add(text(5), name="a", max_tokens=6)
    b = c.add(text(4, 1), name="b", max_tokens=6)
    c.step()
    step = c.step()
    assert step is not None and step.preempted == ("b",) and shares(step) == {"a": (5, 1)}
    for engine_ in (engine, c):
        engine_.run()
        for request in engine_.done:
            engine_.check_output(request)


def test_a_request_already_chosen_for_the_step_can_be_preempted_and_its_budget_is_used() -> None:
    """With more decodes than budget a turn may start with the latest; an earlier one then needs its blocks."""
    engine = FakeEngine(usable=4, caching=False)
    requests = [engine.add(text(n, n), name=name, max_tokens=5) for name, n in (("a", 3), ("b", 4), ("c", 2))]
    engine.step()
    engine.set_budget(2)
    assert list(shares(engine.step())) == ["a", "b"], "the pool is full now, and c's turn is next"
    step = engine.step()
    assert step is not None and step.preempted == ("c",)
    assert shares(step) == {"a": (4, 1), "b": (5, 1)}, "b runs on what c gave back"
    engine.run()
    for request in requests:
        engine.check_output(request)


def test_a_preempted_request_finds_its_own_blocks_in_the_prefix_cache() -> None:
    engine = FakeEngine()
    request = engine.add(text(9), name="a", max_tokens=8)
    for _ in range(4):
        engine.step()
    engine.scheduler.preempt_all()
    assert request.status is RequestStatus.PREEMPTED and request.block_ids == []
    step = engine.step()
    assert step is not None and step.num_cached_tokens == 12 and shares(step) == {"a": (12, 1)}
    assert step.requests[0].is_decode and request.num_cached_tokens == 0, "its prompt was not served by the cache"
    engine.run()
    engine.check_output(request)


def test_nobody_starts_in_a_step_that_preempts() -> None:
    """b gives up its own copy of a block that a has too; sharing a's, it would fit again at once."""
    engine = FakeEngine(usable=11, block_size=1, budget=6)
    engine.add([0] * 2, name="a", max_tokens=2)
    engine.add([0] * 9, name="b", max_tokens=2)
    engine.step()
    step = engine.step()
    assert step is not None and step.preempted == ("b",) and list(shares(step)) == ["a"]
    step = engine.step()
    assert step is not None and step.num_cached_tokens == 4
    engine.run()


def test_a_request_starts_only_when_all_its_tokens_fit() -> None:
    """Taking the last blocks for a first chunk would mostly get it preempted before it is through."""
    engine = FakeEngine(usable=4, budget=6)
    engine.add(text(6), name="a", max_tokens=3)
    engine.add(text(12, 1), name="b", max_tokens=1)
    assert [list(shares(engine.step())) for _ in range(3)] == [["a"]] * 3, "two blocks are free, and b has three"
    assert shares(engine.step()) == {"b": (0, 6)}
    assert not any(step.preempted for step in engine.run())


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_request_that_outgrows_the_whole_pool_ends_with_length(block_size: int) -> None:
    engine = FakeEngine(usable=3, block_size=block_size, max_model_len=64)
    request = engine.add([5], max_tokens=60)
    engine.run(limit=30)
    assert request.finish_reason == "length" and request.num_tokens == 3 * block_size + 1
    engine.check_output(request)


# --- prefix cache ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)], ids=lambda value: str(value)
)
def test_a_repeated_prompt_is_served_by_whole_blocks_and_never_completely(prompt: int, cached: int) -> None:
    engine = FakeEngine()
    first = engine.add(text(prompt), max_tokens=1)
    engine.run()
    again = engine.add(text(prompt), max_tokens=1)
    step = engine.step()
    assert step is not None and step.num_cached_tokens == again.num_cached_tokens == cached
    assert step.num_tokens == prompt - cached >= 1
    assert again.output_token_ids == first.output_token_ids


def test_generated_tokens_are_found_as_a_prefix_too() -> None:
    engine = FakeEngine()
    first = engine.add(text(6), max_tokens=8)
    engine.run()
    again = engine.add([*text(6), *first.output_token_ids, 1], max_tokens=1)
    engine.run()
    assert again.num_cached_tokens == 12
    engine.check_output(again)


def test_blocks_are_shared_while_both_run_and_survive_one_of_them() -> None:
    engine = FakeEngine()
    a = engine.add(text(8), max_tokens=3)
    engine.step()
    b = engine.add([*text(8), 1], max_tokens=6)
    engine.step()
    assert a.block_ids[:2] == b.block_ids[:2] and engine.pool.ref_counts[b.block_ids[0]] == 2
    engine.scheduler.abort(a.request_id)
    assert engine.pool.ref_counts[b.block_ids[0]] == 1
    engine.run()
    engine.check_output(b)


def test_equal_prompts_in_one_step_do_not_share_what_is_not_written_yet() -> None:
    engine = FakeEngine()
    requests = [engine.add(text(8), max_tokens=4) for _ in range(3)]
    step = engine.step()
    assert step is not None and step.num_cached_tokens == 0 and step.num_tokens == 24
    engine.run()
    assert len({tuple(r.output_token_ids) for r in requests}) == 1


def test_with_prefix_caching_off_every_token_is_computed() -> None:
    engine = FakeEngine(caching=False)
    for _ in range(2):
        engine.add(text(12), max_tokens=1)
        assert [step.num_tokens for step in engine.run()] == [12]


def test_prefix_caching_saves_scheduled_tokens_and_changes_nothing_else() -> None:
    def serve(caching: bool) -> tuple[list[list[int]], int]:
        engine = FakeEngine(caching=caching, budget=16)
        requests = []
        for i in range(4):
            requests.append(engine.add([*text(20), *text(3, i)]))
            engine.step()
        engine.run()
        return [r.output_token_ids for r in requests], sum(step.num_tokens for step in engine.steps)

    (with_cache, fewer), (without, all_tokens) = serve(True), serve(False)
    assert with_cache == without and fewer <= all_tokens - 2 * 20


# --- requests come and go --------------------------------------------------------------------------------------------


def test_arrivals_are_numbered_and_a_request_keeps_its_number() -> None:
    engine = FakeEngine()
    a, b = engine.add([1]), engine.add([2])
    assert (a.arrival_index, b.arrival_index) == (0, 1)
    other = FakeEngine()
    engine.scheduler.preempt_all()
    other.scheduler.add(b)
    c = other.add([3])
    assert (b.arrival_index, c.arrival_index) == (1, 2)


def test_requests_move_to_a_scheduler_with_another_block_size() -> None:
    """What a change of page size does: preempt all, build anew, queue again."""
    old = FakeEngine(block_size=4)
    requests = [old.add(text(9, i), max_tokens=8, seed=i) for i in range(2)]
    for _ in range(3):
        old.step()
    old.scheduler.preempt_all()
    old.check_all_free()
    new = FakeEngine(block_size=3)
    for request in list(old.scheduler.waiting):
        new.scheduler.add(request)
    new.draws = dict(old.draws)
    new.run()
    for request in requests:
        new.check_output(request)
    new.add([*text(9, 0), *requests[0].output_token_ids])
    step = new.step()
    assert step is not None and step.num_cached_tokens == 15


def test_max_tokens_zero_is_finished_at_once_with_no_output() -> None:
    engine = FakeEngine()
    request = engine.add(text(5), max_tokens=0)
    assert request.finished and request.finish_reason == "length" and request.output_token_ids == []
    assert not engine.scheduler.has_unfinished and engine.scheduler.schedule() is None
    with pytest.raises(RequestError, match="empty"):
        engine.add([], max_tokens=0)


def test_finish_from_outside_keeps_the_token_that_completed_the_stop_string() -> None:
    engine = FakeEngine()
    request = engine.add(text(5), max_tokens=8)
    engine.step()
    engine.step()
    assert engine.scheduler.finish(request.request_id, "stop") is request
    assert request.finish_reason == "stop" and len(request.output_token_ids) == 2
    assert engine.scheduler.finish(request.request_id, "stop") is None
    engine.check_all_free()


def test_abort_works_wherever_a_request_is() -> None:
    engine = FakeEngine(usable=4, max_num_seqs=2, budget=6, caching=False)
    running, late, waiting = (engine.add(text(7, i), name=n, max_tokens=6) for i, n in enumerate("abc"))
    engine.step()
    engine.step()
    engine.scheduler.preempt_all()
    assert late.status is RequestStatus.PREEMPTED or late.status is RequestStatus.WAITING
    for request in (late, waiting):
        assert engine.scheduler.abort(request.request_id) is request
        assert request.finish_reason == "abort" and request.finished
    engine.step()
    assert engine.scheduler.abort("a") is running and not engine.scheduler.has_unfinished
    engine.check_all_free()


def test_an_abort_between_schedule_and_commit_drops_that_token_and_no_other() -> None:
    engine = FakeEngine()
    a, b = engine.add(text(5), name="a"), engine.add(text(6, 1), name="b")
    engine.step()
    engine.step(between=lambda step: engine.scheduler.abort("a") and None)
    assert (len(a.output_token_ids), len(b.output_token_ids)) == (1, 2)
    engine.run()
    engine.check_output(a)
    engine.check_output(b)


def test_a_request_preempted_between_schedule_and_commit_draws_the_same_token_again() -> None:
    engine = FakeEngine()
    request = engine.add(text(5), seed=3, max_tokens=5)
    engine.step()
    engine.step(between=lambda step: engine.scheduler.preempt_all())
    assert len(request.output_token_ids) == 1
    engine.run()
    engine.check_output(request)


# --- steps are booked or not -----------------------------------------------------------------------------------------


def test_a_step_that_failed_leaves_nothing_behind() -> None:
    engine = FakeEngine(budget=6)
    a = engine.add(text(3), name="a", max_tokens=5)
    engine.step()
    b = engine.add(text(12, 1), name="b")
    state = engine.pool.state
    first = engine.step(fail=True)
    assert engine.pool.state == state and len(engine.pool._by_hash) == 0
    assert (a.num_computed_tokens, len(a.output_token_ids)) == (3, 1) and b.block_ids == []
    assert shares(engine.step()) == shares(first)
    engine.run()
    engine.check_output(a)
    engine.check_output(b)


def test_a_step_that_failed_can_be_taken_again_after_dropping_a_request() -> None:
    engine = FakeEngine(chunked=False, budget=8)
    engine.add(text(8), name="bad")
    b = engine.add(text(5, 1), name="b")
    engine.step(fail=True)
    engine.scheduler.finish("bad", "error")
    engine.run()
    engine.check_output(b)


def test_steps_are_taken_one_at_a_time_and_booked_once() -> None:
    engine = FakeEngine()
    engine.add(text(5), name="a")
    scheduler = engine.scheduler
    step = scheduler.schedule()
    assert step is not None
    for call in (scheduler.schedule, lambda: scheduler.prime(Request("p", [1, 2]), 2)):
        with pytest.raises(LabkitError, match="still open"):
            call()
    scheduler.commit(step, [1])
    for call in (lambda: scheduler.commit(step, [1]), lambda: scheduler.rollback(step)):
        with pytest.raises(LabkitError, match="not the open step"):
            call()


@pytest.mark.parametrize("sampled", [[None, None], [1, 1], [1], [1, None, None]])
def test_tokens_that_do_not_fit_the_step_book_nothing(sampled: list[int | None]) -> None:
    engine = FakeEngine(budget=8)
    a, b = engine.add(text(4), name="a"), engine.add(text(9, 1), name="b")
    step = engine.scheduler.schedule()
    assert step is not None and [item.samples for item in step.requests] == [True, False]
    with pytest.raises(LabkitError, match="commit"):
        engine.scheduler.commit(step, sampled)
    assert (a.num_computed_tokens, b.num_computed_tokens, a.output_token_ids) == (0, 0, [])
    engine.scheduler.commit(step, engine.forward(step))
    assert (a.num_computed_tokens, b.num_computed_tokens) == (4, 4)


# --- priming ---------------------------------------------------------------------------------------------------------


def test_a_primed_request_decodes_at_once() -> None:
    engine = FakeEngine(max_model_len=64)
    requests = [engine.prime(text(16, i), 16) for i in range(3)]
    assert all(len(request.block_ids) == 4 and request.num_computed_tokens == 16 for request in requests)
    step = engine.scheduler.schedule()
    assert step is not None and step.is_uniform_decode
    assert (step.num_tokens, step.max_query_len, step.max_seq_len) == (3, 1, 17)
    engine.scheduler.commit(step, [1, 2, 3])
    assert [len(r.output_token_ids) for r in requests] == [2, 2, 2], "the stand-in counts"


def test_nothing_of_a_primed_request_enters_the_prefix_cache_until_it_is_computed_in_earnest() -> None:
    engine = FakeEngine()
    request = engine.prime(text(12), 12, max_tokens=12)
    for _ in range(6):
        engine.step()
    other = engine.add(text(13), max_tokens=1)
    step = engine.step()
    assert step is not None and step.num_cached_tokens == 0
    engine.check_output(other)
    engine.scheduler.preempt_all()
    engine.step()
    assert engine.add([*request.token_ids], max_tokens=1) and not request.primed
    step = engine.step()
    assert step is not None and step.num_cached_tokens > 12


@pytest.mark.parametrize(
    ("prompt", "context", "why"),
    [
        pytest.param(8, 9, "knows 8 tokens", id="more context than tokens"),
        pytest.param(8, 0, "knows 8 tokens", id="no context"),
        pytest.param(31, 31, "ends at 32 tokens", id="no room for a decode"),
        pytest.param(24, 24, "6 blocks and a place; 5 blocks and 1 places", id="too few blocks"),
    ],
)
def test_priming_that_cannot_work_is_refused_and_takes_nothing(prompt: int, context: int, why: str) -> None:
    engine = FakeEngine(usable=10, max_num_seqs=2, max_model_len=32)
    engine.prime(text(20), 20)
    with pytest.raises(RequestError, match=why):
        engine.prime(text(prompt), context)
    assert engine.pool.num_free == 5 and len(engine.scheduler.running) == 1
    engine.prime(text(8), 8)
    with pytest.raises(RequestError, match="0 places"):
        engine.prime(text(4), 4)


# --- cases from the field --------------------------------------------------------------------------------------------


def test_c01_recycled_blocks_serve_nobody_under_their_old_text() -> None:
    """C01: a pool of two blocks; A, then B in its blocks, then A again: no hit, and A's own output."""
    engine = FakeEngine(usable=2)
    outputs = []
    for seed in (1, 2, 1):
        request = engine.add(text(8, seed), max_tokens=1)
        engine.run()
        assert request.num_cached_tokens == 0
        outputs.append(request.output_token_ids)
        engine.check_output(request)
    assert outputs[0] == outputs[2]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("prompt", [3, 4, 5])
@pytest.mark.parametrize("at", [4, 5, 6, 8, 9])
def test_c03_blocks_grow_at_the_boundary_and_a_resume_loses_nothing(prompt: int, at: int, caching: bool) -> None:
    """C03: block size 4, prompts around it, preempted at every length. The engine checks ceil(tokens / 4) blocks."""
    engine = FakeEngine(caching=caching)
    request = engine.add(text(prompt), max_tokens=9)
    while request.num_tokens < max(at, prompt + 1):
        engine.step()
    engine.scheduler.preempt_all()
    engine.run()
    assert request.num_preemptions == 1
    engine.check_output(request)


def test_c04_a_request_of_max_model_len_needs_no_block_more() -> None:
    """C04: max_model_len 64 and block size 16: exactly 64 tokens, "length", never a fifth block."""
    engine = FakeEngine(block_size=16, max_model_len=64, usable=8)
    request = engine.add(text(50), max_tokens=64)
    widest = 0
    while engine.scheduler.has_unfinished:
        engine.step(between=lambda step: None)
        widest = max(widest, max(-(-step.max_seq_len // 16) for step in engine.steps))
    assert (request.num_tokens, request.finish_reason, widest) == (64, "length", 4)
    after = engine.add(text(3, 1), max_tokens=1)
    step = engine.step()
    assert step is not None and step.max_seq_len == 3
    engine.check_output(after)


def test_c05_a_request_that_waits_for_blocks_pins_none_of_its_hits() -> None:
    """C05: a waiting request finds two cached blocks but too few new ones: reference counts stay as they were."""
    engine = FakeEngine(usable=4)
    engine.add(text(8), max_tokens=1)
    engine.run()
    engine.add(text(7, 1), name="busy", max_tokens=2)
    engine.step()
    waiting = engine.add([*text(8), 1, 2], name="waiting", max_tokens=1)
    before = list(engine.pool.ref_counts)
    engine.add([*text(8), *text(6, 2)], name="behind", max_tokens=1)
    assert engine.pool.num_free == 2
    during: list[list[int]] = []
    step = engine.step(between=lambda step: during.append(list(engine.pool.ref_counts)))
    assert list(shares(step)) == ["busy"] and during == [before]
    engine.run()
    assert waiting.num_cached_tokens == 8
    engine.check_output(waiting)


def test_c05_the_cached_beginning_is_gone_so_nothing_behind_it_counts() -> None:
    """C05: the first block of a cached prefix was evicted, the second is still there."""
    engine = FakeEngine(usable=8)
    first = engine.add(text(12), name="a", max_tokens=1)
    engine.run()
    entries = sorted(engine.pool._entries.values(), key=lambda e: len(e.tokens) and _depth(e))
    engine.pool._uncache(entries[0])
    again = engine.add([*text(12), 1], max_tokens=1)
    engine.run()
    assert again.num_cached_tokens == 0 and first.num_cached_tokens == 0
    engine.check_output(again)


def _depth(entry: Any) -> int:
    return 0 if entry.parent is None else 1 + _depth(entry.parent)


def test_c06_a_colliding_hash_gives_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """C06: the hash is a constant; prompts that differ in the first block share nothing, and outputs are right."""
    monkeypatch.setattr(hashing, "block_hash", lambda parent, tokens: b"same")
    engine = FakeEngine()
    a = engine.add(text(8, 1), max_tokens=3)
    engine.run()
    b = engine.add(text(8, 2), max_tokens=3)
    engine.run()
    assert b.num_cached_tokens == 0
    engine.check_output(a)
    engine.check_output(b)


@pytest.mark.parametrize("end", ["abort", "rollback and abort", "preempt", "finish"])
def test_c07_what_was_never_computed_is_never_found(end: str) -> None:
    """C07: a 12-token prompt is scheduled and given up before its forward is booked; then the same prompt comes."""
    engine = FakeEngine()
    first = engine.add(text(12), name="a")
    step = engine.scheduler.schedule()
    assert step is not None
    if end == "rollback and abort":
        engine.scheduler.rollback(step)
        engine.scheduler.abort("a")
    else:
        {
            "abort": lambda: engine.scheduler.abort("a"),
            "preempt": engine.scheduler.preempt_all,
            "finish": lambda: engine.scheduler.finish("a", "error"),
        }[end]()
        engine.scheduler.commit(step, [1])
        engine.scheduler.abort("a")
    engine.check_all_free()
    assert first.output_token_ids == []
    second = engine.add(text(12), name="a")
    engine.run()
    assert second.num_cached_tokens == 0
    engine.check_output(second)


@pytest.mark.parametrize("prompt, refused", [(62, False), (63, False), (64, True), (65, True)])
def test_c45_prompt_at_max_model_len(prompt: int, refused: bool) -> None:
    """C45: max_model_len 64, budget 16: 64 tokens are refused at once; 63 give exactly one token, in four steps."""
    engine = FakeEngine(max_model_len=64, budget=16)
    if refused:
        with pytest.raises(RequestError, match="max_model_len=64"):
            engine.add(text(prompt))
        return
    request = engine.add(text(prompt), max_tokens=9)
    engine.run(limit=4 + 64 - prompt)
    assert len(request.output_token_ids) == 64 - prompt and request.finish_reason == "length"
    engine.check_output(request)


def test_c46_a_prompt_above_the_budget_is_refused_with_chunking_off() -> None:
    """C46: budget 8: 9 tokens are refused at once and the others go on; 8 run."""
    engine = FakeEngine(budget=8, chunked=False)
    other = engine.add(text(8))
    with pytest.raises(RequestError, match="chunked prefill is off"):
        engine.add(text(9))
    engine.run()
    engine.check_output(other)


def test_c46_more_decodes_than_budget_take_turns() -> None:
    """C46: ten decodes and a budget of 8: all get on within any two steps, and none gets ahead by more than one."""
    engine = FakeEngine(budget=8)
    requests = [engine.add([i + 1], max_tokens=20) for i in range(10)]
    engine.set_budget(10)
    engine.step()
    engine.set_budget(8)
    for _ in range(4):
        before = {r: len(r.output_token_ids) for r in requests}
        pair = [engine.step(), engine.step()]
        assert all(step is not None and step.num_tokens == 8 for step in pair)
        assert all(len(r.output_token_ids) > before[r] for r in requests)
    lengths = [len(r.output_token_ids) for r in requests]
    assert max(lengths) - min(lengths) <= 1
    engine.run()


def test_c46_a_long_prefill_does_not_starve_decodes_nor_they_it() -> None:
    """C46: three decodes and a prefill of 40 tokens under a budget of 2: everybody is served in any two steps."""
    engine = FakeEngine(budget=8)
    requests = [engine.add([i + 1], max_tokens=40) for i in range(3)] + [engine.add(text(40, 3), max_tokens=1)]
    engine.step()
    engine.set_budget(2)
    for _ in range(5):
        served = Counter([*shares(engine.step()), *shares(engine.step())])
        assert all(served[request.request_id] == 1 for request in requests)
    engine.run()


@pytest.mark.parametrize("chunked", [True, False])
def test_c46_a_budget_of_one_works(chunked: bool) -> None:
    engine = FakeEngine(budget=1, chunked=chunked)
    requests = [engine.add(text(6 if chunked else 1, i), max_tokens=3) for i in range(3)]
    engine.run()
    for request in requests:
        engine.check_output(request)


@pytest.mark.parametrize("chunk", [1, 4, 5, 12, 13, 64])
def test_c47_chunks_do_not_sample_before_the_prompt_is_complete(chunk: int) -> None:
    """C47: a prompt of 13, sampled with a seed: the same tokens for every chunk size, one draw per token."""
    engine = FakeEngine(budget=chunk, caching=False)
    request = engine.add(text(13), max_tokens=5, seed=0)
    steps = engine.run()
    chunks = -(-13 // chunk)
    assert [item.samples for step in steps for item in step.requests] == [False] * (chunks - 1) + [True] * 5
    assert engine.draws[request] == 5
    engine.check_output(request)


@pytest.mark.parametrize("caching", [True, False])
def test_c48_preemption_repeats_no_draw(caching: bool) -> None:
    """C48: sampled with seeds, in a pool that preempts and in one that does not: the same tokens."""

    def serve(usable: int) -> tuple[list[list[int]], int]:
        engine = FakeEngine(usable=usable, caching=caching)
        requests = [engine.add(text(5, i), max_tokens=14, seed=i) for i in range(4)]
        engine.run()
        for request in requests:
            engine.check_output(request)
        return [r.output_token_ids for r in requests], sum(r.num_preemptions for r in requests)

    (crowded, preemptions), (roomy, none) = serve(8), serve(64)
    assert crowded == roomy and preemptions > 0 and none == 0


def test_c49_a_bad_request_is_refused_alone() -> None:
    """C49: empty prompts and live ids are refused; ids are free again after an end; the others never notice."""
    engine = FakeEngine()
    other = engine.add(text(6), name="a", max_tokens=6)
    engine.step()
    for prompt, name, why in (([], "b", "empty"), (text(5), "a", "same id|has that id")):
        with pytest.raises(RequestError, match=why):
            engine.add(prompt, name=name)
    assert engine.scheduler.abort("unknown") is None
    assert engine.scheduler.get("a") is other and engine.scheduler.get("b") is None
    engine.run()
    engine.check_output(other)
    again = engine.add(text(6), name="a")
    engine.step()
    engine.scheduler.abort("a")
    third = engine.add(text(7, 1), name="a")
    engine.run()
    assert again.finish_reason == "abort" and third.finish_reason == "length"
    engine.check_output(third)


def test_c49_an_id_used_again_before_the_commit_is_another_request() -> None:
    """C49: abort races with re-use; the open step's token belongs to the aborted request and is dropped."""
    engine = FakeEngine()
    old = engine.add(text(6), name="a")
    step = engine.scheduler.schedule()
    assert step is not None
    engine.scheduler.abort("a")
    new = engine.add(text(9, 1), name="a")
    assert engine.scheduler.commit(step, [1]) == []
    assert old.output_token_ids == new.output_token_ids == [] and new.status is RequestStatus.WAITING
    engine.run()
    engine.check_output(new)


@pytest.mark.parametrize(
    ("eos", "params", "length", "reason"),
    [
        pytest.param((), {}, 6, "length", id="no ids"),
        pytest.param((1,), {}, 2, "stop", id="the first of the model's"),
        pytest.param((3,), {}, 4, "stop", id="the second of the model's"),
        pytest.param((1, 3), {"ignore_eos": True}, 6, "length", id="ignored"),
        pytest.param((1,), {"ignore_eos": True, "stop_token_ids": (3,)}, 4, "stop", id="own id, eos ignored"),
        pytest.param((3,), {"stop_token_ids": (1,)}, 2, "stop", id="union"),
        pytest.param((5,), {}, 6, "stop", id="exactly at max_tokens"),
        pytest.param((0, 5), {"min_tokens": 2}, 6, "stop", id="not before min_tokens"),
    ],
)
def test_c50_ends(eos: tuple[int, ...], params: dict[str, Any], length: int, reason: str) -> None:
    """C50: the model emits 0, 1, 2, 3, 4, 5 and `max_tokens` is 6."""
    scheduler = FakeEngine().scheduler
    request = Request("a", [9], SamplingParams(max_tokens=6, **params), eos)
    scheduler.add(request)
    for token in range(6):
        step = scheduler.schedule()
        assert step is not None
        if scheduler.commit(step, [token]):
            break
    assert (len(request.output_token_ids), request.finish_reason) == (length, reason)
    assert not scheduler.has_unfinished and scheduler.pool.num_free == scheduler.pool.usable


# --- cost ------------------------------------------------------------------------------------------------------------


def test_a_step_costs_the_same_in_a_large_pool() -> None:
    """Counted in executed lines of Python, not in time."""

    def lines(usable: int) -> int:
        engine = FakeEngine(usable=usable, max_model_len=512)
        for i in range(4):
            engine.add(text(40, i), max_tokens=20)
        for _ in range(3):
            engine.step()
        count = 0

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        scheduler = engine.scheduler
        previous = sys.gettrace()
        for _ in range(8):
            sys.settrace(trace)
            step = scheduler.schedule()
            sys.settrace(previous)
            assert step is not None
            sampled = engine.forward(step)
            sys.settrace(trace)
            scheduler.commit(step, sampled)
            sys.settrace(previous)
        return count

    assert lines(100) == lines(10_000) > 0


@pytest.mark.parametrize("field, value", [("block_size", 8), ("enable_prefix_caching", False)])
def test_limits_and_pool_must_agree(field: str, value: Any) -> None:
    limits = {"block_size": 4, "enable_prefix_caching": True, field: value}
    with pytest.raises(ConfigError, match=field):
        Scheduler(SchedulerLimits(4, 8, 64, **limits), BlockPool(8, 4))


def test_the_fake_model_sees_every_position() -> None:
    """The tests above rest on it: change any token of the context, and the next one changes (nearly always)."""
    base, _ = reference(text(12), SamplingParams(max_tokens=6), (), 64)
    for i in range(12):
        other = text(12)
        other[i] += 1
        assert reference(other, SamplingParams(max_tokens=6), (), 64)[0] != base
    assert len({next_token([1, 2], seed=0, drawn=i) for i in range(20)}) > 5
