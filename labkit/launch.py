"""Launching Triton kernels with little host time, and importing Triton as late as possible. Refuses to know any kernel.

Two costs are avoided. Importing Triton decides for the whole process whether kernels are compiled or interpreted
(`TRITON_INTERPRET` is read once), so a kernel written under `@kernel` stays a plain function until its first launch.
And `kernel[grid](...)` binds and specialises every argument in Python on each call, tens of microseconds on a slow
CPU; a `Variant` does that once, keeps the compiled object and afterwards only passes pointers.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def interpreting() -> bool:
    """Whether Triton kernels run, or would run, in Triton's interpreter in this process."""
    if "triton" in sys.modules:
        return bool(sys.modules["triton"].knobs.runtime.interpret)
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


class DeviceFunction:
    """A function that kernels of the same module call; becomes a `triton.jit` function with the first of them."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.__doc__, self.__name__ = fn.__doc__, fn.__name__

    def __call__(self, *args: Any) -> Any:
        raise TypeError(f"{self.__name__} runs inside a Triton kernel only")


def bind(fn: Callable[..., Any]) -> None:
    """Give the module of `fn` what its kernels name: `tl`, and device functions under `triton.jit`."""
    triton = importlib.import_module("triton")
    names = fn.__globals__
    names["tl"] = importlib.import_module("triton.language")
    for name, value in list(names.items()):
        if isinstance(value, DeviceFunction):
            names[name] = triton.jit(value.fn)


class Kernel:
    """A Triton kernel whose parameters are tensors, then numbers, then compile-time constants (`tl.constexpr`).

    Numbers are never specialised on their value (no recompile when a batch grows); what a load's width depends on,
    strides above all, is a constant. Pointers are specialised on 16-byte alignment, and `Variant` checks it.
    """

    def __init__(self, fn: Callable[..., Any], tensors: Sequence[str], numbers: Sequence[str]) -> None:
        names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
        self.fn, self.tensors, self.numbers = fn, tuple(tensors), tuple(numbers)
        self.constants = names[len(tensors) + len(numbers) :]
        self.__doc__, self.__name__ = fn.__doc__, fn.__name__
        self._jit: Any = None
        self._variants: dict[tuple[Any, ...], Variant] = {}

    @property
    def jit(self) -> Any:
        """The `triton.jit` function (interpreted where `interpreting()`); imports Triton."""
        if self._jit is None:
            bind(self.fn)
            self._jit = sys.modules["triton"].jit(self.fn, do_not_specialize=list(self.numbers))
        return self._jit

    def variant(
        self, dtypes: tuple[Any, ...], constants: tuple[Any, ...], num_warps: int = 4, num_stages: int = 2
    ) -> Variant:
        """The kernel for these tensor dtypes and constants (in parameter order); compiled at first launch."""
        key = (dtypes, constants, num_warps, num_stages)
        found = self._variants.get(key)
        if found is None:
            if len(constants) != len(self.constants):
                raise TypeError(f"{self.__name__} takes {len(self.constants)} constants, got {len(constants)}")
            found = self._variants[key] = Variant(self, constants, num_warps, num_stages)
        return found


class Variant:
    """One compiled form of a kernel. Calling it launches on the current CUDA stream, also under graph capture."""

    __slots__ = ("_compiled", "_direct", "constants", "kernel", "num_stages", "num_warps")

    def __init__(self, kernel: Kernel, constants: tuple[Any, ...], num_warps: int, num_stages: int) -> None:
        self.kernel, self.constants = kernel, constants
        self.num_warps, self.num_stages = num_warps, num_stages
        self._compiled: dict[int, Callable[..., None]] = {}
        self._direct = not interpreting()

    def __call__(
        self, grid: tuple[int, int, int], tensors: Sequence[torch.Tensor], numbers: tuple[Any, ...] = ()
    ) -> None:
        """Launch. A tensor of length 0 or a grid with a 0 is the caller's business: it should not come here."""
        if self._direct:
            pointers = [t.data_ptr() for t in tensors]
            misaligned = 0
            for p in pointers:
                misaligned |= p
            if not misaligned & 15:
                device = _current_device()
                handle = self._compiled.get(device)
                if handle is not None:
                    handle(*grid, _current_stream(device), (*pointers, *numbers, *self.constants))
                    return
                self._first(device, grid, tensors, numbers)
                return
        self._slow(grid, tensors, numbers)

    def _slow(self, grid: tuple[int, int, int], tensors: Sequence[torch.Tensor], numbers: tuple[Any, ...]) -> Any:
        """Through Triton's own launcher: any alignment, any version, and the interpreter."""
        return self.kernel.jit[grid](
            *tensors, *numbers, *self.constants, num_warps=self.num_warps, num_stages=self.num_stages
        )

    def _first(
        self, device: int, grid: tuple[int, int, int], tensors: Sequence[torch.Tensor], numbers: tuple[Any, ...]
    ) -> None:
        """Compile by an ordinary launch and keep the handle, if it has the shape known from Triton 3.6 and 3.7."""
        handle = direct_launch(self._slow(grid, tensors, numbers))
        if handle is None or os.environ.get("LABKIT_TRITON_LAUNCH") == "slow":
            self._direct = False
        else:
            self._compiled[device] = handle


