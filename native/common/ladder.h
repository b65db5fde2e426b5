// The lower rungs of the teaching ladder: the same matrix product, each with one idea more than the one before. Plain
// scalar C++, compiled without vectorization, so that a rung gains by its own idea and nothing else. The rungs above,
// vector instructions and threads, are the real kernels (kernels/gemm.h).
#pragma once

#include <cstdint>

namespace tw {

// C (m x n) = A (m x k) * B (k x n), all row-major and contiguous; c need not be cleared.
void ladder_naive(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k);
void ladder_reordered(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k);
void ladder_blocked(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k, int64_t block_m,
                    int64_t block_n, int64_t block_k);
void ladder_packed(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k);

}  // namespace tw
