// Matrix-vector products and similar shapes. Each weight is used only a few times, so memory bandwidth is the limit and
// packing would add traffic. Two loops cover all layouts: inner products if both operands are contiguous along k, and
// sums of scaled rows if the rows of B are contiguous.
//
// The order of each sum depends on the shape only, not on how the work was split: in every tile an inner product has
// one vector accumulator, whose lanes are added in one order.
#pragma once

#include "common/machine.h"
#include "kernels/gemm.h"
#include "kernels/gemm_pack.h"
#include "kernels/gemm_small_k.h"

namespace tw {
namespace TW_ISA {

// Rotates the lanes down by `By`: lane i of the result is lane i + By.
template <int By>
TW_INLINE vf rotated(vf v) {
  vi index = {};
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) index[i] = (i + By) % kLanes;
  return __builtin_shuffle(v, index);
}

// Adds the lanes of `a` and of `b` in pairs, D apart; the sums of a and of b alternate in runs of D lanes. Pairs within
// 128 bits, which are added first, take the cheaper shuffles.
template <int D>
TW_INLINE vf pairs_added(vf a, vf b) {
  vi low = {}, high = {};
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    const int half = i % (kLanes / 2);
    low[i] = D < 4 ? i / 4 * 4 + i % 4 / 2 + i % 2 * kLanes : half / 4 * 8 + half % 4 + i / (kLanes / 2) * kLanes;
    high[i] = low[i] + (D < 4 ? 2 : 4);
  }
  return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
}

// Adds lanes in every vector that earlier rounds did not merge: vectors D apart become one, vectors without a partner
// fold alone.
template <int D, int Active, int N>
TW_INLINE void add_pairs(vf (&v)[N]) {
  if constexpr (D < kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
      if ((i & ~Active) == 0 && (D >= N || (i & D) == 0)) v[i] = pairs_added<D>(v[i], v[D < N ? i + D : i]);
    }
  }
}

// Sums the lanes of each of N vectors (N a power of two up to kLanes) into the first N lanes of one vector.
// Interleaving and adding two vectors halves their number and keeps every lane busy: a transposition with an addition
// in every round. The order of additions does not depend on N.
template <int N>
TW_INLINE vf sum_each(vf (&v)[N]) {
  add_pairs<2, ~0>(v);
  add_pairs<1, ~2>(v);
  add_pairs<4, ~3>(v);
  add_pairs<8, ~7>(v);
  return v[0];
}

constexpr int power_of_two_from(int n) { return n <= 1 ? 1 : n <= 2 ? 2 : n <= 4 ? 4 : n <= 8 ? 8 : 16; }

// Stores runs of `Length` lanes to consecutive rows of C.
template <int Rows, int Length, int Row = 0>
TW_INLINE void store_rows(vf sums, float* c, int64_t c_row) {
  if constexpr (Row < Rows) {
    store_first(c + Row * c_row, rotated<Row * Length>(sums), Length);
    store_rows<Rows, Length, Row + 1>(sums, c, c_row);
  }
}

// Sums the vectors v[row * RowStep + j * Step], j < Length, and stores one run per row for rows First ... Rows - 1, as
// many runs at a time as fit one vector. Indices are compile-time constants, so that the vectors stay in registers.
template <int Rows, int Length, int RowStep, int Step, int First = 0, int N>
TW_INLINE void sums_to_rows(const vf (&v)[N], float* c, int64_t c_row) {
  if constexpr (Length > kLanes) {
    for (int r = 0; r < Rows; ++r) {
      for (int j = 0; j < Length; ++j) c[r * c_row + j] = sum_lanes(v[r * RowStep + j * Step]);
    }
  } else if constexpr (First < Rows) {
    constexpr int kFit = kLanes / Length, kCount = kFit < Rows - First ? kFit : Rows - First;
    constexpr int kPower = power_of_two_from(kCount * Length);
    vf group[kPower];
#pragma GCC unroll 16
    for (int i = 0; i < kPower; ++i) {
      group[i] = i < kCount * Length ? v[(First + i / Length) % Rows * RowStep + i % Length * Step] : vf{};
    }
    const vf sums = sum_each(group);
    if (c_row == Length) {
      store_first(c + First * c_row, sums, kCount * Length);
    } else {
      store_rows<kCount, Length>(sums, c + First * c_row, c_row);
    }
    sums_to_rows<Rows, Length, RowStep, Step, First + kCount>(v, c, c_row);
  }
}

