"""The process's pinned state, which the Triton drop-in, PyTorch's compiler and the GPU products ask for.

A choice must not depend on time if `tilewise.pin()` is active, or if the program asked PyTorch for deterministic
algorithms. Asking costs a dictionary look-up and imports nothing.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewise.gpu.pinning.lock import LockFile

_locks: list[LockFile | None] = []  # one entry for each active pin(), the newest last
_changes = [0]  # how often pinning began or ended


def generation() -> int:
    """Return a number that changes whenever pinning begins or ends; records of choices are made per generation."""
    return _changes[0]


def push(lock: LockFile | None) -> None:
    """Begin pinning, with the lock file of its choices if there is one."""
    _locks.append(lock)
    _changes[0] += 1


def pop(lock: LockFile | None) -> None:
    """End the newest pinning that uses this lock file."""
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
    """Tell whether no choice of this process may be measured."""
    return is_pinned() or is_deterministic()


def replace_function(changes: contextlib.ExitStack, owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace a function of another library until `changes` is closed, if its version has one of that name.

    The new one receives the original as its first argument.
    """
    original = getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(owner, name, replacement)
    changes.callback(setattr, owner, name, original)
