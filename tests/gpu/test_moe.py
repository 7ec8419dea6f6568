"""Experts on the GPU: against float64, captured once and replayed with other routings, and how fast they read."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any

import pytest
import torch

from labkit import LLM
from labkit.attention import op
from labkit.config import ModelConfig
from labkit.models import moe, moe_launch
from labkit.models.moe import MoE
from labkit.models.moe_launch import Experts, Routing
from labkit.models.shapes import SHAPES
from tests.gpu.test_engine import prompts
from tests.teacher import assert_same_logits, next_token, teach

CUDA = torch.device("cuda")
BASE = SHAPES["tiny-qwen3-moe"]
FAMILIES: dict[str, ModelConfig] = {
    "qwen3-moe": dataclasses.replace(
        BASE, hidden_size=512, num_experts=64, num_experts_per_tok=8, moe_intermediate_size=192
    ),
    "mixtral": dataclasses.replace(SHAPES["tiny-mixtral"], hidden_size=256, num_experts=8, moe_intermediate_size=448),
    "deepseek-v3": dataclasses.replace(
        BASE, hidden_size=320, num_experts=48, num_experts_per_tok=6, moe_intermediate_size=96, n_shared_experts=2,
        n_group=6, topk_group=3, topk_method="noaux_tc", scoring_func="sigmoid", routed_scaling_factor=2.5,
    ),
    "gpt-oss": dataclasses.replace(
        BASE, hidden_size=360, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=360, expert_bias=True,
        scoring_func="topk_softmax", swiglu_limit=2.0,
    ),
}  # fmt: skip


def layer_of(config: ModelConfig, dtype: torch.dtype, seed: int = 0) -> MoE:
    torch.manual_seed(seed)
    layer = MoE(config, dtype, CUDA)
    for _, tensor in layer.tensors():
        tensor.copy_(torch.randn(tensor.shape, device=CUDA) * tensor.shape[-1] ** -0.5)
    return layer


def shared_of(layer: MoE, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """The shared experts in torch operators."""
    if layer.shared_gate_up is None or layer.shared_down is None:
        return None
    gate, up = (x.to(dtype) @ layer.shared_gate_up.to(dtype).t()).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up) @ layer.shared_down.to(dtype).t()


def exact(layer: MoE, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Experts of a given routing, token by token, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    stack = layer.experts
    for expert in range(stack.gate_up.shape[0]):
        tokens, place = (ids == expert).nonzero(as_tuple=True)
        rows = x[tokens].double() @ stack.gate_up[expert].double().t()
        if stack.gate_up_bias is not None:
            rows += stack.gate_up_bias[expert].double()
        gate, up = (rows[:, ::2], rows[:, 1::2]) if stack.interleaved else rows.chunk(2, -1)
        if stack.limit is None:
            inner = gate * gate.sigmoid() * up
        else:
            gate, up = gate.clamp(max=stack.limit), up.clamp(-stack.limit, stack.limit)
            inner = (up + 1) * gate * (1.702 * gate).sigmoid()
        part = inner @ stack.down[expert].double().t()
        if stack.down_bias is not None:
            part += stack.down_bias[expert].double()
        out.index_add_(0, tokens, part * weights[tokens, place, None].double())
    shared = shared_of(layer, x, torch.float64)
    return out if shared is None else out + shared


class _Context:
    def __init__(self, slots: torch.Tensor) -> None:
        self.metadata = type("Metadata", (), {"slot_mapping": slots})()


#: Pairs one by one, and every tile; each kernel of a family and dtype is compiled once, which is what this file takes.
CALLS = [
    *(("qwen3-moe", torch.bfloat16, tokens) for tokens in (1, 16, 256, 700, 3000)),
    *(("qwen3-moe", dtype, tokens) for dtype in (torch.float16, torch.float32) for tokens in (1, 77)),
    *((family, torch.bfloat16, tokens) for family in ("mixtral", "gpt-oss") for tokens in (1, 77)),
    *(("deepseek-v3", torch.bfloat16, tokens) for tokens in (2, 900)),
]


@pytest.mark.parametrize(("family", "dtype", "tokens"), CALLS, ids=str)
def test_experts_by_the_numerics_rule(family: str, dtype: torch.dtype, tokens: int) -> None:
    """Error against float64 at most twice that of torch's operators in the same dtype, of the same routing; padding
    holds NaN and gives 0.
    """
    layer = layer_of(FAMILIES[family], dtype)
    x = torch.randn(tokens, FAMILIES[family].hidden_size, device=CUDA).to(dtype)
    slots = torch.arange(tokens, device=CUDA)
    padding = torch.arange(tokens, device=CUDA) % 5 == 3
    x[padding], slots[padding] = math.nan, -1
    logits = moe.router_logits(x, layer.gate)
    ids, weights = moe_launch.route(logits, layer.routing, layer.gate_bias, slots)
    wanted, _ = moe.route(logits, layer.routing, layer.gate_bias, slots)
    differ = (ids.long().sort(-1).values != wanted.sort(-1).values).any(-1).sum()
    assert differ <= tokens // 500, "only a tie to the last bit may go either way"
    assert torch.equal(ids[:, 0] < 0, padding)
    with op.forward_context(_Context(slots)):  # type: ignore[arg-type]
        got = layer.forward(x)
    assert torch.equal(got[padding], torch.zeros_like(got[padding]))
    real = ~padding
    expected = exact(layer, x[real], ids[real], weights[real])
    plain = moe.run_experts(x[real], ids[real], weights[real], layer.experts, shared_of(layer, x[real], dtype))
    error, allowed = (got[real] - expected).abs().max(), (plain - expected).abs().max()
    assert error <= 2 * allowed + 1e-5 * expected.abs().max(), f"{error:.2e} against {allowed:.2e}"


@pytest.mark.parametrize("tokens", [1, 24, 400])
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_with_one_routing_and_replayed_with_others(family: str, tokens: int) -> None:
    """Everybody at the same experts, then spread, then all padding but one: the graph's shapes were right for each."""
    config = FAMILIES[family]
    layer = layer_of(config, torch.bfloat16)
    x = torch.zeros(tokens, config.hidden_size, device=CUDA, dtype=torch.bfloat16)  # equal logits: one choice for all
    slots = torch.full((tokens,), -1, device=CUDA)
    context = op.forward_context(_Context(slots))  # type: ignore[arg-type]
    with torch.inference_mode(), context:
        for _ in range(2):
            layer.forward(x)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = layer.forward(x)
        for seed, real in enumerate((tokens, tokens, max(1, tokens // 2), 1)):
            torch.manual_seed(seed)
            x.copy_(torch.randn(x.shape, device=CUDA) if seed else torch.randn(1, x.shape[1], device=CUDA))
            x[real:] = math.nan
            slots.copy_(torch.where(torch.arange(tokens, device=CUDA) < real, 7, -1))
            graph.replay()
            again = layer.forward(x)
            torch.testing.assert_close(out, again, rtol=0.02, atol=0.02 * again.abs().max().item())
            assert out[:real].any(-1).all() and not out[real:].any(), f"replay {seed}"


def test_the_host_never_waits() -> None:
    """Neither the number of experts in use nor any other value is read on the host."""
    layer = layer_of(FAMILIES["deepseek-v3"], torch.bfloat16)
    inputs = [torch.randn(n, 320, device=CUDA, dtype=torch.bfloat16) for n in (1, 40, 900)]
    for x in inputs:
        layer.forward(x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x in inputs:
            layer.forward(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("tokens", [1, 16, 17, 300])
@pytest.mark.parametrize("experts", [4, 12, 128])
def test_logits_are_fp32_products(experts: int, tokens: int) -> None:
    """By a kernel of our own for few tokens, by cuBLAS for more; the same to fp32's rounding."""
    x = torch.randn(tokens, 320, device=CUDA, dtype=torch.bfloat16)
    gate = torch.randn(experts, 320, device=CUDA, dtype=torch.bfloat16)
    got = moe_launch.router_logits(x, gate)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), x.double() @ gate.double().t(), rtol=1e-4, atol=1e-3)


def test_logits_without_numbers_choose_experts_that_exist() -> None:
    for value in (math.nan, math.inf, -math.inf):
        ids, _ = moe_launch.route(torch.full((3, 20), value, device=CUDA), Routing(20, 4), None, None)
        assert ids.min() >= 0 and ids.max() < 20


@pytest.mark.parametrize("tokens", [1, 3, 90])
def test_weights_beyond_two_billion_elements(tokens: int) -> None:
    """The last expert lies behind 2³¹: its address is computed in 64 bits."""
    experts, hidden, width = 150, 4096, 2048
    assert experts * 2 * width * hidden > 2**31
    stack = Experts(
        torch.empty(experts, 2 * width, hidden, device=CUDA, dtype=torch.bfloat16), None,
        torch.empty(experts, hidden, width, device=CUDA, dtype=torch.bfloat16), None,
    )  # fmt: skip
    stack.gate_up.fill_(math.nan)
    stack.down.fill_(math.nan)
    stack.gate_up[-1].normal_(std=hidden**-0.5)
    stack.down[-1].normal_(std=width**-0.5)
    x = torch.randn(tokens, hidden, device=CUDA, dtype=torch.bfloat16)
    ids = torch.full((tokens, 1), experts - 1, device=CUDA, dtype=torch.int32)
    got = moe_launch.run_experts(x, ids, torch.ones(tokens, 1, device=CUDA), stack)
    last = dataclasses.replace(stack, gate_up=stack.gate_up[-1:], down=stack.down[-1:])
    plain = moe.run_experts(x, torch.zeros_like(ids), torch.ones(tokens, 1, device=CUDA), last)
    assert (got - plain).abs().max() <= 0.03 * plain.abs().max()


# --- whole models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "settings"),
    [("tiny-qwen3-moe", {}), ("tiny-mixtral", {}), ("tiny-qwen3-moe", {"compilation_mode": "VLLM_COMPILE"})], ids=str,
)  # fmt: skip
def test_modes_agree(model: str, settings: dict[str, Any]) -> None:
    batch = prompts(6, seed=3, longest=90, vocab=512)
    common = dict(dtype="float32", max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64,
                  gpu_memory_utilization=0.1, attention_backend="TRITON_ATTN")  # fmt: skip
    with LLM(model, **common, enforce_eager=True) as llm:
        reference, _ = teach(llm, batch, 10, stagger=2)
    with LLM(model, **common, **settings, cudagraph_capture_sizes=[1, 2, 4, 8, 64]) as llm:
        for mode in ("FULL_AND_PIECEWISE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY"):
            llm.reconfigure(cudagraph_mode=mode)
            assert llm.cudagraph_mode.name == mode
            ours, reports = teach(llm, batch, 10, stagger=2)
            assert any(r.mode != "NONE" and r.size > r.num_tokens for r in reports), "some steps were padded"
            assert_same_logits(ours, reference, what=mode)
            llm.reset()


def test_logits_equal_transformers(tmp_path: pathlib.Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        hidden_size=512, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
        vocab_size=2048, max_position_embeddings=2048, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=192,
        norm_topk_prob=True, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not name.endswith("norm.weight"):
                weight.normal_(std=weight.shape[-1] ** -0.5)
    model.save_pretrained(tmp_path)
    model = model.cuda()
    batch, n = prompts(3, seed=11, longest=200, vocab=2048), 6
    with LLM(str(tmp_path), dtype="float32", attention_backend="TRITON_ATTN", cudagraph_mode="FULL", max_model_len=512,
             max_num_seqs=8, gpu_memory_utilization=0.1) as llm:  # fmt: skip
        ours, _ = teach(llm, batch, n, stagger=1)
    for i, prompt in enumerate(batch):
        ids = prompt + [next_token(prompt, j, 2048) for j in range(n - 1)]
        with torch.inference_mode():
            theirs = model(torch.tensor([ids], device=CUDA)).logits[0, len(prompt) - 1 :].float().cpu()
        for position in range(n):
            bound = 1e-4 * max(1.0, theirs[position].abs().max().item())
            assert (ours[i, position] - theirs[position]).abs().max() <= bound, f"prompt {i}, position {position}"


def test_the_bench_counts_the_experts_that_a_call_reads() -> None:
    """The layer shape of qwen3-30b-a3b: a token reads 8 experts, eight tokens about 51 of 128. Prints how fast."""
    from labkit.bench.moe import bench_moe

    one, eight = bench_moe("qwen3-30b-a3b", [1, 8], dtype="bfloat16", samples=20)
    print(one.sentence, eight.sentence, sep="\n")
    assert one.launch == eight.launch == "graph" and one.n == 20
    assert one.experts_read == 8 and 40 < eight.experts_read < 62
    assert 0 < one.p50_us < eight.p50_us
