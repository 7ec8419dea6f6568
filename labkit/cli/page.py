"""Pages that can be sent to somebody: sentences, charts, tables, origin, all in one file. Refuses to measure anything.

A page needs no network: the charts' code and the style are inside, and nothing in it points outside.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit.errors import LabkitError
from labkit.measure.beside import BesideRecording
from labkit.measure.decompose import decompositions
from labkit.measure.memory import MemoryReport
from labkit.measure.provenance import Provenance
from labkit.measure.recordings import Recording, write_atomically

_COLUMNS = ("model", "backend", "requested_mode", "mode", "size", "batch", "context", "p10_ms", "p50_ms", "p90_ms", "n",
            "launches", "graph_launches", "device_us", "tok_s", "gb_s", "floor_ms")  # fmt: skip
_BESIDE_COLUMNS = ("engine", "version", "way", "batch", "context", "p10_ms", "p50_ms", "p90_ms", "n", "tok_s",
                   "agreement")  # fmt: skip
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem;color:#222}
h2{font-size:1.1em;margin-top:2em}table{border-collapse:collapse;font-size:.85em}
td,th{padding:.2em .6em;border-bottom:1px solid #ddd;text-align:right;vertical-align:top}
td:nth-child(-n+4),th:nth-child(-n+4),.text td,.text th{text-align:left}
.origin{color:#555}.scroll{overflow-x:auto}pre{overflow-x:auto}"""


def write_page(path: Path, recording: Recording, sentences: Sequence[str], memory: Sequence[MemoryReport] = ()) -> Path:
    """Write the page of `labkit bench`: what came out, every row, where time and memory go, the origin.

    Raises:
        LabkitError: plotly is not installed. RecordingError: the file cannot be written.
    """
    try:
        from labkit.figures.decompose import decomposition_figure
        from labkit.figures.latency import RunPoints, latency_figure
        from labkit.figures.memory import memory_figure
    except ImportError as error:
        raise _needs_plotly(error) from None
    runs = [
        RunPoints(
            number, row.backend, row.mode, row.size, row.batch, str(recording.provenance.kind), row.samples_ms,
            row.p10_ms, row.p50_ms, row.p90_ms,
        )
        for number, row in enumerate(recording.rows, 1)
    ]  # fmt: skip
    rows = [[getattr(row, name) for name in _COLUMNS] for row in recording.rows]
    phases = list(dict.fromkeys(name for row in recording.rows for name in row.phases_us))
    parts = [_paragraphs(sentences), _chart(latency_figure(runs), True), _table("Every row", _COLUMNS, rows)]
    if phases:
        head = ("backend", "mode", "batch", "context", *phases)
        cells = [[row.backend, row.mode, row.batch, row.context, *(row.phases_us.get(name) for name in phases)]
                 for row in recording.rows]  # fmt: skip
        parts.append(_chart(decomposition_figure(decompositions(recording), recording.provenance.label), False))
        parts.append(_table("Host time of a step by phase, median µs", head, cells))
    if memory:
        parts.append(_chart(memory_figure(memory, recording.provenance.label), False))
    return _write(path, "Step latency", parts, origin_facts(recording.provenance))


def write_beside_page(path: Path, recording: BesideRecording, sentences: Sequence[str]) -> Path:
    """Write the page of `labkit compare transformers`: what came out, the bars, every row, the settings, the origin.

    Raises:
        LabkitError: plotly is not installed. RecordingError: the file cannot be written.
    """
    try:
        from labkit.figures.beside import beside_figure
    except ImportError as error:
        raise _needs_plotly(error) from None
    rows = [[getattr(row, name) for name in _BESIDE_COLUMNS] for row in recording.rows]
    settings = {row.name: row.settings for row in recording.rows}
    cells = [[name, ", ".join(f"{k}={v}" for k, v in found.items())] for name, found in settings.items()]
    cells += [[way, f"did not run: {why}"] for way, why in recording.refused.items()]
    parts = [_paragraphs(sentences), _chart(beside_figure([recording]), True)]
    parts += [_table("Every row", _BESIDE_COLUMNS, rows), _table("Settings", ("way", "settings"), cells, "text")]
    return _write(path, "Engines side by side", parts, origin_facts(recording.provenance))


def write_figures(
    path: Path, title: str, figures: Sequence[Any], sentences: Sequence[str], facts: Sequence[str], code: str = ""
) -> Path:
    """Write a page of figures with sentences and where the numbers are from.

    Args:
        figures: plotly's. code: shown below, folded, where given.

    Raises:
        RecordingError: the file cannot be written.
    """
    parts = [_chart(figure, number == 0) for number, figure in enumerate(figures)]
    parts.append(_paragraphs(sentences))
    if code:
        parts.append(f"<details><summary>Generated code</summary><pre>{html.escape(code)}</pre></details>")
    return _write(path, title, parts, facts)


def origin_facts(origin: Provenance) -> list[str]:
    """Where numbers come from, one fact a line."""
    return [
        origin.label, origin.cpu, f"driver {origin.driver}" if origin.driver else "no GPU driver",
        ", ".join(f"{k} {v}" for k, v in origin.packages.items()),
        f"commit {origin.commit or 'unknown'}" + (" with changes" if origin.dirty else ""), origin.command,
        f"order: {origin.order}", f"{origin.date}, n ≥ {origin.n}",
    ]  # fmt: skip


# --- parts ---------------------------------------------------------------------------------------------------------


def _write(path: Path, title: str, parts: Sequence[str], facts: Sequence[str]) -> Path:
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>{''.join(parts)}"
        f'<p class="origin">{"<br>".join(html.escape(fact) for fact in facts)}</p></body></html>\n'
    )
    return write_atomically(path, page.encode())


def _chart(figure: Any, with_code: bool) -> str:
    """A plotly figure; the first one of a page brings plotly's code along."""
    return str(figure.to_html(full_html=False, include_plotlyjs=with_code, config={"displaylogo": False}))


def _paragraphs(sentences: Sequence[str]) -> str:
    return "".join(f"<p>{html.escape(s).replace(chr(10), '<br>')}</p>" for s in sentences)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]], kind: str = "numbers") -> str:
    lines = ["".join(f"<th>{html.escape(name)}</th>" for name in head)]
    lines += ["".join(f"<td>{html.escape(_cell(value))}</td>" for value in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<h2>{html.escape(title)}</h2><div class="scroll {kind}"><table>{body}</table></div>'


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _needs_plotly(error: ImportError) -> LabkitError:
    return LabkitError("--html", f"the chart needs plotly ({error})", "pip install plotly")
