"""The static site: two chapters are built and read as a visitor would, and the link check sees what is wrong."""

from __future__ import annotations

import html
import json
import os
import pathlib
import re

import plotly.graph_objects as go
import pytest

from labkit.dev import site, still
from labkit.lab.chapter import chapters
from labkit.lab.panel import Gate, Measurement, Number, Outcome, Panel, drawn, simulated
from labkit.lab.quiz import Quiz, QuizCard
from labkit.lab.task import TaskCard
from tests.conftest import ROOT

BUILT = [ROOT / "notebooks" / name for name in ("00_start_here.ipynb", "01_two_kinds_of_waiting.ipynb")]


class Square:
    kind, label = "SIMULATED", "a square"

    def controls(self, values):
        return [Number("side", "Side", 1, 9, 3)]

    def cost(self, values):
        return ""

    def explain(self, values):
        return []

    def run(self, values, context):
        area = float(values["side"] ** 2)
        made = simulated("square", side=values["side"])
        return Outcome({}, {"area": area}, f"The <area> is {area:g}.", made, Measurement("SIMULATED", (area,)))


def panel(**more) -> Panel:
    def figure(runs, pinned):
        return go.Figure([go.Bar(y=[run.values["area"]], meta=drawn(run.number, y="area")) for run in runs])

    return Panel("square", "Areas", [Square()], figure, [("area", "area, m²")], **more)


def charts(page: str) -> list[list[dict]]:
    """The traces of each chart of a page."""
    found = re.findall(r'Plotly\.newPlot\(\s*"([^"]+)",\s*(\[.*?\]),\s*\{', page, re.DOTALL)
    decoder = json.JSONDecoder()
    return [decoder.raw_decode(page, page.index("[", page.index(f'"{name}",')))[0] for name, _ in found]


def test_a_panel_without_a_kernel_shows_its_runs():
    made = panel(gate=Gate("x.y", "How large?", options=[("nine", 9.0), ("six", 6.0)],
                           answer=lambda runs: 9.0, explain="Three times three."))  # fmt: skip
    made.run(wait=True, timeout=20)
    made.set(side=4)
    made.run(wait=True, timeout=20)
    shown = still.still(made)
    (traces,) = charts(shown)
    assert [trace["y"] for trace in traces] == [[9.0], [16.0]]
    assert "SIMULATED" in shown and "The &lt;area&gt; is 16." in shown and "square (side=4)" in shown
    assert "Compared with run 1: Side 3 → 4" in shown and "In the notebook this is a panel" in shown and "Side" in shown
    folded = "".join(re.findall(r"<details.*?</details>", shown, re.DOTALL))
    assert "Three times three." in folded and "How large?" in shown.replace(folded, "")
    assert "<button" not in shown and "<input" not in shown and "cdn" not in shown.lower().split("newplot")[0]


def test_a_panel_that_no_cell_ran_is_run_once():
    made = panel()
    shown = still.still(made)
    assert len(made.runs) == 1 and charts(shown)[0][0]["y"] == [9.0]


def test_answers_hints_and_solutions_are_folded():
    quiz = Quiz("00.x", "Which <b>one</b>?", [("this", True, "Because."), ("that", False, "It is too large.")])
    exercise = chapters()[0].exercises[0]
    for shown, open_, folded in (
        (still.still(QuizCard(quiz)), ["Which <b>one</b>?", "this", "that"], ["Because.", "It is too large."]),
        (still.still(TaskCard(exercise)), [exercise.title], [exercise.hints[2], exercise.explanation, "def "]),
    ):
        inside = "".join(re.findall(r"<details.*?</details>", shown, re.DOTALL))
        outside = re.sub(r"<details.*?</details>", "", shown, flags=re.DOTALL)
        assert all(text in outside for text in open_)
        assert all(words(text) in words(inside) and words(text) not in words(outside) for text in folded)


def words(text: str) -> str:
    return " ".join(re.sub(r"<[^>]+>|`", "", html.unescape(text)).split())


