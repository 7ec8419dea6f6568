"""Memory by formula and rounding by imitation, without a GPU and without torch. Refuses to guess a time."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from labkit.lab.ch03 import attention, memory
from labkit.lab.ch03.contenders import NAIVE, TILED
from labkit.lab.ch03.outcome import Curve, outcome
from labkit.lab.fields import Choice, Control
from labkit.lab.runs import Context, Outcome, simulated

LENGTHS = (1024, 4096, 16_384, 65_536, 131_072)
SHORTEST = 64
HEADS = (1, 4, 8, 32)
HEAD_SIZE = 64
#: Rounding is imitated at this length and for so many heads at most: it is computed, and longer would take long.
ERROR_AT, ERROR_HEADS = 512, 4


class FormulaSource:
    """What naive and tiled attention store, and how far their rounding takes them from the exact result."""

    kind, label = "SIMULATED", "formulas and rounding"

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        return [
            Choice("backend", "Attention", [("naive: all scores stored", NAIVE), ("tiled: online softmax", TILED)],
                   help="Naive attention stores one number for each pair of tokens. Tiled attention keeps tiles of "
                   "scores on the chip."),
            Choice("dtype", "Format", [(d, d) for d in ("float32", "bfloat16", "float16")], "bfloat16",
                   help="Number format. float32 has 24 significant bits, float16 11, bfloat16 8."),
            Choice("length", "Longest", [(f"{n:,} tokens", n) for n in LENGTHS], 16_384,
                   help=f"Longest prompt: lengths from {SHORTEST} up to this one, each twice the one before."),
            Choice("heads", "Heads", [(str(n), n) for n in HEADS], 4, help=f"Of {HEAD_SIZE} numbers each."),
        ]  # fmt: skip

    def cost(self, values: Mapping[str, Any]) -> str:
        return "Run computes it at once. There is no time in it: a formula does not know your machine."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        item = memory.ITEMSIZE[values["dtype"]]
        if values["backend"] == NAIVE:
            return [f"heads × L² × {item} bytes of scores, and heads × L × {HEAD_SIZE} × {item} bytes of output."]
        return [
            f"heads × L × {memory.STATISTICS} bytes of running maximum and sum, and heads × L × {HEAD_SIZE} × {item} "
            "bytes of output."
        ]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        way, dtype, heads = values["backend"], values["dtype"], values["heads"]
        lengths = [n for n in (SHORTEST << i for i in range(20)) if n <= values["length"]]
        law = memory.naive_bytes if way == NAIVE else memory.tiled_bytes
        held = [law(n, heads, HEAD_SIZE, memory.ITEMSIZE[dtype]) for n in lengths]
        computed = min(heads, ERROR_HEADS)
        errors, naive_error, same = rounding(way, dtype, computed)
        curve = Curve(
            way, dtype, heads, lengths, held=held, errors=errors, naive_error=naive_error, same_bits=same,
            error_at=ERROR_AT,
        )  # fmt: skip
        made = simulated(
            "attention memory and rounding", head_size=HEAD_SIZE, statistics_bytes=memory.STATISTICS, error_at=ERROR_AT,
            error_heads=computed,
        )  # fmt: skip
        return outcome(curve, made)


@functools.lru_cache(maxsize=32)
def rounding(way: str, dtype: str, heads: int) -> tuple[list[float], float, float | None]:
    """The largest error of each head, that of naive attention, and the share of equal bits (None for naive)."""
    random = np.random.default_rng(ERROR_AT)
    q, k, v = (
        attention.rounded(random.standard_normal((heads, ERROR_AT, HEAD_SIZE), np.float32), dtype) for _ in range(3)
    )
    exact = attention.exact_numpy(q, k, v)
    plain = attention.emulated(NAIVE, q, k, v, dtype)
    out = plain if way == NAIVE else attention.emulated(TILED, q, k, v, dtype)
    errors = [float(e) for e in np.abs(out - exact).max((1, 2))]
    same = None if way == NAIVE else float((out == plain).mean())
    return errors, float(np.abs(plain - exact).max()), same
