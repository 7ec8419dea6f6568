"""The engine on a CPU: any mixture of requests gives what each would give alone, and nothing bad spreads."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import random
import threading
import warnings
import weakref

import pytest
import torch

from labkit import LLM, SamplingParams
from labkit.errors import BackendError, CaptureError, ConfigError, LabkitError, RequestError
from tests.teacher import assert_same_logits, one_by_one, teach

SMALL = {
    "max_model_len": 128,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 200,
    "block_size": 4,
}
EAGER = {**SMALL, "enforce_eager": True}


def prompts(n: int, seed: int = 0, longest: int = 40, shared: int = 0) -> list[list[int]]:
    """Random prompts; the first `shared` tokens of every second one are the same."""
    rng = random.Random(seed)
    prefix = [rng.randrange(500) for _ in range(shared)]
    own = [[rng.randrange(500) for _ in range(rng.randint(1, longest))] for _ in range(n)]
    return [prefix + tokens if i % 2 else tokens for i, tokens in enumerate(own)]


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-qwen3"])
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize(("budget", "threshold"), [(1, 0), (3, 1), (8, 3), (17, 5), (64, 1), (64, 0)])
def test_mixed_batches_equal_one_request_at_a_time(model: str, caching: bool, budget: int, threshold: int) -> None:
    """Chunked prefill, decodes, prefix hits and several arrivals, at budgets and thresholds from 1 to 64."""
    batch, counts = prompts(7, seed=budget * 100 + threshold, shared=13), [3, 9, 1, 6, 12, 5, 2]
    with LLM(model, **EAGER) as alone:
        reference = one_by_one(alone, batch, counts)
    settings = {**EAGER, "max_num_batched_tokens": budget, "long_prefill_token_threshold": threshold}
    with LLM(model, **settings, enable_prefix_caching=caching) as llm:
        ours, reports = teach(llm, batch, counts, stagger=2)
        assert_same_logits(ours, reference)
        assert all(r.num_tokens <= budget for r in reports)
        hit = sum(r.num_cached_tokens for r in reports)
        assert (hit > 0) == caching, "prompts share 13 tokens, 3 whole blocks"
        if caching:
            total = sum(map(len, batch)) + sum(counts) - len(batch)
            assert sum(r.num_tokens for r in reports) == total - hit, "cached tokens are not computed again"
        if threshold:
            alone_tokens = [n for r in reports for n in r.scheduled.values()]
            assert max(alone_tokens) <= threshold
        assert any(r.max_query_len > 1 and r.num_reqs > 1 for r in reports) or budget <= 3 or threshold == 1
        assert llm.engine.pool.num_free == llm.engine.pool.usable


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
def test_forced_preemption_changes_nothing(model: str, caching: bool) -> None:
    batch, counts = prompts(6, seed=4, longest=24), [20, 25, 18, 30, 22, 16]
    with LLM(model, **EAGER) as alone:
        reference = one_by_one(alone, batch, counts)
    with LLM(model, **{**EAGER, "num_gpu_blocks_override": 16, "enable_prefix_caching": caching}) as llm:
        ours, reports = teach(llm, batch, counts)
        assert sum(len(r.preempted) for r in reports) > 3, "15 blocks of 4 tokens cannot hold six requests"
        assert_same_logits(ours, reference)
        assert llm.engine.pool.num_free == llm.engine.pool.usable


def test_emulated_graphs_equal_eager_for_every_batch_size(model: str) -> None:
    settings = {**SMALL, "cudagraph_capture_sizes": [1, 2, 4, 6], "cudagraph_mode": "FULL_DECODE_ONLY"}
    with LLM(model, **settings) as graphed, LLM(model, **EAGER) as eager:
        assert graphed.emulated_graphs and graphed.cudagraph_mode.name == "FULL_DECODE_ONLY"
        for n in range(1, 8):
            batch = prompts(n, seed=n)
            ours, reports = teach(graphed, batch, 5)
            assert_same_logits(ours, teach(eager, batch, 5)[0], what=f"batch {n}")
            sizes = {(r.size, r.num_padded) for r in reports if r.mode == "FULL" and r.num_reqs == min(n, 6)}
            assert sizes == {{1: (1, 0), 2: (2, 0), 3: (4, 1), 4: (4, 0), 5: (6, 1), 6: (6, 0), 7: (6, 0)}[n]}
            assert all(r.emulated and r.graph_launches == 0 for r in reports if r.mode == "FULL")
            graphed.reset(), eager.reset()


def test_the_emulation_catches_a_rebound_input() -> None:
    """A graph reads its inputs where they were at capture; so does the emulation, on a machine without CUDA."""
    with LLM("tiny-llama", **SMALL, cudagraph_mode="FULL_DECODE_ONLY") as llm:
        llm.prime(2, 20, max_tokens=9)
        llm.step()
        inputs = llm.engine.inputs
        inputs._host = inputs._device = inputs._host.clone()  # what a careless refactoring would do
        inputs._views.clear()
        runner = llm.engine.runner
        step = llm.engine.scheduler.schedule()
        stale = runner.execute(step).logits
        graph, runner._graphs = runner._graphs, {}
        fresh = runner.execute(step).logits
        runner._graphs = graph
        assert not torch.allclose(stale, fresh, atol=1e-3)


def test_poison_in_padding_and_unused_kv_changes_nothing() -> None:
    with LLM("tiny-llama", **SMALL, cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=[4, 8]) as llm:
        batch = prompts(5, seed=5)
        clean, _ = teach(llm, batch, 6)
        llm.reset()
        llm.engine.kv.data.fill_(float("nan"))
        poisoned, reports = teach(llm, batch, 6)
        assert any(r.num_padded for r in reports)
        assert_same_logits(poisoned, clean, tolerance=0.0)


def test_c30_what_the_caller_keeps_is_not_overwritten() -> None:
    """Logits and outputs handed out are copies; the next replay rewrites only the graph's own buffer."""
    with LLM("tiny-llama", **SMALL, cudagraph_mode="FULL_DECODE_ONLY") as llm:
        llm.prime(2, 20, max_tokens=9)
        first = llm.step()
        step = llm.engine.scheduler.schedule()
        kept = llm.engine.runner.execute(step)
        before = kept.logits.clone()
        llm.engine.scheduler.commit(step, [1, 2])
        kept_outputs = first.outputs
        texts = [(o.text, o.token_ids) for o in kept_outputs]
        assert llm.step().mode == "FULL"
        assert torch.equal(kept.logits, before)
        assert [(o.text, o.token_ids) for o in kept_outputs] == texts


