"""`labkit simulate` and `labkit claims`: what they print, and that every parameter and kind is in it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from labkit.cli.entry import main
from labkit.measure import recordings
from labkit.models.shapes import SHAPES
from labkit.simulate.step import DecodeModel, Machine, simulate_step
from tests.measure.test_recordings import PROVENANCE, recording


def answer(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict:
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_simulate_passes_every_option_on(capsys: pytest.CaptureFixture[str]) -> None:
    got = answer(
        capsys, "simulate", "--model", "llama-3.1-70b", "--batch", "4", "--context", "1024", "--gb-s", "3350",
        "--cpu-factor", "3", "--tp", "8", "--weight-bits", "4", "--mode", "full", "--all-reduce-us", "10",
        "--kernel-us", "2", "--tflops", "900",
    )  # fmt: skip
    model = DecodeModel(SHAPES["llama-3.1-70b"], 4, 1024, weight_bits=4, tp=8, all_reduce_us=10.0)
    step = simulate_step(model, Machine(copy_gb_s=3350.0, kernel_us=2.0, tflops=900.0), mode="FULL", cpu_factor=3.0)
    assert got["kind"] == "SIMULATED"
    assert [s["mode"] for s in got["steps"]] == ["FULL"]
    assert got["steps"][0]["step_ms"] == round(step.wall_ms, 4)
    assert got["parameters"] == json.loads(json.dumps(step.as_dict()["parameters"]))
    assert sum(got["steps"][0]["shares"].values()) == pytest.approx(1, abs=1e-3)


def test_simulate_says_what_it_is_and_what_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--model", "llama-3.1-8b", "--tp", "2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("SIMULATED: one decode step of llama-3.1-8b, computed, not measured.")
    for word in ("PIECEWISE", "copy_gb_s = 4264.8", "tp = 2", "counts as 0", "launch_factor"):
        assert word in text
    assert main(["simulate", "--launch-us", "0", "--model", "smollm2-135m-instruct"]) == 0
    assert "launch_us = torch 0, gemm 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [("--tp", "3"), ("--mode", "HALF"), ("--model", "no-such"), ("--cpu-factor", "0"), ("--gb-s", "-1"),
              ("--context", "9" * 400), ("--launches-per-layer", "100000"), ("--launch-us", "1e308")]
)  # fmt: skip
def test_simulate_refuses_what_cannot_be(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    got = answer(capsys, "simulate", *words, code=2)
    assert set(got["error"]) == {"what", "why", "try"}


def test_claims_lists_every_claim_with_its_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(recordings.SHIPPED / "h200.json.gz")
    got = answer(capsys, "claims", "--recording", file)
    assert got["recordings"][0]["gpu"] == "NVIDIA H200" and got["simulated"]["gb_s"] == 3350.0
    verdicts = {one["id"]: one["verdict"] for one in got["claims"]}
    assert verdicts["kernels-hundreds"] == "holds" and verdicts["int4-step"] == "open: not recorded"
    assert main(["claims"]) == 0
    text = capsys.readouterr().out
    assert "RECORDED" in text and "SIMULATED" in text and "verdict" in text
    assert got["notes"] == [] and "Decides nothing" not in text
    assert answer(capsys, "claims", "--recording", "no-such-file", code=1)["error"]["why"]


def test_a_recording_that_can_decide_no_claim_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cpu = dataclasses.replace(recording(), provenance=PROVENANCE.replace(gpu=None))
    assert main(["claims", "--recording", str(cpu.save(tmp_path / "cpu.json.gz"))]) == 0
    assert "Decides nothing, since only RECORDED rows of a GPU do: RECORDED" in capsys.readouterr().out
