"""A step taken apart: synthetic steps whose parts are known, the sum of the host's, what overlaps and what waits."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from labkit.engine.report import PHASES, StepReport
from labkit.errors import LabkitError
from labkit.measure.decompose import decompose, decompose_row, decompositions, overlap
from labkit.measure.provenance import Kind
from labkit.measure.recordings import shipped
from labkit.measure.stats import summary
from tests.measure.test_recordings import row
from tests.measure.test_stats import linear_percentile


def step(phases: dict[str, float], *, gap: float = 0.0, device: float | None = None, **changes) -> StepReport:
    values = dict(step_id=1, mode="FULL", size=8, num_tokens=8, num_reqs=8, num_padded=0, max_query_len=1,
                  max_seq_len=9, backend="TRITON_ATTN")  # fmt: skip
    wall = (sum(phases.values()) + gap) / 1e3
    return StepReport(**{**values, **changes}, wall_ms=wall, phases_us=phases, device_us=device)


def test_the_hosts_parts_are_the_phases_in_order_and_what_is_in_none() -> None:
    rng = random.Random(3)
    steps = [step({name: rng.uniform(1, 100) for name in PHASES}, gap=rng.uniform(0, 9)) for _ in range(41)]
    found = decompose(steps)
    assert [part.name for part in found.host] == [*PHASES, "between"] and found.forward is None
    assert (found.hidden_us, found.waiting_us, found.bound, found.n) == (None, None, "", 41)
    for part in found.host:
        values = [s.wall_ms * 1e3 - s.host_us if part.name == "between" else s.phases_us[part.name] for s in steps]
        for q, value in ((0.1, part.p10_us), (0.5, part.p50_us), (0.9, part.p90_us)):
            assert value == pytest.approx(linear_percentile(values, q))
    assert found.wall == summary([s.wall_ms * 1e3 for s in steps])
    same = decompose([steps[0]] * 5)
    assert same.serial_us == pytest.approx(same.wall.p50), "of equal steps the parts add up to the whole"


def test_warm_up_is_left_out() -> None:
    steps = [step({"launch": 9000.0}), step({"launch": 8000.0}), *(step({"launch": 10.0}) for _ in range(7))]
    found = decompose(steps, warmup=2)
    assert found.n == 7 and found.host[0].p90_us == 10.0
    with pytest.raises(LabkitError, match="no step is left"):
        decompose(steps, warmup=9)


@pytest.mark.parametrize(
    ("launch", "sample", "device", "hidden", "waiting", "bound"),
    [
        (1000, 50, 300, 300, 0, "host"),  # the device is done before the host has started everything
        (20, 900, 800, 20, 780, "device"),  # one graph launch, then the host waits
        (20, 500, 800, 20, 500, "device"),  # more than the phase that waits can hold: never more than the phase
        (400, 400, 420, 400, 20, "host"),  # about equal: within a tenth the host is the slower one
        (0, 0, 0, 0, 0, "host"),
    ],
)
def test_what_overlaps_and_what_is_waited_for(launch, sample, device, hidden, waiting, bound) -> None:
    assert overlap(device, {"launch": launch, "sample": sample}) == (hidden, waiting)
    found = decompose([step({"launch": launch, "sample": sample}, device=device)] * 3)
    assert (found.hidden_us, found.waiting_us, found.bound) == (hidden, waiting, bound)
    assert hidden + waiting <= device or device == 0


def test_steps_of_two_configurations_are_not_taken_apart_together() -> None:
    with pytest.raises(LabkitError, match="ran as FULL 8, NONE 8"):
        decompose([step({"launch": 1.0}), step({"launch": 1.0}, mode="NONE")])
    with pytest.raises(LabkitError, match="is not a time"):
        overlap(-1.0, {})


def test_one_step_without_a_device_time_leaves_the_device_out() -> None:
    found = decompose([step({"launch": 5.0}, device=9.0), step({"launch": 5.0})])
    assert found.forward is None and found.waiting_us is None


def test_a_row_is_taken_apart_by_the_medians_it_keeps() -> None:
    one = row(8, "FULL", phases_us={"sample": 400.0, "launch": 100.0}, host_us=500.0, device_us=300.0)
    found = decompose_row(one, Kind.RECORDED)
    assert [(p.name, p.p50_us, p.p10_us) for p in found.host[:2]] == [("launch", 100.0, None), ("sample", 400.0, None)]
    assert found.host[-1].p50_us == pytest.approx(one.p50_ms * 1e3 - 500)
    assert (found.forward.p50_us, found.hidden_us, found.waiting_us) == (300.0, 100.0, 200.0)
    assert found.n == one.n and found.kind is Kind.RECORDED and "RECORDED" in found.sentence
    assert "RECORDED" in found.sentence and f"n={one.n}" in found.sentence
    assert dataclasses.asdict(decompose_row(dataclasses.replace(one, device_us=None), "LIVE"))["forward"] is None


def test_every_shipped_row_can_be_taken_apart_and_its_parts_are_within_the_step() -> None:
    for recording in shipped():
        for one, found in zip(recording.rows, decompositions(recording), strict=True):
            assert found.kind is Kind.RECORDED and json.dumps(found.as_dict(), allow_nan=False)
            assert found.serial_us == pytest.approx(one.p50_ms * 1e3, rel=0.1), "medians of parts, of nearly the whole"
            assert found.hidden_us + found.waiting_us <= one.device_us + 1e-6
            assert found.sentence.startswith(f"{one.model}, {one.backend} {one.mode}")
