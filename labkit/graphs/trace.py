"""From a forward pass to one FX graph with a dynamic number of tokens. Refuses to know the model it traces.

torch.compile's front end (Dynamo) reads the Python of the pass once, in one graph or not at all. The guards it would
check before every call are not used afterwards: the pass is called with the same weights always, and only the number
of tokens changes, so the graph is taken from it and run by labkit itself.
"""

from __future__ import annotations

import dataclasses
import os
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from labkit.errors import CompileError

#: Inputs of a trace that are no weight.
TOKEN_IDS, POSITIONS, NUM_TOKENS = "token_ids", "positions", "num_tokens"

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_FRAME = re.compile(r'File "(.*)", line (\d+), in .*\n(.*)')


@dataclasses.dataclass
class Trace:
    """One graph of the whole pass. `inputs` names its placeholders in order: a weight, or one of the three above."""

    module: torch.fx.GraphModule
    inputs: tuple[str, ...]


def trace(
    forward: Forward,
    weights: Mapping[str, torch.Tensor],
    device: torch.device,
    num_tokens: int,
    inside: Callable[[Trace], None],
) -> None:
    """Trace `forward(token_ids, positions)` and hand the result to `inside`, which may compile parts of it.

    Args:
        weights: every tensor that the pass reads beside its arguments, by name.
        num_tokens: tokens of the example, at least 2: a dimension of 0 or 1 would be taken as a constant.
        inside: called within the compiler's context, where symbolic shapes have their meaning.

    Raises:
        CompileError: the pass cannot be read as one graph (a graph break), with Dynamo's reason.
    """
    if num_tokens < 2:
        raise ValueError("a trace needs at least 2 tokens")
    token_ids = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    positions = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    for tensor in (token_ids, positions):
        torch._dynamo.mark_dynamic(tensor, 0)
    names = {id(tensor): name for name, tensor in weights.items()}
    names |= {id(token_ids): TOKEN_IDS, id(positions): POSITIONS}
    failed: list[BaseException] = []
    consumer = [inside]  # emptied at the end: Dynamo keeps every backend it was given, and with it what that holds

    def backend(module: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        inputs = []
        for example in example_inputs:
            if isinstance(example, torch.SymInt | int):
                inputs.append(NUM_TOKENS)
            else:
                inputs.append(names[id(example)])
        try:
            consumer[0](Trace(module, tuple(inputs)))
        except BaseException as error:  # Dynamo would wrap it beyond recognition
            failed.append(error)
        return lambda *args: (torch.empty(0),)  # what was traced is not run here

    def whole(token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return forward(token_ids, positions)

    # A code object of its own each time: Dynamo keeps what it traced, and a limit of it, per code object.
    fresh = types.FunctionType(whole.__code__.replace(), whole.__globals__, "whole", None, whole.__closure__)
    compiled = torch.compile(fresh, backend=backend, fullgraph=True)
    try:
        # Weights of another model were other sizes: Dynamo would take that for a hint that sizes of weights vary.
        static = torch._dynamo.config.patch(automatic_dynamic_shapes=False)
        with torch.inference_mode(False), torch.no_grad(), static:
            compiled(token_ids, positions)
    except Exception as error:
        if not failed:
            raise CompileError(
                "one graph of the whole forward pass",
                f"the compiler stopped: {first_line(error)}{user_line(error)}",
                "Set compilation_mode to NONE to run without it.",
            ) from error
    finally:
        consumer.clear()
    if failed:
        raise failed.pop()


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its name where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".: ")


def user_line(error: BaseException) -> str:
    """The line that an error of torch.compile points to, as ", at file.py:12: code"; "" where it points nowhere."""
    _, found, stack = str(error).rpartition("from user code:")
    frames = _FRAME.findall(stack) if found else []
    if not frames:
        return ""
    path, line, code = frames[-1]
    return f", at {os.path.basename(path)}:{line}: {code.strip()}"
