"""The problems of `benchmarks.inductor`: random products, flexible attention, blocks of models, row-wise kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

_WIDTHS = (512, 640, 768, 1024, 1152, 1536, 1920, 2048, 2560, 3072, 3840, 4096, 5120, 6144, 8192)
_CACHE_BYTES = 128 << 20  # over twice the L2 cache of an H200: operand sets rotate through it
# Operation or mask, sizes, and dtype.
RandomProblem = tuple[str, tuple[int, ...], str]
# Blocks of models: the kind, the arguments of its class, and the shape of its input.
Block = tuple[str, tuple[int, ...], tuple[int, int, int]]
MODELS: dict[str, Block] = {
    "GPT block": ("causal", (1280, 20), (4, 768, 1280)),
    "BERT block": ("attention", (768, 12), (24, 128, 768)),
    "MLP-Mixer": ("mixer", (196, 640), (32, 196, 640)),
    "ViT block": ("attention", (1024, 16), (16, 197, 1024)),
}
# Blocks for development; the four above are for evaluation only.
TRAINING_MODELS: dict[str, Block] = {
    "GPT block 1536": ("causal", (1536, 24), (6, 640, 1536)),
    "GPT block 2048": ("causal", (2048, 16), (2, 1024, 2048)),
    "ViT block 768": ("attention", (768, 12), (32, 197, 768)),
    "BERT block 1024": ("attention", (1024, 16), (12, 256, 1024)),
    "MLP-Mixer 512": ("mixer", (256, 512), (24, 256, 512)),
    "GPT block 1792": ("causal", (1792, 14), (4, 1024, 1792)),
    "GPT block 2560": ("causal", (2560, 20), (2, 1024, 2560)),
    "ViT block 1152": ("attention", (1152, 16), (16, 256, 1152)),
}
# Row-wise kernels for development: the operation, the number of rows, and their length.
ROWS = (("layer norm", 3840, 1536), ("sum and layer norm", 3840, 1536), ("sum and layer norm", 2048, 2560),
        ("sum and layer norm", 4096, 1152), ("sum and layer norm", 2048, 4096), ("sum and RMS norm", 2048, 5120),
        ("sum and layer norm", 3072, 1792), ("softmax", 6000, 1500), ("sum and layer norm", 64, 3072),
        ("sum and RMS norm", 4096, 2048), ("sum and layer norm", 2000, 8192), ("softmax", 3000, 4000))  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A call to compile, and several sets of arguments, so that repeated calls do not find theirs in the cache."""

    name: str
    kind: str  # mm, addmm, bmm, flex, model or rows
    call: Callable[..., Any]
    sets: tuple[tuple[Any, ...], ...]


def products(seed: int, count: int) -> list[RandomProblem]:
    """Draw products like those of model layers: operation, sizes (batch first for bmm) and dtype."""
    chance = np.random.default_rng(seed)
    problems: list[RandomProblem] = []
    for number in range(count):
        op = ("mm", "addmm", "mm", "bmm")[number % 4]
        dtype = "fp16" if number % 5 == 4 else "bf16"
        n, k = (int(chance.choice(_WIDTHS)) for _ in range(2))
        m = int(2 ** chance.uniform(0, 13)) if number % 3 else int(chance.integers(1, 64)) * 128
        if op == "bmm":
            rows, depth = int(chance.choice((128, 197, 256, 384, 512, 1000))), int(chance.choice((64, 80, 128)))
            problems.append((op, (int(chance.integers(8, 128)), rows, rows, depth), dtype))
        else:
            problems.append((op, (m, n, k), dtype))
    return problems


def attentions(seed: int, count: int) -> list[RandomProblem]:
    """Draw attention problems: a mask or score function, and sizes (batch, heads, key heads, length, head size)."""
    chance = np.random.default_rng(seed)
    problems: list[RandomProblem] = []
    for number in range(count):
        heads = int(chance.choice((8, 12, 16, 20, 32)))
        sizes = (int(chance.integers(1, 5)), heads, heads // (4 if number % 4 == 3 else 1),
                 int(chance.integers(4, 33)) * 128, (64, 128)[number % 2])  # fmt: skip
        problems.append((("causal", "window", "alibi", "causal")[number % 4], sizes, "bf16"))
    return problems


