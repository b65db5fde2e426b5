"""Kernels along the rows of a matrix: softmax, layer norm, RMS norm, and sums or maxima along an axis.

The normalisations have two bodies. SINGLE holds whole rows in registers and reads them once; the other loops over the
row, BLOCK_COLS at a time, and reads it twice. The number of columns is passed in units of COL_UNIT, so that the
compiler knows its alignment without a binary per width.
"""

# The bodies are Triton's language, not Python's: its types are tl.tensor and tl.constexpr.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

_SIZES = ("rows", "col_units")


@triton.jit(do_not_specialize=_SIZES)
def softmax_kernel(
    x, y, rows, col_units,
    COL_UNIT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, SINGLE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute y, the softmax of each row of x; a row has col_units * COL_UNIT columns."""
    cols = col_units * COL_UNIT
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    lane = tl.arange(0, BLOCK_COLS)[None, :]
    base = row.to(tl.int64) * cols
    if SINGLE:
        inside = (row < rows) & (lane < cols)
        value = tl.load(x + base + lane, mask=inside, other=-1.0e30).to(tl.float32)
        probability = tl.exp(value - tl.max(value, 1)[:, None])
        tl.store(y + base + lane, (probability / tl.sum(probability, 1)[:, None]).to(y.dtype.element_ty), mask=inside)
    else:
        row_max = tl.full((BLOCK_ROWS,), -1.0e30, dtype=tl.float32)
        weight = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
        for start in tl.range(0, cols, BLOCK_COLS, num_stages=STAGES):
            inside = (row < rows) & (lane < cols - start)
            value = tl.load(x + base + start + lane, mask=inside, other=-1.0e30).to(tl.float32)
            new_max = tl.maximum(row_max, tl.max(value, 1))
            weight = weight * tl.exp(row_max - new_max) + tl.sum(tl.exp(value - new_max[:, None]), 1)
            row_max = new_max
        for start in tl.range(0, cols, BLOCK_COLS, num_stages=STAGES):
            inside = (row < rows) & (lane < cols - start)
            value = tl.load(x + base + start + lane, mask=inside, other=-1.0e30).to(tl.float32)
            probability = tl.exp(value - row_max[:, None]) / weight[:, None]
            tl.store(y + base + start + lane, probability.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_SIZES)
def norm_kernel(
    x, y, weight, bias, rows, col_units,
    RMS: tl.constexpr, COL_UNIT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    SINGLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute y, the layer norm of each row of x (weight and bias), or its RMS norm (weight only)."""
    cols = col_units * COL_UNIT
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    lane = tl.arange(0, BLOCK_COLS)[None, :]
    base = row.to(tl.int64) * cols
    if SINGLE:
        inside = (row < rows) & (lane < cols)
        value = tl.load(x + base + lane, mask=inside, other=0.0).to(tl.float32)
        centred = value if RMS else tl.where(lane < cols, value - (tl.sum(value, 1) / cols)[:, None], 0.0)
        scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / cols + 1e-5)
        gain = tl.load(weight + lane, mask=lane < cols, other=0.0).to(tl.float32)
        result = centred * scale[:, None] * gain
        if not RMS:
            result += tl.load(bias + lane, mask=lane < cols, other=0.0).to(tl.float32)
        tl.store(y + base + lane, result.to(y.dtype.element_ty), mask=inside)
    else:
        sums = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype=tl.float32)
        squares = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype=tl.float32)
        for start in tl.range(0, cols, BLOCK_COLS, num_stages=STAGES):
            inside = (row < rows) & (lane < cols - start)
            value = tl.load(x + base + start + lane, mask=inside, other=0.0).to(tl.float32)
            sums += value
            squares += value * value
        mean = tl.sum(sums, 1) / cols
        if RMS:
            mean = mean * 0.0
        variance = tl.maximum(tl.sum(squares, 1) / cols - mean * mean, 0.0)
        scale = 1.0 / tl.sqrt(variance + 1e-5)
        for start in tl.range(0, cols, BLOCK_COLS, num_stages=STAGES):
            inside = (row < rows) & (lane < cols - start)
            value = tl.load(x + base + start + lane, mask=inside, other=0.0).to(tl.float32)
            gain = tl.load(weight + start + lane, mask=lane < cols - start, other=0.0).to(tl.float32)
            result = (value - mean[:, None]) * scale[:, None] * gain
            if not RMS:
                result += tl.load(bias + start + lane, mask=lane < cols - start, other=0.0).to(tl.float32)
            tl.store(y + base + start + lane, result.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_SIZES)
def reduce_kernel(
    x, y, rows, col_units,
    AXIS: tl.constexpr, OPERATION: tl.constexpr, COL_UNIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute y, the sum or maximum of x along an axis: axis 1 gives one number per row, axis 0 one per column."""
    cols = col_units * COL_UNIT
    start_value = 0.0 if OPERATION == "sum" else -1.0e30
    total = tl.full((BLOCK_ROWS, BLOCK_COLS), start_value, dtype=tl.float32)
    if AXIS == 1:
        row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        lane = tl.arange(0, BLOCK_COLS)[None, :]
        base = row[:, None].to(tl.int64) * cols
        for start in tl.range(0, cols, BLOCK_COLS, num_stages=STAGES):
            inside = (row[:, None] < rows) & (lane < cols - start)
            value = tl.load(x + base + start + lane, mask=inside, other=start_value).to(tl.float32)
            total = total + value if OPERATION == "sum" else tl.maximum(total, value)
        result = tl.sum(total, 1) if OPERATION == "sum" else tl.max(total, 1)
        tl.store(y + row, result.to(y.dtype.element_ty), mask=row < rows)
    else:
        column = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
        lane = tl.arange(0, BLOCK_ROWS)[:, None]
        for start in tl.range(0, rows, BLOCK_ROWS, num_stages=STAGES):
            row = start + lane
            inside = (row < rows) & (column[None, :] < cols)
            value = tl.load(x + row.to(tl.int64) * cols + column[None, :], mask=inside, other=start_value)
            value = value.to(tl.float32)
            total = total + value if OPERATION == "sum" else tl.maximum(total, value)
        result = tl.sum(total, 0) if OPERATION == "sum" else tl.max(total, 0)
        tl.store(y + column, result.to(y.dtype.element_ty), mask=column < cols)
