"""One traffic under several schedulings: decodes under way, then long prompts. Refuses to know how waits are computed.

What runs in which step is the same in every run, since prompts arrive by the number of steps and not by the clock; only
times differ. The schedulings take turns on one engine, forward and backward, so that a drift of the machine meets all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.config import EngineConfig, SamplingParams
from labkit.engine.report import StepReport
from labkit.errors import ConfigError, LabkitError
from labkit.graphs.sizes import default_capture_sizes, pad_to
from labkit.measure.provenance import Kind, Provenance, ProvenanceError, collect
from labkit.measure.recordings import stored_samples
from labkit.measure.requests import RequestTimes, prompt_steps, request_times, summarize, waits_in
from labkit.measure.stats import summary
from labkit.measure.storage import MIN_SAMPLES
from labkit.measure.traffic import RequestRecording, RequestRow, load_requests

if TYPE_CHECKING:
    from labkit.llm import LLM

Progress = Callable[[str, int, int, str], None]


def _quiet(stage: str, done: int, total: int, detail: str) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class Scheduling:
    """One way to share steps. chunk: most tokens of one prompt in a step, 0 for no cap."""

    name: str
    prefill_first: bool = False
    chunk: int = 0

    @property
    def changes(self) -> dict[str, Any]:
        """The settings of EngineConfig behind it."""
        return {"prefill_first": self.prefill_first, "long_prefill_token_threshold": self.chunk}


def schedulings(chunks: Sequence[int] = (256, 64)) -> tuple[Scheduling, ...]:
    """Whole prompts first (the older way), whole prompts beside decodes, and chunks of these sizes beside decodes."""
    whole = (Scheduling("prefill_first", prefill_first=True), Scheduling("whole"))
    return (*whole, *(Scheduling(f"chunk {n}", chunk=n) for n in dict.fromkeys(chunks)))


@dataclasses.dataclass(frozen=True)
class Traffic:
    """`decodes` requests at `context` tokens decode; after `lead` steps `prompts` prompts arrive, one before each step.

    A prompt has `prompt` tokens and asks for one token, so that afterwards the decodes are alone again, for `lead`
    steps at least.
    """

    decodes: int = 8
    context: int = 512
    prompt: int = 2048
    prompts: int = 1
    lead: int = 8

    def __post_init__(self) -> None:
        for field, low in (("decodes", 1), ("context", 1), ("prompt", 2), ("prompts", 1), ("lead", 2)):
            value = getattr(self, field)
            if value < low:
                raise ConfigError(f"{field}={value}", f"must be at least {low}", "See Traffic.")

    def tokens(self, ways: Sequence[Scheduling]) -> int:
        """How many tokens every decode asks for, so that the slowest of these schedulings is through well before."""
        smallest = min((way.chunk or self.prompt for way in ways), default=self.prompt)
        return 2 * self.lead + self.prompts + -(-self.prompt // smallest) + 1


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a traffic: the times of every request, and in which steps prompts were computed."""

    decodes: tuple[RequestTimes, ...]
    prompts: tuple[RequestTimes, ...]
    busy: frozenset[int]


def run_traffic(llm: LLM, traffic: Traffic, tokens: int) -> Run:
    """Run it once in the scheduling that `llm` is in. Python's garbage collector rests meanwhile.

    Raises:
        LabkitError: not all of it ran as it should: requests were preempted, decodes did not keep step with each
            other, or prompts were not through when the decodes ended.
    """
    reports: list[StepReport] = []
    arrivals: dict[str, float] = {}
    llm.reset()
    try:
        decodes = llm.prime(traffic.decodes, traffic.context, tokens)
        arrivals |= dict.fromkeys(decodes, time.perf_counter() * 1e3)
        with _no_collection():
            while llm.has_unfinished:
                number = len(reports) - traffic.lead
                if 0 <= number < traffic.prompts:
                    prompt = [(number * 7919 + i * 31) % llm.model_config.vocab_size for i in range(traffic.prompt)]
                    now = time.perf_counter() * 1e3
                    arrivals[llm.add_request(prompt, SamplingParams(max_tokens=1, ignore_eos=True))] = now
                reports.append(llm.step())
    finally:
        llm.reset()
    times = request_times(reports, arrivals)
    waiting, prompts = [times[name] for name in decodes], [times[name] for name in arrivals if name not in decodes]
    _check(reports, waiting, prompts, tokens)
    names = [one.request_id for one in prompts]
    return Run(tuple(waiting), tuple(prompts), frozenset(prompt_steps(reports, times, names)))


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _check(
    reports: Sequence[StepReport], decodes: Sequence[RequestTimes], prompts: Sequence[RequestTimes], tokens: int
) -> None:
    what, try_ = "this traffic", "Raise gpu_memory_utilization or num_gpu_blocks_override, or send less."
    if any(report.preempted for report in reports):
        raise LabkitError(what, "requests were preempted, so the KV cache is too small for all", try_)
    together = {one.token_steps for one in decodes}
    if len(together) != 1 or len(decodes[0].token_ms) != tokens:
        raise LabkitError(what, "the decodes did not get their tokens in the same steps", try_)
    last = decodes[0].token_steps[-1]
    if any(not one.token_steps or one.token_steps[0] >= last for one in prompts):
        raise LabkitError(what, "a prompt was not through when the decodes ended", "Raise max_num_batched_tokens.")


