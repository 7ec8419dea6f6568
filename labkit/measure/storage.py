"""What every stored table shares: checks of fields and samples, older files made new, files whole or not at all.

Refuses to know what a table's rows mean.
"""

from __future__ import annotations

import copy
import dataclasses
import gzip
import itertools
import json
import math
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.errors import LabkitError, did_you_mean
from labkit.measure.stats import summary

#: A stored row has at least this many samples.
MIN_SAMPLES = 50
#: A whole number in a file has at most this many digits; a float holds them.
MAX_DIGITS = 300


class RecordingError(LabkitError, ValueError):
    """A recording that cannot be read, or cannot be believed."""


AGAIN = "The file was edited or damaged; record again."


def check_fields(cls: type[Any], data: Any, where: str, optional: Sequence[str] = ()) -> None:
    """Raise RecordingError unless `data` holds every field of the dataclass `cls`, nothing else, each of its type.

    optional: fields that a file from before they existed may lack.
    """
    if not isinstance(data, Mapping):
        raise RecordingError(where, f"is {type(data).__name__}, not an object", "Record again with this version.")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for name in data:
        if name not in fields:
            raise RecordingError(where, f"has an unknown field {name!r}", did_you_mean(str(name), fields))
    for name, field in fields.items():
        if name not in data:
            if name in optional:
                continue
            raise RecordingError(where, f"has no {name!r}", "Record again with this version.")
        if not _matches(data[name], str(field.type)):
            raise RecordingError(
                where, f"{name}={data[name]!r} is not of type {field.type}", "Record again with this version."
            )


def check_samples(row: Any, unit: str, resolution: float, where: str) -> None:
    """Raise RecordingError unless `row.samples_UNIT` are `row.n` times above zero, with the percentiles beside them."""
    samples = getattr(row, f"samples_{unit}")
    if row.n != len(samples) or not samples:
        raise RecordingError(where, f"says n={row.n} and holds {len(samples)} samples", AGAIN)
    if not all(math.isfinite(s) and s > 0 for s in samples):
        raise RecordingError(where, "holds a sample that is not a time above zero", AGAIN)
    found = summary(samples)
    for name in ("p10", "p50", "p90"):
        stored, computed = getattr(row, f"{name}_{unit}"), getattr(found, name)
        if not abs(stored - computed) <= resolution:
            raise RecordingError(where, f"says {name}_{unit}={stored} and its samples give {computed:.4f}", AGAIN)


def _matches(value: Any, annotation: str) -> bool:
    if annotation.endswith("| None"):
        return value is None or _matches(value, annotation.removesuffix("| None").strip())
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if annotation == "float":
        return number and math.isfinite(value)
    if annotation == "int":
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if annotation.startswith("tuple["):
        inner = annotation.removeprefix("tuple[").removesuffix(", ...]")
        return isinstance(value, (list, tuple)) and all(_matches(v, inner) for v in value)
    if annotation.startswith("dict[str, "):
        inner = annotation.removeprefix("dict[str, ").removesuffix("]")
        return isinstance(value, Mapping) and all(isinstance(k, str) and _matches(v, inner) for k, v in value.items())
    return isinstance(value, {"str": str, "bool": bool}[annotation])


def read_all(cls: type[Any], data: Mapping[str, Any], name: str, where: str) -> Iterable[Any]:
    """The objects of an optional list of a file, checked; none where the file has no such list."""
    found = data.get(name, [])
    if not isinstance(found, list):
        raise RecordingError(where, f"has {name!r} that is no list", "Record again with this version.")
    for i, one in enumerate(found):
        check_fields(cls, one, f"{where}, {name} {i}")
    return (cls(**one) for one in found)


def read_object(path: Path) -> Any:
    """What a file of JSON holds, compressed or not.

    Raises:
        RecordingError: the file is missing or damaged.
    """
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        return json.loads(text, parse_int=_whole)
    except FileNotFoundError:
        raise RecordingError(path.name, "there is no such file", "Check the name.") from None
    except OSError as error:  # gzip's own complaints are OSErrors too
        raise RecordingError(path.name, f"cannot be read ({error.strerror or error})", "Copy the file again.") from None
    except (EOFError, ValueError, RecursionError, zlib.error) as error:
        raise RecordingError(
            path.name, f"is damaged ({type(error).__name__}: {error})", "Copy the file again."
        ) from None


def _whole(digits: str) -> int:
    """A whole number of a file. Python's have no limit, and one that no float can hold breaks every check after it."""
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


Step = Callable[[dict[str, Any]], dict[str, Any]]


def migrate(data: Mapping[str, Any], current: int, steps: Mapping[int, Step], where: str) -> dict[str, Any]:
    """The object of a file of any schema up to `current`, as `current` writes it; `data` stays as it is.

    Args:
        steps: from each older schema to the next one. A step gets a copy of its own to change.

    Raises:
        RecordingError: the schema is missing, newer than `current`, or older than the first step.
    """
    schema = data.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise RecordingError(where, f"has schema {schema!r}", "Name a file that `labkit record` wrote.")
    if schema > current:
        raise RecordingError(
            where,
            f"has schema {schema}, which is newer than this version of labkit knows ({current})",
            "Update labkit, or record again with this version.",
        )
    out: dict[str, Any] = copy.deepcopy(dict(data)) if schema < current else dict(data)
    for number in range(schema, current):
        if number not in steps:
            raise RecordingError(where, f"has schema {number}, and nothing here reads that", "Record again.")
        out = {**steps[number](out), "schema": number + 1}
    return out


def check_not_made_up(rows: Sequence[Any], unit: str, where: str) -> None:
    """Raise RecordingError where samples cannot be measurements: all equal, in strict order, or those of another row.

    Judged from MIN_SAMPLES samples on: fifty times of one machine neither agree to the last digit nor come sorted.
    """
    seen: dict[tuple[float, ...], int] = {}
    for i, row in enumerate(rows):
        samples = tuple(getattr(row, f"samples_{unit}"))
        if len(samples) < MIN_SAMPLES:
            continue
        steps = list(itertools.pairwise(samples))
        why = ""
        if len(set(samples)) == 1:
            why = f"holds {len(samples)} equal samples"
        elif all(a < b for a, b in steps) or all(a > b for a, b in steps):
            why = f"holds {len(samples)} samples in sorted order, not in the order in which they were taken"
        elif samples in seen:
            why = f"holds the samples of row {seen[samples]}"
        if why:
            raise RecordingError(f"{where}, row {i}", f"{why}: these are no measurements", AGAIN)
        seen[samples] = i


def write_object(path: Path, data: Any) -> Path:
    """Write plain values as compressed JSON, whole or not at all; the same values give the same bytes."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return write_atomically(path, gzip.compress(text.encode(), mtime=0))


def write_atomically(path: Path, data: bytes) -> Path:
    """Put `data` at `path`, whole or not at all, also when the process is killed half way."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise RecordingError(
            path.name, f"cannot be written ({error.strerror})", "Name a file in a folder you may write."
        ) from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path