def direct_launch(compiled: Any) -> Callable[..., None] | None:
    """A function (grid_x, grid_y, grid_z, stream, all parameters in order, constants included) that launches, or None.

    It is the C function behind `CudaLauncher.__call__` of Triton 3.6 and 3.7, whose Python part only looks for scratch
    memory; a pointer may be an int there. Kernels that need scratch memory from Triton, clusters of blocks, and other
    versions keep the ordinary path. Triton's launch hooks (its own profiler, Proton) are not called on the direct
    path; CUDA's profilers see every launch.
    """
    try:
        run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
        launch, cooperative, dependent = run.launch, run.launch_cooperative_grid, run.launch_pdl
        scratch = compiled.metadata.global_scratch_size or getattr(compiled.metadata, "profile_scratch_size", 0)
        version = tuple(int(x) for x in sys.modules["triton"].__version__.split(".")[:2])
        if not callable(launch) or function is None or scratch:
            return None
        if version == (3, 6):

            def launch_3_6(x: int, y: int, z: int, stream: int, arguments: tuple[Any, ...]) -> None:
                launch(
                    x, y, z, stream, function, cooperative, dependent, None, None, packed, None, None, None, *arguments
                )

            return launch_3_6
        if version == (3, 7):
            annotations, signature = run.arg_annotations, run.kernel_signature

            def launch_3_7(x: int, y: int, z: int, stream: int, arguments: tuple[Any, ...]) -> None:
                launch(
                    x, y, z, stream, function, cooperative, dependent, packed, None, None, None, None, None,
                    annotations, signature, arguments,
                )  # fmt: skip

            return launch_3_7
    except AttributeError:
        pass
    return None


def _current_device() -> int:
    return sys.modules["torch"]._C._cuda_getDevice()


def _current_stream(device: int) -> int:
    return sys.modules["torch"]._C._cuda_getCurrentRawStream(device)


def kernel(tensors: str, numbers: str = "") -> Callable[[Callable[..., Any]], Kernel]:
    """Decorator: names of the tensor and number parameters, in order; the rest must be `tl.constexpr`."""

    def wrap(fn: Callable[..., Any]) -> Kernel:
        names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
        given = (*tensors.split(), *numbers.split())
        rest = names[len(given) :]
        if names[: len(given)] != given or any(fn.__annotations__.get(n) != "tl.constexpr" for n in rest):
            raise TypeError(f"{fn.__name__}: parameters must be tensors, numbers, constants, in this order")
        return Kernel(fn, tensors.split(), numbers.split())

    return wrap


def next_power_of_2(n: int) -> int:
    """The smallest power of two ≥ n (n ≥ 1)."""
    return 1 << (n - 1).bit_length()
