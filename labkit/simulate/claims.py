"""The numeric claims of two texts about attention backends and graphs, each beside our recorded value, a simulated one
at the text's memory bandwidth, and a verdict. Refuses to measure, and to say "holds" or not where nothing was recorded.

A verdict follows from RECORDED rows; for the 8B table from the recorded step with its bytes slowed down to the text's
bandwidth. Values of `simulate_step` stand beside it for orientation and decide nothing. Two claims are arithmetic on
bytes and bandwidth, and say so: there is nothing to measure.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from labkit.config import ModelConfig
from labkit.measure import limits, stats
from labkit.measure.provenance import Kind
from labkit.measure.recordings import Recording, Row
from labkit.simulate.step import H200, DecodeModel, Machine, kernels_of, simulate_step

#: Memory bandwidth that the second text calculates with, GB/s.
TEXT_GB_S = 3350.0
#: How far a value may be from the claimed one to confirm it.
TOLERANCE = 0.2

HOLDS, FAILS, OPEN, FOLKLORE = "holds", "does not hold", "open: not recorded", "folklore"
VERDICTS = (HOLDS, FAILS, OPEN, FOLKLORE)


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What speaks for or against a claim. value: with its unit, in words; kind: RECORDED or SIMULATED."""

    kind: Kind
    value: str
    how: str

    def as_dict(self) -> dict[str, str]:
        return {"kind": str(self.kind), "value": self.value, "how": self.how}


@dataclasses.dataclass(frozen=True)
class Finding:
    """The answer to a claim. why: one sentence under the verdict. recorded, simulated: the two kinds, never mixed."""

    claim: Claim
    verdict: str
    why: str
    recorded: tuple[Evidence, ...] = ()
    simulated: tuple[Evidence, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "id": self.claim.id, "text": self.claim.text, "claim": self.claim.words, "claimed": self.claim.claimed,
            "test": self.claim.test, "verdict": self.verdict, "why": self.why,
            "recorded": [one.as_dict() for one in self.recorded],
            "simulated": [one.as_dict() for one in self.simulated],
        }  # fmt: skip


Judge = Callable[["Evidences"], "tuple[str, str, Sequence[Evidence], Sequence[Evidence]]"]


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim in our words. text: which of the two texts. claimed: the number. test: how one finds out."""

    id: str
    text: str
    words: str
    claimed: str
    test: str
    judge: Judge = dataclasses.field(repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class Evidences:
    """What claims are tested with: recordings, shapes by name, and the machine that SIMULATED values are of."""

    recordings: tuple[Recording, ...]
    shapes: Mapping[str, ModelConfig]
    machine: Machine = H200

    def rows(self, **fixed: Any) -> list[Row]:
        """Recorded decode rows that match, of all recordings."""
        return [row for found in self._by_recording(**fixed) for row in found]

    def pairs(self, left: Mapping[str, Any], right: Mapping[str, Any], **fixed: Any) -> Iterator[tuple[Row, Row]]:
        """Rows of one recording that agree in everything but what `left` and `right` say."""
        for found in self._by_recording(**fixed):
            keyed = {_key(row, right): row for row in found if _matches(row, right)}
            for row in found:
                if _matches(row, left) and _key(row, left) in keyed:
                    yield row, keyed[_key(row, left)]

    def simulated(self, model: str, mode: str, **question: Any) -> Evidence:
        """A simulated step at the text's bandwidth."""
        machine = dataclasses.replace(self.machine, copy_gb_s=TEXT_GB_S)
        step = simulate_step(DecodeModel(self.shapes[model], **question), machine, mode=mode)
        asked = ", ".join(f"{name} {value:g}" for name, value in question.items())
        what = f"{model}, {mode}{', ' + asked if asked else ''}, {TEXT_GB_S:,.0f} GB/s"
        return Evidence(Kind.SIMULATED, f"{step.wall_ms:.2f} ms", what)

    def _by_recording(self, **fixed: Any) -> Iterator[list[Row]]:
        for recording in self.recordings:
            if recording.provenance.kind is Kind.RECORDED and recording.provenance.gpu:
                yield [
                    row for row in recording.rows
                    if not row.chunk and row.query_len == 1 and not row.emulated and _matches(row, fixed)
                ]  # fmt: skip


def _matches(row: Row, fixed: Mapping[str, Any]) -> bool:
    return all(getattr(row, name) == value for name, value in fixed.items())


