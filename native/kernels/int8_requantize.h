// Requantization: real values in units of the output become uint8 or int16, with the activation approximated on the
// way. Files that include this header are compiled with -ffp-contract=off, so that every instruction set produces the
// same integers.
#pragma once

#include "common/simd.h"
#include "kernels/int8_elementwise.h"
#include "kernels/math.h"
#include "kernels/rounding.h"

namespace tw {
namespace TW_ISA {
namespace {

// Loads the first n bytes (n <= kLanes) into lanes. Memory after them is not read.
TW_INLINE vi load_bytes(const uint8_t* p, int n) {
#if defined(__AVX512F__)
  return (vi)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_maskz_loadu_epi8(lane_mask(n), p));
#else
  if (n == kLanes) return widen_bytes(p);
  uint8_t bytes[kLanes] = {};
  std::memcpy(bytes, p, n);
  return widen_bytes(bytes);
#endif
}

// Stores the low bytes of the first n lanes.
TW_INLINE void store_bytes(uint8_t* p, vi v, int n) {
#if defined(__AVX512F__)
  _mm512_mask_cvtepi32_storeu_epi8(p, lane_mask(n), (__m512i)v);
#else
  if (n == kLanes) return store_low_bytes(p, v);
  uint8_t bytes[kLanes];
  store_low_bytes(bytes, v);
  std::memcpy(p, bytes, n);
#endif
}

// Dequantizes lanes: (q - zero) * scale.
TW_INLINE vf dequantize_lanes(vi bytes, int zero, float scale) {
  return __builtin_convertvector(bytes - zero, vf) * splat(scale);
}

// Rounds to integers (ties to even) and clamps to [low, high]. A NaN becomes `low`.
TW_INLINE vi round_to_range(vf value, int low, int high) {
  const vf least = splat(static_cast<float>(low)), most = splat(static_cast<float>(high));
#if defined(__AVX512F__)  // (gcc 12 warns of its own header without the masks; they cost nothing)
  const __m512 clamped =
      _mm512_maskz_min_ps(0xffff, _mm512_maskz_max_ps(0xffff, (__m512)value, (__m512)least), (__m512)most);
  return (vi)_mm512_maskz_cvtps_epi32(0xffff, clamped);
#elif defined(__AVX2__)
  return (vi)_mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps((__m256)value, (__m256)least), (__m256)most));
#else
  value = select(value > least, value, least);
  value = select(value < most, value, most);
  return __builtin_convertvector(round_even(value), vi);
#endif
}

// Clamps from below or above. A NaN becomes the bound.
TW_INLINE vf at_least(vf value, vf bound) {
#if defined(__AVX512F__)
  return (vf)_mm512_maskz_max_ps(0xffff, (__m512)value, (__m512)bound);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)value, (__m256)bound);
#else
  return select(value > bound, value, bound);
#endif
}
TW_INLINE vf at_most(vf value, vf bound) {
#if defined(__AVX512F__)
  return (vf)_mm512_maskz_min_ps(0xffff, (__m512)value, (__m512)bound);
#elif defined(__AVX2__)
  return (vf)_mm256_min_ps((__m256)value, (__m256)bound);
#else
  return select(value < bound, value, bound);
#endif
}

// Applies the approximation `Parabola` (hard-swish) if C asks for it.
template <Approximation C>
TW_INLINE vf apply_parabola(vf value, const Parabola& b) {
  if constexpr (C == Approximation::parabola) {
    const vf d = at_most((vf)((vi)value & 0x7fffffff), splat(b.far));
    return at_least(value, splat(0.0f)) - d * (d * splat(b.slope) + splat(0.5f));
  }
  return value;
}

TW_INLINE vi smaller(vi a, vi b) { return a < b ? a : b; }
TW_INLINE vi larger(vi a, vi b) { return a > b ? a : b; }

// Each lane selects one of eight coefficients by `at`.
TW_INLINE vi coefficient_at(const int16_t (&numbers)[8], vi at) {
#if defined(__AVX512F__)
  const __m256i eight = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers)));
  return (vi)_mm512_maskz_permutexvar_epi32(0xffff, (__m512i)at, _mm512_maskz_broadcast_i64x4(0xff, eight));
#elif defined(__AVX2__)
  const __m256i eight = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers)));
  return (vi)_mm256_permutevar8x32_epi32(eight, (__m256i)at);
#else
  vi result;
  for (int i = 0; i < kLanes; ++i) result[i] = numbers[at[i]];
  return result;
#endif
}

// The fixed-point product of vpmulhrsw: round(a * b / 2^15), ties upwards.
TW_INLINE vi high_product(vi a, vi b) { return (a * b + (1 << 14)) >> 15; }

