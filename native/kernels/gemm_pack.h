// Packing: rewrites a strip of a matrix as [k][width], so that the micro-kernel reads it front to back. Packing B (a
// strip of columns) and packing A (a strip of rows) are one operation with the strides exchanged. If the source is
// contiguous along k, blocks of lanes x lanes are transposed in registers.
#pragma once

#include "common/simd.h"

namespace tw {
namespace TW_ISA {

// Interleaves the first (second) halves of a and b.
#if defined(__AVX512F__)
TW_INLINE vf zip_low(vf a, vf b) {
  return __builtin_shuffle(a, b, (vi){0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
}
TW_INLINE vf zip_high(vf a, vf b) {
  return __builtin_shuffle(a, b, (vi){8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
}
#elif defined(__AVX2__)
TW_INLINE vf zip_low(vf a, vf b) { return __builtin_shuffle(a, b, (vi){0, 8, 1, 9, 2, 10, 3, 11}); }
TW_INLINE vf zip_high(vf a, vf b) { return __builtin_shuffle(a, b, (vi){4, 12, 5, 13, 6, 14, 7, 15}); }
#else
TW_INLINE vf zip_low(vf a, vf b) { return __builtin_shuffle(a, b, (vi){0, 4, 1, 5}); }
TW_INLINE vf zip_high(vf a, vf b) { return __builtin_shuffle(a, b, (vi){2, 6, 3, 7}); }
#endif

// Transposes a block of lanes x lanes in log2(lanes) rounds, each of which interleaves row i with row i + lanes / 2.
TW_INLINE void transpose(vf (&r)[kLanes]) {
#pragma GCC unroll 4
  for (int round = 1; round < kLanes; round *= 2) {
    vf t[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      t[2 * i] = zip_low(r[i], r[i + kLanes / 2]);
      t[2 * i + 1] = zip_high(r[i], r[i + kLanes / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) r[i] = t[i];
  }
}

// Loads the first `count` floats (at most half a vector) of two rows into the two halves of a vector.
TW_INLINE vf two_rows(const float* first, const float* second, int count) {
  vi index = {};
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) index[i] = i < kLanes / 2 ? i : i + kLanes / 2;
  return __builtin_shuffle(load_first(first, count), load_first(second, count), index);
}

// Loads the first half vector of columns of kLanes rows, one vector per column; `count` of them are read. Transposing
// pairs of rows needs half as many vectors.
TW_INLINE void columns_of_rows(const float* from, int64_t from_row, int count, vf (&r)[kLanes / 2]) {
  constexpr int kPairs = kLanes / 2;
#pragma GCC unroll 8
  for (int i = 0; i < kPairs; ++i) {
    const float* at = from + 2 * i * from_row;
    r[i] = two_rows(at, at + from_row, count);
  }
#pragma GCC unroll 4
  for (int round = 1; round < kLanes; round *= 2) {
    vf t[kPairs];
#pragma GCC unroll 4
    for (int i = 0; i < kPairs / 2; ++i) {
      t[2 * i] = zip_low(r[i], r[i + kPairs / 2]);
      t[2 * i + 1] = zip_high(r[i], r[i + kPairs / 2]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kPairs; ++i) r[i] = t[i];
  }
}

// to (cols x rows) = from (rows x cols), transposed, cols at most half a vector.
inline void transpose_narrow(const float* from, int64_t rows, int64_t cols, int64_t from_row, float* to,
                             int64_t to_row) {
  constexpr int kPairs = kLanes / 2;
  int64_t row = 0;
  for (; row + kLanes <= rows; row += kLanes) {
    vf r[kPairs];
    columns_of_rows(from + row * from_row, from_row, static_cast<int>(cols), r);
#pragma GCC unroll 8
    for (int j = 0; j < kPairs; ++j) {
      if (j < cols) store(to + j * to_row + row, r[j]);
    }
  }
  for (; row < rows; ++row) {
    for (int64_t j = 0; j < cols; ++j) to[j * to_row + row] = from[row * from_row + j];
  }
}

// Converts `lanes` columns of Rows rows, one vector per row, to lanes x Rows floats: the vectors are interleaved, and
// the gaps of missing rows are closed.
template <int Rows>
TW_INLINE void store_interleaved(const vf (&rows)[Rows], float* to, int lanes) {
  constexpr int kRoundedUp = Rows <= 1 ? 1 : Rows <= 2 ? 2 : Rows <= 4 ? 4 : 8;  // definition
  if constexpr (kRoundedUp > kLanes) {
    for (int j = 0; j < lanes; ++j) {
      for (int i = 0; i < Rows; ++i) to[j * Rows + i] = rows[i][j];
    }
  } else {
    constexpr int kColumns = kLanes / kRoundedUp;  // columns in one vector of the result
    vf r[kRoundedUp], t[kRoundedUp];
#pragma GCC unroll 8
    for (int i = 0; i < kRoundedUp; ++i) r[i] = i < Rows ? rows[i] : vf{};
#pragma GCC unroll 4
    for (int round = 1; round < kRoundedUp; round *= 2) {
#pragma GCC unroll 4
      for (int i = 0; i < kRoundedUp / 2; ++i) {
        t[2 * i] = zip_low(r[i], r[i + kRoundedUp / 2]);
        t[2 * i + 1] = zip_high(r[i], r[i + kRoundedUp / 2]);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kRoundedUp; ++i) r[i] = t[i];
    }
    vi closed = {};  // the lanes without the gaps of the missing rows
#pragma GCC unroll 16
    for (int i = 0; i < kColumns * Rows; ++i) closed[i] = i / Rows * kRoundedUp + i % Rows;
#pragma GCC unroll 8
    for (int i = 0; i < kRoundedUp; ++i) {
      const int remaining = lanes - i * kColumns, columns = remaining < 0          ? 0
                                                            : remaining < kColumns ? remaining
                                                                                   : kColumns;
      const vf out = Rows == kRoundedUp ? r[i] : __builtin_shuffle(r[i], closed);
      store_first(to + i * kColumns * Rows, out, columns * Rows);
    }
  }
}

// to (cols x Rows, packed) = from (Rows x cols), transposed.
template <int Rows>
void transpose_rows(const float* from, int64_t cols, int64_t from_row, float* to) {
  for (int64_t col = 0; col < cols; col += kLanes) {
    const int lanes = cols - col < kLanes ? static_cast<int>(cols - col) : kLanes;
    vf r[Rows];
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) r[i] = load_first(from + i * from_row + col, lanes);
    store_interleaved<Rows>(r, to + col * Rows, lanes);
  }
}

// What to pack: a strip of `count` columns (of B; rows of A), written as `width` floats per step of k, of which those
// past `count` are never used. With `slack`, a strip narrower than a vector is stored as overlapping full vectors,
// which need room for kLanes more floats at the end of the destination.
struct Strip {
  const float* from;
  int64_t k_stride, x_stride;  // element (p, x) is from[p * k_stride + x * x_stride]
  int64_t k;
  int64_t count, width;
  bool slack = true;
  int64_t to_step = width;  // floats from one step of the destination to the next
};

TW_INLINE int lanes_of(int64_t n) { return n >= kLanes ? kLanes : n > 0 ? static_cast<int>(n) : 0; }

// Stores a vector where only `capacity` floats of a step are left; a full vector if the strip has slack.
TW_INLINE void put(float* to, vf v, int capacity, bool only_group) {
  if (capacity >= kLanes || only_group) {
    store(to, v);
  } else {
    store_first(to, v, capacity);
  }
}

// Copies V full vectors per step, starting at x: a row of the source is read front to back, once.
template <int V>
TW_INLINE void copy_whole(const Strip& s, int64_t x, float* to) {
  const float* from = s.from + x;
  to += x;
  for (int64_t p = 0; p < s.k; ++p, to += s.to_step, from += s.k_stride) {
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) store(to + j * kLanes, load(from + j * kLanes));
  }
}

// Copies the vector that starts at x, of which fewer than kLanes floats come from the source.
TW_INLINE void copy_last(const Strip& s, int64_t x, float* to) {
  const int lanes = lanes_of(s.count - x), capacity = lanes_of(s.width - x);
  const bool only = s.slack && s.width <= kLanes;
  const float* from = s.from + x;
  to += x;
  for (int64_t p = 0; p < s.k; ++p, to += s.to_step, from += s.k_stride)
    put(to, load_first(from, lanes), capacity, only);
}

// Packs a strip whose source is contiguous across its width: whole vectors, then a partial one.
inline void pack_along_x(const Strip& s, float* to) {
  int64_t x = 0;
  for (; s.count - x >= 4 * kLanes; x += 4 * kLanes) copy_whole<4>(s, x, to);
  const int64_t whole = (s.count - x) / kLanes;
  if (whole == 3) copy_whole<3>(s, x, to);
  if (whole == 2) copy_whole<2>(s, x, to);
  if (whole == 1) copy_whole<1>(s, x, to);
  for (x += whole * kLanes; x < s.width; x += kLanes) copy_last(s, x, to);
}

// Loads and transposes kLanes vectors from rows `apart` floats apart; rows from `rows` on repeat the last one.
#if defined(__AVX2__) && !defined(__AVX512F__)
// Loads half a row into each half of a register. Two independent transpositions of 4 x 4 remain, with a third of the
// shuffles of the general one.
TW_INLINE vf two_halves(const float* low, const float* high) {
  return (vf)_mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(high), 1);
}
// Loads a block of kLanes by kLanes floats and transposes it; missing rows repeat the last one.
TW_INLINE void load_transposed(const float* from, int64_t apart, int rows, vf (&r)[kLanes]) {
  const float* at[kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; ++i) at[i] = from + (i < rows ? i : rows - 1) * apart;
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    __m256 v[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) v[i] = (__m256)two_halves(at[i] + 4 * half, at[i + 4] + 4 * half);
    const __m256 low01 = _mm256_unpacklo_ps(v[0], v[1]), high01 = _mm256_unpackhi_ps(v[0], v[1]);
    const __m256 low23 = _mm256_unpacklo_ps(v[2], v[3]), high23 = _mm256_unpackhi_ps(v[2], v[3]);
    r[4 * half] = (vf)_mm256_shuffle_ps(low01, low23, 0x44);
    r[4 * half + 1] = (vf)_mm256_shuffle_ps(low01, low23, 0xee);
    r[4 * half + 2] = (vf)_mm256_shuffle_ps(high01, high23, 0x44);
    r[4 * half + 3] = (vf)_mm256_shuffle_ps(high01, high23, 0xee);
  }
}
#else
TW_INLINE void load_transposed(const float* from, int64_t apart, int rows, vf (&r)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) r[i] = load(from + (i < rows ? i : rows - 1) * apart);
  transpose(r);
}
#endif

// Packs kLanes steps of one group of `rows` rows.
template <bool Whole>
TW_INLINE void transpose_block(const Strip& s, int64_t x, int64_t p, int rows, float* to) {
  vf r[kLanes];
  load_transposed(s.from + x * s.x_stride + p, s.x_stride, Whole ? kLanes : rows, r);
  float* at = to + p * s.to_step + x;
  const int capacity = lanes_of(s.width - x);
  const bool only = s.slack && s.width <= kLanes;
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i, at += s.to_step) Whole ? store(at, r[i]) : put(at, r[i], capacity, only);
}

// Packs the last steps, fewer than kLanes.
inline void transpose_last(const Strip& s, int64_t x, int64_t p, int rows, float* to) {
  const int lanes = static_cast<int>(s.k - p), capacity = lanes_of(s.width - x);
  vf r[kLanes] = {};
  const float* from = s.from + x * s.x_stride + p;
  for (int i = 0; i < rows; ++i) r[i] = load_first(from + i * s.x_stride, lanes);
  transpose(r);
  float* at = to + p * s.to_step + x;
  for (int i = 0; i < lanes; ++i, at += s.to_step) put(at, r[i], capacity, s.slack && s.width <= kLanes);
}

// Packs steps `first` to `last` of the group of rows that starts at x.
TW_INLINE void transpose_group(const Strip& s, int64_t x, int64_t first, int64_t last, float* to) {
  const int rows = lanes_of(s.count - x);
  int64_t p = first;
  if (rows == kLanes && s.width - x >= kLanes) {
    for (; p + kLanes <= last; p += kLanes) transpose_block<true>(s, x, p, rows, to);
  } else {
    for (; p + kLanes <= last; p += kLanes) transpose_block<false>(s, x, p, rows, to);
  }
  if (p < last) transpose_last(s, x, p, rows, to);
}

// Packs a strip that is contiguous along k, one group of kLanes rows after the other: as many streams as the prefetcher
// follows, and as one L1 set holds if rows are a multiple of 4 KiB apart. Without slack (a transposition of a whole
// matrix) all groups advance together, so that the destination is written in order.
inline void pack_along_k(const Strip& s, float* to) {
  const int64_t run = s.slack ? s.k : kLanes;
  for (int64_t p = 0; p < s.k; p += run) {
    const int64_t last = p + run < s.k ? p + run : s.k;
    for (int64_t x = 0; x < s.count; x += kLanes) transpose_group(s, x, p, last, to);
  }
}

// Packs a strip that is contiguous in neither direction.
inline void pack_strided(const Strip& s, float* to) {
  for (int64_t p = 0; p < s.k; ++p, to += s.to_step) {
    for (int64_t x = 0; x < s.count; ++x) to[x] = s.from[p * s.k_stride + x * s.x_stride];
    for (int64_t x = s.count; x < s.width; ++x) to[x] = 0.0f;
  }
}

inline void pack(const Strip& s, float* to) {
  if (s.x_stride == 1) {
    pack_along_x(s, to);
  } else if (s.k_stride == 1) {
    pack_along_k(s, to);
  } else {
    pack_strided(s, to);
  }
}

}  // namespace TW_ISA
}  // namespace tw
