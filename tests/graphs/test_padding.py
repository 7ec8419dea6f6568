"""The padding report against step reports: every step counted once, misses told apart, a table that can be read."""

from __future__ import annotations

import collections
import json
import random

import pytest

from labkit.config import CUDAGraphMode as Mode
from labkit.engine.report import StepReport
from labkit.graphs.dispatcher import GraphDispatcher, Miss
from labkit.graphs.padding import PaddingReport

SIZES = [1, 2, 4, 8, 12]


def dispatcher(mode: str, sizes: list[int] = SIZES) -> GraphDispatcher:
    return GraphDispatcher(Mode[mode], sizes, max_num_seqs=8)


def step(
    mode: str, size: int, num_tokens: int, num_reqs: int | None = None, max_query_len: int = 1, emulated: bool = False
) -> StepReport:
    reqs = num_tokens if num_reqs is None else num_reqs
    return StepReport(
        1, mode, size, num_tokens, reqs, size - num_tokens, max_query_len, 10, "TRITON_ATTN", 1.0, {}, emulated=emulated
    )  # fmt: skip


def run(by: GraphDispatcher, batches: list[tuple[int, bool]]) -> list[StepReport]:
    """What an engine reports of batches of (tokens, decodes?); a mixed one is one prompt."""
    out = []
    for n, uniform in batches:
        found = by.dispatch(n, n if uniform else 1, uniform)
        out.append(step(found.mode.name, found.size, n, n if uniform else 1, 1 if uniform else n))
    return out


@pytest.mark.parametrize("mode", Mode.__members__)
def test_the_report_is_the_dispatchers_own_count(mode: str) -> None:
    """Only a one-token prompt looks like a decode; elsewhere reports say all that the dispatcher knew."""
    rng, by = random.Random(1), dispatcher(mode)
    batches = [(rng.randint(1, 8), True) if rng.random() < 0.6 else (rng.randint(2, 20), False) for _ in range(300)]
    reports = run(by, batches)
    found = PaddingReport.of(reports, dispatcher(mode))
    assert found.misses == by.misses
    graphs = {(line.mode, line.size): line.steps for line in found.lines if line.size is not None}
    assert graphs == {key: count for key, count in by.hits.items() if key[0] != "NONE"}
    assert found.steps == 300 and found.hits == sum(graphs.values())
    assert found.real_tokens == sum(n for n, _ in batches)
    assert found.padded_tokens == sum(r.size - r.num_tokens for r in reports)
    assert found.share == found.padded_tokens / sum(r.size for r in reports)
    unused = {(key.mode, key.size) for key in by.capture_order()} - set(graphs)
    assert set(found.unused) == unused


def test_lines_are_per_graph_and_per_reason() -> None:
    reports = [
        step("FULL", 4, 3), step("FULL", 4, 4), step("FULL", 2, 2), step("PIECEWISE", 8, 5, 1, 5),
        step("NONE", 20, 20, 1, 20), step("NONE", 40, 40, 2, 39), step("NONE", 3, 3), step("NONE", 0, 0),
    ]  # fmt: skip
    found = PaddingReport.of(reports, dispatcher("FULL_AND_PIECEWISE"))
    assert [(line.name, line.ran, line.steps, line.real_tokens, line.padded_tokens) for line in found.lines] == [
        ("FULL", "2", 1, 2, 0),
        ("FULL", "4", 2, 7, 1),
        ("PIECEWISE", "8", 1, 5, 3),
        ("NONE: above the largest size", "20–40", 2, 60, 0),
        ("NONE: its graph was not captured", "3", 1, 3, 0),
    ]
    assert found.misses == {Miss.ABOVE_LARGEST: 2, Miss.NOT_CAPTURED: 1}
    assert found.unused == (("FULL", 1), ("FULL", 8), *(("PIECEWISE", size) for size in (1, 2, 4, 12)))
    assert found.backends == ("TRITON_ATTN",) and not found.emulated


