"""The SIMULATED sources of chapter 07: a queue of equal kernels and a model's step, each without and with a graph.

Refuses to guess what a capture takes: that is a control.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.lab.ch07.pair import Step, outcome
from labkit.lab.fields import Choice, Control, Number
from labkit.lab.runs import Context, Outcome, simulated
from labkit.measure.spans import StepTimeline
from labkit.models.shapes import SHAPES
from labkit.simulate.queue import Work, run_queue
from labkit.simulate.step import H200, DecodeModel, simulate_step

#: Host µs of a replay, and of each kernel in it: the constants that were fitted to the H200's recording.
REPLAY_US, NODE_US = H200.launch_us["graph"], H200.graph_node_us
MODELS = ("smollm2-135m", "qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b")


def _capture_control() -> Number:
    return Number("capture_ms", "Capture", 1, 5000, 100, unit="ms",
                  help="Paid once, before the first step. A “what if”: nothing here is measured.")  # fmt: skip


class QueuePair:
    """Equal kernels, started one by one and as one graph."""

    kind, label = "SIMULATED", "launch queue"

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        return [
            Number("kernels", "Kernels", 1, 400, 8, help="How many kernels one step has, all alike."),
            Number("kernel_us", "Kernel, GPU", 0.5, 200.0, 3.0, step=0.5, unit="µs",
                   help="How long the GPU runs one kernel."),
            Number("launch_us", "Launch, host", 0.5, 50.0, 6.0, step=0.5, unit="µs",
                   help="How long the host needs to start one kernel."),
            _capture_control(),
        ]  # fmt: skip

    def cost(self, values: Mapping[str, Any]) -> str:
        return "Run computes both steps at once; nothing is measured."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        return [
            f"Run computes the step twice: {values['kernels']} launches, and one replay. A replay takes the host "
            f"{REPLAY_US:.1f} µs and {NODE_US:.1f} µs more for each kernel in it: fitted to an H200's recording."
        ]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        n, us, launch = int(values["kernels"]), float(values["kernel_us"]), float(values["launch_us"])
        work = [Work(f"k{i + 1}", "gemm", us, launch) for i in range(n)]
        eager = run_queue(work, title="eager")
        graph = run_queue(work, graph=True, graph_launch_us=REPLAY_US, host_per_node_us=NODE_US, title="graph")
        made = simulated("launch queue", kernels=n, kernel_us=us, launch_us=launch, replay_us=REPLAY_US,
                         replay_us_per_kernel=NODE_US, capture_ms=values["capture_ms"])  # fmt: skip
        idle = [t.idle_us for t in (eager, graph)]
        if graph.wall_us >= eager.wall_us:
            why = "The graph saves nothing: launches were hidden behind the kernels, and the replay itself takes time."
        else:
            why = (
                f"The kernels are the same; the GPU waits for instructions {idle[0]:,.1f} µs before and "
                f"{idle[1]:,.1f} µs now."
            )
        return outcome(f"{n} kernels of {us:g} µs", _computed(eager), _computed(graph), float(values["capture_ms"]),
                       made, why)  # fmt: skip


class StepPair:
    """One decode step of a model, computed from its shape and the constants of an H200."""

    kind, label = "SIMULATED", "decode step of a model"

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        return [
            Choice("model", "Model", [(_sized(name), name) for name in MODELS],
                   help="Its shape decides kernels and bytes."),
            Number("batch", "Batch", 1, 256, 1, help="Requests per step."),
            Choice("host", "Host", [("as recorded", 1.0), ("twice as fast", 2.0), ("half as fast", 0.5)],
                   help="Against the host of the recording."),
            _capture_control(),
        ]  # fmt: skip

    def cost(self, values: Mapping[str, Any]) -> str:
        return "Run computes both steps at once; nothing is measured."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        return ["Constants were fitted to recorded steps of the smallest model; larger models are a “what if”."]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        model = DecodeModel(SHAPES[values["model"]], batch=int(values["batch"]))
        found = {m: simulate_step(model, H200, mode=m, cpu_factor=values["host"], title=title)
                 for m, title in (("NONE", "eager"), ("FULL", "graph"))}  # fmt: skip
        eager, graph = found["NONE"], found["FULL"]
        made = simulated("decode step", model=values["model"], batch=model.batch, host_factor=values["host"],
                         capture_ms=values["capture_ms"])  # fmt: skip
        gone = eager.waiting_us["instructions"] - graph.waiting_us["instructions"]
        why = (
            f"The kernels are the same. Of waiting for instructions {gone / 1e3:,.2f} ms are gone"
            + (": every kernel hides the launch of the next one, so that there was little to gain." if gone < 50 else
               ". The launches that are left are the graph and what runs behind it: LM head and choice of tokens.")
        )  # fmt: skip
        return outcome(f"{values['model']}, batch {model.batch}", _computed(eager.timeline), _computed(graph.timeline),
                       float(values["capture_ms"]), made, why)  # fmt: skip


def _sized(name: str) -> str:
    return f"{name} ({SHAPES[name].num_parameters() / 1e9:.2f} B parameters)"


def _computed(timeline: StepTimeline) -> Step:
    ms = timeline.wall_us / 1e3
    return Step(ms, (ms,), timeline.launches, timeline=timeline)
