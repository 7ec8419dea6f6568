"""Verdicts on synthetic recordings with known answers, and on what ships: nothing that was not recorded is judged."""

from __future__ import annotations

import dataclasses
import json

import pytest

from labkit.measure import recordings
from labkit.measure.provenance import Kind, Provenance
from labkit.measure.recordings import Recording, Row, load
from labkit.models.shapes import SHAPES
from labkit.simulate.claims import CLAIMS, FAILS, FOLKLORE, HOLDS, OPEN, VERDICTS, Finding, findings

ORIGIN = Provenance(Kind.RECORDED, "A GPU", "1", "A CPU", {}, None, None, "", "2026-11-30", "", 1)


def row(ms: float, mode: str = "NONE", **changes: object) -> Row:
    samples = tuple(ms + i * 1e-4 for i in range(-2, 3))
    one = Row(
        "smollm2-135m", "bfloat16", "TRITON_ATTN", None, mode, mode, 1, 1, 512, 1, "NONE", True, ms, ms, ms, 5, samples,
        100.0, 1e3 * ms, 300, int(mode != "NONE"), {}, None, None, 1e3 / ms, 1.0, {},
    )  # fmt: skip
    return dataclasses.replace(one, **changes)  # type: ignore[arg-type]


def judge(*rows: Row, origin: Provenance = ORIGIN) -> dict[str, Finding]:
    return {one.claim.id: one for one in findings([Recording(origin, rows)], SHAPES)}


def eight(ms: float, mode: str, compile: str = "NONE") -> Row:
    return row(ms, mode, model="llama-3.1-8b", compile=compile)


COMPUTED = {"8b-data", "70b-tp8-data"}


def test_nothing_recorded_decides_nothing() -> None:
    for got in (judge(), {one.claim.id: one for one in findings([], SHAPES)}):
        assert all(f.verdict in (OPEN, FOLKLORE) for name, f in got.items() if name not in COMPUTED)
        assert not any(f.recorded for f in got.values())
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)


def test_live_rows_and_rows_of_a_cpu_are_passed_over() -> None:
    rows = (row(5.0, launches=300), row(1.0, "FULL"))
    for origin in (ORIGIN.replace(kind=Kind.LIVE), ORIGIN.replace(gpu=None), ORIGIN.replace(kind=Kind.SIMULATED)):
        assert judge(*rows, origin=origin)["kernels-50"].verdict == OPEN
    assert judge(*rows)["kernels-50"].verdict == HOLDS


@pytest.mark.parametrize(("piecewise", "verdict"), [(1.8, HOLDS), (1.2, FAILS), (3.0, FAILS)])
def test_the_share_of_piecewise(piecewise: float, verdict: str) -> None:
    """5 → 1 ms is the whole gain; 1.8 ms has 80 % of it."""
    got = judge(row(5.0), row(piecewise, "PIECEWISE"), row(1.0, "FULL"))["piecewise-80"]
    assert got.verdict == verdict
    assert got.recorded[0].value.startswith(f"{(5 - piecewise) / 4:.0%}")


def test_rows_are_paired_within_one_recording_and_one_step() -> None:
    apart = [Recording(ORIGIN, (row(5.0), row(1.0, "FULL"))), Recording(ORIGIN, (row(1.8, "PIECEWISE"),))]
    assert {f.claim.id: f for f in findings(apart, SHAPES)}["piecewise-80"].verdict == OPEN
    assert judge(row(5.0), row(1.8, "PIECEWISE", batch=2, size=2), row(1.0, "FULL"))["piecewise-80"].verdict == OPEN
    assert judge(row(5.0), row(4.99, "FULL"), row(5.0, "PIECEWISE"))["piecewise-80"].verdict == OPEN  # no gain is shown


def test_the_8b_table() -> None:
    got = judge(eight(5.4, "NONE"), eight(5.0, "FULL"), eight(9.0, "FULL", "VLLM_COMPILE"))
    assert [got[name].verdict for name in ("8b-eager", "8b-graphs", "8b-compile", "8b-both")] == [
        HOLDS, HOLDS, OPEN, FAILS,
    ]  # fmt: skip
    assert got["8b-overhead"].verdict == HOLDS  # 0.4 of 5.4 is 7.4 %
    assert judge(eight(8.0, "NONE"), eight(5.0, "FULL"))["8b-overhead"].verdict == FAILS


