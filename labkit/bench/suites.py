"""Suites of configurations, measured into one file that can be resumed. Refuses to know how a step is measured.

A suite is data. Its file is written after every row, whole or not at all, so that an interrupted run loses one row.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.bench.attention import AttentionOptions, AttentionShape, backends_to_time, bench_attentions
from labkit.bench.steps import Progress, ShouldStop, Yardsticks, bench_step, measure_yardsticks
from labkit.config import CUDAGraphMode, EngineConfig
from labkit.errors import ConfigError, LabkitError, did_you_mean
from labkit.graphs.dispatcher import decode_sizes
from labkit.graphs.sizes import default_capture_sizes
from labkit.measure.attention import AttentionRecording, load_attention
from labkit.measure.provenance import Kind, Provenance, ProvenanceError, collect
from labkit.measure.recordings import MIN_SAMPLES, Recording, Refusal, Row, Setup, load

if TYPE_CHECKING:
    from labkit.llm import LLM


@dataclasses.dataclass(frozen=True)
class Suite:
    """What to record: every model × backend × compile × context, in each graph mode and eager.

    modes: graph modes, each at every graph size that a full decode batch can have. eager_batches: batches of mode NONE.
    graph_sizes: None takes every default decode size up to `max_size`. settings: fields of EngineConfig for all.
    """

    name: str
    models: tuple[str, ...]
    backends: tuple[str, ...]
    contexts: tuple[int, ...]
    eager_batches: tuple[int, ...]
    max_size: int
    graph_sizes: tuple[int, ...] | None = None
    modes: tuple[str, ...] = ("FULL_DECODE_ONLY",)
    compile: tuple[str, ...] = ("NONE",)
    steps: int = 60
    warmup: int = 5
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def num_rows(self) -> int:
        """How many rows there will be where every backend serves and can be captured in every mode."""
        config = self.config(self.models[0], self.backends[0])
        sizes = self.graph_sizes or default_capture_sizes(
            config.max_num_seqs, config.max_num_batched_tokens, max_size=self.max_size
        )
        points = len(sizes) * len(self.modes) + len(self.eager_batches)
        return len(self.models) * len(self.backends) * len(self.compile) * len(self.contexts) * points

    def config(self, model: str, backend: str, compile: str = "NONE") -> EngineConfig:
        """The engine's settings for one model and backend, graphs first: their buffers are the larger ones."""
        return EngineConfig(
            model=model,
            attention_backend=backend,
            enable_prefix_caching=False,
            cudagraph_mode=CUDAGraphMode[self.modes[0]],
            cudagraph_capture_sizes=self.graph_sizes,
            max_cudagraph_capture_size=self.max_size if self.graph_sizes is None else None,
            compilation_mode=compile,
            **self.settings,
        )


_MODELS = ("smollm2-135m", "qwen3-0.6b")
# 1,024 tokens at most: TORCH_SDPA can be captured while its gather over that length stays below a limit.
_LIMITS = {"max_model_len": 1024, "max_num_seqs": 256}

SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            "slice", _MODELS, ("TRITON_ATTN", "TORCH_SDPA"), (512,), (1, 2, 4, 8, 16, 32, 64, 128), 256,
            settings=_LIMITS,
        ),
        # What compiles kernels of its own at first use comes last: an interrupted run has the others.
        Suite(
            "backends", _MODELS, ("TRITON_ATTN", "FLASH_ATTN", "TORCH_SDPA", "FLASHINFER", "FLEX_ATTENTION"), (512,),
            (1, 8, 32, 128), 256, (1, 2, 4, 8, 16, 32, 64, 128, 256), steps=MIN_SAMPLES, settings=_LIMITS,
        ),
        Suite(
            "modes", _MODELS, ("TRITON_ATTN",), (512,), (1, 8, 32, 128), 128, (1, 8, 32, 128),
            modes=("FULL", "PIECEWISE"), compile=("NONE", "VLLM_COMPILE"), steps=MIN_SAMPLES, settings=_LIMITS,
        ),
        # Small enough for a CPU in a test.
        Suite(
            "smoke", ("tiny-llama",), ("TORCH_SDPA",), (16,), (1, 2), 4, (1, 2, 4), steps=MIN_SAMPLES, warmup=1,
            settings={"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64},
        ),
    )
}  # fmt: skip


def find_suite(name: str) -> Suite:
    """A suite by name; ConfigError with the closest name otherwise."""
    if name not in SUITES:
        raise ConfigError(f"suite={name!r}", "there is no suite of that name", did_you_mean(name, SUITES))
    return SUITES[name]


