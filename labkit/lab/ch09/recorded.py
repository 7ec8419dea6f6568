"""Recorded decode steps in up to four forms, of one recording each. Refuses to fill a form that was not recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.errors import LabkitError
from labkit.lab.ch09.matrix import BOTH, COMPILE, EAGER, FORMS, GRAPH, WORDS, Cell, outcome
from labkit.lab.fields import Choice, Control, Number
from labkit.lab.runs import Context, Outcome
from labkit.measure.library import library
from labkit.measure.recordings import Recording, Row

#: (compilation mode, runtime mode) → form. Steps in pieces and torch's own graphs are other forms, and left out.
_FORM_OF = {
    ("NONE", "NONE"): EAGER, ("NONE", "FULL"): GRAPH, ("VLLM_COMPILE", "NONE"): COMPILE, ("VLLM_COMPILE", "FULL"): BOTH,
}  # fmt: skip
Key = tuple[str, str, int, int]


class RecordedForms:
    """Steps of one machine. All cells of a matrix come from one recording: the one that has most of them."""

    kind = "RECORDED"

    def __init__(self, label: str, recordings: Sequence[Recording]) -> None:
        self.label = label
        self._found: dict[Key, tuple[dict[str, Row], Recording]] = {}
        for one in sorted(recordings, key=lambda found: found.provenance.date, reverse=True):
            for key, rows in _matrices(one).items():
                if len(rows) > 1 and len(rows) > len(self._found.get(key, ({}, one))[0]):
                    self._found[key] = rows, one

    @property
    def keys(self) -> list[Key]:
        """(model, backend, context, batch) of every step that can be looked up."""
        return list(self._found)

    @property
    def has_compiled(self) -> bool:
        return any(COMPILE in rows for rows, _ in self._found.values())

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        models = list(dict.fromkeys(key[0] for key in self._found))
        model = values.get("model") if values.get("model") in models else models[0]
        backends = list(dict.fromkeys(key[1] for key in self._found if key[0] == model))
        backend = values.get("backend") if values.get("backend") in backends else backends[0]
        contexts = sorted({key[2] for key in self._found if key[:2] == (model, backend)})
        context = values.get("context") if values.get("context") in contexts else contexts[0]
        batches = tuple(sorted(key[3] for key in self._found if key[:3] == (model, backend, context)))
        found: list[Control] = [
            Choice("model", "Model", [(name, name) for name in models], model, help="What was recorded."),
            Choice("backend", "Attention", [(name, name) for name in backends], backend, help="The attention backend."),
            Number("batch", "Batch", batches[0], batches[-1], batches[0], points=batches, help="Requests per step."),
        ]
        if len(contexts) > 1:
            found.insert(2, Choice("context", "Context", [(f"{n} tokens", n) for n in contexts], context,
                                   help="Tokens of each request in the KV cache."))  # fmt: skip
        return found

    def cost(self, values: Mapping[str, Any]) -> str:
        return f"Run looks up recorded steps of the {self.label}. Nothing is loaded, compiled or measured."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        return ["The eager pass of labkit on a GPU has its norms, rotations and activations fused by hand already."]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        asked = (values["model"], values["backend"], values["batch"])
        key = next((k for k in self._found if (k[0], k[1], k[3]) == asked
                    and values.get("context") in (None, k[2])), None)  # fmt: skip
        if key is None:
            raise LabkitError(f"a step of {asked}", "it was not recorded", "Choose a recorded batch and context.")
        rows, recording = self._found[key]
        cells = {form: Cell(row.p50_ms, row.launches) for form, row in rows.items()}
        missing = [WORDS[form] for form in FORMS if form not in rows]
        notes = []
        if missing:
            notes.append(f"Not recorded on this machine yet: {', '.join(missing)}. Nothing is filled in for it.")
        seconds, note = _compile_seconds(recording, key)
        row = rows[EAGER] if EAGER in rows else next(iter(rows.values()))
        why = f" Recorded with {row.backend}, context {row.context}, n = {row.n}."
        return outcome(
            f"{key[0]}, batch {key[3]}", key[3], cells, recording.provenance, why=why, notes=(*notes, *note),
            more=seconds,
        )  # fmt: skip


def recorded_sources() -> tuple[list[RecordedForms], list[str]]:
    """One source per machine for what ships, one per file of the user's own; and a sentence where there is none."""
    groups: dict[str, list[Recording]] = {}
    for one in library().of("steps"):
        name = one.provenance.device if one.is_shipped else f"{one.provenance.device} · yours: {one.name}"
        groups.setdefault(name, []).append(one.recording)
    sources = [source for source in (RecordedForms(name, found) for name, found in groups.items()) if source.keys]
    absent = [] if sources else ["No RECORDED source: no recording has one step in two forms."]
    if sources and not any(source.has_compiled for source in sources):
        absent = ["No recording here has compiled steps: `labkit record --suite five` on a GPU makes one."]
    return sources, absent


def _matrices(recording: Recording) -> dict[Key, dict[str, Row]]:
    out: dict[Key, dict[str, Row]] = {}
    for row in recording.rows:
        form = _FORM_OF.get((row.compile, row.mode))
        whole = not row.chunk and row.query_len == 1 and row.size == row.batch and not row.emulated
        if form is not None and whole:
            out.setdefault((row.model, row.backend, row.context, row.batch), {}).setdefault(form, row)
    return {key: rows for key, rows in out.items() if EAGER in rows}


def _compile_seconds(recording: Recording, key: Key) -> tuple[dict[str, float], list[str]]:
    """What compiling took on that machine, cold and warm, where it was recorded."""
    out: dict[str, float] = {}
    for setup in recording.setups:
        if (setup.model, setup.backend, setup.compile) == (*key[:2], "VLLM_COMPILE") and setup.compile_ms:
            out.setdefault("warm_s" if setup.from_cache else "cold_s", setup.compile_ms / 1e3)
    words = {"cold_s": "compiled for the first time", "warm_s": "read from the cache"}
    return out, [f"When it was recorded the model was {words[name]} in {s:.1f} s." for name, s in out.items()]
