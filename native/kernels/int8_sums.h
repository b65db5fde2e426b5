// What becomes of the sums of a register tile: scaled, with bias, residual and ReLU, to 32-bit integers, floats or
// bytes. Compiled with -ffp-contract=off, as int8.cpp is.
#pragma once

#include "common/simd.h"
#include "kernels/int8.h"
#include "kernels/int8_requantize.h"

namespace tw {
namespace TW_ISA {

constexpr int kVectors = kInt8Panel / kLanes;  // vectors per panel

struct RowOffsets {  // the odd length keeps the three from lying whole pages apart, where they would get in each
                     // other's way
  int64_t in[kInt8MaxRows + 24], out[kInt8MaxRows + 24], residual[kInt8MaxRows + 24];
};

// Where the pixels [first, first + count) lie.
inline void fill_row(int64_t* to, const PixelGrid& grid, int64_t image, int64_t y, int64_t x, int count) {
  const int64_t start = image * grid.image_step + y * grid.row_step + x * grid.column_step;
  for (int i = 0; i < count; ++i) to[i] = start + i * grid.column_step;
}

inline void fill_offsets(const Int8Problem& p, int64_t first, int count, RowOffsets& at) {
  int64_t x = first % p.width, y = first / p.width % p.height, image = first / p.width / p.height;
  for (int i = 0; i < count;) {
    const int n = p.width - x < count - i ? static_cast<int>(p.width - x) : count - i;
    fill_row(at.in + i, p.in_grid, image, y, x, n);
    fill_row(at.out + i, p.out_grid, image, y, x, n);
    fill_row(at.residual + i, p.residual_grid, image, y, x, n);
    i += n;
    x = 0;
    if (++y == p.height) {
      y = 0;
      ++image;
    }
  }
}

TW_INLINE vf finish_float(const Int8Problem& p, vf value, int64_t row, int column) {
  if (p.row_scale != nullptr) value = value * splat(p.row_scale[row]);
  if (p.bias != nullptr) value = value + load(p.bias + column);
  if (p.relu) value = select(value < splat(0.0f), splat(0.0f), value);
  return value;
}

TW_INLINE vf residual_at(const Int8Problem& p, int64_t offset, int lanes) {
  if (p.int16_residual) {
    const vi numbers = first_shorts(reinterpret_cast<const int16_t*>(p.residual) + offset, lanes);
    return real_of(numbers, p.residual_zero, p.residual_scale);
  }
  return real_of(first_bytes(p.residual + offset, lanes), p.residual_zero, p.residual_scale);
}

// `sum` already holds the column's offset.
TW_INLINE void finish(const Int8Problem& p, vi sum, int64_t row, int64_t out_offset, int64_t residual_offset,
                      int column) {
  int lanes = p.out_columns - column;
  if (lanes <= 0) return;
  if (lanes > kLanes) lanes = kLanes;
  if (p.kind == Int8Out::int32) {
    store_first(static_cast<float*>(p.out) + out_offset + column, (vf)sum, lanes);
    return;
  }
  vf value = __builtin_convertvector(sum, vf) * load(p.scale + column);
  if (p.kind == Int8Out::float32) {
    store_first(static_cast<float*>(p.out) + out_offset + column, finish_float(p, value, row, column), lanes);
    return;
  }
  if (p.residual != nullptr) value = value + residual_at(p, residual_offset + column, lanes);
  if (p.kind == Int8Out::int16)
    return store_wide(static_cast<int16_t*>(p.out) + out_offset + column, value, p.wide, lanes);
  uint8_t* to = static_cast<uint8_t*>(p.out) + out_offset + column;
  const int own = p.columns - column;  // a table's first byte is not the padding's
  if (p.finish.curve == Approximation::lookup_table && own < lanes) lanes = own;
  with_curve(p.finish, [&](auto known) { store_finished<known.value>(to, value, p.finish, lanes); });
}

// How whole tiles become bytes, or numbers of 16 bits.
enum class ByteWay { plain, residual, bent, pieces, table, shorts };

constexpr Approximation curve_of(ByteWay way) {
  return way == ByteWay::bent ? Approximation::parabola : Approximation::none;
}

// Whether there is a residual: known of the plain ways.
template <ByteWay W>
TW_INLINE bool adds_residual(const Int8Problem& p) {
  return W == ByteWay::bent || W == ByteWay::pieces ? p.residual != nullptr : W == ByteWay::residual;
}

template <ByteWay W>
struct KnownWay {
  static constexpr ByteWay value = W;
};

// Calls f with the way as a constant.
template <class F>
TW_INLINE void with_way(const Int8Problem& p, F&& f) {
  if (p.kind == Int8Out::int16) return f(KnownWay<ByteWay::shorts>());
  if (p.finish.curve == Approximation::lookup_table) return f(KnownWay<ByteWay::table>());
  if (p.finish.curve == Approximation::parabola) return f(KnownWay<ByteWay::bent>());
  if (p.finish.curve == Approximation::piecewise) return f(KnownWay<ByteWay::pieces>());
  p.residual != nullptr ? f(KnownWay<ByteWay::residual>()) : f(KnownWay<ByteWay::plain>());
}

// The sums of a tile to bytes by the table: all places first, then all bytes, so that neither waits for the other.
template <int R, int V>
TW_INLINE void finish_by_table(const Int8Problem& p, const vi (&acc)[R][V], const RowOffsets& at, int first,
                               int column) {
  constexpr int kColumns = V * kLanes;
  int32_t place[R][kColumns];
#pragma GCC unroll 1
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      vf value = __builtin_convertvector(acc[r][v], vf) * load(p.scale + column + v * kLanes);
      if (p.residual != nullptr) value = value + residual_at(p, at.residual[first + r] + column + v * kLanes, kLanes);
      const vi places = table_places(value, p.finish.table);
      std::memcpy(&place[r][v * kLanes], &places, sizeof places);
    }
  }
  const uint8_t* bytes = p.finish.table.bytes;
#pragma GCC unroll 1
  for (int r = 0; r < R; ++r) {
    uint8_t* to = static_cast<uint8_t*>(p.out) + at.out[first + r] + column;
#pragma GCC unroll 64
    for (int c = 0; c < kColumns; ++c) to[c] = bytes[place[r][c]];
  }
}

