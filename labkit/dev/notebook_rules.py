"""What every notebook of the course keeps to: thin cells, plain code, numbers that say where they come from.

Each rule is a function from a notebook (as JSON) to sentences about what breaks it. Refuses to run anything.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

Notebook = dict[str, Any]

MAX_CELLS, MAX_LINES, MAX_STUB_LINES = 25, 12, 20
#: A cell with this tag keeps its output, text only; nbval compares it where the notebook is not yet worked on.
KEEP = "keep_output"
COMPARE = "nbval-check-output"

#: Where a number in the text comes from, in parentheses or as the words "measured here".
TAG = re.compile(
    r"\((?:(?:RECORDED|SIMULATED|documented)(?:: [^)]+)?|LIVE|folklore|example|computed|budget)\)|measured here"
)
_UNITS = (
    r"µs|us|ns|ms|s|sec(?:onds?)?|[GTMk]B/s|[GTMK]i?B|bytes/s|%|percent|tokens/s|tok/s|[GT]FLOP(?:S|/s|s)?|[GM]Hz|"
    r"microseconds?|milliseconds?|watts?|W"
)
NUMBER = re.compile(rf"(?<![\w.#])\d[\d,.\u202f]*(?:\s*[–-]\s*\d[\d,.]*)?[\s\u00a0]*(?:{_UNITS})(?![\w/])")
_FENCE = re.compile(r"```.*?```|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$", re.DOTALL)
BOLD = re.compile(r"(?<![*\w])\*\*([^*\n]+)\*\*(?![*\w])")
#: Bold words that are no terms: what is written on a control.
CONTROLS = frozenset(
    (
        "Run", "Stop", "Pin", "Unpin", "Reset", "Save", "Load", "Skip", "Commit", "Check", "Hint", "Solution", "Table",
        "Export", "Restart",
    )
)  # fmt: skip


def code_cells(notebook: Notebook) -> list[tuple[Notebook, str]]:
    return [(cell, "".join(cell["source"])) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def markdown(notebook: Notebook) -> list[str]:
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"]


def stub_name(source: str) -> str | None:
    """The function of an exercise's stub cell: nothing but imports and one function that ends in `return ...`."""
    body = ast.parse(source).body
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    rest = [node for node in body if not isinstance(node, ast.FunctionDef | ast.Import | ast.ImportFrom)]
    if len(functions) != 1 or rest:
        return None
    last = functions[0].body[-1]
    stub = isinstance(last, ast.Return) and isinstance(last.value, ast.Constant) and last.value.value is ...
    return functions[0].name if stub else None


def shape(notebook: Notebook) -> Iterator[str]:
    """Few cells, short ones, a kernel that everybody has, no widget state."""
    cells = code_cells(notebook)
    if len(cells) > MAX_CELLS:
        yield f"{len(cells)} code cells; at most {MAX_CELLS}"
    for number, (_, source) in enumerate(cells, 1):
        most = MAX_STUB_LINES if stub_name(source) else MAX_LINES
        lines = len(source.splitlines())
        if lines > most:
            yield f"code cell {number} has {lines} lines; at most {most}"
    if notebook["metadata"].get("kernelspec", {}).get("name") != "python3":
        yield "the kernel is not python3"
    if "widgets" in notebook["metadata"]:
        yield "widget state is stored"
    ids = [cell["id"] for cell in notebook["cells"]]
    if len(ids) != len(set(ids)):
        yield "two cells have one id"