// A tile of inner products: O rows of the longer operand (outer) by I of the shorter one (inner). The I vectors of the
// shorter operand stay in registers with O x I accumulators and one vector of the longer one. kDotFits[I] is the
// largest O that fits; kDotOuter[I] is the one to use (4 x 4 sums can be added up in one vector).
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kDotInner = 6;  // definition: largest I
constexpr int kDotFits[kDotInner + 1] = {0, 8, 12, 8, 6, 5, 4};
constexpr int kDotOuter[kDotInner + 1] = {0, 8, 12, 8, 4, 5, 4};
#else
constexpr int kDotInner = 3;  // definition: largest I
constexpr int kDotFits[kDotInner + 1] = {0, 8, 5, 4};
constexpr int kDotOuter[kDotInner + 1] = {0, 8, 5, 4};
#endif
constexpr int kDotMostOuter = 12, kDotMostSums = 25;  // definition: the largest O and O * I of these tables

// Result (o, i) is stored at c[o * c_row + i], or at c[i * c_row + o] if the longer operand is B.
struct DotArgs {
  const float* outer;
  int64_t outer_row;
  const float* inner;
  int64_t inner_row;
  int64_t k;
  float* c;
  int64_t c_row;
  bool outer_is_b;
  float* copy = nullptr;              // tiles of the longer operand, a vector of each row after the other
  int64_t copy_tile = 0;              // floats of such a tile
  vf* sums = nullptr;                 // accumulators in memory, if k is processed in several parts
  bool resume = false, more = false;  // load accumulators of an earlier part; store them for a later part
};

// What a tile does with the copy of the longer operand's rows. Rows of a copy do not share sets of L1, as rows apart by
// a large power of two do, and are one stream for the hardware prefetcher.
enum class Copy { none, write, read };

// Adds one vector of k (or its first `lanes` lanes) to all O x I accumulators.
template <int O, int I, Copy Mode>
TW_INLINE void dot_step(const DotArgs& d, int64_t p, int lanes, bool whole, vf (&acc)[O * I]) {
  vf vector[I];
#pragma GCC unroll 8
  for (int i = 0; i < I; ++i) {
    const float* at = d.inner + i * d.inner_row + p;
    vector[i] = !whole ? load_first(at, lanes) : O == 1 ? load(at) : load_once(at);
  }
#pragma GCC unroll 12
  for (int o = 0; o < O; ++o) {
    float* const copy = Mode == Copy::none ? nullptr : d.copy + p * O + o * kLanes;
    const float* at = Mode == Copy::read ? copy : d.outer + o * d.outer_row + p;
    const vf v = !whole && Mode != Copy::read ? load_first(at, lanes) : I == 1 ? load(at) : load_once(at);
    if (Mode == Copy::write) store(copy, v);
#pragma GCC unroll 8
    for (int i = 0; i < I; ++i) acc[o * I + i] = multiply_add(acc[o * I + i], v, vector[i]);
  }
}

// Prefetches the rows of the next tile, which start on pages that the hardware cannot predict.
template <int O>
TW_INLINE void fetch_next_rows(const DotArgs& d, int64_t p) {
#pragma GCC unroll 12
  for (int o = 0; o < O; ++o) __builtin_prefetch(d.outer + (O + o) * d.outer_row + p, 0, 1);
}

