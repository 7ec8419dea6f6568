"""Recorded attention calls, looked up: time of one backend over length. Refuses to make up what was not recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.lab.ch03.outcome import Curve, outcome
from labkit.lab.fields import Choice, Control
from labkit.lab.runs import Context, Outcome
from labkit.measure.attention import AttentionRecording, AttentionRow
from labkit.measure.library import Entry, library

ABSENT = (
    "No RECORDED source: no recording of attention calls ships with this version, and your folder has none "
    "(`labkit bench attention` makes one on a GPU)."
)
NOT_IN_IT = "Attention recordings hold times alone: for errors and memory take LIVE or SIMULATED."
_KINDS = {"prefill": "prompts without a past", "decode": "decodes: one new token each"}


class RecordedAttention:
    """The calls of one recording, as the engine makes them: over rotated K and V, in a graph where there was one."""

    kind = "RECORDED"

    def __init__(self, recording: AttentionRecording, label: str) -> None:
        self.label, self._recording = label, recording
        self.rows = [row for row in recording.rows if _is_plain(row)]

    def _values(self, field: str, **fixed: Any) -> list[Any]:
        return list(dict.fromkeys(getattr(r, field) for r in self.rows if _matches(r, fixed)))

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        kinds = [k for k in _KINDS if self._values("context", kind=k)]
        kind = values.get("kind") if values.get("kind") in kinds else kinds[0]
        backends = self._values("name", kind=kind)
        backend = values.get("backend") if values.get("backend") in backends else backends[0]
        batches = sorted(self._values("batch", kind=kind, name=backend))
        return [
            Choice("kind", "Batch of", [(_KINDS[k], k) for k in kinds], help="What every request brings."),
            Choice("backend", "Attention", [(b, b) for b in backends], help="Backends that could serve when it was "
                                             "recorded."),
            Choice("batch", "Requests", [(str(b), b) for b in batches], help="How many requests one call serves."),
        ]  # fmt: skip

    def cost(self, values: Mapping[str, Any]) -> str:
        return f"Run looks up calls that were measured on the {self.label}."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        return [
            NOT_IN_IT,
            *(f"Could not be recorded: {name} ({why})." for name, why in self._recording.refused.items()),
        ]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        fixed = {"kind": values["kind"], "name": values["backend"], "batch": values["batch"]}
        found: dict[int, AttentionRow] = {}
        for row in (r for r in self.rows if _matches(r, fixed)):
            if row.context not in found or row.launch == "graph":
                found[row.context] = row
        rows = [found[n] for n in sorted(found)]
        last = rows[-1]
        curve = Curve(
            last.name, last.dtype, last.num_heads, [r.context for r in rows], [r.p50_us for r in rows],
            [r.p10_us for r in rows], [r.p90_us for r in rows],
            shape=f", {last.batch} {'request' if last.batch == 1 else 'requests'}, {last.kind}",
        )  # fmt: skip
        heads = f"{last.num_heads} query heads, {last.num_kv_heads} KV heads, of {last.head_size}"
        launched = "in a graph" if last.launch == "graph" else "eagerly"
        how = f"Called {launched}, K and V rotated over {last.sets} sets; {heads}."
        rate = f"At the longest it reads K and V at {last.gb_s:,.0f} GB/s and computes {last.tflop_s:,.3g} TFLOP/s."
        return outcome(curve, self._recording.provenance, last.samples_us, notes=(rate, how))


def recorded_sources(entries: Sequence[Entry] | None = None) -> tuple[list[RecordedAttention], list[str]]:
    """One source for each recording that has whole calls, and a sentence where there is none."""
    found = []
    for one in library().of("attention") if entries is None else entries:
        machine = one.provenance.device
        label = machine if one.is_shipped else f"{machine} · {one.origin}"
        kept = RecordedAttention(one.recording, label)
        if any(row.kind in _KINDS for row in kept.rows):
            found.append(kept)
    return found, [] if found else [ABSENT]


def _is_plain(row: AttentionRow) -> bool:
    """As the engine calls it by default."""
    return dataclasses.replace(
        row, num_splits_asked=0, split_mixed_batches=False, batch_invariant=False, call="labkit", kv="rotated"
    ).key == row.key and row.kind in _KINDS  # fmt: skip


def _matches(row: AttentionRow, fixed: Mapping[str, Any]) -> bool:
    return all(getattr(row, name) == value for name, value in fixed.items())