#if defined(__AVX2__)
// What a vector of sums comes to, with the residual if there is one.
template <bool kResidual>
TW_INLINE vf scaled_sum(const Int8Problem& p, vi sum, const RowOffsets& at, int r, int column) {
  const vf value = __builtin_convertvector(sum, vf) * load(p.scale + column);
  if constexpr (kResidual) return value + residual_at(p, at.residual[r] + column, kLanes);
  return value;
}

// Whole numbers of at most `most` in 16 bits each, saturating below: of AVX2's two vectors in the order of a pack.
#if defined(__AVX512F__)
TW_INLINE __m256i sixteen_whole(vf value, vf most) {
  const __m512 bounded =
      _mm512_maskz_min_ps(0xffff, (__m512)most, (__m512)value);  // the second, where one is no number
  return _mm512_maskz_cvtsepi32_epi16(0xffff, _mm512_maskz_cvtps_epi32(0xffff, bounded));
}
#else
TW_INLINE __m256i sixteen_whole(vf first, vf second, vf most) {
  return _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_min_ps((__m256)most, (__m256)first)),
                            _mm256_cvtps_epi32(_mm256_min_ps((__m256)most, (__m256)second)));
}
#endif

// Sixteen sums at a time, by a curve that takes so many: a row of a panel, or two of half a panel.
template <int R, int V, bool kPieces, bool kResidual>
TW_INLINE void finish_sixteens(const Int8Problem& p, const vi (&acc)[R][V], const RowOffsets& at, int first,
                               int column) {
  const Int16PiecewiseVectors curve(p.wide);
  const vf most = splat(Int16PiecewiseVectors::most(p.wide));
  int16_t* out = static_cast<int16_t*>(p.out) + column;
#if defined(__AVX512F__)
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const __m256i whole =
          sixteen_whole(scaled_sum<kResidual>(p, acc[r][v], at, first + r, column + v * kLanes), most);
      const __m256i numbers = kPieces ? curve.pieces(whole) : curve.straight(whole);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + at.out[first + r] + v * kLanes), numbers);
    }
  }
#else
  static_assert(V % 2 == 0 || (V == 1 && R % 2 == 0), "two vectors at a time");