// Computes O x I inner products, one vector accumulator each, for `count` consecutive tiles of O rows.
template <int O, int I, bool Fetch = false, Copy Mode = Copy::none>
void dot_tiles(const DotArgs& args, int64_t count) {
  DotArgs d = args;
  for (; count > 0; --count) {
    vf acc[O * I] = {};
    if (d.resume) {
#pragma GCC unroll 32
      for (int i = 0; i < O * I; ++i) acc[i] = d.sums[i];
    }
    int64_t p = 0;
    for (; p + kLanes <= d.k; p += kLanes) {
      if (Fetch) fetch_next_rows<O>(d, p);
      dot_step<O, I, Mode>(d, p, kLanes, true, acc);
    }
    if (p < d.k) dot_step<O, I, Mode>(d, p, static_cast<int>(d.k - p), false, acc);
    if (d.more) {
#pragma GCC unroll 32
      for (int i = 0; i < O * I; ++i) d.sums[i] = acc[i];
    } else {
      d.outer_is_b ? sums_to_rows<I, O, 1, I>(acc, d.c, d.c_row) : sums_to_rows<O, I, I, 1>(acc, d.c, d.c_row);
    }
    d.sums += O * I;
    d.outer += O * d.outer_row;
    d.copy += d.copy_tile;
    d.c += d.outer_is_b ? O : O * d.c_row;
  }
}

using DotTile = void (*)(const DotArgs&, int64_t);

// Copies are of tiles of kDotOuter rows. Balanced shares of the shorter operand differ by one, so that tiles one
// narrower read them too.
template <int O, int I, Copy Mode>
constexpr DotTile dot_or_null() {
  if constexpr (I > kDotInner) {
    return nullptr;
  } else if constexpr (Mode == Copy::none ? O <= kDotFits[I]
                                          : O == kDotOuter[I] || O == kDotOuter[(I + 1) % (kDotInner + 1)]) {
    return dot_tiles<O, I, false, Mode>;
  } else {
    return nullptr;
  }
}

#define TW_DOT_ROW(I, M)                                                                             \
  {dot_or_null<1, I, M>(), dot_or_null<2, I, M>(),  dot_or_null<3, I, M>(),  dot_or_null<4, I, M>(), \
   dot_or_null<5, I, M>(), dot_or_null<6, I, M>(),  dot_or_null<7, I, M>(),  dot_or_null<8, I, M>(), \
   dot_or_null<9, I, M>(), dot_or_null<10, I, M>(), dot_or_null<11, I, M>(), dot_or_null<12, I, M>()}
#define TW_DOT_TABLE(M) \
  {TW_DOT_ROW(1, M), TW_DOT_ROW(2, M), TW_DOT_ROW(3, M), TW_DOT_ROW(4, M), TW_DOT_ROW(5, M), TW_DOT_ROW(6, M)}
constexpr DotTile kDotTiles[3][6][kDotMostOuter] = {TW_DOT_TABLE(Copy::none), TW_DOT_TABLE(Copy::write),
                                                    TW_DOT_TABLE(Copy::read)};

TW_INLINE int smaller_int(int64_t a, int b) { return a < b ? static_cast<int>(a) : b; }

// Returns the size of the next of about equal shares, at most `most`.
TW_INLINE int share(int64_t remaining, int most) {
  const int64_t shares = (remaining + most - 1) / most;
  return shares <= 1 ? static_cast<int>(remaining) : static_cast<int>((remaining + shares - 1) / shares);
}

// Inner products of K terms, one at a time: for so few terms faster than adding lanes of mostly empty vectors.
template <int K>
void short_dot_products(const float* rows, int64_t row, const float* x, int64_t count, float* c, int64_t c_step) {
  float vector[K];
  for (int p = 0; p < K; ++p) vector[p] = x[p];
  for (int64_t i = 0; i < count; ++i, rows += row, c += c_step) {
    float sum = rows[0] * vector[0];
#pragma GCC unroll 8
    for (int p = 1; p < K; ++p) sum += rows[p] * vector[p];
    *c = sum;
  }
}

constexpr int kMaxShortTerms = 8, kMinVectorTerms = 3;  // chosen: most terms; more than this pay for vectors
using ShortDotProducts = void (*)(const float*, int64_t, const float*, int64_t, float*, int64_t);
constexpr ShortDotProducts kShortDotProducts[kMaxShortTerms] = {
    short_dot_products<1>, short_dot_products<2>, short_dot_products<3>, short_dot_products<4>,
    short_dot_products<5>, short_dot_products<6>, short_dot_products<7>, short_dot_products<8>};

