"""The panel of chapter 02: what a timer reads. Refuses to know how a source takes its samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from labkit.figures.timers import LOOKS, MARKS, MEDIANS, Timed, timers_figure
from labkit.lab.ch02.live import ProductSource
from labkit.lab.ch02.recorded import recorded_sources
from labkit.lab.ch02.simulated import NO_SYNC, OrderSource, TimerSource
from labkit.lab.gate import Gate
from labkit.lab.machine import engine_missing, gpu_name
from labkit.lab.panel import Panel
from labkit.lab.runs import Run

COLUMNS = [
    ("what", "what was timed"), ("n", "samples"), ("median_us", "median, µs"), ("p10_us", "p10, µs"),
    ("p90_us", "p90, µs"), ("first_us", "first sample, µs"), ("truth_us", "true, µs"),
]  # fmt: skip
SHOWN = 8

GATE = Gate(
    "02.unsynchronized",
    "A matrix product keeps the GPU busy for 5 ms; to launch it takes the host 6 µs. You read the clock, call it, and "
    "read the clock again right after the call. What does the timer show?",
    options=[
        ("5 ms: the time of the product", "all"),
        ("5.006 ms: launch and product together", "both"),
        ("about 6 µs: the time of the launch", "launch"),
        ("nothing: too short to measure", "nothing"),
    ],
    answer=lambda runs: _answer(runs),
    explain="The call returns when the product is launched, and the clock is read while the GPU has hardly begun. The "
    "timer shows the launch, 6 µs of 5,006 (SIMULATED), and would show the same for a product ten times as large.",
)


def timer_panel(**more: Any) -> Panel:
    """The chapter's panel, with every source; it opens on the device with a known time. `more` goes to `Panel`."""
    measured, absent = _measured()
    known = TimerSource()
    panel = Panel(
        "02-timers", "What a timer reads", [*measured, known, OrderSource()], figure, COLUMNS, changed=changed,
        gate=GATE, absent=absent,
        first_words="Predict, then press Run. Then choose another timer and run again: all runs stay in the chart.",
        **more,
    )  # fmt: skip
    panel.set(source=known.label)
    return panel


def real_panel(**more: Any) -> Panel:
    """Real clocks, LIVE first, then RECORDED; and two equal things on a machine that drifts (SIMULATED)."""
    measured, absent = _measured()
    return Panel(
        "02-real-clocks", "Real clocks", [*measured, OrderSource()], figure, COLUMNS, changed=changed, absent=absent,
        first_words="Press Run. The dots below are the samples in the order in which they were taken.", **more,
    )  # fmt: skip


def _measured() -> tuple[list[Any], list[str]]:
    """LIVE and RECORDED sources that work here, and a sentence on each that does not."""
    missing = engine_missing()
    recorded, absent = recorded_sources()
    live = [] if missing else [ProductSource(gpu_name())]
    return [*live, *recorded], [f"No LIVE source: {missing}", *absent] if missing else absent


def figure(runs: Sequence[Run], pinned: Sequence[Run]) -> go.Figure:
    """All runs of the newest run's kind as medians, the newest one's samples below."""
    if not runs:
        return timers_figure([], "")
    alike = [run for run in runs if (run.kind, run.source) == (runs[-1].kind, runs[-1].source)]
    kept = [run for run in alike if run in pinned and run not in alike[-SHOWN:]]
    return timers_figure([_timed(run) for run in [*kept, *alike[-SHOWN:]]], runs[-1].kind)


def changed(new: Run, old: Run) -> str:
    """Why the reading differs, where both runs are of one source."""
    if (new.kind, new.source) != (old.kind, old.source):
        return ""
    moved = {name for name, value in new.settings.items() if old.settings.get(name, value) != value}
    if "order" in moved:
        return "The two things are equal in both runs; only the order of their turns is another."
    if "timer" in moved:
        return "The work is the same; only where the clock is read is another."
    if "profiler" in moved:
        return "The work is the same; the profiler's notes are what is more or less."
    if moved == {"warmup"}:
        fewer = new.values["first_us"] < old.values["first_us"]
        return f"The first sample is {'shorter' if fewer else 'not shorter'} than before; the median hardly notices it."
    return "More samples do not change what is measured, only how well it is known." if moved == {"n"} else ""


def _timed(run: Run) -> Timed:
    keys = [key for group in MEDIANS.values() for key in group] + list(MARKS)
    samples = {key: run.data[key] for key in LOOKS if key in run.data}
    places = {key: run.data["place" if key == "samples_us" else "place_b"] for key in samples}
    two = len(samples) == 2
    names = {"samples_us": "A", "samples_b_us": "B"} if two else {}
    values = {key: run.values[key] for key in keys if run.values.get(key) is not None}
    return Timed(run.number, str(run.values["what"]), values, samples, places, names)


def _answer(runs: Sequence[Run]) -> str | None:
    """Which option came out, from the newest run with just these numbers; None while there is none."""
    asked = {"timer": NO_SYNC, "work_us": 5000, "kernels": 1, "profiler": False}
    for run in reversed(runs):
        if run.source == TimerSource.label and {key: run.settings.get(key) for key in asked} == asked:
            return "launch" if run.values["median_us"] < 100 else "all"
    return None
