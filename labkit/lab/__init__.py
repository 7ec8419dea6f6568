"""What a notebook shows: cards and panels, each one line to call. Refuses to know how an engine works.

Works without torch: panels then show recorded runs. Nothing is imported before it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from labkit.lab.worker import device

if TYPE_CHECKING:
    from labkit.lab.environment import environment_card
    from labkit.lab.exercises import hint, solution
    from labkit.lab.glossary import glossary, term
    from labkit.lab.latency import LatencyPanel, latency_panel
    from labkit.lab.plugged_run import run_plugged
    from labkit.lab.plugging import plug

__all__ = [
    "LatencyPanel", "device", "environment_card", "glossary", "hint", "latency_panel", "plug", "run_plugged",
    "solution", "term",
]  # fmt: skip

#: Name → the module that has it; imported when it is asked for.
_PLACES = {
    "glossary": "glossary", "hint": "exercises", "plug": "plugging", "run_plugged": "plugged_run",
    "solution": "exercises", "term": "glossary",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "environment_card":
        from labkit.lab.environment import environment_card

        return environment_card
    if name in ("LatencyPanel", "latency_panel"):
        from labkit.lab import latency

        return getattr(latency, name)
    if name in _PLACES:
        import importlib

        return getattr(importlib.import_module(f"labkit.lab.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'labkit.lab' has no attribute {name!r}")
