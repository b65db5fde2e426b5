"""Attention forward in one pass over the keys, with an online softmax (FlashAttention, Dao et al. 2022).

A program computes BLOCK_M queries of one head and loops over the keys, BLOCK_N at a time; scores stay on the chip. A
causal mask is aligned to the end: query t of T attends to keys up to S - T + t. `sharing` query heads share one key
head.
"""

# The bodies are Triton's language, not Python's: its types are tl.tensor and tl.constexpr.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl


@triton.jit(do_not_specialize=("queries", "keys", "sharing", "scale"))
def attention_kernel(
    q, k, v, out,
    queries, keys, sharing, scale,
    HEAD: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute out = softmax(q k^T * scale) v over contiguous (batch * heads, length, HEAD) operands."""
    first = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    q += head.to(tl.int64) * queries * HEAD
    out += head.to(tl.int64) * queries * HEAD
    k += (head // sharing).to(tl.int64) * keys * HEAD
    v += (head // sharing).to(tl.int64) * keys * HEAD

    rows = first + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, HEAD)
    query = tl.load(q + rows[:, None] * HEAD + lanes[None, :], mask=rows[:, None] < queries, other=0.0)
    k_tile = k + columns[None, :] * HEAD + lanes[:, None]
    v_tile = v + columns[:, None] * HEAD + lanes[None, :]

    end = keys
    if CAUSAL:
        end = tl.minimum(keys, first + BLOCK_M + keys - queries)
    row_max = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((BLOCK_M,), dtype=tl.float32)
    total = tl.zeros((BLOCK_M, HEAD), dtype=tl.float32)
    log2_scale = scale * 1.4426950408889634  # log2(e): exp2 is faster than exp
    for start in range(0, end, BLOCK_N):
        key = tl.load(k_tile, mask=columns[None, :] < keys - start, other=0.0)
        score = tl.dot(query, key) * log2_scale
        visible = start + columns[None, :] < keys
        if CAUSAL:
            visible = visible & (start + columns[None, :] <= rows[:, None] + keys - queries)
        # A finite floor instead of -inf, so that a row past the end never computes inf - inf.
        score = tl.where(visible, score, -1.0e30)
        new_max = tl.maximum(row_max, tl.max(score, 1))
        probability = tl.exp2(score - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        weight = weight * rescale + tl.sum(probability, 1)
        value = tl.load(v_tile, mask=columns[:, None] < keys - start, other=0.0)
        total = tl.dot(probability.to(value.dtype), value, total * rescale[:, None])
        row_max = new_max
        k_tile += BLOCK_N * HEAD
        v_tile += BLOCK_N * HEAD
    total = total / weight[:, None]
    tl.store(out + rows[:, None] * HEAD + lanes[None, :], total.to(out.dtype.element_ty), mask=rows[:, None] < queries)
