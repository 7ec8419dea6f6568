"""The first notebook in JupyterLab, in a real browser: run it, press the panel's buttons, compare chart and reports.

Set LABKIT_SCREENSHOTS to a folder to get pictures of what the browser shows.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.jupyter import FLAGS, HOW_TO_INSTALL, ROOT, SLOW, Notebook, find_browser, lab_server
from tests.browser.jupyter import press as press_button

NOTEBOOK = ROOT / "notebooks" / "00_start_here.ipynb"
PATIENCE = 120_000  # ms; a busy machine is slow, a broken panel never comes

REPORTS = """
import json
print(json.dumps([
    {"number": run.number, "walls": [report.wall_ms for report in run.reports], "samples": list(run.row.samples_ms),
     "p10": run.row.p10_ms, "p50": run.row.p50_ms, "p90": run.row.p90_ms, "mode": run.row.mode, "size": run.row.size,
     "batch": run.row.batch}
    for run in panel.runs
]))
"""
# Counts the engine's steps, notes the count at which Stop arrives, and makes the next run long enough to be stopped.
WATCH = """
import dataclasses
steps, pressed = [], []
llm = panel.current.room.llm
real_step = llm.step
def counted():
    steps.append(1)
    return real_step()
llm.step = counted
panel.stop_button.on_click(lambda _: pressed.append(len(steps)))
before = panel.current.limits
panel.current.limits = dataclasses.replace(before, steps=100, min_steps=100)
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """The notebook, opened and run from top to bottom."""
    browser_path = find_browser()
    if browser_path is None:
        pytest.fail(HOW_TO_INSTALL)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.fail("This test drives a browser through playwright. In this project: `make setup` installs it.")
    environment = {"LABKIT_STRICT": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    folder = tmp_path_factory.mktemp("lab")
    with lab_server(folder, NOTEBOOK, **environment) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, headless=True, args=list(FLAGS))
        page = browser.new_page(viewport={"width": 1440, "height": 1800})
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
        "pattern => new RegExp(pattern).test("
        "document.querySelector('.labkit:has(.js-plotly-plot) [role=status]').textContent)",
        arg=pattern,
    )


def run(lab: Notebook) -> None:
    number = len(lab.ask(REPORTS)) + 1
    press(lab, "Run")
    wait_for_status(lab, f"Run {number} is done")


def drawn(lab: Notebook) -> dict[tuple[str, int, str], list[float]]:
    """What the browser's chart holds: (what, run, plot) → y."""
    traces = lab.page.evaluate(
        "() => document.querySelector('.js-plotly-plot').data.map(t => [t.meta, Array.from(t.y || [])])"
    )
    return {tuple(meta): y for meta, y in traces}


def check_chart(lab: Notebook, count: int) -> list[dict[str, Any]]:
    """The chart in the browser, the table in the page and the reports in the kernel hold the same numbers."""
    runs = lab.ask(REPORTS)
    assert len(runs) == count
    lab.page.wait_for_function(
        "n => document.querySelector('.js-plotly-plot').data.some(t => t.meta[0] === 'median' && t.meta[1] === n)",
        arg=count,
    )
    chart = drawn(lab)
    medians = panel(lab).locator("td [data-ms]").evaluate_all("cells => cells.map(c => Number(c.dataset.ms))")
    assert medians == [entry["p50"] for entry in runs]
    for entry in runs:
        samples = chart["samples", entry["number"], "main"]
        assert samples == entry["samples"]
        assert samples == pytest.approx(entry["walls"], abs=1e-4), "rows keep samples to 0.1 µs"
        assert set(chart["median", entry["number"], "main"]) == {entry["p50"]}
        assert set(chart["band", entry["number"], "main"]) == {entry["p10"], entry["p90"]}
    return runs


def picture(lab: Notebook, name: str, element: Any = None) -> None:
    folder = os.environ.get("LABKIT_SCREENSHOTS")
    if folder:
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        lab.page.wait_for_timeout(500)  # let the browser finish painting
        (element or lab.page).screenshot(path=os.path.join(folder, f"{name}.png"))


def test_the_notebook_runs_from_top_to_bottom(lab):
    assert all(cell["count"] and not cell["errors"] for cell in lab.cells), lab.cells
    assert lab.page.get_by_text("Attention backends for").count() == 1
    picture(lab, "notebook")
    picture(lab, "environment", lab.page.locator(".labkit").first)
    check_chart(lab, 1)


def test_run_from_the_keyboard_appends_to_the_chart(lab):
    run(lab)
    check_chart(lab, 2)
    press(lab, "Pin")


def test_a_changed_control_changes_what_runs(lab):
    box = panel(lab)
    box.get_by_label("Graph mode").select_option("FULL")
    sizes = box.get_by_label("Capture sizes")
    sizes.fill("2, 4")
    sizes.press("Enter")
    slider = box.get_by_role("slider").first
    slider.focus()
    lab.page.keyboard.press("ArrowRight")
    lab.page.keyboard.press("ArrowRight")
    box.get_by_text("batch 3 runs in the graph of 4, 1 padding").wait_for()
    box.get_by_text(re.compile(r"capture 2 emulated graphs \(2, 4\)")).wait_for()
    wait_for_status(lab, "Settings changed since run 2")
    picture(lab, "before-run", box)
    run(lab)
    last = check_chart(lab, 3)[-1]
    assert (last["mode"], last["size"], last["batch"]) == ("FULL", 4, 3)
    box.get_by_text("nothing is saved here").first.wait_for()


