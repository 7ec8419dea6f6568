"""What every notebook keeps to: thin cells, no output stored, a kernel everybody has. Running them is nbval's part."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_CELLS, MAX_LINES, MAX_BYTES = 25, 12, 300_000


def code_cells(path: pathlib.Path) -> list[tuple[dict, str]]:
    cells = json.loads(path.read_text())["cells"]
    return [(cell, "".join(cell["source"])) for cell in cells if cell["cell_type"] == "code"]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.name)
def notebook(request) -> pathlib.Path:
    return request.param


def test_there_is_a_first_notebook():
    assert (ROOT / "notebooks" / "00_start_here.ipynb") in NOTEBOOKS


def test_it_is_stored_without_output_and_names_the_kernel_that_everybody_has(notebook):
    """Case C42: a kernel name from somebody's own machine is an error everywhere else."""
    assert notebook.stat().st_size < MAX_BYTES
    stored = json.loads(notebook.read_text())
    assert stored["metadata"]["kernelspec"]["name"] == "python3"
    assert "widgets" not in stored["metadata"]
    for cell, _ in code_cells(notebook):
        assert cell["outputs"] == [] and cell["execution_count"] is None
    ids = [cell["id"] for cell in stored["cells"]]
    assert len(ids) == len(set(ids))


def test_its_cells_are_few_short_and_plain(notebook):
    cells = code_cells(notebook)
    assert len(cells) <= MAX_CELLS
    for _, source in cells:
        assert len(source.splitlines()) <= MAX_LINES, source
        kinds = {type(node) for node in ast.walk(ast.parse(source))}
        assert not kinds & {ast.ClassDef, ast.Try, ast.FunctionDef, ast.Lambda}, source


def test_it_checks_something(notebook):
    """Case C41: output is not compared, so what a notebook claims it has to assert."""
    assert any(
        isinstance(node, ast.Assert) for _, source in code_cells(notebook) for node in ast.walk(ast.parse(source))
    )


def test_it_runs_without_torch_on_what_was_recorded(notebook):
    source = "import tests.lab.without_torch\n" + "\n\n".join(source for _, source in code_cells(notebook))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LABKIT_STRICT": "1"}
    check = "\nimport sys; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", source + check], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_its_headings_go_down_one_level_at_a_time(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    text = "\n".join("".join(c["source"]) + "\n" for c in cells if c["cell_type"] == "markdown")
    levels = [len(line) - len(line.lstrip("#")) for line in text.splitlines() if line.startswith("#")]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b - a <= 1 for a, b in zip(levels, levels[1:], strict=False))
