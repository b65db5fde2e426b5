// Single-precision matrix multiplication (GEMM): the kernels of one instruction set. They run on the calling thread and
// allocate no memory; common/matmul.h chooses the kernel and the tile, splits the work among threads and provides
// workspaces.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace tw {

enum class Activation { none = 0, relu = 1, gelu = 2, gelu_tanh = 3 };

// The epilogue of a product: act(C[row, column] + bias[column] + residual[row, column]), each part optional.
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
  bool stream_b = false;  // B is one of many matrices read in sequence (a network's weights): it is never in a cache
  bool large_pages_b = true;  // B is stored in pages of 2 MiB
};

// Loop blocking, in the terms of Goto and van de Geijn (2008). mr x nr is the register tile. mc, kc, nc are the cache
// blocks; they are balanced: about equal, none larger than this. threads_m x threads_n is the thread grid over C.
struct GemmTile {
  int mr = 0, nr = 0;
  int64_t mc = 0, nc = 0, kc = 0;
  bool pack_a = true, pack_b = true;
  int threads_m = 1, threads_n = 1;
};

// A matrix B packed once for several tasks: blocks of k one after another, each a sequence of strips of nr columns.
struct PackedB {
  const float* at = nullptr;  // null: `tiled` packs the strips that it reads
  int64_t columns = 0;        // columns of the packed matrix, rounded up to whole strips
  int64_t first = 0;          // the first column of this product in it, a multiple of nr
};

constexpr int64_t kMaxSmallM = 8;      // definition: most rows (or columns, interleaved) of `small_m` and of `small_mn`
constexpr int64_t kShortestSum = 12;   // definition: most terms of `small_k`: rows of B that AVX2's registers hold
constexpr int64_t kMostSmallRows = 3;  // chosen: most rows of `small_m`; with more, `tiled` is as fast
constexpr int64_t kMostSmallColumns = 4;  // definition: most columns of `small_n`: floats of 128 bits

// chosen: rows of the shorter operand of `dot_products` that repay copying the longer one (Zen 5, 2048 terms: 32 rows
// 0.99, 64 rows 1.06, 200 rows 1.13 of the speed without; AVX2 1.00)
constexpr int64_t kMinCopyRows = 64;

struct GemmKernels {
  int lanes;            // floats in a vector: nr is a multiple of it
  const int* max_rows;  // max_rows[v]: the tallest register tile of v vectors, v = 1 ... 4
  // The floats of workspace that `tiled` needs.
  int64_t (*workspace)(int64_t m, int64_t n, int64_t k, const GemmTile& tile);
  // The blocked, packed multiplication. With pack_b = false the columns of B must have unit stride.
  void (*tiled)(const Gemm& g, const GemmTile& tile, const PackedB& b, float* workspace);
  // Packs columns [col, col + cols) of B for `tiled`; col is a multiple of nr. `to` holds k floats for each of g.n
  // columns, rounded up to whole strips.
  void (*pack_b)(const Gemm& g, const GemmTile& tile, int64_t col, int64_t cols, float* to);
  // C as inner products: the rows of A and the columns of B are contiguous along k. Fastest if m or n is small.
  // `from_memory`: the longer operand is not in a cache, so its rows are prefetched. `copy` has `copy_floats` floats,
  // half of L2, and may be null if m or n is less than kMinCopyRows.
  void (*dot_products)(const Gemm& g, bool from_memory, float* copy, int64_t copy_floats);
  // One row of A, contiguous rows of B: c = sum over p of a[p] * B[p, :]. `streamed`: any number of rows of A; B is
  // read in whole rows.
  void (*row_by_matrix)(const Gemm& g, bool streamed);
  // Two or three rows of A, contiguous rows of B. `interleaved`: two to kMaxSmallM rows; C is written transposed
  // without gaps (element (i, j) to c[j * m + i]), and the caller applies the epilogue.
  void (*small_m)(const Gemm& g, bool interleaved);
  // Up to kMaxSmallM rows and at most one vector of columns, contiguous rows of B, large k.
  void (*small_mn)(const Gemm& g);
  // k up to kShortestSum, contiguous rows of B.
  void (*small_k)(const Gemm& g);
  // Up to kMostSmallColumns columns: contiguous rows of A; B is k x 4 with zeros past the last column; no gaps between
  // the rows of C.
  void (*small_n)(const Gemm& g);
  // to (cols x rows, rows to_row apart) = from (rows x cols, rows from_row apart), transposed.
  void (*transpose)(const float* from, int64_t rows, int64_t cols, int64_t from_row, float* to, int64_t to_row);
  void (*apply_epilogue)(const Epilogue& e, float* c, int64_t c_row, int64_t row, int64_t col, int64_t rows,
                         int64_t cols);
};

TW_TABLE(GemmKernels, gemm)

}  // namespace tw
