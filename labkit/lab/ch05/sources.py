"""Who answers a selection: labkit's rules for any machine of the table, or this machine's own libraries.

Refuses to draw. The rules are exact, and still SIMULATED: no such GPU was asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.attention import registry
from labkit.attention.interface import Availability, Platform
from labkit.attention.selector import Candidate
from labkit.config import ATTENTION_BACKENDS, CUDAGraphMode
from labkit.lab.ch05.question import (
    AUTO,
    LIMITS,
    OPTIONS,
    OWN_PAGE,
    Answer,
    ask,
    lines,
    machine_name,
    matrix,
    platform_of,
)  # fmt: skip
from labkit.lab.fields import Choice, Control, Toggle
from labkit.lab.runs import Context, Outcome, simulated
from labkit.measure.provenance import Provenance, collect

RULES = "rules of labkit"
_NOT_THERE = "ModuleNotFoundError: assumed missing in this panel"
#: What is assumed to be installed → the backends that then do not load.
INSTALLED: dict[str, tuple[str, ...]] = {
    "everything": (), "torch and Triton": ("FLASH_ATTN", "FLASHINFER", "XFORMERS"),
    "torch without Triton": ("FLASH_ATTN", "FLASHINFER", "XFORMERS", "TRITON_ATTN", "FLEX_ATTENTION"),
}  # fmt: skip
HEADS = (32, 64, 72, 80, 96, 128, 192, 256, 512)
_OPTION_WORDS = {
    "none": "none", "4 splits": "num_splits = 4", "two calls": "split_mixed_batches", "batch-invariant":
    "batch_invariant", "FA2": "flash_attn_version = 2", "FA3": "flash_attn_version = 3", "FA4": "flash_attn_version = "
    "4",
}  # fmt: skip


def model_controls() -> list[Control]:
    """What can be asked on any machine."""
    pages = [("each backend's own", OWN_PAGE), *((f"{n} tokens", n) for n in (1, 16, 24, 64, 256))]
    return [
        Choice("dtype", "Data type", [(name, name) for name in ("bfloat16", "float16", "float32")],
               help="Of weights, queries, keys and values."),
        Choice("head", "Head size", [(str(n), n) for n in HEADS], 128, help="Numbers in one head of a query or a key."),
        Choice("family", "Attention", [("MHA, GQA", "MHA"), ("MLA (DeepSeek)", "MLA")],
               help="MLA keeps one compressed row per token in place of keys and values, and needs other kernels."),
        Choice("kv", "KV cache", [("as the data type", "auto"), ("fp8", "fp8_e4m3")], help="How K and V are stored."),
        Choice("page", "Page size", pages, help="Tokens in a page of the KV cache, or what each backend prefers."),
        Toggle("window", "Sliding window", help="The model looks at the last 1,024 tokens only."),
        Toggle("cap", "Soft cap", help="The model bounds its scores by 30 · tanh(score / 30)."),
        Toggle("sinks", "Sinks", help="The model has a learned score that takes attention away from all tokens."),
        Choice("option", "Option", [(_OPTION_WORDS[name], name) for name in OPTIONS], "none",
               help="A wish of the user that not every backend can grant."),
        Choice("limits", "Limits", [(f"{a} requests × {b:,} tokens", name) for name, (a, b) in LIMITS.items()], "large",
               help="max_num_seqs × max_model_len: a tier may depend on the widest batch."),
        Choice("requested", "Backend", [(AUTO, AUTO), *((n, n) for n in ATTENTION_BACKENDS)],
               help="attention_backend: the first that can serve, or one by name."),
        Choice("mode", "Graph mode", [(m.name, m.name) for m in CUDAGraphMode], "FULL_AND_PIECEWISE",
               help="cudagraph_mode that is asked for; the tier decides what is left of it."),
        Toggle("compiled", "Compiled in pieces", help="compilation_mode VLLM_COMPILE: the model is cut at attention."),
    ]  # fmt: skip


class RulesSource:
    """Any machine of the table, with any set of libraries: a pure function."""

    kind, label = "SIMULATED", RULES

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        machines = [(machine_name(platform_of(name)), name) for name in (*registry.GPUS, "cpu")]
        return [
            Choice("gpu", "Machine", machines, "H200", help="A GPU that need not be here, or a CPU."),
            *model_controls(),
            Choice("installed", "Installed", [(name, name) for name in INSTALLED],
                   help="Which libraries are assumed to load there."),
        ]  # fmt: skip

    def cost(self, values: Mapping[str, Any]) -> str:
        return "Run asks the selector; it answers at once, for a GPU that need not be here."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        order = registry.priority(platform_of(values["gpu"]))
        out = [f"Tried on {machine_name(platform_of(values['gpu']))}, in this order: {', '.join(order)}."]
        if values["requested"] != AUTO:
            out.append(f"{values['requested']} is asked for by name, so that the order does not matter.")
        return out

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        gone = INSTALLED[values["installed"]]
        available = {name: Availability(False, _NOT_THERE) for name in gone} or None
        given = {k: values[k] for k in ("gpu", "dtype", "head", "option", "installed")}
        return outcome(values, platform_of(values["gpu"]), available, simulated(RULES, **given))


class HereSource:
    """This machine, with what loads in this process."""

    kind = "LIVE"

    def __init__(self, gpu: str = "") -> None:
        self.label = gpu or "this CPU"

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        return model_controls()

    def cost(self, values: Mapping[str, Any]) -> str:
        return "Run imports and probes every library here; the first time takes some seconds, then it is known."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        return [
            "A library that is found may still not work, so each is imported, and on a GPU it attends to something."
        ]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        from labkit.llm import find_backends, find_device

        context.stage("loading torch", 0, 0)
        platform = find_device()[1]
        found = find_backends(platform)
        known: dict[str, Availability] = {}
        for done, name in enumerate(registry.BACKENDS):
            context.check()
            context.stage(f"loading {name}", done, len(registry.BACKENDS))
            known[name] = found[name]
        device = "cpu" if platform.device_type == "cpu" else "auto"
        return outcome(values, platform, known, collect("LIVE", "panel 05", n=1, device=device))


def outcome(
    values: Mapping[str, Any], platform: Platform, available: Mapping[str, Availability] | None, made: Provenance
) -> Outcome:
    """The selector's answer as a run of the panel."""
    answer = ask(values, platform, available)
    taken = answer.taken
    asked = f"{values['dtype']} with head size {values['head']}"
    name = machine_name(platform)
    data = {**matrix(values, answer, available), "title": f"{name}, {asked}: {taken.name if taken else 'refused'}"}
    refusing = sum(not c.usable for c in answer.found)
    row = {
        "machine": name, "asked": asked, "backend": taken.name if taken else "refused",
        "place": taken.order if taken else None, "refusing": refusing, "tier": taken.tier.name if taken else None,
        "mode": answer.mode or None, "names": [c.name for c in answer.found if c.usable],
    }  # fmt: skip
    notes = [
        *lines(answer),
        *(f"Mode: {line.rstrip('.')}." for line in answer.trail),
        *registry.platform_notes(platform),
    ]
    return Outcome(data, row, summary(name, asked, answer), made, None, tuple(notes))


