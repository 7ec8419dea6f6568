"""The panels of chapter 01: what a step waits for, and the map of it. Refuses to know how a source gets its numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import plotly.graph_objects as go

from labkit.figures.waits import Curves, Launches, StepBar, waits_figure
from labkit.lab.ch01 import regimes
from labkit.lab.ch01.chain import CURVE_KEYS, ChainSource
from labkit.lab.ch01.recorded import recorded_sources
from labkit.lab.ch01.simulated import EAGER, QueueSource, StepSource
from labkit.lab.gate import Gate
from labkit.lab.machine import engine_missing, gpu_name
from labkit.lab.panel import Panel
from labkit.lab.runs import Run
from labkit.measure.spans import Span, StepTimeline

COLUMNS = [
    ("what", "what ran"), ("launches", "launches"), ("step_us", "step, µs"), ("instructions_us", "waits for launches, "
                                                                                                 "µs"),
    ("share", "of the step, %"),
]  # fmt: skip
#: Bars of so many runs at most; older ones stay in the table.
SHOWN = 8

GATE = Gate(
    "01.idle",
    "A step has 8 kernels. The GPU runs each for 3 µs; the host needs 6 µs to launch one. "
    "For which part of the step is the GPU idle?",
    options=[
        ("for none of it: launches run ahead of the kernels", "none"),
        ("for a third: it computes 6 of every 9 µs", "third"),
        ("for about a half", "half"),
        ("for two thirds: launch and kernel take turns, 6 + 3 µs", "two thirds"),
    ],
    answer=lambda runs: _idle_answer(runs),
    explain="The host starts a kernel every 6 µs and never waits. Each kernel fills 3 of these 6 µs, and the last one "
    "ends 3 µs after the last launch: 51 µs in all (SIMULATED), not 8 × 9 = 72, since launching and running overlap. "
    "Of the 51 µs the GPU works 24.",
)


def waits_panel(**more: Any) -> Panel:
    """The chapter's panel, with every source; it opens on the launch queue. `more` goes to `Panel`."""
    measured, absent = _measured()
    queue = QueueSource()
    panel = Panel(
        "01-two-waits", "Two kinds of waiting", [*measured, queue, StepSource()], figure, COLUMNS, changed=changed,
        gate=GATE, absent=absent,
        first_words="Predict, then press Run. Try other numbers: longer kernels, a graph, a real model.", **more,
    )  # fmt: skip
    panel.set(source=queue.label)
    return panel


def real_panel(**more: Any) -> Panel:
    """Only real steps and operations: RECORDED first, then LIVE; a model's SIMULATED step to hold them against."""
    measured, absent = _measured()
    panel = Panel(
        "01-real-steps", "A real step", [*measured, StepSource()], figure, COLUMNS, changed=changed, absent=absent,
        first_words="Press Run, then start the step as one graph and run again.", **more,
    )  # fmt: skip
    recorded = [source for source in measured if source.kind == "RECORDED"]
    if recorded:
        panel.set(source=recorded[0].label)
    return panel


def _measured() -> tuple[list[Any], list[str]]:
    """LIVE and RECORDED sources that work here, and a sentence on each that does not."""
    missing = engine_missing()
    recorded, absent = recorded_sources()
    live = [] if missing else [ChainSource(gpu_name())]
    return [*live, *recorded], [f"No LIVE source: {missing}", *absent] if missing else absent


def regime_panel(**more: Any) -> Panel:
    """The map of regimes over models and batches."""
    return Panel(
        "01-regimes", "Where a decode step waits", [regimes.RegimeSource()], regimes.regimes_figure, regimes.COLUMNS,
        changed=regimes.why, first_words="Press Run, then start the steps as one graph and run again.", **more,
    )  # fmt: skip


def figure(runs: Sequence[Run], pinned: Sequence[Run]) -> go.Figure:
    """Bars of the newest run's source, under the timelines, launches or curves of the newest run."""
    if not runs:
        return waits_figure([], "")
    new = runs[-1]
    alike = [run for run in runs if (run.kind, run.source) == (new.kind, new.source)][-SHOWN:]
    bars = [StepBar(run.number, f"run {run.number}: {run.data['what']}", run.data["parts"]) for run in alike]
    more: dict[str, Any] = {}
    if "timeline" in new.data:
        more = {"timelines": _timelines(alike, pinned), "plain": new.source == QueueSource.label}
    elif "launch_kinds" in new.data:
        more["launches"] = Launches(new.number, *(new.data[f"launch_{key}"] for key in _LAUNCH))
    elif "elements" in new.data:
        us = {key: new.data[key] for key in CURVE_KEYS if key in new.data}
        more["curves"] = Curves(new.number, new.data["elements"], us, new.data["chosen"])
    return waits_figure(bars, new.kind, title=f"What the step waits for, {new.source}", **more)


_LAUNCH = ("kinds", "counts", "cost_us", "total_us")


def changed(new: Run, old: Run) -> str:
    """Why a run differs from the one before, where both are of one source."""
    if (new.kind, new.source) != (old.kind, old.source):
        return ""
    if new.values["slower"] != old.values["slower"]:
        sides = {"host": "the host", "device": "the GPU" if new.kind != "LIVE" else "the device"}
        return f"The slower side was {sides[old.values['slower']]} and is {sides[new.values['slower']]} now."
    if "starting_us" in new.values:
        return ""
    if new.values["launches"] != old.values["launches"]:
        return f"{old.values['launches']} launches before, {new.values['launches']} now."
    if new.values["slower"] == "host":
        return "The host is the slower side in both, so what changes its launches changes the step."
    return "The GPU is the slower side in both, so what changes its work changes the step."


def _timelines(alike: Sequence[Run], pinned: Sequence[Run]) -> list[tuple[int, StepTimeline]]:
    """The newest run's, under those that are pinned, or under the run before it."""
    numbers = [run.number for run in pinned]
    kept = [run for run in alike[:-1] if run.number in numbers] or list(alike[-2:-1])
    found = []
    for run in [*kept, alike[-1]]:
        if "timeline" in run.data:
            timeline = StepTimeline.from_dict(run.data["timeline"])
            if run.source == QueueSource.label:
                timeline = dataclasses.replace(timeline, spans=tuple(_plain(timeline.spans)))
            found.append((run.number, dataclasses.replace(timeline, title=f"run {run.number}")))
    return found


def _plain(spans: Sequence[Span]) -> Iterator[Span]:
    """A queue's spans with one role for launches and one for kernels; waiting at the end is no work of the host."""
    for span in spans:
        if span.lane == "host" and span.role == "gemm":
            yield dataclasses.replace(span, role="other")
        elif span.name != "synchronize":
            yield span


def _idle_answer(runs: Sequence[Run]) -> str | None:
    """Which option came out, from the newest run with just these numbers; None while there is none."""
    asked = {"kernels": 8, "kernel_us": 3.0, "launch_us": 6.0, "way": EAGER}
    share = next(
        (run.values["share"] for run in reversed(runs)
         if run.source == QueueSource.label and {k: run.settings.get(k) for k in asked} == asked), None,
    )  # fmt: skip
    if share is None:
        return None
    return min({"none": 0, "third": 100 / 3, "half": 50, "two thirds": 200 / 3}.items(),
               key=lambda option: abs(option[1] - share))[0]  # fmt: skip
