// Sparse matrix times a few dense vectors without gathers: the storage for instruction sets whose permutes reach one
// register of inputs only (AVX2; cells of 64 columns, as in sparse.h, need AVX-512's).
//
// Eight rows are a group, one row per lane, and eight columns a strip: its inputs fit one register, so that a weight's
// input is found by one permute and a column within the strip takes three bits. An entry is the weights of a group in a
// strip, up to five per row; as many slots as the fullest row has are stored, and the column numbers of a row's slots
// lie in one 16-bit word. A group's entries are sorted by their number of slots, so that the loops over slots have no
// branches.
//
// Rows that have no weight where another of their group has one multiply some input of the strip by zero. Where inputs
// may be infinite or NaN that is not nothing: the caller then takes the kernels of sparse.h.
#pragma once

#include <cstdint>

#include "common/isa.h"
#include "kernels/sparse.h"

namespace tw {

constexpr int kStripRows = 8, kStripColumns = 8;  // definition
constexpr int kStripSlots = 5;                    // definition: of an entry at most: what 16 bits hold the columns of

struct SparseStrips {
  int64_t rows = 0;
  const float* value = nullptr;          // kStripRows per slot; slots by group, entry, place in the row
  const uint16_t* index = nullptr;       // kStripRows per entry: three bits for each slot, the first in the lowest
  const uint32_t* strip = nullptr;       // first column of each entry
  const int64_t* first_slot = nullptr;   // of a group
  const int64_t* first_entry = nullptr;  // of a group
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
