"""Compiling the classes of a split pass with Inductor, and running the whole as a list of calls. Refuses to trace.

`CompiledForward` replaces the model's own forward: eagerly, inside a FULL capture, or cut at attention for PIECEWISE.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from labkit.attention import op
from labkit.errors import CompileError
from labkit.graphs.pieces import Program, Split
from labkit.graphs.trace import NUM_TOKENS, POSITIONS, TOKEN_IDS

#: Calls in generated code that start a kernel: Triton's, Inductor's C++, and library kernels.
_LAUNCHES = re.compile(
    r"^\s+(?:\w+ = )?(?:\w+\.run\(|cpp_fused\w*\(|extern_kernels\.\w+\(|torch\.ops\.(?!labkit)[\w.]+\()", re.M
)
#: What runs in the place of an operator that the pass is cut at: `(layer, *tensors)`.
_RUNS: dict[str, Callable[..., None]] = {
    "labkit::unified_attention_with_output": op.attention,
    "labkit::unified_mla_attention_with_output": op.latent_attention,
}


@dataclasses.dataclass(frozen=True)
class ClassReport:
    """One class of pieces: how many pieces share it, and what fusion did.

    ops: operators in the traced code. kernels_before: kernels that running them one by one would launch.
    kernels_after: kernels that the generated code launches; `code` is that code. ms: compile time.
    """

    index: int
    pieces: int
    ops: int
    kernels_before: int
    kernels_after: int
    code: str
    ms: float


@dataclasses.dataclass
class CompiledClass:
    """The code of one class of pieces: `dynamic` for any number of tokens, `exact[n]` for exactly n."""

    dynamic: Any
    exact: dict[int, Any] = dataclasses.field(default_factory=dict)


def compile_class(
    piece: torch.fx.GraphModule, num_tokens: int | None = None, max_autotune: bool = False
) -> tuple[Any, str]:
    """Compile one piece with Inductor; returns the artifact and its generated code.

    Runs inside `trace`'s callback, where symbolic sizes have their meaning.

    Args:
        num_tokens: compile for exactly this many tokens; None for any number.
        max_autotune: let Inductor time several kernels for every matrix product (on a GPU).
    """
    placeholders = piece.graph.find_nodes(op="placeholder")
    examples: list[Any] = [node.meta["example_value"] for node in placeholders]
    shapes = "from_tracing_context"
    if num_tokens is not None:
        examples, shapes = [_concrete(e, num_tokens) for e in examples], "from_example_inputs"
    options: dict[str, Any] = {"config_patches": {"max_autotune": True}} if max_autotune else {}
    with _generated_code() as code:
        try:
            artifact = torch._inductor.standalone_compile(
                piece,
                examples,
                dynamic_shapes=shapes,
                options=options,  # type: ignore[arg-type]
            )
        except Exception as error:
            raise CompileError(
                "a piece of the model",
                f"Inductor failed: {(str(error).strip().splitlines() or [type(error).__name__])[0]}",
                "Set compilation_mode to NONE to run without it.",
            ) from error
    return artifact, "\n".join(code)


def _concrete(example: Any, num_tokens: int) -> Any:
    """The example with its one symbol, the number of tokens, replaced by a number; strides too."""

    def number(n: Any) -> int:
        if not isinstance(n, torch.SymInt):
            return int(n)
        return int(n.node.expr.subs({symbol: num_tokens for symbol in n.node.expr.free_symbols}))

    if not isinstance(example, torch.Tensor):
        return number(example)
    shape, strides = [number(n) for n in example.shape], [number(n) for n in example.stride()]
    return torch.empty_strided(shape, strides, dtype=example.dtype, device=example.device)


@contextmanager
def _generated_code() -> Iterator[list[str]]:
    """Collect the source that Inductor writes, also where its own cache had it."""
    from torch._inductor.graph import GraphLowering

    code: list[str] = []
    original = GraphLowering.save_output_code
    GraphLowering.save_output_code = staticmethod(code.append)  # type: ignore[method-assign,assignment]
    try:
        yield code
    finally:
        GraphLowering.save_output_code = staticmethod(original)  # type: ignore[method-assign,assignment]


def count_kernels(code: str) -> int:
    """Kernels that a generated module launches per call."""
    body = code[code.rfind("def call(") :]
    return len(_LAUNCHES.findall(body))


def count_eager_kernels(piece: torch.fx.GraphModule) -> int:
    """Kernels that running a piece operator by operator launches: everything but views and empty allocations."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        kernels = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            views = func.is_view or func in _NO_KERNEL
            self.kernels += not views
            return func(*args, **(kwargs or {}))

    examples = [_concrete(n.meta["example_value"], 8) for n in piece.graph.find_nodes(op="placeholder")]
    on_meta = [e.to("meta") if isinstance(e, torch.Tensor) else e for e in examples]
    with torch.device("meta"), Count() as counted, torch.no_grad():
        piece(*on_meta)
    return counted.kernels


