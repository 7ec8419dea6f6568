"""Eager beside graphs, and whether eager was a fair opponent: what starting everything explains. Measures nothing.

Rows that took turns in one run are compared sample by sample; a drift of the machine then meets both sides.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from labkit.measure import launches
from labkit.measure.provenance import Kind
from labkit.measure.recordings import Recording, Row
from labkit.measure.stats import Ratio, compared

#: NONE counts as honest when a step takes at most this many times what its launches alone cost, plus other host work.
STRAW_MAN = 1.3
#: Key of `launch_cost_us` for a Triton launch alone; "triton" is a whole operator call, as "torch" and "gemm" are.
BARE = "triton_bare"


@dataclasses.dataclass(frozen=True)
class Budget:
    """What starting everything explains of a step's time, and whether the step keeps within a multiple of it.

    explained_us: Σ launches × cost, replays of graphs included. limit_us: `factor` × explained_us + the host's time
    outside the forward. bare_limit_us: the same with the bare cost of a Triton launch, which leaves a call's Python
    unexplained; None where that was not measured.
    """

    factor: float
    explained_us: float
    limit_us: float
    kept: bool
    bare_limit_us: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)


def budget(row: Row, factor: float = STRAW_MAN) -> Budget | None:
    """The budget of a row's step; None where launches cannot be counted or their cost was not measured."""
    cost = row.launch_cost_us
    if row.launches is None or not cost:
        return None
    kinds = {kind: n for kind, n in row.launches_by_kind.items() if kind != "copy"}
    explained = launches.explained_us(kinds, cost)
    limit, bare_limit = factor * explained + row.host_outside_us, None
    if BARE in cost:
        bare = {**cost, "triton": cost[BARE]}
        bare_limit = factor * launches.explained_us(kinds, bare) + row.host_outside_us
    return Budget(factor, explained, limit, row.p50_ms * 1e3 <= limit, bare_limit)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Eager beside graphs at one batch and context, and whether the eager side was a fair opponent.

    ratio: eager over graph. launches: of both sides. host_outside_us: host time of the eager step outside the forward.
    explained_us: Σ launches × cost. limit_us: STRAW_MAN × explained + host_outside; `fair` when the eager p50 is within
    it; None where launches cannot be counted. bare_limit_us: the same with the bare cost of a Triton launch, which
    leaves a call's Python unexplained; None where that was not measured.
    """

    batch: int
    context: int
    eager: Row
    graph: Row
    ratio: Ratio
    explained_us: float | None
    limit_us: float | None
    fair: bool | None
    bare_limit_us: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "batch": self.batch,
            "context": self.context,
            "modes": [self.eager.requested_mode, self.graph.requested_mode],
            "ratio": self.ratio.value,
            "ratio_low": self.ratio.low,
            "ratio_high": self.ratio.high,
            "shown": self.ratio.shown,
            "paired": self.ratio.paired,
            "launches": [self.eager.launches, self.graph.launches],
            "eager_us": self.eager.p50_ms * 1e3,
            "explained_us": self.explained_us,
            "host_outside_us": self.eager.host_outside_us,
            "limit_us": self.limit_us,
            "fair": self.fair,
            "bare_limit_us": self.bare_limit_us,
        }


def compare(eager: Row, graph: Row, kind: Kind = Kind.LIVE) -> Comparison:
    """Put an eager row beside the graph row of the same batch and context."""
    found, spent = compared(eager.measurement(kind), graph.measurement(kind)), budget(eager)
    explained, limit, fair, bare = (
        (spent.explained_us, spent.limit_us, spent.kept, spent.bare_limit_us) if spent else (None,) * 4
    )
    return Comparison(eager.batch, eager.context, eager, graph, found, explained, limit, fair, bare)


def comparisons(recording: Recording) -> list[Comparison]:
    """Every eager row of a recording beside the graph rows of the same model, backend, compilation and batch."""

    def key(row: Row) -> tuple[Any, ...]:
        return row.model, row.backend, row.compile, row.batch, row.context, row.chunk

    eager = {key(r): r for r in recording.rows if r.mode == "NONE"}
    keys = [(key(r), r) for r in recording.rows if r.mode != "NONE"]
    return [compare(eager[key], row, recording.provenance.kind) for key, row in keys if key in eager]
