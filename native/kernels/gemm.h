// Single-precision matrix multiplication: the kernels of one instruction set. Everything here runs on the calling
// thread and allocates nothing; common/matmul.h chooses the path and the tile, splits the work and hands out
// workspaces.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace tw {

enum class Activation { none = 0, relu = 1, gelu = 2, gelu_tanh = 3 };

// The epilogue of an element: + bias[column], + residual[row, column], then the activation.
struct Epilogue {
  const float* bias = nullptr;
  const float* residual = nullptr;
  int64_t residual_row = 0;
  Activation activation = Activation::none;
  bool any() const { return bias != nullptr || residual != nullptr || activation != Activation::none; }
};

// C (m x n, rows c_row apart) = epilogue(A (m x k) * B (k x n)). Strides are in elements, may be zero or negative.
struct Gemm {
  int64_t m = 0, n = 0, k = 0;
  const float* a = nullptr;
  int64_t a_row = 0, a_col = 0;
  const float* b = nullptr;
  int64_t b_row = 0, b_col = 0;
  float* c = nullptr;
  int64_t c_row = 0;
  Epilogue epilogue;
  bool stream_b = false;  // B is one of many matrices that are read in sequence: no cache will hold it
  bool large_pages_b = true;
};

// Loop blocking. mr x nr is the register tile; mc, kc, nc are the cache blocks (balanced: about equal, none larger);
// threads_m x threads_n is the thread grid over C.
struct GemmTile {
  int mr = 0, nr = 0;
  int64_t mc = 0, nc = 0, kc = 0;
  bool pack_a = true, pack_b = true;
  int threads_m = 1, threads_n = 1;
};

// A matrix B that was packed once for several tasks: the blocks of k one after another, each as a sequence of strips.
struct PackedB {
  const float* at = nullptr;  // null: `tiled` packs what it reads
  int64_t columns = 0;        // of the packed matrix, in whole strips
  int64_t first = 0;          // the first column of this product in it, a multiple of nr
};

constexpr int64_t kMaxSmallM = 8;     // definition: most rows or columns of the kernels for few rows and few columns
constexpr int64_t kShortestSum = 12;  // definition: most terms of the kernels for short sums
// The most rows of `small_m` and columns of `small_n`.
constexpr int64_t kMostSmallRows = 3, kMostSmallColumns = 4;  // definition

struct GemmKernels {
  int lanes;            // floats in a vector: nr is a multiple of it
  const int* max_rows;  // max_rows[v]: the tallest register tile of v vectors, v = 1 ... 4
  // Floats of workspace that `tiled` needs.
  int64_t (*workspace)(int64_t m, int64_t n, int64_t k, const GemmTile& tile);
  // The blocked, packed multiplication. With pack_b = false the columns of B must have unit stride.
  void (*tiled)(const Gemm& g, const GemmTile& tile, const PackedB& b, float* workspace);
  // Packs columns col ... col + cols - 1 of B (col a multiple of nr) for `tiled`: `to` holds k floats for each of g.n
  // columns, rounded up to whole strips.
  void (*pack_b)(const Gemm& g, const GemmTile& tile, int64_t col, int64_t cols, float* to);
  // Inner products: the rows of A and the columns of B have unit stride along k. Best when m or n is small.
  void (*dot_products)(const Gemm& g, bool from_memory);
  // One row of A (streamed: up to four), rows of B of unit stride: c = sum over p of a[p] * B[p, :].
  void (*row_by_matrix)(const Gemm& g, bool streamed);
  // Two or three rows of A, rows of B of unit stride. Interleaved: two to kMaxSmallM rows, C is written transposed,
  // without gaps (element (i, j) to c[j * m + i]), and the epilogue is left to the caller.
  void (*small_m)(const Gemm& g, bool interleaved);
  // Up to kMaxSmallM rows and at most a vector of columns, rows of B of unit stride; the sums are long.
  void (*small_mn)(const Gemm& g);
  // Sums of up to kShortestSum terms, rows of B of unit stride.
  void (*small_k)(const Gemm& g);
  // Up to four columns: rows of A of unit stride, B k x 4 with zeros past the last column, no gaps between the rows of
  // C.
  void (*small_n)(const Gemm& g);
  // to (cols x rows, rows to_row apart) = from (rows x cols, rows from_row apart), transposed.
  void (*transpose)(const float* from, int64_t rows, int64_t cols, int64_t from_row, float* to, int64_t to_row);
  void (*apply_epilogue)(const Epilogue& e, float* c, int64_t c_row, int64_t row, int64_t col, int64_t rows,
                         int64_t cols);
};

TW_TABLE(GemmKernels, gemm)

}  // namespace tw
