"""Recorded steps without and with their graph, of one machine. Refuses to make up a step or what a capture took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.errors import LabkitError
from labkit.lab.ch07.pair import Step, outcome
from labkit.lab.fields import Choice, Control, Number
from labkit.lab.runs import Context, Outcome
from labkit.measure.library import Entry, library
from labkit.measure.recordings import Captured, Recording, Row
from labkit.measure.spans import StepTimeline

#: model, backend, context, batch.
Key = tuple[str, str, int, int]


class RecordedPairs:
    """Eager steps beside the same step in one graph, of one machine.

    Args:
        recordings: of that machine; both steps of a pair are of one recording, the newest that has both.
        timelines: entries of that table, of any machine.
    """

    kind = "RECORDED"

    def __init__(self, label: str, recordings: Sequence[Recording], timelines: Sequence[Entry] = ()) -> None:
        self.label = label
        self.device = recordings[0].provenance.device
        self._timelines = [one for one in timelines if one.provenance.device == self.device]
        self._captures = [one for rec in recordings for one in rec.captures]
        self._pairs: dict[Key, tuple[Row, Row, Recording]] = {}
        for rec in sorted(recordings, key=lambda one: one.provenance.date, reverse=True):
            for row in rec.rows:
                full = _partner(rec, row)
                if full is not None:
                    self._pairs.setdefault((row.model, row.backend, row.context, row.batch), (row, full, rec))

    @property
    def keys(self) -> list[Key]:
        """Every step that can be looked up."""
        return list(self._pairs)

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        models = list(dict.fromkeys(key[0] for key in self._pairs))
        model = values.get("model") if values.get("model") in models else models[0]
        backends = list(dict.fromkeys(key[1] for key in self._pairs if key[0] == model))
        backend = values.get("backend") if values.get("backend") in backends else backends[0]
        contexts = sorted({key[2] for key in self._pairs if key[:2] == (model, backend)})
        context = values.get("context") if values.get("context") in contexts else contexts[0]
        batches = tuple(sorted(key[3] for key in self._pairs if key[:3] == (model, backend, context)))
        found: list[Control] = [
            Choice("model", "Model", [(name, name) for name in models], model, help="A recorded model."),
            Choice("backend", "Attention", [(name, name) for name in backends], backend, help="The attention backend."),
            Number("batch", "Batch", batches[0], batches[-1], batches[0], points=batches,
                   help="Requests per step; the recorded ones."),
        ]  # fmt: skip
        if len(contexts) > 1:
            found.append(Choice("context", "Context", [(f"{n} tokens", n) for n in contexts], context,
                                help="Tokens of each request in the KV cache."))  # fmt: skip
        return found

    def cost(self, values: Mapping[str, Any]) -> str:
        return f"Run looks up two recorded steps of the {self.label}. Nothing is loaded or measured."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        lengths = sorted({key[2] for key in self._pairs})
        context = values.get("context") or (lengths[0] if len(lengths) == 1 else None)
        length = f" ({context} tokens for each request)" if context else ""
        return [f"Both steps are of one recording: the same model, batch and context{length}, mode NONE and mode FULL."]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        found = [
            pair for key, pair in self._pairs.items()
            if (key[0], key[1], key[3]) == (values["model"], values["backend"], values["batch"])
            and values.get("context") in (None, key[2])
        ]  # fmt: skip
        if not found:
            what = f"{values['model']}, {values['backend']}, batch {values['batch']}"
            raise LabkitError(what, "it was not recorded", "Choose a recorded batch.")
        eager, full, rec = found[0]
        took = self._capture_of(full)
        timelines = self._timeline(eager), self._timeline(full)
        host = [row.phases_us.get("launch", 0.0) / 1e3 for row in (eager, full)]
        why = (
            f"Launching the forward pass takes the host {host[0]:.2f} ms before and {host[1]:.2f} ms now, whatever the "
            "kernels do."
        )
        if (full.launches or 0) > full.graph_launches:
            why += " The launches beside the graph are the LM head and the choice of tokens, which no graph took in."
        notes = []
        if None in timelines:
            notes.append(
                "No timelines of these two steps are recorded, so what is drawn are the host's phases (medians)."
            )
        return outcome(
            f"{eager.model}, {eager.backend}, batch {eager.batch}", _measured(eager, timelines[0]),
            _measured(full, timelines[1]), took, rec.provenance, why, notes=notes,
        )  # fmt: skip

    def _capture_of(self, row: Row) -> float | None:
        """Milliseconds that capturing this step's graph took, where a recording has it."""
        found = [one for one in self._captures if _is_of(one, row)]
        found.sort(key=lambda one: one.requested_mode != row.requested_mode)
        return found[0].ms if found else None

    def _timeline(self, row: Row) -> StepTimeline | None:
        for entry in self._timelines:
            for one in entry.recording.rows:
                same = (one.model, one.backend, one.compile, one.batch, one.context) == (
                    row.model, row.backend, row.compile, row.batch, row.context
                )  # fmt: skip
                timeline: StepTimeline = one.timeline
                if same and timeline.mode == row.mode and not timeline.problems:
                    return timeline
        return None


def recorded_sources() -> tuple[list[RecordedPairs], list[str]]:
    """One source per machine for what ships, one per file of the user's own; and a sentence where there is none."""
    found = library()
    groups: dict[str, list[Recording]] = {}
    for one in found.of("steps"):
        name = one.provenance.device if one.is_shipped else f"{one.provenance.device} · yours: {one.name}"
        groups.setdefault(name, []).append(one.recording)
    sources = [RecordedPairs(name, recordings, found.of("timelines")) for name, recordings in groups.items()]
    sources = [source for source in sources if source.keys]
    return sources, [] if sources else ["No RECORDED source: no recording has an eager step and its graph."]


def _is_of(one: Captured, row: Row) -> bool:
    return (one.model, one.backend, one.compile, one.mode, one.size) == (
        row.model, row.backend, row.compile, row.mode, row.size
    )  # fmt: skip


def _partner(rec: Recording, row: Row) -> Row | None:
    """The same step in one graph, of the same size and recording."""
    if row.mode != "NONE" or row.compile != "NONE" or row.chunk or row.query_len != 1:
        return None
    found = rec.find(model=row.model, backend=row.backend, batch=row.batch, context=row.context, requested_mode="FULL")
    return found if found is not None and found.mode == "FULL" and found.size == row.batch else None


def _measured(row: Row, timeline: StepTimeline | None) -> Step:
    return Step(row.p50_ms, row.samples_ms, row.launches, row.phases_us, timeline)
