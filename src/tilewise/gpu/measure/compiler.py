"""Compile configurations in processes that do not need a GPU.

A worker compiles a Binary into Triton's cache folder and reports its shared memory. The process that owns the GPU later
asks Triton for the same source and finds it in the cache. The target is given as a compute capability, so kernels can
also be compiled on machines without a GPU; the tests do so.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from dataclasses import dataclass
from typing import Any

from tilewise.gpu.families.family import CUBLAS_CALL, Binary

KERNELS = "tilewise.gpu.kernels"


@dataclass(frozen=True)
class CompileResult:
    """The result of one compilation: bytes of shared memory, or why it failed."""

    shared_bytes: int
    seconds: float
    failure: str | None = None


def find_kernel(name: str) -> Any:
    """Import the jitted function "module:function" from tilewise's kernels or a plug-in's."""
    module, function = name.split(":")
    qualified = f"{KERNELS}.{module}"
    is_built_in = "." not in module and importlib.util.find_spec(qualified) is not None
    return getattr(importlib.import_module(qualified if is_built_in else module), function)


def compile_binary(binary: Binary, capability: int) -> Any:
    """Compile a kernel for a compute capability, or read it from Triton's cache; returns a `CompiledKernel`."""
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
    """Make Triton store compiled kernels in `folder`, which all workers and the GPU process share."""
    os.environ["TRITON_CACHE_DIR"] = folder
    os.environ["TRITON_STORE_BINARY_ONLY"] = "1"


def serve(connection: Any, capability: int, cache: str) -> None:
    """Run a compile worker: receive binaries and send CompileResults until the pipe closes."""
    use_cache(cache)
    while True:
        binary, start, shared_bytes, failure = connection.recv(), time.perf_counter(), 0, None
        try:
            if binary.kernel != CUBLAS_CALL:
                shared_bytes = int(compile_binary(binary, capability).metadata.shared)
        except Exception as error:  # Triton raises many types; a failure concerns this configuration alone
            text = " ".join(str(error).split())
            failure = f"does not compile: {type(error).__name__}: {text[:200]}"
        connection.send(CompileResult(shared_bytes, time.perf_counter() - start, failure))
