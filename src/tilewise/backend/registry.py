"""The table of implementations per operation, and the rule that picks one.

Each operation ("matmul", "conv2d", ...) has a list of implementations in order of preference: native, NumPy, then the
rungs kept for teaching. Each says whether it suits the arguments at hand: None, or one sentence why not. `dispatch`
runs the first that suits; `explain` says which that would be and why. Adding a backend is one `register` call; nothing
else in the framework changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tilewise import _events
from tilewise._events import recorders
from tilewise._extension import native
from tilewise._tuned import tuned_chooser
from tilewise.errors import ConfigurationError

Suits = Callable[..., str | None]

# Preference among implementations that suit; the same names order the same way for every operation.
_RANKS = {"native": 0, "numpy": 1, "blocked": 2, "naive": 3}
_FALLBACK = "numpy"  # implements every operation for every argument


class TileChooser(Protocol):
    """Chooses the tile of one call: the operation, its shape as `tile_space` takes it ((m, n, k) for matmul, twelve
    numbers for conv2d), the dtype's name, and the layout: of both operands for matmul ("nn", "nt", "tn", "tt"; "t" for
    a transposed view), "nchw" for conv2d. None leaves the default.

    It is asked once a shape and thread count; the answers are kept in a table of a few thousand shapes inside the
    compiled kernels. A chooser may have attributes: `least_work`, products of fewer multiplications are never asked
    about; `patience`, a shape is asked about when so many multiplications were done in it (0: at once); and a method
    `put_known(table)` that fills the table with what it knows beforehand. Integer products are not asked about: they
    use what `put_known` kept for them (`table.keep_int8`), else the default."""

    def __call__(self, op: str, shape: tuple[int, ...], dtype: str, layout: str, /) -> Any: ...


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    `suits` returns None when it should be used, else the reason against it; no `suits` means always. `tile_key` gives
    (shape, dtype, layout) for the tile chooser, or None where asking is not worth it; implementations that have it take
    a keyword `tile`. `describe` gives (reason, tile) for `explain`.
    """

    op: str
    name: str
    run: Callable[..., Any]
    suits: Suits | None = None
    tile_key: Callable[..., tuple[tuple[int, ...], str, str] | None] | None = None
    describe: Callable[..., tuple[str, Any]] | None = None


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


class OptimizedBackend:
    """Routes operations to implementations by shape, dtype, contiguity and machine.

    `only` keeps one implementation of each operation, and NumPy's for what it does not take. `tile_chooser`, where set,
    is asked for the tiles of tiled operations (see `TileChooser`); replaced, everything it said is forgotten.

    >>> import numpy as np
    >>> backend = OptimizedBackend()
    >>> backend.dispatch("matmul", np.eye(2, dtype=np.float32), np.ones((2, 3), np.float32)).shape
    (2, 3)
    """

    def __init__(self, only: str | None = None, tile_chooser: TileChooser | None = None) -> None:
        self._implementations: dict[str, list[Implementation]] = {}
        self._routes: dict[str, list[Implementation]] = {}  # the same, those with tiles asking the chooser
        self.only = only
        self._tile_chooser, self._table = tile_chooser, _tile_table(tile_chooser)
        for implementation in _DEFAULTS if only is None else (e for e in _DEFAULTS if e.name in (only, _FALLBACK)):
            self.add(implementation)
        for entries in self._implementations.values():
            entries.sort(key=lambda entry: -1 if entry.name == only else _RANKS.get(entry.name, len(_RANKS)))
        self._route()

    @property
    def tile_chooser(self) -> TileChooser | None:
        return self._tile_chooser

    @tile_chooser.setter
    def tile_chooser(self, chooser: TileChooser | None) -> None:
        self._tile_chooser, self._table = chooser, _tile_table(chooser)
        self._route()

    @property
    def tiles(self) -> Any:
        """The chooser's table as integer layers hand it to their kernels; None without a chooser."""
        return self._table

    def _route(self) -> None:
        """What `dispatch` goes through: the implementations, tiled ones by way of the chooser's table."""
        self._routes = {
            op: [_asking(entry, self._tile_chooser, self._table) for entry in entries]
            for op, entries in self._implementations.items()
        }

    def register(self, op: str, name: str, run: Callable[..., Any], suits: Suits | None = None) -> None:
        """Add an implementation, ahead of those already there."""
        self.add(Implementation(op, name, run, suits), first=True)

    def add(self, implementation: Implementation, first: bool = False) -> None:
        entries = self._implementations.setdefault(implementation.op, [])
        entries[:] = [e for e in entries if e.name != implementation.name]
        entries.insert(0 if first else len(entries), implementation)
        if self._routes:
            self._route()

    def implementations(self, op: str) -> list[Implementation]:
        """The implementations of `op`, in the order they are asked."""
        try:
            return self._implementations[op]
        except KeyError:
            known = ", ".join(sorted(self._implementations))
            raise ConfigurationError(f"no backend implements {op!r}; the operations are {known}") from None

    def operations(self) -> list[str]:
        """The names that `dispatch` knows."""
        return list(self._implementations)

    def select(self, op: str, *args: Any, **kwargs: Any) -> Implementation:
        entries = self._implementations.get(op) or self.implementations(op)
        for entry in entries:
            if entry.suits is None or entry.suits(*args, **kwargs) is None:
                return entry
        return entries[-1]

    def dispatch(self, op: str, *args: Any, **kwargs: Any) -> Any:
        """Run `op` with the implementation that suits these arguments best."""
        # `select`, written out: one call less for each of the many small operations of a model.
        for chosen in self._routes.get(op) or self.implementations(op):
            if chosen.suits is None or chosen.suits(*args, **kwargs) is None:
                break
        if recorders:
            if "tile" not in kwargs:  # a record names the tile, so it is asked for here, whatever the table waits for
                kwargs |= _chosen_tile(chosen, self._tile_chooser, args, kwargs)
            return _events.record_kernel(op, chosen, args, kwargs)
        return chosen.run(*args, **kwargs)

    def explain(self, op: str, *args: Any, **kwargs: Any) -> Explanation:
        """Say what `dispatch` would run for these arguments, and why."""
        chosen = self.select(op, *args, **kwargs)
        passed_over: dict[str, str] = {}
        for entry in self.implementations(op):
            if entry is chosen:
                break
            passed_over[entry.name] = (entry.suits(*args, **kwargs) if entry.suits else None) or ""
        reason, tile = self._describe(chosen, args, kwargs)
        return Explanation(op, chosen.name, reason, passed_over, tile)

    def _describe(self, chosen: Implementation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Any]:
        if kwargs.get("tile") is not None:
            return "it suits these arguments, with the tile that was given", kwargs["tile"]
        if "tile" not in kwargs:
            tile = _chosen_tile(chosen, self._tile_chooser, args, kwargs).get("tile")
            if tile is not None:
                return "it suits these arguments, with the tile that the tile chooser picked", tile
        if chosen.describe is not None:
            return chosen.describe(*args, **kwargs)
        only_one = len(self.implementations(chosen.op)) == 1
        return ("it is the only one" if only_one else "it is the first that suits these arguments"), None


