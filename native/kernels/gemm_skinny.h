// Matrix x vector and its neighbours: each weight is used a handful of times, so memory decides and packing would only
// add traffic. Two shapes of loop cover all layouts: inner products where both operands run along k, and scaled rows
// where B's rows are contiguous. The order of each sum depends on the shape only, never on how the work was split: an
// inner product has one accumulator and one order of adding its lanes whatever tile it is computed in.
#pragma once

#include "kernels/gemm.h"
#include "kernels/gemm_pack.h"

namespace tw {
namespace TW_ISA {

// The sums of the lanes of N vectors, N a power of two up to kLanes. Interleaving and adding two vectors halves their
// number and keeps every lane busy: the network that transposes, with an addition in every round. Adds in the order of
// sum_lanes.
template <int N>
TW_INLINE void sum_each(vf (&v)[N], float* out) {
#pragma GCC unroll 4
  for (int half = N / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) v[i] = zip_low(v[i], v[i + half]) + zip_high(v[i], v[i + half]);
  }
  float t[kLanes];
  store(t, v[0]);
#pragma GCC unroll 4
  for (int w = kLanes / 2; w >= N; w /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < w; ++i) t[i] += t[i + w];
  }
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) out[i] = t[i];
}

constexpr int at_most_lanes(int n) { return n < kLanes ? n : kLanes; }
constexpr int power_of_two_from(int n) { return n <= 1 ? 1 : n <= 2 ? 2 : n <= 4 ? 4 : n <= 8 ? 8 : 16; }

// Sums of any number of vectors, kLanes at a time.
template <int N>
TW_INLINE void sum_all(const vf* v, float* out) {
  constexpr int kGroup = at_most_lanes(power_of_two_from(N));
  float t[16];
#pragma GCC unroll 16
  for (int first = 0; first < N; first += kGroup) {
    vf g[kGroup];
#pragma GCC unroll 16
    for (int i = 0; i < kGroup; ++i) g[i] = first + i < N ? v[first + i] : vf{};
    sum_each<kGroup>(g, t);
#pragma GCC unroll 16
    for (int i = 0; i < kGroup; ++i) {
      if (first + i < N) out[first + i] = t[i];
    }
  }
}

// Accumulators and operands must fit the registers: 4 x 4 or 2 x 8 of thirty-two, 3 x 3 or 1 x 8 of sixteen.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kDotSide = 4, kDotPairs = 2;
#else
constexpr int kDotSide = 3, kDotPairs = 1;
#endif
constexpr int kDotStrip = 8;  // one or two vectors against this many rows of a matrix

struct DotArgs {
  const float* a;
  int64_t a_row;
  const float* b;
  int64_t b_col;
  int64_t k;
  float* c;
  int64_t c_row;
};

template <int MR, int NR>
TW_INLINE void dot_step(const DotArgs& d, int64_t p, int lanes, bool whole, vf (&acc)[MR * NR]) {
  vf bv[NR];
#pragma GCC unroll 16
  for (int j = 0; j < NR; ++j) bv[j] = whole ? load(d.b + j * d.b_col + p) : load_first(d.b + j * d.b_col + p, lanes);
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
    const float* a = d.a + i * d.a_row + p;
    const vf av = whole ? load(a) : load_first(a, lanes);
#pragma GCC unroll 16
    for (int j = 0; j < NR; ++j) acc[i * NR + j] += av * bv[j];
  }
}

// A vector against a strip of rows: fetch the rows of the next strip (they start on pages the hardware cannot guess).
template <int MR, int NR>
TW_INLINE void fetch_next_strip(const DotArgs& d, int64_t p) {
#pragma GCC unroll 8
  for (int j = 0; j < kDotStrip; ++j) {
    __builtin_prefetch((MR == 1 ? d.b + (NR + j) * d.b_col : d.a + (MR + j) * d.a_row) + p, 0, 1);
  }
}

// MR x NR inner products, one vector accumulator each.
template <int MR, int NR, bool Fetch = false>
void dot_tile(const DotArgs& d) {
  vf acc[MR * NR] = {};
  int64_t p = 0;
  for (; p + kLanes <= d.k; p += kLanes) {
    if (Fetch) fetch_next_strip<MR, NR>(d, p);
    dot_step<MR, NR>(d, p, kLanes, true, acc);
  }
  if (p < d.k) dot_step<MR, NR>(d, p, static_cast<int>(d.k - p), false, acc);
  float sums[MR * NR];
  sum_all<MR * NR>(acc, sums);
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < NR; ++j) d.c[i * d.c_row + j] = sums[i * NR + j];
  }
}

using DotTile = void (*)(const DotArgs&);
constexpr DotTile kDotTiles[4][4] = {{dot_tile<1, 1>, dot_tile<1, 2>, dot_tile<1, 3>, dot_tile<1, 4>},
                                     {dot_tile<2, 1>, dot_tile<2, 2>, dot_tile<2, 3>, dot_tile<2, 4>},
                                     {dot_tile<3, 1>, dot_tile<3, 2>, dot_tile<3, 3>, dot_tile<3, 4>},
                                     {dot_tile<4, 1>, dot_tile<4, 2>, dot_tile<4, 3>, dot_tile<4, 4>}};

TW_INLINE int smaller_int(int64_t a, int b) { return a < b ? static_cast<int>(a) : b; }

// Equal shares of at most `most`.
TW_INLINE int share(int64_t left, int most) {
  const int64_t parts = (left + most - 1) / most;
  return parts <= 1 ? static_cast<int>(left) : static_cast<int>((left + parts - 1) / parts);
}

template <int Short, bool Fetch>
constexpr DotTile strip_tile(bool tall) {
  return tall ? dot_tile<kDotStrip, Short, Fetch> : dot_tile<Short, kDotStrip, Fetch>;
}

