"""Matrix product for GPUs with a tensor copy engine: descriptors or plain loads, persistent programs, K in parts.

The idea: one unit of work is an output tile, or a part of K of one. A program works through one unit, or, persistent,
through every so many-th, so that loads of the next tile begin while this one ends. The first `whole` tiles are not cut:
with as many as fill the GPU a whole number of times, only the tiles of the last, unfilled wave are, and all
multiprocessors share them. Each part leaves its sums in a workspace; the program that arrives last adds them, always in
the order of the parts, so a result never depends on timing. Sizes, group, parts and `whole` are run-time arguments: one
binary serves every shape of an alignment.
"""

# The bodies are Triton's language, not Python's: its types are tl.tensor and tl.constexpr.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: SIM102, SIM108  (a branch on a constexpr is taken while compiling; the other side need not have a meaning)

import triton
import triton.language as tl

_SIZES = ("m_units", "n_units", "k_units", "group", "parts", "whole")


@triton.jit
def _place(tile, row_blocks, column_blocks, group):
    """The row and column block of a tile: down `group` row blocks before the next column, so that b stays in L2."""
    in_group = group * column_blocks
    first_row = (tile // in_group) * group
    group_rows = tl.minimum(row_blocks - first_row, group)
    return first_row + (tile % in_group) % group_rows, (tile % in_group) // group_rows


@triton.jit
def _left(
    a, rows, row, depth, m, k, TMA: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):
    """(BLOCK_M, BLOCK_K) of a, zeros past the end of k."""
    if TMA:
        if TRANSPOSED:
            found = a.load([depth, row]).T
        else:
            found = a.load([row, depth])
    else:
        inner = depth + tl.arange(0, BLOCK_K)
        if TRANSPOSED:
            where = rows[:, None] + inner[None, :] * m
        else:
            where = rows[:, None] * k + inner[None, :]
        found = tl.load(a + where, mask=inner[None, :] < k, other=0.0)
    return found


@triton.jit
def _right(
    b, columns, column, depth, n, k,
    TMA: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """(BLOCK_K, BLOCK_N) of b, zeros past the end of k."""
    if TMA:
        if TRANSPOSED:
            found = b.load([column, depth]).T
        else:
            found = b.load([depth, column])
    else:
        inner = depth + tl.arange(0, BLOCK_K)
        if TRANSPOSED:
            where = inner[:, None] + columns[None, :] * k
        else:
            where = inner[:, None] * n + columns[None, :]
        found = tl.load(b + where, mask=inner[:, None] < k, other=0.0)
    return found


@triton.jit
def _finish(total, c, bias, residual, row, column, m, n, SWAPPED: tl.constexpr, EPILOGUE: tl.constexpr):
    """The epilogue, and the result's place in memory. Swapped: this is the transposed problem, so c is transposed."""
    rows = row + tl.arange(0, total.shape[0])
    columns = column + tl.arange(0, total.shape[1])
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    if SWAPPED:
        where = rows[:, None] + columns[None, :] * m
    else:
        where = rows[:, None] * n + columns[None, :]
    if EPILOGUE == "bias" or EPILOGUE == "bias_relu" or EPILOGUE == "bias_gelu":
        if SWAPPED:
            total += tl.load(bias + rows, mask=rows < m, other=0.0).to(tl.float32)[:, None]
        else:
            total += tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    if EPILOGUE == "bias_relu":
        total = tl.maximum(total, 0.0)
    if EPILOGUE == "bias_gelu":
        total = 0.5 * total * (1.0 + tl.erf(total * 0.7071067811865476))
    if EPILOGUE == "residual":
        total += tl.load(residual + where, mask=inside, other=0.0).to(tl.float32)
    tl.store(c + where, total.to(c.dtype.element_ty), mask=inside)


@triton.jit
def _reduce(total, partial, arrived, tile, part, parts, c, bias, residual, row, column, m, n,
            SWAPPED: tl.constexpr, EPILOGUE: tl.constexpr):  # fmt: skip
    """Leave this part's sums; the last of the tile's programs adds all of them in order and finishes."""
    inside = tl.arange(0, total.shape[0])[:, None] * total.shape[1] + tl.arange(0, total.shape[1])[None, :]
    slot = partial + (tile * parts).to(tl.int64) * (total.shape[0] * total.shape[1])
    tl.store(slot + part * (total.shape[0] * total.shape[1]) + inside, total)
    tl.debug_barrier()  # every thread's sums are written before the one thread that counts says so
    before = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu")
    if before == parts - 1:
        total = tl.load(slot + inside, cache_modifier=".cg")
        for other in range(1, parts):
            total += tl.load(slot + other * (total.shape[0] * total.shape[1]) + inside, cache_modifier=".cg")
        _finish(total, c, bias, residual, row, column, m, n, SWAPPED, EPILOGUE)
        tl.store(arrived + tile, 0)  # as the next launch wants to find it


@triton.jit
def _tile(
    a, b, c, bias, residual, partial, arrived, unit, m, n, k, group, parts, whole,
    TMA: tl.constexpr, A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, SWAPPED: tl.constexpr,
    EPILOGUE: tl.constexpr, IN_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One unit of work: a tile of the result and a part of K."""
    tile = unit
    steps = tl.cdiv(k, BLOCK_K)
    first = 0
    part = 0
    if IN_PARTS:
        if unit >= whole:
            tile = whole + (unit - whole) // parts
            part = (unit - whole) % parts
            steps = tl.cdiv(steps, parts)
            first = part * steps * BLOCK_K
    row_block, column_block = _place(tile, tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), group)
    row, column = row_block * BLOCK_M, column_block * BLOCK_N
    # Rows and columns past the edge wrap around: they are computed in vain but need no mask inside the loop.
    rows = (row + tl.arange(0, BLOCK_M)) % m
    columns = (column + tl.arange(0, BLOCK_N)) % n
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(steps):
        depth = first + step * BLOCK_K
        left = _left(a, rows, row, depth, m, k, TMA, A_TRANSPOSED, BLOCK_M, BLOCK_K)
        right = _right(b, columns, column, depth, n, k, TMA, B_TRANSPOSED, BLOCK_N, BLOCK_K)
        total = tl.dot(left, right, total, input_precision="tf32")
    if IN_PARTS:
        if unit >= whole:
            _reduce(total, partial, arrived, tile - whole, part, parts, c, bias, residual, row, column, m, n,
                    SWAPPED, EPILOGUE)  # fmt: skip
        else:
            _finish(total, c, bias, residual, row, column, m, n, SWAPPED, EPILOGUE)
    else:
        _finish(total, c, bias, residual, row, column, m, n, SWAPPED, EPILOGUE)


@triton.jit(do_not_specialize=_SIZES)
def product_kernel(
    a, b, c, bias, residual, partial, arrived, m_units, n_units, k_units, group, parts, whole,
    UNIT_M: tl.constexpr, UNIT_N: tl.constexpr, UNIT_K: tl.constexpr,
    TMA: tl.constexpr, PERSISTENT: tl.constexpr, A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr,
    SWAPPED: tl.constexpr, EPILOGUE: tl.constexpr, IN_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """c = epilogue(a @ b); a is (m, k), b is (k, n), each row-major or, if transposed, column-major."""
    m, n, k = m_units * UNIT_M, n_units * UNIT_N, k_units * UNIT_K
    if PERSISTENT:
        units = tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N)
        if IN_PARTS:
            units = whole + (units - whole) * parts
        for unit in tl.range(tl.program_id(0), units, tl.num_programs(0), flatten=True):
            _tile(a, b, c, bias, residual, partial, arrived, unit, m, n, k, group, parts, whole, TMA, A_TRANSPOSED,
                  B_TRANSPOSED, SWAPPED, EPILOGUE, IN_PARTS, BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip
    else:
        _tile(a, b, c, bias, residual, partial, arrived, tl.program_id(0), m, n, k, group, parts, whole, TMA,
              A_TRANSPOSED, B_TRANSPOSED, SWAPPED, EPILOGUE, IN_PARTS, BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip
