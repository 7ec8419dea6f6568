"""Chrome traces with known content, shaped like those of torch.profiler 2.11 and 2.13: for tests of timelines."""

from __future__ import annotations

from typing import Any

from labkit.measure.chrome import STEP

ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int, float)"
NVJET = "nvjet_tst_64x8_64x16_4x1_v_bz_TNT"
NORM, ATTENTION = "rms_norm_kernel", "paged_attention_kernel"
MAX = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MaxOps<float, long> > >(int)"
#: Microseconds of the trace's clock at which the step begins: torch counts from a base time of its own.
BASE = 4298563214.125


class TraceMaker:
    """Builds events call by call on a clock that starts at 0 with the step.

    A host call takes `host_us`; device work starts `gap_us` after its call began, or when the work before it has ended.
    """

    def __init__(self, *, annotated: bool = True, host_us: float = 5.0, gap_us: float = 4.0) -> None:
        self.events: list[dict[str, Any]] = []
        self.annotated, self.host_us, self.gap_us = annotated, host_us, gap_us
        self.host = 10.0
        self.device = 0.0
        self.correlation = 100

    def event(self, cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
        made = {
            "ph": "X", "cat": cat, "name": name, "pid": 7, "tid": 7, "ts": BASE + ts, "dur": dur, "args": args,
        }  # fmt: skip
        self.events.append(made)
        return made

    def call(self, name: str, category: str = "cuda_runtime", **args: Any) -> int:
        self.correlation += 1
        args.setdefault("correlation", self.correlation)
        self.event(category, name, self.host, self.host_us, cbid=211, **args)
        self.host += self.host_us + 1.0
        return self.correlation

    def work(self, name: str, us: float, correlation: int, cat: str = "kernel", begin: float | None = None) -> None:
        if begin is None:
            begin = max(self.device, self.host - self.host_us - 1.0 + self.gap_us)
        self.event(cat, name, begin, us, stream=7, device=0, correlation=correlation)
        self.device = max(self.device, begin + us)

    def launch(self, name: str, us: float, call: str = "cudaLaunchKernel", category: str = "cuda_runtime") -> None:
        self.work(name, us, self.call(call, category))

    def triton(self, name: str, us: float) -> None:
        self.launch(name, us, "cuLaunchKernelEx", "cuda_driver")

    def copy(self, us: float = 1.5) -> None:
        self.work("Memcpy HtoD (Pinned -> Device)", us, self.call("cudaMemcpyAsync"), "gpu_memcpy")

    def replay(self, *kernels: tuple[str, float], gap_us: float = 0.5) -> int:
        correlation = self.call("cudaGraphLaunch")
        begin = max(self.device, self.host - self.host_us - 1.0 + self.gap_us)
        for name, us in kernels:
            self.work(name, us, correlation, begin=begin)
            begin += us + gap_us
        return correlation

    def done(self) -> list[dict[str, Any]]:
        """The events, with what a trace holds besides: the step's annotation, a final wait, operators, metadata."""
        end = max(self.host, self.device)
        self.event("cuda_runtime", "cudaStreamSynchronize", end, 1.0, correlation=1)
        if self.annotated:
            self.event("user_annotation", STEP, 0.0, end + 2.0)
        self.event("gpu_user_annotation", STEP, 10.0, end - 10.0)
        self.event("cpu_op", "aten::add_", 11.0, 3.0)
        self.event("cuda_runtime", "cudaDeviceSynchronize", end + 3.0, 2.0, correlation=2)
        self.event("overhead", "Activity Buffer Request", -200.0, 2.0)
        self.event("Trace", "PyTorch Profiler (0)", -50.0, end + 80.0)
        self.events.append({"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}})
        self.events.append({"ph": "s", "id": 3, "cat": "ac2g", "name": "ac2g", "pid": 7, "tid": 7, "ts": BASE})
        return self.events


LAYER = ((NORM, 2.0), (NVJET, 6.0), ("rotary_kernel", 2.0), (ATTENTION, 5.0), (NVJET, 4.0))


def eager(layers: int = 3, **settings: Any) -> TraceMaker:
    """One step, kernel by kernel: a copy in, `layers` layers, the LM head, the choice of a token."""
    made = TraceMaker(**settings)
    made.copy()
    for _ in range(layers):
        for name, us in LAYER:
            if name == NVJET:
                made.launch(name, us, "cudaLaunchKernelExC")
            else:
                made.triton(name, us)
    made.launch(NVJET, 8.0)
    made.launch(MAX, 3.0)
    return made


def full(layers: int = 3, **settings: Any) -> TraceMaker:
    """The same step with its layers in one graph."""
    made = TraceMaker(**settings)
    made.copy()
    made.replay(*(LAYER * layers))
    made.launch(NVJET, 8.0)
    made.launch(MAX, 3.0)
    return made


def piecewise(layers: int = 3, **settings: Any) -> TraceMaker:
    """The same step with a graph for each stretch between attention calls, attention started one by one."""
    made = TraceMaker(**settings)
    made.copy()
    made.replay(*LAYER[:3])
    for layer in range(layers):
        made.triton(ATTENTION, 5.0)
        made.replay(LAYER[4], *(LAYER[:3] if layer + 1 < layers else ()))
    made.launch(NVJET, 8.0)
    made.launch(MAX, 3.0)
    return made
