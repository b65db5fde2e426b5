"""KV cache: stored keys and values of earlier positions, so that a new token costs one position instead of all.

A cache is one allocation of (layers, batch, heads, positions, head width) in float32, in float16, or in int8 with one
scale per stored row. Sequences of a batch may have different lengths. A full cache either raises an error
(`overflow="error"`) or keeps only the latest positions (`overflow="slide"`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.backend.instance_methods import ExplainsMethods
from tilewise.errors import ConfigurationError, DtypeError, ShapeError
from tilewise.tensor import Array

Positions = int | slice | Sequence[int] | Array

_ARRAYS = ("keys", "values", "key_scales", "value_scales", "lengths")  # of a cache
_KINDS = {"float32": np.float32, "float16": np.float16, "int8": np.int8}


def is_integer(value: Any) -> bool:
    """True for Python and NumPy integers, but not for bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


class KVCache(metaclass=ExplainsMethods):
    """Preallocated keys and values of several layers and sequences.

    >>> cache = KVCache(max_seq_len=8, n_heads=2, head_dim=4)
    >>> cache.update(0, np.ones((1, 2, 3, 4), np.float32), np.ones((1, 2, 3, 4), np.float32), position=0)
    >>> cache.get(0, 3)[0].shape
    (1, 2, 3, 4)

    `n_layers` and `batch_size` default to those of the first updates.
    """

    def __init__(
        self,
        max_seq_len: int,
        n_heads: int,
        head_dim: int,
        *,
        n_layers: int | None = None,
        batch_size: int | None = None,
        dtype: npt.DTypeLike = "float32",
        overflow: str = "error",
    ) -> None:
        """Check the sizes and allocate the memory, if the number of layers and the batch size are given."""
        for name, size in (("max_seq_len", max_seq_len), ("n_heads", n_heads), ("head_dim", head_dim)):
            _check_size(name, size)
        for name, optional in (("n_layers", n_layers), ("batch_size", batch_size)):
            if optional is not None:
                _check_size(name, optional)
        if overflow not in ("error", "slide"):
            raise ConfigurationError(f'overflow must be "error" or "slide", not {overflow!r}')
        self.max_seq_len, self.n_heads, self.head_dim = int(max_seq_len), int(n_heads), int(head_dim)
        self.kind = _kind_name(dtype)
        self.overflow = overflow
        self.batch_size = batch_size
        self._allocate(n_layers or 0)

    def __repr__(self) -> str:
        lengths = self.lengths.max(0, initial=0).tolist()
        used = f"{', '.join(map(str, lengths[:8]))}{' …' * (len(lengths) > 8)}" if lengths else "no"
        return (
            f"KVCache(max_seq_len={self.max_seq_len}, n_heads={self.n_heads}, head_dim={self.head_dim}, "
            f"n_layers={self.n_layers}, batch_size={self.batch_size}, dtype={self.kind}: {used} positions, "
            f"{self.nbytes:,} bytes)"
        )

    @property
    def n_layers(self) -> int:
        return len(self.keys)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values (and of their scales in int8)."""
        scales = 0 if self.key_scales is None else 2 * self.key_scales.nbytes
        return self.keys.nbytes + self.values.nbytes + scales

    def layer(self, index: int) -> LayerView:
        """Return a view of one layer, the `past_kv` of `CachedAttention` or `TransformerBlock`."""
        return LayerView(self, index)

    # --- storing and reading ---

    def update(self, layer: int, key: Array, value: Array, position: int | Array) -> None:
        """Store keys and values (B, H, T, D) at positions `position` … `position` + T − 1.

        `position` is one start for all sequences, or an array with one start for each.
        """
        _check_integer(layer, "layer")
        key, value = self._checked(key, "key"), self._checked(value, "value")
        if key.shape != value.shape:
            raise ShapeError(f"key and value differ in shape: {key.shape} and {value.shape}")
        self._grow(layer, key.shape[0])
        count = key.shape[2]
        starts = np.asarray(position)
        if starts.dtype.kind not in "iu" or starts.shape not in ((), (1,), (key.shape[0],)):
            raise ShapeError(
                f"position must be one integer, or one for each of {key.shape[0]} sequences, not {position!r}"
            )
        starts = np.broadcast_to(starts.astype(np.int64), (key.shape[0],))
        self._check_fit(starts, count)
        stored = min(count, self.max_seq_len)  # a sliding cache stores only the end of a longer run
        slots = (starts[:, None] + np.arange(count - stored, count)) % self.max_seq_len  # (B, T)
        _write(self.keys[layer], self.key_scales, layer, slots, key[:, :, count - stored :])
        _write(self.values[layer], self.value_scales, layer, slots, value[:, :, count - stored :])
        self.lengths[layer] = np.maximum(self.lengths[layer], starts + count)

    def get(self, layer: int, positions: Positions = slice(None)) -> tuple[Array, Array]:
        """Return keys and values (B, H, n, D) at `positions`: the first n, a slice (all), or an array of positions.

        A contiguous range of a float32 cache is a view of the cache; everything else is a copy.
        """
        _check_integer(layer, "layer")
        if not 0 <= layer < self.n_layers:
            raise ShapeError(f"nothing is stored for layer {layer}; the number of layers is {self.n_layers}")
        length = int(self.lengths[layer].max(initial=0))
        if isinstance(positions, int | np.integer):
            if not 0 <= positions <= length:
                raise ShapeError(f"{positions} positions were requested, but the cache has {length}")
            positions = slice(0, int(positions))
        indices = np.arange(length)[positions] if isinstance(positions, slice) else np.asarray(positions)
        if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
            raise ShapeError(f"positions must be a length, a slice or a row of integers, not {positions!r}")
        indices = indices.astype(np.int64)
        oldest = max(0, length - self.max_seq_len)
        if indices.size and (indices.min() < oldest or indices.max() >= length):
            raise ShapeError(f"the cache has positions {oldest} to {length - 1}, not all that were requested")
        slots = indices % self.max_seq_len
        keys = _read(self.keys[layer], self.key_scales, layer, slots)
        return keys, _read(self.values[layer], self.value_scales, layer, slots)

    # --- the whole cache ---

    def reset(self) -> None:
        """Remove all positions; the memory stays allocated."""
        self.lengths[:] = 0

    def truncate(self, length: int) -> None:
        """Forget the positions from `length` on."""
        _check_integer(length, "length")
        if length < 0:
            raise ShapeError(f"a cache cannot be truncated to {length} positions")
        if self.lengths.max(initial=0) > self.max_seq_len:
            raise ShapeError("a cache that has slid cannot be truncated: earlier positions are overwritten")
        np.minimum(self.lengths, length, out=self.lengths)

    def fork(self, copies: int) -> KVCache:
        """Copy the cache with every sequence repeated `copies` times, to continue one prompt in several ways."""
        if not is_integer(copies) or copies < 1:
            raise ConfigurationError(f"copies must be an integer of at least 1, not {copies!r}")
        batch_size = None if self.batch_size is None else self.batch_size * copies
        return self._with_arrays(batch_size, lambda array: np.repeat(array, copies, 1))

    def sequence(self, layer: int, index: int) -> KVCache:
        """Return one sequence of one layer as a cache that shares this one's memory."""
        if not 0 <= layer < self.n_layers or not 0 <= index < (self.batch_size or 0):
            raise ShapeError(f"the cache has {self.n_layers} layers and {self.batch_size} sequences")
        return self._with_arrays(1, lambda array: array[layer : layer + 1, index : index + 1])

    def _with_arrays(self, batch_size: int | None, select: Callable[[Array], Array]) -> KVCache:
        """Return a cache with the same settings whose arrays are `select(array)` of this one's."""
        other = KVCache(self.max_seq_len, self.n_heads, self.head_dim, dtype=self.kind, overflow=self.overflow)
        other.batch_size = batch_size
        for name in _ARRAYS:
            array = getattr(self, name)
            setattr(other, name, None if array is None else select(array))
        return other

    # --- memory and checks ---

    def _allocate(self, layers: int) -> None:
        """Allocate zeroed arrays for keys, values, int8 scales and lengths."""
        rows = (layers, self.batch_size or 0, self.n_heads, self.max_seq_len)
        try:
            self.keys: Array = np.zeros((*rows, self.head_dim), _KINDS[self.kind])
            self.values: Array = np.zeros_like(self.keys)
        except (MemoryError, ValueError):
            raise ConfigurationError(
                f"there is not enough memory for a cache of {(*rows, self.head_dim)} {self.kind} numbers"
            ) from None
        self.key_scales: Array | None = np.zeros(rows, np.float32) if self.kind == "int8" else None
        self.value_scales: Array | None = np.zeros(rows, np.float32) if self.kind == "int8" else None
        self.lengths: Array = np.zeros(rows[:2], np.int64)  # number of positions, per layer and sequence

    def _grow(self, layer: int, batch: int) -> None:
        """Set the batch size at the first update, and add layers up to number `layer`."""
        if layer < 0:
            raise ShapeError(f"there is no layer {layer}")
        if self.batch_size is None:
            self.batch_size = batch
            self._allocate(self.n_layers)
        if batch != self.batch_size:
            raise ShapeError(f"this cache is for {self.batch_size} sequences, not {batch}")
        if layer >= self.n_layers:
            before = [getattr(self, name) for name in _ARRAYS]
            self._allocate(layer + 1)
            for name, old in zip(_ARRAYS, before, strict=True):
                if old is not None:
                    getattr(self, name)[: len(old)] = old

    def _check_fit(self, starts: Array, count: int) -> None:
        """Raise if `count` positions from `starts` exceed the capacity and the cache does not slide."""
        if starts.size and starts.min() < 0:
            raise ShapeError(f"a position must not be negative, but one is {starts.min()}")
        if self.overflow == "error" and starts.size and starts.max() + count > self.max_seq_len:
            raise ShapeError(
                f"position {starts.max() + count - 1} does not fit into a cache of {self.max_seq_len} positions; "
                'make it larger, or use overflow="slide"'
            )

    def _checked(self, rows: Array, name: str) -> Array:
        """Convert keys or values (`name`) to an array; raise unless they are floats of the cache's sizes."""
        rows = np.asarray(rows)
        if rows.dtype.kind != "f":
            raise DtypeError(f"a {name} must be floating point, not {rows.dtype}")
        if rows.ndim != 4 or rows.shape[1] != self.n_heads or rows.shape[3] != self.head_dim:
            raise ShapeError(
                f"a {name} of this cache must be (batch, {self.n_heads}, positions, {self.head_dim}), not {rows.shape}"
            )
        return rows


