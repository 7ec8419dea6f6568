"""Suites measured into files, resumed where they stopped. Refuses to know what a suite is for.

A run may end after any row: killed, out of time, or done. What is in the file or its journal is not measured again.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.bench.attention import AttentionOptions, AttentionShape, backends_to_time, bench_attentions
from labkit.bench.forms import FormBench, forms_config, open_forms
from labkit.bench.journal import Journal
from labkit.bench.steps import (
    DoesNotFit,
    Progress,
    ShouldStop,
    Yardsticks,
    bench_step,
    captures_of,
    measure_yardsticks,
    setup_of,
)
from labkit.bench.suites import FormSuite, Key, Suite, attention_points, find_suite
from labkit.config import CUDAGraphMode
from labkit.errors import LabkitError
from labkit.graphs.dispatcher import decode_sizes
from labkit.measure.attention import AttentionRecording, load_attention
from labkit.measure.launches import LaunchCount
from labkit.measure.provenance import Kind, collect
from labkit.measure.recordings import Recording, Refusal

if TYPE_CHECKING:
    from labkit.llm import LLM


def _quiet(stage: str, done: int, total: int, detail: str) -> None:
    pass


def record(
    suite: str | Suite | FormSuite,
    out: Path,
    *,
    command: str | None = None,
    device: str = "auto",
    progress: Progress = _quiet,
    should_stop: ShouldStop | None = None,
) -> Recording:
    """Measure a suite into `out`. Rows that the file already holds are kept if machine and code are the same.

    A backend that cannot serve a model here, a mode that it cannot run, or a point whose KV does not fit is noted with
    its reason and passed over. So is one that fails in another way, in what is returned only: a later run tries it
    again.

    Args:
        should_stop: asked before every row (every point of a suite of forms); what is done by then is kept.

    Raises:
        ProvenanceError: the file holds rows of another machine, version or commit.
        RecordingError: the file is damaged or cannot be written.
    """
    suite = find_suite(suite) if isinstance(suite, str) else suite
    if isinstance(suite, FormSuite):
        order = f"suite {suite.name}: models as listed, batches and contexts ascending; the forms of a point take turns"
    else:
        order = (
            f"suite {suite.name}: model, backend, compile, graph modes with contexts and sizes ascending, then eager "
            "batches ascending"
        )
    provenance = collect(Kind.RECORDED, command, order=order, n=suite.steps, primed=True, device=device)
    log = Journal(out, provenance)
    try:
        if isinstance(suite, FormSuite):
            _Forms(suite, log, device, progress, should_stop).run()
        else:
            _Steps(suite, log, device, progress, should_stop).run()
    finally:
        log.save()
    return log.recording


def missing(suite: str | Suite | FormSuite, recording: Recording) -> int:
    """How many rows (or captures) of a suite a recording neither holds nor refuses."""
    suite = find_suite(suite) if isinstance(suite, str) else suite
    if isinstance(suite, FormSuite):
        return sum(
            len(open_forms(recording, Path(model).name, suite.forms, batch, context))
            for model, batch, context in itertools.product(suite.models, suite.batches, suite.contexts)
        )
    rows, ready = {row.key for row in recording.rows}, {one.key for one in recording.setups}
    refused = {one.key for one in recording.refused}
    keys = (
        key
        for model, backend, compile in itertools.product(suite.models, suite.backends, suite.compile)
        for key in suite.keys(model, backend, compile)
    )
    return sum(not (key in rows or (key[4] == 0 and key[:4] in ready) or refused & _refusals(key)) for key in keys)


def _refusals(key: Key) -> set[tuple[Any, ...]]:
    """The keys of refusals that close a row: of its backend, of its mode, of itself."""
    return {(*key[:3], "", 0, 0), (*key[:4], 0, 0), key[:6]}


class _Stopped(Exception):
    """Somebody asked to stop before the next row."""


class _Run:
    """What both kinds of run share: a suite, its log, and whom to tell or ask."""

    def __init__(
        self, suite: Any, log: Journal, device: str, progress: Progress, should_stop: ShouldStop | None
    ) -> None:
        self.suite, self.log, self.device, self._progress = suite, log, device, progress
        self._should_stop, self._total = should_stop, suite.num_rows()

    def run(self) -> None:
        with contextlib.suppress(_Stopped):
            for model in self.suite.models:
                with contextlib.ExitStack() as stack:
                    self.model(model, stack)

    def model(self, model: str, stack: contextlib.ExitStack) -> None:
        raise NotImplementedError

    def check(self) -> None:
        """Stop here if that was asked for."""
        if self._should_stop is not None and self._should_stop():
            raise _Stopped

    def tell(self, where: str) -> None:
        self._progress("recording", len(self.log.rows), self._total, where)

    def load(self, config: Any, stack: contextlib.ExitStack) -> LLM:
        from labkit.llm import LLM

        return stack.enter_context(LLM(config=config, progress=self._progress))


class _Steps(_Run):
    """Every configuration by itself, one row after another."""

    suite: Suite

    def model(self, model: str, stack: contextlib.ExitStack) -> None:
        llm: LLM | None = None
        yardsticks: Yardsticks | None = None
        suite, log, name = self.suite, self.log, Path(model).name
        for backend, compile in itertools.product(suite.backends, suite.compile):
            if not any(map(log.is_open, suite.keys(model, backend, compile))):
                continue
            self.check()
            config = suite.config(model, backend, compile).replace(device=self.device)
            self.tell(f"{model} {backend} compile {compile}")
            try:
                if llm is None:
                    llm = self.load(config, stack)
                    if suite.contexts:
                        llm.fill_kv()
                        yardsticks = measure_yardsticks(llm, self._progress)
                else:
                    # Weights stay; the graphs that were are no longer needed and give way.
                    llm.drop_graphs()
                    self.switch(
                        llm, attention_backend=backend, compilation_mode=compile, cudagraph_mode=config.cudagraph_mode
                    )
            except Exception as error:  # a kernel library that cannot be built fails in its own way
                log.refuse(Refusal(name, backend, compile, "", _said(error)), error)
                continue
            if (llm.config.compilation_mode or "NONE") != compile:
                log.refuse(Refusal(name, backend, compile, "", _last_note(llm)))
                continue
            for mode, batch, context in self.points(llm, (name, backend, compile)):
                key = (name, backend, compile, mode.name, batch, context, 0)
                if not log.is_open(key):
                    continue
                self.check()
                self.tell(f"{model} {backend} compile {compile} {mode.name} batch {batch} context {context}")
                try:
                    row = bench_step(
                        llm, batch, context, steps=suite.steps, warmup=suite.warmup, requested_mode=mode.name,
                        yardsticks=yardsticks, filled=True, counted=counted_before(log.rows.values(), key, llm),
                    )  # fmt: skip
                except Exception as error:
                    point = (batch, context) if isinstance(error, LabkitError) else (0, 0)
                    log.refuse(Refusal(name, backend, compile, mode.name, _said(error), *point), error)
                    continue
                log.add(row)

    def switch(self, llm: LLM, **changes: Any) -> None:
        """Reconfigure, and fill the KV cache again where that made a new one."""
        report = llm.reconfigure(**changes)
        if self.suite.contexts and "kv_cache" in report.rebuilt_ms:
            llm.fill_kv()

    def points(self, llm: LLM, where: tuple[str, str, str]) -> Iterator[tuple[CUDAGraphMode, int, int]]:
        """Every (mode, batch, context), the engine switched to the mode first; a mode it does not get is noted.

        Nothing is captured for a mode that has no open row.
        """
        suite, log, widest = self.suite, self.log, llm.config.max_num_seqs
        wanted = {key[3] for key in suite.keys(where[0], where[1], where[2]) if log.is_open(key)}
        for name in (name for name in suite.modes if name in wanted):
            self.check()
            mode, why, failure = CUDAGraphMode[name], "", None
            try:
                if llm.cudagraph_mode is not mode:
                    llm.drop_graphs()
                    self.switch(llm, cudagraph_mode=mode)
            except Exception as error:
                why, failure = _said(error), error
            if failure or llm.cudagraph_mode is not mode:
                why = why or f"{llm.cudagraph_mode.name} runs instead: {'; '.join(llm.mode_trail)}"
                log.refuse(Refusal(*where, name, why), failure)
                continue
            log.ready(setup_of(llm, where, name), captures_of(llm, where, name))
            sizes: Sequence[int] = llm.capture_sizes
            if mode.mixed_mode() is CUDAGraphMode.NONE:
                sizes = decode_sizes(sizes, widest)
            for context in suite.contexts:
                yield from ((mode, size, context) for size in sizes if size <= widest)
        if "NONE" in wanted:
            llm.drop_graphs()
            self.switch(llm, cudagraph_mode=CUDAGraphMode.NONE)
            for context in suite.contexts:
                yield from ((CUDAGraphMode.NONE, batch, context) for batch in suite.eager_batches if batch <= widest)


def counted_before(rows: Any, key: Key, llm: LLM) -> LaunchCount | None:
    """Launches of this graph as counted at another context; None where they have to be counted.

    A FULL graph holds everything that depends on the context, and the steps around it are the same to a copy of the
    block table, which recurs with the page size. Attention outside a graph may split its keys by the context: that is
    always counted. So is a step of another batch: the head's GEMM may be another one.
    """
    page = llm.config.block_size or 1
    for row in rows:
        same = row.mode == "FULL" and row.size == row.batch and row.launches is not None
        if same and (*row.key[:5], row.chunk) == (*key[:5], 0) and (row.context - key[5]) % page == 0:
            return LaunchCount(row.launches, row.graph_launches, by_kind=dict(row.launches_by_kind))
    return None


class _Forms(_Run):
    """A step in several forms that take turns; a point is measured whole."""

    suite: FormSuite

    def model(self, model: str, stack: contextlib.ExitStack) -> None:
        suite, log, name = self.suite, self.log, Path(model).name
        points = list(itertools.product(suite.batches, suite.contexts))
        if not any(open_forms(log.recording, name, suite.forms, *point) for point in points):
            return
        self.check()
        self.tell(model)
        llm = self.load(
            forms_config(suite.config(model).replace(device=self.device), suite.forms, suite.batches), stack
        )
        found = FormBench(llm, suite.forms, self._progress)
        for one in found.refused:
            log.refuse(one)
        for setup, captures in found.setups:
            log.ready(setup, captures)
        for batch, context in points:
            if not open_forms(log.recording, name, suite.forms, batch, context):
                continue
            self.check()
            self.tell(f"{model} batch {batch} context {context}")
            try:
                results = found.measure(batch, context, steps=suite.steps, warmup=suite.warmup)
            except DoesNotFit as error:
                for form in suite.forms:
                    log.refuse(Refusal(name, found.backend, form.compile, form.mode, str(error), batch, context), error)
                continue
            for result in results:
                log.add(result.row)


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, LabkitError) else f"{type(error).__name__}: {error}"


def _last_note(llm: LLM) -> str:
    return llm.notes[-1] if llm.notes else "the engine does not compile this model here"


# --- attention calls -----------------------------------------------------------------------------------------------


def record_attention(
    out: Path,
    *,
    command: str | None = None,
    device: str = "auto",
    points: Sequence[tuple[AttentionShape, AttentionOptions]] | None = None,
    samples: int = 60,
    progress: Progress = _quiet,
    should_stop: Callable[[], bool] | None = None,
) -> AttentionRecording:
    """Measure attention calls of every backend into `out`, saved point by point; an interrupted run goes on.

    Args:
        points: None takes `attention_points()`.
        should_stop: asked after every point.

    Raises:
        ProvenanceError: the file holds rows of another machine, version or commit.
        RecordingError: the file is damaged or cannot be written.
    """

    def save(so_far: AttentionRecording) -> None:
        so_far.save(out)
        if should_stop is not None and should_stop():
            raise _Stopped

    try:
        recording = bench_attentions(
            backends_to_time(device), attention_points() if points is None else points, device=device, samples=samples,
            command=command, keep=load_attention(out) if out.exists() else None, save=save, progress=progress,
        )  # fmt: skip
    except _Stopped:
        return load_attention(out)
    recording.save(out)
    return recording
