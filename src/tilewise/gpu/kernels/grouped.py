"""Grouped matrix product over routed tokens, and a product of block-scaled FP8 matrices: one kernel for both.

Every row of the result belongs to one expert and is a token times that expert's weights. Rows are sorted by expert, and
each expert's rows are padded to whole blocks, so that a block of rows reads one weight matrix only. Without routing the
kernel is a plain product. As in `matmul`, sizes are plain integers with a known alignment and one binary serves all
shapes of a number type.
"""

# The bodies are Triton's language, not Python's: its types are tl.tensor and tl.constexpr.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

_SIZES = ("rows", "row_blocks", "n_units", "k_units", "top_k", "group")


@triton.jit(do_not_specialize=_SIZES)
def grouped_kernel(
    a, b, c, a_scale, b_scale, slots, experts,
    rows, row_blocks, n_units, k_units, top_k, group,
    UNIT: tl.constexpr, ROUTED: tl.constexpr, SCALES: tl.constexpr, SCALE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute c[slot] = a[slot // top_k] @ b[expert].T; a is (tokens, k), b is (experts, n, k), c is (rows, n).

    `slots` lists the rows of c by expert, with `rows` in places that are padding; `experts` has one entry per block.
    SCALES is "none", "tensor" (a_scale[0], b_scale[expert]) or "block": one scale per SCALE_BLOCK columns of a's rows
    and per square block of b.
    """
    n = n_units * UNIT
    k = k_units * UNIT

    # Programs go down `group` row blocks before the next column block, so that b's panel is reused in the L2 cache.
    program = tl.program_id(0)
    in_group = group * tl.cdiv(n, BLOCK_N)
    first_block = (program // in_group) * group
    group_blocks = tl.minimum(row_blocks - first_block, group)
    row_block = first_block + (program % in_group) % group_blocks
    column_block = (program % in_group) // group_blocks

    places = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    if ROUTED:
        c_rows = tl.load(slots + places)
        expert = tl.load(experts + row_block).to(tl.int64)
        is_row = c_rows < rows
        a_rows = c_rows // top_k
        b += expert * n * k
    else:
        c_rows = places
        expert = 0
        is_row = c_rows < rows
        a_rows = c_rows
    columns = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    b_columns = columns % n  # columns past the edge wrap around: computed in vain, but without a mask
    inner = tl.arange(0, BLOCK_K)
    a_tile = a + a_rows[:, None].to(tl.int64) * k + inner[None, :]
    b_tile = b + b_columns[None, :] * k + inner[:, None]

    k_blocks = tl.cdiv(k, SCALE_BLOCK)
    if SCALES == "block":
        a_scale += a_rows * k_blocks
        b_scale += expert * tl.cdiv(n, SCALE_BLOCK) * k_blocks + (b_columns // SCALE_BLOCK) * k_blocks
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(0, tl.cdiv(k, BLOCK_K)):
        inside = inner < k - step * BLOCK_K
        left = tl.load(a_tile, mask=is_row[:, None] & inside[None, :], other=0.0)
        right = tl.load(b_tile, mask=inside[:, None], other=0.0)
        if SCALES == "block":
            # BLOCK_K divides SCALE_BLOCK, so one scale holds for the whole step.
            scale_block = step * BLOCK_K // SCALE_BLOCK
            row_scale = tl.load(a_scale + scale_block, mask=is_row, other=0.0)
            column_scale = tl.load(b_scale + scale_block)
            total += tl.dot(left, right) * (row_scale[:, None] * column_scale[None, :])
        else:
            total = tl.dot(left, right, total)
        a_tile += BLOCK_K
        b_tile += BLOCK_K
    if SCALES == "tensor":
        total *= tl.load(a_scale) * tl.load(b_scale + expert)
    offsets = c_rows[:, None].to(tl.int64) * n + columns[None, :]
    tl.store(c + offsets, total.to(c.dtype.element_ty), mask=is_row[:, None] & (columns < n)[None, :])
