"""The cards of chapter 02: a learner's order on a drifting machine, and the myth check. Refuses to measure."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from labkit.lab import trial, ui
from labkit.lab.cards import Card, paragraph
from labkit.lab.ch02.exercises import ROTATION
from labkit.lab.ch02.simulated import ORDERS, drifting, turns_of
from labkit.lab.exercises import check
from labkit.lab.myths import COMPUTED, UNTESTED, Myth, myth_card, recorded_myths
from labkit.lab.progress import solutions_wanted
from labkit.measure import stats
from labkit.measure.provenance import Kind
from labkit.measure.stats import NOISE_FLOOR, Measurement

ROUNDS, SAMPLES, DRIFT = 2, 25, 0.30


def try_rotation(answer: Callable[..., Any]) -> Card:
    """Two equal things on a machine that drifts, measured in the learner's order and in three known ones."""
    fn = ROTATION.solution if solutions_wanted() else answer
    if not check(ROTATION, fn).passed:
        return Card("orders: write rotation first", paragraph("Write `rotation` first; then it is tried here."))
    mine = list(trial.call(fn, (["A", "B"], ROUNDS)).value)
    rows = []
    for name, turns in [*((order, turns_of(order, ROUNDS)) for order in ORDERS), ("yours", mine)]:
        taken = drifting(turns, SAMPLES, DRIFT, random.Random(2))
        a, b = (stats.summary([us for us, _ in taken[who]]).p50 for who in "AB")
        rows.append({"order": ui.escape(name), "turns": " ".join(turns), "ratio": f"{b / a:.3f}"})
    head = [("order", "order"), ("turns", "turns"), ("ratio", "median of B / median of A#")]
    said = (
        f"SIMULATED: A and B are equal, and the machine gets {DRIFT:.0%} slower from first to last. A ratio of 1 is "
        "right."
    )
    return Card(f"orders: {len(rows)} tried", ui.table("Two equal things", head, rows) + paragraph(said, quiet=True))


def myths() -> Card:
    """The claims of the source texts that this chapter touches."""
    less, times = (1.5 - 1.0) / 1.5, 1.5 / 1.0
    own = Myth(
        "From 1.5 to 1.0 ms is a speedup of 33 %.",
        f"It is {less:.0%} less time and {times:.1f} times the speed. Both follow from the two numbers; “33 % speedup” "
        "mixes them. Whether a small model in 4 bits takes these times was not recorded.",
        "does not hold", COMPUTED, "the cell “Less time, or faster?”, the self-check",
    )  # fmt: skip
    table = Myth(
        "Graphs alone, compilation alone and both give 5.1, 5.2 and 5.0 ms.",
        f"The text gives neither samples nor spread. The three lie within 4 % of each other, and below "
        f"{NOISE_FLOOR:.0%} this "
        "lab says “no difference shown”. No step of that model was recorded so far to tell them apart.",
        "open", UNTESTED, "exercise 02.2",
    )  # fmt: skip
    return myth_card(
        [own, table, *recorded_myths({"scheduler": "the panel, source RECORDED: see samples, not one number"})]
    )


def is_shown(a_us: list[float], b_us: list[float]) -> bool:
    """What labkit itself says of two lists of LIVE samples."""
    a, b = (Measurement(Kind.LIVE, tuple(us)) for us in (a_us, b_us))
    return not stats.no_difference(a, b)
