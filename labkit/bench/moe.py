"""How fast a layer of experts reads the weights of those that work: time of a call, and the bytes it had to read.

Refuses to know the rest of the model. Tokens are random, so their experts are; a call is measured over several batches
in turn, whose experts differ, so that no cache holds what the next one reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from labkit.config import ModelConfig
from labkit.errors import ConfigError, did_you_mean
from labkit.measure import clocks
from labkit.measure.limits import ITEMSIZE, copy_bandwidth_gb_s
from labkit.measure.stats import summary

#: Batches of random tokens that a sample goes through.
BATCHES = 16


@dataclasses.dataclass(frozen=True)
class MoeRow:
    """One batch size. Times are microseconds of one call, router and experts together.

    launch: "graph" or "eager". experts_read: experts that a call used, the mean over the batches. gb_s: their weights
    (and the router's and the shared experts') over p50. copy_gb_s: a large copy's, on the same device in the same run.
    """

    model: str
    dtype: str
    tokens: int
    launch: str
    p10_us: float
    p50_us: float
    p90_us: float
    n: int
    samples_us: tuple[float, ...]
    experts_read: float
    bytes_read: float
    gb_s: float
    copy_gb_s: float

    @property
    def share(self) -> float:
        """What the reading reaches of the copy's bandwidth."""
        return self.gb_s / self.copy_gb_s

    @property
    def sentence(self) -> str:
        return (
            f"{self.model}, {self.tokens} tokens, {self.launch}: {self.experts_read:.1f} experts a layer, "
            f"{self.bytes_read / 1e6:.1f} MB in {self.p50_us:.1f} µs (p10–p90 {self.p10_us:.1f}–{self.p90_us:.1f}, "
            f"n={self.n}), {self.gb_s:,.0f} GB/s or {self.share:.0%} of a copy's {self.copy_gb_s:,.0f}."
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self) | {"share": self.share}


def bench_moe(
    model: str, tokens: Sequence[int], *, dtype: str = "auto", device: str = "auto", samples: int = 50, seed: int = 0
) -> list[MoeRow]:
    """Time one layer of experts of a known shape, with random weights, for each number of tokens.

    On CUDA in a graph, which leaves the host out; on a CPU as it is called.

    Raises:
        ConfigError: there is no shape of that name, or it has no experts.
    """
    import torch

    from labkit.engine.plan import resolve_dtype
    from labkit.llm import find_device
    from labkit.models.moe import MoE

    config = _shape(model)
    where, platform = find_device(device)
    dtype, _ = resolve_dtype(dtype, platform)
    with torch.inference_mode():
        layer = MoE(config, getattr(torch, dtype), where)
        generator = torch.Generator(where).manual_seed(seed)
        for _, tensor in layer.tensors():
            tensor.normal_(std=tensor.shape[-1] ** -0.5, generator=generator)
        copy = copy_bandwidth_gb_s(where)
        return [_row(layer, config, dtype, count, samples, copy, generator) for count in tokens]


def _shape(name: str) -> ModelConfig:
    from labkit.models.shapes import SHAPES

    with_experts = [shape for shape, config in SHAPES.items() if config.num_experts]
    if name not in with_experts:
        raise ConfigError(f"model={name!r}", "is no known shape with experts", did_you_mean(name, with_experts))
    return SHAPES[name]


def _row(layer: Any, config: ModelConfig, dtype: str, tokens: int, samples: int, copy: float, generator: Any) -> MoeRow:
    import torch

    from labkit.models import moe

    where = generator.device
    shape = (BATCHES, tokens, config.hidden_size)
    batches = torch.randn(shape, generator=generator, device=where).to(layer.gate.dtype)
    used = [moe.route(moe.router_logits(x, layer.gate), layer.routing, layer.gate_bias)[0] for x in batches]
    experts = sum(len(ids.unique()) for ids in used) / BATCHES

    def work() -> None:
        for x in batches:
            layer.forward(x)

    work()
    on_gpu = where.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(where)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
    todo = graph.replay if on_gpu else work
    times = [t / BATCHES for t in clocks.sample_us(todo, samples=samples, warmup=2, device=where)]
    spread = summary(times)
    stack = layer.experts
    per_expert = sum(
        t[0].numel() for t in (stack.gate_up, stack.gate_up_bias, stack.down, stack.down_bias) if t is not None
    )
    rest = config.num_experts * config.hidden_size + 3 * config.n_shared_experts * config.moe_intermediate_size * (
        config.hidden_size
    )
    read = (experts * per_expert + rest) * ITEMSIZE[dtype]
    return MoeRow(
        model=config.name, dtype=dtype, tokens=tokens, launch="graph" if on_gpu else "eager",
        p10_us=round(spread.p10, 3), p50_us=round(spread.p50, 3), p90_us=round(spread.p90, 3), n=spread.n,
        samples_us=tuple(round(t, 3) for t in times), experts_read=experts, bytes_read=read,
        gb_s=round(read / spread.p50 / 1e3, 2), copy_gb_s=round(copy, 2),
    )  # fmt: skip
