"""Bars of decode steps of several engines side by side, one group per batch. Refuses to know who measured.

Every bar carries engine, version and way; an engine has one colour, a way one pattern. Whiskers are p10 and p90. One
figure holds one kind of number of one machine, and what does not agree in its tokens is drawn hollow and says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from labkit.figures import palette
from labkit.measure.beside import OURS, BesideRecording, BesideRow
from labkit.measure.provenance import ProvenanceError

HEIGHT = 440
ENGINE_COLOURS = {OURS: palette.BACKEND_COLOURS["TRITON_ATTN"], "transformers": palette.BACKEND_COLOURS["TORCH_SDPA"]}
#: Patterns of plotly, given to the ways of an engine in order; the first is plain.
PATTERNS = ("", "/", "x", "-", "+", ".")


def beside_figure(recordings: Sequence[BesideRecording]) -> go.Figure:
    """Median time of a decode step per way, grouped by batch (and by model and context, where there are several).

    Traces are named in `meta`: (engine, way, kind of number).

    Raises:
        ProvenanceError: the recordings are of different kinds or machines; bars side by side ask to be compared.
    """
    kinds = {str(r.provenance.kind) for r in recordings}
    machines = {(r.provenance.device, r.provenance.packages.get("torch")) for r in recordings}
    if len(kinds) > 1 or len(machines) > 1:
        raise ProvenanceError(
            "engines side by side", f"{' and '.join(sorted(kinds))} of {len(machines)} machines were given, and bars "
            "beside each other are compared", "Draw each recording by itself.",
        )  # fmt: skip
    rows = [row for recording in recordings for row in recording.rows]
    kind = next(iter(kinds), "")
    figure = go.Figure()
    patterns: dict[str, list[str]] = {}
    for name in dict.fromkeys(row.name for row in rows):
        mine = [row for row in rows if row.name == name]
        ways = patterns.setdefault(mine[0].engine, [])
        ways.append(mine[0].way)
        figure.add_trace(_bars(name, mine, rows, PATTERNS[(len(ways) - 1) % len(PATTERNS)], kind))
    label = "<br>".join(dict.fromkeys(r.provenance.label for r in recordings))
    figure.update_layout(
        title={"text": "One decode step, the same weights and prompts, in one process", "font": {"size": 14}, "x": 0},
        barmode="group", height=HEIGHT, autosize=True, margin={"l": 62, "r": 14, "t": 110, "b": 84}, template="none",
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", font={"size": 12, "color": palette.NEUTRAL},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 11}},
        xaxis={"type": "category", "showline": True, "linecolor": palette.NEUTRAL},
        yaxis={"title": {"text": "time of a step, ms"}, "rangemode": "tozero", "gridcolor": palette.GRID},
        annotations=[_note(label, 1, -0.2, "right", 11), *([] if rows else [_note("Nothing was measured.", 0.5, 0.5)])],
    )  # fmt: skip
    return figure


def beside_summary(recordings: Sequence[BesideRecording]) -> str:
    """The figure in one sentence per bar, for who cannot see it."""
    return " ".join(
        f"{row.name}, batch {row.batch}: {row.p50_ms:.3g} ms ({row.p10_ms:.3g} to {row.p90_ms:.3g}), "
        f"{recording.provenance.kind}{'' if row.agrees else ', its tokens do not agree'}."
        for recording in recordings
        for row in recording.rows
    )


def _bars(name: str, mine: Sequence[BesideRow], rows: Sequence[BesideRow], pattern: str, kind: str) -> go.Bar:
    hue = ENGINE_COLOURS.get(mine[0].engine, palette.OTHER_COLOUR)
    emulated = " (emulated)" if any(row.emulated for row in mine) else ""
    return go.Bar(
        x=[_group(row, rows) for row in mine], y=[row.p50_ms for row in mine], name=f"{name}{emulated} · {kind}",
        meta=[mine[0].engine, mine[0].way, kind],
        marker={
            "color": [hue if row.agrees else "rgba(0,0,0,0)" for row in mine],
            "line": {"color": hue, "width": 1.5},
            "pattern": {"shape": pattern, "fgcolor": "#FFFFFF", "fillmode": "overlay", "size": 7},
        },
        error_y={
            "type": "data", "symmetric": False, "thickness": 1, "width": 3, "color": palette.NEUTRAL,
            "array": [row.p90_ms - row.p50_ms for row in mine], "arrayminus": [row.p50_ms - row.p10_ms for row in mine],
        },
        text=["" if row.agrees else "tokens differ" for row in mine],
        customdata=[[row.p10_ms, row.p90_ms, row.n, row.tok_s, row.agreement] for row in mine],
        hovertemplate=f"{name}: median %{{y:.3f}} ms, p10–p90 %{{customdata[0]:.3f}}–%{{customdata[1]:.3f}}, "
        "n=%{customdata[2]}, %{customdata[3]:,.0f} tokens/s; %{customdata[4]}<extra></extra>",
    )  # fmt: skip


def _group(row: BesideRow, rows: Sequence[BesideRow]) -> str:
    """What a group of bars is called: the batch, with whatever else is not the same for all."""
    parts = [f"batch {row.batch}"]
    if len({r.context for r in rows}) > 1:
        parts.append(f"context {row.context}")
    if len({(r.model, r.dtype) for r in rows}) > 1:
        parts.insert(0, f"{row.model} {row.dtype}")
    return ", ".join(parts)


def _note(text: str, x: float, y: float, anchor: str = "center", size: int = 14) -> dict[str, object]:
    return {
        "text": text, "x": x, "y": y, "xref": "paper", "yref": "paper", "xanchor": anchor, "showarrow": False,
        "font": {"size": size, "color": palette.NEUTRAL},
    }  # fmt: skip