def _key(row: Row, left_out: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("model", "backend", "mode", "compile", "batch", "context")
    return tuple(getattr(row, name) for name in names if name not in left_out)


def _recorded(value: str, how: str) -> Evidence:
    return Evidence(Kind.RECORDED, value, how)


def _span(values: Iterable[float], form: str) -> str:
    """The least and the greatest value, or the one that all are when printed."""
    found = sorted(values)
    low, high = form.format(found[0]), form.format(found[-1])
    return low if low == high else f"{low} to {high}"


def _where(rows: Sequence[Row]) -> str:
    models = ", ".join(dict.fromkeys(row.model for row in rows))
    batches = sorted({row.batch for row in rows})
    backends = ", ".join(dict.fromkeys(row.backend for row in rows))
    at = f"batch {batches[0]}" if len(batches) == 1 else f"batch {batches[0]} to {batches[-1]}"
    return f"{models}; {backends}; {at}; {len(rows)} rows"


# --- the 8B table: 5.5 → 5.1 / 5.2 / 5.0 ms ------------------------------------------------------------------------

_EIGHT = "llama-3.1-8b"


def _step_8b(claimed_ms: float, mode: str, compile: str) -> Judge:
    def judge(known: Evidences) -> tuple[str, str, Sequence[Evidence], Sequence[Evidence]]:
        simulated = [known.simulated(_EIGHT, mode)] if compile == "NONE" else []
        rows = known.rows(model=_EIGHT, mode=mode, compile=compile, batch=1)
        if not rows:
            note = "" if simulated else " The simulated step knows no compiler."
            return OPEN, f"Llama-3.1-8B has no recorded rows like this.{note}", [], simulated
        best = min(rows, key=lambda row: row.p50_ms)
        evidence = [
            _recorded(f"{best.p50_ms:.2f} ms", f"{best.backend}, context {best.context}, the fastest of {len(rows)}")
        ]
        scaled = _at_text_bandwidth(best)
        if scaled is not None:
            simulated.append(Evidence(Kind.SIMULATED, f"{scaled:.2f} ms", "the recorded step, its data at 3,350 GB/s"))
        value = best.p50_ms if scaled is None else scaled
        near = abs(value - claimed_ms) <= TOLERANCE * claimed_ms
        return (
            HOLDS if near else FAILS, f"{'Within' if near else 'Not within'} {TOLERANCE:.0%} of it, its data slowed "
            "down to the text's bandwidth where the floor was recorded.", evidence, simulated,
        )  # fmt: skip

    return judge


def _at_text_bandwidth(row: Row) -> float | None:
    """A recorded step's milliseconds if its bytes moved at the text's bandwidth; too long where launches hide them."""
    if row.floor_ms is None or row.gb_s is None:
        return None
    return row.p50_ms - row.floor_ms + row.gb_s * row.p50_ms / TEXT_GB_S


def _overhead_8b(known: Evidences) -> tuple[str, str, Sequence[Evidence], Sequence[Evidence]]:
    shares = _gains(known, model=_EIGHT, batch=1, compile="NONE")
    none, full = (known.simulated(_EIGHT, mode) for mode in ("NONE", "FULL"))
    if not shares:
        return OPEN, "It needs an eager row and a graph row of Llama-3.1-8B.", [], [none, full]
    values = [share for _, _, share in shares]
    holds = all(0.07 <= value <= 0.12 for value in values)
    evidence = [_recorded(_span(values, "{:.0%}"), "(NONE - FULL) / NONE; " + _where([a for a, _, _ in shares]))]
    why = "Counted as holding from 7 to 12 %; 0 % where no difference is shown."
    return HOLDS if holds else FAILS, why, evidence, [none, full]


def _gains(known: Evidences, **fixed: Any) -> list[tuple[Row, Row, float]]:
    """(eager, one graph, share of the eager step that the graph saves); 0 where no difference is shown."""
    out = []
    for none, full in known.pairs({"mode": "NONE"}, {"mode": "FULL"}, **fixed):
        alike = stats.no_difference(full.measurement(Kind.RECORDED), none.measurement(Kind.RECORDED))
        out.append((none, full, 0.0 if alike else (none.p50_ms - full.p50_ms) / none.p50_ms))
    return out


# --- small models in 4 bits: 1.5 → 1.0 ms --------------------------------------------------------------------------


def _int4(known: Evidences) -> tuple[str, str, Sequence[Evidence], Sequence[Evidence]]:
    simulated = [
        known.simulated(name, mode, weight_bits=4)
        for name in ("llama-3.2-1b", "llama-3.2-3b")
        for mode in ("NONE", "FULL")
    ]
    return OPEN, "The engine has no INT4 weights yet, so that nothing could be recorded.", [], simulated


def _third(known: Evidences) -> tuple[str, str, Sequence[Evidence], Sequence[Evidence]]:
    why = (
        "It is the same unrecorded step. The words are off in any case: 1.5 to 1.0 ms is a third less time, and 1.5 "
        "times the speed."
    )
    return OPEN, why, [], []


# --- graphs and launches -------------------------------------------------------------------------------------------


def _piecewise(known: Evidences) -> tuple[str, str, Sequence[Evidence], Sequence[Evidence]]:
    """The share of FULL's gain that PIECEWISE has, on every step of which all three were recorded in one recording."""
    found: list[tuple[Row, float]] = []
    fulls = {id(none): full for none, full, share in _gains(known) if share > 0}
    for none, piece in known.pairs({"mode": "NONE"}, {"mode": "PIECEWISE"}):
        full = fulls.get(id(none))
        if full is not None:
            found.append((none, (none.p50_ms - piece.p50_ms) / (none.p50_ms - full.p50_ms)))
    simulated = [known.simulated("smollm2-135m", mode) for mode in ("NONE", "PIECEWISE", "FULL")]
    if not found:
        return OPEN, "No recording has NONE, PIECEWISE and FULL of one step and shows a gain of FULL.", [], simulated
    shares = [share for _, share in found]
    middle = statistics.median(shares)
    holds = abs(middle - 0.8) <= TOLERANCE / 2
    evidence = [_recorded(f"{middle:.0%} ({_span(shares, '{:.0%}')})", "(NONE - PIECEWISE) / (NONE - FULL); "
                          + _where([row for row, _ in found]))]  # fmt: skip
    return HOLDS if holds else FAILS, "Counted as holding when the median is 70 to 90 %.", evidence, simulated


def _launch_cost(known: Evidences) -> tuple[str, str, Sequence[Evidence], Sequence[Evidence]]:
    costs: dict[str, list[float]] = {}
    for row in known.rows():
        for kind, us in row.launch_cost_us.items():
            if kind not in ("graph", "copy"):
                costs.setdefault(kind, []).append(us)
    if not costs:
        return OPEN, "No row carries launch costs.", [], []
    evidence = [
        _recorded(_span(us, "{:.1f}") + " µs", f"one launch of kind {kind}, alone") for kind, us in costs.items()
    ]
    outside = [kind for kind, us in costs.items() if not (min(us) >= 5 and max(us) <= 10)]
    if not outside:
        return HOLDS, "Every kind of launch lies in the range.", evidence, []
    inside = [kind for kind in costs if min(costs[kind]) <= 10 and max(costs[kind]) >= 5]
    why = f"Outside 5 to 10 µs, at least in part: {', '.join(outside)}. Inside, at least in part: "
    why += f"{', '.join(inside) or 'none'}. What Python does around a launch counts here."
    return FAILS, why, evidence, []


def _eager_launches(least: int, why: str) -> Judge:
    def judge(known: Evidences) -> tuple[str, str, Sequence[Evidence], Sequence[Evidence]]:
        rows = [row for row in known.rows(mode="NONE", compile="NONE") if row.launches]
        if not rows:
            return OPEN, "No eager step with counted launches was recorded.", [], []
        counts = [row.launches or 0 for row in rows]
        evidence = [_recorded(_span(counts, "{:.0f}") + " launches", _where(rows))]
        return HOLDS if min(counts) >= least else FAILS, why, evidence, []

    return judge


def _replay(known: Evidences) -> tuple[str, str, Sequence[Evidence], Sequence[Evidence]]:
    rows = [
        row for row in known.rows(mode="FULL", compile="NONE") if "launch" in row.phases_us and row.graph_launches == 1
    ]
    if not rows:
        return OPEN, "No step in one graph was recorded.", [], []
    probe = [row.launch_cost_us["graph"] for row in rows if "graph" in row.launch_cost_us]
    phase = [row.phases_us["launch"] for row in rows]
    evidence = [_recorded(_span(phase, "{:.0f}") + " µs", f"host time of replay and LM head; {_where(rows)}")]
    if probe:
        evidence.insert(0, _recorded(_span(probe, "{:.1f}") + " µs", "a graph of one node, alone"))
    holds = max(phase) <= 15
    why = "A replay of one node costs that, a replay of hundreds of nodes many times as much: every node adds to it."
    return HOLDS if holds else FAILS, why, evidence, []


def _dominant(known: Evidences) -> tuple[str, str, Sequence[Evidence], Sequence[Evidence]]:
    """Eager steps of small models whose device work, as FULL's device time says, is below a millisecond or near it."""
    found = [
        (a, share) for a, b, share in _gains(known, compile="NONE") if b.device_us is not None and b.device_us < 1500
    ]
    if not found:
        return OPEN, "No pair of an eager step and a graph with less than 1.5 ms on the device was recorded.", [], []
    shares = [share for _, share in found]
    evidence = [_recorded(_span(shares, "{:.0%}"), "(NONE - FULL) / NONE; " + _where([row for row, _ in found]))]
    why = "Counted as holding when graphs take more than half of every such step away (below 1.5 ms on the device)."
    return HOLDS if min(shares) > 0.5 else FAILS, why, evidence, []


def _scheduler(known: Evidences) -> tuple[str, str, Sequence[Evidence], Sequence[Evidence]]:
    rows = [row for row in known.rows() if "schedule" in row.phases_us]
    if not rows:
        return OPEN, "No row carries the time of its scheduler.", [], []
    schedule = [row.phases_us["schedule"] for row in rows]
    one = [row.phases_us["schedule"] for row in rows if row.batch == 1]
    around = [
        1e3 * row.p50_ms - row.phases_us["launch"] - row.phases_us["sample"] for row in rows
        if {"launch", "sample"} <= set(row.phases_us)
    ]  # fmt: skip
    evidence = [_recorded(_span(schedule, "{:.0f}") + " µs", f"schedule; {_where(rows)}")]
    if one:
        evidence.append(_recorded(_span(one, "{:.0f}") + " µs", "schedule at batch 1"))
    if around:
        evidence.append(_recorded(_span(around, "{:.0f}") + " µs", "all host work around the forward, same rows"))
    near = abs(statistics.median(schedule) - 500) <= TOLERANCE * 500
    why = "It is no constant: it grows with the batch. Counted as holding when the median is 0.4 to 0.6 ms."
    return HOLDS if near else FAILS, why, evidence, []


# --- bytes over bandwidth ------------------------------------------------------------------------------------------


def _bytes_over_bandwidth(name: str, tp: int) -> Judge:
    def judge(known: Evidences) -> tuple[str, str, Sequence[Evidence], Sequence[Evidence]]:
        model = DecodeModel(known.shapes[name], context=1, tp=tp)
        weights = sum(k.bytes for k in kernels_of(model, known.machine) if k.role == "gemm")
        floor = limits.floor_ms(weights, TEXT_GB_S)
        where = f"on each of {tp} GPUs, nothing counted for their exchange" if tp > 1 else "on one GPU"
        simulated = [
            Evidence(Kind.SIMULATED, f"{floor:.2f} ms", f"{weights / 1e9:.2f} GB at {TEXT_GB_S:,.0f} GB/s, {where}"),
            known.simulated(name, "FULL", tp=tp),
        ]
        near = abs(floor - 5.0) <= TOLERANCE * 5.0
        rows = [] if tp > 1 else known.rows(model=name, mode="FULL", batch=1)
        recorded = (
            [_recorded(f"{min(r.p50_ms for r in rows):.2f} ms", "FULL, the fastest; " + _where(rows))] if rows else []
        )
        why = "Computed: weights over bandwidth, which no measurement of ours enters."
        return HOLDS if near else FAILS, why, recorded, simulated

    return judge


# --- backends ------------------------------------------------------------------------------------------------------


def _backends(known: Evidences) -> tuple[str, str, Sequence[Evidence], Sequence[Evidence]]:
    best: list[tuple[float, Row, Row]] = []
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for i, recording in enumerate(known.recordings):
        one = dataclasses.replace(known, recordings=(recording,))
        for row in one.rows(mode="FULL", compile="NONE"):
            groups.setdefault((i, row.model, row.batch, row.context), []).append(row)
    for rows in groups.values():
        slow, fast = min(rows, key=lambda r: r.tok_s), max(rows, key=lambda r: r.tok_s)
        if slow.backend != fast.backend:
            best.append((fast.tok_s / slow.tok_s, fast, slow))
    if not best:
        return OPEN, "No step was recorded with two backends.", [], []
    ratio, fast, slow = max(best, key=lambda item: item[0])
    evidence = [
        _recorded(_span([r for r, _, _ in best], "{:.1f}") + " times",
                  "fastest over slowest backend in tokens/s, FULL; " + _where([row for _, row, _ in best])),
        _recorded(f"{fast.tok_s:,.0f} and {slow.tok_s:,.0f} tokens/s",
                  f"{fast.backend} and {slow.backend}, {fast.model}, batch {fast.batch}, context {fast.context}"),
    ]  # fmt: skip
    names = sorted({row.backend for rows in groups.values() for row in rows})
    why = f"Counted as holding from a difference of 20 % on. Recorded backends: {', '.join(names)}."
    return HOLDS if ratio >= 1 + TOLERANCE else FAILS, why, evidence, []


def _no_number(known: Evidences) -> tuple[str, str, Sequence[Evidence], Sequence[Evidence]]:
    return FOLKLORE, "The texts give no number, so that nothing decides it: what is large depends on who asks.", [], []


CHAPTER, NOTE = "chapter on vLLM", "note on backends and graphs"

CLAIMS: tuple[Claim, ...] = (
    Claim("8b-eager", NOTE, "A decode step of an 8B model takes 5.5 ms without graphs and compiler.", "5.5 ms",
          "NONE, not compiled, batch 1", _step_8b(5.5, "NONE", "NONE")),
    Claim("8b-graphs", NOTE, "With CUDA graphs alone it takes 5.1 ms.", "5.1 ms",
          "FULL, not compiled, batch 1", _step_8b(5.1, "FULL", "NONE")),
    Claim("8b-compile", NOTE, "With torch.compile alone it takes 5.2 ms.", "5.2 ms",
          "NONE, VLLM_COMPILE, batch 1", _step_8b(5.2, "NONE", "VLLM_COMPILE")),
    Claim("8b-both", NOTE, "With both it takes 5.0 ms.", "5.0 ms",
          "FULL, VLLM_COMPILE, batch 1", _step_8b(5.0, "FULL", "VLLM_COMPILE")),
    Claim("8b-overhead", NOTE, "Of an 8B model's eager step 9 to 10 % is CPU overhead.", "9-10 %",
          "(NONE - FULL) / NONE at batch 1", _overhead_8b),
    Claim("8b-data", NOTE, "Reading an 8B model's weights takes about 5 ms at 3,350 GB/s.", "~5 ms",
          "bytes of the weights over the bandwidth", _bytes_over_bandwidth(_EIGHT, 1)),
    Claim("70b-tp8-data", NOTE, "A 70B model on eight GPUs takes about 5 ms for its weights, too.", "~5 ms",
          "an eighth of the bytes over the bandwidth", _bytes_over_bandwidth("llama-3.1-70b", 8)),
    Claim("int4-step", NOTE, "Graphs take a step of a 1-3B model in INT4 from 1.5 to 1.0 ms.", "1.5 → 1.0 ms",
          "NONE and FULL with 4-bit weights", _int4),
    Claim("int4-third", NOTE, "That is a speedup of 33 %.", "33 %", "the same rows", _third),
    Claim("piecewise-80", NOTE, "PIECEWISE has about 80 % of what a FULL graph gains.", "~80 %",
          "(NONE - PIECEWISE) / (NONE - FULL)", _piecewise),
    Claim("launch-cost", NOTE, "One kernel launch costs the CPU 5 to 10 µs.", "5-10 µs",
          "host time of launches alone, by kind", _launch_cost),
    Claim("replay-cost", NOTE, "Launching a whole graph costs about 10 µs.", "~10 µs",
          "host time of a replay", _replay),
    Claim("kernels-50", NOTE, "A decode step has 50 kernels or more.", "50+",
          "launches of an eager step, from a trace", _eager_launches(50, "It is a lower bound, and a low one.")),
    Claim("kernels-hundreds", CHAPTER, "A forward pass is hundreds or thousands of small launches.", "100s-1,000s",
          "launches of an eager step, from a trace", _eager_launches(100, "Hundreds; thousands were not seen.")),
    Claim("scheduler", NOTE, "The scheduler's Python takes about 0.5 ms per step.", "~0.5 ms",
          "the phase `schedule` of a step", _scheduler),
    Claim("overhead-dominates", NOTE, "Where the GPU needs less than a millisecond, CPU overhead is most of the step.",
          "more than half", "(NONE - FULL) / NONE of small models", _dominant),
    Claim("backend-throughput", CHAPTER, "The right backend changes throughput a lot on the same card.", "a lot",
          "tokens/s per backend, same model and batch", _backends),
    Claim("graphs-clearly", CHAPTER, "Graphs improve small models and small batches clearly.", "clearly",
          "no number is given", _no_number),
)  # fmt: skip


def findings(
    recordings: Iterable[Recording], shapes: Mapping[str, ModelConfig], machine: Machine = H200
) -> list[Finding]:
    """Every claim judged by what is recorded.

    Args:
        recordings: of GPUs; rows of a CPU and LIVE ones are passed over. shapes: by name, with the claims' models.
    """
    known = Evidences(tuple(recordings), shapes, machine)
    out = []
    for claim in CLAIMS:
        verdict, why, recorded, simulated = claim.judge(known)
        out.append(Finding(claim, verdict, why, tuple(recorded), tuple(simulated)))
    return out
