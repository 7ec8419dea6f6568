"""The panels of chapter 10: the replay tape, and what each mode costs. Refuses to know how a batch is dispatched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from labkit.attention.interface import AttentionCGSupport as Tier
from labkit.config import CUDAGraphMode as Mode
from labkit.figures.replay import ModeBars, Tape, cost_figure, tape_figure
from labkit.lab.ch10.costs import SimulatedModes, recorded_sources
from labkit.lab.ch10.rules import PIECEWISE
from labkit.lab.ch10.tape import RULES, EngineSource, RulesSource
from labkit.lab.gate import Gate
from labkit.lab.machine import engine_missing, gpu_name
from labkit.lab.panel import Panel
from labkit.lab.runs import Run

COLUMNS = [
    ("what", "what ran"), ("mode", "mode in force"), ("pieces", "pieces"), ("kinds", "kinds"), ("full", "FULL"),
    ("piecewise", "pieces"), ("eager", "eager"), ("launches", "launches"), ("tape", "tape, by the rules"),
    ("ran", "tape, as the engine ran"),
]  # fmt: skip
COST_COLUMNS = [
    ("what", "step"), ("none_ms", "NONE, ms"), ("piecewise_ms", "PIECEWISE, ms"), ("full_ms", "FULL, ms"),
    ("share", "share of FULL's gain, %"), ("none_launches", "launches, NONE"), ("piecewise_launches", "PIECEWISE"),
    ("full_launches", "FULL"),
]  # fmt: skip
RIGHT, OTHER = (33, 3, PIECEWISE), "other"

GATE = Gate(
    "10.pieces",
    "A model has 32 layers and is cut at attention. The mode is FULL_AND_PIECEWISE, the backend FA2 (tier "
    "UNIFORM_BATCH). How many pieces are there, of how many kinds, and how does a batch run that has a prompt in it?",
    options=[
        ("32 pieces, 32 kinds; it runs as PIECES", (32, 32, PIECEWISE)),
        ("33 pieces, 3 kinds; it runs as PIECES", RIGHT),
        ("33 pieces, 3 kinds; it runs in a FULL graph", (33, 3, "FULL")),
        ("3 pieces; it runs eagerly", (3, 3, "NONE")),
    ],
    answer=lambda runs: _told(runs),
    explain="32 cuts leave 33 parts. Layers are alike, so that only the first and the last part differ from those "
    "between: 3 kinds, each compiled once. FA2 can be captured for batches of equal requests only, which is "
    "what FULL is used for; a batch with a prompt takes the graphs of the pieces, with attention between them.",
)


def tape_panel(**more: Any) -> Panel:
    """The chapter's panel; it opens on the rules. `more` goes to `Panel`."""
    missing = engine_missing()
    live = [] if missing else [EngineSource(gpu_name())]
    panel = Panel(
        "10-replay-tape", "Cut at attention, pick per batch", [*live, RulesSource()], figure, COLUMNS, changed=changed,
        gate=GATE, absent=[f"No LIVE source: {missing}"] if missing else [],
        first_words="Predict, then press Run. Then change the tier, and the mode.", **more,
    )  # fmt: skip
    panel.set(source=RULES)
    return panel


def cost_panel(**more: Any) -> Panel:
    """One decode step under each mode: RECORDED first, SIMULATED to hold against."""
    recorded, absent = recorded_sources()
    return Panel(
        "10-mode-cost", "What each mode costs", [*recorded, SimulatedModes()], costs, COST_COLUMNS,
        changed=cost_changed, absent=absent, first_words="Press Run, then take another batch or model.", **more,
    )  # fmt: skip


def figure(runs: Sequence[Run], pinned: Sequence[Run]) -> go.Figure:
    """The newest run's pieces, tape and tree."""
    finished = [run for run in runs if run.finished]
    if not finished:
        return tape_figure(None)
    run = finished[-1]
    mixed = Mode[run.values["mode"]].mixed_mode().name
    return tape_figure(Tape(run.number, run.kind, run.data, "" if mixed == "NONE" else mixed))


def costs(runs: Sequence[Run], pinned: Sequence[Run]) -> go.Figure:
    """Bars of the newest run, of those pinned, and of the one before, as far as they are of one kind."""
    finished = [run for run in runs if run.finished]
    if not finished:
        return cost_figure([], "")
    newest = finished[-1]
    others = [run for run in pinned if run.number != newest.number] or finished[-2:-1]
    chosen = [*(run for run in others if (run.kind, run.source) == (newest.kind, newest.source)), newest]
    bars = [ModeBars(run.number, run.data["title"], run.data["ways"], run.data["ms"]) for run in chosen]
    return cost_figure(bars, newest.kind)


def changed(new: Run, old: Run) -> str:
    """Which batches run otherwise, and what it does to the launches."""
    if (new.kind, new.source) != (old.kind, old.source):
        return ""
    said = []
    if new.values["mode"] != old.values["mode"]:
        said.append(f"The mode in force was {old.values['mode']} and is {new.values['mode']}.")
    same = new.data["labels"] == old.data["labels"]
    if same:
        a, b = old.values["tape"].split(), new.values["tape"].split()
        moved = [label for label, x, y in zip(new.data["labels"], a, b, strict=True) if x != y]
        if moved:
            said.append(f"These steps run otherwise: {', '.join(moved)}.")
        if new.values["launches"] != old.values["launches"]:
            said.append(f"{old.values['launches']:,} launches before, {new.values['launches']:,} now.")
    return " ".join(said)


def cost_changed(new: Run, old: Run) -> str:
    a, b = old.values["share"], new.values["share"]
    if (new.kind, new.source) != (old.kind, old.source) or a is None or b is None or abs(a - b) < 1:
        return ""
    return f"PIECEWISE had {a:.0f} % of FULL's gain and has {b:.0f} % now: it is no constant."


def _told(runs: Sequence[Run]) -> tuple[int, int, str] | None:
    """What came out for the settings of the question, where its stream has a prompt below the largest size."""
    for run in runs:
        asked = {"mode": "FULL_AND_PIECEWISE", "tier": Tier.UNIFORM_BATCH, "cut": "compile", "layers": 32}
        if all(run.settings.get(name) == value for name, value in asked.items()):
            ways = [way for way in run.values["mixed_ways"] if way != "NONE"]
            if len(ways) == 1:
                return run.values["pieces"], run.values["kinds"], ways[0]
    return None
