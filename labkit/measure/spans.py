"""What the host and the device did during one step, as spans on a common clock. Refuses to know where spans come from.

A timeline may be read from a profiler's trace or computed by a model; both are drawn by the same figure. Times are
microseconds after the step began on the host.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from labkit.errors import LabkitError

#: What a span does. "graph" is the replay of a graph, on the host lane; kernels have the role of their work.
ROLES = ("gemm", "attention", "norm", "rope_cache", "activation", "embedding", "sampling", "copy", "graph", "other")
#: "phase" spans are the engine's own parts of a step (schedule, launch, …), around host spans; they start nothing.
LANES = ("host", "device", "phase")


class TimelineError(LabkitError, ValueError):
    """A timeline that cannot be read, or that contradicts itself."""


@dataclasses.dataclass(frozen=True)
class Span:
    """One call of the host, one kernel or copy of the device, or one phase of the step.

    lane: one of LANES. role: one of ROLES. begin_us, end_us: after the begin of the step.
    launch: of a device span, the index in `StepTimeline.host` of the call that started it; None where it is not known.
    """

    lane: str
    name: str
    role: str
    begin_us: float
    end_us: float
    launch: int | None = None

    @property
    def duration_us(self) -> float:
        """Length in microseconds."""
        return self.end_us - self.begin_us


@dataclasses.dataclass(frozen=True)
class StepTimeline:
    """One step on two lanes.

    mode: the graph mode that the step ran in. wall_us: from the call of the step to its tokens on the host.
    launches: kernels and graphs that the host started, `graph_launches` of them graphs; copies are not counted.
    event_us: device time of the same step in a run without the profiler, between two events; None where there is none.
    problems: why this must not be believed; a timeline with problems is not drawn. notes: what a reader should know.
    """

    title: str
    mode: str
    spans: tuple[Span, ...]
    wall_us: float
    launches: int
    graph_launches: int = 0
    event_us: float | None = None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def host(self) -> tuple[Span, ...]:
        """Calls of the host, in the order of `spans`."""
        return self._lane("host")

    @property
    def device(self) -> tuple[Span, ...]:
        """Kernels, copies and fills of the device, in the order of `spans`."""
        return self._lane("device")

    @property
    def phases(self) -> tuple[Span, ...]:
        """The engine's parts of the step; may be empty."""
        return self._lane("phase")

    @property
    def busy_us(self) -> float:
        """Microseconds in which the device did anything; what overlaps counts once."""
        return sum(end - begin for begin, end in union((s.begin_us, s.end_us) for s in self.device))

    @property
    def idle_us(self) -> float:
        """Microseconds in which the device did nothing, from the first host call to the end of the last device span."""
        return sum(end - begin for begin, end in self.device_idle())

    @property
    def extent(self) -> tuple[float, float]:
        """From the first host call (without one: the first device span) to the end of the last device span, in µs.

        (0, 0) where the device did nothing.
        """
        if not self.device:
            return (0.0, 0.0)
        begin = min(span.begin_us for span in (self.host or self.device))
        return (begin, max(begin, *(span.end_us for span in self.device)))

    def device_idle(self) -> list[tuple[float, float]]:
        """Gaps in which the device did nothing, (begin, end) in µs, ascending, within `extent`."""
        begin, last = self.extent
        gaps, at = [], begin
        for start, end in union((s.begin_us, s.end_us) for s in self.device):
            if start > at:
                gaps.append((at, start))
            at = max(at, end)
        if last > at:
            gaps.append((at, last))
        return gaps

    def busy_by_role(self) -> dict[str, float]:
        """Microseconds of device spans per role, longest first. What overlaps counts in each."""
        out: dict[str, float] = {}
        for span in self.device:
            out[span.role] = out.get(span.role, 0.0) + span.duration_us
        return dict(sorted(out.items(), key=lambda item: -item[1]))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON. Spans are rows of [lane, name, role, begin_us, end_us, launch], times to 1 ns."""
        out = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        rows = [[s.lane, s.name, s.role, round(s.begin_us, 3), round(s.end_us, 3), s.launch] for s in self.spans]
        return {**out, "spans": rows, "problems": list(self.problems), "notes": list(self.notes)}

    @classmethod
    def from_dict(cls, data: Any, where: str = "a timeline") -> StepTimeline:
        """Read what `as_dict` wrote, and check every value.

        Raises:
            TimelineError: a field is missing, unknown or of the wrong type, or spans contradict each other.
        """
        again = "Take the timeline again with this version."
        if not isinstance(data, Mapping):
            raise TimelineError(where, f"is {type(data).__name__}, not an object", again)
        fields = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(map(str, set(data) - set(fields)))
        if unknown:
            raise TimelineError(where, f"has unknown fields: {', '.join(unknown)}", again)
        missing = [n for n, f in fields.items() if n not in data and f.default is dataclasses.MISSING]
        if missing:
            raise TimelineError(where, f"has no {', '.join(missing)}", again)
        values = dict(data)
        spans = values["spans"]
        if not isinstance(spans, (list, tuple)):
            raise TimelineError(where, "has spans that are no list", again)
        values["spans"] = tuple(_read_span(row, f"{where}, span {i}") for i, row in enumerate(spans))
        for name in ("problems", "notes"):
            words = values.get(name, ())
            if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) for word in words):
                raise TimelineError(where, f"has {name} that are no list of sentences", again)
            values[name] = tuple(words)
        out = cls(**values)
        out.check(where)
        return out

    def check(self, where: str = "a timeline") -> None:
        """Raise TimelineError unless values have their types and every span fits the others.

        A trace that cannot be believed is no error: it is stored with its `problems`.
        """
        again = "The file was edited or damaged; take the timeline again."
        for name in ("title", "mode"):
            if not isinstance(getattr(self, name), str):
                raise TimelineError(where, f"{name}={getattr(self, name)!r} is no text", again)
        for name in ("launches", "graph_launches"):
            if not _whole(getattr(self, name)):
                raise TimelineError(where, f"{name}={getattr(self, name)!r} is no count", again)
        if self.graph_launches > self.launches:
            raise TimelineError(where, f"counts {self.graph_launches} graphs among {self.launches} launches", again)
        if not _time(self.wall_us) or self.wall_us < 0:
            raise TimelineError(where, f"wall_us={self.wall_us!r} is no time", again)
        if self.event_us is not None and (not _time(self.event_us) or self.event_us < 0):
            raise TimelineError(where, f"event_us={self.event_us!r} is no time", again)
        calls = len(self.host)
        for i, span in enumerate(self.spans):
            at = f"{where}, span {i}"
            if span.lane not in LANES or span.role not in ROLES:
                raise TimelineError(at, f"is of lane {span.lane!r} and role {span.role!r}", again)
            if not (_time(span.begin_us) and _time(span.end_us)):
                raise TimelineError(at, f"lasts from {span.begin_us!r} to {span.end_us!r}", again)
            if span.launch is not None and not (_whole(span.launch) and span.lane == "device" and span.launch < calls):
                raise TimelineError(at, f"says launch={span.launch!r}, and there are {calls} host calls", again)
            if span.end_us < span.begin_us and not self.problems:
                raise TimelineError(at, "ends before it begins", again)

    def _lane(self, lane: str) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.lane == lane)


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Intervals merged where they touch or overlap, ascending; those that end before they begin are left out."""
    out: list[tuple[float, float]] = []
    for begin, end in sorted(pair for pair in intervals if pair[1] >= pair[0]):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((begin, end))
    return out


def _read_span(row: Any, where: str) -> Span:
    if not isinstance(row, (list, tuple)) or len(row) != len(dataclasses.fields(Span)):
        raise TimelineError(where, "is no row of six values", "Take the timeline again with this version.")
    if not all(isinstance(word, str) for word in row[:3]):
        raise TimelineError(where, "has a lane, name or role that is no text", "Take the timeline again.")
    return Span(*row)


def _time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
