"""The panel of a chapter in JupyterLab, in a real browser: predict, run, compare, save, and come back after a restart.

It shows the panel of CONTRIBUTING.md. Set LABKIT_SCREENSHOTS to a folder to get pictures of what the browser shows.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.jupyter import FLAGS, HOW_TO_INSTALL, ROOT, Notebook, find_browser, lab_server
from tests.browser.jupyter import press as press_button

PATIENCE = 120_000  # ms


def example() -> str:
    """The panel of the guide, as it is before a cell runs it."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(import plotly.*?)```", text, re.DOTALL)
    return code.split("panel.set(")[0]


def notebook_file(folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    sources = [example(), "panel"]
    cells = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "outputs": [], "execution_count": None, "source": source}
        for i, source in enumerate(sources)
    ]
    kernel = {"name": "python3", "display_name": "Python 3"}
    path = folder / "panel.ipynb"
    path.write_text(
        json.dumps({"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5})
    )
    return path


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """The notebook, opened and run from top to bottom, with runs kept as a learner's are."""
    browser_path = find_browser()
    if browser_path is None:
        pytest.fail(HOW_TO_INSTALL)
    from playwright.sync_api import sync_playwright

    folder = tmp_path_factory.mktemp("panel")
    environment = {"LABKIT_STRICT": "0", "CUDA_VISIBLE_DEVICES": "", "LABKIT_HOME": str(folder / "learner")}
    path = notebook_file(folder / "written")
    with lab_server(folder, path, **environment) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, headless=True, args=list(FLAGS))
        page = browser.new_page(viewport={"width": 1440, "height": 1500})
        page.set_default_timeout(PATIENCE)
        notebook = Notebook(page)
        notebook.open(address)
        notebook.cells = notebook.run_all()
        yield notebook
        browser.close()


def panel(lab: Notebook) -> Any:
    return lab.page.locator(".labkit", has=lab.page.locator(".js-plotly-plot")).first


def press(lab: Notebook, name: str) -> None:
    press_button(panel(lab), name)


def wait_for_status(lab: Notebook, pattern: str) -> None:
    lab.page.wait_for_function(
        "pattern => new RegExp(pattern).test(document.querySelector('.labkit [role=status]').textContent)", arg=pattern
    )


def bars(lab: Notebook) -> list[list[float]]:
    return lab.page.evaluate(
        "() => ['x', 'y'].map(axis => Array.from(document.querySelector('.js-plotly-plot').data[0][axis] || []))"
    )


def picture(lab: Notebook, name: str) -> None:
    folder = os.environ.get("LABKIT_SCREENSHOTS")
    if folder:
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        lab.page.wait_for_timeout(500)  # let the browser finish painting
        panel(lab).screenshot(path=os.path.join(folder, f"chapter-{name}.png"))


def test_run_waits_for_a_prediction(lab):
    assert all(cell["count"] and not cell["errors"] for cell in lab.cells), lab.cells
    box = panel(lab)
    box.locator(".js-plotly-plot .xtick, .js-plotly-plot .infolayer").first.wait_for(state="attached")
    assert box.get_by_role("button", name="Run", exact=True).is_disabled()
    picture(lab, "asks")
    press(lab, "Commit")
    box.get_by_text("is none of the answers").wait_for()
    box.get_by_label("half of the time").check()
    press(lab, "Commit")
    box.get_by_text("Now press Run").wait_for()
    press(lab, "Run")
    wait_for_status(lab, "Run 1 is done")
    box.get_by_text("That is what came out").wait_for()
    lab.page.wait_for_function("() => (document.querySelector('.js-plotly-plot').data[0].y || []).length === 1")
    assert bars(lab) == [[1], [48]]
    picture(lab, "answered")


def test_a_changed_control_marks_the_result_until_it_is_run(lab):
    box = panel(lab)
    press(lab, "Pin")
    slider = box.get_by_role("slider").first
    slider.focus()
    lab.page.keyboard.press("ArrowRight")
    box.get_by_text("this is still run 1").wait_for()
    box.get_by_label("Launched").select_option("as a graph")
    faint = box.locator(".lk-stale")
    assert faint.count() == 2
    picture(lab, "stale")
    press(lab, "Run")
    wait_for_status(lab, "Run 2 is done")
    lab.page.wait_for_function("() => (document.querySelector('.js-plotly-plot').data[0].y || []).length === 2")
    assert bars(lab) == [[1, 2], [48, 27]] and faint.count() == 0
    box.get_by_text("Compared with run 1: Kernels 8 → 9, Launched one by one → as a graph").wait_for()
    press(lab, "Pin")
    box.get_by_text("A takes 1.78 times as long as B").wait_for()
    box.get_by_text("That is what came out").wait_for()  # by the run that answered the question
    assert lab.ask("import json; print(json.dumps(figure_equals_data(panel)))")
    picture(lab, "pinned")


def test_a_file_is_written_beside_the_notebook_and_offered(lab):
    press(lab, "CSV")
    link = panel(lab).get_by_role("link", name="Download 01-two-waits.csv")
    with lab.page.expect_download() as waiting:
        link.click()
    rows = pathlib.Path(waiting.value.path()).read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["run", "1", "2"]
    assert lab.ask("import json; print(json.dumps(open('01-two-waits.csv').read().splitlines()))") == rows


def test_runs_come_back_after_the_kernel_was_restarted(lab):
    lab.page.evaluate(
        "async () => { await window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart(); }"
    )
    cells = lab.run_all()
    assert all(cell["count"] and not cell["errors"] for cell in cells), cells
    panel(lab).get_by_role("button", name="Resume", exact=True).wait_for()
    press(lab, "Resume")
    wait_for_status(lab, "2 earlier runs brought back")
    assert panel(lab).get_by_text("earlier").count() >= 2
    panel(lab).get_by_text("That is what came out").wait_for()  # the prediction was kept, too
    assert not panel(lab).get_by_role("button", name="Run", exact=True).is_disabled()
    assert lab.ask("import json; print(json.dumps([run.values['step_us'] for run in panel.runs]))") == [48, 27]
    picture(lab, "resumed")
    lab.theme("JupyterLab Dark")
    picture(lab, "dark")
    lab.theme("JupyterLab Light")
    lab.page.set_viewport_size({"width": 640, "height": 2000})
    lab.page.wait_for_function(
        "() => document.querySelector('.js-plotly-plot .main-svg').getBoundingClientRect().width < 600"
    )
    picture(lab, "narrow")


def test_nothing_complains_and_nothing_is_fetched_from_outside(lab):
    assert lab.unexplained() == []
    assert lab.outside == []