#pragma GCC unroll 16
  for (int i = 0; i < R * V; i += 2) {
    const int r = i / V, v = i % V, next = (i + 1) / V, beside = (i + 1) % V;
    const __m256i packed =
        sixteen_whole(scaled_sum<kResidual>(p, acc[r][v], at, first + r, column + v * kLanes),
                      scaled_sum<kResidual>(p, acc[next][beside], at, first + next, column + beside * kLanes), most);
    const __m256i numbers = _mm256_permute4x64_epi64(kPieces ? curve.pieces(packed) : curve.straight(packed), 0xd8);
    if constexpr (V % 2 == 0) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + at.out[first + r] + v * kLanes), numbers);
    } else {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + at.out[first + r]), _mm256_castsi256_si128(numbers));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + at.out[first + next]), _mm256_extracti128_si256(numbers, 1));
    }
  }
#endif
}

// The sums of a tile to numbers of 16 bits. Which way is decided once for all of them.
template <int R, int V>
TW_INLINE void finish_shorts(const Int8Problem& p, const vi (&acc)[R][V], const RowOffsets& at, int first, int column) {
  if constexpr (kVectors == 1 || V % 2 == 0 || R % 2 == 0) {
    if (p.wide.curve == Int16Activation::none) {
      return p.residual != nullptr ? finish_sixteens<R, V, false, true>(p, acc, at, first, column)
                                   : finish_sixteens<R, V, false, false>(p, acc, at, first, column);
    }
    if (p.wide.curve == Int16Activation::piecewise && p.residual == nullptr) {
      return finish_sixteens<R, V, true, false>(p, acc, at, first, column);
    }
  }
#pragma GCC unroll 1
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 1
    for (int v = 0; v < V; ++v) {
      const int c = column + v * kLanes;
      const vf value = p.residual != nullptr ? scaled_sum<true>(p, acc[r][v], at, first + r, c)
                                             : scaled_sum<false>(p, acc[r][v], at, first + r, c);
      store_wide(static_cast<int16_t*>(p.out) + at.out[first + r] + c, value, p.wide, kLanes);
    }
  }
}
#endif

#if defined(__AVX512F__)
// Whole panels to bytes: what `finish` computes, for four vectors of 16 columns at a time. Saturating packs do the
// clamping below and the narrowing, and the result leaves in four stores of 16 bytes; the one-by-one way costs three
// times as much, which shows wherever K is small.
struct ByteStore {
  uint8_t* out;
  const uint8_t* residual;
  __m512 highest, residual_scale;
  __m512i zero, lowest, residual_zero;

  explicit ByteStore(const Int8Problem& p)
      : out(static_cast<uint8_t*>(p.out)),
        residual(p.residual),
        highest(_mm512_set1_ps(static_cast<float>(p.finish.high - p.finish.zero))),
        residual_scale(_mm512_set1_ps(p.residual_scale)),
        zero(_mm512_set1_epi16(static_cast<int16_t>(p.finish.zero))),
        lowest(_mm512_set1_epi8(static_cast<char>(p.finish.low))),
        residual_zero(_mm512_set1_epi32(p.residual_zero)) {}

  template <ByteWay W>
  TW_INLINE __m512i rounded(const Int8Problem& p, vi sum, __m512 scale, int64_t residual_at) const {
    __m512 value = _mm512_mul_ps((__m512) __builtin_convertvector(sum, vf), scale);
    if (adds_residual<W>(p)) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(residual + residual_at));
      const __m512i skip = _mm512_sub_epi32(_mm512_maskz_cvtepu8_epi32(0xffff, bytes), residual_zero);
      value = _mm512_add_ps(value, _mm512_mul_ps((__m512) __builtin_convertvector((vi)skip, vf), residual_scale));
    }
    if constexpr (W == ByteWay::pieces) return (__m512i)in_pieces((vf)value, p.finish.pieces);
    value = (__m512)bent<curve_of(W)>((vf)value, p.finish.bend);
    // The conversion rounds ties to even. (gcc 12 warns of its own header without the masks; they cost nothing.)
    return _mm512_maskz_cvtps_epi32(0xffff, _mm512_maskz_min_ps(0xffff, highest, value));
  }

  TW_INLINE void store(__m512i a, __m512i b, __m512i c, __m512i d, const int64_t* at) const {
    const __m512i ab = _mm512_adds_epi16(_mm512_packs_epi32(a, b), zero);
    const __m512i cd = _mm512_adds_epi16(_mm512_packs_epi32(c, d), zero);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes =
        _mm512_maskz_permutexvar_epi32(0xffff, order, _mm512_max_epu8(_mm512_packus_epi16(ab, cd), lowest));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + at[0]), _mm512_maskz_extracti32x4_epi32(0xf, bytes, 0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + at[1]), _mm512_maskz_extracti32x4_epi32(0xf, bytes, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + at[2]), _mm512_maskz_extracti32x4_epi32(0xf, bytes, 2));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + at[3]), _mm512_maskz_extracti32x4_epi32(0xf, bytes, 3));
  }
};