def bench_requests(
    config: EngineConfig,
    traffic: Traffic = Traffic(),  # noqa: B008 — frozen
    ways: Sequence[Scheduling] = schedulings(),  # noqa: B008 — frozen
    *,
    runs: int = 20,
    command: str | None = None,
    progress: Progress = _quiet,
) -> tuple[RequestRecording, list[str]]:
    """The same traffic under every scheduling: one row each, and sentences a reader should see.

    One run of each comes before and is not counted. Prefix caching is off, and `config`'s own scheduling is not used.

    Raises:
        ConfigError: the traffic does not fit the limits of `config`.
        LabkitError: see `run_traffic`.
    """
    from labkit.llm import LLM

    with LLM(config=_config(config, traffic), progress=progress) as llm:
        return bench_requests_on(llm, traffic, ways, runs=runs, command=command, progress=progress)


def bench_requests_on(
    llm: LLM,
    traffic: Traffic,
    ways: Sequence[Scheduling],
    *,
    runs: int = 20,
    command: str | None = None,
    progress: Progress = _quiet,
) -> tuple[RequestRecording, list[str]]:
    """`bench_requests` on an engine that is there already, with prefix caching off; it stays in the last scheduling.

    Raises:
        ConfigError: the traffic does not fit its limits.
        LabkitError: see `run_traffic`.
    """
    if not ways:
        raise ConfigError("schedulings=()", "there is nothing to run", "Name one at least.")
    tokens = traffic.tokens(ways)
    _check_room(llm.config, traffic, tokens)
    taken = _take_turns(llm, traffic, ways, tokens, runs, progress)
    rows = tuple(_row(llm, traffic, way, tokens, taken[way]) for way in ways)
    notes, device = list(llm.notes), llm.device.type
    return RequestRecording(_origin(ways, rows, command, device), rows), notes


def _take_turns(
    llm: LLM, traffic: Traffic, ways: Sequence[Scheduling], tokens: int, runs: int, progress: Progress
) -> dict[Scheduling, list[Run]]:
    taken: dict[Scheduling, list[Run]] = {way: [] for way in ways}
    for number in range(-1, runs):
        for way in ways if number % 2 == 0 else reversed(ways):
            progress("measuring", max(number, 0), runs, f"{way.name}, {traffic.prompt} tokens beside {traffic.decodes}")
            llm.reconfigure(**way.changes)
            one = run_traffic(llm, traffic, tokens)
            if number >= 0:
                taken[way].append(one)
    return taken


def _config(config: EngineConfig, traffic: Traffic) -> EngineConfig:
    """No prefix cache, the engine's ordinary scheduling, and graphs of only the sizes that steps of decodes need."""
    config = config.replace(
        enable_prefix_caching=False, enable_chunked_prefill=True, prefill_first=False, long_prefill_token_threshold=0
    )
    if config.cudagraph_capture_sizes is not None or config.max_cudagraph_capture_size is not None:
        return config
    sizes = default_capture_sizes(config.max_num_seqs, config.max_num_batched_tokens)
    needed = {pad_to(traffic.decodes, sizes), pad_to(traffic.decodes + traffic.prompts, sizes)}
    found = tuple(sorted(size for size in needed if size is not None))
    return config.replace(cudagraph_capture_sizes=found or (max(sizes),))


def _check_room(config: EngineConfig, traffic: Traffic, tokens: int) -> None:
    for needed, field in (
        (traffic.decodes + traffic.prompts, "max_num_seqs"),
        (traffic.decodes + traffic.prompt, "max_num_batched_tokens"),
        (max(traffic.prompt + 2, traffic.context + tokens + 2), "max_model_len"),
    ):
        limit = getattr(config, field) or 0
        if needed > limit:
            raise ConfigError(
                f"{traffic.prompts} prompt(s) of {traffic.prompt} tokens beside {traffic.decodes} decodes at "
                f"{traffic.context}",
                f"needs {field} of at least {needed}, it is {limit}",
                f"Raise {field}, or send less.",
            )


