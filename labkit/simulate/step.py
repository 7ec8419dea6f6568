"""What one decode step would cost: kernels from a model's shape, times from a machine's constants, run by the queue.
Refuses to know weights, the engine and recordings; constants are made out of recordings in `labkit.simulate.fit`.

A kernel takes a fixed time plus whichever is longer, moving its bytes or computing. Everything here is SIMULATED. What
was compared with measurements, and how far it was off, is in the docstring of `labkit.simulate.fit`. Never compared
with a measurement: PIECEWISE, tensor parallelism, weights of less than 16 bits. Not modelled: torch.compile, prefill,
communication between GPUs beyond `all_reduce_us` (0 unless given).

The kernels of a replay start when launching it is over. Where every kernel is longer than its launch, FULL therefore
comes out a little above NONE; no recording has shown or refuted that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from labkit.config import ModelConfig
from labkit.errors import ConfigError, did_you_mean
from labkit.measure.provenance import Kind
from labkit.measure.spans import Span, StepTimeline
from labkit.simulate.queue import DEPTH, Work, run_queue

MODES = ("NONE", "PIECEWISE", "FULL")
#: Largest batch, context and tp, and most kernels of a layer, that a step is simulated with.
MOST, MOST_LAUNCHES = 1_000_000_000, 1000
#: What a step waits for; the parts of `SimulatedStep.waiting_us`.
WAITS = ("instructions", "data", "arithmetic", "kernels", "host")
WAIT_WORDS = {
    "instructions": "instructions: the device waits for the next launch",
    "data": "data: the device moves weights and KV",
    "arithmetic": "arithmetic: the device computes",
    "kernels": "short kernels: the fixed time that each kernel takes",
    "host": "the host: scheduling, inputs, sampling, text",
}


@dataclasses.dataclass(frozen=True)
class Machine:
    """The constants of a machine. Times in µs; the defaults are an H200's, see `labkit.simulate.fit`.

    copy_gb_s: 1e9 bytes a second, as a large copy reaches them. tflops: dense bf16 matrix rate (the H200's is from its
    data sheet, not measured). kernel_us: what every kernel takes besides moving and computing.
    launch_us: host time of one launch by kind, as a probe measures it alone. launch_factor: a launch within a step
    costs this much of that.
    graph_launch_us, graph_node_us: host time of a replay, and what every node of it adds.
    host_fixed_us, host_request_us: the engine's own host work around the forward, per step and per request.
    sync_us: from the end of the last kernel to the token ids on the host.
    sdpa_layer_us: host time of TORCH_SDPA's attention per layer. sdpa_kernel_us: `kernel_us` of its small operations.
    sdpa_traffic: bytes it moves per byte of KV that it gathers.
    sms: multiprocessors; Triton's attention takes a second kernel where there is less work than these.
    """

    name: str = "NVIDIA H200"
    copy_gb_s: float = 4264.8
    tflops: float = 989.0
    kernel_us: float = 2.87
    launch_us: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"torch": 6.488, "gemm": 26.477, "triton": 19.684, "graph": 8.733, "copy": 10.944}
    )
    launch_factor: float = 0.822
    graph_node_us: float = 0.806
    host_fixed_us: float = 213.7
    host_request_us: float = 8.5
    sync_us: float = 78.0
    sdpa_layer_us: float = 421.6
    sdpa_kernel_us: float = 0.78
    sdpa_traffic: float = 9.3
    sms: int = 132

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            low = 1e-9 if field.name in ("copy_gb_s", "tflops", "sms") else 0.0
            if isinstance(value, (int, float)) and not (math.isfinite(value) and value >= low):
                raise ConfigError(
                    f"{field.name}={value}", "must be a finite number above zero" if low else "is no time",
                    "Give a measured constant.",
                )  # fmt: skip

    def launch(self, kind: str) -> float:
        """Host µs of one launch of a kind within a step; an unknown kind costs what a torch operation does."""
        return self.launch_factor * self.launch_us.get(kind, self.launch_us.get("torch", 0.0))

    def faster_host(self, factor: float) -> Machine:
        """The same device with a host that is `factor` times as fast in everything it does."""
        if not (math.isfinite(factor) and factor > 0):
            raise ConfigError(f"cpu_factor={factor}", "must be a finite number above zero", "2 is twice as fast.")
        return dataclasses.replace(
            self, launch_us={kind: us / factor for kind, us in self.launch_us.items()},
            **{name: getattr(self, name) / factor for name in (
                "graph_node_us", "host_fixed_us", "host_request_us", "sync_us", "sdpa_layer_us",
            )},
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Every constant, plain."""
        return {**dataclasses.asdict(self), "launch_us": dict(self.launch_us)}


