"""One traffic under several schedulings on a tiny real engine: what runs in which step, turns, files, command."""

from __future__ import annotations

import gc
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from labkit import LLM, EngineConfig
from labkit.bench import requests as bench
from labkit.bench.requests import Scheduling, Traffic, bench_requests, record_requests, run_traffic, schedulings
from labkit.cli.entry import main
from labkit.errors import ConfigError, LabkitError
from labkit.measure.provenance import Kind, ProvenanceError
from labkit.measure.traffic import load_requests

TINY = EngineConfig(
    model="tiny-llama", device="cpu", attention_backend="TORCH_SDPA", enforce_eager=True, max_model_len=128,
    max_num_seqs=6, max_num_batched_tokens=80, num_gpu_blocks_override=80, block_size=8,
)  # fmt: skip
TRAFFIC = Traffic(decodes=2, context=6, prompt=40, lead=3)
WAYS = schedulings((16, 8))


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM(config=TINY.replace(enable_prefix_caching=False)) as made:
        yield made


def test_what_every_scheduling_runs(llm: LLM) -> None:
    """The steps of a prompt of 40 tokens, and which waits of the decodes hold them."""
    steps = {"prefill_first": {3}, "whole": {3}, "chunk 16": {3, 4, 5}, "chunk 8": {3, 4, 5, 6, 7}}
    tokens = TRAFFIC.tokens(WAYS)
    assert tokens == 2 * 3 + 1 + 5 + 1
    for way in WAYS:
        llm.reconfigure(**way.changes)
        run = run_traffic(llm, TRAFFIC, tokens)
        assert run.busy == steps[way.name]
        (prompt,), first = run.prompts, run.decodes[0]
        assert len(run.decodes) == 2 and len(first.token_ms) == tokens and len(prompt.token_ms) == 1
        assert (first.token_steps == tuple(range(tokens))) is (not way.prefill_first)
        if way.prefill_first:
            assert first.token_steps == (0, 1, 2, *range(4, tokens + 1)), "the decodes have no turn in the fourth step"
        assert 0 < (prompt.queue_ms or 0) < (prompt.ttft_ms or 0)
        assert not llm.has_unfinished and gc.isenabled()


def test_a_burst_keeps_decodes_waiting_only_where_prompts_go_first(llm: LLM) -> None:
    burst, tokens = Traffic(2, 6, 40, prompts=3, lead=3), 16
    gaps = {}
    for way in (Scheduling("prefill_first", True), Scheduling("whole")):
        llm.reconfigure(**way.changes)
        run = run_traffic(llm, burst, tokens)
        gaps[way.name] = [b - a for a, b in itertools.pairwise(run.decodes[0].token_steps)]
        assert run.busy == {3, 4, 5} and [p.token_steps for p in run.prompts] == [(3,), (4,), (5,)]
    assert max(gaps["prefill_first"]) == 4 and set(gaps["whole"]) == {1}


def test_runs_take_turns_forward_and_backward_and_the_first_does_not_count(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[tuple[bool, int]] = []
    real = bench.run_traffic

    def noted(one: LLM, *args: Any) -> Any:
        order.append((one.config.prefill_first, one.config.long_prefill_token_threshold))
        return real(one, *args)

    monkeypatch.setattr(bench, "run_traffic", noted)
    recording, notes = bench_requests(TINY, TRAFFIC, WAYS, runs=2)
    forward = [(True, 0), (False, 0), (False, 16), (False, 8)]
    assert order == [*reversed(forward), *forward, *reversed(forward)]
    assert [row.scheduling for row in recording.rows] == ["prefill_first", "whole", "chunk 16", "chunk 8"]
    assert recording.provenance.kind is Kind.LIVE and recording.provenance.primed and not notes
    for row in recording.rows:
        row.check()
        assert (row.runs, row.n, row.tokens, row.prompts) == (2, 2, 13, 1)
    assert [row.during for row in recording.rows] == [(2,), (2,), (2, 3, 4), (2, 3, 4, 5, 6)]
    assert len(recording.pairs("whole")) == 3


@pytest.mark.parametrize(
    ("traffic", "changes", "says"),
    [
        (Traffic(2, 6, 79, lead=3), {}, "max_num_batched_tokens of at least 81, it is 80"),
        (Traffic(6, 6, 40), {}, "max_num_seqs of at least 7, it is 6"),
        (Traffic(2, 110, 40), {}, "max_model_len of at least 135, it is 128"),
        (TRAFFIC, {"num_gpu_blocks_override": 8}, "preempted|same steps|not through"),
    ],
)
def test_what_does_not_fit_is_refused(traffic: Traffic, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(LabkitError, match=says):
        bench_requests(TINY.replace(**changes), traffic, WAYS, runs=1)
    with pytest.raises(ConfigError, match="lead=1"):
        Traffic(lead=1)


def test_a_recording_is_resumed_and_not_on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, ways = tmp_path / "requests.json.gz", (Scheduling("whole"),)
    traffics = (Traffic(1, 4, 16, lead=2), Traffic(2, 4, 16, lead=2))
    given: dict[str, Any] = {
        "models": ("tiny-llama",), "traffics": traffics, "ways": ways, "config": TINY, "device": "cpu",
    }  # fmt: skip
    asked = iter([False, True])
    half = record_requests(out, **given, should_stop=lambda: next(asked))
    assert [row.decodes for row in half.rows] == [1]
    measured: list[Traffic] = []
    real = bench.bench_requests
    monkeypatch.setattr(bench, "bench_requests", lambda c, t, w, **k: measured.append(t) or real(c, t, w, **k))
    whole = record_requests(out, **given)
    assert measured == [traffics[1]], "the first is not measured again"
    assert [row.decodes for row in whole.rows] == [1, 2] and whole.rows[:1] == half.rows
    read = load_requests(out)
    assert read.rows == whole.rows and read.provenance.kind is Kind.RECORDED and read.rows[0].runs == 50
    monkeypatch.setattr(bench, "bench_requests", lambda *a, **k: (_of_another_machine(read), []))
    with pytest.raises(ProvenanceError, match="cpu"):
        record_requests(out, **{**given, "traffics": (Traffic(3, 4, 16, lead=2),)})


def _of_another_machine(recording: Any) -> Any:
    return type(recording)(recording.provenance.replace(cpu="another"), ())


def test_the_command_prints_a_table_and_what_was_shown(capsys: pytest.CaptureFixture[str]) -> None:
    where = "--model tiny-llama --device cpu --attention-backend TORCH_SDPA --enforce-eager"
    limits = "--max-model-len 128 --max-num-seqs 6 --max-num-batched-tokens 80"
    traffic = "--decodes 2 --context 6 --prompt 40 --after 3 --chunk 16 --runs 2"
    words = ["bench", "requests", *f"{where} {limits} {traffic}".split()]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "2 decodes at 6 tokens (primed), after 3 steps a prompt of 40" in text and "LIVE" in text
    assert "prefill_first against whole: worst wait" in text and "chunk 16 against whole" in text
    assert main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["table"] == "requests" and [row["chunk"] for row in data["rows"]] == [0, 0, 16]
    assert {"worst", "ttft", "sentence"} <= set(data["comparisons"][0])
    assert main([*words, "--out", "x.json.gz"]) == 2
    assert "needs 50 runs" in capsys.readouterr().err
