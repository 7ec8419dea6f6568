"""One simulated step: what it adds up to, against numbers worked out by hand, and which way each parameter pulls."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.errors import ConfigError
from labkit.measure import limits
from labkit.measure.provenance import Kind
from labkit.models.shapes import SHAPES
from labkit.simulate.step import BACKENDS, H200, MODES, WAITS, DecodeModel, Machine, kernels_of, simulate_step

SMOL, LLAMA = SHAPES["smollm2-135m"], SHAPES["llama-3.1-8b"]
IDEAL = Machine(
    kernel_us=0.0, launch_us=dict.fromkeys(("torch", "gemm", "triton", "graph", "copy"), 0.0), graph_node_us=0.0,
    host_fixed_us=0.0, host_request_us=0.0, sync_us=0.0, tflops=1e9, copy_gb_s=1000.0,
)  # fmt: skip
names = st.sampled_from(("smollm2-135m", "qwen3-0.6b", "llama-3.2-1b"))


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen3-0.6b", "llama-3.1-8b"])
@pytest.mark.parametrize("batch", [1, 16])
def test_an_ideal_machine_takes_the_time_of_the_bytes(name: str, batch: int) -> None:
    """The reference counts parameters and KV; the model of a step adds matrices up one by one."""
    got = simulate_step(DecodeModel(SHAPES[name], batch, 2048), IDEAL)
    floor = limits.floor_ms(limits.step_bytes(SHAPES[name], "bfloat16", batch, 2048), IDEAL.copy_gb_s)
    assert floor < got.wall_ms < 1.08 * floor  # activations come on top
    assert got.shares["data"] == pytest.approx(1.0)


def test_layers_with_a_window_and_norms_after_the_blocks() -> None:
    """Gemma-2 beside the same without: half of the layers read 4096 tokens of 8000, two more norms in each of 26."""
    gemma = SHAPES["gemma-2-2b"]
    plain = dataclasses.replace(gemma, layer_types=(), sandwich_norms=False, embedding_multiplier=1.0,
                                final_logit_softcapping=None)  # fmt: skip
    ours, theirs = (kernels_of(DecodeModel(shape, 2, 8000)) for shape in (gemma, plain))
    read = [sum(k.bytes for k in found if k.name == "attention") for found in (ours, theirs)]
    assert read[0] / read[1] == pytest.approx((13 * 4096 + 13 * 8000) / (26 * 8000))
    assert sum(k.role == "norm" for k in ours) - sum(k.role == "norm" for k in theirs) == 52
    assert len(ours) - len(theirs) == 52 + 1 + 5
    with pytest.raises(ConfigError, match="scores out"):
        DecodeModel(gemma, backend="TORCH_SDPA")


def test_launches_of_the_engine() -> None:
    """The counts are those of the shipped recording's NONE rows for SmolLM2."""
    for batch, backend, launches in ((1, "TRITON_ATTN", 305), (64, "TRITON_ATTN", 275), (1, "TORCH_SDPA", 695)):
        step = simulate_step(DecodeModel(SMOL, batch, backend=backend), mode="NONE")
        assert (step.timeline.launches, step.timeline.graph_launches) == (launches, 0)
    full = simulate_step(DecodeModel(SMOL), mode="FULL").timeline
    assert (full.launches, full.graph_launches) == (3, 1)
    pieces = simulate_step(DecodeModel(SMOL), mode="PIECEWISE").timeline
    assert pieces.graph_launches == SMOL.num_layers + 1
    assert pieces.mode == "PIECEWISE"


@given(name=names, batch=st.integers(1, 256), context=st.integers(1, 4096), mode=st.sampled_from(MODES),
       backend=st.sampled_from(BACKENDS))  # fmt: skip
def test_waits_add_up(name: str, batch: int, context: int, mode: str, backend: str) -> None:
    got = simulate_step(DecodeModel(SHAPES[name], batch, context, backend=backend), mode=mode)
    assert sum(got.waiting_us.values()) == pytest.approx(got.timeline.wall_us)
    assert all(us >= 0 for us in got.waiting_us.values()) and set(got.waiting_us) == set(WAITS)
    assert got.longest_wait in WAITS and got.kind is Kind.SIMULATED
    got.timeline.check()
    assert 0 < got.device_us <= got.timeline.wall_us


