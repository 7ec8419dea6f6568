"""Charts of steps taken apart, of memory and of two machines: the data's own numbers, told apart without colour."""

from __future__ import annotations

import dataclasses
import json

import plotly.graph_objects as go
import pytest

from labkit.figures.decompose import LOOKS, decomposition_figure
from labkit.figures.machines import machines_figure
from labkit.figures.memory import memory_figure
from labkit.measure.decompose import decompose_row, decompositions
from labkit.measure.machines import SAYS, diff
from labkit.measure.memory import MIB, PARTS, Limits, report
from labkit.measure.provenance import Kind, ProvenanceError
from labkit.measure.recordings import shipped
from labkit.models.shapes import SHAPES
from tests.measure.test_machines import other, slower
from tests.measure.test_recordings import recording, row

ORIGIN = "RECORDED · NVIDIA H200 · torch 2.11.0 · 2026-11-30"
PHASES = {"schedule": 20.0, "inputs": 70.0, "launch": 320.0, "sample": 810.0}


def traces(figure: go.Figure) -> dict[tuple, go.Bar]:
    return {tuple(trace.meta): trace for trace in figure.data}


def plain(figure: go.Figure) -> None:
    assert go.Figure(json.loads(figure.to_json())) == figure
    assert figure.layout.title.text


def test_the_hosts_bars_follow_each_other_and_the_device_begins_with_the_launch() -> None:
    steps = [decompose_row(row(b, "FULL", phases_us=PHASES, device_us=900.0), "RECORDED") for b in (1, 8)]
    figure = decomposition_figure(steps, ORIGIN)
    found, at = traces(figure), 0.0
    for part in steps[0].host:
        bar = found["host", part.name]
        assert (bar.base[0], bar.x[0]) == (pytest.approx(at), part.p50_us)
        at += part.p50_us
    device = found["device", "forward"]
    assert (device.base[0], device.x[0]) == (90.0, 900.0), "beneath the launch phase"
    assert [y.split("<br>")[1] for y in figure.layout.yaxis.categoryarray] == ["device", "host"] * 2
    assert "µs" in figure.layout.xaxis.title.text and figure.layout.annotations[0].text == ORIGIN
    plain(figure)


def test_no_two_phases_look_the_same() -> None:
    assert len(set(LOOKS.values())) == len(LOOKS)


def test_equal_configurations_get_bars_of_their_own_and_a_cpu_has_no_device() -> None:
    step = decompose_row(row(1, phases_us=PHASES, device_us=None), "RECORDED")
    figure = decomposition_figure([step, step])
    assert len(set(figure.layout.yaxis.categoryarray)) == 2
    assert all(lane == "host" for lane, _ in traces(figure))
    plain(decomposition_figure([]))


def test_steps_and_memory_of_different_kinds_share_no_chart() -> None:
    step = decompose_row(row(1, phases_us=PHASES), "RECORDED")
    with pytest.raises(ProvenanceError, match="of different kinds: LIVE, RECORDED"):
        decomposition_figure([step, dataclasses.replace(step, kind=Kind.LIVE)])
    live = memory("LIVE")
    with pytest.raises(ProvenanceError, match="of different kinds"):
        memory_figure([live, dataclasses.replace(live, kind=Kind.RECORDED)])


def test_every_shipped_row_draws() -> None:
    for one in shipped():
        found = decompositions(one)[:6]
        figure = decomposition_figure(found, one.provenance.label)
        assert len(figure.layout.yaxis.categoryarray) == 2 * len(found)
        assert found or not one.rows, "a recording of captures alone has no step"


# --- memory --------------------------------------------------------------------------------------------------------


def memory(kind: str | None):
    limits = Limits("bfloat16", 16, 1024, 256, 8192)
    found = {"weights": 300 * MIB, "kv": 5000 * MIB, "graphs": 40 * MIB, "peak": 5500 * MIB} if kind else None
    return report("smol", SHAPES["smollm2-135m"], limits, found, kind=kind or "SIMULATED")


def test_predicted_and_found_are_two_bars_and_what_nobody_predicts_is_missing() -> None:
    figure = memory_figure([memory("LIVE")], "LIVE · here")
    found = traces(figure)
    assert [tuple(t.meta)[0] for t in figure.data] == list(PARTS)
    assert list(figure.layout.yaxis.categoryarray) == ["smol<br>found", "smol<br>predicted"]
    assert list(found["graphs",].x) == [None, 40.0] and list(found["kv",].x)[1] == 5000.0
    assert list(found["workspace",].x)[1] == 160.0
    assert len({t.marker.pattern.shape for t in figure.data}) == len(PARTS)
    assert figure.layout.xaxis.title.text == "MiB"
    plain(figure)
    alone = memory_figure([memory(None)])
    assert list(alone.layout.yaxis.categoryarray) == ["smol<br>predicted"]
    assert alone.layout.annotations[0].text == "SIMULATED"


# --- machines ------------------------------------------------------------------------------------------------------


def test_two_machines_are_two_lines_and_one_of_ratios() -> None:
    mine = recording()
    figure = machines_figure(diff(mine, other(*(slower(r, 1.0 + (r.mode == "FULL")) for r in mine.rows))))
    found = traces(figure)
    times = {key: trace for key, trace in found.items() if key[0] == "time"}
    assert len(times) == 4 and len(found) == 6
    first, second = (times["time", "smollm2-135m TRITON_ATTN FULL_DECODE_ONLY, context 512", i] for i in (0, 1))
    assert list(first.x) == [1, 8, 16] and list(first.y) == [r.p50_ms for r in mine.rows if r.mode == "FULL"]
    assert first.line.dash != second.line.dash and first.marker.symbol != second.marker.symbol
    ratios = found["ratio", "smollm2-135m TRITON_ATTN FULL_DECODE_ONLY, context 512"]
    assert list(ratios.y) == pytest.approx([2.0] * 3, rel=1e-3) and set(ratios.marker.symbol) == {"square"}
    same = found["ratio", "smollm2-135m TRITON_ATTN NONE, context 512"]
    assert set(same.marker.symbol) == {"square-open"}, "no difference shown"
    assert SAYS in figure.layout.title.text
    assert all(note.text.startswith("RECORDED · NVIDIA") for note in figure.layout.annotations)
    plain(figure)
