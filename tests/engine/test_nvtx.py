"""Ranges for a profiler: one per phase, nested as the step is, closed on failure; nothing at all when they are off."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from labkit import LLM, SamplingParams, nvtx
from labkit.engine.report import PHASES
from labkit.graphs.capture import _in_turn

TINY = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 20}


class Recorder:
    """In place of torch.cuda.nvtx: the ranges as (depth, name), and how many are open."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []
        self.open = 0

    def push(self, name: str) -> None:
        self.seen.append((self.open, name))
        self.open += 1

    def pop(self) -> None:
        self.open -= 1
        assert self.open >= 0, "a range was closed that nobody opened"


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    recorder = Recorder()
    monkeypatch.setattr(nvtx, "wanted", lambda: True)
    monkeypatch.setattr("torch.cuda.nvtx.range_push", recorder.push)
    monkeypatch.setattr("torch.cuda.nvtx.range_pop", recorder.pop)
    yield recorder
    assert recorder.open == 0


def test_every_phase_of_a_step_is_a_range_inside_the_step_and_attention_inside_the_launch(ranges: Recorder) -> None:
    with LLM("tiny-llama", **TINY, enforce_eager=True) as llm:
        layers = llm.model_config.num_layers
        llm.add_request([1, 2, 3], SamplingParams(max_tokens=2))
        llm.reconfigure(prefill_first=True)  # asks for the ranges again
        ranges.seen.clear()
        report = llm.step()
        assert [name for depth, name in ranges.seen if depth == 0] == ["step"]
        assert tuple(name for depth, name in ranges.seen if depth == 1) == PHASES == tuple(report.phases_us)
        assert [name for depth, name in ranges.seen if depth == 2] == ["attention"] * layers


def test_a_failed_step_leaves_no_range_open(ranges: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("tiny-llama", **TINY, enforce_eager=True) as llm:
        llm.add_request([1, 2, 3], SamplingParams(max_tokens=2))
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.runner, "_logits", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                llm.step()
        assert ranges.open == 0
        assert llm.step().num_tokens == 3


def test_pieces_of_a_broken_graph_are_numbered(ranges: Recorder) -> None:
    ran: list[str] = []

    class Graph:
        def __init__(self, name: str) -> None:
            self.replay = lambda: ran.append(name)

    calls = [lambda i=i: ran.append(f"attention {i}") for i in range(2)]
    _in_turn([Graph("a"), Graph("b"), Graph("c")], calls)()  # type: ignore[list-item]
    assert ran == ["a", "attention 0", "b", "attention 1", "c"]
    assert ranges.seen == [(0, "piece 0"), (0, "piece 1"), (0, "piece 2")]


@pytest.mark.parametrize("value", [None, "", "0", "1"])
def test_without_the_variable_or_without_cuda_nothing_is_wrapped(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(nvtx.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(nvtx.VARIABLE, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: value != "1")
    assert nvtx.named("x", len) is len
    owner = type("Owner", (), {"step": lambda self: 1})()
    nvtx.name_methods(owner, step="step")
    assert not vars(owner) and owner.step() == 1


def test_with_the_variable_and_cuda_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nvtx.VARIABLE, "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert nvtx.wanted()


def test_the_file_imports_no_torch() -> None:
    code = "import sys, labkit.nvtx as n; n.named('x', len); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"LABKIT_NVTX": "1"}).returncode == 0
