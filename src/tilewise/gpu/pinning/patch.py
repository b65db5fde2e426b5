"""`pin()` and `unpin()`: make Triton's autotuner and PyTorch's compiler choose without a clock.

Triton's `Autotuner` benchmarks the list that its method `prune_configs` returns. While pinned, this method returns one
configuration, and the method that would time it returns at once. This covers every kernel decorated with
`triton.autotune`, those of other libraries included, and costs nothing once a key is known. PyTorch's compiler gets
`inductor.enable(budget=0)`. Neither library is imported here: one that is not loaded yet is patched as soon as it is.

    with tilewise.pin(lock="tilewise.lock"):
        model(x)
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.abc
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from tilewise._environment import abort_import
from tilewise.errors import ConfigurationError
from tilewise.gpu.pinning import begin_pinning, end_pinning, replace_function
from tilewise.gpu.pinning.choose import choose_config
from tilewise.gpu.pinning.lock import LockFile

_AUTOTUNER, _COMPILER = "triton.runtime.autotuner", "torch._inductor.compile_fx"
_VARIABLE, _LOCK_VARIABLE = "TILEWISE_PIN", "TILEWISE_LOCK"
_active: list[Pinned] = []


class Pinned:
    """The result of `pin()`: its lock file, and a context manager that ends it."""

    def __init__(self, lock: LockFile | None) -> None:
        self.lock = lock
        self.changes = contextlib.ExitStack()  # closing it undoes every change, the last one first

    @property
    def active(self) -> bool:
        return self in _active

    def __enter__(self) -> Pinned:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.undo()

    def undo(self) -> None:
        """End this pinning and undo its changes to Triton and the compiler."""
        self.changes.close()
        if self in _active:
            _active.remove(self)


def pin(lock: str | os.PathLike[str] | None = None, *, frozen: bool = False) -> Pinned:
    """Choose every Triton and `torch.compile` configuration of this process without measuring.

    `lock` is a file of choices: those in it are used, new ones are added. With `frozen` the file is never written, and
    a choice that it lacks raises a TilewiseError. Without PyTorch and Triton this does nothing and says so.
    """
    if frozen and lock is None:
        raise ConfigurationError("frozen needs a lock file, as in pin(lock='tilewise.lock', frozen=True).")
    pinned = Pinned(None if lock is None else LockFile(Path(lock), frozen=frozen))
    if importlib.util.find_spec("triton") is None and importlib.util.find_spec("torch") is None:
        warnings.warn("tilewise.pin: neither Triton nor PyTorch is installed; there is nothing to pin.", stacklevel=2)
    begin_pinning(pinned.lock)
    _active.append(pinned)
    pinned.changes.callback(end_pinning, pinned.lock)
    try:
        _after_import(pinned, _AUTOTUNER, _pin_autotuner)
        _after_import(pinned, _COMPILER, _pin_compiler)
    except BaseException:
        pinned.undo()
        raise
    return pinned


def unpin() -> None:
    """End every `pin()` of this process."""
    while _active:
        _active[-1].undo()


def pin_by_environment() -> None:
    """Pin if `TILEWISE_PIN` is 1; `TILEWISE_LOCK` names the lock file. Called when tilewise is imported."""
    value = os.environ.get(_VARIABLE, "")
    if value not in ("", "0", "1"):
        abort_import(ConfigurationError(f"{_VARIABLE} must be 1 or 0, not {value!r}"))
    if value == "1" and not _active:
        pin(os.environ.get(_LOCK_VARIABLE) or None)


# Triton


def _pin_autotuner(pinned: Pinned, module: Any) -> None:
    """Replace the two methods of Triton's Autotuner that lead to benchmarks, for all kernels."""
    autotuner = module.Autotuner

    def prune_configs(original: Any, self: Any, kwargs: dict[str, Any]) -> list[Any]:
        configs: list[Any] = original(self, kwargs)
        return [choose_config(self, configs, kwargs)] if len(configs) > 1 else configs

    def no_bench(original: Any, self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        return [0.0, 0.0, 0.0]

    # Measured choices are ignored while pinned, and pinned choices afterwards.
    _forget_choices(autotuner)
    pinned.changes.callback(_forget_choices, autotuner)
    replace_function(pinned.changes, autotuner, "prune_configs", prune_configs)
    replace_function(pinned.changes, autotuner, "_bench", no_bench)


def _forget_choices(autotuner: Any) -> None:
    """Clear the cached best configuration of every autotuned kernel of the process."""
    for instance in gc.get_objects():
        if issubclass(type(instance), autotuner):  # isinstance would run code of proxy objects
            instance.cache.clear()


# PyTorch's compiler


def _pin_compiler(pinned: Pinned, module: Any) -> None:
    """Enable tilewise in PyTorch's compiler with budget 0; if that fails, the compiler's deterministic mode."""
    inductor: Any = importlib.import_module("tilewise.gpu.inductor")
    if inductor.enable(budget=0).active:
        pinned.changes.callback(inductor.disable)
        return
    settings: Any = importlib.import_module("torch._inductor.config")
    if hasattr(settings, "deterministic"):
        pinned.changes.callback(setattr, settings, "deterministic", settings.deterministic)
        settings.deterministic = True


# Patching modules when they are imported


def _after_import(pinned: Pinned, name: str, patch: Callable[[Pinned, ModuleType], None]) -> None:
    """Call `patch(pinned, module)` now if the module `name` is loaded, else right after its import."""
    if name in sys.modules:
        patch(pinned, sys.modules[name])
        return
    finder = _ImportHook(name, lambda module: patch(pinned, module))
    sys.meta_path.insert(0, finder)
    pinned.changes.callback(finder.remove)


class _ImportHook(importlib.abc.MetaPathFinder):
    """Import hook that calls a function once, right after a module was imported."""

    def __init__(self, name: str, function: Callable[[ModuleType], None]) -> None:
        self.name, self.function = name, function

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Find the module by the other finders, and extend its loader to call the function afterwards."""
        if name != self.name:
            return None
        self.remove()  # the search below must not come back here
        spec = importlib.util.find_spec(name)
        loader = None if spec is None else spec.loader
        if spec is None or loader is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            loader.exec_module = execute  # type: ignore[method-assign]
            self.function(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
