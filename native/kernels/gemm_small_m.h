// Products with a few rows of C and contiguous rows of B. All rows are kept in registers for as many columns as fit, so
// that each element of B is read once, in runs as long as the registers allow, and C is written once. A product with a
// few columns is computed by the same loop as the transposed product, whose rows are interleaved when they are stored.
#pragma once

#include "kernels/gemm.h"
#include "kernels/gemm_micro.h"
#include "kernels/gemm_pack.h"

namespace tw {
namespace TW_ISA {

// kSmallMVectors[m]: the vectors of columns that fit the registers for m rows, with one vector of B and m elements of
// A (or one element of A and the vectors of B, whichever are fewer).
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kSmallMVectors[kMaxSmallM + 1] = {0, 8, 12, 8, 6, 5, 4, 3, 3};
#else
constexpr int kSmallMVectors[kMaxSmallM + 1] = {0, 8, 5, 3, 2, 2, 1, 1, 1};
#endif
constexpr int kMaxSmallMVectors = 12;  // definition: the largest of them

// Computes M rows by V vectors of columns starting at `col`; the last vector has `lanes` columns.
template <int M, int V, bool Whole>
TW_INLINE void small_m_product(const Gemm& g, int64_t col, int lanes, vf (&acc)[M][V]) {
  const float* a = g.a;
  const float* b = g.b + col;
  const int64_t a_row = g.a_row, a_col = g.a_col, b_row = g.b_row;
  const float* ahead = g.k > kRowsAhead ? b + kRowsAhead * b_row : b + V * kLanes;
#pragma GCC unroll 1
  for (int64_t p = g.k; p > 0; --p, a += a_col, b += b_row) {
    if (p == kRowsAhead) ahead = g.b + col + V * kLanes;
#pragma GCC unroll 12
    for (int j = 0; j < V; ++j) __builtin_prefetch(ahead + j * kLanes);
    ahead += b_row;
    vf scale[M];
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) scale[i] = splat(a[i * a_row]);
#pragma GCC unroll 12
    for (int j = 0; j < V; ++j) {
      const vf v = Whole || j < V - 1 ? load_once(b + j * kLanes) : load_first(b + j * kLanes, lanes);
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) acc[i][j] += scale[i] * v;
    }
  }
}

// Computes a strip of V vectors of columns and stores it row by row.
template <int M, int V>
void small_m_strip(const Gemm& g, int64_t col, int lanes) {
  vf acc[M][V] = {};
  lanes == kLanes ? small_m_product<M, V, true>(g, col, lanes, acc) : small_m_product<M, V, false>(g, col, lanes, acc);
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) {
    float* to = g.c + i * g.c_row + col;
#pragma GCC unroll 12
    for (int j = 0; j < V - 1; ++j) store(to + j * kLanes, acc[i][j]);
    store_first(to + (V - 1) * kLanes, acc[i][V - 1], lanes);
  }
}

// Stores the transposed result: element (i, j) of this product goes to c[j * M + i].
template <int M, int V>
void small_m_strip_interleaved(const Gemm& g, int64_t col, int lanes) {
  vf acc[M][V] = {};
  lanes == kLanes ? small_m_product<M, V, true>(g, col, lanes, acc) : small_m_product<M, V, false>(g, col, lanes, acc);
#pragma GCC unroll 12
  for (int j = 0; j < V; ++j) {
    vf column[M];
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) column[i] = acc[i][j];
    store_interleaved<M>(column, g.c + (col + j * kLanes) * M, j < V - 1 ? kLanes : lanes);
  }
}

using SmallMStrip = void (*)(const Gemm&, int64_t, int);

// Only the sizes in use are compiled. One row has other kernels (gemv.h).

// Returns the kernel for M rows and V vectors, or null if its accumulators do not fit into the registers.
template <int M, int V, bool Interleaved>
constexpr SmallMStrip strip_or_null() {
  if constexpr (V <= kSmallMVectors[M] && Interleaved && M > 1) {
    return small_m_strip_interleaved<M, V>;
  } else if constexpr (V <= kSmallMVectors[M] && !Interleaved && M > 1 && M <= kMostSmallRows) {
    return small_m_strip<M, V>;
  } else {
    return nullptr;
  }
}

