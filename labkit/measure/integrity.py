"""Whether a trace of one step can be believed, rule by rule. Refuses to draw and to repair.

Profilers lose events, read two clocks, and put the kernels of a graph anywhere; a picture of such a trace teaches
something false. Each rule answers with a sentence, or with nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from labkit.measure.chrome import Call, Trace, Work
from labkit.measure.roles import role_of, short_name
from labkit.measure.spans import StepTimeline, union

#: Kernels may take this share more than the events around the whole step: two clocks, two runs.
TOLERANCE = 0.05
#: Host and device clocks are matched by the profiler; a kernel may seem to start this many µs before its launch.
CLOCK_US = 5.0


@dataclasses.dataclass(frozen=True)
class Expected:
    """What is known of a step from elsewhere; None leaves the rule that needs it out.

    event_us: device time of the whole step without the profiler, between two events.
    graphs: graphs that the step replays. graph_nodes: kernels that were recorded in them, all together.
    eager: kernels of the same batch's eager step by role, from its trace.
    """

    event_us: float | None = None
    graphs: int | None = None
    graph_nodes: int | None = None
    eager: Mapping[str, int] | None = None


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a trace: its calls, the work that they started, and work that no call of the whole trace started."""

    begin_us: float
    window: tuple[float, float] | None
    calls: tuple[Call, ...]
    works: tuple[tuple[Work, Call], ...]
    unclaimed: tuple[Work, ...]

    def graph_kernels(self) -> list[Work]:
        """Kernels that ran inside graphs."""
        return [work for work, call in self.works if call.kind == "graph" and work.kind == "kernel"]

    def kernels_by_role(self) -> dict[str, int]:
        """Kernels that ran, inside graphs and outside, by role; copies and fills of the device left out."""
        return dict(collections.Counter(role_of(work.name) for work, _ in self.works if work.kind == "kernel"))


def step_of(trace: Trace, which: int = -1) -> Step:
    """The step annotated `which`-th; without annotations the whole trace counts as one step."""
    calls, begin = trace.calls, min((call.begin_us for call in trace.calls), default=0.0)
    if trace.steps:
        begin, end = trace.steps[which]
        calls = tuple(call for call in trace.calls if begin <= call.begin_us <= end)
    started = [call for call in calls if call.kind != "event" and call.correlation is not None]
    mine = {call.correlation: call for call in started}
    known = {call.correlation for call in trace.calls if call.kind != "event"}
    works = tuple((work, mine[work.correlation]) for work in trace.works if work.correlation in mine)
    lost = tuple(work for work in trace.works if work.correlation is None or work.correlation not in known)
    return Step(begin, trace.window, calls, works, lost)


def problems(step: Step, expected: Expected) -> tuple[str, ...]:
    """Why the trace of a step must not be believed; empty when every rule holds."""
    broken = [*_times(step)]
    if broken:  # every other rule compares times
        return tuple(broken)
    for rule in (_attribution, _lost, _clock, _window, _graphs):
        broken += rule(step)
    broken += [*_event_time(step, expected), *_nodes(step, expected), *_eager(step, expected)]
    return tuple(broken)


def _times(step: Step) -> Iterator[str]:
    spans: list[Call | Work] = [*step.calls, *(work for work, _ in step.works), *step.unclaimed]
    bad = [s for s in spans if not (math.isfinite(s.begin_us) and math.isfinite(s.end_us) and s.end_us >= s.begin_us)]
    if bad:
        yield f"Spans of the trace end before they begin, or have no time: {len(bad)} ({_names(bad)})."


def _attribution(step: Step) -> Iterator[str]:
    if step.unclaimed:
        names = _names(step.unclaimed)
        yield f"No host call of the trace started {_count(step.unclaimed, 'span')} of the device ({names})."
    without = [c for c in step.calls if c.kind in ("kernel", "graph") and c.correlation is None]
    if without:
        yield f"No correlation id on {_count(without, 'launch', 'launches')}: the kernels cannot be found."
    known = [c for c in step.calls if c.kind != "event" and c.correlation is not None]
    ids = collections.Counter(str(c.correlation) for c in known)
    twice = [c for c in known if ids[str(c.correlation)] > 1]
    if twice:
        yield f"Host calls share correlation ids, so that kernels belong to either: {len(twice)} ({_names(twice)})."


