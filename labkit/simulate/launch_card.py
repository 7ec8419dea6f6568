"""What launching costs on a machine, read off recorded rows: per launch, per step, and against the time data takes.
Refuses to know how it is shown, and to simulate: every number here is the row's own kind.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from labkit.errors import LabkitError
from labkit.measure.launches import KINDS, explained_us
from labkit.measure.provenance import Provenance, ProvenanceError
from labkit.measure.recordings import Recording, Row

#: What each kind of `launch_cost_us` is, in words.
KIND_WORDS = {
    "torch": "a small torch operation",
    "gemm": "a matrix product",
    "triton": "a Triton operator, its Python included",
    "triton_bare": "a Triton kernel alone",
    "graph": "a replay of a graph of one node",
    "copy": "a small copy",
}


@dataclasses.dataclass(frozen=True)
class LaunchCard:
    """The cost of launching in one step, eager and (where it was measured) in one graph.

    cost_us: host µs per launch by kind, of launches alone. launches: by kind in a step; explained_us: Σ of both.
    launching_us: the host's measured time in the forward. data_us: bytes of the step at the measured copy bandwidth.
    instructions_us: device time of the eager step that is gone under one graph: what it spent waiting for launches.
    full_ms, full_launching_us: the step in one graph, and its host time in the forward. None: not measured.
    """

    provenance: Provenance
    model: str
    backend: str
    batch: int
    context: int
    cost_us: dict[str, float]
    launches: dict[str, int]
    explained_us: float
    launching_us: float
    step_ms: float
    data_us: float | None
    instructions_us: float | None
    full_ms: float | None
    full_launching_us: float | None

    @property
    def num_launches(self) -> int:
        """Kernels that the host starts per step, copies apart."""
        return sum(n for kind, n in self.launches.items() if kind != "copy")

    @property
    def summary(self) -> str:
        """One or two sentences."""
        kind = self.provenance.kind
        text = (
            f"{kind}: an eager step of {self.model} at batch {self.batch} starts {self.num_launches} kernels, and the "
            f"host needs {self.launching_us / 1e3:.2f} ms for it, "
            f"{self.launching_us / max(1, self.num_launches):.1f} µs each."
        )
        if self.instructions_us is not None and self.data_us is not None:
            text += (
                f" The device waits {self.instructions_us / 1e3:.2f} ms for instructions; its data would take "
                f"{self.data_us / 1e3:.2f} ms."
            )
        return text

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        out = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "provenance"}
        return {
            **out,
            "provenance": self.provenance.as_dict(),
            "num_launches": self.num_launches,
            "summary": self.summary,
        }


def launch_card(eager: Row, full: Row | None, provenance: Provenance) -> LaunchCard:
    """The card of an eager row and the row of the same step in one graph, both from one recording.

    Raises:
        LabkitError: the first is not an eager step with launch costs. ProvenanceError: the rows are of different steps.
    """
    if eager.mode != "NONE" or not eager.launch_cost_us:
        raise LabkitError(
            f"the launch cost of a {eager.mode} step of {eager.model}",
            "it needs an eager step with measured launch costs", "Take a row of mode NONE from a machine with a GPU.",
        )  # fmt: skip
    same = ("model", "backend", "batch", "context", "compile", "chunk")
    if full is not None and any(getattr(eager, name) != getattr(full, name) for name in same):
        raise ProvenanceError(
            "launch card", "the two rows are not of the same step", "Take both from one recording, with one batch."
        )
    kinds = {kind: eager.launches_by_kind[kind] for kind in KINDS if eager.launches_by_kind.get(kind)}
    waited = None
    if full is not None and eager.device_us is not None and full.device_us is not None:
        waited = max(0.0, eager.device_us - full.device_us)
    return LaunchCard(
        provenance, eager.model, eager.backend, eager.batch, eager.context, dict(eager.launch_cost_us), kinds,
        explained_us(kinds, eager.launch_cost_us), eager.phases_us.get("launch", 0.0), eager.p50_ms,
        None if eager.floor_ms is None else 1e3 * eager.floor_ms, waited,
        None if full is None else full.p50_ms, None if full is None else full.phases_us.get("launch"),
    )  # fmt: skip


def card_from(
    recording: Recording, *, model: str, backend: str = "TRITON_ATTN", batch: int = 1, context: int = 512
) -> LaunchCard | None:
    """The card of one step of a recording; None where its eager row is missing."""
    where: dict[str, Any] = {"model": model, "backend": backend, "batch": batch, "context": context}
    eager = recording.find(**where, requested_mode="NONE")
    if eager is None:
        return None
    return launch_card(eager, recording.find(**where, requested_mode="FULL"), recording.provenance)
