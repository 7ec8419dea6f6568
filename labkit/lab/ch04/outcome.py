"""What a run of the chapter's panel holds, and the sentences about it. Refuses to know where the numbers come from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from labkit.lab.runs import Outcome
from labkit.measure.provenance import Kind, Provenance
from labkit.measure.stats import Measurement

COLUMNS = [
    ("call", "call"), ("what", "computed by"), ("programs", "programs"), ("splits", "splits"), ("sms", "SMs"),
    ("share_pct", "SMs in use, %"), ("us", "time, µs"), ("best", "fastest with splits"), ("difference", "difference"),
]  # fmt: skip
#: Multiprocessors in one row of the grid.
ACROSS = 12


@dataclasses.dataclass(frozen=True)
class Found:
    """A call at a number of splits, and the same with other numbers.

    what: who computed it. call: its shape in words. programs: with something to do, splits included. sms: of the GPU,
    None where there are none. per_sm: programs on each of them when the call begins. us: of a call. curve: (splits,
    µs).
    difference: the largest number by which a split result is off the unsplit one; None where it was not computed.
    differences: the same for each point of the curve.
    """

    what: str
    call: str
    batch: int
    q_len: int
    kv_len: int
    kv_heads: int
    splits: int
    programs: int | None
    us: float
    curve: Sequence[tuple[int, float]]
    sms: int | None = None
    per_sm: Sequence[int] = ()
    difference: float | None = None
    differences: Sequence[float] = ()

    @property
    def share_pct(self) -> float | None:
        """Multiprocessors with at least one program, of 100."""
        return 100 * sum(n > 0 for n in self.per_sm) / self.sms if self.sms and self.per_sm else None

    @property
    def best(self) -> int:
        return min(self.curve, key=lambda point: point[1])[0]


def outcome(
    found: Found, made: Provenance, summary: str, samples: Sequence[float] = (), *, notes: Sequence[str] = (),
    stopped: bool = False,
) -> Outcome:  # fmt: skip
    """A run of it. samples: µs at the number of splits asked for; without them the one time counts."""
    data: dict[str, Any] = {
        "curve_splits": [n for n, _ in found.curve], "curve_us": [us for _, us in found.curve],
        "sm_x": [i % ACROSS for i in range(len(found.per_sm))], "sm_y": [i // ACROSS for i in range(len(found.per_sm))],
        "sm_programs": list(found.per_sm), "differences": list(found.differences),
    }  # fmt: skip
    values = {
        "what": found.what, "call": found.call, "batch": found.batch, "q_len": found.q_len, "kv_len": found.kv_len,
        "kv_heads": found.kv_heads, "splits": found.splits, "programs": found.programs, "sms": found.sms,
        "share_pct": found.share_pct, "us": found.us, "best": found.best, "difference": found.difference,
    }  # fmt: skip
    measured = Measurement(Kind(made.kind), tuple(samples) or (found.us,), f"{found.splits} splits")
    return Outcome(data, values, summary, made, measured, tuple(notes), stopped=stopped)


def call_words(batch: int, q_len: int, kv_len: int) -> str:
    """The shape of a call in a few words."""
    requests = "1 request" if batch == 1 else f"{batch} requests"
    return f"{requests}, {q_len:,} new over {kv_len:,}"


def plural(n: int, what: str) -> str:
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"
