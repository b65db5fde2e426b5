// Sparse int8 weights times a few vectors of integers, summed in int32: exact, so the same on every instruction set.
//
// The storage is that of sparse.h, with slots of a row stored in adjacent pairs. Activations are converted to int16, so
// that one permute of two AVX-512 registers covers a whole cell for a pair of slots of 16 rows, and one dot-product
// instruction multiplies both.
#pragma once

#include "kernels/sparse.h"

namespace tw {

constexpr int kInt8Slots = 2;   // hardware: slots of a step, int16 products per lane of a dot-product instruction
constexpr int kInt8Slack = 32;  // hardware: int16 of a cache line, after the last column; the kernels may read two

struct SparseInt8Kernels {
  // sums[v * sums_step + row] = A x[v] for `vectors` <= kMaxVectors inputs and the blocks [first, last). Each x holds
  // across * kCellColumns numbers and then kInt8Slack more.
  void (*vectors)(const SparseCells<int8_t>& a, const int16_t* x, int64_t x_step, int vectors, int32_t* sums,
                  int64_t sums_step, int64_t first, int64_t last);
  // Quantizes symmetrically: q = round(x / scale) with scale = max|x| / 127, ties to even; a NaN becomes 0. Returns the
  // scale.
  float (*quantize)(const float* x, int64_t count, int16_t* q);
};

TW_TABLE(SparseInt8Kernels, sparse_int8)

}  // namespace tw
