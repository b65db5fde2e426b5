"""Triton kernels as other people write them, each with its own list of configurations, for `benchmarks.pinned`.

They follow the styles of Triton's tutorials, of Liger (norms, losses, gated activations), of FLA (chunked scans) and of
vLLM, but are written for this benchmark. A case has a kernel decorated with `triton.autotune`, problems, and a function
that makes the arguments and the grid of a problem.
"""

# The bodies are Triton's language, not Python's: its types are tl.tensor and tl.constexpr.
# mypy: ignore-errors

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton import Config, cdiv, next_power_of_2


@dataclass(frozen=True)
class ForeignCase:
    """An autotuned kernel with problems; `make(problem, device)` returns its positional arguments and its grid."""

    name: str
    kernel: Any
    problems: tuple[tuple[int, ...], ...]
    make: Callable[[tuple[int, ...], str], tuple[tuple[Any, ...], Any]]


CASES: list[ForeignCase] = []


def _case(name: str, kernel: Any, *problems: tuple[int, ...]) -> Any:
    """Register the decorated function as the maker of a case's arguments."""

    def register(make: Any) -> Any:
        CASES.append(ForeignCase(name, kernel, problems, make))
        return make

    return register


def _blocks(blocks: tuple[int, ...], warps: tuple[int, ...]) -> list[Config]:
    """List every combination of block size and warps."""
    return [Config({"BLOCK": b}, num_warps=w) for b in blocks for w in warps]


def _rows(warps=(1, 2, 4, 8, 16)) -> list[Config]:
    return [Config({}, num_warps=w) for w in warps]


def _randn(*size: int, device: str, dtype: Any = torch.bfloat16) -> Any:
    return torch.randn(size, device=device, dtype=torch.float32).to(dtype)


# Elementwise


@triton.autotune(_blocks((256, 512, 1024, 2048, 4096), (4, 8)), key=["n"])
@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


@_case("vector add", add_kernel, (1 << 24,), (1 << 20,))
def _(problem, device):
    (n,) = problem
    x = [_randn(n, device=device, dtype=torch.float32) for _ in range(3)]
    return (*x, n), lambda meta: (cdiv(n, meta["BLOCK"]),)


