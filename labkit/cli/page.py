"""The page that `labkit bench --html` writes: a chart, its table, its origin. Refuses to measure anything."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit.errors import LabkitError
from labkit.measure.recordings import Recording, write_atomically

_COLUMNS = ("model", "backend", "requested_mode", "mode", "size", "batch", "context", "p10_ms", "p50_ms", "p90_ms", "n",
            "launches", "graph_launches", "device_us", "tok_s", "gb_s", "floor_ms")  # fmt: skip
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;font-size:.85em}td,th{padding:.2em .6em;border-bottom:1px solid #ddd;text-align:right}
td:nth-child(-n+4),th:nth-child(-n+4){text-align:left}.origin{color:#555}.scroll{overflow-x:auto}"""


def write_page(path: Path, recording: Recording, sentences: Sequence[str]) -> Path:
    """Write a page that needs no network: the chart's code is inside.

    Raises:
        LabkitError: plotly is not installed. RecordingError: the file cannot be written.
    """
    try:
        from labkit.figures.latency import RunPoints, latency_figure
    except ImportError as error:
        raise LabkitError("--html", f"the chart needs plotly ({error})", "pip install plotly") from None
    runs = [
        RunPoints(
            number, row.backend, row.mode, row.size, row.batch, str(recording.provenance.kind), row.samples_ms,
            row.p10_ms, row.p50_ms, row.p90_ms,
        )
        for number, row in enumerate(recording.rows, 1)
    ]  # fmt: skip
    chart = latency_figure(runs).to_html(full_html=False, include_plotlyjs=True)
    cells = [_COLUMNS, *([_cell(getattr(row, name)) for name in _COLUMNS] for row in recording.rows)]
    rows = ["".join(f"<{tag}>{html.escape(str(c))}</{tag}>" for c in line) for line, tag in
            zip(cells, ["th", *["td"] * len(recording.rows)], strict=True)]  # fmt: skip
    origin = recording.provenance
    facts = [origin.label, origin.cpu, f"driver {origin.driver}" if origin.driver else "no GPU driver",
             ", ".join(f"{k} {v}" for k, v in origin.packages.items()), f"commit {origin.commit or 'unknown'}"
             + (" with changes" if origin.dirty else ""), origin.command, f"order: {origin.order}"]  # fmt: skip
    body = "".join(f"<p>{html.escape(s).replace(chr(10), '<br>')}</p>" for s in sentences)
    table = "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>labkit bench</title><style>{_STYLE}</style>'
        f"</head><body><h1>Step latency</h1>{chart}{body}<div class=scroll>{table}</div>"
        f'<p class="origin">{"<br>".join(html.escape(fact) for fact in facts)}</p></body></html>\n'
    )
    return write_atomically(path, page.encode())


def write_figures(
    path: Path, title: str, figures: Sequence[Any], sentences: Sequence[str], facts: Sequence[str], code: str = ""
) -> Path:
    """Write a page of figures with sentences and where the numbers are from; it needs no network.

    Args:
        figures: plotly's. code: shown below, folded, where given.

    Raises:
        RecordingError: the file cannot be written.
    """
    charts = [f.to_html(full_html=False, include_plotlyjs=number == 0) for number, f in enumerate(figures)]
    text = "".join(f"<p>{html.escape(s).replace(chr(10), '<br>')}</p>" for s in sentences)
    folded = f"<details><summary>Generated code</summary><pre>{html.escape(code)}</pre></details>" if code else ""
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>{''.join(charts)}{text}{folded}"
        f'<p class="origin">{"<br>".join(html.escape(fact) for fact in facts)}</p></body></html>\n'
    )
    return write_atomically(path, page.encode())


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
