"""The panel of chapter 00: the latency panel behind a question. Refuses to measure anything itself."""

from __future__ import annotations

from labkit.lab.gate import Gate
from labkit.lab.latency import LatencyPanel, latency_panel

predict = Gate(
    id="00.launches",
    question="A decode step of a small model runs several hundred kernels. Under a FULL graph, how many launches does "
    "the host make for the model's own part of the step?",
    options=(("one for each kernel", "all"), ("one", "one"), ("one for each layer", "layers")),
    answer="one",
    explain="A FULL graph is one launch, whatever was recorded in it. Choosing the next tokens takes a few more.",
)


def panel(*, redraw: bool | None = None, ask: bool = True) -> LatencyPanel:
    """The latency panel; with `ask` it holds back Run until something is predicted or the question is skipped."""
    return latency_panel(redraw=redraw, gate=predict if ask else None)
