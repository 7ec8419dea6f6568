"""What is inside a captured graph and a compiled piece: nodes by role, and what Inductor fused. Refuses to know torch.

The nodes are read from the driver while a graph is recorded; the fusion groups from the generated code. Reading nodes
has not run on a GPU yet. On a CPU there are no nodes, and the fusion groups and the code are real.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from labkit.errors import LabkitError
from labkit.graphs.graph_nodes import Node
from labkit.measure.roles import role_of

if TYPE_CHECKING:
    from labkit.llm import LLM

#: A call that starts a kernel, with its name: Triton's, Inductor's C++, then those of libraries.
_CALL = re.compile(
    r"^\s+(?:\w+ = )?(?:(\w+)\.run\(|(cpp_fused\w*)\(|extern_kernels\.(\w+)\(|torch\.ops\.(?!labkit)([\w.]+)\()"
)
_COMMENT = re.compile(r"^\s+# Topologically Sorted Source Nodes: .*Original ATen: \[([^\]]*)\]")
_FUSED = re.compile(r"^(?:triton|cpp)_(?:(?:poi|red|per|for|tem)_)?fused_(\w*?)_?\d*$")
#: Operators whose names hold an underscore, so that a kernel's name can be taken apart again; longest first.
_LONG_NAMES = sorted(
    (
        "split_with_sizes", "_to_copy", "index_put_", "index_put", "index_select", "_unsafe_view", "_unsafe_index",
        "native_layer_norm", "_fused_rms_norm", "_softmax", "_log_softmax", "constant_pad_nd", "slice_scatter",
        "select_scatter", "scalar_tensor", "masked_fill", "logical_and", "logical_not", "bitwise_and", "new_zeros",
        "zeros_like", "ones_like", "full_like", "floor_divide", "true_divide", "flex_attention",
    ),
    key=len, reverse=True,
)  # fmt: skip


class ClassLike(Protocol):
    """What is read of a `labkit.graphs.compiler.ClassReport`."""

    @property
    def index(self) -> int: ...
    @property
    def pieces(self) -> int: ...
    @property
    def ops(self) -> int: ...
    @property
    def kernels_before(self) -> int: ...
    @property
    def kernels_after(self) -> int: ...
    @property
    def code(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Fusion:
    """One kernel call of the generated code. ops: the operators that were fused into it.

    library: a call of a library's kernel (a matrix product), into which Inductor fuses nothing.
    """

    kernel: str
    ops: tuple[str, ...]
    library: bool = False

    @property
    def role(self) -> str:
        """One of `labkit.measure.spans.ROLES`, from the name."""
        return role_of(self.kernel)


@dataclasses.dataclass(frozen=True)
class PieceXray:
    """One class of compiled pieces: how many pieces share it, its kernel calls in order, and its generated code."""

    index: int
    pieces: int
    ops: int
    kernels_before: int
    kernels_after: int
    fusions: tuple[Fusion, ...]
    code: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        out = dataclasses.asdict(self)
        out["fusions"] = [{**dataclasses.asdict(f), "ops": list(f.ops), "role": f.role} for f in self.fusions]
        return out


@dataclasses.dataclass(frozen=True)
class GraphXray:
    """The graphs of one step. graphs: the nodes of each; empty where nobody told, `reason` then says why.

    kernel_nodes: as counted at capture, None where nothing was recorded or nobody counts.
    """

    title: str
    mode: str
    size: int
    graphs: tuple[tuple[Node, ...], ...] = ()
    kernel_nodes: int | None = None
    pieces: tuple[PieceXray, ...] = ()
    reason: str = ""

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes of all graphs, in the order of recording."""
        return tuple(node for graph in self.graphs for node in graph)

    def by_role(self) -> dict[str, int]:
        """Nodes by role, most first: kernels by their names, copies and fills as "copy", "unnamed" without a name."""
        found = collections.Counter(node_role(node) for node in self.nodes)
        return dict(found.most_common())

    def by_name(self) -> dict[str, int]:
        """Kernels by name, most first; those without a name are left out."""
        return dict(collections.Counter(node.name for node in self.nodes if node.name).most_common())

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "title": self.title, "mode": self.mode, "size": self.size, "reason": self.reason,
            "graphs": [[[node.kind, node.name] for node in graph] for graph in self.graphs],
            "kernel_nodes": self.kernel_nodes, "by_role": self.by_role(),
            "pieces": [piece.as_dict() for piece in self.pieces],
        }  # fmt: skip


