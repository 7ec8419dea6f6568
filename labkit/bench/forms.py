"""One step in several forms: eager, compiled, in graphs, both. Refuses to know how a step works and how it is shown.

All forms of a model run in one process on one engine and take turns, each round in another order, so that a drift of
the machine meets all of them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.bench.comparison import Budget, budget
from labkit.bench.steps import (
    Progress,
    Yardsticks,
    captures_of,
    launch_notes,
    make_row,
    measure_steps,
    measure_yardsticks,
    rotations,
    setup_of,
)
from labkit.config import CUDAGraphMode, EngineConfig
from labkit.engine.report import StepReport
from labkit.errors import LabkitError
from labkit.graphs.sizes import default_capture_sizes, pad_to
from labkit.measure.launches import LaunchCount
from labkit.measure.provenance import Kind, collect
from labkit.measure.recordings import Captured, Recording, Refusal, Row, Setup
from labkit.measure.stats import Ratio, compared

if TYPE_CHECKING:
    from labkit.llm import LLM

#: A PIECEWISE step counts as well made when it takes at most this many times what starting everything costs, plus the
#: host's work outside the forward: between its graphs attention is started from Python, layer by layer.
PIECEWISE_LIMIT = 1.5
ROUNDS = 4


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to run a step: a name, a compilation mode and a graph mode."""

    name: str
    compile: str
    mode: str


#: What a decode step can gain, one switch at a time; in "reduce-overhead" torch alone makes both code and graphs.
COMPILE_TABLE = (
    Form("none", "NONE", "NONE"),
    Form("compile", "VLLM_COMPILE", "NONE"),
    Form("graph", "NONE", "FULL_DECODE_ONLY"),
    Form("both", "VLLM_COMPILE", "FULL_DECODE_ONLY"),
    Form("reduce-overhead", "STOCK_TORCH_COMPILE", "FULL_DECODE_ONLY"),
    Form("pieces", "NONE", "PIECEWISE"),
    Form("pieces, compiled", "VLLM_COMPILE", "PIECEWISE"),
)


