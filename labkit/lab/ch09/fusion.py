"""What the compiler makes of a model's pieces: operators, and kernels before and after fusion. Refuses to time them.

Counts do not depend on how fast a machine is; they do depend on the device that code is written for. On a CPU Inductor
writes C++, on a GPU Triton: other kernels, the same idea. `python -m labkit.lab.ch09.fusion MODEL …` records a file.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.errors import LabkitError
from labkit.measure.provenance import Kind, Provenance, collect

FILE = Path(__file__).resolve().parents[2] / "data" / "fusions.json"
#: Kinds of operators, as the chapter's exercise has them.
VIEW, POINTWISE, REDUCTION, MATMUL = "view", "pointwise", "reduction", "matmul"
_MATMULS = ("mm", "addmm", "bmm", "baddbmm")
_REDUCTIONS = ("mean", "sum", "amax", "argmax", "var")


@dataclasses.dataclass(frozen=True)
class PieceKind:
    """One kind of pieces. pieces: how many share its code. ops: (operator, kind) in order, as torch runs them one by
    one. kernels: after fusion, (name, operators in it, whether it is a library's).
    """

    pieces: int
    ops: tuple[tuple[str, str], ...]
    kernels: tuple[tuple[str, tuple[str, ...], bool], ...]

    @property
    def before(self) -> int:
        """Kernels of one piece, operator by operator: everything but views."""
        return sum(kind != VIEW for _, kind in self.ops)

    @property
    def after(self) -> int:
        return len(self.kernels)


@dataclasses.dataclass(frozen=True)
class Fused:
    """A model's pieces, kind by kind, and where the counts are from."""

    model: str
    kinds: tuple[PieceKind, ...]
    provenance: Provenance

    @property
    def pieces(self) -> int:
        return sum(kind.pieces for kind in self.kinds)

    @property
    def before(self) -> int:
        """Kernels of a whole pass, attention left out."""
        return sum(kind.pieces * kind.before for kind in self.kinds)

    @property
    def after(self) -> int:
        return sum(kind.pieces * kind.after for kind in self.kinds)


def kind_of(operator: str, is_view: bool) -> str:
    """Which of the exercise's kinds an operator of torch is."""
    if is_view:
        return VIEW
    return MATMUL if operator in _MATMULS else REDUCTION if operator in _REDUCTIONS else POINTWISE


@functools.cache
def recorded() -> dict[str, Fused]:
    """The counts that ship, by model; they were taken on a CPU."""
    data = json.loads(FILE.read_text())
    made = Provenance.from_dict(data["provenance"])
    return {name: Fused(name, tuple(map(_kind, kinds)), made) for name, kinds in data["models"].items()}


def _kind(data: Mapping[str, Any]) -> PieceKind:
    ops = tuple((name, kind_of(name, view)) for name, view in data["ops"])
    return PieceKind(data["pieces"], ops, tuple((k, tuple(o), lib) for k, o, lib in data["kernels"]))


def compile_pieces(model: str, progress: Any = None) -> tuple[list[dict[str, Any]], Any]:
    """Trace, cut and compile a model here, or read it from the cache: the kinds as plain data, and a `CompileReport`.

    Raises:
        LabkitError: it cannot be traced or compiled here.
    """
    import torch

    from labkit.engine.compiled import compile_model, split_model
    from labkit.engine.plan import resolve_dtype
    from labkit.graphs.xray import piece_xrays
    from labkit.llm import find_device
    from labkit.models.decoder import Decoder
    from labkit.models.shapes import SHAPES

    device, platform = find_device()
    dtype, _ = resolve_dtype("auto", platform)
    decoder = Decoder(SHAPES[model], dtype=getattr(torch, dtype), device=device)
    report = compile_model(decoder, progress=progress).report
    cut = split_model(decoder)
    xrays = piece_xrays(report.classes)
    if len(xrays) != len(cut.representatives):
        raise LabkitError(f"the pieces of {model}", "compiled code and trace differ", "Clear the compile cache.")
    kinds = [
        {
            "pieces": one.pieces, "ops": operators(piece),
            "kernels": [[f.kernel, list(f.ops), f.library] for f in one.fusions],
        } for one, piece in zip(xrays, cut.representatives, strict=True)
    ]  # fmt: skip
    return kinds, report


def operators(piece: Any) -> list[tuple[str, bool]]:
    """The operators of torch that a piece runs, in order, each with whether it is a view and starts no kernel."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from labkit.graphs.compiler import _NO_KERNEL, _concrete

    found: list[tuple[str, bool]] = []

    class Listen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.append((func.overloadpacket.__name__, bool(func.is_view or func in _NO_KERNEL)))
            return func(*args, **(kwargs or {}))

    examples = [_concrete(node.meta["example_value"], 8) for node in piece.graph.find_nodes(op="placeholder")]
    on_meta = [one.to("meta") if isinstance(one, torch.Tensor) else one for one in examples]
    with torch.device("meta"), Listen(), torch.no_grad():
        piece(*on_meta)
    return found


def record(models: Sequence[str], path: Path = FILE) -> None:
    """Compile models here and keep their counts in a file."""
    kinds = {}
    for model in models:
        kinds[model], _ = compile_pieces(model)
    made = collect(Kind.RECORDED, "python -m labkit.lab.ch09.fusion " + " ".join(models), n=1)
    path.write_text(json.dumps({"provenance": made.as_dict(), "models": kinds}, indent=1) + "\n")


if __name__ == "__main__":
    import sys

    record(sys.argv[1:])
