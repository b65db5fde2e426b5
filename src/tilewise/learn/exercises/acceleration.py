"""Checks of the acceleration lesson: a block that is obeyed, one that fits a cache, a convolution as a product.

The matrices handed to `blocked_matmul` notice what is read from them at once, so a block that is only a name is found
out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise.learn.checking import Exercise, Wrong
from tilewise.learn.differential import Example, differential


class _Watched:
    """Matrix wrapper that records the largest block read from it by one index operation."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values, self.shape, self.dtype, self.largest = values, values.shape, values.dtype, 0
        self.ndim = 2

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, key: Any) -> Any:
        piece = self.values[key]
        self.largest = max(self.largest, int(np.size(piece)))
        return piece

    def __matmul__(self, other: Any) -> Any:
        raise Wrong(
            "it multiplies the whole matrices at once: read blocks by slices, such as a[i : i + block, k : k + block]"
        )

    __rmatmul__ = __matmul__

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        self.largest = max(self.largest, self.values.size)
        return self.values if dtype is None else self.values.astype(dtype)


def blocked_matmul(a: Any, b: Any, block: int) -> Any:
    return a @ b


def _blocked(answer: Callable[..., Any]) -> None:
    """Check the exercise `blocked_matmul`: the result, and that it reads blocks of at most the right size."""
    reads: list[str] = []

    def watched_answer(a: Any, b: Any, block: int) -> Any:
        """Call the answer with matrices that record the blocks read from them."""
        watched = _Watched(a), _Watched(b)
        result = answer(*watched, block)
        for name, matrix in zip("ab", watched, strict=True):
            if matrix.largest > block * block:
                reads.append(
                    f"it took {matrix.largest} numbers of {name} at once, and a block has {block * block}: the block "
                    "is ignored, so nothing stays in the cache"
                )
        return result

    _check_product(watched_answer)
    if reads:
        raise Wrong(reads[0])


def _product_cases() -> list[Example]:
    """Return test inputs for `blocked_matmul`, with a remark on what is special about each."""
    rng = np.random.default_rng(0)
    sizes = {
        (8, 8, 8, 4): "for square matrices",
        (16, 24, 32, 8): "for matrices that are not square",
        (7, 5, 11, 4): "where the last blocks are smaller",
        (3, 3, 3, 8): "where the block is larger than the matrices",
        (1, 9, 20, 4): "for one row",
    }
    return [
        Example((rng.standard_normal((m, k)), rng.standard_normal((k, n)), block), about)
        for (m, n, k, block), about in sizes.items()
    ]


def _last_block_only(a: Any, b: Any, block: int) -> Any:
    start = (a.shape[1] - 1) // block * block
    return a[:, start:] @ b[start:]


def _whole_blocks_only(a: Any, b: Any, block: int) -> Any:
    """Multiply as an answer does that ignores incomplete blocks at the edges."""
    m, n, k = (size // block * block for size in (a.shape[0], b.shape[1], a.shape[1]))
    out = np.zeros((a.shape[0], b.shape[1]))
    out[:m, :n] = a[:m, :k] @ b[:k, :n]
    return out


def _blockwise(a: Any, b: Any, block: int, product: Callable[[Any, Any], Any], exchange: bool = False) -> Any:
    """Combine blocks with another product, or with the blocks of b at exchanged indices."""
    out = np.zeros((a.shape[0], b.shape[1]))
    starts = (range(0, size, block) for size in (*a.shape, b.shape[1]))
    for i, k, j in itertools.product(*starts):
        row, column = (j, k) if exchange else (k, j)
        b_block = b[row : row + block, column : column + block]
        out[i : i + block, j : j + block] += product(a[i : i + block, k : k + block], b_block)
    return out


_check_product = differential(
    blocked_matmul,
    _product_cases,
    "start from zeros; blocks at the border are smaller, and every k block adds to what is there, once",
    tolerance=1e-4,
)


def largest_block(cache_bytes: int) -> int:
    return math.isqrt(cache_bytes // 12)


_SIDE = "that is the number of elements of a block: its side is the root"
_THREE = "three square float32 blocks (of a, b and c) must fit together"


def im2col(x: Any, kh: int, kw: int) -> Any:
    return _columns(x, kh, kw)


def _columns(
    x: Any, kh: int, kw: int, order: tuple[int, ...] = (0, 3, 4, 1, 2), flip: bool = False, step: int = 1
) -> Any:
    """Arrange convolution windows as columns with axes (C, H', W', kh, kw) in another order, flipped or strided."""
    windows = np.lib.stride_tricks.sliding_window_view(x, (kh, kw), axis=(1, 2))  # (C, H', W', kh, kw)
    if flip:
        windows = windows[..., ::-1, ::-1]
    if step > 1:
        windows = windows[:, ::kh, ::kw]
    return windows.transpose(order).reshape(len(x) * kh * kw, -1)


_CHANNEL_FIRST = "the channel comes first: rows are ordered (c, i, j)"


def _im2col_cases() -> list[Example]:
    """Return test inputs for `im2col`, with a remark on what is special about each."""
    rng = np.random.default_rng(1)
    sizes = {
        (1, 4, 4, 2, 2): "for one channel",
        (3, 6, 5, 3, 3): "for three channels",
        (2, 5, 7, 1, 1): "for a 1x1 kernel",
        (2, 6, 5, 3, 2): "where kh and kw differ",
        (2, 4, 7, 1, 3): "where kh and kw differ",
    }
    return [Example((rng.standard_normal((c, h, w)), kh, kw), about) for (c, h, w, kh, kw), about in sizes.items()]


EXERCISES = (
    Exercise("blocked_matmul", "a matrix product that works on blocks, borders included", _blocked),
    Exercise(
        "largest_block",
        "the largest block that fits a cache",
        differential(
            largest_block,
            lambda: [
                Example(
                    (size,),
                    "where nothing fits"
                    if size < 12
                    else "where the blocks fill the cache exactly"
                    if size in (12, 49152 * 4)
                    else "",
                )
                for size in (4096, 12, 32768, 49152, 196608, 1048576, 20000, 11)
            ],
            _THREE,
        ),
    ),
    Exercise(
        "im2col",
        "a convolution written as a matrix product",
        differential(
            im2col,
            _im2col_cases,
            "row (c, i, j) holds what kernel element (c, i, j) meets at each of (H - kh + 1) x (W - kw + 1) outputs",
            tolerance=1e-5,
        ),
    ),
)