def summary(machine: str, asked: str, answer: Answer) -> str:
    """What was taken, and why not those before it."""
    taken = answer.taken
    if taken is None and answer.requested is not None:
        mine = next(c for c in answer.found if c.name == answer.requested)
        return (
            f"{mine.name} was asked for by name and cannot serve {asked} on {machine}: it {mine.reasons[0].condition}. "
            "Nothing takes its place: the engine is not built, and says why."
        )
    if taken is None:
        return f"On {machine} nobody can serve {asked}: {_why(answer.refused)}. The engine is not built, and says why."
    if answer.requested is not None:
        first = f"On {machine}, {taken.name} was asked for by name and can serve {asked}."
    elif answer.refused:
        first = f"On {machine}, {asked} gets {taken.name}, number {taken.order} in the order: {_why(answer.refused)}."
    else:
        first = f"On {machine}, {asked} gets {taken.name}: it is tried first, and nothing speaks against it."
    if answer.mode == "refused":
        return f"{first} Its tier is {taken.tier.name}, so that the mode asked for is refused."
    return f"{first} Its tier is {taken.tier.name}, so that the engine runs {answer.mode}."


def _why(refused: Sequence[Candidate]) -> str:
    """The first reason of each, backends with the same one together."""
    groups: dict[str, list[str]] = {}
    for one in refused:
        groups.setdefault(one.reasons[0].condition, []).append(one.name)
    return "; ".join(
        f"{' and '.join(names)} refuse{'s' * (len(names) == 1)} ({condition})" for condition, names in groups.items()
    )
