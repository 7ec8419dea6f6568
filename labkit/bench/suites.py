"""Suites of configurations, measured into one file that can be resumed. Refuses to know how a step is measured.

A suite is data. Its file is written after every row, whole or not at all, so that an interrupted run loses one row.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.bench.attention import AttentionOptions, AttentionShape, backends_to_time, bench_attentions
from labkit.bench.steps import Progress, ShouldStop, Yardsticks, bench_step, measure_yardsticks
from labkit.config import CUDAGraphMode, EngineConfig
from labkit.errors import ConfigError, did_you_mean
from labkit.graphs.dispatcher import decode_sizes
from labkit.graphs.sizes import default_capture_sizes
from labkit.measure.attention import AttentionRecording, load_attention
from labkit.measure.provenance import Kind, ProvenanceError, collect
from labkit.measure.recordings import MIN_SAMPLES, Recording, Row, load

if TYPE_CHECKING:
    from labkit.llm import LLM


@dataclasses.dataclass(frozen=True)
class Suite:
    """What to record: every model × backend × context, eager at `eager_batches`, and in a graph at full decode sizes.

    graph_sizes: None takes every default decode size up to `max_size`. settings: fields of EngineConfig for all.
    """

    name: str
    models: tuple[str, ...]
    backends: tuple[str, ...]
    contexts: tuple[int, ...]
    eager_batches: tuple[int, ...]
    max_size: int
    graph_sizes: tuple[int, ...] | None = None
    steps: int = 60
    warmup: int = 5
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def num_rows(self) -> int:
        """How many rows there will be where every backend can be captured."""
        config = self.config(self.models[0], self.backends[0])
        sizes = self.graph_sizes or default_capture_sizes(
            config.max_num_seqs, config.max_num_batched_tokens, max_size=self.max_size
        )
        points = len(sizes) + len(self.eager_batches)
        return len(self.models) * len(self.backends) * len(self.contexts) * points

    def config(self, model: str, backend: str) -> EngineConfig:
        """The engine's settings for one model and backend, graphs first: their buffers are the larger ones."""
        return EngineConfig(
            model=model,
            attention_backend=backend,
            enable_prefix_caching=False,
            cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY,
            cudagraph_capture_sizes=self.graph_sizes,
            max_cudagraph_capture_size=self.max_size if self.graph_sizes is None else None,
            **self.settings,
        )


SUITES = {
    suite.name: suite
    for suite in (
        # 1,024 tokens at most: TORCH_SDPA can be captured while its gather over that length stays below a limit.
        Suite(
            "slice", ("smollm2-135m", "qwen3-0.6b"), ("TRITON_ATTN", "TORCH_SDPA"), (512,),
            (1, 2, 4, 8, 16, 32, 64, 128), 256, settings={"max_model_len": 1024, "max_num_seqs": 256},
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

    Raises:
        ProvenanceError: the file holds rows of another machine, version or commit.
        RecordingError: the file is damaged or cannot be written.
        BackendError: a backend of the suite cannot serve here.
    """
    suite = find_suite(suite) if isinstance(suite, str) else suite
    order = f"suite {suite.name}: model, backend, graph sizes ascending, then eager batches ascending"
    provenance = collect(Kind.RECORDED, command, order=order, n=suite.steps, primed=True, device=device)
    rows: dict[tuple[Any, ...], Row] = {}
    if out.exists():
        before = load(out)
        differences = provenance.same_machine(before.provenance)
        if differences:
            raise ProvenanceError(
                f"resuming {out.name}",
                f"it was recorded elsewhere: {'; '.join(differences)}",
                "Name another file, or remove this one.",
            )
        rows = {row.key: row for row in before.rows}
    total = suite.num_rows()
    for model in suite.models:
        with contextlib.ExitStack() as stack:
            llm: LLM | None = None
            yardsticks: Yardsticks | None = None
            for backend in suite.backends:
                config = suite.config(model, backend).replace(device=device)
                if llm is None:
                    from labkit.llm import LLM

                    llm = stack.enter_context(LLM(config=config, progress=progress))
                    yardsticks = measure_yardsticks(llm, progress)
                else:
                    # Weights stay; the first backend's graphs are no longer needed and give way to the second's.
                    llm.reconfigure(attention_backend=backend, cudagraph_mode=config.cudagraph_mode)
                for mode, batch, context in _points(suite, llm):
                    key = (Path(model).name, backend, mode.name, batch, context)
                    if key in rows:
                        continue
                    if should_stop is not None and should_stop():
                        return Recording(provenance, tuple(rows.values()))
                    if llm.cudagraph_mode is not mode:
                        llm.reconfigure(cudagraph_mode=mode)
                    progress(
                        "recording", len(rows), total, f"{model} {backend} {mode.name} batch {batch} context {context}"
                    )
                    row = bench_step(
                        llm, batch, context, steps=suite.steps, warmup=suite.warmup, requested_mode=mode.name,
                        yardsticks=yardsticks,
                    )  # fmt: skip
                    rows[key] = row
                    Recording(provenance, tuple(rows.values())).save(out)
    return Recording(provenance, tuple(rows.values()))


def _points(suite: Suite, llm: LLM) -> Iterator[tuple[CUDAGraphMode, int, int]]:
    """Every (mode, batch, context) of one model and backend; no graph rows where the backend cannot be captured."""
    full, widest = CUDAGraphMode.FULL_DECODE_ONLY, llm.config.max_num_seqs
    if llm.cudagraph_mode is full:
        sizes = [size for size in decode_sizes(llm.capture_sizes, widest) if size <= widest]
        for context in suite.contexts:
            yield from ((full, size, context) for size in sizes)
    for context in suite.contexts:
        yield from ((CUDAGraphMode.NONE, batch, context) for batch in suite.eager_batches if batch <= widest)


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
