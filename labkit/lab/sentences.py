"""What a run means: in one sentence, as a table row, beside another run. Pure; refuses to know widgets and engines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from labkit.figures.latency import RunPoints, short_ms
from labkit.lab import runs
from labkit.lab.pins import Side, compare, since
from labkit.lab.settings import Run
from labkit.measure.provenance import Kind

if TYPE_CHECKING:
    from labkit.engine.report import CaptureRecord
    from labkit.measure.recordings import Setup


def points_of(run: Run) -> RunPoints:
    """What the chart draws of a run."""
    row = run.row
    return RunPoints(
        number=run.number, backend=row.backend, mode=row.mode, size=row.size, batch=run.settings.batch, kind=run.kind,
        samples_ms=tuple(row.samples_ms), p10_ms=row.p10_ms, p50_ms=row.p50_ms, p90_ms=row.p90_ms,
        compiled=row.compile != "NONE",
    )  # fmt: skip


def summary(run: Run) -> str:
    """One sentence: how the step ran, what that saved, what it took."""
    row = run.row
    took = (
        f"{short_ms(row.p50_ms)} ms a step (median of {row.n}, p10–p90 {short_ms(row.p10_ms)}–{short_ms(row.p90_ms)})"
    )
    compiled = ", compiled" if row.compile != "NONE" else ""
    if row.mode == "NONE":
        started = (
            f"{_launches(row.launches)} a step, each started by the host"
            if row.launches is not None
            else "every operation is started by the host"
        )
        return f"mode NONE{compiled}, batch {row.batch}: {started}; {took}."
    if run.emulated:
        return (
            f"mode {row.mode}{compiled}, size {row.size}, emulated: a CPU has no graphs to launch, so the same "
            f"operations run one by one: nothing is saved here, and a little may be lost; {took}."
        )
    graphs = f"{row.graph_launches} graph launch{'es' if row.graph_launches != 1 else ''}"
    rest = row.launches - row.graph_launches if row.launches is not None else 0
    if rest > 0:
        graphs += f" and {rest} more"
    instead = ""
    if run.eager_launches:
        fewest, most = run.eager_launches
        instead = f" instead of {_launches(most)}" if fewest == most else f" instead of {fewest} to {_launches(most)}"
    return f"mode {row.mode}{compiled}, size {row.size}: {graphs}{instead}; {took}."


def _launches(n: int | None) -> str:
    return f"{n} launch{'es' if n != 1 else ''}"


def comparison(a: Run, b: Run, letters: str = "AB") -> str:
    """How two pinned runs differ, or why no ratio is taken."""
    left, right = (_side(run, letter) for run, letter in zip((a, b), letters, strict=True))
    said = compare(left, right)
    if said.startswith("No ratio"):
        return said
    return " ".join(filter(None, (said, _differing(a, b), _apart(a, b))))


def changed(new: Run, old: Run) -> str:
    """What was set otherwise than in the run before, and what became of the step."""
    fields = (("model", "model"), ("backend", "backend"), ("compile", "compile"), ("mode", "mode"), ("size", "size"),
              ("context", "context"))  # fmt: skip
    moved = [
        f"{word} {getattr(old.row, name)} → {getattr(new.row, name)}"
        for name, word in fields if getattr(old.row, name) != getattr(new.row, name)
    ]  # fmt: skip
    if old.settings.batch != new.settings.batch:
        moved.append(f"batch {old.settings.batch} → {new.settings.batch}")
    before, after = old.row.launches, new.row.launches
    if before is not None and after is not None and before != after:
        moved.append(f"{_launches(before)} → {after}")
    return since(", ".join(moved), _side(old, f"run {old.number}"), _side(new, f"run {new.number}"))


def _side(run: Run, letter: str) -> Side:
    return Side(letter, run.number, run.provenance, _measurement(run, letter))


def _differing(a: Run, b: Run) -> str:
    """What a ratio cannot be laid to one setting for, where two runs differ in several."""
    mine, other = ((backend_name(run), run.settings.batch, run.row) for run in (a, b))
    names = ["backend"] * (mine[0] != other[0]) + ["batch"] * (mine[1] != other[1])
    fields = ("model", "compile", "mode", "context")
    names += [name for name in fields if getattr(mine[2], name) != getattr(other[2], name)]
    if len(names) < 2:
        return ""
    return f"The two differ in {', '.join(names[:-1])} and {names[-1]}: this is the effect of all of it together."


def _apart(a: Run, b: Run) -> str:
    """Where two recorded runs were not measured in one go, that a ratio holds less."""
    mine, other = a.provenance, b.provenance
    if a.kind != str(Kind.RECORDED) or mine == other:
        return ""
    differs = [line.split(" ")[0] for line in mine.same_machine(other)]
    also = f", with another {' and '.join(differs)}" if differs else ""
    return f"They were recorded in two runs ({mine.date[:10]} and {other.date[:10]}){also}."


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
        "backend_version": row.backend_version,
        "compile": row.compile,
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


def version_of(backend_version: str | None) -> str:
    """The generation of kernels that a version names first, as FLASH_ATTN's does ("FA3"); empty for any other."""
    first = (backend_version or "").partition(":")[0]
    return first if re.fullmatch(r"FA\d", first) else ""


