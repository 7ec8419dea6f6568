"""The loop: schedule, run, sample, commit, report. Refuses to know prompts as text, model names and files.

`Engine.step` is the step line of the whole project in one function. Everything else here builds or rebuilds the parts.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from labkit import nvtx
from labkit.attention import registry
from labkit.attention.groups import AttentionGroups
from labkit.attention.interface import Availability, Platform
from labkit.attention.split_mixed import make_backend
from labkit.config import CUDAGraphMode, EngineConfig, SamplingParams
from labkit.engine.build import Builder, Progress, scheduler_limits
from labkit.engine.detokenizer import Detokenizer
from labkit.engine.plan import EnginePlan, lower, make_plan
from labkit.engine.report import (
    CaptureRecord,
    GraphMemory,
    ReconfigureReport,
    RequestOutput,
    StepReport,
    TokenLogprob,
    Usage,
)
from labkit.engine.runner import Forward
from labkit.errors import CaptureError, CompileError, LabkitError, RequestError
from labkit.graphs.dispatcher import GraphDispatcher
from labkit.models.loader import LoadedModel
from labkit.scheduling.request import Request, RequestStatus
from labkit.scheduling.step import ScheduledStep

if TYPE_CHECKING:
    from labkit.engine.compiled import CompiledModel, CompileReport


@dataclasses.dataclass
class _Live:
    """What the engine keeps about a request beside the scheduler's Request."""

    request: Request
    detokenizer: Detokenizer
    prompt: tuple[int, ...]
    logprobs: list[TokenLogprob] | None
    error: str | None = None


