// The dot product of four bytes in every 32-bit lane: acc += a0 w0 + a1 w1 + a2 w2 + a3 w3, by the instructions there
// are.
//
// AVX-512 and AVX-VNNI have one for it. AVX2 has two ways to the same integers. `wide`: bytes become 16-bit numbers and
// two multiply-adds take them: any bytes, but twice the additions. `pairs`: vpmaddubsw multiplies bytes as they are and
// adds them in pairs to 16 bits, where 255 * (127 + 127) does not fit and would be cut off; it is used on activations
// that int8_split.h has made small enough for the weights at hand, or with weights that are proven small enough.
// `quads`: weights proven smaller yet, so that two such pairs are added in 16 bits before they are widened.
#pragma once

#include "kernels/int8_sums.h"

namespace tw {
namespace TW_ISA {

enum class Dot { wide, pairs, quads, vnni };  // one and the same but with AVX2

constexpr bool takes_bytes(Dot d) { return d == Dot::pairs || d == Dot::quads; }

template <Dot D>
struct Weights {  // one vector of weights: kLanes columns x 4 values
#if defined(__AVX512F__)
  __m512i v;
#elif defined(__AVX2__)
  __m256i v;
#else
  const int8_t* v;
#endif
};

template <Dot D>
struct Activations {  // four bytes of a row, in every lane
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
struct Weights<Dot::wide> {
  __m256i even, odd;
};

template <>
struct Activations<Dot::wide> {
  __m256i even, odd;
};
#endif

template <Dot D>
TW_INLINE Weights<D> load_weights(const int8_t* p) {
#if defined(__AVX512F__)
  return {_mm512_loadu_si512(p)};
#elif defined(__AVX2__)
  const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  if constexpr (D == Dot::wide) {
    return {_mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8), _mm256_srai_epi16(w, 8)};
  } else {
    return {w};
  }
#else
  return {p};
#endif
}

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
  if constexpr (D == Dot::wide) {
    return {_mm256_and_si256(a, _mm256_set1_epi16(0xff)), _mm256_srli_epi16(a, 8)};
  } else {
    return {a};
  }
#else
  return {p};
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Sums of four products, each pair of which fits into 16 bits.
TW_INLINE vi dot_of_pairs(__m256i a, __m256i w) {
  return (vi)_mm256_madd_epi16(_mm256_maddubs_epi16(a, w), _mm256_set1_epi16(1));
}

// Sums of eight products, of four each of which fit into 16 bits.
TW_INLINE vi dot_of_quads(__m256i a, __m256i w, __m256i b, __m256i x) {
  const __m256i sums = _mm256_add_epi16(_mm256_maddubs_epi16(a, w), _mm256_maddubs_epi16(b, x));
  return (vi)_mm256_madd_epi16(sums, _mm256_set1_epi16(1));
}
#endif

template <Dot D>
TW_INLINE void dot(vi& acc, const Activations<D>& a, const Weights<D>& w) {
#if defined(__AVX512F__)
  // Inline assembly because gcc 12 copies and spills accumulators around the intrinsic.
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(a.v), "v"(w.v));
#elif defined(__AVX2__)
  if constexpr (D == Dot::wide) {
    acc += (vi)_mm256_madd_epi16(a.even, w.even) + (vi)_mm256_madd_epi16(a.odd, w.odd);
  } else if constexpr (takes_bytes(D)) {
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

// acc += rows x weights over `bytes` values of K from `start` on; `w` moves on with them.
template <Dot D, int R, int V>
TW_INLINE void multiply(const uint8_t* const (&rows)[R], int64_t start, int64_t bytes, const int8_t*& w,
                        int64_t panel_bytes, vi (&acc)[R][V]) {
  int64_t left = bytes / kInt8Group, k = start;
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (D == Dot::quads) {
    static_assert(V <= kVectors, "one panel");
    for (; left >= 2; left -= 2, k += 2 * kInt8Group, w += 2 * kInt8Panel * kInt8Group) {
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
  for (; left > 0; --left, k += kInt8Group, w += kInt8Panel * kInt8Group) {
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
