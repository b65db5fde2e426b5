"""Matrix products: tutorials' tiles, TMA, persistent, split sums, gates, experts, FP8, implicit convolution."""

# The bodies are Triton's language, not Python's: its types are tl.tensor and tl.constexpr.
# mypy: ignore-errors

from typing import Any

import torch
import triton
import triton.language as tl
from triton import Config, cdiv

from benchmarks.pinned_kernels.registry import all_configs, case, randn


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
    args = (randn(m, k, device=device, dtype=dtype), randn(k, n, device=device, dtype=dtype),
            torch.empty(m, n, device=device, dtype=dtype), m, n, k)  # fmt: skip
    return args, lambda meta: (cdiv(m, meta["BLOCK_SIZE_M"]) * cdiv(n, meta["BLOCK_SIZE_N"]),)


@case("tutorial matmul", matmul_kernel, (2048, 2048, 2048), (512, 4096, 1024), (64, 4096, 4096), (1000, 1376, 512))
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


@case("TMA matmul", tma_matmul_kernel, (4096, 4096, 4096), (8192, 1024, 2048))
def _(problem, device):
    from triton.tools.tensor_descriptor import TensorDescriptor

    m, n, k = problem
    shapes = ((m, k), (n, k), (m, n))
    tensors = [randn(*shape, device=device, dtype=torch.float16) for shape in shapes]
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


@case("int8 weights", int8_weight_kernel, (64, 4096, 4096), (1024, 4096, 1024))
def _(problem, device):
    rows, cols, depth = problem
    weight = torch.randint(-127, 127, (cols, depth), device=device, dtype=torch.int8)
    args = (randn(rows, depth, device=device), weight, torch.rand(cols, device=device) / 100,
            torch.empty(rows, cols, device=device, dtype=torch.bfloat16), rows, cols, depth)  # fmt: skip
    return args, lambda meta: (cdiv(rows, meta["BM"]), cdiv(cols, meta["BN"]))


