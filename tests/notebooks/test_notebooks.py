"""What every notebook keeps to, and that the rules see what breaks them. Running them is nbval's part."""

from __future__ import annotations

import copy
import json
import os
import pathlib
import subprocess
import sys

import pytest

from labkit.dev import notebook_rules as rules
from labkit.dev import notebooks as stored
from labkit.lab.chapter import chapters
from labkit.lab.glossary import find
from tests.conftest import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_BYTES = 300_000


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.name)
def notebook(request) -> pathlib.Path:
    return request.param


def test_there_is_a_first_notebook():
    assert (ROOT / "notebooks" / "00_start_here.ipynb") in NOTEBOOKS


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_it_keeps_to_the_rules(notebook, rule):
    """Cases C41 and C42 are among them: what is claimed is asserted, and the kernel is one that everybody has."""
    assert list(rule(stored.read(notebook))) == []


def test_its_bold_words_are_in_the_glossary(notebook):
    unknown = [word for word in rules.bold_words(stored.read(notebook)) if find(word) is None]
    assert unknown == [], "they belong to labkit/lab/glossary.py"


def test_it_is_small(notebook):
    assert notebook.stat().st_size < MAX_BYTES


def test_it_is_stored_as_make_notebooks_would(notebook):
    made = stored.read(notebook)
    stored.strip(made)
    stored.set_badge(made, notebook.name, *stored.repository())
    assert made == stored.read(notebook), "run `make badges`"


def test_it_runs_without_torch_on_what_was_recorded(notebook, tmp_path):
    cells = [source for _, source in rules.code_cells(stored.read(notebook))]
    source = "import tests.lab.without_torch\n" + "\n\n".join(cells)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LABKIT_STRICT": "1", "LABKIT_HOME": str(tmp_path)}
    check = "\nimport sys; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", source + check], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("chapter", chapters(), ids=lambda chapter: chapter.key)
def test_every_exercise_of_a_chapter_is_in_its_notebook(chapter):
    path = ROOT / "notebooks" / chapter.notebook
    assert path.exists(), f"chapter {chapter.key} says that its notebook is {chapter.notebook}"
    stubs = [rules.stub_name(source) for _, source in rules.code_cells(stored.read(path))]
    assert [e.name for e in chapter.exercises] == [name for name in stubs if name]


# --- the rules themselves --------------------------------------------------------------------------------------------


def cell(source: str, kind: str = "code", tags: tuple[str, ...] = (), **more) -> dict:
    metadata = {"tags": list(tags)} if tags else {}
    made = {"cell_type": kind, "id": f"{abs(hash((source, kind))):x}", "metadata": metadata, "source": [source]}
    return {**made, **({"outputs": [], "execution_count": None} if kind == "code" else {}), **more}


STUB = "def pad_to(num_tokens, sizes):\n    return ..."
CHECKED = cell(
    "ch08.check_pad_to(pad_to)", tags=(rules.KEEP, rules.COMPARE), execution_count=3,
    outputs=[{"output_type": "execute_result", "data": {"text/plain": ["08.2 pad_to: NOT ATTEMPTED"]}}],
)  # fmt: skip
GOOD = {
    "metadata": {"kernelspec": {"name": "python3"}},
    "cells": [cell("# Title\n\n## Part", "markdown"), cell(STUB), CHECKED, cell("assert 1 + 1 == 2")],
}


def broken(*cells: dict, at: int = 1, **metadata) -> list[str]:
    made = copy.deepcopy(GOOD)
    made["cells"][at:at] = cells
    made["metadata"] |= metadata
    return rules.problems(made)


def test_a_good_notebook_has_no_problem():
    assert rules.problems(GOOD) == []


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("class A:\n    pass", "has ClassDef"),
        ("try:\n    a = 1\nfinally:\n    pass", "has Try"),
        ("f = lambda x: x", "has Lambda"),
        ("from labkit import *", "imports *"),
        ("panel.button.on_click(print)", "a callback (on_click)"),
        ("panel.slider.observe(print)", "a callback (observe)"),
        ("def helper(x):\n    return x + 1", "defines helper, and is no exercise's stub"),
        ("def a(x):\n    return ...\n\nprint(1)", "defines a, and is no exercise's stub"),
        ("def b(x):\n    return ...", "nothing calls check_b(b)"),
        ("\n".join(f"a{i} = {i}" for i in range(13)), "has 13 lines"),
    ],
)
def test_code_that_has_no_place_in_a_notebook(source, said):
    assert any(said in problem for problem in broken(cell(source))), broken(cell(source))


def test_a_long_stub_is_allowed_more_lines():
    body = "\n".join(f"    # line {i}" for i in range(15))
    made = copy.deepcopy(GOOD)
    made["cells"][1] = cell(f"def pad_to(n, sizes):\n{body}\n    return ...")
    assert rules.problems(made) == []
    made["cells"][1] = cell(f"def pad_to(n, sizes):\n{body}\n{body}\n    return ...")
    assert "at most 20" in rules.problems(made)[0]


