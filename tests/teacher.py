"""Teacher forcing: the engine runs as ever, but a fixed rule names each next token, and every logit row is kept.

Two paths through an engine are equal when their logits are, position by position. Comparing sampled tokens instead
would stop at the first near-tie.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from labkit import LLM, SamplingParams
from labkit.engine.report import StepReport

Logits = dict[tuple[int, int], torch.Tensor]


def next_token(prompt: Sequence[int], position: int, vocab_size: int) -> int:
    """The token that everybody is told comes next: a pure function of prompt and position."""
    return zlib.crc32(repr((list(prompt), position)).encode()) % vocab_size


@contextlib.contextmanager
def teaching(
    llm: LLM, seen: dict[tuple[str, int], torch.Tensor], told: Mapping[tuple[int, ...], Sequence[int]] | None = None
) -> Iterator[None]:
    """While inside, `llm` samples what `next_token` says, or what `told` has for a prompt; `seen[request_id, n]` is the
    logits row of output n."""
    sampler = llm.engine.sampler
    original = sampler.sample

    def sample(logits: torch.Tensor, requests: Sequence[Any]) -> Any:
        forced = torch.zeros_like(logits, dtype=torch.float32)
        for row, request in enumerate(requests):
            n = len(request.output_token_ids)
            assert (request.request_id, n) not in seen, "a position was sampled twice"
            seen[request.request_id, n] = logits[row].float().cpu()
            prompt = request.prompt_token_ids
            token = next_token(prompt, n, logits.shape[1]) if told is None else told[tuple(prompt)][n]
            forced[row, token] = 1.0
        return original(forced, requests)

    sampler.sample = sample  # type: ignore[method-assign]
    try:
        yield
    finally:
        del sampler.sample


def teach(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    num_tokens: int | Sequence[int],
    stagger: int = 0,
    answers: Sequence[Sequence[int]] | None = None,
) -> tuple[Logits, list[StepReport]]:
    """Run all prompts together and return logits by (prompt index, output position), and the reports.

    stagger: steps between one request's arrival and the next, to mix prefills with decodes. answers: what everybody is
    told, one for each prompt, in place of `next_token`.
    """
    counts = [num_tokens] * len(prompts) if isinstance(num_tokens, int) else list(num_tokens)
    seen: dict[tuple[str, int], torch.Tensor] = {}
    reports: list[StepReport] = []
    ids: list[str] = []
    told = None if answers is None else {tuple(p): answer for p, answer in zip(prompts, answers, strict=True)}
    with teaching(llm, seen, told):
        for prompt, count in zip(prompts, counts, strict=True):
            ids.append(llm.add_request(list(prompt), SamplingParams(max_tokens=count, ignore_eos=True)))
            for _ in range(stagger):
                reports.append(llm.step())
        while llm.has_unfinished:
            reports.append(llm.step())
            assert len(reports) < 10_000, "the engine does not finish"
    return {(ids.index(i), n): row for (i, n), row in seen.items()}, reports


def one_by_one(llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int | Sequence[int]) -> Logits:
    """The reference path: each prompt alone, whole."""
    counts = [num_tokens] * len(prompts) if isinstance(num_tokens, int) else list(num_tokens)
    out: Logits = {}
    for i, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        alone, _ = teach(llm, [prompt], count)
        llm.reset()
        out.update({(i, n): row for (_, n), row in alone.items()})
    return out


def assert_same_logits(ours: Logits, reference: Logits, tolerance: float = 1e-4, what: str = "") -> None:
    """float32: within 1e-4 of the largest |logit| of the position."""
    assert set(ours) == set(reference), f"{what}: other positions were sampled"
    for key, expected in reference.items():
        error = (ours[key] - expected).abs().max().item()
        allowed = tolerance * max(1.0, expected.abs().max().item())
        assert error <= allowed, f"{what}: prompt {key[0]}, position {key[1]}: {error:.2e} above {allowed:.2e}"
