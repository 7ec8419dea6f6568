"""Plotly figures from plain data. Refuses to know torch, widgets, or where the numbers come from."""

from labkit.figures.attention import calls_figure, relative_figure, splits_figure
from labkit.figures.beside import beside_figure, beside_summary
from labkit.figures.latency import RunPoints, latency_figure, trace_of
from labkit.figures.padding import padding_figure
from labkit.figures.timeline import timeline_figure

__all__ = [
    "RunPoints", "beside_figure", "beside_summary", "calls_figure", "latency_figure", "padding_figure",
    "relative_figure", "splits_figure", "timeline_figure", "trace_of",
]  # fmt: skip