#: Fitted to the SmolLM2-135M rows of the shipped recording; a test fits it again.
H200 = Machine()

#: Attention backends whose cost per call is known from a recording.
BACKENDS = ("TRITON_ATTN", "TORCH_SDPA")
#: What TORCH_SDPA starts per layer: kernels and copies, counted in the recorded launches.
SDPA_KERNELS, SDPA_COPIES = 15, 3
#: Kernels of a layer without attention: norms, rotation with cache write, activation, four matrix products.
_FUSIBLE = ("activation", "rotation, cache write", "norm before the MLP", "norm before the next layer")


@dataclasses.dataclass(frozen=True)
class DecodeModel:
    """One decode step of a model: what has to be done, on each of `tp` GPUs.

    context: tokens of KV per request. weight_bits: 4 is INT4, scales and unpacking left out. kv_bits: of K and V.
    tp: GPUs that share every matrix. max_model_len: what TORCH_SDPA gathers under a graph; None takes the context.
    launches_per_layer: None is the engine's own kernels; more are small operations of their own (a model whose
    operations are not fused), fewer are fused away.
    all_reduce_us: time of one of the two exchanges per layer under tp, on top of a kernel's fixed time. It was not
    measured; 0 makes every step with tp > 1 a lower bound.
    """

    shape: ModelConfig
    batch: int = 1
    context: int = 512
    weight_bits: float = 16
    kv_bits: float = 16
    tp: int = 1
    backend: str = "TRITON_ATTN"
    max_model_len: int | None = None
    launches_per_layer: int | None = None
    all_reduce_us: float = 0.0

    def __post_init__(self) -> None:
        for field, value in (("batch", self.batch), ("context", self.context), ("tp", self.tp)):
            if not 1 <= value <= MOST:
                raise ConfigError(f"{field}={value}", f"must lie in 1…{MOST:,}", "Give such a whole number.")
        if not (0 < self.weight_bits <= 32 and 0 < self.kv_bits <= 32):
            raise ConfigError(
                f"weight_bits={self.weight_bits}, kv_bits={self.kv_bits}", "must lie above 0 and up to 32",
                "16 is bfloat16, 8 is fp8 or INT8, 4 is INT4.",
            )  # fmt: skip
        if self.shape.num_experts or self.shape.uses_mla:
            kind = "experts" if self.shape.num_experts else "latent attention"
            raise ConfigError(
                f"model={self.shape.name!r}", f"a step of a model with {kind} is not simulated",
                "Take a dense model; `labkit bench` measures this one where it fits.",
            )  # fmt: skip
        if self.shape.num_heads % self.tp or self.shape.intermediate_size % self.tp:
            raise ConfigError(
                f"tp={self.tp}", f"{self.shape.num_heads} heads and {self.shape.intermediate_size} columns of the MLP "
                "cannot be shared evenly", "Take a divisor of both.",
            )  # fmt: skip
        if self.backend not in BACKENDS:
            raise ConfigError(
                f"backend={self.backend!r}", "its cost is not known from a recording",
                did_you_mean(self.backend, BACKENDS),
            )  # fmt: skip
        if self.backend == "TORCH_SDPA" and self.shape.attn_logit_softcapping is not None:
            raise ConfigError(
                f"backend='TORCH_SDPA' for {self.shape.name}", "it writes soft-capped scores out, unrecorded yet",
                "Take TRITON_ATTN.",
            )  # fmt: skip
        if not (math.isfinite(self.all_reduce_us) and self.all_reduce_us >= 0):
            raise ConfigError(f"all_reduce_us={self.all_reduce_us}", "is no time", "Give µs, zero or more.")
        least = 4 + 1 + 1
        if self.launches_per_layer is not None and self.launches_per_layer < least:
            raise ConfigError(
                f"launches_per_layer={self.launches_per_layer}",
                f"four matrix products, attention and its merge are {least}", f"Take {least} or more.",
            )  # fmt: skip
        if (self.launches_per_layer or 0) > MOST_LAUNCHES:
            raise ConfigError(
                f"launches_per_layer={self.launches_per_layer}", "every one of them is simulated",
                f"Take {MOST_LAUNCHES:,} or fewer.",
            )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Every parameter, the shape by its name."""
        return {**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)}, "shape": self.shape.name}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What one kernel does on one GPU: bytes it moves, operations it computes; `kind` is that of its launch.

    fixed_us, launch_us: device and host time where they do not follow from the machine and the kind. where: "piece" for
    what every graph takes in, "attention" for what PIECEWISE leaves out, "outside" for what no graph takes in.
    """

    name: str
    role: str
    kind: str
    bytes: float = 0.0
    flops: float = 0.0
    fixed_us: float | None = None
    launch_us: float | None = None
    where: str = "piece"

    def short_us(self, machine: Machine) -> float:
        return machine.kernel_us if self.fixed_us is None else self.fixed_us

    def data_us(self, machine: Machine) -> float:
        return self.bytes / machine.copy_gb_s / 1e3

    def arithmetic_us(self, machine: Machine) -> float:
        return self.flops / machine.tflops / 1e6

    def device_us(self, machine: Machine) -> float:
        """Fixed time, plus the longer of moving and computing."""
        return self.short_us(machine) + max(self.data_us(machine), self.arithmetic_us(machine))


