"""A few lines of labkit's own source, read from the file that runs, so that a text about them cannot drift.

Refuses to import what it shows: some of it needs torch, and reading does not.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path

import labkit
from labkit.errors import ConfigError
from labkit.lab.cards import Card, code, paragraph

_ROOT = Path(inspect.getfile(labkit)).resolve().parent


@dataclasses.dataclass(frozen=True)
class Stop:
    """One stop of the walk. file: under labkit/. name: function, method ("Class.method") or assignment.

    begin, end: parts of the first and the last line to show, within it; "" for all of it. say: what to look at.
    """

    file: str
    name: str
    say: str
    begin: str = ""
    end: str = ""


#: In the order of the source text's walk: an opaque operator, three kinds of pieces, capture by size, and the choice.
STOPS: dict[str, tuple[Stop, ...]] = {
    "opaque": (
        Stop("attention/opaque.py", "_fake", "All that the compiler ever sees of attention: nothing happens, and "
             "nothing is returned. It cannot look inside."),
        Stop("attention/op.py", "attention", "What runs in its place, at call time. The first line writes K and V "
             "into the cache: that is outside of the pieces, too.", "write_kv(", "attend("),
        Stop("models/blocks.py", "Attention.traced_forward", "Where the model calls it: between the rotation and the "
                                                             "output product.",
             "output = torch.empty_like", "return F.linear"),
    ),
    "trace": (
        Stop("graphs/trace.py", "trace", "The number of tokens is marked as dynamic, and the whole pass has to be one "
             "graph.", "for tensor in (token_ids, positions)", "mark_dynamic"),
    ),
    "split": (
        Stop("graphs/pieces.py", "split", "Operators get the number of their part. At attention the number goes up by "
             "two: one part for attention, and a new one after it.", "for node in module.graph.nodes", "part += 2"),
        Stop("graphs/pieces.py", "_program", "Equal structure, equal signature: a piece that is known already is not "
             "compiled again.", "signature = signature_of", "instructions.append(Instruction(classes"),
    ),
    "compile": (
        Stop("graphs/compiler.py", "compile_split", "One compilation for each kind of piece, not for each piece.",
             "for index, piece in enumerate", "made = CompiledClass"),
        Stop("graphs/compiler.py", "CompiledForward.__call__", "The pass as a list of calls: a piece, attention, a "
                                                               "piece.",
             "if cls < 0", "made = code[cls]"),
    ),
    "capture": (
        Stop("graphs/dispatcher.py", "GraphDispatcher.capture_order", "Which graphs there will be, in the order of "
             "capturing.", "keys = [", "return sorted"),
        Stop("graphs/capture.py", "GraphCapturer._record_segments", "A graph for each stretch: attention ends one and "
             "begins the next, without any compiler.", "def break_at", "begin()"),
    ),
    "dispatch": (
        Stop("graphs/dispatcher.py", "GraphDispatcher.dispatch", "The choice for one batch, in every step: a graph "
             "for decodes, or one for mixed batches, or none.", "key = None", "key = self.mixed_keys"),
    ),
}  # fmt: skip


def walk(*parts: str) -> Card:
    """The lines of some parts of the walk, with their places.

    Raises:
        ConfigError: there is no such part.
    """
    unknown = [part for part in parts if part not in STOPS]
    if unknown or not parts:
        raise ConfigError(f"walk({', '.join(map(repr, parts))})", "there is no such part", f"Take {', '.join(STOPS)}.")
    body, places = [], []
    for stop in (stop for part in parts for stop in STOPS[part]):
        first, lines = excerpt(stop)
        place = f"labkit/{stop.file}:{first}"
        places.append(place)
        body += [paragraph(f"<b>{place}</b>, in <code>{stop.name}</code>. {stop.say}", html=True), code(lines)]
    return Card(f"source: {', '.join(places)}", "".join(body))


def excerpt(stop: Stop) -> tuple[int, str]:
    """The number of the first line shown, and the lines, with the indentation that they share taken off.

    Raises:
        ConfigError: the file no longer has them.
    """
    text = (_ROOT / stop.file).read_text(encoding="utf-8")
    node = _find(ast.parse(text), stop.name)
    if node is None:
        raise ConfigError(f"{stop.name} in {stop.file}", "is not there", "The walk of chapter 10 needs another stop.")
    lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
    begin = next((i for i, line in enumerate(lines) if stop.begin in line), None)
    end = next((i for i, line in enumerate(lines) if begin is not None and i >= begin and stop.end in line), None)
    if begin is None or end is None:
        raise ConfigError(
            f"{stop.begin!r} … {stop.end!r} in {stop.name}", "is not there", "Mend the walk of chapter 10."
        )
    chosen = lines[begin : end + 1] if stop.end else lines[begin:]
    return node.lineno + begin, inspect.cleandoc("\n" + "\n".join(chosen))


def _find(tree: ast.AST, name: str) -> ast.FunctionDef | ast.ClassDef | None:
    """A function, or a method named "Class.method", at any depth of its class."""
    found: ast.AST | None = tree
    for part in name.split("."):
        nodes = ast.walk(found) if found is not None else ()
        found = next((n for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part), None)
    return found if isinstance(found, ast.FunctionDef | ast.ClassDef) else None