template <int R, int P, ByteWay W>
TW_INLINE void finish_bytes(const Int8Problem& p, const vi (&acc)[R][P], const RowOffsets& at, int first, int column) {
  const ByteStore to(p);
  __m512 scale[P];
#pragma GCC unroll 4
  for (int v = 0; v < P; ++v) scale[v] = (__m512)load(p.scale + column + v * kLanes);
#pragma GCC unroll 16
  for (int i = 0; i < R * P; i += 4) {
    __m512i value[4];
    int64_t out_at[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const int r = (i + j) / P, v = (i + j) % P;
      out_at[j] = at.out[first + r] + column + v * kLanes;
      value[j] = to.rounded<W>(p, acc[r][v], scale[v], at.residual[first + r] + column + v * kLanes);
    }
    to.store(value[0], value[1], value[2], value[3], out_at);
  }
}
#elif defined(__AVX2__)
// The same with vectors of 8 columns: four of them, two rows of a panel or four of half a panel, leave as 32 bytes.
template <ByteWay W>
TW_INLINE __m256i rounded(const Int8Problem& p, vi sum, __m256 scale, __m256 highest, int64_t residual_at) {
  __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps((__m256i)sum), scale);
  if (adds_residual<W>(p)) {
    const __m256i skip =
        _mm256_sub_epi32((__m256i)widen_bytes(p.residual + residual_at), _mm256_set1_epi32(p.residual_zero));
    value = _mm256_add_ps(value, _mm256_mul_ps(_mm256_cvtepi32_ps(skip), _mm256_set1_ps(p.residual_scale)));
  }
  value = (__m256)bent<curve_of(W)>((vf)value, p.finish.bend);
  return _mm256_cvtps_epi32(_mm256_min_ps(highest, value));  // rounds ties to even
}

// What in_pieces() computes, of 16 values in 16 bits each.
struct ShortPieces {
  __m256i c0, c1, c2, far, step, shift, twice = _mm256_set1_epi16(0x0202);

  explicit ShortPieces(const Uint8Piecewise& p)
      : c0(eight(p.c0)),
        c1(eight(p.c1)),
        c2(eight(p.c2)),
        far(_mm256_set1_epi16(static_cast<int16_t>(32767 >> p.shift))),
        step(_mm256_set1_epi16(p.step)),
        shift(_mm256_set1_epi16(static_cast<int16_t>(1 << p.shift))) {
    asm("" : "+x"(twice));  // a product by a constant that is known becomes four operations
  }

  static __m256i eight(const int16_t* numbers) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers)));
  }

  TW_INLINE __m256i of(__m256i u) const {
    const __m256i t = _mm256_mullo_epi16(_mm256_min_epu16(_mm256_abs_epi16(u), far), shift);
    const __m256i at = _mm256_mullo_epi16(_mm256_srli_epi16(t, 12), twice);
    const __m256i bytes = _mm256_add_epi16(at, _mm256_set1_epi16(0x0100));  // of the number, among the sixteen of eight
    const __m256i slope =
        _mm256_add_epi16(_mm256_shuffle_epi8(c1, bytes), _mm256_mulhrs_epi16(t, _mm256_shuffle_epi8(c2, bytes)));
    const __m256i rest = _mm256_sub_epi16(_mm256_max_epi16(u, _mm256_setzero_si256()), _mm256_shuffle_epi8(c0, bytes));
    return _mm256_mulhrs_epi16(_mm256_sub_epi16(rest, _mm256_mulhrs_epi16(t, slope)), step);
  }
};

