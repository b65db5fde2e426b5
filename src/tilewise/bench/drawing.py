"""Draws questions that nobody can have answered before: transformed digits, and prompts spliced from a text.

Digits are rotated, scaled, sheared and moved by random small amounts, then noise is added. On such images of the
training part the shipped models are right about as often as on the held-out images, and an entry loses about as much:
an entry that has learned the held-out images gains nothing on them. Prompts are spliced from pieces of the text and
some characters are replaced, so that there are far too many for a table of answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
# Standard deviations of rotation (radians), log scale, shear and noise (pixels go from 0 to 1), and the largest shift
# in pixels. With these the shipped mlp is right on 98.6 % of transformed training images, and on 98.3 % of the held-out
# ones as they are.
_ROTATION, _LOG_SCALE, _SHEAR, _NOISE, _SHIFT = 0.05, 0.03, 0.03, 0.03, 0.3
_LONGEST_PERIOD, _MOST_REPEATED = 64, 16  # tokens; see ends_in_a_loop
# Characters replaced in a prompt (one already makes a table of windows useless), and prompts drawn for each one without
# a loop (about one in six has none).
_REPLACED_CHARACTERS, _TRIES = 3, 16


def transformed_digits(images: Array, rng: np.random.Generator) -> Array:
    """Return the images (N, …, 8, 8) slightly rotated, scaled, sheared and moved, with noise, in float32."""
    count, (height, width) = len(images), images.shape[-2:]
    angle, shear = rng.normal(0, _ROTATION, count), rng.normal(0, _SHEAR, count)
    scale = np.exp(rng.normal(0, _LOG_SCALE, (count, 2)))
    cosine, sine = np.cos(angle), np.sin(angle)
    matrices = np.empty((count, 2, 2))  # rotation times (scale and shear)
    matrices[:, 0] = np.stack([cosine * scale[:, 0], cosine * shear - sine * scale[:, 1]], 1)
    matrices[:, 1] = np.stack([sine * scale[:, 0], sine * shear + cosine * scale[:, 1]], 1)
    centre = np.array([(height - 1) / 2, (width - 1) / 2])
    grid = np.stack(np.meshgrid(np.arange(height), np.arange(width), indexing="ij"), -1) - centre  # (H, W, 2)
    positions = np.einsum("nij,hwj->nhwi", matrices, grid) + centre  # (N, H, W, 2)
    positions += rng.uniform(-_SHIFT, _SHIFT, (count, 1, 1, 2))
    samples = _bilinear(images.reshape(count, height, width), positions[..., 0], positions[..., 1])
    noisy: Array = np.clip(samples + rng.normal(0, _NOISE, samples.shape), 0, 1).astype(np.float32)
    return noisy.reshape(images.shape)


def _bilinear(images: Array, rows: Array, columns: Array) -> Array:
    """Sample images (N, H, W) at fractional positions (N, H, W); pixels outside of an image are 0."""
    padded = np.pad(images, ((0, 0), (1, 2), (1, 2)))
    rows = np.clip(rows + 1, 0, images.shape[1] + 0.999)
    columns = np.clip(columns + 1, 0, images.shape[2] + 0.999)
    row, column = rows.astype(np.int64), columns.astype(np.int64)
    down, right = rows - row, columns - column
    image = np.arange(len(images))[:, None, None]
    upper = (1 - right) * padded[image, row, column] + right * padded[image, row, column + 1]
    lower = (1 - right) * padded[image, row + 1, column] + right * padded[image, row + 1, column + 1]
    sampled: Array = (1 - down) * upper + down * lower
    return sampled


def spliced_prompts(text: Array, length: int, rng: np.random.Generator, count: int) -> Array:
    """Draw prompts (count, length) of token ids, each from two or three pieces of the text with some replaced."""
    prompts = np.empty((count, length), np.int64)
    for prompt in prompts:
        cuts = np.sort(rng.choice(np.arange(length // 4, length), int(rng.integers(1, 3)), replace=False))
        for first, last in zip([0, *cuts], [*cuts, length], strict=True):
            start = int(rng.integers(0, len(text) - length))
            prompt[first:last] = text[start : start + last - first]
        replaced = rng.choice(length, min(_REPLACED_CHARACTERS, length), replace=False)
        prompt[replaced] = text[rng.integers(0, len(text), len(replaced))]
    return prompts


def ends_in_a_loop(tokens: Array) -> bool:
    """Tell whether the last 16 tokens repeat earlier ones with a period of at most 64 tokens.

    Greedy generation often falls into a loop. A program that notices it could repeat the loop without computing.
    """
    for period in range(1, min(_LONGEST_PERIOD, len(tokens) - 1) + 1):
        differences = np.flatnonzero(tokens[period:] != tokens[:-period])
        repeated = len(tokens) - period - (int(differences[-1]) + 1 if len(differences) else 0)
        if repeated >= _MOST_REPEATED:
            return True
    return False


def prompts_without_loops(draw: Callable[[int], Array], answer: Callable[[Array], Array], count: int) -> Array:
    """Draw `count` prompts whose answers do not end in a loop; after many tries, the number is completed with any.

    >>> prompts_without_loops(lambda n: np.zeros((n, 4), int), lambda prompt: np.arange(99), 2).shape
    (2, 4)
    """
    good: list[Array] = []
    others: list[Array] = []
    while len(good) < count and len(others) < _TRIES * count:
        prompt = draw(1)[0]
        (others if ends_in_a_loop(answer(prompt)) else good).append(prompt)
    return np.stack((good + others)[:count])
