"""Two pinned runs beside each other, in one sentence: how many times, or why no ratio is taken. Knows no chapter."""

from __future__ import annotations

import dataclasses

from labkit.errors import LabkitError
from labkit.lab.runs import machine
from labkit.measure.provenance import Kind, Provenance
from labkit.measure.stats import NOISE_FLOOR, Measurement, ratio


@dataclasses.dataclass(frozen=True)
class Side:
    """One run. letter: what the sentence calls it. quantity: "" for a time, else what the samples are ("memory")."""

    letter: str
    number: int
    provenance: Provenance
    measurement: Measurement | None
    quantity: str = ""

    @property
    def name(self) -> str:
        return self.letter if self.letter.startswith("run ") else f"{self.letter} (run {self.number})"


def compare(a: Side, b: Side) -> str:
    """How `b` stands to `a`.

    Numbers of two kinds, two machines or two quantities give no ratio. A difference below the noise of the runs, or
    below 5 %, is none; a model's numbers have no noise, so there every difference counts.
    """
    kinds = a.provenance.kind, b.provenance.kind
    if kinds[0] != kinds[1]:
        return (
            f"No ratio: {a.name} is {kinds[0]}, {b.name} is {kinds[1]}, and a ratio never mixes the two. "
            "Pin two of one kind."
        )
    simulated = kinds[0] is Kind.SIMULATED
    if not simulated and a.provenance.device != b.provenance.device:
        where = f"{a.name} ran on {machine(a.provenance)}, {b.name} on {machine(b.provenance)}"
        return f"No ratio: {where}, so it would compare machines."
    if a.measurement is None or b.measurement is None or a.quantity != b.quantity:
        return f"No ratio: {a.name} and {b.name} have no number in common that a ratio could be taken of."
    try:
        found = ratio(a.measurement, b.measurement, floor=0.0 if simulated else NOISE_FLOOR)
    except LabkitError as error:
        return f"No ratio: {error.why}."
    if not found.shown:
        takes = _times(a, f"{found.value:.2f} ({found.low:.2f}–{found.high:.2f})", b)
        why = "noise, or less than 5 %"
        if simulated:
            why = "the model gives the same for both" if found.low == found.high else "each spreads over more than that"
        return f"No difference shown: {takes}; {why}."
    if found.value >= 1:
        return f"{_times(a, f'{found.value:.2f}', b)}{_between(found.low, found.high)}."
    return f"{_times(b, f'{1 / found.value:.2f}', a)}{_between(1 / found.high, 1 / found.low)}."


def since(moved: str, old: Side, new: Side) -> str:
    """What was set otherwise than in the run before, and how the two stand to each other where a ratio may be taken."""
    said = compare(old, new)
    there = "" if said.startswith("No ratio") else said
    if not moved:
        return f"Nothing was set otherwise. {there}" if there else ""
    return f"{moved}: {there[0].lower() + there[1:]}" if there else f"{moved}."


def _times(more: Side, times: str, less: Side) -> str:
    if more.quantity:
        return f"{more.letter} has {times} times the {more.quantity} of {less.letter}"
    return f"{more.letter} takes {times} times as long as {less.letter}"


def _between(low: float, high: float) -> str:
    """The interval; a single number, as a model gives it, has none."""
    return f" ({low:.2f}–{high:.2f})" if low != high else ""