def _write(store: Array, scales: Array | None, layer: int, slots: Array, rows: Array) -> None:
    """Write rows (B, H, T, D) to slots (B, T) of a layer of `store`; an int8 store quantizes each row."""
    sequence = np.arange(len(slots))[:, None]
    rows = rows.transpose(0, 2, 1, 3)  # (B, T, H, D), the shape of store[sequence, :, slots]
    if scales is None:
        with np.errstate(over="ignore"):  # values beyond float16's range become infinity
            store[sequence, :, slots] = rows
        return
    rows = np.nan_to_num(rows, nan=0.0)
    scale = np.abs(rows).max(-1).astype(np.float32) / np.float32(127)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    store[sequence, :, slots] = np.clip(np.rint(rows * inverse[..., None]), -127, 127)
    scales[layer][sequence, :, slots] = scale


def _read(store: Array, scales: Array | None, layer: int, slots: Array) -> Array:
    """Read slots of a layer as float32 (B, H, n, D); a contiguous range of a float32 store is a view."""
    contiguous = slots.size > 0 and bool((np.diff(slots) == 1).all())
    index: Any = slice(int(slots[0]), int(slots[-1]) + 1) if contiguous else slots
    rows: Array = store[:, :, index]
    if store.dtype == np.float32:
        return rows
    rows = rows.astype(np.float32)
    return rows if scales is None else rows * scales[layer][:, :, index, None]


