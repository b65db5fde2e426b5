"""The programs whose kernels are measured on a CPU: the same architectures as on the GPU, at sizes a CPU runs them at.

Shapes that take less than a few microseconds or more than a few milliseconds on one core are left out: the first are
decided by the call, the second would cost the time of ten others. A shape belongs to the first program that has it.
Integer products are those of the same networks, quantized; of what is worth two threads, a third is measured with two
as well.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator

from tilewise._machine import real_cores
from tilewise.tune.cpu.conv import multiplications
from tilewise.tune.problem import Kernel, Problem
from tilewise.tune.programs import (
    DENSE_STACKS,
    EFFICIENTNET_B0,
    MIXTURES,
    RESNET50,
    TRANSFORMERS,
    UNET,
    VGG16,
    Transformer,
)

MIN_MULTIPLICATIONS = 4e5
MAX_MULTIPLICATIONS = 1e8
MAX_OPERAND = 12 << 20  # elements
INT8_SPEED = 4  # an integer product takes about a quarter of the time
TWO_THREADS = 8e6  # multiplications from which on splitting matters (integer products: INT8_SPEED times as many)
# (architecture, batch, sequence, threads); a sequence of 1 is decoding
_TRANSFORMER_RUNS = (
    ("bert_base", 1, 32, 1), ("bert_base", 2, 64, 2), ("gpt2", 1, 24, 1), ("gpt2", 8, 1, 1), ("gpt2", 1, 96, 2),
    ("gpt2_medium", 1, 16, 1), ("gpt2_xl_like", 4, 1, 1), ("bert_large", 1, 32, 1), ("bert_large", 1, 64, 2),
    ("vit_base", 1, 50, 1), ("vit_large", 1, 50, 1), ("vit_large", 1, 65, 2), ("whisper_base", 1, 75, 1),
    ("whisper_small", 1, 40, 1), ("t5_base", 1, 56, 1), ("tinyllama", 1, 8, 1), ("tinyllama", 2, 1, 2),
    ("llama3_8b", 1, 4, 1), ("mistral_7b", 1, 6, 1),
)  # fmt: skip
# The package's own reference models, whose tiles users run first: width, heads, batch, sequence.
_REFERENCE_GPTS = ((128, 4, 8, 64), (384, 6, 1, 128), (384, 6, 4, 16))
_CONVOLUTIONAL = (
    ("resnet50", RESNET50, 1), ("vgg16", VGG16, 2), ("efficientnet_b0", EFFICIENTNET_B0, 1), ("unet", UNET, 1),
    ("resnet50_b2", RESNET50[3:], 2), ("efficientnet_b0_b4", EFFICIENTNET_B0, 4),
)  # fmt: skip
# Convolutions as such: channels, height (= width), filters, kernel, stride.
_CONVOLUTIONS = {
    "resnet50": (
        (3, 112, 32, 7, 2), (64, 56, 64, 1, 1), (64, 56, 64, 3, 1), (64, 56, 256, 1, 1), (256, 56, 128, 1, 1),
        (128, 28, 128, 3, 1), (128, 56, 128, 3, 2), (256, 28, 256, 3, 2), (256, 14, 256, 3, 1), (256, 14, 1024, 1, 1),
        (512, 7, 512, 3, 1),
    ),
    "vgg16": ((3, 96, 64, 3, 1), (64, 48, 64, 3, 1), (64, 56, 128, 3, 1), (128, 40, 128, 3, 1), (256, 20, 256, 3, 1),
              (512, 14, 512, 3, 1)),
    "reference_vgg6": ((3, 32, 64, 3, 1), (64, 32, 64, 3, 1), (64, 16, 128, 3, 1), (128, 16, 128, 3, 1),
                       (128, 8, 256, 3, 1), (256, 8, 256, 3, 1)),
    "reference_resnet8": ((3, 32, 16, 3, 1), (16, 32, 16, 3, 1), (16, 32, 32, 3, 2), (32, 16, 32, 3, 1),
                          (32, 16, 64, 3, 2), (64, 8, 64, 3, 1), (16, 32, 32, 1, 2), (32, 16, 64, 1, 2)),
    "reference_cnn": ((1, 8, 32, 3, 1), (32, 8, 64, 3, 1), (64, 4, 64, 3, 1)),
    "darknet19": ((32, 60, 64, 3, 1), (64, 52, 32, 1, 1), (96, 26, 192, 3, 1), (192, 26, 96, 1, 1),
                  (320, 13, 320, 3, 1)),
    "inception": ((192, 26, 96, 1, 1), (48, 26, 64, 5, 1), (96, 30, 96, 3, 1), (288, 17, 192, 3, 2),
                  (160, 17, 160, 3, 1)),
    "efficientnet_b0": ((3, 112, 32, 3, 2), (32, 72, 16, 1, 1), (24, 56, 144, 1, 1), (240, 28, 40, 1, 1),
                        (112, 14, 672, 1, 1), (320, 7, 1280, 1, 1)),
    "unet": ((4, 64, 160, 3, 1), (160, 32, 160, 3, 1), (160, 32, 160, 3, 2), (320, 16, 320, 3, 1), (320, 16, 160, 1, 1),
             (640, 8, 320, 3, 1)),
}  # fmt: skip
_CONVOLUTION_BATCHES = {"reference_vgg6": (2,), "reference_resnet8": (1, 8), "reference_cnn": (16, 64)}
_DENSE_BATCHES = {"dlrm": 128, "autoencoder": 64, "wide_mlp": 8}
_REFERENCE_MLP = (64, 256, 128, 10)
# Quantized networks: (architecture, batch, sequence); convolutions as products: name, layers, batch.
_INT8_TRANSFORMERS = (
    ("bert_base", 1, 128), ("gpt2", 1, 32), ("gpt2", 8, 1), ("gpt2_medium", 1, 24), ("vit_base", 1, 50),
    ("whisper_small", 1, 75), ("t5_base", 1, 64), ("tinyllama", 1, 8),
)  # fmt: skip
_INT8_CONVOLUTIONAL = (
    ("resnet50", RESNET50, 1), ("vgg16", VGG16, 1), ("efficientnet_b0", EFFICIENTNET_B0, 2), ("unet", UNET, 1),
)  # fmt: skip
_INT8_DENSE = {"dlrm": 256, "autoencoder": 128, "wide_mlp": 16}
_INT8_SWEEPS = (("sweep_a", 21, 18), ("sweep_b", 22, 5), ("sweep_c", 23, 6))
_INT8_EPILOGUES = ("none", "bias", "bias_relu", "requantize")
_SWEEPS = (("sweep_a", 11, 30), ("sweep_b", 12, 6), ("sweep_c", 13, 8))
_EPILOGUES = ("none", "bias", "bias_relu", "bias_gelu", "residual")
_CONV_EPILOGUES = ("bias_relu", "none", "residual")


def _product(m: int, n: int, k: int, epilogue: str, layout: str, threads: int) -> Problem:
    return Problem.of("matmul", dtype="fp32", m=m, n=n, k=k, epilogue=epilogue, layout=layout, threads=threads)


def _batch(batch: int, m: int, n: int, k: int, layout: str, threads: int) -> Problem:
    return Problem.of(
        "batched_matmul", dtype="fp32", batch=batch, m=m, n=n, k=k, epilogue="none", layout=layout, threads=threads
    )


def _transformer(model: Transformer, batch: int, length: int, threads: int) -> Iterator[Problem]:
    """One block, forward; and the gradients of its first dense layer where a sequence is trained on."""
    tokens, width, head = batch * length, model.width, model.head
    into = "bias" if model.biased else "none"
    yield _product(tokens, width + 2 * model.kv_heads * head, width, into, "nt", threads)
    yield _product(tokens, width, width, "residual", "nt", threads)
    yield _product(tokens, model.hidden, width, "none" if model.gated else "bias_gelu", "nt", threads)
    yield _product(tokens, width, model.hidden, "residual", "nt", threads)
    if length == 1:
        return
    yield _batch(batch * model.heads, length, length, head, "nt", threads)
    yield _batch(batch * model.heads, length, head, length, "nn", threads)
    yield _product(tokens, width, model.kv_heads * head, "none", "nn", threads)
    yield _product(width, width, tokens, "none", "tn", threads)


def _convolutions(layers: Iterable[tuple[int, int, int, bool]], batch: int) -> Iterator[Problem]:
    for rows, inner, channels, residual in layers:
        yield _product(rows * batch, channels, inner, "residual" if residual else "bias_relu", "nn", 1)


def _true_convolutions(layers: Iterable[tuple[int, int, int, int, int]], batch: int) -> Iterator[Problem]:
    for number, (channels, size, filters, kernel, stride) in enumerate(layers):
        yield Problem.of(
            "conv2d", dtype="fp32", batch=batch, channels=channels, height=size, width=size, filters=filters,
            kernel=kernel, stride=stride, padding=kernel // 2, epilogue=_CONV_EPILOGUES[number % 3],
            threads=2 if number % 4 == 3 else 1,
        )  # fmt: skip


def _dense_stack(widths: tuple[int, ...], batch: int) -> Iterator[Problem]:
    for inner, columns in itertools.pairwise(widths):
        yield _product(batch, columns, inner, "bias_relu", "nt", 1)
        yield _product(batch, inner, columns, "none", "nn", 1)


def _mixture(experts: int, width: int, hidden: int) -> Iterator[Problem]:
    wide, deep = min(width, 768), min(hidden, 768)
    yield _batch(experts, 4, deep, wide, "nt", 1)
    yield _product(64, experts, width, "none", "nt", 1)


def _bytes(m: int, n: int, k: int, epilogue: str, threads: int = 1) -> Problem:
    return Problem.of("int8_matmul", dtype="int8", m=m, n=n, k=k, epilogue=epilogue, threads=threads)


def _int8_transformer(model: Transformer, tokens: int) -> Iterator[Problem]:
    """The dense layers of a block, each quantizing its input as it comes."""
    width, into = model.width, "bias" if model.biased else "none"
    yield _bytes(tokens, width + 2 * model.kv_heads * model.head, width, into)
    yield _bytes(tokens, width, width, into)
    yield _bytes(tokens, model.hidden, width, into)
    yield _bytes(tokens, width, model.hidden, into)


def _int8_sweep(seed: int, count: int) -> Iterator[Problem]:
    chance = random.Random(seed)
    for number in range(count):
        m, n, k = _size(chance, 1, 2048), _size(chance, 8, 2048), _size(chance, 16, 4096)
        yield _bytes(m, n, k, chance.choice(_INT8_EPILOGUES), 2 if number % 5 == 4 else 1)


def _int8_programs() -> Iterator[tuple[str, Iterable[Problem]]]:
    for name, batch, length in _INT8_TRANSFORMERS:
        yield f"{name}_int8_b{batch}x{length}", _int8_transformer(TRANSFORMERS[name], batch * length)
    for name, layers, batch in _INT8_CONVOLUTIONAL:
        products = [_bytes(rows * batch, channels, inner, "requantize") for rows, inner, channels, _ in layers]
        yield f"{name}_int8_b{batch}", products
    for name, batch in _INT8_DENSE.items():
        widths = itertools.pairwise(DENSE_STACKS[name])
        yield f"{name}_int8_b{batch}", [_bytes(batch, columns, inner, "bias_relu") for inner, columns in widths]
    for name, seed, count in _INT8_SWEEPS:
        yield f"{name}_int8", _int8_sweep(seed, count)


def _size(chance: random.Random, low: int, high: int) -> int:
    """Evenly in the logarithm."""
    drawn: float = low * (high / low) ** chance.random()
    return max(low, round(drawn))


def _sweep(seed: int, count: int) -> Iterator[Problem]:
    """Shapes no architecture asked for, spread evenly in the logarithm of each size, with every layout and epilogue."""
    chance = random.Random(seed)

    def size(low: int, high: int) -> int:
        return _size(chance, low, high)

    for number in range(count):
        threads = 2 if number % 5 == 4 else 1
        layout = chance.choice(("nn", "nt", "tn"))
        yield _product(size(1, 1024), size(8, 2048), size(8, 2048), chance.choice(_EPILOGUES), layout, threads)
        yield _product(size(16, 512), size(64, 1024), size(64, 1024), chance.choice(_EPILOGUES), layout, threads)
        yield _batch(size(2, 32), size(4, 256), size(8, 256), size(8, 256), chance.choice(("nn", "nt", "tn")), threads)


def _all_programs() -> Iterator[tuple[str, Iterable[Problem]]]:
    for name, batch, length, threads in _TRANSFORMER_RUNS:
        program = f"{name}_fp32_b{batch}x{length}" + (f"_t{threads}" if threads > 1 else "")
        yield program, _transformer(TRANSFORMERS[name], batch, length, threads)
    for width, heads, batch, length in _REFERENCE_GPTS:
        model = Transformer("reference", width, heads, heads, 4 * width, 65, causal=True)
        yield f"reference_gpt_{width}_b{batch}x{length}", _transformer(model, batch, length, 1)
    for name, layers, batch in _CONVOLUTIONAL:
        yield f"{name}_fp32", _convolutions(layers, batch)
    for name, true_layers in _CONVOLUTIONS.items():
        for batch in _CONVOLUTION_BATCHES.get(name, (1,)):
            yield f"{name}_conv_fp32_b{batch}", _true_convolutions(true_layers, batch)
    for name, batch in _DENSE_BATCHES.items():
        yield f"{name}_fp32_b{batch}", _dense_stack(DENSE_STACKS[name], batch)
    yield "reference_mlp_b256", _dense_stack(_REFERENCE_MLP, 256)
    for name, experts, width, hidden in MIXTURES:
        yield f"{name}_fp32", _mixture(experts, width, hidden)
    for name, seed, count in _SWEEPS:
        yield name, _sweep(seed, count)
    yield from _int8_programs()


def cpu_kernels(cores: int | None = None) -> list[Kernel]:
    """Every kernel of the CPU collection, in the order of the programs; with `cores` (this machine's) of one, those of
    two threads are left out."""
    available = real_cores() if cores is None else cores
    owner: dict[str, str] = {}
    kernels: dict[str, Kernel] = {}
    for program, problems in _all_programs():
        for problem in itertools.chain.from_iterable(map(_with_threads, problems)):
            own = owner.setdefault(problem.shape_key, program) == program
            if own and _measurable(problem) and problem.size("threads") <= available:
                kernels.setdefault(problem.key, Kernel(program, problem))
    return list(kernels.values())


def other_problems(seed: int, count: int) -> list[Problem]:
    """So many products that are in no program, a fifth of them of bytes: to be ranked, not measured."""
    taken = {kernel.problem.shape_key for kernel in cpu_kernels(2)}
    floats = itertools.chain.from_iterable(_sweep(seed + 2 * number, 20) for number in itertools.count())
    integers = itertools.chain.from_iterable(_int8_sweep(seed + 2 * number + 1, 20) for number in itertools.count())
    fresh = (next(integers if place % 5 == 4 else floats) for place in itertools.count())
    allowed = (problem for problem in fresh if problem.shape_key not in taken and _measurable(problem))
    return list(itertools.islice(allowed, count))


def _with_threads(problem: Problem) -> Iterator[Problem]:
    """The problem; and every third one, if splitting it matters, on two threads as well."""
    yield problem
    split = dict(problem) | {"threads": 2}
    if problem.size("threads") == 1 and _work(problem) >= TWO_THREADS and int(Problem(split).digest, 16) % 3 == 0:
        yield Problem(split)


def _work(problem: Problem) -> float:
    """Multiplications, an integer one counted as what it takes of a float one's time."""
    if problem.family == "conv2d":
        return multiplications(problem)
    batch = problem.size("batch") if "batch" in problem else 1
    every = batch * problem.size("m") * problem.size("n") * problem.size("k")
    return every / INT8_SPEED if problem.family == "int8_matmul" else every


def _measurable(problem: Problem) -> bool:
    if problem.family == "conv2d":
        return MIN_MULTIPLICATIONS <= _work(problem) <= 1.3 * MAX_MULTIPLICATIONS
    batch = problem.size("batch") if "batch" in problem else 1
    m, n, k = (problem.size(name) for name in ("m", "n", "k"))
    within = MIN_MULTIPLICATIONS <= _work(problem) <= MAX_MULTIPLICATIONS
    return within and batch * max(m * k, k * n, m * n) <= MAX_OPERAND
