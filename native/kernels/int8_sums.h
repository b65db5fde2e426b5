// The output stage of a register tile: scales the sums, adds bias and residual, applies the activation, and stores
// int32, float32, uint8 or int16. Compiled with -ffp-contract=off, like int8.cpp.
#pragma once

#include "common/simd.h"
#include "kernels/int8.h"
#include "kernels/int8_requantize.h"

namespace tw {
namespace TW_ISA {

constexpr int kVectors = kInt8Panel / kLanes;  // vectors per panel

// Offsets of a block's rows in the input, the output and the residual. The added 24 keep the arrays from being a
// multiple of 4 KiB apart, which would make them share cache sets.
struct RowOffsets {
  int64_t in[kInt8MaxRows + 24], out[kInt8MaxRows + 24], residual[kInt8MaxRows + 24];
};

// Fills the offsets of `count` neighbouring pixels of one image row.
inline void fill_row(int64_t* to, const PixelGrid& grid, int64_t image, int64_t y, int64_t x, int count) {
  const int64_t start = image * grid.image_step + y * grid.row_step + x * grid.column_step;
  for (int i = 0; i < count; ++i) to[i] = start + i * grid.column_step;
}

// Fills the offsets of `count` pixels from pixel `first` of the problem on, one image row after the other.
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

// Row scale, bias and ReLU of a float32 result.
TW_INLINE vf apply_float_epilogue(const Int8Problem& p, vf value, int64_t row, int column) {
  if (p.row_scale != nullptr) value = value * splat(p.row_scale[row]);
  if (p.bias != nullptr) value = value + load(p.bias + column);
  if (p.relu) value = select(value < splat(0.0f), splat(0.0f), value);
  return value;
}

// Loads and dequantizes a vector of the residual.
TW_INLINE vf residual_at(const Int8Problem& p, int64_t offset, int lanes) {
  if (p.int16_residual) {
    const vi numbers = load_int16(reinterpret_cast<const int16_t*>(p.residual) + offset, lanes);
    return dequantize_lanes(numbers, p.residual_zero, p.residual_scale);
  }
  return dequantize_lanes(load_bytes(p.residual + offset, lanes), p.residual_zero, p.residual_scale);
}

// Requantizes and stores one vector of sums, which already include the offsets of their columns.
TW_INLINE void requantize(const Int8Problem& p, vi sum, int64_t row, int64_t out_offset, int64_t residual_offset,
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
    store_first(static_cast<float*>(p.out) + out_offset + column, apply_float_epilogue(p, value, row, column), lanes);
    return;
  }
  if (p.residual != nullptr) value = value + residual_at(p, residual_offset + column, lanes);
  if (p.kind == Int8Out::int16)
    return requantize_store_int16(static_cast<int16_t*>(p.out) + out_offset + column, value, p.int16_stage, lanes);
  uint8_t* to = static_cast<uint8_t*>(p.out) + out_offset + column;
  const int own = p.columns - column;  // columns added up to a group of 4 must not receive a table entry
  if (p.uint8_stage.approximation == Approximation::lookup_table && own < lanes) lanes = own;
  dispatch_approximation(p.uint8_stage,
                         [&](auto constant) { requantize_store<constant.value>(to, value, p.uint8_stage, lanes); });
}

// The code that requantizes full tiles.
enum class OutputPath { plain, residual, parabola, piecewise, table, int16 };

constexpr Approximation approximation_of(OutputPath path) {
  return path == OutputPath::parabola ? Approximation::parabola : Approximation::none;
}

// Returns whether a residual is added, a compile-time constant except in two paths.
template <OutputPath W>
TW_INLINE bool adds_residual(const Int8Problem& p) {
  return W == OutputPath::parabola || W == OutputPath::piecewise ? p.residual != nullptr : W == OutputPath::residual;
}

template <OutputPath W>
struct OutputPathConstant {
  static constexpr OutputPath value = W;
};

// Calls f with the output path as a compile-time constant.
template <class F>
TW_INLINE void dispatch_output_path(const Int8Problem& p, F&& f) {
  if (p.kind == Int8Out::int16) return f(OutputPathConstant<OutputPath::int16>());
  if (p.uint8_stage.approximation == Approximation::lookup_table) return f(OutputPathConstant<OutputPath::table>());
  if (p.uint8_stage.approximation == Approximation::parabola) return f(OutputPathConstant<OutputPath::parabola>());
  if (p.uint8_stage.approximation == Approximation::piecewise) return f(OutputPathConstant<OutputPath::piecewise>());
  p.residual != nullptr ? f(OutputPathConstant<OutputPath::residual>()) : f(OutputPathConstant<OutputPath::plain>());
}

// Requantizes a tile by lookup table: all indices first, then all loads, so that they overlap.
template <int R, int V>
TW_INLINE void requantize_by_table(const Int8Problem& p, const vi (&acc)[R][V], const RowOffsets& at, int first,
                                   int column) {
  constexpr int kColumns = V * kLanes;
  int32_t index[R][kColumns];
#pragma GCC unroll 1
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      vf value = __builtin_convertvector(acc[r][v], vf) * load(p.scale + column + v * kLanes);
      if (p.residual != nullptr) value = value + residual_at(p, at.residual[first + r] + column + v * kLanes, kLanes);
      const vi indices = table_indices(value, p.uint8_stage.table);
      std::memcpy(&index[r][v * kLanes], &indices, sizeof indices);
    }
  }
  const uint8_t* bytes = p.uint8_stage.table.bytes;
