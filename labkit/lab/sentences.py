"""What a run means: in one sentence, as a table row, beside another run. Pure; refuses to know widgets and engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labkit.figures.latency import RunPoints, short_ms
from labkit.lab.settings import Run
from labkit.measure.provenance import Kind, ProvenanceError
from labkit.measure.stats import ratio


def points_of(run: Run) -> RunPoints:
    """What the chart draws of a run."""
    row = run.row
    return RunPoints(
        number=run.number, backend=row.backend, mode=row.mode, size=row.size, batch=run.settings.batch, kind=run.kind,
        samples_ms=tuple(row.samples_ms), p10_ms=row.p10_ms, p50_ms=row.p50_ms, p90_ms=row.p90_ms,
    )  # fmt: skip


def summary(run: Run) -> str:
    """One sentence: how the step ran, what that saved, what it took."""
    row = run.row
    took = (
        f"{short_ms(row.p50_ms)} ms a step (median of {row.n}, p10–p90 {short_ms(row.p10_ms)}–{short_ms(row.p90_ms)})"
    )
    if row.mode == "NONE":
        started = (
            f"{_launches(row.launches)} a step, each started by the host"
            if row.launches is not None
            else "every operation is started by the host"
        )
        return f"mode NONE, batch {row.batch}: {started}; {took}."
    if run.emulated:
        return (
            f"mode {row.mode}, size {row.size}, emulated: a CPU has no graphs to launch, so the same operations run "
            f"one by one and nothing is saved here; {took}."
        )
    graphs = f"{row.graph_launches} graph launch{'es' if row.graph_launches != 1 else ''}"
    rest = row.launches - row.graph_launches if row.launches is not None else 0
    if rest > 0:
        graphs += f" and {rest} more"
    instead = ""
    if run.eager_launches:
        fewest, most = run.eager_launches
        instead = f" instead of {_launches(most)}" if fewest == most else f" instead of {fewest} to {_launches(most)}"
    return f"mode {row.mode}, size {row.size}: {graphs}{instead}; {took}."


def _launches(n: int | None) -> str:
    return f"{n} launch{'es' if n != 1 else ''}"


def comparison(a: Run, b: Run) -> str:
    """How two pinned runs differ, or why no ratio is taken."""
    left, right = f"A (run {a.number})", f"B (run {b.number})"
    try:
        found = ratio(_measurement(a, left), _measurement(b, right))
    except ProvenanceError:
        return (
            f"No ratio: {left} is {a.kind}, {right} is {b.kind}, and a ratio never mixes the two. Pin two of one kind."
        )
    if a.provenance.device != b.provenance.device:
        where = f"{left} ran on {machine(a)}, {right} on {machine(b)}"
        return f"No ratio: {where}, so it would compare machines."
    if not found.shown:
        between = f"({found.low:.2f}–{found.high:.2f})"
        return f"No difference shown: A takes {found.value:.2f} {between} times as long as B; noise, or less than 5 %."
    if found.value >= 1:
        return f"A takes {found.value:.2f} times as long as B ({found.low:.2f}–{found.high:.2f})."
    return f"B takes {1 / found.value:.2f} times as long as A ({1 / found.high:.2f}–{1 / found.low:.2f})."


def _measurement(run: Run, label: str) -> Any:
    return run.row.measurement(Kind(run.kind), label)


def table_row(run: Run) -> dict[str, Any]:
    """The numbers of a run as plain values; the panel's table, and `LatencyPanel.table`."""
    row = run.row
    return {
        "run": run.number,
        "kind": run.kind,
        "machine": machine(run),
        "model": row.model,
        "backend": row.backend,
        "requested_mode": run.settings.mode,
        "mode": row.mode,
        "size": row.size,
        "batch": run.settings.batch,
        "context": row.context,
        "p50_ms": row.p50_ms,
        "p10_ms": row.p10_ms,
        "p90_ms": row.p90_ms,
        "n": row.n,
        "launches": row.launches,
        "graph_launches": row.graph_launches,
        "tok_s": run.settings.batch / row.p50_ms * 1e3,  # padding makes no tokens
        "emulated": run.emulated,
        "stopped": run.stopped,
    }


def machine(run: Run) -> str:
    """The short name of what a run ran on."""
    return run.provenance.gpu or "CPU"


def origin(run: Run) -> str:
    """Where the numbers of a run come from, in one line without its kind: machine, versions, date."""
    made = run.provenance
    versions = " · ".join(f"{name} {made.packages[name]}" for name in ("torch", "triton") if name in made.packages)
    primed = "KV primed with seeded values" if run.row.primed else ""
    return " · ".join(part for part in (made.gpu or made.cpu, versions, made.date[:10], primed) if part)


def progress_text(reports: Sequence[Any]) -> str:
    """The newest step while a run is under way."""
    last = reports[-1]
    ran = "NONE" if last.mode == "NONE" else f"{last.mode} size {last.size}"
    return f"step {len(reports)}: {short_ms(last.wall_ms)} ms, {ran}"
