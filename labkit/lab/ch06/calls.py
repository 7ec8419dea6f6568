"""The attention of a packed step, timed: one call, two calls, and padded to a rectangle. Refuses to schedule.

Everything that computes runs on the worker thread; torch is imported there only. Heads are those of a small model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.errors import LabkitError
from labkit.lab.ch06 import packing
from labkit.lab.ch06.batch import Share, packed, query_start_loc, schedule, scores
from labkit.lab.fields import Choice, Control, Number
from labkit.lab.runs import Context, Outcome, Stopped
from labkit.measure.library import library
from labkit.measure.provenance import Kind, Provenance, collect
from labkit.measure.stats import Measurement, Ratio, ratio, summary

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 8, 2, 64
#: Memory that the dense way may take for its mask and copies, in scores.
MOST_SCORES = 1 << 24
ROUNDS = 2
MICROSECONDS = "time of attention in one layer, µs"


class CallsSource:
    """This machine: the backend that the selector takes, and dense attention beside it."""

    kind = "LIVE"

    def __init__(self, gpu: str = "") -> None:
        self.gpu = gpu
        self.label = gpu or "this CPU"

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        return [
            *packing.batch_controls(),
            Number("samples", "Samples", 10, 100, 10, 2, help="How often each way is timed."),
        ]

    def cost(self, values: Mapping[str, Any]) -> str:
        return "about 3 s on a CPU, less on a GPU: the attention of one layer, the ways one after the other."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        heads = f"{NUM_HEADS} heads of {HEAD_SIZE} over {NUM_KV_HEADS} KV heads."
        if self.gpu:
            return [heads]
        return [f"{heads} No backend for a CPU has a kernel for mixed batches: TORCH_SDPA goes from request to request "
                "inside its one call. In two calls it takes all decodes at once."]  # fmt: skip

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        shares, left = schedule(values["requests"], values["budget"], values["block_size"])
        context.stage("loading torch", 0, 0)
        device = "auto" if self.gpu else "cpu"
        names = packing.ways(shares)
        if scores(shares)["padded"] > MOST_SCORES:
            names.remove("padded")
        timed: dict[str, tuple[float, ...]] = dict.fromkeys(names, ())
        backend, turns = "", [*names, *reversed(names)]  # forward and backward, so that a drift meets all alike
        for done, way in enumerate(turns):
            context.check()
            context.stage(f"timing {packing_words(way)}", done, len(turns))
            us, used = time_way(way, shares, device, values["samples"] // ROUNDS)
            timed[way] += us
            backend = used if way == "unified" else backend
        made = collect("LIVE", "panel 06", order=", ".join(turns), n=len(timed["unified"]), primed=True, device=device)
        return outcome(shares, left, values["block_size"], timed, backend, made, ROUNDS)


def packing_words(way: str) -> str:
    return {"unified": "one call", "split": "two calls", "padded": "a padded rectangle"}[way]


def time_way(way: str, shares: Sequence[Share], device: str, samples: int) -> tuple[tuple[float, ...], str]:
    """Microseconds of each sample, and the backend that was timed."""
    from labkit.attention import registry
    from labkit.bench.attention import AttentionOptions, AttentionShape
    from labkit.llm import find_backends, find_device

    where, platform = find_device(device)
    dtype = "float16" if where.type == "cuda" else "float32"
    heads: dict[str, Any] = {
        "num_heads": NUM_HEADS,
        "num_kv_heads": NUM_KV_HEADS,
        "head_size": HEAD_SIZE,
        "dtype": dtype,
    }
    if way == "padded":
        return _time_padded(shares, where, dtype, samples), "dense"

    def shape(of: Sequence[Share]) -> AttentionShape:
        return AttentionShape(tuple(s.tokens for s in of), tuple(s.end for s in of), **heads)

    ordered = sorted(shares, key=lambda s: not s.is_decode)  # decodes first, as a backend that splits wants them
    found = find_backends(platform)
    for name in registry.priority(platform):
        if not found[name].usable:
            continue
        splits = registry.load(name).capabilities.split_mixed_batches
        try:
            if way == "unified":
                return _eager(name, shape(ordered), AttentionOptions(), device, samples), name
            if splits:
                return _eager(name, shape(ordered), AttentionOptions(split_mixed_batches=True), device, samples), name
            decodes, chunks = [s for s in ordered if s.is_decode], [s for s in ordered if not s.is_decode]
            both = [_eager(name, shape(part), AttentionOptions(), device, samples) for part in (decodes, chunks)]
            return tuple(a + b for a, b in zip(*both, strict=True)), name
        except LabkitError:
            continue
    raise LabkitError("timing attention", "no backend can serve here", "`labkit backends` says why.")


def _eager(name: str, shape: Any, options: Any, device: str, samples: int) -> tuple[float, ...]:
    from labkit.bench.attention import bench_attention

    rows = bench_attention(name, shape, options, device=device, samples=samples, sets=4)
    return next(row.samples_us for row in rows if row.launch == "eager" and row.kv == "warm")


def _time_padded(shares: Sequence[Share], device: Any, dtype: str, samples: int) -> tuple[float, ...]:
    """Every request padded to the longest queries and keys, one dense masked call."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from labkit.measure import clocks

    rows, queries, keys = len(shares), max(s.tokens for s in shares), max(s.end for s in shares)
    kind = getattr(torch, dtype)
    q = torch.randn(rows, NUM_HEADS, queries, HEAD_SIZE, device=device, dtype=kind)
    k, v = (torch.randn(rows, NUM_HEADS, keys, HEAD_SIZE, device=device, dtype=kind) for _ in range(2))
    at = torch.arange(keys, device=device)
    mask = torch.stack([
        at[None, :] <= (torch.arange(queries, device=device) + (s.end - s.tokens)).clamp(max=s.end - 1)[:, None]
        for s in shares
    ])[:, None]  # fmt: skip
    with torch.inference_mode():
        times = clocks.sample_us(
            lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask), samples=samples, warmup=3, device=device
        )
    return tuple(times)


