"""Measured steps as text: rows, comparisons, forms of one step. Measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from labkit.cli.answer import milliseconds, number, table

if TYPE_CHECKING:
    from labkit.bench.comparison import Comparison
    from labkit.bench.forms import FormResult
    from labkit.measure.decompose import Decomposition
    from labkit.measure.recordings import Recording, Row


def step_table(recording: Recording) -> str:
    """Rows of steps as aligned text, with their origin on top."""
    rows = recording.rows
    varying = [name for name in ("model", "backend", "compile") if len({getattr(row, name) for row in rows}) > 1]
    head = "\n".join([*dict.fromkeys(describe(row) for row in rows), recording.provenance.label])
    lines = [
        (
            *varying, "context", "batch", "mode", "ran as", "p50 ms", "p10-p90", "n", "launches", "device us", "tok/s",
            "GB/s", "floor",
        )
    ]  # fmt: skip
    for row in rows:
        share = f"{row.floor_ms / row.p50_ms:.0%}" if row.floor_ms else "-"
        lines.append(
            (
                *(getattr(row, name) for name in varying),
                number(row.context), number(row.batch), row.requested_mode, ran_as(row), milliseconds(row.p50_ms),
                f"{milliseconds(row.p10_ms)}-{milliseconds(row.p90_ms)}", str(row.n), number(row.launches),
                number(row.device_us), number(row.tok_s), number(row.gb_s), share,
            )
        )  # fmt: skip
    text = f"{head}\n\n{table(lines, left=(*range(len(varying)), len(varying) + 2, len(varying) + 3))}"
    first = next((r for r in rows if r.floor_ms), None)
    if first is not None and first.gb_s and first.floor_ms:
        copy = first.gb_s * first.p50_ms / first.floor_ms
        text += f"\n\nfloor: share of a copy's {number(copy)} GB/s that reading weights and KV once makes of a step"
    return "\n".join(filter(None, [text, launch_costs(rows), *refusals(recording)]))


def launch_costs(rows: Sequence[Row]) -> str:
    """What one launch of each kind costs the host, as measured in the same run; empty where nothing is launched."""
    cost = rows[0].launch_cost_us if rows else {}
    return "host us per launch: " + ", ".join(f"{kind} {us:.1f}" for kind, us in cost.items()) if cost else ""


def refusals(recording: Recording) -> list[str]:
    """A line for each configuration that could not run."""
    return [
        f"{', '.join(filter(None, (one.model, one.backend, _compiled(one.compile), one.requested_mode)))}"
        f" could not run: {one.reason}"
        for one in recording.refused
    ]


def decomposition_table(steps: Sequence[Decomposition]) -> str:
    """Median microseconds of each part of a step, one configuration a line; the device apart from the host."""
    names = list(dict.fromkeys(part.name for step in steps for part in step.host))
    lines = [("host us by phase", *names, "sum", "wall", "| device: forward", "overlaps", "waited for at least")]
    for step in steps:
        us = {part.name: part.p50_us for part in step.host}
        device = step.forward.p50_us if step.forward else None
        lines.append(
            (
                step.title, *(number(us.get(name), 1) for name in names), number(step.serial_us), number(step.wall.p50),
                number(device), number(step.hidden_us), number(step.waiting_us),
            )
        )  # fmt: skip
    return table(lines)


def capture_table(recording: Recording) -> str:
    """What capturing took, as aligned text: per configuration, and for its smallest and largest size."""
    if not recording.setups:
        return ""
    lines = [
        (
            "model", "backend", "compile", "mode", "sizes", "graphs", "capture ms", "MiB", "compile s",
            "smallest and largest",
        )
    ]  # fmt: skip
    for one in recording.setups:
        found = sorted((c for c in recording.captures if c.key[:4] == one.key), key=lambda c: (c.mode, c.size))
        ends = [found[0], found[-1]] if len(found) > 1 else found
        lines.append(
            (
                one.model, one.backend, one.compile, one.requested_mode, str(one.sizes), number(one.graphs),
                number(one.capture_ms), number(one.graph_mib, 1),
                (number(one.compile_ms / 1e3, 1) + (" (cached)" if one.from_cache else "")) if one.compile_ms else "-",
                "; ".join(f"{c.mode} {c.size}: {number(c.ms, 1)} ms, {number(c.mib, 1)} MiB" for c in ends),
            )
        )  # fmt: skip
    return f"captures\n{table(lines, left=(0, 1, 2, 3, 9))}"


def _compiled(mode: str) -> str:
    return "" if mode == "NONE" else f"compile {mode}"


def describe(row: Row) -> str:
    """One line on what all rows share."""
    version = f" {row.backend_version}" if row.backend_version else ""
    parts = [row.model, f"{row.weights} weights", row.dtype, f"{row.backend}{version}"]
    chunk = f"a chunk of {row.chunk} beside the decodes" if row.chunk else ""
    return ", ".join([*parts, *filter(None, ("primed KV" if row.primed else "", chunk))])


def ran_as(row: Row) -> str:
    """`FULL 8`, `NONE`, or `FULL 8 (emulated)`."""
    return f"{row.mode} {row.size}" + (" (emulated)" if row.emulated else "") if row.mode != "NONE" else "NONE"


def sentence(pair: Comparison) -> str:
    """Graph against eager in one or two sentences."""
    eager, graph = pair.eager, pair.graph
    where = f"batch {pair.batch}, context {pair.context}"
    faster = f"{graph.requested_mode} against NONE: {pair.ratio.text}"
    if pair.ratio.shown:
        faster = f"NONE takes {pair.ratio.text} as long as {graph.requested_mode}"
    out = f"{where}: {faster}"
    if graph.launches is not None and eager.launches is not None:
        out += f"; {counted(graph)} instead of {counted(eager)}"
    out += "."
    if pair.explained_us is not None and pair.limit_us is not None:
        verdict = "within" if pair.fair else "ABOVE"
        out += (
            f"\n  NONE {number(eager.p50_ms * 1e3)} us is {verdict} 1.3 x {number(pair.explained_us)} us (launches x "
            f"cost) + {number(eager.host_outside_us)} us (host outside the forward) = {number(pair.limit_us)} us"
        )
        out += "." if pair.fair else ": something besides launching slows it."
        if pair.bare_limit_us is not None:
            inside = "within" if eager.p50_ms * 1e3 <= pair.bare_limit_us else "ABOVE"
            out += f" With the bare cost of a Triton launch the limit is {number(pair.bare_limit_us)} us: {inside}."
    return out


def counted(row: Row) -> str:
    """`1 graph launch and 3 launches`, `412 launches`."""
    graphs, others = row.graph_launches, (row.launches or 0) - row.graph_launches
    parts = [f"{graphs} graph launch{'es' if graphs > 1 else ''}"] if graphs else []
    if others or not graphs:
        parts.append(f"{others} launch{'' if others == 1 else 'es'}")
    return " and ".join(parts)


# --- forms ---------------------------------------------------------------------------------------------------------


def form_table(recording: Recording, results: Sequence[FormResult]) -> str:
    """One step in every form as aligned text, each beside the first, and what starting a step in pieces explains."""
    lines = [("model", "batch", "context", "form", "compile", "ran as", "launches", "p50 ms", "p10-p90", "n",
              "against none", "step MiB", "graph MiB")]  # fmt: skip
    for one in results:
        row = one.row
        lines.append(
            (
                row.model, number(row.batch), number(row.context), one.form.name, row.compile, ran_as(row),
                counted(row) if row.launches is not None else "-", milliseconds(row.p50_ms),
                f"{milliseconds(row.p10_ms)}-{milliseconds(row.p90_ms)}", str(row.n),
                one.ratio.text if one.ratio else "-", number(one.step_mib, 1), number(one.graph_mib, 1),
            )
        )  # fmt: skip
    rows = recording.rows
    parts = ["\n".join([*dict.fromkeys(describe(row) for row in rows), recording.provenance.label])]
    parts.append(table(lines, left=(0, 3, 4, 5)))
    parts.append(
        "against none: how many times longer the step takes in the form 'none'\n"
        "step MiB: what a step takes beyond what is held between steps; graph MiB: what the graph of this size holds, "
        "a step's activations among it\n"
        f"order: {recording.provenance.order}"
    )
    parts.append("\n".join(filter(None, [launch_costs(rows), *map(budget_sentence, results)])))
    return "\n\n".join(filter(None, parts))


def budget_sentence(one: FormResult) -> str:
    """Whether a step in pieces costs more than starting its graphs and attention explains; empty for other forms."""
    found, row = one.budget, one.row
    if found is None:
        return ""
    out = (
        f"{row.model}, {one.form.name}, batch {row.batch}: {number(row.p50_ms * 1e3)} us is "
        f"{'within' if found.kept else 'ABOVE'} {found.factor:g} x {number(found.explained_us)} us (launches x cost, "
        f"replays included) + {number(row.host_outside_us)} us (host outside the forward) = {number(found.limit_us)} us"
    )
    if found.bare_limit_us is not None:
        inside = "within" if row.p50_ms * 1e3 <= found.bare_limit_us else "ABOVE"
        out += f"; with the bare cost of a Triton launch {number(found.bare_limit_us)} us: {inside}"
    return f"{out}."
