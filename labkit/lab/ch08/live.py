"""A list of sizes captured by the engine of this notebook, and steps of some traffic in it. Refuses to know widgets.

On a CPU graphs are emulated: sizes and padding are counted as with real ones, what capturing takes means nothing. On
a GPU the captures are real; that was never run on one.
"""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.graphs.advisor import TRAFFIC, powers_of_two
from labkit.graphs.padding import PaddingReport
from labkit.graphs.sizes import default_capture_sizes
from labkit.lab.ch08.lists import CUSTOM, DEFAULT, POWERS, some_sizes
from labkit.lab.ch08.outcome import outcome
from labkit.lab.engine_room import EngineRoom, shared_room
from labkit.lab.fields import Choice, Control, Number, Text
from labkit.lab.machine import has_default_model
from labkit.lab.runs import Context, Outcome
from labkit.measure.provenance import collect

if TYPE_CHECKING:
    from labkit.engine.report import StepReport

TINY = "tiny-llama"
SEQS = {"cpu": (1, 16, 13), "cuda": (1, 256, 64)}
STEPS = {"cpu": 24, "cuda": 200}
BUDGET_S = {"cpu": 4.0, "cuda": 20.0}
CONTEXT = 16
PRESETS = ("chat", "bursty")


class LiveSizes:
    """The engine that the panels of this notebook share."""

    kind = "LIVE"

    def __init__(self, gpu: str, room: EngineRoom | None = None) -> None:
        self.gpu, self.room = gpu, room or shared_room()
        self.device = "cuda" if gpu else "cpu"
        self.label = gpu or "this CPU"

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        low, high, usual = SEQS[self.device]
        names = [TINY, *(["smollm2-135m-instruct"] if has_default_model() else ["smollm2-135m"])]
        default = self.room.model if self.room.model in names else names[-1 if self.gpu else 0]
        options = [("the default", DEFAULT), ("powers of two", POWERS), ("typed", CUSTOM)]
        chosen = values.get("list") if values.get("list") in (DEFAULT, POWERS, CUSTOM) else DEFAULT
        found: list[Control] = [
            Choice("model", "Model", [(name, name) for name in names], default, help="tiny-llama has random weights."),
            Number("seqs", "max_num_seqs", low, high, usual, help="Requests that may run at a time."),
            Choice("list", "Sizes", options, chosen, help="Where the list of capture sizes is from."),
        ]
        if chosen == CUSTOM:
            found.append(Text("live_sizes", "Typed", "4, 8", functools.partial(some_sizes, most=2 * high),
                              help="Numbers of tokens, each a graph of its own."))  # fmt: skip
        return [*found, Choice("traffic", "Traffic", [(f"{name}, scaled", name) for name in PRESETS],
                               help="The same shape, with a full batch for the largest step.")]  # fmt: skip

    def cost(self, values: Mapping[str, Any]) -> str:
        load = "" if self.room.llm is not None and self.room.model == values["model"] else "loads the model, "
        sizes = len(self.sizes(values))
        return f"Run {load}captures {sizes} graphs and runs {STEPS[self.device]} decode steps: some seconds."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        steps = STEPS[self.device]
        said = [f"{steps} steps, drawn from {values['traffic']}, of 1 to {values['seqs']} requests."]
        if not self.gpu:
            said.append("A CPU has no CUDA graphs: padding is real here, what capturing takes is not.")
        return said

    def sizes(self, values: Mapping[str, Any]) -> list[int]:
        seqs = int(values["seqs"])
        if values["list"] == CUSTOM:
            return list(values["live_sizes"])
        return powers_of_two(seqs) if values["list"] == POWERS else default_capture_sizes(seqs, 512)

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        sizes, seqs = self.sizes(values), int(values["seqs"])
        llm, records = self._prepare(values, context, sizes)
        context.check()
        reports: list[StepReport] = []
        begin, stopped = time.perf_counter(), False
        batches = _drawn(values["traffic"], seqs, STEPS[self.device])
        for done, batch in enumerate(batches):
            stopped = context.should_stop()
            if reports and (stopped or time.perf_counter() - begin > BUDGET_S[self.device]):
                break
            context.check()
            context.stage("decode steps", done, len(batches))
            reports.append(_step(llm, batch))
        report = PaddingReport.of(reports, llm.engine.runner.dispatcher)
        traffic: dict[int, int] = {}
        for one in reports:
            traffic[one.num_tokens] = traffic.get(one.num_tokens, 0) + 1
        emulated = any(one.emulated for one in reports)
        walls = [one.wall_ms for one in reports]
        made = collect("LIVE", "panel 08", order="as drawn", n=len(reports), primed=True, device=self.device)
        why = f"The engine counted {report.padded_tokens} padded tokens in {report.steps} steps."
        notes = [report.summary]
        if emulated:
            notes.append("Emulated graphs take no memory, and no time to capture.")
        return outcome(
            values["list"], f"{values['traffic']}, scaled", traffic, sizes, made, step_ms=statistics.fmean(walls),
            capture_s=None if emulated else sum(one.ms for one in records) / 1e3,
            mib=None if emulated else sum(one.mib for one in records), samples=walls, why=why, notes=notes,
            stopped=stopped,
        )  # fmt: skip

    def _prepare(self, values: Mapping[str, Any], context: Context, sizes: Sequence[int]) -> tuple[Any, list[Any]]:
        def progress(stage: str, done: int, total: int, detail: str) -> None:
            context.stage(f"{stage} {detail}".strip(), done, total)

        seqs = int(values["seqs"])
        blocks = {} if self.gpu else {"num_gpu_blocks_override": 200}
        llm = self.room.prepare(
            values["model"], progress, max_num_seqs=seqs, max_num_batched_tokens=512,
            max_model_len=1024 if self.gpu else 256, attention_backend=None, compilation_mode="NONE",
            cudagraph_mode="FULL", cudagraph_capture_sizes=tuple(sizes), **blocks,
        )  # fmt: skip
        return llm, list(llm.capture_records)


def _drawn(traffic: str, seqs: int, steps: int) -> list[int]:
    """Batches of steps, drawn with a fixed seed from the histogram, scaled to at most `seqs`."""
    histogram = TRAFFIC[traffic]
    most = max(histogram)
    found = random.Random(8).choices(list(histogram), list(histogram.values()), k=steps)
    return [max(1, round(n * seqs / most)) for n in found]


def _step(llm: Any, batch: int) -> Any:
    llm.reset()
    try:
        llm.prime(batch, CONTEXT, 2)
        return llm.step()
    finally:
        llm.reset()
