"""Kernels in Triton's interpreter, on CPU tensors. Where there is a GPU, tests/gpu runs the same kernels on it.

`tests/conftest.py` sets TRITON_INTERPRET before anything imports Triton; if something was faster, these tests would
pass or fail for the wrong reason, so they say so instead.
"""

from __future__ import annotations

import pytest

from labkit.launch import interpreting

pytest.importorskip("triton")


@pytest.fixture
def interpreter() -> None:
    """Asked for by every test that launches a kernel."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: tests/gpu runs the kernels there")
    assert interpreting(), "Triton was imported before TRITON_INTERPRET=1 was set: start pytest with it exported"


@pytest.fixture
def launches(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels launched, in order; counted where Triton itself starts them."""
    from triton.runtime.interpreter import InterpretedFunction

    names: list[str] = []
    original = InterpretedFunction.run

    def run(self: InterpretedFunction, *args: object, **kwargs: object) -> object:
        names.append(self.fn.__name__)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", run)
    return names
