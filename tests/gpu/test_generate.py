"""Real text on the GPU: both backends, every mode. Needs the default model; `python -m labkit.models.fetch` gets it."""

from __future__ import annotations

import pytest
import torch

from labkit import LLM, SamplingParams
from labkit.models import fetch
from tests.teacher import next_token, teach

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


def chat_prompt(llm: LLM) -> list[int]:
    return llm.tokenizer.encode(
        llm.tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    )


@pytest.mark.parametrize("name", ["TRITON_ATTN", "TORCH_SDPA"])
def test_real_weights_by_the_numerics_rule(name: str) -> None:
    """Logits and not text: the two best first tokens of this answer lie 0.1 apart at 25, below bfloat16's step."""
    transformers = pytest.importorskip("transformers")
    n = 8
    with LLM(attention_backend=name, dtype="bfloat16", max_model_len=1024, cudagraph_capture_sizes=[1, 2]) as llm:
        prompt, vocab = chat_prompt(llm), llm.model_config.vocab_size
        ours, reports = teach(llm, [prompt], n)
        assert {r.mode for r in reports} == {"NONE", "FULL"}
    ids = prompt + [next_token(prompt, i, vocab) for i in range(n - 1)]
    theirs = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = transformers.AutoModelForCausalLM.from_pretrained(fetch.default_model_dir(), dtype=dtype).cuda().eval()
        with torch.inference_mode():
            theirs[dtype] = model(torch.tensor([ids], device="cuda")).logits[0, len(prompt) - 1 :].float().cpu()
    exact, rounded = theirs[torch.float32], theirs[torch.bfloat16]
    for i in range(n):
        allowed = 1.25 * (rounded[i] - exact[i]).norm()
        assert (ours[0, i] - exact[i]).norm() <= allowed, f"position {i}"
