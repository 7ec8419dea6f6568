"""The lab on the generation that Colab has (ipywidgets 7.7.1, plotly 5.24.1) and without torch: its tests, once more.

The two packages are put in a folder of their own, ahead of the installed ones; it is made once and kept in .cache.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests.conftest import ROOT

PINS = ("ipywidgets==7.7.1", "plotly==5.24.1", "ipython_genutils==0.2.0", "tenacity==9.0.0")


@pytest.fixture(scope="session")
def older() -> pathlib.Path:
    """The folder with the older packages, without what they depend on: that is installed already."""
    folder = ROOT / ".cache" / ("widgets-" + "-".join(pin.split("==")[1] for pin in PINS[:2]))
    done = folder / "complete"
    if not done.exists():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--upgrade",
        ]
        made = subprocess.run([*command, "--target", str(folder), *PINS], capture_output=True, text=True)
        if made.returncode:
            pytest.fail(
                f"pip could not fetch {', '.join(PINS)}, which this test runs the lab on:\n{made.stderr[-1500:]}"
            )
        done.touch()
    return folder


def in_the_older_world(older: pathlib.Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(older), str(ROOT)])}
    return subprocess.run([sys.executable, *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)


def test_the_lab_passes_its_tests_there(older):
    done = in_the_older_world(
        older, "-m", "pytest", "-q", "-p", "tests.lab.without_torch", "-p", "no:cacheprovider", "-p", "no:xdist",
        "tests/lab", "tests/figures", "--ignore", str(pathlib.Path(__file__).relative_to(ROOT)),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_that_world_is_the_one_meant(older):
    said = in_the_older_world(
        older,
        "-c",
        "import tests.lab.without_torch, ipywidgets, plotly, importlib.util as u;"
        "from labkit.lab import ui;"
        "print(ipywidgets.__version__, plotly.__version__, u.find_spec('torch'), ui.may_use_figure_widget())",
    )
    assert said.stdout.split() == ["7.7.1", "5.24.1", "None", "True"], said.stderr[-2000:]
