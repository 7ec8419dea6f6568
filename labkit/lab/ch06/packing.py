"""The packed step by the rules alone: who runs, where tokens lie, how much of a rectangle would be waste. No times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.lab.ch06.batch import (
    EXAMPLE,
    Share,
    packed,
    query_start_loc,
    read_requests,
    schedule,
    scores,
    write_requests,
)
from labkit.lab.fields import Choice, Control, Number, Text
from labkit.lab.runs import Context, Outcome, simulated

RULES = "rules of labkit"


def batch_controls() -> list[Control]:
    """What a step is made of."""
    return [
        Text("requests", "Requests", EXAMPLE, parse=read_requests, placeholder=EXAMPLE, write=write_requests,
             help="New tokens @ tokens in the KV cache, one request after the other. 1@40 decodes, 512@0 is a prompt."),
        Number("budget", "Token budget", 1, 8192, 1024, help="max_num_batched_tokens: what one step may compute."),
        Choice("block_size", "Page size", [(f"{n} tokens", n) for n in (16, 4, 8, 64)],
               help="Tokens in a page of the KV cache."),
    ]  # fmt: skip


class PackingSource:
    """The scheduler's step, and the scores that each way computes."""

    kind, label = "SIMULATED", RULES

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        return batch_controls()

    def cost(self, values: Mapping[str, Any]) -> str:
        return "Run asks scheduler, block pool and slot mapping; nothing is computed and nothing timed."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        wanted = sum(new for new, _ in values["requests"])
        over = wanted - values["budget"]
        fits = f"{over:,} of them wait for a later step." if over > 0 else "All of them fit into one step."
        return [f"{wanted:,} new tokens are wanted, and the budget is {values['budget']:,}. {fits}"]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        shares, left = schedule(values["requests"], values["budget"], values["block_size"])
        found = scores(shares)
        useful, padded = found["useful"], found["padded"]
        waste = 100 * (1 - useful / padded)
        costs = [useful, useful, padded] if is_mixed(shares) else [useful, padded]
        texts = [f"{n:,}" for n in costs]
        texts[-1] += f" ({waste:.0f} % waste)"
        data = {
            **packed(shares, left), "bounds": [str(n) for n in query_start_loc(shares)], "costs": costs,
            "ways": ways(shares), "texts": texts, "unit": "scores for one head (a query times a key)", "spread": None,
            "block_size": values["block_size"],
        }  # fmt: skip
        row = {**columns(shares), "waste": waste, "unified_us": None, "split_us": None, "padded_us": None,
               "verdict": None}  # fmt: skip
        made = simulated(RULES, budget=values["budget"], block_size=values["block_size"])
        return Outcome(data, row, summary(shares, left, waste, values["block_size"]), made, None,
                       notes(shares))  # fmt: skip


def ways(shares: Sequence[Share]) -> list[str]:
    """How the step could run: two calls only where it holds both shapes."""
    return ["unified", "split", "padded"] if is_mixed(shares) else ["unified", "padded"]


def is_mixed(shares: Sequence[Share]) -> bool:
    return 0 < sum(share.is_decode for share in shares) < len(shares)


def columns(shares: Sequence[Share]) -> dict[str, Any]:
    """What the table says of a step."""
    decodes = sum(share.is_decode for share in shares)
    return {"num_tokens": sum(s.tokens for s in shares), "decodes": decodes, "chunks": len(shares) - decodes}


def summary(shares: Sequence[Share], left: Sequence[str], waste: float, block_size: int) -> str:
    """The step in a sentence, and why padding it would be a waste or not."""
    sizes = ", ".join(f"{s.name}: {s.tokens}" for s in shares)
    rest = [f"{s.waits:,} tokens of {s.name}" for s in shares if s.waits] + [f"{name} entirely" for name in left]
    waits = f" The budget is used up, so {' and '.join(rest)} must wait." if rest else ""
    longest = max(shares, key=lambda s: s.tokens)
    why = (
        f"as every request would be padded to the {longest.tokens:,} tokens of {longest.name}"
        if len(shares) > 1 and waste >= 1
        else "as there is next to nothing to pad"
    )
    total, pages = sum(s.tokens for s in shares), sum(len(s.blocks) for s in shares)
    return (
        f"One step of {total:,} token{'s' * (total != 1)} ({sizes}), with KV in {pages} page{'s' * (pages != 1)} of "
        f"{block_size}.{waits} Packed, none is padding; as a rectangle "
        f"{waste:.0f} % of the scores would be computed for nothing, {why}."
    )


def notes(shares: Sequence[Share]) -> tuple[str, ...]:
    """The numbers that a kernel is given, where they are short enough to be read."""
    out = [f"query_start_loc = {query_start_loc(shares)}, seq_lens = {[s.end for s in shares]}."]
    for share in shares:
        slots = list(share.slots)
        said = f"{slots}" if len(slots) <= 8 else f"[{', '.join(map(str, slots[:3]))}, …, {slots[-1]}]"
        table = list(share.blocks)
        pages = f"{table}" if len(table) <= 8 else f"[{', '.join(map(str, table[:3]))}, …, {table[-1]}]"
        out.append(f"{share.name}: block table {pages}, slots of its new tokens {said}.")
    return tuple(out)
