"""Files of a panel: what Save writes, and what lets a new kernel bring runs back. Refuses to know widgets and sources.

Every file says where its numbers come from. What is kept for a new kernel lies in the user's folder, one file a panel.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import dataclasses
import enum
import io
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from labkit.errors import ConfigError, LabkitError
from labkit.home import home
from labkit.lab import ui
from labkit.lab.runs import origin
from labkit.measure.provenance import Provenance
from labkit.measure.storage import write_atomically

SCHEMA = 1
#: Runs and bytes that are kept of one panel; the oldest go first.
MOST_RUNS, MOST_BYTES = 40, 4_000_000
ENDINGS = (".csv", ".json", ".html", ".png")
#: A download link holds its file; above this only the file is written.
LINK_BYTES = 1_500_000


def plain(value: Any) -> Any:
    """Values as JSON has them: dataclasses and mappings become objects, tuples and arrays lists, enums their value.

    Raises:
        ConfigError: something else is in there.
    """
    if isinstance(value, enum.Enum):
        return value.value
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset, range)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    raise ConfigError("a run", f"{type(value).__name__} cannot be stored", "Keep `data` and `values` to plain values.")


# --- what Save writes ------------------------------------------------------------------------------------------------


def ending(path: str | os.PathLike[str]) -> str:
    """The kind of file by its name.

    Raises:
        ConfigError: another one was asked for.
    """
    found = Path(path).suffix.lower()
    if found not in ENDINGS:
        raise ConfigError(f"save {str(path)!r}", f"{found or 'no ending'} is no kind of file that a panel writes",
                          f"Take one of {', '.join(ENDINGS)}.")  # fmt: skip
    return found


def csv_of(rows: Sequence[Mapping[str, Any]], origins: Sequence[Provenance]) -> bytes:
    """A table: one line a run, its origin in the last column. Lists are left to JSON."""
    names = list(dict.fromkeys(name for row in rows for name, value in row.items() if not _is_list(value)))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, "provenance"])
    for row, made in zip(rows, origins, strict=True):
        writer.writerow([*(row.get(name, "") for name in names), f"{made.kind} · {origin(made)}"])
    return out.getvalue().encode("utf-8")


def json_of(panel: str, runs: Sequence[Mapping[str, Any]]) -> bytes:
    """Whole runs: settings, values, data, provenance."""
    data = {"schema": SCHEMA, "panel": panel, "runs": runs}
    return (json.dumps(plain(data), ensure_ascii=False, indent=1) + "\n").encode("utf-8")


def html_of(title: str, figure: go.Figure, body: str) -> bytes:
    """One page that needs no network: figure, sentences, table."""
    chart = figure.to_html(full_html=False, include_plotlyjs=True, config={"responsive": True, "displaylogo": False})
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{ui.escape(title)}</title>{ui.CSS}'
        "<style>body { font-family: system-ui, sans-serif; margin: 24px auto; max-width: 1180px; }</style></head>"
        f'<body class="labkit"><h1>{ui.escape(title)}</h1>{chart}{body}</body></html>\n'
    ).encode()


def png_of(figure: go.Figure) -> bytes:
    """The figure as a picture.

    Raises:
        LabkitError: kaleido, or the browser that it needs, is missing.
    """
    picture = go.Figure(figure).update_layout(paper_bgcolor="white", plot_bgcolor="white")
    try:
        return bytes(picture.to_image(format="png", width=1100, scale=2))
    except Exception as error:  # kaleido raises whatever its browser does
        why = "kaleido is not installed" if "kaleido" in str(error).lower() else str(error).strip().split("\n")[0]
        raise LabkitError(
            "save as PNG", why, "Press the camera in the chart's toolbar, or save .html; else: pip install kaleido"
        ) from error


def write(path: str | os.PathLike[str], data: bytes) -> Path:
    """Put a file where it was asked for.

    Raises:
        LabkitError: the folder cannot be written to.
    """
    try:
        return write_atomically(Path(path), data)
    except OSError as error:
        raise LabkitError(
            f"save {Path(path).name}", f"{error.strerror or error}", "Give another folder: panel.save('…')."
        ) from error


def free_name(stem: str, end: str, folder: Path | None = None) -> Path:
    """A name that is not taken: stem.csv, stem-2.csv, …"""
    folder = Path.cwd() if folder is None else folder
    number = 1
    while (path := folder / f"{stem}{'' if number == 1 else f'-{number}'}{end}").exists():
        number += 1
    return path


def link(name: str, data: bytes) -> str:
    """A link that hands the file to the browser; empty for a large one."""
    if len(data) > LINK_BYTES:
        return ""
    kinds = {".csv": "text/csv", ".json": "application/json", ".html": "text/html", ".png": "image/png"}
    coded = base64.b64encode(data).decode("ascii")
    where = f"data:{kinds[Path(name).suffix]};base64,{coded}"
    return f'<a href="{where}" download="{ui.escape(name)}">Download {ui.escape(name)}</a>'


# --- what outlives the kernel ----------------------------------------------------------------------------------------


def kept_file(panel: str) -> Path:
    """Where a panel's runs are kept.

    Raises:
        ConfigError: the name would not make a file name.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", panel):
        raise ConfigError(f"panel {panel!r}", "is no name for a file", "Take letters, digits, '-', '_' and '.'.")
    return home() / "panels" / f"{panel}.json"


