"""Charts of attention calls: time and bandwidth over batch or context, time over splits. Refuses to know who measured.

Every chart carries the origin of its numbers. Axes are logarithmic: doubling the work is the same step everywhere. A
backend has one colour, dash and marker in all of them (see `palette`); a filled marker is LIVE, an open one is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import plotly.graph_objects as go

from labkit.errors import ConfigError
from labkit.figures import palette
from labkit.measure.attention import AttentionRecording, AttentionRow
from labkit.measure.provenance import ProvenanceError
from labkit.measure.stats import ratio

HEIGHT = 440
OVER = ("batch", "context")
Series = dict[tuple[str, str], list[AttentionRow]]


def calls_figure(
    recordings: Sequence[AttentionRecording],
    over: str,
    *,
    kind: str = "decode",
    kv: str = "rotated",
    launch: str = "graph",
    rate: str = "gb_s",
    **fixed: Any,
) -> go.Figure:
    """Median time of a call at the left, what it achieves at the right, one line per backend and setting.

    Args:
        over: the x axis, "batch" or "context".
        launch: "graph" or "eager"; a line that has no graph rows at all shows its eager ones, and its name says so.
        rate: "gb_s" (bytes of K and V) or "tflop_s".
        fixed: fields of `AttentionRow` that must have these values, such as `context=8192`.

    Traces are named in `meta`: ("time" | "rate", name, kind of number).
    """
    if over not in OVER or rate not in ("gb_s", "tflop_s"):
        raise ConfigError(f"over={over!r}, rate={rate!r}", "there is no such axis", "See calls_figure.")
    figure = go.Figure()
    values: set[float] = set()
    for recording in recordings:
        origin = str(recording.provenance.kind)
        chosen = [r for r in recording.rows if r.num_splits_asked == 0] if "num_splits_asked" not in fixed else None
        series = _series(chosen if chosen is not None else recording.rows, launch, kind=kind, kv=kv, **fixed)
        for (name, backend), rows in series.items():
            ordered = sorted(rows, key=lambda row: getattr(row, over))
            xs = [getattr(row, over) for row in ordered]
            values.update(xs)
            figure.add_traces(
                [
                    _time_trace(name, backend, origin, xs, ordered),
                    _line(
                        "rate", name, backend, origin, xs, [getattr(row, rate) for row in ordered],
                        xaxis="x2", yaxis="y2", showlegend=False,
                        hovertemplate=f"{name}: %{{y:,.1f}} {_UNITS[rate]}<extra></extra>",
                    ),
                ]
            )  # fmt: skip
    _finish(figure, recordings, over, sorted(values), two=True)
    figure.update_layout(
        yaxis2=_axis(_UNITS[rate]) | {"anchor": "x2", "type": "log"},
        xaxis2=_x_axis(over, sorted(values)) | {"domain": [0.57, 1], "anchor": "y2"},
    )
    return figure


def splits_figure(recordings: Sequence[AttentionRecording], *, batch: int, context: int, **fixed: Any) -> go.Figure:
    """Median time over the number of splits that ran; a level line is what the backend chooses by itself.

    A number that was asked for and could not be given (there is no tile of keys for each) is the largest that ran.
    Traces are named in `meta`: ("time" | "choice", name, kind of number).
    """
    figure = go.Figure()
    values: set[float] = set()
    common = {"kind": "decode", "kv": "rotated", "call": "labkit", "batch": batch, "context": context, **fixed}
    for recording in recordings:
        origin = str(recording.provenance.kind)
        asked = [row for row in recording.rows if row.num_splits_asked]
        for backend in dict.fromkeys(row.backend for row in asked):
            mine = [row for row in recording.rows if row.backend == backend]
            ran: dict[int, AttentionRow] = {}
            for rows in _series(mine, "graph", by_splits=True, **common).values():
                for row in rows:
                    if row.num_splits_asked:
                        ran.setdefault(row.num_splits, row)
            if not ran:
                continue
            ordered = [ran[n] for n in sorted(ran)]
            xs = [row.num_splits for row in ordered]
            values.update(xs)
            figure.add_trace(_time_trace(backend, backend, origin, xs, ordered))
            own = [r for rows in _series(mine, "graph", num_splits_asked=0, **common).values() for r in rows]
            for row in own[:1]:
                figure.add_trace(
                    _line(
                        "choice", f"{backend} by itself: {row.num_splits}", backend, origin, [xs[0], xs[-1]],
                        [row.p50_us] * 2, mode="lines", opacity=0.6,
                        hovertemplate=f"{row.num_splits} splits by itself: %{{y:,.1f}} µs<extra></extra>",
                    )
                )  # fmt: skip
    _finish(figure, recordings, "num_splits", sorted(values), two=False)
    return figure


def relative_figure(
    recordings: Sequence[AttentionRecording],
    over: str,
    base: str,
    *,
    kind: str = "decode",
    kv: str = "rotated",
    launch: str = "graph",
    **fixed: Any,
) -> go.Figure:
    """How many times as long as `base` (a line's name in `calls_figure`) each other line takes, with its interval.

    Each is divided by `base` of its own recording: two machines, or two kinds of numbers, never meet in a ratio.

    Raises:
        ProvenanceError: a recording has lines to compare, and `base` is in another one only.
    """
    if over not in OVER:
        raise ConfigError(f"over={over!r}", "there is no such axis", "Take batch or context.")
    figure = go.Figure()
    values: set[float] = set()
    found = [(r, _series(r.rows, launch, kind=kind, kv=kv, **fixed)) for r in recordings]
    somewhere = any(name == base for _, series in found for name, _ in series)
    for recording, series in found:
        origin = recording.provenance.kind
        below = {getattr(row, over): row for (name, _), rows in series.items() if name == base for row in rows}
        if series and not below and somewhere:
            raise ProvenanceError(
                f"times relative to {base}", f"the numbers of {recording.provenance.label} have no {base} among them",
                "Compare within one recording.",
            )  # fmt: skip
        for (name, backend), rows in series.items():
            pairs = sorted((getattr(row, over), row) for row in rows if name != base and getattr(row, over) in below)
            if not pairs:
                continue
            ratios = [ratio(row.measurement(origin), below[x].measurement(origin)) for x, row in pairs]
            values.update(x for x, _ in pairs)
            figure.add_trace(
                _line(
                    "ratio", name, backend, str(origin), [x for x, _ in pairs], [r.value for r in ratios],
                    error_y=_spread([(r.low, r.value, r.high) for r in ratios]), text=[r.text for r in ratios],
                    hovertemplate=f"{name} / {base}: %{{text}}<extra></extra>",
                )
            )  # fmt: skip
    _finish(figure, recordings, over, sorted(values), two=False)
    figure.update_layout(yaxis={"title": {"text": f"time relative to {base}"}})
    return figure


_UNITS = {"gb_s": "GB/s of KV", "tflop_s": "TFLOP/s"}


def _series(rows: Iterable[AttentionRow], launch: str, by_splits: bool = False, **fixed: Any) -> Series:
    """Rows by (name, backend) that match `fixed`, in the order found; a repeated x keeps the first.

    With `by_splits` the number asked for makes no name of its own.
    """
    every: dict[tuple[str, str], dict[str, list[AttentionRow]]] = {}
    for row in rows:
        if all(getattr(row, field) == value for field, value in fixed.items()):
            name = row.backend if by_splits else row.name
            every.setdefault((name, row.backend), {}).setdefault(row.launch, []).append(row)
    out: Series = {}
    for (name, backend), launches in every.items():
        if launch in launches:
            out[name, backend] = launches[launch]
        elif launch == "graph":
            out[f"{name} (eager)", backend] = launches["eager"]
    return out


def _time_trace(name: str, backend: str, origin: str, xs: Sequence[float], rows: Sequence[AttentionRow]) -> go.Scatter:
    return _line(
        "time", name, backend, origin, xs, [row.p50_us for row in rows],
        error_y=_spread([(row.p10_us, row.p50_us, row.p90_us) for row in rows]),
        customdata=[[row.p10_us, row.p90_us, row.n, row.num_splits] for row in rows],
        hovertemplate=f"{name}: median %{{y:,.1f}} µs, p10–p90 %{{customdata[0]:,.1f}}–%{{customdata[1]:,.1f}}, "
        "n=%{customdata[2]}, %{customdata[3]} split(s)<extra></extra>",
    )  # fmt: skip


def _line(
    what: str, name: str, backend: str, origin: str, xs: Sequence[float], ys: Sequence[float], **more: Any
) -> go.Scatter:
    hue, legend = palette.colour(backend), f"{name} · {origin}"
    bare = ", bare" in name
    style: dict[str, Any] = {
        "mode": "lines+markers",
        "line": {"color": hue, "width": 1 if bare else 2, "dash": palette.backend_dash(backend)},
        # A dot inside says that it is the library's own call.
        "marker": {
            "color": hue,
            "size": 9,
            "symbol": palette.backend_marker(backend, origin) + ("-dot" if bare else ""),
        },
        "legendgroup": legend,
    }
    return go.Scatter(x=list(xs), y=list(ys), name=legend, meta=[what, name, origin], **{**style, **more})


def _spread(points: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    return {
        "type": "data", "symmetric": False, "thickness": 1, "width": 3,
        "array": [high - mid for _, mid, high in points], "arrayminus": [mid - low for low, mid, _ in points],
    }  # fmt: skip


def _finish(figure: go.Figure, recordings: Sequence[AttentionRecording], over: str, xs: list[float], two: bool) -> None:
    label = "<br>".join(dict.fromkeys(r.provenance.label for r in recordings))
    figure.update_layout(
        height=HEIGHT, autosize=True, margin={"l": 62, "r": 14, "t": 60, "b": 84}, template="none",
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", font={"size": 12, "color": palette.NEUTRAL},
        hovermode="closest", legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 11}},
        xaxis=_x_axis(over, xs) | {"domain": [0, 0.44] if two else [0, 1]}, yaxis=_axis("time of a call, µs"),
        annotations=[_note(label, 1, -0.2, "right", 11), *([] if figure.data else [_note("Nothing fits.", 0.5, 0.5)])],
    )  # fmt: skip


def _x_axis(over: str, xs: Sequence[float]) -> dict[str, Any]:
    titles = {"batch": "requests", "context": "tokens of KV of each", "num_splits": "splits"}
    axis = _axis(titles[over]) | {"tickmode": "array", "tickvals": list(xs), "ticktext": [f"{x:,}" for x in xs]}
    if xs:
        axis["range"] = [math.log10(xs[0]) - 0.1, math.log10(xs[-1]) + 0.1]
    return axis


def _axis(title: str) -> dict[str, Any]:
    return {
        "type": "log", "title": {"text": title, "standoff": 8}, "gridcolor": palette.GRID, "zeroline": False,
        "showline": True, "linecolor": palette.NEUTRAL, "tickfont": {"size": 11}, "automargin": True,
    }  # fmt: skip


def _note(text: str, x: float, y: float, anchor: str = "center", size: int = 14) -> dict[str, Any]:
    return {
        "text": text, "x": x, "y": y, "xref": "paper", "yref": "paper", "xanchor": anchor, "showarrow": False,
        "font": {"size": size, "color": palette.NEUTRAL},
    }  # fmt: skip
