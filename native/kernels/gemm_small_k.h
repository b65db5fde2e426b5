// Products with a small k: nearly all the time is spent reading A and writing C. If C is at least one vector wide, the
// rows of B are held in registers while the rows of A are streamed. If it is narrower, a vector of rows of A is
// transposed in registers, so that every lane computes one row.
#pragma once

#include "common/machine.h"
#include "kernels/gemm.h"
#include "kernels/gemm_pack.h"

namespace tw {
namespace TW_ISA {

constexpr int kShortMost = kShortestSum;  // largest k
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kShortHeld = 24;  // definition: vectors of B in registers
#else
constexpr int kShortHeld = 12;  // definition: as above
#endif
constexpr int kShortVectorsMost = 4;  // chosen: vectors of columns of the widest strip
// The vectors of columns of a strip for this k.
constexpr int short_vectors(int k) {
  return kShortHeld / k < 1 ? 1 : kShortHeld / k < kShortVectorsMost ? kShortHeld / k : kShortVectorsMost;
}
constexpr int64_t kShortBlockFloats = kSmallestL1 / 4;  // floats of C written before the next strip of columns

// Computes rows [row, end) of V vectors of columns starting at `col`; the last vector has `lanes` columns.
template <int K, int V, bool Whole>
void short_strip(const Gemm& g, int64_t row, int64_t end, int64_t col, int lanes) {
  vf b[K][V];
#pragma GCC unroll 12
  for (int p = 0; p < K; ++p) {
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) {
      const float* at = g.b + p * g.b_row + col + j * kLanes;
      b[p][j] = j < V - 1 ? load_once(at) : load_first(at, lanes);
    }
  }
  const int64_t a_row = g.a_row, a_col = g.a_col, c_row = g.c_row;
  const float* a = g.a + row * a_row;
  float* c = g.c + row * c_row + col;
#pragma GCC unroll 4
  for (int64_t i = row; i < end; ++i, a += a_row, c += c_row) {
    vf acc[V] = {};
#pragma GCC unroll 12
    for (int p = 0; p < K; ++p) {
      const vf scale = splat(a[p * a_col]);
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) acc[j] += scale * b[p][j];
    }
#pragma GCC unroll 4
    for (int j = 0; j < V - 1; ++j) store(c + j * kLanes, acc[j]);
    Whole ? store(c + (V - 1) * kLanes, acc[V - 1]) : store_first(c + (V - 1) * kLanes, acc[V - 1], lanes);
  }
}

using ShortStrip = void (*)(const Gemm&, int64_t, int64_t, int64_t, int);

template <int K, int V, bool Whole>
constexpr ShortStrip short_or_null() {
  if constexpr (V <= short_vectors(K)) {
    return short_strip<K, V, Whole>;
  } else {
    return nullptr;
  }
}

#define TW_SHORT(K)                                                                            \
  {                                                                                            \
    {short_or_null<K, 1, false>(), short_or_null<K, 2, false>(), short_or_null<K, 3, false>(), \
     short_or_null<K, 4, false>()},                                                            \
    {                                                                                          \
      short_or_null<K, 1, true>(), short_or_null<K, 2, true>(), short_or_null<K, 3, true>(),   \
          short_or_null<K, 4, true>()                                                          \
    }                                                                                          \
  }
constexpr ShortStrip kShortStrips[kShortMost][2][kShortVectorsMost] = {
    TW_SHORT(1), TW_SHORT(2), TW_SHORT(3), TW_SHORT(4),  TW_SHORT(5),  TW_SHORT(6),
    TW_SHORT(7), TW_SHORT(8), TW_SHORT(9), TW_SHORT(10), TW_SHORT(11), TW_SHORT(12)};

