"""The regime map, its crossing, recorded points and the launch-cost card."""

from __future__ import annotations

import dataclasses
import json

import pytest

from labkit.errors import LabkitError
from labkit.measure import recordings
from labkit.measure.provenance import Kind, ProvenanceError
from labkit.measure.recordings import Recording, load
from labkit.models.shapes import SHAPES
from labkit.simulate.launch_card import card_from, launch_card
from labkit.simulate.regime import REGIMES, Point, points_of, regime_map
from labkit.simulate.step import H200, DecodeModel, simulate_step

MODELS = [SHAPES[name] for name in ("llama-3.1-8b", "smollm2-135m", "qwen3-0.6b")]


@pytest.fixture(scope="module")
def recording() -> Recording:
    return load(recordings.SHIPPED / "h200.json.gz")


def test_cells_are_steps_and_rows_ascend_in_size() -> None:
    found = regime_map(MODELS, batches=(1, 64), context=512)
    assert [m.name for m in found.models] == ["smollm2-135m", "qwen3-0.6b", "llama-3.1-8b"]
    alone = simulate_step(DecodeModel(SHAPES["qwen3-0.6b"], 64, 512), mode="NONE")
    assert found.steps[1][1].wall_ms == alone.wall_ms
    for i in range(3):
        for j in range(2):
            waits = found.steps[i][j].waiting_us
            assert waits[found.regime(i, j)] == max(us for name, us in waits.items() if name != "host")
            assert 0 < found.share(i, j) <= 1


def test_the_crossing_moves_with_model_and_host() -> None:
    """Larger models and faster hosts wait for instructions up to a smaller batch."""
    slow, fast = (regime_map(MODELS, cpu_factor=factor).crossing() for factor in (1.0, 4.0))
    as_number = [512 * 2 if batch is None else batch for batch in slow]
    assert as_number == sorted(as_number, reverse=True)
    assert all(b <= a for a, b in zip(as_number, [1024 if b is None else b for b in fast], strict=True))
    assert fast != slow


def test_without_launch_cost_nothing_waits_for_instructions() -> None:
    free = dataclasses.replace(H200, launch_us=dict.fromkeys(H200.launch_us, 0.0), graph_node_us=0.0)
    found = regime_map(MODELS, machine=free)
    assert found.crossing() == [1, 1, 1]
    assert "never waits for instructions" in found.summary


def test_the_engine_around_the_forward_is_a_regime_only_when_asked_for() -> None:
    cells = {around: regime_map(MODELS, mode="FULL", around=around) for around in (False, True)}
    names = {a: {m.regime(i, j) for i in range(3) for j in range(len(m.batches))} for a, m in cells.items()}
    assert "host" not in names[False] and "host" in names[True]
    assert names[True] <= set(REGIMES)


def test_recorded_points_keep_their_kind_and_numbers(recording: Recording) -> None:
    points = points_of([recording])
    row = recording.find(
        model="smollm2-135m", backend="TRITON_ATTN", requested_mode="NONE", batch=8, context=512
    )  # fmt: skip
    assert row is not None
    (one,) = [p for p in points if (p.model, p.batch) == ("smollm2-135m", 8)]
    assert one.kind is Kind.RECORDED and one.ms == row.p50_ms
    assert one.text.startswith("RECORDED: 5.86 ms (n=60)") and "gone under FULL" in one.text
    found = regime_map(MODELS, points=[*points, Point("unknown", 8, "NONE", 1.0, Kind.RECORDED, "")])
    assert {p.model for p in found.points} == {"smollm2-135m", "qwen3-0.6b"}
    assert regime_map(MODELS, mode="FULL", points=points).points == ()
    got = json.loads(json.dumps(found.as_dict()))
    assert got["kind"] == "SIMULATED" and {p["kind"] for p in got["points"]} == {"RECORDED"}
    assert points_of([recording], context=4096) == []


def test_the_card_is_the_rows(recording: Recording) -> None:
    card = card_from(recording, model="smollm2-135m")
    assert card is not None
    # By hand: 3 × 6.488 + 121 × 26.477 + 181 × 19.684 + 2 × 10.944, and 5,423.18 - 1,032.42.
    assert card.explained_us == pytest.approx(6807.9, abs=0.1)
    assert card.instructions_us == pytest.approx(4390.76)
    assert card.num_launches == 305
    assert card.data_us == pytest.approx(66.01)
    assert card.summary.startswith("RECORDED: an eager step of smollm2-135m at batch 1 starts 305 kernels")
    assert json.loads(json.dumps(card.as_dict()))["provenance"]["kind"] == "RECORDED"
    assert card_from(recording, model="llama-3.1-8b") is None


def test_a_card_of_other_steps_is_refused(recording: Recording) -> None:
    common = {"model": "smollm2-135m", "backend": "TRITON_ATTN", "context": 512}
    eager = recording.find(**common, requested_mode="NONE", batch=1)
    other = recording.find(**common, requested_mode="FULL", batch=2)
    assert eager and other
    with pytest.raises(ProvenanceError, match="not of the same step"):
        launch_card(eager, other, recording.provenance)
    with pytest.raises(LabkitError, match="eager step"):
        launch_card(other, None, recording.provenance)
    assert launch_card(eager, None, recording.provenance).instructions_us is None
