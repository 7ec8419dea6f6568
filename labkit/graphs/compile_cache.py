"""Compiled passes kept on disk, the trace with them: a warm start reads two kinds of file and traces nothing.

One folder per pass, named by a hash over everything that the code depends on. A folder is written under another name
and then renamed, so it is whole or not there; it may be copied to another machine of the same kind. Refuses to
compile.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from labkit.graphs.compiler import ClassReport, CompiledClass
from labkit.graphs.pieces import Program

SCHEMA = 1
DISABLE = "LABKIT_DISABLE_COMPILE_CACHE"
_PROGRAM = "program.json"


def default_folder() -> Path:
    """`$LABKIT_CACHE/compile`, or `~/.cache/labkit/compile`; for a user without a home, in the temporary folder."""
    base = os.environ.get("LABKIT_CACHE")
    try:
        if base:
            return Path(base).expanduser() / "compile"
        return Path.home() / ".cache" / "labkit" / "compile"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / "labkit" / "compile"


def cache_key(factors: Mapping[str, Any]) -> str:
    """16 hex digits over `factors`, plain values in any order, and over what the compiler itself is."""
    everything = {"schema": SCHEMA, "torch": torch.__version__, **_compiler_factors(), **factors}
    text = json.dumps(everything, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _compiler_factors() -> dict[str, str]:
    import importlib.metadata

    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = ""
    return {"triton": triton, "cpu": torch.backends.cpu.get_cpu_capability()}


def source_hash(files: Sequence[str | Path]) -> str:
    """A hash over the text of source files, so that a change of the model's code is another pass."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()[:16]


class CompileCache:
    """Load and save compiled passes under a folder. Nothing here ever stops an engine: a bad entry costs a compile.

    Args:
        folder: where; None takes `default_folder()`. Nothing is read or written while the environment variable
            LABKIT_DISABLE_COMPILE_CACHE is set to 1.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or default_folder()
        self.enabled = os.environ.get(DISABLE) != "1"

    def load(self, key: str) -> tuple[Program, list[CompiledClass], list[ClassReport]] | None:
        """The pass of this key, or None; one warning when its folder is there and cannot be used."""
        entry = self.folder / key
        if not self.enabled or not entry.is_dir():
            return None
        try:
            data = json.loads((entry / _PROGRAM).read_text())
            program = Program.from_dict(data["program"])
            reports = [ClassReport(**r) for r in data["classes"]]
            classes = []
            for index, sizes in enumerate(data["sizes"]):
                made = CompiledClass(_load(entry / f"class{index}.bin", data["sha256"]))
                for size in sizes:
                    made.exact[size] = _load(entry / f"class{index}_{size}.bin", data["sha256"])
                classes.append(made)
            if len(classes) != program.num_classes:
                raise ValueError(f"{len(classes)} classes for a program of {program.num_classes}")
            return program, classes, reports
        except Exception as error:
            warnings.warn(
                f"The compiled model in {entry} cannot be used ({type(error).__name__}: {error}); it is compiled anew.",
                stacklevel=2,
            )
            shutil.rmtree(entry, ignore_errors=True)
            return None

    def save(
        self, key: str, program: Program, classes: Sequence[CompiledClass], reports: Sequence[ClassReport]
    ) -> bool:
        """Write the pass; False, with one warning, where that is not possible."""
        if not self.enabled:
            return False
        temporary = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=self.folder))
            digests: dict[str, str] = {}
            for index, made in enumerate(classes):
                for name, artifact in [(f"class{index}.bin", made.dynamic)] + [
                    (f"class{index}_{size}.bin", exact) for size, exact in made.exact.items()
                ]:
                    artifact.save(path=str(temporary / name), format="binary")
                    digests[name] = hashlib.sha256((temporary / name).read_bytes()).hexdigest()
            data = {
                "schema": SCHEMA,
                "program": program.as_dict(),
                "classes": [dataclasses.asdict(r) for r in reports],
                "sizes": [sorted(made.exact) for made in classes],
                "sha256": digests,
            }
            (temporary / _PROGRAM).write_text(json.dumps(data))
            try:
                os.replace(temporary, self.folder / key)
            except OSError:
                if not (self.folder / key).is_dir():  # another process was faster, otherwise
                    raise
            return True
        except Exception as error:
            warnings.warn(
                f"The compiled model was not kept in {self.folder} ({type(error).__name__}: {error}); "
                "the next start compiles again.",
                stacklevel=2,
            )
            return False
        finally:
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)


def _load(path: Path, digests: Mapping[str, str]) -> Any:
    if hashlib.sha256(path.read_bytes()).hexdigest() != digests[path.name]:
        raise ValueError(f"{path.name} is damaged")
    from torch._inductor import CompiledArtifact

    return CompiledArtifact.load(path=str(path), format="binary")