#pragma GCC unroll 1
  for (int r = 0; r < R; ++r) {
    uint8_t* to = static_cast<uint8_t*>(p.out) + at.out[first + r] + column;
#pragma GCC unroll 64
    for (int c = 0; c < kColumns; ++c) to[c] = bytes[index[r][c]];
  }
}

#if defined(__AVX2__)
// Scales a vector of sums and adds the residual.
template <bool kResidual>
TW_INLINE vf scaled_sum(const Int8Problem& p, vi sum, const RowOffsets& at, int r, int column) {
  const vf value = __builtin_convertvector(sum, vf) * load(p.scale + column);
  if constexpr (kResidual) return value + residual_at(p, at.residual[r] + column, kLanes);
  return value;
}

// Rounds to int16 with the upper bound `most`, saturating below. With AVX2 the result of two vectors has the order of a
// pack.
#if defined(__AVX512F__)
TW_INLINE __m256i round_sixteen(vf value, vf most) {
  const __m512 bounded = _mm512_maskz_min_ps(0xffff, (__m512)most, (__m512)value);  // returns `value` for a NaN
  return _mm512_maskz_cvtsepi32_epi16(0xffff, _mm512_maskz_cvtps_epi32(0xffff, bounded));
}
#else
TW_INLINE __m256i round_sixteen(vf first, vf second, vf most) {
  return _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_min_ps((__m256)most, (__m256)first)),
                            _mm256_cvtps_epi32(_mm256_min_ps((__m256)most, (__m256)second)));
}
#endif

// Requantizes sixteen sums at a time: one row of a panel, or two rows of half a panel.
template <int R, int V, bool kPiecewise, bool kResidual>
TW_INLINE void requantize_int16_vectors(const Int8Problem& p, const vi (&acc)[R][V], const RowOffsets& at, int first,
                                        int column) {
  const Int16PiecewiseVectors curve(p.int16_stage);
  const vf most = splat(Int16PiecewiseVectors::most(p.int16_stage));
  int16_t* out = static_cast<int16_t*>(p.out) + column;
#if defined(__AVX512F__)
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const __m256i whole =
          round_sixteen(scaled_sum<kResidual>(p, acc[r][v], at, first + r, column + v * kLanes), most);
      const __m256i numbers = kPiecewise ? curve.evaluate(whole) : curve.clamp(whole);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + at.out[first + r] + v * kLanes), numbers);
    }
  }
#else
  static_assert(V % 2 == 0 || (V == 1 && R % 2 == 0), "two vectors at a time");
