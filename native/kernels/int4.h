// Products of float rows with four-bit weights. Along K a weight matrix is cut into blocks of 32: a weight is
// scale * (code - 8), or scale * code + minimum, with a code from 0 to 15. A row of floats becomes signed bytes, by a
// scale of its own for each block. The sums of a block are integers, exact on every instruction set; the scaled sums of
// all blocks are added in order, column by column and without fused multiply-adds, so that the floats are the same on
// every set too, however many rows are computed at a time.
//
// Packed: panels of 16 columns, each a run of pairs of blocks. A pair is 2 x 16 scales in half precision (then as many
// minimums where there are any), then 2 x 256 bytes of codes: byte 4 c + i of a run of 64 holds value i of column c of
// one group of four values of K in its low half, and of the next group in its high half. All begins on whole cache
// lines.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace tw {

constexpr int kInt4Block = 32;                           // values of K that share a scale
constexpr int kInt4Panel = 16;                           // columns of a panel
constexpr int kInt4Codes = kInt4Block * kInt4Panel / 2;  // bytes of a block's codes

inline int64_t int4_blocks(int64_t k) { return (k + 2 * kInt4Block - 1) / (2 * kInt4Block) * 2; }  // even
inline int64_t int4_pair_bytes(bool minimum) { return 2 * kInt4Codes + (minimum ? 2 : 1) * 4 * kInt4Panel; }
inline int64_t int4_packed_bytes(int64_t columns, int64_t k, bool minimum) {
  return (columns + kInt4Panel - 1) / kInt4Panel * (int4_blocks(k) / 2) * int4_pair_bytes(minimum);
}

// Rows as bytes: (rows, blocks * 32), and of every block what its sums are scaled with.
struct Int4Rows {
  const int8_t* values = nullptr;
  const float* scale = nullptr;     // (rows, blocks)
  const int32_t* offset = nullptr;  // (rows, blocks), -8 times the sum of the bytes: what codes from 0 on add too much
};

struct Int4Problem {
  Int4Rows x;
  int64_t blocks = 0;  // even
  const uint8_t* weights = nullptr;
  bool minimum = false;
  const float* column_scale = nullptr;  // padded to whole panels
  int64_t columns = 0;
  float* y = nullptr;
  int64_t y_row = 0;
};

struct Int4Kernels {
  // n floats to `blocks` blocks of bytes (zeros after the last float): byte = round(x / scale), scale = max|x| / 127.
  void (*quantize)(const float* x, int64_t n, int64_t blocks, int8_t* values, float* scale, int32_t* offset);
  // The rows [first, last) times the panels [first_panel, last_panel).
  void (*rows)(const Int4Problem& problem, int64_t first, int64_t last, int64_t first_panel, int64_t last_panel);
};

TW_TABLE(Int4Kernels, int4)

}  // namespace tw