// Rows up to this long are streamed in two runs, through the upper and the lower half of the matrix: with large pages
// the hardware follows two at full bandwidth, where a strip of eight reaches two thirds of it. Longer rows are as fast
// in strips, or faster.
constexpr int64_t kStreamedRow = 2048;

// Rows `b` and `other` against one vector.
TW_INLINE void dot_pair(const float* a, const float* b, const float* other, int64_t k, vf& sum, vf& other_sum) {
  vf s = {}, t = {};
  int64_t p = 0;
#pragma GCC unroll 4
  for (; p + kLanes <= k; p += kLanes) {
    const vf x = load(a + p);
    s += x * load(b + p);
    t += x * load(other + p);
  }
  if (p < k) {
    const int lanes = static_cast<int>(k - p);
    const vf x = load_first(a + p, lanes);
    s += x * load_first(b + p, lanes);
    t += x * load_first(other + p, lanes);
  }
  sum = s;
  other_sum = t;
}

// A vector against the rows of a matrix, front to back. The sums of the lanes wait until eight pairs are through.
inline void dots_streamed(const Gemm& g) {
  constexpr int kPairs = 8;
  const int64_t half = g.n / 2;
  for (int64_t first = 0; first < half; first += kPairs) {
    const int pairs = smaller_int(half - first, kPairs);
    vf upper[kPairs] = {}, lower[kPairs] = {};
    for (int j = 0; j < pairs; ++j) {
      const float* b = g.b + (first + j) * g.b_col;
      dot_pair(g.a, b, b + half * g.b_col, g.k, upper[j], lower[j]);
    }
    float sums[kPairs];
    sum_all<kPairs>(upper, sums);
    std::memcpy(g.c + first, sums, pairs * sizeof(float));
    sum_all<kPairs>(lower, sums);
    std::memcpy(g.c + half + first, sums, pairs * sizeof(float));
  }
  if (g.n % 2 != 0) dot_tile<1, 1>({g.a, 0, g.b + (g.n - 1) * g.b_col, g.b_col, g.k, g.c + g.n - 1, 0});
}

// The long side outside, so that the operand that is larger is read once and the smaller stays in cache.
inline void dots_tiled(const Gemm& g, bool from_memory) {
  if (g.stream_b && g.m == 1 && g.k <= kStreamedRow) return dots_streamed(g);
  const bool tall = g.m >= g.n;
  const int64_t outer = tall ? g.m : g.n, inner = tall ? g.n : g.m;
  const DotTile one = from_memory ? strip_tile<1, true>(tall) : strip_tile<1, false>(tall);
  const DotTile two = strip_tile<2, false>(tall);
  for (int64_t o = 0; o < outer;) {
    const bool strip = inner <= kDotPairs && outer - o >= kDotStrip;
    const int so = strip ? kDotStrip : share(outer - o, kDotSide);
    for (int64_t i = 0; i < inner;) {
      const int si = share(inner - i, kDotSide);
      const int64_t row = tall ? o : i, col = tall ? i : o;
      const DotTile tile = strip ? (inner == 1 ? one : two) : kDotTiles[(tall ? so : si) - 1][(tall ? si : so) - 1];
      tile({g.a + row * g.a_row, g.a_row, g.b + col * g.b_col, g.b_col, g.k, g.c + row * g.c_row + col, g.c_row});
      i += si;
    }
    o += so;
  }
}

// One row times a strip of NV vectors of columns, U sums over k side by side so that additions do not wait.
template <int NV, int U>
TW_INLINE void row_strip(const Gemm& g, int64_t col, int lanes) {
  vf acc[U][NV] = {};
  const float* a = g.a;
  const float* b = g.b + col;
  auto step = [&](int u, const float* at, const float* row) __attribute__((always_inline)) {
    const vf s = splat(*at);
#pragma GCC unroll 4
    for (int j = 0; j < NV - 1; ++j) acc[u][j] += s * load(row + j * kLanes);
    acc[u][NV - 1] += s * load_first(row + (NV - 1) * kLanes, lanes);
  };
  int64_t p = 0;
  for (; p + U <= g.k; p += U) {
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) step(u, a + u * g.a_col, b + u * g.b_row);
    a += U * g.a_col;
    b += U * g.b_row;
  }
  for (; p < g.k; ++p, a += g.a_col, b += g.b_row) step(0, a, b);
#pragma GCC unroll 4
  for (int j = 0; j < NV; ++j) {
    vf v = acc[0][j];
#pragma GCC unroll 8
    for (int u = 1; u < U; ++u) v += acc[u][j];
    float* to = g.c + col + j * kLanes;
    j == NV - 1 ? store_first(to, v, lanes) : store(to, v);
  }
}

// For narrow B: strips of four vectors, c in registers. Work is split at multiples of 64 columns, so that strips fall the same way.
inline void row_by_strips(const Gemm& g) {
  for (int64_t col = 0; col < g.n; col += 4 * kLanes) {
    const int left = smaller_int(g.n - col, 4 * kLanes);
    const int vectors = (left + kLanes - 1) / kLanes, lanes = left - (vectors - 1) * kLanes;
    switch (vectors) {
      case 4: row_strip<4, 2>(g, col, lanes); break;
      case 3: row_strip<3, 2>(g, col, lanes); break;
      case 2: row_strip<2, 4>(g, col, lanes); break;
      default: row_strip<1, 8>(g, col, lanes); break;
    }
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

constexpr int kRowsAtOnce = 8;

// For wide B: whole rows, so that each page is read from front to back; c stays in L1.
inline void row_streamed(const Gemm& g) {
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
