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
    """Logits and not text: the two best first tokens of this answer lie 0.1 apart at 25, below bfloat16's step.

    Judged over all positions together. With these weights nearly all of either error is one shift that all logits of a
    position share, a different one in each implementation: position by position one would compare two coin tosses.
    """
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
    mine = torch.stack([ours[0, i] for i in range(n)]) - exact
    allowed = rounded - exact
    assert mine.norm() <= 1.25 * allowed.norm()
    assert centred(mine).norm() <= 1.25 * centred(allowed).norm()


def centred(logits: torch.Tensor) -> torch.Tensor:
    """Without the shift that all logits of a position share, which softmax does not see."""
    return logits - logits.mean(dim=1, keepdim=True)
