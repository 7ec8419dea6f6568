"""What timers read: every run's median and spread, and the newest run's samples in order and as a histogram.

Refuses to know what was timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from labkit.figures import palette
from labkit.figures.points import drawn

#: What else is known of a run's time → (marker, colour, word). Its key in a run is the name.
MARKS = {
    "truth_us": ("x-thin", "#009E73", "the true time, warm"),
    "launching_us": ("triangle-left", "#D55E00", "host clock, stopped after launching"),
    "events_us": ("triangle-right", "#B35FA0", "device events around the forward"),
}
#: The one thing that is timed, and the other one where there are two: key of its samples → marker, colour.
LOOKS = {"samples_us": ("circle", "#2C7FB8"), "samples_b_us": ("diamond", "#D55E00")}
MEDIANS = {"samples_us": ("median_us", "p10_us", "p90_us"), "samples_b_us": ("median_b_us", "p10_b_us", "p90_b_us")}
ROW = 34


@dataclasses.dataclass(frozen=True)
class Timed:
    """One run. values: medians and percentiles by the keys of MEDIANS, and those of MARKS that are known, in µs.

    samples, places: by key of LOOKS; the samples, and when each was taken, from 1.
    names: by the same keys, what a reader calls them; "" for the only one.
    """

    number: int
    label: str
    values: Mapping[str, float]
    samples: Mapping[str, Sequence[float]]
    places: Mapping[str, Sequence[int]]
    names: Mapping[str, str]


def timers_figure(runs: Sequence[Timed], kind: str) -> go.Figure:
    """Above: medians with p10–p90 of all runs, logarithmic where they are far apart. Below: the newest run's samples,
    in order and counted.

    Args:
        kind: LIVE, RECORDED or SIMULATED, of all runs.

    Traces that show numbers have `meta` from `drawn`; keys are those of `Timed`, places are under "place" or "place_b".
    """
    names = [_name(run, key) for run in runs for key in LOOKS if key in run.samples]
    figure = go.Figure(layout=_layout(names, kind, _far_apart(runs)))
    for key, (symbol, colour) in LOOKS.items():
        found = [run for run in runs if key in run.samples]
        if found:
            figure.add_trace(_medians(found, key, symbol, colour))
    for key, (symbol, colour, word) in MARKS.items():
        known = [run for run in runs if run.values.get(key) is not None]
        if known:
            figure.add_trace(go.Scatter(
                x=[run.values[key] for run in known], y=[_name(run, "samples_us") for run in known], mode="markers",
                name=word, meta=drawn([run.number for run in known], x=key),
                marker={"symbol": symbol, "size": 13, "color": colour, "line": {"width": 3, "color": colour}},
                hovertemplate=f"{word}: %{{x:,.1f}} µs<extra></extra>",
            ))  # fmt: skip
    if runs:
        new = runs[-1]
        for key, (symbol, colour) in LOOKS.items():
            if key in new.samples:
                figure.add_traces(_samples(new, key, symbol, colour))
    return figure


def _medians(runs: Sequence[Timed], key: str, symbol: str, colour: str) -> go.Scatter:
    middle, low, high = MEDIANS[key]
    x = [run.values[middle] for run in runs]
    return go.Scatter(
        x=x, y=[_name(run, key) for run in runs], mode="markers+text",
        name="median, with p10 to p90" if key == "samples_us" else "the same, of B",
        meta=drawn([run.number for run in runs], x=middle), text=[f"  {us:,.1f} µs" for us in x],
        textposition="top center", textfont={"size": 11, "color": palette.NEUTRAL},
        marker={"symbol": symbol, "size": 10, "color": colour}, cliponaxis=False,
        error_x={"type": "data", "symmetric": False, "color": colour, "thickness": 2, "width": 5,
                 "array": [run.values[high] - run.values[middle] for run in runs],
                 "arrayminus": [run.values[middle] - run.values[low] for run in runs]},
        hovertemplate="%{y}<br>median %{x:,.2f} µs<extra></extra>",
    )  # fmt: skip


def _samples(run: Timed, key: str, symbol: str, colour: str) -> list[Any]:
    place = "place" if key == "samples_us" else "place_b"
    named = run.names.get(key) or f"run {run.number}"
    return [
        go.Scatter(
            x=list(run.places[key]), y=list(run.samples[key]), mode="markers", xaxis="x2", yaxis="y2", showlegend=False,
            name=named, marker={"symbol": symbol, "size": 6, "color": colour}, meta=drawn(run.number, x=place, y=key),
            hovertemplate=f"{named}, sample %{{x}}: %{{y:,.2f}} µs<extra></extra>",
        ),
        go.Histogram(
            y=list(run.samples[key]), xaxis="x3", yaxis="y2", name=named, showlegend=False, nbinsy=30,
            meta=drawn(run.number, plot="counted", y=key), hovertemplate="%{y} µs: %{x} samples<extra></extra>",
            marker={"color": palette.translucent(colour, 0.75), "line": {"color": colour, "width": 1},
                    "pattern": {"shape": "" if key == "samples_us" else "/", "fgcolor": "#FFFFFF", "size": 6,
                                "solidity": 0.2, "fillmode": "overlay"}},
        ),
    ]  # fmt: skip


def _name(run: Timed, key: str) -> str:
    extra = run.names.get(key, "")
    return f"run {run.number}: {run.label}{', ' + extra if extra else ''}"


def _far_apart(runs: Sequence[Timed]) -> bool:
    """Whether the largest number above is ten times the smallest."""
    keys = [key for group in MEDIANS.values() for key in group] + list(MARKS)
    found = [run.values[key] for run in runs for key in keys if run.values.get(key)]
    return bool(found) and max(found) > 10 * min(found)


def _layout(names: Sequence[str], kind: str, log: bool) -> dict[str, Any]:
    axis = {"zeroline": False, "linecolor": palette.NEUTRAL, "tickfont": {"size": 11}, "automargin": True,
            "gridcolor": palette.GRID}  # fmt: skip
    inner = ROW * max(2, len(names)) + 84 + 210
    low = 210 / inner
    return {
        "title": {"text": f"What the timer reads{' · ' + kind if kind else ''}", "font": {"size": 14}, "x": 0,
                  "xref": "paper"},
        "height": inner + 44 + 86, "autosize": True, "template": "none", "barmode": "overlay",
        "margin": {"l": 150, "r": 30, "t": 44, "b": 86}, "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)", "font": {"size": 12, "color": palette.NEUTRAL}, "hovermode": "closest",
        "xaxis": {**axis, "anchor": "y", "showline": True, **({"type": "log", "dtick": "D2"} if log else {}),
                  "title": {"text": f"time of one, every run, µs{' (logarithmic)' if log else ''}", "standoff": 6}},
        "yaxis": {**axis, "anchor": "x", "domain": [low + 84 / inner, 1.0], "type": "category", "showgrid": False,
                  **({"categoryorder": "array", "categoryarray": list(names), "range": [len(names) - 0.4, -0.8]}
                     if names else {})},
        "xaxis2": {**axis, "anchor": "y2", "domain": [0.0, 0.68], "showline": True,
                   "title": {"text": "sample of the newest run, in order", "standoff": 6}},
        "yaxis2": {**axis, "anchor": "x2", "domain": [0.0, low], "showline": True, "title": {"text": "µs"}},
        "xaxis3": {**axis, "anchor": "y2", "domain": [0.72, 1.0], "showline": True,
                   "title": {"text": "how many", "standoff": 6}},
        "legend": {"orientation": "h", "x": 0, "y": 0, "yanchor": "bottom", "yref": "container", "font": {"size": 11}},
    }  # fmt: skip