_NO_KERNEL = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten._unsafe_view.default,
}


class CompiledForward:
    """A forward pass as compiled pieces and attention calls; called like the model: `(token_ids, positions)`.

    Args:
        program: the calls.
        classes: compiled code, by class.
        weights: every tensor named in `program.inputs`.
    """

    def __init__(self, program: Program, classes: Sequence[CompiledClass], weights: Mapping[str, torch.Tensor]) -> None:
        self.program, self.classes = program, list(classes)
        self._template: list[Any] = [weights.get(name) for name in program.inputs]
        self._template += [None] * (program.registers - len(self._template))
        places = {name: [i for i, n in enumerate(program.inputs) if n == name] for name in
                  (NUM_TOKENS, TOKEN_IDS, POSITIONS)}  # fmt: skip
        self._num_tokens, self._token_ids, self._positions = places.values()

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states after the final norm, `[num_tokens, hidden_size]`, inside a forward context."""
        num_tokens = token_ids.shape[0]
        registers = self._template.copy()
        for places, value in (
            (self._num_tokens, num_tokens), (self._token_ids, token_ids), (self._positions, positions),
        ):  # fmt: skip
            for i in places:
                registers[i] = value
        code = [c.exact.get(num_tokens, c.dynamic) for c in self.classes]
        for cls, layer, inputs, outputs, frees, name in self._calls:
            if cls < 0:
                _RUNS[name](layer, *[registers[i] for i in inputs])
            else:
                made = code[cls](*[registers[i] for i in inputs])
                # A piece with one result may return it bare, and indexing that would take its first row.
                if not isinstance(made, tuple | list):
                    made = (made,)
                for i, tensor in zip(outputs, made, strict=True):
                    registers[i] = tensor
            for i in frees:
                registers[i] = None
        return registers[self.program.result]

    @property
    def _calls(self) -> list[tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...], str]]:
        return [(i.cls, i.layer, i.inputs, i.outputs, i.frees, i.op) for i in self.program.instructions]


def compile_split(
    found: Split,
    compile_sizes: Sequence[int] = (),
    progress: Callable[[str, int, int, str], None] | None = None,
    autotune: bool = False,
) -> tuple[list[CompiledClass], list[ClassReport]]:
    """Compile every class once, for any number of tokens and for each of `compile_sizes`."""
    classes, reports = [], []
    total = len(found.representatives)
    for index, piece in enumerate(found.representatives):
        if progress:
            progress("compiling", index, total, f"class {index + 1} of {total}")
        begin = time.perf_counter()
        artifact, code = compile_class(piece)
        made = CompiledClass(artifact)
        for size in compile_sizes:
            made.exact[size], _ = compile_class(piece, size, autotune)
        pieces = sum(i.cls == index for i in found.program.instructions)
        ms = (time.perf_counter() - begin) * 1e3
        reports.append(
            ClassReport(index, pieces, found.ops[index], count_eager_kernels(piece), count_kernels(code), code, ms)
        )
        classes.append(made)
    if progress:
        progress("compiling", total, total, "done")
    return classes, reports
