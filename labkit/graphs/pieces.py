"""Cutting a traced pass at attention: pieces, their classes, and the order in which they run. Refuses to compile.

Layers look alike, so most pieces are the same code with other weights. A *class* is a set of pieces whose graphs are
equal in structure (operators, constants, shapes, dtypes); each class is compiled once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from torch.fx.passes.split_module import split_module

from labkit.config import SPLITTING_OPS
from labkit.graphs.trace import Trace


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One call of a compiled pass: a piece (`cls` ≥ 0), or the attention operator `op` of `layer` (`cls` is −1).

    `inputs` and `outputs` are registers; `frees` are those that nobody reads afterwards.
    """

    cls: int
    layer: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    frees: tuple[int, ...] = ()
    op: str = ""


@dataclasses.dataclass(frozen=True)
class Program:
    """A pass as a list of calls over numbered registers. Plain data: it is what the compile cache keeps of a trace.

    registers: how many. inputs: what the first ones hold, by name (see `Trace.inputs`). result: the register of the
    hidden states. num_classes: different pieces.
    """

    registers: int
    inputs: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    result: int
    num_classes: int

    @property
    def pieces(self) -> list[Instruction]:
        return [i for i in self.instructions if i.cls >= 0]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Program:
        """The inverse of `as_dict`, from JSON; KeyError or TypeError when it is something else."""
        made = [
            Instruction(i["cls"], i["layer"], tuple(i["inputs"]), tuple(i["outputs"]), tuple(i["frees"]), i["op"])
            for i in data["instructions"]
        ]
        return cls(data["registers"], tuple(data["inputs"]), tuple(made), data["result"], data["num_classes"])


@dataclasses.dataclass
class Split:
    """A trace in pieces. `representatives[c]` is the first piece of class c; `signatures[c]` identifies its code."""

    program: Program
    representatives: list[torch.fx.GraphModule]
    signatures: list[str]
    ops: list[int]


def split(traced: Trace, splitting_ops: Sequence[str] = SPLITTING_OPS) -> Split:
    """Cut at every operator named in `splitting_ops`. An empty list leaves one piece with attention inside it.

    N attention calls make N + 1 pieces.
    """
    module = traced.module
    part, parts = 0, {}
    cuts = set()
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if _op_name(node) in splitting_ops:
            cuts.add(part + 1)
            parts[node] = part + 1
            part += 2
        else:
            parts[node] = part
    # A producer's `getitem` stays with it: a tuple must not cross from one piece to the next.
    for node, number in list(parts.items()):
        if node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
            parts[node] = parts.get(node.args[0], number)
    whole = split_module(module, torch.nn.Module(), lambda node: parts[node], keep_original_order=True)
    return _program(whole, traced.inputs, {f"submod_{number}" for number in cuts})


def _program(whole: torch.fx.GraphModule, inputs: tuple[str, ...], attention: set[str]) -> Split:
    registers: dict[torch.fx.Node, int | tuple[int, ...]] = {}
    classes: dict[str, int] = {}
    representatives: list[torch.fx.GraphModule] = []
    ops: list[int] = []
    instructions: list[Instruction] = []
    count, result = 0, -1
    for node in whole.graph.nodes:
        if node.op == "placeholder":
            registers[node] = count
            count += 1
        elif node.op == "call_module":
            piece = getattr(whole, str(node.target))
            args = tuple(_register(registers, a) for a in node.args)
            outputs = _num_outputs(piece)
            made = tuple(range(count, count + outputs))
            count += outputs
            registers[node] = made if _returns_tuple(piece) else (made[0] if made else ())
            if node.target in attention:
                instructions.append(_attention(piece, args))
                continue
            signature = signature_of(piece)
            if signature not in classes:
                classes[signature] = len(classes)
                representatives.append(piece)
                ops.append(sum(n.op in ("call_function", "call_method") for n in piece.graph.nodes))
            instructions.append(Instruction(classes[signature], -1, args, made))
        elif node.op == "call_function":  # getitem of a piece's outputs
            source, index = node.args
            registers[node] = registers[source][index]  # type: ignore[index]
        else:
            (value,) = node.args
            result = _register(registers, value[0] if isinstance(value, tuple | list) else value)
    program = Program(count, inputs, _with_frees(instructions, len(inputs), result), result, len(classes))
    return Split(program, representatives, list(classes), ops)


def _attention(piece: torch.fx.GraphModule, args: tuple[int, ...]) -> Instruction:
    """The call of one attention operator: its tensors, then the number of its layer."""
    places = {node: args[i] for i, node in enumerate(piece.graph.find_nodes(op="placeholder"))}
    (call,) = [node for node in piece.graph.nodes if node.op == "call_function"]
    *tensors, layer = call.args
    return Instruction(-1, int(layer), tuple(places[t] for t in tensors), (), op=_op_name(call))


def _with_frees(instructions: list[Instruction], kept: int, result: int) -> tuple[Instruction, ...]:
    last: dict[int, int] = {}
    for at, i in enumerate(instructions):
        for register in (*i.inputs, *i.outputs):
            last[register] = at
    frees: list[list[int]] = [[] for _ in instructions]
    for register, at in last.items():
        if register >= kept and register != result:
            frees[at].append(register)
    return tuple(dataclasses.replace(i, frees=tuple(sorted(f))) for i, f in zip(instructions, frees, strict=True))


def _register(registers: dict[torch.fx.Node, Any], node: Any) -> int:
    found = registers[node]
    assert isinstance(found, int), "a tuple crosses between pieces"
    return found


def _output(piece: torch.fx.GraphModule) -> Any:
    (node,) = piece.graph.find_nodes(op="output")
    return node.args[0]


def _returns_tuple(piece: torch.fx.GraphModule) -> bool:
    return isinstance(_output(piece), tuple | list)


def _num_outputs(piece: torch.fx.GraphModule) -> int:
    out = _output(piece)
    return len(out) if isinstance(out, tuple | list) else int(out is not None)


def _op_name(node: torch.fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return schema.name
    return getattr(node.target, "_qualified_op_name", None) or str(node.target)


def signature_of(piece: torch.fx.GraphModule) -> str:
    """A hash that two pieces share exactly when the same code serves both, with other weights.

    Names are blanked; operators, constants, the wiring, and shape, strides and dtype of every value stay.
    """
    numbers: dict[Any, int] = {}
    symbols: dict[str, str] = {}

    def show(value: Any) -> str:
        if isinstance(value, torch.fx.Node):
            return f"%{numbers[value]}"
        if isinstance(value, tuple | list):
            return "(" + ",".join(map(show, value)) + ")"
        if isinstance(value, dict):
            return "{" + ",".join(f"{k}={show(v)}" for k, v in sorted(value.items())) + "}"
        if isinstance(value, slice):
            return f"slice{show((value.start, value.stop, value.step))}"
        return repr(value)

    def size(value: Any) -> str:
        return re.sub(r"[su]\d+", lambda found: symbols.setdefault(found[0], f"s{len(symbols)}"), str(value))

    def shape(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            dims = ",".join(map(size, (*value.shape, "|", *value.stride())))
            return f"{value.dtype}[{dims}]"
        return size(value) if isinstance(value, torch.SymInt) else type(value).__name__

    lines = []
    for node in piece.graph.nodes:
        numbers[node] = len(numbers)
        target = "" if node.op in ("placeholder", "output") else _op_name(node)
        meta = shape(node.meta.get("example_value")) if node.op != "output" else ""
        lines.append(
            f"{node.op} {target} {show(node.args) if node.op != 'placeholder' else ''} {show(node.kwargs)} {meta}"
        )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
