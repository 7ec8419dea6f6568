"""Everything whose shapes follow from the limits: buffers, KV cache, runner, scheduler. Refuses to know requests.

On a GPU the KV cache gets what is left of its share of the memory after the weights, the largest step, measured by
running one, and the graphs, estimated by capturing a few of them into a pool that is thrown away.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from labkit.config import CUDAGraphMode
from labkit.engine.inputs import StepInputs
from labkit.engine.plan import EnginePlan
from labkit.engine.report import GraphMemory
from labkit.engine.runner import Forward, Runner
from labkit.engine.sampler import Sampler
from labkit.errors import CaptureError
from labkit.graphs.dispatcher import GraphDispatcher, GraphKey
from labkit.models.loader import LoadedModel
from labkit.paging.block_pool import BlockPool
from labkit.paging.kv_cache import CPU_KV_BYTES, KVCache, num_blocks_that_fit
from labkit.scheduling.scheduler import Scheduler
from labkit.scheduling.step import SchedulerLimits

Progress = Callable[[str, int, int, str], None]
#: A further graph of a kind takes at least this: the driver's own memory, which a measurement of one may miss.
LEAST_MIB_PER_GRAPH = 1.0


@dataclasses.dataclass
class Layout:
    """The parts, and what was set aside for graphs. The estimate's actual part is what it left for good itself."""

    inputs: StepInputs
    kv: KVCache
    runner: Runner
    sampler: Sampler
    pool: BlockPool
    scheduler: Scheduler
    estimate: GraphMemory


