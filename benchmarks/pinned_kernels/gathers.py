"""Kernels that gather, scatter, pool, count and select; losses and gradients over rows."""

# The bodies are Triton's language, not Python's: its types are tl.tensor and tl.constexpr.
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from triton import cdiv, next_power_of_2

from benchmarks.pinned_kernels.registry import all_configs, block_configs, case, randn, warp_configs


@triton.autotune(all_configs({"BLOCK": (1, 2, 4, 8, 16)}, (1, 2, 4, 8)), key=["EXPERTS"])
@triton.jit
def top_k_kernel(logits, weights, chosen, rows, EXPERTS: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr):
    m, e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, EXPERTS)
    values = tl.load(logits + m[:, None] * EXPERTS + e[None, :], mask=m[:, None] < rows, other=0.0).to(tl.float32)
    values = tl.exp(values - tl.max(values, 1)[:, None])
    values = values / tl.sum(values, 1)[:, None]
    for number in tl.static_range(TOP):
        best, place = tl.max(values, 1, return_indices=True)
        tl.store(weights + m * TOP + number, best, mask=m < rows)
        tl.store(chosen + m * TOP + number, place, mask=m < rows)
        values = tl.where(e[None, :] == place[:, None], -1.0, values)


@case("top experts", top_k_kernel, (16384, 128, 8), (1024, 64, 4))
def _(problem, device):
    rows, experts, top = problem
    args = (randn(rows, experts, device=device), torch.empty(rows, top, device=device),
            torch.empty(rows, top, device=device, dtype=torch.int32), rows, experts, top)  # fmt: skip
    return args, lambda meta: (cdiv(rows, meta["BLOCK"]),)


