"""What an engine's memory goes to: weights, KV cache, graphs, workspace; from the shape, and as it was found.

Refuses to know an engine: the prediction takes a model's shape and limits, what was found is handed in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.config import ModelConfig
from labkit.errors import ConfigError
from labkit.measure.limits import ITEMSIZE
from labkit.measure.provenance import Kind, ProvenanceError

MIB = 2**20
#: In the order in which an engine takes them.
PARTS = ("weights", "workspace", "graphs", "kv")
WORDS = {
    "weights": "weights", "kv": "KV cache", "graphs": "CUDA graphs",
    "workspace": "workspace: activations of the largest step",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Limits:
    """What besides the shape fixes the memory: EngineConfig's fields, with page size and dtype decided.

    num_blocks: pages of the KV cache where they are set (`num_gpu_blocks_override`).
    """

    dtype: str
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int | None = None


@dataclasses.dataclass(frozen=True)
class Part:
    """One use of memory in bytes. predicted: None where nothing predicts it; actual: None where nobody looked."""

    name: str
    predicted: int | None
    actual: int | None
    note: str = ""

    @property
    def difference(self) -> int | None:
        """Actual less predicted."""
        return None if self.predicted is None or self.actual is None else self.actual - self.predicted


@dataclasses.dataclass(frozen=True)
class LayerKV:
    """What the layers of one kind keep of one request in the cache, and what of it they can still read.

    window: keys that a token sees at most, itself included; None where it sees all. readable: tokens of the cache that
    the next token of the request sees. held, unused: bytes over all layers of the kind, in whole pages; unused are the
    pages that no later token will read. Nothing is freed for one kind alone: a page belongs to every layer.
    """

    kind: str
    layers: int
    window: int | None
    tokens: int
    readable: int
    held: int
    unused: int

    @property
    def sentence(self) -> str:
        """What it says, as a part of a sentence."""
        name = self.kind.replace("_", " ")
        if self.window is None:
            return f"{self.layers} layers of {name} read all {self.tokens:,} tokens of a request"
        return (
            f"{self.layers} layers of {name} keep {self.tokens:,} tokens of a request and can still read "
            f"{self.readable:,}: {mib(self.unused)} of {mib(self.held)} are unused, and not freed"
        )


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """Where the memory of one engine goes. kind: of the actual numbers; a prediction alone is SIMULATED.

    peak: most that the allocator held at once, None where nobody looked (a CPU). graphs by (mode, size) in MiB.
    layers: for one request at full length, where layers are of several kinds.
    """

    title: str
    kind: Kind
    parts: tuple[Part, ...]
    peak: int | None = None
    by_size: tuple[tuple[str, int, float], ...] = ()
    layers: tuple[LayerKV, ...] = ()

    def part(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)

    @property
    def sentence(self) -> str:
        """One sentence per part that has a number."""
        out = []
        for part in self.parts:
            words = WORDS.get(part.name, part.name)
            if part.actual is None and part.predicted is None:
                continue
            if part.actual is None:
                out.append(f"{words} {mib(part.predicted)} predicted")
            elif part.predicted is None:
                out.append(f"{words} {mib(part.actual)}")
            else:
                out.append(f"{words} {mib(part.actual)} ({mib(part.predicted)} predicted)")
        peak = f"; at most {mib(self.peak)} at once" if self.peak else ""
        kinds = f" At full length {'; '.join(one.sentence for one in self.layers)}." if self.layers else ""
        return f"{self.title}, {self.kind}: {', '.join(out)}{peak}.{kinds}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, in bytes."""
        return {
            "title": self.title, "kind": str(self.kind), "peak": self.peak,
            "parts": [{**dataclasses.asdict(part), "difference": part.difference} for part in self.parts],
            "graphs_by_size": [{"mode": mode, "size": size, "mib": taken} for mode, size, taken in self.by_size],
            "layers": [dataclasses.asdict(one) for one in self.layers],
        }  # fmt: skip


def mib(num_bytes: int | None) -> str:
    """`1,024 MiB`, or a dash."""
    return "-" if num_bytes is None else f"{num_bytes / MIB:,.0f} MiB" if num_bytes >= 10 * MIB else (
        f"{num_bytes / MIB:.2f} MiB"
    )  # fmt: skip


def weight_bytes(model: ModelConfig, dtype: str) -> int:
    """Bytes of all weights, each stored once (a tied head is the embedding), and of the rotary table beside them.

    The table has a cosine and a sine, in fp32, for each position and each pair of a head's elements.
    """
    return model.num_parameters() * _itemsize(dtype) + model.max_position_embeddings * model.rotary_size * 4


