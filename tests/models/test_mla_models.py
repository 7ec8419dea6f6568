"""DeepSeek-V2 and V3 against transformers' own classes, through the engine: chunks expanded, decodes absorbed.

Rules of tests/models/test_decoder.py. Only the engine has a cache of latents, so prompts go through it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from labkit import LLM
from labkit.attention import op
from labkit.attention.interface import AttentionSpec
from labkit.attention.mla import chunks, forms
from labkit.attention.mla.sdpa import TorchSDPAMLABackend
from labkit.attention.opaque import MLA_NAME, unified_mla_attention_with_output
from labkit.attention.split_mixed import make_backend
from labkit.engine.compiled import split_model
from labkit.errors import BackendError, LoadError
from labkit.launch import interpreting
from labkit.models import traceable
from labkit.models.decoder import Decoder
from labkit.models.loader import load_folder
from labkit.models.shapes import SHAPES
from labkit.paging.kv_cache import KVCache
from tests.engine.test_engine import EAGER, SMALL
from tests.engine.test_engine import prompts as batch_of
from tests.reference import random_batch
from tests.teacher import assert_same_logits, next_token, one_by_one, teach

from .folders import write_folder
from .test_decoder import prompts

transformers = pytest.importorskip("transformers")

YARN = dict(
    rope_type="yarn", rope_theta=10_000.0, factor=8.0, beta_fast=32.0, beta_slow=1.0, mscale=0.7, mscale_all_dim=0.9,
    original_max_position_embeddings=32,
)  # fmt: skip
COMMON = dict(
    vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=256, tie_word_embeddings=False, kv_lora_rank=48,
    qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=24, first_k_dense_replace=1, n_routed_experts=8,
    num_experts_per_tok=3, moe_intermediate_size=40,
)  # fmt: skip
V2 = dict(n_shared_experts=2, q_lora_rank=None, topk_method="greedy", n_group=1, topk_group=1)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("DeepseekV2", {**V2, "rope_parameters": YARN}),
    "v2-groups-q-lora": (
        "DeepseekV2", {**V2, "q_lora_rank": 40, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "v3": (
        "DeepseekV3",
        dict(n_shared_experts=1, q_lora_rank=40, n_group=4, topk_group=2, rope_parameters=YARN, num_mtp_layers=0),
    ),
}  # fmt: skip


def make(case: str) -> Any:
    """A transformers model in which a wrong rotation, scale, norm or group shows."""
    kind, changes = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**COMMON, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            norm = name.endswith("norm.weight")
            weight.copy_(torch.randn_like(weight) * (0.3 if norm else weight.shape[-1] ** -0.5) + norm)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn_like(buffer))
    return model


def settings(dtype: str) -> dict[str, Any]:
    """Small pages, chunks of prompts, decodes beside them."""
    return dict(dtype=dtype, max_model_len=200, max_num_seqs=4, max_num_batched_tokens=24, block_size=8)


@torch.no_grad()
def their_logits(model: Any, prompt: list[int], count: int) -> list[torch.Tensor]:
    """Logits of `count` outputs of one prompt that goes on as `next_token` says."""
    ids = [*prompt, *(next_token(prompt, n, 300) for n in range(count - 1))]
    return list(model(torch.tensor([ids]), use_cache=False).logits[0, len(prompt) - 1 :].float())


@pytest.mark.parametrize("case", CASES)
def test_fp32_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    theirs = make(case)
    theirs.save_pretrained(tmp_path)
    asked = prompts(300, 4, 90, seed=1)
    with LLM(str(tmp_path), **settings("float32")) as llm:
        ours, reports = teach(llm, asked, 6, stagger=2)
        assert llm.engine.model.config.num_parameters() == sum(p.numel() for p in theirs.parameters()) + (
            0 if case != "v3" else 2 * 8  # the bias that only chooses is a buffer there
        )
        assert llm.engine.kv.data.shape[2:] == (8, 48 + 16), "latents, not K and V"
    assert any(r.max_query_len > 1 and r.num_reqs > 1 for r in reports), "chunks beside decodes"
    expected = {(i, n): row for i, p in enumerate(asked) for n, row in enumerate(their_logits(theirs, p, 6))}
    assert_same_logits(ours, expected)


def test_bf16_error_is_no_larger_than_transformers_own(tmp_path: Path) -> None:
    """Dense layers only: what a near-tie of experts does is for tests/models/test_moe_models.py."""
    kind, changes = CASES["v2"]
    torch.manual_seed(0)
    config = transformers.DeepseekV2Config(**{**COMMON, **changes, "first_k_dense_replace": 3})
    exact = transformers.DeepseekV2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in exact.named_parameters():
            norm = name.endswith("norm.weight")
            weight.copy_(torch.randn_like(weight) * (0.3 if norm else weight.shape[-1] ** -0.5) + norm)
    exact.save_pretrained(tmp_path)
    rounded, asked = copy.deepcopy(exact).to(torch.bfloat16), prompts(300, 6, 60, seed=2)
    with LLM(str(tmp_path), **settings("bfloat16")) as llm:
        ours, _ = teach(llm, asked, 8, stagger=2)
    pairs = []
    for i, prompt in enumerate(asked):
        for n, (fp32, bf16) in enumerate(
            zip(their_logits(exact, prompt, 8), their_logits(rounded, prompt, 8), strict=True)
        ):
            pairs.append(((ours[i, n] - fp32).norm(), (bf16 - fp32).norm()))
    own, theirs = (torch.stack(errors) for errors in zip(*pairs, strict=True))
    assert own.norm() <= 1.25 * theirs.norm()


COUNTS = [12, 5, 9, 3, 14, 7]
TINY = ("tiny-deepseek-v2", "tiny-deepseek-v3")


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    found = {}
    for model in TINY:
        with LLM(model, **EAGER) as llm:
            found[model] = one_by_one(llm, batch_of(6, seed=5, shared=9), COUNTS)
    return found


MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


@pytest.mark.parametrize(("model", "mode"), [*((TINY[0], mode) for mode in MODES), (TINY[1], "FULL_AND_PIECEWISE")])
def test_every_mode_equals_each_prompt_alone(model: str, mode: str, reference: dict[str, Any]) -> None:
    with LLM(model, **SMALL, cudagraph_mode=mode, cudagraph_capture_sizes=[1, 2, 4, 8, 24]) as llm:
        ours, reports = teach(llm, batch_of(6, seed=5, shared=9), COUNTS, stagger=2)
        assert llm.cudagraph_mode.name == {"FULL": "FULL_DECODE_ONLY"}.get(mode, mode)
    assert any(r.mode != "NONE" and r.size > r.num_tokens for r in reports) == (mode != "NONE"), "some were padded"
    assert_same_logits(ours, reference[model], what=mode)


def test_context_in_many_pieces(reference: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 7 keys: requests are cut, merged, and share a piece; and the absorbed form alone says the same."""
    monkeypatch.setattr(forms, "piece_tokens", lambda shape, itemsize: 7)
    with LLM(TINY[0], **SMALL, enforce_eager=True) as llm:
        ours, _ = teach(llm, batch_of(6, seed=5, shared=9), COUNTS, stagger=2)
    assert_same_logits(ours, reference[TINY[0]], what="pieces of 7")
    monkeypatch.setattr(forms, "leading_decodes", lambda metadata: metadata.num_reqs)
    with LLM(TINY[0], **SMALL, enforce_eager=True) as llm:
        ours, _ = teach(llm, batch_of(6, seed=5, shared=9), COUNTS, stagger=2)
    assert_same_logits(ours, reference[TINY[0]], what="absorbed")


