"""The older scheduling on the real engine: the same logits, other steps, and a switch that keeps everything."""

from __future__ import annotations

import pytest

from labkit import LLM, SamplingParams
from labkit.engine.report import StepReport
from tests.engine.test_engine import EAGER, SMALL, prompts
from tests.teacher import assert_same_logits, one_by_one, teach


def kinds(report: StepReport, lengths: dict[str, int], done: dict[str, int]) -> set[str]:
    """What a step ran, told from how far each request was before it."""
    found = set()
    for request_id, n in report.scheduled.items():
        found.add("decode" if done.get(request_id, 0) >= lengths[request_id] and n == 1 else "prompt")
        done[request_id] = done.get(request_id, 0) + n
    return found


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize(("budget", "threshold", "blocks"), [(8, 3, 200), (64, 0, 200), (64, 5, 16), (17, 0, 16)])
def test_prompts_first_equal_one_request_at_a_time(caching: bool, budget: int, threshold: int, blocks: int) -> None:
    batch, counts = prompts(6, seed=budget + threshold, longest=20, shared=9), [6, 18, 3, 12, 15, 9]
    with LLM("tiny-llama", **EAGER) as alone:
        reference = one_by_one(alone, batch, counts)
    settings = {
        **EAGER, "max_num_batched_tokens": budget, "long_prefill_token_threshold": threshold,
        "num_gpu_blocks_override": blocks, "enable_prefix_caching": caching, "prefill_first": True,
    }  # fmt: skip
    with LLM("tiny-llama", **settings) as llm:
        ours, reports = teach(llm, batch, counts, stagger=2)
        assert_same_logits(ours, reference)
        assert any(r.preempted for r in reports) == (blocks == 16)
        assert (sum(r.num_cached_tokens for r in reports) > 0) == caching
        assert all(r.num_tokens <= budget for r in reports)
        assert llm.engine.pool.num_free == llm.engine.pool.usable


def test_a_step_is_prompts_or_decodes_and_decodes_wait() -> None:
    batch = prompts(5, seed=3)
    lengths = {str(i): len(prompt) for i, prompt in enumerate(batch)}
    ran: dict[bool, list[set[str]]] = {}
    for first in (False, True):
        with LLM("tiny-llama", **EAGER, prefill_first=first, enable_prefix_caching=False) as llm:
            done: dict[str, int] = {}
            ran[first] = [kinds(report, lengths, done) for report in teach(llm, batch, 8, stagger=1)[1]]
    assert {"prompt", "decode"} in ran[False], "they share steps in the ordinary way"
    assert ran[True][:5] == [{"prompt"}] * 5, "each step a new prompt, and no token for those before it"
    assert ran[True][5:] == [{"decode"}] * 7


def test_switching_keeps_weights_cache_and_captures_and_live_requests() -> None:
    params, batch = SamplingParams(max_tokens=10, ignore_eos=True), prompts(4, seed=8)
    with LLM("tiny-llama", **SMALL, cudagraph_mode="FULL_DECODE_ONLY") as llm:
        expected = [output.token_ids for output in llm.generate(batch, params)]
        llm.reset()
        decoder, kv, records = llm.engine.model.decoder, llm.engine.kv, llm.capture_records
        ids = [llm.add_request(prompt, params) for prompt in batch]
        outputs = {}
        for step in range(100):
            if step % 3 == 0 and llm.has_unfinished:
                made = llm.reconfigure(prefill_first=step % 2 == 0)
                assert not made.rebuilt_ms and set(made.kept) == {"weights", "tokenizer", "kv_cache", "graphs"}
            outputs.update({o.request_id: o for o in llm.step().outputs})
        assert [outputs[i].token_ids for i in ids] == expected
        assert llm.engine.model.decoder is decoder and llm.engine.kv is kv and llm.capture_records == records


def test_steps_are_stamped_one_after_another() -> None:
    with LLM("tiny-llama", **EAGER) as llm:
        _, reports = teach(llm, prompts(3), 4)
        assert reports[0].begun_at_ms > 0
        for before, after in zip(reports, reports[1:], strict=False):
            assert before.begun_at_ms < before.ended_at_ms <= after.begun_at_ms