template <int R, int V, ByteWay W>
TW_INLINE void finish_bytes(const Int8Problem& p, const vi (&acc)[R][V], const RowOffsets& at, int first, int column) {
  static_assert(V <= 2 && R * V % 4 == 0, "four vectors at a time");
  const __m256 highest =
      _mm256_set1_ps(static_cast<float>(W == ByteWay::pieces ? kMostInPieces : p.finish.high - p.finish.zero));
  const ShortPieces pieces(p.finish.pieces);
  const __m256i zero = _mm256_set1_epi16(static_cast<int16_t>(p.finish.zero)),
                lowest = _mm256_set1_epi8(static_cast<char>(p.finish.low));
#pragma GCC unroll 2
  for (int r = 0; r < R; r += 4 / V) {
    __m256i part[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int64_t skip = at.residual[first + r + i / V] + column + i % V * kLanes;
      part[i] = rounded<W>(p, acc[r + i / V][i % V], (__m256)load(p.scale + column + i % V * kLanes), highest, skip);
    }
    __m256i top = _mm256_packs_epi32(part[0], part[1]), bottom = _mm256_packs_epi32(part[2], part[3]);
    if constexpr (W == ByteWay::pieces) top = pieces.of(top), bottom = pieces.of(bottom);
    const __m256i bytes = bytes_in_order(top, bottom, zero, lowest);
    const __m128i low = _mm256_castsi256_si128(bytes), high = _mm256_extracti128_si256(bytes, 1);
    uint8_t* out = static_cast<uint8_t*>(p.out) + column;
    const int64_t* to = at.out + first + r;
    if constexpr (V == 2) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + to[0]), low);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + to[1]), high);
    } else {
      _mm_storel_epi64(reinterpret_cast<__m128i*>(out + to[0]), low);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(out + to[1]), _mm_unpackhi_epi64(low, low));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(out + to[2]), high);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(out + to[3]), _mm_unpackhi_epi64(high, high));
    }
  }
}
#endif

#if defined(__AVX2__)
// By a way that is known.
template <int R, int V, ByteWay W>
TW_INLINE void finish_whole(const Int8Problem& p, const vi (&acc)[R][V], const RowOffsets& at, int first, int column) {
  if constexpr (W == ByteWay::table) {
    finish_by_table(p, acc, at, first, column);
  } else if constexpr (W == ByteWay::shorts) {
    finish_shorts(p, acc, at, first, column);
  } else {
    finish_bytes<R, V, W>(p, acc, at, first, column);
  }
}

// The columns that `finish_whole` may be given: of bytes also those that pad the last group, where they become the zero
// point.
inline int whole_columns(const Int8Problem& p) {
  if (p.kind == Int8Out::int16) return p.columns;
  return p.kind != Int8Out::uint8 ? 0 : p.finish.curve == Approximation::lookup_table ? p.columns : p.out_columns;
}
#endif

// Whole panels to float32, or to the plain int32 sums.
template <int R, int V>
TW_INLINE void finish_words(const Int8Problem& p, const vi (&acc)[R][V], const RowOffsets& at, int first, int64_t row,
                            int column) {
  float* out = static_cast<float*>(p.out) + column;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      vf value = (vf)acc[r][v];
      if (p.kind == Int8Out::float32) {
        value = __builtin_convertvector(acc[r][v], vf) * load(p.scale + column + v * kLanes);
        value = finish_float(p, value, row + r, column + v * kLanes);
      }
      store(out + at.out[first + r] + v * kLanes, value);
    }
  }
}

template <int R, int P>
TW_INLINE void finish_tile(const Int8Problem& p, const vi (&acc)[R][P * kVectors], const RowOffsets& at, int first,
                           int64_t row, int panel) {
  const int column = panel * kInt8Panel;
  if (p.kind == Int8Out::uint8 && p.finish.curve == Approximation::lookup_table &&
      column + P * kInt8Panel <= p.columns) {
    return finish_by_table(p, acc, at, first, column);
  }
  if ((p.kind == Int8Out::float32 || p.kind == Int8Out::int32) && column + P * kInt8Panel <= p.out_columns) {
    return finish_words(p, acc, at, first, row, column);
  }
#if defined(__AVX2__)
  if (p.kind == Int8Out::int16 && column + P * kInt8Panel <= p.columns) return finish_shorts(p, acc, at, first, column);
  if constexpr (kVectors == 1 ? R * P % 4 == 0 : P == 1 && R % 2 == 0) {
    if (p.kind == Int8Out::uint8 && p.finish.curve != Approximation::lookup_table &&
        column + P * kInt8Panel <= p.out_columns) {
      return with_way(p, [&](auto known) {
        if constexpr (known.value < ByteWay::table)
          finish_bytes<R, P * kVectors, known.value>(p, acc, at, first, column);
      });
    }
  }
#endif
  // Partial panels. Unrolled, this rare case with all its branches was half of the compile time of int8.cpp.
#pragma GCC unroll 1
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 1
    for (int v = 0; v < P * kVectors; ++v) {
      finish(p, acc[r][v], row + r, at.out[first + r], at.residual[first + r], column + v * kLanes);
    }
  }
}

}  // namespace TW_ISA
}  // namespace tw
