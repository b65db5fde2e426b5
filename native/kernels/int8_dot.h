// The dot product of four bytes in every 32-bit lane: acc += a0 w0 + a1 w1 + a2 w2 + a3 w3.
//
// AVX-512 VNNI and AVX-VNNI have an instruction for it (vpdpbusd). AVX2 has three ways to the same integers:
//   int16: converts the bytes to int16 and uses two multiply-adds. Correct for any bytes, at twice the additions.
//   pairs: vpmaddubsw adds two byte products in 16 bits and saturates at 255 * (127 + 127). It requires activations
//   that
// int8_split.h has made small enough, or saturation-safe weights.
//   quads: adds two such pairs in 16 bits before widening them. It requires weights that are smaller still.
#pragma once

#include "kernels/int8_sums.h"

namespace tw {
namespace TW_ISA {

enum class Dot { int16, pairs, quads, vnni };  // differ only with AVX2

constexpr bool uses_maddubs(Dot d) { return d == Dot::pairs || d == Dot::quads; }

template <Dot D>
struct Weights {  // one vector of weights (kLanes columns, 4 values of K)
#if defined(__AVX512F__)
  __m512i v;
#elif defined(__AVX2__)
  __m256i v;
#else
  const int8_t* v;
#endif
};

template <Dot D>
struct Activations {  // four bytes of a row, broadcast to all lanes
#if defined(__AVX512F__)
  __m512i v;
#elif defined(__AVX2__)
  __m256i v;
#else
  const uint8_t* v;
#endif
};

#if defined(__AVX2__) && !defined(__AVX512F__)
template <>
struct Weights<Dot::int16> {
  __m256i even, odd;
};

template <>
struct Activations<Dot::int16> {
  __m256i even, odd;
};
#endif

// Loads one vector of weights; as int16, the even and the odd values separately.
template <Dot D>
TW_INLINE Weights<D> load_weights(const int8_t* p) {
#if defined(__AVX512F__)
  return {_mm512_loadu_si512(p)};
#elif defined(__AVX2__)
  const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  if constexpr (D == Dot::int16) {
    return {_mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8), _mm256_srai_epi16(w, 8)};
  } else {
    return {w};
  }
#else
  return {p};
#endif
}

// Loads four bytes of a row into every lane.
template <Dot D>
TW_INLINE Activations<D> broadcast(const uint8_t* p) {
#if defined(__AVX2__)
  int32_t four;
  std::memcpy(&four, p, 4);
#endif
#if defined(__AVX512F__)
  return {_mm512_set1_epi32(four)};
#elif defined(__AVX2__)
  const __m256i a = _mm256_set1_epi32(four);
  if constexpr (D == Dot::int16) {
    return {_mm256_and_si256(a, _mm256_set1_epi16(0xff)), _mm256_srli_epi16(a, 8)};
  } else {
    return {a};
  }
#else
  return {p};
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Four products per lane. Each pair must fit 16 bits.
TW_INLINE vi dot_of_pairs(__m256i a, __m256i w) {
  return (vi)_mm256_madd_epi16(_mm256_maddubs_epi16(a, w), _mm256_set1_epi16(1));
}

// Eight products per lane. Each two pairs must fit 16 bits together.
TW_INLINE vi dot_of_quads(__m256i a, __m256i w, __m256i b, __m256i x) {
  const __m256i sums = _mm256_add_epi16(_mm256_maddubs_epi16(a, w), _mm256_maddubs_epi16(b, x));
  return (vi)_mm256_madd_epi16(sums, _mm256_set1_epi16(1));
}
#endif

// acc += a * w, four products per lane.
template <Dot D>
TW_INLINE void dot(vi& acc, const Activations<D>& a, const Weights<D>& w) {
#if defined(__AVX512F__)
  // Inline assembly because gcc 12 copies and spills accumulators around the intrinsic.
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(a.v), "v"(w.v));
#elif defined(__AVX2__)
  if constexpr (D == Dot::int16) {
    acc += (vi)_mm256_madd_epi16(a.even, w.even) + (vi)_mm256_madd_epi16(a.odd, w.odd);
  } else if constexpr (uses_maddubs(D)) {
    acc += dot_of_pairs(a.v, w.v);
  } else {
#if defined(TW_AVX_VNNI_AS_EVEX)  // to try the path on a CPU that has the instruction in its other encoding only
    asm("vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(a.v), "x"(w.v));
#elif defined(TW_AVX_VNNI)
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(a.v), "x"(w.v));
#endif
  }
#else
  for (int i = 0; i < kLanes; ++i) {
    acc[i] += a.v[0] * w.v[4 * i] + a.v[1] * w.v[4 * i + 1] + a.v[2] * w.v[4 * i + 2] + a.v[3] * w.v[4 * i + 3];
  }
#endif
}

// The inner loop: acc += rows x weights over `bytes` values of K starting at `start`. Advances `w`.
template <Dot D, int R, int V>
TW_INLINE void multiply(const uint8_t* const (&rows)[R], int64_t start, int64_t bytes, const int8_t*& w,
                        int64_t panel_bytes, vi (&acc)[R][V]) {
  int64_t remaining = bytes / kInt8Group, k = start;
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (D == Dot::quads) {
    static_assert(V <= kVectors, "one panel");
    for (; remaining >= 2; remaining -= 2, k += 2 * kInt8Group, w += 2 * kInt8Panel * kInt8Group) {
      Weights<D> first[V], second[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        first[v] = load_weights<D>(w + v * kLanes * kInt8Group);
        second[v] = load_weights<D>(w + (kInt8Panel + v * kLanes) * kInt8Group);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const Activations<D> a = broadcast<D>(rows[r] + k), b = broadcast<D>(rows[r] + k + kInt8Group);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) acc[r][v] += dot_of_quads(a.v, first[v].v, b.v, second[v].v);
      }
    }
  }
#endif
  for (; remaining > 0; --remaining, k += kInt8Group, w += kInt8Panel * kInt8Group) {
    Weights<D> weights[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      weights[v] = load_weights<D>(w + (v / kVectors) * panel_bytes + (v % kVectors) * kLanes * kInt8Group);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Activations<D> a = broadcast<D>(rows[r] + k);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) dot<D>(acc[r][v], a, weights[v]);
    }
  }
}

}  // namespace TW_ISA
}  // namespace tw
