"""Memory from the shape: against tensors that are really made on the CPU, and against counts by hand."""

from __future__ import annotations

import json

import pytest

from labkit.config import EngineConfig
from labkit.errors import ConfigError
from labkit.measure.memory import (
    MIB,
    PARTS,
    Limits,
    kv_by_kind,
    kv_bytes,
    predict,
    report,
    weight_bytes,
    workspace_bytes,
)
from labkit.measure.provenance import Kind, ProvenanceError
from labkit.models.shapes import SHAPES

LIMITS = Limits("bfloat16", 16, 1024, 256, 8192)


@pytest.mark.parametrize(
    ("model", "parameters", "table"),
    [
        ("smollm2-135m", 134_515_008, 8192 * 64 * 4), ("llama-3.2-1b", 1_235_814_400, 131_072 * 64 * 4),
        ("llama-3.1-8b", 8_030_261_248, 131_072 * 128 * 4),
    ],
)  # fmt: skip
def test_weights_are_the_published_parameters_and_the_rotary_table(model: str, parameters: int, table: int) -> None:
    assert weight_bytes(SHAPES[model], "bfloat16") == 2 * parameters + table
    assert weight_bytes(SHAPES[model], "float32") == 4 * parameters + table


def test_a_kv_cache_by_hand() -> None:
    smol = SHAPES["smollm2-135m"]  # 30 layers, K and V, 3 heads of 64, 2 bytes: 23,040 a token
    page = 16 * 30 * 2 * 3 * 64 * 2
    assert kv_bytes(smol, LIMITS) == page * (256 * 64 + 1)
    assert kv_bytes(smol, LIMITS, tokens=17) == page * (256 * 2 + 1)
    assert kv_bytes(smol, LIMITS, budget=10 * page + 5) == 10 * page
    assert kv_bytes(smol, LIMITS, budget=10**15) == page * (256 * 64 + 1), "no more than can be of use"


def test_the_widest_moment_is_in_the_feed_forward_part_or_in_the_head() -> None:
    qwen, smol = SHAPES["qwen3-0.6b"], SHAPES["smollm2-135m"]
    assert workspace_bytes(smol, LIMITS) == 8192 * (2 * 576 + 3 * 1536) * 2
    few = Limits("float32", 16, 1024, 256, 256)
    assert workspace_bytes(qwen, few) == 256 * 1024 * 4 + 256 * 151_936 * 4


def test_a_budget_leaves_the_rest_to_the_cache_or_says_that_nothing_fits() -> None:
    model = SHAPES["llama-3.1-8b"]
    parts = {part.name: part for part in predict(model, LIMITS, budget=40 << 30)}
    assert list(parts) == ["weights", "workspace", "graphs", "kv"] and parts["graphs"].predicted is None
    used = parts["weights"].predicted + parts["workspace"].predicted + parts["kv"].predicted
    page = model.kv_bytes_per_token(2) * 16
    assert 0 <= (40 << 30) - used < page
    with pytest.raises(ConfigError, match="do not fit"):
        predict(model, LIMITS, budget=8 << 30)
    with pytest.raises(ConfigError, match="has no known size"):
        weight_bytes(model, "float4")


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3"])
def test_an_engine_on_the_cpu_holds_what_was_predicted(model: str) -> None:
    from labkit.llm import LLM

    config = EngineConfig(model=model, device="cpu", max_model_len=96, max_num_seqs=5, max_num_batched_tokens=64)
    with LLM(config=config) as llm:
        limits = Limits(
            llm.config.dtype, llm.config.block_size, llm.config.max_model_len, llm.config.max_num_seqs,
            llm.config.max_num_batched_tokens,
        )  # fmt: skip
        found = report(model, llm.model_config, limits, llm.memory)
    weights, workspace, graphs, kv = (found.part(name) for name in PARTS)
    assert (kv.difference, weights.difference) == (0, 0)
    assert workspace.actual is None and found.peak is None, "a CPU's allocator tells no peak"
    assert found.kind is Kind.LIVE and "LIVE" in found.sentence and "KV cache" in found.sentence


def test_a_peak_less_what_is_held_is_workspace_and_graphs_stand_beside_their_estimate() -> None:
    model = SHAPES["smollm2-135m"]
    memory = {"weights": 300 * MIB, "kv": 5000 * MIB, "graphs": 40 * MIB, "peak": 5500 * MIB}
    found = report("x", model, LIMITS, memory, kind="RECORDED", graphs_estimated=50 * MIB, by_size=[("FULL", 8, 1.5)])
    assert found.part("workspace").actual == 160 * MIB
    assert found.part("graphs").difference == -10 * MIB
    data = json.loads(json.dumps(found.as_dict()))
    assert data["kind"] == "RECORDED" and data["graphs_by_size"] == [{"mode": "FULL", "size": 8, "mib": 1.5}]
    assert "at most 5,500 MiB at once" in found.sentence


def test_a_prediction_alone_is_simulated_and_a_measurement_never() -> None:
    model = SHAPES["smollm2-135m"]
    alone = report("x", model, LIMITS)
    assert alone.kind is Kind.SIMULATED and "predicted" in alone.sentence
    with pytest.raises(ProvenanceError, match="never SIMULATED"):
        report("x", model, LIMITS, {"weights": 1, "kv": 1}, kind="SIMULATED")


def test_layers_with_a_window_keep_what_they_cannot_read() -> None:
    """Counted token by token: a page is unused when the next token, and so every later one, is past it by a window."""
    model = SHAPES["tiny-gemma2"]
    layer = 2 * model.num_kv_heads * model.head_size * 2
    for size, tokens in ((4, 1), (4, 23), (16, 24), (16, 100), (16, 1000), (5, 997)):
        limits = Limits("bfloat16", size, 1000, 4, 64)
        sliding, full = kv_by_kind(model, limits, tokens)
        seen = [position for position in range(tokens) if tokens - position < 24]
        pages = -(-tokens // size)
        dead = sum(all(p not in seen for p in range(page * size, (page + 1) * size)) for page in range(pages))
        assert (sliding.kind, sliding.layers, sliding.window, sliding.readable) == (
            "sliding_attention",
            2,
            24,
            len(seen),
        )
        assert (sliding.held, sliding.unused) == (2 * pages * size * layer, 2 * dead * size * layer)
        assert (full.readable, full.unused, full.held) == (tokens, 0, sliding.held)
        assert "not freed" in report("x", model, limits).sentence
    assert kv_by_kind(SHAPES["tiny-llama"], limits, 100) == ()
