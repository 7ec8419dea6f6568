"""Timelines from traces whose content is known, and each rule of the integrity check with a trace that breaks it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from labkit.measure import timeline
from labkit.measure.integrity import Expected, eager_counts
from labkit.measure.launches import from_trace as count
from labkit.measure.roles import role_of, short_name
from labkit.measure.spans import ROLES, Span, StepTimeline, TimelineError, union
from labkit.measure.timeline import from_trace
from tests.traces import ADD, ATTENTION, LAYER, MAX, NORM, NVJET, TraceMaker, eager, full, piecewise

BUSY = sum(us for _, us in LAYER) * 3 + 8 + 3 + 1.5
NODES = 3 * len(LAYER)
KERNELS = NODES + 2


# --- what is read -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "mode", "launches", "graphs"),
    [(eager, "NONE", 17, 0), (full, "FULL", 3, 1), (piecewise, "PIECEWISE", 9, 4)],
)
def test_a_step_is_read_in_every_mode(make: Callable[..., TraceMaker], mode: str, launches: int, graphs: int) -> None:
    events = make().done()
    random.Random(3).shuffle(events)
    found = from_trace(events, title="x")
    assert found.problems == ()
    assert (found.mode, found.launches, found.graph_launches) == (mode, launches, graphs)
    assert count(events).launches == launches, "as the launch counter counts"
    assert len(found.device) == KERNELS + 1 and found.busy_us == pytest.approx(BUSY)
    assert eager_counts(found) == {"norm": 3, "gemm": 7, "rope_cache": 3, "attention": 3, "sampling": 1}
    begins = [span.begin_us for span in found.host]
    assert begins == sorted(begins) and begins[0] == 10.0, "on the step's own clock"
    for span in found.device:
        started = found.host[span.launch]
        assert started.begin_us <= span.begin_us
        assert started.role in (span.role, "graph")
    assert found.extent == (10.0, max(span.end_us for span in found.device))
    assert found.busy_us + found.idle_us == pytest.approx(found.extent[1] - found.extent[0])
    assert StepTimeline.from_dict(found.as_dict()).launches == launches


@pytest.mark.parametrize("odd", [[1], {"a": 1}])
def test_events_whose_ids_are_no_ids_are_a_problem_not_a_crash(odd: Any) -> None:
    events = eager().done()
    kernel = next(e for e in events if e.get("cat") == "kernel")
    kernel["args"] = {**kernel["args"], "correlation": odd}
    events.append({"ph": "X", "cat": odd, "name": odd, "ts": 1.0})
    assert any("No host call" in problem for problem in from_trace(events).problems)


def test_idle_is_a_brute_force_count_of_nanoseconds() -> None:
    found = from_trace(eager().done())
    begin, end = (round(t * 1000) for t in found.extent)
    busy = set()
    for span in found.device:
        busy.update(range(round(span.begin_us * 1000), round(span.end_us * 1000)))
    assert found.idle_us == pytest.approx((end - begin - len(busy)) / 1000, abs=0.1)


def test_kernels_that_overlap_are_no_problem_and_count_once() -> None:
    made = eager()
    made.work(ADD, 4.0, made.call("cudaLaunchKernel"), begin=made.host)
    made.work(ADD, 4.0, made.call("cudaLaunchKernel"), begin=made.host - 10.0)  # another stream
    found = from_trace(made.done())
    assert found.problems == ()
    spans = [(s.begin_us, s.end_us) for s in found.device]
    assert sum(e - b for b, e in spans) > found.busy_us == pytest.approx(sum(e - b for b, e in union(spans)))


def test_a_runtime_call_and_the_driver_call_it_makes_are_one_launch() -> None:
    made = full()
    for event in list(made.events):
        if event["cat"] == "cuda_runtime":
            made.events.append({**event, "cat": "cuda_driver", "name": "cuLaunchKernel", "dur": event["dur"] - 1})
    assert from_trace(made.done()).launches == 3


def test_the_annotated_step_is_taken_out_of_a_longer_trace() -> None:
    made = full()
    first = made.done()
    later = [
        {**e, "ts": e["ts"] + 1000.0, "args": {**e["args"], "correlation": e["args"].get("correlation", 0) + 5000}}
        for e in eager().done()
        if e["ph"] == "X"
    ]
    events = [*first, *later]
    assert from_trace(events).mode == "NONE" and from_trace(events, step=0).mode == "FULL"
    assert from_trace(events).problems == from_trace(events, step=0).problems == ()
    with pytest.raises(TimelineError, match="holds 2 steps"):
        from_trace(events, step=2)


def test_a_trace_without_annotation_is_one_step_from_its_first_call() -> None:
    found = from_trace(full(annotated=False).done())
    assert found.host[0].begin_us == 0.0 and found.problems == () and found.wall_us > found.busy_us


def test_phases_lie_end_to_end_around_the_host_calls() -> None:
    found = from_trace(full().done(), phases_us={"launch": 30.0, "schedule": 7.0, "sample": 5.0})
    assert [(s.name, s.begin_us, s.end_us) for s in found.phases] == [
        ("schedule", 0.0, 7.0), ("launch", 7.0, 37.0), ("sample", 37.0, 42.0),
    ]  # fmt: skip
    assert found.wall_us == 42.0


def test_a_cpu_step_has_no_device_lane() -> None:
    made = TraceMaker()
    made.event("cpu_op", "aten::mm", 3.0, 50.0)
    with pytest.raises(TimelineError, match="operators are no launches"):
        from_trace(made.done())


def test_why_not_says_that_a_cpu_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no device lane" in timeline.why_not() and "saved trace" in timeline.why_not()


# --- integrity: each trace breaks one rule ----------------------------------------------------------------------------


def drop_kernel(made: TraceMaker, name: str) -> None:
    at = max(i for i, e in enumerate(made.events) if e["name"] == name)
    del made.events[at]


def lost_kernel() -> tuple[TraceMaker, Expected]:
    made = eager()
    drop_kernel(made, MAX)
    return made, Expected()


def lost_in_graph() -> tuple[TraceMaker, Expected]:
    made = full()
    drop_kernel(made, ATTENTION)
    return made, Expected(graphs=1, graph_nodes=NODES)


def lost_graph() -> tuple[TraceMaker, Expected]:
    made = piecewise()
    return made, Expected(graphs=5)


def no_correlation() -> tuple[TraceMaker, Expected]:
    made = eager()
    made.call("cudaLaunchKernel", correlation=None)
    return made, Expected()


def shared_correlation() -> tuple[TraceMaker, Expected]:
    made = eager()
    made.call("cudaLaunchKernel", correlation=made.correlation)
    return made, Expected()


def nobody_started_it() -> tuple[TraceMaker, Expected]:
    made = eager()
    made.work(ADD, 2.0, 99999)
    return made, Expected()


def negative_time() -> tuple[TraceMaker, Expected]:
    made = eager()
    made.events[-1]["dur"] = -4.0
    return made, Expected()


def no_time() -> tuple[TraceMaker, Expected]:
    made = eager()
    del made.events[-1]["ts"]
    return made, Expected()


def before_its_launch() -> tuple[TraceMaker, Expected]:
    made = eager()
    made.work(ADD, 2.0, made.call("cudaLaunchKernel"), begin=made.host - 30.0)
    return made, Expected()


def graph_before_its_launch() -> tuple[TraceMaker, Expected]:
    made = full()
    made.work(NORM, 2.0, made.call("cudaGraphLaunch"), begin=made.host - 30.0)
    return made, Expected()


def outside_the_trace() -> tuple[TraceMaker, Expected]:
    made = eager()
    correlation = made.call("cudaLaunchKernel")
    made.done()
    made.work(ADD, 50.0, correlation, begin=made.host + 200.0)
    return made, Expected()


def graphs_mixed() -> tuple[TraceMaker, Expected]:
    made = piecewise()
    a = made.call("cudaGraphLaunch")
    b = made.call("cudaGraphLaunch")
    for i, correlation in enumerate((a, b, a, b)):
        made.work(NORM, 8.0, correlation, begin=made.host + 10 * i)
    return made, Expected()


def longer_than_events() -> tuple[TraceMaker, Expected]:
    return eager(), Expected(event_us=BUSY / 1.06)


def other_kernels() -> tuple[TraceMaker, Expected]:
    return full(), Expected(eager={"norm": 3, "gemm": 8, "rope_cache": 3, "attention": 3, "sampling": 1})


def no_attention() -> tuple[TraceMaker, Expected]:
    return full(), Expected(eager={"norm": 3, "gemm": 7, "rope_cache": 3, "sampling": 1})


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (lost_kernel, "lost the kernels of 1 launch (cudaLaunchKernel)"),
        (lost_in_graph, "15 kernels were recorded into the step's graphs, and the trace shows 14"),
        (lost_graph, "replays 5 graphs, and the trace shows 4"),
        (no_correlation, "No correlation id on 1 launch"),
        (shared_correlation, "share correlation ids"),
        (nobody_started_it, "No host call of the trace started 1 span of the device (vectorized_elementwise_kernel)"),
        (negative_time, "end before they begin, or have no time: 1"),
        (no_time, "end before they begin, or have no time: 1"),
        (before_its_launch, "clocks of host and device disagree"),
        (graph_before_its_launch, "(1, 1 of them in graphs)"),
        (outside_the_trace, "Outside the traced time: 1 span of the device (vectorized_elementwise_kernel)"),
        (graphs_mixed, "A graph begins while the one before it still runs: 1 time"),
        (longer_than_events, "more than 5% too long"),
        (other_kernels, "gemm: 8 eager and 7 here"),
        (no_attention, "attention: 0 eager and 3 here"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_trace_that_breaks_one_rule_says_that_and_nothing_else(broken: Callable[[], Any], says: str) -> None:
    made, expected = broken()
    events = made.events if broken is outside_the_trace else made.done()
    found = from_trace(events, expected=expected)
    assert len(found.problems) == 1 and says in found.problems[0], found.problems
    assert found.notes == (), "nothing is explained of a trace that cannot be believed"
    again = StepTimeline.from_dict(found.as_dict())
    assert again.problems == found.problems, "it can be stored with what is wrong with it"


@pytest.mark.parametrize("make", [eager, full, piecewise])
def test_everything_known_agrees_with_a_good_trace(make: Callable[..., TraceMaker]) -> None:
    reference = eager_counts(from_trace(eager().done()))
    nodes = {eager: None, full: NODES, piecewise: NODES - 3}[make]
    graphs = {eager: 0, full: 1, piecewise: 4}[make]
    expected = Expected(event_us=BUSY / 1.04, graphs=graphs, graph_nodes=nodes, eager=reference)
    found = from_trace(make().done(), expected=expected)
    assert found.problems == ()
    assert any(note.startswith("Checked: ") and "eager step" in note for note in found.notes)


def test_attention_split_another_way_and_copies_are_noted_not_refused() -> None:
    made = full()
    made.work("merge_splits_kernel", 1.0, made.call("cuLaunchKernel", "cuda_driver"))
    made.work("void at::native::elementwise_kernel<direct_copy_kernel_cuda>(int)", 1.0, made.call("cudaLaunchKernel"))
    found = from_trace(made.done(), expected=Expected(eager=eager_counts(from_trace(eager().done()))))
    assert found.problems == ()
    assert any("Attention is 4 kernels here and 3 in the eager step" in note for note in found.notes)


# --- what a reader should know ----------------------------------------------------------------------------------------


def test_the_forward_of_a_graph_is_compared_with_events() -> None:
    busy = sum(us for _, us in LAYER) * 3
    (said,) = (n for n in from_trace(full().done(), forward_us=busy * 1.03).notes if "forward" in n)
    assert said.endswith("they agree within 5%.")
    (said,) = (n for n in from_trace(full().done(), forward_us=busy + 7.0).notes if "forward" in n)
    assert "gaps of 7 µs" in said and "lasts" not in said, "14 gaps of half a microsecond"
    (said,) = (n for n in from_trace(full().done(), forward_us=busy * 2).notes if "forward" in n)
    assert "changes them" in said


def test_the_forward_of_an_eager_step_lies_between_two_events() -> None:
    made = TraceMaker()
    made.launch(ADD, 2.0)
    made.call("cudaEventRecord")
    made.launch(NORM, 50.0)
    made.call("cudaEventRecord")
    made.launch(NVJET, 9.0)
    notes = from_trace(made.done(), forward_us=50.0).notes
    assert any("busy 50 µs" in note and "agree" in note for note in notes)


def test_overhead_is_a_ratio_of_medians() -> None:
    assert "1.50 times" in timeline.overhead([100.0, 90.0, 200.0], [150.0]) and "1 and 3" in timeline.overhead(
        [1.0, 2.0, 3.0], [2.0]
    )


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "role"),
    [
        (NORM, "norm"), (ATTENTION, "attention"), (MAX, "sampling"), (NVJET, "gemm"), (ADD, "other"),
        ("rotary_kernel", "rope_cache"), ("write_kv_kernel", "rope_cache"), ("silu_and_mul_kernel", "activation"),
        ("moe_grouped_kernel", "gemm"), ("moe_gate_up_pairs_kernel", "gemm"), ("moe_down_tokens_kernel", "gemm"),
        ("moe_route_kernel", "other"), ("moe_align_kernel", "other"), ("moe_sum_kernel", "other"),
        ("merge_splits_kernel", "attention"), ("gather_pages_kernel", "attention"),
        ("Memcpy DtoH (Device -> Pinned)", "copy"), ("Memset (Device)", "copy"), ("memcpy32_post", "copy"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>()", "copy"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::Tens)>()", "copy"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, int, 2>()", "copy"),
        ("void at::native::vectorized_gather_kernel<16, int>(char*)", "embedding"),
        ("void at::native::(anonymous namespace)::indexSelectSmallIndex<float>()", "embedding"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>(cublasGemvParamsEx)", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>(...)", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64>", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", "gemm"),
        ("void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64>>(...)", "attention"),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<>>>()", "attention"),
        ("flash::prepare_varlen_num_blocks_kernel(int)", "attention"),
        ("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm100FlashAttentionForwardSm100_object_at_", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128", "attention"),
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<>()", "attention"),
        ("void flashinfer::PersistentVariableLengthMergeStatesKernel<8>()", "attention"),
        ("void flashinfer::norm::RMSNormKernel<8, __nv_bfloat16>()", "norm"),
        ("void flashinfer::sampling::TopKTopPSamplingFromProbKernel<>()", "sampling"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3", "norm"),
        ("triton_poi_fused_mul_silu_split_1", "activation"),
        ("cpp_fused_add_index_mul_split_split_with_sizes_sub_unsqueeze_view_1", "rope_cache"),
        ("triton_poi_fused_embedding_0", "embedding"), ("triton_poi_fused__to_copy_clone_2", "copy"),
        ("triton_tem_fused_mm_4", "gemm"), ("triton_tem_fused_flex_attention_0", "attention"),
        ("triton_poi_fused_add_5", "other"), ("whatever", "other"),
    ],
)  # fmt: skip
def test_roles_are_read_from_names(name: str, role: str) -> None:
    assert role in ROLES and role_of(name) == role


def test_short_names() -> None:
    assert short_name(ADD) == "vectorized_elementwise_kernel"
    assert short_name(MAX) == "reduce_kernel" and short_name(NVJET) == NVJET
    assert short_name("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>(x)") == "CatArrayBatchedCopy"
    assert short_name("Memcpy HtoD (Pinned -> Device)") == "Memcpy HtoD (Pinned -> Device)"


# --- spans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"spans": [["host", "a", "gemm", 0, 1]]}, "six values"),
        ({"spans": [["disk", "a", "gemm", 0, 1, None]]}, "lane"),
        ({"spans": [["host", "a", "gem", 0, 1, None]]}, "role"),
        ({"spans": [["host", "a", "gemm", 2, 1, None]]}, "ends before"),
        ({"spans": [["host", "a", "gemm", "0", 1, None]]}, "lasts from"),
        ({"spans": [["host", 1, "gemm", 0, 1, None]]}, "no text"),
        ({"spans": [["device", "a", "gemm", 0, 1, 0]]}, "0 host calls"),
        ({"spans": 3}, "no list"), ({"extra": 1}, "unknown"), ({"notes": "x"}, "notes"), ({"title": 3}, "no text"),
        ({"launches": -1}, "no count"), ({"launches": 1, "graph_launches": 2}, "2 graphs among 1"),
        ({"wall_us": None}, "no time"), ({"event_us": "x"}, "event_us"),
    ],
)  # fmt: skip
def test_a_damaged_timeline_is_refused(change: dict[str, Any], says: str) -> None:
    good = StepTimeline("t", "NONE", (Span("host", "a", "gemm", 0.0, 1.0),), 2.0, 1).as_dict()
    StepTimeline.from_dict(good)
    with pytest.raises(TimelineError, match=says):
        StepTimeline.from_dict({**good, **change})
    with pytest.raises(TimelineError, match="not an object"):
        StepTimeline.from_dict([])
    with pytest.raises(TimelineError, match="has no wall_us"):
        StepTimeline.from_dict({k: v for k, v in good.items() if k != "wall_us"})
