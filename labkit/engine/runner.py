"""Runs one scheduled step: dispatch, fill, prepare, then replay or eager. Refuses to know what becomes of a request.

It owns the buffers, the KV cache and the graphs. Graphs outlive a toggle: they are kept under a key that names
everything baked into them, so switching a backend back finds its captures again.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from labkit.attention.groups import AttentionGroups
from labkit.attention.interface import AttentionBackend
from labkit.attention.metadata import AttentionMetadata
from labkit.attention.op import ForwardContext, forward_context, resume
from labkit.config import CUDAGraphMode as Mode
from labkit.engine.inputs import StepInputs, StepView
from labkit.engine.report import CaptureRecord
from labkit.errors import CaptureError, LabkitError
from labkit.graphs.capture import BreakAt, CapturedGraph, GraphCapturer, explained
from labkit.graphs.dispatcher import BatchDescriptor, GraphDispatcher, GraphKey
from labkit.graphs.whole import stays
from labkit.models.decoder import Decoder
from labkit.paging.kv_cache import KVCache
from labkit.scheduling.scheduler import ScheduledStep

Progress = Callable[[str, int, int, str], None]
Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

#: What a graph reads at fixed addresses: replacing one of these while graphs live would leave them dangling.
_BAKED_IN = frozenset({"decoder", "kv", "inputs", "_hidden"})


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
        debug: before each replay, check that everything the graph reads is where it was at capture.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        inputs: StepInputs,
        max_model_len: int,
        max_hidden_rows: int,
        scale: float,
        debug: bool = False,
    ) -> None:
        self.decoder, self.kv, self.inputs, self.debug = decoder, kv, inputs, debug
        self.max_model_len, self.scale, self.device = max_model_len, scale, inputs.device
        self.attention: AttentionGroups
        self.dispatcher: GraphDispatcher
        self.capturer = GraphCapturer(self.device)
        self.model_forward: Forward = decoder.forward
        self._whole: Callable[[], Forward] | None = None
        self._workspaces: list[tuple[str, weakref.ref[torch.Tensor]]] = []
        self._key: tuple[object, ...] = ()
        self._graphs: dict[tuple[tuple[object, ...], GraphKey], CapturedGraph] = {}
        self.max_hidden_rows = max_hidden_rows
        self._hidden = torch.zeros(
            (max_hidden_rows, decoder.config.hidden_size), dtype=kv.data.dtype, device=self.device
        )
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if self.device.type == "cuda":
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _BAKED_IN and self.__dict__.get("_graphs"):
            raise CaptureError(
                f"replacing {name.strip('_')} of a runner",
                f"{len(self._graphs)} captured graphs read it at its address",
                "Copy into it, or call drop_graphs() first; LLM.reconfigure does what is needed.",
            )
        super().__setattr__(name, value)

    # --- what runs -------------------------------------------------------------------------------------------------

    def use(
        self,
        attention: AttentionGroups,
        key: tuple[object, ...],
        dispatcher: GraphDispatcher,
        forward: Forward | None = None,
        whole: Callable[[], Forward] | None = None,
    ) -> None:
        """Switch backends, dispatcher and forward pass. `key` names everything about them that a graph bakes in.

        `forward(token_ids, positions)` is a compiled pass; None takes the model's own. `whole`, where given, makes the
        pass that torch.compile turns into a FULL graph by itself, a fresh one for each size.
        """
        self.attention, self._key, self.dispatcher = attention, key, dispatcher
        self.model_forward, self._whole = forward or self.decoder.forward, whole

    @property
    def backend(self) -> AttentionBackend:
        """The attention backend; of a model with layers of several kinds, the instance of the first kind."""
        return self.attention.backends[0]

    def missing_graphs(self) -> list[GraphKey]:
        """Graphs that the dispatcher may ask for and that are not captured yet, in capture order."""
        return [key for key in self.dispatcher.capture_order() if (self._key, key) not in self._graphs]

    def capture_missing(
        self, progress: Progress | None = None, only: Sequence[GraphKey] | None = None
    ) -> list[CaptureRecord]:
        """Capture what is missing, or of that `only` some. After a failure, graphs of a kind that was complete stay.

        Raises:
            CaptureError: with the kind, the size, the cause and the knob.
            CompileError: the pass that torch.compile should have captured could not be compiled.
        """
        todo = [key for key in self.missing_graphs() if only is None or key in only]
        records: list[CaptureRecord] = []
        if not todo:
            return []
        key = todo[0]
        try:
            with self.capturer.session(), torch.inference_mode():
                for done, key in enumerate(todo):
                    if progress:
                        progress("capturing", done, len(todo), f"{key.mode} size {key.size}")
                    with explained(key.mode, key.size):
                        graph = self._capture(key)
                    self._graphs[self._key, key] = graph
                    records.append(graph.record)
                    self.kv.locked = True
                    if key.mode == "FULL":
                        self._remember_workspaces()
            self._check_workspaces()
        except LabkitError as error:
            if isinstance(error, CaptureError):
                error.mode = error.mode or key.mode
            for made in todo:
                if made.mode == key.mode:
                    self._graphs.pop((self._key, made), None)
            if not self._graphs or self.replaced():
                self.drop_graphs()
            raise
        if progress:
            progress("capturing", len(todo), len(todo), "done")
        return records

    def graphs(self) -> list[CapturedGraph]:
        """The graphs that the current dispatcher can hit, largest first."""
        found = (self._graphs.get((self._key, key)) for key in self.dispatcher.capture_order())
        return [graph for graph in found if graph is not None]

    def records(self) -> list[CaptureRecord]:
        """One record per graph that the current dispatcher can hit, largest first."""
        return [graph.record for graph in self.graphs()]

    @property
    def graph_mib(self) -> float:
        """Device memory that recording took, of all graphs that are kept, in MiB."""
        return sum(graph.record.mib for graph in self._graphs.values())

    def drop_graphs(self) -> None:
        """Forget every capture (their addresses are about to change)."""
        self._graphs.clear()
        self._workspaces.clear()
        self.kv.locked = False
        if not self.capturer.emulated:
            self.capturer = GraphCapturer(self.device)  # a pool whose graphs are all gone cannot be filled again

    # --- where graphs read -----------------------------------------------------------------------------------------

    def _addresses(self, view: StepView, mode: str) -> dict[str, int]:
        """Where everything lies that a graph of this shape reads; between pieces attention reads the step's own."""
        metadata = view.metadata
        inputs = {
            "token_ids": view.token_ids, "positions": view.positions, "slot_mapping": metadata.slot_mapping,
        }  # fmt: skip
        if mode == "FULL":
            inputs |= {
                "query_start_loc": metadata.query_start_loc, "seq_lens": metadata.seq_lens,
                "block_table": metadata.block_table,
            }  # fmt: skip
        found = {name: tensor.data_ptr() for name, tensor in inputs.items()}
        for layer, (keys, values) in enumerate(zip(self.kv.key_caches, self.kv.value_caches, strict=True)):
            found[f"key cache of layer {layer}"] = keys.data_ptr()
            found[f"value cache of layer {layer}"] = values.data_ptr()
        return found | self._weights()

    def _weights(self) -> dict[str, int]:
        return {f"weight {name}": tensor.data_ptr() for name, tensor in self.decoder.tensors().items()}

    def replaced(self) -> list[str]:
        """What graphs read and what was replaced since instead of written to: weights, and buffers of a backend."""
        now = self._weights()
        moved = {n for graph in self._graphs.values() for n, where in now.items() if graph.addresses[n] != where}
        return [name for name, ref in self._workspaces if ref() is None] + sorted(moved)

    def _check_addresses(self, graph: CapturedGraph, view: StepView) -> None:
        now = self._addresses(view, graph.record.mode)
        moved = [name for name, where in graph.addresses.items() if now.get(name) != where]
        if moved:
            raise CaptureError(
                f"a replay of mode {graph.record.mode}, size {graph.record.size}",
                f"{moved[0]} is not where it was at capture"
                + (f", nor are {len(moved) - 1} more" if len(moved) > 1 else ""),
                "Copy into what a graph reads instead of replacing it, or capture again with LLM.reconfigure.",
                graph.record.mode,
            )
        self._check_workspaces()

    def _remember_workspaces(self) -> None:
        """The tensors that the backends keep: a graph may read them, so their memory must stay."""
        known = {id(ref()) for _, ref in self._workspaces}
        for backend in self.attention.backends:
            for name, value in vars(backend).items():
                if isinstance(value, torch.Tensor) and id(value) not in known:
                    self._workspaces.append((f"{type(backend).__name__}.{name}", weakref.ref(value)))

    def _check_workspaces(self) -> None:
        """Raise CaptureError when memory that graphs may read was given back by an attention backend."""
        gone = [name for name, ref in self._workspaces if ref() is None]
        if gone:
            raise CaptureError(
                f"replacing {gone[0]}",
                "captured graphs read it, and its memory was given back",
                "Size the buffer before the first capture, or keep the old one as long as the graphs.",
            )

    def dummy_run(self, num_tokens: int, num_reqs: int) -> torch.Tensor:
        """An eager step in the worst shape that writes nothing; returns logits `[num_reqs, vocab]`. For profiling."""
        longest = min(num_tokens - num_reqs + 1, self.max_model_len)
        view = self.inputs.fill_dummy(num_tokens, num_reqs, longest, longest)
        view.metadata.for_graph = False
        self.attention.prepare(view.metadata)
        hidden = self._forward(view, view.metadata)
        return self.decoder.compute_logits(hidden[:num_reqs])

    def _capture(self, key: GraphKey) -> CapturedGraph:
        before = self._allocated()
        graph, view = self._capture_segments(key) if key.mode == "PIECEWISE" else self._capture_full(key)
        if self._whole is None:  # a graph of its own frees all it allocates, so the backend's buffers for it are left
            kept = max(0, self._allocated() - before) / 2**20
            graph.record = dataclasses.replace(graph.record, mib=graph.record.mib + kept)
        graph.addresses = self._addresses(view, key.mode)
        return graph

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def _capture_full(self, key: GraphKey) -> tuple[CapturedGraph, StepView]:
        max_query_len = key.size // key.num_reqs if key.uniform else key.size
        view = self.inputs.fill_dummy(key.size, key.num_reqs, max_query_len, self.max_model_len)
        self.attention.prepare(view.metadata)
        # A graph must not see this call's metadata object change under it: it closes over its own copy.
        metadata = dataclasses.replace(view.metadata)
        if self._whole is None:
            return self.capturer.capture(key.mode, key.size, lambda: self._forward(view, metadata), self._hidden), view
        self._forward(view, metadata)  # what a kernel allocates once must not end up in torch's own graph memory
        whole, context = self._whole(), self._context(metadata)
        stays(view.token_ids)
        stays(view.positions)

        def forward() -> torch.Tensor:
            with forward_context(context):
                return whole(view.token_ids, view.positions)

        return self.capturer.capture_compiled(key.mode, key.size, forward, self._hidden), view

    def _capture_segments(self, key: GraphKey) -> tuple[CapturedGraph, StepView]:
        """Attention stays outside: only token ids, positions and slots are baked in, at addresses that depend on the
        number of tokens alone, so one capture serves any number of requests.
        """
        longest = min(key.size - key.num_reqs + 1, self.max_model_len)
        view = self.inputs.fill_dummy(key.size, key.num_reqs, longest, longest)
        view.metadata.for_graph = False
        self.attention.prepare(view.metadata)
        metadata = dataclasses.replace(view.metadata)

        def forward(break_at: BreakAt | None) -> torch.Tensor:
            if break_at is None:
                return self.model_forward(view.token_ids, view.positions)
            return self._forward(view, metadata, break_at)

        graph = self.capturer.capture_segments(
            key.size, lambda: self._forward(view, metadata), forward, resume, self._hidden
        )
        return graph, view

    def _forward(self, view: StepView, metadata: AttentionMetadata, break_at: BreakAt | None = None) -> torch.Tensor:
        with forward_context(self._context(metadata, break_at)):
            return self.model_forward(view.token_ids, view.positions)

    def _context(self, metadata: AttentionMetadata, break_at: BreakAt | None = None) -> ForwardContext:
        attention, kv = self.attention, self.kv
        return ForwardContext(
            attention.backends[0], metadata, kv.key_caches, kv.value_caches, self.scale, break_at, attention.layers
        )

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
        if self.debug and graph is not None:
            self._check_addresses(graph, view)
        self.attention.prepare(metadata)
        t3 = clock()
        logits = self._launch(graph, descriptor, view, step)
        t4 = clock()
        phases["dispatch"], phases["inputs"] = (t1 - t0) * 1e6, (t2 - t1) * 1e6
        phases["prepare"], phases["launch"] = (t3 - t2) * 1e6, (t4 - t3) * 1e6
        emulated, launched = (graph.emulated, graph.num_graphs) if graph is not None else (False, 0)
        return ForwardResult(logits, descriptor, phases, emulated, launched, self._events)

    def _launch(
        self, graph: CapturedGraph | None, descriptor: BatchDescriptor, view: StepView, step: ScheduledStep
    ) -> torch.Tensor:
        """Start the forward and the LM head: what the device is given to do in this step. Returns logits."""
        if self._events:
            self._events[0].record()
        if graph is not None and descriptor.mode is Mode.PIECEWISE:
            with forward_context(self._context(view.metadata)):
                graph.replay()
            hidden = graph.output
        elif graph is not None:
            graph.replay()
            hidden = graph.output
        else:
            hidden = self._forward(view, view.metadata)
        if self._events:
            self._events[1].record()
        return self._logits(hidden, view, step)

    def _logits(self, hidden: torch.Tensor, view: StepView, step: ScheduledStep) -> torch.Tensor:
        sampling = sum(item.samples for item in step.requests)
        if step.is_uniform_decode and sampling == step.num_reqs == step.num_tokens:
            rows = hidden[:sampling]  # every token is the last of its request
        else:
            rows = hidden.index_select(0, view.sample_rows[:sampling])
        return self.decoder.compute_logits(rows)
