"""Clocks, statistics, launches, limits, provenance, recordings. Refuses to know the engine, figures and widgets.

Everything here imports without torch; what needs a device imports torch inside the function that needs it.
"""
