"""The SIMULATED source of chapter 08: the engine's own rule, counted over a histogram. Refuses to guess a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.lab.ch08.lists import TYPED, list_controls, sizes_of, traffic_controls, traffic_of
from labkit.lab.ch08.outcome import outcome
from labkit.lab.fields import Control
from labkit.lab.runs import Context, Outcome, simulated

PRESETS = ("chat", "bursty", "mixed")


class RuleSource:
    """Steps of some traffic and the size that each runs in; the rule is the one that the engine calls."""

    kind, label = "SIMULATED", "padding rule"

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        return [*list_controls(values), *traffic_controls(values, PRESETS)]

    def cost(self, values: Mapping[str, Any]) -> str:
        return "Run counts at once; nothing is captured."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        traffic = traffic_of(values)
        steps = sum(traffic.values())
        mean = sum(n * count for n, count in traffic.items()) / steps
        said = "as typed" if values["traffic"] == TYPED else "computed, and recorded from no service"
        return [f"{steps:,} steps of {min(traffic)} to {max(traffic)} tokens, {mean:.0f} on average; {said}."]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        traffic = traffic_of(values)
        sizes = sizes_of(values, traffic)
        made = simulated("padding rule", list=values["list"], sizes=len(sizes), traffic=values["traffic"])
        note = "What capturing takes in seconds and MiB follows from no rule: see RECORDED and LIVE."
        return outcome(values["list"], values["traffic"], traffic, sizes, made, notes=(note,))
