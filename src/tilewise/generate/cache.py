"""Keys and values of the positions a transformer has already seen, so that a new token costs one position, not all.

One block of memory per cache, (layers, batch, heads, positions, head width), allocated once: in float32, in float16, or
in int8 with one scale per stored row. Sequences of a batch may have different lengths. A full cache either refuses
(`overflow="error"`) or keeps the latest positions (`overflow="slide"`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import ConfigurationError, DtypeError, ShapeError
from tilewise.generate.sampling import is_whole
from tilewise.generate.view import LayerView

Array = npt.NDArray[Any]
Positions = int | slice | Sequence[int] | Array

_KINDS = {"float32": np.float32, "float16": np.float16, "int8": np.int8}


class KVCache:
    """Preallocated keys and values of several layers and sequences.

    >>> cache = KVCache(max_seq_len=8, n_heads=2, head_dim=4)
    >>> cache.update(0, np.ones((1, 2, 3, 4), np.float32), np.ones((1, 2, 3, 4), np.float32), position=0)
    >>> cache.get(0, 3)[0].shape
    (1, 2, 3, 4)

    `n_layers` and `batch_size` are taken from the first updates where they are not given.
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

    @property
    def n_layers(self) -> int:
        return len(self.keys)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored keys and values (and of their scales in int8)."""
        scales = 0 if self.key_scales is None else 2 * self.key_scales.nbytes
        return self.keys.nbytes + self.values.nbytes + scales

    def layer(self, index: int) -> LayerView:
        """One layer's part, to hand to `CachedAttention` or `TransformerBlock` as `past_kv`."""
        return LayerView(self, index)

    # --- storing and reading ---

    def update(self, layer: int, key: Array, value: Array, position: int | Array) -> None:
        """Store keys and values (B, H, T, D) at positions `position` … `position` + T − 1; one start for all sequences,
        or an array with one each."""
        _check_whole(layer, "a layer")
        key, value = self._checked(key, "key"), self._checked(value, "value")
        if key.shape != value.shape:
            raise ShapeError(f"key and value differ in shape: {key.shape} and {value.shape}")
        self._make_room(layer, key.shape[0])
        steps = key.shape[2]
        where_from = np.asarray(position)
        if where_from.dtype.kind not in "iu" or where_from.shape not in ((), (1,), (key.shape[0],)):
            raise ShapeError(f"position is one integer, or one for each of {key.shape[0]} sequences, not {position!r}")
        start = np.broadcast_to(where_from.astype(np.int64), (key.shape[0],))
        self._check_fit(start, steps)
        kept = min(steps, self.max_seq_len)  # of a longer run only the end stays
        where = (start[:, None] + np.arange(steps - kept, steps)) % self.max_seq_len
        _write(self.keys[layer], self.key_scales, layer, where, key[:, :, steps - kept :])
        _write(self.values[layer], self.value_scales, layer, where, value[:, :, steps - kept :])
        self.lengths[layer] = np.maximum(self.lengths[layer], start + steps)

    def get(self, layer: int, positions: Positions) -> tuple[Array, Array]:
        """Keys and values (B, H, n, D) at `positions`: the first n, a slice, or an array of positions. In float32 a
        run of positions is a view of the cache, otherwise a copy."""
        _check_whole(layer, "a layer")
        if not 0 <= layer < self.n_layers:
            raise ShapeError(f"the cache has {self.n_layers} layers, so there is no layer {layer}")
        length = int(self.lengths[layer].max(initial=0))
        if isinstance(positions, int | np.integer):
            if not 0 <= positions <= length:
                raise ShapeError(f"{positions} positions were asked for, but the cache holds {length}")
            positions = slice(0, int(positions))
        where = np.arange(length)[positions] if isinstance(positions, slice) else np.asarray(positions)
        if where.ndim != 1 or (where.size and where.dtype.kind not in "iu"):
            raise ShapeError(f"positions are a length, a slice or a row of integers, not {positions!r}")
        where = where.astype(np.int64)
        oldest = max(0, length - self.max_seq_len)
        if where.size and (where.min() < oldest or where.max() >= length):
            raise ShapeError(f"the cache holds positions {oldest} to {length - 1}, not all of those asked for")
        where = where % self.max_seq_len
        return _read(self.keys[layer], self.key_scales, layer, where), _read(
            self.values[layer], self.value_scales, layer, where
        )

    # --- the whole cache ---

    def reset(self) -> None:
        """Forget everything; the memory stays."""
        self.lengths[:] = 0

    def truncate(self, length: int) -> None:
        """Forget the positions from `length` on."""
        _check_whole(length, "a length")
        if length < 0:
            raise ShapeError(f"a cache cannot be cut to {length} positions")
        if self.lengths.max(initial=0) > self.max_seq_len:
            raise ShapeError("a cache that has slid cannot be cut: earlier positions are gone")
        np.minimum(self.lengths, length, out=self.lengths)

    def fork(self, copies: int) -> KVCache:
        """A new cache with every sequence `copies` times, for several continuations of one prompt."""
        if not is_whole(copies) or copies < 1:
            raise ConfigurationError(f"a cache can be forked into 1 or more copies, not {copies!r}")
        other = KVCache(self.max_seq_len, self.n_heads, self.head_dim, dtype=self.kind, overflow=self.overflow)
        other.batch_size = None if self.batch_size is None else self.batch_size * copies
        for name in ("keys", "values", "key_scales", "value_scales", "lengths"):
            mine = getattr(self, name)
            setattr(other, name, None if mine is None else np.repeat(mine, copies, 1))
        return other

    def sequence(self, layer: int, index: int) -> KVCache:
        """One sequence of one layer as a cache of its own that shares this one's memory."""
        if not 0 <= layer < self.n_layers or not 0 <= index < (self.batch_size or 0):
            raise ShapeError(f"the cache has {self.n_layers} layers and {self.batch_size} sequences")
        other = KVCache(self.max_seq_len, self.n_heads, self.head_dim, dtype=self.kind, overflow=self.overflow)
        other.batch_size = 1
        for name in ("keys", "values", "key_scales", "value_scales", "lengths"):
            mine = getattr(self, name)
            setattr(other, name, None if mine is None else mine[layer : layer + 1, index : index + 1])
        return other

    # --- inside ---

    def _allocate(self, layers: int) -> None:
        rows = (layers, self.batch_size or 0, self.n_heads, self.max_seq_len)
        try:
            self.keys: Array = np.zeros((*rows, self.head_dim), _KINDS[self.kind])
            self.values: Array = np.zeros_like(self.keys)
        except (MemoryError, ValueError):
            raise ConfigurationError(
                f"there is no memory for a cache of {(*rows, self.head_dim)} {self.kind} numbers"
            ) from None
        self.key_scales: Array | None = np.zeros(rows, np.float32) if self.kind == "int8" else None
        self.value_scales: Array | None = np.zeros(rows, np.float32) if self.kind == "int8" else None
        self.lengths: Array = np.zeros(rows[:2], np.int64)  # positions seen, per layer and sequence

    def _make_room(self, layer: int, batch: int) -> None:
        if layer < 0:
            raise ShapeError(f"there is no layer {layer}")
        if self.batch_size is None:
            self.batch_size = batch
            self._allocate(self.n_layers)
        if batch != self.batch_size:
            raise ShapeError(f"this cache is for {self.batch_size} sequences, not {batch}")
        if layer >= self.n_layers:
            before = [self.keys, self.values, self.key_scales, self.value_scales, self.lengths]
            self._allocate(layer + 1)
            after = [self.keys, self.values, self.key_scales, self.value_scales, self.lengths]
            for old, new in zip(before, after, strict=True):
                if old is not None and new is not None:
                    new[: len(old)] = old

    def _check_fit(self, start: Array, steps: int) -> None:
        if start.size and start.min() < 0:
            raise ShapeError(f"a position cannot be negative, as {start.min()} is")
        if self.overflow == "error" and start.size and start.max() + steps > self.max_seq_len:
            raise ShapeError(
                f"position {start.max() + steps - 1} does not fit into a cache of {self.max_seq_len} positions; "
                'make it larger, or let it slide with overflow="slide"'
            )

    def _checked(self, rows: Array, what: str) -> Array:
        rows = np.asarray(rows)
        if rows.dtype.kind != "f":
            raise DtypeError(f"a {what} must be floating point, not {rows.dtype}")
        if rows.ndim != 4 or rows.shape[1] != self.n_heads or rows.shape[3] != self.head_dim:
            raise ShapeError(
                f"a {what} of this cache is (batch, {self.n_heads}, positions, {self.head_dim}), not {rows.shape}"
            )
        return rows


