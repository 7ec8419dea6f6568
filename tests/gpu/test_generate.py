"""Real text on the GPU: both backends, every mode. Needs the default model; `python -m labkit.models.fetch` gets it."""

from __future__ import annotations

import pytest

from labkit import LLM, SamplingParams
from labkit.models import fetch

pytestmark = pytest.mark.skipif(
    fetch.default_model_dir() is None, reason="the default model is not in the cache: python -m labkit.models.fetch"
)


@pytest.mark.parametrize("mode", ["NONE", "FULL_DECODE_ONLY", "FULL"])
@pytest.mark.parametrize("name", ["TRITON_ATTN", "TORCH_SDPA"])
def test_the_capital_of_france(name: str, mode: str) -> None:
    with LLM(
        attention_backend=name, cudagraph_mode=mode, max_model_len=1024, cudagraph_capture_sizes=[1, 2, 4, 8]
    ) as llm:
        assert llm.weights == "real"
        prompts = ["The capital of France is", "The capital of Italy is", "Two plus two equals"]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=5))
        assert outputs[0].text.startswith(" Paris.") and outputs[1].text.startswith(" Rome")
        chat = llm.generate("What is the capital of France?", SamplingParams(max_tokens=20), chat=True)[0]
        assert "Paris" in chat.text and chat.finish_reason == "stop"
