"""The RECORDED bill: steps, and what getting ready took, of one machine. Refuses to fill in what nobody recorded.

A recording of steps alone has no start-up; one of captures alone has no steps. Where both are there they must be of the
same recording: two starts on two days are no row of one bill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.config import CUDAGraphMode
from labkit.errors import LabkitError
from labkit.lab.ch11.outcome import outcome
from labkit.lab.fields import Choice, Control, Number
from labkit.lab.runs import Context, Outcome
from labkit.measure.library import Entry, library
from labkit.measure.recordings import Recording, Row, Setup

NO_STARTUP = (
    "The recordings here have no start-up times (a recording of labkit's suite `modes`, `five` or `latency` brings "
    "them); RECORDED shows steps and places to look alone."
)
ABSENT = "No RECORDED source: no recording of steps is here."


class RecordedBill:
    """One recording of decode steps, with its setups where it has them."""

    kind = "RECORDED"

    def __init__(self, recording: Recording, label: str) -> None:
        self.label, self._recording = label, recording
        self.rows = [row for row in recording.rows if row.query_len == 1 and not row.chunk and not row.emulated]
        found = [setup for row in self.rows if (setup := self.setup(row)) is not None]
        self.has_startup, self.graphs = bool(found), max((setup.graphs for setup in found), default=0)

    def setup(self, row: Row) -> Setup | None:
        """What getting ready for this row's configuration took; nothing is prepared for an eager, uncompiled step."""
        return next(
            (s for s in self._recording.setups
             if s.key == (row.model, row.backend, row.compile, row.requested_mode)), None,
        )  # fmt: skip

    def _values(self, field: str, **fixed: Any) -> list[Any]:
        found = {getattr(r, field) for r in self.rows if all(getattr(r, k) == v for k, v in fixed.items())}
        return sorted(found)

    def _ways(self, **fixed: Any) -> list[tuple[str, str]]:
        found = {(r.requested_mode, r.compile) for r in self.rows if all(getattr(r, k) == v for k, v in fixed.items())}
        order = [mode.name for mode in CUDAGraphMode]
        ordered = sorted(found, key=lambda way: (way[1] != "NONE", order.index(way[0])))
        return [(_said(*way), "/".join(way)) for way in ordered]

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        models = list(dict.fromkeys(row.model for row in self.rows))
        model = values.get("model") if values.get("model") in models else models[0]
        backends = list(dict.fromkeys(row.backend for row in self.rows if row.model == model))
        backend = values.get("backend") if values.get("backend") in backends else backends[0]
        contexts = self._values("context", model=model, backend=backend)
        context = values.get("context") if values.get("context") in contexts else contexts[0]
        fixed = {"model": model, "backend": backend, "context": context}
        ways = self._ways(**fixed)
        way = next((key for _, key in ways if key == values.get("way")), ways[0][1])
        mode, compile = way.split("/")
        batches = self._values("batch", **fixed, requested_mode=mode, compile=compile)
        found: list[Control] = [
            Choice("way", "Configuration", ways, way, help="Graph mode and compilation that were recorded."),
            Choice("model", "Model", [(name, name) for name in models], model, help="What was recorded."),
            Choice("backend", "Attention", [(name, name) for name in backends], backend, help="The backend."),
            Number("batch", "Batch", batches[0], batches[-1], batches[0], points=batches, help="Requests per step."),
            Number("tokens", "Tokens a request", 10, 2000, 200, step=10, help="That each request generates."),
        ]
        if len(contexts) > 1:
            found.insert(3, Choice("context", "Context", [(f"{n} tokens", n) for n in contexts], context,
                                   help="Tokens of each request in the KV cache."))  # fmt: skip
        return found if self.has_startup else [one for one in found if one.name != "tokens"]

    def cost(self, values: Mapping[str, Any]) -> str:
        return f"Run looks up one recorded configuration of the {self.label}. Nothing is loaded or measured."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        if not self.has_startup:
            return ["This recording has no start-up times, so these bars stay empty."]
        return ["Start-up is compiling and capturing as recorded; loading the weights is not in it."]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        mode, compile = values["way"].split("/")
        asked = {"model": values["model"], "backend": values["backend"], "requested_mode": mode, "compile": compile,
                 "batch": values["batch"]}  # fmt: skip
        rows = [r for r in self.rows if all(getattr(r, key) == value for key, value in asked.items())
                and values.get("context") in (None, r.context)]  # fmt: skip
        if not rows:
            raise LabkitError(f"a step of {asked}", "it was not recorded", "Choose a recorded batch.")
        row, parts = rows[0], {}
        setup, startup, mib = self.setup(row), None, None
        if setup is not None:
            parts = {"compile": setup.compile_ms / 1e3, "capture": setup.capture_ms / 1e3}
            startup, mib = sum(parts.values()), setup.graph_mib
        elif row.requested_mode == "NONE" and row.compile == "NONE":
            startup, mib = (0.0, 0.0) if self.has_startup else (None, 0.0)
        ways = {"NONE": "every launch", "PIECEWISE": "every piece and every attention", "FULL": "the graph as a whole"}
        why = f"The host has its turn around {ways[row.mode]}"
        why += f": {row.launches} launches in a step." if row.launches is not None else "."
        if setup is not None and setup.sizes:
            why += f" Its start captured {setup.sizes} size{'s' if setup.sizes > 1 else ''}."
        notes = [f"The compile cache was warm: {setup.compile_ms / 1e3:.1f} s to read it."
                 ] if setup is not None and setup.from_cache else []  # fmt: skip
        return outcome(
            way=values["way"], said=_said(mode, compile), mode=row.mode, startup_s=startup, parts_s=parts, mib=mib,
            step_ms=row.p50_ms, looks=row.launches, batch=row.batch, tokens=int(values.get("tokens", 200)),
            model=row.model, made=self._recording.provenance, samples=row.samples_ms, why=why, notes=notes,
        )  # fmt: skip


def recorded_bills(entries: Sequence[Entry] | None = None) -> tuple[list[RecordedBill], list[str]]:
    """One source per recording of a GPU's steps; sentences on what is missing.

    The one whose start-up captured the most graphs comes first: an engine that serves has its whole list of sizes.
    """
    found = []
    for one in library().of("steps") if entries is None else entries:
        if one.provenance.gpu and one.recording.rows:
            machine = one.provenance.device
            name = one.name.split(".")[0]
            found.append(RecordedBill(one.recording, f"{machine} · {name if one.is_shipped else one.origin}"))
    found = [one for one in found if one.rows]
    found.sort(key=lambda one: (not one.has_startup, -one.graphs))
    if not found:
        return [], [ABSENT]
    return found, [] if any(one.has_startup for one in found) else [NO_STARTUP]


def _said(mode: str, compile: str) -> str:
    words = {"NONE": "not compiled", "VLLM_COMPILE": "compiled in pieces"}
    return f"{mode}, {words.get(compile, compile.lower())}"
