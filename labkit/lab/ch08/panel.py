"""The panel of chapter 08: a list of capture sizes over some traffic. Refuses to know how a source gets its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from labkit.figures.capture_sizes import Best, Spot, Stairs, sizes_figure
from labkit.lab.ch08.lists import DEFAULT
from labkit.lab.ch08.outcome import COLUMNS
from labkit.lab.ch08.recorded import recorded_sources
from labkit.lab.ch08.simulated import RuleSource
from labkit.lab.gate import Gate
from labkit.lab.machine import engine_missing, gpu_name
from labkit.lab.panel import Panel
from labkit.lab.runs import Run, Source

#: Runs in the lower plot at most; older ones stay in the table.
SHOWN = 6


def _asked(runs: Sequence[Run]) -> str | None:
    """What came out for 13 and 520 tokens, from a run with the list that the question is about."""
    for run in reversed(runs):
        asked = {"list": DEFAULT, "max_num_seqs": 256, "max_size": 512}
        if run.source == RuleSource.label and {key: run.settings.get(key) for key in asked} == asked:
            return f"{run.values['runs_13']} {run.values['runs_520']}"
    return None


GATE = Gate(
    "08.runs_as",
    "An engine with max_num_seqs = 256 and the default list, whose largest size is 512. A step of 13 tokens and a step "
    "of 520 tokens: what do they run as?",
    options=[
        ("13 as 13, 520 as 520", "13 520"),
        ("13 as 16, 520 as 512 and 8 more", "16 512"),
        ("13 as 16, 520 eagerly", "16 eager"),
        ("13 as 512, 520 eagerly", "512 eager"),
    ],
    answer=_asked,
    explain="The list has 8 and 16 and nothing in between, so 13 gets 3 rows of padding. Above the largest size no "
    "graph holds the step, and a graph cannot be run in part: the host launches that step kernel by kernel.",
)


def sizes_panel(**more: Any) -> Panel:
    """The chapter's panel; it opens on the rule, which the question is about. `more` goes to `Panel`."""
    missing = engine_missing()
    live: list[Source] = []
    if not missing:
        from labkit.lab.ch08.live import LiveSizes

        live.append(LiveSizes(gpu_name()))
    recorded, absent = recorded_sources()
    rule = RuleSource()
    panel = Panel(
        "08-sizes", "Sizes, padding and memory", [*live, *recorded, rule], figure, COLUMNS, changed=changed, gate=GATE,
        absent=[f"No LIVE source: {missing}", *absent] if missing else absent,
        first_words="Predict, then press Run. Then try another list, or other traffic.", **more,
    )  # fmt: skip
    panel.set(source=rule.label)
    return panel


def figure(runs: Sequence[Run], pinned: Sequence[Run]) -> go.Figure:
    """The newest run above; below all runs of its traffic and kind, beside the best lists."""
    done = [run for run in runs if run.finished]
    if not done:
        return sizes_figure(None, (), (), None)
    new = done[-1]
    alike = [run for run in done if _same_traffic(run, new)]
    chosen = {run.number: run for run in [*(run for run in pinned if _same_traffic(run, new)), *alike[-SHOWN:]]}
    shown = sorted(chosen.values(), key=lambda run: run.number)
    data = new.data
    stairs = Stairs(
        new.number, new.kind, f"Run {new.number}: {new.values['list']}, {new.values['traffic']}", data["tokens"],
        data["runs_as"], data["eager_tokens"], data["step_tokens"], data["step_counts"],
    )  # fmt: skip
    spots = [Spot(run.number, _label(run)) for run in shown]
    at = [(run.values["sizes"], run.values["waste_pct"]) for run in shown]
    best = Best(new.number, data["advice_sizes"], data["advice_waste_pct"]) if data["advice_sizes"] else None
    return sizes_figure(stairs, spots, at, best)


def _same_traffic(run: Run, new: Run) -> bool:
    mine = (run.kind, run.source, run.data["step_tokens"], run.data["step_counts"])
    return mine == (new.kind, new.source, new.data["step_tokens"], new.data["step_counts"])


def _label(run: Run) -> str:
    name = str(run.values["list"])
    covered = run.values["coverage_pct"]
    return name if covered == 100 else f"{name}, {covered:.0f} % have a graph"


def changed(new: Run, old: Run) -> str:
    """Why padding or misses differ from the run before, where both have the same traffic."""
    if (new.kind, new.source) != (old.kind, old.source):
        return ""
    if not _same_traffic(new, old):
        return "Other traffic: the same list pads other steps."
    before, now = old.values, new.values
    if now["misses"] != before["misses"]:
        how = "fewer" if now["misses"] < before["misses"] else "more"
        return (
            f"The largest size was {before['largest']} and is {now['largest']}: {how} steps are eager, and an eager "
            "step is not padded, so compare padding with care."
        )
    if now["padded"] == before["padded"]:
        return "The sizes that were added or left out are hit by no step that was padded."
    closer = "closer" if now["padded"] < before["padded"] else "less close"
    return f"The sizes lie {closer} above the numbers of tokens that occur often."