def test_two_pinned_runs_stand_side_by_side(lab):
    press(lab, "Pin")
    panel(lab).get_by_text("B · run 3").wait_for()
    lab.page.wait_for_function("() => document.querySelector('.js-plotly-plot').data.some(t => t.meta[2] === 'pinned')")
    chart = drawn(lab)
    for number in (2, 3):
        assert chart["samples", number, "pinned"] == chart["samples", number, "main"]
    picture(lab, "panel-light", panel(lab))


def test_a_page_that_is_loaded_again_shows_the_same_chart(lab):
    before = drawn(lab)
    lab.reload()
    panel(lab).locator(".js-plotly-plot .xtick").first.wait_for()
    assert drawn(lab) == before
    check_chart(lab, 3)
    lab.ask("panel.log.value = True")  # what is sent afterwards arrives
    lab.page.wait_for_function("() => document.querySelector('.js-plotly-plot').layout.yaxis.type === 'log'")
    lab.ask("panel.log.value = False")


def test_stop_lets_at_most_one_more_step_run(lab):
    lab.ask(WATCH)
    press(lab, "Run")
    wait_for_status(lab, r"LIVE step \d+|measuring")
    press(lab, "Stop")
    wait_for_status(lab, "Run 4 stopped after|nothing was added")
    counts = lab.ask("print(json.dumps({'steps': len(steps), 'pressed': pressed[0]}))")
    assert counts["steps"] <= counts["pressed"] + 1
    assert counts["steps"] < 100
    lab.ask("panel.current.limits = before; llm.step = real_step")
    check_chart(lab, 4)
    run(lab)  # the engine goes on as before
    check_chart(lab, 5)


def test_recorded_runs_come_through_the_same_controls(lab):
    press(lab, "Reset")
    box = panel(lab)
    box.get_by_role("button", name=re.compile("RECORDED")).click()
    box.get_by_text("Nothing is loaded, compiled or captured").wait_for()
    batch = box.get_by_role("spinbutton").first
    batch.fill("13")
    batch.press("Enter")
    box.get_by_text("batch 13 was not recorded; moved to the nearest recorded point, 16").wait_for()
    for mode in ("NONE", "FULL"):
        box.get_by_label("Graph mode").select_option(mode)
        number = len(lab.ask(REPORTS)) + 1
        press(lab, "Run")
        wait_for_status(lab, f"Run {number} is done")
        press(lab, "Pin")
    box.get_by_text(re.compile(r"1 graph launch and \d+ more instead of \d+ launches")).wait_for()
    box.get_by_text(re.compile("A takes .* times as long as B")).wait_for()
    eager, graph = lab.ask(REPORTS)
    assert (eager["mode"], graph["mode"], graph["size"]) == ("NONE", "FULL", 16)
    chart = drawn(lab)
    assert chart["samples", 1, "main"] == eager["samples"] and chart["samples", 2, "pinned"] == graph["samples"]
    picture(lab, "panel-recorded", box)


def test_it_reads_in_the_dark_and_in_a_narrow_window(lab):
    box = panel(lab)
    lab.theme("JupyterLab Dark")
    label = box.locator(".xtick text").first.evaluate("e => getComputedStyle(e).fill")
    background = lab.page.evaluate("() => getComputedStyle(document.querySelector('.jp-Notebook')).backgroundColor")
    assert brightness(label) - brightness(background) > 120
    picture(lab, "panel-dark", box)
    picture(lab, "environment-dark", lab.page.locator(".labkit").first)
    lab.theme("JupyterLab Light")
    lab.page.set_viewport_size({"width": 640, "height": 2400})
    lab.page.wait_for_function(
        "() => document.querySelector('.js-plotly-plot .main-svg').getBoundingClientRect().width < 600"
    )
    outside = box.evaluate(
        """box => [...box.querySelectorAll('button:not(.modebar-btn), select, input')].filter(e => {
            const seen = e.getBoundingClientRect(), frame = box.getBoundingClientRect();
            return seen.width > 0 && !e.closest('.js-plotly-plot') &&
                (seen.right > frame.right + 1 || seen.left < frame.left - 1);
        }).map(e => e.outerHTML.slice(0, 80))"""
    )
    assert outside == []
    picture(lab, "panel-narrow", box)


def test_the_console_is_clean_and_nothing_is_fetched_from_outside(lab):
    slow = [text for text in lab.complaints if SLOW in text]
    assert lab.unexplained() == []
    assert not slow or lab.ask("import json; print(json.dumps(panel.view.redraws))")
    assert lab.outside == []


def brightness(colour: str) -> float:
    red, green, blue = map(float, re.findall(r"[\d.]+", colour)[:3])
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
