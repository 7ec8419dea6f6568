"""The MLP of experts: a router chooses a few of many MLPs for each token. Refuses to know the layer around it.

Nothing here depends on a tensor's value on the host: shapes follow from the number of tokens, so that a graph that was
captured with one routing replays with any other. Tokens that are padding (their slot is −1) reach no expert and give 0.
On CUDA `labkit.models.moe_launch` does the work; elsewhere a few torch operators that say what its kernels compute. For
torch.compile the whole is one opaque operator, `labkit::moe`.
"""

from __future__ import annotations

import dataclasses
import functools
import json

import torch
import torch.nn.functional as F

from labkit.attention import op
from labkit.config import ModelConfig
from labkit.errors import ConfigError, did_you_mean
from labkit.models import moe_launch
from labkit.models.blocks import Named
from labkit.models.layers import linear, silu_and_mul
from labkit.models.moe_launch import SCORING, Experts, Routing

#: gpt-oss's gate: silu with this slope.
ALPHA = 1.702


class MoE:
    """Router, stacked experts, and shared experts where the family has them; over uninitialised weights.

    Weights are `[out, in]`, those of the experts stacked: `gate_up` `[experts, 2 · width, hidden]` and `down`
    `[experts, hidden, width]`. gpt-oss's rows of gate and up alternate, as in its checkpoints.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.routing = routing_of(config)
        self.architecture = config.architecture
        hidden, width, experts = config.hidden_size, config.moe_intermediate_size, config.num_experts

        def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        biased = config.expert_bias
        self.gate = empty(experts, hidden)
        # The bias that only chooses is small beside the differences it corrects, so it stays fp32.
        choice = empty(experts, dtype=torch.float32) if self.routing.bias == "choice" else None
        self.gate_bias = empty(experts) if self.routing.bias == "logits" else choice
        self.experts = Experts(
            gate_up=empty(experts, 2 * width, hidden),
            gate_up_bias=empty(experts, 2 * width) if biased else None,
            down=empty(experts, hidden, width),
            down_bias=empty(experts, hidden) if biased else None,
            interleaved=config.swiglu_limit is not None,
            limit=config.swiglu_limit,
        )
        shared = config.n_shared_experts * width
        self.shared_gate_up = empty(2 * shared, hidden) if shared else None
        self.shared_down = empty(hidden, shared) if shared else None
        self._routing_key = routing_key(self.routing)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Weighted sum of each token's experts, plus the shared ones: `[num_tokens, hidden]` in and out."""
        shared = None
        if self.shared_gate_up is not None and self.shared_down is not None:
            shared = linear(silu_and_mul(linear(x, self.shared_gate_up)), self.shared_down)
        return run_moe(x, self.gate, self.gate_bias, self.experts, shared, self.routing, op.slots())

    def traced_forward(self, x: torch.Tensor) -> torch.Tensor:
        """`forward` for a compiler: router and experts are an opaque operator, shared experts are not."""
        shared, stack = None, self.experts
        if self.shared_gate_up is not None and self.shared_down is not None:
            gate, up = F.linear(x, self.shared_gate_up).chunk(2, dim=-1)
            shared = F.linear(F.silu(gate) * up, self.shared_down)
        return opaque_moe(
            x, self.gate, self.gate_bias, stack.gate_up, stack.gate_up_bias, stack.down, stack.down_bias, shared,
            self._routing_key, stack.interleaved, stack.limit,
        )  # fmt: skip

    def tensors(self) -> Named:
        """Name and tensor of everything that `forward` reads."""
        for name, tensor in (
            ("gate", self.gate), ("gate_bias", self.gate_bias),
            ("experts.gate_up", self.experts.gate_up), ("experts.gate_up_bias", self.experts.gate_up_bias),
            ("experts.down", self.experts.down), ("experts.down_bias", self.experts.down_bias),
            ("shared.gate_up", self.shared_gate_up), ("shared.down", self.shared_down),
        ):  # fmt: skip
            if tensor is not None:
                yield name, tensor

    def checkpoint_views(self, prefix: str) -> Named:
        """Hugging Face name and view of every weight, expert by expert, as checkpoints on the hub have them."""
        if self.architecture == "gpt_oss":
            yield from self._gpt_oss_views(prefix + "mlp.")
            return
        mixtral = self.architecture == "mixtral"
        prefix += "block_sparse_moe." if mixtral else "mlp."
        names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        yield prefix + "gate.weight", self.gate
        if self.gate_bias is not None:
            yield prefix + "gate.e_score_correction_bias", self.gate_bias
        for number, (gate_up, down) in enumerate(zip(self.experts.gate_up, self.experts.down, strict=True)):
            for name, weight in zip(names, (*gate_up.chunk(2), down), strict=True):
                yield f"{prefix}experts.{number}.{name}.weight", weight
        if self.shared_gate_up is not None and self.shared_down is not None:
            weights = (*self.shared_gate_up.chunk(2), self.shared_down)
            for name, weight in zip(("gate_proj", "up_proj", "down_proj"), weights, strict=True):
                yield f"{prefix}shared_experts.{name}.weight", weight

    def _gpt_oss_views(self, prefix: str) -> Named:
        stack = self.experts
        yield prefix + "router.weight", self.gate
        if self.gate_bias is not None:
            yield prefix + "router.bias", self.gate_bias
        # Stored as [experts, in, out].
        yield prefix + "experts.gate_up_proj", stack.gate_up.transpose(1, 2)
        yield prefix + "experts.down_proj", stack.down.transpose(1, 2)
        if stack.gate_up_bias is not None and stack.down_bias is not None:
            yield prefix + "experts.gate_up_proj_bias", stack.gate_up_bias
            yield prefix + "experts.down_proj_bias", stack.down_bias

    def stacked_views(self, prefix: str) -> dict[str, tuple[torch.Tensor, tuple[str, ...]]]:
        """Names under which transformers 5 itself holds the experts, stacked, and may save them.

        Each with its view and the names of `checkpoint_views` that it stands for.
        """
        if self.architecture == "gpt_oss":
            return {}
        single = [name for name, _ in self.checkpoint_views(prefix)]
        down = tuple(n for n in single if n.endswith((".w2.weight", ".down_proj.weight")) and ".experts." in n)
        gate_up = tuple(n for n in single if ".experts." in n and n not in down)
        found = {
            prefix + "mlp.experts.gate_up_proj": (self.experts.gate_up, gate_up),
            prefix + "mlp.experts.down_proj": (self.experts.down, down),
        }
        if self.architecture == "mixtral":
            found[prefix + "mlp.gate.weight"] = (self.gate, (prefix + "block_sparse_moe.gate.weight",))
        return found


