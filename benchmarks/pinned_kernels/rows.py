"""Kernels over rows: norms, softmax, losses, sums, scans, statistics; one or several rows per program."""

# The bodies are Triton's language, not Python's: its types are tl.tensor and tl.constexpr.
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from triton import Config, cdiv, next_power_of_2

from benchmarks.pinned_kernels.registry import all_configs, block_configs, case, randn, warp_configs


@triton.autotune(warp_configs(), key=["cols"])
@triton.jit
def softmax_kernel(x, out, cols, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * cols + i, mask=i < cols, other=-float("inf")).to(tl.float32)
    e = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * cols + i, (e / tl.sum(e, 0)).to(out.dtype.element_ty), mask=i < cols)


@case("softmax", softmax_kernel, (8192, 1024), (2048, 8192), (4096, 781))
def _(problem, device):
    rows, cols = problem
    x = randn(rows, cols, device=device)
    return (x, torch.empty_like(x), cols, next_power_of_2(cols)), (rows,)


@triton.autotune(warp_configs(), key=["cols"])
@triton.jit
def rms_norm_kernel(x, weight, out, cols, eps, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * cols + i, mask=i < cols, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / cols + eps)
    w = tl.load(weight + i, mask=i < cols, other=0.0).to(tl.float32)
    tl.store(out + row * cols + i, (values * scale * w).to(out.dtype.element_ty), mask=i < cols)


@case("rms norm", rms_norm_kernel, (8192, 4096), (16384, 512))
def _(problem, device):
    rows, cols = problem
    x = randn(rows, cols, device=device)
    return (x, randn(cols, device=device), torch.empty_like(x), cols, 1e-6, next_power_of_2(cols)), (rows,)


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


@case("layer norm in a loop", layer_norm_loop_kernel, (4096, 8192), (8192, 2560))
def _(problem, device):
    rows, cols = problem
    x = randn(rows, cols, device=device)
    args = (x, randn(cols, device=device), randn(cols, device=device), torch.empty_like(x), cols, 1e-5)
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


@case("cross entropy", cross_entropy_kernel, (4096, 32000), (1024, 128256))
def _(problem, device):
    rows, vocabulary = problem
    logits = randn(rows, vocabulary, device=device)
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


@case("column sum", column_sum_kernel, (4096, 8192), (2048, 32768))
def _(problem, device):
    rows, cols = problem
    args = (randn(rows, cols, device=device), torch.empty(cols, device=device), rows, cols)
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


@case("causal convolution", causal_conv_kernel, (8, 2048, 4096), (2, 1024, 1536))
def _(problem, device):
    batch, length, width = problem
    x = randn(batch, length, width, device=device)
    args = (x, randn(4, width, device=device), torch.empty_like(x), length, width, 4)
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


@case("cumulative sum", cumulative_sum_kernel, (8, 2048, 1024), (32, 512, 512))
def _(problem, device):
    batch, length, width = problem
    x = randn(batch, length, width, device=device, dtype=torch.float32)
    return (x, torch.empty_like(x), length, width), lambda meta: (cdiv(width, meta["BLOCK_D"]), batch)


