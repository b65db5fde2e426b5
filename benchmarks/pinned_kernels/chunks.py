"""State-space models and linear attention: chunks, recurrences, decoding steps; attention's other gradients."""

# The bodies are Triton's language, not Python's: its types are tl.tensor and tl.constexpr.
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from triton import cdiv

from benchmarks.pinned_kernels.registry import all_configs, case, randn


@triton.autotune(all_configs({"BK": (32, 64, 128), "BV": (32, 64, 128)}, (2, 4, 8), (2, 3)), key=["length", "width"])
@triton.jit
def chunk_output_kernel(q, k, v, states, out, scale, length, width, CHUNK: tl.constexpr, BK: tl.constexpr,
                        BV: tl.constexpr):  # fmt: skip
    j, chunk, head = tl.program_id(0) * BV + tl.arange(0, BV), tl.program_id(1), tl.program_id(2)
    t = tl.arange(0, CHUNK)
    base, chunks = head * length + chunk * CHUNK, tl.cdiv(length, CHUNK)
    total = tl.zeros([CHUNK, BV], tl.float32)
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    for start in range(0, width, BK):
        i = start + tl.arange(0, BK)
        queries = tl.load(q + (base + t[:, None]) * width + i[None, :])
        keys = tl.load(k + (base + t[None, :]) * width + i[:, None])
        state = tl.load(states + (head * chunks + chunk) * width * width + i[:, None] * width + j[None, :])
        total = tl.dot(queries, state, total)
        scores = tl.dot(queries, keys, scores)
    scores = tl.where(t[:, None] >= t[None, :], scores, 0.0)
    values = tl.load(v + (base + t[:, None]) * width + j[None, :])
    total = (total + tl.dot(scores.to(values.dtype), values)) * scale
    tl.store(out + (base + t[:, None]) * width + j[None, :], total.to(out.dtype.element_ty))