def kernels_of(model: DecodeModel, machine: Machine = H200, *, mode: str = "NONE") -> list[Kernel]:
    """Every kernel of a step on one GPU, in order: the engine's own on a GPU, from embedding to sampling."""
    shape, batch, tp = model.shape, model.batch, model.tp
    hidden, act = shape.hidden_size, 2 * batch  # activations have 16 bits
    out: list[Kernel] = [
        Kernel("embedding", "embedding", "torch", bytes=2 * act * hidden),
        Kernel("residual in fp32", "other", "torch", bytes=3 * act * hidden),
        Kernel("norm before the first layer", "norm", "triton", bytes=2 * act * hidden),
    ]
    if shape.embedding_multiplier != 1.0:
        out.insert(1, Kernel("embedding, scaled", "embedding", "torch", bytes=2 * act * hidden))
    for layer in range(shape.num_layers):
        out += _layer(model, machine, mode, layer)
    head = _product("LM head", model, hidden, shape.vocab_size / tp)
    out.append(dataclasses.replace(head, where="outside"))
    if shape.final_logit_softcapping is not None:  # to fp32, divided, tanh, multiplied, and back
        capped = Kernel("soft cap", "other", "torch", bytes=4 * act * shape.vocab_size / tp, where="outside")
        out += [capped] * 5
    out.append(Kernel("largest logit", "sampling", "torch", bytes=act * shape.vocab_size / tp, where="outside"))
    out.append(Kernel("token ids to the host", "copy", "copy", bytes=16 * batch, where="outside"))
    return out


