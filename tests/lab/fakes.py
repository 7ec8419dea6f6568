"""A stand-in for the engine with the same surface and no clock of its own, and hand-made recordings. For tests only."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from labkit.attention.interface import AttentionCGSupport, Reason
from labkit.attention.selector import Candidate, Selection
from labkit.config import CUDAGraphMode, EngineConfig
from labkit.engine.report import PHASES, CaptureRecord, ReconfigureReport, RequestOutput, StepReport, Usage
from labkit.errors import BackendError, CaptureError
from labkit.graphs import modes
from labkit.graphs.sizes import pad_to
from labkit.lab.engine_room import EngineRoom, Limits
from labkit.lab.live import LiveSource
from labkit.measure.provenance import Kind, Provenance
from labkit.measure.recordings import Recording, Row
from labkit.measure.stats import summary
from labkit.models.shapes import SHAPES

Progress = Callable[[str, int, int, str], None]

LIMITS = Limits(
    max_num_seqs=16, max_context=512, max_num_batched_tokens=64, sizes=(1, 2, 4, 8), warmup=2, steps=6, min_steps=6,
    budget_s=1e9, text_s=1e9, model_bytes=1 << 30, default_context=64,
)  # fmt: skip
CANDIDATES = (
    Candidate("TORCH_SDPA", True, (), AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, "because", 1),
    Candidate("FLASH_ATTN", False, (Reason("needs a GPU", "run it on one"),), None, "", None),
)


class FakeLLM:
    """Counts its steps; step k takes `wall_ms(k)`. `gate` is called at the start of every step."""

    def __init__(
        self, model: str, progress: Callable[[str, int, int, str], None] | None = None, **changes: Any
    ) -> None:
        self.made_with = dict(changes)
        self._config = EngineConfig(model=model, dtype="float32", **changes)
        self._progress = progress or (lambda *args: None)
        self.steps = 0
        self.closed = False
        self.weights = "random"
        self.emulated_graphs = True
        self.threads: set[str] = set()
        self.gate: Callable[[FakeLLM], None] = lambda llm: None
        self.wall_ms: Callable[[int], float] = lambda k: 1.0 + k * 0.25
        self.primed: list[tuple[int, int]] = []
        self._live = 0
        self._prompt: str | None = None
        self._written = 0
        self.reconfigured: list[dict[str, Any]] = []
        self._layout: tuple[Any, ...] = ()
        self._held: set[tuple[Any, ...]] = set()
        self._codes: set[str] = set()
        self._check(self._config)
        self._build()

    @property
    def config(self) -> Any:
        mode = self._config.cudagraph_mode or CUDAGraphMode.NONE
        return self._config.replace(cudagraph_mode=mode, block_size=16)

    @property
    def model_config(self) -> Any:
        return SHAPES["tiny-llama"]

    @property
    def selection(self) -> Selection:
        return Selection(CANDIDATES[0], None, lambda: CANDIDATES)

    @property
    def cudagraph_mode(self) -> CUDAGraphMode:
        return self._resolved()[0]

    @property
    def notes(self) -> list[str]:
        return []

    @property
    def compile_report(self) -> Any:
        if self._config.compilation_mode != "VLLM_COMPILE":
            return None
        return SimpleNamespace(
            from_cache=False, pieces=31, classes=(1, 2, 3), trace_ms=1000.0, total_ms=24_000.0, saved=True
        )

    @property
    def mode_trail(self) -> list[str]:
        return self._resolved()[1]

    def _resolved(self) -> tuple[CUDAGraphMode, list[str]]:
        compiled = self._config.compilation_mode == "VLLM_COMPILE"
        asked = CUDAGraphMode.parse(self._config.cudagraph_mode or "NONE")
        return modes.resolve(asked, CANDIDATES[0].tier, compiled, backend="TORCH_SDPA", breakable=not compiled)

    @property
    def capture_sizes(self) -> list[int]:
        return list(self._config.cudagraph_capture_sizes or ()) if self.cudagraph_mode is not CUDAGraphMode.NONE else []

    @property
    def capture_records(self) -> list[CaptureRecord]:
        kinds = [mode for mode in ("PIECEWISE", "FULL") if mode in self.cudagraph_mode.value]
        sizes = sorted(self.capture_sizes, reverse=True)
        return [
            CaptureRecord(kind, size, 5.0, 1.0, 31 if kind == "PIECEWISE" else 1) for kind in kinds for size in sizes
        ]

    @property
    def memory(self) -> dict[str, int]:
        return {"weights": 0, "kv": 0, "graphs": 0, "peak": 0}

    def reconfigure(self, **changes: Any) -> ReconfigureReport:
        self.threads.add(threading.current_thread().name)
        asked = self._config.replace(**changes)
        self._check(asked)
        self.reconfigured.append(changes)
        self._config = asked
        return self._build()

    def _build(self) -> ReconfigureReport:
        """Compile and capture what is new; a change of length or page size drops every graph."""
        rebuilt, kept = {}, ["weights", "tokenizer"]
        layout = self._config.max_model_len, self._config.block_size
        if layout != self._layout:
            self._layout, self._held = layout, set()
            rebuilt["kv_cache"] = 10.0
        else:
            kept.append("kv_cache")
        code = self._config.compilation_mode or "NONE"
        if code != "NONE" and code not in self._codes:
            self._progress("compiling", 0, 3, "class 1 of 3")
            rebuilt["compile"] = 24_000.0
        self._codes.add(code)
        wanted = {(code, self.cudagraph_mode, size) for size in self.capture_sizes}
        new = sorted((key[2] for key in wanted - self._held), reverse=True)
        for i, size in enumerate(reversed(new)):
            self._progress("capturing", i, len(new), f"FULL size {size}")
        if new:
            rebuilt["graphs"] = 5.0 * len(new)
        elif wanted:
            kept.append("graphs")
        self._held |= wanted
        return ReconfigureReport({}, rebuilt, tuple(kept))

    @staticmethod
    def _check(config: EngineConfig) -> None:
        if config.attention_backend not in (None, "TORCH_SDPA"):
            asked = f"attention_backend={config.attention_backend!r}"
            raise BackendError(asked, "needs a GPU", "Usable here: TORCH_SDPA.")
        if 13 in (config.cudagraph_capture_sizes or ()):
            raise CaptureError("capture of mode FULL, size 13", "out of memory", "Lower gpu_memory_utilization.")

    def prime(self, batch: int, context: int, max_tokens: int) -> list[str]:
        self.primed.append((batch, context))
        self._live = batch
        return [str(i) for i in range(batch)]

    def add_request(self, prompt: str, params: Any) -> str:
        self._prompt, self._written, self._live = prompt, 0, 1
        self._max_tokens = params.max_tokens
        return "text"

    @property
    def has_unfinished(self) -> bool:
        return self._live > 0

    def reset(self) -> None:
        self._live, self._prompt = 0, None

    def step(self) -> StepReport:
        self.threads.add(threading.current_thread().name)
        self.gate(self)
        self.steps += 1
        batch = self._live
        mode = self.cudagraph_mode.decode_mode().name
        size = pad_to(batch, self.capture_sizes) if mode != "NONE" else None
        outputs: tuple[RequestOutput, ...] = ()
        if self._prompt is not None:
            self._written += 1
            text = " word" * self._written
            over = self._written >= self._max_tokens
            outputs = (
                RequestOutput(
                    "text", (1,), (2,) * self._written, text, " word", "length" if over else None, Usage(1, 1)
                ),
            )
            self._live = 0 if over else 1
        ran = size or batch
        return StepReport(
            step_id=self.steps, mode="NONE" if size is None else mode, size=ran, num_tokens=batch, num_reqs=batch,
            num_padded=ran - batch, max_query_len=1, max_seq_len=64, backend="TORCH_SDPA", outputs=outputs,
            wall_ms=self.wall_ms(self.steps), phases_us=dict.fromkeys(PHASES, 10.0), emulated=size is not None,
        )  # fmt: skip

    def close(self) -> None:
        self.closed = True


def live_source(recordings: Sequence[Recording] = (), **limits: Any) -> tuple[LiveSource, list[FakeLLM]]:
    """A LIVE source over fakes, and the list into which every engine it builds is put."""
    made: list[FakeLLM] = []

    def make(model: str, **kwargs: Any) -> FakeLLM:
        made.append(FakeLLM(model, **kwargs))
        return made[-1]

    source = LiveSource(
        EngineRoom(make),
        dataclasses.replace(LIMITS, **limits),
        device="",
        ask_backends=lambda *args: CANDIDATES,
        recordings=recordings,
    )
    return source, made


def row(
    mode: str, batch: int, ms: float, *, size: int | None = None, launches: int | None = None, **changes: Any
) -> Row:
    """A row with 50 samples around `ms`, in a shape that a recording would accept."""
    samples = tuple(round(ms + (i % 10 - 4.5) * ms * 0.004, 4) for i in range(50))
    found = summary(samples)
    base: dict[str, Any] = dict(
        model="smollm2-135m", dtype="bfloat16", backend="TRITON_ATTN", backend_version=None,
        requested_mode="FULL_DECODE_ONLY" if mode == "FULL" else mode, mode=mode, size=size or batch, batch=batch,
        context=512, query_len=1, compile="NONE", primed=True, p10_ms=found.p10, p50_ms=found.p50, p90_ms=found.p90,
        n=found.n, samples_ms=samples, host_us=100.0, device_us=100.0, launches=launches,
        graph_launches=int(mode == "FULL"), launch_cost_us={}, gb_s=None, floor_ms=None, tok_s=batch / ms * 1e3,
        peak_mib=0.0, weights="random",
    )  # fmt: skip
    return Row(**{**base, **changes})


def recording(rows: Sequence[Row], gpu: str = "NVIDIA H200", **changes: Any) -> Recording:
    versions = {"python": "3.12", "torch": "2.11.0", "triton": "3.6.0"}
    made = Provenance(
        Kind.RECORDED, gpu, "580.65", "a CPU", versions, "abc1234", False, "labkit record", "2026-11-30T10:00:00Z",
        "as listed", 50, True,
    )  # fmt: skip
    return Recording(dataclasses.replace(made, **changes), tuple(rows))


#: Milliseconds that no formula would give.
EAGER_MS = {1: 5.31, 2: 5.37, 4: 5.29, 16: 5.52, 64: 5.9}
FULL_MS = {1: 1.21, 2: 1.26, 4: 1.33, 8: 1.42, 16: 1.57, 24: 1.71}


def h200() -> Recording:
    """NONE on a few batches, FULL on some sizes."""
    eager = [row("NONE", batch, ms, launches=412) for batch, ms in EAGER_MS.items()]
    graphs = [row("FULL", size, ms, launches=3) for size, ms in FULL_MS.items()]
    return recording([*eager, *graphs])


def newest(*modes: str, compile: str = "NONE", **where: Any) -> tuple[Any, ...]:
    """A row for each of some graph modes, all of the newest shipped recording that has every one; and that recording.

    Written without the panels' code: what a panel looks up is compared with it.
    """
    from labkit.measure.library import library

    alike = {"FULL_DECODE_ONLY": "FULL", "FULL_AND_PIECEWISE": "FULL"}
    for one in sorted(library().of("steps"), key=lambda e: e.recording.provenance.date, reverse=True):
        rows = [
            next((r for r in one.recording.rows if r.compile == compile and not r.chunk and r.size == r.batch
                  and alike.get(r.mode, r.mode) == mode and all(getattr(r, k) == v for k, v in where.items())), None)
            for mode in modes
        ]  # fmt: skip
        if all(rows):
            return (*rows, one.recording)
    raise AssertionError(f"no shipped recording has {modes} of {where}")