def routing_of(config: ModelConfig) -> Routing:
    """How the tokens of a model choose experts. ConfigError for what is not computed."""
    what = f"model {config.name!r}"
    if config.scoring_func not in SCORING:
        hint = did_you_mean(config.scoring_func, tuple(SCORING))
        raise ConfigError(f"{what} with scoring_func={config.scoring_func!r}", "is not a known rule", hint)
    groups, experts = config.n_group, config.num_experts
    if experts % groups or not 0 < config.topk_group <= groups:
        why = f"{experts} experts in {groups} groups, of which {config.topk_group} are kept, do not divide"
        raise ConfigError(what, why, "Fix n_group or topk_group.")
    if config.num_experts_per_tok > experts // groups * config.topk_group:
        why = f"{config.topk_group} groups of {experts // groups} experts are too few for {config.num_experts_per_tok}"
        raise ConfigError(what, why, "Raise topk_group.")
    if config.hidden_act != "silu":
        raise ConfigError(what, f"experts with the activation {config.hidden_act!r} are not computed", "Use 'silu'.")
    chooses = config.topk_method == "noaux_tc"
    limited = groups > 1 and config.topk_method != "greedy"
    return Routing(
        num_experts=experts,
        top_k=config.num_experts_per_tok,
        scoring_func=config.scoring_func,
        norm_topk_prob=config.norm_topk_prob,
        n_group=groups if limited else 1,
        topk_group=config.topk_group if limited else 1,
        routed_scaling_factor=config.routed_scaling_factor,
        bias="choice" if chooses else "logits" if config.expert_bias else "",
    )