def test_a_late_capture_is_refused() -> None:
    with LLM("tiny-llama", **SMALL, cudagraph_mode="FULL_DECODE_ONLY") as llm:
        runner = llm.engine.runner
        with pytest.raises(CaptureError, match="closed"):
            runner._capture(runner.dispatcher.capture_order()[0])


def test_a_failed_capture_leaves_the_engine_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    from labkit.graphs.capture import GraphCapturer

    def fail(self: GraphCapturer, *args: object) -> None:
        raise CaptureError(
            "capture of mode FULL, size 8", "the GPU ran out of memory", "Lower max_cudagraph_capture_size."
        )

    monkeypatch.setattr(GraphCapturer, "capture", fail)
    with pytest.warns(UserWarning, match="max_cudagraph_capture_size"):
        llm = LLM("tiny-llama", **SMALL, cudagraph_mode="FULL_DECODE_ONLY")
    with llm:
        assert llm.cudagraph_mode.name == "NONE" and "size 8" in llm.mode_trail[-1]
        assert llm.generate([1, 2, 3])[0].finish_reason == "length"


def test_garbage_collection_is_restored_after_capture() -> None:
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            with LLM("tiny-llama", **SMALL, cudagraph_mode="FULL_DECODE_ONLY"):
                assert gc.isenabled() is enabled
        finally:
            gc.enable()


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("", "empty"),
        ([], "empty"),
        ([1, 512], "512"),
        ([-1], "-1"),
        (["a"], "'a'"),
        ([1] * 128, "max_model_len=128"),
        ([1] * 200, "max_model_len=128"),
    ],
    ids=["empty text", "no tokens", "id too large", "id negative", "not an id", "max_model_len", "above it"],
)
def test_c49_a_bad_request_is_refused_alone(prompt: object, named: str) -> None:
    with LLM("tiny-llama", **EAGER) as llm:
        expected = llm.generate([[5, 6, 7]])[0].token_ids
        running = llm.add_request([5, 6, 7])
        llm.step()
        with pytest.raises(RequestError, match=named):
            llm.add_request(prompt)  # type: ignore[arg-type]
        outputs = {o.request_id: o for _ in range(20) for o in llm.step().outputs}
        assert outputs[running].token_ids == expected
        mixed = llm.generate([[5, 6, 7], prompt, [5, 6, 7]])  # type: ignore[list-item]
        assert [o.finish_reason for o in mixed] == ["length", "error", "length"]
        assert mixed[0].token_ids == mixed[2].token_ids == expected and named in (mixed[1].error or "")