# --- links -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('<a href="b.html#here">x</a> <a href="#top" id="top">x</a> <a href="https://e.org/x">x</a>', ""),
        ('<img src="data:image/png;base64,AAAA">', ""),
        ('<a href="c.html">x</a>', "no such page: c.html"),
        ('<a href="b.html#there">x</a>', "no such place: b.html#there"),
        ('<script src="https://cdn.plot.ly/plotly.js"></script>', "script is fetched from outside"),
        ('<link href="//fonts.org/a.css">', "link is fetched from outside"),
        ('<img src="a.png">', "no such page: a.png"),
        ('<span class="xref myst">07</span>', "a link to a page that is not there"),
        ('<script type="application/vnd.jupyter.widget-view+json">{}</script>', "a widget that needs a kernel"),
    ],
)
def test_the_link_check(tmp_path: pathlib.Path, body: str, said: str):
    (tmp_path / "a.html").write_text(f"<html><body>{body}</body></html>")
    (tmp_path / "b.html").write_text('<html><p id="here">x</p></html>')
    found = list(site.broken_links(tmp_path))
    assert (said in found[0] and len(found) == 1) if said else found == []


def test_a_link_in_a_card_leads_to_the_page_and_warnings_are_left_out():
    import nbformat

    card = nbformat.v4.new_output("display_data", {"text/html": '<a href="07_x.ipynb#a">x</a>', "text/plain": "x"})
    warned = nbformat.v4.new_output("stream", name="stderr", text="a warning")
    cell = nbformat.v4.new_code_cell("x", outputs=[warned, card])
    (kept,) = site._readable(cell).outputs
    assert kept["data"] == {"text/html": '<a href="07_x.html#a">x</a>'}


# --- two chapters ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    out = tmp_path_factory.mktemp("site") / "html"
    problems = site.build(BUILT, out, engine=False, whole=False)
    assert problems == []
    return out


def test_a_reader_sees_the_story(pages):
    first = (pages / "index.html").read_text(encoding="utf-8")
    for chapter, notebook in zip(chapters(), BUILT, strict=False):
        page = (pages / notebook.with_suffix(".html").name).read_text(encoding="utf-8")
        assert chapter.title in first and notebook.with_suffix(".html").name in first
        assert charts(page) and all(any(t.get("y") or t.get("x") for t in traces) for traces in charts(page))
        assert "In the notebook this is a panel" in page and "RECORDED" in page
        assert page.count("<summary>Solution</summary>") == len(chapter.exercises)
        assert "● LIVE" not in re.sub(r"<table>.*?</table>", "", page, flags=re.DOTALL).split("Predict")[-1]
        for leaked in (str(ROOT), "LABKIT_HOME", "widget-view", "Traceback", "_still"):
            assert leaked not in page, leaked
    assert "H200" in page and "launch queue" in page


def test_plotly_is_there_once_and_nothing_comes_from_outside(pages):
    copies = [path for path in pages.rglob("*.js") if path.stat().st_size > 1_000_000]
    assert [path.name for path in copies] == ["plotly.min.js"]
    assert all(path.stat().st_size < 1_000_000 for path in pages.rglob("*.html"))
    size = sum(path.stat().st_size for path in pages.rglob("*") if path.is_file())
    assert size < 12_000_000
    assert list(site.broken_links(pages, whole=False)) == []


def test_a_cell_that_fails_stops_the_build(tmp_path):
    bad = tmp_path / "99_bad.ipynb"
    text = json.loads(BUILT[0].read_text())
    text["cells"] = [{"cell_type": "code", "id": "a", "metadata": {}, "outputs": [], "execution_count": None,
                      "source": "1 / 0"}]  # fmt: skip
    bad.write_text(json.dumps(text))
    (said,) = site.build([bad], tmp_path / "html", engine=False, whole=False)
    assert "99_bad.ipynb" in said and "ZeroDivisionError" in said
    assert not os.path.exists(tmp_path / "html")