#pragma GCC unroll 16
  for (int i = 0; i < R * V; i += 2) {
    const int r = i / V, v = i % V, next = (i + 1) / V, beside = (i + 1) % V;
    const __m256i packed =
        round_sixteen(scaled_sum<kResidual>(p, acc[r][v], at, first + r, column + v * kLanes),
                      scaled_sum<kResidual>(p, acc[next][beside], at, first + next, column + beside * kLanes), most);
    const __m256i numbers = _mm256_permute4x64_epi64(kPiecewise ? curve.evaluate(packed) : curve.clamp(packed), 0xd8);
    if constexpr (V % 2 == 0) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + at.out[first + r] + v * kLanes), numbers);
    } else {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + at.out[first + r]), _mm256_castsi256_si128(numbers));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + at.out[first + next]), _mm256_extracti128_si256(numbers, 1));
    }
  }
#endif
}

// Requantizes a tile to int16. The branches on activation and residual are outside the loops.
template <int R, int V>
TW_INLINE void requantize_to_int16(const Int8Problem& p, const vi (&acc)[R][V], const RowOffsets& at, int first,
                                   int column) {
  if constexpr (kVectors == 1 || V % 2 == 0 || R % 2 == 0) {
    if (p.int16_stage.activation == Int16Activation::none) {
      return p.residual != nullptr ? requantize_int16_vectors<R, V, false, true>(p, acc, at, first, column)
                                   : requantize_int16_vectors<R, V, false, false>(p, acc, at, first, column);
    }
    if (p.int16_stage.activation == Int16Activation::piecewise && p.residual == nullptr) {
      return requantize_int16_vectors<R, V, true, false>(p, acc, at, first, column);
    }
  }
#pragma GCC unroll 1
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 1
    for (int v = 0; v < V; ++v) {
      const int c = column + v * kLanes;
      const vf value = p.residual != nullptr ? scaled_sum<true>(p, acc[r][v], at, first + r, c)
                                             : scaled_sum<false>(p, acc[r][v], at, first + r, c);
      requantize_store_int16(static_cast<int16_t*>(p.out) + at.out[first + r] + c, value, p.int16_stage, kLanes);
    }
  }
}
#endif

#if defined(__AVX512F__)
// Requantizes full panels to uint8, four vectors of 16 columns at a time. Saturating packs clamp and narrow them, and
// the result is stored as four times 16 bytes. One vector at a time takes three times as long, which shows if K is
// small.
struct ByteStore {
  uint8_t* out;
  const uint8_t* residual;
  __m512 highest, residual_scale;
  __m512i zero, lowest, residual_zero;

  explicit ByteStore(const Int8Problem& p)
      : out(static_cast<uint8_t*>(p.out)),
        residual(p.residual),
        highest(_mm512_set1_ps(static_cast<float>(p.uint8_stage.high - p.uint8_stage.zero))),
        residual_scale(_mm512_set1_ps(p.residual_scale)),
        zero(_mm512_set1_epi16(static_cast<int16_t>(p.uint8_stage.zero))),
        lowest(_mm512_set1_epi8(static_cast<char>(p.uint8_stage.low))),
        residual_zero(_mm512_set1_epi32(p.residual_zero)) {}

  // Scales a vector of sums, adds the residual, applies the activation and rounds, without the zero point.
  template <OutputPath W>
  TW_INLINE __m512i rounded(const Int8Problem& p, vi sum, __m512 scale, int64_t residual_at) const {
    __m512 value = _mm512_mul_ps((__m512) __builtin_convertvector(sum, vf), scale);
    if (adds_residual<W>(p)) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(residual + residual_at));
      const __m512i skip = _mm512_sub_epi32(_mm512_maskz_cvtepu8_epi32(0xffff, bytes), residual_zero);
      value = _mm512_add_ps(value, _mm512_mul_ps((__m512) __builtin_convertvector((vi)skip, vf), residual_scale));
    }
    if constexpr (W == OutputPath::piecewise) return (__m512i)silu_piecewise((vf)value, p.uint8_stage.piecewise);
    value = (__m512)apply_parabola<approximation_of(W)>((vf)value, p.uint8_stage.parabola);
    // The conversion rounds ties to even. (gcc 12 warns of its own header without the masks; they cost nothing.)
    return _mm512_maskz_cvtps_epi32(0xffff, _mm512_maskz_min_ps(0xffff, highest, value));
  }

  // Adds the zero point to four rounded vectors, clamps and stores them at four offsets.
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

