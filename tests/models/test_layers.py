"""The operations between matrix products, against the same formula in float64 and, for rotation, complex numbers."""

from __future__ import annotations

import math

import pytest
import torch

from labkit.config import RopeScaling
from labkit.models.layers import add_rms_norm, rms_norm, rotary_, rotary_frequencies, rotary_table, silu_and_mul

DTYPES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def norm64(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 576), (7, 80), (5, 3, 32)], ids=str)
def test_rms_norm_is_the_formula(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape).to(dtype) * 3, (1 + torch.randn(shape[-1])).to(dtype)
    y = rms_norm(x, weight, 1e-2)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), norm64(x, weight, 1e-2), rtol=DTYPES[dtype], atol=DTYPES[dtype])


def test_rms_norm_takes_a_view_of_a_fused_projection() -> None:
    fused, weight = torch.randn(4, 6, 32), torch.randn(32)
    view = fused[:, 2:4]
    assert not view.is_contiguous()
    torch.testing.assert_close(rms_norm(view, weight, 1e-5), rms_norm(view.contiguous(), weight, 1e-5))


def test_rms_norm_does_not_overflow_in_half_precision() -> None:
    x = torch.full((1, 64), 3e4, dtype=torch.float16)
    torch.testing.assert_close(rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-5), torch.ones_like(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_residual_stays_in_fp32(dtype: torch.dtype) -> None:
    # A bf16 stream would lose an addition of 2⁻¹⁰ to a value of 1 entirely.
    residual, x, weight = torch.ones(3, 64), torch.full((3, 64), 2.0**-10).to(dtype), torch.ones(64).to(dtype)
    for _ in range(64):
        y, residual = add_rms_norm(x, residual, weight, 1e-5)
    assert (y.dtype, residual.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(residual, torch.full((3, 64), 1 + 64 * 2.0**-10))
    torch.testing.assert_close(y.double(), norm64(residual, weight, 1e-5), rtol=DTYPES[dtype], atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [32, 80])
def test_rotation_is_a_complex_product(dtype: torch.dtype, size: int) -> None:
    heads, kv_heads, tokens = 3, 1, 9
    fused = torch.randn(tokens, heads + 2 * kv_heads, size).to(dtype)
    positions = torch.randint(0, 500, (tokens,))
    frequencies = [10_000.0 ** (-2 * i / size) for i in range(size // 2)]
    angles = positions.double()[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    pairs = torch.complex(fused[..., : size // 2].double(), fused[..., size // 2 :].double())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.cat((turned.real, turned.imag), dim=-1)

    before = fused.clone()
    q, k, v = fused.split((heads, kv_heads, kv_heads), dim=1)
    rotary_(q, k, positions, rotary_table(500, rotary_frequencies(size, 10_000.0, None)))
    tolerance = max(DTYPES[dtype], 2e-4)  # an fp32 angle of 500 radians is off by about 3e-5
    torch.testing.assert_close(fused[:, :-1].double(), expected[:, :-1], rtol=tolerance, atol=tolerance)
    assert torch.equal(v, before[:, -1:]), "v must not turn"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_and_mul_gates_with_the_first_half(dtype: torch.dtype) -> None:
    gate_up = torch.randn(5, 2 * 24).to(dtype)
    gate, up = gate_up.double()[:, :24], gate_up.double()[:, 24:]
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(silu_and_mul(gate_up).double(), expected, rtol=DTYPES[dtype], atol=DTYPES[dtype])


def test_llama3_scaling_leaves_short_waves_divides_long_ones_and_blends_between() -> None:
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    plain, scaled = (rotary_frequencies(128, 500_000.0, s).double() for s in (None, scaling))
    kinds = set()
    for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
        turns = 8192 * before / (2 * math.pi)  # how often the wave fits into the original context
        if turns > 4:
            expected, kind = before, "short"
        elif turns < 1:
            expected, kind = before / 8, "long"
        else:
            share = (turns - 1) / 3
            expected, kind = share * before + (1 - share) * before / 8, "between"
        kinds.add(kind)
        assert after == pytest.approx(expected, rel=1e-5)
    assert kinds == {"short", "long", "between"}


@pytest.mark.parametrize(
    "factors",
    [{}, {"mscale": 0.7, "mscale_all_dim": 0.7}, {"mscale": 1.0, "mscale_all_dim": 0.5}, {"attention_factor": 1.3}],
)  # fmt: skip
@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_equals_transformers(factors: dict[str, float], truncate: bool) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = RopeScaling(
        kind="yarn", factor=40.0, original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0,
        truncate=truncate, **factors,
    )  # fmt: skip
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=163840,
        rope_parameters={"rope_theta": 10_000.0, **scaling.parameters()},
    )  # fmt: skip
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    torch.testing.assert_close(rotary_frequencies(64, 10_000.0, scaling), frequencies, rtol=1e-6, atol=0)
    assert scaling.table_factor == pytest.approx(factor)