def _check_size(name: str, value: int) -> None:
    if not is_integer(value) or value < 1:
        raise ConfigurationError(f"{name} must be a positive integer, not {value!r}")


def _check_integer(value: Any, name: str) -> None:
    """Raise `ConfigurationError` unless the value is an integer; `name` is the argument's."""
    if not is_integer(value):
        written = repr(value) if np.ndim(value) == 0 else f"an array of shape {np.shape(value)}"
        raise ConfigurationError(f"{name} must be an integer, not {written}")


def _kind_name(dtype: npt.DTypeLike) -> str:
    """Return the canonical name of a cache's dtype, or raise if caches do not support it."""
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in _KINDS:
        raise ConfigurationError(f"the dtype of a cache must be float32, float16 or int8, not {name}")
    return name


# --- one layer ---


@dataclass(frozen=True)
class LayerView:
    """One layer of a KVCache; the argument `past_kv` of attention."""

    cache: KVCache
    index: int

    @property
    def lengths(self) -> Array:
        """Return the number of stored positions per sequence; empty before the first update."""
        if self.index >= self.cache.n_layers:
            return np.zeros(0, np.int64)
        lengths: Array = self.cache.lengths[self.index]
        return lengths

    @property
    def capacity(self) -> int:
        """Number of positions that the cache has memory for."""
        return self.cache.max_seq_len

    def append(self, key: Array, value: Array) -> tuple[Array, Array]:
        """Store the next positions (B, H, T, D) of every sequence; return all keys and values stored so far."""
        steps = key.shape[2]
        lengths = self.lengths.copy() if self.lengths.size else np.zeros(key.shape[0], np.int64)
        longest = int(lengths.max(initial=0)) + steps
        if longest > self.cache.max_seq_len and self.cache.overflow == "slide":
            return self._append_sliding(key, value, lengths)
        self.cache.update(self.index, key, value, lengths)
        return self.cache.get(self.index, longest)

    def mask(self, steps: int) -> Array | None:
        """Return which stored positions each of the last `steps` queries may attend to: (B, 1, steps, stored).

        None if the causal mask is sufficient.
        """
        lengths, window = self.lengths, self.cache.max_seq_len
        longest = int(lengths.max(initial=0))
        if longest <= window and int(lengths.min(initial=longest)) == longest:
            return None
        first = max(0, longest - steps - window) if longest > window else 0
        stored = np.arange(first, longest)
        # A position attends to itself and earlier ones, but only within the sliding window.
        position = (lengths[:, None] - steps + np.arange(steps))[:, None, :, None]  # (B, 1, T, 1)
        allowed: Array = (stored <= position) & (stored > position - window)
        return allowed

    def _append_sliding(self, key: Array, value: Array, lengths: Array) -> tuple[Array, Array]:
        """Append to a full sliding cache and return all keys and values, including old ones that are overwritten."""
        if int(lengths.min()) != int(lengths.max()):
            raise ShapeError("a sliding cache needs sequences of equal length")
        length = int(lengths[0])
        window = slice(max(0, length - self.cache.max_seq_len), length)
        old_key, old_value = self.cache.get(self.index, window) if length else (key[:, :, :0], value[:, :, :0])
        keys, values = np.concatenate([old_key, key], 2), np.concatenate([old_value, value], 2)
        self.cache.update(self.index, key, value, lengths)
        return keys, values
