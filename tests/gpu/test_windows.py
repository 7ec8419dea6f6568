"""Layers of different kinds on the GPU: Gemma-2 and gpt-oss shapes in the engine, with every backend that serves them.

References are transformers' classes on the same weights. The experts of the gpt-oss model all work for every token, so
that no near-tie of a router hides or makes a difference.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from labkit import LLM
from labkit.attention import registry
from labkit.attention.flashinfer import FlashInferBackend
from labkit.attention.groups import group_layers
from labkit.attention.interface import AttentionSpec
from labkit.errors import BackendError, ConfigError
from labkit.models import kernels
from tests.gpu.test_engine import prompts
from tests.teacher import assert_same_logits, next_token, teach

transformers = pytest.importorskip("transformers")

VOCAB, WINDOW, TOKENS = 512, 48, 10
SETTINGS: dict[str, Any] = {
    "max_model_len": 512, "max_num_seqs": 6, "max_num_batched_tokens": 96, "gpu_memory_utilization": 0.08,
    "cudagraph_capture_sizes": [1, 2, 4, 8],
}  # fmt: skip
COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=256, intermediate_size=256, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=512, sliding_window=WINDOW,
    attn_implementation="eager",
)  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2", dict(query_pre_attn_scalar=40, attn_logit_softcapping=3.0, final_logit_softcapping=6.0,
                              pad_token_id=0)),
    "gpt-oss": ("GptOss", dict(num_local_experts=2, num_experts_per_tok=2)),
}  # fmt: skip
DTYPES = {"FLASH_ATTN": "bfloat16", "FLASHINFER": "bfloat16"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("kinds")


@functools.cache
def made(kind: str, path: pathlib.Path) -> pathlib.Path:
    name, changes = KINDS[kind]
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**COMMON, **changes))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            spread = weight.shape[-2 if weight.dim() == 3 else -1] ** -0.5 if weight.dim() > 1 else 0.3
            one = key.endswith("norm.weight") and kind != "gemma2"
            weight.copy_(torch.randn_like(weight) * spread * (3.0 if key.endswith(".sinks") else 1.0) + one)
    model.save_pretrained(path / kind)
    return path / kind


def batch() -> list[list[int]]:
    """Several windows long, shorter than one, and a single token."""
    return [*prompts(3, seed=11, longest=300, vocab=VOCAB), prompts(1, seed=5, longest=20, vocab=VOCAB)[0], [7]]


@functools.cache
def theirs(folder: pathlib.Path, dtype: torch.dtype) -> dict[tuple[int, int], torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    model = model.cuda().eval()
    found = {}
    for index, ids in enumerate(batch()):
        text = [*ids, *(next_token(ids, n, VOCAB) for n in range(TOKENS - 1))]
        with torch.inference_mode():
            logits = model(torch.tensor([text], device="cuda"), use_cache=False).logits[0].float().cpu()
        found |= {(index, n): logits[len(ids) - 1 + n] for n in range(TOKENS)}
    return found


@contextlib.contextmanager
def engine(folder: pathlib.Path, name: str, **changes: Any) -> Any:
    """An engine, or a skipped test where this backend cannot serve here or would compile for minutes first."""
    dtype = changes.pop("dtype", DTYPES.get(name, "float32"))
    if name == "FLASHINFER":
        _needs_compiled(folder, dtype)
    try:
        llm = LLM(str(folder), dtype=dtype, attention_backend=name, **{**SETTINGS, **changes})
    except (BackendError, ConfigError) as error:
        pytest.skip(str(error))
    with llm:
        yield llm


def _needs_compiled(folder: pathlib.Path, dtype: str) -> None:
    if not registry.availability("FLASHINFER").usable:
        pytest.skip("FLASHINFER does not load here")
    from labkit.models.folder import load_config

    model = load_config(folder)
    spec = AttentionSpec(8, 2, 64, dtype, 16, logits_soft_cap=model.attn_logit_softcapping, has_sinks=model.has_sinks)
    if not spec.has_sinks:
        for group in group_layers(model):
            if not FlashInferBackend.jit_spec(group.spec(spec)).is_compiled:
                pytest.skip(f"FLASHINFER's kernels for {group} are not compiled here")


@pytest.mark.parametrize("name", ["TRITON_ATTN", "TORCH_SDPA", "FLASH_ATTN", "FLASHINFER"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_by_the_numerics_rule(kind: str, name: str, root: pathlib.Path) -> None:
    """Chunks beside decodes, in the fullest mode that the tier allows."""
    folder = made(kind, root)
    with engine(folder, name, cudagraph_mode="FULL_AND_PIECEWISE") as llm:
        ours, reports = teach(llm, batch(), TOKENS, stagger=1)
        dtype, tier = llm.config.dtype, llm.engine.plan.tier
    assert any(r.num_reqs > 1 and r.max_query_len > 1 for r in reports)
    assert any(r.mode == "FULL" for r in reports) == (tier > 0)
    exact = theirs(folder, torch.float32)
    if dtype == "float32":
        assert_same_logits(ours, exact, what=f"{kind} {name}")
        return
    rounded = theirs(folder, torch.bfloat16)
    own, other = (torch.stack([(got[key] - row).norm() for key, row in exact.items()]) for got in (ours, rounded))
    assert own.norm() <= 1.25 * other.norm() and own.max() <= 1.5 * other.max(), f"{own.norm()} {other.norm()}"


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("kind", KINDS)
def test_modes_equal_eager(kind: str, mode: str, root: pathlib.Path) -> None:
    """Graphs bake in two instances' buffers: each must be planned anew before every replay."""
    folder = made(kind, root)
    with engine(folder, "TRITON_ATTN", enforce_eager=True) as llm:
        eager, _ = teach(llm, batch(), TOKENS, stagger=1)
    with engine(folder, "TRITON_ATTN", cudagraph_mode=mode, piecewise_method="break") as llm:
        ours, reports = teach(llm, batch(), TOKENS, stagger=1)
        assert llm.cudagraph_mode.name == mode
    assert any(r.mode != "NONE" for r in reports)
    assert_same_logits(ours, eager, what=mode)


