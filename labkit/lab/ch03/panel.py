"""The panel of chapter 03: one attention, computed in several ways. Refuses to know how a source gets its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from labkit.figures.same_math import Ways, same_math_figure
from labkit.lab.ch03.contenders import NAIVE
from labkit.lab.ch03.outcome import COLUMNS
from labkit.lab.ch03.recorded import recorded_sources
from labkit.lab.ch03.simulated import FormulaSource
from labkit.lab.gate import Gate
from labkit.lab.machine import engine_missing, gpu_name
from labkit.lab.panel import Panel
from labkit.lab.panel_html import short
from labkit.lab.runs import Run, Source

#: Columns of the strip and lines at most; older runs stay in the table.
SHOWN = 8
BITS = {"float32": 24, "float16": 11, "bfloat16": 8}


def _same_bits(runs: Sequence[Run]) -> str | None:
    """Which option came out, from the newest run that was compared with naive attention in bfloat16."""
    for run in reversed(runs):
        if run.values["dtype"] == "bfloat16" and run.values["same_pct"] is not None:
            share = run.values["same_pct"]
            return "all" if share == 100 else "nearly" if share >= 99 else "most" if share >= 90 else "no"
    return None


GATE = Gate(
    "03.same_bits",
    "Two correct ways of computing attention get the same bfloat16 numbers. How many of their results will have the "
    "very same bits?",
    options=[
        ("all: it is the same mathematics", "all"),
        ("nearly all, 99 of 100 or more", "nearly"),
        ("most, 90 of 100 or more", "most"),
        ("fewer than 90 of 100", "no"),
    ],
    answer=_same_bits,
    explain="Addition of rounded numbers depends on its order, and on which results in between are rounded. Both "
    "results are within rounding of the exact one, and neither is the right one bit for bit.",
)


def attention_panel(**more: Any) -> Panel:
    """The chapter's panel; LIVE first where torch is there. `more` goes to `Panel`."""
    missing = engine_missing()
    absent: list[str] = []
    sources: list[Source] = []
    if missing:
        absent.append(f"No LIVE source: {missing}")
    else:
        from labkit.lab.ch03.live import LiveAttention

        live = LiveAttention(gpu_name())
        absent += live.absent()
        sources.append(live)
    recorded, gone = recorded_sources()
    return Panel(
        "03-same-math", "Same math, different engineering", [*sources, *recorded, FormulaSource()], figure, COLUMNS,
        changed=changed, gate=GATE, absent=[*absent, *gone],
        first_words="Predict, then press Run. Run naive attention first, another way next, and compare.", **more,
    )  # fmt: skip


def figure(runs: Sequence[Run], pinned: Sequence[Run]) -> go.Figure:
    """The newest runs, with those that are pinned."""
    chosen = {run.number: run for run in [*pinned, *runs[-SHOWN:]]}
    ways = [
        Ways(
            run.number, run.values["backend"], run.kind, run.values["dtype"], run.data["lengths"], run.data["time_us"],
            run.data["memory_mib"], run.data["errors"], run.data["tolerance"],
        )
        for run in sorted(chosen.values(), key=lambda run: run.number)
    ]  # fmt: skip
    return same_math_figure(ways)


def changed(new: Run, old: Run) -> str:
    """Why a run differs from the one before, where both were asked for the same."""
    if new.kind != old.kind:
        return ""
    if new.values["dtype"] != old.values["dtype"] and new.values["backend"] == old.values["backend"]:
        bits = [BITS[run.values["dtype"]] for run in (old, new)]
        return f"{bits[0]} significant bits before, {bits[1]} now: the error follows the number format."
    if new.values["backend"] != old.values["backend"]:
        same = new.values["dtype"] == old.values["dtype"] and new.values["longest"] == old.values["longest"]
        return _other_way(new, old) if same else ""
    if new.values["longest"] != old.values["longest"]:
        times = new.values["longest"] / old.values["longest"]
        what = f"{times:g} times the length is {times * times:g} times the scores"
        stored = new.values["backend"] == NAIVE
        return f"{what}; {'naive attention stores them all' if stored else 'each of them is still computed'}."
    return ""


def _other_way(new: Run, old: Run) -> str:
    """Two ways of computing the same."""
    said = []
    if new.values["mib"] and old.values["mib"]:
        said.append(f"memory {short(old.values['mib'])} → {short(new.values['mib'])} MiB")
    if new.values["error"] and old.values["error"]:
        said.append(f"largest error {old.values['error']:.2g} → {new.values['error']:.2g}, both within rounding")
        limit = new.values["tolerance"]
        if max(new.values["error"], old.values["error"]) > limit:
            said[-1] = said[-1].replace("both within rounding", f"the limit is {limit:.2g}")
    return f"The same function computed in another way: {', '.join(said)}." if said else ""
