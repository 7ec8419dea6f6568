"""Tables of the rules that follow from the limits alone."""

from __future__ import annotations

import pytest

from labkit.config import SamplingParams
from labkit.errors import RequestError
from labkit.scheduling.request import Request, RequestStatus
from labkit.scheduling.rules import chunk_size, longest_request, refuse_hopeless
from labkit.scheduling.step import SchedulerLimits


def limits(budget: int = 8, threshold: int = 0, chunked: bool = True, max_model_len: int = 64) -> SchedulerLimits:
    return SchedulerLimits(4, budget, max_model_len, 4, threshold, chunked)


@pytest.mark.parametrize(
    ("owed", "budget", "threshold", "chunked", "expected"),
    [
        pytest.param(1, 8, 0, True, 1, id="a decode"),
        pytest.param(5, 8, 0, True, 5, id="a prompt that fits"),
        pytest.param(20, 8, 0, True, 8, id="a chunk as large as a step"),
        pytest.param(20, 3, 0, True, 3, id="a chunk of what decodes left"),
        pytest.param(20, 8, 5, True, 5, id="the threshold caps a chunk"),
        pytest.param(20, 3, 5, True, 3, id="the budget caps it further"),
        pytest.param(4, 8, 5, True, 4, id="a prompt below the threshold"),
        pytest.param(1, 8, 1, True, 1, id="a decode under the smallest threshold"),
        pytest.param(1, 0, 0, True, 0, id="no budget"),
        pytest.param(8, 8, 0, False, 8, id="chunking off, a prompt that fits"),
        pytest.param(8, 7, 0, False, 0, id="chunking off, a prompt waits for a step with room"),
        pytest.param(8, 8, 3, False, 8, id="chunking off, the threshold is off too"),
        pytest.param(9, 8, 0, False, 8, id="chunking off, a recompute that outgrew a step is split"),
        pytest.param(9, 2, 0, False, 2, id="also beside decodes"),
        pytest.param(9, 0, 0, False, 0, id="chunking off, no budget"),
        pytest.param(1, 1, 0, False, 1, id="chunking off, a decode"),
    ],
)
def test_chunk_size(owed: int, budget: int, threshold: int, chunked: bool, expected: int) -> None:
    assert chunk_size(owed, budget, limits(8, threshold, chunked)) == expected


@pytest.mark.parametrize(
    ("max_model_len", "usable", "expected"),
    [(64, 100, 64), (64, 16, 64), (65, 16, 65), (66, 16, 65), (64, 1, 5)],
)
def test_longest_request(max_model_len: int, usable: int, expected: int) -> None:
    """A pool of 16 blocks of 4 computes 64 tokens, and the 65th is sampled from them."""
    assert longest_request(limits(max_model_len=max_model_len), usable) == expected


@pytest.mark.parametrize(
    ("prompt", "usable", "chunked", "why"),
    [
        pytest.param(0, 100, True, "the prompt is empty", id="empty"),
        pytest.param(64, 100, True, "max_model_len=64 leaves no room to generate", id="as long as max_model_len"),
        pytest.param(63, 100, True, None, id="one token of room"),
        pytest.param(9, 2, True, r"the KV cache holds 8 tokens \(2 blocks of 4\)", id="more than the pool holds"),
        pytest.param(8, 2, True, None, id="as much as the pool holds"),
        pytest.param(9, 100, False, "chunked prefill is off .*max_num_batched_tokens=8", id="chunking off, too long"),
        pytest.param(8, 100, False, None, id="chunking off, as much as the budget"),
    ],
)
def test_what_can_never_run_is_refused(prompt: int, usable: int, chunked: bool, why: str | None) -> None:
    request = Request("a", [1] * prompt, SamplingParams())
    if why is None:
        refuse_hopeless(request, limits(chunked=chunked), usable)
    else:
        with pytest.raises(RequestError, match=why) as caught:
            refuse_hopeless(request, limits(chunked=chunked), usable)
        assert caught.value.try_


def test_output_counts_when_a_request_comes_from_another_scheduler() -> None:
    request = Request("a", [1] * 6, SamplingParams(), output_token_ids=[2, 3])
    refuse_hopeless(request, limits(), 2)
    with pytest.raises(RequestError, match="KV cache holds 4"):
        refuse_hopeless(request, limits(), 1)
    with pytest.raises(RequestError, match="max_model_len=8"):
        refuse_hopeless(request, limits(max_model_len=8), 2)


def test_a_finished_request_does_not_run_again() -> None:
    request = Request("a", [1])
    request.status, request.finish_reason = RequestStatus.FINISHED, "stop"
    with pytest.raises(RequestError, match="finished"):
        refuse_hopeless(request, limits(), 4)
