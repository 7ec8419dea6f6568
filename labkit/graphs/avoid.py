"""What would have avoided a downgrade of the mode, and what the downgrade costs. Refuses to measure anything.

A warning that a mode was lowered is easily read over; what it takes to keep the mode, and what is lost without, is not.
Costs are looked up in recordings that the caller hands over. Where none holds both modes, it says "not measured".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.attention.interface import AttentionCGSupport as Tier
from labkit.config import CUDAGraphMode as Mode
from labkit.graphs.modes import Downgrade, Rule, downgrades

if TYPE_CHECKING:
    from labkit.measure.provenance import Provenance
    from labkit.measure.recordings import Recording, Row
    from labkit.measure.stats import Ratio

NOT_MEASURED = "not measured"
#: Rules whose remedy is another backend.
_BACKEND_RULES = (Rule.MIXED_BATCHES, Rule.NEVER_CAPTURED, Rule.QUERY_LEN)


@dataclasses.dataclass(frozen=True)
class Measured:
    """Two recorded rows that differ in their mode alone, and the ratio of their medians, `after` over `before`."""

    before: Row
    after: Row
    ratio: Ratio
    provenance: Provenance


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a downgrade does to one kind of step.

    steps: "decode" or "mixed". before, after: the runtime modes of such a step (NONE, PIECEWISE, FULL).
    measured: None where no recording holds both. A mixed step between PIECEWISE and NONE is measured on decode steps
    of the same number of tokens, and says so: in both modes its attention runs outside any graph.
    """

    steps: str
    before: Mode
    after: Mode
    measured: Measured | None = None

    @property
    def text(self) -> str:
        """One phrase, with where its number is from."""
        if self.measured is None:
            return f"{self.steps} steps ({self.before.name} → {self.after.name}): {NOT_MEASURED}"
        row, ratio = self.measured.after, self.measured.ratio
        what = (
            f"{self.steps} steps take {ratio.text} as long in {self.after.name} as in {self.before.name}"
            if ratio.shown
            else f"{self.steps} steps, {self.after.name} against {self.before.name}: {ratio.text}"
        )
        shape = f"{row.model}, {row.backend}, batch {row.batch}, context {row.context}"
        on = "measured on decode steps; " if self.steps == "mixed" else ""
        return f"{what} ({on}{shape}; {self.measured.provenance.label})"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `ratio` and what follows it are null where nothing was measured."""
        found = self.measured
        row = found.after if found else None
        return {
            "steps": self.steps, "before": self.before.name, "after": self.after.name,
            "ratio": found and found.ratio.value, "low": found and found.ratio.low, "high": found and found.ratio.high,
            "shown": found and found.ratio.shown, "model": row and row.model, "backend": row and row.backend,
            "batch": row and row.batch, "context": row and row.context,
            "kind": found and str(found.provenance.kind), "provenance": found and found.provenance.label,
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Avoidance:
    """A downgrade, the change that avoids it, and what it costs to leave it.

    change: one sentence. instead: the same as arguments of `resolve`; with these, this downgrade does not happen. Empty
    where nothing would do, and the sentence says so.
    """

    downgrade: Downgrade
    change: str
    instead: dict[str, Any]
    costs: tuple[Cost, ...]

    @property
    def cost(self) -> str:
        """The costs in words; "not measured" where none of them was."""
        if not any(cost.measured for cost in self.costs):
            return NOT_MEASURED
        return "; ".join(cost.text for cost in self.costs)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON: downgrade, change and cost in words, and the costs in numbers."""
        return {
            "downgrade": str(self.downgrade), "change": self.change, "cost": self.cost,
            "costs": [cost.as_dict() for cost in self.costs],
        }  # fmt: skip


def avoid(
    requested: Mode,
    tier: Tier,
    compiled: bool,
    query_len: int = 1,
    *,
    backend: str | None = None,
    pooling: bool = False,
    split: bool = True,
    breakable: bool = False,
    others: Mapping[str, Tier] | None = None,
    recordings: Sequence[Recording] = (),
    model: str | None = None,
    batch: int = 1,
) -> tuple[Avoidance, ...]:
    """One answer per downgrade in the trail of `resolve`, which takes the same arguments up to `breakable`.

    Args:
        backend: the attention backend's name; None where the question is about a tier and not about a backend.
        others: the other backends that could serve here, with their tiers (of a `Selection`, the usable candidates).
            None where the machine is not known; the remedy then names a tier and one backend that has it.
        recordings: where to look for costs, the preferred ones first; `measure.recordings.shipped()` is what there is.
        model: as rows name it; None takes the first that was recorded in both modes.
        batch: requests per step; the nearest recorded batch answers.

    Raises:
        ConfigError: FULL was asked for and the backend can never be captured.
    """
    made = downgrades(
        requested, tier, compiled, query_len, backend=backend or "the backend", pooling=pooling, split=split,
        breakable=breakable,
    )  # fmt: skip
    out = []
    for one in made:
        change, instead, able = _change(one, query_len, split if compiled else breakable, others)
        # A backend that cannot run the lost mode has no recording of it: one that can answers in its place.
        names = able if one.rule in _BACKEND_RULES else (backend,) if backend else None
        costs = []
        for steps, before, after in _touched(one):
            # Only decode steps are recorded: they stand in for mixed ones where attention is in neither graph.
            comparable = steps == "decode" or Mode.FULL not in (before, after)
            found = (
                _look_up(recordings, before, after, compiled, query_len, model, names, batch) if comparable else None
            )
            costs.append(Cost(steps, before, after, found))
        out.append(Avoidance(one, change, instead, tuple(costs)))
    return tuple(out)


