"""The floor of a step, counted by hand, and a bandwidth that is at least plausible."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from labkit.config import ModelConfig
from labkit.measure import limits
from labkit.models.shapes import SHAPES

MODEL = ModelConfig("m", 11, 4, 6, 3, 2, 1, 2, 64)


def test_every_weight_is_read_once_and_an_untied_input_embedding_is_not() -> None:
    layer = 4 * 4 + 2 * (4 * 2) + 4 * 4 + 3 * 4 * 6 + 2 * 4  # q, k and v, o, mlp, norms
    tied = 3 * layer + 4 + 11 * 4
    assert limits.weight_bytes(MODEL, "float32") == 4 * tied
    untied = dataclasses.replace(MODEL, tie_word_embeddings=False)
    assert untied.num_parameters() == tied + 11 * 4
    assert limits.weight_bytes(untied, "bfloat16") == 2 * tied


def test_a_step_reads_the_kv_of_every_request() -> None:
    per_token = 2 * 3 * 1 * 2 * 2
    assert (
        limits.step_bytes(MODEL, "float16", 5, 100.5) == limits.weight_bytes(MODEL, "float16") + 5 * 100.5 * per_token
    )


def test_the_floor_is_bytes_over_bandwidth() -> None:
    assert limits.floor_ms(4.277e9, 4277.0) == pytest.approx(1.0)


def test_the_copy_bandwidth_of_this_machine_is_positive() -> None:
    assert 0.01 < limits.copy_bandwidth_gb_s("cpu", mib=4, samples=3) < 10_000


def test_a_step_reads_no_more_of_kv_than_windows_hold() -> None:
    """2 of tiny-gemma2's 4 layers see 24 tokens."""
    model = SHAPES["tiny-gemma2"]
    layer = model.kv_bytes_per_token(2) / 4
    for tokens in (10, 24, 300):
        kv = limits.step_bytes(model, "bfloat16", 3, tokens) - limits.weight_bytes(model, "bfloat16")
        assert kv == pytest.approx(3 * layer * 2 * (tokens + min(tokens, 24)))


def test_a_step_reads_the_experts_that_its_tokens_need() -> None:
    """One token reads its active parameters (less the input embedding), many tokens all; a drawing agrees between."""
    model = SHAPES["qwen3-30b-a3b"]
    embedding = model.vocab_size * model.hidden_size
    one = limits.step_bytes(model, "bfloat16", 1, 0)
    assert one == pytest.approx(2 * (model.num_active_parameters() - embedding))
    assert limits.step_bytes(model, "bfloat16", 10_000, 0) == pytest.approx(limits.weight_bytes(model, "bfloat16"))
    rng = np.random.default_rng(0)
    drawn = [len({e for _ in range(8) for e in rng.permutation(128)[:8]}) for _ in range(400)]
    assert limits.expected_experts(model, 8) == pytest.approx(np.mean(drawn), rel=0.02)
