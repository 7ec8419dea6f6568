"""What a run of the bill hands to the panel, the same from every source. Refuses to know where numbers come from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from labkit.lab.runs import Outcome
from labkit.measure.provenance import Provenance
from labkit.measure.stats import Measurement

#: Points of the amortisation curve.
REQUESTS = tuple(sorted({round(10 ** (i / 8)) for i in range(33)}))
COLUMNS = [
    ("way", "configuration"), ("startup_s", "start-up, s"), ("mib", "graphs, MiB"), ("step_ms", "step, ms"),
    ("looks", "places to look"), ("mode", "step ran in"),
]  # fmt: skip
UNKNOWN = "not recorded"


def outcome(
    *,
    way: str,
    said: str,
    mode: str,
    startup_s: float | None,
    parts_s: dict[str, float],
    mib: float | None,
    step_ms: float,
    looks: int | None,
    batch: int,
    tokens: int,
    model: str,
    made: Provenance,
    samples: Sequence[float],
    why: str,
    notes: Sequence[str] = (),
    stopped: bool = False,
) -> Outcome:
    """One configuration with its four prices and the curve of what some requests cost in all.

    Args:
        parts_s: start-up by part, seconds. mib: device memory of graphs. looks: see `ways.looks_inside`.
        tokens: that each request generates, `batch` requests at a time. samples: milliseconds of steps.
        why: ends the summary. None for what is not known.
    """
    serve = tokens * step_ms / 1e3 / batch
    curve = [] if startup_s is None else [startup_s + n * serve for n in REQUESTS]
    start = f"{startup_s:,.3g} s to start" if startup_s is not None else f"start-up {UNKNOWN}"
    memory = f"{mib:,.3g} MiB of graphs" if mib is not None else f"memory of graphs {UNKNOWN}"
    places = "" if looks is None else f", and {looks:,} place{'s' * (looks != 1)} to look into a step"
    summary = f"{said}: {start}, {memory}, {step_ms:.3g} ms a step at batch {batch}{places}. {why}"
    values: dict[str, Any] = {
        "way": said, "key": way, "startup_s": startup_s, "mib": mib, "step_ms": step_ms, "looks": looks, "mode": mode,
        "batch": batch, "tokens": tokens, "model": model, **{f"{name}_s": s for name, s in parts_s.items()},
    }  # fmt: skip
    data = {"requests": list(REQUESTS) if curve else [], "total_s": curve, "parts_s": dict(parts_s)}
    measured = Measurement(made.kind, tuple(samples), said)
    return Outcome(data, values, summary, made, measured, tuple(notes), stopped=stopped)


def paid_back(extra_s: float, tokens: int, slow_ms: float, fast_ms: float, batch: int) -> int | None:
    """Requests after which `extra_s` more of start-up is earned by faster steps; None where it never is.

    Requests of `tokens` tokens each run `batch` at a time. 0 where there is nothing to pay.
    """
    if extra_s <= 0:
        return 0
    saved = tokens * (slow_ms - fast_ms) / 1e3 / batch
    return math.ceil(round(extra_s / saved, 9)) if saved > 0 else None
