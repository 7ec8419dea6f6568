"""Plotly figures from plain data. Refuses to know torch, widgets, or where the numbers come from."""

from labkit.figures.latency import RunPoints, latency_figure, trace_of

__all__ = ["RunPoints", "latency_figure", "trace_of"]