def test_without_a_mode_eager_steps_are_not_called_misses() -> None:
    found = PaddingReport.of([step("FULL", 4, 3), step("NONE", 20, 20)])
    assert found.misses == {} and [line.name for line in found.lines] == ["FULL", "NONE"] and found.unused == ()
    assert PaddingReport.of([step("NONE", 20, 20)], dispatcher("NONE")).misses == {}


def test_a_one_token_prompt_under_decode_graphs_alone_is_no_failed_capture() -> None:
    only = dispatcher("FULL_DECODE_ONLY")
    assert PaddingReport.of([step("NONE", 1, 1)], only).misses == {Miss.NO_GRAPH: 1}
    assert PaddingReport.of([step("NONE", 9, 9)], only).misses == {Miss.ABOVE_LARGEST: 1}
    assert PaddingReport.of([step("NONE", 9, 9, 3, 3)], only).misses == {Miss.NO_GRAPH: 1}
    assert only.hits == collections.Counter() and only.misses == collections.Counter(), "asking counts nothing"


def test_the_table_in_markdown() -> None:
    found = PaddingReport.of(
        [step("FULL", 4, 3, emulated=True), *[step("NONE", 1300, 1300, 1, 1300)] * 2], dispatcher("FULL")
    )
    assert found.markdown().splitlines() == [
        "| mode | tokens that ran | steps | real tokens | padded tokens | padding |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| FULL | 4 | 1 | 3 | 1 | 25.0% |",
        "| NONE: above the largest size | 1300 | 2 | 2,600 | 0 | 0.0% |",
        "| all |  | 3 | 2,603 | 1 | 0.0% |",
        "",
        "1 of 3 steps ran in a graph, emulated on a CPU. 2 ran eagerly: above the largest size. "
        "4 graphs were not used.",
    ]
    empty = PaddingReport.of([step("NONE", 0, 0)])
    assert empty.markdown().endswith("No step ran.") and empty.share == 0


def test_rows_are_plain_data() -> None:
    found = PaddingReport.of([step("FULL", 4, 3), step("NONE", 20, 20, 1, 20)], dispatcher("FULL"))
    assert json.loads(json.dumps(found.rows())) == found.rows() == [
        {"mode": "FULL", "size": 4, "miss": None, "steps": 1, "real_tokens": 3, "padded_tokens": 1, "fewest": 3,
         "most": 3, "share": 0.25},
        {"mode": "NONE", "size": None, "miss": "above the largest size", "steps": 1, "real_tokens": 20,
         "padded_tokens": 0, "fewest": 20, "most": 20, "share": 0.0},
    ]  # fmt: skip


def test_the_steps_of_an_engine() -> None:
    """On a CPU graphs are emulated; what the report says of a run is what its dispatcher counted."""
    pytest.importorskip("torch")
    from labkit.config import SamplingParams
    from labkit.llm import LLM

    settings = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, "cudagraph_capture_sizes": [1, 4]}
    with LLM("tiny-llama", device="cpu", attention_backend="TORCH_SDPA", **settings) as llm:
        for i, prompt_tokens in enumerate((3, 9, 30)):
            llm.add_request([5 + i] * prompt_tokens, SamplingParams(max_tokens=4 + i, ignore_eos=True))
        reports = []
        while llm.has_unfinished:
            reports.append(llm.step())
        fresh = GraphDispatcher(llm.cudagraph_mode, llm.capture_sizes, 4)
        by = llm.engine.runner.dispatcher
        found = PaddingReport.of(reports, fresh)
    assert fresh.mode is Mode.FULL_AND_PIECEWISE and found.emulated
    assert found.misses == by.misses == {Miss.ABOVE_LARGEST: by.misses[Miss.ABOVE_LARGEST]}
    assert found.hits == sum(count for (mode, _), count in by.hits.items() if mode != "NONE") > 0
    assert found.padded_tokens > 0 and found.real_tokens == 3 + 9 + 30 + 3 + 4 + 5
