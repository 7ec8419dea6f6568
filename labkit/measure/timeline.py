"""A step's timeline from a profiler's trace, checked before it is believed. Refuses to know the engine.

The host lane holds launches and copies, the device lane what they started, in the order of time. On a CPU there is no
device lane: torch's CPU operators are not launches, so a CPU step has no timeline, and `why_not` says so.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from labkit.engine.report import PHASES
from labkit.measure import launches
from labkit.measure.chrome import Trace, read_events
from labkit.measure.integrity import CLOCK_US, TOLERANCE, Expected, Step, problems, step_of
from labkit.measure.roles import role_of
from labkit.measure.spans import Span, StepTimeline, TimelineError, union


def why_not() -> str:
    """Why no step can be traced here; empty when one can. A saved trace can be read anywhere."""
    reason = launches.why_not()
    if not reason:
        return ""
    return f"{reason}: a step has no device lane here. A saved trace or a recording can be read anywhere"


def from_trace(
    events: Iterable[Any],
    *,
    title: str = "a step",
    mode: str = "",
    expected: Expected | None = None,
    phases_us: Mapping[str, float] | None = None,
    forward_us: float | None = None,
    step: int = -1,
    notes: Sequence[str] = (),
) -> StepTimeline:
    """The timeline of one step in the `traceEvents` of a Chrome trace.

    A step that was annotated as labkit does it (`chrome.STEP`) begins where the annotation begins; without one the
    whole trace counts as one step, from its first host call. Times of phases are the engine's own, laid end to end.

    Args:
        mode: "NONE", "PIECEWISE" or "FULL"; empty reads it from the number of graphs: none, several, one.
        expected: what is known from elsewhere, for the integrity check.
        phases_us: host microseconds of the step's phases, `StepReport.phases_us` of this very step.
        forward_us: device time of the forward alone without the profiler, between two events.
        step: which of several annotated steps; the last one by default.

    Raises:
        TimelineError: the trace holds no host call that starts anything, as the trace of a step on a CPU.
    """
    expected = expected or Expected()
    trace = read_events(events)
    if trace.steps and not -len(trace.steps) <= step < len(trace.steps):
        raise TimelineError(f"step {step}", f"the trace holds {len(trace.steps)} steps", "Ask for another.")
    found = step_of(trace, step)
    starts = [call for call in found.calls if call.kind != "event"]
    if not any(call.kind in ("kernel", "graph") for call in starts):
        raise TimelineError(
            title,
            "the trace holds no launch of a kernel or a graph (on a CPU there is none: its operators are no launches)",
            "Profile a step on a CUDA device, with ProfilerActivity.CUDA.",
        )
    index: dict[object, int] = {call.correlation: i for i, call in enumerate(starts) if call.correlation is not None}
    roles: dict[int, str] = {}
    device = []
    for work, call in found.works:
        at = index[call.correlation]
        role = "copy" if work.kind == "copy" else role_of(work.name)
        roles.setdefault(at, role)
        device.append(_span("device", work.name, role, work.begin_us, work.end_us, found.begin_us, at))
    own = {"graph": "graph", "copy": "copy"}
    host = [
        _span("host", c.name, own.get(c.kind) or roles.get(i, "other"), c.begin_us, c.end_us, found.begin_us)
        for i, c in enumerate(starts)
    ]
    graphs = sum(call.kind == "graph" for call in starts)
    timeline = StepTimeline(
        title=title,
        mode=mode or ("NONE" if not graphs else "FULL" if graphs == 1 else "PIECEWISE"),
        spans=(*_phases(phases_us or {}), *host, *device),
        wall_us=max(0.0, _wall_us(trace, found, step, phases_us)),
        launches=sum(call.kind in ("kernel", "graph") for call in starts),
        graph_launches=graphs,
        event_us=expected.event_us,
        problems=problems(found, expected),
        notes=tuple(notes),
    )
    if timeline.problems:
        return timeline
    return _with_notes(timeline, found, expected, forward_us)


def _span(
    lane: str, name: str, role: str, begin_us: float, end_us: float, zero_us: float, launch: int | None = None
) -> Span:
    finite = [t if t == t and abs(t) != float("inf") else zero_us for t in (begin_us, end_us)]  # a problem says so
    return Span(lane, name, role, finite[0] - zero_us, finite[1] - zero_us, launch)


def _phases(phases_us: Mapping[str, float]) -> list[Span]:
    out, at = [], 0.0
    for name in (*PHASES, *(n for n in phases_us if n not in PHASES)):
        if name in phases_us:
            out.append(Span("phase", name, "other", at, at + phases_us[name]))
            at += phases_us[name]
    return out


def _wall_us(trace: Trace, step: Step, which: int, phases_us: Mapping[str, float] | None) -> float:
    """The engine's own time where it is known, else the annotation's, else up to the last end of anything."""
    if phases_us:
        return sum(phases_us.values())
    if trace.steps:
        begin, end = trace.steps[which]
        return end - begin
    ends = [*(call.end_us for call in step.calls), *(work.end_us for work, _ in step.works)]
    return max((end for end in ends if end == end), default=step.begin_us) - step.begin_us


# --- what a reader should know --------------------------------------------------------------------------------------


def _with_notes(timeline: StepTimeline, step: Step, expected: Expected, forward_us: float | None) -> StepTimeline:
    notes = [waiting(timeline)]
    forward = _forward_spans(timeline, step)
    if forward and forward_us:
        notes.append(agreement(forward, forward_us))
    if expected.event_us is None:
        notes.append("No event-timed run without the profiler stands beside this trace.")
    if expected.eager and step.kernels_by_role().get("attention") != expected.eager.get("attention"):
        notes.append(
            f"Attention is {step.kernels_by_role().get('attention', 0)} kernels here and "
            f"{expected.eager.get('attention', 0)} in the eager step: a graph is captured for the longest length."
        )
    checks = [
        "every launch has its kernels, none starts before its launch "
        f"(clocks within {CLOCK_US:g} µs) or outside the traced time"
    ]
    if expected.event_us is not None:
        checks.append(f"kernel time within the event-timed step (+{TOLERANCE:.0%})")
    if expected.graph_nodes is not None and timeline.graph_launches:
        checks.append(f"{expected.graph_nodes} kernels of the replay, as many as were recorded")
    if expected.eager is not None:
        checks.append("the kernels of the eager step, copies and fills apart")
    notes.append(f"Checked: {'; '.join(checks)}.")
    return dataclasses.replace(timeline, notes=(*timeline.notes, *notes))


def waiting(timeline: StepTimeline) -> str:
    """A sentence on where the device's time goes: busy, waiting for its first work, waiting between kernels."""
    total = timeline.busy_us + timeline.idle_us
    gaps = timeline.device_idle()
    first = min((span.begin_us for span in timeline.device), default=0.0)
    before = sum(end - begin for begin, end in gaps if end <= first)
    share = timeline.busy_us / total if total else 0.0
    return (
        f"The device is busy {timeline.busy_us:.0f} of {total:.0f} µs ({share:.0%}): it waits {before:.0f} µs for its "
        f"first work and {timeline.idle_us - before:.0f} µs between kernels."
    )


