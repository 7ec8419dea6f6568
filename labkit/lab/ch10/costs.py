"""What a decode step costs under each runtime mode: recorded, and simulated. Refuses to fill in a mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.errors import LabkitError
from labkit.lab.ch10.rules import FULL, NONE, PIECEWISE, WAYS
from labkit.lab.fields import Choice, Control, Number
from labkit.lab.runs import Context, Outcome, simulated
from labkit.measure.library import library
from labkit.measure.provenance import Kind, Provenance
from labkit.measure.recordings import Recording, Row
from labkit.models.shapes import SHAPES
from labkit.simulate.step import H200, DecodeModel, simulate_step

MODELS = ("smollm2-135m", "qwen3-0.6b", "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b")
BATCHES = tuple(2**i for i in range(9))
CONTEXT = 512
Key = tuple[str, str, str, int, int]
_OVER = (
    "More than 100 %: in this model a graph's first kernel starts when all of its launch is over, and a small graph is "
    "launched sooner than a large one. No recording has shown or refuted that."
)


class SimulatedModes:
    """A decode step of a model, computed in each mode."""

    kind, label = "SIMULATED", "decode step of a model"

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        return [
            Choice("model", "Model", [(name, name) for name in MODELS], help="Its shape gives kernels and bytes."),
            Number("batch", "Batch", 1, 256, 1, points=BATCHES, help="Requests that get one token each in this step."),
        ]

    def cost(self, values: Mapping[str, Any]) -> str:
        return "Run computes the step in three modes at once; nothing is measured."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        return ["Constants are an H200's. PIECEWISE was never compared with a measurement in this model."]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        shape, batch = SHAPES[values["model"]], int(values["batch"])
        found = {}
        for way in WAYS:
            step = simulate_step(DecodeModel(shape, batch, CONTEXT), mode=way)
            found[way] = step.wall_ms, step.timeline.launches
        made = simulated("decode step", machine=H200.name, shape=shape.name, batch=batch, context=CONTEXT)
        return outcome(f"{shape.name}, batch {batch}", found, made)


class RecordedModes:
    """Decode steps of one machine that were recorded in two modes or three, each set from one recording."""

    kind = "RECORDED"

    def __init__(self, label: str, recordings: Sequence[Recording]) -> None:
        self.label = label
        self._found: dict[Key, tuple[dict[str, Row], Recording]] = {}
        for one in sorted(recordings, key=lambda rec: rec.provenance.date, reverse=True):
            for key, rows in _steps(one).items():
                if len(rows) > 1 and len(rows) > len(self._found.get(key, ({}, one))[0]):
                    self._found[key] = rows, one

    @property
    def keys(self) -> list[Key]:
        """(model, backend, compile, context, batch) of every step that can be looked up."""
        return list(self._found)

    @property
    def has_piecewise(self) -> bool:
        return any(PIECEWISE in rows for rows, _ in self._found.values())

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        found: list[Control] = []
        keys = self.keys
        for place, (name, label, words) in enumerate((
            ("model", "Model", "What was recorded."), ("backend", "Attention", "The attention backend."),
            ("compile", "Compiled", "VLLM_COMPILE is compiled in pieces; NONE is labkit's own kernels."),
            ("context", "Context", "Tokens of each request in the KV cache."),
        )):  # fmt: skip
            offered = list(dict.fromkeys(key[place] for key in keys))
            chosen = values.get(name) if values.get(name) in offered else offered[0]
            keys = [key for key in keys if key[place] == chosen]
            if name in ("model", "backend") or len(offered) > 1:
                found.append(Choice(name, label, [(str(one), one) for one in offered], chosen, help=words))
        batches = tuple(sorted(key[4] for key in keys))
        found.append(Number("batch", "Batch", batches[0], batches[-1], batches[0], points=batches,
                            help="Requests per step."))  # fmt: skip
        return found

    def cost(self, values: Mapping[str, Any]) -> str:
        return f"Run looks up recorded steps of the {self.label}. Nothing is loaded or measured."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        return ["A mode that was not recorded for this step is left out, and the sentence says so."]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        fits = [key for key in self.keys if (key[0], key[1], key[4]) == (
            values["model"], values["backend"], values["batch"]
        ) and values.get("compile") in (None, key[2]) and values.get("context") in (None, key[3])]  # fmt: skip
        if not fits:
            raise LabkitError(f"a step of {dict(values)}", "it was not recorded", "Choose a recorded batch.")
        rows, recording = self._found[fits[0]]
        found = {way: (row.p50_ms, row.launches) for way, row in rows.items()}
        made = recording.provenance
        compiled = ", compiled" if fits[0][2] != "NONE" else ""
        return outcome(f"{fits[0][0]}, {fits[0][1]}{compiled}, batch {fits[0][4]}", found, made)


def outcome(what: str, found: Mapping[str, tuple[float, int | None]], made: Provenance) -> Outcome:
    """A run of the panel: a bar for each mode that is known, and what PIECEWISE has of FULL's gain."""
    ways = [way for way in (FULL, PIECEWISE, NONE) if way in found]
    share = gain_share(found)
    values = {
        "what": what, "share": share,
        **{f"{way.lower()}_ms": found[way][0] if way in found else None for way in WAYS},
        **{f"{way.lower()}_launches": found[way][1] if way in found else None for way in WAYS},
    }  # fmt: skip
    listed = ", ".join(f"{way} {found[way][0]:.2f}" for way in ways)
    missing = [way for way in WAYS if way not in found]
    if share is not None:
        why = f"PIECEWISE has {share:.0f} % of what FULL gains: (NONE − PIECEWISE) / (NONE − FULL)."
    elif missing:
        why = f"{' and '.join(missing)} {'was' if len(missing) == 1 else 'were'} not recorded for this step."
    else:
        why = "FULL gains nothing here, so that there is nothing to take a share of."
    data = {"title": what, "ways": ways, "ms": [found[way][0] for way in ways]}
    notes = (_OVER,) if share is not None and share > 100 and made.kind is Kind.SIMULATED else ()
    return Outcome(data, values, f"{what}: {listed} ms. {why}", made, notes=notes)


