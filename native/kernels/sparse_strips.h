// Sparse matrix times a few dense vectors without gathers: the storage for AVX2, whose permutes reach one register of
// inputs only. (The cells of 64 columns in sparse.h need AVX-512.)
//
// Eight rows are a group, one row per lane; eight columns are a strip, whose inputs fit one register. So one permute
// finds the inputs of eight weights, and a column within the strip takes three bits. An entry is the weights of a group
// in a strip, up to five per row: as many slots are stored as the fullest row has, and the column numbers of a row's
// slots share one 16-bit word. A group's entries are sorted by their number of slots, so that the loops over slots have
// no branches.
//
// A row that has no weight where another row of its group has one multiplies some input of the strip by zero. If inputs
// may be infinite or NaN, the result would be NaN: the caller then uses the kernels of sparse.h.
#pragma once

#include <cstdint>

#include "common/isa.h"
#include "kernels/sparse.h"

namespace tw {

constexpr int kStripRows = 8, kStripColumns = 8;  // hardware: lanes of AVX2
constexpr int kStripSlots = 5;                    // definition: most slots of an entry, 3 bits each in 16 bits

struct SparseStrips {
  int64_t rows = 0;
  const float* value = nullptr;          // weights by group, entry, slot, row of the group
  const uint16_t* index = nullptr;       // kStripRows per entry: three bits for each slot, the first in the lowest
  const uint32_t* strip = nullptr;       // first column of each entry
  const int64_t* first_slot = nullptr;   // of each group
  const int64_t* first_entry = nullptr;  // of each group
  const uint32_t* count = nullptr;       // kStripSlots per group: entries of one slot, of two, ...
};

struct SparseStripKernels {
  // y[v * y_step + row] = A x[v] for `vectors` <= kMaxVectors finite inputs and the groups [first, last). Each x is
  // padded to whole strips. Null where the kernels of sparse.h are faster.
  void (*vectors)(const SparseStrips& a, const float* x, int64_t x_step, int vectors, float* y, int64_t y_step,
                  const SparseEpilogue& epilogue, int64_t first, int64_t last);
};

TW_TABLE(SparseStripKernels, sparse_strips)

}  // namespace tw
