"""What a suite has measured so far, so that a killed run loses one row. Refuses to know how anything is measured.

Rows go to a journal beside the file, one line each; the file itself is written whole, now and then and at the end, and
the journal then goes. Writing the file after every row would cost more than measuring it once there are thousands.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from labkit.errors import LabkitError
from labkit.measure.provenance import Provenance, ProvenanceError
from labkit.measure.recordings import SCHEMA, Captured, Recording, RecordingError, Refusal, Row, Setup, load

#: Seconds after which the file is written anew in the middle of a run.
EVERY_S = 120.0


class Journal:
    """Rows, refusals, setups and captures of one suite, kept in `out` and the journal beside it.

    Raises:
        ProvenanceError: what is there was recorded on another machine, version or commit.
        RecordingError: the file is damaged.
    """

    def __init__(self, out: Path, provenance: Provenance) -> None:
        self.out, self.path = out, out.with_name(f"{out.name}.journal")
        self._provenance = provenance
        self.rows: dict[tuple[Any, ...], Row] = {}
        self._refused: dict[tuple[Any, ...], Refusal] = {}
        self._failed: dict[tuple[Any, ...], Refusal] = {}
        self.setups: dict[tuple[Any, ...], Setup] = {}
        self._captures: dict[tuple[Any, ...], Captured] = {}
        self._file: IO[str] | None = None
        self._written = time.monotonic()
        if out.exists():
            before = load(out)
            self._check(before.provenance)
            self._take(before.rows, before.refused, before.setups, before.captures)
        if self.path.exists():
            self._read()

    def _check(self, before: Provenance) -> None:
        differences = self._provenance.same_machine(before)
        if differences:
            raise ProvenanceError(
                f"resuming {self.out.name}",
                f"it was recorded elsewhere: {'; '.join(differences)}",
                f"Name another file, or remove this one (and {self.path.name}).",
            )

    def _take(
        self, rows: Iterable[Row], refused: Iterable[Refusal], setups: Iterable[Setup], captures: Iterable[Captured]
    ) -> None:
        self.rows.update((one.key, one) for one in rows)
        self._refused.update((one.key, one) for one in refused)
        self.setups.update((one.key, one) for one in setups)
        self._captures.update((one.key, one) for one in captures)

    def _read(self) -> None:
        """What a killed run left. The last line may be torn: nothing after the first bad line is believed."""
        head, *lines = self.path.read_bytes().split(b"\n")
        try:
            before = Provenance.from_dict(json.loads(head))
        except (ValueError, LabkitError):
            return  # killed while it was made
        self._check(before)
        where = self.path.name
        for line in lines:
            try:
                kind, value = json.loads(line)
                part = Recording.from_dict(
                    {"schema": SCHEMA, "provenance": {**before.as_dict(), "n": 0}, "rows": [], kind: [value]}, where
                )
            except (ValueError, TypeError, RecordingError):
                return
            self._take(part.rows, part.refused, part.setups, part.captures)

    # --- what is known ---------------------------------------------------------------------------------------------

    @property
    def recording(self) -> Recording:
        """All that is known, what failed in this run included."""
        return self._recording((*self._refused.values(), *self._failed.values()))

    def _recording(self, refused: Iterable[Refusal]) -> Recording:
        n = min([self._provenance.n, *(row.n for row in self.rows.values())])
        return Recording(
            self._provenance.replace(n=n), tuple(self.rows.values()), tuple(refused), tuple(self.setups.values()),
            tuple(self._captures.values()),
        )  # fmt: skip

    def is_open(self, key: tuple[Any, ...]) -> bool:
        """Whether a row is neither measured nor refused: itself, with its mode, or with its whole backend.

        A key of batch 0 is open until its captures are known.
        """
        model, backend, compile, mode, batch, context, _ = key
        where = (model, backend, compile)
        refused = {(*where, "", 0, 0), (*where, mode, 0, 0), (*where, mode, batch, context)}
        if refused & self._refused.keys() or refused & self._failed.keys():
            return False
        return (*where, mode) not in self.setups if batch == 0 else key not in self.rows

    # --- what comes in ---------------------------------------------------------------------------------------------

    def add(self, row: Row) -> None:
        self.rows[row.key] = row
        self._append("rows", row.as_dict())

    def ready(self, one: Setup, captures: Iterable[Captured] = ()) -> None:
        """Keep the first: what an interrupted run has compiled is in the cache when it goes on."""
        if one.key in self.setups:
            return
        for captured in captures:
            self._captures[captured.key] = captured
            self._append("captures", dataclasses.asdict(captured))
        self.setups[one.key] = one  # last: with it the captures are known
        self._append("setups", dataclasses.asdict(one))

    def refuse(self, one: Refusal, error: Exception | None = None) -> None:
        """Pass over what cannot run; in the file only where the engine itself gave the reason."""
        if error is None or isinstance(error, LabkitError):
            self._refused[one.key] = one
            self._append("refused", dataclasses.asdict(one))
        else:
            self._failed[one.key] = one

    def _append(self, kind: str, value: Mapping[str, Any]) -> None:
        if time.monotonic() - self._written > EVERY_S:
            self.save()
            return
        if self._file is None:
            # What an older journal holds is known by now, and its last line may be torn: begin with the file.
            self._save_if_there_is_something()
            try:
                self._file = self.path.open("w", encoding="utf-8")
            except OSError as error:
                raise RecordingError(
                    self.path.name, f"cannot be written ({error.strerror})", "Name a file in a folder you may write."
                ) from None
            self._file.write(json.dumps(self._provenance.as_dict()) + "\n")
        self._file.write(json.dumps([kind, value]) + "\n")
        self._file.flush()

    def _save_if_there_is_something(self) -> None:
        if self.path.exists():
            self.save()

    def save(self) -> None:
        """Write the file whole; the journal is no longer needed then."""
        self._recording(self._refused.values()).save(self.out)
        if self._file is not None:
            self._file.close()
            self._file = None
        self.path.unlink(missing_ok=True)
        self._written = time.monotonic()
