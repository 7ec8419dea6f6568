"""Runs of decode steps as HTML: sentence, pinned card, table, text. Refuses to know widgets and engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from labkit.figures.latency import short_ms
from labkit.lab import panel_html, sentences, ui
from labkit.lab.settings import Run


def summary_html(run: Run, before: str = "") -> str:
    """The sentence about a run, what a reader must know beside it, what getting ready took, and its origin.

    before: what is said of the run before it.
    """
    below = [before, *run.notes, *run.ready]
    below += ["Stopped early: the numbers are of the steps that ran."] * run.stopped
    below += ["Brought back: this was measured before."] * run.earlier
    return panel_html.said_html(run.kind, run.provenance, sentences.summary(run), below, _graphs_html(run))


_GRAPH_COLUMNS = [("mode", "mode"), ("size", "size#"), ("graphs", "graphs#"), ("ms", "ms#"), ("mib", "MiB#")]


def _graphs_html(run: Run) -> str:
    """Every captured size with its time and memory, folded away."""
    if not run.graphs:
        return ""
    rows = [
        {"mode": r.mode, "size": r.size, "graphs": r.graphs, "ms": f"{r.ms:.1f}",
         "mib": "–" if run.emulated else f"{r.mib:.1f}"}
        for r in run.graphs
    ]  # fmt: skip
    total = "emulated, so they take no memory" if run.emulated else f"{sum(r.mib for r in run.graphs):.0f} MiB"
    return ui.details(f"Graphs by size ({total})", ui.table("", _GRAPH_COLUMNS, rows))


def text_html(prompt: str, text: str, note: str) -> str:
    """Generated text behind its prompt, and a note on how it was made."""
    if not (text or note):
        return ""
    body = (
        f'<div class="lk-text"><span class="lk-prompt">{ui.escape(prompt)}</span>{ui.escape(text)}</div>'
        if text
        else ""
    )
    return ui.block(f'{body}<p class="lk-small lk-quiet">{ui.escape(note)}</p>')


def pin_card(letter: str, run: Run) -> str:
    """A pinned run: its median, how it spreads, and what ran."""
    return panel_html.pin_head(letter, run.number, run.kind, run.provenance, run.earlier) + "".join(_pin_lines(run))


def _pin_lines(run: Run) -> Iterator[str]:
    row = run.row
    ran = (
        "mode NONE"
        if row.mode == "NONE"
        else f"mode {row.mode}, size {row.size}{' (emulated)' if run.emulated else ''}"
    )
    yield f'<div class="lk-big">{short_ms(row.p50_ms)} ms</div>'
    yield f"<div>p10–p90 {short_ms(row.p10_ms)}–{short_ms(row.p90_ms)} ms, n={row.n}</div>"
    parts = [row.model, sentences.backend_name(run), f"compile {row.compile}" if row.compile != "NONE" else "", ran]
    which = ", ".join([*filter(None, parts), f"batch {run.settings.batch}", f"context {row.context}"])
    yield f"<div>{ui.escape(which)}</div>"
    if row.launches is not None:
        graphs = f", {row.graph_launches or 'none'} of them {'a graph' if row.graph_launches < 2 else 'graphs'}"
        yield f"<div>{row.launches} launches{graphs}</div>"


_COLUMNS = [
    ("run", "run#"), ("badge", "kind"), ("backend", "backend"), ("compile", "compile"), ("mode", "mode"),
    ("size", "size#"), ("batch", "batch#"), ("context", "context#"), ("p50_ms", "median ms#"),
    ("band", "p10–p90 ms#"), ("n", "n#"), ("tok_s", "tokens/s#"), ("launches", "launches#"), ("model", "model"),
]  # fmt: skip


def table_html(runs: Sequence[Run]) -> str:
    """All runs, one line each; the column of compilation is there once a run was compiled."""
    compiled = any(run.row.compile != "NONE" for run in runs)
    columns = [column for column in _COLUMNS if compiled or column[0] != "compile"]
    return ui.table("Runs", columns, [_cells(run) for run in runs])


def _cells(run: Run) -> dict[str, str]:
    values = sentences.table_row(run)
    cells = {key: ui.escape("–" if value is None else value) for key, value in values.items()}
    cells["backend"] = ui.escape(sentences.backend_name(run))
    cells["run"] = panel_html.run_cell(run.number, run.earlier)
    cells["badge"] = panel_html.kind_cell(run.kind, run.provenance)
    if run.settings.mode != run.row.mode:
        cells["mode"] = f"{cells['mode']}<br><span class='lk-quiet'>(asked {ui.escape(run.settings.mode)})</span>"
    if run.emulated:
        cells["mode"] += " <span class='lk-quiet'>emulated</span>"
    cells["p50_ms"] = f'<span data-ms="{run.row.p50_ms!r}">{short_ms(run.row.p50_ms)}</span>'
    cells["band"] = f"{short_ms(run.row.p10_ms)}–{short_ms(run.row.p90_ms)}"
    cells["n"] = f"{run.row.n}{' (stopped)' if run.stopped else ''}"
    cells["tok_s"] = short_ms(values["tok_s"]) if values["tok_s"] < 100 else f"{values['tok_s']:.0f}"
    if run.row.graph_launches:
        cells["launches"] += f" ({run.row.graph_launches} graph{'s' if run.row.graph_launches > 1 else ''})"
    return cells
