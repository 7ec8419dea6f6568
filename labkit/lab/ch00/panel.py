"""The panel of chapter 00: the latency panel behind a question. Refuses to measure anything itself."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.lab.gate import Gate
from labkit.lab.latency import LatencyPanel, latency_panel
from labkit.lab.settings import Run


def _launches(runs: Sequence[Run]) -> str | None:
    """What came out, from the newest step that ran as one graph; None while there is none."""
    return next(("one" for run in reversed(runs) if run.row.mode == "FULL"), None)


def _explain(runs: Sequence[Run]) -> str:
    """With the counted launches of the runs, where they have them."""
    said = "A FULL graph is one launch, whatever was recorded in it. Choosing the next tokens takes a few more."
    full = next(run for run in reversed(runs) if run.row.mode == "FULL")
    if full.row.emulated:
        return f"{said} On this CPU the graph was emulated: one call, and nothing saved."
    eager = next((run for run in reversed(runs) if run.row.mode == "NONE" and run.row.launches), None)
    if full.row.launches and eager is not None:
        counted = f"Run {eager.number} has {eager.row.launches} launches, run {full.number} has {full.row.launches}"
        return f"{said} {counted}, of which {full.row.graph_launches} is the graph."
    return said


predict = Gate(
    id="00.launches",
    question="A decode step of a small model runs several hundred kernels. Under a FULL graph, how many launches does "
    "the host make for the model's own part of the step?",
    options=(("one for each kernel", "all"), ("one", "one"), ("one for each layer", "layers")),
    answer=_launches,
    explain=_explain,
)


def panel(*, redraw: bool | None = None, ask: bool = True) -> LatencyPanel:
    """The latency panel; with `ask` it holds back Run until something is predicted or the question is skipped."""
    return latency_panel(redraw=redraw, gate=predict if ask else None)
