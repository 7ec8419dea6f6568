"""The model's forward, compiled: traced, cut, compiled class by class, or read from the cache. Refuses to run it.

The report says what each part took, so that a cold and a warm start can be compared.
"""

from __future__ import annotations

import dataclasses
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from labkit.config import SPLITTING_OPS, ModelConfig
from labkit.graphs import compiler, pieces, trace
from labkit.graphs.compile_cache import CompileCache, cache_key, source_hash
from labkit.graphs.compiler import ClassReport, CompiledClass, CompiledForward
from labkit.graphs.pieces import Program, Split
from labkit.models import traceable
from labkit.models.decoder import Decoder

#: Tokens of the example that is traced: any number that is neither 0 nor 1 and no size of a weight.
EXAMPLE_TOKENS = 34
#: What `traceable.forward` calls: another text of these is another pass.
_BLOCKS = [
    str(path) for name in ("blocks", "layers", "moe", "mla")
    if (path := Path(traceable.__file__).with_name(f"{name}.py")).is_file()
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """What compiling took. `from_cache`: nothing was traced or compiled, both came from disk.

    pieces: compiled pieces of the pass; classes: one line for each different one. trace_ms, compile_ms, load_ms: wall
    time. saved: whether the next start will be warm.
    """

    from_cache: bool
    pieces: int
    classes: tuple[ClassReport, ...]
    trace_ms: float
    compile_ms: float
    load_ms: float
    saved: bool

    @property
    def total_ms(self) -> float:
        return self.trace_ms + self.compile_ms + self.load_ms


@dataclasses.dataclass(frozen=True)
class CompiledModel:
    """A compiled forward and how it came to be."""

    forward: CompiledForward
    report: CompileReport


def compile_model(
    decoder: Decoder,
    splitting_ops: Sequence[str] = SPLITTING_OPS,
    compile_sizes: Sequence[int] = (),
    *,
    cache: CompileCache | None = None,
    progress: Callable[[str, int, int, str], None] | None = None,
) -> CompiledModel:
    """Compile `decoder.forward` for any number of tokens and, exactly and with autotuning, for `compile_sizes`.

    Raises:
        CompileError: it cannot be traced as one graph, or Inductor failed.
    """
    cache = cache or CompileCache()
    key = cache_key(_factors(decoder, splitting_ops, compile_sizes))
    begin = time.perf_counter()
    if progress:
        progress("compiling", 0, 1, "looking into the cache")
    found = cache.load(key)
    load_ms = (time.perf_counter() - begin) * 1e3
    if found is not None:
        program, classes, reports = found
        report = CompileReport(True, len(program.pieces), tuple(reports), 0.0, 0.0, load_ms, True)
        return CompiledModel(CompiledForward(program, classes, decoder.tensors()), report)
    done: dict[str, Any] = {}
    begin = time.perf_counter()
    if progress:
        progress("compiling", 0, 1, "tracing")

    def inside(traced: trace.Trace) -> None:
        cut = pieces.split(traced, splitting_ops)
        done["trace_ms"] = (time.perf_counter() - begin) * 1e3
        done["program"] = cut.program
        done["classes"] = compiler.compile_split(cut, compile_sizes, progress, autotune=decoder.device.type == "cuda")

    _trace(decoder, inside)
    total_ms = (time.perf_counter() - begin) * 1e3
    program, (classes, reports) = done["program"], done["classes"]
    saved = cache.save(key, program, classes, reports)
    trace_ms = done["trace_ms"]
    report = CompileReport(False, len(program.pieces), tuple(reports), trace_ms, total_ms - trace_ms, load_ms, saved)
    return CompiledModel(CompiledForward(program, classes, decoder.tensors()), report)


def is_cached(config: ModelConfig, dtype: str, device: torch.device) -> bool:
    """Whether a start with these would find its compiled pass on disk; cut at attention, no `compile_sizes`.

    Args:
        dtype: "float32", "float16" or "bfloat16".
    """
    like = types.SimpleNamespace(config=config, dtype=getattr(torch, dtype), device=device)
    cache = CompileCache()
    return cache.enabled and (cache.folder / cache_key(_factors(like, SPLITTING_OPS, ()))).is_dir()


def split_model(decoder: Decoder, splitting_ops: Sequence[str] = SPLITTING_OPS) -> Split:
    """Trace and cut only. Raises CompileError."""
    found: list[Split] = []
    _trace(decoder, lambda traced: found.append(pieces.split(traced, splitting_ops)))
    return found[0]


def _trace(decoder: Decoder, inside: Callable[[trace.Trace], None]) -> None:
    trace.trace(
        lambda token_ids, positions: traceable.forward(decoder, token_ids, positions),
        decoder.tensors(), decoder.device, EXAMPLE_TOKENS, inside,
    )  # fmt: skip


def _factors(decoder: Any, splitting_ops: Sequence[str], compile_sizes: Sequence[int]) -> dict[str, Any]:
    config = dataclasses.asdict(decoder.config)
    for field in ("name", "bos_token_id", "eos_token_ids"):
        del config[field]
    device: dict[str, Any] = {"type": decoder.device.type}
    if decoder.device.type == "cuda":
        device["name"] = torch.cuda.get_device_name(decoder.device)
        device["cuda"] = torch.version.cuda
    return {
        "config": config, "dtype": str(decoder.dtype), "device": device, "splitting_ops": list(splitting_ops),
        "compile_sizes": sorted(compile_sizes),
        "code": source_hash([*_BLOCKS, *(m.__file__ for m in (traceable, trace, pieces, compiler) if m.__file__)]),
    }  # fmt: skip


__all__ = [
    "CompileReport", "CompiledModel", "CompiledClass", "Program", "compile_model", "is_cached", "split_model",
]  # fmt: skip
