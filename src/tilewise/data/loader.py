"""Batch loaders whose batches are functions of a seed and a position, so that resuming needs only a few integers.

The order of an epoch depends on (seed, epoch), a text batch on (seed, batch number). No random generator state has to
be saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import ConfigurationError, ShapeError

Array = npt.NDArray[Any]


class BatchLoader:
    """Shuffled batches of (x, y). Iterating yields the remaining batches of the current epoch and starts the next one.

    >>> loader = BatchLoader(np.arange(5), np.arange(5), batch_size=2, seed=1)
    >>> [len(x) for x, _ in loader], loader.epoch
    ([2, 2, 1], 1)
    """

    def __init__(self, x: Array, y: Array, batch_size: int, seed: int = 0, shuffle: bool = True) -> None:
        """Store samples x with labels y; `shuffle` draws a new order for every epoch from `seed`."""
        if batch_size < 1:
            raise ConfigurationError(f"batch_size must be at least 1, not {batch_size}")
        if len(x) != len(y) or not len(x):
            raise ShapeError(f"x and y must have the same length, at least 1, not {len(x)} and {len(y)}")
        self.x, self.y, self.batch_size, self.seed, self.shuffle = x, y, batch_size, seed, shuffle
        self.epoch = self.batch = 0

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return -(-len(self.x) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Array, Array]]:
        order = self._order()
        while self.batch < len(self):
            indices = order[self.batch * self.batch_size : (self.batch + 1) * self.batch_size]
            self.batch += 1
            yield self.x[indices], self.y[indices]
        self.epoch, self.batch = self.epoch + 1, 0

    def _order(self) -> Array:
        """Return the order of the samples in this epoch, a function of seed and epoch."""
        if not self.shuffle:
            return np.arange(len(self.x))
        return np.random.default_rng([self.seed, self.epoch]).permutation(len(self.x))

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.seed, self.epoch, self.batch = (_checked_counter(state, name) for name in ("seed", "epoch", "batch"))


class DataLoader(BatchLoader):
    """Batches like PyTorch's DataLoader, of a pair (x, y) of arrays or a list of (x, y) examples.

    >>> x, y = np.zeros((5, 3), np.float32), np.arange(5)
    >>> [len(labels) for _, labels in DataLoader((x, y), batch_size=2)]
    [2, 2, 1]
    """

    def __init__(self, dataset: Any, batch_size: int = 1, shuffle: bool = False, seed: int = 0) -> None:
        """Convert the dataset to arrays x and y."""
        try:
            pair = dataset if isinstance(dataset, tuple) and len(dataset) == 2 else tuple(zip(*dataset, strict=True))
        except (TypeError, ValueError):
            pair = ()
        if len(pair) != 2:
            raise ShapeError(
                "a dataset must be a pair (x, y) of arrays, such as (digits.x_train, digits.y_train), "
                "or a list of (x, y) examples"
            )
        super().__init__(np.asarray(pair[0]), np.asarray(pair[1]), batch_size, seed, shuffle)

    def __iter__(self) -> Iterator[tuple[Array, Array]]:
        """Iterate over a whole epoch, also if the previous one was not finished."""
        if self.batch:
            self.epoch, self.batch = self.epoch + 1, 0
        yield from super().__iter__()


class TextLoader:
    """Endless batches of (ids, next ids), each (B, T), from random positions of a text."""

    def __init__(self, ids: Array, batch_size: int, context: int, seed: int = 0) -> None:
        """Store a text's token ids; each batch has `batch_size` sequences of `context` tokens."""
        if len(ids) <= context:
            raise ShapeError(f"a text of {len(ids)} tokens is too short for a context of {context}")
        self.ids, self.batch_size, self.context, self.seed = ids, batch_size, context, seed
        self.batch = 0

    def __iter__(self) -> Iterator[tuple[Array, Array]]:
        while True:
            yield self.next()

    def next(self) -> tuple[Array, Array]:
        """Return the next batch: token ids (B, T), and the ids that follow each of them."""
        rng = np.random.default_rng([self.seed, self.batch])
        starts = rng.integers(0, len(self.ids) - self.context, self.batch_size)
        windows = self.ids[starts[:, None] + np.arange(self.context + 1)]  # (B, T+1)
        self.batch += 1
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "batch": self.batch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.seed, self.batch = _checked_counter(state, "seed"), _checked_counter(state, "batch")


def _checked_counter(state: Mapping[str, int], name: str) -> int:
    """Return an integer of a stored loader state; raise unless it is in [0, 2^63)."""
    value = int(state[name])
    if not 0 <= value < 1 << 63:
        raise ConfigurationError(f"{name} of a loader's state must be at least 0, not {value}")
    return value
