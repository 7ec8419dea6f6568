"""The MLP of experts against transformers' own blocks, on the same random weights; and what padding may not do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from labkit.attention import op
from labkit.config import ModelConfig
from labkit.errors import ConfigError
from labkit.models import moe
from labkit.models.moe import MoE

transformers = pytest.importorskip("transformers")

HIDDEN, WIDTH, EXPERTS = 48, 20, 12
SHAPE: dict[str, Any] = dict(
    vocab_size=64, hidden_size=HIDDEN, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_size=16,
    max_position_embeddings=64, num_experts=EXPERTS, num_experts_per_tok=3, moe_intermediate_size=WIDTH,
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(norm_topk_prob=True),
    "qwen3_moe-unnormalised": dict(norm_topk_prob=False),
    "mixtral": dict(scoring_func="topk_softmax"),
    "deepseek_v2": dict(n_shared_experts=2, routed_scaling_factor=2.5),
    "deepseek_v2-groups": dict(
        n_shared_experts=1, n_group=4, topk_group=2, topk_method="group_limited_greedy", routed_scaling_factor=16.0
    ),
    "deepseek_v3": dict(
        n_shared_experts=1, n_group=3, topk_group=2, topk_method="noaux_tc", scoring_func="sigmoid",
        norm_topk_prob=True, routed_scaling_factor=2.5,
    ),
    "gpt_oss": dict(scoring_func="topk_softmax", expert_bias=True, swiglu_limit=1.5),
}  # fmt: skip


def config_of(family: str, **changes: Any) -> ModelConfig:
    architecture = family.partition("-")[0]
    return ModelConfig(name=family, architecture=architecture, **{**SHAPE, **FAMILIES[family], **changes})


def theirs(config: ModelConfig) -> torch.nn.Module:
    """transformers' block of the family, with random weights in fp64."""
    shared: dict[str, Any] = dict(
        hidden_size=HIDDEN, num_experts_per_tok=config.num_experts_per_tok, moe_intermediate_size=WIDTH,
        norm_topk_prob=config.norm_topk_prob, n_group=config.n_group, topk_group=config.topk_group,
        topk_method=config.topk_method, routed_scaling_factor=config.routed_scaling_factor,
        n_shared_experts=config.n_shared_experts, n_routed_experts=EXPERTS, num_attention_heads=2,
    )  # fmt: skip
    models = transformers.models
    if config.architecture == "qwen3_moe":
        keep = ("hidden_size", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
        kept = {k: v for k, v in shared.items() if k in keep}
        block: torch.nn.Module = models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock(
            transformers.Qwen3MoeConfig(num_experts=EXPERTS, **kept)
        )
    elif config.architecture in ("mixtral", "gpt_oss"):
        plain = dict(hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=EXPERTS,
                     num_experts_per_tok=config.num_experts_per_tok)  # fmt: skip
        if config.architecture == "mixtral":
            block = models.mixtral.modeling_mixtral.MixtralSparseMoeBlock(transformers.MixtralConfig(**plain))
        else:
            limited = transformers.GptOssConfig(**plain, swiglu_limit=config.swiglu_limit)
            block = models.gpt_oss.modeling_gpt_oss.GptOssMLP(limited)
    elif config.architecture == "deepseek_v2":
        block = models.deepseek_v2.modeling_deepseek_v2.DeepseekV2Moe(transformers.DeepseekV2Config(**shared))
    else:
        block = models.deepseek_v3.modeling_deepseek_v3.DeepseekV3MoE(transformers.DeepseekV3Config(**shared))
    for tensor in (*block.parameters(), *block.buffers()):
        tensor.data = torch.randn(tensor.shape, dtype=torch.float64) * (tensor.shape[-1] ** -0.5)
    return block.double().eval()


def ours(config: ModelConfig, block: torch.nn.Module, dtype: torch.dtype = torch.float32) -> MoE:
    """Our layer with the weights of transformers' block, under transformers' names."""
    layer = MoE(config, dtype)
    views = dict(layer.checkpoint_views("")) | {name: view for name, (view, _) in layer.stacked_views("").items()}
    for tensor in views.values():
        tensor.fill_(torch.nan)
    for name, tensor in block.state_dict().items():
        views["mlp." + name].copy_(tensor)
    assert not any(tensor.isnan().any() for tensor in views.values()), "every weight has a name there"
    return layer


def run(block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out = block(x.double().unsqueeze(0))
    return (out[0] if isinstance(out, tuple) else out).squeeze(0)


@pytest.mark.parametrize("tokens", [1, 3, 30], ids=lambda n: f"{n}-tokens")  # gathered experts, and every expert
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers_block(family: str, tokens: int) -> None:
    torch.manual_seed(tokens)
    config = config_of(family)
    block = theirs(config)
    x = torch.randn(tokens, HIDDEN)
    exact = run(block, x)
    layer = ours(config, block)
    for got in (layer.forward(x), layer.traced_forward(x)):
        assert (got.double() - exact).abs().max() <= 1e-5 * exact.abs().max()
    if tokens == 30:  # a rounded layer is as near as transformers' rounded block
        rounded = run(block.to(torch.bfloat16).double(), x.to(torch.bfloat16))
        error = (ours(config, block, torch.bfloat16).forward(x.to(torch.bfloat16)).double() - rounded).norm()
        assert error <= 0.02 * exact.norm()


@pytest.mark.parametrize("family", ["deepseek_v2-groups", "deepseek_v3"])
def test_groups_limit_the_choice(family: str) -> None:
    """A token's experts are of `topk_group` groups, which without the limit they are not."""
    config = config_of(family)
    routing, logits, bias = moe.routing_of(config), torch.randn(200, EXPERTS), torch.randn(EXPERTS) * 0.1
    size = EXPERTS // config.n_group

    def groups(n_group: int) -> int:
        free = dataclasses.replace(routing, n_group=n_group)
        ids, _ = moe.route(logits, free, bias)
        return max(len(set(row)) for row in (ids // size).tolist())

    assert groups(config.n_group) == config.topk_group < groups(1)


class _Context:
    def __init__(self, slots: torch.Tensor) -> None:
        self.metadata = type("Metadata", (), {"slot_mapping": slots})()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("real", [1, 9])
def test_padding_reaches_nobody(family: str, real: int) -> None:
    """Rows whose slot is −1 hold NaN and give 0; the others give what they give alone."""
    torch.manual_seed(real)
    config = config_of(family)
    layer = ours(config, theirs(config))
    x, slots = torch.full((12, HIDDEN), torch.nan), torch.full((12,), -1)
    rows = torch.randperm(12)[:real]
    x[rows], slots[rows] = torch.randn(real, HIDDEN), torch.arange(real)
    alone = layer.forward(x[rows])
    with op.forward_context(_Context(slots)):  # type: ignore[arg-type]
        for out in (layer.forward(x), layer.traced_forward(x)):
            torch.testing.assert_close(out[rows], alone, rtol=1e-5, atol=1e-6)
            out[rows] = 0
            assert torch.equal(out, torch.zeros_like(out))


def test_no_tokens() -> None:
    assert MoE(config_of("deepseek_v3"), torch.float32).forward(torch.empty(0, HIDDEN)).shape == (0, HIDDEN)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_the_operator_is_what_it_says_to_the_compiler(family: str) -> None:
    """Schema, fake and aliasing, by torch's own check."""
    config = config_of(family)
    layer = ours(config, theirs(config))
    stack = layer.experts
    shared = torch.randn(5, HIDDEN) if config.n_shared_experts else None
    arguments = (
        torch.randn(5, HIDDEN), layer.gate, layer.gate_bias, stack.gate_up, stack.gate_up_bias, stack.down,
        stack.down_bias, shared, layer._routing_key, stack.interleaved, stack.limit,
    )  # fmt: skip
    torch.library.opcheck(moe.opaque_moe, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    "changes",
    [
        dict(scoring_func="softmac"), dict(n_group=5), dict(n_group=4, topk_group=5), dict(hidden_act="gelu"),
        dict(n_group=6, topk_group=1),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_computed_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        moe.routing_of(config_of("deepseek_v3", **changes))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_counted(family: str) -> None:
    """What the shape says about the size of a layer, and of what a token meets of it, is what is there."""
    config = config_of(family)
    layer = MoE(config, torch.float32)
    dense = dataclasses.replace(config, num_experts=0, intermediate_size=0)
    held = sum(tensor.numel() for _, tensor in layer.tensors())
    assert held == sum(tensor.numel() for _, tensor in layer.checkpoint_views(""))
    assert held == config.num_parameters() - dense.num_parameters()
    idle = (EXPERTS - config.num_experts_per_tok) * sum(
        t[0].numel() for name, t in layer.tensors() if name.startswith("experts.")
    )
    assert held - idle == config.num_active_parameters() - dense.num_parameters()
