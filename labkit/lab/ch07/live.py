"""The engine's own step without and with its graph, measured here in turns. Refuses to know widgets.

On a CPU the graph is the emulation: the same dispatch, padding and buffers, and no launch saved. On a GPU the capture
is a real one, launches are counted in a trace, and both timelines are taken with the profiler; that part was never run
on one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.errors import LabkitError
from labkit.lab.ch07.pair import Step, outcome
from labkit.lab.engine_room import EngineRoom, shared_room
from labkit.lab.fields import Choice, Control, Number
from labkit.lab.machine import has_default_model
from labkit.lab.runs import Context, Outcome
from labkit.measure.provenance import collect
from labkit.measure.stats import summary

if TYPE_CHECKING:
    from labkit.engine.report import StepReport

TINY = "tiny-llama"
CONTEXT = {"cpu": 64, "cuda": 512}
#: Captured beside the batch itself, where all are asked for.
SIZES = {"cpu": (1, 2, 4, 8), "cuda": (1, 2, 4, 8, 16, 32, 64, 128, 256)}
ONE, ALL = "this batch only", "every size of a short list"
#: Turns of each way in the order A B B A; steps of a turn, warm-up steps before it, seconds after which none is begun.
TURNS = ("NONE", "FULL", "FULL", "NONE")
STEPS = {"cpu": 4, "cuda": 25}
WARM, BUDGET_S = 1, 4.0
UNPAID = "Nothing was captured, so that there is nothing to pay for."


class LivePair:
    """The engine that the panels of this notebook share."""

    kind = "LIVE"

    def __init__(self, gpu: str, room: EngineRoom | None = None) -> None:
        self.gpu, self.room = gpu, room or shared_room()
        self.device = "cuda" if gpu else "cpu"
        self.label = gpu or "this CPU"

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        names = [TINY, *(["smollm2-135m-instruct"] if has_default_model() else ["smollm2-135m"])]
        default = self.room.model if self.room.model in names else names[-1 if self.gpu else 0]
        return [
            Choice("model", "Model", [(name, name) for name in names], default, help="tiny-llama has random weights."),
            Number("batch", "Batch", 1, max(SIZES[self.device]), 1, help="Requests per step, and size of the graph."),
            Choice("captured", "Captured", [(ONE, ONE), (ALL, ALL)], help="Every size is a capture of its own."),
        ]  # fmt: skip

    def cost(self, values: Mapping[str, Any]) -> str:
        load = "" if self.room.llm is not None and self.room.model == values["model"] else "loads the model, "
        graphs = len(self._sizes(values))
        many = f"{graphs} graph{'s' * (graphs != 1)}"
        return f"Run {load}captures {many} and measures both ways in turns: some seconds."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        sizes = ", ".join(map(str, self._sizes(values)))
        said = [f"Captured sizes: {sizes}. Then eager steps and replays take turns, A B B A."]
        if not self.gpu:
            said.append("A CPU has no CUDA graphs. This one is emulated: same rules, nothing saved.")
        return said

    def _sizes(self, values: Mapping[str, Any]) -> list[int]:
        batch = int(values["batch"])
        return sorted({batch, *(SIZES[self.device] if values["captured"] == ALL else ())})

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        batch, length = int(values["batch"]), CONTEXT[self.device]
        llm, records = self._prepare(values, context, length)
        context.check()
        reports: dict[str, list[StepReport]] = {"NONE": [], "FULL": []}
        begin, stopped = time.perf_counter(), False
        notes: list[str] = []
        for turn, mode in enumerate(TURNS):
            enough = all(reports.values())
            stopped = context.should_stop()
            if enough and (stopped or time.perf_counter() - begin > BUDGET_S):
                break
            context.check()
            context.stage(f"measuring, mode {mode}", turn, len(TURNS))
            llm.reconfigure(cudagraph_mode=mode)
            reports[mode] += _steps(llm, batch, length, STEPS[self.device])
        launches = {"NONE": None, "FULL": None}
        timelines = {"NONE": None, "FULL": None}
        if self.gpu and not stopped:
            launches, timelines, notes = self._traced(llm, batch, length, context)
        llm.reconfigure(cudagraph_mode="FULL")
        eager, graph = (_step(reports[mode], launches[mode], timelines[mode]) for mode in ("NONE", "FULL"))
        made = collect("LIVE", "panel 07", order="eager and graph in turns, A B B A",
                       n=min(map(len, reports.values())), primed=True, device=self.device)  # fmt: skip
        capture_ms, mib = sum(r.ms for r in records), sum(r.mib for r in records)
        emulated = bool(reports["FULL"][-1].emulated)
        return outcome(
            f"{values['model']}, batch {batch}", eager, graph, None if emulated else capture_ms, made,
            _why(emulated, len(records), mib), notes=notes, stopped=stopped, unpaid=UNPAID if emulated else "",
            values={"mib": None if emulated else mib, "captured": len(records)},
        )  # fmt: skip

    def _prepare(self, values: Mapping[str, Any], context: Context, length: int) -> tuple[Any, list[Any]]:
        """The engine with the graphs that were asked for, and what capturing each of them took."""

        def progress(stage: str, done: int, total: int, detail: str) -> None:
            context.stage(f"{stage} {detail}".strip(), done, total)

        batch = int(values["batch"])
        seqs = max(batch, 8)
        blocks = {} if self.gpu else {"num_gpu_blocks_override": 200}
        llm = self.room.prepare(
            values["model"], progress, max_num_seqs=seqs, max_num_batched_tokens=max(512, seqs),
            max_model_len=1024 if self.gpu else 256, attention_backend=None, compilation_mode="NONE",
            cudagraph_mode="FULL", cudagraph_capture_sizes=tuple(self._sizes(values)), **blocks,
        )  # fmt: skip
        return llm, list(llm.capture_records)

    def _traced(
        self, llm: Any, batch: int, length: int, context: Context
    ) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        """Launches of a step and its timeline, for both ways. Only on a GPU."""
        from labkit.bench.timeline import take_timeline

        launches: dict[str, Any] = {"NONE": None, "FULL": None}
        timelines: dict[str, Any] = {"NONE": None, "FULL": None}
        notes = []
        for mode in ("NONE", "FULL"):
            context.stage(f"counting launches, mode {mode}", 0, 0)
            llm.reconfigure(cudagraph_mode=mode)
            launches[mode] = llm.count_launches(batch, length).launches
            try:
                found = take_timeline(llm, batch, length, eager=timelines["NONE"], rounds=3)
                timelines[mode] = None if found.problems else found
                notes += [f"No timeline: {found.problems[0]}"] if found.problems else []
            except LabkitError as error:
                notes.append(f"No timeline: {error}")
            finally:
                llm.reset()
        return launches, timelines, notes


def _steps(llm: Any, batch: int, context: int, steps: int) -> list[Any]:
    """Reports of decode steps after a warm-up one; all requests are gone afterwards."""
    llm.reset()
    try:
        llm.prime(batch, context, WARM + steps + 1)
        for _ in range(WARM):
            llm.step()
        return [llm.step() for _ in range(steps)]
    finally:
        llm.reset()


def _step(reports: Sequence[Any], launches: int | None, timeline: Any) -> Step:
    samples = [report.wall_ms for report in reports]
    names = {name for report in reports for name in report.phases_us}
    phases = {name: statistics.median(report.phases_us.get(name, 0.0) for report in reports) for name in names}
    return Step(summary(samples).p50, samples, launches, phases, timeline)


def _why(emulated: bool, graphs: int, mib: float) -> str:
    many = f"{graphs} size{'s' * (graphs != 1)}"
    if emulated:
        return (
            f"The graph is emulated ({many}): on a CPU a call runs its kernel itself, so that there is no launch to "
            "save, and whatever differs is noise, the lower curve too."
        )
    return f"One graph of each of {many} was captured, {mib:,.1f} MiB in all; the kernels of a replay are the same."
