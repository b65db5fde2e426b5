"""Compiling configurations for a GPU, in processes that need none.

A worker turns a Binary into a cubin in Triton's own cache folder and reports what it needs; the process that owns the
GPU later asks Triton for the same source and finds it there. Kernels are compiled for a target given by number, so
this also runs on machines without a GPU, which is how the tests compile every configuration.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from dataclasses import dataclass
from typing import Any

from tilewise.gpu.families.family import LIBRARY_CALL, Binary

KERNELS = "tilewise.gpu.kernels"


@dataclass(frozen=True)
class Compiled:
    """What is known of a binary after compiling: bytes of shared memory, and why it failed if it did."""

    shared_bytes: int
    seconds: float
    failure: str | None = None


def find_kernel(name: str) -> Any:
    """The jitted function behind "module:function"; the module is one of tilewise's kernels, or a plug-in's own."""
    module, function = name.split(":")
    own = f"{KERNELS}.{module}"
    built_in = "." not in module and importlib.util.find_spec(own) is not None
    return getattr(importlib.import_module(own if built_in else module), function)


def compile_binary(binary: Binary, capability: int) -> Any:
    """Triton's CompiledKernel, from its cache where it is there. Pointers are declared aligned; sizes never are."""
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = find_kernel(binary.kernel)
    types = dict(binary.signature)
    constants = dict(binary.constants)
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": binary.num_warps, "num_stages": binary.num_stages}
    return triton_compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def use_cache(folder: str) -> None:
    """Have this process keep cubins, and only those, in `folder`; the compilers and the GPU's process must agree."""
    os.environ["TRITON_CACHE_DIR"] = folder
    os.environ["TRITON_STORE_BINARY_ONLY"] = "1"


def serve(connection: Any, capability: int, cache: str) -> None:
    """A worker's life: binaries in, Compiled out, until the pipe closes."""
    use_cache(cache)
    while True:
        binary = connection.recv()
        connection.send(_try_to_compile(binary, capability))


def _try_to_compile(binary: Binary, capability: int) -> Compiled:
    start = time.perf_counter()
    if binary.kernel == LIBRARY_CALL:
        return Compiled(0, 0.0)
    try:
        kernel = compile_binary(binary, capability)
    except (
        Exception
    ) as error:  # Triton raises many kinds; each is this configuration's verdict, not the collector's end
        text = " ".join(str(error).split())
        return Compiled(0, time.perf_counter() - start, f"does not compile: {type(error).__name__}: {text[:200]}")
    return Compiled(int(kernel.metadata.shared), time.perf_counter() - start)
