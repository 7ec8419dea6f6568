"""PIECEWISE and FULL_AND_PIECEWISE steps: what runs between two attention calls is replayed, attention is not."""

from __future__ import annotations

import pytest
import torch

from labkit import LLM
from labkit.attention import op
from labkit.graphs.capture import GraphCapturer
from tests.engine.test_engine import EAGER, SMALL, prompts
from tests.teacher import assert_same_logits, one_by_one, teach

SIZES = [1, 2, 4, 8, 24]


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-qwen3"])
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_every_step_equals_eager(model: str, mode: str) -> None:
    """Decodes, prefills and mixtures, padded or not, and batches above the largest size."""
    batch, counts = prompts(6, seed=3, shared=9), [12, 5, 9, 3, 14, 7]
    with LLM(model, **EAGER) as eager:
        reference = one_by_one(eager, batch, counts)
    with LLM(model, **SMALL, cudagraph_mode=mode, cudagraph_capture_sizes=SIZES, piecewise_method="break") as llm:
        assert llm.cudagraph_mode.name == mode
        ours, reports = teach(llm, batch, counts, stagger=2)
    assert_same_logits(ours, reference, what=mode)
    ran = {(r.mode, r.max_query_len > 1) for r in reports}
    assert ("PIECEWISE", True) in ran, "a mixed batch ran in pieces"
    assert (("FULL" if mode == "FULL_AND_PIECEWISE" else "PIECEWISE"), False) in ran
    assert any(r.num_padded for r in reports if r.mode == "PIECEWISE")
    for r in reports:
        fits = [s for s in SIZES if s >= r.num_tokens]
        assert r.size == (fits[0] if fits else r.num_tokens)
        assert (r.mode == "NONE") == (not fits)


def test_the_report_counts_one_graph_for_each_stretch_between_attention_calls(model: str) -> None:
    with LLM(model, **SMALL, cudagraph_mode="FULL_AND_PIECEWISE", cudagraph_capture_sizes=[2, 4]) as llm:
        records = {(r.mode, r.size): r.graphs for r in llm.engine.capture_records}
        layers = llm.model_config.num_layers
    assert records == {("PIECEWISE", 4): layers + 1, ("PIECEWISE", 2): layers + 1, ("FULL", 4): 1, ("FULL", 2): 1}


def test_attention_is_broken_out_and_sees_the_step_not_the_padding(model: str, monkeypatch) -> None:
    """Between pieces attention gets as many rows as there are tokens, and the lengths of the moment."""
    seen: list[tuple[int, int, bool]] = []
    with LLM(model, **SMALL, cudagraph_mode="PIECEWISE", cudagraph_capture_sizes=[8]) as llm:
        forward = llm.engine.runner.backend.forward

        def spy(query, keys, values, output, metadata, **options):  # type: ignore[no-untyped-def]
            seen.append((query.shape[0], metadata.num_reqs, metadata.for_graph))
            forward(query, keys, values, output, metadata, **options)

        monkeypatch.setattr(llm.engine.runner.backend, "forward", spy)
        for i in range(3):
            llm.add_request([5 + i])
        report = llm.step()
        assert (report.mode, report.size, report.num_tokens) == ("PIECEWISE", 8, 3)
        assert seen == [(3, 3, False)] * llm.model_config.num_layers


def test_segments_are_ended_at_attention() -> None:
    """The recorder's own rule, on a pass that is not a model."""
    x, attended = torch.zeros(4), []

    def forward(break_at):  # type: ignore[no-untyped-def]
        run = break_at or (lambda layer, query, out: attended.append(layer))
        for layer in range(3):
            run(layer, x, x)
        return x + 1

    capturer, output = GraphCapturer(torch.device("cpu")), torch.zeros(8)
    with capturer.session():
        graph = capturer.capture_segments(4, lambda: forward(None), forward, op.attend, output)
    assert graph.record.graphs == 4 and graph.num_graphs == 0 and graph.emulated
    attended.clear()
    x += 1
    graph.replay()
    assert attended == [0, 1, 2] and output.tolist() == [2, 2, 2, 2, 0, 0, 0, 0]
