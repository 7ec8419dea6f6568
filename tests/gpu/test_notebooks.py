"""Every notebook from top to bottom on the GPU, LIVE, as a learner leaves it and solved. Needs nbclient and ipykernel.

Panels choose LIVE by themselves where there is a GPU; what a cell shows says which source it has. An error in a panel
raises (LABKIT_STRICT=1), so that a cell that passes has drawn something.
"""

from __future__ import annotations

import collections
import json
import os
import re
import time
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
#: Seconds of one notebook, engines and captures included.
LIMIT = 180
_KIND = re.compile(r"\b(LIVE|RECORDED|SIMULATED)\b")


@pytest.mark.parametrize("solved", [False, True], ids=["unattempted", "solved"])
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_on_the_gpu(path: Path, solved: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient")
    pytest.importorskip("ipykernel", reason="needs ipykernel")
    import nbformat

    monkeypatch.setenv("LABKIT_STRICT", "1")
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    monkeypatch.setenv("LABKIT_SOLUTIONS", "1" if solved else "0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(path.parents[1]), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=LIMIT, kernel_name="python3", store_widget_state=False,
                                     resources={"metadata": {"path": str(path.parent)}})  # fmt: skip
    begin = time.perf_counter()
    client.execute()
    seconds = time.perf_counter() - begin
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = " ".join(json.dumps(cell.get("outputs", [])) for cell in cells)
    kinds = dict(collections.Counter(_KIND.findall(shown)))
    print(f"{path.name}: {len(cells)} cells in {seconds:.1f} s, {kinds}")
    assert all(cell.execution_count for cell in cells if cell.source.strip())
    marks = collections.Counter(re.findall(r"\d\d\.\d \w+: (PASS|NOT YET|NOT ATTEMPTED)\b", shown))
    assert marks["NOT YET"] == 0 and (not solved or marks["NOT ATTEMPTED"] == 0), marks