// Evaluates SiLU by its piecewise polynomial, in units of the output and without the zero point.
TW_INLINE vi silu_piecewise(vf value, const Uint8Piecewise& p) {
  const vi u = round_to_range(value, -32767, kMaxPiecewiseInput), zeros = {};
  const vi t = smaller(larger(u, -u), zeros + (32767 >> p.shift)) << p.shift, at = t >> 12;
  const vi slope = coefficient_at(p.c1, at) + high_product(t, coefficient_at(p.c2, at));
  return high_product(larger(u, zeros) - coefficient_at(p.c0, at) - high_product(t, slope), zeros + p.step);
}

// The indices of values in the lookup table.
TW_INLINE vi table_indices(vf value, const LookupTable& t) {
  return round_to_range(value * splat(t.fine), t.first, t.last) - t.first;
}

// Requantizes and stores the first n values. The approximation is a template argument so that loops do not branch on
// it.
template <Approximation C>
TW_INLINE void requantize_store(uint8_t* p, vf value, const Uint8Stage& f, int n) {
  if constexpr (C == Approximation::lookup_table) {
    int32_t index[kLanes];
    const vi indices = table_indices(value, f.table);
    std::memcpy(index, &indices, sizeof index);
    if (n == kLanes) {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) p[i] = f.table.bytes[index[i]];
    } else {
      for (int i = 0; i < n; ++i) p[i] = f.table.bytes[index[i]];
    }
  } else if constexpr (C == Approximation::piecewise) {
    const vi zeros = {}, bytes = silu_piecewise(value, f.piecewise) + f.zero;
    store_bytes(p, smaller(larger(bytes, zeros + f.low), zeros + f.high), n);
  } else {
    store_bytes(p, round_to_range(apply_parabola<C>(value, f.parabola), f.low - f.zero, f.high - f.zero) + f.zero, n);
  }
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Packs 32 int16 values to uint8 and undoes the reordering of packs, which work within 128-bit halves.
TW_INLINE __m256i pack_uint8_in_order(__m256i first, __m256i second, __m256i zero, __m256i lowest) {
  const __m256i bytes = _mm256_packus_epi16(_mm256_adds_epi16(first, zero), _mm256_adds_epi16(second, zero));
  return _mm256_permutevar8x32_epi32(_mm256_max_epu8(bytes, lowest), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
#endif

// --- int16 ---

// Loads the first n int16 values (n <= kLanes) into lanes. Memory after them is not read.
TW_INLINE vi load_int16(const int16_t* p, int n) {
#if defined(__AVX512F__)
  return (vi)_mm512_maskz_cvtepi16_epi32(0xffff, _mm256_maskz_loadu_epi16(lane_mask(n), p));
#else
  int16_t buffer[kLanes] = {};
  if (n < kLanes) {
    std::memcpy(buffer, p, 2 * n);
    p = buffer;
  }
#if defined(__AVX2__)
  return (vi)_mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  vi v = {};
  for (int i = 0; i < kLanes; ++i) v[i] = p[i];
  return v;
#endif
#endif
}

// Stores the first n lanes as int16.
TW_INLINE void store_int16(int16_t* p, vi v, int n) {
#if defined(__AVX512F__)
  _mm512_mask_cvtepi32_storeu_epi16(p, lane_mask(n), (__m512i)v);
#else
  int16_t buffer[kLanes];
#if defined(__AVX2__)
  const __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  if (n == kLanes) return _mm_storeu_si128(reinterpret_cast<__m128i*>(p), shorts);
  std::memcpy(buffer, &shorts, sizeof buffer);
#else
  for (int i = 0; i < kLanes; ++i) buffer[i] = static_cast<int16_t>(v[i]);
#endif
  std::memcpy(p, buffer, 2 * n);
#endif
}

// Computes the activations of an int16 stage that are evaluated in floats.
TW_INLINE vf activate_int16(vf v, const Int16Stage& f) {
  switch (f.activation) {
    case Int16Activation::parabola:
      return apply_parabola<Approximation::parabola>(v, f.parabola);
    case Int16Activation::hard_sigmoid:
      return at_most(at_least(v + 3.0f, splat(0.0f)), splat(6.0f)) * (1.0f / 6.0f) * f.inverse;
    case Int16Activation::sigmoid:
      return 1.0f / (1.0f + vexp_of_sum(-v)) * f.inverse;
    case Int16Activation::silu:
      return v / (1.0f + vexp_of_sum(-v)) * f.inverse;
    case Int16Activation::gelu:
      return vgelu(v) * f.inverse;
    case Int16Activation::leaky_relu:
      return at_least(v, v * f.parabola.slope);
    default:
      return v;
  }
}

// Evaluates SiLU or GELU by the piecewise cubic of Int16Piecewise.
TW_INLINE vi int16_piecewise(vf value, const Int16Piecewise& p) {
  const vi u = round_to_range(value, -32767, p.most), zeros = {};
  const vi t = high_product(smaller(larger(u, -u), zeros + p.far), zeros + p.turn) << p.shift, at = t >> 12;
  const vi d = (t & 4095) << 3;
  vi h = coefficient_at(p.c[3], at);
  for (int power = 2; power >= 0; --power) h = coefficient_at(p.c[power], at) + high_product(d, h);
  return high_product(larger(u, zeros) - high_product(h, zeros + p.round), zeros + p.step);
}

// Applies the activation, rounds and stores the first n values.
TW_INLINE void requantize_store_int16(int16_t* p, vf value, const Int16Stage& f, int n) {
  const bool is_piecewise = f.activation == Int16Activation::piecewise;
  store_int16(
      p, is_piecewise ? int16_piecewise(value, f.piecewise) : round_to_range(activate_int16(value, f), f.low, f.high),
      n);
}

#if defined(__AVX2__)
// Evaluates int16_piecewise() for sixteen values, already rounded to int16 and in any order.
struct Int16PiecewiseVectors {
  __m256i c[4], far, turn, shift, round, step, low;  // the bytes of c are rotated by one, see evaluate()

  explicit Int16PiecewiseVectors(const Int16Stage& f)
      : far(_mm256_set1_epi16(f.piecewise.far)),
        turn(_mm256_set1_epi16(f.piecewise.turn)),
        shift(_mm256_set1_epi16(static_cast<int16_t>(1 << f.piecewise.shift))),
        round(_mm256_set1_epi16(f.piecewise.round)),
        step(_mm256_set1_epi16(f.piecewise.step)),
        low(_mm256_set1_epi16(static_cast<int16_t>(f.low))) {
    for (int i = 0; i < 4; ++i) {
      const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(f.piecewise.c[i]));
      c[i] = _mm256_broadcastsi128_si256(_mm_alignr_epi8(eight, eight, 15));
    }
  }

  // Looks up the piece that |u| is in, evaluates its cubic by Horner's rule in fixed point, and subtracts it from
  // max(u, 0).
  TW_INLINE __m256i evaluate(__m256i u) const {
    // |-32768| does not fit int16: the minimum is taken as unsigned.
    const __m256i t = _mm256_mullo_epi16(_mm256_mulhrs_epi16(_mm256_min_epu16(_mm256_abs_epi16(u), far), turn), shift);
    // Byte indices of coefficient i for the shuffle: 2i + 1 and 2i + 2, that is 0x202 i + 0x201.
    const __m256i at = _mm256_mulhi_epu16(_mm256_or_si256(t, _mm256_set1_epi16(0x0fff)), _mm256_set1_epi16(0x2020));
    const __m256i d = _mm256_srli_epi16(_mm256_slli_epi16(t, 4), 1);
    __m256i h = _mm256_shuffle_epi8(c[3], at);
#pragma GCC unroll 3
    for (int power = 2; power >= 0; --power)
      h = _mm256_add_epi16(_mm256_shuffle_epi8(c[power], at), _mm256_mulhrs_epi16(d, h));
    const __m256i difference =
        _mm256_sub_epi16(_mm256_max_epi16(u, _mm256_setzero_si256()), _mm256_mulhrs_epi16(h, round));
    return _mm256_mulhrs_epi16(difference, step);
  }
  TW_INLINE __m256i clamp(__m256i u) const { return _mm256_max_epi16(u, low); }

  // The largest value that may be rounded to int16.
  static float most(const Int16Stage& f) {
    return static_cast<float>(f.activation == Int16Activation::piecewise ? f.piecewise.most : f.high);
  }
  // Returns whether this class handles the activation. Others are evaluated one vector at a time.
  static bool supports(const Int16Stage& f) {
    return f.activation == Int16Activation::none || f.activation == Int16Activation::piecewise;
  }
};
#endif

template <Approximation C>
struct ApproximationConstant {
  static constexpr Approximation value = C;
};

// Calls f with the approximation as a compile-time constant.
template <class F>
TW_INLINE void dispatch_approximation(const Uint8Stage& stage, F&& f) {
  switch (stage.approximation) {
    case Approximation::none:
      return f(ApproximationConstant<Approximation::none>());
    case Approximation::parabola:
      return f(ApproximationConstant<Approximation::parabola>());
    case Approximation::piecewise:
      return f(ApproximationConstant<Approximation::piecewise>());
    case Approximation::lookup_table:
      return f(ApproximationConstant<Approximation::lookup_table>());
  }
}

}  // namespace
}  // namespace TW_ISA
}  // namespace tw
