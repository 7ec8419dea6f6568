"""Waits of requests: computed from made-up steps with known answers, and rows that are checked like every recording."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from labkit.engine.report import RequestOutput, StepReport, Usage
from labkit.errors import LabkitError
from labkit.measure.library import load_any
from labkit.measure.provenance import Kind, collect
from labkit.measure.requests import prompt_steps, request_times, summarize, waits_in
from labkit.measure.storage import RecordingError
from labkit.measure.traffic import RequestRecording, RequestRow, load_requests


def step(begin: float, wall: float, ran: dict[str, int], given: dict[str, int], over: str = "") -> StepReport:
    """A step from `begin` for `wall` ms; `given` says how many tokens a request has after it."""
    outputs = tuple(
        RequestOutput(name, (1,), tuple(range(n)), "", "", "length" if name == over else None, Usage(1, n))
        for name, n in given.items()
    )
    return StepReport(
        1, "NONE", 1, 1, 1, 0, 1, 1, "TORCH_SDPA", wall, {}, scheduled=ran, outputs=outputs, begun_at_ms=begin
    )


#: a decodes; b arrives at 112 and takes the third and fourth step for its prompt.
STEPS = [
    step(100, 5, {"a": 9}, {"a": 1}),
    step(106, 2, {"a": 1}, {"a": 2}),
    step(115, 20, {"a": 1, "b": 64}, {"a": 3}),
    step(136, 21, {"a": 1, "b": 32}, {"a": 4, "b": 1}),
    step(158, 2, {"a": 1, "b": 1}, {"a": 5, "b": 2}, over="b"),
    step(161, 2, {"a": 1}, {"a": 6}, over="a"),
]


def test_every_time_of_a_request() -> None:
    times = request_times(STEPS, {"a": 99.0, "b": 112.0, "never": 120.0})
    a, b = times["a"], times["b"]
    assert (a.queue_ms, a.ttft_ms, a.e2e_ms, a.finish_reason) == (1, 6, 64, "length")
    assert a.itl_ms == (3, 27, 22, 3, 3) and a.token_steps == (0, 1, 2, 3, 4, 5)
    assert (b.queue_ms, b.ttft_ms, b.itl_ms, b.e2e_ms) == (3, 45, (3,), 48)
    assert times["never"].queue_ms is times["never"].ttft_ms is times["never"].e2e_ms is None
    assert times["never"].itl_ms == ()


def test_spikes_are_the_waits_with_a_step_of_the_prompt_in_them() -> None:
    times = request_times(STEPS, {"a": 99.0, "b": 112.0})
    busy = prompt_steps(STEPS, times, ["b"])
    assert busy == {2, 3}, "the step that decodes b is none of its prompt's"
    assert waits_in(times["a"], busy) == (1, 2)
    assert [times["a"].itl_ms[i] for i in waits_in(times["a"], busy)] == [27, 22]


def test_a_wait_that_spans_steps_without_the_request_is_one_wait() -> None:
    """Prompts first: a has no tokens in the two steps of the prompt, so its next wait holds both."""
    steps = [
        step(100, 2, {"a": 1}, {"a": 1}),
        step(103, 20, {"b": 64}, {}),
        step(124, 20, {"b": 64}, {"b": 1}, over="b"),
        step(145, 2, {"a": 1}, {"a": 2}),
        step(148, 2, {"a": 1}, {"a": 3}, over="a"),
    ]
    times = request_times(steps, {"a": 100.0, "b": 102.5})
    assert times["a"].itl_ms == (45, 3)
    assert waits_in(times["a"], prompt_steps(steps, times, ["b"])) == (0,)


def test_tokens_of_one_step_count_once_and_a_failed_request_gives_none() -> None:
    steps = [step(100, 2, {"a": 1, "b": 1}, {"a": 3}), step(103, 2, {"a": 1, "b": 1}, {"a": 4, "b": 0}, over="b")]
    times = request_times(steps, {"a": 100.0, "b": 100.0})
    assert times["a"].itl_ms == (3,)
    assert times["b"].token_ms == () and times["b"].ttft_ms is None and times["b"].e2e_ms == 5


@pytest.mark.parametrize(
    ("steps", "arrivals", "says"),
    [
        ([step(0, 2, {"a": 1}, {})], {"a": 0.0}, "no stamp"),
        ([STEPS[1], STEPS[0]], {"a": 0.0}, "in front of it ended"),
        ([dataclasses.replace(STEPS[0], wall_ms=7.0), STEPS[1]], {"a": 0.0}, "in front of it ended"),
        (STEPS, {"a": 101.0}, "ran at 100.000 ms and arrived at 101.000 ms"),
    ],
)
def test_what_cannot_be_is_refused(steps: list[StepReport], arrivals: dict[str, float], says: str) -> None:
    with pytest.raises(LabkitError, match=says):
        request_times(steps, arrivals)


def test_percentiles_of_waits_against_a_sorted_list() -> None:
    waits = np.random.default_rng(0).permutation(np.arange(1.0, 102.0))
    found = summarize(waits.tolist())
    assert (found.p50, found.p99, found.worst, found.n) == (51, 100, 101, 101)
    for bad in ([], [1.0, float("nan")]):
        with pytest.raises(LabkitError):
            summarize(bad)


# --- rows ----------------------------------------------------------------------------------------------------------


def make_row(scheduling: str = "whole", spike: float = 40.0, ttft: float = 45.0, **changes: Any) -> RequestRow:
    """Fifty runs of nine waits of about 2 ms, the fourth and fifth about `spike` ms."""
    rng = np.random.default_rng(len(scheduling) + int(spike))
    runs, tokens, during = 50, 10, (3, 4)
    waits = rng.normal(2, 0.05, (runs, tokens - 1))
    waits[:, list(during)] = rng.normal(spike, spike / 50, (runs, 2))
    flat = tuple(round(float(ms), 4) for ms in waits.ravel())
    first = tuple(round(float(ms), 4) for ms in rng.normal(ttft, ttft / 50, runs))
    p10, p50, p90 = (float(p) for p in np.percentile(first, (10, 50, 90)))
    values: dict[str, Any] = dict(
        model="m", dtype="float32", backend="TORCH_SDPA", backend_version="1", requested_mode="NONE", compile="NONE",
        weights="random", scheduling=scheduling, prefill_first=False, chunk=0, max_num_batched_tokens=4096, decodes=4,
        context=32, prompt=2048, prompts=1, lead=4, tokens=tokens, runs=runs, n=runs, samples_ttft_ms=first,
        p10_ttft_ms=p10, p50_ttft_ms=p50, p90_ttft_ms=p90, samples_queue_ms=(0.01,) * runs, samples_itl_ms=flat,
        during=during, p50_itl_ms=float(np.median(flat)), p99_itl_ms=float(np.percentile(flat, 99)),
        worst_itl_ms=max(flat),
    )  # fmt: skip
    return RequestRow(**{**values, **changes})


def make_recording(*rows: RequestRow, kind: str = "LIVE") -> RequestRecording:
    return RequestRecording(collect(kind, "labkit bench requests", order="in turns", n=50, device="cpu"), rows)


def test_spikes_and_the_other_waits_come_apart() -> None:
    row = make_row()
    row.check()
    assert (row.spikes.n, row.others.n) == (100, 350)
    assert row.spikes.p50 == pytest.approx(40, rel=0.02) and row.others.worst < 3
    assert len(row.waits) == 50 and row.waits[7] == row.samples_itl_ms[63:72]


def test_a_recording_goes_to_a_file_and_back_and_becomes_recorded(tmp_path: Path) -> None:
    made = make_recording(make_row(), make_row("chunk 64", 10))
    path = made.save(tmp_path / "requests.json.gz")
    read = load_requests(path)
    assert read.rows == made.rows and read.provenance.kind is Kind.RECORDED
    assert load_any(path) == read
    assert json.loads(gzip.decompress(path.read_bytes()))["table"] == "requests"


DAMAGE: dict[str, Callable[[RequestRow], RequestRow]] = {
    "p50_ttft_ms": lambda r: dataclasses.replace(r, p50_ttft_ms=r.p50_ttft_ms + 0.01),
    "p99_itl_ms": lambda r: dataclasses.replace(r, p99_itl_ms=r.p99_itl_ms - 0.01),
    "worst_itl_ms": lambda r: dataclasses.replace(r, worst_itl_ms=r.p50_itl_ms),
    "does not hold 9 waits": lambda r: dataclasses.replace(r, samples_itl_ms=r.samples_itl_ms[1:]),
    "not a time": lambda r: dataclasses.replace(r, samples_itl_ms=(-1.0, *r.samples_itl_ms[1:])),
    "does not name some of 9 waits": lambda r: dataclasses.replace(r, during=(3, 9)),
    "does not name": lambda r: dataclasses.replace(r, during=()),
    "waited longer than": lambda r: dataclasses.replace(r, samples_queue_ms=(99.0, *r.samples_queue_ms[1:])),
    "runs of 2 prompts": lambda r: dataclasses.replace(r, prompts=2),
}


@pytest.mark.parametrize("says", DAMAGE)
def test_a_row_whose_numbers_disagree_is_refused(says: str) -> None:
    data = make_recording(make_row()).as_dict()
    RequestRecording.from_dict(data)
    damaged = {**data, "rows": [DAMAGE[says](make_row()).as_dict()]}
    with pytest.raises(RecordingError, match=says):
        RequestRecording.from_dict(damaged)


def test_what_is_no_measurement_is_not_stored(tmp_path: Path) -> None:
    row = make_row()
    sorted_ttft = dataclasses.replace(row, samples_ttft_ms=tuple(sorted(row.samples_ttft_ms)))
    few = make_row(runs=1)
    few = dataclasses.replace(
        few, n=1, samples_ttft_ms=(45.0,), p10_ttft_ms=45.0, p50_ttft_ms=45.0, p90_ttft_ms=45.0,
        samples_queue_ms=(0.01,), samples_itl_ms=row.waits[0], p50_itl_ms=float(np.median(row.waits[0])),
        p99_itl_ms=float(np.percentile(row.waits[0], 99)), worst_itl_ms=max(row.waits[0]),
    )  # fmt: skip
    few.check()
    for rows, says in (((sorted_ttft,), "sorted"), ((row, row), "repeats"), ((few,), "has 1 runs")):
        with pytest.raises(RecordingError, match=says):
            make_recording(*rows).save(tmp_path / "x.json.gz")


def test_schedulings_are_compared_run_by_run_within_one_traffic() -> None:
    rows = make_row("whole"), make_row("same", 40.1, 45.1), make_row("chunk 64", 10, 90), make_row("x", 5, decodes=9)
    pairs = make_recording(*rows).pairs(base="whole")
    assert [pair.first.scheduling for pair in pairs] == ["same", "chunk 64"], "another traffic is another comparison"
    same, chunk = pairs
    assert not same.worst.shown and not same.ttft.shown and "no difference shown" in same.sentence
    assert chunk.worst.value == pytest.approx(0.25, rel=0.05) and chunk.ttft.value == pytest.approx(2, rel=0.05)
    assert chunk.worst.shown and chunk.worst.kind is Kind.LIVE and "chunk 64 against whole" in chunk.sentence