def gain_share(found: Mapping[str, tuple[float, int | None]]) -> float | None:
    """Percent of FULL's gain that PIECEWISE has; None where a mode is missing or FULL gains nothing."""
    if not set(WAYS) <= set(found):
        return None
    none, pieces, full = (found[way][0] for way in WAYS)
    return 100 * (none - pieces) / (none - full) if full < none else None


def recorded_sources() -> tuple[list[RecordedModes], list[str]]:
    """One source per machine for what ships, one per file of the user's own; and a sentence on what is not there."""
    groups: dict[str, list[Recording]] = {}
    for one in library().of("steps"):
        name = one.provenance.device if one.is_shipped else f"{one.provenance.device} · yours: {one.name}"
        groups.setdefault(name, []).append(one.recording)
    sources = [source for source in (RecordedModes(name, found) for name, found in groups.items()) if source.keys]
    if not sources:
        return [], ["No RECORDED source: no recording has one step in two modes."]
    if not any(source.has_piecewise for source in sources):
        return sources, ["No recording here has PIECEWISE steps: `labkit record --suite modes` on a GPU makes one."]
    return sources, []


def _steps(recording: Recording) -> dict[Key, dict[str, Row]]:
    out: dict[Key, dict[str, Row]] = {}
    for row in recording.rows:
        if row.chunk or row.query_len != 1 or row.size != row.batch or row.emulated:
            continue
        if row.compile in ("NONE", "VLLM_COMPILE"):
            key = (row.model, row.backend, row.compile, row.context, row.batch)
            out.setdefault(key, {}).setdefault(row.mode, row)
    return out
