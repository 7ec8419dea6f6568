"""`make notebooks` and `make badges`: what notebooks store, and what Colab needs. Refuses to know the course.

python labkit/dev/notebooks.py strip [FILES]      output out, but the text of cells tagged keep_output
python labkit/dev/notebooks.py keep [FILES]       run them unattempted, and store the text of those cells
python labkit/dev/notebooks.py badges             Colab's badge and first cell, from [tool.labkit] in pyproject.toml
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KEEP = "keep_output"
BADGE, SETUP = "colab-badge", "colab-setup"


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def write(path: Path, notebook: dict[str, Any]) -> bool:
    """Store it as Jupyter would; says whether anything changed."""
    text = json.dumps(notebook, ensure_ascii=False, indent=1) + "\n"
    changed = not path.exists() or path.read_text(encoding="utf-8") != text
    if changed:
        path.write_text(text, encoding="utf-8")
    return changed


def strip(notebook: dict[str, Any]) -> None:
    """Take out everything that a run leaves behind; of cells that keep their output the text stays."""
    notebook["metadata"] = {
        "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        **{key: notebook["metadata"][key] for key in ("accelerator", "colab") if key in notebook["metadata"]},
    }
    for cell in notebook["cells"]:
        tags = cell["metadata"].get("tags")
        cell["metadata"] = {"tags": tags} if tags else {}
        if cell["cell_type"] != "code":
            continue
        if KEEP not in (tags or []):
            cell["outputs"], cell["execution_count"] = [], None
            continue
        kept = []
        for output in cell["outputs"]:
            if output["output_type"] == "execute_result":
                text = output["data"].get("text/plain", "")
                kept.append({**output, "data": {"text/plain": text}, "metadata": {}})
            elif output["output_type"] == "stream" and output["name"] == "stdout":
                kept.append(output)
        cell["outputs"] = kept


def keep(path: Path) -> dict[str, Any]:
    """Run a notebook as a learner would find it, on this machine and with notes of its own; returns it run."""
    import nbformat
    from nbclient import NotebookClient

    with tempfile.TemporaryDirectory() as home:
        os.environ["LABKIT_HOME"] = home
        os.environ.pop("LABKIT_SOLUTIONS", None)
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(notebook, timeout=300, store_widget_state=False).execute(cwd=str(path.parent))
    return json.loads(nbformat.writes(notebook))


def repository(pyproject: Path = ROOT / "pyproject.toml") -> tuple[str, str]:
    """("owner/name", branch) of [tool.labkit]; the first is "" where the project has no home yet."""
    text = pyproject.read_text(encoding="utf-8")
    section = re.search(r"^\[tool\.labkit\]\n(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL)
    found = dict(re.findall(r'^(\w+) *= *"([^"]*)"', section[1] if section else "", re.MULTILINE))
    name = found.get("repository", "")
    if name and not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise SystemExit(f"labkit: [tool.labkit] repository is {name!r}, and should be like owner/name, or empty.")
    return name, found.get("branch", "main")


def set_badge(notebook: dict[str, Any], file: str, name: str, branch: str) -> None:
    """Colab's badge as the first cell, and a first code cell that installs labkit there; neither without a repository.

    Nothing on Colab is upgraded: what labkit needs is there already, so it comes without its dependencies.
    """
    cells = [cell for cell in notebook["cells"] if cell.get("id") not in (BADGE, SETUP)]
    if name:
        link = f"https://colab.research.google.com/github/{name}/blob/{branch}/notebooks/{file}"
        badge = f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({link})"
        install = [
            "import os, subprocess, sys\n",
            "\n",
            'if "COLAB_RELEASE_TAG" in os.environ:\n',
            '    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]\n',
            f'    subprocess.run([*pip, "gguf", "git+https://github.com/{name}@{branch}"], check=True)',
        ]
        setup: dict[str, Any] = {
            "cell_type": "code", "id": SETUP, "metadata": {}, "execution_count": None, "outputs": [], "source": install,
        }  # fmt: skip
        head = {"cell_type": "markdown", "id": BADGE, "metadata": {}, "source": [badge]}
        title = next((i for i, cell in enumerate(cells) if cell["cell_type"] == "markdown"), 0)
        cells = [*cells[: title + 1], head, setup, *cells[title + 1 :]]
    notebook["cells"] = cells


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What is stored in the notebooks.")
    parser.add_argument("what", choices=("strip", "keep", "badges"))
    parser.add_argument("files", nargs="*", type=Path, help="default: all of notebooks/")
    args = parser.parse_args(argv)
    files = args.files or sorted((ROOT / "notebooks").glob("*.ipynb"))
    for path in files:
        notebook = keep(path) if args.what == "keep" else read(path)
        if args.what == "badges":
            set_badge(notebook, path.name, *repository())
        strip(notebook)
        if write(path, notebook):
            print(f"{args.what}: {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