// k up to kShortMost, contiguous rows of B. A block of rows of C stays in L1 while all strips of columns are computed.
inline void small_k_product(const Gemm& g) {
  const int64_t vectors = (g.n + kLanes - 1) / kLanes, most = short_vectors(static_cast<int>(g.k));
  const int64_t strip_count = (vectors + most - 1) / most, base = vectors / strip_count, wider = vectors % strip_count;
  const int64_t fit = kShortBlockFloats / g.n / 4 * 4, block = fit < 8 ? 8 : fit;
  for (int64_t row = 0; row < g.m; row += block) {
    const int64_t end = row + block < g.m ? row + block : g.m;
    int64_t col = 0;
    for (int64_t part = 0; part < strip_count; ++part) {
      const int width = static_cast<int>(base + (part < wider));
      const int64_t remaining = g.n - col - (width - 1) * kLanes;
      const bool whole = remaining >= kLanes;
      kShortStrips[g.k - 1][whole][width - 1](g, row, end, col, whole ? kLanes : static_cast<int>(remaining));
      col += width * kLanes;
    }
  }
}

// Loads four consecutive elements of each of kLanes / 4 rows, `row` floats apart; `count` of the four are read.
constexpr int kQuads = kLanes / 4;
#if defined(__AVX512F__)
TW_INLINE __m128 load_quad(const float* p, int count) {
  return count == 4 ? _mm_loadu_ps(p) : _mm_maskz_loadu_ps(static_cast<__mmask8>((1u << count) - 1u), p);
}
TW_INLINE vf quads_of_rows(const float* p, int64_t row, int count) {
  __m512 v = _mm512_zextps128_ps512(load_quad(p, count));
  v = _mm512_mask_broadcast_f32x4(v, 0x00f0, load_quad(p + row, count));
  v = _mm512_mask_broadcast_f32x4(v, 0x0f00, load_quad(p + 2 * row, count));
  return (vf)_mm512_mask_broadcast_f32x4(v, 0xf000, load_quad(p + 3 * row, count));
}
TW_INLINE vf every_quad(const float* p) { return (vf)_mm512_maskz_broadcast_f32x4(0xffff, _mm_loadu_ps(p)); }
#elif defined(__AVX2__)
TW_INLINE __m128 load_quad(const float* p, int count) {
  return count == 4 ? _mm_loadu_ps(p) : _mm256_castps256_ps128((__m256)load_first(p, count));
}
TW_INLINE vf quads_of_rows(const float* p, int64_t row, int count) {
  const __m256 v = _mm256_castps128_ps256(load_quad(p, count));
  return (vf)_mm256_insertf128_ps(v, load_quad(p + row, count), 1);
}
TW_INLINE vf every_quad(const float* p) { return (vf)_mm256_broadcast_ps(reinterpret_cast<const __m128*>(p)); }
#else
TW_INLINE vf quads_of_rows(const float* p, int64_t, int count) { return count == 4 ? load(p) : load_first(p, count); }
TW_INLINE vf every_quad(const float* p) { return load(p); }
#endif

// Broadcasts lane `At` of each group of four within its group.
template <int At>
TW_INLINE vf broadcast_lane(vf v) {
  vi index = {};
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) index[i] = i / 4 * 4 + At;
  return __builtin_shuffle(v, index);
}

// Adds one step of k: element `At` of each row times row `At` of B, which every group of four lanes holds.
template <int At, int V>
TW_INLINE void quad_step(const vf (&a)[V], const float* b, vf (&acc)[V]) {
  const vf row = every_quad(b + At * 4);
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) acc[v] += broadcast_lane<At>(a[v]) * row;
}

// Multiplies V independent vectors of rows, which hide the latency of additions, by N columns; b is k x 4.
template <int N, int V>
TW_INLINE void quad_rows(const Gemm& g, const float* from, int64_t from_row, float* to, int lanes) {
  const float* a_at[V];
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) a_at[v] = from + v * kQuads * from_row;
  vf acc[V] = {}, a[V];
  const float* b = g.b;
  int64_t p = 0;
  for (; p + 4 <= g.k; p += 4, b += 16) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) a[v] = quads_of_rows(a_at[v] + p, from_row, 4);
    quad_step<0>(a, b, acc);
    quad_step<1>(a, b, acc);
    quad_step<2>(a, b, acc);
    quad_step<3>(a, b, acc);
  }
  if (const int remainder = static_cast<int>(g.k - p)) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) a[v] = quads_of_rows(a_at[v] + p, from_row, remainder);
    quad_step<0>(a, b, acc);
    if (remainder > 1) quad_step<1>(a, b, acc);
    if (remainder > 2) quad_step<2>(a, b, acc);
  }
  vi closed = {};