def record(
    suite: str | Suite,
    out: Path,
    *,
    command: str | None = None,
    device: str = "auto",
    progress: Progress = lambda stage, done, total, detail: None,
    should_stop: ShouldStop | None = None,
) -> Recording:
    """Measure a suite into `out`. Rows that the file already holds are kept if machine and code are the same.

    A backend that cannot serve a model here, or a mode that it cannot run, is noted with its reason and passed over.
    So is one that fails in another way, in what is returned only: a later run tries it again.

    Raises:
        ProvenanceError: the file holds rows of another machine, version or commit.
        RecordingError: the file is damaged or cannot be written.
    """
    suite = find_suite(suite) if isinstance(suite, str) else suite
    order = (
        f"suite {suite.name}: model, backend, compile, graph modes with sizes ascending, then eager batches ascending"
    )
    provenance = collect(Kind.RECORDED, command, order=order, n=suite.steps, primed=True, device=device)
    log = _Log(out, provenance)
    total = suite.num_rows()
    for model in suite.models:
        with contextlib.ExitStack() as stack:
            llm: LLM | None = None
            yardsticks: Yardsticks | None = None
            for backend, compile in itertools.product(suite.backends, suite.compile):
                if not any(log.is_open(key) for key in _keys(suite, model, backend, compile)):
                    continue
                if should_stop is not None and should_stop():
                    return log.recording
                config = suite.config(model, backend, compile).replace(device=device)
                progress("recording", len(log.rows), total, f"{model} {backend} compile {compile}")
                try:
                    if llm is None:
                        from labkit.llm import LLM

                        llm = stack.enter_context(LLM(config=config, progress=progress))
                    else:
                        # Weights stay; the graphs that were are no longer needed and give way.
                        llm.reconfigure(
                            attention_backend=backend, compilation_mode=compile, cudagraph_mode=config.cudagraph_mode
                        )
                except Exception as error:  # a kernel library that cannot be built fails in its own way
                    log.refuse(Refusal(Path(model).name, backend, compile, "", _said(error)), error)
                    continue
                if (llm.config.compilation_mode or "NONE") != compile:
                    log.refuse(Refusal(Path(model).name, backend, compile, "", _last_note(llm)))
                    continue
                yardsticks = yardsticks or measure_yardsticks(llm, progress)
                for mode, batch, context in _points(suite, llm, log, (model, backend, compile)):
                    if not log.is_open((Path(model).name, backend, compile, mode.name, batch, context, 0)):
                        continue
                    if should_stop is not None and should_stop():
                        return log.recording
                    where = f"{model} {backend} compile {compile} {mode.name} batch {batch} context {context}"
                    progress("recording", len(log.rows), total, where)
                    try:
                        row = bench_step(
                            llm, batch, context, steps=suite.steps, warmup=suite.warmup, requested_mode=mode.name,
                            yardsticks=yardsticks,
                        )  # fmt: skip
                    except Exception as error:
                        log.refuse(Refusal(Path(model).name, backend, compile, mode.name, _said(error)), error)
                        continue
                    log.add(row)
    return log.recording


class _Log:
    """The rows and refusals so far, written to the file after each."""

    def __init__(self, out: Path, provenance: Provenance) -> None:
        self._out, self._provenance = out, provenance
        self.rows: dict[tuple[Any, ...], Row] = {}
        self._refused: dict[tuple[Any, ...], Refusal] = {}
        self._setups: dict[tuple[Any, ...], Setup] = {}
        self._failed: dict[tuple[Any, ...], Refusal] = {}
        if not out.exists():
            return
        before = load(out)
        differences = provenance.same_machine(before.provenance)
        if differences:
            raise ProvenanceError(
                f"resuming {out.name}",
                f"it was recorded elsewhere: {'; '.join(differences)}",
                "Name another file, or remove this one.",
            )
        self.rows = {row.key: row for row in before.rows}
        self._refused = {one.key: one for one in before.refused}
        self._setups = {one.key: one for one in before.setups}

    @property
    def recording(self) -> Recording:
        """All that is known, what failed in this run included."""
        return self._recording((*self._refused.values(), *self._failed.values()))

    def _recording(self, refused: Iterable[Refusal]) -> Recording:
        return Recording(self._provenance, tuple(self.rows.values()), tuple(refused), tuple(self._setups.values()))

    def is_open(self, key: tuple[Any, ...]) -> bool:
        """Whether a row is neither measured nor refused yet, itself or with its whole backend."""
        refused = {**self._refused, **self._failed}
        return key not in self.rows and key[:4] not in refused and (*key[:3], "") not in refused

    def add(self, row: Row) -> None:
        self.rows[row.key] = row
        self._save()

    def ready(self, one: Setup) -> None:
        """Keep the first: what an interrupted run has compiled is in the cache when it goes on."""
        self._setups.setdefault(one.key, one)

    def refuse(self, one: Refusal, error: Exception | None = None) -> None:
        """Pass over what cannot run; in the file only where the engine itself gave the reason."""
        kept = error is None or isinstance(error, LabkitError)
        (self._refused if kept else self._failed)[one.key] = one
        self._save()

    def _save(self) -> None:
        self._recording(self._refused.values()).save(self._out)


