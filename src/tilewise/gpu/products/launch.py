"""A kernel launch of which everything is computed in advance except for the addresses of its tensors.

A launch of a few microseconds must not spend more on the host. Grid, sizes and compile-time constants are fixed when
the launch is prepared; Triton's compiled launcher is called directly; TMA descriptors are kept by address, because
weights stay where they are and the allocator returns the same activations again and again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from tilewise.gpu.families.family import Launch

_TENSORS = 7  # leading arguments of the kernel that are addresses: a, b, c, bias, residual, partial sums, counters
_MAX_DESCRIPTORS = 256  # per operand; arbitrary, far above the addresses that a program alternates between


class PreparedLaunch:
    """One compiled kernel with its grid and its arguments but for the addresses."""

    def __init__(self, kernel: Any, launch: Launch, transposed: bool) -> None:
        """Prepare the launch that `ProductFamily.launch` built; LookupError if this Triton works differently."""
        self.transposed = transposed
        launcher = kernel.run
        if getattr(launcher, "global_scratch_size", 0) or getattr(launcher, "profile_scratch_size", 0):
            raise LookupError("the kernel needs scratch memory")
        self._launch = _compiled_launcher(launcher.launch)
        self._grid = launch.grid
        # Triton's launcher takes the function, two launch modes, two scratch buffers, the metadata and three hooks.
        self._settings = (kernel.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None,
                          kernel.packed_metadata, None, None, None)  # fmt: skip
        constants, integers = dict(kernel.binary.constants), iter(launch.arguments[_TENSORS:])
        names = kernel.src.fn.arg_names[_TENSORS:]
        self._sizes_and_constants = tuple(constants[name] if name in constants else next(integers) for name in names)
        descriptors = [argument for argument in launch.arguments[:2] if hasattr(argument, "block_shape")]
        self._descriptors = [
            _DescriptorCache(descriptor, meta)
            for descriptor, meta in zip(descriptors, _descriptor_metadata(kernel, len(descriptors)), strict=True)
        ]

    def __call__(self, left: int, right: int, outputs: Sequence[int], stream: int) -> None:
        """Launch with the addresses of both operands and of c, bias, residual, partial sums and counters."""
        first, second = (right, left) if self.transposed else (left, right)
        if self._descriptors:
            operands = (*self._descriptors[0](first), *self._descriptors[1](second))
        else:
            operands = (first, second)
        self._launch(*self._grid, stream, *self._settings, *operands, *outputs, *self._sizes_and_constants)


class _DescriptorCache:
    """The launcher's arguments for one TMA operand, by the operand's address."""

    def __init__(self, descriptor: Any, metadata: Any) -> None:
        self._fields = {"shape": descriptor.shape, "strides": descriptor.strides,
                        "padding": getattr(descriptor, "padding", "zero")}  # fmt: skip
        self._metadata = metadata
        self._arguments: dict[int, tuple[Any, ...]] = {}

    def __call__(self, address: int) -> tuple[Any, ...]:
        """Return the arguments for an operand at this address, from memory if it was there before."""
        arguments = self._arguments.get(address)
        if arguments is None:
            if len(self._arguments) >= _MAX_DESCRIPTORS:
                self._arguments.clear()
            driver: Any = importlib.import_module("triton.backends.nvidia.driver")
            base = SimpleNamespace(data_ptr=lambda: address)
            arguments = tuple(driver.make_tensordesc_arg(SimpleNamespace(base=base, **self._fields), self._metadata))
            self._arguments[address] = arguments
        return arguments


def _compiled_launcher(launch: Any) -> Callable[..., Any]:
    """Return the compiled function inside of the Python wrapper that builds TMA descriptors at every call."""
    closure = getattr(launch, "__closure__", None)
    if not closure:
        return launch  # type: ignore[no-any-return]
    variables = dict(zip(launch.__code__.co_freevars, closure, strict=True))
    return variables["launcher"].cell_contents  # type: ignore[no-any-return]


def _descriptor_metadata(kernel: Any, count: int) -> list[Any]:
    """Return what the compiler decided about each TMA operand: its swizzling and block."""
    metadata = getattr(kernel.metadata, "tensordesc_meta", None)
    if count and (metadata is None or len(metadata) != count):
        raise LookupError("the compiler kept no metadata of TMA descriptors")
    return list(metadata or ())[:count]