// Rows up to this long are read in two streams, through the upper and the lower half of the matrix: with large pages
// the hardware prefetcher follows two streams at full bandwidth, whereas a tile of eight rows reaches two thirds of it.
// Longer rows are at least as fast in tiles.
constexpr int64_t kStreamedRow = 2048;  // chosen; floats

// Multiplies rows `b` and `other` by one vector.
TW_INLINE void dot_pair(const float* a, const float* b, const float* other, int64_t k, vf& sum, vf& other_sum) {
  vf s = {}, t = {};
  int64_t p = 0;
#pragma GCC unroll 4
  for (; p + kLanes <= k; p += kLanes) {
    const vf x = load(a + p);
    s = multiply_add(s, x, load(b + p));
    t = multiply_add(t, x, load(other + p));
  }
  if (p < k) {
    const int lanes = static_cast<int>(k - p);
    const vf x = load_first(a + p, lanes);
    s = multiply_add(s, x, load_first(b + p, lanes));
    t = multiply_add(t, x, load_first(other + p, lanes));
  }
  sum = s;
  other_sum = t;
}

// Stores the first `count` of N sums.
template <int N>
TW_INLINE void store_sums(vf (&v)[N], float* c, int count) {
  if constexpr (N <= kLanes) {
    store_first(c, sum_each(v), count);
  } else {
    for (int i = 0; i < count; ++i) c[i] = sum_lanes(v[i]);
  }
}

// Multiplies a vector by the rows of a matrix in two streams. The lanes are summed once for every eight pairs of rows.
inline void dot_products_streamed(const Gemm& g) {
  constexpr int kPairs = 8;  // hardware: lanes of AVX2, so that the sums of 8 pairs are one vector
  const int64_t half = g.n / 2;
  for (int64_t first = 0; first < half; first += kPairs) {
    const int pair_count = smaller_int(half - first, kPairs);
    vf upper[kPairs] = {}, lower[kPairs] = {};
    for (int j = 0; j < pair_count; ++j) {
      const float* b = g.b + (first + j) * g.b_col;
      dot_pair(g.a, b, b + half * g.b_col, g.k, upper[j], lower[j]);
    }
    store_sums(upper, g.c + first, pair_count);
    store_sums(lower, g.c + half + first, pair_count);
  }
  if (g.n % 2 != 0) dot_tiles<1, 1>({g.b + (g.n - 1) * g.b_col, g.b_col, g.a, 0, g.k, g.c + g.n - 1, 1, true}, 1);
}

// Reduces the rows per tile if they collide in L1 (8 ways): rows a multiple of 4 KiB apart share one set, of 2 KiB two.
TW_INLINE int fewer_where_colliding(int rows, int64_t apart) {
  const int most = apart % 1024 == 0 ? 4 : apart % 512 == 0 ? 8 : rows;
  return rows < most ? rows : most;
}

constexpr int64_t kDotPart = 1024;      // chosen: most terms of a part of k; a tile of each side (7 or 10 rows) fits L1
constexpr int64_t kDotBlockTiles = 16;  // chosen: tiles whose accumulators are kept in memory between parts of k

