"""One step without and with its graph, as an outcome of the panel. Refuses to know who measured or computed it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.lab.ch07.exercises import break_even
from labkit.lab.runs import Outcome
from labkit.measure.provenance import Kind, Provenance
from labkit.measure.spans import StepTimeline
from labkit.measure.stats import Measurement

COLUMNS = [
    ("what", "what ran"), ("eager_launches", "launches, eager"), ("launches", "launches, graph"),
    ("eager_ms", "eager, ms/step"), ("graph_ms", "graph, ms/step"), ("capture_ms", "capture, ms"),
    ("break_even", "paid for after, steps"),
]  # fmt: skip
#: Points of the curve; steps it shows where there is no break-even to end behind.
POINTS, STEPS = 21, 1000


@dataclasses.dataclass(frozen=True)
class Step:
    """One way of running the step.

    samples_ms: its times, or the one that was computed; median_ms: their middle. launches: None where nothing counts.
    phases_us: the engine's host phases, empty where unknown.
    """

    median_ms: float
    samples_ms: Sequence[float]
    launches: int | None
    phases_us: Mapping[str, float] = dataclasses.field(default_factory=dict)
    timeline: StepTimeline | None = None


def outcome(
    what: str, eager: Step, graph: Step, capture_ms: float | None, made: Provenance, why: str,
    *, notes: Sequence[str] = (), stopped: bool = False, values: Mapping[str, Any] | None = None, unpaid: str = "",
) -> Outcome:  # fmt: skip
    """A run: both steps, the curve of what was saved, and the sentence.

    Args:
        what: model and batch, or kernels. capture_ms: None where it was not measured. why: the reason, as sentences.
        unpaid: what is said in place of a break-even, where there is no capture to pay for.
    """
    saved, kind = eager.median_ms - graph.median_ms, Kind(made.kind)
    even = None if capture_ms is None else break_even(_ns(capture_ms), _ns(eager.median_ms), _ns(graph.median_ms))
    last = STEPS if even is None else max(10, 2 * even)
    steps = [round(last * i / (POINTS - 1), 3) for i in range(POINTS)]
    walls = [1e3 * eager.median_ms, 1e3 * graph.median_ms]
    data: dict[str, Any] = {
        "steps": steps, "saved_ms": [n * saved for n in steps], "walls_us": walls,
        "finish_eager": [walls[0]] * 2, "finish_graph": [walls[1]] * 2, "break_even_at": [even],
        "capture_line_ms": [capture_ms] * 2,
    }  # fmt: skip
    if eager.timeline is not None and graph.timeline is not None:
        both = (eager.timeline, graph.timeline)
        data["timelines"] = [one.as_dict() for one in both]
        data["finish_eager"], data["finish_graph"] = ([one.wall_us] * 2 for one in both)
        if kind is not Kind.SIMULATED:
            notes = [*notes, "The timelines were taken with the profiler, which makes a step longer than its median."]
    else:
        data |= {f"{name}_us": us for name, us in _grouped(eager.phases_us, graph.phases_us).items()}
    numbers = {
        "what": what, "eager_launches": eager.launches, "launches": graph.launches, "eager_ms": eager.median_ms,
        "graph_ms": graph.median_ms, "capture_ms": capture_ms, "break_even": even, **(values or {}),
    }  # fmt: skip
    return Outcome(
        data, numbers, f"{_first(what, eager, graph)} {why} {unpaid or _paid(capture_ms, even, saved)}".strip(), made,
        Measurement(kind, tuple(graph.samples_ms), "with the graph"), tuple(notes), "", stopped,
    )  # fmt: skip


def _ns(ms: float) -> int:
    return max(1, round(1e6 * ms))  # steps of a queue are so short that µs would be coarse


_GROUPS = {
    "before": ("schedule", "dispatch", "inputs", "prepare"), "launch": ("launch",), "wait": ("sample",),
    "after": ("commit", "detokenize"),
}  # fmt: skip


def _grouped(eager: Mapping[str, float], graph: Mapping[str, float]) -> dict[str, list[float]]:
    return {
        name: [sum(phases.get(one, 0.0) for one in parts) for phases in (eager, graph)]
        for name, parts in _GROUPS.items()
    }


def _first(what: str, eager: Step, graph: Step) -> str:
    def said(step: Step) -> str:
        if step.launches is None:
            return f"{ms(step.median_ms)}"
        return f"{ms(step.median_ms)} with {step.launches:,} launch{'es' * (step.launches != 1)}"

    return f"{what}: {said(eager)} eagerly, {said(graph)} as a graph."


def _paid(capture_ms: float | None, even: int | None, saved: float) -> str:
    if capture_ms is None:
        return "What capturing took was not recorded, so that no break-even is shown."
    if even is None:
        return f"Capturing took {ms(capture_ms)}, and nothing is saved that could pay for it."
    return f"Capturing took {ms(capture_ms)}; at {ms(saved)} saved per step it is paid for after {even:,} steps."


def ms(value: float) -> str:
    """A time in words: ms, or µs where that reads better."""
    return f"{value:,.3g} ms" if abs(value) >= 0.1 else f"{1e3 * value:,.3g} µs"