def product_job(torch: Any, problem: RandomProblem) -> Job:
    """Create the call and the operands of a product."""
    op, sizes, dtype = problem
    *batch, m, n, k = sizes
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]

    def operands() -> tuple[Any, ...]:
        a = torch.randn(*batch, m, k, device="cuda", dtype=kind)
        b = torch.randn(*batch, n, k, device="cuda", dtype=kind).mT
        return (torch.randn(n, device="cuda", dtype=kind), a, b) if op == "addmm" else (a, b)

    operand_bytes = 2 * math.prod(batch) * (m * k + k * n)
    count = min(8, math.ceil(_CACHE_BYTES / operand_bytes))
    calls = {"mm": torch.mm, "bmm": torch.bmm, "addmm": torch.addmm}
    return Job(f"{op} {sizes} {dtype}", op, calls[op], tuple(operands() for _ in range(count)))


def attention_job(torch: Any, problem: RandomProblem) -> Job:
    """Create the call and the operands of flexible attention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    kind, (batch, heads, kv_heads, length, head), _ = problem
    masks = {
        "causal": lambda b, h, q, k: q >= k,
        "window": lambda b, h, q, k: (q >= k) & (q - k <= 512),
    }
    mask = create_block_mask(masks[kind], None, None, length, length, device="cuda") if kind in masks else None
    slopes = torch.exp2(-8.0 * torch.arange(1, heads + 1, device="cuda") / heads)

    def alibi(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + (k - q) * slopes[h]

    def call(q: Any, k: Any, v: Any) -> Any:
        return flex_attention(q, k, v, score_mod=alibi if kind == "alibi" else None, block_mask=mask,
                              enable_gqa=heads != kv_heads)  # fmt: skip

    shapes = ((batch, heads, length, head), *[(batch, kv_heads, length, head)] * 2)
    sets = tuple(tuple(torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in shapes) for _ in range(2))
    return Job(f"flex {kind} {(batch, heads, kv_heads, length, head)} bf16", "flex", call, sets)


def model_job(torch: Any, name: str) -> Job:
    """Create a block of a model in bf16, with random input."""
    nn = torch.nn

    class Attention(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self, width: int, heads: int, causal: bool) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            self.heads, self.causal = heads, causal

        def forward(self, x: Any) -> Any:
            b, t, c = x.shape
            q, k, v = self.qkv(self.one(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
            x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
            return x + self.mlp(self.two(x))

    class Mixer(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self, tokens: int, width: int) -> None:
            super().__init__()
            self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
            self.across = nn.Sequential(nn.Linear(tokens, 256), nn.GELU(), nn.Linear(256, tokens))
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: Any) -> Any:
            x = x + self.across(self.one(x).mT).mT
            return x + self.mlp(self.two(x))

    kind, numbers, shape = (MODELS | TRAINING_MODELS)[name]
    module = Mixer(*numbers) if kind == "mixer" else Attention(*numbers, kind == "causal")
    inputs = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    return Job(name, "model", module.to("cuda", torch.bfloat16).eval(), ((inputs,),))


def rows_job(torch: Any, operation: str, rows: int, length: int) -> Job:
    """Create a norm or a softmax in bf16; a sum in front of it is a result as well, as in a residual block."""
    nn = torch.nn.functional

    def norm(x: Any, weight: Any, bias: Any) -> Any:
        return (
            nn.rms_norm(x, (length,), weight, 1e-6) if "RMS" in operation else nn.layer_norm(x, (length,), weight, bias)
        )

    def call(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
        if operation == "softmax":
            return nn.softmax(x, -1)
        if "sum" not in operation:
            return norm(x, weight, bias)
        x = x + residual
        return x, norm(x, weight, bias)

    shapes = ((rows, length), (rows, length), (length,), (length,))
    sets = tuple(tuple(torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in shapes) for _ in range(2))
    return Job(f"{operation} {rows} x {length}", "rows", call, sets)
