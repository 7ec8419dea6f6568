"""Logits on the GPU against transformers' own model, on the same random weights, by the numerics rule."""

from __future__ import annotations

import pathlib

import pytest
import torch

from labkit import LLM
from tests.gpu.test_engine import prompts
from tests.teacher import next_token, teach

transformers = pytest.importorskip("transformers")

CONFIGS = {
    "llama": dict(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=2048, max_position_embeddings=2048, tie_word_embeddings=True, rms_norm_eps=1e-5,
    ),
    "qwen3": dict(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=2048, max_position_embeddings=2048, tie_word_embeddings=True, rms_norm_eps=1e-6,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=list(CONFIGS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    torch.manual_seed(0)
    kind = {"llama": ("LlamaConfig", "LlamaForCausalLM"), "qwen3": ("Qwen3Config", "Qwen3ForCausalLM")}[request.param]
    config = getattr(transformers, kind[0])(**CONFIGS[request.param], bos_token_id=1, eos_token_id=2)
    path = tmp_path_factory.mktemp(request.param)
    getattr(transformers, kind[1])(config).to(torch.float32).save_pretrained(path)
    return path


def theirs(folder: pathlib.Path, prompt: list[int], n: int, dtype: torch.dtype) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).cuda().eval()
    vocab = model.config.vocab_size
    ids = prompt + [next_token(prompt, i, vocab) for i in range(n - 1)]
    with torch.inference_mode():
        logits = model(torch.tensor([ids], device="cuda")).logits[0]
    return logits[len(prompt) - 1 :].float().cpu()


@pytest.mark.parametrize("mode", ["NONE", "FULL_DECODE_ONLY", "FULL"])
@pytest.mark.parametrize("name", ["TRITON_ATTN", "TORCH_SDPA"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_by_the_numerics_rule(folder: pathlib.Path, name: str, mode: str, dtype: str) -> None:
    batch, n = prompts(3, seed=11, longest=300, vocab=2048), 12
    with LLM(str(folder), dtype=dtype, attention_backend=name, cudagraph_mode=mode, max_model_len=1024, max_num_seqs=8,
             gpu_memory_utilization=0.1) as llm:  # fmt: skip
        ours, reports = teach(llm, batch, n, stagger=1)
        assert any(r.mode == "FULL" for r in reports) == (mode != "NONE")
    for i, prompt in enumerate(batch):
        exact = theirs(folder, prompt, n, torch.float32)
        rounded = theirs(folder, prompt, n, torch.bfloat16) if dtype == "bfloat16" else exact
        for position in range(n):
            row, error = exact[position], (ours[i, position] - exact[position])
            if dtype == "float32":
                assert error.abs().max() <= 1e-4 * max(1.0, row.abs().max().item())
            else:
                assert error.norm() <= 1.25 * (rounded[position] - row).norm(), f"prompt {i}, position {position}"