def run_moe(
    x: torch.Tensor, gate: torch.Tensor, gate_bias: torch.Tensor | None, stack: Experts,
    shared: torch.Tensor | None, routing: Routing, slots: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Router and experts on tokens `[num_tokens, hidden]`; a token whose slot is negative is padding."""
    logits = router_logits(x, gate)
    if x.is_cuda:
        ids, weights = moe_launch.route(logits, routing, gate_bias, slots)
        return moe_launch.run_experts(x, ids, weights, stack, shared)
    ids, weights = route(logits, routing, gate_bias, slots)
    return run_experts(x, ids, weights, stack, shared)


def router_logits(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x · gateᵀ in fp32, `[num_tokens, num_experts]`: rounded to bf16, close scores would be equal ones."""
    return moe_launch.router_logits(x, gate) if x.is_cuda else F.linear(x.float(), gate.float())


def route(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None, slots: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(int64 ids, fp32 weights) of each token's experts, `[num_tokens, top_k]`; see `Routing` for the rules.

    Args:
        logits: `[num_tokens, num_experts]`. bias: `[num_experts]`. slots: `[≥ num_tokens]`; negative is padding, which
            gets ids −1 and weights 0.
    """
    logits = logits.float()
    if bias is not None and routing.bias == "logits":
        logits = logits + bias.float()
    if routing.scoring_func == "softmax":
        scores = logits.softmax(-1)
    else:
        scores = logits.sigmoid() if routing.scoring_func == "sigmoid" else logits
    choice = scores if bias is None or routing.bias != "choice" else scores + bias.float()
    if routing.n_group > 1:
        groups = choice.unflatten(-1, (routing.n_group, -1))
        best = groups.topk(2, -1).values.sum(-1) if routing.bias == "choice" else groups.amax(-1)
        kept = torch.zeros_like(best).scatter_(1, best.topk(routing.topk_group, -1).indices, 1.0)
        choice = groups.masked_fill(kept.unsqueeze(-1) == 0, float("-inf")).flatten(1)
    ids = choice.topk(routing.top_k, -1).indices
    weights = scores.gather(1, ids)
    if routing.scoring_func == "topk_softmax":
        weights = weights.softmax(-1)
    elif routing.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * routing.routed_scaling_factor
    if slots is not None:
        padding = (slots[: len(ids)] < 0).unsqueeze(-1)
        ids, weights = ids.masked_fill(padding, -1), weights.masked_fill(padding, 0.0)
    return ids, weights


def run_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, stack: Experts, shared: torch.Tensor | None = None
) -> torch.Tensor:
    """Σ weight · expert(x) over each token's experts, plus `shared`: `[num_tokens, hidden]` in the dtype of `x`.

    Few pairs gather the weights they use; many compute every expert for every token, which costs more products and
    keeps the shapes free of the data.
    """
    tokens, top_k = ids.shape
    padding = (ids[:, :1] < 0).expand_as(x)
    rows = ids.clamp(min=0).long()
    if tokens * top_k < stack.gate_up.shape[0]:
        rows = rows.flatten()
        inner = torch.bmm(stack.gate_up[rows], x.repeat_interleave(top_k, 0).unsqueeze(-1)).squeeze(-1)
        inner = gated(inner, stack, None if stack.gate_up_bias is None else stack.gate_up_bias[rows])
        parts = torch.bmm(stack.down[rows], inner.unsqueeze(-1)).squeeze(-1).float()
        if stack.down_bias is not None:
            parts = parts + stack.down_bias[rows].float()
        out = (parts.view(tokens, top_k, x.shape[1]) * weights.unsqueeze(-1)).sum(1)
    else:
        share = weights.new_zeros(tokens, stack.gate_up.shape[0]).scatter_add_(1, rows, weights).t().unsqueeze(-1)
        inner = torch.matmul(x, stack.gate_up.transpose(1, 2))  # [experts, tokens, 2 · width]
        inner = gated(inner, stack, None if stack.gate_up_bias is None else stack.gate_up_bias.unsqueeze(1))
        parts = torch.bmm(inner, stack.down.transpose(1, 2)).float()
        if stack.down_bias is not None:
            parts = parts + stack.down_bias.unsqueeze(1).float()
        out = torch.where(share != 0, parts * share, 0.0).sum(0)  # an expert that nobody asked may overflow
    if shared is not None:
        out = out + shared
    return out.to(x.dtype).masked_fill(padding, 0.0)


def gated(gate_up: torch.Tensor, stack: Experts, bias: torch.Tensor | None) -> torch.Tensor:
    """silu(gate) · up of `[…, 2 · width]`, or gpt-oss's (up + 1) · gate · sigmoid(1.702 · gate) of clamped values."""
    rows = gate_up.float() if bias is None else gate_up.float() + bias.float()
    gate, up = (rows[..., ::2], rows[..., 1::2]) if stack.interleaved else rows.chunk(2, dim=-1)
    if stack.limit is None:
        return (F.silu(gate) * up).to(gate_up.dtype)
    gate, up = gate.clamp(max=stack.limit), up.clamp(-stack.limit, stack.limit)
    return ((up + 1) * gate * torch.sigmoid(ALPHA * gate)).to(gate_up.dtype)


# --- for torch.compile -----------------------------------------------------------------------------------------------

NAME = "labkit::moe"

_library = torch.library.Library("labkit", "FRAGMENT")
_library.define(
    "moe(Tensor x, Tensor gate, Tensor? gate_bias, Tensor gate_up, Tensor? gate_up_bias, Tensor down, "
    "Tensor? down_bias, Tensor? shared, str routing, bool interleaved, float? limit) -> Tensor"
)


def routing_key(routing: Routing) -> str:
    """A routing as the constant of compiled code: it means the same in another process, where a cache is read."""
    return json.dumps(dataclasses.asdict(routing))


@functools.cache
def _routing(key: str) -> Routing:
    return Routing(**json.loads(key))


def _moe(
    x: torch.Tensor, gate: torch.Tensor, gate_bias: torch.Tensor | None, gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor | None, down: torch.Tensor, down_bias: torch.Tensor | None,
    shared: torch.Tensor | None, routing: str, interleaved: bool, limit: float | None,
) -> torch.Tensor:  # fmt: skip
    stack = Experts(gate_up, gate_up_bias, down, down_bias, interleaved, limit)
    return run_moe(x, gate, gate_bias, stack, shared, _routing(routing), op.slots())


def _fake(x: torch.Tensor, *others: object) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_library.impl("moe", _moe, "CPU")
_library.impl("moe", _moe, "CUDA")
torch.library.register_fake(NAME, _fake, lib=_library)

#: The operator; it writes to nothing, and reads beside its arguments only which tokens are padding.
opaque_moe = torch.ops.labkit.moe.default
