"""How long one decode step takes, eager and under graphs, in one run. Refuses to know how a step works.

The context is *primed* (KV filled with seeded values), the modes take turns, and two yardsticks of the same run stand
beside them: what the launches alone cost the host, and the time the memory needs for the bytes a step must read.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from labkit.bench.comparison import BARE
from labkit.config import CUDAGraphMode, EngineConfig, SamplingParams
from labkit.engine.report import StepReport
from labkit.errors import ConfigError, LabkitError
from labkit.graphs.sizes import default_capture_sizes, pad_to
from labkit.measure import clocks, launches, limits
from labkit.measure.launches import LaunchCount
from labkit.measure.provenance import Kind, collect
from labkit.measure.recordings import Captured, Recording, Row, Setup, stored_samples
from labkit.measure.stats import summary

if TYPE_CHECKING:
    from labkit.llm import LLM

T = TypeVar("T")
Progress = Callable[[str, int, int, str], None]
ShouldStop = Callable[[], bool]

#: The graph mode unless another is asked for: the engine's own default for a model that is not compiled.
GRAPH_MODE = CUDAGraphMode.FULL_DECODE_ONLY
#: How often each of the two modes of `bench` has its turn.
ROUNDS = 2


def _quiet(stage: str, done: int, total: int, detail: str) -> None:
    pass


class DoesNotFit(LabkitError):
    """A batch whose KV at this context is larger than the cache."""


@dataclasses.dataclass(frozen=True)
class Yardsticks:
    """Measured once per run: host microseconds per launch by kind (empty on a CPU) and copy bandwidth in GB/s."""

    launch_cost_us: dict[str, float]
    copy_gb_s: float


def measure_yardsticks(llm: LLM, progress: Progress = _quiet) -> Yardsticks:
    """The yardsticks of the machine `llm` runs on, in its dtype and hidden size."""
    progress("yardsticks", 0, 2, "launch cost")
    cost: dict[str, float] = {}
    if llm.device.type == "cuda":
        cost = launches.launch_cost_us(
            llm.device, dtype=llm.config.dtype, hidden=llm.model_config.hidden_size, triton=_triton_probe(llm.device)
        )
        if "triton" in cost:
            cost[BARE] = round(clocks.host_us(_bare_triton_probe(llm.device), device=llm.device), 3)
    progress("yardsticks", 1, 2, "copy bandwidth")
    return Yardsticks(cost, limits.copy_bandwidth_gb_s(llm.device))


def _triton_probe(device: Any) -> Callable[[], Any] | None:
    """A call of one small Triton operator the way a layer makes it, or None where Triton cannot.

    Like the torch and GEMM probes it is a whole call: form looked up, result allocated, kernel launched.
    """
    import torch

    try:
        from labkit.models.kernels import silu_and_mul

        gate_up = torch.zeros((1, 128), dtype=torch.bfloat16, device=device)
        silu_and_mul(gate_up)
        return lambda: silu_and_mul(gate_up)
    except Exception:  # no Triton for this platform, or one that does not work: that kind then has no cost
        return None


def _bare_triton_probe(device: Any) -> Callable[[], Any]:
    """A launch and nothing else: two pointers, form and result ready."""
    import torch

    from labkit.attention.kernels.probe import launch_once

    return launch_once(torch.zeros(8, device=device))


# --- a decode step -------------------------------------------------------------------------------------------------


def measure_steps(
    llm: LLM,
    batch: int,
    context: int,
    *,
    steps: int = 50,
    warmup: int = 10,
    progress: Progress = _quiet,
    should_stop: ShouldStop | None = None,
    count: bool = True,
    chunk: int = 0,
    before_measuring: Callable[[], None] | None = None,
    filled: bool = False,
) -> tuple[list[StepReport], LaunchCount]:
    """Decode steps of `batch` requests, the first with `context` tokens of KV each, and the launches of one more.

    The warm-up runs before `context` is reached (where it is long enough) and is not among the reports. Fewer than
    `steps` reports come back only when `should_stop` said yes.

    Args:
        chunk: makes every step a mixed one: beside the decodes it runs a new prompt of that many tokens, whole.
        before_measuring: called once between the warm-up and the first measured step.
        filled: the whole cache was filled before (`LLM.fill_kv`), so that priming need not fill its part again.

    Raises:
        ConfigError: batch, context or chunk does not fit the engine's limits.
        DoesNotFit: the KV cache is too small for the batch at this context.
    """
    before = min(warmup, context - 1)
    longest, widest = llm.config.max_model_len or 0, llm.config.max_num_seqs
    last = context - before + warmup + steps + 2
    if context < 1 or last > longest:
        raise ConfigError(
            f"context={context} with {steps} steps",
            f"must be at least 1 and end below max_model_len={longest} (it ends at {last})",
            "Lower context or steps, or raise max_model_len.",
        )
    if not 1 <= batch <= widest:
        raise ConfigError(
            f"batch={batch}", f"must lie in 1…max_num_seqs={widest}", "Lower batch or raise max_num_seqs."
        )
    if chunk:
        _check_chunk(llm, batch, chunk)
    _check_room(llm, batch, last)
    prompts = itertools.count()
    num_reqs = batch + bool(chunk)

    def step() -> StepReport:
        report = llm.step()
        if (report.num_reqs, report.num_tokens) != (num_reqs, batch + chunk):
            raise DoesNotFit(
                f"a step of {num_reqs} requests" + (f" and {batch + chunk} tokens" if chunk else ""),
                f"only {report.num_reqs} of them ran" + (f", with {report.num_tokens} tokens" if chunk else "")
                + ", so the KV cache is too small for all",
                "Raise gpu_memory_utilization or num_gpu_blocks_override, or lower batch or context.",
            )  # fmt: skip
        return report

    def add_chunk() -> None:
        if chunk:
            first, vocab = next(prompts), llm.model_config.vocab_size
            llm.add_request([(first * 7919 + i * 31) % vocab for i in range(chunk)], SamplingParams(max_tokens=1))

    reports: list[StepReport] = []
    counted = LaunchCount(None, reason="not counted")
    llm.reset()
    try:
        llm.prime(batch, context - before, warmup + steps + 2, fill=not filled)
        for i in range(warmup + steps):
            if should_stop is not None and should_stop():
                return reports, counted
            if i == warmup and before_measuring is not None:
                before_measuring()
            add_chunk()
            report = step()
            if i >= warmup:
                reports.append(report)
            progress("measuring", max(0, i + 1 - warmup), steps, f"batch {batch}, context {context}")
        if count:
            add_chunk()
            counted = launches.count(llm.step)
    finally:
        llm.reset()
    return reports, counted


def _check_room(llm: LLM, batch: int, tokens: int) -> None:
    """Raise DoesNotFit where the cache has too few pages for `batch` requests of so many tokens; before any is primed.

    A step that lacks pages would notice too, but only after the whole batch was primed.
    """
    held, page = llm.memory.get("kv", 0), llm.config.block_size or 0
    if not held or not page:
        return
    page_bytes = page * llm.model_config.kv_bytes_per_token(limits.ITEMSIZE[llm.config.dtype])
    pages, needed = held // page_bytes - 1, batch * -(-tokens // page)  # the null page holds nobody's tokens
    if needed > pages:
        gib = (page_bytes * needed / 2**30, held / 2**30)
        raise DoesNotFit(
            f"batch {batch} with up to {tokens:,} tokens each",
            f"does not fit: it needs {gib[0]:.1f} GiB of KV, and the cache has {gib[1]:.1f} GiB",
            "Lower batch or context, or raise gpu_memory_utilization.",
        )


def _check_chunk(llm: LLM, batch: int, chunk: int) -> None:
    config = llm.config
    for needed, field in (
        (batch + 1, "max_num_seqs"), (batch + chunk, "max_num_batched_tokens"), (chunk + 1, "max_model_len"),
    ):  # fmt: skip
        limit = getattr(config, field) or 0
        if needed > limit:
            raise ConfigError(
                f"a chunk of {chunk} tokens beside {batch} decodes",
                f"needs {field} of at least {needed}, it is {limit}",
                f"Raise {field}, or take less of either.",
            )


def make_row(
    llm: LLM,
    reports: Sequence[StepReport],
    *,
    batch: int,
    context: int,
    requested_mode: str | None = None,
    counted: LaunchCount | None = None,
    yardsticks: Yardsticks | None = None,
    primed: bool = True,
    chunk: int = 0,
    rounds: int = 1,
) -> Row:
    """One row from the reports of steps of one configuration; without yardsticks there is no floor.

    `rounds`: the reports are of so many equal rounds, each taken beside a round of what the row is compared with.

    A mixed step computes where a decode waits for memory, so that one with a `chunk` has no floor and no GB/s either.

    Raises:
        LabkitError: there are no reports, or they did not all run in the same mode and size.
    """
    if not reports:
        raise LabkitError("a row", "no step was measured", "Let at least one step run.")
    ran = {(r.mode, r.size) for r in reports}
    if len(ran) != 1:
        raise LabkitError(
            f"a row of {len(reports)} steps",
            f"they ran in {len(ran)} configurations ({', '.join(f'{m} {s}' for m, s in sorted(ran))}), a row holds one",
            "Measure decode steps of one batch.",
        )
    ((mode, size),) = ran
    config, counted = llm.config, counted or LaunchCount(None)
    samples = stored_samples(r.wall_ms for r in reports)
    found = summary(samples)
    kv_tokens = statistics.fmean(r.max_seq_len for r in reports)
    num_bytes = limits.step_bytes(llm.model_config, config.dtype, batch, kv_tokens)
    answer = llm.selection.candidate(reports[0].backend)
    version = next((f"FA{v.version}: {v.provider}" for v in answer.versions if v.usable), None)
    on_device = [r.device_us for r in reports if r.device_us is not None]
    asked = requested_mode or llm.cudagraph_mode.name
    return Row(
        model=Path(config.model).name,
        dtype=config.dtype,
        backend=reports[0].backend,
        backend_version=version or _backend_version(reports[0].backend),
        requested_mode=asked,
        mode=mode,
        size=size,
        batch=batch,
        context=context,
        query_len=(reports[0].num_tokens - chunk) // batch,
        compile=config.compilation_mode or "NONE",
        primed=primed,
        p10_ms=round(found.p10, 5),
        p50_ms=round(found.p50, 5),
        p90_ms=round(found.p90, 5),
        n=found.n,
        samples_ms=samples,
        host_us=round(statistics.median(r.host_us for r in reports), 2),
        device_us=round(statistics.median(on_device), 2) if on_device else None,
        launches=counted.launches,
        graph_launches=counted.graph_launches if counted.launches is not None else reports[0].graph_launches,
        launch_cost_us=dict(yardsticks.launch_cost_us) if yardsticks else {},
        gb_s=None if chunk else round(num_bytes / found.p50 / 1e6, 2),
        floor_ms=round(limits.floor_ms(num_bytes, yardsticks.copy_gb_s), 5) if yardsticks and not chunk else None,
        tok_s=round((batch + bool(chunk)) / found.p50 * 1e3, 2),
        peak_mib=round(llm.memory.get("peak", 0) / 2**20, 1),
        phases_us={name: round(us, 2) for name, us in _median_phases(reports).items()},
        launches_by_kind=dict(counted.by_kind),
        emulated=reports[0].emulated,
        weights=llm.weights,
        chunk=chunk,
        rounds=rounds if found.n % rounds == 0 else 1,  # fewer samples than asked for: somebody stopped
    )


def _median_phases(reports: Sequence[StepReport]) -> dict[str, float]:
    names = {name: None for r in reports for name in r.phases_us}
    return {name: statistics.median(r.phases_us.get(name, 0.0) for r in reports) for name in names}


def _backend_version(name: str) -> str | None:
    from labkit.attention import registry

    return registry.availability(name).version if registry.BACKENDS.get(name) else None


def bench_step(
    llm: LLM,
    batch: int,
    context: int,
    *,
    steps: int = 50,
    warmup: int = 10,
    progress: Progress = _quiet,
    should_stop: ShouldStop | None = None,
    requested_mode: str | None = None,
    yardsticks: Yardsticks | None = None,
    filled: bool = False,
    counted: LaunchCount | None = None,
) -> Row:
    """`measure_steps` and `make_row` in one call, in the configuration that `llm` is in.

    `counted`: the launches of this step where they are known; None counts them.
    """
    reports, found = measure_steps(
        llm, batch, context, steps=steps, warmup=warmup, progress=progress, should_stop=should_stop,
        count=counted is None, filled=filled,
    )  # fmt: skip
    return make_row(
        llm,
        reports,
        batch=batch,
        context=context,
        requested_mode=requested_mode,
        counted=counted or found,
        yardsticks=yardsticks,
    )


def setup_of(llm: LLM, where: tuple[str, str, str], requested_mode: str) -> Setup:
    """What getting ready for the configuration that `llm` is in took. `where`: model, backend, compile."""
    records, report = llm.capture_records, llm.compile_report
    return Setup(
        *where, requested_mode, len(records), sum(r.graphs for r in records), round(sum(r.ms for r in records), 2),
        round(sum(r.mib for r in records), 2), round(report.total_ms, 1) if report else 0.0,
        bool(report and report.from_cache),
    )  # fmt: skip


def captures_of(llm: LLM, where: tuple[str, str, str], requested_mode: str) -> list[Captured]:
    """The same, size by size: what the graphs of each took."""
    return [
        Captured(*where, requested_mode, r.mode, r.size, r.graphs, round(r.ms, 2), round(r.mib, 3), r.kernel_nodes)
        for r in llm.capture_records
    ]


def bench(
    config: EngineConfig,
    batches: Sequence[int] = (1,),
    contexts: Sequence[int] = (512,),
    *,
    size: int | None = None,
    steps: int = 100,
    warmup: int = 10,
    command: str | None = None,
    progress: Progress = _quiet,
    should_stop: ShouldStop | None = None,
    observe: Callable[[LLM], None] | None = None,
) -> tuple[Recording, list[str]]:
    """Step latency of every batch × context, eager and in the graph mode of `config` (FULL_DECODE_ONLY by default).

    The two modes take turns, graph – eager – eager – graph, half of the samples each time, so that a drift of the
    machine meets both. Prefix caching is off. Only the graphs that the batches need are captured, unless `config` has
    a list of sizes.

    Args:
        size: the one capture size to use; None pads as the engine's default list does.
        observe: called at the end with the engine, in the graph mode, to ask it for more.

    Returns:
        The rows, and sentences a reader should see (a mode that was lowered, say).
    """
    from labkit.llm import LLM

    config = config.replace(enable_prefix_caching=False)
    modes = bench_modes(config)
    sizes = _sizes_for(config, batches, size)
    if modes[0] is not CUDAGraphMode.NONE:
        config = config.replace(cudagraph_mode=modes[0], cudagraph_capture_sizes=sizes)
    elif not config.enforce_eager:
        config = config.replace(cudagraph_mode=CUDAGraphMode.NONE)
    rows, turns = [], [mode for order in rotations(modes, ROUNDS) for mode in order]
    half = -(-steps // ROUNDS)
    with LLM(config=config, progress=progress) as llm:
        yardsticks = measure_yardsticks(llm, progress)
        for batch, context in itertools.product(batches, contexts):
            reports: dict[CUDAGraphMode, list[StepReport]] = collections.defaultdict(list)
            counted: dict[CUDAGraphMode, LaunchCount] = {}
            for mode in turns:
                if len(modes) > 1:
                    llm.reconfigure(cudagraph_mode=mode)
                found, counts = measure_steps(
                    llm, batch, context, steps=half, warmup=warmup, progress=progress, should_stop=should_stop,
                    count=mode not in counted,
                )  # fmt: skip
                reports[mode] += found
                counted.setdefault(mode, counts)
            for mode in modes:
                if len(modes) > 1:
                    llm.reconfigure(cudagraph_mode=mode)
                rows.append(
                    make_row(
                        llm,
                        reports[mode],
                        batch=batch,
                        context=context,
                        requested_mode=mode.name,
                        counted=counted[mode],
                        yardsticks=yardsticks,
                        rounds=ROUNDS,
                    )  # fmt: skip
                )
        notes = [*llm.notes, *launch_notes(counted.values())]
        device = llm.device.type
        if observe is not None:
            llm.reconfigure(cudagraph_mode=modes[0])
            observe(llm)
    order = "for each batch and context: " + " ".join(mode.name for mode in turns)
    provenance = collect(
        Kind.LIVE, command, order=order, n=min(row.n for row in rows), primed=True, device=device
    )  # fmt: skip
    return Recording(provenance, tuple(rows)), notes


def rotations(items: Sequence[T], rounds: int) -> list[list[T]]:
    """`rounds` orders, each starting one item later than the one before: of two, A B B A A B B A …"""
    return [[*items[i % len(items) :], *items[: i % len(items)]] for i in range(rounds)]


def bench_modes(config: EngineConfig) -> list[CUDAGraphMode]:
    """The modes that `bench` measures: graphs and NONE, or NONE alone where graphs were declined."""
    if config.enforce_eager or config.cudagraph_mode is CUDAGraphMode.NONE or config.optimization_level == 0:
        return [CUDAGraphMode.NONE]
    asked = config.cudagraph_mode
    return [asked if isinstance(asked, CUDAGraphMode) else GRAPH_MODE, CUDAGraphMode.NONE]


def _sizes_for(config: EngineConfig, batches: Sequence[int], size: int | None) -> tuple[int, ...]:
    """The capture sizes that the batches run in."""
    if size is not None:
        return (size,)
    if config.cudagraph_capture_sizes is not None:
        return tuple(config.cudagraph_capture_sizes)
    default = default_capture_sizes(config.max_num_seqs, config.max_num_batched_tokens)
    found = {pad_to(batch, default) for batch in batches}
    return tuple(sorted(s for s in found if s is not None)) or (default[-1],)


def launch_notes(counts: Iterable[LaunchCount]) -> list[str]:
    """What a reader should know about counts of launches: why there are none, or that they are uncertain."""
    reasons = {f"Launches were not counted: {c.reason}." for c in counts if c.launches is None and c.reason}
    lost = ["The launch trace lost a kernel; its kinds are uncertain."] if any(not c.complete for c in counts) else []
    return sorted(reasons) + lost
