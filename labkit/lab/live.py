"""Runs measured here and now, on the one engine that the panels of a notebook share. Refuses to know widgets.

Everything in this file runs on the worker thread. Torch is only imported once an engine is asked for.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labkit.attention.selector import Candidate
from labkit.bench.steps import make_row
from labkit.config import ATTENTION_BACKENDS, CUDAGraphMode, SamplingParams
from labkit.engine.report import ReconfigureReport, StepReport
from labkit.errors import ConfigError, LabkitError
from labkit.graphs import modes
from labkit.graphs.dispatcher import GraphDispatcher, GraphKey
from labkit.graphs.sizes import default_capture_sizes
from labkit.lab import sentences
from labkit.lab.machine import backend_answers, gpu_name, has_default_model, shape_of
from labkit.lab.settings import AUTO, COMPILES, MODES, Range, Run, Settings, show_sizes
from labkit.measure import launches
from labkit.measure.launches import LaunchCount
from labkit.measure.provenance import collect

TEXT_TOKENS = 24
#: Tokens of context beyond the longest that is offered: for the steps of a run and for the text.
HEADROOM = 256


@dataclasses.dataclass(frozen=True)
class Limits:
    """How far the controls go on a machine, and how long a run may take there.

    steps: measured steps at most; a run ends after `budget_s` seconds once `min_steps` are done.
    text_s: seconds after which writing text ends, finished or not.
    model_bytes: the largest weights that are offered.
    """

    max_num_seqs: int
    max_context: int
    max_num_batched_tokens: int
    sizes: tuple[int, ...] | None
    warmup: int
    steps: int
    min_steps: int
    budget_s: float
    model_bytes: int
    text_s: float = 5.0
    default_batch: int = 1
    default_context: int = 512


#: Two cores should answer in seconds: small batches, short contexts, four sizes.
CPU_LIMITS = Limits(8, 1024, 512, (1, 2, 4, 8), 2, 20, 3, 3.0, 4 << 30, default_context=64)
GPU_LIMITS = Limits(256, 4096, 8192, None, 10, 60, 50, 20.0, 40 << 30)


@dataclasses.dataclass
class Events:
    """Where a run reports while it is under way; every call comes from the worker thread.

    stage(text, done, total): what is being done; total 0 where the end is not known.
    step(reports): all measured steps so far.
    text(so_far): generated text.
    """

    stage: Callable[[str, int, int], None] = lambda text, done, total: None
    step: Callable[[list[StepReport]], None] = lambda reports: None
    text: Callable[[str], None] = lambda so_far: None


class Stopped(Exception):
    """Stop was pressed before anything could be measured."""


class EngineRoom:
    """Holds the one engine of this process, so that running a cell twice does not hold memory twice."""

    def __init__(self, make: Callable[..., Any] | None = None) -> None:
        self._make = make
        self.llm: Any = None
        self.model = ""
        self.report: ReconfigureReport | None = None  # of the newest change; None for an engine just built
        self._progress: Callable[[str, int, int, str], None] = lambda *args: None

    def prepare(self, model: str, progress: Callable[[str, int, int, str], None], **changes: Any) -> Any:
        """The engine with this model and these settings: reconfigured where possible, built where not."""
        self._progress, self.report = progress, None
        if self.llm is not None and self.model != model:
            # Weights of two models need not fit at once, so the old ones go first.
            self.close()
        if self.llm is None:
            self.llm = (self._make or _make_llm)(model, progress=self._report, **changes)
            self.model = model
        else:
            self.llm.reset()
            self.report = self.llm.reconfigure(**changes)
        return self.llm

    def close(self) -> None:
        """Give the engine's memory back."""
        llm, self.llm = self.llm, None
        if llm is not None:
            llm.close()

    def _report(self, stage: str, done: int, total: int, detail: str) -> None:
        self._progress(stage, done, total, detail)


def _make_llm(model: str, **kwargs: Any) -> Any:
    from labkit.llm import LLM

    return LLM(model, **kwargs)


_room: EngineRoom | None = None


def shared_room() -> EngineRoom:
    """The engine room of this process."""
    global _room
    if _room is None:
        _room = EngineRoom()
    return _room


