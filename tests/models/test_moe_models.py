"""Models with experts, from Hugging Face folders, against transformers' own classes; and through the engine.

Rules of tests/models/test_decoder.py. In bf16 a near-tie of two experts may go either way, and all that follows from it
differs: the choice is compared by the share of equal experts, and logits with the choice forced to be the same.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from labkit import LLM
from labkit.errors import LoadError
from labkit.graphs import compile_cache
from labkit.models import moe
from labkit.models.loader import load_folder
from tests.engine.test_engine import EAGER, SMALL
from tests.engine.test_engine import prompts as batch_of
from tests.teacher import assert_same_logits, one_by_one, teach

from .conftest import Forward
from .folders import write_folder
from .test_decoder import prompts, their_logits

transformers = pytest.importorskip("transformers")

COMMON = dict(
    vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    max_position_embeddings=512, tie_word_embeddings=False, num_experts_per_tok=3,
)  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": ("Qwen3Moe", dict(num_experts=10, moe_intermediate_size=24, norm_topk_prob=True)),
    "qwen3-moe-unnormalised": ("Qwen3Moe", dict(num_experts=6, moe_intermediate_size=40, norm_topk_prob=False)),
    "mixtral": ("Mixtral", dict(num_local_experts=5, intermediate_size=48)),
}  # fmt: skip


def make(case: str) -> Any:
    """A transformers model whose experts differ and whose router is sure of itself now and then."""
    kind, changes = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**COMMON, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            norm = name.endswith("norm.weight")
            weight.copy_(torch.randn_like(weight) * (0.3 if norm else weight.shape[-1] ** -0.5) + norm)
    return model


@pytest.mark.parametrize("case", CASES)
def test_fp32_logits_equal_transformers(case: str, tmp_path: Path, forward: Forward) -> None:
    theirs = make(case)
    theirs.save_pretrained(tmp_path)
    loaded = load_folder(tmp_path, dtype="float32")
    assert loaded.config.num_parameters() == sum(p.numel() for p in theirs.parameters())
    for ids in prompts(300, 4, 60, seed=1):
        expected = their_logits(theirs, ids)
        error = (forward(loaded.decoder, ids) - expected).abs().amax(-1) / expected.abs().amax(-1)
        assert error.max() <= 1e-4, f"{len(ids)} tokens, position {int(error.argmax())}: {error.max():.1e}"


@pytest.mark.parametrize("case", ["qwen3-moe", "mixtral"])
def test_a_folder_may_hold_experts_stacked(case: str, tmp_path: Path) -> None:
    """transformers 5 keeps the experts of a layer in one tensor and writes them apart; both are read."""
    theirs = make(case)
    theirs.save_pretrained(tmp_path)
    apart = load_folder(tmp_path).decoder.tensors()
    assert any(".experts.3." in name for name in load_file(tmp_path / "model.safetensors"))
    save_file(theirs.state_dict(), str(tmp_path / "model.safetensors"))
    stacked = load_folder(tmp_path).decoder.tensors()
    assert all(torch.equal(stacked[name], apart[name]) for name in apart)
    rest = {n: t for n, t in theirs.state_dict().items() if not n.endswith("1.mlp.experts.down_proj")}
    save_file(rest, str(tmp_path / "model.safetensors"))
    with pytest.raises(LoadError, match="tensors are missing: model.layers.1"):
        load_folder(tmp_path)


class Chosen:
    """The experts that transformers' routers took in fp32, call by call, and the same choice for others."""

    def __init__(self) -> None:
        self.ids: list[torch.Tensor] = []

    @contextlib.contextmanager
    def recorded(self, model: Any) -> Iterator[None]:
        hooks = [
            layer.mlp.gate.register_forward_hook(lambda _, __, out: self.ids.append(out[2]))
            for layer in model.model.layers
        ]
        yield
        for hook in hooks:
            hook.remove()

    def only(self, logits: torch.Tensor, call: int) -> torch.Tensor:
        """Logits of which only the chosen are left: top-k and a weight's normalisation go as ever."""
        return torch.full_like(logits, float("-inf")).scatter(-1, self.ids[call], logits.gather(-1, self.ids[call]))


def force(chosen: Chosen, model: Any) -> None:
    """Make the routers of a transformers model choose the same."""

    def forced(router: Any, call: int) -> Any:
        def forward(hidden: torch.Tensor) -> Any:
            logits = F.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
            weights, ids = chosen.only(logits.float(), call).softmax(-1).topk(router.top_k)
            return logits, weights.to(logits.dtype), ids

        return forward

    for call, layer in enumerate(model.model.layers):
        layer.mlp.gate.forward = forced(layer.mlp.gate, call)