def test_structure():
    assert "26 code cells; at most 25" in broken(*[cell(f"a = {i}") for i in range(23)])
    assert "widget state is stored" in broken(widgets={})
    assert "the kernel is not python3" in broken(kernelspec={"name": "conda-env-lab-py"})
    assert "two cells have one id" in broken(cell("a = 1"), cell("a = 1"))
    assert "headings leave out a level" in broken(cell("#### Deep", "markdown"))
    assert "a notebook begins with its one title" in broken(cell("# Again", "markdown"))
    assert "no cell asserts anything" in rules.problems({**GOOD, "cells": GOOD["cells"][:3]})
    ran = cell("a = 1", execution_count=3)
    assert "code cell 1 is stored with output" in broken(ran)
    kept = cell("a", tags=(rules.KEEP,))
    assert any("to keep its output and has none" in problem for problem in broken(kept))
    html = cell(
        "a", tags=(rules.KEEP,), execution_count=1,
        outputs=[{"output_type": "execute_result", "data": {"text/plain": "a", "text/html": "a"}}],
    )  # fmt: skip
    assert "code cell 1 keeps more than text" in broken(html)
    unkept = copy.deepcopy(GOOD)
    unkept["cells"][2] = cell("ch08.check_pad_to(pad_to)")
    assert any("lacks the tags" in problem for problem in rules.problems(unkept))


@pytest.mark.parametrize(
    "text",
    [
        "A launch takes 6 µs.",
        "It needs 17.5 GB of weights at 3,350 GB/s.",
        "That is 33 % less.",
        "It took 5.5ms, they say.\n\nElsewhere (RECORDED: H200).",
        "| mode | time |\n|---|---|\n| eager (folklore) | 5.5 ms |\n| graph | 5.1 ms |",
        "* one entry (documented)\n* 10 μs".replace("μ", "µ"),
        "<details><summary>Answer</summary>\nabout 5–10 µs per kernel</details>",
        "a clock of 1.4 GHz",
        "80% of the benefit",
    ],
)
def test_a_number_with_a_unit_says_where_it_comes_from(text):
    assert len(list(rules.origins({"cells": [cell(text, "markdown")]}))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "A launch takes 6 µs (RECORDED: H200).",
        "A launch takes 6 µs\non that machine (documented: vLLM 0.33).",
        "It was 5.2 ms, measured here.",
        "8 kernels of 3 µs each (example).",
        "The text says 5.5 ms (folklore); computed from its table (computed).",
        "A batch of 13 runs as 16, in `num_tokens = 5 ms` and ```\n3 ms\n```.",
        "Shapes are [16, 64] and sizes 1, 2, 4 to 512.",
        "Chapter 3 takes 40 minutes, 2 exercises.",
        "Qwen3-0.6B on an H200 SM 90 with 132 SMs",
        "See #3 s and v2s",
    ],
)
def test_tags_shapes_and_code_are_let_through(text):
    assert list(rules.origins({"cells": [cell(text, "markdown")]})) == []


def test_bold_words_are_told_from_sentences_and_controls():
    text = "A **tier**, two **launches**, **Capture**, **Run**. **1. A question?** **A sentence in bold, with words.**"
    assert list(rules.bold_words({"cells": [cell(text, "markdown")]})) == ["tier", "launches", "Capture"]


# --- what is stored --------------------------------------------------------------------------------------------------


def test_stripping_leaves_only_the_text_of_cells_that_keep_it():
    made = copy.deepcopy(GOOD)
    made["metadata"]["widgets"] = {"state": 1}
    made["cells"][3] |= {"execution_count": 9, "outputs": [{"output_type": "stream", "name": "stdout", "text": ["a"]}]}
    made["cells"][2]["outputs"][0]["data"]["text/html"] = "<b>x</b>"
    made["cells"][2]["metadata"]["collapsed"] = True
    stored.strip(made)
    assert rules.problems(made) == []


def test_the_badge_comes_from_one_setting(tmp_path):
    """Case C43: Colab's first cell installs labkit without touching what is there, and never flash-attn."""
    project = tmp_path / "pyproject.toml"
    project.write_text(
        '[tool.other]\nrepository = "no/no"\n\n[tool.labkit]\nrepository = "some-body/a.lab"\n\n[tool.z]\n'
    )
    assert stored.repository(project) == ("some-body/a.lab", "main")
    made = copy.deepcopy(GOOD)
    for _ in range(2):  # twice changes nothing
        stored.set_badge(made, "08_sizes.ipynb", *stored.repository(project))
    assert len(made["cells"]) == len(GOOD["cells"]) + 2 and rules.problems(made) == []
    text = json.dumps(made)
    assert "colab.research.google.com/github/some-body/a.lab/blob/main/notebooks/08_sizes.ipynb" in text
    source = "".join(made["cells"][2]["source"])
    assert (
        "--no-deps" in source and "--upgrade" not in source and "flash" not in source and "COLAB_RELEASE_TAG" in source
    )
    project.write_text('[tool.labkit]\nrepository = ""\n')
    stored.set_badge(made, "08_sizes.ipynb", *stored.repository(project))
    assert made["cells"] == GOOD["cells"]
    project.write_text('[tool.labkit]\nrepository = "https://host/x"\n')
    with pytest.raises(SystemExit, match="owner/name"):
        stored.repository(project)
