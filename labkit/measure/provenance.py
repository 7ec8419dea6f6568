"""Where a number comes from: kind, machine, versions, commit, command. Refuses to know what the number is.

Holds no path and no host name, so that it can be published as it is. Torch is imported inside `collect` only.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.errors import ConfigError, LabkitError


class Kind(str, enum.Enum):
    """LIVE: measured here and now. RECORDED: measured earlier and stored. SIMULATED: computed by a model."""

    LIVE = "LIVE"
    RECORDED = "RECORDED"
    SIMULATED = "SIMULATED"

    def __str__(self) -> str:
        return self.value


class ProvenanceError(LabkitError, ValueError):
    """Numbers of different origin were about to be mixed, or an origin is missing."""


PACKAGES = ("labkit", "numpy", "torch", "triton")


@dataclasses.dataclass(frozen=True)
class Provenance:
    """The origin of a set of rows.

    gpu, driver: None on a machine without one; the device is then the CPU.
    packages: version by name, with "python" and, where there is one, "cuda" (what torch was built for).
    commit, dirty: of the checkout that ran; None where the package is installed without one.
    command: what was typed, folders cut off. date: UTC, ISO 8601. order: in which order the rows were run.
    n: samples in the row that has the fewest. primed: KV was filled with seeded values instead of a real prefill.
    """

    kind: Kind
    gpu: str | None
    driver: str | None
    cpu: str
    packages: dict[str, str]
    commit: str | None
    dirty: bool | None
    command: str
    date: str
    order: str
    n: int
    primed: bool = False

    @property
    def device(self) -> str:
        """What the numbers were measured on: the GPU's name, or "cpu"."""
        return self.gpu or "cpu"

    @property
    def label(self) -> str:
        """One line for a figure: `RECORDED · NVIDIA H200 · torch 2.11.0 · 2026-11-30`."""
        parts = [str(self.kind), self.gpu or self.cpu]
        if "torch" in self.packages:
            parts.append(f"torch {self.packages['torch']}")
        return " · ".join([*parts, self.date[:10]])

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**dataclasses.asdict(self), "kind": self.kind.value}

    def replace(self, **changes: Any) -> Provenance:
        return dataclasses.replace(self, **changes)

    def same_machine(self, other: Provenance) -> list[str]:
        """What differs between two origins, apart from date, command, order and n; empty when rows may share a file."""
        out = []
        for field in ("kind", "gpu", "driver", "cpu", "packages", "commit", "dirty", "primed"):
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                out.append(f"{field} {mine!s} ≠ {theirs!s}")
        return out

    @classmethod
    def from_dict(cls, data: Any) -> Provenance:
        """Read what `as_dict` wrote.

        Raises:
            ProvenanceError: a field is missing, unknown, or of the wrong type.
        """
        what = "provenance"
        if not isinstance(data, Mapping):
            raise ProvenanceError(what, f"is {type(data).__name__}, not an object", "Record again with this version.")
        checks: dict[str, type | tuple[type, ...]] = {
            "kind": str, "gpu": (str, type(None)), "driver": (str, type(None)), "cpu": str, "packages": Mapping,
            "commit": (str, type(None)), "dirty": (bool, type(None)), "command": str, "date": str, "order": str,
            "n": int, "primed": bool,
        }  # fmt: skip
        for name, types in checks.items():
            if name not in data:
                raise ProvenanceError(what, f"has no {name!r}", "Record again with this version.")
            if not isinstance(data[name], types) or (types is int and isinstance(data[name], bool)):
                raise ProvenanceError(
                    what, f"{name}={data[name]!r} has the wrong type", "Record again with this version."
                )
        unknown = sorted(set(data) - set(checks))
        if unknown:
            raise ProvenanceError(
                what, f"has unknown fields: {', '.join(unknown)}", "Read it with the version that wrote it."
            )
        if data["kind"] not in Kind.__members__:
            raise ProvenanceError(
                what, f"kind={data['kind']!r} is none of {', '.join(Kind.__members__)}", "Record again."
            )
        return cls(**{**data, "kind": Kind(data["kind"]), "packages": dict(data["packages"])})


