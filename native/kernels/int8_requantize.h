// The end of an integer step: real numbers to bytes. For kernel files that are compiled with -ffp-contract=off: every
// byte is the same on every instruction set.
#pragma once

#include "common/simd.h"
#include "kernels/int8_elementwise.h"
#include "kernels/math.h"
#include "kernels/rounding.h"

namespace tw {
namespace TW_ISA {
namespace {

// The first n bytes (n <= kLanes) as lanes; memory past them is not read.
TW_INLINE vi first_bytes(const uint8_t* p, int n) {
#if defined(__AVX512F__)
  return (vi)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_maskz_loadu_epi8(lane_mask(n), p));
#else
  if (n == kLanes) return widen_bytes(p);
  uint8_t bytes[kLanes] = {};
  std::memcpy(bytes, p, n);
  return widen_bytes(bytes);
#endif
}

TW_INLINE void store_first_bytes(uint8_t* p, vi v, int n) {
#if defined(__AVX512F__)
  _mm512_mask_cvtepi32_storeu_epi8(p, lane_mask(n), (__m512i)v);
#else
  if (n == kLanes) return store_low_bytes(p, v);
  uint8_t bytes[kLanes];
  store_low_bytes(bytes, v);
  std::memcpy(p, bytes, n);
#endif
}

// Bytes by their scale: (q - zero) * scale.
TW_INLINE vf real_of(vi bytes, int zero, float scale) {
  return __builtin_convertvector(bytes - zero, vf) * splat(scale);
}

// The nearest whole numbers in [low, high], ties to even; a NaN becomes `low`.
TW_INLINE vi whole_in(vf value, int low, int high) {
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

// The larger one, and the smaller one; of a NaN the bound.
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

template <Approximation C>
TW_INLINE vf bent(vf value, const Parabola& b) {
  if constexpr (C == Approximation::parabola) {
    const vf d = at_most((vf)((vi)value & 0x7fffffff), splat(b.far));
    return at_least(value, splat(0.0f)) - d * (d * splat(b.slope) + splat(0.5f));
  }
  return value;
}

TW_INLINE vi smaller(vi a, vi b) { return a < b ? a : b; }
TW_INLINE vi larger(vi a, vi b) { return a > b ? a : b; }

// Lane by lane the number of eight that `at` says.
TW_INLINE vi one_of_eight(const int16_t (&numbers)[8], vi at) {
#if defined(__AVX512F__)
  const __m256i wide = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers)));
  return (vi)_mm512_maskz_permutexvar_epi32(0xffff, (__m512i)at, _mm512_maskz_broadcast_i64x4(0xff, wide));
#elif defined(__AVX2__)
  const __m256i wide = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers)));
  return (vi)_mm256_permutevar8x32_epi32(wide, (__m256i)at);
#else
  vi found;
  for (int i = 0; i < kLanes; ++i) found[i] = numbers[at[i]];
  return found;
#endif
}

TW_INLINE vi high_product(vi a, vi b) { return (a * b + (1 << 14)) >> 15; }

// SiLU in steps of the output, without its zero point.
TW_INLINE vi in_pieces(vf value, const Uint8Piecewise& p) {
  const vi u = whole_in(value, -32767, kMostInPieces), zeros = {};
  const vi t = smaller(larger(u, -u), zeros + (32767 >> p.shift)) << p.shift, at = t >> 12;
  const vi slope = one_of_eight(p.c1, at) + high_product(t, one_of_eight(p.c2, at));
  return high_product(larger(u, zeros) - one_of_eight(p.c0, at) - high_product(t, slope), zeros + p.step);
}

// Where in the table the values' bytes are.
TW_INLINE vi table_places(vf value, const LookupTable& t) {
  return whole_in(value * splat(t.fine), t.first, t.last) - t.first;
}

