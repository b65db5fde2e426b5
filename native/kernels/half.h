// Converts float16 to float32 and back, by instruction where there is one. For kernel files only.
#pragma once

#include "common/simd.h"

namespace tw {
namespace TW_ISA {

#if !defined(__AVX2__)
// Converts one float16: infinity and NaN, normal numbers, then subnormal ones.
TW_INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, exponent = h >> 10 & 31u, mantissa = h & 0x3ffu;
  uint32_t bits;
  if (exponent == 31u) {
    bits = sign | 0x7f800000u | mantissa << 13;
  } else if (exponent != 0u) {
    bits = sign | (exponent + 112u) << 23 | mantissa << 13;
  } else {
    const float small = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // mantissa * 2^-24
    std::memcpy(&bits, &small, 4);
    bits |= sign;
  }
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// Rounds one float to float16, ties to even. NaN becomes a quiet NaN.
TW_INLINE uint16_t float_to_half(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
  if (magnitude < 0x38800000u) {  // below the smallest normal half: let the addition round to a multiple of 2^-24
    float m;
    std::memcpy(&m, &magnitude, 4);
    const float rounded = m + 0.5f;
    uint32_t r;
    std::memcpy(&r, &rounded, 4);
    return static_cast<uint16_t>(sign | (r - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}
#endif

TW_INLINE vf load_half(const uint16_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  vf v;
  for (int i = 0; i < kLanes; ++i) v[i] = half_to_float(p[i]);
  return v;
#endif
}

// Stores a vector as float16, rounded to nearest even.
TW_INLINE void store_half(uint16_t* p, vf v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtps_ph(0xffff, (__m512)v, 0));
#elif defined(__AVX2__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, 0));
#else
  for (int i = 0; i < kLanes; ++i) p[i] = float_to_half(v[i]);
#endif
}

}  // namespace TW_ISA
}  // namespace tw
