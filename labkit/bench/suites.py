"""Suites of configurations as data: what is recorded, for which part of the course. Refuses to know how to measure.

A suite says nothing about a machine; what one cannot run there is refused with the engine's reason and kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.bench.attention import AttentionOptions, AttentionShape
from labkit.bench.forms import COMPILE_TABLE, Form
from labkit.config import CUDAGraphMode, EngineConfig
from labkit.errors import ConfigError, did_you_mean
from labkit.graphs.sizes import default_capture_sizes
from labkit.measure.recordings import MIN_SAMPLES

#: model, backend, compile, requested mode, batch, context, chunk: `Row.key`. Batch 0 stands for captures alone.
Key = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Suite:
    """What to record: every model × backend × compile × context, in each graph mode and eager.

    modes: graph modes, each at every graph size that a full decode batch can have. eager_batches: batches of mode NONE.
    graph_sizes: None takes every default decode size up to `max_size`. settings: fields of EngineConfig for all.
    contexts: none records what capturing takes, and no step.
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
        return sum(
            key[4] > 0
            for model in self.models
            for backend in self.backends
            for compile in self.compile
            for key in self.keys(model, backend, compile)
        )

    def sizes(self) -> tuple[int, ...]:
        """The capture sizes of every mode."""
        config = self.config(self.models[0], self.backends[0])
        default = default_capture_sizes(config.max_num_seqs, config.max_num_batched_tokens, max_size=self.max_size)
        return self.graph_sizes or tuple(default)

    def keys(self, model: str, backend: str, compile: str) -> Iterator[Key]:
        """The key of every row that this model, backend and compilation mode may get, mode by mode."""
        widest, sizes = self.config(model, backend).max_num_seqs, self.sizes()
        for mode, batches in (*((mode, sizes) for mode in self.modes), ("NONE", self.eager_batches)):
            if mode != "NONE" and not self.contexts:
                yield (Path(model).name, backend, compile, mode, 0, 0, 0)
            for context in self.contexts:
                for batch in batches:
                    if batch <= widest:
                        yield (Path(model).name, backend, compile, mode, batch, context, 0)

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


@dataclasses.dataclass(frozen=True)
class FormSuite:
    """What to record side by side: a step of each model × batch × context in every form, taking turns.

    The backend is the one that the engine picks. A point is measured as a whole or not at all.
    """

    name: str
    models: tuple[str, ...]
    forms: tuple[Form, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    steps: int = 60
    warmup: int = 5
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def num_rows(self) -> int:
        """How many rows there will be where every form can run."""
        return len(self.models) * len(self.batches) * len(self.contexts) * len(self.forms)

    def config(self, model: str) -> EngineConfig:
        """The engine's settings for one model; forms replace mode and compilation."""
        return EngineConfig(model=model, enable_prefix_caching=False, **self.settings)


_MODELS = ("smollm2-135m", "qwen3-0.6b")
# 1,024 tokens at most: TORCH_SDPA can be captured while its gather over that length stays below a limit.
_LIMITS = {"max_model_len": 1024, "max_num_seqs": 256}
# What compiles kernels of its own at first use comes last: an interrupted run has the others.
_BACKENDS = ("TRITON_ATTN", "FLASH_ATTN", "TORCH_SDPA", "FLASHINFER", "FLEX_ATTENTION")
#: NONE, compiled, in graphs, in both, and in pieces (as they are, and compiled). Torch's own graphs are left out: each
#: size is a compilation of the whole model.
FIVE_WAYS = tuple(form for form in COMPILE_TABLE if form.compile != "STOCK_TORCH_COMPILE")

SUITES: dict[str, Suite | FormSuite] = {
    suite.name: suite
    for suite in (
        Suite(
            "slice", _MODELS, ("TRITON_ATTN", "TORCH_SDPA"), (512,), (1, 2, 4, 8, 16, 32, 64, 128), 256,
            settings=_LIMITS,
        ),
        Suite(
            "backends", _MODELS, _BACKENDS, (512,), (1, 8, 32, 128), 256, (1, 2, 4, 8, 16, 32, 64, 128, 256),
            steps=MIN_SAMPLES, settings=_LIMITS,
        ),
        Suite(
            "modes", _MODELS, ("TRITON_ATTN",), (512,), (1, 8, 32, 128), 128, (1, 8, 32, 128),
            modes=("FULL", "PIECEWISE"), compile=("NONE", "VLLM_COMPILE"), steps=MIN_SAMPLES, settings=_LIMITS,
        ),
        # The latency panel. Decodes of FULL_AND_PIECEWISE run in the graphs of FULL_DECODE_ONLY. At this length
        # TORCH_SDPA gathers too much to be captured whole: its FULL graphs are in `slice`.
        Suite(
            "latency", _MODELS, (*_BACKENDS, "XFORMERS"), (128, 512, 2048, 7680), (1, 2, 4, 8, 16, 32, 64, 128, 256),
            256, modes=("FULL_DECODE_ONLY", "FULL", "PIECEWISE"), steps=MIN_SAMPLES,
            settings={"max_model_len": 8192, "max_num_seqs": 256, "gpu_memory_utilization": 0.9},
        ),
        FormSuite(
            "five", (*_MODELS, "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"), FIVE_WAYS, (1, 8, 32, 128), (512,),
            settings={"max_model_len": 1024, "max_num_seqs": 128, "gpu_memory_utilization": 0.9},
        ),
        Suite(
            "capture", (*_MODELS, "llama-3.2-1b", "llama-3.1-8b"), ("TRITON_ATTN",), (), (), 512,
            modes=("FULL_DECODE_ONLY", "FULL", "PIECEWISE", "FULL_AND_PIECEWISE"), compile=("NONE", "VLLM_COMPILE"),
            settings={"max_model_len": 8192, "max_num_seqs": 256, "gpu_memory_utilization": 0.9},
        ),
        # Small enough for a CPU in a test.
        Suite(
            "smoke", ("tiny-llama",), ("TORCH_SDPA",), (16,), (1, 2), 4, (1, 2, 4), steps=MIN_SAMPLES, warmup=1,
            settings={"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64},
        ),
    )
}  # fmt: skip

#: The suite of attention calls.
ATTENTION = "attention"
#: Every suite whose recordings the course shows, the quick ones first: what `make record` refreshes, one file each.
#: Those that are not in SUITES are tables of another kind, recorded elsewhere (`labkit.cli.measure.TABLES`).
COURSE_SUITES = ("slice", "modes", "capture", "five", ATTENTION, "timelines", "requests", "latency")


def find_suite(name: str) -> Suite | FormSuite:
    """A suite by name; ConfigError with the closest name otherwise."""
    if name not in SUITES:
        raise ConfigError(f"suite={name!r}", "there is no suite of that name", did_you_mean(name, SUITES))
    return SUITES[name]


def narrowed(suite: Suite | FormSuite, only: Mapping[str, Sequence[str]]) -> Suite | FormSuite:
    """A suite with some of its "models" or "backends" alone, in its own order; its files can be resumed with all.

    Raises:
        ConfigError: it has none of that name.
    """
    for field, names in only.items():
        there: tuple[str, ...] = getattr(suite, field, ())
        for name in names:
            if name not in there:
                hint = did_you_mean(name, there) if there else ""
                raise ConfigError(f"--{field} {name}", f"the suite {suite.name} has no such one", hint)
        kept: dict[str, Any] = {field: tuple(name for name in there if name in names)}
        suite = dataclasses.replace(suite, **kept)
    return suite


def attention_points() -> Sequence[tuple[AttentionShape, AttentionOptions]]:
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
