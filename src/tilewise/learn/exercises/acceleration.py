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
from tilewise.learn.differential import Example, Mistakes, differential


class _Watched:
    """Matrix wrapper that records what is read from it, and the largest block read by one index operation."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values, self.shape, self.dtype, self.largest = values, values.shape, values.dtype, 0
        self.ndim, self.keys = 2, []  # type: int, list[str]

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, key: Any) -> Any:
        piece = self.values[key]
        self.keys.append(repr(key))
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
    """Check the exercise `blocked_matmul`: the result, and that it reads blocks of the right size."""
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
    a, keys = np.ones((10, 10)), []
    for block in (3, 5):
        watched = _Watched(a), _Watched(a)
        answer(*watched, block)
        keys.append([matrix.keys for matrix in watched])
    if keys[0] == keys[1]:
        raise Wrong("the block is ignored: with blocks of 3 and of 5, it reads the same numbers in the same order")


def _product_cases() -> list[Example]:
    """Return test inputs for `blocked_matmul`, with a remark on what is special about each."""
    rng = np.random.default_rng(0)
    sizes = {
        (8, 8, 8, 4): "for square matrices",
        (16, 24, 32, 8): "for matrices that are not square",
        (7, 5, 11, 4): "where the last blocks are smaller",
        (3, 3, 3, 8): "where the block is larger than the matrices",
        (1, 9, 20, 4): "for one row",
        (5, 9, 6, 2): "where a row has more numbers than a block",
    }
    return [
        Example((rng.standard_normal((m, k)), rng.standard_normal((k, n)), block), about)
        for (m, n, k, block), about in sizes.items()
    ]


def _draw_product(rng: np.random.Generator) -> tuple[Any, Any, int]:
    m, k, n, block = map(int, rng.integers((1, 1, 1, 2), (10, 10, 10, 7)))
    return rng.standard_normal((m, k)), rng.standard_normal((k, n)), block


def _last_block_only(a: Any, b: Any, block: int) -> Any:
    start = (a.shape[1] - 1) // block * block
    return a[:, start:] @ b[start:]


def _blockwise(a: Any, b: Any, block: int, product: Callable[[Any, Any], Any], exchange: bool = False) -> Any:
    """Combine blocks with another product, or with the blocks of b at exchanged indices."""
    out = np.zeros((a.shape[0], b.shape[1]))
    starts = (range(0, size, block) for size in (*a.shape, b.shape[1]))
    for i, k, j in itertools.product(*starts):
        row, column = (j, k) if exchange else (k, j)
        b_block = b[row : row + block, column : column + block]
        out[i : i + block, j : j + block] += product(a[i : i + block, k : k + block], b_block)
    return out


MISTAKES: dict[str, Mistakes] = {
    "blocked_matmul": [
        ("a sum over k is kept only in part: use +=", _last_block_only),
        ("the first block of k is not all: use +=", lambda a, b, block: a[:, :block] @ b[:block]),
        (
            "it is a product of elements, not a matrix product (@)",
            lambda a, b, block: _blockwise(a, b, block, np.multiply),
        ),
        (
            "b is read transposed: its block starts at row k",
            lambda a, b, block: _blockwise(a, b, block, np.matmul, True),
        ),
        (
            "the later rows stay zero: return after all loops",
            lambda a, b, block: np.vstack([a[:block] @ b, 0 * a[block:] @ b]),
        ),
    ],
    "largest_block": [
        ("that is the first size that does not fit: round down", lambda size: math.isqrt(size // 12) + 1),
        ("the largest of all sizes is asked for, not of multiples of 8", lambda size: math.isqrt(size // 12) // 8 * 8),
        ("a float32 number takes 4 bytes, not 8, and the whole cache is filled", lambda size: math.isqrt(size // 24)),
        ("the size is in bytes, not bits: there is no factor of 8", lambda size: math.isqrt(8 * size // 12)),
        ("the size is in bytes, not bits: there is no factor of 8", lambda size: math.isqrt(size // 96)),
        ("the size is in bytes, not KiB", lambda size: math.isqrt(1024 * size // 12)),
        ("that is the number of elements of a block: its side is the root", lambda size: size // 12),
        ("the side of a block is the square root, not the cube root", lambda size: int((size / 12) ** (1 / 3) + 1e-6)),
        ("not even one number of each fits, so it is 0", lambda size: max(1, math.isqrt(size // 12))),
    ],
    "im2col": [
        ("positions go row by row, (0, 0), (0, 1), ...", lambda x, kh, kw: _columns(x, kh, kw, (0, 3, 4, 2, 1))),
        ("the last row and column of outputs are missing", lambda x, kh, kw: _columns(x[:, :-1, :-1], kh, kw)),
    ],
}

_check_product = differential(
    blocked_matmul,
    _product_cases,
    _draw_product,
    "start from zeros; blocks at the border are smaller, and every k block adds to what is there, once",
    tolerance=1e-4,
    mistakes=MISTAKES["blocked_matmul"],
)


def largest_block(cache_bytes: int) -> int:
    return math.isqrt(cache_bytes // 12)


def _draw_cache(rng: np.random.Generator) -> tuple[int]:
    """Draw a size within a byte of one that the blocks fill, or any."""
    block = int(10 ** rng.uniform(0.5, 3.5))
    return (12 * block**2 + int(rng.integers(-1, 2)) if rng.random() < 0.5 else block**2,)


_THREE = "three square float32 blocks (of a, b and c) must fit together, and the side of one is asked for"


def im2col(x: Any, kh: int, kw: int) -> Any:
    return _columns(x, kh, kw)


def _columns(x: Any, kh: int, kw: int, order: tuple[int, ...] = (0, 3, 4, 1, 2)) -> Any:
    """Arrange convolution windows as columns with axes (C, H', W', kh, kw) in the right or another order."""
    windows = np.lib.stride_tricks.sliding_window_view(x, (kh, kw), axis=(1, 2))  # (C, H', W', kh, kw)
    return windows.transpose(order).reshape(len(x) * kh * kw, -1)


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


def _draw_image(rng: np.random.Generator) -> tuple[Any, int, int]:
    channels, kh, kw = map(int, rng.integers(1, 5, 3))
    return rng.standard_normal((channels, *rng.integers((kh, kw), (kh + 5, kw + 5)))), kh, kw


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
            _draw_cache,
            _THREE,
            mistakes=MISTAKES["largest_block"],
        ),
    ),
    Exercise(
        "im2col",
        "a convolution written as a matrix product",
        differential(
            im2col,
            _im2col_cases,
            _draw_image,
            "row (c, i, j) holds what kernel element (c, i, j) meets at each of (H - kh + 1) x (W - kw + 1) outputs",
            tolerance=1e-5,
            mistakes=MISTAKES["im2col"],
        ),
    ),
)
