"""`make site`: every chapter as static pages, to be read without a kernel. Refuses to fetch anything, and to be stale:
each build runs the notebooks anew.

python labkit/dev/site.py [--out FOLDER] [--no-engine] [NOTEBOOKS]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import html
import html.parser
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "site"
BEGIN = "from labkit.dev import still as _still\n_still.begin(engine={engine})"
END = "_still.end()"
LIMIT_S = 300

CONFIG = """
project = "labkit"
author = "labkit"
copyright = "the authors of labkit, Apache License 2.0"
extensions = ["myst_nb"]
nb_execution_mode = "off"
nb_merge_streams = True
myst_heading_anchors = 3
html_theme = "alabaster"
html_title = "labkit: the course"
html_static_path = ["_static"]
html_js_files = ["plotly.min.js"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "description": "Attention backends and CUDA graphs, measured", "page_width": "1180px", "sidebar_width": "230px",
    "fixed_sidebar": True, "show_powered_by": False,
}
suppress_warnings = ["mystnb.unknown_mime_type"]
"""
STYLE = """
div.body { max-width: 940px; }
.labkit { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
.labkit-still { border: 1px solid #ddd; border-radius: 4px; padding: 4px 14px 10px; margin: 10px 0; }
.labkit-still h3 { margin-top: 8px; }
.lk-still-note { font-size: 13px; }
div.cell_output .labkit summary { cursor: pointer; }
div.cell { margin: 12px 0; }
div.body p, div.body li { hyphens: none; }
div.body pre { font-size: 13px; }
"""


@dataclasses.dataclass(frozen=True)
class Page:
    """One notebook of the site. failed: what a cell raised, "" when all ran."""

    path: Path
    failed: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the static site of the course.")
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all of notebooks/")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the site (default: build/site)")
    parser.add_argument("--jobs", type=int, default=2, help="notebooks that run at a time")
    parser.add_argument("--no-engine", action="store_true", help="leave out what only an engine can say: quicker")
    args = parser.parse_args(argv)
    every = sorted((ROOT / "notebooks").glob("*.ipynb"))
    chosen = args.notebooks or every
    problems = build(chosen, args.out, engine=not args.no_engine, jobs=args.jobs, whole=not args.notebooks)
    for problem in problems:
        print(f"labkit: {problem}", file=sys.stderr)
    if not problems:
        print(f"labkit: {len(chosen)} chapters, every link inside resolves: {args.out / 'index.html'}")
    return 1 if problems else 0


def build(notebooks: Sequence[Path], out: Path, *, engine: bool, jobs: int = 2, whole: bool = True) -> list[str]:
    """Run the notebooks, render them, and check the links. Returns what is wrong, as sentences.

    whole: whether these are all chapters, so that a link to another one is wrong.
    """
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "source"
        source.mkdir()
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            pages = list(pool.map(lambda path: run(path, source / path.name, engine), notebooks))
        failed = [f"{page.path.name}: {page.failed}" for page in pages if page.failed]
        if failed:
            return failed
        write_frame(source, [page.path.name for page in pages])
        said = render(source, out)
        if said:
            return [said]
    return list(broken_links(out, whole))


def run(path: Path, to: Path, engine: bool) -> Page:
    """Run one notebook in a kernel of its own, every exercise solved, and store it as it is read."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    with tempfile.TemporaryDirectory() as home:
        env = {
            **os.environ, "PYTHONPATH": str(ROOT), "LABKIT_HOME": home, "LABKIT_SOLUTIONS": "1", "LABKIT_STRICT": "1",
            "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        notebook: Any = nbformat.read(path, as_version=4)
        cells = notebook.cells
        extra = [nbformat.v4.new_code_cell(code) for code in (BEGIN.format(engine=engine), END)]
        notebook.cells = [extra[0], *cells, extra[1]]
        client = NotebookClient(
            notebook, timeout=LIMIT_S, store_widget_state=False, kernel_name="python3",
            resources={"metadata": {"path": str(path.parent)}},
        )  # fmt: skip
        try:
            client.execute(env=env)
        except CellExecutionError as error:
            return Page(path, str(error)[-1500:])
    notebook.cells = [_readable(cell) for cell in cells if cell.get("id") not in ("colab-badge", "colab-setup")]
    notebook.metadata.pop("widgets", None)
    nbformat.write(notebook, to)
    return Page(path)


def _readable(cell: Any) -> Any:
    """Output as a reader wants it: no warnings of libraries, no paths, no objects by their names."""
    if cell.cell_type == "code":
        cell.outputs = [o for o in cell.outputs if not (o.output_type == "stream" and o.name == "stderr")]
        for output in cell.outputs:
            data = output.get("data", {})
            if "text/html" in data:
                # Sphinx turns links in text to notebooks into links to pages, and leaves output alone.
                page = re.sub(r'(href=["\'])(\d\d_\w+)\.ipynb', r"\1\2.html", data["text/html"])
                output["data"] = {"text/html": page}
    return cell


def write_frame(source: Path, names: Sequence[str]) -> None:
    """Everything of the site's source that is no chapter: settings, first page, style, and plotly's own code, once."""
    from plotly.offline import get_plotlyjs

    static = source / "_static"
    static.mkdir()
    (static / "plotly.min.js").write_text(get_plotlyjs(), encoding="utf-8")
    (static / "site.css").write_text(STYLE, encoding="utf-8")
    (source / "conf.py").write_text(CONFIG, encoding="utf-8")
    (source / "index.md").write_text(first_page(names), encoding="utf-8")


def first_page(names: Sequence[str]) -> str:
    """The table of chapters, from the course's own list."""
    from labkit.lab.chapter import chapters

    rows = [
        f"| {one.key} | [{one.title}]({one.notebook}) | {one.minutes} | {_goals(one.goals)} |"
        for one in chapters() if one.notebook in names
    ]  # fmt: skip
    titles = {one.notebook: f"{one.key} {one.title}" for one in chapters()}
    toc = "\n".join(f"{titles.get(name, name)} <{name.removesuffix('.ipynb')}>" for name in names)
    return f"""# The course

Attention backends and CUDA graphs, on an engine that can be read and measured. On these pages nothing runs: each chart
shows runs that were RECORDED on the machine that is named with them, or SIMULATED by a model with the parameters given.
Texts that an engine wrote were made on a CPU when these pages were. For panels that you can run, exercises that are
checked, and numbers of your own machine, take the notebooks: `make lab`.

| | chapter | minutes | after it you can |
|---|---|---|---|
{chr(10).join(rows)}

```{{toctree}}
:hidden:
:maxdepth: 1

{toc}
```
"""


def _goals(goals: Sequence[str]) -> str:
    return "; ".join(html.escape(goal).replace("|", "\\|") for goal in goals)


def render(source: Path, out: Path) -> str:
    """Sphinx over the folder; returns its complaints where it failed, else ""."""
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", "-d", str(source / ".trees"), str(source), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=source)
    if "No module named sphinx" in done.stderr:
        return "the site needs Sphinx and myst-nb: .venv/bin/pip install -c constraints.txt -e '.[site]'"
    wrong = [line for line in done.stderr.splitlines() if "ERROR" in line or "xref_missing" in line]
    if done.returncode:
        return f"Sphinx failed:\n{done.stderr[-3000:]}"
    return "\n".join(wrong) if any("ERROR" in line for line in wrong) else ""


# --- links -----------------------------------------------------------------------------------------------------------


class _Links(html.parser.HTMLParser):
    """Ids of a page, and what it points to: (attribute's tag, address)."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[tuple[str, str]] = []
        self.dead: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.ids.update(value for name in ("id", "name") if (value := given.get(name)))
        self.links += [(tag, value) for name in ("href", "src") if (value := given.get(name))]
        if tag == "span" and "xref" in (given.get("class") or "").split():
            self.dead.append("a link to a page that is not there")
        if tag in ("script", "div") and "application/vnd.jupyter" in (given.get("type") or ""):
            self.dead.append("a widget that needs a kernel")


def broken_links(out: Path, whole: bool = True) -> Iterator[str]:
    """What is wrong with the links of a built site: no such page or place, or something that is fetched from outside.

    A link for a reader to follow may lead outside; a script, style or picture may not.
    """
    pages = {path: _parsed(path) for path in sorted(out.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(out)
        if whole:
            yield from (f"{name}: {what}" for what in page.dead)
        for tag, address in page.links:
            parts = urllib.parse.urlsplit(address)
            if parts.scheme == "data":
                continue
            if parts.scheme or parts.netloc:
                if tag != "a":
                    yield f"{name}: {tag} is fetched from outside: {address}"
                continue
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                left_out = not whole and (ROOT / "notebooks" / f"{target.stem}.ipynb").exists()
                if not left_out:
                    yield f"{name}: no such page: {address}"
            elif parts.fragment and target in pages and parts.fragment not in pages[target].ids:
                if parts.fragment.endswith(".ipynb") and not whole:
                    continue  # Sphinx's way of writing a chapter that it does not know
                yield f"{name}: no such place: {address}"
    for path in out.rglob("*.css"):
        yield from (f"{path.name}: fetched from outside: {url}" for url in re.findall(
            r"url\(['\"]?(https?:[^)'\"]+)", path.read_text(encoding="utf-8")))  # fmt: skip


def _parsed(path: Path) -> _Links:
    parser = _Links()
    parser.feed(path.read_text(encoding="utf-8"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
