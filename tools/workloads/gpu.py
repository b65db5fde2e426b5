"""Programs whose kernels are measured on a GPU: operations of real architectures at several batch sizes, and a sweep.

Convolutions are written as the matrix products that compute them (rows = batch x height x width, inner = channels x
window). A shape belongs to the first program that has it: the same sizes never appear in two programs, so a split by
program separates shapes.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tilewise.store.problem import Kernel, Problem, Value


@dataclass(frozen=True)
class Transformer:
    """The sizes of a transformer's blocks."""

    name: str
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    gated: bool = False
    causal: bool = False
    biased: bool = True

    @property
    def head(self) -> int:
        return self.width // self.heads


TRANSFORMERS = {
    model.name: model
    for model in (
        Transformer("bert_base", 768, 12, 12, 3072, 30528),
        Transformer("bert_large", 1024, 16, 16, 4096, 30528),
        Transformer("gpt2", 768, 12, 12, 3072, 50304, causal=True),
        Transformer("gpt2_medium", 1024, 16, 16, 4096, 50304, causal=True),
        Transformer("gpt2_xl_like", 1536, 24, 24, 6144, 50304, causal=True),
        Transformer("llama2_7b", 4096, 32, 32, 11008, 32000, gated=True, causal=True, biased=False),
        Transformer("llama3_8b", 4096, 32, 8, 14336, 128256, gated=True, causal=True, biased=False),
        Transformer("mistral_7b", 4096, 32, 8, 14336, 32768, gated=True, causal=True, biased=False),
        Transformer("tinyllama", 2048, 32, 4, 5632, 32000, gated=True, causal=True, biased=False),
        Transformer("t5_base", 768, 12, 12, 2048, 32128, gated=True, biased=False),
        Transformer("vit_base", 768, 12, 12, 3072, 1000),
        Transformer("vit_large", 1024, 16, 16, 4096, 1000),
        Transformer("whisper_small", 768, 12, 12, 3072, 51872),
        Transformer("whisper_base", 512, 8, 8, 2048, 51872),
    )
}
# (architecture, number type, batch, sequence)
TRANSFORMER_RUNS = (
    ("bert_base", "bf16", 1, 128), ("bert_base", "fp16", 8, 128), ("bert_base", "bf16", 16, 384),
    ("bert_large", "bf16", 2, 384), ("bert_large", "fp16", 8, 512),
    ("gpt2", "bf16", 1, 1024), ("gpt2", "fp16", 4, 512), ("gpt2", "tf32", 2, 256), ("gpt2", "bf16", 16, 1),
    ("gpt2_medium", "bf16", 2, 1024), ("gpt2_medium", "fp16", 32, 1), ("gpt2_xl_like", "bf16", 1, 768),
    ("gpt2_xl_like", "tf32", 4, 64),
    ("llama2_7b", "bf16", 1, 512), ("llama2_7b", "fp16", 8, 1), ("llama2_7b", "bf16", 64, 1),
    ("llama3_8b", "bf16", 1, 1024), ("llama3_8b", "bf16", 16, 1), ("llama3_8b", "fp16", 1, 256),
    ("mistral_7b", "bf16", 1, 640), ("mistral_7b", "fp16", 4, 1),
    ("tinyllama", "bf16", 1, 2048), ("tinyllama", "fp16", 4, 256), ("tinyllama", "tf32", 1, 192),
    ("tinyllama", "bf16", 1, 1),
    ("t5_base", "bf16", 4, 512), ("t5_base", "fp16", 16, 96),
    ("vit_base", "fp16", 8, 197), ("vit_base", "bf16", 32, 197), ("vit_base", "tf32", 4, 197),
    ("vit_large", "fp16", 4, 257), ("vit_large", "bf16", 16, 257),
    ("whisper_small", "fp16", 1, 1500), ("whisper_small", "bf16", 4, 750), ("whisper_base", "fp16", 2, 1500),
    ("whisper_base", "tf32", 1, 1500),
)  # fmt: skip

