"""`make setup`: what it says before it downloads, when it starts anew, what it answers where something is missing."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import subprocess
from typing import Any

import pytest

from labkit.dev import install

CUDA = [
    "filelock",
    "cuda-toolkit[cudart]==13.0; platform_system == 'Linux'",
    "triton==3.7.1; platform_system == 'Linux'",
]
OLD_CUDA = ["filelock", "nvidia-cudnn-cu12==9.1; platform_system == 'Linux'"]
CPU = ["filelock", "sympy", "networkx"]


def answer(args: tuple[str, ...], needs: list[str] | None) -> subprocess.CompletedProcess[str]:
    """A pip whose report has a torch with these requirements, or nothing to install; None is a pip that cannot say."""
    assert args[args.index("-c") :] == ("-c", "constraints.txt", "torch")
    if needs is not None:
        install = [{"metadata": {"name": "torch", "requires_dist": needs}}] if needs else []
        pathlib.Path(args[args.index("--report") + 1]).write_text(json.dumps({"install": install}))
    return subprocess.CompletedProcess(args, returncode=0, stdout="", stderr="")


@pytest.mark.parametrize(
    ("needs", "build"), [(CUDA, "cuda"), (OLD_CUDA, "cuda"), (CPU, "cpu"), ([], "installed"), (None, "unknown")]
)
def test_the_build_of_torch_is_known_before_it_is_fetched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], needs: list[str] | None, build: str
) -> None:
    """Gigabytes are announced where they come, or may come, and nowhere else."""
    monkeypatch.setattr(install, "run_in_venv", lambda *args: answer(args, needs))
    monkeypatch.setattr(install.sys, "platform", "linux")
    assert install.torch_build() == build
    install.announce_downloads()
    said = capsys.readouterr().out
    assert ("SEVERAL GIGABYTES" in said) == (build in ("cuda", "unknown"))
    assert (install.PYTORCH_PAGE in said) == (build in ("cuda", "unknown"))


def test_a_python_without_venv_gets_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(install, "PYTHON", tmp_path / "none" / "python")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "ensurepip" else found(name, *a))
    with pytest.raises(install.SetupError, match="python3-venv"):
        install.make_venv({})


class Steps:
    """Every piece of work that `main` can do, noted in place of being done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
        self.done: list[str] = []
        python = tmp_path / "python"
        python.touch()
        monkeypatch.setattr(install, "PYTHON", python)
        monkeypatch.setattr(install, "STAMP", tmp_path / "stamp.json")
        monkeypatch.setattr(install.sys, "argv", ["install.py"])
        for name in ("make_venv", "renew_pip", "announce_downloads", "pip_install", "write_jupyterlab_defaults"):
            monkeypatch.setattr(install, name, self._noting(name))
        monkeypatch.setattr(install, "fetch_model", self._noting("fetch_model"))

    def _noting(self, name: str) -> Any:
        return lambda *args: self.done.append(name)

    def run(self) -> list[str]:
        self.done.clear()
        install.main()
        return list(self.done)


def test_a_second_run_only_looks_for_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    steps = Steps(monkeypatch, tmp_path)
    assert steps.run()[:4] == ["make_venv", "renew_pip", "announce_downloads", "pip_install"]
    assert steps.run() == ["fetch_model"]


@pytest.mark.parametrize("change", ["root", "inputs"])
def test_a_moved_checkout_or_other_requirements_install_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, change: str
) -> None:
    steps = Steps(monkeypatch, tmp_path)
    steps.run()
    install.STAMP.write_text(json.dumps({**install.stamp(), change: "other"}))
    assert "pip_install" in steps.run()


def test_a_failed_installation_leaves_no_stamp(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    steps = Steps(monkeypatch, tmp_path)

    def fail(*args: str) -> None:
        raise install.SetupError("pip could not")

    monkeypatch.setattr(install, "pip_install", fail)
    with pytest.raises(install.SetupError):
        steps.run()
    assert not install.STAMP.exists()
