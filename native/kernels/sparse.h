// Sparse matrix (the weights of a linear or convolution layer) times a few dense vectors or a batch of them.
//
// Storage. The matrix is cut into cells of 128 rows by 64 columns. Within a cell the rows are sorted by their number of
// weights; 16 rows that follow each other in that order are a band, one row per lane, and have as many slots as the
// longest of them. Neighbours in the order have nearly the same number of weights, so little padding is needed. A slot
// is a weight and, in one byte, its column within the cell.
// - For one vector, the 64 inputs of a cell fit four AVX-512 registers: a slot is a permute of them and a multiply-add
//   for 16 rows. The sums of a cell are put back into the order of the rows by another permute.
// - For a batch, the activations of a cell and the sums of its rows stay in the first-level cache. Four rows (a quad)
// at a
//   time keep their sums in registers and run over their slots; a quad has a length of its own, so that the padding of
//   its band costs it nothing.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace tw {

constexpr int kBlockRows = 128;   // definition: of a cell
constexpr int kCellColumns = 64;  // definition: of a cell: what a permute of four AVX-512 registers reaches
constexpr int kBand = 16;         // definition: rows that have their slots in common: lanes of an AVX-512 register
constexpr int kQuad = 4;          // definition: rows whose sums one pass of the batch kernel holds
constexpr int kBlockBands = kBlockRows / kBand;
constexpr int kBlockQuads = kBlockRows / kQuad;

// Cells by block of rows, then from left to right. A lane is a row's place in the order of its cell.
template <class T>
struct SparseCells {
  int64_t rows = 0, columns = 0;
  int64_t across = 0;        // cells of a block; inputs of the vectors kernels are padded with zeros to whole cells
  const T* value = nullptr;  // kBand per slot; slots by cell, band, place in the row
  const uint8_t* index = nullptr;    // the column of each value, within its cell
  const int64_t* start = nullptr;    // first slot of a cell
  const uint8_t* row_at = nullptr;   // row of each lane of a cell, within its block
  const uint8_t* lane_of = nullptr;  // lane of each row of a cell
  const uint8_t* length = nullptr;   // slots of each quad of a cell; the first quad of a band is the longest
};

struct SparseEpilogue {
  const float* bias = nullptr;
  bool relu = false;
};

inline int64_t sparse_blocks(int64_t rows) { return (rows + kBlockRows - 1) / kBlockRows; }

// A run of neighbouring output pixels of a tile: where their inputs begin, and where in the tile they go.
struct PixelRun {
  int64_t from;
  int to, count;
};

constexpr int kMaxVectors = 4;  // definition: of one pass of the vectors kernels
constexpr int kMaxBatch = 32;   // definition: inputs that one pass of the block kernel takes
constexpr int kWorkFloats = kBlockRows * kMaxBatch;

struct SparseKernels {
  // y[v * y_step + row] = A x[v] for `vectors` <= kMaxVectors inputs and the blocks [first, last). Each x holds
  // across * kCellColumns numbers.
  void (*vectors)(const SparseCells<float>& a, const float* x, int64_t x_step, int vectors, float* y, int64_t y_step,
                  const SparseEpilogue& epilogue, int64_t first, int64_t last);
  // xt (columns, batch) = x transposed, zeros where x has no row.
  void (*transpose)(const float* x, int64_t columns, int valid, int batch, float* xt);
  // xt (columns, batch) = for each column the inputs of the runs, column_offset further on. Up to 16 numbers are
  // written past a run's end, and past the end of xt.
  void (*patches)(const float* x, const int64_t* column_offset, int64_t columns, const PixelRun* runs, int count,
                  int batch, float* xt);
  // work (kBlockRows, batch) = the rows of one block times `batch` inputs given transposed; batch is 16 or 32. Only the
  // first `used` columns of work mean something.
  void (*block)(const SparseCells<float>& a, int64_t block, const float* xt, int batch, int used,
                const SparseEpilogue& epilogue, float* work);
  // y[b * y_step + row] = work[row * batch + b] for b < valid and row < rows.
  void (*scatter_columns)(const float* work, int rows, int batch, int valid, float* y, int64_t y_step);
};

TW_TABLE(SparseKernels, sparse)

}  // namespace tw