// All inner products. The outer loop is over the longer operand, which is read once while the shorter one stays in
// cache. `copy` has `copy_floats` floats: a block of the longer operand, which stays in L2. It is used if the shorter
// operand has kMinCopyRows rows.
inline void dot_products_tiled(const Gemm& g, bool from_memory, float* copy, int64_t copy_floats) {
  const bool tall = g.m > 1 && g.m >= g.n;
  const int64_t outer = tall ? g.m : g.n, inner = tall ? g.n : g.m;
  const int64_t outer_row = tall ? g.a_row : g.b_col, inner_row = tall ? g.b_col : g.a_row;
  const float* const long_side = tall ? g.a : g.b;
  const float* const short_side = tall ? g.b : g.a;
  if (inner == 1 && g.k == 2 && outer_row == 2 && (!tall || g.c_row == 1)) {
    return paired_dot_products(long_side, short_side, outer, g.c);
  }
  if (inner == 1 && g.k > kMinVectorTerms && g.k <= kPairTerms && (!tall || g.c_row == 1)) {
    return short_dot_products_vectorized(long_side, outer_row, short_side, static_cast<int>(g.k), outer, g.c);
  }
  if (inner == 1 && g.k <= kMaxShortTerms)
    return kShortDotProducts[g.k - 1](long_side, outer_row, short_side, outer, g.c, tall ? g.c_row : 1);
  if (g.stream_b && g.large_pages_b && g.m == 1 && g.k <= kStreamedRow) return dot_products_streamed(g);
  const int64_t padded = (g.k + kLanes - 1) / kLanes * kLanes;
  const int widest = kDotOuter[share(inner, kDotInner)];
  const bool copies = inner >= kMinCopyRows && widest * padded <= copy_floats;
  const int most = copies ? widest : fewer_where_colliding(widest, inner == 1 ? 1 : outer_row);
  int64_t part = g.k, block = outer;
  if (inner > kDotInner) {
    // Tiles of the short side, which stay in L1, pass over a block of the long side, which stays in L2.
    const int64_t count = (g.k + kDotPart - 1) / kDotPart, fit = copy_floats / padded / most;
    part = (padded / kLanes + count - 1) / count * kLanes;
    block = fit < kDotBlockTiles ? fit : kDotBlockTiles;
  }
  vf sums[kDotBlockTiles * kDotMostSums];
  for (int64_t o = 0; o < outer;) {
    const int so = outer - o >= 2 * most ? most : share(outer - o, most);
    const int64_t whole = (outer - o) / most - (outer - o >= 2 * most);
    const int64_t count = so < most ? 1 : whole < block ? whole : block;
    const int64_t tiles = count < 1 ? 1 : count;
    for (int64_t i = 0; i < inner;) {
      const int si = share(inner - i, kDotInner);
      const bool fetch = from_memory && inner == 1 && so == kDotOuter[1];
      const Copy mode = !copies || so < most ? Copy::none : i == 0 ? Copy::write : Copy::read;
      const DotTile tile = fetch ? dot_tiles<kDotOuter[1], 1, true> : kDotTiles[static_cast<int>(mode)][si - 1][so - 1];
      for (int64_t p = 0; p < g.k; p += part) {
        const bool more = g.k - p > part;
        tile({long_side + o * outer_row + p, outer_row, short_side + i * inner_row + p, inner_row,
              more ? part : g.k - p, g.c + (tall ? o * g.c_row + i : i * g.c_row + o), g.c_row, !tall,
              copies ? copy + p * most : nullptr, copies ? most * padded : 0, sums, p > 0, more},
             tiles);
      }
      i += si;
    }
    o += so * tiles;
  }
}

