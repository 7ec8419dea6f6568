"""Lists of sizes over recorded decode steps of one machine: what a step of some traffic costs under each.

Only sizes that were recorded are offered, and nothing is made up in between. What capturing took is shown where a
recording has it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.graphs.sizes import pad_to
from labkit.lab.ch08.lists import ADVICE, CUSTOM, DEFAULT, POWERS, advised, some_sizes, traffic_controls, traffic_of
from labkit.lab.ch08.outcome import outcome
from labkit.lab.fields import Choice, Control, Number, Text
from labkit.lab.runs import Context, Outcome
from labkit.measure.library import library
from labkit.measure.recordings import Captured, Recording, Row

#: Decodes alone: what the recorded graphs are for.
PRESETS = ("chat", "bursty")
#: Modes whose graphs of decodes are the same.
ALIKE = ("FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
NO_CAPTURES = "What capturing these graphs took, in seconds and MiB, is not in this recording."


class RecordedSizes:
    """Decode steps of one machine in graphs of many sizes, all of one recording."""

    kind = "RECORDED"

    def __init__(self, label: str, recordings: Sequence[Recording]) -> None:
        self.label = label
        self._captures = [one for rec in recordings for one in rec.captures]
        self._steps: dict[tuple[str, str], tuple[dict[int, Row], dict[int, Row], Recording]] = {}
        for rec in sorted(recordings, key=lambda one: one.provenance.date, reverse=True):
            for model, backend in dict.fromkeys((row.model, row.backend) for row in rec.rows):
                graphs, eager = _of(rec, model, backend)
                known = self._steps.get((model, backend))
                if (len(graphs), len(eager)) > ((len(known[0]), len(known[1])) if known else (3, len(eager))):
                    self._steps[model, backend] = graphs, eager, rec

    @property
    def keys(self) -> list[tuple[str, str]]:
        """(model, backend) with steps in more than three sizes."""
        return list(self._steps)

    def recorded(self, model: str, backend: str) -> list[int]:
        """Sizes of which a step in a graph was recorded, ascending."""
        return sorted(self._steps[model, backend][0])

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        models = list(dict.fromkeys(model for model, _ in self._steps))
        model = next((name for name in models if name == values.get("model")), models[0])
        backends = [backend for of, backend in self._steps if of == model]
        backend = next((name for name in backends if name == values.get("backend")), backends[0])
        sizes = self.recorded(model, backend)
        options = [(f"all {len(sizes)} recorded", DEFAULT), ("powers of two", POWERS), ("the advisor's", ADVICE),
                   ("typed", CUSTOM)]  # fmt: skip
        chosen = values.get("list") if values.get("list") in (DEFAULT, POWERS, ADVICE, CUSTOM) else DEFAULT
        found: list[Control] = [
            Choice("model", "Model", [(name, name) for name in models], model, help="What was recorded."),
            Choice("backend", "Attention", [(name, name) for name in backends], backend, help="The attention backend."),
            Choice("list", "Sizes", options, chosen, help="Where the list of capture sizes is from."),
        ]
        if chosen == ADVICE:
            found.append(Number("k", "How many", 1, 32, 8,
                                help="The advisor's list, each size moved up to a recorded one."))  # fmt: skip
        if chosen == CUSTOM:
            found.append(Text("recorded_sizes", "Typed", "8, 32, 128", functools.partial(some_sizes, most=sizes[-1]),
                              help="Each is moved up to a recorded size."))  # fmt: skip
        return [*found, *traffic_controls(values, PRESETS)]

    def cost(self, values: Mapping[str, Any]) -> str:
        return f"Run looks up recorded steps of the {self.label}. Nothing is captured."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        traffic = traffic_of(values)
        return [f"Decode steps only, {sum(traffic.values()):,} of them; a graph takes the time of its size."]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        graphs, eager, rec = self._steps[values["model"], values["backend"]]
        traffic, recorded = traffic_of(values), sorted(graphs)
        wanted = self._wanted(values, traffic, recorded)
        sizes = sorted({size for one in wanted if (size := pad_to(one, recorded)) is not None})
        notes = []
        if sizes != sorted(set(wanted)):
            notes.append("Sizes that were not recorded were moved up to the next recorded one.")
        ms, missing = 0.0, 0
        for n, count in traffic.items():
            size = pad_to(n, sizes)
            row = eager.get(n) if size is None else graphs[size]
            if row is None:
                missing += count
            else:
                ms += count * row.p50_ms
        mean = None if missing else ms / sum(traffic.values())
        if missing:
            notes.append(f"No mean time: {missing:,} steps would be eager at batches that were not recorded.")
        took = self._captured(values["model"], values["backend"], sizes)
        notes += [] if took else [NO_CAPTURES]
        why = "" if mean is None else f"Such a step takes {mean:.3f} ms on average (medians of recorded steps)."
        return outcome(
            values["list"], values["traffic"], traffic, sizes, rec.provenance, step_ms=mean,
            capture_s=sum(one.ms for one in took) / 1e3 if took else None,
            mib=sum(one.mib for one in took) if took else None,
            samples=() if mean is None else (mean,), why=why, notes=notes,
        )  # fmt: skip

    def _wanted(self, values: Mapping[str, Any], traffic: Mapping[int, int], recorded: list[int]) -> list[int]:
        if values["list"] == CUSTOM:
            return list(values["recorded_sizes"])
        if values["list"] == POWERS:
            return [size for size in recorded if size & (size - 1) == 0]
        if values["list"] == ADVICE:
            return list(advised(tuple(traffic.items()), int(values["k"]), recorded[-1]).sizes)
        return recorded

    def _captured(self, model: str, backend: str, sizes: Sequence[int]) -> list[Captured]:
        """What capturing each of these sizes took, nothing unless all of them are recorded under one mode."""
        for mode in (*ALIKE, "FULL"):
            known = {
                one.size: one for one in self._captures
                if (one.model, one.backend, one.compile, one.requested_mode, one.mode)
                == (model, backend, "NONE", mode, "FULL")
            }  # fmt: skip
            if all(size in known for size in sizes):
                return [known[size] for size in sizes]
        return []


def recorded_sources() -> tuple[list[RecordedSizes], list[str]]:
    """One source per machine for what ships, one per file of the user's own; and a sentence where there is none."""
    groups: dict[str, list[Recording]] = {}
    for one in library().of("steps"):
        name = one.provenance.device if one.is_shipped else f"{one.provenance.device} · yours: {one.name}"
        groups.setdefault(name, []).append(one.recording)
    sources = [RecordedSizes(name, recordings) for name, recordings in groups.items()]
    sources = [source for source in sources if source.keys]
    return sources, [] if sources else ["No RECORDED source: no recording has decode steps in several sizes."]


def _of(rec: Recording, model: str, backend: str) -> tuple[dict[int, Row], dict[int, Row]]:
    """Steps in a graph by size and eager ones by batch, at the context that has most sizes, then most batches."""
    rows = [row for row in rec.rows if (row.model, row.backend, row.compile, row.chunk, row.query_len)
            == (model, backend, "NONE", 0, 1)]  # fmt: skip
    contexts = sorted({row.context for row in rows})
    best: tuple[dict[int, Row], dict[int, Row]] = ({}, {})
    for context in contexts:
        here = [row for row in rows if row.context == context]
        graphs = {row.size: row for row in here if row.mode == "FULL" and row.size == row.batch}
        found = graphs, {row.batch: row for row in here if row.mode == "NONE"}
        best = max(best, found, key=lambda pair: (len(pair[0]), len(pair[1])))
    return best
