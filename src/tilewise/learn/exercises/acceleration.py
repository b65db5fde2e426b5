"""Checks of the acceleration lesson: a block that is obeyed, one that fits a cache, a convolution as a product.

The matrices handed to `blocked_matmul` notice what is read from them at once, so a block that is only a name is found
out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise.learn.checking import Exercise, Wrong, require, same_array, same_number


class _Watched:
    """A matrix that remembers the largest piece taken from it in one go."""

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


def _blocked(answer: Callable[..., Any]) -> None:
    """Check the exercise `blocked_matmul`."""
    rng = np.random.default_rng(0)
    for m, n, k, block in ((8, 8, 8, 4), (16, 24, 32, 8), (7, 5, 11, 4), (3, 3, 3, 8), (1, 9, 20, 4)):
        a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
        watched = _Watched(a), _Watched(b)
        call = f"blocked_matmul of {m}x{k} and {k}x{n} in blocks of {block}"
        result = answer(*watched, block)
        half = result if getattr(result, "dtype", None) == np.float16 else np.nan
        same_array(
            result,
            a @ b,
            call,
            "start from zeros; blocks at the border are smaller, and every k block adds to what is there, once",
            mistakes=((half, "the sums are rounded to 16 bits: keep them in float32 at least"),),
        )
        for name, matrix in zip("ab", watched, strict=True):
            feedback = (
                f"{call} took {matrix.largest} numbers of {name} at once, and a block has {block * block}: the block "
                "is ignored, so nothing stays in the cache"
            )
            require(matrix.largest <= block * block, feedback)


def _largest_block(answer: Callable[..., Any]) -> None:
    """Check the exercise `largest_block`."""
    for cache_bytes in (4096, 12, 32768, 49152, 1048576, 11):
        right = max(b for b in range(1000) if 3 * b * b * 4 <= cache_bytes)
        hint = "three square float32 blocks (of a, b and c) must fit together"
        if not right:
            hint = "not even one number of each fits, so the largest block is 0"
        exact = (cache_bytes / 12) ** 0.5
        mistakes = (
            (exact, "a block has a whole number of rows: round down"),
            (right + 1, "round down, or the blocks do not fit" if right else hint),
            (right - 1, "blocks that fill the cache exactly fit too"),
            (2 ** int(np.log2(right or 1)), "the largest of all sizes is asked for, not the largest power of two"),
            (int((cache_bytes / 3) ** 0.5), "a float32 number takes 4 bytes"),
            (cache_bytes // 12, "that is the number of elements of a block: its side is the root"),
        )
        same_number(answer(cache_bytes), right, f"largest_block({cache_bytes})", hint, mistakes=mistakes)


def _im2col(answer: Callable[..., Any]) -> None:
    """Check the exercise `im2col`."""
    rng = np.random.default_rng(1)
    for channels, height, width, kh, kw in ((1, 4, 4, 2, 2), (3, 6, 5, 3, 3), (2, 5, 7, 1, 1), (2, 6, 5, 3, 2)):
        x, w = rng.standard_normal((channels, height, width)), rng.standard_normal((4, channels, kh, kw))
        windows = np.lib.stride_tricks.sliding_window_view(x, (kh, kw), axis=(1, 2))  # (C, H', W', kh, kw)
        right = windows.transpose(0, 3, 4, 1, 2).reshape(channels * kh * kw, -1)
        call = f"im2col of {x.shape} for a {kh}x{kw} kernel"
        columns = answer(x, kh, kw)
        flipped = windows[..., ::-1, ::-1].transpose(0, 3, 4, 1, 2).reshape(right.shape)
        by_position = windows.transpose(3, 4, 0, 1, 2).reshape(right.shape)
        mistakes = (
            (flipped, "the kernel is not flipped: row (c, i, j) starts at pixel (i, j)"),
            (by_position, "the channel comes first: rows are ordered (c, i, j)"),
        )
        hint = (
            "row (c, i, j) holds what kernel element (c, i, j) meets at each of the (H - kh + 1) x (W - kw + 1) outputs"
        )
        same_array(columns, right, call, hint, mistakes=mistakes)
        same_array(w.reshape(4, -1) @ columns, w.reshape(4, -1) @ right, call, "the product is then the convolution")


EXERCISES = (
    Exercise("blocked_matmul", "a matrix product that works on blocks, borders included", _blocked),
    Exercise("largest_block", "the largest block that fits a cache", _largest_block),
    Exercise("im2col", "a convolution written as a matrix product", _im2col),
)
