"""The launcher: what is compiled anew, what goes the direct way, and that the direct way is what Triton itself does."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import pytest
import torch

import labkit.launch
from labkit.launch import Kernel, Variant, direct_launch, kernel

triton = pytest.importorskip("triton")

VERSION = tuple(int(x) for x in triton.__version__.split(".")[:2])


@kernel(tensors="x_ptr y_ptr", numbers="n scale")
def a_kernel(x_ptr, y_ptr, n, scale, SIZE: tl.constexpr, FLAG: tl.constexpr):  # type: ignore  # noqa: F821
    """Never run: only its signature is looked at."""


class FakeCompiled:
    """Looks like Triton's CompiledKernel; `launched` is what reached the C function."""

    def __init__(self, scratch: int = 0) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.function, self.packed_metadata = 77, (4, 1, 0)
        self.metadata = types.SimpleNamespace(global_scratch_size=scratch, profile_scratch_size=0)
        self.run = types.SimpleNamespace(
            launch=lambda *args: self.launched.append(args), launch_cooperative_grid=False, launch_pdl=False,
            arg_annotations="annotations", kernel_signature="signature",
        )  # fmt: skip


class FakeJit:
    """Stands for `triton.jit`'s function: records ordinary launches."""

    def __init__(self, **kwargs: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.compiled = FakeCompiled(**kwargs)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> FakeCompiled:
            self.calls.append((grid, args, options))
            return self.compiled

        return launch


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A pretended GPU: its number may be changed."""
    number = [0]
    monkeypatch.setattr(labkit.launch, "interpreting", lambda: False)
    monkeypatch.setattr(labkit.launch, "_current_device", lambda: number[0])
    monkeypatch.setattr(labkit.launch, "_current_stream", lambda device: 1000 + device)
    monkeypatch.setattr(triton, "__version__", "3.7.1")
    return number


def make(jit: FakeJit) -> Variant:
    fresh = Kernel(a_kernel.fn, a_kernel.tensors, a_kernel.numbers)
    fresh._jit = jit
    return fresh.variant((torch.float32,), (64, True), 2, 3)


X, Y = torch.zeros(64), torch.ones(64)


def test_the_first_launch_compiles_and_later_ones_are_direct(device: list[int]) -> None:
    jit = FakeJit()
    variant = make(jit)
    variant((4, 1, 1), (X, Y), (10, 0.5))
    assert jit.calls == [((4, 1, 1), (X, Y, 10, 0.5, 64, True), {"num_warps": 2, "num_stages": 3})]
    assert jit.compiled.launched == []
    variant((5, 2, 1), (Y, X), (11, 0.25))
    assert len(jit.calls) == 1
    (args,) = jit.compiled.launched
    assert args[:5] == (5, 2, 1, 1000, 77) and args[-1] == (Y.data_ptr(), X.data_ptr(), 11, 0.25, 64, True)


def test_another_device_gets_its_own_handle(device: list[int]) -> None:
    jit = FakeJit()
    variant = make(jit)
    variant((1, 1, 1), (X, Y), (1, 1.0))
    device[0] = 1
    variant((1, 1, 1), (X, Y), (1, 1.0))
    variant((1, 1, 1), (X, Y), (1, 1.0))
    assert len(jit.calls) == 2 and [a[3] for a in jit.compiled.launched] == [1001]


def test_a_misaligned_pointer_goes_the_ordinary_way(device: list[int]) -> None:
    """The compiled form may rely on multiples of 16 bytes; Triton's own launcher picks another form."""
    jit = FakeJit()
    variant = make(jit)
    variant((1, 1, 1), (X[1:], Y), (1, 1.0))
    variant((1, 1, 1), (X, Y), (1, 1.0))
    variant((1, 1, 1), (X, Y[3:]), (1, 1.0))
    assert len(jit.calls) == 3 and jit.compiled.launched == []
    variant((1, 1, 1), (X, Y), (1, 1.0))
    assert len(jit.calls) == 3 and len(jit.compiled.launched) == 1


@pytest.mark.parametrize("reason", ["version", "scratch", "shape", "asked"])
def test_anything_unknown_stays_on_the_ordinary_way(device: list[int], reason: str, monkeypatch: Any) -> None:
    jit = FakeJit(scratch=128 if reason == "scratch" else 0)
    if reason == "version":
        monkeypatch.setattr(triton, "__version__", "3.12.0")
    elif reason == "shape":
        del jit.compiled.run.launch_pdl
    elif reason == "asked":
        monkeypatch.setenv("LABKIT_TRITON_LAUNCH", "slow")
    variant = make(jit)
    for _ in range(3):
        variant((1, 1, 1), (X, Y), (1, 1.0))
    assert len(jit.calls) == 3 and jit.compiled.launched == []


def test_the_interpreter_stays_on_the_ordinary_way(device: list[int], monkeypatch: Any) -> None:
    monkeypatch.setattr(labkit.launch, "interpreting", lambda: True)
    jit = FakeJit()
    variant = make(jit)
    for _ in range(2):
        variant((1, 1, 1), (X, Y), (1, 1.0))
    assert len(jit.calls) == 2


@pytest.mark.skipif(VERSION not in ((3, 6), (3, 7)), reason=f"the direct way is not taken with Triton {VERSION}")
def test_the_direct_way_calls_c_as_the_installed_triton_does() -> None:
    """Triton's own `CudaLauncher`, its C function replaced by a recorder, gets the same arguments."""
    from triton.backends.nvidia.driver import CudaLauncher

    recorded: list[tuple[Any, ...]] = []
    launcher = CudaLauncher.__new__(CudaLauncher)
    values = {
        "launch": lambda *args: recorded.append(args), "launch_cooperative_grid": False, "launch_pdl": False,
        "global_scratch_size": 0, "global_scratch_align": 1, "profile_scratch_size": 0, "profile_scratch_align": 1,
        "num_ctas": 1, "arg_annotations": "annotations", "kernel_signature": b"signature",
    }  # fmt: skip
    for name, value in values.items():
        setattr(launcher, name, value)
    metadata = types.SimpleNamespace(global_scratch_size=0, profile_scratch_size=0)
    compiled = types.SimpleNamespace(run=launcher, function=77, packed_metadata=(4, 1, 0), metadata=metadata)
    launcher(5, 2, 1, 1000, 77, (4, 1, 0), None, None, None, 16, 32, 7, 0.5, 64, True)
    direct = direct_launch(compiled)
    assert direct is not None
    direct(5, 2, 1, 1000, (16, 32, 7, 0.5, 64, True))
    assert recorded[0] == recorded[1]


def test_a_variant_per_dtype_constants_and_options() -> None:
    fresh = Kernel(a_kernel.fn, a_kernel.tensors, a_kernel.numbers)
    base = fresh.variant((torch.float32,), (64, True), 4, 2)
    assert fresh.variant((torch.float32,), (64, True), 4, 2) is base
    for dtype, constants, warps, stages in (
        (torch.float16, (64, True), 4, 2), (torch.float32, (32, True), 4, 2), (torch.float32, (64, False), 4, 2),
        (torch.float32, (64, True), 8, 2), (torch.float32, (64, True), 4, 3),
    ):  # fmt: skip
        assert fresh.variant((dtype,), constants, warps, stages) is not base
    with pytest.raises(TypeError, match="takes 2 constants, got 1"):
        fresh.variant((torch.float32,), (64,))


def test_parameters_out_of_order_are_refused_where_the_kernel_is_written() -> None:
    with pytest.raises(TypeError, match="tensors, numbers, constants, in this order"):

        @kernel(tensors="x_ptr", numbers="n")
        def wrong(n, x_ptr):  # type: ignore[no-untyped-def]
            pass

    with pytest.raises(TypeError, match="in this order"):

        @kernel(tensors="x_ptr")
        def not_a_constant(x_ptr, SIZE):  # type: ignore[no-untyped-def]
            pass


def test_importing_kernels_imports_no_triton(user_env: dict[str, str]) -> None:
    """Whoever imports Triton first decides whether kernels are interpreted; and on macOS there is none."""
    code = """
import sys
sys.modules["triton"] = None  # any import of it fails
import labkit.launch, labkit.attention.kernels.paged, labkit.attention.kernels.tiles, labkit.attention.triton_attn
import labkit.models.kernels, labkit.paging.cache_write
from labkit.attention.triton_attn import TritonAttentionBackend
del sys.modules["triton"]
print(TritonAttentionBackend.availability().usable, "triton" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], env=user_env, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False"], done.stderr
