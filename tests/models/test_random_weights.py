"""Random weights: a function of seed, name and dtype, and of a size at which mistakes show in the logits."""

from __future__ import annotations

import pytest
import torch

from labkit.models.loader import load_model

from .conftest import Forward

SHAPES = ["tiny-llama", "tiny-qwen3", "tiny-qwen3-moe", "tiny-mixtral"]


@pytest.mark.parametrize("name", SHAPES)
def test_the_same_seed_gives_the_same_weights(name: str) -> None:
    a, b, c = (load_model(name, seed=s).decoder.checkpoint_views() for s in (3, 3, 4))
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not any(torch.equal(a[key], c[key]) for key in a)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_weights_are_the_rounded_ones_but_for_an_ulp(name: str, dtype: str) -> None:
    wide, narrow = (load_model(name, dtype=d).decoder.checkpoint_views() for d in ("float32", dtype))
    ulp = torch.finfo(getattr(torch, dtype)).eps
    for key in wide:
        torch.testing.assert_close(narrow[key].float(), wide[key], rtol=ulp, atol=ulp / 4)


@pytest.mark.parametrize("name", SHAPES[:2])  # of a hundred experts two may meet in the block
def test_no_two_tensors_and_no_two_rows_are_alike(name: str) -> None:
    views = [view for view in load_model(name).decoder.checkpoint_views().values() if view.dim() == 2]
    rows = torch.cat([view.reshape(-1, 32)[:, :32] for view in views])
    assert len(torch.unique(rows, dim=0)) == len(rows)


@pytest.mark.parametrize("name", SHAPES)
def test_every_weight_is_written_and_of_the_stated_size(name: str) -> None:
    for key, view in load_model(name).decoder.checkpoint_views().items():
        mean, std = (1.0, 0.1) if key.endswith("norm.weight") else (0.0, view.shape[1] ** -0.5)
        scatter = 6 * std / view.numel() ** 0.5
        assert abs(view.mean().item() - mean) < scatter, key
        assert abs(view.std().item() - std) < scatter, key


@pytest.mark.parametrize("name", SHAPES)
def test_logits_depend_on_every_earlier_token_and_on_order(name: str, forward: Forward) -> None:
    """Else a wrong page, mask or position would pass every comparison made with random weights."""
    decoder = load_model(name).decoder
    ids = [7, 90, 233, 18, 401, 77, 5, 64]
    last = forward(decoder, ids)[-1]
    for i in range(len(ids) - 1):
        changed = forward(decoder, [*ids[:i], 300, *ids[i + 1 :]])[-1]
        assert (changed - last).abs().max() > 1e-2 * last.abs().max(), f"token {i} does not matter"
    swapped = forward(decoder, [ids[1], ids[0], *ids[2:]])[-1]
    assert (swapped - last).abs().max() > 1e-2 * last.abs().max()


@pytest.mark.parametrize("name", SHAPES)
def test_random_models_never_end_by_chance(name: str) -> None:
    loaded = load_model(name)
    assert loaded.weights == "random"
    assert loaded.config.eos_token_ids == loaded.tokenizer.eos_token_ids == ()


def test_every_tensor_wraps_around_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from labkit.models import random_weights

    monkeypatch.setattr(random_weights, "BLOCK", 101)
    views = load_model("tiny-llama").decoder.checkpoint_views()
    assert all(torch.isfinite(view).all() for view in views.values())
    flat = views["model.embed_tokens.weight"].reshape(-1)
    assert torch.equal(flat[:-101], flat[101:])
