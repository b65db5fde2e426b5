"""Quantized products and conversions: int4, int8 and FP8 weights and activations, grouped and symmetric products."""

# The bodies are Triton's language, not Python's: its types are tl.tensor and tl.constexpr.
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from triton import cdiv

from benchmarks.pinned_kernels.registry import all_configs, case, randn


@triton.autotune(all_configs({"BM": (16, 64), "BN": (32, 64, 128), "BK": (64, 128)}, (4, 8), (2, 4)),
                 key=["m", "n", "k"])  # fmt: skip
@triton.jit
def int4_kernel(x, weight, scales, zeros, out, m, n, k, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                BK: tl.constexpr):  # fmt: skip
    rows, cols = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    i = tl.arange(0, BK)
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, k, BK):
        depth = start + i
        left = tl.load(x + rows[:, None] * k + depth[None, :], mask=rows[:, None] < m, other=0.0)
        packed = tl.load(weight + (depth[:, None] // 8) * n + cols[None, :])
        values = (packed >> ((depth[:, None] % 8) * 4)) & 15
        group = start // GROUP
        zero = tl.load(zeros + group * n + cols)
        scale = tl.load(scales + group * n + cols)
        right = (values.to(tl.float16) - zero[None, :]) * scale[None, :]
        total = tl.dot(left, right.to(left.dtype), total)
    tl.store(out + rows[:, None] * n + cols[None, :], total.to(out.dtype.element_ty), mask=rows[:, None] < m)


@case("int4 weights in groups", int4_kernel, (16, 4096, 4096), (512, 4096, 2048))
def _(problem, device):
    m, n, k = problem
    x, out = randn(m, k, device=device, dtype=torch.float16), randn(m, n, device=device, dtype=torch.float16)
    weight = torch.randint(-(2**31), 2**31 - 1, (k // 8, n), device=device, dtype=torch.int32)
    scales, zeros = (randn(k // 128, n, device=device, dtype=torch.float16) for _ in range(2))
    return (x, weight, scales, zeros, out, m, n, k, 128), lambda meta: (cdiv(m, meta["BM"]), n // meta["BN"])


@triton.autotune(all_configs({"BM": (64, 128), "BN": (64, 128, 256), "BK": (64, 128)}, (4, 8), (3, 4)),
                 key=["m", "n", "k"])  # fmt: skip
@triton.jit
def int8_product_kernel(x, w, x_scale, w_scale, out, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows, cols = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    i = tl.arange(0, BK)
    total = tl.zeros([BM, BN], tl.int32)
    for start in range(0, k, BK):
        left = tl.load(x + rows[:, None] * k + (start + i)[None, :], mask=rows[:, None] < m, other=0)
        right = tl.load(w + cols[None, :] * k + (start + i)[:, None], mask=cols[None, :] < n, other=0)
        total = tl.dot(left, right, total, out_dtype=tl.int32)
    inside = (rows[:, None] < m) & (cols[None, :] < n)
    result = total.to(tl.float32) * tl.load(x_scale + rows, mask=rows < m)[:, None]
    result = result * tl.load(w_scale + cols, mask=cols < n)[None, :]
    tl.store(out + rows[:, None] * n + cols[None, :], result.to(out.dtype.element_ty), mask=inside)


@case("int8 product with scales", int8_product_kernel, (1024, 4096, 4096), (4096, 1536, 1024))
def _(problem, device):
    m, n, k = problem
    x, w = (torch.randint(-128, 127, size, device=device, dtype=torch.int8) for size in ((m, k), (n, k)))
    args = (x, w, torch.rand(m, device=device), torch.rand(n, device=device), randn(m, n, device=device), m, n, k)
    return args, lambda meta: (cdiv(m, meta["BM"]), cdiv(n, meta["BN"]))


@triton.autotune(all_configs({"BM": (1, 4, 16), "GROUPS": (1, 4, 16)}, (1, 2, 4, 8)), key=["cols"])
@triton.jit
def group_fp8_kernel(x, out, scales, rows, cols, GROUPS: tl.constexpr, BM: tl.constexpr):
    m, g = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    i = tl.arange(0, 128)
    place = m[:, None, None] * cols + g[None, :, None] * 128 + i[None, None, :]
    inside = (m[:, None, None] < rows) & (g[None, :, None] * 128 < cols)
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 2), 1e-6) / 448.0
    tl.store(out + place, (values / scale[:, :, None]).to(out.dtype.element_ty), mask=inside)
    outside = (m[:, None] < rows) & (g[None, :] * 128 < cols)
    tl.store(scales + m[:, None] * (cols // 128) + g[None, :], scale, mask=outside)


@case("FP8 in groups", group_fp8_kernel, (8192, 7168), (512, 2048))
def _(problem, device):
    rows, cols = problem
    x = randn(rows, cols, device=device)
    out = torch.empty(rows, cols, device=device, dtype=torch.float8_e4m3fn)
    args = (x, out, torch.empty(rows, cols // 128, device=device), rows, cols)
    return args, lambda meta: (cdiv(rows, meta["BM"]), cdiv(cols // 128, meta["GROUPS"]))


@triton.autotune(all_configs({"BK": (8, 16, 32, 64), "BN": (64, 128, 256)}, (2, 4, 8)), key=["n", "k"])
@triton.jit
def unpack_kernel(weight, scales, out, k, n, BK: tl.constexpr, BN: tl.constexpr):
    i, j = tl.program_id(0) * BK + tl.arange(0, BK), tl.program_id(1) * BN + tl.arange(0, BN)
    packed = tl.load(weight + (i[:, None] // 8) * n + j[None, :], mask=i[:, None] < k, other=0)
    values = ((packed >> ((i[:, None] % 8) * 4)) & 15) - 8
    scale = tl.load(scales + (i[:, None] // 128) * n + j[None, :], mask=i[:, None] < k, other=0.0)
    result = values.to(tl.float32) * scale.to(tl.float32)
    tl.store(out + i[:, None] * n + j[None, :], result.to(out.dtype.element_ty), mask=i[:, None] < k)


@case("unpacked int4 weights", unpack_kernel, (4096, 11008), (2048, 2048))
def _(problem, device):
    k, n = problem
    weight = torch.randint(-(2**31), 2**31 - 1, (k // 8, n), device=device, dtype=torch.int32)
    args = (weight, randn(k // 128, n, device=device), randn(k, n, device=device), k, n)
    return args, lambda meta: (cdiv(k, meta["BK"]), cdiv(n, meta["BN"]))


@triton.autotune(all_configs({"BM": (64, 128), "BN": (64, 128, 256), "BK": (64, 128)}, (4, 8), (3, 4)),
                 key=["m", "n", "k"])  # fmt: skip
@triton.jit
def fp8_product_kernel(x, w, scale, out, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    blocks_m, blocks_n = tl.cdiv(m, BM), tl.cdiv(n, BN)
    group = tl.program_id(0) // (8 * blocks_n)
    size = min(blocks_m - group * 8, 8)
    rows = (group * 8 + tl.program_id(0) % (8 * blocks_n) % size) * BM + tl.arange(0, BM)
    cols = (tl.program_id(0) % (8 * blocks_n)) // size * BN + tl.arange(0, BN)
    i = tl.arange(0, BK)
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, k, BK):
        left = tl.load(x + rows[:, None] * k + (start + i)[None, :], mask=rows[:, None] < m, other=0.0)
        right = tl.load(w + cols[None, :] * k + (start + i)[:, None], mask=cols[None, :] < n, other=0.0)
        total = tl.dot(left, right, total)
    total = total * tl.load(scale)
    inside = (rows[:, None] < m) & (cols[None, :] < n)
    tl.store(out + rows[:, None] * n + cols[None, :], total.to(out.dtype.element_ty), mask=inside)


@case("FP8 product", fp8_product_kernel, (2048, 4096, 4096), (512, 2048, 8192))
def _(problem, device):
    m, n, k = problem
    x, w = (randn(*size, device=device).to(torch.float8_e4m3fn) for size in ((m, k), (n, k)))
    args = (x, w, torch.ones(1, device=device), randn(m, n, device=device), m, n, k)
    return args, lambda meta: (cdiv(m, meta["BM"]) * cdiv(n, meta["BN"]),)


@triton.autotune(all_configs({"BM": (64, 128), "BN": (64, 128), "BK": (32, 64)}, (4, 8), (2, 3, 4)), key=["n", "k"])
@triton.jit
def symmetric_kernel(x, out, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    first_m, first_n = tl.program_id(0) * BM, tl.program_id(1) * BN
    if first_m + BM <= first_n:
        return
    rows, cols, i = first_m + tl.arange(0, BM), first_n + tl.arange(0, BN), tl.arange(0, BK)
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, k, BK):
        left = tl.load(x + rows[:, None] * k + (start + i)[None, :], mask=rows[:, None] < n, other=0.0)
        right = tl.load(x + cols[None, :] * k + (start + i)[:, None], mask=cols[None, :] < n, other=0.0)
        total = tl.dot(left, right, total)
    result = total.to(out.dtype.element_ty)
    inside = (rows[:, None] < n) & (cols[None, :] < n)
    tl.store(out + rows[:, None] * n + cols[None, :], result, mask=inside)
    tl.store(out + cols[None, :] * n + rows[:, None], result, mask=inside)


@case("symmetric product", symmetric_kernel, (4096, 1024), (1536, 4096))
def _(problem, device):
    n, k = problem
    args = (randn(n, k, device=device), randn(n, n, device=device), n, k)
    return args, lambda meta: (cdiv(n, meta["BM"]), cdiv(n, meta["BN"]))


@triton.autotune(all_configs({"BM": (64, 128), "BN": (64, 128), "BK": (32, 64), "PROGRAMS": (132, 264)}, (4, 8), (3,)),
                 key=["n", "k"])  # fmt: skip
@triton.jit
def grouped_kernel(x, w, ends, out, n, k, GROUPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                   PROGRAMS: tl.constexpr):  # fmt: skip
    blocks_n, i = tl.cdiv(n, BN), tl.arange(0, BK)
    tile, last, begin = tl.program_id(0), 0, 0
    for group in range(GROUPS):
        end = tl.load(ends + group)
        tiles = tl.cdiv(end - begin, BM) * blocks_n
        while tile < last + tiles:
            rows = begin + (tile - last) // blocks_n * BM + tl.arange(0, BM)
            cols = (tile - last) % blocks_n * BN + tl.arange(0, BN)
            total = tl.zeros([BM, BN], tl.float32)
            for start in range(0, k, BK):
                left = tl.load(x + rows[:, None] * k + (start + i)[None, :], mask=rows[:, None] < end, other=0.0)
                right = tl.load(w + group * n * k + (start + i)[:, None] * n + cols[None, :], mask=cols[None, :] < n,
                                other=0.0)  # fmt: skip
                total = tl.dot(left, right, total)
            inside = (rows[:, None] < end) & (cols[None, :] < n)
            tl.store(out + rows[:, None] * n + cols[None, :], total.to(out.dtype.element_ty), mask=inside)
            tile += PROGRAMS
        last += tiles
        begin = end


@case("product of groups", grouped_kernel, (8, 8192, 1536, 1024), (32, 4096, 768, 2048))
def _(problem, device):
    groups, rows, n, k = problem
    ends = (torch.arange(1, groups + 1, device=device) * (rows // groups)).to(torch.int32)
    args = (randn(rows, k, device=device), randn(groups, k, n, device=device), ends, randn(rows, n, device=device), n,
            k, groups)  # fmt: skip
    return args, lambda meta: (meta["PROGRAMS"],)


@triton.autotune(all_configs({"BM": (32, 64, 128), "BN": (64, 128), "BK": (32, 64)}, (4, 8), (2, 3)),
                 key=["m", "n", "k"])  # fmt: skip
@triton.jit
def tf32_gelu_kernel(x, w, bias, out, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows, cols = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    i = tl.arange(0, BK)
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, k, BK):
        left = tl.load(x + rows[:, None] * k + (start + i)[None, :], mask=rows[:, None] < m, other=0.0)
        right = tl.load(w + cols[None, :] * k + (start + i)[:, None], mask=cols[None, :] < n, other=0.0)
        total = tl.dot(left, right, total)
    total += tl.load(bias + cols, mask=cols < n, other=0.0)[None, :]
    total = 0.5 * total * (1.0 + tl.erf(total * 0.7071067811865476))
    inside = (rows[:, None] < m) & (cols[None, :] < n)
    tl.store(out + rows[:, None] * n + cols[None, :], total, mask=inside)


@case("float32 product and gelu", tf32_gelu_kernel, (2048, 3072, 768), (256, 4096, 1024))
def _(problem, device):
    m, n, k = problem
    x, w, bias, out = (torch.randn(size, device=device) for size in ((m, k), (n, k), (n,), (m, n)))
    return (x, w, bias, out, m, n, k), lambda meta: (cdiv(n, meta["BN"]), cdiv(m, meta["BM"]))
