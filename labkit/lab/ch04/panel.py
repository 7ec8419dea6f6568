"""The panel of chapter 04: programs of one call, multiprocessors, splits. Refuses to know how a source gets its "
"numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from labkit.figures.splits import SplitRun, splits_figure
from labkit.lab.ch04.outcome import COLUMNS
from labkit.lab.ch04.recorded import recorded_sources
from labkit.lab.ch04.simulated import RulesSource
from labkit.lab.fields import Number
from labkit.lab.gate import Gate
from labkit.lab.machine import engine_missing, gpu_name
from labkit.lab.panel import Panel
from labkit.lab.panel_html import short
from labkit.lab.runs import Run, Source

#: Curves at most; older runs stay in the table.
SHOWN = 6


def _share(runs: Sequence[Run]) -> float | None:
    """Percent of the multiprocessors in use, from a run of just the call that the question names."""
    asked = {"q_len": 1, "kv_len": 32_768, "batch": 1, "kv_heads": 8, "splits": 1, "sms": 132}
    for run in reversed(runs):
        if {name: run.values[name] for name in asked} == asked and run.values["share_pct"] is not None:
            return float(run.values["share_pct"])
    return None


GATE = Gate(
    "04.share",
    "One request decodes: 1 new token over 32,768 tokens of KV, 8 KV heads, nothing split. Which share of a GPU with "
    "132 multiprocessors has something to do?",
    number=Number("share", "Share", 0.0, 100.0, 50.0, 0.5, unit="%"),
    answer=_share,
    explain="One program for each KV head, and a program runs on one multiprocessor: 8 of 132. The length does not "
    "come into it, and neither does the number of query heads, which share a program.",
)


def splits_panel(**more: Any) -> Panel:
    """The chapter's panel; it opens on the rules. `more` goes to `Panel`."""
    missing = engine_missing()
    absent = [f"No LIVE source: {missing}"] if missing else []
    live: list[Source] = []
    if not missing:
        from labkit.lab.ch04.live import SplitBench, SplitProof

        gpu = gpu_name()
        live = [SplitBench(gpu) if gpu else SplitProof()]
    recorded, gone = recorded_sources()
    rules = RulesSource()
    panel = Panel(
        "04-splits", "Prefill kernels, decode kernels", [*live, *recorded, rules], figure, COLUMNS, changed=changed,
        gate=GATE, absent=[*absent, *gone],
        first_words="Predict, then press Run. Then let the engine choose the splits: 0.", **more,
    )  # fmt: skip
    panel.set(source=rules.label, kv_len=32_768, num_splits=1)  # the call that the question names
    return panel


def figure(runs: Sequence[Run], pinned: Sequence[Run]) -> go.Figure:
    """The newest run's source, and what is pinned: times of a CPU and of a GPU's model are orders of magnitude "
    "apart."""
    done = [run for run in runs if run.finished]  # one that is still coming in has nothing to draw
    if not done:
        return splits_figure([])
    new = done[-1]
    alike = [run for run in done if (run.kind, run.source) == (new.kind, new.source)]
    chosen = {run.number: run for run in [*pinned, *alike[-SHOWN:]]}
    with_sms = [run for run in done if run.data["sm_programs"]]
    shown = [_drawn(run) for run in sorted(chosen.values(), key=lambda run: run.number)]
    return splits_figure(shown, _drawn(with_sms[-1]) if with_sms else None)


def _drawn(run: Run) -> SplitRun:
    call = f"{run.values['batch']} × {run.values['q_len']:,} over {run.values['kv_len']:,}"
    return SplitRun(
        run.number, run.kind, call, run.data["sm_x"], run.data["sm_y"], run.data["sm_programs"],
        run.data["curve_splits"], run.data["curve_us"], run.values["splits"], run.values["us"],
    )  # fmt: skip


def changed(new: Run, old: Run) -> str:
    """Why a run differs from the one before, where both are of one source."""
    if (new.kind, new.source) != (old.kind, old.source) or new.values["programs"] is None:
        return ""
    was, now = old.values["programs"], new.values["programs"]
    if was is None or was == now:
        moved = [key for key in ("q_len", "batch", "kv_len") if new.values[key] != old.values[key]]
        if moved == ["kv_len"]:
            return "The same programs, each with more or fewer keys to read: the length alone starts no program."
        return ""
    said = f"{short(was)} programs before, {short(now)} now"
    if new.values["sms"] is None:
        return f"{said}; here they run one after another all the same."
    shares = [f"{run.values['share_pct']:.0f} %" for run in (old, new)]
    return f"{said}: {shares[0]} of the multiprocessors had something to do, and {shares[1]} have now."
