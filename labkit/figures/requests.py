"""Waits of requests: every token of a decoding request in turn, and time to first token. Refuses to know who measured.

One line per scheduling, median over runs at each token with p10–p90; markers say where a prompt was computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from labkit.errors import LabkitError
from labkit.figures import palette
from labkit.measure.traffic import RequestRecording, RequestRow

HEIGHT = 440
#: In the order of the rows: colour, dash, marker and the bar's pattern. They repeat after six.
_HUES = ("#D55E00", "#2C7FB8", "#009E73", "#B35FA0", "#8A7000", "#777777")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_MARKERS = ("square", "circle", "diamond", "triangle-up", "pentagon", "hexagram")
_PATTERNS = ("", "/", ".", "x", "-", "+")


def requests_figure(recording: RequestRecording, rows: Sequence[RequestRow] | None = None) -> go.Figure:
    """Waits between tokens over the token's index at the left, time to first token as bars at the right.

    Args:
        rows: of one traffic, some of the recording's; None takes those of its first traffic.

    Traces are named in `meta`: ("waits" | "band" | "spikes" | "ttft", scheduling).

    Raises:
        LabkitError: there are no rows, or they are of several traffics.
    """
    if rows is None:
        rows = [row for row in recording.rows if row.traffic == recording.rows[0].traffic]
    if not rows or len({row.traffic for row in rows}) != 1:
        raise LabkitError("a figure of requests", "it shows one traffic, in one row per scheduling", "Pass its rows.")
    figure = go.Figure(layout=_layout(recording, rows))
    for i, row in enumerate(rows):
        figure.add_traces(list(_traces(row, i % len(_HUES), str(recording.provenance.kind))))
    return figure


def requests_summary(recording: RequestRecording, rows: Sequence[RequestRow]) -> str:
    """The figure in words: the longest wait and the time to first token of every scheduling."""
    parts = [
        f"{row.scheduling}: worst wait between tokens {row.worst_itl_ms:.3g} ms, time to first token "
        f"{row.p50_ttft_ms:.3g} ms"
        for row in rows
    ]
    return f"{recording.provenance.label}. {'; '.join(parts)}."


def _traces(row: RequestRow, style: int, kind: str) -> list[Any]:
    waits = np.asarray(row.waits)
    low, mid, high = (np.percentile(waits, q, axis=0).tolist() for q in (10, 50, 90))
    # Wait i ends with token i + 2, counted from 1.
    at = list(range(2, waits.shape[1] + 2))
    hue, name = _HUES[style], f"{row.scheduling} · {kind}"
    symbol = _MARKERS[style] + ("" if kind == "LIVE" else "-open")
    spikes = list(row.during)
    common = {"legendgroup": name}
    return [
        go.Scatter(
            x=at + at[::-1], y=high + low[::-1], mode="lines", line={"width": 0, "color": hue}, fill="toself",
            fillcolor=palette.translucent(hue, 0.15), hoverinfo="skip", showlegend=False,
            meta=["band", row.scheduling], name=f"{name}: p10–p90", **common,
        ),
        go.Scatter(
            x=at, y=mid, mode="lines", line={"color": hue, "width": 2, "dash": _DASHES[style]},
            customdata=[[a, b] for a, b in zip(low, high, strict=True)],
            hovertemplate=f"{row.scheduling}, token %{{x}}: %{{y:.3f}} ms, p10–p90 %{{customdata[0]:.3f}}–"
            f"%{{customdata[1]:.3f}}, n={row.runs}<extra></extra>",
            meta=["waits", row.scheduling], name=name, **common,
        ),
        go.Scatter(
            x=[at[i] for i in spikes], y=[mid[i] for i in spikes], mode="markers",
            marker={"color": hue, "size": 9, "symbol": symbol},
            hovertemplate=f"{row.scheduling}, token %{{x}}: %{{y:.3f}} ms, with a prompt computed in it"
            "<extra></extra>",
            showlegend=False, meta=["spikes", row.scheduling], name=f"{name}: a prompt was computed", **common,
        ),
        go.Bar(
            x=[row.scheduling], y=[row.p50_ttft_ms], xaxis="x2", yaxis="y2", text=[f"{row.p50_ttft_ms:.3g} ms"],
            textposition="outside", cliponaxis=False,
            error_y={
                "type": "data", "symmetric": False, "thickness": 1, "width": 3,
                "array": [row.p90_ttft_ms - row.p50_ttft_ms], "arrayminus": [row.p50_ttft_ms - row.p10_ttft_ms],
            },
            marker={
                "color": hue,
                "pattern": {"shape": _PATTERNS[style], "fgcolor": "#FFFFFF", "size": 6, "fillmode": "overlay"},
            },
            hovertemplate=f"{row.scheduling}: time to first token %{{y:.3f}} ms, n={row.n}<extra></extra>",
            showlegend=False, meta=["ttft", row.scheduling], name=f"{name}: TTFT", **common,
        ),
    ]  # fmt: skip


def _layout(recording: RequestRecording, rows: Sequence[RequestRow]) -> dict[str, Any]:
    row = rows[0]
    what = f"a prompt of {row.prompt:,}" if row.prompts == 1 else f"{row.prompts} prompts of {row.prompt:,}"
    # The first token that waits for a step with a prompt in it.
    arrival = row.lead + 0.5
    axis = {
        "gridcolor": palette.GRID, "zeroline": False, "showline": True, "linecolor": palette.NEUTRAL,
        "tickfont": {"size": 11}, "automargin": True,
    }  # fmt: skip
    note = {"showarrow": False, "font": {"size": 11, "color": palette.NEUTRAL}}
    longest = max(max(one.samples_itl_ms) for one in rows)
    return {
        "height": HEIGHT, "autosize": True, "margin": {"l": 62, "r": 14, "t": 92, "b": 76}, "template": "none",
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 12, "color": palette.NEUTRAL}, "hovermode": "closest",
        "title": {
            "text": f"Waits of {row.decodes} decoding request{'s' * (row.decodes > 1)} when {what} tokens "
            f"arrive{'s' * (row.prompts == 1)} · {row.model}", "font": {"size": 14}, "x": 0, "xanchor": "left",
        },
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 11}},
        "xaxis": {**axis, "domain": [0, 0.68], "title": {"text": "token of a decoding request", "standoff": 8}},
        # From zero, always: cutting the axis would make any difference look large.
        "yaxis": {**axis, "range": [0, longest * 1.1], "title": {"text": "wait since the token before, ms"}},
        "xaxis2": {**axis, "domain": [0.78, 1], "anchor": "y2", "type": "category", "showgrid": False},
        "yaxis2": {
            **axis, "anchor": "x2", "rangemode": "tozero", "title": {"text": "time to first token of the prompt, ms"},
        },
        "shapes": [
            {
                "type": "line", "x0": arrival, "x1": arrival, "xref": "x", "y0": 0, "y1": 1, "yref": "paper",
                "line": {"color": palette.NEUTRAL, "width": 1, "dash": "dash"},
            }
        ],
        "annotations": [
            {**note, "text": f"{what} tokens", "x": arrival, "xref": "x", "xanchor": "left", "y": 1, "yref": "paper"},
            {
                **note, "text": f"{recording.provenance.label} · markers: a prompt was computed", "x": 1, "y": -0.2,
                "xref": "paper", "yref": "paper", "xanchor": "right",
            },
        ],
    }  # fmt: skip
