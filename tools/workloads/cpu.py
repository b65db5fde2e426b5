"""Programs whose kernels are measured on a CPU: shapes that people run, and random shapes around them.

Products come from transformer blocks of one to a few hundred tokens, squares and their odd neighbours, thin and long
matrices, dense stacks, and random sizes, uniform in their logarithms. Convolutions come from ResNets, MobileNets (the
pointwise ones), VGG and the package's own networks, at the sizes of their images. Integer products are of the same
kinds. Every product has a layout and an epilogue that it has in practice. Large ones are also measured with several
threads. The split of a shape depends on the shape alone and is the same on every machine.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator

from tilewise.store.problem import Kernel, Problem
from tilewise.tune.families.cpu.conv2d import multiplications

MIN_MULTIPLICATIONS = 2e5
MAX_MULTIPLICATIONS = 1.1e9
LARGE = 2e8  # multiplications: of larger products every third is measured on one thread
MAX_OPERAND = 17 << 20  # elements
INT8_SPEED = 4  # an integer product takes about a quarter of the time
# Multiplications from which a product is measured with so many threads, and the largest that is measured at all.
SHARED = {2: 4e6, 4: 1.6e7, 16: 6e7}
MAX_SHARED = 9e9
# (width, hidden) of transformer blocks, and the tokens they see at once.
_BLOCKS = {
    "gpt2": (768, 3072), "bert_large": (1024, 4096), "tinyllama": (2048, 5632), "llama": (4096, 4096),
    "vit_small": (384, 1536), "reference_gpt": (128, 512),
}  # fmt: skip
_TOKENS = {
    "gpt2": (2, 16, 77, 128, 512), "bert_large": (1, 32, 197), "tinyllama": (4, 24), "llama": (1, 8, 64),
    "vit_small": (50, 197), "reference_gpt": (64, 512),
}  # fmt: skip
_SQUARES = (96, 128, 192, 256, 384, 512, 640, 768, 896, 1024)
_ODD = (101, 127, 199, 255, 257, 333, 500, 511, 513, 700, 1000, 1023)
_SHARED_SQUARES = (1280, 1536, 1792, 2048)  # for several threads
_THIN = (
    (8, 1024, 1024), (16, 4096, 512), (24, 2048, 768), (2048, 16, 512), (4096, 64, 64), (1500, 10, 784),
    (64, 64, 8192), (32, 48, 20000), (1024, 1024, 32), (2000, 300, 17), (3136, 64, 147), (784, 512, 128),
    (12544, 32, 27), (100, 1000, 2048), (7, 513, 1500), (640, 13, 3000),
)  # fmt: skip
_STACKS = {
    "dlrm": (128, (512, 256, 64, 16)),
    "autoencoder": (64, (784, 512, 128, 32)),
    "reference_mlp": (256, (64, 256, 128, 10)),
}
# Convolutions: channels, height (= width), filters, kernel, stride.
_CONVOLUTIONS = {
    "resnet": (
        (3, 224, 64, 7, 2), (64, 56, 64, 3, 1), (64, 56, 64, 1, 1), (64, 56, 256, 1, 1), (256, 56, 64, 1, 1),
        (64, 56, 128, 3, 2), (128, 28, 128, 3, 1), (128, 28, 512, 1, 1), (512, 28, 128, 1, 1), (256, 28, 256, 3, 2),
        (256, 14, 256, 3, 1), (256, 14, 1024, 1, 1), (1024, 14, 256, 1, 1), (512, 14, 512, 3, 2), (512, 7, 512, 3, 1),
        (2048, 7, 512, 1, 1), (256, 56, 512, 1, 2),
    ),
    "mobilenet": (
        (3, 224, 32, 3, 2), (32, 112, 16, 1, 1), (16, 112, 96, 1, 1), (24, 56, 144, 1, 1), (144, 28, 32, 1, 1),
        (192, 14, 64, 1, 1), (96, 14, 576, 1, 1), (160, 7, 960, 1, 1), (320, 7, 1280, 1, 1),
    ),
    "vgg": ((3, 96, 64, 3, 1), (64, 64, 64, 3, 1), (128, 40, 128, 3, 1), (256, 28, 256, 3, 1), (512, 14, 512, 3, 1)),
    "reference_vgg6": ((3, 32, 64, 3, 1), (64, 32, 64, 3, 1), (64, 16, 128, 3, 1), (128, 16, 128, 3, 1),
                       (128, 8, 256, 3, 1), (256, 8, 256, 3, 1)),
    "reference_resnet8": ((16, 32, 16, 3, 1), (16, 32, 32, 3, 2), (32, 16, 32, 3, 1), (32, 16, 64, 3, 2),
                          (64, 8, 64, 3, 1), (32, 16, 64, 1, 2)),
    "unet": ((160, 32, 160, 3, 1), (320, 16, 320, 3, 1), (320, 16, 160, 1, 1), (48, 26, 64, 5, 1)),
}  # fmt: skip
_BATCHES = {"reference_vgg6": (1, 16), "reference_resnet8": (1, 32), "vgg": (1, 2)}
_EPILOGUES = ("none", "bias", "bias_relu", "bias_gelu", "residual")
_CONV_EPILOGUES = ("bias_relu", "none", "residual")
_INT8_EPILOGUES = ("none", "bias", "bias_relu", "requantize")
# Numbers of random problems of each kind.
_RANDOM_PRODUCTS, _RANDOM_BATCHES, _RANDOM_CONVOLUTIONS, _RANDOM_INT8 = 90, 14, 20, 30


def _product(m: int, n: int, k: int, epilogue: str = "none", layout: str = "nn", threads: int = 1) -> Problem:
    return Problem.of("matmul", dtype="fp32", m=m, n=n, k=k, epilogue=epilogue, layout=layout, threads=threads)


def _int8_product(m: int, n: int, k: int, epilogue: str) -> Problem:
    return Problem.of("int8_matmul", dtype="int8", m=m, n=n, k=k, epilogue=epilogue, threads=1)


def _convolution(
    batch: int, channels: int, size: int, filters: int, kernel: int, stride: int, epilogue: str
) -> Problem:
    return Problem.of(
        "conv2d", dtype="fp32", batch=batch, channels=channels, height=size, width=size, filters=filters,
        kernel=kernel, stride=stride, padding=kernel // 2, epilogue=epilogue, threads=1,
    )  # fmt: skip


def _transformer(width: int, hidden: int, tokens: int) -> Iterator[Problem]:
    """Yield a block's dense layers; for longer sequences also one layer's gradients of input and weights."""
    yield _product(tokens, 3 * width, width, "bias", "nt")
    yield _product(tokens, width, width, "residual", "nt")
    yield _product(tokens, hidden, width, "bias_gelu", "nt")
    yield _product(tokens, width, hidden, "residual", "nt")
    if tokens >= 64:
        yield _product(tokens, width, 3 * width, "none", "nn")
        yield _product(width, width, tokens, "none", "tn")


def _squares() -> Iterator[Problem]:
    for number, size in enumerate((*_SQUARES, *_ODD, *_SHARED_SQUARES)):
        yield _product(size, size, size)
        if number % 3 == 0:
            yield _product(size, size, size, "bias", "nt")


def _size(chance: random.Random, low: int, high: int) -> int:
    """Draw a size, uniform in its logarithm; half of the larger ones are multiples of eight, as people choose them."""
    size = round(float(low * (high / low) ** chance.random()))
    return size // 8 * 8 if size >= 32 and chance.random() < 0.5 else max(low, size)


def _random_products(seed: int, count: int) -> Iterator[Problem]:
    chance = random.Random(seed)
    for _ in range(count):
        m, n, k = _size(chance, 3, 2048), _size(chance, 8, 4096), _size(chance, 8, 4096)
        yield _product(m, n, k, chance.choice(_EPILOGUES), chance.choice(("nn", "nn", "nt", "nt", "tn", "tt")))


def _random_batches(seed: int, count: int) -> Iterator[Problem]:
    chance = random.Random(seed)
    for _ in range(count):
        sizes = {"batch": _size(chance, 2, 48), "m": _size(chance, 8, 256), "n": _size(chance, 8, 256)}
        layout = chance.choice(("nn", "nt", "tn"))
        yield Problem.of(
            "batched_matmul", dtype="fp32", **sizes, k=_size(chance, 8, 256), epilogue="none", layout=layout, threads=1
        )


def _random_convolutions(seed: int, count: int) -> Iterator[Problem]:
    chance = random.Random(seed)
    for _ in range(count):
        kernel, size = chance.choice((1, 1, 3, 3, 3, 5)), _size(chance, 7, 112)
        channels, filters = _size(chance, 8, 512), _size(chance, 16, 512)
        stride, batch = chance.choice((1, 1, 1, 2)), chance.choice((1, 1, 4))
        yield _convolution(batch, channels, size, filters, kernel, stride, epilogue=chance.choice(_CONV_EPILOGUES))


def _random_int8_products(seed: int, count: int) -> Iterator[Problem]:
    chance = random.Random(seed)
    for _ in range(count):
        sizes = _size(chance, 1, 2048), _size(chance, 16, 4096), _size(chance, 16, 4096)
        yield _int8_product(*sizes, chance.choice(_INT8_EPILOGUES))


def _networks(name: str) -> Iterator[tuple[str, Iterable[Problem]]]:
    for batch in _BATCHES.get(name, (1,)):
        layers = enumerate(_CONVOLUTIONS[name])
        yield f"{name}_conv_b{batch}", [_convolution(batch, *layer, _CONV_EPILOGUES[i % 3]) for i, layer in layers]


def _stack(batch: int, widths: tuple[int, ...]) -> Iterator[Problem]:
    for inner, columns in itertools.pairwise(widths):
        yield _product(batch, columns, inner, "bias_relu", "nt")
        yield _product(batch, inner, columns, "none", "nn")


def _int8_blocks(name: str) -> Iterator[Problem]:
    width, hidden = _BLOCKS[name]
    for number, tokens in enumerate(_TOKENS[name]):
        yield _int8_product(tokens, hidden, width, _INT8_EPILOGUES[number % 4])
        yield _int8_product(tokens, width, hidden, "bias")


def _all_programs() -> Iterator[tuple[str, Iterable[Problem]]]:
    """Yield every program with its problems, in the order in which shapes are assigned to programs."""
    for name, (width, hidden) in _BLOCKS.items():
        for tokens in _TOKENS[name]:
            yield f"{name}_t{tokens}", _transformer(width, hidden, tokens)
    yield "squares", _squares()
    yield "thin", [_product(*sizes, layout=("nn", "nt")[i % 2]) for i, sizes in enumerate(_THIN)]
    for name, (batch, widths) in _STACKS.items():
        yield f"{name}_b{batch}", _stack(batch, widths)
    for name in _CONVOLUTIONS:
        yield from _networks(name)
    yield "drawn", _random_products(41, _RANDOM_PRODUCTS)
    yield "drawn_batches", _random_batches(42, _RANDOM_BATCHES)
    yield "drawn_conv", _random_convolutions(43, _RANDOM_CONVOLUTIONS)
    for name in ("gpt2", "bert_large", "llama", "reference_gpt"):
        yield f"{name}_int8", _int8_blocks(name)
    yield "drawn_int8", _random_int8_products(44, _RANDOM_INT8)


def cpu_kernels() -> list[Kernel]:
    """List every kernel of the CPU collection, in the order of the programs, with every number of threads."""
    owner: dict[str, str] = {}
    kernels: dict[str, Kernel] = {}
    for program, problems in _all_programs():
        for problem in itertools.chain.from_iterable(map(_with_threads, problems)):
            if owner.setdefault(problem.shape_key, program) == program:
                kernels.setdefault(problem.key, Kernel(program, problem))
    return list(kernels.values())


def _with_threads(problem: Problem) -> Iterator[Problem]:
    """Yield the problem for one thread if it is small enough, and some of the larger ones for more threads.

    A digest of the problem decides, so that the selection is the same everywhere.
    """
    if _fits(problem, MAX_MULTIPLICATIONS) and (work(problem) <= LARGE or int(problem.digest, 16) % 3 == 0):
        yield problem
    for threads, least in SHARED.items():
        shared = Problem(dict(problem) | {"threads": threads})
        is_selected = int(shared.digest, 16) % (2 if work(problem) <= threads * LARGE else 5) == 0
        if is_selected and work(problem) >= least and _fits(problem, min(MAX_SHARED, threads * MAX_MULTIPLICATIONS)):
            yield shared


def work(problem: Problem) -> float:
    """Count multiplications; an integer one counts as its share of a float one's time."""
    if problem.family == "conv2d":
        return multiplications(problem)
    batch = problem.size("batch") if "batch" in problem else 1
    every = batch * problem.size("m") * problem.size("n") * problem.size("k")
    return every / INT8_SPEED if problem.family == "int8_matmul" else every


def _fits(problem: Problem, most: float) -> bool:
    if not MIN_MULTIPLICATIONS <= work(problem) <= most:
        return False
    if problem.family == "conv2d":
        return True
    batch = problem.size("batch") if "batch" in problem else 1
    m, n, k = (problem.size(name) for name in ("m", "n", "k"))
    return batch * max(m * k, k * n, m * n) <= MAX_OPERAND