class LiveSource:
    """This machine's engine behind the panel's controls.

    Args:
        ask_backends: every backend's answer for (model, max_num_seqs, max_model_len, FLASH_ATTN's version).
        first_compiles: seconds that the first compilation of a model took on such a machine, where known.
    """

    kind = "LIVE"

    def __init__(
        self,
        room: EngineRoom | None = None,
        limits: Limits | None = None,
        device: str | None = None,
        ask_backends: Callable[[str, int, int, int | None], tuple[Candidate, ...]] | None = None,
        first_compiles: Mapping[str, float] | None = None,
    ) -> None:
        self.room = room or shared_room()
        self.device = device if device is not None else gpu_name()
        self.limits = limits or (GPU_LIMITS if self.device else CPU_LIMITS)
        self._ask_backends = ask_backends or _answers_for
        self._load_s: dict[str, float] = {}
        self._capture_ms: dict[tuple[str, ...], float] = {}
        self._step_ms: dict[tuple[str, ...], float] = {}
        self._eager_launches: dict[tuple[Any, ...], int] = {}
        self._answers: dict[tuple[Any, ...], tuple[Candidate, ...]] = {}
        self._compile_s = dict(first_compiles or {})
        # What the engine that is loaded holds: its graphs of one memory layout, and the models it has compiled.
        self._layout: tuple[int, int] | None = None
        self._graphs: set[tuple[Any, ...]] = set()
        self._compiled = False

    @property
    def machine(self) -> str:
        return self.device or "CPU"

    @property
    def label(self) -> str:
        return self.device or "this CPU"

    # --- what the controls offer -----------------------------------------------------------------------------------

    def models(self) -> list[str]:
        """The default model and every shape whose weights fit; its real weights come first when they were fetched."""
        from labkit.models.shapes import DEFAULT_MODEL, SHAPES

        itemsize = 2 if self.device else 4
        fit = [n for n, shape in SHAPES.items() if shape.num_parameters() * itemsize <= self.limits.model_bytes]
        return [DEFAULT_MODEL, *fit] if has_default_model() else [*fit, DEFAULT_MODEL]

    def backends(self, model: str) -> list[tuple[str, str]]:
        """Label and choice of each backend; of FLASH_ATTN one for each version that can serve, the automatic first."""
        out = [(AUTO, AUTO)]
        refused = self.refused(model)
        found = {c.name: c for c in self._candidates(model)}
        for name in ATTENTION_BACKENDS:
            versions = [v.version for v in found[name].versions if v.usable] if name in found else []
            if name in refused or not versions:
                out.append((f"{name} (not here)" if name in refused else name, name))
                continue
            out.append((f"{name} · FA{versions[0]}", name))
            out += [(f"{name} · FA{version}", f"{name}:{version}") for version in versions[1:]]
        return out

    def refused(self, model: str) -> dict[str, str]:
        """The backends that cannot serve `model` here, each with its reasons."""
        return {c.name: "; ".join(map(str, c.reasons)) for c in self._candidates(model) if not c.usable}

    def serving(self, settings: Settings) -> Candidate | None:
        """The answer of the backend that the engine will take; None where none can serve."""
        found = self._candidates(settings.model, self._max_model_len(settings), settings.version)
        usable = [c for c in found if c.usable and (c.name == settings.backend or settings.backend == AUTO and c.order)]
        return usable[0] if usable else None

    def resolved(self, settings: Settings) -> tuple[str, list[str]]:
        """The mode that will run and every decision that changed it; the engine decides by the same rule."""
        candidate = self.serving(settings)
        if candidate is None:
            return settings.mode, []
        compiled = settings.compile == "VLLM_COMPILE"
        try:
            asked = CUDAGraphMode[settings.mode]
            mode, trail = modes.resolve(
                asked, candidate.tier, compiled, backend=candidate.name, breakable=not compiled
            )  # fmt: skip
        except ConfigError as error:
            return "NONE", [str(error)]
        return mode.name, [f"{line}." for line in trail if "→" in line]

    def _candidates(self, model: str, max_model_len: int = 256, version: int | None = None) -> tuple[Candidate, ...]:
        key = model, max_model_len, version
        if key not in self._answers:
            self._answers[key] = self._ask_backends(model, self.limits.max_num_seqs, max_model_len, version)
        return self._answers[key]

    def compiles(self, model: str, backend: str) -> list[str]:
        return list(COMPILES)

    def modes(self, model: str, backend: str, compile: str = "NONE") -> list[str]:
        return list(MODES)

    def batches(self, settings: Settings) -> Range:
        return Range(1, self.limits.max_num_seqs)

    def contexts(self, settings: Settings) -> Range:
        longest = shape_of(settings.model).max_position_embeddings
        return Range(16, min(self.limits.max_context, longest - HEADROOM), 16)

    def default_sizes(self, settings: Settings) -> list[int]:
        limits = self.limits
        if limits.sizes is not None:
            return list(limits.sizes)
        return default_capture_sizes(limits.max_num_seqs, limits.max_num_batched_tokens, max_size=limits.max_num_seqs)

    def snap(self, settings: Settings) -> tuple[Settings, list[str]]:
        return settings, []

    def cost(self, settings: Settings) -> str:
        """What a click on Run will do and about how long it takes; measured figures replace guesses as they come in."""
        parts = []
        seconds = 0.0
        loaded = self.room.llm is not None and self.room.model == settings.model
        if not loaded:
            known = self._load_s.get(settings.model)
            parts.append(f"load {settings.model}" + (f" ({known:.0f} s last time)" if known else ""))
            seconds += known or 4.0
        if settings.compile != "NONE" and not (loaded and self._compiled):
            known = self._compile_s.get(settings.model)
            first = f"about {_about(known)}" if known else "tens of seconds"
            parts.append(f"compile it (the first compile of this model takes {first}, later starts read it from the "
                         "cache)")  # fmt: skip
            seconds += known or 30.0
        wanted, todo = self._wanted_graphs(settings), self._missing_graphs(settings)
        if todo:
            # Before the first measured capture: a FULL graph of thirty layers took some 50 ms on a data-centre GPU.
            each = self._capture_ms.get(
                (settings.model, settings.choice, settings.compile), 50.0 if self.device else 2.0
            )
            sizes = sorted({key.size for key in todo})
            parts.append(f"capture {_graphs(todo, self.device)} ({show_sizes(sizes)})")
            seconds += len(todo) * each / 1e3
        elif wanted and loaded:
            parts.append(f"keep {'its' if len(wanted) == 1 else 'all'} {_graphs(wanted, self.device)}")
        step_ms = self._step_ms.get(_kind_of_step(settings), 8.0 if self.device else 60.0)
        limits = self.limits
        most = (limits.warmup + limits.steps) * step_ms / 1e3
        measuring = max(min(limits.budget_s, most), (limits.warmup + limits.min_steps) * step_ms / 1e3)
        parts.append(
            f"measure up to {self.limits.steps} steps after {self.limits.warmup} of warm-up, "
            f"and write {TEXT_TOKENS} tokens"
        )
        seconds += measuring + min(limits.text_s, TEXT_TOKENS * step_ms / 1e3)
        return f"Run will {', '.join(parts)}: about {_about(seconds)}."

    def _wanted_graphs(self, settings: Settings) -> list[GraphKey]:
        """What the engine will have a graph of, one key for each."""
        sizes = settings.sizes or tuple(self.default_sizes(settings))
        mode = CUDAGraphMode[self.resolved(settings)[0]]
        return GraphDispatcher(mode, sizes, self.limits.max_num_seqs).capture_order()

    def _missing_graphs(self, settings: Settings) -> list[GraphKey]:
        """Those that the loaded engine does not hold yet. A change of the memory's layout drops all it has."""
        wanted, candidate = self._wanted_graphs(settings), self.serving(settings)
        if self.room.llm is None or self.room.model != settings.model or candidate is None:
            return wanted
        if self._layout != (self._max_model_len(settings), candidate.block_size):
            return wanted
        return [key for key in wanted if (candidate.name, settings.version, settings.compile, key) not in self._graphs]

    def _note_graphs(self, llm: Any, settings: Settings) -> None:
        """Remember what the engine holds now, to announce the next click truly."""
        layout = llm.config.max_model_len, llm.config.block_size
        if self.room.report is None or layout != self._layout:
            self._graphs.clear()
        self._layout = layout
        self._compiled = llm.compile_report is not None or (self._compiled and self.room.report is not None)
        held = GraphDispatcher(llm.cudagraph_mode, llm.capture_sizes, llm.config.max_num_seqs).capture_order()
        where = llm.selection.selected, settings.version, settings.compile
        self._graphs |= {(*where, key) for key in held}

    # --- a run -----------------------------------------------------------------------------------------------------

    def run(self, settings: Settings, number: int, should_stop: Callable[[], bool], events: Events) -> Run:
        """Configure the engine, measure decode steps at the asked batch and context, then write some text with it.

        `should_stop` is asked between steps: after it says yes no further step is started.

        Raises:
            Stopped: it said yes before the first measured step.
            LabkitError: the engine cannot do what was asked.
        """
        llm, ready = self._prepare(settings, events)
        if should_stop():
            raise Stopped
        reports = self._measure(llm, settings, should_stop, events)
        if not reports:
            raise Stopped
        count, eager = LaunchCount(None), None
        if not should_stop():
            count, eager = self._count_launches(llm, settings, events)
        row = make_row(
            llm, reports, batch=settings.batch, context=settings.context, requested_mode=settings.mode, counted=count
        )
        made = collect(
            "LIVE", "latency_panel", order="as run", n=row.n, primed=True, device="auto" if self.device else "cpu"
        )
        self._step_ms[_kind_of_step(settings)] = row.p50_ms
        stopped = should_stop()
        text, note = self._write(llm, settings, should_stop, events)
        notes = [*_notes(llm, settings, reports), *_new_notes(llm, self.room.report)]
        return Run(
            number=number, settings=settings, row=row, provenance=made, notes=tuple(notes), ready=ready,
            graphs=tuple(llm.capture_records),
            reports=tuple(reports), emulated=bool(reports[-1].emulated), text=text, text_note=note, stopped=stopped,
            eager_launches=(eager, eager) if eager else None,
        )  # fmt: skip

    def _prepare(self, settings: Settings, events: Events) -> tuple[Any, tuple[str, ...]]:
        """The engine as the settings want it, and sentences on what that took."""

        def progress(stage: str, done: int, total: int, detail: str) -> None:
            events.stage(f"{stage} {detail}" if stage != "capturing" else f"capturing {detail}", done, total)

        fresh = self.room.llm is None or self.room.model != settings.model
        begin = time.perf_counter()
        events.stage(f"loading {settings.model}" if fresh else "reconfiguring", 0, 0)
        sizes = settings.sizes or tuple(self.default_sizes(settings))
        llm = self.room.prepare(
            settings.model, progress, max_num_seqs=self.limits.max_num_seqs,
            max_num_batched_tokens=self.limits.max_num_batched_tokens, max_model_len=self._max_model_len(settings),
            attention_backend=None if settings.backend == AUTO else settings.backend,
            flash_attn_version=settings.version, compilation_mode=settings.compile,
            cudagraph_mode=settings.mode, cudagraph_capture_sizes=sizes,
        )  # fmt: skip
        seconds = time.perf_counter() - begin
        records, compiled = llm.capture_records, llm.compile_report
        if fresh:
            spent = sum(r.ms for r in records) / 1e3 + (compiled.total_ms / 1e3 if compiled else 0.0)
            self._load_s[settings.model] = max(0.0, seconds - spent)
        if records:
            each = sum(r.ms for r in records) / len(records)
            self._capture_ms[settings.model, settings.choice, settings.compile] = each
        if compiled is not None and not compiled.from_cache:
            self._compile_s[settings.model] = compiled.total_ms / 1e3
        self._note_graphs(llm, settings)
        return llm, sentences.ready(llm, self.room.report, seconds, llm.emulated_graphs)

    def _max_model_len(self, settings: Settings) -> int:
        """Room for the context, the steps and the text.

        TORCH_SDPA's graphs gather all of `max_model_len` in every step, so its engine is cut to the context at hand, in
        coarse steps since a change lays the cache out anew; other backends get room for every context at once.
        """
        needed = max(settings.context + self.limits.warmup + self.limits.steps, len(settings.prompt) + TEXT_TOKENS) + 8
        gathers = settings.backend == "TORCH_SDPA" or not self.device
        step = 1024 if self.device else 256
        room = -(-needed // step) * step if gathers else max(self.limits.max_context + HEADROOM, needed)
        return min(room, shape_of(settings.model).max_position_embeddings)

    def _measure(
        self, llm: Any, settings: Settings, should_stop: Callable[[], bool], events: Events
    ) -> list[StepReport]:
        limits = self.limits
        # Warming up on the way there: the first measured step has exactly `context` tokens behind it.
        before = min(limits.warmup, settings.context - 1)
        llm.reset()
        reports: list[StepReport] = []
        try:
            llm.prime(settings.batch, settings.context - before, limits.warmup + limits.steps + 1)
            for i in range(limits.warmup):
                if should_stop():
                    return []
                events.stage("warming up", i, limits.warmup)
                llm.step()
            begin = time.perf_counter()
            while len(reports) < limits.steps and not should_stop():
                if len(reports) >= limits.min_steps and time.perf_counter() - begin > limits.budget_s:
                    break
                report = llm.step()
                if report.num_reqs != settings.batch:
                    raise LabkitError(
                        f"a step of {settings.batch} requests",
                        f"only {report.num_reqs} ran, so the KV cache is too small for all of them",
                        "Lower batch or context.",
                    )
                reports.append(report)
                events.stage("measuring", len(reports), limits.steps)
                events.step(reports)
        finally:
            llm.reset()
        return reports

    def _count_launches(self, llm: Any, settings: Settings, events: Events) -> tuple[LaunchCount, int | None]:
        """Launches of one step as configured, and of the same step without graphs; both from a trace, GPU only."""
        if launches.why_not() or not self.device:
            return LaunchCount(None, reason="launches are counted on a GPU"), None
        events.stage("counting launches", 0, 0)
        found = _traced_step(llm, settings)
        key = (settings.model, llm.selection.selected, settings.version, settings.compile, settings.batch)
        if not found.graph_launches:
            if found.launches is not None:
                self._eager_launches[key] = found.launches
        elif key not in self._eager_launches:
            # Captures are kept over this, so going there and back costs milliseconds.
            llm.reconfigure(cudagraph_mode="NONE")
            try:
                eager = _traced_step(llm, settings).launches
            finally:
                llm.reconfigure(cudagraph_mode=settings.mode)
            if eager is not None:
                self._eager_launches[key] = eager
        return found, self._eager_launches.get(key)

    def _write(self, llm: Any, settings: Settings, should_stop: Callable[[], bool], events: Events) -> tuple[str, str]:
        """Greedy text from the prompt with the engine exactly as it was measured, and a note on how its steps ran."""
        if not settings.prompt or should_stop():
            return "", "Stopped before any text was written." if settings.prompt else ""
        events.stage("writing text", 0, TEXT_TOKENS)
        request = llm.add_request(settings.prompt, SamplingParams(max_tokens=TEXT_TOKENS))
        text, decodes, begin = "", [], time.perf_counter()
        try:
            while llm.has_unfinished and not should_stop() and time.perf_counter() - begin < self.limits.text_s:
                report = llm.step()
                if report.max_query_len == 1 and report.num_tokens == 1:
                    decodes.append(report)
                for output in report.outputs:
                    if output.request_id == request:
                        text = output.text
                events.stage("writing text", len(decodes) + 1, TEXT_TOKENS)
                events.text(text)
        finally:
            llm.reset()
        return text, _text_note(llm, decodes)


def _traced_step(llm: Any, settings: Settings) -> LaunchCount:
    llm.prime(settings.batch, settings.context, 4)
    try:
        llm.step()
        return launches.count(llm.step)
    finally:
        llm.reset()


def _answers_for(model: str, max_num_seqs: int, max_model_len: int, version: int | None) -> tuple[Candidate, ...]:
    return backend_answers(shape_of(model), max_num_seqs, max_model_len, version)


def _kind_of_step(settings: Settings) -> tuple[str, ...]:
    return settings.model, settings.choice, settings.compile, settings.mode


def _graphs(keys: Sequence[GraphKey], device: str) -> str:
    """ "4 graphs", "35 steps in pieces and 35 graphs"; on a CPU they are emulated."""
    counts = collections.Counter(key.mode for key in keys)
    words = {"FULL": ("graph", "graphs"), "PIECEWISE": ("step in pieces", "steps in pieces")}
    emulated = "" if device else "emulated "
    return " and ".join(f"{n} {emulated}{words[mode][n > 1]}" for mode, n in counts.items())


def _new_notes(llm: Any, report: ReconfigureReport | None) -> list[str]:
    """What the engine itself had to say while it got ready, such as a compilation that failed."""
    return list(llm.notes if report is None else report.notes)


def _notes(llm: Any, settings: Settings, reports: list[StepReport]) -> list[str]:
    """What a reader must know beside the numbers: a mode that was lowered, padding, a step above the largest size."""
    notes: list[str] = []
    last = reports[-1]
    if CUDAGraphMode[settings.mode] is not llm.cudagraph_mode:
        notes += [f"{line}." for line in llm.mode_trail if "→" in line]
    if last.num_padded:
        be = "is" if last.num_padded == 1 else "are"
        notes.append(
            f"batch {settings.batch} is padded to size {last.size}: {last.num_padded} of {last.size} rows {be} padding."
        )
    sizes = llm.capture_sizes
    if last.mode == "NONE" and sizes and settings.batch > max(sizes):
        notes.append(f"batch {settings.batch} is above the largest size, {max(sizes)}: it ran eagerly (mode NONE).")
    return notes


def _text_note(llm: Any, decodes: list[StepReport]) -> str:
    said = "random weights, so the text is noise" if llm.weights == "random" else "real weights, greedy"
    if not decodes:
        return f"{llm.selection.selected}, {said}."
    last = decodes[-1]
    ran = (
        "eagerly"
        if last.mode == "NONE"
        else f"in the {'emulated ' if last.emulated else ''}{last.mode} graph of size {last.size}"
    )
    return f"{last.backend}, {len(decodes)} decode steps {ran}; {said}."


def _about(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 3 else f"{round(seconds)} s" if seconds < 90 else f"{seconds / 60:.0f} min"