def test_flex_takes_windows_and_sinks_in_turn(root: pathlib.Path) -> None:
    """Each kind of layer is a kernel of its own; eager, because each compilation takes seconds."""
    folder = made("gpt-oss", root)
    with engine(folder, "FLEX_ATTENTION", enforce_eager=True) as llm:
        ours, _ = teach(llm, [batch()[0][:60]], 3)
    exact = theirs_of(folder, batch()[0][:60], 3)
    assert_same_logits(ours, exact, what="FLEX_ATTENTION")


def theirs_of(folder: pathlib.Path, ids: list[int], count: int) -> dict[tuple[int, int], torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).cuda().eval()  # fmt: skip
    text = [*ids, *(next_token(ids, n, VOCAB) for n in range(count - 1))]
    with torch.inference_mode():
        logits = model(torch.tensor([text], device="cuda"), use_cache=False).logits[0].float().cpu()
    return {(0, n): logits[len(ids) - 1 + n] for n in range(count)}


def test_layers_with_a_window_read_no_page_before_it(root: pathlib.Path) -> None:
    """Pages that the window has left may hold anything: here NaN, where only layers with a window are asked."""
    from labkit.attention.triton_attn import TritonAttentionBackend
    from tests.reference import assert_attention_close, random_batch

    batch_ = random_batch([1, 1, 5], [300, 40, 200], num_heads=8, num_kv_heads=2, head_size=64, block_size=16,
                          dtype=torch.bfloat16, device=torch.device("cuda"), seed=3)  # fmt: skip
    sinks = torch.randn(8, device="cuda", dtype=torch.bfloat16)
    spec = AttentionSpec(8, 2, 64, "bfloat16", 16, sliding_window=WINDOW, has_sinks=True, max_model_len=512)
    backend, metadata = TritonAttentionBackend(spec, torch.device("cuda")), batch_.metadata()
    output = torch.full_like(batch_.query, float("nan"))
    old = batch_.tables[0][: (300 - WINDOW) // 16]
    keys, values = batch_.key_cache.clone(), batch_.value_cache.clone()
    keys[list(old)], values[list(old)] = float("nan"), float("nan")
    backend.prepare(metadata)
    backend.forward(
        batch_.query, keys, values, output, metadata, scale=batch_.scale, sliding_window=WINDOW, sinks=sinks
    )
    assert_attention_close(batch_, output, window=WINDOW, sinks=sinks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gemmas_small_kernels(dtype: torch.dtype) -> None:
    x, residual = torch.randn(7, 2304, device="cuda").to(dtype), torch.randn(7, 2304, device="cuda")
    weight, eps = (torch.randn(2304, device="cuda") * 1e-3).to(dtype), torch.finfo(dtype).eps

    def normed(y: torch.Tensor) -> torch.Tensor:
        y = y.double()
        return y / (y.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight.double())

    close = functools.partial(torch.testing.assert_close, rtol=2 * eps, atol=2 * eps)
    close(kernels.rms_norm(x, weight, 1e-6, True).double(), normed(x))
    close(
        kernels.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6, True)[0].double(), normed(residual + x.float())
    )
    gate, up = x.double().chunk(2, -1)
    close(kernels.gelu_tanh_and_mul(x).double(), F.gelu(gate, approximate="tanh") * up, rtol=8 * eps, atol=8 * eps)
