"""One step in four forms, two switches with two positions each: eager, graph, compile, both. Refuses to measure it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from labkit.lab.runs import Outcome
from labkit.measure.provenance import Provenance

EAGER, GRAPH, COMPILE, BOTH = FORMS = ("eager", "graph", "compile", "both")
#: Form → what it is, in words.
WORDS = {
    EAGER: "eager", GRAPH: "graph alone", COMPILE: "compile alone", BOTH: "compile and graph",
}  # fmt: skip
#: The decode step of an 8B model on one GPU as one of the source texts has it, in ms. Nobody says how it was measured.
TEXT_MS = {EAGER: 5.5, GRAPH: 5.1, COMPILE: 5.2, BOTH: 5.0}
#: Below this a difference is none.
NOISE = 0.05


@dataclasses.dataclass(frozen=True)
class Cell:
    """One form. ms: the median step; None where nobody knows. launches: what the host starts in a step."""

    ms: float | None = None
    launches: int | None = None


def table(cells: Mapping[str, Cell]) -> list[list[float | None]]:
    """ms as rows: not compiled, compiled; columns: no graph, graph."""
    of = {form: cells.get(form, Cell()).ms for form in FORMS}
    return [[of[EAGER], of[GRAPH]], [of[COMPILE], of[BOTH]]]


def winner(cells: Mapping[str, Cell]) -> str | None:
    """Which of the two alone is faster: GRAPH, COMPILE, "neither" within noise, None where one is not known."""
    graph, compiled = (cells.get(form, Cell()).ms for form in (GRAPH, COMPILE))
    if graph is None or compiled is None:
        return None
    if abs(graph - compiled) < NOISE * min(graph, compiled):
        return "neither"
    return GRAPH if graph < compiled else COMPILE


def effects(cells: Mapping[str, Cell]) -> dict[str, float | None]:
    """What each switch alone saves, and by how much both together differ from the sum of that, in ms."""
    eager, graph, compiled, both = (cells.get(form, Cell()).ms for form in FORMS)
    saved = {name: None if eager is None or ms is None else eager - ms for name, ms in
             (("graph", graph), ("compile", compiled), ("both", both))}  # fmt: skip
    parts = saved["graph"], saved["compile"], saved["both"]
    interaction = parts[2] - (parts[0] + parts[1]) if None not in parts else None  # type: ignore[operator]
    return {"graph_gain": saved["graph"], "compile_gain": saved["compile"], "interaction": interaction}


def outcome(
    what: str,
    batch: int,
    cells: Mapping[str, Cell],
    made: Provenance | None,
    *,
    why: str = "",
    notes: tuple[str, ...] = (),
    more: Mapping[str, Any] | None = None,
    stopped: bool = False,
    emulated: bool = False,
) -> Outcome:
    """A run of the panel: the four cells, their launches and what follows from them.

    emulated: the graphs were a CPU's, so that nobody wins against the compiler.
    """
    first = None if emulated else winner(cells)
    values: dict[str, Any] = {"what": what, "batch": batch, "winner": first, **effects(cells)}
    for form in FORMS:
        values[f"{form}_ms"] = cells.get(form, Cell()).ms
        values[f"{form}_launches"] = cells.get(form, Cell()).launches
    known = [form for form in FORMS if cells.get(form, Cell()).launches is not None]
    data = {
        "title": what, "cells": table(cells), "forms": [WORDS[form] for form in known],
        "counts": [cells[form].launches for form in known],
    }  # fmt: skip
    summary = f"{what}: {_said(cells, first)}{why}"
    return Outcome(data, {**values, **(more or {})}, summary, made, notes=notes, stopped=stopped)


def _said(cells: Mapping[str, Cell], first: str | None) -> str:
    known = [(form, cells[form].ms) for form in FORMS if form in cells and cells[form].ms is not None]
    listed = ", ".join(f"{WORDS[form]} {ms:.2f}" for form, ms in known)
    missing = [WORDS[form] for form in FORMS if form not in dict(known)]
    gone = f" ({', '.join(missing)}: not measured)" if missing else ""
    if first is None:
        return f"{listed} ms{gone}."
    if first == "neither":
        return f"{listed} ms. Graph alone and compile alone do not differ by more than {NOISE:.0%}."
    other = COMPILE if first == GRAPH else GRAPH
    name = "graph" if first == GRAPH else "compiler"
    return f"{listed} ms. Of the two alone, the {name} wins: {cells[first].ms:.2f} against {cells[other].ms:.2f} ms."