def kv_bytes(model: ModelConfig, limits: Limits, tokens: int | None = None, budget: int | None = None) -> int:
    """Bytes of a KV cache in whole pages, one of them the null page.

    Args:
        tokens: tokens of one request; None takes `max_model_len`. Every request of `max_num_seqs` gets as many.
        budget: bytes that there are; the cache takes as many whole pages of it as can be useful.
    """
    page = model.kv_bytes_per_token(_itemsize(limits.dtype)) * limits.block_size
    if limits.num_blocks is not None:
        return page * limits.num_blocks
    pages = limits.max_num_seqs * -(-(tokens or limits.max_model_len) // limits.block_size) + 1
    return page * (pages if budget is None else min(pages, budget // page))


def kv_by_kind(model: ModelConfig, limits: Limits, tokens: int) -> tuple[LayerKV, ...]:
    """For each kind of layer what one request of `tokens` tokens keeps; empty where all layers are of one kind."""
    kinds = dict.fromkeys(map(model.layer_kind, range(model.num_layers)))
    if len(kinds) < 2:
        return ()
    size, out = limits.block_size, []
    page = model.kv_bytes_per_token(_itemsize(limits.dtype)) // model.num_layers * size
    for kind in kinds:
        layers = [layer for layer in range(model.num_layers) if model.layer_kind(layer) == kind]
        window = model.layer_window(layers[0])
        readable = tokens if window is None else min(tokens, window - 1)
        unused = (tokens - readable) // size  # the page of the oldest token that is read is read
        held = -(-tokens // size) * page * len(layers)
        out.append(LayerKV(kind, len(layers), window, tokens, readable, held, unused * page * len(layers)))
    return tuple(out)


def workspace_bytes(model: ModelConfig, limits: Limits) -> int:
    """Bytes of the widest moment in a step of `max_num_batched_tokens` tokens: a lower bound of what it takes.

    In the feed-forward part, where it is widest: the residual and the layer's input (hidden size each), gate and up
    side by side, and their product; with experts the product and the output of each that works for a token (gate and up
    are never stored). Or in the head, where each of `max_num_seqs` rows has one logit per word. Whatever
    is the larger; attention's own buffers come on top.
    """
    size, tokens = _itemsize(limits.dtype), limits.max_num_batched_tokens
    dense = 0 if model.is_moe_layer(0) else 3 * model.intermediate_size
    chosen = model.num_experts_per_tok * (model.moe_intermediate_size + model.hidden_size)
    feed_forward = tokens * (2 * model.hidden_size + max(dense, chosen)) * size
    head = tokens * model.hidden_size * size + min(limits.max_num_seqs, tokens) * model.vocab_size * size
    return max(feed_forward, head)


def predict(model: ModelConfig, limits: Limits, *, budget: int | None = None) -> tuple[Part, ...]:
    """What the shape says; graphs cannot be predicted from it.

    Args:
        budget: bytes for all of it, as `gpu_memory_utilization` × the GPU's memory; the KV cache gets what is left.

    Raises:
        ConfigError: weights and workspace alone are larger than the budget.
    """
    weights, workspace = weight_bytes(model, limits.dtype), workspace_bytes(model, limits)
    left = None if budget is None else budget - weights - workspace
    if left is not None and left <= 0:
        raise ConfigError(
            f"{model.name} in {mib(budget)}",
            f"weights ({mib(weights)}) and workspace ({mib(workspace)}) do not fit",
            "Take a smaller model, a shorter step, or a larger GPU.",
        )
    return (
        Part("weights", weights, None, f"{model.num_parameters():,} parameters in {limits.dtype}, and a rotary table"),
        Part("workspace", workspace, None, "at least: the widest moment of the largest step"),
        Part("graphs", None, None, "known only once graphs are captured"),
        Part("kv", kv_bytes(model, limits, budget=left), None,
             "all requests at full length" if left is None else "what is left, in whole pages"),
    )  # fmt: skip


def report(
    title: str,
    model: ModelConfig,
    limits: Limits,
    memory: Mapping[str, int] | None = None,
    *,
    kind: Kind | str = Kind.LIVE,
    graphs_estimated: int | None = None,
    by_size: Sequence[tuple[str, int, float]] = (),
    budget: int | None = None,
) -> MemoryReport:
    """Prediction beside what an engine says.

    Args:
        memory: bytes by name as `LLM.memory` has them: weights, kv, graphs, peak (0 where nobody looked). None makes
            the report a prediction alone, which is SIMULATED.
        graphs_estimated: bytes that the engine set aside for graphs before it captured them.
        by_size: (mode, size, MiB) of each size's graphs, as in `LLM.capture_records`.

    Raises:
        ProvenanceError: memory that was looked at is called SIMULATED.
    """
    kind, layers = Kind(kind), kv_by_kind(model, limits, limits.max_model_len)
    if memory is None:
        return MemoryReport(title, Kind.SIMULATED, predict(model, limits, budget=budget), layers=layers)
    if kind is Kind.SIMULATED:
        raise ProvenanceError(title, "measured memory is LIVE or RECORDED, never SIMULATED", "Name its kind.")
    found = {part.name: part for part in predict(model, limits, budget=budget)}
    peak = memory.get("peak") or None
    held = memory["weights"] + memory["kv"] + memory.get("graphs", 0)
    workspace = max(0, peak - held) if peak else None
    actual = {
        "weights": memory["weights"], "kv": memory["kv"], "graphs": memory.get("graphs", 0), "workspace": workspace,
    }  # fmt: skip
    notes = {
        "graphs": "predicted by the engine from a few captures" if graphs_estimated is not None else "",
        "workspace": "actual: the peak less all that is held; the prediction is a lower bound",
    }
    parts = tuple(
        dataclasses.replace(
            found[name], actual=actual[name], note=notes.get(name, found[name].note),
            predicted=graphs_estimated if name == "graphs" else found[name].predicted,
        )
        for name in PARTS
    )  # fmt: skip
    return MemoryReport(title, kind, parts, peak, tuple(by_size), layers)


def _itemsize(dtype: str) -> int:
    if dtype not in ITEMSIZE:
        raise ConfigError(f"dtype={dtype!r}", "has no known size here", f"Take one of {', '.join(ITEMSIZE)}.")
    return ITEMSIZE[dtype]
