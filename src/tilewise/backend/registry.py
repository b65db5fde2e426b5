"""The table of implementations per operation, and the rule that picks one.

Each operation ("matmul", "conv2d", ...) has an ordered list of implementations. Each says whether it suits the arguments
at hand: None, or one sentence why not. `dispatch` runs the first that suits; `explain` says which that would be and why.
Adding a backend is one `register` call; nothing else in the framework changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tilewise.errors import ConfigurationError

Suits = Callable[..., str | None]


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation. `suits` returns None when it should be used, else the reason against it."""

    op: str
    name: str
    run: Callable[..., Any]
    suits: Suits


@dataclass(frozen=True)
class Explanation:
    """What `dispatch` would run for these arguments, why, and what was passed over."""

    op: str
    chosen: str
    reason: str
    passed_over: dict[str, str]
    tile: Any = None

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.chosen}, because {self.reason}"]
        lines += [f"  not {name}: {why}" for name, why in self.passed_over.items()]
        return "\n".join(lines + ([f"  tile: {self.tile}"] if self.tile is not None else []))


def _always(*_args: Any, **_kwargs: Any) -> str | None:
    return None


class OptimizedBackend:
    """Routes operations to implementations by shape, dtype, contiguity and machine.

    >>> import numpy as np
    >>> backend = OptimizedBackend()
    >>> backend.dispatch("matmul", np.eye(2, dtype=np.float32), np.ones((2, 3), np.float32)).shape
    (2, 3)
    """

    def __init__(self, only: str | None = None) -> None:
        self._implementations: dict[str, list[Implementation]] = {}
        self.only = only
        # NumPy's are asked last, whatever the order in which the modules were imported.
        for implementation in sorted(_DEFAULTS, key=lambda implementation: implementation.name == "numpy"):
            self.add(implementation)

    def register(self, op: str, name: str, run: Callable[..., Any], suits: Suits | None = None) -> None:
        """Add an implementation, ahead of those already there."""
        self.add(Implementation(op, name, run, suits or _always), first=True)

    def add(self, implementation: Implementation, first: bool = False) -> None:
        if self.only is not None and implementation.name != self.only:
            return
        entries = self._implementations.setdefault(implementation.op, [])
        entries[:] = [e for e in entries if e.name != implementation.name]
        entries.insert(0 if first else len(entries), implementation)

    def implementations(self, op: str) -> list[Implementation]:
        """The implementations of `op`, in the order they are asked."""
        try:
            return self._implementations[op]
        except KeyError:
            known = ", ".join(sorted(self._implementations))
            raise ConfigurationError(f"no backend implements {op!r}; the operations are {known}") from None

    def select(self, op: str, *args: Any, **kwargs: Any) -> Implementation:
        entries = self._implementations.get(op) or self.implementations(op)
        for entry in entries:
            if entry.suits(*args, **kwargs) is None:
                return entry
        return entries[-1]

    def dispatch(self, op: str, *args: Any, **kwargs: Any) -> Any:
        """Run `op` with the implementation that suits these arguments best."""
        return self.select(op, *args, **kwargs).run(*args, **kwargs)

    def explain(self, op: str, *args: Any, **kwargs: Any) -> Explanation:
        """Say what `dispatch` would run for these arguments, and why."""
        chosen = self.select(op, *args, **kwargs)
        passed_over: dict[str, str] = {}
        for entry in self.implementations(op):
            if entry is chosen:
                break
            passed_over[entry.name] = entry.suits(*args, **kwargs) or ""
        reason = (
            "it is the first that suits" if passed_over or len(self.implementations(op)) > 1 else "it is the only one"
        )
        return Explanation(op, chosen.name, reason, passed_over)


_DEFAULTS: list[Implementation] = []


def implements(op: str, name: str, suits: Suits | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: this function implements `op` in every backend made from now on, asked after those before it."""

    def mark(run: Callable[..., Any]) -> Callable[..., Any]:
        _DEFAULTS.append(Implementation(op, name, run, suits or _always))
        return run

    return mark


class _Active:
    """The backend in force, made at first use (when every implementation module has been imported)."""

    backend: OptimizedBackend | None = None


def current_backend() -> OptimizedBackend:
    """The backend that the framework's operations go through."""
    if _Active.backend is None:
        _Active.backend = OptimizedBackend()
    return _Active.backend


@contextmanager
def use_backend(backend: str | OptimizedBackend) -> Iterator[OptimizedBackend]:
    """Route the framework through another backend inside a `with`: "numpy" for the plain NumPy paths, or your own."""
    before = _Active.backend
    _Active.backend = backend if isinstance(backend, OptimizedBackend) else named_backend(backend)
    try:
        yield _Active.backend
    finally:
        _Active.backend = before


def named_backend(name: str) -> OptimizedBackend:
    names = {implementation.name for implementation in _DEFAULTS}
    if name not in names:
        raise ConfigurationError(f"there is no backend {name!r}; choose one of {', '.join(sorted(names))}")
    return OptimizedBackend(only=name)