#pragma GCC unroll 16
  for (int i = 0; i < kQuads * N; ++i) closed[i] = i / N * 4 + i % N;
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    store_first(to + v * kQuads * N, N == 4 ? acc[v] : __builtin_shuffle(acc[v], closed), lanes);
  }
}

// Computes N columns for all rows. A remaining row fills a vector by itself: all its quads are that row, and one is
// stored.
template <int N>
void quad_columns(const Gemm& g) {
  int64_t row = 0;
  for (; row + 4 * kQuads <= g.m; row += 4 * kQuads) {
    quad_rows<N, 4>(g, g.a + row * g.a_row, g.a_row, g.c + row * N, kQuads * N);
  }
  for (; row + kQuads <= g.m; row += kQuads) {
    quad_rows<N, 1>(g, g.a + row * g.a_row, g.a_row, g.c + row * N, kQuads * N);
  }
  for (; row < g.m; ++row) quad_rows<N, 1>(g, g.a + row * g.a_row, 0, g.c + row * N, N);
}

// Computes up to four columns: rows of A contiguous, B k x 4 with zeros past the last column, C without gaps between
// its rows.
inline void small_n_product(const Gemm& g) {
  switch (g.n) {
    case 1:
      return quad_columns<1>(g);
    case 2:
      return quad_columns<2>(g);
    case 3:
      return quad_columns<3>(g);
    default:
      return quad_columns<4>(g);
  }
}

// Multiplies rows of at most half a vector by one vector x, kLanes rows at a time: row i in the even lanes, row i +
// kLanes / 2 in the odd lanes. Interleaving two vectors and adding them then never mixes two rows and leaves the sums
// in order. Rows past the last repeat it and are not stored.
constexpr int kPairTerms = kLanes / 2;  // largest k

// Computes c[i], the dot product of row i of `rows` (`row` floats apart) and x, for i < count, kLanes rows at a time.
inline void short_dot_products_vectorized(const float* rows, int64_t row, const float* x, int k, int64_t count,
                                          float* c) {
  const vf half = load_first(x, k), both = zip_low(half, half);
  for (int64_t first = 0; first < count; first += kLanes, rows += kLanes * row) {
    const int lanes = count - first < kLanes ? static_cast<int>(count - first) : kLanes;
    vf v[kPairTerms];
#pragma GCC unroll 8
    for (int i = 0; i < kPairTerms; ++i) {
      const int upper = i < lanes ? i : lanes - 1, lower = i + kPairTerms < lanes ? i + kPairTerms : lanes - 1;
      v[i] = zip_low(load_first(rows + upper * row, k), load_first(rows + lower * row, k)) * both;
    }
#pragma GCC unroll 4
    for (int remaining = kPairTerms / 2; remaining > 0; remaining /= 2) {
#pragma GCC unroll 4
      for (int i = 0; i < remaining; ++i) v[i] = zip_low(v[i], v[i + remaining]) + zip_high(v[i], v[i + remaining]);
    }
    store_first(c + first, v[0], lanes);
  }
}

// Multiplies contiguous rows of two terms by one vector x: the even and the odd lanes of two vectors.
inline void paired_dot_products(const float* rows, const float* x, int64_t count, float* c) {
  vi even = {}, odd = {};
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    even[i] = 2 * i;
    odd[i] = 2 * i + 1;
  }
  const vf first = splat(x[0]), second = splat(x[1]);
  for (int64_t i = 0; i < count; i += kLanes, rows += 2 * kLanes) {
    const int lanes = count - i < kLanes ? static_cast<int>(count - i) : kLanes;
    const vf upper = load_first(rows, 2 * lanes < kLanes ? 2 * lanes : kLanes);
    const vf lower = load_first(rows + kLanes, 2 * lanes < kLanes ? 0 : 2 * lanes - kLanes);
    vf sum = __builtin_shuffle(upper, lower, even) * first;
    sum += __builtin_shuffle(upper, lower, odd) * second;
    store_first(c + i, sum, lanes);
  }
}

}  // namespace TW_ISA
}  // namespace tw
