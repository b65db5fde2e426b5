// Sparse matrix (the weights of a linear or convolution layer) times a few dense vectors or a batch of them.
//
// Storage. The matrix is cut into cells of 128 rows by 64 columns. Within a cell the rows are sorted by their number of
// weights; 16 rows that follow each other in that order are a band, one row per lane, and have as many slots as the
// longest of them. Neighbours in the order have nearly the same number of weights, so little padding is needed. A slot
// is a weight and, in one byte, its column within the cell.
// - For one vector, the 64 inputs of a cell fit four AVX-512 registers: a slot is a permute of them and a multiply-add
//   for 16 rows. The sums of a cell are put back into the order of the rows by another permute.
// - For a batch, cells have 128 columns and bands of four rows (quads). A tile is up to four vectors of inputs for
// every
//   column. A quad keeps its sums in registers and runs over its slots; the tile's inputs of a cell and most sums of
//   its rows stay in the first-level cache.
#pragma once

#include <cstdint>

#include "common/isa.h"
#include "kernels/conv.h"

namespace tw {

constexpr int kBlockRows = 128;   // definition: of a cell
constexpr int kCellColumns = 64;  // definition: of a cell for vectors: what a permute of four AVX-512 registers reaches
// Of a cell for batches: between cells, sums are stored and loaded again, which takes longest where a row has few
// weights. With 64 columns less is multiplied in that time, and the inputs of 256 do not fit the first-level cache.
constexpr int kTileColumns = 128;
constexpr int kBand = 16;  // definition: rows that have their slots in common: lanes of an AVX-512 register
constexpr int kQuad = 4;   // definition: rows whose sums one pass of the batch kernel holds
constexpr int kBlockBands = kBlockRows / kBand;
constexpr int kBlockQuads = kBlockRows / kQuad;

// Cells by block of rows, then from left to right. A lane is a row's place in the order of its cell.
template <class T>
struct SparseCells {
  int64_t rows = 0, columns = 0;
  int64_t across = 0;        // cells of a block; inputs of the vectors kernels are padded with zeros to whole cells
  const T* value = nullptr;  // one per row of a band and slot; slots by cell, band, place in the row
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

constexpr int kMaxVectors = 4;   // definition: of one pass of the vectors kernels
constexpr int kTileVectors = 4;  // definition: of a tile at most
constexpr int kMaxLanes = 16;
constexpr int kWorkFloats = kBlockRows * kTileVectors * kMaxLanes;

struct SparseKernels {
  int lanes;  // of a vector
  // y[v * y_step + row] = A x[v] for `vectors` <= kMaxVectors inputs and the blocks [first, last). Each x holds
  // across * kCellColumns numbers.
  void (*vectors)(const SparseCells<float>& a, const float* x, int64_t x_step, int vectors, float* y, int64_t y_step,
                  const SparseEpilogue& epilogue, int64_t first, int64_t last);
  // to[channel * step + lane] = lanes[lane][channel]
  void (*gather)(const float* const* lanes, int64_t channels, float* to, int64_t step);
  // work (kBlockRows, kTileVectors * lanes) = bias + the rows of one block times the first `vectors` vectors of a tile:
  // those of a column are neighbours, `offset` of the column after x.
  void (*block)(const SparseCells<float>& a, int64_t block, const int32_t* offset, const float* x, int vectors,
                const float* bias, float* work);
  // y[pixel[b] * y_pitch + row] = act(work[row][b] + residual[pixel[b] * residual_pitch + row]), where pixel[b] is not
  // negative; residual may be null.
  void (*scatter)(const float* work, int rows, int vectors, const int64_t* pixel, const float* residual,
                  int64_t residual_pitch, ConvActivation activation, float* y, int64_t y_pitch);
  bool (*finite)(const float* x, int64_t pitch, int64_t rows, int64_t columns);  // neither infinity nor NaN
};

TW_TABLE(SparseKernels, sparse)

}  // namespace tw