_TABLED = ("matmul", "conv2d")  # whose compiled functions look tiles up themselves


def _tile_table(chooser: TileChooser | None) -> Any:
    """A chooser's answers as the compiled kernels read them, empty but for what it knows beforehand."""
    if chooser is None or native is None:
        return None
    table = native.TileTable(chooser, getattr(chooser, "least_work", 0), getattr(chooser, "patience", 0))
    put_known = getattr(chooser, "put_known", None)
    if put_known is not None:
        put_known(table)
    return table


def _asking(entry: Implementation, chooser: TileChooser | None, table: Any) -> Implementation:
    """The implementation as it runs under a chooser."""
    if chooser is None or entry.tile_key is None:
        return entry
    if native is not None and entry.op in _TABLED and entry.run is getattr(native, entry.op):
        return replace(entry, run=getattr(table, entry.op))

    def run(*args: Any, **kwargs: Any) -> Any:
        if "tile" not in kwargs:
            kwargs |= _chosen_tile(entry, chooser, args, kwargs)
        return entry.run(*args, **kwargs)

    return replace(entry, run=run)


def _chosen_tile(
    entry: Implementation, chooser: TileChooser | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """{"tile": ...} as the chooser says; empty where it is not asked."""
    if chooser is None or entry.tile_key is None:
        return {}
    key = entry.tile_key(*args, **kwargs)
    return {} if key is None else {"tile": chooser(entry.op, *key)}


_DEFAULTS: list[Implementation] = []


def implements(
    op: str,
    name: str,
    suits: Suits | None = None,
    tile_key: Callable[..., tuple[tuple[int, ...], str, str] | None] | None = None,
    describe: Callable[..., tuple[str, Any]] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: this function implements `op` in every backend made from now on."""

    def mark(run: Callable[..., Any]) -> Callable[..., Any]:
        _DEFAULTS.append(Implementation(op, name, run, suits, tile_key, describe))
        return run

    return mark


class _Active:
    """The backend in force, made at first use (when every implementation module has been imported)."""

    backend: OptimizedBackend | None = None


def current_backend() -> OptimizedBackend:
    """The backend that the framework's operations go through."""
    if _Active.backend is None:
        _Active.backend = OptimizedBackend(tile_chooser=tuned_chooser())
    return _Active.backend


@contextmanager
def use_backend(backend: str | OptimizedBackend) -> Iterator[OptimizedBackend]:
    """Route the framework through another backend inside a `with`: yours, or one by name: "numpy" for the plain NumPy
    paths, "naive" or "blocked" for matrix products by those rungs of the ladder."""
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
