"""What users feel when a long prompt arrives: sources for the panel of schedulings. Refuses to draw."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.config import SamplingParams
from labkit.errors import ConfigError
from labkit.lab.engine_room import EngineRoom, shared_room
from labkit.lab.fields import Choice, Control, Number, Text
from labkit.lab.runs import Context, Outcome, Stopped, simulated
from labkit.measure.library import library
from labkit.measure.provenance import Provenance
from labkit.measure.requests import summarize
from labkit.measure.stats import summary as percentiles
from labkit.measure.traffic import RequestRecording, RequestRow
from labkit.paging.block_pool import BlockPool
from labkit.scheduling.request import Request
from labkit.scheduling.scheduler import Scheduler, SchedulerLimits

MODEL = "tiny-llama"
LEAD = 4
COLUMNS = [
    ("what", "traffic"), ("whole_worst", "whole: worst wait, ms"), ("chunk_worst", "chunks: worst wait, ms"),
    ("whole_ttft", "whole: first token, ms"), ("chunk_ttft", "chunks: first token, ms"), ("chunk", "chunk, tokens"),
]  # fmt: skip
Ways = tuple[tuple[str, bool, int], ...]


def read_chunks(typed: str) -> tuple[int, ...]:
    """Chunk sizes, largest first, at most three.

    Raises:
        ConfigError: none, too many, or a number that is no size of a chunk.
    """
    parts = [part for part in re.split(r"[,;\s]+", typed) if part]
    wrong = [part for part in parts if not part.isdecimal() or not 8 <= int(part) <= 4096]
    if wrong or not 1 <= len(parts) <= 3:
        what = f"chunks {', '.join(wrong) or typed!r}"
        raise ConfigError(what, "are not one to three whole numbers from 8 to 4096", "Write 256, 64.")
    return tuple(sorted({int(part) for part in parts}, reverse=True))


def ways(chunks: Sequence[int]) -> Ways:
    """(name, prefill first, cap of a chunk) of every scheduling, as `labkit bench requests` has them."""
    return (("prefill_first", True, 0), ("whole", False, 0), *((f"chunk {n}", False, n) for n in chunks))


def traffic_controls(prompt: int, most: int, chunks: str) -> list[Control]:
    return [
        Number("decodes", "Decodes", 1, 32, 8, help="Requests that get one token after another when the prompt comes."),
        Number("prompt", "Prompt", 64, most, prompt, unit="tokens", help="Tokens of each prompt that arrives."),
        Number("prompts", "Prompts", 1, 4, 1, help="How many arrive, one before each step."),
        Text("chunks", "Chunks", chunks, parse=read_chunks, placeholder=chunks,
             help="long_prefill_token_threshold: most tokens of one prompt in a step. One to three sizes."),
    ]  # fmt: skip


class ModelSource:
    """The engine's scheduler, with a step whose time is a fixed part and a part for each token."""

    kind, label = "SIMULATED", "scheduler with a step time"

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        return [
            *traffic_controls(2048, 8192, "256, 64"),
            Number("fixed_ms", "Fixed part", 0.5, 50.0, 5.0, 0.5, unit="ms", help="What a step of one token takes."),
            Number("token_us", "Each token", 1.0, 1000.0, 20.0, 1.0, unit="µs", help="What one token more adds."),
        ]

    def cost(self, values: Mapping[str, Any]) -> str:
        return "Run asks the scheduler for every step and adds up made-up times; it answers at once."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        whole = values["fixed_ms"] + values["token_us"] * (values["prompt"] + values["decodes"]) / 1e3
        return [f"A step with the whole prompt in it takes {whole:.1f} ms by this formula, every decode waits for it."]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        made = simulated(self.label, fixed_ms=values["fixed_ms"], token_us=values["token_us"])
        known = ways(values["chunks"])
        tokens = tokens_needed(values, known)
        rows = tuple(_simulate(values, way, tokens) for way in known)
        return outcome(RequestRecording(made, rows), rows)


