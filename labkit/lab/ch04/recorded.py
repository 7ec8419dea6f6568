"""Recorded decodes with a number of splits that was asked for, looked up. Refuses to make up what lies between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.lab.ch04.outcome import Found, call_words, outcome, plural
from labkit.lab.fields import Choice, Control, Number
from labkit.lab.runs import Context, Outcome
from labkit.measure.attention import AttentionRecording, AttentionRow
from labkit.measure.library import Entry, library
from labkit.simulate.occupancy import CHIPS, Call, Chip, simulate

ABSENT = (
    "No RECORDED source: no recording of attention calls with several numbers of splits ships with this version or "
    "lies in your folder (`labkit record --suite attention` makes one on a GPU)."
)


class RecordedSplits:
    """Decodes of one recording: over rotated K and V, in a graph where there was one."""

    kind = "RECORDED"

    def __init__(self, recording: AttentionRecording, label: str) -> None:
        self.label, self._made = label, recording.provenance
        rows = [r for r in recording.rows if r.kind == "decode" and r.kv == "rotated" and r.call == "labkit"]
        rows = [r for r in rows if not r.batch_invariant and not r.split_mixed_batches]
        asked = {_point(row) for row in rows if row.num_splits_asked}
        self.rows = [row for row in rows if _point(row) in asked]

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        backends = list(dict.fromkeys(row.backend for row in self.rows))
        backend = values.get("backend") if values.get("backend") in backends else backends[0]
        mine = [row for row in self.rows if row.backend == backend]
        batches = sorted({row.batch for row in mine})
        batch = values.get("batch") if values.get("batch") in batches else batches[0]
        contexts = sorted({row.context for row in mine if row.batch == batch})
        kv_len = values.get("kv_len") if values.get("kv_len") in contexts else contexts[-1]
        asked = sorted({r.num_splits_asked for r in mine if (r.batch, r.context) == (batch, kv_len)})
        return [
            Choice("backend", "Attention", [(b, b) for b in backends], help="Whose kernels were timed."),
            Choice("batch", "Requests", [(str(b), b) for b in batches], help="How many requests one call serves."),
            Number("kv_len", "KV length", contexts[0], contexts[-1], contexts[-1], points=contexts, unit="tokens",
                   help="Keys that each request's one new token sees."),
            Number("num_splits", "Splits", asked[0], asked[-1], asked[0], points=asked,
                   help="How many programs share the keys of one. 0 is what the backend chooses by itself."),
        ]  # fmt: skip

    def cost(self, values: Mapping[str, Any]) -> str:
        return f"Run looks up calls that were measured on the {self.label}."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        return ["Every point is a measured call. Between two of them nothing is known."]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        wanted = (values["backend"], values["batch"], values["kv_len"])
        mine = [row for row in self.rows if _point(row) == wanted]
        graphs = [row for row in mine if row.launch == "graph"] or mine
        ran: dict[int, AttentionRow] = {}
        for row in sorted(graphs, key=lambda r: -r.num_splits_asked):
            ran[row.num_splits] = row  # of two that ran alike the one that was asked for less, or not at all
        asked = min(graphs, key=lambda r: (abs(r.num_splits_asked - values["num_splits"]), r.num_splits_asked))
        points = [(n, ran[n].p50_us) for n in sorted(ran)]
        chip = chip_of(self._made.gpu)
        programs: int | None = None
        sms: int | None = None
        per_sm: tuple[int, ...] = ()
        if chip is not None and asked.backend == "TRITON_ATTN":
            call = Call(1, asked.context, asked.batch, asked.num_heads, asked.num_kv_heads, asked.head_size)
            made = simulate(call, chip, asked.num_splits)
            programs, sms, per_sm = made.plan.programs, chip.sms, made.per_sm
        found = Found(
            asked.backend, call_words(asked.batch, 1, asked.context), asked.batch, 1, asked.context, asked.num_kv_heads,
            asked.num_splits, programs, asked.p50_us, points, sms, per_sm,
        )  # fmt: skip
        own = next((row for row in graphs if row.num_splits_asked == 0), None)
        summary = f"{plural(asked.num_splits, 'split')}: {asked.p50_us:,.1f} µs a call. Fastest of those recorded: "
        summary += f"{plural(found.best, 'split')}, {min(us for _, us in points):,.1f} µs"
        summary += f"; by itself {asked.backend} takes {own.num_splits}." if own else "."
        if asked.num_splits == 1 and found.best > 1:
            summary += " Unsplit, a few programs read all keys one after another, and most of the GPU is idle."
        how = f"{'In a graph' if asked.launch == 'graph' else 'Eagerly'}, K and V rotated over {asked.sets} sets."
        return outcome(found, self._made, summary, asked.samples_us, notes=(how,))


def chip_of(gpu: str | None) -> Chip | None:
    """The chip whose name is in a GPU's name ("NVIDIA H200"), None where it is not among those known here."""
    return next((chip for chip in CHIPS if chip.name in (gpu or "").split()), None)


def recorded_sources(entries: Sequence[Entry] | None = None) -> tuple[list[RecordedSplits], list[str]]:
    """One source for each recording with numbers of splits, and a sentence where there is none."""
    found = []
    for one in library().of("attention") if entries is None else entries:
        machine = one.provenance.device
        kept = RecordedSplits(one.recording, machine if one.is_shipped else f"{machine} · {one.origin}")
        if kept.rows:
            found.append(kept)
    return found, [] if found else [ABSENT]


def _point(row: AttentionRow) -> tuple[Any, ...]:
    return row.backend, row.batch, row.context