def keep(panel: str, runs: Sequence[Mapping[str, Any]]) -> None:
    """Store the newest of these runs."""
    coded = [json.dumps(plain(run), ensure_ascii=False) for run in runs[-MOST_RUNS:]]
    while len(coded) > 1 and sum(map(len, coded)) > MOST_BYTES:
        coded.pop(0)
    text = f'{{"schema": {SCHEMA}, "panel": {json.dumps(panel)}, "runs": [\n' + ",\n".join(coded) + "\n]}\n"
    path = kept_file(panel)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode("utf-8"))


def kept(panel: str) -> list[dict[str, Any]]:
    """The runs that were stored; none where the file is missing, damaged or of a later version."""
    try:
        data = json.loads(kept_file(panel).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or not isinstance(data.get("runs"), list):
        return []
    return [run for run in data["runs"] if isinstance(run, dict)]


class Kept:
    """Runs of earlier kernels, and of before a Reset, until they are brought back. `on` says whether files are used."""

    def __init__(self, panel: str, on: bool) -> None:
        kept_file(panel)  # an unusable name is an error here, not at the first Save
        self.panel, self.on = panel, on
        self.before: list[Mapping[str, Any]] = [*kept(panel)] if on else []

    def store(self, runs: Sequence[Mapping[str, Any]]) -> None:
        """Keep these behind the earlier ones. What cannot be stored is no reason to lose a run on the page."""
        if self.on:
            with contextlib.suppress(LabkitError, OSError):
                keep(self.panel, [*self.before, *runs])

    def remember(self, runs: Sequence[Mapping[str, Any]]) -> None:
        """The panel forgets these: they count as earlier from now on."""
        if self.on:
            self.before = [*self.before, *runs][-MOST_RUNS:]

    def bring_back(self, restore: Callable[[Mapping[str, Any], int], Any], number: int) -> tuple[list[Any], int]:
        """The earlier runs by `restore(data, number)`, and how many could not be read: of another version, or damaged.

        Raises:
            LabkitError: none can be had.
        """
        stored = self.before or kept(self.panel)
        found: list[Any] = []
        for data in stored:
            with contextlib.suppress(Exception):
                found.append(restore(data, number + len(found)))
        if not found:
            raise LabkitError("Resume", "no run of this panel is stored that can be read", "Press Run.")
        self.before = []
        return found, len(stored) - len(found)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple, dict)) or hasattr(value, "tolist")
