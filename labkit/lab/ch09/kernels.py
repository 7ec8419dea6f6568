"""Sources of kernel counts: what was recorded on a CPU, and this machine's own compiler. Refuses to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.lab.ch09.fusion import MATMUL, Fused, _kind, compile_pieces, recorded
from labkit.lab.fields import Choice, Control
from labkit.lab.runs import Context, Outcome
from labkit.measure.provenance import collect

#: What the panel opens on.
FIRST = "smollm2-135m"


class RecordedKernels:
    """Counts that ship with labkit."""

    kind, label = "RECORDED", "compiled on a CPU"

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        return [
            Choice("model", "Model", [(name, name) for name in recorded()], FIRST, help="Counts follow from layers.")
        ]

    def cost(self, values: Mapping[str, Any]) -> str:
        return "Run looks up what was counted. Nothing is compiled."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        return ["Inductor wrote C++ for these counts. On a GPU it writes Triton, and may cut kernels otherwise."]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        return outcome(recorded()[values["model"]])


class LiveKernels:
    """The compiler of this machine."""

    kind = "LIVE"

    def __init__(self, gpu: str = "") -> None:
        self.label = f"the compiler for {gpu or 'this CPU'}"

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        models = ("tiny-llama", "smollm2-135m", "qwen3-0.6b")
        return [Choice("model", "Model", [(name, name) for name in models], help="The smallest one is traced fastest.")]

    def cost(self, values: Mapping[str, Any]) -> str:
        return "Run traces and compiles: about a minute, or some 20 s when the cache has it. Stop acts afterwards."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        return ["The generated code is real, and `labkit split --code 1` prints it."]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        context.stage("compiling, or reading the cache", 0, 0)
        context.check()
        kinds, report = compile_pieces(
            values["model"], lambda stage, done, total, detail: context.stage(f"compiling {detail}", done, total)
        )
        fused = Fused(values["model"], tuple(map(_kind, kinds)), collect("LIVE", "panel 09, kernels", n=1))
        how = "read from the cache" if report.from_cache else "compiled"
        more = {"warm_s" if report.from_cache else "cold_s": report.total_ms / 1e3}
        return outcome(fused, more, (f"The code was {how} in {report.total_ms / 1e3:.1f} s.",))


def labels(fused: Fused) -> list[str]:
    """Each kind of pieces in words, with how many pieces share it."""
    names = ["before the first attention", "between two attentions", "after the last attention"]
    if len(fused.kinds) != len(names):
        names = [f"kind {i}" for i in range(len(fused.kinds))]
    return [f"{name} (× {kind.pieces})" for name, kind in zip(names, fused.kinds, strict=True)]


def outcome(fused: Fused, more: Mapping[str, float] | None = None, notes: Sequence[str] = ()) -> Outcome:
    """A run of the panel: counts by kind of pieces, and what is inside the kernels."""
    data = {
        "title": f"{fused.model}: {fused.pieces} pieces of {len(fused.kinds)} kinds", "labels": labels(fused),
        "before": [kind.before for kind in fused.kinds], "after": [kind.after for kind in fused.kinds],
    }  # fmt: skip
    products = sum(kind.pieces * sum(k == MATMUL for _, k in kind.ops) for kind in fused.kinds)
    values = {
        "what": fused.model, "pieces": fused.pieces, "kinds": len(fused.kinds), "kernels_before": fused.before,
        "kernels_after": fused.after, "products": products, **(more or {}),
    }  # fmt: skip
    summary = (
        f"{fused.model}: {fused.before:,} kernels operator by operator and {fused.after:,} after fusion, attention not "
        f"counted. {products:,} of them are matrix products on both sides: they come from a library, and take in "
        "nothing but an addition that the library knows (addmm). What goes away is the small operators between them."
    )
    inside = [
        f"Piece {label}: " + "; ".join(f"{kernel} = {' + '.join(ops)}" for kernel, ops, library in kind.kernels
                                       if not library) + "."
        for label, kind in zip(labels(fused), fused.kinds, strict=True)
    ]  # fmt: skip
    return Outcome(data, values, summary, fused.provenance, notes=(*notes, *inside))