# (rows per image, channels x window, output channels, how often it carries the residual)
RESNET50 = (
    (12544, 392, 64, False), (3136, 64, 64, False), (3136, 576, 64, False), (3136, 64, 256, True),
    (3136, 256, 128, False), (784, 1152, 128, False), (784, 128, 512, True), (784, 512, 256, False),
    (196, 2304, 256, False), (196, 256, 1024, True), (196, 1024, 512, False), (49, 4608, 512, False),
    (49, 512, 2048, True),
)  # fmt: skip
VGG16 = (
    (50176, 72, 64, False), (50176, 576, 64, False), (12544, 576, 128, False), (12544, 1152, 128, False),
    (3136, 2304, 256, False), (784, 4608, 512, False), (196, 4608, 512, False),
)  # fmt: skip
EFFICIENTNET_B0 = (
    (12544, 32, 96, False), (3136, 96, 24, False), (3136, 144, 40, False), (784, 240, 80, False),
    (196, 480, 112, False), (196, 672, 192, False), (49, 1152, 320, False), (49, 320, 1280, False),
)  # fmt: skip
UNET = (
    (4096, 2880, 320, False), (4096, 320, 320, True), (1024, 5760, 640, False), (1024, 640, 640, True),
    (256, 11520, 1280, False), (256, 1280, 1280, True), (64, 23040, 1280, False),
)  # fmt: skip
CONVOLUTIONAL = (
    ("resnet50", "fp16", (1, 8, 32), RESNET50),
    ("resnet50", "tf32", (4,), RESNET50),
    ("vgg16", "fp16", (1, 4), VGG16),
    ("efficientnet_b0", "fp16", (8, 64), EFFICIENTNET_B0),
    ("unet", "bf16", (2, 4), UNET),
)
DENSE_STACKS = {
    "dlrm": (16, 512, 256, 64, 512, 1024, 1024, 512, 256),
    "autoencoder": (784, 1024, 512, 128, 512, 1024, 784),
    "wide_mlp": (1024, 4096, 4096, 1024),
}
MIXTURES = (("mixtral", 8, 4096, 14336), ("switch_base", 16, 768, 3072), ("olmoe", 64, 2048, 1024))


_KINDS = ("any", "any", "any", "large", "tall", "middling", "odd", "odd")
_MOSTLY_ODD = ("odd", "odd", "odd", "any", "odd", "tall", "odd", "large", "odd", "middling")
_MOSTLY_UNEVEN = ("uneven", "round", "uneven", "odd", "uneven", "any", "uneven", "round", "tall", "odd")


def _linear(problem_dtype: str, m: int, n: int, k: int, epilogue: str, layout: str = "nt") -> Problem:
    return Problem.of("matmul", dtype=problem_dtype, m=m, n=n, k=k, epilogue=epilogue, layout=layout)


def _rows_dtype(dtype: str) -> str:
    return "fp32" if dtype == "tf32" else dtype


def _transformer(model: Transformer, dtype: str, batch: int, length: int) -> Iterator[Problem]:
    """One block and the head. Length 1 is decoding: one new token per sequence against a cache of 1,024."""
    tokens, width, head = batch * length, model.width, model.head
    into = "bias" if model.biased and dtype != "tf32" else "none"
    skip = "residual" if dtype != "tf32" else "none"
    yield _linear(dtype, tokens, width + 2 * model.kv_heads * head, width, into)
    yield _linear(dtype, tokens, width, width, skip)
    up = "none" if model.gated else ("bias_gelu" if dtype != "tf32" else "bias_relu")
    yield _linear(dtype, tokens, (2 if model.gated else 1) * model.hidden, width, up)
    yield _linear(dtype, tokens, width, model.hidden, skip)
    yield _linear(
        dtype, batch if length == 1 or model.vocabulary == 1000 else min(tokens, 256), model.vocabulary, width, "none"
    )
    rows_dtype = _rows_dtype(dtype)
    yield Problem.of("layer_norm" if model.biased else "rms_norm", dtype=rows_dtype, rows=tokens, cols=width)
    yield Problem.of("softmax", dtype=rows_dtype, rows=min(tokens, 256), cols=model.vocabulary)
    yield Problem.of(
        "reduction", dtype=rows_dtype, rows=min(tokens, 256), cols=model.vocabulary, axis=1, operation="max"
    )
    keys = 1024 if length == 1 else length
    if dtype != "tf32":
        yield Problem.of(
            "attention", dtype=dtype, batch=batch, heads=model.heads, kv_heads=model.kv_heads,
            queries=length, keys=keys, head=head, causal=int(model.causal),
        )  # fmt: skip
    if length > 1:
        yield from _unfused_attention(model, dtype, batch, length)
        yield from _gradients(model, dtype, tokens)


