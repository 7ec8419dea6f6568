"""The lab on the generation that Colab has (ipywidgets 7.7.1, plotly 5.24.1), without torch, in a Python of its own.

It is made once and kept in .cache. Its JupyterLab is 3, since ipywidgets 7.7.1 does not render on JupyterLab 4. Colab
itself is no part of this: what is the same there is the widgets, plotly, and that a chart is drawn anew each time.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from labkit.dev import notebook_rules, notebooks
from tests.browser.jupyter import FLAGS, HOW_TO_INSTALL, Notebook, find_browser, lab_server, press
from tests.browser.test_panel import notebook_file
from tests.conftest import ROOT

PINS = ("jupyterlab<4", "jupyterlab_widgets<3", "ipywidgets==7.7.1", "plotly==5.24.1")
NEEDED = ("numpy", "pytest", "hypothesis")
#: Answers and texts of chapters are the same in every generation of widgets; their panels run below.
LEFT_OUT = ("tests/lab/test_ch*.py", "tests/lab/test_older_widgets.py")

RUN_ALL = """
import json, sys
import tests.lab.without_torch
for name, cells in json.load(sys.stdin).items():
    exec(compile("\\n\\n".join(cells), name, "exec"), {"__name__": "__main__"})
import ipywidgets
assert ipywidgets.__version__ == "7.7.1" and "torch" not in sys.modules
"""


@pytest.fixture(scope="session")
def older() -> pathlib.Path:
    """The Python of the older environment."""
    wanted = hashlib.sha256(" ".join([*PINS, *NEEDED, sys.version]).encode()).hexdigest()[:8]
    folder = ROOT / ".cache" / f"older-{wanted}"
    python, done = folder / "bin" / "python", folder / "complete"
    if not done.exists():
        install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", *PINS, *NEEDED]
        for command in ([sys.executable, "-m", "venv", "--clear", str(folder)], [str(python), *install]):
            made = subprocess.run(command, capture_output=True, text=True)
            if made.returncode:
                pytest.fail(f"{' '.join(command)} failed, and this test runs the lab on that:\n{made.stderr[-1500:]}")
        done.touch()
    return python


def in_the_older_world(
    older: pathlib.Path, *args: str, input: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [str(older), *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, input=input
    )


def test_the_lab_passes_its_tests_there(older):
    left_out = [f"--ignore-glob={pattern}" for pattern in LEFT_OUT]
    done = in_the_older_world(
        older, "-m", "pytest", "-q", "-p", "tests.lab.without_torch", "-p", "no:cacheprovider", "tests/lab",
        "tests/figures", *left_out,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_every_notebook_runs_there(older, tmp_path):
    cells = {
        path.name: [source for _, source in notebook_rules.code_cells(notebooks.read(path))]
        for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
    }
    done = in_the_older_world(older, "-c", RUN_ALL, input=json.dumps(cells), LABKIT_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]


def test_that_world_is_the_one_meant(older):
    said = in_the_older_world(
        older,
        "-c",
        "import ipywidgets, plotly, jupyterlab, jupyterlab_widgets, importlib.util as u;"
        "from labkit.lab import ui;"
        "print(ipywidgets.__version__, plotly.__version__, jupyterlab.__version__.split('.')[0],"
        "jupyterlab_widgets.__version__.split('.')[0], u.find_spec('torch'), ui.may_use_figure_widget())",
    )
    assert said.stdout.split() == ["7.7.1", "5.24.1", "3", "1", "None", "True"], said.stderr[-2000:]


def test_a_panel_works_in_its_browser_page(older, tmp_path):
    """As on Colab a chart is drawn anew after each run, in an Output widget; nothing is fetched for it."""
    browser_path = find_browser()
    if browser_path is None:
        pytest.fail(HOW_TO_INSTALL)
    from playwright.sync_api import sync_playwright

    written = notebook_file(tmp_path / "written")
    environment = {"LABKIT_STRICT": "1", "LABKIT_HOME": str(tmp_path / "learner"), "COLAB_RELEASE_TAG": "as-if"}
    with (
        lab_server(tmp_path / "lab", written, python=str(older), **environment) as address,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=browser_path, headless=True, args=list(FLAGS))
        page = browser.new_page(viewport={"width": 1440, "height": 1500})
        page.set_default_timeout(60_000)
        notebook = Notebook(page)
        notebook.open(address)
        cells = notebook.run_all()
        assert all(cell["count"] and not cell["errors"] for cell in cells), cells
        assert notebook.ask("import json; print(json.dumps(panel.view.redraws))") is True
        predict_and_run(page)
        assert bars(page, 1) == [[1], [48]]
        slider = page.locator(".labkit").get_by_role("slider").first
        (slider if slider.count() else page.locator(".labkit .ui-slider-handle").first).focus()
        page.keyboard.press("ArrowRight")
        page.get_by_text("this is still run 1").wait_for()
        page.get_by_label("Launched").select_option("as a graph")
        run(page, 2)
        assert bars(page, 2) == [[1, 2], [48, 27]]
        page.get_by_text("Compared with run 1: Kernels 8 → 9, Launched one by one → as a graph").wait_for()
        assert notebook.ask("import json; print(json.dumps([r.values['step_us'] for r in panel.runs]))") == [48, 27]
        assert notebook.outside == []
        assert page.locator(".lk-card[role=alert]").count() == 0
        folder = os.environ.get("LABKIT_SCREENSHOTS")
        if folder:
            page.locator(".labkit").first.screenshot(path=os.path.join(folder, "older.png"))
        browser.close()


def predict_and_run(page: Any) -> None:
    assert page.get_by_role("button", name="Run", exact=True).is_disabled()
    page.get_by_label("half of the time").check()
    press(page.locator(".labkit"), "Commit")
    page.get_by_text("Now press Run").wait_for()
    run(page, 1)
    page.get_by_text("That is what came out").wait_for()


def run(page: Any, number: int) -> None:
    press(page.locator(".labkit"), "Run")
    page.locator(".labkit [role=status]", has_text=f"Run {number} is done").wait_for()


def bars(page: Any, count: int) -> list[list[float]]:
    """What the newest drawing holds."""
    page.wait_for_function(
        "n => { const one = document.querySelector('.labkit .js-plotly-plot'); "
        "return one && one.data && (one.data[0].y || []).length === n }", arg=count,
    )  # fmt: skip
    return page.evaluate(
        "() => ['x', 'y'].map(axis => Array.from(document.querySelector('.labkit .js-plotly-plot').data[0][axis]))"
    )