def _write(store: Array, scales: Array | None, layer: int, where: Array, rows: Array) -> None:
    sequence = np.arange(len(where))[:, None]
    moved = rows.transpose(0, 2, 1, 3)  # (B, T, H, D): the order that indexing two axes gives
    if scales is None:
        with np.errstate(over="ignore"):  # beyond float16 is infinity, as everywhere
            store[sequence, :, where] = moved
        return
    moved = np.nan_to_num(moved, nan=0.0)
    scale = np.abs(moved).max(-1).astype(np.float32) / np.float32(127)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    store[sequence, :, where] = np.clip(np.rint(moved * inverse[..., None]), -127, 127)
    scales[layer][sequence, :, where] = scale


def _read(store: Array, scales: Array | None, layer: int, where: Array) -> Array:
    run = where.size > 0 and bool((np.diff(where) == 1).all())
    index: Any = slice(int(where[0]), int(where[-1]) + 1) if run else where
    rows: Array = store[:, :, index]
    if store.dtype == np.float32:
        return rows
    rows = rows.astype(np.float32)
    return rows if scales is None else rows * scales[layer][:, :, index, None]


def _check_size(name: str, value: int) -> None:
    if not is_whole(value) or value < 1:
        raise ConfigurationError(f"{name} must be a positive integer, not {value!r}")


def _check_whole(value: Any, what: str) -> None:
    if not is_whole(value):
        raise ConfigurationError(f"{what} is an integer, not {value!r}")


def _kind_name(dtype: npt.DTypeLike) -> str:
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in _KINDS:
        raise ConfigurationError(f"a cache stores float32, float16 or int8, not {name}")
    return name
