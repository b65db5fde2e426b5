"""Draw random matrix products like those of language and vision models, on which the family `product` is trained.

Five kinds alternate: decoding (few rows), prefill and training (many), square, skinny (one size small, K often long)
and odd (rows that are not multiples of 16 bytes). Every seed gives other sizes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

from tilewise.store.problem import Problem

_WIDTHS = (512, 640, 768, 1024, 1152, 1280, 1536, 1792, 2048, 2304, 2560, 2880, 3072, 3584, 4096, 4608, 5120, 5632,
           6144, 6656, 7168, 8192, 9216, 10240, 11008, 12288, 13824, 14336, 16384)  # fmt: skip
_MAX_MULTIPLICATIONS = 6e11  # about two milliseconds on an H200
_MAX_ELEMENTS = 4e8  # of one matrix: 800 MB in bf16
Sizes = tuple[int, int, int]


def _log_uniform(chance: random.Random, low: float, high: float, step: int = 1) -> int:
    size = low * math.exp(math.log(high / low) * chance.random())
    return max(step, round(size / step) * step)


def _width(chance: random.Random) -> int:
    return chance.choice(_WIDTHS) if chance.random() < 0.7 else _log_uniform(chance, 256, 16384, 8)


def _decode(chance: random.Random) -> Sizes:
    return _log_uniform(chance, 1, 128), _width(chance), _width(chance)


def _prefill(chance: random.Random) -> Sizes:
    step = chance.choice((1, 8, 64, 128, 256))
    return _log_uniform(chance, 128, 16384, step), _width(chance), _width(chance)


def _square(chance: random.Random) -> Sizes:
    side = _log_uniform(chance, 192, 8192, chance.choice((8, 64, 128, 256)))
    return side, side, side


def _skinny(chance: random.Random) -> Sizes:
    sizes = [_log_uniform(chance, 16, 768, 8), _log_uniform(chance, 256, 8192, 8), _log_uniform(chance, 2048, 65536, 8)]
    if chance.random() < 0.5:
        chance.shuffle(sizes)
    return sizes[0], sizes[1], sizes[2]


def _odd(chance: random.Random) -> Sizes:
    sizes = [_log_uniform(chance, 64, 6000) for _ in range(3)]
    sizes[chance.randrange(3)] |= 1
    return sizes[0], sizes[1], sizes[2]


KINDS: dict[str, Callable[[random.Random], Sizes]] = {
    "decode": _decode, "prefill": _prefill, "square": _square, "skinny": _skinny, "odd": _odd,
}  # fmt: skip


def drawn_products(seed: int) -> Iterator[tuple[str, Problem]]:
    """Yield kinds and problems without end: mostly PyTorch's Linear (nt), mostly bf16, sometimes with an epilogue."""
    chance = random.Random(seed)
    while True:
        for kind, draw in KINDS.items():
            m, n, k = draw(chance)
            while m * n * k > _MAX_MULTIPLICATIONS or max(m * n, n * k, m * k) > _MAX_ELEMENTS:
                m, n, k = draw(chance)
            layout = chance.choices(("nt", "nn", "tn", "tt"), (70, 16, 11, 3))[0]
            dtype = chance.choices(("bf16", "fp16"), (80, 20))[0]
            plain = layout != "nt" or dtype != "bf16"
            weights = (1, 0, 0, 0, 0) if plain else (82, 9, 2, 4, 3)
            epilogue = chance.choices(("none", "bias", "bias_relu", "bias_gelu", "residual"), weights)[0]
            yield kind, Problem.of("product", dtype=dtype, m=m, n=n, k=k, layout=layout, epilogue=epilogue)