def _change(
    one: Downgrade, query_len: int, has_cuts: bool, others: Mapping[str, Tier] | None
) -> tuple[str, dict[str, Any], tuple[str, ...] | None]:
    """The remedy in words, as arguments of `resolve`, and the backends that can run the lost mode (None: any)."""
    if one.rule is Rule.POOLING:
        words = "Nothing gives a pooling model FULL graphs; ask for PIECEWISE, which is what it can have."
        return words, {"requested": Mode.PIECEWISE}, None
    if one.rule is Rule.ONE_PIECE:
        return "Leave splitting_ops unset, so that the compiled model is cut at attention.", {"split": True}, None
    if one.rule is Rule.NO_CUT:
        words = "Set piecewise_method to break, which compiles nothing, or compilation_mode to VLLM_COMPILE."
        return words, {"breakable": True}, None
    need = Tier.ALWAYS
    if one.rule is not Rule.MIXED_BATCHES:
        need = Tier.UNIFORM_BATCH if query_len > 1 else Tier.UNIFORM_SINGLE_TOKEN_DECODE
    able = None if others is None else tuple(name for name, tier in others.items() if tier >= need)
    also = ""
    instead: dict[str, Any] = {}
    if one.rule is Rule.NEVER_CAPTURED and has_cuts:
        also, instead = "ask for PIECEWISE, whose attention runs outside the graph", {"requested": Mode.PIECEWISE}
    elif one.rule is Rule.QUERY_LEN:
        also, instead = "decode one token per request (no speculative tokens)", {"query_len": 1}
    if able == ():
        nothing = f"No other backend here reaches tier {need.name}"
        return f"{nothing}; {also}." if also else f"{nothing}.", instead, able
    named = f"of tier {need.name} or above, such as TRITON_ATTN" if able is None else _either(able)
    words = f"Take {'an attention_backend' if able is None else 'attention_backend'} {named}"
    return (f"{words}, or {also}." if also else f"{words}."), {"tier": need}, able


def _either(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _touched(one: Downgrade) -> Iterable[tuple[str, Mode, Mode]]:
    """The kinds of steps that run in another mode after the downgrade. A pooling model has no decode steps."""
    if one.rule is not Rule.POOLING and one.before.decode_mode() is not one.after.decode_mode():
        yield "decode", one.before.decode_mode(), one.after.decode_mode()
    if one.before.mixed_mode() is not one.after.mixed_mode():
        yield "mixed", one.before.mixed_mode(), one.after.mixed_mode()


def _look_up(
    recordings: Sequence[Recording],
    before: Mode,
    after: Mode,
    compiled: bool,
    query_len: int,
    model: str | None,
    backends: Sequence[str] | None,
    batch: int,
) -> Measured | None:
    """The pair of rows at the batch nearest to `batch`, in the first recording that has one."""
    compilation = "VLLM_COMPILE" if compiled else "NONE"
    for recording in recordings:
        rows = [
            row for row in recording.rows
            if row.mode in (before.name, after.name) and row.size == row.batch * row.query_len
            and row.compile == compilation and row.query_len == query_len and not row.emulated
            and (model is None or row.model == model) and (backends is None or row.backend in backends)
        ]  # fmt: skip
        pair = _nearest_pair(rows, before.name, after.name, batch, backends)
        if pair is not None:
            from labkit.measure.stats import ratio

            kind = recording.provenance.kind
            value = ratio(pair[1].measurement(kind), pair[0].measurement(kind))
            return Measured(*pair, value, recording.provenance)
    return None


def _nearest_pair(
    rows: Sequence[Row], before: str, after: str, batch: int, backends: Sequence[str] | None
) -> tuple[Row, Row] | None:
    """Two rows that differ in their mode alone: of the first model and backend that has a pair, the nearest batch."""

    def rest(row: Row) -> tuple[Any, ...]:
        return (row.model, row.backend, row.backend_version, row.dtype, row.batch, row.context, row.weights, row.primed)

    lowered: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row.mode == after:
            lowered.setdefault(rest(row), row)
    pairs = [(row, lowered[rest(row)]) for row in rows if row.mode == before and rest(row) in lowered]
    if not pairs:
        return None
    first = pairs[0][0]
    if backends:
        first = min((row for row, _ in pairs if row.model == first.model), key=lambda row: backends.index(row.backend))
    same = [pair for pair in pairs if (pair[0].model, pair[0].backend) == (first.model, first.backend)]
    return min(same, key=lambda pair: (abs(pair[0].batch - batch), pair[0].batch, pair[0].context))
