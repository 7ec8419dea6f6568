"""`labkit timeline`: one decode step on two lanes, eager and in graphs; taken here, or read from a file."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.cli.answer import Answer, Console, number, table
from labkit.cli.options import Parser, UsageError, add_engine_options, engine_config, one_of, whole, whole_list, words
from labkit.measure.spans import StepTimeline

if TYPE_CHECKING:
    from labkit.measure.provenance import Provenance
    from labkit.measure.timeline_recording import TimelineRecording

_MODEL = "smollm2-135m"
_MODES = ("NONE", "PIECEWISE", "FULL")
#: Between the correlation ids of traces that are put into one file.
_APART = 1 << 32
#: Engine settings that this command sets itself.
_OWN = ("enable_prefix_caching", "cudagraph_mode", "enforce_eager", "max_cudagraph_capture_size")


def timeline_options(parser: Parser) -> None:
    parser.add_argument("--batch", type=whole_list(1), default=[1], metavar="N,…", help="requests per step (default 1)")
    parser.add_argument("--context", type=whole(1), default=512, metavar="N",
                        help="tokens of KV before the first step, primed (default 512)")  # fmt: skip
    parser.add_argument("--modes", type=_modes, default=list(_MODES), metavar="MODE,…",
                        help=f"of {', '.join(_MODES)} (default all)")  # fmt: skip
    parser.add_argument("--rounds", type=whole(1), default=10, metavar="N",
                        help="profiled steps per mode, five others beside each (default 10)")  # fmt: skip
    parser.add_argument("--from", dest="read", type=Path, metavar="FILE",
                        help="read a Chrome trace of torch.profiler, or a recording, instead of running")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE",
                        help="write a Chrome trace: the profiler's events and the lanes, for Perfetto")  # fmt: skip
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the chart")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep the timelines as a recording")
    add_engine_options(parser, leave_out=_OWN, model=_MODEL, max_model_len=1024)


def _modes(word: str) -> list[str]:
    names = [one_of(_MODES)(name) for name in words(word)]
    if not names:
        raise argparse.ArgumentTypeError("no mode is named")
    return list(dict.fromkeys(names))


@dataclasses.dataclass(frozen=True)
class _Found:
    """What is shown: timelines, their kind and origin, and the events of a trace they came from."""

    timelines: tuple[StepTimeline, ...]
    kind: str
    origin: str
    events: list[Any]
    origins_us: tuple[float, ...]
    data: dict[str, Any]
    provenance: Provenance | None = None
    refused: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()


def timeline(args: argparse.Namespace, console: Console) -> Answer:
    """Print the lanes of one step per mode, and write them where asked to."""
    from labkit.cli.measure import writable

    paths = {name: getattr(args, name, None) for name in ("out", "html", "keep")}
    writable(*paths.values())
    if hasattr(args, "read"):
        if paths["keep"]:
            raise UsageError("labkit timeline --keep", "what is read from a file is kept already", "Drop one of both.")
        found = _read(args.read)
    else:
        found = _take(args, console, paths["keep"])
    if paths["out"]:
        from labkit.measure.chrome import lane_events, write_trace

        origin = found.provenance.as_dict() if found.provenance else {"origin": found.origin}
        write_trace(paths["out"], [*found.events, *lane_events(found.timelines, found.origins_us)], origin)
    if paths["html"]:
        _write_page(paths["html"], found)
    data = {**found.data, "commands": list(found.commands), "summary": [summary(t) for t in found.timelines]}
    return Answer(data, _text(found), ok=any(not t.problems for t in found.timelines))


# --- where timelines come from -------------------------------------------------------------------------------------


def _take(args: argparse.Namespace, console: Console, keep: Path | None) -> _Found:
    from labkit.bench.timeline import PLAIN, bench_timelines
    from labkit.measure.storage import MIN_SAMPLES

    if not args.batch:
        raise UsageError("labkit timeline", "needs at least one batch", "As in --batch 1,32")
    if keep and args.rounds * PLAIN < MIN_SAMPLES:
        raise UsageError(
            f"labkit timeline --rounds {args.rounds}",
            f"a recording needs {MIN_SAMPLES} steps without the profiler, {PLAIN} a round",
            f"Drop --keep, or take {-(-MIN_SAMPLES // PLAIN)} rounds or more.",
        )
    config = engine_config(args, model=_MODEL, max_model_len=1024)
    recording, taken = bench_timelines(
        config, args.batch, args.context, args.modes, rounds=args.rounds, progress=console.progress
    )
    if keep:
        recording.save(keep)
    found = _recorded(recording)
    events: list[Any] = []
    shift: list[float] = []
    at = 0.0
    for one in taken:  # traces begin at clocks of their own: one after the other
        times = [e["ts"] for e in one.events if isinstance(e, Mapping) and isinstance(e.get("ts"), (int, float))]
        begin, end = (min(times), max(times)) if times else (0.0, 0.0)
        events += [_moved(e, at - begin, len(shift)) for e in one.events]
        shift.append(one.origin_us - begin + at)
        at += end - begin + 1000.0
    return dataclasses.replace(found, events=events, origins_us=tuple(shift), commands=tool_commands(sys.argv[1:]))


def _moved(event: Any, by_us: float, number: int) -> Any:
    """An event of the trace `number` at another time, its correlation id apart from those of other traces."""
    if not isinstance(event, Mapping):
        return event
    out = {**event, "ts": event["ts"] + by_us} if isinstance(event.get("ts"), (int, float)) else dict(event)
    arguments = event.get("args")
    if isinstance(arguments, Mapping) and isinstance(arguments.get("correlation"), int):
        out["args"] = {**arguments, "correlation": arguments["correlation"] + number * _APART}
    return out


def _read(path: Path) -> _Found:
    from labkit.measure.chrome import events_of, read_events
    from labkit.measure.integrity import step_of
    from labkit.measure.storage import read_object
    from labkit.measure.timeline import from_trace
    from labkit.measure.timeline_recording import TABLE, TimelineRecording

    data = read_object(path)
    if isinstance(data, Mapping) and data.get("table") == TABLE:
        return _recorded(TimelineRecording.from_dict(data, path.name))
    events = events_of(data, path.name)
    trace = read_events(events)
    steps = range(max(1, len(trace.steps)))
    title = f"{path.name}"
    lines = tuple(
        from_trace(events, title=title if len(steps) == 1 else f"{title}, step {i + 1}", step=i) for i in steps
    )
    origin = f"RECORDED · read from {path.name}, which does not say where it was measured"
    own = [e for e in events if not (isinstance(e, Mapping) and str(e.get("pid", "")).startswith("labkit "))]
    return _Found(
        lines, "RECORDED", origin, own, tuple(step_of(trace, i).begin_us for i in steps),
        {"timelines": [t.as_dict() for t in lines]},
    )  # fmt: skip


def _recorded(recording: TimelineRecording) -> _Found:
    timelines = tuple(row.timeline for row in recording.rows)
    refused = tuple(f"{one.requested_mode} was not taken: {one.reason}." for one in recording.refused)
    provenance = recording.provenance
    return _Found(
        timelines, str(provenance.kind), provenance.label, [], (), recording.as_dict(), provenance, refused
    )  # fmt: skip


# --- what is shown -------------------------------------------------------------------------------------------------


def summary(timeline: StepTimeline) -> dict[str, Any]:
    """The numbers of a timeline that a table shows; empty of times where the trace cannot be believed."""
    out: dict[str, Any] = {
        "title": timeline.title, "mode": timeline.mode, "launches": timeline.launches,
        "graph_launches": timeline.graph_launches, "problems": list(timeline.problems), "notes": list(timeline.notes),
    }  # fmt: skip
    if timeline.problems:
        return out
    total = timeline.busy_us + timeline.idle_us
    return {
        **out, "kernels": len(timeline.device), "busy_us": round(timeline.busy_us, 1),
        "idle_us": round(timeline.idle_us, 1), "idle_share": round(timeline.idle_us / total, 4) if total else 0.0,
        "wall_us": round(timeline.wall_us, 1), "event_us": timeline.event_us,
        "by_role": {
            role: {"us": round(us, 1), "kernels": sum(s.role == role for s in timeline.device)}
            for role, us in timeline.busy_by_role().items()
        },
    }  # fmt: skip


def _text(found: _Found) -> str:
    lines: list[tuple[str, ...]] = [
        ("step", "launches", "graphs", "kernels", "busy us", "idle us", "idle", "step us", "event us")
    ]
    parts = [found.origin]
    for t in found.timelines:
        one = summary(t)
        if t.problems:
            lines.append((t.title, str(t.launches), str(t.graph_launches), *["-"] * 6))
            continue
        event = number(t.event_us, 1) if t.event_us is not None else "-"
        lines.append(
            (
                t.title, str(t.launches), str(t.graph_launches), str(one["kernels"]), number(t.busy_us, 1),
                number(t.idle_us, 1), f"{one['idle_share']:.0%}", number(t.wall_us, 1), event,
            )
        )  # fmt: skip
    parts.append(table(lines, left=(0,)))
    good = [t for t in found.timelines if not t.problems]
    if good:
        parts.append(_roles(good))
    for t in found.timelines:
        said = [f"  not drawn: {p}" for p in t.problems] + [f"  {note}" for note in t.notes]
        parts.append("\n".join([f"{t.title}:", *said]))
    parts += found.refused
    if found.commands:
        parts.append("\n".join(["The same steps under NVIDIA's own tools:", *(f"  {c}" for c in found.commands)]))
    return "\n\n".join(parts)


def recording_text(recording: TimelineRecording) -> str:
    """A recording of timelines as text, as `labkit timeline --from FILE` prints it."""
    return _text(_recorded(recording))


def _roles(timelines: Sequence[StepTimeline]) -> str:
    roles = list(dict.fromkeys(role for t in timelines for role in t.busy_by_role()))
    lines = [("role, us (kernels)", *(t.title for t in timelines))]
    for role in roles:
        cells = []
        for t in timelines:
            us, n = t.busy_by_role().get(role, 0.0), sum(s.role == role for s in t.device)
            cells.append(f"{us:,.1f} ({n})" if n else "-")
        lines.append((role, *cells))
    return table(lines, left=(0,))


def tool_commands(argv: Sequence[str]) -> tuple[str, ...]:
    """`nsys` and `ncu` command lines that run `labkit timeline` with these very arguments, less its own files.

    LABKIT_NVTX=1 makes the engine mark its steps and phases for them. torch.profiler and Nsight cannot both trace a
    process, so that they run `labkit bench` in place of `labkit timeline`.
    """
    mine, skip = [], False
    for word in argv[1:] if argv and argv[0] == "timeline" else argv:
        flag = word.split("=", 1)[0]
        if skip:
            skip = False
        elif flag in ("--out", "--html", "--keep", "--modes", "--rounds", "--from"):
            skip = "=" not in word
        elif flag != "--json":
            mine.append(word)
    run = shlex.join(["labkit", "bench", *mine, "--steps", "20"])
    return (
        f"LABKIT_NVTX=1 nsys profile --trace=cuda,nvtx --cuda-graph-trace=node --output=labkit {run}",
        "LABKIT_NVTX=1 ncu --nvtx --graph-profiling=node --launch-skip=2000 --launch-count=200 --set=basic "
        f"--export=labkit {run}",
    )


def _write_page(path: Path, found: _Found) -> None:
    from labkit.cli.page import write_figures

    try:
        from labkit.figures.timeline import summary_sentence, timeline_figure
    except ImportError as error:
        from labkit.errors import LabkitError

        raise LabkitError("--html", f"the chart needs plotly ({error})", "pip install plotly") from None
    chart = timeline_figure(found.timelines, found.kind)
    notes = [f"{t.title}: {note}" for t in found.timelines for note in (*t.problems, *t.notes)]
    text = [summary_sentence(found.timelines, found.kind), *notes, *found.refused]
    write_figures(path, "Timeline of one step", [chart], text, [found.origin])