@triton.autotune(_blocks((512, 1024, 2048, 4096, 8192), (4, 8, 16)), key=["cols"])
@triton.jit
def swiglu_kernel(gate, up, out, n, cols, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(out + i, (g * tl.sigmoid(g)).to(out.dtype.element_ty) * tl.load(up + i, mask=i < n, other=0.0), mask=i < n)


@_case("swiglu", swiglu_kernel, (4096, 11008), (64, 14336))
def _(problem, device):
    rows, cols = problem
    x = [_randn(rows, cols, device=device) for _ in range(3)]
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


@_case("transposition", transpose_kernel, (4096, 4096), (1000, 3000))
def _(problem, device):
    rows, cols = problem
    args = (_randn(rows, cols, device=device), _randn(cols, rows, device=device), rows, cols)
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


@_case("rotary embedding", rope_kernel, (4096, 32, 64), (8192, 8, 64))
def _(problem, device):
    tokens, heads, half = problem
    x, cos = _randn(tokens, heads, 2 * half, device=device), _randn(tokens, half, device=device)
    return (x, cos, cos.clone(), tokens, heads, half, half), lambda meta: (cdiv(tokens * heads, meta["BLOCK"] // half),)


# Rows


@triton.autotune(_rows(), key=["cols"])
@triton.jit
def softmax_kernel(x, out, cols, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * cols + i, mask=i < cols, other=-float("inf")).to(tl.float32)
    e = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * cols + i, (e / tl.sum(e, 0)).to(out.dtype.element_ty), mask=i < cols)


@_case("softmax", softmax_kernel, (8192, 1024), (2048, 8192), (4096, 781))
def _(problem, device):
    rows, cols = problem
    x = _randn(rows, cols, device=device)
    return (x, torch.empty_like(x), cols, next_power_of_2(cols)), (rows,)


@triton.autotune(_rows(), key=["cols"])
@triton.jit
def rms_norm_kernel(x, weight, out, cols, eps, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * cols + i, mask=i < cols, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / cols + eps)
    w = tl.load(weight + i, mask=i < cols, other=0.0).to(tl.float32)
    tl.store(out + row * cols + i, (values * scale * w).to(out.dtype.element_ty), mask=i < cols)


@_case("rms norm", rms_norm_kernel, (8192, 4096), (16384, 512))
def _(problem, device):
    rows, cols = problem
    x = _randn(rows, cols, device=device)
    return (x, _randn(cols, device=device), torch.empty_like(x), cols, 1e-6, next_power_of_2(cols)), (rows,)


@triton.autotune([Config({"BLOCK": b}, num_warps=w, num_stages=s) for b in (512, 1024, 2048, 4096) for w in (4, 8, 16)
                  for s in (1, 3)], key=["cols"])  # fmt: skip
@triton.jit
def layer_norm_loop_kernel(x, weight, bias, out, cols, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, cols, BLOCK):
        i = start + tl.arange(0, BLOCK)
        values = tl.load(x + row * cols + i, mask=i < cols, other=0.0).to(tl.float32)
        total += values
        squares += values * values
    mean = tl.sum(total, 0) / cols
    scale = tl.rsqrt(tl.sum(squares, 0) / cols - mean * mean + eps)
    for start in range(0, cols, BLOCK):
        i = start + tl.arange(0, BLOCK)
        values = tl.load(x + row * cols + i, mask=i < cols, other=0.0).to(tl.float32)
        w = tl.load(weight + i, mask=i < cols).to(tl.float32)
        b = tl.load(bias + i, mask=i < cols).to(tl.float32)
        tl.store(out + row * cols + i, ((values - mean) * scale * w + b).to(out.dtype.element_ty), mask=i < cols)


@_case("layer norm in a loop", layer_norm_loop_kernel, (4096, 8192), (8192, 2560))
def _(problem, device):
    rows, cols = problem
    x = _randn(rows, cols, device=device)
    args = (x, _randn(cols, device=device), _randn(cols, device=device), torch.empty_like(x), cols, 1e-5)
    return args, (rows,)


@triton.autotune([Config({"BLOCK": b}, num_warps=w) for b in (1024, 2048, 4096, 8192, 16384) for w in (4, 8, 16, 32)],
                 key=["vocabulary"])  # fmt: skip
@triton.jit
def cross_entropy_kernel(logits, targets, losses, vocabulary, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    highest = -float("inf")
    total = 0.0
    for start in range(0, vocabulary, BLOCK):
        i = start + tl.arange(0, BLOCK)
        values = tl.load(logits + row * vocabulary + i, mask=i < vocabulary, other=-float("inf")).to(tl.float32)
        now = tl.maximum(highest, tl.max(values, 0))
        total = total * tl.exp(highest - now) + tl.sum(tl.exp(values - now), 0)
        highest = now
    at_target = tl.load(logits + row * vocabulary + target).to(tl.float32)
    tl.store(losses + row, highest + tl.log(total) - at_target)


@_case("cross entropy", cross_entropy_kernel, (4096, 32000), (1024, 128256))
def _(problem, device):
    rows, vocabulary = problem
    logits = _randn(rows, vocabulary, device=device)
    targets = torch.arange(rows, device=device) % vocabulary
    return (logits, targets, torch.empty(rows, device=device), vocabulary), (rows,)


@triton.autotune([Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=w) for m in (32, 64, 128) for n in (32, 64, 128)
                  for w in (2, 4, 8)], key=["rows", "cols"])  # fmt: skip
@triton.jit
def column_sum_kernel(x, out, rows, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, rows, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        inside = (m[:, None] < rows) & (n[None, :] < cols)
        total += tl.load(x + m[:, None] * cols + n[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + n, tl.sum(total, 0), mask=n < cols)


@_case("column sum", column_sum_kernel, (4096, 8192), (2048, 32768))
def _(problem, device):
    rows, cols = problem
    args = (_randn(rows, cols, device=device), torch.empty(cols, device=device), rows, cols)
    return args, lambda meta: (cdiv(cols, meta["BLOCK_N"]),)


@triton.autotune([Config({"BLOCK_T": t, "BLOCK_D": d}, num_warps=w) for t in (16, 32, 64) for d in (32, 64, 128)
                  for w in (1, 2, 4, 8)], key=["length", "width"])  # fmt: skip
@triton.jit
def causal_conv_kernel(x, weight, out, length, width, TAPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    base = tl.program_id(2) * length * width
    total = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for tap in tl.static_range(TAPS):
        source = t - tap
        inside = (source[:, None] >= 0) & (t[:, None] < length) & (d[None, :] < width)
        values = tl.load(x + base + source[:, None] * width + d[None, :], mask=inside, other=0.0).to(tl.float32)
        total += values * tl.load(weight + tap * width + d, mask=d < width)[None, :].to(tl.float32)
    inside = (t[:, None] < length) & (d[None, :] < width)
    result = (total * tl.sigmoid(total)).to(out.dtype.element_ty)
    tl.store(out + base + t[:, None] * width + d[None, :], result, mask=inside)


@_case("causal convolution", causal_conv_kernel, (8, 2048, 4096), (2, 1024, 1536))
def _(problem, device):
    batch, length, width = problem
    x = _randn(batch, length, width, device=device)
    args = (x, _randn(4, width, device=device), torch.empty_like(x), length, width, 4)
    return args, lambda meta: (cdiv(length, meta["BLOCK_T"]), cdiv(width, meta["BLOCK_D"]), batch)


@triton.autotune([Config({"BLOCK_T": t, "BLOCK_D": d}, num_warps=w) for t in (32, 64, 128) for d in (16, 32, 64)
                  for w in (2, 4, 8)], key=["length", "width"])  # fmt: skip
@triton.jit
def cumulative_sum_kernel(x, out, length, width, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    base = tl.program_id(1) * length * width
    carry = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, length, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        inside = (t[:, None] < length) & (d[None, :] < width)
        values = tl.load(x + base + t[:, None] * width + d[None, :], mask=inside, other=0.0).to(tl.float32)
        sums = tl.cumsum(values, 0) + carry[None, :]
        tl.store(out + base + t[:, None] * width + d[None, :], sums, mask=inside)
        carry += tl.sum(values, 0)


@_case("cumulative sum", cumulative_sum_kernel, (8, 2048, 1024), (32, 512, 512))
def _(problem, device):
    batch, length, width = problem
    x = _randn(batch, length, width, device=device, dtype=torch.float32)
    return (x, torch.empty_like(x), length, width), lambda meta: (cdiv(width, meta["BLOCK_D"]), batch)


# Products


def _tiles(*tiles: tuple[int, ...]) -> list[Config]:
    """List tiles (m, n, k, stages, warps) with groups of eight rows of blocks."""
    return [
        Config({"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": 8}, num_stages=s, num_warps=w)
        for m, n, k, s, w in tiles
    ]


_TUTORIAL = _tiles((128, 256, 64, 3, 8), (64, 256, 32, 4, 4), (128, 128, 32, 4, 4), (128, 64, 32, 4, 4),
                   (64, 128, 32, 4, 4), (128, 32, 32, 4, 4), (64, 32, 32, 5, 2), (32, 64, 32, 5, 2),
                   (128, 256, 128, 3, 8), (256, 128, 128, 3, 8), (128, 128, 64, 4, 4), (64, 64, 64, 4, 4))  # fmt: skip


@triton.autotune(_TUTORIAL, key=["M", "N", "K"])
@triton.jit
def matmul_kernel(a, b, c, M, N, K, BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr,
                  GROUP_SIZE_M: tl.constexpr):  # fmt: skip
    pid = tl.program_id(0)
    rows, cols = tl.cdiv(M, BLOCK_SIZE_M), tl.cdiv(N, BLOCK_SIZE_N)
    group = pid // (GROUP_SIZE_M * cols)
    size = min(rows - group * GROUP_SIZE_M, GROUP_SIZE_M)
    pid_m = group * GROUP_SIZE_M + (pid % (GROUP_SIZE_M * cols)) % size
    pid_n = (pid % (GROUP_SIZE_M * cols)) // size
    m = (pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)) % M
    n = (pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)) % N
    k = tl.arange(0, BLOCK_SIZE_K)
    total = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32)
    for step in range(tl.cdiv(K, BLOCK_SIZE_K)):
        inside = k < K - step * BLOCK_SIZE_K
        left = tl.load(a + m[:, None] * K + (step * BLOCK_SIZE_K + k)[None, :], mask=inside[None, :], other=0.0)
        right = tl.load(b + (step * BLOCK_SIZE_K + k)[:, None] * N + n[None, :], mask=inside[:, None], other=0.0)
        total = tl.dot(left, right, total)
    m = pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    n = pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    mask = (m[:, None] < M) & (n[None, :] < N)
    tl.store(c + m[:, None] * N + n[None, :], total.to(c.dtype.element_ty), mask=mask)


def _product_arguments(problem, device, dtype=torch.float16):
    m, n, k = problem
    args = (_randn(m, k, device=device, dtype=dtype), _randn(k, n, device=device, dtype=dtype),
            torch.empty(m, n, device=device, dtype=dtype), m, n, k)  # fmt: skip
    return args, lambda meta: (cdiv(m, meta["BLOCK_SIZE_M"]) * cdiv(n, meta["BLOCK_SIZE_N"]),)


@_case("tutorial matmul", matmul_kernel, (2048, 2048, 2048), (512, 4096, 1024), (64, 4096, 4096), (1000, 1376, 512))
def _(problem, device):
    return _product_arguments(problem, device)


def _set_blocks(nargs: dict[str, Any]) -> None:
    m, n, k = (nargs[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    nargs["a_desc"].block_shape, nargs["b_desc"].block_shape = [m, k], [n, k]
    nargs["c_desc"].block_shape = [m, n]


@triton.autotune(
    [Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8}, num_stages=s, num_warps=w, pre_hook=_set_blocks)
     for m in (128,) for n in (128, 256) for k in (64, 128) for s in (2, 3, 4) for w in (4, 8)],
    key=["M", "N", "K"],
)  # fmt: skip
@triton.jit
def tma_matmul_kernel(a_desc, b_desc, c_desc, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                      BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr):  # fmt: skip
    pid = tl.program_id(0)
    rows, cols = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = pid // (GROUP_M * cols)
    size = min(rows - group * GROUP_M, GROUP_M)
    m = (group * GROUP_M + (pid % (GROUP_M * cols)) % size) * BLOCK_M
    n = ((pid % (GROUP_M * cols)) // size) * BLOCK_N
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(tl.cdiv(K, BLOCK_K)):
        total = tl.dot(a_desc.load([m, step * BLOCK_K]), b_desc.load([n, step * BLOCK_K]).T, total)
    c_desc.store([m, n], total.to(tl.float16))


@_case("TMA matmul", tma_matmul_kernel, (4096, 4096, 4096), (8192, 1024, 2048))
def _(problem, device):
    from triton.tools.tensor_descriptor import TensorDescriptor

    m, n, k = problem
    shapes = ((m, k), (n, k), (m, n))
    tensors = [_randn(*shape, device=device, dtype=torch.float16) for shape in shapes]
    descriptors = [TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1]) for x in tensors]
    return (*descriptors, m, n, k), lambda meta: (cdiv(m, meta["BLOCK_M"]) * cdiv(n, meta["BLOCK_N"]),)


@triton.autotune([Config({"BM": m, "BN": n, "BK": 32}, num_stages=s, num_warps=w) for m in (32, 64, 128)
                  for n in (32, 64, 128) for s in (2, 4) for w in (4, 8)], key=["rows", "cols", "depth"])  # fmt: skip
@triton.jit
def int8_weight_kernel(x, weight, scale, out, rows, cols, depth, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, depth, BK):
        left = tl.load(x + m[:, None] * depth + (start + k)[None, :], mask=m[:, None] < rows, other=0.0)
        right = tl.load(weight + n[None, :] * depth + (start + k)[:, None], mask=n[None, :] < cols, other=0)
        total = tl.dot(left, right.to(left.dtype), total)
    total = total * tl.load(scale + n, mask=n < cols)[None, :]
    mask = (m[:, None] < rows) & (n[None, :] < cols)
    tl.store(out + m[:, None] * cols + n[None, :], total.to(out.dtype.element_ty), mask=mask)


@_case("int8 weights", int8_weight_kernel, (64, 4096, 4096), (1024, 4096, 1024))
def _(problem, device):
    rows, cols, depth = problem
    weight = torch.randint(-127, 127, (cols, depth), device=device, dtype=torch.int8)
    args = (_randn(rows, depth, device=device), weight, torch.rand(cols, device=device) / 100,
            torch.empty(rows, cols, device=device, dtype=torch.bfloat16), rows, cols, depth)  # fmt: skip
    return args, lambda meta: (cdiv(rows, meta["BM"]), cdiv(cols, meta["BN"]))


# Attention


@triton.autotune([Config({"BLOCK_M": m, "BLOCK_N": n}, num_stages=s, num_warps=w) for m in (64, 128)
                  for n in (32, 64, 128) for s in (2, 3, 4) for w in (4, 8)], key=["length", "HEAD"])  # fmt: skip
@triton.jit
def attention_kernel(q, k, v, out, scale, length, HEAD: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr,
                     BLOCK_N: tl.constexpr):  # fmt: skip
    start_m, base = tl.program_id(0), tl.program_id(1) * length * HEAD
    m = start_m * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, HEAD)
    queries = tl.load(q + base + m[:, None] * HEAD + d[None, :], mask=m[:, None] < length, other=0.0)
    highest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    values = tl.zeros([BLOCK_M, HEAD], tl.float32)
    end = length
    if CAUSAL:
        end = min(length, (start_m + 1) * BLOCK_M)
    for start in range(0, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        keys = tl.load(k + base + n[None, :] * HEAD + d[:, None], mask=n[None, :] < length, other=0.0)
        scores = tl.dot(queries, keys) * scale
        if CAUSAL:
            scores = tl.where(m[:, None] >= n[None, :], scores, -float("inf"))
        now = tl.maximum(highest, tl.max(scores, 1))
        p = tl.exp2(scores - now[:, None])
        decay = tl.exp2(highest - now)
        total = total * decay + tl.sum(p, 1)
        block = tl.load(v + base + n[:, None] * HEAD + d[None, :], mask=n[:, None] < length, other=0.0)
        values = tl.dot(p.to(block.dtype), block, values * decay[:, None])
        highest = now
    values = values / total[:, None]
    tl.store(out + base + m[:, None] * HEAD + d[None, :], values.to(out.dtype.element_ty), mask=m[:, None] < length)


def _attention_arguments(problem, device, causal):
    heads, length, head = problem
    x = [_randn(heads, length, head, device=device, dtype=torch.float16) for _ in range(4)]
    return (*x, 0.1, length, head, causal), lambda meta: (cdiv(length, meta["BLOCK_M"]), heads)


@_case("causal attention", attention_kernel, (32, 2048, 64), (64, 1024, 128))
def _(problem, device):
    return _attention_arguments(problem, device, True)


@triton.autotune([Config({"BK": k, "BV": v}, num_warps=w, num_stages=s) for k in (32, 64) for v in (32, 64, 128)
                  for w in (1, 2, 4, 8) for s in (2, 3)], key=["length", "WIDTH"])  # fmt: skip
@triton.jit
def chunk_state_kernel(k, v, states, length, WIDTH: tl.constexpr, CHUNK: tl.constexpr, BK: tl.constexpr,
                       BV: tl.constexpr):  # fmt: skip
    i = tl.program_id(0) * BK + tl.arange(0, BK)
    j = tl.program_id(1) * BV + tl.arange(0, BV)
    head = tl.program_id(2)
    base, chunks = head * length * WIDTH, tl.cdiv(length, CHUNK)
    state = tl.zeros([BK, BV], tl.float32)
    for chunk in range(chunks):
        t = chunk * CHUNK + tl.arange(0, CHUNK)
        tl.store(states + (head * chunks + chunk) * WIDTH * WIDTH + i[:, None] * WIDTH + j[None, :],
                 state.to(states.dtype.element_ty))  # fmt: skip
        keys = tl.load(k + base + t[None, :] * WIDTH + i[:, None])
        values = tl.load(v + base + t[:, None] * WIDTH + j[None, :])
        state += tl.dot(keys, values)


@_case("chunked state of linear attention", chunk_state_kernel, (64, 2048, 128), (16, 4096, 256))
def _(problem, device):
    heads, length, width = problem
    x = [_randn(heads, length, width, device=device) for _ in range(2)]
    states = torch.empty(heads, length // 64, width, width, device=device, dtype=torch.bfloat16)
    return (*x, states, length, width, 64), lambda meta: (width // meta["BK"], width // meta["BV"], heads)


# Backward


@triton.autotune(_rows((1, 2, 4, 8, 16)), key=["cols"])
@triton.jit
def rms_norm_backward_kernel(grad, x, weight, out, cols, eps, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    g = tl.load(grad + row * cols + i, mask=i < cols, other=0.0).to(tl.float32)
    values = tl.load(x + row * cols + i, mask=i < cols, other=0.0).to(tl.float32)
    w = tl.load(weight + i, mask=i < cols, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / cols + eps)
    inner = tl.sum(g * w * values, 0) * scale * scale / cols
    tl.store(out + row * cols + i, ((g * w - values * inner) * scale).to(out.dtype.element_ty), mask=i < cols)


@_case("rms norm backward", rms_norm_backward_kernel, (8192, 4096), (32768, 1024))
def _(problem, device):
    rows, cols = problem
    x = [_randn(rows, cols, device=device) for _ in range(2)]
    return (*x, _randn(cols, device=device), torch.empty_like(x[0]), cols, 1e-6, next_power_of_2(cols)), (rows,)


@triton.autotune([Config({"BLOCK": b}, num_warps=w) for b in (256, 512, 1024, 2048) for w in (2, 4, 8)], key=["cols"])
@triton.jit
def gather_rows_kernel(indices, table, out, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(indices + row).to(tl.int64)
    for start in range(0, cols, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(out + row * cols + i, tl.load(table + source * cols + i, mask=i < cols), mask=i < cols)


@_case("gathered rows", gather_rows_kernel, (16384, 4096), (65536, 768))
def _(problem, device):
    rows, cols = problem
    indices = torch.randint(0, 32000, (rows,), device=device)
    return (indices, _randn(32000, cols, device=device), _randn(rows, cols, device=device), cols), (rows,)
