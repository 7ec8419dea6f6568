"""Chrome traces of torch.profiler, read and written: host calls, device work, step annotations. Refuses to judge them.

Times are microseconds on the trace's own clock. A host call and the device work it started share a correlation id; all
work of a graph carries the id of the call that launched it.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.measure.launches import call_kind
from labkit.measure.spans import StepTimeline, TimelineError
from labkit.measure.storage import RecordingError, read_object, write_atomically

#: The annotation around a step that labkit profiles.
STEP = "labkit step"
#: The category of labkit's own lanes in a written trace; a reader passes over them.
CATEGORY = "labkit"
_DRIVER_COPY = re.compile(r"mem(?:cpy|set)\d+_")
_DEVICE = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy"}
_HOST = ("cuda_runtime", "cuda_driver", "cpu_op", "user_annotation", "python_function")


@dataclasses.dataclass(frozen=True)
class Call:
    """A host call that starts work, or records an event. kind: "kernel", "graph", "copy" or "event"."""

    kind: str
    name: str
    begin_us: float
    end_us: float
    correlation: int | str | None


@dataclasses.dataclass(frozen=True)
class Work:
    """A kernel ("kernel"), or a copy or fill ("copy"), on the device."""

    kind: str
    name: str
    begin_us: float
    end_us: float
    correlation: int | str | None


@dataclasses.dataclass(frozen=True)
class Trace:
    """What a trace holds of the device and of the host calls that drive it, in the order of time.

    window: from the begin to the end of the tracing; None where nothing of the host was traced.
    steps: annotated steps as (begin, end).
    """

    calls: tuple[Call, ...]
    works: tuple[Work, ...]
    window: tuple[float, float] | None
    steps: tuple[tuple[float, float], ...]


def read_events(events: Iterable[Any]) -> Trace:
    """Sort the `traceEvents` of a Chrome trace into what a timeline needs.

    The runtime's call may be seen a second time as the driver's call that it makes: one call, the runtime's.
    """
    calls: list[tuple[Call, bool]] = []
    works: list[Work] = []
    steps: list[tuple[float, float]] = []
    ends: list[tuple[float, float]] = []
    profiler: list[tuple[float, float]] = []
    for event in events:
        if not isinstance(event, Mapping) or event.get("ph") != "X":
            continue
        category, name = str(event.get("cat")), str(event.get("name", ""))
        begin, end = _time(event.get("ts")), _time(event.get("ts")) + _time(event.get("dur", 0))
        arguments = event.get("args")
        correlation = arguments.get("correlation") if isinstance(arguments, Mapping) else None
        correlation = correlation if isinstance(correlation, (int, str)) else None
        if category in _DEVICE:
            # The driver runs an odd copy of a graph by a kernel of its own, memcpy32_post.
            kind = "copy" if _DRIVER_COPY.match(name) else _DEVICE[category]
            works.append(Work(kind, name, begin, end, correlation))
        elif category in _HOST:
            ends.append((begin, end))
            if category == "user_annotation" and name == STEP:
                steps.append((begin, end))
            kind = call_kind(name) or ("event" if name.startswith(("cudaEventRecord", "cuEventRecord")) else "")
            if kind and category in ("cuda_runtime", "cuda_driver"):
                calls.append((Call(kind, name, begin, end, correlation), category == "cuda_driver"))
        elif category == "Trace" or name.startswith("PyTorch Profiler"):
            profiler.append((begin, end))
    window = None
    if profiler or ends:
        spans = [*profiler, *ends]  # the profiler's own span may be a little short of its last call
        window = (min(begin for begin, _ in spans), max(end for _, end in spans))
    order = sorted(_once(calls), key=lambda call: _key(call.begin_us))
    return Trace(tuple(order), tuple(sorted(works, key=lambda work: _key(work.begin_us))), window, tuple(sorted(steps)))


def _once(calls: Sequence[tuple[Call, bool]]) -> list[Call]:
    by_runtime = {call.correlation for call, driver in calls if not driver and call.correlation is not None}
    return [call for call, driver in calls if not (driver and call.correlation in by_runtime)]


def _time(value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if number else math.nan


def _key(time: float) -> float:
    return -math.inf if math.isnan(time) else time


def load_events(path: Path) -> list[Any]:
    """The `traceEvents` of a Chrome trace in a file, compressed or not.

    Raises:
        RecordingError: the file is missing or damaged. TimelineError: it is no Chrome trace.
    """
    return events_of(read_object(path), path.name)


def events_of(data: Any, where: str) -> list[Any]:
    """The list of events in what a trace's file holds: an object with `traceEvents`, or the bare list."""
    events = data.get("traceEvents") if isinstance(data, Mapping) else data
    if not isinstance(events, list):
        raise TimelineError(where, "holds no traceEvents", "Name a Chrome trace, as torch.profiler exports it.")
    return events


def lane_events(timelines: Sequence[StepTimeline], origins_us: Sequence[float] = ()) -> list[dict[str, Any]]:
    """Timelines as Chrome-trace events: one process for each, with a thread for each lane.

    Args:
        origins_us: where each timeline's zero lies on the clock of the trace they go into; none: at 0.
    """
    out: list[dict[str, Any]] = []
    threads = {"phase": (1, "phases of the step"), "host": (2, "host: launches"), "device": (3, "device")}
    for number, timeline in enumerate(timelines):
        pid, origin = f"labkit {number}", origins_us[number] if number < len(origins_us) else 0.0
        out.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"labkit: {timeline.title}"}})
        for tid, label in threads.values():
            out.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": label}})
        for span in timeline.spans:
            out.append(
                {
                    "ph": "X", "cat": CATEGORY, "name": span.name, "pid": pid, "tid": threads[span.lane][0],
                    "ts": round(origin + span.begin_us, 3), "dur": round(span.duration_us, 3),
                    "args": {"role": span.role, "launch": span.launch},
                }
            )  # fmt: skip
    return out


def write_trace(path: Path, events: Sequence[Any], provenance: Mapping[str, Any] | None = None) -> Path:
    """Write events as a Chrome trace that chrome://tracing and Perfetto open; compressed if the name ends in .gz.

    Raises:
        RecordingError: the file cannot be written.
    """
    data = {"traceEvents": list(events), "displayTimeUnit": "ms", "labkit": dict(provenance or {})}
    try:
        raw = json.dumps(data, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise RecordingError(path.name, f"the events are no plain values ({error})", "Profile again.") from None
    return write_atomically(path, gzip.compress(raw, mtime=0) if path.suffix == ".gz" else raw)
