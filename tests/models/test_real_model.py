"""SmolLM2-135M-Instruct itself: it says Paris, and its logits are transformers' own on the same folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .conftest import Forward

TEXT = "In 1969, two astronauts walked on the Moon.\n\ndef f(x): return x**2 🎉<|im_end|>"


@pytest.fixture(scope="module")
def theirs(model_dir: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def test_it_is_the_published_shape(real: Any) -> None:
    from labkit.models.shapes import DEFAULT_MODEL, SHAPES

    shape = SHAPES["smollm2-135m"]
    assert real.config == type(shape)(**{**vars(shape), "name": real.config.name})
    assert real.config.eos_token_ids == real.tokenizer.eos_token_ids == (2,)
    assert DEFAULT_MODEL.startswith(shape.name)


def test_the_capital_of_france_is_paris(real: Any, forward: Forward) -> None:
    """17.371 for ' Paris' and 14.889 for ' the' are what transformers computes from the GGUF file itself."""
    ids = real.tokenizer.encode("The capital of France is")
    top = forward(real.decoder, ids)[-1].topk(2)
    assert [real.tokenizer.decode([i]) for i in top.indices.tolist()] == [" Paris", " the"]
    assert top.values.tolist() == pytest.approx([17.371, 14.889], abs=0.05)
    for expected in (" Paris", ".", "\n", "\n", "The"):
        ids.append(int(forward(real.decoder, ids)[-1].argmax()))
        assert real.tokenizer.decode(ids[-1:]) == expected


def test_fp32_logits_equal_transformers(real: Any, theirs: Any, forward: Forward) -> None:
    ids = real.tokenizer.encode(TEXT)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids]), use_cache=False).logits[0]
    error = (forward(real.decoder, ids) - expected).abs().amax(-1) / expected.abs().amax(-1)
    assert error.max() <= 1e-4


def test_bf16_error_is_no_larger_than_transformers_own(
    model_dir: Path, real: Any, theirs: Any, forward: Forward
) -> None:
    """Over all positions together, see `test_decoder.py`."""
    import copy

    from labkit.models.loader import load_folder

    ids = real.tokenizer.encode(TEXT[:44])
    with torch.no_grad():
        expected = theirs(torch.tensor([ids]), use_cache=False).logits[0]
        rounded = copy.deepcopy(theirs).to(torch.bfloat16)(torch.tensor([ids]), use_cache=False).logits[0].float()
    ours = forward(load_folder(model_dir, dtype="bfloat16").decoder, ids)
    assert (ours - expected).norm() <= 1.25 * (rounded - expected).norm()
    assert (ours[-1] - expected[-1]).abs().max() < 2.0


def test_the_random_model_of_its_shape_speaks_with_its_tokenizer(real: Any) -> None:
    from labkit.models.loader import load_model

    random = load_model("smollm2-135m")
    assert random.weights == "random" and random.config.eos_token_ids == random.tokenizer.eos_token_ids == ()
    assert random.tokenizer.encode("Hello Paris") == real.tokenizer.encode("Hello Paris")