// Multiplies one row of A by a strip of NV vectors of columns, with U independent sums over k that hide the latency of
// additions.
template <int NV, int U>
TW_INLINE void row_strip(const Gemm& g, int64_t col, int lanes) {
  vf acc[U][NV] = {};
  const float* a = g.a;
  const float* b = g.b + col;
  auto step = [&](int u, const float* at, const float* row) __attribute__((always_inline)) {
    const vf s = splat(*at);
#pragma GCC unroll 8
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
#pragma GCC unroll 8
  for (int j = 0; j < NV; ++j) {
    vf v = acc[0][j];
#pragma GCC unroll 8
    for (int u = 1; u < U; ++u) v += acc[u][j];
    float* to = g.c + col + j * kLanes;
    j == NV - 1 ? store_first(to, v, lanes) : store(to, v);
  }
}

// One row times a narrow B: strips of up to eight vectors, with c in registers. Tasks split columns at multiples of
// 128, so the strips do not depend on the split.
inline void row_by_strips(const Gemm& g) {
  for (int64_t col = 0; col < g.n; col += 8 * kLanes) {
    const int remaining = smaller_int(g.n - col, 8 * kLanes);
    const int vectors = (remaining + kLanes - 1) / kLanes, lanes = remaining - (vectors - 1) * kLanes;
    switch (vectors) {
      case 8:
        row_strip<8, 1>(g, col, lanes);
        break;
      case 7:
        row_strip<7, 1>(g, col, lanes);
        break;
      case 6:
        row_strip<6, 1>(g, col, lanes);
        break;
      case 5:
        row_strip<5, 1>(g, col, lanes);
        break;
      case 4:
        row_strip<4, 2>(g, col, lanes);
        break;
      case 3:
        row_strip<3, 2>(g, col, lanes);
        break;
      case 2:
        row_strip<2, 4>(g, col, lanes);
        break;
      default:
        row_strip<1, 8>(g, col, lanes);
        break;
    }
  }
}

// The floats of C, all rows together, that are updated before the next columns: half of L1.
constexpr int64_t kStreamedFloats = kSmallestL1 / 2 / 4;

// c[i, from:to] (+)= sum over R rows of B of a[i, p + r] * b[p + r, from:to], for M rows i. First: C is overwritten.
template <int M, int R, bool First>
TW_INLINE void add_rows(const Gemm& g, int64_t p, int64_t from, int64_t to) {
  const float* const a = g.a + p * g.a_col;
  const float* const b = g.b + p * g.b_row;
  float* const c = g.c;
  const int64_t b_row = g.b_row, c_row = g.c_row;
  vf scale[M][R];
#pragma GCC unroll 4
  for (int i = 0; i < M; ++i) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) scale[i][r] = splat(a[i * g.a_row + r * g.a_col]);
  }
  int64_t j = from;
  for (; j + kLanes <= to; j += kLanes) {
    vf v[M];
#pragma GCC unroll 4
    for (int i = 0; i < M; ++i) v[i] = First ? vf{} : load(c + i * c_row + j);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const vf row = M == 1 ? load(b + r * b_row + j) : load_once(b + r * b_row + j);
#pragma GCC unroll 4
      for (int i = 0; i < M; ++i) v[i] += scale[i][r] * row;
    }
#pragma GCC unroll 4
    for (int i = 0; i < M; ++i) store(c + i * c_row + j, v[i]);
  }
  if (j == to) return;
  const int lanes = static_cast<int>(to - j);
#pragma GCC unroll 4
  for (int i = 0; i < M; ++i) {
    vf v = First ? vf{} : load_first(c + i * c_row + j, lanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) v += scale[i][r] * load_first(b + r * b_row + j, lanes);
    store_first(c + i * c_row + j, v, lanes);
  }
}

// Adds the remaining rows of B, from p on: fewer than 2 * R.
template <int M, int R>
TW_INLINE void add_last_rows(const Gemm& g, int64_t p, int64_t from, int64_t to) {
  if constexpr (R > 0) {
    if (g.k - p >= R) {
      p == 0 ? add_rows<M, R, true>(g, p, from, to) : add_rows<M, R, false>(g, p, from, to);
      p += R;
    }
    add_last_rows<M, R / 2>(g, p, from, to);
  }
}

// M rows times a wide B, read in whole rows, so that each page is read front to back. Several rows of C are cut into
// column blocks that fit half of a small L1; a single row keeps one unbroken stream from memory.
template <int M, int R>
void rows_streamed(const Gemm& g) {
  const int64_t whole = g.k / R * R, width = M == 1 ? g.n : kStreamedFloats / M / kLanes * kLanes;
  for (int64_t from = 0; from < g.n; from += width) {
    const int64_t to = from + width < g.n ? from + width : g.n;
    for (int64_t p = 0; p < whole; p += R) {
      p == 0 ? add_rows<M, R, true>(g, p, from, to) : add_rows<M, R, false>(g, p, from, to);
    }
    add_last_rows<M, R / 2>(g, whole, from, to);
  }
}

// More rows of C than there are registers for their elements of A: kStreamedDepth rows of B at a time, read front to
// back, by groups of rows of C. The elements of A of a group are copied so that they are contiguous.
constexpr int kStreamedDepth = 8;  // chosen
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kStreamedGroup = 6, kStreamedVectors = 4;  // definition: register tile, rows by vectors
#else
constexpr int kStreamedGroup = 4, kStreamedVectors = 2;  // definition: register tile, rows by vectors
#endif

