"""What one step did: mode, size, padding, times. What panels and benchmarks read; refuses to know the engine."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Usage:
    """Token counts of one request. `cached_tokens` is how much of the prompt the prefix cache served."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """The chosen token with its natural-log probability, and the most likely alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """A request as the caller sees it. Cumulative; `delta` is the text this step added (safe for split UTF-8).

    finish_reason: "stop", "length", "abort", "error", or None while running. Plain values, never views of buffers.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    delta: str
    finish_reason: str | None
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


#: The phases of a step in the order they run; keys of `StepReport.phases_us` (host microseconds).
PHASES = ("schedule", "dispatch", "inputs", "prepare", "launch", "sample", "commit", "detokenize")


@dataclasses.dataclass(frozen=True)
class StepReport:
    """One `LLM.step()`.

    mode: the runtime mode that ran: "NONE", "PIECEWISE" or "FULL".
    size: number of tokens that ran, padding included (the captured size under a graph).
    num_tokens, num_reqs: the real ones. num_padded: `size - num_tokens`.
    wall_ms: from the call to the tokens on the host. phases_us: host time per phase, see PHASES.
    device_us: device time of the forward by events, None on a CPU or when not asked for.
    launches: kernels and graphs the host starts per step of this (mode, size), counted once from a trace, else None.
    graph_launches: graphs replayed in this step. emulated: true when the "graph" was the CPU's emulation.
    scheduled: tokens that ran, by request. begun_at_ms: when the step began, on `time.perf_counter`'s clock in ms.
    """

    step_id: int
    mode: str
    size: int
    num_tokens: int
    num_reqs: int
    num_padded: int
    max_query_len: int
    max_seq_len: int
    backend: str
    wall_ms: float
    phases_us: dict[str, float]
    device_us: float | None = None
    launches: int | None = None
    graph_launches: int = 0
    emulated: bool = False
    num_cached_tokens: int = 0
    preempted: tuple[str, ...] = ()
    scheduled: dict[str, int] = dataclasses.field(default_factory=dict)
    outputs: tuple[RequestOutput, ...] = ()
    begun_at_ms: float = 0.0

    @property
    def ended_at_ms(self) -> float:
        """When the tokens were on the host, on the clock of `begun_at_ms`."""
        return self.begun_at_ms + self.wall_ms

    @property
    def host_us(self) -> float:
        """Host time of all phases together."""
        return sum(self.phases_us.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class ReconfigureReport:
    """What a `reconfigure` rebuilt, in milliseconds per part, and what it kept."""

    changed: dict[str, tuple[Any, Any]]
    rebuilt_ms: dict[str, float]
    kept: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class CaptureRecord:
    """What was captured for one size: mode, size in tokens, milliseconds and MiB it took, and how many graphs.

    A FULL step is one graph, a PIECEWISE step one for each piece between attention calls. `mib` is device memory that
    is gone afterwards: the graphs' own, the driver's part of it, and buffers that attention keeps for them.
    kernel_nodes: kernels in the graphs together, None where nothing was recorded or nobody counts.
    """

    mode: str
    size: int
    ms: float
    mib: float
    graphs: int = 1
    kernel_nodes: int | None = None


@dataclasses.dataclass(frozen=True)
class GraphMemory:
    """What graphs were expected to take when the KV cache was sized, and what those captured since then took, in MiB.

    estimated_mib: None where nothing was set aside: on a CPU, without graphs, with `num_gpu_blocks_override`, and for
    a compiled whole pass, which would have to be compiled twice. estimate_ms: what finding out took.
    """

    estimated_mib: float | None
    actual_mib: float
    estimate_ms: float = 0.0

    @property
    def difference_mib(self) -> float | None:
        """Actual less estimated; None without an estimate."""
        return None if self.estimated_mib is None else self.actual_mib - self.estimated_mib
