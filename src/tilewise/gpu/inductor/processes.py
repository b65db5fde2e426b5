"""The processes that PyTorch's compiler starts: workers that compile in advance, and one that tests templates.

The compile workers use the PTX assembler that PyTorch 2.11 brings, while the main process uses Triton's. Triton's cache
key contains the assembler's version, so every template would be compiled a second time before it is timed.
`share_assembler` makes both use the same one.

The process that tests templates takes some seconds to start; `start_test_process` starts it while the first templates
are compiled. PyTorch keeps this process after a template has corrupted its CUDA context, and every later template
would fail in it; `restart_test_process` ends it, and PyTorch starts another when it needs one.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from typing import Any

_ASSEMBLER_VARIABLE = "TRITON_PTXAS_PATH"


def share_assembler() -> Callable[[], None]:
    """Use the assembler of PyTorch's compile workers in this process; return the function that undoes it."""
    before = os.environ.get(_ASSEMBLER_VARIABLE)
    with contextlib.suppress(ImportError, AttributeError, OSError):
        tasks: Any = importlib.import_module("torch._inductor.runtime.compile_tasks")
        tasks._set_triton_ptxas_path.__wrapped__()  # the workers call the cached wrapper, which runs only once
    forget_assembler_version()

    def restore_assembler() -> None:
        if before is None:
            os.environ.pop(_ASSEMBLER_VARIABLE, None)
        forget_assembler_version()

    return restore_assembler


def forget_assembler_version() -> None:
    """Clear Triton's cached assembler version, which it otherwise reads once."""
    with contextlib.suppress(ImportError, AttributeError):
        compiler: Any = importlib.import_module("triton.backends.nvidia.compiler")
        compiler.get_ptxas_version.cache_clear()


def start_test_process() -> None:
    """Start the process that tests templates and create its CUDA context, without waiting for it."""
    with contextlib.suppress(AttributeError, OSError):  # without the pool PyTorch starts the process itself, later
        pool = _test_pool()
        pool.executor.submit(_initialise_cuda, pool)


def _initialise_cuda(pool: Any) -> None:
    """Give an idle test process its first task: synchronising, which creates its CUDA context."""
    cuda: Any = importlib.import_module("torch.cuda")
    process = pool.process_queue.get()
    try:
        process.put(cuda.synchronize)
        process.get()
    except Exception:  # if something is wrong with it, testing a template fails in the same way
        process.kill()
    finally:
        pool.process_queue.put(process)


def restart_test_process() -> None:
    """End the processes that test templates; PyTorch starts new ones."""
    for process in _test_pool().processes:
        process.kill()


def _test_pool() -> Any:
    """Return PyTorch's pool of processes that test templates; it starts them if they are not running."""
    autotune_process: Any = importlib.import_module("torch._inductor.autotune_process")
    return autotune_process.get_tuning_process_pool()
