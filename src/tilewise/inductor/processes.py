"""The processes that PyTorch's compiler starts: those that compile ahead, and the one that tries templates first.

Those that compile ahead take PyTorch's own assembler where it brings one (2.11 does), the process that asked them takes
Triton's, and binaries are found by the assembler's version: every template would be compiled a second time, one after
the other, before it is timed. `one_assembler` has both take the same.

The process that tries templates (`enable(isolated=True)`) is kept by PyTorch after a template has broken its hold on
the GPU, and every later one would fail in it. `start_anew` ends it; PyTorch starts another when it needs one.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from typing import Any

_ASSEMBLER = "TRITON_PTXAS_PATH"


def one_assembler() -> Callable[[], None]:
    """Have this process take the assembler that PyTorch's compiling processes take; gives what undoes it."""
    before = os.environ.get(_ASSEMBLER)
    with contextlib.suppress(ImportError, AttributeError, OSError):
        tasks: Any = importlib.import_module("torch._inductor.runtime.compile_tasks")
        tasks._set_triton_ptxas_path.__wrapped__()  # what those processes call; it remembers having been called
    forget_version()

    def undo() -> None:
        if before is None:
            os.environ.pop(_ASSEMBLER, None)
        forget_version()

    return undo


def forget_version() -> None:
    """Triton asks its assembler for a version once."""
    with contextlib.suppress(ImportError, AttributeError):
        compiler: Any = importlib.import_module("triton.backends.nvidia.compiler")
        compiler.get_ptxas_version.cache_clear()


def start_anew() -> None:
    """End the processes that try templates."""
    tuning: Any = importlib.import_module("torch._inductor.autotune_process")
    for process in tuning.get_tuning_process_pool().processes:
        process.kill()
