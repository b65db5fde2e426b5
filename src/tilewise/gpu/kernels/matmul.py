"""Matrix product with an epilogue, over a batch: one kernel for the families `matmul` and `batched_matmul`.

One binary per configuration serves every shape, which makes thousands of measurements affordable. Sizes are plain
integers that Triton never specialises on; the compiler learns their alignment from a constexpr unit (n = n_units *
UNIT_N), so that it can use 16-byte loads without a compilation per shape. The order in which programs visit the output
(`group`) is a run-time argument and needs no binary of its own.
"""

# The bodies are Triton's language, not Python's: its types are tl.tensor and tl.constexpr.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

_SIZES = ("m_units", "n_units", "k_units", "a_batch", "b_batch", "c_batch", "group")


@triton.jit(do_not_specialize=_SIZES)
def matmul_kernel(
    a, b, c, bias, residual,
    m_units, n_units, k_units, a_batch, b_batch, c_batch, group,
    UNIT_M: tl.constexpr, UNIT_N: tl.constexpr, UNIT_K: tl.constexpr,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, EPILOGUE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute c[i] = epilogue(a[i] @ b[i]); a is (m, k), b is (k, n), row-major or, if transposed, column-major."""
    m = m_units * UNIT_M
    n = n_units * UNIT_N
    k = k_units * UNIT_K

    # Programs go down `group` row blocks before the next column block, so that b's panel is reused in the L2 cache.
    program = tl.program_id(0)
    column_blocks = tl.cdiv(n, BLOCK_N)
    row_blocks = tl.cdiv(m, BLOCK_M)
    in_group = group * column_blocks
    first_row = (program // in_group) * group
    group_rows = tl.minimum(row_blocks - first_row, group)
    row_block = first_row + (program % in_group) % group_rows
    column_block = (program % in_group) // group_rows

    item = tl.program_id(1).to(tl.int64)
    a += item * (a_batch * UNIT_K)
    b += item * (b_batch * UNIT_K)
    c += item * (c_batch * UNIT_N)

    # Rows and columns past the edge wrap around: they are computed in vain but need no mask inside the loop.
    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    a_rows = rows % m
    b_columns = columns % n
    if A_TRANSPOSED:
        a_tile = a + a_rows[:, None] + inner[None, :] * m
        a_step = BLOCK_K * m
    else:
        a_tile = a + a_rows[:, None] * k + inner[None, :]
        a_step = BLOCK_K
    if B_TRANSPOSED:
        b_tile = b + inner[:, None] + b_columns[None, :] * k
        b_step = BLOCK_K
    else:
        b_tile = b + inner[:, None] * n + b_columns[None, :]
        b_step = BLOCK_K * n

    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, k, BLOCK_K):
        left = tl.load(a_tile, mask=inner[None, :] < k - start, other=0.0)
        right = tl.load(b_tile, mask=inner[:, None] < k - start, other=0.0)
        total = tl.dot(left, right, total, input_precision="tf32")
        a_tile += a_step
        b_tile += b_step

    inside = (rows[:, None] < m) & (columns[None, :] < n)
    if EPILOGUE == "bias" or EPILOGUE == "bias_relu" or EPILOGUE == "bias_gelu":
        total += tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    if EPILOGUE == "bias_relu":
        total = tl.maximum(total, 0.0)
    if EPILOGUE == "bias_gelu":
        total = 0.5 * total * (1.0 + tl.erf(total * 0.7071067811865476))
    offsets = rows[:, None] * n + columns[None, :]
    if EPILOGUE == "residual":
        total += tl.load(residual + item * (c_batch * UNIT_N) + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(c + offsets, total.to(c.dtype.element_ty), mask=inside)
