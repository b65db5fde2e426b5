// Matrix x vector and its neighbours: each weight is used a handful of times, so memory decides and packing would only
// add traffic. Two shapes of loop cover all layouts: inner products where the operands run along k, and scaled rows
// where B's rows are contiguous. The order of each sum depends on the shape only, never on how the work was split.
#pragma once

#include "kernels/gemm.h"
#include "kernels/math.h"

namespace tw {
namespace TW_ISA {

// MR x NR inner products, one vector accumulator each.
template <int MR, int NR>
TW_INLINE void dot_tile(const float* a, int64_t a_row, const float* b, int64_t b_col, int64_t k, float* c, int64_t c_row) {
  vf acc[MR][NR] = {};
  int64_t p = 0;
  for (; p + kLanes <= k; p += kLanes) {
    vf bv[NR];
#pragma GCC unroll 4
    for (int j = 0; j < NR; ++j) bv[j] = load(b + j * b_col + p);
#pragma GCC unroll 4
    for (int i = 0; i < MR; ++i) {
      const vf av = load(a + i * a_row + p);
#pragma GCC unroll 4
      for (int j = 0; j < NR; ++j) acc[i][j] += av * bv[j];
    }
  }
  if (p < k) {
    const int lanes = static_cast<int>(k - p);
    vf bv[NR];
#pragma GCC unroll 4
    for (int j = 0; j < NR; ++j) bv[j] = load_first(b + j * b_col + p, lanes);
#pragma GCC unroll 4
    for (int i = 0; i < MR; ++i) {
      const vf av = load_first(a + i * a_row + p, lanes);
#pragma GCC unroll 4
      for (int j = 0; j < NR; ++j) acc[i][j] += av * bv[j];
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < NR; ++j) c[i * c_row + j] = sum_lanes(acc[i][j]);
  }
}

template <int MR>
void dot_rows(const Gemm& g, int64_t i) {
  const float* a = g.a + i * g.a_row;
  float* c = g.c + i * g.c_row;
  int64_t j = 0;
  for (; j + 4 <= g.n; j += 4) dot_tile<MR, 4>(a, g.a_row, g.b + j * g.b_col, g.b_col, g.k, c + j, g.c_row);
  for (; j < g.n; ++j) dot_tile<MR, 1>(a, g.a_row, g.b + j * g.b_col, g.b_col, g.k, c + j, g.c_row);
}

// One inner product with eight accumulators: as fast as memory delivers, one stream at a time.
TW_INLINE float dot_stream(const float* a, const float* b, int64_t k) {
  vf s0 = {}, s1 = {}, s2 = {}, s3 = {}, s4 = {}, s5 = {}, s6 = {}, s7 = {};
  int64_t p = 0;
  for (; p + 8 * kLanes <= k; p += 8 * kLanes) {
    s0 += load(a + p) * load(b + p);
    s1 += load(a + p + kLanes) * load(b + p + kLanes);
    s2 += load(a + p + 2 * kLanes) * load(b + p + 2 * kLanes);
    s3 += load(a + p + 3 * kLanes) * load(b + p + 3 * kLanes);
    s4 += load(a + p + 4 * kLanes) * load(b + p + 4 * kLanes);
    s5 += load(a + p + 5 * kLanes) * load(b + p + 5 * kLanes);
    s6 += load(a + p + 6 * kLanes) * load(b + p + 6 * kLanes);
    s7 += load(a + p + 7 * kLanes) * load(b + p + 7 * kLanes);
  }
  for (; p < k; p += kLanes) {
    const int lanes = k - p < kLanes ? static_cast<int>(k - p) : kLanes;
    s0 += load_first(a + p, lanes) * load_first(b + p, lanes);
  }
  return sum_lanes(((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7)));
}

inline void dots_plain(const Gemm& g, bool stream) {
  if (stream && g.n == 1) {  // A is the large matrix
    for (int64_t i = 0; i < g.m; ++i) g.c[i * g.c_row] = dot_stream(g.b, g.a + i * g.a_row, g.k);
    return;
  }
  if (stream) {
    for (int64_t j = 0; j < g.n; ++j) {
      for (int64_t i = 0; i < g.m; ++i) {
        g.c[i * g.c_row + j] = dot_stream(g.a + i * g.a_row, g.b + j * g.b_col, g.k);
      }
    }
    return;
  }
  int64_t i = 0;
  for (; i + 4 <= g.m; i += 4) dot_rows<4>(g, i);
  switch (g.m - i) {
    case 3: return dot_rows<3>(g, i);
    case 2: return dot_rows<2>(g, i);
    case 1: return dot_rows<1>(g, i);
    default: return;
  }
}

// c[0:n] (+)= sum of R scaled rows of B.
template <int R, bool First>
TW_INLINE void add_rows(const float* a, int64_t a_col, const float* b, int64_t b_row, float* c, int64_t n) {
  vf s[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) s[r] = splat(a[r * a_col]);
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    vf v = First ? vf{} : load(c + j);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) v += s[r] * load(b + r * b_row + j);
    store(c + j, v);
  }
  if (j < n) {
    const int lanes = static_cast<int>(n - j);
    vf v = First ? vf{} : load_first(c + j, lanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) v += s[r] * load_first(b + r * b_row + j, lanes);
    store_first(c + j, v, lanes);
  }
}

constexpr int kRowsAtOnce = 4;

inline void scaled_rows(const Gemm& g) {
  const int64_t whole = g.k / kRowsAtOnce * kRowsAtOnce;
  for (int64_t p = 0; p < whole; p += kRowsAtOnce) {
    const float* a = g.a + p * g.a_col;
    const float* b = g.b + p * g.b_row;
    if (p == 0) {
      add_rows<kRowsAtOnce, true>(a, g.a_col, b, g.b_row, g.c, g.n);
    } else {
      add_rows<kRowsAtOnce, false>(a, g.a_col, b, g.b_row, g.c, g.n);
    }
  }
  for (int64_t p = whole; p < g.k; ++p) {
    if (p == 0) {
      add_rows<1, true>(g.a, 0, g.b, 0, g.c, g.n);
    } else {
      add_rows<1, false>(g.a + p * g.a_col, 0, g.b + p * g.b_row, 0, g.c, g.n);
    }
  }
}

}  // namespace TW_ISA
}  // namespace tw
