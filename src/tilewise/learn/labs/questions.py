"""Questions of the labs: each draws its sizes, says what to predict, and measures it on this machine.

Sizes are drawn for each student, machine and attempt, so that neither answers nor keys can be copied. A question whose
answer is a time also asks for its limit: "compute", "memory" or "overhead", judged by this machine's roofline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tilewise import Tensor, get_num_threads, no_grad, set_num_threads

Sizes = dict[str, Any]
LIMITS = ("compute", "memory", "overhead")
_ROUNDS = 9  # samples of each function; their minimum counts, because load on the machine only adds time


@dataclass(frozen=True)
class Question:
    """A quantity to predict and measure: seconds, a factor (unit "×"), or the best of several choices ("choice")."""

    name: str
    text: str
    unit: str
    draw: Callable[[np.random.Generator], Sizes]
    measure: Callable[[Sizes], Any]
    work: Callable[[Sizes], tuple[float, float]] | None = None  # FLOPs and bytes, where a limit is asked for

    def wording(self, sizes: Sizes) -> str:
        return self.text.format(**sizes)


def fastest(*functions: Callable[[], Any]) -> list[float]:
    """Time functions interleaved on one thread; return the minimum seconds of each."""
    from tilewise.profile.timing.clock import time_interleaved

    threads = get_num_threads()
    set_num_threads(1)
    try:
        with no_grad():
            once = [max(min(times), 1e-7) for times in time_interleaved(functions, 2)]
            calls = [max(1, round(2e-3 / seconds)) for seconds in once]  # samples of about 2 ms
            return [min(times) for times in time_interleaved(functions, _ROUNDS, calls=calls)]
    finally:
        set_num_threads(threads)


def _floats(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def _pick(rng: np.random.Generator, values: Sequence[Any]) -> Any:
    return values[int(rng.integers(len(values)))]


def _product_seconds(sizes: Sizes) -> float:
    """Return the minimum seconds of a matrix product of the sizes m, n and k."""
    from tilewise.backend import OptimizedBackend

    a, b, run = _floats(sizes["m"], sizes["k"]), _floats(sizes["k"], sizes["n"]), OptimizedBackend().dispatch
    return fastest(lambda: run("matmul", a, b))[0]


def _product_work(sizes: Sizes) -> tuple[float, float]:
    m, n, k = (sizes[name] for name in "mnk")
    return 2.0 * m * n * k, 4.0 * (m * k + k * n + m * n)


def _copy_seconds(sizes: Sizes) -> float:
    """Return the minimum seconds of copying `mib` MiB of memory."""
    source = np.ones(sizes["mib"] << 18, np.float32)
    target = np.empty_like(source)
    return fastest(lambda: np.copyto(target, source))[0]


def _loops_gain(sizes: Sizes) -> float:
    """Return how many times faster the best n × n product is than blocked loops."""
    from tilewise.backend import OptimizedBackend, matmul_blocked

    a, b, run = _floats(sizes["n"], sizes["n"]), _floats(sizes["n"], sizes["n"]), OptimizedBackend().dispatch
    loops, best = fastest(lambda: matmul_blocked(a, b), lambda: run("matmul", a, b))
    return loops / best


def _int8_gain(sizes: Sizes) -> float:
    """Return how many times faster an int8 linear layer is than the float32 one."""
    from tilewise import nn
    from tilewise.quantize import QuantizedLinear

    linear, x = nn.Linear(sizes["n"], sizes["n"], rng=0), Tensor(_floats(sizes["batch"], sizes["n"]))
    quantized = QuantizedLinear.from_float(linear)
    dense, int8 = fastest(lambda: linear(x), lambda: quantized(x))
    return dense / int8


def _sparse_gain(sizes: Sizes) -> float:
    """Return how many times faster a sparse linear layer is than the dense one."""
    from tilewise import nn
    from tilewise.prune import MagnitudePruner, SparseLinear

    linear, x = nn.Linear(sizes["n"], sizes["n"], rng=0), Tensor(_floats(sizes["batch"], sizes["n"]))
    linear.weight.data[...] = MagnitudePruner().prune(linear.weight.data, sizes["percent"] / 100)
    sparse = SparseLinear.from_dense(linear, always_sparse=True)
    dense_s, sparse_s = fastest(lambda: linear(x), lambda: sparse(x))
    return dense_s / sparse_s


def _cache_gain(sizes: Sizes) -> float:
    """Return how many times faster text generation is with a KV cache."""
    from tilewise import data, models
    from tilewise.generate import generate

    model, prompt, tokens = models.pretrained("gpt"), data.encode("import "), sizes["tokens"]
    without, cached = fastest(
        lambda: list(generate(model, prompt, tokens, use_cache=False)), lambda: list(generate(model, prompt, tokens))
    )
    return without / cached


def _batch_gain(sizes: Sizes) -> float:
    """Return how many times faster a batch is than the same images one by one."""
    from tilewise import models

    model, images = models.pretrained("cnn"), _floats(sizes["batch"], 1, 8, 8)
    one, many = Tensor(images[:1]), Tensor(images)
    single, batch = fastest(lambda: model(one), lambda: model(many))
    gain: float = single * sizes["batch"] / batch
    return gain


def _draw_tiles(rng: np.random.Generator) -> Sizes:
    """Draw a matrix size and four tiles (three block sizes each) for a question."""
    n = _pick(rng, (192, 256, 320, 384))
    tiles = [[_pick(rng, (4, 8, 16, 32, 64, 128, 256)) for _ in range(3)] for _ in range(4)]
    return {"n": n, "tiles": tiles}


def _tile_seconds(sizes: Sizes) -> list[float]:
    """Return the seconds of the blocked product with each of the drawn tiles."""
    from tilewise.backend import matmul_blocked

    a, b = _floats(sizes["n"], sizes["n"]), _floats(sizes["n"], sizes["n"])
    return fastest(*(partial(matmul_blocked, a, b, tuple(tile)) for tile in sizes["tiles"]))


def _tile_spread(sizes: Sizes) -> float:
    seconds = _tile_seconds(sizes)
    return max(seconds) / min(seconds)


def _square(rng: np.random.Generator) -> Sizes:
    n = _pick(rng, (256, 320, 384, 448, 512, 640))
    return {"m": n, "n": n, "k": n}


QUESTIONS: dict[str, tuple[Question, ...]] = {
    "profiling": (
        Question(
            "product_time",
            "How many seconds does one thread take for a float32 product of {m}×{k} and {k}×{n}?",
            "s",
            _square,
            _product_seconds,
            _product_work,
        ),
        Question(
            "copy_time",
            "How many seconds does copying {mib} MiB take?",
            "s",
            lambda rng: {"mib": _pick(rng, (32, 48, 64, 96))},
            _copy_seconds,
            lambda sizes: (0.0, 2.0 * (sizes["mib"] << 20)),
        ),
    ),
    "acceleration": (
        Question(
            "loops_gain",
            "By what factor is the fastest product of two {n}×{n} matrices faster than the loops of matmul_blocked?",
            "×",
            lambda rng: {"n": _pick(rng, (128, 192, 256, 384))},
            _loops_gain,
        ),
        Question(
            "vector_time",
            "How many seconds does one thread take for a matrix of {k}×{n} times one vector?",
            "s",
            lambda rng: {"m": 1, "n": _pick(rng, (2048, 3072, 4096)), "k": _pick(rng, (3072, 4096))},
            _product_seconds,
            _product_work,
        ),
    ),
    "quantization": (
        Question(
            "int8_gain",
            "By what factor is an INT8 linear layer of {n}×{n} faster than a float32 one, for {batch} rows?",
            "×",
            lambda rng: {"n": _pick(rng, (512, 768, 1024, 2048)), "batch": _pick(rng, (1, 16, 64, 128))},
            _int8_gain,
        ),
    ),
    "pruning": (
        Question(
            "sparse_gain",
            "By what factor is a linear layer of {n}×{n} faster with {percent} % zeros skipped, for {batch} rows?",
            "×",
            lambda rng: {
                "n": _pick(rng, (512, 1024, 2048)),
                "percent": _pick(rng, (50, 70, 80, 90, 95)),
                "batch": _pick(rng, (1, 64)),
            },
            _sparse_gain,
        ),
    ),
    "caching": (
        Question(
            "cache_gain",
            "By what factor does a KV cache speed up the shipped gpt that writes {tokens} characters?",
            "×",
            lambda rng: {"tokens": _pick(rng, (24, 40, 64, 96))},
            _cache_gain,
        ),
    ),
    "benchmarking": (
        Question(
            "batch_gain",
            "How many times as many images per second does the cnn classify in batches of {batch} as one by one?",
            "×",
            lambda rng: {"batch": _pick(rng, (4, 16, 64, 128))},
            _batch_gain,
        ),
    ),
    "costmodel": (
        Question(
            "best_tile",
            "Which of the blocks {tiles} (0 to 3) makes matmul_blocked of two {n}×{n} matrices fastest?",
            "choice",
            _draw_tiles,
            _tile_seconds,
        ),
        Question(
            "tile_spread",
            "By what factor is the slowest of the blocks {tiles} slower than the fastest, for {n}×{n} matrices?",
            "×",
            _draw_tiles,
            _tile_spread,
        ),
    ),
}
