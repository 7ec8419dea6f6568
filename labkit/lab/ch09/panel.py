"""The panels of chapter 09: four forms of a step, kernels before and after fusion. Refuses to know where from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from labkit.figures.fused import FormBars, KindBars, Map, fusion_bars, matrix_figure
from labkit.lab.ch09.fusion import FILE
from labkit.lab.ch09.kernels import LiveKernels, RecordedKernels
from labkit.lab.ch09.live import LiveForms
from labkit.lab.ch09.matrix import COMPILE, GRAPH, TEXT_MS, WORDS, Cell, table
from labkit.lab.ch09.recorded import recorded_sources
from labkit.lab.ch09.simulated import FusedQueue
from labkit.lab.gate import Gate
from labkit.lab.machine import engine_missing, gpu_name
from labkit.lab.panel import Panel
from labkit.lab.runs import Run

COLUMNS = [
    ("what", "what ran"), ("eager_ms", "eager, ms"), ("graph_ms", "graph, ms"), ("compile_ms", "compile, ms"),
    ("both_ms", "both, ms"), ("graph_gain", "graph saves, ms"), ("compile_gain", "compiler saves, ms"),
    ("interaction", "interaction, ms"), ("eager_launches", "launches, eager"), ("compile_launches", "compiled"),
    ("both_launches", "both"), ("cold_s", "compile cold, s"), ("warm_s", "warm, s"),
]  # fmt: skip
KERNEL_COLUMNS = [
    ("what", "model"), ("pieces", "pieces"), ("kinds", "kinds"), ("kernels_before", "kernels before"),
    ("kernels_after", "after fusion"), ("products", "matrix products"), ("cold_s", "cold, s"), ("warm_s", "warm, s"),
]  # fmt: skip
TEXT = Map(0, "the text, 8B on one GPU", "folklore", table({form: Cell(ms) for form, ms in TEXT_MS.items()}))
#: From this batch on a run counts as "a large batch" for the gate.
LARGE = 128

GATE = Gate(
    "09.alone",
    "A step of a small model in plain operators: many short kernels. You may have ONE of two remedies: a graph (all "
    "kernels, one launch) or a compiler (fewer kernels, each with a launch). Which alone makes the step faster, "
    "with 1 request and with 256?",
    options=[
        ("the graph with 1 and with 256", (GRAPH, GRAPH)),
        ("the compiler with 1 and with 256", (COMPILE, COMPILE)),
        ("the graph with 1, the compiler with 256", (GRAPH, COMPILE)),
        ("the compiler with 1, the graph with 256", (COMPILE, GRAPH)),
    ],
    answer=lambda runs: _alone(runs),
    explain=lambda runs: _why_alone(runs),
)


def matrix_panel(**more: Any) -> Panel:
    """The chapter's panel, with every source; it opens on the simulated step. `more` goes to `Panel`."""
    missing = engine_missing()
    recorded, absent = recorded_sources()
    live = [] if missing else [LiveForms(gpu_name())]
    queue = FusedQueue()
    panel = Panel(
        "09-fuse-then-replay", "Fuse, then replay", [*live, *recorded, queue], figure, COLUMNS, changed=changed,
        gate=GATE, absent=[f"No LIVE source: {missing}", *absent] if missing else absent,
        first_words="Predict, then run a batch of 1 and a batch of 256.", **more,
    )  # fmt: skip
    panel.set(source=queue.label)
    return panel


def kernels_panel(**more: Any) -> Panel:
    """Kernels before and after fusion; RECORDED first, and this machine's compiler where there is one."""
    missing = engine_missing()
    sources: list[Any] = [RecordedKernels()] if FILE.exists() else []
    if not missing:
        sources.append(LiveKernels(gpu_name()))
    return Panel(
        "09-kernels", "What fusion leaves", sources, kernels_figure, KERNEL_COLUMNS, changed=kernels_changed,
        absent=[f"No LIVE source: {missing}"] if missing else [], first_words="Press Run.", **more,
    )  # fmt: skip