def _keys(suite: Suite, model: str, backend: str, compile: str) -> Iterator[tuple[Any, ...]]:
    """The key of every row that this model, backend and compilation mode may get."""
    config = suite.config(model, backend)
    sizes = suite.graph_sizes or default_capture_sizes(
        config.max_num_seqs, config.max_num_batched_tokens, max_size=suite.max_size
    )
    for context in suite.contexts:
        for mode, batches in (*((mode, sizes) for mode in suite.modes), ("NONE", suite.eager_batches)):
            for batch in batches:
                if batch <= config.max_num_seqs:
                    yield (Path(model).name, backend, compile, mode, batch, context, 0)


def _points(suite: Suite, llm: LLM, log: _Log, where: tuple[str, str, str]) -> Iterator[tuple[CUDAGraphMode, int, int]]:
    """Every (mode, batch, context), the engine switched to the mode first; a mode it does not get is noted."""
    widest = llm.config.max_num_seqs
    for name in suite.modes:
        mode, why, failure = CUDAGraphMode[name], "", None
        try:
            llm.reconfigure(cudagraph_mode=mode)
        except Exception as error:
            why, failure = _said(error), error
        if failure or llm.cudagraph_mode is not mode:
            why = why or f"{llm.cudagraph_mode.name} runs instead: {'; '.join(llm.mode_trail)}"
            log.refuse(Refusal(Path(where[0]).name, where[1], where[2], name, why), failure)
            continue
        log.ready(_setup(llm, where, name))
        sizes = llm.capture_sizes
        if mode.mixed_mode() is CUDAGraphMode.NONE:
            sizes = decode_sizes(sizes, widest)
        for context in suite.contexts:
            yield from ((mode, size, context) for size in sizes if size <= widest)
    llm.reconfigure(cudagraph_mode=CUDAGraphMode.NONE)
    for context in suite.contexts:
        yield from ((CUDAGraphMode.NONE, batch, context) for batch in suite.eager_batches if batch <= widest)


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, LabkitError) else f"{type(error).__name__}: {error}"


def _setup(llm: LLM, where: tuple[str, str, str], requested_mode: str) -> Setup:
    records, report = llm.capture_records, llm.compile_report
    return Setup(
        Path(where[0]).name, where[1], where[2], requested_mode, len(records), sum(r.graphs for r in records),
        round(sum(r.ms for r in records), 2), round(sum(r.mib for r in records), 2),
        round(report.total_ms, 1) if report else 0.0, bool(report and report.from_cache),
    )  # fmt: skip


def _last_note(llm: LLM) -> str:
    return llm.notes[-1] if llm.notes else "the engine does not compile this model here"


# --- attention calls -----------------------------------------------------------------------------------------------

#: The suite of attention calls: `labkit record --suite attention`.
ATTENTION = "attention"


def attention_points() -> list[tuple[AttentionShape, AttentionOptions]]:
    """What the suite of attention calls measures, for 32 query and 8 KV heads of 128, on every backend that can.

    Decodes over batch and context (up to a million tokens of KV), prompts without a past, a mixed batch in one call and
    in two, numbers of splits where there is little else to do in parallel, and the price of batch invariance.
    """
    plain, shape = AttentionOptions(), AttentionShape
    contexts, batches = (512, 2048, 8192, 32_768), (1, 8, 32, 128)
    decodes = [shape.decode(b, c) for c in contexts for b in batches if b * c <= 1 << 20]
    prefills = [shape.prefill(1, 1024), shape.prefill(8, 1024), shape.prefill(1, 8192)]
    mixed = [shape.mixed(32, 1024, 512), shape.mixed(8, 8192, 2048)]
    points = [(one, plain) for one in (*decodes, *prefills, *mixed)]
    points += [(one, AttentionOptions(split_mixed_batches=True)) for one in mixed]
    points += [
        (shape.decode(1, context), AttentionOptions(num_splits=splits))
        for context in (2048, 32_768)
        for splits in (1, 2, 4, 8, 16, 32, 64)
    ]
    invariant = [shape.decode(1, 2048), shape.decode(32, 2048), prefills[1], mixed[0]]
    return points + [(one, AttentionOptions(batch_invariant=True)) for one in invariant]


def record_attention(
    out: Path,
    *,
    command: str | None = None,
    device: str = "auto",
    points: Sequence[tuple[AttentionShape, AttentionOptions]] | None = None,
    samples: int = 60,
    progress: Progress = lambda stage, done, total, detail: None,
) -> AttentionRecording:
    """Measure attention calls of every backend into `out`, saved point by point; an interrupted run goes on.

    Args:
        points: None takes `attention_points()`.

    Raises:
        ProvenanceError: the file holds rows of another machine, version or commit.
        RecordingError: the file is damaged or cannot be written.
    """
    recording = bench_attentions(
        backends_to_time(device), attention_points() if points is None else points, device=device, samples=samples,
        command=command, keep=load_attention(out) if out.exists() else None, save=lambda so_far: so_far.save(out),
        progress=progress,
    )  # fmt: skip
    recording.save(out)
    return recording
