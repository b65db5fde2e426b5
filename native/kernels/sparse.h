// Sparse matrix (the weights of a linear or convolution layer) times a few dense vectors or a batch of them.
//
// Storage. Rows are taken in bands of 16, one row per lane. A group gives every row of a band five slots, whose columns
// lie in a window of 64 columns that is the group's own: its rows may run ahead of each other or lag behind by that much,
// so that their uneven counts even out and little padding is needed. A column number within the window takes six bits, so
// the five of a row fit into 32. For one vector a slot is a permute of the 64 inputs of the window and a multiply-add for
// 16 rows; for a batch it is 16 broadcast multiply-adds on activations that stay in the first-level cache.
// What does not fit a window is listed apart (overflow). The rows of a block of four bands are sorted by their number of
// weights, so that bands hold rows of similar length.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace tw {

constexpr int kBand = 16;       // rows that share a window
constexpr int kBlockBands = 4;  // bands whose rows are sorted together, and take turns on the activations in the cache
constexpr int kBlockRows = kBand * kBlockBands;
constexpr int kWindow = 64;     // columns that a group reaches: four AVX-512 registers
constexpr int kWindowStep = 16; // windows start at a multiple of this, so that a load does not straddle cache lines
constexpr int kSlots = 5;       // of a group, per row
constexpr int kIndexBits = 6;

struct alignas(64) SparseGroup {
  static constexpr int slots = kSlots;
  uint32_t index[kBand];  // five column numbers per row, the first in the lowest bits
  float value[kSlots][kBand];

  void put(int lane, int slot, uint32_t column, float weight) {
    index[lane] |= column << (slot * kIndexBits);
    value[slot][lane] = weight;
  }
};

struct SparseOverflow {
  uint32_t column;
  uint32_t lane;  // within the band
  float value;
};

// Where the weights of a matrix lie, whatever its groups store.
struct SparseBands {
  int64_t rows = 0, columns = 0;
  int64_t padded_columns = 0;  // what windows reach; inputs are padded with zeros up to here
  const uint32_t* window = nullptr;     // first column of a group's window; rises within a band
  const int64_t* band_start = nullptr;  // first group of a band; bands + 1 entries
  const uint8_t* row_at = nullptr;      // row of each lane, counted from the first row of its block
  const SparseOverflow* overflow = nullptr;  // by band, then column
  const int64_t* overflow_start = nullptr;   // first overflow entry of a band; bands + 1 entries
};

struct SparseMatrix : SparseBands {
  const SparseGroup* groups = nullptr;
};

struct SparseEpilogue {
  const float* bias = nullptr;
  bool relu = false;
};

inline int64_t sparse_blocks(int64_t rows) { return (rows + kBlockRows - 1) / kBlockRows; }
inline int64_t sparse_bands(int64_t rows) { return sparse_blocks(rows) * kBlockBands; }

// A run of neighbouring output pixels of a tile: where their inputs begin, and where in the tile they go.
struct PixelRun {
  int64_t from;
  int to, count;
};

constexpr int kMaxVectors = 4;  // of one pass of the vectors kernel
constexpr int kMaxBatch = 32;   // inputs that one pass of the block kernel takes
constexpr int kWorkFloats = kBlockRows * kMaxBatch;

struct SparseKernels {
  // y[v * y_step + row] = A x[v] for `vectors` <= kMaxVectors inputs and the bands [first, last). Each x holds
  // padded_columns numbers.
  void (*vectors)(const SparseMatrix& a, const float* x, int64_t x_step, int vectors, float* y, int64_t y_step,
                  const SparseEpilogue& epilogue, int64_t first, int64_t last);
  // xt (padded_columns, batch) = x transposed, zeros where x has no row or column.
  void (*transpose)(const float* x, int64_t columns, int64_t padded_columns, int valid, int batch, float* xt);
  // xt (columns, batch) = for each column the inputs of the runs, column_offset further on. Up to 16 numbers are written
  // past a run's end, and past the end of xt.
  void (*patches)(const float* x, const int64_t* column_offset, int64_t columns, const PixelRun* runs, int count, int batch,
                  float* xt);
  // work (kBlockRows, batch) = the rows of one block, in the order of their lanes, times `batch` inputs given transposed;
  // batch is 16 or 32.
  void (*block)(const SparseMatrix& a, int64_t block, const float* xt, int batch, const SparseEpilogue& epilogue,
                float* work);
  // What `block` left in work, written to y[b * y_step + row] for b < valid.
  void (*scatter_columns)(const SparseMatrix& a, int64_t block, const float* work, int batch, int valid, float* y,
                          int64_t y_step);
  // ... and to y[row * y_step + b].
  void (*scatter_rows)(const SparseMatrix& a, int64_t block, const float* work, int batch, int valid, float* y,
                       int64_t y_step);
};

TW_TABLE(SparseKernels, sparse)

}  // namespace tw