def test_c45_the_longest_prompt_gives_exactly_one_token() -> None:
    with LLM("tiny-llama", **EAGER) as llm:
        out = llm.generate([[3] * 127], SamplingParams(max_tokens=10, ignore_eos=True))[0]
        assert (len(out.token_ids), out.finish_reason) == (1, "length")


def test_c49_duplicate_ids_and_reuse() -> None:
    with LLM("tiny-llama", **EAGER) as llm:
        llm.add_request([1, 2], request_id="a")
        with pytest.raises(RequestError, match="has that id|same id"):
            llm.add_request([3], request_id="a")
        aborted = llm.abort_request("a")
        assert aborted is not None and aborted.finish_reason == "abort"
        assert llm.abort_request("a") is None and llm.abort_request("never") is None
        llm.add_request([1, 2], SamplingParams(max_tokens=2), request_id="a")
        while llm.has_unfinished:
            report = llm.step()
        assert report.outputs[0].request_id == "a" and report.outputs[0].finish_reason == "length"
        llm.add_request([1, 2], request_id="a")
        llm.reset()


def test_c49_an_id_used_again_in_the_same_row_gets_its_own_blocks() -> None:
    """The block table remembers what a row shows; a new request of the same name must not be taken for the old one."""
    with LLM("tiny-llama", **EAGER, enable_prefix_caching=False) as llm:
        expected = llm.generate([[9, 8, 7, 6, 5, 4]], SamplingParams(max_tokens=6, ignore_eos=True))[0].token_ids
        for _ in range(3):
            llm.add_request([9, 8, 7, 6, 5, 4], SamplingParams(max_tokens=6, ignore_eos=True), request_id="same")
            holder = llm.add_request([1] * 9, SamplingParams(max_tokens=30, ignore_eos=True))
            last = None
            while last is None or not last.finished:
                last = next((o for o in llm.step().outputs if o.request_id == "same"), None)
            assert last.token_ids == expected
            llm.abort_request(holder)


def test_a_prompt_that_the_pool_can_never_hold_is_refused() -> None:
    with LLM("tiny-llama", **{**EAGER, "num_gpu_blocks_override": 5}) as llm:
        with pytest.raises(RequestError, match="KV cache holds 16 tokens"):
            llm.generate([[1] * 17])
        assert llm.generate([[1] * 15], SamplingParams(max_tokens=5, ignore_eos=True))[0].finish_reason == "length"


def test_nan_logits_end_one_request_and_not_the_others() -> None:
    with LLM("tiny-llama", **EAGER) as llm:
        good, bad = llm.add_request([1, 2, 3]), llm.add_request([4, 5])
        sampler = llm.engine.sampler
        original = sampler.sample

        def sample(logits: torch.Tensor, requests: list) -> object:
            logits = logits.clone()
            for row, request in enumerate(requests):
                if request.request_id == bad:
                    logits[row] = float("nan")
            return original(logits, requests)

        sampler.sample = sample  # type: ignore[method-assign]
        outputs = {}
        while llm.has_unfinished:
            outputs.update({o.request_id: o for o in llm.step().outputs})
        assert outputs[bad].finish_reason == "error" and outputs[bad].error
        assert outputs[good].finish_reason == "length"


def test_a_failed_forward_loses_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("tiny-llama", **EAGER) as llm:
        expected = llm.generate([[1, 2, 3, 4, 5, 6]])[0].token_ids
        llm.reset()
        request = llm.add_request([1, 2, 3, 4, 5, 6])
        execute = llm.engine.runner.execute
        calls = itertools.count()

        def flaky(step: object) -> object:
            if next(calls) in (0, 3):
                raise RuntimeError("the device is gone for a moment")
            return execute(step)  # type: ignore[arg-type]

        monkeypatch.setattr(llm.engine.runner, "execute", flaky)
        outputs, failures = {}, 0
        while llm.has_unfinished:
            try:
                outputs.update({o.request_id: o for o in llm.step().outputs})
            except RuntimeError:
                failures += 1
        assert failures == 2 and outputs[request].token_ids == expected


