"""`labkit simulate`: one decode step computed from a model's shape and a machine's constants. Refuses to measure."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from labkit.cli.answer import Answer, Console, table
from labkit.cli.options import Parser, one_of, real, whole
from labkit.models.shapes import DEFAULT_MODEL, SHAPES
from labkit.simulate.step import BACKENDS, H200, MODES, WAIT_WORDS, DecodeModel, simulate_step

MODEL = "llama-3.1-8b"


def simulate_options(parser: Parser) -> None:
    names = (DEFAULT_MODEL, *SHAPES)
    parser.add_argument("--model", type=one_of(names), metavar="MODEL", help=f"a named shape (default {MODEL})")
    parser.add_argument("--batch", type=whole(1), metavar="N", help="requests per step (default 1)")
    parser.add_argument("--context", type=whole(1), metavar="N", help="tokens of KV per request (default 512)")
    parser.add_argument("--mode", type=one_of((*MODES, "all")), metavar="MODE",
                        help=f"one of {', '.join(MODES)}, or all (default all)")  # fmt: skip
    parser.add_argument("--attention-backend", type=one_of(BACKENDS), metavar="NAME",
                        help=f"one of {', '.join(BACKENDS)} (default {BACKENDS[0]})")  # fmt: skip
    parser.add_argument("--weight-bits", type=real, metavar="BITS", help="bits per weight, 4 for INT4 (default 16)")
    parser.add_argument("--kv-bits", type=real, metavar="BITS", help="bits per element of K and V (default 16)")
    parser.add_argument("--tp", type=whole(1), metavar="N", help="GPUs that share every matrix (default 1)")
    parser.add_argument("--all-reduce-us", type=real, metavar="US",
                        help="time of one exchange between GPUs, two per layer (default 0: not measured)")  # fmt: skip
    parser.add_argument("--launches-per-layer", type=whole(1), metavar="N",
                        help="kernels per layer (default: the engine's own)")  # fmt: skip
    machine = parser.add_argument_group("the machine (defaults: an H200's, from the shipped recording)")
    machine.add_argument("--gb-s", type=real, metavar="GB/S", help=f"copy bandwidth (default {H200.copy_gb_s:g})")
    machine.add_argument("--tflops", type=real, metavar="N",
                         help=f"dense bf16 matrix rate (default {H200.tflops:g}, from the data sheet)")  # fmt: skip
    machine.add_argument("--kernel-us", type=real, metavar="US",
                         help=f"what every kernel takes at least (default {H200.kernel_us:g})")  # fmt: skip
    machine.add_argument("--launch-us", type=real, metavar="US", help="host time of one launch, for every kind")
    machine.add_argument("--cpu-factor", type=real, metavar="X", help="how many times as fast the host is (default 1)")


#: Option → field of DecodeModel.
_QUESTION = {
    "batch": "batch", "context": "context", "attention_backend": "backend", "weight_bits": "weight_bits",
    "kv_bits": "kv_bits", "tp": "tp", "all_reduce_us": "all_reduce_us", "launches_per_layer": "launches_per_layer",
}  # fmt: skip


def simulate(args: argparse.Namespace, console: Console) -> Answer:
    """The step in each mode, what it waits for, and every parameter that this follows from."""
    given = vars(args)
    name = given.get("model", MODEL)
    shape = SHAPES["smollm2-135m" if name == DEFAULT_MODEL else name]
    model = DecodeModel(shape, **{field: given[option] for option, field in _QUESTION.items() if option in given})
    changes: dict[str, Any] = {
        field: given[option]
        for option, field in (("gb_s", "copy_gb_s"), ("tflops", "tflops"), ("kernel_us", "kernel_us"))
        if option in given
    }  # fmt: skip
    if "launch_us" in given:
        changes |= {"launch_us": dict.fromkeys(H200.launch_us, given["launch_us"]), "launch_factor": 1.0}
    machine = dataclasses.replace(H200, **changes)
    asked = given.get("mode", "all")
    modes = MODES if asked == "all" else (asked,)
    steps = [simulate_step(model, machine, mode=mode, cpu_factor=given.get("cpu_factor", 1.0)) for mode in modes]
    notes = _notes(model, modes)
    wall = {step.mode: step.wall_ms for step in steps}
    if wall.get("FULL", 0.0) > wall.get("NONE", float("inf")):
        notes.append(
            "FULL above NONE: kernels hide their launches here, and a replay's kernels are taken to start when "
            "launching it is over. No recording has shown or refuted that."
        )
    # The parameters once: they are the same in every mode.
    parameters = steps[0].as_dict()["parameters"]
    data = {
        "kind": "SIMULATED", "parameters": parameters, "notes": notes,
        "steps": [{k: v for k, v in step.as_dict().items() if k != "parameters"} for step in steps],
    }  # fmt: skip
    rows = [("mode", "step ms", "tokens/s", "launches", *WAIT_WORDS)]
    rows += [
        (
            step.mode, f"{step.wall_ms:.2f}", f"{step.tok_s:,.0f}", str(step.timeline.launches),
            *(f"{step.shares[wait]:.0%}" for wait in WAIT_WORDS),
        ) for step in steps
    ]  # fmt: skip
    words = "\n".join(f"  {text}" for text in WAIT_WORDS.values())
    listed = "\n".join(f"  {key} = {_plain(value)}" for key, value in {**parameters, **parameters["machine"]}.items()
                       if key not in ("machine", "name") and value is not None)  # fmt: skip
    head = f"SIMULATED: one decode step of {shape.name}, computed, not measured."
    lines = [head, "", table(rows), "", "shares of the step, waiting for", words, "", "parameters", listed]
    return Answer(data, "\n".join([*lines, *(["", *notes] if notes else [])]))


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v:g}" for k, v in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


def _notes(model: DecodeModel, modes: tuple[str, ...]) -> list[str]:
    out = []
    if model.tp > 1 and not model.all_reduce_us:
        out.append("The exchange between GPUs was not measured and counts as 0 (--all-reduce-us): a lower bound.")
    if model.weight_bits < 16:
        out.append("Unpacking the weights is left out: a lower bound.")
    if "PIECEWISE" in modes:
        out.append("PIECEWISE has not been compared with a measurement.")
    if model.shape.name not in ("smollm2-135m", "qwen3-0.6b"):
        out.append("The model of a step was compared with recordings of smollm2-135m and qwen3-0.6b only.")
    return out