def test_what_if() -> None:
    small, large = DecodeModel(SMOL), DecodeModel(LLAMA, 64, 4096)
    for model, better in ((small, "cpu"), (large, "memory")):
        before = simulate_step(model, mode="NONE")
        cpu = simulate_step(model, mode="NONE", cpu_factor=3.0)
        memory = simulate_step(model, dataclasses.replace(H200, copy_gb_s=3 * H200.copy_gb_s), mode="NONE")
        assert max(cpu.wall_ms, memory.wall_ms) <= before.wall_ms
        assert min((cpu.wall_ms, "cpu"), (memory.wall_ms, "memory"))[1] == better
    assert simulate_step(small, mode="NONE").longest_wait == "instructions"
    assert simulate_step(large, mode="NONE").longest_wait == "data"
    assert simulate_step(DecodeModel(LLAMA, 4096, 1), mode="NONE").longest_wait == "arithmetic"
    assert simulate_step(small, mode="FULL").wall_ms < simulate_step(small, mode="PIECEWISE").wall_ms
    assert simulate_step(small, mode="PIECEWISE").wall_ms < simulate_step(small, mode="NONE").wall_ms


def test_less_weight_and_more_gpus_mean_fewer_bytes() -> None:
    one = simulate_step(DecodeModel(LLAMA), IDEAL).wall_ms
    assert simulate_step(DecodeModel(LLAMA, weight_bits=4), IDEAL).wall_ms == pytest.approx(one / 4, rel=0.02)
    assert simulate_step(DecodeModel(LLAMA, tp=8), IDEAL).wall_ms == pytest.approx(one / 8, rel=0.02)
    slow = simulate_step(DecodeModel(LLAMA, tp=8, all_reduce_us=50.0), IDEAL).wall_ms
    assert slow == pytest.approx(simulate_step(DecodeModel(LLAMA, tp=8), IDEAL).wall_ms + 2 * 32 * 50e-3)


def test_number_of_launches_per_layer() -> None:
    own = simulate_step(DecodeModel(SMOL), mode="NONE").timeline.launches
    for per_layer in (6, 8, 10, 25):
        step = simulate_step(DecodeModel(SMOL, launches_per_layer=per_layer), mode="NONE")
        assert step.timeline.launches == own + 30 * (per_layer - 10)


def test_every_parameter_is_visible() -> None:
    got = json.loads(json.dumps(simulate_step(DecodeModel(LLAMA, tp=2), cpu_factor=3.0, mode="NONE").as_dict()))
    assert got["kind"] == "SIMULATED"
    parameters = got["parameters"]
    assert {f.name for f in dataclasses.fields(DecodeModel)} < set(parameters)
    assert {f.name for f in dataclasses.fields(Machine)} == set(parameters["machine"])
    assert parameters["cpu_factor"] == 3.0 and parameters["machine"]["launch_us"] == dict(H200.launch_us)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: DecodeModel(SMOL, batch=0), "must lie in 1…"),
        (lambda: DecodeModel(SMOL, tp=8), "shared evenly"),
        (lambda: DecodeModel(SMOL, weight_bits=0), "INT4"),
        (lambda: DecodeModel(SMOL, backend="FLASHINFER"), "not known from a recording"),
        (lambda: DecodeModel(SMOL, launches_per_layer=3), "Take 6"),
        (lambda: DecodeModel(SMOL, all_reduce_us=-1.0), "no time"),
        (lambda: Machine(copy_gb_s=0.0), "above zero"),
        (lambda: simulate_step(DecodeModel(SMOL), cpu_factor=0.0), "twice as fast"),
        (lambda: simulate_step(DecodeModel(SMOL), mode="HALF"), "Options: NONE, PIECEWISE, FULL"),
    ],
)
def test_what_cannot_be_is_a_sentence(make: object, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make()  # type: ignore[operator]


def test_kernels_read_their_weights_once() -> None:
    """Bytes of the matrix products are the parameters but for embedding and norms, twice."""
    products = [k for k in kernels_of(DecodeModel(LLAMA), H200) if k.role == "gemm"]
    hidden, vocab = LLAMA.hidden_size, LLAMA.vocab_size
    matrices = LLAMA.num_parameters() - vocab * hidden - hidden * (2 * LLAMA.num_layers + 1)
    activations = sum(k.bytes for k in products) - 2 * matrices
    assert len(products) == 4 * LLAMA.num_layers + 1
    assert 0 < activations < 0.001 * 2 * matrices
    assert sum(k.flops for k in products) == 2 * matrices
