"""The two SIMULATED sources of chapter 01: a queue of equal kernels, and a whole decode step of a model.

Refuses to know how runs are drawn. Every constant that is not a control is said beside the controls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.lab.fields import Choice, Control, Number
from labkit.lab.runs import Context, Outcome, simulated
from labkit.measure.provenance import Kind
from labkit.measure.spans import StepTimeline
from labkit.measure.stats import Measurement
from labkit.models.shapes import SHAPES
from labkit.simulate.queue import Work, run_queue
from labkit.simulate.step import H200, DecodeModel, simulate_step

EAGER, GRAPH = "one by one", "as one graph"
#: Shapes that fit one GPU, small ones first.
MODELS = ("smollm2-135m", "qwen3-0.6b", "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b")
HOSTS = (("as recorded", 1.0), ("twice as fast", 2.0), ("four times as fast", 4.0), ("half as fast", 0.5))
#: Host µs of a replay, and of each kernel in it: the constants that were fitted to the H200's recording.
REPLAY_US, NODE_US = H200.launch_us["graph"], H200.graph_node_us


class QueueSource:
    """Equal kernels, started one by one or as one graph."""

    kind, label = "SIMULATED", "launch queue"

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        found: list[Control] = [
            Number("kernels", "Kernels", 1, 400, 8, help="How many kernels one step has, all alike."),
            Number("kernel_us", "A kernel takes", 0.5, 200.0, 3.0, step=0.5, unit="µs",
                   help="How long the GPU runs one kernel."),
            Choice("way", "Started", [(EAGER, EAGER), (GRAPH, GRAPH)], help="By a launch for each kernel, or by one."),
        ]  # fmt: skip
        if values.get("way", EAGER) == EAGER:
            found.insert(2, Number("launch_us", "A launch takes", 0.5, 50.0, 6.0, step=0.5, unit="µs",
                                   help="How long the host needs to start one kernel."))  # fmt: skip
        return found

    def cost(self, values: Mapping[str, Any]) -> str:
        return "Run computes the queue at once; nothing is measured."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        if values["way"] == GRAPH:
            return [
                f"The host starts all {values['kernels']} kernels with one replay. It takes {REPLAY_US:.1f} µs, and "
                f"{NODE_US:.1f} µs more for each kernel in it: constants fitted to an H200's recording."
            ]
        return ["The host does not wait: it starts the next kernel while the GPU may still run the one before."]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        n, us, way = int(values["kernels"]), float(values["kernel_us"]), values["way"]
        launch = float(values.get("launch_us", 0.0))
        work = [Work(f"k{i + 1}", "gemm", us, launch) for i in range(n)]
        timeline = run_queue(
            work, graph=way == GRAPH, graph_launch_us=REPLAY_US, host_per_node_us=NODE_US, title=way
        )  # fmt: skip
        made = simulated("launch queue", kernels=n, kernel_us=us, launch_us=launch) if way == EAGER else simulated(
            "launch queue", kernels=n, kernel_us=us, replay_us=REPLAY_US, replay_us_per_kernel=NODE_US
        )  # fmt: skip
        parts = {"work": timeline.busy_us, "instructions": timeline.wall_us - timeline.busy_us}
        took = (
            f"{_kernels(n, us)} {way}: the step takes {timeline.wall_us:,.1f} µs, and for {parts['instructions']:,.1f} "
        )
        took += f"µs of it ({parts['instructions'] / timeline.wall_us:.0%}) the GPU is idle, because "
        slower = "device"
        if way == GRAPH:
            why = "it waits for the one replay; after that the kernels follow each other without the host."
        elif n == 1:
            why = "it waits for the one launch."
        elif launch > us:
            slower = "host"
            why = f"a launch ({launch:g} µs) takes longer than a kernel ({us:g} µs): the host is the slower side."
        else:
            why = (
                f"it waits for the first launch only: every other one is over before the kernel before it ends "
                f"({launch:g} µs of launch, {us:g} µs of kernel). The GPU is the slower side."
            )
        return _outcome(timeline, parts, took + why, made, what=f"{n} kernels, {way}", slower=slower)


class StepSource:
    """One decode step of a model, computed from its shape and the constants of an H200."""

    kind, label = "SIMULATED", "decode step of a model"

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        return [
            Choice("model", "Model", [(_sized(name), name) for name in MODELS], help="Its shape gives kernels and "
                                                                                     "bytes."),
            Number("batch", "Batch", 1, 512, 1, points=tuple(2**i for i in range(10)),
                   help="Requests that get one token each in this step."),
            Number("context", "Context", 128, 32768, 512, points=(128, 512, 2048, 8192, 32768), unit="tokens",
                   help="Tokens of each request that attention reads."),
            Choice("mode", "Started", [(EAGER, "NONE"), (GRAPH, "FULL")], help="By a launch for each kernel, or by "
                                                                               "one."),
            Choice("host", "Host", HOSTS, help="How fast the CPU is, against the one of the recording."),
        ]  # fmt: skip

    def cost(self, values: Mapping[str, Any]) -> str:
        return "Run computes the step at once; nothing is measured."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        said = "Constants are those of an H200, fitted to recorded steps of the two smallest models."
        return [said if values["model"] in MODELS[:2] else f"{said} Nobody compared this model with a measurement."]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        shape, batch, mode = SHAPES[values["model"]], int(values["batch"]), values["mode"]
        tokens, factor = int(values["context"]), float(values["host"])
        way = EAGER if mode == "NONE" else GRAPH
        step = simulate_step(
            DecodeModel(shape, batch, tokens), mode=mode, cpu_factor=factor, title=f"{shape.name}, {way}"
        )  # fmt: skip
        waits = step.waiting_us
        made = simulated("decode step", machine=step.machine.name, shape=shape.name, batch=batch, context=tokens,
                         mode=mode, host_factor=factor)  # fmt: skip
        most = max(waits, key=lambda name: waits[name])
        summary = (
            f"A decode step of {shape.name} at batch {batch} takes {step.wall_ms:,.2f} ms with "
            f"{step.timeline.launches} launches. It waits most for {_WORDS[most]}: {waits[most] / 1e3:,.2f} ms."
        )
        rest = [f"for {name} {waits[name] / 1e3:,.2f} ms" for name in ("instructions", "data") if name != most]
        summary += f" {' and '.join(rest).capitalize()}."
        slower = "host" if most in ("instructions", "host") else "device"
        return _outcome(step.timeline, dict(waits), summary, made, slower=slower,
                        what=f"{shape.name}, batch {batch}, {way}")  # fmt: skip


_WORDS = {
    "instructions": "instructions (launches)", "data": "data (weights and KV)", "arithmetic": "arithmetic",
    "kernels": "the fixed time that each kernel takes", "host": "the host around the forward pass",
}  # fmt: skip


def _outcome(
    timeline: StepTimeline, parts: Mapping[str, float], summary: str, made: Any, *, what: str, slower: str
) -> Outcome:
    data = {
        "timeline": timeline.as_dict(), "finish": [timeline.wall_us] * 2, "what": what,
        "parts": {name: float(us) for name, us in parts.items()},
    }  # fmt: skip
    values = {
        "what": what, "launches": timeline.launches, "step_us": timeline.wall_us, "slower": slower,
        "share": 100 * parts["instructions"] / timeline.wall_us, **{f"{name}_us": us for name, us in parts.items()},
    }  # fmt: skip
    return Outcome(data, values, summary, made, Measurement(Kind.SIMULATED, (timeline.wall_us / 1e3,)))


def _kernels(n: int, us: float) -> str:
    return f"{n} kernel{'s' * (n != 1)} of {us:g} µs"


def _sized(name: str) -> str:
    return f"{name} ({SHAPES[name].num_parameters() / 1e9:.2f} B parameters)"
