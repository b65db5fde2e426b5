"""Triton matrix product for GPUs with TMA: descriptor or plain loads, persistent programs, split-K and stream-K.

One unit of work is an output tile, or a slice of K of one. A program computes one unit; a persistent program computes
every n-th unit, so that the loads of its next tile start while the current one ends. The first `full_tiles` tiles keep
K whole. If those fill the GPU a whole number of times, only the tiles of the last, partly filled wave are split, and
all multiprocessors share them (stream-K, Osama et al. 2023, in its data-parallel form); with `full_tiles` of 0 every
tile is split (split-K). Each slice stores its partial sums in a workspace. The program that arrives last adds them, in
the order of the slices, so a result never depends on timing. Sizes, group, split and `full_tiles` are run-time
arguments: one binary serves every shape of an alignment.
"""

# The bodies are Triton's language, not Python's: its types are tl.tensor and tl.constexpr.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: SIM102, SIM108  (a branch on a constexpr is taken while compiling; the other side need not have a meaning)

import triton
import triton.language as tl

_SIZES = ("m_units", "n_units", "k_units", "group", "split_k", "full_tiles")


@triton.jit
def _tile_position(tile, row_blocks, column_blocks, group):
    """Map a tile's number to its row and column block.

    Tiles go down `group` row blocks before the next column block, so that the panel of b stays in the L2 cache.
    """
    in_group = group * column_blocks
    first_row = (tile // in_group) * group
    group_rows = tl.minimum(row_blocks - first_row, group)
    return first_row + (tile % in_group) % group_rows, (tile % in_group) // group_rows


@triton.jit
def _load_a(
    a, rows, row, depth, m, k, TMA: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Load the (BLOCK_M, BLOCK_K) tile of a at (row, depth), with zeros past the end of k."""
    if TMA:
        if TRANSPOSED:
            tile = a.load([depth, row]).T
        else:
            tile = a.load([row, depth])
    else:
        inner = depth + tl.arange(0, BLOCK_K)
        if TRANSPOSED:
            offsets = rows[:, None] + inner[None, :] * m
        else:
            offsets = rows[:, None] * k + inner[None, :]
        tile = tl.load(a + offsets, mask=inner[None, :] < k, other=0.0)
    return tile


@triton.jit
def _load_b(
    b, columns, column, depth, n, k,
    TMA: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Load the (BLOCK_K, BLOCK_N) tile of b at (depth, column), with zeros past the end of k."""
    if TMA:
        if TRANSPOSED:
            tile = b.load([column, depth]).T
        else:
            tile = b.load([depth, column])
    else:
        inner = depth + tl.arange(0, BLOCK_K)
        if TRANSPOSED:
            offsets = inner[:, None] + columns[None, :] * k
        else:
            offsets = inner[:, None] * n + columns[None, :]
        tile = tl.load(b + offsets, mask=inner[:, None] < k, other=0.0)
    return tile


@triton.jit
def _round_to_tf32(tile):
    """Round to the nearest tf32 value, which lacks the last 13 bits; the tensor cores alone would cut them off."""
    rounded = ((tile.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(tile == tile, rounded, tile)  # the addition would carry a NaN over into zero


@triton.jit
def _store_output(total, c, bias, residual, row, column, m, n, C_TRANSPOSED: tl.constexpr, EPILOGUE: tl.constexpr):
    """Apply the epilogue to the accumulators `total` and store the tile, transposed if C_TRANSPOSED."""
    rows = row + tl.arange(0, total.shape[0])
    columns = column + tl.arange(0, total.shape[1])
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    if C_TRANSPOSED:
        offsets = rows[:, None] + columns[None, :] * m
    else:
        offsets = rows[:, None] * n + columns[None, :]
    if EPILOGUE == "bias" or EPILOGUE == "bias_relu" or EPILOGUE == "bias_gelu":
        if C_TRANSPOSED:
            total += tl.load(bias + rows, mask=rows < m, other=0.0).to(tl.float32)[:, None]
        else:
            total += tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    if EPILOGUE == "bias_relu":
        total = tl.maximum(total, 0.0)
    if EPILOGUE == "bias_gelu":
        total = 0.5 * total * (1.0 + tl.erf(total * 0.7071067811865476))
    if EPILOGUE == "residual":
        total += tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(c + offsets, total.to(c.dtype.element_ty), mask=inside)


@triton.jit
def _reduce_slices(total, partial_sums, counters, tile, k_slice, split_k, c, bias, residual, row, column, m, n,
                   C_TRANSPOSED: tl.constexpr, EPILOGUE: tl.constexpr):  # fmt: skip
    """Store the partial sums of one slice of K; the last program of a tile adds all slices in order and stores c."""
    inside = tl.arange(0, total.shape[0])[:, None] * total.shape[1] + tl.arange(0, total.shape[1])[None, :]
    slot = partial_sums + (tile * split_k).to(tl.int64) * (total.shape[0] * total.shape[1])
    tl.store(slot + k_slice * (total.shape[0] * total.shape[1]) + inside, total)
    tl.debug_barrier()  # every thread's sums are written before the one thread that counts says so
    arrivals = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
    if arrivals == split_k - 1:
        total = tl.load(slot + inside, cache_modifier=".cg")
        for other in range(1, split_k):
            total += tl.load(slot + other * (total.shape[0] * total.shape[1]) + inside, cache_modifier=".cg")
        _store_output(total, c, bias, residual, row, column, m=m, n=n, C_TRANSPOSED=C_TRANSPOSED, EPILOGUE=EPILOGUE)
        tl.store(counters + tile, 0)  # the next launch expects zeros


@triton.jit
def _compute_unit(
    a, b, c, bias, residual, unit, partial_sums, counters, m, n, k, group, split_k, full_tiles,
    TMA: tl.constexpr, A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, C_TRANSPOSED: tl.constexpr,
    EPILOGUE: tl.constexpr, SPLITS_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one unit of work: a whole output tile, or one slice of K of a tile."""
    tile = unit
    steps = tl.cdiv(k, BLOCK_K)
    first = 0
    k_slice = 0
    if SPLITS_K:
        if unit >= full_tiles:
            tile = full_tiles + (unit - full_tiles) // split_k
            k_slice = (unit - full_tiles) % split_k
            steps = tl.cdiv(steps, split_k)
            first = k_slice * steps * BLOCK_K
    row_block, column_block = _tile_position(tile, tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), group)
    row, column = row_block * BLOCK_M, column_block * BLOCK_N
    # Rows and columns past the edge wrap around: they are computed in vain but need no mask inside the loop.
    rows = (row + tl.arange(0, BLOCK_M)) % m
    columns = (column + tl.arange(0, BLOCK_N)) % n
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(steps):
        depth = first + step * BLOCK_K
        left = _load_a(a, rows, row, depth, m, k,
                       TMA=TMA, TRANSPOSED=A_TRANSPOSED, BLOCK_M=BLOCK_M, BLOCK_K=BLOCK_K)  # fmt: skip
        right = _load_b(b, columns, column, depth, n, k,
                        TMA=TMA, TRANSPOSED=B_TRANSPOSED, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K)  # fmt: skip
        if left.dtype == tl.float32:
            left = _round_to_tf32(left)
            right = _round_to_tf32(right)
        total = tl.dot(left, right, total, input_precision="tf32")
    if SPLITS_K:
        if unit >= full_tiles:
            _reduce_slices(total, partial_sums, counters, tile - full_tiles, k_slice, split_k,
                           c=c, bias=bias, residual=residual, row=row, column=column, m=m, n=n,
                           C_TRANSPOSED=C_TRANSPOSED, EPILOGUE=EPILOGUE)  # fmt: skip
        else:
            _store_output(total, c, bias, residual, row, column, m=m, n=n, C_TRANSPOSED=C_TRANSPOSED, EPILOGUE=EPILOGUE)
    else:
        _store_output(total, c, bias, residual, row, column, m=m, n=n, C_TRANSPOSED=C_TRANSPOSED, EPILOGUE=EPILOGUE)


@triton.jit(do_not_specialize=_SIZES)
def product_kernel(
    a, b, c, bias, residual, partial_sums, counters, m_units, n_units, k_units, group, split_k, full_tiles,
    UNIT_M: tl.constexpr, UNIT_N: tl.constexpr, UNIT_K: tl.constexpr,
    TMA: tl.constexpr, PERSISTENT: tl.constexpr, A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr,
    C_TRANSPOSED: tl.constexpr, EPILOGUE: tl.constexpr, SPLITS_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute c = epilogue(a @ b); a is (m, k), b is (k, n), each row-major or, if transposed, column-major."""
    m, n, k = m_units * UNIT_M, n_units * UNIT_N, k_units * UNIT_K
    if PERSISTENT:
        units = tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N)
        if SPLITS_K:
            units = full_tiles + (units - full_tiles) * split_k
        for unit in tl.range(tl.program_id(0), units, tl.num_programs(0), flatten=True):
            _compute_unit(a, b, c, bias, residual, unit,
                          partial_sums=partial_sums, counters=counters, m=m, n=n, k=k, group=group, split_k=split_k,
                          full_tiles=full_tiles, TMA=TMA, A_TRANSPOSED=A_TRANSPOSED, B_TRANSPOSED=B_TRANSPOSED,
                          C_TRANSPOSED=C_TRANSPOSED, EPILOGUE=EPILOGUE, SPLITS_K=SPLITS_K,
                          BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K)  # fmt: skip
    else:
        _compute_unit(a, b, c, bias, residual, tl.program_id(0),
                      partial_sums=partial_sums, counters=counters, m=m, n=n, k=k, group=group, split_k=split_k,
                      full_tiles=full_tiles, TMA=TMA, A_TRANSPOSED=A_TRANSPOSED, B_TRANSPOSED=B_TRANSPOSED,
                      C_TRANSPOSED=C_TRANSPOSED, EPILOGUE=EPILOGUE, SPLITS_K=SPLITS_K,
                      BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K)  # fmt: skip