def test_the_pass_for_a_compiler(reference: dict[str, Any]) -> None:
    """It says the same, and the dense first layer makes a class of its own: what stands behind attention differs."""
    with LLM(TINY[0], **SMALL, enforce_eager=True) as llm:
        decoder = llm.engine.model.decoder
        split = split_model(decoder)
        assert [i.cls for i in split.program.pieces] == [0, 1, 2, 3]
        assert {i.op for i in split.program.instructions if i.cls < 0} == {MLA_NAME}
        llm.engine.runner.model_forward = functools.partial(traceable.forward, decoder)
        ours, _ = teach(llm, batch_of(6, seed=5, shared=9), COUNTS, stagger=2)
    assert_same_logits(ours, reference[TINY[0]], what="traced")


def test_equal_layers_are_one_class() -> None:
    shape = dataclasses.replace(SHAPES[TINY[1]], num_layers=6)
    split = split_model(Decoder(shape, dtype=torch.float32))
    assert [i.cls for i in split.program.pieces] == [0, 1, 2, 2, 2, 2, 3], "first, behind the dense MLP, middle, last"


def test_the_operator_declares_what_it_does() -> None:
    """C39: fake, schema and mutation, as torch's own checks see them."""
    shape = SHAPES[TINY[0]]
    kv = KVCache.allocate(shape, 6, 4, torch.float32, torch.device("cpu"))
    spec = AttentionSpec(4, 1, 80, "float32", 4, family="MLA", head_size_v=64)
    backend = make_backend(TorchSDPAMLABackend, spec, torch.device("cpu"))
    batch = random_batch([1, 3], [5, 3], num_heads=4, num_kv_heads=1, head_size=80, block_size=4)
    metadata = batch.metadata()
    metadata.slot_mapping.copy_(torch.tensor([5, 8, 9, 10]))
    metadata.block_table.clamp_(max=5)
    backend.prepare(metadata)
    query, latent, kv_b = torch.randn(4, 4, 48), torch.randn(4, 80), torch.randn(4 * 56, 64)
    with op.forward_context(op.ForwardContext(backend, metadata, kv.key_caches, kv.value_caches, 0.2)):
        arguments = (query, latent, kv_b, torch.empty(4, 4, 24), 1)
        torch.library.opcheck(unified_mla_attention_with_output, arguments)
    assert kv.data[1].any() and not kv.data[0].any()


def test_c34_weights_loaded_and_replaced_are_seen_by_both_forms() -> None:
    with LLM(TINY[1], **SMALL, cudagraph_capture_sizes=[1, 2, 4]) as llm:
        asked = batch_of(3, seed=2)
        before, _ = teach(llm, asked, 4)
        llm.reset()
        attention = [layer.attention for layer in llm.engine.model.decoder.layers]
        for block in attention:
            block.kv_b.mul_(1.5)
        loaded, _ = teach(llm, asked, 4)
        llm.reset()
        for block in attention:
            block.kv_b = block.kv_b.clone()
            block.kv_b.div_(1.5)
        with pytest.warns(UserWarning, match="was replaced since graphs were captured"):
            llm.reconfigure()
        again, _ = teach(llm, asked, 4)
    assert (loaded[0, 0] - before[0, 0]).abs().max() > 1e-2
    assert_same_logits(again, before, tolerance=1e-3)


def test_triton_mla_serves_mixed_batches_from_a_graph(interpreter: None) -> None:
    """In the interpreter: a FULL graph takes chunks absorbed, eager steps take them expanded."""
    asked = [list(range(40, 53)), [7], [9, 8, 7]]
    settings = {**SMALL, "attention_backend": "TRITON_MLA", "dtype": "float32", "block_size": 16}
    with LLM(TINY[1], **EAGER) as llm:
        alone = one_by_one(llm, asked, 3)
    for mode in ("FULL", "NONE"):
        with LLM(TINY[1], **settings, cudagraph_mode=mode, cudagraph_capture_sizes=[1, 4, 16]) as llm:
            assert llm.cudagraph_mode.name == mode
            ours, reports = teach(llm, asked, 3, stagger=1)
        assert mode == "NONE" or any(r.mode == "FULL" and r.max_query_len > 1 for r in reports)
        assert_same_logits(ours, alone, what=mode)


@pytest.fixture
def interpreter() -> None:
    if not interpreting():
        pytest.skip("Triton is not interpreted here")


def test_the_families_of_backends_stay_apart() -> None:
    with pytest.raises(BackendError, match="is for MHA attention, the model has MLA"):
        LLM(TINY[0], **EAGER, attention_backend="TORCH_SDPA")
    with pytest.raises(BackendError, match="is for MLA attention, the model has MHA"):
        LLM("tiny-llama", **EAGER, attention_backend="TORCH_SDPA_MLA")
    with pytest.raises(BackendError, match="make flashmla"):
        LLM(TINY[0], **EAGER, attention_backend="FLASHMLA")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bias": ({"attention_bias": True}, "latent attention has biases"),
    "halves": ({"rope_interleave": False}, "rotates halves of a head"),
    "rank": ({"kv_lora_rank": 0}, "kv_lora_rank=0 is no whole number"),
    "odd": ({"qk_rope_head_dim": 15}, "is odd"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_is_refused(case: str, tmp_path: Path) -> None:
    changes, words = REFUSED[case]
    config = {**COMMON, "architectures": ["DeepseekV3ForCausalLM"], **changes}
    write_folder(tmp_path, config=config)
    with pytest.raises(LoadError, match=words):
        load_folder(tmp_path)


def test_the_code_in_a_folder_of_deepseeks_is_left_alone(tmp_path: Path) -> None:
    """Its classes are transformers' by now; and the layer for a second token is no part of the model."""
    theirs = make("v3")
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "auto_map": {"AutoModel": "modeling_deepseek.X"}}))
    from safetensors.torch import load_file, save_file

    state = load_file(tmp_path / "model.safetensors")
    state["model.layers.3.eh_proj.weight"] = torch.zeros(4)
    save_file(state, str(tmp_path / "model.safetensors"))
    assert load_folder(tmp_path).config.uses_mla


def test_pieces_hold_every_key_once() -> None:
    """Any lengths and any bound: the keys of each request in order, none twice, none of another."""
    import random

    import numpy as np

    rng = random.Random(0)
    for _ in range(200):
        lens = [rng.choice([0, 1, rng.randint(1, 60)]) for _ in range(rng.randint(1, 6))]
        queries = [rng.choice([0, 1, max(n, 1), n + 2]) for n in lens]
        starts = np.cumsum([0, *queries])
        limit = rng.randint(1, 40)
        pieces = chunks.plan_pieces(starts, np.array(lens), limit)
        found: dict[int, list[int]] = {}
        for piece in pieces:
            assert piece.num_keys <= limit
            at = 0
            for request, row in zip(piece.requests.tolist(), piece.rows.tolist(), strict=True):
                first, count, first_pos, key_row, key_pos, keys = row
                assert (first, count, first_pos) == (
                    starts[request],
                    queries[request],
                    lens[request] - queries[request],
                )
                assert key_row == at
                at += keys
                found.setdefault(request, []).extend(range(key_pos, key_pos + keys))
        assert found == {i: list(range(n)) for i, n in enumerate(lens) if queries[i]}
