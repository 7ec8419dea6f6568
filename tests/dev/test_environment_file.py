"""environment.yml, pyproject.toml and constraints.txt say the same about what conda users get."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT

LINES = (ROOT / "environment.yml").read_text(encoding="utf-8").splitlines()
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def items(indent: int) -> list[str]:
    """The items of all lists at that depth of environment.yml; at 2 the channel comes first."""
    return [line.strip()[2:] for line in LINES if re.match(rf" {{{indent}}}- ", line)]


def extras() -> dict[str, list[str]]:
    """What each extra of pyproject.toml lists. (Python 3.10 has no reader of TOML.)"""
    section = PYPROJECT.split("[project.optional-dependencies]\n")[1].split("\n[", 1)[0]
    lists = re.findall(r"^(\w+) = \[(.*?)\]$", section, re.MULTILINE | re.DOTALL)
    return {name: re.findall(r'"([^"]+)"', body) for name, body in lists}


def test_conda_takes_only_python_and_pip_and_pip_the_rest():
    """A package that both install is one that two of them think they own."""
    names = [re.split(r"[=<>]", item)[0] for item in items(2)]
    assert names == ["conda-forge", "python", "pip", "pip:"]


def test_its_python_is_one_that_labkit_takes():
    (low,) = re.findall(r'requires-python = ">=3\.(\d+)"', PYPROJECT)
    (python,) = re.findall(r"python=3\.(\d+)", "\n".join(items(2)))
    assert int(python) >= int(low)


def test_pip_takes_the_same_versions_as_make_setup():
    assert "-c constraints.txt" in items(6) and (ROOT / "constraints.txt").exists()
    assert not [item for item in items(6) if re.search(r"==|>=|<", item)], "versions stand in constraints.txt alone"


def test_its_extras_are_there_and_open_the_lab():
    (wanted,) = [re.findall(r"\[(.*)\]", item)[0].split(",") for item in items(6) if item.startswith("-e .[")]
    assert set(wanted) <= set(extras()) and set(wanted) >= {"engine", "lab"}


def test_every_pin_is_above_the_floor_of_pyproject():
    from packaging.requirements import Requirement
    from packaging.version import Version

    everything = [requirement for one in extras().values() for requirement in one]
    everything += re.findall(r'"([^"]+)"', re.findall(r"^dependencies = \[(.*)\]$", PYPROJECT, re.MULTILINE)[0])
    floors = {Requirement(one).name: Requirement(one).specifier for one in everything}
    pins = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines()
            if line.strip() and not line.startswith("#")]  # fmt: skip
    assert {pin.name for pin in pins} == {"torch", "triton"}
    for pin in pins:
        (exact,) = pin.specifier
        assert exact.operator == "==" and Version(exact.version) in floors[pin.name], pin


@pytest.mark.parametrize("word", ["labkit.models.fetch", "00_start_here.ipynb"])
def test_the_commands_above_it_are_real(word):
    told = [line for line in LINES if line.startswith("#")]
    assert any(word in line for line in told)
    assert (ROOT / "labkit" / "models" / "fetch.py").exists() and (ROOT / "notebooks" / "00_start_here.ipynb").exists()