def _unfused_attention(model: Transformer, dtype: str, batch: int, length: int) -> Iterator[Problem]:
    """Attention as frameworks without a fused kernel run it: two batched products and a softmax."""
    both = batch * model.heads
    yield Problem.of("softmax", dtype=_rows_dtype(dtype), rows=both * length, cols=length)
    if dtype != "tf32" and length % 8 == 0:
        sizes: dict[str, Value] = {"batch": both, "epilogue": "none", "dtype": dtype}
        yield Problem.of("batched_matmul", m=length, n=length, k=model.head, layout="nt", **sizes)
        yield Problem.of("batched_matmul", m=length, n=model.head, k=length, layout="nn", **sizes)


def _gradients(model: Transformer, dtype: str, tokens: int) -> Iterator[Problem]:
    """The backward pass of the first dense layer: input gradient, weight gradient, bias gradient."""
    yield _linear(dtype, tokens, model.width, model.hidden, "none", "nn")
    if dtype == "bf16" and tokens % 8 == 0:
        yield _linear(dtype, model.width, model.hidden, tokens, "none", "tn")
    yield Problem.of("reduction", dtype=_rows_dtype(dtype), rows=tokens, cols=model.hidden, axis=0, operation="sum")


def _convolutions(layers: Iterable[tuple[int, int, int, bool]], dtype: str, batch: int) -> Iterator[Problem]:
    """Yield the layers of a convolution network as products, then its pooling, softmax and classifier."""
    for rows, inner, channels, residual in layers:
        # Batch norm is folded into weights and bias, so the product has the bias and usually the ReLU.
        if dtype == "bf16":
            epilogue, layout = ("residual" if residual else "bias"), "nt"
        else:
            epilogue, layout = "bias_relu", "nn"
        yield _linear(dtype, rows * batch, channels, inner, epilogue, layout)
    rows_dtype = _rows_dtype(dtype)
    last_rows, _, channels, _ = list(layers)[-1]
    yield Problem.of("reduction", dtype=rows_dtype, rows=batch * channels, cols=last_rows, axis=1, operation="sum")
    yield Problem.of("softmax", dtype=rows_dtype, rows=batch, cols=1000)
    yield _linear(dtype, batch, 1000, channels, "bias" if dtype != "tf32" else "none")


def _dense_stack(widths: tuple[int, ...], dtype: str, batch: int) -> Iterator[Problem]:
    for inner, columns in itertools.pairwise(widths):
        yield _linear(dtype, batch, columns, inner, "bias_relu", "nt" if dtype == "tf32" else "nn")