def _layer(model: DecodeModel, machine: Machine, mode: str, layer: int) -> list[Kernel]:
    shape, tp, act = model.shape, model.tp, 2 * model.batch
    hidden, inner = shape.hidden_size, shape.intermediate_size / tp
    q = shape.num_heads * shape.head_size / tp
    kv = max(shape.num_kv_heads / tp, 1) * shape.head_size  # fewer KV heads than GPUs: each GPU keeps a copy
    sandwich = [Kernel("norm after the block", "norm", "triton", bytes=2 * act * hidden)] * shape.sandwich_norms
    out = [
        _product("q, k and v", model, hidden, q + 2 * kv),
        Kernel("rotation, cache write", "rope_cache", "triton", bytes=2 * act * (q + 2 * kv)),
        *_attention(model, machine, mode, q, kv, shape.layer_window(layer)),
        _product("attention output", model, q, hidden),
        *_exchange(model, machine),
        *sandwich,
        Kernel("norm before the MLP", "norm", "triton", bytes=5 * act * hidden),
        _product("gate and up", model, hidden, 2 * inner),
        Kernel("activation", "activation", "triton", bytes=3 * act * inner),
        _product("down", model, inner, hidden),
        *_exchange(model, machine),
        *sandwich,
        Kernel("norm before the next layer", "norm", "triton", bytes=5 * act * hidden),
    ]
    wanted = model.launches_per_layer
    for name in _FUSIBLE:
        if wanted is not None and len(out) > wanted:
            out = [kernel for kernel in out if kernel.name != name]
    missing = 0 if wanted is None else max(0, wanted - len(out))
    return out + [Kernel("a small operation", "other", "torch", bytes=2 * act * hidden)] * missing


def _product(name: str, model: DecodeModel, rows: float, columns: float) -> Kernel:
    weights = rows * columns * model.weight_bits / 8
    return Kernel(
        name, "gemm", "gemm", weights + 2 * model.batch * (rows + columns), 2 * model.batch * rows * columns
    )  # fmt: skip


def _attention(
    model: DecodeModel, machine: Machine, mode: str, q: float, kv: float, window: int | None
) -> list[Kernel]:
    tokens = model.batch * min(model.context, window or model.context)
    heads = kv / model.shape.head_size
    if model.backend == "TORCH_SDPA":
        gathered = model.max_model_len or model.context if mode == "FULL" else model.context
        moved = machine.sdpa_traffic * model.batch * gathered * 2 * kv * model.kv_bits / 8
        parts = SDPA_KERNELS + SDPA_COPIES
        kinds = [("attention", "torch")] * SDPA_KERNELS + [("copy", "copy")] * SDPA_COPIES
        return [
            Kernel(
                f"attention, part {i + 1}", role, kind, moved / parts, fixed_us=machine.sdpa_kernel_us,
                launch_us=machine.sdpa_layer_us / parts, where="attention",
            )
            for i, (role, kind) in enumerate(kinds)
        ]  # fmt: skip
    read = Kernel(
        "attention", "attention", "triton", tokens * 2 * kv * model.kv_bits / 8, 4 * tokens * q, where="attention"
    )
    # Too little to do for all multiprocessors: the context is split, and a second kernel merges.
    merged = model.batch * heads < machine.sms
    merge = Kernel("attention, merge", "attention", "triton", bytes=4 * model.batch * q, where="attention")
    return [read, merge] if merged else [read]


def _exchange(model: DecodeModel, machine: Machine) -> list[Kernel]:
    if model.tp == 1:
        return []
    size = 2 * model.batch * model.shape.hidden_size
    return [Kernel("all-reduce", "other", "torch", bytes=2 * size, fixed_us=machine.kernel_us + model.all_reduce_us)]


@dataclasses.dataclass(frozen=True)
class SimulatedStep:
    """One simulated step. waiting_us: WAITS → µs; they add up to the wall time of `timeline`.

    device_us: from the first launch to the end of the forward on the device, as events around it measure it.
    """

    model: DecodeModel
    machine: Machine
    mode: str
    cpu_factor: float
    timeline: StepTimeline
    waiting_us: dict[str, float]
    device_us: float

    kind = Kind.SIMULATED

    @property
    def wall_ms(self) -> float:
        return self.timeline.wall_us / 1e3

    @property
    def tok_s(self) -> float:
        """Tokens a second of all requests together."""
        return self.model.batch / self.wall_ms * 1e3

    @property
    def shares(self) -> dict[str, float]:
        """WAITS → share of the step, 0…1."""
        return {name: us / self.timeline.wall_us for name, us in self.waiting_us.items()}

    @property
    def longest_wait(self) -> str:
        """The largest part of the step."""
        return max(WAITS, key=lambda name: self.waiting_us[name])

    def as_dict(self) -> dict[str, Any]:
        """Results and every parameter they follow from."""
        return {
            "kind": str(self.kind), "mode": self.mode, "step_ms": round(self.wall_ms, 4),
            "device_us": round(self.device_us, 2), "launches": self.timeline.launches,
            "graph_launches": self.timeline.graph_launches, "tok_s": round(self.tok_s, 2),
            "waiting_us": {name: round(us, 2) for name, us in self.waiting_us.items()},
            "shares": {name: round(share, 4) for name, share in self.shares.items()},
            "parameters": {**self.model.as_dict(), "cpu_factor": self.cpu_factor, "machine": self.machine.as_dict()},
        }  # fmt: skip


