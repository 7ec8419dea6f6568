"""Inside a graph and inside compiled pieces: nodes by role, operators by fused kernel. Refuses to read either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from labkit.figures import palette
from labkit.graphs.xray import Fusion, GraphXray, PieceXray
from labkit.measure.roles import short_name

#: A kernel's name in a bar is cut to this many letters.
LETTERS = 34


def nodes_figure(xrays: Sequence[GraphXray], kind: str) -> go.Figure:
    """Nodes of captured graphs by role, one bar per graph of a step's mode and size, its number in each part.

    Args:
        kind: LIVE or RECORDED, of all of them.

    Traces are named in `meta`: ("role", role); "unnamed" are kernels whose name the driver did not tell.
    """
    counts = [one.by_role() for one in xrays]
    total = [sum(found.values()) for found in counts]
    figure = go.Figure(layout=_layout(f"Nodes of captured graphs ({kind})", "nodes", [one.title for one in xrays]))
    for role in (*palette.ROLE_STYLES, "unnamed"):
        values = [found.get(role, 0) for found in counts]
        if any(values):
            figure.add_trace(
                go.Bar(
                    orientation="h", name=_label(role), meta=["role", role], x=values, y=list(range(len(xrays))),
                    text=[str(v) if v >= 0.02 * max(total) else "" for v in values], textposition="inside",
                    textangle=0, textfont={"color": "#FFFFFF", "size": 11}, marker=_marker(role),
                    hovertemplate=f"{role}: %{{x}} nodes<extra></extra>",
                )
            )  # fmt: skip
    for y, one in enumerate(xrays):
        if not one.nodes:
            figure.add_annotation(
                x=0, y=y, text=one.reason or "nothing was recorded", showarrow=False, xanchor="left",
                font={"color": palette.NEUTRAL, "size": 11},
            )  # fmt: skip
    return figure


def fusion_figure(pieces: Sequence[PieceXray], kind: str) -> go.Figure:
    """Kernel calls of compiled pieces, one row per class of pieces in the order of the calls, as wide as it has ops.

    Args:
        kind: LIVE or RECORDED.

    Traces are named in `meta`: ("role", role).
    """
    names = [
        f"class {p.index}, {p.pieces} piece{'s' * (p.pieces != 1)}<br>{p.kernels_before} kernels → {p.kernels_after}"
        for p in pieces
    ]
    figure = go.Figure(
        layout=_layout(f"What was fused into each generated kernel ({kind})", "operators in a kernel", names)
        | {"barmode": "overlay"}  # each bar has its own begin
    )
    by_role: dict[str, list[tuple[int, int, Fusion]]] = {}
    for y, piece in enumerate(pieces):
        at = 0
        for fusion in piece.fusions:
            by_role.setdefault(fusion.role, []).append((y, at, fusion))
            at += max(1, len(fusion.ops))
    for role in palette.ROLE_STYLES:
        found = by_role.get(role, [])
        if found:
            figure.add_trace(
                go.Bar(
                    orientation="h", name=_label(role), meta=["role", role], y=[y for y, _, _ in found],
                    base=[at for _, at, _ in found], x=[max(1, len(f.ops)) for _, _, f in found],
                    text=[_short(f) for _, _, f in found], textposition="inside", textangle=0, constraintext="none",
                    textfont={"color": "#FFFFFF", "size": 10}, marker=_marker(role),
                    customdata=[[f.kernel, ", ".join(f.ops), "library" if f.library else "generated"]
                                for _, _, f in found],
                    hovertemplate="%{customdata[0]} (%{customdata[2]})<br>%{customdata[1]}<extra></extra>",
                )
            )  # fmt: skip
    return figure


def xray_sentence(one: GraphXray) -> str:
    """The X-ray in words."""
    parts = [f"{one.title}:"]
    if one.nodes:
        roles = ", ".join(f"{n} {role}" for role, n in one.by_role().items())
        parts.append(f"{len(one.nodes)} nodes in {len(one.graphs)} graph{'s' * (len(one.graphs) != 1)} ({roles}).")
    else:
        parts.append(f"{one.reason or 'nothing was recorded'}.")
    if one.pieces:
        before = sum(p.kernels_before * p.pieces for p in one.pieces)
        after = sum(p.kernels_after * p.pieces for p in one.pieces)
        parts.append(f"Compiled: {before} kernels of single operators became {after}, attention not counted.")
    return " ".join(parts)


def _label(role: str) -> str:
    return "kernel without a name" if role == "unnamed" else role.replace("_", " + ")


def _short(fusion: Fusion) -> str:
    words = short_name(fusion.kernel) if fusion.library else " ".join(fusion.ops)
    return words if len(words) <= LETTERS else f"{words[: LETTERS - 1]}…"


def _marker(role: str) -> dict[str, Any]:
    colour, pattern, _ = palette.ROLE_STYLES.get(role, (palette.OTHER_COLOUR, "/", role))
    return {
        "color": colour, "line": {"color": "#FFFFFF", "width": 1},
        "pattern": {"shape": pattern, "fgcolor": "#FFFFFF", "size": 6, "solidity": 0.2, "fillmode": "overlay"},
    }  # fmt: skip


def _layout(title: str, x_title: str, names: Sequence[str]) -> dict[str, Any]:
    axis = {"zeroline": False, "linecolor": palette.NEUTRAL, "tickfont": {"size": 11}, "automargin": True}
    return {
        "height": 180 + 56 * max(1, len(names)), "autosize": True, "template": "none", "barmode": "stack",
        "margin": {"l": 150, "r": 20, "t": 60, "b": 90}, "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)", "font": {"size": 12, "color": palette.NEUTRAL}, "hovermode": "closest",
        "title": {"text": title, "font": {"size": 14}, "x": 0, "xanchor": "left"},
        "legend": {"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top", "font": {"size": 11}},
        "xaxis": {**axis, "title": {"text": x_title, "standoff": 8}, "gridcolor": palette.GRID, "rangemode": "tozero"},
        "yaxis": {
            **axis, "tickmode": "array", "tickvals": list(range(len(names))), "ticktext": list(names),
            "range": [len(names) - 0.4, -0.6], "fixedrange": True,
        },
    }  # fmt: skip
