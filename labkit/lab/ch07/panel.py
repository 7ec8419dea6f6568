"""The panels of chapter 07: a step without and with its graph, and replays with a stale input.

Refuses to know how a source gets its numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import plotly.graph_objects as go

from labkit.figures.break_even import Pair, Replays, pair_figure, stale_figure
from labkit.lab.ch07.pair import COLUMNS
from labkit.lab.ch07.recorded import recorded_sources
from labkit.lab.ch07.simulated import QueuePair, StepPair
from labkit.lab.ch07.stale import COPIED, OWN, REBOUND, SHARED, NumpyReplays, TorchReplays
from labkit.lab.gate import Gate
from labkit.lab.machine import engine_missing, gpu_name
from labkit.lab.panel import Panel
from labkit.lab.runs import Run, Source
from labkit.measure.spans import Span, StepTimeline

PHASES = ("before", "launch", "wait", "after")
#: Runs of the second panel that are drawn together.
SHOWN = 5
STALE_COLUMNS = [
    ("way", "new input"), ("kept", "kept of the output"), ("replays", "replays"), ("wrong", "wrong results"),
    ("output", "results are"), ("moved", "name's address"),
]  # fmt: skip


def _launches(runs: Sequence[Run]) -> str | None:
    """Which option came out, from the newest run of the queue; None while there is none."""
    for run in reversed(runs):
        if run.source == QueuePair.label and run.values["eager_launches"] > 1:
            return {1: "one", 0: "none"}.get(run.values["launches"], "all")
    return None


LAUNCHES = Gate(
    "07.launches",
    "A step of 8 kernels takes the host 8 launches. It is captured once. How many launches does every later step take, "
    "and how many kernels does the GPU run?",
    options=[
        ("1 launch, 1 kernel: the eight were merged into one", "merged"),
        ("1 launch, 8 kernels", "one"),
        ("8 launches, 8 kernels, each launch cheaper", "all"),
        ("no launch at all: the GPU repeats by itself", "none"),
    ],
    answer=_launches,
    explain="A graph is a list of kernels, and starting the list is one launch. The kernels stay what they were, so "
    "the time that they run does not change; merging them is another matter (chapter 09).",
)


def _rebound(runs: Sequence[Run]) -> str | None:
    """What came out of the newest run whose name was rebound and whose results were kept as copies."""
    for run in reversed(runs):
        if run.values["way"] == REBOUND and run.values["kept"] == OWN:
            return "stale" if run.values["output"] == "stale" else "right"
    return None


STALE = Gate(
    "07.stale",
    "A graph of 2 × buffer + 1 was captured while the buffer held 1. The program says buffer = new, where new holds 5, "
    "and replays. What comes out?",
    options=[
        ("11, as 2 × 5 + 1", "right"),
        ("3, as 2 × 1 + 1", "stale"),
        ("an error: the buffer is gone", "error"),
        ("any number: the memory is no longer valid", "noise"),
    ],
    answer=_rebound,
    explain="buffer = new moves a name. The graph holds an address, and at that address nothing changed. No error "
    "comes, because nothing illegal happened. (It becomes any number once the old memory is given to somebody else.)",
)


def replay_panel(**more: Any) -> Panel:
    """The chapter's panel; it opens on the launch queue, which the question is about. `more` goes to `Panel`."""
    missing = engine_missing()
    live: list[Source] = []
    if not missing:
        from labkit.lab.ch07.live import LivePair

        live.append(LivePair(gpu_name()))
    recorded, absent = recorded_sources()
    queue = QueuePair()
    panel = Panel(
        "07-replay", "Record once, press play", [*live, *recorded, queue, StepPair()], figure, COLUMNS,
        changed=changed, gate=LAUNCHES, absent=[f"No LIVE source: {missing}", *absent] if missing else absent,
        first_words="Predict, then press Run. Then look at a real step: source RECORDED.", **more,
    )  # fmt: skip
    panel.set(source=queue.label)
    return panel


