"""The processes that PyTorch's compiler starts: those that compile ahead, and the one that tries templates first.

Those that compile ahead take PyTorch's own assembler where it brings one (2.11 does), the process that asked them takes
Triton's, and binaries are found by the assembler's version: every template would be compiled a second time, one after
the other, before it is timed. `one_assembler` has both take the same.

The process that tries templates takes some seconds to start. `start_early` has it start while the first templates are
compiled. PyTorch keeps it after a template has broken its hold on the GPU, and every later one would fail in it:
`start_anew` ends it, and PyTorch starts another when it needs one.
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


def start_early() -> None:
    """Start the process that tries templates and have it take hold of the GPU; nobody waits for it here."""
    with contextlib.suppress(AttributeError, OSError):  # PyTorch starts it by itself, only later
        pool = _trying()
        pool.executor.submit(_touch_gpu, pool)


def _touch_gpu(pool: Any) -> None:
    """The process's first errand, while nobody else has one for it."""
    cuda: Any = importlib.import_module("torch.cuda")
    process = pool.process_queue.get()
    try:
        process.put(cuda.synchronize)
        process.get()
    except Exception:  # what is wrong with it shows again when a template is tried
        process.kill()
    finally:
        pool.process_queue.put(process)


def start_anew() -> None:
    """End the processes that try templates."""
    for process in _trying().processes:
        process.kill()


def _trying() -> Any:
    """PyTorch's processes that try templates; started where they were not."""
    tuning: Any = importlib.import_module("torch._inductor.autotune_process")
    return tuning.get_tuning_process_pool()