// Requantizes a register tile of sums to uint8 and stores it, four vectors at a time (AVX-512).
template <int R, int P, OutputPath W>
TW_INLINE void requantize_to_uint8(const Int8Problem& p, const vi (&acc)[R][P], const RowOffsets& at, int first,
                                   int column) {
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
// Scales one vector of 8 sums, adds the residual, applies the parabola and rounds. Four of them (two rows of a panel or
// four rows of half a panel) are stored as 32 bytes.
template <OutputPath W>
TW_INLINE __m256i rounded(const Int8Problem& p, vi sum, __m256 scale, __m256 highest, int64_t residual_at) {
  __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps((__m256i)sum), scale);
  if (adds_residual<W>(p)) {
    const __m256i skip =
        _mm256_sub_epi32((__m256i)widen_bytes(p.residual + residual_at), _mm256_set1_epi32(p.residual_zero));
    value = _mm256_add_ps(value, _mm256_mul_ps(_mm256_cvtepi32_ps(skip), _mm256_set1_ps(p.residual_scale)));
  }
  value = (__m256)apply_parabola<approximation_of(W)>((vf)value, p.uint8_stage.parabola);
  return _mm256_cvtps_epi32(_mm256_min_ps(highest, value));  // rounds ties to even
}

// Evaluates silu_piecewise() for 16 int16 values.
struct SiluPiecewiseVectors {
  __m256i c0, c1, c2, far, step, shift, twice = _mm256_set1_epi16(0x0202);

  explicit SiluPiecewiseVectors(const Uint8Piecewise& p)
      : c0(eight(p.c0)),
        c1(eight(p.c1)),
        c2(eight(p.c2)),
        far(_mm256_set1_epi16(static_cast<int16_t>(32767 >> p.shift))),
        step(_mm256_set1_epi16(p.step)),
        shift(_mm256_set1_epi16(static_cast<int16_t>(1 << p.shift))) {
    asm("" : "+x"(twice));  // hides the constant: gcc would replace the multiplication by four operations
  }

  static __m256i eight(const int16_t* numbers) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers)));
  }

  TW_INLINE __m256i evaluate(__m256i u) const {
    const __m256i t = _mm256_mullo_epi16(_mm256_min_epu16(_mm256_abs_epi16(u), far), shift);
    const __m256i at = _mm256_mullo_epi16(_mm256_srli_epi16(t, 12), twice);
    const __m256i bytes = _mm256_add_epi16(at, _mm256_set1_epi16(0x0100));  // byte indices of the coefficient
    const __m256i slope =
        _mm256_add_epi16(_mm256_shuffle_epi8(c1, bytes), _mm256_mulhrs_epi16(t, _mm256_shuffle_epi8(c2, bytes)));
    const __m256i difference =
        _mm256_sub_epi16(_mm256_max_epi16(u, _mm256_setzero_si256()), _mm256_shuffle_epi8(c0, bytes));
    return _mm256_mulhrs_epi16(_mm256_sub_epi16(difference, _mm256_mulhrs_epi16(t, slope)), step);
  }
};

