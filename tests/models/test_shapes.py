"""Shapes are the published ones: the parameter count of each is the number its authors give."""

from __future__ import annotations

import subprocess
import sys

import pytest

from labkit.models.shapes import DEFAULT_MODEL, SHAPES, model_names

PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "qwen3-0.6b": 596_049_920,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "gemma-2-2b": 2_614_341_888,
    "gpt-oss-20b": 20_914_757_184,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,  # without the layer that predicts a second token
}
# Bytes of K and V per token in a 16-bit dtype, by hand: 2 × layers × KV heads × head size × 2.
KV_BYTES = {"smollm2-135m": 23_040, "qwen3-0.6b": 114_688, "llama-3.2-1b": 32_768, "llama-3.1-8b": 131_072}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameters_are_the_published_count(name: str, count: int) -> None:
    assert SHAPES[name].num_parameters() == count


@pytest.mark.parametrize(("name", "count"), KV_BYTES.items())
def test_kv_bytes_per_token(name: str, count: int) -> None:
    assert SHAPES[name].kv_bytes_per_token(2) == count


def test_names_start_with_the_real_model_and_hold_every_shape() -> None:
    assert model_names() == [DEFAULT_MODEL, *SHAPES]
    assert DEFAULT_MODEL not in SHAPES
    assert {"tiny-llama", "tiny-qwen3"} < set(SHAPES)
    assert all(shape.name == name for name, shape in SHAPES.items())


def test_names_need_no_torch(user_env: dict[str, str]) -> None:
    code = "import sys; from labkit.models import fetch, shapes; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=user_env)