def _lost(step: Step) -> Iterator[str]:
    served = {call.correlation for work, call in step.works if call.kind == "graph" or work.kind == "kernel"}
    lost = [
        call
        for call in step.calls
        if call.kind in ("kernel", "graph") and call.correlation is not None and call.correlation not in served
    ]
    if lost:
        yield f"The trace lost the kernels of {_count(lost, 'launch', 'launches')} ({_names(lost)})."


def _clock(step: Step) -> Iterator[str]:
    early = [(work, call) for work, call in step.works if work.begin_us < call.begin_us - CLOCK_US]
    if early:
        most = max(call.begin_us - work.begin_us for work, call in early)
        graphs = sum(call.kind == "graph" for _, call in early)
        where = f", {graphs} of them in graphs" if graphs else ""
        yield (
            f"Kernels start up to {most:.1f} µs before the host call that launched them ({len(early)}{where}): the "
            f"trace's clocks of host and device disagree by more than {CLOCK_US:g} µs."
        )


def _window(step: Step) -> Iterator[str]:
    if step.window is None:
        return
    begin, end = step.window
    out = [w for w, _ in step.works if w.begin_us < begin - CLOCK_US or w.end_us > end + CLOCK_US]
    if out:
        yield f"Outside the traced time: {_count(out, 'span')} of the device ({_names(out)})."


def _graphs(step: Step) -> Iterator[str]:
    """Kernels of one replay follow each other without those of another between: a graph runs as a whole."""
    spans: dict[object, list[float]] = {}
    for work, call in step.works:
        if call.kind == "graph":
            at = spans.setdefault(call.correlation, [work.begin_us, work.end_us])
            at[0], at[1] = min(at[0], work.begin_us), max(at[1], work.end_us)
    ordered = sorted(spans.values())
    mixed = sum(later[0] < earlier[1] - CLOCK_US for earlier, later in zip(ordered, ordered[1:], strict=False))
    if mixed:
        yield f"A graph begins while the one before it still runs: {_number(mixed, 'time')}."


def _event_time(step: Step, expected: Expected) -> Iterator[str]:
    if expected.event_us is None:
        return
    busy = sum(end - begin for begin, end in union((w.begin_us, w.end_us) for w, _ in step.works))
    if busy > expected.event_us * (1 + TOLERANCE):
        yield (
            f"Kernels take {busy:.0f} µs in the trace, and the same step without the profiler takes "
            f"{expected.event_us:.0f} µs between two events: more than {TOLERANCE:.0%} too long."
        )


def _nodes(step: Step, expected: Expected) -> Iterator[str]:
    replays = sum(call.kind == "graph" for call in step.calls)
    if expected.graphs is not None and replays != expected.graphs:
        yield f"The step replays {_number(expected.graphs, 'graph')}, and the trace shows {replays}."
        return
    found = len(step.graph_kernels())
    if expected.graph_nodes is not None and replays and found != expected.graph_nodes:
        yield (
            f"{_number(expected.graph_nodes, 'kernel')} were recorded into the step's graphs, and the trace shows "
            f"{found} in their replays."
        )


def _eager(step: Step, expected: Expected) -> Iterator[str]:
    if expected.eager is None:
        return
    ours, eager = step.kernels_by_role(), dict(expected.eager)
    # A graph copies its result out; attention is captured for the longest length, and may be split another way.
    differ = {
        role: (eager.get(role, 0), ours.get(role, 0))
        for role in sorted({*ours, *eager} - {"copy", "attention"})
        if eager.get(role, 0) != ours.get(role, 0)
    }
    attention = eager.get("attention", 0), ours.get("attention", 0)
    if bool(attention[0]) != bool(attention[1]):
        differ["attention"] = attention
    if differ:
        words = ", ".join(f"{role}: {a} eager and {b} here" for role, (a, b) in differ.items())
        yield f"The step has other kernels than the eager one, copies and fills apart ({words})."


def eager_counts(timeline: StepTimeline) -> dict[str, int]:
    """Kernels of a timeline by role, copies and fills of the device left out; what `Expected.eager` takes."""
    named = (span for span in timeline.device if not span.name.startswith(("Memcpy", "Memset")))
    return dict(collections.Counter(span.role for span in named))


def _names(spans: Sequence[Call | Work], most: int = 3) -> str:
    names = list(dict.fromkeys(short_name(span.name) for span in spans))
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _number(count: int, one: str) -> str:
    return f"{count} {one}{'s' * (count != 1)}"


def _count(things: Sequence[object], one: str, more: str = "") -> str:
    n = len(things)
    return f"{n} {one if n == 1 else more or one + 's'}"
