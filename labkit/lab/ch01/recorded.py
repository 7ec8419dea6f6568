"""Recorded decode steps as what they waited for, launch by launch. Refuses to make up a step that was not recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.errors import LabkitError
from labkit.lab.fields import Choice, Control, Number
from labkit.lab.runs import Context, Outcome
from labkit.measure.library import Entry, library
from labkit.measure.recordings import Recording, Row
from labkit.measure.spans import StepTimeline
from labkit.simulate.launch_card import KIND_WORDS, LaunchCard, launch_card

WAYS = (("one by one", "NONE"), ("as one graph", "FULL"))


class RecordedSteps:
    """Eager steps with counted launches, each beside the same step in one graph, of one machine.

    Args:
        recordings: of that machine. A card is made of rows of one recording only; the newest that has both answers.
        timelines: what to draw above, where a recording has the timeline of the very step.
    """

    kind = "RECORDED"

    def __init__(self, label: str, recordings: Sequence[Recording], timelines: Sequence[Entry] = ()) -> None:
        self.label = label
        self._timelines = [one for one in timelines if one.provenance.device == recordings[0].provenance.device]
        self._pairs: dict[tuple[str, str, int, int], tuple[Row, Row, Recording]] = {}
        for one in sorted(recordings, key=lambda found: found.provenance.date, reverse=True):
            for row in one.rows:
                full = _partner(one, row) if _is_eager(row) else None
                if full is not None:
                    self._pairs.setdefault((row.model, row.backend, row.context, row.batch), (row, full, one))

    @property
    def keys(self) -> list[tuple[str, str, int, int]]:
        """(model, backend, context, batch) of every step that can be looked up."""
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
            Choice("backend", "Attention", [(name, name) for name in backends], backend,
                   help="The attention backend: another one has other kernels, and another number of them."),
            Number("batch", "Batch", batches[0], batches[-1], batches[0], points=batches,
                   help="Requests per step; the recorded ones."),
            Choice("mode", "Started", WAYS, help="By a launch for each kernel, or by one."),
        ]  # fmt: skip
        if len(contexts) > 1:
            found.insert(2, Choice("context", "Context", [(f"{n} tokens", n) for n in contexts], context,
                                   help="Tokens of each request in the KV cache."))  # fmt: skip
        return found

    def cost(self, values: Mapping[str, Any]) -> str:
        return f"Run looks up one recorded step of the {self.label}. Nothing is loaded or measured."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        lengths = sorted({key[2] for key in self._pairs})
        context = values.get("context") or (lengths[0] if len(lengths) == 1 else None)
        return [
            "Waiting for instructions is measured in pairs: what the same step takes less of the GPU in one graph. "
            "Data is a floor: the bytes of the step at the copy bandwidth that was measured beside it. Everything else "
            "is what the kernels take beyond that floor, and the host before and after them."
            + (f" Every request has {context} tokens of context." if context else "")
        ]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        asked = (values["model"], values["backend"], values.get("context"), values["batch"])
        found = [pair for key, pair in self._pairs.items() if (key[:2], key[3]) == (asked[:2], asked[3])
                 and asked[2] in (None, key[2])]  # fmt: skip
        if not found:
            raise LabkitError(f"a step of {asked}", "it was not recorded", "Choose a recorded batch and context.")
        eager, full, recording = found[0]
        card = launch_card(eager, full, recording.provenance)
        row = eager if values["mode"] == "NONE" else full
        parts, data = _parts(card, row), _launches(card)
        timeline = self._timeline(row)
        if timeline is not None:
            data |= {"timeline": timeline.as_dict(), "finish": [timeline.wall_us] * 2}
        way = dict((mode, words) for words, mode in WAYS)[values["mode"]]
        what = f"{row.model}, batch {row.batch}, {way}"
        numbers = {
            "what": what, "launches": row.launches, "step_us": 1e3 * row.p50_ms,
            "share": 100 * parts["instructions"] / (1e3 * row.p50_ms), "launching_us": row.phases_us.get("launch"),
            "slower": "host" if parts["instructions"] > parts["data"] else "device",
            **{f"{name}_us": us for name, us in parts.items()},
        }  # fmt: skip
        made = recording.provenance
        return Outcome({**data, "what": what, "parts": parts}, numbers, _summary(card, row, parts), made,
                       row.measurement(made.kind), _notes(row, timeline))  # fmt: skip

    def _timeline(self, row: Row) -> StepTimeline | None:
        """The recorded timeline of this very step, if one is there and can be believed."""
        for entry in self._timelines:
            for one in entry.recording.rows:
                same = (one.model, one.backend, one.compile, one.batch, one.context) == (
                    row.model, row.backend, row.compile, row.batch, row.context
                )  # fmt: skip
                if same and one.timeline.mode == row.mode and not one.timeline.problems:
                    return one.timeline  # type: ignore[no-any-return]
        return None


def recorded_sources() -> tuple[list[RecordedSteps], list[str]]:
    """One source per machine for what ships, one per file of the user's own; and a sentence where there is none."""
    found = library()
    steps, timelines = found.of("steps"), found.of("timelines")
    groups: dict[str, list[Recording]] = {}
    for one in steps:
        name = one.provenance.device if one.is_shipped else f"{one.provenance.device} · yours: {one.name}"
        groups.setdefault(name, []).append(one.recording)
    sources = [RecordedSteps(name, recordings, timelines) for name, recordings in groups.items()]
    sources = [source for source in sources if source.keys]
    absent = [] if sources else ["No RECORDED source: no recording has an eager step with launches and its graph."]
    return sources, absent


