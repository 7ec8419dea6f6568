"""The regime map as a grid, and the launch-cost card as bars. Refuses to know where steps and rows come from."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from labkit.figures import palette
from labkit.simulate.launch_card import KIND_WORDS, LaunchCard
from labkit.simulate.regime import REGIMES, RegimeMap

HEIGHT = 460
#: Regime → (letter in the cell, colour, word).
LOOKS = {
    "instructions": ("I", "#E69F00", "instructions (launches)"),
    "kernels": ("K", "#CC99BB", "short kernels (fixed time each)"),
    "host": ("H", "#BBBBBB", "the host around the forward"),
    "data": ("D", "#56B4E9", "data (weights and KV)"),
    "arithmetic": ("A", "#66C2A5", "arithmetic"),
}
#: Cells are pale enough for this on all of them, in both themes.
INK = "#111111"


def regime_figure(found: RegimeMap) -> go.Figure:
    """Models (rows, ascending in size) × batches: each cell coloured and lettered by what the step waits for most.

    Cells are SIMULATED, with the step in ms. Recorded steps lie on top as open markers with their own ms, and are said
    to be RECORDED. The line is where steps stop waiting for instructions. Traces are named in `meta`: ("cells",),
    ("letters",), ("crossing",), ("points",), ("key", regime).
    """
    rows, columns = len(found.models), len(found.batches)
    ids = [[REGIMES.index(found.regime(i, j)) for j in range(columns)] for i in range(rows)]
    top = len(REGIMES) - 1
    # Two stops per colour: bands with no blending between them.
    scale = [[edge, LOOKS[name][1]] for k, name in enumerate(REGIMES) for edge in (k / (top + 1), (k + 1) / (top + 1))]
    hover = [
        [
            f"{found.models[i].name}, batch {found.batches[j]}<br>SIMULATED {found.steps[i][j].wall_ms:.2f} ms<br>"
            f"waits most for {LOOKS[found.regime(i, j)][2]}: {found.share(i, j):.0%}" for j in range(columns)
        ] for i in range(rows)
    ]  # fmt: skip
    figure = go.Figure(layout=_layout(found))
    figure.add_trace(go.Heatmap(
        z=ids, x=list(range(columns)), y=list(range(rows)), zmin=-0.5, zmax=top + 0.5, colorscale=scale,
        showscale=False, xgap=2, ygap=2, text=hover, hovertemplate="%{text}<extra></extra>", meta=["cells"],
        name="SIMULATED",
    ))  # fmt: skip
    cells = [(i, j) for i in range(rows) for j in range(columns)]
    figure.add_trace(go.Scatter(
        x=[j for _, j in cells], y=[i + 0.18 for i, _ in cells], mode="text",
        text=[f"<b>{LOOKS[found.regime(i, j)][0]}</b> {_short(found.steps[i][j].wall_ms)}" for i, j in cells],
        textfont={"size": 11, "color": INK}, hoverinfo="skip", showlegend=False, meta=["letters"], name="SIMULATED ms",
    ))  # fmt: skip
    figure.add_trace(_crossing(found))
    if found.points:
        at = {shape.name: i for i, shape in enumerate(found.models)}
        figure.add_trace(go.Scatter(
            x=[found.batches.index(p.batch) - 0.3 for p in found.points], y=[at[p.model] - 0.25 for p in found.points],
            mode="markers+text", text=[f" {_short(p.ms)}" for p in found.points], textposition="middle right",
            textfont={"size": 10, "color": INK}, marker={"symbol": "diamond-open", "size": 8, "color": INK},
            customdata=[f"{p.model}, batch {p.batch}<br>{p.text}" for p in found.points],
            hovertemplate="%{customdata}<extra></extra>", meta=["points"], name=f"{found.points[0].kind} step, ms",
        ))  # fmt: skip
    used = {found.regime(i, j) for i, j in cells}
    for name in REGIMES:
        if name in used:
            letter, hue, words = LOOKS[name]
            figure.add_trace(go.Scatter(
                x=[None], y=[None], mode="markers", marker={"symbol": "square", "size": 12, "color": hue},
                name=f"{letter}: {words}", meta=["key", name],
            ))  # fmt: skip
    return figure


def _crossing(found: RegimeMap) -> go.Scatter:
    """A staircase between cells, right of the last batch that waits for instructions."""
    x: list[float] = []
    y: list[float] = []
    for i, batch in enumerate(found.crossing()):
        edge = len(found.batches) if batch is None else found.batches.index(batch)
        x += [edge - 0.5, edge - 0.5]
        y += [i - 0.5, i + 0.5]
    return go.Scatter(
        x=x, y=y, mode="lines", line={"color": INK, "width": 3, "dash": "dash"}, hoverinfo="skip", meta=["crossing"],
        name="left of it: instructions",
    )  # fmt: skip


def _short(ms: float) -> str:
    return f"{ms:.2f}" if ms < 1 else f"{ms:.1f}" if ms < 100 else f"{ms:.0f}"


def _layout(found: RegimeMap) -> dict[str, Any]:
    first = found.steps[0][0]
    changed = [f"host × {first.cpu_factor:g}"] if first.cpu_factor != 1 else []
    conditions = ", ".join([f"mode {found.mode}", f"context {first.model.context}",
                            f"{first.machine.copy_gb_s:,.0f} GB/s", *changed])  # fmt: skip
    names = [f"{shape.name}<br>{shape.num_parameters() / 1e9:.2f} B" for shape in found.models]
    return {
        "title": {"text": f"What a decode step waits for most · SIMULATED, {conditions}", "font": {"size": 14}, "x": 0,
                  "xref": "paper"},
        "height": HEIGHT, "autosize": True, "margin": {"l": 110, "r": 12, "t": 110, "b": 56}, "template": "none",
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 12, "color": palette.NEUTRAL},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 11}},
        "xaxis": {"title": {"text": "batch, requests per step"}, "tickmode": "array",
                  "tickvals": list(range(len(found.batches))), "ticktext": [str(b) for b in found.batches],
                  "showgrid": False, "zeroline": False, "range": [-0.5, len(found.batches) - 0.5]},
        "yaxis": {"title": {"text": ""}, "tickmode": "array", "tickvals": list(range(len(names))), "ticktext": names,
                  "showgrid": False, "zeroline": False, "range": [-0.5, len(names) - 0.5]},
    }  # fmt: skip


def launch_figure(card: LaunchCard) -> go.Figure:
    """Left: host µs per launch by kind. Right: milliseconds per step, waiting for instructions and for data.

    Traces are named in `meta`: ("cost",) and ("step",).
    """
    kinds = list(card.cost_us)
    figure = go.Figure()
    figure.add_trace(go.Bar(
        y=[KIND_WORDS.get(kind, kind) for kind in kinds], x=[card.cost_us[kind] for kind in kinds], orientation="h",
        text=[f"{card.cost_us[kind]:.1f} µs" + (f" × {card.launches[kind]}" if kind in card.launches else "")
              for kind in kinds],
        textposition="auto", marker={"color": LOOKS["instructions"][1]}, meta=["cost"], name="one launch",
        hovertemplate="%{y}: %{x:.2f} µs<extra></extra>", showlegend=False,
    ))  # fmt: skip
    bars = [
        ("eager step", card.step_ms, "", "#BBBBBB"),
        ("… host launching", card.launching_us / 1e3, "/", LOOKS["instructions"][1]),
        ("… waiting for instructions", _ms(card.instructions_us), "x", LOOKS["instructions"][1]),
        ("… its data", _ms(card.data_us), ".", LOOKS["data"][1]),
        ("one graph: step", card.full_ms, "", "#BBBBBB"),
        ("… host launching it", _ms(card.full_launching_us), "/", LOOKS["instructions"][1]),
    ]
    shown = [bar for bar in bars if bar[1] is not None][::-1]
    figure.add_trace(go.Bar(
        y=[name for name, *_ in shown], x=[ms for _, ms, *_ in shown], orientation="h", xaxis="x2", yaxis="y2",
        text=[f"{ms:.2f} ms" for _, ms, *_ in shown], textposition="auto", showlegend=False, name="a step",
        meta=["step"],
        marker={"color": [hue for *_, hue in shown], "pattern": {"shape": [shape for _, _, shape, _ in shown]}},
        hovertemplate="%{y}: %{x:.3f} ms<extra></extra>",
    ))  # fmt: skip
    axis = {"gridcolor": palette.GRID, "zeroline": False, "rangemode": "tozero"}
    figure.update_layout(
        title={"text": f"Launch cost · {card.model}, {card.backend}, batch {card.batch}, context {card.context} · "
               f"{card.provenance.label}", "font": {"size": 14}, "x": 0, "xref": "paper"},
        height=340, autosize=True, margin={"l": 10, "r": 12, "t": 60, "b": 50}, template="none",
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", font={"size": 12, "color": palette.NEUTRAL},
        xaxis={**axis, "domain": [0.0, 0.4], "title": {"text": "host time of one launch, µs"}},
        xaxis2={**axis, "domain": [0.66, 1.0], "title": {"text": "time per step, ms"}, "anchor": "y2"},
        yaxis={"automargin": True}, yaxis2={"automargin": True, "anchor": "x2"},
    )  # fmt: skip
    return figure


def _ms(us: float | None) -> float | None:
    return None if us is None else us / 1e3