def backend_name(run: Run) -> str:
    """The backend of a run, with the generation of its kernels where it has several: "FLASH_ATTN FA3"."""
    return f"{run.row.backend} {version_of(run.row.backend_version)}".rstrip()


def ready(llm: Any, report: Any, new: Sequence[CaptureRecord], seconds: float, emulated: bool) -> tuple[str, ...]:
    """What getting an engine ready took and what it kept, as sentences.

    Args:
        report: the `ReconfigureReport`, None for an engine that was built just now. seconds: wall time of all of it.
        new: those of the engine's graphs that were captured for it.
    """
    compiled = llm.compile_report
    old = [record for record in llm.capture_records if record not in new]
    kept = set(report.kept) if report is not None else set()
    rebuilt = report.rebuilt_ms if report is not None else {}
    out = []
    if compiled is not None and (report is None or "compile" in rebuilt):
        classes = f"{_count(compiled.pieces, 'piece')} of {_count(len(compiled.classes), 'kind')}"
        took = _time(compiled.total_ms)
        out.append(
            f"Compiled code of {classes} came from the cache in {took}." if compiled.from_cache
            else f"Compiled {classes} in {took} (tracing {_time(compiled.trace_ms)})."
            + (" The next start reads them from the cache." if compiled.saved else "")
        )  # fmt: skip
    if new:
        graphs, memory = _graphs(new, emulated)
        out.append(f"Captured {graphs} in {_time(sum(r.ms for r in new))}{memory}.")
    if report is not None:
        names = [name for name, part in (("the weights", "weights"), ("the KV cache", "kv_cache")) if part in kept]
        names += ["the compiled code"] if compiled is not None and "compile" not in rebuilt else []
        names += ["".join(_graphs(old, emulated))] if old else []
        nothing_new = "" if rebuilt else f", so that the change took {_time(seconds * 1e3)}"
        out.append(f"Kept: {', '.join(names)}{nothing_new}.")
    return tuple(out)


def _graphs(records: Sequence[CaptureRecord], emulated: bool) -> tuple[str, str]:
    """How many graphs for how many sizes, and their memory where they take any."""
    total, sizes = sum(r.graphs for r in records), len({r.size for r in records})
    said = _count(total, "emulated graph" if emulated else "graph")
    said += f" for {_count(sizes, 'size')}" if total != sizes else ""
    return said, "" if emulated else f", {sum(r.mib for r in records):.0f} MiB"


def recorded_ready(setup: Setup | None) -> tuple[str, ...]:
    """The same of a recorded configuration."""
    if setup is None:
        return ()
    out = []
    if setup.compile_ms:
        how = "read from the cache" if setup.from_cache else "compiled for the first time"
        out.append(f"When it was recorded the model was {how} in {_time(setup.compile_ms)}.")
    if setup.graphs:
        sizes = f"{_count(setup.graphs, 'graph')} for {_count(setup.sizes, 'size')}"
        out.append(f"{sizes} were captured in {_time(setup.capture_ms)} and took {setup.graph_mib:.0f} MiB.")
    return tuple(out)


def _time(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < 100 else f"{ms / 1e3:.1f} s"


def _count(n: int, word: str) -> str:
    return f"{n} {word}{'' if n == 1 else 's'}"


def machine(run: Run) -> str:
    """The short name of what a run ran on."""
    return runs.machine(run.provenance)


def origin(run: Run) -> str:
    """Where the numbers of a run come from, in one line without its kind: machine, versions, date."""
    return runs.origin(run.provenance)


def progress_text(reports: Sequence[Any]) -> str:
    """The newest step while a run is under way."""
    last = reports[-1]
    ran = "NONE" if last.mode == "NONE" else f"{last.mode} size {last.size}"
    return f"This step: {short_ms(last.wall_ms)} ms, {ran}"
