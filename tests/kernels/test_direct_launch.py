"""The arguments of a direct launch, written out for each known version of Triton, whichever is installed."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from labkit.launch import direct_launch

GRID, STREAM, ARGUMENTS = (5, 2, 1), 1000, (16, 32, 7, 0.5, 64, True)
FUNCTION, PACKED = 77, (4, 1, 0)
# The two scratch pointers, the hooks and their metadata are absent: None.
EXPECTED = {
    "3.6.0": (*GRID, STREAM, FUNCTION, False, False, None, None, PACKED, None, None, None, *ARGUMENTS),
    "3.7.1": (
        *GRID, STREAM, FUNCTION, False, False, PACKED, None, None, None, None, None, "annotations", "signature",
        ARGUMENTS,
    ),
}  # fmt: skip


def compiled(launch: Any, *, global_scratch: int = 0, profile_scratch: int = 0) -> types.SimpleNamespace:
    run = types.SimpleNamespace(
        launch=launch, launch_cooperative_grid=False, launch_pdl=False,
        arg_annotations="annotations", kernel_signature="signature",
    )  # fmt: skip
    metadata = types.SimpleNamespace(global_scratch_size=global_scratch, profile_scratch_size=profile_scratch)
    return types.SimpleNamespace(run=run, function=FUNCTION, packed_metadata=PACKED, metadata=metadata)


@pytest.fixture
def triton_is(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends that a version of Triton has been imported."""
    return lambda version: monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__=version))


@pytest.mark.parametrize("version", EXPECTED)
def test_a_known_version_gets_its_own_order(triton_is: Any, version: str) -> None:
    triton_is(version)
    calls: list[tuple[Any, ...]] = []
    direct = direct_launch(compiled(lambda *args: calls.append(args)))
    assert direct is not None
    direct(*GRID, STREAM, ARGUMENTS)
    assert calls == [EXPECTED[version]]


@pytest.mark.parametrize("version", ["3.5.1", "3.8.0", "4.0.0", "3.10.0+git1"])
def test_an_unknown_version_is_not_guessed(triton_is: Any, version: str) -> None:
    triton_is(version)
    assert direct_launch(compiled(print)) is None


@pytest.mark.parametrize("version", EXPECTED)
def test_what_a_direct_launch_cannot_give_is_left_to_triton(triton_is: Any, version: str) -> None:
    triton_is(version)
    assert direct_launch(compiled(print, global_scratch=128)) is None
    assert direct_launch(compiled(print, profile_scratch=64)) is None
    assert direct_launch(compiled(None)) is None
    assert direct_launch(None) is None, "the interpreter returns nothing"
    for missing in ("launch", "launch_pdl", "launch_cooperative_grid"):
        odd = compiled(print)
        delattr(odd.run, missing)
        assert direct_launch(odd) is None


def test_the_function_must_be_loaded(triton_is: Any) -> None:
    triton_is("3.7.1")
    odd = compiled(print)
    odd.function = None
    assert direct_launch(odd) is None
