// Sparse int8 weights times a few vectors of integers, summed in 32 bits: exact, so the same on every instruction set.
//
// The storage is that of sparse.h; the slots of a row are stored in adjacent pairs. Activations are widened to int16,
// so that one permute of two AVX-512 registers covers a whole cell for a pair of slots of 16 rows, and one dot-product
// instruction takes both.
#pragma once

#include "kernels/sparse.h"

namespace tw {

constexpr int kInt8Slots = 2;  // definition: of a step of the kernels
constexpr int kInt8Slack =
    32;  // numbers after the last padded column: the kernels may read two, and each x has whole lines

struct SparseInt8Kernels {
  // sums[v * sums_step + row] = A x[v] for `vectors` <= kMaxVectors inputs and the blocks [first, last). Each x holds
  // across * kCellColumns numbers and then kInt8Slack more.
  void (*vectors)(const SparseCells<int8_t>& a, const int16_t* x, int64_t x_step, int vectors, int32_t* sums,
                  int64_t sums_step, int64_t first, int64_t last);
  // q = x in 127ths of its largest magnitude, to the nearest (ties to even); a NaN is 0. Returns what a step is worth.
  float (*quantize)(const float* x, int64_t count, int16_t* q);
};

TW_TABLE(SparseInt8Kernels, sparse_int8)

}  // namespace tw
