"""Counting launches in traces whose content is known, and the honest answer where there is nothing to trace."""

from __future__ import annotations

import random

import pytest

from labkit.measure import launches
from labkit.measure.launches import count, explained_us, from_trace, kernel_kind

ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int, float)"


def call(name: str, correlation: int, category: str = "cuda_runtime") -> dict:
    return {"ph": "X", "cat": category, "name": name, "args": {"correlation": correlation}}


def kernel(name: str, correlation: int) -> dict:
    return {"ph": "X", "cat": "kernel", "name": name, "args": {"correlation": correlation}}


def test_launches_are_counted_by_kind_from_any_order_of_events() -> None:
    events = [
        call("cudaLaunchKernel", 1), kernel(ADD, 1),
        call("cudaLaunchKernelExC", 2), kernel("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", 2),
        call("cuLaunchKernelEx", 3, "cuda_driver"), kernel("_paged_decode", 3),
        call("cuLaunchKernel", 4, "cuda_driver"), kernel("rms_norm", 4),
        call("cudaGraphLaunch", 5), kernel("rms_norm", 5), kernel("_paged_decode", 5), kernel(ADD, 5),
        call("cudaMemcpyAsync", 6), call("cudaMemsetAsync", 7),
        call("cudaStreamSynchronize", 8), call("cudaEventRecord", 9), call("cudaStreamIsCapturing", 10),
        {"ph": "X", "cat": "cpu_op", "name": "aten::add_", "args": {}}, {"ph": "M", "name": "process_name"},
    ]  # fmt: skip
    random.Random(5).shuffle(events)
    found = from_trace(events)
    assert found.launches == 5
    assert found.by_kind == {"torch": 1, "gemm": 1, "triton": 2, "graph": 1, "copy": 2}
    assert (found.graph_launches, found.copies, found.kernels) == (1, 2, 7)
    assert found.names == {ADD: 1, "nvjet_tst_64x8_64x16_4x1_v_bz_TNT": 1, "_paged_decode": 1, "rms_norm": 1}
    assert found.complete


def test_the_driver_call_inside_a_runtime_call_is_the_same_launch() -> None:
    pair = [call("cudaLaunchKernel", 1), call("cuLaunchKernel", 1, "cuda_driver"), kernel("plain_name", 1)]
    for events in (pair, pair[::-1]):
        found = from_trace(events)
        assert found.launches == 1 and found.by_kind == {"torch": 1}


def test_a_launch_whose_kernel_is_missing_makes_the_trace_incomplete() -> None:
    found = from_trace([call("cudaLaunchKernel", 1), call("cudaGraphLaunch", 2)])
    assert found.launches == 2 and not found.complete


@pytest.mark.parametrize(
    ("name", "driver_api", "kind"),
    [
        (ADD, False, "torch"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>(cublasGemvParamsEx)", False, "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>(...)", False, "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", False, "gemm"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64>", False, "gemm"),
        ("nvjet_tst_192x192_64x4_1x2_h_bz_coopA_TNT", True, "gemm"),
        ("void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>", False, "torch"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", False, "torch"),
        ("rotary", True, "triton"),
        ("_combine_splits", True, "triton"),
        ("rotary", False, "torch"),
    ],
)
def test_kernels_are_told_apart_by_name_and_api(name: str, driver_api: bool, kind: str) -> None:
    assert kernel_kind(name, driver_api=driver_api) == kind


def test_without_a_gpu_the_count_is_none_with_a_reason_and_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = count(lambda: pytest.fail("must not be called"))
    assert found.launches is None
    assert found.reason == "there is no CUDA device, and a CPU launches nothing"
    assert launches.count_launches is count


def test_explained_time_is_launches_times_cost() -> None:
    assert explained_us({"torch": 3, "gemm": 2, "graph": 1}, {"torch": 10.0, "gemm": 20.0, "graph": 5.0}) == 75.0
    assert explained_us({"triton": 4}, {"torch": 2.5}) == 10.0


def test_the_cost_of_a_launch_is_measured_for_what_a_cpu_has() -> None:
    found = launches.launch_cost("cpu", dtype="float32", hidden=16, calls=5)
    assert set(found.us) == {"torch", "gemm"}
    assert all(us > 0 for us in found.us.values())
    assert launches.launch_cost_us("cpu", dtype="float32", hidden=16, calls=5).keys() == found.us.keys()