@triton.autotune(
    all_configs({"BM": (32, 64, 128), "BN": (64, 128), "BK": (32, 64)}, (4, 8), (2, 4)), key=["m", "n", "k"]
)
@triton.jit
def batched_kernel(x, y, out, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    batch = tl.program_id(2).to(tl.int64)
    i, j = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        q = start + tl.arange(0, BK)
        left = tl.load(
            x + (batch * m + i[:, None]) * k + q[None, :], mask=(i[:, None] < m) & (q[None, :] < k), other=0.0
        )
        right = tl.load(
            y + (batch * k + q[:, None]) * n + j[None, :], mask=(q[:, None] < k) & (j[None, :] < n), other=0.0
        )
        total = tl.dot(left, right, total)
    mask = (i[:, None] < m) & (j[None, :] < n)
    tl.store(out + (batch * m + i[:, None]) * n + j[None, :], total.to(out.dtype.element_ty), mask=mask)


@case("batched product", batched_kernel, (64, 512, 512, 128), (128, 197, 197, 64))
def _(problem, device):
    batch, m, n, k = problem
    shapes = ((batch, m, k), (batch, k, n), (batch, m, n))
    tensors = [randn(*shape, device=device) for shape in shapes]
    return (*tensors, m, n, k), lambda meta: (cdiv(m, meta["BM"]), cdiv(n, meta["BN"]), batch)


@triton.autotune(all_configs({"BM": (16, 32, 64), "BN": (64, 128), "BK": (64, 128), "SPLIT": (1, 4, 16)}, (4,), (3,)),
                 key=["m", "n", "k"], reset_to_zero=["out"])  # fmt: skip
@triton.jit
def split_sum_kernel(x, w, out, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr):
    i, j = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(tl.program_id(2), tl.cdiv(k, BK), SPLIT):
        q = step * BK + tl.arange(0, BK)
        left = tl.load(x + i[:, None] * k + q[None, :], mask=(i[:, None] < m) & (q[None, :] < k), other=0.0)
        right = tl.load(w + q[:, None] * n + j[None, :], mask=(q[:, None] < k) & (j[None, :] < n), other=0.0)
        total = tl.dot(left, right, total)
    tl.atomic_add(out + i[:, None] * n + j[None, :], total, mask=(i[:, None] < m) & (j[None, :] < n))


@case("product with split sums", split_sum_kernel, (16, 4096, 14336), (128, 1024, 8192))
def _(problem, device):
    m, n, k = problem
    args = (randn(m, k, device=device), randn(k, n, device=device), torch.zeros(m, n, device=device), m, n, k)
    return args, lambda meta: (cdiv(m, meta["BM"]), cdiv(n, meta["BN"]), meta["SPLIT"])


@triton.autotune(
    all_configs({"BM": (32, 64, 128), "BN": (64, 128), "BK": (32, 64)}, (4, 8), (2, 3)), key=["m", "n", "k"]
)
@triton.jit
def gated_product_kernel(x, gate, up, out, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    i, j = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    left_sum, right_sum = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        q = start + tl.arange(0, BK)
        rows = tl.load(x + i[:, None] * k + q[None, :], mask=i[:, None] < m, other=0.0)
        left_sum = tl.dot(rows, tl.load(gate + j[None, :] * k + q[:, None], mask=j[None, :] < n, other=0.0), left_sum)
        right_sum = tl.dot(rows, tl.load(up + j[None, :] * k + q[:, None], mask=j[None, :] < n, other=0.0), right_sum)
    result = left_sum * tl.sigmoid(left_sum) * right_sum
    mask = (i[:, None] < m) & (j[None, :] < n)
    tl.store(out + i[:, None] * n + j[None, :], result.to(out.dtype.element_ty), mask=mask)


@case("two products and a gate", gated_product_kernel, (512, 11008, 4096), (2048, 4864, 896))
def _(problem, device):
    m, n, k = problem
    weights = [randn(n, k, device=device) for _ in range(2)]
    args = (randn(m, k, device=device), *weights, randn(m, n, device=device), m, n, k)
    return args, lambda meta: (cdiv(m, meta["BM"]), cdiv(n, meta["BN"]))


@triton.autotune(all_configs({"BN": (1, 4, 16, 64), "BK": (128, 512, 1024)}, (2, 4, 8)), key=["n", "k"])
@triton.jit
def matrix_vector_kernel(x, w, out, n, k, BN: tl.constexpr, BK: tl.constexpr):
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros([BN, BK], tl.float32)
    for start in range(0, k, BK):
        q = start + tl.arange(0, BK)
        rows = tl.load(w + j[:, None] * k + q[None, :], mask=(j[:, None] < n) & (q[None, :] < k), other=0.0)
        total += rows.to(tl.float32) * tl.load(x + q, mask=q < k, other=0.0).to(tl.float32)[None, :]
    tl.store(out + j, tl.sum(total, 1).to(out.dtype.element_ty), mask=j < n)


@case("matrix times vector", matrix_vector_kernel, (14336, 4096), (4096, 4096))
def _(problem, device):
    n, k = problem
    args = (randn(k, device=device), randn(n, k, device=device), randn(n, device=device), n, k)
    return args, lambda meta: (cdiv(n, meta["BN"]),)


@triton.autotune(all_configs({"BM": (16, 32, 64, 128), "BN": (64, 128), "BK": (32, 64)}, (4, 8), (3,)), key=["n", "k"])
@triton.jit
def expert_kernel(x, w, rows_of, expert_of, out, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    i, j = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    rows = tl.load(rows_of + i)
    expert = tl.load(expert_of + tl.program_id(0) * BM // 128).to(tl.int64)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        q = start + tl.arange(0, BK)
        left = tl.load(x + rows[:, None] * k + q[None, :])
        right = tl.load(w + expert * n * k + j[None, :] * k + q[:, None], mask=j[None, :] < n, other=0.0)
        total = tl.dot(left, right, total)
    tl.store(out + i[:, None] * n + j[None, :], total.to(out.dtype.element_ty), mask=j[None, :] < n)


@case("products of experts", expert_kernel, (8192, 1536, 2048), (2048, 768, 2048))
def _(problem, device):
    tokens, n, k = problem
    rows = torch.randint(0, tokens, (tokens,), device=device)
    experts = torch.randint(0, 16, (tokens // 128,), device=device)
    args = (randn(tokens, k, device=device), randn(16, n, k, device=device), rows, experts,
            randn(tokens, n, device=device), n, k)  # fmt: skip
    return args, lambda meta: (cdiv(tokens, meta["BM"]), cdiv(n, meta["BN"]))


@triton.autotune(
    all_configs({"BM": (64, 128), "BN": (32, 64, 128), "BK": (32, 64)}, (4, 8), (2, 3)), key=["size", "channels"]
)
@triton.jit
def convolution_kernel(x, w, out, size, channels, filters, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    pixel, j = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    row, col = (pixel // size) % size, pixel % size
    total = tl.zeros((BM, BN), tl.float32)
    for tap in range(9):
        dy, dx = tap // 3 - 1, tap % 3 - 1
        inside = (row + dy >= 0) & (row + dy < size) & (col + dx >= 0) & (col + dx < size)
        for start in range(0, channels, BK):
            q = start + tl.arange(0, BK)
            left = tl.load(
                x + (pixel + dy * size + dx)[:, None] * channels + q[None, :], mask=inside[:, None], other=0.0
            )
            right = tl.load(
                w + (tap * channels + q)[:, None] * filters + j[None, :], mask=j[None, :] < filters, other=0.0
            )
            total = tl.dot(left, right, total)
    tl.store(out + pixel[:, None] * filters + j[None, :], total.to(out.dtype.element_ty), mask=j[None, :] < filters)


@case("implicit convolution", convolution_kernel, (32, 32, 128, 128), (16, 16, 256, 512))
def _(problem, device):
    images, size, channels, filters = problem
    x, out = (randn(images, size, size, c, device=device) for c in (channels, filters))
    args = (x, randn(9, channels, filters, device=device), out, size, channels, filters)
    return args, lambda meta: (images * size * size // meta["BM"], cdiv(filters, meta["BN"]))


@triton.autotune(
    all_configs({"BM": (64, 128), "BN": (64, 128, 256), "BK": (64,)}, (4, 8), (2, 3, 4)), key=["m", "n", "k"]
)
@triton.jit
def persistent_product_kernel(x, w, out, m, n, k, programs, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    columns = tl.cdiv(n, BN)
    for tile in tl.range(tl.program_id(0), tl.cdiv(m, BM) * columns, programs):
        i, j = tile // columns * BM + tl.arange(0, BM), tile % columns * BN + tl.arange(0, BN)
        total = tl.zeros((BM, BN), tl.float32)
        for start in range(0, k, BK):
            q = start + tl.arange(0, BK)
            left = tl.load(x + i[:, None] * k + q[None, :], mask=i[:, None] < m, other=0.0)
            right = tl.load(w + j[None, :] * k + q[:, None], mask=j[None, :] < n, other=0.0)
            total = tl.dot(left, right, total)
        mask = (i[:, None] < m) & (j[None, :] < n)
        tl.store(out + i[:, None] * n + j[None, :], total.to(out.dtype.element_ty), mask=mask)


@case("persistent product", persistent_product_kernel, (4096, 4096, 1024), (1536, 2048, 2048))
def _(problem, device):
    m, n, k = problem
    tensors = [randn(*shape, device=device) for shape in ((m, k), (n, k), (m, n))]
    return (*tensors, m, n, k, 132), (132,)


@triton.autotune(all_configs({"BM": (16, 64, 128), "BN": (64, 128)}, (4, 8), (2, 3, 4)), key=["m", "n", "k"])
@triton.jit
def block_scaled_kernel(x, w, x_scale, w_scale, out, m, n, k, BM: tl.constexpr, BN: tl.constexpr):
    i, j = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(tl.cdiv(k, 128)):
        q = step * 128 + tl.arange(0, 128)
        left = tl.load(x + i[:, None] * k + q[None, :], mask=i[:, None] < m, other=0.0)
        right = tl.load(w + j[None, :] * k + q[:, None], mask=j[None, :] < n, other=0.0)
        rows = tl.load(x_scale + i * (k // 128) + step, mask=i < m, other=0.0)
        columns = tl.load(w_scale + j // 128 * (k // 128) + step)
        total += tl.dot(left, right) * rows[:, None] * columns[None, :]
    mask = (i[:, None] < m) & (j[None, :] < n)
    tl.store(out + i[:, None] * n + j[None, :], total.to(out.dtype.element_ty), mask=mask)


@case("block-scaled FP8 product", block_scaled_kernel, (64, 4096, 7168), (2048, 2048, 4096))
def _(problem, device):
    m, n, k = problem
    x, w = (randn(rows, k, device=device, dtype=torch.float8_e4m3fn) for rows in (m, n))
    scales = torch.rand(m, k // 128, device=device), torch.rand(n // 128, k // 128, device=device)
    args = (x, w, *scales, randn(m, n, device=device), m, n, k)
    return args, lambda meta: (cdiv(m, meta["BM"]), cdiv(n, meta["BN"]))


@triton.autotune(all_configs({"BM": (32, 64, 128), "BK": (32, 64, 128)}, (2, 4, 8), (2, 4)), key=["m", "k"])
@triton.jit
def low_rank_kernel(x, a, out, m, k, RANK: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    i, j = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, RANK)
    total = tl.zeros((BM, RANK), tl.float32)
    for start in range(0, k, BK):
        q = start + tl.arange(0, BK)
        rows = tl.load(x + i[:, None] * k + q[None, :], mask=i[:, None] < m, other=0.0)
        total = tl.dot(rows, tl.load(a + q[:, None] * RANK + j[None, :]), total)
    tl.store(out + i[:, None] * RANK + j[None, :], total.to(out.dtype.element_ty), mask=i[:, None] < m)


@case("low-rank product", low_rank_kernel, (8192, 4096, 16), (4096, 3072, 64))
def _(problem, device):
    m, k, rank = problem
    args = (randn(m, k, device=device), randn(k, rank, device=device), randn(m, rank, device=device), m, k, rank)
    return args, lambda meta: (cdiv(m, meta["BM"]),)
