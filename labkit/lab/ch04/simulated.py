"""Programs and multiprocessors by the engine's own rules for tiles and splits, times by a model. Refuses to measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.attention.kernels.tiles import MAX_SPLITS
from labkit.lab.ch04.outcome import Found, call_words, outcome, plural
from labkit.lab.fields import Choice, Control, Number
from labkit.lab.runs import Context, Outcome, simulated
from labkit.simulate.occupancy import CHIPS, RESIDENT, Call, Chip, Simulated, curve, simulate

#: query heads / KV heads, each of 128.
HEADS = ((8, 8), (32, 8), (64, 8), (32, 32), (16, 1))
KV_LENS = tuple(1 << i for i in range(7, 18))
MODEL = (
    "The time is a model: two places on each SM, a program in one of them reads at 1 / (2 · SMs) of the bandwidth. "
    "It was never compared with a measurement; the numbers of programs and splits are those of the engine's rules."
)


class RulesSource:
    """TRITON_ATTN's plan of a call on a GPU that need not be here."""

    kind, label = "SIMULATED", "tiles and waves"

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        kv_len = values.get("kv_len", 32_768)
        most = min(2048, kv_len)
        return [
            Choice("gpu", "GPU", [(f"{c.name}: {c.sms} SMs, {c.gb_s:,.0f} GB/s", c.name) for c in CHIPS], "H200",
                   help="Data sheets, and for the H200's bandwidth a recorded copy. Only its rules and numbers are "
                        "needed."),
            Number("kv_len", "KV length", KV_LENS[0], KV_LENS[-1], 32_768, points=KV_LENS, unit="tokens",
                   help="Keys that a request's last token sees: its new tokens and all before them."),
            Number("q_len", "New tokens", 1, most, 1, help="What each request brings: 1 is a decode, more is a chunk."),
            Number("batch", "Requests", 1, 64, 1, help="How many requests the call serves."),
            Choice("heads", "Heads", [(f"{q} query, {kv} KV", (q, kv)) for q, kv in HEADS], (32, 8),
                   help="Of 128 numbers each. Query heads that share a KV head share one read of it, in one program."),
            Number("num_splits", "Splits", 0, MAX_SPLITS, 1,
                   help="How many programs share the keys of one. 0 leaves the choice to the engine's rule."),
        ]  # fmt: skip

    def cost(self, values: Mapping[str, Any]) -> str:
        return "Run computes it at once."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        call, chip = _asked(values)
        moved = 2 * call.batch * call.kv_len * call.num_kv_heads * call.head_size * call.itemsize
        return [
            f"K and V of this call are {moved / 2**20:,.1f} MiB; at full bandwidth they take "
            f"{moved / chip.gb_s / 1e3:,.1f} µs.",
            MODEL,
        ]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        call, chip = _asked(values)
        made = simulate(call, chip, values["num_splits"])
        found = Found(
            f"TRITON_ATTN's rules, "
            f"{chip.name}", call_words(call.batch, call.q_len, call.kv_len), call.batch, call.q_len,
            call.kv_len, call.num_kv_heads, made.plan.splits, made.plan.programs, made.us, curve(call, chip), chip.sms,
            made.per_sm,
        )  # fmt: skip
        origin = simulated(
            "tiles and waves", gpu=chip.name, sms=chip.sms, gb_s=chip.gb_s, tflops=chip.tflops,
            kernel_us=chip.kernel_us, places_per_sm=RESIDENT,
        )  # fmt: skip
        tile = made.plan.tile
        notes = [
            f"Tile of {tile.block_m} query rows × {tile.block_n} keys: {call.group} query heads of a group fill "
            f"{min(call.q_len * call.group, tile.block_m)} of the rows.",
        ]
        if values["num_splits"] > made.plan.splits:
            notes.append(f"{values['num_splits']} splits were asked for; a split has at least one tile of keys.")
        if made.plan.launched > made.plan.working:
            notes.append(
                f"{made.plan.launched} programs are launched for each split, {made.plan.working} of them with rows to "
                "do: the grid is sized for any way the tokens may be spread over requests."
            )
        return outcome(found, origin, sentence(call, chip, made), notes=notes)


def _asked(values: Mapping[str, Any]) -> tuple[Call, Chip]:
    query_heads, kv_heads = values["heads"]
    kv_len = int(values["kv_len"])
    chip = next(c for c in CHIPS if c.name == values["gpu"])
    return Call(min(int(values["q_len"]), kv_len), kv_len, int(values["batch"]), query_heads, kv_heads), chip


def sentence(call: Call, chip: Chip, made: Simulated) -> str:
    """What came out, and why."""
    plan = made.plan
    counted = f"{plural(plan.programs, 'program')} for {chip.sms} SMs"
    if plan.splits > 1:
        counted = f"{plan.working:,} × {plan.splits} splits = {counted}"
    said = f"{counted}: {made.busy} are in use, {100 * made.busy / chip.sms:.0f} %, {made.us:,.1f} µs."
    if made.busy < chip.sms // 2:
        why = "the others have nothing to do, and each program reads at a fraction of one SM's speed"
    elif made.waves == 1 and plan.programs < chip.slots:
        why = f"fewer than the {chip.slots} that could run at once"
    elif made.waves == 1:
        why = "every place is taken once"
    else:
        rest = plan.programs % chip.slots
        why = f"{made.waves} waves of {chip.slots}, the last one with {rest or chip.slots} programs"
    if plan.splits > 1:
        why += f"; of the time {made.merge_us:.1f} µs are for merging"
    return f"{said} {why[0].upper()}{why[1:]}."
