"""Runs measured here and now, on the one engine that the panels of a notebook share. Refuses to know widgets.

Everything in this file runs on the worker thread. Torch is only imported once an engine is asked for.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from labkit.attention.selector import Candidate
from labkit.bench.steps import make_row
from labkit.config import ATTENTION_BACKENDS, CUDAGraphMode, SamplingParams
from labkit.engine.report import ReconfigureReport, StepReport
from labkit.errors import ConfigError, LabkitError
from labkit.graphs import modes
from labkit.graphs.avoid import Avoidance, avoid
from labkit.graphs.dispatcher import GraphDispatcher
from labkit.graphs.sizes import default_capture_sizes
from labkit.lab import sentences
from labkit.lab.engine_room import CPU_LIMITS, GPU_LIMITS, TEXT_TOKENS, EngineRoom, Limits, shared_room
from labkit.lab.ledger import Ledger
from labkit.lab.machine import backend_answers, gpu_name, has_default_model, shape_of
from labkit.lab.recorded import first_compiles
from labkit.lab.runs import Stopped
from labkit.lab.settings import AUTO, COMPILES, MODES, Range, Run, Settings
from labkit.measure import launches
from labkit.measure.launches import LaunchCount
from labkit.measure.provenance import collect
from labkit.measure.recordings import Recording

#: Tokens of context beyond the longest that is offered: for the steps of a run and for the text.
HEADROOM = 256


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


class LiveSource:
    """This machine's engine behind the panel's controls.

    Args:
        ask_backends: every backend's answer for (model, max_num_seqs, max_model_len, FLASH_ATTN's version).
        recordings: where costs are looked up that were not measured here: of a first compilation, of a lowered mode.
    """

    kind = "LIVE"

    def __init__(
        self,
        room: EngineRoom | None = None,
        limits: Limits | None = None,
        device: str | None = None,
        ask_backends: Callable[[str, int, int, int | None], tuple[Candidate, ...]] | None = None,
        recordings: Sequence[Recording] = (),
    ) -> None:
        self.room = room or shared_room()
        self.device = device if device is not None else gpu_name()
        self.limits = limits or (GPU_LIMITS if self.device else CPU_LIMITS)
        self._ask_backends = ask_backends or _answers_for
        self._eager_launches: dict[tuple[Any, ...], int] = {}
        self._answers: dict[tuple[Any, ...], tuple[Candidate, ...]] = {}
        # Those of this machine first.
        self._recordings = sorted(recordings, key=lambda rec: rec.provenance.device != (self.device or "cpu"))
        if self.room.ledger is None:
            self.room.ledger = Ledger(self.limits, self.device, first_compiles(recordings, self.device or "cpu"))
        self._ledger = self.room.ledger

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
        try:
            mode, _ = modes.resolve(CUDAGraphMode[settings.mode], candidate.tier, **_way(settings, candidate))
        except ConfigError as error:
            return "NONE", [str(error)]
        return mode.name, [_avoid_text(one) for one in self._avoidances(settings, candidate)]

    def _avoidances(self, settings: Settings, candidate: Candidate) -> tuple[Avoidance, ...]:
        """Each downgrade of the mode asked for, with what would avoid it and what it costs where that was recorded."""
        found = self._candidates(settings.model, self._max_model_len(settings), settings.version)
        model = settings.model.removesuffix("-instruct")  # rows are of shapes
        known = any(row.model == model for rec in self._recordings for row in rec.rows)
        return avoid(
            CUDAGraphMode[settings.mode], candidate.tier, **_way(settings, candidate),
            others={c.name: c.tier for c in found if c.usable and c is not candidate},
            recordings=self._recordings, model=model if known else None, batch=settings.batch,
        )  # fmt: skip

    def _candidates(self, model: str, max_model_len: int = 256, version: int | None = None) -> tuple[Candidate, ...]:
        # Once something has loaded Triton to compile, it no longer interprets, which is all TRITON_ATTN has on a CPU.
        key = model, max_model_len, version, "triton" in sys.modules
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
        if settings.backend in self.refused(settings.model):
            return f"Run will be refused: {settings.backend} cannot run here. Take another backend."
        loaded = self.room.llm is not None and self.room.model == settings.model
        sizes = settings.sizes or tuple(self.default_sizes(settings))
        mode = CUDAGraphMode[self.resolved(settings)[0]]
        wanted = GraphDispatcher(mode, sizes, self.limits.max_num_seqs).capture_order()
        candidate = self.serving(settings)
        layout = (self._max_model_len(settings), candidate.block_size) if candidate else None
        return self._ledger.announce(settings, loaded, candidate.name if candidate else "", wanted, layout)

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
        self._ledger.note_step(settings, row.p50_ms)
        stopped = should_stop()
        text, note = self._write(llm, settings, should_stop, events)
        notes = [*self._downgraded(llm, settings), *_notes(llm, settings, reports), *_new_notes(llm, self.room.report)]
        return Run(
            number=number, settings=settings, row=row, provenance=made, notes=tuple(notes), ready=ready,
            graphs=tuple(llm.capture_records),
            reports=tuple(reports), emulated=bool(reports[-1].emulated), text=text, text_note=note, stopped=stopped,
            eager_launches=(eager, eager) if eager else None,
        )  # fmt: skip

    def _downgraded(self, llm: Any, settings: Settings) -> list[str]:
        """What the mode asked for became and why, as the engine says it, and what would have avoided it."""
        if CUDAGraphMode[settings.mode] is llm.cudagraph_mode:
            return []
        candidate = self.serving(settings)
        known = {str(one.downgrade): one for one in self._avoidances(settings, candidate)} if candidate else {}
        steps = [line for line in llm.mode_trail if "→" in line]
        return [_avoid_text(known[line]) if line in known else f"{line}." for line in steps]

    def _prepare(self, settings: Settings, events: Events) -> tuple[Any, tuple[str, ...]]:
        """The engine as the settings want it, and sentences on what that took."""

        def progress(stage: str, done: int, total: int, detail: str) -> None:
            # A compilation counts its classes in its own words.
            said = f"{stage}: {detail}" if stage == "compiling" else f"{stage} {detail}"
            events.stage(said, done, total)

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
        new = self._ledger.captured_now(llm, self.room.report)
        self._ledger.note_ready(settings, llm, self.room.report, seconds)
        return llm, sentences.ready(llm, self.room.report, new, seconds, llm.emulated_graphs)

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


def _way(settings: Settings, candidate: Candidate) -> dict[str, Any]:
    """How PIECEWISE would be had, in the words of the rules: compiled in pieces, or a capture that breaks."""
    compiled = settings.compile == "VLLM_COMPILE"
    return {"compiled": compiled, "backend": candidate.name, "breakable": not compiled}


def _avoid_text(one: Avoidance) -> str:
    return f"{one.downgrade}. To avoid it: {one.change} What it costs: {one.cost}."


def _new_notes(llm: Any, report: ReconfigureReport | None) -> list[str]:
    """What the engine itself had to say while it got ready, such as a compilation that failed."""
    return list(llm.notes if report is None else report.notes)


def _notes(llm: Any, settings: Settings, reports: list[StepReport]) -> list[str]:
    """What a reader must know beside the numbers: padding, a step above the largest size."""
    notes: list[str] = []
    last = reports[-1]
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
    return f"{last.backend}, {len(decodes)} decode step{'s' if len(decodes) > 1 else ''} {ran}; {said}."
