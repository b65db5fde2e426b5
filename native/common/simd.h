// One vector type for all instruction sets, by the vector extensions of GCC and Clang: 16 floats with AVX-512, 8 with
// AVX2, 4 with SSE2 or NEON. Arithmetic is written with plain operators; `acc + a * b` becomes a fused multiply-add
// where the set has one. For kernel files only (it depends on TW_ISA).
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef TW_ISA
#error "simd.h is for kernel files, which are compiled once per instruction set"
#endif

#define TW_INLINE inline __attribute__((always_inline))

// Tells the compiler that a vector register may have changed, so that the loop around it is neither merged nor hoisted.
#if defined(__AVX512F__)
#define TW_KEEP(v) asm volatile("" : "+v"(v))
#elif defined(__x86_64__)
#define TW_KEEP(v) asm volatile("" : "+x"(v))
#else
#define TW_KEEP(v) asm volatile("" : "+w"(v))
#endif

namespace tw {
namespace TW_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;  // hardware: floats of a vector
#elif defined(__AVX2__)
constexpr int kLanes = 8;  // hardware: floats of a vector
#else
constexpr int kLanes = 4;  // hardware: floats of a vector
#endif

typedef float vf __attribute__((vector_size(kLanes * 4)));
typedef int32_t vi __attribute__((vector_size(kLanes * 4)));

TW_INLINE vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
// Loads a vector exactly once: the compiler may otherwise load it again for each use, and a load that straddles two
// cache lines is slow.
TW_INLINE vf load_once(const float* p) {
  vf v = load(p);
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__x86_64__)
  asm("" : "+x"(v));
#else
  asm("" : "+w"(v));
#endif
  return v;
}
TW_INLINE void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
// Copies x to all lanes.
TW_INLINE vf splat(float x) { return x - vf{}; }

// acc + a * b for loops that must round alike: without this the compiler takes a vector with missing lanes apart, and
// may fuse the operations in one loop and not in another.
#if defined(__aarch64__)
TW_INLINE vf multiply_add(vf acc, vf a, vf b) {
  return (vf)vfmaq_f32((float32x4_t)acc, (float32x4_t)a, (float32x4_t)b);
}
#else
TW_INLINE vf multiply_add(vf acc, vf a, vf b) { return acc + a * b; }
#endif

// Loads or stores the first `n` lanes (0 <= n <= kLanes); memory past them is neither read nor written.
#if defined(__AVX512F__)
TW_INLINE __mmask16 lane_mask(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
TW_INLINE vf load_first(const float* p, int n) { return (vf)_mm512_maskz_loadu_ps(lane_mask(n), p); }
TW_INLINE void store_first(float* p, vf v, int n) { _mm512_mask_storeu_ps(p, lane_mask(n), (__m512)v); }
#elif defined(__AVX2__)
TW_INLINE __m256i lane_mask(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
TW_INLINE vf load_first(const float* p, int n) { return (vf)_mm256_maskload_ps(p, lane_mask(n)); }
TW_INLINE void store_first(float* p, vf v, int n) { _mm256_maskstore_ps(p, lane_mask(n), (__m256)v); }
#else
TW_INLINE vf load_first(const float* p, int n) {
  vf v = {};
  for (int i = 0; i < n; ++i) std::memcpy(reinterpret_cast<char*>(&v) + 4 * i, p + i, 4);  // aligned or not
  return v;
}
TW_INLINE void store_first(float* p, vf v, int n) {
  for (int i = 0; i < n; ++i) std::memcpy(p + i, reinterpret_cast<const char*>(&v) + 4 * i, 4);
}
#endif

// Widens kLanes bytes to lanes of 32 bits, and stores the lowest byte of each lane. (__builtin_convertvector between
// bytes and lanes compiles to scalar code with AVX2.)
#if defined(__AVX512F__)
TW_INLINE __m128i sixteen_bytes(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
TW_INLINE vi widen_bytes(const uint8_t* p) { return (vi)_mm512_maskz_cvtepu8_epi32(0xffff, sixteen_bytes(p)); }
TW_INLINE vi widen_bytes(const int8_t* p) { return (vi)_mm512_maskz_cvtepi8_epi32(0xffff, sixteen_bytes(p)); }
TW_INLINE void store_low_bytes(void* p, vi v) { _mm512_mask_cvtepi32_storeu_epi8(p, 0xffff, (__m512i)v); }
#elif defined(__AVX2__)
TW_INLINE __m128i eight_bytes(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
TW_INLINE vi widen_bytes(const uint8_t* p) { return (vi)_mm256_cvtepu8_epi32(eight_bytes(p)); }
TW_INLINE vi widen_bytes(const int8_t* p) { return (vi)_mm256_cvtepi8_epi32(eight_bytes(p)); }
TW_INLINE void store_low_bytes(void* p, vi v) {
  const __m256i first = _mm256_set1_epi32(0x0c080400);  // of each half, its four lowest bytes come first
  const __m256i halves = _mm256_shuffle_epi8((__m256i)v, first);
  const __m128i bytes = _mm_unpacklo_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  _mm_storel_epi64(static_cast<__m128i*>(p), bytes);
}
#else
typedef uint8_t vu8 __attribute__((vector_size(kLanes)));
typedef int8_t vs8 __attribute__((vector_size(kLanes)));
TW_INLINE vi widen_bytes(const uint8_t* p) {
  vu8 bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, vi);
}
TW_INLINE vi widen_bytes(const int8_t* p) {
  vs8 bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, vi);
}
TW_INLINE void store_low_bytes(void* p, vi v) {
  const vu8 bytes = __builtin_convertvector(v, vu8);
  std::memcpy(p, &bytes, sizeof bytes);
}
#endif

TW_INLINE vf select(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
// The larger of two values, as in NumPy and PyTorch: a NaN in either operand gives NaN.
TW_INLINE vf max_nan(vf a, vf b) { return select((a > b) | (a != a), a, b); }

// Adds up the lanes pairwise, by halves.
TW_INLINE float sum_lanes(vf v) {
  float t[kLanes];
  store(t, v);
  for (int w = kLanes / 2; w > 0; w /= 2) {
    for (int i = 0; i < w; ++i) t[i] += t[i + w];
  }
  return t[0];
}

}  // namespace TW_ISA
}  // namespace tw