def collect(
    kind: Kind | str,
    command: str | None = None,
    *,
    order: str = "",
    n: int = 0,
    primed: bool = False,
    device: str = "auto",
) -> Provenance:
    """The origin of numbers taken in this process.

    Args:
        command: what was typed; None takes this process's own command line.
        device: "cpu" leaves the GPU out although there is one; "auto" and "cuda" name it.
    """
    packages = {"python": platform.python_version()}
    for name in PACKAGES:
        version = package_version(name)
        if version:
            packages[name] = version
    gpu = driver = None
    torch = _torch()
    if torch is not None and torch.cuda.is_available() and device != "cpu":
        gpu, driver = torch.cuda.get_device_name(), gpu_driver()
        packages["cuda"] = torch.version.cuda or ""
    commit, dirty = source_commit()
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    typed = command_line() if command is None else command
    return Provenance(Kind(kind), gpu, driver, cpu_model(), packages, commit, dirty, typed, date, order, n, primed)


def _torch() -> Any:
    try:
        import torch
    except Exception:  # a broken install must not stop a report that can do without it
        return None
    return torch


def package_version(name: str) -> str | None:
    """The version of an installed package, torch's own spelling (with `+cu130`) for torch; None when absent."""
    module = sys.modules.get(name)
    if name == "torch" and module is not None:
        return str(module.__version__)
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if module is not None and hasattr(module, "__version__"):
            return str(module.__version__)
        return None


def cpu_model() -> str:
    """The processor's name, or its architecture where the system does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", text, re.MULTILINE)
    if found:
        return " ".join(found.group(1).split())
    return platform.processor() or platform.machine()


def gpu_driver() -> str | None:
    """The NVIDIA kernel driver's version, from nvidia-smi or the kernel module; None without one."""
    smi = shutil.which("nvidia-smi")
    if smi:
        try:
            out = subprocess.run(
                [smi, "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
            )
            if out.returncode == 0 and out.stdout.strip():
                return out.stdout.split()[0]
        except (OSError, subprocess.TimeoutExpired):
            pass
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return found.group(1) if found else None


def source_commit(root: Path | None = None, environ: Mapping[str, str] | None = None) -> tuple[str | None, bool | None]:
    """Commit and dirty flag of the checkout this package runs from.

    A copy of the tree without its history (a machine that only gets the files) can be told by the environment
    variables LABKIT_COMMIT and LABKIT_DIRTY (0 or 1). Recordings themselves do not make a checkout dirty.
    """
    environ = os.environ if environ is None else environ
    root = Path(__file__).resolve().parents[2] if root is None else root
    git = shutil.which("git")
    if git and (root / ".git").exists() and (root / "labkit").is_dir():
        head = _git(git, root, "rev-parse", "HEAD")
        state = _git(git, root, "status", "--porcelain", "--", "labkit", ":(exclude)labkit/data")
        if head:
            return head.strip(), None if state is None else bool(state.strip())
    commit = environ.get("LABKIT_COMMIT", "").strip()
    if not commit:
        return None, None
    if not re.fullmatch(r"[0-9a-f]{7,40}", commit):
        raise ConfigError(
            f"LABKIT_COMMIT={commit!r}", "is not a commit hash", "Set it to `git rev-parse HEAD` of the copied tree."
        )
    dirty = environ.get("LABKIT_DIRTY", "").strip().casefold()
    if dirty not in ("", "0", "1", "true", "false"):
        raise ConfigError(f"LABKIT_DIRTY={dirty!r}", "is neither 0 nor 1", "Set it to 0 for a clean tree, else 1.")
    return commit, None if not dirty else dirty in ("1", "true")


def _git(git: str, root: Path, *args: str) -> str | None:
    try:
        out = subprocess.run([git, "-C", str(root), *args], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return out.stdout if out.returncode == 0 else None


def command_line(argv: Sequence[str] | None = None) -> str:
    """A command as typed, with every folder cut off: `labkit record --out h200.json.gz`."""
    argv = sys.argv if argv is None else argv
    words = [_without_folder(word) for word in argv]
    if words and words[0] == "__main__.py":  # python -m labkit.cli
        words[0] = "labkit"
    return shlex.join(words)


def _without_folder(word: str) -> str:
    head, eq, tail = word.partition("=") if word.startswith("-") else ("", "", word)
    looks_like_path = ("/" in tail or "\\" in tail) and not re.search(r"\s", tail)
    name = re.split(r"[/\\]", tail.rstrip("/\\"))[-1] if looks_like_path else tail
    return head + eq + name
