"""The SIMULATED bill: a decode step computed from a model's shape, beside prices of preparing that the reader sets.

Refuses to know what a compile or a capture takes: nobody measured that for this source, so each is a control, and said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.config import CUDAGraphMode
from labkit.graphs.sizes import default_capture_sizes
from labkit.lab.ch11.outcome import outcome
from labkit.lab.ch11.ways import OPTIONS, find, num_graphs, picked
from labkit.lab.fields import Choice, Control, Number
from labkit.lab.runs import Context, Outcome, simulated
from labkit.models.shapes import SHAPES
from labkit.simulate.step import DecodeModel, simulate_step

MODELS = ("smollm2-135m", "qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b")
#: Launches of a layer whose small operations nobody fused by hand: an example, not a count.
PLAIN_LAUNCHES = 24
OPERATIONS = (("fused by hand, as in labkit", 0), (f"{PLAIN_LAUNCHES} launches a layer (example)", PLAIN_LAUNCHES))
KINDS_OF_PIECES = 3
CONTEXT = 512


class SimulatedBill:
    """What a configuration costs if a compile, a capture and a graph cost what the controls say."""

    kind, label = "SIMULATED", "the bill of a model"

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        way = picked(values)
        found: list[Control] = [
            Choice("way", "Configuration", OPTIONS, help="What the engine is started with."),
            Choice("model", "Model", [(f"{n} ({SHAPES[n].num_layers} layers)", n) for n in MODELS], help="Its shape."),
            Number("batch", "Batch", 1, 256, 1, points=tuple(2**i for i in range(9)), help="Requests in each step."),
            Number("tokens", "Tokens a request", 10, 2000, 200, step=10, help="That each request generates."),
            Choice("operations", "Small operations", OPERATIONS, help="How the model is written. A compiler fuses what "
                                                                      "nobody fused by hand."),
            Number("load_s", "Load the weights", 0, 120, 5, unit="s", help="Every configuration pays it."),
        ]  # fmt: skip
        if way.compiled:
            found += [
                Choice("cache", "Compile cache", [("cold: first start", "cold"), ("warm", "warm")],
                       help="Warm: an earlier start left the compiled code on disk."),
            ]  # fmt: skip
            if values.get("cache", "cold") == "cold":
                found.append(Number("compile_s", "Compile a kind", 1, 60, 10, unit="s",
                                    help="Of pieces: there are three, however many layers."))  # fmt: skip
        if way.mode is not CUDAGraphMode.NONE:
            found += [
                Number("up_to", "Largest size", 1, 512, 256, points=(1, 8, 32, 64, 128, 256, 512),
                       help="The default list of capture sizes, up to this one."),
                Number("capture_ms", "Capture a graph", 1, 200, 10, unit="ms", help="Recording it, once."),
                Number("graph_mib", "Graph's memory", 0.0, 20.0, 0.5, step=0.1, unit="MiB",
                       help="What stays for each recorded graph."),
            ]  # fmt: skip
        return found

    def cost(self, values: Mapping[str, Any]) -> str:
        return "Run computes it at once; nothing is started or measured."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        way = find(values["way"])
        said = [f"{way.label} asks for {way.said}."]
        if "up_to" in values:
            sizes = _sizes(values)
            graphs = num_graphs(way.mode, sizes, SHAPES[values["model"]].num_layers, max(sizes))
            said.append(f"{len(sizes)} sizes make {graphs:,} graphs to capture.")
        return [*said, "What a compile, a capture and a graph take is yours to set: these are no measurements."]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        way, shape = find(values["way"]), SHAPES[values["model"]]
        batch, mode = int(values["batch"]), way.mode
        sizes = _sizes(values) if mode is not CUDAGraphMode.NONE else ()
        ran = mode.decode_mode().name if sizes and batch <= max(sizes) else "NONE"
        graphs = num_graphs(mode, sizes, shape.num_layers, max(sizes)) if sizes else 0
        cold = way.compiled and values["cache"] == "cold"
        parts = {
            "load": float(values["load_s"]),
            "compile": KINDS_OF_PIECES * float(values["compile_s"]) if cold else 0.0,
            "capture": graphs * float(values["capture_ms"]) / 1e3 if graphs else 0.0,
        }
        launches = None if way.compiled or not values["operations"] else int(values["operations"])
        step = simulate_step(DecodeModel(shape, batch, CONTEXT, launches_per_layer=launches), mode=ran)
        mib = graphs * float(values["graph_mib"]) if graphs else 0.0
        asked = {key: value for key, value in values.items() if key not in ("way", "model", "batch", "tokens")}
        made = simulated("bill", shape=shape.name, batch=batch, context=CONTEXT, machine=step.machine.name, **asked)
        most = max(parts, key=lambda name: parts[name])
        words = {"load": "loading weights", "compile": "compiling", "capture": f"capturing {graphs:,} graphs"}
        why = f"Most of the start goes into {words[most]}; {_host(ran)}"
        notes = []
        if sizes and ran == "NONE":
            notes.append(f"Batch {batch} is above the largest size {max(sizes)}, so the step runs eagerly.")
        if way.compiled and not values["operations"]:
            notes.append("labkit's small operations are fused by hand, so the compiler saves no launch here; choose "
                         f"{PLAIN_LAUNCHES} launches a layer for a model that nobody fused.")  # fmt: skip
        return outcome(
            way=way.key, said=way.label, mode=ran, startup_s=sum(parts.values()), parts_s=parts, mib=mib,
            step_ms=step.wall_ms, looks=step.timeline.launches, batch=batch, tokens=int(values["tokens"]),
            model=shape.name, made=made, samples=(step.wall_ms,), why=why, notes=notes,
        )  # fmt: skip


def _sizes(values: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(default_capture_sizes(256, 8192, max_size=int(values["up_to"])))


def _host(mode: str) -> str:
    return {
        "NONE": "the host starts every kernel of a step by itself.",
        "PIECEWISE": "a step is a graph for each piece, with attention between them.",
        "FULL": "a step is one graph.",
    }[mode]
