"""`make setup`: what it says before it downloads, when it starts anew, what it answers where something is missing."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import subprocess
from typing import Any

import pytest

from labkit.dev import install

ROOT = pathlib.Path(__file__).resolve().parents[2]
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

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, *flags: str) -> None:
        self.done: list[str] = []
        python = tmp_path / "python"
        python.touch()
        monkeypatch.setattr(install, "PYTHON", python)
        monkeypatch.setattr(install, "STAMP", tmp_path / "stamp.json")
        monkeypatch.setattr(install.sys, "argv", ["install.py", *flags])
        for name in ("make_venv", "renew_pip", "announce_downloads", "pip_install", "write_jupyterlab_defaults"):
            monkeypatch.setattr(install, name, self._noting(name))
        monkeypatch.setattr(install, "install_gpu_extra", self._noting("install_gpu_extra"))
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


# --- attention libraries for a GPU ---------------------------------------------------------------------------------

PYTHON_THAT_NOTES = """#!/bin/sh
echo "$*" >> {log}
case "$*" in
  *"import torch"*) echo "{cuda}" ;;
  *"pip install"*) exit {pip} ;;
  *"labkit.cli backends"*) echo '{answer}' ;;
esac
"""
ANSWER = {
    "backends": [
        {"name": "FLASH_ATTN", "usable": True, "reasons": [], "versions": [
            {"version": 3, "provider": "flash_attn_interface (tokenspeed-fa3 3.0)", "usable": True, "reasons": []},
            {"version": 2, "provider": "flash_attn", "usable": False, "reasons": ["it is not here"]},
        ]},
        {"name": "TRITON_ATTN", "usable": True, "reasons": []},
        {"name": "XFORMERS", "usable": False, "reasons": ["ImportError: its operators do not load", "and more"]},
    ]
}  # fmt: skip


class Machine:
    """A fake nvidia-smi on PATH, and a Python that notes what it is asked in place of installing anything."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, gpu: str | None = "NVIDIA H200",
        cuda: str = "13.0", pip: int = 0, answer: str = json.dumps(ANSWER),
    ) -> None:  # fmt: skip
        self.log, folder = tmp_path / "log", tmp_path / "bin"
        folder.mkdir()
        if gpu is not None:
            answers = f"echo '{gpu}'; echo 'another one'" if gpu else "echo 'NVIDIA-SMI has failed' >&2; exit 9"
            self._script(folder / "nvidia-smi", f"#!/bin/sh\n{answers}\n")
        self.python = folder / "python"
        self.answer(cuda=cuda, pip=pip, answer=answer)
        monkeypatch.setenv("PATH", str(folder))
        monkeypatch.setattr(install, "PYTHON", self.python)
        monkeypatch.setattr(install, "GPU_STAMP", tmp_path / "gpu.json")

    def answer(self, cuda: str = "13.0", pip: int = 0, answer: str = json.dumps(ANSWER)) -> None:
        self._script(self.python, PYTHON_THAT_NOTES.format(log=self.log, cuda=cuda, pip=pip, answer=answer))

    @staticmethod
    def _script(path: pathlib.Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def asked(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


def test_with_a_gpu_the_libraries_are_announced_installed_once_and_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(monkeypatch, tmp_path)
    install.install_gpu_extra()
    said = capsys.readouterr().out
    assert "NVIDIA H200" in said and "another one" not in said
    assert "0.45 GB to download, 1.3 GB on disk" in said
    assert "-m pip install --no-compile -c constraints.txt -e .[gpu]" in machine.asked()
    assert "2 of 3" in said
    assert "FLASH_ATTN: yes (FA3 flash_attn_interface (tokenspeed-fa3 3.0))" in said and "TRITON_ATTN: yes\n" in said
    assert "XFORMERS: no, ImportError: its operators do not load\n" in said
    asked = machine.asked()
    install.install_gpu_extra()
    assert capsys.readouterr().out == "" and machine.asked() == asked, "the second time there is nothing to do"
    install.GPU_STAMP.write_text(json.dumps({**install.stamp(), "inputs": "other"}))
    install.install_gpu_extra()
    assert machine.asked().count("pip install") == 2, "other versions are installed again"


@pytest.mark.parametrize("gpu", [None, ""])
def test_without_an_answer_from_nvidia_smi_nothing_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], gpu: str | None
) -> None:
    machine = Machine(monkeypatch, tmp_path, gpu)
    install.install_gpu_extra()
    assert machine.asked() == "" and capsys.readouterr().out == ""


def test_a_cpu_build_of_torch_gets_no_gpu_libraries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(monkeypatch, tmp_path, cuda="")
    install.install_gpu_extra()
    assert "pip" not in machine.asked() and "CPU-only build" in capsys.readouterr().out
    assert not install.GPU_STAMP.exists()


def test_a_failure_is_said_and_the_lab_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(monkeypatch, tmp_path, pip=1)
    install.install_gpu_extra()
    assert "pip could not install the attention libraries" in capsys.readouterr().out
    machine.answer()
    install.install_gpu_extra()
    assert machine.asked().count("pip install") == 2, "the next time it is tried again"
    assert "2 of 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    "answer", ["", "not an object", "{}", json.dumps({"backends": [{"name": "X", "usable": False}]})]
)
def test_a_report_that_does_not_come_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], answer: str
) -> None:
    Machine(monkeypatch, tmp_path, answer=answer)
    install.install_gpu_extra()
    assert "labkit doctor" in capsys.readouterr().out and install.GPU_STAMP.exists()


def test_only_make_lab_asks_for_the_gpu_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    assert "install_gpu_extra" not in Steps(monkeypatch, tmp_path).run()
    done = Steps(monkeypatch, tmp_path, "--gpu-extra").run()
    assert done == ["install_gpu_extra", "fetch_model"], "with everything else in place"
    targets = dict.fromkeys(("lab", "test", "setup", "format"), "")
    target = ""
    for line in (ROOT / "Makefile").read_text().splitlines():
        if line[:1].isalpha() and ":" in line:
            target = line.partition(":")[0]
        elif line.startswith("\t") and target in targets:
            targets[target] += line
    assert [name for name, recipe in targets.items() if "--gpu-extra" in recipe] == ["lab"]
    assert all("call install" in recipe for recipe in targets.values())
