"""The panel of chapter 05: a question to the selector, and every backend's answer. Refuses to know a rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from labkit.figures.selection import Matrix, selection_figure
from labkit.lab.ch05.question import AUTO, OWN_PAGE
from labkit.lab.ch05.sources import RULES, HereSource, RulesSource
from labkit.lab.gate import Gate
from labkit.lab.machine import engine_missing, gpu_name
from labkit.lab.panel import Panel
from labkit.lab.runs import Run

COLUMNS = [
    ("machine", "machine"), ("asked", "asked for"), ("backend", "backend"), ("place", "place in the order"),
    ("refusing", "backends that refuse"), ("tier", "tier"), ("mode", "mode that runs"),
]  # fmt: skip
_KEYS = ("rows", "columns", "cells", "texts", "hovers", "tiers", "usable", "taken")
#: The question of the gate; everything else is as the panel opens.
ASKED = {
    "gpu": "T4", "dtype": "bfloat16", "head": 128, "family": "MHA", "kv": "auto", "page": OWN_PAGE, "window": False,
    "cap": False, "sinks": False, "option": "none", "requested": AUTO, "installed": "everything",
}  # fmt: skip

GATE = Gate(
    "05.t4",
    "A T4 (sm_75), weights in bfloat16, head size 128, every library installed. Which backend does the selector take?",
    options=[(name, name) for name in ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "XFORMERS", "TORCH_SDPA")],
    answer=lambda runs: _first_answer(runs),
    explain="FLASH_ATTN and FLASHINFER come first and need sm_80. Triton would compile for sm_75, which has no "
    "bfloat16 arithmetic. XFORMERS is in no order. What is left is the slowest and the most patient: "
    "TORCH_SDPA. With float16 it is taken as well, but then two others could be asked for by name.",
)


def selection_panel(**more: Any) -> Panel:
    """The chapter's panel; it opens on the rules. `more` goes to `Panel`."""
    missing = engine_missing()
    live = [] if missing else [HereSource(gpu_name())]
    panel = Panel(
        "05-selection", "Who gets picked, and why not the others", [*live, RulesSource()], figure, COLUMNS,
        changed=changed, gate=GATE, absent=[f"No LIVE source: {missing}"] if missing else [],
        first_words="Predict, then press Run. Every ✗ has its reason, and what would mend it, under the chart.", **more,
    )  # fmt: skip
    panel.set(source=RULES)
    return panel


def figure(runs: Sequence[Run], pinned: Sequence[Run]) -> go.Figure:
    """The newest run's matrix and ladder."""
    if not runs or not runs[-1].finished:
        return selection_figure(None)
    new = runs[-1]
    return selection_figure(Matrix(new.number, new.data["title"], **{k: new.data[k] for k in _KEYS}), new.kind)


def changed(new: Run, old: Run) -> str:
    """Who refuses now and did not before, or the other way round, and what else made the difference."""
    before, after = old.data["reasons"], new.data["reasons"]
    if (new.values["backend"], new.values["mode"]) == (old.values["backend"], old.values["mode"]):
        said = f"The result stays {new.values['backend']}"
        moved = [name for name in after if bool(after[name]) != bool(before[name])]
        return f"{said}; {_words(moved, after)}." if moved else f"{said}."
    parts = []
    if new.values["backend"] != old.values["backend"]:
        moved = [name for name in after if bool(after[name]) != bool(before[name])]
        parts.append(f"{old.values['backend']} before, {new.values['backend']} now")
        if moved:
            parts.append(_words(moved, after))
        elif new.data["rows"] != old.data["rows"]:
            parts.append("the order of this machine is another one")
        else:
            parts.append("no reason came or went, the choice was asked for otherwise")
    elif new.values["tier"] != old.values["tier"]:
        parts.append(f"the same backend has tier {new.values['tier']} in place of {old.values['tier']} here")
    else:
        parts.append("the same tier leaves another part of the mode asked for")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _words(moved: Sequence[str], after: Any) -> str:
    refuse, serve = [n for n in moved if after[n]], [n for n in moved if not after[n]]
    return "; ".join(filter(None, (
        f"{', '.join(refuse)} refuse{'s' * (len(refuse) == 1)} now" if refuse else "",
        f"{', '.join(serve)} can serve now" if serve else "",
    )))  # fmt: skip


def _first_answer(runs: Sequence[Run]) -> str | None:
    """What was taken in the newest run of just this question; None while there is none."""
    for run in reversed(runs):
        if run.source == RULES and {k: run.settings.get(k) for k in ASKED} == ASKED:
            return str(run.values["backend"])
    return None
