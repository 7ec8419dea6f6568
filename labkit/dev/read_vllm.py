"""Reads a vLLM wheel's own sources into the table that `labkit export vllm` answers from. Refuses to import vLLM.

`python labkit/dev/read_vllm.py vllm-0.33.0-….whl` writes `labkit/data/vllm_options.json`. Nothing of the wheel is run
or installed: its files are parsed, and a source that does not read as expected is an error, so that a new version
cannot half fill the table.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parents[1] / "data" / "vllm_options.json"

ARGS = "vllm/engine/arg_utils.py"
COMPILATION = "vllm/config/compilation.py"
ATTENTION = "vllm/config/attention.py"
BACKENDS = "vllm/v1/attention/backends/registry.py"
LEVELS = "vllm/config/vllm.py"
ENVIRONMENT = "vllm/envs.py"
FACE = "vllm/entrypoints/llm.py"
PARSER = "vllm/utils/argparse_utils.py"
LOADERS = "vllm/model_executor/model_loader/__init__.py"

#: Flags that the export may write, or names when it says what vLLM does by itself.
FLAGS = (
    "--model", "--dtype", "--seed", "--max-model-len", "--quantization", "--enforce-eager", "--load-format",
    "--attention-backend", "--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size",
    "--block-size", "--gpu-memory-utilization", "--kv-cache-dtype", "--num-gpu-blocks-override",
    "--enable-prefix-caching", "--max-num-batched-tokens", "--max-num-seqs", "--long-prefill-token-threshold",
    "--enable-chunked-prefill", "--async-scheduling", "--prefill-schedule-interval", "--generation-config",
    "--cudagraph-capture-sizes", "--max-cudagraph-capture-size", "--compilation-config", "--attention-config",
    "--optimization-level", "--spec-tokens",
)  # fmt: skip
VARIABLES = ("VLLM_BATCH_INVARIANT", "VLLM_KV_CACHE_LAYOUT", "VLLM_USE_BREAKABLE_CUDAGRAPH")


class Sources:
    """The Python files of a wheel, parsed when they are asked for."""

    def __init__(self, wheel: Path) -> None:
        self._zip = zipfile.ZipFile(wheel)
        self._trees: dict[str, ast.Module] = {}

    def tree(self, path: str) -> ast.Module:
        if path not in self._trees:
            self._trees[path] = ast.parse(self._zip.read(path))
        return self._trees[path]

    def config_files(self) -> list[str]:
        return sorted(n for n in self._zip.namelist() if n.startswith("vllm/config/") and n.endswith(".py"))

    def find_class(self, name: str, paths: Sequence[str]) -> ast.ClassDef:
        for path in paths:
            for node in self.tree(path).body:
                if isinstance(node, ast.ClassDef) and node.name == name:
                    return node
        raise SystemExit(f"read_vllm: no class {name} in {', '.join(paths)}")

    def assigned(self, name: str, paths: Sequence[str]) -> ast.expr | None:
        """What a module-level name stands for, from the first of the files that assigns it."""
        for path in paths:
            for node in self.tree(path).body:
                if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                    return node.value
        return None


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    table = read(Path(argv[0]))
    OUT.write_text(_two_levels(table), encoding="utf-8")
    print(f"{OUT.name}: vLLM {table['version']}, {len(table['flags'])} flags, {OUT.stat().st_size:,} bytes")
    return 0


def _two_levels(table: dict[str, Any]) -> str:
    """JSON with one line for each entry of each part, so that a new version's changes can be read in a diff."""
    parts = []
    for name, part in table.items():
        if isinstance(part, dict):
            inner = (f"  {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in part.items())
            parts.append(f" {json.dumps(name)}: {{\n" + ",\n".join(inner) + "\n }")
        else:
            parts.append(f" {json.dumps(name)}: {json.dumps(part, ensure_ascii=False)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def read(wheel: Path) -> dict[str, Any]:
    """The table of one wheel."""
    sources = Sources(wheel)
    version = {
        target.id: ast.literal_eval(node.value)
        for node in sources.tree("vllm/_version.py").body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant)
    }
    return {
        "version": version["__version__"],
        "commit": (version.get("__commit_id__") or "").removeprefix("g") or None,
        "source": wheel.name,
        "flags": flags(sources),
        "shorthands": shorthands(sources),
        "classes": {
            "EngineArgs": fields(sources.find_class("EngineArgs", [ARGS])),
            "CompilationConfig": fields(sources.find_class("CompilationConfig", [COMPILATION])),
            "AttentionConfig": fields(sources.find_class("AttentionConfig", [ATTENTION])),
        },
        "llm_arguments": llm_arguments(sources),
        "enums": {
            "CUDAGraphMode": members(sources.find_class("CUDAGraphMode", [COMPILATION])),
            "CompilationMode": members(sources.find_class("CompilationMode", [COMPILATION])),
            "OptimizationLevel": members(sources.find_class("OptimizationLevel", [LEVELS])),
            "AttentionBackendEnum": members(sources.find_class("AttentionBackendEnum", [BACKENDS])),
        },
        "splitting_ops": splitting_ops(sources),
        "levels": levels(sources),
        "batch_defaults": batch_defaults(sources),
        "environment": environment(sources),
    }


# --- classes and enums ---------------------------------------------------------------------------------------------


def fields(node: ast.ClassDef) -> dict[str, str]:
    """Field → annotation as written, ClassVars and private names left out."""
    return {
        item.target.id: ast.unparse(item.annotation)
        for item in node.body
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and not item.target.id.startswith("_")
        and "ClassVar" not in ast.unparse(item.annotation)
    }


def members(node: ast.ClassDef) -> dict[str, Any]:
    """Member → value, where the source writes a plain one; a tuple of other members is written out as text."""
    out: dict[str, Any] = {}
    for item in node.body:
        if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
            try:
                out[item.targets[0].id] = ast.literal_eval(item.value)
            except ValueError:
                out[item.targets[0].id] = ast.unparse(item.value)
    if not out:
        raise SystemExit(f"read_vllm: {node.name} has no members")
    return out


def llm_arguments(sources: Sources) -> list[str]:
    """Named parameters of `LLM(…)`; the rest goes to EngineArgs by keyword."""
    (init,) = (n for n in sources.find_class("LLM", [FACE]).body if getattr(n, "name", "") == "__init__")
    assert isinstance(init, ast.FunctionDef) and init.args.kwarg is not None
    return [arg.arg for arg in (*init.args.args[1:], *init.args.kwonlyargs)]


def splitting_ops(sources: Sources) -> list[str]:
    """The operators that a compiled model is cut at when `splitting_ops` is None."""
    for item in sources.find_class("CompilationConfig", [COMPILATION]).body:
        if isinstance(item, ast.AnnAssign) and ast.unparse(item.target) == "_attention_ops" and item.value:
            return list(ast.literal_eval(item.value))
    raise SystemExit("read_vllm: CompilationConfig has no _attention_ops")


def levels(sources: Sources) -> dict[str, str]:
    """Optimization level → graph mode that it asks for."""
    out = {}
    for level in range(4):
        value = sources.assigned(f"OPTIMIZATION_LEVEL_0{level}", [LEVELS])
        found = [
            v.attr
            for node in ast.walk(value or ast.Pass())
            if isinstance(node, ast.Dict)
            for k, v in zip(node.keys, node.values, strict=True)
            if isinstance(k, ast.Constant) and k.value == "cudagraph_mode" and isinstance(v, ast.Attribute)
        ]
        (out[str(level)],) = found
    return out


def batch_defaults(sources: Sources) -> dict[str, dict[str, list[int]]]:
    """Limit → how vLLM was started → its possible defaults on a GPU, smallest first."""
    names = ("default_max_num_batched_tokens", "default_max_num_seqs")
    out: dict[str, dict[str, set[int]]] = {name.removeprefix("default_"): {} for name in names}
    (chain,) = (
        node
        for node in ast.walk(sources.tree(ARGS))
        if isinstance(node, ast.If) and ast.unparse(node.test).startswith("device_memory >= 160")
    )
    for node in ast.walk(chain):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in names:
            assert isinstance(node.value, ast.Dict)
            limit = out[node.targets[0].id.removeprefix("default_")]
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                assert isinstance(key, ast.Attribute)
                limit.setdefault(key.attr, set()).add(ast.literal_eval(value))
    return {name: {how: sorted(found) for how, found in by.items()} for name, by in out.items()}


def environment(sources: Sources) -> dict[str, list[str] | None]:
    """Variable → its choices; None where it is a switch, 0 or 1."""
    out: dict[str, list[str] | None] = {}
    for node in ast.walk(sources.tree(ENVIRONMENT)):
        if not isinstance(node, ast.Dict):
            continue
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value in VARIABLES:
                out[str(key.value)] = ast.literal_eval(value.args[2]) if isinstance(value, ast.Call) else None
    if set(out) != set(VARIABLES):
        raise SystemExit(f"read_vllm: envs.py lacks {sorted(set(VARIABLES) - set(out))}")
    return dict(sorted(out.items()))


# --- flags ---------------------------------------------------------------------------------------------------------


def flags(sources: Sources) -> dict[str, dict[str, Any]]:
    """Flag → spellings, class and field it is made from, kind of its value, choices and default.

    kind: "switch" (`--x` and `--no-x`), "list" (one or more words), "json" (an object, or `--x.key value`), else
    "value". type: of one word. choices: all that is taken; known: those with a name, where other words are taken, too.
    """
    (engine,) = (n for n in sources.tree(ARGS).body if isinstance(n, ast.ClassDef) and n.name == "EngineArgs")
    (adder,) = (n for n in engine.body if isinstance(n, ast.FunctionDef) and n.name == "add_cli_args")
    classes = dict(_classes_behind(adder))
    out: dict[str, dict[str, Any]] = {}
    for call in ast.walk(adder):
        if not (isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument"):
            continue
        names = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
        if not names or names[0] not in FLAGS:
            continue
        source = _source_of(call)
        if source is None:
            raise SystemExit(f"read_vllm: {names[0]} is not made from a field")
        cls, field = classes[source[0]], source[1]
        out[names[0]] = {"names": names, "class": cls, "field": field, **_kind(sources, cls, field, source[2])}
    if set(out) != set(FLAGS):
        raise SystemExit(f"read_vllm: arg_utils.py lacks {sorted(set(FLAGS) - set(out))}")
    return dict(sorted(out.items()))


def shorthands(sources: Sources) -> dict[str, str]:
    """`-O2` is no flag of argparse: vLLM's parser turns it into one."""
    text = {node.value for node in ast.walk(sources.tree(PARSER)) if isinstance(node, ast.Constant)}
    if not {"-O", "--optimization-level"} <= text:
        raise SystemExit("read_vllm: the parser no longer knows -O")
    return {"-O": "--optimization-level"}


def _classes_behind(adder: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """`model_kwargs = get_kwargs(ModelConfig)` → ("model_kwargs", "ModelConfig")."""
    for node in ast.walk(adder):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
            continue
        name, call = node.targets[0], node.value
        if getattr(call.func, "id", "") == "get_kwargs" and isinstance(name, ast.Name):
            yield name.id, ast.unparse(call.args[0])


def _source_of(call: ast.Call) -> tuple[str, str, dict[str, Any]] | None:
    """The name of the dictionary, its key, and literal values written over it: `**{**kwargs["x"], "default": None}`."""
    over: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is not None:
            continue
        value = keyword.value
        if isinstance(value, ast.Dict):
            for key, inner in zip(value.keys, value.values, strict=True):
                if isinstance(key, ast.Constant):
                    over[str(key.value)] = ast.literal_eval(inner)
            (value,) = (inner for key, inner in zip(value.keys, value.values, strict=True) if key is None)
        if isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name):
            return value.value.id, ast.literal_eval(value.slice), over
    return None


def _kind(sources: Sources, cls: str, field: str, over: dict[str, Any]) -> dict[str, Any]:
    """vLLM's rule from a field's type to argparse (`_compute_kwargs`), in its order."""
    paths = sources.config_files()
    (item,) = (
        node
        for node in sources.find_class(cls, paths).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == field
    )
    hints = _alternatives(sources, item.annotation)
    names = {h for h in hints if isinstance(h, str)}
    literals = [h for h in hints if isinstance(h, tuple) and h[0] == "Literal"]
    default = over["default"] if "default" in over else _default(sources, cls, item.value)
    out: dict[str, Any] = {"kind": "value", "type": "str"}
    if any(name.endswith("Config") for name in names):
        out = {"kind": "json", "type": "json"}
    elif "bool" in names:
        out = {"kind": "switch", "type": "bool"}
    elif literals:
        choices = list(literals[0][1])
        out |= {"type": type(choices[0]).__name__} | {"known" if "str" in names else "choices": choices}
    elif any(name.startswith("list[") for name in names):
        (inner,) = (name for name in names if name.startswith("list["))
        out = {"kind": "list", "type": inner[5:-1]}
    elif "int" in names:
        out["type"] = "int"
    elif "float" in names:
        out["type"] = "float"
    if "None" in names:
        out["optional"] = True
    return {**out, "default": default}


def _alternatives(sources: Sources, node: ast.expr) -> list[Any]:
    """The members of a union: names as text, a Literal as ("Literal", its options), aliases followed."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _alternatives(sources, node.left) + _alternatives(sources, node.right)
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
        return [("Literal", ast.literal_eval(node.slice) if isinstance(node.slice, ast.Tuple) else
                 (ast.literal_eval(node.slice),))]  # fmt: skip
    if isinstance(node, ast.Name):
        behind = sources.assigned(node.id, [*sources.config_files(), LOADERS])
        if behind is not None:
            return _alternatives(sources, behind)
    return [ast.unparse(node)]


def _default(sources: Sources, cls: str, value: ast.expr | None) -> Any:
    """A field's default where the source writes a plain one, else its text; `Field(…)` and ClassVars are followed."""
    if value is None:
        return None
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "Field":
        for keyword in value.keywords:
            if keyword.arg in ("default", "default_factory"):
                return _default(sources, cls, keyword.value)
    if isinstance(value, ast.Name):
        for item in sources.find_class(cls, sources.config_files()).body:
            if isinstance(item, ast.AnnAssign) and ast.unparse(item.target) == value.id and item.value is not None:
                return _default(sources, cls, item.value)
    try:
        return ast.literal_eval(value)
    except ValueError:
        return ast.unparse(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
