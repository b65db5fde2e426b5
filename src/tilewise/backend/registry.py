"""The registry of implementations per operation, and the dispatch to one of them.

Each operation ("matmul", "conv2d", ...) has a list of implementations in order of preference: native, NumPy, then the
slow ones for teaching. Each implementation has a function that returns None if it supports the arguments, or one
sentence that says why not. `dispatch` runs the first that supports them; `explain` says which one that is and why. To
add a backend, call `register`; nothing else in the framework changes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tilewise._events import recorders
from tilewise._extension import native
from tilewise.backend.instance_methods import ExplainsMethods
from tilewise.backend.tuned import tuned_chooser
from tilewise.errors import ConfigurationError, TilewiseError, as_array, did_you_mean, type_name

UnsupportedReason = Callable[..., str | None]

# Order of preference, for every operation.
_RANKS = {"native": 0, "numpy": 1, "blocked": 2, "naive": 3}
_FALLBACK = "numpy"  # implements every operation for every argument


class TileChooser(Protocol):
    """Chooses the tile of a call; None selects the kernel's default tile.

    The arguments are the operation, its shape as for `tile_space` ((m, n, k) for matmul, twelve numbers for conv2d),
    the dtype's name and the layout: "nn", "nt", "tn" or "tt" for matmul, where "t" is a transposed view; "nchw" for
    conv2d. The chooser is called once per shape and thread count; the compiled kernels cache its answers in a table of
    a few thousand shapes.

    Optional attributes of a chooser:
    - `min_work`: products with fewer multiplications are never passed to the chooser.
    - `warm_up`: a shape is passed to the chooser after this many multiplications were spent on it (0: at once).
    - `preload(table)`: a method that fills the table with tiles that are already tuned. INT8 products use only such
      tiles (`table.keep_int8`), or the default: they never call the chooser.
    """

    def __call__(self, op: str, shape: tuple[int, ...], dtype: str, layout: str, /) -> Any: ...


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    `unsupported_reason` is called with the arguments; it returns None if the implementation supports them, else one
    sentence that says why not. Without it, all arguments are supported. `tile_key` returns (shape, dtype, layout) for
    the tile chooser, or None if tiles do not apply; implementations that have it take a keyword `tile`. `describe`
    returns (reason, tile) for `explain`.
    """

    op: str
    name: str
    run: Callable[..., Any]
    unsupported_reason: UnsupportedReason | None = None
    tile_key: Callable[..., tuple[tuple[int, ...], str, str] | None] | None = None
    describe: Callable[..., tuple[str, Any]] | None = None


@dataclass(frozen=True)
class Explanation:
    """The implementation that `dispatch` would run for some arguments, the reason, and the rejected ones."""

    op: str
    implementation: str
    reason: str
    rejected: dict[str, str]  # name of the implementation -> why it does not support the arguments
    tile: Any = None

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.implementation}, because {self.reason}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.rejected.items()]
        return "\n".join(lines + ([f"  tile: {self.tile}"] if self.tile is not None else []))


