"""The programs whose kernels are measured on a CPU: the same architectures as on the GPU, at sizes a CPU runs them at.

Shapes that take less than a few microseconds or more than a few milliseconds on one core are left out: the first are
decided by the call, the second would cost the time of ten others. A shape belongs to the first program that has it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator

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
_DENSE_BATCHES = {"dlrm": 128, "autoencoder": 64, "wide_mlp": 8}
_REFERENCE_MLP = (64, 256, 128, 10)
_SWEEPS = (("sweep_a", 11, 30), ("sweep_b", 12, 6), ("sweep_c", 13, 8))
_EPILOGUES = ("none", "bias", "bias_relu", "bias_gelu", "residual")


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


def _dense_stack(widths: tuple[int, ...], batch: int) -> Iterator[Problem]:
    for inner, columns in itertools.pairwise(widths):
        yield _product(batch, columns, inner, "bias_relu", "nt", 1)
        yield _product(batch, inner, columns, "none", "nn", 1)


def _mixture(experts: int, width: int, hidden: int) -> Iterator[Problem]:
    wide, deep = min(width, 768), min(hidden, 768)
    yield _batch(experts, 4, deep, wide, "nt", 1)
    yield _product(64, experts, width, "none", "nt", 1)


def _sweep(seed: int, count: int) -> Iterator[Problem]:
    """Shapes no architecture asked for, spread evenly in the logarithm of each size, with every layout and epilogue."""
    chance = random.Random(seed)

    def size(low: int, high: int) -> int:
        drawn: float = low * (high / low) ** chance.random()
        return max(low, round(drawn))

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
    for name, batch in _DENSE_BATCHES.items():
        yield f"{name}_fp32_b{batch}", _dense_stack(DENSE_STACKS[name], batch)
    yield "reference_mlp_b256", _dense_stack(_REFERENCE_MLP, 256)
    for name, experts, width, hidden in MIXTURES:
        yield f"{name}_fp32", _mixture(experts, width, hidden)
    for name, seed, count in _SWEEPS:
        yield name, _sweep(seed, count)


def cpu_kernels() -> list[Kernel]:
    """Every kernel of the CPU collection, in the order of the programs."""
    owner: dict[str, str] = {}
    seen: set[str] = set()
    kernels = []
    for program, problems in _all_programs():
        for problem in problems:
            foreign = owner.setdefault(problem.shape_key, program) != program
            if not (problem.key in seen or foreign or not _measurable(problem)):
                seen.add(problem.key)
                kernels.append(Kernel(program, problem))
    return kernels


def _measurable(problem: Problem) -> bool:
    batch = problem.size("batch") if "batch" in problem else 1
    m, n, k = (problem.size(name) for name in ("m", "n", "k"))
    within = MIN_MULTIPLICATIONS <= batch * m * n * k <= MAX_MULTIPLICATIONS
    return within and batch * max(m * k, k * n, m * n) <= MAX_OPERAND
