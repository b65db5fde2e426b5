// Sparse int8 weights times a few vectors of integers, summed in 32 bits: exact, so the same on every instruction set.
//
// The storage is that of sparse.h with four slots a group. Activations are widened to 16 bits, so that one permute of two
// AVX-512 registers reaches the whole window for two slots of 16 rows, and one dot instruction takes both.
#pragma once

#include "kernels/sparse.h"

namespace tw {

constexpr int kInt8Slots = 4;

struct alignas(64) SparseInt8Group {
  static constexpr int slots = kInt8Slots;
  // Slots 0 and 2 of a row in the low six and the next six bits of the first number, 1 and 3 in those of the second.
  uint16_t index[kBand][2];
  int8_t value[2][kBand][2];  // slots 0 and 1, then 2 and 3

  void put(int lane, int slot, uint32_t column, float weight) {
    index[lane][slot % 2] = static_cast<uint16_t>(index[lane][slot % 2] | column << (slot / 2 * kIndexBits));
    value[slot / 2][lane][slot % 2] = static_cast<int8_t>(weight);
  }
};

struct SparseInt8Matrix : SparseBands {
  const SparseInt8Group* groups = nullptr;
};

constexpr int kInt8Slack = 2;    // numbers after the last padded column that the kernels may read
constexpr int kInt8Aligned = 32;  // numbers in a cache line: where each x begins at one, fewer loads straddle two

struct SparseInt8Kernels {
  // sums[v * sums_step + row] = A x[v] for `vectors` <= kMaxVectors inputs and the bands [first, last). Each x holds
  // padded_columns numbers and then kInt8Slack more.
  void (*vectors)(const SparseInt8Matrix& a, const int16_t* x, int64_t x_step, int vectors, int32_t* sums,
                  int64_t sums_step, int64_t first, int64_t last);
  // q = x in 127ths of its largest magnitude, to the nearest (ties to even); a NaN is 0. Returns what a step is worth.
  float (*quantize)(const float* x, int64_t count, int16_t* q);
};

TW_TABLE(SparseInt8Kernels, sparse_int8)

}  // namespace tw