def agreement(forward: Sequence[Span], forward_us: float) -> str:
    """A sentence that compares the forward's kernels in the trace with event timing without the profiler."""
    busy = sum(end - begin for begin, end in union((s.begin_us, s.end_us) for s in forward))
    extent = max(s.end_us for s in forward) - min(s.begin_us for s in forward)
    apart = abs(busy - forward_us) / forward_us
    said = (
        f"The forward's kernels are busy {busy:.0f} µs; events around it, without the profiler, say {forward_us:.0f} µs"
    )
    if apart <= TOLERANCE:
        return f"{said}: they agree within {TOLERANCE:.0%}."
    why = f"its kernels have gaps of {extent - busy:.0f} µs in all, which events count"
    if abs(extent - forward_us) / forward_us > TOLERANCE:
        why += f", and with its gaps it lasts {extent:.0f} µs under the profiler, which changes them"
    return f"{said}, {apart:.0%} apart: {why}."


def _forward_spans(timeline: StepTimeline, step: Step) -> list[Span]:
    """Device spans of the forward: of the one graph, or of what was launched between the runner's two events."""
    if timeline.graph_launches == 1:
        return [span for span in timeline.device if timeline.host[span.launch or 0].role == "graph"]
    records = [call.begin_us - step.begin_us for call in step.calls if call.kind == "event"]
    if len(records) != 2:
        return []
    inside = [records[0] <= call.begin_us <= records[1] for call in timeline.host]
    return [span for span in timeline.device if span.launch is not None and inside[span.launch]]


def overhead(plain_us: Sequence[float], profiled_us: Sequence[float]) -> str:
    """A sentence on what the profiler itself costs: medians of the same step without and with it, taken in turns."""
    plain, profiled = statistics.median(plain_us), statistics.median(profiled_us)
    return (
        f"The profiler makes the step {profiled / plain:.2f} times as long: {profiled:.0f} µs with it and "
        f"{plain:.0f} µs without, medians of {len(profiled_us)} and {len(plain_us)} steps in turns."
    )