def outcome(
    shares: Sequence[Share],
    left: Sequence[str],
    block_size: int,
    timed: Mapping[str, Sequence[float]],
    backend: str,
    made: Provenance,
    rounds: int = 1,
) -> Outcome:
    """Times of a step by way as a run of the panel."""
    if "unified" not in timed:
        raise Stopped
    kind = made.kind
    spreads = {way: summary(us) for way, us in timed.items()}
    mid = {way: one.p50 for way, one in spreads.items()}
    measured = {way: Measurement(Kind(kind), tuple(us), packing_words(way), rounds) for way, us in timed.items()}
    ratios = {way: ratio(measured[way], measured["unified"]) for way in timed if way != "unified"}
    found = scores(shares)
    verdict = None
    if "split" in ratios:
        verdict = "same" if not ratios["split"].shown else "two" if mid["split"] < mid["unified"] else "one"
    data = {
        **packed(shares, left), "bounds": [str(n) for n in query_start_loc(shares)], "costs": list(mid.values()),
        "ways": list(timed), "texts": [f"{us:,.0f} µs" for us in mid.values()], "unit": MICROSECONDS,
        "spread": [[one.p10, one.p90] for one in spreads.values()], "block_size": block_size,
    }  # fmt: skip
    row = {
        **packing.columns(shares), "waste": 100 * (1 - found["useful"] / found["padded"]),
        **{f"{way}_us": mid.get(way) for way in ("unified", "split", "padded")}, "verdict": verdict,
    }  # fmt: skip
    notes = [f"n = {len(timed['unified'])} samples of each way; the bars are medians with p10–p90.",
             *packing.notes(shares)]  # fmt: skip
    return Outcome(data, row, said(backend, mid, ratios), made, measured["unified"], tuple(notes))


def said(backend: str, mid: Mapping[str, float], ratios: Mapping[str, Ratio]) -> str:
    """What was measured, and why it came out so."""
    out = f"The attention of this step takes {mid['unified']:,.0f} µs in one call."
    if "split" in ratios:
        if not ratios["split"].shown:
            out += f" Two calls take {mid['split']:,.0f} µs: no difference shown."
        elif mid["split"] < mid["unified"]:
            loops = backend == "TORCH_SDPA"
            why = (
                "since TORCH_SDPA has no kernel for a mixed batch: its one call goes from request to request, and in "
                "two calls it takes all decodes at once"
                if loops
                else "since each of the two kernels gets the shape that it is best at"
            )
            out += f" Two calls take {mid['split']:,.0f} µs, {why}."
        else:
            out += (
                f" Two calls take {mid['split']:,.0f} µs, since each costs its launch, and the second waits for the "
                "first."
            )
    if "padded" in ratios:
        out += f" Padded to a rectangle it takes {mid['padded']:,.0f} µs: {ratios['padded'].text}."
    return out


# --- recorded --------------------------------------------------------------------------------------------------------


class RecordedCalls:
    """Mixed batches that were recorded in one call and in two."""

    kind = "RECORDED"

    def __init__(self, label: str, pairs: Sequence[tuple[Any, Any, Any]]) -> None:
        self.label = label
        self._pairs = {self._key(one): (one, two, made) for one, two, made in pairs}

    @staticmethod
    def _key(row: Any) -> str:
        decodes = sum(q == 1 for q in row.query_lens)
        chunk = max(row.query_lens)
        return f"{row.name}: {decodes} decodes and {chunk:,} tokens, context {row.context:,}, {row.launch}, {row.kv}"

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        names = list(self._pairs)
        return [Choice("call", "Recorded call", [(name, name) for name in names], help="What was recorded both ways.")]

    def cost(self, values: Mapping[str, Any]) -> str:
        return f"Run looks up one recorded batch of the {self.label}. Nothing is loaded or measured."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        return ["Both rows are of one recording. A padded rectangle was not recorded."]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        one, two, made = self._pairs[values["call"]]
        at, shares = 1, []
        for i, (q, kv) in enumerate(zip(one.query_lens, one.kv_lens, strict=True)):
            n = -(-kv // one.block_size)
            shares.append(Share(chr(ord("A") + i % 26), kv - q, q, tuple(range(at, at + n)), (), 0))
            at += n
        timed = {"unified": one.samples_us, "split": two.samples_us}
        found = outcome(shares, [], one.block_size, timed, one.backend, made)
        notes = (found.notes[0], "Page numbers are drawn in order; the recording does not keep them.")
        return Outcome(found.data, found.values, found.summary, made, found.measurement, notes)


def recorded_calls() -> tuple[list[RecordedCalls], list[str]]:
    """One source per recording that has a mixed batch both ways, and a sentence where none has."""
    sources = []
    for entry in library().of("attention"):
        rows = [r for r in entry.recording.rows if r.kind == "mixed" and r.call == "labkit" and len(r.query_lens) <= 12]
        twins = {r.key: r for r in rows if r.split_mixed_batches}
        pairs = [(r, twins[key], entry.provenance) for r in rows if not r.split_mixed_batches
                 and (key := dataclasses.replace(r, split_mixed_batches=True).key) in twins]  # fmt: skip
        if pairs:
            name = entry.provenance.device if entry.is_shipped else f"{entry.provenance.device} · yours: {entry.name}"
            sources.append(RecordedCalls(name, pairs))
    absent = [] if sources else ["No RECORDED source: no recording has a mixed batch in one call and in two."]
    return sources, absent