class Builder:
    """Builds a `Layout` for one plan.

    Args:
        backend: gives the plan's attention backends.
        forward: the compiled pass, None for the model's own.
        debug: see `Runner`.
    """

    def __init__(
        self,
        model: LoadedModel,
        plan: EnginePlan,
        device: torch.device,
        backend: Callable[[], Any],
        forward: Forward | None,
        progress: Progress | None,
        debug: bool,
    ) -> None:
        self.model, self.plan, self.device = model, plan, device
        self.backend, self.forward, self.progress, self.debug = backend, forward, progress, debug
        self.block_size = plan.spec.block_size
        self.blocks_per_request = -(-plan.max_model_len // self.block_size)
        self.estimate = GraphMemory(None, 0.0)

    def build(self) -> Layout:
        """All parts.

        Raises:
            ConfigError: the memory that may be used does not hold them; the setting is named.
        """
        plan, config = self.plan, self.plan.config
        self.inputs = StepInputs(
            max(config.max_num_batched_tokens, max(plan.capture_sizes, default=1)),
            plan.max_num_rows,
            self.blocks_per_request,
            self.block_size,
            self.device,
        )
        num_blocks = config.num_gpu_blocks_override or self._blocks_that_fit()
        kv = self._allocate_kv(num_blocks)
        pool = BlockPool(num_blocks, self.block_size, config.enable_prefix_caching)
        return Layout(
            self.inputs, kv, self._make_runner(kv),
            Sampler(self.model.config.vocab_size, self.device, config.max_num_seqs, config.seed),
            pool, Scheduler(scheduler_limits(plan), pool), self.estimate,
        )  # fmt: skip

    def _allocate_kv(self, num_blocks: int) -> KVCache:
        plan = self.plan
        return KVCache.allocate(
            self.model.config, num_blocks, self.block_size, getattr(torch, plan.dtype), self.device,
            plan.spec.kv_cache_layout,
        )  # fmt: skip

    def _make_runner(self, kv: KVCache) -> Runner:
        rows = max(self.plan.capture_sizes, default=0)
        scale = self.model.config.attention_scale
        return Runner(self.model.decoder, kv, self.inputs, self.plan.max_model_len, rows, scale, self.debug)

    def _blocks_that_fit(self) -> int:
        config = self.plan.config
        useful = config.max_num_seqs * self.blocks_per_request + 1
        block_bytes = self.model.config.kv_bytes_per_token(getattr(torch, self.plan.dtype).itemsize) * self.block_size
        if self.device.type != "cuda":
            return num_blocks_that_fit(CPU_KV_BYTES, block_bytes, useful, "the CPU's KV cache budget of 1 GiB")
        if self.progress:
            self.progress("profiling", 0, 1, f"one step of {config.max_num_batched_tokens} tokens")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        runner = self._make_runner(self._allocate_kv(2))
        self._profile_run(runner)
        peak = torch.cuda.max_memory_allocated(self.device)
        self._estimate_graphs(runner)
        del runner
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(self.device).total_memory
        free, _ = torch.cuda.mem_get_info(self.device)
        held = torch.cuda.memory_reserved(self.device)
        graphs = self.estimate.estimated_mib or 0.0
        budget = min(int(total * config.gpu_memory_utilization), free + held) - peak - int(graphs * 2**20)
        asked = f"gpu_memory_utilization={config.gpu_memory_utilization}"
        if graphs:
            asked += f" ({graphs:.0f} MiB of it for graphs)"
        return num_blocks_that_fit(budget, block_bytes, useful, asked)

    @torch.inference_mode()
    def _profile_run(self, runner: Runner) -> None:
        tokens = self.plan.config.max_num_batched_tokens
        runner.use(self.backend(), (), GraphDispatcher(CUDAGraphMode.NONE, (), self.plan.config.max_num_seqs))
        runner.dummy_run(tokens, min(self.plan.config.max_num_seqs, tokens))
        torch.cuda.synchronize(self.device)

    def _estimate_graphs(self, runner: Runner) -> None:
        """Capture the two largest graphs of every kind, note what each takes, and forget them."""
        plan = self.plan
        if not plan.capture_sizes or plan.config.compilation_mode == "STOCK_TORCH_COMPILE":
            return
        begin, before = time.perf_counter(), torch.cuda.memory_allocated(self.device)
        dispatcher = GraphDispatcher(plan.mode, plan.capture_sizes, plan.config.max_num_seqs)
        runner.use(self.backend(), plan.graph_key, dispatcher, self.forward)
        kinds, estimated = kinds_of(dispatcher.capture_order()), None
        sample = [key for keys in kinds for key in keys[:2]]
        if self.progress:
            self.progress("profiling", 0, 1, f"graph memory, from {len(sample)} captures")
        try:
            taken = iter([record.mib for record in runner.capture_missing(only=sample)])
            measured = [[next(taken) for _ in keys[:2]] for keys in kinds]
            estimated = extrapolate(measured, [len(keys) for keys in kinds])
        except CaptureError:
            pass  # the capture itself will say so, and what is left then
        runner.drop_graphs()
        torch.cuda.empty_cache()
        # The library's workspace for the stream and the backend's buffers stay: they are not taken a second time.
        kept = max(0, torch.cuda.memory_allocated(self.device) - before) / 2**20
        self.estimate = GraphMemory(estimated, kept, (time.perf_counter() - begin) * 1e3)


def kinds_of(keys: Sequence[GraphKey]) -> list[list[GraphKey]]:
    """Keys by kind of graph, in the order given."""
    kinds: dict[tuple[str, bool], list[GraphKey]] = {}
    for key in keys:
        kinds.setdefault((key.mode, key.uniform), []).append(key)
    return list(kinds.values())


def extrapolate(measured: Sequence[Sequence[float]], counts: Sequence[int]) -> float:
    """MiB that all graphs take, from the first one or two of each kind in capture order.

    The first of a kind pays for activations, later ones, which are smaller, find them in the pool: each is taken to
    cost what the second did.

    Args:
        measured: MiB of the first graphs of each kind, captured one after another into one pool.
        counts: graphs of each kind.
    """
    total = 0.0
    for (first, *more), count in zip(measured, counts, strict=True):
        total += max(first, 0.0) + (count - 1) * max(more[0] if more else 0.0, LEAST_MIB_PER_GRAPH)
    return total


def scheduler_limits(plan: EnginePlan) -> SchedulerLimits:
    """What the scheduler needs to know of a plan."""
    config = plan.config
    return SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        block_size=plan.spec.block_size,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        enable_chunked_prefill=config.enable_chunked_prefill,
        enable_prefix_caching=config.enable_prefix_caching,
        decodes_first=config.split_mixed_batches,
        prefill_first=config.prefill_first,
    )
