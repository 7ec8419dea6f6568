"""Cutting a traced model at attention: how many pieces, which are the same code, and what may not be traced."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from labkit.config import SPLITTING_OPS
from labkit.engine.compiled import split_model
from labkit.errors import CompileError
from labkit.graphs.pieces import Program, split
from labkit.graphs.trace import Trace, trace
from labkit.models.decoder import Decoder
from labkit.models.shapes import SHAPES


def decoder(layers: int, name: str = "tiny-llama") -> Decoder:
    return Decoder(dataclasses.replace(SHAPES[name], num_layers=layers), dtype=torch.float32)


@pytest.mark.parametrize(
    ("layers", "counts"), [(1, [1, 1]), (2, [1, 1, 1]), (4, [1, 3, 1]), (8, [1, 7, 1])], ids=lambda x: str(x)
)
def test_c38_equal_layers_make_three_classes(layers: int, counts: list[int]) -> None:
    """N layers: N + 1 pieces; a single layer has no middle."""
    program = split_model(decoder(layers)).program
    assert len(program.pieces) == layers + 1
    assert [sum(p.cls == c for p in program.pieces) for c in range(program.num_classes)] == counts
    assert [i.layer for i in program.instructions if i.cls < 0] == list(range(layers))


def test_the_default_model_has_31_pieces_of_3_classes() -> None:
    program = split_model(Decoder(SHAPES["smollm2-135m"], dtype=torch.bfloat16)).program
    assert (len(program.pieces), program.num_classes) == (31, 3)


def test_c38_layers_of_different_width_share_nothing() -> None:
    made = decoder(4)
    for index, layer in enumerate(made.layers):
        width = 32 * (index + 1) if index < 3 else 32
        layer.mlp.gate_up, layer.mlp.down = torch.empty(2 * width, 64), torch.empty(64, width)
    program = split_model(made).program
    assert [p.cls for p in program.pieces] == [0, 1, 2, 3, 4], "three widths in the middle, then the last norm"
    same = decoder(4)
    same.layers[2].attention.qkv = same.layers[2].attention.qkv.clone()
    assert split_model(same).program.num_classes == 3, "other weights of the same shape are the same code"


def test_a_constant_makes_another_class() -> None:
    """Stretches that differ in one number only."""
    weight = torch.ones(4)

    def forward(token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = token_ids[:, None] * weight
        for scale in (2.0, 3.0, 2.0, 2.0):
            out = torch.empty_like(x)
            torch.ops.labkit.unified_attention_with_output(x, x, x, out, 0)
            x = out * scale + positions[:, None]
        return x

    found = []
    trace(forward, {"weight": weight}, torch.device("cpu"), 5, lambda t: found.append(split(t)))
    assert [p.cls for p in found[0].program.pieces] == [0, 1, 2, 1, 3], "the last has no attention to allocate for"
    assert len(set(found[0].signatures)) == found[0].program.num_classes


def test_an_empty_list_leaves_one_piece_with_attention_inside() -> None:
    program = split_model(decoder(3), splitting_ops=()).program
    assert (len(program.pieces), program.num_classes, len(program.instructions)) == (1, 1, 1)


def test_every_register_is_written_before_it_is_read_and_freed_after() -> None:
    program = split_model(decoder(3, "tiny-qwen3")).program
    known = set(range(len(program.inputs)))
    for i in program.instructions:
        assert set(i.inputs) <= known
        known |= set(i.outputs)
        assert set(i.frees) <= known - set(range(len(program.inputs)))
        known -= set(i.frees)
    assert known == {*range(len(program.inputs)), program.result}, "nothing else is kept to the end"
    assert Program.from_dict(program.as_dict()) == program
    assert SPLITTING_OPS[0] in str(torch.ops.labkit.unified_attention_with_output.default._schema)


@pytest.mark.parametrize("breaks", ["branch", "break"])
def test_c39_a_pass_that_is_not_one_graph_is_refused_with_the_reason(breaks: str) -> None:
    def forward(token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if breaks == "branch":
            return positions if token_ids.sum() > 0 else token_ids
        torch._dynamo.graph_break()
        return positions

    def never(found: Trace) -> None:
        raise AssertionError("it was traced")

    with pytest.raises(CompileError, match="one graph") as caught:
        trace(forward, {}, torch.device("cpu"), 5, never)
    assert "compilation_mode" in str(caught.value)