class OptimizedBackend(metaclass=ExplainsMethods):
    """Dispatches operations to implementations by shape, dtype, contiguity and machine.

    `only` restricts each operation to one implementation, with NumPy for arguments that it does not support.
    `tile_chooser` chooses the tiles of tiled operations (see `TileChooser`); setting another one clears its table.

    >>> import numpy as np
    >>> backend = OptimizedBackend()
    >>> backend.dispatch("matmul", np.eye(2, dtype=np.float32), np.ones((2, 3), np.float32)).shape
    (2, 3)
    """

    def __init__(self, only: str | None = None, tile_chooser: TileChooser | None = None) -> None:
        """Collect the registered implementations in the order of preference."""
        self._implementations: dict[str, list[Implementation]] = {}
        self._routes: dict[str, list[Implementation]] = {}  # the implementations, with the tile chooser applied
        self.only = only
        self.is_customized = False  # True once an implementation was registered by the user
        self._tile_chooser, self._table = tile_chooser, _tile_table(tile_chooser)
        self._is_complete = False  # True once the NumPy versions were needed
        self._add_defaults()
        if only is not None:
            self._complete()

    @property
    def tile_chooser(self) -> TileChooser | None:
        return self._tile_chooser

    @tile_chooser.setter
    def tile_chooser(self, chooser: TileChooser | None) -> None:
        self._tile_chooser, self._table = chooser, _tile_table(chooser)
        self._route()

    @property
    def tiles(self) -> Any:
        """The table of tiles that INT8 layers pass to their kernels; None without a chooser."""
        return self._table

    def _route(self) -> None:
        """Rebuild the lists that `dispatch` searches, in which tiled implementations use the chooser."""
        self._routes = {
            op: [_with_chooser(entry, self._tile_chooser, self._table) for entry in entries]
            for op, entries in self._implementations.items()
        }

    def register(
        self, op: str, name: str, run: Callable[..., Any], unsupported_reason: UnsupportedReason | None = None
    ) -> None:
        """Add an implementation with the highest preference."""
        self.add(Implementation(op, name, run, unsupported_reason), first=True)
        self.is_customized = True

    def add(self, implementation: Implementation, first: bool = False) -> None:
        """Add an implementation at the end (or at the front), replacing one of the same name."""
        entries = self._implementations.setdefault(implementation.op, [])
        entries[:] = [e for e in entries if e.name != implementation.name]
        entries.insert(0 if first else len(entries), implementation)
        if self._routes:
            self._route()

    def _add_defaults(self) -> None:
        """Add all implementations registered so far, in the order of preference."""
        ranks = _RANKS if self.only is None else {self.only: -1, _FALLBACK: 0}
        for entry in sorted(_DEFAULTS, key=lambda entry: ranks.get(entry.name, len(ranks))):
            entries = self._implementations.get(entry.op, [])
            if entry.name in ranks and all(other.name != entry.name for other in entries):
                self._implementations[entry.op] = [*entries, entry]
        self._route()

    def _complete(self) -> None:
        """Import the modules of rarely used implementations: NumPy's and the ladder's."""
        from tilewise.backend import ladder, numpy_ops, numpy_training  # noqa: F401 - registers their operations

        self._add_defaults()
        self._is_complete = True

    def implementations(self, op: str) -> list[Implementation]:
        """List the implementations of `op` in the order of preference."""
        if not self._is_complete:
            self._complete()
        try:
            return self._implementations[op]
        except KeyError:
            name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
            hint = did_you_mean(name, sorted(self._implementations))
            raise ConfigurationError(f"an operation is given by its name, and there is no {name!r}; {hint}") from None

    def operations(self) -> list[str]:
        """List the operations that `dispatch` accepts."""
        if not self._is_complete:
            self._complete()
        return list(self._implementations)

    def select(self, op: str, *args: Any, **kwargs: Any) -> Implementation:
        """Return the first implementation that supports these arguments, or the last one if none does."""
        entries = self.implementations(op)
        for entry in entries:
            if entry.unsupported_reason is None or entry.unsupported_reason(*args, **kwargs) is None:
                return entry
        return entries[-1]

    def dispatch(self, op: str, *args: Any, **kwargs: Any) -> Any:
        """Run `op` with the first implementation that supports these arguments."""
        entry: Any = None
        try:  # costs nothing unless an error is raised
            # Inlined `select`: a model runs many small operations, and each saves one call.
            for entry in self._routes.get(op) or self.implementations(op):
                if entry.unsupported_reason is None or entry.unsupported_reason(*args, **kwargs) is None:
                    break
            else:
                if not self._is_complete:
                    self._complete()
                    return self.dispatch(op, *args, **kwargs)
            if recorders:
                # Records contain the tile, so a profiled call asks the chooser at once, without its warm-up.
                if "tile" not in kwargs:
                    kwargs |= _tile_argument(entry, self._tile_chooser, args, kwargs)
                return recorders.hooks.record_kernel(op, entry, args, kwargs)
            return entry.run(*args, **kwargs)
        except (AttributeError, TypeError, ValueError) as error:
            return self._with_arrays(entry, args, kwargs, error)

    def _with_arrays(
        self, entry: Implementation | None, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
    ) -> Any:
        """Repeat a failed call with Tensors replaced by their arrays.

        If there are none, raise an error about the arguments.
        """
        tensors = [hasattr(x, "requires_grad") for x in args]
        if entry is not None and any(tensors):
            arrays = [as_array(x) if is_tensor else x for x, is_tensor in zip(args, tensors, strict=True)]
            return self.dispatch(entry.op, *arrays, **kwargs)
        if entry is None and not isinstance(error, TilewiseError):
            raise ConfigurationError(
                f"dispatch takes the name of an operation first, such as 'matmul': {error}"
            ) from error
        if entry is None or isinstance(error, TilewiseError):
            raise error
        for number, value in enumerate(args, 1):
            if hasattr(value, "named_modules"):
                text = f"argument {number} of {entry.op!r} is a {type_name(value)}; pass its weight.data"
                raise ConfigurationError(f"dispatch takes arrays, and {text}") from error
        names = ", ".join(inspect.signature(entry.run).parameters)
        raise ConfigurationError(f"{entry.op}({names}) cannot run with these arguments: {error}") from error

    def explain(self, op: str, *args: Any, **kwargs: Any) -> Explanation:
        """Explain which implementation `dispatch` would run for these arguments, and why not the others."""
        selected = self.select(op, *args, **kwargs)
        rejected: dict[str, str] = {}
        for entry in self.implementations(op):
            if entry is selected:
                break
            rejected[entry.name] = (entry.unsupported_reason(*args, **kwargs) if entry.unsupported_reason else "") or ""
        reason, tile = self._describe(selected, args, kwargs)
        return Explanation(op, selected.name, reason, rejected, tile)

    def _describe(self, selected: Implementation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Any]:
        """Return why an implementation runs on these arguments, in a sentence, and its tile or None."""
        if kwargs.get("tile") is not None:
            return "it supports these arguments, with the tile passed by the caller", kwargs["tile"]
        if "tile" not in kwargs:
            tile = _tile_argument(selected, self._tile_chooser, args, kwargs).get("tile")
            if tile is not None:
                return "it supports these arguments, with a tile from the tile chooser", tile
        if selected.describe is not None:
            return selected.describe(*args, **kwargs)
        only_one = len(self.implementations(selected.op)) == 1
        return ("it is the only one" if only_one else "it is the first that supports these arguments"), None