def mode_forms(compile: str = "NONE") -> tuple[Form, ...]:
    """Eager, then every graph mode with this compilation mode."""
    graphs = ("PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
    return Form("none", "NONE", "NONE"), *(Form(mode, compile, mode) for mode in graphs)


@dataclasses.dataclass(frozen=True)
class FormResult:
    """One form's row beside the first form's.

    ratio: the first form over this one, None for the first itself. step_mib: by how much one step raises the device
    allocator above what is held between steps. graph_mib: what the graph of this size holds all the time, into which
    such a step's activations go. Both None on a CPU.
    budget: of a PIECEWISE step, what starting its graphs and attention explains.
    """

    form: Form
    row: Row
    ratio: Ratio | None
    step_mib: float | None
    graph_mib: float | None
    budget: Budget | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, the row by what tells it apart."""
        return {
            "form": self.form.name, "model": self.row.model, "compile": self.form.compile,
            "requested_mode": self.form.mode, "mode": self.row.mode, "size": self.row.size, "batch": self.row.batch,
            "context": self.row.context, "chunk": self.row.chunk, "p50_ms": self.row.p50_ms,
            "launches": self.row.launches, "graph_launches": self.row.graph_launches,
            "ratio": self.ratio and self.ratio.value, "ratio_low": self.ratio and self.ratio.low,
            "ratio_high": self.ratio and self.ratio.high, "shown": self.ratio and self.ratio.shown,
            "paired": self.ratio and self.ratio.paired,
            "step_mib": self.step_mib, "graph_mib": self.graph_mib,
            "budget": self.budget and self.budget.as_dict(),
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Point:
    """What is measured in every form; `steps` of it a round."""

    batch: int
    context: int
    chunk: int
    steps: int
    warmup: int


@dataclasses.dataclass
class _Taken:
    """What was measured of one form so far."""

    reports: list[StepReport] = dataclasses.field(default_factory=list)
    counted: LaunchCount = dataclasses.field(default_factory=lambda: LaunchCount(None, reason="not counted"))
    step_mib: float | None = None
    graph_mib: float | None = None


def bench_forms(
    config: EngineConfig,
    forms: Sequence[Form] = COMPILE_TABLE,
    models: Sequence[str] = (),
    batches: Sequence[int] = (1,),
    contexts: Sequence[int] = (512,),
    *,
    chunk: int = 0,
    steps: int = 100,
    warmup: int = 10,
    command: str | None = None,
    progress: Progress = lambda stage, done, total, detail: None,
) -> tuple[Recording, list[FormResult], list[str]]:
    """A step of every model × batch × context in every form. What `config` says of mode and compilation is not used.

    Args:
        forms: the first is what the others are compared with.
        models: none takes the one of `config`.
        chunk: makes it a mixed step: `batch` decodes beside a new prompt of that many tokens.

    Returns:
        The rows (with the forms that cannot run as refused), one result each, and sentences a reader should see.

    Raises:
        LabkitError: not even the first form can run.
    """
    from labkit.llm import LLM

    results: list[FormResult] = []
    refused: list[Refusal] = []
    notes: dict[str, None] = {}
    device = "cpu"
    for model in models or (config.model,):
        tokens = [batch + chunk for batch in batches]
        with LLM(config=forms_config(config.replace(model=model), forms, tokens), progress=progress) as llm:
            device = llm.device.type
            found = FormBench(llm, forms, progress)
            refused += found.refused
            notes |= {f"{model}, {form.name}: not measured, {why}": None for form, why in found.reasons.items() if why}
            for batch, context in itertools.product(batches, contexts):
                results += found.measure(batch, context, chunk=chunk, steps=steps, warmup=warmup)
            notes |= dict.fromkeys([*found.notes, *llm.notes])
    rows = tuple(result.row for result in results)
    turns = ", ".join(form.name for form in forms)
    provenance = collect(
        Kind.LIVE, command, order=f"for each batch and context {ROUNDS} rounds, each begun one form later: {turns}",
        n=min(row.n for row in rows), primed=True, device=device,
    )  # fmt: skip
    return Recording(provenance, rows, tuple(refused)), results, list(notes)


def forms_config(config: EngineConfig, forms: Sequence[Form], tokens: Sequence[int]) -> EngineConfig:
    """`config` as an engine begins that will take every form: in the first one, with graphs for these step sizes."""
    return config.replace(
        enable_prefix_caching=False, enforce_eager=False, optimization_level=None, piecewise_method=None,
        compilation_mode=forms[0].compile, cudagraph_mode=CUDAGraphMode[forms[0].mode],
        cudagraph_capture_sizes=_graph_sizes(config, tokens), max_cudagraph_capture_size=None,
    )  # fmt: skip


def open_forms(recording: Recording, model: str, forms: Sequence[Form], batch: int, context: int) -> list[Form]:
    """The forms of which a point is neither recorded nor refused, whatever backend it ran on."""

    def key(form: Form) -> tuple[str, str]:
        return form.compile, form.mode

    done = {
        (row.compile, row.requested_mode)
        for row in recording.rows
        if (row.model, row.batch, row.context, row.chunk) == (model, batch, context, 0)
    } | {
        (one.compile, one.requested_mode)
        for one in recording.refused
        if one.model == model and (one.batch, one.context) in ((0, 0), (batch, context))
    }
    return [form for form in forms if key(form) not in done]


class FormBench:
    """One model in every form that can run, taking turns.

    Args:
        llm: an engine made with `forms_config`.

    Attributes:
        reasons: of each form why it cannot run, empty where it can. refused: the same for a recording.
        setups: what getting ready for each form took, as a whole and size by size.
        notes: sentences a reader should see about what was measured.

    Raises:
        LabkitError: not even the first form can run.
    """

    def __init__(self, llm: LLM, forms: Sequence[Form], progress: Progress) -> None:
        self.llm, self.progress = llm, progress
        self.name, self.backend = Path(llm.config.model).name, llm.selection.selected
        self.reasons: dict[Form, str] = {}
        self.setups: list[tuple[Setup, list[Captured]]] = []
        self.notes: dict[str, None] = {}
        for form in forms:
            self.reasons[form] = _switch(llm, form)
            if not self.reasons[form] and form.mode != "NONE":
                where = (self.name, self.backend, form.compile)
                self.setups.append((setup_of(llm, where, form.mode), captures_of(llm, where, form.mode)))
        self.usable = [form for form in forms if not self.reasons[form]]
        self.refused = [_refusal(llm, form, why) for form, why in self.reasons.items() if why]
        if forms[0] not in self.usable:
            what = f"the form {forms[0].name!r}, which the others are compared with"
            raise LabkitError(what, self.refused[-1].reason, "Ask for another model or backend.")
        self.yardsticks = measure_yardsticks(llm, progress)

    def measure(
        self, batch: int, context: int, *, steps: int = 100, warmup: int = 10, chunk: int = 0
    ) -> list[FormResult]:
        """One result per usable form, the first form's first."""
        point = _Point(batch, context, chunk, -(-steps // ROUNDS), warmup)
        taken = _measure(self.llm, self.usable, point, self.progress)
        found = list(_results(self.llm, taken, point, self.yardsticks))
        outside = (_outside(one, self.llm.config.cudagraph_capture_sizes) for one in found)
        self.notes |= dict.fromkeys(filter(None, outside))
        self.notes |= dict.fromkeys(launch_notes(one.counted for one in taken.values()))
        return found


def _measure(llm: LLM, forms: Sequence[Form], point: _Point, progress: Progress) -> dict[Form, _Taken]:
    """All rounds; launches and memory in the first."""
    taken: dict[Form, _Taken] = {form: _Taken() for form in forms}
    for number, order in enumerate(rotations(forms, ROUNDS)):
        for form in order:
            _switch(llm, form)
            one, memory = taken[form], _Memory(llm)
            reports, counted = measure_steps(
                llm, point.batch, point.context, steps=point.steps, warmup=point.warmup, progress=progress,
                count=not number, chunk=point.chunk, before_measuring=memory.start,
            )  # fmt: skip
            one.reports += reports
            if not number:
                one.counted, one.step_mib = counted, memory.rise_mib()
                if one.step_mib is not None:
                    ran = {(report.mode, report.size) for report in reports}
                    one.graph_mib = sum(r.mib for r in llm.capture_records if (r.mode, r.size) in ran)
    return taken


def _results(llm: LLM, taken: dict[Form, _Taken], point: _Point, yardsticks: Yardsticks) -> Iterator[FormResult]:
    first: Row | None = None
    for form, one in taken.items():
        _switch(llm, form)
        row = make_row(
            llm, one.reports, batch=point.batch, context=point.context, requested_mode=form.mode, counted=one.counted,
            yardsticks=yardsticks, chunk=point.chunk, rounds=ROUNDS,
        )  # fmt: skip
        found = compared(first.measurement(Kind.LIVE), row.measurement(Kind.LIVE)) if first else None
        spent = budget(row, PIECEWISE_LIMIT) if row.mode == "PIECEWISE" else None
        yield FormResult(form, row, found, one.step_mib, one.graph_mib, spent)
        first = first or row


def _outside(one: FormResult, sizes: Sequence[int] | None) -> str:
    """A sentence where a step ran without the graph that its form is about."""
    mode, row = CUDAGraphMode[one.form.mode], one.row
    meant = (mode.mixed_mode() if row.chunk else mode.decode_mode()).name
    if row.mode == meant:
        return ""
    tokens, largest = row.batch + row.chunk, max(sizes or (0,))
    return (
        f"{row.model}, {one.form.name}: {tokens} tokens are above the largest capture size, {largest}, so the step ran "
        f"eagerly. --cudagraph-capture-sizes {tokens} gives it a graph."
    )


def _graph_sizes(config: EngineConfig, tokens: Sequence[int]) -> tuple[int, ...]:
    """The capture sizes that steps of so many tokens run in, as the engine would pad them."""
    sizes = config.cudagraph_capture_sizes or default_capture_sizes(config.max_num_seqs, config.max_num_batched_tokens)
    found = {pad_to(n, sizes) for n in tokens}
    return tuple(sorted(size for size in found if size is not None)) or (max(sizes),)


def _switch(llm: LLM, form: Form) -> str:
    """Put the engine into a form. Returns why it is not in it, empty when it is."""
    try:
        llm.reconfigure(compilation_mode=form.compile, cudagraph_mode=CUDAGraphMode[form.mode])
    except LabkitError as error:
        return str(error)
    if (llm.config.compilation_mode or "NONE") != form.compile:
        return llm.notes[-1] if llm.notes else f"the engine does not compile by {form.compile} here"
    if llm.cudagraph_mode is not CUDAGraphMode[form.mode]:
        return f"{llm.cudagraph_mode.name} runs instead of {form.mode}: {'; '.join(llm.mode_trail)}"
    return ""


def _refusal(llm: LLM, form: Form, why: str) -> Refusal:
    return Refusal(Path(llm.config.model).name, llm.selection.selected, form.compile, form.mode, why)


class _Memory:
    """By how much the device allocator rises above what it held when measuring began; nothing on a CPU."""

    def __init__(self, llm: LLM) -> None:
        self._device = llm.device if llm.device.type == "cuda" else None
        self._held = 0

    def start(self) -> None:
        if self._device is not None:
            import torch

            torch.cuda.synchronize(self._device)
            self._held = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)

    def rise_mib(self) -> float | None:
        if self._device is None:
            return None
        import torch

        return round((torch.cuda.max_memory_allocated(self._device) - self._held) / 2**20, 2)
