"""Real text on the GPU: every backend and version in every mode. Needs the default model; `make setup` gets it.

The text that TORCH_SDPA writes without graphs is what everybody is then told to write, and logits are compared at each
of its positions: two paths that differ in one near-tie would share no text behind it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from labkit import LLM, SamplingParams
from labkit.errors import BackendError
from labkit.models import fetch
from tests.parity import CONTENDERS, Contender, absent
from tests.teacher import next_token, teach

pytestmark = pytest.mark.skipif(
    fetch.default_model_dir() is None, reason="the default model is not in the cache: python -m labkit.models.fetch"
)
PROMPTS = ("The capital of France is", "The capital of Italy is", "Two plus two equals", "Once upon a time, in a small")
BEGINNINGS = (" Paris.", " Rome", "", "")
NUM_TOKENS = 16
MODES = ("NONE", "FULL_AND_PIECEWISE", "FULL")
SETTINGS: dict[str, Any] = {
    "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 160,
    "cudagraph_capture_sizes": [1, 2, 4, 8, 32],
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Truth:
    """TORCH_SDPA's text as token ids, and its logits `[prompts × positions, vocabulary]` in both types along it."""

    prompts: list[list[int]]
    answers: list[list[int]]
    exact: torch.Tensor  # float32
    rounded: torch.Tensor  # bfloat16


def along(llm: LLM, prompts: list[list[int]], answers: list[list[int]]) -> tuple[torch.Tensor, set[str]]:
    """Logits at every position of the answers, prompts arriving one after another, and the modes that ran."""
    logits, reports = teach(llm, prompts, [len(a) for a in answers], stagger=2, answers=answers)
    return torch.stack([logits[key] for key in sorted(logits)]), {r.mode for r in reports}


@functools.cache
def truth() -> Truth:
    settings = {**SETTINGS, "attention_backend": "TORCH_SDPA", "enforce_eager": True}
    with LLM(dtype="bfloat16", **settings) as llm:
        assert llm.weights == "real"
        prompts = [llm.tokenizer.encode(text) for text in PROMPTS]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
        for output, beginning in zip(outputs, BEGINNINGS, strict=True):
            assert output.text.startswith(beginning), output.text
        answers = [list(output.token_ids) for output in outputs]
        rounded, _ = along(llm, prompts, answers)
    with LLM(dtype="float32", **settings) as llm:
        exact, _ = along(llm, prompts, answers)
    return Truth(prompts, answers, exact, rounded)


def check_logits(ours: torch.Tensor, known: Truth, what: str) -> None:
    """Judged over all positions together. With these weights nearly all of either error is one shift that all logits
    of a position share, a different one in each implementation: position by position one would compare two coin tosses.
    """
    mine, allowed = ours - known.exact, known.rounded - known.exact
    for name, view in (("logits", lambda x: x), ("logits without the shift of each position", centred)):
        error, bound = view(mine).norm().item(), 1.25 * view(allowed).norm().item()
        assert error <= bound, f"{what}: {name} are {error:.3g} from float32, {bound:.3g} is allowed"


def check_text(llm: LLM, known: Truth, what: str) -> None:
    """The same text, or a first difference where TORCH_SDPA's two best lie closer together than rounding moves them."""
    outputs = llm.generate(known.prompts, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
    for i, (output, answer) in enumerate(zip(outputs, known.answers, strict=True)):
        differs = [n for n, pair in enumerate(zip(output.token_ids, answer, strict=True)) if pair[0] != pair[1]]
        if not differs:
            continue
        row = i * NUM_TOKENS + differs[0]
        mine, theirs = output.token_ids[differs[0]], answer[differs[0]]
        gap = (known.rounded[row, theirs] - known.rounded[row, mine]).item()
        # Each of the two may be off by what bfloat16 does to any logit of this position.
        bound = 2 * 1.25 * centred(known.rounded - known.exact)[row].abs().max().item()
        print(f"{what}: prompt {i} differs from token {differs[0]} on, at a gap of {gap:.3g} ({bound:.3g} is allowed)")
        assert gap <= bound, f"{what}: {output.text!r} differs at token {differs[0]}, {gap:.3g} apart"


@pytest.mark.parametrize("contender", CONTENDERS, ids=str)
def test_every_backend_writes_what_torch_sdpa_writes(contender: Contender) -> None:
    if absent(contender):
        pytest.skip(f"{contender.label}: {absent(contender)}")
    settings = {**SETTINGS, "attention_backend": contender.name, "dtype": "bfloat16", **dict(contender.options)}
    try:
        llm = LLM(**settings, cudagraph_mode=MODES[0])
    except BackendError as error:
        pytest.skip(f"{contender.label}: {error}")
    known = truth()
    with llm:
        for mode in MODES:
            llm.reconfigure(cudagraph_mode=mode)
            what = f"{contender.label}, {mode} ({llm.cudagraph_mode.name})"
            ours, ran = along(llm, known.prompts, known.answers)
            resolved = llm.cudagraph_mode
            assert {resolved.decode_mode().name, resolved.mixed_mode().name} <= ran, f"{what}: {ran}"
            check_logits(ours, known, what)
            check_text(llm, known, what)
            llm.reset()


def chat_prompt(llm: LLM) -> list[int]:
    return llm.tokenizer.encode(
        llm.tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    )


@pytest.mark.parametrize("name", ["TRITON_ATTN", "TORCH_SDPA"])
def test_real_weights_against_another_implementation(name: str) -> None:
    """Logits and not text: the two best first tokens of this answer lie 0.1 apart at 25, below bfloat16's step."""
    transformers = pytest.importorskip("transformers")
    n = 8
    settings = {**SETTINGS, "cudagraph_capture_sizes": [1, 2]}
    with LLM(attention_backend=name, dtype="bfloat16", cudagraph_mode="FULL_DECODE_ONLY", **settings) as llm:
        prompt, vocab = chat_prompt(llm), llm.model_config.vocab_size
        ours, reports = teach(llm, [prompt], n)
        assert {r.mode for r in reports} == {"NONE", "FULL"}
    answer = [next_token(prompt, i, vocab) for i in range(n)]
    ids = prompt + answer[:-1]
    theirs = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = transformers.AutoModelForCausalLM.from_pretrained(fetch.default_model_dir(), dtype=dtype)
        with torch.inference_mode():
            placed = model.to("cuda").eval()
            theirs[dtype] = placed(torch.tensor([ids], device="cuda")).logits[0, len(prompt) - 1 :].float().cpu()
    known = Truth([prompt], [answer], theirs[torch.float32], theirs[torch.bfloat16])
    check_logits(torch.stack([ours[0, i] for i in range(n)]), known, name)


def centred(logits: torch.Tensor) -> torch.Tensor:
    """Without the shift that all logits of a position share, which softmax does not see."""
    return logits - logits.mean(dim=1, keepdim=True)
