// Vector exp, erf and GELU, with one lane type for all instruction sets (common/simd.h). Each function does one range
// reduction and one polynomial or rational fit (our own, minimax in relative error). Lanes never branch; NaN and
// infinity give what the C library gives. For kernel files only.
#pragma once

#include "common/simd.h"

namespace tw {
namespace TW_ISA {

typedef uint32_t vu __attribute__((vector_size(kLanes * 4)));

// Like the machine instruction: if either operand is NaN the result is the second, so `vmin(limit, x)` keeps a NaN in
// x.
#if defined(__AVX512F__)  // maskz with all lanes: the same instruction, without gcc's warning about an undefined source
TW_INLINE vf vmax(vf a, vf b) { return (vf)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b); }
TW_INLINE vf vmin(vf a, vf b) { return (vf)_mm512_maskz_min_ps(0xffff, (__m512)a, (__m512)b); }
TW_INLINE vf vsqrt(vf a) { return (vf)_mm512_maskz_sqrt_ps(0xffff, (__m512)a); }
#elif defined(__AVX2__)
TW_INLINE vf vmax(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
TW_INLINE vf vmin(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
TW_INLINE vf vsqrt(vf a) { return (vf)_mm256_sqrt_ps((__m256)a); }
#elif defined(__x86_64__)
TW_INLINE vf vmax(vf a, vf b) { return (vf)_mm_max_ps((__m128)a, (__m128)b); }
TW_INLINE vf vmin(vf a, vf b) { return (vf)_mm_min_ps((__m128)a, (__m128)b); }
TW_INLINE vf vsqrt(vf a) { return (vf)_mm_sqrt_ps((__m128)a); }
#else
TW_INLINE vf vmax(vf a, vf b) { return select(a > b, a, b); }
TW_INLINE vf vmin(vf a, vf b) { return select(a < b, a, b); }
TW_INLINE vf vsqrt(vf a) {
  vf r;
  for (int i = 0; i < kLanes; ++i) r[i] = __builtin_sqrtf(a[i]);
  return r;
}
#endif

TW_INLINE float max_lanes(vf v) {
  float t[kLanes];
  store(t, v);
  for (int w = kLanes / 2; w > 0; w /= 2) {
    for (int i = 0; i < w; ++i) t[i] = t[i] > t[i + w] ? t[i] : t[i + w];
  }
  return t[0];
}

// Returns p * 2^n for integral n in [-150, 128], rounded once where the result is denormal. `n_plus_magic` is n + 1.5 *
// 2^23, whose low bits are n.
TW_INLINE vf scale_by_power(vf p, vf n, vf n_plus_magic) {
#if defined(__AVX512F__)
  (void)n_plus_magic;
  return (vf)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)n);
#else
  (void)n;
  const vi i = (vi)((vu)n_plus_magic - 0x4b400000u);
  const vi half = i >> 1;
  const vf first = (vf)(((vu)half + 127u) << 23);
  const vf second = (vf)(((vu)i - (vu)half + 127u) << 23);
  return p * first * second;
#endif
}

// exp(x) = 2^n * exp(r), |r| <= ln(2) / 2. Within 1 ulp; 0 below -104, infinity above 88.73.
TW_INLINE vf vexp(vf x) {
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer held in the low bits
  x = vmax(splat(-104.0f), vmin(splat(89.0f), x));
  const vf shifted = x * 1.44269504088896341f + magic;
  const vf n = shifted - magic;
  vf r = x - n * 0.693359375f;  // ln 2 as a sum of two constants: n times the first is exact
  r = r + n * 2.12194442e-4f;
  vf p = splat(1.39264006e-3f);
  p = p * r + 8.36335309e-3f;
  p = p * r + 4.16665524e-2f;
  p = p * r + 1.66665763e-1f;
  p = p * r + 0.5f;
  p = p * (r * r) + (r + 1.0f);
  return scale_by_power(p, n, shifted);
}

// exp(x) for use in 1 + exp(x): results below 2^-126 may flush to 0, so that scaling by one power of two suffices;
// infinite from 88.4 on. Within 4 ulp.
TW_INLINE vf vexp_of_sum(vf x) {
  const vf magic = splat(12582912.0f);
  x = vmax(splat(-87.0f), vmin(splat(89.0f), x));
  const vf shifted = x * 1.44269504088896341f + magic;
  const vf r = x - (shifted - magic) * 0.693147180559945309f, square = r * r;
  const vf high = 8.31253e-3f * r + 4.189011e-2f, low = 1.6667114e-1f * r + 0.4999923f;
  const vf p = (high * square + low) * square + (r + 1.0f);
  return p * (vf)(((vu)shifted << 23) + 0x3f800000u);
}

// erf(x) = x * P(x^2) / Q(x^2) up to 4, from where it is exactly 1: GELU of a large negative number must be 0, not a
// rounding error times that number. Error below 4e-7.
TW_INLINE vf verf(vf x) {
  x = vmax(splat(-4.0f), vmin(splat(4.0f), x));
  const vf t = x * x;
  vf p = splat(2.04631510e-6f);
  p = p * t + 2.84789654e-4f;
  p = p * t + 3.77045455e-3f;
  p = p * t + 5.27628623e-2f;
  p = p * t + 1.90545887e-1f;
  p = p * t + 1.12837911f;
  vf q = splat(3.80479178e-5f);
  q = q * t + 1.16333587e-3f;
  q = q * t + 1.49790263e-2f;
  q = q * t + 1.14162832e-1f;
  q = q * t + 5.02199650e-1f;
  q = q * t + 1.0f;
  return vmax(splat(-1.0f), vmin(splat(1.0f), select(t == 16.0f, x * 0.25f, x * p / q)));
}

// x * Phi(x), the exact (erf) form.
TW_INLINE vf vgelu(vf x) { return x * (0.5f + 0.5f * verf(x * 0.707106781186547524f)); }

// GELU's tanh approximation, as in GPT-2: x / 2 * (1 + tanh u) = x / (1 + exp(-2 u)).
TW_INLINE vf vgelu_tanh(vf x) {
  const vf u = 0.797884560802865356f * (x + 0.044715f * x * x * x);
  return x / (1.0f + vexp(-2.0f * u));
}

// d/dx vgelu(x) = Phi(x) + x * phi(x).
TW_INLINE vf vgelu_slope(vf x) {
  const vf cdf = 0.5f + 0.5f * verf(x * 0.707106781186547524f);
  const vf inside = vmax(splat(-30.0f), vmin(splat(30.0f), x));  // phi underflows beyond; keeps infinity * 0 away
  return cdf + inside * (vexp(inside * inside * -0.5f) * 0.398942280401432678f);
}

}  // namespace TW_ISA
}  // namespace tw
