// Shared by the forward and backward pass of attention: a block of scores, its mask, and small matrix products by the
// micro-kernel of matrix multiplication. For kernel files only.
#pragma once

#include "kernels/attention.h"
#include "kernels/gemm_micro.h"
#include "kernels/gemm_pack.h"
#include "kernels/row_loops.h"

namespace tw {
namespace TW_ISA {
namespace {

// Queries and keys of a block: the scores (16 KiB), the transposed keys and the queries together stay in the first two
// cache levels.
constexpr int kQueryBlock = 64;  // chosen
constexpr int kKeyBlock = kQueryBlock;

constexpr int kTileVectors = 2;  // definition: vectors of the register tile
constexpr int kTileRows = kMaxRows[kTileVectors];

// An operand read element by element: element (i, p) is data[i * row + p * column].
struct Factor {
  const float* data;
  int64_t row, column;
};

const MicroTable kMicro = TW_MICRO_TABLE(kAnyLanes, false);

// c (m, n) (+)= a (m, k) * b (k, n), in tiles of about equal height.
void multiply(int64_t m, int64_t n, int64_t k, Factor a, StridedRows b, RowsOut c, bool accumulate) {
  const int64_t strips = (m + kTileRows - 1) / kTileRows;
  constexpr int64_t kWidth = kTileVectors * kLanes;
  for (int64_t j = 0; j < n; j += kWidth) {
    const int64_t width = n - j < kWidth ? n - j : kWidth;
    const int vectors = static_cast<int>((width + kLanes - 1) / kLanes);
    const int last = static_cast<int>(width - (vectors - 1) * kLanes);
    for (int64_t s = 0; s < strips; ++s) {
      const int64_t i = m * s / strips, rows = m * (s + 1) / strips - i;
      const MicroArgs args = {k,        a.data + i * a.row,        a.row,    a.column, b.data + j,
                              b.stride, c.data + i * c.stride + j, c.stride, last,     accumulate,
                              nullptr};
      kMicro.at[vectors - 1][rows - 1](args);
    }
  }
}

// Copies the keys (or values) of one block to [dim][step], so that products with queries run along keys.
TW_INLINE void transpose_rows(StridedRows rows, int64_t first, int64_t count, int64_t dim, int step, float* out) {
  const Strip strip = {rows.data + first * rows.stride, 1, rows.stride, dim, static_cast<int>(count), step};
  pack_along_k(strip, out);
}

// Copies rows to contiguous memory and multiplies them by a factor.
TW_INLINE void copy_scaled(StridedRows rows, int64_t first, int64_t count, int64_t dim, float factor, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    const float* from = rows.data + (first + i) * rows.stride;
    float* to = out + i * dim;
    each_vector(dim, [&](int64_t c, auto lanes) { lanes.put(to + c, lanes.get(from + c) * factor); });
  }
}

// Returns how many keys the causal mask lets query t see.
TW_INLINE int64_t visible_keys(const AttentionHead& head, int64_t t) {
  if (!head.causal) return head.keys;
  const int64_t n = head.keys - head.queries + t + 1;
  return n < 0 ? 0 : n < head.keys ? n : head.keys;
}

// Returns the first key that query t sees.
TW_INLINE int64_t first_key(const AttentionHead& head, int64_t t) {
  const int64_t first = head.window > 0 ? visible_keys(head, t) - head.window : 0;
  return first > 0 ? first : 0;
}

// Applies the given mask to the scores of query t with keys [j0, j0 + count).
TW_INLINE void apply_mask_row(const AttentionHead& head, int64_t t, int64_t j0, int64_t count, float* scores) {
  const int64_t at = t * head.mask_row + j0 * head.mask_column;
  if (head.mask_kind == MaskKind::additive) {
    const float* mask = static_cast<const float*>(head.mask) + at;
    for (int64_t j = 0; j < count; ++j) scores[j] += mask[j * head.mask_column];
  } else {
    const unsigned char* mask = static_cast<const unsigned char*>(head.mask) + at;
    for (int64_t j = 0; j < count; ++j) {
      if (!mask[j * head.mask_column]) scores[j] = -__builtin_inff();
    }
  }
}

// Applies all masks to the scores of queries [first, first + queries) with keys [j0, j0 + count): -inf where a query
// may not see a key. Rows of `scores` are `step` floats apart.
void mask_scores(const AttentionHead& head, int64_t first, int64_t queries, int64_t j0, int64_t count, int64_t step,
                 float* scores) {
  for (int64_t i = 0; i < queries; ++i) {
    float* row = scores + i * step;
    const int64_t visible = visible_keys(head, first + i) - j0;
    for (int64_t j = visible > 0 ? visible : 0; j < count; ++j) row[j] = -__builtin_inff();
    const int64_t hidden = first_key(head, first + i) - j0;
    for (int64_t j = 0; j < hidden && j < count; ++j) row[j] = -__builtin_inff();
    if (head.mask_kind != MaskKind::none) apply_mask_row(head, first + i, j0, count, row);
  }
}

}  // namespace
}  // namespace TW_ISA
}  // namespace tw