@case("output of chunks", chunk_output_kernel, (64, 2048, 128), (16, 4096, 256))
def _(problem, device):
    heads, length, width = problem
    q, k, v, out = (randn(heads, length, width, device=device) for _ in range(4))
    states = randn(heads, length // 64, width, width, device=device)
    return (q, k, v, states, out, 0.1, length, width, 64), lambda meta: (width // meta["BV"], length // 64, heads)


@triton.autotune(all_configs({"BK": (16, 32, 64), "BV": (16, 32, 64)}, (1, 2, 4), (2, 3)), key=["width"])
@triton.jit
def recurrent_kernel(q, k, v, gate, out, length, width, BK: tl.constexpr, BV: tl.constexpr):
    i, j = tl.program_id(0) * BK + tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    base = tl.program_id(2) * length
    part = tl.program_id(0) * tl.num_programs(2) * length * width
    state = tl.zeros([BK, BV], tl.float32)
    for t in range(0, length):
        keys = tl.load(k + (base + t) * width + i).to(tl.float32)
        values = tl.load(v + (base + t) * width + j).to(tl.float32)
        decay = tl.exp(tl.load(gate + (base + t) * width + i).to(tl.float32))
        state = state * decay[:, None] + keys[:, None] * values[None, :]
        queries = tl.load(q + (base + t) * width + i).to(tl.float32)
        tl.store(out + part + (base + t) * width + j, tl.sum(state * queries[:, None], 0))


@case("recurrence with gates", recurrent_kernel, (32, 256, 128), (128, 128, 64))
def _(problem, device):
    heads, length, width = problem
    q, k, v = (randn(heads, length, width, device=device) for _ in range(3))
    gate = -torch.rand(heads, length, width, device=device)
    out = torch.empty(width // 16, heads, length, width, device=device)
    return (q, k, v, gate, out, length, width), lambda meta: (width // meta["BK"], width // meta["BV"], heads)


@triton.autotune(all_configs({"BM": (32, 64, 128), "BN": (32, 64, 128)}, (2, 4, 8), (2, 3)), key=["size", "STATE"])
@triton.jit
def chunk_gradient_kernel(x, b, decays, states, size, heads, length, STATE: tl.constexpr, CHUNK: tl.constexpr,
                          BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    blocks_n = tl.cdiv(STATE, BN)
    m = tl.program_id(0) // blocks_n * BM + tl.arange(0, BM)
    n = tl.program_id(0) % blocks_n * BN + tl.arange(0, BN)
    chunk, head = tl.program_id(1), tl.program_id(2)
    total = tl.zeros([BM, BN], tl.float32)
    last = tl.load(decays + head * length + chunk * CHUNK + CHUNK - 1)
    for start in range(0, CHUNK, 32):
        t = chunk * CHUNK + start + tl.arange(0, 32)
        inputs = tl.load(x + (t[None, :] * heads + head) * size + m[:, None], mask=m[:, None] < size, other=0.0)
        keys = tl.load(b + t[:, None] * STATE + n[None, :]).to(tl.float32)
        keys = keys * tl.exp(last - tl.load(decays + head * length + t))[:, None]
        total = tl.dot(inputs, keys.to(inputs.dtype), total)
    place = (chunk * heads + head) * size * STATE + m[:, None] * STATE + n[None, :]
    tl.store(states + place, total, mask=m[:, None] < size)


@case("state of decaying chunks", chunk_gradient_kernel, (4096, 32, 64, 128), (8192, 24, 64, 64))
def _(problem, device):
    length, heads, size, state = problem
    args = (randn(length, heads, size, device=device), randn(length, state, device=device),
            -torch.rand(heads, length, device=device),
            torch.empty(length // 256, heads, size, state, device=device), size, heads, length, state, 256)  # fmt: skip
    return args, lambda meta: (cdiv(size, meta["BM"]) * cdiv(state, meta["BN"]), length // 256, heads)


@triton.autotune(all_configs({"BLOCK": (64, 128, 256, 512, 1024, 2048)}, (1, 2, 4, 8)), key=["size"])
@triton.jit
def state_passing_kernel(states, decays, out, size, chunks, BLOCK: tl.constexpr):
    i, head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    state = tl.zeros([BLOCK], tl.float32)
    for chunk in range(chunks):
        place = (chunk * tl.num_programs(1) + head) * size + i
        tl.store(out + place, state.to(out.dtype.element_ty), mask=i < size)
        decay = tl.exp(tl.load(decays + head * chunks + chunk))
        state = state * decay + tl.load(states + place, mask=i < size, other=0.0).to(tl.float32)


@case("states from chunk to chunk", state_passing_kernel, (64, 32, 8192), (16, 80, 16384))
def _(problem, device):
    chunks, heads, size = problem
    states = randn(chunks, heads, size, device=device)
    args = (states, -torch.rand(heads, chunks, device=device), torch.empty_like(states), size, chunks)
    return args, lambda meta: (cdiv(size, meta["BLOCK"]), heads)


@triton.autotune(all_configs({"BM": (4, 8, 16, 32, 64)}, (1, 2, 4, 8)), key=["size", "STATE"])
@triton.jit
def state_update_kernel(state, x, dt, a, b, c, d, z, out, size, STATE: tl.constexpr, BM: tl.constexpr):
    m, head, item = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1), tl.program_id(2)
    n, row = tl.arange(0, STATE), item * tl.num_programs(1) + head
    inside = m[:, None] < size
    place = row * size * STATE + m[:, None] * STATE + n[None, :]
    old = tl.load(state + place, mask=inside, other=0.0).to(tl.float32)
    step = tl.load(dt + row * size + m, mask=m < size, other=0.0).to(tl.float32)
    step = tl.where(step <= 20.0, tl.log(1.0 + tl.exp(step)), step)
    values = tl.load(x + row * size + m, mask=m < size, other=0.0).to(tl.float32)
    decay = tl.exp(tl.load(a + head * size * STATE + m[:, None] * STATE + n[None, :], mask=inside, other=0.0)
                   * step[:, None])  # fmt: skip
    keys = tl.load(b + item * STATE + n).to(tl.float32)
    new = old * decay + keys[None, :] * (values * step)[:, None]
    tl.store(state + place, new.to(state.dtype.element_ty), mask=inside)
    result = tl.sum(new * tl.load(c + item * STATE + n).to(tl.float32)[None, :], 1)
    result += values * tl.load(d + head * size + m, mask=m < size, other=0.0).to(tl.float32)
    gate = tl.load(z + row * size + m, mask=m < size, other=0.0).to(tl.float32)
    tl.store(out + row * size + m, (result * gate * tl.sigmoid(gate)).to(out.dtype.element_ty), mask=m < size)


@case("step of a state-space model", state_update_kernel, (64, 80, 64, 128), (4, 128, 64, 16))
def _(problem, device):
    items, heads, size, state = problem
    vectors = [randn(items, heads, size, device=device) for _ in range(4)]  # x, dt, z, out
    states = randn(items, heads, size, state, device=device)
    args = (states, *vectors[:2], -torch.rand(heads, size, state, device=device),
            randn(items, state, device=device), randn(items, state, device=device), randn(heads, size, device=device),
            *vectors[2:], size, state)  # fmt: skip
    return args, lambda meta: (cdiv(size, meta["BM"]), heads, items)


@triton.autotune(all_configs({"BM": (32, 64, 128), "BN": (16, 32, 64)}, (4, 8), (1, 2, 3)), key=["length", "HEAD"])
@triton.jit
def query_gradient_kernel(q, k, v, grad, sums, deltas, dq, scale, length, HEAD: tl.constexpr, BM: tl.constexpr,
                          BN: tl.constexpr):  # fmt: skip
    base, d = tl.program_id(1) * length, tl.arange(0, HEAD)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    queries = tl.load(q + (base + m[:, None]) * HEAD + d[None, :])
    gradient = tl.load(grad + (base + m[:, None]) * HEAD + d[None, :])
    highest, delta = tl.load(sums + base + m), tl.load(deltas + base + m)
    total = tl.zeros([BM, HEAD], tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * BM, BN):
        n = start + tl.arange(0, BN)
        keys = tl.load(k + (base + n[None, :]) * HEAD + d[:, None])
        values = tl.load(v + (base + n[None, :]) * HEAD + d[:, None])
        p = tl.exp2(tl.dot(queries, keys) * scale - highest[:, None])
        p = tl.where(m[:, None] >= n[None, :], p, 0.0)
        ds = p * (tl.dot(gradient, values) - delta[:, None])
        total = tl.dot(ds.to(keys.dtype), tl.trans(keys), total)
    tl.store(dq + (base + m[:, None]) * HEAD + d[None, :], (total * scale).to(dq.dtype.element_ty))


@case("gradient of queries", query_gradient_kernel, (64, 1024, 64), (16, 2048, 128))
def _(problem, device):
    heads, length, head = problem
    q, k, v, grad, dq = (randn(heads, length, head, device=device, dtype=torch.float16) for _ in range(5))
    sums, deltas = (torch.rand(heads, length, device=device) + 5 for _ in range(2))
    return (q, k, v, grad, sums, deltas, dq, 0.1, length, head), lambda meta: (length // meta["BM"], heads)


@triton.autotune(all_configs({"BLOCK": (1, 2, 4, 8, 16, 32)}, (1, 2, 4, 8)), key=["HEAD"])
@triton.jit
def row_products_kernel(out, grad, deltas, rows, HEAD: tl.constexpr, BLOCK: tl.constexpr):
    m, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, HEAD)
    inside = m[:, None] < rows
    left = tl.load(out + m[:, None] * HEAD + d[None, :], mask=inside, other=0.0).to(tl.float32)
    right = tl.load(grad + m[:, None] * HEAD + d[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(deltas + m, tl.sum(left * right, 1), mask=m < rows)


@case("products of rows", row_products_kernel, (131072, 128), (32768, 64))
def _(problem, device):
    rows, head = problem
    args = (randn(rows, head, device=device), randn(rows, head, device=device), torch.empty(rows, device=device), rows,
            head)  # fmt: skip
    return args, lambda meta: (cdiv(rows, meta["BLOCK"]),)


@triton.autotune(all_configs({"BN": (16, 32, 64), "PAGES": (1, 2, 4, 8)}, (1, 2, 4), (1, 3)), key=["length", "HEAD"])
@triton.jit
def paged_decode_kernel(q, k, v, table, out, sums, scale, length, PAGE: tl.constexpr, HEAD: tl.constexpr,
                        GROUP: tl.constexpr, BN: tl.constexpr, PAGES: tl.constexpr):  # fmt: skip
    item, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads, parts = tl.num_programs(1), tl.num_programs(2)
    d, g = tl.arange(0, HEAD), tl.arange(0, GROUP)
    row = (item * heads + head) * GROUP
    queries = tl.load(q + (row + g[:, None]) * HEAD + d[None, :])
    highest = tl.full([GROUP], -1.0e30, tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    values = tl.zeros([GROUP, HEAD], tl.float32)
    size = tl.cdiv(length, parts)
    for start in range(part * size, min(part * size + size, length), BN):
        n = start + tl.arange(0, BN)
        page = tl.load(table + item * tl.cdiv(length, PAGE) + n // PAGE, mask=n < length, other=0)
        place = (page * PAGE + n % PAGE) * heads + head
        keys = tl.load(k + place[None, :] * HEAD + d[:, None], mask=n[None, :] < length, other=0.0)
        scores = tl.where(n[None, :] < length, tl.dot(queries, keys) * scale, -1.0e30)
        now = tl.maximum(highest, tl.max(scores, 1))
        p, decay = tl.exp(scores - now[:, None]), tl.exp(highest - now)
        total = total * decay + tl.sum(p, 1)
        block = tl.load(v + place[:, None] * HEAD + d[None, :], mask=n[:, None] < length, other=0.0)
        values = tl.dot(p.to(block.dtype), block, values * decay[:, None])
        highest = now
    at = part * tl.num_programs(0) * heads * GROUP + row + g
    tl.store(out + at[:, None] * HEAD + d[None, :], values / total[:, None])
    tl.store(sums + at, highest + tl.log(total))


@case("decoding from pages", paged_decode_kernel, (32, 8, 4096, 128), (4, 4, 16384, 64))
def _(problem, device):
    items, heads, length, head = problem
    q = randn(items * heads * 16, head, device=device, dtype=torch.float16)
    k, v = (randn(items * length, heads, head, device=device, dtype=torch.float16) for _ in range(2))
    table = torch.randperm(items * length // 16, device=device).to(torch.int32)
    rows = items * heads * 16
    args = (q, k, v, table, torch.empty(8, rows, head, device=device), torch.empty(8, rows, device=device), 0.1, length,
            16, head, 16)  # fmt: skip
    return args, lambda meta: (items, heads, meta["PAGES"])