def node_role(node: Node) -> str:
    """The role of a node: of a kernel by its name ("unnamed" without one), "copy" of copies and fills, else "other"."""
    if node.kind == "kernel":
        return role_of(node.name) if node.name else "unnamed"
    return "copy" if node.kind in ("copy", "fill") else "other"


def fusions(code: str) -> tuple[Fusion, ...]:
    """The kernel calls of a generated module, in order, each with the operators that were fused into it.

    On a GPU Inductor writes the operators above each call. On a CPU they are in the kernel's name, in alphabetical
    order and each once. A library's call stands for itself: what is written above it includes what made its inputs.
    """
    out: list[Fusion] = []
    written: tuple[str, ...] = ()
    for line in code[max(0, code.rfind("def call(")) :].splitlines():
        comment = _COMMENT.match(line)
        if comment:
            names = (name.strip().removeprefix("aten.") for name in comment[1].split(","))
            written = tuple(name for name in names if name)
            continue
        call = _CALL.match(line)
        if call:
            triton, cpp, extern, op = call.groups()
            kernel, library = triton or cpp or extern or op, not (triton or cpp)
            ops = (kernel.removeprefix("aten.").split(".")[0],) if library else written or ops_of(kernel)
            out.append(Fusion(kernel, ops, library))
            written = ()
        elif line.startswith("def ") and out:
            break
    return tuple(out)


def ops_of(kernel: str) -> tuple[str, ...]:
    """The operators in the name of a fused kernel: `cpp_fused_add_mean_mul_0` gives add, mean, mul."""
    found = _FUSED.match(kernel)
    rest, out = found[1] if found else "", []
    while rest:
        long = next((name for name in _LONG_NAMES if rest == name or rest.startswith(f"{name}_")), None)
        name = long or rest.split("_", 1)[0]
        if name:
            out.append(name)
        rest = rest[len(name) :].removeprefix("_") if not rest[len(name) :].startswith("__") else rest[len(name) + 1 :]
    return tuple(out)


def piece_xrays(classes: Iterable[ClassLike]) -> tuple[PieceXray, ...]:
    """An X-ray of each class of a `CompileReport`."""
    return tuple(
        PieceXray(c.index, c.pieces, c.ops, c.kernels_before, c.kernels_after, fusions(c.code), c.code) for c in classes
    )


def xray(llm: LLM, size: int | None = None, mode: str = "FULL") -> GraphXray:
    """Capture the engine's graphs anew with their nodes kept, and look into the one of a mode and size.

    On a CPU, where graphs are emulated, there are no nodes: `reason` says so, and the pieces are there if the model is
    compiled by VLLM_COMPILE. Live requests are aborted.

    Args:
        size: in tokens; None takes the smallest.
        mode: "FULL" or "PIECEWISE".

    Raises:
        LabkitError: the engine has no graph of that mode and size.
    """
    runner, report = llm.engine.runner, llm.compile_report
    pieces = piece_xrays(report.classes) if report else ()
    sizes = sorted(r.size for r in llm.capture_records if r.mode == mode)
    if not sizes or (size is not None and size not in sizes):
        raise LabkitError(
            f"an X-ray of mode {mode}, size {size or 'any'}",
            f"the engine has no such graph (sizes of that mode: {', '.join(map(str, sizes)) or 'none'})",
            "Choose a cudagraph_mode that has it, and one of its capture sizes.",
        )
    size = sizes[0] if size is None else size
    title = f"{llm.model_config.name}, {mode} graph of {size}"
    if llm.emulated_graphs:
        return GraphXray(title, mode, size, (), None, pieces, "graphs are emulated on a CPU: nothing is recorded")
    llm.reset()
    runner.drop_graphs()
    runner.capturer.keep_nodes = True
    try:
        runner.capture_missing()
    finally:
        runner.capturer.keep_nodes = False
    found = next(g for g in runner.graphs() if (g.record.mode, g.record.size) == (mode, size))
    reason = "" if found.nodes else "the driver does not list the nodes of a recording"
    return GraphXray(title, mode, size, found.nodes, found.record.kernel_nodes, pieces, reason)