def _row(llm: LLM, traffic: Traffic, way: Scheduling, tokens: int, runs: Sequence[Run]) -> RequestRow:
    from labkit.bench.steps import _backend_version

    config, first = llm.config, runs[0]
    spikes = {waits_in(one.decodes[0], one.busy) for one in runs}
    if len(spikes) != 1:
        raise LabkitError(
            f"scheduling {way.name!r}", "its runs ran different steps", "Measure on an engine of its own."
        )
    ttft = stored_samples(prompt.ttft_ms or 0.0 for one in runs for prompt in one.prompts)
    queue = stored_samples(prompt.queue_ms or 0.0 for one in runs for prompt in one.prompts)
    waits = stored_samples(ms for one in runs for ms in one.decodes[0].itl_ms)
    judged, found = summarize(waits), summary(ttft)
    return RequestRow(
        model=Path(config.model).name, dtype=config.dtype, backend=llm.selection.selected,
        backend_version=_backend_version(llm.selection.selected), requested_mode=llm.cudagraph_mode.name,
        compile=config.compilation_mode or "NONE", weights=llm.weights, scheduling=way.name,
        prefill_first=way.prefill_first, chunk=way.chunk, max_num_batched_tokens=config.max_num_batched_tokens,
        decodes=len(first.decodes), context=traffic.context, prompt=traffic.prompt, prompts=len(first.prompts),
        lead=traffic.lead, tokens=tokens, runs=len(runs), n=len(ttft), samples_ttft_ms=ttft,
        p10_ttft_ms=round(found.p10, 5), p50_ttft_ms=round(found.p50, 5), p90_ttft_ms=round(found.p90, 5),
        samples_queue_ms=queue, samples_itl_ms=waits, during=spikes.pop(), p50_itl_ms=round(judged.p50, 5),
        p99_itl_ms=round(judged.p99, 5), worst_itl_ms=round(judged.worst, 5),
    )  # fmt: skip


def _origin(ways: Sequence[Scheduling], rows: Sequence[RequestRow], command: str | None, device: str) -> Provenance:
    turns = ", ".join(way.name for way in ways)
    order = f"in turns, one run each, forward and backward: {turns}"
    return collect(Kind.LIVE, command, order=order, n=min(row.n for row in rows), primed=True, device=device)


# --- a recording ---------------------------------------------------------------------------------------------------

#: The suite's traffics: one long prompt beside few and many decodes, and a burst of four.
TRAFFICS = (Traffic(8, 512), Traffic(32, 512), Traffic(8, 512, prompts=4))
MODELS = ("smollm2-135m", "qwen3-0.6b")
SUITE_CONFIG = EngineConfig(max_model_len=4096, max_num_seqs=64)


def record_requests(
    out: Path,
    *,
    command: str | None = None,
    device: str = "auto",
    models: Sequence[str] = MODELS,
    traffics: Sequence[Traffic] = TRAFFICS,
    ways: Sequence[Scheduling] = schedulings(),  # noqa: B008 — frozen
    config: EngineConfig = SUITE_CONFIG,
    runs: int = MIN_SAMPLES,
    progress: Progress = _quiet,
    should_stop: Callable[[], bool] | None = None,
) -> RequestRecording:
    """Measure every model × traffic into `out`, saved after each; an interrupted run goes on where it stopped.

    Args:
        should_stop: asked before every traffic; what is done by then is kept.

    Raises:
        ProvenanceError: the file holds rows of another machine, version or commit.
        RecordingError: the file is damaged or cannot be written.
    """
    so_far = load_requests(out) if out.exists() else None
    points = [(model, traffic) for model in models for traffic in traffics]
    for number, (model, traffic) in enumerate(points):
        if so_far is not None and _has(so_far, model, traffic, ways):
            continue
        if should_stop is not None and should_stop():
            break
        progress("recording", number, len(points), f"{model}, {traffic.prompts} × {traffic.prompt} tokens")
        found, _ = bench_requests(
            config.replace(model=model, device=device), traffic, ways, runs=runs, command=command, progress=progress
        )
        so_far = _joined(so_far, found, out.name)
        so_far.save(out)
    if so_far is None:
        raise LabkitError("recording requests", "it was stopped before anything was measured", "Let it run longer.")
    return so_far


def _has(recording: RequestRecording, model: str, traffic: Traffic, ways: Sequence[Scheduling]) -> bool:
    wanted = (Path(model).name, *dataclasses.astuple(traffic))
    rows = [r for r in recording.rows if (r.model, r.decodes, r.context, r.prompt, r.prompts, r.lead) == wanted]
    return {way.name for way in ways} <= {row.scheduling for row in rows}


def _joined(before: RequestRecording | None, new: RequestRecording, name: str) -> RequestRecording:
    origin = new.provenance.replace(kind=Kind.RECORDED)
    if before is None:
        return RequestRecording(origin, new.rows)
    differences = before.provenance.same_machine(origin)
    if differences:
        why = f"it was recorded elsewhere: {'; '.join(differences)}"
        raise ProvenanceError(f"resuming {name}", why, "Name another file, or remove this one.")
    keys = {row.key for row in new.rows}
    kept = tuple(row for row in before.rows if row.key not in keys)
    return RequestRecording(origin.replace(n=min(origin.n, before.provenance.n)), (*kept, *new.rows))
