"""The launch queue with many small kernels and with few larger ones, each started one by one and as one graph.

Refuses to know a compiler: what fusion leaves is a number that the reader sets. Constants are an H200's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.lab.ch09.matrix import BOTH, COMPILE, EAGER, GRAPH, Cell, outcome, winner
from labkit.lab.fields import Choice, Control, Number
from labkit.lab.runs import Context, Outcome, simulated
from labkit.models.shapes import SHAPES
from labkit.simulate.step import H200, DecodeModel, simulate_step

MODELS = ("llama-3.2-1b", "smollm2-135m", "qwen3-0.6b", "llama-3.2-3b", "llama-3.1-8b")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT = 512
#: Launches of a layer: plain operators of torch with attention; the engine's own kernels, or what fusion leaves.
PLAIN, FEW, LEAST = 36, 10, 6


class FusedQueue:
    """A decode step of a model, before and after fusion."""

    kind, label = "SIMULATED", "decode step, fused or not"

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        return [
            Choice("model", "Model", [(name, name) for name in MODELS], help="Its shape gives kernels and bytes."),
            Number("batch", "Batch", 1, 256, 1, points=BATCHES, help="Requests that get one token each in this step."),
            Number("before", "Launches per layer, eager", LEAST, 60, PLAIN,
                   help="Operator by operator a layer of Llama has 36, one of Qwen3 48; labkit's own kernels are 10."),
            Number("after", "Launches per layer, compiled", LEAST, 60, FEW,
                   help="What fusion leaves: matrix products and attention, and one kernel between two of them."),
        ]  # fmt: skip

    def cost(self, values: Mapping[str, Any]) -> str:
        return "Run computes the four steps at once; nothing is measured."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        m = H200
        said = [
            f"A launch costs the host {m.launch('torch'):.1f} µs (plain operator) to {m.launch('gemm'):.1f} µs (matrix "
            f"product), a kernel takes {m.kernel_us:.1f} µs and the time for its bytes at {m.copy_gb_s:,.0f} GB/s. A "
            f"replay costs {m.launch('graph'):.1f} µs and {m.graph_node_us:.1f} µs for each kernel in it. These "
            "constants were fitted to an H200's recording of the two smallest models; no step of another model, and no "
            "compiled one, was compared with a measurement."
        ]
        if values["after"] > values["before"]:
            said.append("More launches after fusion than before: a compiler that makes things worse.")
        return said

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        shape, batch = SHAPES[values["model"]], int(values["batch"])
        before, after = int(values["before"]), int(values["after"])
        cells, busy = {}, {}
        for form, per_layer, mode in (
            (EAGER, before, "NONE"), (GRAPH, before, "FULL"), (COMPILE, after, "NONE"), (BOTH, after, "FULL"),
        ):  # fmt: skip
            step = simulate_step(DecodeModel(shape, batch, CONTEXT, launches_per_layer=per_layer), mode=mode)
            cells[form] = Cell(step.wall_ms, step.timeline.launches)
            busy[form] = step.timeline.busy_us / 1e3
        made = simulated("decode step, fused or not", machine=H200.name, shape=shape.name, batch=batch, context=CONTEXT,
                         launches_per_layer=before, launches_per_layer_fused=after)  # fmt: skip
        first = winner(cells)
        why = (
            f" The graph takes the waiting away and leaves the kernels ({busy[GRAPH]:.2f} ms of them); fusion takes "
            f"kernels away ({busy[COMPILE]:.2f} ms are left) and leaves {cells[COMPILE].launches} launches."
        )
        more = {"busy_before_ms": busy[EAGER], "busy_after_ms": busy[COMPILE], "slower": first}
        return outcome(f"{shape.name}, batch {batch}", batch, cells, made, why=why, more=more)
