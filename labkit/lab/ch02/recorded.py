"""Recorded steps with all their samples, and three clocks on one step. Refuses to make up a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.errors import LabkitError
from labkit.lab.fields import Choice, Control, Number, Toggle
from labkit.lab.runs import Context, Outcome
from labkit.measure import stats
from labkit.measure.library import Entry, library
from labkit.measure.recordings import Recording, Row
from labkit.measure.stats import Measurement

WAYS = (("one by one", "NONE"), ("as one graph", "FULL"))
LEAST = 5


class RecordedSamples:
    """Decode steps of one machine: NONE and FULL, not compiled, with a device time and phases.

    Args:
        timelines: entries whose rows have samples with and without the profiler; where the very step is there, the
            profiler can be switched.
    """

    kind = "RECORDED"

    def __init__(self, label: str, recordings: Sequence[Recording], timelines: Sequence[Entry] = ()) -> None:
        self.label = label
        self._rows: dict[tuple[str, str, str, int, int], tuple[Row, Recording]] = {}
        self._timelines = [one for one in timelines if one.provenance.device == recordings[0].provenance.device]
        for one in sorted(recordings, key=lambda found: found.provenance.date, reverse=True):
            for row in one.rows:
                if _fits(row):
                    key = (row.model, row.backend, row.mode, row.context, row.batch)
                    self._rows.setdefault(key, (row, one))

    @property
    def keys(self) -> list[tuple[str, str, str, int, int]]:
        """(model, backend, mode, context, batch) of every step."""
        return list(self._rows)

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        model = _known(values.get("model"), [key[0] for key in self._rows])
        backend = _known(values.get("backend"), [key[1] for key in self._rows if key[0] == model])
        modes = [key[2] for key in self._rows if key[:2] == (model, backend)]
        mode = _known(values.get("mode"), [one for _, one in WAYS if one in modes])
        contexts = sorted({key[3] for key in self._rows if key[:3] == (model, backend, mode)})
        context = _known(values.get("context"), contexts)
        batches = tuple(sorted(key[4] for key in self._rows if key[:4] == (model, backend, mode, context)))
        found: list[Control] = [
            Choice("model", "Model", _pairs([key[0] for key in self._rows]), model, help="What was recorded."),
            Choice("backend", "Attention", _pairs([key[1] for key in self._rows if key[0] == model]), backend,
                   help="The attention backend."),
            Choice("mode", "Started", [way for way in WAYS if way[1] in modes], mode, help="By many launches or by "
                                                                                           "one."),
            Number("batch", "Batch", batches[0], batches[-1], batches[0], points=batches, help="Requests per step."),
            Number("n", "Samples", LEAST, 200, 50, help="So many of the recorded samples, from the first one on."),
        ]  # fmt: skip
        if len(contexts) > 1:
            found.insert(3, Choice("context", "Context", [(f"{c} tokens", c) for c in contexts], context,
                                   help="Tokens of each request in the KV cache."))  # fmt: skip
        if self._control(model, backend, mode, context, int(values.get("batch", batches[0]))) is not None:
            found.append(Toggle("profiler", "profiler on", False, help="The same step while a profiler took notes."))
        return found

    def cost(self, values: Mapping[str, Any]) -> str:
        return f"Run looks up one recorded step of the {self.label}. Nothing is measured."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        return [
            "Samples are wall times of whole steps, taken after warm-up. Beside them are medians of two other clocks "
            "on the same step: the host's when launching was over, and device events around the forward pass."
        ]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        where = (values["model"], values["backend"], values["mode"])
        found = next((pair for key, pair in self._rows.items() if (key[:3], key[4]) == (where, values["batch"])
                      and values.get("context") in (None, key[3])), None)  # fmt: skip
        if found is None:
            raise LabkitError(f"a step of {where}", "it was not recorded", "Choose a recorded batch and context.")
        row, recording = found
        samples, made = [1e3 * ms for ms in row.samples_ms], recording.provenance
        other = self._control(row.model, row.backend, row.mode, row.context, row.batch)
        profiled = bool(values.get("profiler")) and other is not None
        if other is not None and "profiler" in values:
            timeline, made = other
            samples = list(timeline.control.profiled_us if profiled else timeline.control.plain_us)
        samples = samples[: int(values["n"])]
        summed = stats.summary(samples)
        launching, events = row.phases_us["launch"], float(row.device_us or 0.0)
        way = dict((mode, words) for words, mode in WAYS)[row.mode]
        what = f"{row.model}, batch {row.batch}, {way}{', profiler' if profiled else ''}"
        numbers = {
            "what": what, "n": len(samples), "median_us": summed.p50, "p10_us": summed.p10, "p90_us": summed.p90,
            "launching_us": launching, "events_us": events, "first_us": samples[0],
        }  # fmt: skip
        data = {"samples_us": samples, "place": list(range(1, len(samples) + 1))}
        held = Measurement(made.kind, tuple(us / 1e3 for us in samples))
        return Outcome(data, numbers, _summary(what, summed, launching, events), made, held)

    def _control(self, model: str, backend: str, mode: str, context: int, batch: int) -> Any:
        for entry in self._timelines:
            for row in entry.recording.rows:
                same = (row.model, row.backend, row.compile, row.timeline.mode, row.context, row.batch)
                if same == (model, backend, "NONE", mode, context, batch):
                    return row, entry.provenance
        return None


def recorded_sources() -> tuple[list[RecordedSamples], list[str]]:
    """One source per machine for what ships, one per file of the user's own; and a sentence where there is none."""
    found = library()
    groups: dict[str, list[Recording]] = {}
    for one in found.of("steps"):
        name = one.provenance.device if one.is_shipped else f"{one.provenance.device} · yours: {one.name}"
        groups.setdefault(name, []).append(one.recording)
    sources = [RecordedSamples(name, recordings, found.of("timelines")) for name, recordings in groups.items()]
    sources = [source for source in sources if source.keys]
    return sources, [] if sources else ["No RECORDED source: no recording has steps with device times and phases."]


def _fits(row: Row) -> bool:
    plain = row.compile == "NONE" and not row.chunk and row.query_len == 1 and not row.emulated
    known = row.device_us is not None and "launch" in row.phases_us and row.n >= LEAST
    return plain and known and row.mode in ("NONE", "FULL") and row.size == row.batch


def _known(value: Any, options: Sequence[Any]) -> Any:
    return value if value in options else options[0]


def _pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    return [(name, name) for name in dict.fromkeys(names)]


def _summary(what: str, found: stats.Summary, launching: float, events: float) -> str:
    said = f"{what}: a step takes {found.p50 / 1e3:.2f} ms (median of {found.n}). A host clock that is stopped when "
    said += f"launching is over reads {launching / 1e3:.2f} ms, device events around the forward "
    said += f"{events / 1e3:.2f} ms, because "
    if launching < 0.8 * events:
        return said + "the host is done long before the device is."
    return said + "here the device waits for the host, so that both end together; only the whole step has the rest."
