"""`make setup`: a virtual environment in .venv with everything the lab needs, and the default model.

`make lab` adds the attention libraries for the GPU, where there is one; the lab works without them.

Runs as a plain file, before labkit is installed, so it uses the standard library only. It calls pip and leaves alone
where pip gets things from: an index, a proxy or a cache that the user configured stays in force.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "labkit-setup.json"
GPU_STAMP = VENV / "labkit-gpu.json"
PYTORCH_PAGE = "https://pytorch.org/get-started/locally/"
OLDEST_PIP = (22, 2)  # the first with `install --dry-run --report`; editable installs need 21.3

# Defaults of this environment's JupyterLab, not the user's settings: what the user chose goes before them.
JUPYTERLAB_DEFAULTS = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
}


class SetupError(Exception):
    """A sentence that says what to do."""


def say(text: str) -> None:
    print(f"labkit: {text}", flush=True)


def stamp() -> dict[str, str]:
    """What the installed state depends on. A checkout that moved has scripts that point to where it was."""
    digest = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", ROOT / "constraints.txt", pathlib.Path(__file__)):
        digest.update(path.read_bytes() + b"\0")
    return {"root": str(ROOT), "inputs": digest.hexdigest()}


def recorded_stamp(path: pathlib.Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def run_in_venv(*args: str) -> subprocess.CompletedProcess[str]:
    """Output captured; for questions, not for work."""
    return subprocess.run([str(PYTHON), *args], capture_output=True, text=True, cwd=ROOT)


def make_venv(recorded: dict[str, str]) -> None:
    if PYTHON.exists():
        moved = recorded.get("root", str(ROOT)) != str(ROOT)
        answer = run_in_venv("-c", "import sys, pip; print(sys.version_info >= (3, 10))")
        if not moved and answer.returncode == 0:
            if answer.stdout.strip() != "True":
                raise SetupError(
                    f"{VENV} has a Python older than 3.10. Remove it with `make clean` and run this again."
                )
            return
        say(f"{VENV.name} {'was made in another folder' if moved else 'no longer runs'}; making it anew")
        shutil.rmtree(VENV)
    if not all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
        raise SetupError(
            f"{sys.executable} comes without its venv module. On Debian and Ubuntu: `sudo apt install python3-venv`. "
            "Or name another Python: `make setup PYTHON=/path/to/python3`."
        )
    say(f"making {VENV.name} with Python {platform.python_version()} ({sys.executable})")
    if subprocess.run([sys.executable, "-m", "venv", str(VENV)]).returncode:
        raise SetupError("`python3 -m venv` failed; its message is above.")


def renew_pip() -> None:
    version = run_in_venv("-c", "import pip; print(pip.__version__)").stdout.strip()
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < OLDEST_PIP:
        say(f"pip {version} is too old to install from pyproject.toml; taking a newer one")
        pip_install("pip>=22.2")


def pip_install(*args: str) -> None:
    if subprocess.run([str(PYTHON), "-m", "pip", "install", *args], cwd=ROOT).returncode:
        raise SetupError(
            "pip could not install this; its message is above. A second `make setup` goes on where this one stopped. "
            f"If pip found no torch for Python {platform.python_version()}: `make clean setup PYTHON=python3.12`."
        )


def torch_build() -> str:
    """Which torch pip is about to fetch: "installed", "cpu", "cuda" or "unknown". Reads metadata of a few kilobytes."""
    if sys.platform != "linux":
        return "cpu"
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        command = ["-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--report", str(report)]
        run_in_venv(*command, "-c", "constraints.txt", "torch")
        try:
            wanted = json.loads(report.read_text())["install"]
            needs = [name for package in wanted for name in package["metadata"].get("requires_dist", [])]
        except (OSError, ValueError, KeyError):
            return "unknown"
    if not wanted:
        return "installed"
    # Only the builds for CUDA ask for NVIDIA's libraries.
    return "cuda" if any(name.startswith(("nvidia-", "cuda-")) for name in needs) else "cpu"


def announce_downloads() -> None:
    build = torch_build()
    if build == "installed":
        return
    if build == "cpu":
        say("installing into .venv: about 0.6 GB to download, 2.5 GB on disk")
        return
    word = "is the one" if build == "cuda" else "is probably the one"
    say(f"the build of PyTorch that pip takes here {word} with CUDA:")
    say("SEVERAL GIGABYTES follow (about 3 GB to download, 7 GB on disk). It also works on a computer without a GPU.")
    say(f"For the smaller CPU-only build stop now (Ctrl-C), install it into .venv as {PYTORCH_PAGE} says")
    say("(.venv/bin/pip install 'torch==2.13.0' --index-url <the CPU index of that page>), and run this again.")
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < 8:
        say(f"there are {free:.1f} GB free here, which may not be enough")


def nvidia_gpu() -> str:
    """The first GPU that nvidia-smi names; empty where it is missing or does not answer."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return ""
    command = [smi, "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip().partition("\n")[0].strip() if answer.returncode == 0 else ""


def install_gpu_extra() -> None:
    """The attention libraries of the `gpu` extra, once, where nvidia-smi answers. A failure is said and not raised."""
    wanted, gpu = stamp(), nvidia_gpu()
    if not gpu or recorded_stamp(GPU_STAMP) == wanted:
        return
    cuda = run_in_venv("-c", "import torch; print(torch.version.cuda or '')")
    if not cuda.stdout.strip():
        why = "is a CPU-only build" if cuda.returncode == 0 else "does not load"
        say(f"there is a GPU here ({gpu}), but the torch in {VENV.name} {why}: its attention libraries are left out.")
        return
    say(f"{gpu}: installing attention libraries for it (FlashAttention 3 and 4, FlashInfer):")
    say("about 0.45 GB to download, 1.3 GB on disk; the lab works without them, too")
    command = [str(PYTHON), "-m", "pip", "install", "--no-compile", "-c", "constraints.txt", "-e", ".[gpu]"]
    if subprocess.run(command, cwd=ROOT).returncode:
        say("pip could not install the attention libraries; its message is above. Going on without them: TRITON_ATTN")
        say("and what torch brings are there. The next `make lab` tries again.")
        return
    GPU_STAMP.write_text(json.dumps(wanted) + "\n")
    say_what_loads()


def say_what_loads() -> None:
    """Which attention backends can run now, and the first reason of each that cannot."""
    answer = run_in_venv("-m", "labkit.cli", "backends", "--json")
    try:
        rows = json.loads(answer.stdout)["backends"]
        lines = [_what_loads(row) for row in rows]
    except (ValueError, KeyError, TypeError, IndexError):
        say("installed, but `labkit backends` does not answer; `.venv/bin/labkit doctor` may say more.")
        return
    say(f"attention backends that can run here: {sum(bool(row['usable']) for row in rows)} of {len(rows)}")
    for line in lines:
        say(f"  {line}")


def _what_loads(row: dict[str, Any]) -> str:
    if not row["usable"]:
        return f"{row['name']}: no, {row['reasons'][0]}"
    versions = [f"FA{v['version']} {v['provider']}" for v in row.get("versions", ()) if v["usable"]]
    return f"{row['name']}: yes" + (f" ({', '.join(versions)})" if versions else "")


def write_jupyterlab_defaults() -> None:
    path = VENV / "share" / "jupyter" / "lab" / "settings" / "overrides.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(JUPYTERLAB_DEFAULTS, indent=2) + "\n")


def fetch_model(optional: bool) -> None:
    """The model is a few hundred megabytes in the user's cache folder; a second call finds it there."""
    if subprocess.run([str(PYTHON), "-m", "labkit.models.fetch"], cwd=ROOT).returncode == 0:
        return
    message = "the default model is not there; the message above says why."
    if not optional:
        raise SetupError(f"{message} Everything else is installed; `make setup` tries again.")
    say(f"{message} The lab opens without it: choose a model with random weights, for example smollm2-135m.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model-optional", action="store_true", help="go on when the default model cannot be fetched")
    parser.add_argument("--gpu-extra", action="store_true", help="add attention libraries where nvidia-smi answers")
    args = parser.parse_args()
    os.environ.setdefault("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    recorded, wanted = recorded_stamp(STAMP), stamp()
    if recorded != wanted or not PYTHON.exists():
        begin = time.monotonic()
        make_venv(recorded)
        renew_pip()
        announce_downloads()
        # Fifteen thousand modules, of which few are ever imported: Python compiles those when they are.
        pip_install("--no-compile", "-c", "constraints.txt", "-e", ".[engine,lab,dev,site]")
        write_jupyterlab_defaults()
        STAMP.write_text(json.dumps(wanted) + "\n")
        say(f"installed in {time.monotonic() - begin:.0f} s")
    if args.gpu_extra:
        install_gpu_extra()
    fetch_model(args.model_optional)


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"labkit: {error}")
    except KeyboardInterrupt:
        sys.exit("\nlabkit: stopped. Nothing outside .venv was changed; `make setup` goes on from here.")