class Engine:
    """One model on one device, driven step by step.

    Args:
        model: loaded weights and tokenizer; may be shared by several engines.
        config: what was asked for.
        platform: the machine.
        available: what loads here, per backend name.
        progress: called as (stage, done, total, detail) while something slow is built.
        debug: check before every replay that what the graph reads is where it was at capture; see `Runner`.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        platform: Platform,
        device: torch.device,
        available: Mapping[str, Availability],
        progress: Progress | None = None,
        debug: bool = False,
    ) -> None:
        self.model, self.platform, self.device, self.debug = model, platform, device, debug
        self.available, self.progress = available, progress
        self.asked = config
        self.plan = make_plan(config, model.config, platform, available)
        self.notes: list[str] = list(self.plan.notes)
        self._live: dict[str, _Live] = {}
        self._backends: dict[tuple[object, ...], AttentionGroups] = {}
        self._compiled: dict[tuple[object, ...], CompiledModel] = {}
        self._weight_bytes = model.decoder.num_bytes()
        self._launches: dict[tuple[object, str, int], int] = {}
        self._steps = 0
        self._ended: list[RequestOutput] = []
        self._compile()
        self._build_layout()
        self._use_plan()

    # --- building --------------------------------------------------------------------------------------------------

    def _build_layout(self) -> None:
        """KV cache, buffers, runner, scheduler: everything whose shapes depend on the limits."""
        layout = Builder(
            self.model, self.plan, self.device, self._backend, self._forward(), self.progress, self.debug
        ).build()
        self.inputs, self.kv, self.runner = layout.inputs, layout.kv, layout.runner
        self.sampler, self.pool, self.scheduler = layout.sampler, layout.pool, layout.scheduler
        self._estimate = layout.estimate

    def _backend(self) -> AttentionGroups:
        """The plan's backends; instances are kept, since their buffers are baked into graphs."""
        plan = self.plan
        key = (plan.backend_key, plan.layout_key)
        if key not in self._backends:
            make = functools.partial(make_backend, registry.load(plan.backend), device=self.device)
            weights = [layer.attention for layer in self.model.decoder.layers]
            # Asked for inside a profiled step too, and buffers made in inference mode could be written in no other.
            with torch.inference_mode(False):
                groups = AttentionGroups(make, plan.spec, plan.groups, weights)
                groups.warm_up(self.progress)
            self._backends[key] = groups
        return self._backends[key]

    def _use_plan(self) -> None:
        """Point the runner at the plan's backend, code and sizes; compile and capture what is missing.

        What cannot be captured is answered by less (`plan.lower`), down to no graphs at all, each time with a note.
        """
        self._compile()
        while True:
            self._dispatch()
            try:
                self.runner.capture_missing(self.progress)
                return
            except CaptureError as error:
                self._lower(error)
            except CompileError as error:
                self._without_compilation(error)
                fit = tuple(size for size in self.plan.capture_sizes if size <= self.runner.max_hidden_rows)
                self.plan = dataclasses.replace(self.plan, capture_sizes=fit)
            self._empty_caches()  # outside the handlers: a traceback keeps tensors of the failed pass

    def _lower(self, error: CaptureError) -> None:
        plan = self.plan
        mode, sizes = lower(plan.mode, plan.capture_sizes, error, piecewise=plan.config.piecewise_method == "break")
        if mode is CUDAGraphMode.NONE:
            note = f"{error} The engine runs without graphs until then."
        else:
            note = f"{error} The engine runs in mode {mode.name} with sizes {_few(sizes)} until then."
        self._note(note)
        less = f" with {len(sizes)} of {len(plan.capture_sizes)} sizes" if mode is plan.mode else ""
        trail = (*plan.mode_trail, f"{plan.mode.name} → {mode.name}{less}: {error}")
        config = plan.config.replace(cudagraph_mode=mode)
        self.plan = dataclasses.replace(plan, mode=mode, mode_trail=trail, capture_sizes=sizes, config=config)

    def _note(self, note: str) -> None:
        self.notes.append(note)
        warnings.warn(note, stacklevel=4)

    def _compile(self) -> None:
        """Compile the model where the plan asks for it; a failure leaves the model's own kernels and a note."""
        plan, key = self.plan, self.plan.compile_key
        if plan.config.compilation_mode != "VLLM_COMPILE" or key in self._compiled:
            return
        from labkit.engine.compiled import compile_model  # imports the compiler, which takes seconds

        try:
            self._compiled[key] = compile_model(
                self.model.decoder, plan.config.splitting_ops or (), plan.config.compile_sizes or (),
                progress=self.progress,
            )  # fmt: skip
        except CompileError as error:
            self._without_compilation(error)

    def _without_compilation(self, error: CompileError) -> None:
        self._note(f"{error} The engine runs without compilation until then.")
        self.asked = self.asked.replace(compilation_mode="NONE", optimization_level=None)
        self.plan = make_plan(self.asked, self.model.config, self.platform, self.available)

    def _forward(self) -> Forward | None:
        compiled = self._compiled.get(self.plan.compile_key)
        return compiled.forward if compiled else None

    def _whole(self) -> Forward:
        from labkit.graphs.whole import compile_whole
        from labkit.models import traceable

        decoder = self.model.decoder
        forward = functools.partial(traceable.forward, decoder)
        return compile_whole(forward, decoder.tensors().values(), self.device)

    def _dispatch(self) -> None:
        dispatcher = GraphDispatcher(self.plan.mode, self.plan.capture_sizes, self.plan.config.max_num_seqs)
        whole = self._whole if self.plan.config.compilation_mode == "STOCK_TORCH_COMPILE" else None
        self.runner.use(self._backend(), self.plan.graph_key, dispatcher, self._forward(), whole)
        self._name_ranges()

    def _name_ranges(self) -> None:
        """Under LABKIT_NVTX=1 each phase of a step, and attention inside the forward, is a range in a profiler."""
        runner, name = self.runner, nvtx.name_methods
        name(self, step="step", _detokenize="detokenize")
        name(self.scheduler, schedule="schedule", commit="commit")
        name(runner.dispatcher, dispatch="dispatch")
        name(self.inputs, fill="inputs")
        for backend in runner.attention.backends:
            name(backend, prepare="prepare", forward="attention")
        name(runner, _launch="launch")
        name(self.sampler, sample="sample")

    # --- requests --------------------------------------------------------------------------------------------------

    def add(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> RequestOutput | None:
        """Queue a request.

        Returns:
            Its output when it is over at once (`max_tokens=0`), else None.

        Raises:
            RequestError: it can never be served; nothing else is touched.
        """
        request = Request(request_id, list(prompt), params, self.model.config.eos_token_ids)
        self.scheduler.add(request)
        live = _Live(
            request,
            Detokenizer(self.model.tokenizer, request.prompt_token_ids, params),
            tuple(prompt),
            [] if params.logprobs is not None else None,
        )
        if request.finished:
            return self._output(live, "")
        self._live[request_id] = live
        return None

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; None when no live request has that id."""
        live = self._live.pop(request_id, None)
        if live is None:
            return None
        self.scheduler.abort(request_id)
        return self._output(live, live.detokenizer.push([], final=True))

    def prime(self, request_id: str, context: int, params: SamplingParams, seed: int, fill: bool = True) -> None:
        """Queue a request whose first `context` tokens count as computed: its blocks hold seeded finite values.

        With `fill=False` they keep what they hold; `fill_kv` has filled them before.
        """
        vocab = self.model.config.vocab_size
        prompt = ((seed * 7919 + np.arange(context, dtype=np.int64) * 31) % vocab).tolist()
        request = Request(request_id, prompt, params, self.model.config.eos_token_ids)
        self.scheduler.prime(request, context)
        if fill:
            self.kv.fill_random(request.block_ids, seed)
        self._live[request_id] = _Live(
            request,
            Detokenizer(self.model.tokenizer, prompt, params),
            tuple(prompt),
            [] if params.logprobs is not None else None,
        )

    def fill_kv(self, seed: int, blocks_at_a_time: int = 1024) -> None:
        """Seeded finite values in every block but the null block."""
        for first in range(1, self.kv.num_blocks, blocks_at_a_time):
            last = min(first + blocks_at_a_time, self.kv.num_blocks)
            self.kv.fill_random(list(range(first, last)), seed + first)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._live or self._ended)

    def live_ids(self) -> list[str]:
        return list(self._live)

    # --- one step --------------------------------------------------------------------------------------------------

    def step(self) -> StepReport:
        """One step: from the call to the sampled tokens on the host.

        Raises:
            LabkitError: the forward failed; the step is undone, every request is as it was before.
        """
        clock = time.perf_counter
        begin = clock()
        scheduled = self.scheduler.schedule()
        t_schedule = clock()
        if scheduled is None:
            return self._idle_report(begin)
        try:
            result = self.runner.execute(scheduled)
            t_forward = clock()
            items = scheduled.requests
            sampling = [item.request for item in items if item.samples]
            sampled = self.sampler.sample(result.logits, sampling)
            if result.events:
                result.events[1].synchronize()  # a step that samples nothing, a chunk of a prompt, has not waited yet
        except torch.cuda.OutOfMemoryError as error:
            self._undo(scheduled)
            raise LabkitError(
                f"a step of {scheduled.num_tokens} tokens",
                "the GPU ran out of memory",
                "Lower gpu_memory_utilization or max_num_batched_tokens.",
            ) from error
        except BaseException:
            self._undo(scheduled)
            raise
        t_sample = clock()
        token = iter(sampled.token_ids)
        tokens = [next(token) if item.samples else None for item in items]
        self._drop_failed(sampling, sampled)
        self.scheduler.commit(scheduled, tokens)
        t_commit = clock()
        outputs = self._take_pending() + self._detokenize(sampling, sampled)
        end = clock()
        phases = {
            "schedule": (t_schedule - begin) * 1e6,
            **result.phases_us,
            "sample": (t_sample - t_forward) * 1e6,
            "commit": (t_commit - t_sample) * 1e6,
            "detokenize": (end - t_commit) * 1e6,
        }
        descriptor = result.descriptor
        device_us = result.events[0].elapsed_time(result.events[1]) * 1e3 if result.events else None
        self._steps += 1
        return StepReport(
            step_id=self._steps,
            mode=descriptor.mode.name,
            size=descriptor.size,
            num_tokens=scheduled.num_tokens,
            num_reqs=scheduled.num_reqs,
            num_padded=descriptor.size - scheduled.num_tokens,
            max_query_len=scheduled.max_query_len,
            max_seq_len=scheduled.max_seq_len,
            backend=self.plan.backend,
            wall_ms=(end - begin) * 1e3,
            begun_at_ms=begin * 1e3,
            phases_us=phases,
            device_us=device_us,
            launches=self._launches.get((self.plan.graph_key, descriptor.mode.name, descriptor.size)),
            graph_launches=result.graph_launches,
            emulated=result.emulated,
            num_cached_tokens=scheduled.num_cached_tokens,
            preempted=scheduled.preempted,
            scheduled={item.request.request_id: item.num_tokens for item in items},
            outputs=tuple(outputs),
        )

    def _undo(self, scheduled: ScheduledStep) -> None:
        self.scheduler.rollback(scheduled)
        self.inputs.forget_rows()

    def _idle_report(self, begin: float) -> StepReport:
        wall = (time.perf_counter() - begin) * 1e3
        return StepReport(
            self._steps,
            "NONE",
            0,
            0,
            0,
            0,
            0,
            0,
            self.plan.backend,
            wall,
            {"schedule": wall * 1e3},
            outputs=tuple(self._take_pending()),
            begun_at_ms=begin * 1e3,
        )

    def _take_pending(self) -> list[RequestOutput]:
        pending, self._ended = self._ended, []
        return pending

    def _drop_failed(self, sampling: Sequence[Request], sampled: Any) -> None:
        """A request whose logits are not numbers ends with an error; the others go on."""
        for request, token, error in zip(sampling, sampled.token_ids, sampled.errors, strict=True):
            if token is None:
                self._live[request.request_id].error = error
                self.scheduler.finish(request.request_id, "error")

    def _detokenize(self, sampling: Sequence[Request], sampled: Any) -> list[RequestOutput]:
        outputs = []
        for request, token, logprob in zip(sampling, sampled.token_ids, sampled.logprobs, strict=True):
            live = self._live.get(request.request_id)
            if live is None:
                continue
            if live.logprobs is not None and logprob is not None:
                live.logprobs.append(logprob)
            delta = live.detokenizer.push([] if token is None else [token], final=request.finished)
            if live.detokenizer.found_stop and request.finish_reason in (None, "length"):
                if request.finished:
                    request.finish_reason = "stop"
                else:
                    self.scheduler.finish(request.request_id, "stop")
            if request.finished:
                del self._live[request.request_id]
            outputs.append(self._output(live, delta))
        return outputs

    def _output(self, live: _Live, delta: str) -> RequestOutput:
        request = live.request
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=live.prompt,
            token_ids=tuple(request.output_token_ids),
            text=live.detokenizer.text,
            delta=delta,
            finish_reason=request.finish_reason,
            usage=Usage(len(live.prompt), len(request.output_token_ids), request.num_cached_tokens),
            logprobs=tuple(live.logprobs) if live.logprobs is not None else None,
            error=live.error,
        )

    # --- toggling --------------------------------------------------------------------------------------------------

    def reconfigure(self, **changes: Any) -> ReconfigureReport:
        """Change settings and keep everything that is still valid; live requests go on.

        A change of limits or page size re-lays the KV cache: live requests are recomputed. The model itself (`model`,
        `dtype`, `device`, `seed`) cannot change here; `LLM.reconfigure` reloads it.

        Raises:
            ConfigError, BackendError: nothing was changed.
        """
        asked = self.asked.replace(**changes)
        plan = make_plan(asked, self.model.config, self.platform, self.available)  # raises before anything is touched
        old_asked, old, before = self.asked, self.plan, self.plan.config.as_dict()
        timings: dict[str, float] = {}
        kept = ["weights", "tokenizer"]
        num_notes = len(self.notes)
        self.asked, self.plan = asked, plan
        waiting: list[Request] | None = None  # a list once the layout is being made anew
        try:
            self._forget_stale_graphs()
            begin = time.perf_counter()
            if plan.config.compilation_mode == "VLLM_COMPILE" and plan.compile_key not in self._compiled:
                self._compile()
                plan = self.plan  # without compilation, if that failed
                timings["compile"] = (time.perf_counter() - begin) * 1e3
            needs_rows = (
                max(plan.capture_sizes, default=0) > self.runner.max_hidden_rows
                or plan.max_num_rows > self.inputs.max_num_reqs
            )
            begin = time.perf_counter()
            if plan.layout_key != old.layout_key or needs_rows:
                waiting = self._give_back_layout()
                self._build_layout()
                timings["kv_cache"] = (time.perf_counter() - begin) * 1e3
            else:
                kept.append("kv_cache")
            begin = time.perf_counter()
            self._dispatch()
            missing = len(self.runner.missing_graphs())
            self._use_plan()
        except BaseException:
            self._go_back(old_asked, old, waiting)
            raise
        if waiting is None:
            self.scheduler.limits = scheduler_limits(self.plan)
            self.pool.enable_prefix_caching = self.plan.config.enable_prefix_caching
            if not self.pool.enable_prefix_caching:
                self.pool.reset_prefix_cache()
        else:
            self._readmit_all(waiting)
        if missing:
            timings["graphs"] = (time.perf_counter() - begin) * 1e3
        elif self.runner.records():
            kept.append("graphs")
        after = self.plan.config.as_dict()
        changed = {k: (before[k], after[k]) for k in after if before[k] != after[k]}
        return ReconfigureReport(changed, timings, tuple(kept), tuple(self.notes[num_notes:]))

    def _go_back(self, asked: EngineConfig, plan: EnginePlan, waiting: Sequence[Request] | None) -> None:
        """The settings of before, after a change that failed or was interrupted on its way."""
        self.asked, self.plan = asked, plan
        if waiting is not None or "runner" not in self.__dict__:
            held = self._give_back_layout()
            self._build_layout()
            self._readmit_all(held if waiting is None else waiting)
        self._use_plan()

    def _forget_stale_graphs(self) -> None:
        """Graphs and compiled code hold the weights that were there; where others took their place, both are made anew.

        Loading in place keeps everything right and costs nothing. A replacement is seen here, and under
        LABKIT_DEBUG=1 before the next replay; without either, graphs go on with the old weights.
        """
        stale = self.runner.replaced()
        if stale:
            self._note(
                f"{stale[0]} was replaced since graphs were captured (of {len(stale)}): they are captured again."
            )
            self.runner.drop_graphs()
            self._compiled.clear()

    def _give_back_layout(self) -> list[Request]:
        """Free cache, buffers and graphs before others are made, since both rarely fit; returns the live requests.

        They start again from their tokens, under the limits that come.
        """
        self.scheduler.preempt_all()
        waiting = list(self.scheduler.waiting)
        if "runner" in self.__dict__:
            self.runner.drop_graphs()
        self._backends.clear()
        self._launches.clear()
        for part in ("runner", "kv", "inputs"):
            self.__dict__.pop(part, None)
        self._empty_caches()
        return waiting

    def _empty_caches(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _readmit_all(self, waiting: Sequence[Request]) -> None:
        for request in waiting:
            self._readmit(request)
        self._ended += self._take_ended()

    def _readmit(self, request: Request) -> None:
        """Queue a request again under new limits; one that no longer fits ends with the tokens it has."""
        request.block_hashes.clear()  # they were made with the old page size
        if request.num_tokens >= self.scheduler.max_len:
            request.finish_reason, request.status = "length", RequestStatus.FINISHED
            return
        try:
            self.scheduler.add(request)
        except RequestError as error:
            self._live[request.request_id].error = str(error)
            request.finish_reason, request.status = "error", RequestStatus.FINISHED

    def _take_ended(self) -> list[RequestOutput]:
        """Requests that a change of limits has ended since the last step."""
        over = [live for live in self._live.values() if live.request.finished]
        for live in over:
            del self._live[live.request.request_id]
        return [self._output(live, live.detokenizer.push([], final=True)) for live in over]

    def reset(self) -> list[RequestOutput]:
        """Abort every request and forget the prefix cache."""
        outputs = [self.abort(request_id) for request_id in self.live_ids()]
        self.pool.reset_prefix_cache()
        return [output for output in outputs if output is not None]

    def note_launches(self, mode: str, size: int, launches: int) -> None:
        """Remember what the host starts per step of this (backend, mode, size), for `StepReport.launches`."""
        self._launches[self.plan.graph_key, mode, size] = launches

    # --- what it costs ---------------------------------------------------------------------------------------------

    @property
    def compile_report(self) -> CompileReport | None:
        """How the code that runs now was compiled; None where nothing is."""
        found = self._compiled.get(self.plan.compile_key)
        return found.report if found else None

    @property
    def capture_records(self) -> list[CaptureRecord]:
        return self.runner.records()

    @property
    def graph_memory(self) -> GraphMemory:
        """What was set aside for graphs when the KV cache was sized, and what those captured since then took."""
        made = self._estimate
        return dataclasses.replace(made, actual_mib=made.actual_mib + self.runner.graph_mib)

    def memory(self) -> dict[str, int]:
        """Bytes: weights, kv, graphs (what recording those of the mode in force took), peak (CUDA allocator, 0 on a
        CPU)."""
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
        graphs = int(sum(r.mib for r in self.capture_records) * 2**20)
        return {"weights": self._weight_bytes, "kv": self.kv.nbytes, "graphs": graphs, "peak": peak}

    def close(self) -> None:
        """Give the memory back. Safe to call twice."""
        if not hasattr(self, "runner"):
            return
        self._live.clear()
        self.runner.drop_graphs()
        self._backends.clear()
        self._compiled.clear()
        del self.runner, self.kv, self.inputs, self.sampler, self.scheduler, self.pool
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _few(sizes: Sequence[int]) -> str:
    return str(list(sizes)) if len(sizes) <= 6 else f"1…{sizes[-1]} ({len(sizes)} of them)"
