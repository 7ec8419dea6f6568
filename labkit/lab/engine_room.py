"""The one engine that the panels of a notebook share, and how far it may be driven. Refuses to know what it is for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.engine.report import ReconfigureReport
    from labkit.lab.ledger import Ledger

TEXT_TOKENS = 24


@dataclasses.dataclass(frozen=True)
class Limits:
    """How far the controls go on a machine, and how long a run may take there.

    steps: measured steps at most; a run ends after `budget_s` seconds once `min_steps` are done.
    text_s: seconds after which writing text ends, finished or not.
    model_bytes: the largest weights that are offered.
    """

    max_num_seqs: int
    max_context: int
    max_num_batched_tokens: int
    sizes: tuple[int, ...] | None
    warmup: int
    steps: int
    min_steps: int
    budget_s: float
    model_bytes: int
    text_s: float = 5.0
    default_batch: int = 1
    default_context: int = 512


#: Two cores should answer in seconds: small batches, short contexts, four sizes.
CPU_LIMITS = Limits(8, 1024, 512, (1, 2, 4, 8), 2, 20, 3, 3.0, 4 << 30, default_context=64)
GPU_LIMITS = Limits(256, 4096, 8192, None, 10, 60, 50, 20.0, 40 << 30)


class EngineRoom:
    """Holds the one engine of this process, so that running a cell twice does not hold memory twice."""

    def __init__(self, make: Callable[..., Any] | None = None) -> None:
        self._make = make
        self.llm: Any = None
        self.model = ""
        self.report: ReconfigureReport | None = None  # of the newest change; None for an engine just built
        self.ledger: Ledger | None = None  # of what the engine holds: one for all panels that share it
        self._progress: Callable[[str, int, int, str], None] = lambda *args: None

    def prepare(self, model: str, progress: Callable[[str, int, int, str], None], **changes: Any) -> Any:
        """The engine with this model and these settings: reconfigured where possible, built where not."""
        self._progress, self.report = progress, None
        if self.llm is not None and self.model != model:
            # Weights of two models need not fit at once, so the old ones go first.
            self.close()
        if self.llm is None:
            self.llm = (self._make or _make_llm)(model, progress=self._report, **changes)
            self.model = model
        else:
            self.llm.reset()
            self.report = self.llm.reconfigure(**changes)
        return self.llm

    def close(self) -> None:
        """Give the engine's memory back."""
        llm, self.llm = self.llm, None
        if llm is not None:
            llm.close()

    def _report(self, stage: str, done: int, total: int, detail: str) -> None:
        self._progress(stage, done, total, detail)


def _make_llm(model: str, **kwargs: Any) -> Any:
    from labkit.llm import LLM

    return LLM(model, **kwargs)


_room: EngineRoom | None = None


def shared_room() -> EngineRoom:
    """The engine room of this process."""
    global _room
    if _room is None:
        _room = EngineRoom()
    return _room
