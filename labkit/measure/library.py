"""Every recording that can be shown: those that ship with labkit and the user's own. Refuses to know who shows them.

A file of the user's that cannot be read is reported with a sentence and passed over; it never stops the others. What
ships was checked by a test, so that a damaged one there is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from labkit import home
from labkit.errors import LabkitError
from labkit.measure import recordings
from labkit.measure.provenance import Kind, Provenance
from labkit.measure.recordings import Recording
from labkit.measure.storage import RecordingError, read_object, write_atomically

SHIPPED = "ships with labkit"
#: What a file may be called.
SUFFIXES = (".json.gz", ".json")
#: The word under "table" in a file → the class that reads it, as module and name. A file of steps has no such word.
TABLES: dict[str, tuple[str, str]] = {
    "attention": ("labkit.measure.attention", "AttentionRecording"),
    "timelines": ("labkit.measure.timeline_recording", "TimelineRecording"),
    "requests": ("labkit.measure.traffic", "RequestRecording"),
    "beside": ("labkit.measure.beside", "BesideRecording"),
}


class Table(Protocol):
    """What every kind of recording has."""

    @property
    def provenance(self) -> Provenance: ...

    def as_dict(self) -> dict[str, Any]: ...


@dataclasses.dataclass(frozen=True)
class Entry:
    """One recording with where it is from: "ships with labkit", or "yours: FILE".

    table: "steps" for a `Recording`, else a key of TABLES.
    """

    name: str
    origin: str
    table: str
    recording: Any

    @property
    def provenance(self) -> Provenance:
        found: Provenance = self.recording.provenance
        return found

    @property
    def is_shipped(self) -> bool:
        return self.origin == SHIPPED

    @property
    def label(self) -> str:
        """One line for a list: `NVIDIA H200 · 2026-11-30 · h200.json.gz (ships with labkit)`."""
        return f"{self.provenance.device} · {self.provenance.date[:10]} · {self.name} ({self.origin.split(':')[0]})"


@dataclasses.dataclass(frozen=True)
class Library:
    """Recordings, the shipped ones first, each group by file name; a sentence for each file that was passed over."""

    entries: tuple[Entry, ...]
    problems: tuple[str, ...] = ()

    @property
    def recordings(self) -> tuple[Recording, ...]:
        """The recordings of steps, as `recordings.shipped()` gives those that ship."""
        return tuple(one.recording for one in self.entries if one.table == "steps")

    def of(self, table: str) -> tuple[Entry, ...]:
        """The entries of one table: "steps", "attention", …"""
        return tuple(one for one in self.entries if one.table == table)

    def find(self, name: str) -> Entry:
        """The entry of a file name, with or without its suffix; the user's own before a shipped one of that name.

        Raises:
            RecordingError: there is none; the names that there are follow.
        """
        bare = _bare(name)
        found = [one for one in self.entries if _bare(one.name) == bare]
        if not found:
            names = ", ".join(dict.fromkeys(_bare(one.name) for one in self.entries)) or "none"
            raise RecordingError(f"recording {name!r}", "there is none of that name", f"There are: {names}.")
        return found[-1]


def library() -> Library:
    """Everything that ships and everything in the user's folder (`labkit.home.recordings_dir()`), read now.

    Files that have not changed since the last call are not read again.

    Raises:
        RecordingError: a shipped file is damaged.
    """
    shipped = [_shipped(path) for path in _files(recordings.SHIPPED, deep=True)]
    entries, problems = [], []
    for path in _files(home.recordings_dir()):
        try:
            one = _read(path, f"yours: {path.name}")
            _check_kind(one.recording, path.name)
            entries.append(one)
        except Exception as error:  # whatever is in it, the others are shown
            problems.append(f"{path.name} was passed over: {_sentence(error)}")
    return Library((*shipped, *entries), tuple(problems))


def load_any(path: str | os.PathLike[str]) -> Table:
    """Read and check a file of any table, compressed or not: steps, attention calls, …

    Raises:
        RecordingError, ProvenanceError: the file is missing, damaged, of a newer schema or of no table known here.
    """
    return _parse(Path(path))[1]


def add(path: str | os.PathLike[str]) -> Entry:
    """Check a file and copy it into the user's folder under its own name; the same file twice is one file.

    Raises:
        RecordingError, ProvenanceError: the file cannot be read or believed, its numbers are not RECORDED, another of
            that name is there already, or the folder cannot be written.
    """
    path = Path(path)
    table, recording = _parse(path)
    name = path.name if path.name.endswith(SUFFIXES) else f"{path.name}.json"
    if name.startswith("."):
        raise RecordingError(f"adding {name}", "a name that begins with a dot is never listed", "Rename the file.")
    _check_kind(recording, path.name)
    folder = home.recordings_dir()
    target, data = folder / name, path.read_bytes()
    if target.exists() and target.read_bytes() != data:
        raise RecordingError(
            f"adding {name}", "another recording of that name is yours already", "Give the file another name."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordingError(
            f"adding {name}", f"your folder for recordings cannot be made ({error.strerror})", "Set LABKIT_HOME."
        ) from None
    if not target.exists():
        write_atomically(target, data)
    return Entry(name, f"yours: {name}", table, recording)


def remove(name: str) -> None:
    """Take one of the user's recordings out of the folder.

    Raises:
        RecordingError: there is no such file of the user's.
    """
    for path in _files(home.recordings_dir()):
        if name in (path.name, _bare(path.name)):
            path.unlink()
            return
    raise RecordingError(f"recording {name!r}", "none of yours has that name", "`labkit recordings` lists them.")


def _files(folder: Path, deep: bool = False) -> list[Path]:
    if not folder.is_dir():
        return []
    found = folder.rglob("*") if deep else folder.glob("*")
    return sorted(path for path in found if path.name.endswith(SUFFIXES) and not path.name.startswith("."))


def _shipped(path: Path) -> Entry:
    return _read(path, SHIPPED)


def _read(path: Path, origin: str) -> Entry:
    state = path.stat()
    table, recording = _parse_once(path, state.st_mtime_ns, state.st_size)
    return Entry(path.name, origin, table, recording)


@functools.lru_cache(maxsize=256)
def _parse_once(path: Path, changed_ns: int, size: int) -> tuple[str, Table]:
    return _parse(path)


def _parse(path: Path) -> tuple[str, Table]:
    data = read_object(path)
    table = data.get("table") if isinstance(data, Mapping) else None
    if not table:
        return "steps", Recording.from_dict(data, path.name)
    if not isinstance(table, str) or table not in TABLES:
        raise RecordingError(
            path.name, f"is a table of {table!r}, which this version does not know", "Update labkit, or record again."
        )
    module, name = TABLES[table]
    read: Any = getattr(importlib.import_module(module), name)
    found: Table = read.from_dict(data, path.name)
    return table, found


def _check_kind(recording: Table, name: str) -> None:
    """Panels call what they find here RECORDED, so nothing else may be here."""
    kind = recording.provenance.kind
    if kind is not Kind.RECORDED:
        raise RecordingError(
            name, f"holds numbers that are {kind}, not RECORDED", "--out FILE of what measures them keeps a recording."
        )


def _bare(name: str) -> str:
    return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, LabkitError) else f"{type(error).__name__}: {error}"