_OPS_WITH_TABLE = ("matmul", "conv2d")  # operations whose compiled functions look up tiles in the table themselves


def _tile_table(chooser: TileChooser | None) -> Any:
    """Create the native table that caches a chooser's tiles, preloaded with those already tuned."""
    if chooser is None or native is None:
        return None
    table = native.TileTable(chooser, getattr(chooser, "min_work", 0), getattr(chooser, "warm_up", 0))
    preload = getattr(chooser, "preload", None)
    if preload is not None:
        preload(table)
    return table


def _with_chooser(entry: Implementation, chooser: TileChooser | None, table: Any) -> Implementation:
    """Return a copy of an implementation that asks the chooser for its tile at every call."""
    if chooser is None or entry.tile_key is None:
        return entry
    if native is not None and entry.op in _OPS_WITH_TABLE and entry.run is getattr(native, entry.op):
        return replace(entry, run=getattr(table, entry.op))

    def run(*args: Any, **kwargs: Any) -> Any:
        if "tile" not in kwargs:
            kwargs |= _tile_argument(entry, chooser, args, kwargs)
        return entry.run(*args, **kwargs)

    return replace(entry, run=run)


def _tile_argument(
    entry: Implementation, chooser: TileChooser | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return {"tile": chosen tile} for a call, or {} without a chooser or if tiles do not apply."""
    if chooser is None or entry.tile_key is None:
        return {}
    key = entry.tile_key(*args, **kwargs)
    return {} if key is None else {"tile": chooser(entry.op, *key)}


_DEFAULTS: list[Implementation] = []


def implements(
    op: str,
    name: str,
    unsupported_reason: UnsupportedReason | None = None,
    tile_key: Callable[..., tuple[tuple[int, ...], str, str] | None] | None = None,
    describe: Callable[..., tuple[str, Any]] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function to register it as implementation `name` of `op` in every backend created later."""

    def mark(run: Callable[..., Any]) -> Callable[..., Any]:
        """Register the function and return it unchanged."""
        _DEFAULTS.append(
            Implementation(op, name, run, unsupported_reason=unsupported_reason, tile_key=tile_key, describe=describe)
        )
        return run

    return mark


class _Active:
    """Holder of the active backend, which is created at its first use."""

    backend: OptimizedBackend | None = None
    overrides = 0  # `use_backend` blocks that are active


def current_backend() -> OptimizedBackend:
    """Return the backend that the framework's operations use."""
    if _Active.backend is None:
        _Active.backend = OptimizedBackend(tile_chooser=tuned_chooser())
    return _Active.backend


def is_default_backend() -> bool:
    """Tell whether operations run on tilewise's own choice of kernels: no other backend or implementation."""
    return not _Active.overrides and not current_backend().is_customized


@contextmanager
def use_backend(backend: str | OptimizedBackend) -> Iterator[OptimizedBackend]:
    """Use another backend inside a `with` block.

    `backend` is an OptimizedBackend or a name: "numpy" for the NumPy paths, "naive" or "blocked" for matrix products by
    those steps of the ladder.
    """
    previous = _Active.backend
    _Active.backend = backend if isinstance(backend, OptimizedBackend) else named_backend(backend)
    _Active.overrides += 1
    try:
        yield _Active.backend
    finally:
        _Active.backend = previous
        _Active.overrides -= 1


def named_backend(name: str) -> OptimizedBackend:
    """Create a backend that uses the implementations called `name` where there are some."""
    backend = OptimizedBackend(only=name)
    names = {implementation.name for implementation in _DEFAULTS}
    if name not in names:
        raise ConfigurationError(f"there is no backend {name!r}; choose one of {', '.join(sorted(names))}")
    return backend
