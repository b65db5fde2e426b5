"""Choosing GPU configurations without measuring, the same on every rank, boot and machine of a device.

- `patch.pin` makes every `triton.autotune` of the process and PyTorch's compiler choose without a benchmark.
- `choose.choose_config` chooses for a Triton kernel: from the lock file, else by the model, else the first that fits.
- `lock.LockFile` is the file `tilewise.lock` of all choices; `recompute.py` compares it with today's choices.

Importing this package imports neither PyTorch nor Triton.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise._late import late_names

if TYPE_CHECKING:
    from tilewise.gpu.pinning.lock import LockFile
    from tilewise.gpu.pinning.patch import Pinned, pin, unpin

__all__ = ["Pinned", "pin", "startup_folder", "unpin"]


def startup_folder() -> str:
    """Return the folder whose `sitecustomize.py` pins a Python process that has it in its PYTHONPATH."""
    return str(Path(__file__).parent / "startup")


__getattr__ = late_names(__name__, {".patch": "Pinned pin unpin"})  # a decorated kernel needs none of the patches

# The pinned state. A choice must not depend on time if `pin()` is active, or if the program asked PyTorch for
# deterministic algorithms. Asking costs a dictionary look-up.
_locks: list[LockFile | None] = []  # one entry for each active pin(), the newest last
_changes = [0]  # how often pinning began or ended


def generation() -> int:
    """Return a counter that increases whenever pinning begins or ends; cached choices of older values are stale."""
    return _changes[0]


def begin_pinning(lock: LockFile | None) -> None:
    """Make all choices unmeasured from now on; `lock` is the lock file that stores them, if any."""
    _locks.append(lock)
    _changes[0] += 1


def end_pinning(lock: LockFile | None) -> None:
    """Undo the latest `begin_pinning` with this lock file (None: without one)."""
    for index in reversed(range(len(_locks))):
        if _locks[index] is lock:
            del _locks[index]
            _changes[0] += 1
            return


def is_pinned() -> bool:
    """Tell whether `tilewise.pin()` is active in this process."""
    return bool(_locks)


def active_lock() -> LockFile | None:
    """Return the lock file of the newest `pin()`; None without one."""
    return _locks[-1] if _locks else None


def is_deterministic() -> bool:
    """Tell whether the program asked PyTorch, or its compiler, for deterministic results."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return False
    settings = sys.modules.get("torch._inductor.config")
    return bool(torch.are_deterministic_algorithms_enabled() or getattr(settings, "deterministic", False))


def is_unmeasured() -> bool:
    """Tell whether measuring is off in this process: it is pinned, or deterministic results were requested."""
    return is_pinned() or is_deterministic()


def replace_function(changes: contextlib.ExitStack, owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace the attribute `name` of `owner` by `function` until `changes` is closed.

    `function` receives the original as its first argument. AttributeError if there is no such attribute.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(owner, name, replacement)
    changes.callback(setattr, owner, name, original)
