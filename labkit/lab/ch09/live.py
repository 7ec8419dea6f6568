"""The four forms measured here, taking turns on the engine that panels share. Refuses to know widgets.

On a CPU graphs are emulated and save nothing; the compiled code is real, in C++. The path on a GPU is the same and was
not run on one when it was written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.errors import LabkitError
from labkit.lab.ch09.matrix import BOTH, COMPILE, EAGER, FORMS, GRAPH, Cell, outcome
from labkit.lab.engine_room import EngineRoom, shared_room
from labkit.lab.fields import Choice, Control, Number
from labkit.lab.runs import Context, Outcome
from labkit.measure.provenance import collect
from labkit.measure.stats import summary

if TYPE_CHECKING:
    from labkit.engine.report import StepReport

#: Form → (compilation mode, graph mode).
_SWITCHES = {
    EAGER: ("NONE", "NONE"), GRAPH: ("NONE", "FULL_DECODE_ONLY"), COMPILE: ("VLLM_COMPILE", "NONE"),
    BOTH: ("VLLM_COMPILE", "FULL_DECODE_ONLY"),
}  # fmt: skip
TWO, FOUR = "eager and graph", "all four"
ROUNDS = 4
CPU = {"models": ("tiny-llama", "smollm2-135m"), "batches": (1, 2, 4, 8), "context": 64, "steps": 3, "warmup": 1}
GPU = {
    "models": ("smollm2-135m", "qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b"), "batches": (1, 8, 32, 128, 256),
    "context": 512, "steps": 15, "warmup": 5,
}  # fmt: skip


class LiveForms:
    """This machine's engine in two or four forms. gpu: its name, "" for the CPU."""

    kind = "LIVE"

    def __init__(self, gpu: str = "", room: EngineRoom | None = None) -> None:
        self.gpu, self.label = gpu, gpu or "this CPU"
        self.room = room or shared_room()
        self._limits: dict[str, Any] = GPU if gpu else CPU

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        models, batches = self._limits["models"], self._limits["batches"]
        forms = [(FOUR, FOUR), (TWO, TWO)] if self.gpu else [(TWO, TWO), (FOUR, FOUR)]
        return [
            Choice("model", "Model", [(name, name) for name in models], help="Random weights: times are those of any."),
            Number("batch", "Batch", batches[0], batches[-1], batches[0], points=batches, help="Requests per step."),
            Choice("forms", "Forms", forms, help="Compiling takes a while the first time; then the cache has it."),
        ]

    def cost(self, values: Mapping[str, Any]) -> str:
        steps = f"{ROUNDS * self._limits['steps']} steps of each form, taking turns"
        if values["forms"] == TWO:
            return f"Run measures {steps}: some seconds."
        report = (
            self.room.llm.compile_report if self.room.llm is not None and self.room.model == values["model"] else None
        )
        if report is not None:
            return f"Run measures {steps}: some seconds; the compiled code is loaded."
        return f"Run compiles first: about a minute, or some 10 s when the cache has it. Then it measures {steps}."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        if self.gpu:
            return ["The forms take turns, so that a drift of the machine meets all of them."]
        return [
            "Graphs are emulated on a CPU: the same buffers and the same padding, and nothing saved. The compiled code "
            "is real: Inductor writes C++ here. There is no launch to save, so what you see is fusion alone.",
            "The graph form may even be slower: TORCH_SDPA then gathers the longest context that is allowed, as it "
            "does in a graph on a GPU.",
        ]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        from labkit.bench.steps import measure_steps, rotations
        from labkit.measure.launches import LaunchCount

        limits, batch = self._limits, int(values["batch"])
        forms = FORMS if values["forms"] == FOUR else (EAGER, GRAPH)
        llm = self._prepare(values["model"], context)
        reports: dict[str, list[StepReport]] = {form: [] for form in forms}
        counted: dict[str, LaunchCount] = {}
        compiled = None
        for number, order in enumerate(rotations(forms, ROUNDS)):
            if number and context.should_stop():
                break
            for form in order:
                context.check()
                _switch(llm, form, context)
                compiled = compiled or llm.compile_report
                context.stage(f"measuring {form}", number, ROUNDS)
                found, launches = measure_steps(
                    llm, batch, limits["context"], steps=limits["steps"], warmup=limits["warmup"],
                    count=bool(self.gpu) and not number,
                )  # fmt: skip
                reports[form] += found
                counted.setdefault(form, launches)
        context.stage("reconfiguring", ROUNDS, ROUNDS)
        llm.reconfigure(compilation_mode="NONE")
        samples = {form: [report.wall_ms for report in found] for form, found in reports.items()}
        cells = {form: Cell(summary(ms).p50, counted[form].launches) for form, ms in samples.items()}
        made = collect("LIVE", "panel 09", order=f"{ROUNDS} rounds, each begun one form later", primed=True,
                       n=min(map(len, samples.values())), device="auto" if self.gpu else "cpu")  # fmt: skip
        more, notes = _compiled(compiled)
        why = "" if self.gpu else " The graph is emulated here and saves nothing; what compiling changes is real."
        return outcome(f"{values['model']}, batch {batch}", batch, cells, made, why=why, notes=tuple(notes), more=more,
                       stopped=context.should_stop(), emulated=not self.gpu)  # fmt: skip

    def _prepare(self, model: str, context: Context) -> Any:
        def progress(stage: str, done: int, total: int, detail: str) -> None:
            context.stage(f"{stage} {detail}", done, total)

        batches = self._limits["batches"]
        context.stage(f"loading {model}", 0, 0)
        return self.room.prepare(
            model, progress, enforce_eager=False, attention_backend=None, compilation_mode="NONE",
            cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=batches,
            max_cudagraph_capture_size=None, max_num_seqs=max(batches),
            max_num_batched_tokens=2 * max(batches), max_model_len=4 * self._limits["context"],
            num_gpu_blocks_override=None,
        )  # fmt: skip


def _switch(llm: Any, form: str, context: Context) -> None:
    compile_mode, graph_mode = _SWITCHES[form]
    if compile_mode != "NONE" and llm.compile_report is None:
        context.stage("compiling, or reading the cache", 0, 0)
    llm.reconfigure(compilation_mode=compile_mode, cudagraph_mode=graph_mode)
    if (llm.config.compilation_mode or "NONE") != compile_mode:
        why = llm.notes[-1] if llm.notes else "the engine does not compile here"
        raise LabkitError(f"the form {form!r}", why, f"Take the forms {TWO!r}.")


def _compiled(report: Any) -> tuple[dict[str, Any], list[str]]:
    """Kernels before and after fusion, and seconds, of a `CompileReport`."""
    if report is None:
        return {}, []
    before = sum(c.pieces * c.kernels_before for c in report.classes)
    after = sum(c.pieces * c.kernels_after for c in report.classes)
    name, how = ("warm_s", "read from the cache") if report.from_cache else ("cold_s", "traced and compiled")
    note = (
        f"{report.pieces} pieces of {len(report.classes)} kinds were {how} in {report.total_ms / 1e3:.1f} s: "
        f"{before} kernels operator by operator, {after} after fusion (attention not counted)."
    )
    return {name: report.total_ms / 1e3, "kernels_before": before, "kernels_after": after}, [note]
