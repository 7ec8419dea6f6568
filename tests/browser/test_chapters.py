"""Every chapter in JupyterLab, in a real browser: its first panel is answered, run by keyboard, changed and run again.

The rest of the notebook runs after that, as for a learner who has played with the panel first. Set LABKIT_SCREENSHOTS
to a folder to get a picture of each panel.
"""

from __future__ import annotations

import os
import pathlib
import re
import types
from collections.abc import Iterator
from typing import Any

import pytest

from labkit.figures.points import first_difference, runs_drawn
from tests.browser.jupyter import FLAGS, HOW_TO_INSTALL, ROOT, Notebook, find_browser, lab_server, of_notebook, press

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PATIENCE = 60_000  # ms; a busy machine is slow, a broken panel never comes

FIND = """
import json
from labkit.lab.frame import Frame
ids = {ids!r}
found = [name for name, value in get_ipython().user_ns.items()
         if isinstance(value, Frame) and value.widget.model_id in ids and not name.startswith("_")]
print(json.dumps(found))
"""
STATE = """
import json
from labkit.lab.keeping import plain
known = {{run.number: plain({{**{name}.words.drawn(run), **{name}.words.row(run)}}) for run in {name}.runs}}
print(json.dumps({{"known": known, "summary": {name}.summary, "changed": {name}.changed, "error": {name}.error.value,
                   "title": {name}.title, "gate": {name}.gate.state if {name}.gate is not None else ""}}))
"""
#: Everything that plotly drew, typed arrays as lists.
TRACES = """
box => {
    const plain = v => ArrayBuffer.isView(v) || Array.isArray(v) ? Array.from(v, plain) : v;
    const own = trace => Object.fromEntries(Object.entries(trace)
        .filter(([key]) => !key.startsWith('_') && key !== 'uid').map(([key, v]) => [key, plain(v)]));
    return Array.from(box.querySelectorAll('.js-plotly-plot')[0].data, own);
}
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    """One JupyterLab over all notebooks, and one browser."""
    browser_path = find_browser()
    if browser_path is None:
        pytest.fail(HOW_TO_INSTALL)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.fail("This test drives a browser through playwright. In this project: `make setup` installs it.")
    folder = tmp_path_factory.mktemp("chapters")
    environment = {
        "LABKIT_STRICT": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
        "LABKIT_HOME": str(folder / "learner"),
    }  # fmt: skip
    with lab_server(folder / "lab", *NOTEBOOKS, **environment) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, headless=True, args=list(FLAGS))
        context = browser.new_context(viewport={"width": 1440, "height": 1500})
        context.set_default_timeout(PATIENCE)
        yield address, context
        browser.close()


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def opened(request: pytest.FixtureRequest, lab: tuple[str, Any]) -> Iterator[Chapter]:
    address, context = lab
    notebook = Notebook(context.new_page())
    try:
        notebook.open(of_notebook(address, request.param.name))
        yield Chapter(notebook, request.param.stem[:2])
    finally:
        notebook.end_kernel()
        notebook.page.close()


class Chapter:
    """One chapter's notebook in a page, run as far as its first panel."""

    def __init__(self, notebook: Notebook, key: str) -> None:
        self.notebook, self.page, self.key = notebook, notebook.page, key
        self.cells = notebook.code_cells()
        self.name = ""

    def run_to_the_panel(self) -> None:
        place = 0
        while self.cells and not self.name:
            place = self.cells[0]
            shown = self._run_next()
            found = self.notebook.ask(FIND.format(ids=shown)) if shown else []
            self.name = found[0] if found else ""
        assert self.name, "no cell of this chapter shows a panel"
        self.notebook.scroll_to(place)
        title = self.page.get_by_role("heading", name=self.state()["title"], exact=True)
        self.box = self.page.locator(".labkit", has=title).filter(has=self.page.locator(".lk-figure")).first
        self.box.locator(".js-plotly-plot .main-svg").first.wait_for(state="attached")

    def run_the_rest(self) -> None:
        while self.cells:
            self._run_next()

    def _run_next(self) -> list[str]:
        place = self.cells.pop(0)
        done = self.notebook.run_cell(place)
        assert done["count"] and not done["errors"], (place, done)
        return done["widgets"]

    def state(self) -> dict[str, Any]:
        """What the kernel holds: numbers of each run by key, sentences, the error card."""
        said = self.notebook.ask(STATE.format(name=self.name))
        return {**said, "known": {int(number): values for number, values in said["known"].items()}}

    def run(self, number: int) -> dict[str, Any]:
        """Press Run, wait until page and kernel have that run, and hold the page's chart against its numbers."""
        press(self.box, "Run")
        self.box.locator("[role=status]", has_text=f"Run {number} is done").wait_for()
        state = self.state()
        assert state["error"] == "" and max(state["known"]) == number, state["error"]
        self.page.wait_for_function(
            """([box, number]) => box.querySelector('.js-plotly-plot').data.some(
                trace => trace.meta && [trace.meta[1]].flat().includes(number))""",
            arg=[self.box.element_handle(), number],
        )
        traces = [types.SimpleNamespace(**{"name": "", "meta": None, **trace}) for trace in self.box.evaluate(TRACES)]
        assert first_difference(traces, state["known"]) == ""
        assert number in runs_drawn(traces)
        sentence = self.sentence()
        assert flat(state["summary"]) in sentence
        return {"traces": traces, "sentence": sentence, "summary": state["summary"]}

    def sentence(self) -> str:
        return flat(self.box.locator(".lk-sentence").first.inner_text())

    def answer_the_gate(self) -> None:
        """Predict the first answer, or the number that stands there; where nothing is asked there is nothing to do."""
        if self.state()["gate"] != "asking":
            return
        assert self.box.get_by_role("button", name="Run", exact=True).is_disabled()
        answers = self.box.locator(".lk-gate").get_by_role("radio")
        if answers.count():
            answers.first.check()
        press(self.box, "Commit")
        self.box.get_by_text("You predict:").wait_for()

    def controls(self) -> list[Any]:
        """What can be set beside the source, from the top."""
        kinds = (
            ".widget-dropdown select:enabled, .widget-slider [role=slider], .widget-checkbox input, "
            ".widget-text input[type=text]"
        )
        return [control for control in self.box.locator(kinds).all() if control.is_visible()]

    def change(self, control: Any, number: int) -> str:
        """Another value, by keyboard where it is a slider; says of which control, "" where it has only one."""
        said = control.evaluate("e => `${e.tagName} ${e.closest('.jupyter-widgets').innerText.split('\\n')[0]}`")
        if said.startswith("SELECT"):
            if control.locator("option").count() < 2:
                return ""
            control.select_option(index=0 if control.evaluate("e => e.selectedIndex") else 1)
        elif control.get_attribute("type") == "text":
            typed = control.input_value()
            if not re.search(r"\d", typed):
                return ""
            control.fill(re.sub(r"\d+", lambda number: str(int(number[0]) + 1), typed, count=1))
            control.press("Enter")
        elif said.startswith("INPUT"):
            control.click()
        else:
            control.focus()
            before = control.get_attribute("aria-valuenow")
            self.page.keyboard.press("ArrowRight")
            if control.get_attribute("aria-valuenow") == before:
                self.page.keyboard.press("ArrowLeft")
        self.box.get_by_text(f"this is still run {number}").wait_for()
        return said

    def picture(self) -> None:
        folder = os.environ.get("LABKIT_SCREENSHOTS")
        if folder:
            pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.wait_for_timeout(500)  # let the browser finish painting
            self.box.screenshot(path=os.path.join(folder, f"chapter-{self.key}.png"))


def flat(text: str) -> str:
    return " ".join(text.split())


def test_a_learner_can_use_the_panel_and_then_go_on(opened: Chapter) -> None:
    opened.run_to_the_panel()
    opened.answer_the_gate()
    before, tried = opened.run(1), []
    for control in opened.controls():  # the first, as a rule; a limit that is nowhere near takes the next one
        number = len(tried) + 1
        changed = opened.change(control, number)
        if not changed:
            continue
        tried.append(changed)
        after = opened.run(number + 1)
        if after["summary"] != before["summary"]:
            break
    assert tried and len(tried) <= 3, f"{tried} changed nothing: {before['summary']}"
    assert after["summary"] != before["summary"] and after["sentence"] != before["sentence"], tried
    assert [vars(trace) for trace in after["traces"]] != [vars(trace) for trace in before["traces"]], tried
    opened.picture()
    opened.run_the_rest()
    assert opened.state()["error"] == ""
    assert opened.page.locator(".lk-card[role=alert]").count() == 0
    assert opened.notebook.unexplained() == []
    assert opened.notebook.outside == []