def _mixture(experts: int, width: int, hidden: int, dtype: str, tokens: int) -> Iterator[Problem]:
    """Yield the experts' two products as batches (tokens divided evenly), and the router."""
    each = max(tokens // experts, 1)
    shared: dict[str, Value] = {"batch": experts, "m": each, "dtype": dtype, "epilogue": "none"}
    yield Problem.of("batched_matmul", n=hidden, k=width, layout="nt", **shared)
    yield Problem.of("batched_matmul", n=width, k=hidden, layout="nt", **shared)
    yield _linear(dtype, tokens, experts, width, "none")
    yield Problem.of("softmax", dtype=dtype, rows=tokens, cols=experts)
    yield Problem.of("rms_norm", dtype=dtype, rows=tokens, cols=width)


def _size(chance: random.Random, low: int, high: int, multiple: int) -> int:
    """Draw a size, uniform in its logarithm, rounded to the multiple."""
    size: float = low * (high / low) ** chance.random()
    return max(multiple, round(size / multiple) * multiple)


def _sweep(seed: int, count: int) -> Iterator[Problem]:
    """Draw shapes of no particular architecture, uniform in the logarithm of each size."""
    chance = random.Random(seed)
    size = functools.partial(_size, chance)
    for _ in range(count):
        dtype = chance.choice(("bf16", "fp16"))
        yield _linear(dtype, size(1, 8192, 1), size(64, 8192, 8), size(64, 8192, 8), *chance.choice(_SWEPT[dtype]))
        yield Problem.of(
            "batched_matmul", dtype=dtype, batch=size(2, 128, 1), m=size(16, 1024, 1), n=size(32, 1024, 8),
            k=size(32, 1024, 8), layout=chance.choice(("nn", "nt")), epilogue="none",
        )  # fmt: skip
        length, heads = size(64, 2048, 1), chance.choice((8, 12, 16, 32))
        yield Problem.of(
            "attention", dtype=dtype, batch=size(1, 16, 1), heads=heads, kv_heads=heads, queries=length, keys=length,
            head=chance.choice((64, 128)), causal=chance.choice((0, 1)),
        )  # fmt: skip
        rows_dtype = chance.choice(("bf16", "fp16", "fp32"))
        for family in ("softmax", "layer_norm", "rms_norm"):
            yield Problem.of(family, dtype=rows_dtype, rows=size(16, 65536, 1), cols=size(64, 16384, 8))
        yield Problem.of(
            "reduction", dtype=rows_dtype, rows=size(64, 65536, 1), cols=size(64, 16384, 8),
            axis=chance.choice((0, 1)), operation=chance.choice(("sum", "max")),
        )  # fmt: skip


def _products(seed: int, count: int) -> Iterator[Problem]:
    """Draw matrix products over a wider range than the sweep's: thin, flat, short inner sizes, every number type."""
    chance = random.Random(seed)
    size = functools.partial(_size, chance)
    for _ in range(count):
        dtype = chance.choice(("bf16", "fp16", "tf32"))
        epilogue, layout = chance.choice(_SWEPT[dtype])
        m = size(8, 16384, 8) if layout == "tn" else size(1, 16384, 1)
        yield _linear(dtype, m, size(32, 16384, 8), size(32, 16384, 8), epilogue, layout)


def _narrow(seed: int, each: int) -> Iterator[Problem]:
    """Draw products whose rows are not aligned to 16 bytes: `each` of every pattern of widths, and a batched one.

    There are few epilogues, because a binary serves one alignment only. The last patterns are layouts that no other
    program has.
    """
    chance = random.Random(seed)
    size = functools.partial(_size, chance)
    for (dtype, epilogue, layout), (columns, inner) in itertools.product(_NARROW, _WIDTHS):
        yield from (
            _linear(dtype, size(4, 8192, 1), size(64, 8192, 8) + columns, size(64, 8192, 8) + inner, epilogue, layout)
            for _ in range(each)
        )
        if epilogue == "none" and dtype != "tf32":
            yield Problem.of(
                "batched_matmul", dtype=dtype, layout=layout, epilogue=epilogue, batch=size(2, 256, 1),
                m=size(8, 1024, 1), n=size(32, 1024, 8) + columns, k=size(32, 1024, 8) + inner,
            )  # fmt: skip
    for (dtype, layout), add in itertools.product(_TRANSPOSED, (0, 1)):
        for _ in range(each):
            m, n, k = (size(64, 8192, 8) + add for _ in range(3))
            yield _linear(dtype, m, n, k, "none", layout)


def _mixed_products(seed: int, count: int, kinds: Sequence[str] = _KINDS) -> Iterator[Problem]:
    """Draw products like those of users, one kind after the other.

    The kinds are any size, large, medium, tall and thin, large with rows that do not fill cache lines, round numbers,
    and rows of odd lengths (with few epilogues, because a binary serves one alignment only).
    """
    chance = random.Random(seed)
    size = functools.partial(_size, chance)
    for kind in itertools.islice(itertools.cycle(kinds), count):
        dtype = chance.choice(("bf16", "fp16", "tf32", "bf16", "fp16"))
        epilogue, layout = chance.choice(_SWEPT[dtype])
        if kind == "any":
            m, n, k = size(1, 16384, 1), size(32, 16384, 8), size(32, 16384, 8)
        elif kind == "large":
            m, n, k = size(1024, 8192, 8), size(1024, 8192, 64), size(512, 8192, 64)
        elif kind == "tall":
            m, n, k = size(2048, 1 << 19, 1), size(8, 256, 8), size(16, 1024, 8)
        elif kind == "middling":
            m, n, k = size(256, 16384, 1), size(256, 4096, 64), size(256, 4096, 64)
        elif kind == "uneven":
            m, n, k = size(512, 8192, 1), size(512, 8192, 8), size(256, 8192, 8)
        elif kind == "round":
            m, n, k = size(20, 40000, 20), size(200, 8000, 200), size(200, 8000, 200)
        else:
            dtype, epilogue, layout = chance.choice(_NARROW)
            columns, inner = chance.choice(_WIDTHS)
            m = size(2048, 65536, 1) if chance.random() < 0.25 else size(4, 8192, 1)
            n, k = size(64, 8192, 8) + columns, size(64, 8192, 8) + inner
        yield _linear(dtype, m, n, k, epilogue, layout)


def _rows(seed: int, count: int) -> Iterator[Problem]:
    """Draw reductions and normalizations, from a few rows to very many, odd columns among them."""
    chance = random.Random(seed)
    size = functools.partial(_size, chance)
    for number in range(count):
        dtype, odd = chance.choice(("bf16", "fp16", "fp32")), int(number % 6 == 5)
        for axis in (0, 1):
            yield Problem.of(
                "reduction", dtype=dtype, rows=size(16, 65536, 1), cols=size(32, 65536, 8) + odd, axis=axis,
                operation=chance.choice(("sum", "max")),
            )  # fmt: skip
        for family in ("layer_norm", "rms_norm", "softmax"):
            yield Problem.of(family, dtype=dtype, rows=size(16, 65536, 1), cols=size(64, 32768, 8) + odd)


def _batches(seed: int, count: int) -> Iterator[Problem]:
    """Draw batched products, from many small ones to a few large ones."""
    chance = random.Random(seed)
    size = functools.partial(_size, chance)
    for _ in range(count):
        dtype, layout = chance.choice(("bf16", "fp16")), chance.choice(("nn", "nt"))
        sizes = {"batch": size(2, 512, 1), "m": size(1, 2048, 1), "n": size(16, 2048, 8), "k": size(16, 4096, 8)}
        yield Problem.of("batched_matmul", dtype=dtype, layout=layout, epilogue="none", **sizes)


_NARROW = (
    ("bf16", "none", "nt"), ("fp16", "none", "nn"), ("bf16", "bias", "nt"), ("fp16", "bias_relu", "nn"),
    ("tf32", "none", "nn"), ("tf32", "none", "nt"),
)  # fmt: skip
_WIDTHS = ((1, 1), (0, 1), (1, 0), (2, 2), (4, 4))  # past a multiple of 8: the columns, the inner size
_TRANSPOSED = (("bf16", "tn"), ("fp16", "tn"), ("bf16", "tt"))
_SWEPT = {
    "bf16": (("none", "nn"), ("none", "nt"), ("bias", "nt"), ("bias_gelu", "nt"), ("residual", "nt")),
    "fp16": (("none", "nn"), ("none", "nt"), ("bias", "nt"), ("bias_gelu", "nt"), ("bias_relu", "nn")),
    "tf32": (("none", "nn"), ("none", "nt"), ("bias_relu", "nn")),
}


def _all_programs() -> Iterator[tuple[str, Iterable[Problem]]]:
    """Yield every program with its problems, in the order in which shapes are assigned to programs."""
    for name, dtype, batch, length in TRANSFORMER_RUNS:
        yield f"{name}_{dtype}_b{batch}x{length}", _transformer(TRANSFORMERS[name], dtype, batch, length)
    for name, dtype, batches, layers in CONVOLUTIONAL:
        for batch in batches:
            yield f"{name}_{dtype}_b{batch}", _convolutions(layers, dtype, batch)
    for name, widths in DENSE_STACKS.items():
        for dtype, batch in (("fp16", 2048), ("tf32", 256)):
            yield f"{name}_{dtype}_b{batch}", _dense_stack(widths, dtype, batch)
    for name, experts, width, hidden in MIXTURES:
        for dtype, tokens in (("bf16", 2048), ("fp16", 256)):
            yield f"{name}_{dtype}_t{tokens}", _mixture(experts, width, hidden, dtype, tokens)
    for name, seed, count in (("sweep_a", 1, 24), ("sweep_b", 2, 4), ("sweep_c", 3, 5)):
        yield name, _sweep(seed, count)
    yield "products", _products(4, 90)
    yield "rows", _rows(5, 78)
    yield "rows_b", _rows(6, 14)
    yield "batches", _batches(7, 72)
    yield "products_a", _products(8, 48)
    yield "narrow_a", _narrow(9, 4)
    yield "narrow_b", _narrow(10, 1)
    yield "narrow_c", _narrow(11, 1)
    yield "narrow_d", _narrow(12, 6)
    yield "drawn_b", _mixed_products(14, 48)
    yield "drawn", _mixed_products(13, 520)
    yield "drawn_c", _mixed_products(15, 560, _MOSTLY_ODD)
    yield "uneven_b", _mixed_products(17, 40, _MOSTLY_UNEVEN)
    yield "uneven", _mixed_products(16, 500, _MOSTLY_UNEVEN)


def gpu_kernels() -> list[Kernel]:
    """List every kernel of the GPU collection, in the order of the programs, without those that take too long."""
    owner: dict[str, str] = {}
    keys: set[str] = set()
    kernels = []
    for program, problems in _all_programs():
        for problem in problems:
            if problem.key in keys or owner.setdefault(problem.shape_key, program) != program or _too_big(problem):
                continue
            keys.add(problem.key)
            kernels.append(Kernel(program, problem))
    return kernels


def other_problems(seed: int, count: int) -> list[Problem]:
    """Draw problems that are in no program, most of them matrix products: to be ranked, not measured."""
    measured_shapes = {kernel.problem.shape_key for kernel in gpu_kernels()}

    def endless(draw: Callable[[int, int], Iterator[Problem]], first: int) -> Iterator[Problem]:
        return (problem for seeded in itertools.count(first, 6) for problem in draw(seeded, 50))

    draws = (_sweep, _products, _rows, _batches, lambda seeded, count: _narrow(seeded, count // 50), _mixed_products)
    swept, products, rows, batches, narrow, mixed = (endless(draw, seed + number) for number, draw in enumerate(draws))
    streams = (products, swept, narrow, mixed, rows, mixed, narrow, batches, mixed)
    fresh = (next(stream) for stream in itertools.cycle(streams))
    allowed = (p for p in fresh if p.shape_key not in measured_shapes and not _too_big(p))
    return list(itertools.islice(allowed, count))


def _too_big(problem: Problem) -> bool:
    """Tell whether a shape needs half a teraflop or half a gigabyte, which would take minutes of a short visit."""
    if problem.family in ("matmul", "batched_matmul"):
        batch = problem.size("batch") if "batch" in problem else 1
        return batch * problem.size("m") * problem.size("n") * problem.size("k") > 1.5e11
    if problem.family == "attention":
        scores = problem.size("batch") * problem.size("heads") * problem.size("queries") * problem.size("keys")
        return scores * problem.size("head") > 4e10
    return problem.size("rows") * problem.size("cols") > 1.5e8