@triton.autotune(block_configs((128, 256, 512, 1024, 2048), (1, 2, 4, 8)), key=["cols"])
@triton.jit
def expert_sum_kernel(x, weights, out, cols, TOP: tl.constexpr, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(TOP):
        values = tl.load(x + (row * TOP + number) * cols + i, mask=i < cols, other=0.0).to(tl.float32)
        total += values * tl.load(weights + row * TOP + number)
    tl.store(out + row * cols + i, total.to(out.dtype.element_ty), mask=i < cols)


@case("sum over experts", expert_sum_kernel, (4096, 4096, 8), (256, 2048, 4))
def _(problem, device):
    rows, cols, top = problem
    args = (randn(rows * top, cols, device=device), torch.rand(rows, top, device=device),
            randn(rows, cols, device=device), cols, top)  # fmt: skip
    return args, lambda meta: (rows, cdiv(cols, meta["BLOCK"]))


@triton.autotune(all_configs({"BM": (1, 4, 16, 64), "BN": (64, 128, 256)}, (1, 2, 4, 8)), key=["width", "channels"])
@triton.jit
def depthwise_kernel(x, weight, out, height, width, channels, BM: tl.constexpr, BN: tl.constexpr):
    pixels = height * width
    p, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    base, y, z = tl.program_id(2) * pixels, p // width, p % width
    total = tl.zeros([BM, BN], tl.float32)
    for dy in tl.static_range(3):
        for dx in tl.static_range(3):
            v, u = y + dy - 1, z + dx - 1
            inside = (p < pixels) & (v >= 0) & (v < height) & (u >= 0) & (u < width)
            values = tl.load(x + (base + v * width + u)[:, None] * channels + c[None, :],
                             mask=inside[:, None] & (c[None, :] < channels), other=0.0)  # fmt: skip
            taps = tl.load(weight + (dy * 3 + dx) * channels + c, mask=c < channels, other=0.0)
            total += values.to(tl.float32) * taps.to(tl.float32)[None, :]
    mask = (p[:, None] < pixels) & (c[None, :] < channels)
    tl.store(out + (base + p)[:, None] * channels + c[None, :], total.to(out.dtype.element_ty), mask=mask)


@case("depthwise convolution", depthwise_kernel, (32, 56, 256), (8, 14, 1024))
def _(problem, device):
    items, size, channels = problem
    x = randn(items, size, size, channels, device=device)
    args = (x, randn(9, channels, device=device), torch.empty_like(x), size, size, channels)
    return args, lambda meta: (cdiv(size * size, meta["BM"]), cdiv(channels, meta["BN"]), items)


@triton.autotune(block_configs((128, 256, 512, 1024, 2048), (1, 2, 4, 8)), key=["pixels"])
@triton.jit
def max_pool_kernel(x, out, width, pixels, BLOCK: tl.constexpr):
    i, plane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    half = width // 2
    y, z = i // half, i % half
    source = x + plane * pixels * 4 + (2 * y) * width + 2 * z
    result = tl.load(source, mask=i < pixels, other=-float("inf"))
    result = tl.maximum(result, tl.load(source + 1, mask=i < pixels, other=-float("inf")))
    result = tl.maximum(result, tl.load(source + width, mask=i < pixels, other=-float("inf")))
    result = tl.maximum(result, tl.load(source + width + 1, mask=i < pixels, other=-float("inf")))
    tl.store(out + plane * pixels + i, result, mask=i < pixels)


@case("maximum of neighbours", max_pool_kernel, (2048, 112), (8192, 28))
def _(problem, device):
    planes, size = problem
    pixels = size * size // 4
    args = (randn(planes, size, size, device=device), randn(planes, pixels, device=device), size, pixels)
    return args, lambda meta: (cdiv(pixels, meta["BLOCK"]), planes)


@triton.autotune(block_configs((256, 512, 1024, 2048, 4096), (1, 2, 4, 8)), key=["size"])
@triton.jit
def upsample_kernel(x, out, size, target, BLOCK: tl.constexpr):
    i, plane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    ratio = size / target
    y, z = (i // target + 0.5) * ratio - 0.5, (i % target + 0.5) * ratio - 0.5
    y, z = tl.maximum(y, 0.0), tl.maximum(z, 0.0)
    top, left = y.to(tl.int32), z.to(tl.int32)
    bottom, right = tl.minimum(top + 1, size - 1), tl.minimum(left + 1, size - 1)
    v, u = y - top, z - left
    inside, base = i < target * target, x + plane * size * size
    a = tl.load(base + top * size + left, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(base + top * size + right, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(base + bottom * size + left, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(base + bottom * size + right, mask=inside, other=0.0).to(tl.float32)
    result = (a * (1 - u) + b * u) * (1 - v) + (c * (1 - u) + d * u) * v
    tl.store(out + plane * target * target + i, result.to(out.dtype.element_ty), mask=inside)


@case("bilinear enlargement", upsample_kernel, (1024, 56, 112), (4096, 16, 32))
def _(problem, device):
    planes, size, target = problem
    args = (randn(planes, size, size, device=device), randn(planes, target, target, device=device), size, target)
    return args, lambda meta: (cdiv(target * target, meta["BLOCK"]), planes)


@triton.autotune(block_configs((128, 256, 512, 1024, 2048, 4096), (1, 2, 4, 8)), key=["count"])
@triton.jit
def histogram_kernel(x, out, count, BINS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + i, mask=i < count, other=0)
    tl.atomic_add(out + values % BINS, 1, mask=i < count, sem="relaxed")


@case("histogram", histogram_kernel, (1 << 22, 4096), (1 << 18, 65536))
def _(problem, device):
    count, bins = problem
    x = torch.randint(0, bins, (count,), device=device, dtype=torch.int32)
    return (x, torch.zeros(bins, device=device, dtype=torch.int32), count, bins), lambda m: (cdiv(count, m["BLOCK"]),)


@triton.autotune(all_configs({"BM": (1, 4, 16), "BN": (64, 128, 256, 512)}, (1, 2, 4, 8)), key=["cols"])
@triton.jit
def scatter_kernel(x, place, out, rows, cols, BM: tl.constexpr, BN: tl.constexpr):
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    target = tl.load(place + m, mask=m < rows, other=0)
    inside = (m[:, None] < rows) & (n[None, :] < cols)
    values = tl.load(x + m[:, None] * cols + n[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.atomic_add(out + target[:, None] * cols + n[None, :], values, mask=inside, sem="relaxed")


@case("scattered sums", scatter_kernel, (32768, 1024, 4096), (8192, 512, 8192))
def _(problem, device):
    rows, cols, targets = problem
    place = torch.randint(0, targets, (rows,), device=device, dtype=torch.int32)
    args = (randn(rows, cols, device=device), place, torch.zeros(targets, cols, device=device), rows, cols)
    return args, lambda meta: (cdiv(rows, meta["BM"]), cdiv(cols, meta["BN"]))


@triton.autotune(block_configs((64, 128, 256, 512, 1024), (1, 2, 4, 8)), key=["cols"])
@triton.jit
def segment_kernel(x, starts, out, cols, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for source in range(tl.load(starts + row), tl.load(starts + row + 1)):
        total += tl.load(x + source * cols + i, mask=i < cols, other=0.0).to(tl.float32)
    tl.store(out + row * cols + i, total.to(out.dtype.element_ty), mask=i < cols)


@case("sums of segments", segment_kernel, (65536, 4096, 512), (32768, 512, 2048))
def _(problem, device):
    rows, segments, cols = problem
    starts = (torch.arange(segments + 1, device=device) * (rows // segments)).to(torch.int32)
    args = (randn(rows, cols, device=device), starts, randn(segments, cols, device=device), cols)
    return args, lambda meta: (segments, cdiv(cols, meta["BLOCK"]))


@triton.autotune(block_configs((512, 1024, 2048, 4096, 8192), (1, 2, 4, 8, 16)), key=["cols"])
@triton.jit
def geglu_backward_kernel(grad, gate, up, cols, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    for start in range(0, cols, BLOCK):
        place, inside = row * cols + start + i, start + i < cols
        g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        a = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
        inner = 0.7978845608028654 * (a + 0.044715 * a * a * a)
        t = 2.0 * tl.sigmoid(2.0 * inner) - 1.0
        slope = 0.5 * (1.0 + t) + 0.5 * a * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 0.134145 * a * a)
        tl.store(up + place, (g * 0.5 * a * (1.0 + t)).to(up.dtype.element_ty), mask=inside)
        tl.store(gate + place, (g * b * slope).to(gate.dtype.element_ty), mask=inside)


@case("gradient of a gated gelu", geglu_backward_kernel, (8192, 11008), (1024, 4864))
def _(problem, device):
    rows, cols = problem
    return (*(randn(rows, cols, device=device) for _ in range(3)), cols), (rows,)


@triton.autotune(warp_configs((1, 2, 4, 8, 16)), key=["cols"])
@triton.jit
def layer_norm_backward_kernel(x, grad, weight, mean, scale, dx, dw, db, rows, cols, per_program, BLOCK: tl.constexpr):
    program, i = tl.program_id(0), tl.arange(0, BLOCK)
    inside = i < cols
    w = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    dw_sum, db_sum = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for row in range(program * per_program, min((program + 1) * per_program, rows)):
        values = tl.load(x + row * cols + i, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + row * cols + i, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(scale + row)
        normal = (values - tl.load(mean + row)) * s
        product = g * w
        first, second = tl.sum(normal * product, 0) / cols, tl.sum(product, 0) / cols
        result = (product - (normal * first + second)) * s
        tl.store(dx + row * cols + i, result.to(dx.dtype.element_ty), mask=inside)
        dw_sum += g * normal
        db_sum += g
    tl.store(dw + program * cols + i, dw_sum, mask=inside)
    tl.store(db + program * cols + i, db_sum, mask=inside)


@case("layer norm backward", layer_norm_backward_kernel, (8192, 4096), (16384, 768))
def _(problem, device):
    rows, cols = problem
    programs = 264
    args = (randn(rows, cols, device=device), randn(rows, cols, device=device), randn(cols, device=device),
            torch.zeros(rows, device=device), torch.ones(rows, device=device), randn(rows, cols, device=device),
            torch.empty(programs, cols, device=device), torch.empty(programs, cols, device=device), rows, cols,
            cdiv(rows, programs), next_power_of_2(cols))  # fmt: skip
    return args, (programs,)


@triton.autotune(block_configs((1024, 2048, 4096, 8192), (4, 8, 16)), key=["cols"])
@triton.jit
def variation_kernel(p, q, out, gradient, cols, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, cols, BLOCK):
        place, inside = row * cols + start + i, start + i < cols
        a = tl.load(p + place, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(q + place, mask=inside, other=0.0).to(tl.float32)
        total += tl.abs(a - b)
        tl.store(gradient + place, tl.where(a > b, 0.5, -0.5).to(gradient.dtype.element_ty), mask=inside)
    tl.store(out + row, 0.5 * tl.sum(total, 0))


@case("total variation", variation_kernel, (4096, 32000), (512, 128256))
def _(problem, device):
    rows, cols = problem
    p, q, gradient = (randn(rows, cols, device=device) for _ in range(3))
    return (p, q, torch.empty(rows, device=device), gradient, cols), (rows,)


@triton.autotune(block_configs((256, 512, 1024, 2048), (1, 2, 4, 8)), key=["count"])
@triton.jit
def adam8_kernel(weights, gradient, first, second, first_scale, second_scale, count, rate, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, block = i < count, i // 256
    g = tl.load(gradient + i, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(first + i, mask=inside, other=0).to(tl.float32) * tl.load(first_scale + block, mask=inside, other=0.0)
    v = tl.load(second + i, mask=inside, other=0).to(tl.float32) * tl.load(second_scale + block, mask=inside, other=0.0)
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    w = tl.load(weights + i, mask=inside, other=0.0).to(tl.float32) - rate * m / (tl.sqrt(v) + 1e-8)
    tl.store(weights + i, w.to(weights.dtype.element_ty), mask=inside)
    m, v = tl.reshape(m, (BLOCK // 256, 256)), tl.reshape(v, (BLOCK // 256, 256))
    m_scale, v_scale = tl.max(tl.abs(m), 1) / 127.0 + 1e-12, tl.max(v, 1) / 127.0 + 1e-12
    m, v = m / m_scale[:, None], v / v_scale[:, None]
    tl.store(first + i, tl.reshape(m, (BLOCK,)).to(tl.int8), mask=inside)
    tl.store(second + i, tl.reshape(v, (BLOCK,)).to(tl.int8), mask=inside)
    b = tl.program_id(0) * (BLOCK // 256) + tl.arange(0, BLOCK // 256)
    tl.store(first_scale + b, m_scale, mask=b * 256 < count)
    tl.store(second_scale + b, v_scale, mask=b * 256 < count)


@case("Adam with int8 states", adam8_kernel, (1 << 25,), (1 << 21,))
def _(problem, device):
    (count,) = problem
    states = [torch.randint(-127, 127, (count,), device=device, dtype=torch.int8) for _ in range(2)]
    scales = [torch.rand(count // 256, device=device) for _ in range(2)]
    args = (randn(count, device=device), randn(count, device=device), *states, *scales, count, 1e-3)
    return args, lambda meta: (cdiv(count, meta["BLOCK"]),)


@triton.autotune(all_configs({"BM": (1, 4, 16), "BN": (32, 64, 128)}, (1, 2, 4, 8)), key=["length", "width"])
@triton.jit
def mean_pool_kernel(x, lengths, out, length, width, BM: tl.constexpr, BN: tl.constexpr):
    item, n = tl.program_id(0), tl.program_id(1) * BN + tl.arange(0, BN)
    count = tl.load(lengths + item)
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, length, BM):
        m = start + tl.arange(0, BM)
        inside = (m[:, None] < count) & (n[None, :] < width)
        total += tl.load(x + (item * length + m[:, None]) * width + n[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + item * width + n, (tl.sum(total, 0) / count).to(out.dtype.element_ty), mask=n < width)


@case("mean over tokens", mean_pool_kernel, (128, 512, 1024), (1024, 64, 768))
def _(problem, device):
    items, length, width = problem
    lengths = torch.full((items,), length, device=device, dtype=torch.int32)
    args = (randn(items, length, width, device=device), lengths, randn(items, width, device=device), length, width)
    return args, lambda meta: (items, cdiv(width, meta["BN"]))
