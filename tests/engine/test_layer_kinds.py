"""Models whose layers are of different kinds (Gemma-2, gpt-oss), through the engine, against transformers' own classes.

Contexts are several windows long, prompts come in chunks beside decodes, and every mode answers the same.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from labkit import LLM, EngineConfig
from labkit.attention import registry
from labkit.attention.groups import LayerGroup, group_layers, lowest_tier
from labkit.attention.interface import AttentionCGSupport, AttentionSpec, Platform
from labkit.attention.sdpa import TorchSDPABackend
from labkit.config import ModelConfig
from labkit.engine.plan import make_plan
from labkit.errors import BackendError
from labkit.graphs import compile_cache
from labkit.models.loader import load_folder
from labkit.models.shapes import SHAPES
from tests.engine.test_engine import EAGER, SMALL, prompts
from tests.teacher import assert_same_logits, one_by_one, teach

transformers = pytest.importorskip("transformers")

TINY = ("tiny-gemma2", "tiny-gpt-oss")
SIZES = [1, 2, 4, 8, 24]
COMMON: dict[str, Any] = dict(
    vocab_size=300, hidden_size=64, intermediate_size=48, num_hidden_layers=4, num_attention_heads=6,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=256, sliding_window=11, attn_implementation="eager",
)  # fmt: skip
YARN = dict(
    rope_type="yarn", rope_theta=150_000.0, factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
    original_max_position_embeddings=64,
)  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2", dict(query_pre_attn_scalar=20, attn_logit_softcapping=2.0, final_logit_softcapping=4.0,
                              num_attention_heads=4, pad_token_id=0)),
    "gemma2-full-first": ("Gemma2", dict(query_pre_attn_scalar=32, attn_logit_softcapping=3.0,
                                         final_logit_softcapping=None, num_attention_heads=4, pad_token_id=0,
                                         layer_types=["full_attention"] * 2 + ["sliding_attention"] * 2)),
    "gpt-oss": ("GptOss", dict(num_local_experts=6, num_experts_per_tok=2, rope_parameters=YARN,
                               tie_word_embeddings=False)),
    # No choice of experts, so none that a rounding could turn.
    "gpt-oss-all": ("GptOss", dict(num_local_experts=2, num_experts_per_tok=2, rope_parameters=YARN,
                                   tie_word_embeddings=False)),
}  # fmt: skip


def make(case: str) -> Any:
    """A transformers model in which a wrong window, cap, sink, scale or norm shows in the logits."""
    kind, changes = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**COMMON, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            spread = weight.shape[-2 if weight.dim() == 3 else -1] ** -0.5 if weight.dim() > 1 else 0.3
            one = name.endswith("norm.weight") and kind != "Gemma2"
            weight.copy_(torch.randn_like(weight) * spread * (3.0 if name.endswith(".sinks") else 1.0) + one)
    return model


@pytest.mark.parametrize("case", ["gemma2", "gemma2-full-first", "gpt-oss"])
def test_chunks_and_mixed_batches_equal_transformers(case: str, tmp_path: Path) -> None:
    theirs = make(case)
    theirs.save_pretrained(tmp_path)
    loaded = load_folder(tmp_path, dtype="float32")
    assert loaded.config.num_parameters() == sum(p.numel() for p in theirs.parameters())
    batch, counts = prompts(5, seed=2, longest=70, shared=7), [9, 4, 12, 1, 6]
    batch = [[token % 300 for token in ids] for ids in batch]
    with LLM(str(tmp_path), dtype="float32", **{**EAGER, "max_num_batched_tokens": 17}) as llm:
        ours, reports = teach(llm, batch, counts, stagger=2)
    assert any(r.num_reqs > 1 and r.max_query_len > 1 for r in reports), "no mixed batch"
    assert max(r.max_seq_len for r in reports) > 4 * 11, "several windows"
    assert_same_logits(ours, reference(theirs, batch, counts), what=case)


def reference(model: Any, batch: list[list[int]], counts: list[int]) -> dict[tuple[int, int], torch.Tensor]:
    """transformers' logits of the same teacher-forced texts, whole, without a cache."""
    from tests.teacher import next_token

    found = {}
    for index, (ids, count) in enumerate(zip(batch, counts, strict=True)):
        text = [*ids, *(next_token(ids, n, 300) for n in range(count - 1))]
        with torch.no_grad():
            logits = model(torch.tensor([text]), use_cache=False).logits[0].float()
        found |= {(index, n): logits[len(ids) - 1 + n] for n in range(count)}
    return found


@pytest.mark.parametrize("case", ["gemma2", "gpt-oss-all"])
def test_bf16_error_is_no_larger_than_transformers_own(case: str, tmp_path: Path) -> None:
    exact = make(case)
    exact.save_pretrained(tmp_path)
    rounded = copy.deepcopy(exact).to(torch.bfloat16)
    batch, counts = [[token % 300 for token in ids] for ids in prompts(6, seed=5, longest=60)], [8] * 6
    with LLM(str(tmp_path), dtype="bfloat16", **EAGER) as llm:
        ours, _ = teach(llm, batch, counts)
    expected, theirs = reference(exact, batch, counts), reference(rounded, batch, counts)
    own, other = (torch.stack([(got[key] - row).norm() for key, row in expected.items()]) for got in (ours, theirs))
    assert own.norm() <= 1.25 * other.norm() and own.max() <= 1.25 * other.max()


@pytest.mark.parametrize("model", TINY)
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_all_modes_agree(model: str, mode: str) -> None:
    batch, counts = prompts(6, seed=3, shared=9), [12, 5, 9, 3, 14, 30]
    with LLM(model, **EAGER) as eager:
        alone = one_by_one(eager, batch, counts)
    with LLM(model, **SMALL, cudagraph_mode=mode, cudagraph_capture_sizes=SIZES, piecewise_method="break") as llm:
        ours, reports = teach(llm, batch, counts, stagger=2)
        got = llm.cudagraph_mode.name
    assert_same_logits(ours, alone, what=mode)
    assert got == {"FULL": "FULL_DECODE_ONLY"}.get(mode, mode), "TORCH_SDPA's tier leaves decodes to FULL"
    assert (mode == "NONE") == all(r.mode == "NONE" for r in reports)


def test_compiled_pieces_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alternating layers are the same code: windows are attention's, and pieces end there."""
    model = "tiny-gemma2"
    monkeypatch.setenv(compile_cache.DISABLE, "1")
    batch, counts = prompts(4, seed=7, longest=60), [8, 3, 6, 10]
    with LLM(model, **EAGER) as eager:
        alone = one_by_one(eager, batch, counts)
    compiled = {"compilation_mode": "VLLM_COMPILE", "cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [1, 4]}
    with LLM(model, **SMALL, **compiled) as llm:
        ours, _ = teach(llm, batch, counts, stagger=1)
        (report,) = [made.report for made in llm.engine._compiled.values()]
    assert_same_logits(ours, alone, what="compiled")
    assert report.pieces == SHAPES[model].num_layers + 1 and len(report.classes) == 3


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of rows that the kernels replace
@pytest.mark.parametrize(
    ("model", "name"), [*((model, "TRITON_ATTN") for model in TINY), ("tiny-gpt-oss", "FLEX_ATTENTION")]
)
def test_other_backends_agree(model: str, name: str) -> None:
    """In Triton's interpreter, and in flex_attention uncompiled: chunks beside decodes, over several windows."""
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs them there")
    batch, counts = [*prompts(2, seed=7, longest=30), prompts(1, seed=1, longest=90)[0]], [3, 2, 3]
    settings = {**EAGER, "block_size": 16, "dtype": "float32"}
    with LLM(model, **settings, attention_backend="TORCH_SDPA") as reference_engine:
        alone = one_by_one(reference_engine, batch, counts)
    with LLM(model, **settings, attention_backend=name) as llm:
        ours, reports = teach(llm, batch, counts, stagger=1)
    assert any(r.num_reqs > 1 and r.max_query_len > 1 for r in reports)
    assert_same_logits(ours, alone, what=name)


# --- groups ----------------------------------------------------------------------------------------------------------


def test_groups_are_the_kinds_of_layers() -> None:
    assert group_layers(SHAPES["tiny-gpt-oss"]) == (
        LayerGroup("sliding_attention", 20, (0, 2)), LayerGroup("full_attention", None, (1,)),
    )  # fmt: skip
    assert group_layers(SHAPES["tiny-llama"]) == (LayerGroup("full_attention", None, (0, 1)),)


def test_each_kind_has_its_own_instance_and_is_prepared_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[int | None] = []
    monkeypatch.setattr(
        TorchSDPABackend, "prepare", lambda self, metadata: prepared.append(self.spec.sliding_window)
    )  # fmt: skip
    with LLM("tiny-gemma2", **EAGER) as llm:
        first, second = llm.engine.runner.attention.backends
        assert (first.spec.sliding_window, second.spec.sliding_window) == (24, None)
        assert [layer.backend for layer in llm.engine.runner.attention.layers] == [first, second] * 2
        prepared.clear()
        llm.add_request([1, 2, 3])
        llm.step()
        assert prepared == [24, None]


class Planner(TorchSDPABackend):
    """Plans a step for its own window, and attends only by a plan of its own for this step."""

    capabilities = dataclasses.replace(TorchSDPABackend.capabilities, split_mixed_batches=True)

    def prepare(self, metadata: Any) -> None:
        lens = metadata.seq_lens_cpu[: metadata.num_reqs].tolist()
        assert not metadata.scratch, "the plan of another kind of layer is here"
        metadata.scratch["plan"] = (id(self), self.spec.sliding_window, None if metadata.for_graph else lens)

    def forward(self, query: Any, keys: Any, values: Any, output: Any, metadata: Any, **asked: Any) -> None:
        owner, window, lens = metadata.scratch["plan"]
        assert (owner, window) == (id(self), self.spec.sliding_window) and asked["sliding_window"] == window
        assert lens is None or lens == metadata.seq_lens_cpu[: metadata.num_reqs].tolist(), "a plan of another step"
        super().forward(query, keys, values, output, metadata, **asked)


@pytest.mark.parametrize("changes", [{"cudagraph_mode": "FULL_AND_PIECEWISE"}, {"split_mixed_batches": True}])
def test_plans_of_two_kinds_are_kept_apart_in_every_kind_of_step(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, counts = prompts(5, seed=3), [12, 5, 9, 3, 14]
    with LLM("tiny-gemma2", **EAGER) as eager:
        alone = one_by_one(eager, batch, counts)
    monkeypatch.setattr(registry, "load", lambda name: Planner)
    with LLM("tiny-gemma2", **SMALL, cudagraph_capture_sizes=[1, 4, 24], piecewise_method="break", **changes) as llm:
        ours, reports = teach(llm, batch, counts, stagger=2)
    assert_same_logits(ours, alone)
    assert "split_mixed_batches" in changes or {"FULL", "PIECEWISE"} <= {r.mode for r in reports}


def test_plain_models_look_nothing_up() -> None:
    with LLM("tiny-llama", **EAGER) as llm:
        assert llm.engine.runner.attention.layers == () and len(llm.engine.runner.attention.backends) == 1


class Wary(TorchSDPABackend):
    """Cannot be captured where there is a window."""

    @classmethod
    def graph_support(cls, spec: AttentionSpec, platform: Platform, available: Any = None) -> Any:
        tier = AttentionCGSupport.NEVER if spec.sliding_window else AttentionCGSupport.ALWAYS
        return tier, "windows are planned on the host" if spec.sliding_window else "all is well"


def test_the_tier_is_the_lowest_over_layers_and_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AttentionSpec(4, 2, 32, "float32", 16, sliding_window=24)
    groups = group_layers(SHAPES["tiny-gemma2"])
    tier, why, group = lowest_tier(Wary, spec, groups, Platform("cpu"))
    assert tier is AttentionCGSupport.NEVER and why.startswith("windows") and group == groups[0]
    assert lowest_tier(Wary, spec, groups[1:], Platform("cpu"))[::2] == (AttentionCGSupport.ALWAYS, None)
    monkeypatch.setattr(registry, "load", lambda name: Wary)
    config = EngineConfig(cudagraph_mode="FULL_AND_PIECEWISE", **SMALL)
    plan = make_plan(config, SHAPES["tiny-gemma2"], Platform("cpu"))
    assert plan.tier is AttentionCGSupport.NEVER
    assert any("sliding_attention layers (window 24): windows are planned" in line for line in plan.mode_trail)
    assert make_plan(config, SHAPES["tiny-llama"], Platform("cpu")).tier is AttentionCGSupport.ALWAYS


def test_a_backend_must_serve_every_layer() -> None:
    hopper = Platform("cuda", (9, 0))
    with pytest.raises(BackendError, match="attention sinks"):
        make_plan(EngineConfig(attention_backend="FLASHINFER"), SHAPES["gpt-oss-20b"], hopper)
    with pytest.raises(BackendError, match="a sliding window.*soft-capping"):
        make_plan(EngineConfig(attention_backend="XFORMERS"), SHAPES["gemma-2-2b"], hopper)
    assert make_plan(EngineConfig(), SHAPES["gpt-oss-20b"], hopper).backend == "FLASH_ATTN"


def test_a_replaced_or_rewritten_sink_counts_at_once() -> None:
    with LLM("tiny-gpt-oss", **EAGER) as llm:
        before, _ = teach(llm, [[5, 6, 7, 8]], 1)
        llm.reset()
        for layer in llm.engine.model.decoder.layers:
            layer.attention.sinks = layer.attention.sinks + 5.0
        after, _ = teach(llm, [[5, 6, 7, 8]], 1)
    assert (before[0, 0] - after[0, 0]).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layer_types": ("full_attention",)}, "names 1 layers of 2"),
        ({"layer_types": ("full_attention", "chunked")}, "no kind of layer"),
        ({"layer_types": ("sliding_attention",) * 2}, "sliding_window does not say"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "5 of 4 experts"),
    ],
)
def test_a_shape_that_contradicts_itself_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Exception, match=sentence):
        dataclasses.replace(SHAPES["tiny-llama"], **changes)


def test_kv_of_the_shapes() -> None:
    """2 × 26 layers × 4 KV heads × 256 × 2 bytes; latents of 512 + 64 numbers in 27 layers."""
    assert SHAPES["gemma-2-2b"].kv_bytes_per_token(2) == 106_496
    latent = ModelConfig(
        "x", 100, 64, 64, 27, 16, 16, 192, 128, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128,
    )  # fmt: skip
    assert latent.kv_bytes_per_token(2) == 27 * 576 * 2 and latent.rotary_size == 64 and latent.uses_mla
