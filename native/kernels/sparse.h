// Sparse matrix (the weights of a linear or convolution layer) times a few dense vectors or a batch of them.
//
// Storage (a variant of SELL-C-sigma, Kreutzer et al. 2014). The matrix is cut into cells of 128 rows by 64 columns.
// Within a cell the rows are sorted by their number of weights. 16 consecutive rows of that order are a band, one row
// per lane, and are padded to as many slots as the longest of them; because neighbours in the order have nearly the
// same number of weights, there is little padding. A slot is a weight and, in one byte, its column within the cell.
// - A few vectors: the 64 inputs of a cell fit four AVX-512 registers. A slot is a permute of these registers and a
// multiply-add for 16 rows. The sums of a cell are returned to the order of the rows by another permute.
// - A batch: cells have 128 columns and bands of four rows (quads). A tile is up to four vectors of inputs for every
// column. A quad keeps its sums in registers while the loop runs over its slots; a cell's inputs and most sums of its
// rows stay in the first-level cache.
#pragma once

#include <cstdint>

#include "common/isa.h"
#include "kernels/conv.h"

namespace tw {

constexpr int kBlockRows = 128;   // definition: rows of a cell, which the permute of eight AVX-512 registers reaches
constexpr int kCellColumns = 64;  // definition: columns of a cell for vectors, which four AVX-512 registers hold
// Columns of a cell for batches. Between cells, sums are stored and loaded again, which costs most if a row has few
// weights: 64 columns would mean less work per load. The inputs of 256 columns would not fit the first-level cache.
constexpr int kTileColumns = 128;  // chosen
constexpr int kBand = 16;          // definition: rows padded to equal length: lanes of an AVX-512 register
constexpr int kQuad = 4;           // definition: rows of a register tile of the batch kernel
constexpr int kBlockBands = kBlockRows / kBand;
constexpr int kBlockQuads = kBlockRows / kQuad;

// The cells of a matrix, by block of rows, then from left to right. A lane is the position of a row in the order of its
// cell.
template <class T>
struct SparseCells {
  int64_t rows = 0, columns = 0;
  int64_t across = 0;                // cells per block of rows; inputs of `vectors` are zero-padded to whole cells
  const T* value = nullptr;          // weights by cell, band, slot, row of the band
  const uint8_t* index = nullptr;    // the column of each value, within its cell
  const int64_t* start = nullptr;    // first slot of a cell
  const uint8_t* row_at = nullptr;   // row of each lane of a cell, within its block
  const uint8_t* lane_of = nullptr;  // lane of each row of a cell
  const uint8_t* length = nullptr;   // slots of each quad of a cell; the first quad of a band has the most
};

struct SparseEpilogue {
  const float* bias = nullptr;
  bool relu = false;
};

inline int64_t sparse_blocks(int64_t rows) { return (rows + kBlockRows - 1) / kBlockRows; }

constexpr int kMaxVectors = 4;   // definition: most inputs of one pass of the vectors kernels
constexpr int kTileVectors = 4;  // definition: most vectors of a tile of the batch kernel
constexpr int kMaxLanes = 16;    // hardware: lanes of the widest vector
constexpr int kWorkFloats = kBlockRows * kTileVectors * kMaxLanes;

struct SparseKernels {
  int lanes;  // floats of a vector
  // y[v * y_step + row] = A x[v] for `vectors` <= kMaxVectors inputs and the blocks [first, last). Each x holds
  // across * kCellColumns numbers.
  void (*vectors)(const SparseCells<float>& a, const float* x, int64_t x_step, int vectors, float* y, int64_t y_step,
                  const SparseEpilogue& epilogue, int64_t first, int64_t last);
  // to[channel * step + lane] = lanes[lane][channel]
  void (*gather)(const float* const* lanes, int64_t channels, float* to, int64_t step);
  // work (kBlockRows, kTileVectors * lanes) = bias + one block of rows times the first `vectors` vectors of a tile. The
  // vectors of a column are contiguous at x + offset[column].
  void (*block)(const SparseCells<float>& a, int64_t block, const int32_t* offset, const float* x, int vectors,
                const float* bias, float* work);
  // y[pixel[b] * y_pitch + row] = act(work[row][b] + residual[pixel[b] * residual_pitch + row]), where pixel[b] is not
  // negative; residual may be null.
  void (*scatter)(const float* work, int rows, int vectors, const int64_t* pixel, const float* residual,
                  int64_t residual_pitch, ConvActivation activation, float* y, int64_t y_pitch);
  // Returns whether a matrix with rows `pitch` floats apart has neither infinities nor NaN.
  bool (*finite)(const float* x, int64_t pitch, int64_t rows, int64_t columns);
};

TW_TABLE(SparseKernels, sparse)

}  // namespace tw