@triton.autotune(warp_configs((1, 2, 4, 8, 16)), key=["cols"])
@triton.jit
def rms_norm_backward_kernel(grad, x, weight, out, cols, eps, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    g = tl.load(grad + row * cols + i, mask=i < cols, other=0.0).to(tl.float32)
    values = tl.load(x + row * cols + i, mask=i < cols, other=0.0).to(tl.float32)
    w = tl.load(weight + i, mask=i < cols, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / cols + eps)
    inner = tl.sum(g * w * values, 0) * scale * scale / cols
    tl.store(out + row * cols + i, ((g * w - values * inner) * scale).to(out.dtype.element_ty), mask=i < cols)


@case("rms norm backward", rms_norm_backward_kernel, (8192, 4096), (32768, 1024))
def _(problem, device):
    rows, cols = problem
    x = [randn(rows, cols, device=device) for _ in range(2)]
    return (*x, randn(cols, device=device), torch.empty_like(x[0]), cols, 1e-6, next_power_of_2(cols)), (rows,)


@triton.autotune(all_configs({"ROWS": (1, 2, 4, 8)}, (1, 2, 4, 8, 16)), key=["cols"])
@triton.jit
def add_rms_norm_kernel(x, residual, weight, out, rows, cols, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)
    at, inside = r[:, None] * cols + i[None, :], (r[:, None] < rows) & (i[None, :] < cols)
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + tl.load(residual + at, mask=inside, other=0.0)
    tl.store(residual + at, v.to(residual.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(v * v, 1) / cols + 1e-6)
    w = tl.load(weight + i, mask=i < cols, other=0.0)
    tl.store(out + at, (v * scale[:, None] * w[None, :]).to(out.dtype.element_ty), mask=inside)


@case("residual and rms norm", add_rms_norm_kernel, (16384, 1024), (4096, 2880))
def _(problem, device):
    rows, cols = problem
    x = [randn(rows, cols, device=device) for _ in range(2)]
    args = (*x, randn(cols, device=device), torch.empty_like(x[0]), rows, cols, next_power_of_2(cols))
    return args, lambda meta: (cdiv(rows, meta["ROWS"]),)


@triton.autotune(block_configs((512, 1024, 2048, 4096, 8192), (4, 8, 16)), key=["cols"])
@triton.jit
def log_softmax_kernel(x, out, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    highest, total = -float("inf"), 0.0
    for start in range(0, cols, BLOCK):
        i = start + tl.arange(0, BLOCK)
        v = tl.load(x + row * cols + i, mask=i < cols, other=-float("inf")).to(tl.float32)
        now = tl.maximum(highest, tl.max(v, 0))
        total = total * tl.exp(highest - now) + tl.sum(tl.exp(v - now), 0)
        highest = now
    shift = highest + tl.log(total)
    for start in range(0, cols, BLOCK):
        i = start + tl.arange(0, BLOCK)
        v = tl.load(x + row * cols + i, mask=i < cols).to(tl.float32)
        tl.store(out + row * cols + i, v - shift, mask=i < cols)


@case("log softmax in two passes", log_softmax_kernel, (2048, 50257), (8192, 4096))
def _(problem, device):
    x = randn(*problem, device=device)
    return (x, torch.empty_like(x, dtype=torch.float32), problem[1]), (problem[0],)


@triton.autotune(block_configs((1024, 2048, 4096, 8192, 16384), (2, 4, 8, 16)), key=["cols"])
@triton.jit
def argmax_kernel(x, out, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    best, at = -float("inf"), 0
    for start in range(0, cols, BLOCK):
        i = start + tl.arange(0, BLOCK)
        v = tl.load(x + row * cols + i, mask=i < cols, other=-float("inf")).to(tl.float32)
        here = tl.max(v, 0)
        at = tl.where(here > best, start + tl.argmax(v, 0), at)
        best = tl.maximum(best, here)
    tl.store(out + row, at)


@case("argmax of rows", argmax_kernel, (4096, 32000), (256, 128256))
def _(problem, device):
    rows, cols = problem
    return (randn(rows, cols, device=device), torch.empty(rows, device=device, dtype=torch.int32), cols), (rows,)


@triton.autotune(warp_configs((1, 2, 4, 8, 16, 32)), key=["cols"])
@triton.jit
def quantize_rows_kernel(x, out, scales, cols, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    v = tl.load(x + row * cols + i, mask=i < cols, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(v), 0) / 127, 1e-10)
    tl.store(scales + row, scale)
    tl.store(out + row * cols + i, tl.floor(v / scale + 0.5).to(tl.int8), mask=i < cols)


@case("int8 rows", quantize_rows_kernel, (8192, 8192), (16384, 896))
def _(problem, device):
    rows, cols = problem
    x = randn(rows, cols, device=device)
    args = (x, torch.empty_like(x, dtype=torch.int8), torch.empty(rows, device=device), cols, next_power_of_2(cols))
    return args, (rows,)


@triton.autotune(block_configs((256, 512, 1024, 2048, 4096), (1, 2, 4, 8)), key=["size"])
@triton.jit
def group_norm_kernel(x, out, size, BLOCK: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * size
    total, squares = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        v = tl.load(x + base + i, mask=i < size, other=0.0).to(tl.float32)
        total += v
        squares += v * v
    mean = tl.sum(total, 0) / size
    scale = tl.rsqrt(tl.sum(squares, 0) / size - mean * mean + 1e-5)
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        v = tl.load(x + base + i, mask=i < size).to(tl.float32)
        tl.store(out + base + i, ((v - mean) * scale).to(out.dtype.element_ty), mask=i < size)


@case("group norm", group_norm_kernel, (1024, 20480), (4096, 3136))
def _(problem, device):
    x = randn(*problem, device=device)
    return (x, torch.empty_like(x), problem[1]), (problem[0],)


@triton.autotune(all_configs({"BLOCK_M": (16, 64, 256), "BLOCK_N": (16, 32, 64)}, (2, 4, 8)), key=["rows", "cols"],
                 reset_to_zero=["sums", "squares"])  # fmt: skip
@triton.jit
def batch_statistics_kernel(x, sums, squares, rows, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (m[:, None] < rows) & (n[None, :] < cols)
    v = tl.load(x + m[:, None] * cols + n[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.atomic_add(sums + n, tl.sum(v, 0), mask=n < cols)
    tl.atomic_add(squares + n, tl.sum(v * v, 0), mask=n < cols)


@case("batch statistics with atomics", batch_statistics_kernel, (65536, 256), (8192, 2048))
def _(problem, device):
    rows, cols = problem
    sums = [torch.zeros(cols, device=device) for _ in range(2)]
    grid = lambda meta: (cdiv(rows, meta["BLOCK_M"]), cdiv(cols, meta["BLOCK_N"]))  # noqa: E731
    return (randn(rows, cols, device=device), *sums, rows, cols), grid


@triton.autotune(all_configs({"ROWS": (8, 16, 32, 64, 128)}, (1, 2, 4, 8)), key=["rows", "WIDTH"])
@triton.jit
def l2_norm_kernel(x, out, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at, inside = r[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], r[:, None] < rows
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, 1) + 1e-6)
    tl.store(out + at, (v * scale[:, None]).to(out.dtype.element_ty), mask=inside)


@case("l2 norm of heads", l2_norm_kernel, (262144, 128), (65536, 64))
def _(problem, device):
    x = randn(*problem, device=device)
    return (x, torch.empty_like(x), *problem), lambda meta: (cdiv(problem[0], meta["ROWS"]),)


@triton.autotune(all_configs({}, (2, 4, 8, 16), (1, 2, 4)), key=["rows", "cols"])
@triton.jit
def persistent_softmax_kernel(x, out, rows, cols, programs, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    for row in tl.range(tl.program_id(0), rows, programs):
        v = tl.load(x + row * cols + i, mask=i < cols, other=-float("inf")).to(tl.float32)
        e = tl.exp(v - tl.max(v, 0))
        tl.store(out + row * cols + i, (e / tl.sum(e, 0)).to(out.dtype.element_ty), mask=i < cols)


@case("persistent softmax", persistent_softmax_kernel, (16384, 2048), (8192, 781))
def _(problem, device):
    rows, cols = problem
    x, programs = randn(rows, cols, device=device), 132 * 4
    return (x, torch.empty_like(x), rows, cols, programs, next_power_of_2(cols)), (programs,)


@triton.autotune(block_configs((1024, 4096, 8192, 16384), (4, 8, 16, 32)), key=["cols"])
@triton.jit
def divergence_kernel(student, teacher, out, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, cols, BLOCK):
        i = start + tl.arange(0, BLOCK)
        p = tl.load(teacher + row * cols + i, mask=i < cols, other=0.0).to(tl.float32)
        q = tl.load(student + row * cols + i, mask=i < cols, other=0.0).to(tl.float32)
        total += tl.exp(p) * (p - q)
    tl.store(out + row, tl.sum(total, 0))


@case("divergence of distributions", divergence_kernel, (2048, 32000), (512, 151936))
def _(problem, device):
    x = [randn(*problem, device=device) for _ in range(2)]
    return (*x, torch.empty(problem[0], device=device), problem[1]), (problem[0],)


@triton.autotune(all_configs({"BLOCK_T": (16, 32, 64)}, (1, 2, 4, 8)), key=["length", "STATE"])
@triton.jit
def selective_scan_kernel(x, dt, a, b, c, out, length, width, STATE: tl.constexpr, BLOCK_T: tl.constexpr):
    d = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    base, s = tl.program_id(1) * length, tl.arange(0, STATE)
    decay = tl.load(a + d[:, None] * STATE + s[None, :])
    state = tl.zeros([BLOCK_T, STATE], tl.float32)
    for t in range(length):
        u = tl.load(x + (base + t) * width + d).to(tl.float32)
        step = tl.load(dt + (base + t) * width + d).to(tl.float32)
        gain = tl.load(b + (base + t) * STATE + s).to(tl.float32)
        state = state * tl.exp(decay * step[:, None]) + (step * u)[:, None] * gain[None, :]
        y = tl.sum(state * tl.load(c + (base + t) * STATE + s).to(tl.float32)[None, :], 1)
        tl.store(out + (base + t) * width + d, y.to(out.dtype.element_ty))


@case("selective scan", selective_scan_kernel, (4, 512, 2048), (1, 256, 1536))
def _(problem, device):
    batch, length, width = problem
    x, dt = (randn(batch, length, width, device=device) for _ in range(2))
    b, c = (randn(batch, length, 16, device=device) for _ in range(2))
    args = (x, dt, -torch.rand(width, 16, device=device), b, c, torch.empty_like(x), length, width, 16)
    return args, lambda meta: (cdiv(width, meta["BLOCK_T"]), batch)
