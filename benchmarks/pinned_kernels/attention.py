"""Attention: causal, in a window, decoding, its gradient, and the chunks of linear attention."""

# The bodies are Triton's language, not Python's: its types are tl.tensor and tl.constexpr.
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from triton import Config, cdiv

from benchmarks.pinned_kernels.registry import all_configs, case, randn


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
    x = [randn(heads, length, head, device=device, dtype=torch.float16) for _ in range(4)]
    return (*x, 0.1, length, head, causal), lambda meta: (cdiv(length, meta["BLOCK_M"]), heads)


@case("causal attention", attention_kernel, (32, 2048, 64), (64, 1024, 128))
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


@case("chunked state of linear attention", chunk_state_kernel, (64, 2048, 128), (16, 4096, 256))
def _(problem, device):
    heads, length, width = problem
    x = [randn(heads, length, width, device=device) for _ in range(2)]
    states = torch.empty(heads, length // 64, width, width, device=device, dtype=torch.bfloat16)
    return (*x, states, length, width, 64), lambda meta: (width // meta["BK"], width // meta["BV"], heads)


@triton.autotune(all_configs({"BN": (16, 32, 64, 128)}, (1, 2, 4, 8), (1, 2, 3)), key=["length", "HEAD"])
@triton.jit
def decode_kernel(q, k, v, partial, sums, scale, length, chunk, HEAD: tl.constexpr, GROUP: tl.constexpr,
                  BN: tl.constexpr):  # fmt: skip
    head, part = tl.program_id(0), tl.program_id(1)
    d, g = tl.arange(0, HEAD), tl.arange(0, GROUP)
    queries = tl.load(q + (head * GROUP + g[:, None]) * HEAD + d[None, :])
    highest = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    values = tl.zeros([GROUP, HEAD], tl.float32)
    for start in range(part * chunk, min(part * chunk + chunk, length), BN):
        n = start + tl.arange(0, BN)
        keys = tl.load(k + (head * length + n[None, :]) * HEAD + d[:, None], mask=n[None, :] < length, other=0.0)
        scores = tl.where(n[None, :] < length, tl.dot(queries, keys) * scale, -float("inf"))
        now = tl.maximum(highest, tl.max(scores, 1))
        p, decay = tl.exp2(scores - now[:, None]), tl.exp2(highest - now)
        total = total * decay + tl.sum(p, 1)
        block = tl.load(v + (head * length + n[:, None]) * HEAD + d[None, :], mask=n[:, None] < length, other=0.0)
        values = tl.dot(p.to(block.dtype), block, values * decay[:, None])
        highest = now
    at = (part * tl.num_programs(0) + head) * GROUP + g
    tl.store(partial + at[:, None] * HEAD + d[None, :], values)
    tl.store(sums + at, highest + tl.log2(total))


@case("decoding attention", decode_kernel, (64, 8192, 128), (256, 2048, 64))
def _(problem, device):
    heads, length, head = problem
    q = randn(heads * 16, head, device=device, dtype=torch.float16)
    k, v = (randn(heads, length, head, device=device, dtype=torch.float16) for _ in range(2))
    parts = 8
    partial = torch.empty(parts, heads * 16, head, device=device)
    args = (q, k, v, partial, torch.empty(parts, heads * 16, device=device), 0.1, length, length // parts, head, 16)
    return args, (heads, parts)


@triton.autotune(all_configs({"BM": (32, 64, 128), "BN": (32, 64)}, (4, 8), (1, 2, 3)), key=["length", "HEAD"])
@triton.jit
def attention_backward_kernel(q, k, v, grad, sums, deltas, dk, dv, scale, length, HEAD: tl.constexpr,
                              BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    base = tl.program_id(1) * length
    n, d = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, HEAD)
    keys = tl.load(k + (base + n[:, None]) * HEAD + d[None, :])
    values = tl.load(v + (base + n[:, None]) * HEAD + d[None, :])
    dk_sum, dv_sum = tl.zeros([BN, HEAD], tl.float32), tl.zeros([BN, HEAD], tl.float32)
    for start in range(tl.program_id(0) * BN // BM * BM, length, BM):
        m = start + tl.arange(0, BM)
        queries = tl.load(q + (base + m[None, :]) * HEAD + d[:, None])
        gradient = tl.load(grad + (base + m[:, None]) * HEAD + d[None, :])
        p = tl.exp2(tl.dot(keys, queries) * scale - tl.load(sums + base + m)[None, :])
        p = tl.where(m[None, :] >= n[:, None], p, 0.0)
        dv_sum = tl.dot(p.to(gradient.dtype), gradient, dv_sum)
        dp = tl.dot(values, tl.trans(gradient))
        ds = (p * (dp - tl.load(deltas + base + m)[None, :])).to(queries.dtype)
        dk_sum = tl.dot(ds, tl.trans(queries), dk_sum)
    tl.store(dk + (base + n[:, None]) * HEAD + d[None, :], (dk_sum * scale).to(dk.dtype.element_ty))
    tl.store(dv + (base + n[:, None]) * HEAD + d[None, :], dv_sum.to(dv.dtype.element_ty))


@case("attention backward", attention_backward_kernel, (64, 1024, 64), (16, 2048, 128))
def _(problem, device):
    heads, length, head = problem
    x = [randn(heads, length, head, device=device, dtype=torch.float16) for _ in range(6)]
    sums, deltas = (torch.rand(heads, length, device=device) + 5 for _ in range(2))
    args = (*x[:4], sums, deltas, *x[4:], 0.1, length, head)
    return args, lambda meta: (length // meta["BN"], heads)


@triton.autotune(all_configs({"BM": (64, 128), "BN": (32, 64, 128)}, (4, 8), (2, 3)), key=["length", "HEAD", "window"])
@triton.jit
def window_attention_kernel(q, k, v, out, scale, length, window, HEAD: tl.constexpr, BM: tl.constexpr,
                            BN: tl.constexpr):  # fmt: skip
    first, base = tl.program_id(0) * BM, tl.program_id(1) * length * HEAD
    m, d = first + tl.arange(0, BM), tl.arange(0, HEAD)
    queries = tl.load(q + base + m[:, None] * HEAD + d[None, :], mask=m[:, None] < length, other=0.0)
    highest = tl.full([BM], -1.0e30, tl.float32)
    total = tl.zeros([BM], tl.float32)
    values = tl.zeros([BM, HEAD], tl.float32)
    for start in range(max(0, first - window) // BN * BN, min(length, first + BM), BN):
        n = start + tl.arange(0, BN)
        keys = tl.load(k + base + n[None, :] * HEAD + d[:, None], mask=n[None, :] < length, other=0.0)
        inside = (m[:, None] >= n[None, :]) & (m[:, None] - n[None, :] < window)
        scores = tl.where(inside, tl.dot(queries, keys) * scale, -1.0e30)
        now = tl.maximum(highest, tl.max(scores, 1))
        p, decay = tl.exp2(scores - now[:, None]), tl.exp2(highest - now)
        total = total * decay + tl.sum(p, 1)
        block = tl.load(v + base + n[:, None] * HEAD + d[None, :], mask=n[:, None] < length, other=0.0)
        values = tl.dot(p.to(block.dtype), block, values * decay[:, None])
        highest = now
    values = values / total[:, None]
    tl.store(out + base + m[:, None] * HEAD + d[None, :], values.to(out.dtype.element_ty), mask=m[:, None] < length)


@case("attention in a window", window_attention_kernel, (32, 8192, 128, 1024), (64, 2048, 64, 512))
def _(problem, device):
    heads, length, head, window = problem
    x = [randn(heads, length, head, device=device, dtype=torch.float16) for _ in range(4)]
    return (*x, 0.1, length, window, head), lambda meta: (cdiv(length, meta["BM"]), heads)


@triton.autotune(all_configs({"BK": (32, 64), "BT": (32, 64, 128)}, (1, 2, 4, 8), (2, 3)), key=["length", "width"])
@triton.jit
def key_products_kernel(k, beta, out, length, width, BK: tl.constexpr, BT: tl.constexpr):
    t, base = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1) * length
    total = tl.zeros([BT, BT], tl.float32)
    for start in range(0, width, BK):
        i = start + tl.arange(0, BK)
        keys = tl.load(k + (base + t[:, None]) * width + i[None, :])
        total = tl.dot(keys, tl.trans(keys), total)
    total = total * tl.load(beta + base + t)[:, None]
    total = tl.where(t[:, None] > t[None, :], total, 0.0)
    local = tl.arange(0, BT)
    tl.store(out + (base + t[:, None]) * BT + local[None, :], total.to(out.dtype.element_ty))


@case("products of keys in chunks", key_products_kernel, (64, 4096, 128), (16, 2048, 256))
def _(problem, device):
    heads, length, width = problem
    args = (randn(heads, length, width, device=device), torch.rand(heads, length, device=device),
            randn(heads, length, 128, device=device), length, width)  # fmt: skip
    return args, lambda meta: (length // meta["BT"], heads)