def figure(runs: Sequence[Run], pinned: Sequence[Run]) -> go.Figure:
    """The newest run's map, one pinned before it, and the text's table; launches under them."""
    chosen = _chosen(runs, pinned, 2)
    maps = [Map(run.number, run.data["title"], run.kind, run.data["cells"]) for run in chosen]
    bars = [
        FormBars(run.number, f"run {run.number}: {run.data['title']}", run.data["forms"], run.data["counts"])
        for run in chosen if run.data["counts"]
    ]  # fmt: skip
    return matrix_figure(maps, TEXT, bars)


def kernels_figure(runs: Sequence[Run], pinned: Sequence[Run]) -> go.Figure:
    finished = [run for run in runs if run.finished]
    if not finished:
        return fusion_bars(None, "Kernels before and after fusion", "")
    run = finished[-1]
    bars = KindBars(run.number, run.data["labels"], run.data["before"], run.data["after"])
    return fusion_bars(bars, run.data["title"], run.kind)


def _chosen(runs: Sequence[Run], pinned: Sequence[Run], most: int) -> list[Run]:
    finished = [run for run in runs if run.finished]
    others = [run for run in pinned if finished and run.number != finished[-1].number]
    if not others and len(finished) > 1 and finished[-2].source == finished[-1].source:
        others = [finished[-2]]
    return [*others[-(most - 1) :], *finished[-1:]]


def changed(new: Run, old: Run) -> str:
    """What became of the two remedies."""
    if (new.kind, new.source) != (old.kind, old.source):
        return ""
    said = []
    before, after = old.values["winner"], new.values["winner"]
    if before and after and before != after:
        names = {"neither": "neither of the two", GRAPH: "the graph", COMPILE: "the compiler"}
        said.append(f"Of the two alone {names[before]} won before, and {names[after]} wins now.")
    emulated = new.kind == "LIVE" and not new.provenance.gpu  # what such a graph "saves" is noise
    for name, word in [("graph_gain", "graph")] * (not emulated) + [("compile_gain", "compiler")]:
        a, b = old.values[name], new.values[name]
        if a is not None and b is not None and abs(a - b) >= 0.05 * max(abs(a), abs(b)):
            was, is_ = ("saved" if a >= 0 else "cost"), ("saves" if b >= 0 else "costs")
            said.append(f"The {word} alone {was} {abs(a):.2f} ms before and {is_} {abs(b):.2f} ms now.")
    return " ".join(said)


def kernels_changed(new: Run, old: Run) -> str:
    if new.values["what"] == old.values["what"]:
        return ""
    return f"{new.values['what']} has {new.values['pieces']} pieces, {old.values['what']} has {old.values['pieces']}."


def _pair(runs: Sequence[Run]) -> tuple[Run, Run] | None:
    """A run of one request and one of a large batch that differ in nothing else, where both tell who wins."""
    for large in runs:
        for small in runs:
            a, b = dict(small.settings), dict(large.settings)
            fits = a.pop("batch", None) == 1 and (b.pop("batch", None) or 0) >= LARGE
            told = all(run.values["winner"] in (GRAPH, COMPILE) for run in (small, large))
            if fits and told and a == b and small.source == large.source:
                return small, large
    return None


def _alone(runs: Sequence[Run]) -> tuple[str, str] | None:
    found = _pair(runs)
    return None if found is None else (found[0].values["winner"], found[1].values["winner"])


def _why_alone(runs: Sequence[Run]) -> str:
    found = _pair(runs)
    if found is None:
        return ""
    small, large = found
    lines = [
        f"batch {run.values['batch']}: {WORDS[GRAPH]} {run.values['graph_ms']:.2f} ms, {WORDS[COMPILE]} "
        f"{run.values['compile_ms']:.2f} ms" for run in found
    ]  # fmt: skip
    return (
        f"{'; '.join(lines)} ({small.kind}, {small.data['title'].split(',')[0]}). With one request the step waits for "
        "launches: a graph takes all of them away, a compiler only some. With a large batch every kernel moves more "
        "bytes, and only fusion moves fewer."
    )
