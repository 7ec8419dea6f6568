"""Runs one scheduled step: dispatch, fill, prepare, then replay or eager. Refuses to know what becomes of a request.

It owns the buffers, the KV cache and the graphs. Graphs outlive a toggle: they are kept under a key that names
everything baked into them, so switching a backend back finds its captures again.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import torch

from labkit.attention.interface import AttentionBackend
from labkit.attention.metadata import AttentionMetadata
from labkit.attention.op import ForwardContext, attend, forward_context
from labkit.config import CUDAGraphMode as Mode
from labkit.engine.inputs import StepInputs, StepView
from labkit.engine.report import CaptureRecord
from labkit.errors import CaptureError
from labkit.graphs.capture import BreakAt, CapturedGraph, GraphCapturer
from labkit.graphs.dispatcher import BatchDescriptor, GraphDispatcher, GraphKey
from labkit.models.decoder import Decoder
from labkit.paging.kv_cache import KVCache
from labkit.scheduling.scheduler import ScheduledStep

Progress = Callable[[str, int, int, str], None]
Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclasses.dataclass
class ForwardResult:
    """Logits of the requests that sample, in order, `[num_sampling, vocab]`, and how the step ran.

    `logits` is a fresh tensor, never a graph's buffer.
    """

    logits: torch.Tensor
    descriptor: BatchDescriptor
    phases_us: dict[str, float]
    emulated: bool
    graph_launches: int
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None


class Runner:
    """One model on one device.

    Args:
        decoder: the model.
        kv: the cache it reads and writes.
        inputs: the persistent buffers, sized for the largest step.
        max_model_len: longest context, baked into graphs.
        max_hidden_rows: tokens of the largest captured size, the height of the shared output buffer.
    """

    def __init__(
        self, decoder: Decoder, kv: KVCache, inputs: StepInputs, max_model_len: int, max_hidden_rows: int, scale: float
    ) -> None:
        self.decoder, self.kv, self.inputs = decoder, kv, inputs
        self.max_model_len, self.scale, self.device = max_model_len, scale, inputs.device
        self.backend: AttentionBackend
        self.dispatcher: GraphDispatcher
        self.capturer = GraphCapturer(self.device)
        self.model_forward: Forward = decoder.forward
        self._key: tuple[object, ...] = ()
        self._graphs: dict[tuple[tuple[object, ...], GraphKey], CapturedGraph] = {}
        self.max_hidden_rows = max_hidden_rows
        self._hidden = torch.zeros(
            (max_hidden_rows, decoder.config.hidden_size), dtype=kv.data.dtype, device=self.device
        )
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if self.device.type == "cuda":
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))

    # --- what runs -------------------------------------------------------------------------------------------------

    def use(
        self,
        backend: AttentionBackend,
        key: tuple[object, ...],
        dispatcher: GraphDispatcher,
        forward: Forward | None = None,
    ) -> None:
        """Switch backend, dispatcher and forward pass. `key` names everything about them that a graph bakes in.

        `forward(token_ids, positions)` is a compiled pass; None takes the model's own.
        """
        self.backend, self._key, self.dispatcher = backend, key, dispatcher
        self.model_forward = forward or self.decoder.forward

    def missing_graphs(self) -> list[GraphKey]:
        """Graphs that the dispatcher may ask for and that are not captured yet, in capture order."""
        return [key for key in self.dispatcher.capture_order() if (self._key, key) not in self._graphs]

    def capture_missing(self, progress: Progress | None = None) -> list[CaptureRecord]:
        """Capture what is missing. On failure nothing of this call is kept, and the engine can run without graphs.

        Raises:
            CaptureError: with the size, the cause and the knob.
        """
        todo, records, made = self.missing_graphs(), [], []
        if not todo:
            return []
        try:
            with self.capturer.session(), torch.inference_mode():
                for done, key in enumerate(todo):
                    if progress:
                        progress("capturing", done, len(todo), f"{key.mode} size {key.size}")
                    graph = self._capture(key)
                    self._graphs[self._key, key] = graph
                    made.append(key)
                    records.append(graph.record)
        except CaptureError:
            for key in made:
                del self._graphs[self._key, key]
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            raise
        if progress:
            progress("capturing", len(todo), len(todo), "done")
        return records

    def records(self) -> list[CaptureRecord]:
        """One record per graph that the current dispatcher can hit, largest first."""
        found = (self._graphs.get((self._key, key)) for key in self.dispatcher.capture_order())
        return [graph.record for graph in found if graph is not None]

    def drop_graphs(self) -> None:
        """Forget every capture (their addresses are about to change)."""
        self._graphs.clear()

    def dummy_run(self, num_tokens: int, num_reqs: int) -> torch.Tensor:
        """An eager step in the worst shape that writes nothing; returns logits `[num_reqs, vocab]`. For profiling."""
        longest = min(num_tokens - num_reqs + 1, self.max_model_len)
        view = self.inputs.fill_dummy(num_tokens, num_reqs, longest, longest)
        view.metadata.for_graph = False
        self.backend.prepare(view.metadata)
        hidden = self._forward(view, view.metadata)
        return self.decoder.compute_logits(hidden[:num_reqs])

    def _capture(self, key: GraphKey) -> CapturedGraph:
        if key.mode == "PIECEWISE":
            return self._capture_segments(key)
        max_query_len = key.size // key.num_reqs if key.uniform else key.size
        view = self.inputs.fill_dummy(key.size, key.num_reqs, max_query_len, self.max_model_len)
        self.backend.prepare(view.metadata)
        # A graph must not see this call's metadata object change under it: it closes over its own copy.
        metadata = dataclasses.replace(view.metadata)
        return self.capturer.capture(key.mode, key.size, lambda: self._forward(view, metadata), self._hidden)

    def _capture_segments(self, key: GraphKey) -> CapturedGraph:
        """Attention stays outside: only token ids, positions and slots are baked in, at addresses that depend on the
        number of tokens alone, so one capture serves any number of requests.
        """
        longest = min(key.size - key.num_reqs + 1, self.max_model_len)
        view = self.inputs.fill_dummy(key.size, key.num_reqs, longest, longest)
        view.metadata.for_graph = False
        self.backend.prepare(view.metadata)
        metadata = dataclasses.replace(view.metadata)

        def forward(break_at: BreakAt | None) -> torch.Tensor:
            if break_at is None:
                return self.model_forward(view.token_ids, view.positions)
            return self._forward(view, metadata, break_at)

        return self.capturer.capture_segments(
            key.size, lambda: self._forward(view, metadata), forward, attend, self._hidden
        )

    def _forward(self, view: StepView, metadata: AttentionMetadata, break_at: BreakAt | None = None) -> torch.Tensor:
        with forward_context(self._context(metadata, break_at)):
            return self.model_forward(view.token_ids, view.positions)

    def _context(self, metadata: AttentionMetadata, break_at: BreakAt | None = None) -> ForwardContext:
        return ForwardContext(self.backend, metadata, self.kv.key_caches, self.kv.value_caches, self.scale, break_at)

    # --- one step --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute(self, step: ScheduledStep) -> ForwardResult:
        """Run one step. Host phases are timed here; nothing waits for the device."""
        clock, phases = time.perf_counter, {}
        t0 = clock()
        descriptor = self.dispatcher.dispatch(step.num_tokens, step.num_reqs, step.is_uniform_decode)
        graph = self._graphs.get((self._key, descriptor.key)) if descriptor.key else None
        if graph is None and descriptor.mode is not Mode.NONE:
            descriptor = BatchDescriptor(Mode.NONE, step.num_tokens, step.num_reqs)
        t1 = clock()
        view = self.inputs.fill(step, descriptor.size, descriptor.num_reqs)
        t2 = clock()
        metadata = view.metadata
        if descriptor.mode is Mode.PIECEWISE:
            metadata.num_tokens = step.num_tokens
        elif graph is not None and descriptor.key is not None:
            key = descriptor.key
            metadata.for_graph = True
            metadata.max_query_len = key.size // key.num_reqs if key.uniform else key.size
            metadata.max_seq_len = self.max_model_len
        self.backend.prepare(metadata)
        t3 = clock()
        if self._events:
            self._events[0].record()
        if graph is not None and descriptor.mode is Mode.PIECEWISE:
            with forward_context(self._context(metadata)):
                graph.replay()
            hidden = graph.output
        elif graph is not None:
            graph.replay()
            hidden = graph.output
        else:
            hidden = self._forward(view, metadata)
        if self._events:
            self._events[1].record()
        logits = self._logits(hidden, view, step)
        t4 = clock()
        phases["dispatch"], phases["inputs"] = (t1 - t0) * 1e6, (t2 - t1) * 1e6
        phases["prepare"], phases["launch"] = (t3 - t2) * 1e6, (t4 - t3) * 1e6
        emulated, launched = (graph.emulated, graph.num_graphs) if graph is not None else (False, 0)
        return ForwardResult(logits, descriptor, phases, emulated, launched, self._events)

    def _logits(self, hidden: torch.Tensor, view: StepView, step: ScheduledStep) -> torch.Tensor:
        sampling = sum(item.samples for item in step.requests)
        if step.is_uniform_decode and sampling == step.num_reqs == step.num_tokens:
            rows = hidden[:sampling]  # every token is the last of its request
        else:
            rows = hidden.index_select(0, view.sample_rows[:sampling])
        return self.decoder.compute_logits(rows)