// The strips of 1 to kMaxSmallMVectors vectors for M rows, plain or interleaved (I).
#define TW_SMALL_M_ROW(M, I)                                                                                 \
  {strip_or_null<M, 1, I>(), strip_or_null<M, 2, I>(),  strip_or_null<M, 3, I>(),  strip_or_null<M, 4, I>(), \
   strip_or_null<M, 5, I>(), strip_or_null<M, 6, I>(),  strip_or_null<M, 7, I>(),  strip_or_null<M, 8, I>(), \
   strip_or_null<M, 9, I>(), strip_or_null<M, 10, I>(), strip_or_null<M, 11, I>(), strip_or_null<M, 12, I>()}
#define TW_SMALL_M_TABLE(I)                                                                \
  {TW_SMALL_M_ROW(1, I), TW_SMALL_M_ROW(2, I), TW_SMALL_M_ROW(3, I), TW_SMALL_M_ROW(4, I), \
   TW_SMALL_M_ROW(5, I), TW_SMALL_M_ROW(6, I), TW_SMALL_M_ROW(7, I), TW_SMALL_M_ROW(8, I)}
constexpr SmallMStrip kSmallMStrips[2][kMaxSmallM][kMaxSmallMVectors] = {TW_SMALL_M_TABLE(false),
                                                                         TW_SMALL_M_TABLE(true)};

// Splits columns into strips of about equal width: a narrow last strip would be bound by latency.
inline void small_m_product(const Gemm& g, bool interleaved) {
  const SmallMStrip* const strips = kSmallMStrips[interleaved][g.m - 1];
  const int64_t vectors = (g.n + kLanes - 1) / kLanes, most = kSmallMVectors[g.m];
  const int64_t strip_count = (vectors + most - 1) / most, base = vectors / strip_count, wider = vectors % strip_count;
  int64_t col = 0;
  for (int64_t part = 0; part < strip_count; ++part) {
    const int width = static_cast<int>(base + (part < wider));
    const int64_t remaining = g.n - col - (width - 1) * kLanes;
    strips[width - 1](g, col, remaining < kLanes ? static_cast<int>(remaining) : kLanes);
    col += width * kLanes;
  }
}

// Computes M rows by at most one vector of columns, with U independent sums over k that hide the latency of additions.
// Special: at most half a vector, where that is faster (gemm_micro.h).
template <int M, int U, bool Special>
void small_mn_tile(const Gemm& g) {
  using Last = LastVector<Special>;
  const float* a = g.a;
  const float* b = g.b;
  const int lanes = static_cast<int>(g.n);
  const int64_t a_row = g.a_row, a_col = g.a_col, b_row = g.b_row;
  typename Last::type acc[U][M] = {};
  int64_t p = 0;
  for (; p + U <= g.k; p += U) {
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u, a += a_col, b += b_row) {
      const auto v = Last::load_b(b, lanes);
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) acc[u][i] += Last::broadcast_from(a + i * a_row) * v;
    }
  }
  for (; p < g.k; ++p, a += a_col, b += b_row) {
    const auto v = Last::load_b(b, lanes);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) acc[0][i] += Last::broadcast_from(a + i * a_row) * v;
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) {
    typename Last::type sum = acc[0][i];
#pragma GCC unroll 8
    for (int u = 1; u < U; ++u) sum += acc[u][i];
    Last::add_to(g.c + i * g.c_row, sum, lanes, false);
  }
}

using SmallMnTile = void (*)(const Gemm&);
#define TW_SMALL_MN_TILES(Special)                                                           \
  {small_mn_tile<1, 8, Special>, small_mn_tile<2, 4, Special>, small_mn_tile<3, 4, Special>, \
   small_mn_tile<4, 2, Special>, small_mn_tile<5, 2, Special>, small_mn_tile<6, 2, Special>, \
   small_mn_tile<7, 2, Special>, small_mn_tile<8, 1, Special>}
constexpr SmallMnTile kSmallMnTiles[2][kMaxSmallM] = {TW_SMALL_MN_TILES(false), TW_SMALL_MN_TILES(true)};

inline void small_mn_product(const Gemm& g) { kSmallMnTiles[wants_special(static_cast<int>(g.n), false)][g.m - 1](g); }

}  // namespace TW_ISA
}  // namespace tw