def test_a_pair_without_a_shown_difference_was_recorded_and_counts() -> None:
    """It is a gain of nothing, neither "open: not recorded" nor left out of "every such step"."""
    alike = judge(eight(5.0, "NONE"), eight(5.0, "FULL"))["8b-overhead"]
    assert alike.verdict == FAILS and alike.recorded[0].value == "0%"
    steps = row(5.0), row(1.0, "FULL"), row(1.2, batch=2, size=2), row(1.2, "FULL", batch=2, size=2)
    got = judge(*steps)["overhead-dominates"]
    assert got.verdict == FAILS and got.recorded[0].value == "0% to 80%"


def test_a_recorded_8b_step_is_slowed_down_to_the_texts_bandwidth() -> None:
    """3.5 ms of a 4.2 ms step are data at twice 3,350 GB/s: at that bandwidth they take 7."""
    one = dataclasses.replace(eight(4.2, "FULL"), floor_ms=3.5, gb_s=6700.0 * 3.5 / 4.2)
    got = judge(one)["8b-graphs"]
    assert got.verdict == FAILS
    assert (got.simulated[-1].kind, got.simulated[-1].value) == (Kind.SIMULATED, "7.70 ms")
    assert got.recorded[0].value == "4.20 ms"


def test_launch_costs_and_replays() -> None:
    inside = row(5.0, launch_cost_us={"torch": 6.0, "gemm": 9.0, "graph": 30.0})
    assert judge(inside)["launch-cost"].verdict == HOLDS
    assert judge(inside, row(5.0, batch=2, size=2, launch_cost_us={"gemm": 11.0}))["launch-cost"].verdict == FAILS
    for us, verdict in ((9.0, HOLDS), (250.0, FAILS)):
        assert judge(row(1.0, "FULL", phases_us={"launch": us}))["replay-cost"].verdict == verdict


def test_counts_of_launches() -> None:
    assert judge(row(5.0, launches=49))["kernels-50"].verdict == FAILS
    got = judge(row(5.0, launches=60))
    assert (got["kernels-50"].verdict, got["kernels-hundreds"].verdict) == (HOLDS, FAILS)


def test_scheduler_dominance_and_backends() -> None:
    phases = {"schedule": 500.0, "launch": 1.0, "sample": 1.0}
    assert judge(row(5.0, phases_us=phases))["scheduler"].verdict == HOLDS
    assert judge(row(5.0, phases_us={"schedule": 20.0}))["scheduler"].verdict == FAILS
    assert judge(row(5.0), row(1.0, "FULL"))["overhead-dominates"].verdict == HOLDS
    assert judge(row(1.5), row(1.0, "FULL"))["overhead-dominates"].verdict == FAILS
    other = row(2.0, "FULL", backend="TORCH_SDPA")
    assert judge(row(1.0, "FULL"), other)["backend-throughput"].recorded[0].value == "2.0 times"
    assert judge(row(1.0, "FULL"), other)["backend-throughput"].verdict == HOLDS
    assert judge(row(1.9, "FULL"), other)["backend-throughput"].verdict == FAILS
    assert judge(row(1.0, "FULL"))["backend-throughput"].verdict == OPEN


def test_bytes_over_bandwidth_by_hand() -> None:
    """8.03 - 0.53 billion weights of 2 bytes at 3,350 GB/s; 70.55 - 1.05 billion on eight GPUs."""
    got = judge()
    assert got["8b-data"].simulated[0].value == f"{(8.030261248 - 128256 * 4096e-9) * 2 / 3.35:.2f} ms"
    assert got["70b-tp8-data"].simulated[0].value == f"{(70.553706496 - 128256 * 8192e-9) / 4 / 3.35:.2f} ms"


def test_what_ships_names_its_kinds_and_int4_is_open() -> None:
    got = findings([load(recordings.SHIPPED / "h200.json.gz")], SHAPES)
    for one in got:
        assert one.verdict in VERDICTS and one.why.endswith(".")
        assert all(e.kind is Kind.RECORDED for e in one.recorded)
        assert all(e.kind is Kind.SIMULATED for e in one.simulated)
        json.dumps(one.as_dict())
    verdicts = {one.claim.id: one.verdict for one in got}
    assert verdicts["int4-step"] == verdicts["int4-third"] == OPEN
    assert verdicts["launch-cost"] == verdicts["scheduler"] == verdicts["replay-cost"] == FAILS
    assert verdicts["kernels-hundreds"] == verdicts["backend-throughput"] == HOLDS
