"""The LIVE bill: an engine started here with a configuration, some steps of it, and the engine closed again.

A start is what is measured, so every run builds an engine of its own, with a small cache beside the shared one. Refuses
to start a compile that takes a minute unless it is asked for by name.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from labkit.config import CUDAGraphMode
from labkit.errors import LabkitError
from labkit.lab.ch11.outcome import outcome
from labkit.lab.ch11.ways import OPTIONS, Way, find, looks_inside, picked
from labkit.lab.fields import Choice, Control, Number
from labkit.lab.machine import has_default_model
from labkit.lab.runs import Context, Outcome
from labkit.measure.provenance import collect
from labkit.measure.stats import summary
from labkit.models.shapes import DEFAULT_MODEL, SHAPES

CONTEXT, WARMUP, STEPS, LEAST, BUDGET_S = 64, 3, 30, 5, 1.5
MAX_MODEL_LEN, BLOCK = 256, 16
WARM, COLD = "warm", "cold"
CACHES = (("use what is there", WARM), ("compile anew (about a minute on a CPU)", COLD))
GPU_MODELS = ("tiny-llama", "smollm2-135m", "qwen3-0.6b", "llama-3.2-1b")


class LiveBill:
    """This machine. gpu: its name, "" for the CPU."""

    kind = "LIVE"

    def __init__(self, gpu: str) -> None:
        self.gpu, self.device = gpu, "cuda" if gpu else "cpu"
        self.label = gpu or "this CPU"
        # The first engine of a process imports what no later one does, and so does the first that is compiled.
        self._ready = self._compiler = False

    @property
    def max_num_seqs(self) -> int:
        return 256 if self.gpu else 8

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        way = picked(values)
        models = GPU_MODELS if self.gpu else ("tiny-llama", *([DEFAULT_MODEL] if has_default_model() else []))
        most = self.max_num_seqs
        points = tuple(n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if n <= most)
        found: list[Control] = [
            Choice("way", "Configuration", OPTIONS, help="What the engine is started with."),
            Choice("model", "Model", [(n, n) for n in models], help="What is loaded."),
            Number("batch", "Batch", 1, most, 1, points=points, help="Requests in each step."),
            Number("tokens", "Tokens a request", 10, 2000, 200, step=10, help="That each request generates."),
        ]
        if way.compiled:
            found.append(Choice("cache", "Compile cache", CACHES, help="Whether compiled code on disk may be used."))
        if way.mode is not CUDAGraphMode.NONE:
            found.append(Number("largest", "Largest size", 1, most, min(most, 32), points=points,
                                help="Sizes 1, 2, 4, 8 … up to this one are captured."))  # fmt: skip
        return found

    def cost(self, values: Mapping[str, Any]) -> str:
        if find(values["way"]).compiled and values.get("cache") == COLD:
            return "Run compiles the model first: tens of seconds, and Stop acts only afterwards."
        return "Run starts an engine, measures some steps, and closes it: a few seconds."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        way = find(values["way"])
        said = [f"{way.label} asks for {way.said}. What is measured is a start of its own, from the call to the first "
                "step; importing torch and its compiler is not in it."]  # fmt: skip
        if not self.gpu and way.mode is not CUDAGraphMode.NONE:
            said.append("On a CPU graphs are emulated: they take no device memory and save nothing.")
        return said

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        from labkit import LLM

        way, shape = find(values["way"]), SHAPES[values["model"].removesuffix("-instruct")]
        batch, cold = int(values["batch"]), values.get("cache") == COLD
        settings = self._settings(way, values)
        there = way.compiled and self._cached(shape)
        if way.compiled and not (there or cold or self.gpu):
            raise LabkitError(
                f"{way.label} of {values['model']} from the compile cache", "nothing of it is there yet",
                "Choose “compile anew” once (about a minute on a CPU); the next start finds it.",
            )  # fmt: skip
        if not self._ready:
            context.stage("loading what every engine needs", 0, 0)
            LLM("tiny-llama", enforce_eager=True, **self._limits()).close()
            self._ready = True
        if way.compiled and not self._compiler:
            context.stage("loading the compiler", 0, 0)  # as torch itself, it is not part of the start
            importlib.import_module("torch._inductor.compile_fx")
            if there:  # what reads the cache is imported by reading it
                LLM(values["model"], compilation_mode="VLLM_COMPILE", cudagraph_mode="NONE", **self._limits()).close()
            self._compiler = True
        context.check()

        def progress(stage: str, done: int, total: int, detail: str) -> None:
            if (stage, done) == ("loading", total):
                loaded.append(time.perf_counter())
            context.stage(f"{stage} {detail}", done, total)

        loaded: list[float] = []
        with _cache(not (cold and there)):  # what is not there yet is kept for the next start
            begin = time.perf_counter()
            llm = LLM(values["model"], progress=progress, **settings)
            startup = time.perf_counter() - begin
        try:
            samples, mode = self._steps(llm, batch, context)
            if not samples:
                context.check()
            looks = self._looks(llm, batch, mode, shape.num_layers, context)
            report = llm.compile_report
            parts = {
                "load": loaded[0] - begin if loaded else 0.0,
                "compile": report.total_ms / 1e3 if report else 0.0,
                "capture": sum(record.ms for record in llm.capture_records) / 1e3,
            }
            mib = sum(record.mib for record in llm.capture_records)
            notes = [f"{line}." for line in llm.mode_trail if "→" in line]
            if report and report.from_cache:
                notes.append("The compiled code came from the cache; a first start has to make it.")
            if llm.emulated_graphs and llm.capture_records:
                notes.append("Graphs are emulated on a CPU: nothing is saved here, and they take no device memory.")
        finally:
            llm.close()
        parts["rest"] = max(0.0, startup - sum(parts.values()))
        made = collect("LIVE", "panel 11", order="start, then steps", n=len(samples), primed=True, device=self.device)
        most = max(parts, key=lambda name: parts[name])
        words = {"load": "loading weights", "compile": "compiling", "capture": "capturing", "rest": "making the cache "
                 "and the buffers"}  # fmt: skip
        return outcome(
            way=way.key, said=way.label, mode=mode, startup_s=startup, parts_s=parts, mib=mib,
            step_ms=summary(samples).p50, looks=looks, batch=batch, tokens=int(values["tokens"]),
            model=values["model"], made=made, samples=samples, why=f"Most of the start went into {words[most]}.",
            notes=notes, stopped=context.should_stop(),
        )  # fmt: skip

    def _limits(self) -> dict[str, Any]:
        blocks = self.max_num_seqs * MAX_MODEL_LEN // BLOCK + 1
        return {"max_num_seqs": self.max_num_seqs, "max_num_batched_tokens": 256, "max_model_len": MAX_MODEL_LEN,
                "num_gpu_blocks_override": blocks, "block_size": BLOCK}  # fmt: skip

    def _settings(self, way: Way, values: Mapping[str, Any]) -> dict[str, Any]:
        settings = {**self._limits(), **way.settings}
        if "largest" in values:
            settings["cudagraph_capture_sizes"] = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)
                                                   if n <= int(values["largest"])]  # fmt: skip
        if self.gpu:
            del settings["block_size"]
        return settings

    def _cached(self, shape: Any) -> bool:
        from labkit.engine.compiled import is_cached
        from labkit.engine.plan import resolve_dtype
        from labkit.llm import find_device

        device, platform = find_device(self.device)
        return is_cached(shape, resolve_dtype("auto", platform)[0], device)

    def _steps(self, llm: Any, batch: int, context: Context) -> tuple[list[float], str]:
        """Milliseconds of decode steps after some that only warm up, and the mode that they ran in."""
        llm.prime(batch, CONTEXT, WARMUP + STEPS + 1)
        mode = "NONE"
        samples: list[float] = []
        for i in range(WARMUP):
            context.stage("warming up", i, WARMUP)
            llm.step()
        begin = time.perf_counter()
        while len(samples) < STEPS and not context.should_stop():
            if len(samples) >= LEAST and time.perf_counter() - begin > BUDGET_S:
                break
            report = llm.step()
            mode = report.mode
            samples.append(report.wall_ms)
            context.stage("measuring", len(samples), STEPS)
        llm.reset()
        return samples, mode

    def _looks(self, llm: Any, batch: int, mode: str, num_layers: int, context: Context) -> int | None:
        """Launches of a step on a GPU. On a CPU the calls of an eager step, and what graphs and compiler leave."""
        if self.gpu:
            context.stage("profiling a step", 0, 0)
            return llm.count_launches(batch, CONTEXT).launches  # type: ignore[no-any-return]
        if llm.compile_report is not None and mode == "NONE":
            return looks_inside("PIECEWISE", num_layers)
        return looks_inside(mode, num_layers, _num_calls(llm, batch) if mode == "NONE" else None)


def _num_calls(llm: Any, batch: int) -> int:
    """Calls of torch that the engine's Python makes in one step."""
    from torch.overrides import TorchFunctionMode  # a dispatch mode would count the same, and load the compiler

    class Counter(TorchFunctionMode):
        count = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    llm.prime(batch, CONTEXT, 4)
    llm.step()
    with Counter() as counter:
        llm.step()
    llm.reset()
    return counter.count


@contextlib.contextmanager
def _cache(use: bool) -> Iterator[None]:
    """Inside it an engine finds compiled code on disk, or makes it anew and keeps it to itself."""
    from labkit.graphs.compile_cache import DISABLE

    before = os.environ.get(DISABLE)
    if not use:
        os.environ[DISABLE] = "1"
    try:
        yield
    finally:
        if not use:
            os.environ.pop(DISABLE) if before is None else os.environ.update({DISABLE: before})
