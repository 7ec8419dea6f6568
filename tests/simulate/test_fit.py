"""The constants follow from the recording, and the model of a step is as far off as its docstring says, no further."""

from __future__ import annotations

import dataclasses
import statistics

import pytest

from labkit.errors import LabkitError
from labkit.measure import recordings
from labkit.measure.recordings import Row, load
from labkit.models.shapes import SHAPES
from labkit.simulate.fit import Comparison, compare, decode_rows, fit, model_of, slope
from labkit.simulate.step import H200, DecodeModel, Machine, simulate_step

FITTED, HELD_OUT = "smollm2-135m", "qwen3-0.6b"


@pytest.fixture(scope="module")
def rows() -> tuple[Row, ...]:
    """The recording that the constants are from, by its name: others that ship later say nothing about them."""
    return load(recordings.SHIPPED / "h200.json.gz").rows


@pytest.fixture(scope="module")
def compared(rows: tuple[Row, ...]) -> list[Comparison]:
    return compare(rows, SHAPES)


def test_the_defaults_are_the_fit_of_one_model(rows: tuple[Row, ...]) -> None:
    found = fit(rows, SHAPES[FITTED])
    for field in dataclasses.fields(Machine):
        mine, theirs = getattr(H200, field.name), getattr(found, field.name)
        assert mine == (pytest.approx(theirs, rel=0.005) if isinstance(theirs, float) else theirs), field.name


def test_within_20_percent_of_what_was_recorded(compared: list[Comparison]) -> None:
    """The docstring's counts. A row that is off is one where the recorded host was slow: longer, never shorter."""
    assert len(compared) == 172
    for name in (FITTED, HELD_OUT):
        mine = [c for c in compared if c.row.model == name]
        assert sum(c.within for c in mine) >= 80, name
        assert abs(statistics.median(c.off for c in mine)) < 0.03, name
    assert all(c.off < 0 for c in compared if not c.within)
    assert sum(abs(c.device_off) <= 0.2 for c in compared) >= 167


def test_full_rows_that_are_off_had_a_slow_host(compared: list[Comparison]) -> None:
    """With the row's own host phases in place of the constants' line they are within 5 %."""
    off = [c for c in compared if not c.within and c.row.mode == "FULL"]
    assert len(off) == 7
    for c in off:
        around = 1e3 * c.row.p50_ms - c.row.phases_us["launch"] - c.row.phases_us["sample"]
        line = H200.host_fixed_us + H200.host_request_us * c.row.batch
        assert 1.6 < around / line < 1.9
        assert abs((c.simulated_ms + (around - line) / 1e3) / c.row.p50_ms - 1) < 0.05


def row_of(model: DecodeModel, machine: Machine, mode: str) -> Row:
    """A row as the machine of these constants would have been recorded: a synthetic one with known answers."""
    step = simulate_step(model, machine, mode=mode)
    spans = step.timeline.host
    around = machine.host_fixed_us + machine.host_request_us * model.batch
    cut = next(i for i, s in enumerate(spans) if "largest logit" in s.name)
    launching = spans[cut].begin_us - around / 2
    ms = step.wall_ms
    sampling = step.timeline.wall_us - around - launching
    num_bytes = 1e9
    return Row(
        model.shape.name, "bfloat16", model.backend, None, mode, mode, model.batch, model.batch, model.context, 1,
        "NONE", True, ms, ms, ms, 1, (ms,), around + launching + sampling, step.device_us, step.timeline.launches,
        step.timeline.graph_launches, dict(machine.launch_us), num_bytes / ms / 1e6,
        num_bytes / machine.copy_gb_s / 1e6, 1.0, 1.0, {"launch": launching, "sample": sampling},
    )  # fmt: skip


def test_constants_come_back_from_synthetic_rows() -> None:
    """A machine unlike the H200 is found again in what it would have been recorded as."""
    truth = Machine(
        copy_gb_s=1800.0, kernel_us=4.0, launch_factor=0.6, graph_node_us=0.3, host_fixed_us=90.0, host_request_us=4.0,
        sync_us=50.0, sdpa_layer_us=300.0, sdpa_traffic=5.0, sdpa_kernel_us=1.5,
    )  # fmt: skip
    rows = [
        row_of(DecodeModel(SHAPES[FITTED], batch, 512, backend=backend, max_model_len=1024), truth, mode)
        for backend in ("TRITON_ATTN", "TORCH_SDPA") for mode in ("NONE", "FULL") for batch in (1, 4, 16, 64)
    ]  # fmt: skip
    found = fit(rows, SHAPES[FITTED])
    for name in ("copy_gb_s", "launch_factor", "host_request_us", "host_fixed_us", "kernel_us", "sdpa_layer_us",
                 "sdpa_traffic", "sdpa_kernel_us", "sync_us", "graph_node_us"):  # fmt: skip
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.05), name


def test_rows_that_the_model_does_not_speak_of_are_left_out(rows: tuple[Row, ...]) -> None:
    one = rows[0]
    others = [
        dataclasses.replace(one, compile="VLLM_COMPILE"), dataclasses.replace(one, chunk=64),
        dataclasses.replace(one, emulated=True), dataclasses.replace(one, device_us=None),
        dataclasses.replace(one, backend="FLASHINFER"), dataclasses.replace(one, query_len=2),
    ]  # fmt: skip
    assert decode_rows([one, *others]) == [one]
    assert compare([one], {}) == []
    assert model_of(dataclasses.replace(one, context=4096), SHAPES[FITTED]).max_model_len == 4096


def test_nothing_to_fit_is_a_sentence(rows: tuple[Row, ...]) -> None:
    with pytest.raises(LabkitError, match="Record the suite"):
        fit([r for r in rows if r.mode == "FULL"], SHAPES[FITTED])


def test_slope_shrugs_off_a_bad_point() -> None:
    line = [(x, 3 + 2 * x) for x in range(10)]
    assert slope([*line, (4.5, 1000.0)]) == pytest.approx(2.0)
    assert slope([(1, 5)]) == 0.0
