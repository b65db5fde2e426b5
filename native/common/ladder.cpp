#include "common/ladder.h"

#include <algorithm>
#include <cstring>

#include "common/alloc.h"

namespace tw {

// Rung 1: the definition. The inner loop walks down a column of B, a new cache line every step.
void ladder_naive(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k) {
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      float sum = 0.0f;
      for (int64_t p = 0; p < k; ++p) sum += a[i * k + p] * b[p * n + j];
      c[i * n + j] = sum;
    }
  }
}

// Rung 2: the same loops in another order. The inner loop walks along rows of B and C: every byte of a line is used.
void ladder_reordered(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k) {
  std::memset(c, 0, sizeof(float) * m * n);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t p = 0; p < k; ++p) {
      const float scale = a[i * k + p];
      for (int64_t j = 0; j < n; ++j) c[i * n + j] += scale * b[p * n + j];
    }
  }
}

// Rung 3: a block of B is used for many rows of A before it leaves the cache.
void ladder_blocked(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k, int64_t block_m,
                    int64_t block_n, int64_t block_k) {
  std::memset(c, 0, sizeof(float) * m * n);
  for (int64_t i0 = 0; i0 < m; i0 += block_m) {
    const int64_t i1 = std::min(m, i0 + block_m);
    for (int64_t p0 = 0; p0 < k; p0 += block_k) {
      const int64_t p1 = std::min(k, p0 + block_k);
      for (int64_t j0 = 0; j0 < n; j0 += block_n) {
        const int64_t j1 = std::min(n, j0 + block_n);
        for (int64_t i = i0; i < i1; ++i) {
          for (int64_t p = p0; p < p1; ++p) {
            const float scale = a[i * k + p];
            for (int64_t j = j0; j < j1; ++j) c[i * n + j] += scale * b[p * n + j];
          }
        }
      }
    }
  }
}

namespace {

constexpr int64_t kRows = 4, kColumns = 3;  // definition: register tile; 12 sums and their operands fit 16 registers
constexpr int64_t kDepth = 256;             // chosen: values of k of a packed block

// Copies strips of `width` rows of A (columns of B) to [k][width], zero-padded: the order in which the register tile
// reads them.
void pack(const float* from, int64_t step_along, int64_t step_depth, int64_t count, int64_t depth, int64_t width,
          float* to) {
  for (int64_t start = 0; start < count; start += width) {
    for (int64_t p = 0; p < depth; ++p) {
      for (int64_t w = 0; w < width; ++w) {
        *to++ = start + w < count ? from[(start + w) * step_along + p * step_depth] : 0.0f;
      }
    }
  }
}

// Adds the product of one strip of A and one of B to a tile of C, with all sums in registers.
void register_tile(const float* a, const float* b, int64_t depth, float* c, int64_t n, int64_t rows, int64_t columns) {
  float sum[kRows][kColumns] = {};
  for (int64_t p = 0; p < depth; ++p, a += kRows, b += kColumns) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int64_t j = 0; j < kColumns; ++j) sum[i][j] += a[i] * b[j];
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) c[i * n + j] += sum[i][j];
  }
}

}  // namespace

// Rung 4: blocks are copied into the order in which they are read, and a small tile of C stays in registers.
void ladder_packed(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k) {
  std::memset(c, 0, sizeof(float) * m * n);
  const int64_t padded_m = (m + kRows - 1) / kRows * kRows, padded_n = (n + kColumns - 1) / kColumns * kColumns;
  Buffer<float> packed_a(padded_m * kDepth), packed_b(padded_n * kDepth);
  for (int64_t p = 0; p < k; p += kDepth) {
    const int64_t depth = std::min(kDepth, k - p);
    pack(a + p, k, 1, m, depth, kRows, packed_a.data());
    pack(b + p * n, 1, n, n, depth, kColumns, packed_b.data());
    for (int64_t j = 0; j < n; j += kColumns) {
      for (int64_t i = 0; i < m; i += kRows) {
        register_tile(packed_a.data() + i * depth, packed_b.data() + j * depth, depth, c + i * n + j, n,
                      std::min(kRows, m - i), std::min(kColumns, n - j));
      }
    }
  }
}

}  // namespace tw
