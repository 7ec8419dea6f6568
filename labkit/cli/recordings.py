"""`labkit recordings`: what there is to look at, a file more, two machines side by side. Measures nothing."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.cli.answer import Answer, Console, milliseconds, table
from labkit.cli.options import Parser, UsageError
from labkit.errors import LabkitError
from labkit.measure import library

if TYPE_CHECKING:
    from labkit.measure.machines import MachineDiff
    from labkit.measure.recordings import Recording


def recordings_options(parser: Parser) -> None:
    pass


def recordings(args: argparse.Namespace, console: Console) -> Answer:
    """List every recording that panels can show: those that ship and the user's own."""
    from labkit.home import recordings_dir

    found = library.library()
    lines = [("file", "from", "holds", "rows", "device", "date", "commit")]
    rows = []
    for one in found.entries:
        made, count = one.provenance, len(getattr(one.recording, "rows", ()))
        commit = (made.commit or "unknown")[:10] + (" with changes" if made.dirty else "")
        origin = one.origin.split(":")[0]
        lines.append((one.name, origin, one.table, str(count), made.device, made.date[:10], commit))
        rows.append(
            {
                "file": one.name, "origin": one.origin, "table": one.table, "rows": count, "device": made.device,
                "kind": str(made.kind), "date": made.date, "commit": made.commit, "dirty": made.dirty,
            }
        )  # fmt: skip
    text = [table(lines, left=(0, 1, 2, 4, 5, 6)), *found.problems, f"Yours are in {recordings_dir()}"]
    return Answer({"recordings": rows, "problems": list(found.problems)}, "\n".join(text))


def recordings_add_options(parser: Parser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a recording; it is checked and copied")


def recordings_add(args: argparse.Namespace, console: Console) -> Answer:
    """Check a file and put it among the user's recordings."""
    added = library.add(args.file)
    count = len(getattr(added.recording, "rows", ()))
    data = {"file": added.name, "origin": added.origin, "table": added.table, "rows": count}
    return Answer(data, f"{added.name} ({added.table}, {count} rows, {added.provenance.label}) is yours now.")


def recordings_diff_options(parser: Parser) -> None:
    parser.add_argument("first", metavar="A", help="a recording by its name in `labkit recordings`, or a file")
    parser.add_argument("second", metavar="B", help="the one to put beside it")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the chart")


def recordings_diff(args: argparse.Namespace, console: Console) -> Answer:
    """Put two machines side by side: the configurations that both recorded."""
    from labkit.cli.measure import writable
    from labkit.measure.machines import diff

    writable(getattr(args, "html", None))
    found = diff(_steps(args.first), _steps(args.second))
    if hasattr(args, "html"):
        _write(args.html, found)
    return Answer(found.as_dict(), diff_text(found))


def _steps(word: str) -> Recording:
    """A recording of steps by name, or by path where there is such a file."""
    from labkit.measure.recordings import load

    if Path(word).is_file():
        return load(word)
    entry = library.library().find(word)
    if entry.table != "steps":
        raise UsageError(
            f"labkit recordings diff {word}", f"it is a table of {entry.table}", "Name a recording of steps."
        )
    recording: Recording = entry.recording
    return recording


def diff_text(found: MachineDiff) -> str:
    """Two machines as an aligned table, with what else differs."""
    a, b = found.names
    parts = [f"A: {found.first.label}\nB: {found.second.label}", found.sentence]
    if found.pairs:
        lines = [("model", "backend", "compile", "mode", "context", "batch", "A p50 ms", "B p50 ms", "B / A", "also")]
        for pair in found.pairs:
            row = pair.first
            lines.append(
                (
                    row.model, row.backend, row.compile, row.requested_mode, str(row.context), str(row.batch),
                    milliseconds(row.p50_ms), milliseconds(pair.second.p50_ms), pair.ratio.text, "; ".join(pair.notes),
                )
            )  # fmt: skip
        parts.append(table(lines, left=(0, 1, 2, 3, 9)))
    if found.only_first or found.only_second:
        parts.append(f"Not on both: {found.only_first} rows of A, {found.only_second} of B.")
    if found.differs:
        parts.append(f"Besides the machine these differ: {'; '.join(found.differs)}.")
    return "\n\n".join(parts)


def _write(path: Path, found: MachineDiff) -> None:
    from labkit.cli.page import write_figures

    try:
        from labkit.figures.machines import machines_figure
    except ImportError as error:
        raise LabkitError("--html", f"the chart needs plotly ({error})", "pip install plotly") from None
    facts = [f"A: {found.first.label}, {found.first.command}", f"B: {found.second.label}, {found.second.command}"]
    write_figures(path, "Two machines", [machines_figure(found)], [found.sentence, *found.differs], facts)