// Requantizes a register tile of sums to uint8 and stores it, four vectors at a time (AVX2).
template <int R, int V, OutputPath W>
TW_INLINE void requantize_to_uint8(const Int8Problem& p, const vi (&acc)[R][V], const RowOffsets& at, int first,
                                   int column) {
  static_assert(V <= 2 && R * V % 4 == 0, "four vectors at a time");
  const __m256 highest = _mm256_set1_ps(
      static_cast<float>(W == OutputPath::piecewise ? kMaxPiecewiseInput : p.uint8_stage.high - p.uint8_stage.zero));
  const SiluPiecewiseVectors silu(p.uint8_stage.piecewise);
  const __m256i zero = _mm256_set1_epi16(static_cast<int16_t>(p.uint8_stage.zero)),
                lowest = _mm256_set1_epi8(static_cast<char>(p.uint8_stage.low));
#pragma GCC unroll 2
  for (int r = 0; r < R; r += 4 / V) {
    __m256i part[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int64_t skip = at.residual[first + r + i / V] + column + i % V * kLanes;
      part[i] = rounded<W>(p, acc[r + i / V][i % V], (__m256)load(p.scale + column + i % V * kLanes), highest, skip);
    }
    __m256i top = _mm256_packs_epi32(part[0], part[1]), bottom = _mm256_packs_epi32(part[2], part[3]);
    if constexpr (W == OutputPath::piecewise) top = silu.evaluate(top), bottom = silu.evaluate(bottom);
    const __m256i bytes = pack_uint8_in_order(top, bottom, zero, lowest);
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
// Requantizes full panels by a known path.
template <int R, int V, OutputPath W>
TW_INLINE void requantize_whole_panel(const Int8Problem& p, const vi (&acc)[R][V], const RowOffsets& at, int first,
                                      int column) {
  if constexpr (W == OutputPath::table) {
    requantize_by_table(p, acc, at, first, column);
  } else if constexpr (W == OutputPath::int16) {
    requantize_to_int16(p, acc, at, first, column);
  } else {
    requantize_to_uint8<R, V, W>(p, acc, at, first, column);
  }
}

// The columns that `requantize_whole_panel` may write. For uint8 they include the padding of the last group, which
// receives the zero point.
inline int whole_columns(const Int8Problem& p) {
  if (p.kind == Int8Out::int16) return p.columns;
  return p.kind != Int8Out::uint8                                     ? 0
         : p.uint8_stage.approximation == Approximation::lookup_table ? p.columns
                                                                      : p.out_columns;
}
#endif

// Stores full panels as float32, or as int32 sums.
template <int R, int V>
TW_INLINE void store_float32_or_int32(const Int8Problem& p, const vi (&acc)[R][V], const RowOffsets& at, int first,
                                      int64_t row, int column) {
  float* out = static_cast<float*>(p.out) + column;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      vf value = (vf)acc[r][v];
      if (p.kind == Int8Out::float32) {
        value = __builtin_convertvector(acc[r][v], vf) * load(p.scale + column + v * kLanes);
        value = apply_float_epilogue(p, value, row + r, column + v * kLanes);
      }
      store(out + at.out[first + r] + v * kLanes, value);
    }
  }
}

// The output stage of a tile: R rows by P panels of sums, in the fastest way that applies.
template <int R, int P>
TW_INLINE void requantize_tile(const Int8Problem& p, const vi (&acc)[R][P * kVectors], const RowOffsets& at, int first,
                               int64_t row, int panel) {
  const int column = panel * kInt8Panel;
  if (p.kind == Int8Out::uint8 && p.uint8_stage.approximation == Approximation::lookup_table &&
      column + P * kInt8Panel <= p.columns) {
    return requantize_by_table(p, acc, at, first, column);
  }
  if ((p.kind == Int8Out::float32 || p.kind == Int8Out::int32) && column + P * kInt8Panel <= p.out_columns) {
    return store_float32_or_int32(p, acc, at, first, row, column);
  }
#if defined(__AVX2__)
  if (p.kind == Int8Out::int16 && column + P * kInt8Panel <= p.columns)
    return requantize_to_int16(p, acc, at, first, column);
  if constexpr (kVectors == 1 ? R * P % 4 == 0 : P == 1 && R % 2 == 0) {
    if (p.kind == Int8Out::uint8 && p.uint8_stage.approximation != Approximation::lookup_table &&
        column + P * kInt8Panel <= p.out_columns) {
      return dispatch_output_path(p, [&](auto constant) {
        if constexpr (constant.value < OutputPath::table)
          requantize_to_uint8<R, P * kVectors, constant.value>(p, acc, at, first, column);
      });
    }
  }
#endif
  // Partial panels. Unrolled, this rare case with all its branches took half of the compile time of int8.cpp.
#pragma GCC unroll 1
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 1
    for (int v = 0; v < P * kVectors; ++v) {
      requantize(p, acc[r][v], row + r, at.out[first + r], at.residual[first + r], column + v * kLanes);
    }
  }
}

}  // namespace TW_ISA
}  // namespace tw