def tokens_needed(values: Mapping[str, Any], known: Ways) -> int:
    """How many tokens each decode asks for, so that the slowest scheduling is through before."""
    smallest = min(chunk or values["prompt"] for _, _, chunk in known)
    steps = -(-values["prompt"] // smallest) * values["prompts"]
    return 2 * LEAD + values["prompts"] + steps + 1


def _simulate(values: Mapping[str, Any], way: tuple[str, bool, int], tokens: int) -> RequestRow:
    """One scheduling, step by step."""
    name, prefill_first, chunk = way
    decodes, prompt, prompts = values["decodes"], values["prompt"], values["prompts"]
    longest = max(prompt, tokens) + 80
    limits = SchedulerLimits(
        64, decodes + prompts * prompt, longest, 16, long_prefill_token_threshold=chunk, enable_prefix_caching=False,
        prefill_first=prefill_first,
    )  # fmt: skip
    scheduler = Scheduler(limits, BlockPool(64 + (decodes + prompts) * (longest // 16 + 2), 16, False))
    for i in range(decodes):
        scheduler.prime(Request(f"d{i}", [1] * 64, SamplingParams(max_tokens=tokens + 1, ignore_eos=True)), 64)
    now, number = 0.0, 0
    arrived: dict[str, float] = {}
    begun: dict[str, float] = {}
    first: dict[str, float] = {}
    stamps: list[float] = []
    during: list[int] = []
    busy = False
    while scheduler.has_unfinished:
        arriving = number - LEAD
        if 0 <= arriving < prompts:
            arrived[f"p{arriving}"] = now
            scheduler.add(Request(f"p{arriving}", [1] * prompt, SamplingParams(max_tokens=1, ignore_eos=True)))
        step = scheduler.schedule()
        assert step is not None
        ran = {item.request.request_id: item for item in step.requests}
        for one in ran:
            begun.setdefault(one, now)
        now += values["fixed_ms"] + values["token_us"] * step.num_tokens / 1e3
        busy = busy or any(one.startswith("p") for one in ran)
        scheduler.commit(step, [1 if item.samples else None for item in step.requests])
        first |= {one: now for one, item in ran.items() if one.startswith("p") and item.samples}
        if "d0" in ran:
            if stamps and busy:
                during.append(len(stamps) - 1)
            stamps.append(now)
            busy = False
        number += 1
    waits = tuple(round(b - a, 5) for a, b in zip(stamps, stamps[1:], strict=False))
    ttft = tuple(round(first[one] - arrived[one], 5) for one in arrived)
    queue = tuple(round(begun[one] - arrived[one], 5) for one in arrived)
    spread, judged = percentiles(ttft), summarize(waits)
    return RequestRow(
        model="a made-up step", dtype="none", backend="none", backend_version=None, requested_mode="NONE",
        compile="NONE", weights="none", scheduling=name, prefill_first=prefill_first, chunk=chunk,
        max_num_batched_tokens=limits.max_num_batched_tokens, decodes=decodes, context=64, prompt=prompt,
        prompts=prompts, lead=LEAD, tokens=len(stamps), runs=1, n=prompts, samples_ttft_ms=ttft,
        p10_ttft_ms=round(spread.p10, 5), p50_ttft_ms=round(spread.p50, 5), p90_ttft_ms=round(spread.p90, 5),
        samples_queue_ms=queue, samples_itl_ms=waits, during=tuple(during), p50_itl_ms=round(judged.p50, 5),
        p99_itl_ms=round(judged.p99, 5), worst_itl_ms=round(judged.worst, 5),
    )  # fmt: skip


class EngineSource:
    """This machine's engine, with the smallest model there is: what counts is who waits for whom."""

    kind = "LIVE"

    def __init__(self, gpu: str = "", room: EngineRoom | None = None) -> None:
        self.gpu = gpu
        self.label = gpu or "this CPU"
        self.room = room or shared_room()

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        most, prompt, chunks = (4096, 2048, "256, 64") if self.gpu else (1024, 512, "128")
        return [
            *traffic_controls(prompt, most, chunks),
            Number("runs", "Runs", 2, 20, 3, help="How often every scheduling runs; one more comes before."),
        ]

    def cost(self, values: Mapping[str, Any]) -> str:
        return f"about {'5' if self.gpu else '3 to 6'} s: {MODEL}, the schedulings in turns."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        said = "Real steps of the engine, and real waits."
        return [said if self.gpu else f"{said} A CPU has no CUDA graphs, so that every step is eager."]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        from labkit.bench.requests import Scheduling, Traffic, bench_requests_on

        def progress(stage: str, done: int, total: int, detail: str) -> None:
            if stage == "measuring" and context.should_stop():
                raise Stopped
            context.stage(f"{stage} {detail}", done, total)

        traffic = Traffic(values["decodes"], 64, values["prompt"], values["prompts"], LEAD)
        known = [Scheduling(*way) for way in ways(values["chunks"])]
        llm = self.room.prepare(
            MODEL, progress, max_num_seqs=values["decodes"] + values["prompts"], enforce_eager=not self.gpu,
            max_num_batched_tokens=values["decodes"] + values["prompt"] * values["prompts"],
            max_model_len=max(values["prompt"], 64 + traffic.tokens(known)) + 16, enable_prefix_caching=False,
            enable_chunked_prefill=True, num_gpu_blocks_override=None,
        )  # fmt: skip
        try:
            recording, notes = bench_requests_on(
                llm, traffic, known, runs=values["runs"], command="panel 06", progress=progress
            )
        finally:
            llm.reconfigure(prefill_first=False, long_prefill_token_threshold=0, enable_prefix_caching=True)
        return outcome(recording, recording.rows, notes)


class RecordedSource:
    """Traffics that were recorded under every scheduling."""

    kind = "RECORDED"

    def __init__(self, label: str, recordings: Sequence[RequestRecording]) -> None:
        self.label = label
        self._found: dict[str, tuple[RequestRecording, tuple[RequestRow, ...]]] = {}
        for recording in recordings:
            for row in recording.rows:
                rows = tuple(one for one in recording.rows if one.traffic == row.traffic)
                self._found.setdefault(f"{row.model}, {row.backend}: {words(row)}", (recording, rows))

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        return [Choice("traffic", "Traffic", [(name, name) for name in self._found], help="What was recorded.")]

    def cost(self, values: Mapping[str, Any]) -> str:
        return f"Run looks up one recorded traffic of the {self.label}. Nothing is loaded or measured."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        return []

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        recording, rows = self._found[values["traffic"]]
        return outcome(recording, rows)


def recorded_sources() -> tuple[list[RecordedSource], list[str]]:
    """One source per machine for what ships, one per file of the user's own; and a sentence where there is none."""
    groups: dict[str, list[RequestRecording]] = {}
    for one in library().of("requests"):
        name = one.provenance.device if one.is_shipped else f"{one.provenance.device} · yours: {one.name}"
        groups.setdefault(name, []).append(one.recording)
    sources = [RecordedSource(name, found) for name, found in groups.items()]
    return sources, [] if sources else ["No RECORDED source: no recording of requests is there."]


#: Below this share of the whole prompt's worst wait that of a chunk is called shorter; above this multiple of all waits
#: together, longer.
SHORTER, LATER = 0.8, 1.1


def recording_of(data: Mapping[str, Any]) -> RequestRecording:
    """What a run holds, as a recording again."""
    return RequestRecording(
        Provenance.from_dict(data["provenance"]), tuple(RequestRow.from_dict(row) for row in data["rows"])
    )


def words(row: RequestRow) -> str:
    """A traffic in words."""
    what = "a prompt" if row.prompts == 1 else f"{row.prompts} prompts"
    return f"{row.decodes} decode{'s' * (row.decodes > 1)}, {what} of {row.prompt:,}"


def outcome(recording: RequestRecording, rows: Sequence[RequestRow], notes: Sequence[str] = ()) -> Outcome:
    """One traffic under every scheduling as a run of the panel."""
    made: Provenance = recording.provenance
    whole = next(row for row in rows if not row.prefill_first and not row.chunk)
    smallest = min((row for row in rows if row.chunk), key=lambda row: row.chunk, default=None)
    data: dict[str, Any] = {"provenance": made.as_dict(), "rows": [row.as_dict() for row in rows]}
    for row in rows:
        columns = list(zip(*row.waits, strict=True))
        data[f"waits {row.scheduling}"] = [percentiles(column).p50 for column in columns]
        data[f"ttft {row.scheduling}"] = [row.p50_ttft_ms]
    table = {
        "what": words(whole), "whole_worst": whole.worst_itl_ms, "whole_ttft": whole.p50_ttft_ms,
        "chunk_worst": smallest.worst_itl_ms if smallest else None, "chunk": smallest.chunk if smallest else None,
        "chunk_ttft": smallest.p50_ttft_ms if smallest else None,
    }  # fmt: skip
    said = f"With {words(whole)}: run whole, the longest wait between two tokens is {whole.worst_itl_ms:.3g} ms"
    said += f" and the prompt's first token is there after {whole.p50_ttft_ms:.3g} ms."
    if smallest is not None:
        steps = -(-whole.prompt // smallest.chunk)
        said += f" In chunks of {smallest.chunk} it is {smallest.worst_itl_ms:.3g} ms and {smallest.p50_ttft_ms:.3g} ms"
        if smallest.worst_itl_ms < SHORTER * whole.worst_itl_ms:
            said += ", since no step is long"
        else:
            said += (
                ": steps are hardly shorter here, be it that a step's fixed part is most of it, or that something else "
                "ran"
            )
        if smallest.p50_ttft_ms > 1.05 * whole.p50_ttft_ms:
            said += f"; the prompt needs {steps} of them, each with its fixed part and with decodes in it"
        said += "."
        total, chunked = (sum(data[f"waits {row.scheduling}"]) for row in (whole, smallest))
        if chunked > LATER * total and len(data[f"waits {whole.scheduling}"]) == len(smallest.waits[0]):
            said += f" Added up, a decode waits {chunked - total:.3g} ms longer for the same tokens."
    origin = f"n = {whole.runs} run{'s' * (whole.runs > 1)} of each scheduling, {made.order}" if made.order else ""
    return Outcome(data, table, said, made, whole.worst_per_run(made.kind), tuple(filter(None, (origin, *notes))),
                   "longest wait beside a whole prompt")  # fmt: skip
