"""What the loaded engine holds and what things took, so that a click can be announced. Refuses to touch an engine."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.graphs.dispatcher import GraphDispatcher, GraphKey
from labkit.lab.engine_room import TEXT_TOKENS, Limits
from labkit.lab.settings import Settings, show_sizes

if TYPE_CHECKING:
    from labkit.engine.report import CaptureRecord, ReconfigureReport

#: Guesses before anything was measured, (GPU, CPU). A FULL graph of thirty layers took some 50 ms on a data-centre GPU.
LOAD_S, COMPILE_S, CAPTURE_MS, STEP_MS = 4.0, 30.0, (50.0, 2.0), (8.0, 60.0)
#: The same of a step with a backend that is there for study on a CPU: one interprets, one computes every score.
STUDY_STEP_MS = {"TRITON_ATTN": 3000.0, "FLEX_ATTENTION": 3000.0}


class Ledger:
    """Times of this session by what they belong to, and the graphs and code of the engine that is loaded.

    Args:
        device: the GPU's name, empty on a CPU.
        compile_s: seconds of the first compilation by model, where known from elsewhere.
    """

    def __init__(self, limits: Limits, device: str, compile_s: Mapping[str, float]) -> None:
        self._limits, self._device = limits, device
        self._compile_s = dict(compile_s)
        self._load_s: dict[str, float] = {}
        self._capture_ms: dict[tuple[str, ...], float] = {}
        self._step_ms: dict[tuple[str, ...], float] = {}
        self._layout: tuple[int, int] | None = None
        self._rows = 0
        self._graphs: set[tuple[Any, ...]] = set()
        self._records: set[CaptureRecord] = set()
        self._compiled = False

    # --- what was seen ---------------------------------------------------------------------------------------------

    def captured_now(self, llm: Any, report: ReconfigureReport | None) -> list[CaptureRecord]:
        """Those of the engine's graphs that it did not have before; to be asked before `note_ready`."""
        anew = report is None or "kv_cache" in report.rebuilt_ms
        return [record for record in llm.capture_records if anew or record not in self._records]

    def note_ready(self, settings: Settings, llm: Any, report: ReconfigureReport | None, seconds: float) -> None:
        """An engine has got ready in `seconds`; `report` is None where it was built for it."""
        records, compiled = llm.capture_records, llm.compile_report
        if report is None:
            spent = sum(r.ms for r in records) / 1e3 + (compiled.total_ms / 1e3 if compiled else 0.0)
            self._load_s[settings.model] = max(0.0, seconds - spent)
        if records:
            self._capture_ms[_code(settings)] = sum(r.ms for r in records) / len(records)
        if compiled is not None and not compiled.from_cache:
            self._compile_s[settings.model] = compiled.total_ms / 1e3
        if report is None or "kv_cache" in report.rebuilt_ms:
            self._graphs.clear()
            self._records.clear()
            self._rows = 0
        self._records.update(records)
        self._layout = llm.config.max_model_len, llm.config.block_size
        self._rows = max(self._rows, *llm.capture_sizes, 0)
        self._compiled = compiled is not None or (self._compiled and report is not None)
        held = GraphDispatcher(llm.cudagraph_mode, llm.capture_sizes, llm.config.max_num_seqs).capture_order()
        self._graphs |= {(llm.selection.selected, settings.version, settings.compile, key) for key in held}

    def note_step(self, settings: Settings, ms: float) -> None:
        """The median step of a run."""
        key = *_code(settings), settings.mode
        self._step_ms[key] = ms

    # --- what will be ----------------------------------------------------------------------------------------------

    def announce(
        self,
        settings: Settings,
        loaded: bool,
        backend: str,
        wanted: Sequence[GraphKey],
        layout: tuple[int, int] | None,
    ) -> str:
        """One sentence on what a run will do and about how long it takes.

        Args:
            loaded: whether the engine holds the model's weights already.
            wanted: the graphs that the engine will have.
            layout: longest context and page size, by which the memory is laid out.
        """
        gpu, parts, seconds = 0 if self._device else 1, [], 0.0
        if not loaded:
            known = self._load_s.get(settings.model)
            parts.append(f"load {settings.model}" + (f" ({known:.0f} s last time)" if known else ""))
            seconds += known or LOAD_S
        if settings.compile != "NONE" and not (loaded and self._compiled):
            known = self._compile_s.get(settings.model)
            first = f"about {about(known)}" if known else "tens of seconds"
            parts.append(
                f"compile it (the first compile of this model takes {first}, later starts read it from the cache)"
            )
            seconds += known or COMPILE_S
        todo = wanted
        if loaded and layout == self._layout and max((key.size for key in wanted), default=0) <= self._rows:
            where = backend, settings.version, settings.compile
            todo = [key for key in wanted if (*where, key) not in self._graphs]
        if todo:
            sizes = sorted({key.size for key in todo})
            parts.append(f"capture {self._names(todo)} ({show_sizes(sizes)})")
            seconds += len(todo) * self._capture_ms.get(_code(settings), CAPTURE_MS[gpu]) / 1e3
        elif wanted:
            parts.append(f"keep {'its' if len(wanted) == 1 else 'all'} {self._names(wanted)}")
        limits, step_ms = self._limits, self._step(settings)
        most = (limits.warmup + limits.steps) * step_ms / 1e3
        measuring = max(min(limits.budget_s, most), (limits.warmup + limits.min_steps) * step_ms / 1e3)
        parts.append(
            f"measure up to {limits.steps} steps after {limits.warmup} of warm-up, and write {TEXT_TOKENS} tokens"
        )
        seconds += measuring + min(limits.text_s, TEXT_TOKENS * step_ms / 1e3)
        return f"Run will {', '.join(parts)}: about {about(seconds)}."

    def _step(self, settings: Settings) -> float:
        """Milliseconds of a step: as measured, or in the slowest mode that was, or a guess."""
        code = _code(settings)
        known = self._step_ms.get((*code, settings.mode))
        if known is None:
            known = max((ms for key, ms in self._step_ms.items() if key[:-1] == code), default=None)
        if known is not None:
            return known
        return STEP_MS[0] if self._device else STUDY_STEP_MS.get(settings.backend, STEP_MS[1])

    def _names(self, keys: Sequence[GraphKey]) -> str:
        """ "4 graphs", "35 steps in pieces and 35 graphs"; on a CPU they are emulated."""
        counts = collections.Counter(key.mode for key in keys)
        words = {"FULL": ("graph", "graphs"), "PIECEWISE": ("step in pieces", "steps in pieces")}
        emulated = "" if self._device else "emulated "
        return " and ".join(f"{n} {emulated}{words[mode][n > 1]}" for mode, n in counts.items())


def about(seconds: float) -> str:
    """Seconds to about two digits, or minutes."""
    return f"{seconds:.1f} s" if seconds < 3 else f"{round(seconds)} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _code(settings: Settings) -> tuple[str, ...]:
    """What fixes the code of a step, but for its mode."""
    return settings.model, settings.choice, settings.compile
