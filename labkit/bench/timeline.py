"""Taking the timeline of one decode step on the real engine, with its control. Refuses to read traces and to draw.

In one run: prime, warm up, then the same step without the profiler (between events) and with it, in turns. The traced
step of middle length is kept. It needs a CUDA device; no timeline has been taken on one yet.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.bench.steps import Progress, ShouldStop
from labkit.config import CUDAGraphMode, EngineConfig
from labkit.engine.report import StepReport
from labkit.errors import ConfigError, LabkitError
from labkit.measure import launches
from labkit.measure.chrome import STEP, read_events
from labkit.measure.integrity import Expected, eager_counts, step_of
from labkit.measure.provenance import Kind, Provenance, ProvenanceError, collect
from labkit.measure.recordings import Refusal
from labkit.measure.spans import StepTimeline, TimelineError
from labkit.measure.timeline import from_trace, overhead, why_not
from labkit.measure.timeline_recording import Control, TimelineRecording, TimelineRow, load_timelines

if TYPE_CHECKING:
    from labkit.llm import LLM

#: Mode of the step → the graph mode to ask for.
MODES = {"NONE": "NONE", "PIECEWISE": "PIECEWISE", "FULL": "FULL_DECODE_ONLY"}
#: Steps without the profiler in each round; one with it follows, or comes first in every second round.
PLAIN = 5
ORDER = f"{PLAIN} steps without the profiler and one with it, in turns, the one first in every second round"
#: What `labkit record --suite timelines` records.
MODELS, BATCHES, CONTEXT = ("smollm2-135m", "qwen3-0.6b"), (1, 32), 512
SUITE = "timelines"


def _quiet(stage: str, done: int, total: int, detail: str) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class Taken:
    """A timeline with its control, the events of the trace it was read from, and where its zero lies on their clock."""

    row: TimelineRow
    events: list[Any]
    origin_us: float

    @property
    def timeline(self) -> StepTimeline:
        return self.row.timeline


def take_timeline(
    llm: LLM,
    batch: int,
    context: int,
    *,
    eager: StepTimeline | None = None,
    warmup: int = 10,
    rounds: int = 10,
    progress: Progress = _quiet,
) -> StepTimeline:
    """The timeline of a decode step of `batch` requests, in the configuration that `llm` is in; see `take`."""
    return take(llm, batch, context, eager=eager, warmup=warmup, rounds=rounds, progress=progress).timeline


def take(
    llm: LLM,
    batch: int,
    context: int,
    *,
    eager: StepTimeline | None = None,
    requested_mode: str | None = None,
    warmup: int = 10,
    rounds: int = 10,
    progress: Progress = _quiet,
) -> Taken:
    """Drive `llm`: prime `batch` requests with `context` tokens of KV, warm up, time plain and profiled steps in turns.

    Args:
        eager: the timeline of the same batch in mode NONE, to compare kernels with.
        rounds: of `PLAIN` plain steps and a profiled one each.

    Raises:
        TimelineError: nothing can be traced here (`why_not`). ConfigError: batch or context does not fit the engine.
    """
    reason = why_not()
    if reason:
        raise TimelineError("a timeline", reason, "`labkit timeline --from FILE` reads one.")
    _check(llm, batch, context, warmup + rounds * (PLAIN + 1))
    plain: list[tuple[StepReport, float]] = []
    traced: list[tuple[StepReport, list[Any]]] = []
    llm.reset()
    try:
        llm.prime(batch, context, warmup + rounds * (PLAIN + 1) + 2)
        for _ in range(warmup):
            llm.step()
        for number in range(rounds):
            progress("timeline", number, rounds, f"batch {batch}, context {context}")
            if number % 2:
                traced.append(_traced_step(llm))
            plain += [_timed_step(llm) for _ in range(PLAIN)]
            if not number % 2:
                traced.append(_traced_step(llm))
        progress("timeline", rounds, rounds, "done")
    finally:
        llm.reset()
    return _make(llm, plain, traced, batch, context, eager, requested_mode or llm.cudagraph_mode.name)


def _timed_step(llm: LLM) -> tuple[StepReport, float]:
    """A step without the profiler, and its microseconds between two events on an otherwise idle device."""
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    report = llm.step()
    end.record()
    torch.cuda.synchronize()
    return report, begin.elapsed_time(end) * 1e3


def _traced_step(llm: LLM) -> tuple[StepReport, list[Any]]:
    """A step under the profiler, annotated, and the events of its trace."""
    import torch

    reports: list[StepReport] = []

    def work() -> None:
        with torch.profiler.record_function(STEP):
            reports.append(llm.step())

    events = launches.trace(work)
    return reports[0], events


def _check(llm: LLM, batch: int, context: int, steps: int) -> None:
    longest, widest = llm.config.max_model_len or 0, llm.config.max_num_seqs
    if not 1 <= batch <= widest:
        raise ConfigError(f"batch={batch}", f"must lie in 1…max_num_seqs={widest}", "Lower batch.")
    if context < 1 or context + steps + 2 > longest:
        raise ConfigError(
            f"context={context} with {steps} steps",
            f"must be at least 1 and end below max_model_len={longest}",
            "Lower context, or raise max_model_len.",
        )


def _make(
    llm: LLM,
    plain: Sequence[tuple[StepReport, float]],
    traced: Sequence[tuple[StepReport, list[Any]]],
    batch: int,
    context: int,
    eager: StepTimeline | None,
    requested_mode: str,
) -> Taken:
    reports = [report for report, _ in (*plain, *traced)]
    ran = {(r.mode, r.size, r.num_reqs) for r in reports}
    if len(ran) != 1 or reports[0].num_reqs != batch:
        raise LabkitError(
            f"a timeline of {batch} decodes",
            f"the steps ran as {', '.join(f'{mode} {size} with {n} requests' for mode, size, n in sorted(ran))}",
            "Lower batch or context, so that all requests fit into every step.",
        )
    middle, events = sorted(traced, key=lambda pair: pair[0].wall_ms)[(len(traced) - 1) // 2]
    records = {r.kernel_nodes for r in llm.capture_records if (r.mode, r.size) == (middle.mode, middle.size)}
    nodes = records.pop() if middle.graph_launches and len(records) == 1 else None
    compile = llm.config.compilation_mode or "NONE"
    control = Control(
        plain_us=tuple(round(r.wall_ms * 1e3, 1) for r, _ in plain),
        profiled_us=tuple(round(r.wall_ms * 1e3, 1) for r, _ in traced),
        events_us=tuple(round(us, 1) for _, us in plain),
        forward_us=tuple(round(r.device_us, 1) for r, _ in plain if r.device_us is not None),
        graph_nodes=nodes,
    )
    # Padding may choose other kernels, and the compiler fuses: only the same pass can be compared.
    alike = eager is not None and not eager.problems and compile == "NONE" and middle.size == middle.num_tokens
    name = Path(llm.config.model).name
    timeline = from_trace(
        events,
        title=f"{name}, batch {batch}, {'eager' if middle.mode == 'NONE' else middle.mode}",
        mode=middle.mode,
        expected=Expected(
            event_us=statistics.median(control.events_us),
            graphs=None if middle.emulated else middle.graph_launches,
            graph_nodes=nodes,
            eager=eager_counts(eager) if eager is not None and alike else None,
        ),
        phases_us=middle.phases_us,
        forward_us=statistics.median(control.forward_us) if control.forward_us else None,
        notes=(
            f"Of {len(traced)} profiled steps this is the one of middle length; "
            f"{middle.max_seq_len} tokens of KV, {middle.backend}, {llm.config.dtype}.",
            overhead(control.plain_us, control.profiled_us),
        ),
    )
    row = TimelineRow(
        name, llm.config.dtype, middle.backend, compile, requested_mode, batch, context, middle.size, llm.weights,
        control, timeline,
    )  # fmt: skip
    return Taken(row, events, step_of(read_events(events)).begin_us)


# --- several modes -------------------------------------------------------------------------------------------------


def take_modes(
    llm: LLM,
    batch: int,
    context: int,
    modes: Sequence[str] = tuple(MODES),
    *,
    warmup: int = 10,
    rounds: int = 10,
    progress: Progress = _quiet,
) -> tuple[list[Taken], list[Refusal]]:
    """The step in each mode of MODES, eager first where it is asked for, and the modes that cannot run with reasons."""
    taken: list[Taken] = []
    refused: list[Refusal] = []
    eager: StepTimeline | None = None
    for mode in sorted(modes, key=lambda name: list(MODES).index(name)):
        why = _switch(llm, MODES[mode])
        if why:
            compile = llm.config.compilation_mode or "NONE"
            refused.append(Refusal(Path(llm.config.model).name, llm.selection.selected, compile, MODES[mode], why))
            continue
        one = take(
            llm, batch, context, eager=eager, requested_mode=MODES[mode], warmup=warmup, rounds=rounds,
            progress=progress,
        )  # fmt: skip
        if one.timeline.mode == "NONE":
            eager = one.timeline
        taken.append(one)
    return taken, refused


def _switch(llm: LLM, mode: str) -> str:
    try:
        llm.reconfigure(cudagraph_mode=CUDAGraphMode[mode])
    except LabkitError as error:
        return str(error)
    if llm.cudagraph_mode is not CUDAGraphMode[mode]:
        return f"{llm.cudagraph_mode.name} runs instead of {mode}: {'; '.join(llm.mode_trail)}"
    return ""


def timeline_config(config: EngineConfig, batches: Sequence[int]) -> EngineConfig:
    """The settings to take timelines with: a graph of exactly each batch unless sizes are given, no prefix cache."""
    sizes = config.cudagraph_capture_sizes or tuple(sorted(set(batches)))
    return config.replace(
        enable_prefix_caching=False, enforce_eager=False, cudagraph_capture_sizes=sizes,
        max_cudagraph_capture_size=None, cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY,
        max_num_seqs=max(config.max_num_seqs, *batches),
    )  # fmt: skip


def bench_timelines(
    config: EngineConfig,
    batches: Sequence[int],
    context: int,
    modes: Sequence[str] = tuple(MODES),
    *,
    warmup: int = 10,
    rounds: int = 10,
    command: str | None = None,
    progress: Progress = _quiet,
) -> tuple[TimelineRecording, list[Taken]]:
    """Timelines of every batch in every mode, as a recording, and with the traces that they were read from.

    Raises:
        TimelineError: nothing can be traced here.
    """
    reason = why_not()
    if reason:
        raise TimelineError("a timeline", reason, "`labkit timeline --from FILE` reads one.")
    from labkit.llm import LLM

    taken: list[Taken] = []
    refused: dict[tuple[Any, ...], Refusal] = {}
    with LLM(config=timeline_config(config, batches), progress=progress) as llm:
        for batch in batches:
            found, not_run = take_modes(llm, batch, context, modes, warmup=warmup, rounds=rounds, progress=progress)
            taken += found
            refused |= {one.key: one for one in not_run}
        provenance = _origin(command, min((len(one.row.control.plain_us) for one in taken), default=0), llm.device.type)
    return TimelineRecording(provenance, tuple(one.row for one in taken), tuple(refused.values())), taken


def _origin(command: str | None, n: int, device: str) -> Provenance:
    return collect(Kind.LIVE, command, order=ORDER, n=n, primed=True, device=device)


# --- a recording ---------------------------------------------------------------------------------------------------


def record_timelines(
    out: Path,
    *,
    command: str | None = None,
    models: Sequence[str] = MODELS,
    batches: Sequence[int] = BATCHES,
    context: int = CONTEXT,
    rounds: int = 10,
    progress: Progress = _quiet,
    should_stop: ShouldStop | None = None,
) -> TimelineRecording:
    """Take the timelines of every model and batch, eager, PIECEWISE and FULL, into `out`; an interrupted run goes on.

    The file is written after each batch. A batch of which all modes are there, or were refused, is not taken again.

    Raises:
        TimelineError: nothing can be traced here. ProvenanceError: the file was recorded on another machine, version or
            commit. RecordingError: it is damaged or cannot be written.
    """
    reason = why_not()
    if reason:
        raise TimelineError("a recording of timelines", reason, "Record on a machine with a CUDA device.")
    from labkit.llm import LLM

    kept = load_timelines(out) if out.exists() else None
    origin = _origin(command, rounds * PLAIN, "cuda").replace(kind=Kind.RECORDED)
    if kept is not None:
        differences = origin.same_machine(kept.provenance)
        if differences:
            raise ProvenanceError(
                f"resuming {out.name}",
                f"it was recorded elsewhere: {'; '.join(differences)}",
                "Name another file, or remove this one.",
            )
    rows = list(kept.rows) if kept else []
    refused = {one.key: one for one in kept.refused} if kept else {}
    total = len(models) * len(batches)
    for at, model in enumerate(models):
        name = Path(model).name
        left = [batch for batch in batches if not _done(name, batch, rows, refused.values())]
        if not left:
            continue
        config = timeline_config(EngineConfig(model=model, max_model_len=1024), batches)
        with LLM(config=config, progress=progress) as llm:
            for batch in left:
                if should_stop is not None and should_stop():
                    return _so_far(out, origin)
                progress("recording", at * len(batches) + batches.index(batch), total, f"{name}, batch {batch}")
                taken, not_run = take_modes(llm, batch, context, rounds=rounds, progress=progress)
                rows = [row for row in rows if (row.model, row.batch) != (name, batch)]
                rows += [one.row for one in taken]
                refused |= {one.key: one for one in not_run}
                n = min((len(row.control.plain_us) for row in rows), default=0)
                TimelineRecording(origin.replace(n=n), tuple(rows), tuple(refused.values())).save(out)
    progress("recording", total, total, "done")
    return _so_far(out, origin)


def _so_far(out: Path, origin: Provenance) -> TimelineRecording:
    return load_timelines(out) if out.exists() else TimelineRecording(origin, ())


def _done(model: str, batch: int, rows: Sequence[TimelineRow], refused: Any) -> bool:
    # A trace that failed its check may have lost events by chance: its batch is taken again.
    mine = [row for row in rows if (row.model, row.batch) == (model, batch)]
    modes = {row.requested_mode for row in mine if not row.timeline.problems}
    modes |= {one.requested_mode for one in refused if one.model == model}
    return bool(rows) and modes >= set(MODES.values())
