// Sparse matrix (the weights of a linear layer) times a few dense vectors or a batch of them.
//
// Storage. Rows are taken in bands of 16, columns in chunks of 64. For one band and chunk every row gets the same number
// of slots; a slot of the band is 16 column numbers (a byte each, within the chunk) and 16 values, one per row. What a
// row has beyond its slots goes to its overflow list, and rows with less are padded with zeros; the number of slots is
// chosen per chunk so that the bytes are fewest. So the kernels meet no branch per element: for one vector a slot is a
// permute of the 64 inputs and one multiply-add for 16 rows; for a batch it is 16 broadcast multiply-adds
// on activations that stay in the first-level cache.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace tw {

constexpr int kBand = 16;    // rows that share their slots
constexpr int kChunk = 64;   // columns addressed by one byte-sized number, and held in four AVX-512 registers
constexpr int kSlotBytes = kBand * (1 + 4);

struct SparseMatrix {
  int64_t rows = 0, columns = 0;
  const uint8_t* slots = nullptr;   // slots per (band, chunk)
  const uint8_t* stream = nullptr;  // per (band, chunk): all column numbers, then all values
  const int64_t* band_start = nullptr;      // byte offset of a band in the stream; bands + 1 entries
  const int64_t* overflow_start = nullptr;  // first overflow entry of a row; rows + 1 entries
  const uint32_t* overflow_column = nullptr;
  const float* overflow_value = nullptr;
};

struct SparseEpilogue {
  const float* bias = nullptr;
  bool relu = false;
};

inline int64_t sparse_bands(int64_t rows) { return (rows + kBand - 1) / kBand; }
inline int64_t sparse_chunks(int64_t columns) { return (columns + kChunk - 1) / kChunk; }

constexpr int kMaxVectors = 4;    // of one pass of the vectors kernel
constexpr int kBatchBlock = 64;   // inputs that one pass of the batch kernel takes

constexpr int kBandBlock = 4;      // bands that take their turn on a chunk of the activations while it is in the cache
constexpr int kWorkFloats = kBandBlock * kBand * kBatchBlock;

struct SparseKernels {
  // y[v * y_step + row] = A x[v] for `vectors` <= kMaxVectors inputs and the bands [first, last). Each x is padded with
  // zeros to whole chunks.
  void (*vectors)(const SparseMatrix& a, const float* x, int64_t x_step, int vectors, float* y, int64_t y_step,
                  const SparseEpilogue& epilogue, int64_t first, int64_t last);
  // xt (padded columns, batch) = x transposed, zeros where x has no row or column.
  void (*transpose)(const float* x, int64_t columns, int64_t padded_columns, int valid, int batch, float* xt);
  // The same product for `batch` inputs given transposed; batch is 16, 32 or 64. `work` holds kWorkFloats;
  // the result is written to y[b * y_step + row] for b < valid.
  void (*batch)(const SparseMatrix& a, const float* xt, int batch, int valid, float* work, float* y, int64_t y_step,
                const SparseEpilogue& epilogue, int64_t first, int64_t last);
};

TW_TABLE(SparseKernels, sparse)

}  // namespace tw
