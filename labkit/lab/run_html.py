"""Runs as HTML: the sentence about one, two beside each other, all in a table. Refuses to know widgets and engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from labkit.figures.latency import short_ms
from labkit.lab import sentences, ui
from labkit.lab.settings import Run


def first_words() -> str:
    """What stands where the sentence about a run will be."""
    return ui.block(
        "Press Run with mode NONE, then with FULL, and compare. Every run stays in the chart.", "lk-sentence"
    )


def summary_html(run: Run) -> str:
    """The sentence about a run, what a reader must know beside it, what getting ready took, and its origin."""
    notes = "".join(f'<p class="lk-small">{ui.escape(note)}</p>' for note in (*run.notes, *run.ready))
    stopped = '<p class="lk-small">Stopped early: the numbers are of the steps that ran.</p>' if run.stopped else ""
    return ui.block(
        f"{ui.badge(run.kind, sentences.machine(run))} {ui.escape(sentences.summary(run))}{notes}{stopped}"
        f"{_graphs_html(run)}"
        f'<p class="lk-small lk-quiet">{ui.escape(sentences.origin(run))}</p>',
        "lk-sentence",
    )


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


def pins_html(pinned: Sequence[Run]) -> str:
    """Pinned runs side by side, and how the two differ."""
    if not pinned:
        return ""
    cards = "".join(f'<div class="lk-pin">{"".join(_pin_lines("AB"[i], run))}</div>' for i, run in enumerate(pinned))
    said = "Pin a second run to compare the two."
    if len(pinned) == 2:
        kinds = {run.kind for run in pinned}
        said = f"{ui.badge(*kinds) + ' ' if len(kinds) == 1 else ''}{ui.escape(sentences.comparison(*pinned))}"
    return ui.block(f'<div class="lk-pins">{cards}</div><p class="lk-sentence">{said}</p>')


def _pin_lines(letter: str, run: Run) -> Iterator[str]:
    row = run.row
    ran = (
        "mode NONE"
        if row.mode == "NONE"
        else f"mode {row.mode}, size {row.size}{' (emulated)' if run.emulated else ''}"
    )
    yield f"<div><b>{letter} · run {run.number}</b> {ui.badge(run.kind, sentences.machine(run))}</div>"
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
    cells["badge"] = f'<span title="{ui.escape(sentences.origin(run))}">{ui.badge(run.kind)}</span>'
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
