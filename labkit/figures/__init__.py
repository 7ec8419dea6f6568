"""Plotly figures from plain data. Refuses to know torch, widgets, or where the numbers come from."""

from labkit.figures.attention import calls_figure, relative_figure, splits_figure
from labkit.figures.latency import RunPoints, latency_figure, trace_of

__all__ = ["RunPoints", "calls_figure", "latency_figure", "relative_figure", "splits_figure", "trace_of"]