struct StreamedRows {
  const float* scales;  // elements of A (depth, M)
  const float* b;
  int64_t b_row;
  float* c;
  int64_t c_row;
  int depth;
  bool first;  // C is overwritten, not added to
};

// Computes M rows by V vectors of columns starting at j; the last vector has `lanes` columns.
template <int M, int V, bool Whole>
TW_INLINE void streamed_strip(const StreamedRows& s, int64_t j, int lanes) {
  vf acc[M][V];
#pragma GCC unroll 6
  for (int i = 0; i < M; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const float* const at = s.c + i * s.c_row + j + v * kLanes;
      acc[i][v] = s.first ? vf{} : Whole || v < V - 1 ? load(at) : load_first(at, lanes);
    }
  }
  const float* b = s.b + j;
  const float* scale = s.scales;
#pragma GCC unroll 2
  for (int r = 0; r < s.depth; ++r, b += s.b_row, scale += M) {
    vf row[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v)
      row[v] = Whole || v < V - 1 ? load_once(b + v * kLanes) : load_first(b + v * kLanes, lanes);
#pragma GCC unroll 6
    for (int i = 0; i < M; ++i) {
      const vf by = splat(scale[i]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[i][v] += by * row[v];
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < M; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      float* const to = s.c + i * s.c_row + j + v * kLanes;
      Whole || v < V - 1 ? store(to, acc[i][v]) : store_first(to, acc[i][v], lanes);
    }
  }
}

template <int M>
void streamed_group(const StreamedRows& s, int64_t from, int64_t to) {
  constexpr int64_t kStep = kStreamedVectors * kLanes;
  int64_t j = from;
  for (; j + kStep <= to; j += kStep) streamed_strip<M, kStreamedVectors, true>(s, j, kLanes);
  for (; j + kLanes <= to; j += kLanes) streamed_strip<M, 1, true>(s, j, kLanes);
  if (j < to) streamed_strip<M, 1, false>(s, j, static_cast<int>(to - j));
}

using StreamedGroup = void (*)(const StreamedRows&, int64_t, int64_t);
template <int M>
constexpr StreamedGroup streamed_or_null() {
  if constexpr (M <= kStreamedGroup) {
    return streamed_group<M>;
  } else {
    return nullptr;
  }
}
// By rows of a group. Rows are split evenly, so a group has at least two.
constexpr StreamedGroup kStreamedGroups[] = {nullptr,
                                             streamed_or_null<2>(),
                                             streamed_or_null<3>(),
                                             streamed_or_null<4>(),
                                             streamed_or_null<5>(),
                                             streamed_or_null<6>()};

// Many rows times a wide B: blocks of columns, parts of k, groups of rows.
inline void groups_streamed(const Gemm& g) {
  float scales[kStreamedDepth * kStreamedGroup];
  const int64_t block_columns = kStreamedFloats / kLanes * kLanes;
  for (int64_t from = 0; from < g.n; from += block_columns) {
    const int64_t to = from + block_columns < g.n ? from + block_columns : g.n;
    for (int64_t p = 0; p < g.k; p += kStreamedDepth) {
      const int depth = smaller_int(g.k - p, kStreamedDepth);
      for (int64_t i = 0; i < g.m;) {
        const int rows = share(g.m - i, kStreamedGroup);
        const float* const a = g.a + i * g.a_row + p * g.a_col;
        for (int r = 0; r < depth; ++r) {
          for (int q = 0; q < rows; ++q) scales[r * rows + q] = a[q * g.a_row + r * g.a_col];
        }
        kStreamedGroups[rows - 1]({scales, g.b + p * g.b_row, g.b_row, g.c + i * g.c_row, g.c_row, depth, p == 0}, from,
                                  to);
        i += rows;
      }
    }
  }
}

// Multiplies a few rows by whole rows of B, as many rows of B at a time as there are registers for the elements of A.
inline void row_streamed(const Gemm& g) {
  switch (g.m) {
    case 1:
      return rows_streamed<1, 8>(g);
    case 2:
      return rows_streamed<2, 8>(g);
    case 3:
      return rows_streamed<3, 4>(g);
    default:
      return groups_streamed(g);
  }
}

}  // namespace TW_ISA
}  // namespace tw
