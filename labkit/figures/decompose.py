"""A step taken apart: for each configuration a bar of the host's phases and one of the device. Refuses to know rows.

The host's bar is what adds up. The device's bar begins where the host begins to start the forward, so that what lies
beneath the launch phase overlaps with it, and what sticks out beyond it the host waited for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from labkit.figures import palette
from labkit.measure.decompose import Decomposition, Part
from labkit.measure.provenance import ProvenanceError

#: Phase → colour and pattern; the same in every figure of phases.
LOOKS = {
    "schedule": ("#2C7FB8", ""), "dispatch": ("#8A7000", "."), "inputs": ("#009E73", "/"), "prepare": ("#B35FA0", "x"),
    "launch": ("#D55E00", ""), "sample": ("#777777", "\\"), "commit": ("#2C7FB8", "-"), "detokenize": ("#009E73", "|"),
    "between": ("#777777", "."), "forward": ("#555577", "+"),
}  # fmt: skip
OTHER_LOOK = ("#777777", "")
ROW = 62


def decomposition_figure(steps: Sequence[Decomposition], origin: str = "") -> go.Figure:
    """Two horizontal bars per configuration, host above device, on one axis of microseconds.

    Args:
        origin: where the numbers are from, such as `Provenance.label`.

    Traces are named in `meta`: (lane, part). Medians; hovering shows p10–p90 where they were kept.

    Raises:
        ProvenanceError: the steps are of different kinds (LIVE, RECORDED, SIMULATED).
    """
    kinds = {step.kind for step in steps}
    if len(kinds) > 1:
        named = ", ".join(sorted(map(str, kinds)))
        raise ProvenanceError("one chart of steps", f"they are of different kinds: {named}", "Draw one chart each.")
    kind = str(next(iter(kinds))) if kinds else ""
    steps = _told_apart(steps)
    lanes = [lane for step in steps for lane in _lanes(step)]
    figure = go.Figure(layout=_layout(len(lanes), lanes, origin or kind))
    parts: dict[tuple[str, str], list[tuple[str, float, Part]]] = {}
    for step in steps:
        host, *rest = _lanes(step)
        at = begin = 0.0
        for part in step.host:
            if part.name == "launch":
                begin = at
            parts.setdefault(("host", part.name), []).append((host, at, part))
            at += part.p50_us
        if step.forward is not None:
            parts.setdefault(("device", "forward"), []).append((rest[0], begin, step.forward))
    for (lane, name), bars in parts.items():
        hue, pattern = LOOKS.get(name, OTHER_LOOK)
        figure.add_trace(
            go.Bar(
                y=[y for y, _, _ in bars], x=[part.p50_us for _, _, part in bars], base=[at for _, at, _ in bars],
                orientation="h", name=f"{name}: {bars[0][2].words}", meta=[lane, name],
                marker={
                    "color": hue, "line": {"color": "#FFFFFF", "width": 0.5},
                    "pattern": {"shape": pattern, "fgcolor": "#FFFFFF", "size": 5, "fillmode": "overlay"},
                },
                customdata=[[_spread(part)] for _, _, part in bars],
                hovertemplate=f"{name}: %{{x:,.1f}} µs%{{customdata[0]}}<extra>%{{y}}</extra>",
            )
        )  # fmt: skip
    return figure


def _told_apart(steps: Sequence[Decomposition]) -> list[Decomposition]:
    """The same, the second and later of equal titles numbered: equal titles would share a bar."""
    seen: dict[str, int] = {}
    out = []
    for step in steps:
        seen[step.title] = number = seen.get(step.title, 0) + 1
        out.append(step if number == 1 else dataclasses.replace(step, title=f"{step.title} ({number})"))
    return out


def _lanes(step: Decomposition) -> list[str]:
    return [f"{step.title}<br>host"] + ([f"{step.title}<br>device"] if step.forward is not None else [])


def _spread(part: Part) -> str:
    return "" if part.p10_us is None or part.p90_us is None else f" (p10–p90 {part.p10_us:,.1f}–{part.p90_us:,.1f})"


def _layout(bars: int, lanes: list[str], origin: str) -> dict[str, Any]:
    axis = {
        "zeroline": False, "showline": True, "linecolor": palette.NEUTRAL, "tickfont": {"size": 11}, "automargin": True,
    }  # fmt: skip
    return {
        "title": {"text": "Where the time of a step goes", "font": {"size": 14}},
        "height": 190 + ROW * max(bars, 1), "autosize": True, "margin": {"l": 20, "r": 14, "t": 64, "b": 120},
        "template": "none", "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 12, "color": palette.NEUTRAL}, "barmode": "overlay", "bargap": 0.25, "hovermode": "closest",
        "legend": {"orientation": "h", "x": 0, "y": -0.16, "yanchor": "top", "font": {"size": 11}},
        "xaxis": {
            **axis, "gridcolor": palette.GRID, "rangemode": "tozero",
            "title": {"text": "µs since the step began; the host's phases follow each other", "standoff": 8},
        },
        "yaxis": {
            **axis, "type": "category", "categoryorder": "array", "categoryarray": lanes[::-1], "showgrid": False,
        },
        "annotations": [
            {
                "text": origin, "x": 1, "y": 1, "xref": "paper", "yref": "paper", "xanchor": "right",
                "yanchor": "bottom", "showarrow": False, "font": {"size": 11, "color": palette.NEUTRAL},
            },
        ],
    }  # fmt: skip