@pytest.mark.parametrize("case", ["qwen3-moe", "mixtral"])
def test_bf16_error_is_no_larger_than_transformers_own(
    case: str, tmp_path: Path, forward: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = make(case)
    exact.save_pretrained(tmp_path)
    ours, original = load_folder(tmp_path, dtype="bfloat16").decoder, moe.route
    errors: list[list[torch.Tensor]] = []
    equal = total = 0
    for ids in prompts(300, 5, 60, seed=2):
        chosen, calls = Chosen(), []
        with chosen.recorded(exact):
            expected = their_logits(exact, ids)

        def route(logits: torch.Tensor, *args: Any, free: bool, calls: list[Any], chosen: Chosen) -> Any:
            calls.append(original(logits, *args))
            return calls[-1] if free else original(chosen.only(logits, len(calls) - 1), *args)

        monkeypatch.setattr(moe, "route", lambda *a, c=calls, h=chosen: route(*a, free=True, calls=c, chosen=h))
        forward(ours, ids)
        for got, wanted in zip([i for i, _ in calls], chosen.ids, strict=True):
            equal += sum(len(set(a) & set(b)) for a, b in zip(got.tolist(), wanted.tolist(), strict=True))
            total += wanted.numel()
        calls.clear()
        monkeypatch.setattr(moe, "route", lambda *a, c=calls, h=chosen: route(*a, free=False, calls=c, chosen=h))
        rounded = copy.deepcopy(exact).to(torch.bfloat16)
        force(chosen, rounded)
        errors.append([(x - expected).norm(dim=-1) for x in (forward(ours, ids), their_logits(rounded, ids))])
    assert equal / total > 0.97, "a near-tie is the exception"
    own, theirs = (torch.cat(each) for each in zip(*errors, strict=True))
    assert own.norm() <= 1.25 * theirs.norm()
    assert own.max() <= 1.25 * theirs.max()


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "sparse-step": ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 2}, "only some of its layers have experts"),
    "dense-layers": ("Qwen3MoeForCausalLM", {"mlp_only_layers": [0]}, "only some of its layers have experts"),
    "no-experts": ("Qwen3MoeForCausalLM", {"num_experts": None}, "num_experts=None is no whole number"),
    "too-many": ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 9}, "9 of 8 experts work for a token"),
    "window": ("MixtralForCausalLM", {"sliding_window": 4096}, "slides over a window"),
    "quantised": ("MixtralForCausalLM", {"quantization_config": {"quant_method": "mxfp4"}}, "stored as MXFP4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_is_refused(case: str, tmp_path: Path) -> None:
    architecture, changes, words = REFUSED[case]
    experts = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    if "num_experts" in changes:
        del experts["num_local_experts"]
    write_folder(tmp_path, architectures=[architecture], **{**experts, **changes})
    with pytest.raises((LoadError, ValueError), match=words):
        load_folder(tmp_path)


# --- through the engine ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    found = {}
    for model in ("tiny-qwen3-moe", "tiny-mixtral"):
        with LLM(model, **EAGER) as llm:
            found[model] = one_by_one(llm, batch_of(6, seed=5, shared=9), COUNTS)
    return found


COUNTS = [12, 5, 9, 3, 14, 7]


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("model", ["tiny-qwen3-moe", "tiny-mixtral"])
def test_every_mode_equals_each_prompt_alone(model: str, mode: str, reference: dict[str, Any]) -> None:
    """Chunks beside decodes, padded to the captured size: padding and neighbours change no token's experts."""
    with LLM(model, **SMALL, cudagraph_mode=mode, cudagraph_capture_sizes=[1, 2, 4, 8, 24]) as llm:
        ours, reports = teach(llm, batch_of(6, seed=5, shared=9), COUNTS, stagger=2)
        # TORCH_SDPA has no graph for a mixed batch as a whole.
        assert llm.cudagraph_mode.name == {"FULL": "FULL_DECODE_ONLY"}.get(mode, mode)
    assert any(r.mode != "NONE" and r.size > r.num_tokens for r in reports) == (mode != "NONE"), "some were padded"
    assert_same_logits(ours, reference[model], what=mode)


def test_compiled_in_pieces(reference: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are one operator to the compiler; layers are still the same code."""
    monkeypatch.setattr(compile_cache, "default_folder", lambda: tmp_path)
    settings = {**SMALL, "compilation_mode": "VLLM_COMPILE", "cudagraph_capture_sizes": [1, 2, 4, 8, 24]}
    for start in ("cold", "from the cache"):
        with LLM("tiny-qwen3-moe", **settings, cudagraph_mode="FULL_AND_PIECEWISE") as llm:
            report = llm.compile_report
            assert report is not None and report.pieces == 4 and len(report.classes) == 3
            assert report.from_cache == (start != "cold")
            ours, _ = teach(llm, batch_of(6, seed=5, shared=9), COUNTS, stagger=2)
        assert_same_logits(ours, reference["tiny-qwen3-moe"], what=start)
