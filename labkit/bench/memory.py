"""An engine's memory beside what its shape predicts. Refuses to know how either is shown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from labkit.measure.memory import MIB, Limits, MemoryReport, report, weight_bytes, workspace_bytes
from labkit.measure.provenance import Kind

if TYPE_CHECKING:
    from labkit.llm import LLM


def memory_report(llm: LLM) -> MemoryReport:
    """What `llm` holds now, LIVE, with the graphs of the mode that it is in."""
    config = llm.config
    limits = Limits(
        config.dtype, config.block_size or 16, config.max_model_len or 1, config.max_num_seqs,
        config.max_num_batched_tokens, config.num_gpu_blocks_override,
    )  # fmt: skip
    estimated = llm.graph_memory.estimated_mib
    title = f"{Path(config.model).name} {config.dtype}, {llm.selection.selected} {llm.cudagraph_mode.name}"
    return report(
        title, llm.model_config, limits, llm.memory, kind=Kind.LIVE,
        graphs_estimated=None if estimated is None else int(estimated * MIB),
        by_size=[(one.mode, one.size, one.mib) for one in llm.capture_records], budget=_budget(llm, limits),
    )  # fmt: skip


def _budget(llm: LLM, limits: Limits) -> int:
    """Bytes for weights, workspace and KV: the share of the GPU's memory, on a CPU what the cache may have."""
    least = weight_bytes(llm.model_config, limits.dtype) + workspace_bytes(llm.model_config, limits)
    if llm.device.type != "cuda":
        from labkit.paging.kv_cache import CPU_KV_BYTES

        return least + CPU_KV_BYTES
    import torch

    total = torch.cuda.get_device_properties(llm.device).total_memory
    # Never below what the engine was built with: the prediction of the workspace is a bound, not what a kernel takes.
    return max(int(total * llm.config.gpu_memory_utilization), least + llm.memory["kv"])
