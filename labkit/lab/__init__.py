"""What a notebook shows: cards and panels, each one line to call. Refuses to know how an engine works.

Works without torch: panels then show recorded runs. Nothing is imported before it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from labkit.lab.worker import device

if TYPE_CHECKING:
    from labkit.lab.environment import environment_card
    from labkit.lab.latency import LatencyPanel, latency_panel

__all__ = ["LatencyPanel", "device", "environment_card", "latency_panel"]


def __getattr__(name: str) -> Any:
    if name == "environment_card":
        from labkit.lab.environment import environment_card

        return environment_card
    if name in ("LatencyPanel", "latency_panel"):
        from labkit.lab import latency

        return getattr(latency, name)
    raise AttributeError(f"module 'labkit.lab' has no attribute {name!r}")
