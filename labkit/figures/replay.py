"""How a stream of batches runs: the pieces of a pass, the tape of its steps, the tree of the decision.

Refuses to know a rule. Shapes and words repeat what colours say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from labkit.figures import palette
from labkit.figures.points import drawn

#: Kind of a piece → (colour, pattern, sign, words).
PIECES = {
    1: ("#2C7FB8", "/", "①", "① before the first attention"), 2: ("#009E73", "", "②", "② between two attentions"),
    3: ("#B35FA0", "\\", "③", "③ after the last attention"), 0: ("#777777", "", "", "the whole pass, one piece"),
}  # fmt: skip
ATTENTION = ("#D55E00", "x", "attention: not in a piece")
#: How a step ran → (colour, pattern, words).
WAYS = {
    "FULL": ("#009E73", "", "FULL: one graph for the step"),
    "PIECEWISE": ("#2C7FB8", "/", "PIECES: a graph each, attention between them"),
    "NONE": ("#D55E00", ".", "eager: every kernel by itself"),
}  # fmt: skip
#: Places of the tree: (x, y, text).
_QUESTIONS = (
    (0.0, 1.05, "Does every request<br>decode?"), (1.0, 1.5, "a decode graph for<br>so many tokens?"),
    (2.1, 0.65, "a graph for mixed batches<br>with so many tokens?"),
)  # fmt: skip
_LINES = (
    (0, 1, "yes"), (0, 2, "no"), (1, 2, "no"), (1, (3.1, 1.55), "yes"), (2, (3.1, 0.95), "yes"), (2, (3.1, 0.35), "no"),
)  # fmt: skip
#: Half the width of each question's box.
_HALF = (0.32, 0.32, 0.42)
_LEAVES = ((3.1, 1.55), (3.1, 0.95), (3.1, 0.35))


@dataclasses.dataclass(frozen=True)
class Tape:
    """A run's stream. data: its lists, see `labkit.lab.ch10.rules.drawn_data`. mixed: what a graph for mixed batches
    is called in this mode, "" for none.
    """

    number: int
    kind: str
    data: Mapping[str, Any]
    mixed: str


def tape_figure(tape: Tape | None) -> go.Figure:
    """The pass in pieces, a bar of launches for each step, and the tree with the number of steps at each leaf."""
    figure = go.Figure(layout=_layout())
    if tape is None:
        return figure
    _pieces(figure, tape)
    _steps(figure, tape)
    _tree(figure, tape)
    became = "" if tape.data["mode"] in tape.data["title"].split(", ") else f" → {tape.data['mode']}"
    figure.update_layout(
        title={"text": f"{tape.data['title']}{became} · {tape.kind}", "font": {"size": 14}, "x": 0,
               "xref": "paper", "y": 0.985, "yanchor": "top"},
        xaxis2={"categoryorder": "array", "categoryarray": list(tape.data["labels"])},
    )  # fmt: skip
    return figure


def _pieces(figure: go.Figure, tape: Tape) -> None:
    ends = tape.data["attention_at"]
    few = len(ends) <= 12
    for kind, (colour, pattern, sign, words) in PIECES.items():
        at = tape.data[f"kind{kind}_at"]
        if at:
            figure.add_trace(
                _blocks(tape.number, f"kind{kind}_at", at, 1.0, colour, pattern, words, sign if few else "")
            )
    if ends:
        colour, pattern, words = ATTENTION
        figure.add_trace(_blocks(tape.number, "attention_at", ends, 0.5, colour, pattern, words, ""))


def _blocks(
    number: int, key: str, at: Sequence[float], width: float, colour: str, pattern: str, words: str, sign: str
) -> go.Bar:
    return go.Bar(
        orientation="h", base=list(at), x=[width] * len(at), y=["pass"] * len(at), name=words, xaxis="x", yaxis="y",
        meta=drawn(number, base=key), text=[sign] * len(at), textposition="inside", insidetextanchor="middle",
        textangle=0, hovertemplate=f"{words}<extra></extra>", marker=_marker(colour, pattern), legendgroup=words,
    )  # fmt: skip


def _steps(figure: go.Figure, tape: Tape) -> None:
    for way, (colour, pattern, words) in WAYS.items():
        x, y = tape.data[f"{way}_x"], tape.data[f"{way}_y"]
        if x:
            figure.add_trace(go.Bar(
                x=list(x), y=list(y), text=list(tape.data[f"{way}_text"]), textposition="outside", cliponaxis=False,
                name=words, xaxis="x2", yaxis="y2", textangle=0, constraintext="none", marker=_marker(colour, pattern),
                meta=drawn(tape.number, x=f"{way}_x", y=f"{way}_y", text=f"{way}_text"),
                hovertemplate=f"%{{x}}<br>{words}<br>%{{y}} launches<extra></extra>",
            ))  # fmt: skip
    top = max((n for way in WAYS for n in tape.data[f"{way}_y"]), default=1)
    figure.update_layout(yaxis2={"range": [0, len(str(top)) + 0.6]})


def _tree(figure: go.Figure, tape: Tape) -> None:
    counts = tape.data["leaf_counts"]
    asked = (sum(counts), counts[0], sum(counts))
    for start, end, word in _LINES:
        x0, y0 = _QUESTIONS[start][:2]
        x1, y1 = _QUESTIONS[end][:2] if isinstance(end, int) else end
        x0, x1 = (
            x0 + _HALF[start],
            x1 - (_HALF[end] if isinstance(end, int) else 0.06),
        )  # from the edge of one box to the next
        used = asked[start] and (isinstance(end, int) or counts[_LEAVES.index(end)])
        figure.add_trace(go.Scatter(
            x=[x0, x1], y=[y0, y1], mode="lines", xaxis="x3", yaxis="y3", hoverinfo="skip", showlegend=False,
            line={"color": palette.NEUTRAL, "width": 3 if used else 1, "dash": "solid" if used else "dot"},
        ))  # fmt: skip
        figure.add_annotation(text=word, x=x0 + 0.5 * (x1 - x0), y=y0 + 0.5 * (y1 - y0), xref="x3", yref="y3",
                              showarrow=False, yshift=9, font={"size": 11})  # fmt: skip
    for x, y, text in _QUESTIONS:
        figure.add_annotation(text=text, x=x, y=y, xref="x3", yref="y3", showarrow=False, font={"size": 12},
                              bgcolor="rgba(128,128,128,0.25)", borderpad=4)  # fmt: skip
    names = ("FULL", tape.mixed or "no such graph", "eager")
    ways = ("FULL", tape.mixed or "NONE", "NONE")
    figure.add_trace(go.Scatter(
        x=[x for x, _ in _LEAVES], y=[y for _, y in _LEAVES], mode="markers+text", xaxis="x3", yaxis="y3",
        text=[f"  {name}: {n} step{'' if n == 1 else 's'}" for name, n in zip(names, counts, strict=True)],
        textposition="middle right", showlegend=False, customdata=list(counts), cliponaxis=False,
        meta=drawn(tape.number, customdata="leaf_counts"), hovertemplate="%{customdata} steps<extra></extra>",
        marker={"size": [20 if n else 11 for n in counts], "color": [WAYS[way][0] for way in ways],
                "symbol": ["square", "diamond", "circle-open"]}, name="leaves",
    ))  # fmt: skip


def _marker(colour: str, pattern: str) -> dict[str, Any]:
    shape = {"shape": pattern, "fgcolor": "#FFFFFF", "size": 6, "solidity": 0.16, "fillmode": "overlay"}
    return {"color": colour, "pattern": shape, "line": {"width": 0}}


def _layout() -> go.Layout:
    bare = {"showgrid": False, "zeroline": False, "showticklabels": False, "showline": False, "ticks": "", "title": ""}
    return go.Layout(
        height=640, barmode="overlay", margin={"t": 36, "b": 20}, bargap=0.25,
        xaxis={**bare, "anchor": "y"}, yaxis={**bare, "domain": [0.86, 0.93], "anchor": "x"},
        xaxis2={"anchor": "y2", "title": {"text": "step: its batch (d decodes, p prompt tokens)"}},
        yaxis2={"domain": [0.46, 0.8], "anchor": "x2", "type": "log", "title": {"text": "launches (log)"}},
        xaxis3={**bare, "anchor": "y3", "range": [-0.5, 4.3]}, yaxis3={**bare, "domain": [0.1, 0.34], "anchor": "x3",
                                                                      "range": [0.1, 1.8]},
        legend={"orientation": "h", "y": 0.05, "yanchor": "top", "x": 0},
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ModeBars:
    """A step under each mode. ways: NONE, PIECEWISE, FULL as far as known; ms and launches beside them."""

    number: int
    label: str
    ways: Sequence[str]
    ms: Sequence[float]


def cost_figure(bars: Sequence[ModeBars], kind: str) -> go.Figure:
    """Milliseconds of one step under each mode, a group of bars for each run."""
    figure = go.Figure()
    for i, one in enumerate(bars):
        figure.add_trace(go.Bar(
            orientation="h", y=list(one.ways), x=list(one.ms), name=f"run {one.number}: {one.label}",
            text=[f"{ms:.2f}" for ms in one.ms], textposition="outside", cliponaxis=False, textangle=0,
            meta=drawn(one.number, y="ways", x="ms"), hovertemplate="%{y}: %{x:.2f} ms<extra></extra>",
            marker=_marker(palette.SERIES[i % 5], ("", "/", "x", ".", "\\")[i % 5]),
        ))  # fmt: skip
    said = f"One decode step under each mode · {kind}" if kind else "One decode step under each mode"
    figure.update_layout(
        title={"text": said, "font": {"size": 14}, "x": 0, "xref": "paper"}, height=330, barmode="group",
        xaxis={"title": {"text": "time per step, ms"}, "rangemode": "tozero"}, margin={"t": 70},
        yaxis={"autorange": "reversed", "categoryorder": "array", "categoryarray": ["FULL", "PIECEWISE", "NONE"]},
        showlegend=True, legend={"y": 1.02, "yanchor": "bottom"},
    )  # fmt: skip
    return figure
