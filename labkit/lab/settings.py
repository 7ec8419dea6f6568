"""What a latency panel can be asked for, and what a run gave. Refuses to know widgets and engines."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from labkit.engine.report import CaptureRecord, StepReport
from labkit.errors import ConfigError
from labkit.graphs.sizes import check_capture_sizes

if TYPE_CHECKING:
    from labkit.measure.provenance import Provenance

AUTO = "AUTO"
#: Graph modes in the order in which the panel offers them.
MODES = ("NONE", "FULL", "FULL_DECODE_ONLY", "PIECEWISE", "FULL_AND_PIECEWISE")
#: Compilation modes in that order.
COMPILES = ("NONE", "VLLM_COMPILE")


@dataclasses.dataclass(frozen=True)
class Settings:
    """One position of all controls. `sizes=None` is the source's default list; `backend` may be AUTO.

    compile: the compilation mode. version: of FLASH_ATTN's kernels, None where the backend is to choose.
    """

    model: str
    backend: str
    mode: str
    sizes: tuple[int, ...] | None
    batch: int
    context: int
    prompt: str = ""
    compile: str = "NONE"
    version: int | None = None

    @property
    def is_eager(self) -> bool:
        """No graphs and nothing compiled: what `enforce_eager=True` gives."""
        return self.mode == "NONE" and self.compile == "NONE"

    @property
    def choice(self) -> str:
        """Backend and version in one word, as the list of backends holds them: "FLASH_ATTN:4"."""
        return f"{self.backend}:{self.version}" if self.version else self.backend


def read_choice(choice: str) -> tuple[str, int | None]:
    """The backend and the version of its kernels from what the list of backends holds."""
    name, _, version = choice.partition(":")
    return name, int(version) if version else None


@dataclasses.dataclass(frozen=True)
class Range:
    """What a number control may hold: every step from low to high, or only `points`. Both ends are inclusive."""

    low: int
    high: int
    step: int = 1
    points: tuple[int, ...] | None = None

    def nearest(self, value: int) -> int:
        """`value`, or the closest allowed one; of two equally close ones the larger, as padding would go."""
        if self.points:
            return min(self.points, key=lambda p: (abs(p - value), -p))
        return min(max(value, self.low), self.high)


@dataclasses.dataclass(frozen=True)
class Run:
    """One finished run: the row with its numbers, where they come from, and what was said about it.

    reports: the StepReports of a LIVE run in the order of `row.samples_ms`; empty for a recorded one.
    eager_launches: fewest and most launches of the same step without a graph, where known.
    ready: sentences on what getting ready for the run took and what was kept. graphs: of a LIVE run, one record a size.
    earlier: it was brought back from before the kernel started, without its reports.
    """

    number: int
    settings: Settings
    row: Any
    provenance: Provenance
    notes: tuple[str, ...] = ()
    reports: tuple[StepReport, ...] = ()
    emulated: bool = False
    eager_launches: tuple[int, int] | None = None
    text: str = ""
    text_note: str = ""
    stopped: bool = False
    ready: tuple[str, ...] = ()
    graphs: tuple[CaptureRecord, ...] = ()
    earlier: bool = False

    @property
    def kind(self) -> str:
        return str(self.provenance.kind)


def parse_sizes(text: str, limit: int) -> tuple[int, ...] | None:
    """Capture sizes as typed: "1, 2, 4 8" or "" for the default list. Ascending, without duplicates.

    Raises:
        ConfigError: an entry is not a whole number, is below 1, or above `limit` tokens; every bad entry is named.
    """
    words = [w for w in re.split(r"[,;\s]+", text.strip().strip("[]()")) if w]
    if not words:
        return None
    wrong = []
    for word in words:
        if not re.fullmatch(r"[+-]?\d+", word):
            wrong.append(f"{word!r} is not a whole number")
        elif int(word) < 1:
            wrong.append(f"{int(word)} is below the smallest size, 1")
        elif int(word) > limit:
            wrong.append(f"{int(word)} is above the largest possible step, {limit} tokens")
    if wrong:
        raise ConfigError(
            f"capture sizes {text.strip()!r}",
            "; ".join(wrong),
            f"Write whole numbers from 1 to {limit}, like 1, 2, 4, 8, or leave the box empty for the default list.",
        )
    return tuple(check_capture_sizes([int(w) for w in words], limit))


def show_sizes(sizes: Sequence[int], keep: int = 6) -> str:
    """A list of sizes, its middle left out when it is long: "1, 2, 4, 8 … 248, 256 (35 sizes)"."""
    if len(sizes) <= 2 * keep:
        return ", ".join(map(str, sizes))
    head, tail = ", ".join(map(str, sizes[:keep])), ", ".join(map(str, sizes[-2:]))
    return f"{head} … {tail} ({len(sizes)} sizes)"