def plain_code(notebook: Notebook) -> Iterator[str]:
    """No classes, try, lambda or callbacks; a function only where the learner is to write it."""
    for number, (_, source) in enumerate(code_cells(notebook), 1):
        nodes = list(ast.walk(ast.parse(source)))
        for node in nodes:
            kind = type(node)
            if kind in (ast.ClassDef, ast.Try, ast.Lambda, ast.AsyncFunctionDef, ast.Global, ast.Nonlocal):
                yield f"code cell {number} has {kind.__name__}"
            if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
                yield f"code cell {number} imports *"
            if isinstance(node, ast.Attribute) and node.attr in ("observe", "on_click", "on_submit"):
                yield f"code cell {number} has a callback ({node.attr})"
        functions = [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
        if functions and stub_name(source) is None:
            yield f"code cell {number} defines {functions[0]}, and is no exercise's stub (one function, `return ...`)"


def stubs_are_checked(notebook: Notebook) -> Iterator[str]:
    """After a stub comes a cell that checks it, and keeps the line that it prints."""
    cells = code_cells(notebook)
    for number, (_, source) in enumerate(cells, 1):
        name = stub_name(source)
        if name is None:
            continue
        check = f"check_{name}({name})"
        after = [cell for cell, text in cells[number:] if check in text]
        if not after:
            yield f"nothing calls {check} after code cell {number}"
        elif not {KEEP, COMPARE} <= set(after[0]["metadata"].get("tags", [])):
            yield f"the cell of {check} lacks the tags {KEEP} and {COMPARE}"


def stored_output(notebook: Notebook) -> Iterator[str]:
    """No output, but the text of cells that keep it."""
    for number, (cell, _) in enumerate(code_cells(notebook), 1):
        if KEEP not in cell["metadata"].get("tags", []):
            if cell["outputs"] or cell["execution_count"] is not None:
                yield f"code cell {number} is stored with output"
            continue
        if not cell["outputs"] or cell["execution_count"] is None:
            yield f"code cell {number} is to keep its output and has none; run `make notebooks`"
        for output in cell["outputs"]:
            if set(output.get("data", {"text/plain": ""})) != {"text/plain"}:
                yield f"code cell {number} keeps more than text"


def asserts(notebook: Notebook) -> Iterator[str]:
    """Output is not compared, so what a notebook claims it has to assert."""
    trees = [ast.parse(source) for _, source in code_cells(notebook)]
    if not any(isinstance(node, ast.Assert) for tree in trees for node in ast.walk(tree)):
        yield "no cell asserts anything"


def headings(notebook: Notebook) -> Iterator[str]:
    """One title, and no level left out on the way down."""
    text = _FENCE.sub("", "\n".join(markdown(notebook)))
    levels = [len(line) - len(line.lstrip("#")) for line in text.splitlines() if re.match(r"#+ ", line)]
    if levels[:1] != [1] or levels.count(1) != 1:
        yield "a notebook begins with its one title"
    if any(b - a > 1 for a, b in zip(levels, levels[1:], strict=False)):
        yield "headings leave out a level"


def origins(notebook: Notebook) -> Iterator[str]:
    """Every number with a unit says where it comes from, in its paragraph, list entry or table row.

    (LIVE), (RECORDED: machine), (SIMULATED: model) and "measured here" are measured or computed by the lab;
    (documented: source) and (folklore) were said by others; (computed) follows from numbers in the text, (example) was
    made up for an exercise, (budget) is a limit that is set. Code and formulas are left out, and so are sizes, shapes
    and minutes of the reader's time.
    """
    for text in markdown(notebook):
        for block in _blocks(_FENCE.sub(" ", text)):
            found = NUMBER.search(block)
            if found and not TAG.search(block):
                yield f"{found[0]!r} in {' '.join(block.split())[:90]!r} does not say where it comes from"


def bold_words(notebook: Notebook) -> Iterator[str]:
    """Words in bold that have to be terms of the glossary: no sentence, no number, no control's name."""
    for text in markdown(notebook):
        for word in BOLD.findall(_FENCE.sub(" ", text)):
            clean = word.strip().rstrip(":")
            sentence = len(clean.split()) > 4 or clean[-1:] in ".?!" or clean[:1].isdigit()
            if clean and not sentence and clean not in CONTROLS:
                yield clean


RULES = (shape, plain_code, stubs_are_checked, stored_output, asserts, headings, origins)


def problems(notebook: Notebook) -> list[str]:
    """Everything that is wrong with a notebook, in sentences."""
    return [sentence for rule in RULES for sentence in rule(notebook)]


def _blocks(text: str) -> list[str]:
    """Paragraphs, list entries and table rows."""
    out: list[str] = []
    fresh = True
    for line in text.splitlines():
        starts = bool(re.match(r"\s*(?:[-*+] |\d+[.)] |\||#+ |<(?:details|summary|li|tr|p)\b)", line))
        if not line.strip():
            fresh = True
        elif fresh or starts:
            out.append(line)
            fresh = False
        else:
            out[-1] += "\n" + line
    return out