def stale_panel(**more: Any) -> Panel:
    """Replays with an input that was copied or rebound: LIVE with torch, in numpy arrays without."""
    missing = engine_missing()
    live: list[Source] = [] if missing else [TorchReplays(gpu_name())]
    return Panel(
        "07-stale", "Whose memory is it?", [*live, NumpyReplays()], stale, STALE_COLUMNS, changed=stale_changed,
        gate=STALE, absent=[f"No LIVE source: {missing}"] if missing else [],
        first_words="Predict, then press Run. Then copy instead, and run again.", **more,
    )  # fmt: skip


def figure(runs: Sequence[Run], pinned: Sequence[Run]) -> go.Figure:
    """The newest run."""
    run = next((run for run in reversed(runs) if run.finished), None)
    if run is None:
        return pair_figure(None)
    data = run.data
    return pair_figure(Pair(
        run.number, run.kind, f"Run {run.number}: {run.values['what']}", tuple(data["walls_us"]), data["steps"],
        data["saved_ms"], run.values["capture_ms"], run.values["break_even"],
        _timelines(run),
        {name: data[f"{name}_us"] for name in PHASES if f"{name}_us" in data},
        plain=run.source == QueuePair.label,
    ))  # fmt: skip


def _timelines(run: Run) -> list[StepTimeline]:
    """Both steps; of a queue with one role for launches and one for kernels, and without the wait at the end."""
    found = [StepTimeline.from_dict(one) for one in run.data.get("timelines", ())]
    if run.source != QueuePair.label:
        return found
    return [dataclasses.replace(one, spans=tuple(_plain(one.spans))) for one in found]


def _plain(spans: Sequence[Span]) -> Iterator[Span]:
    for span in spans:
        if span.lane == "host" and span.role == "gemm":
            yield dataclasses.replace(span, role="other")
        elif span.name != "synchronize":
            yield span


def changed(new: Run, old: Run) -> str:
    """Why a run differs from the one before, where both are of one source."""
    if (new.kind, new.source) != (old.kind, old.source):
        return ""
    share = [1 - run.values["graph_ms"] / run.values["eager_ms"] for run in (old, new)]
    said = f"The graph took away {share[0]:.0%} of the step before, and takes away {share[1]:.0%} now."
    if new.kind == "LIVE" and new.values.get("mib") is None:
        return "Both graphs are emulated, so that neither saves anything."
    if abs(share[1] - share[0]) < 0.02:
        return f"{said} The host's launches and the GPU's work changed alike, or neither did."
    slower = "weigh less against the kernels" if share[1] < share[0] else "weigh more against the kernels"
    return f"{said} Launches {slower} now."


def stale(runs: Sequence[Run], pinned: Sequence[Run]) -> go.Figure:
    """The newest runs, with those that are pinned."""
    chosen = {run.number: run for run in [*pinned, *runs[-SHOWN:]] if run.finished}
    shown = sorted(chosen.values(), key=lambda run: run.number)[-SHOWN:]
    words = {COPIED: "copied", REBOUND: "rebound"}
    keeps = {OWN: "", SHARED: ", output not cloned"}
    return stale_figure([
        Replays(run.number, words[run.values["way"]] + keeps[run.values["kept"]], run.kind, run.data["steps"],
                run.data["expected"], run.data["got"])
        for run in shown
    ])  # fmt: skip


def stale_changed(new: Run, old: Run) -> str:
    """Why the results differ from those of the run before."""
    if new.values["way"] != old.values["way"]:
        if new.values["way"] == COPIED:
            return "The new values are written to the address that the graph reads."
        return "The name has a new address, and the graph does not look at names."
    if new.values["kept"] != old.values["kept"]:
        if new.values["kept"] == OWN:
            return "Each result has memory of its own now."
        return "All results share the graph's output buffer now."
    return ""
