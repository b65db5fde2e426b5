"""Elementwise kernels: gated activations, optimizers, random numbers, scattered and gathered rows."""

# The bodies are Triton's language, not Python's: its types are tl.tensor and tl.constexpr.
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from triton import Config, cdiv

from benchmarks.pinned_kernels.registry import all_configs, block_configs, case, randn


@triton.autotune(block_configs((256, 512, 1024, 2048, 4096), (4, 8)), key=["n"])
@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


@case("vector add", add_kernel, (1 << 24,), (1 << 20,))
def _(problem, device):
    (n,) = problem
    x = [randn(n, device=device, dtype=torch.float32) for _ in range(3)]
    return (*x, n), lambda meta: (cdiv(n, meta["BLOCK"]),)


@triton.autotune(block_configs((512, 1024, 2048, 4096, 8192), (4, 8, 16)), key=["cols"])
@triton.jit
def swiglu_kernel(gate, up, out, n, cols, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(out + i, (g * tl.sigmoid(g)).to(out.dtype.element_ty) * tl.load(up + i, mask=i < n, other=0.0), mask=i < n)


@case("swiglu", swiglu_kernel, (4096, 11008), (64, 14336))
def _(problem, device):
    rows, cols = problem
    x = [randn(rows, cols, device=device) for _ in range(3)]
    return (*x, rows * cols, cols), lambda meta: (cdiv(rows * cols, meta["BLOCK"]),)


@triton.autotune([Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=w) for m in (16, 32, 64, 128) for n in (32, 64, 128)
                  for w in (4, 8)], key=["rows", "cols"])  # fmt: skip