def _is_eager(row: Row) -> bool:
    counted = row.launch_cost_us and row.launches_by_kind and row.device_us is not None and row.floor_ms is not None
    return bool(counted) and row.mode == "NONE" and row.compile == "NONE" and not row.chunk and row.query_len == 1


def _partner(recording: Recording, row: Row) -> Row | None:
    """The same step in one graph, of the same size and recording."""
    found = recording.find(
        model=row.model, backend=row.backend, batch=row.batch, context=row.context, requested_mode="FULL"
    )
    fits = found is not None and found.mode == "FULL" and found.size == row.batch and found.compile == "NONE"
    return found if fits and found is not None and found.device_us is not None else None


def _parts(card: LaunchCard, row: Row) -> dict[str, float]:
    """The median step in three: what a graph takes away, the floor of its data, and the rest."""
    step, data = 1e3 * row.p50_ms, card.data_us or 0.0
    instructions = (card.instructions_us or 0.0) if row.mode == "NONE" else 0.0
    return {"instructions": instructions, "data": data, "rest": max(0.0, step - data - instructions)}


def _launches(card: LaunchCard) -> dict[str, Any]:
    kinds = list(card.launches)
    return {
        "launch_kinds": [KIND_WORDS.get(kind, kind) for kind in kinds],
        "launch_counts": [card.launches[kind] for kind in kinds],
        "launch_cost_us": [card.cost_us[kind] for kind in kinds],
        "launch_total_us": [card.launches[kind] * card.cost_us[kind] for kind in kinds],
    }


def _summary(card: LaunchCard, row: Row, parts: Mapping[str, float]) -> str:
    step = f"{row.p50_ms:.2f} ms"
    if row.mode == "NONE":
        waits = (
            f"For {parts['instructions'] / 1e3:.2f} ms the GPU waits for instructions"
            if parts["instructions"] > 0
            else "The GPU hardly waits for instructions, since in one graph it takes no less"
        )
        return (
            f"A step of {row.model} at batch {row.batch} takes {step}: the host starts {card.num_launches} kernels one "
            f"by one and needs {card.launching_us / 1e3:.2f} ms for it. {waits}; its data alone would take "
            f"{parts['data'] / 1e3:.2f} ms."
        )
    if not card.instructions_us:
        return (
            f"The same step of {row.model} at batch {row.batch} takes {step} as one graph: {row.launches} launches in "
            f"place of {card.num_launches}, and the GPU is no faster for it: it hardly waited for them."
        )
    return (
        f"The same step of {row.model} at batch {row.batch} takes {step} as one graph: {row.launches} launches in "
        f"place of {card.num_launches}, so the {card.instructions_us / 1e3:.2f} ms of waiting for instructions are "
        "gone."
    )


def _notes(row: Row, timeline: StepTimeline | None) -> tuple[str, ...]:
    notes = []
    if row.mode != "NONE":
        notes.append("The graph is what waiting for instructions is measured against, so that its own part is 0 here.")
    if timeline is None:
        notes.append("No timeline of this step is recorded, so what is drawn above are its launches by kind (eager).")
    return tuple(notes)