def simulate_step(
    model: DecodeModel,
    machine: Machine = H200,
    *,
    mode: str = "FULL",
    cpu_factor: float = 1.0,
    depth: int = DEPTH,
    title: str = "",
) -> SimulatedStep:
    """One decode step in a graph mode: NONE, PIECEWISE (attention outside) or FULL.

    Args:
        machine: its constants, before `cpu_factor`. cpu_factor: how many times as fast the host is.

    Raises:
        ConfigError: a mode of another name, or a factor that is not above zero.
    """
    if mode not in MODES:
        raise ConfigError(f"mode={mode!r}", "a step runs in none of that name", did_you_mean(mode, MODES))
    now = machine.faster_host(cpu_factor)
    kernels = kernels_of(model, now, mode=mode)
    work, piece = [], 0
    for before, kernel in zip([None, *kernels], kernels, strict=False):
        if mode == "PIECEWISE" and before is not None and before.where != kernel.where:
            piece += 1
        inside = kernel.where == "piece" or (mode == "FULL" and kernel.where == "attention")
        launch = now.launch(kernel.kind) if kernel.launch_us is None else kernel.launch_us
        in_graph = piece if mode != "NONE" and inside else None
        work.append(Work(kernel.name, kernel.role, kernel.device_us(now), launch, in_graph))
    around = now.host_fixed_us + now.host_request_us * model.batch
    # Half of it comes before the forward (schedule, inputs), half after the token ids are there (commit, text).
    timeline = run_queue(
        work, graph_launch_us=now.launch_us.get("graph", 0.0), host_per_node_us=now.graph_node_us,
        host_before_us=around / 2, sync_us=now.sync_us, depth=depth, title=title or f"{model.shape.name}, {mode}",
    )  # fmt: skip
    end = timeline.wall_us
    if not math.isfinite(end):
        raise ConfigError(f"a step of {model.shape.name}", "takes longer than a number can say", "Give smaller times.")
    timeline = dataclasses.replace(
        timeline, spans=(*timeline.spans, Span("host", "commit, text", "other", end, end + around / 2)),
        wall_us=end + around / 2, mode=mode,
    )  # fmt: skip
    return SimulatedStep(model, machine, mode, cpu_factor, timeline, _waits(kernels, now, timeline, around / 2),
                         _forward_us(kernels, timeline, around / 2))  # fmt: skip


def _waits(kernels: list[Kernel], machine: Machine, timeline: StepTimeline, begin: float) -> dict[str, float]:
    data = arithmetic = fixed = 0.0
    for kernel in kernels:
        moving, computing = kernel.data_us(machine), kernel.arithmetic_us(machine)
        fixed += kernel.short_us(machine)
        if moving >= computing:
            data += moving
        else:
            arithmetic += computing
    done = max(span.end_us for span in timeline.device)
    instructions = max(0.0, done - begin - timeline.busy_us)
    return {
        "instructions": instructions, "data": data, "arithmetic": arithmetic, "kernels": fixed,
        "host": max(0.0, timeline.wall_us - instructions - data - arithmetic - fixed),
    }  # fmt: skip


def _forward_us(kernels: list[Kernel], timeline: StepTimeline, begin: float) -> float:
    forward = sum(kernel.where != "outside" for kernel in kernels)
    return timeline.device[forward - 1].end_us - begin
