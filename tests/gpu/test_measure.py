"""Measuring on a GPU: launches whose number is known, costs, bandwidth, rows with what only a GPU can tell."""

from __future__ import annotations

import pytest
import torch

from labkit import bench
from labkit.attention.kernels.probe import launch_once
from labkit.bench.attention import AttentionShape, bench_attention
from labkit.config import EngineConfig
from labkit.measure import clocks, launches, limits
from labkit.measure.provenance import collect

CUDA = torch.device("cuda")


def graph_of(work) -> torch.cuda.CUDAGraph:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def test_launches_of_known_work_are_counted_by_kind() -> None:
    x, pinned = torch.zeros(8, device=CUDA), torch.zeros(8, pin_memory=True)
    a = torch.randn(1, 576, device=CUDA, dtype=torch.bfloat16)
    w = torch.randn(576, 576, device=CUDA, dtype=torch.bfloat16)
    triton, adds = launch_once(x), lambda: [x.add_(1) for _ in range(5)]
    graph = graph_of(adds)
    torch.nn.functional.linear(a, w)

    found = launches.count(adds)
    assert (found.launches, found.by_kind, found.kernels) == (5, {"torch": 5}, 5)
    found = launches.count(lambda: [triton() for _ in range(3)])
    assert (found.launches, found.by_kind) == (3, {"triton": 3}), found.names
    found = launches.count(lambda: torch.nn.functional.linear(a, w))
    assert found.by_kind.get("gemm", 0) == found.launches >= 1, found.names
    found = launches.count(graph.replay)
    assert (found.launches, found.graph_launches, found.by_kind) == (1, 1, {"graph": 1})
    assert found.kernels == 5, "kernels of a graph are seen, but the host did not launch them"
    found = launches.count(lambda: (x.copy_(pinned, non_blocking=True), x.cpu()))
    assert (found.launches, found.copies) == (0, 2)
    found = launches.count(lambda: (adds(), triton(), graph.replay(), x.copy_(pinned)))
    assert (found.launches, found.complete) == (7, True)
    assert found.by_kind == {"torch": 5, "triton": 1, "graph": 1, "copy": 1}


def test_every_kind_of_launch_has_a_cost() -> None:
    cost = launches.launch_cost_us(CUDA, triton=launch_once(torch.zeros(8, device=CUDA)))
    assert set(cost) == {"torch", "gemm", "triton", "graph", "copy"}
    assert all(0.1 < us < 1000 for us in cost.values()), cost


def test_device_time_is_not_issue_time() -> None:
    a = torch.randn(8192, 8192, device=CUDA, dtype=torch.bfloat16)
    work = lambda: a @ a  # noqa: E731
    device_us = sorted(clocks.sample_us(work, samples=5, device=CUDA))[2]
    host_us = clocks.host_us(work, calls=10, rounds=3, device=CUDA)
    assert device_us > 2 * host_us


def test_copy_bandwidth_is_that_of_a_gpu() -> None:
    assert limits.copy_bandwidth_gb_s(CUDA) > 100


def test_the_origin_names_gpu_driver_and_cuda() -> None:
    found = collect("LIVE", "x")
    assert found.gpu == torch.cuda.get_device_name() and found.driver and found.packages["cuda"] == torch.version.cuda
    assert collect("LIVE", "x", device="cpu").gpu is None


def test_eager_and_graph_rows_of_one_run() -> None:
    config = EngineConfig(model="tiny-llama", max_model_len=256, max_num_seqs=8)
    recording, notes = bench.bench(config, [3], [64], steps=10, warmup=3)
    graph, eager = recording.rows
    assert (graph.mode, graph.size, eager.mode, eager.size) == ("FULL", 4, "NONE", 3)
    assert graph.graph_launches == 1 and eager.graph_launches == 0
    assert graph.launches < eager.launches, (graph.launches_by_kind, eager.launches_by_kind)
    assert not graph.emulated and graph.device_us and eager.device_us
    assert graph.launch_cost_us.keys() == {"torch", "gemm", "triton", "triton_bare", "graph", "copy"}
    assert graph.floor_ms and 0 < graph.floor_ms < graph.p50_ms
    assert recording.provenance.gpu and not notes
    (pair,) = bench.comparisons(recording)
    assert pair.fair is not None and pair.explained_us


@pytest.mark.parametrize("backend", ["TRITON_ATTN", "TORCH_SDPA"])
def test_attention_rows_warm_and_rotated_in_a_graph_and_eager(backend: str) -> None:
    rows = bench_attention(backend, AttentionShape.decode(2, 256), samples=5)
    assert [(r.launch, r.kv) for r in rows] == [
        ("graph", "warm"), ("graph", "rotated"), ("eager", "warm"), ("eager", "rotated"),
    ]  # fmt: skip
    rotated = rows[1]
    cache = torch.cuda.get_device_properties(CUDA).L2_cache_size
    assert rotated.sets >= 4 and rotated.sets * 2 * 256 * 8 * 128 * 2 * 2 > 2 * cache


def test_a_mixed_batch_is_captured_only_where_the_tier_allows() -> None:
    shape = AttentionShape((1, 5, 1), (40, 30, 7))
    assert {r.launch for r in bench_attention("TRITON_ATTN", shape, samples=3)} == {"graph", "eager"}
    assert {r.launch for r in bench_attention("TORCH_SDPA", shape, samples=3)} == {"eager"}