// The first n values as bytes. The curve is decided outside of loops.
template <Approximation C>
TW_INLINE void store_finished(uint8_t* p, vf value, const Uint8Stage& f, int n) {
  if constexpr (C == Approximation::lookup_table) {
    int32_t place[kLanes];
    const vi places = table_places(value, f.table);
    std::memcpy(place, &places, sizeof place);
    if (n == kLanes) {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) p[i] = f.table.bytes[place[i]];
    } else {
      for (int i = 0; i < n; ++i) p[i] = f.table.bytes[place[i]];
    }
  } else if constexpr (C == Approximation::piecewise) {
    const vi zeros = {}, bytes = in_pieces(value, f.pieces) + f.zero;
    store_first_bytes(p, smaller(larger(bytes, zeros + f.low), zeros + f.high), n);
  } else {
    store_first_bytes(p, whole_in(bent<C>(value, f.bend), f.low - f.zero, f.high - f.zero) + f.zero, n);
  }
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// 32 whole numbers of 16 bits, as two packs inside halves leave them, to bytes in their order.
TW_INLINE __m256i bytes_in_order(__m256i first, __m256i second, __m256i zero, __m256i lowest) {
  const __m256i bytes = _mm256_packus_epi16(_mm256_adds_epi16(first, zero), _mm256_adds_epi16(second, zero));
  return _mm256_permutevar8x32_epi32(_mm256_max_epu8(bytes, lowest), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
#endif

// --- numbers of 16 bits ---

// The first n numbers (n <= kLanes) as lanes; memory past them is not read.
TW_INLINE vi first_shorts(const int16_t* p, int n) {
#if defined(__AVX512F__)
  return (vi)_mm512_maskz_cvtepi16_epi32(0xffff, _mm256_maskz_loadu_epi16(lane_mask(n), p));
#else
  int16_t held[kLanes] = {};
  if (n < kLanes) {
    std::memcpy(held, p, 2 * n);
    p = held;
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

TW_INLINE void store_first_shorts(int16_t* p, vi v, int n) {
#if defined(__AVX512F__)
  _mm512_mask_cvtepi32_storeu_epi16(p, lane_mask(n), (__m512i)v);
#else
  int16_t held[kLanes];
#if defined(__AVX2__)
  const __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  if (n == kLanes) return _mm_storeu_si128(reinterpret_cast<__m128i*>(p), shorts);
  std::memcpy(held, &shorts, sizeof held);
#else
  for (int i = 0; i < kLanes; ++i) held[i] = static_cast<int16_t>(v[i]);
#endif
  std::memcpy(p, held, 2 * n);
#endif
}

TW_INLINE vf wide_curved(vf v, const Int16Stage& f) {
  switch (f.curve) {
    case Int16Activation::parabola:
      return bent<Approximation::parabola>(v, f.bend);
    case Int16Activation::hard_sigmoid:
      return at_most(at_least(v + 3.0f, splat(0.0f)), splat(6.0f)) * (1.0f / 6.0f) * f.inverse;
    case Int16Activation::sigmoid:
      return 1.0f / (1.0f + vexp_of_sum(-v)) * f.inverse;
    case Int16Activation::silu:
      return v / (1.0f + vexp_of_sum(-v)) * f.inverse;
    case Int16Activation::gelu:
      return vgelu(v) * f.inverse;
    default:
      return v;
  }
}

TW_INLINE vi int16_piecewise(vf value, const Int16Piecewise& p) {
  const vi u = whole_in(value, -32767, p.most), zeros = {};
  const vi t = high_product(smaller(larger(u, -u), zeros + p.far), zeros + p.turn) << p.shift, at = t >> 12;
  const vi d = (t & 4095) << 3;
  vi h = one_of_eight(p.c[3], at);
  for (int power = 2; power >= 0; --power) h = one_of_eight(p.c[power], at) + high_product(d, h);
  return high_product(larger(u, zeros) - high_product(h, zeros + p.round), zeros + p.step);
}

TW_INLINE void store_wide(int16_t* p, vf value, const Int16Stage& f, int n) {
  const bool pieces = f.curve == Int16Activation::piecewise;
  store_first_shorts(p, pieces ? int16_piecewise(value, f.pieces) : whole_in(wide_curved(value, f), f.low, f.high), n);
}

#if defined(__AVX2__)
// The same numbers of sixteen values at once, which are whole already and lie in 16 bits each, in any order.
struct Int16PiecewiseVectors {
  __m256i c[4], far, turn, shift, round, step, low;  // of c every byte lies one place on: see below

  explicit Int16PiecewiseVectors(const Int16Stage& f)
      : far(_mm256_set1_epi16(f.pieces.far)),
        turn(_mm256_set1_epi16(f.pieces.turn)),
        shift(_mm256_set1_epi16(static_cast<int16_t>(1 << f.pieces.shift))),
        round(_mm256_set1_epi16(f.pieces.round)),
        step(_mm256_set1_epi16(f.pieces.step)),
        low(_mm256_set1_epi16(static_cast<int16_t>(f.low))) {
    for (int i = 0; i < 4; ++i) {
      const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(f.pieces.c[i]));
      c[i] = _mm256_broadcastsi128_si256(_mm_alignr_epi8(eight, eight, 15));
    }
  }

  TW_INLINE __m256i pieces(__m256i u) const {
    // Of the least number of all, the size is one too large to have a sign.
    const __m256i t = _mm256_mullo_epi16(_mm256_mulhrs_epi16(_mm256_min_epu16(_mm256_abs_epi16(u), far), turn), shift);
    // Of the eighth i the bytes 2i + 1 and 2i + 2, of sixteen: 0x202 i + 0x201.
    const __m256i at = _mm256_mulhi_epu16(_mm256_or_si256(t, _mm256_set1_epi16(0x0fff)), _mm256_set1_epi16(0x2020));
    const __m256i d = _mm256_srli_epi16(_mm256_slli_epi16(t, 4), 1);
    __m256i h = _mm256_shuffle_epi8(c[3], at);
#pragma GCC unroll 3
    for (int power = 2; power >= 0; --power)
      h = _mm256_add_epi16(_mm256_shuffle_epi8(c[power], at), _mm256_mulhrs_epi16(d, h));
    const __m256i rest = _mm256_sub_epi16(_mm256_max_epi16(u, _mm256_setzero_si256()), _mm256_mulhrs_epi16(h, round));
    return _mm256_mulhrs_epi16(rest, step);
  }
  TW_INLINE __m256i straight(__m256i u) const { return _mm256_max_epi16(u, low); }

  // What values may be at most before they become whole.
  static float most(const Int16Stage& f) {
    return static_cast<float>(f.curve == Int16Activation::piecewise ? f.pieces.most : f.high);
  }
  // Of other curves values are bent one by one.
  static bool takes(const Int16Stage& f) {
    return f.curve == Int16Activation::none || f.curve == Int16Activation::piecewise;
  }
};
#endif

template <Approximation C>
struct KnownCurve {
  static constexpr Approximation value = C;
};

// Calls f with the curve as a constant.
template <class F>
TW_INLINE void with_curve(const Uint8Stage& finish, F&& f) {
  switch (finish.curve) {
    case Approximation::none:
      return f(KnownCurve<Approximation::none>());
    case Approximation::parabola:
      return f(KnownCurve<Approximation::parabola>());
    case Approximation::piecewise:
      return f(KnownCurve<Approximation::piecewise>());
    case Approximation::lookup_table:
      return f(KnownCurve<Approximation::lookup_table>());
  }
}

}  // namespace
}  // namespace TW_ISA
}  // namespace tw