def test_engines_in_two_threads_keep_to_their_own_caches() -> None:
    """The second one takes a whole step while the first is in the middle of its own."""
    with LLM("tiny-llama", **EAGER) as ours, LLM("tiny-qwen3", **{**EAGER, "block_size": 16}) as theirs:
        expected = ours.generate([[1, 2, 3, 4, 5]])[0].token_ids
        ours.reset()
        inside, go_on = threading.Event(), threading.Event()
        their_forward = theirs.engine.runner.backend.forward

        def waits(*args: object, **kwargs: object) -> None:
            inside.set()
            assert go_on.wait(60)
            their_forward(*args, **kwargs)  # type: ignore[arg-type]

        theirs.engine.runner.backend.forward = waits  # type: ignore[method-assign]
        outputs: list[object] = []
        thread = threading.Thread(target=lambda: outputs.extend(theirs.generate([[1, 2, 3]])))
        thread.start()
        assert inside.wait(60)
        forward = ours.engine.runner.backend.forward

        def lets_go(*args: object, **kwargs: object) -> None:
            if not go_on.is_set():  # the other one ends its pass in the middle of this one
                go_on.set()
                thread.join(60)
            forward(*args, **kwargs)  # type: ignore[arg-type]

        ours.engine.runner.backend.forward = lets_go  # type: ignore[method-assign]
        assert ours.generate([[1, 2, 3, 4, 5]])[0].token_ids == expected
        assert len(outputs) == 1


@pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE"])
def test_a_step_interrupted_after_its_inputs_were_written_is_repeated_right(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Its blocks go back, and the requests of the repeated step get them in another order."""
    batch, counts = prompts(5, seed=3, shared=9, longest=20), [12, 15, 9, 13, 14]
    with LLM("tiny-llama", **EAGER) as alone:
        reference = one_by_one(alone, batch, counts)
    with LLM("tiny-llama", **SMALL, cudagraph_mode=mode, cudagraph_capture_sizes=[1, 3, 7, 20]) as llm:
        logits, step, calls = llm.engine.runner._logits, llm.step, itertools.count()

        def interrupted(*args: object) -> torch.Tensor:
            if next(calls) % 2 == 0:
                raise KeyboardInterrupt
            return logits(*args)  # type: ignore[arg-type]

        def repeated() -> object:
            with contextlib.suppress(KeyboardInterrupt):
                return step()
            return step()

        monkeypatch.setattr(llm.engine.runner, "_logits", interrupted)
        monkeypatch.setattr(llm, "step", repeated)
        ours, _ = teach(llm, batch, counts)
    assert_same_logits(ours, reference)


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"attention_backend": "FLASH_ATTN"}, BackendError, "needs an NVIDIA GPU"),
        ({"attention_backend": "TRITON"}, ConfigError, "TRITON_ATTN"),
        ({"cudagraph_mode": "FULL", "sdpa_kernel": "flash"}, ConfigError, "NEVER"),
        ({"model": "smollm2"}, ConfigError, "smollm2-135m"),
        ({"device": "tpu"}, ConfigError, "device"),
        ({"max_model_len": 10**6}, ConfigError, "max_model_len"),
        ({"cudagraph_capture_sizes": [4, 100], "cudagraph_mode": "FULL_DECODE_ONLY"}, ConfigError, "100"),
        ({"cudagraph_capture_sizes": 4}, ConfigError, r"is not a list. Write \[4\]"),
        ({"compile_sizes": 4}, ConfigError, r"is not a list. Write \[4\]"),
        ({"splitting_ops": "labkit::unified_attention_with_output"}, ConfigError, "is not a list"),
        ({"seed": -1}, ConfigError, "seed=-1: must be a whole number ≥ 0"),
        ({"seed": "a"}, ConfigError, "seed='a': must be a whole number ≥ 0"),
    ],
)
def test_bad_settings_fail_at_construction(changes: dict, error: type[LabkitError], named: str) -> None:
    with pytest.raises(error, match=named):
        LLM(**{"model": "tiny-llama", **SMALL, **changes})


# --- toggling ---------------------------------------------------------------------------------------------------------


def test_reconfigure_keeps_what_is_valid_and_says_what_it_rebuilt() -> None:
    with LLM("tiny-llama", **SMALL, cudagraph_mode="FULL_DECODE_ONLY") as llm:
        batch = prompts(4)
        reference, _ = teach(llm, batch, 6)
        decoder, kv = llm.engine.model.decoder, llm.engine.kv
        off = llm.reconfigure(cudagraph_mode="NONE")
        assert off.changed["cudagraph_mode"] == ("FULL_DECODE_ONLY", "NONE") and not off.rebuilt_ms
        on = llm.reconfigure(cudagraph_mode="FULL_DECODE_ONLY")
        assert "graphs" in on.kept and not on.rebuilt_ms, "captures made before are still there"
        assert llm.engine.kv is kv
        pages = llm.reconfigure(block_size=8)
        assert set(pages.rebuilt_ms) == {"kv_cache", "graphs"} and llm.engine.kv is not kv
        assert llm.engine.model.decoder is decoder
        llm.reset()
        assert_same_logits(teach(llm, batch, 6)[0], reference)


def test_reconfigure_in_the_middle_loses_no_request() -> None:
    with LLM("tiny-llama", **EAGER) as llm:
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        batch = prompts(5, seed=8)
        expected = [o.token_ids for o in llm.generate(batch, params)]
        llm.reset()
        ids = [llm.add_request(p, params) for p in batch]
        outputs = {}
        changes = iter(
            [{"block_size": 8}, {"max_num_seqs": 3}, {"long_prefill_token_threshold": 2}, {"max_num_batched_tokens": 9}]
        )
        while llm.has_unfinished:
            outputs.update({o.request_id: o for o in llm.step().outputs})
            if change := next(changes, None):
                llm.reconfigure(**change)
        assert [outputs[i].token_ids for i in ids] == expected


def test_limits_that_shrink_below_a_live_request_end_it_with_what_it_has() -> None:
    with LLM("tiny-llama", **EAGER) as llm:
        long = llm.add_request([7] * 50, SamplingParams(max_tokens=40, ignore_eos=True))
        short = llm.add_request([1, 2, 3], SamplingParams(max_tokens=6, ignore_eos=True))
        llm.step()
        llm.reconfigure(max_model_len=32)
        outputs = {}
        while llm.has_unfinished:
            outputs.update({o.request_id: o for o in llm.step().outputs})
        assert outputs[long].finish_reason == "length" and len(outputs[long].token_ids) == 1
        assert outputs[short].finish_reason == "length" and len(outputs[short].token_ids) == 6


def test_a_refused_change_changes_nothing() -> None:
    with LLM("tiny-llama", **EAGER) as llm:
        before, request = llm.config, llm.add_request([1, 2, 3])
        for change in (
            {"attention_backend": "FLASHINFER"},
            {"block_size": 0},
            {"no_such": 1},
            {"max_model_len": 10**6},
        ):
            with pytest.raises(LabkitError):
                llm.reconfigure(**change)
        assert llm.config == before
        while llm.has_unfinished:
            outputs = llm.step().outputs
        assert outputs[0].request_id == request and outputs[0].finish_reason == "length"


def test_a_cache_that_does_not_fit_leaves_the_old_engine_and_its_requests() -> None:
    """The old cache is given back before the new one is made, so a failure there must make it again."""
    with LLM("tiny-llama", **{**SMALL, "cudagraph_mode": "FULL_DECODE_ONLY"}) as llm:
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        expected = llm.generate([[1, 2, 3]], params)[0].token_ids
        llm.reset()
        before, request = llm.config, llm.add_request([1, 2, 3], params)
        llm.step()
        llm.step()
        with pytest.raises(ConfigError, match="num_gpu_blocks_override"):
            llm.reconfigure(num_gpu_blocks_override=10**12)
        assert llm.config == before
        reports = []
        while llm.has_unfinished:
            reports.append(llm.step())
        assert reports[-1].outputs[0].request_id == request and reports[-1].outputs[0].token_ids == expected
        assert any(report.mode == "FULL" for report in reports), "the graphs are back too"
    with pytest.raises(ConfigError, match="GiB"):
        LLM("tiny-llama", **{**EAGER, "num_gpu_blocks_override": 10**12})


def test_a_launch_count_belongs_to_the_backend_it_was_counted_for() -> None:
    with LLM("tiny-llama", **EAGER) as llm:
        llm.engine.note_launches("NONE", 1, 305)
        llm.prime(1, 10, 4)
        assert llm.step().launches == 305
        llm.reconfigure(sdpa_kernel="math")
        assert llm.step().launches is None
        llm.reconfigure(sdpa_kernel="auto")
        assert llm.step().launches == 305


def test_another_model_can_be_loaded_in_place() -> None:
    with LLM("tiny-llama", **EAGER) as llm:
        report = llm.reconfigure(model="tiny-qwen3")
        assert llm.model_config.name == "tiny-qwen3" and "model" in report.rebuilt_ms
        assert llm.generate([1, 2, 3])[0].finish_reason == "length"


# --- lifetime and reports ---------------------------------------------------------------------------------------------


def test_c44_closing_gives_the_memory_back_and_is_safe_twice() -> None:
    for fail in (False, True):
        llm = LLM("tiny-llama", **SMALL)
        cache = weakref.ref(llm.engine.kv)
        if fail:
            with pytest.raises(RequestError):
                llm.generate([[]])
        llm.close()
        llm.close()
        gc.collect()
        assert cache() is None
        with pytest.raises(LabkitError, match="closed"):
            llm.step()


def test_reports_add_up() -> None:
    with LLM("tiny-llama", **EAGER) as llm:
        _, reports = teach(llm, prompts(4), 5)
        for report in reports:
            assert (
                report.num_tokens == sum(report.scheduled.values())
                and report.size == report.num_tokens + report.num_padded
            )
            assert report.num_reqs == len(report.scheduled)
            assert 0 < report.host_us <= report.wall_ms * 1e3 * 1.01, "phases are parts of the step"
            assert set(report.as_dict()) >= {"mode", "size", "launches", "phases_us"}
        assert [r.step_id for r in reports] == list(range(1, len(reports) + 1))
    with LLM("tiny-llama", **EAGER) as llm:
        idle = llm.step()
        assert (idle.size, idle.num_reqs, idle.outputs) == (0, 0, ())


def test_stream_joins_to_the_whole_text_and_leaving_early_aborts() -> None:
    with LLM("tiny-llama", **EAGER) as llm:
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        whole = llm.generate([[1, 2, 3]], params)[0]
        parts = list(llm.stream([1, 2, 3], params))
        assert "".join(p.delta for p in parts) == whole.text and parts[-1].token_ids == whole.token_ids
        for _ in llm.stream([1, 2, 3], params):
            break
        assert not llm.has_unfinished
        gc.collect()


def test_max_tokens_zero_is_over_at_once() -> None:
    with LLM("tiny-llama", **EAGER) as llm:
        out = llm.generate([[1, 2]], SamplingParams(max_tokens=0))[0]
        assert (out.finish_reason, out.token_ids) == ("length", ())


def test_primed_requests_decode_at_their_context_and_leave_no_cache_behind() -> None:
    with LLM("tiny-llama", **EAGER) as llm:
        ids = llm.prime(3, 30, max_tokens=5)
        first = llm.step()
        assert (first.num_tokens, first.num_reqs, first.max_seq_len) == (3, 3, 31)
        while llm.has_unfinished:
            llm.step()
        assert len(ids) == 3 and not llm.engine.pool._entries
        with pytest.raises(RequestError, match="max_model_len=128"):
            llm.prime(1, 127)
        with pytest.raises(RequestError):
            llm.prime(7, 30)
        assert not llm.has_unfinished


def test_nothing_warns_on_the_ordinary_path() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with LLM("tiny-llama", **SMALL, cudagraph_mode="FULL_DECODE_ONLY") as llm:
            llm.generate([[1, 2, 3]])


# --- a step on a device that is not done yet -------------------------------------------------------------------------


class _Event:
    """An event that a device reaches when it is waited for, as in a step that reads nothing back."""

    def __init__(self) -> None:
        self.reached = False

    def synchronize(self) -> None:
        self.reached = True

    def elapsed_time(self, end: _Event) -> float:
        assert end.reached, "both events must be completed before calculating elapsed time"
        return 2.0


def test_a_step_that_samples_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("tiny-llama", **{**EAGER, "max_num_batched_tokens": 8}) as llm:
        execute = llm.engine.runner.execute
        monkeypatch.setattr(
            llm.engine.runner, "execute", lambda step: dataclasses.replace(execute(step), events=(_Event(), _Event()))
        )
        llm.add_request(list(range(1, 20)), SamplingParams(max_tokens=2, ignore_eos=True))
        first = llm.step()
        assert first.num_tokens == 8 and not first.outputs, "a chunk, of which no token comes"
        assert first.device_us == 2000.0
        while llm.has_unfinished:
            assert llm.step().device_us == 2000.0