@triton.jit
def transpose_kernel(x, out, rows, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (m[:, None] < rows) & (n[None, :] < cols)
    tile = tl.load(x + m[:, None] * cols + n[None, :], mask=inside)
    tl.store(out + n[None, :] * rows + m[:, None], tile, mask=inside)


@case("transposition", transpose_kernel, (4096, 4096), (1000, 3000))
def _(problem, device):
    rows, cols = problem
    args = (randn(rows, cols, device=device), randn(cols, rows, device=device), rows, cols)
    return args, lambda meta: (cdiv(rows, meta["BLOCK_M"]), cdiv(cols, meta["BLOCK_N"]))


@triton.autotune([Config({"BLOCK": b}, num_warps=w) for b in (64, 128, 256, 512) for w in (1, 2, 4, 8)], key=["half"])
@triton.jit
def rope_kernel(x, cos, sin, tokens, heads, half, HALF: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * (BLOCK // HALF) + tl.arange(0, BLOCK // HALF)
    col = tl.arange(0, HALF)
    inside = row[:, None] < tokens * heads
    base = x + row[:, None] * (2 * HALF) + col[None, :]
    token = row // heads
    c = tl.load(cos + token[:, None] * HALF + col[None, :], mask=inside)
    s = tl.load(sin + token[:, None] * HALF + col[None, :], mask=inside)
    first = tl.load(base, mask=inside)
    second = tl.load(base + HALF, mask=inside)
    tl.store(base, (first * c - second * s).to(x.dtype.element_ty), mask=inside)
    tl.store(base + HALF, (second * c + first * s).to(x.dtype.element_ty), mask=inside)


@case("rotary embedding", rope_kernel, (4096, 32, 64), (8192, 8, 64))
def _(problem, device):
    tokens, heads, half = problem
    x, cos = randn(tokens, heads, 2 * half, device=device), randn(tokens, half, device=device)
    return (x, cos, cos.clone(), tokens, heads, half, half), lambda meta: (cdiv(tokens * heads, meta["BLOCK"] // half),)


@triton.autotune([Config({"BLOCK": b}, num_warps=w) for b in (256, 512, 1024, 2048) for w in (2, 4, 8)], key=["cols"])
@triton.jit
def gather_rows_kernel(indices, table, out, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(indices + row).to(tl.int64)
    for start in range(0, cols, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(out + row * cols + i, tl.load(table + source * cols + i, mask=i < cols), mask=i < cols)


@case("gathered rows", gather_rows_kernel, (16384, 4096), (65536, 768))
def _(problem, device):
    rows, cols = problem
    indices = torch.randint(0, 32000, (rows,), device=device)
    return (indices, randn(32000, cols, device=device), randn(rows, cols, device=device), cols), (rows,)


@triton.autotune(block_configs((512, 1024, 2048, 4096), (2, 4, 8, 16)), key=["n"])
@triton.jit
def gelu_backward_kernel(grad, x, bias, out, n, cols, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = (tl.load(x + i, mask=i < n) + tl.load(bias + i % cols, mask=i < n)).to(tl.float32)
    cdf = 0.5 * (1 + tl.erf(v * 0.7071067811865476))
    slope = cdf + v * 0.3989422804014327 * tl.exp(-0.5 * v * v)
    tl.store(out + i, (tl.load(grad + i, mask=i < n) * slope).to(out.dtype.element_ty), mask=i < n)


@case("gelu backward with bias", gelu_backward_kernel, (8192, 4096), (512, 3072))
def _(problem, device):
    rows, cols = problem
    x = [randn(rows, cols, device=device) for _ in range(2)]
    args = (*x, randn(cols, device=device), torch.empty_like(x[0]), rows * cols, cols)
    return args, lambda meta: (cdiv(rows * cols, meta["BLOCK"]),)


@triton.autotune(block_configs((256, 512, 1024, 2048, 4096), (2, 4, 8)), key=["n"])
@triton.jit
def dropout_kernel(x, out, n, share, seed, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.rand(seed, i) > share
    tl.store(out + i, tl.where(keep, tl.load(x + i, mask=i < n) / (1 - share), 0.0), mask=i < n)


@case("dropout", dropout_kernel, (1 << 25,), (3 << 18,))
def _(problem, device):
    x = randn(*problem, device=device, dtype=torch.float32)
    return (x, torch.empty_like(x), problem[0], 0.1, 7), lambda meta: (cdiv(problem[0], meta["BLOCK"]),)


@triton.autotune(block_configs((256, 512, 1024, 2048), (2, 4, 8, 16)), key=["n"])
@triton.jit
def adamw_kernel(p, grad, mean, square, n, lr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    g = tl.load(grad + i, mask=inside).to(tl.float32)
    m = 0.9 * tl.load(mean + i, mask=inside) + 0.1 * g
    v = 0.95 * tl.load(square + i, mask=inside) + 0.05 * g * g
    w = tl.load(p + i, mask=inside)
    tl.store(mean + i, m, mask=inside)
    tl.store(square + i, v, mask=inside)
    tl.store(p + i, w - lr * (m / (tl.sqrt(v) + 1e-8) + 0.01 * w), mask=inside)


@case("AdamW step", adamw_kernel, (1 << 25,), (1 << 21,))
def _(problem, device):
    p, m, v = (torch.rand(problem, device=device) for _ in range(3))
    args = (p, randn(*problem, device=device), m, v, problem[0], 1e-3)
    return args, lambda meta: (cdiv(problem[0], meta["BLOCK"]),)


@triton.autotune(all_configs({"BLOCK_T": (1, 4, 16), "BLOCK_D": (64, 128)}, (1, 2, 4, 8)), key=["length", "heads"])
@triton.jit
def swap_heads_kernel(x, out, length, heads, HEAD: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    inside = (t[:, None] < length) & (d[None, :] < HEAD)
    values = tl.load(x + (t[:, None] * heads + head) * HEAD + d[None, :], mask=inside)
    tl.store(out + (head * length + t[:, None]) * HEAD + d[None, :], values, mask=inside)


@case("heads before tokens", swap_heads_kernel, (8192, 32, 64), (16384, 12, 64))
def _(problem, device):
    length, heads, head = problem
    x = randn(length, heads, head, device=device)
    return (x, torch.empty_like(x), length, heads, head), lambda meta: (cdiv(length, meta["BLOCK_T"]), heads)


@triton.autotune(block_configs((128, 256, 512, 1024), (1, 2, 4, 8)), key=["cols"])
@triton.jit
def cache_write_kernel(key, value, slots, keys, values, cols, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + token)
    tl.store(keys + slot * cols + i, tl.load(key + token * cols + i, mask=i < cols), mask=i < cols)
    tl.store(values + slot * cols + i, tl.load(value + token * cols + i, mask=i < cols), mask=i < cols)


@case("write to a paged cache", cache_write_kernel, (8192, 1024), (256, 4096))
def _(problem, device):
    tokens, cols = problem
    x = [randn(tokens, cols, device=device) for _ in range(2)]
    pages = [randn(4 * tokens, cols, device=device) for _ in range(2)]
    slots = torch.randperm(4 * tokens, device=device)[:tokens]
    return (*x, slots, *pages, cols), lambda meta: (tokens, cdiv(cols, meta["BLOCK"]))


@triton.autotune(block_configs((128, 256, 512, 1024), (1, 2, 4, 8)), key=["cols"], reset_to_zero=["out"])
@triton.jit
def embedding_backward_kernel(grad, indices, out, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(indices + row)
    g = tl.load(grad + row * cols + i, mask=i < cols, other=0.0).to(tl.float32)
    tl.atomic_add(out + target * cols + i, g, mask=i < cols)


@case("embedding backward", embedding_backward_kernel, (16384, 1024), (4096, 768))
def _(problem, device):
    rows, cols = problem
    args = (randn(rows, cols, device=device), torch.randint(0, 8000, (rows,), device=device),
            torch.zeros(8000, cols, device=device), cols)  # fmt: skip
    return args, lambda meta: (rows, cdiv(cols, meta["BLOCK"]))
